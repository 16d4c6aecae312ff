//! How good an order is: six measures of how far it is from a uniform one, each with the value of a
//! uniform one.
//!
//! A batch of a uniform order is a fair sample of the dataset, and one batch says nothing about
//! another. What a cheaper shuffle keeps of the stored order shows as:
//!
//! - **displacement**: how far rows are from their place, as a fraction of the epoch. Uniform: 1/3
//!   on average.
//! - **rank correlation** (Spearman's) of position and row. Uniform: 0; unshuffled: 1.
//! - **co-location**: how often two rows of one batch are from one block, which holds rows that
//!   were written together. Uniform: the chance for any two rows.
//! - **label over-dispersion**: how much more the counts of labels vary from batch to batch than in
//!   fair samples, as the mean of their chi-square divided by its expectation. Uniform: 1. This is
//!   what gradients notice of an order: with sorted labels and batches of `B` rows with one label
//!   it is about `B`.
//! - **entropy of gaps**: of the distance from one row to the next, around the dataset, in
//!   [`GAP_CELLS`] cells, as a fraction of the maximum. Uniform: 1; unshuffled: 0.
//! - **overlap of epochs**: of the rows that share a batch with a row, how many share one with it
//!   again in the next epoch; and the rank correlation of positions in both. Uniform: practically
//!   0.
//!
//! Batches are taken evenly over the epoch, or all of them if they are few enough, so that a
//! dataset of any size is measured in seconds. In a mix, a row's place is relative to its own
//! source.

use crate::{Plan, RowRef};
use forebay_core::{Error, Result, limits};
use serde::Serialize;
use std::collections::HashMap;

/// Cells that gaps are counted in.
pub const GAP_CELLS: usize = 256;
/// Points of a plot.
const POINTS: u64 = 6000;
/// Bars of a plot's histogram of gaps.
const BARS: usize = 96;

/// An order that can be measured.
pub trait Ordering {
    /// As [`Plan::rows_per_epoch`].
    fn rows_per_epoch(&self) -> u64;
    /// As [`Plan::row_at`].
    fn row_at(&self, epoch: u64, position: u64) -> RowRef;
    /// As [`Plan::position_of`].
    fn position_of(&self, epoch: u64, row: RowRef) -> Option<u64>;
}

impl Ordering for Plan {
    fn rows_per_epoch(&self) -> u64 {
        Plan::rows_per_epoch(self)
    }

    fn row_at(&self, epoch: u64, position: u64) -> RowRef {
        Plan::row_at(self, epoch, position)
    }

    fn position_of(&self, epoch: u64, row: RowRef) -> Option<u64> {
        Plan::position_of(self, epoch, row)
    }
}

/// The value of each measure.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Rows of an epoch.
    pub rows: u64,
    /// Rows of a batch, as the caller gave them.
    pub batch: u32,
    /// Rows that were measured: all, or batches taken evenly over the epoch.
    pub measured_rows: u64,
    /// The mean distance of a row's place in the epoch from its place in the dataset, 0 to 1.
    pub displacement: f64,
    /// The largest such distance.
    pub displacement_max: f64,
    /// Spearman's correlation of position and row, -1 to 1.
    pub rank_correlation: f64,
    /// The share of pairs of rows in a batch that are from one block, 0 to 1.
    pub co_location: f64,
    /// The mean chi-square of the batches' label counts divided by its expectation. 1: fair
    /// samples.
    pub label_dispersion: f64,
    /// The entropy of the gaps between consecutive rows, as a fraction of the maximum.
    pub gap_entropy: f64,
    /// The share of a row's companions in a batch that it meets again in a batch of the next epoch.
    pub epoch_overlap: f64,
    /// Spearman's correlation of a row's positions in two epochs, -1 to 1.
    pub epoch_correlation: f64,
}

/// The data for a plot of the order. All numbers are fractions: positions of the epoch, rows of the
/// dataset.
#[derive(Clone, Debug, Serialize)]
pub struct Picture {
    /// (position, row), some thousands.
    pub points: Vec<(f32, f32)>,
    /// Shares of the gaps from one row to the next, from -1 to 1 in equal cells.
    pub gaps: Vec<f32>,
}

