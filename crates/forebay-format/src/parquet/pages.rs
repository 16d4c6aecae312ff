//! What page headers claim, checked before a decoder believes it.
//!
//! A decoder sets aside what a page's header says it decompresses to. Headers are walked first: each page must lie within the bytes at hand,
//! claim no more than its codec can make of them, and all pages of a read together must not hold more than a block may. Of the codecs only gzip goes
//! on past the size that it was told; large gzip pages are therefore counted once before they are decoded. Of the encodings it is the two
//! delta encodings of byte arrays that set memory aside by a count inside the page; these pages are unpacked once more to look at it.

use super::{
    guarded, parquet_error,
    thrift::{Bad, Compact, Type},
};
use ::parquet::{
    basic::{Compression, Encoding},
    column::page::{Page, PageReader},
    file::{metadata::ColumnChunkMetaData, serialized_reader::SerializedPageReader},
};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result, limits};
use std::{io::Read, sync::Arc};

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
    encoding: i32,
    dictionary: bool,
}

/// As the format numbers them.
const DELTA_LENGTH_BYTE_ARRAY: i32 = 6;
const DELTA_BYTE_ARRAY: i32 = 7;

impl Checker {
    /// Takes the bytes of one or more whole pages that lie at `offset`.
    ///
    /// # Errors
    /// `Corrupt` with the offset of the page; `TooLarge`.
    pub fn pages(&mut self, offset: u64, bytes: &Bytes, chunk: &ColumnChunkMetaData) -> Result<()> {
        let codec = chunk.compression();
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
            if header.dictionary && header.values > i64::from(header.decoded) {
                return Err(damaged(here, "it counts more values than it has bytes"));
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
            if matches!(header.encoding, DELTA_LENGTH_BYTE_ARRAY | DELTA_BYTE_ARRAY) {
                delta_page(bytes.slice(at..data + stored), here, chunk)?;
            }
            at = data + stored;
        }
        Ok(())
    }
}

/// Unpacks a page of delta-encoded byte arrays and checks its counts.
fn delta_page(page: Bytes, at: u64, chunk: &ColumnChunkMetaData) -> Result<()> {
    let len = page.len() as i64;
    let unpacked = guarded("a Parquet page", || {
        let alone = chunk.clone().into_builder().set_data_page_offset(0).set_dictionary_page_offset(None).set_total_compressed_size(len);
        let alone = alone.build().map_err(parquet_error)?;
        SerializedPageReader::new(Arc::new(page), &alone, 0, None).and_then(|mut r| r.get_next_page()).map_err(parquet_error)
    });
    let levels = |max: i16| usize::from(max > 0);
    let column = chunk.column_descr();
    let (data, values, encoding) = match unpacked.map_err(|e| e.context(format!("the Parquet page at offset {at}")))? {
        Some(Page::DataPage { buf, num_values, encoding, .. }) => {
            let mut data = buf;
            for _ in 0..levels(column.max_rep_level()) + levels(column.max_def_level()) {
                let len = data.split_first_chunk::<4>().map(|(len, _)| u32::from_le_bytes(*len) as usize + 4);
                let len = len.filter(|&len| len <= data.len()).ok_or_else(|| damaged(at, "its levels are longer than it is"))?;
                data = data.slice(len..);
            }
            (data, num_values, encoding)
        }
        Some(Page::DataPageV2 { buf, num_values, encoding, rep_levels_byte_len, def_levels_byte_len, .. }) => {
            let levels = rep_levels_byte_len as usize + def_levels_byte_len as usize;
            if levels > buf.len() {
                return Err(damaged(at, "its levels are longer than it is"));
            }
            (buf.slice(levels..), num_values, encoding)
        }
        _ => return Err(damaged(at, "it is no page of data")),
    };
    let counted = delta_run(&data, values).and_then(|len| match encoding {
        Encoding::DELTA_BYTE_ARRAY => delta_run(&data[len..], values),
        _ => Some(len),
    });
    counted.map(drop).ok_or_else(|| damaged(at, "its lengths are not those of its values"))
}

/// How many bytes a run of delta-packed integers takes; `None` if it has more than `most`, or is cut off.
fn delta_run(bytes: &[u8], most: u32) -> Option<usize> {
    let mut rest = bytes;
    let varint = |rest: &mut &[u8]| {
        let mut v = 0u64;
        for shift in (0..64).step_by(7) {
            let (&b, after) = rest.split_first()?;
            *rest = after;
            v |= u64::from(b & 0x7f) << shift;
            if b < 0x80 {
                return Some(v);
            }
        }
        None
    };
    let (block, minis, count) = (varint(&mut rest)?, varint(&mut rest)?, varint(&mut rest)?);
    varint(&mut rest)?;
    if count > u64::from(most) || minis == 0 || minis > 1 << 16 || block > 1 << 24 || !block.is_multiple_of(minis) || block == 0 {
        return None;
    }
    // The first value is in the head.
    let (per_mini, mut left) = (block / minis, count.saturating_sub(1));
    while left > 0 {
        varint(&mut rest)?;
        let (widths, mut after) = rest.split_at_checked(minis as usize)?;
        for &width in widths {
            if left == 0 {
                break;
            }
            let bits = per_mini.checked_mul(u64::from(width)).filter(|_| width <= 64)?;
            after = after.get(usize::try_from(bits.div_ceil(8)).ok()?..)?;
            left = left.saturating_sub(per_mini);
        }
        rest = after;
    }
    Some(bytes.len() - rest.len())
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
                (5 | 7, Type::Struct) => {
                    this.dictionary = id == 7;
                    c.fields(|c, id, ty| match (id, ty) {
                        (1, Type::I32) => {
                            this.values = c.int()?;
                            Ok(true)
                        }
                        (2, Type::I32) => {
                            this.encoding = c.i32()?;
                            Ok(true)
                        }
                        _ => Ok(false),
                    })?;
                }
                (8, Type::Struct) => {
                    c.fields(|c, id, ty| {
                        match (id, ty) {
                            (1, Type::I32) => this.values = c.int()?,
                            (2, Type::I32) => this.nulls = c.int()?,
                            (3, Type::I32) => this.rows = c.int()?,
                            (4, Type::I32) => this.encoding = c.i32()?,
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
