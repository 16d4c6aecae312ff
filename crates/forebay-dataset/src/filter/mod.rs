//! Which rows of a dataset an expression leaves: computed once for all who ask.
//!
//! How a filter is computed ([`Filters::filter`]):
//! 1. The expression is made ready for the columns' types (`ready.rs`); what makes no sense is refused
//!    before anything is read.
//! 2. Whoever asks for what was computed before gets it from memory or from the disk (`kept.rs`).
//!    Whoever asks for what is being computed joins.
//! 3. Files are gone through in order. What they say of their columns decides rows (`prune.rs`,
//!    `verdict.rs`). Blocks that are left are read as any rows are, with the columns of the expression
//!    and no others, several at a time, and evaluated batch by batch (`evaluate.rs`).
//! 4. The rows that are left are appended, in order, to a compressed set. No bitmap of all rows exists.
//!
//! Invariants:
//! - a filter is kept under the dataset's id, which is that of its version, and the expression's
//!   document; so it is never of other files;
//! - a computation goes on when those who asked for it have left, and stops with the node; there are
//!   [`limits::FILTERS_AT_ONCE`] at a time;
//! - sets are counted in the memory budget, and so is what is read for them.

mod evaluate;
mod kept;
mod prune;
mod ready;
mod verdict;

use crate::{Dataset, Format, Rows, blocking::blocking, stats::Counter};
use arrow_array::RecordBatch;
use arrow_buffer::BooleanBuffer;
use forebay_core::{
    Error, ErrorKind, MemoryBudget, Reservation, Result, limits, request, sync::Mutex,
};
use forebay_engine::{Flights, Joined};
use forebay_format::tabular::Projection;
use forebay_plan::{RowSet, RowSetBuilder};
use forebay_protocol::filter::{Expr, FilterProgress, Filtered};
use futures::{
    FutureExt, StreamExt, future,
    stream::{self, BoxStream},
};
use kept::{Disk, Left};
use prune::{BLOCKS_TOGETHER, By, Piece, pieces};
use ready::Ready;
use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::{Semaphore, watch},
    task::JoinHandle,
};

/// The grain in which memory for a set that grows is taken.
const GROWTH_BYTES: u64 = 1 << 20;

/// Rows that are requested at a time take this part of the holdable memory, at most, in their files.
const REQUEST_SHARE: u64 = 16;

/// The dataset's id, and a hash of the expression's document.
type Key = (String, u128);

/// Filters of a node; cheap to clone, all clones are one.
#[derive(Clone)]
pub struct Filters {
    inner: Arc<Inner>,
}

struct Inner {
    rows: Rows,
    disk: Option<Arc<Disk>>,
    computing: Flights<Key, Arc<Found>>,
    /// The progress of each computation.
    progress: Mutex<HashMap<Key, Arc<Progress>>>,
    places: Semaphore,
    memory: Mutex<Memory>,
    stats: FilterStats,
    stop: watch::Sender<bool>,
}

/// What filters count. They only grow.
#[derive(Debug, Default)]
pub struct FilterStats {
    /// Filters that were computed.
    pub computed: Counter,
    /// Computations that failed.
    pub failed: Counter,
    /// Callers that waited for a computation under way.
    pub joined: Counter,
    /// Callers that were given what is in memory.
    pub hits_memory: Counter,
    /// Callers that were given what is on the disk.
    pub hits_disk: Counter,
    /// Rows whose values were read.
    pub looked_at: Counter,
    /// Rows that statistics of row groups decided.
    pub by_statistics: Counter,
    /// Rows that indexes of pages decided.
    pub by_pages: Counter,
    /// Rows that bloom filters decided.
    pub by_bloom: Counter,
    /// Sets that could not be written to disk.
    pub keep_failed: Counter,
}

/// The rows that a filter left.
#[derive(Debug)]
pub struct Found {
    left: Left,
    _memory: Vec<Reservation>,
}

impl Found {
    /// The rows.
    pub fn rows(&self) -> &RowSet {
        &self.left.rows
    }
}

/// An expression, and the memory that it takes.
pub struct Parsed {
    expr: Expr,
    memory: Arc<Reservation>,
}

/// One set may take so much of the holdable memory: who fetches it needs as much again.
const SET_SHARE: u64 = 4;

