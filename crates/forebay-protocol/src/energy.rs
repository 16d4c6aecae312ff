//! The energy that a node's machine used, sample by sample.

use serde::{Deserialize, Serialize};

/// `GET`: what the sensors of the node's machine measured of late: [`Samples`].
pub const ENERGY_PATH: &str = "/v1/forebay/energy";
/// The parameter for the samples after a moment of [`Samples::now_ns`]'s clock.
pub const AFTER_PARAMETER: &str = "after_ns";
/// In its place, the parameter for those of the last seconds.
pub const SECONDS_PARAMETER: &str = "seconds";

/// One of a machine's sensors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sensor {
    /// `rapl`, `nvml`, `hwmon`, `ipmi`, or a model.
    pub source: String,
    /// `package-0`, …
    pub domain: String,
    /// Whether a model makes its figures.
    pub estimate: bool,
}

/// What all sensors have measured since the node began, at some moments.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Samples {
    /// Which node, at this start of it: the next one counts anew.
    pub node: String,
    /// Of so many nodes of a cluster it is one; 1 if it is alone.
    pub nodes: u64,
    /// What time it is, by the clock of the samples: nanoseconds.
    pub now_ns: u64,
    /// The sensors. New ones come last.
    pub sensors: Vec<Sensor>,
    /// The moment of each sample, and joules by sensor; `None`: the sensor is not there (any more,
    /// or yet). Samples may have fewer sensors than there are now. The oldest comes first.
    pub samples: Vec<(u64, Vec<Option<f64>>)>,
    /// Whether there are later ones, which did not fit in.
    pub more: bool,
    /// What is not measured, and why.
    pub absent: Vec<String>,
}
