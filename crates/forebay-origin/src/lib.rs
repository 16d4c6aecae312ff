//! Remote buckets: the [`Origin`] trait, its implementation over `object_store`, and the wrappers that make it well-behaved.
//!
//! The engine sees an `Arc<dyn Origin>` per bucket and nothing else of the world outside. Implementations are stacked, each one thing:
//! the object store itself, then continuation of broken bodies and retries, then the limiter of requests and bytes. Tests put the
//! fault-injecting wrapper in between.
//!
//! Hidden contracts, which every implementation keeps and the conformance suite checks:
//! - a `get` whose `if_match` does not hold fails with `PreconditionFailed`; it never answers with another version;
//! - a body yields exactly `range.end - range.start` bytes or ends with an error: never fewer, never more;
//! - what `put` and `complete_upload` acknowledged is what the next `head` or `get` sees.

mod traits;

pub use traits::*;
