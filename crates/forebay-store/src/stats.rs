//! What the store tells of itself.

use forebay_core::HistogramSnapshot;
use std::path::PathBuf;

/// How a directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DirState {
    Ok = 0,
    /// The file system has no space left. (The cache being full is normal, and `Ok`.)
    Full = 1,
    ReadOnly = 2,
    Failing = 3,
}

impl DirState {
    pub(crate) fn from_u8(n: u8) -> Self {
        match n {
            0 => DirState::Ok,
            1 => DirState::Full,
            2 => DirState::ReadOnly,
            _ => DirState::Failing,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            DirState::Ok => "ok",
            DirState::Full => "full",
            DirState::ReadOnly => "read-only",
            DirState::Failing => "failing",
        }
    }
}

#[derive(Clone, Debug)]
pub struct DirStats {
    pub path: PathBuf,
    pub capacity_bytes: u64,
    /// What of the capacity there is room for on the file system at this moment.
    pub effective_bytes: u64,
    /// What may still be written to the file system, by anybody, as it said last.
    pub free_bytes: u64,
    /// Charged for files: never less than their sizes, never more than the capacity.
    pub used_bytes: u64,
    /// Records that can be read.
    pub live_bytes: u64,
    pub records: u64,
    pub segments: u64,
    pub checkpoint_bytes: u64,
    pub state: DirState,
    pub evicted_records: u64,
    pub evicted_bytes: u64,
    /// Copied by the evictor: write amplification.
    pub relocated_bytes: u64,
    pub written_bytes: u64,
    pub checksum_failures: u64,
    pub read_failures: u64,
    pub write_failures: u64,
    /// Reads that waited for the disk, or may have; those of the page cache alone are not here.
    pub read_latency: HistogramSnapshot,
    pub write_latency: HistogramSnapshot,
}

#[derive(Clone, Debug, Default)]
pub struct StoreStats {
    pub dirs: Vec<DirStats>,
    /// Entries of the index: heads, parts and pins.
    pub entries: u64,
    /// RAM that the index takes.
    pub index_bytes: u64,
    pub pins: u64,
    /// What the pinned objects take when they are cached whole.
    pub pinned_bytes: u64,
    /// Pinned names whose object would take the pins over half of the capacity: cached like any
    /// other.
    pub pins_not_held: u64,
}
