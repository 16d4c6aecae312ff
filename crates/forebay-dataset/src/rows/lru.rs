//! A map with bounded cost that drops the least recently used entry first.
//!
//! Invariant: `by_use` has exactly one entry for each of `held`, and `cost` is the sum of theirs.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
};

pub(super) struct Lru<K, V> {
    held: HashMap<K, Held<V>>,
    by_use: BTreeMap<u64, K>,
    uses: u64,
    cost: u64,
}

struct Held<V> {
    value: V,
    cost: u64,
    used: u64,
}

impl<K, V> Default for Lru<K, V> {
    fn default() -> Self {
        Self {
            held: HashMap::new(),
            by_use: BTreeMap::new(),
            uses: 0,
            cost: 0,
        }
    }
}

impl<K: Copy + Eq + Hash, V> Lru<K, V> {
    /// The value, which counts as used now.
    pub(super) fn get(&mut self, key: &K) -> Option<&V> {
        let held = self.held.get_mut(key)?;
        self.uses += 1;
        self.by_use.remove(&held.used);
        held.used = self.uses;
        self.by_use.insert(self.uses, *key);
        Some(&held.value)
    }

    pub(super) fn insert(&mut self, key: K, value: V, cost: u64) {
        self.uses += 1;
        if let Some(old) = self.held.insert(
            key,
            Held {
                value,
                cost,
                used: self.uses,
            },
        ) {
            self.by_use.remove(&old.used);
            self.cost -= old.cost;
        }
        self.by_use.insert(self.uses, key);
        self.cost += cost;
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        let gone = self.held.remove(key)?;
        self.by_use.remove(&gone.used);
        self.cost -= gone.cost;
        Some(gone.value)
    }

    /// Drops least recently used ones for which `may` holds, until as much has gone.
    pub(super) fn drop_some(&mut self, cost: u64, may: impl Fn(&V) -> bool) {
        let mut gone = Vec::new();
        let mut dropped = 0;
        for key in self.by_use.values() {
            if dropped >= cost {
                break;
            }
            if let Some(held) = self.held.get(key).filter(|held| may(&held.value)) {
                dropped += held.cost;
                gone.push(*key);
            }
        }
        for key in gone {
            self.remove(&key);
        }
    }

    /// The cost of those for which `of` holds.
    pub(super) fn cost_of(&self, of: impl Fn(&V) -> bool) -> u64 {
        let held = self.held.values().filter(|held| of(&held.value));
        held.map(|held| held.cost).sum()
    }

    /// Drops the least recently used ones until the cost is at most this.
    pub(super) fn shrink_to(&mut self, cost: u64) {
        while self.cost > cost
            && let Some((_, key)) = self.by_use.pop_first()
        {
            if let Some(gone) = self.held.remove(&key) {
                self.cost -= gone.cost;
            }
        }
    }

    /// The same, but never the most recently used one.
    pub(super) fn shrink_to_most(&mut self, cost: u64) {
        while self.cost > cost
            && self.held.len() > 1
            && let Some((_, key)) = self.by_use.pop_first()
        {
            if let Some(gone) = self.held.remove(&key) {
                self.cost -= gone.cost;
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    pub(super) fn cost(&self) -> u64 {
        self.cost
    }
}
