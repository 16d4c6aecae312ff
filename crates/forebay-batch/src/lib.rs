//! GetBatch: many objects and archive members in one request, merged in strict order within bounded
//! memory.
//!
//! How a batch works ([`Batcher::run`]; the paper is Aizman et al., *GetBatch*, sections 2.2 to
//! 2.4):
//! 1. **Parse** (`request.rs`): the JSON body becomes entries, all checked; a mistake is a 400 that
//!    says where it is.
//! 2. **Admit** (`lib.rs`): memory for its buffers is reserved from the budget, or the batch is
//!    refused with 429 before any work.
//! 3. **Look ahead** (`ahead.rs`): entries that are not on the local disk are brought there, many
//!    at a time, some way ahead of the cursor; if the disk does not keep them, into memory
//!    (`held.rs`). In a cluster, small ones are asked of the node that has them together
//!    (`gather.rs`).
//! 4. **Merge** (`produce.rs`): one cursor goes over the entries in order. What is on disk is read
//!    straight into the outgoing buffer after its header, a bufferful at a time, when the
//!    connection asks for the next one and on its thread; the rest is streamed through.
//! 5. **Deliver** (`output.rs`, `multipart.rs`): tar, tgz, tar.lz4 or zip, streamed, or behind a
//!    metadata part in the buffered form.
//!
//! Invariants:
//! - entry *i* of the answer is entry *i* of the request, whatever the order in which data arrive;
//! - memory is the buffers of one batch times the number of batches, not the size of a batch (the
//!   published design buffers out-of-order arrivals; here they wait on the local disk);
//! - the bytes of an answer are a function of the request and of the objects' versions;
//! - a batch that cannot be completed after its first byte ends in an error, and so does the
//!   connection: never a shorter archive.

#![warn(missing_docs)]

mod ahead;
mod config;
mod gather;
mod held;
mod multipart;
mod output;
mod pressure;
mod produce;
mod request;
mod stats;

pub use config::BatchConfig;
pub use request::{BatchRequest, Entry};
pub use stats::{BatchSnapshot, BatchStats};

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, ObjectName, Reservation, Result};
use forebay_engine::{ByteStream, Engine};
use futures::{StreamExt, stream};
use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};

/// Requests of at least this size take their memory from the budget; smaller ones are small
/// compared with their connection.
const LARGE_REQUEST_BYTES: usize = 256 << 10;
/// An entry with its name, in memory.
const ENTRY_BYTES: u64 = size_of::<Entry>() as u64 + 64;

/// Whether the sender of a request may read an object; the error is the answer.
#[derive(Clone)]
pub struct MayRead(Arc<dyn Fn(&ObjectName) -> Result<()> + Send + Sync>);

impl MayRead {
    /// Asks `check` about each entry's object; it must answer from memory, without waiting.
    pub fn new(check: impl Fn(&ObjectName) -> Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(check))
    }
}

impl fmt::Debug for MayRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MayRead")
    }
}

