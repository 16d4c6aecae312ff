//! What happened to checkpoints.

use std::sync::atomic::AtomicU64;

/// Counters since the node started.
#[derive(Debug, Default)]
pub struct StageStats {
    /// Checkpoints that were begun.
    pub begun: AtomicU64,
    /// Checkpoints that were committed.
    pub staged: AtomicU64,
    /// Checkpoints that became durable.
    pub durable: AtomicU64,
    /// Checkpoints that were given up: by their writer, or because it was not heard of.
    pub abandoned: AtomicU64,
    /// Attempts to flush a checkpoint that failed; each is made again.
    pub failures: AtomicU64,
    /// Checkpoints that were not durable by their deadline.
    pub late: AtomicU64,
    /// Files that were refused because there was no room.
    pub refused: AtomicU64,
    /// Bytes of files that were staged.
    pub staged_bytes: AtomicU64,
    /// Bytes that origins acknowledged.
    pub flushed_bytes: AtomicU64,
    /// Bytes that were read from staged files and sent.
    pub read_bytes: AtomicU64,
    /// Staged files that were lent to clients on this machine, which read them themselves.
    pub lent: AtomicU64,
}

/// Checkpoints at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct StageGauges {
    /// Those whose files are arriving.
    pub staging: usize,
    /// Those that are on disk and wait for others of their name, or for their turn.
    pub waiting: usize,
    /// Those that are on their way to the origin.
    pub flushing: usize,
    /// Those whose last attempt failed, and which are tried again.
    pub failed: usize,
    /// Those that are durable and still on disk.
    pub warm: usize,
    /// Bytes on disk that the origin does not have as checkpoints yet.
    pub pending_bytes: u64,
    /// Bytes on disk of those that are durable.
    pub warm_bytes: u64,
    /// Those that are on their way and past their deadline.
    pub overdue: usize,
    /// Those of which this node's disks do not have all that the origin lacks.
    pub lost: usize,
    /// Seconds since the commit of the oldest that is not durable; 0: all are.
    pub oldest_seconds: f64,
}
