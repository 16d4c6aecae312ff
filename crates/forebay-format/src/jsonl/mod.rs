//! JSON lines: each line that is not blank is a row, and its fields are columns.
//!
//! The file is read once, 8 MiB at a time. What is kept is a sparse index (where every run of lines
//! of at least a piece begins) and the columns (`infer.rs`). If the caller has named the columns,
//! lines are only counted. A last line without a newline counts. Lines end at `\n`; a `\r` before
//! it is not part of the row. A byte order mark at the beginning of the file is skipped.
//!
//! Besides the fields there is a column [`LINE`], which holds the line itself, for callers that ask
//! for it by name. If the lines have a field of that name, the name means the field.

mod columns;
mod infer;
mod scan;

pub(crate) use columns::Builder;

use crate::tabular::{
    BlockIndex, BlockIndexBuilder, Detail, FileIndex, Format, IndexOptions, Need,
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use columns::not_json;
use forebay_core::{Error, Result, limits};
use infer::Columns;
use std::{ops::Range, sync::Arc};

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The column of the lines themselves.
pub const LINE: &str = "json";
/// What distinguishes it from a field of that name.
const LINE_MARK: (&str, &str) = ("forebay:column", "line");

/// The column of the lines themselves, as a schema field.
pub fn line_field() -> Field {
    let (key, value) = LINE_MARK;
    Field::new(LINE, DataType::Utf8, false).with_metadata([(key, value)])
}

/// Whether a field is [`line_field`].
pub(crate) fn is_line(field: &Field) -> bool {
    let (key, value) = LINE_MARK;
    field.metadata().get(key).is_some_and(|v| v == value)
}

/// The columns of several files combined: numbers of different types are floats, values without a
/// common type JSON. Files without a field have only their lines.
pub fn common_schema<'a>(schemas: impl Iterator<Item = &'a SchemaRef>) -> SchemaRef {
    let with_fields = schemas.filter(|schema| !schema.fields().iter().any(|f| is_line(f)));
    schema_of(&Columns::common(with_fields.map(Arc::as_ref)))
}

/// Whether JSON can be read as these columns.
///
/// # Errors
/// `Invalid` with the column and its type.
pub fn check_columns(schema: &SchemaRef) -> Result<()> {
    Builder::new(schema.clone()).map(drop)
}

fn schema_of(columns: &Columns) -> SchemaRef {
    Arc::new(if columns.is_empty() {
        Schema::new(vec![line_field()])
    } else {
        Schema::new(columns.fields())
    })
}

/// The next line, without its end, and how many bytes it takes with it; `None` for a blank one.
pub(crate) fn next(bytes: &[u8]) -> (Option<&[u8]>, usize) {
    let (line, len) = match find_newline(bytes) {
        Some(n) => (&bytes[..n], n + 1),
        None => (bytes, bytes.len()),
    };
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    (
        line.iter()
            .any(|b| !b.is_ascii_whitespace())
            .then_some(line),
        len,
    )
}

fn find_newline(bytes: &[u8]) -> Option<usize> {
    // Eight at a time: a byte of `x` is zero where a newline was.
    let mut at = 0;
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        let x = u64::from_le_bytes(*word) ^ 0x0a0a_0a0a_0a0a_0a0a;
        let zeros = x.wrapping_sub(0x0101_0101_0101_0101) & !x & 0x8080_8080_8080_8080;
        if zeros != 0 {
            return Some(at + zeros.trailing_zeros() as usize / 8);
        }
        at += 8;
    }
    rest.iter().position(|&b| b == b'\n').map(|n| at + n)
}

#[derive(Debug)]
pub(crate) struct Indexer {
    size: u64,
    /// Lines that begin before this are done: the next one begins here.
    at: u64,
    /// Where the request ends.
    asked: u64,
    options: IndexOptions,
    /// `None`: the caller has named them.
    columns: Option<Columns>,
    blocks: BlockIndexBuilder,
    /// Where the current piece began, and its whole lines.
    piece_start: u64,
    piece_rows: u64,
    /// Lines of the file, including blank ones: for people, who count from 1.
    lines: u64,
}

