//! Reading rows by their numbers: any rows, in any order, as one record batch.
//!
//! How a request works ([`Rows::read`]):
//! 1. **Locate** every row (two binary searches each), and reserve memory for the answer, or
//!    refuse.
//! 2. Rows that are whole objects (`objects.rs`): one thread goes over them in order, and the
//!    engine appends what is on the local disk straight to the column's buffer; the rest is fetched
//!    ahead, many at a time, as in a batch.
//! 3. All others (`blocks.rs`): the rows are grouped by file and block. Blocks that are already
//!    decoded are used as they are (`cache.rs`); rows of blocks that are kept decoded on the disk are
//!    read from there (`laid`); for the others, the bytes that hold the rows are
//!    fetched, many blocks at a time, and decoded on threads for that. A block that is wanted
//!    repeatedly is decoded whole and kept. Memory for decoding is reserved as the need becomes
//!    known (`grown.rs`), and a block stays in the pieces that it was decoded in (`pieces.rs`).
//! 4. **Gather** (`gather.rs`): rows of all blocks are put into the requested order, including
//!    duplicates. Their size is computed before they are copied.
//!
//! A stream that knows its order holds blocks ahead of their use ([`Rows::hold`]): while a [`Hold`]
//! exists, reads of that block decode nothing.
//!
//! Invariants:
//! - row *i* of the answer is row *i* of the request, of the version that the dataset was built
//!   from; if a file has changed or is gone, that is an error that says so, never other bytes;
//! - an answer that was started does not wait for memory that another answer holds: of the holdable
//!   memory, answers take at most three eighths, what they are put together from for that moment a
//!   sixteenth, and decoded blocks, which running answers may pin, seven sixteenths (rows that are read
//!   soon included), so that fetching, which needs the rest, goes on;
//! - decoded data is in the memory budget: the answer until it is sent, a block until its last user
//!   is done.

mod blocks;
mod cache;
mod config;
mod costs;
mod facts;
mod files;
mod gather;
mod grown;
mod hold;
mod laid;
mod lru;
mod mixed;
mod objects;
mod pieces;
mod places;
mod soon;
mod stats;
mod together;

pub use config::RowsConfig;
pub use costs::taken;
pub(crate) use facts::FileFacts;
pub use hold::Hold;
pub(crate) use laid::KeptDecoded;
pub(crate) use soon::{Next, Orders};
pub use stats::{Moment, RowsSnapshot, RowsStats, Shares};

use crate::{Dataset, FileRef};
use arrow_array::RecordBatch;
use arrow_schema::{DataType, SchemaRef};
use blocks::Keys;
use cache::{Block, BlockCache, BlockKey};
use costs::Costs;
use files::Files;
use forebay_core::{
    Error, ErrorKind, MemoryBudget, Reservation, Result, limits,
    request::{self, Cost, Tally},
};
use forebay_engine::{Engine, Flights, GiveWay};
use forebay_format::tabular::{Format, Projection};
use forebay_protocol::job::OfDataset;
use futures::future::BoxFuture;
use laid::Laid;
use soon::Soon;
use stats::add;
use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use together::{Decoded, Together};
use tokio::sync::{Mutex as AsyncMutex, Semaphore};

/// What takes time for each row is done on a worker thread for more rows than this.
const INLINE_ROWS: usize = 4096;

/// Rows, and the memory that they take.
#[derive(Debug)]
pub struct RowBatch {
    /// In the order in which the rows were asked for.
    pub batch: RecordBatch,
    /// Keep this as long as the batch, or anything made from its buffers.
    pub memory: RowMemory,
}

/// Memory of an answer; given back when dropped.
#[derive(Debug, Default)]
pub struct RowMemory {
    held: Vec<Reservation>,
    /// Blocks that the rows are slices of, or whose bytes their views point to.
    blocks: Vec<Arc<Block>>,
    /// The same, for blocks that were decoded in part.
    decoded: Vec<Arc<Decoded>>,
}

impl From<Vec<Reservation>> for RowMemory {
    fn from(held: Vec<Reservation>) -> Self {
        Self {
            held,
            blocks: Vec::new(),
            decoded: Vec::new(),
        }
    }
}

