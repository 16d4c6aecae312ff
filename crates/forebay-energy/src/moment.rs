//! Moments as seconds: Python's `time.monotonic()`.

/// A moment in nanoseconds, cut off; none is before 0.
pub fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9).max(0.0) as u64
}

/// The first moment in seconds, from the nearest one on, that is not before this one for
/// [`nanoseconds`]: what is after it does not begin with what happened at this moment.
pub fn seconds(at_ns: u64) -> f64 {
    let mut told = at_ns as f64 / 1e9;
    // A step or two.
    while nanoseconds(told) < at_ns {
        told = told.next_up();
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_in_seconds_is_not_before_itself() {
        // Of these, the nearest one is before them.
        for at in [
            2_103_496_736,
            134_233_530_439_276,
            4_410_915_751_058_185,
            u64::MAX,
        ] {
            assert!(nanoseconds(at as f64 / 1e9) < at || at == u64::MAX);
            assert!(nanoseconds(seconds(at)) >= at);
        }
        let mut at = 1;
        while at < 1 << 52 {
            let told = nanoseconds(seconds(at));
            assert!((at..=at + 1000).contains(&told), "{at}: {told}");
            at += at / 1000 + 1;
        }
        assert_eq!((seconds(0), nanoseconds(-1.0)), (0.0, 0));
    }
}
