//! TFRecord: records framed by their length and two checksums.
//!
//! `length u64 | masked CRC32C of the length u32 | data | masked CRC32C of the data u32`, little
//! endian. Where records begin is found by hopping from one to the next: each hop needs 12 bytes.
//! Reads are as large as worthwhile: if records are smaller than one request to an origin, the
//! whole file is read; if they are larger, only their heads are. A separate file of offsets
//! ([`side_file`]) avoids the hops.
//!
//! Lengths are trusted only with their checksum, and data are verified against their checksum
//! whenever a record is read.

mod scan;
pub mod side_file;

pub(crate) use scan::Indexer;

use forebay_core::{Error, Result, crc32c, limits};

/// A record's length with its checksum.
pub(crate) const HEAD_BYTES: usize = 12;
/// The checksum after a record.
const FOOT_BYTES: usize = 4;

/// A CRC32C in the form that TFRecord stores.
pub fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Appends a record with its frame.
pub fn record_into(out: &mut Vec<u8>, data: &[u8]) {
    let len = (data.len() as u64).to_le_bytes();
    out.extend_from_slice(&len);
    out.extend_from_slice(&masked_crc32c(&len).to_le_bytes());
    out.extend_from_slice(data);
    out.extend_from_slice(&masked_crc32c(data).to_le_bytes());
}

/// Whether a file begins with a record.
pub(crate) fn looks_like_record(head: &[u8]) -> bool {
    head.split_first_chunk::<HEAD_BYTES>()
        .is_some_and(|(head, _)| parse_head(head, 0).is_ok())
}

/// The length of the data of the record with this head.
fn parse_head(head: &[u8; HEAD_BYTES], at: u64) -> Result<u64> {
    let (len, sum) = head.split_at(8);
    let (len, sum) = (
        <[u8; 8]>::try_from(len).unwrap_or_default(),
        <[u8; 4]>::try_from(sum).unwrap_or_default(),
    );
    if masked_crc32c(&len) != u32::from_le_bytes(sum) {
        return Err(Error::corrupt(format!(
            "the length of the TFRecord at offset {at} does not match its checksum"
        )));
    }
    let len = u64::from_le_bytes(len);
    if len > limits::RECORD_MAX_BYTES {
        let max = limits::RECORD_MAX_BYTES;
        return Err(Error::unsupported(format!(
            "the TFRecord at offset {at} is {len} bytes long; the limit is {max}"
        )));
    }
    Ok(len)
}

/// The next record of bytes that begin with one, and how many bytes it takes including its frame (0
/// if there is none).
pub(crate) fn next(bytes: &[u8], at: u64, check: bool) -> Result<(Option<&[u8]>, usize)> {
    if bytes.is_empty() {
        return Ok((None, 0));
    }
    let cut = || Error::corrupt(format!("the TFRecord at offset {at} is cut off"));
    let (head, rest) = bytes.split_first_chunk::<HEAD_BYTES>().ok_or_else(cut)?;
    let len = parse_head(head, at)? as usize;
    let (data, rest) = rest.split_at_checked(len).ok_or_else(cut)?;
    let (sum, _) = rest.split_first_chunk::<FOOT_BYTES>().ok_or_else(cut)?;
    if check && masked_crc32c(data) != u32::from_le_bytes(*sum) {
        return Err(Error::corrupt(format!(
            "the data of the TFRecord at offset {at} does not match its checksum"
        )));
    }
    Ok((Some(data), HEAD_BYTES + len + FOOT_BYTES))
}
