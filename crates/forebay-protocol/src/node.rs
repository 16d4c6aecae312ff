//! What a node says about itself.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// `GET /v1/forebay/info`: which node this is and where it listens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeInfo {
    /// The node's release.
    pub version: String,
    /// New at each start of the node.
    pub node_id: String,
    /// The path of its Unix socket, if it has one.
    pub unix_socket: Option<String>,
    /// The machine, as [`host_id`] names it.
    pub host_id: String,
    /// The admin listener's URL.
    pub admin: Option<String>,
    /// The data port's URL.
    pub s3: Option<String>,
    /// Whether the request came over the Unix socket.
    pub local: bool,
}

/// A name for the machine until it restarts: two processes on one machine agree on it, and it does
/// not reveal the system's `boot_id` from which it is made.
pub fn host_id(boot_id: &str) -> String {
    let hash = forebay_core::name::hash_name("host", boot_id.trim());
    format!("{:016x}", (hash >> 64) as u64)
}

/// `GET /v1/forebay/status`: what a node serves, how full it is, and how it has done since it
/// started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// [`NodeInfo::version`].
    pub version: String,
    /// [`NodeInfo::node_id`].
    pub node_id: String,
    /// Whether it accepts work.
    pub state: NodeState,
    /// Whole seconds since the node started.
    pub uptime_seconds: u64,
    /// Where it listens.
    pub listen: Listen,
    /// The configured buckets.
    pub origins: Vec<OriginConfigured>,
    /// The requests made to each of them.
    pub origin_stats: Vec<OriginStatus>,
    /// The local cache; empty if the node has none.
    pub cache: CacheStatus,
    /// How reads were answered.
    pub reads: Reads,
    /// What those reads, and writes, involved.
    pub engine: EngineStatus,
    /// Batches of objects and members.
    pub batches: Batches,
    /// Memory at this moment.
    pub memory: Memory,
    /// Requests in progress, including this one.
    pub requests_in_flight: u64,
}

/// Whether a node accepts work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// It accepts work.
    Ready,
    /// It finishes work in progress and refuses the rest.
    Stopping,
    /// A state of another release.
    #[default]
    #[serde(other)]
    Unknown,
}

impl NodeState {
    /// As it is written in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            NodeState::Ready => "ready",
            NodeState::Stopping => "stopping",
            NodeState::Unknown => "unknown",
        }
    }
}

/// Addresses; `None` if there is no such listener.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Listen {
    /// The address of the data port, `ip:port`.
    pub s3: Option<String>,
    /// The address of the admin listener, `ip:port`.
    pub admin: Option<String>,
    /// The path of the Unix socket.
    pub unix: Option<String>,
}

/// An origin, as configured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OriginConfigured {
    /// `*`: any bucket.
    pub bucket: String,
    /// Where its objects come from, for example `s3://bucket/prefix`.
    pub url: String,
    /// The service's address; `None`: its public one.
    pub endpoint: Option<String>,
}

/// The requests made to one origin so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OriginStatus {
    /// The bucket, or `*` for those without an entry of their own.
    pub name: String,
    /// By operation; those that were never used are left out.
    pub operations: BTreeMap<String, Operation>,
    /// The number of errors, by code, including answers such as "not found".
    pub errors: BTreeMap<String, u64>,
    /// How many of them say that something is wrong with the origin, its credentials or the way to
    /// it.
    pub failures: u64,
    /// Bytes of objects that were read.
    pub bytes_in: u64,
    /// Bytes of objects that were written.
    pub bytes_out: u64,
    /// Requests whose answer or body is not finished at this moment.
    pub in_flight: u64,
    /// Requests that are waiting for a place under the origin's limit at this moment.
    pub waiting: u64,
    /// Attempts after the first one of a request.
    pub retries: u64,
    /// Bodies that broke off and were continued.
    pub continuations: u64,
}

/// One kind of request to an origin.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Operation {
    /// The number of requests, counting each attempt.
    pub requests: u64,
    /// How many ended in an error, including answers such as "not found".
    pub errors: u64,
    /// The total time of all of them.
    pub latency_seconds: f64,
}

/// The local cache of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheStatus {
    /// Its directories, in the order of the configuration.
    pub dirs: Vec<CacheDir>,
    /// Entries of the index: heads, parts and pins.
    pub entries: u64,
    /// Memory that the index takes.
    pub index_bytes: u64,
    /// Pinned names.
    pub pins: u64,
    /// How much the pinned objects take when they are cached completely.
    pub pinned_bytes: u64,
    /// Pinned names that are treated like any other, because the pins would take more than half of
    /// the cache.
    pub pins_not_held: u64,
}

