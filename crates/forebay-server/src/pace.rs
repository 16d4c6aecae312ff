//! How slow the other side of a connection may be.
//!
//! A timeout alone does not bound how long a client holds its place: one that moves a byte now and then is never silent for long. So the time that is
//! spent waiting for the client is added up, and each time that it comes to the timeout, the bytes that moved meanwhile must have been worth it. Time in
//! which this node was the slow one (an origin, a disk) is not counted.

use std::time::Duration;
use tokio::time::Instant;

pub struct Pace {
    timeout: Duration,
    min_bytes: u64,
    /// Waited for the client since the last account.
    waited: Duration,
    moved: u64,
    since: Option<Instant>,
}

impl Pace {
    /// For at least `bytes_per_second` over each `timeout` of waiting; 0: whatever the client likes.
    pub fn new(timeout: Duration, bytes_per_second: u64) -> Self {
        let min_bytes = (timeout.as_secs_f64() * bytes_per_second as f64) as u64;
        Pace { timeout, min_bytes, waited: Duration::ZERO, moved: 0, since: None }
    }

    /// The client is waited for. Returns since when.
    pub fn wait(&mut self) -> Instant {
        *self.since.get_or_insert_with(Instant::now)
    }

    /// `bytes` moved. Whether that is fast enough.
    pub fn moved(&mut self, bytes: u64) -> bool {
        self.moved = self.moved.saturating_add(bytes);
        let Some(since) = self.since.take() else { return true };
        self.waited += since.elapsed();
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

    #[tokio::test(start_paused = true)]
    async fn a_dripping_client_is_too_slow_and_one_that_comes_in_bursts_is_not() {
        let drip = |bytes: u64, seconds: u64| async move {
            let mut pace = Pace::new(Duration::from_secs(60), 1000);
            for n in 0..100 {
                pace.wait();
                tokio::time::sleep(Duration::from_secs(seconds)).await;
                if !pace.moved(bytes) {
                    return Some(n * seconds);
                }
            }
            None
        };
        assert_eq!(drip(1, 1).await, Some(59));
        assert_eq!(drip(999, 1).await, Some(59));
        assert_eq!(drip(1000, 1).await, None);
        assert_eq!(drip(60_000, 59).await, None, "nothing for a minute, then all at once");
    }

    #[tokio::test(start_paused = true)]
    async fn time_that_this_node_takes_is_not_the_clients() {
        let mut pace = Pace::new(Duration::from_secs(60), 1000);
        for _ in 0..100 {
            pace.wait();
            assert!(pace.moved(1));
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        let mut any = Pace::new(Duration::from_secs(1), 0);
        any.wait();
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(any.moved(0));
    }
}