/// Reads rows of datasets over one engine. Cheap to clone: all clones are one.
#[derive(Clone)]
pub struct Rows {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Engine,
    config: RowsConfig,
    stats: RowsStats,
    /// The shares of the holdable memory for answers, for what they are put together from, and for
    /// decoded blocks; see the module.
    answers: MemoryBudget,
    copies: MemoryBudget,
    whole_blocks: MemoryBudget,
    files: Files,
    cache: BlockCache,
    /// Blocks whose bytes are being fetched or in memory.
    blocks: Semaphore,
    /// Threads that decode.
    decoding: Semaphore,
    /// One block that nothing was fetched for yet waits for such a thread at a time: those that were
    /// fetched do not queue behind all others again.
    beginning: Semaphore,
    decoding_whole: Flights<BlockKey, Arc<Block>>,
    together: Together,
    laid: Laid,
    soon: Soon,
    costs: Costs,
    /// Held by the request that is made again alone.
    alone: AsyncMutex<()>,
}

impl GiveWay for Inner {
    fn give_way(&self, bytes: u64) {
        let missing = || {
            let budget = self.engine.budget();
            let free = budget.holdable_bytes().saturating_sub(budget.used_bytes());
            bytes.saturating_sub(free)
        };
        self.cache.give_way(missing());
        self.soon.give_way(missing());
    }
}

/// How a request is made.
#[derive(Clone)]
struct How {
    /// Its blocks will soon be wanted as a whole.
    whole: bool,
    /// It holds `Inner::alone`: others give back what they hold before they wait for long.
    alone: bool,
    /// It holds memory for its answer only: for its rows to be there twice, while they are put in
    /// order, it takes some when all of them are there.
    lean: bool,
    /// It failed because it waited too long for memory while it held some.
    crowded: Arc<AtomicBool>,
}

/// Who may hold how much of the budget's holdable memory. The remaining eighth is for fetching; see
/// the module.
struct HeldShares {
    /// Answers, until they are sent.
    answers_bytes: u64,
    /// Rows that are being put in order, beside their answers.
    copies_bytes: u64,
    /// Decoded blocks: those in use, and those that are kept.
    blocks_bytes: u64,
    /// The part of the blocks' share for those that are kept for later.
    kept_blocks_bytes: u64,
    /// The part of it for rows that are read soon.
    soon_bytes: u64,
}

/// An answer that is larger than expected waits at least so long for memory beside what it holds.
const SETTLE_WAIT: Duration = Duration::from_secs(2);
/// Whoever holds memory for its answer only takes at most such a share of what there is for rows that
/// are put in order.
const COPIES_SHARE: u64 = 4;
/// What an answer takes beside its rows.
const BESIDE_BYTES: u64 = 4096;
/// Between two looks whether there is memory.
const MEMORY_PAUSE: Duration = Duration::from_millis(20);

impl How {
    fn new(whole: bool) -> Self {
        Self {
            whole,
            alone: false,
            lean: false,
            crowded: Arc::default(),
        }
    }
}

impl HeldShares {
    fn of(holdable_bytes: u64) -> Self {
        Self {
            answers_bytes: holdable_bytes / 8 * 3,
            copies_bytes: holdable_bytes / 16,
            blocks_bytes: holdable_bytes / 16 * 7,
            kept_blocks_bytes: holdable_bytes / 4,
            soon_bytes: holdable_bytes / 16 * 5,
        }
    }
}

impl Rows {
    /// A reader with its own caches; its memory comes from `engine`'s budget.
    pub fn new(engine: Engine, config: RowsConfig) -> Self {
        let holdable = engine.budget().holdable_bytes();
        let shares = HeldShares::of(holdable);
        let inner = Inner {
            answers: MemoryBudget::with_holdable(shares.answers_bytes),
            copies: MemoryBudget::with_holdable(shares.copies_bytes),
            whole_blocks: MemoryBudget::with_holdable(shares.blocks_bytes),
            files: Files::new(config.open_files_memory_bytes),
            cache: BlockCache::new(config.block_cache_bytes.min(shares.kept_blocks_bytes)),
            blocks: Semaphore::new(config.blocks_in_flight.max(1)),
            decoding: Semaphore::new(config.decode_threads.max(1)),
            beginning: Semaphore::new(1),
            decoding_whole: Flights::default(),
            together: Together::default(),
            laid: Laid::new(&engine, config.keep_decoded, config.decode_threads),
            soon: Soon::new(shares.soon_bytes),
            stats: RowsStats::default(),
            costs: Costs::default(),
            alone: AsyncMutex::default(),
            config,
            engine,
        };
        let inner = Arc::new(inner);
        let keeper: Weak<dyn GiveWay> = Arc::<Inner>::downgrade(&inner);
        inner.engine.keeps_memory(keeper);
        Self { inner }
    }

