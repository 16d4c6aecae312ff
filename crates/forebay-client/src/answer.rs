//! A successful answer and its body.

use crate::{
    client::{Call, Client},
    failure::{Failure, Result, chain},
    node::{Node, SILENT_AFTER, Sender},
    nodes::Nodes,
};
use bytes::Bytes;
use forebay_core::{Error, is_etag_of_size_alone};
use forebay_protocol::REQUEST_ID_HEADER;
use futures::future::BoxFuture;
use http::{HeaderMap, Method, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use tokio::time::{Instant, timeout};

/// The longest body that is read as one JSON document, and the longest line of [`Lines`].
const JSON_MAX_BYTES: usize = 64 << 20;

/// A successful answer whose body has not been read yet. Dropping it before the body has been read
/// to its end costs the connection.
pub struct Answer {
    /// 2xx.
    pub status: StatusCode,
    /// All headers.
    pub headers: HeaderMap,
    body: Incoming,
    node: Arc<Node>,
    /// The connection: it is given back when the body has been read to its end, and closed
    /// otherwise.
    lease: Option<Sender>,
    /// The client's nodes, if it has several: they are told if the body breaks off.
    others: Option<Arc<Nodes>>,
    /// If it falls silent, it is looked whether the node is still there.
    watched: bool,
    /// Where the rest is to be had then.
    resume: Option<Box<Resume>>,
}

/// What is left of the body of an object: who has the same version can send it.
#[derive(Clone, Debug)]
pub struct Rest {
    etag: String,
    /// The bytes of the object that have not arrived.
    next: u64,
    end: u64,
}

impl Rest {
    /// All of the body of an answer to a GET. `None` if the answer does not say which bytes of
    /// which version it has.
    pub fn of(answer: &Answer) -> Option<Rest> {
        let length = answer.length()?;
        let next = match answer.status {
            StatusCode::OK => 0,
            StatusCode::PARTIAL_CONTENT => answer.begin()?,
            _ => return None,
        };
        // Only the same version may follow.
        let etag = answer.header("etag")?;
        if etag.starts_with("W/") || is_etag_of_size_alone(etag) {
            return None;
        }
        Some(Rest {
            etag: etag.to_owned(),
            next,
            end: next.checked_add(length)?,
        })
    }

    /// So many bytes more have arrived.
    pub fn advance(&mut self, bytes: usize) {
        self.next += bytes as u64;
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.next >= self.end
    }

    /// The request for what is left, made from that for the body.
    pub fn call(&self, whole: &Call) -> Call {
        let mut call = whole.clone();
        call.headers
            .retain(|(name, _)| name != header::RANGE && name != header::IF_MATCH);
        let range = format!("bytes={}-{}", self.next, self.end.saturating_sub(1));
        call.header(header::RANGE, range)
            .header(header::IF_MATCH, &self.etag)
    }

    /// Whether an answer to that request has what is left. Who ignores its headers sends something
    /// else.
    pub fn is_in(&self, answer: &Answer) -> bool {
        answer.status == StatusCode::PARTIAL_CONTENT
            && answer.begin() == Some(self.next)
            && answer.length() == Some(self.end - self.next)
            && answer.header("etag") == Some(&self.etag)
    }
}

/// How the body of an object goes on at another node.
struct Resume {
    client: Client,
    call: Call,
    rest: Rest,
    /// How often it may be tried without a byte in between.
    left: usize,
}

impl Resume {
    fn of(client: &Client, call: &Call, answer: &Answer) -> Option<Box<Resume>> {
        let rest = Rest::of(answer)?;
        let is_read = call.method == Method::GET && call.body.is_empty();
        is_read.then(|| {
            Box::new(Resume {
                client: client.clone(),
                call: call.clone(),
                rest,
                left: client.count(),
            })
        })
    }

    /// An answer with what is left, if another node has it.
    fn rest(&mut self) -> BoxFuture<'_, Option<Answer>> {
        let call = self.rest.call(&self.call);
        Box::pin(async move {
            let answer = self.client.call(&call).await.ok()?;
            self.rest.is_in(&answer).then_some(answer)
        })
    }
}

impl Answer {
    pub(crate) fn new(node: Arc<Node>, response: http::Response<Incoming>, sender: Sender) -> Self {
        let (head, body) = response.into_parts();
        Answer {
            status: head.status,
            headers: head.headers,
            body,
            node,
            lease: Some(sender),
            others: None,
            watched: false,
            resume: None,
        }
    }

    /// If its body breaks off, another of the client's nodes sends the rest.
    pub(crate) fn resumed_by(mut self, client: &Client, call: &Call) -> Self {
        self.resume = Resume::of(client, call, &self);
        self.others = Some(client.nodes().clone());
        self.watched()
    }

    /// If it falls silent, it is looked whether the node is still there: another has the same.
    pub(crate) fn watched(mut self) -> Self {
        self.watched = true;
        self
    }

    /// The first byte of the object in a partial answer.
    fn begin(&self) -> Option<u64> {
        let range = self.header("content-range")?.strip_prefix("bytes ")?;
        range.split_once('-')?.0.parse().ok()
    }

