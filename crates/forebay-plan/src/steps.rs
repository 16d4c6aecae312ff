//! The steps of a job: each takes one batch for each rank from the order, in order.
//!
//! With batches of `B` rows and `W` ranks, a step takes the next `W · B` positions of the epoch,
//! and rank `r` the `r`-th `B` of them. So the rows of all ranks, concatenated in order, are the
//! order of the plan, whatever `W` and `B` are; every rank has the same number of steps; and after
//! a step one number says where the job is. Steps are counted from the state that the job began
//! with, on through the epochs. Worker `w` of `n` makes the steps `w, w + n, w + 2n, …`: taking
//! from the workers in turn gives them in order.
//!
//! Batches bounded by length (`bounded.rs`) are a sequence as well, of which a step takes `W`.
//! Finding where a step begins in it requires making all batches before it, so each worker goes
//! through all of them, and keeps its own.

use crate::{
    Batching, Lengths, Partition, Plan, RowRef, State, TooLong, Uneven, Within, bounded::Window,
};
use forebay_core::{Error, Result, limits, units::count};
use std::sync::Arc;

/// One rank's batch in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Counted from where the job began or resumed.
    pub step: u64,
    /// The epoch that its real rows belong to, from 0.
    pub epoch: u64,
    /// The rows of this rank.
    pub rows: Vec<RowRef>,
    /// How many of them are rows of this epoch; the rest are padding. All of them, except under
    /// [`Uneven::Pad`].
    pub real: usize,
    /// Where the job is when all ranks have yielded this step.
    pub next: State,
}

/// The steps of one rank, or of one of its workers, from a state on.
pub struct Steps {
    plan: Arc<Plan>,
    partition: Partition,
    start: State,
    end_epoch: u64,
    workers: u32,
    /// The next step of the iterator.
    next: u64,
    lengths: Option<Arc<dyn Lengths>>,
    cursor: Cursor,
}

/// How far the bounded batches have been traversed.
struct Cursor {
    /// The number of the next step.
    step: u64,
    epoch: u64,
    /// Where the next or the current window begins.
    position: u64,
    /// Batches of it that have been taken.
    batches: u64,
    window: Option<Window>,
}

impl Cursor {
    fn new(state: &State) -> Self {
        let batches = state.within.map_or(0, |within| within.batches);
        Cursor {
            step: 0,
            epoch: state.epoch,
            position: state.position,
            batches,
            window: None,
        }
    }

    fn turn_epoch(&mut self) {
        (self.epoch, self.position, self.batches, self.window) = (self.epoch + 1, 0, 0, None);
    }
}

impl Steps {
    /// From a state on, without end: see [`until_epoch`](Steps::until_epoch).
    pub fn new(plan: Arc<Plan>, partition: Partition, start: &State) -> Result<Self> {
        let partition = partition.checked()?;
        start.check(&plan)?;
        if start
            .within
            .is_some_and(|within| !within.batching.continues_as(partition.batch))
        {
            return Err(Error::invalid(
                "the state cannot be resumed: it lies between batches of other bounds",
            )
            .hint(
                "resume with the max_total, max_rows, lookahead and too_long that it was saved \
                 with; a state of the beginning of an epoch takes any",
            ));
        }
        let cursor = Cursor::new(start);
        let steps = Steps {
            plan,
            partition,
            start: start.clone(),
            end_epoch: limits::PLAN_EPOCHS_MAX,
            workers: 1,
            next: 0,
            lengths: None,
            cursor,
        };
        if steps.in_epoch(0) == Some(0) {
            return Err(Error::invalid(format!(
                "an epoch of {} is less than one step of {} with {} each",
                count(steps.plan.rows_per_epoch(), "row"),
                count(u64::from(partition.world), "rank"),
                count(u64::from(partition.batch.most_rows()), "row")
            ))
            .hint("take smaller batches, or uneven=\"pad\" or uneven=\"repeat\""));
        }
        Ok(steps)
    }

    /// Ends before the first step of this epoch.
    pub fn until_epoch(mut self, epoch: u64) -> Self {
        self.end_epoch = epoch.min(limits::PLAN_EPOCHS_MAX);
        self
    }

    /// The steps of worker `worker` of `workers`, or of connection `k` of `K`.
    pub fn of_worker(mut self, worker: u32, workers: u32) -> Result<Self> {
        if workers == 0 || workers > limits::PLAN_WORKERS_MAX || worker >= workers {
            return Err(
                Error::invalid(format!("worker {worker} of {workers} does not exist")).hint(
                    format!(
                        "workers are numbered from 0, and there can be 1 to {}",
                        limits::PLAN_WORKERS_MAX
                    ),
                ),
            );
        }
        (self.workers, self.next) = (workers, u64::from(worker));
        Ok(self)
    }

