//! Rows that an order reads soon, kept from when their block was decoded for others.
//!
//! A few rows of a block that is neither in memory nor laid out cost about as much as all of it: its
//! pages are fetched and unpacked. Which other rows of the block are read next is known where a plan is
//! followed ([`Orders`]). So they are decoded with those that were asked for, and kept: each encoded by
//! itself, as rows of laid blocks are (`laid/codec.rs`), so that its memory comes back when it is read.
//!
//! - *How far.* Blocks are decoded at different times. What was kept of one becomes less until it is
//!   decoded again, and half of it is there on average: so of each block, those rows are kept that are
//!   read while nearly twice as many are read, of all blocks, as fit into the memory. The first time it
//!   is a part of that, another one for each block; otherwise all blocks would be decoded again at the
//!   same time.
//! - *Each once.* A row that was given out is not kept again for the place of the order for which it was
//!   given, though who reads it may not be past that place for a while.
//! - *For which.* Row-wise orders over blocks that cannot be laid out for lack of room, and whose rows
//!   do not all fit into the memory for decoded blocks.
//!
//! Invariant: rows from here are those that decoding the file would give; the key has the version and
//! the columns. What is gone from here is decoded again.

use super::{
    Rows, blocks::Keys, cache::BlockKey, grown::Grown, joined, laid, lru::Lru, pieces::Pieces,
    stats::add,
};
use crate::Dataset;
use arrow_array::RecordBatch;
use arrow_data::ArrayData;
use forebay_core::{
    MemoryBudget, Reservation, limits,
    sync::{Mutex, RwLock},
};
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};
use xxhash_rust::xxh3::xxh3_64;

/// Of the memory for it, what is kept of one block at most: one part of so many, and so much.
const BLOCK_SHARE: u64 = 16;
const BLOCK_MOST_BYTES: u64 = 16 << 20;
/// Rows of the first block, by which it is learned what a row takes.
const FIRST_ROWS: usize = 16;
/// Of blocks with more rows, nothing is kept.
const BLOCK_ROWS_MAX: u64 = 1 << 15;
/// Places that are looked up on the runtime's threads, about a millisecond; and at all.
const ASKED_HERE_PLACES: u64 = 1024;
const ASKED_PLACES_MAX: u64 = 1 << 17;
/// What a row takes beside its bytes, and a block beside its rows.
const ROW_BESIDE_BYTES: u64 = 128;
const BLOCK_BESIDE_BYTES: u64 = 256;
/// When memory is short, a block whose rows no request has taken for so long loses them.
const UNUSED: Duration = Duration::from_secs(60);
/// How often such blocks are looked for.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Of twice the memory, how much is used: what is expected is not exact.
const USED_PERCENT: u64 = 85;
/// Kinds of columns of which it is known what a row takes.
const COLUMNS_REMEMBERED: usize = 1024;

/// The orders in which rows are read.
pub(crate) trait Orders: Send + Sync {
    /// How many places of orders have to be looked up for each row that somebody reads row by row, with
    /// these columns ([`super::KeptDecoded`]); 0: nobody does.
    fn places(&self, dataset: &Dataset, columns: u64) -> u64;

    /// Which rows of a dataset's block, as the block counts them, are read row by row within the next
    /// so many rows of their order, with these columns ([`super::KeptDecoded`]); the nearest first.
    fn soon(&self, dataset: &Dataset, block: u64, columns: u64, within: u64) -> Vec<Next>;
}

/// A row of a block, and the place of an order at which it is read next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Next {
    pub row: u32,
    pub place: u64,
}

struct Row {
    bytes: Box<[u8]>,
    place: u64,
}

/// What is kept of one block.
#[derive(Default)]
struct OfBlock {
    rows: HashMap<u32, Row>,
    /// The place for which a row was given out last, as long as it may be asked for that again.
    given: HashMap<u32, u64>,
    bytes: u64,
    memory: Grown,
    used: Option<Instant>,
}

/// What is read soon of a block that is to be decoded.
#[derive(Default)]
pub(super) struct Wanted {
    /// All of it, the nearest first.
    pub all: Vec<Next>,
    /// What is neither kept nor given out.
    pub new: Vec<u32>,
    /// When that was asked, so that nothing is kept for an order that has ended since.
    generation: u64,
}

impl OfBlock {
    fn cost(&self) -> u64 {
        self.bytes + BLOCK_BESIDE_BYTES
    }

    fn remove(&mut self, row: u32) -> Option<Row> {
        let gone = self.rows.remove(&row)?;
        self.bytes -= row_cost(&gone.bytes);
        Some(gone)
    }

    fn give(&mut self, row: u32) -> Option<Box<[u8]>> {
        let Row { bytes, place } = self.remove(row)?;
        self.given.insert(row, place);
        Some(bytes)
    }
}

