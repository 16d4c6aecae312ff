//! Push streams: the node computes a job's plan and sends its batches, step after step, before they
//! are requested.
//!
//! A receiver opens `of` connections with the same request; connection `k` gets the steps whose
//! remainder modulo `of` is `k`, in order, from a step that it names. So if a connection breaks,
//! another one can continue it, at this node or any other that has the datasets: all compute the
//! same plan, and none needs to know what the others do.
//!
//! - `forebay_protocol::stream` defines the request.
//! - `source.rs`: where rows come from: reads those of one step, from one dataset or a mix, and
//!   makes blocks ready.
//! - `produce.rs`: one connection: reading, decoding, framing and sending overlap, within a window
//!   of bytes.
//! - `ahead.rs`: the blocks that the order needs next are fetched and decoded before a step asks
//!   for them.
//! - `reach.rs`: how far a row-wise order is read ahead.
//! - `walk.rs`: which steps come next, also where batches are bounded by length.
//! - `window.rs`, `stats.rs`: what is held for a receiver, and where the time goes.
//!
//! Invariants: a receiver that does not read costs its window, and what that may borrow, and nothing
//! else; what is held is released when the connection is gone; steps of one connection are sent in
//! order, each whole, and the stream ends with a frame that says so: a proper end, or an error that
//! names the sample.

mod ahead;
mod produce;
mod reach;
mod source;
mod stats;
#[cfg(test)]
mod tests;
mod walk;
mod window;

pub use forebay_protocol::stream::{Lane, StreamRequest};
pub use stats::StreamStats;

use crate::blocking::blocking;
use crate::{
    Access, Caller, Datasets, Rows, Views,
    catalog::told::RowLengths,
    follow::{Following, Plans, Reads},
};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Reservation, Result, limits, sync::Mutex};
use forebay_format::tabular::Projection;
use forebay_plan::{Batching, Lengths, Plan, PlanDocument, RowRef, Shuffle, State, Steps};
use forebay_protocol::plan::Readers;
use futures::Stream;
use futures::future::BoxFuture;
use produce::Task;
use reach::Reach;
use source::{DatasetSource, Source};
use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
};
use tokio::sync::{Semaphore, mpsc, watch};
use window::Windows;

/// No list of columns means all of them.
fn projection(columns: Option<Vec<String>>) -> Projection {
    columns.map_or(Projection::All, Projection::Columns)
}

/// Plans that are kept ready: all connections of a job, and reconnections, use one.
const PLANS_KEPT: usize = 32;

/// The streams of a node; cheap to clone, all clones are one.
#[derive(Clone)]
pub struct Streams {
    inner: Arc<Inner>,
}

struct Inner {
    datasets: Datasets,
    rows: Rows,
    followed: Plans,
    windows: Arc<Windows>,
    stats: Arc<StreamStats>,
    stop: watch::Sender<bool>,
    plans: Mutex<VecDeque<(PlanDocument, Arc<Plan>)>>,
    walks: Arc<Semaphore>,
}

impl Streams {
    /// Streams of rows of `datasets`, read by `rows`; their plans are followed by `followed`.
    pub fn new(datasets: Datasets, rows: Rows, followed: Plans) -> Self {
        // Stopped receivers may hold no more than five sixteenths of the holdable memory, of the six
        // that answers may have: all others continue with the rest.
        let windows = Windows::new(rows.engine().budget().holdable_bytes() / 16 * 5);
        let (stats, stop, plans) = (Arc::default(), watch::channel(false).0, Mutex::default());
        let inner = Inner {
            datasets,
            rows,
            followed,
            windows,
            stats,
            stop,
            plans,
            walks: Arc::new(Semaphore::new(WALKS_AT_ONCE)),
        };
        Streams {
            inner: Arc::new(inner),
        }
    }

    /// Counters over all connections since the start.
    pub fn stats(&self) -> &StreamStats {
        &self.inner.stats
    }

