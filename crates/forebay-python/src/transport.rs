//! HTTP/1.1 to the node, over TCP, TLS or its Unix socket.
//!
//! Connections are kept alive in a small pool and belong to one process (see
//! [`process`](crate::process)). A node on the same machine is found by asking it over TCP where
//! its socket is, once per process; the socket is used only if it leads to that same node, and TCP
//! remains the way back when the socket goes away. `timeout` bounds each stretch without progress
//! (connecting, waiting for the answer, between bytes), and the total time spent on being told to
//! come back later (429, 503).

use crate::{
    address::{Address, local_socket},
    embedded::Engine,
    failure::{Class, Failure, Result},
    sync::Mutex,
};
use bytes::Bytes;
use forebay_core::ErrorKind;
use forebay_protocol::node::NodeInfo;
use forebay_stream::Io;
use forebay_tls::ClientTls;
use futures::stream::BoxStream;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    net::{TcpStream, UnixStream},
    sync::OnceCell,
    time::{Instant, timeout},
};

type RequestBody = BoxBody<Bytes, io::Error>;
type Sender = http1::SendRequest<RequestBody>;

/// Idle connections that are kept.
const IDLE_CONNECTIONS_MAX: usize = 32;
/// Finding the Unix socket is an optimization: it may not hold up the first request for longer.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(2);
/// Largest error body, or other short answer, that is read.
const SHORT_ANSWER_MAX_BYTES: usize = 16 << 20;
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// A request that can be sent more than once.
#[derive(Clone)]
pub struct Call {
    pub method: Method,
    /// Path and query, percent-encoded.
    pub path: String,
    pub headers: Vec<(HeaderName, String)>,
    pub body: Bytes,
}

impl Call {
    pub fn new(method: Method, path: String) -> Self {
        Call {
            method,
            path,
            headers: Vec::new(),
            body: Bytes::new(),
        }
    }

    pub fn header(mut self, name: HeaderName, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    pub fn json(self, body: impl Into<Bytes>) -> Self {
        Call {
            body: body.into(),
            ..self
        }
        .header(header::CONTENT_TYPE, "application/json")
    }
}

/// The connections of one client in one process.
pub struct Transport {
    address: Address,
    /// The engine behind `address` that this process starts if nobody answers there.
    engine: Option<Engine>,
    token: Option<Arc<str>>,
    ca: Option<String>,
    tls: OnceCell<ClientTls>,
    timeout: Duration,
    idle: Mutex<Vec<Sender>>,
    local_socket: OnceCell<Option<PathBuf>>,
}

impl Transport {
    pub fn new(
        address: Address,
        engine: Option<Engine>,
        token: Option<Arc<str>>,
        ca: Option<String>,
        timeout: Duration,
    ) -> Arc<Self> {
        Arc::new(Transport {
            address,
            engine,
            token,
            ca,
            tls: OnceCell::new(),
            timeout,
            idle: Mutex::default(),
            local_socket: OnceCell::new(),
        })
    }

    /// How the node is reached, for people: `unix:/path`, `http://host:port` or
    /// `https://host:port`.
    pub fn route(&self) -> String {
        let local = self.local_socket.get().and_then(|s| s.as_ref());
        match (self.address.unix.as_ref().or(local), &self.address.tcp) {
            (Some(path), _) => format!("unix:{}", path.display()),
            (None, tcp) => format!(
                "{}://{}",
                self.address.scheme(),
                tcp.as_deref().unwrap_or_default()
            ),
        }
    }

