//! Which rows a file has, in which blocks, and where their bytes are.
//!
//! A *block* is what is read and shuffled as a unit: a row group, a record batch, a run of records.
//! A *piece* is a part of a block whose number of rows and bytes are known: one per block in
//! formats with their own blocks; many where rows just follow each other, so that one row can be
//! read without the whole block. Memory is 20 bytes per piece and 12 per block, and grows with
//! bytes, not with rows: a piece has at least [`PIECE_TARGET_BYTES`](limits::PIECE_TARGET_BYTES) or
//! thousands of rows.
//!
//! Invariant: the pieces of a block follow each other in the file (blocks need not); a block has at
//! least one piece, every piece ends within the file, and no block has more than `u32::MAX` rows.

use crate::index::codec::{Reader, put, unzigzag, zigzag};
use forebay_core::{Error, Result, limits};
use std::ops::Range;

/// Rows per block of one file, and where their bytes are; see the [module](self).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockIndex {
    rows: Vec<u32>,
    offsets: Vec<u64>,
    lens: Vec<u64>,
    /// Where each block's pieces end.
    piece_ends: Vec<u32>,
    /// Rows before the end of each block.
    row_ends: Vec<u64>,
}

/// A part of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its rows, counted within the block.
    pub rows: Range<u32>,
    /// Its bytes in the file.
    pub bytes: Range<u64>,
    /// Its number within the file.
    pub number: usize,
}

impl BlockIndex {
    /// How many blocks the file has.
    pub fn blocks(&self) -> usize {
        self.piece_ends.len()
    }

    /// All rows of the file.
    pub fn rows(&self) -> u64 {
        self.row_ends.last().copied().unwrap_or(0)
    }

    /// # Panics
    /// If the block does not exist; the same holds for every method that takes a block's number.
    pub fn block_rows(&self, block: usize) -> u32 {
        let rows = self.row_range(block);
        (rows.end - rows.start) as u32
    }

    /// Rows of a block, counted within the file.
    pub fn row_range(&self, block: usize) -> Range<u64> {
        let start = if block == 0 {
            0
        } else {
            self.row_ends[block - 1]
        };
        start..self.row_ends[block]
    }

    /// The number of rows of each block in order, for a plan's shape.
    pub fn each_block_rows(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        (0..self.blocks()).map(|b| u64::from(self.block_rows(b)))
    }

    /// Block and row within it.
    pub fn locate(&self, row: u64) -> Option<(usize, u32)> {
        let block = self.row_ends.partition_point(|&end| end <= row);
        (block < self.blocks()).then(|| (block, (row - self.row_range(block).start) as u32))
    }

    /// The bytes of a block, from its first piece to its last.
    pub fn bytes(&self, block: usize) -> Range<u64> {
        let pieces = self.piece_range(block);
        self.offsets[pieces.start]..self.offsets[pieces.end - 1] + self.lens[pieces.end - 1]
    }

    /// The pieces of a block, in order.
    pub fn pieces(&self, block: usize) -> impl Iterator<Item = Piece> + '_ {
        let mut row = 0;
        self.piece_range(block).map(move |number| {
            let rows = row..row + self.rows[number];
            row = rows.end;
            Piece {
                rows,
                bytes: self.offsets[number]..self.offsets[number] + self.lens[number],
                number,
            }
        })
    }

    /// The bytes that hold these rows of a block (sorted; [`Rows::All`](super::Rows) is `None`):
    /// pieces that touch are one range.
    pub fn bytes_of_rows(&self, block: usize, rows: Option<&[u32]>) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for piece in self.pieces_of_rows(block, rows) {
            match ranges.last_mut() {
                Some(last) if last.end == piece.bytes.start => last.end = piece.bytes.end,
                _ => ranges.push(piece.bytes),
            }
        }
        ranges
    }

    /// The pieces that hold any of these rows.
    pub fn pieces_of_rows<'a>(
        &'a self,
        block: usize,
        rows: Option<&'a [u32]>,
    ) -> impl Iterator<Item = Piece> + 'a {
        self.pieces(block).filter(move |piece| {
            rows.is_none_or(|rows| {
                rows.get(rows.partition_point(|&r| r < piece.rows.start))
                    .is_some_and(|&r| r < piece.rows.end)
            })
        })
    }

    /// Memory that it holds.
    pub fn memory_bytes(&self) -> usize {
        self.rows.capacity() * 4
            + (self.offsets.capacity() + self.lens.capacity() + self.row_ends.capacity()) * 8
            + self.piece_ends.capacity() * 4
    }

    /// Number of pieces in the file.
    pub fn piece_count(&self) -> usize {
        self.rows.len()
    }

    fn piece_range(&self, block: usize) -> Range<usize> {
        let start = if block == 0 {
            0
        } else {
            self.piece_ends[block - 1] as usize
        };
        start..self.piece_ends[block] as usize
    }

    /// About five bytes per piece.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        put(out, self.blocks() as u64);
        put(out, self.rows.len() as u64);
        let mut expected = 0u64;
        for block in 0..self.blocks() {
            let pieces = self.piece_range(block);
            put(out, pieces.len() as u64);
            for n in pieces {
                put(out, u64::from(self.rows[n]));
                put(out, zigzag(self.offsets[n].wrapping_sub(expected) as i64));
                put(out, self.lens[n]);
                expected = self.offsets[n] + self.lens[n];
            }
        }
    }

    /// `None` for anything that violates the invariant for a file of `size` bytes.
    pub(crate) fn decode(r: &mut Reader<'_>, size: u64) -> Option<Self> {
        let (blocks, pieces) = (
            usize::try_from(r.number()?).ok()?,
            usize::try_from(r.number()?).ok()?,
        );
        // No piece takes fewer than three bytes.
        if pieces > limits::FILE_PIECES_MAX || blocks > pieces || pieces > r.bytes.len() / 3 {
            return None;
        }
        let mut builder = BlockIndexBuilder::with_capacity(size, blocks, pieces);
        let mut expected = 0u64;
        for _ in 0..blocks {
            let count = r.number()?;
            for _ in 0..count {
                let rows = r.number()?;
                let start = expected.wrapping_add(unzigzag(r.number()?) as u64);
                let end = start.checked_add(r.number()?)?;
                builder.piece(rows, start..end).ok()?;
                expected = end;
            }
            builder.end_block().ok()?;
        }
        (builder.index.rows.len() == pieces).then(|| builder.finish())
    }
}

