//! What operators and planners ask of the cache, and do to it. The store is reached only through
//! the engine: other callers would write to the disk on any thread.

use crate::{Engine, Head, ReadOptions, bytesio::blocking};
use forebay_core::{Error, ObjectName, Result};
use forebay_store::{Advisor, Sources, StoreStats};
use std::sync::Arc;

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
    /// When the origin last said that it was current; 0: the origin must be asked before this is
    /// used.
    pub validated_at_secs: u32,
    /// Whether its name is pinned; names that are not cached can be pinned too.
    pub pinned: bool,
    /// Cached bytes of its current version.
    pub bytes: u64,
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

    /// All pinned names, cached or not, in the order of names, each with the number of nodes that are to
    /// keep it.
    ///
    /// # Errors
    /// `Unsupported` if there is no cache.
    pub fn pinned(&self) -> Result<Vec<(ObjectName, u8)>> {
        Ok(self.cache()?.pinned_on())
    }

    /// The current version's head, and what was cached of it before this call.
    ///
    /// # Errors
    /// As [`Engine::head`].
    pub async fn stat(&self, name: &ObjectName) -> Result<(Head, CachedState)> {
        let before = self.inner.store.as_ref().and_then(|s| s.peek(name));
        let head = self.head(name, &ReadOptions::default()).await?;
        let mut state = CachedState {
            validated_at_secs: before.map_or(0, |p| p.validated_at_secs),
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
        let store = self.cache()?.clone();
        blocking(move || {
            let change_one = |name: &ObjectName| -> Result<u64> {
                let is_pinned = store.is_pinned(name);
                Ok(match change {
                    CacheChange::Pin if is_pinned => 0,
                    CacheChange::Pin if dry_run => 1,
                    CacheChange::Pin => store.pin(name).map(|()| 1)?,
                    CacheChange::PinOn(copies) if dry_run => {
                        let has = is_pinned && store.copies_of_pin(name) >= copies;
                        u64::from(!has)
                    }
                    CacheChange::PinOn(copies) => u64::from(store.pin_on(name, copies)?),
                    CacheChange::Unpin if dry_run => u64::from(is_pinned),
                    CacheChange::Unpin => u64::from(store.unpin(name)),
                    CacheChange::Evict if is_pinned => 0,
                    CacheChange::Evict if dry_run => store.evictable_bytes(name),
                    CacheChange::Evict => store.evict(name),
                })
            };
            let each = names.into_iter().map(|name| {
                let done = change_one(&name);
                (name, done)
            });
            each.collect()
        })
        .await
    }

    fn cache(&self) -> Result<&Arc<forebay_store::Store>> {
        self.inner.store.as_ref().ok_or_else(|| {
            Error::unsupported("this node has no cache").hint("start it with --cache DIR:SIZE")
        })
    }
}
