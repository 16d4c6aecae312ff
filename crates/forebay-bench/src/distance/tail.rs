//! Waits from a log-normal distribution. Each depends only on the seed and the request's number:
//! the same in every run, whatever the connections.

use super::Tail;
use std::{f64::consts::TAU, time::Duration};

/// A longer wait is not a tail but an outage, and clients would treat it as one.
const WAIT_MAX: Duration = Duration::from_secs(20);

pub(super) fn wait(median: Duration, tail: Tail, n: u64) -> Duration {
    let factor = (tail.sigma * normal(tail.seed, n)).exp();
    // Limited before it becomes a duration, which may not be able to hold it.
    Duration::from_secs_f64((median.as_secs_f64() * factor).min(WAIT_MAX.as_secs_f64()))
}

/// A number of the standard normal distribution, by Box and Muller's transform of two uniform ones.
fn normal(seed: u64, n: u64) -> f64 {
    let at = mix(seed).wrapping_add(n.wrapping_mul(2));
    // The first one is above 0, for its logarithm.
    let (first, second) = (1.0 - uniform(mix(at)), uniform(mix(at.wrapping_add(1))));
    (-2.0 * first.ln()).sqrt() * (TAU * second).cos()
}

/// From 0 to below 1.
fn uniform(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// SplitMix64's step and output: neighbouring numbers give unrelated ones.
fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits_ms(sigma: f64, seed: u64) -> Vec<f64> {
        let mut all: Vec<f64> = (0..20_000)
            .map(|n| {
                wait(Duration::from_millis(10), Tail { sigma, seed }, n).as_secs_f64() * 1000.0
            })
            .collect();
        all.sort_by(f64::total_cmp);
        all
    }

    #[test]
    fn the_distribution_is_log_normal() {
        for seed in [1, 2, 99] {
            let all = waits_ms(1.0, seed);
            let at = |share: f64| all[(share * all.len() as f64) as usize];
            // exp(z) times the median, where z is that of the standard normal distribution at these
            // shares.
            for (share, factor) in [(0.05, 0.193), (0.5, 1.0), (0.95, 5.18), (0.99, 10.24)] {
                let expected = 10.0 * factor;
                assert!(
                    (at(share) / expected - 1.0).abs() < 0.1,
                    "seed {seed}, {share}: {} and not {expected} ms",
                    at(share)
                );
            }
        }
    }

    #[test]
    fn a_seed_repeats_and_seeds_differ() {
        assert_eq!(waits_ms(1.0, 7), waits_ms(1.0, 7));
        assert_ne!(waits_ms(1.0, 7), waits_ms(1.0, 8));
        assert!(waits_ms(0.0, 7).iter().all(|&ms| ms == 10.0));
    }

    #[test]
    fn no_wait_is_endless() {
        assert!((0..1000).all(|n| wait(
            Duration::from_secs(3600),
            Tail {
                sigma: 3.0,
                seed: 1
            },
            n
        ) <= WAIT_MAX));
    }
}