    /// Total bytes of the windows promised to receivers.
    pub fn window_bytes(&self) -> u64 {
        self.inner.windows.used_bytes()
    }

    /// Ends all streams with an error that tells their receivers to reconnect elsewhere, or here
    /// later. New ones end likewise.
    pub fn stop(&self) {
        self.inner.stop.send_replace(true);
    }

    /// Starts one connection of a stream. If something is wrong with the request, that is an error
    /// here; later failures are frames.
    ///
    /// # Errors
    /// `Invalid`, `NotFound` for a dataset that is not open here, `PermissionDenied`, `Busy` if
    /// there is no room for another window.
    pub fn open<'a>(
        &'a self,
        lane: Lane,
        request: StreamRequest,
        access: &'a dyn Access,
    ) -> BoxFuture<'a, Result<Body>> {
        Box::pin(async move {
            let inner = &self.inner;
            lane.check()?;
            let sources = request.plan.sources.iter().take(limits::PLAN_SOURCES_MAX);
            let ids = sources.map(|source| source.dataset.as_str());
            let views = inner.datasets.views(ids, access).await?;
            let epoch = request.state.as_ref().map_or(0, |state| state.epoch);
            let plan = self.plan(&request.plan, &views, epoch).await?;
            let by_blocks = plan.spec().shuffle != Shuffle::Full;
            let state = request.state.clone().unwrap_or_else(|| State::start(&plan));
            let until = request
                .until_epoch
                .unwrap_or(limits::PLAN_EPOCHS_MAX)
                .min(limits::PLAN_EPOCHS_MAX);
            let mut steps = Steps::new(plan, request.partition, &state)?.until_epoch(until);
            let mut bounded = None;
            if let Batching::Bounded { lookahead_rows, .. } = request.partition.batch {
                let (lengths, found) = self.bounded(&request, &views, lookahead_rows)?;
                (steps, bounded) = (steps.with_lengths(lengths), Some(found));
            }
            let at = match lane.from_step.checked_sub(1) {
                Some(before) if bounded.is_none() => steps
                    .step(before)?
                    .map_or((until, 0), |step| (step.next.epoch, step.next.position)),
                // Where batches are bounded by length, going there takes time: it is a part of the walk.
                _ => (state.epoch, state.position),
            };
            let row_bytes = source::expected_row_bytes(&views);
            let lendable = inner.windows.lendable_bytes();
            let reach = Reach::of(steps.plan().spec(), row_bytes, lane.of, lendable);
            let reads = Reads {
                ranks: Some(Readers {
                    world: request.partition.world,
                    ranks: vec![request.partition.rank],
                    batch: request.partition.batch,
                    uneven: request.partition.uneven,
                }),
                begin: (state.epoch, state.position),
                columns: request.columns.clone(),
                together: request.window_bytes.is_none()
                    && reach.is_in_all_blocks(
                        row_bytes,
                        request.partition.batch.most_rows(),
                        lane.of,
                    ),
            };
            let following = self
                .follow(
                    steps.plan().clone(),
                    views.clone(),
                    at,
                    reads,
                    access.caller(),
                )
                .await;
            let source = DatasetSource::new(
                inner.rows.clone(),
                following,
                views,
                projection(request.columns),
                by_blocks,
            )?;
            let connection = Connection {
                lane,
                steps,
                at,
                until_epoch: until,
                source: Arc::new(source),
                bounded,
            };
            self.begin(connection, request.window_bytes)
        })
    }

    /// What steps of batches that are bounded by length need: the lengths of rows, and memory for a
    /// window of them.
    fn bounded(
        &self,
        request: &StreamRequest,
        views: &Views,
        lookahead_rows: u32,
    ) -> Result<(Arc<dyn Lengths>, Bounded)> {
        let Some(ids) = &request.lengths else {
            return Err(Error::invalid(
                "the batches are bounded by length, and no lengths are named",
            )
            .hint("tell the node of them: POST /v1/datasets/lengths"));
        };
        if lookahead_rows > limits::STREAM_LOOKAHEAD_ROWS_MAX {
            let most = limits::STREAM_LOOKAHEAD_ROWS_MAX;
            return Err(Error::invalid(format!(
                "a stream looks at most {most} rows ahead for batches of similar length, not \
                 {lookahead_rows}"
            ))
            .hint("give a smaller lookahead, or leave stream=True out"));
        }
        let datasets = &self.inner.datasets;
        let of_sources = ids.iter().map(|id| datasets.lengths(id));
        let of_sources = of_sources.collect::<Result<Vec<_>>>()?;
        let rows = views.views().iter().map(|view| view.shape().rows());
        let told = of_sources.iter().map(|lengths| lengths.rows());
        if !told.clone().eq(rows.clone()) {
            let (told, rows): (Vec<_>, Vec<_>) = (told.collect(), rows.collect());
            return Err(Error::invalid(format!(
                "lengths of {told:?} rows for sources of {rows:?} rows"
            ))
            .hint("give one length for each row of each source"));
        }
        let bytes = u64::from(lookahead_rows) * WINDOW_ROW_BYTES;
        let held = self.inner.rows.engine().budget().try_hold(bytes)?;
        let stop = Arc::<AtomicBool>::default();
        let lengths = OfRows {
            of_sources,
            stop: stop.clone(),
        };
        let bounded = Bounded {
            stop,
            walks: self.inner.walks.clone(),
            _held: held,
        };
        Ok((Arc::new(lengths), bounded))
    }

    /// Makes the cache keep what the stream needs soonest. (It fetches nothing ahead for it: the
    /// stream does that, for its part of the order.) A stream that cannot be followed continues as
    /// well.
    async fn follow(
        &self,
        plan: Arc<Plan>,
        views: Views,
        at: (u64, u64),
        reads: Reads,
        caller: Caller,
    ) -> Option<Following> {
        let plans = self.inner.followed.clone();
        let following =
            tokio::task::spawn_blocking(move || plans.follow(plan, &views, at, &reads, caller))
                .await
                .ok()?;
        following
            .inspect_err(
                |e| tracing::info!(error = %e.describe(), "the cache does not follow a stream"),
            )
            .ok()
    }

    /// The plan of a document, ready for an epoch.
    async fn plan(&self, document: &PlanDocument, views: &Views, epoch: u64) -> Result<Arc<Plan>> {
        let known = || {
            let plans = self.inner.plans.lock();
            let found = plans.iter().find(|(d, _)| d == document);
            found.map(|(_, plan)| plan.clone())
        };
        if let Some(plan) = known() {
            return Ok(plan);
        }
        // With a long schedule, or many blocks of unequal size, this takes time.
        let (asked, of) = (document.clone(), views.clone());
        let budget = self.inner.rows.engine().budget().clone();
        let plan = blocking(move || {
            let spec = asked.resolve(|id| of.shape_of(id))?;
            let plan = Plan::new(spec)?.counted(&budget)?;
            plan.prepare(epoch);
            Ok::<_, Error>(Arc::new(plan))
        })
        .await??;
        // Another connection of the stream may have made it meanwhile.
        if let Some(plan) = known() {
            return Ok(plan);
        }
        let mut plans = self.inner.plans.lock();
        plans.truncate(PLANS_KEPT - 1);
        plans.push_front((document.clone(), plan.clone()));
        Ok(plan)
    }

    fn begin<S: Source>(
        &self,
        connection: Connection<S>,
        window_bytes: Option<u64>,
    ) -> Result<Body> {
        let inner = &self.inner;
        let reach = match window_bytes {
            Some(_) => Reach::NEAR,
            None => connection.reach(&inner.windows),
        };
        let bytes = window_bytes.unwrap_or(limits::STREAM_WINDOW_DEFAULT_BYTES);
        let window = inner
            .windows
            .open(bytes, reach.window_bytes)
            .inspect_err(|_| {
                inner.stats.refused.fetch_add(1, Relaxed);
            })?;
        let (stats, stop) = (inner.stats.clone(), inner.stop.subscribe());
        Ok(connection.begin(window, reach, stats, stop))
    }
}

