//! Weighted mixing of several sources: one endless sequence of positions, cut into *cycles* in
//! which each source has its exact quota.
//!
//! A cycle of `C` positions has `q_i` of source `i`, `Σ q_i = C`, so over any run of whole cycles
//! the shares are exact. Within a cycle the slots are dealt by a keyed permutation, so that no rank
//! or place in a batch always gets the same source. Source `i` delivers its rows in its own order:
//! its slots in a cycle take its next `q_i` rows, in order. When a source ends, its next epoch
//! begins, with the next order.
//!
//! Global position `P` (over all epochs of the plan) and (source, ordinal in the source's endless
//! sequence) are a bijection: cycle `P / C` and a slot, against cycle `ordinal / q_i` and a rank
//! among the source's slots. Both directions need one table of the cycle, with at most
//! [`PLAN_MIX_CYCLE_ROWS_MAX`](limits::PLAN_MIX_CYCLE_ROWS_MAX) entries; the last few used are
//! kept.

use crate::{Permutation, Source, key, key::Purpose, order::Recent};
use forebay_core::{Error, Result, limits};
use std::sync::Arc;

const CYCLES_KEPT: usize = 8;
/// Uses the shortest cycle whose shares are within this relative error.
const SHARE_ERROR: f64 = 1e-3;

#[derive(Debug)]
pub(crate) struct Mix {
    quotas: Vec<u64>,
    /// The sum of the quotas.
    length: u64,
    seed: u64,
    cycles: Recent<u64, Cycle>,
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
    pub fn new(sources: &[Source], seed: u64) -> Result<Self> {
        let quotas = quotas(sources)?;
        Ok(Mix {
            length: quotas.iter().sum(),
            quotas,
            seed,
            cycles: Recent::new(CYCLES_KEPT),
        })
    }

    pub fn quotas(&self) -> &[u64] {
        &self.quotas
    }

    /// The slots of a cycle.
    pub fn cycle(&self, number: u64) -> Arc<Cycle> {
        self.cycles.get(number, || {
            let order = Permutation::new(
                self.length,
                key::derive(self.seed, Purpose::Cycle, 0, 0, number),
            );
            // The permuted numbers 0..C represent sources by their quotas: the first q_0 source 0,
            // and so on.
            let owner: Vec<u16> = self
                .quotas
                .iter()
                .zip(0..)
                .flat_map(|(&q, source)| std::iter::repeat_n(source, q as usize))
                .collect();
            let mut taken = vec![0u16; self.quotas.len()];
            let mut slots = Vec::with_capacity(self.length as usize);
            order.for_each(0..self.length, |number| {
                let source = owner[number as usize];
                slots.push((source, taken[source as usize]));
                taken[source as usize] += 1;
            });
            Cycle { slots }
        })
    }

    /// The cycle of a global position, and the slot in it.
    pub fn split(&self, position: u64) -> (u64, usize) {
        (position / self.length, (position % self.length) as usize)
    }

    /// Global position to (source, ordinal).
    pub fn source_at(&self, position: u64) -> (usize, u64) {
        let (number, slot) = self.split(position);
        let (source, rank) = self.cycle(number).slots[slot];
        (
            source as usize,
            number * self.quotas[source as usize] + u64::from(rank),
        )
    }

    /// The ordinal of a source when the mix is at a global position: how many of its rows came
    /// before.
    pub fn ordinal_at(&self, position: u64, source: usize) -> u64 {
        let (number, slot) = self.split(position);
        number * self.quotas[source]
            + if slot == 0 {
                0
            } else {
                self.cycle(number).before(slot, source as u16)
            }
    }

    /// (source, ordinal) to global position.
    pub fn position_of(&self, source: usize, ordinal: u64) -> u64 {
        let (number, rank) = (ordinal / self.quotas[source], ordinal % self.quotas[source]);
        number * self.length + self.cycle(number).slot_of(source as u16, rank as u16)
    }
}

/// The quotas of the shortest cycle in which each source's share is within a thousandth of its
/// weight, or, if there is none, of the longest allowed.
fn quotas(sources: &[Source]) -> Result<Vec<u64>> {
    for source in sources {
        if !(source.weight.is_finite() && source.weight > 0.0) {
            return Err(Error::invalid(format!(
                "dataset {:?} has the weight {}",
                source.dataset, source.weight
            ))
            .hint("weights are numbers above 0; to take no rows of a dataset, leave it out"));
        }
    }
    // Scaled by the largest first, so that no sum overflows.
    let largest = sources.iter().map(|s| s.weight).fold(0.0, f64::max);
    let sum: f64 = sources.iter().map(|s| s.weight / largest).sum();
    let shares: Vec<f64> = sources.iter().map(|s| s.weight / largest / sum).collect();
    let longest = limits::PLAN_MIX_CYCLE_ROWS_MAX;
    if let Some((source, share)) = sources
        .iter()
        .zip(&shares)
        .find(|(_, share)| **share * (longest as f64) < 0.5)
    {
        return Err(Error::invalid(format!(
            "dataset {:?} would make up {:.6} of the mix; the least is 1/{longest}",
            source.dataset, share
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
    for length in sources.len() as u64..=longest {
        let quotas = apportion(&shares, length);
        if length == longest || error(&quotas, length) <= SHARE_ERROR {
            return Ok(quotas);
        }
    }
    Err(Error::invalid(format!(
        "a mix has {} datasets; the limit is {longest}",
        sources.len()
    )))
}

/// Distributes `length` seats by largest remainder, at least one for each; ties go to the earlier
/// source.
fn apportion(shares: &[f64], length: u64) -> Vec<u64> {
    let exact: Vec<f64> = shares.iter().map(|share| share * length as f64).collect();
    let mut seats: Vec<u64> = exact.iter().map(|e| (e.floor() as u64).max(1)).collect();
    loop {
        let given: u64 = seats.iter().sum();
        let lack = |i: usize| exact[i] - seats[i] as f64;
        let by_lack = |a: &usize, b: &usize| lack(*a).total_cmp(&lack(*b));
        let all = 0..seats.len();
        match given.cmp(&length) {
            std::cmp::Ordering::Equal => return seats,
            std::cmp::Ordering::Less => match all.rev().max_by(by_lack) {
                Some(i) => seats[i] += 1,
                None => return seats,
            },
            std::cmp::Ordering::Greater => match all.filter(|&i| seats[i] > 1).min_by(by_lack) {
                Some(i) => seats[i] -= 1,
                None => return seats,
            },
        }
    }
}
