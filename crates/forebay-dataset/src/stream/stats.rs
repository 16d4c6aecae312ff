//! Counters of streams: for the node, and for each connection.

use crate::Shares;
use forebay_core::request::{self, Cost};
use serde_json::{Value, json};
use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// The counters of a node. All but `open` only grow.
#[derive(Debug, Default)]
pub struct StreamStats {
    /// Connections that are open now.
    pub open: AtomicI64,
    /// Connections that were opened.
    pub opened: AtomicU64,
    /// Connections that were refused because there was no room for their window.
    pub refused: AtomicU64,
    /// Connections that ended with an error frame.
    pub failed: AtomicU64,
    /// Steps that were sent.
    pub steps: AtomicU64,
    /// Rows that were sent.
    pub rows: AtomicU64,
    /// Bytes of frames that were sent.
    pub bytes: AtomicU64,
    /// Total time of reading steps.
    pub read_us: AtomicU64,
    /// Total time of putting steps into frames.
    pub frame_us: AtomicU64,
    /// Time that connections had nothing to send, because it was being read.
    pub wait_us: AtomicU64,
    /// Time that connections had a full window, because their receiver or the line was slower.
    pub socket_us: AtomicU64,
    /// Blocks that were made ready before a step requested them.
    pub blocks_ahead: AtomicU64,
    /// Of those, blocks that had to be fetched or decoded for it.
    pub blocks_ahead_cold: AtomicU64,
    /// How often there was no memory to go ahead.
    pub ahead_busy: AtomicU64,
}

/// One open connection: counts for itself and for the node.
pub(super) struct Open {
    node: Arc<StreamStats>,
    own: StreamStats,
}

impl Open {
    pub fn new(node: Arc<StreamStats>) -> Self {
        node.open.fetch_add(1, Relaxed);
        node.opened.fetch_add(1, Relaxed);
        Open {
            node,
            own: StreamStats::default(),
        }
    }

    fn add(&self, counter: fn(&StreamStats) -> &AtomicU64, n: u64) {
        counter(&self.own).fetch_add(n, Relaxed);
        counter(&self.node).fetch_add(n, Relaxed);
    }

    pub fn sent(&self, rows: u64, bytes: u64) {
        self.add(|s| &s.steps, 1);
        self.add(|s| &s.rows, rows);
        self.add(|s| &s.bytes, bytes);
    }

    pub fn made(&self, read: Duration, frame: Duration) {
        self.add(|s| &s.read_us, read.as_micros() as u64);
        self.add(|s| &s.frame_us, frame.as_micros() as u64);
    }

    pub fn waited(&self, took: Duration) {
        self.add(|s| &s.wait_us, took.as_micros() as u64);
    }

    pub fn was_full(&self, took: Duration) {
        self.add(|s| &s.socket_us, took.as_micros() as u64);
    }

    pub fn failed(&self) {
        self.add(|s| &s.failed, 1);
    }

    /// The progress, for the receiver. `shares` says how the time of reading was divided.
    pub fn json(&self, shares: Shares) -> Value {
        let seconds = |us: &AtomicU64| us.load(Relaxed) as f64 / 1e6;
        let (own, read) = (&self.own, seconds(&self.own.read_us));
        let tally = request::tally().unwrap_or_default();
        json!({
            "memory_bytes": tally.get(Cost::MemoryBytes),
            "disk_bytes": tally.get(Cost::DiskBytes),
            "peer_bytes": tally.get(Cost::PeerBytes),
            "origin_bytes": tally.origin_bytes(),
            "steps": own.steps.load(Relaxed),
            "rows": own.rows.load(Relaxed),
            "bytes": own.bytes.load(Relaxed),
            "read_seconds": read,
            "origin_seconds": read * shares.origin,
            "disk_seconds": read * shares.disk,
            "decode_seconds": read * shares.decode,
            "frame_seconds": seconds(&own.frame_us),
            "wait_seconds": seconds(&own.wait_us),
            "socket_seconds": seconds(&own.socket_us),
        })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.node.open.fetch_sub(1, Relaxed);
    }
}
