//! How an order is dealt out: batches, ranks, and what happens at the end of an epoch that does not
//! come out even.

use forebay_core::{Error, Result, limits};
use serde::{Deserialize, Serialize};

/// What becomes of the last rows of an epoch when there are fewer than one step of all ranks takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Uneven {
    /// They are left out of this epoch.
    #[default]
    Drop,
    /// They are given, and what lacks is filled with rows from the beginning of the epoch's order,
    /// marked as padding ([`Step::real`](crate::Step)).
    Pad,
    /// They are given, and what lacks is filled with rows from the beginning of the epoch's order,
    /// which count as rows: they come twice in this epoch.
    Repeat,
}

/// How rows make a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Batching {
    /// This many. As JSON `{"rows": 32}`.
    Rows(u32),
    /// As many as stay within bounds: at most `max_rows`, whose lengths are at most `max_total`
    /// together. The next `lookahead_rows` rows of the order are batched at a time, rows of similar
    /// length together. As JSON `{"bounded": {"max_total": …, …}}`.
    Bounded {
        max_total: u64,
        max_rows: u32,
        lookahead_rows: u32,
        /// Whether a row counts as long as the longest of its batch: what it takes when batches are
        /// padded to rectangles.
        #[serde(default)]
        padded: bool,
    },
}

impl Batching {
    /// The most rows that a batch may have.
    pub fn most_rows(&self) -> u32 {
        match *self {
            Batching::Rows(rows) => rows,
            Batching::Bounded { max_rows, .. } => max_rows,
        }
    }
}

/// One rank's part of each step of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Partition {
    #[serde(default = "one")]
    pub world: u32,
    #[serde(default)]
    pub rank: u32,
    pub batch: Batching,
    #[serde(default)]
    pub uneven: Uneven,
}

fn one() -> u32 {
    1
}

impl Partition {
    /// A job of one rank.
    pub fn alone(batch: Batching, uneven: Uneven) -> Self {
        Partition {
            world: 1,
            rank: 0,
            batch,
            uneven,
        }
    }

    /// The partition if it can be, or what is wrong with it.
    pub fn checked(self) -> Result<Self> {
        if self.world == 0 || self.world > limits::PLAN_WORLD_MAX {
            return Err(Error::invalid(format!("a world of {} ranks", self.world))
                .hint(format!("1 to {}", limits::PLAN_WORLD_MAX)));
        }
        if self.rank >= self.world {
            return Err(
                Error::invalid(format!("rank {} in a world of {}", self.rank, self.world))
                    .hint("ranks count from 0 to world - 1"),
            );
        }
        let rows = self.batch.most_rows();
        if rows == 0 || rows > limits::PLAN_BATCH_ROWS_MAX {
            return Err(Error::invalid(format!("batches of {rows} rows"))
                .hint(format!("1 to {}", limits::PLAN_BATCH_ROWS_MAX)));
        }
        if let Batching::Bounded {
            max_total,
            lookahead_rows,
            ..
        } = self.batch
        {
            if max_total == 0 {
                return Err(Error::invalid("batches of total length 0")
                    .hint("max_total is the sum of lengths that a batch may have"));
            }
            if lookahead_rows == 0 || lookahead_rows > limits::PLAN_LOOKAHEAD_ROWS_MAX {
                return Err(Error::invalid(format!(
                    "bounded batches that look ahead {lookahead_rows} rows"
                ))
                .hint(format!(
                    "1 to {}; some hundreds of batches are enough",
                    limits::PLAN_LOOKAHEAD_ROWS_MAX
                )));
            }
        }
        Ok(self)
    }
}
