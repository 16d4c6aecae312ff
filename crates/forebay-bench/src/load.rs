//! The closed loop: a number of clients, each a thread with one keep-alive connection, which sends
//! its next request when the last answer has arrived.
//!
//! Rates are taken over a window of time that begins after a ramp and ends before the clients stop,
//! so that every client is working throughout. What the clients receive is counted as it arrives,
//! object by object, not by completed requests, so the window may begin and end within answers.
//! Every answer is checked for its length, names, order and sizes (and its bytes, if requested): a
//! wrong answer ends the run with an error.

use crate::{
    data::{Dataset, Entry, Random},
    fan::Fan,
    histogram::Histogram,
    interrupt,
    request::{Kind, Request},
    usage::{self, Process},
    wire::{Address, Connection, Stream},
};
use forebay_client::archive::{self, Visit, Walker};
use forebay_core::{Error, ErrorKind, Result};
use std::{
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// A load to run.
pub struct Load<'a> {
    pub at: &'a Address,
    pub kind: Kind,
    pub data: &'a Dataset,
    pub requests: &'a [Request],
    pub clients: usize,
    pub buffer_bytes: usize,
    /// The time before the window.
    pub ramp: Duration,
    pub window: Duration,
    /// Also compare the bytes.
    pub verify: bool,
    /// Each request once, in order, then stop; no ramp. Otherwise at random, until the window is
    /// over.
    pub once: bool,
    pub seed: u64,
    /// The server, if its CPU time and memory can be seen.
    pub server: Option<Process>,
    /// Fetch each batch by plain GETs instead.
    pub by_gets: Option<ByGets<'a>>,
}

/// Batches without GetBatch.
#[derive(Clone, Copy)]
pub struct ByGets<'a> {
    /// The GET of each entry, by its number.
    pub gets: &'a [Request],
    /// For each client.
    pub in_flight: usize,
}

/// The result of a load.
#[derive(Default)]
pub struct Outcome {
    pub elapsed: Duration,
    pub objects: u64,
    pub bytes: u64,
    /// From sending a request to the last byte of its answer, in nanoseconds.
    pub requests: Histogram,
    pub server_cpu: Option<Duration>,
    pub client_cpu: Duration,
    pub server_peak_bytes: Option<u64>,
    pub client_peak_bytes: Option<u64>,
}

/// What one client has received, on its own cache line.
#[repr(align(128))]
#[derive(Default)]
pub struct Received {
    objects: AtomicU64,
    bytes: AtomicU64,
}

impl Received {
    // Only its client writes to it: no need for an atomic addition.
    fn add(counter: &AtomicU64, n: u64) {
        counter.store(counter.load(Relaxed) + n, Relaxed);
    }
}

struct Shared {
    stop: AtomicBool,
    in_window: AtomicBool,
    next: AtomicUsize,
    working: AtomicUsize,
    received: Vec<Received>,
    ready: Barrier,
}

struct Look {
    at: Instant,
    objects: u64,
    bytes: u64,
    server_cpu: Option<Duration>,
    client_cpu: Duration,
}

impl Shared {
    fn look(&self, server: Option<Process>) -> Result<Look> {
        let sum = |of: fn(&Received) -> &AtomicU64| {
            self.received.iter().map(|r| of(r).load(Relaxed)).sum()
        };
        Ok(Look {
            at: Instant::now(),
            objects: sum(|r| &r.objects),
            bytes: sum(|r| &r.bytes),
            server_cpu: server.map(Process::cpu).transpose()?,
            client_cpu: usage::own_cpu(),
        })
    }

    /// Waits for the window's end, a failed client, or a signal.
    fn wait(&self, time: Duration) {
        let began = Instant::now();
        while began.elapsed() < time
            && !self.stop.load(Relaxed)
            && self.working.load(Relaxed) > 0
            && interrupt::signal().is_none()
        {
            std::thread::sleep((time - began.elapsed().min(time)).min(Duration::from_millis(10)));
        }
    }
}

