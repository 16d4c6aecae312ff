//! The order of one source in one of its epochs: a bijection between positions and rows, with
//! constant time in each direction.
//!
//! - `none` is the identity, `full` one permutation of all rows, `window` is in [`window`], `block`
//!   in [`block`].
//! - Everything is computed from (seed, source, epoch): there is no state, so any party computes
//!   the same, and any position may be asked for first.
//! - Besides positions and rows, an order knows *blocks*: which ones a stretch of it needs, and
//!   when one is needed next. Prefetch and eviction use that.

mod block;
mod recent;
mod window;

pub(crate) use recent::Recent;

use crate::{Permutation, Shape, Shuffle, key, key::Purpose};
use block::Blocks;
use forebay_core::Result;
use std::{collections::HashSet, ops::Range, sync::Arc};
use window::Windows;

/// The orders of one source, all epochs.
#[derive(Debug)]
pub(crate) struct Order {
    shape: Arc<Shape>,
    seed: u64,
    source: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    None,
    Window(Windows),
    Block(Blocks),
    Full,
}

impl Order {
    pub fn new(shape: Arc<Shape>, shuffle: Shuffle, seed: u64, source: u64) -> Result<Self> {
        let kind = match shuffle {
            Shuffle::None => Kind::None,
            Shuffle::Window { rows: 1 } => Kind::None,
            Shuffle::Window { rows } => {
                Kind::Window(Windows::new(rows, shape.rows(), seed, source))
            }
            Shuffle::Block { blocks } => {
                Kind::Block(Blocks::new(blocks, shape.clone(), seed, source)?)
            }
            Shuffle::Full => Kind::Full,
        };
        Ok(Order {
            shape,
            seed,
            source,
            kind,
        })
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Prefix sums that are made for each epoch.
    pub fn sums(&self) -> u64 {
        match &self.kind {
            Kind::Block(blocks) => blocks.sums(),
            _ => 0,
        }
    }

    /// Makes the prefix sums of an epoch.
    pub fn prepare(&self, epoch: u64) {
        if let Kind::Block(blocks) = &self.kind {
            blocks.prepare(epoch);
        }
    }

    /// The most memory that is kept ready of epochs and groups of blocks.
    pub fn memory_bytes(&self) -> u64 {
        match &self.kind {
            Kind::Block(blocks) => blocks.memory_bytes(),
            _ => 0,
        }
    }

    /// The number of rows in an epoch.
    pub fn rows(&self) -> u64 {
        self.shape.rows()
    }

    fn full(&self, epoch: u64) -> Permutation {
        Permutation::new(
            self.rows(),
            key::derive(self.seed, Purpose::Rows, self.source, epoch, 0),
        )
    }

    pub fn row_at(&self, epoch: u64, position: u64) -> u64 {
        match &self.kind {
            Kind::None => position,
            Kind::Window(windows) => windows.row_at(epoch, position),
            Kind::Block(blocks) => blocks.row_at(epoch, position),
            Kind::Full => self.full(epoch).at(position),
        }
    }

    pub fn position_of(&self, epoch: u64, row: u64) -> u64 {
        match &self.kind {
            Kind::None => row,
            Kind::Window(windows) => windows.position_of(epoch, row),
            Kind::Block(blocks) => blocks.position_of(epoch, row),
            Kind::Full => self.full(epoch).position_of(row),
        }
    }

    /// Passes the rows at a run of positions to `each`, in order.
    pub fn for_each(&self, epoch: u64, positions: Range<u64>, mut each: impl FnMut(u64)) {
        match &self.kind {
            Kind::None => positions.for_each(each),
            Kind::Window(windows) => windows.for_each(epoch, positions, each),
            Kind::Block(blocks) => blocks.for_each(epoch, positions, each),
            Kind::Full => self.full(epoch).for_each(positions, &mut each),
        }
    }

    /// The blocks that a run of positions needs, each with the first position that needs it, in
    /// that order.
    pub fn first_uses(&self, epoch: u64, positions: Range<u64>) -> Vec<(u64, u64)> {
        match &self.kind {
            Kind::None => self.blocks_in_order(positions),
            Kind::Block(blocks) => blocks.first_uses(epoch, positions),
            Kind::Window(_) | Kind::Full => {
                let (mut seen, mut uses, mut position) =
                    (HashSet::new(), Vec::new(), positions.start);
                self.for_each(epoch, positions, |row| {
                    let block = self.shape.block_of(row);
                    if seen.insert(block) {
                        uses.push((position, block));
                    }
                    position += 1;
                });
                uses
            }
        }
    }

    fn blocks_in_order(&self, positions: Range<u64>) -> Vec<(u64, u64)> {
        let (mut uses, mut at) = (Vec::new(), positions.start);
        while at < positions.end {
            let block = self.shape.block_of(at);
            uses.push((at, block));
            at = self.shape.block_range(block).end;
        }
        uses
    }

    /// The first position at or after `position`, in this epoch, whose row belongs to this block.
    pub fn next_use(&self, epoch: u64, position: u64, block: u64) -> Option<u64> {
        let rows = self.shape.block_range(block);
        if rows.is_empty() || position >= self.rows() {
            return None;
        }
        // The part of the order that can contain the block's rows.
        let span = match &self.kind {
            Kind::None => return (position < rows.end).then(|| position.max(rows.start)),
            Kind::Window(windows) => windows.span(rows.clone()),
            Kind::Block(blocks) => blocks.span(epoch, block),
            Kind::Full => 0..self.rows(),
        };
        let from = span.start.max(position);
        // Either walk the order until a row of the block comes, or ask for the position of each of
        // its rows. The walk should take span / rows steps and is abandoned when the other way is
        // shorter, so the work is at most twice the shorter of the two.
        let looked = from..span.end.min(from.saturating_add(rows.end - rows.start));
        let (mut found, mut at) = (None, looked.start);
        for chunk in chunks(looked.clone(), 64) {
            self.for_each(epoch, chunk, |row| {
                if found.is_none() && rows.contains(&row) {
                    found = Some(at);
                }
                at += 1;
            });
            if found.is_some() {
                return found;
            }
        }
        if looked.end >= span.end {
            return None;
        }
        rows.map(|row| self.position_of(epoch, row))
            .filter(|&p| p >= from)
            .min()
    }
}

fn chunks(range: Range<u64>, by: u64) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    std::iter::successors(Some(range.start), move |&at| at.checked_add(by))
        .take_while(move |&at| at < end)
        .map(move |at| at..end.min(at + by))
}
