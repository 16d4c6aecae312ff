//! Listeners and wiring: the S3 front, the batch and object APIs, admin, metrics, authentication.
//!
//! The path of a request: a listener (`listener.rs`) accepts a connection over TCP or the Unix
//! socket; each request gets an id, a place among those in flight, and a log line (`service.rs`);
//! `/v1/…` is the batch and object API (`v1/`), everything else is S3 (`s3/`). Both read and write
//! through the engine, and batches never pass the S3 library. `node.rs` puts the parts together, as
//! `config/` says.
//!
//! Invariants:
//! - an answer that cannot be finished ends in an error of its body, and its connection with it: a
//!   cut answer looks cut;
//! - `X-Cache` and its counter are set in one place;
//! - what a request's key may not do is refused before anything is looked up;
//! - what the node does not offer is answered with 501, never mistaken for something else;
//! - connections, requests in flight, bodies of control requests, remembered uploads and waits are
//!   bounded by the configuration.

#![warn(missing_docs)]

mod admin;
mod app;
mod auth;
mod body;
mod browser;
mod buckets;
pub mod config;
#[cfg(test)]
mod docs;
mod figures;
#[cfg(test)]
mod fuzz;
mod io;
mod jobs;
mod linger;
mod listener;
mod logging;
pub mod metrics;
mod node;
mod note;
mod object;
mod openings;
mod operate;
mod pace;
mod peer_certificates;
mod peer_threads;
mod peers;
mod pins;
mod places;
mod process;
mod refuse;
mod reload;
mod request_body;
mod request_id;
mod s3;
mod service;
mod socket;
mod tls;
mod uploads;
mod url;
mod v1;
mod wire;

pub use buckets::OriginBuckets;
pub use config::Config;
pub use logging::init as init_logging;
pub use node::{Embedded, Node, embedded};
pub use process::raise_open_files;

/// The version of this program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The name of the Unix socket in a cache directory.
pub const SOCKET_NAME: &str = "forebay.sock";
