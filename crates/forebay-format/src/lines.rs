//! Files of text whose rows follow each other: which rows there are, and where.
//!
//! The file is read once, from front to back. What is kept is a sparse index (where every run of
//! rows of at least a piece begins), and what a [`Grammar`] learns from the rows: their columns.
//!
//! Of a file that is compressed as a whole, the unpacked bytes are indexed ([`Unpacked`]): they come
//! in order, and their number is known at their end.

use crate::tabular::{BlockIndexBuilder, Detail, FileIndex, Format, IndexOptions, Need};
use arrow_schema::SchemaRef;
use bytes::Bytes;
use forebay_core::{Error, Result, limits};
use std::{fmt::Debug, ops::Range};

/// Which may precede the text of a file.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// How a file of text is divided into rows, and what columns these have.
pub(crate) trait Grammar: Debug {
    /// The longest row.
    const ROW_MAX_BYTES: u64;

    fn format(&self) -> Format;

    /// How many bytes the next row takes with its end; `None` if it does not end in `bytes`, which
    /// are not empty. `is_last`: the file ends with them.
    fn row_len(&self, bytes: &[u8], is_last: bool) -> Option<usize>;

    /// Learns from a row with its end. Whether it is one: blank lines and headers are not.
    fn learn(&mut self, row: &[u8]) -> Result<bool>;

    /// The error for a row that is too long, or does not end where the file does. `at` is where it
    /// begins.
    fn endless(&self, at: u64, is_cut: bool) -> Error;

    /// The columns of all rows.
    fn schema(self, options: &IndexOptions) -> Result<SchemaRef>;
}

#[derive(Debug)]
pub(crate) struct Indexer<G> {
    grammar: G,
    size: u64,
    /// Rows that begin before this are done: the next one begins here.
    at: u64,
    /// Where the request ends.
    asked: u64,
    options: IndexOptions,
    blocks: BlockIndexBuilder,
    /// Where the current piece began, and its whole rows.
    piece_start: u64,
    piece_rows: u64,
}

impl<G: Grammar> Indexer<G> {
    pub fn new(grammar: G, size: u64, options: &IndexOptions) -> Self {
        Self {
            grammar,
            size,
            at: 0,
            asked: 0,
            options: options.clone(),
            blocks: BlockIndexBuilder::new(size),
            piece_start: 0,
            piece_rows: 0,
        }
    }

    pub fn step(&mut self) -> Result<Need> {
        if self.at < self.size {
            return Ok(Need::one(self.next_range()));
        }
        Ok(Need::Done)
    }

    /// From the beginning of a row: a row that does not end in the range is requested again, with
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
        let Some(fresh) = skip.and_then(|skip| bytes.get(skip..)) else {
            return Ok(());
        };
        let fresh = &fresh[..fresh.len().min((self.size - self.at) as usize)];
        self.take(fresh, self.at + fresh.len() as u64 == self.size)
    }

    /// Takes the rows that end in `fresh`, which begins where the next row does.
    fn take(&mut self, mut fresh: &[u8], is_last: bool) -> Result<()> {
        if self.at == 0 && fresh.starts_with(BYTE_ORDER_MARK) {
            fresh = &fresh[BYTE_ORDER_MARK.len()..];
            self.at = BYTE_ORDER_MARK.len() as u64;
            self.piece_start = self.at;
        }
        while !fresh.is_empty() {
            let row = self.grammar.row_len(fresh, is_last);
            if row.unwrap_or(fresh.len()) as u64 > G::ROW_MAX_BYTES {
                return Err(self.grammar.endless(self.at, false));
            }
            let Some(len) = row else {
                if is_last {
                    return Err(self.grammar.endless(self.at, true));
                }
                break;
            };
            if self.grammar.learn(&fresh[..len])? {
                self.piece_rows += 1;
            }
            self.at += len as u64;
            fresh = &fresh[len..];
            if self.piece_rows == 0 {
                self.piece_start = self.at;
            } else if self.at - self.piece_start >= self.options.piece_bytes
                || self.piece_rows >= u64::from(self.options.block_rows)
            {
                self.end_piece()?;
            }
        }
        Ok(())
    }

    fn end_piece(&mut self) -> Result<()> {
        if self.piece_rows > 0 {
            self.blocks.run(
                self.piece_rows,
                self.piece_start..self.at,
                self.options.block_bytes,
                self.options.block_rows,
            )?;
        }
        (self.piece_start, self.piece_rows) = (self.at, 0);
        Ok(())
    }

    pub fn finish(self) -> Result<FileIndex> {
        let size = self.size;
        self.finish_as(size, Detail::None)
    }

    fn finish_as(mut self, size: u64, detail: Detail) -> Result<FileIndex> {
        self.end_piece()?;
        Ok(FileIndex {
            format: self.grammar.format(),
            size,
            blocks: self.blocks.finish(),
            schema: self.grammar.schema(&self.options)?,
            detail,
        })
    }
}

/// Rows are looked for when so many bytes are there that were not looked at.
const LOOK_BYTES: usize = 256 << 10;

/// Indexes what a compressed file unpacks to.
#[derive(Debug)]
pub(crate) struct Unpacked<G> {
    inner: Indexer<G>,
    /// The size of the file as it is.
    packed: u64,
    /// From the beginning of the next row.
    held: Vec<u8>,
    /// So much has to be held before rows are looked for.
    enough: usize,
}

impl<G: Grammar> Unpacked<G> {
    pub fn new(grammar: G, packed: u64, options: &IndexOptions) -> Self {
        Self {
            inner: Indexer::new(grammar, u64::MAX, options),
            packed,
            held: Vec::new(),
            enough: LOOK_BYTES,
        }
    }

    /// The memory that it holds when this many more bytes were pushed.
    pub fn memory_after(&self, bytes: usize) -> usize {
        let (needed, capacity) = (self.held.len() + bytes, self.held.capacity());
        if needed <= capacity {
            capacity
        } else {
            needed.max(2 * capacity)
        }
    }

    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        let capacity = self.memory_after(bytes.len());
        self.held.reserve_exact(capacity - self.held.len());
        self.held.extend_from_slice(bytes);
        if self.held.len() < self.enough {
            return Ok(());
        }
        self.look(false)
    }

    fn look(&mut self, is_last: bool) -> Result<()> {
        let before = self.inner.at;
        self.inner.take(&self.held, is_last)?;
        self.held.drain(..(self.inner.at - before) as usize);
        // A row that does not end here is looked at again when twice as much of it is there.
        self.enough = LOOK_BYTES.max(2 * self.held.len());
        Ok(())
    }

    pub fn finish(mut self) -> Result<FileIndex> {
        self.look(true)?;
        let unpacked = self.inner.at;
        self.inner
            .finish_as(self.packed, Detail::Unpacked(unpacked))
    }
}

pub(crate) fn find_newline(bytes: &[u8]) -> Option<usize> {
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