fn row_cost(row: &[u8]) -> u64 {
    row.len() as u64 + ROW_BESIDE_BYTES
}

#[derive(Default)]
struct Kept {
    blocks: Lru<BlockKey, OfBlock>,
    /// What a row takes, by its columns.
    row_bytes: HashMap<u64, u64>,
    /// Blocks that cannot be decoded for more rows than are asked for: damaged ones, or too large.
    failing: HashSet<BlockKey>,
    /// Raised when all is forgotten.
    generation: u64,
    /// When it was looked for what nobody has used for long.
    looked: Option<Instant>,
}

impl Kept {
    /// Changes what is kept of a block, which counts as used now, and gives back the memory of rows
    /// that have gone.
    fn change<T>(&mut self, key: &BlockKey, change: impl FnOnce(&mut OfBlock) -> T) -> Option<T> {
        let mut of = self.blocks.remove(key)?;
        let changed = change(&mut of);
        of.used = Some(Instant::now());
        of.memory.shrink(of.bytes);
        let cost = of.cost();
        self.blocks.insert(*key, of, cost);
        Some(changed)
    }
}

pub(super) struct Soon {
    orders: RwLock<Option<Weak<dyn Orders>>>,
    /// The share of memory for it.
    budget: MemoryBudget,
    most_bytes: u64,
    kept: Mutex<Kept>,
}

impl Soon {
    pub(super) fn new(most_bytes: u64) -> Self {
        Self {
            orders: RwLock::default(),
            budget: MemoryBudget::with_holdable(most_bytes),
            most_bytes,
            kept: Mutex::default(),
        }
    }

    /// Whether there is anything.
    pub(super) fn any(&self) -> bool {
        let kept = self.kept.lock();
        kept.blocks.cost() > kept.blocks.len() as u64 * BLOCK_BESIDE_BYTES
    }

    pub(super) fn bytes(&self) -> u64 {
        self.kept.lock().blocks.cost()
    }

    fn orders(&self) -> Option<Arc<dyn Orders>> {
        self.orders.read().as_ref().and_then(Weak::upgrade)
    }

    /// These rows were given out in another way.
    pub(super) fn were_given(&self, key: &BlockKey, rows: &[u32]) {
        if !rows.is_empty() {
            self.kept.lock().change(key, |of| {
                rows.iter().for_each(|&row| drop(of.give(row)));
            });
        }
    }

    /// More rows of this block than are asked for cannot be decoded.
    pub(super) fn failed(&self, key: BlockKey) {
        let mut kept = self.kept.lock();
        if kept.failing.len() >= limits::ROWS_BLOCKS_REMEMBERED {
            kept.failing.clear();
        }
        kept.failing.insert(key);
    }

    /// The lengths of these rows, if all of them are there.
    pub(super) fn lengths(&self, key: &BlockKey, rows: &[u32]) -> Option<Vec<u32>> {
        let mut kept = self.kept.lock();
        let of = kept.blocks.get(key)?;
        rows.iter()
            .map(|row| of.rows.get(row).map(|row| row.bytes.len() as u32))
            .collect()
    }

    /// Takes these rows, if all of them are there.
    pub(super) fn take(&self, key: &BlockKey, rows: &[u32]) -> Option<Vec<Box<[u8]>>> {
        let taken = self.kept.lock().change(key, |of| {
            let all = rows.iter().all(|row| of.rows.contains_key(row));
            all.then(|| rows.iter().filter_map(|&row| of.give(row)).collect())
        });
        taken.flatten()
    }

    /// What a row of these columns takes, once that is known.
    pub(super) fn row_bytes(&self, columns: u64) -> Option<u64> {
        self.kept.lock().row_bytes.get(&columns).copied()
    }

    /// Drops about so much, of the blocks that were not used for longest.
    pub(super) fn give_way(&self, bytes: u64) {
        let mut kept = self.kept.lock();
        let left = kept.blocks.cost().saturating_sub(bytes);
        kept.blocks.shrink_to(left);
    }
}

impl Rows {
    /// From now on, these say what is read soon.
    pub(crate) fn ask_orders(&self, orders: Weak<dyn Orders>) {
        *self.inner.soon.orders.write() = Some(orders);
    }

    /// All row-wise orders have ended, or the memory is needed: nothing of it is kept.
    pub(crate) fn forget_soon(&self) {
        let mut kept = self.inner.soon.kept.lock();
        kept.generation += 1;
        let gone = std::mem::take(&mut kept.blocks);
        drop(kept);
        drop(gone);
    }

