//! What is learned about one request on the way, for its log line and its metrics.

use crate::{metrics::Metrics, request_id::RequestId};
use forebay_core::{
    CacheStatus,
    sync::{Mutex, MutexGuard},
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use std::{net::SocketAddr, sync::Arc, time::Instant};

const X_CACHE: HeaderName = HeaderName::from_static("x-cache");

/// How much of a `User-Agent` goes into the log.
const USER_AGENT_MAX_BYTES: usize = 256;

/// Who sent a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    Tcp(SocketAddr),
    /// Over the Unix socket: trusted, because the file permissions let it in.
    Unix,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Peer::Tcp(address) => address.fmt(f),
            Peer::Unix => f.write_str("unix"),
        }
    }
}

/// Which interface a request uses; a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Api {
    S3,
    Batch,
    /// Objects and buckets under `/v1/`.
    Objects,
    /// `/v1/forebay/`.
    Node,
}

impl Api {
    pub const ALL: [Api; 4] = [Api::S3, Api::Batch, Api::Objects, Api::Node];

    pub fn as_str(self) -> &'static str {
        match self {
            Api::S3 => "s3",
            Api::Batch => "batch",
            Api::Objects => "objects",
            Api::Node => "node",
        }
    }
}

/// Notes about one request. They live in its extensions; handlers add what they learn.
pub struct Note {
    pub id: RequestId,
    pub peer: Peer,
    pub method: Method,
    pub began: Instant,
    pub metrics: Arc<Metrics>,
    learned: Mutex<Learned>,
}

#[derive(Clone, Default)]
pub struct Learned {
    pub api: Option<Api>,
    pub bucket: String,
    pub key: String,
    pub cache: Option<CacheStatus>,
    pub error: String,
    /// The name of the key or token; empty until it is known.
    pub caller: Arc<str>,
    /// What the client's program calls itself.
    pub user_agent: String,
}

impl Note {
    pub fn new(id: RequestId, peer: Peer, method: Method, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Note {
            id,
            peer,
            method,
            began: Instant::now(),
            metrics,
            learned: Mutex::default(),
        })
    }

    pub fn set_api(&self, api: Api) {
        self.learned.lock().api = Some(api);
    }

    pub fn set_name(&self, bucket: &str, key: &str) {
        let mut learned = self.learned.lock();
        learned.bucket = printable(bucket);
        learned.key = printable(key);
    }

    pub fn set_caller(&self, name: &Arc<str>) {
        self.learned.lock().caller = name.clone();
    }

    pub fn set_user_agent(&self, headers: &HeaderMap) {
        let Some(value) = headers.get(header::USER_AGENT) else {
            return;
        };
        let bytes = value.as_bytes();
        let bytes = &bytes[..bytes.len().min(USER_AGENT_MAX_BYTES)];
        self.learned.lock().user_agent = printable(&String::from_utf8_lossy(bytes));
    }

    /// The requested bucket and the name of the caller, for metrics.
    pub fn who(&self) -> (String, Arc<str>) {
        let learned = self.learned.lock();
        (learned.bucket.clone(), learned.caller.clone())
    }

    pub fn set_error(&self, error: impl Into<String>) {
        self.learned.lock().error = printable(&error.into());
    }

    pub fn learned(&self) -> MutexGuard<'_, Learned> {
        self.learned.lock()
    }

    /// Sets `X-Cache` and counts it. Only this function does either, so the header and its counter
    /// never disagree.
    pub fn x_cache(&self, headers: &mut HeaderMap, status: CacheStatus) {
        headers.insert(X_CACHE, HeaderValue::from_static(status.as_str()));
        self.metrics.answers.count(status);
        self.learned.lock().cache = Some(status);
    }
}

/// Drops control characters: text from a client must not begin a line in the log or control a
/// terminal. No valid name has any.
fn printable(text: &str) -> String {
    match text.chars().any(char::is_control) {
        false => text.to_owned(),
        true => text
            .chars()
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_name_from_a_client_cannot_begin_a_log_line() {
        assert_eq!(
            super::printable("a\nERROR b\r\x1b[31m\u{9b}c"),
            "a\u{fffd}ERROR b\u{fffd}\u{fffd}[31m\u{fffd}c"
        );
        assert_eq!(super::printable("ü/日本"), "ü/日本");
    }
}
