//! Work that waits for a disk, or takes a while on a CPU, on the runtime's threads for such work, also
//! where the system gives no more threads.

use crate::{Error, Result, sync::Mutex};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};
use tokio::task::spawn_blocking;

/// Runs work on a thread that may wait. While the runtime has such threads, it waits for one of them
/// where the system gives no more.
///
/// # Errors
/// `Busy` if the runtime has none and the system gives none: the work is not done, now or later.
/// `Internal` if it panics.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let work = Arc::new(Mutex::new(Some(work)));
    let queued = work.clone();
    let does = move || {
        let work = queued.lock().take();
        work.map(|work| work())
    };
    // Without a thread, the library panics, and has put what it was given into its queue.
    let begun = catch_unwind(AssertUnwindSafe(|| spawn_blocking(does)));
    let Ok(begun) = begun else {
        drop(work.lock().take());
        return Err(no_threads());
    };
    match begun.await {
        Ok(done) => done.ok_or_else(no_threads),
        Err(e) => Err(Error::internal("a worker thread failed").caused_by(e)),
    }
}

fn no_threads() -> Error {
    Error::busy("the system gives no more threads")
        .hint("raise the limit of processes and threads: `ulimit -u`, or that of the container")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use tokio::runtime::Builder;

    #[test]
    fn without_a_thread_work_is_refused_and_never_done() {
        // No address space is left for a thread with such a stack.
        let mut builder = Builder::new_current_thread();
        let runtime = builder.thread_stack_size(1 << 60).build().unwrap();
        let held = Arc::new(());
        let mine = held.clone();
        let refused = runtime.block_on(blocking(move || drop(mine)));
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(Arc::strong_count(&held), 1, "it is in the queue no more");
    }

    #[tokio::test]
    async fn work_is_done_and_its_panic_is_an_error() {
        assert_eq!(blocking(|| 7).await.unwrap(), 7);
        let failed: Result<()> = blocking(|| panic!("as the test wants it")).await;
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::Internal);
    }
}