/// The label of a row, as a number below some count.
pub trait Labels {
    /// The label of one row: an index into [`counts`](Labels::counts).
    fn label(&self, row: RowRef) -> u32;
    /// How many rows have each label.
    fn counts(&self) -> Vec<u64>;
}

/// One label for each stretch of the dataset: what labels are like if a dataset was written class
/// by class, or day by day.
#[derive(Clone, Copy, Debug)]
pub struct Stretches<'a> {
    /// The plan whose sources are divided.
    pub plan: &'a Plan,
    /// How many stretches of equal length each source has; at least 1.
    pub stretches: u32,
}

impl Labels for Stretches<'_> {
    /// # Panics
    /// If the plan has no such source, the source has no rows, or all sources together have more
    /// stretches than 32 bits can count.
    fn label(&self, row: RowRef) -> u32 {
        let source = &self.plan.spec().sources[row.source as usize];
        let stretch =
            u128::from(row.row) * u128::from(self.stretches) / u128::from(source.shape.rows());
        row.source * self.stretches + stretch as u32
    }

    fn counts(&self) -> Vec<u64> {
        let (quotas, cycle) = self.plan.quotas();
        let stretches = u128::from(self.stretches);
        let of_source = |i: usize| {
            let rows = u128::from(self.plan.spec().sources[i].shape.rows());
            // The rows of stretch s are those from ⌈s · rows / stretches⌉ on; in a mix, as many as
            // the source contributes.
            let share = (u128::from(self.plan.rows_per_epoch()) * u128::from(quotas[i])
                / u128::from(cycle)) as f64
                / rows as f64;
            (0..stretches).map(move |s| {
                let rows = ((s + 1) * rows).div_ceil(stretches) - (s * rows).div_ceil(stretches);
                (rows as f64 * share).round() as u64
            })
        };
        (0..self.plan.spec().sources.len())
            .flat_map(of_source)
            .collect()
    }
}

/// Given labels, one for each row of one dataset.
#[derive(Clone, Debug, Default)]
pub struct Given {
    labels: Vec<u32>,
    counts: Vec<u64>,
}

impl Given {
    /// Labels as text, one for each row in its order.
    pub fn from_text<T: AsRef<str>>(labels: impl IntoIterator<Item = T>) -> Self {
        let (mut numbers, mut given) = (HashMap::new(), Given::default());
        for label in labels {
            let next = numbers.len() as u32;
            let number = match numbers.get(label.as_ref()) {
                Some(&number) => number,
                None => *numbers.entry(label.as_ref().to_owned()).or_insert(next),
            };
            given.labels.push(number);
            given.counts.resize(numbers.len(), 0);
            given.counts[number as usize] += 1;
        }
        given
    }

    /// How many labels were given: one for each row.
    pub fn rows(&self) -> u64 {
        self.labels.len() as u64
    }
}

impl Labels for Given {
    fn label(&self, row: RowRef) -> u32 {
        self.labels[row.row as usize]
    }

    fn counts(&self) -> Vec<u64> {
        self.counts.clone()
    }
}

/// The average values for a uniform order of the plan's rows.
pub fn expected(plan: &Plan, batch: u32) -> Report {
    let rows = plan.rows_per_epoch();
    let (quotas, cycle) = plan.quotas();
    // Two rows are from one block if they are from one source, and there from one block.
    let co_location = plan
        .spec()
        .sources
        .iter()
        .zip(quotas)
        .map(|(source, quota)| {
            let all = source.shape.rows() as f64;
            let same: f64 = source
                .shape
                .runs()
                .map(|(blocks, rows)| blocks as f64 * rows as f64 * (rows as f64 - 1.0))
                .sum();
            (quota as f64 / cycle as f64).powi(2) * same / (all * (all - 1.0)).max(1.0)
        });
    Report {
        rows,
        batch,
        measured_rows: rows,
        displacement: 1.0 / 3.0,
        displacement_max: 1.0,
        rank_correlation: 0.0,
        co_location: co_location.sum(),
        label_dispersion: 1.0,
        gap_entropy: 1.0,
        epoch_overlap: (f64::from(batch) - 1.0) / (rows as f64 - 1.0).max(1.0),
        epoch_correlation: 0.0,
    }
}

