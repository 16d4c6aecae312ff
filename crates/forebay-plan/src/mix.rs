//! Weighted mixing of several sources: one endless sequence of positions, cut into *cycles* in
//! which each source has its exact quota.
//!
//! A cycle of `C` positions has `q_i` of source `i`, `Σ q_i = C`, so over any run of whole cycles
//! the shares are exact. Within a cycle the slots are dealt by a keyed permutation, so that no rank
//! or place in a batch always gets the same source. Source `i` delivers its rows in its own order:
//! its slots in a cycle take its next `q_i` rows, in order. When a source ends, its next epoch
//! begins, with the next order.
//!
//! The weights may change along the order: a *schedule* has stages, each with the global position at
//! which it begins and its weights. A stage has cycles of its own, and begins one where it begins,
//! even if that breaks off the last cycle of the stage before. How many rows of each source came
//! before a stage is computed once, from the stages before it; so any position is found by a binary
//! search over the stages, and then as without a schedule.
//!
//! Global position `P` (over all epochs of the plan) and (source, ordinal in the source's endless
//! sequence) are a bijection: cycle `P / C` and a slot, against cycle `ordinal / q_i` and a rank
//! among the source's slots. Both directions need one table of the cycle, with at most
//! [`PLAN_MIX_CYCLE_ROWS_MAX`](limits::PLAN_MIX_CYCLE_ROWS_MAX) entries; the last few used are
//! kept.

use crate::{Permutation, Source, Stage, key, key::Purpose, order::Recent};
use forebay_core::{Error, Result, limits};
use std::{
    cmp::{Ordering, Reverse},
    collections::BinaryHeap,
    sync::Arc,
};

const CYCLES_KEPT: usize = 8;
/// Of a mix whose rows have numbers, which are asked for in any order.
const CYCLES_KEPT_MAX: usize = 512;
/// Uses the shortest cycle whose shares are within this relative error.
const SHARE_ERROR: f64 = 1e-3;

#[derive(Debug)]
pub(crate) struct Mix {
    stages: Vec<Quotas>,
    seed: u64,
    /// By stage and number.
    cycles: Recent<(usize, u64), Cycle>,
}

/// The cycles of one stage.
#[derive(Debug)]
struct Quotas {
    /// The global position at which it begins.
    start: u64,
    /// Rows of each source in a cycle, and
    of: Vec<u64>,
    /// their sum.
    length: u64,
    /// The ordinal of each source at its beginning.
    base: Vec<u64>,
}

impl Quotas {
    /// The cycle of a global position, and the slot in it.
    fn split(&self, position: u64) -> (u64, usize) {
        let within = position - self.start;
        (within / self.length, (within % self.length) as usize)
    }
}

/// Positions that follow each other in one cycle.
pub(crate) struct Run {
    pub cycle: Arc<Cycle>,
    /// The slot of the first, and
    pub slot: usize,
    /// how many there are.
    pub count: u64,
    /// The ordinal of each source at the beginning of the cycle.
    pub first: Vec<u64>,
}

/// The source that each slot of a cycle belongs to, and its rank among the source's slots.
#[derive(Debug)]
pub(crate) struct Cycle {
    pub slots: Vec<(u16, u16)>,
}

impl Cycle {
    /// How many of the first `slots` slots belong to a source.
    pub fn before(&self, slots: usize, source: u16) -> u64 {
        self.slots[..slots]
            .iter()
            .filter(|(s, _)| *s == source)
            .count() as u64
    }

    fn slot_of(&self, source: u16, rank: u16) -> u64 {
        self.slots
            .iter()
            .position(|&slot| slot == (source, rank))
            .expect("each source has the slots of its quota") as u64
    }
}

