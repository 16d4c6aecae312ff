//! Tar: headers read and written, and the scanner that finds members.
//!
//! Read: V7, ustar with prefix, star's prefix, GNU (base-256 numbers, long names, sparse files),
//! PAX (`x`, Solaris' `X`, and `g` headers with path, size, mtime and GNU's sparse keys). Written:
//! ustar, preceded by a PAX header if a name, a size or a time does not fit.

mod header;
mod pax;
mod scan;
mod write;

pub use scan::{ScanStep, TarScanner};
pub use write::{
    TAR_TRAILER_BYTES, tar_entry_bytes, tar_exact_size, tar_header_bytes, tar_header_into,
    tar_header_with_pax, tar_padding, tar_padding_into, tar_trailer_into,
};

/// Headers and data begin at multiples of this.
pub const BLOCK_BYTES: u64 = 512;

/// Whether a block is a header with a correct checksum.
pub(crate) fn looks_like_header(block: &[u8; 512]) -> bool {
    matches!(header::parse(block, 0), Ok(header::Block::Header(_)))
}

/// `n` rounded up to whole blocks; `None` past 2^64.
fn round_up(n: u64) -> Option<u64> {
    n.checked_next_multiple_of(BLOCK_BYTES)
}