    /// Sets the lengths of rows, which bounded batches need.
    pub fn with_lengths(mut self, lengths: Arc<dyn Lengths>) -> Self {
        self.lengths = Some(lengths);
        self
    }

    /// The plan whose rows these are.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// The rank that the steps belong to, and how it takes rows.
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

    /// Steps of an epoch from a position on; `None` for bounded batches, where that is unknown
    /// without the lengths.
    ///
    /// # Panics
    /// If `position` is past the end of an epoch.
    pub fn in_epoch(&self, position: u64) -> Option<u64> {
        let (left, stride) = (self.plan.rows_per_epoch() - position, self.stride()?);
        Some(if self.partition.uneven == Uneven::Drop {
            left / stride
        } else {
            left.div_ceil(stride)
        })
    }

    /// All steps of all workers until the end; `None` as for [`in_epoch`](Steps::in_epoch).
    pub fn total(&self) -> Option<u64> {
        let whole = self.end_epoch.saturating_sub(self.start.epoch);
        Some(if whole == 0 {
            0
        } else {
            self.in_epoch(self.start.position)?
                .saturating_add((whole - 1).saturating_mul(self.in_epoch(0)?))
        })
    }

    /// The step with this number; `None` past the end. With bounded batches, asking for an earlier
    /// step than the last one starts from the beginning.
    pub fn step(&mut self, step: u64) -> Result<Option<Step>> {
        let (Some(stride), Some(first), Some(each)) = (
            self.stride(),
            self.in_epoch(self.start.position),
            self.in_epoch(0),
        ) else {
            let found = self.step_within(step, || true)?;
            return found.ok_or_else(|| Error::internal("a walk through batches was given up"));
        };
        let (epoch, position, last) = match step.checked_sub(first) {
            None => (
                self.start.epoch,
                self.start.position + step * stride,
                step + 1 == first,
            ),
            Some(later) => (
                (self.start.epoch + 1).saturating_add(later / each),
                later % each * stride,
                later % each + 1 == each,
            ),
        };
        if epoch >= self.end_epoch {
            return Ok(None);
        }
        let rows = u64::from(self.partition.batch.most_rows());
        let start = position + u64::from(self.partition.rank) * rows;
        let next = if last {
            State::at(&self.plan, epoch + 1, 0)
        } else {
            State::at(&self.plan, epoch, position + stride)
        };
        let (rows, real) = self.rows_from(epoch, start, rows);
        Ok(Some(Step {
            step,
            epoch,
            rows,
            real,
            next,
        }))
    }

