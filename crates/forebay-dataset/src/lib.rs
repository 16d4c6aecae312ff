//! Datasets: which rows exist, where each is, and how they are read.
//!
//! A [`DatasetSpec`] names files by patterns; [`Datasets::open`] lists them, reads their metadata
//! (footers, headers, directories; never the data), and returns a [`Dataset`]: an immutable table
//! of files and blocks in which a row number leads to its file, block and place
//! ([`Dataset::locate`], two binary searches). A dataset's id is derived from everything it was
//! built from, including names and versions, so a changed file makes another dataset and never
//! changes one that is in use.
//!
//! Start reading at `registry.rs` (what opening does, in order), then `dataset.rs`.

#![warn(missing_docs)]

mod access;
mod blocking;
mod dataset;
mod disk;
pub mod follow;
mod labels;
mod list;
mod manifest;
mod open;
mod pattern;
mod progress;
mod registry;
mod rows;
mod schema;
mod select;
mod spec;
mod stats;
pub mod stream;
mod table;

pub use access::{Access, Caller, Everything};
pub use dataset::{Dataset, Located};
pub use forebay_format::tabular::{FileIndex, Format};
pub use forebay_protocol::dataset::{DatasetSpec, Example, LabelSource, OnDamaged, Part};
pub use manifest::ManifestLines;
pub use progress::{Progress, Watched};
pub use registry::{Datasets, DatasetsConfig, Opened};
pub use rows::{
    Hold, Moment, RowBatch, RowMemory, Rows, RowsConfig, RowsSnapshot, RowsStats, Shares,
};
pub use spec::parse_spec;
pub use stats::{Counter, DatasetStats};
pub use table::{FileRef, FileTable, FileTableBuilder};
