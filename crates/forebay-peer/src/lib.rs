//! Nodes that ask each other.
//!
//! - `message.rs`: what travels between two nodes.
//! - `answer.rs`: [`Answers`] answers the questions of other nodes.
//!   What operators want of a whole cluster goes the same way ([`Operator`]).
//! - `link.rs`: the connections to one peer, and whether it is worth asking now.
//! - `hedge.rs`: peers that answer slowly.
//! - `resolve.rs`: addresses of names, each looked up at most once at a time.
//! - `cluster.rs`: [`Cluster`], this node's view of the others and its links to them.
//! - `telling.rs`: all nodes are told of a write before it is acknowledged.
//! - `buckets.rs`: [`ClusterBuckets`], which puts the cluster between the engine and its origins.
//! - `read.rs`: a read through the cluster, source after source.
//! - `together.rs`: many small entries of a batch, asked for and answered together.
//! - `hot.rs`: units that many nodes want at once.
//! - `advice.rs`: [`ClusterAdvice`], by which a store keeps what its node owns before what others
//!   own.
//! - `handover.rs`: [`HandOver`] takes over what former owners have of the slots that a node gained;
//!   `give.rs`: what these give, and `packed.rs`: how it travels.
//! - `mirror.rs`: copies of what other nodes keep, where there is to be more than one.
//!
//! Peers carry no users: the node that a client speaks to has authorized it. Only nodes of the
//! cluster may be let in.
//!
//! # Invariants
//!
//! *One hop*: nobody who was asked asks another node to fetch (`forebay_engine::Buckets`). *No wait
//! without a sign of life*: a node that works on an answer says so several times a second; one that
//! is silent is given up, and the read goes on elsewhere from the byte where it stood. Bytes are of
//! the version that was asked for, with a checksum for each frame.

#![warn(missing_docs)]

mod advice;
mod answer;
mod buckets;
mod cluster;
#[cfg(test)]
mod fuzz;
mod give;
mod handover;
mod hedge;
mod hot;
mod link;
mod message;
mod mirror;
mod packed;
mod read;
mod resolve;
mod telling;
mod together;

pub use advice::ClusterAdvice;
pub use answer::{Answers, Operator};
pub use buckets::ClusterBuckets;
pub use cluster::{Cluster, Greeting, Identity, OPERATED_MAX_BYTES};
pub use handover::{HandOver, HandOverStatus};
pub use link::{Dial, Io, LinkStatus, TcpDial, Timing, TlsDial};
pub use mirror::CopiesStatus;
pub use resolve::addresses_of;
pub use telling::{Coherence, Leases, Writes, boot_time};
