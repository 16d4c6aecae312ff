//! Answers the store's question: when does any plan want this entry next?
//!
//! A question costs a look-up of the file and, for each reader of a plan over its dataset, finding
//! the entry's rows in this epoch and the next (for a part of the ranks, a few more): constant time
//! for an object, the time of a block's rows for a chunk under a full shuffle. Only the evictor asks.
//!
//! What only other ranks read is wanted by this node later, when the order deals it to its own. In a
//! cluster, other nodes ask it for what it owns: then all ranks count (`next_use_by_all`).

use super::{
    layout::{Holds, Layout},
    readers::{Reader, Readers, whole},
};
use crate::{
    Dataset, Views,
    rows::{KeptDecoded, Next, Orders},
};
use forebay_core::{limits, sync::RwLock};
use forebay_plan::{Plan, RowRef, Runs, Shuffle};
use forebay_store::{Advisor, Cached, NextUse, Store};
use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};
use xxhash_rust::xxh3::xxh3_64;

/// Rows of a request that are looked up to see whether a plan would request them.
const ROWS_LOOKED_AT: usize = 8;
/// How far ahead of its last place a job may plausibly be: an eighth of an epoch,
const FORWARD_SHARE: u64 = 8;
/// or so many rows, which are some batches requested ahead, up to half of a short one.
const FORWARD_ROWS: u64 = 64;
/// Blocks that are inspected for an entry that concerns a whole file.
const FILE_BLOCKS_LOOKED_AT: usize = 16;
/// Blocks of a file that are searched for rows of a selection.
const FILE_BLOCKS_SEARCHED: usize = 4096;
/// Epochs that are searched for the next use by a part of the ranks.
const EPOCHS_LOOKED_AT: u64 = 4;
/// What the place of a row of a composed dataset takes to find, in places of others.
const PLACES_OF_COMPOSED: u64 = 16;
/// The column of whole objects that is their bytes.
pub(super) const OBJECT_COLUMN: &str = "data";

/// A plan, and who reads it.
pub(crate) struct Followed {
    pub plan: Arc<Plan>,
    /// Its sources, and the datasets below them.
    pub views: Views,
    /// The layouts of those datasets, as `views` numbers them: its bases.
    pub layouts: Vec<Arc<Layout>>,
    /// The bases that each of these datasets is.
    by_dataset: HashMap<String, Vec<u32>>,
    readers: RwLock<Arc<Readers>>,
    /// Knows which blocks are kept decoded.
    store: Weak<Store>,
    /// Bytes of an average row of the plan.
    row_bytes: u64,
}

impl Followed {
    pub fn new(
        plan: Arc<Plan>,
        views: Views,
        layouts: Vec<Arc<Layout>>,
        store: Weak<Store>,
    ) -> Self {
        let (quotas, cycle) = plan.quotas();
        let row_bytes = views
            .views()
            .iter()
            .zip(&quotas)
            .map(|(v, q)| u128::from(v.row_bytes().max(1)) * u128::from(*q))
            .sum::<u128>();
        let row_bytes = ((row_bytes / u128::from(cycle.max(1))) as u64).max(1);
        let mut by_dataset: HashMap<String, Vec<u32>> = HashMap::new();
        for (base, layout) in (0u32..).zip(&layouts) {
            let id = layout.dataset().id().to_owned();
            by_dataset.entry(id).or_default().push(base);
        }
        Self {
            by_dataset,
            plan,
            views,
            layouts,
            readers: RwLock::default(),
            store,
            row_bytes,
        }
    }

    /// The numbers that a dataset has among the bases: several, if several sources are made of it.
    pub fn bases_of(&self, dataset: &str) -> &[u32] {
        self.by_dataset.get(dataset).map_or(&[], Vec::as_slice)
    }

    pub fn readers(&self) -> Arc<Readers> {
        self.readers.read().clone()
    }

