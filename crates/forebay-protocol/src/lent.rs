//! Files that a node lends to clients on its machine: an open file goes over the Unix socket, and
//! the client reads it without the node.
//!
//! The client asks for the file with `GET`, `Connection: upgrade` and `Upgrade: forebay-file` (RFC
//! 9110, 7.8). After `101 Switching Protocols` it sends one byte; the node then sends [`Lent`] as
//! JSON, and with it the descriptor (`SCM_RIGHTS`, unix(7)), open for reading. The client closes the
//! connection when it has closed the file. A node without the file on its disk answers `404`, without a
//! look at the origin; one that does not lend files, or no more of them, answers as it would without
//! the upgrade.
//!
//! A lent file is its bytes, followed by a checksum (XXH3-64, little-endian) for each block of them;
//! the last block may be shorter. Whoever reads from it verifies each block.

use serde::{Deserialize, Serialize};
use std::hash::Hasher;
use twox_hash::XxHash3_64;

/// What the connection is upgraded to.
pub const UPGRADE: &str = "forebay-file";
/// How many bytes of a file have one checksum.
pub const BLOCK_BYTES: u64 = 1 << 20;
/// What a checksum takes.
pub const SUM_BYTES: u64 = 8;
/// The longest message that comes with a descriptor.
pub const MESSAGE_MAX_BYTES: usize = 512;

/// What is said of a file that is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lent {
    /// Its bytes, without the checksums behind them.
    pub size: u64,
    /// How many of them have one checksum. (A client that knows another number does not read it.)
    pub block_bytes: u64,
}

impl Lent {
    /// A file of so many bytes.
    pub fn of(size: u64) -> Lent {
        Lent {
            size,
            block_bytes: BLOCK_BYTES,
        }
    }
}

/// What a file of `size` bytes takes on disk; more than a `u64` holds counts as the most.
pub fn disk_bytes(size: u64) -> u64 {
    size.saturating_add(size.div_ceil(BLOCK_BYTES) * SUM_BYTES)
}

/// The checksum of a block, as it is in the file.
pub fn sum(block: &[u8]) -> [u8; SUM_BYTES as usize] {
    XxHash3_64::oneshot(block).to_le_bytes()
}

/// The checksum of a block that comes in pieces.
#[derive(Default)]
pub struct Sum(XxHash3_64);

impl Sum {
    /// Adds the bytes that follow.
    pub fn update(&mut self, piece: &[u8]) {
        self.0.write(piece);
    }

    /// What [`sum`] of all of them is.
    pub fn value(&self) -> [u8; SUM_BYTES as usize] {
        self.0.finish().to_le_bytes()
    }
}
