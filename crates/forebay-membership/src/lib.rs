//! Where a cluster's map comes from, and how a node becomes a member.
//!
//! - `source.rs`: [`Source`], as operators write it: a file, a DNS name, etcd.
//! - `etcd.rs`: what lies in etcd about a cluster.
//! - `driver.rs`: [`Driver`] keeps a node a member, and its map the newest.
//!
//! Which map comes next is decided in `forebay_cluster::Membership`, without I/O. The map in a file
//! is an operator's, and nobody joins it: the server reads it.

#![warn(missing_docs)]

mod driver;
mod etcd;
mod source;

pub use driver::{Driver, Joining, Report, alone};
pub use etcd::{EtcdAccess, Registration};
pub use source::Source;