    /// The same for bounded batches, where going to a step may take long: after each step before it,
    /// `goes_on` is asked. `None`: it said no; the next call goes on from there.
    ///
    /// # Errors
    /// As [`step`](Steps::step).
    pub fn step_within(
        &mut self,
        step: u64,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Option<Option<Step>>> {
        if step < self.cursor.step {
            self.cursor = Cursor::new(&self.start);
        }
        loop {
            match self.next_bounded()? {
                Some(found) if found.step < step => {
                    if !goes_on() {
                        return Ok(None);
                    }
                }
                found => return Ok(Some(found)),
            }
        }
    }

    /// Rows from a position on, wrapping around from the end of the epoch to its beginning if there
    /// are not enough; and how many count.
    fn rows_from(&self, epoch: u64, start: u64, count: u64) -> (Vec<RowRef>, usize) {
        let (all, end) = (self.plan.rows_per_epoch(), start + count);
        let mut rows = Vec::with_capacity(count as usize);
        self.plan
            .fill(epoch, start.min(all)..end.min(all), &mut rows);
        let real = if self.partition.uneven == Uneven::Pad {
            rows.len()
        } else {
            count as usize
        };
        let mut at = start.max(all);
        while at < end {
            let from = at % all;
            let run = (end - at).min(all - from);
            self.plan.fill(epoch, from..from + run, &mut rows);
            at += run;
        }
        (rows, real)
    }

    /// The step after the last one, with bounded batches.
    fn next_bounded(&mut self) -> Result<Option<Step>> {
        let (world, rank, rows) = (
            u64::from(self.partition.world),
            u64::from(self.partition.rank),
            self.plan.rows_per_epoch(),
        );
        loop {
            let epoch = self.cursor.epoch;
            if epoch >= self.end_epoch {
                return Ok(None);
            }
            let whole_epoch = (self.cursor.position, self.cursor.batches) == (0, 0);
            let (mut taken, mut own) = (0, Vec::new());
            self.pass_empty_windows()?;
            while taken < world && self.cursor.position < rows {
                let window = match self.cursor.window.take() {
                    Some(window) => window,
                    None => self.window(epoch, self.cursor.position)?,
                };
                let from = self.cursor.batches;
                let run = window.len().saturating_sub(from).min(world - taken);
                if run == 0 {
                    return Err(Error::invalid(format!(
                        "the state cannot be resumed: it is after {from} batches of a look-ahead \
                         window that has {}",
                        window.len()
                    ))
                    .hint("give the lengths of rows that it was saved with"));
                }
                if (taken..taken + run).contains(&rank) {
                    own.extend_from_slice(window.batch(from + rank - taken));
                }
                taken += run;
                self.cursor.batches = from + run;
                if self.cursor.batches == window.len() {
                    (self.cursor.position, self.cursor.batches) = (window.positions.end, 0);
                    self.pass_empty_windows()?;
                } else {
                    self.cursor.window = Some(window);
                }
            }
            let last = self.cursor.position >= rows;
            if last {
                self.cursor.turn_epoch();
            }
            let uneven = self.partition.uneven;
            if taken == 0 || taken < world && uneven == Uneven::Drop {
                if whole_epoch {
                    let batches = if taken == 1 { "batch" } else { "batches" };
                    let few = format!(
                        "an epoch makes {taken} {batches}, less than one for each of {}",
                        count(world, "rank")
                    );
                    return Err(Error::invalid(few).hint(match taken {
                        0 => "every row is longer than a batch may be: raise the limit",
                        _ => "make batches smaller, or uneven=\"pad\" or uneven=\"repeat\"",
                    }));
                }
                continue;
            }
            let mut real = own.len();
            if rank >= taken {
                own = self.batch_around(epoch, rank - taken)?;
                real = if uneven == Uneven::Pad { 0 } else { own.len() };
            }
            let mut next = State::at(&self.plan, self.cursor.epoch, self.cursor.position);
            if self.cursor.batches > 0 {
                next.within = Some(Within {
                    batches: self.cursor.batches,
                    batching: self.partition.batch,
                });
            }
            let step = self.cursor.step;
            self.cursor.step += 1;
            return Ok(Some(Step {
                step,
                epoch,
                rows: own,
                real,
                next,
            }));
        }
    }

    /// Goes to the next window that has batches, or to the end of the epoch. A window can be
    /// without batches only if rows are left out; others are not inspected before they are needed,
    /// so that an error in them appears in its place.
    fn pass_empty_windows(&mut self) -> Result<()> {
        if !matches!(
            self.partition.batch,
            Batching::Bounded {
                too_long: TooLong::Skip,
                ..
            }
        ) {
            return Ok(());
        }
        while self.cursor.window.is_none()
            && self.cursor.batches == 0
            && self.cursor.position < self.plan.rows_per_epoch()
        {
            let window = self.window(self.cursor.epoch, self.cursor.position)?;
            if window.len() > 0 {
                self.cursor.window = Some(window);
            } else {
                self.cursor.position = window.positions.end;
            }
        }
        Ok(())
    }

    fn window(&self, epoch: u64, start: u64) -> Result<Window> {
        let lengths = self.lengths.as_ref().ok_or_else(|| {
            Error::invalid(
                "the batches are bounded by length, and the lengths of rows are not known",
            )
            .hint("name the column that holds the lengths")
        })?;
        Window::new(&self.plan, epoch, start, &self.partition.batch, &**lengths)
    }

    /// Batch number `number` from the beginning of an epoch, which starts over if it does not have
    /// enough.
    fn batch_around(&self, epoch: u64, mut number: u64) -> Result<Vec<RowRef>> {
        let (mut start, mut whole) = (0, Some(0));
        loop {
            let window = self.window(epoch, start)?;
            if number < window.len() {
                return Ok(window.batch(number).to_vec());
            }
            number -= window.len();
            start = window.positions.end % self.plan.rows_per_epoch();
            whole = whole.map(|n| n + window.len());
            if start == 0
                && let Some(all) = whole.take().filter(|all| *all > 0)
            {
                // Going round again leads to the same.
                number %= all;
            }
        }
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
