//! How many connections a stream uses if nobody said.
//!
//! It begins with two and doubles them while that makes it faster. One connection's rate is limited
//! by its buffers divided by the round trip, so more connections help at a distance, but not close
//! to the node. None are added while the reader does not have to wait: there is nothing to gain.

use forebay_core::limits::STREAM_CONNECTIONS_AUTO_MAX;
use std::time::{Duration, Instant};

/// How much faster a stream must become with more connections for still more to be tried.
const WORTHWHILE: f64 = 1.15;
/// If the reader waits less than this share of the time, the stream is fast enough.
const WAITING_SHARE: f64 = 0.05;
/// The share of the time that connections may stand still because the reader is behind.
const PAUSED_SHARE: f64 = 0.2;
/// New connections need some round trips to reach their rate.
const WARM_UP_ROUND_TRIPS: u32 = 8;
const MEASURE_ROUND_TRIPS: u32 = 6;
const WARM_UP_MIN: Duration = Duration::from_millis(100);
const MEASURE_MIN: Duration = Duration::from_millis(200);
const ROUND_TRIP_MAX: Duration = Duration::from_millis(500);

/// What the stream has counted so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    pub bytes: u64,
    pub waited: Duration,
    pub paused: Duration,
}

pub struct Grower {
    connections: u32,
    since: Instant,
    began: Option<(Instant, Sample)>,
    last_rate: Option<f64>,
    pub settled: bool,
}

impl Grower {
    pub fn new(connections: u32, now: Instant) -> Self {
        Grower {
            connections,
            since: now,
            began: None,
            last_rate: None,
            settled: connections >= STREAM_CONNECTIONS_AUTO_MAX,
        }
    }

    /// The number of connections to go on with, if it changes, and the rate (bytes per second) at
    /// which they run now.
    pub fn look(
        &mut self,
        now: Instant,
        round_trip: Duration,
        sample: Sample,
    ) -> Option<(u32, f64)> {
        let round_trip = round_trip.min(ROUND_TRIP_MAX);
        if self.settled
            || now.duration_since(self.since) < (round_trip * WARM_UP_ROUND_TRIPS).max(WARM_UP_MIN)
        {
            return None;
        }
        let (from, first) = *self.began.get_or_insert((now, sample));
        let took = now.duration_since(from);
        if took < (round_trip * MEASURE_ROUND_TRIPS).max(MEASURE_MIN) {
            return None;
        }
        self.began = None;
        let share = |now: Duration, then: Duration| {
            now.saturating_sub(then).as_secs_f64() / took.as_secs_f64()
        };
        let rate = (sample.bytes - first.bytes) as f64 / took.as_secs_f64();
        let waiting = share(sample.waited, first.waited) >= WAITING_SHARE;
        let flowing =
            share(sample.paused, first.paused) / f64::from(self.connections) < PAUSED_SHARE;
        if !waiting || !flowing || rate == 0.0 {
            return None;
        }
        if self.last_rate.is_some_and(|last| rate < last * WORTHWHILE) {
            self.settled = true;
            return None;
        }
        self.last_rate = Some(rate);
        self.connections = (self.connections * 2).min(STREAM_CONNECTIONS_AUTO_MAX);
        self.since = now;
        self.settled = self.connections == STREAM_CONNECTIONS_AUTO_MAX;
        Some((self.connections, rate))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a stream whose connections bring `each` bytes per second, at most `most` in total, to a
    /// reader that takes at most `wanted`.
    fn connections(each: f64, most: f64, wanted: f64, round_trip: Duration) -> u32 {
        let start = Instant::now();
        let (mut k, mut sample, mut grower) = (2, Sample::default(), Grower::new(2, start));
        let tick = Duration::from_millis(50);
        for i in 0..1000u32 {
            let offered = (each * f64::from(k)).min(most);
            let rate = offered.min(wanted);
            sample.bytes += (rate * tick.as_secs_f64()) as u64;
            if offered < wanted {
                sample.waited += tick.mul_f64(1.0 - offered / wanted);
            } else {
                sample.paused += tick * k;
            }
            if let Some((more, _)) = grower.look(start + tick * i, round_trip, sample) {
                k = more;
            }
        }
        k
    }

    #[test]
    fn more_connections_are_taken_as_long_as_they_help() {
        let far = Duration::from_millis(100);
        assert_eq!(connections(40e6, 1e12, 1e12, far), 16, "each brings more");
        assert_eq!(
            connections(1e9, 1e9, 1e12, Duration::ZERO),
            4,
            "one is as fast as all: tried once"
        );
        assert_eq!(
            connections(40e6, 150e6, 1e12, far),
            8,
            "four reach the line's rate, eight do not help"
        );
        assert_eq!(
            connections(40e6, 1e12, 50e6, far),
            2,
            "the reader wants no more"
        );
    }
}
