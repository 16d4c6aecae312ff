//! Remote buckets: the [`Origin`] trait, its implementations, and the wrappers that make them
//! well-behaved.
//!
//! The engine sees an `Arc<dyn Origin>` per bucket and nothing else of the outside world.
//! Implementations are stacked, each doing one thing, from the inside: the service itself, the end
//! of its silence, the counters, hedged reads, the limiter of requests and bytes, then retries and
//! continuation of broken bodies (outermost, so that waiting for the next attempt holds no place in
//! the limiter) behind the circuit breaker. Tests insert an origin that fails.
//!
//! Implicit contracts that every implementation keeps and the conformance suite checks:
//! - a `get` whose `if_match` does not hold fails with `PreconditionFailed`; it never answers with
//!   another version;
//! - a body yields exactly `range.end - range.start` bytes or ends with an error: never fewer,
//!   never more;
//! - a range that begins at 0 of an empty object is answered with an empty body, any other range
//!   past the end is `RangeNotSatisfiable`;
//! - what `put` and `complete_upload` acknowledged is what the next `head` or `get` sees;
//! - a copy without attributes keeps those of its source.

#![warn(missing_docs)]

mod assemble;
mod aws;
mod azure;
pub mod body;
mod circuit;
pub mod config;
mod counted;
mod credentials;
mod failure;
#[cfg(test)]
mod fuzz;
mod hedged;
mod hub;
mod limited;
mod local;
mod origins;
mod prefixed;
mod read_only;
mod resilient;
mod retry;
mod s3;
mod timed;
mod traits;
mod transport;
mod walked;
mod web;

pub use aws::Environment;
pub use azure::AzureOrigin;
pub use circuit::Circuit;
pub use config::{OriginConfig, OriginUrl, Secret};
pub use counted::{Counted, Counters, Operation, OperationStats, OriginStats, is_failure};
pub use hedged::{Hedged, Hedging};
pub use hub::HubOrigin;
pub use limited::{Limited, Limiter};
pub use local::{LocalOrigin, crc32c_in_etag};
pub use origins::{Origins, WILDCARD, identity_of_bucket, open, open_in};
pub use prefixed::Prefixed;
pub use resilient::{REPEATABLE_BODY_MAX_BYTES, Resilient};
pub use retry::RetryPolicy;
pub use s3::S3Origin;
pub use timed::Timed;
pub use traits::*;
pub use web::WebOrigin;
