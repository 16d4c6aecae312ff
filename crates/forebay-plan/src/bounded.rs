//! Batches bounded by total length: for speech and text, where rows differ in length and a batch is
//! as large as memory allows.
//!
//! The order is taken in *look-ahead windows* of a fixed number of rows. The rows of a window are
//! sorted by length and cut into batches, each as large as the bounds allow, so that rows of a
//! batch are of similar length; the batches are then put in a random order. That makes one sequence
//! of batches for the epoch, window after window, that depends on the plan, the lengths and the
//! bounds alone. Ranks take its batches in turn, so it is the same for any number of ranks, and two
//! numbers identify a place between two batches: where the window begins, and how many of its
//! batches have been taken.
//!
//! A row that is longer than a whole batch may be is the longest of its window, so it comes last
//! when the window is sorted. [`TooLong`] says whether it is an error, a batch of its own, or left
//! out; a window whose rows are all left out has no batches.

use crate::{Batching, Permutation, Plan, RowRef, TooLong, key, key::Purpose};
use forebay_core::{Error, Result};
use std::ops::Range;

/// Knows how long rows are: from a column of the dataset, or from an array of the caller.
pub trait Lengths: Send + Sync {
    /// Appends the length of each row, in whatever unit `max_total` has.
    fn lengths(&self, rows: &[RowRef], out: &mut Vec<u64>) -> Result<()>;
}

/// One look-ahead window, batched.
#[derive(Debug)]
pub(crate) struct Window {
    pub positions: Range<u64>,
    rows: Vec<RowRef>,
    batches: Vec<Range<usize>>,
}

impl Window {
    /// The window that begins at a position of an epoch. `batching` is [`Batching::Bounded`].
    pub fn new(
        plan: &Plan,
        epoch: u64,
        start: u64,
        batching: &Batching,
        lengths: &dyn Lengths,
    ) -> Result<Self> {
        let Batching::Bounded {
            max_total,
            max_rows,
            lookahead_rows,
            padded,
            too_long,
        } = *batching
        else {
            return Err(Error::internal(
                "a look-ahead window for batches of a fixed number of rows",
            ));
        };
        let positions = start..plan.rows_per_epoch().min(start + u64::from(lookahead_rows));
        let mut rows = Vec::new();
        plan.fill(epoch, positions.clone(), &mut rows);
        let mut found = Vec::with_capacity(rows.len());
        lengths.lengths(&rows, &mut found)?;
        if found.len() != rows.len() {
            return Err(
                Error::invalid(format!("{} lengths for {} rows", found.len(), rows.len()))
                    .hint("give one length for each row, in their order"),
            );
        }
        let mut sorted: Vec<(u64, RowRef)> = found.into_iter().zip(rows).collect();
        // Stable: rows of one length stay in the plan's order.
        sorted.sort_by_key(|(length, _)| *length);
        let fitting = sorted.partition_point(|(length, _)| *length <= max_total);
        match (sorted.last(), too_long) {
            (Some((length, row)), TooLong::Error) if fitting < sorted.len() => {
                return Err(Error::invalid(format!(
                    "row {} of dataset {:?} has the length {length}, and a batch may have \
                     {max_total} in total",
                    row.row,
                    plan.spec().sources[row.source as usize].dataset
                ))
                .hint(
                    "raise max_total; or say too_long=\"alone\" to make such a row a batch of its \
                     own, or too_long=\"skip\" to leave it out",
                ));
            }
            (_, TooLong::Skip) => sorted.truncate(fitting),
            _ => {}
        }
        let (mut cut, mut begin, mut sum) = (Vec::new(), 0, 0u64);
        for (i, (length, _)) in sorted.iter().enumerate() {
            let count = (i - begin) as u64 + 1;
            // Sorted, so the newest is the longest.
            let total = if padded {
                length.saturating_mul(count)
            } else {
                sum.saturating_add(*length)
            };
            // A row that is too long by itself starts a batch, which the next row ends.
            if begin < i && (total > max_total || count > u64::from(max_rows)) {
                cut.push(begin..i);
                (begin, sum) = (i, 0);
            }
            sum = sum.saturating_add(*length);
        }
        if begin < sorted.len() {
            cut.push(begin..sorted.len());
        }
        let order = Permutation::new(
            cut.len() as u64,
            key::derive(plan.spec().seed, Purpose::Batches, 0, epoch, start),
        );
        let batches = (0..cut.len() as u64)
            .map(|i| cut[order.at(i) as usize].clone())
            .collect();
        Ok(Window {
            positions,
            rows: sorted.into_iter().map(|(_, row)| row).collect(),
            batches,
        })
    }

    pub fn len(&self) -> u64 {
        self.batches.len() as u64
    }

    pub fn batch(&self, number: u64) -> &[RowRef] {
        &self.rows[self.batches[number as usize].clone()]
    }
}
