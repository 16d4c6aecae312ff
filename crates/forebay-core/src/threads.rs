//! Work that waits for a disk, or takes a while on a CPU, on the runtime's threads for such work, also
//! where the system gives no more threads.

use crate::{Error, Result, sync::Mutex};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};
use tokio::{sync::oneshot, task::spawn_blocking};

/// Runs work on a thread that may wait. While the runtime has such threads, it waits for one of them
/// where the system gives no more.
///
/// # Errors
/// `Busy` if the runtime has none and the system gives none: the work is not done, now or later.
/// `Internal` if it panics.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let work = Arc::new(Mutex::new(Some(work)));
    let queued = work.clone();
    let (says, done) = oneshot::channel();
    let does = move || {
        let work = queued.lock().take();
        if let Some(work) = work {
            // Whoever waited may have left.
            let _ = says.send(work());
        }
    };
    // Without a thread, the library panics, and has put what it was given into its queue.
    let begun = catch_unwind(AssertUnwindSafe(|| spawn_blocking(does)));
    match begun {
        Ok(begun) => begun.await.map_err(failed)?,
        Err(_) => {
            let refused = work.lock().take();
            if refused.is_some() {
                return Err(no_threads());
            }
            // A thread that came for somebody else has taken it from there meanwhile.
        }
    }
    done.await.map_err(failed)
}

fn failed(e: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::internal("a worker thread failed").caused_by(e)
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
