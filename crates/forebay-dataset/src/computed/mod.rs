//! What is computed from the rows of a dataset, once for all who ask, and kept: the rows that a filter
//! leaves, the index of a column of keys.
//!
//! Whoever asks for what was computed before gets it from memory or from the disk (`kept.rs`). Whoever
//! asks for what is being computed joins.
//!
//! Invariants:
//! - an outcome is kept under the dataset's id, which is that of its version, and the document that
//!   says what it is; so it is never of other files;
//! - a computation goes on when those who asked for it have left, and stops with the node; there are
//!   [`Limits::at_once`] at a time;
//! - outcomes are counted in the memory budget.

mod kept;
mod look;

pub(crate) use look::{Make, look, look_at_all, stretches};

use crate::{Dataset, Rows, blocking::blocking, catalog::disk::Decoder, stats::Counter};
use forebay_core::{
    Error, ErrorKind, MemoryBudget, Reservation, Result, limits, request, sync::Mutex,
};
use forebay_engine::{Flights, Joined};
use kept::Disk;
use std::{
    collections::{HashMap, VecDeque},
    future::Future,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::{
    sync::{Semaphore, watch},
    task::JoinHandle,
    time::Instant,
};
use xxhash_rust::xxh3::xxh3_128;

/// One outcome may take so much of the holdable memory: who fetches it may need as much again.
pub(crate) const OUTCOME_SHARE: u64 = 4;

/// Between two looks whether there is memory for something large.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// The dataset's id, and a hash of the document.
type Key = (String, u128);

/// A kind of outcome.
pub(crate) trait Outcome: Send + Sync + Sized + 'static {
    /// What is computed, for messages: `filters`.
    const MANY: &'static str;
    /// An outcome, for messages: `the rows of a filter`.
    const KEPT: &'static str;
    /// The beginning of its files.
    const MAGIC: &'static [u8; 4];
    /// How the names of its files end.
    const EXTENSION: &'static str;
    /// The version of what [`Outcome::encode`] appends.
    const VERSION: u32;

    /// What it takes in memory.
    fn bytes(&self) -> u64;

    /// Appends what [`Outcome::decode`] reads.
    fn encode(&self, out: &mut Vec<u8>);

    /// Reads one of a dataset of so many rows; `None` if this is none.
    fn decode(from: &mut Decoder<'_>, rows: u64) -> Option<Self>;
}

/// How many, and how much of a kind of outcome.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Computations at the same time; others wait.
    pub at_once: usize,
    /// Computations that are under way or wait for that; the next one is refused.
    pub waiting: usize,
    /// Memory for outcomes, at most.
    pub memory_bytes: u64,
    /// Disk for outcomes; the least recently used ones beyond it are removed.
    pub disk_bytes: u64,
    /// Outcomes on disk.
    pub on_disk: usize,
}

/// Says what an outcome is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Document {
    pub text: String,
    /// A hash of the text.
    pub hash: u128,
}

impl Document {
    pub fn new(text: String) -> Self {
        Self {
            hash: xxh3_128(text.as_bytes()),
            text,
        }
    }
}

/// An outcome, and what it is of.
#[derive(Debug)]
pub(crate) struct Found<T> {
    /// Its [`Document::text`].
    pub text: String,
    pub of: T,
    _memory: Vec<Reservation>,
}

/// What is counted of the ways to an outcome. It only grows.
#[derive(Debug, Default)]
pub struct Asked {
    /// Outcomes that were computed.
    pub computed: Counter,
    /// Computations that failed.
    pub failed: Counter,
    /// Callers that waited for a computation under way.
    pub joined: Counter,
    /// Callers that were given what is in memory.
    pub hits_memory: Counter,
    /// Callers that were given what is on the disk.
    pub hits_disk: Counter,
    /// Outcomes that could not be written to disk.
    pub keep_failed: Counter,
}

/// Outcomes of one kind, `T`, with the progress `P` of their computations.
pub(crate) struct Once<T, P> {
    rows: Rows,
    limits: Limits,
    disk: Option<Arc<Disk<T>>>,
    computing: Flights<Key, Arc<Found<T>>>,
    /// Those that are being read from the disk.
    loading: Flights<Key, Option<Arc<Found<T>>>>,
    /// The progress of each computation.
    progress: Mutex<HashMap<Key, Arc<P>>>,
    places: Semaphore,
    memory: Mutex<Memory<T>>,
    asked: Asked,
    stop: watch::Sender<bool>,
}

/// Outcomes in memory, the latest used last.
struct Memory<T> {
    found: VecDeque<(Key, Arc<Found<T>>)>,
    most_bytes: u64,
}

