//! Logs, on standard error.

use crate::config::{Log, LogFormat};
use forebay_core::{Error, Result};
use std::sync::OnceLock;
use tracing_subscriber::{
    EnvFilter, Registry, fmt, layer::SubscriberExt, reload, util::SubscriberInitExt,
};

/// The filter in force, once [`init`] has set it.
static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// The S3 library logs each error answer itself, with less information than our line has.
const QUIET: &str = "s3s=off,hyper=warn,hyper_util=warn,reqwest=warn,rustls=warn";

/// The filter for what is logged.
///
/// # Errors
/// `Invalid` for a level that cannot be read.
pub fn filter(log: &Log) -> Result<EnvFilter> {
    EnvFilter::try_new(format!("{QUIET},{}", log.level)).map_err(|e| {
        Error::invalid(format!("log.level = {:?}: {e}", log.level))
            .hint("error, warn, info, debug, trace, or a filter such as info,forebay_origin=debug")
    })
}

/// Sends this process's events to standard error. A second call does nothing: the first call's
/// settings stay.
///
/// # Errors
/// `Invalid` for a level that cannot be read.
pub fn init(log: &Log) -> Result<()> {
    let (filter, handle) = reload::Layer::new(filter(log)?);
    let registry = tracing_subscriber::registry().with(filter);
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
        tracing::debug!("this process has set up logging already, and its logs go there");
    } else {
        let _ = FILTER.set(handle);
    }
    Ok(())
}

/// Changes the level that [`init`] set. A process that set up its logs itself keeps them as they
/// are.
///
/// # Errors
/// `Invalid` for a level that cannot be read.
pub fn set_level(log: &Log) -> Result<()> {
    let filter = filter(log)?;
    match FILTER.get() {
        Some(handle) => handle
            .reload(filter)
            .map_err(|e| Error::internal(format!("log.level: {e}"))),
        None => Ok(()),
    }
}
