//! Writing: through to the origin, and forgotten here before the call returns.
//!
//! Nothing that is written is kept: the next read asks the origin and learns the version from it.
//! Because the name is forgotten after the origin has acknowledged, and fills that began earlier
//! may no longer publish (`generation.rs`), a read that begins after a write returned sees that
//! write or a later one. A write that failed may have happened all the same: it forgets the name
//! too. So does one whose client has left: each write runs in its own task, to its end
//! ([`Engine::close`] waits for them), because the origin may have carried it out although nobody
//! waits for it any more.
//!
//! A body is taken from its client only after the memory that it may need on its way is reserved.
//! That grows with what has come (`WriteMemory`), so that clients that announce much and send
//! little hold little.

use crate::{Conditions, Engine, ReadOptions, bytesio::blocking, stats::add};
use forebay_core::{
    Error, ErrorKind, MemoryBudget, ObjectMeta, ObjectName, Reservation, Result, limits, request,
    sync::Mutex,
};
use forebay_origin::{
    ByteStream, Origin, PartsPage, PutCondition, PutRequest, PutResponse, UploadedPart,
};
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use hashbrown::HashMap;
use std::{
    future::Future,
    panic::AssertUnwindSafe,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
};

/// What a write holds before its first byte.
const FIRST_BYTES: u64 = 1 << 20;
/// A write holds so much more than has come of its body before it asks for the next piece.
const AHEAD_BYTES: u64 = 256 << 10;
/// So long, a write waits for memory that others use before what nobody uses has to give way.
const PATIENCE: Duration = Duration::from_secs(1);
/// If less than this may be held, each write holds all that it may need from the start.
const GROWS_FROM_BYTES: u64 = 4 * limits::WRITE_BUFFER_MAX_BYTES;

/// Who keeps memory of the budget that nobody uses.
pub trait GiveWay: Send + Sync {
    /// Gives back what is missing for this many bytes, as far as it is kept here.
    fn give_way(&self, bytes: u64);
}

/// Writes under way, and the names that they write.
pub(crate) struct Writes {
    places: Arc<Semaphore>,
    names: Mutex<HashMap<ObjectName, usize>>,
    /// What writes that may ask for more hold together: a quarter of what may be held.
    growing: MemoryBudget,
    /// What writes hold together beyond [`FIRST_BYTES`] each: half of what may be held, or three
    /// quarters where that is little. They wait for each other here, because whoever waits at the
    /// budget itself is given all that comes free: then nobody could read, and some who write send
    /// what they read meanwhile.
    all: MemoryBudget,
    keepers: Mutex<Vec<Weak<dyn GiveWay>>>,
}

impl Writes {
    pub(crate) fn new(budget: &MemoryBudget) -> Self {
        let holdable = budget.holdable_bytes();
        let all = match holdable >= GROWS_FROM_BYTES {
            true => holdable / 2,
            false => holdable / 4 * 3,
        };
        Self {
            places: Arc::new(Semaphore::new(limits::WRITES_IN_FLIGHT_MAX)),
            names: Mutex::default(),
            growing: MemoryBudget::with_holdable(holdable / 4),
            all: MemoryBudget::with_holdable(all),
            keepers: Mutex::default(),
        }
    }
}

/// The memory of one write: twice what has come of its body, up to all that the write can need.
///
/// A write that finds no room to grow waits until it has all of that at once, and then asks for no
/// more. Such writes end without waiting for others, and those that still grow never hold more than
/// a quarter of what may be held, beside which one more fits into what all writes may, as none grows
/// where less than [`GROWS_FROM_BYTES`] may be held. So writes do not wait for each other in a
/// circle, nor do those who have to read before they send more wait for writes.
struct WriteMemory {
    engine: Engine,
    most_bytes: u64,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    bytes: u64,
    memory: Vec<Reservation>,
    /// Of `Writes::growing`; empty once the write holds all that it can need.
    shares: Vec<Reservation>,
}

