//! From the head of a chunk to its index.

use super::{
    corrupt,
    described::{Described, Items},
};
use crate::{
    mds,
    megatron::Sequences,
    tabular::{
        BlockIndex, BlockIndexBuilder, Detail, FileIndex, Format, IndexOptions,
        headed::{self, Headed},
    },
};
use forebay_core::{Error, Result, limits};
use std::{ops::Range, sync::Arc};

/// The most rows of a piece of tokens: empty items take no bytes.
const PIECE_ROWS_MAX: u64 = 1024;
/// What chunks begin with whose items are compressed in runs.
const FRAMED: &[u8; 4] = b"LDFZ";

/// What is needed besides the chunk.
#[derive(Debug)]
pub(crate) struct Rules {
    described: Arc<Described>,
    options: IndexOptions,
    /// What `index.json` says of the number of items.
    items: u64,
}

/// What the head of a chunk says.
#[derive(Debug)]
pub(crate) struct Head {
    blocks: BlockIndex,
    rows: Rows,
}

#[derive(Debug)]
enum Rows {
    Values(usize),
    Tokens(Sequences),
}

impl Rules {
    pub fn new(options: &IndexOptions) -> Result<Self> {
        let (described, items) = options.described.clone().ok_or_else(|| {
            Error::internal("a chunk of litData is indexed without what describes it")
        })?;
        Ok(Self {
            described,
            options: options.clone(),
            items,
        })
    }

    fn values(
        &self,
        items: usize,
        columns: usize,
        place: impl Fn(usize) -> u64,
    ) -> Result<BlockIndex> {
        if items > 0 && place(items) == place(0) {
            return Err(Error::unsupported(
                "the chunk has its items only as the Arrow table after them, which Forebay does \
                 not read",
            )
            .hint("write samples that are nested (lists, dicts) as Parquet or JSONL"));
        }
        let short = |&n: &usize| place(n) - place(n - 1) < 4 * columns as u64;
        if let Some(n) = (1..=items).find(short) {
            return Err(corrupt(&format!(
                "item {} has {} bytes, which is less than the sizes of its {columns} values",
                n - 1,
                place(n) - place(n - 1)
            )));
        }
        headed::runs(items, place, &self.options)
    }

    /// Each item is a row.
    fn tokens(
        &self,
        code: u8,
        items: usize,
        place: impl Fn(usize) -> u64,
    ) -> Result<(BlockIndex, Sequences)> {
        let mut rows = TokenRows::new(code, place(items), self)?;
        let width = rows.sequences.width();
        for n in 1..=items {
            let bytes = place(n) - place(n - 1);
            if !bytes.is_multiple_of(width) {
                return Err(corrupt(&format!(
                    "item {} has {bytes} bytes, but its tokens have {width} each",
                    n - 1
                )));
            }
            rows.push(place(n - 1)..place(n))?;
        }
        rows.finish()
    }

    /// Each run of so many tokens is a row; what remains is in none.
    fn blocks(&self, code: u8, all: Range<u64>, tokens: u32) -> Result<(BlockIndex, Sequences)> {
        let mut rows = TokenRows::new(code, all.end, self)?;
        let block = u64::from(tokens) * rows.sequences.width();
        let mut at = all.start;
        while block > 0 && all.end - at >= block {
            rows.push(at..at + block)?;
            at += block;
        }
        rows.finish()
    }
}

impl Headed for Rules {
    type Head = Head;

    const FILE: &'static str = "a chunk";
    const HEAD: &'static str = "its head";

    fn corrupt(what: &str) -> Error {
        corrupt(what)
    }

    fn head_len(&self, begin: &[u8]) -> Result<Option<u64>> {
        let Some((items, _)) = begin.split_first_chunk::<4>() else {
            return Ok(None);
        };
        if items == FRAMED {
            return Err(Error::unsupported(
                "items of the chunk are compressed in runs, which Forebay does not read",
            )
            .hint("optimize the data set again with compression_level=\"chunk\", or without"));
        }
        let items = u64::from(u32::from_le_bytes(*items));
        if items != self.items {
            return Err(corrupt(&format!(
                "it begins with the number {items}, but by index.json it has {} items",
                self.items
            )));
        }
        let len = 4 + 4 * (items + 1);
        if len > limits::FOOTER_MAX_BYTES {
            return Err(Error::unsupported(format!(
                "the head of the chunk is {len} bytes long; the limit is {}",
                limits::FOOTER_MAX_BYTES
            ))
            .hint("write smaller chunks"));
        }
        Ok(Some(len))
    }

