//! Retries, and continuation of bodies that break off.
//!
//! - A request that fails in a transient way is sent again after a random part of a delay that
//!   doubles (full jitter), or after the origin's own Retry-After if that is longer; at most
//!   `attempts` times, and never begun later than `deadline` after the first failure
//!   ([`RetryPolicy`]). While the origin does not answer at all, requests fail at once instead
//!   ([`Circuit`]).
//! - A body that ends early or fails is continued from the next byte by a ranged request for the
//!   same version: `If-Match` if there is a strong ETag, and the ETag (or size and modification
//!   time) is compared in any case. If the object has changed by now, the body ends with
//!   `VersionChanged`: a reader never gets bytes of two versions. If the origin names no version, a
//!   broken body is not continued. While the origin does not answer at all, a body waits for its turn
//!   to ask, as often as a request is sent again; and so does a request for what follows bytes that
//!   a reader has had ([`GetRequest::continues`]).
//! - Writes are repeated only if their body can be: it is held in memory up to
//!   [`REPEATABLE_BODY_MAX_BYTES`]; longer objects are written in parts, which are held, and a
//!   longer part of a client's own upload has one attempt.
//!
//! An effect of an earlier attempt is not mistaken for a failure: see
//! [`Resilient::put`](Origin::put) and [`Resilient::complete_upload`](Origin::complete_upload).

use crate::{
    ByteStream, Circuit, ForwardBody, ForwardRequest, ForwardResponse, GetRequest, GetResponse,
    ListPage, ListRequest, Origin, PartsPage, PutCondition, PutRequest, PutResponse, RetryPolicy,
    S3Place, UploadedPart, assemble, body,
    circuit::{Admission, Attempt},
    counted::Counters,
    failure,
    retry::{Attempts, is_of_transport},
};
use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, ObjectMeta, Result, limits, sync::Mutex};
use futures::{StreamExt, stream};
use http::{
    Method,
    header::{IF_MATCH, IF_NONE_MATCH},
};
use md5::{Digest, Md5};
use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering::Relaxed},
};

/// Bodies up to this are held in memory, so that their request can be repeated.
pub const REPEATABLE_BODY_MAX_BYTES: u64 = 8 << 20;
/// What is held of a body that goes to its origin as it comes: directories write 1 MiB at a time.
pub(crate) const PASSING_BODY_BYTES: u64 = 1 << 20;
/// Conditions of a removal: the object must have this date, or this length.
const IF_MATCH_DATE: &str = "x-amz-if-match-last-modified-time";
const IF_MATCH_SIZE: &str = "x-amz-if-match-size";
/// Where a write appends: the object must have this length.
const WRITE_OFFSET: &str = "x-amz-write-offset-bytes";
/// What is kept of an answer that says "later": error documents are shorter.
const LATER_DOCUMENT_MAX_BYTES: u64 = 64 << 10;
/// After this many bytes, a continued body has made progress, and its attempts are counted from the
/// start again.
const PROGRESS_BYTES: u64 = 64 << 10;

/// An origin whose transient failures are hidden by retries.
#[derive(Clone)]
pub struct Resilient(Arc<Shared>);

struct Shared {
    inner: Arc<dyn Origin>,
    policy: RetryPolicy,
    counters: Arc<Counters>,
    circuit: Arc<Circuit>,
    /// For an origin that takes a body of any length in one request: how much of it that holds in
    /// memory at a time. For others, bodies that are long or of unknown length are sent in parts.
    passing_bytes: Option<u64>,
}

impl Resilient {
    /// `circuit` is the one that the inner [`Timed`](crate::Timed) reports to.
    pub fn new(
        inner: Arc<dyn Origin>,
        policy: RetryPolicy,
        counters: Arc<Counters>,
        circuit: Arc<Circuit>,
    ) -> Self {
        Self(Arc::new(Shared {
            inner,
            policy,
            counters,
            circuit,
            passing_bytes: None,
        }))
    }

    /// For an origin that takes a body of unknown length in one request, and holds at most
    /// `passing_bytes` of it in memory.
    pub fn without_parts(
        inner: Arc<dyn Origin>,
        policy: RetryPolicy,
        counters: Arc<Counters>,
        circuit: Arc<Circuit>,
        passing_bytes: u64,
    ) -> Self {
        Self(Arc::new(Shared {
            inner,
            policy,
            counters,
            circuit,
            passing_bytes: Some(passing_bytes),
        }))
    }