    /// These leases read it now. Returns the number of the reader that each is.
    pub fn are_read_by(&self, leases: impl Iterator<Item = Reader>) -> Vec<usize> {
        let mut readers = self.readers.write();
        let (now, numbers) = Readers::of(leases, &readers);
        *readers = Arc::new(now);
        numbers
    }

    /// The leases that read it, each by its reader's number, are here now.
    pub fn are_read_at(&self, places: impl Iterator<Item = (usize, u64)>) {
        let mut readers = self.readers.write();
        *readers = Arc::new(readers.moved(places));
    }

    /// Bytes of an average position of the order that a reader reads: none of positions that it does
    /// not read, and of its columns only.
    pub fn bytes_of(&self, reader: &Reader, positions: u64) -> u64 {
        let (own, all) = reader.part();
        let bytes = u128::from(positions) * u128::from(self.row_bytes_of(reader));
        u64::try_from(bytes * u128::from(own) / u128::from(all)).unwrap_or(u64::MAX)
    }

    /// How many positions of the order have so many bytes for a reader; at least 1.
    pub fn positions_of(&self, reader: &Reader, bytes: u64) -> u64 {
        let (own, all) = reader.part();
        let own = u128::from(own) * u128::from(self.row_bytes_of(reader));
        let positions = u128::from(bytes) * u128::from(all) / own.max(1);
        u64::try_from(positions).unwrap_or(u64::MAX).max(1)
    }

    fn row_bytes_of(&self, reader: &Reader) -> u64 {
        let learned = reader.columns.as_ref().and_then(|c| c.row_bytes());
        learned.unwrap_or(self.row_bytes)
    }

    /// Epoch and position.
    fn split(&self, at: u64) -> (u64, u64) {
        let rows = self.plan.rows_per_epoch();
        (at / rows, at % rows)
    }

    /// When a reader reads a row of a dataset next, wherever the plan has it; `None` if it has not.
    fn row_next(&self, reader: &Reader, base: u32, row: u64) -> Option<(u64, u64)> {
        let source = self.views.source_of(base);
        match self.views.runs_of(base, row..row.saturating_add(1)) {
            None => self.rows_next(reader, source, std::iter::once(row)),
            Some(runs) => self.runs_next(reader, source, runs),
        }
    }

    /// When a reader reads the first of some runs of rows next; `None` if there are none.
    fn runs_next(&self, reader: &Reader, source: u32, runs: Runs) -> Option<(u64, u64)> {
        match (runs.runs.is_empty(), runs.is_cut) {
            // Of so many rows, some may be read soon.
            (_, true) => Some(self.split(reader.at)),
            (true, false) => None,
            (false, false) => self.rows_next(reader, source, runs.runs.into_iter().flatten()),
        }
    }

    /// When a reader reads the first of some rows of a source next, as far as the next epochs tell:
    /// otherwise, the epoch after them.
    fn rows_next(
        &self,
        reader: &Reader,
        source: u32,
        rows: impl Iterator<Item = u64> + Clone,
    ) -> Option<(u64, u64)> {
        let (now, position) = self.split(reader.at);
        let within = |epoch: u64| {
            let of = |row| self.plan.position_of(epoch, RowRef { source, row });
            rows.clone()
                .filter_map(of)
                .filter(|at| (epoch > now || *at >= position) && reader.has(epoch, *at))
                .min()
                .map(|at| (epoch, at))
        };
        if !reader.is_part() {
            return within(now).or_else(|| within(now + 1));
        }
        let last = (now + EPOCHS_LOOKED_AT).min(reader.until_epoch);
        let found = (now..last).find_map(within);
        found.or(Some((now + EPOCHS_LOOKED_AT, 0)))
    }

