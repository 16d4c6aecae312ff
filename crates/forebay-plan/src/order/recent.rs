//! The last few values of an expensive function: a group's permutation and offsets, an epoch's
//! prefix sums, a cycle's slots.

use std::{collections::VecDeque, sync::Arc, sync::Mutex, sync::PoisonError};

/// Keeps the `limit` most recently used values.
#[derive(Debug)]
pub(crate) struct Recent<K, V> {
    limit: usize,
    values: Mutex<VecDeque<(K, Arc<V>)>>,
}

impl<K: PartialEq + Copy, V> Recent<K, V> {
    pub fn new(limit: usize) -> Self {
        Recent {
            limit,
            values: Mutex::default(),
        }
    }

    /// How many values it keeps.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// The value for a key. It is made outside the lock: two callers that need it at the same time
    /// may both make it, and neither waits for the other.
    pub fn get(&self, key: K, make: impl FnOnce() -> V) -> Arc<V> {
        if let Some(value) = self.find(key) {
            return value;
        }
        let value = Arc::new(make());
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        values.push_front((key, value.clone()));
        values.truncate(self.limit);
        value
    }

    fn find(&self, key: K) -> Option<Arc<V>> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        let at = values.iter().position(|(k, _)| *k == key)?;
        if at > 0 {
            let found = values.remove(at)?;
            values.push_front(found);
        }
        values.front().map(|(_, value)| value.clone())
    }
}
