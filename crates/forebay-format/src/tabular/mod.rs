//! Files of rows: which rows they have, and record batches of the wanted rows.
//!
//! Three parsers without I/O, one after the other, each with `step` (what is needed next) and
//! `feed`:
//!
//! 1. A [`FileIndexer`] reads footers and headers, and becomes a [`FileIndex`]: blocks, rows,
//!    schema. Kept for good; small.
//! 2. A [`FileOpener`] reads what decoding needs of a file besides its blocks (a Parquet footer,
//!    Arrow dictionaries; for most formats nothing), and becomes a [`FileReader`]. Kept while there
//!    is memory.
//! 3. A [`BlockRead`] reads rows of one block, and becomes a `RecordBatch`.
//!
//! ```
//! # use forebay_format::tabular::*; use std::sync::Arc; use bytes::Bytes;
//! # fn main() -> forebay_core::Result<()> {
//! let file = Bytes::from_static(b"{\"n\": 0}\n{\"n\": 1}\n{\"n\": 2}\n");
//! let read = |r: &std::ops::Range<u64>| file.slice(r.start as usize..r.end as usize); // from a disk, from an origin
//!
//! let mut indexer = FileIndexer::new(Format::Jsonl, file.len() as u64, &IndexOptions::default())?;
//! while let Need::Ranges(ranges) = indexer.step()? {
//!     for r in &ranges { indexer.feed(r.start, read(r))?; }
//! }
//! let index = Arc::new(indexer.finish()?);
//!
//! let mut opener = FileOpener::new(index.clone())?;
//! while let Need::Ranges(ranges) = opener.step()? {
//!     for r in &ranges { opener.feed(r.start, read(r))?; }
//! }
//! let reader = Arc::new(opener.finish()?);
//!
//! let (block, row) = index.blocks().locate(2).expect("the file has three rows");
//! let mut rows = reader.read(block, Rows::sorted([row])?, &Projection::All)?;
//! while let Need::Ranges(ranges) = rows.step()? {
//!     for r in &ranges { rows.feed(r.start, read(r))?; }
//! }
//! assert_eq!(rows.finish()?.num_rows(), 1);
//! # Ok(()) }
//! ```
//!
//! **The contract of `step` and `feed`.** Each range of a [`Need`] is fed once, whole (or a larger
//! range) in one buffer, in any order; then comes the next `step`. Buffers are kept as they are,
//! not copied. What was not fed is requested again. An error is final.
//!
//! Files of lines may be compressed as a whole ([`format::packed`]): an [`UnpackedIndexer`] is fed with
//! what they unpack to, and a [`BlockRead`] asks for ranges of that ([`FileIndex::unpacked_bytes`]).
//!
//! Archives get their rows from a [`MemberIndex`](crate::MemberIndex): [`FileIndex::of_members`],
//! [`FileReader::of_members`].

mod blocks;
mod file;
pub mod format;
pub(crate) mod headed;
mod held;
mod read;
mod rows;
mod schemas;
mod types;

pub use crate::parquet::facts::{Bloom, Bound, ColumnFacts, Facts, Nulls};
pub use blocks::{BlockIndex, Piece};
pub use file::{FileIndex, FileIndexer, IndexOptions, UnpackedIndexer};
pub use format::{Format, NotRead};
pub use read::{BlockRead, FileOpener, FileReader};
pub use rows::{Projection, Rows};
pub use schemas::{Schemas, decode_schema, encode_schema};
pub use types::{Misfit, cast, common_field, common_type, is_json, named_field, nulls, type_name};

pub(crate) use blocks::BlockIndexBuilder;
pub(crate) use file::Detail;
pub(crate) use held::Held;
pub(crate) use rows::{BinaryRows, arrow_error, take_rows, text_rows};
pub(crate) use types::json_field;

use std::ops::Range;

/// What a parser needs next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Need {
    /// These bytes, each range in one buffer.
    Ranges(Vec<Range<u64>>),
    /// Memory for this many decoded bytes in total ([`BlockRead::allow`]). Only a reader with a
    /// bound asks for it.
    Memory(u64),
    /// Nothing more: `finish` returns the result.
    Done,
}

impl Need {
    pub(crate) fn one(range: Range<u64>) -> Self {
        Need::Ranges(vec![range])
    }
}
