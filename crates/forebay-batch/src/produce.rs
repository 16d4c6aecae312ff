//! The cursor: goes over the entries in order and outputs buffers.
//!
//! Two modes alternate. [`Producer::merge_warm`] handles a bufferful of entries that are on the
//! local disk without any hand-over in between. It runs on the thread that sends the buffer next,
//! so that the bytes leave the core's cache only once, as long as it need not wait for a disk or
//! compress; otherwise it runs on a thread that may block. At an entry that is not here, the cursor
//! waits until the look-ahead has brought it, and goes on; entries that are too large for a buffer,
//! or that the disk would not keep, are streamed through. What is compressed of those is compressed
//! piece by piece on a thread for that, too.

use crate::{
    Batcher, Denied, InFlight, RunOptions,
    ahead::{Ahead, with_attempts},
    held::{Opened, open},
    multipart::Planned,
    output::Output,
    pressure::Owed,
    request::BatchRequest,
    stats::add,
};
use bytes::Bytes;
use forebay_core::{CacheStatus, Error, ErrorKind, Reservation, Result, sync::Mutex};
use forebay_engine::{Appended, EntryHeader, Wait, WarmEntry};
use futures::{FutureExt, Stream, StreamExt, future::BoxFuture};
use std::{
    collections::HashMap,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

/// How long a cursor waits for an entry before it sends what it has.
const FLUSH_AFTER: Duration = Duration::from_millis(10);

/// What an entry takes in a tar besides its bytes: header, padding.
const ENTRY_OVERHEAD_BYTES: usize = 4 << 10;

/// One running batch.
pub(crate) struct Work {
    pub batcher: Batcher,
    pub request: BatchRequest,
    pub denied: Denied,
    pub options: RunOptions,
    pub began: Instant,
    /// Entries that the look-ahead had to bring, until the cursor has delivered them: they count as
    /// misses, not as hits.
    pub brought: Mutex<HashMap<usize, CacheStatus>>,
    pub(crate) _in_flight: InFlight,
    pub(crate) _window: Reservation,
    /// Memory for the request itself, if it is large.
    pub(crate) _request: Option<Reservation>,
}

impl Work {
    pub(crate) fn entry(&self, index: usize) -> WarmEntry<'_> {
        let e = &self.request.entries[index];
        let brought = self
            .brought
            .lock()
            .get(&index)
            .copied()
            .unwrap_or(CacheStatus::Hit);
        WarmEntry {
            name: &e.name,
            member: e.member.as_deref(),
            range: e.range,
            brought,
        }
    }

    pub(crate) fn note_brought(&self, index: usize, status: CacheStatus) {
        let mut brought = self.brought.lock();
        match status {
            CacheStatus::Hit => brought.remove(&index),
            _ => brought.insert(index, status),
        };
    }

    /// Decides about an entry's error: `Ok` if it may become a placeholder. Past the limit of soft
    /// errors, this is allowed only after bytes were `sent`: the batch could then only be cut, and
    /// all the other entries would be lost, while placeholders tell the client what is missing.
    ///
    /// # Errors
    /// The error that ends the batch.
    pub(crate) fn tolerate(
        &self,
        index: usize,
        error: Error,
        soft_errors: &mut u32,
        sent: bool,
    ) -> Result<Error> {
        let stats = &self.batcher.stats;
        if !error.kind().is_soft() || !self.request.continue_on_error {
            return Err(self.at(index, error));
        }
        *soft_errors += 1;
        add(&stats.errors_soft, 1);
        let max = self.batcher.config.soft_errors_max;
        if *soft_errors > max && !sent {
            let e = Error::invalid(format!(
                "{soft_errors} entries could not be read, more than batch.soft_errors_max = \
                 {max}; the last one"
            ));
            return Err(self
                .at(index, e)
                .hint("check the names, or raise the limit")
                .caused_by(error));
        }
        Ok(error)
    }

    /// An error of an entry, with its number and description.
    pub(crate) fn at(&self, index: usize, error: Error) -> Error {
        self.request.entries[index].at(index, error)
    }

    /// How long the client hears nothing before the batch is cut. AIStore's batch loader (in
    /// Lhotse) takes a broken connection for the end of its job; if the connection is silent
    /// instead, it gives up on it and fetches what is missing entry by entry.
    fn cut_pause(&self) -> Duration {
        let request = &self.request;
        match request.streaming && request.continue_on_error && !self.options.pax_errors {
            true => self.batcher.config.cut_pause,
            false => Duration::ZERO,
        }
    }
}

