//! HTTP/1.1 to one node.
//!
//! Connections are kept alive in a small pool. To find the Unix socket of a node on the same
//! machine, the client asks the node over TCP, once: a plain copy over the socket is several times
//! faster than over loopback TCP. The socket is used only if it leads to that same node, and the
//! client falls back to TCP if the socket goes away.
//!
//! A client belongs to one process and one runtime: after a fork the child makes its own.
//!
//! Invariant: a request is sent a second time only where the node refused it before it began (429,
//! 503), where nothing of it was written because the kept connection was closed already, or where a
//! kept connection breaks before there is an answer and the request is [`Call::repeatable`]. Any
//! other that breaks may have been carried out, and its error says that nobody knows. HTTP allows to
//! send a DELETE or PUT again, because twice has the effect of once (RFC 9110, 9.2.2). That holds
//! only if nobody else writes: a second DELETE removes what another client wrote after the first.

use crate::{
    answer::Answer,
    dial::{Io, Trust, dial},
    failure::{Failure, Result, chain},
};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, sync::Mutex};
use forebay_protocol::{
    Address, ErrorDocument, INFO_PATH,
    node::NodeInfo,
    path::{encode, encode_key},
};
use futures::{Stream, StreamExt, future::BoxFuture};
use http::{HeaderName, HeaderValue, Method, header};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use std::{
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::OnceCell,
    time::{Instant, timeout},
};

type RequestBody = UnsyncBoxBody<Bytes, io::Error>;
pub(crate) type Sender = http1::SendRequest<RequestBody>;

/// How many idle connections are kept.
const IDLE_CONNECTIONS_MAX: usize = 32;
/// How long a kept connection may take to become ready: by then its task has seen the end of the
/// last answer, or something is wrong with it.
const READY_TIMEOUT: Duration = Duration::from_millis(100);
/// Finding the Unix socket is an optimization: it must not delay the first request for longer.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest answer to the question which node this is.
const INFO_MAX_BYTES: usize = 64 << 10;
/// How much is read of an error's body.
const ERROR_MAX_BYTES: usize = 256 << 10;
/// The connection's buffer: the most that one piece of a body holds.
const CONNECTION_BUFFER_BYTES: usize = 1 << 20;
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// How long to wait without any progress. None of these bounds a whole transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// For a connection, TLS handshake included.
    pub connect: Duration,
    /// For the head of an answer, counted from when the request was sent; an upload that is moving
    /// counts as progress.
    pub answer: Duration,
    /// Between two pieces of a body.
    pub silence: Duration,
    /// The total time spent retrying after being told to come back later (429, 503); zero: the
    /// first refusal is the answer.
    pub refused: Duration,
}

impl Timeouts {
    /// The same `limit` for each of them.
    pub fn all(limit: Duration) -> Self {
        Timeouts {
            connect: limit,
            answer: limit,
            silence: limit,
            refused: limit,
        }
    }
}

/// Starts the node behind a Unix socket, if nobody is serving it.
pub trait StartNode: Send + Sync {
    /// Returns once somebody is listening there.
    ///
    /// # Errors
    /// Why no node could be started.
    fn start(&self) -> BoxFuture<'_, forebay_core::Result<()>>;
}

/// What a client is made from.
#[derive(Clone)]
pub struct Settings {
    /// Where the node is.
    pub address: Address,
    /// The token sent with each request.
    pub token: Option<Arc<str>>,
    /// A PEM file with the authorities to trust at an `https://` address; without it, the system's.
    pub ca: Option<PathBuf>,
    /// `program/version`.
    pub user_agent: &'static str,
    /// How long the client waits.
    pub timeouts: Timeouts,
    /// Whether to look for the node's Unix socket, if the address is not one.
    pub find_socket: bool,
    /// Called to start a node when nobody listens at the Unix socket that the address names.
    pub starter: Option<Arc<dyn StartNode>>,
}

impl Settings {
    /// For the node at `address`, as `user_agent`, with a minute for each wait and defaults
    /// otherwise.
    pub fn new(address: Address, user_agent: &'static str) -> Self {
        Settings {
            address,
            token: None,
            ca: None,
            user_agent,
            timeouts: Timeouts::all(Duration::from_secs(60)),
            find_socket: false,
            starter: None,
        }
    }
}

/// A request that can be sent more than once.
#[derive(Clone, Debug)]
pub struct Call {
    /// GET, POST and so on.
    pub method: Method,
    /// Path and query, percent-encoded.
    pub path: String,
    /// Its own headers, besides those that each request has.
    pub headers: Vec<(HeaderName, String)>,
    /// Empty: no body.
    pub body: Bytes,
    /// It changes nothing that somebody else may have changed in between, so that it may be carried
    /// out twice.
    pub repeatable: bool,
}