impl<T: Outcome> Memory<T> {
    fn get(&mut self, key: &Key) -> Option<Arc<Found<T>>> {
        let at = self.found.iter().position(|(of, _)| of == key)?;
        let (key, found) = self.found.remove(at)?;
        self.found.push_back((key, found.clone()));
        Some(found)
    }

    /// The latest one stays, whatever its size: whoever computed it is about to use it.
    fn keep(&mut self, key: Key, found: Arc<Found<T>>) {
        self.found.retain(|(of, _)| *of != key);
        self.found.push_back((key, found));
        while self.found.len() > 1 && self.bytes() > self.most_bytes {
            self.found.pop_front();
        }
    }

    fn bytes(&self) -> u64 {
        let each = |found: &Arc<Found<T>>| found.of.bytes() + found.text.len() as u64 + 256;
        self.found.iter().map(|(_, found)| each(found)).sum()
    }
}

/// A computation in the list of those in progress; dropping it removes it.
struct UnderWay<T, P> {
    of: Arc<Once<T, P>>,
    key: Key,
}

impl<T, P> Drop for UnderWay<T, P> {
    fn drop(&mut self) {
        self.of.progress.lock().remove(&self.key);
    }
}

impl<T: Outcome, P: Default + Send + Sync + 'static> Once<T, P> {
    /// Of what `rows` reads. If the directory cannot be used, that is logged, and outcomes are kept in
    /// memory only, as they are without one.
    pub fn new(rows: Rows, dir: Option<PathBuf>, limits: Limits) -> Self {
        let holdable = rows.engine().budget().holdable_bytes();
        let disk = dir.and_then(|dir| match Disk::open(dir, limits) {
            Ok(disk) => Some(Arc::new(disk)),
            Err(e) => {
                let many = T::MANY;
                tracing::warn!(error = %e.describe(), "{many} are kept in memory only");
                None
            }
        });
        Self {
            rows,
            limits,
            disk,
            computing: Flights::default(),
            loading: Flights::default(),
            progress: Mutex::default(),
            places: Semaphore::new(limits.at_once),
            memory: Mutex::new(Memory {
                found: VecDeque::new(),
                most_bytes: limits.memory_bytes.min(holdable / 8),
            }),
            asked: Asked::default(),
            stop: watch::channel(false).0,
        }
    }

    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    pub fn budget(&self) -> &MemoryBudget {
        self.rows.engine().budget()
    }

    pub fn asked(&self) -> &Asked {
        &self.asked
    }

    /// Outcomes in memory, and the bytes that they take.
    pub fn kept(&self) -> (usize, u64) {
        let memory = self.memory.lock();
        (memory.found.len(), memory.bytes())
    }

    /// Computations under way, and those that wait for a place.
    pub fn under_way(&self) -> usize {
        self.computing.len()
    }

    /// Ends all computations, and those that are still asked for.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// What a document is of: what is there, or what `compute` finds; and whether it was there.
    /// `watched` shows how far the computation is, once there is one. `compute` goes on though the
    /// caller leaves.
    ///
    /// # Errors
    /// Those of `compute`; `Busy` beyond [`Limits::waiting`].
    pub async fn get<F>(
        self: &Arc<Self>,
        dataset: &Arc<Dataset>,
        document: &Document,
        watched: &OnceLock<Arc<P>>,
        compute: impl FnOnce(Arc<P>) -> F,
    ) -> Result<(Arc<Found<T>>, bool)>
    where
        F: Future<Output = Result<(T, Vec<Reservation>)>> + Send + 'static,
    {
        let key = (dataset.id().to_owned(), document.hash);
        if let Some((found, counter)) = self.known(dataset, document.hash).await? {
            check(&found, document)?;
            counter.add(1);
            return Ok((found, true));
        }
        let follower = {
            let mut under_way = self.progress.lock();
            match self.computing.join(key.clone()) {
                Joined::Follower(follower) => {
                    self.asked.joined.add(1);
                    if let Some(progress) = under_way.get(&key) {
                        let _ = watched.set(progress.clone());
                    }
                    follower
                }
                Joined::Leader(leader) if under_way.len() >= self.limits.waiting => {
                    let (count, many) = (under_way.len(), T::MANY);
                    let e = Error::busy(format!(
                        "{count} {many} are being computed or wait for that"
                    ));
                    let e = e.retry_after(Duration::from_secs(1));
                    leader.publish(Err(e.clone()));
                    return Err(e);
                }
                Joined::Leader(leader) => {
                    let follower = leader.follower();
                    let progress = Arc::new(P::default());
                    let _ = watched.set(progress.clone());
                    under_way.insert(key.clone(), progress.clone());
                    let of = UnderWay {
                        of: self.clone(),
                        key: key.clone(),
                    };
                    let (this, computing) = (self.clone(), compute(progress));
                    let text = document.text.clone();
                    // It is under way no more before its result is known, however it ends.
                    request::spawn(async move {
                        let found = {
                            let _under_way = of;
                            this.compute(&key, text, computing).await
                        };
                        let Ok((found, true)) = &found else {
                            return leader.publish(found.map(|(found, _)| found));
                        };
                        let encoding = this.budget().try_hold(encoding_bytes(found));
                        if let Ok(memory) = encoding {
                            this.keep_on_disk(key, found.clone(), memory).await;
                            leader.publish(Ok(found.clone()));
                        } else {
                            // Whoever asked need not wait for that.
                            leader.publish(Ok(found.clone()));
                            this.keep_later(key, found.clone()).await;
                        }
                    });
                    follower
                }
            }
        };
        let found = follower.wait().await?;
        check(&found, document)?;
        Ok((found, false))
    }

    /// What is in memory or on the disk, and what counts who is given it.
    ///
    /// # Errors
    /// `Busy` without memory to load it.
    pub async fn known(
        self: &Arc<Self>,
        dataset: &Arc<Dataset>,
        hash: u128,
    ) -> Result<Option<(Arc<Found<T>>, &Counter)>> {
        let key = (dataset.id().to_owned(), hash);
        if let Some(found) = self.memory.lock().get(&key) {
            return Ok(Some((found, &self.asked.hits_memory)));
        }
        let Some(disk) = self.disk.clone() else {
            return Ok(None);
        };
        // One reads it for all who want it now.
        let follower = match self.loading.join(key.clone()) {
            Joined::Follower(follower) => follower,
            Joined::Leader(leader) => {
                let (follower, this, rows) = (leader.follower(), self.clone(), dataset.rows());
                request::spawn(async move {
                    let loading = this.unless_stopped(this.load(&disk, key, rows));
                    leader.publish(loading.await);
                });
                follower
            }
        };
        let found = follower.wait().await?;
        Ok(found.map(|found| (found, &self.asked.hits_disk)))
    }

    async fn load(
        &self,
        disk: &Arc<Disk<T>>,
        key: Key,
        rows: u64,
    ) -> Result<Option<Arc<Found<T>>>> {
        // Whoever loaded it may have ended after this caller looked.
        let before = self.memory.lock().get(&key);
        if before.is_some() {
            return Ok(before);
        }
        let (of, name) = (disk.clone(), key.clone());
        let Some(bytes) = blocking(move || of.bytes(&name.0, name.1)).await? else {
            return Ok(None);
        };
        // The bytes, and what is made of them.
        let soon = Duration::from_millis(limits::ROWS_MEMORY_WAIT_MAX_MS);
        let mut memory = self.hold_within(2 * bytes, soon).await?;
        let (of, name) = (disk.clone(), key.clone());
        let Some((text, of)) = blocking(move || of.load(&name.0, name.1, rows)).await? else {
            return Ok(None);
        };
        memory.shrink((of.bytes() + text.len() as u64).max(1));
        let found = Arc::new(Found {
            text,
            of,
            _memory: vec![memory],
        });
        self.memory.lock().keep(key, found.clone());
        Ok(Some(found))
    }

    /// Holds memory for something large, which does not queue for it: at the head of the queue it
    /// would keep what others need, who give it back sooner.
    ///
    /// # Errors
    /// `Busy` after [`limits::MEMORY_WAIT_MAX_SECS`].
    pub async fn hold(&self, bytes: u64) -> Result<Reservation> {
        let most = Duration::from_secs(limits::MEMORY_WAIT_MAX_SECS);
        self.hold_within(bytes, most).await
    }

    async fn hold_within(&self, bytes: u64, most: Duration) -> Result<Reservation> {
        let until = Instant::now() + most;
        loop {
            match self.budget().try_hold(bytes.max(1)) {
                Err(e) if e.kind() == ErrorKind::Busy && Instant::now() < until => {
                    tokio::time::sleep(MEMORY_PAUSE).await;
                }
                held => return held,
            }
        }
    }

    /// What `computing` finds, unless it was found meanwhile; and whether it is new.
    async fn compute(
        &self,
        key: &Key,
        text: String,
        computing: impl Future<Output = Result<(T, Vec<Reservation>)>>,
    ) -> Result<(Arc<Found<T>>, bool)> {
        // Whoever computed it may have kept it after this caller looked.
        let before = self.memory.lock().get(key);
        if let Some(found) = before {
            return Ok((found, false));
        }
        let computing = async {
            let _place = (self.places.acquire().await)
                .map_err(|e| Error::internal("computing has ended").caused_by(e))?;
            computing.await
        };
        let found = self.unless_stopped(computing).await;
        let (of, memory) = found.inspect_err(|_| self.asked.failed.add(1))?;
        let found = Arc::new(Found {
            text,
            of,
            _memory: memory,
        });
        self.asked.computed.add(1);
        self.memory.lock().keep(key.clone(), found.clone());
        Ok((found, true))
    }

    /// Work that ends with the node.
    async fn unless_stopped<V>(&self, work: impl Future<Output = Result<V>>) -> Result<V> {
        let mut stop = self.stop.subscribe();
        let stopped = async {
            let _ = stop.wait_for(|stop| *stop).await;
        };
        tokio::select! {
            biased;
            () = stopped => Err(Error::new(
                ErrorKind::ShuttingDown,
                format!("the node stops, and computes no more {}", T::MANY),
            )
            .hint("ask another node, or this one later")),
            done = work => done,
        }
    }

    /// Keeps an outcome on disk when there is memory to encode it.
    async fn keep_later(&self, key: Key, found: Arc<Found<T>>) {
        let memory = self.hold(encoding_bytes(&found));
        match self.unless_stopped(memory).await {
            Ok(memory) => self.keep_on_disk(key, found, memory).await,
            Err(e) => self.not_kept(&e.describe()),
        }
    }

    async fn keep_on_disk(&self, key: Key, found: Arc<Found<T>>, memory: Reservation) {
        let Some(disk) = self.disk.clone() else {
            return;
        };
        let write = move || {
            let _memory = memory;
            disk.keep(&key.0, key.1, &found.text, &found.of)
        };
        match blocking(write).await.and_then(|kept| kept) {
            Ok(true) => {}
            Ok(false) => self.not_kept("the directory has no room for as much"),
            Err(e) => self.not_kept(&e.describe()),
        }
    }

    /// The next process computes it again.
    fn not_kept(&self, error: &str) {
        self.asked.keep_failed.add(1);
        tracing::warn!(error, "{} were not kept on disk", T::KEPT);
    }
}

