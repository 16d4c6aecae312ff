//! Appending to objects: `PUT /v1/objects/BUCKET/NAME?append_type=append|flush`, as AIStore's
//! `as_file()` writes.
//!
//! The first append returns a handle, further ones name it, and a flush makes the object from all
//! of them. Until then nobody sees any of it. If the object already exists, the appends begin with
//! it: its bytes come first. As with PUTs, the last flush wins.
//!
//! Appended data is kept in memory, up to [`PART_BYTES`] for each handle. Whenever there is that
//! much, it becomes a part of an upload at the origin. The flush completes that upload, or puts the
//! object if it has no part.
//!
//! Invariants:
//! - an append counts as a whole or not at all: one whose body breaks off, or whose client leaves,
//!   changes nothing (the completion never names parts that it sent);
//! - a handle says how much was appended before it. An append that is sent twice, because its
//!   answer was lost, counts once; any other append under an old handle is an error;
//! - handles, their memory and their lifetime are bounded. Data that was not flushed in time is
//!   discarded with a line in the log, and the next request under its handle is an error;
//! - a flush runs to its end whether its client stays or leaves, and can be repeated.

use super::{
    Call, done,
    objects::{upload_stream, written},
};
use crate::{body::AnswerBody, config::Action};
use bytes::Bytes;
use forebay_core::{
    Error, ErrorKind, MemoryBudget, ObjectName, Reservation, Result, limits, name::shorten,
    sync::Mutex,
};
use forebay_engine::{
    ByteStream, Engine, PutCondition, PutRequest, PutResponse, ReadOptions, UploadedPart,
};
use futures::{StreamExt, stream};
use http::{HeaderValue, Response, StatusCode};
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};
use xxhash_rust::xxh3::Xxh3;

/// Appended bytes become a part at this size. S3 takes smaller ones only as the last part.
const PART_BYTES: usize = 8 << 20;
/// A handle takes memory from the budget in pieces of this size.
const RESERVED_BYTES: u64 = 256 << 10;
/// Handles that were not used for longer are given up.
const IDLE_MAX: Duration = Duration::from_secs(limits::APPEND_IDLE_SECS);
/// How often it is looked for handles that nobody uses any more.
const SWEEP_EVERY: Duration = Duration::from_secs(30);

/// All handles of this node.
pub struct Appends {
    engine: Engine,
    handles: Mutex<HashMap<u128, Arc<Handle>>>,
    /// Bytes of appended data in memory.
    bytes: Arc<AtomicU64>,
    sweeping: AtomicBool,
}

struct Handle {
    id: u128,
    name: ObjectName,
    /// By the steady clock.
    used_ms: AtomicI64,
    /// How many bytes were appended, for the log.
    appended: AtomicU64,
    /// A flush is running: a repeated one waits for its end.
    flushing: AtomicBool,
    state: Arc<AsyncMutex<State>>,
}

/// A new handle that its client was not told of yet. One that never is, is given up at once: nobody
/// can name it, and what it holds may be as much memory as an append holds.
struct Unanswered(Option<(Arc<Appends>, Arc<Handle>)>);

impl Unanswered {
    fn answered(mut self) {
        self.0 = None;
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        let Some((appends, handle)) = self.0.take() else {
            return;
        };
        // Should this be missed, the next sweep finds it.
        handle.used_ms.store(i64::MIN, Relaxed);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { appends.expire(IDLE_MAX).await });
        }
    }
}

/// What was appended under a handle.
#[derive(Default)]
struct State {
    /// The total number of bytes.
    length: u64,
    /// The upload at the origin, once there is a part.
    upload: Option<String>,
    parts: Vec<UploadedPart>,
    /// Numbers are not reused: a part of an append that was given up may arrive late.
    last_number: u32,
    /// Bytes that are in no part yet.
    tail: Vec<u8>,
    /// The tail as the last part, once a flush sent it. If that flush fails, a later one names it
    /// again; after another append it is none of the parts, because only the last may be short.
    last_part: Option<UploadedPart>,
    held: Held,
    last: Option<LastAppend>,
    flushed: Option<PutResponse>,
    /// The appended data was discarded.
    given_up: bool,
}

