//! Reads all sensors at the same moments, and remembers the last minutes.
//!
//! One thread wakes up at multiples of the interval of UTC, so that nodes whose clocks agree read at
//! the same time. A reading that comes late is simply later: totals between two samples are
//! interpolated. Where there is nothing to read, no thread is started.

use crate::{
    counter::{Counted, Counter, Power},
    hwmon,
    ipmi::{Board, Meter},
    line_protocol::{comment, line_protocol},
    nvml::Nvml,
    powercap,
};
use std::{
    collections::VecDeque,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

/// Sensors of one machine; more are not read.
const SENSORS_MAX: usize = 128;
/// Lines about what is absent.
const NOTES_MAX: usize = 32;
/// How often GPUs that came are looked for.
const LOOK_AGAIN_NS: u64 = 10_000_000_000;

/// Where to look, and how often.
#[derive(Clone, Debug)]
pub struct Config {
    /// The root of sysfs.
    pub sysfs: PathBuf,
    /// NVML's library; empty: none.
    pub nvml: PathBuf,
    /// The time between two samples.
    pub interval: Duration,
    /// How many samples are remembered.
    pub kept: usize,
    /// An estimate of the CPUs' energy; only if somebody asks for one.
    pub model: Option<Model>,
    /// Is told each note once, when it is made.
    pub tell: fn(&str),
}

impl Default for Config {
    fn default() -> Self {
        Self {
            sysfs: "/sys".into(),
            nvml: "libnvidia-ml.so.1".into(),
            interval: Duration::from_millis(100),
            // Ten minutes.
            kept: 6000,
            model: None,
            tell: |_| {},
        }
    }
}

/// Estimates energy from the CPU time of this process.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    watts: f64,
}

impl Model {
    /// `cpu-watts=15`: the power of one busy core.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let watts = text.strip_prefix("cpu-watts=").map(str::parse::<f64>);
        match watts {
            Some(Ok(watts)) if watts > 0.0 && watts <= 1000.0 => Ok(Self { watts }),
            _ => Err(format!(
                "{text:?} is not a model of energy: give \"cpu-watts=15\", the watts of one busy \
                 core (above 0, at most 1000)"
            )),
        }
    }

    fn name(&self) -> String {
        format!("cpu-watts={}", self.watts)
    }
}

/// A sensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sensor {
    /// `rapl`, `nvml`, `hwmon`, `ipmi`, or the model's name.
    pub source: String,
    /// `package-0`, `dram-0`, `core-0`, `psys`, `gpu-0`, `board`, …
    pub domain: String,
    /// Whether it is a model's estimate.
    pub estimate: bool,
}

/// What a sensor has measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// Which one.
    pub sensor: Sensor,
    /// Joules.
    pub joules: f64,
}

/// All sensors at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// `CLOCK_MONOTONIC`, in nanoseconds.
    pub at_ns: u64,
    /// The same moment since the Unix epoch, by the system's clock.
    pub utc_ns: i64,
    /// Joules since the monitor began, by sensor; `None`: it is not there (any more, or yet), or
    /// what it measured is not known.
    pub joules: Vec<Option<f64>>,
}

/// `CLOCK_MONOTONIC`, in nanoseconds.
pub fn now() -> u64 {
    clock(libc::CLOCK_MONOTONIC) as u64
}

fn clock(id: libc::clockid_t) -> i64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is valid for the call, which fills it in.
    unsafe { libc::clock_gettime(id, &mut time) };
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// CPU time of this process, user and system, in seconds.
pub fn process_cpu_seconds() -> f64 {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID) as f64 / 1e9
}

/// A file of sysfs that is read again and again.
#[derive(Debug)]
pub(crate) struct File(std::fs::File);

impl File {
    pub fn open(path: &Path) -> io::Result<Self> {
        std::fs::File::open(path).map(Self)
    }

    pub fn number(&self) -> io::Result<u64> {
        let mut text = [0; 32];
        let n = self.0.read_at(&mut text, 0)?;
        std::str::from_utf8(&text[..n])
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not a number"))
    }
}

/// How a sensor is read.
pub(crate) enum What {
    Counter(File, Counter),
    /// With watts of one unit.
    Power(File, f64, Power),
    /// A device of NVML, by its id, with the counter of its energy in millijoules.
    GpuCounter(String, Counter),
    GpuPower(String, Power),
    Board(Arc<Meter>, Power),
    Model(Model, f64),
}

struct Reader {
    sensor: Sensor,
    what: What,
    total: f64,
    /// Whether `total` is right.
    known: bool,
}

/// What was found.
#[derive(Default)]
pub(crate) struct Found {
    readers: Vec<Reader>,
    notes: Vec<String>,
    /// Whether sensors are there that cannot be read.
    passed_over: bool,
}

