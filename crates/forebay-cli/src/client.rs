//! HTTP/1.1 to one node, over TCP, TLS or a Unix socket.
//!
//! A command talks to one node, one request at a time, so one kept-alive connection is enough; it
//! is opened again when the node has closed it. Each wait has a limit: connecting, the head of an
//! answer, and the silence between two pieces of a body. Invariant: a body that ends before its
//! Content-Length is an error, never a short answer (hyper sees to it, [`Body`] passes it on).

use crate::node::NodeAddr;
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_protocol::{ErrorDocument, INFO_PATH, node::NodeInfo};
use forebay_tls::ClientTls;
use futures::{Stream, StreamExt};
use http::{HeaderMap, HeaderValue, Method, Request, Response, header};
use http_body_util::{BodyExt, Empty, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, client::conn::http1::SendRequest};
use hyper_util::rt::TokioIo;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A node may fetch from a distant origin, or read the headers of a large archive, before it
/// answers.
const HEAD_TIMEOUT: Duration = Duration::from_secs(300);
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// More than this is not an error message.
const ERROR_BODY_MAX_BYTES: usize = 64 << 10;
/// More than this is not one JSON answer of the API.
const JSON_BODY_MAX_BYTES: usize = 64 << 20;

/// What a path segment may hold as it is; RFC 3986, unreserved.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');
/// The same with `/`, for keys.
const KEY: &AsciiSet = &SEGMENT.remove(b'/');

pub type RequestBody = UnsyncBoxBody<Bytes, std::io::Error>;

/// Percent-encodes one query value or path segment.
pub fn encode(text: &str) -> String {
    utf8_percent_encode(text, SEGMENT).to_string()
}

/// Percent-encodes a key, keeping its slashes.
pub fn encode_key(key: &str) -> String {
    utf8_percent_encode(key, KEY).to_string()
}

pub fn no_body() -> RequestBody {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

pub fn json_body(value: &Value) -> RequestBody {
    Full::new(Bytes::from(value.to_string()))
        .map_err(|never| match never {})
        .boxed_unsync()
}

pub fn bytes_body(bytes: Vec<u8>) -> RequestBody {
    Full::new(Bytes::from(bytes))
        .map_err(|never| match never {})
        .boxed_unsync()
}

pub fn stream_body(
    stream: impl Stream<Item = std::io::Result<Bytes>> + Send + 'static,
) -> RequestBody {
    BodyExt::boxed_unsync(StreamBody::new(
        stream.map(|piece| piece.map(hyper::body::Frame::data)),
    ))
}

/// A connection to a node.
pub struct Client {
    addr: NodeAddr,
    token: Option<String>,
    /// Whom to trust at an `https://` address; the system's authorities if no file says.
    ca: Option<PathBuf>,
    /// Made of it on first use.
    tls: Option<ClientTls>,
    sender: Option<SendRequest<RequestBody>>,
}

impl Client {
    pub fn new(addr: NodeAddr, token: Option<String>) -> Self {
        Self {
            addr,
            token,
            ca: None,
            tls: None,
            sender: None,
        }
    }

    /// Trusts the authorities in this file instead of the system's.
    pub fn trusting(mut self, ca: Option<PathBuf>) -> Self {
        self.ca = ca;
        self
    }

    pub fn addr(&self) -> &NodeAddr {
        &self.addr
    }

    /// Moves on to the node's Unix socket, if it tells of one and is on this machine: a plain copy
    /// is several times faster than over loopback TCP. Whatever goes wrong here, the address that
    /// was given still works.
    pub async fn prefer_unix_socket(&mut self) {
        if !matches!(&self.addr, NodeAddr::Tcp { .. }) || !self.addr.is_local() {
            return;
        }
        let Ok(info) = self.json::<NodeInfo>(Method::GET, INFO_PATH, None).await else {
            return;
        };
        let Some(path) = info.unix_socket.clone() else {
            return;
        };
        let mut local = Client::new(NodeAddr::Unix(path.into()), self.token.clone());
        // The path may be another machine's, behind a tunnel: it must be the same node.
        match local.json::<NodeInfo>(Method::GET, INFO_PATH, None).await {
            Ok(there) if there.node_id == info.node_id => *self = local,
            _ => {}
        }
    }

    async fn connection(&mut self) -> Result<&mut SendRequest<RequestBody>> {
        let alive = match &mut self.sender {
            Some(sender) => sender.ready().await.is_ok(),
            None => false,
        };
        if !alive {
            if self.tls.is_none() && matches!(self.addr, NodeAddr::Tcp { tls: true, .. }) {
                self.tls = Some(ClientTls::new(self.ca.as_deref())?);
            }
            let mut sender = connect(&self.addr, self.tls.as_ref()).await?;
            sender
                .ready()
                .await
                .map_err(|e| broken(&self.addr, "the connection broke", e))?;
            self.sender = Some(sender);
        }
        Ok(self.sender.as_mut().expect("there, or set above"))
    }

    /// Sends a request and returns the answer's head and body, whatever its status.
    pub async fn send(
        &mut self,
        method: Method,
        path: &str,
        headers: HeaderMap,
        body: RequestBody,
    ) -> Result<Response<Incoming>> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, self.addr.authority());
        request = request.header(
            header::USER_AGENT,
            concat!("forebay/", env!("CARGO_PKG_VERSION")),
        );
        if let Some(token) = &self.token {
            let mut value = HeaderValue::from_str(&format!("Bearer {token}")).map_err(|_| {
                Error::invalid("FOREBAY_TOKEN holds characters that a token cannot have")
            })?;
            value.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, value);
        }
        let mut request = request
            .body(body)
            .map_err(|e| Error::invalid(format!("cannot be asked for: {path}: {e}")).source(e))?;
        request.headers_mut().extend(headers);
        let addr = self.addr.clone();
        let answer = self.connection().await?.send_request(request);
        match tokio::time::timeout(HEAD_TIMEOUT, answer).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(e)) => Err(broken(
                &addr,
                "the node closed the connection without an answer",
                e,
            )),
            Err(_) => Err(Error::timeout(format!(
                "no answer: {addr}: nothing for {} s",
                HEAD_TIMEOUT.as_secs()
            ))),
        }
    }

    /// Sends a request; an answer that is not 2xx is an error with the node's own words. `what`
    /// says what was asked for.
    pub async fn ask(
        &mut self,
        method: Method,
        path: &str,
        headers: HeaderMap,
        body: RequestBody,
        what: &str,
    ) -> Result<Response<Incoming>> {
        let response = self.send(method, path, headers, body).await?;
        if response.status().is_success() {
            Ok(response)
        } else {
            Err(refusal(response, what).await)
        }
    }

    /// Sends a request with an optional JSON body and parses the JSON answer.
    pub async fn json<T: DeserializeOwned>(
        &mut self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<T> {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT, HeaderValue::from_static("application/json"));
        if body.is_some() {
            headers.insert(
                header::CONTENT_TYPE,
                HeaderValue::from_static("application/json"),
            );
        }
        // The node's own words say where.
        let response = self
            .ask(
                method,
                path,
                headers,
                body.map_or_else(no_body, json_body),
                "",
            )
            .await?;
        parse(response.into_body(), path).await
    }
}