impl Indexer {
    pub fn new(size: u64, options: &IndexOptions) -> Self {
        Self {
            size,
            at: 0,
            asked: 0,
            columns: options.columns.is_none().then(Columns::default),
            options: options.clone(),
            blocks: BlockIndexBuilder::new(size),
            piece_start: 0,
            piece_rows: 0,
            lines: 0,
        }
    }

    pub fn step(&mut self) -> Result<Need> {
        if self.at < self.size {
            return Ok(Need::one(self.next_range()));
        }
        if self.piece_start < self.size && self.piece_rows > 0 {
            self.end_piece(self.size)?;
        }
        Ok(Need::Done)
    }

    /// From the beginning of a line: a line that does not end in the range is requested again, with
    /// more after it.
    fn next_range(&mut self) -> Range<u64> {
        let before = self.asked.saturating_sub(self.at);
        let length = limits::FILL_RUN_MAX_BYTES.max(2 * before);
        self.asked = self.size.min(self.at + length);
        self.at..self.asked
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        let skip = self
            .at
            .checked_sub(offset)
            .and_then(|n| usize::try_from(n).ok());
        let Some(mut fresh) = skip.and_then(|skip| bytes.get(skip..)) else {
            return Ok(());
        };
        fresh = &fresh[..fresh.len().min((self.size - self.at) as usize)];
        let to_the_end = self.at + fresh.len() as u64 == self.size;
        if self.at == 0 && fresh.starts_with(BYTE_ORDER_MARK) {
            fresh = &fresh[BYTE_ORDER_MARK.len()..];
            self.at = BYTE_ORDER_MARK.len() as u64;
            self.piece_start = self.at;
        }
        while !fresh.is_empty() {
            let (line, len) = match find_newline(fresh) {
                Some(n) => (&fresh[..n], n + 1),
                None if to_the_end => (fresh, fresh.len()),
                None => (fresh, 0),
            };
            if line.len() as u64 > limits::RECORD_MAX_BYTES {
                return Err(Error::unsupported(format!(
                    "the line at offset {} of the JSONL file is longer than {} bytes",
                    self.at,
                    limits::RECORD_MAX_BYTES
                ))
                .hint("check that it is JSONL, with one object on each line"));
            }
            if len == 0 {
                break;
            }
            self.lines += 1;
            self.line(line)?;
            self.at += len as u64;
            fresh = &fresh[len..];
            if self.at - self.piece_start >= self.options.piece_bytes
                || self.piece_rows >= u64::from(self.options.block_rows)
            {
                self.end_piece(self.at)?;
            }
        }
        Ok(())
    }

    fn line(&mut self, line: &[u8]) -> Result<()> {
        if line.iter().all(u8::is_ascii_whitespace) {
            return Ok(());
        }
        self.piece_rows += 1;
        let Some(columns) = &mut self.columns else {
            return Ok(());
        };
        let here = |e: Error| {
            e.context(format!("line {} of the JSONL file", self.lines))
                .hint(
                    "write one JSON object on each line; \"schema\": {\"json\": \"string\"} takes \
                 lines as they are",
                )
        };
        if std::str::from_utf8(line).is_err() {
            return Err(here(Error::corrupt("it is not UTF-8")));
        }
        columns.learn(line).map_err(|bad| here(not_json(&bad)))?;
        if columns.len() > limits::JSONL_COLUMNS_MAX {
            return Err(here(Error::unsupported(format!(
                "its fields and those of the lines before it make more than {} columns",
                limits::JSONL_COLUMNS_MAX
            ))));
        }
        Ok(())
    }

    fn end_piece(&mut self, end: u64) -> Result<()> {
        if self.piece_rows > 0 {
            self.blocks.run(
                self.piece_rows,
                self.piece_start..end,
                self.options.block_bytes,
                self.options.block_rows,
            )?;
        }
        (self.piece_start, self.piece_rows) = (end, 0);
        Ok(())
    }

    pub fn finish(self) -> Result<FileIndex> {
        let blocks: BlockIndex = self.blocks.finish();
        let schema = match (self.columns, &self.options.columns) {
            (None, Some(named)) => named.clone(),
            (columns, _) => self
                .options
                .schemas
                .share(schema_of(&columns.unwrap_or_default())),
        };
        Ok(FileIndex {
            format: Format::Jsonl,
            size: self.size,
            blocks,
            schema,
            detail: Detail::None,
        })
    }
}
