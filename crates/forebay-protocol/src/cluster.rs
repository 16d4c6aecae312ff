//! What a node says about its cluster, and what operators order.

use crate::node::CacheDir;
use serde::{Deserialize, Serialize};

/// `GET /v1/forebay/cluster`: the cluster as this node sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterStatus {
    /// The cluster's name.
    pub cluster: String,
    /// Counts the changes of its map. Nodes that find each other by DNS count for themselves.
    pub epoch: u64,
    /// The id of the node that answers.
    pub node: String,
    /// Where the map comes from.
    pub source: String,
    /// Seconds since the node last looked there with success; `None` for a file.
    pub looked_seconds: Option<f64>,
    /// Why it cannot look there now, or what is wrong there.
    pub error: Option<String>,
    /// How long this node's lease in etcd lasts if it is not renewed, in seconds.
    pub lease_seconds: Option<f64>,
    /// Where nodes tell each other of writes (etcd): whether this node answers from the versions
    /// that it knows to be current, in buckets that change.
    pub trusted: Option<bool>,
    /// Why it asks the bucket instead.
    pub not_trusted: Option<String>,
    /// Of 262,144 slots, those of this node whose former owners are still asked for what this node
    /// lacks.
    pub handing_over_slots: u64,
    /// Of the bytes that nodes have in their caches, the most of any one, divided by the mean. Only
    /// if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<f64>,
    /// The members, in the order of their ids.
    pub members: Vec<ClusterMember>,
}

/// A member of a cluster, as another one sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterMember {
    /// 16 hexadecimal digits.
    pub id: String,
    /// What operators call it.
    pub name: String,
    /// Where nodes reach it.
    pub address: String,
    /// Where clients reach it; empty if that is not known.
    pub url: String,
    /// Its zone.
    pub zone: String,
    /// Bytes of cache that it offers.
    pub weight: u64,
    /// `active`, or `draining`.
    pub state: String,
    /// The share of the cluster's data that it owns, from 0 to 1.
    pub share: f64,
    /// The node that answers is this one.
    pub here: bool,
    /// Whether the node that answers finds that it answers.
    pub answers: bool,
    /// For how many seconds it has been away, where that is known.
    pub away_seconds: Option<f64>,
    /// The release that it runs, where that is known.
    pub version: String,
    /// What the node that answers has asked it, since it started.
    pub link: Option<ClusterLink>,
    /// How far the hand-over of its share is, by what it says itself; `None` if it does not answer.
    pub moving: Option<ClusterMoving>,
    /// It is draining, and the new owners have everything that it had: it may be stopped.
    pub drained: bool,
    /// What it says of itself; only if that was asked for, and it answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub figures: Option<NodeFigures>,
    /// Why it did not say anything of itself, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub untold: Option<String>,
    /// In what it differs from the node that answers: `keys` (with their policies), `buckets` (with
    /// their origins), `release`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub differs: Vec<String>,
}
/// How far the hand-over of slots is, at one member. A cluster has 262,144 of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterMoving {
    /// Slots that it gained, and whose former owners it still asks for what it lacks.
    pub gaining_slots: u64,
    /// Slots that it had, and whose owners are not known to have everything.
    pub losing_slots: u64,
    /// Bytes of objects that it took over from former owners, since it started.
    pub taken_bytes: u64,
    /// When it is probably over, in seconds; where it is not known how fast it goes, when it is at
    /// the latest. `None`: it is over.
    pub left_seconds: Option<f64>,
    /// It has no room for more, and asks former owners when something is read.
    pub full: bool,
}

/// What a node says of itself to others: its cache now, and counts since it started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeFigures {
    /// The node's release.
    pub version: String,
    /// Whole seconds since the node started.
    pub uptime_seconds: u64,
    /// Bytes that its cache may use.
    pub capacity_bytes: u64,
    /// Bytes that its cache uses.
    pub used_bytes: u64,
    /// Entries of its index.
    pub entries: u64,
    /// The directories of its cache.
    pub dirs: Vec<CacheDir>,
    /// Requests of clients.
    pub requests: u64,
    /// Those that it answered with a status of 500 or above.
    pub requests_failed: u64,
    /// Bytes that it sent to clients.
    pub sent_bytes: u64,
    /// Objects that clients read, in batches too.
    pub reads: u64,
    /// Of those that may be cached: read from the local disk alone.
    pub reads_hit: u64,
    /// Of those that may be cached: all others.
    pub reads_miss: u64,
    /// Bytes that came from other nodes.
    pub from_nodes_bytes: u64,
    /// Bytes that came from buckets.
    pub from_buckets_bytes: u64,
    /// Bytes that were copied from other nodes that keep them too.
    pub copied_bytes: u64,
    /// Other nodes that may have more of what this one is to keep.
    pub copies_behind: u64,
}

/// What one node has asked another.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterLink {
    /// Questions.
    pub questions: u64,
    /// Of them, those for bytes that the other one did not have.
    pub misses: u64,
    /// Those that it answered with an error.
    pub failures: u64,
    /// How often it did not answer, and was not asked until it said hello again.
    pub silences: u64,
    /// Bytes of objects that it sent.
    pub received_bytes: u64,
    /// The mean time until its answers began, in milliseconds.
    pub first_byte_ms: f64,
    /// Questions that are under way.
    pub under_way: u64,
}

/// `POST /v1/forebay/cluster`: what an operator orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClusterAction {
    /// The member gives its share to others, and serves what it has until they have it.
    Drain,
    /// It takes a share again.
    Resume,
    /// The map loses the member.
    Forget,
}

/// The body of `POST /v1/forebay/cluster`; the answer is a [`ClusterStatus`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterOrder {
    /// What is to be done.
    pub action: ClusterAction,
    /// The member's name or id.
    pub member: String,
}
