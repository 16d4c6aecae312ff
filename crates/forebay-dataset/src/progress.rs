//! How far an opening is: shared by all who wait for it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Live numbers of one opening.
#[derive(Debug, Default)]
pub struct Progress {
    listed: AtomicU64,
    pages: AtomicU64,
    to_index: AtomicU64,
    indexed: AtomicU64,
    bytes: AtomicU64,
}

/// Their values at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ProgressNow {
    /// Files found so far.
    pub listed: u64,
    /// Pages of listings that came.
    pub pages: u64,
    /// Files whose index has to be read; 0 while the listing goes on.
    pub to_index: u64,
    pub indexed: u64,
    /// Bytes that were read for it.
    pub bytes: u64,
}

impl Progress {
    pub fn now(&self) -> ProgressNow {
        let of = |n: &AtomicU64| n.load(Relaxed);
        ProgressNow {
            listed: of(&self.listed),
            pages: of(&self.pages),
            to_index: of(&self.to_index),
            indexed: of(&self.indexed),
            bytes: of(&self.bytes),
        }
    }

    pub(crate) fn listed(&self, files: usize) {
        self.listed.fetch_max(files as u64, Relaxed);
    }

    pub(crate) fn pages(&self, n: u64) {
        self.pages.fetch_add(n, Relaxed);
    }

    pub(crate) fn to_index(&self, files: usize) {
        self.to_index.store(files as u64, Relaxed);
    }

    pub(crate) fn indexed(&self, bytes: u64) {
        self.indexed.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }
}