/// Memory of a row of a look-ahead window, while it is sorted and cut into batches.
const WINDOW_ROW_BYTES: u64 = 96;

/// Threads that go through batches which are bounded by length.
const WALKS_AT_ONCE: usize = 2;

/// The lengths of all rows of each source, for as long as somebody wants them.
struct OfRows {
    of_sources: Vec<Arc<RowLengths>>,
    stop: Arc<AtomicBool>,
}

impl Lengths for OfRows {
    fn lengths(&self, rows: &[RowRef], out: &mut Vec<u64>) -> Result<()> {
        if self.stop.load(Relaxed) {
            return Err(Error::new(ErrorKind::ShuttingDown, "the stream has ended"));
        }
        for row in rows {
            let of_source = self.of_sources.get(row.source as usize);
            let length = of_source.and_then(|lengths| lengths.get(row.row));
            let length = length.ok_or_else(|| Error::internal("a row without a length"))?;
            out.push(u64::from(length));
        }
        Ok(())
    }
}

/// What a walk through batches that are bounded by length has; dropping it ends the walk.
pub(super) struct Bounded {
    /// Tells the thread that is at it that nobody waits.
    stop: Arc<AtomicBool>,
    walks: Arc<Semaphore>,
    /// Memory of a window of rows.
    _held: Reservation,
}

