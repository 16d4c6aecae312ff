//! The project's load generator, and the proxy that puts a server at a distance.
//!
//! [`command`] is `forebay bench`: clients in a closed loop, compared with the ceilings of the
//! machine that they run on. From the wire upwards: `wire` sends requests and receives answers,
//! `tar` walks a batch's answer, `load` runs clients against a clock, `measure` turns the results
//! into figures, next to those of `ceiling`, and [`report`] and `compare` show them. `site` is what
//! they run against: `data` that was written, and `child` processes. Server and clients are
//! different processes, so that `usage` can tell whose CPU time it was. [`distance`] is `forebay
//! distance`.
//!
//! Invariant: only what was checked is counted. An answer with a wrong name, order, length or end
//! is an error, not a figure; before the clock runs, every byte has been compared once.

#![warn(missing_docs)]

mod ceiling;
mod child;
mod cold;
pub mod command;
mod compare;
mod data;
pub mod distance;
mod existing;
mod fan;
mod follow;
mod histogram;
mod index;
mod interrupt;
mod load;
mod measure;
pub mod report;
mod request;
mod sign;
mod site;
mod suite;
mod table;
mod usage;
mod wire;
