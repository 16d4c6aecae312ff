//! Counters of reading rows. They only grow; the cache itself reports its present contents.

use super::Rows;
use forebay_core::counters;

pub(super) use forebay_core::counters::add;

counters! {
    RowsStats => RowsSnapshot {
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
        /// Reads of some rows of a block that were decoded together with those of another request.
        parts_joined,
        /// Blocks that a request found already decoded.
        blocks_reused,
        /// Blocks that were laid out on the disk, decoded, row by row.
        blocks_laid,
        /// Their bytes.
        laid_bytes,
        /// Rows that were read from such blocks.
        rows_laid,
        /// Such blocks that had been lost, wholly or in part, when their rows were wanted.
        laid_lost,
        /// Decodings of a block after which at least as many rows were kept in memory, because an order reads
        /// them soon, as were asked for.
        soon_blocks,
        /// The other decodings of some rows of a block.
        asked_blocks,
        /// Rows that were kept so.
        soon_kept,
        /// Rows that were read from there.
        soon_read,
        /// Ranges of blocks that came from an origin.
        ranges_fetched,
        /// Time until an answer was ready, over all requests.
        read_ns,
        /// Time spent waiting for bytes of blocks, over all blocks, and for what opens their files.
        fetch_ns,
        /// Time spent decoding blocks.
        decode_ns,
        /// Time spent putting rows in order.
        gather_ns,
    }
    asked {
        /// Decoded blocks in memory.
        cached_blocks,
        /// Their memory.
        cached_bytes,
        /// Memory of rows that are read soon.
        soon_bytes,
    }
}

/// A snapshot of a node's reading counters, to measure from.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    rows: RowsSnapshot,
    bytes_from_origin: u64,
}

/// How the time of reading was divided. The remainder was spent putting rows in order.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shares {
    /// Waiting for bytes, if any came from an origin meanwhile.
    pub origin: f64,
    /// Waiting for bytes, if all of them came from the local disk.
    pub disk: f64,
    /// Decoding blocks.
    pub decode: f64,
}

impl Rows {
    /// The counters now, for a later [`Rows::shares_since`].
    pub fn moment(&self) -> Moment {
        Moment {
            rows: self.stats(),
            bytes_from_origin: self.engine().stats().snapshot().bytes_from_origin,
        }
    }

    /// From the node's counters, which all readers share: it says how the time of reading is
    /// divided, not how much reading there was.
    pub fn shares_since(&self, then: &Moment) -> Shares {
        let now = self.moment();
        let since =
            |of: fn(&RowsSnapshot) -> u64| of(&now.rows).saturating_sub(of(&then.rows)) as f64;
        let (fetch, decode) = (since(|s| s.fetch_ns), since(|s| s.decode_ns));
        let all = fetch + decode + since(|s| s.gather_ns);
        let (fetch, decode) = if all > 0.0 {
            (fetch / all, decode / all)
        } else {
            (1.0, 0.0)
        };
        let from_origin = now.bytes_from_origin > then.bytes_from_origin;
        if from_origin {
            Shares {
                origin: fetch,
                disk: 0.0,
                decode,
            }
        } else {
            Shares {
                origin: 0.0,
                disk: fetch,
                decode,
            }
        }
    }
}
