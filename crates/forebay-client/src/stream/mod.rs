//! The receiving end of push streams.
//!
//! A job names its plan once; nodes compute it and send finished batches, step after step, without
//! a request for each. A [`Stream`] receives them over several connections, from one node or
//! several, and yields them in order.
//!
//! - `stream.rs`: the lanes of a stream, and redistributing the steps when there are more of them.
//! - `lane.rs`: one lane: every `of`-th step over one connection at a time; reconnecting.
//! - `shelf.rs`: what was received but not yet yielded: its order, and its limit in bytes.
//! - `body.rs`, `memory.rs`: from the socket to memory aligned to 64 bytes, without a copy in
//!   between.
//! - `grow.rs`: how many connections. `nodes.rs`: which node. `open.rs`: what a node is told that does
//!   not know the datasets. `stats.rs`: where the time went.
//!
//! Invariants: steps are yielded in order, each once, whatever happens to connections and nodes; a
//! step is yielded only if its checksum is right; what is received but not yet yielded is limited
//! in bytes, and a reader that stops makes the nodes stop.

mod body;
mod grow;
mod lane;
mod memory;
mod nodes;
mod open;
mod receiver;
mod shelf;
mod stats;

pub use open::{Opening, Openings};
pub use receiver::{Options, Stream};
pub use shelf::Received;
pub use stats::Stats;
