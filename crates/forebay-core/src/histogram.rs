//! How long things took, counted by upper bound: cheap enough for each read of a disk.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// Upper bounds in nanoseconds: 10 µs to 100 s, four steps to the factor of ten.
pub const BOUNDS_NS: [u64; 29] = {
    let mut bounds = [0; 29];
    let (mut i, mut decade) = (0, 10_000);
    while i < bounds.len() {
        bounds[i] = decade * [10, 18, 32, 56][i % 4] / 10;
        i += 1;
        if i % 4 == 0 {
            decade *= 10;
        }
    }
    bounds
};

/// Live counts; the last is for what took longer than every bound.
#[derive(Debug, Default)]
pub struct Histogram {
    counts: [AtomicU64; BOUNDS_NS.len() + 1],
    sum_ns: AtomicU64,
}

/// Its values at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HistogramSnapshot {
    /// One count for each bound (not cumulative), then one for what took longer than all.
    pub counts: [u64; BOUNDS_NS.len() + 1],
    /// Their total time.
    pub sum_seconds: f64,
}

impl Histogram {
    /// Counts one.
    pub fn observe(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let at = BOUNDS_NS.partition_point(|bound| *bound < ns);
        self.counts[at].fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(ns, Relaxed);
    }

    /// The counts now.
    pub fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            counts: std::array::from_fn(|i| self.counts[i].load(Relaxed)),
            sum_seconds: self.sum_ns.load(Relaxed) as f64 / 1e9,
        }
    }
}

impl HistogramSnapshot {
    /// How many there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_took_as_long_as_a_bound_is_within_it() {
        assert_eq!(BOUNDS_NS[..5], [10_000, 18_000, 32_000, 56_000, 100_000]);
        assert_eq!(BOUNDS_NS.last(), Some(&100_000_000_000));
        assert!(BOUNDS_NS.is_sorted());
        let histogram = Histogram::default();
        for ns in [0, 10_000, 10_001, 100_000_000_000, 100_000_000_001] {
            histogram.observe(Duration::from_nanos(ns));
        }
        let snapshot = histogram.snapshot();
        assert_eq!((snapshot.counts[0], snapshot.counts[1]), (2, 1));
        assert_eq!((snapshot.counts[28], snapshot.counts[29]), (1, 1));
        assert_eq!(snapshot.count(), 5);
        assert!((snapshot.sum_seconds - 200.000_020_002).abs() < 1e-6);
    }
}
