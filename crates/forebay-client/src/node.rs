//! HTTP/1.1 to one node, over connections that are kept alive in a small pool.
//!
//! To find the Unix socket of a node on the same machine, it is asked over TCP, once: a plain copy
//! over the socket is several times faster than over loopback TCP. The socket is used only if it
//! leads to that same node, and TCP remains if the socket goes away.

use crate::{
    answer::Answer,
    borrowed::{self, Borrowed},
    client::{Call, Settings},
    dial::{Io, Trust, dial, named},
    failure::{Failure, Missed, Result, chain},
};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, sync::Mutex};
use forebay_protocol::{Address, ErrorDocument, INFO_PATH, lent::UPGRADE, node::NodeInfo};
use futures::{Stream, StreamExt};
use http::{HeaderName, HeaderValue, Method, StatusCode, header};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use std::{
    fmt, io,
    net::SocketAddr,
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

pub(crate) type RequestBody = UnsyncBoxBody<Bytes, io::Error>;
pub(crate) type Sender = http1::SendRequest<RequestBody>;

/// How many idle connections are kept.
const IDLE_CONNECTIONS_MAX: usize = 32;
/// How long a kept connection may take to become ready: by then its task has seen the end of the
/// last answer, or something is wrong with it.
const READY_TIMEOUT: Duration = Duration::from_millis(100);
/// Finding the Unix socket is an optimization: it must not delay the first request for longer.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(2);
/// So is to borrow a file.
const BORROW_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a node may be silent before one looks whether it is there at all, where another one
/// could be asked.
pub(crate) const SILENT_AFTER: Duration = Duration::from_secs(5);
/// The longest answer to the question which node this is.
const INFO_MAX_BYTES: usize = 64 << 10;
/// How much is read of an error's body.
const ERROR_MAX_BYTES: usize = 256 << 10;
/// The connection's buffer: the most that one piece of a body holds.
const CONNECTION_BUFFER_BYTES: usize = 1 << 20;

/// What the nodes of a client have in common.
pub(crate) struct Common {
    pub settings: Settings,
    /// `Bearer …`.
    authorization: Option<HeaderValue>,
    trust: Trust,
}

impl Common {
    pub fn new(settings: Settings) -> Result<Self> {
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
        Ok(Common {
            authorization,
            trust: Trust::new(settings.ca.clone()),
            settings,
        })
    }
}

/// The connections to one node.
pub(crate) struct Node {
    common: Arc<Common>,
    address: Address,
    /// Which of the addresses that a name leads to; `None`: whichever the system takes.
    at: Option<SocketAddr>,
    host: HeaderValue,
    idle: Mutex<Vec<Sender>>,
    local_socket: OnceCell<Option<Address>>,
    health: Mutex<Health>,
}

/// Whether a node answers.
#[derive(Clone, Copy, Default)]
struct Health {
    failed: Option<Instant>,
    probing: bool,
}

/// The node as messages name it: how it is reached.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.found_socket() {
            Some(socket) => socket.fmt(f),
            None => f.write_str(&named(&self.address, self.at)),
        }
    }
}

impl Node {
    pub fn new(common: Arc<Common>, address: Address, at: Option<SocketAddr>) -> Result<Node> {
        let host = HeaderValue::try_from(address.authority())
            .map_err(|_| not_sent("the address holds characters that HTTP cannot carry"))?;
        Ok(Node {
            common,
            address,
            at,
            host,
            idle: Mutex::default(),
            local_socket: OnceCell::new(),
            health: Mutex::default(),
        })
    }

    /// The address as it was given, and which of those that its name leads to.
    pub fn key(&self) -> (&Address, Option<SocketAddr>) {
        (&self.address, self.at)
    }

    pub fn settings(&self) -> &Settings {
        &self.common.settings
    }

    /// Whether it was found to be on this machine.
    pub fn has_socket(&self) -> bool {
        self.found_socket().is_some()
    }

