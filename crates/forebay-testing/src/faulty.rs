//! An origin that fails on command: for the tests of every layer above.
//!
//! Faults are programmed by operation: for the next calls in order ([`Faults::next`]), for every
//! call ([`Faults::always`]), or at random with a probability and a seed ([`Faults::random`], which
//! prints the seed, so that a failure can be replayed). [`Faults::distance`] adds latency and
//! limits the bandwidth of everything. [`Faults::calls`] counts.
//!
//! ```
//! # use forebay_origin::{Operation, Origin};
//! # use forebay_testing::{Fault, Faults, Faulty};
//! # use std::sync::Arc;
//! # fn f(inner: Arc<dyn Origin>) {
//! let faults = Faults::new();
//! let origin = Faulty::new(inner, faults.clone());
//! faults.next(Operation::Get, Fault::Truncate { at: 100 });
//! faults.next(Operation::Get, Fault::Error(forebay_core::ErrorKind::Timeout));
//! # drop(origin);
//! # }
//! ```

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, ObjectMeta, Result, sync::Mutex};
use forebay_origin::{
    ByteStream, ForwardRequest, ForwardResponse, GetRequest, GetResponse, ListPage, ListRequest,
    Operation, Origin, PartsPage, PutCondition, PutRequest, PutResponse, S3Place, UploadedPart,
};
use futures::{StreamExt, future::BoxFuture, stream};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

/// Work that a fault does before the request continues, given the key: replacing the object, for
/// example.
pub type Hook = Arc<dyn Fn(String) -> BoxFuture<'static, ()> + Send + Sync>;

/// One way to fail. The faults of bodies apply to `get`; for other operations they do nothing.
#[derive(Clone)]
pub enum Fault {
    /// No fault: skips a call in the order of [`Faults::next`].
    None,
    /// Fails at once, without asking the origin.
    Error(ErrorKind),
    /// Asks the origin, then fails as if the answer had been lost.
    LoseAnswer(ErrorKind),
    /// Never answers.
    Stall,
    /// Answers after this time.
    Delay(Duration),
    /// The body ends without an error after `at` bytes.
    Truncate {
        /// Bytes that still come.
        at: u64,
    },
    /// The body fails like a broken connection, after `at` bytes.
    Break {
        /// Bytes that still come.
        at: u64,
    },
    /// The body is silent forever after `at` bytes.
    StallBody {
        /// Bytes that still come.
        at: u64,
    },
    /// The body continues past its end.
    Extra {
        /// How many more come.
        bytes: u64,
    },
    /// The answer claims to hold another range than the requested one.
    WrongRange,
    /// Something happens first.
    Hook(Hook),
}

impl std::fmt::Debug for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::None => f.write_str("None"),
            Fault::Error(kind) => write!(f, "Error({kind:?})"),
            Fault::LoseAnswer(kind) => write!(f, "LoseAnswer({kind:?})"),
            Fault::Stall => f.write_str("Stall"),
            Fault::Delay(d) => write!(f, "Delay({d:?})"),
            Fault::Truncate { at } => write!(f, "Truncate({at})"),
            Fault::Break { at } => write!(f, "Break({at})"),
            Fault::StallBody { at } => write!(f, "StallBody({at})"),
            Fault::Extra { bytes } => write!(f, "Extra({bytes})"),
            Fault::WrongRange => f.write_str("WrongRange"),
            Fault::Hook(_) => f.write_str("Hook"),
        }
    }
}

/// How far away an origin is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Distance {
    /// Before each answer.
    pub latency: Duration,
    /// Bytes per second of each body; `None`: no limit.
    pub bandwidth: Option<u64>,
}

/// The random number generator, the probability of a fault, and the faults.
type Random = (StdRng, f64, Vec<(Operation, Fault)>);

#[derive(Default)]
struct State {
    next: HashMap<Operation, VecDeque<Fault>>,
    always: HashMap<Operation, Fault>,
    random: Option<Random>,
    calls: HashMap<Operation, u64>,
    distance: Distance,
}

