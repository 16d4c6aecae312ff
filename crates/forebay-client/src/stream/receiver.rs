//! A stream: opening its lanes, redistributing the steps when there are more of them, and reading
//! in order.

use super::{
    grow::{Grower, Sample},
    lane::{Lane, Shared},
    memory::Pool,
    nodes::Nodes,
    open::Openings,
    shelf::{Received, Shelf},
    stats::{Counters, Stats},
};
use crate::Client;
use forebay_core::{Error, Result, limits};
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};
use tokio::{
    runtime::Handle,
    sync::watch,
    task::{AbortHandle, JoinSet},
};

/// How many lanes are opened by default.
const LANES_FIRST: u32 = 2;
/// How often to check whether more lanes are worth it.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// While new lanes connect and begin, the old ones continue for this many round trips.
const OVERLAP_ROUND_TRIPS: f64 = 3.0;

/// How a stream is received.
#[derive(Clone, Debug)]
pub struct Options {
    /// The number of connections; `None`: chosen from measurements.
    pub connections: Option<u32>,
    /// How many bytes may be received before they are yielded.
    pub ahead_bytes: u64,
    /// A node that sends nothing for this long, not even a sign of life, is considered gone.
    pub silence: Duration,
    /// How long to retry a step without any progress.
    pub retry_for: Duration,
    /// The first step; earlier ones are not requested.
    pub from_step: u64,
    /// What the job is called, for the nodes' accounts.
    pub job: Option<String>,
    /// The sources of the plan, for nodes that do not know them.
    pub openings: Openings,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            connections: None,
            ahead_bytes: limits::STREAM_RECEIVE_DEFAULT_BYTES,
            silence: Duration::from_secs(30),
            retry_for: Duration::from_secs(60),
            from_step: 0,
            job: None,
            openings: Openings::default(),
        }
    }
}

/// The steps of one plan, in order, from one node or several. Dropping it closes its connections.
pub struct Stream {
    shared: Arc<Shared>,
    conductor: AbortHandle,
}

impl Stream {
    /// Begins to receive, and returns at once. `request` is the JSON of the request's body.
    ///
    /// # Errors
    /// `Invalid` if no node is named, too many connections are asked for, or the request is too long.
    pub fn open(
        runtime: &Handle,
        nodes: Vec<Client>,
        request: Vec<u8>,
        options: Options,
    ) -> Result<Stream> {
        let nodes = Nodes::new(nodes)?;
        let most = limits::STREAM_CONNECTIONS_MAX;
        if options.connections.is_some_and(|k| k == 0 || k > most) {
            return Err(Error::invalid(format!(
                "connections is {}",
                options.connections.unwrap_or(0)
            ))
            .hint(format!(
                "give 1 to {most}, or leave it out to have the number chosen by measuring"
            )));
        }
        if request.len() > limits::STREAM_BODY_MAX_BYTES {
            return Err(Error::invalid(format!(
                "the request for a stream has {} bytes, which is too long",
                request.len()
            )));
        }
        let first =
            options
                .connections
                .unwrap_or(LANES_FIRST)
                .max(if options.connections.is_none() {
                    nodes.len() as u32
                } else {
                    0
                });
        let shared = Arc::new(Shared {
            nodes,
            shelf: Shelf::starting_at(options.from_step, options.ahead_bytes),
            counters: Counters::default(),
            pool: Pool::new(),
            path: forebay_protocol::STREAMS_PATH.to_owned(),
            body: request,
            job: options.job,
            openings: options.openings,
            telling: tokio::sync::Mutex::default(),
            silence: options.silence,
            retry_for: options.retry_for,
        });
        let conductor = Conductor {
            shared: shared.clone(),
            lanes: JoinSet::new(),
            until: watch::channel(u64::MAX).0,
        };
        let auto = options.connections.is_none();
        let conductor = runtime
            .spawn(conductor.run(first, auto, options.from_step))
            .abort_handle();
        Ok(Stream { shared, conductor })
    }

    /// The next step if it has arrived; see [`Stream::next`].
    pub fn try_next(&self) -> Option<Result<Option<Received>>> {
        self.shared.shelf.try_next().map(|next| self.count(next))
    }

    /// The next step; `None` after the last one. An error is permanent: nothing follows it.
    pub async fn next(&self) -> Result<Option<Received>> {
        let next = self.shared.shelf.next().await;
        self.count(next)
    }

    fn count(&self, next: Result<Option<Received>>) -> Result<Option<Received>> {
        if let Ok(Some(received)) = &next {
            let counters = &self.shared.counters;
            counters.steps.fetch_add(1, Relaxed);
            counters
                .rows
                .fetch_add(u64::from(received.header.rows), Relaxed);
            counters
                .bytes
                .fetch_add(received.header.payload_bytes, Relaxed);
        }
        next
    }

    /// Where the time went so far.
    pub fn stats(&self) -> Stats {
        self.shared.counters.stats(self.shared.shelf.level())
    }

    /// Closes the connections; nothing more arrives.
    pub fn close(&self) {
        self.conductor.abort();
        self.shared.shelf.close();
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.conductor.abort();
    }
}

/// Opens lanes, and redistributes the steps when it opens more of them.
struct Conductor {
    shared: Arc<Shared>,
    lanes: JoinSet<()>,
    /// Where the current lanes end because others take over.
    until: watch::Sender<u64>,
}

impl Conductor {
    async fn run(mut self, connections: u32, auto: bool, from: u64) {
        self.open(connections, from);
        let mut grower = Grower::new(connections, Instant::now());
        loop {
            tokio::select! {
                ended = self.lanes.join_next() => match ended {
                    None => return,
                    Some(Ok(())) => {}
                    Some(Err(e)) => {
                        let error = Error::internal("a connection of the stream ended by a \
                            defect").caused_by(e.to_string());
                        self.shared.shelf.fail(error);
                        return;
                    }
                },
                () = tokio::time::sleep(LOOK_EVERY), if auto && !grower.settled => self.look(&mut grower),
            }
        }
    }

    fn open(&mut self, of: u32, from: u64) {
        let (until, followed) = watch::channel(u64::MAX);
        for number in 0..of {
            let lane = Lane {
                number,
                of,
                next: Lane::first(number, of, from),
                until: followed.clone(),
                node: number as usize,
            };
            self.lanes.spawn(lane.run(self.shared.clone()));
        }
        // The previous lanes end where these begin.
        let before = std::mem::replace(&mut self.until, until);
        before.send_replace(from);
    }

    fn look(&mut self, grower: &mut Grower) {
        let shared = &self.shared;
        let stats = shared.counters.stats(shared.shelf.level());
        let round_trip = Duration::from_secs_f64(stats.rtt_seconds.unwrap_or(0.0));
        let sample = Sample {
            bytes: shared.counters.received_bytes.load(Relaxed),
            waited: Duration::from_secs_f64(stats.waited_seconds),
            paused: Duration::from_secs_f64(stats.paused_seconds),
        };
        let Some((connections, rate)) = grower.look(Instant::now(), round_trip, sample) else {
            return;
        };
        let level = shared.shelf.level();
        let step_bytes =
            sample.bytes as f64 / shared.counters.received_steps.load(Relaxed).max(1) as f64;
        let overlap = rate * round_trip.as_secs_f64() * OVERLAP_ROUND_TRIPS / step_bytes.max(1.0);
        let from = level.seen.map_or(level.next, |seen| seen + 1) + 1 + overlap as u64;
        self.open(connections, from);
    }
}