    /// Sends, and sends again while the node says 429 or 503, until `timeout` is over. The answer
    /// is a success.
    pub async fn call(self: &Arc<Self>, call: &Call) -> Result<Answer> {
        let deadline = Instant::now() + self.timeout;
        let mut backoff = BACKOFF_FIRST;
        loop {
            let failure = match self.call_once(call).await {
                Err(failure) if failure.is_refusal() => failure,
                done => return done,
            };
            let pause = failure.retry_after.unwrap_or(backoff).max(BACKOFF_FIRST);
            if Instant::now() + pause > deadline {
                return Err(failure);
            }
            tokio::time::sleep(pause).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    /// One attempt. (A second connection is made where a kept one turns out to be closed.)
    async fn call_once(self: &Arc<Self>, call: &Call) -> Result<Answer> {
        self.find_local_socket().await?;
        let mut kept = self.take_idle().await;
        loop {
            let was_kept = kept.is_some();
            let mut sender = match kept.take() {
                Some(sender) => sender,
                None => self.connect().await?,
            };
            let body = Full::new(call.body.clone())
                .map_err(|never| match never {})
                .boxed();
            let request = self.request(&call.method, &call.path, &call.headers, body)?;
            match timeout(self.timeout, sender.send_request(request)).await {
                Err(_) => return Err(self.no_answer()),
                Ok(Ok(response)) => {
                    return self
                        .accept(response, sender, call.method == Method::HEAD)
                        .await;
                }
                Ok(Err(_)) if was_kept => continue,
                Ok(Err(e)) => return Err(self.broken(e)),
            }
        }
    }

    /// Sends a body that can be read once, so without a second attempt.
    pub async fn upload(
        self: &Arc<Self>,
        call: &Call,
        length: Option<u64>,
        body: BoxStream<'static, io::Result<Bytes>>,
    ) -> Result<Answer> {
        use futures::StreamExt;
        self.find_local_socket().await?;
        let mut sender = self.connect().await?;
        let taken = Arc::new(AtomicU64::new(0));
        let counter = taken.clone();
        let pieces = body.map(move |piece| {
            counter.fetch_add(1, Ordering::Relaxed);
            piece.map(hyper::body::Frame::data)
        });
        let body = BodyExt::boxed(StreamBody::new(SyncStream(Mutex::new(StreamExt::boxed(
            pieces,
        )))));
        let mut request = self.request(&call.method, &call.path, &call.headers, body)?;
        if let Some(length) = length {
            request
                .headers_mut()
                .insert(header::CONTENT_LENGTH, HeaderValue::from(length));
        }
        let mut response = std::pin::pin!(sender.send_request(request));
        let mut seen = 0;
        loop {
            match timeout(self.timeout, response.as_mut()).await {
                Ok(done) => {
                    let response = done.map_err(|e| self.broken(e))?;
                    return self.accept(response, sender, false).await;
                }
                Err(_) => match taken.load(Ordering::Relaxed) {
                    now if now == seen => return Err(self.no_answer()),
                    now => seen = now,
                },
            }
        }
    }

    fn request(
        &self,
        method: &Method,
        path: &str,
        headers: &[(HeaderName, String)],
        body: RequestBody,
    ) -> Result<http::Request<RequestBody>> {
        let mut request = http::Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, self.address.authority())
            .header(
                header::USER_AGENT,
                concat!("forebay-python/", env!("CARGO_PKG_VERSION")),
            );
        for (name, value) in headers {
            request = request.header(name, value);
        }
        if let Some(token) = &self.token {
            let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| {
                Failure::invalid("the token holds characters that HTTP cannot carry")
            })?;
            value.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, value);
        }
        request
            .body(body)
            .map_err(|e| Failure::invalid(format!("not a valid request: {e}")))
    }

    async fn accept(
        self: &Arc<Self>,
        response: http::Response<Incoming>,
        sender: Sender,
        no_body: bool,
    ) -> Result<Answer> {
        let (head, body) = response.into_parts();
        let mut answer = Answer {
            status: head.status,
            headers: head.headers,
            body,
            lease: Some((self.clone(), sender)),
        };
        if answer.status.is_success() {
            return Ok(answer);
        }
        let text = if no_body {
            Bytes::new()
        } else {
            answer.collect().await.unwrap_or_default()
        };
        Err(Failure::from_answer(
            answer.status.as_u16(),
            &answer.headers,
            &text,
        ))
    }

    /// A kept connection that still looks alive.
    async fn take_idle(&self) -> Option<Sender> {
        loop {
            let mut sender = self.idle.lock().pop()?;
            // Ready as soon as the connection's task has seen the end of the last answer.
            if let Ok(Ok(())) = timeout(Duration::from_millis(100), sender.ready()).await {
                return Some(sender);
            }
        }
    }

