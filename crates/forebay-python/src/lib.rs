//! Python bindings: the client, and the whole program inside the wheel.
//!
//! `forebay._forebay` is the compiled half of the Python package `forebay`. Through the crate
//! `forebay-client`, a client reaches a node elsewhere, or one inside its own process. A batch is
//! received into one region of memory and handed out as views of it.

#![warn(missing_docs)]

mod assemble;
mod batch;
mod batches;
mod buffer;
mod client;
mod compose;
mod embedded;
mod energy;
mod entries;
mod failure;
mod frame;
mod inflight;
mod listing;
mod names;
mod objects;
mod packed;
mod plan;
mod process;
mod raw;
mod receive;
mod region;
mod report;
mod request;
mod ring;
mod rows;
mod session;
mod source;
mod stream;
mod tar;
mod upload;

use forebay_core::sync;
use pyo3::prelude::*;

/// Runs the command line and returns its exit status.
#[cfg(feature = "node")]
#[pyfunction]
fn cli_main(py: Python<'_>, arguments: Vec<std::ffi::OsString>) -> i32 {
    py.detach(|| {
        // Python's handler would only note the signal for when Python code runs again. The program
        // itself relies on the default disposition, and `serve` installs its own handler for a
        // graceful stop. SAFETY: setting a disposition is safe at any time.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        forebay_cli::main_from(arguments)
    })
}

#[cfg(not(feature = "node"))]
#[pyfunction]
fn cli_main(_arguments: Vec<std::ffi::OsString>) -> i32 {
    eprintln!(
        "forebay: this build is the client alone; install the full wheel for the command line"
    );
    2
}

/// The CRC-32C of bytes (RFC 3720), as records of TFRecord files have it.
#[pyfunction]
fn crc32c(data: &[u8]) -> u32 {
    forebay_core::crc32c(data)
}

/// Stops the engines inside this process properly; registered to run at interpreter exit.
#[pyfunction]
fn _stop_nodes(py: Python<'_>) {
    py.detach(embedded::stop_nodes);
}

#[pymodule]
fn _forebay(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(cli_main, module)?)?;
    module.add_function(wrap_pyfunction!(crc32c, module)?)?;
    let stop_nodes = wrap_pyfunction!(_stop_nodes, module)?;
    module
        .py()
        .import("atexit")?
        .call_method1("register", (&stop_nodes,))?;
    module.add_function(stop_nodes)?;
    module.add_class::<client::Client>()?;
    module.add_class::<energy::EnergyMonitor>()?;
    module.add_class::<entries::Entry>()?;
    module.add_class::<batch::Batch>()?;
    module.add_class::<batch::Item>()?;
    module.add_class::<batches::Batches>()?;
    module.add_class::<buffer::Buffer>()?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<stream::StreamStep>()?;
    module.add_class::<frame::RecordBatch>()?;
    module.add_class::<frame::Column>()?;
    module.add_class::<frame::ArrowBuffer>()?;
    module.add_class::<ring::Ring>()?;
    module.add_class::<ring::Slot>()?;
    module.add_class::<plan::Plan>()?;
    module.add_class::<plan::Steps>()?;
    module.add_class::<plan::Step>()?;
    module.add_class::<plan::Permutation>()?;
    module.add_class::<plan::Numbers>()?;
    module.add_class::<compose::RowSet>()?;
    module.add_class::<compose::Composition>()?;
    module.add_function(wrap_pyfunction!(compose::piece_digest, module)?)?;
    module.add_function(wrap_pyfunction!(compose::composition_identity, module)?)?;
    module.add_function(wrap_pyfunction!(compose::composition_body, module)?)?;
    module.add_function(wrap_pyfunction!(compose::lengths_body, module)?)?;
    module.add_function(wrap_pyfunction!(plan::encode_shape, module)?)?;
    module.add_function(wrap_pyfunction!(report::report_json, module)?)?;
    module.add_function(wrap_pyfunction!(report::report_prices, module)?)?;
    module.add_function(wrap_pyfunction!(report::report_money, module)?)?;
    module.add_function(wrap_pyfunction!(report::report_text, module)?)?;
    module.add_function(wrap_pyfunction!(report::report_html, module)?)?;
    module.add_function(wrap_pyfunction!(assemble::assemble_packs, module)?)?;
    module.add_class::<raw::Borrowed>()?;
    module.add_class::<raw::Upload>()?;
    module.add_class::<listing::Listing>()?;
    module.add_class::<listing::ObjectInfo>()?;
    Ok(())
}
