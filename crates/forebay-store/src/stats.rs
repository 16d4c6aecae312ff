//! What the store reports about itself.

use forebay_core::HistogramSnapshot;
use std::path::PathBuf;

/// The state of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DirState {
    /// It takes writes.
    Ok = 0,
    /// The file system has no space left. (A full cache is normal, and `Ok`.)
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

    /// As the status and metrics show it.
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
    /// As configured.
    pub path: PathBuf,
    /// [`DirConfig::capacity_bytes`](crate::DirConfig::capacity_bytes).
    pub capacity_bytes: u64,
    /// The part of the capacity that there is room for on the file system at this moment.
    pub effective_bytes: u64,
    /// What anybody may still write to the file system, as last measured.
    pub free_bytes: u64,
    /// Charged for files: never less than their sizes, never more than the capacity.
    pub used_bytes: u64,
    /// Bytes of records that can be read.
    pub live_bytes: u64,
    /// Records that can be read.
    pub records: u64,
    /// Segment files.
    pub segments: u64,
    /// The size of the index as last written out; 0: never.
    pub checkpoint_bytes: u64,
    /// Whether it takes writes, as the last write found.
    pub state: DirState,
    /// Records given up to make room.
    pub evicted_records: u64,
    /// Bytes of those, as stored in segments.
    pub evicted_bytes: u64,
    /// Bytes copied by the evictor: write amplification.
    pub relocated_bytes: u64,
    /// Bytes of records that were put; without checkpoints and the evictor's copies.
    pub written_bytes: u64,
    /// Records that were read and found damaged; each was a miss, or the evictor left it behind.
    pub checksum_failures: u64,
    /// Reads that the disk answered with an error; each was a miss, or a segment that was dropped.
    pub read_failures: u64,
    /// Writes that failed.
    pub write_failures: u64,
    /// Reads that waited for the disk, or may have; without those served from the page cache alone.
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
    /// What the pinned objects take when cached whole.
    pub pinned_bytes: u64,
    /// Pinned names whose object would take the pins over half of the capacity: such objects are
    /// cached like any other.
    pub pins_not_held: u64,
}
