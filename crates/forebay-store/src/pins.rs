//! Names that the evictor must keep.
//!
//! A pin is a record of its own in the log of *every* directory, so that it outlives restarts and
//! the loss of a directory, and needs no extra file. It may be set before the object is cached. A
//! pin holds the head, the chunks and the derived data of the current version. In a cluster, a pin says
//! how many nodes are to keep the object; the store only remembers it (as the record's version).
//!
//! Invariant: what the held pins cost (whole objects and the pins' own records) is at most half of
//! the capacity, so the evictor always finds something to drop. A pinned object that would exceed
//! this when it arrives is cached, but not held; [`Pins::not_held`] counts those.

use crate::{
    Store, codec,
    dir::Directory,
    index::{Entry, PIN, PINNED},
    inner::Inner,
    key::pin_key,
    read::{Miss, Wait},
    record::{Header, Kind, NewRecord, padded, record_len, split_name},
    segment::Segment,
    sync::{
        Mutex, MutexGuard, RwLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};
use forebay_core::{
    Error, ErrorKind, ObjectMeta, ObjectName, Result, limits::CHUNK_BYTES, units::format_bytes,
};
use std::collections::{BTreeMap, HashMap};

struct Pin {
    name: ObjectName,
    /// The version that is held; `None`: nothing is cached yet, or the object is too large to be
    /// held.
    version: Option<u64>,
    too_large: bool,
    own_cost: u64,
    object_cost: u64,
    /// On so many nodes.
    copies: u8,
    /// 0 once its records are on the disk; until then the number of the [`NewPin`].
    unsynced: u64,
}

/// A pin that is on the disk once [`Store::sync_pins`] has had it.
#[derive(Debug)]
pub struct NewPin {
    name: ObjectName,
    /// Tells it from a later pin of the name.
    number: u64,
}

impl NewPin {
    /// What is pinned.
    pub fn name(&self) -> &ObjectName {
        &self.name
    }
}

/// What [`Store::pin_later`] did.
#[derive(Debug)]
pub enum PinnedLater {
    /// Nothing: it was pinned on as many nodes before.
    Before,
    /// It was pinned on fewer nodes before.
    Raised,
    /// It was not pinned before.
    New(NewPin),
}

pub struct Pins {
    map: RwLock<HashMap<u128, Pin>>,
    count: AtomicUsize,
    cost: AtomicU64,
    /// Pins that want several nodes.
    mirrored: AtomicUsize,
    /// The number of the next [`NewPin`]; the first is 1.
    next: AtomicU64,
    limit: u64,
    /// Held while a name is pinned or unpinned: what is in memory and what is on the disks change
    /// together. By hash.
    turns: Vec<Mutex<()>>,
}

/// So many names at a time are pinned and unpinned.
const TURNS: usize = 16;

/// Of a long list, so many pins are synced together. Meanwhile nobody else pins or unpins.
const TOGETHER: usize = 500;

/// What an object takes when it is cached whole.
pub fn cost_of(name: &ObjectName, meta: &ObjectMeta, meta_len: usize) -> u64 {
    let name_len = name.bucket().len() + 1 + name.key().len();
    if meta.size <= CHUNK_BYTES {
        return padded(record_len(name_len, meta_len, meta.size as usize));
    }
    let chunk = |n: u64| {
        padded(record_len(
            name_len,
            crate::key::PART_META_BYTES,
            n as usize,
        ))
    };
    let (whole, rest) = (meta.size / CHUNK_BYTES, meta.size % CHUNK_BYTES);
    padded(record_len(name_len, meta_len, 0))
        + whole * chunk(CHUNK_BYTES)
        + if rest > 0 { chunk(rest) } else { 0 }
}

impl Pins {
    pub fn new(capacity: u64) -> Self {
        Self {
            map: RwLock::default(),
            count: AtomicUsize::new(0),
            cost: AtomicU64::new(0),
            mirrored: AtomicUsize::new(0),
            next: AtomicU64::new(1),
            limit: capacity / 2,
            turns: (0..TURNS).map(|_| Mutex::new(())).collect(),
        }
    }

    fn turn(&self, hash: u128) -> MutexGuard<'_, ()> {
        self.turns[hash as usize % TURNS].lock()
    }

    pub fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    pub fn contains(&self, hash: u128) -> bool {
        !self.is_empty() && self.map.read().contains_key(&hash)
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    pub fn cost(&self) -> u64 {
        self.cost.load(Relaxed)
    }

    pub fn len(&self) -> usize {
        self.count.load(Relaxed)
    }

    pub fn not_held(&self) -> usize {
        self.map.read().values().filter(|p| p.too_large).count()
    }

    pub fn names(&self) -> Vec<(ObjectName, u8)> {
        let map = self.map.read();
        map.values().map(|p| (p.name.clone(), p.copies)).collect()
    }

    /// Whether any pin wants several nodes.
    pub fn is_mirrored(&self) -> bool {
        self.mirrored.load(Relaxed) > 0
    }

    /// On how many nodes the name is to be kept; 1 if it is not pinned.
    pub fn copies(&self, hash: u128) -> u8 {
        self.map.read().get(&hash).map_or(1, |pin| pin.copies)
    }

    /// Sets the number of nodes that are to keep a pinned name.
    fn set_copies(&self, hash: u128, copies: u8) {
        if let Some(pin) = self.map.write().get_mut(&hash) {
            let before = std::mem::replace(&mut pin.copies, copies);
            self.mirrored.fetch_add(usize::from(copies > 1), Relaxed);
            self.mirrored.fetch_sub(usize::from(before > 1), Relaxed);
        }
    }

    /// The number of the pin that is not on the disk yet; 0: there is none.
    fn unsynced(&self, hash: u128) -> u64 {
        self.map.read().get(&hash).map_or(0, |pin| pin.unsynced)
    }

    /// Notes that the pin with this number is on the disk.
    fn synced(&self, hash: u128, number: u64) {
        if let Some(pin) = self.map.write().get_mut(&hash)
            && pin.unsynced == number
        {
            pin.unsynced = 0;
        }
    }

    /// Notes that a pin is not on the disk yet, and gives it a number.
    fn begins_unsynced(&self, hash: u128) -> u64 {
        let number = self.next.fetch_add(1, Relaxed);
        if let Some(pin) = self.map.write().get_mut(&hash) {
            pin.unsynced = number;
        }
        number
    }

    /// Adds a pin, with the cached version and what it costs. `Err`: what all pins would cost.
    pub fn add(
        &self,
        name: &ObjectName,
        copies: u8,
        own_cost: u64,
        cached: Option<(u64, u64)>,
    ) -> Result<(), u64> {
        let mut map = self.map.write();
        if map.contains_key(&name.hash128()) {
            return Ok(());
        }
        let object_cost = cached.map_or(0, |c| c.1);
        let total = self.cost.load(Relaxed) + own_cost + object_cost;
        if total > self.limit {
            return Err(total);
        }
        self.cost.store(total, Relaxed);
        map.insert(
            name.hash128(),
            Pin {
                name: name.clone(),
                version: cached.map(|c| c.0),
                too_large: false,
                own_cost,
                object_cost,
                copies: copies.max(1),
                unsynced: 0,
            },
        );
        self.mirrored.fetch_add(usize::from(copies > 1), Relaxed);
        self.count.store(map.len(), Relaxed);
        Ok(())
    }

    pub fn remove(&self, name: &ObjectName) -> bool {
        let mut map = self.map.write();
        let Some(pin) = map.remove(&name.hash128()) else {
            return false;
        };
        self.cost.fetch_sub(pin.own_cost + pin.object_cost, Relaxed);
        self.mirrored
            .fetch_sub(usize::from(pin.copies > 1), Relaxed);
        self.count.store(map.len(), Relaxed);
        true
    }

    /// A head of this name has arrived. Returns whether it is held.
    pub fn arrived(&self, hash: u128, version: u64, object_cost: u64) -> bool {
        if self.is_empty() {
            return false;
        }
        let mut map = self.map.write();
        let Some(pin) = map.get_mut(&hash) else {
            return false;
        };
        let others = self.cost.load(Relaxed) - pin.object_cost;
        pin.too_large = others + object_cost > self.limit;
        (pin.version, pin.object_cost) = if pin.too_large {
            (None, 0)
        } else {
            (Some(version), object_cost)
        };
        self.cost.store(others + pin.object_cost, Relaxed);
        if pin.too_large {
            tracing::warn!(object = %pin.name, "this pin is not honored: pinned objects would take more than half of the cache");
        }
        !pin.too_large
    }

    /// Whether the evictor must keep a record of this name and version.
    pub fn holds(&self, hash: u128, version: u64) -> bool {
        !self.is_empty()
            && self
                .map
                .read()
                .get(&hash)
                .is_some_and(|p| p.version == Some(version))
    }
}

impl Store {
    /// Keeps an object, present or future, from eviction: its head and the parts of its current
    /// version. Survives restarts.
    ///
    /// # Errors
    /// `TooLarge` if all pinned objects together would take more than half of the capacity.
    pub fn pin(&self, name: &ObjectName) -> Result<()> {
        self.pin_on(name, 1).map(drop)
    }

    /// The same, and remembers on how many nodes the object is to be kept: the most that was ever
    /// wanted, until it is unpinned. Returns whether that changed anything.
    ///
    /// # Errors
    /// As [`Store::pin`].
    pub fn pin_on(&self, name: &ObjectName, copies: u8) -> Result<bool> {
        let _open = self.inner.open_for_writes()?;
        let inner = &self.inner;
        let hash = name.hash128();
        let _turn = inner.pins.turn(hash);
        if inner.pins.contains(hash) {
            return self.raise_pin(name, copies);
        }
        self.add_pin(name, copies, true).map(|()| true)
    }

    /// As [`Store::pin_on`], but a pin of a name that had none may be lost until
    /// [`Store::sync_pins`] has had it: that syncs many together.
    ///
    /// # Errors
    /// As [`Store::pin`].
    pub fn pin_later(&self, name: &ObjectName, copies: u8) -> Result<PinnedLater> {
        let _open = self.inner.open_for_writes()?;
        let pins = &self.inner.pins;
        let hash = name.hash128();
        let _turn = pins.turn(hash);
        if pins.contains(hash) {
            return Ok(match self.raise_pin(name, copies)? {
                true => PinnedLater::Raised,
                false => PinnedLater::Before,
            });
        }
        self.add_pin(name, copies, false)?;
        Ok(PinnedLater::New(NewPin {
            name: name.clone(),
            number: pins.begins_unsynced(hash),
        }))
    }

    /// Makes new pins durable, with few syncs, and says of each whether it is. What cannot be synced is
    /// no pin any more.
    pub fn sync_pins(&self, new: &[NewPin]) -> Vec<Result<()>> {
        let _open = match self.inner.open_for_writes() {
            Ok(open) => open,
            Err(e) => return new.iter().map(|_| Err(e.clone())).collect(),
        };
        let inner = &self.inner;
        let mut synced = HashMap::new();
        let sync = |NewPin { name, number }: &NewPin| {
            let hash = name.hash128();
            let _turn = inner.pins.turn(hash);
            if inner.pins.unsynced(hash) != *number {
                // Somebody else has synced it, or ended it.
                return Ok(());
            }
            let done = inner.sync_pin(name, &mut synced);
            match done {
                Ok(()) => inner.pins.synced(hash, *number),
                Err(_) => self.take_back(name),
            }
            done
        };
        new.iter().map(sync).collect()
    }

    /// Raises the number of nodes on which a pinned name is to be kept. `false`: it was that, or more.
    /// The caller has the turn of the name.
    fn raise_pin(&self, name: &ObjectName, copies: u8) -> Result<bool> {
        let inner = &self.inner;
        let hash = name.hash128();
        inner.sync_begun(name)?;
        let before = inner.pins.copies(hash);
        if before >= copies {
            return Ok(false);
        }
        // Known once it is durable.
        if let Err(e) = inner.write_pin(name, copies, |_| false, true) {
            // The next start would find that record, so the earlier number is written after it.
            if let Err(again) = inner.write_pin(name, before, |_| false, true) {
                tracing::debug!(object = %name, error = %again, "what a pin was before is not for \
                    certain on the disk");
            }
            return Err(e);
        }
        inner.pins.set_copies(hash, copies);
        Ok(true)
    }

    /// Pins many objects, as [`Store::pin`] does each, and says of each whether that changed anything.
    /// They are synced together.
    pub fn pin_all(&self, names: &[ObjectName]) -> Vec<Result<bool>> {
        let groups = names.chunks(TOGETHER);
        groups.flat_map(|group| self.pin_group(group)).collect()
    }

    fn pin_group(&self, names: &[ObjectName]) -> Vec<Result<bool>> {
        let _open = match self.inner.open_for_writes() {
            Ok(open) => open,
            Err(e) => return names.iter().map(|_| Err(e.clone())).collect(),
        };
        let inner = &self.inner;
        // Whoever takes several takes them in this order.
        let _turns: Vec<_> = inner.pins.turns.iter().map(|turn| turn.lock()).collect();
        let begin = |name: &ObjectName| match inner.pins.contains(name.hash128()) {
            true => inner.sync_begun(name).map(|()| false),
            false => self.add_pin(name, 1, false).map(|()| true),
        };
        let mut all: Vec<Result<bool>> = names.iter().map(begin).collect();
        let mut synced = HashMap::new();
        for (name, done) in names.iter().zip(&mut all) {
            let failed = match done {
                Ok(true) => inner.sync_pin(name, &mut synced).err(),
                // It is in the list twice, and was not pinned the first time.
                Ok(false) if !inner.pins.contains(name.hash128()) => {
                    Some(Error::internal(format!("{name} could not be pinned")))
                }
                _ => None,
            };
            if let Some(e) = failed {
                self.take_back(name);
                *done = Err(e);
            }
        }
        all
    }

    /// Adds a pin of a name that has none. If it `syncs`, it is on the disk afterwards.
    fn add_pin(&self, name: &ObjectName, copies: u8, syncs: bool) -> Result<()> {
        let inner = &self.inner;
        let own = padded(record_len(name.bucket().len() + 1 + name.key().len(), 0, 0))
            * inner.dirs.len() as u64;
        inner
            .pins
            .add(name, copies, own, None)
            .map_err(|total| self.pins_full(name, total))?;
        if let Err(e) = self.hold_cached(name) {
            self.release(name);
            return Err(e);
        }
        // Anew, even if there is a record: that may be one that could not be synced.
        let written = inner.write_pin(name, copies, |_| false, syncs);
        if written.is_err() {
            self.take_back(name);
        }
        written
    }

    /// Removes a pin that could not be made durable, and its records: the next start would find them.
    fn take_back(&self, name: &ObjectName) {
        self.release(name);
        for dir in &self.inner.dirs {
            let key = pin_key(name.hash128(), dir.id);
            if self.inner.index.peek(key).is_some() {
                self.inner.bury(key, name.bucket(), name.key());
            }
        }
    }

    fn pins_full(&self, name: &ObjectName, total: u64) -> Error {
        Error::new(
            ErrorKind::TooLarge,
            format!(
                "{name} cannot be pinned: pinned objects would take {}; the limit is {}, half of \
                 the cache",
                format_bytes(total),
                format_bytes(self.inner.pins.limit())
            ),
        )
        .hint("unpin other objects, or give the cache more space")
    }

    /// Makes a new pin hold what is already cached.
    fn hold_cached(&self, name: &ObjectName) -> Result<()> {
        match self.inner.hold_cached(name) {
            None | Some((true, _)) => Ok(()),
            Some((false, cost)) => Err(self.pins_full(name, self.inner.pins.cost() + cost)),
        }
    }

    fn release(&self, name: &ObjectName) -> bool {
        let was = self.inner.pins.remove(name);
        let key = self.inner.head_key(name);
        let mut shard = self.inner.index.shard(key);
        if let Some(entry) = shard.get(key) {
            entry.clear(PINNED);
        }
        was
    }

    /// Ends a pin. `false`: there was no pin.
    pub fn unpin(&self, name: &ObjectName) -> bool {
        let Ok(_open) = self.inner.open_for_writes() else {
            return false;
        };
        let _turn = self.inner.pins.turn(name.hash128());
        let was = self.release(name);
        if was {
            for dir in &self.inner.dirs {
                self.inner
                    .bury(pin_key(name.hash128(), dir.id), name.bucket(), name.key());
            }
        }
        was
    }

    /// Whether a name is pinned, cached or not. RAM only.
    pub fn is_pinned(&self, name: &ObjectName) -> bool {
        self.inner.pins.contains(name.hash128())
    }

    /// All pinned names, cached or not, in the order of names.
    pub fn pinned(&self) -> Vec<ObjectName> {
        self.pinned_on().into_iter().map(|(name, _)| name).collect()
    }

    /// The same, each with the number of nodes on which it is to be kept.
    pub fn pinned_on(&self) -> Vec<(ObjectName, u8)> {
        let mut names = self.inner.pins.names();
        names.sort();
        names
    }

    /// On how many nodes an object is to be kept: 1 unless a pin says more. RAM only.
    pub fn copies_of_pin(&self, name: &ObjectName) -> u8 {
        match self.inner.pins.is_mirrored() {
            false => 1,
            true => self.inner.pins.copies(name.hash128()),
        }
    }
}

impl Inner {
    /// Makes the pin of `name` hold the cached head, if there is one. Returns whether it does, and
    /// what the object costs.
    pub(crate) fn hold_cached(&self, name: &ObjectName) -> Option<(bool, u64)> {
        let key = self.head_key(name);
        let found = self.with_record(key, name, Wait::May, |entry: &Entry, record| {
            let meta = codec::decode(record.meta()).ok_or(Miss::NotHere)?;
            Ok((
                entry.seq,
                record.header.version,
                cost_of(name, &meta, record.meta().len()),
            ))
        });
        let (seq, version, cost) = found.unwrap_or_default()?;
        let held = self.pins.arrived(name.hash128(), version, cost);
        if held && let Some(entry) = self.index.shard(key).get(key).filter(|e| e.seq == seq) {
            entry.set(PINNED);
        }
        Some((held, cost))
    }

    /// Writes the pin's record to every directory that accepts it, except those that have this one
    /// already, by its key; and syncs it, if that is to be.
    fn write_pin(
        &self,
        name: &ObjectName,
        copies: u8,
        has: impl Fn(u128) -> bool,
        syncs: bool,
    ) -> Result<()> {
        let mut result = Err(Error::internal("the cache has no directory"));
        for dir in &self.dirs {
            let key = pin_key(name.hash128(), dir.id);
            let record = NewRecord {
                kind: Kind::Pin,
                flags: 0,
                key,
                bucket: name.bucket(),
                object_key: name.key(),
                meta: &[],
                data: &[],
                validated_at: 0,
                // Earlier releases wrote 0, and do not read it.
                version: u64::from(copies),
            };
            let written = match has(key) {
                // An earlier attempt may have failed to sync it.
                true => Ok(()),
                false => self.append_to(dir, &record, PIN),
            };
            let written = written.and_then(|()| match syncs {
                true => self.sync_record(dir, key),
                false => Ok(()),
            });
            if result.is_err() {
                result = written;
            }
        }
        result
    }

    /// Makes a pin durable that somebody else is making.
    fn sync_begun(&self, name: &ObjectName) -> Result<()> {
        let number = self.pins.unsynced(name.hash128());
        if number > 0 {
            self.sync_pin(name, &mut HashMap::new())?;
            self.pins.synced(name.hash128(), number);
        }
        Ok(())
    }

    /// Makes the record of `key` durable, and the name of the file that it is in: others may have gone
    /// on to a new file since it was written.
    fn sync_record(&self, dir: &Directory, key: u128) -> Result<()> {
        let entry = self.index.peek(key);
        match entry.and_then(|entry| self.segments.get(entry.slot())) {
            Some(segment) => self.sync_segment(dir, &segment),
            None => Ok(()),
        }
    }

    /// Makes the records of a pin durable, as far as their files are not `synced` already, by ordinal. It
    /// is enough if one is.
    fn sync_pin(&self, name: &ObjectName, synced: &mut HashMap<u64, Result<()>>) -> Result<()> {
        let mut result = Err(Error::internal(format!(
            "no directory has the pin of {name}"
        )));
        for dir in &self.dirs {
            let entry = self.index.peek(pin_key(name.hash128(), dir.id));
            let Some(segment) = entry.and_then(|entry| self.segments.get(entry.slot())) else {
                continue;
            };
            let done = synced
                .entry(segment.ordinal)
                .or_insert_with(|| self.sync_segment(dir, &segment));
            if result.is_err() {
                result = done.clone();
            }
        }
        result
    }

    pub(crate) fn sync_segment(&self, dir: &Directory, segment: &Segment) -> Result<()> {
        if segment.sync_failed.load(Relaxed) {
            // What is written from now on goes to another file: the directory may be well again.
            return Err(Error::internal(format!(
                "{}: an earlier sync of the file failed",
                segment.path.display()
            ))
            .hint("check the disk; the cache goes on without what was in it"));
        }
        let synced = segment.file.sync().and_then(|()| {
            if !segment.name_synced.load(Relaxed) {
                dir.disk.sync_dir(&dir.path)?;
                segment.name_synced.store(true, Relaxed);
            }
            Ok(())
        });
        synced.map_err(|e| {
            segment.sync_failed.store(true, Relaxed);
            dir.write_failed(e, self.now())
        })
    }

    /// Reads the names of all pins, and writes to each directory those that it lacks.
    pub(crate) fn load_pins(&self, away: &[bool]) {
        // Whatever is written at a start is in new files.
        let first = self.ordinals.load(Relaxed);
        let pins: Vec<Entry> = self
            .index
            .shards()
            .flat_map(|shard| {
                shard
                    .iter()
                    .filter(|e| e.has(PIN))
                    .copied()
                    .collect::<Vec<_>>()
            })
            .collect();
        let mut names: BTreeMap<ObjectName, u8> = BTreeMap::new();
        let mut stale = Vec::new();
        // What each record says, by its key.
        let mut recorded: HashMap<u128, u8> = HashMap::new();
        for entry in pins {
            let Some(segment) = self.segments.get(entry.slot()) else {
                continue;
            };
            let mut bytes = Vec::new();
            let read = segment
                .file
                .read_append(&mut bytes, entry.len as usize, entry.offset());
            let header = read
                .ok()
                .and_then(|()| Header::decode(&bytes, segment.place(entry.offset())))
                .filter(|h| h.body_is_whole(&bytes));
            let name = header.and_then(|h| {
                let (bucket, key) = split_name(&bytes[h.name_range()])?;
                let copies = u8::try_from(h.version).unwrap_or(1).max(1);
                Some((ObjectName::new(bucket, key).ok()?, copies))
            });
            match name {
                Some((name, copies)) if away[segment.dir] => {
                    recorded.insert(entry.key(), copies);
                    stale.push((entry.key(), name));
                }
                Some((name, copies)) => {
                    recorded.insert(entry.key(), copies);
                    let most = names.entry(name).or_default();
                    *most = copies.max(*most);
                }
                None => {
                    self.forget(entry.key(), |e| e.seq == entry.seq);
                }
            }
        }
        // All are held before anything is written, because writing may evict.
        names.retain(|name, copies| {
            let own = padded(record_len(name.bucket().len() + 1 + name.key().len(), 0, 0))
                * self.dirs.len() as u64;
            let held = self.pins.add(name, *copies, own, None).is_ok();
            if held {
                self.hold_cached(name);
            } else {
                tracing::warn!(object = %name, "an object is no longer pinned: the cache has become too small");
            }
            held
        });
        for (key, name) in stale
            .into_iter()
            .filter(|(_, name)| !names.contains_key(name))
        {
            self.bury(key, name.bucket(), name.key());
        }
        for (name, copies) in names {
            // A directory that was away may have another number, which would count at the next start.
            let has = |key| recorded.get(&key) == Some(&copies);
            if let Err(e) = self.write_pin(&name, copies, has, false) {
                tracing::warn!(object = %name, error = %e, "a pin could not be written to a cache directory");
            }
        }
        // Together, not one by one: there may be millions, and a directory may be new.
        for dir in &self.dirs {
            let state = dir.state.lock();
            let written: Vec<_> = state
                .segments
                .range(first..)
                .map(|(_, s)| s.clone())
                .collect();
            drop(state);
            let mut all = written.iter();
            if let Err(e) = all.try_for_each(|segment| self.sync_segment(dir, segment)) {
                tracing::warn!(dir = %dir.path.display(), error = %e, "pins that were written here may \
                    not outlive a loss of power");
            }
        }
    }
}