    /// Stores a part that is in memory, repeatedly if necessary.
    pub(crate) async fn upload_part_of(
        &self,
        key: &str,
        upload: &str,
        number: u32,
        content: Bytes,
    ) -> Result<UploadedPart> {
        let size = content.len() as u64;
        let send = || {
            let body = body::from_bytes(content.clone());
            self.0.inner.upload_part(key, upload, number, size, body)
        };
        self.0.simple(send).await
    }

    /// What a repeated conditional write may conclude from `PreconditionFailed`: nothing.
    fn unless_its_own(&self, what: &str, key: &str, repeated: u32, e: Error) -> Error {
        match e.kind() {
            ErrorKind::PreconditionFailed if repeated > 0 => self.unknown(what, key, e),
            _ => e,
        }
    }

    /// The error of a write that may have taken effect before it met `e`.
    fn unknown(&self, what: &str, key: &str, e: Error) -> Error {
        Error::origin_unavailable(format!(
            "{what} {:?} at {}: it is not known whether it was written",
            forebay_core::name::shorten(key),
            self.describe()
        ))
        .hint(
            "an attempt got no answer, and the next one may have met its effect: look at the \
             object",
        )
        .caused_by(e)
    }
}

/// By what an object is known that was made of parts.
struct Made {
    /// `None`: the size of some part is not known.
    size: Option<u64>,
    /// What S3 makes of the MD5s of the parts. `None`: their ETags are no MD5s.
    etag: Option<String>,
}

impl Made {
    fn of(parts: &[UploadedPart]) -> Self {
        let mut md5 = Md5::new();
        let all = parts.iter().try_for_each(|part| {
            let etag = part.etag.trim_matches('"');
            let is_md5 = etag.len() == 32 && etag.bytes().all(|b| b.is_ascii_hexdigit());
            let number = u128::from_str_radix(etag, 16).ok().filter(|_| is_md5)?;
            md5.update(number.to_be_bytes());
            Some(())
        });
        let etag = all.map(|()| {
            let md5 = md5.finalize();
            let hex: String = md5.iter().map(|b| format!("{b:02x}")).collect();
            format!("{hex}-{}", parts.len())
        });
        Made {
            size: parts.iter().map(|p| p.size).sum(),
            etag,
        }
    }

    fn is(&self, meta: &ObjectMeta) -> bool {
        let etag = meta.etag.as_deref().map(|e| e.trim_matches('"'));
        self.size == Some(meta.size) || self.etag.is_some() && self.etag.as_deref() == etag
    }
}

impl Shared {
    fn admit(&self, attempt: Attempt) -> Result<Admission> {
        self.circuit
            .admit(attempt, || self.inner.describe())
            .inspect_err(|_| self.counters.refuse())
    }

    /// Permission to ask for what follows bytes that have come. It is to a new request what
    /// [`Body::admitted`] is to a body that broke off.
    async fn admit_next(&self) -> Result<Admission> {
        let mut attempts = Attempts::begin(&self.policy);
        loop {
            match self.admit(Attempt::Next) {
                Ok(admission) => return Ok(admission),
                Err(refused) => attempts.again(refused).await?,
            }
        }
    }

    /// Call this before work that would be useless if the origin fails.
    fn check(&self) -> Result<()> {
        self.circuit
            .check(|| self.inner.describe())
            .inspect_err(|_| self.counters.refuse())
    }

    /// Repeats `request` while it fails in a transient way. `seen` gets the number of failed
    /// attempts that may have taken effect.
    async fn repeat<T, F: Future<Output = Result<T>> + Send>(
        &self,
        seen: &mut u32,
        request: impl FnMut() -> F + Send,
    ) -> Result<T> {
        let admission = self.admit(Attempt::First)?;
        self.repeat_admitted(admission, seen, request).await
    }

    async fn repeat_admitted<T, F: Future<Output = Result<T>> + Send>(
        &self,
        mut admission: Admission,
        seen: &mut u32,
        mut request: impl FnMut() -> F + Send,
    ) -> Result<T> {
        let mut attempts = Attempts::begin(&self.policy);
        loop {
            let e = match request().await {
                Ok(answer) => return Ok(answer),
                Err(e) => e,
            };
            if is_of_transport(e.kind()) {
                admission.failed();
            }
            attempts.again(e.clone()).await?;
            // What the origin said is more informative than that it is not asked again.
            let Ok(next) = self.circuit.admit(Attempt::Next, || self.inner.describe()) else {
                return Err(e);
            };
            admission = next;
            *seen += 1;
            self.counters.retries.fetch_add(1, Relaxed);
        }
    }

