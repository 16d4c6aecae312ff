//! How much energy a machine used: sampled every 100 ms, on one clock.
//!
//! - `powercap.rs`: CPU packages and DRAM (RAPL).
//! - `nvml.rs`: NVIDIA's GPUs, through the driver's library if it is there.
//! - `hwmon.rs`: boards, power supplies and other GPUs, as far as the kernel shows them.
//! - `ipmi.rs`: the board's own meter, where hwmon does not show it.
//! - `counter.rs`: from a counter that wraps, or from power, to joules.
//! - `monitor.rs`: reads them all at the same moments, and remembers the last minutes.
//! - `line_protocol.rs`: what InfluxDB reads.
//! - `moment.rs`: moments as seconds.
//!
//! Invariant: a figure is measured, or it is absent. What cannot be read, may have wrapped unseen
//! or went away is told by one line ([`Monitor::notes`]), never by a number. An estimate is made
//! only by a [`Model`] that somebody asked for, and says that it is one.

#![warn(missing_docs)]

mod counter;
mod hwmon;
mod ipmi;
mod line_protocol;
mod moment;
mod monitor;
mod nvml;
mod powercap;

pub use line_protocol::{comment, line_protocol};
pub use moment::{nanoseconds, seconds};
pub use monitor::{
    Config, Model, Monitor, Reading, Recent, Sample, Sensor, now, process_cpu_seconds,
};

#[doc(hidden)]
pub use counter::{Counted, Counter, Power};