impl Mix {
    pub fn new(sources: &[Source], schedule: &[Stage], seed: u64) -> Result<Self> {
        let names: Vec<&str> = sources.iter().map(|s| s.dataset.as_str()).collect();
        if !schedule.is_empty() {
            return Self::of_stages(&names, schedule, seed);
        }
        let weights: Vec<f64> = sources.iter().map(|s| s.weight).collect();
        if let Some(at) = weights.iter().position(|w| !(w.is_finite() && *w > 0.0)) {
            return Err(Error::invalid(format!(
                "dataset {:?} has the weight {}",
                names[at], weights[at]
            ))
            .hint("weights are numbers above 0; to take no rows of a dataset, leave it out"));
        }
        Self::of_stages(&names, &[Stage { from: 0, weights }], seed)
    }

    /// A mix of sources with these names; the stages were [checked](crate::spec::check_stages).
    pub fn of_stages(names: &[&str], stages: &[Stage], seed: u64) -> Result<Self> {
        let mut mix = Mix {
            stages: Vec::with_capacity(stages.len()),
            seed,
            cycles: Recent::new(CYCLES_KEPT),
        };
        for stage in stages {
            let quotas = quotas(names, &stage.weights).map_err(|e| match stages.len() {
                1 => e,
                _ => e.context(format_args!("the weights from row {} on", stage.from)),
            })?;
            mix.push(stage.from, quotas);
        }
        Ok(mix)
    }

    /// Appends a stage: what came before it now has an end.
    fn push(&mut self, start: u64, quotas: Vec<u64>) {
        let base = match self.stages.len().checked_sub(1) {
            None => vec![0; quotas.len()],
            Some(last) => self.ordinals_in(last, start),
        };
        self.stages.push(Quotas {
            start,
            length: quotas.iter().sum(),
            of: quotas,
            base,
        });
    }

    /// Keeps as many cycles as fit into this memory, for positions in any order, but at least two.
    pub fn keep(&mut self, bytes: u64) {
        let fit = usize::try_from(bytes / self.cycle_bytes()).unwrap_or(usize::MAX);
        self.cycles = Recent::new(fit.clamp(2, CYCLES_KEPT_MAX));
    }

    /// Memory that the longest cycle takes.
    fn cycle_bytes(&self) -> u64 {
        let longest = self.stages.iter().map(|stage| stage.length).max();
        longest.unwrap_or(0) * size_of::<(u16, u16)>() as u64 + size_of::<Cycle>() as u64
    }

    /// Approximate memory that the stages take, and the cycles of so many positions that are kept.
    pub fn memory_bytes(&self, positions: u64) -> u64 {
        let sources = self.stages.first().map_or(0, |stage| stage.of.len());
        let each = size_of::<Quotas>() + 2 * sources * size_of::<u64>();
        let stages = (self.stages.len() * each) as u64;
        let shortest = self.stages.iter().map(|stage| stage.length).min();
        let cycles = positions.div_ceil(shortest.unwrap_or(1).max(1));
        let cycles = cycles.saturating_add(self.stages.len() as u64);
        stages + cycles.min(self.cycles.limit() as u64) * self.cycle_bytes()
    }

    /// What each source has in a cycle of the first stage.
    pub fn quotas(&self) -> &[u64] {
        &self.stages[0].of
    }

    /// All that the weights amount to, for the identity of a plan.
    pub fn digest(&self) -> Vec<u64> {
        let mut all = self.stages[0].of.clone();
        for stage in &self.stages[1..] {
            all.push(stage.start);
            all.extend(&stage.of);
        }
        all
    }

    /// The slots of a cycle of a stage.
    fn cycle(&self, stage: usize, number: u64) -> Arc<Cycle> {
        self.cycles.get((stage, number), || {
            let quotas = &self.stages[stage];
            let order = Permutation::new(
                quotas.length,
                key::derive(self.seed, Purpose::Cycle, 0, stage as u64, number),
            );
            // The permuted numbers 0..C represent sources by their quotas: the first q_0 source 0,
            // and so on.
            let owner: Vec<u16> = quotas
                .of
                .iter()
                .zip(0..)
                .flat_map(|(&q, source)| std::iter::repeat_n(source, q as usize))
                .collect();
            let mut taken = vec![0u16; quotas.of.len()];
            let mut slots = Vec::with_capacity(quotas.length as usize);
            order.for_each(0..quotas.length, |number| {
                let source = owner[number as usize];
                slots.push((source, taken[source as usize]));
                taken[source as usize] += 1;
            });
            Cycle { slots }
        })
    }