    async fn simple<T, F: Future<Output = Result<T>> + Send>(
        &self,
        request: impl FnMut() -> F + Send,
    ) -> Result<T> {
        self.repeat(&mut 0, request).await
    }
}

/// A body in progress, with what is needed to continue it.
struct Body {
    shared: Arc<Shared>,
    key: String,
    meta: ObjectMeta,
    /// What has not arrived yet.
    rest: Range<u64>,
    stream: Option<ByteStream>,
    failures: u32,
    /// Where the last failure was.
    broke_at: u64,
    done: bool,
}

impl Body {
    fn what(&self) -> String {
        format!(
            "get {:?} at {}",
            forebay_core::name::shorten(&self.key),
            self.shared.inner.describe()
        )
    }

    async fn next(&mut self) -> Option<Result<bytes::Bytes>> {
        loop {
            if self.done {
                return None;
            }
            let Some(stream) = self.stream.as_mut() else {
                match self.reopen().await {
                    Ok(()) => continue,
                    Err(e) => return self.fail(e),
                }
            };
            let broken = match stream.next().await {
                Some(Ok(bytes)) if bytes.is_empty() => continue,
                Some(Ok(bytes)) => {
                    let n = bytes.len() as u64;
                    if n > self.rest.end - self.rest.start {
                        let e = Error::corrupt(format!(
                            "{}: more bytes came than were asked for",
                            self.what()
                        ));
                        return self.fail(
                            e.hint("the origin, or a proxy in front of it, sends wrong lengths"),
                        );
                    }
                    self.rest.start += n;
                    return Some(Ok(bytes));
                }
                None if self.rest.is_empty() => {
                    self.done = true;
                    self.stream = None;
                    return None;
                }
                None => Error::origin_unavailable(format!(
                    "{}: the body ended {} bytes early",
                    self.what(),
                    self.rest.end - self.rest.start
                )),
                Some(Err(e)) if is_of_transport(e.kind()) => e,
                Some(Err(e)) => return self.fail(e),
            };
            // Dropped before waiting, because it holds a connection and a place in the limiter.
            self.stream = None;
            if self.rest.is_empty() {
                // Everything arrived; only the end was untidy.
                self.done = true;
                return None;
            }
            if !self.meta.names_version() {
                return self.fail(broken.context("a body whose version has no name"));
            }
            if let Err(e) = self.wait(broken).await {
                return self.fail(e);
            }
        }
    }

    fn fail(&mut self, e: Error) -> Option<Result<bytes::Bytes>> {
        self.done = true;
        self.stream = None;
        Some(Err(e))
    }

    async fn wait(&mut self, e: Error) -> Result<()> {
        if self.rest.start >= self.broke_at + PROGRESS_BYTES {
            self.failures = 0;
        }
        self.broke_at = self.rest.start;
        self.failures += 1;
        Attempts::after(&self.shared.policy, self.failures)
            .again(e)
            .await
    }

    /// Permission to ask for the rest. While the service does not answer, one request at a time finds
    /// out whether it does again: this may be that one, or it waits.
    async fn admitted(&mut self) -> Result<Admission> {
        loop {
            match self.shared.admit(Attempt::Next) {
                Ok(admission) => return Ok(admission),
                Err(refused) => self.wait(refused).await?,
            }
        }
    }

    /// Asks for the rest of the same version.
    async fn reopen(&mut self) -> Result<()> {
        let admission = self.admitted().await?;
        self.shared.counters.continuations.fetch_add(1, Relaxed);
        let strong = self.meta.etag.clone().filter(|e| !e.starts_with("W/"));
        let request = GetRequest {
            range: Some(self.rest.clone()),
            if_match: strong,
            ..GetRequest::default()
        };
        let (inner, key) = (self.shared.inner.clone(), self.key.clone());
        let what = self.what();
        let changed = || {
            Error::version_changed(format!("{what}: the object changed while it was read"))
                .hint("read it again")
        };
        let again = || inner.get(&key, request.clone());
        let answer = self.shared.repeat_admitted(admission, &mut 0, again).await;
        let answer = answer.map_err(|e| match e.kind() {
            ErrorKind::PreconditionFailed
            | ErrorKind::NotFound
            | ErrorKind::RangeNotSatisfiable => changed().caused_by(e),
            _ => e,
        })?;
        if !same_version(&self.meta, &answer.meta) {
            return Err(changed());
        }
        if answer.range != self.rest {
            return Err(Error::corrupt(format!(
                "{}: asked for bytes {:?}, got {:?}",
                self.what(),
                self.rest,
                answer.range
            )));
        }
        self.stream = Some(answer.body);
        Ok(())
    }
}

