//! Decoded blocks: those in use, and those that may be wanted again.
//!
//! A block is found here as long as anybody holds it. In addition, the cache itself holds the most
//! recently used ones, up to its size. Their memory comes from the budget (each block carries its
//! reservation), so the cache gives way if that is wanted elsewhere ([`BlockCache::give_way`]).
//!
//! Their past decides which blocks are worth decoding whole, as in the choice between renting and
//! buying: the cache remembers what reading a block in part has cost so far, and when that reaches
//! the cost of decoding it whole, the block is decoded whole and kept ([`BlockCache::is_worth`]).
//! So the total is at most twice the least possible. If single pages can be read, that takes many
//! reads; if the whole row group must be decoded for one row, it takes two. The cache remembers no
//! more than it could hold: a dataset much larger than the cache, read in random order, does not
//! disturb it.
//!
//! Invariant: the blocks that the cache itself holds take at most `max_bytes`.

use super::{grown::Grown, lru::Lru, pieces::Pieces};
use forebay_core::{VersionId, limits, sync::Mutex};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Weak},
};

/// Kinds of columns whose decoding costs are remembered.
const COLUMNS_REMEMBERED: usize = 1024;

/// A whole block, or its wanted columns.
#[derive(Debug)]
pub(super) struct Block {
    pub pieces: Pieces,
    pub bytes: u64,
    pub _memory: Grown,
}

/// What distinguishes decoded blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BlockKey {
    pub file: u128,
    pub version: VersionId,
    /// A hash of the dataset's options, the columns and their types.
    pub columns: u64,
    pub block: u32,
}

#[derive(Default)]
struct Inner {
    /// All blocks in use anywhere.
    known: HashMap<BlockKey, Weak<Block>>,
    /// Those held here.
    held: Lru<BlockKey, Arc<Block>>,
    /// Blocks that were read in part: what that has cost, in nanoseconds, and their bytes.
    spent: HashMap<BlockKey, (u64, u64)>,
    /// Their keys, the oldest first.
    spent_order: VecDeque<BlockKey>,
    spent_bytes: u64,
    /// Blocks for which there was no memory: the minimum that they take; and their keys, the oldest
    /// first.
    needs: HashMap<BlockKey, u64>,
    needs_order: VecDeque<BlockKey>,
    /// For blocks that were decoded whole lately, by their columns: nanoseconds, bytes in the file,
    /// bytes decoded.
    whole: HashMap<u64, (f64, f64, f64)>,
}

pub(super) struct BlockCache {
    inner: Mutex<Inner>,
    max_bytes: u64,
}

impl Inner {
    /// Nanoseconds, bytes in the file and decoded bytes, in proportion. Initially 250 MB/s, and a 3
    /// to 1 packing ratio, as for text.
    fn whole_costs(&self, columns: u64) -> (f64, f64, f64) {
        self.whole
            .get(&columns)
            .copied()
            .filter(|w| w.1 > 0.0 && w.2 > 0.0)
            .unwrap_or((4.0, 1.0, 3.0))
    }
}

impl BlockCache {
    pub(super) fn new(max_bytes: u64) -> Self {
        Self {
            inner: Mutex::default(),
            max_bytes,
        }
    }

