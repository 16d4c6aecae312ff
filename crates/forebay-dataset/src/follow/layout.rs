//! Where a dataset's rows are, as the cache sees it: from an entry (a small object, a chunk of a
//! large one) to the rows or blocks that it holds.
//!
//! A dataset's own tables lead from rows to files; this only adds the way from the hash of a name
//! to the file: 16 bytes per file, as long as a plan over the dataset is followed.

use crate::{Dataset, FileIndex, Format, rows::KeptDecoded};
use forebay_core::limits::CHUNK_BYTES;
use forebay_format::tabular::Projection;
use forebay_store::{Cached, Part};
use std::{ops::Range, sync::Arc};

/// What an entry of the cache holds from a dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Holds {
    /// This row, or a part of it.
    Row(u64),
    /// These bytes of a file, in which are blocks of the dataset, or parts of them.
    Blocks {
        file: usize,
        blocks: Range<u64>,
        bytes: Range<u64>,
    },
    /// Decoded rows of a block: these columns ([`KeptDecoded::is`]).
    Rows { columns: u64, block: u64 },
    /// What any read of the file needs: a head, an index of members.
    Key,
    /// The file's unpacked form, or anything else whose place in it is unknown.
    File(Range<u64>),
}

/// What a row is fetched with: the object that it is, or its block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnitOfRow {
    pub file: u32,
    /// The object's row, or the block, as the dataset counts them.
    pub unit: u64,
    /// The block as its file counts them, and the row in it.
    pub block: u32,
    pub row: u32,
}

/// The way from an entry of the cache to the rows of one dataset.
pub struct Layout {
    dataset: Arc<Dataset>,
    /// The low half of a name's hash and the file, ordered.
    files: Box<[(u64, u32)]>,
    /// Bytes of an average row.
    row_bytes: u64,
    /// What holds all columns, decoded.
    decoded: Option<KeptDecoded>,
}

impl Layout {
    /// Sorts the hashes of all names: with millions of files, this takes time.
    pub fn new(dataset: Arc<Dataset>) -> Self {
        let table = dataset.files();
        let hash = |i| forebay_core::name::hash_name(table.bucket(i), table.key(i)) as u64;
        let mut files: Box<[(u64, u32)]> = (0..table.len()).map(|i| (hash(i), i as u32)).collect();
        files.sort_unstable();
        let row_bytes = dataset.row_bytes().max(1);
        let decoded = KeptDecoded::of(&dataset, &Projection::All);
        Self {
            dataset,
            files,
            row_bytes,
            decoded,
        }
    }

    /// What holds all columns, decoded.
    pub(crate) fn decoded(&self) -> Option<&KeptDecoded> {
        self.decoded.as_ref()
    }

    /// The dataset whose rows these are.
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.dataset
    }

    /// Bytes of its files for each row, on average; at least 1.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Memory that it holds, in bytes, besides the dataset's.
    pub fn memory_bytes(&self) -> u64 {
        self.files.len() as u64 * 16
    }

    /// What an entry holds; `None` if it belongs to no file of the dataset, or to another version
    /// of one.
    pub(crate) fn holds(&self, entry: &Cached) -> Option<Holds> {
        let hash = entry.name as u64;
        let from = self.files.partition_point(|(h, _)| *h < hash);
        let file = self.files[from..]
            .iter()
            .take_while(|(h, _)| *h == hash)
            .map(|(_, file)| *file as usize);
        let file = file
            .into_iter()
            .find(|&file| self.dataset.file(file as u32).version() == entry.version)?;
        let size = self.dataset.files().size(file);
        let bytes = match entry.part {
            None if size > CHUNK_BYTES => return Some(Holds::Key),
            None => 0..size,
            Some(Part::Chunk(i)) => {
                let start = u64::from(i) * CHUNK_BYTES;
                start..(start + CHUNK_BYTES).min(size)
            }
            Some(Part::Aux(forebay_engine::AUX_INDEX, _)) => return Some(Holds::Key),
            Some(Part::Rows { columns, block, .. }) => {
                let blocks = self.dataset.file_blocks(file);
                let block = blocks.start + u64::from(block);
                return (block < blocks.end).then_some(Holds::Rows { columns, block });
            }
            Some(Part::Aux(..)) => return Some(Holds::File(self.dataset.file_blocks(file))),
        };
        let is_packed = |index: &Arc<FileIndex>| index.unpacked_bytes().is_some();
        Some(match self.dataset.format() {
            Format::Objects => Holds::Row(file as u64),
            // Its blocks are in what it unpacks to.
            _ if self.dataset.index(file).is_some_and(is_packed) => {
                Holds::File(self.dataset.file_blocks(file))
            }
            _ => Holds::Blocks {
                file,
                blocks: self.blocks_of(file, &bytes),
                bytes,
            },
        })
    }

    /// The blocks of a file that have bytes in this range.
    fn blocks_of(&self, file: usize, bytes: &Range<u64>) -> Range<u64> {
        let blocks = self.dataset.file_blocks(file);
        let first = partition(&blocks, |b| self.block_bytes(file, b).end <= bytes.start);
        let end = partition(&blocks, |b| self.block_bytes(file, b).start < bytes.end);
        first..end.max(first)
    }

    /// The bytes of a block, in its file.
    pub(crate) fn block_bytes(&self, file: usize, block: u64) -> Range<u64> {
        let first = self.dataset.file_blocks(file).start;
        match self.dataset.index(file) {
            Some(index) => index.blocks().bytes((block - first) as usize),
            None => 0..self.dataset.files().size(file),
        }
    }

    /// What is fetched for a row.
    pub(crate) fn unit_of_row(&self, row: u64) -> Option<UnitOfRow> {
        let located = self.dataset.locate(row).ok()?;
        Some(UnitOfRow {
            file: located.file,
            unit: match self.dataset.format() {
                Format::Objects => row,
                _ => located.global_block,
            },
            block: located.block,
            row: located.row_in_block,
        })
    }
}

/// The first number of `of` for which `before` is false; `before` is true for all numbers before
/// that.
fn partition(of: &Range<u64>, before: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (of.start, of.end);
    while low < high {
        let middle = low + (high - low) / 2;
        if before(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_point_of_numbers() {
        for of in [0..0, 3..3, 0..10, 5..100] {
            for at in of.start..=of.end {
                assert_eq!(partition(&of, |n| n < at), at);
            }
        }
    }
}
