//! The real binary against a real node: `forebay serve` over a local directory, in temporary
//! directories, on ports that the system picks.

mod bad_input;
mod bench;
mod cache;
mod cluster;
mod objects;
mod serve;
mod support;