/// Which other node is to answer a batch, by the objects and the bytes that its entries begin with.
#[derive(Clone)]
pub struct Elsewhere(Arc<dyn Fn(Begins<'_>) -> Option<String> + Send + Sync>);

/// Objects, each with a byte of it.
pub type Begins<'a> = &'a mut dyn Iterator<Item = (&'a ObjectName, u64)>;

impl Elsewhere {
    /// `find` answers from memory, without waiting, with the URL of the node.
    pub fn new(find: impl Fn(Begins<'_>) -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(find))
    }

    /// What its sender may not read says nothing about where the rest lies.
    fn of(&self, request: &BatchRequest, denied: &Denied) -> Option<String> {
        let entries = request.entries.iter().enumerate();
        let mut allowed = entries
            .filter(|(index, _)| !denied.contains_key(index))
            .map(|(_, entry)| (&entry.name, entry.begins_at()));
        self.0(&mut allowed)
    }
}

impl fmt::Debug for Elsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Elsewhere")
    }
}

/// What comes with a request besides its body.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// The `coloc` query parameter. Without `elsewhere` it changes nothing; it is still checked.
    pub coloc: Option<String>,
    /// Asked about a batch with `coloc`, once it is known what its sender may read.
    pub elsewhere: Option<Elsewhere>,
    /// Whether placeholders carry their error in a PAX record `FOREBAY.error`.
    pub pax_errors: bool,
    /// Asked about each entry before anything is looked up. `None`: all entries may be read.
    pub may_read: Option<MayRead>,
}

/// Requests up to this size are parsed on the runtime's threads; longer ones on others.
const PARSED_HERE_BYTES: usize = 64 << 10;

/// An answer that is being sent.
pub struct BatchAnswer {
    /// The archive's type for a streamed answer, `multipart/mixed` for a buffered one.
    pub content_type: String,
    /// If known before the first byte: for buffered answers in tar.
    pub content_length: Option<u64>,
    /// Ends in an error if the batch had to be cut; the connection must then be broken off.
    pub body: ByteStream,
}

/// What became of a request.
pub enum Answered {
    /// It is answered here.
    Here(BatchAnswer),
    /// The node with this URL is to answer it.
    Elsewhere(String),
}

impl Answered {
    /// The answer of a batch that had no [`RunOptions::elsewhere`].
    ///
    /// # Errors
    /// `Internal` if another node is to answer it.
    pub fn here(self) -> Result<BatchAnswer> {
        match self {
            Answered::Here(answer) => Ok(answer),
            Answered::Elsewhere(url) => Err(Error::internal(format!(
                "a batch that is answered here was sent to {url}"
            ))),
        }
    }
}

/// Executes batches over an engine. Cheap to clone: all clones are one.
#[derive(Clone)]
pub struct Batcher {
    engine: Engine,
    config: Arc<BatchConfig>,
    stats: Arc<BatchStats>,
    pressure: Arc<pressure::Pressure>,
}

impl Batcher {
    /// A batcher with its own counters; its memory comes from `engine`'s budget.
    pub fn new(engine: Engine, config: BatchConfig) -> Self {
        Self {
            engine,
            pressure: Arc::new(pressure::Pressure::new(&config)),
            config: Arc::new(config),
            stats: Arc::new(BatchStats::default()),
        }
    }

    /// Counters of all batches since the start.
    pub fn stats(&self) -> &BatchStats {
        &self.stats
    }

    /// The limits that it was made with.
    pub fn config(&self) -> &BatchConfig {
        &self.config
    }

    /// Executes one request. Returns when the first bytes of the answer are there, so that a
    /// failure before them is an error here.
    ///
    /// # Errors
    /// `Invalid` with the place in the request; `BucketNotFound`; `Busy` if the memory budget is
    /// used up; without continue-on-error, the first entry's error if it is known before the first
    /// byte; past the limit of soft errors, `Invalid` with their count.
    pub async fn run(
        &self,
        default_bucket: Option<&str>,
        body: Bytes,
        options: RunOptions,
    ) -> Result<Answered> {
        let result = self.run_uncounted(default_bucket, body, options).await;
        match &result {
            Ok(Answered::Here(_)) => {}
            Ok(Answered::Elsewhere(_)) => {
                self.stats.redirected.fetch_add(1, Relaxed);
            }
            Err(e) if e.kind() == ErrorKind::Busy => {
                self.stats.refused.fetch_add(1, Relaxed);
                self.stats.errors_hard.fetch_add(1, Relaxed);
            }
            Err(_) => {
                self.stats.errors_hard.fetch_add(1, Relaxed);
            }
        }
        result
    }

    /// The request, which of its entries may not be read, and who else is to answer it. A long one
    /// is parsed on a thread for slow work.
    async fn parse(
        &self,
        body: Bytes,
        default_bucket: Option<&str>,
        options: &RunOptions,
    ) -> Result<(BatchRequest, Denied, Option<String>)> {
        let short = body.len() < PARSED_HERE_BYTES;
        let (bucket, coloc) = (default_bucket.map(str::to_owned), options.coloc.clone());
        let (may_read, most) = (options.may_read.clone(), self.config.max_entries);
        let elsewhere = options.elsewhere.clone();
        let parse = move || {
            let request = BatchRequest::parse(&body, bucket.as_deref(), coloc.as_deref(), most)?;
            let denied = denied(&request, may_read.as_ref())?;
            let elsewhere = elsewhere.filter(|_| request.colocated);
            let elsewhere = elsewhere.and_then(|e| e.of(&request, &denied));
            Ok((request, denied, elsewhere))
        };
        if short {
            return parse();
        }
        tokio::task::spawn_blocking(parse)
            .await
            .map_err(|e| Error::internal("the request could not be parsed").caused_by(e))?
    }

    async fn run_uncounted(
        &self,
        default_bucket: Option<&str>,
        body: Bytes,
        options: RunOptions,
    ) -> Result<Answered> {
        if body.len() > self.config.max_body_bytes {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!(
                    "the request is {} bytes, more than batch.max_body = {}",
                    body.len(),
                    self.config.max_body_bytes
                ),
            ));
        }
        let held = self.reserve_for(&body)?;
        let parsed = self.parse(body.clone(), default_bucket, &options).await?;
        let (request, denied, elsewhere) = parsed;
        self.check_buckets(&request, &denied).await?;
        if let Some(url) = elsewhere {
            return Ok(Answered::Elsewhere(url));
        }

        let reservation = self
            .engine
            .budget()
            .try_hold(self.config.window_bytes())
            .map_err(|e| e.context("the batch was refused before it began"))?;
        self.stats.in_flight.fetch_add(1, Relaxed);
        let work = Arc::new(produce::Work {
            batcher: self.clone(),
            request,
            denied,
            options,
            began: Instant::now(),
            brought: Default::default(),
            _in_flight: InFlight(self.stats.clone()),
            _window: reservation,
            _request: held,
        });
        if work.request.streaming {
            self.stream(work, None).await.map(Answered::Here)
        } else {
            let (parts, planned) = multipart::plan(&work, &body).await?;
            let mut answer = self.stream(work, Some(planned)).await?;
            let (before, after) = (parts.before.clone(), parts.after.clone());
            answer.content_length = answer
                .content_length
                .map(|n| n + (before.len() + after.len()) as u64);
            answer.content_type = parts.content_type;
            let close = stream::iter([Ok(after)]);
            answer.body = stream::iter([Ok(before)])
                .chain(answer.body)
                .chain(close)
                .boxed();
            answer.body = until_error(answer.body);
            Ok(Answered::Here(answer))
        }
    }

    /// Memory for a parsed large request. Each entry in it begins with a brace.
    fn reserve_for(&self, body: &[u8]) -> Result<Option<Reservation>> {
        if body.len() < LARGE_REQUEST_BYTES {
            return Ok(None);
        }
        let entries = body
            .iter()
            .filter(|b| **b == b'{')
            .count()
            .min(self.config.max_entries) as u64;
        let reserved = self
            .engine
            .budget()
            .try_hold(entries * ENTRY_BYTES + body.len() as u64);
        reserved
            .map(Some)
            .map_err(|e| e.context("the batch was refused before it was parsed"))
    }

    /// An unknown bucket is an error before any data, whatever `coer` says. For denied entries, the
    /// answer does not say whether the bucket exists.
    async fn check_buckets(&self, request: &BatchRequest, denied: &Denied) -> Result<()> {
        let (mut seen, mut last) = (HashSet::new(), "");
        for (index, entry) in request.entries.iter().enumerate() {
            if denied.contains_key(&index) {
                continue;
            }
            let bucket = entry.name.bucket();
            if bucket != last && seen.insert(bucket) {
                self.engine.buckets().origin(bucket).await.map_err(|e| {
                    let provider = match &*entry.provider {
                        "" => "ais",
                        named => named,
                    };
                    // AIStore's clients look for these words, and for the place before them.
                    let e = match e.kind() {
                        ErrorKind::BucketNotFound => e.context("the bucket does not exist"),
                        _ => e,
                    };
                    let place = format!("{provider}://{bucket}");
                    e.context(&place).about(place)
                })?;
            }
            last = bucket;
        }
        Ok(())
    }

    async fn stream(
        &self,
        work: Arc<produce::Work>,
        planned: Option<multipart::Planned>,
    ) -> Result<BatchAnswer> {
        let content_type = work.request.format.content_type().to_owned();
        let content_length = planned.as_ref().and_then(|p| p.archive_bytes);
        let mut frames = produce::Frames::new(work, planned);
        // The first frame decides between an HTTP error and a body.
        let first = match frames.next().await {
            Some(Ok(frame)) => frame,
            Some(Err(e)) => return Err(e),
            None => return Err(Error::internal("the batch ended without a byte")),
        };
        let stats = self.stats.clone();
        let rest = frames.inspect(move |frame| {
            if frame.is_err() {
                stats.errors_hard.fetch_add(1, Relaxed);
                stats.cut.fetch_add(1, Relaxed);
            }
        });
        let body = until_error(stream::iter([Ok(first)]).chain(rest).boxed());
        Ok(BatchAnswer {
            content_type,
            content_length,
            body,
        })
    }
}

/// Entries that their sender may not read, and why.
pub(crate) type Denied = HashMap<usize, Error>;

/// # Errors
/// The first denied entry, unless denied entries may become placeholders.
fn denied(request: &BatchRequest, may_read: Option<&MayRead>) -> Result<Denied> {
    let mut denied = Denied::new();
    let Some(MayRead(check)) = may_read else {
        return Ok(denied);
    };
    for (index, entry) in request.entries.iter().enumerate() {
        match check(&entry.name) {
            Ok(()) => {}
            Err(e) if request.continue_on_error => {
                denied.insert(index, e);
            }
            Err(e) => return Err(entry.at(index, e)),
        }
    }
    Ok(denied)
}

/// Ends a stream after its first error: nothing that follows a cut may reach the client.
fn until_error(body: ByteStream) -> ByteStream {
    body.scan(false, |failed, piece| {
        let go_on = !*failed;
        *failed = piece.is_err();
        std::future::ready(go_on.then_some(piece))
    })
    .boxed()
}

/// Counts a batch as in flight until dropped.
struct InFlight(Arc<BatchStats>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}