    fn give_idle(&self, sender: Sender) {
        if !sender.is_closed() {
            let mut idle = self.idle.lock();
            if idle.len() < IDLE_CONNECTIONS_MAX {
                idle.push(sender);
            }
        }
    }

    async fn connect(&self) -> Result<Sender> {
        handshake(self.dial().await?).await
    }

    /// What each request carries, beside what it is about.
    pub fn request_headers(&self) -> Vec<(String, String)> {
        let mut headers = vec![
            ("host".to_owned(), self.address.authority().to_owned()),
            (
                "user-agent".to_owned(),
                concat!("forebay-python/", env!("CARGO_PKG_VERSION")).to_owned(),
            ),
        ];
        headers.extend(
            self.token
                .iter()
                .map(|token| ("authorization".to_owned(), format!("Bearer {token}"))),
        );
        headers
    }

    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A new connection, without HTTP on it.
    pub async fn dial(&self) -> Result<Box<dyn Io>> {
        let local = self.local_socket.get().and_then(|s| s.as_ref());
        if let Some(path) = self.address.unix.as_ref().or(local) {
            let mut connected = timeout(self.timeout, UnixStream::connect(path)).await;
            if let (Ok(Err(_)), Some(engine)) = (&connected, &self.engine) {
                engine.start().await?;
                connected = timeout(self.timeout, UnixStream::connect(path)).await;
            }
            match connected {
                Ok(Ok(stream)) => return Ok(Box::new(stream)),
                // The way over TCP remains.
                _ if self.address.tcp.is_some() => {}
                Ok(Err(e)) => {
                    return Err(Failure::connection(format!(
                        "cannot connect to unix:{}: {e}",
                        path.display()
                    ))
                    .hint(
                        "is the node running? forebay serve --origin s3://bucket --cache DIR:SIZE",
                    ));
                }
                Err(_) => return Err(self.no_answer()),
            }
        }
        let Some(authority) = &self.address.tcp else {
            return Err(Failure::connection("the node has no address"));
        };
        let scheme = self.address.scheme();
        match timeout(self.timeout, TcpStream::connect(authority.as_str())).await {
            Ok(Ok(stream)) => {
                stream
                    .set_nodelay(true)
                    .map_err(|e| Failure::connection(format!("{scheme}://{authority}: {e}")))?;
                if !self.address.tls {
                    return Ok(Box::new(stream));
                }
                let tls = self
                    .tls
                    .get_or_try_init(|| async { ClientTls::new(self.ca.as_deref().map(Path::new)) })
                    .await?;
                match timeout(self.timeout, tls.connect(self.address.host(), stream)).await {
                    Ok(Ok(stream)) => Ok(Box::new(stream)),
                    Ok(Err(e)) if e.kind() == ErrorKind::OriginUnavailable => Err(Failure {
                        class: Class::ConnectionFailed,
                        ..e.into()
                    }),
                    Ok(Err(e)) => Err(e.into()),
                    Err(_) => Err(self.no_answer()),
                }
            }
            Ok(Err(e)) => Err(Failure::connection(format!(
                "cannot connect to {scheme}://{authority}: {e}"
            ))
            .hint("is the node running? forebay serve --origin s3://bucket --cache DIR:SIZE")),
            Err(_) => Err(self.no_answer()),
        }
    }

    /// Asks the node, once, whether it is on this machine. Only a node that cannot be reached at
    /// all is an error.
    pub async fn find_local_socket(&self) -> Result<()> {
        if self.address.unix.is_some() {
            return Ok(());
        }
        let found = self.local_socket.get_or_try_init(|| async {
            let mut over_tcp = self.connect().await?;
            let Some(info) = self.ask_info(&mut over_tcp).await else {
                return Ok(None);
            };
            if let Some(path) = local_socket(&info)
                && let Ok(Ok(stream)) = timeout(DISCOVERY_TIMEOUT, UnixStream::connect(path)).await
                && let Ok(mut over_unix) = handshake(stream).await
                && self
                    .ask_info(&mut over_unix)
                    .await
                    .is_some_and(|there| there.node_id == info.node_id)
            {
                self.give_idle(over_unix);
                return Ok(Some(path.to_owned()));
            }
            self.give_idle(over_tcp);
            Ok(None)
        });
        found.await.map(|_| ())
    }