/// The faults programmed for a [`Faulty`]; clones share them.
#[derive(Clone, Default)]
pub struct Faults(Arc<Mutex<State>>);

impl Faults {
    /// No faults, and no distance.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a fault for the next call of `operation` that has none yet.
    pub fn next(&self, operation: Operation, fault: Fault) {
        self.0
            .lock()
            .next
            .entry(operation)
            .or_default()
            .push_back(fault);
    }

    /// A fault for every call of `operation` that [`next`](Self::next) does not cover;
    /// [`Fault::None`] ends it.
    pub fn always(&self, operation: Operation, fault: Fault) {
        self.0.lock().always.insert(operation, fault);
    }

    /// With probability `p`, one of the faults of a call's operation. Without a seed, one is drawn;
    /// either way it is printed and returned.
    pub fn random(&self, p: f64, seed: Option<u64>, faults: Vec<(Operation, Fault)>) -> u64 {
        let seed = seed.unwrap_or_else(rand::random);
        eprintln!("origin faults with the seed {seed}");
        self.0.lock().random = Some((StdRng::seed_from_u64(seed), p, faults));
        seed
    }

    /// Puts every call from now on at this distance.
    pub fn distance(&self, distance: Distance) {
        self.0.lock().distance = distance;
    }

    /// Removes all faults; the counts stay.
    pub fn clear(&self) {
        let mut s = self.0.lock();
        s.next.clear();
        s.always.clear();
        s.random = None;
        s.distance = Distance::default();
    }

    /// Calls of `operation` so far, including failed ones.
    pub fn calls(&self, operation: Operation) -> u64 {
        self.0.lock().calls.get(&operation).copied().unwrap_or(0)
    }

    /// Calls of all operations so far, including failed ones.
    pub fn calls_total(&self) -> u64 {
        self.0.lock().calls.values().sum()
    }

    fn take(&self, operation: Operation) -> (Fault, Distance) {
        let mut s = self.0.lock();
        *s.calls.entry(operation).or_default() += 1;
        let distance = s.distance;
        if let Some(fault) = s.next.get_mut(&operation).and_then(VecDeque::pop_front) {
            return (fault, distance);
        }
        if let Some(fault) = s.always.get(&operation) {
            return (fault.clone(), distance);
        }
        if let Some((rng, p, faults)) = &mut s.random
            && rng.random_bool(*p)
        {
            let fitting: Vec<_> = faults.iter().filter(|(o, _)| *o == operation).collect();
            if !fitting.is_empty() {
                return (
                    fitting[rng.random_range(0..fitting.len())].1.clone(),
                    distance,
                );
            }
        }
        (Fault::None, distance)
    }
}

/// An origin with [`Faults`].
pub struct Faulty {
    inner: Arc<dyn Origin>,
    faults: Faults,
}

fn fails(kind: ErrorKind) -> Error {
    Error::new(kind, "a fault that a test asked for")
}

impl Faulty {
    /// Makes `inner` fail as `faults` say; keep a clone of them to program it.
    pub fn new(inner: Arc<dyn Origin>, faults: Faults) -> Self {
        Self { inner, faults }
    }

    async fn run<T>(
        &self,
        operation: Operation,
        key: &str,
        request: impl Future<Output = Result<T>> + Send,
    ) -> Result<(T, Fault, Distance)> {
        let (fault, distance) = self.faults.take(operation);
        if !distance.latency.is_zero() {
            tokio::time::sleep(distance.latency).await;
        }
        match &fault {
            Fault::Error(kind) => return Err(fails(*kind)),
            Fault::Stall => std::future::pending().await,
            Fault::Delay(d) => tokio::time::sleep(*d).await,
            Fault::Hook(hook) => hook(key.to_owned()).await,
            _ => {}
        }
        let answer = request.await?;
        match fault {
            Fault::LoseAnswer(kind) => Err(fails(kind)),
            fault => Ok((answer, fault, distance)),
        }
    }

    async fn simple<T>(
        &self,
        operation: Operation,
        key: &str,
        request: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        Ok(self.run(operation, key, request).await?.0)
    }