/// Collects the pieces of a file in order.
#[derive(Clone, Debug)]
pub struct BlockIndexBuilder {
    index: BlockIndex,
    size: u64,
    rows: u64,
    bytes: u64,
}

impl BlockIndexBuilder {
    /// For a file of `size` bytes.
    pub fn new(size: u64) -> Self {
        Self::with_capacity(size, 0, 0)
    }

    fn with_capacity(size: u64, blocks: usize, pieces: usize) -> Self {
        let index = BlockIndex {
            rows: Vec::with_capacity(pieces),
            offsets: Vec::with_capacity(pieces),
            lens: Vec::with_capacity(pieces),
            piece_ends: Vec::with_capacity(blocks),
            row_ends: Vec::with_capacity(blocks),
        };
        Self {
            index,
            size,
            rows: 0,
            bytes: 0,
        }
    }

    /// A block of one piece.
    ///
    /// # Errors
    /// As [`BlockIndexBuilder::piece`].
    pub fn block(&mut self, rows: u64, bytes: Range<u64>) -> Result<()> {
        self.piece(rows, bytes)?;
        self.end_block()
    }

    /// The next piece of the current block.
    ///
    /// # Errors
    /// `Corrupt` if it lies outside the file or does not follow the piece before; `Unsupported`
    /// past a limit.
    pub fn piece(&mut self, rows: u64, bytes: Range<u64>) -> Result<()> {
        let first = self.index.piece_ends.last().copied().unwrap_or(0) as usize;
        let n = self.index.rows.len();
        let follows =
            n == first || self.index.offsets[n - 1] + self.index.lens[n - 1] <= bytes.start;
        if bytes.start > bytes.end || bytes.end > self.size || !follows {
            return Err(Error::corrupt(format!(
                "it says that a block is at bytes {}..{}, which is outside of the {} bytes of the \
                 file, or before the rows that precede it",
                bytes.start, bytes.end, self.size
            )));
        }
        if n >= limits::FILE_PIECES_MAX {
            return Err(Error::unsupported(format!(
                "the file has more than {} blocks",
                limits::FILE_PIECES_MAX
            ))
            .hint("write it with larger row groups or batches, or as several files"));
        }
        self.rows = self.rows.saturating_add(rows);
        self.bytes = self.bytes.saturating_add(bytes.end - bytes.start);
        let Some(rows) = u32::try_from(rows)
            .ok()
            .filter(|_| self.rows <= u64::from(u32::MAX))
        else {
            return Err(Error::unsupported(format!(
                "a block has {} rows, at offset {}; the limit is {}",
                self.rows,
                bytes.start,
                u32::MAX
            ))
            .hint("write the file with smaller row groups or batches"));
        };
        self.index.rows.push(rows);
        self.index.offsets.push(bytes.start);
        self.index.lens.push(bytes.end - bytes.start);
        Ok(())
    }

    /// Ends the block.
    ///
    /// # Errors
    /// `Corrupt` if it has no piece.
    pub fn end_block(&mut self) -> Result<()> {
        let n = self.index.rows.len() as u32;
        if self.index.piece_ends.last().copied().unwrap_or(0) == n {
            return Err(Error::corrupt("a block does not have any bytes"));
        }
        self.index.piece_ends.push(n);
        self.index.row_ends.push(self.index.rows() + self.rows);
        (self.rows, self.bytes) = (0, 0);
        Ok(())
    }

