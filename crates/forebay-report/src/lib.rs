//! The report of a run: how well a training loop was fed, and what it took.
//!
//! - `figures.rs`: what a report holds, as JSON has it. The Python client and the node fill it in;
//!   each leaves out what it does not know.
//! - `advice.rs`: what the figures mean, and what to do about it.
//! - `prices.rs`: what counters cost, by a table that users edit.
//! - `text.rs`, `html.rs`: the same report for a terminal, and as one file for a browser.
//!
//! Invariant: a figure that was not measured is absent. It is never 0, and an estimate says that it
//! is one wherever it is shown.

#![warn(missing_docs)]

mod advice;
mod figures;
mod html;
mod prices;
mod svg;
mod text;

pub use advice::advise;
pub use figures::{
    Bin, End, Energy, Epoch, Figures, Money, MoneyLine, MoneyShare, OriginUse, PriceList, Quality,
    Report, Sources, Stage, Storage, Stored, Timeline, Waits, Warning,
};
pub use html::{fragment, page};
pub use prices::{Egress, Prices, SHIPPED, Table};
pub use text::text;

use forebay_core::{Error, Result};

/// A report from its JSON.
///
/// # Errors
/// `Invalid` for JSON that is not a report.
pub fn parse(json: &str) -> Result<Report> {
    serde_json::from_str(json)
        .map_err(|e| Error::invalid(format!("this is not the JSON of a report: {e}")).caused_by(e))
}