    /// The engine that the files are read through.
    pub fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// Counters since the start, and what is cached now.
    pub fn stats(&self) -> RowsSnapshot {
        let inner = &self.inner;
        RowsSnapshot {
            cached_blocks: inner.cache.len() as u64,
            cached_bytes: inner.cache.bytes(),
            soon_bytes: inner.soon.bytes(),
            ..inner.stats.snapshot()
        }
    }

    /// Reads rows; waits for memory as long as accepted work may.
    ///
    /// # Errors
    /// `RangeNotSatisfiable` for a row that does not exist, `Invalid` for a column that does not
    /// exist, `TooLarge` for more than one answer may hold, `Busy`; `VersionChanged` and `NotFound`
    /// for a file that has changed or disappeared since the dataset was opened; and whatever
    /// prevents a file from being read. An error about one row names it.
    pub async fn read(
        &self,
        dataset: &Arc<Dataset>,
        rows: &[u64],
        columns: &Projection,
    ) -> Result<RowBatch> {
        self.read_patiently(dataset, rows, columns, false).await
    }

    /// The same for rows whose blocks will soon be wanted as a whole: each is decoded whole, once
    /// for all who want it, if there is memory to keep it.
    ///
    /// # Errors
    /// As [`Rows::read`].
    pub async fn read_of_blocks(
        &self,
        dataset: &Arc<Dataset>,
        rows: &[u64],
        columns: &Projection,
    ) -> Result<RowBatch> {
        self.read_patiently(dataset, rows, columns, true).await
    }

