//! Hedged reads: a GET that is slower to its first byte than 95 of 100 before it is sent a second
//! time, and the first answer is taken.
//!
//! A batch waits for the slowest of its objects, so with many objects it always meets the origin's
//! tail. A second request rarely meets it again. Its cost is bounded: second requests are at most a
//! configured share of all GETs (a quiet origin saves up a few), they take only places in the
//! limiter that are free at once, and for a while none are sent to an origin that fails: one that
//! says it is busy, does not answer, or breaks connections. No request counts as slow before
//! [`LEARN_REQUESTS`] answers have come.
//!
//! Times are kept in a histogram whose buckets grow by a tenth and whose counts are halved now and
//! then, so it follows the origin and its memory does not grow. An overtaken request counts with
//! the time at which it was overtaken: too short, but beyond the 95th percentile as it should be.
//!
//! Invariant: one request in, one answer out, and the loser is dropped (its connection is closed,
//! its place is free again) before the answer is returned. Only GETs are hedged: sending a write
//! twice is not harmless.

use crate::{
    ByteStream, ForwardRequest, ForwardResponse, GetRequest, GetResponse, ListPage, ListRequest,
    Origin, PartsPage, PutCondition, PutRequest, PutResponse, S3Place, UploadedPart,
    counted::Counters, limited::Limiter, retry::is_of_transport,
};
use async_trait::async_trait;
use forebay_core::{Error, ErrorKind, ObjectMeta, Result, sync::Mutex};
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::time::Instant;

/// A request is slow when it takes longer than this share of those before it.
const QUANTILE: f64 = 0.95;
/// Answers needed before any request counts as slow.
const LEARN_REQUESTS: u32 = 64;
/// When the histogram has this many entries, all counts are halved.
const REMEMBER_REQUESTS: u32 = 1024;
/// Second requests that a quiet period saves up.
const SAVED_MAX: f64 = 16.0;
/// An origin that answers faster than this has no tail worth a second request.
const SHORTEST_WAIT: Duration = Duration::from_millis(2);
/// No second requests for this long after the origin failed.
const BACK_OFF: Duration = Duration::from_secs(5);

const BUCKET_FIRST: Duration = Duration::from_micros(500);
const BUCKET_GROWTH: f64 = 1.1;
/// These reach beyond ten minutes.
const BUCKETS: usize = 150;

/// The times to the first byte at one origin, and how many second requests it may be sent.
pub struct Hedging {
    /// Second requests per request.
    share: f64,
    limiter: Arc<Limiter>,
    counters: Arc<Counters>,
    state: Mutex<State>,
}

struct State {
    buckets: [u32; BUCKETS],
    seen: u32,
    saved: f64,
    not_before: Option<Instant>,
}

impl Hedging {
    /// At most `percent` second requests for 100 requests.
    pub fn new(percent: u32, limiter: Arc<Limiter>, counters: Arc<Counters>) -> Self {
        let state = State {
            buckets: [0; BUCKETS],
            seen: 0,
            saved: 0.0,
            not_before: None,
        };
        Self {
            share: f64::from(percent) / 100.0,
            limiter,
            counters,
            state: Mutex::new(state),
        }
    }

    /// A request begins. Returns how long it may take before it counts as slow, once that is known.
    fn begin(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        state.saved = (state.saved + self.share).min(SAVED_MAX);
        state.slow_after()
    }

    fn answered_after(&self, time: Duration) {
        self.state.lock().add(time);
    }

    /// Whether a second request may be sent now; if so, it is paid for.
    fn spend(&self) -> bool {
        let mut state = self.state.lock();
        if state.saved < 1.0 || state.not_before.is_some_and(|t| Instant::now() < t) {
            return false;
        }
        state.saved -= 1.0;
        true
    }

    fn look_at(&self, e: &Error) {
        if transient(e) {
            self.state.lock().not_before = Some(Instant::now() + BACK_OFF);
        }
    }
}

impl State {
    fn add(&mut self, time: Duration) {
        let ratio = time.as_secs_f64() / BUCKET_FIRST.as_secs_f64();
        let bucket = if ratio <= 1.0 {
            0
        } else {
            (ratio.ln() / BUCKET_GROWTH.ln()).ceil() as usize
        };
        self.buckets[bucket.min(BUCKETS - 1)] += 1;
        self.seen += 1;
        if self.seen >= REMEMBER_REQUESTS {
            self.buckets.iter_mut().for_each(|n| *n /= 2);
            self.seen = self.buckets.iter().sum();
        }
    }

    fn slow_after(&self) -> Option<Duration> {
        if self.seen < LEARN_REQUESTS {
            return None;
        }
        let below = (f64::from(self.seen) * QUANTILE).ceil() as u32;
        let mut sum = 0;
        let bucket = self.buckets.iter().position(|n| {
            sum += n;
            sum >= below
        })?;
        Some(
            BUCKET_FIRST
                .mul_f64(BUCKET_GROWTH.powi(bucket as i32))
                .max(SHORTEST_WAIT),
        )
    }
}