/// Sets in memory, the latest used last.
struct Memory {
    sets: VecDeque<(Key, Arc<Found>)>,
    most_bytes: u64,
}

impl Memory {
    fn get(&mut self, key: &Key) -> Option<Arc<Found>> {
        let at = self.sets.iter().position(|(of, _)| of == key)?;
        let (key, found) = self.sets.remove(at)?;
        self.sets.push_back((key, found.clone()));
        Some(found)
    }

    /// The latest one stays, whatever its size: whoever computed it is about to fetch it.
    fn keep(&mut self, key: Key, found: Arc<Found>) {
        self.sets.retain(|(of, _)| *of != key);
        self.sets.push_back((key, found));
        while self.sets.len() > 1 && self.bytes() > self.most_bytes {
            self.sets.pop_front();
        }
    }

    fn bytes(&self) -> u64 {
        let each = |found: &Arc<Found>| {
            (found.left.rows.memory_bytes() + found.left.json.len()) as u64 + 256
        };
        self.sets.iter().map(|(_, found)| each(found)).sum()
    }
}

/// The progress of the computation that one caller waits for. It shows nothing until that has begun.
#[derive(Debug, Default)]
pub struct WatchedFilter(OnceLock<Arc<Progress>>);

impl WatchedFilter {
    /// The progress at this moment.
    pub fn now(&self) -> FilterProgress {
        self.0.get().map(|p| p.now()).unwrap_or_default()
    }
}

#[derive(Debug, Default)]
struct Progress {
    done: AtomicU64,
    of: AtomicU64,
    looked_at: AtomicU64,
    rows: AtomicU64,
}

impl Progress {
    fn now(&self) -> FilterProgress {
        let of = |n: &AtomicU64| n.load(Relaxed);
        FilterProgress {
            done: of(&self.done),
            of: of(&self.of),
            looked_at: of(&self.looked_at),
            rows: of(&self.rows),
        }
    }
}

/// A computation in the list of those in progress; dropping it removes it.
struct UnderWay {
    of: Arc<Inner>,
    key: Key,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.of.progress.lock().remove(&self.key);
    }
}

impl Filters {
    /// Filters over what `rows` reads. If the directory cannot be used, that is logged, and they are
    /// kept in memory only, as they are without one.
    pub fn new(rows: Rows, dir: Option<PathBuf>) -> Self {
        let holdable = rows.engine().budget().holdable_bytes();
        let disk = dir.and_then(
            |dir| match Disk::open(dir, limits::FILTERS_DISK_MAX_BYTES) {
                Ok(disk) => Some(Arc::new(disk)),
                Err(e) => {
                    tracing::warn!(error = %e.describe(), "filters are kept in memory only");
                    None
                }
            },
        );
        let inner = Inner {
            rows,
            disk,
            computing: Flights::default(),
            progress: Mutex::default(),
            places: Semaphore::new(limits::FILTERS_AT_ONCE),
            memory: Mutex::new(Memory {
                sets: VecDeque::new(),
                most_bytes: limits::FILTERS_MEMORY_MAX_BYTES.min(holdable / 8),
            }),
            stats: FilterStats::default(),
            stop: watch::channel(false).0,
        };
        Self {
            inner: Arc::new(inner),
        }
    }

    /// Counters since the start.
    pub fn stats(&self) -> &FilterStats {
        &self.inner.stats
    }

    /// Sets in memory, and the bytes that they take.
    pub fn kept(&self) -> (usize, u64) {
        let memory = self.inner.memory.lock();
        (memory.sets.len(), memory.bytes())
    }

    /// Computations under way, and those that wait for a place.
    pub fn under_way(&self) -> usize {
        self.inner.computing.len()
    }

    /// Ends all computations, and those that are still asked for.
    pub fn stop(&self) {
        self.inner.stop.send_replace(true);
    }

    /// Reads the document of an expression, within the memory budget.
    ///
    /// # Errors
    /// `Invalid` with what is wrong and where; `TooLarge`; `Busy` without memory for it.
    pub async fn parse(&self, json: bytes::Bytes) -> Result<Parsed> {
        let bytes = json.len() as u64 * limits::FILTER_BODY_MEMORY_FACTOR;
        let memory = Arc::new(self.budget().try_hold(bytes)?);
        blocking(move || Expr::read(&json).map(|expr| Parsed { expr, memory })).await?
    }

