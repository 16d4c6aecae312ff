//! Whether the node is short of CPU or disk, according to the kernel, and how much to slow down.
//!
//! Memory is a hard limit (429 before work begins); CPU and disk are soft: a running batch pauses
//! for a share of the time that it works, so that it makes room but still makes progress (paper,
//! section 2.4.3).
//!
//! A node runs alongside training jobs, whose workers keep every core busy. There, some thread
//! always waits for a core, which the kernel's `some` pressure for CPU would report all the time. A
//! batch need not slow down for that. Pressure means that many threads queue for each core.

use crate::BatchConfig;
use forebay_core::sync::Mutex;
use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// How often the kernel's figures are read.
const SAMPLE_EVERY: Duration = Duration::from_millis(500);
/// The share of a new sample in the average of the run queue: a burst of a second is not pressure.
const SAMPLE_WEIGHT: f64 = 0.1;
/// Timers have a resolution of a millisecond: shorter pauses are added up.
const PAUSE_MIN: Duration = Duration::from_millis(1);
/// However long a buffer took.
const PAUSE_MAX: Duration = Duration::from_millis(50);

pub(crate) struct Pressure {
    ready_per_core: u32,
    disk_percent: u32,
    share: f64,
    cores: f64,
    began: Instant,
    /// Milliseconds since `began` of the next sample.
    next_sample_ms: AtomicU64,
    under_pressure: AtomicBool,
    ready: Mutex<f64>,
}

impl Pressure {
    pub(crate) fn new(config: &BatchConfig) -> Self {
        Self {
            ready_per_core: config.throttle_ready_per_core,
            disk_percent: config.throttle_disk_percent,
            share: f64::from(config.throttle_percent.min(90)) / 100.0,
            cores: std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64),
            began: Instant::now(),
            next_sample_ms: AtomicU64::new(0),
            under_pressure: AtomicBool::new(false),
            ready: Mutex::new(0.0),
        }
    }

    /// The pause that this much work calls for: zero without pressure.
    pub(crate) fn pause(&self, worked: Duration) -> Duration {
        let now = self.began.elapsed().as_millis() as u64;
        let next = self.next_sample_ms.load(Relaxed);
        let after = now + SAMPLE_EVERY.as_millis() as u64;
        if now >= next
            && self
                .next_sample_ms
                .compare_exchange(next, after, Relaxed, Relaxed)
                .is_ok()
        {
            self.under_pressure.store(self.sample(), Relaxed);
        }
        if self.under_pressure.load(Relaxed) {
            worked.mul_f64(self.share / (1.0 - self.share))
        } else {
            Duration::ZERO
        }
    }

    fn sample(&self) -> bool {
        let read = |path: &str| std::fs::read_to_string(path).ok();
        let ready = self.ready_per_core > 0 && {
            let now = read("/proc/loadavg")
                .and_then(|text| ready_threads(&text))
                .unwrap_or(0.0);
            let mut average = self.ready.lock();
            *average += SAMPLE_WEIGHT * (now / self.cores - *average);
            *average >= f64::from(self.ready_per_core)
        };
        let disk = self.disk_percent > 0
            && read("/proc/pressure/io")
                .and_then(|text| full_avg10(&text))
                .is_some_and(|avg| avg >= f64::from(self.disk_percent));
        ready || disk
    }
}

/// The pauses that one batch owes.
#[derive(Default)]
pub(crate) struct Owed(Duration);

impl Owed {
    /// Adds to what is owed, and returns how long to sleep now.
    pub(crate) fn due(&mut self, pause: Duration) -> Duration {
        self.0 = (self.0 + pause).min(PAUSE_MAX);
        if self.0 < PAUSE_MIN {
            Duration::ZERO
        } else {
            std::mem::take(&mut self.0)
        }
    }
}

/// `0.10 0.20 0.30 5/321 4711`: five threads are running or ready to run, including this one.
fn ready_threads(text: &str) -> Option<f64> {
    text.split(' ').nth(3)?.split('/').next()?.parse().ok()
}

/// `full avg10=1.23 avg60=…`: the percentage of the last ten seconds in which all tasks with work
/// to do were waiting.
fn full_avg10(text: &str) -> Option<f64> {
    text.lines()
        .find_map(|l| l.strip_prefix("full avg10="))?
        .split(' ')
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_figures_are_read() {
        let text = "some avg10=91.50 avg60=3.00 avg300=0.10 total=1\nfull avg10=12.25 avg60=0.00 \
            avg300=0.00 total=0\n";
        assert_eq!(full_avg10(text), Some(12.25));
        assert_eq!(full_avg10("nothing"), None);
        assert_eq!(ready_threads("0.10 0.20 0.30 5/321 4711\n"), Some(5.0));
        assert_eq!(ready_threads(""), None);
        // The figures of this machine.
        assert!(ready_threads(&std::fs::read_to_string("/proc/loadavg").unwrap()).unwrap() >= 1.0);
    }

    #[test]
    fn a_pause_is_a_share_of_the_work_under_pressure_and_nothing_without() {
        let second = Duration::from_secs(1);
        let p = Pressure::new(&BatchConfig {
            throttle_percent: 20,
            throttle_ready_per_core: 0,
            throttle_disk_percent: 0,
            ..BatchConfig::default()
        });
        assert_eq!(p.pause(second), Duration::ZERO);
        p.under_pressure.store(true, Relaxed);
        // One part of pause to four parts of work: a fifth of the time.
        assert_eq!(p.pause(second).as_millis(), 250);
    }

    #[test]
    fn short_pauses_are_added_up_and_long_ones_bounded() {
        let mut owed = Owed::default();
        let slept: Vec<u128> = (0..5)
            .map(|_| owed.due(Duration::from_micros(400)).as_micros())
            .collect();
        assert_eq!(slept, [0, 0, 1200, 0, 0]);
        assert_eq!(owed.due(Duration::from_secs(9)), PAUSE_MAX);
    }
}
