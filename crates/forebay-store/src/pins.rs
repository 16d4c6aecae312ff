//! Names that the evictor must keep.
//!
//! A pin is a record of its own in the log of *every* directory, so that it outlives restarts and the loss of a directory, and needs no file
//! besides. It may be set before the object is cached. It holds the head, the chunks and the derived data of the current version.
//!
//! Invariant: what the held pins cost (whole objects and the pins' own records) is at most half of the capacity, so the evictor always finds something to drop.
//! A pinned object that would go over it when it arrives is cached, but not held; [`Pins::not_held`] counts those.

use crate::record::{padded, record_len};
use forebay_core::{ObjectMeta, ObjectName, limits::CHUNK_BYTES};
use parking_lot::RwLock;
use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
};

struct Pin {
    name: ObjectName,
    /// The version that is held; `None`: nothing is cached yet, or the object is too large to be held.
    version: Option<u64>,
    too_large: bool,
    own_cost: u64,
    object_cost: u64,
}

pub struct Pins {
    map: RwLock<HashMap<u128, Pin>>,
    count: AtomicUsize,
    cost: AtomicU64,
    limit: u64,
}

/// What an object takes when it is cached whole.
pub fn cost_of(name: &ObjectName, meta: &ObjectMeta, meta_len: usize) -> u64 {
    let name_len = name.bucket().len() + 1 + name.key().len();
    if meta.size <= CHUNK_BYTES {
        return padded(record_len(name_len, meta_len, meta.size as usize));
    }
    let chunk = |n: u64| padded(record_len(name_len, crate::key::PART_META_BYTES, n as usize));
    let (whole, rest) = (meta.size / CHUNK_BYTES, meta.size % CHUNK_BYTES);
    padded(record_len(name_len, meta_len, 0)) + whole * chunk(CHUNK_BYTES) + if rest > 0 { chunk(rest) } else { 0 }
}

impl Pins {
    pub fn new(capacity: u64) -> Self {
        Self { map: RwLock::default(), count: AtomicUsize::new(0), cost: AtomicU64::new(0), limit: capacity / 2 }
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

    pub fn names(&self) -> Vec<ObjectName> {
        self.map.read().values().map(|p| p.name.clone()).collect()
    }

    /// Adds a pin, with the version that is cached and what it takes. `Err`: what all pins would cost.
    pub fn add(&self, name: &ObjectName, own_cost: u64, cached: Option<(u64, u64)>) -> Result<(), u64> {
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
        map.insert(name.hash128(), Pin { name: name.clone(), version: cached.map(|c| c.0), too_large: false, own_cost, object_cost });
        self.count.store(map.len(), Relaxed);
        Ok(())
    }

    pub fn remove(&self, name: &ObjectName) -> bool {
        let mut map = self.map.write();
        let Some(pin) = map.remove(&name.hash128()) else { return false };
        self.cost.fetch_sub(pin.own_cost + pin.object_cost, Relaxed);
        self.count.store(map.len(), Relaxed);
        true
    }

    /// A head of this name is there now. Returns whether it is held.
    pub fn arrived(&self, hash: u128, version: u64, object_cost: u64) -> bool {
        if self.is_empty() {
            return false;
        }
        let mut map = self.map.write();
        let Some(pin) = map.get_mut(&hash) else { return false };
        let others = self.cost.load(Relaxed) - pin.object_cost;
        pin.too_large = others + object_cost > self.limit;
        (pin.version, pin.object_cost) = if pin.too_large { (None, 0) } else { (Some(version), object_cost) };
        self.cost.store(others + pin.object_cost, Relaxed);
        if pin.too_large {
            tracing::warn!(object = %pin.name, "pinned, but not held: the pins would take more than half of the cache");
        }
        !pin.too_large
    }

    /// Whether the evictor must keep a record of this name and version.
    pub fn holds(&self, hash: u128, version: u64) -> bool {
        !self.is_empty() && self.map.read().get(&hash).is_some_and(|p| p.version == Some(version))
    }
}
