//! What the tests of several crates share; no shipped code depends on it.
//!
//! - [`Faulty`]: an origin that fails when a test says so.
//! - [`servers`]: real S3, GCS, Azure and web servers on free ports; [`Scripted`] and
//!   [`AwsServices`] give answers that real services cannot be made to give.
//! - [`conformance`]: what every origin must do.
//! - [`certificates`]: from a CA of a test's own.
//! - [`engine`]: an engine over an origin in memory.
//! - [`memory`]: how much this process took at most.
//! - [`seeded`]: randomized tests that replay from a seed.

#![warn(missing_docs)]

mod aws_services;
pub mod certificates;
pub mod conformance;
pub mod engine;
mod faulty;
pub mod memory;
mod scripted;
pub mod seeded;
pub mod servers;

pub use aws_services::{AwsServices, Issued, Recorded, Trouble};
pub use faulty::{Distance, Fault, Faults, Faulty, Hook};
pub use scripted::{Reply, Scripted};