    /// When a reader next reads a row of a dataset's block; `looks` bounds the rows that are looked
    /// at.
    fn block_next(
        &self,
        reader: &Reader,
        base: u32,
        block: u64,
        looks: &mut u64,
    ) -> Option<(u64, u64)> {
        let source = self.views.source_of(base);
        let Some(runs) = self.runs_of_block(base, block) else {
            return self.block_of_source_next(reader, source, block, looks);
        };
        if runs.is_cut || !self.views.are_in_blocks(source) {
            let rows = runs.runs.iter().map(|run| run.end - run.start).sum();
            *looks = looks.checked_sub(rows).unwrap_or_default();
            return match *looks {
                0 if rows > 0 => Some(self.split(reader.at)),
                _ => self.runs_next(reader, source, runs),
            };
        }
        let shape = self.views.views()[source as usize].shape();
        let blocks = runs.runs.iter();
        let blocks = blocks.flat_map(|run| shape.block_of(run.start)..=shape.block_of(run.end - 1));
        let mut blocks: Vec<u64> = blocks.collect();
        blocks.sort_unstable();
        blocks.dedup();
        let next = |block| self.block_of_source_next(reader, source, block, looks);
        blocks.into_iter().filter_map(next).min()
    }

    /// The rows of its source that the rows of a dataset's block are; `None`: the block is one of the
    /// source's too.
    fn runs_of_block(&self, base: u32, block: u64) -> Option<Runs> {
        let dataset = self.views.bases().get(base as usize)?;
        self.views.runs_of(base, dataset.shape().block_range(block))
    }

    /// Of blocks of a dataset's file, those that a plan may need something of: all, or some of those
    /// that have rows of its source.
    fn blocks_of_file(&self, base: u32, blocks: &Range<u64>) -> Vec<u64> {
        let count = blocks.end - blocks.start;
        let step = (count as usize).div_ceil(FILE_BLOCKS_LOOKED_AT).max(1);
        let whole = self.views.is_whole(self.views.source_of(base));
        if whole || step == 1 {
            return blocks.clone().step_by(step).collect();
        }
        let chosen = |block: &u64| {
            let runs = self.runs_of_block(base, *block);
            runs.is_none_or(|runs| runs.is_cut || !runs.runs.is_empty())
        };
        let first = blocks.clone().take(FILE_BLOCKS_SEARCHED);
        let found: Vec<u64> = first.filter(chosen).collect();
        let step = found.len().div_ceil(FILE_BLOCKS_LOOKED_AT).max(1);
        match found.is_empty() && count as usize > FILE_BLOCKS_SEARCHED {
            true => blocks
                .clone()
                .step_by(count as usize / FILE_BLOCKS_LOOKED_AT)
                .collect(),
            false => found.into_iter().step_by(step).collect(),
        }
    }

    /// The same for a block of a source, as the plan counts them.
    fn block_of_source_next(
        &self,
        reader: &Reader,
        source: u32,
        block: u64,
        looks: &mut u64,
    ) -> Option<(u64, u64)> {
        let (epoch, position) = self.split(reader.at);
        let by_any = self.plan.next_use(epoch, position, source, block)?;
        if reader.has(by_any.0, by_any.1) {
            return Some(by_any);
        }
        let view = self.views.views().get(source as usize)?;
        let rows = view.shape().block_range(block);
        // Of so many rows, every rank reads some.
        *looks = looks.checked_sub(rows.end - rows.start).unwrap_or_default();
        match *looks {
            0 => Some(by_any),
            _ => self.rows_next(reader, source, rows),
        }
    }

    fn next_use(&self, entry: &Cached, by_all_ranks: bool) -> NextUse {
        let mut best = NextUse::Unknown;
        let readers = self.readers();
        let all = by_all_ranks.then(|| whole(&readers.list)).flatten();
        let readers = all.as_slice().iter().chain(&readers.list);
        // Row by row, blocks that are kept decoded are read as such: what they were made of is not
        // needed, unless other nodes ask for it.
        let row_wise = !by_all_ranks && self.plan.spec().shuffle == Shuffle::Full;
        for (base, layout) in (0u32..).zip(&self.layouts) {
            let Some(holds) = layout.holds(entry) else {
                continue;
            };
            for reader in readers.clone() {
                let next = match row_wise && self.is_decoded(reader, base, layout, &holds) {
                    true => None,
                    false => self.next_of(reader, base, layout, &holds),
                };
                let mut said = self.said(reader, next);
                if reader.together
                    && let NextUse::ThisRound(_) = said
                    && let Some(turn) = turn(base, &holds)
                {
                    said = NextUse::ThisRound(self.share_of_epoch(reader, turn));
                }
                best = nearer(best, said);
            }
        }
        best
    }