/// Measures epoch 0 of an order over the plan's rows against its epoch 1, in batches of `batch`,
/// and collects what is needed to plot it. `order` is the plan itself, or another order of the same
/// rows.
pub fn measure(
    plan: &Plan,
    order: &dyn Ordering,
    batch: u32,
    labels: &dyn Labels,
) -> Result<(Report, Picture)> {
    let (rows, size) = (order.rows_per_epoch(), u64::from(batch));
    if batch < 2 || size > limits::PLAN_BATCH_ROWS_MAX.into() || rows < 2 * size {
        return Err(Error::invalid(format!(
            "the quality of an order of {rows} rows in batches of {batch} cannot be measured"
        ))
        .hint("batches need 2 rows or more, and the order two batches or more"));
    }
    let all = rows / size;
    let taken = all.min((limits::PLAN_MEASURED_ROWS_MAX / size).max(2));
    let place =
        |row: RowRef| row.row as f64 / plan.spec().sources[row.source as usize].shape.rows() as f64;
    let of_label = labels.counts();
    let labelled = of_label.iter().sum::<u64>() as f64;
    let shares: Vec<f64> = of_label.iter().map(|&c| c as f64 / labelled).collect();

    let (mut moved, mut moved_max, mut same_block, mut shared) = (0.0, 0f64, 0.0, 0.0);
    let (mut by_row, mut by_epoch) = (Correlation::default(), Correlation::default());
    let (mut square, mut gaps, mut bars) = (0.0, vec![0u64; GAP_CELLS], vec![0u64; BARS]);
    for number in 0..taken {
        let start = (u128::from(number) * u128::from(all) / u128::from(taken)) as u64 * size;
        let (mut blocks, mut mates, mut counts) = (HashMap::new(), HashMap::new(), HashMap::new());
        let mut before = None;
        for position in start..start + size {
            let row = order.row_at(0, position);
            let (x, p) = (place(row), position as f64 / rows as f64);
            moved += (x - p).abs();
            moved_max = moved_max.max((x - p).abs());
            by_row.add(x, p);
            *blocks
                .entry((
                    row.source,
                    plan.spec().sources[row.source as usize]
                        .shape
                        .block_of(row.row),
                ))
                .or_insert(0u64) += 1;
            *counts.entry(labels.label(row)).or_insert(0u64) += 1;
            if let Some(before) = before.replace(x) {
                let gap: f64 = x - before;
                gaps[((gap.rem_euclid(1.0) * GAP_CELLS as f64) as usize).min(GAP_CELLS - 1)] += 1;
                bars[(((gap + 1.0) / 2.0 * BARS as f64) as usize).min(BARS - 1)] += 1;
            }
            if let Some(then) = order.position_of(1, row) {
                by_epoch.add(p, then as f64 / rows as f64);
                *mates.entry(then / size).or_insert(0u64) += 1;
            }
        }
        let pairs =
            |count: u64| (count * count.saturating_sub(1)) as f64 / (size * (size - 1)) as f64;
        same_block += blocks.values().map(|&c| pairs(c)).sum::<f64>();
        shared += mates.values().map(|&c| pairs(c)).sum::<f64>();
        // Σ (c - e)² / e over all labels is Σ c² / e - size over those that occurred: a batch has
        // few of many labels.
        let expected = |label: u32| size as f64 * shares[label as usize];
        let came = counts.iter().filter(|(label, _)| expected(**label) > 0.0);
        square += came
            .map(|(&label, &c)| (c * c) as f64 / expected(label))
            .sum::<f64>()
            - size as f64;
    }
    let (measured, batches) = (taken * size, taken as f64);
    // A batch is drawn without replacement, which makes its counts vary less.
    let freedom = (shares.iter().filter(|share| **share > 0.0).count() as f64 - 1.0)
        * (rows - size) as f64
        / (rows - 1) as f64;
    let report = Report {
        rows,
        batch,
        measured_rows: measured,
        displacement: moved / measured as f64,
        displacement_max: moved_max,
        rank_correlation: by_row.value(),
        co_location: same_block / batches,
        label_dispersion: if freedom > 0.0 {
            square / batches / freedom
        } else {
            1.0
        },
        gap_entropy: entropy(&gaps),
        epoch_overlap: shared / batches,
        epoch_correlation: by_epoch.value(),
    };
    let points = POINTS.min(rows);
    let points =
        (0..points).map(|i| (u128::from(i) * u128::from(rows) / u128::from(points)) as u64);
    let all_gaps = bars.iter().sum::<u64>() as f32;
    let picture = Picture {
        points: points
            .map(|p| {
                (
                    (p as f64 / rows as f64) as f32,
                    place(order.row_at(0, p)) as f32,
                )
            })
            .collect(),
        gaps: bars.iter().map(|&c| c as f32 / all_gaps).collect(),
    };
    Ok((report, picture))
}

