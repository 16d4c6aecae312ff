//! What a report holds. Times are in seconds, sizes in bytes, energy in joules; shares are from 0
//! to 1. Whatever is `None`, or an empty list, was not measured.

use serde::{Deserialize, Serialize};

/// A whole report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// What was read, and how.
    pub title: String,
    /// The job's name, as the node knows it.
    pub job: Option<String>,
    /// When the report was made, in UTC.
    pub made_at: String,
    /// What its samples are: `samples`, `packs` or `rows`.
    pub unit: String,
    /// Whether the node pushed the batches.
    pub is_streamed: bool,
    /// Whether the node is on the machine of the loop, and was reached through its Unix socket.
    pub is_local: bool,
    /// All epochs together, as the training loop saw them.
    pub run: Option<Figures>,
    /// The same for each epoch.
    pub epochs: Vec<Epoch>,
    /// Epochs that are in `run` and not in `epochs`: only the last ones are kept apart.
    pub epochs_left_out: u64,
    /// How the loop went over time.
    pub timeline: Option<Timeline>,
    /// CPU time and energy, at each end.
    pub ends: Vec<End>,
    /// What the node asked of the origin.
    pub origin: Option<OriginUse>,
    /// What lies at the origin for it.
    pub stored: Vec<Stored>,
    /// What that cost.
    pub money: Option<Money>,
    /// How good the order was.
    pub shuffle: Option<Quality>,
    /// What could not be measured, and why.
    pub absent: Vec<String>,
    /// What is wrong, and what to do about it.
    pub warnings: Vec<Warning>,
}

impl Report {
    /// What its samples are called.
    pub(crate) fn unit(&self) -> &str {
        unit(&self.unit)
    }
}

/// What samples are called if nothing else is said.
fn unit(named: &str) -> &str {
    match named {
        "" => "samples",
        named => named,
    }
}

/// What the training loop got, and how long it waited for it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Figures {
    /// Samples handed out.
    pub samples: u64,
    /// In this many batches.
    pub batches: u64,
    /// Bytes of rows received for them, decoded.
    pub bytes: u64,
    /// Wall-clock time: waiting and computing.
    pub seconds: f64,
    /// Samples in each of these seconds.
    pub samples_per_s: f64,
    /// Time between two batches in which the loop did not wait.
    pub compute_s: f64,
    /// Time in which it waited.
    pub waited_s: f64,
    /// Of that, for the first batch of each loop.
    pub first_wait_s: f64,
    /// Accelerator utilization as MLPerf Storage defines it: computing, as a share of the time
    /// without the wait for the first batch. `None` before there was a second one.
    pub au: Option<f64>,
    /// What the loop waited for.
    pub waits: Waits,
    /// Where the bytes came from, as far as the node says.
    pub sources: Option<Sources>,
    /// The share of those bytes that did not come from the origin.
    pub hit_ratio: Option<f64>,
    /// CPU time of this process.
    pub cpu_seconds: Option<f64>,
    /// Energy of this machine.
    pub energy: Vec<Energy>,
    /// Both by what the loop did meanwhile; the stages add up to them.
    pub stages: Vec<Stage>,
    /// Energy of the node's machine, by what the loop did meanwhile; without CPU time.
    pub node_stages: Vec<Stage>,
    /// Samples that could not be made.
    pub skipped: u64,
    /// Connections that were lost and continued.
    pub reconnects: u64,
}

/// What was used while a loop did one of the two things that it does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stage {
    /// `waiting`: for a batch. `computing`: between two batches.
    pub stage: String,
    /// How long.
    pub seconds: f64,
    /// CPU time of the process meanwhile.
    pub cpu_seconds: Option<f64>,
    /// Energy of its machine meanwhile.
    pub energy: Vec<Energy>,
}