    fn stage_at(&self, position: u64) -> usize {
        self.stages.partition_point(|s| s.start <= position) - 1
    }

    /// The cycle of a global position, from there to its end.
    pub fn run_at(&self, position: u64) -> Run {
        let stage = self.stage_at(position);
        let quotas = &self.stages[stage];
        let (number, slot) = quotas.split(position);
        let end = self.stages.get(stage + 1).map_or(u64::MAX, |s| s.start);
        Run {
            cycle: self.cycle(stage, number),
            slot,
            // A stage may end within a cycle.
            count: (quotas.length - slot as u64).min(end - position),
            first: (0..quotas.of.len())
                .map(|source| quotas.base[source] + number * quotas.of[source])
                .collect(),
        }
    }

    /// Global position to (source, ordinal).
    pub fn source_at(&self, position: u64) -> (usize, u64) {
        let stage = self.stage_at(position);
        let quotas = &self.stages[stage];
        let (number, slot) = quotas.split(position);
        let (source, rank) = self.cycle(stage, number).slots[slot];
        let source = source as usize;
        let first = quotas.base[source] + number * quotas.of[source];
        (source, first + u64::from(rank))
    }

    /// The ordinal of a source when the mix is at a global position: how many of its rows came
    /// before.
    pub fn ordinal_at(&self, position: u64, source: usize) -> u64 {
        self.ordinal_in(self.stage_at(position), position, source)
    }

    /// The ordinals of all sources.
    fn ordinals_in(&self, stage: usize, position: u64) -> Vec<u64> {
        let quotas = &self.stages[stage];
        let (number, slot) = quotas.split(position);
        let whole = quotas.base.iter().zip(&quotas.of);
        let mut ordinals: Vec<u64> = whole.map(|(base, of)| base + number * of).collect();
        if slot > 0 {
            for (source, _) in &self.cycle(stage, number).slots[..slot] {
                ordinals[*source as usize] += 1;
            }
        }
        ordinals
    }

    fn ordinal_in(&self, stage: usize, position: u64, source: usize) -> u64 {
        let quotas = &self.stages[stage];
        let (number, slot) = quotas.split(position);
        quotas.base[source]
            + number * quotas.of[source]
            + if slot == 0 {
                0
            } else {
                self.cycle(stage, number).before(slot, source as u16)
            }
    }

    /// (source, ordinal) to global position. `None` if the source has no more rows by then, because
    /// its last weight is 0.
    pub fn position_of(&self, source: usize, ordinal: u64) -> Option<u64> {
        // Of stages that begin with the same ordinal, all but the last have no row of the source.
        let stage = self
            .stages
            .partition_point(|s| s.base[source] <= ordinal)
            .checked_sub(1)?;
        let quotas = &self.stages[stage];
        let (quota, nth) = (quotas.of[source], ordinal - quotas.base[source]);
        let (number, rank) = (nth.checked_div(quota)?, nth % quota);
        let slot = self
            .cycle(stage, number)
            .slot_of(source as u16, rank as u16);
        Some(quotas.start + number * quotas.length + slot)
    }
}

/// The quotas of the shortest cycle in which each source's share is within a thousandth of its
/// weight, or, if there is none, of the longest allowed. A source of weight 0 has none.
fn quotas(names: &[&str], weights: &[f64]) -> Result<Vec<u64>> {
    if let Some(at) = weights.iter().position(|w| !(w.is_finite() && *w >= 0.0)) {
        return Err(Error::invalid(format!(
            "dataset {:?} has the weight {}",
            names[at], weights[at]
        ))
        .hint("weights are numbers of at least 0"));
    }
    let taken: Vec<usize> = (0..weights.len()).filter(|&i| weights[i] > 0.0).collect();
    if taken.is_empty() {
        return Err(Error::invalid("all weights of a mix are 0")
            .hint("give at least one dataset a weight above 0"));
    }
    let some = quotas_of_taken(
        &taken.iter().map(|&i| names[i]).collect::<Vec<_>>(),
        &taken.iter().map(|&i| weights[i]).collect::<Vec<_>>(),
    )?;
    let mut all = vec![0; weights.len()];
    for (quota, &source) in some.into_iter().zip(&taken) {
        all[source] = quota;
    }
    Ok(all)
}

