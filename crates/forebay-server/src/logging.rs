//! Logs, on standard error.

use crate::config::{Log, LogFormat};
use forebay_core::{Error, Result};
use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

/// The S3 library logs each error answer on its own, with less than our line says.
const QUIET: &str = "s3s=off,hyper=warn,hyper_util=warn,reqwest=warn,rustls=warn";

/// What is logged.
///
/// # Errors
/// `Invalid` for a level that cannot be read.
pub fn filter(log: &Log) -> Result<EnvFilter> {
    EnvFilter::try_new(format!("{QUIET},{}", log.level)).map_err(|e| {
        Error::invalid(format!("log.level = {:?}: {e}", log.level))
            .hint("error, warn, info, debug, trace, or a filter such as info,forebay_origin=debug")
    })
}

/// Sends this process's events to standard error. A second call does nothing: the first one's
/// settings hold.
///
/// # Errors
/// `Invalid` for a level that cannot be read.
pub fn init(log: &Log) -> Result<()> {
    let registry = tracing_subscriber::registry().with(filter(log)?);
    let installed = match log.format {
        LogFormat::Json => registry
            .with(
                fmt::layer()
                    .json()
                    .flatten_event(true)
                    .with_current_span(false)
                    .with_span_list(false)
                    .with_writer(std::io::stderr),
            )
            .try_init(),
        LogFormat::Text => {
            let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
            registry
                .with(
                    fmt::layer()
                        .compact()
                        .with_ansi(ansi)
                        .with_writer(std::io::stderr),
                )
                .try_init()
        }
    };
    if installed.is_err() {
        tracing::debug!("logs go where this process set them up before");
    }
    Ok(())
}
