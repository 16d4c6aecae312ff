//! Time as a dependency, so that freshness can be tested without waiting.

use crate::sync::Mutex;
use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Wall-clock time. (Timeouts and rates use the runtime's own monotonic clock.)
pub trait Clock: Send + Sync + 'static {
    /// Since the Unix epoch.
    fn now(&self) -> Duration;

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
}

/// A clock that tests move by hand, backwards too.
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<Mutex<Duration>>);

impl ManualClock {
    /// A clock that stands at this time.
    pub fn at(since_epoch: Duration) -> Self {
        Self(Arc::new(Mutex::new(since_epoch)))
    }

    /// Moves it to another time.
    pub fn set(&self, since_epoch: Duration) {
        *self.0.lock() = since_epoch;
    }

    /// Moves it forward.
    pub fn advance(&self, by: Duration) {
        *self.0.lock() += by;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        *self.0.lock()
    }
}
