//! What a node knows of the jobs that read datasets here.

use serde::{Deserialize, Serialize};

/// The header by which a request for rows names its job.
pub const JOB_HEADER: &str = "forebay-job";
/// The parameter by which a stream names it.
pub const JOB_PARAMETER: &str = "job";
/// The header by which an answer with rows says where their bytes came from:
/// `memory=1, disk=2, peer=0, origin=3`.
pub const SOURCES_HEADER: &str = "forebay-sources";
/// `GET`: the jobs that the caller may see; with a name behind it, one of them.
pub const JOBS_PATH: &str = "/v1/forebay/jobs";

/// One job, as far as this node served it since it started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Job {
    /// What it calls itself.
    pub name: String,
    /// The name of the key or token that it uses.
    pub caller: String,
    /// Its first request, in seconds since the Unix epoch.
    pub first_seen: u64,
    /// Its last one.
    pub last_seen: u64,
    /// Seconds between the two.
    pub seconds: f64,
    /// What its reads took.
    #[serde(flatten)]
    pub taken: Taken,
    /// CPU time of the node between the first and the last request, of all that it did.
    pub node_cpu_seconds: f64,
    /// Rows that the node sent to all jobs in that time.
    pub node_rows: u64,
    /// Energy of the node's machine in that time.
    pub energy: Vec<Joules>,
    /// What sensors did not measure, and why.
    pub absent: Vec<String>,
}

/// What reads of rows took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Taken {
    /// Reads of rows: requests, and steps of streams.
    pub requests: u64,
    /// Rows in their answers.
    pub rows: u64,
    /// Bytes of these rows.
    pub row_bytes: u64,
    /// Bytes of rows that were decoded already.
    pub memory_bytes: u64,
    /// Bytes from the node's disk.
    pub disk_bytes: u64,
    /// Bytes from other nodes.
    pub peer_bytes: u64,
    /// Bytes from origins.
    pub origin_bytes: u64,
    /// Requests to origins, each attempt counted.
    pub origin_requests: u64,
}

/// What reads of one dataset took, by all jobs and by nobody's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OfDataset {
    /// Its id.
    pub id: String,
    /// Where its files are: what their names have in common.
    pub name: String,
    /// What tells the names of its files from those of another: the same for all its versions that
    /// have files of the same names; 16 hexadecimal digits.
    pub names: String,
    /// Bytes of these files, which lie at the origin.
    pub stored_bytes: u64,
    /// What it took.
    #[serde(flatten)]
    pub taken: Taken,
}

/// What one sensor measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Joules {
    /// `rapl`, `nvml`, `hwmon`, `ipmi`, or a model.
    pub source: String,
    /// `package-0`, …
    pub domain: String,
    /// The energy.
    pub joules: f64,
    /// Whether a model made it.
    pub estimate: bool,
}

/// `GET /v1/forebay/jobs`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Jobs {
    /// The one that was served last comes first.
    pub jobs: Vec<Job>,
    /// Older jobs that were forgotten, because there were too many.
    pub forgotten: u64,
    /// What was read of each dataset; only for those who may see the jobs of all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub datasets: Vec<OfDataset>,
}
