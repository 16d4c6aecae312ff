//! Counts what goes to an origin and comes back: requests, errors, bytes, time. The innermost
//! wrapper, so that each attempt counts.

use crate::{
    ByteStream, ForwardBody, ForwardRequest, ForwardResponse, GetRequest, GetResponse, ListPage,
    ListRequest, Origin, PartsPage, PutCondition, PutRequest, PutResponse, S3Place, UploadedPart,
    failure,
};
use async_trait::async_trait;
use forebay_core::{
    ErrorKind, Histogram, HistogramSnapshot, ObjectMeta, Result,
    request::{self, Cost},
    sync::Mutex,
};
use futures::StreamExt;
use http::Method;
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

/// The parameters of requests that list what is in a bucket. Others ask for a setting of it.
const LISTINGS: &[&str] = &[
    "continuation-token",
    "delimiter",
    "encoding-type",
    "fetch-owner",
    "key-marker",
    "list-type",
    "marker",
    "max-keys",
    "max-uploads",
    "prefix",
    "start-after",
    "upload-id-marker",
    "uploads",
    "version-id-marker",
    "versions",
    "x-id",
];

/// The kinds of requests to an origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operation {
    /// [`Origin::head`].
    Head,
    /// [`Origin::get`], including its body.
    Get,
    /// [`Origin::list`]: one page.
    List,
    /// [`Origin::put`].
    Put,
    /// [`Origin::delete`].
    Delete,
    /// [`Origin::copy`].
    Copy,
    /// [`Origin::create_upload`].
    CreateUpload,
    /// [`Origin::upload_part`].
    UploadPart,
    /// [`Origin::list_parts`]: one page.
    ListParts,
    /// [`Origin::complete_upload`].
    CompleteUpload,
    /// [`Origin::abort_upload`].
    AbortUpload,
    /// [`Origin::forward`], including the body of its answer, of what writes or lists.
    Forward,
    /// The same of what reads an object, its tags or other settings, or settings of a bucket.
    ForwardRead,
    /// The same of what removes something.
    ForwardDelete,
}

impl Operation {
    pub(crate) const ALL: [Operation; 14] = [
        Operation::Head,
        Operation::Get,
        Operation::List,
        Operation::Put,
        Operation::Delete,
        Operation::Copy,
        Operation::CreateUpload,
        Operation::UploadPart,
        Operation::ListParts,
        Operation::CompleteUpload,
        Operation::AbortUpload,
        Operation::Forward,
        Operation::ForwardRead,
        Operation::ForwardDelete,
    ];

    /// How a request that is passed on counts: as what services charge for it.
    fn of_forwarded(request: &ForwardRequest) -> Self {
        let asks = |name: &str| request.query.iter().any(|(n, _)| n == name);
        let lists = || {
            let mut names = request.query.iter().map(|(n, _)| n.as_str());
            names.all(|name| LISTINGS.contains(&name))
        };
        match request.method {
            Method::DELETE => Operation::ForwardDelete,
            // By `uploadId`, the parts of an upload are listed.
            Method::GET | Method::HEAD if !request.key.is_empty() && !asks("uploadId") => {
                Operation::ForwardRead
            }
            Method::HEAD if request.key.is_empty() => Operation::ForwardRead,
            Method::GET if request.key.is_empty() && !lists() => Operation::ForwardRead,
            Method::POST if asks("select") => Operation::ForwardRead,
            _ => Operation::Forward,
        }
    }

    /// For metric labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Operation::Head => "head",
            Operation::Get => "get",
            Operation::List => "list",
            Operation::Put => "put",
            Operation::Delete => "delete",
            Operation::Copy => "copy",
            Operation::CreateUpload => "create_upload",
            Operation::UploadPart => "upload_part",
            Operation::ListParts => "list_parts",
            Operation::CompleteUpload => "complete_upload",
            Operation::AbortUpload => "abort_upload",
            Operation::Forward => "forward",
            Operation::ForwardRead => "forward_read",
            Operation::ForwardDelete => "forward_delete",
        }
    }
}

/// One moment of an origin's counters and gauges.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OriginStats {
    /// One for each operation, including those that were never used.
    pub operations: Vec<OperationStats>,
    /// Errors by [`ErrorKind`], including those that are answers (`NotFound`, `NotModified`) and
    /// those in bodies.
    pub errors: Vec<(ErrorKind, u64)>,
    /// Bytes of objects read.
    pub bytes_in: u64,
    /// Bytes of objects written.
    pub bytes_out: u64,
    /// Requests whose answer or body is not finished.
    pub in_flight: u64,
    /// Requests that wait for a place under `requests_in_flight`.
    pub waiting: u64,
    /// Seconds that bytes waited for `bytes_per_second`, in total.
    pub throttled_seconds: f64,
    /// Attempts after the first of a request.
    pub retries: u64,
    /// Bodies that broke off and were continued; not in `retries`.
    pub continuations: u64,
    /// Slow GETs that were sent a second time.
    pub hedges: u64,
    /// Hedges whose second answer came first.
    pub hedges_won: u64,
    /// Requests that failed at once because the origin did not answer ([`Circuit`](crate::Circuit)).
    pub circuit_refused: u64,
    /// Circuits of this origin that are open: 1, or, for a wildcard whose buckets have their own
    /// addresses, the number of such buckets.
    pub circuits_open: u64,
}

