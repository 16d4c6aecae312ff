//! A plan: which row is at which position of which epoch, over one dataset or a mix, and which
//! blocks that needs.
//!
//! An epoch of a plan with one dataset has each row once, in that epoch's order. A mix (and one
//! dataset with `epoch_rows`) is an endless sequence of positions, as described in `mix.rs`, and
//! each epoch is its next `epoch_rows`: an unfinished source goes on where it stopped.

use crate::{PlanSpec, mix::Mix, order::Order};
use forebay_core::{Error, MemoryBudget, Reservation, Result, limits};
use std::{collections::HashMap, ops::Range};

/// A row of one of a plan's sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowRef {
    /// The number of its source, from 0, in the order of [`PlanSpec::sources`].
    pub source: u32,
    /// The number of the row in that source, from 0, as the dataset stores it.
    pub row: u64,
}

/// The orders of all epochs, as pure functions. Shared by reference: only caches in it change.
#[derive(Debug)]
pub struct Plan {
    spec: PlanSpec,
    orders: Vec<Order>,
    mix: Option<Mix>,
    epoch_rows: u64,
    data: u64,
    identity: String,
    _held: Option<Reservation>,
}

impl Plan {
    /// The plan of a specification, checked.
    ///
    /// # Errors
    /// `Invalid` for no source or too many, a source without rows, weights that do not make a mix,
    /// a shuffle of size 0, a schedule that does not ascend, or an epoch with no rows or too many.
    pub fn new(spec: PlanSpec) -> Result<Self> {
        spec.check()?;
        let orders = spec
            .sources
            .iter()
            .zip(0..)
            .map(|(s, i)| Order::new(s.shape.clone(), spec.shuffle, spec.seed, i))
            .collect::<Result<Vec<_>>>()?;
        let mix = match (&spec.sources[..], spec.epoch_rows) {
            ([_], None) => None,
            (sources, _) => Some(Mix::new(sources, &spec.schedule, spec.seed)?),
        };
        let all = orders.iter().map(Order::rows).sum::<u64>();
        let epoch_rows = spec.epoch_rows.unwrap_or(all);
        if epoch_rows > limits::PLAN_ROWS_MAX {
            return Err(Error::invalid(format!(
                "an epoch has {epoch_rows} rows; the limit is {}",
                limits::PLAN_ROWS_MAX
            ))
            .hint("set epoch_rows"));
        }
        let data = spec.data_digest();
        let identity = spec.identity(
            data,
            &mix.as_ref().map_or(Vec::new(), Mix::digest),
            mix.as_ref().map(|_| epoch_rows),
        );
        Ok(Plan {
            spec,
            orders,
            mix,
            epoch_rows,
            data,
            identity,
            _held: None,
        })
    }

    /// The same plan, whose memory is counted for as long as it is there: where others send plans.
    /// Until it is asked for the first place of an epoch, which may take a moment, nothing is there.
    ///
    /// # Errors
    /// `Invalid` for a block shuffle of too many blocks of unequal size, `Busy` if the budget has no
    /// room.
    pub fn counted(mut self, budget: &MemoryBudget) -> Result<Self> {
        let sums: u64 = self.orders.iter().map(Order::sums).sum();
        if sums > limits::PLAN_GROUPS_AT_NODE_MAX {
            return Err(Error::invalid(format!(
                "the shuffle makes {sums} groups of unequal blocks; a node takes {}",
                limits::PLAN_GROUPS_AT_NODE_MAX
            ))
            .hint("mix more blocks at a time, or leave stream=True out"));
        }
        let weights: usize = self.spec.schedule.iter().map(|s| s.weights.len()).sum();
        // The document that it came in is kept, too.
        let bytes = 2 * (weights * size_of::<f64>()) as u64
            + self
                .mix
                .as_ref()
                .map_or(0, |mix| mix.memory_bytes(self.rows_per_epoch()))
            + self.orders.iter().map(Order::memory_bytes).sum::<u64>();
        self._held = Some(
            budget
                .try_hold(bytes)
                .map_err(|e| e.context(format_args!("a plan of {bytes} bytes")))?,
        );
        Ok(self)
    }

    /// Makes ready what the places of an epoch are found with: with many blocks of unequal size,
    /// this takes time.
    pub fn prepare(&self, epoch: u64) {
        if epoch >= limits::PLAN_EPOCHS_MAX {
            return;
        }
        for (source, order) in self.orders.iter().enumerate() {
            let own = match &self.mix {
                None => epoch,
                Some(mix) => mix.ordinal_at(epoch * self.epoch_rows, source) / order.rows(),
            };
            order.prepare(own);
        }
    }

    /// What the plan was made from.
    pub fn spec(&self) -> &PlanSpec {
        &self.spec
    }