/// [`quotas`], where all weights are above 0.
fn quotas_of_taken(names: &[&str], weights: &[f64]) -> Result<Vec<u64>> {
    // Scaled by the largest first, so that no sum overflows.
    let largest = weights.iter().copied().fold(0.0, f64::max);
    let sum: f64 = weights.iter().map(|w| w / largest).sum();
    let shares: Vec<f64> = weights.iter().map(|w| w / largest / sum).collect();
    let longest = limits::PLAN_MIX_CYCLE_ROWS_MAX;
    if let Some((name, share)) = names
        .iter()
        .zip(&shares)
        .find(|(_, share)| **share * (longest as f64) < 0.5)
    {
        return Err(Error::invalid(format!(
            "dataset {name:?} would make up {share:.2e} of the mix; the least is 1/{longest}"
        ))
        .hint("give it more weight, or open it together with another dataset"));
    }
    let error = |quotas: &[u64], length: u64| {
        quotas
            .iter()
            .zip(&shares)
            .map(|(&q, share)| (q as f64 / length as f64 / share - 1.0).abs())
            .fold(0.0, f64::max)
    };
    // Whether each share alone could be near enough, by one of the two whole numbers around it. Few
    // cycles get past this, and only those are worth distributing.
    let may_do = |length: u64| {
        shares.iter().all(|share| {
            let below = (share * length as f64).floor();
            [below, below + 1.0]
                .iter()
                .any(|q| (q / length as f64 / share - 1.0).abs() <= SHARE_ERROR)
        })
    };
    for length in names.len() as u64..=longest {
        if length < longest && !may_do(length) {
            continue;
        }
        let quotas = apportion(&shares, length);
        if length == longest || error(&quotas, length) <= SHARE_ERROR {
            return Ok(quotas);
        }
    }
    Err(Error::invalid(format!(
        "a mix has {} datasets; the limit is {longest}",
        names.len()
    )))
}

/// Distributes `length` seats by largest remainder, at least one for each; ties go to the earlier
/// source.
fn apportion(shares: &[f64], length: u64) -> Vec<u64> {
    let exact: Vec<f64> = shares.iter().map(|share| share * length as f64).collect();
    let mut seats: Vec<u64> = exact.iter().map(|e| (e.floor() as u64).max(1)).collect();
    let mut given: u64 = seats.iter().sum();
    let lack = |i: usize, seats: &[u64]| exact[i] - seats[i] as f64;
    // The largest lack is on top, and of equal ones the earlier source.
    let mut lacks: BinaryHeap<(Lack, Reverse<usize>)> = (0..seats.len())
        .map(|i| (Lack(lack(i, &seats)), Reverse(i)))
        .collect();
    while given < length
        && let Some((_, Reverse(i))) = lacks.pop()
    {
        (seats[i], given) = (seats[i] + 1, given + 1);
        lacks.push((Lack(lack(i, &seats)), Reverse(i)));
    }
    // The smallest lack is on top.
    let mut spare: BinaryHeap<Reverse<(Lack, usize)>> = (0..seats.len())
        .filter(|&i| given > length && seats[i] > 1)
        .map(|i| Reverse((Lack(lack(i, &seats)), i)))
        .collect();
    while given > length
        && let Some(Reverse((_, i))) = spare.pop()
    {
        (seats[i], given) = (seats[i] - 1, given - 1);
        if seats[i] > 1 {
            spare.push(Reverse((Lack(lack(i, &seats)), i)));
        }
    }
    seats
}

