//! Latencies in buckets of equal ratio, as HdrHistogram keeps them: a fixed few kilobytes, one
//! addition for each value, percentiles with an error of at most 1 %.
//!
//! A value below 128 has a bucket of its own. Above, each power of two is cut into 64 buckets of
//! equal width, so a bucket is at most 1/64 of its values wide; its middle, which is what a
//! percentile answers with, is off by at most 1/128 of them.

/// log2 of the buckets in each power of two.
const SUB_BITS: u32 = 6;
const SUB: u64 = 1 << SUB_BITS;
/// Values are counted up to 2^47 ns, a day and a half; longer ones count as that.
const MAX_BITS: u32 = 47;
const BUCKETS: usize = ((MAX_BITS - SUB_BITS + 1) as u64 * SUB) as usize;

/// Counts of values (usually nanoseconds).
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Box<[u64]>,
    total: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            counts: vec![0; BUCKETS].into(),
            total: 0,
            max: 0,
        }
    }
}

impl Histogram {
    pub fn record(&mut self, value: u64) {
        self.counts[bucket(value)] += 1;
        self.total += 1;
        self.max = self.max.max(value);
    }

    /// Adds the counts of another one.
    pub fn merge(&mut self, other: &Histogram) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
        self.max = self.max.max(other.max);
    }

    /// The value that this share (0 to 1) of all values does not exceed; `None` if there are none.
    pub fn quantile(&self, share: f64) -> Option<u64> {
        if self.total == 0 {
            return None;
        }
        let rank = ((share * self.total as f64).ceil() as u64).clamp(1, self.total);
        let mut seen = 0;
        for (i, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Some(middle(i).min(self.max));
            }
        }
        Some(self.max)
    }
}

fn bucket(value: u64) -> usize {
    let value = value.min((1 << MAX_BITS) - 1);
    // Two rows of SUB buckets of width 1, then rows of width 2, 4, …
    let row = (u64::BITS - value.leading_zeros()).saturating_sub(SUB_BITS + 1);
    ((u64::from(row) << SUB_BITS) + (value >> row)) as usize
}

/// The middle of a bucket's values.
fn middle(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let row = (bucket >> SUB_BITS).saturating_sub(1);
    let low = (bucket - (row << SUB_BITS)) << row;
    low + ((1 << row) - 1) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_answered_within_one_percent() {
        let mut value = 1u64;
        while value < 1 << MAX_BITS {
            for v in [value, value + value / 3, value + value / 2 + 1] {
                let mut h = Histogram::default();
                h.record(v);
                h.record(1 << 62);
                let got = h.quantile(0.5).unwrap();
                assert!(
                    got.abs_diff(v) as f64 <= v as f64 * 0.01,
                    "{v} came back as {got}"
                );
            }
            value *= 2;
        }
        assert_eq!(
            (bucket(0), bucket(127), bucket(128), bucket(129)),
            (0, 127, 128, 128)
        );
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_are_those_of_the_sorted_values() {
        let mut h = Histogram::default();
        let mut other = Histogram::default();
        assert_eq!(h.quantile(0.5), None);
        let mut values: Vec<u64> = (0..10_000u64)
            .map(|i| (i * 7919 % 10_007).pow(2) + 1000)
            .collect();
        for (i, v) in values.iter().enumerate() {
            if i % 2 == 0 {
                h.record(*v)
            } else {
                other.record(*v)
            }
        }
        h.merge(&other);
        values.sort_unstable();
        for share in [0.01, 0.5, 0.95, 0.99, 1.0] {
            let want = values[((share * values.len() as f64).ceil() as usize).max(1) - 1];
            let got = h.quantile(share).unwrap();
            assert!(
                got.abs_diff(want) as f64 <= want as f64 * 0.01,
                "{share}: {got}, not {want}"
            );
        }
        assert_eq!(h.total, 10_000);
    }
}