    /// Ends the block if it has any piece.
    ///
    /// # Errors
    /// As [`BlockIndexBuilder::end_block`].
    pub fn end_started_block(&mut self) -> Result<()> {
        let ended = self.index.piece_ends.last().copied().unwrap_or(0) as usize;
        match self.index.rows.len() > ended {
            true => self.end_block(),
            false => Ok(()),
        }
    }

    /// Rows of the block that has not ended.
    pub fn started_rows(&self) -> u64 {
        self.rows
    }

    /// Bytes of the file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The next piece of rows that just follow each other; the block ends automatically when it is
    /// large enough.
    ///
    /// # Errors
    /// As [`BlockIndexBuilder::piece`].
    pub fn run(
        &mut self,
        rows: u64,
        bytes: Range<u64>,
        block_bytes: u64,
        block_rows: u32,
    ) -> Result<bool> {
        self.piece(rows, bytes)?;
        let full = self.bytes >= block_bytes || self.rows >= u64::from(block_rows);
        if full {
            self.end_block()?;
        }
        Ok(full)
    }

    /// The complete blocks.
    pub fn index(&self) -> &BlockIndex {
        &self.index
    }

    /// The index; an incomplete block becomes its last.
    pub fn finish(mut self) -> BlockIndex {
        if self.index.rows.len() as u32 > self.index.piece_ends.last().copied().unwrap_or(0) {
            self.index.piece_ends.push(self.index.rows.len() as u32);
            self.index.row_ends.push(self.index.rows() + self.rows);
        }
        let i = &mut self.index;
        for v in [&mut i.offsets, &mut i.lens, &mut i.row_ends] {
            v.shrink_to_fit();
        }
        i.rows.shrink_to_fit();
        i.piece_ends.shrink_to_fit();
        self.index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> BlockIndex {
        let mut b = BlockIndexBuilder::new(1000);
        b.block(10, 4..100).unwrap();
        b.piece(3, 100..200).unwrap();
        b.piece(0, 200..200).unwrap();
        b.piece(4, 250..300).unwrap();
        b.end_block().unwrap();
        b.block(0, 300..300).unwrap();
        b.piece(1, 300..1000).unwrap();
        b.finish()
    }

    #[test]
    fn rows_are_found_in_blocks_and_pieces() {
        let index = sample();
        assert_eq!((index.blocks(), index.rows()), (4, 18));
        assert_eq!(index.each_block_rows().collect::<Vec<_>>(), [10, 7, 0, 1]);
        assert_eq!(index.locate(0), Some((0, 0)));
        assert_eq!(index.locate(9), Some((0, 9)));
        assert_eq!(index.locate(10), Some((1, 0)));
        assert_eq!(index.locate(17), Some((3, 0)));
        assert_eq!(index.locate(18), None);
        assert_eq!(index.bytes(1), 100..300);
        assert_eq!(index.bytes_of_rows(1, None), [100..200, 250..300]);
        assert_eq!(
            index.bytes_of_rows(1, Some(&[3])).as_slice(),
            std::slice::from_ref(&(250..300))
        );
        assert_eq!(
            index.bytes_of_rows(1, Some(&[0, 2])).as_slice(),
            std::slice::from_ref(&(100..200))
        );
        assert_eq!(index.bytes_of_rows(1, Some(&[])), [] as [Range<u64>; 0]);
    }

    #[test]
    fn stored_and_read_back() {
        for index in [sample(), BlockIndex::default()] {
            let mut out = Vec::new();
            index.encode(&mut out);
            let mut r = Reader { bytes: &out };
            assert_eq!(BlockIndex::decode(&mut r, 1000).unwrap(), index);
            assert!(r.bytes.is_empty());
            for cut in 0..out.len() {
                assert!(
                    BlockIndex::decode(&mut Reader { bytes: &out[..cut] }, 1000).is_none(),
                    "cut at {cut}"
                );
            }
        }
        let mut out = Vec::new();
        sample().encode(&mut out);
        assert!(
            BlockIndex::decode(&mut Reader { bytes: &out }, 999).is_none(),
            "past the end of the file"
        );
    }

    #[test]
    fn lies_are_refused() {
        let mut b = BlockIndexBuilder::new(100);
        assert!(b.end_block().is_err());
        assert!(b.piece(1, 50..101).is_err());
        #[allow(clippy::reversed_empty_ranges, reason = "as a lying file has it")]
        let backwards = 50..40;
        assert!(b.piece(1, backwards).is_err());
        b.piece(1, 50..60).unwrap();
        assert!(b.piece(1, 40..50).is_err());
        assert!(b.piece(u64::from(u32::MAX), 60..70).is_err());
    }
}
