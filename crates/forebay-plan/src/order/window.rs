//! The shuffle `window(n)`: no row is `n` or more positions away from its place, and a reader that
//! goes through the rows in order needs a buffer of `n` rows to deliver them.
//!
//! Two passes. The rows are cut into windows of `w = 2·⌊n/3⌋` rows and permuted inside each (the
//! inner pass); the result is cut into windows of the same size that begin half a window later, and
//! permuted again (the outer pass), so that rows cross every border between windows. A row moves
//! less than `w` in the first pass and less than `w / 2` beyond the end of its window in the
//! second: less than `3w / 2 <= n`. When the reader starts delivering an outer window, it has read
//! to the end of the inner window that this one reaches into: `3w / 2` rows, none of which has been
//! delivered yet.
//!
//! A shuffle buffer, which replaces a random one of its `n` rows with the next row, is not a
//! function of the position: its order at row 10^9 is known only after playing through all rows
//! before. This shuffle can be asked anywhere.

use crate::{Permutation, key, key::Purpose};
use std::ops::Range;

#[derive(Debug)]
pub(super) struct Windows {
    /// Rows of a window.
    width: u64,
    /// Where the outer windows begin: half a window, or 0 if there is only one pass.
    shift: u64,
    rows: u64,
    seed: u64,
    source: u64,
}

/// One window with its permutation.
struct Window {
    start: u64,
    end: u64,
    order: Permutation,
}

impl Window {
    fn forward(&self, i: u64) -> u64 {
        self.start + self.order.at(i - self.start)
    }

    fn backward(&self, i: u64) -> u64 {
        self.start + self.order.position_of(i - self.start)
    }
}

impl Windows {
    /// For `n >= 2`. With `n = 2` there is room for only one pass, in pairs.
    pub fn new(n: u64, rows: u64, seed: u64, source: u64) -> Self {
        let half = n.min(rows.saturating_mul(2)) / 3;
        let (width, shift) = if half == 0 { (2, 0) } else { (2 * half, half) };
        Windows {
            width,
            shift,
            rows,
            seed,
            source,
        }
    }

    /// The inner window that holds place `i`.
    fn inner(&self, epoch: u64, i: u64) -> Window {
        let number = i / self.width;
        let start = number * self.width;
        self.window(
            Purpose::WindowInner,
            epoch,
            number,
            start,
            start + self.width,
        )
    }

    /// The outer window that holds place `i`.
    fn outer(&self, epoch: u64, i: u64) -> Window {
        let number = (i + self.width - self.shift) / self.width;
        let end = number * self.width + self.shift;
        self.window(
            Purpose::WindowOuter,
            epoch,
            number,
            end.saturating_sub(self.width),
            end,
        )
    }

    fn window(&self, purpose: Purpose, epoch: u64, number: u64, start: u64, end: u64) -> Window {
        let end = end.min(self.rows);
        Window {
            start,
            end,
            order: Permutation::new(
                end - start,
                key::derive(self.seed, purpose, self.source, epoch, number),
            ),
        }
    }

    pub fn row_at(&self, epoch: u64, position: u64) -> u64 {
        let place = if self.shift == 0 {
            position
        } else {
            self.outer(epoch, position).forward(position)
        };
        self.inner(epoch, place).forward(place)
    }

    pub fn position_of(&self, epoch: u64, row: u64) -> u64 {
        let place = self.inner(epoch, row).backward(row);
        if self.shift == 0 {
            place
        } else {
            self.outer(epoch, place).backward(place)
        }
    }

    pub fn for_each(&self, epoch: u64, positions: Range<u64>, mut each: impl FnMut(u64)) {
        let mut at = positions.start;
        while at < positions.end {
            if self.shift == 0 {
                let window = self.inner(epoch, at);
                let stop = window.end.min(positions.end);
                window
                    .order
                    .for_each(at - window.start..stop - window.start, |i| {
                        each(window.start + i)
                    });
                at = stop;
                continue;
            }
            // An outer window reaches into at most two inner ones.
            let outer = self.outer(epoch, at);
            let inner = [
                self.inner(epoch, outer.start),
                self.inner(epoch, outer.end - 1),
            ];
            let border = inner[0].end;
            let stop = outer.end.min(positions.end);
            outer
                .order
                .for_each(at - outer.start..stop - outer.start, |i| {
                    let place = outer.start + i;
                    // By index, not by a branch, because nobody can predict which it is.
                    each(inner[usize::from(place >= border)].forward(place));
                });
            at = stop;
        }
    }

    /// The positions that these rows can be at.
    pub fn span(&self, rows: Range<u64>) -> Range<u64> {
        let reach = self.width + self.shift;
        rows.start.saturating_sub(reach)..(rows.end + reach).min(self.rows)
    }
}
