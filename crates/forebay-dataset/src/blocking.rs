//! Work that may wait for a disk, or takes a while on a CPU, off the runtime's threads.

use forebay_core::{Result, threads};

/// Runs work on a thread for blocking work.
///
/// # Errors
/// `Internal` if it panics; `Busy` if the system gives no thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    threads::blocking(work).await
}
