//! Decoded blocks: those that are in use, and those that may be wanted again.
//!
//! A block is found here as long as anybody holds it. Besides, the cache holds the most recently used ones itself, up to its size. Their memory is of
//! the budget (each block carries its reservation), so the cache gives way when that is wanted elsewhere ([`BlockCache::give_way`]).
//!
//! Which blocks are worth it is told by their past: a block that is read in part for the second time while it is remembered is decoded whole
//! ([`BlockCache::touch`]). One pass over a large dataset in random order so leaves the cache alone; a dataset that fits is soon in it.
//!
//! Invariant: the blocks that the cache itself holds take at most `max_bytes`.

use super::lru::Lru;
use arrow_array::RecordBatch;
use forebay_core::{Reservation, VersionId, limits};
use parking_lot::Mutex;
use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Weak},
};

/// A block, or the wanted columns of it, whole.
#[derive(Debug)]
pub(super) struct Block {
    pub batch: RecordBatch,
    pub bytes: u64,
    pub _memory: Reservation,
}

/// What tells decoded blocks apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BlockKey {
    pub file: u128,
    pub version: VersionId,
    /// Of the dataset's options, the columns and their types.
    pub columns: u64,
    pub block: u32,
}

#[derive(Default)]
struct Inner {
    /// All that are in use anywhere.
    known: HashMap<BlockKey, Weak<Block>>,
    /// Those that are held here.
    held: Lru<BlockKey, Arc<Block>>,
    /// Blocks that were read in part, the oldest first.
    touched: HashSet<BlockKey>,
    touched_order: VecDeque<BlockKey>,
}

pub(super) struct BlockCache {
    inner: Mutex<Inner>,
    max_bytes: u64,
}

impl BlockCache {
    pub(super) fn new(max_bytes: u64) -> Self {
        Self { inner: Mutex::default(), max_bytes }
    }

    /// The largest block that is worth decoding for the cache alone.
    pub(super) fn takes(&self, bytes: u64) -> bool {
        bytes <= self.max_bytes / 2
    }

    pub(super) fn get(&self, key: &BlockKey) -> Option<Arc<Block>> {
        let mut inner = self.inner.lock();
        let block = inner.known.get(key)?.upgrade()?;
        inner.held.get(key);
        Some(block)
    }

    /// Makes a block known, and holds it if it is not too large.
    pub(super) fn insert(&self, key: BlockKey, block: &Arc<Block>) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        if inner.known.len() > 2 * inner.held.len() + 64 {
            inner.known.retain(|_, block| block.strong_count() > 0);
        }
        inner.known.insert(key, Arc::downgrade(block));
        if !self.takes(block.bytes) {
            return;
        }
        inner.held.insert(key, block.clone(), block.bytes);
        inner.held.shrink_to(self.max_bytes);
    }

    /// Notes that a block is read in part. `true`: it was before, not long ago.
    pub(super) fn touch(&self, key: BlockKey) -> bool {
        let mut inner = self.inner.lock();
        if !inner.touched.insert(key) {
            return true;
        }
        inner.touched_order.push_back(key);
        if inner.touched_order.len() > limits::ROWS_BLOCKS_REMEMBERED
            && let Some(oldest) = inner.touched_order.pop_front()
        {
            inner.touched.remove(&oldest);
        }
        false
    }

    /// Lets go of about so many bytes, the least recently used first.
    pub(super) fn give_way(&self, bytes: u64) {
        let mut inner = self.inner.lock();
        let left = inner.held.cost().saturating_sub(bytes);
        inner.held.shrink_to(left);
    }

    pub(super) fn len(&self) -> usize {
        self.inner.lock().held.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.inner.lock().held.cost()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_schema::Schema;
    use forebay_core::MemoryBudget;

    fn key(block: u32) -> BlockKey {
        BlockKey { file: 1, version: VersionId(2), columns: 3, block }
    }

    fn block(budget: &MemoryBudget, bytes: u64) -> Arc<Block> {
        let batch = RecordBatch::new_empty(Arc::new(Schema::empty()));
        Arc::new(Block { batch, bytes, _memory: budget.try_hold(bytes).unwrap() })
    }

    #[test]
    fn the_least_recently_used_goes_and_what_is_in_use_is_found() {
        let budget = MemoryBudget::new(1 << 20);
        let cache = BlockCache::new(10 << 10);
        for n in 0..20 {
            cache.insert(key(n), &block(&budget, 2 << 10));
            assert!(cache.get(&key(0)).is_some(), "used after each insert");
            assert!(cache.bytes() <= 10 << 10);
            assert_eq!(budget.used_bytes(), cache.bytes(), "what the cache lets go of comes back to the budget");
        }
        assert_eq!(cache.len(), 5);
        assert!(cache.get(&key(3)).is_none() && cache.get(&key(19)).is_some());
        // Too large to be kept, but found while somebody has it.
        let large = block(&budget, 8 << 10);
        cache.insert(key(100), &large);
        assert!(cache.get(&key(100)).is_some() && cache.len() == 5);
        drop(large);
        assert!(cache.get(&key(100)).is_none());
        cache.give_way(3 << 10);
        assert_eq!(cache.len(), 3);
        cache.insert(key(19), &block(&budget, 1 << 10));
        cache.give_way(u64::MAX);
        assert_eq!((cache.len(), cache.bytes(), budget.used_bytes()), (0, 0, 0));
    }

    #[test]
    fn a_block_is_worth_decoding_when_it_is_read_again() {
        let cache = BlockCache::new(1);
        assert!(!cache.touch(key(1)) && !cache.touch(key(2)) && cache.touch(key(1)));
        for n in 0..limits::ROWS_BLOCKS_REMEMBERED as u32 {
            cache.touch(key(10 + n));
        }
        assert!(!cache.touch(key(1)), "forgotten");
    }
}