    /// Blocks of tokens are made of what the head says of the size, not of items.
    fn parse(&self, head: &[u8], size: Option<u64>) -> Result<Option<Head>> {
        let Some(size) = size else {
            return Ok(None);
        };
        let places = head.get(4..).unwrap_or_default().as_chunks::<4>().0;
        let place = |n: usize| u64::from(u32::from_le_bytes(places[n]));
        let Some(items) = places.len().checked_sub(1) else {
            return Err(corrupt("it is cut off"));
        };
        if place(0) != head.len() as u64 {
            return Err(corrupt(&format!(
                "its first item begins at offset {}, and its head ends at {}",
                place(0),
                head.len()
            )));
        }
        if let Some(n) = (1..=items).find(|&n| place(n) < place(n - 1)) {
            return Err(corrupt(&format!(
                "item {} begins at offset {} and ends at {}",
                n - 1,
                place(n - 1),
                place(n)
            )));
        }
        let end = place(items);
        // Behind the items, litData may have them in other forms.
        if end > size {
            return Err(corrupt(&format!(
                "its items end at offset {end}, but it is {size} bytes long"
            )));
        }
        let (blocks, rows) = match self.described.items {
            Items::Values(columns) => (self.values(items, columns, place)?, Rows::Values(columns)),
            Items::Tokens(code) => {
                let (blocks, sequences) = match self.options.block_tokens {
                    Some(tokens) => self.blocks(code, place(0)..end, tokens)?,
                    None => self.tokens(code, items, place)?,
                };
                (blocks, Rows::Tokens(sequences))
            }
        };
        Ok(Some(Head { blocks, rows }))
    }

    fn index(&self, head: Head, size: u64, unpacked: Option<u64>) -> Result<FileIndex> {
        let beside = self.described.beside;
        let detail = match head.rows {
            Rows::Values(columns) => {
                Detail::Mds(mds::Layout::of_variable(columns, unpacked, beside))
            }
            Rows::Tokens(sequences) => Detail::Sequences(sequences.unpacking_to(unpacked)),
        };
        let schema = self.described.schema.clone();
        Ok(FileIndex {
            format: Format::LitData,
            size,
            blocks: head.blocks,
            schema: self.options.schemas.share(schema),
            detail,
        })
    }
}

/// Rows of tokens that follow each other.
struct TokenRows<'a> {
    sequences: Sequences,
    blocks: BlockIndexBuilder,
    options: &'a IndexOptions,
    piece: Range<u64>,
    rows: u64,
}

impl<'a> TokenRows<'a> {
    fn new(code: u8, end: u64, rules: &'a Rules) -> Result<Self> {
        let options = &rules.options;
        let sequences = Sequences::new(code, false, rules.described.beside)
            .ok_or_else(|| Error::internal("a type of tokens without a width"))?;
        Ok(Self {
            sequences,
            blocks: BlockIndexBuilder::new(end),
            options,
            piece: 0..0,
            rows: 0,
        })
    }

    fn push(&mut self, place: Range<u64>) -> Result<()> {
        let options = self.options;
        if self.rows == 0 {
            self.piece = place.start..place.start;
            let before = self.blocks.index().rows() + self.blocks.started_rows();
            self.sequences.begin_piece(before);
        }
        let bytes = place.end - place.start;
        // A chunk has at most 4 GiB.
        let tokens = u32::try_from(bytes / self.sequences.width()).unwrap_or(u32::MAX);
        self.sequences.push(tokens, 1, 0)?;
        self.piece.end = place.end;
        self.rows += 1;
        let most = PIECE_ROWS_MAX.min(u64::from(options.block_rows)).max(1);
        if self.piece.end - self.piece.start >= options.piece_bytes || self.rows >= most {
            self.end_piece()?;
        }
        Ok(())
    }

    fn end_piece(&mut self) -> Result<()> {
        let rows = std::mem::take(&mut self.rows);
        if rows > 0 {
            let (piece, options) = (self.piece.clone(), self.options);
            self.blocks
                .run(rows, piece, options.block_bytes, options.block_rows)?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(BlockIndex, Sequences)> {
        self.end_piece()?;
        self.sequences.shrink();
        Ok((self.blocks.finish(), self.sequences))
    }
}
