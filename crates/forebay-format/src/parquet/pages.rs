//! Checks the claims of page headers before a decoder trusts them.
//!
//! A decoder allocates what a page's header says it decompresses to. So headers are walked first:
//! each page must lie within the bytes at hand, claim no more than its codec can produce from them,
//! and all pages of a read together must not hold more than a block may. Only gzip, of all codecs,
//! continues past the size that it was given, so large gzip pages are counted once before they are
//! decoded. Only the two delta encodings of byte arrays, of all encodings, allocate memory by a
//! count inside the page; these pages are unpacked once more to check that count.
//!
//! A decoder that skips rows of a nested column continues until it has seen as many repetition
//! levels as the header counts values: with fewer levels it would never end. So if rows are
//! skipped, levels are counted; for that, the front of a page with compressed levels is unpacked
//! once more, or all of it if its codec (snappy, lz4) cannot unpack a front.

use super::{
    fields, guarded, parquet_error,
    thrift::{Bad, Compact, Type},
};
use ::parquet::{
    basic::{Compression, Encoding, Type as PhysicalType},
    column::page::{Page, PageReader},
    file::{
        metadata::{ColumnChunkMetaData, RowGroupMetaData},
        serialized_reader::SerializedPageReader,
    },
};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result, limits};
use std::{
    borrow::Cow,
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// 8 MiB: all levels but the very highest stay within this.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;
/// Smaller gzip pages can do no harm.
const GZIP_COUNTED_FROM_BYTES: usize = 256 << 10;

/// A codec cannot make much more than this many bytes from one byte: a higher claim is false.
fn most_per_byte(codec: Compression) -> u64 {
    match codec {
        Compression::UNCOMPRESSED => 1,
        Compression::SNAPPY => 32,
        Compression::LZ4 | Compression::LZ4_RAW => 256,
        Compression::GZIP(_) => 1100,
        _ => 1 << 16,
    }
}

/// Watches the pages of one read.
#[derive(Debug, Default)]
pub(super) struct Checker {
    /// Whether the decoder skips rows.
    skips: bool,
    decoded: u64,
    columns: Vec<Expected>,
    /// No value is longer, as far as that was checked.
    longest: u64,
    /// Values of some pages follow each other without anything in between.
    joins_values: bool,
}

/// What to expect from the pages of a column.
#[derive(Debug)]
struct Expected {
    /// Where its data pages begin; this identifies the column.
    first: i64,
    /// Values of the pages so far, and the memory they take.
    values: u64,
    bytes: u64,
    /// What those pages unpack to that views of values would keep, levels included.
    unpacked: u64,
    /// Average memory of a value of its dictionary.
    dictionary: Option<u64>,
    /// Whether values of variable length come from it.
    by_dictionary: bool,
}

#[derive(Debug, Default)]
struct Header {
    /// By the format's numbering, and the number of the field that holds the rest of the header.
    kind: i32,
    body: Option<i16>,
    decoded: i32,
    stored: i32,
    values: i64,
    nulls: i64,
    rows: i64,
    /// Bytes of both kinds of levels, if they are not compressed; and of the first kind.
    levels: i64,
    repetition_levels: i64,
    encoding: i32,
    /// The encoding of the repetition levels of a version 1 page.
    levels_encoding: i32,
}

/// By the format's numbering.
const PLAIN: i32 = 0;
const RLE: i32 = 3;
const DELTA_LENGTH_BYTE_ARRAY: i32 = 6;
const DELTA_BYTE_ARRAY: i32 = 7;
const PLAIN_DICTIONARY: i32 = 2;
const RLE_DICTIONARY: i32 = 8;

/// What a value of variable length takes besides its bytes.
const OFFSET_BYTES: u64 = 8;
/// A dictionary is unpacked to find its longest value if that value, this many times, could take
/// more than the bytes below.
const LONGEST_LOOKED_AT_VALUES: u64 = 1024;
const LONGEST_LOOKED_AT_BYTES: u64 = 64 << 20;
/// With delta encoding, values that share their beginnings with the previous one could all be as
/// long as their page. They hardly ever exceed this part of it, and assuming more makes batches
/// short.
const DELTA_LONGEST_SHARE: u64 = 16;

/// Memory that a value of a column takes; `None` if that depends on the value.
fn value_bytes(chunk: &ColumnChunkMetaData) -> Option<u64> {
    match chunk.column_type() {
        PhysicalType::BOOLEAN => Some(1),
        PhysicalType::INT32 | PhysicalType::FLOAT => Some(4),
        PhysicalType::INT64 | PhysicalType::DOUBLE => Some(8),
        PhysicalType::INT96 => Some(12),
        PhysicalType::FIXED_LEN_BYTE_ARRAY => {
            Some(u64::try_from(chunk.column_descr().type_length()).unwrap_or(0))
        }
        PhysicalType::BYTE_ARRAY => None,
    }
}

/// The length of the longest value of a column chunk's dictionary, for all reads of a file: to find
/// it, the dictionary is unpacked, which costs as much as decoding it.
#[derive(Debug, Default)]
pub(super) struct Longest(AtomicU64);

impl Longest {
    /// What is known of the dictionary, or else what `find` says. Threads that ask at the same time
    /// find the same. (Errors are not kept: the next read finds them again.)
    fn get_or(&self, find: impl FnOnce() -> Result<u32>) -> Result<u64> {
        const FOUND: u64 = 1 << 32;
        let known = self.0.load(Ordering::Relaxed);
        if known >= FOUND {
            return Ok(known - FOUND);
        }
        let longest = u64::from(find()?);
        self.0.store(longest | FOUND, Ordering::Relaxed);
        Ok(longest)
    }
}

/// The length of the longest value of a dictionary of byte arrays.
fn longest_of_dictionary(page: Bytes, at: u64, chunk: &ColumnChunkMetaData) -> Result<u32> {
    let (buf, values) = match page_alone(page, chunk)
        .map_err(|e| e.context(format!("the Parquet page at offset {at}")))?
    {
        Some(Page::DictionaryPage {
            buf, num_values, ..
        }) => (buf, num_values),
        _ => return Err(damaged(at, "it is not a dictionary")),
    };
    let (mut rest, mut longest) = (&buf[..], 0);
    for _ in 0..values {
        let too_short = || damaged(at, "its values are longer than the page");
        let (len, after) = rest.split_first_chunk::<4>().ok_or_else(too_short)?;
        let len = u32::from_le_bytes(*len);
        rest = after.get(len as usize..).ok_or_else(too_short)?;
        longest = longest.max(len);
    }
    Ok(longest)
}

/// A single page, unpacked.
fn page_alone(page: Bytes, chunk: &ColumnChunkMetaData) -> Result<Option<Page>> {
    let len = page.len() as i64;
    guarded("a Parquet page", || {
        let alone = chunk
            .clone()
            .into_builder()
            .set_data_page_offset(0)
            .set_dictionary_page_offset(None)
            .set_total_compressed_size(len);
        let alone = alone.build().map_err(parquet_error)?;
        SerializedPageReader::new(Arc::new(page), &alone, 0, None)
            .and_then(|mut r| r.get_next_page())
            .map_err(parquet_error)
    })
}

impl Checker {
    pub fn new(skips: bool) -> Self {
        Self {
            skips,
            ..Self::default()
        }
    }

    /// The approximate memory of a row of `group`, from the headers of the pages so far and the
    /// footer's statements; and whether that is certain. No header says how often a dictionary's
    /// long values occur.
    pub fn expected_row_bytes(&self, group: &RowGroupMetaData) -> (u64, bool) {
        let rows = u128::try_from(group.num_rows()).unwrap_or(1).max(1);
        let mut sure = true;
        let mut of = |column: &Expected| {
            let chunk = group
                .columns()
                .iter()
                .find(|chunk| chunk.data_page_offset() == column.first)?;
            let values = u128::try_from(chunk.num_values()).ok()?;
            // For values that are stored directly, the pages know better.
            let stated = chunk.unencoded_byte_array_data_bytes();
            let stated = stated.and_then(|bytes| u128::try_from(bytes).ok());
            let stated = stated.filter(|_| column.by_dictionary);
            sure &= stated.is_some() || !column.by_dictionary;
            let bytes = match stated {
                Some(bytes) => bytes + values * u128::from(OFFSET_BYTES),
                None => u128::from(column.bytes) * values / u128::from(column.values.max(1)),
            };
            Some(bytes.div_ceil(rows))
        };
        let bytes: u128 = self.columns.iter().filter_map(&mut of).sum();
        (u64::try_from(bytes).unwrap_or(u64::MAX), sure)
    }

    /// The approximate memory of all values of the pages so far.
    pub fn expected_bytes(&self) -> u64 {
        let bytes = self.columns.iter().map(|column| column.bytes);
        bytes.fold(0, u64::saturating_add)
    }

    /// What views of a column chunk's values would keep: its pages so far, with all that is in them.
    pub fn unpacked_bytes(&self, chunk: &ColumnChunkMetaData) -> u64 {
        let first = chunk.data_page_offset();
        let columns = self.columns.iter().filter(|c| c.first == first);
        columns.map(|column| column.unpacked).sum()
    }

    /// The length of the longest value that the pages so far may have. (With dictionaries and
    /// prefixes, one long value may occur a million times.)
    pub fn longest_value(&self) -> u64 {
        self.longest
    }

    /// Whether values of some pages so far follow each other: the decoder checks only that all of
    /// them together are text.
    pub fn joins_values(&self) -> bool {
        self.joins_values
    }

    /// Notes what a page will amount to.
    fn expect(
        &mut self,
        page: Bytes,
        at: u64,
        header: &Header,
        chunk: &ColumnChunkMetaData,
        longest: &Longest,
    ) -> Result<()> {
        let decoded = header.decoded.max(0) as u64;
        let values = header.values.max(0) as u64;
        let (width, first) = (value_bytes(chunk), chunk.data_page_offset());
        let known = self.columns.iter().position(|c| c.first == first);
        let known = known.unwrap_or_else(|| {
            self.columns.push(Expected {
                first,
                values: 0,
                bytes: 0,
                unpacked: 0,
                dictionary: None,
                by_dictionary: false,
            });
            self.columns.len() - 1
        });
        let column = &mut self.columns[known];
        self.joins_values |= matches!(header.encoding, DELTA_LENGTH_BYTE_ARRAY | DELTA_BYTE_ARRAY);
        if header.body == Some(7) || header.encoding == PLAIN {
            column.unpacked = column.unpacked.saturating_add(decoded);
        }
        if header.body == Some(7) {
            column.dictionary = Some(decoded / values.max(1) + OFFSET_BYTES);
            let most = decoded.saturating_mul(LONGEST_LOOKED_AT_VALUES);
            if width.is_none() && most > LONGEST_LOOKED_AT_BYTES {
                let find = || longest_of_dictionary(page, at, chunk);
                // A chunk has one dictionary, at its start; any other is looked at each time.
                let here = match at == chunk.byte_range().0 {
                    true => longest.get_or(find)?,
                    false => u64::from(find()?),
                };
                self.longest = self.longest.max(here);
            }
            return Ok(());
        }
        if width.is_none() && header.encoding == DELTA_BYTE_ARRAY {
            self.longest = self.longest.max(decoded / DELTA_LONGEST_SHARE);
        }
        let each = match (width, header.encoding, column.dictionary) {
            (Some(width), ..) => width,
            (None, PLAIN_DICTIONARY | RLE_DICTIONARY, Some(mean)) => {
                column.by_dictionary = true;
                mean
            }
            _ => decoded / values.max(1) + OFFSET_BYTES,
        };
        column.values = column.values.saturating_add(values);
        column.bytes = column.bytes.saturating_add(values.saturating_mul(each));
        Ok(())
    }

    /// Takes the bytes of one or more whole pages at `offset`, of a chunk of which `longest` is
    /// known.
    ///
    /// # Errors
    /// `Corrupt` with the offset of the page; `TooLarge`.
    pub fn pages(
        &mut self,
        offset: u64,
        bytes: &Bytes,
        chunk: &ColumnChunkMetaData,
        longest: &Longest,
    ) -> Result<()> {
        let codec = chunk.compression();
        let mut at = 0;
        while at < bytes.len() {
            let here = offset + at as u64;
            let mut c = Compact::new(&bytes[at..]);
            let header = match Header::read(&mut c) {
                Ok(header) => header,
                // Some writers leave zeros after the last page.
                Err(_) if bytes[at..].iter().all(|&b| b == 0) => return Ok(()),
                Err(bad) => return Err(damaged(here, bad.what)),
            };
            let data = at + c.at();
            let (Ok(stored), Ok(decoded)) = (
                usize::try_from(header.stored),
                usize::try_from(header.decoded),
            ) else {
                return Err(damaged(here, "its size is below zero"));
            };
            if header.values < 0 || header.nulls < 0 || header.rows < 0 || header.levels < 0 {
                return Err(damaged(here, "it has a negative number of values"));
            }
            if !matches!(
                (header.kind, header.body),
                (0, Some(5)) | (1, None) | (2, Some(7)) | (3, Some(8))
            ) {
                return Err(damaged(here, "its header is not of the kind that it says"));
            }
            if header.body == Some(7) && header.values > i64::from(header.decoded) {
                return Err(damaged(here, "it has more values than bytes"));
            }
            if header.levels > i64::from(header.decoded) || header.levels > i64::from(header.stored)
            {
                return Err(damaged(here, "its levels are longer than the page"));
            }
            let Some(page) = bytes[data..].get(..stored) else {
                return Err(damaged(here, "it goes on past the end of its column"));
            };
            if decoded as u64 > most_per_byte(codec).saturating_mul(stored as u64 + 64) {
                return Err(damaged(
                    here,
                    "it says that it holds more than its codec can make of its bytes",
                ));
            }
            self.decoded += decoded as u64;
            if self.decoded > limits::BLOCK_DECODED_MAX_BYTES {
                let max = limits::BLOCK_DECODED_MAX_BYTES;
                return Err(Error::new(
                    ErrorKind::TooLarge,
                    format!("Parquet pages up to offset {here} hold more than {max} bytes"),
                )
                .hint("ask for fewer rows or columns"));
            }
            if matches!(codec, Compression::GZIP(_)) && stored > GZIP_COUNTED_FROM_BYTES {
                let levels = header.levels as usize;
                let mut inflated =
                    flate2::read::MultiGzDecoder::new(&page[levels..]).take(decoded as u64 + 1);
                let count = std::io::copy(&mut inflated, &mut std::io::sink())
                    .map_err(|_| damaged(here, "its gzip data is damaged"))?;
                if count > decoded as u64 {
                    return Err(damaged(here, "it inflates to more than it says"));
                }
            }
            self.expect(
                bytes.slice(at..data + stored),
                here,
                &header,
                chunk,
                longest,
            )?;
            let delta = matches!(header.encoding, DELTA_LENGTH_BYTE_ARRAY | DELTA_BYTE_ARRAY);
            let repeated = self.skips && chunk.column_descr().max_rep_level() > 0;
            let levels = match header.body {
                // These are never compressed.
                Some(8) if repeated => page
                    .get(..header.repetition_levels as usize)
                    .map(Cow::Borrowed),
                Some(5) if repeated && header.levels_encoding == RLE => {
                    front_levels(codec, page, decoded).map(Cow::Owned)
                }
                _ => None,
            };
            if let Some(levels) = &levels {
                count_levels(levels, chunk, header.values as u64)
                    .ok_or_else(|| damaged(here, TOO_FEW_LEVELS))?;
            }
            let repeated = repeated && levels.is_none() && header.body == Some(5);
            if delta || repeated {
                unpacked_page(bytes.slice(at..data + stored), here, chunk, delta, repeated)?;
            }
            at = data + stored;
        }
        Ok(())
    }
}

const TOO_FEW_LEVELS: &str = "it has fewer repetition levels than values";

/// The repetition levels of a version 1 page, unpacked no further than they go; `None` if the codec
/// takes only whole pages, or fails.
fn front_levels(codec: Compression, page: &[u8], decoded: usize) -> Option<Vec<u8>> {
    fn front(mut unpacked: impl Read, decoded: usize) -> Option<Vec<u8>> {
        let mut len = [0; 4];
        unpacked.read_exact(&mut len).ok()?;
        let len = u32::from_le_bytes(len) as usize;
        let mut levels = vec![0; Some(len).filter(|&len| len <= decoded)?];
        unpacked.read_exact(&mut levels).ok()?;
        Some(levels)
    }
    match codec {
        Compression::UNCOMPRESSED => front(page, decoded),
        Compression::GZIP(_) => front(flate2::read::MultiGzDecoder::new(page), decoded),
        Compression::ZSTD(_) => {
            let mut unpacked = zstd::stream::read::Decoder::with_buffer(page).ok()?;
            unpacked.window_log_max(ZSTD_WINDOW_LOG_MAX).ok()?;
            front(unpacked, decoded)
        }
        _ => None,
    }
}

/// Unpacks a data page and checks its counts: for `delta`-encoded byte arrays their lengths, for a
/// `repeated` column its levels.
fn unpacked_page(
    page: Bytes,
    at: u64,
    chunk: &ColumnChunkMetaData,
    delta: bool,
    repeated: bool,
) -> Result<()> {
    let unpacked = page_alone(page, chunk);
    let column = chunk.column_descr();
    let too_long = || damaged(at, "its levels are longer than the page");
    let (data, values, encoding) =
        match unpacked.map_err(|e| e.context(format!("the Parquet page at offset {at}")))? {
            Some(Page::DataPage {
                buf,
                num_values,
                encoding,
                rep_level_encoding,
                def_level_encoding,
                ..
            }) => {
                let mut data = buf;
                let kinds = [
                    (column.max_rep_level(), rep_level_encoding, repeated),
                    (column.max_def_level(), def_level_encoding, false),
                ];
                for (max, coding, counted) in kinds.into_iter().filter(|&(max, ..)| max > 0) {
                    let (prefix, len) = match (coding, data.split_first_chunk::<4>()) {
                        (Encoding::RLE, Some((len, _))) => (4, u32::from_le_bytes(*len) as usize),
                        (Encoding::RLE, None) => return Err(too_long()),
                        // Bits without a length, as old writers produce: as many levels as values.
                        _ => (
                            0,
                            (u64::from(num_values) * u64::from(bits(max))).div_ceil(8) as usize,
                        ),
                    };
                    let levels = data
                        .get(prefix..)
                        .and_then(|rest| rest.get(..len))
                        .ok_or_else(too_long)?;
                    if counted && coding == Encoding::RLE {
                        count_levels(levels, chunk, u64::from(num_values))
                            .ok_or_else(|| damaged(at, TOO_FEW_LEVELS))?;
                    }
                    data = data.slice(prefix + len..);
                }
                (data, num_values, encoding)
            }
            Some(Page::DataPageV2 {
                buf,
                num_values,
                encoding,
                rep_levels_byte_len,
                def_levels_byte_len,
                ..
            }) => {
                let levels = rep_levels_byte_len as usize + def_levels_byte_len as usize;
                if levels > buf.len() {
                    return Err(too_long());
                }
                (buf.slice(levels..), num_values, encoding)
            }
            _ => return Err(damaged(at, "it is not a page of data")),
        };
    if !delta {
        return Ok(());
    }
    let counted = delta_run(&data, values).and_then(|len| match encoding {
        Encoding::DELTA_BYTE_ARRAY => delta_run(&data[len..], values),
        _ => Some(len),
    });
    counted
        .map(drop)
        .ok_or_else(|| damaged(at, "its lengths do not fit its values"))
}

/// How many bits a level takes.
fn bits(max: i16) -> u32 {
    i16::BITS - max.leading_zeros()
}

/// `None` if runs of repetition levels (the hybrid of run lengths and bit packing) hold fewer than
/// `wanted`, or are damaged.
fn count_levels(runs: &[u8], chunk: &ColumnChunkMetaData, wanted: u64) -> Option<()> {
    let width = bits(chunk.column_descr().max_rep_level()) as usize;
    let (mut rest, mut found) = (runs, 0u64);
    while found < wanted {
        let head = varint(&mut rest)?;
        // A header of 0 ends the runs; runs longer than any page do not occur.
        let len = u32::try_from(head >> 1).ok().filter(|_| head > 0)?;
        if head & 1 == 0 {
            rest = rest.get(width.div_ceil(8)..)?;
            found += u64::from(len);
        } else {
            // Groups of eight. The last one may be cut short.
            let taken = (len as usize).saturating_mul(width).min(rest.len());
            found += (taken * 8 / width) as u64;
            rest = &rest[taken..];
        }
    }
    Some(())
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
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
}

/// How many bytes a run of delta-packed integers takes; `None` if it holds more than `most`, or is
/// cut off.
fn delta_run(bytes: &[u8], most: u32) -> Option<usize> {
    let mut rest = bytes;
    let (block, minis, count) = (varint(&mut rest)?, varint(&mut rest)?, varint(&mut rest)?);
    varint(&mut rest)?;
    if count > u64::from(most)
        || minis == 0
        || minis > 1 << 16
        || block > 1 << 24
        || !block.is_multiple_of(minis)
        || block == 0
    {
        return None;
    }
    // The first value is in the header.
    let (per_mini, mut left) = (block / minis, count.saturating_sub(1));
    while left > 0 {
        varint(&mut rest)?;
        let (widths, mut after) = rest.split_at_checked(minis as usize)?;
        for &width in widths {
            if left == 0 {
                break;
            }
            let bits = per_mini
                .checked_mul(u64::from(width))
                .filter(|_| width <= 64)?;
            after = after.get(usize::try_from(bits.div_ceil(8)).ok()?..)?;
            left = left.saturating_sub(per_mini);
        }
        rest = after;
    }
    Some(bytes.len() - rest.len())
}

fn damaged(at: u64, what: &str) -> Error {
    Error::corrupt(format!(
        "the Parquet page at offset {at} is damaged: {what}"
    ))
}

impl Header {
    fn read(c: &mut Compact<'_>) -> Result<Self, Bad> {
        let mut this = Self {
            decoded: -1,
            stored: -1,
            ..Self::default()
        };
        c.fields(fields::PAGE_HEADER, |c, id, ty| {
            match (id, ty) {
                (1, Type::I32) => this.kind = c.i32()?,
                (2, Type::I32) => this.decoded = c.i32()?,
                (3, Type::I32) => this.stored = c.i32()?,
                (5 | 7 | 8, Type::Struct) if this.body.replace(id).is_some() => {
                    return Err(c.bad("it has more than one header"));
                }
                (5 | 7, Type::Struct) => {
                    let known = if id == 5 {
                        fields::DATA_PAGE_HEADER
                    } else {
                        fields::DICTIONARY_PAGE_HEADER
                    };
                    c.fields(known, |c, id, ty| {
                        match (id, ty) {
                            (1, Type::I32) => this.values = i64::from(c.i32()?),
                            (2, Type::I32) => this.encoding = c.i32()?,
                            (4, Type::I32) => this.levels_encoding = c.i32()?,
                            _ => return Ok(false),
                        }
                        Ok(true)
                    })?;
                }
                (8, Type::Struct) => {
                    c.fields(fields::DATA_PAGE_HEADER_V2, |c, id, ty| {
                        match (id, ty) {
                            (1, Type::I32) => this.values = i64::from(c.i32()?),
                            (2, Type::I32) => this.nulls = i64::from(c.i32()?),
                            (3, Type::I32) => this.rows = i64::from(c.i32()?),
                            (4, Type::I32) => this.encoding = c.i32()?,
                            (5 | 6, Type::I32) => {
                                let len = i64::from(c.i32()?);
                                // A negative value of either remains visible, whatever the other
                                // is.
                                this.levels = if len < 0 || this.levels < 0 {
                                    -1
                                } else {
                                    this.levels + len
                                };
                                if id == 6 {
                                    this.repetition_levels = len;
                                }
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
        if this.decoded < 0 || this.stored < 0 {
            return Err(c.bad("its size is below zero, or it has none"));
        }
        Ok(this)
    }
}