/// A body of JSON.
pub async fn parse<T: DeserializeOwned>(body: Incoming, what: &str) -> Result<T> {
    let bytes = collect(body, JSON_BODY_MAX_BYTES).await?;
    serde_json::from_slice(&bytes).map_err(|e| {
        Error::corrupt(format!("an answer that is not understood: {what}: {e}"))
            .source(e)
            .hint(
                "is that a Forebay node of this version? `forebay version` and `forebay \
                status` tell",
            )
    })
}

async fn connect(addr: &NodeAddr, tls: Option<&ClientTls>) -> Result<SendRequest<RequestBody>> {
    let opened = tokio::time::timeout(CONNECT_TIMEOUT, async {
        match addr {
            NodeAddr::Tcp {
                host,
                port,
                tls: wanted,
            } => {
                let stream = tokio::net::TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                match tls.filter(|_| *wanted) {
                    Some(tls) => match tls.connect(host, stream).await {
                        Ok(stream) => handshake(stream).await.map(Ok),
                        Err(e) => Ok(Err(e)),
                    },
                    None => handshake(stream).await.map(Ok),
                }
            }
            NodeAddr::Unix(path) => handshake(unix(path).await?).await.map(Ok),
        }
    })
    .await;
    match opened {
        Ok(Ok(sender)) => sender,
        Ok(Err(e)) => Err(Error::origin_unavailable(format!(
            "no node there: {addr}: {}",
            io_words(&e)
        ))
        .source(e)
        .hint("start one with `forebay serve`, or name another with --node or FOREBAY_NODE")),
        Err(_) => Err(Error::timeout(format!(
            "no node there: {addr}: not connected after {} s",
            CONNECT_TIMEOUT.as_secs()
        ))
        .hint("check the address (--node, FOREBAY_NODE) and the firewall between")),
    }
}

async fn unix(path: &Path) -> std::io::Result<tokio::net::UnixStream> {
    tokio::net::UnixStream::connect(path).await
}

async fn handshake<S>(stream: S) -> std::io::Result<SendRequest<RequestBody>>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
{
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(std::io::Error::other)?;
    // Its error reaches the request that it belongs to as well.
    tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok(sender)
}

fn io_words(e: &std::io::Error) -> String {
    match e.kind() {
        std::io::ErrorKind::ConnectionRefused => "connection refused".to_owned(),
        std::io::ErrorKind::NotFound => "no such socket".to_owned(),
        std::io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => e.to_string(),
    }
}

fn broken(addr: &NodeAddr, what: &str, e: hyper::Error) -> Error {
    if e.is_user() {
        return Error::internal(format!(
            "what was to be sent could not be read to its end: {addr}"
        ))
        .source(e);
    }
    Error::origin_unavailable(format!("{what}: {addr}"))
        .source(e)
        .hint("`forebay status` tells whether the node is still up")
}