    fn found_socket(&self) -> Option<&Address> {
        self.local_socket.get().and_then(Option::as_ref)
    }

    // Whether it answers

    /// When it failed, unless it has answered since.
    pub fn failed(&self) -> Option<Instant> {
        self.health.lock().failed
    }

    /// Notes that it failed; false if that was known.
    pub fn fails(&self) -> bool {
        let before = self.health.lock().failed.replace(Instant::now());
        // What is kept is broken too, or will be.
        if before.is_none() {
            self.close_idle();
        }
        before.is_none()
    }

    /// Closes the connections that nobody uses.
    pub fn close_idle(&self) {
        self.idle.lock().clear();
    }

    /// Notes that it answered; false if nothing else was known.
    pub fn works(&self) -> bool {
        self.health.lock().failed.take().is_some()
    }

    /// Whether it failed at least this long ago and nobody is looking: the caller then does.
    pub fn claim_probe(&self, after: Duration) -> bool {
        let mut health = self.health.lock();
        let due = !health.probing && health.failed.is_some_and(|at| at.elapsed() >= after);
        health.probing |= due;
        due
    }

    /// Whether it answers a request that costs nothing.
    pub async fn answers(&self, limit: Duration) -> bool {
        let answered = async {
            let mut sender = self.connect(limit).await.ok()?;
            let request = self.request(&Call::new(Method::GET, INFO_PATH), full(Bytes::new()));
            let asked = timeout(DISCOVERY_TIMEOUT, sender.send_request(request.ok()?));
            let status = asked.await.ok()?.ok()?.status();
            (status != StatusCode::SERVICE_UNAVAILABLE).then_some(())
        };
        answered.await.is_some()
    }

    /// Returns when it is silent for so long and does not answer anything else either.
    pub async fn is_gone(&self, after: Duration, limit: Duration) {
        loop {
            tokio::time::sleep(after).await;
            // Boxed: it is large, and whoever waits for this seldom comes here.
            if !Box::pin(self.answers(limit)).await {
                return;
            }
        }
    }

    /// Looks whether it answers again. The caller has claimed this.
    pub async fn probe(&self, limit: Duration) -> bool {
        let answers = self.answers(limit).await;
        let mut health = self.health.lock();
        health.probing = false;
        health.failed = match answers {
            true => None,
            false => Some(Instant::now()),
        };
        answers
    }

    /// Whether it says that it runs on this machine.
    pub async fn is_here(&self) -> bool {
        let limit = self.settings().timeouts.connect.min(DISCOVERY_TIMEOUT);
        self.find_socket(limit).await.is_ok() && self.found_socket().is_some()
    }

    // Calls

    /// One attempt. (If a kept connection turns out to be closed, it makes a new one, which may take
    /// `limit`.) `has_others`: if the node is silent, look whether it is there at all; one whose
    /// machine is gone closes no connection.
    pub async fn call(
        self: &Arc<Self>,
        call: &Call,
        limit: Duration,
        has_others: bool,
    ) -> Result<Answer, Missed> {
        self.find_socket(limit).await?;
        let mut kept = self.take_idle().await;
        loop {
            let was_kept = kept.is_some();
            let mut sender = match kept.take() {
                Some(sender) => sender,
                None => self.connect(limit).await?,
            };
            let request = self.request(call, full(call.body.clone()));
            let sent = sender.try_send_request(request.map_err(Missed::here)?);
            let is_gone = async {
                match has_others && call.repeatable {
                    true => self.is_gone(SILENT_AFTER, limit).await,
                    false => std::future::pending().await,
                }
            };
            let answered = tokio::select! {
                answered = timeout(self.settings().timeouts.answer, sent) => answered,
                () = is_gone => return Err(Missed::elsewhere(self.gone())),
            };
            match answered {
                Err(_) => return Err(Missed::here(self.no_answer(call))),
                Ok(Ok(response)) => return self.accept(call, response, sender).await,
                Ok(Err(mut e)) => {
                    // It comes back only if nothing of it was written.
                    let unsent = e.take_message().is_some();
                    if was_kept && (unsent || call.repeatable) {
                        continue;
                    }
                    return Err(Missed {
                        failure: self.broken((!unsent).then_some(call), e.into_error()),
                        elsewhere: unsent || call.repeatable,
                    });
                }
            }
        }
    }