/// One operation of an origin.
#[derive(Clone, Debug, PartialEq)]
pub struct OperationStats {
    /// Which operation.
    pub operation: Operation,
    /// How many, each attempt counted.
    pub requests: u64,
    /// How many ended in an error, including answers such as `NotFound`, and for `forward` whatever
    /// is not a success.
    pub errors: u64,
    /// From the request to its answer (for `get`: to its headers).
    pub latency: HistogramSnapshot,
}

/// Whether an error says that something is wrong with an origin, its credentials or the connection
/// to it. The others are answers, or mistakes of the client.
pub fn is_failure(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Unauthenticated
            | ErrorKind::PermissionDenied
            | ErrorKind::Busy
            | ErrorKind::Timeout
            | ErrorKind::OriginUnavailable
            | ErrorKind::Corrupt
            | ErrorKind::ShuttingDown
            | ErrorKind::Internal
    )
}

impl OriginStats {
    /// How many of the errors are failures ([`is_failure`]).
    pub fn failures(&self) -> u64 {
        let failures = self.errors.iter().filter(|(kind, _)| is_failure(*kind));
        failures.map(|(_, n)| n).sum()
    }

    /// Requests of one operation, each attempt counted.
    pub fn requests(&self, operation: Operation) -> u64 {
        self.operations
            .iter()
            .find(|o| o.operation == operation)
            .map_or(0, |o| o.requests)
    }

    /// Requests of all operations, each attempt counted.
    pub fn requests_total(&self) -> u64 {
        self.operations.iter().map(|o| o.requests).sum()
    }
}

#[derive(Default)]
struct PerOperation {
    requests: AtomicU64,
    errors: AtomicU64,
    latency: Histogram,
}

/// Shared by the wrappers of one origin.
#[derive(Default)]
pub struct Counters {
    operations: [PerOperation; Operation::ALL.len()],
    errors: Mutex<HashMap<ErrorKind, u64>>,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    in_flight: AtomicU64,
    pub(crate) waiting: AtomicU64,
    pub(crate) throttled_us: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) continuations: AtomicU64,
    pub(crate) hedges: AtomicU64,
    pub(crate) hedges_won: AtomicU64,
    refused: AtomicU64,
}

impl Counters {
    /// Their values now. `circuits_open` is left at 0; a caller that knows the circuits sets it.
    pub fn stats(&self) -> OriginStats {
        let operations = Operation::ALL
            .iter()
            .zip(&self.operations)
            .map(|(&operation, o)| OperationStats {
                operation,
                requests: o.requests.load(Relaxed),
                errors: o.errors.load(Relaxed),
                latency: o.latency.snapshot(),
            })
            .collect();
        let mut errors: Vec<_> = self.errors.lock().iter().map(|(k, n)| (*k, *n)).collect();
        errors.sort_by_key(|(k, _)| k.code());
        OriginStats {
            operations,
            errors,
            bytes_in: self.bytes_in.load(Relaxed),
            bytes_out: self.bytes_out.load(Relaxed),
            in_flight: self.in_flight.load(Relaxed),
            waiting: self.waiting.load(Relaxed),
            throttled_seconds: self.throttled_us.load(Relaxed) as f64 / 1e6,
            retries: self.retries.load(Relaxed),
            continuations: self.continuations.load(Relaxed),
            hedges: self.hedges.load(Relaxed),
            hedges_won: self.hedges_won.load(Relaxed),
            circuit_refused: self.refused.load(Relaxed),
            circuits_open: 0,
        }
    }

