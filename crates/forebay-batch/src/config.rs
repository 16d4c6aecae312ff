//! GetBatch settings for operators.

use forebay_core::limits;
use std::time::Duration;

/// Limits and waits of batches. The paper names the same knobs in section 2.4.3.
#[derive(Clone, Debug)]
pub struct BatchConfig {
    /// Most entries of one request.
    pub max_entries: usize,
    /// Largest request body, bytes.
    pub max_body_bytes: usize,
    /// Soft errors that one request may have under continue-on-error before its first byte is sent;
    /// after that, any number of entries may become placeholders.
    pub soft_errors_max: u32,
    /// How long a streamed batch that tolerates errors stays silent before it is cut, for clients
    /// that do not say that they know what a cut is.
    pub cut_pause: Duration,
    /// Entries that are fetched ahead of the cursor.
    pub read_ahead_entries: usize,
    /// Size of one outgoing buffer, bytes.
    pub frame_bytes: usize,
    /// How long one entry may take to deliver its first bytes: longer than the origin takes to
    /// fail.
    pub entry_timeout: Duration,
    /// Attempts for an entry whose object changes while it is read, or that the node has no room
    /// for, including the first.
    pub attempts: u32,
    /// Ready threads per core of the machine, from which on batches are slowed down. 0: never.
    pub throttle_ready_per_core: u32,
    /// Share of the last 10 s in which all work waited for disks, in percent, from which on batches
    /// are slowed down. 0: never.
    pub throttle_disk_percent: u32,
    /// How much of its time a batch pauses while the node is under pressure, percent.
    pub throttle_percent: u32,
}

impl BatchConfig {
    /// Memory of one batch: the buffer that is being filled and one that the connection still
    /// sends. Each may end with an entry as large as two frames.
    pub fn window_bytes(&self) -> u64 {
        (self.frame_bytes as u64).saturating_mul(6)
    }
}

impl Default for BatchConfig {
    fn default() -> Self {
        Self {
            max_entries: limits::BATCH_ENTRIES_MAX,
            max_body_bytes: limits::BATCH_BODY_MAX_BYTES,
            soft_errors_max: limits::BATCH_SOFT_ERRORS_DEFAULT,
            cut_pause: Duration::from_secs(limits::BATCH_CUT_PAUSE_SECS),
            read_ahead_entries: limits::BATCH_READ_AHEAD_ENTRIES,
            frame_bytes: limits::BATCH_FRAME_BYTES,
            entry_timeout: Duration::from_secs(90),
            attempts: 5,
            throttle_ready_per_core: 16,
            throttle_disk_percent: 90,
            throttle_percent: 20,
        }
    }
}