    fn read_patiently<'a>(
        &'a self,
        dataset: &'a Arc<Dataset>,
        rows: &'a [u64],
        columns: &'a Projection,
        whole: bool,
    ) -> BoxFuture<'a, Result<RowBatch>> {
        Box::pin(async move {
            self.check(dataset, rows)?;
            let mut bytes = self.expected_bytes(dataset, rows, columns).await?;
            let mut how = How::new(whole);
            // Many of them may wait for blocks at the same time.
            let of_blocks = dataset.format() != Format::Objects;
            if of_blocks && !whole && bytes <= self.inner.copies.holdable_bytes() / COPIES_SHARE {
                how.lean = true;
                bytes = bytes / 2 + BESIDE_BYTES;
            }
            let memory = self.counted(self.memory_of_answer(bytes)).await?;
            self.counted(self.read_or_alone(dataset, rows, columns, how, memory, None))
                .await
        })
    }

    async fn memory_of_answer(&self, bytes: u64) -> Result<RowMemory> {
        let held = vec![
            self.inner.answers.hold(bytes).await?,
            self.inner.engine.budget().hold(bytes).await?,
        ];
        Ok(held.into())
    }

    /// Reads rows; if no memory comes free for that beside what the request holds, it gives back
    /// what it has read, and is made again alone. For that it waits as long as it takes, or so long.
    async fn read_or_alone(
        &self,
        dataset: &Arc<Dataset>,
        rows: &[u64],
        columns: &Projection,
        mut how: How,
        mut memory: RowMemory,
        patience: Option<Duration>,
    ) -> Result<RowBatch> {
        let read = self.read_held(dataset, rows, columns, &how, &mut memory);
        let e = match read.await {
            Err(e) if how.crowded.swap(false, Relaxed) => e,
            read => return read,
        };
        memory.blocks.clear();
        memory.decoded.clear();
        if how.lean {
            // Alone, it takes twice as much, which may come free only when those who wait for their
            // turn hold none of it.
            memory.held.clear();
        }
        let alone = &self.inner.alone;
        let _turn = match patience {
            None => alone.lock().await,
            Some(most) => match tokio::time::timeout(most, alone.lock()).await {
                Ok(turn) => turn,
                Err(_) => return Err(e.context("the request for rows was refused")),
            },
        };
        tracing::debug!(error = %e, "a request for rows is made again alone");
        // What lies in memory for later is in its way.
        self.forget_soon();
        if memory.held.len() < 2 {
            memory.held.clear();
            let bytes = self.expected_bytes(dataset, rows, columns).await?;
            memory = match patience {
                None => self.memory_of_answer(bytes).await?,
                Some(_) => self.memory_soon(bytes).await?,
            };
        }
        (how.alone, how.lean) = (true, false);
        self.read_held(dataset, rows, columns, &how, &mut memory)
            .await
    }

    /// Reads rows for a new request, and refuses it if memory does not come free within two seconds.
    ///
    /// # Errors
    /// As [`Rows::read`].
    pub fn read_now<'a>(
        &'a self,
        dataset: &'a Arc<Dataset>,
        rows: &'a [u64],
        columns: &'a Projection,
    ) -> BoxFuture<'a, Result<RowBatch>> {
        Box::pin(async move {
            self.check(dataset, rows)?;
            let bytes = self.expected_bytes(dataset, rows, columns).await?;
            let memory = self.memory_soon(bytes).await;
            let memory = memory
                .inspect_err(|_| add(&self.inner.stats.failed, 1))
                .map_err(|e| e.context("the request for rows was refused"))?;
            let patience = Some(Duration::from_millis(limits::ROWS_MEMORY_WAIT_MAX_MS));
            let how = How::new(false);
            self.counted(self.read_or_alone(dataset, rows, columns, how, memory, patience))
                .await
        })
    }

    /// Waits for other answers to be sent. It does not queue for what all work shares: there it would
    /// keep others waiting before it has begun.
    async fn memory_soon(&self, bytes: u64) -> Result<RowMemory> {
        let most = Duration::from_millis(limits::ROWS_MEMORY_WAIT_MAX_MS);
        let until = Instant::now() + most;
        let answer = self.inner.answers.hold_within(bytes, most).await?;
        loop {
            match self.inner.engine.budget().try_hold(bytes) {
                Err(e) if e.kind() == ErrorKind::Busy && Instant::now() < until => {
                    tokio::time::sleep(MEMORY_PAUSE).await;
                }
                held => return Ok(vec![answer, held?].into()),
            }
        }
    }

    async fn counted<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        work.await.inspect_err(|_| add(&self.inner.stats.failed, 1))
    }

    /// What reads of each dataset took, the one that was read last first.
    pub fn costs(&self) -> Vec<OfDataset> {
        self.inner.costs.told()
    }

    /// The work, which is on the account of a dataset too.
    pub(crate) async fn on_account<F: Future>(&self, dataset: &Dataset, work: F) -> F::Output {
        let of = request::tally().into_iter();
        let of = of.chain([self.inner.costs.of(dataset)]);
        request::tallied(Arc::new(Tally::part_of_all(of)), work).await
    }

    async fn read_held(
        &self,
        dataset: &Arc<Dataset>,
        rows: &[u64],
        columns: &Projection,
        how: &How,
        memory: &mut RowMemory,
    ) -> Result<RowBatch> {
        let read = self.read_counted(dataset, rows, columns, how, memory);
        self.on_account(dataset, read).await
    }

    async fn read_counted(
        &self,
        dataset: &Arc<Dataset>,
        rows: &[u64],
        columns: &Projection,
        how: &How,
        memory: &mut RowMemory,
    ) -> Result<RowBatch> {
        let began = Instant::now();
        let schema = dataset.projected(columns)?;
        let mut read = if rows.is_empty() {
            RowBatch {
                batch: RecordBatch::new_empty(schema),
                memory: std::mem::take(memory),
            }
        } else {
            match dataset.format() {
                Format::Objects => {
                    let memory = std::mem::take(memory);
                    self.read_objects(dataset, rows, schema, memory).await?
                }
                _ => {
                    self.read_blocks(dataset, rows, columns, schema, how, memory)
                        .await?
                }
            }
        };
        let bytes = batch_bytes(&read.batch);
        self.check_answer(bytes)?;
        self.settle(&mut read.memory, bytes, how).await?;
        // It may lie ready for long: how much of the answers' share such answers take is reckoned by
        // their bytes.
        read.memory
            .held
            .iter_mut()
            .for_each(|held| held.shrink(bytes));
        let stats = &self.inner.stats;
        add(&stats.requests, 1);
        for (cost, n) in [
            (Cost::Requests, 1),
            (Cost::Rows, rows.len() as u64),
            (Cost::RowBytes, bytes),
        ] {
            request::count(cost, n);
        }
        add(&stats.rows, rows.len() as u64);
        add(&stats.bytes, bytes);
        add(&stats.read_ns, began.elapsed().as_nanos() as u64);
        Ok(read)
    }

    fn check(&self, dataset: &Dataset, rows: &[u64]) -> Result<()> {
        let checked = (|| {
            if rows.len() > limits::ROWS_PER_REQUEST_MAX {
                let most = limits::ROWS_PER_REQUEST_MAX;
                return Err(Error::new(
                    ErrorKind::TooLarge,
                    format!("the request names {} rows; the limit is {most}", rows.len()),
                )
                .hint("split the request"));
            }
            let all = dataset.rows();
            match rows.iter().position(|&row| row >= all) {
                None => Ok(()),
                Some(at) => Err(Error::range_not_satisfiable(format!(
                    "row {} (number {at} of the request) does not exist: \
                        the dataset has {all} rows",
                    rows[at]
                ))
                .hint(
                    "rows are numbered from 0; another version of the dataset may have more or \
                     fewer",
                )),
            }
        })();
        checked.inspect_err(|_| add(&self.inner.stats.failed, 1))
    }

    /// The expected size of the rows: exact for whole objects; for others from the average of the
    /// dataset's bytes, doubled, because rows of blocks exist twice while they are put in order.
    async fn expected_bytes(
        &self,
        dataset: &Arc<Dataset>,
        rows: &[u64],
        columns: &Projection,
    ) -> Result<u64> {
        if dataset.format() == Format::Objects {
            let schema = dataset.projected(columns)?;
            let bytes = match rows.len() > INLINE_ROWS {
                false => object_bytes(dataset, rows, &schema),
                true => {
                    let (dataset, rows) = (dataset.clone(), rows.to_vec());
                    let counted =
                        tokio::task::spawn_blocking(move || object_bytes(&dataset, &rows, &schema));
                    joined(counted.await)?
                }
            };
            let bytes = bytes.saturating_add(BESIDE_BYTES);
            self.check_answer(bytes)?;
            return Ok(bytes);
        }
        // As many as they have in their files, until it is known what such rows take.
        let packed = dataset.row_bytes();
        let each = Keys::new(dataset, columns).map_or(packed, |keys| {
            self.inner.cache.expected_decoded(keys.wanted, packed)
        });
        let expected = each
            .saturating_mul(2 * rows.len() as u64)
            .saturating_add(BESIDE_BYTES);
        // A guess: the difference is reserved when it is known.
        Ok(expected
            .min(limits::ROWS_ANSWER_MAX_BYTES)
            .min(self.inner.answers.holdable_bytes()))
    }

    fn check_answer(&self, bytes: u64) -> Result<()> {
        let most = limits::ROWS_ANSWER_MAX_BYTES.min(self.inner.answers.holdable_bytes());
        if bytes > most {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("the rows have {bytes} bytes; the limit for one answer is {most}"),
            )
            .hint("ask for fewer rows or columns at a time, or raise memory.budget"));
        }
        Ok(())
    }

    /// Memory for rows that are put in order, for as long as that takes. Who has the first part of it
    /// waits for the second, and for nothing after that.
    async fn copy_memory(&self, bytes: u64, how: &How) -> Result<Vec<Reservation>> {
        let mut held = Vec::with_capacity(2);
        for budget in [&self.inner.copies, self.inner.engine.budget()] {
            let most = jittered(SETTLE_WAIT);
            let taken = budget.hold_within(bytes, most).await;
            held.push(taken.inspect_err(|_| how.crowded.store(true, Relaxed))?);
        }
        Ok(held)
    }

    /// The same if it is there now.
    fn copy_memory_now(&self, bytes: u64) -> Option<[Reservation; 2]> {
        let of = |budget: &MemoryBudget| budget.try_hold(bytes).ok();
        Some([of(&self.inner.copies)?, of(self.inner.engine.budget())?])
    }

    /// Reserves what an answer exceeds its expected size by, or gives back what it falls short by.
    async fn settle(&self, memory: &mut RowMemory, bytes: u64, how: &How) -> Result<()> {
        let held = memory.held.first().map_or(0, Reservation::bytes);
        if bytes < held - held / 4 {
            memory.held.iter_mut().for_each(|held| held.shrink(bytes));
        }
        if bytes > held + held / 4 + 4096 {
            // Reserve everything again: answers that wait for more while they hold some would wait
            // for each other. What the request has read is held all the same.
            memory.held.clear();
            for budget in [&self.inner.answers, self.inner.engine.budget()] {
                let held = match how.alone {
                    true => budget.hold(bytes).await?,
                    false => budget
                        .hold_within(bytes, jittered(SETTLE_WAIT))
                        .await
                        .inspect_err(|_| how.crowded.store(true, Relaxed))?,
                };
                memory.held.push(held);
            }
        }
        Ok(())
    }
}

