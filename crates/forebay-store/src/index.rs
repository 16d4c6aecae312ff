//! The index in RAM: where the newest record of each key lies. 40 bytes an entry, in sharded hash
//! tables.
//!
//! A table holds the entries themselves, keyed by the 128-bit hash in each; names stay on disk and
//! are compared after the read. A shard's lock is held for lookups and changes only, never during
//! disk I/O.
//!
//! Invariant: while an entry is in the table, its segment is in [`Segments`]: the evictor takes a
//! segment's entries out before it frees the slot. So [`Index::locate`], which takes the segment
//! under the shard's lock, always finds the right file.

use crate::{
    segment::{Segment, Segments},
    sync::{Mutex, MutexGuard},
};
use hashbrown::HashTable;
use std::sync::Arc;

const SHARDS: usize = 256;
const SLOT_BITS: u32 = 24;
/// Segments that may exist at the same time.
pub const SLOTS_MAX: usize = 1 << SLOT_BITS;

/// Read since it was written: the evictor gives it a second round.
pub const VISITED: u32 = 1 << 24;
/// The head of a pinned name.
pub const PINNED: u32 = 1 << 25;
/// The object's bytes are in the head record.
pub const INLINE: u32 = 1 << 26;
/// A newer record of this key already has its place in the log: this one must not be copied behind
/// it.
pub const SUPERSEDED: u32 = 1 << 27;
/// A head record.
pub const HEAD: u32 = 1 << 28;
/// A pin record.
pub const PIN: u32 = 1 << 29;
/// Only during recovery: the key ends here.
pub const TOMBSTONE: u32 = 1 << 30;

#[derive(Clone, Copy, Debug)]
pub struct Entry {
    key: [u64; 2],
    pub seq: u64,
    slot_and_flags: u32,
    offset_units: u32,
    /// Bytes of the record without padding.
    pub len: u32,
    pub validated_at: u32,
}

impl Entry {
    pub fn new(
        key: u128,
        seq: u64,
        slot: u32,
        offset: u64,
        len: u32,
        validated_at: u32,
        flags: u32,
    ) -> Self {
        assert!(slot < SLOTS_MAX as u32 && offset.is_multiple_of(64));
        Entry {
            key: split(key),
            seq,
            slot_and_flags: slot | flags,
            offset_units: (offset / 64) as u32,
            len,
            validated_at,
        }
    }

    pub fn key(&self) -> u128 {
        (self.key[0] as u128) << 64 | self.key[1] as u128
    }

    pub fn slot(&self) -> u32 {
        self.slot_and_flags & (SLOTS_MAX as u32 - 1)
    }

    pub fn offset(&self) -> u64 {
        self.offset_units as u64 * 64
    }

    pub fn has(&self, flag: u32) -> bool {
        self.slot_and_flags & flag != 0
    }

    pub fn set(&mut self, flag: u32) {
        self.slot_and_flags |= flag;
    }

    pub fn clear(&mut self, flag: u32) {
        self.slot_and_flags &= !flag;
    }

    pub fn flags(&self) -> u32 {
        self.slot_and_flags & !(SLOTS_MAX as u32 - 1)
    }

    pub fn is_at(&self, slot: u32, offset: u64) -> bool {
        self.slot() == slot && self.offset() == offset
    }

    pub fn move_to(&mut self, slot: u32, offset: u64) {
        self.slot_and_flags = slot | self.flags();
        self.offset_units = (offset / 64) as u32;
    }

    pub fn padded(&self) -> u64 {
        crate::record::padded(self.len as u64)
    }
}

fn split(key: u128) -> [u64; 2] {
    [(key >> 64) as u64, key as u64]
}

#[derive(Default)]
struct Table {
    entries: HashTable<Entry>,
    /// Records of these keys have a place in the log and are being written. Only a handful: one for
    /// each writing thread.
    writing: Vec<Writing>,
}

struct Writing {
    key: u128,
    seq: u64,
    dir: usize,
    cancelled: bool,
}

/// One shard, locked.
pub struct Shard<'a>(MutexGuard<'a, Table>);

