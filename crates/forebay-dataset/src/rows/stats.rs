//! Counters of reading rows. They only grow; what is cached at the moment is asked of the cache.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Live counters.
        #[derive(Debug, Default)]
        pub struct RowsStats { $( $(#[$doc])* pub $name: AtomicU64, )* }

        /// Their values at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct RowsSnapshot {
            $( $(#[$doc])* pub $name: u64, )*
            /// Decoded blocks in memory.
            pub cached_blocks: u64,
            /// What they take.
            pub cached_bytes: u64,
        }

        impl RowsStats {
            pub(super) fn snapshot(&self) -> RowsSnapshot {
                RowsSnapshot { $( $name: self.$name.load(Relaxed), )* ..Default::default() }
            }
        }
    };
}

counters! {
    /// Requests for rows that were answered.
    requests,
    /// Requests that failed or were refused.
    failed,
    /// Rows in answers.
    rows,
    /// Bytes of rows in answers.
    bytes,
    /// Blocks that were decoded whole.
    blocks_decoded,
    /// Blocks of which some rows were decoded.
    blocks_read_in_part,
    /// Reads of some rows of a block that were decoded with those of another request.
    parts_joined,
    /// Blocks that a request found decoded.
    blocks_reused,
    /// Ranges of blocks that came from an origin.
    ranges_fetched,
    /// Time until an answer was there, over all requests.
    read_ns,
    /// Time that bytes of blocks were waited for, over all blocks.
    fetch_ns,
    /// Time that was spent decoding blocks.
    decode_ns,
    /// Time that was spent putting rows in order.
    gather_ns,
}

pub(super) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Relaxed);
}
