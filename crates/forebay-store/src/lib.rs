//! The local cache on disks: self-validating records in append-only segments, an in-memory index,
//! eviction, pins.
//!
//! # How it works
//!
//! Everything is a *record* ([`record`]) in the log of a directory: an object's head (its meta, and
//! its bytes if it is small), a *part* of one version of an object (a chunk, or derived data), a
//! tombstone, a pin. Records are appended to *segment* files. The index in RAM says where the
//! newest record of each key lies, in 40 bytes; it is derived from the log, written out now and
//! then ([`checkpoint`]) and rebuilt after a crash ([`recover`]). Space is freed by whole segments
//! ([`evict`]). What another node is to have is found by a pass over the records ([`walk`]).
//!
//! # What it promises
//!
//! - **Bytes are those that were put**, under that name and version and from that origin, or
//!   absent. Each block is verified when it leaves the disk; damage is a miss and increments a
//!   counter.
//! - **Never over the limit**: the sizes of all files of a directory never add up to more than its
//!   capacity; space is charged before it is written.
//! - **Never more than there is room for**: if the file system is smaller than the capacity, or
//!   others fill it, the oldest records are given up, and the cache grows again when there is room.
//! - **`kill -9` at any moment** loses at most what was not yet appended, and never brings back
//!   what was removed or replaced.
//! - **After an unclean restart of the machine** (the boot id differs from the stored one and there
//!   is no mark of a clean close) appended tombstones may be lost with the page cache. Every entry
//!   then has a validation time of 0: it must be revalidated at the origin before it is used. The
//!   same holds for a directory that was absent in the store's last run, is read-only at the start,
//!   or missed a tombstone, or could not sync one of its files, because it failed.
//! - **A failing disk is not an error of the store**: puts return an error, and the caller passes
//!   the data through; other directories are used meanwhile.
//! - **Memory**: the index, and one read buffer of at most 256 KiB for each thread.
//!
//! # Who must do what
//!
//! If a put begins before a [`Store::remove`] of the same name and ends after it, the put is
//! dropped silently. A `put_head` that fails also drops the older head, which is outdated. Parts
//! are found by version; the caller gets the version from the head.

#![warn(missing_docs)]

mod advice;
mod checkpoint;
mod codec;
mod config;
mod dir;
pub mod disk;
mod evict;
pub mod faults;
mod identity;
mod index;
mod inner;
mod key;
mod pins;
mod read;
mod record;
mod recover;
#[cfg(test)]
mod schedules;
mod segment;
mod sources;
mod stats;
mod store;
mod sync;
mod timed;
mod walk;
mod worker;

pub use advice::{Advisor, Cached, NextUse};
pub use codec::{decode as decode_meta, encode as encode_meta};
pub use config::{DirConfig, KEEP_FREE_DEFAULT_MAX_BYTES, StoreConfig, keep_free_of};
pub use key::Part;
pub use pins::{NewPin, PinnedLater};
pub use read::{Wait, WouldWait};
pub use record::BLOCK_BYTES;
pub use sources::Sources;
pub use stats::{DirState, DirStats, StoreStats};
pub use store::{Appended, Head, Peek, Store};
pub use walk::{Held, HeldAs, Step, Walk};