    /// Equal if all orders are equal; 16 hexadecimal digits.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    pub(crate) fn data_digest(&self) -> u64 {
        self.data
    }

    /// Rows of one epoch, of all sources and all ranks together.
    pub fn rows_per_epoch(&self) -> u64 {
        self.epoch_rows
    }

    /// What each source actually contributes: its rows in a cycle, and the length of the cycle.
    /// Weights are rounded to these. With a schedule: at its beginning.
    pub fn quotas(&self) -> (Vec<u64>, u64) {
        self.mix.as_ref().map_or((vec![1], 1), |mix| {
            (mix.quotas().to_vec(), mix.quotas().iter().sum())
        })
    }

    /// The position over all epochs.
    fn global(&self, epoch: u64, position: u64) -> u64 {
        assert!(
            epoch < limits::PLAN_EPOCHS_MAX,
            "epoch {epoch} is past the limit of {}",
            limits::PLAN_EPOCHS_MAX
        );
        epoch * self.epoch_rows + position
    }

    fn check_range(&self, epoch: u64, positions: &Range<u64>) {
        assert!(
            positions.end <= self.epoch_rows,
            "positions {positions:?} are not within an epoch of {} rows",
            self.epoch_rows
        );
        assert!(
            epoch < limits::PLAN_EPOCHS_MAX,
            "epoch {epoch} is past the limit of {}",
            limits::PLAN_EPOCHS_MAX
        );
    }

    /// The row at a position. Panics if the position is not below
    /// [`rows_per_epoch`](Plan::rows_per_epoch), or the epoch past the limit.
    pub fn row_at(&self, epoch: u64, position: u64) -> RowRef {
        self.check_range(epoch, &(position..position.saturating_add(1)));
        match &self.mix {
            None => RowRef {
                source: 0,
                row: self.orders[0].row_at(epoch, position),
            },
            Some(mix) => {
                let (source, ordinal) = mix.source_at(self.global(epoch, position));
                let order = &self.orders[source];
                RowRef {
                    source: source as u32,
                    row: order.row_at(ordinal / order.rows(), ordinal % order.rows()),
                }
            }
        }
    }

    /// The first position of a row in an epoch; `None` if the epoch (of a mix) does not contain it,
    /// or the row does not exist.
    pub fn position_of(&self, epoch: u64, row: RowRef) -> Option<u64> {
        let order = self
            .orders
            .get(row.source as usize)
            .filter(|order| row.row < order.rows() && epoch < limits::PLAN_EPOCHS_MAX)?;
        let Some(mix) = &self.mix else {
            return Some(order.position_of(epoch, row.row));
        };
        let source = row.source as usize;
        let from = mix.ordinal_at(self.global(epoch, 0), source);
        // In the current epoch of the source, or, if that has already delivered the row, in its
        // next.
        let ordinal = [from / order.rows(), from / order.rows() + 1]
            .into_iter()
            .map(|pass| pass * order.rows() + order.position_of(pass, row.row))
            .find(|&ordinal| ordinal >= from)?;
        let position = mix.position_of(source, ordinal)? - self.global(epoch, 0);
        (position < self.epoch_rows).then_some(position)
    }

    /// Appends the rows at a run of positions: the fast way through an order. Panics as
    /// [`row_at`](Plan::row_at) does.
    pub fn fill(&self, epoch: u64, positions: Range<u64>, out: &mut Vec<RowRef>) {
        self.check_range(epoch, &positions);
        out.reserve(positions.end.saturating_sub(positions.start) as usize);
        let Some(mix) = &self.mix else {
            return self.orders[0]
                .for_each(epoch, positions, |row| out.push(RowRef { source: 0, row }));
        };
        let (mut at, end) = (
            self.global(epoch, positions.start),
            self.global(epoch, positions.end),
        );
        let mut rows = Vec::new();
        while at < end {
            // One cycle at a time: the rows of each source are a run of its own order, dealt to its
            // slots.
            let run = mix.run_at(at);
            let count = (end - at).min(run.count) as usize;
            let slots = &run.cycle.slots[run.slot..run.slot + count];
            let base = out.len();
            out.resize(base + slots.len(), RowRef { source: 0, row: 0 });
            for (source, order) in self.orders.iter().enumerate() {
                let mine = slots
                    .iter()
                    .enumerate()
                    .filter(|(_, (s, _))| *s as usize == source);
                let Some((_, &(_, first))) = mine.clone().next() else {
                    continue;
                };
                let start = run.first[source] + u64::from(first);
                rows.clear();
                passes(
                    order,
                    start..start + mine.clone().count() as u64,
                    |pass, run| order.for_each(pass, run, |row| rows.push(row)),
                );
                for ((slot, _), &row) in mine.zip(&rows) {
                    out[base + slot] = RowRef {
                        source: source as u32,
                        row,
                    };
                }
            }
            at += slots.len() as u64;
        }
    }

    /// The blocks `(source, block)` that a run of positions needs, in the order of their first use,
    /// each once. Panics as [`row_at`](Plan::row_at) does.
    pub fn blocks_of(&self, epoch: u64, positions: Range<u64>) -> Vec<(u32, u64)> {
        self.check_range(epoch, &positions);
        let Some(mix) = &self.mix else {
            return self.orders[0]
                .first_uses(epoch, positions)
                .into_iter()
                .map(|(_, block)| (0, block))
                .collect();
        };
        let (start, end) = (
            self.global(epoch, positions.start),
            self.global(epoch, positions.end),
        );
        let mut first = HashMap::new();
        for (source, order) in self.orders.iter().enumerate() {
            passes(
                order,
                mix.ordinal_at(start, source)..mix.ordinal_at(end, source),
                |pass, run| {
                    for (position, block) in order.first_uses(pass, run) {
                        // Passes come in order, so an existing entry is earlier.
                        first.entry((source as u32, block)).or_insert_with(|| {
                            mix.position_of(source, pass * order.rows() + position)
                                .expect("what lies before a position has one")
                        });
                    }
                },
            );
        }
        let mut uses: Vec<_> = first
            .into_iter()
            .map(|(block, position)| (position, block))
            .collect();
        uses.sort_unstable();
        uses.into_iter().map(|(_, block)| block).collect()
    }

    /// When a row of this block is next needed: the first `(epoch, position)` at or after the given
    /// one. `None` for a block without rows, one that does not exist, or past the last possible
    /// epoch.
    pub fn next_use(
        &self,
        epoch: u64,
        position: u64,
        source: u32,
        block: u64,
    ) -> Option<(u64, u64)> {
        let order = self
            .orders
            .get(source as usize)
            .filter(|order| block < order.shape().blocks() && position <= self.epoch_rows)?;
        if epoch >= limits::PLAN_EPOCHS_MAX {
            return None;
        }
        // In this pass over the source, or otherwise in the next, which has every block.
        let next = |pass: u64, at: u64| {
            let now = order.next_use(pass, at, block).map(|at| (pass, at));
            now.or_else(|| order.next_use(pass + 1, 0, block).map(|at| (pass + 1, at)))
        };
        let (epoch, position) = match &self.mix {
            None => next(epoch, position)?,
            Some(mix) => {
                let from = mix.ordinal_at(self.global(epoch, 0) + position, source as usize);
                let (pass, at) = next(from / order.rows(), from % order.rows())?;
                let global = mix.position_of(source as usize, pass * order.rows() + at)?;
                (global / self.epoch_rows, global % self.epoch_rows)
            }
        };
        (epoch < limits::PLAN_EPOCHS_MAX).then_some((epoch, position))
    }
}

