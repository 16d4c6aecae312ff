//! Look-ahead: entries that are not on the local disk are brought there before the cursor reaches
//! them, many at a time.
//!
//! What is brought waits in the store, not in memory, so the number of entries under way is the
//! only bound needed here. If the store does not keep an entry, it is held in memory if memory can
//! be spared. Dropping an [`Ahead`] ends its tasks; fills that they started continue for other
//! readers.

use crate::{
    held::{Opened, hold},
    produce::Work,
    stats::add,
};
use forebay_core::{CacheStatus, Error, ErrorKind, Result, request};
use std::{collections::VecDeque, future::Future, sync::Arc, time::Duration};
use tokio::{task::JoinHandle, time::timeout};

/// Tasks by entry, in order; the cursor takes them from the front.
#[derive(Default)]
struct Pending(VecDeque<(usize, JoinHandle<Result<Option<Opened>>>)>);

impl Pending {
    fn push(&mut self, index: usize, task: JoinHandle<Result<Option<Opened>>>) {
        self.0.push_back((index, task));
    }

    fn take(&mut self, index: usize) -> Option<JoinHandle<Result<Option<Opened>>>> {
        while let Some((front, _)) = self.0.front() {
            if *front > index {
                return None;
            }
            let (i, task) = self.0.pop_front()?;
            if i == index {
                return Some(task);
            }
            task.abort();
        }
        None
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        for (_, task) in &self.0 {
            task.abort();
        }
    }
}

pub(crate) struct Ahead {
    work: Arc<Work>,
    /// The first entry that was not looked at yet.
    next: usize,
    pending: Pending,
}

impl Ahead {
    pub(crate) fn new(work: Arc<Work>) -> Self {
        Self {
            work,
            next: 0,
            pending: Pending::default(),
        }
    }

    /// Brings entry `cursor`, and starts bringing those after it. Returns the entry if it is held
    /// in memory.
    ///
    /// # Errors
    /// The error of this entry.
    pub(crate) async fn bring(&mut self, cursor: usize) -> Result<Option<Opened>> {
        let config = &self.work.batcher.config;
        self.next = self.next.max(cursor);
        let horizon =
            (cursor + config.read_ahead_entries.max(1)).min(self.work.request.entries.len());
        while self.next < horizon {
            let index = self.next;
            self.next += 1;
            if self.work.denied.contains_key(&index) {
                continue;
            }
            if index == cursor || !self.work.batcher.engine.is_warm(&self.work.entry(index)) {
                let work = self.work.clone();
                // Noted before the entry is here: the cursor may deliver it before the task reports
                // how it came. The look-up of a buffered batch may have noted it already.
                let unsaid = !work.brought.lock().contains_key(&index);
                if unsaid {
                    work.note_brought(index, CacheStatus::Miss);
                }
                let task = request::spawn(async move {
                    let engine = &work.batcher.engine;
                    let keeps = || engine.keeps_entry(&work.entry(index));
                    if keeps() {
                        let status =
                            with_attempts(&work, || engine.bring(work.entry(index))).await?;
                        if unsaid {
                            work.note_brought(index, status);
                        }
                        // The disk may have refused just this entry.
                        if keeps() || engine.is_warm(&work.entry(index)) {
                            return Ok(None);
                        }
                    }
                    with_attempts(&work, || hold(&work, index)).await
                });
                self.pending.push(index, task);
            }
        }
        match self.pending.take(cursor) {
            Some(mut task) => {
                let guard = AbortOnDrop(task.abort_handle());
                let brought = (&mut task).await;
                drop(guard);
                brought.map_err(|e| Error::internal("a look-ahead task failed").caused_by(e))?
            }
            // It was warm when looked at: the reader will see whether it still is.
            None => Ok(None),
        }
    }
}

struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts an entry again, with growing pauses, if its object changed while it was read or the node
/// had no room for it; all within the time that an entry may take. Transport failures to the origin
/// are retried there (`forebay_origin::Resilient`) and only there: counting attempts here too would
/// multiply them.
pub(crate) async fn with_attempts<T, F: Future<Output = Result<T>>>(
    work: &Work,
    mut attempt: impl FnMut() -> F,
) -> Result<T> {
    let config = &work.batcher.config;
    let stats = &work.batcher.stats;
    let attempts = async {
        let mut made = 0;
        loop {
            made += 1;
            match attempt().await {
                Err(e)
                    if matches!(e.kind(), ErrorKind::VersionChanged | ErrorKind::Busy)
                        && made < config.attempts.max(1) =>
                {
                    add(&stats.recoveries, 1);
                    tokio::time::sleep(Duration::from_millis(20u64 << made.min(6))).await;
                }
                Err(e) => {
                    if made > 1 {
                        add(&stats.recoveries_failed, 1);
                    }
                    return Err(e);
                }
                done => return done,
            }
        }
    };
    match timeout(config.entry_timeout, attempts).await {
        Ok(result) => result,
        Err(_) => Err(
            Error::timeout(format!("no answer in {:?}", config.entry_timeout))
                .hint("batch.entry_timeout sets the limit"),
        ),
    }
}
