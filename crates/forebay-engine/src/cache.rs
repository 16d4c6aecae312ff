//! A map of bounded cost: the least recently used half makes room, by second chance.

use forebay_core::sync::Mutex;
use hashbrown::HashMap;
use std::{collections::VecDeque, hash::Hash};

pub(crate) struct BoundedCache<K, V> {
    inner: Mutex<Inner<K, V>>,
    max_cost: u64,
}

struct Inner<K, V> {
    map: HashMap<K, Slot<V>>,
    /// Keys with the number of their slot. One whose slot has another number, or is gone, was
    /// removed: it stays here until it is its turn, or until there are too many of them.
    order: VecDeque<(K, u64)>,
    cost: u64,
    slots_made: u64,
}

struct Slot<V> {
    value: V,
    cost: u64,
    visited: bool,
    number: u64,
}

/// So many removed keys may lie in the queue beside as many as there are others.
const REMOVED_KEYS_MAX: usize = 64;

impl<K: Eq + Hash + Clone, V: Clone> BoundedCache<K, V> {
    pub(crate) fn new(max_cost: u64) -> Self {
        Self {
            inner: Mutex::new(Inner {
                map: HashMap::new(),
                order: VecDeque::new(),
                cost: 0,
                slots_made: 0,
            }),
            max_cost,
        }
    }

    pub(crate) fn get(&self, key: &K) -> Option<V> {
        let mut inner = self.inner.lock();
        let slot = inner.map.get_mut(key)?;
        slot.visited = true;
        Some(slot.value.clone())
    }

    /// Keeps `value`, unless it alone costs more than the whole cache may.
    pub(crate) fn insert(&self, key: K, value: V, cost: u64) {
        if cost > self.max_cost {
            self.remove(&key);
            return;
        }
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        match inner.map.get_mut(&key) {
            Some(slot) => {
                inner.cost -= slot.cost;
                (slot.value, slot.cost, slot.visited) = (value, cost, false);
            }
            None => {
                let number = inner.slots_made;
                inner.slots_made += 1;
                inner.order.push_back((key.clone(), number));
                let slot = Slot {
                    value,
                    cost,
                    visited: false,
                    number,
                };
                inner.map.insert(key, slot);
            }
        }
        inner.cost += cost;
        while inner.cost > self.max_cost {
            let Some((victim, number)) = inner.order.pop_front() else {
                break;
            };
            match inner.map.get_mut(&victim).filter(|s| s.number == number) {
                Some(slot) if slot.visited => {
                    slot.visited = false;
                    inner.order.push_back((victim, number));
                }
                Some(slot) => {
                    inner.cost -= slot.cost;
                    inner.map.remove(&victim);
                }
                None => {}
            }
        }
    }

    pub(crate) fn remove(&self, key: &K) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        if let Some(slot) = inner.map.remove(key) {
            inner.cost -= slot.cost;
            // The queue is looked through once for as many removals as it is long.
            if inner.order.len() > 2 * inner.map.len() + REMOVED_KEYS_MAX {
                let map = &inner.map;
                inner
                    .order
                    .retain(|(k, number)| map.get(k).is_some_and(|s| s.number == *number));
            }
        }
    }

    #[cfg(test)]
    fn cost(&self) -> u64 {
        self.inner.lock().cost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_is_bounded_and_what_is_used_stays() {
        let c = BoundedCache::new(10);
        for k in 0..100 {
            c.insert(k, k, 2);
            assert!(c.get(&0).is_some(), "used after each insert");
            assert!(c.cost() <= 10);
        }
        c.insert(200, 200, 11);
        assert!(c.get(&200).is_none());
        c.remove(&0);
        assert!(c.get(&0).is_none());
        c.insert(99, 1, 4);
        assert_eq!(c.get(&99), Some(1));
        assert!(c.cost() <= 10);
    }

    #[test]
    fn what_is_removed_and_comes_again_counts_once_and_leaves_no_trace() {
        let c = BoundedCache::new(1000);
        for k in 0..100 {
            c.insert(k, k, 1);
        }
        for round in 0..1000 {
            c.insert(7, round, 1);
            assert_eq!(c.get(&7), Some(round));
            c.remove(&7);
            assert!(c.get(&7).is_none());
        }
        assert_eq!(c.cost(), 99);
        let queued = c.inner.lock().order.len();
        assert!(queued <= 2 * 99 + REMOVED_KEYS_MAX + 1, "{queued}");
        // What came again is as new as its last coming, whatever its first one says.
        let c = BoundedCache::new(3);
        c.insert(1, 1, 1);
        c.insert(2, 2, 1);
        c.remove(&1);
        c.insert(1, 1, 1);
        c.insert(3, 3, 1);
        c.insert(4, 4, 1);
        assert!(
            c.get(&2).is_none() && c.get(&1).is_some(),
            "2 is the oldest"
        );
    }
}
