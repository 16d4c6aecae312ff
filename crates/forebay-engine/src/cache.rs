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
    order: VecDeque<K>,
    cost: u64,
}

struct Slot<V> {
    value: V,
    cost: u64,
    visited: bool,
}

impl<K: Eq + Hash + Clone, V: Clone> BoundedCache<K, V> {
    pub(crate) fn new(max_cost: u64) -> Self {
        Self {
            inner: Mutex::new(Inner {
                map: HashMap::new(),
                order: VecDeque::new(),
                cost: 0,
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
        match inner.map.insert(
            key.clone(),
            Slot {
                value,
                cost,
                visited: false,
            },
        ) {
            Some(old) => inner.cost -= old.cost,
            None => inner.order.push_back(key),
        }
        inner.cost += cost;
        while inner.cost > self.max_cost {
            let Some(victim) = inner.order.pop_front() else {
                break;
            };
            match inner.map.get_mut(&victim) {
                Some(slot) if slot.visited => {
                    slot.visited = false;
                    inner.order.push_back(victim);
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
        if let Some(slot) = inner.map.remove(key) {
            inner.cost -= slot.cost;
            inner.order.retain(|k| k != key);
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
}
