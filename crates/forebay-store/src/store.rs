//! The store's interface. The crate's documentation says what it promises.

use crate::{
    advice::Advisor,
    codec,
    config::StoreConfig,
    dir::{Class, Directory},
    disk::{Disk, RealDisk},
    index::{HEAD, INLINE, PINNED},
    inner::{Inner, Removed, check_sizes},
    key::{Part, part_key},
    pins,
    read::{Miss, Record, Wait, WouldWait},
    record::{FLAG_DERIVED, FLAG_INLINE, FLAG_UNHELD, Kind, NewRecord},
    sources::Sources,
    stats::{DirStats, StoreStats},
    sync::atomic::Ordering::Relaxed,
    worker::Worker,
};
use bytes::Bytes;
use forebay_core::{Clock, Error, ObjectMeta, ObjectName, Result, VersionId, limits::CHUNK_BYTES};
use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The local cache. Synchronous and safe to share between threads.
pub struct Store {
    pub(crate) inner: Arc<Inner>,
    _worker: Option<Worker>,
}

/// What is known of a name in RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peek {
    /// 0: must be revalidated before use.
    pub validated_at_secs: u32,
    /// Whether a pin keeps it from eviction.
    pub pinned: bool,
    /// The whole object is in its head record.
    pub inline: bool,
    /// Bytes of its head record, header and name included, without padding.
    pub record_bytes: u64,
}

/// A head record as it was read.
#[derive(Clone, Debug)]
pub struct Head {
    /// What the origin said about the object, when it was put.
    pub meta: Arc<ObjectMeta>,
    /// 0: must be revalidated before use.
    pub validated_at_secs: u32,
    /// The whole object, if it is stored inline.
    pub data: Option<Bytes>,
    /// Whether a pin keeps it from eviction.
    pub pinned: bool,
}

/// What [`Store::append_inline`] appended.
#[derive(Clone, Debug)]
pub struct Appended {
    /// What the origin said about the object, when it was put.
    pub meta: Arc<ObjectMeta>,
    /// 0: must be revalidated before use.
    pub validated_at_secs: u32,
    /// The bytes of the object that were appended.
    pub range: Range<u64>,
}

impl Store {
    /// Opens the directories, creating them if needed; what they already hold is available at once.
    ///
    /// # Errors
    /// `Conflict` if another process has a directory open; `Invalid` for sizes that cannot work;
    /// `Internal` for a directory that cannot be used.
    pub fn open(config: StoreConfig, clock: Arc<dyn Clock>) -> Result<Store> {
        Self::open_on(Arc::new(RealDisk), config, clock)
    }