impl Drop for Bounded {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// What one connection sends: its lane's steps of an order, from a place on.
struct Connection<S> {
    lane: Lane,
    steps: Steps,
    /// The epoch, and the position in it, where it begins.
    at: (u64, u64),
    until_epoch: u64,
    source: Arc<S>,
    /// `None`: its batches have a fixed number of rows.
    bounded: Option<Bounded>,
}

impl<S: Source> Connection<S> {
    /// How far it may read ahead.
    fn reach(&self, windows: &Windows) -> Reach {
        let (spec, row_bytes) = (self.steps.plan().spec(), self.source.expected_row_bytes());
        Reach::of(spec, row_bytes, self.lane.of, windows.lendable_bytes())
    }

    /// Starts the tasks of the connection.
    fn begin(
        self,
        window: Arc<window::Window>,
        reach: Reach,
        stats: Arc<StreamStats>,
        stop: watch::Receiver<bool>,
    ) -> Body {
        // Bounded in bytes: everything sent into it is counted in the window, plus at most one
        // progress message.
        let (out, pieces) = mpsc::unbounded_channel();
        let (given, followed) = watch::channel(self.at);
        let ahead = self.source.looks_ahead().then(|| {
            let ahead = ahead::Ahead::new(
                self.source.clone(),
                self.steps.plan().clone(),
                followed,
                self.until_epoch,
                stats.clone(),
            );
            Task::spawn(ahead.run())
        });
        let outlet = produce::Outlet {
            window,
            reach,
            pieces: out,
            given,
            open: Arc::new(stats::Open::new(stats)),
            stop,
        };
        let walk = walk::Walk::new(self.steps, self.lane, self.bounded);
        let producer = produce::Producer::new(self.lane, walk, self.source, outlet);
        Body {
            pieces,
            _producer: Task::spawn(producer.run()),
            _ahead: ahead,
        }
    }
}

/// The body of an answer: frames. Dropping it ends all work for it.
pub struct Body {
    pieces: mpsc::UnboundedReceiver<Bytes>,
    _producer: Task<()>,
    _ahead: Option<Task<()>>,
}

impl Stream for Body {
    type Item = Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes>>> {
        self.pieces.poll_recv(cx).map(|piece| piece.map(Ok))
    }
}