/// Runs the load.
pub fn run(load: &Load) -> Result<Outcome> {
    let shared = Shared {
        stop: AtomicBool::new(false),
        in_window: AtomicBool::new(load.once),
        next: AtomicUsize::new(0),
        working: AtomicUsize::new(load.clients),
        received: (0..load.clients).map(|_| Received::default()).collect(),
        ready: Barrier::new(load.clients + 1),
    };
    if load.requests.is_empty() || load.clients == 0 {
        return Err(Error::invalid("nothing to ask for")
            .hint("--objects, --batch and --concurrency must be at least 1"));
    }
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..load.clients)
            .map(|i| {
                scope.spawn({
                    let shared = &shared;
                    move || {
                        let outcome = client(load, shared, i);
                        if outcome.is_err() {
                            shared.stop.store(true, Relaxed);
                        }
                        shared.working.fetch_sub(1, Relaxed);
                        outcome
                    }
                })
            })
            .collect();
        shared.ready.wait();
        if !load.once {
            shared.wait(load.ramp);
        }
        if let Some(server) = load.server {
            server.forget_peak();
        }
        usage::forget_own_peak();
        let first = shared.look(load.server);
        shared.in_window.store(true, Relaxed);
        shared.wait(load.window);
        let last = shared.look(load.server);
        shared.stop.store(true, Relaxed);
        let mut outcome = Outcome {
            server_peak_bytes: load.server.and_then(Process::peak_bytes),
            client_peak_bytes: usage::own_peak_bytes(),
            ..Outcome::default()
        };
        let mut failure = None;
        let mut latest = None;
        for client in clients {
            match client
                .join()
                .map_err(|_| Error::internal("a client panicked"))
            {
                Ok(Ok((latencies, end))) => {
                    outcome.requests.merge(&latencies);
                    latest = latest.max(Some(end));
                }
                Ok(Err(e)) | Err(e) => drop(failure.get_or_insert(e)),
            }
        }
        interrupt::check()?;
        if let Some(e) = failure {
            return Err(e);
        }
        let (mut first, last) = (first?, last?);
        if load.once {
            // The clients may have begun before this thread looked.
            (first.objects, first.bytes) = (0, 0);
        }
        // For a run that ended by itself, the time is that of the last answer.
        let ended = if load.once {
            latest.unwrap_or(last.at).min(last.at)
        } else {
            last.at
        };
        outcome.elapsed = ended - first.at;
        outcome.objects = last.objects - first.objects;
        outcome.bytes = last.bytes - first.bytes;
        outcome.server_cpu = last
            .server_cpu
            .zip(first.server_cpu)
            .map(|(a, b)| a.saturating_sub(b));
        outcome.client_cpu = last.client_cpu - first.client_cpu;
        Ok(outcome)
    })
}

/// How a client gets what a request asks for.
enum Way<'a> {
    Requests(Connection),
    Gets(Fan<'a>),
}

fn client<'a>(load: &Load<'a>, shared: &'a Shared, number: usize) -> Result<(Histogram, Instant)> {
    let connected = match load.by_gets {
        None => {
            Stream::connect(load.at).map(|s| Way::Requests(Connection::new(s, load.buffer_bytes)))
        }
        Some(by) => Fan::connect(load.at, by.in_flight, load.buffer_bytes, by.gets).map(Way::Gets),
    };
    shared.ready.wait();
    let mut way = connected?;
    let mut random = Random::new(load.seed, 1000 + number as u64);
    let mut latencies = Histogram::default();
    let mut check = Check::new(load.data, load.verify, &shared.received[number]);
    while !shared.stop.load(Relaxed) {
        let index = if load.once {
            shared.next.fetch_add(1, Relaxed)
        } else {
            random.below(load.requests.len())
        };
        let Some(request) = load.requests.get(index) else {
            break;
        };
        let counted = shared.in_window.load(Relaxed);
        let began = Instant::now();
        match &mut way {
            Way::Requests(connection) => exchange(connection, request, load.kind, &mut check)?,
            Way::Gets(fan) => fan.fetch(&request.entries, &mut check)?,
        }
        if counted {
            latencies.record(began.elapsed().as_nanos() as u64);
        }
    }
    Ok((latencies, Instant::now()))
}

/// One request and its answer, which is checked.
fn exchange<'a>(
    connection: &mut Connection,
    request: &'a Request,
    kind: Kind,
    check: &mut Check<'a>,
) -> Result<()> {
    connection.send(&request.wire)?;
    exchange_answer(connection, request, kind, check)
}