    /// The same as [`Filters::filter`] for an expression that was parsed here: its memory is held for
    /// as long as anybody works with it.
    ///
    /// # Errors
    /// As [`Filters::filter`].
    pub async fn filter_parsed(
        &self,
        dataset: &Arc<Dataset>,
        parsed: &Parsed,
        watched: &WatchedFilter,
    ) -> Result<Filtered> {
        let memory = Some(parsed.memory.clone());
        self.filter_held(dataset, &parsed.expr, memory, watched)
            .await
    }

    /// Finds out which rows an expression leaves, or joins who does. The caller may read the dataset.
    ///
    /// # Errors
    /// `Invalid` for a column that is not there or does not compare with a value; `Busy` beyond
    /// [`limits::FILTERS_WAITING_MAX`]; and whatever prevents rows from being read.
    pub async fn filter(
        &self,
        dataset: &Arc<Dataset>,
        expr: &Expr,
        watched: &WatchedFilter,
    ) -> Result<Filtered> {
        self.filter_held(dataset, expr, None, watched).await
    }

    async fn filter_held(
        &self,
        dataset: &Arc<Dataset>,
        expr: &Expr,
        memory: Option<Arc<Reservation>>,
        watched: &WatchedFilter,
    ) -> Result<Filtered> {
        let ready = Arc::new(Ready::new(expr, dataset)?);
        let key = (dataset.id().to_owned(), ready.key);
        let answer = |found: &Found, kept: bool| Filtered {
            filter: format!("{:032x}", ready.key),
            rows: found.rows().len(),
            of: dataset.rows(),
            looked_at: found.left.looked_at,
            kept,
        };
        if let Some((found, counter)) = self.known(dataset, &key).await? {
            self.check(&found, &ready)?;
            counter.add(1);
            return Ok(answer(&found, true));
        }
        let follower = {
            let mut under_way = self.inner.progress.lock();
            match self.inner.computing.join(key.clone()) {
                Joined::Follower(follower) => {
                    self.inner.stats.joined.add(1);
                    if let Some(progress) = under_way.get(&key) {
                        let _ = watched.0.set(progress.clone());
                    }
                    follower
                }
                Joined::Leader(leader) if under_way.len() >= limits::FILTERS_WAITING_MAX => {
                    let e = Error::busy(format!(
                        "{} filters are being computed or wait for that",
                        under_way.len()
                    ));
                    let e = e.retry_after(Duration::from_secs(1));
                    leader.publish(Err(e.clone()));
                    return Err(e);
                }
                Joined::Leader(leader) => {
                    let follower = leader.follower();
                    let progress = Arc::new(Progress::default());
                    let _ = watched.0.set(progress.clone());
                    under_way.insert(key.clone(), progress.clone());
                    let of = UnderWay {
                        of: self.inner.clone(),
                        key: key.clone(),
                    };
                    let (this, dataset, ready) = (self.clone(), dataset.clone(), ready.clone());
                    // It is under way no more before its result is known, however it ends.
                    request::spawn(async move {
                        let (leader, _memory) = (leader, memory);
                        let found = {
                            let _under_way = of;
                            this.compute_and_keep(&dataset, &ready, key, &progress)
                                .await
                        };
                        leader.publish(found);
                    });
                    follower
                }
            }
        };
        let found = follower.wait().await?;
        self.check(&found, &ready)?;
        Ok(answer(&found, false))
    }

    /// The rows that a filter left, by what [`Filters::filter`] called it.
    ///
    /// # Errors
    /// `NotFound` if it was not computed here, or is not kept any more.
    pub async fn found(&self, dataset: &Arc<Dataset>, filter: &str) -> Result<Arc<Found>> {
        let key = (filter.len() == 32)
            .then(|| u128::from_str_radix(filter, 16).ok())
            .flatten();
        let found = match key {
            Some(key) => self.known(dataset, &(dataset.id().to_owned(), key)).await?,
            None => None,
        };
        let found = found.map(|(found, _)| found);
        found.ok_or_else(|| {
            Error::not_found(format!(
                "this node has not computed the filter {:?} of this dataset, or keeps it no more",
                forebay_core::name::shorten(filter)
            ))
            .hint("POST the expression to …/filters; the answer has the filter's name")
        })
    }

