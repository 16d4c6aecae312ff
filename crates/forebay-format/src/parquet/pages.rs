//! What page headers claim, checked before a decoder believes it.
//!
//! A decoder sets aside what a page's header says it decompresses to. Headers are walked first: each page must lie within the bytes at hand,
//! claim no more than its codec can make of them, and all pages of a read together must not hold more than a block may. Of the codecs only gzip goes
//! on past the size that it was told; large gzip pages are therefore counted once before they are decoded.

use super::thrift::{Bad, Compact, Type};
use ::parquet::basic::Compression;
use forebay_core::{Error, ErrorKind, Result, limits};
use std::io::Read;

/// Smaller gzip pages cannot do harm.
const GZIP_COUNTED_FROM_BYTES: usize = 256 << 10;

/// A codec cannot make more of a byte than about this many: a claim above it is a lie.
fn most_per_byte(codec: Compression) -> u64 {
    match codec {
        Compression::UNCOMPRESSED => 1,
        Compression::SNAPPY => 32,
        Compression::LZ4 | Compression::LZ4_RAW => 256,
        Compression::GZIP(_) => 1100,
        _ => 1 << 16,
    }
}

/// Watches over the pages of one read.
#[derive(Debug, Default)]
pub(super) struct Checker {
    decoded: u64,
}

#[derive(Debug, Default)]
struct Header {
    decoded: i32,
    stored: i32,
    values: i64,
    nulls: i64,
    rows: i64,
    levels: i64,
}

impl Checker {
    /// Takes the bytes of one or more whole pages that lie at `offset`.
    ///
    /// # Errors
    /// `Corrupt` with the offset of the page; `TooLarge`.
    pub fn pages(&mut self, offset: u64, bytes: &[u8], codec: Compression) -> Result<()> {
        let mut at = 0;
        while at < bytes.len() {
            let here = offset + at as u64;
            let mut c = Compact::new(&bytes[at..]);
            let header = match Header::read(&mut c) {
                Ok(header) => header,
                // Some writers leave zeros behind the last page.
                Err(_) if bytes[at..].iter().all(|&b| b == 0) => return Ok(()),
                Err(bad) => return Err(damaged(here, bad.what)),
            };
            let data = at + c.at();
            let (Ok(stored), Ok(decoded)) = (usize::try_from(header.stored), usize::try_from(header.decoded)) else {
                return Err(damaged(here, "its size is below zero"));
            };
            if header.values < 0 || header.nulls < 0 || header.rows < 0 || header.levels < 0 {
                return Err(damaged(here, "it counts less than nothing"));
            }
            if header.levels > i64::from(header.decoded) || header.levels > i64::from(header.stored) {
                return Err(damaged(here, "its levels are longer than it is"));
            }
            let Some(page) = bytes[data..].get(..stored) else {
                return Err(damaged(here, "it goes on past the end of its column"));
            };
            if decoded as u64 > most_per_byte(codec).saturating_mul(stored as u64 + 64) {
                return Err(damaged(here, "it claims to hold more than its codec can make of it"));
            }
            self.decoded += decoded as u64;
            if self.decoded > limits::BLOCK_DECODED_MAX_BYTES {
                let max = limits::BLOCK_DECODED_MAX_BYTES;
                return Err(Error::new(ErrorKind::TooLarge, format!("Parquet pages up to offset {here} hold more than {max} bytes"))
                    .hint("ask for fewer rows or columns"));
            }
            if matches!(codec, Compression::GZIP(_)) && stored > GZIP_COUNTED_FROM_BYTES {
                let levels = header.levels as usize;
                let mut inflated = flate2::read::MultiGzDecoder::new(&page[levels..]).take(decoded as u64 + 1);
                let count = std::io::copy(&mut inflated, &mut std::io::sink()).map_err(|_| damaged(here, "its gzip data is damaged"))?;
                if count > decoded as u64 {
                    return Err(damaged(here, "it inflates to more than it says"));
                }
            }
            at = data + stored;
        }
        Ok(())
    }
}

fn damaged(at: u64, what: &str) -> Error {
    Error::corrupt(format!("the Parquet page at offset {at} is damaged: {what}"))
}

impl Header {
    fn read(c: &mut Compact<'_>) -> Result<Self, Bad> {
        let mut this = Self { decoded: -1, stored: -1, ..Self::default() };
        c.fields(|c, id, ty| {
            match (id, ty) {
                (2, Type::I32) => this.decoded = c.i32()?,
                (3, Type::I32) => this.stored = c.i32()?,
                (5 | 7, Type::Struct) => c.fields(|c, id, ty| match (id, ty) {
                    (1, Type::I32) => {
                        this.values = c.int()?;
                        Ok(true)
                    }
                    _ => Ok(false),
                })?,
                (8, Type::Struct) => {
                    c.fields(|c, id, ty| {
                        match (id, ty) {
                            (1, Type::I32) => this.values = c.int()?,
                            (2, Type::I32) => this.nulls = c.int()?,
                            (3, Type::I32) => this.rows = c.int()?,
                            (5 | 6, Type::I32) => {
                                let len = i64::from(c.i32()?);
                                // Either below zero shows, whatever the other is.
                                this.levels = if len < 0 || this.levels < 0 { -1 } else { this.levels + len };
                            }
                            _ => return Ok(false),
                        }
                        Ok(true)
                    })?;
                }
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        Ok(this)
    }
}