/// Why [`Producer::merge_warm`] returned.
enum Stop {
    Full,
    Cold,
    /// It would have to wait for the disk.
    Waits,
    End,
}

struct Producer {
    work: Arc<Work>,
    next: usize,
    output: Output,
    out: Vec<u8>,
    /// Data on their way to an output that is not tar.
    scratch: Vec<u8>,
    name: String,
    soft_errors: u32,
    planned: Option<Planned>,
    sent_any: bool,
    /// An entry that is being streamed: its size, and how much of it was output.
    streaming: Option<(u64, u64)>,
    /// Size of the last entry that was delivered.
    last_bytes: u64,
}

/// A batch's buffers, each made on demand; if the batch must be cut, the last item is an error.
pub(crate) struct Frames {
    producer: Option<BoxFuture<'static, ()>>,
    ready: Slot,
}

/// Where the producer leaves a buffer; it waits there until the buffer is taken.
type Slot = Arc<Mutex<Option<Result<Bytes>>>>;

impl Frames {
    pub(crate) fn new(work: Arc<Work>, planned: Option<Planned>) -> Self {
        let ready = Slot::default();
        let outlet = Outlet {
            ready: ready.clone(),
            batcher: work.batcher.clone(),
            owed: Owed::default(),
            since: Instant::now(),
        };
        let output = Output::new(work.request.format);
        let producer = Producer::new(work, output, planned);
        Self {
            producer: Some(producer.run(outlet).boxed()),
            ready,
        }
    }
}