    async fn ask_info(&self, sender: &mut Sender) -> Option<NodeInfo> {
        let empty = Full::new(Bytes::new())
            .map_err(|never| match never {})
            .boxed();
        let request = self
            .request(&Method::GET, forebay_protocol::INFO_PATH, &[], empty)
            .ok()?;
        let response = timeout(DISCOVERY_TIMEOUT, sender.send_request(request))
            .await
            .ok()?
            .ok()?;
        if !response.status().is_success() {
            return None;
        }
        let body = timeout(
            DISCOVERY_TIMEOUT,
            http_body_util::Limited::new(response.into_body(), 64 << 10).collect(),
        )
        .await
        .ok()?
        .ok()?;
        serde_json::from_slice(&body.to_bytes()).ok()
    }

    fn no_answer(&self) -> Failure {
        Failure::timeout(format!(
            "{} did not answer in {} s",
            self.route(),
            self.timeout.as_secs_f32()
        ))
        .hint("raise timeout= or look at the node's log")
    }

    fn broken(&self, e: hyper::Error) -> Failure {
        Failure::connection(format!("{}: {}", self.route(), chain(&e)))
    }
}

/// An error with its causes.
fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut cause = e.source();
    while let Some(c) = cause {
        text.push_str(": ");
        text.push_str(&c.to_string());
        cause = c.source();
    }
    text
}

async fn handshake(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
) -> Result<Sender> {
    let (sender, connection) = http1::Builder::new()
        .max_buf_size(1 << 20)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|e| Failure::connection(format!("handshake: {e}")))?;
    tokio::spawn(async move {
        // Its end is seen by whoever waits for an answer on it.
        let _ = connection.await;
    });
    Ok(sender)
}

/// A successful answer whose body is still to be read.
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    body: Incoming,
    /// The connection, given back when the body has been read to its end, closed otherwise.
    lease: Option<(Arc<Transport>, Sender)>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|v| v.to_str().ok())
    }

    /// The `Content-Length`, if the answer has one.
    pub fn length(&self) -> Option<u64> {
        self.header("content-length").and_then(|v| v.parse().ok())
    }

    /// The next piece of the body; `None` at its proper end. A body that breaks off is an error.
    pub async fn piece(&mut self) -> Result<Option<Bytes>> {
        let limit = self
            .lease
            .as_ref()
            .map_or(Duration::from_secs(60), |(t, _)| t.timeout);
        loop {
            match timeout(limit, self.body.frame()).await {
                Err(_) => {
                    return Err(Failure::timeout(format!(
                        "no bytes for {} s in the middle of an answer",
                        limit.as_secs_f32()
                    )));
                }
                Ok(Some(Err(e))) => {
                    let mut failure =
                        Failure::truncated(format!("the answer broke off: {}", chain(&e)));
                    failure.request_id = self.header("x-request-id").map(str::to_owned);
                    return Err(failure);
                }
                Ok(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Ok(None) => {
                    if let Some((transport, sender)) = self.lease.take() {
                        transport.give_idle(sender);
                    }
                    return Ok(None);
                }
            }
        }
    }

    /// A short body, whole.
    pub async fn collect(&mut self) -> Result<Bytes> {
        let mut all = Vec::new();
        while let Some(piece) = self.piece().await? {
            if all.len() + piece.len() > SHORT_ANSWER_MAX_BYTES {
                return Err(Failure::connection(format!(
                    "an answer of more than {SHORT_ANSWER_MAX_BYTES} bytes where a short one was \
                     due"
                )));
            }
            all.extend_from_slice(&piece);
        }
        Ok(all.into())
    }
}

/// A stream behind a lock that nobody contends for: hyper asks bodies to be `Sync`.
struct SyncStream<T>(Mutex<BoxStream<'static, T>>);

impl<T> futures::Stream for SyncStream<T> {
    type Item = T;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<T>> {
        self.get_mut().0.get_mut().as_mut().poll_next(cx)
    }
}