/// An error that another attempt may not meet; every other error is an answer.
fn transient(e: &Error) -> bool {
    e.kind() == ErrorKind::Busy || is_of_transport(e.kind())
}

/// An origin whose slow GETs are sent again. Below the limiter, which the first request has already
/// passed.
pub struct Hedged {
    inner: Arc<dyn Origin>,
    hedging: Arc<Hedging>,
}

impl Hedged {
    /// Hedges the GETs of `inner`; `hedging` is shared by the origins of one service.
    pub fn new(inner: Arc<dyn Origin>, hedging: Arc<Hedging>) -> Self {
        Self { inner, hedging }
    }
}

#[async_trait]
impl Origin for Hedged {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        self.inner.head(key).await
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        let hedging = &*self.hedging;
        let begun = Instant::now();
        let slow_after = hedging.begin();
        let mut first = self.inner.get(key, request.clone());
        let alone = match slow_after {
            None => Some(first.as_mut().await),
            Some(wait) => tokio::time::timeout(wait, first.as_mut()).await.ok(),
        };
        let place = if alone.is_none() {
            hedging.limiter.free_read_place()
        } else {
            None
        };
        let result = match alone {
            Some(result) => result,
            None if place.is_none() || !hedging.spend() => first.await,
            None => {
                hedging.counters.hedges.fetch_add(1, Relaxed);
                let mut second = self.inner.get(key, request);
                let (result, of_second) = tokio::select! {
                    biased;
                    result = first.as_mut() => match result {
                        Err(e) if transient(&e) => {
                            hedging.look_at(&e);
                            match second.await {
                                Ok(answer) => (Ok(answer), true),
                                // The first request's error: the second may have failed because of
                                // the same cause.
                                Err(_) => (Err(e), false),
                            }
                        }
                        result => (result, false),
                    },
                    result = second.as_mut() => match result {
                        Err(e) if transient(&e) => {
                            hedging.look_at(&e);
                            (first.await, false)
                        }
                        result => (result, true),
                    },
                };
                if of_second {
                    hedging.counters.hedges_won.fetch_add(1, Relaxed);
                }
                result
            }
        };
        match &result {
            Ok(_) => hedging.answered_after(begun.elapsed()),
            Err(e) => hedging.look_at(e),
        }
        result
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        self.inner.list(request).await
    }

    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        self.inner.put(key, request, size, body).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.inner.delete(key).await
    }

    async fn copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        request: PutRequest,
    ) -> Result<PutResponse> {
        self.inner.copy(from, if_match, to, request).await
    }

    fn check_writable(&self) -> Result<()> {
        self.inner.check_writable()
    }

    fn s3(&self) -> Option<S3Place> {
        self.inner.s3()
    }

    async fn forward(&self, request: ForwardRequest) -> Result<ForwardResponse> {
        self.inner.forward(request).await
    }

    async fn create_upload(&self, key: &str, request: PutRequest) -> Result<String> {
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
        self.inner
            .upload_part(key, upload, number, size, body)
            .await
    }

    async fn list_parts(
        &self,
        key: &str,
        upload: &str,
        after: u32,
        max: usize,
    ) -> Result<PartsPage> {
        self.inner.list_parts(key, upload, after, max).await
    }

    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        self.inner
            .complete_upload(key, upload, parts, condition)
            .await
    }

    async fn abort_upload(&self, key: &str, upload: &str) -> Result<()> {
        self.inner.abort_upload(key, upload).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hedging(percent: u32) -> Hedging {
        let counters = Arc::new(Counters::default());
        Hedging::new(
            percent,
            Arc::new(Limiter::new(100, None, counters.clone())),
            counters,
        )
    }

    #[test]
    fn what_is_slow_follows_the_origin() {
        let h = hedging(5);
        for n in 1..=100u64 {
            assert_eq!(h.begin().is_some(), n > u64::from(LEARN_REQUESTS));
            h.answered_after(Duration::from_millis(n));
        }
        let slow = h.begin().unwrap();
        assert!((95..=106).contains(&slow.as_millis()), "{slow:?}");
        for _ in 0..3 * REMEMBER_REQUESTS {
            h.answered_after(Duration::from_millis(7));
        }
        let slow = h.begin().unwrap();
        assert!((7..=8).contains(&slow.as_millis()), "{slow:?}");
        for _ in 0..3 * REMEMBER_REQUESTS {
            h.answered_after(Duration::from_secs(100_000));
        }
        assert!(h.begin().unwrap() > Duration::from_secs(600));
    }

    #[test]
    fn the_share_is_bounded() {
        let h = hedging(5);
        let sent: usize = (0..1000)
            .filter(|_| h.begin().is_none() && h.spend())
            .count();
        assert!((45..=50).contains(&sent), "{sent}");
        for _ in 0..10_000 {
            let _ = h.begin();
        }
        let saved = std::iter::repeat_with(|| h.spend())
            .take_while(|s| *s)
            .count();
        assert_eq!(saved, SAVED_MAX as usize);
    }
}