    /// Whether rows of a dataset are kept that are read soon.
    pub(super) fn keeps_soon(&self, dataset: &Dataset, keys: &Keys) -> bool {
        self.places_of_soon(dataset, keys) > 0
    }

    /// See [`Orders::places`]; 0 also if nothing is kept for another reason.
    fn places_of_soon(&self, dataset: &Dataset, keys: &Keys) -> u64 {
        let Some(orders) = self.inner.soon.orders() else {
            return 0;
        };
        match self.may_keep_soon(dataset, keys) {
            true => orders.places(dataset, laid::stored_columns(keys.wanted)),
            false => 0,
        }
    }

    fn may_keep_soon(&self, dataset: &Dataset, keys: &Keys) -> bool {
        let cache = &self.inner.cache;
        !keys.alone
            && self.may_be_encoded(dataset, keys)
            && cache.likely_decoded(keys.wanted, dataset.bytes()) > cache.max_bytes()
            && !self.lays(dataset, keys)
    }

    /// Takes these rows, if all of them are there.
    pub(super) fn take_soon(
        &self,
        key: &BlockKey,
        rows: &[u32],
        keys: &Keys,
    ) -> Option<RecordBatch> {
        let taken = self.inner.soon.take(key, rows)?;
        add(&self.inner.stats.soon_read, taken.len() as u64);
        laid::decode_rows(&keys.schema, &taken)
    }

    /// Which rows of a block to decode with those that were asked for.
    pub(super) async fn soon_of(
        &self,
        dataset: &Arc<Dataset>,
        (file, block): (u32, u32),
        keys: &Keys,
        key: &BlockKey,
    ) -> Wanted {
        let soon = &self.inner.soon;
        let places = self.places_of_soon(dataset, keys);
        let block = dataset.file_blocks(file as usize).start + u64::from(block);
        let rows = dataset.shape().block_range(block);
        let rows = rows.end - rows.start;
        let Some(orders) = soon.orders().filter(|_| places > 0) else {
            return Wanted::default();
        };
        if rows > BLOCK_ROWS_MAX || rows * places > ASKED_PLACES_MAX {
            return Wanted::default();
        }
        let (known, is_first, generation) = {
            let mut kept = soon.kept.lock();
            if kept.failing.contains(key) {
                return Wanted::default();
            }
            let known = kept.row_bytes.get(&key.columns).copied();
            (known, kept.blocks.get(key).is_none(), kept.generation)
        };
        let each = known.unwrap_or_else(|| {
            let packed = dataset.row_bytes();
            self.inner.cache.likely_decoded(keys.wanted, packed) + ROW_BESIDE_BYTES
        });
        let mut within = 2 * soon.most_bytes / 100 * USED_PERCENT / each.max(1);
        if is_first {
            let part = xxh3_64(&block.to_le_bytes()) as u32;
            within = ((u128::from(within) * u128::from(part)) >> 32) as u64;
        }
        let most = (soon.most_bytes / BLOCK_SHARE).min(BLOCK_MOST_BYTES);
        let most = match known {
            Some(each) => (most / each.max(1)) as usize,
            None => FIRST_ROWS,
        };
        let (dataset, columns) = (dataset.clone(), laid::stored_columns(keys.wanted));
        let ask = move || {
            let mut found = orders.soon(&dataset, block, columns, within);
            found.truncate(most);
            found
        };
        let all = match rows * places <= ASKED_HERE_PLACES {
            true => ask(),
            false => joined(tokio::task::spawn_blocking(ask).await).unwrap_or_default(),
        };
        let mut kept = soon.kept.lock();
        let of = kept.blocks.get(key);
        let is_new = |next: &&Next| {
            of.is_none_or(|of| {
                let is_now = |place: u64| place == next.place;
                !of.rows.get(&next.row).is_some_and(|row| is_now(row.place))
                    && !of.given.get(&next.row).is_some_and(|place| is_now(*place))
            })
        };
        let new = all.iter().filter(is_new).map(|next| next.row).collect();
        Wanted {
            all,
            new,
            generation,
        }
    }

