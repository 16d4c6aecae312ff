//! What a store is made of: directories with a size each.

use crate::{
    record::{self, OVERHEAD_MAX_BYTES},
    sources::Sources,
};
use forebay_core::{Error, Result, limits::CHUNK_BYTES, units::format_bytes};
use std::{path::PathBuf, time::Duration};

/// One cache directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirConfig {
    /// Where it is; it is created if missing.
    pub path: PathBuf,
    /// The sizes of all files of the store in this directory never add up to more than this, and to
    /// less if the file system has less room.
    pub capacity_bytes: u64,
}

/// What a store is opened with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    /// The cache directories, 1 to 255; objects are spread over them.
    pub dirs: Vec<DirConfig>,
    /// Size of a segment file; `None`: derived from the capacity (1/256 of it, 2 to 256 MiB,
    /// smaller for small caches).
    pub segment_bytes: Option<u64>,
    /// How often the index is written out, if anything changed.
    pub checkpoint_interval: Duration,
    /// How many appended records ask for an early checkpoint, once they take as many bytes as the
    /// last checkpoint: this bounds what a restart after a crash reads again, and what checkpoints
    /// cost.
    pub checkpoint_records: u64,
    /// What the store leaves free on each file system: if others fill it, the store gives up its
    /// oldest records. `None`: a twentieth of the file system, at most
    /// [`KEEP_FREE_DEFAULT_MAX_BYTES`].
    pub keep_free_bytes: Option<u64>,
    /// Where the objects of each bucket come from.
    pub sources: Sources,
    /// Who this node is in a cluster. `None`: who the directories say, if they do.
    pub node: Option<u64>,
    /// Whether they are told a new one if nobody says who it is.
    pub makes_node: bool,
    /// Whether a directory is emptied if it cannot be read because another version wrote it or its
    /// identity is damaged. Otherwise the store does not open.
    pub discard_incompatible: bool,
    /// How long a directory that refused a write is left alone.
    pub retry_after: Duration,
    /// Whether a thread of the store writes checkpoints and makes room ahead of need.
    pub background: bool,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            dirs: Vec::new(),
            segment_bytes: None,
            checkpoint_interval: Duration::from_secs(300),
            checkpoint_records: 500_000,
            keep_free_bytes: None,
            sources: Sources::default(),
            node: None,
            makes_node: false,
            discard_incompatible: false,
            retry_after: Duration::from_secs(30),
            background: true,
        }
    }
}

/// The most that is kept free on a file system unless configured otherwise.
pub const KEEP_FREE_DEFAULT_MAX_BYTES: u64 = 4 << 30;
/// The part of a file system that is kept free unless configured otherwise.
const KEEP_FREE_SHARE: u64 = 20;

/// How much of a file system of this size must stay free.
pub fn keep_free_of(configured_bytes: Option<u64>, total_bytes: u64) -> u64 {
    configured_bytes
        .unwrap_or_else(|| (total_bytes / KEEP_FREE_SHARE).min(KEEP_FREE_DEFAULT_MAX_BYTES))
}

pub(crate) const SEGMENT_MIN_BYTES: u64 = 4 << 10;
const SEGMENT_DERIVED_MIN_BYTES: u64 =
    record::ALIGN_BYTES * ((CHUNK_BYTES + OVERHEAD_MAX_BYTES) / record::ALIGN_BYTES + 1);
const SEGMENT_MAX_BYTES: u64 = 1 << 30;
/// What is kept free for the identity file, its successor and its copy.
pub(crate) const IDENTITY_RESERVE_BYTES: u64 = 20 << 10;
/// A directory holds at least this many segments.
pub(crate) const SEGMENTS_MIN: u64 = 4;

impl DirConfig {
    /// Whether a store can work with this size; touches no disk.
    ///
    /// # Errors
    /// `Invalid`, with the least that it needs.
    pub fn check(&self) -> Result<()> {
        self.segment_bytes(None).map(drop)
    }

    /// The size of this directory's segments.
    pub(crate) fn segment_bytes(&self, configured: Option<u64>) -> Result<u64> {
        let derived = (self.capacity_bytes / 256)
            .clamp(2 * SEGMENT_DERIVED_MIN_BYTES, 256 << 20)
            .min(self.capacity_bytes / 8)
            .max(SEGMENT_DERIVED_MIN_BYTES);
        let bytes = configured
            .unwrap_or(derived)
            .next_multiple_of(record::ALIGN_BYTES);
        if !(SEGMENT_MIN_BYTES..=SEGMENT_MAX_BYTES).contains(&bytes) {
            return Err(Error::invalid(format!(
                "a segment of {} is outside 4 KiB to 1 GiB",
                format_bytes(bytes)
            )));
        }
        let least = bytes * SEGMENTS_MIN + IDENTITY_RESERVE_BYTES;
        if self.capacity_bytes < least {
            return Err(Error::invalid(format!(
                "cache directory {}: a size of {} is too small",
                self.path.display(),
                format_bytes(self.capacity_bytes)
            ))
            .hint(format!("give it {} or more", format_bytes(least))));
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segment_sizes_follow_the_capacity() {
        let of = |capacity_bytes| {
            DirConfig {
                path: "/c".into(),
                capacity_bytes,
            }
            .segment_bytes(None)
        };
        assert!(of(1 << 20).is_err());
        assert!(of(8 << 20).unwrap() < 2 << 20);
        assert_eq!(of(256 << 20).unwrap(), 2 * SEGMENT_DERIVED_MIN_BYTES);
        assert_eq!(of(1 << 30).unwrap(), 4 << 20);
        assert_eq!(of(1 << 40).unwrap(), 256 << 20);
    }
}