/// Memory for a tail.
#[derive(Default)]
struct Held {
    reservations: Vec<Reservation>,
    counted: Option<Arc<AtomicU64>>,
    bytes: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

impl Held {
    /// Gives back what is not needed for `bytes`.
    fn shrink_to(&mut self, bytes: u64) {
        let needed = bytes.div_ceil(RESERVED_BYTES) * RESERVED_BYTES;
        while self.bytes > needed {
            self.reservations.pop();
            self.bytes -= RESERVED_BYTES;
            if let Some(counted) = &self.counted {
                counted.fetch_sub(RESERVED_BYTES, Relaxed);
            }
        }
    }

    /// Takes memory for `bytes` in total. Appends may take a quarter of what may be held for long.
    /// They do not wait for memory: waiting for other tails would mean waiting for their clients.
    fn reserve(&mut self, bytes: u64, budget: &MemoryBudget, total: &Arc<AtomicU64>) -> Result<()> {
        while self.bytes < bytes {
            let used = total.fetch_add(RESERVED_BYTES, Relaxed) + RESERVED_BYTES;
            let taken = match used > budget.holdable_bytes() / 4 {
                true => Err(
                    Error::busy("appends hold all the memory that they may take")
                        .hint("flush objects that are complete, or raise memory.budget"),
                ),
                false => budget.try_hold(RESERVED_BYTES),
            };
            match taken {
                Ok(reservation) => self.reservations.push(reservation),
                Err(e) => {
                    total.fetch_sub(RESERVED_BYTES, Relaxed);
                    return Err(e.context("the append"));
                }
            }
            self.counted.get_or_insert_with(|| total.clone());
            self.bytes += RESERVED_BYTES;
        }
        Ok(())
    }
}

/// Identifies the last append, in case it is sent again because its answer was lost.
#[derive(Clone, Copy, PartialEq, Eq)]
struct LastAppend {
    at: u64,
    length: u64,
    hash: u128,
}

/// One append in progress. Unless [`Staged::keep`] is called, dropping it restores the handle as it
/// was.
struct Staged {
    state: OwnedMutexGuard<State>,
    length: u64,
    parts: usize,
    tail: usize,
    /// The tail as it was, once it was made into a part.
    cut: Option<Vec<u8>>,
    kept: bool,
}

impl Staged {
    fn of(state: OwnedMutexGuard<State>) -> Self {
        Staged {
            length: state.length,
            parts: state.parts.len(),
            tail: state.tail.len(),
            cut: None,
            kept: false,
            state,
        }
    }

    fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let cut = self.cut.take();
        let state = &mut *self.state;
        if !self.kept {
            state.length = self.length;
            state.parts.truncate(self.parts);
            match cut {
                Some(tail) => state.tail = tail,
                None => state.tail.truncate(self.tail),
            }
        }
        state.held.shrink_to(state.tail.len() as u64);
    }
}

/// A handle as clients see it: which one, and how much was appended before.
fn shown(id: u128, length: u64) -> String {
    format!("{id:032x}-{length:x}")
}

fn parse(handle: &str) -> Option<(u128, u64)> {
    let (id, length) = handle.split_once('-')?;
    Some((
        u128::from_str_radix(id, 16).ok()?,
        u64::from_str_radix(length, 16).ok()?,
    ))
}

impl Appends {
    pub fn new(engine: Engine) -> Self {
        Appends {
            engine,
            handles: Mutex::default(),
            bytes: Arc::default(),
            sweeping: AtomicBool::new(false),
        }
    }

    /// For how long ago a handle was used, by a clock that nobody sets.
    fn steady_ms(&self) -> i64 {
        self.engine.clock().steady_ms()
    }