    /// Two documents with one hash are told apart.
    fn check(&self, found: &Found, ready: &Ready) -> Result<()> {
        if found.left.json == ready.json {
            return Ok(());
        }
        Err(Error::internal(
            "another expression has the same hash as this one",
        ))
    }

    fn budget(&self) -> &MemoryBudget {
        self.inner.rows.engine().budget()
    }

    /// What is in memory or on the disk, and what counts who is given it.
    async fn known(
        &self,
        dataset: &Arc<Dataset>,
        key: &Key,
    ) -> Result<Option<(Arc<Found>, &Counter)>> {
        let stats = &self.inner.stats;
        if let Some(found) = self.inner.memory.lock().get(key) {
            return Ok(Some((found, &stats.hits_memory)));
        }
        let Some(disk) = self.inner.disk.clone() else {
            return Ok(None);
        };
        let (of, hash) = (disk.clone(), key.clone());
        let Some(bytes) = blocking(move || of.bytes(&hash.0, hash.1)).await? else {
            return Ok(None);
        };
        // The bytes, and what is made of them.
        let mut memory = self.budget().hold(2 * bytes.max(1)).await?;
        let (of, rows) = (key.clone(), dataset.rows());
        let Some(left) = blocking(move || disk.load(&of.0, of.1, rows)).await? else {
            return Ok(None);
        };
        memory.shrink((left.rows.memory_bytes() + left.json.len()).max(1) as u64);
        let found = Arc::new(Found {
            left,
            _memory: vec![memory],
        });
        self.inner.memory.lock().keep(key.clone(), found.clone());
        Ok(Some((found, &stats.hits_disk)))
    }

    async fn compute_and_keep(
        &self,
        dataset: &Arc<Dataset>,
        ready: &Arc<Ready>,
        key: Key,
        progress: &Arc<Progress>,
    ) -> Result<Arc<Found>> {
        let stats = &self.inner.stats;
        // Whoever computed it may have kept it after this caller looked.
        let before = self.inner.memory.lock().get(&key);
        if let Some(found) = before {
            return Ok(found);
        }
        let found = {
            let mut stop = self.inner.stop.subscribe();
            let computing = async {
                let _place = (self.inner.places.acquire().await)
                    .map_err(|e| Error::internal("filters have ended").caused_by(e))?;
                self.compute(dataset, ready, progress).await.map(Arc::new)
            };
            let stopped = async {
                let _ = stop.wait_for(|stop| *stop).await;
            };
            tokio::select! {
                biased;
                () = stopped => Err(Error::new(
                    ErrorKind::ShuttingDown,
                    "the node stops, and computes no more filters",
                )
                .hint("ask another node, or this one later")),
                found = computing => found,
            }
        };
        let found = found.inspect_err(|_| stats.failed.add(1))?;
        stats.computed.add(1);
        self.inner.memory.lock().keep(key.clone(), found.clone());
        if let Some(disk) = self.inner.disk.clone() {
            let of = found.clone();
            // Encoding it needs memory. Without that it is not kept on disk, and the next process
            // computes it again.
            let bytes = of.left.rows.memory_bytes() as u64 + of.left.json.len() as u64;
            let kept = match self.budget().hold(2 * bytes.max(1)).await {
                Ok(memory) => {
                    let write = move || {
                        let _memory = memory;
                        disk.keep(&key.0, key.1, &of.left)
                    };
                    blocking(write).await.and_then(|kept| kept)
                }
                Err(e) => Err(e),
            };
            if let Err(e) = kept {
                stats.keep_failed.add(1);
                tracing::warn!(error = %e.describe(), "the rows of a filter were not kept on disk");
            }
        }
        Ok(found)
    }

