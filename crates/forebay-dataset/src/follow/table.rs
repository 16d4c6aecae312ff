//! Answers the store's question: when does any plan want this entry next?
//!
//! A question costs a look-up of the file and, for each plan over its dataset, finding the entry's
//! rows in this epoch and the next: constant time for an object, the time of a block's rows for a
//! chunk under a full shuffle. Only the evictor asks.

use super::layout::{Holds, Layout};
use forebay_core::sync::RwLock;
use forebay_plan::{Plan, RowRef};
use forebay_store::{Advisor, Cached, NextUse};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

/// Rows of a request that are looked up to see whether a plan would request them.
const ROWS_LOOKED_AT: usize = 8;
/// How far ahead of its last place a job may plausibly be: an eighth of an epoch.
const FORWARD_SHARE: u64 = 8;
/// Blocks that are inspected for an entry that concerns a whole file.
const FILE_BLOCKS_LOOKED_AT: usize = 16;

/// A plan, and where its jobs are.
pub(crate) struct Followed {
    pub plan: Arc<Plan>,
    /// The layouts of its sources.
    pub layouts: Vec<Arc<Layout>>,
    /// The position over all epochs of the job that is furthest behind.
    pub at: AtomicU64,
    /// The epoch before which the last job ends.
    pub until_epoch: AtomicU64,
    pub ahead_bytes: AtomicU64,
    /// Bytes of an average row of the plan.
    pub row_bytes: u64,
}

impl Followed {
    pub fn new(plan: Arc<Plan>, layouts: Vec<Arc<Layout>>, at: u64) -> Self {
        let (quotas, cycle) = plan.quotas();
        let row_bytes = layouts
            .iter()
            .zip(&quotas)
            .map(|(l, q)| l.row_bytes() as u128 * u128::from(*q))
            .sum::<u128>();
        let row_bytes = ((row_bytes / u128::from(cycle.max(1))) as u64).max(1);
        Self {
            plan,
            layouts,
            at: AtomicU64::new(at),
            until_epoch: AtomicU64::new(u64::MAX),
            ahead_bytes: AtomicU64::new(0),
            row_bytes,
        }
    }

    /// Epoch and position.
    pub fn place(&self) -> (u64, u64) {
        let (at, rows) = (self.at.load(Relaxed), self.plan.rows_per_epoch());
        (at / rows, at % rows)
    }

    /// When a row is read next.
    fn row_next(&self, source: u32, row: u64) -> Option<(u64, u64)> {
        let (epoch, position) = self.place();
        let row = RowRef { source, row };
        let now = self
            .plan
            .position_of(epoch, row)
            .filter(|p| *p >= position)
            .map(|p| (epoch, p));
        now.or_else(|| {
            self.plan
                .position_of(epoch + 1, row)
                .map(|p| (epoch + 1, p))
        })
    }

    fn next_use(&self, entry: &Cached) -> NextUse {
        let mut best = NextUse::Unknown;
        for (source, layout) in (0u32..).zip(&self.layouts) {
            let Some(holds) = layout.holds(entry) else {
                continue;
            };
            let (epoch, position) = self.place();
            let first = |blocks: &mut dyn Iterator<Item = u64>| {
                blocks
                    .filter_map(|b| self.plan.next_use(epoch, position, source, b))
                    .min()
            };
            let next = match holds {
                Holds::Row(row) => self.row_next(source, row),
                Holds::Blocks(mut blocks) => first(&mut blocks),
                Holds::Key => Some((epoch, position)),
                Holds::File(blocks) => {
                    let step = ((blocks.end - blocks.start) as usize)
                        .div_ceil(FILE_BLOCKS_LOOKED_AT)
                        .max(1);
                    first(&mut blocks.step_by(step))
                }
            };
            best = nearer(best, self.said(next, (epoch, position)));
        }
        best
    }

    fn said(&self, next: Option<(u64, u64)>, (epoch, position): (u64, u64)) -> NextUse {
        let Some((then, at)) = next.filter(|(then, _)| *then < self.until_epoch.load(Relaxed))
        else {
            return NextUse::Never;
        };
        let rows = (then - epoch)
            .saturating_mul(self.plan.rows_per_epoch())
            .saturating_add(at)
            .saturating_sub(position);
        let bytes = rows.saturating_mul(self.row_bytes);
        if then == epoch {
            NextUse::ThisRound(bytes)
        } else {
            NextUse::LaterRound(bytes)
        }
    }

    /// Where a job that requests these rows is; `None` if this plan would not request them about
    /// now.
    pub fn place_of(&self, source: u32, rows: &[u64]) -> Option<u64> {
        let per_epoch = self.plan.rows_per_epoch();
        let (at, near) = (self.at.load(Relaxed), (per_epoch / FORWARD_SHARE).max(1));
        let step = rows.len().div_ceil(ROWS_LOOKED_AT).max(1);
        let mut least = u64::MAX;
        for &row in rows.iter().step_by(step) {
            let (epoch, position) = self.row_next(source, row)?;
            let place = epoch * per_epoch + position;
            // A job that starts again may have moved it back meanwhile.
            if place.checked_sub(at).is_none_or(|ahead| ahead > near) {
                return None;
            }
            least = least.min(place);
        }
        Some(least)
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
    generation: AtomicU64,
}

impl Table {
    pub(crate) fn all(&self) -> Arc<Vec<Arc<Followed>>> {
        self.plans.read().clone()
    }

    pub(crate) fn any(&self) -> bool {
        self.any.load(Relaxed)
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

impl Advisor for Table {
    fn is_active(&self) -> bool {
        self.any()
    }

    fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    fn next_use(&self, entry: &Cached) -> NextUse {
        self.all()
            .iter()
            .map(|f| f.next_use(entry))
            .fold(NextUse::Unknown, nearer)
    }
}