    /// What a GET names as an open file, if the node is on this machine and lends it.
    pub async fn borrow(&self, call: &Call, limit: Duration) -> Option<Borrowed> {
        self.find_socket(limit).await.ok()?;
        let Address::Unix(socket) = self.found_socket().unwrap_or(&self.address) else {
            return None;
        };
        let call = call
            .clone()
            .header(header::CONNECTION, "upgrade")
            .header(header::UPGRADE, UPGRADE)
            // A node that does not lend it is to send next to nothing.
            .header(header::RANGE, "bytes=0-0");
        let request = self.request(&call, full(Bytes::new())).ok()?;
        let asked = timeout(
            self.settings().timeouts.answer.min(BORROW_TIMEOUT),
            borrowed::ask(socket, request),
        );
        asked.await.ok()?.ok()
    }

    /// A new connection for [`Node::upload`]: until it is used, another node will do as well.
    pub async fn open(&self, limit: Duration) -> Result<Sender, Missed> {
        self.find_socket(limit).await?;
        self.connect(limit).await
    }

    /// Sends a body that can be read only once.
    pub async fn upload(
        self: &Arc<Self>,
        mut sender: Sender,
        call: &Call,
        length: Option<u64>,
        body: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    ) -> Result<Answer> {
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
            match timeout(self.settings().timeouts.answer, response.as_mut()).await {
                Ok(done) => {
                    let response = done.map_err(|e| self.broken(Some(call), e))?;
                    let accepted = self.accept(call, response, sender).await;
                    return accepted.map_err(|missed| missed.failure);
                }
                Err(_) => match taken.load(Ordering::Relaxed) {
                    now if now == seen => return Err(self.no_answer(call)),
                    now => seen = now,
                },
            }
        }
    }

    fn request(&self, call: &Call, body: RequestBody) -> Result<http::Request<RequestBody>> {
        let mut request = http::Request::builder()
            .method(&call.method)
            .uri(&call.path)
            .header(header::HOST, &self.host)
            .header(header::USER_AGENT, self.settings().user_agent);
        for (name, value) in &call.headers {
            request = request.header(name, value);
        }
        if let Some(value) = &self.common.authorization {
            request = request.header(header::AUTHORIZATION, value);
        }
        request
            .body(body)
            .map_err(|e| not_sent(format!("the request is not valid: {e}")))
    }

    async fn accept(
        self: &Arc<Self>,
        call: &Call,
        response: http::Response<Incoming>,
        sender: Sender,
    ) -> Result<Answer, Missed> {
        let mut answer = Answer::new(self.clone(), response, sender);
        // Other servers, as a portal that one has to sign in at, answer to everything. (A node's
        // metrics are none of the API, and have no id; and only objects may be pages.)
        let is_page = || {
            let kind = answer.header("content-type").unwrap_or_default();
            !call.method.is_safe() && kind.starts_with("text/html")
        };
        let is_of_node = || ErrorDocument::is_of_node(|name| answer.header(name)) && !is_page();
        if answer.status.is_success() && (!call.path.starts_with("/v1/") || is_of_node()) {
            return Ok(answer);
        }
        let text = match call.method {
            Method::HEAD => Bytes::new(),
            // If the answer cannot be read, its status says enough.
            _ => answer.collect(ERROR_MAX_BYTES).await.unwrap_or_default(),
        };
        let header = |name: &'static str| answer.header(name);
        let said = ErrorDocument::read(&self.to_string(), answer.status.as_u16(), header, &text);
        Err(Missed {
            // It has not begun, and will not.
            elsewhere: said.kind() == ErrorKind::ShuttingDown,
            failure: Failure::Refused(Box::new(said)),
        })
    }

    /// A kept connection that still looks alive.
    async fn take_idle(&self) -> Option<Sender> {
        loop {
            let mut sender = self.idle.lock().pop()?;
            if let Ok(Ok(())) = timeout(READY_TIMEOUT, sender.ready()).await {
                return Some(sender);
            }
        }
    }

    pub fn give_idle(&self, sender: Sender) {
        if !sender.is_closed() {
            let mut idle = self.idle.lock();
            if idle.len() < IDLE_CONNECTIONS_MAX {
                idle.push(sender);
            }
        }
    }

    async fn connect(&self, limit: Duration) -> Result<Sender, Missed> {
        let io = self.dial(limit).await?;
        handshake(io).await.map_err(Missed::elsewhere)
    }

    /// A new connection, before any HTTP, made within `limit`.
    pub async fn dial(&self, limit: Duration) -> Result<Box<dyn Io>, Missed> {
        let trust = &self.common.trust;
        if let Some(socket) = self.found_socket()
            && let Ok(io) = dial(socket, None, trust, limit).await
        {
            return Ok(io);
        }
        // If a socket was found, the way over TCP remains.
        let dialled = dial(&self.address, self.at, trust, limit).await;
        let refused = |e| Missed::here(Failure::NotSent(e));
        let starter = self.settings().starter.as_ref();
        let dialled = match (dialled, starter) {
            (Err(Failure::Unreachable(_)), Some(starter)) => {
                starter.start().await.map_err(refused)?;
                dial(&self.address, self.at, trust, limit).await
            }
            (dialled, _) => dialled,
        };
        if let Some(starter) = starter.filter(|_| dialled.is_ok()) {
            starter.check().await.map_err(refused)?;
        }
        dialled.map_err(|failure| Missed {
            elsewhere: !matches!(failure, Failure::NotSent(_)),
            failure,
        })
    }

    /// The headers of each request besides its own, for callers that dial themselves.
    pub fn request_headers(&self) -> Vec<(HeaderName, HeaderValue)> {
        let user_agent = HeaderValue::from_static(self.settings().user_agent);
        let mut headers = vec![
            (header::HOST, self.host.clone()),
            (header::USER_AGENT, user_agent),
        ];
        let authorization = self.common.authorization.iter();
        headers.extend(authorization.map(|value| (header::AUTHORIZATION, value.clone())));
        headers
    }

    /// Asks the node, once, whether it has a Unix socket on this machine, if the settings say so.
    /// Only if it cannot be reached at all is that an error.
    pub async fn find_socket(&self, limit: Duration) -> Result<(), Missed> {
        if !self.settings().find_socket || matches!(self.address, Address::Unix(_)) {
            return Ok(());
        }
        let found = self.local_socket.get_or_try_init(|| async {
            let mut over_tcp = self.connect(limit).await?;
            let Some(info) = self.ask_info(&mut over_tcp).await else {
                return Ok(None);
            };
            // Containers may share a kernel but not a file system, and behind a tunnel a path may
            // belong to another machine: it must be the same node.
            if let Some(socket) = local_socket(&info)
                && let Ok(io) = dial(&socket, None, &self.common.trust, DISCOVERY_TIMEOUT).await
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

    fn gone(&self) -> Failure {
        let silent = SILENT_AFTER.as_secs();
        Failure::TimedOut(Error::timeout(format!(
            "{self} was silent for {silent} s and does not answer anything else"
        )))
    }

    fn no_answer(&self, call: &Call) -> Failure {
        Failure::TimedOut(Error::timeout(format!(
            "{self} did not answer in {} s{}",
            self.settings().timeouts.answer.as_secs_f32(),
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
        let message = format!("{self}: {}{outcome}", chain(&e));
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
