//! What a node says of itself.

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
    /// Whether the question came over the Unix socket.
    pub local: bool,
}

/// What a machine is called until its next start: two processes of one machine agree on it, and it
/// does not give away the `boot_id` of the system that it is made of.
pub fn host_id(boot_id: &str) -> String {
    let hash = forebay_core::name::hash_name("host", boot_id.trim());
    format!("{:016x}", (hash >> 64) as u64)
}

/// `GET /v1/forebay/status`: what a node serves, how full it is, and how it has done since it
/// began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// [`NodeInfo::version`].
    pub version: String,
    /// [`NodeInfo::node_id`].
    pub node_id: String,
    /// Whether it takes work.
    pub state: NodeState,
    /// Since the node began, in whole seconds.
    pub uptime_seconds: u64,
    /// Where it listens.
    pub listen: Listen,
    /// The buckets that are configured.
    pub origins: Vec<OriginConfigured>,
    /// What was asked of each of them.
    pub origin_stats: Vec<OriginStatus>,
    /// The local cache; empty where the node has none.
    pub cache: CacheStatus,
    /// How reads were answered.
    pub reads: Reads,
    /// What those reads, and writes, took.
    pub engine: EngineStatus,
    /// Batches of objects and members.
    pub batches: Batches,
    /// Memory at this moment.
    pub memory: Memory,
    /// Requests that are worked on, this one included.
    pub requests_in_flight: u64,
}

/// Whether a node takes work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// It takes work.
    Ready,
    /// It ends what is under way and refuses the rest.
    Stopping,
    /// A state of another release.
    #[default]
    #[serde(other)]
    Unknown,
}

impl NodeState {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            NodeState::Ready => "ready",
            NodeState::Stopping => "stopping",
            NodeState::Unknown => "unknown",
        }
    }
}

/// Addresses; `None` where there is no such listener.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Listen {
    /// The data port's, `ip:port`.
    pub s3: Option<String>,
    /// The admin listener's, `ip:port`.
    pub admin: Option<String>,
    /// The path of the Unix socket.
    pub unix: Option<String>,
}

/// An origin, as the configuration has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OriginConfigured {
    /// `*`: any bucket.
    pub bucket: String,
    /// Where its objects come from, `s3://bucket/prefix` for one.
    pub url: String,
    /// Where the service is; `None`: at its public address.
    pub endpoint: Option<String>,
}

/// What was asked of one origin so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OriginStatus {
    /// The bucket, or `*` for those that have no entry of their own.
    pub name: String,
    /// By operation; those that were never asked for are left out.
    pub operations: BTreeMap<String, Operation>,
    /// How many errors, by code.
    pub errors: BTreeMap<String, u64>,
    /// Bytes of objects that were read.
    pub bytes_in: u64,
    /// Bytes of objects that were written.
    pub bytes_out: u64,
    /// Requests whose answer or body is not finished, at this moment.
    pub in_flight: u64,
    /// Requests that wait for a place under the origin's limit, at this moment.
    pub waiting: u64,
    /// Attempts after the first of a request.
    pub retries: u64,
    /// Bodies that broke off and were continued.
    pub continuations: u64,
}

/// One kind of request to an origin.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Operation {
    /// How many, each attempt counted.
    pub requests: u64,
    /// How many ended in an error, answers such as "not found" included.
    pub errors: u64,
    /// Of all of them together.
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
    /// What the pinned objects take when they are cached whole.
    pub pinned_bytes: u64,
    /// Pinned names that are cached like any other, because the pins would take over half of the
    /// cache.
    pub pins_not_held: u64,
}

/// A cache directory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheDir {
    /// As it was configured.
    pub path: String,
    /// `ok`, or what is wrong with it.
    pub state: String,
    /// What it may use.
    pub capacity_bytes: u64,
    /// What it uses; never more than its capacity.
    pub used_bytes: u64,
    /// Of that, records that can be read.
    pub live_bytes: u64,
    /// How many such records there are.
    pub records: u64,
    /// Records given up to make room.
    pub evicted_records: u64,
    /// Bytes of those.
    pub evicted_bytes: u64,
    /// Records that were found damaged; a read takes one for a miss.
    pub checksum_failures: u64,
    /// Reads that the disk failed.
    pub read_failures: u64,
    /// Writes that the disk failed.
    pub write_failures: u64,
}

/// Reads since the node began. One read is a GET of an object, or one entry of a batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reads {
    /// The sum of the five that follow.
    pub total: u64,
    /// Answered from the local disk alone.
    pub hit: u64,
    /// At least one byte came from the origin.
    pub miss: u64,
    /// Answered from the local disk once the origin had said that it is current.
    pub revalidated: u64,
    /// Served past their freshness, because the origin failed.
    pub stale: u64,
    /// The cache was not asked.
    pub bypass: u64,
    /// Failed before the first byte; not in `total`.
    pub failed: u64,
    /// Bytes of reads that came from the local disk.
    pub bytes_from_cache: u64,
    /// Bytes that reads and fills took from origins.
    pub bytes_from_origin: u64,
}

/// What reads and writes took, since the node began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineStatus {
    /// Requests to origins that fill the cache.
    pub fills: u64,
    /// Fills that ended in an error.
    pub fills_failed: u64,
    /// Readers that waited for another's fill instead of asking the origin.
    pub fills_joined: u64,
    /// Fills under way at this moment.
    pub fills_in_flight: u64,
    /// Requests that asked an origin whether a version is still current.
    pub revalidations: u64,
    /// Of those, answered with a new version.
    pub revalidations_changed: u64,
    /// Objects that changed at the origin while they were read.
    pub version_changes: u64,
    /// Results that were passed through because the disk refused them.
    pub store_writes_failed: u64,
    /// Member indexes built by reading an archive for it.
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

/// Batches since the node began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Batches {
    /// Sent to their end.
    pub completed: u64,
    /// Under way at this moment.
    pub in_flight: u64,
    /// Whole objects, and ranges of them, that were delivered.
    pub objects: u64,
    /// Members of archives, and ranges of them, that were delivered.
    pub members: u64,
    /// Entries that were answered with a placeholder.
    pub errors_soft: u64,
    /// Batches that failed: refused, answered with an error, or cut.
    pub errors_hard: u64,
    /// Batches refused for want of memory.
    pub refused: u64,
    /// Batches broken off after their first byte.
    pub cut: u64,
    /// Bytes of answers, headers and padding of archives included.
    pub bytes_sent: u64,
}

/// What the node holds in memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// What buffers may take in all.
    pub budget_bytes: u64,
    /// What of that is reserved.
    pub used_bytes: u64,
    /// What the system says the process takes; 0 if it does not say.
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