/// Between this and twice as much, so that those who wait for each other do not end together.
fn jittered(most: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish() as u16;
    most + most.mul_f64(f64::from(random) / f64::from(u16::MAX))
}

/// Bytes of the rows themselves: slices of larger buffers count with their visible size.
fn batch_bytes(batch: &RecordBatch) -> u64 {
    let of = |data: arrow_data::ArrayData| {
        data.get_slice_memory_size()
            .unwrap_or_else(|_| data.get_array_memory_size())
    };
    batch.columns().iter().map(|c| of(c.to_data()) as u64).sum()
}

/// What went wrong with a block, as reported to a caller that asked for a row of it: it may be about
/// another row of the block.
fn of_block(error: Error, row: u64, file: &FileRef) -> Error {
    match error.kind() {
        ErrorKind::VersionChanged => of_file(error, row, file),
        _ => error.context(format_args!("the block of row {row}, in {}", file.name)),
    }
}

/// What went wrong with a file, as reported to a caller that asked for a row of it.
fn of_file(error: Error, row: u64, file: &FileRef) -> Error {
    if error.kind() != ErrorKind::VersionChanged {
        return error.context(format_args!("row {row}, in {}", file.name));
    }
    let reopen = "open the dataset again to read its current rows";
    let gone = std::error::Error::source(&error)
        .and_then(|s| s.downcast_ref::<Error>())
        .is_some_and(|s| s.kind() == ErrorKind::NotFound);
    if gone {
        Error::not_found(format!(
            "row {row}: {} was deleted after the dataset was opened",
            file.name
        ))
        .hint(reopen)
    } else {
        Error::version_changed(format!(
            "row {row}: {} changed after the dataset was opened",
            file.name
        ))
        .hint(reopen)
    }
}

