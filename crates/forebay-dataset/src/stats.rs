//! Counters of datasets. They only grow.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// Its value now.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// What the registry counts.
#[derive(Debug, Default)]
pub struct DatasetStats {
    /// Openings that produced a dataset.
    pub opened: Counter,
    /// Openings that failed.
    pub failed: Counter,
    /// Callers that waited for an opening under way.
    pub joined: Counter,
    /// Total duration of openings, microseconds.
    pub open_us: Counter,
    /// Files whose index was read from the origin.
    pub files_indexed: Counter,
    /// Files whose index was known.
    pub files_reused: Counter,
    /// Bytes read for indexes.
    pub indexed_bytes: Counter,
    /// Files left out because they are damaged.
    pub files_skipped: Counter,
    /// Datasets read back from disk.
    pub loaded: Counter,
    /// Datasets that another node of a cluster opened for this one.
    pub opened_at_home: Counter,
    /// Indexes that could not be written to disk.
    pub keep_failed: Counter,
}