/// What a loop waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Waits {
    /// For rows to come from the node.
    pub node_s: f64,
    /// For samples to be decoded.
    pub decode_s: f64,
    /// For a batch to be put together.
    pub collate_s: f64,
    /// How the requests' own time was divided, several at a time: waiting for the origin,
    pub origin_s: f64,
    /// reading the node's disk,
    pub disk_s: f64,
    /// decoding and framing at the node,
    pub prepare_s: f64,
    /// and the rest, which is the network between node and loop.
    pub network_s: f64,
}

/// Why the node made a loop wait, with the share of the wait for the node.
pub(crate) const NODE_CAUSES: [&str; 4] = ["origin", "node's disk", "node's decoding", "network"];

impl Waits {
    /// The wait for the node, divided among its causes in proportion to the time of requests.
    pub(crate) fn of_node(&self) -> [f64; 4] {
        let parts = [self.origin_s, self.disk_s, self.prepare_s, self.network_s];
        let all: f64 = parts.iter().sum();
        match all > 0.0 {
            true => parts.map(|part| self.node_s * part / all),
            // Nothing is known: it was on the way.
            false => [0.0, 0.0, 0.0, self.node_s],
        }
    }
}

/// One epoch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Epoch {
    /// Its number, from 0.
    pub epoch: u64,
    /// What it was like.
    #[serde(flatten)]
    pub figures: Figures,
}

/// Where bytes came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sources {
    /// Rows of blocks that the node had decoded already.
    pub memory: u64,
    /// The node's own disk.
    pub disk: u64,
    /// Another node of the cluster.
    pub peer: u64,
    /// The bucket.
    pub origin: u64,
}

/// The names of [`Sources`], in the order of their fields.
pub(crate) const SOURCES: [&str; 4] = ["memory", "disk", "peer", "origin"];

impl Sources {
    /// Of all sources together.
    pub fn total(&self) -> u64 {
        self.each().iter().sum()
    }

    pub(crate) fn each(&self) -> [u64; 4] {
        [self.memory, self.disk, self.peer, self.origin]
    }

    /// The share that did not come from the origin; `None` of nothing.
    pub fn hit_ratio(&self) -> Option<f64> {
        let total = self.total();
        (total > 0).then(|| 1.0 - self.origin as f64 / total as f64)
    }
}

/// A loop over time, in equal bins.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Timeline {
    /// How long a bin is.
    pub bin_seconds: f64,
    /// From the first request for a batch on.
    pub bins: Vec<Bin>,
}

/// One bin of a [`Timeline`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bin {
    /// Samples handed out in it.
    pub samples: u64,
    /// Time waited for batches that came in it.
    pub waited_s: f64,
    /// Time computed.
    pub compute_s: f64,
}

/// What one end of the connection used.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct End {
    /// `training process`, or a node's name.
    pub name: String,
    /// Whose use the figures are, if not this run's alone.
    pub of: String,
    /// The time in which they were used.
    pub seconds: f64,
    /// Samples that they were used for.
    pub samples: u64,
    /// What these are: `samples`, `packs` or `rows`.
    pub unit: String,
    /// CPU time.
    pub cpu_seconds: Option<f64>,
    /// One for each sensor and domain.
    pub energy: Vec<Energy>,
}

impl End {
    /// What its samples are called.
    pub(crate) fn unit(&self) -> &str {
        unit(&self.unit)
    }
}

/// What a sensor measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Energy {
    /// Where the figure comes from: `rapl`, `nvml`, `hwmon`, `ipmi`, or the name of a model.
    pub source: String,
    /// What it is of: `package-0`, `dram-0`, `gpu-0`, `psys`, `board`, `cpu`.
    pub domain: String,
    /// The energy.
    pub joules: f64,
    /// Whether it was computed by a model instead of measured.
    pub estimate: bool,
}

impl Energy {
    /// Whether another domain contains this one, or this one contains others: it is then not part
    /// of a sum.
    pub fn overlaps(&self) -> bool {
        !["package", "dram", "gpu", "cpu"]
            .iter()
            .any(|of| self.domain.starts_with(of))
    }
}

