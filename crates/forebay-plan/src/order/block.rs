//! The shuffle `block(k)`: blocks in a random order, rows shuffled within each *group* of `k`
//! blocks that follow each other in it.
//!
//! A reader fetches whole blocks and holds `k` of them instead of the whole dataset, and still
//! delivers rows from all over it. The blocks are permuted by one bijection per epoch; block number
//! `j` of that order belongs to group `j / k`; the rows of a group, block by block, are permuted by
//! their own bijection.
//!
//! A group begins at the sum of the rows before it. With blocks of one size (the last may be
//! shorter) that is arithmetic. Otherwise there are prefix sums over the groups, 8 bytes each, made
//! once per epoch and kept for the few epochs in use; a binary search finds the group of a
//! position.

use super::Recent;
use crate::{Permutation, Shape, key, key::Purpose};
use forebay_core::{Error, Result, limits};
use std::{ops::Range, sync::Arc};

/// Epochs whose prefix sums are kept: two adjacent ones, for a job at the turn of the epoch, and
/// for a job that is asked about the next.
const EPOCHS_KEPT: usize = 2;
/// Groups that are kept ready: those at a job's own place, at its prefetch, and for other callers.
const GROUPS_KEPT: usize = 8;

#[derive(Debug)]
pub(super) struct Blocks {
    shape: Arc<Shape>,
    per_group: u64,
    seed: u64,
    source: u64,
    epochs: Recent<u64, Epoch>,
    groups: Recent<(u64, u64), Group>,
}

/// The order of the blocks in one epoch, and where its groups begin.
#[derive(Debug)]
struct Epoch {
    order: Permutation,
    starts: Starts,
}

#[derive(Debug)]
enum Starts {
    /// Groups of `rows` rows, except `short`, which has `lacks` fewer, because it contains the last
    /// block of the dataset.
    Even { rows: u64, short: u64, lacks: u64 },
    /// The first position of each group, and the end of the last.
    Sums(Vec<u64>),
}

/// The blocks of one group and the order of their rows.
#[derive(Debug)]
struct Group {
    positions: Range<u64>,
    order: Permutation,
    /// Number in the dataset, and first row, of each block.
    blocks: Vec<(u64, u64)>,
    /// Where the rows of each block begin among those of the group.
    offsets: Vec<u64>,
    /// The size of the blocks, if all have the same.
    even: Option<u64>,
}

impl Group {
    /// Which of the group's blocks holds the group's row number `i`, and that row in the dataset.
    #[inline]
    fn locate(&self, i: u64) -> (usize, u64) {
        let at = match self.even {
            // Dividing 32-bit numbers is several times as fast on many processors.
            Some(rows) if (i | rows) >> 32 == 0 => (i as u32 / rows as u32) as usize,
            Some(rows) => (i / rows) as usize,
            None => self.offsets.partition_point(|&offset| offset <= i) - 1,
        };
        (
            at,
            self.blocks[at]
                .1
                .wrapping_add(i.wrapping_sub(self.offsets[at])),
        )
    }
}

impl Blocks {
    pub fn new(per_group: u64, shape: Arc<Shape>, seed: u64, source: u64) -> Result<Self> {
        let per_group = per_group.min(shape.blocks());
        let groups = shape.blocks().div_ceil(per_group.max(1));
        if per_group > limits::PLAN_GROUP_BLOCKS_MAX {
            return Err(Error::invalid(format!(
                "the shuffle mixes {per_group} blocks at a time; the limit is {}",
                limits::PLAN_GROUP_BLOCKS_MAX
            ))
            .hint("the shuffle \"full\" mixes all rows"));
        }
        if shape.as_uniform().is_none() && groups > limits::PLAN_GROUPS_MAX {
            return Err(Error::invalid(format!(
                "the shuffle makes {groups} groups of unequal blocks; the limit is {}",
                limits::PLAN_GROUPS_MAX
            ))
            .hint("mix more blocks at a time"));
        }
        Ok(Blocks {
            shape,
            per_group,
            seed,
            source,
            epochs: Recent::new(EPOCHS_KEPT),
            groups: Recent::new(GROUPS_KEPT),
        })
    }

    /// Groups whose prefix sums are kept: none of blocks of one size.
    pub fn sums(&self) -> u64 {
        match self.shape.as_uniform() {
            Some(_) => 0,
            None => self.shape.blocks().div_ceil(self.per_group.max(1)),
        }
    }

    /// The most memory that is kept of epochs and groups.
    pub fn memory_bytes(&self) -> u64 {
        let of_block = size_of::<(u64, u64)>() + size_of::<u64>();
        EPOCHS_KEPT as u64 * self.sums() * size_of::<u64>() as u64
            + GROUPS_KEPT as u64 * self.per_group * of_block as u64
    }

    pub fn prepare(&self, epoch: u64) {
        self.epoch(epoch);
    }