    fn slowed(&self, body: ByteStream) -> ByteStream {
        let distance = self.faults.0.lock().distance;
        slow(body, distance)
    }
}

/// A body with limited bandwidth.
fn slow(body: ByteStream, distance: Distance) -> ByteStream {
    let Some(bandwidth) = distance.bandwidth else {
        return body;
    };
    body.then(move |item| async move {
        if let Ok(bytes) = &item {
            tokio::time::sleep(Duration::from_secs_f64(
                bytes.len() as f64 / bandwidth.max(1) as f64,
            ))
            .await;
        }
        item
    })
    .boxed()
}

/// The first `at` bytes of a body, then `end`.
fn cut(body: ByteStream, at: u64, end: ByteStream) -> ByteStream {
    let first = stream::unfold((body, at), |(mut body, left)| async move {
        if left == 0 {
            return None;
        }
        match body.next().await? {
            Ok(bytes) => {
                let n = (bytes.len() as u64).min(left);
                Some((Ok(bytes.slice(..n as usize)), (body, left - n)))
            }
            Err(e) => Some((Err(e), (body, 0))),
        }
    });
    first.chain(end).boxed()
}

#[async_trait]
impl Origin for Faulty {
    fn describe(&self) -> String {
        format!("{} with faults", self.inner.describe())
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        self.simple(Operation::Head, key, self.inner.head(key))
            .await
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        let (mut answer, fault, distance) = self
            .run(Operation::Get, key, self.inner.get(key, request))
            .await?;
        let body = slow(answer.body, distance);
        answer.body = match fault {
            Fault::Truncate { at } => cut(body, at, stream::empty().boxed()),
            Fault::Break { at } => cut(
                body,
                at,
                stream::iter([Err(fails(ErrorKind::OriginUnavailable))]).boxed(),
            ),
            Fault::StallBody { at } => cut(body, at, stream::pending().boxed()),
            Fault::Extra { bytes } => body
                .chain(stream::iter([Ok(Bytes::from(vec![b'!'; bytes as usize]))]))
                .boxed(),
            Fault::WrongRange => {
                answer.range = answer.range.start + 1..answer.range.end + 1;
                body
            }
            _ => body,
        };
        Ok(answer)
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        let prefix = request.prefix.clone();
        self.simple(Operation::List, &prefix, self.inner.list(request))
            .await
    }

    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        self.simple(
            Operation::Put,
            key,
            self.inner.put(key, request, size, self.slowed(body)),
        )
        .await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.simple(Operation::Delete, key, self.inner.delete(key))
            .await
    }

    async fn copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        request: PutRequest,
    ) -> Result<PutResponse> {
        self.simple(
            Operation::Copy,
            to,
            self.inner.copy(from, if_match, to, request),
        )
        .await
    }

    fn check_writable(&self) -> Result<()> {
        self.inner.check_writable()
    }

    fn s3(&self) -> Option<S3Place> {
        self.inner.s3()
    }

    async fn forward(&self, request: ForwardRequest) -> Result<ForwardResponse> {
        let key = request.key.clone();
        self.simple(Operation::Forward, &key, self.inner.forward(request))
            .await
    }

    async fn create_upload(&self, key: &str, request: PutRequest) -> Result<String> {
        self.simple(
            Operation::CreateUpload,
            key,
            self.inner.create_upload(key, request),
        )
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
        self.simple(
            Operation::UploadPart,
            key,
            self.inner
                .upload_part(key, upload, number, size, self.slowed(body)),
        )
        .await
    }

    async fn list_parts(
        &self,
        key: &str,
        upload: &str,
        after: u32,
        max: usize,
    ) -> Result<PartsPage> {
        let listed = self.inner.list_parts(key, upload, after, max);
        self.simple(Operation::ListParts, key, listed).await
    }

    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        self.simple(
            Operation::CompleteUpload,
            key,
            self.inner.complete_upload(key, upload, parts, condition),
        )
        .await
    }

    async fn abort_upload(&self, key: &str, upload: &str) -> Result<()> {
        self.simple(
            Operation::AbortUpload,
            key,
            self.inner.abort_upload(key, upload),
        )
        .await
    }
}
