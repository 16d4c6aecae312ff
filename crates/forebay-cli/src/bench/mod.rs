//! `forebay bench`: a closed-loop load generator, beside the ceilings of the machine that it runs
//! on.
//!
//! From the wire upwards: [`wire`] sends requests and receives answers, [`tar`] walks a batch's
//! answer, [`load`] runs clients against a clock, [`measure`] makes figures of it beside those of
//! [`ceiling`], [`report`] and [`compare`] show them. [`site`] is what they run against: [`data`]
//! that was written, and [`child`] processes. Server and clients are different processes, so that
//! [`usage`] can tell whose CPU time it was.
//!
//! Invariant: nothing is counted that was not checked. An answer with a wrong name, order, length
//! or end is an error, not a figure; before the clock runs, every byte has been compared once.

pub mod ceiling;
pub mod child;
pub mod cold;
pub mod compare;
pub mod data;
pub mod existing;
pub mod fan;
pub mod follow;
pub mod histogram;
pub mod index;
pub mod interrupt;
pub mod load;
pub mod measure;
pub mod report;
pub mod request;
pub mod sign;
pub mod site;
pub mod suite;
pub mod table;
pub mod tar;
pub mod usage;
pub mod wire;
