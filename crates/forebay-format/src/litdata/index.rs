//! From the head of a chunk to its index.

use super::{
    corrupt,
    described::{Described, Items},
};
use crate::{
    mds,
    megatron::Sequences,
    tabular::{BlockIndex, BlockIndexBuilder, Detail, FileIndex, Format, Held, IndexOptions, Need},
};
use bytes::Bytes;
use forebay_core::{Error, Result, limits};
use std::{ops::Range, sync::Arc};

/// How much of the beginning is read first.
const FIRST_READ_BYTES: u64 = 64 << 10;
/// The most rows of a piece of tokens: empty items take no bytes.
const PIECE_ROWS_MAX: u64 = 1024;
/// What chunks begin with whose items are compressed in runs.
const FRAMED: &[u8; 4] = b"LDFZ";

/// What is needed besides the chunk.
#[derive(Debug)]
struct Rules {
    described: Arc<Described>,
    options: IndexOptions,
    /// What `index.json` says of the number of items.
    items: u64,
}

/// What the head of a chunk says.
#[derive(Debug)]
struct Head {
    blocks: BlockIndex,
    rows: Rows,
}

#[derive(Debug)]
enum Rows {
    Values(usize),
    Tokens(Sequences),
}

impl Rules {
    fn new(options: &IndexOptions) -> Result<Self> {
        let (described, items) = options.described.clone().ok_or_else(|| {
            Error::internal("a chunk of litData is indexed without what describes it")
        })?;
        Ok(Self {
            described,
            options: options.clone(),
            items,
        })
    }

    /// The bytes before the first item, from the first ones of the chunk. `None`: there are not
    /// enough of them.
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

    /// `head` ends where the first item begins. The chunk has, or unpacks to, `size` bytes.
    fn parse(&self, head: &[u8], size: u64) -> Result<Head> {
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
        Ok(Head { blocks, rows })
    }

    fn values(
        &self,
        items: usize,
        columns: usize,
        place: impl Fn(usize) -> u64,
    ) -> Result<BlockIndex> {
        let options = &self.options;
        if items > 0 && place(items) == place(0) {
            return Err(Error::unsupported(
                "the chunk has its items only as the Arrow table after them, which Forebay does \
                 not read",
            )
            .hint("write samples that are nested (lists, dicts) as Parquet or JSONL"));
        }
        let mut blocks = BlockIndexBuilder::new(place(items));
        let mut first = 0;
        for n in 1..=items {
            if place(n) - place(n - 1) < 4 * columns as u64 {
                return Err(corrupt(&format!(
                    "item {} has {} bytes, which is less than the sizes of its {columns} values",
                    n - 1,
                    place(n) - place(n - 1)
                )));
            }
            let is_enough = place(n) - place(first) >= options.piece_bytes
                || n - first >= options.block_rows as usize;
            if is_enough || n == items {
                let bytes = place(first)..place(n);
                let rows = (n - first) as u64;
                blocks.run(rows, bytes, options.block_bytes, options.block_rows)?;
                first = n;
            }
        }
        Ok(blocks.finish())
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

    /// `size` is that of the file, `unpacked` what it unpacks to if it is compressed.
    fn index(&self, head: Head, size: u64, unpacked: Option<u64>) -> FileIndex {
        let beside = self.described.beside;
        let detail = match head.rows {
            Rows::Values(columns) => {
                Detail::Mds(mds::Layout::of_variable(columns, unpacked, beside))
            }
            Rows::Tokens(sequences) => Detail::Sequences(sequences.unpacking_to(unpacked)),
        };
        let schema = self.described.schema.clone();
        FileIndex {
            format: Format::LitData,
            size,
            blocks: head.blocks,
            schema: self.options.schemas.share(schema),
            detail,
        }
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

#[derive(Debug)]
pub(crate) struct Indexer {
    size: u64,
    rules: Rules,
    held: Held,
    head: Option<Head>,
}

impl Indexer {
    pub fn new(size: u64, options: &IndexOptions) -> Result<Self> {
        Ok(Self {
            size,
            rules: Rules::new(options)?,
            held: Held::default(),
            head: None,
        })
    }

    pub fn step(&mut self) -> Result<Need> {
        if self.head.is_some() {
            return Ok(Need::Done);
        }
        let first = 0..self.size.min(FIRST_READ_BYTES);
        let Some(begin) = self.held.get(&first) else {
            return Ok(Need::one(first));
        };
        let Some(end) = self.rules.head_len(&begin)? else {
            return Err(corrupt("it is cut off"));
        };
        if end > self.size {
            return Err(corrupt("its head is longer than the file"));
        }
        let all: Range<u64> = 0..end;
        let Some(head) = self.held.get(&all) else {
            return Ok(Need::one(all));
        };
        self.head = Some(self.rules.parse(&head, self.size)?);
        self.held.clear();
        Ok(Need::Done)
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.held.put(offset, bytes);
        Ok(())
    }

    pub fn finish(self) -> Result<FileIndex> {
        let head = self
            .head
            .ok_or_else(|| Error::internal("a chunk was indexed before its head was read"))?;
        Ok(self.rules.index(head, self.size, None))
    }
}

/// Indexes what a compressed chunk unpacks to.
#[derive(Debug)]
pub(crate) struct Unpacked {
    packed: u64,
    rules: Rules,
    /// The head, or as much of it as came. Only when all came is it known whether it lies about what
    /// follows.
    held: Vec<u8>,
    is_whole: bool,
    at: u64,
}

impl Unpacked {
    pub fn new(packed: u64, options: &IndexOptions) -> Result<Self> {
        Ok(Self {
            packed,
            rules: Rules::new(options)?,
            held: Vec::new(),
            is_whole: false,
            at: 0,
        })
    }

    pub fn memory_after(&self, bytes: usize) -> usize {
        let (needed, capacity) = (self.held.len() + bytes, self.held.capacity());
        match self.is_whole || needed <= capacity {
            true => capacity,
            false => needed.max(2 * capacity),
        }
    }

    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        self.at += bytes.len() as u64;
        if self.is_whole {
            return Ok(());
        }
        let capacity = self.memory_after(bytes.len());
        self.held.reserve_exact(capacity - self.held.len());
        self.held.extend_from_slice(bytes);
        if let Some(end) = self.rules.head_len(&self.held)?
            && self.held.len() as u64 >= end
        {
            self.held.truncate(end as usize);
            self.is_whole = true;
        }
        Ok(())
    }

    pub fn finish(self) -> Result<FileIndex> {
        if !self.is_whole {
            return Err(corrupt("it is cut off"));
        }
        let head = self.rules.parse(&self.held, self.at)?;
        Ok(self.rules.index(head, self.packed, Some(self.at)))
    }
}