impl Found {
    pub fn add(&mut self, source: &str, domain: &str, what: What) {
        if self.readers.len() >= SENSORS_MAX {
            self.note(format!(
                "more than {SENSORS_MAX} sensors: the rest are not read"
            ));
            return;
        }
        let estimate = matches!(what, What::Model(..));
        // Several devices may call themselves the same.
        let others = |name: &str| {
            let mut sensors = self.readers.iter().map(|r| &r.sensor);
            sensors.any(|s| s.source == source && s.domain == name && s.estimate == estimate)
        };
        let names = (2..).map(|n| format!("{domain} #{n}"));
        let domain = std::iter::once(domain.to_owned())
            .chain(names)
            .find(|name| !others(name))
            .unwrap_or_default();
        self.readers.push(Reader {
            sensor: Sensor {
                source: source.into(),
                domain,
                estimate,
            },
            what,
            total: 0.0,
            known: true,
        });
    }

    /// Whether a sensor of this source measures this domain.
    pub fn has(&self, source: &str, domain: &str) -> bool {
        let mut sensors = self.readers.iter().map(|r| &r.sensor);
        sensors.any(|s| s.source == source && s.domain == domain)
    }

    #[cfg(test)]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Notes that a sensor is there and cannot be read, and why.
    pub fn pass_over(&mut self, note: String) {
        self.passed_over = true;
        self.note(note);
    }

    pub fn note(&mut self, note: String) {
        if self.notes.len() < NOTES_MAX && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }
}

struct State {
    found: Found,
    nvml: Option<Nvml>,
    board: Option<Board>,
    looked_ns: u64,
    samples: Arc<Samples>,
    kept: usize,
    /// How many notes have been told.
    told: usize,
    stop: bool,
}

/// The samples that are remembered. The lock is never held while a sensor is read, which may take
/// long.
#[derive(Default)]
struct Samples(Mutex<VecDeque<Sample>>);

impl Samples {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Sample>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, sample: Sample, kept: usize) {
        let mut samples = self.lock();
        while samples.len() >= kept.max(2) {
            samples.pop_front();
        }
        samples.push_back(sample);
    }
}

impl State {
    fn sample(&mut self) {
        let at_ns = now();
        let utc_ns = clock(libc::CLOCK_REALTIME);
        if let Some(nvml) = &mut self.nvml
            && at_ns.saturating_sub(self.looked_ns) > LOOK_AGAIN_NS
        {
            self.looked_ns = at_ns;
            nvml.look(&mut self.found);
        }
        if let Some(board) = &mut self.board
            && !board.look(&mut self.found, Duration::ZERO)
        {
            self.board = None;
        }
        let Found { readers, notes, .. } = &mut self.found;
        let mut more = Vec::new();
        for reader in readers.iter_mut().filter(|r| r.known) {
            let counted = match &mut reader.what {
                What::Counter(file, counter) => file.number().map(|raw| counter.read(at_ns, raw)),
                What::Power(file, unit, power) => file
                    .number()
                    .map(|raw| power.read(at_ns, raw as f64 * *unit)),
                What::GpuCounter(id, counter) => read_gpu(&mut self.nvml, id, Nvml::energy_mj)
                    .map(|raw| counter.read(at_ns, raw)),
                What::GpuPower(id, power) => read_gpu(&mut self.nvml, id, Nvml::power_mw)
                    .map(|raw| power.read(at_ns, raw as f64 / 1e3)),
                What::Board(meter, power) => {
                    meter.watts(at_ns).map(|watts| power.read(at_ns, watts))
                }
                What::Model(model, began) => {
                    let joules = (process_cpu_seconds() - *began) * model.watts;
                    Ok(Counted::Joules((joules - reader.total).max(0.0)))
                }
            };
            let Sensor { source, domain, .. } = &reader.sensor;
            match counted {
                Ok(Counted::Joules(joules)) => reader.total += joules,
                Ok(Counted::Unknown) => {
                    reader.known = false;
                    more.push(format!(
                        "{source}: {domain} may have gone around more than once, or was set back, \
                         between two readings: its joules are not told any more"
                    ));
                }
                Err(e) => {
                    reader.known = false;
                    more.push(format!(
                        "{source}: {domain} went away ({e}): its joules are not told any more"
                    ));
                }
            }
        }
        for note in more {
            if notes.len() < NOTES_MAX && !notes.contains(&note) {
                notes.push(note);
            }
        }
        let joules = readers.iter().map(|r| r.known.then_some(r.total)).collect();
        let sample = Sample {
            at_ns,
            utc_ns,
            joules,
        };
        self.samples.push(sample, self.kept);
    }

    /// Notes that have not been told yet.
    fn news(&mut self) -> Vec<String> {
        let notes = &self.found.notes;
        let news = notes[self.told..].to_vec();
        self.told = notes.len();
        news
    }

