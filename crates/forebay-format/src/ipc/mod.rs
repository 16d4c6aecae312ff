//! Arrow IPC, as a file and as a stream: finds record batches, and reads one from its bytes.
//!
//! A file's footer says where its batches are, and each batch's header how many rows it has; in a
//! stream, the reader hops from header to header. Bodies are not read. Dictionaries are read when a
//! file is opened: for a stream, those in force at each batch, because it may replace them on the
//! way.
//!
//! The library trusts the offsets and lengths in headers; [`check`] compares them with the body
//! before the library sees them.

mod check;
mod index;
mod message;
mod read;

pub(crate) use index::{FileIndexer, StreamIndexer};
pub(crate) use message::{looks_like_stream, schema_of_stream};
pub(crate) use read::{Opened, Opener, Read};

use crate::index::codec::{Reader, put, unzigzag, zigzag};
use forebay_core::limits;
use std::ops::Range;

/// Where the parts of a file are that readers need besides the blocks.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Places {
    /// The message or the footer that holds the schema.
    pub schema: Range<u64>,
    /// For each block, how many of its bytes are its header.
    pub heads: Vec<u32>,
    pub dictionaries: Vec<Dictionary>,
}

/// A batch of dictionary values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Dictionary {
    pub bytes: Range<u64>,
    pub head: u32,
    /// The first block that may use it.
    pub block: u32,
}

impl Places {
    pub fn memory_bytes(&self) -> usize {
        self.heads.capacity() * 4 + self.dictionaries.capacity() * size_of::<Dictionary>()
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        put(out, self.schema.start);
        put(out, self.schema.end);
        let mut before = 0i64;
        for &head in &self.heads {
            put(out, zigzag(i64::from(head) - before));
            before = i64::from(head);
        }
        put(out, self.dictionaries.len() as u64);
        for d in &self.dictionaries {
            for n in [
                d.bytes.start,
                d.bytes.end,
                u64::from(d.head),
                u64::from(d.block),
            ] {
                put(out, n);
            }
        }
    }

    pub fn decode(r: &mut Reader<'_>, blocks: usize, size: u64) -> Option<Self> {
        let range = |r: &mut Reader<'_>| {
            let (start, end) = (r.number()?, r.number()?);
            (start <= end && end <= size).then_some(start..end)
        };
        let schema = range(r)?;
        (schema.end - schema.start <= limits::FOOTER_MAX_BYTES + 16).then_some(())?;
        let mut heads = Vec::with_capacity(blocks.min(r.bytes.len()));
        let mut before = 0i64;
        for _ in 0..blocks {
            before = before.checked_add(unzigzag(r.number()?))?;
            heads.push(u32::try_from(before).ok()?);
        }
        let count = usize::try_from(r.number()?).ok()?;
        (count <= r.bytes.len() / 4).then_some(())?;
        let mut dictionaries = Vec::with_capacity(count);
        for _ in 0..count {
            let bytes = range(r)?;
            let (head, block) = (
                u32::try_from(r.number()?).ok()?,
                u32::try_from(r.number()?).ok()?,
            );
            (u64::from(head) <= bytes.end - bytes.start).then_some(())?;
            dictionaries.push(Dictionary { bytes, head, block });
        }
        Some(Self {
            schema,
            heads,
            dictionaries,
        })
    }
}