    /// [`open`](Self::open) on another file system: the seam for fault injection.
    pub fn open_on(
        disk: Arc<dyn Disk>,
        config: StoreConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<Store> {
        let inner = Arc::new(Inner::open(disk, config, clock)?);
        let worker = if inner.config.background {
            Some(Worker::start(&inner)?)
        } else {
            None
        };
        Ok(Store {
            inner,
            _worker: worker,
        })
    }

    /// Who this node is in a cluster, once [`StoreConfig::node`] has said so: kept in each cache
    /// directory, so it outlives addresses, and disks one by one.
    pub fn node(&self) -> Option<u64> {
        self.inner.node
    }

    /// The cache directories, in the order of the configuration.
    pub fn directories(&self) -> Vec<PathBuf> {
        self.inner.dirs.iter().map(|d| d.path.clone()).collect()
    }

    /// Takes `bytes` of a directory's size away from the cache, for files that the caller keeps
    /// there, and evicts until there is room for them on the disk too. Others then have at most `most`
    /// bytes of it.
    ///
    /// # Errors
    /// `Busy` if they would have more, or if there is no room for so much.
    pub fn set_aside(&self, directory: usize, bytes: u64, most: u64) -> Result<()> {
        let inner = &self.inner;
        let dir = &inner.dirs[directory];
        // Or two that do not both fit might both be refused.
        let _one = dir.setting_aside.lock();
        if !dir.set_aside(bytes, most) {
            return Err(dir.full_error(bytes));
        }
        dir.measure(inner.now());
        let made = inner.shrink(dir);
        let fits = dir.state.lock().used <= dir.limit(Class::Normal);
        let space = dir.disk.space(&dir.path);
        // What others were granted and have not written yet is not free either.
        let lacking = space.is_ok_and(|space| space.available_bytes < dir.aside_to_come());
        if fits && !lacking {
            return Ok(());
        }
        dir.give_back(bytes, bytes);
        dir.measure(inner.now());
        Err(match made {
            Err(e) => e,
            Ok(()) => dir.full_error(bytes),
        })
    }

    /// Whether [`Store::set_aside`] could find room for `bytes` on the directory's file system if
    /// `gone` bytes of what is set aside were given back before, and all that is cached made room. It
    /// asks the file system, and changes nothing.
    pub fn could_set_aside(&self, directory: usize, bytes: u64, gone: u64) -> bool {
        self.inner.dirs[directory].could_hold_aside(bytes, gone)
    }

    /// Counts files that are in a directory already, as [`Store::set_aside`] would have.
    pub fn found_aside(&self, directory: usize, bytes: u64) {
        self.inner.dirs[directory].found_aside(bytes);
    }

    /// Says that `bytes` of what was set aside are on the disk: until then they count as room that the
    /// file system has and nobody else may take.
    pub fn aside_came(&self, directory: usize, bytes: u64) {
        self.inner.dirs[directory].aside_came(bytes);
    }

    /// Gives bytes that were set aside back to the cache: their files are gone. Of these, `to_come`
    /// were never on the disk.
    pub fn give_back(&self, directory: usize, bytes: u64, to_come: u64) {
        self.inner.dirs[directory].give_back(bytes, to_come);
    }

    /// Makes the names in `folder` durable, where the caller keeps files in a directory.
    ///
    /// # Errors
    /// What the file system says.
    pub fn sync_folder(&self, directory: usize, folder: &Path) -> io::Result<()> {
        self.inner.dirs[directory].disk.sync_dir(folder)
    }

    /// What is set aside of a directory.
    pub fn aside_bytes(&self, directory: usize) -> u64 {
        self.inner.dirs[directory].aside()
    }

    /// The configured size of a directory.
    pub fn capacity_bytes(&self, directory: usize) -> u64 {
        self.inner.dirs[directory].capacity
    }

    /// From now on, `advisor` says what is wanted next; `None`: nobody does.
    pub fn set_advisor(&self, advisor: Option<Arc<dyn Advisor>>) {
        *self.inner.advisor.write() = advisor;
    }

    /// Heads that were validated after this second, by a clock that was ahead, count as never
    /// validated. It looks at all entries.
    pub fn distrust_after(&self, secs: u32) {
        self.restamp_after(secs, 0);
    }

    /// If any head was validated after this second, the clock was ahead then, and by how much nobody
    /// knows: all count as validated a long time ago. It looks at all entries.
    pub fn outdate_after(&self, secs: u32) {
        let mut any = false;
        for mut shard in self.inner.index.shards() {
            shard.retain(|entry| {
                any |= entry.validated_at > secs;
                true
            });
        }
        if any {
            self.restamp_after(1, 1);
        }
    }

    fn restamp_after(&self, secs: u32, to: u32) {
        for mut shard in self.inner.index.shards() {
            shard.retain(|entry| {
                if entry.validated_at > secs {
                    entry.validated_at = to;
                }
                true
            });
        }
    }

    /// What is known of a name without reading.
    pub fn peek(&self, name: &ObjectName) -> Option<Peek> {
        self.inner
            .index
            .peek(self.inner.head_key(name))
            .map(|e| Peek {
                validated_at_secs: e.validated_at,
                pinned: e.has(PINNED),
                inline: e.has(INLINE),
                record_bytes: e.len as u64,
            })
    }

    /// Whether a part is here, without reading.
    pub fn has_part(&self, name: &ObjectName, version: VersionId, part: Part) -> bool {
        self.inner
            .index
            .peek(part_key(self.inner.head_key(name), version, part))
            .is_some()
    }

    /// The meta, and a small object's bytes, with one read. `None`: it is not here, or damaged.
    ///
    /// # Errors
    /// Only under [`Wait::MustNot`].
    pub fn head(&self, name: &ObjectName, wait: Wait) -> Result<Option<Head>, WouldWait> {
        self.inner
            .with_record(self.inner.head_key(name), name, wait, |entry, record| {
                let meta = codec::decode(record.meta()).ok_or(Miss::NotHere)?;
                let data = if record.is_inline() {
                    let mut data = Vec::with_capacity(record.header.data_len as usize);
                    record.append(0..record.header.data_len as u64, &mut data)?;
                    Some(Bytes::from(data))
                } else {
                    None
                };
                Ok(Head {
                    meta: Arc::new(meta),
                    validated_at_secs: entry.validated_at,
                    data,
                    pinned: entry.has(PINNED),
                })
            })
    }

    /// Appends a small object, or some of its bytes, to `out`. `choose` is called first with the
    /// meta: it says which bytes of this version are wanted, if any, and may append, too.
    ///
    /// `None`, with `out` unchanged: it is not here, not inline or damaged, or `choose` wants
    /// nothing of it.
    ///
    /// # Errors
    /// Only under [`Wait::MustNot`]; `out` is unchanged.
    pub fn append_inline(
        &self,
        name: &ObjectName,
        wait: Wait,
        out: &mut Vec<u8>,
        choose: impl FnOnce(&ObjectMeta, &mut Vec<u8>) -> Option<Range<u64>>,
    ) -> Result<Option<Appended>, WouldWait> {
        let begin = out.len();
        let key = self.inner.head_key(name);
        let result = self.inner.with_record(key, name, wait, |entry, record| {
            if !record.is_inline() {
                return Err(Miss::NotHere);
            }
            let meta = codec::decode(record.meta()).ok_or(Miss::NotHere)?;
            let range = choose(&meta, out).ok_or(Miss::NotHere)?;
            record.append(range.clone(), out)?;
            Ok(Appended {
                meta: Arc::new(meta),
                validated_at_secs: entry.validated_at,
                range,
            })
        });
        if !matches!(result, Ok(Some(_))) {
            out.truncate(begin);
        }
        result
    }

    /// A range of a part. `None`: it is not here, shorter, or damaged.
    ///
    /// # Errors
    /// Only under [`Wait::MustNot`].
    pub fn part(
        &self,
        name: &ObjectName,
        version: VersionId,
        part: Part,
        range: Range<u64>,
        wait: Wait,
    ) -> Result<Option<Bytes>, WouldWait> {
        let mut out = Vec::new();
        let found = self.append_part(name, version, part, range, wait, &mut out)?;
        Ok(found.then(|| Bytes::from(out)))
    }

    /// Appends a range of a part to `out`. `false`, with `out` unchanged: it is not here, shorter,
    /// or damaged.
    ///
    /// # Errors
    /// Only under [`Wait::MustNot`]; `out` is unchanged.
    pub fn append_part(
        &self,
        name: &ObjectName,
        version: VersionId,
        part: Part,
        range: Range<u64>,
        wait: Wait,
        out: &mut Vec<u8>,
    ) -> Result<bool, WouldWait> {
        let key = part_key(self.inner.head_key(name), version, part);
        let appended = self.inner.with_record(key, name, wait, |_, record| {
            if record.header.kind != Kind::Part
                || record.header.version != version.0
                || *record.meta() != *part.encode()
            {
                return Err(Miss::Collision);
            }
            record.append(range, out)
        })?;
        Ok(appended.is_some())
    }

    /// Appends a range of a part, of which the caller knows the size, as it lies on the disk: for
    /// those who verify it by a checksum of their own, which must tell whose bytes they are, too. One
    /// read of just these bytes, where [`append_part`](Self::append_part) reads the record's beginning
    /// and the blocks around them as well. Whoever finds that they are not what was written reads
    /// them again by that, so that damage is noticed.
    ///
    /// `false`, with `out` unchanged: the store does not have it, has a smaller one, or cannot read it.
    ///
    /// # Errors
    /// Only under [`Wait::MustNot`]; `out` is unchanged.
    pub fn append_part_unverified(
        &self,
        name: &ObjectName,
        version: VersionId,
        (part, bytes): (Part, u64),
        range: Range<u64>,
        wait: Wait,
        out: &mut Vec<u8>,
    ) -> Result<bool, WouldWait> {
        let key = part_key(self.inner.head_key(name), version, part);
        self.inner.append_unverified(key, bytes, range, wait, out)
    }

    /// Stores a head, replacing any older one of the name; parts of other versions become
    /// unreachable. Objects up to [`CHUNK_BYTES`] carry their bytes as `inline`.
    ///
    /// # Errors
    /// If it cannot be written, an older head is gone, too: it is outdated.
    pub fn put_head(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        validated_at_secs: u32,
        inline: Option<&[u8]>,
    ) -> Result<()> {
        self.write_head(name, meta, validated_at_secs, inline, false)
            .map(drop)
    }

    /// The same, if there is room to spare, or the name is pinned. `false`: there is none, and an
    /// older head is gone: it is outdated.
    ///
    /// # Errors
    /// As [`Store::put_head`].
    pub fn offer_head(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        validated_at_secs: u32,
        inline: Option<&[u8]>,
    ) -> Result<bool> {
        self.write_head(name, meta, validated_at_secs, inline, true)
    }

    fn write_head(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        validated_at_secs: u32,
        inline: Option<&[u8]>,
        is_offer: bool,
    ) -> Result<bool> {
        if inline.is_some_and(|data| data.len() as u64 != meta.size) {
            return Err(Error::internal(format!(
                "{name}: {} bytes were written for an object of {}",
                inline.map_or(0, <[u8]>::len),
                meta.size
            )));
        }
        let _open = self.inner.open_for_writes()?;
        let encoded = codec::encode(meta);
        check_sizes(encoded.len(), inline.map_or(0, <[u8]>::len))?;
        let held = self.inner.pins.arrived(
            name.hash128(),
            meta.version().0,
            pins::cost_of(name, meta, encoded.len()),
        );
        let flags =
            HEAD | if inline.is_some() { INLINE } else { 0 } | if held { PINNED } else { 0 };
        let record = NewRecord {
            kind: Kind::Head,
            flags: if inline.is_some() { FLAG_INLINE } else { 0 },
            key: self.inner.head_key(name),
            bucket: name.bucket(),
            object_key: name.key(),
            meta: &encoded,
            data: inline.unwrap_or_default(),
            validated_at: validated_at_secs,
            version: meta.version().0,
        };
        if !is_offer || held {
            return self.inner.append(&record, flags).map(|()| true);
        }
        let taken = self.inner.offer(&record, flags);
        if !matches!(taken, Ok(true)) {
            self.inner.bury(record.key, name.bucket(), name.key());
        }
        taken
    }

    /// Takes a part out of the index; its record goes with its segment. After a restart it may be
    /// found again.
    pub fn forget_part(&self, name: &ObjectName, version: VersionId, part: Part) {
        let key = part_key(self.inner.head_key(name), version, part);
        self.inner.forget(key, |_| true);
    }

    /// Stores a part of a version.
    pub fn put_part(
        &self,
        name: &ObjectName,
        version: VersionId,
        part: Part,
        data: &[u8],
    ) -> Result<()> {
        self.write_part(name, version, part, data, false).map(drop)
    }

    /// The same, if there is room to spare, or the name is pinned. `false`: there is none.
    ///
    /// # Errors
    /// As [`Store::put_part`].
    pub fn offer_part(
        &self,
        name: &ObjectName,
        version: VersionId,
        part: Part,
        data: &[u8],
    ) -> Result<bool> {
        self.write_part(name, version, part, data, true)
    }

    fn write_part(
        &self,
        name: &ObjectName,
        version: VersionId,
        part: Part,
        data: &[u8],
        is_offer: bool,
    ) -> Result<bool> {
        let _open = self.inner.open_for_writes()?;
        check_sizes(0, data.len())?;
        let meta = part.encode();
        let record = NewRecord {
            kind: Kind::Part,
            flags: match (part.is_derived(), part.is_held_by_pins()) {
                (true, true) => FLAG_DERIVED,
                (true, false) => FLAG_DERIVED | FLAG_UNHELD,
                (false, _) => 0,
            },
            key: part_key(self.inner.head_key(name), version, part),
            bucket: name.bucket(),
            object_key: name.key(),
            meta: &meta,
            data,
            validated_at: 0,
            version: version.0,
        };
        match is_offer && !self.is_pinned(name) {
            true => self.inner.offer(&record, 0),
            false => self.inner.append(&record, 0).map(|()| true),
        }
    }

    /// Whether an offer of so many bytes would be taken now: of this part, or (`None`) as a head.
    pub fn takes_offer(
        &self,
        name: &ObjectName,
        part: Option<(VersionId, Part)>,
        bytes: u64,
    ) -> bool {
        let head = self.inner.head_key(name);
        let key = part.map_or(head, |(version, part)| part_key(head, version, part));
        let dir = self.inner.home_of(key);
        dir.is_some_and(|dir| dir.fits(bytes, Class::Spare)) || self.is_pinned(name)
    }

    /// The origin said that this version is current. Takes effect in RAM at once, on disk with the
    /// next checkpoint. `false`: another version, or none, is here.
    pub fn touch(&self, name: &ObjectName, version: VersionId, validated_at_secs: u32) -> bool {
        let hash = self.inner.head_key(name);
        let seq = self
            .inner
            .with_record(hash, name, Wait::May, |entry, record| {
                Ok((record.header.version == version.0).then_some(entry.seq))
            });
        let Ok(Some(Some(seq))) = seq else {
            return false;
        };
        let mut shard = self.inner.index.shard(hash);
        match shard.get(hash) {
            Some(entry) if entry.seq == seq => {
                entry.validated_at = validated_at_secs;
                true
            }
            _ => false,
        }
    }

    /// Removes an object: it does not come back, not even after a restart or `kill -9`. `false`: it
    /// was not here.
    pub fn remove(&self, name: &ObjectName) -> bool {
        self.take_out(name).existed
    }

    /// Removes an object to free its space and returns how many bytes that was; also 0 if it is
    /// pinned: unpin it first.
    pub fn evict(&self, name: &ObjectName) -> u64 {
        if self.inner.pins.contains(name.hash128()) {
            0
        } else {
            self.take_out(name).bytes
        }
    }

    fn take_out(&self, name: &ObjectName) -> Removed {
        let Ok(_open) = self.inner.open_for_writes() else {
            return Default::default();
        };
        let hash = self.inner.head_key(name);
        let before = self.inner.index.peek(hash);
        let meta = self
            .inner
            .with_record(hash, name, Wait::May, |_, record| chunked_meta(record));
        let chunks = chunk_keys(hash, meta.ok().flatten().flatten());
        let mut removed = self.inner.bury(hash, name.bucket(), name.key());
        if let Some(before) = before.filter(|_| !removed.existed) {
            // It was damaged, and reading it dropped it.
            removed = Removed {
                existed: true,
                bytes: before.padded(),
            };
        }
        for key in chunks {
            if let Some(entry) = self.inner.forget(key, |_| true) {
                removed.bytes += entry.padded();
            }
        }
        removed
    }

    /// The bytes that [`evict`](Self::evict) would free of an object that is not pinned. Changes
    /// nothing.
    pub fn evictable_bytes(&self, name: &ObjectName) -> u64 {
        let hash = self.inner.head_key(name);
        let meta = self
            .inner
            .look_at_record(hash, name, |_, record| chunked_meta(record));
        std::iter::once(hash)
            .chain(chunk_keys(hash, meta.flatten()))
            .filter_map(|key| self.inner.index.peek(key))
            .map(|entry| entry.padded())
            .sum()
    }

    /// How many bytes of this version of the object are here.
    pub fn coverage(&self, name: &ObjectName, meta: &ObjectMeta) -> u64 {
        let (hash, version) = (self.inner.head_key(name), meta.version());
        if meta.size <= CHUNK_BYTES {
            let whole = self.inner.with_record(hash, name, Wait::May, |_, r| {
                Ok(r.is_inline() && r.header.version == version.0)
            });
            if whole == Ok(Some(true)) {
                return meta.size;
            }
        }
        (0..meta.size.div_ceil(CHUNK_BYTES))
            .map_while(|i| u32::try_from(i).ok())
            .filter(|i| self.has_part(name, version, Part::Chunk(*i)))
            .map(|i| CHUNK_BYTES.min(meta.size - i as u64 * CHUNK_BYTES))
            .sum()
    }

    /// Gauges and counters, read one after the other while other threads go on.
    pub fn stats(&self) -> StoreStats {
        let inner = &self.inner;
        StoreStats {
            dirs: inner.dirs.iter().map(dir_stats).collect(),
            entries: inner.index.len() as u64,
            index_bytes: inner.index.ram_bytes() as u64,
            pins: inner.pins.len() as u64,
            pinned_bytes: inner.pins.cost(),
            pins_not_held: inner.pins.not_held() as u64,
        }
    }

    /// Writes the index out, so that a restart need not read the log before this point.
    pub fn checkpoint(&self) -> Result<()> {
        match self.inner.open_for_writes() {
            Ok(_open) => self.inner.checkpoint(),
            // Closing wrote one.
            Err(_) => Ok(()),
        }
    }

    /// From now on names lead to these origins: what was cached from other origins is not found
    /// under them.
    pub fn set_sources(&self, sources: &Sources) {
        self.inner.salts.set(sources);
    }

    /// Stops writing, writes the index out and makes everything durable. Reads still work
    /// afterwards; a second call does nothing.
    pub fn close(&self) -> Result<()> {
        self.inner.close()
    }
}

fn dir_stats(dir: &Directory) -> DirStats {
    let state = dir.state.lock();
    let sum = |f: fn(&crate::segment::Segment) -> u64| state.segments.values().map(|s| f(s)).sum();
    let c = &dir.counters;
    DirStats {
        path: dir.path.clone(),
        capacity_bytes: dir.capacity,
        effective_bytes: dir.effective(),
        free_bytes: dir.available(),
        used_bytes: state.used,
        live_bytes: sum(|s| s.live_bytes.load(Relaxed)),
        records: sum(|s| s.live_records.load(Relaxed)),
        segments: state.segments.len() as u64,
        checkpoint_bytes: state.checkpoint_bytes,
        state: dir.health(),
        evicted_records: c.evicted_records.load(Relaxed),
        evicted_bytes: c.evicted_bytes.load(Relaxed),
        relocated_bytes: c.relocated_bytes.load(Relaxed),
        written_bytes: c.written_bytes.load(Relaxed),
        checksum_failures: c.checksum_failures.load(Relaxed),
        read_failures: c.read_failures.load(Relaxed),
        write_failures: c.write_failures.load(Relaxed),
        read_latency: dir.latency.read.snapshot(),
        write_latency: dir.latency.write.snapshot(),
    }
}

/// What the head of an object says whose bytes are in chunks; `None` if they are in the head.
fn chunked_meta(record: &Record<'_>) -> Result<Option<ObjectMeta>, Miss> {
    match record.is_inline() {
        true => Ok(None),
        false => codec::decode(record.meta()).map(Some).ok_or(Miss::NotHere),
    }
}

/// The keys that the chunks of this version of an object have, here or not.
fn chunk_keys(hash: u128, meta: Option<ObjectMeta>) -> impl Iterator<Item = u128> {
    meta.into_iter().flat_map(move |meta| {
        let version = meta.version();
        let chunks = u32::try_from(meta.size.div_ceil(CHUNK_BYTES)).unwrap_or(u32::MAX);
        (0..chunks).map(move |i| part_key(hash, version, Part::Chunk(i)))
    })
}