    pub(super) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Whether a block of this size is worth decoding for the cache alone.
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
        // It was bought: once it has gone, it is rented again before it is bought again. Otherwise
        // blocks that take turns in a cache that is too small for all of them would be decoded
        // whole each time, for the few rows that are wanted at that time.
        if let Some((_, bytes)) = inner.spent.remove(&key) {
            inner.spent_bytes -= bytes;
        }
        inner.held.shrink_to(self.max_bytes);
    }

    /// Notes that reading some rows of a block, with this many bytes in its file, took this long.
    pub(super) fn spent(&self, key: BlockKey, bytes: u64, ns: u64) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        if let Some((so_far, _)) = inner.spent.get_mut(&key) {
            *so_far += ns;
            return;
        }
        inner.spent.insert(key, (ns, bytes));
        inner.spent_order.push_back(key);
        inner.spent_bytes += bytes;
        let (_, coded, decoded) = inner.whole_costs(key.columns);
        let fits = (self.max_bytes as f64 * coded / decoded) as u64;
        while (inner.spent_bytes > fits || inner.spent_order.len() > limits::ROWS_BLOCKS_REMEMBERED)
            && let Some(oldest) = inner.spent_order.pop_front()
        {
            let gone = inner.spent.remove(&oldest);
            inner.spent_bytes -= gone.map_or(0, |(_, bytes)| bytes);
        }
    }

    /// Whether reading this block in part has by now cost as much as decoding it whole would.
    pub(super) fn is_worth(&self, key: &BlockKey) -> bool {
        let inner = self.inner.lock();
        let (ns, coded, _) = inner.whole_costs(key.columns);
        inner
            .spent
            .get(key)
            .is_some_and(|&(spent, bytes)| spent as f64 >= bytes as f64 * ns / coded)
    }

    /// About what decoding a block with this many bytes in its file whole would take.
    pub(super) fn whole_cost_ns(&self, columns: u64, bytes: u64) -> f64 {
        let (ns, coded, _) = self.inner.lock().whole_costs(columns);
        bytes as f64 * ns / coded
    }

    /// Notes that a block takes at least this many bytes when decoded whole, and that there was no
    /// memory for it. `u64::MAX`: there never will be.
    pub(super) fn needs(&self, key: BlockKey, bytes: u64) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        if let Some(known) = inner.needs.get_mut(&key) {
            *known = bytes.max(*known);
            return;
        }
        inner.needs.insert(key, bytes);
        inner.needs_order.push_back(key);
        if inner.needs_order.len() > limits::ROWS_BLOCKS_REMEMBERED
            && let Some(oldest) = inner.needs_order.pop_front()
        {
            inner.needs.remove(&oldest);
        }
    }

    /// What [`BlockCache::needs`] noted; 0: nothing.
    pub(super) fn need_of(&self, key: &BlockKey) -> u64 {
        self.inner.lock().needs.get(key).copied().unwrap_or(0)
    }

    /// Whether the block is not known to be too large to be decoded whole.
    pub(super) fn may_be_whole(&self, key: &BlockKey) -> bool {
        self.need_of(key) != u64::MAX
    }

    /// How much a block with this many bytes in its file will take decoded, judging by earlier
    /// blocks with such columns. Before there are any, no more than in the file: what is too large
    /// shows during decoding.
    pub(super) fn expected_decoded(&self, columns: u64, bytes: u64) -> u64 {
        match self.inner.lock().whole.get(&columns) {
            Some(&(_, coded, decoded)) if coded > 0.0 => (bytes as f64 * decoded / coded) as u64,
            _ => bytes,
        }
    }

    /// The same; before there are any, as much as text takes.
    pub(super) fn likely_decoded(&self, columns: u64, bytes: u64) -> u64 {
        let (_, coded, decoded) = self.inner.lock().whole_costs(columns);
        (bytes as f64 * decoded / coded) as u64
    }

    /// Notes what decoding a block whole has cost.
    pub(super) fn decoded_whole(&self, columns: u64, bytes: u64, decoded: u64, ns: u64) {
        let mut inner = self.inner.lock();
        if inner.whole.len() >= COLUMNS_REMEMBERED && !inner.whole.contains_key(&columns) {
            inner.whole.clear();
        }
        let whole = inner.whole.entry(columns).or_default();
        // The last few tens count.
        *whole = (
            whole.0 * 0.95 + ns as f64,
            whole.1 * 0.95 + bytes as f64,
            whole.2 * 0.95 + decoded as f64,
        );
    }

    /// Releases about this many bytes now, the least recently used blocks first, if that is all that
    /// is missing; `free` is free already. Blocks in use stay: their memory would come back when
    /// their users are done, too late for a caller that does not wait, and they would be decoded
    /// again for it.
    pub(super) fn give_way_now(&self, bytes: u64, free: u64) {
        let mut inner = self.inner.lock();
        let unused = |block: &Arc<Block>| Arc::strong_count(block) == 1;
        let missing = bytes.saturating_sub(free);
        if inner.held.cost_of(unused) >= missing {
            inner.held.drop_some(missing.max(1), unused);
        }
    }

    /// Releases about this many bytes, the least recently used blocks first.
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
    use arrow_array::RecordBatch;
    use arrow_schema::Schema;
    use forebay_core::MemoryBudget;

    fn key(block: u32) -> BlockKey {
        BlockKey {
            file: 1,
            version: VersionId(2),
            columns: 3,
            block,
        }
    }

    fn block(budget: &MemoryBudget, bytes: u64) -> Arc<Block> {
        let mut memory = Grown::default();
        memory.add(bytes, vec![budget.try_hold(bytes).unwrap()]);
        Arc::new(Block {
            pieces: RecordBatch::new_empty(Arc::new(Schema::empty())).into(),
            bytes,
            _memory: memory,
        })
    }

    #[test]
    fn the_least_recently_used_goes_and_what_is_in_use_is_found() {
        let budget = MemoryBudget::new(1 << 20);
        let cache = BlockCache::new(10 << 10);
        for n in 0..20 {
            cache.insert(key(n), &block(&budget, 2 << 10));
            assert!(cache.get(&key(0)).is_some(), "used after each insert");
            assert!(cache.bytes() <= 10 << 10);
            assert_eq!(
                budget.used_bytes(),
                cache.bytes(),
                "what the cache lets go of comes back to the budget"
            );
        }
        assert_eq!(cache.len(), 5);
        assert!(cache.get(&key(3)).is_none() && cache.get(&key(19)).is_some());
        // Too large to be kept, but found while somebody holds it.
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
    fn a_block_is_worth_decoding_when_its_parts_have_cost_as_much() {
        let cache = BlockCache::new(90_000);
        assert_eq!(cache.expected_decoded(3, 10_000), 10_000);
        cache.decoded_whole(3, 10_000, 30_000, 1_000_000);
        cache.decoded_whole(4, 10_000, 400_000, 1_000_000);
        assert_eq!(
            cache.expected_decoded(3, 20_000),
            60_000,
            "by its own columns"
        );
        cache.spent(key(1), 10_000, 400_000);
        assert!(!cache.is_worth(&key(1)) && !cache.is_worth(&key(2)));
        cache.spent(key(1), 10_000, 700_000);
        assert!(cache.is_worth(&key(1)));
        // The cache could hold three such blocks: what a fourth displaces is forgotten.
        for n in 2..=3 {
            cache.spent(key(n), 10_000, 10);
        }
        assert!(cache.is_worth(&key(1)));
        cache.spent(key(4), 10_000, 10);
        assert!(!cache.is_worth(&key(1)));
    }

    #[test]
    fn what_is_too_large_is_remembered_up_to_a_bound() {
        let cache = BlockCache::new(1 << 20);
        let most = limits::ROWS_BLOCKS_REMEMBERED as u32;
        for n in 0..=most {
            assert!(cache.may_be_whole(&key(n)));
            cache.needs(key(n), 7);
            assert!(cache.may_be_whole(&key(n)));
            cache.needs(key(n), u64::MAX);
            cache.needs(key(n), 9);
            assert!(!cache.may_be_whole(&key(n)));
        }
        assert!(cache.may_be_whole(&key(0)) && !cache.may_be_whole(&key(1)));
        assert_eq!(cache.need_of(&key(0)), 0);
        assert_eq!(cache.inner.lock().needs.len(), most as usize);
    }

    #[test]
    fn a_caller_that_does_not_wait_is_given_what_nobody_uses_or_nothing() {
        let budget = MemoryBudget::new(1 << 20);
        let cache = BlockCache::new(10 << 10);
        let used: Vec<_> = (0..3)
            .map(|n| {
                let block = block(&budget, 2 << 10);
                cache.insert(key(n), &block);
                block
            })
            .collect();
        for n in 3..5 {
            cache.insert(key(n), &block(&budget, 2 << 10));
        }
        cache.give_way_now(7 << 10, 2 << 10);
        assert_eq!(cache.len(), 5, "5 KiB are missing, and 4 could come back");
        cache.give_way_now(5 << 10, 2 << 10);
        assert_eq!(cache.len(), 3);
        assert!(
            used.iter()
                .zip(0..)
                .all(|(_, n)| cache.get(&key(n)).is_some())
        );
        drop(used);
        cache.give_way_now(4 << 10, 0);
        assert!(cache.len() == 1 && cache.get(&key(2)).is_some());
    }

    #[test]
    fn a_block_that_was_bought_is_rented_again_before_it_is_bought_again() {
        let budget = MemoryBudget::new(1 << 20);
        let cache = BlockCache::new(64 << 10);
        cache.decoded_whole(3, 1000, 3000, 4000);
        cache.spent(key(1), 1000, 9000);
        assert!(cache.is_worth(&key(1)));
        cache.insert(key(1), &block(&budget, 3 << 10));
        cache.give_way(u64::MAX);
        assert!(cache.get(&key(1)).is_none() && !cache.is_worth(&key(1)));
        cache.spent(key(1), 1000, 5000);
        assert!(cache.is_worth(&key(1)));
        // What is remembered stays bounded.
        let fits = (64 << 10) / 3000;
        for n in 2..200 {
            cache.spent(key(n), 1000, 1);
        }
        assert!(cache.inner.lock().spent.len() <= fits + 1);
    }
}