/// Cuts a run of a source's ordinals into runs of positions, one for each pass over the source.
fn passes(order: &Order, mut ordinals: Range<u64>, mut each: impl FnMut(u64, Range<u64>)) {
    while ordinals.start < ordinals.end {
        let (pass, at) = (ordinals.start / order.rows(), ordinals.start % order.rows());
        let run = at..order.rows().min(at + (ordinals.end - ordinals.start));
        ordinals.start += run.end - run.start;
        each(pass, run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_plan_keeps_is_counted_and_bounded_at_a_node() {
        let unequal = |blocks: u64| {
            let runs = [(blocks - 1, 10), (1, 20)];
            let shape = std::sync::Arc::new(crate::Shape::from_runs(runs).unwrap());
            let shuffle = crate::Shuffle::Block { blocks: 1 };
            Plan::new(PlanSpec::single("d", shape, 1, shuffle)).unwrap()
        };
        let budget = MemoryBudget::new(100 << 20);
        let plan = unequal(1 << 20).counted(&budget).unwrap();
        let held = budget.used_bytes();
        assert!((16 << 20..17 << 20).contains(&held), "{held}");
        plan.prepare(0);
        plan.prepare(limits::PLAN_EPOCHS_MAX);
        assert_eq!(budget.used_bytes(), held);
        let busy = unequal(3 << 20).counted(&budget).unwrap_err();
        assert_eq!(busy.kind(), forebay_core::ErrorKind::Busy);
        drop(plan);
        assert_eq!(budget.used_bytes(), 0);
        let many = unequal(limits::PLAN_GROUPS_AT_NODE_MAX + 1);
        let refused = many.counted(&budget).unwrap_err();
        assert!(refused.to_string().contains("groups of unequal blocks"));
    }
}
