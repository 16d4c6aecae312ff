//! What operators and planners ask of the cache, and do to it. The store is reached only through
//! the engine: other callers would write to the disk on any thread.

use crate::{Engine, Head, ReadOptions, bytesio::blocking};
use forebay_core::{Error, ObjectName, Result, VersionId, limits::CHUNK_BYTES};
use forebay_store::{Advisor, NewPin, Part, PinnedLater, Sources, Store, StoreStats, Wait};
use std::{cell::RefCell, ops::Range, sync::Arc};

/// How many names of a long list are changed before their pins are synced together.
const PINS_TOGETHER: usize = 500;

/// What can be done to the cached data of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheChange {
    /// Keep it: eviction skips it until it is unpinned.
    Pin,
    /// The same, and remember that so many nodes of a cluster are to keep it.
    PinOn(u8),
    /// Let eviction choose it again.
    Unpin,
    /// Drop what the disk holds of it, unless it is pinned.
    Evict,
}

/// What this node holds of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedState {
    /// When the origin last said that it was current, seconds since the Unix epoch; 0: the origin must
    /// be asked before this is used; 1: that was long ago.
    pub validated_at_secs: u32,
    /// Whether its name is pinned; names that are not cached can be pinned too.
    pub pinned: bool,
    /// Cached bytes of its current version.
    pub bytes: u64,
}

/// What this node's disk has of the version of an object that it knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// The version.
    pub version: VersionId,
    /// When it was last known to be current, seconds since the Unix epoch.
    pub validated_at_secs: u32,
    /// The object's size in bytes.
    pub size: u64,
    /// The chunks that are here, as ranges of their numbers; a small object is one chunk.
    pub chunks: Vec<Range<u32>>,
}

/// The second of the wall clock at which a head was stamped, for others than this process. What stands
/// for no time stays.
fn by_wall(validated_at_secs: u32, ahead: u32) -> u32 {
    let at = validated_at_secs.saturating_sub(ahead);
    at.max(validated_at_secs.min(1))
}

impl Holding {
    /// `ahead` is [`Engine::ahead_secs`].
    fn of(store: &Store, name: &ObjectName, ahead: u32) -> Option<Self> {
        let head = store.head(name, Wait::May).unwrap_or_default()?;
        let (meta, is_whole) = (&head.meta, head.data.is_some());
        let here = |i: &u32| is_whole || store.has_part(name, meta.version(), Part::Chunk(*i));
        let all = u32::try_from(meta.size.div_ceil(CHUNK_BYTES)).unwrap_or(u32::MAX);
        let mut chunks: Vec<Range<u32>> = Vec::new();
        for i in (0..all).filter(here) {
            match chunks.last_mut() {
                Some(last) if last.end == i => last.end = i + 1,
                _ => chunks.push(i..i + 1),
            }
        }
        Some(Holding {
            version: meta.version(),
            validated_at_secs: by_wall(head.validated_at_secs, ahead),
            size: meta.size,
            chunks,
        })
    }
}

impl Engine {
    /// What the store reports about itself, if there is one.
    pub fn cache_stats(&self) -> Option<StoreStats> {
        self.inner.store.as_ref().map(|s| s.stats())
    }

    /// From now on, `advisor` says what is wanted next; `None`: nobody does.
    pub fn set_advisor(&self, advisor: Option<Arc<dyn Advisor>>) {
        if let Some(store) = &self.inner.store {
            store.set_advisor(advisor);
        }
    }

    /// Sets where the objects of each bucket come from, from now on.
    pub fn set_sources(&self, sources: &Sources) {
        if let Some(store) = &self.inner.store {
            store.set_sources(sources);
        }
    }

    /// Whether anything of this name is cached. RAM only.
    pub fn is_cached(&self, name: &ObjectName) -> bool {
        let store = self.inner.store.as_ref();
        store.is_some_and(|s| s.peek(name).is_some())
    }

    /// How much later it is by the time with which heads are stamped than by the wall clock, which was
    /// set back.
    fn ahead_secs(&self) -> u32 {
        // In this order: it seems no later than it is.
        let now = self.now_secs();
        now.saturating_sub(self.inner.clock.now_secs())
    }

    /// All pinned names, cached or not, in the order of names, each with the number of nodes that are to
    /// keep it.
    ///
    /// # Errors
    /// `Unsupported` if there is no cache.
    pub fn pinned(&self) -> Result<Vec<(ObjectName, u8)>> {
        Ok(self.cache()?.pinned_on())
    }

    /// On how many nodes a pin wants the object; `None` if it is not pinned here. RAM only.
    pub fn pin_of(&self, name: &ObjectName) -> Option<u8> {
        let store = self.inner.store.as_ref()?;
        store.is_pinned(name).then(|| store.copies_of_pin(name))
    }

    /// What this node has of each of these objects; `None`: nothing.
    ///
    /// # Errors
    /// `Unsupported` if there is no cache.
    pub async fn holdings(&self, names: Vec<ObjectName>) -> Result<Vec<Option<Holding>>> {
        let (store, ahead) = (self.cache()?.clone(), self.ahead_secs());
        let of = move || {
            let names = names.iter();
            names.map(|name| Holding::of(&store, name, ahead)).collect()
        };
        blocking(of).await
    }

