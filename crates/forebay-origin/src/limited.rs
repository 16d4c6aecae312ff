//! Limits the requests in flight and the bytes per second to one origin; first come, first served.
//!
//! Nobody waits for a place for longer than [`limits::ORIGIN_PLACE_WAIT_MAX_SECS`]; then the node
//! is `Busy`. A request holds its place until its body is finished or dropped. Writes have their
//! own places (a quarter), because a copy through this node reads and writes at the same time: if
//! reads could take every place, copies would wait for each other forever.

use crate::{
    ByteStream, ForwardBody, ForwardRequest, ForwardResponse, GetRequest, GetResponse, ListPage,
    ListRequest, Origin, PartsPage, PutCondition, PutRequest, PutResponse, S3Place, UploadedPart,
    counted::Counters,
};
use async_trait::async_trait;
use forebay_core::{Error, ObjectMeta, Result, limits, sync::Mutex};
use futures::{StreamExt, stream};
use http::Method;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

/// Bytes that may pass at once after a quiet period, as time at the full rate.
const BURST: Duration = Duration::from_millis(50);

/// The limits of one origin, shared by its buckets.
pub struct Limiter {
    reads: Arc<Semaphore>,
    writes: Arc<Semaphore>,
    rate: Option<Rate>,
    counters: Arc<Counters>,
}

/// A token bucket in the form of a timetable: each piece gets the time by which the ones before it
/// have passed.
struct Rate {
    bytes_per_second: u64,
    next: Mutex<Instant>,
}

impl Rate {
    /// When `bytes` may pass. Called in order, so served in order.
    fn book(&self, bytes: u64) -> Instant {
        let now = Instant::now();
        let mut next = self.next.lock();
        let begin = (*next).max(now.checked_sub(BURST).unwrap_or(now));
        *next = begin + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        *next
    }
}

impl Limiter {
    /// `requests_in_flight` of 1 still lets one read and one write run at a time.
    pub fn new(
        requests_in_flight: usize,
        bytes_per_second: Option<u64>,
        counters: Arc<Counters>,
    ) -> Self {
        let all = requests_in_flight.clamp(1, Semaphore::MAX_PERMITS);
        let writes = (all / 4).max(1);
        let reads = (all - writes).max(1);
        let rate = bytes_per_second.map(|r| Rate {
            bytes_per_second: r.max(1),
            next: Mutex::new(Instant::now()),
        });
        Self {
            reads: Arc::new(Semaphore::new(reads)),
            writes: Arc::new(Semaphore::new(writes)),
            rate,
            counters,
        }
    }

    /// Places that are free now: for reads and others, and for writes.
    pub fn free(&self) -> (usize, usize) {
        (
            self.reads.available_permits(),
            self.writes.available_permits(),
        )
    }

    /// A place for one more read, if one is free at once.
    pub(crate) fn free_read_place(&self) -> Option<OwnedSemaphorePermit> {
        self.reads.clone().try_acquire_owned().ok()
    }

    async fn place(&self, of: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit> {
        if let Ok(permit) = of.clone().try_acquire_owned() {
            return Ok(permit);
        }
        let _waiting = Waiting::begin(&self.counters.waiting);
        let longest = Duration::from_secs(limits::ORIGIN_PLACE_WAIT_MAX_SECS);
        match tokio::time::timeout(longest, of.clone().acquire_owned()).await {
            Ok(place) => place.map_err(|_| Error::internal("the limiter of an origin is closed")),
            Err(_) => Err(Error::busy(format!(
                "no place for another request to the origin within {longest:?} ({} waiting)",
                self.counters.waiting.load(Relaxed)
            ))
            .hint("the origin is slow, or requests_in_flight of this origin is too low")
            .retry_after(Duration::from_secs(1))),
        }
    }

    async fn pass(&self, bytes: usize) {
        if let Some(rate) = &self.rate {
            let begun = Instant::now();
            let at = rate.book(bytes as u64);
            if at > begun {
                tokio::time::sleep_until(at).await;
                self.counters
                    .throttled_us
                    .fetch_add(begun.elapsed().as_micros() as u64, Relaxed);
            }
        }
    }

    /// Lets bytes through at the rate; `held` is dropped with the body.
    fn paced(self: &Arc<Self>, body: ByteStream, held: Option<OwnedSemaphorePermit>) -> ByteStream {
        let limiter = self.clone();
        stream::unfold(
            (body, limiter, held),
            |(mut body, limiter, held)| async move {
                let item = body.next().await?;
                if let Ok(bytes) = &item {
                    limiter.pass(bytes.len()).await;
                }
                Some((item, (body, limiter, held)))
            },
        )
        .fuse()
        .boxed()
    }
}

struct Waiting<'a>(&'a AtomicU64);