    /// A share of the bytes of an epoch: all of them at the largest number.
    fn share_of_epoch(&self, reader: &Reader, turn: u32) -> u64 {
        let bytes = self.bytes_of(reader, self.plan.rows_per_epoch());
        (u128::from(bytes) * u128::from(turn) / u128::from(u32::MAX)) as u64
    }

    /// Whether all blocks that have something in these bytes that a reader reads are kept decoded
    /// for it.
    fn is_decoded(&self, reader: &Reader, base: u32, layout: &Layout, holds: &Holds) -> bool {
        let Holds::Blocks {
            file,
            blocks,
            bytes,
        } = holds
        else {
            return false;
        };
        let (Some(decoded), Some(store)) = (
            Self::decoded_for(reader, base, layout),
            self.store.upgrade(),
        ) else {
            return false;
        };
        let columns = reader.columns.as_deref();
        let first = layout.dataset().file_blocks(*file).start;
        let of = layout.dataset().file(*file as u32);
        let version = of.version();
        !blocks.is_empty()
            && blocks.clone().all(|block| {
                let of_none = |runs: Runs| runs.runs.is_empty() && !runs.is_cut;
                self.runs_of_block(base, block).is_some_and(of_none)
                    || columns.is_some_and(|c| !c.may_lie_in(base, block, bytes))
                    || decoded.has(&store, &of.name, version, (block - first) as u32)
            })
    }

