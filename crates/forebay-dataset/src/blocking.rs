//! Work that may wait for a disk, or takes a while on a CPU, off the runtime's threads.

use forebay_core::{Error, Result};

/// Runs work on a thread for blocking work.
///
/// # Errors
/// `Internal` if it panics.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Error::internal("a worker thread failed").caused_by(e))
}
