//! The index of a directory, written out: a restart loads it instead of reading the log from its
//! beginning.
//!
//! ```text
//! magic, format, directory id, distrust mark, next sequence number, replay ordinal, replay offset, segments n, entries m
//! n × (ordinal u64, tombstone bytes u64)
//! m × (key u128, seq u64, segment u24 | flags u8, offset / 64 u32, length u32, validated at u32)
//! xxh3 of all before
//! ```
//!
//! It is written beside the old one, synced and renamed. It is not a snapshot: writers go on
//! meanwhile. That is correct because the replay position is taken first (before any record that
//! has a place but no entry yet): whatever happens later comes after it in the log.

use crate::{
    dir::{Class, Directory},
    disk::OpenMode,
    index::{Entry, HEAD, INLINE, PIN, PINNED, SLOTS_MAX, VISITED},
    inner::Inner,
    segment::Segment,
    sync::atomic::Ordering::Relaxed,
};
use bytes::{Buf, BufMut};
use forebay_core::Result;
use std::{collections::HashMap, io, ops::Range, path::Path, sync::Arc};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

pub const FILE: &str = "checkpoint";
pub const TMP: &str = "checkpoint.tmp";
const MAGIC: u64 = u64::from_le_bytes(*b"FBRCKPT3");
const HEADER_BYTES: u64 = 8 * 8;
const SEGMENT_BYTES: u64 = 16;
const ENTRY_BYTES: u64 = 40;
const TRAILER_BYTES: u64 = 8;
const BUFFER_BYTES: usize = 1 << 20;
/// What is read at a time.
const PIECE_BYTES: u64 = 1 << 20;
/// Flags that outlive a restart.
const KEPT_FLAGS: u32 = HEAD | INLINE | PIN | PINNED | VISITED;
/// A checkpoint may take this share of the capacity; if records are so small that it would take
/// more, a restart reads the log instead.
const SHARE: u64 = 8;

impl Inner {
    /// Writes out the index of every directory.
    pub fn checkpoint(&self) -> Result<()> {
        let _guard = self.checkpointing.lock();
        let mut result = Ok(());
        for dir in &self.dirs {
            let seen = dir.seen();
            let written = match self.checkpoint_dir(dir) {
                Err(_) if self.relieve(dir, seen) => self.checkpoint_dir(dir),
                done => done,
            };
            if let Err(e) = written {
                result = Err(e);
            }
        }
        result
    }

    fn checkpoint_dir(&self, dir: &Directory) -> Result<()> {
        let old_bytes = dir.state.lock().checkpoint_bytes;
        let records: u64 = dir
            .state
            .lock()
            .segments
            .values()
            .map(|s| s.live_records.load(Relaxed))
            .sum();
        let entries_max = records + records / 16 + 256;
        let segments_max = dir.state.lock().segments.len() as u64 + 64;
        let claim =
            HEADER_BYTES + segments_max * SEGMENT_BYTES + entries_max * ENTRY_BYTES + TRAILER_BYTES;
        if claim > dir.capacity / SHARE {
            // The older one, if any, stays: it is still correct, only the replay is longer.
            tracing::info!(dir = %dir.path.display(), bytes = claim, "the index is too large to be written into this cache; a restart reads the records instead");
            return Ok(());
        }
        self.claim(dir, claim, Class::Normal)?;
        let (replay, segments) = dir.replay_from();
        let tmp = dir.path.join(TMP);
        let written = if segments.len() as u64 > segments_max {
            Err(io::Error::other("too many new segments"))
        } else {
            self.write_checkpoint(dir, &tmp, replay, &segments, entries_max)
        };
        let written = written.and_then(|bytes| {
            dir.disk.rename(&tmp, &dir.path.join(FILE))?;
            Ok(bytes)
        });
        match written {
            Ok(bytes) => {
                let mut state = dir.state.lock();
                state.used -= claim - bytes + old_bytes;
                state.checkpoint_bytes = bytes;
                drop(state);
                // If a power cut loses the new name, the old checkpoint is still there.
                dir.disk
                    .sync_dir(&dir.path)
                    .map_err(|e| dir.write_failed(e, self.now()).context("checkpoint"))
            }
            Err(e) => {
                match dir.disk.delete(&tmp) {
                    Err(gone) if gone.kind() != io::ErrorKind::NotFound => {
                        tracing::warn!(file = %tmp.display(), error = %gone, "a half-written checkpoint could not be deleted; its space stays charged");
                    }
                    _ => dir.unclaim(claim),
                }
                Err(dir.write_failed(e, self.now()).context("checkpoint"))
            }
        }
    }