/// The result of a worker thread, which may have failed.
fn joined<T>(result: Result<T, tokio::task::JoinError>) -> Result<T> {
    result.map_err(|e| Error::internal("a thread that reads rows failed").caused_by(e))
}

/// What rows of whole objects take: their bytes, keys and labels, as far as they are wanted. A row
/// may be asked for many times.
fn object_bytes(dataset: &Dataset, rows: &[u64], schema: &SchemaRef) -> u64 {
    /// An offset, or a number and whether it is there.
    const EACH_BYTES: u64 = 9;
    let files = dataset.files();
    let (data, keys) = (wants(schema, "data"), wants(schema, "key"));
    let labels = schema.fields().iter().any(|field| {
        !["data", "key"].contains(&field.name().as_str()) && field.data_type() == &DataType::Utf8
    });
    let each = EACH_BYTES * schema.fields().len() as u64;
    let of_row = |&row: &u64| {
        let row = row as usize;
        let data = if data { files.size(row) } else { 0 };
        let key = if keys { files.key(row).len() } else { 0 };
        let label = labels.then(|| dataset.label(row).map_or(0, str::len));
        data.saturating_add((key + label.unwrap_or(0)) as u64 + each)
    };
    rows.iter().map(of_row).fold(0, u64::saturating_add)
}

/// Whether a schema has this column, for formats whose columns are made here.
fn wants(schema: &SchemaRef, column: &str) -> bool {
    schema.column_with_name(column).is_some()
}
