//! The client's end of the node's protocol, once: the command line, the Python package and tools
//! reach nodes through this crate.
//!
//! - `client.rs`: [`Client`] sends requests to one node over connections that it keeps, finds the
//!   node's Unix socket, and repeats what the node refused for the moment.
//! - `dial.rs`: a connection over TCP, TLS or a Unix socket.
//! - `answer.rs`: [`Answer`], a success whose body is still to be read, piece by piece or by
//!   [`Lines`].
//! - [`archive`]: the tar that a batch comes in.
//! - `failure.rs`: [`Failure`], how a call can go wrong: each caller turns it into errors of its
//!   own, with hints that name its own settings.
//! - [`stream`]: the receiving end of push streams.
//!
//! What is said, as types, is in `forebay-protocol`; nothing here knows Python or the server.
//!
//! Invariant: an answer that was cut is an error, never a shorter answer; and each wait has a limit
//! ([`Timeouts`]).

#![warn(missing_docs)]

mod answer;
pub mod archive;
mod client;
mod dial;
mod failure;
pub mod stream;

pub use answer::{Answer, Lines};
pub use client::{Call, Client, Settings, StartNode, Timeouts, object_path};
pub use dial::Io;
pub use failure::{Failure, Result};