    /// Keeps rows that are read soon, and says how many. `decoded` says which rows `pieces` are, and
    /// `asked` which of them are given out now, ascending. Blocking.
    pub(super) fn keep_soon(
        &self,
        key: BlockKey,
        (pieces, decoded): (&Pieces, &[u32]),
        wanted: &Wanted,
        asked: &[u32],
    ) -> usize {
        let (all, soon) = (&self.inner.soon, &wanted.all);
        let places: HashMap<u32, u64> = soon.iter().map(|next| (next.row, next.place)).collect();
        let (free, keep) = {
            let mut kept = all.kept.lock();
            if kept.generation != wanted.generation {
                return 0;
            }
            if kept.blocks.get(&key).is_none() {
                let none = OfBlock::default();
                let cost = none.cost();
                kept.blocks.insert(key, none, cost);
            }
            let keep = kept.change(&key, |of| {
                let is_now = |row: &u32, place: u64| places.get(row) == Some(&place);
                of.given.retain(|row, place| is_now(row, *place));
                let now = asked
                    .iter()
                    .filter_map(|row| Some((*row, *places.get(row)?)));
                of.given.extend(now);
                let over = of
                    .rows
                    .iter()
                    .filter(|(row, kept)| !is_now(row, kept.place) || of.given.contains_key(row));
                let over: Vec<u32> = over.map(|(row, _)| *row).collect();
                for row in over {
                    of.remove(row);
                }
                let new = soon.iter().filter(|next| {
                    !of.rows.contains_key(&next.row) && !of.given.contains_key(&next.row)
                });
                new.copied().collect::<Vec<Next>>()
            });
            if kept.blocks.len() > limits::ROWS_BLOCKS_REMEMBERED {
                kept.blocks.drop_some(1, |_| true);
            }
            let is_full = all.most_bytes < kept.blocks.cost() + BLOCK_MOST_BYTES;
            if is_full && kept.looked.is_none_or(|at| at.elapsed() > LOOK_EVERY) {
                kept.looked = Some(Instant::now());
                let is_unused = |of: &OfBlock| of.used.is_some_and(|at| at.elapsed() > UNUSED);
                kept.blocks.drop_some(BLOCK_MOST_BYTES, is_unused);
            }
            let free = all.most_bytes.saturating_sub(kept.blocks.cost());
            (free, keep.unwrap_or_default())
        };
        let rows = keep
            .into_iter()
            .filter_map(|next| Some((next, decoded.binary_search(&next.row).ok()? as u32)));
        let mut rows: Vec<(Next, u32)> = rows.collect();
        if rows.is_empty() {
            return 0;
        }
        // All rows of a block are about as large, and those that fit are a guess anyway.
        let mut each: Vec<(u32, u32)> = rows.iter().map(|(_, at)| (*at, 1)).collect();
        each.sort_unstable();
        let bytes = pieces.bytes_of(each.into_iter());
        let bytes = laid::encoded_bytes(bytes, rows.len() as u64, pieces.fields() as u64);
        let each = bytes / rows.len() as u64 + ROW_BESIDE_BYTES;
        rows.truncate((free / each) as usize);
        let Some(mut held) = self.memory_of_soon(&mut rows, each) else {
            return 0;
        };
        let (most, mut taken) = (rows.len() as u64 * each, 0);
        let mut encoded = Vec::with_capacity(rows.len());
        let mut columns: (usize, Vec<ArrayData>) = (usize::MAX, Vec::new());
        let mut out = Vec::new();
        for (next, at) in &rows {
            out.clear();
            laid::encode_at(pieces, *at, &mut columns, &mut out);
            let cost = row_cost(&out);
            if taken + cost > most {
                continue;
            }
            taken += cost;
            let bytes = Box::from(out.as_slice());
            let place = next.place;
            encoded.push((next.row, Row { bytes, place }));
        }
        if encoded.is_empty() {
            return 0;
        }
        held.iter_mut().for_each(|held| held.shrink(taken));
        let count = encoded.len();
        let mut kept = all.kept.lock();
        if kept.row_bytes.len() >= COLUMNS_REMEMBERED {
            kept.row_bytes.clear();
        }
        kept.row_bytes.insert(key.columns, taken / count as u64);
        if kept.generation != wanted.generation {
            return 0;
        }
        let stayed = kept.change(&key, |of| {
            of.memory.add(taken, held);
            of.bytes += taken;
            for (number, row) in encoded {
                if let Some(before) = of.rows.insert(number, row) {
                    of.bytes -= row_cost(&before.bytes);
                }
            }
        });
        drop(kept);
        if stayed.is_none() {
            return 0;
        }
        add(&self.inner.stats.soon_kept, count as u64);
        count
    }

    /// Memory for as many of these rows as there is some for now.
    fn memory_of_soon(&self, rows: &mut Vec<(Next, u32)>, each: u64) -> Option<Vec<Reservation>> {
        let of = |budget: &MemoryBudget, bytes| budget.try_hold(bytes).ok();
        while !rows.is_empty() {
            let bytes = rows.len() as u64 * each;
            let inner = &self.inner;
            let shares = [
                &inner.soon.budget,
                &inner.whole_blocks,
                inner.engine.budget(),
            ];
            let held: Option<Vec<Reservation>> = shares.iter().map(|b| of(b, bytes)).collect();
            if held.is_some() {
                return held;
            }
            rows.truncate(rows.len() / 2);
        }
        None
    }
}
