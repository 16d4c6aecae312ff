//! The report of a run: Python gives its figures as JSON, and gets them back with advice, as text
//! or as HTML.

use crate::failure::Failure;
use forebay_report::Report;
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