impl<'a> Waiting<'a> {
    fn begin(gauge: &'a AtomicU64) -> Self {
        gauge.fetch_add(1, Relaxed);
        Self(gauge)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// An origin under a [`Limiter`].
pub struct Limited {
    inner: Arc<dyn Origin>,
    limiter: Arc<Limiter>,
}

impl Limited {
    /// Puts `inner` under `limiter`, which other origins may share.
    pub fn new(inner: Arc<dyn Origin>, limiter: Arc<Limiter>) -> Self {
        Self { inner, limiter }
    }
}

#[async_trait]
impl Origin for Limited {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        let _place = self.limiter.place(&self.limiter.reads).await?;
        self.inner.head(key).await
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        let place = self.limiter.place(&self.limiter.reads).await?;
        let mut answer = self.inner.get(key, request).await?;
        answer.body = self.limiter.paced(answer.body, Some(place));
        Ok(answer)
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        let _place = self.limiter.place(&self.limiter.reads).await?;
        self.inner.list(request).await
    }

    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        let _place = self.limiter.place(&self.limiter.writes).await?;
        self.inner
            .put(key, request, size, self.limiter.paced(body, None))
            .await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        let _place = self.limiter.place(&self.limiter.writes).await?;
        self.inner.delete(key).await
    }

    async fn copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        request: PutRequest,
    ) -> Result<PutResponse> {
        let _place = self.limiter.place(&self.limiter.writes).await?;
        self.inner.copy(from, if_match, to, request).await
    }

    fn check_writable(&self) -> Result<()> {
        self.inner.check_writable()
    }

    fn s3(&self) -> Option<S3Place> {
        self.inner.s3()
    }

    async fn forward(&self, mut request: ForwardRequest) -> Result<ForwardResponse> {
        let places = match request.method {
            Method::GET | Method::HEAD => &self.limiter.reads,
            _ => &self.limiter.writes,
        };
        let place = self.limiter.place(places).await?;
        if let ForwardBody::Bytes(bytes) = &request.body {
            self.limiter.pass(bytes.len()).await;
        }
        request.body = request
            .body
            .map_stream(|body| self.limiter.paced(body, None));
        let mut answer = self.inner.forward(request).await?;
        answer.body = self.limiter.paced(answer.body, Some(place));
        Ok(answer)
    }

    async fn create_upload(&self, key: &str, request: PutRequest) -> Result<String> {
        let _place = self.limiter.place(&self.limiter.writes).await?;
        self.inner.create_upload(key, request).await
    }

    async fn upload_part(
        &self,
        key: &str,
        upload: &str,
        number: u32,
        size: u64,
        body: ByteStream,
    ) -> Result<UploadedPart> {
        let _place = self.limiter.place(&self.limiter.writes).await?;
        self.inner
            .upload_part(key, upload, number, size, self.limiter.paced(body, None))
            .await
    }

    async fn list_parts(
        &self,
        key: &str,
        upload: &str,
        after: u32,
        max: usize,
    ) -> Result<PartsPage> {
        let _place = self.limiter.place(&self.limiter.reads).await?;
        self.inner.list_parts(key, upload, after, max).await
    }

    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        let _place = self.limiter.place(&self.limiter.writes).await?;
        self.inner
            .complete_upload(key, upload, parts, condition)
            .await
    }

    async fn abort_upload(&self, key: &str, upload: &str) -> Result<()> {
        let _place = self.limiter.place(&self.limiter.writes).await?;
        self.inner.abort_upload(key, upload).await
    }
}
