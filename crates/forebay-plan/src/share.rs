//! The part of an order that some ranks of a job read.
//!
//! A step of a job takes the next `W · B` positions of an epoch, `B` for each of its `W` ranks
//! (`steps.rs`). Steps are counted from where the job began: in that epoch they lie on another
//! grid than in the later ones, which begin at 0. So a position alone says whose it is.
//!
//! Invariant: the shares of all ranks of a job are disjoint, and together the positions that its
//! steps have. Rows that fill up the last step of an epoch ([`Uneven::Pad`], [`Uneven::Repeat`])
//! belong to the rank whose position they have at the beginning of the epoch.

use crate::{Batching, Partition, Plan, Uneven};
use forebay_core::{Error, Result, limits};
use std::{ops::Range, sync::Arc};

/// Positions of an order that are dealt to certain ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    grid: Grid,
    /// Ascending, each once.
    ranks: Arc<[u32]>,
}

/// How the order is dealt out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Grid {
    world: u64,
    /// Rows of one rank in a step.
    rows: u64,
    epoch_rows: u64,
    /// Whether the rows at the end of an epoch that make no whole step are read.
    whole_epoch: bool,
    /// The epoch that the job began within, and how far its steps are shifted there. (0, 0) if they
    /// are not.
    begin: (u64, u64),
}

impl Share {
    /// What `ranks` of a job read that begins, or is between two steps, at this epoch and position.
    /// `None`: the whole order, or a part of it that only the lengths of rows tell
    /// ([`Batching::Bounded`]).
    ///
    /// # Errors
    /// `Invalid` for no ranks, too many or impossible ones, and for batches that do not exist. The
    /// rank of the partition does not matter.
    pub fn new(
        plan: &Plan,
        partition: Partition,
        ranks: &[u32],
        (epoch, position): (u64, u64),
    ) -> Result<Option<Self>> {
        let mut own = ranks.to_vec();
        own.sort_unstable();
        own.dedup();
        let Some(&last) = own.last() else {
            return Err(Error::invalid("no rank reads").hint("name the ranks that do"));
        };
        if own.len() > limits::PLAN_LEASE_RANKS_MAX {
            return Err(Error::invalid(format!("{} ranks", own.len())).hint(format!(
                "name at most {} in one lease",
                limits::PLAN_LEASE_RANKS_MAX
            )));
        }
        let partition = Partition {
            rank: last,
            ..partition
        }
        .checked()?;
        let Batching::Rows(rows) = partition.batch else {
            return Ok(None);
        };
        if own.len() == partition.world as usize {
            return Ok(None);
        }
        let (world, rows) = (u64::from(partition.world), u64::from(rows));
        let shift = position % (world * rows);
        Ok(Some(Self {
            grid: Grid {
                world,
                rows,
                epoch_rows: plan.rows_per_epoch(),
                whole_epoch: partition.uneven != Uneven::Drop,
                begin: if shift == 0 { (0, 0) } else { (epoch, shift) },
            },
            ranks: own.into(),
        }))
    }

    /// What either reads, if they are ranks of one job.
    pub fn joined(&self, other: &Share) -> Option<Share> {
        if !self.is_of_job(other) {
            return None;
        }
        let mut ranks: Vec<u32> = self.ranks.iter().chain(&*other.ranks).copied().collect();
        ranks.sort_unstable();
        ranks.dedup();
        Some(Share {
            grid: self.grid,
            ranks: ranks.into(),
        })
    }

    /// Whether these are ranks of one job.
    pub fn is_of_job(&self, other: &Share) -> bool {
        self.grid == other.grid
    }

    /// How many of how many ranks it is.
    pub fn of(&self) -> (u64, u64) {
        (self.ranks.len() as u64, self.grid.world)
    }

    /// Where the steps of an epoch begin and end.
    fn steps(&self, epoch: u64) -> Range<u64> {
        let g = &self.grid;
        let begin = if epoch == g.begin.0 { g.begin.1 } else { 0 };
        let begin = begin.min(g.epoch_rows);
        match g.whole_epoch {
            true => begin..g.epoch_rows,
            false => {
                let stride = g.world * g.rows;
                begin..begin + (g.epoch_rows - begin) / stride * stride
            }
        }
    }

    /// Whether one of the ranks reads what is at this position.
    pub fn has(&self, epoch: u64, position: u64) -> bool {
        let (steps, g) = (self.steps(epoch), &self.grid);
        steps.contains(&position) && {
            let rank = (position - steps.start) / g.rows % g.world;
            self.ranks.binary_search(&(rank as u32)).is_ok()
        }
    }

