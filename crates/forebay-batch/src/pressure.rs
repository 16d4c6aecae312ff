//! Whether the node is short of CPU or disk, from the kernel's pressure figures (`/proc/pressure`), and how much to slow down.
//!
//! Memory is a hard limit (429 before work begins); CPU and disk are soft: a batch under way pauses a little before each outgoing
//! buffer, so that it makes room and still makes progress (paper, section 2.4.3).

use crate::BatchConfig;
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// The figures are averages over 10 s; reading them more often than this tells nothing new.
const SAMPLE_EVERY: Duration = Duration::from_millis(500);

pub(crate) struct Pressure {
    cpu_percent: u32,
    disk_percent: u32,
    pause: Duration,
    began: Instant,
    /// Milliseconds since `began` of the next sample, shifted left by one; the lowest bit says whether there is pressure.
    state: AtomicU64,
}

impl Pressure {
    pub(crate) fn new(config: &BatchConfig) -> Self {
        Self {
            cpu_percent: config.throttle_cpu_percent,
            disk_percent: config.throttle_disk_percent,
            pause: config.throttle_pause,
            began: Instant::now(),
            state: AtomicU64::new(0),
        }
    }

    /// How long to pause now: zero without pressure.
    pub(crate) fn pause(&self) -> Duration {
        let now = self.began.elapsed().as_millis() as u64;
        let state = self.state.load(Relaxed);
        let (next, mut under_pressure) = (state >> 1, state & 1 == 1);
        if now >= next {
            under_pressure = self.over("cpu", self.cpu_percent) || self.over("io", self.disk_percent);
            self.state.store(((now + SAMPLE_EVERY.as_millis() as u64) << 1) | u64::from(under_pressure), Relaxed);
        }
        if under_pressure { self.pause } else { Duration::ZERO }
    }

    fn over(&self, resource: &str, percent: u32) -> bool {
        percent > 0
            && std::fs::read_to_string(format!("/proc/pressure/{resource}"))
                .ok()
                .and_then(|text| some_avg10(&text))
                .is_some_and(|avg| avg >= f64::from(percent))
    }
}

/// `some avg10=1.23 avg60=…`: the share of the last ten seconds in which some task waited, percent.
fn some_avg10(text: &str) -> Option<f64> {
    text.lines().find_map(|l| l.strip_prefix("some avg10="))?.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_figures_are_read() {
        let text = "some avg10=91.50 avg60=3.00 avg300=0.10 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(some_avg10(text), Some(91.5));
        assert_eq!(some_avg10("nothing"), None);
        let never = Pressure::new(&BatchConfig { throttle_cpu_percent: 0, throttle_disk_percent: 0, ..BatchConfig::default() });
        assert_eq!(never.pause(), Duration::ZERO);
    }
}