    /// Joules of each sensor whose figure is known, by the last sample.
    fn readings(&self) -> Vec<Reading> {
        let samples = self.samples.lock();
        let Some(sample) = samples.back() else {
            return Vec::new();
        };
        let readers = self.found.readers.iter().zip(&sample.joules);
        let known = readers.filter_map(|(reader, joules)| {
            Some(Reading {
                sensor: reader.sensor.clone(),
                joules: (*joules)?,
            })
        });
        known.collect()
    }

    /// By the last sample, for whoever must not wait for a sensor.
    fn last(&self) -> Arc<Last> {
        let readers = self.found.readers.iter();
        Arc::new(Last {
            readings: self.readings(),
            sensors: readers.map(|r| r.sensor.clone()).collect(),
            notes: self.found.notes.clone(),
        })
    }
}

/// The total of a sensor at a moment, between the samples around it.
fn total_at(samples: &VecDeque<Sample>, sensor: usize, at_ns: u64) -> Option<f64> {
    let after = samples.partition_point(|s| s.at_ns < at_ns);
    let value = |i: usize| {
        let sample = samples.get(i)?;
        Some((sample.at_ns, sample.joules.get(sensor).copied().flatten()?))
    };
    match (after.checked_sub(1).map(value), value(after)) {
        (_, Some((at, joules))) if at == at_ns => Some(joules),
        (Some(Some((t0, j0))), Some((t1, j1))) => {
            let part = (at_ns - t0) as f64 / (t1 - t0).max(1) as f64;
            Some(j0 + (j1 - j0) * part)
        }
        // The device came later or had gone by then, or the samples of that moment are forgotten.
        _ => None,
    }
}

fn read_gpu<T>(
    nvml: &mut Option<Nvml>,
    id: &str,
    read: impl FnOnce(&mut Nvml, &str) -> Result<T, String>,
) -> io::Result<T> {
    match nvml {
        Some(nvml) => read(nvml, id).map_err(io::Error::other),
        None => Err(io::Error::other("NVML is not there")),
    }
}

/// What is known by the last sample that the thread took.
struct Last {
    readings: Vec<Reading>,
    sensors: Vec<Sensor>,
    notes: Vec<String>,
}

struct Shared {
    state: Mutex<State>,
    woken: Condvar,
    /// By the last sample. Its lock is never held while a sensor is read, which may take long.
    last: Mutex<Arc<Last>>,
    samples: Arc<Samples>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn last(&self) -> Arc<Last> {
        let last = self.last.lock();
        last.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_last(&self, last: Arc<Last>) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = last;
    }
}

/// What [`Monitor::recent`] says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recent {
    /// The sensors. Samples have one figure for each of them, or for the first ones.
    pub sensors: Vec<Sensor>,
    /// The samples, the oldest first.
    pub samples: Vec<Sample>,
    /// Whether there are later ones.
    pub more: bool,
    /// What cannot be read, or no longer, and why.
    pub notes: Vec<String>,
}

