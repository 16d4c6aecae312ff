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

/// The checksum of a block, as it is in the file. (By this library, and not the one of the other
/// checksums: it takes the widest registers that it finds, and blocks are all that a reader waits
/// for.)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_files_that_are_there_already() {
        // As the specification has it, and as another library makes it of any length.
        assert_eq!(sum(b""), 0x2d06_8005_38d3_94c2_u64.to_le_bytes());
        let data: Vec<u8> = (0..BLOCK_BYTES).map(|i| (i * 31 + i / 251) as u8).collect();
        let edges = [1024, 2048, 64 << 10, 128 << 10, BLOCK_BYTES as usize];
        let around = edges.into_iter().flat_map(|n| [n - 1, n, n + 1]);
        for length in (0..=600).chain(around) {
            let block = &data[..length.min(data.len())];
            let expected = xxhash_rust::xxh3::xxh3_64(block).to_le_bytes();
            assert_eq!(sum(block), expected, "{length}");
            let mut pieces = Sum::default();
            for piece in block.chunks(length / 3 + 1) {
                pieces.update(piece);
            }
            assert_eq!(pieces.value(), expected, "{length}, in pieces");
        }
    }
}
