//! From what hardware counts to joules.

/// No domain takes more than this: an interval in which a counter could have gone around more than
/// once, even at this power, says nothing.
const WATTS_MAX: f64 = 5_000.0;

/// What a reading of a counter added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Counted {
    /// Joules since the last reading.
    Joules(f64),
    /// The counter may have gone around more than once, was set back, or is impossible: what was
    /// used since the last reading is unknown.
    Unknown,
}

/// A counter of energy that may wrap.
#[derive(Clone, Debug)]
pub struct Counter {
    /// Joules that one unit is.
    unit: f64,
    /// The value at which it goes around; `None`: it does not, and going back means that it was set
    /// back.
    range: Option<u64>,
    last: Option<(u64, u64)>,
}

impl Counter {
    /// A counter of `unit` joules that wraps after `range`.
    pub fn new(unit: f64, range: Option<u64>) -> Self {
        Self {
            unit,
            range: range.filter(|&range| range > 0),
            last: None,
        }
    }

    /// Takes a reading at a time in nanoseconds. The first one adds nothing.
    pub fn read(&mut self, at_ns: u64, raw: u64) -> Counted {
        if self.range.is_some_and(|range| raw > range) {
            self.last = None;
            return Counted::Unknown;
        }
        let Some((last_ns, last)) = self.last.replace((at_ns, raw)) else {
            return Counted::Joules(0.0);
        };
        let seconds = at_ns.saturating_sub(last_ns) as f64 / 1e9;
        let units = match self.range {
            Some(range) => {
                if seconds * WATTS_MAX >= range as f64 * self.unit {
                    return Counted::Unknown;
                }
                let units = match raw.checked_sub(last) {
                    Some(units) => units,
                    // It went around.
                    None => range - last + raw,
                };
                // Or it was set back, which looks like going around: nothing takes so much.
                if units as f64 * self.unit > WATTS_MAX * (seconds + 1.0) {
                    return Counted::Unknown;
                }
                units
            }
            None => match raw.checked_sub(last) {
                Some(units) => units,
                None => return Counted::Unknown,
            },
        };
        Counted::Joules(units as f64 * self.unit)
    }
}

/// Power, integrated between readings (trapezoids).
#[derive(Clone, Debug, Default)]
pub struct Power {
    last: Option<(u64, f64)>,
}

/// Readings further apart say too little about what was between them.
const POWER_GAP_MAX_NS: u64 = 5_000_000_000;

impl Power {
    /// Takes a reading in watts.
    pub fn read(&mut self, at_ns: u64, watts: f64) -> Counted {
        if !(0.0..=WATTS_MAX * 20.0).contains(&watts) {
            self.last = None;
            return Counted::Unknown;
        }
        let Some((last_ns, last)) = self.last.replace((at_ns, watts)) else {
            return Counted::Joules(0.0);
        };
        let gap = at_ns.saturating_sub(last_ns);
        if gap > POWER_GAP_MAX_NS {
            return Counted::Unknown;
        }
        Counted::Joules((last + watts) / 2.0 * gap as f64 / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_counter_that_is_set_back_adds_nothing() {
        let mut counter = Counter::new(1e-6, Some(262_143_328_850));
        assert_eq!(counter.read(0, 5_000_000_000), Counted::Joules(0.0));
        assert_eq!(counter.read(SECOND / 4, 1_000), Counted::Unknown);
        assert_eq!(counter.read(SECOND / 2, 2_001_000), Counted::Joules(2.0));
        // It did go around.
        let mut counter = Counter::new(1e-6, Some(262_143_328_850));
        counter.read(0, 262_143_328_850 - 1_000_000);
        assert_eq!(counter.read(SECOND, 2_000_000), Counted::Joules(3.0));
    }

    proptest! {
        /// Whatever is used between readings, and however often the counter goes around in total,
        /// the sum is what was used, as long as it goes around at most once between two readings.
        #[test]
        fn a_counter_that_wraps_adds_up(
            range in 1_000_000_000u64..300_000_000_000,
            start in 0u64..1_000_000_000,
            used in prop::collection::vec(0u64..900_000_000, 1..60),
        ) {
            let mut counter = Counter::new(1e-6, Some(range));
            let (mut raw, mut sum, mut expected) = (start % range, 0.0, 0u64);
            prop_assert_eq!(counter.read(0, raw), Counted::Joules(0.0));
            for (i, used) in used.into_iter().enumerate() {
                raw += used;
                if raw > range {
                    raw -= range;
                }
                expected += used;
                match counter.read((i as u64 + 1) * SECOND / 10, raw) {
                    Counted::Joules(j) => sum += j,
                    Counted::Unknown => prop_assert!(false, "a reading in time is known"),
                }
            }
            prop_assert!((sum - expected as f64 / 1e6).abs() < 1e-3, "{sum} {expected}");
        }

        #[test]
        fn a_counter_never_gives_a_negative_number(
            range in prop::option::of(1u64..u64::MAX),
            raws in prop::collection::vec((any::<u64>(), any::<u64>()), 0..50),
        ) {
            let mut counter = Counter::new(1e-6, range);
            for (at, raw) in raws {
                if let Counted::Joules(j) = counter.read(at, raw) {
                    prop_assert!(j >= 0.0 && j.is_finite());
                }
            }
        }
    }

    #[test]
    fn what_may_have_wrapped_twice_is_unknown() {
        // 262 kJ, as on servers: at 5 kW it goes around within 53 s.
        let range = 262_143_328_850;
        let mut counter = Counter::new(1e-6, Some(range));
        counter.read(0, 5);
        assert_eq!(counter.read(100 * SECOND, 6), Counted::Unknown);
        // From there it counts again.
        assert_eq!(counter.read(101 * SECOND, 1_000_006), Counted::Joules(1.0));
        assert_eq!(counter.read(102 * SECOND, range + 1), Counted::Unknown);
        assert_eq!(counter.read(103 * SECOND, 10), Counted::Joules(0.0));
    }

    #[test]
    fn a_counter_without_a_range_that_goes_back_was_set_back() {
        let mut counter = Counter::new(1e-3, None);
        counter.read(0, 1000);
        assert_eq!(counter.read(SECOND, 3000), Counted::Joules(2.0));
        assert_eq!(counter.read(2 * SECOND, 10), Counted::Unknown);
        assert_eq!(counter.read(3 * SECOND, 1010), Counted::Joules(1.0));
    }

    #[test]
    fn power_is_integrated_and_gaps_are_not_guessed() {
        let mut power = Power::default();
        assert_eq!(power.read(0, 100.0), Counted::Joules(0.0));
        assert_eq!(power.read(SECOND, 200.0), Counted::Joules(150.0));
        assert_eq!(power.read(60 * SECOND, 200.0), Counted::Unknown);
        assert_eq!(power.read(61 * SECOND, 200.0), Counted::Joules(200.0));
        assert_eq!(power.read(62 * SECOND, f64::NAN), Counted::Unknown);
    }
}
