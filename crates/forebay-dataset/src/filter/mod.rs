//! Which rows of a dataset an expression leaves: computed once for all who ask.
//!
//! How a filter is computed ([`Filters::filter`]):
//! 1. The expression is made ready for the columns' types (`ready.rs`); what makes no sense is refused
//!    before anything is read.
//! 2. What was computed before is found, and what is being computed joined (`computed/`).
//! 3. Files are gone through in order. What they say of their columns decides rows (`prune.rs`,
//!    `verdict.rs`). Blocks that are left are read as any rows are, with the columns of the expression
//!    and no others, several at a time, and evaluated batch by batch (`evaluate.rs`).
//! 4. The rows that are left are appended, in order, to a compressed set. No bitmap of all rows exists.
//!
//! Invariant: sets are counted in the memory budget, and so is what is read for them.

mod evaluate;
mod prune;
mod ready;
mod verdict;

use crate::{
    Dataset, Format, Rows,
    blocking::blocking,
    catalog::disk::{Decoder, put, put_bytes},
    computed::{self, Asked, Make, OUTCOME_SHARE, Once, Outcome, apart, look, of_version},
    stats::Counter,
};
use arrow_buffer::BooleanBuffer;
use forebay_core::{Error, ErrorKind, MemoryBudget, Reservation, Result, limits};
use forebay_format::tabular::Projection;
use forebay_plan::{RowSet, RowSetBuilder};
use forebay_protocol::filter::{Expr, FilterProgress, Filtered};
use futures::future::BoxFuture;
use futures::{
    FutureExt, StreamExt, future,
    stream::{self, BoxStream},
};
use prune::{BLOCKS_TOGETHER, By, Piece, pieces};
use ready::Ready;
use std::{
    ops::Range,
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// The grain in which memory for a set that grows is taken.
const GROWTH_BYTES: u64 = 1 << 20;

/// Filters of a node; cheap to clone, all clones are one.
#[derive(Clone)]
pub struct Filters {
    once: Arc<Once<Left, Progress>>,
    stats: Arc<FilterStats>,
}

/// What filters count. They only grow.
#[derive(Debug, Default)]
pub struct FilterStats {
    /// Rows whose values were read.
    pub looked_at: Counter,
    /// Rows that statistics of row groups decided.
    pub by_statistics: Counter,
    /// Rows that indexes of pages decided.
    pub by_pages: Counter,
    /// Rows that bloom filters decided.
    pub by_bloom: Counter,
}

/// Which rows are left.
#[derive(Debug, PartialEq)]
struct Left {
    rows: RowSet,
    /// Rows whose values were read to find them.
    looked_at: u64,
}

impl Outcome for Left {
    const MANY: &'static str = "filters";
    const KEPT: &'static str = "the rows of a filter";
    const MAGIC: &'static [u8; 4] = b"FBFS";
    const EXTENSION: &'static str = "fbfs";
    const VERSION: u32 = 1;

    fn bytes(&self) -> u64 {
        self.rows.memory_bytes() as u64
    }

    fn encode(&self, out: &mut Vec<u8>) {
        put(out, self.looked_at);
        put_bytes(out, &self.rows.encode());
    }

    fn decode(from: &mut Decoder<'_>, rows: u64) -> Option<Self> {
        let looked_at = from.number()?;
        let rows = (RowSet::decode(from.take()?).ok()).filter(|left| left.universe() == rows)?;
        Some(Self { rows, looked_at })
    }
}

/// The rows that a filter left.
#[derive(Clone, Debug)]
pub struct Found(Arc<computed::Found<Left>>);

impl Found {
    /// The rows.
    pub fn rows(&self) -> &RowSet {
        &self.0.of.rows
    }
}

/// An expression, and the memory that it takes.
pub struct Parsed {
    expr: Expr,
    memory: Arc<Reservation>,
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

impl Filters {
    /// Filters over what `rows` reads. If the directory cannot be used, that is logged, and they are
    /// kept in memory only, as they are without one.
    pub fn new(rows: Rows, dir: Option<PathBuf>) -> Self {
        let limits = computed::Limits {
            at_once: limits::FILTERS_AT_ONCE,
            waiting: limits::FILTERS_WAITING_MAX,
            memory_bytes: limits::FILTERS_MEMORY_MAX_BYTES,
            disk_bytes: limits::FILTERS_DISK_MAX_BYTES,
            on_disk: limits::FILTERS_KEPT_MAX,
        };
        Self {
            once: Arc::new(Once::new(rows, dir, limits)),
            stats: Arc::default(),
        }
    }

    /// Which rows were decided how, since the start.
    pub fn stats(&self) -> &FilterStats {
        &self.stats
    }

    /// How callers came to their rows, since the start.
    pub fn asked(&self) -> &Asked {
        self.once.asked()
    }

    /// Sets in memory, and the bytes that they take.
    pub fn kept(&self) -> (usize, u64) {
        self.once.kept()
    }

    /// Computations under way, and those that wait for a place.
    pub fn under_way(&self) -> usize {
        self.once.under_way()
    }

    /// Ends all computations, and those that are still asked for.
    pub fn stop(&self) {
        self.once.stop();
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

    fn filter_held<'a>(
        &'a self,
        dataset: &'a Arc<Dataset>,
        expr: &'a Expr,
        memory: Option<Arc<Reservation>>,
        watched: &'a WatchedFilter,
    ) -> BoxFuture<'a, Result<Filtered>> {
        Box::pin(async move {
            // With thousands of columns, and of comparisons, this takes time.
            let (expr, of) = (expr.clone(), dataset.clone());
            let ready = Arc::new(blocking(move || Ready::new(&expr, &of)).await??);
            let (this, of, with) = (self.clone(), dataset.clone(), ready.clone());
            let compute = |progress: Arc<Progress>| async move {
                let _memory = memory;
                this.compute(&of, &with, &progress).await
            };
            let (found, kept) =
                (self.once.get(dataset, &ready.document, &watched.0, compute)).await?;
            Ok(Filtered {
                filter: format!("{:032x}", ready.document.hash),
                rows: found.of.rows.len(),
                of: dataset.rows(),
                looked_at: found.of.looked_at,
                kept,
            })
        })
    }

    /// The rows that a filter left, by what [`Filters::filter`] called it.
    ///
    /// # Errors
    /// `NotFound` if it was not computed here, or is not kept any more.
    pub async fn found(&self, dataset: &Arc<Dataset>, filter: &str) -> Result<Found> {
        let key = (filter.len() == 32)
            .then(|| u128::from_str_radix(filter, 16).ok())
            .flatten();
        let found = match key {
            Some(key) => self.once.known(dataset, key).await?,
            None => None,
        };
        found.map(|(found, _)| Found(found)).ok_or_else(|| {
            Error::not_found(format!(
                "this node has not computed the filter {:?} of this dataset, or keeps it no more",
                forebay_core::name::shorten(filter)
            ))
            .hint("POST the expression to …/filters; the answer has the filter's name")
        })
    }

    fn budget(&self) -> &MemoryBudget {
        self.once.budget()
    }

    async fn compute(
        &self,
        dataset: &Arc<Dataset>,
        ready: &Arc<Ready>,
        progress: &Progress,
    ) -> Result<(Left, Vec<Reservation>)> {
        progress.of.store(dataset.rows(), Relaxed);
        let columns = Arc::new(Projection::Columns(ready.names()));
        let (of, at, with) = (self.once.rows().clone(), dataset.clone(), ready.clone());
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
        let (reader, at, with) = (self.once.rows().clone(), dataset.clone(), ready.clone());
        let evaluating: Make<BooleanBuffer> =
            Arc::new(move |_, batch| evaluate::evaluate(&with, batch));
        let look_at = move |piece: Result<Piece>| {
            let (reader, dataset) = (reader.clone(), at.clone());
            let (columns, evaluating) = (columns.clone(), evaluating.clone());
            async move {
                let piece = piece?;
                let Piece::Look { ref rows, whole } = piece else {
                    return Ok((piece, Vec::new()));
                };
                let stretch = (rows.clone(), whole);
                let looking =
                    async move { look(&reader, &dataset, &columns, stretch, evaluating).await };
                Ok((piece, apart(looking).await??))
            }
            .boxed()
        };
        let mut looked = pieces.map(look_at).buffered(limits::FILTER_BLOCKS_AT_ONCE);
        let mut builder = RowSetBuilder::new(dataset.rows());
        let (mut memory, mut held, mut looked_at) = (Vec::new(), 0, 0);
        while let Some(piece) = looked.next().await {
            let (piece, left) = piece.map_err(of_version)?;
            let stats = &self.stats;
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
                if held + more > self.budget().holdable_bytes() / OUTCOME_SHARE {
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
        let mut left_over = (rows.memory_bytes() + ready.document.text.len()) as u64;
        memory.retain_mut(|part: &mut Reservation| {
            let keeps = left_over.min(part.bytes());
            left_over -= keeps;
            part.shrink(keeps);
            keeps > 0
        });
        Ok((Left { rows, looked_at }, memory))
    }
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