    /// For each of these objects whether this node keeps what another one has: it has pinned it, and
    /// has the same chunks of the same version, or knows a version that was current later. Where
    /// the other one has no chunks, the pin is enough.
    ///
    /// # Errors
    /// `Unsupported` if there is no cache.
    pub async fn keeps_what_is_held(&self, held: Vec<(ObjectName, Holding)>) -> Result<Vec<bool>> {
        let (store, ahead) = (self.cache()?.clone(), self.ahead_secs());
        let keeps = move |(name, held): (ObjectName, Holding)| {
            if held.chunks.is_empty() || !store.is_pinned(&name) {
                return store.is_pinned(&name);
            }
            let Some(mine) = Holding::of(&store, &name, ahead) else {
                return false;
            };
            if mine.version != held.version {
                return mine.validated_at_secs >= held.validated_at_secs;
            }
            let has = |chunks: &Range<u32>| {
                let mut all = mine.chunks.iter();
                all.any(|c| c.start <= chunks.start && chunks.end <= c.end)
            };
            held.chunks.iter().all(has)
        };
        blocking(move || held.into_iter().map(keeps).collect()).await
    }

    /// The current version's head, and what was cached of it before this call.
    ///
    /// # Errors
    /// As [`Engine::head`].
    pub async fn stat(&self, name: &ObjectName) -> Result<(Head, CachedState)> {
        let before = self.inner.store.as_ref().and_then(|s| s.peek(name));
        let head = self.head(name, &ReadOptions::default()).await?;
        let ahead = self.ahead_secs();
        let mut state = CachedState {
            validated_at_secs: before.map_or(0, |p| by_wall(p.validated_at_secs, ahead)),
            ..CachedState::default()
        };
        if let Some(store) = self.inner.store.clone() {
            state.pinned = store.is_pinned(name);
            if self.store_for(name).is_some() {
                let (name, meta) = (name.clone(), head.meta.clone());
                state.bytes = blocking(move || store.coverage(&name, &meta)).await?;
            }
        }
        Ok((head, state))
    }

    /// Applies the change to each of `names`, or in a dry run says what would be done. Each name
    /// comes with its result: 0 if nothing changed (pinned objects are not evicted); for an
    /// eviction, the bytes freed.
    ///
    /// # Errors
    /// `Unsupported` if there is no cache.
    pub async fn change_cache(
        &self,
        change: CacheChange,
        names: Vec<ObjectName>,
        dry_run: bool,
    ) -> Result<Vec<(ObjectName, Result<u64>)>> {
        if change == CacheChange::Pin && !dry_run {
            let store = self.cache()?.clone();
            return blocking(move || {
                let pinned = store.pin_all(&names).into_iter();
                let pinned = pinned.map(|done| done.map(u64::from));
                names.into_iter().zip(pinned).collect()
            })
            .await;
        }
        let each = move |_: &ObjectName, apply: &dyn Fn(CacheChange) -> Result<u64>| apply(change);
        self.change_cache_each(names, dry_run, each).await
    }

    /// The same with a change of its own for each name: `each` is called with each name, on a thread
    /// that may wait, and with what makes a change to it. What `each` holds meanwhile (a lock, perhaps)
    /// is its own affair.
    ///
    /// # Errors
    /// `Unsupported` if there is no cache.
    pub async fn change_cache_each(
        &self,
        names: Vec<ObjectName>,
        dry_run: bool,
        each: impl Fn(&ObjectName, &dyn Fn(CacheChange) -> Result<u64>) -> Result<u64> + Send + 'static,
    ) -> Result<Vec<(ObjectName, Result<u64>)>> {
        let store = self.cache()?.clone();
        blocking(move || {
            let new: RefCell<Vec<NewPin>> = RefCell::default();
            let pin = |name: &ObjectName, copies: u8| -> Result<u64> {
                Ok(match store.pin_later(name, copies)? {
                    PinnedLater::Before => 0,
                    PinnedLater::Raised => 1,
                    PinnedLater::New(pin) => {
                        new.borrow_mut().push(pin);
                        1
                    }
                })
            };
            let change_one = |name: &ObjectName, change: CacheChange| -> Result<u64> {
                let is_pinned = store.is_pinned(name);
                Ok(match change {
                    CacheChange::Pin if dry_run => u64::from(!is_pinned),
                    // That of somebody else may not be on the disk yet.
                    CacheChange::Pin => pin(name, 1)?,
                    CacheChange::PinOn(copies) if dry_run => {
                        let has = is_pinned && store.copies_of_pin(name) >= copies;
                        u64::from(!has)
                    }
                    CacheChange::PinOn(copies) => pin(name, copies)?,
                    CacheChange::Unpin if dry_run => u64::from(is_pinned),
                    CacheChange::Unpin => u64::from(store.unpin(name)),
                    CacheChange::Evict if is_pinned => 0,
                    CacheChange::Evict if dry_run => store.evictable_bytes(name),
                    CacheChange::Evict => store.evict(name),
                })
            };
            let (mut all, mut names) = (Vec::with_capacity(names.len()), names.into_iter());
            while names.len() > 0 {
                let from = all.len();
                for name in names.by_ref().take(PINS_TOGETHER) {
                    let done = each(&name, &|change| change_one(&name, change));
                    all.push((name, done));
                }
                let pins = new.take();
                for (pin, synced) in pins.iter().zip(store.sync_pins(&pins)) {
                    let Err(e) = synced else {
                        continue;
                    };
                    let of_pin = all[from..]
                        .iter_mut()
                        .filter(|(name, _)| name == pin.name());
                    of_pin.for_each(|(_, done)| *done = Err(e.clone()));
                }
            }
            all
        })
        .await
    }

    fn cache(&self) -> Result<&Arc<forebay_store::Store>> {
        self.inner.store.as_ref().ok_or_else(|| {
            Error::unsupported("this node has no cache").hint("start it with --cache DIR:SIZE")
        })
    }
}
