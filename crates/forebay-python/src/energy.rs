//! `EnergyMonitor`: the sensors of this machine, as `forebay.energy` uses them.

use crate::{failure::Failure, process, sync::Mutex};
use forebay_energy::{Config, Model, Monitor, Reading, line_protocol, nanoseconds, seconds};
use pyo3::prelude::*;
use std::{mem::ManuallyDrop, path::PathBuf, time::Duration};

/// `(source, domain, joules, estimate)`.
type Figure = (String, String, f64, bool);

fn figures(readings: Vec<Reading>) -> Vec<Figure> {
    let one = |r: Reading| {
        (
            r.sensor.source,
            r.sensor.domain,
            r.joules,
            r.sensor.estimate,
        )
    };
    readings.into_iter().map(one).collect()
}

/// Samples the energy of this machine until it is closed. Moments are seconds of
/// ``time.monotonic()``.
///
/// It belongs to the process that made it: in a forked child its thread does not exist, and what
/// that held when the process forked stays held. There nothing touches it.
#[pyclass(frozen, module = "forebay._forebay")]
pub struct EnergyMonitor {
    pid: u32,
    monitor: ManuallyDrop<Mutex<Option<Monitor>>>,
}

impl Drop for EnergyMonitor {
    fn drop(&mut self) {
        if self.pid == process::pid() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.monitor) };
        }
    }
}

impl EnergyMonitor {
    fn with<T: Send>(&self, py: Python<'_>, f: impl Fn(&Monitor) -> T + Send) -> PyResult<T> {
        if self.pid != process::pid() {
            return Err(Failure::invalid(
                "this monitor of energy was started before the process forked",
            )
            .hint("start one in the process that asks it")
            .into());
        }
        py.detach(|| self.monitor.lock().as_ref().map(f))
            .ok_or_else(|| Failure::invalid("the monitor of energy is closed").into())
    }
}

#[pymethods]
impl EnergyMonitor {
    #[new]
    #[pyo3(signature = (sysfs="/sys".into(), nvml="libnvidia-ml.so.1".into(), interval=0.1, model=None))]
    fn new(
        py: Python<'_>,
        sysfs: PathBuf,
        nvml: PathBuf,
        interval: f64,
        model: Option<&str>,
    ) -> PyResult<Self> {
        if !(0.01..=3600.0).contains(&interval) {
            return Err(Failure::invalid(format!(
                "interval is {interval}; give 0.01 to 3600 seconds"
            ))
            .into());
        }
        let model = model.map(Model::parse).transpose();
        let config = Config {
            sysfs,
            nvml,
            interval: Duration::from_secs_f64(interval),
            model: model.map_err(Failure::invalid)?,
            ..Config::default()
        };
        let monitor = py.detach(|| Monitor::start(&config));
        Ok(Self {
            pid: process::pid(),
            monitor: ManuallyDrop::new(Mutex::new(Some(monitor))),
        })
    }

    /// ``(source, domain, estimate)`` of each sensor.
    fn sensors(&self, py: Python<'_>) -> PyResult<Vec<(String, String, bool)>> {
        let sensors = self.with(py, Monitor::sensors)?.into_iter();
        Ok(sensors.map(|s| (s.source, s.domain, s.estimate)).collect())
    }

    /// What cannot be read, and why.
    fn notes(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, Monitor::notes)
    }

    /// Whether sensors are there that could not be read from the beginning.
    fn passes_over(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, Monitor::passes_over)
    }

    /// ``(source, domain, joules, estimate)`` since it began, read now.
    fn totals(&self, py: Python<'_>) -> PyResult<Vec<Figure>> {
        self.with(py, Monitor::totals).map(figures)
    }

    /// The same by the last sample.
    fn last(&self, py: Python<'_>) -> PyResult<Vec<Figure>> {
        self.with(py, Monitor::last).map(figures)
    }

    /// The same between two moments.
    fn between(&self, py: Python<'_>, began: f64, ended: f64) -> PyResult<Vec<Figure>> {
        self.with(py, |m| m.between(nanoseconds(began), nanoseconds(ended)))
            .map(figures)
    }

    /// InfluxDB's line protocol, of the samples after a moment, and the moment of the last one.
    fn line_protocol(
        &self,
        py: Python<'_>,
        tags: Vec<(String, String)>,
        since: f64,
    ) -> PyResult<(String, f64)> {
        self.with(py, |m| {
            let samples = m.samples_since(nanoseconds(since));
            let tags: Vec<_> = tags.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            let last = samples.last().map_or(since, |s| seconds(s.at_ns));
            (line_protocol(&m.sensors(), &samples, &tags), last)
        })
    }

    /// Stops.
    fn close(&self, py: Python<'_>) {
        if self.pid == process::pid() {
            py.detach(|| drop(self.monitor.lock().take()));
        }
    }
}
