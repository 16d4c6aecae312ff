//! How far a connection reads ahead.
//!
//! The more rows of a row-wise order are under way, the more of them are in one block, which is fetched
//! and decoded once for them all: so all connections of such a stream together may reach farther,
//! however many they are. They do so as long as the node decodes more than it answers, and blocks again
//! that it had decoded; otherwise what lies ready would only be in the way of what is sent.

use super::source::Work;
use forebay_core::limits;
use forebay_plan::{PlanSpec, Shape, Shuffle};
use std::time::{Duration, Instant};

/// How often it is looked whether to reach farther.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The same while it does: blocks are decoded in bursts.
const LOOK_EVERY_ON: Duration = Duration::from_millis(500);
/// So many rows are decoded for one that is answered if it is worth while, and so many if it no longer
/// is.
const WORTHWHILE: u64 = 3;
const NO_LONGER: u64 = 1;
/// With so many rows under way for each block, on average, 98 of 100 blocks have at least one.
const ROWS_OF_EACH: u64 = 4;
/// As often each block is decoded in an epoch over cold files: rows of it, until it is kept decoded.
const DECODED_ANYWAY: u64 = 4;

/// How far a connection may reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reach {
    /// What its window may hold where there is room, if that is more than its size.
    pub window_bytes: u64,
    /// Steps that are read at the same time.
    pub steps: usize,
    blocks: u64,
    /// Rows of a block, on average.
    block_rows: u64,
}

impl Reach {
    pub const NEAR: Reach = Reach {
        window_bytes: 0,
        steps: limits::STREAM_STEPS_AHEAD,
        blocks: 0,
        block_rows: 0,
    };

    /// Whether it may reach farther than others.
    fn is_far(&self) -> bool {
        *self != Reach::NEAR
    }

    /// Whether, of rows of this size, `of` such connections have so many under way, with batches of so
    /// many rows, that nearly every block has some among them.
    pub fn is_in_all_blocks(&self, row_bytes: u64, batch_rows: u32, of: u32) -> bool {
        let in_windows = self.window_bytes / row_bytes.max(1);
        let in_steps = self.steps as u64 * u64::from(batch_rows);
        let rows = in_windows.min(in_steps).saturating_mul(of.into());
        self.is_far() && self.blocks.saturating_mul(ROWS_OF_EACH) <= rows
    }

    /// That of one of `of` connections, if windows may reach `lendable_bytes` beyond their sizes.
    pub fn of(spec: &PlanSpec, row_bytes: u64, of: u32, lendable_bytes: u64) -> Reach {
        let sum = |of: fn(&Shape) -> u64| spec.sources.iter().map(|s| of(&s.shape)).sum::<u64>();
        let (rows, blocks) = (sum(Shape::rows), sum(Shape::blocks).max(1));
        let all = limits::STREAM_WINDOWS_ROW_WISE_BYTES.min(lendable_bytes);
        if spec.shuffle != Shuffle::Full || rows <= blocks || blocks > all / row_bytes.max(1) {
            return Reach::NEAR;
        }
        let of = of.max(1);
        Reach {
            window_bytes: all / u64::from(of),
            steps: (limits::STREAM_STEPS_AHEAD_ROW_WISE / of as usize).max(Reach::NEAR.steps),
            blocks,
            block_rows: rows / blocks,
        }
    }
}

/// Whether it reaches as far as it may.
pub(super) struct Farther {
    reach: Reach,
    on: bool,
    /// What the node had done before.
    began: Work,
    since: (Instant, Work),
}

impl Farther {
    pub fn new(reach: Reach, work: Work) -> Self {
        Farther {
            reach,
            on: false,
            began: work,
            since: (Instant::now(), work),
        }
    }

    pub fn is_on(&self) -> bool {
        self.on
    }

    pub fn steps(&self) -> usize {
        match self.on {
            true => self.reach.steps,
            false => Reach::NEAR.steps,
        }
    }

    /// Looks now and then at what the node did meanwhile.
    pub fn look(&mut self, work: impl Fn() -> Work) {
        let (then, before) = self.since;
        let every = if self.on { LOOK_EVERY_ON } else { LOOK_EVERY };
        if !self.reach.is_far() || then.elapsed() < every {
            return;
        }
        let now = work();
        self.since = (Instant::now(), now);
        let decoded = (now.blocks - before.blocks).saturating_mul(self.reach.block_rows);
        let again = (now.blocks - self.began.blocks) / DECODED_ANYWAY > self.reach.blocks;
        self.on = again && is_worthwhile(self.on, decoded, now.rows - before.rows);
    }
}

fn is_worthwhile(is_on: bool, decoded_rows: u64, answered_rows: u64) -> bool {
    let least = if is_on { NO_LONGER } else { WORTHWHILE };
    decoded_rows > answered_rows.saturating_mul(least)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_row_wise_order_over_few_blocks_may_be_read_farther_ahead() {
        let reach = |shuffle, rows_of_block: u64, of: u32| {
            let shape = Arc::new(Shape::uniform(100_000, rows_of_block).unwrap());
            let reach = Reach::of(
                &PlanSpec::single("d", shape, 1, shuffle),
                8 << 10,
                of,
                32 << 20,
            );
            (reach.window_bytes, reach.steps)
        };
        let near = (0, limits::STREAM_STEPS_AHEAD);
        assert_eq!(reach(Shuffle::Full, 1000, 1), (32 << 20, 1024));
        assert_eq!(reach(Shuffle::Full, 1000, 2), (16 << 20, 512));
        assert_eq!(reach(Shuffle::Full, 1000, 32), (1 << 20, near.1));
        // More blocks than rows under way: there is nothing that they share.
        assert_eq!(reach(Shuffle::Full, 10, 1), near);
        assert_eq!(reach(Shuffle::Full, 1, 1), near);
        assert_eq!(reach(Shuffle::None, 1000, 1), near);
    }

    #[test]
    fn with_a_few_rows_under_way_for_each_block_all_blocks_have_one() {
        let shape = Arc::new(Shape::uniform(100_000, 100).unwrap());
        let plan = PlanSpec::single("d", shape, 1, Shuffle::Full);
        let all = |lendable: u64, batch_rows, of| {
            let reach = Reach::of(&plan, 8 << 10, of, lendable);
            reach.is_in_all_blocks(8 << 10, batch_rows, of)
        };
        // 4,096 rows for 1,000 blocks.
        assert!(all(32 << 20, 32, 1) && all(32 << 20, 32, 4));
        assert!(!all(31 << 20, 32, 1), "the windows are too small");
        assert!(!all(32 << 20, 3, 1), "the batches are too small");
        assert!(
            !all(4 << 20, 32, 1),
            "it does not reach farther than others"
        );
    }

    #[test]
    fn it_is_read_farther_while_more_is_decoded_than_answered() {
        assert!(!is_worthwhile(false, 0, 0) && !is_worthwhile(true, 0, 0));
        assert!(!is_worthwhile(false, 0, 10_000));
        assert!(is_worthwhile(false, 30_001, 10_000) && !is_worthwhile(false, 30_000, 10_000));
        assert!(is_worthwhile(true, 10_001, 10_000) && !is_worthwhile(true, 10_000, 10_000));
        // Nothing was answered yet.
        assert!(is_worthwhile(false, 1000, 0));
    }
}