    async fn compute(
        &self,
        dataset: &Arc<Dataset>,
        ready: &Arc<Ready>,
        progress: &Arc<Progress>,
    ) -> Result<Found> {
        progress.of.store(dataset.rows(), Relaxed);
        let columns = Arc::new(Projection::Columns(ready.names()));
        let (of, at, with) = (self.inner.rows.clone(), dataset.clone(), ready.clone());
        let blocks_of = {
            let dataset = dataset.clone();
            move |file: usize| {
                let all = dataset.index(file).map_or(0, |i| i.blocks().blocks());
                let parts = (0..all).step_by(BLOCKS_TOGETHER);
                stream::iter(parts.map(move |from| {
                    let until = all.min(from + BLOCKS_TOGETHER);
                    (file as u32, from..until)
                }))
            }
        };
        let decide = move |part: (u32, Range<usize>)| {
            let (rows, dataset, ready) = (of.clone(), at.clone(), with.clone());
            let deciding = async move { pieces(&rows, &dataset, part, &ready).await };
            async move {
                match apart(deciding).await {
                    Ok(pieces) => stream::iter(pieces).map(Ok).boxed(),
                    Err(e) => stream::once(future::ready(Err(e))).boxed(),
                }
            }
            .boxed()
        };
        let pieces: BoxStream<'static, Result<Piece>> = match dataset.format() {
            Format::Objects => {
                let shape = dataset.shape().clone();
                let of_block = move |block| {
                    Ok(Piece::Look {
                        rows: shape.block_range(block),
                        whole: None,
                    })
                };
                stream::iter(0..dataset.shape().blocks())
                    .map(of_block)
                    .boxed()
            }
            _ => stream::iter(0..dataset.files().len())
                .flat_map(blocks_of)
                .map(decide)
                .buffered(limits::FILTER_FILES_AT_ONCE)
                .flatten()
                .boxed(),
        };
        let (this, at, with) = (self.clone(), dataset.clone(), ready.clone());
        let look = move |piece: Result<Piece>| {
            let (this, dataset, ready) = (this.clone(), at.clone(), with.clone());
            let columns = columns.clone();
            async move {
                let piece = piece?;
                let Piece::Look { ref rows, whole } = piece else {
                    return Ok((piece, Vec::new()));
                };
                let rows = rows.clone();
                let looking =
                    async move { this.look(&dataset, &ready, &columns, rows, whole).await };
                Ok((piece, apart(looking).await??))
            }
            .boxed()
        };
        let mut looked = pieces.map(look).buffered(limits::FILTER_BLOCKS_AT_ONCE);
        let mut builder = RowSetBuilder::new(dataset.rows());
        let (mut memory, mut held, mut looked_at) = (Vec::new(), 0, 0);
        while let Some(piece) = looked.next().await {
            let (piece, left) = piece.map_err(|e: Error| {
                match e.kind() {
                    // The condition that failed is the version that the dataset was built from.
                    ErrorKind::VersionChanged => e.with_kind(ErrorKind::PreconditionFailed),
                    _ => e,
                }
            })?;
            let stats = &self.inner.stats;
            let rows = match &piece {
                Piece::Decided { rows, by, .. } => {
                    let counter = match by {
                        By::Statistics => &stats.by_statistics,
                        By::Pages => &stats.by_pages,
                        By::Bloom => &stats.by_bloom,
                    };
                    counter.add(rows.end - rows.start);
                    rows.end - rows.start
                }
                Piece::Look { rows, .. } => {
                    looked_at += rows.end - rows.start;
                    stats.looked_at.add(rows.end - rows.start);
                    rows.end - rows.start
                }
            };
            builder = blocking(move || append(builder, &piece, &left)).await??;
            let takes = builder.memory_bytes() as u64;
            if takes > held {
                let more = (takes - held).next_multiple_of(GROWTH_BYTES);
                if held + more > self.budget().holdable_bytes() / SET_SHARE {
                    let left = builder.len();
                    return Err(Error::new(
                        ErrorKind::TooLarge,
                        format!("the set of the rows that are left, {left} so far, is too large"),
                    )
                    .hint("raise memory.budget, or choose fewer rows"));
                }
                memory.push(self.budget().hold(more).await?);
                held += more;
            }
            progress.done.fetch_add(rows, Relaxed);
            progress.looked_at.store(looked_at, Relaxed);
            progress.rows.store(builder.len(), Relaxed);
        }
        drop(looked);
        let rows = builder.finish();
        let mut left_over = (rows.memory_bytes() + ready.json.len()) as u64;
        memory.retain_mut(|part: &mut Reservation| {
            let keeps = left_over.min(part.bytes());
            left_over -= keeps;
            part.shrink(keeps);
            keeps > 0
        });
        Ok(Found {
            left: Left {
                json: ready.json.clone(),
                rows,
                looked_at,
            },
            _memory: memory,
        })
    }

    /// Reads rows and evaluates them: what is left of each batch, one after the other.
    async fn look(
        &self,
        dataset: &Arc<Dataset>,
        ready: &Arc<Ready>,
        columns: &Projection,
        rows: Range<u64>,
        whole: Option<(u32, u32)>,
    ) -> Result<Vec<BooleanBuffer>> {
        let reader = &self.inner.rows;
        if let Some(place) = whole {
            match reader
                .whole_block(dataset, place, columns, rows.start)
                .await
            {
                Ok(block) => {
                    let ready = ready.clone();
                    return blocking(move || {
                        let each = block.batches().iter();
                        each.map(|batch| evaluate::evaluate(&ready, batch))
                            .collect()
                    })
                    .await?;
                }
                // It can still be read a few rows at a time; and damage is told of the row that has
                // it.
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::Busy | ErrorKind::TooLarge | ErrorKind::Corrupt
                    ) => {}
                Err(e) => return Err(e),
            }
        }
        let (mut found, mut at) = (Vec::new(), rows.start);
        // An answer is held beside what it is decoded from.
        let share = self.budget().holdable_bytes() / REQUEST_SHARE;
        let fit = share / dataset.row_bytes().max(1);
        let mut most = fit.clamp(1, limits::FILTER_REQUEST_ROWS as u64);
        while at < rows.end {
            let until = rows.end.min(at + most);
            let numbers: Vec<u64> = (at..until).collect();
            let read = match reader.read(dataset, &numbers, columns).await {
                Ok(read) => read,
                // They are larger than the others.
                Err(e) if e.kind() == ErrorKind::TooLarge && until - at > 1 => {
                    most = (until - at) / 2;
                    continue;
                }
                Err(e) => return Err(e),
            };
            let ready = ready.clone();
            let left = blocking(move || {
                // The memory goes with the batch.
                let (batch, _memory): (RecordBatch, _) = (read.batch, read.memory);
                evaluate::evaluate(&ready, &batch)
            });
            found.push(left.await??);
            at = until;
        }
        Ok(found)
    }
}