    fn decoded_for<'a>(
        reader: &'a Reader,
        base: u32,
        layout: &'a Layout,
    ) -> Option<&'a KeptDecoded> {
        match reader.columns.as_deref() {
            Some(columns) => columns.decoded(base),
            None => layout.decoded(),
        }
    }

    fn next_of(
        &self,
        reader: &Reader,
        base: u32,
        layout: &Layout,
        holds: &Holds,
    ) -> Option<(u64, u64)> {
        let columns = reader.columns.as_deref();
        let mut looks = limits::PLAN_BLOCK_ROWS_LOOKED_AT;
        let mut first = |blocks: &mut dyn Iterator<Item = u64>| {
            blocks
                .filter_map(|b| self.block_next(reader, base, b, &mut looks))
                .min()
        };
        match holds {
            Holds::Row(row) if columns.is_none_or(|c| c.reads(base, OBJECT_COLUMN)) => {
                self.row_next(reader, base, *row)
            }
            Holds::Row(_) => None,
            Holds::Rows { columns: of, block } => {
                let decoded = Self::decoded_for(reader, base, layout)?;
                decoded.is(*of).then_some(())?;
                first(&mut std::iter::once(*block))
            }
            Holds::Blocks { blocks, bytes, .. } => {
                let read = |b: &u64| columns.is_none_or(|c| c.may_lie_in(base, *b, bytes));
                first(&mut blocks.clone().filter(read))
            }
            Holds::Key => Some(self.split(reader.at)),
            Holds::File(blocks) => first(&mut self.blocks_of_file(base, blocks).into_iter()),
        }
    }

    /// Of rows of a dataset's block, how many rows its readers read before each, at most, and at which
    /// place it is: `nearest` has both for each. Only for row-wise orders, and who reads just these columns.
    fn soon(&self, dataset: &Dataset, block: u64, columns: u64, nearest: &mut [(u64, u64)]) {
        let rows = dataset.shape().block_range(block);
        for (base, reader) in self.row_wise(dataset, columns) {
            let (own, all) = reader.part();
            let (now, _) = self.split(reader.at);
            for (row, nearest) in rows.clone().zip(nearest.iter_mut()) {
                let source = self.views.source_of(base);
                let next = match self.views.runs_of(base, row..row + 1) {
                    None => self.rows_next(&reader, source, std::iter::once(row)),
                    // Where the first of so many rows is, nobody has looked.
                    Some(runs) if runs.is_cut => None,
                    Some(runs) => self.runs_next(&reader, source, runs),
                };
                let is_known = |epoch: u64| {
                    epoch < reader.until_epoch
                        && !(reader.is_part() && epoch >= now + EPOCHS_LOOKED_AT)
                };
                let Some((epoch, at)) = next.filter(|(epoch, _)| is_known(*epoch)) else {
                    continue;
                };
                let place = epoch * self.plan.rows_per_epoch() + at;
                let before = u128::from(place.saturating_sub(reader.at)) * u128::from(own);
                let before = (before / u128::from(all)) as u64;
                *nearest = (*nearest).min((before, place));
            }
        }
    }

    /// Who reads a dataset row by row, with these columns, and as which base.
    fn row_wise(&self, dataset: &Dataset, columns: u64) -> Vec<(u32, Reader)> {
        let mut found = Vec::new();
        if !self.is_row_wise() {
            return found;
        }
        let readers = self.readers();
        for &base in self.bases_of(dataset.id()) {
            let reads = |reader: &&Reader| {
                let decoded = Self::decoded_for(reader, base, &self.layouts[base as usize]);
                decoded.is_some_and(|decoded| decoded.is(columns))
            };
            let reads = readers.list.iter().filter(reads);
            found.extend(reads.map(|reader| (base, reader.clone())));
        }
        found
    }

    fn is_row_wise(&self) -> bool {
        self.plan.spec().shuffle == Shuffle::Full
    }

    /// See [`Orders::places`].
    fn places(&self, dataset: &Dataset, columns: u64) -> u64 {
        let each =
            |(base, _): &(u32, Reader)| match self.views.is_whole(self.views.source_of(*base)) {
                true => 1,
                false => PLACES_OF_COMPOSED,
            };
        self.row_wise(dataset, columns).iter().map(each).sum()
    }

    fn said(&self, reader: &Reader, next: Option<(u64, u64)>) -> NextUse {
        let (epoch, position) = self.split(reader.at);
        let Some((then, at)) = next.filter(|(then, _)| *then < reader.until_epoch) else {
            return NextUse::Never;
        };
        let positions = (then - epoch)
            .saturating_mul(self.plan.rows_per_epoch())
            .saturating_add(at)
            .saturating_sub(position);
        let bytes = self.bytes_of(reader, positions);
        if then == epoch {
            NextUse::ThisRound(bytes)
        } else {
            NextUse::LaterRound(bytes)
        }
    }

    /// Where a job that requests these rows of a dataset is; `None` if this reader would not request
    /// them about now.
    pub fn place_of(&self, reader: &Reader, base: u32, rows: &[u64]) -> Option<u64> {
        let per_epoch = self.plan.rows_per_epoch();
        let near = (per_epoch / FORWARD_SHARE).max(FORWARD_ROWS.min(per_epoch.div_ceil(2)));
        let step = rows.len().div_ceil(ROWS_LOOKED_AT).max(1);
        let mut least = u64::MAX;
        for &row in rows.iter().step_by(step) {
            let (epoch, position) = self.row_next(reader, base, row)?;
            let place = epoch * per_epoch + position;
            // A job that starts again may have moved it back meanwhile.
            if place
                .checked_sub(reader.at)
                .is_none_or(|ahead| ahead > near)
            {
                return None;
            }
            least = least.min(place);
        }
        Some(least)
    }
}