impl Stream for Frames {
    type Item = Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(producer) = &mut self.producer
            && producer.poll_unpin(cx).is_ready()
        {
            self.producer = None;
        }
        match self.ready.lock().take() {
            Some(frame) => Poll::Ready(Some(frame)),
            None if self.producer.is_none() => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

impl Producer {
    fn new(work: Arc<Work>, output: Output, planned: Option<Planned>) -> Self {
        Producer {
            work,
            next: 0,
            output,
            out: Vec::new(),
            scratch: Vec::new(),
            name: String::new(),
            soft_errors: 0,
            planned,
            sent_any: false,
            streaming: None,
            last_bytes: 0,
        }
    }

    async fn run(mut self, mut to: Outlet) {
        let mut ahead = Ahead::new(self.work.clone());
        let error = loop {
            let stop = match self.merge().await {
                Ok(stop) => stop,
                Err(e) => return to.fail(e),
            };
            let went = match stop {
                Ok(Stop::Full) => {
                    self.flush(&mut to).await;
                    Ok(())
                }
                Ok(Stop::Cold | Stop::Waits) => self.cold_entry(&mut ahead, &mut to).await,
                Ok(Stop::End) => match self.finish(&mut to).await {
                    Ok(()) => return,
                    Err(e) => Err(e),
                },
                Err(e) => Err(e),
            };
            if let Err(e) = went {
                break e;
            }
        };
        if self.sent_any {
            let pause = self.work.cut_pause();
            if !pause.is_zero() {
                self.flush(&mut to).await;
            }
            let torn = self.tear(&error).map(|()| std::mem::take(&mut self.out));
            // Hold neither memory nor requests while waiting for the client.
            drop((self, ahead));
            tokio::time::sleep(pause).await;
            if let Ok(torn) = torn
                && !torn.is_empty()
            {
                to.put(Ok(torn.into())).await;
            }
        }
        to.fail(error);
    }

    /// Appends entries that are on the local disk: on this thread as far as that neither waits nor
    /// computes, then on one that may. The outer error is of a thread that failed.
    async fn merge(&mut self) -> Result<Result<Stop>> {
        if matches!(self.output, Output::Tar) {
            match self.merge_warm(Wait::MustNot) {
                Ok(Stop::Waits) => {}
                stop => return Ok(stop),
            }
        }
        self.elsewhere(|p| p.merge_warm(Wait::May)).await
    }

    /// Does what computes, or waits for the disk, on a thread that may.
    async fn elsewhere<T: Send + 'static>(
        &mut self,
        job: impl FnOnce(&mut Self) -> T + Send + 'static,
    ) -> Result<T> {
        // In its place until it comes back; after a thread that failed, nothing goes on from here.
        let empty = Producer::new(self.work.clone(), Output::Tar, None);
        let mut producer = std::mem::replace(self, empty);
        let worked = tokio::task::spawn_blocking(move || {
            let done = job(&mut producer);
            (producer, done)
        });
        let (producer, done) = worked
            .await
            .map_err(|e| Error::internal("a batch's worker failed").caused_by(e))?;
        *self = producer;
        Ok(done)
    }

    /// A tar that ends between two entries may pass for a whole one if its reader does not notice
    /// the broken connection, so it is made to end inside an entry. Ready bytes are sent before
    /// that, so that no entry ends in bytes of something else.
    fn tear(&mut self, error: &Error) -> Result<()> {
        if !matches!(self.output, Output::Tar) {
            self.out.clear();
            return Ok(());
        }
        if let Some((size, passed)) = self.streaming {
            if passed < size {
                return Ok(());
            }
            self.output.end(size, &mut self.out)?;
        }
        let text = self.work.options.pax_errors.then(|| error.describe());
        self.output.cut(text.as_deref(), &mut self.out)
    }

    async fn finish(&mut self, to: &mut Outlet) -> Result<()> {
        match self.output {
            Output::Tar => self.output.finish(&mut self.out)?,
            // What it holds back is compressed now.
            Output::Other(_) => self.elsewhere(|p| p.output.finish(&mut p.out)).await??,
        }
        self.flush(to).await;
        let stats = &self.work.batcher.stats;
        add(&stats.batches, 1);
        add(
            &stats.duration_ns,
            self.work.began.elapsed().as_nanos() as u64,
        );
        Ok(())
    }

    /// Appends entries that are on the local disk until the buffer is full.
    fn merge_warm(&mut self, wait: Wait) -> Result<Stop> {
        let work = self.work.clone();
        let config = &work.batcher.config;
        if self.out.capacity() == 0 {
            // Room for the entry that fills the buffer, because growing means copying. The size of
            // the previous entry is the best guess.
            let last_bytes = self
                .last_bytes
                .clamp(config.frame_bytes as u64 / 4, config.frame_bytes as u64 * 2)
                as usize;
            self.out
                .reserve_exact(config.frame_bytes + last_bytes + ENTRY_OVERHEAD_BYTES);
        }
        while self.next < work.request.entries.len() {
            if self.out.len() >= config.frame_bytes {
                return Ok(Stop::Full);
            }
            if self.planned_error(self.next).is_some() || work.denied.contains_key(&self.next) {
                return Ok(Stop::Cold);
            }
            match self.append_next(wait)? {
                Appended::Done(header) => self.delivered(&header),
                Appended::Cold => return Ok(Stop::Cold),
                Appended::Waits => return Ok(Stop::Waits),
            }
        }
        Ok(Stop::End)
    }

    /// Appends the entry at the cursor as a whole, or nothing.
    fn append_next(&mut self, wait: Wait) -> Result<Appended> {
        let work = self.work.clone();
        self.append(&work.entry(self.next), wait)
    }

    fn append(&mut self, entry: &WarmEntry<'_>, wait: Wait) -> Result<Appended> {
        let at = self.out.len();
        let appended = self.append_some(entry, wait);
        if !matches!(appended, Ok(Appended::Done(_))) {
            self.out.truncate(at);
        }
        appended
    }

    fn append_some(&mut self, entry: &WarmEntry<'_>, wait: Wait) -> Result<Appended> {
        let work = self.work.clone();
        let engine = &work.batcher.engine;
        let max = work.batcher.config.frame_bytes as u64 * 2;
        work.request.entries[self.next].output_name(work.request.only_object_name, &mut self.name);
        let expected = self.planned_size(self.next);
        let agrees = |h: &EntryHeader| expected.is_none_or(|size| size == h.size);
        let fits = |h: &EntryHeader| work.request.entries[self.next].check_size(h.size).is_ok();
        match &mut self.output {
            Output::Tar => {
                let (name, mut failed, mut short) = (&self.name, None, false);
                let appended =
                    engine.append_warm(entry, max, wait, &mut self.out, &mut |header, out| {
                        short = !fits(header);
                        if !agrees(header) {
                            failed = Some(changed());
                        } else if let Err(e) = forebay_format::tar_header_into(
                            out,
                            name,
                            header.size,
                            header.mtime_secs,
                        ) {
                            failed = Some(e);
                        }
                    });
                let Appended::Done(header) = appended else {
                    return Ok(appended);
                };
                if let Some(e) = failed {
                    return Err(e);
                }
                // The slower path says what is wrong with it.
                if short {
                    return Ok(Appended::Cold);
                }
                forebay_format::tar_padding_into(&mut self.out, header.size);
                Ok(appended)
            }
            Output::Other(_) => {
                self.scratch.clear();
                let appended =
                    engine.append_warm(entry, max, wait, &mut self.scratch, &mut |_, _| {});
                let Appended::Done(header) = appended else {
                    return Ok(appended);
                };
                if !agrees(&header) {
                    return Err(changed());
                }
                if !fits(&header) {
                    return Ok(Appended::Cold);
                }
                self.output.begin(&self.name, &header, &mut self.out)?;
                self.output.data(&self.scratch, &mut self.out)?;
                self.output.end(header.size, &mut self.out)?;
                Ok(appended)
            }
        }
    }

    /// Handles an entry at the cursor that is not here, or is large, or is known to have failed.
    async fn cold_entry(&mut self, ahead: &mut Ahead, to: &mut Outlet) -> Result<()> {
        let index = self.next;
        if let Some(error) = self.planned_error(index) {
            return self.placeholder(&error);
        }
        if let Some(error) = self.work.denied.get(&index).cloned() {
            let work = self.work.clone();
            let sent = self.sent_any;
            let tolerated = work.tolerate(index, error, &mut self.soft_errors, sent)?;
            return self.placeholder(&tolerated);
        }
        let began = Instant::now();
        let brought = {
            let bring = ahead.bring(index);
            tokio::pin!(bring);
            match tokio::time::timeout(FLUSH_AFTER, &mut bring).await {
                Ok(done) => done,
                Err(_) => {
                    // While it comes, the client may have what is ready; but the first buffer is
                    // held back where an error could still be answered as such.
                    if self.sent_any || self.may_begin() {
                        self.flush(to).await;
                    }
                    bring.await
                }
            }
        };
        add(
            &self.work.batcher.stats.wait_ns,
            began.elapsed().as_nanos() as u64,
        );
        let done = match brought {
            Ok(Some(held)) => self.stream_entry(Some(held), to).await,
            Ok(None) => self.after_bring(to).await,
            Err(e) => Err(Failed::Entry(e)),
        };
        match done {
            Ok(()) => Ok(()),
            Err(Failed::Batch(e)) => Err(e),
            Err(Failed::Entry(e)) if self.planned.is_some() => Err(self.work.at(index, e)),
            Err(Failed::Entry(e)) => {
                let (work, sent) = (self.work.clone(), self.sent_any);
                let tolerated = work.tolerate(index, e, &mut self.soft_errors, sent)?;
                self.placeholder(&tolerated)
            }
        }
    }

    async fn after_bring(&mut self, to: &mut Outlet) -> Result<(), Failed> {
        // What was just written is in the page cache; where it is not, its stream waits for it
        // elsewhere than on this thread.
        let appended = match self.output {
            Output::Tar => self.append_next(Wait::MustNot),
            // To compress it takes longer than any disk.
            Output::Other(_) => self.elsewhere(|p| p.append_next(Wait::May)).await.flatten(),
        };
        if let Appended::Done(header) = appended.map_err(Failed::Batch)? {
            self.delivered(&header);
            return Ok(());
        }
        self.stream_entry(None, to).await
    }

    /// Streams the entry at the cursor through, bypassing the disk if necessary.
    async fn stream_entry(&mut self, held: Option<Opened>, to: &mut Outlet) -> Result<(), Failed> {
        let work = self.work.clone();
        let opened = match held {
            Some(held) => held,
            None => with_attempts(&work, || open(&work, self.next))
                .await
                .map_err(Failed::Entry)?,
        };
        let Opened {
            header,
            cache,
            mut body,
        } = opened;
        work.batcher.engine.stats().count_read(cache);
        work.request.entries[self.next]
            .check_size(header.size)
            .map_err(Failed::Entry)?;
        if self
            .planned_size(self.next)
            .is_some_and(|size| size != header.size)
        {
            return Err(Failed::Batch(changed()));
        }
        work.request.entries[self.next].output_name(work.request.only_object_name, &mut self.name);
        self.output
            .begin(&self.name, &header, &mut self.out)
            .map_err(Failed::Batch)?;
        let (mut passed, index) = (0, self.next);
        let differs = |passed| {
            Failed::Batch(Error::internal(format!(
                "in[{index}]: the entry has {passed} bytes, and {} were announced",
                header.size
            )))
        };
        self.streaming = Some((header.size, 0));
        while let Some(piece) = body.next().await {
            // The entry's header has been output: from here on, its failure is the batch's.
            let piece = piece.map_err(|e| Failed::Batch(work.at(index, e)))?;
            passed += piece.len() as u64;
            if passed > header.size {
                return Err(differs(passed));
            }
            self.streaming = Some((header.size, passed));
            if matches!(self.output, Output::Tar)
                && piece.len() >= work.batcher.config.frame_bytes / 2
            {
                self.flush(to).await;
                to.send(piece).await;
            } else {
                match self.output {
                    Output::Tar => self.output.data(&piece, &mut self.out),
                    Output::Other(_) => self
                        .elsewhere(move |p| p.output.data(&piece, &mut p.out))
                        .await
                        .flatten(),
                }
                .map_err(Failed::Batch)?;
                if self.out.len() >= work.batcher.config.frame_bytes {
                    self.flush(to).await;
                }
            }
        }
        if passed != header.size {
            return Err(differs(passed));
        }
        self.streaming = None;
        let size = header.size;
        match self.output {
            Output::Tar => self.output.end(size, &mut self.out),
            Output::Other(_) => self
                .elsewhere(move |p| p.output.end(size, &mut p.out))
                .await
                .flatten(),
        }
        .map_err(Failed::Batch)?;
        self.delivered(&header);
        Ok(())
    }

    fn placeholder(&mut self, error: &Error) -> Result<()> {
        let work = self.work.clone();
        work.request.entries[self.next].output_name(work.request.only_object_name, &mut self.name);
        let text = work.options.pax_errors.then(|| error.describe());
        self.output
            .placeholder(&self.name, text.as_deref(), &mut self.out)?;
        self.next += 1;
        Ok(())
    }

    fn delivered(&mut self, header: &EntryHeader) {
        let stats = &self.work.batcher.stats;
        if self.work.request.entries[self.next].member.is_some() {
            add(&stats.members, 1);
            add(&stats.member_bytes, header.size);
        } else {
            add(&stats.objects, 1);
            add(&stats.object_bytes, header.size);
        }
        self.last_bytes = header.size;
        self.work.brought.lock().remove(&self.next);
        self.next += 1;
    }

    fn planned_error(&self, index: usize) -> Option<Error> {
        self.planned
            .as_ref()?
            .entries
            .get(index)?
            .as_ref()
            .err()
            .cloned()
    }

    fn planned_size(&self, index: usize) -> Option<u64> {
        self.planned
            .as_ref()?
            .entries
            .get(index)?
            .as_ref()
            .ok()
            .map(|h| h.size)
    }

    /// Whether the first buffer may go out although it is not full. With nothing in it but
    /// placeholders it waits: if there are too many of them, the whole batch is an error, and
    /// whether it is must not hang on how fast the origin denies each name.
    fn may_begin(&self) -> bool {
        self.work.request.continue_on_error && self.next > self.soft_errors as usize
    }

    async fn flush(&mut self, to: &mut Outlet) {
        if !self.out.is_empty() {
            self.sent_any = true;
            to.send(std::mem::take(&mut self.out).into()).await;
        }
    }
}

/// Whether the entry failed or the whole batch.
enum Failed {
    /// This may become a placeholder.
    Entry(Error),
    Batch(Error),
}

fn changed() -> Error {
    Error::new(
        ErrorKind::VersionChanged,
        "an entry changed while the batch was being made",
    )
    .hint("send the request again")
}

/// The way to the client, slowed down while the node is under pressure.
struct Outlet {
    ready: Slot,
    batcher: Batcher,
    owed: Owed,
    /// When the previous buffer was taken.
    since: Instant,
}

impl Outlet {
    async fn send(&mut self, frame: Bytes) {
        let stats = &self.batcher.stats;
        let pause = self
            .owed
            .due(self.batcher.pressure.pause(self.since.elapsed()));
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
            add(&stats.throttle_ns, pause.as_nanos() as u64);
        }
        add(&stats.bytes_sent, frame.len() as u64);
        self.put(Ok(frame)).await;
        self.since = Instant::now();
    }

    /// Returns when it was taken and more is wanted.
    async fn put(&self, frame: Result<Bytes>) {
        *self.ready.lock() = Some(frame);
        // No wake-up is needed: taking the buffer leads to another poll.
        std::future::poll_fn(|_| {
            if self.ready.lock().is_none() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        // A client that reads this fast would keep its thread from all others for the duration of a
        // batch.
        tokio::task::yield_now().await;
    }

    /// The last thing that the client's side gets.
    fn fail(self, error: Error) {
        *self.ready.lock() = Some(Err(error));
    }
}