    fn write_checkpoint(
        &self,
        dir: &Directory,
        path: &Path,
        replay: (u64, u64),
        segments: &[Arc<Segment>],
        entries_max: u64,
    ) -> io::Result<u64> {
        // In RAM first: the count precedes the entries, and a shard's entries are read under its
        // lock.
        let numbers: HashMap<u32, u32> = segments
            .iter()
            .enumerate()
            .map(|(i, s)| (s.slot, i as u32))
            .collect();
        let file = dir.disk.open(path, OpenMode::Create)?;
        let mut out = Output {
            file: &*file,
            buffer: Vec::with_capacity(BUFFER_BYTES + 4096),
            at: HEADER_BYTES,
            hash: Xxh3::new(),
        };
        for s in segments {
            out.buffer.put_u64_le(s.ordinal);
            out.buffer.put_u64_le(s.tombstone_bytes.load(Relaxed));
        }
        let mut entries = 0u64;
        let mut batch = Vec::new();
        for shard in self.index.shards() {
            batch.clear();
            batch.extend(
                shard
                    .iter()
                    .filter(|e| numbers.contains_key(&e.slot()))
                    .copied(),
            );
            drop(shard);
            for e in &batch {
                out.buffer.put_u128_le(e.key());
                out.buffer.put_u64_le(e.seq);
                out.buffer
                    .put_u32_le(numbers[&e.slot()] | (e.flags() & KEPT_FLAGS));
                out.buffer.put_u32_le((e.offset() / 64) as u32);
                out.buffer.put_u32_le(e.len);
                out.buffer.put_u32_le(e.validated_at);
                entries += 1;
                if out.buffer.len() >= BUFFER_BYTES {
                    out.flush()?;
                }
            }
            if entries > entries_max {
                return Err(io::Error::other("the index grew too fast to be written"));
            }
        }
        out.flush()?;
        let mut header = Vec::with_capacity(HEADER_BYTES as usize);
        header.put_u64_le(MAGIC);
        header.put_u64_le(dir.id);
        header.put_u64_le(dir.identity.lock().distrust_below);
        header.put_u64_le(self.seq.load(Relaxed));
        header.put_u64_le(replay.0);
        header.put_u64_le(replay.1);
        header.put_u64_le(segments.len() as u64);
        header.put_u64_le(entries);
        let Output { at, mut hash, .. } = out;
        hash.update(&header);
        file.write_all_at(&[&header], 0)?;
        file.write_all_at(&[&hash.digest().to_le_bytes()], at)?;
        file.sync()?;
        Ok(at + TRAILER_BYTES)
    }
}

struct Output<'a> {
    file: &'a dyn crate::disk::DiskFile,
    buffer: Vec<u8>,
    at: u64,
    hash: Xxh3,
}