    /// A header's value, if it exists and is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|v| v.to_str().ok())
    }

    /// The `Content-Length`, if the answer has one.
    pub fn length(&self) -> Option<u64> {
        self.header("content-length").and_then(|v| v.parse().ok())
    }

    /// The next piece of the body; `None` at its proper end.
    ///
    /// # Errors
    /// `Truncated` for a body that breaks off; `TimedOut` if nothing arrives for
    /// [`Timeouts::silence`](crate::Timeouts::silence).
    pub async fn piece(&mut self) -> Result<Option<Bytes>> {
        loop {
            let failure = match self.piece_here().await {
                Ok(Some(piece)) => {
                    if let Some(resume) = &mut self.resume {
                        resume.rest.advance(piece.len());
                        resume.left = resume.client.count();
                    }
                    return Ok(Some(piece));
                }
                Ok(None) => return Ok(None),
                Err(failure) => failure,
            };
            let Some(others) = &self.others else {
                return Err(failure);
            };
            others.fails(&self.node);
            let Some(resume) = self.resume.as_mut().filter(|resume| resume.left > 0) else {
                return Err(failure);
            };
            resume.left -= 1;
            let Some(rest) = resume.rest().await else {
                return Err(failure);
            };
            (self.body, self.node, self.lease) = (rest.body, rest.node, rest.lease);
        }
    }

    async fn piece_here(&mut self) -> Result<Option<Bytes>> {
        let limit = self.node.settings().timeouts.silence;
        let began = Instant::now();
        loop {
            let step = match self.watched {
                true => SILENT_AFTER.min(limit),
                false => limit,
            };
            match timeout(step, self.body.frame()).await {
                Err(_) if began.elapsed() < limit => {
                    // One whose machine is gone, or that was stopped, closes no connection.
                    if !self.node.answers(SILENT_AFTER).await {
                        return Err(Failure::Truncated {
                            error: Error::origin_unavailable(
                                "the answer broke off: the node does not answer any more",
                            ),
                            request_id: self.header(REQUEST_ID_HEADER).map(str::to_owned),
                        });
                    }
                }
                Err(_) => {
                    return Err(Failure::TimedOut(Error::timeout(format!(
                        "the node sent nothing for {} s in the middle of an answer",
                        limit.as_secs_f32()
                    ))));
                }
                Ok(Some(Err(e))) => {
                    let error =
                        Error::origin_unavailable(format!("the answer broke off: {}", chain(&e)));
                    return Err(Failure::Truncated {
                        error: error.caused_by(e),
                        request_id: self.header(REQUEST_ID_HEADER).map(str::to_owned),
                    });
                }
                Ok(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Ok(None) => {
                    if let Some(sender) = self.lease.take() {
                        self.node.give_idle(sender);
                    }
                    return Ok(None);
                }
            }
        }
    }

    /// The whole body, of at most `max_bytes`.
    ///
    /// # Errors
    /// `Malformed` for a longer body, and those of [`Answer::piece`].
    pub async fn collect(&mut self, max_bytes: usize) -> Result<Bytes> {
        let mut all = Vec::new();
        while let Some(piece) = self.piece().await? {
            if all.len() + piece.len() > max_bytes {
                return Err(Failure::Malformed(Error::corrupt(format!(
                    "an answer of more than {max_bytes} bytes where a short one was due"
                ))));
            }
            all.extend_from_slice(&piece);
        }
        Ok(all.into())
    }

    /// A body that is one JSON document.
    ///
    /// # Errors
    /// `Malformed` for any other body, and those of [`Answer::piece`].
    pub async fn json<T: DeserializeOwned>(&mut self) -> Result<T> {
        let body = self.collect(JSON_MAX_BYTES).await?;
        serde_json::from_slice(&body).map_err(|e| {
            Failure::Malformed(
                Error::corrupt(format!("the node's answer is not what was expected: {e}"))
                    .caused_by(e),
            )
        })
    }
}

/// The lines of a body, as they arrive.
pub struct Lines {
    answer: Answer,
    /// What has arrived but is not a whole line yet.
    held: Vec<u8>,
    /// How many bytes of `held` are known to contain no line end.
    searched: usize,
    ended: bool,
}

impl Lines {
    /// Reads the body of `answer`.
    pub fn of(answer: Answer) -> Self {
        Lines {
            answer,
            held: Vec::new(),
            searched: 0,
            ended: false,
        }
    }

    /// A header of the answer; see [`Answer::header`].
    pub fn header(&self, name: &str) -> Option<&str> {
        self.answer.header(name)
    }

    /// The next line, without its end; `None` after the last.
    ///
    /// # Errors
    /// `Malformed` for a line that is too long, and those of [`Answer::piece`].
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        loop {
            let fresh = &self.held[self.searched..];
            if let Some(at) = fresh.iter().position(|b| *b == b'\n') {
                let rest = self.held.split_off(self.searched + at + 1);
                let mut line = std::mem::replace(&mut self.held, rest);
                line.pop();
                self.searched = 0;
                return Ok(Some(line));
            }
            self.searched = self.held.len();
            if self.ended {
                self.searched = 0;
                return Ok((!self.held.is_empty()).then(|| std::mem::take(&mut self.held)));
            }
            match self.answer.piece().await? {
                Some(piece) if self.held.len() + piece.len() > JSON_MAX_BYTES => {
                    return Err(Failure::Malformed(Error::corrupt(format!(
                        "a line of more than {JSON_MAX_BYTES} bytes"
                    ))));
                }
                Some(piece) => self.held.extend_from_slice(&piece),
                None => self.ended = true,
            }
        }
    }
}