/// The sum of what does not overlap: packages, DRAM, GPUs. The second says whether any of it is an
/// estimate. `None` if nothing was measured.
pub(crate) fn joules(energy: &[Energy]) -> Option<(f64, bool)> {
    let mut apart = energy.iter().filter(|e| is_counted(energy, e)).peekable();
    apart.peek()?;
    Some(apart.fold((0.0, false), |(sum, any), e| {
        (sum + e.joules, any || e.estimate)
    }))
}

/// Whether one of these figures is part of their sum.
pub(crate) fn is_counted(energy: &[Energy], one: &Energy) -> bool {
    // What a model says of the processor is for where no package is measured.
    let is_measured = || energy.iter().any(|e| e.domain.starts_with("package"));
    !(one.overlaps() || one.domain.starts_with("cpu") && is_measured())
}

/// What a node asked of an origin for the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OriginUse {
    /// Requests that read, each attempt counted.
    pub reads: u64,
    /// Requests that list or write.
    pub writes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Requests that the cache answered in place of the origin; `None`: not known.
    pub reads_saved: Option<u64>,
    /// Bytes that came from the cache in place of the origin.
    pub bytes_saved: u64,
    /// Whose use this is, if not this run's alone.
    pub of: String,
}

/// What lies at an origin, whether anybody reads it or not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stored {
    /// `dataset`.
    pub by: String,
    /// Its name.
    pub name: String,
    /// Bytes of its files.
    pub bytes: u64,
}

/// Money, by a list of prices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Money {
    /// Which list.
    pub prices: PriceList,
    /// What was spent at the origin.
    pub spent: Vec<MoneyLine>,
    /// What the cache saved.
    pub saved: Vec<MoneyLine>,
    /// The sum of `spent`.
    pub spent_total: f64,
    /// The sum of `saved`.
    pub saved_total: f64,
    /// By bucket, dataset, job and key, as far as the node counts them.
    pub shares: Vec<MoneyShare>,
    /// What it costs to keep the data, whether anybody reads it or not: in none of the sums, and not
    /// added up either, since datasets may have files in common.
    pub storage: Vec<Storage>,
}

/// Where prices come from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PriceList {
    /// The provider.
    pub provider: String,
    /// Its region.
    pub region: String,
    /// The currency of all prices.
    pub currency: String,
    /// The day on which the prices were looked up.
    pub dated: String,
    /// Where they were looked up.
    pub source: String,
    /// The file, or `the table that ships with Forebay`.
    pub file: String,
}

/// A quantity at a price.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MoneyLine {
    /// What: `read requests`, `egress`, …
    pub what: String,
    /// How much of it.
    pub quantity: f64,
    /// In this unit.
    pub unit: String,
    /// The price of one unit.
    pub price: f64,
    /// The product.
    pub cost: f64,
}

/// A part of the money.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MoneyShare {
    /// `bucket`, `dataset`, `job` or `key`.
    pub by: String,
    /// Its name.
    pub name: String,
    /// Spent at the origin; `None`: not counted by this.
    pub spent: Option<f64>,
    /// Saved by the cache; `None`: not counted by this.
    pub saved: Option<f64>,
}

/// What it costs to keep something at the origin.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Storage {
    /// `dataset`.
    pub by: String,
    /// Its name.
    pub name: String,
    /// How much it is.
    pub bytes: u64,
    /// The price of a GB (10^9 bytes) for a month.
    pub price: f64,
    /// The product.
    pub per_month: f64,
}

/// How good an order is, beside a uniform one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Quality {
    /// The order: `block:16`.
    pub order: String,
    /// Rows that were taken for one batch.
    pub batch: u64,
    /// `(measure, value, value of a uniform order)`.
    pub measures: Vec<(String, f64, f64)>,
    /// `(position, row)` of some rows, as shares.
    pub points: Vec<(f32, f32)>,
}

/// Something to act upon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Warning {
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub advice: String,
}
