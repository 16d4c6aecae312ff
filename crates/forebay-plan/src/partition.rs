//! How an order is dealt out: batches, ranks, and what happens at the end of an epoch that does not
//! divide evenly.

use forebay_core::{Error, Result, limits};
use serde::{Deserialize, Serialize};

/// What happens to the last rows of an epoch if they are fewer than one step of all ranks takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Uneven {
    /// They are left out of this epoch.
    #[default]
    Drop,
    /// They are delivered, and filled up with rows from the beginning of the epoch's order, marked
    /// as padding ([`Step::real`](crate::Step)).
    Pad,
    /// They are delivered, and filled up with rows from the beginning of the epoch's order, which
    /// count as rows: they come twice in this epoch.
    Repeat,
}

/// With batches bounded by length: what happens to a row that is longer than a whole batch may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TooLong {
    /// It is an error that names the row.
    #[default]
    Error,
    /// It is a batch of its own, which exceeds `max_total`.
    Alone,
    /// It is left out of every epoch.
    Skip,
}

impl TooLong {
    fn is_default(&self) -> bool {
        *self == TooLong::default()
    }
}

/// How rows make a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Batching {
    /// This many. As JSON `{"rows": 32}`.
    Rows(u32),
    /// As many as stay within bounds: at most `max_rows`, with a total length of at most
    /// `max_total`. The next `lookahead_rows` rows of the order are batched at a time, rows of
    /// similar length together. As JSON `{"bounded": {"max_total": …, …}}`.
    Bounded {
        /// The most that the lengths of a batch may add up to, in the unit of
        /// [`Lengths`](crate::Lengths).
        max_total: u64,
        /// The most rows in a batch.
        max_rows: u32,
        /// Rows of a look-ahead window. The larger it is, the closer in length the rows of a batch
        /// are.
        lookahead_rows: u32,
        /// Whether a row counts as long as the longest of its batch: the actual cost when batches
        /// are padded to rectangles.
        #[serde(default)]
        padded: bool,
        /// What happens to a row whose length alone exceeds `max_total`. Omitted in JSON if it is
        /// the default: earlier releases read such states, and theirs have no rule.
        #[serde(default, skip_serializing_if = "TooLong::is_default")]
        too_long: TooLong,
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

    /// Whether a place between two batches of a window made with these bounds is also one between
    /// two batches made with `other`. The rule for rows that are too long may differ if it was
    /// [`TooLong::Error`] so far: a window that has batches then has no such row.
    pub(crate) fn continues_as(self, other: Batching) -> bool {
        let mut own = self;
        if let (
            Batching::Bounded {
                too_long: rule @ TooLong::Error,
                ..
            },
            Batching::Bounded { too_long, .. },
        ) = (&mut own, other)
        {
            *rule = too_long;
        }
        own == other
    }
}

/// One rank's part of each step of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Partition {
    /// How many ranks the job has. 1 if a document omits it.
    #[serde(default = "one")]
    pub world: u32,
    /// Which of them this is, from 0. 0 if a document omits it.
    #[serde(default)]
    pub rank: u32,
    /// How the rows of one rank make a batch.
    pub batch: Batching,
    /// What happens to the last rows of an epoch.
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

    /// The partition if it is valid, or what is wrong with it.
    pub fn checked(self) -> Result<Self> {
        if self.world == 0 || self.world > limits::PLAN_WORLD_MAX {
            return Err(Error::invalid(format!("a world of {} ranks", self.world))
                .hint(format!("1 to {}", limits::PLAN_WORLD_MAX)));
        }
        if self.rank >= self.world {
            return Err(
                Error::invalid(format!("rank {} in a world of {}", self.rank, self.world))
                    .hint("ranks are 0 to world - 1"),
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
                return Err(Error::invalid("max_total is 0")
                    .hint("give the sum of lengths that a batch may have"));
            }
            if lookahead_rows == 0 || lookahead_rows > limits::PLAN_LOOKAHEAD_ROWS_MAX {
                return Err(
                    Error::invalid(format!("lookahead_rows is {lookahead_rows}")).hint(format!(
                        "give 1 to {}; the rows of some hundred batches are enough",
                        limits::PLAN_LOOKAHEAD_ROWS_MAX
                    )),
                );
            }
        }
        Ok(self)
    }
}