/// Reads the answer to a request that was sent.
pub fn exchange_answer<'a>(
    connection: &mut Connection,
    request: &'a Request,
    kind: Kind,
    check: &mut Check<'a>,
) -> Result<()> {
    let head = connection.head()?;
    if head.status != 200 {
        let mut text = Vec::new();
        connection.body(&head, |piece| {
            text.extend_from_slice(&piece[..piece.len().min(500 - text.len().min(500))]);
            Ok(())
        })?;
        let text = String::from_utf8_lossy(&text).replace(['\r', '\n'], " ");
        let first = request
            .wire
            .split(|b| *b == b'\r')
            .next()
            .unwrap_or_default();
        return Err(Error::new(
            ErrorKind::OriginUnavailable,
            format!(
                "{}: status {}: {text}",
                String::from_utf8_lossy(first),
                head.status
            ),
        ));
    }
    if head.close {
        return Err(Error::new(
            ErrorKind::OriginUnavailable,
            "the server closes the connection after one answer",
        )
        .hint("the benchmark is of connections that are kept"));
    }
    check.begin(&request.entries);
    match kind {
        Kind::Get => {
            let size = connection.body(&head, |piece| check.data(piece))?;
            check.whole(size)
        }
        Kind::Batch => {
            let mut walker = Walker::default();
            connection.body(&head, |piece| walker.feed(piece, check))?;
            if !walker.is_whole() {
                return Err(wrong("the archive of a batch was cut".to_owned()));
            }
            check.end()
        }
    }
}

/// Compares what arrives with what was requested, and counts it.
pub struct Check<'a> {
    data: &'a Dataset,
    order: &'a [u32],
    /// How many entries are done.
    at: usize,
    crc: u32,
    verify: bool,
    received: &'a Received,
}

impl<'a> Check<'a> {
    pub fn new(data: &'a Dataset, verify: bool, received: &'a Received) -> Self {
        Self {
            data,
            order: &[],
            at: 0,
            crc: 0,
            verify,
            received,
        }
    }

    fn begin(&mut self, order: &'a [u32]) {
        (self.order, self.at, self.crc) = (order, 0, 0);
    }

    fn expected(&self) -> Option<&'a Entry> {
        self.order
            .get(self.at)
            .map(|i| &self.data.entries[*i as usize])
    }

    /// Checks the answer to a plain GET.
    fn whole(&mut self, size: u64) -> Result<()> {
        match self.expected() {
            Some(e) if e.size == size => self.done(),
            e => Err(wrong(format!(
                "{} has {} bytes, and {size} came",
                e.map_or("", |e| &e.object),
                e.map_or(0, |e| e.size)
            ))),
        }
    }

    fn end(&self) -> Result<()> {
        match self.expected() {
            None => Ok(()),
            Some(e) => Err(wrong(format!(
                "a batch of {} entries ended before number {}, {}",
                self.order.len(),
                self.at,
                e.in_answer
            ))),
        }
    }
}

impl Visit for Check<'_> {
    type Error = Error;

    fn entry(&mut self, entry: archive::Entry<'_>) -> Result<()> {
        let (name, size) = (entry.name, entry.size as u64);
        match self.expected() {
            Some(e) if e.in_answer == name && e.size == size => Ok(()),
            e => {
                let asked = e.map_or("nothing more".to_owned(), |e| {
                    format!("{} of {} bytes", e.in_answer, e.size)
                });
                Err(wrong(format!(
                    "entry {} was to be {asked}, and {name} of {size} bytes came",
                    self.at
                )))
            }
        }
    }

    fn data(&mut self, bytes: &[u8]) -> Result<()> {
        if self.verify {
            self.crc = forebay_core::crc32c_append(self.crc, bytes);
        }
        Received::add(&self.received.bytes, bytes.len() as u64);
        Ok(())
    }

    fn done(&mut self) -> Result<()> {
        if self.verify
            && let Some(e) = self.expected()
            && e.crc.is_some_and(|crc| crc != self.crc)
        {
            return Err(wrong(format!(
                "the bytes of {} are not those that were written",
                e.in_answer
            )));
        }
        self.crc = 0;
        self.at += 1;
        Received::add(&self.received.objects, 1);
        Ok(())
    }
}

fn wrong(what: String) -> Error {
    Error::new(ErrorKind::Corrupt, what)
        .hint("a wrong answer is a defect of the server: the figures before it mean nothing")
}
