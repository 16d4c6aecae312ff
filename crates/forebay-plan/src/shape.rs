//! The shape of a dataset: how many rows each of its blocks has.
//!
//! A plan needs to know nothing else about a dataset. Adjacent blocks of equal size form one *run*,
//! with the number of its first block and of its first row. So a file of a thousand equal row
//! groups and a shorter last one costs two runs (48 bytes), and finding a row or a block is a
//! binary search over runs. A node sends the encoding to clients: versioned, checksummed, and safe
//! to decode whoever sent it.

use forebay_core::{Error, Result, limits};
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 4] = b"FBS1";

/// Rows per block of one version of a dataset. Blocks may be empty.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Shape {
    runs: Vec<Run>,
    rows: u64,
    blocks: u64,
}

/// Blocks of the same size that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first_block: u64,
    first_row: u64,
    rows_per_block: u64,
}

impl Shape {
    /// The shape of blocks with these rows, in their order.
    pub fn from_blocks(rows: impl IntoIterator<Item = u64>) -> Result<Self> {
        Self::from_runs(rows.into_iter().map(|rows| (1, rows)))
    }

    /// The shape of `rows` rows in blocks of `block_rows`, the last one shorter.
    pub fn uniform(rows: u64, block_rows: u64) -> Result<Self> {
        if block_rows == 0 {
            return Err(
                Error::invalid("a block of 0 rows").hint("give the number of rows in a block")
            );
        }
        let rest = rows % block_rows;
        Self::from_runs([(rows / block_rows, block_rows), (u64::from(rest > 0), rest)])
    }

    /// The shape of runs `(blocks, rows per block)`.
    pub fn from_runs(runs: impl IntoIterator<Item = (u64, u64)>) -> Result<Self> {
        let mut shape = Shape::default();
        for (blocks, rows_per_block) in runs {
            shape.push(blocks, rows_per_block)?;
        }
        Ok(shape)
    }

    fn push(&mut self, blocks: u64, rows_per_block: u64) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let total_blocks = self
            .blocks
            .checked_add(blocks)
            .filter(|&b| b <= limits::PLAN_BLOCKS_MAX);
        let total_rows = blocks
            .checked_mul(rows_per_block)
            .and_then(|r| r.checked_add(self.rows))
            .filter(|&r| r <= limits::PLAN_ROWS_MAX);
        let (Some(total_blocks), Some(total_rows)) = (total_blocks, total_rows) else {
            return Err(Error::invalid(format!(
                "the dataset has more than {} rows or {} blocks",
                limits::PLAN_ROWS_MAX,
                limits::PLAN_BLOCKS_MAX
            ))
            .hint("split it into several datasets and mix them"));
        };
        if self
            .runs
            .last()
            .is_none_or(|last| last.rows_per_block != rows_per_block)
        {
            self.runs.push(Run {
                first_block: self.blocks,
                first_row: self.rows,
                rows_per_block,
            });
        }
        (self.blocks, self.rows) = (total_blocks, total_rows);
        Ok(())
    }

    /// The total number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The number of blocks, including empty ones.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The rows of a block. Panics if there is no such block.
    pub fn block_range(&self, block: u64) -> Range<u64> {
        assert!(
            block < self.blocks,
            "block {block} does not exist: there are {}",
            self.blocks
        );
        let run = &self.runs[self.runs.partition_point(|r| r.first_block <= block) - 1];
        let start = run.first_row + (block - run.first_block) * run.rows_per_block;
        start..start + run.rows_per_block
    }

    /// The block that holds a row. Panics if there is no such row.
    pub fn block_of(&self, row: u64) -> u64 {
        assert!(
            row < self.rows,
            "row {row} does not exist: there are {}",
            self.rows
        );
        // Of runs that begin at the same row, all but the last have empty blocks.
        let run = &self.runs[self.runs.partition_point(|r| r.first_row <= row) - 1];
        run.first_block + (row - run.first_row) / run.rows_per_block
    }

    /// The size of all blocks, if they are equal except for a last one that may be shorter; and the
    /// size of the last one.
    pub(crate) fn as_uniform(&self) -> Option<(u64, u64)> {
        match self.runs[..] {
            [run] => Some((run.rows_per_block, run.rows_per_block)),
            [run, last]
                if last.first_block + 1 == self.blocks
                    && last.rows_per_block < run.rows_per_block =>
            {
                Some((run.rows_per_block, last.rows_per_block))
            }
            _ => None,
        }
        .filter(|(rows, _)| *rows > 0)
    }

    /// Runs as `(blocks, rows per block)`.
    pub fn runs(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.runs.iter().enumerate().map(|(i, run)| {
            let end = self
                .runs
                .get(i + 1)
                .map_or(self.blocks, |next| next.first_block);
            (end - run.first_block, run.rows_per_block)
        })
    }

    /// Compact bytes: magic and version, the number of runs, the runs, a checksum. Numbers are
    /// LEB128.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(16 + 6 * self.runs.len());
        out.extend_from_slice(MAGIC);
        put_number(&mut out, self.runs.len() as u64);
        for (blocks, rows) in self.runs() {
            put_number(&mut out, blocks);
            put_number(&mut out, rows);
        }
        out.extend_from_slice(&xxh3_64(&out).to_le_bytes());
        out
    }

    /// Decodes what [`encode`](Shape::encode) wrote; an error for any other bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let broken = |what: &str| {
            Error::corrupt(format!("the shape of a dataset is damaged: {what}"))
                .hint("request it from the node again")
        };
        let (body, sum) = bytes
            .split_last_chunk::<8>()
            .ok_or_else(|| broken("too short"))?;
        let mut rest = body
            .strip_prefix(MAGIC)
            .ok_or_else(|| broken("it is not in format version 1"))?;
        if xxh3_64(body) != u64::from_le_bytes(*sum) {
            return Err(broken("its checksum does not match"));
        }
        let mut number =
            || take_number(&mut rest).ok_or_else(|| broken("a number is cut off or too long"));
        let runs = number()?;
        let mut shape = Shape::default();
        for _ in 0..runs {
            let (blocks, rows) = (number()?, number()?);
            if blocks == 0
                || shape
                    .runs
                    .last()
                    .is_some_and(|last| last.rows_per_block == rows)
            {
                return Err(broken("it has runs that no encoder writes"));
            }
            shape.push(blocks, rows)?;
        }
        if rest.is_empty() {
            Ok(shape)
        } else {
            Err(broken("it goes on after the last run"))
        }
    }

    /// A number that differs where shapes differ.
    pub(crate) fn digest(&self) -> u64 {
        xxh3_64(&self.encode())
    }
}

pub(crate) fn put_number(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

pub(crate) fn take_number(rest: &mut &[u8]) -> Option<u64> {
    let mut n = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, tail) = rest.split_first()?;
        *rest = tail;
        let bits = u64::from(byte & 0x7F);
        // Refuses numbers that do not fit, and zeros that no encoder writes: a shape has only one
        // encoding.
        if bits.leading_zeros() < shift || (byte == 0 && shift > 0) {
            return None;
        }
        n |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(n);
        }
    }
    None
}