impl WriteMemory {
    /// Holds enough for this many bytes of the body.
    async fn grow(&self, to_bytes: u64) -> Result<()> {
        let (budget, writes) = (&self.engine.inner.budget, &self.engine.inner.writes);
        let to_bytes = to_bytes.min(self.most_bytes);
        let has = self.held.lock().bytes;
        if has >= to_bytes {
            return Ok(());
        }
        let more = to_bytes.max(2 * has).min(self.most_bytes) - has;
        if let Ok(share) = writes.growing.try_hold(more)
            && let Ok(part) = writes.all.try_hold(more)
            && let Ok(memory) = budget.try_hold(more)
        {
            let mut held = self.held.lock();
            held.bytes += more;
            held.memory.extend([part, memory]);
            held.shares.push(share);
            if held.bytes == self.most_bytes {
                held.shares.clear();
            }
            return Ok(());
        }
        let rest = self.engine.write_buffer(self.most_bytes - has).await;
        let rest = rest.map_err(|e| e.context("the write was broken off"))?;
        let mut held = self.held.lock();
        held.bytes = self.most_bytes;
        held.memory.extend(rest);
        held.shares.clear();
        Ok(())
    }

    /// The body, which asks its sender for a piece only after there is memory for it. The memory is
    /// given back when both the body and `self` are dropped.
    fn of(self: &Arc<Self>, body: ByteStream) -> ByteStream {
        let memory = self.clone();
        stream::try_unfold(
            (memory, body, 0u64),
            |(memory, mut body, passed)| async move {
                memory.grow(passed + AHEAD_BYTES).await?;
                let Some(piece) = body.try_next().await? else {
                    return Ok(None);
                };
                let passed = passed + piece.len() as u64;
                Ok(Some((piece, (memory, body, passed))))
            },
        )
        .boxed()
    }
}

/// One write under way.
struct Writing {
    engine: Engine,
    name: ObjectName,
    _place: OwnedSemaphorePermit,
}

impl Drop for Writing {
    fn drop(&mut self) {
        let mut names = self.engine.inner.writes.names.lock();
        if let Some(n) = names.get_mut(&self.name) {
            *n -= 1;
            if *n == 0 {
                names.remove(&self.name);
            }
        }
    }
}

/// An upload of which nobody has the id yet. If that stays so, it is aborted: also if its caller
/// leaves when the id is there, and before it looks.
struct Begun {
    origin: Arc<dyn Origin>,
    name: ObjectName,
    id: Option<String>,
}

impl Begun {
    fn taken(mut self) -> String {
        self.id.take().unwrap_or_default()
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let Some(id) = self.id.take() else {
            return;
        };
        // Without a runtime the program is ending, and nothing can be sent.
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let (origin, name) = (self.origin.clone(), self.name.clone());
        runtime.spawn(async move {
            if let Err(e) = origin.abort_upload(name.key(), &id).await {
                tracing::warn!(object = %name, error = %e.describe(), "an upload that nobody \
                    waits for could not be aborted");
            }
        });
    }
}

fn changed(source: &ObjectName) -> Error {
    Error::version_changed(format!("{source}: the source of a copy changed meanwhile"))
        .hint("copy it again")
}

fn refused(e: Error) -> Error {
    e.context("the write was refused before it started")
}

fn closing() -> Error {
    Error::new(ErrorKind::ShuttingDown, "the node is stopping")
}

impl Engine {
    /// Writes one object. `size` is the length of `body`, if known.
    ///
    /// # Errors
    /// `PreconditionFailed` if `request.condition` does not hold, or what the origin said.
    pub async fn put(
        &self,
        name: &ObjectName,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        self.inner.buckets.may_write()?;
        let origin = self.inner.buckets.origin(name.bucket()).await?;
        let memory = self.write_memory(origin.put_memory_bytes(size)).await?;
        let (engine, key) = (self.clone(), name.key().to_owned());
        self.to_its_end(name, async move {
            let (body, written) = counted(memory.of(body));
            let response = origin.put(&key, request, size, body).await?;
            engine.count_write(written.load(Relaxed));
            Ok(response)
        })
        .await
    }

