//! Time as a dependency, so that freshness can be tested without waiting.

use crate::sync::Mutex;
use std::{
    sync::{Arc, LazyLock},
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