fn same_version(a: &ObjectMeta, b: &ObjectMeta) -> bool {
    a.size == b.size
        && match (&a.etag, &b.etag) {
            (Some(a), Some(b)) => a == b,
            (None, None) => a.last_modified_ms == b.last_modified_ms,
            _ => false,
        }
}

#[async_trait]
impl Origin for Resilient {
    fn describe(&self) -> String {
        self.0.inner.describe()
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        self.0.simple(|| self.0.inner.head(key)).await
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        let send = || self.0.inner.get(key, request.clone());
        let answer = match request.continues {
            true => {
                let admission = self.0.admit_next().await?;
                self.0.repeat_admitted(admission, &mut 0, send).await?
            }
            false => self.0.simple(send).await?,
        };
        let GetResponse {
            meta,
            age_secs,
            range,
            body,
        } = answer;
        let body = Body {
            shared: self.0.clone(),
            key: key.to_owned(),
            meta: meta.clone(),
            rest: range.clone(),
            broke_at: range.start,
            stream: Some(body),
            failures: 0,
            done: false,
        };
        let body = stream::unfold(
            body,
            |mut b| async move { b.next().await.map(|item| (item, b)) },
        )
        .fuse()
        .boxed();
        Ok(GetResponse {
            meta,
            age_secs,
            range,
            body,
        })
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        self.0.simple(|| self.0.inner.list(request.clone())).await
    }

