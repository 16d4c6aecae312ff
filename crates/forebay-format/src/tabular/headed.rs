//! Files that begin with a head which says where each sample is: shards of MDS, chunks of litData.
//! Their index is made of the head alone.

use super::{BlockIndex, BlockIndexBuilder, FileIndex, Held, IndexOptions, Need};
use bytes::Bytes;
use forebay_core::{Error, Result};
use std::{fmt::Debug, ops::Range};

/// How much of the beginning is read first.
const FIRST_READ_BYTES: u64 = 64 << 10;

/// How such a head is read.
pub(crate) trait Headed: Debug {
    /// What it says.
    type Head: Debug;

    /// What such a file is called, with its article, and what its head is in messages of
    /// [`Headed::corrupt`].
    const FILE: &'static str;
    const HEAD: &'static str;

    fn corrupt(what: &str) -> Error;

    /// The bytes of the head, from the first ones of the file. `None`: there are not enough of them.
    fn head_len(&self, begin: &[u8]) -> Result<Option<u64>>;

    /// What a head says. `size` is that of the file, or of what it unpacks to: `None` until that is
    /// known. Returns `None` if the head cannot be parsed before, because it might lie about what
    /// follows.
    fn parse(&self, head: &[u8], size: Option<u64>) -> Result<Option<Self::Head>>;

    /// `size` is that of the file, `unpacked` what it unpacks to if it is compressed.
    fn index(&self, head: Self::Head, size: u64, unpacked: Option<u64>) -> Result<FileIndex>;
}

#[derive(Debug)]
pub(crate) struct Indexer<H: Headed> {
    rules: H,
    size: u64,
    held: Held,
    head: Option<H::Head>,
}

impl<H: Headed> Indexer<H> {
    pub fn new(rules: H, size: u64) -> Self {
        Self {
            rules,
            size,
            held: Held::default(),
            head: None,
        }
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
            return Err(H::corrupt("it is cut off"));
        };
        if end > self.size {
            return Err(H::corrupt(&format!("{} is longer than the file", H::HEAD)));
        }
        let all: Range<u64> = 0..end;
        let Some(head) = self.held.get(&all) else {
            return Ok(Need::one(all));
        };
        self.head = self.rules.parse(&head, Some(self.size))?;
        self.held.clear();
        Ok(Need::Done)
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.held.put(offset, bytes);
        Ok(())
    }

    pub fn finish(self) -> Result<FileIndex> {
        let head = self.head.ok_or_else(unread::<H>)?;
        self.rules.index(head, self.size, None)
    }
}

/// Indexes what a compressed file unpacks to.
#[derive(Debug)]
pub(crate) struct Unpacked<H: Headed> {
    rules: H,
    packed: u64,
    /// The head, or as much of it as came, until it was parsed.
    held: Vec<u8>,
    is_whole: bool,
    head: Option<H::Head>,
    at: u64,
}

impl<H: Headed> Unpacked<H> {
    pub fn new(rules: H, packed: u64) -> Self {
        Self {
            rules,
            packed,
            held: Vec::new(),
            is_whole: false,
            head: None,
            at: 0,
        }
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
            self.head = self.rules.parse(&self.held, None)?;
            if self.head.is_some() {
                self.held = Vec::new();
            }
        }
        Ok(())
    }

    pub fn finish(self) -> Result<FileIndex> {
        if !self.is_whole {
            return Err(H::corrupt("it is cut off"));
        }
        let head = match self.head {
            Some(head) => Some(head),
            None => self.rules.parse(&self.held, Some(self.at))?,
        };
        let head = head.ok_or_else(unread::<H>)?;
        self.rules.index(head, self.packed, Some(self.at))
    }
}

fn unread<H: Headed>() -> Error {
    Error::internal(format!("{} was indexed before its head was read", H::FILE))
}

/// The blocks of `count` samples, of which sample `n` is in the bytes from `place(n)` to
/// `place(n + 1)`; places do not descend. A piece is a run of samples that is large enough.
pub(crate) fn runs(
    count: usize,
    place: impl Fn(usize) -> u64,
    options: &IndexOptions,
) -> Result<BlockIndex> {
    let mut blocks = BlockIndexBuilder::new(place(count));
    let mut first = 0;
    for n in 1..=count {
        let is_enough = place(n) - place(first) >= options.piece_bytes
            || n - first >= options.block_rows as usize;
        if is_enough || n == count {
            let bytes = place(first)..place(n);
            let rows = (n - first) as u64;
            blocks.run(rows, bytes, options.block_bytes, options.block_rows)?;
            first = n;
        }
    }
    Ok(blocks.finish())
}