    fn open(self: &Arc<Self>, name: &ObjectName) -> Result<Arc<Handle>> {
        let handle = Arc::new(Handle {
            id: rand::random(),
            name: name.clone(),
            used_ms: AtomicI64::new(self.steady_ms()),
            appended: AtomicU64::new(0),
            flushing: AtomicBool::new(false),
            state: Arc::default(),
        });
        {
            let mut handles = self.handles.lock();
            if handles.len() >= limits::APPENDS_MAX {
                // Flushed handles stay while there is room, so that a flush can be repeated.
                handles.retain(|_, h| {
                    let state = h.state.clone().try_lock_owned();
                    state.map_or(true, |state| state.flushed.is_none())
                });
            }
            if handles.len() >= limits::APPENDS_MAX {
                return Err(Error::busy(format!(
                    "{} objects are being appended to, the most that this node allows",
                    handles.len()
                ))
                .hint("flush those that are complete"));
            }
            handles.insert(handle.id, handle.clone());
        }
        if !self.sweeping.swap(true, Relaxed) {
            tokio::spawn(sweep(Arc::downgrade(self)));
        }
        Ok(handle)
    }

    fn get(&self, id: u128, name: &ObjectName) -> Result<Arc<Handle>> {
        let found = self.handles.lock().get(&id).cloned();
        let handle = found
            .filter(|h| h.name == *name)
            .ok_or_else(|| given_up(name))?;
        handle.used_ms.store(self.steady_ms(), Relaxed);
        Ok(handle)
    }

    /// Discards what was not used for longer than `idle`.
    async fn expire(&self, idle: Duration) {
        let before = self.steady_ms() - idle.as_millis() as i64;
        let old: Vec<Arc<Handle>> = {
            let mut handles = self.handles.lock();
            let is_old = |h: &Arc<Handle>| {
                h.used_ms.load(Relaxed) <= before && h.state.clone().try_lock_owned().is_ok()
            };
            let ids: Vec<u128> = handles
                .values()
                .filter(|h| is_old(h))
                .map(|h| h.id)
                .collect();
            ids.iter().filter_map(|id| handles.remove(id)).collect()
        };
        for handle in old {
            let mut state = handle.state.clone().lock_owned().await;
            if state.flushed.is_some() {
                continue;
            }
            state.given_up = true;
            tracing::warn!(
                object = %handle.name,
                bytes = handle.appended.load(Relaxed),
                "bytes that were appended and never flushed are discarded",
            );
            if let Some(upload) = state.upload.take()
                && let Err(e) = self.engine.abort_upload(&handle.name, &upload).await
            {
                tracing::warn!(object = %handle.name, error = %e.describe(), "its parts could not \
                    be removed at the origin");
            }
        }
    }

    /// Discards everything, because the node stops.
    pub async fn close(&self) {
        self.expire(Duration::ZERO).await;
    }

    /// Appends a body at byte `at` of the object; `None`: at its end.
    async fn append(&self, handle: &Handle, at: Option<u64>, mut body: ByteStream) -> Result<u64> {
        let state = handle.state.clone().try_lock_owned().map_err(|_| {
            Error::new(
                ErrorKind::Conflict,
                format!(
                    "{}: another append under this handle is under way",
                    handle.name
                ),
            )
        })?;
        if state.flushed.is_some() {
            return Err(flushed_already(handle));
        }
        if state.given_up {
            return Err(given_up(&handle.name));
        }
        let mut hash = Xxh3::new();
        if let Some(at) = at.filter(|at| *at != state.length) {
            // The answer to this append may have been lost.
            let mut length = 0;
            while let Some(piece) = body.next().await {
                let piece = piece?;
                length += piece.len() as u64;
                hash.update(&piece);
            }
            let again = LastAppend {
                at,
                length,
                hash: hash.digest128(),
            };
            if state.last == Some(again) {
                return Ok(state.length);
            }
            return Err(Error::new(
                ErrorKind::Conflict,
                format!(
                    "{}: the append_handle is for byte {at}, but the append is at byte {}",
                    handle.name, state.length
                ),
            )
            .hint("send each append with the handle from the answer to the previous one"));
        }
        let mut staged = Staged::of(state);
        while let Some(piece) = body.next().await {
            let piece = piece?;
            // A flush mostly comes without bytes: a repeated one names the same parts.
            if !piece.is_empty() {
                staged.state.last_part = None;
            }
            hash.update(&piece);
            self.take(handle, &mut staged, piece).await?;
        }
        let length = staged.state.length;
        staged.state.last = Some(LastAppend {
            at: staged.length,
            length: length - staged.length,
            hash: hash.digest128(),
        });
        handle.appended.store(length, Relaxed);
        handle.used_ms.store(self.steady_ms(), Relaxed);
        staged.keep();
        Ok(length)
    }

