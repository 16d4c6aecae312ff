//! Requests to a node, or to whichever of several nodes answers.
//!
//! A client belongs to one process and one runtime: after a fork the child makes its own.
//!
//! Invariant: a request is sent a second time only where the node refused it before it began (429,
//! 503), where nothing of it was written (a kept connection was closed already, or none could be
//! made), or where the connection breaks before there is an answer and the request is
//! [`Call::repeatable`]: a kept one is then replaced, and after any other the request goes to
//! another node, if there are several. What breaks otherwise may have been carried out, and its
//! error says that nobody knows. HTTP allows to send a DELETE or PUT again, because twice has the
//! effect of once (RFC 9110, 9.2.2). That holds only if nobody else writes: a second DELETE removes
//! what another client wrote after the first.

use crate::{
    answer::Answer,
    borrowed::Borrowed,
    dial::Io,
    failure::{Missed, Result},
    node::Node,
    nodes::{Nodes, Resolve, System},
    owners::{self, Owners},
};
use bytes::Bytes;
use forebay_protocol::{
    Address, Addresses,
    path::{encode, encode_key},
};
use futures::{Stream, future::BoxFuture};
use http::{HeaderName, Method, header};
use std::{io, path::PathBuf, sync::Arc, time::Duration};
use tokio::time::Instant;

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

    /// Whether who listens there may answer, whoever started it. Asked after each connection.
    ///
    /// # Errors
    /// Why it may not.
    fn check(&self) -> BoxFuture<'_, forebay_core::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// What a client is made from.
#[derive(Clone)]
pub struct Settings {
    /// Where the node is, or several nodes that all answer the same.
    pub addresses: Addresses,
    /// The token sent with each request.
    pub token: Option<Arc<str>>,
    /// A PEM file with the authorities to trust at an `https://` address; without it, the system's.
    pub ca: Option<PathBuf>,
    /// `program/version`.
    pub user_agent: &'static str,
    /// How long the client waits.
    pub timeouts: Timeouts,
    /// Whether to look for a node's Unix socket, if its address is not one.
    pub find_socket: bool,
    /// Called to start a node when nobody listens at the Unix socket that the address names.
    pub starter: Option<Arc<dyn StartNode>>,
    /// Whether the first address is preferred, the second one after it, and so on. Otherwise a node
    /// on this machine is, and the others are in random order.
    pub in_order: bool,
    /// Whether entries of batches are asked of the nodes that own them ([`Client::owners`]);
    /// `None`: if no node is on this machine.
    pub direct: Option<bool>,
    /// What finds the addresses of names.
    pub resolver: Arc<dyn Resolve>,
}