/// Samples the energy of this machine as long as it exists.
pub struct Monitor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// Finds the sensors, and starts to read them if there are any.
    pub fn start(config: &Config) -> Self {
        let mut found = Found::default();
        powercap::find(&config.sysfs, &mut found);
        hwmon::find(&config.sysfs, &mut found);
        let nvml = match config.nvml.as_os_str().is_empty() {
            true => None,
            false => Nvml::load(&config.nvml, &mut found),
        };
        let board = Board::find(&config.sysfs, &mut found);
        if let Some(model) = &config.model {
            let what = What::Model(model.clone(), process_cpu_seconds());
            found.add(&model.name(), "cpu", what);
        }
        let runs = !found.readers.is_empty() || nvml.is_some() || board.is_some();
        let mut state = State {
            found,
            nvml,
            board,
            looked_ns: now(),
            samples: Arc::default(),
            kept: config.kept,
            told: 0,
            stop: false,
        };
        state.sample();
        state.news().iter().for_each(|note| (config.tell)(note));
        let (last, samples) = (state.last(), state.samples.clone());
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            woken: Condvar::new(),
            last: Mutex::new(last),
            samples,
        });
        let interval = config.interval.max(Duration::from_millis(1));
        let (of_thread, tell) = (shared.clone(), config.tell);
        let thread = runs.then(|| {
            std::thread::Builder::new()
                .name("forebay-energy".into())
                .spawn(move || run(&of_thread, interval, tell))
                .ok()
        });
        Self {
            shared,
            thread: thread.flatten(),
        }
    }

    /// What there is to read. Sensors are only ever added at the end.
    pub fn sensors(&self) -> Vec<Sensor> {
        let state = self.shared.lock();
        let readers = state.found.readers.iter();
        readers.map(|r| r.sensor.clone()).collect()
    }

    /// What cannot be read, or no longer, and why: one line each.
    pub fn notes(&self) -> Vec<String> {
        self.shared.lock().found.notes.clone()
    }

    /// Whether there are sensors, of more than the board, that could not be read from the beginning: then
    /// the sum of what is read is not that of the machine.
    pub fn passes_over(&self) -> bool {
        self.shared.lock().found.passed_over
    }

    /// Joules since the monitor began, read now. Sensors whose figure is not known are left out.
    pub fn totals(&self) -> Vec<Reading> {
        let mut state = self.shared.lock();
        state.sample();
        state.readings()
    }

    /// The same by the last sample, an interval ago: no sensor is read, nor waited for.
    pub fn last(&self) -> Vec<Reading> {
        self.shared.last().readings.clone()
    }

    /// [`Monitor::notes`], by the last sample.
    pub fn last_notes(&self) -> Vec<String> {
        self.shared.last().notes.clone()
    }

    /// The samples after a moment, as far as they are remembered, with so many figures at the most,
    /// and of what they are: no sensor is read, nor waited for.
    pub fn recent(&self, after_ns: u64, figures: usize) -> Recent {
        let last = self.shared.last();
        let sensors = last.sensors.len();
        let most = (figures / sensors.max(1)).max(1);
        let all = self.shared.samples.lock();
        let after = all.range(all.partition_point(|s| s.at_ns <= after_ns)..);
        let more = after.len() > most;
        let samples = after.take(most).map(|s| Sample {
            at_ns: s.at_ns,
            utc_ns: s.utc_ns,
            // A sensor may have come with a sample that is newer than `last`.
            joules: s.joules[..s.joules.len().min(sensors)].to_vec(),
        });
        Recent {
            samples: samples.collect(),
            sensors: last.sensors.clone(),
            more,
            notes: last.notes.clone(),
        }
    }

    /// Joules between two moments of `CLOCK_MONOTONIC`, interpolated between samples. Left out are
    /// sensors that were not there at both, or whose samples are no longer remembered.
    pub fn between(&self, from_ns: u64, to_ns: u64) -> Vec<Reading> {
        let mut state = self.shared.lock();
        let newest = state.samples.lock().back().map(|last| last.at_ns);
        if newest.is_none_or(|newest| newest < to_ns) {
            state.sample();
        }
        let samples = state.samples.lock();
        let readers = state.found.readers.iter().enumerate();
        readers
            .filter_map(|(i, reader)| {
                let (from, to) = (
                    total_at(&samples, i, from_ns)?,
                    total_at(&samples, i, to_ns)?,
                );
                Some(Reading {
                    sensor: reader.sensor.clone(),
                    joules: (to - from).max(0.0),
                })
            })
            .collect()
    }

    /// The samples of the last while in InfluxDB's line protocol, as far as they are remembered;
    /// what is not measured, and why, are comments before them.
    pub fn lines(&self, last: Duration, tags: &[(&str, &str)]) -> String {
        let last = u64::try_from(last.as_nanos()).unwrap_or(u64::MAX);
        let samples = self.samples_since(now().saturating_sub(last));
        let notes = self.notes().into_iter();
        let notes: String = notes.map(|note| comment(&note)).collect();
        notes + &line_protocol(&self.sensors(), &samples, tags)
    }

    /// The samples after a moment, as far as they are remembered.
    pub fn samples_since(&self, at_ns: u64) -> Vec<Sample> {
        let samples = self.shared.samples.lock();
        let first = samples.partition_point(|s| s.at_ns <= at_ns);
        samples.range(first..).cloned().collect()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.woken.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(shared: &Shared, interval: Duration, tell: fn(&str)) {
    let mut state = shared.lock();
    while !state.stop {
        let every = interval.as_nanos() as i64;
        let rest = every - clock(libc::CLOCK_REALTIME).rem_euclid(every);
        let wait = Duration::from_nanos(rest as u64);
        let (woken, timeout) = shared
            .woken
            .wait_timeout(state, wait)
            .unwrap_or_else(PoisonError::into_inner);
        state = woken;
        if timeout.timed_out() && !state.stop {
            state.sample();
            shared.set_last(state.last());
            let news = state.news();
            if !news.is_empty() {
                // Whoever is told may wait.
                drop(state);
                news.iter().for_each(|note| tell(note));
                state = shared.lock();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sensors_of_one_name_are_told_apart() {
        let mut found = Found::default();
        for source in ["hwmon", "hwmon", "hwmon", "nvml"] {
            let what = What::GpuPower(String::new(), Power::default());
            found.add(source, "xe:pkg", what);
        }
        let names = found.readers.iter().map(|r| r.sensor.domain.as_str());
        let names: Vec<&str> = names.collect();
        assert_eq!(names, ["xe:pkg", "xe:pkg #2", "xe:pkg #3", "xe:pkg"]);
    }
}
