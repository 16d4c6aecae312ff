//! Names, byte ranges, limits, error kinds, clock: what every layer shares. No I/O.
//!
//! Each other crate of the workspace depends on this one and this one on none of them. What is here
//! is plain data and pure functions, so that parsers, caches and protocols agree on what a name is,
//! what a version is, and what an error means.

#![warn(missing_docs)]

pub mod budget;
pub mod checksum;
pub mod clock;
pub mod counters;
pub mod error;
pub mod format;
pub mod histogram;
pub mod limits;
pub mod meta;
pub mod name;
pub mod range;
pub mod request;
pub mod sync;
pub mod threads;
pub mod units;

pub use budget::{MemoryBudget, Reservation};
pub use checksum::{crc32c, crc32c_append};
pub use clock::{Clock, ManualClock, Onward, SystemClock};
pub use error::{Error, ErrorKind, Result};
pub use format::Format;
pub use histogram::{Histogram, HistogramSnapshot};
pub use meta::{Attributes, CacheStatus, ObjectMeta, VersionId, is_etag_of_size_alone, made_etag};
pub use name::ObjectName;
pub use range::ByteRange;