impl Output<'_> {
    fn flush(&mut self) -> io::Result<()> {
        self.hash.update(&self.buffer);
        self.file.write_all_at(&[&self.buffer], self.at)?;
        self.at += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

/// A checkpoint's contents besides its entries.
pub struct Loaded {
    pub distrust_below: u64,
    pub next_seq: u64,
    pub replay: (u64, u64),
}

/// Loads a checkpoint: calls `reserve` with the number of entries, then `add` with each entry whose
/// segment is still there, and with whether its validation time already respects the directory's
/// distrust mark. `Ok(None)`: there is none, or it is damaged.
///
/// The file is read twice, a piece at a time, because with many entries it is half as large as the
/// index: once to check the checksum of all, once for the contents. Nothing is added before the
/// whole file was found intact, and nothing that reads differently the second time.
pub fn load(
    dir: &crate::recover::Found,
    mut add: impl FnMut(Entry, bool),
    mut reserve: impl FnMut(usize),
) -> io::Result<Option<Loaded>> {
    let file = match dir.disk.open(&dir.path.join(FILE), OpenMode::Read) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let size = file.size()?;
    if size < HEADER_BYTES + TRAILER_BYTES {
        return Ok(None);
    }
    let mut bytes = Vec::with_capacity(PIECE_BYTES as usize);
    let read = |out: &mut Vec<u8>, range: Range<u64>| {
        out.clear();
        file.read_append(out, (range.end - range.start) as usize, range.start)
    };
    let mut first = Vec::new();
    read(&mut first, 0..HEADER_BYTES)?;
    let mut header = &first[..];
    let (magic, id) = (header.get_u64_le(), header.get_u64_le());
    let loaded = Loaded {
        distrust_below: header.get_u64_le(),
        next_seq: header.get_u64_le(),
        replay: (header.get_u64_le(), header.get_u64_le()),
    };
    let (segments, entries) = (header.get_u64_le(), header.get_u64_le());
    let table_end = segments
        .checked_mul(SEGMENT_BYTES)
        .and_then(|n| n.checked_add(HEADER_BYTES));
    let entries_end = table_end
        .zip(entries.checked_mul(ENTRY_BYTES))
        .and_then(|(a, b)| a.checked_add(b));
    let (Some(table_end), Some(entries_end)) = (table_end, entries_end) else {
        return Ok(None);
    };
    if magic != MAGIC || id != dir.identity.id || entries_end != size - TRAILER_BYTES {
        return Ok(None);
    }
    let pieces = || {
        pieces(HEADER_BYTES..table_end, SEGMENT_BYTES)
            .chain(pieces(table_end..entries_end, ENTRY_BYTES))
    };
    let (mut hash, mut hashes) = (Xxh3::new(), Vec::new());
    for range in pieces() {
        read(&mut bytes, range)?;
        hash.update(&bytes);
        hashes.push(xxh3_64(&bytes));
    }
    hash.update(&first);
    read(&mut bytes, entries_end..size)?;
    if bytes != hash.digest().to_le_bytes() {
        return Ok(None);
    }

    let settled = loaded.distrust_below == dir.identity.distrust_below;
    let (mut table, mut tombstones) = (Vec::with_capacity(segments as usize), Vec::new());
    reserve(entries as usize);
    for (range, hash) in pieces().zip(hashes) {
        let in_table = range.end <= table_end;
        read(&mut bytes, range)?;
        if xxh3_64(&bytes) != hash {
            return Err(io::Error::other("the file reads differently each time"));
        }
        let mut rest = &bytes[..];
        while in_table && rest.has_remaining() {
            let (ordinal, tombstone_bytes) = (rest.get_u64_le(), rest.get_u64_le());
            let segment = dir.segments.get(&ordinal);
            tombstones.extend(segment.map(|s| (s, tombstone_bytes)));
            table.push(segment);
        }
        while rest.has_remaining() {
            if let Some(entry) = entry_of(&mut rest, &table) {
                add(entry, settled);
            }
        }
    }
    for (segment, bytes) in tombstones {
        segment.tombstone_bytes.store(bytes, Relaxed);
    }
    Ok(Some(loaded))
}

/// `range` in pieces of whole records.
fn pieces(range: Range<u64>, record_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let step = PIECE_BYTES / record_bytes * record_bytes;
    (range.start..range.end)
        .step_by(step as usize)
        .map(move |from| from..range.end.min(from + step))
}

/// The next entry, if its segment is still there and long enough.
fn entry_of(rest: &mut &[u8], table: &[Option<&Arc<Segment>>]) -> Option<Entry> {
    let key = rest.get_u128_le();
    let seq = rest.get_u64_le();
    let number_and_flags = rest.get_u32_le();
    let offset = rest.get_u32_le() as u64 * 64;
    let len = rest.get_u32_le();
    let validated_at = rest.get_u32_le();
    let segment = (*table.get((number_and_flags & (SLOTS_MAX as u32 - 1)) as usize)?)?;
    let inside = offset + len as u64 <= segment.end.load(Relaxed);
    inside.then(|| {
        Entry::new(
            key,
            seq,
            segment.slot,
            offset,
            len,
            validated_at,
            number_and_flags & KEPT_FLAGS,
        )
    })
}