impl Call {
    /// Without headers of its own and without a body; repeatable where the method only reads.
    pub fn new(method: Method, path: impl Into<String>) -> Self {
        Call {
            repeatable: method.is_safe(),
            method,
            path: path.into(),
            headers: Vec::new(),
            body: Bytes::new(),
        }
    }

    /// A question, although its method is POST.
    pub fn repeatable(self) -> Self {
        Call {
            repeatable: true,
            ..self
        }
    }

    /// With one more header.
    pub fn header(mut self, name: HeaderName, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Sets the body.
    pub fn body(self, content_type: &str, body: impl Into<Bytes>) -> Self {
        Call {
            body: body.into(),
            ..self
        }
        .header(header::CONTENT_TYPE, content_type)
    }

    /// Sets a body that is already JSON.
    pub fn json(self, body: impl Into<Bytes>) -> Self {
        self.body("application/json", body)
    }
}

/// The connections to one node. Cheap to clone; all clones share them.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    settings: Settings,
    /// `Bearer …`.
    authorization: Option<HeaderValue>,
    host: HeaderValue,
    trust: Trust,
    idle: Mutex<Vec<Sender>>,
    local_socket: OnceCell<Option<Address>>,
}

impl Client {
    /// Makes a client, which connects at the first call.
    ///
    /// # Errors
    /// `NotSent` for a token that HTTP cannot carry.
    pub fn new(settings: Settings) -> Result<Client> {
        let authorization = match &settings.token {
            None => None,
            Some(token) => {
                let value = HeaderValue::try_from(format!("Bearer {token}"));
                let mut value = value
                    .map_err(|_| not_sent("the token holds characters that HTTP cannot carry"))?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        let host = HeaderValue::try_from(settings.address.authority())
            .map_err(|_| not_sent("the address holds characters that HTTP cannot carry"))?;
        Ok(Client(Arc::new(Inner {
            authorization,
            host,
            trust: Trust::new(settings.ca.clone()),
            idle: Mutex::default(),
            local_socket: OnceCell::new(),
            settings,
        })))
    }

    /// The address that the client was made with.
    pub fn address(&self) -> &Address {
        &self.0.settings.address
    }

    /// How the node is reached: the given address, or the Unix socket that was found.
    pub fn route(&self) -> &Address {
        self.found_socket().unwrap_or(self.address())
    }

    /// How long the client waits.
    pub fn timeouts(&self) -> &Timeouts {
        &self.0.settings.timeouts
    }

    fn found_socket(&self) -> Option<&Address> {
        self.0.local_socket.get().and_then(Option::as_ref)
    }

    /// Sends a request, again and again while the node answers 429 or 503, for as long as
    /// [`Timeouts::refused`]. The returned answer is a success.
    ///
    /// # Errors
    /// See [`Failure`].
    pub async fn call(&self, call: &Call) -> Result<Answer> {
        let deadline = Instant::now() + self.timeouts().refused;
        let mut backoff = BACKOFF_FIRST;
        loop {
            let failure = match self.call_once(call).await {
                Err(failure) if failure.is_refusal() => failure,
                done => return done,
            };
            let pause = failure.retry_after().unwrap_or(backoff).max(BACKOFF_FIRST);
            if deadline.saturating_duration_since(Instant::now()) < pause {
                return Err(failure);
            }
            tokio::time::sleep(pause).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    /// One attempt. (If a kept connection turns out to be closed, it makes a new one.)
    async fn call_once(&self, call: &Call) -> Result<Answer> {
        self.find_socket().await?;
        let mut kept = self.take_idle().await;
        loop {
            let was_kept = kept.is_some();
            let mut sender = match kept.take() {
                Some(sender) => sender,
                None => self.connect().await?,
            };
            let request = self.request(call, full(call.body.clone()))?;
            match timeout(self.timeouts().answer, sender.try_send_request(request)).await {
                Err(_) => return Err(self.no_answer(call)),
                Ok(Ok(response)) => return self.accept(call, response, sender).await,
                Ok(Err(mut e)) => {
                    // It comes back only if nothing of it was written.
                    let unsent = e.take_message().is_some();
                    if was_kept && (unsent || call.repeatable) {
                        continue;
                    }
                    return Err(self.broken((!unsent).then_some(call), e.into_error()));
                }
            }
        }
    }

    /// Sends a body that can be read only once, and so makes only one attempt; `call` holds the
    /// rest of the request. A body that ends in an error breaks the request off.
    ///
    /// # Errors
    /// See [`Failure`].
    pub async fn upload(
        &self,
        call: &Call,
        length: Option<u64>,
        body: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    ) -> Result<Answer> {
        self.find_socket().await?;
        let mut sender = self.connect().await?;
        let taken = Arc::new(AtomicU64::new(0));
        let counter = taken.clone();
        let pieces = body.map(move |piece| {
            counter.fetch_add(1, Ordering::Relaxed);
            piece.map(hyper::body::Frame::data)
        });
        let body = BodyExt::boxed_unsync(StreamBody::new(pieces));
        let mut request = self.request(call, body)?;
        if let Some(length) = length {
            let length = HeaderValue::from(length);
            request.headers_mut().insert(header::CONTENT_LENGTH, length);
        }
        let mut response = std::pin::pin!(sender.send_request(request));
        let mut seen = 0;
        loop {
            match timeout(self.timeouts().answer, response.as_mut()).await {
                Ok(done) => {
                    let response = done.map_err(|e| self.broken(Some(call), e))?;
                    return self.accept(call, response, sender).await;
                }
                Err(_) => match taken.load(Ordering::Relaxed) {
                    now if now == seen => return Err(self.no_answer(call)),
                    now => seen = now,
                },
            }
        }
    }

    fn request(&self, call: &Call, body: RequestBody) -> Result<http::Request<RequestBody>> {
        let inner = &*self.0;
        let mut request = http::Request::builder()
            .method(&call.method)
            .uri(&call.path)
            .header(header::HOST, &inner.host)
            .header(header::USER_AGENT, inner.settings.user_agent);
        for (name, value) in &call.headers {
            request = request.header(name, value);
        }
        if let Some(value) = &inner.authorization {
            request = request.header(header::AUTHORIZATION, value);
        }
        request
            .body(body)
            .map_err(|e| not_sent(format!("the request is not valid: {e}")))
    }

    async fn accept(
        &self,
        call: &Call,
        response: http::Response<Incoming>,
        sender: Sender,
    ) -> Result<Answer> {
        let mut answer = Answer::new(self.clone(), response, sender);
        if answer.status.is_success() {
            return Ok(answer);
        }
        let text = match call.method {
            Method::HEAD => Bytes::new(),
            // If the answer cannot be read, its status says enough.
            _ => answer.collect(ERROR_MAX_BYTES).await.unwrap_or_default(),
        };
        let header = |name: &'static str| answer.header(name);
        let said = ErrorDocument::read(answer.status.as_u16(), header, &text);
        Err(Failure::Refused(Box::new(said)))
    }

    /// A kept connection that still looks alive.
    async fn take_idle(&self) -> Option<Sender> {
        loop {
            let mut sender = self.0.idle.lock().pop()?;
            if let Ok(Ok(())) = timeout(READY_TIMEOUT, sender.ready()).await {
                return Some(sender);
            }
        }
    }

    pub(crate) fn give_idle(&self, sender: Sender) {
        if !sender.is_closed() {
            let mut idle = self.0.idle.lock();
            if idle.len() < IDLE_CONNECTIONS_MAX {
                idle.push(sender);
            }
        }
    }

    async fn connect(&self) -> Result<Sender> {
        handshake(self.dial().await?).await
    }

    /// A new connection, before any HTTP.
    ///
    /// # Errors
    /// `Unreachable` and `TimedOut` if no connection could be made; `NotSent` for a certificate
    /// that is not trusted.
    pub async fn dial(&self) -> Result<Box<dyn Io>> {
        let settings = &self.0.settings;
        let to = |address| dial(address, &self.0.trust, settings.timeouts.connect);
        if let Some(socket) = self.found_socket()
            && let Ok(io) = to(socket).await
        {
            return Ok(io);
        }
        // If a socket was found, the way over TCP remains.
        match (to(&settings.address).await, &settings.starter) {
            (Err(Failure::Unreachable(_)), Some(starter)) => {
                starter.start().await.map_err(Failure::NotSent)?;
                to(&settings.address).await
            }
            (dialled, _) => dialled,
        }
    }

    /// The headers of each request besides its own, for callers that dial themselves.
    pub(crate) fn request_headers(&self) -> Vec<(HeaderName, HeaderValue)> {
        let inner = &*self.0;
        let user_agent = HeaderValue::from_static(inner.settings.user_agent);
        let mut headers = vec![
            (header::HOST, inner.host.clone()),
            (header::USER_AGENT, user_agent),
        ];
        let authorization = inner.authorization.iter();
        headers.extend(authorization.map(|value| (header::AUTHORIZATION, value.clone())));
        headers
    }

    /// Asks the node, once, whether it has a Unix socket on this machine, if the settings say so.
    /// Whatever the node answers is not an error.
    ///
    /// # Errors
    /// If the node cannot be reached at all.
    pub async fn find_socket(&self) -> Result<()> {
        let settings = &self.0.settings;
        if !settings.find_socket || matches!(settings.address, Address::Unix(_)) {
            return Ok(());
        }
        let found = self.0.local_socket.get_or_try_init(|| async {
            let mut over_tcp = self.connect().await?;
            let Some(info) = self.ask_info(&mut over_tcp).await else {
                return Ok(None);
            };
            // Containers may share a kernel but not a file system, and behind a tunnel a path may
            // belong to another machine: it must be the same node.
            if let Some(socket) = local_socket(&info)
                && let Ok(io) = dial(&socket, &self.0.trust, DISCOVERY_TIMEOUT).await
                && let Ok(mut over_unix) = handshake(io).await
                && let Some(there) = self.ask_info(&mut over_unix).await
                && there.node_id == info.node_id
            {
                self.give_idle(over_unix);
                return Ok(Some(socket));
            }
            self.give_idle(over_tcp);
            Ok(None)
        });
        found.await.map(|_| ())
    }

    async fn ask_info(&self, sender: &mut Sender) -> Option<NodeInfo> {
        let call = Call::new(Method::GET, INFO_PATH);
        let request = self.request(&call, full(Bytes::new())).ok()?;
        let asked = timeout(DISCOVERY_TIMEOUT, async {
            let response = sender.send_request(request).await.ok()?;
            if !response.status().is_success() {
                return None;
            }
            let body = http_body_util::Limited::new(response.into_body(), INFO_MAX_BYTES);
            let body = body.collect().await.ok()?.to_bytes();
            serde_json::from_slice(&body).ok()
        });
        asked.await.ok()?
    }

    fn no_answer(&self, call: &Call) -> Failure {
        Failure::TimedOut(Error::timeout(format!(
            "{} did not answer in {} s{}",
            self.route(),
            self.timeouts().answer.as_secs_f32(),
            unknown_outcome(call)
        )))
    }

    /// `sent` is the call, if any of it was written.
    fn broken(&self, sent: Option<&Call>, e: hyper::Error) -> Failure {
        // The request's own body failed: the node did not have all of it.
        let (kind, outcome) = if e.is_user() {
            (ErrorKind::Internal, String::new())
        } else {
            let outcome = sent.map(unknown_outcome).unwrap_or_default();
            (ErrorKind::OriginUnavailable, outcome)
        };
        let message = format!("{}: {}{outcome}", self.route(), chain(&e));
        Failure::Broken(Error::new(kind, message).caused_by(e))
    }
}

/// What the error of a request without an answer says beside the reason.
fn unknown_outcome(call: &Call) -> String {
    match call.repeatable {
        true => String::new(),
        false => format!(
            "; it is not known whether the {} was carried out",
            call.method
        ),
    }
}

/// The path of an object in the API for objects.
pub fn object_path(bucket: &str, key: &str) -> String {
    format!("/v1/objects/{}/{}", encode(bucket), encode_key(key))
}

fn not_sent(why: impl Into<String>) -> Failure {
    Failure::NotSent(Error::invalid(why))
}

fn full(body: Bytes) -> RequestBody {
    Full::new(body)
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// The node's socket, if the node says that it runs on this machine.
fn local_socket(info: &NodeInfo) -> Option<Address> {
    let socket = info.unix_socket.as_deref().filter(|s| !s.is_empty())?;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    (forebay_protocol::node::host_id(&boot) == info.host_id)
        .then(|| Address::Unix(PathBuf::from(socket)))
}

async fn handshake(io: Box<dyn Io>) -> Result<Sender> {
    let (sender, connection) = http1::Builder::new()
        .max_buf_size(CONNECTION_BUFFER_BYTES)
        .handshake(TokioIo::new(io))
        .await
        .map_err(|e| {
            let message = format!("the connection broke: {}", chain(&e));
            Failure::Broken(Error::origin_unavailable(message).caused_by(e))
        })?;
    tokio::spawn(async move {
        // Whoever waits for an answer on it sees its end.
        let _ = connection.await;
    });
    Ok(sender)
}