/// Does work in a task of its own, which ends when nobody waits for it any more. Work that holds memory
/// has to go on while who waits for it waits for memory itself.
async fn apart<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Result<T> {
    struct Task<T>(JoinHandle<T>);
    impl<T> Drop for Task<T> {
        fn drop(&mut self) {
            self.0.abort();
        }
    }
    let mut task = Task(request::spawn(work));
    (&mut task.0)
        .await
        .map_err(|e| Error::internal("a part of a filter failed").caused_by(e))
}

/// Adds the rows of a piece that are left.
fn append(
    mut builder: RowSetBuilder,
    piece: &Piece,
    left: &[BooleanBuffer],
) -> Result<RowSetBuilder> {
    match piece {
        Piece::Decided { left: false, .. } => {}
        Piece::Decided { rows, .. } => builder.push_range(rows.start, rows.end)?,
        Piece::Look { rows, .. } => {
            let mut at = rows.start;
            for batch in left {
                for (from, until) in batch.set_slices() {
                    builder.push_range(at + from as u64, at + until as u64)?;
                }
                at += batch.len() as u64;
            }
            if at != rows.end {
                return Err(Error::internal("a filter looked at other rows"));
            }
        }
    }
    Ok(builder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_set_stays_and_older_ones_go() {
        let rows = 1 << 20;
        // Half of them, with no two that follow each other: a bit for each row.
        let set = RowSet::of(rows, (0..rows).filter(|r| r % 2 == 0)).unwrap();
        let found = Arc::new(Found {
            left: Left {
                json: String::new(),
                rows: set,
                looked_at: 0,
            },
            _memory: Vec::new(),
        });
        let mut memory = Memory {
            sets: VecDeque::new(),
            most_bytes: 1 << 20,
        };
        let key = |n: u128| ("d".to_owned(), n);
        for n in 0..20 {
            memory.keep(key(n), found.clone());
            assert!(memory.get(&key(0)).is_some(), "it is used");
        }
        assert!(memory.bytes() <= memory.most_bytes && memory.sets.len() > 4);
        assert!(memory.get(&key(1)).is_none() && memory.get(&key(19)).is_some());
        memory.most_bytes = 1;
        memory.keep(key(20), found);
        assert!(memory.sets.len() == 1 && memory.get(&key(20)).is_some());
    }
}