    /// A repeated conditional write may meet its own first attempt. Its `PreconditionFailed` would
    /// then be wrong, so it is reported as `OriginUnavailable`: the outcome is unknown.
    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        // Checked before the body is taken from its sender.
        self.0.check()?;
        match size {
            Some(n) if n <= REPEATABLE_BODY_MAX_BYTES => {
                let bytes =
                    body::collect(body::exact(body, n, format!("the body of put {key:?}")), n)
                        .await?;
                let mut repeated = 0;
                let send = || {
                    self.0.inner.put(
                        key,
                        request.clone(),
                        Some(n),
                        body::from_bytes(bytes.clone()),
                    )
                };
                self.0
                    .repeat(&mut repeated, send)
                    .await
                    .map_err(|e| self.unless_its_own("put", key, repeated, e))
            }
            _ if self.0.passing_bytes.is_some() => self.0.inner.put(key, request, size, body).await,
            _ => assemble::put_in_parts(self, key, request, size, body).await,
        }
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.0.simple(|| self.0.inner.delete(key)).await
    }

    /// As for [`put`](Origin::put).
    async fn copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        request: PutRequest,
    ) -> Result<PutResponse> {
        let mut repeated = 0;
        // No attempt can turn a source of another version into the right one.
        let conditional = request.condition != PutCondition::Always;
        self.0
            .repeat(&mut repeated, || {
                self.0.inner.copy(from, if_match, to, request.clone())
            })
            .await
            .map_err(|e| match conditional {
                true => self.unless_its_own("copy to", to, repeated, e),
                false => e,
            })
    }

    fn put_memory_bytes(&self, size: Option<u64>) -> u64 {
        match (size, self.0.passing_bytes) {
            (Some(n), _) if n <= REPEATABLE_BODY_MAX_BYTES => n,
            (_, Some(passing)) => passing,
            _ => limits::WRITE_BUFFER_MAX_BYTES,
        }
    }

    /// Longer parts than those that are held go to the origin as they come.
    fn part_memory_bytes(&self, size: u64) -> u64 {
        match size <= REPEATABLE_BODY_MAX_BYTES {
            true => size,
            false => PASSING_BODY_BYTES,
        }
    }

    fn check_writable(&self) -> Result<()> {
        self.0.inner.check_writable()
    }

    fn s3(&self) -> Option<S3Place> {
        self.0.inner.s3()
    }

    /// Requests that can be sent again with the same effect are also tried again when the answer
    /// says "later". The client gets the last such answer.
    async fn forward(&self, request: ForwardRequest) -> Result<ForwardResponse> {
        self.0.check()?;
        let ForwardRequest {
            method,
            key,
            query,
            headers,
            body,
        } = request;
        let request = |body: ForwardBody| ForwardRequest {
            method: method.clone(),
            key: key.clone(),
            query: query.clone(),
            headers: headers.clone(),
            body,
        };
        let reads = matches!(method, Method::GET | Method::HEAD);
        // A repeated conditional write may meet its own first attempt, and so may one that appends.
        let comes_to_the_same = reads
            || matches!(method, Method::PUT | Method::DELETE)
                && !headers.contains_key(IF_MATCH)
                && !headers.contains_key(IF_NONE_MATCH)
                && !headers.contains_key(IF_MATCH_DATE)
                && !headers.contains_key(IF_MATCH_SIZE)
                && !headers.contains_key(WRITE_OFFSET);
        let bytes = match body {
            ForwardBody::Empty if comes_to_the_same => Bytes::new(),
            ForwardBody::Bytes(bytes) if comes_to_the_same => bytes,
            once => return self.0.inner.forward(request(once)).await,
        };
        let later = Mutex::new(None);
        let send = || {
            let request = request(match bytes.is_empty() {
                true => ForwardBody::Empty,
                false => ForwardBody::Bytes(bytes.clone()),
            });
            let later = &later;
            async move {
                let mut answer = self.0.inner.forward(request).await?;
                if !matches!(answer.status.as_u16(), 500 | 502..=504) {
                    return Ok(answer);
                }
                let mut e = Error::origin_unavailable(format!("the answer was {}", answer.status));
                if let Some(after) = failure::retry_after(&answer.headers) {
                    e = e.retry_after(after);
                }
                // Read to its end now: until then it holds a place in the limiter, for which the
                // next attempt would wait.
                let document = body::collect(answer.body, LATER_DOCUMENT_MAX_BYTES).await;
                answer.body = body::from_bytes(document.unwrap_or_default());
                *later.lock() = Some(answer);
                Err(e)
            }
        };
        match self.0.simple(send).await {
            Err(e) => later.lock().take().ok_or(e),
            done => done,
        }
    }

    async fn create_upload(&self, key: &str, request: PutRequest) -> Result<String> {
        self.0
            .simple(|| self.0.inner.create_upload(key, request.clone()))
            .await
    }

    async fn upload_part(
        &self,
        key: &str,
        upload: &str,
        number: u32,
        size: u64,
        body: ByteStream,
    ) -> Result<UploadedPart> {
        self.0.check()?;
        if size > REPEATABLE_BODY_MAX_BYTES {
            return self
                .0
                .inner
                .upload_part(key, upload, number, size, body)
                .await;
        }
        let body = body::exact(body, size, format!("part {number} of {key:?}"));
        let content = body::collect(body, size).await?;
        self.upload_part_of(key, upload, number, content).await
    }

    async fn list_parts(
        &self,
        key: &str,
        upload: &str,
        after: u32,
        max: usize,
    ) -> Result<PartsPage> {
        self.0
            .simple(|| self.0.inner.list_parts(key, upload, after, max))
            .await
    }

    /// If a repeated completion finds no upload, it looks at the object: if that has the size of the
    /// parts, or the ETag that S3 makes of theirs, an earlier attempt made it. If neither can be told,
    /// or if its condition does not hold, the outcome is as unknown as for a [`put`](Origin::put).
    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        let mut repeated = 0;
        let send = || {
            let (parts, condition) = (parts.clone(), condition.clone());
            self.0.inner.complete_upload(key, upload, parts, condition)
        };
        match self.0.repeat(&mut repeated, send).await {
            Err(e) if repeated > 0 && e.kind() == ErrorKind::NotFound => {
                let made = Made::of(&parts);
                match self.head(key).await {
                    Ok(meta) if made.is(&meta) => Ok(PutResponse { etag: meta.etag }),
                    Ok(_) if made.size.is_none() => {
                        Err(self.unknown("complete the upload of", key, e))
                    }
                    _ => Err(e),
                }
            }
            Err(e) => Err(self.unless_its_own("complete the upload of", key, repeated, e)),
            done => done,
        }
    }

    async fn abort_upload(&self, key: &str, upload: &str) -> Result<()> {
        self.0
            .simple(|| self.0.inner.abort_upload(key, upload))
            .await
    }
}