    fn epoch(&self, epoch: u64) -> Arc<Epoch> {
        self.epochs.get(epoch, || {
            let blocks = self.shape.blocks();
            let order = Permutation::new(
                blocks,
                key::derive(self.seed, Purpose::Blocks, self.source, epoch, 0),
            );
            let starts = match self.shape.as_uniform() {
                Some((rows, last)) => Starts::Even {
                    rows: rows * self.per_group,
                    short: order.position_of(blocks - 1) / self.per_group,
                    lacks: rows - last,
                },
                None => {
                    let mut starts =
                        Vec::with_capacity(blocks.div_ceil(self.per_group) as usize + 1);
                    let (mut place, mut sum) = (0, 0);
                    order.for_each(0..blocks, |block| {
                        if place % self.per_group == 0 {
                            starts.push(sum);
                        }
                        let rows = self.shape.block_range(block);
                        (place, sum) = (place + 1, sum + (rows.end - rows.start));
                    });
                    starts.push(sum);
                    Starts::Sums(starts)
                }
            };
            Epoch { order, starts }
        })
    }

    /// The group that holds a position.
    fn group_at(&self, epoch: u64, position: u64) -> Arc<Group> {
        let starts = self.epoch(epoch);
        let number = match &starts.starts {
            Starts::Even { rows, short, lacks } if position >= (short + 1) * rows - lacks => {
                (position + lacks) / rows
            }
            Starts::Even { rows, .. } => position / rows,
            Starts::Sums(starts) => starts.partition_point(|&start| start <= position) as u64 - 1,
        };
        self.group(epoch, number, &starts)
    }

    fn group(&self, epoch: u64, number: u64, at: &Epoch) -> Arc<Group> {
        self.groups.get((epoch, number), || {
            let start = match &at.starts {
                Starts::Even { rows, short, lacks } => {
                    number * rows - if number > *short { *lacks } else { 0 }
                }
                Starts::Sums(starts) => starts[number as usize],
            };
            let places =
                number * self.per_group..self.shape.blocks().min((number + 1) * self.per_group);
            let mut blocks = Vec::with_capacity((places.end - places.start) as usize);
            let mut offsets = Vec::with_capacity(blocks.capacity());
            let (mut rows, mut even) = (0, None);
            at.order.for_each(places, |block| {
                let range = self.shape.block_range(block);
                let size = range.end - range.start;
                even = match even {
                    None => Some(size),
                    Some(other) => Some(if other == size { size } else { 0 }),
                };
                blocks.push((block, range.start));
                offsets.push(rows);
                rows += size;
            });
            let order = Permutation::new(
                rows,
                key::derive(self.seed, Purpose::Group, self.source, epoch, number),
            );
            Group {
                positions: start..start + rows,
                order,
                blocks,
                offsets,
                even: even.filter(|&size| size > 0),
            }
        })
    }

    pub fn row_at(&self, epoch: u64, position: u64) -> u64 {
        let group = self.group_at(epoch, position);
        group
            .locate(group.order.at(position - group.positions.start))
            .1
    }

    pub fn position_of(&self, epoch: u64, row: u64) -> u64 {
        let block = self.shape.block_of(row);
        let starts = self.epoch(epoch);
        let place = starts.order.position_of(block);
        let group = self.group(epoch, place / self.per_group, &starts);
        let at = (place % self.per_group) as usize;
        group.positions.start
            + group
                .order
                .position_of(group.offsets[at] + (row - group.blocks[at].1))
    }

    pub fn for_each(&self, epoch: u64, positions: Range<u64>, mut each: impl FnMut(u64)) {
        let mut at = positions.start;
        while at < positions.end {
            let group = self.group_at(epoch, at);
            let (start, stop) = (
                group.positions.start,
                group.positions.end.min(positions.end),
            );
            group
                .order
                .for_each(at - start..stop - start, |i| each(group.locate(i).1));
            at = stop;
        }
    }

    /// Looks at rows only until every block of a group has been seen, after about k · ln k of them.
    pub fn first_uses(&self, epoch: u64, positions: Range<u64>) -> Vec<(u64, u64)> {
        let (mut uses, mut at) = (Vec::new(), positions.start);
        while at < positions.end {
            let group = self.group_at(epoch, at);
            let stop = group.positions.end.min(positions.end);
            let mut unseen: Vec<bool> = group
                .blocks
                .iter()
                .map(|&(block, _)| !self.shape.block_range(block).is_empty())
                .collect();
            let mut left = unseen.iter().filter(|&&u| u).count();
            while at < stop && left > 0 {
                let (block, _) = group.locate(group.order.at(at - group.positions.start));
                if std::mem::take(&mut unseen[block]) {
                    uses.push((at, group.blocks[block].0));
                    left -= 1;
                }
                at += 1;
            }
            at = stop;
        }
        uses
    }

    /// The positions of the group that holds a block.
    pub fn span(&self, epoch: u64, block: u64) -> Range<u64> {
        let starts = self.epoch(epoch);
        self.group(
            epoch,
            starts.order.position_of(block) / self.per_group,
            &starts,
        )
        .positions
        .clone()
    }
}