    /// Runs a write of `name` in its own task and forgets the name when it has ended, however it
    /// ended. The caller may leave at any moment.
    pub(crate) async fn to_its_end<T: Send + 'static>(
        &self,
        name: &ObjectName,
        write: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        self.inner.buckets.may_write()?;
        let writes = &self.inner.writes;
        let place = writes.places.clone().acquire_owned().await;
        let place = place.map_err(|_| closing())?;
        // Writes may have been forbidden while this one waited for its place.
        self.inner.buckets.may_write()?;
        let writing = Writing {
            engine: self.clone(),
            name: name.clone(),
            _place: place,
        };
        *writes.names.lock().entry(name.clone()).or_default() += 1;
        let task = request::spawn(async move {
            let result = AssertUnwindSafe(write).catch_unwind().await;
            let result = result.unwrap_or_else(|_| {
                Err(Error::internal(format!(
                    "the write of {} ended in a panic",
                    writing.name
                )))
            });
            // The others first: what this node asks them from now on, they ask the bucket.
            let buckets = &writing.engine.inner.buckets;
            let (told, announced) = buckets.written(&writing.name, result.is_ok()).await;
            writing.engine.forget(&writing.name, None).await;
            // Until then, what others ask this node is the old version.
            announced.over();
            result.and_then(|done| told.map(|()| done))
        });
        task.await
            .unwrap_or_else(|e| Err(Error::internal("a write was broken off").caused_by(e)))
    }

    /// Waits for the writes that are under way, at most for `patience`. New writes wait meanwhile, and
    /// then until the caller drops what this returns. `None`: some writes are still under way, and new
    /// ones do not wait any more.
    pub async fn pause_writes(&self, patience: Duration) -> Option<OwnedSemaphorePermit> {
        let places = self.inner.writes.places.clone();
        let all = places.acquire_many_owned(limits::WRITES_IN_FLIGHT_MAX as u32);
        tokio::time::timeout(patience, all).await.ok()?.ok()
    }

    /// Begins no more writes, waits for those under way for as long as `patience`, and closes the
    /// store. Names still being written by then are forgotten first: the writes may yet happen.
    ///
    /// # Errors
    /// What kept the store from closing.
    pub async fn close(&self, patience: Duration) -> Result<()> {
        let places = &self.inner.writes.places;
        let all = places.acquire_many(limits::WRITES_IN_FLIGHT_MAX as u32);
        let ended = tokio::time::timeout(patience, all).await;
        places.close();
        drop(ended);
        let engine = self.clone();
        blocking(move || {
            let left: Vec<_> = engine.inner.writes.names.lock().keys().cloned().collect();
            for name in left {
                tracing::warn!(object = %name, "a write was still under way at the end");
                engine.forget_waiting(&name, None);
            }
            let Some(store) = &engine.inner.store else {
                return Ok(());
            };
            let closed = store.close();
            // Who advises it in a cluster holds it: it would be there, and locked, for ever.
            store.set_advisor(None);
            closed
        })
        .await?
    }

    /// Removes an object; it is not an error if it does not exist.
    pub async fn delete(&self, name: &ObjectName) -> Result<()> {
        let origin = self.inner.buckets.origin(name.bucket()).await?;
        let (engine, key) = (self.clone(), name.key().to_owned());
        self.to_its_end(name, async move {
            origin.delete(&key).await?;
            add(&engine.stats().deletes, 1);
            Ok(())
        })
        .await
    }

    /// Copies an object, at the origin if that can, otherwise by reading and writing.
    /// `request.attributes` are those of the copy. What is copied is what the source's origin has
    /// now; if `version` is given, that version of the source and no other.
    ///
    /// # Errors
    /// `PreconditionFailed` if `request.condition` does not hold; that or `VersionChanged` if the
    /// source has another version.
    pub async fn copy(
        &self,
        from: &ObjectName,
        version: Option<&ObjectMeta>,
        to: &ObjectName,
        request: PutRequest,
    ) -> Result<PutResponse> {
        // A weak ETag matches nothing: as where there is none, the version is compared here.
        let if_match = version
            .and_then(|v| v.etag.as_deref())
            .filter(|etag| !etag.starts_with("W/"));
        let (source, target) = (
            self.inner.buckets.origin(from.bucket()).await?,
            self.inner.buckets.origin(to.bucket()).await?,
        );
        if from.bucket() == to.bucket() {
            let now = source.head(from.key()).await?;
            if if_match.is_none() && version.is_some_and(|v| v.version() != now.version()) {
                return Err(changed(from));
            }
            if now.attributes == request.attributes {
                let (engine, from, key) = (self.clone(), from.clone(), to.key().to_owned());
                let (if_match, request) = (if_match.map(str::to_owned), request.clone());
                let done = self.to_its_end(to, async move {
                    let copied = source.copy(from.key(), if_match.as_deref(), &key, request);
                    let response = copied.await?;
                    add(&engine.stats().writes, 1);
                    Ok(response)
                });
                match done.await {
                    Err(e) if e.kind() == ErrorKind::Unsupported => {}
                    done => return done,
                }
            }
        }
        let most_bytes = match version {
            Some(v) => target.put_memory_bytes(Some(v.size)),
            None => limits::WRITE_BUFFER_MAX_BYTES,
        };
        // Reserved before the read, because others may wait for the read's memory.
        let most_bytes = most_bytes.min(self.inner.writes.all.holdable_bytes());
        let buffer = self.write_buffer(most_bytes).await.map_err(refused)?;
        let read = self.read(from, None, &current(if_match)).await?;
        // If the origin gives no strong ETag, this comparison is what finds another version.
        if version.is_some_and(|v| v.version() != read.meta.version()) {
            return Err(changed(from));
        }
        let (engine, key) = (self.clone(), to.key().to_owned());
        self.to_its_end(to, async move {
            let _buffer = buffer;
            let size = read.meta.size;
            let (body, written) = counted(read.body);
            let response = target.put(&key, request, Some(size), body).await?;
            engine.count_write(written.load(Relaxed));
            Ok(response)
        })
        .await
    }

    /// Begins a multipart upload at the origin and returns the origin's id for it. If the caller
    /// leaves before it has the id, the upload is aborted: nobody else could do that.
    pub async fn create_upload(&self, name: &ObjectName, request: PutRequest) -> Result<String> {
        let origin = self.inner.buckets.origin(name.bucket()).await?;
        let name = name.clone();
        let beginning = request::spawn(async move {
            let id = origin.create_upload(name.key(), request).await?;
            Ok::<_, Error>(Begun {
                origin,
                name,
                id: Some(id),
            })
        });
        let begun = beginning
            .await
            .map_err(|e| Error::internal("the upload was not started").caused_by(e))??;
        Ok(begun.taken())
    }

    /// Sends one part of a multipart upload through to the origin: `number` from 1 to 10,000,
    /// `size` the length of `body` in bytes. Nothing is forgotten: the object changes only when the
    /// upload is completed.
    ///
    /// # Errors
    /// `Invalid` for another number, and what kept the origin from taking the part.
    pub async fn upload_part(
        &self,
        name: &ObjectName,
        upload: &str,
        number: u32,
        size: u64,
        body: ByteStream,
    ) -> Result<UploadedPart> {
        if number == 0 || number as usize > limits::UPLOAD_PARTS_MAX {
            return Err(
                Error::invalid(format!("{name}: part number {number} is out of range"))
                    .hint("number parts from 1 to 10,000"),
            );
        }
        let origin = self.inner.buckets.origin(name.bucket()).await?;
        let memory = self.write_memory(origin.part_memory_bytes(size)).await?;
        let (body, written) = counted(memory.of(body));
        let part = origin
            .upload_part(name.key(), upload, number, size, body)
            .await?;
        add(&self.stats().bytes_written, written.load(Relaxed));
        Ok(part)
    }

    /// The parts that the origin has of a multipart upload, through whichever node they came: at most
    /// `max` of them, those after number `after`.
    ///
    /// # Errors
    /// `NotFound` if the origin does not know the upload, or has ended it; `Unsupported` if it cannot
    /// list parts.
    pub async fn list_parts(
        &self,
        name: &ObjectName,
        upload: &str,
        after: u32,
        max: usize,
    ) -> Result<PartsPage> {
        let origin = self.inner.buckets.origin(name.bucket()).await?;
        origin.list_parts(name.key(), upload, after, max).await
    }

    /// Makes the object from `parts`, as [`Engine::upload_part`] returned them, and forgets what
    /// was known about it. `condition` is what must hold then.
    ///
    /// # Errors
    /// `PreconditionFailed` if `condition` does not hold: the parts are still there. What else the
    /// origin says; the upload may have been completed all the same.
    pub async fn complete_upload(
        &self,
        name: &ObjectName,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        let origin = self.inner.buckets.origin(name.bucket()).await?;
        let (engine, key, upload) = (self.clone(), name.key().to_owned(), upload.to_owned());
        self.to_its_end(name, async move {
            let response = origin
                .complete_upload(&key, &upload, parts, condition)
                .await?;
            add(&engine.stats().writes, 1);
            Ok(response)
        })
        .await
    }

    /// Abandons a multipart upload and the parts that the origin holds for it.
    ///
    /// # Errors
    /// What the origin says.
    pub async fn abort_upload(&self, name: &ObjectName, upload: &str) -> Result<()> {
        self.inner
            .buckets
            .origin(name.bucket())
            .await?
            .abort_upload(name.key(), upload)
            .await
    }

    /// So much memory for a write, at once: of what all writes may hold, and of the budget. Small
    /// ones do not wait for large ones.
    async fn write_buffer(&self, bytes: u64) -> Result<Vec<Reservation>> {
        let mut held = Vec::with_capacity(2);
        if bytes > FIRST_BYTES {
            held.push(self.inner.writes.all.hold(bytes).await?);
        }
        let budget = &self.inner.budget;
        held.push(match budget.hold_within(bytes, PATIENCE).await {
            Err(e) if e.kind() == ErrorKind::Busy => {
                let keepers = self.inner.writes.keepers.lock().clone();
                let keepers = keepers.iter().filter_map(Weak::upgrade);
                keepers.for_each(|keeper| keeper.give_way(bytes));
                budget.hold(bytes).await?
            }
            held => held?,
        });
        Ok(held)
    }

    /// From now on, this gives way to writes that wait for memory.
    pub fn keeps_memory(&self, keeper: Weak<dyn GiveWay>) {
        let mut keepers = self.inner.writes.keepers.lock();
        keepers.retain(|keeper| keeper.strong_count() > 0);
        keepers.push(keeper);
    }

    /// The memory with which a write begins that can need `most_bytes` at a time.
    async fn write_memory(&self, most_bytes: u64) -> Result<Arc<WriteMemory>> {
        let most_bytes = most_bytes.min(self.inner.writes.all.holdable_bytes());
        let bytes = match self.inner.budget.holdable_bytes() >= GROWS_FROM_BYTES {
            true => most_bytes.min(FIRST_BYTES),
            false => most_bytes,
        };
        let mut shares = Vec::new();
        if bytes < most_bytes {
            let share = self.inner.writes.growing.hold(bytes).await;
            shares.push(share.map_err(refused)?);
        }
        let memory = self.write_buffer(bytes).await.map_err(refused)?;
        Ok(Arc::new(WriteMemory {
            engine: self.clone(),
            most_bytes,
            held: Mutex::new(Held {
                bytes,
                memory,
                shares,
            }),
        }))
    }

    fn count_write(&self, bytes: u64) {
        add(&self.stats().writes, 1);
        add(&self.stats().bytes_written, bytes);
    }
}

/// How the source of a copy is read: the origin says what the current version is, because the cached
/// one may be older.
fn current(if_match: Option<&str>) -> ReadOptions {
    ReadOptions {
        conditions: Conditions {
            if_match: if_match.map(str::to_owned),
            ..Conditions::default()
        },
        bypass: true,
        ..ReadOptions::default()
    }
}

/// The body, and how much of it has passed.
fn counted(body: ByteStream) -> (ByteStream, Arc<AtomicU64>) {
    let passed = Arc::new(AtomicU64::new(0));
    let counter = passed.clone();
    let body = body
        .inspect(move |piece| {
            if let Ok(bytes) = piece {
                counter.fetch_add(bytes.len() as u64, Relaxed);
            }
        })
        .boxed();
    (body, passed)
}
