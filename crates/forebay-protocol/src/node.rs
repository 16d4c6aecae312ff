//! What a node says of itself.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// `GET /v1/forebay/info`: which node this is and where it listens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeInfo {
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
    pub version: String,
    pub node_id: String,
    pub state: NodeState,
    pub uptime_seconds: u64,
    pub listen: Listen,
    pub origins: Vec<OriginConfigured>,
    pub origin_stats: Vec<OriginStatus>,
    pub cache: CacheStatus,
    pub reads: Reads,
    pub engine: EngineStatus,
    pub batches: Batches,
    pub memory: Memory,
    pub requests_in_flight: u64,
}

/// Whether a node takes work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    Ready,
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
    pub s3: Option<String>,
    pub admin: Option<String>,
    pub unix: Option<String>,
}

/// An origin, as the configuration has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OriginConfigured {
    /// `*`: any bucket.
    pub bucket: String,
    pub url: String,
    pub endpoint: Option<String>,
}

/// What was asked of one origin so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OriginStatus {
    pub name: String,
    /// By operation; those that were never asked for are left out.
    pub operations: BTreeMap<String, Operation>,
    /// How many errors, by code.
    pub errors: BTreeMap<String, u64>,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub in_flight: u64,
    pub waiting: u64,
    pub retries: u64,
    pub continuations: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Operation {
    pub requests: u64,
    pub errors: u64,
    /// Of all of them together.
    pub latency_seconds: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheStatus {
    pub dirs: Vec<CacheDir>,
    pub entries: u64,
    pub index_bytes: u64,
    pub pins: u64,
    pub pinned_bytes: u64,
    pub pins_not_held: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheDir {
    pub path: String,
    /// `ok`, or what is wrong with it.
    pub state: String,
    pub capacity_bytes: u64,
    pub used_bytes: u64,
    pub live_bytes: u64,
    pub records: u64,
    pub evicted_records: u64,
    pub evicted_bytes: u64,
    pub checksum_failures: u64,
    pub read_failures: u64,
    pub write_failures: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reads {
    pub total: u64,
    pub hit: u64,
    pub miss: u64,
    pub revalidated: u64,
    /// Served past their freshness, because the origin failed.
    pub stale: u64,
    pub bypass: u64,
    pub failed: u64,
    pub bytes_from_cache: u64,
    pub bytes_from_origin: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineStatus {
    pub fills: u64,
    pub fills_failed: u64,
    pub fills_joined: u64,
    pub fills_in_flight: u64,
    pub revalidations: u64,
    pub revalidations_changed: u64,
    pub version_changes: u64,
    pub store_writes_failed: u64,
    pub indexes_built: u64,
    pub indexes_built_in_passing: u64,
    pub indexes_loaded: u64,
    pub archives_unpacked: u64,
    pub writes: u64,
    pub bytes_written: u64,
    pub deletes: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Batches {
    pub completed: u64,
    pub in_flight: u64,
    pub objects: u64,
    pub members: u64,
    pub errors_soft: u64,
    pub errors_hard: u64,
    pub refused: u64,
    pub cut: u64,
    pub bytes_sent: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    pub budget_bytes: u64,
    pub used_bytes: u64,
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
