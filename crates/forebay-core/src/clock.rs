//! Time as a dependency, so that freshness can be tested without waiting.

use crate::sync::Mutex;
use std::{
    sync::{
        Arc, LazyLock,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Wall-clock time, and time that nobody sets. (Timeouts and rates use the runtime's own monotonic
/// clock.)
pub trait Clock: Send + Sync + 'static {
    /// Since the Unix epoch.
    fn now(&self) -> Duration;

    /// Since some moment of this process. It tells how long ago something was, although the clock
    /// was set meanwhile.
    fn steady(&self) -> Duration;

    /// [`Clock::steady`] in milliseconds.
    fn steady_ms(&self) -> i64 {
        self.steady().as_millis() as i64
    }

    /// Milliseconds since the Unix epoch.
    fn now_ms(&self) -> i64 {
        self.now().as_millis() as i64
    }

    /// Whole seconds since the Unix epoch.
    fn now_secs(&self) -> u32 {
        self.now().as_secs() as u32
    }
}

/// Seconds since the Unix epoch that never go back: the wall clock's, and where that was set back, what
/// they would be if it had not been. So the age of what was noted in this process is never less than
/// the time that has passed.
#[derive(Debug)]
pub struct Onward {
    /// The most that the wall clock was ever ahead of the steady one, in microseconds.
    ahead_us: AtomicI64,
}

impl Default for Onward {
    fn default() -> Self {
        Self {
            ahead_us: AtomicI64::new(i64::MIN),
        }
    }
}

impl Onward {
    /// The time by `clock`, which is the same one each time.
    pub fn now_secs(&self, clock: &dyn Clock) -> u32 {
        // In this order: if the thread has to wait in between, it does not seem to be later.
        let wall_us = clock.now().as_micros() as i64;
        let steady_us = clock.steady().as_micros() as i64;
        let ahead_us = wall_us - steady_us;
        let mut most_us = self.ahead_us.load(Relaxed);
        if ahead_us > most_us {
            most_us = self.ahead_us.fetch_max(ahead_us, Relaxed).max(ahead_us);
        }
        ((steady_us + most_us) / 1_000_000) as u32
    }
}

/// The machine's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
    }

    fn steady(&self) -> Duration {
        static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
        BEGAN.elapsed()
    }
}

/// A clock that tests move by hand, backwards too.
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<Mutex<Times>>);

#[derive(Clone, Copy, Debug)]
struct Times {
    now: Duration,
    steady: Duration,
}

impl ManualClock {
    /// A clock that stands at this time.
    pub fn at(since_epoch: Duration) -> Self {
        Self(Arc::new(Mutex::new(Times {
            now: since_epoch,
            steady: Duration::ZERO,
        })))
    }

    /// Sets it to another time: none passes.
    pub fn set(&self, since_epoch: Duration) {
        self.0.lock().now = since_epoch;
    }

    /// Lets time pass.
    pub fn advance(&self, by: Duration) {
        let mut times = self.0.lock();
        times.now += by;
        times.steady += by;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        self.0.lock().now
    }

    fn steady(&self) -> Duration {
        self.0.lock().steady
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on_whatever_the_clock_is_set_to() {
        let clock = ManualClock::at(Duration::from_secs(1000));
        let onward = Onward::default();
        let now = || onward.now_secs(&clock);
        assert_eq!(now(), 1000);
        clock.advance(Duration::from_millis(1999));
        assert_eq!(now(), 1001);
        clock.set(Duration::from_secs(900));
        assert_eq!(now(), 1001, "no time has passed");
        clock.advance(Duration::from_secs(30));
        assert_eq!(now(), 1031);
        clock.set(Duration::from_secs(5000));
        assert_eq!(now(), 5000, "ahead");
        clock.set(Duration::from_secs(1031));
        clock.advance(Duration::from_secs(5));
        assert_eq!(now(), 5005);
    }
}
