//! The steps of a job: each takes one batch for each rank from the order, in order.
//!
//! With batches of `B` rows and `W` ranks, a step takes the next `W · B` positions of the epoch, and rank `r` the `r`-th `B` of them. So the rows of all ranks, put
//! together in their order, are the order of the plan, whatever `W` and `B` are; every rank has the same number of steps; and after a step there is one number that says
//! where the job is. Steps are counted from the state that the job began with, on through the epochs. Worker `w` of `n` makes the steps
//! `w, w + n, w + 2n, …`: who takes from the workers in turn gets them in order.

use crate::{Batching, Partition, Plan, RowRef, State, Uneven};
use forebay_core::{Error, Result, limits};
use std::sync::Arc;

/// One rank's batch in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Counted from where the job began or resumed.
    pub step: u64,
    pub epoch: u64,
    /// The rows of this rank.
    pub rows: Vec<RowRef>,
    /// How many of them are rows of this epoch; those after are padding. All of them, but under [`Uneven::Pad`].
    pub real: usize,
    /// Where the job is when all ranks have yielded this step.
    pub next: State,
}

/// The steps of one rank, or of one worker of it, from a state on.
#[derive(Debug)]
pub struct Steps {
    plan: Arc<Plan>,
    partition: Partition,
    start: State,
    end_epoch: u64,
    workers: u32,
    /// The next step of the iterator.
    next: u64,
}

impl Steps {
    /// From a state on, without end: see [`until_epoch`](Steps::until_epoch).
    pub fn new(plan: Arc<Plan>, partition: Partition, start: &State) -> Result<Self> {
        let partition = partition.checked()?;
        start.check(&plan)?;
        let steps = Steps { plan, partition, start: start.clone(), end_epoch: limits::PLAN_EPOCHS_MAX, workers: 1, next: 0 };
        if steps.in_epoch(0) == Some(0) {
            return Err(Error::invalid(format!(
                "an epoch of {} rows is less than one step of {} ranks with {} rows each",
                steps.plan.rows_per_epoch(),
                partition.world,
                partition.batch.most_rows()
            ))
            .hint("take smaller batches, or pad or repeat instead of drop"));
        }
        Ok(steps)
    }

    /// Ends before the first step of this epoch.
    pub fn until_epoch(mut self, epoch: u64) -> Self {
        self.end_epoch = epoch.min(limits::PLAN_EPOCHS_MAX);
        self
    }

    /// The part of worker `worker` of `workers`, or of connection `k` of `K`.
    pub fn of_worker(mut self, worker: u32, workers: u32) -> Result<Self> {
        if workers == 0 || workers > limits::PLAN_WORKERS_MAX || worker >= workers {
            return Err(Error::invalid(format!("worker {worker} of {workers}"))
                .hint(format!("workers count from 0, and there are 1 to {}", limits::PLAN_WORKERS_MAX)));
        }
        (self.workers, self.next) = (workers, u64::from(worker));
        Ok(self)
    }

    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// Rows of all ranks in one step, if that is fixed.
    fn stride(&self) -> Option<u64> {
        match self.partition.batch {
            Batching::Rows(rows) => Some(u64::from(rows) * u64::from(self.partition.world)),
            Batching::Bounded { .. } => None,
        }
    }

    /// Steps of an epoch from a position on; `None` for bounded batches, of which nobody knows without the lengths.
    pub fn in_epoch(&self, position: u64) -> Option<u64> {
        let (left, stride) = (self.plan.rows_per_epoch() - position, self.stride()?);
        Some(if self.partition.uneven == Uneven::Drop { left / stride } else { left.div_ceil(stride) })
    }

    /// All steps until the end, of all workers; `None` as for [`in_epoch`](Steps::in_epoch).
    pub fn count(&self) -> Option<u64> {
        let whole = self.end_epoch.saturating_sub(self.start.epoch);
        Some(if whole == 0 { 0 } else { self.in_epoch(self.start.position)?.saturating_add((whole - 1).saturating_mul(self.in_epoch(0)?)) })
    }

    /// The step of this number; `None` past the end.
    pub fn step(&mut self, step: u64) -> Result<Option<Step>> {
        let (Some(stride), Some(first), Some(each)) = (self.stride(), self.in_epoch(self.start.position), self.in_epoch(0)) else {
            return Err(Error::unsupported("batches bounded by length"));
        };
        let (epoch, position, last) = match step.checked_sub(first) {
            None => (self.start.epoch, self.start.position + step * stride, step + 1 == first),
            Some(later) => (self.start.epoch + 1 + later / each, later % each * stride, later % each + 1 == each),
        };
        if epoch >= self.end_epoch {
            return Ok(None);
        }
        let rows = u64::from(self.partition.batch.most_rows());
        let start = position + u64::from(self.partition.rank) * rows;
        let next = if last { State::at(&self.plan, epoch + 1, 0) } else { State::at(&self.plan, epoch, position + stride) };
        let (rows, real) = self.rows_from(epoch, start, rows);
        Ok(Some(Step { step, epoch, rows, real, next }))
    }

    /// Rows from a position on, around the end of the epoch to its beginning if it has not as many; and how many count.
    fn rows_from(&self, epoch: u64, start: u64, count: u64) -> (Vec<RowRef>, usize) {
        let (all, end) = (self.plan.rows_per_epoch(), start + count);
        let mut rows = Vec::with_capacity(count as usize);
        self.plan.fill(epoch, start.min(all)..end.min(all), &mut rows);
        let real = if self.partition.uneven == Uneven::Pad { rows.len() } else { count as usize };
        let mut at = start.max(all);
        while at < end {
            let from = at % all;
            let run = (end - at).min(all - from);
            self.plan.fill(epoch, from..from + run, &mut rows);
            at += run;
        }
        (rows, real)
    }
}

impl Iterator for Steps {
    type Item = Result<Step>;

    fn next(&mut self) -> Option<Self::Item> {
        let step = self.step(self.next).transpose();
        self.next += u64::from(self.workers);
        step
    }
}