/// The next piece of a body; `None` at its end.
pub async fn next_piece(body: &mut Incoming) -> Result<Option<Bytes>> {
    loop {
        match tokio::time::timeout(IDLE_TIMEOUT, body.frame()).await {
            Err(_) => {
                return Err(Error::timeout(format!(
                    "the answer stopped: nothing for {} s",
                    IDLE_TIMEOUT.as_secs()
                )));
            }
            Ok(None) => return Ok(None),
            Ok(Some(Err(e))) => {
                return Err(
                    Error::new(ErrorKind::OriginUnavailable, "the answer was cut short")
                        .source(e)
                        .hint("the node's log says why; try again"),
                );
            }
            Ok(Some(Ok(frame))) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}

/// The lines of a body, as they come.
pub struct Lines {
    body: Incoming,
    held: Vec<u8>,
    ended: bool,
}

impl Lines {
    pub fn of(body: Incoming) -> Self {
        Self {
            body,
            held: Vec::new(),
            ended: false,
        }
    }

    /// The next line, without its end; `None` after the last.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        loop {
            if let Some(at) = self.held.iter().position(|b| *b == b'\n') {
                let rest = self.held.split_off(at + 1);
                let mut line = std::mem::replace(&mut self.held, rest);
                line.pop();
                return Ok(Some(line));
            }
            if self.ended {
                return Ok((!self.held.is_empty()).then(|| std::mem::take(&mut self.held)));
            }
            match next_piece(&mut self.body).await? {
                Some(piece) if self.held.len() + piece.len() > JSON_BODY_MAX_BYTES => {
                    return Err(Error::new(
                        ErrorKind::TooLarge,
                        format!("a line of more than {JSON_BODY_MAX_BYTES} bytes"),
                    ));
                }
                Some(piece) => self.held.extend_from_slice(&piece),
                None => self.ended = true,
            }
        }
    }
}

/// A whole body of at most `max` bytes.
pub async fn collect(mut body: Incoming, max: usize) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    while let Some(piece) = next_piece(&mut body).await? {
        if all.len() + piece.len() > max {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("an answer of more than {max} bytes"),
            ));
        }
        all.extend_from_slice(&piece);
    }
    Ok(all)
}

/// The error that a non-2xx answer stands for.
pub async fn refusal(response: Response<Incoming>, what: &str) -> Error {
    let (head, body) = response.into_parts();
    let body = collect(body, ERROR_BODY_MAX_BYTES)
        .await
        .unwrap_or_default();
    let header = |name: &'static str| head.headers.get(name).and_then(|v| v.to_str().ok());
    refused(
        &ErrorDocument::read(head.status.as_u16(), header, &body),
        what,
    )
}

/// The node's words, in our order: what happened, then to what.
pub fn refused(said: &ErrorDocument, what: &str) -> Error {
    let (kind, status) = (said.kind(), said.status);
    let error = Error::new(kind, placed(said.what(), what)).source(match &said.request_id {
        Some(id) => format!("HTTP {status}, request id {id}"),
        None => format!("HTTP {status}"),
    });
    let ours = advice(kind);
    // Where a token is set, only this end knows.
    let hint = match &said.hint {
        Some(hint) if kind != ErrorKind::Unauthenticated => Some(hint.as_str()),
        _ => ours,
    };
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

fn placed(said: &str, what: &str) -> String {
    if said.contains(what) {
        said.to_owned()
    } else {
        format!("{said}: {what}")
    }
}

fn advice(kind: ErrorKind) -> Option<&'static str> {
    match kind {
        ErrorKind::BucketNotFound => Some("`forebay ls` lists the buckets that this node serves"),
        ErrorKind::NotFound => Some("`forebay ls bucket/prefix` lists what is there"),
        ErrorKind::RangeNotSatisfiable => Some("`forebay stat` tells the size"),
        ErrorKind::Unauthenticated => Some("this node wants a token: set FOREBAY_TOKEN"),
        ErrorKind::Busy => Some("the node is at a limit: try again in a moment"),
        ErrorKind::OriginUnavailable | ErrorKind::Timeout => {
            Some("the origin is in trouble: `forebay status` and the node's log tell more")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_encoded() {
        assert_eq!(encode_key("a b/ü+%.jpg"), "a%20b/%C3%BC%2B%25.jpg");
        assert_eq!(encode("a/b"), "a%2Fb");
    }

    #[test]
    fn the_words_of_the_node_are_put_in_our_order() {
        let said = |error: Error| {
            let document = ErrorDocument::of(&error).at("ais://bk/key".into());
            let error = refused(&document, "bk/key");
            (
                error.message().to_owned(),
                error.hint_text().map(str::to_owned),
            )
        };
        let advised = advice(ErrorKind::NotFound).map(str::to_owned);
        assert_eq!(
            said(Error::not_found("no such object")),
            ("no such object: bk/key".into(), advised)
        );
        assert_eq!(
            said(Error::invalid("bk/key: too large").hint("write it in parts")),
            ("bk/key: too large".into(), Some("write it in parts".into()))
        );
        assert_eq!(
            said(Error::invalid("a limit (of 5 MiB and more)")),
            ("a limit (of 5 MiB and more): bk/key".into(), None)
        );
    }
}