/// By how much a source's seats fall short of its exact share.
struct Lack(f64);

impl Ord for Lack {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Lack {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Lack {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Lack {}

#[cfg(test)]
mod tests {
    use super::*;

    /// One seat after the other, each to the source that lacks most.
    fn apportioned_slowly(shares: &[f64], length: u64) -> Vec<u64> {
        let exact: Vec<f64> = shares.iter().map(|share| share * length as f64).collect();
        let mut seats: Vec<u64> = exact.iter().map(|e| (e.floor() as u64).max(1)).collect();
        loop {
            let given: u64 = seats.iter().sum();
            let lack = |i: usize| exact[i] - seats[i] as f64;
            let by_lack = |a: &usize, b: &usize| lack(*a).total_cmp(&lack(*b));
            let all = 0..seats.len();
            let (at, more) = match given.cmp(&length) {
                Ordering::Equal => return seats,
                Ordering::Less => (all.rev().max_by(by_lack), 1),
                Ordering::Greater => (all.filter(|&i| seats[i] > 1).min_by(by_lack), -1),
            };
            let Some(at) = at else { return seats };
            seats[at] = seats[at].wrapping_add_signed(more);
        }
    }

    /// Each length is tried.
    fn quotas_slowly(weights: &[f64]) -> Vec<u64> {
        let largest = weights.iter().copied().fold(0.0, f64::max);
        let sum: f64 = weights.iter().map(|w| w / largest).sum();
        let shares: Vec<f64> = weights.iter().map(|w| w / largest / sum).collect();
        let longest = limits::PLAN_MIX_CYCLE_ROWS_MAX;
        let fits = |quotas: &[u64], length: u64| {
            quotas
                .iter()
                .zip(&shares)
                .all(|(&q, share)| (q as f64 / length as f64 / share - 1.0).abs() <= SHARE_ERROR)
        };
        let mut lengths = weights.len() as u64..=longest;
        lengths
            .find_map(|length| {
                let quotas = apportioned_slowly(&shares, length);
                (length == longest || fits(&quotas, length)).then_some(quotas)
            })
            .unwrap()
    }

    #[test]
    fn quotas_are_those_of_trying_each_length_and_seat() {
        for seed in 0..60u64 {
            let drawn = |n: u64| key::derive(seed, Purpose::Rows, n, 0, 0);
            let sources = [1, 2, 3, 5, 8, 20, 60][(drawn(0) % 7) as usize];
            let kind = drawn(1) % 4;
            let weights: Vec<f64> = (0..sources)
                .map(|i| match kind {
                    0 => 1.0,
                    1 => (1 + drawn(2 + i) % 9) as f64,
                    2 => 0.02 + (drawn(2 + i) % 1000) as f64 / 1000.0,
                    _ => [0.7, 0.2, 0.1, 0.05][(drawn(2 + i) % 4) as usize],
                })
                .collect();
            let names = vec!["d"; weights.len()];
            let found = quotas(&names, &weights).unwrap();
            assert_eq!(found, quotas_slowly(&weights), "seed {seed}: {weights:?}");
        }
    }

    #[test]
    fn a_long_schedule_of_many_sources_has_ordinals_that_follow_each_other() {
        let sources: Vec<Source> = (0..64)
            .map(|i| {
                let shape = Arc::new(crate::Shape::from_runs([(10, 100)]).unwrap());
                Source {
                    dataset: format!("d{i}"),
                    shape,
                    weight: 1.0,
                }
            })
            .collect();
        let stage = |n: u64| Stage {
            from: n * 1000,
            weights: (0..64).map(|i| 1.0 + ((i * 7 + n) % 13) as f64).collect(),
        };
        let schedule: Vec<Stage> = (0..200).map(stage).collect();
        let mix = Mix::new(&sources, &schedule, 3).unwrap();
        for position in [1, 999, 1000, 1001, 123_456, 199_000] {
            let all: u64 = (0..64).map(|source| mix.ordinal_at(position, source)).sum();
            assert_eq!(all, position);
        }
    }
}