    async fn take(&self, handle: &Handle, staged: &mut Staged, mut piece: Bytes) -> Result<()> {
        while !piece.is_empty() {
            let state = &mut *staged.state;
            let room = PART_BYTES - state.tail.len();
            let now = piece.split_to(piece.len().min(room));
            let copied = staged.cut.as_ref().map_or(staged.tail, Vec::len);
            let wanted = (state.tail.len() + now.len() + copied) as u64;
            state
                .held
                .reserve(wanted, self.engine.budget(), &self.bytes)?;
            state.tail.extend_from_slice(&now);
            state.length += now.len() as u64;
            if state.tail.len() == PART_BYTES {
                if staged.cut.is_none() {
                    staged.cut = Some(staged.state.tail[..staged.tail].to_vec());
                }
                self.upload_tail(handle, &mut staged.state).await?;
            }
        }
        Ok(())
    }

    /// Uploads the tail as a part.
    async fn upload_tail(&self, handle: &Handle, state: &mut State) -> Result<()> {
        let number = state.last_number + 1;
        if number as usize > limits::UPLOAD_PARTS_MAX {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!(
                    "{}: more than {} bytes were appended",
                    handle.name,
                    limits::UPLOAD_PARTS_MAX * PART_BYTES
                ),
            )
            .hint("write it with one PUT, or upload it in parts"));
        }
        let upload = match &state.upload {
            Some(upload) => upload.clone(),
            None => {
                let made = self
                    .engine
                    .create_upload(&handle.name, PutRequest::default())
                    .await?;
                state.upload = Some(made.clone());
                made
            }
        };
        state.last_number = number;
        let tail = Bytes::from(std::mem::take(&mut state.tail));
        let size = tail.len() as u64;
        let body = stream::iter([Ok(tail)]).boxed();
        let part = self
            .engine
            .upload_part(&handle.name, &upload, number, size, body)
            .await?;
        state.parts.push(part);
        Ok(())
    }

    /// Makes the object from what was appended.
    async fn flush(self: Arc<Self>, handle: Arc<Handle>) -> Result<PutResponse> {
        struct Flushing<'a>(&'a Handle);
        impl Drop for Flushing<'_> {
            fn drop(&mut self) {
                self.0.flushing.store(false, Relaxed);
            }
        }
        let mut state = handle.state.clone().lock_owned().await;
        if let Some(done) = &state.flushed {
            return Ok(done.clone());
        }
        if state.given_up {
            return Err(given_up(&handle.name));
        }
        handle.flushing.store(true, Relaxed);
        let _flushing = Flushing(&handle);
        let put = if state.upload.is_none() {
            // Cheap to clone: a flush that fails can be repeated.
            let tail = Bytes::from(std::mem::take(&mut state.tail));
            let body = stream::iter([Ok(tail.clone())]).boxed();
            let size = Some(tail.len() as u64);
            let put = self
                .engine
                .put(&handle.name, PutRequest::default(), size, body)
                .await;
            state.tail = tail.into();
            put?
        } else {
            if !state.tail.is_empty() && state.last_part.is_none() {
                let tail = state.tail.clone();
                let sent = self.upload_tail(&handle, &mut state).await;
                state.tail = tail;
                sent?;
                state.last_part = state.parts.pop();
            }
            let upload = state.upload.clone().unwrap_or_default();
            let parts = state.parts.iter().chain(&state.last_part);
            let parts = parts.cloned().collect();
            self.engine
                .complete_upload(&handle.name, &upload, parts, PutCondition::Always)
                .await?
        };
        state.flushed = Some(put.clone());
        (state.upload, state.parts, state.tail) = (None, Vec::new(), Vec::new());
        state.last_part = None;
        state.held.shrink_to(0);
        Ok(put)
    }
}

