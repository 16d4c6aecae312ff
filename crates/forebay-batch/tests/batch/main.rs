//! What batches promise, against a model and through hostile requests.

mod batch;
mod fuzz;
#[path = "../../../../tests/fuzz/harness.rs"]
mod harness;
mod model;