    /// Calls `each` with the positions among these that the ranks read, as runs, in order.
    pub fn runs(&self, epoch: u64, positions: Range<u64>, mut each: impl FnMut(Range<u64>)) {
        let (steps, g) = (self.steps(epoch), &self.grid);
        let stride = g.world * g.rows;
        let (from, end) = (
            positions.start.max(steps.start),
            positions.end.min(steps.end),
        );
        if from >= end {
            return;
        }
        let mut run: Option<Range<u64>> = None;
        let mut step = steps.start + (from - steps.start) / stride * stride;
        while step < end {
            for rank in &*self.ranks {
                let first = step + u64::from(*rank) * g.rows;
                let (start, stop) = (first.max(from), (first + g.rows).min(end));
                if start >= stop {
                    continue;
                }
                match &mut run {
                    Some(run) if run.end == start => run.end = stop,
                    _ => {
                        if let Some(done) = run.replace(start..stop) {
                            each(done);
                        }
                    }
                }
            }
            step += stride;
        }
        if let Some(last) = run {
            each(last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PlanSpec, Shape, Shuffle, State, Steps};

    fn plan(rows: u64) -> Arc<Plan> {
        let shape = Arc::new(Shape::uniform(rows, 8).unwrap());
        Arc::new(Plan::new(PlanSpec::single("d", shape, 7, Shuffle::Full)).unwrap())
    }

    fn partition(world: u32, rows: u32, uneven: Uneven) -> Partition {
        Partition {
            world,
            rank: 0,
            batch: Batching::Rows(rows),
            uneven,
        }
    }

    /// The positions that the steps of a rank read, each once, from a state to the end of `epoch`.
    fn read(plan: &Arc<Plan>, p: Partition, rank: u32, from: (u64, u64), epoch: u64) -> Vec<u64> {
        let start = State::at(plan, from.0, from.1);
        let steps = Steps::new(plan.clone(), Partition { rank, ..p }, &start).unwrap();
        let mut found = Vec::new();
        for step in steps.until_epoch(epoch + 1) {
            let step = step.unwrap();
            if step.epoch == epoch {
                let real = &step.rows[..step.real];
                found.extend(real.iter().map(|r| plan.position_of(epoch, *r).unwrap()));
            }
        }
        found
    }

    #[test]
    fn a_share_is_what_the_steps_of_its_ranks_read() {
        for (rows, world, batch, from) in [
            (97, 4, 3, (0, 0)),
            (96, 4, 3, (0, 24)),
            (100, 3, 5, (1, 17)),
            (64, 5, 1, (2, 63)),
            (30, 2, 10, (0, 20)),
        ] {
            for uneven in [Uneven::Drop, Uneven::Pad] {
                let (plan, p) = (plan(rows), partition(world, batch, uneven));
                for ranks in [vec![0], vec![1], vec![1, 0], (1..world).collect()] {
                    if ranks.len() == world as usize {
                        continue;
                    }
                    let share = Share::new(&plan, p, &ranks, from).unwrap().unwrap();
                    assert_eq!(share.of(), (ranks.len() as u64, u64::from(world)));
                    for epoch in from.0..from.0 + 2 {
                        let mut steps: Vec<u64> = ranks
                            .iter()
                            .flat_map(|&rank| read(&plan, p, rank, from, epoch))
                            .collect();
                        steps.sort_unstable();
                        // What the job has passed counts as well.
                        let begin = if epoch == from.0 { from.1 } else { 0 };
                        let has: Vec<u64> =
                            (begin..rows).filter(|&at| share.has(epoch, at)).collect();
                        assert_eq!(has, steps, "{rows} {p:?} {ranks:?} {from:?} epoch {epoch}");
                        for (start, end) in [(0, rows), (5, 6), (11, 29), (rows - 1, rows), (9, 9)]
                        {
                            let mut runs = Vec::new();
                            share.runs(epoch, start..end, |run| runs.push(run));
                            assert!(runs.windows(2).all(|two| two[0].end < two[1].start));
                            let of: Vec<u64> = runs.into_iter().flatten().collect();
                            let expected: Vec<u64> =
                                (start..end).filter(|&at| share.has(epoch, at)).collect();
                            assert_eq!(of, expected);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn ranks_of_one_job_are_joined_wherever_each_says_that_it_is() {
        let (plan, p) = (plan(100), partition(4, 5, Uneven::Pad));
        let of = |ranks: &[u32], at| Share::new(&plan, p, ranks, at).unwrap().unwrap();
        let one = of(&[1], (0, 0));
        let both = one.joined(&of(&[3], (2, 40))).expect("40 is between steps");
        assert_eq!(both, of(&[3, 1], (0, 0)));
        assert_eq!(
            one.joined(&of(&[3], (2, 41))),
            None,
            "a job that began elsewhere"
        );
    }

    #[test]
    fn what_cannot_be_told_or_is_everything_has_no_share() {
        let plan = plan(100);
        let bounded = Partition {
            batch: Batching::Bounded {
                max_total: 10,
                max_rows: 4,
                lookahead_rows: 50,
                padded: false,
                too_long: crate::TooLong::Alone,
            },
            ..partition(4, 5, Uneven::Drop)
        };
        assert_eq!(Share::new(&plan, bounded, &[1], (0, 0)).unwrap(), None);
        let p = partition(2, 5, Uneven::Drop);
        assert_eq!(Share::new(&plan, p, &[1, 0, 1], (0, 0)).unwrap(), None);
        let many: Vec<u32> = (0..=limits::PLAN_LEASE_RANKS_MAX as u32).collect();
        for (p, ranks) in [
            (p, &[][..]),
            (p, &[2]),
            (partition(0, 5, Uneven::Drop), &[0]),
            (partition(2, 0, Uneven::Drop), &[0]),
            (partition(1 << 20, 5, Uneven::Drop), &many),
        ] {
            assert!(
                Share::new(&plan, p, ranks, (0, 0)).is_err(),
                "{p:?} {ranks:?}"
            );
        }
    }
}