impl Shard<'_> {
    pub fn get(&mut self, key: u128) -> Option<&mut Entry> {
        let k = split(key);
        self.0.entries.find_mut(k[1], |e| e.key == k)
    }

    /// A record of `key` got its place: the previous one must not be copied behind it.
    pub fn begin_write(&mut self, key: u128, seq: u64, dir: usize) {
        if let Some(entry) = self.get(key) {
            entry.set(SUPERSEDED);
        }
        self.0.writing.push(Writing {
            key,
            seq,
            dir,
            cancelled: false,
        });
    }

    /// Ends what [`begin_write`](Self::begin_write) began. `false`: the key was removed meanwhile,
    /// so the record must not be published.
    pub fn end_write(&mut self, key: u128, seq: u64) -> bool {
        match self
            .0
            .writing
            .iter()
            .position(|w| w.key == key && w.seq == seq)
        {
            Some(at) => !self.0.writing.swap_remove(at).cancelled,
            None => false,
        }
    }

    /// Directories where records of `key` are being written.
    pub fn writing_dirs(&self, key: u128) -> impl Iterator<Item = usize> {
        self.0
            .writing
            .iter()
            .filter(move |w| w.key == key)
            .map(|w| w.dir)
    }

    /// Prevents records of `key` that are being written to `dir` from being published.
    pub fn cancel_writes(&mut self, key: u128, dir: usize) {
        for w in self
            .0
            .writing
            .iter_mut()
            .filter(|w| w.key == key && w.dir == dir)
        {
            w.cancelled = true;
        }
    }

    /// Puts `entry` in place of any other entry of its key, and returns that one.
    pub fn insert(&mut self, entry: Entry) -> Option<Entry> {
        if let Some(old) = self
            .0
            .entries
            .find_mut(entry.key[1], |e| e.key == entry.key)
        {
            return Some(std::mem::replace(old, entry));
        }
        self.0
            .entries
            .insert_unique(entry.key[1], entry, |e| e.key[1]);
        None
    }

    pub fn remove(&mut self, key: u128) -> Option<Entry> {
        let k = split(key);
        self.0
            .entries
            .find_entry(k[1], |e| e.key == k)
            .ok()
            .map(|found| found.remove().0)
    }

    /// Removes the entry of `key` if `condition` holds.
    pub fn remove_if(
        &mut self,
        key: u128,
        condition: impl FnOnce(&Entry) -> bool,
    ) -> Option<Entry> {
        if condition(self.get(key)?) {
            self.remove(key)
        } else {
            None
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.0.entries.iter()
    }

    pub fn retain(&mut self, f: impl FnMut(&mut Entry) -> bool) {
        self.0.entries.retain(f);
    }

    pub fn reserve(&mut self, additional: usize) {
        self.0.entries.reserve(additional, |e| e.key[1]);
    }
}

pub struct Index {
    shards: Box<[Mutex<Table>]>,
}

impl Index {
    pub fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
        }
    }

    pub fn shard(&self, key: u128) -> Shard<'_> {
        Shard(self.shards[(key >> 120) as usize % SHARDS].lock())
    }

    pub fn shards(&self) -> impl Iterator<Item = Shard<'_>> {
        self.shards.iter().map(|s| Shard(s.lock()))
    }

    pub fn peek(&self, key: u128) -> Option<Entry> {
        self.shard(key).get(key).copied()
    }

    /// The entry and its segment; marks the entry as visited.
    pub fn locate(&self, key: u128, segments: &Segments) -> Option<(Entry, Arc<Segment>)> {
        let mut shard = self.shard(key);
        let entry = shard.get(key)?;
        entry.set(VISITED);
        Some((*entry, segments.get(entry.slot())?))
    }

    pub fn len(&self) -> usize {
        self.shards.iter().map(|s| s.lock().entries.len()).sum()
    }

    /// Bytes that the tables take.
    pub fn ram_bytes(&self) -> usize {
        self.shards
            .iter()
            .map(|s| s.lock().entries.allocation_size())
            .sum()
    }

    pub fn reserve(&self, entries: usize) {
        for mut shard in self.shards() {
            shard.reserve(entries / SHARDS + entries / SHARDS / 16);
        }
    }
}
