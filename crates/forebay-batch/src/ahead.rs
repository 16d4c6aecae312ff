//! Look-ahead: entries that are not on the local disk are brought there before the cursor reaches
//! them, many at a time.
//!
//! What is brought waits in the store, not in memory, so the number of entries under way is the
//! only bound needed here. If the store does not keep an entry, it is held in memory if memory can
//! be spared. Small entries that another node has are asked of it together (`gather.rs`). Dropping
//! an [`Ahead`] ends its tasks; fills that they started continue for other readers.

use crate::{
    gather::{Gathered, Gatherers},
    held::{Opened, hold},
    produce::Work,
    stats::add,
};
use forebay_core::{CacheStatus, Error, ErrorKind, Result, request};
use std::{collections::VecDeque, future::Future, sync::Arc, time::Duration};
use tokio::{task::JoinHandle, time::timeout};

/// Brings one entry; ends with the `Ahead` that began it.
pub(crate) struct Bringing(JoinHandle<Result<Option<Opened>>>);

impl Drop for Bringing {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Bringing {
    async fn brought(mut self) -> Result<Option<Opened>> {
        let brought = (&mut self.0).await;
        brought.map_err(|e| Error::internal("a look-ahead task failed").caused_by(e))?
    }
}

/// How an entry comes.
enum Coming {
    Alone(Bringing),
    Together(Gathered),
}

/// Entries that come, in order; the cursor takes them from the front.
#[derive(Default)]
struct Pending(VecDeque<(usize, Coming)>);

impl Pending {
    fn take(&mut self, index: usize) -> Option<Coming> {
        while let Some((front, _)) = self.0.front() {
            if *front > index {
                return None;
            }
            let (i, coming) = self.0.pop_front()?;
            if i == index {
                return Some(coming);
            }
        }
        None
    }
}

pub(crate) struct Ahead {
    work: Arc<Work>,
    /// The first entry that was not looked at yet.
    next: usize,
    pending: Pending,
    gatherers: Gatherers,
}

impl Ahead {
    pub(crate) fn new(work: Arc<Work>) -> Self {
        Self {
            gatherers: Gatherers::new(work.clone()),
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
        let ahead = config.read_ahead_entries.max(1);
        self.next = self.next.max(cursor);
        let horizon = (cursor + ahead).min(self.work.request.entries.len());
        // Questions for many entries are to be had where many are looked at together.
        if self.next == cursor || !self.gatherers.are_some() || self.next - cursor <= ahead / 2 {
            while self.next < horizon {
                self.begin(self.next, cursor);
                self.next += 1;
            }
            self.gatherers.ask();
        }
        match self.pending.take(cursor) {
            Some(Coming::Alone(bringing)) => bringing.brought().await,
            Some(Coming::Together(gathered)) => match gathered.taken().await {
                Some(Ok(opened)) => Ok(Some(opened)),
                Some(Err(bringing)) => bringing.brought().await,
                None => {
                    bring_alone(self.work.clone(), cursor, false)
                        .brought()
                        .await
                }
            },
            // It was warm when looked at: the reader will see whether it still is.
            None => Ok(None),
        }
    }

    /// Starts bringing an entry, if it is not here.
    fn begin(&mut self, index: usize, cursor: usize) {
        let work = &self.work;
        if work.denied.contains_key(&index) {
            return;
        }
        let engine = &work.batcher.engine;
        if index != cursor && engine.is_warm(&work.entry(index)) {
            return;
        }
        // Noted before the entry is here: the cursor may deliver it before the task reports how it
        // came. The look-up of a buffered batch may have noted it already.
        let unsaid = !work.brought.lock().contains_key(&index);
        if unsaid {
            work.note_brought(index, CacheStatus::Miss);
        }
        let coming = match engine.gathers(&work.entry(index)) {
            Some(gather) => Coming::Together(self.gatherers.add(index, gather, unsaid)),
            None => Coming::Alone(bring_alone(work.clone(), index, unsaid)),
        };
        self.pending.0.push_back((index, coming));
    }
}

/// Brings an entry by itself; `unsaid`: how it came is to be noted.
pub(crate) fn bring_alone(work: Arc<Work>, index: usize, unsaid: bool) -> Bringing {
    Bringing(request::spawn(async move {
        let engine = &work.batcher.engine;
        let keeps = || engine.keeps_entry(&work.entry(index));
        if keeps() {
            let status = with_attempts(&work, || engine.bring(work.entry(index))).await?;
            if unsaid {
                work.note_brought(index, status);
            }
            // The disk may have refused just this entry.
            if keeps() || engine.is_warm(&work.entry(index)) {
                return Ok(None);
            }
        }
        with_attempts(&work, || hold(&work, index)).await
    }))
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
