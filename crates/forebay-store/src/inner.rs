//! The write path: a record gets space, a place, its bytes, and then an entry in the index.
//!
//! 1. *Claim* the space in a directory, evicting if needed ([`Inner::claim`]).
//! 2. *Place*: under the lock of the key's shard, take the end of the log and a sequence number.
//! 3. *Write* with no lock held.
//! 4. *Publish*: under the shard's lock again, replace the key's entry.
//!
//! Invariant: in the log of each directory, the records of a key lie in the order of their sequence
//! numbers (copies that the evictor makes included, because it, too, takes places under the shard's
//! lock, and never for an entry that a newer record is about to replace). So whichever of the
//! oldest segments are gone, the newest record that is left, or a tombstone behind it, tells the
//! truth about the key.

use crate::{
    advice::{Advisor, cached_of},
    config::StoreConfig,
    dir::{Class, Directory, Placed, too_large},
    index::{Entry, HEAD, Index, PIN, Shard},
    pins::Pins,
    record::{self, HEADER_BYTES, Header, Kind, NewRecord, padded},
    segment::Segments,
    sources::Salts,
    sync::{
        Mutex, RwLock, RwLockReadGuard,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use forebay_core::{Clock, Error, ErrorKind, ObjectName, Result};
use std::sync::Arc;

pub struct Inner {
    /// Who this node is in a cluster.
    pub node: Option<u64>,
    pub config: StoreConfig,
    pub clock: Arc<dyn Clock>,
    pub dirs: Vec<Directory>,
    pub index: Index,
    pub segments: Segments,
    pub pins: Pins,
    pub seq: AtomicU64,
    pub ordinals: AtomicU64,
    /// Whether the store is closed. Writers hold it for reading, so that closing waits for them.
    pub closed: RwLock<bool>,
    /// Held by the thread that writes checkpoints.
    pub checkpointing: Mutex<()>,
    pub advisor: RwLock<Option<Arc<dyn Advisor>>>,
    pub salts: Arc<Salts>,
}

/// What a removal found.
#[derive(Clone, Copy, Debug, Default)]
pub struct Removed {
    pub existed: bool,
    pub bytes: u64,
}

impl Inner {
    /// The key of the head of `name`.
    pub fn head_key(&self, name: &ObjectName) -> u128 {
        self.salts.head_key(name.bucket(), name.hash128())
    }

    pub fn now(&self) -> u32 {
        self.clock.now_secs()
    }

    pub fn retry_after_secs(&self) -> u32 {
        self.config.retry_after.as_secs().min(u32::MAX as u64) as u32
    }

    pub fn open_for_writes(&self) -> Result<RwLockReadGuard<'_, bool>> {
        let guard = self.closed.read();
        if *guard {
            return Err(Error::new(ErrorKind::ShuttingDown, "the cache is closed"));
        }
        Ok(guard)
    }

    /// Directories for a key, the preferred one first: weighted rendezvous hashing, so that adding
    /// or removing a directory moves as little as possible.
    fn candidates(&self, key: u128) -> Vec<&Directory> {
        let mut dirs: Vec<_> = self.dirs.iter().collect();
        if dirs.len() > 1 {
            let score = |d: &&Directory| {
                let hash = xxhash_rust::xxh3::xxh3_64_with_seed(&key.to_le_bytes(), d.id);
                let unit = ((hash >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
                -(d.capacity as f64) / unit.ln()
            };
            dirs.sort_by(|a, b| score(b).total_cmp(&score(a)));
        }
        dirs
    }

    /// Writes a record to the best directory that takes it. If none does, an older record of the
    /// key is dropped too: it is outdated.
    pub fn append(&self, record: &NewRecord<'_>, flags: u32) -> Result<()> {
        let mut last: Option<Error> = None;
        for dir in self.candidates(record.key) {
            if !dir.may_write(self.now(), self.retry_after_secs()) {
                last.get_or_insert_with(|| Self::resting(dir));
                continue;
            }
            match self.append_to(dir, record, flags) {
                Ok(()) => return Ok(()),
                Err(e) => last = Some(e),
            }
        }
        self.bury(record.key, record.bucket, record.object_key);
        Err(last.unwrap_or_else(|| Error::internal("the cache has no directory")))
    }

    /// The directory that a record of this key goes to.
    pub fn home_of(&self, key: u128) -> Option<&Directory> {
        let (now, retry) = (self.now(), self.retry_after_secs());
        let candidates = self.candidates(key);
        candidates.into_iter().find(|dir| dir.may_write(now, retry))
    }

    /// Writes a record only if there is room to spare for it. `false`: there is none. Nothing else
    /// goes for it.
    pub fn offer(&self, record: &NewRecord<'_>, flags: u32) -> Result<bool> {
        let len = padded(record.len());
        match self.home_of(record.key) {
            Some(dir) if len <= dir.segment_bytes && dir.try_claim(len, Class::Spare) => {
                self.append_claimed(dir, record, flags).map(|()| true)
            }
            _ => Ok(false),
        }
    }

    pub fn resting(dir: &Directory) -> Error {
        Error::internal(format!(
            "cache directory {} is {}",
            dir.path.display(),
            dir.health().as_str()
        ))
        .hint("the node tries it again soon; the log says what failed")
    }

    /// Writes a record to `dir`, or fails. If the file system has no room for it, room is made
    /// once.
    pub fn append_to(&self, dir: &Directory, record: &NewRecord<'_>, flags: u32) -> Result<()> {
        let seen = dir.seen();
        match self.append_once(dir, record, flags) {
            Err(_) if self.relieve(dir, seen) => self.append_once(dir, record, flags),
            done => done,
        }
    }

    fn append_once(&self, dir: &Directory, record: &NewRecord<'_>, flags: u32) -> Result<()> {
        let len = record.len();
        if padded(len) > dir.segment_bytes {
            return Err(too_large(len, dir.segment_bytes));
        }
        self.claim(dir, padded(len), Class::Normal)?;
        self.append_claimed(dir, record, flags)
    }

    fn append_claimed(&self, dir: &Directory, record: &NewRecord<'_>, flags: u32) -> Result<()> {
        let len = record.len();
        let mut prefix = record.prefix();
        let placed = self.place(dir, padded(len), || {
            let mut shard = self.index.shard(record.key);
            let placed = dir.place(padded(len), || self.seq.fetch_add(1, Relaxed))?;
            shard.begin_write(record.key, placed.seq, dir.index);
            Some(placed)
        })?;
        let bytes = prefix.seal(placed.seq, placed.segment.place(placed.offset));
        let written = placed
            .segment
            .file
            .write_all_at(&[bytes, record.data], placed.offset);
        let result = match written {
            Ok(()) => {
                dir.counters.written_bytes.fetch_add(len, Relaxed);
                let entry = Entry::new(
                    record.key,
                    placed.seq,
                    placed.segment.slot,
                    placed.offset,
                    len as u32,
                    record.validated_at,
                    flags,
                );
                self.publish(entry, &placed, record);
                if self.advisor().is_some() {
                    let name = &bytes[HEADER_BYTES
                        ..HEADER_BYTES + record.bucket.len() + 1 + record.object_key.len()];
                    if let Some(cached) = cached_of(
                        &dir.salts,
                        record.kind,
                        record.key,
                        record.version,
                        name,
                        record.meta,
                    ) {
                        placed
                            .segment
                            .samples
                            .lock()
                            .note(cached, padded(len), placed.seq);
                    }
                }
                self.write_succeeded(dir);
                Ok(())
            }
            Err(e) => {
                self.index
                    .shard(record.key)
                    .end_write(record.key, placed.seq);
                Err(self.write_failed(dir, &placed, e))
            }
        };
        dir.finish(&placed);
        result
    }

    /// A write failed, but the record may be there all the same, or a later write may complete it:
    /// makes it unreadable.
    pub fn write_failed(&self, dir: &Directory, placed: &Placed, e: std::io::Error) -> Error {
        let error = dir.write_failed(e, self.now());
        if placed
            .segment
            .file
            .write_all_at(&[&[0; HEADER_BYTES]], placed.offset)
            .is_err()
        {
            let mut header = Vec::new();
            let absent =
                match placed
                    .segment
                    .file
                    .read_append(&mut header, HEADER_BYTES, placed.offset)
                {
                    Ok(()) => {
                        Header::decode(&header, placed.segment.place(placed.offset)).is_none()
                    }
                    Err(e) => e.kind() == std::io::ErrorKind::UnexpectedEof,
                };
            if !absent {
                // It cannot be undone: a restart may find the record.
                dir.ghosts.fetch_add(1, Relaxed);
                self.distrust(dir, &error);
            }
        }
        error
    }

    /// Calls `take` until it gets a place, opening new segments; returns the claim if that fails.
    pub fn place<T>(
        &self,
        dir: &Directory,
        bytes: u64,
        mut take: impl FnMut() -> Option<T>,
    ) -> Result<T> {
        loop {
            if let Some(placed) = take() {
                return Ok(placed);
            }
            if let Err(e) = dir.roll(bytes, &self.segments, &self.ordinals, self.now()) {
                dir.unclaim(bytes);
                return Err(e);
            }
        }
    }

    fn publish(&self, entry: Entry, placed: &Placed, record: &NewRecord<'_>) {
        let other = {
            let mut shard = self.index.shard(record.key);
            if !shard.end_write(record.key, placed.seq) {
                placed.segment.note_outdated(&entry);
                return;
            }
            let newer = shard.get(record.key).filter(|e| e.seq > entry.seq).copied();
            match newer {
                // Another put of the key was faster: the record just written is the older one.
                Some(newer) => {
                    placed.segment.note_outdated(&entry);
                    self.segments
                        .get(newer.slot())
                        .map(|s| (s.dir, placed.segment.dir, newer.seq))
                }
                None => {
                    placed.segment.add_live(entry.padded());
                    let old = shard.insert(entry).inspect(|old| self.sub_live(old));
                    old.and_then(|old| self.segments.get(old.slot()))
                        .map(|s| (placed.segment.dir, s.dir, placed.seq))
                }
            }
        };
        // Each directory's log must tell the truth by itself: end the older record where it is. The
        // tombstone has the newer one's number.
        if let Some((newer_dir, older_dir, seq)) = other
            && newer_dir != older_dir
            && record.kind == Kind::Head
        {
            let dir = &self.dirs[older_dir];
            if let Err(e) = self.write_tombstone(
                dir,
                record.key,
                record.bucket,
                record.object_key,
                Some(seq),
                Class::Tombstone,
                |_| {},
            ) {
                self.distrust(dir, &e);
            }
        }
    }

    pub fn sub_live(&self, entry: &Entry) {
        if let Some(segment) = self.segments.get(entry.slot()) {
            segment.note_outdated(entry);
            segment.sub_live(entry.padded());
        }
    }

    /// The advisor, if one knows at this moment what is wanted next.
    pub fn advisor(&self) -> Option<Arc<dyn Advisor>> {
        self.advisor.read().clone().filter(|a| a.is_active())
    }

    /// Takes the entry of `key` out of the index if `condition` holds. The record stays in its
    /// file.
    pub fn forget(&self, key: u128, condition: impl FnOnce(&Entry) -> bool) -> Option<Entry> {
        let mut shard = self.index.shard(key);
        let entry = shard.remove_if(key, condition)?;
        self.sub_live(&entry);
        Some(entry)
    }

    /// Removes a key for good: its entry, and, with a tombstone, any older records in the files.
    pub fn bury(&self, key: u128, bucket: &str, object_key: &str) -> Removed {
        let mut targets: Vec<usize> = self
            .dirs
            .iter()
            .filter(|d| d.ghosts.load(Relaxed) > 0)
            .map(|d| d.index)
            .collect();
        let mut removed = Removed::default();
        {
            let mut shard = self.index.shard(key);
            targets.extend(shard.writing_dirs(key));
            if let Some(entry) = shard.get(key) {
                // What counts is what is here now: making room for the tombstone may evict it.
                removed = Removed {
                    existed: true,
                    bytes: entry.padded(),
                };
                targets.extend(self.segments.get(entry.slot()).map(|s| s.dir));
            }
        }
        targets.sort_unstable();
        targets.dedup();
        for dir in targets.into_iter().map(|i| &self.dirs[i]) {
            let mut taken = None;
            let mut take = |shard: &mut Shard<'_>| {
                shard.cancel_writes(key, dir.index);
                let here = |e: &Entry| {
                    self.segments
                        .get(e.slot())
                        .is_some_and(|s| s.dir == dir.index)
                };
                if let Some(entry) = shard.remove_if(key, here) {
                    self.sub_live(&entry);
                    taken = Some(entry);
                }
            };
            let written = self.write_tombstone(
                dir,
                key,
                bucket,
                object_key,
                None,
                Class::Tombstone,
                &mut take,
            );
            if let Err(e) = written {
                // It may have failed before it had a place.
                take(&mut self.index.shard(key));
                if let Some(entry) = &taken {
                    self.void(entry);
                }
                self.distrust(dir, &e);
            }
        }
        removed
    }

    /// Appends a tombstone; `at_place` runs when it has its place, under the lock of the key's
    /// shard. If the file system has no room for it, room is made once, unless the evictor is the
    /// caller.
    pub fn write_tombstone(
        &self,
        dir: &Directory,
        key: u128,
        bucket: &str,
        object_key: &str,
        seq: Option<u64>,
        class: Class,
        mut at_place: impl FnMut(&mut Shard<'_>),
    ) -> Result<()> {
        let seen = dir.seen();
        let mut write =
            || self.write_tombstone_once(dir, key, bucket, object_key, seq, class, &mut at_place);
        match write() {
            Err(_) if class == Class::Tombstone && self.relieve(dir, seen) => {
                dir.retry_now();
                write()
            }
            done => done,
        }
    }

    fn write_tombstone_once(
        &self,
        dir: &Directory,
        key: u128,
        bucket: &str,
        object_key: &str,
        seq: Option<u64>,
        class: Class,
        at_place: &mut impl FnMut(&mut Shard<'_>),
    ) -> Result<()> {
        let tombstone = NewRecord {
            kind: Kind::Tombstone,
            flags: 0,
            key,
            bucket,
            object_key,
            meta: &[],
            data: &[],
            validated_at: 0,
            version: 0,
        };
        let len = padded(tombstone.len());
        if !dir.may_write(self.now(), self.retry_after_secs()) {
            return Err(Self::resting(dir));
        }
        self.claim(dir, len, class)?;
        let placed = self.place(dir, len, || {
            let mut shard = self.index.shard(key);
            let placed = dir.place(len, || {
                seq.unwrap_or_else(|| self.seq.fetch_add(1, Relaxed))
            })?;
            placed.segment.tombstone_bytes.fetch_add(len, Relaxed);
            at_place(&mut shard);
            Some(placed)
        })?;
        let mut prefix = tombstone.prefix();
        let bytes = prefix.seal(placed.seq, placed.segment.place(placed.offset));
        let written = placed
            .segment
            .file
            .write_all_at(&[bytes], placed.offset)
            .map_err(|e| dir.write_failed(e, self.now()));
        dir.finish(&placed);
        if written.is_ok() {
            self.write_succeeded(dir);
        }
        written
    }

    /// The last resort if no tombstone can be appended: makes the record itself unreadable, which
    /// needs no space.
    fn void(&self, entry: &Entry) {
        if let Some(segment) = self.segments.get(entry.slot())
            && let Err(e) = segment
                .file
                .write_all_at(&[&[0; HEADER_BYTES]], entry.offset())
        {
            tracing::warn!(file = %segment.path.display(), error = %e, "a removed record could not be made unreadable");
        }
    }

    /// `dir` missed a tombstone, or may have lost one: after a restart its entries must be
    /// revalidated before use. The mark is written to every directory that takes it.
    pub fn distrust(&self, dir: &Directory, why: &Error) {
        if std::mem::replace(&mut dir.identity.lock().missed_tombstone, true)
            && !dir.identity_unsaved.load(Relaxed)
        {
            return;
        }
        tracing::warn!(dir = %dir.path.display(), error = %why, "a removal may not be on the disk: after the next restart, everything cached here is revalidated");
        let mut saved = dir.save_identity().is_ok();
        for peer in self.dirs.iter().filter(|p| p.index != dir.index) {
            let fresh = {
                let peers = &mut peer.identity.lock().distrusted_peers;
                let fresh = !peers.contains(&dir.id);
                if fresh {
                    peers.push(dir.id);
                }
                fresh
            };
            saved |= !fresh || peer.save_identity().is_ok();
        }
        if !saved {
            tracing::error!(dir = %dir.path.display(), "no cache directory can be written: a removed object may come back after a restart");
        }
    }

    fn write_succeeded(&self, dir: &Directory) {
        dir.write_succeeded();
        if dir.identity_unsaved.load(Relaxed)
            && let Err(e) = dir.save_identity()
        {
            tracing::warn!(dir = %dir.path.display(), error = %e, "the identity file could not be written");
        }
    }

    /// Whether [`Inner::bury`] must also end an entry on disk: parts are found only through their
    /// head.
    pub fn is_named(entry: &Entry) -> bool {
        entry.has(HEAD) || entry.has(PIN)
    }

    /// The entry's record was unreadable or not what was written: from now on it is a miss.
    pub fn drop_damaged(&self, entry: &Entry, bucket: &str, object_key: &str, what: Damage) {
        let Some(segment) = self.segments.get(entry.slot()) else {
            return;
        };
        let dir = &self.dirs[segment.dir];
        let same = self
            .index
            .peek(entry.key())
            .is_some_and(|e| e.seq == entry.seq);
        if !same {
            return;
        }
        let counter = match what {
            Damage::Checksum => &dir.counters.checksum_failures,
            Damage::Io => &dir.counters.read_failures,
        };
        counter.fetch_add(1, Relaxed);
        tracing::warn!(file = %segment.path.display(), offset = entry.offset(), ?what, "a cached record is damaged; it will be fetched again");
        // The thread that closes the cache may be waiting for this very thread's write: then it is
        // as good as closed.
        if Self::is_named(entry) && self.closed.try_read().is_some_and(|closed| !*closed) {
            self.bury(entry.key(), bucket, object_key);
        } else {
            self.forget(entry.key(), |e| e.seq == entry.seq);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// The bytes are not those that were written.
    Checksum,
    /// The disk returned an error.
    Io,
}

/// Checks what every record must satisfy before it takes any space.
pub fn check_sizes(meta_len: usize, data_len: usize) -> Result<()> {
    if meta_len > record::META_MAX_BYTES {
        return Err(Error::new(
            ErrorKind::TooLarge,
            format!("metadata of {meta_len} bytes is too long to be cached"),
        ));
    }
    if data_len as u64 > 1 << 30 {
        return Err(Error::new(
            ErrorKind::TooLarge,
            format!("{data_len} bytes do not fit into one record of the cache"),
        ));
    }
    Ok(())
}