    pub(crate) fn refuse(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    fn error(&self, operation: Operation, kind: ErrorKind) {
        self.operations[operation as usize]
            .errors
            .fetch_add(1, Relaxed);
        *self.errors.lock().entry(kind).or_default() += 1;
    }
}

/// One request in flight, counted until dropped.
struct InFlight(Arc<Counters>);

impl InFlight {
    fn begin(counters: &Arc<Counters>) -> Self {
        counters.in_flight.fetch_add(1, Relaxed);
        Self(counters.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// An origin whose requests are counted.
pub struct Counted {
    inner: Arc<dyn Origin>,
    counters: Arc<Counters>,
}

impl Counted {
    /// Counts what goes to `inner`; origins that share `counters` are counted together.
    pub fn new(inner: Arc<dyn Origin>, counters: Arc<Counters>) -> Self {
        Self { inner, counters }
    }

    async fn count<T>(
        &self,
        operation: Operation,
        sent: impl Future<Output = Result<T>> + Send,
    ) -> Result<(T, InFlight)> {
        let in_flight = InFlight::begin(&self.counters);
        let per = &self.counters.operations[operation as usize];
        per.requests.fetch_add(1, Relaxed);
        request::count(Cost::OriginRequests, 1);
        let begun = Instant::now();
        let result = sent.await;
        per.latency.observe(begun.elapsed());
        match result {
            Ok(answer) => Ok((answer, in_flight)),
            Err(e) => {
                self.counters.error(operation, e.kind());
                Err(e)
            }
        }
    }

    fn outgoing(&self, body: ByteStream) -> ByteStream {
        let counters = self.counters.clone();
        body.inspect(move |item| {
            if let Ok(bytes) = item {
                counters.bytes_out.fetch_add(bytes.len() as u64, Relaxed);
            }
        })
        .boxed()
    }
}

#[async_trait]
impl Origin for Counted {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        Ok(self.count(Operation::Head, self.inner.head(key)).await?.0)
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        let (mut answer, in_flight) = self
            .count(Operation::Get, self.inner.get(key, request))
            .await?;
        // The guard lives in the closure: the request is in flight until its body is dropped.
        answer.body = answer
            .body
            .inspect(move |item| match item {
                Ok(bytes) => drop(in_flight.0.bytes_in.fetch_add(bytes.len() as u64, Relaxed)),
                Err(e) => in_flight.0.error(Operation::Get, e.kind()),
            })
            .boxed();
        Ok(answer)
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        Ok(self
            .count(Operation::List, self.inner.list(request))
            .await?
            .0)
    }

    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        Ok(self
            .count(
                Operation::Put,
                self.inner.put(key, request, size, self.outgoing(body)),
            )
            .await?
            .0)
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.count(Operation::Delete, self.inner.delete(key))
            .await
            .map(drop)
    }

    async fn copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        request: PutRequest,
    ) -> Result<PutResponse> {
        Ok(self
            .count(
                Operation::Copy,
                self.inner.copy(from, if_match, to, request),
            )
            .await?
            .0)
    }

    fn check_writable(&self) -> Result<()> {
        self.inner.check_writable()
    }

    fn s3(&self) -> Option<S3Place> {
        self.inner.s3()
    }

    async fn forward(&self, mut request: ForwardRequest) -> Result<ForwardResponse> {
        // A body that is there at once has been sent when there is an answer.
        let at_once = match &request.body {
            ForwardBody::Bytes(bytes) => bytes.len() as u64,
            ForwardBody::Empty | ForwardBody::Stream(..) => 0,
        };
        request.body = request.body.map_stream(|body| self.outgoing(body));
        let operation = Operation::of_forwarded(&request);
        let (mut answer, in_flight) = self.count(operation, self.inner.forward(request)).await?;
        self.counters.bytes_out.fetch_add(at_once, Relaxed);
        // Here, an error of the service is an answer.
        if !answer.status.is_success() {
            let kind = failure::kind_of(answer.status, "");
            self.counters.error(operation, kind);
        }
        // As in `get`: in flight until the body is dropped.
        answer.body = answer
            .body
            .inspect(move |item| match item {
                Ok(bytes) => drop(in_flight.0.bytes_in.fetch_add(bytes.len() as u64, Relaxed)),
                Err(e) => in_flight.0.error(operation, e.kind()),
            })
            .boxed();
        Ok(answer)
    }

    async fn create_upload(&self, key: &str, request: PutRequest) -> Result<String> {
        Ok(self
            .count(
                Operation::CreateUpload,
                self.inner.create_upload(key, request),
            )
            .await?
            .0)
    }

    async fn upload_part(
        &self,
        key: &str,
        upload: &str,
        number: u32,
        size: u64,
        body: ByteStream,
    ) -> Result<UploadedPart> {
        let request = self
            .inner
            .upload_part(key, upload, number, size, self.outgoing(body));
        Ok(self.count(Operation::UploadPart, request).await?.0)
    }

    async fn list_parts(
        &self,
        key: &str,
        upload: &str,
        after: u32,
        max: usize,
    ) -> Result<PartsPage> {
        let listed = self.inner.list_parts(key, upload, after, max);
        Ok(self.count(Operation::ListParts, listed).await?.0)
    }

    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        Ok(self
            .count(
                Operation::CompleteUpload,
                self.inner.complete_upload(key, upload, parts, condition),
            )
            .await?
            .0)
    }

    async fn abort_upload(&self, key: &str, upload: &str) -> Result<()> {
        self.count(Operation::AbortUpload, self.inner.abort_upload(key, upload))
            .await
            .map(drop)
    }
}
