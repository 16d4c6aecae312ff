//! The only client of the node's protocol: the command line, the Python package and tools all reach
//! nodes through this crate.
//!
//! - `client.rs`: [`Client`] sends requests to one node or whichever of several answers, and repeats
//!   what was refused temporarily. `nodes.rs`: which node that is; `node.rs`: the connections to one,
//!   kept, over its Unix socket if it is on this machine.
//! - `owners.rs`: [`Owners`], whom to ask for which entry of a batch where the nodes are a cluster.
//!   `merged.rs`: [`Merged`], what they answer, as one archive.
//! - `dial.rs`: a connection over TCP, TLS or a Unix socket.
//! - `answer.rs`: [`Answer`], a success whose body is read piece by piece or by [`Lines`], and
//!   [`Rest`], what is left of one that breaks off.
//! - `borrowed.rs`: [`Borrowed`], a file that a node on this machine lends.
//! - [`archive`]: the tar that a batch comes in.
//! - `failure.rs`: [`Failure`], how a call can fail: each caller turns it into its own errors, with
//!   hints that name its own settings.
//! - [`stream`]: the receiving end of push streams.
//!
//! The types of the protocol are in `forebay-protocol`; nothing here knows Python or the server.
//!
//! Invariant: an answer that was cut is an error, never a shorter answer; and every wait has a
//! limit ([`Timeouts`]).

#![warn(missing_docs)]

mod answer;
pub mod archive;
mod borrowed;
mod client;
mod dial;
mod failure;
mod merged;
mod node;
mod nodes;
mod owners;
pub mod stream;

pub use answer::{Answer, Lines, Rest};
pub use borrowed::Borrowed;
pub use client::{Call, Client, Settings, StartNode, Timeouts, object_path};
pub use dial::Io;
pub use failure::{Failure, Result};
pub use merged::Merged;
pub use nodes::Resolve;
pub use owners::Owners;
