//! How slow the other side of a connection may be.
//!
//! A timeout alone does not bound how long a client holds its place: one that moves a byte now and
//! then is never silent for long. So the time spent waiting for the client is added up. Each time
//! the sum reaches the timeout, enough bytes must have moved meanwhile. Time in which this node was
//! the slow side (an origin, a disk) does not count.

use std::time::Duration;
use tokio::time::Instant;

pub struct Pace {
    timeout: Duration,
    min_bytes: u64,
    /// Time spent waiting for the client since the last check.
    waited: Duration,
    moved: u64,
    since: Option<Instant>,
}

impl Pace {
    /// Requires at least `bytes_per_second` over each `timeout` of waiting; 0: any pace will do.
    pub fn new(timeout: Duration, bytes_per_second: u64) -> Self {
        let min_bytes = (timeout.as_secs_f64() * bytes_per_second as f64) as u64;
        Pace {
            timeout,
            min_bytes,
            waited: Duration::ZERO,
            moved: 0,
            since: None,
        }
    }

    /// The node waits for the client from `now` on.
    pub fn wait(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// `bytes` moved. Returns whether that is fast enough.
    pub fn moved(&mut self, now: Instant, bytes: u64) -> bool {
        self.moved = self.moved.saturating_add(bytes);
        let Some(since) = self.since.take() else {
            return true;
        };
        self.waited += now.saturating_duration_since(since);
        if self.waited < self.timeout {
            return true;
        }
        let enough = self.moved >= self.min_bytes;
        (self.waited, self.moved) = (Duration::ZERO, 0);
        enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When a client becomes too slow that moves `bytes` after each `waited` and lets this node
    /// work for `worked` in between.
    fn too_slow_after(
        bytes: u64,
        waited: Duration,
        worked: Duration,
        bytes_per_second: u64,
    ) -> Option<Duration> {
        let mut pace = Pace::new(Duration::from_secs(60), bytes_per_second);
        let began = Instant::now();
        let mut now = began;
        for _ in 0..1000 {
            pace.wait(now);
            now += waited;
            if !pace.moved(now, bytes) {
                return Some(now - began);
            }
            now += worked;
        }
        None
    }

    #[test]
    fn a_dripping_client_is_too_slow_and_one_that_comes_in_bursts_is_not() {
        let (second, none, minute) = (
            Duration::from_secs(1),
            Duration::ZERO,
            Duration::from_secs(60),
        );
        assert_eq!(too_slow_after(1, second, none, 1000), Some(minute));
        assert_eq!(too_slow_after(999, second, none, 1000), Some(minute));
        assert_eq!(too_slow_after(1000, second, none, 1000), None);
        assert_eq!(
            too_slow_after(60_000, minute - second, none, 1000),
            None,
            "nothing for a minute, then all at once"
        );
        assert_eq!(
            too_slow_after(1, second, none, 0),
            None,
            "no rate is asked for"
        );
    }

    #[test]
    fn time_that_this_node_takes_is_not_the_clients() {
        let (none, minute) = (Duration::ZERO, Duration::from_secs(60));
        assert_eq!(too_slow_after(1, none, minute, 1000), None);
        assert_eq!(
            too_slow_after(1, minute / 10, minute, 1000),
            Some(minute * 10)
        );
    }
}
