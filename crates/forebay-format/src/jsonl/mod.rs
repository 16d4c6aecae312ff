//! JSON lines: each line that is not blank is a row.
//!
//! Newlines are counted in one pass over the file, by reads of 8 MiB; nothing is parsed. Kept is a
//! sparse index: where every run of lines of at least a piece begins. A last line without a newline
//! counts. Lines end at `\n`; a `\r` before it is not part of the row. A byte order mark at the
//! beginning of the file is passed over.

use crate::tabular::{
    BlockIndex, BlockIndexBuilder, Detail, FileIndex, Format, IndexOptions, Need,
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use forebay_core::{Error, Result, limits};
use std::sync::Arc;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

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
    // Eight at a time: a byte is zero in `x` where it was a newline.
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
    at: u64,
    schema: SchemaRef,
    blocks: BlockIndexBuilder,
    block_bytes: u64,
    block_rows: u32,
    piece_bytes: u64,
    /// Where the piece at hand began, and its whole lines.
    piece_start: u64,
    piece_rows: u64,
    /// Where the line at hand began, and whether anything but space was seen in it.
    line_start: u64,
    line_has_text: bool,
}

impl Indexer {
    pub fn new(size: u64, options: &IndexOptions) -> Self {
        let schema = Arc::new(Schema::new(vec![Field::new("json", DataType::Utf8, false)]));
        Self {
            size,
            at: 0,
            schema: options.schemas.share(schema),
            blocks: BlockIndexBuilder::new(size),
            block_bytes: options.block_bytes,
            block_rows: options.block_rows,
            piece_bytes: options.piece_bytes,
            piece_start: 0,
            piece_rows: 0,
            line_start: 0,
            line_has_text: false,
        }
    }

    pub fn step(&mut self) -> Result<Need> {
        if self.at < self.size {
            return Ok(Need::one(
                self.at..self.size.min(self.at + limits::FILL_RUN_MAX_BYTES),
            ));
        }
        if self.line_start < self.size {
            self.line(self.size)?;
        }
        if self.piece_start < self.size && self.piece_rows > 0 {
            self.end_piece(self.size)?;
        }
        Ok(Need::Done)
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        let Some(fresh) = self
            .at
            .checked_sub(offset)
            .and_then(|skip| bytes.get(usize::try_from(skip).ok()?..))
        else {
            return Ok(());
        };
        let mut fresh = &fresh[..fresh.len().min((self.size - self.at) as usize)];
        if self.at == 0 && fresh.starts_with(BYTE_ORDER_MARK) {
            fresh = &fresh[BYTE_ORDER_MARK.len()..];
            self.at = BYTE_ORDER_MARK.len() as u64;
            (self.piece_start, self.line_start) = (self.at, self.at);
        }
        while !fresh.is_empty() {
            let end = find_newline(fresh);
            let text = &fresh[..end.unwrap_or(fresh.len())];
            self.line_has_text |= text.iter().any(|b| !b.is_ascii_whitespace());
            let taken = end.map_or(text.len(), |n| n + 1);
            self.at += taken as u64;
            fresh = &fresh[taken..];
            if end.is_some() {
                self.line(self.at)?;
            }
            if self.at - self.line_start > limits::RECORD_MAX_BYTES {
                return Err(Error::unsupported(format!(
                    "the line at offset {} of the JSONL file is longer than {} bytes",
                    self.line_start,
                    limits::RECORD_MAX_BYTES
                ))
                .hint("is it JSONL, with one object per line?"));
            }
        }
        Ok(())
    }

    /// A line ends here.
    fn line(&mut self, end: u64) -> Result<()> {
        self.piece_rows += u64::from(self.line_has_text);
        self.line_has_text = false;
        self.line_start = end;
        if end - self.piece_start >= self.piece_bytes
            || self.piece_rows >= u64::from(self.block_rows)
        {
            self.end_piece(end)?;
        }
        Ok(())
    }

    fn end_piece(&mut self, end: u64) -> Result<()> {
        if self.piece_rows > 0 {
            self.blocks.run(
                self.piece_rows,
                self.piece_start..end,
                self.block_bytes,
                self.block_rows,
            )?;
        }
        (self.piece_start, self.piece_rows) = (end, 0);
        Ok(())
    }

    pub fn finish(self) -> Result<FileIndex> {
        let blocks: BlockIndex = self.blocks.finish();
        Ok(FileIndex {
            format: Format::Jsonl,
            size: self.size,
            blocks,
            schema: self.schema,
            detail: Detail::None,
        })
    }
}
