//! Zip: the directory is read into an index, which finds members; archives are written.
//!
//! Read: zip64, bytes before the archive (self-extracting programs), stored and deflated members.
//! Encrypted members and other methods are indexed as unreadable. Multi-part archives, overlapping
//! entries, and impossible sizes are refused.

mod local;
mod record;
mod scan;
mod write;

pub use local::LOCAL_HEADER_BYTES;
pub(crate) use local::data_range;
pub use scan::ZipScanner;
pub use write::{ZIP_HELD_ENTRY_MAX_BYTES, ZipWriter};

const LOCAL_SIGNATURE: u32 = 0x0403_4b50;
const ENTRY_SIGNATURE: u32 = 0x0201_4b50;
const END_SIGNATURE: u32 = 0x0605_4b50;
const END64_SIGNATURE: u32 = 0x0606_4b50;
const LOCATOR64_SIGNATURE: u32 = 0x0706_4b50;
const DESCRIPTOR_SIGNATURE: u32 = 0x0807_4b50;

const END_BYTES: usize = 22;
const END64_BYTES: usize = 56;
const LOCATOR64_BYTES: usize = 20;
const ENTRY_BYTES: usize = 46;

const METHOD_STORED: u16 = 0;
const METHOD_DEFLATE: u16 = 8;

const FLAG_ENCRYPTED: u16 = 1;
const FLAG_DESCRIPTOR: u16 = 1 << 3;
const FLAG_PATCH: u16 = 1 << 5;
const FLAG_STRONG_ENCRYPTION: u16 = 1 << 6;
const FLAG_UTF8: u16 = 1 << 11;
const FLAG_MASKED: u16 = 1 << 13;

const EXTRA_ZIP64: u16 = 1;
const EXTRA_TIMESTAMP: u16 = 0x5455;
const EXTRA_UNICODE_PATH: u16 = 0x7075;

/// Little-endian numbers at fixed places of a slice that is known to be long enough.
fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from(u32_at(b, at)) | u64::from(u32_at(b, at + 4)) << 32
}