/// Shannon's entropy of counts as a fraction of the maximum, with Miller and Madow's correction for
/// small counts.
fn entropy(counts: &[u64]) -> f64 {
    let sum = counts.iter().sum::<u64>() as f64;
    let used = counts.iter().filter(|&&c| c > 0).count() as f64;
    let plain: f64 = counts
        .iter()
        .filter(|&&c| c > 0)
        .map(|&c| c as f64 / sum)
        .map(|p| -p * p.ln())
        .sum();
    ((plain + (used - 1.0) / (2.0 * sum)) / (counts.len() as f64).ln()).min(1.0)
}

/// Pearson's correlation, in one pass. For places in two orders it equals Spearman's for their
/// rows.
#[derive(Default)]
struct Correlation {
    count: f64,
    mean: (f64, f64),
    squares: (f64, f64),
    product: f64,
}

impl Correlation {
    fn add(&mut self, x: f64, y: f64) {
        self.count += 1.0;
        let (dx, dy) = (x - self.mean.0, y - self.mean.1);
        self.mean = (self.mean.0 + dx / self.count, self.mean.1 + dy / self.count);
        self.squares = (
            self.squares.0 + dx * (x - self.mean.0),
            self.squares.1 + dy * (y - self.mean.1),
        );
        self.product += dx * (y - self.mean.1);
    }

    fn value(&self) -> f64 {
        let scale = (self.squares.0 * self.squares.1).sqrt();
        if scale > 0.0 {
            self.product / scale
        } else {
            0.0
        }
    }
}

/// An order drawn by Fisher and Yates's method into an array, for two epochs: the baseline for the
/// others. It uses none of this crate's permutations, so that a fault in them would show.
pub struct Uniform {
    rows: [Vec<u32>; 2],
    positions: [Vec<u32>; 2],
}

impl Uniform {
    /// `None` if the array would be too large
    /// ([`PLAN_BASELINE_ROWS_MAX`](limits::PLAN_BASELINE_ROWS_MAX)), and for mixes, which have no
    /// such order.
    pub fn new(plan: &Plan, seed: u64) -> Option<Self> {
        let rows = plan.rows_per_epoch();
        if plan.spec().sources.len() > 1
            || plan.spec().epoch_rows.is_some()
            || rows > limits::PLAN_BASELINE_ROWS_MAX
        {
            return None;
        }
        // Xorshift with a multiplication (xorshift64*), which is not one of the mixers in `key.rs`.
        let mut state = seed | 1;
        let mut below = |bound: u64| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            ((u128::from(state.wrapping_mul(0x2545_F491_4F6C_DD1D)) * u128::from(bound)) >> 64)
                as usize
        };
        for _ in 0..64 {
            below(2);
        }
        let rows = [(); 2].map(|()| {
            let mut order: Vec<u32> = (0..rows as u32).collect();
            (1..order.len())
                .rev()
                .for_each(|i| order.swap(i, below(i as u64 + 1)));
            order
        });
        let positions = [0, 1].map(|epoch: usize| {
            let mut positions = vec![0; rows[epoch].len()];
            rows[epoch]
                .iter()
                .zip(0..)
                .for_each(|(&row, at)| positions[row as usize] = at);
            positions
        });
        Some(Uniform { rows, positions })
    }
}

impl Ordering for Uniform {
    fn rows_per_epoch(&self) -> u64 {
        self.rows[0].len() as u64
    }

    fn row_at(&self, epoch: u64, position: u64) -> RowRef {
        RowRef {
            source: 0,
            row: self.rows[epoch as usize % 2][position as usize].into(),
        }
    }

    fn position_of(&self, epoch: u64, row: RowRef) -> Option<u64> {
        self.positions[epoch as usize % 2]
            .get(row.row as usize)
            .map(|&p| p.into())
    }
}
