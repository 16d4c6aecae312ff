//! What the store tells of itself.

use forebay_core::HistogramSnapshot;
use std::path::PathBuf;

/// How a directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DirState {
    /// It takes writes.
    Ok = 0,
    /// The file system has no space left. (The cache being full is normal, and `Ok`.)
    Full = 1,
    /// Writes are refused: the file system is read-only, or the process may not write there.
    ReadOnly = 2,
    /// A write failed for any other reason.
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

    /// As it is shown in the status and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            DirState::Ok => "ok",
            DirState::Full => "full",
            DirState::ReadOnly => "read-only",
            DirState::Failing => "failing",
        }
    }
}

/// One cache directory: gauges at this moment, and counters since the store was opened.
#[derive(Clone, Debug)]
pub struct DirStats {
    /// As it was configured.
    pub path: PathBuf,
    /// [`DirConfig::capacity_bytes`](crate::DirConfig::capacity_bytes).
    pub capacity_bytes: u64,
    /// What of the capacity there is room for on the file system at this moment.
    pub effective_bytes: u64,
    /// What may still be written to the file system, by anybody, as it said last.
    pub free_bytes: u64,
    /// Charged for files: never less than their sizes, never more than the capacity.
    pub used_bytes: u64,
    /// Records that can be read.
    pub live_bytes: u64,
    /// Records that can be read.
    pub records: u64,
    /// Segment files.
    pub segments: u64,
    /// The size of the index as it was last written out; 0: there is none.
    pub checkpoint_bytes: u64,
    /// Whether it takes writes, as the last one found.
    pub state: DirState,
    /// Records given up to make room.
    pub evicted_records: u64,
    /// Bytes of those, as they lie in segments.
    pub evicted_bytes: u64,
    /// Copied by the evictor: write amplification.
    pub relocated_bytes: u64,
    /// Bytes of records that were put; checkpoints and what the evictor copied are not here.
    pub written_bytes: u64,
    /// Records that were read and found damaged; each was a miss, or was left behind by the
    /// evictor.
    pub checksum_failures: u64,
    /// Reads that the disk answered with an error; each was a miss, or a segment that was dropped.
    pub read_failures: u64,
    /// Writes that failed.
    pub write_failures: u64,
    /// Reads that waited for the disk, or may have; those of the page cache alone are not here.
    pub read_latency: HistogramSnapshot,
    /// Writes of any size.
    pub write_latency: HistogramSnapshot,
}

/// The whole store at one moment.
#[derive(Clone, Debug, Default)]
pub struct StoreStats {
    /// One for each directory, in the order of the configuration.
    pub dirs: Vec<DirStats>,
    /// Entries of the index: heads, parts and pins.
    pub entries: u64,
    /// RAM that the index takes.
    pub index_bytes: u64,
    /// Pinned names, whether or not anything of them is cached.
    pub pins: u64,
    /// What the pinned objects take when they are cached whole.
    pub pinned_bytes: u64,
    /// Pinned names whose object would take the pins over half of the capacity: cached like any
    /// other.
    pub pins_not_held: u64,
}
