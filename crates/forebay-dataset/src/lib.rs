//! Datasets: which rows exist, where each is, and how they are read.
//!
//! A [`DatasetSpec`] names files by patterns; [`Datasets::open`] lists them, reads their metadata
//! (footers, headers, directories; never the data), and returns a [`Dataset`]: an immutable table
//! of files and blocks in which a row number leads to its file, block and place
//! ([`Dataset::locate`], two binary searches). A dataset's id is derived from everything it was
//! built from, including names and versions, so a changed file makes another dataset and never
//! changes one that is in use.
//!
//! Seven rooms: `catalog` (what a dataset is, and how it is opened), `rows` (reading rows by their
//! number), `filter` (which rows an expression leaves), `keys` (which row has a key), `computed` (what
//! these two find out, once for all who ask), `stream` (pushing the steps of a plan), `follow` (plans
//! of jobs that the cache follows).
//! Start reading at `catalog/registry.rs`.

#![warn(missing_docs)]

mod blocking;
mod catalog;
mod computed;
pub mod filter;
pub mod follow;
pub mod keys;
mod rows;
mod stats;
pub mod stream;

pub use catalog::access::{Access, Caller, Everything};
pub use catalog::dataset::{Dataset, Located};
pub use catalog::home::{AtHome, Homes};
pub use catalog::manifest::ManifestLines;
pub use catalog::progress::{Progress, Watched};
pub use catalog::registry::{Datasets, DatasetsConfig, Opened};
pub use catalog::spec::parse_spec;
pub use catalog::table::{FileRef, FileTable, FileTableBuilder};
pub use catalog::view::{View, Views};
pub use computed::Asked;
pub use forebay_format::tabular::{FileIndex, Format};
pub use forebay_protocol::dataset::{DatasetSpec, Example, LabelSource, OnDamaged, Part};
pub use rows::{
    Hold, Moment, RowBatch, RowMemory, Rows, RowsConfig, RowsSnapshot, RowsStats, Shares, taken,
};
pub use stats::{Counter, DatasetStats};
