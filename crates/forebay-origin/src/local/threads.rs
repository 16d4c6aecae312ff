//! The threads that wait for file systems. One that hangs (NFS whose server is away) keeps each thread
//! that waits for it, whether or not somebody waits for the thread: so they are few enough that the rest
//! of the runtime's, which the cache and everybody else need, are left.

use forebay_core::{Error, Result, threads};
use std::sync::Arc;
use tokio::sync::{AcquireError, Semaphore};

/// What one origin may keep. (By default, an origin has 192 reads and 64 writes at a time.)
const THREADS_MAX: usize = 192;
/// What all of them may keep together, of the 512 that a runtime has.
static ALL: Semaphore = Semaphore::const_new(384);

/// The threads of one origin.
#[derive(Clone, Debug)]
pub(crate) struct Threads(Arc<Semaphore>);

impl Default for Threads {
    fn default() -> Self {
        Self::of(THREADS_MAX)
    }
}

impl Threads {
    fn of(most: usize) -> Self {
        Threads(Arc::new(Semaphore::new(most)))
    }

    /// Runs `f` on a thread that may wait, when there is one.
    pub async fn run<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let closed = |_: AcquireError| Error::internal("no thread waits for files any more");
        let own = self.0.clone().acquire_owned().await.map_err(closed)?;
        let of_all = ALL.acquire().await.map_err(closed)?;
        let work = threads::blocking(move || {
            // Until it has ended, whether or not somebody waits for it.
            let _places = (own, of_all);
            f()
        });
        work.await.map_err(|e| e.context("work on files"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        time::Duration,
    };

    #[tokio::test]
    async fn a_file_system_that_hangs_keeps_so_many_threads_and_no_more() {
        let (threads, others) = (Threads::of(2), Threads::of(2));
        let hangs = Arc::new(AtomicBool::new(true));
        let begun = Arc::new(AtomicUsize::new(0));
        let begin = || {
            let (threads, hangs, begun) = (threads.clone(), hangs.clone(), begun.clone());
            tokio::spawn(async move {
                let hanging = move || {
                    begun.fetch_add(1, SeqCst);
                    while hangs.load(SeqCst) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                };
                threads.run(hanging).await
            })
        };
        let first = [begin(), begin()];
        while begun.load(SeqCst) < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // Whoever asked is gone; the threads are not.
        first.iter().for_each(|task| task.abort());
        let later: Vec<_> = (0..3).map(|_| begin()).collect();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(begun.load(SeqCst), 2);
        assert_eq!(others.run(|| 7).await.unwrap(), 7);
        hangs.store(false, SeqCst);
        for task in later {
            task.await.unwrap().unwrap();
        }
        assert_eq!(begun.load(SeqCst), 5);
    }
}
