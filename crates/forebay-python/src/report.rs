//! The report of a run: Python gives its figures as JSON, and gets them back with advice, as text
//! or as HTML.

use crate::failure::Failure;
use forebay_report::{Egress, MoneyShare, Prices, Report, Table};
use pyo3::prelude::*;

fn parsed(json: &str) -> PyResult<Report> {
    let mut report = forebay_report::parse(json).map_err(Failure::from)?;
    report.warnings = forebay_report::advise(&report);
    Ok(report)
}

/// The figures with what they mean: `json` with its warnings.
#[pyfunction]
pub fn report_json(json: &str) -> PyResult<String> {
    serde_json::to_string(&parsed(json)?)
        .map_err(|e| Failure::invalid(format!("the report cannot be written as JSON: {e}")).into())
}

/// The figures as lines for a terminal.
#[pyfunction]
pub fn report_text(json: &str) -> PyResult<String> {
    Ok(forebay_report::text(&parsed(json)?))
}

/// The figures as an HTML page; as an element for a notebook, if `fragment`.
#[pyfunction]
#[pyo3(signature = (json, fragment=false))]
pub fn report_html(json: &str, fragment: bool) -> PyResult<String> {
    let report = parsed(json)?;
    Ok(match fragment {
        true => forebay_report::fragment(&report),
        false => forebay_report::page(&report),
    })
}

/// The prices of a place, and where bytes go.
fn prices(
    table: Option<&str>,
    file: Option<&str>,
    place: &str,
    egress: &str,
) -> PyResult<(Prices, Egress)> {
    let table = match table {
        Some(text) => Table::parse(text, file.unwrap_or("the table of prices")),
        None => Table::shipped(),
    };
    let table = table.map_err(Failure::from)?;
    let prices = table.of(place).map_err(Failure::from)?.clone();
    Ok((prices, egress.parse().map_err(Failure::from)?))
}

/// Raises for a table, a place or a way of bytes that is none.
#[pyfunction]
pub fn report_prices(
    table: Option<&str>,
    file: Option<&str>,
    place: Option<&str>,
    egress: &str,
) -> PyResult<()> {
    if let Some(text) = table {
        Table::parse(text, file.unwrap_or("the table of prices")).map_err(Failure::from)?;
    }
    egress.parse::<Egress>().map_err(Failure::from)?;
    place.map_or(Ok(()), |place| prices(table, file, place, egress).map(drop))
}

/// What the use of the origin in a report costs, as JSON.
#[pyfunction]
pub fn report_money(
    json: &str,
    table: Option<&str>,
    file: Option<&str>,
    place: &str,
    egress: &str,
) -> PyResult<String> {
    let report = forebay_report::parse(json).map_err(Failure::from)?;
    let (prices, egress) = prices(table, file, place, egress)?;
    let mut money = prices.money(&report.origin.unwrap_or_default(), egress);
    money.storage = prices.storage(&report.stored);
    if let Some(job) = report.job {
        money.shares.push(MoneyShare {
            by: "job".into(),
            name: job,
            spent: Some(money.spent_total),
            saved: Some(money.saved_total),
        });
    }
    serde_json::to_string(&money)
        .map_err(|e| Failure::invalid(format!("the money cannot be written as JSON: {e}")).into())
}