/// A cache directory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheDir {
    /// The path as configured.
    pub path: String,
    /// `ok`, or what is wrong with it.
    pub state: String,
    /// How many bytes it may use.
    pub capacity_bytes: u64,
    /// How many bytes it uses; never more than its capacity.
    pub used_bytes: u64,
    /// The part of that in records that can be read.
    pub live_bytes: u64,
    /// The number of such records.
    pub records: u64,
    /// Records removed to make room.
    pub evicted_records: u64,
    /// Bytes of those.
    pub evicted_bytes: u64,
    /// Records found damaged; a read treats such a record as a miss.
    pub checksum_failures: u64,
    /// Reads that failed on the disk.
    pub read_failures: u64,
    /// Writes that failed on the disk.
    pub write_failures: u64,
}

/// Reads since the node started. One read is a GET of an object, or one entry of a batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reads {
    /// The sum of the next five.
    pub total: u64,
    /// Answered only from the local disk.
    pub hit: u64,
    /// At least one byte came from the origin.
    pub miss: u64,
    /// Answered from the local disk after the origin said that the version is current.
    pub revalidated: u64,
    /// Served after they had ceased to be fresh, because the origin failed.
    pub stale: u64,
    /// The cache was bypassed.
    pub bypass: u64,
    /// Failed before the first byte; not in `total`.
    pub failed: u64,
    /// Bytes of reads that came from the local disk.
    pub bytes_from_cache: u64,
    /// Bytes that reads and fills took from origins.
    pub bytes_from_origin: u64,
}

/// What reads and writes involved, since the node started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineStatus {
    /// Requests to origins to fill the cache.
    pub fills: u64,
    /// Fills that ended in an error.
    pub fills_failed: u64,
    /// Readers that waited for another reader's fill instead of asking the origin.
    pub fills_joined: u64,
    /// Fills in progress at this moment.
    pub fills_in_flight: u64,
    /// Requests that asked an origin whether a version is still current.
    pub revalidations: u64,
    /// How many of those found a new version.
    pub revalidations_changed: u64,
    /// Objects that changed at the origin while they were read.
    pub version_changes: u64,
    /// Results that were passed through uncached because the disk refused them.
    pub store_writes_failed: u64,
    /// Member indexes built by reading an archive for that purpose.
    pub indexes_built: u64,
    /// Member indexes built while the archive was read for another reason.
    pub indexes_built_in_passing: u64,
    /// Member indexes read back from the local disk.
    pub indexes_loaded: u64,
    /// Compressed archives unpacked into the cache.
    pub archives_unpacked: u64,
    /// Objects written to origins.
    pub writes: u64,
    /// Bytes of those.
    pub bytes_written: u64,
    /// Objects removed at origins.
    pub deletes: u64,
}

/// Batches since the node started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Batches {
    /// Batches sent to their end.
    pub completed: u64,
    /// Batches in progress at this moment.
    pub in_flight: u64,
    /// Whole objects, or ranges of them, that were delivered.
    pub objects: u64,
    /// Members of archives, or ranges of them, that were delivered.
    pub members: u64,
    /// Entries that were answered with a placeholder.
    pub errors_soft: u64,
    /// Batches that failed: refused, answered with an error, or cut.
    pub errors_hard: u64,
    /// Batches refused for lack of memory.
    pub refused: u64,
    /// Batches broken off after their first byte.
    pub cut: u64,
    /// Bytes of answers, including headers and padding of archives.
    pub bytes_sent: u64,
}

/// What the node holds in memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// The total that buffers may take.
    pub budget_bytes: u64,
    /// How much of that is reserved.
    pub used_bytes: u64,
    /// How much the process takes according to the system; 0 if it does not say.
    pub resident_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_of_another_release_is_read() {
        let json = r#"{"state": "dreaming", "reads": {"hit": 3, "new": 1}, "later": {}}"#;
        let status: Status = serde_json::from_str(json).unwrap();
        assert_eq!((status.state, status.reads.hit), (NodeState::Unknown, 3));
        let again = serde_json::to_string(&status).unwrap();
        assert_eq!(serde_json::from_str::<Status>(&again).unwrap(), status);
    }

    #[test]
    fn a_machine_keeps_its_name() {
        assert_eq!(host_id("abc\n"), host_id("abc"));
        assert_ne!(host_id("abc"), host_id("abd"));
        assert_eq!(host_id("abc").len(), 16);
    }
}
