//! What a dataset is, and how it is opened: listed, indexed, put together, kept.
//!
//! `registry.rs` says what opening does, in order; `dataset.rs` is what comes of it; `view.rs` is what
//! plans make of datasets.

pub(crate) mod access;
pub(crate) mod dataset;
pub(crate) mod disk;
pub(crate) mod folder;
pub(crate) mod home;
mod labels;
mod list;
pub(crate) mod manifest;
mod open;
mod pattern;
pub(crate) mod progress;
pub(crate) mod registry;
mod schema;
mod select;
pub(crate) mod spec;
pub(crate) mod table;
pub(crate) mod told;
pub(crate) mod view;