/// What encoding it takes.
fn encoding_bytes<T: Outcome>(found: &Found<T>) -> u64 {
    2 * (found.of.bytes() + found.text.len() as u64).max(1)
}

/// Two documents with one hash are told apart.
fn check<T>(found: &Found<T>, document: &Document) -> Result<()> {
    if found.text == document.text {
        return Ok(());
    }
    Err(Error::internal(
        "another document has the same hash as this one",
    ))
}

/// Does work in a task of its own, which ends when nobody waits for it any more. Work that holds memory
/// has to go on while who waits for it waits for memory itself.
pub(crate) async fn apart<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T> {
    struct Task<T>(JoinHandle<T>);
    impl<T> Drop for Task<T> {
        fn drop(&mut self) {
            self.0.abort();
        }
    }
    let mut task = Task(request::spawn(work));
    (&mut task.0)
        .await
        .map_err(|e| Error::internal("a part of a computation failed").caused_by(e))
}

/// What prevented rows from being read, for who asked for a computation over all of them: the condition
/// that failed is the version that the dataset was built from.
pub(crate) fn of_version(e: Error) -> Error {
    match e.kind() {
        ErrorKind::VersionChanged => e.with_kind(ErrorKind::PreconditionFailed),
        _ => e,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    pub(super) struct Numbers(pub Vec<u8>);

    impl Outcome for Numbers {
        const MANY: &'static str = "numbers";
        const KEPT: &'static str = "the numbers of a test";
        const MAGIC: &'static [u8; 4] = b"FBTT";
        const EXTENSION: &'static str = "fbtt";
        const VERSION: u32 = 1;

        fn bytes(&self) -> u64 {
            self.0.len() as u64
        }

        fn encode(&self, out: &mut Vec<u8>) {
            crate::catalog::disk::put_bytes(out, &self.0);
        }

        fn decode(from: &mut Decoder<'_>, rows: u64) -> Option<Self> {
            let numbers = from.take()?;
            (numbers.len() as u64 == rows).then(|| Self(numbers.to_vec()))
        }
    }

    #[test]
    fn the_latest_outcome_stays_and_older_ones_go() {
        let found = Arc::new(Found {
            text: String::new(),
            of: Numbers(vec![0; 130_000]),
            _memory: Vec::new(),
        });
        let mut memory = Memory {
            found: VecDeque::new(),
            most_bytes: 1 << 20,
        };
        let key = |n: u128| ("d".to_owned(), n);
        for n in 0..20 {
            memory.keep(key(n), found.clone());
            assert!(memory.get(&key(0)).is_some(), "it is used");
        }
        assert!(memory.bytes() <= memory.most_bytes && memory.found.len() > 4);
        assert!(memory.get(&key(1)).is_none() && memory.get(&key(19)).is_some());
        memory.most_bytes = 1;
        memory.keep(key(20), found);
        assert!(memory.found.len() == 1 && memory.get(&key(20)).is_some());
    }
}
