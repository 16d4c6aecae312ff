//! How far an opening has got: shared by all who wait for it.

use forebay_protocol::dataset::OpenProgress;
use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// The progress of the opening that one caller waits for. It shows nothing until the caller was let
/// in.
#[derive(Debug, Default)]
pub struct Watched(OnceLock<Arc<Progress>>);

impl Watched {
    /// The progress at this moment; all zero until the caller was let in.
    pub fn now(&self) -> OpenProgress {
        self.0.get().map(|p| p.now()).unwrap_or_default()
    }

    pub(crate) fn is(&self, progress: Arc<Progress>) {
        // A caller waits for only one opening.
        let _ = self.0.set(progress);
    }
}

/// Live counters of one opening.
#[derive(Debug, Default)]
pub struct Progress {
    listed: AtomicU64,
    pages: AtomicU64,
    to_index: AtomicU64,
    indexed: AtomicU64,
    bytes: AtomicU64,
}

impl Progress {
    /// Their values at this moment.
    pub fn now(&self) -> OpenProgress {
        let of = |n: &AtomicU64| n.load(Relaxed);
        OpenProgress {
            listed: of(&self.listed),
            pages: of(&self.pages),
            to_index: of(&self.to_index),
            indexed: of(&self.indexed),
            bytes: of(&self.bytes),
        }
    }

    /// Another node opens it, and is so far.
    pub(crate) fn is(&self, now: &OpenProgress) {
        self.listed.store(now.listed, Relaxed);
        self.pages.store(now.pages, Relaxed);
        self.to_index.store(now.to_index, Relaxed);
        self.indexed.store(now.indexed, Relaxed);
        self.bytes.store(now.bytes, Relaxed);
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
