//! What nodes and clients say to each other under `/v1/`, defined once: both ends use these types,
//! so neither can misspell a field that the other one reads.
//!
//! - `error`: the document that says what went wrong, in answers, in event lines and in frames.
//! - `frame`: how rows travel, in one answer or in an endless stream.
//! - `node`: what a node says about itself; `cluster`: what it says about the others; `cache`: warm-ups, pins, evictions and `stat`;
//!   `dataset`: requests to open one, and descriptions; `composition`: rows made of theirs; `filter`:
//!   expressions over columns; `keys`: which rows have them; `plan`: plans that the cache follows;
//!   `stream`: the request for a push stream; `listing`: buckets and pages of listings; `batch`:
//!   the request for a batch as clients write it, and the names that it and the archive use.
//! - `lent`: files that clients on the node's machine read themselves.
//! - `job`: what each job took; `energy`: what the node's machine used.
//! - `metrics`: the node's `/metrics` page, read; `path`: names in paths and queries.
//! - `address`: what `FOREBAY_NODE`, `--node` and `Client(url)` mean.
//! - here: paths, headers and content types.
//!
//! No I/O. When types are parsed, missing fields get defaults and unknown ones are ignored, so that
//! neighbouring releases understand each other.

#![warn(missing_docs)]

mod address;
pub mod batch;
pub mod cache;
pub mod cluster;
pub mod composition;
pub mod dataset;
pub mod energy;
pub mod error;
pub mod filter;
pub mod frame;
pub mod job;
pub mod keys;
pub mod lent;
pub mod listing;
pub mod metrics;
pub mod node;
pub mod path;
pub mod plan;
pub mod stream;

pub use address::{ADDRESSES_MAX, Address, Addresses};
pub use error::{AisFields, ErrorDocument};

/// What a node says about itself: [`node::NodeInfo`].
pub const INFO_PATH: &str = "/v1/forebay/info";
/// What a node serves and how it is doing: [`node::Status`].
pub const STATUS_PATH: &str = "/v1/forebay/status";
/// The cluster that a node is one of, and orders to it: [`cluster::ClusterStatus`],
/// [`cluster::ClusterOrder`].
pub const CLUSTER_PATH: &str = "/v1/forebay/cluster";
/// The same, with what each node says of itself.
pub const CLUSTER_FIGURES_PATH: &str = "/v1/forebay/cluster?figures=true";
/// The cluster's map: who owns what.
pub const CLUSTER_MAP_PATH: &str = "/v1/forebay/cluster/map";
/// An object's metadata and how much of it is in the cache; `/<bucket>/<key>` follows:
/// [`cache::Stat`].
pub const STAT_PATH: &str = "/v1/forebay/stat";
/// Brings objects into the cache: [`cache::Selection`]; the answer is lines of
/// [`cache::WarmEvent`].
pub const WARM_PATH: &str = "/v1/forebay/warm";
/// The pinned objects: [`cache::Pinned`].
pub const PINNED_PATH: &str = "/v1/forebay/pinned";
/// Buckets and listings; a bucket may follow: [`listing::Request`].
pub const BUCKETS_PATH: &str = "/v1/buckets";
/// Batches; a bucket may follow.
pub const BATCH_PATH: &str = "/v1/ml/moss";
/// Opening and describing datasets; an id may follow.
pub const DATASETS_PATH: &str = "/v1/datasets";
/// Rows that are made of those of open datasets: [`composition::Parts`].
pub const COMPOSITIONS_PATH: &str = "/v1/datasets/compositions";
/// Plans that the cache follows; a lease may follow.
pub const PLANS_PATH: &str = "/v1/datasets/plans";
/// The checkpoints on a node's disk; a bucket and a name may follow.
pub const CHECKPOINTS_PATH: &str = "/v1/checkpoints";
/// Push streams: [`stream::StreamRequest`].
pub const STREAMS_PATH: &str = "/v1/datasets/streams";

/// The default port of a node's `http://` address, on which `forebay serve` listens unless told
/// otherwise. `https://` has 443: a node that speaks TLS is one that others reach.
pub const DEFAULT_PORT: u16 = 8080;
/// The default port of an `https://` address.
pub const DEFAULT_TLS_PORT: u16 = 443;

/// The header that carries the id under which the node logs a request.
pub const REQUEST_ID_HEADER: &str = "x-request-id";
/// The header `server` of answers that a node gives before it has looked at a request.
pub const SERVER: &str = "forebay";
/// The content type of one [`frame`].
pub const FRAME_CONTENT_TYPE: &str = "application/vnd.forebay.frame";
/// The content type of a push stream.
pub const FRAMES_CONTENT_TYPE: &str = "application/vnd.forebay.frames";
/// The content type of JSON lines.
pub const LINES_CONTENT_TYPE: &str = "application/x-ndjson";