impl Settings {
    /// For the node at this address, or one of several, as `user_agent`, with a minute for each
    /// wait and defaults otherwise.
    pub fn new(addresses: impl Into<Addresses>, user_agent: &'static str) -> Self {
        Settings {
            addresses: addresses.into(),
            token: None,
            ca: None,
            user_agent,
            timeouts: Timeouts::all(Duration::from_secs(60)),
            find_socket: false,
            starter: None,
            in_order: false,
            direct: None,
            resolver: Arc::new(System),
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

/// The connections to one node, or to several that all answer the same. Cheap to clone; all clones
/// share them.
#[derive(Clone)]
pub struct Client(Arc<Nodes>);

impl Client {
    /// Makes a client, which connects at the first call.
    ///
    /// # Errors
    /// `NotSent` for a token that HTTP cannot carry.
    pub fn new(settings: Settings) -> Result<Client> {
        Ok(Client(Arc::new(Nodes::new(settings)?)))
    }

    /// The address of the node that the next call goes to, as it was given.
    pub fn address(&self) -> Address {
        self.0.preferred().key().0.clone()
    }

    /// How that node is reached: the given address, or the Unix socket that was found.
    pub fn route(&self) -> String {
        self.0.preferred().to_string()
    }

    /// How long the client waits.
    pub fn timeouts(&self) -> &Timeouts {
        &self.0.settings().timeouts
    }

    /// How many nodes may be asked, as far as names are resolved.
    pub fn count(&self) -> usize {
        self.0.known().len()
    }

    /// How often calls moved to another node or back, or a node did not answer: if it is what it
    /// was, so is the node.
    pub fn moves(&self) -> u64 {
        self.0.moves()
    }

    /// [`Settings::direct`], as it was given.
    pub fn direct(&self) -> Option<bool> {
        self.0.settings().direct
    }

    /// If the nodes are a cluster: who owns what, where entries of batches are to be asked of
    /// owners. Waits for nothing: what is not known yet is looked for in the background.
    pub fn owners(&self) -> Option<Arc<Owners>> {
        owners::known(&self.0, self.0.settings())
    }

    /// If the nodes are a cluster, and none of them is on this machine: a client for each of at most so
    /// many members that answer, in random order, each of which goes on at this client's nodes if its
    /// member fails. Otherwise none. Waits until that is known.
    pub async fn members(&self, most: usize) -> Vec<Client> {
        owners::members(&self.0, self.0.settings(), most).await
    }

    pub(crate) fn nodes(&self) -> &Arc<Nodes> {
        &self.0
    }

    /// Sends a request, again and again while the node answers 429 or 503, for as long as
    /// [`Timeouts::refused`]. The returned answer is a success. If there are several nodes, the
    /// body of an object that breaks off is continued from another one.
    ///
    /// # Errors
    /// See [`Failure`](crate::Failure).
    pub async fn call(&self, call: &Call) -> Result<Answer> {
        let deadline = Instant::now() + self.timeouts().refused;
        let mut backoff = BACKOFF_FIRST;
        loop {
            let ask = |node: Arc<Node>, limit| async move {
                node.call(call, limit, self.count() > 1).await
            };
            let failure = match self.0.ask(ask).await {
                Err(failure) if failure.is_refusal() => failure,
                Ok(answer) if self.count() > 1 => return Ok(answer.resumed_by(self, call)),
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

    /// Calls `ask` again while an answer breaks off in the middle, at most once for each further
    /// node. What it asks must be repeatable; `is_cut` says whether that is how it failed.
    ///
    /// # Errors
    /// The last one of `ask`.
    pub async fn whole<T, E, Asked: Future<Output = Result<T, E>>>(
        &self,
        mut ask: impl FnMut() -> Asked,
        is_cut: impl Fn(&E) -> bool,
    ) -> Result<T, E> {
        let mut asked = 0;
        loop {
            asked += 1;
            match ask().await {
                Err(e) if asked < self.count() && is_cut(&e) => {}
                done => return done,
            }
        }
    }

    /// Sends a body that can be read only once, and so makes only one attempt, at a node to which
    /// there is a connection; `call` holds the rest of the request. A body that ends in an error
    /// breaks the request off.
    ///
    /// # Errors
    /// See [`Failure`](crate::Failure).
    pub async fn upload(
        &self,
        call: &Call,
        length: Option<u64>,
        body: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    ) -> Result<Answer> {
        let open = |node: Arc<Node>, limit| async move {
            let sender = node.open(limit).await?;
            Ok::<_, Missed>((node, sender))
        };
        let (node, sender) = self.0.ask(open).await?;
        node.upload(sender, call, length, body).await
    }

    /// What a GET names as an open file, if the node that the next call goes to is on this machine
    /// and has it as a file of its own. Whoever gets `None` sends the call, which says why.
    pub async fn borrow(&self, call: &Call) -> Option<Borrowed> {
        let limit = self.timeouts().connect;
        self.0.preferred().borrow(call, limit).await
    }

    /// A new connection, before any HTTP.
    ///
    /// # Errors
    /// `Unreachable` and `TimedOut` if no connection could be made; `NotSent` for a certificate
    /// that is not trusted.
    pub async fn dial(&self) -> Result<Box<dyn Io>> {
        let dial = |node: Arc<Node>, limit| async move { node.dial(limit).await };
        self.0.ask(dial).await
    }

    /// Asks the node, once, whether it has a Unix socket on this machine, if the settings say so.
    /// Whatever the node answers is not an error.
    ///
    /// # Errors
    /// If no node can be reached at all.
    pub async fn find_socket(&self) -> Result<()> {
        let find = |node: Arc<Node>, limit| async move { node.find_socket(limit).await };
        self.0.ask(find).await
    }
}

/// The path of an object in the API for objects.
pub fn object_path(bucket: &str, key: &str) -> String {
    format!("/v1/objects/{}/{}", encode(bucket), encode_key(key))
}