fn given_up(name: &ObjectName) -> Error {
    Error::new(
        ErrorKind::NotFound,
        format!("the append_handle does not belong to {name}"),
    )
    .hint(format!(
        "it was not used for {} minutes, or the node was restarted: nothing was written; start \
         again without a handle",
        limits::APPEND_IDLE_SECS / 60
    ))
}

fn flushed_already(handle: &Handle) -> Error {
    Error::new(
        ErrorKind::Conflict,
        format!("{}: this append_handle was flushed already", handle.name),
    )
    .hint("start again without a handle")
}

/// Looks for old handles until no handles are left.
async fn sweep(appends: std::sync::Weak<Appends>) {
    loop {
        tokio::time::sleep(SWEEP_EVERY).await;
        let Some(appends) = appends.upgrade() else {
            return;
        };
        appends.expire(IDLE_MAX).await;
        let handles = appends.handles.lock();
        if handles.is_empty() {
            // Set under the lock, so that whoever opens the next handle sees it.
            appends.sweeping.store(false, Relaxed);
            return;
        }
    }
}

/// `PUT` with `append_type`. The sender is allowed to write the object.
pub async fn append(call: &Call, name: &ObjectName, what: &str) -> Result<Response<AnswerBody>> {
    let appends = &call.app.appends;
    let given = call.query("append_handle").filter(|h| !h.is_empty());
    let (body, _) = upload_stream(call)?;
    let mut unanswered = Unanswered(None);
    let (handle, at) = match given {
        Some(given) => {
            let (id, at) = parse(given).ok_or_else(|| {
                Error::invalid(format!(
                    "the append_handle {:?} is not valid",
                    shorten(given)
                ))
            })?;
            (appends.get(id, name)?, Some(at))
        }
        None if what == "flush" => {
            return Err(Error::invalid(
                "append_handle is missing: there is nothing to flush",
            ));
        }
        None => {
            let (handle, begun) = begin(call, appends, name).await?;
            unanswered = begun;
            (handle, None)
        }
    };
    match what {
        "append" => {
            let length = appends.append(&handle, at, body).await?;
            unanswered.answered();
            let mut response = done(StatusCode::OK);
            if let Ok(value) = HeaderValue::from_str(&shown(handle.id, length)) {
                response.headers_mut().insert("ais-append-handle", value);
            }
            Ok(response)
        }
        "flush" => {
            let state = match handle.flushing.load(Relaxed) {
                true => Some(handle.state.clone().lock_owned().await),
                false => handle.state.clone().try_lock_owned().ok(),
            };
            let flushed = state.is_some_and(|state| state.flushed.is_some());
            if !flushed {
                appends.append(&handle, at, body).await?;
            }
            let flushing = tokio::spawn(appends.clone().flush(handle));
            let put = flushing
                .await
                .map_err(|e| Error::internal("a flush was broken off").caused_by(e))??;
            Ok(written(&put))
        }
        other => Err(
            Error::invalid(format!("the append_type {:?} is not known", shorten(other)))
                .hint("use append or flush"),
        ),
    }
}

