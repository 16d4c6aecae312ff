//! Orders over datasets, as pure functions: no I/O, no array of rows.
//!
//! # What there is
//!
//! - [`Permutation`]: a keyed bijection on `0..n`, with any place in constant time. Everything
//!   random here is built on it.
//! - [`Shape`]: how many rows each block of a dataset has. That is all a plan knows about a
//!   dataset; a node sends it to clients, encoded.
//! - [`PlanSpec`] → [`Plan`]: datasets, seed, [`Shuffle`]: which row is at which position of which
//!   epoch ([`row_at`](Plan::row_at), [`position_of`](Plan::position_of), [`fill`](Plan::fill)),
//!   which blocks a stretch needs ([`blocks_of`](Plan::blocks_of)) and when a block is needed next
//!   ([`next_use`](Plan::next_use)).
//! - [`Partition`] and [`Steps`]: the order dealt out to ranks and workers, in batches of a fixed
//!   size or bounded by [`Lengths`].
//! - [`Packing`]: rows of tokens as sequences of one length.
//! - [`Share`]: which positions of the order some of the ranks read.
//! - [`Composition`]: a dataset whose rows are rows of others; [`RowSet`]: what a filter leaves.
//! - [`State`]: where a job is, so that any number of ranks and workers can resume it.
//! - [`quality`]: how far an order is from a uniform one.
//!
//! # Example
//!
//! ```
//! use forebay_plan::{Batching, Partition, Plan, PlanSpec, Shape, Shuffle, State, Steps, Uneven};
//! use std::sync::Arc;
//!
//! # fn main() -> forebay_core::Result<()> {
//! let shape = Arc::new(Shape::uniform(1_000_000, 1000)?);
//! let plan = Arc::new(Plan::new(PlanSpec::single("c4@1", shape, 42, Shuffle::Block { blocks: 16 }))?);
//! let partition = Partition { world: 8, rank: 3, batch: Batching::Rows(32), uneven: Uneven::Drop };
//! let mut steps = Steps::new(plan.clone(), partition, &State::start(&plan))?.until_epoch(1);
//! let first = steps.next().expect("an epoch of a million rows has a step")?;
//! assert_eq!(first.rows.len(), 32);
//! assert_eq!(first.rows[0], plan.row_at(0, 3 * 32));
//! assert_eq!(first.next.position, 8 * 32);
//! # Ok(())
//! # }
//! ```
//!
//! # Invariants
//!
//! Every function here is pure: its result depends only on a plan's specification and its
//! arguments, the same on every platform and, for one [`ALGORITHM`], in every release. Caches hold
//! only what can be computed again. Memory does not grow with rows.

#![warn(missing_docs)]

mod bounded;
mod compose;
mod key;
mod mix;
mod order;
mod pack;
mod partition;
mod permutation;
mod plan;
pub mod quality;
mod row_set;
mod shape;
mod share;
mod spec;
mod state;
mod steps;

pub use bounded::Lengths;
pub use compose::{Chosen, Composition, Picks, RowsOf, Runs};
pub use pack::{Begin, LongDocument, Packing, Packs, Piece, Strategy};
pub use partition::{Batching, Partition, TooLong, Uneven};
pub use permutation::Permutation;
pub use plan::{Plan, RowRef};
pub use row_set::{RowSet, RowSetBuilder};
pub use shape::Shape;
pub use share::Share;
pub use spec::{PlanDocument, PlanSpec, Shuffle, Source, SourceDocument, Stage};
pub use state::{State, Within};
pub use steps::{Step, Steps};

/// The version of everything that turns seeds into orders. It is in the identity of plans and in
/// states: orders of different versions are never mistaken for each other.
pub const ALGORITHM: u32 = 1;