/// The order, the same at all times, in which blocks stay if rows of them are read together.
///
/// Each block then has rows among those that are being read, and is read again when all others were:
/// where the plan has it next says nothing. Of what is read in turn, as much is found as the cache
/// holds of it if the same blocks stay, and no rule finds more.
fn turn(base: u32, holds: &Holds) -> Option<u32> {
    let of = |block: u64| {
        let number = block ^ (u64::from(base) << 40);
        (xxh3_64(&number.to_le_bytes()) >> 32) as u32
    };
    match holds {
        Holds::Blocks { blocks, .. } => blocks.clone().map(of).min(),
        Holds::Rows { block, .. } => Some(of(*block)),
        Holds::Row(_) | Holds::Key | Holds::File(_) => None,
    }
}

/// Of two answers, the one that keeps the entry longer: the nearer use, and any answer rather than
/// none.
fn nearer(a: NextUse, b: NextUse) -> NextUse {
    let rank = |n: &NextUse| match n {
        NextUse::ThisRound(d) => (0, *d),
        NextUse::LaterRound(d) => (1, *d),
        NextUse::Never => (2, 0),
        NextUse::Unknown | NextUse::Owned => (3, 0),
    };
    if rank(&a) <= rank(&b) { a } else { b }
}

/// All plans that are followed.
#[derive(Default)]
pub struct Table {
    plans: RwLock<Arc<Vec<Arc<Followed>>>>,
    any: AtomicBool,
    /// A plan went, and nobody has asked since.
    lost: AtomicBool,
    generation: AtomicU64,
}

impl Table {
    pub(crate) fn all(&self) -> Arc<Vec<Arc<Followed>>> {
        self.plans.read().clone()
    }

    pub(crate) fn any(&self) -> bool {
        self.any.load(Relaxed)
    }

    /// Whether plans have gone since this was asked the last time, and no row-wise one is left.
    pub(super) fn has_lost(&self) -> bool {
        self.lost.swap(false, Relaxed) && !self.all().iter().any(|f| f.is_row_wise())
    }

    pub(crate) fn layout(&self, dataset: &str) -> Option<Arc<Layout>> {
        self.all()
            .iter()
            .flat_map(|f| &f.layouts)
            .find(|l| l.dataset().id() == dataset)
            .cloned()
    }

    pub(crate) fn add(&self, followed: Arc<Followed>) {
        self.change(|plans| plans.push(followed));
    }

    pub(crate) fn remove(&self, identity: &str) {
        self.change(|plans| plans.retain(|f| f.plan.identity() != identity));
        self.lost.store(true, Relaxed);
    }

    fn soonest(&self, entry: &Cached, by_all_ranks: bool) -> NextUse {
        self.all()
            .iter()
            .map(|f| f.next_use(entry, by_all_ranks))
            .fold(NextUse::Unknown, nearer)
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Arc<Followed>>)) {
        let mut plans = self.plans.write();
        let mut new = (**plans).clone();
        change(&mut new);
        self.any.store(!new.is_empty(), Relaxed);
        *plans = Arc::new(new);
        self.generation.fetch_add(1, Relaxed);
    }
}

impl Orders for Table {
    fn places(&self, dataset: &Dataset, columns: u64) -> u64 {
        let all = self.all();
        all.iter().map(|f| f.places(dataset, columns)).sum()
    }

    fn soon(&self, dataset: &Dataset, block: u64, columns: u64, within: u64) -> Vec<Next> {
        let rows = dataset.shape().block_range(block);
        let mut nearest = vec![(u64::MAX, 0); (rows.end - rows.start) as usize];
        for followed in self.all().iter() {
            followed.soon(dataset, block, columns, &mut nearest);
        }
        let mut rows: Vec<((u64, u64), u32)> = nearest.into_iter().zip(0..).collect();
        rows.retain(|((before, _), _)| *before < within);
        rows.sort_unstable();
        let rows = rows.into_iter();
        rows.map(|((_, place), row)| Next { row, place }).collect()
    }
}

impl Advisor for Table {
    fn is_active(&self) -> bool {
        self.any()
    }

    fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    fn next_use(&self, entry: &Cached) -> NextUse {
        self.soonest(entry, false)
    }

    fn next_use_by_all(&self, entry: &Cached) -> NextUse {
        self.soonest(entry, true)
    }
}