/// A new handle that begins with the object as it is now. Its length reveals that object's, so the
/// sender must be allowed to read it.
async fn begin(
    call: &Call,
    appends: &Arc<Appends>,
    name: &ObjectName,
) -> Result<(Arc<Handle>, Unanswered)> {
    call.permit(Action::Read, name.bucket(), name.key())?;
    let latest = ReadOptions {
        latest: true,
        ..ReadOptions::default()
    };
    let engine = &call.app.engine;
    let there = match engine.read(name, None, &latest).await {
        Ok(read) => Some(read),
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        Err(e) => return Err(e),
    };
    let handle = appends.open(name)?;
    let unanswered = Unanswered(Some((appends.clone(), handle.clone())));
    if let Some(there) = there.filter(|t| t.meta.size > 0) {
        appends
            .append(&handle, None, there.body)
            .await
            .map_err(|e| e.context("the object that is appended to"))?;
    }
    Ok((handle, unanswered))
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_engine::Freshness;
    use forebay_testing::engine::{Bench, NOW, name};
    use std::sync::atomic::Ordering::SeqCst;

    #[test]
    fn handles_say_which_and_where() {
        assert_eq!(parse(&shown(7, 300)), Some((7, 300)));
        for bad in ["", "-", "x-1", "1"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[tokio::test]
    async fn a_clock_that_is_set_forward_gives_up_no_append() {
        let b = Bench::with(Freshness::Immutable, None, 256 << 20);
        let appends = Arc::new(Appends::new(b.engine.clone()));
        let handle = appends.open(&name("k")).unwrap();
        b.clock.set(NOW + 10 * IDLE_MAX);
        appends.expire(IDLE_MAX).await;
        assert!(appends.get(handle.id, &name("k")).is_ok());
        // Time that passes counts, wherever the clock was set to.
        b.clock.set(NOW);
        b.clock.advance(IDLE_MAX + Duration::from_secs(1));
        appends.expire(IDLE_MAX).await;
        let gone = appends.get(handle.id, &name("k")).err();
        assert_eq!(gone.map(|e| e.kind()), Some(ErrorKind::NotFound));
    }

    /// The origin refuses to complete an upload with a short part that is not the last.
    #[tokio::test]
    async fn appends_after_a_flush_that_failed_leave_no_short_part_in_the_middle() {
        let b = Bench::with(Freshness::Immutable, None, 256 << 20);
        let appends = Arc::new(Appends::new(b.engine.clone()));
        let handle = appends.open(&name("k")).unwrap();
        let body = |bytes: &[u8]| stream::iter([Ok(Bytes::copy_from_slice(bytes))]).boxed();
        let (first, short, rest) = (vec![1; PART_BYTES], vec![2; 1000], vec![3; PART_BYTES]);
        for piece in [&first, &short] {
            appends.append(&handle, None, body(piece)).await.unwrap();
        }
        let upload = handle.state.lock().await.upload.clone().unwrap();
        // The completion fails, as if the upload were unknown for a moment.
        b.origin.complete_fails.store(1, SeqCst);
        let failed = Arc::clone(&appends).flush(handle.clone()).await;
        assert!(failed.is_err());
        // The same again is asked for with the same parts; its request appends no bytes.
        let length = (PART_BYTES + short.len()) as u64;
        let nothing = appends.append(&handle, Some(length), body(&[])).await;
        assert_eq!(nothing.unwrap(), length);
        b.origin.complete_fails.store(1, SeqCst);
        let failed = Arc::clone(&appends).flush(handle.clone()).await;
        assert!(failed.is_err());
        assert_eq!(b.origin.uploads.lock()[&upload].len(), 2);
        appends.append(&handle, None, body(&rest)).await.unwrap();
        {
            let state = handle.state.lock().await;
            let sizes: Vec<_> = state.parts.iter().map(|p| p.size).collect();
            assert_eq!(sizes, [Some(PART_BYTES as u64); 2]);
        }
        Arc::clone(&appends).flush(handle.clone()).await.unwrap();
        let stored = b.origin.objects.lock()["k"].0.clone();
        assert!(stored == [first, short, rest].concat());
    }
}
