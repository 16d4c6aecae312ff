//! The paper's measures of GetBatch (section 2.4.4), and ours.

use forebay_core::counters;

pub(crate) use forebay_core::counters::add;

counters! {
    BatchStats => BatchSnapshot {
        /// Completed batches (`getbatch_n`).
        batches,
        /// Whole objects, and ranges of them, delivered (`getbatch_obj_n`).
        objects,
        /// Archive members, and ranges of them, delivered (`getbatch_file_n`).
        members,
        /// Their bytes (`getbatch_obj_size`).
        object_bytes,
        /// Their bytes (`getbatch_file_size`).
        member_bytes,
        /// Time that cursors waited for an entry to come from elsewhere, nanoseconds
        /// (`getbatch_rxwait_seconds`).
        wait_ns,
        /// Time that batches were slowed down on purpose, nanoseconds
        /// (`getbatch_throttle_seconds`).
        throttle_ns,
        /// Entries answered with a placeholder (`err_soft_getbatch_n`).
        errors_soft,
        /// Batches that failed: refused, answered with an error, or cut (`err_getbatch_n`).
        errors_hard,
        /// Batches refused for lack of memory.
        refused,
        /// Batches cut after their first byte.
        cut,
        /// Batches that were sent to the node that owns most of their entries.
        redirected,
        /// Second and later attempts for an entry.
        recoveries,
        /// Entries that failed after all attempts.
        recoveries_failed,
        /// Batches in flight at this moment (a gauge).
        in_flight,
        /// Bytes of answers, including headers and padding.
        bytes_sent,
        /// Time from the request to the last buffer, nanoseconds, over completed batches.
        duration_ns,
    }
}
