//! The API under `/v1/`: batches, objects and buckets as AIStore's clients use them, and the node's
//! own calls under `/v1/forebay/`.
//!
//! Providers (`ais`, `s3`, `aws`, `gs`, …) are accepted but mean nothing here: a bucket's name
//! alone leads to its origin, of whatever kind (`provider.rs`). What a client asks for and this
//! node does not do (transforms, jobs over many objects) is answered with 501, which names it.

mod append;
mod batch;
mod buckets;
mod checkpoints;
mod cluster;
mod cluster_members;
mod compositions;
mod datasets;
mod error;
mod filters;
mod keys;
mod lend;
mod members;
mod msgpack;
mod node;
mod objects;
mod plans;
mod properties;
mod provider;
mod rows;
mod selection;
mod streams;
mod summary;
mod warm;

pub use append::Appends;
pub(crate) use node::cache_dir;

use crate::{
    app::App,
    auth::Policy,
    body::AnswerBody,
    config::Action,
    note::{Api, Note, Peer},
    request_body::UploadBody,
    url::{decode, parse_query},
};
use error::Place;
use forebay_core::{Error, ErrorKind, Reservation, Result};
use http::{Request, Response, StatusCode};
use hyper::upgrade::OnUpgrade;
use std::sync::Arc;

/// The largest list of names.
const CONTROL_BODY_MAX_BYTES: usize = 64 << 20;
/// The largest other JSON body: ten thousand parts of an upload. Parsed, it takes many times its
/// size in memory.
const JSON_BODY_MAX_BYTES: usize = 2 << 20;

/// One request on its way through the handlers.
pub(crate) struct Call {
    pub app: Arc<App>,
    pub note: Arc<Note>,
    pub path: String,
    pub query: Vec<(String, String)>,
    pub headers: http::HeaderMap,
    pub http_10: bool,
    /// What the sender may do.
    pub policy: Arc<Policy>,
    /// For an answer that makes something else of the connection.
    upgrade: forebay_core::sync::Mutex<Option<OnUpgrade>>,
    body: forebay_core::sync::Mutex<Option<UploadBody>>,
    /// A large body's share of the memory budget, held until there is an answer.
    held: forebay_core::sync::Mutex<Vec<Reservation>>,
}

impl Call {
    pub fn query(&self, name: &str) -> Option<&str> {
        self.query
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.as_str())
    }

    /// The provider that the client names; `ais` if it names none.
    pub fn provider(&self) -> &str {
        self.query("provider")
            .filter(|p| !p.is_empty())
            .unwrap_or("ais")
    }

    /// The provider that the client names; `None` if it names none.
    ///
    /// # Errors
    /// `Invalid` for a word that does not name a provider.
    pub fn provider_named(&self) -> Result<Option<provider::Provider>> {
        provider::named(self.query("provider"))
    }

    /// Whether the sender may do this. Call it before anything is looked up.
    pub fn permit(&self, action: Action, bucket: &str, name: &str) -> Result<()> {
        self.policy.check(action, bucket, name)
    }

    /// For an answer whose length is not known when it begins. In HTTP/1.0, closing the connection
    /// is what ends it, so a cut answer would look complete.
    ///
    /// # Errors
    /// `Invalid` for a request in HTTP/1.0, with what to do.
    pub fn needs_chunks(&self, what: &str) -> Result<()> {
        if !self.http_10 {
            return Ok(());
        }
        Err(Error::invalid(format!("{what} needs HTTP/1.1"))
            .hint("a proxy in between may speak HTTP/1.0; nginx needs proxy_http_version 1.1"))
    }

    pub fn take_body(&self) -> Result<UploadBody> {
        self.body
            .lock()
            .take()
            .ok_or_else(|| Error::internal("the body of the request was taken twice"))
    }

    pub async fn read_body(&self, limit: usize) -> Result<bytes::Bytes> {
        if let Some(encoding) = self
            .headers
            .get(http::header::CONTENT_ENCODING)
            .filter(|v| !v.as_bytes().eq_ignore_ascii_case(b"identity"))
        {
            let encoding = String::from_utf8_lossy(encoding.as_bytes());
            return Err(Error::invalid(format!(
                "Content-Encoding: {} is not accepted here",
                forebay_core::name::shorten(&encoding)
            ))
            .hint("send the body without an encoding"));
        }
        let (body, held) =
            crate::request_body::read_all(self.take_body()?, limit, self.app.engine.budget())
                .await?;
        self.held.lock().extend(held);
        Ok(body)
    }

    pub async fn json(&self) -> Result<serde_json::Value> {
        let body = self.read_body(JSON_BODY_MAX_BYTES).await?;
        if body.is_empty() {
            return Ok(serde_json::Value::Null);
        }
        serde_json::from_slice(&body)
            .map_err(|e| Error::invalid(format!("the body of the request is not JSON: {e}")))
    }

    /// The URL under which the client reached the node.
    pub fn base_url(&self) -> String {
        let host = self
            .headers
            .get(http::header::HOST)
            .and_then(|h| h.to_str().ok())
            .unwrap_or("localhost");
        // The Unix socket speaks no TLS.
        let scheme = if is_local(self) {
            "http"
        } else {
            self.app.scheme()
        };
        format!("{scheme}://{host}")
    }
}

/// Answers one request under `/v1/`.
pub async fn call(
    app: Arc<App>,
    request: Request<UploadBody>,
    note: Arc<Note>,
) -> Response<AnswerBody> {
    let (mut head, body) = request.into_parts();
    let raw = head.uri.path().to_owned();
    note.set_api(api_of(&raw));
    let parsed =
        segments(&raw).and_then(|s| Ok((s, head.uri.query().map_or(Ok(Vec::new()), parse_query)?)));
    let (segments, query) = match parsed {
        Ok(parsed) => parsed,
        Err(e) => {
            return error::response(
                &e,
                &Place {
                    note: &note,
                    path: &raw,
                    node: &app.node_id,
                    provider: "",
                    bucket: "",
                    name: "",
                },
            );
        }
    };
    let policy = match app.access.of_request(note.peer, &head.headers) {
        Ok(caller) => {
            note.set_caller(&caller.name);
            caller.policy
        }
        Err(e) => {
            return error::response(
                &e,
                &Place {
                    note: &note,
                    path: &raw,
                    node: &app.node_id,
                    provider: "",
                    bucket: "",
                    name: "",
                },
            );
        }
    };
    let call = Call {
        policy,
        app: app.clone(),
        note: note.clone(),
        path: raw,
        query,
        headers: head.headers,
        http_10: head.version < http::Version::HTTP_11,
        upgrade: forebay_core::sync::Mutex::new(head.extensions.remove()),
        body: forebay_core::sync::Mutex::new(Some(body)),
        held: forebay_core::sync::Mutex::default(),
    };
    match route(&call, &segments).await {
        Ok(response) => response,
        Err(e) => {
            let learned = note.learned().clone();
            // What a checkpoint is called is no object's name.
            let range = e.kind() == ErrorKind::RangeNotSatisfiable && segments[0] == "objects";
            // A batch already names the entry that it failed at.
            let is_batch = learned.api == Some(Api::Batch);
            let place = Place {
                note: &note,
                path: &call.path,
                node: &app.node_id,
                provider: call.provider(),
                bucket: if is_batch { "" } else { &learned.bucket },
                name: &learned.key,
            };
            let mut response = error::response(&e, &place);
            if range
                && let Some(value) =
                    objects::unsatisfiable(&call, &learned.bucket, &learned.key).await
            {
                response
                    .headers_mut()
                    .insert(http::header::CONTENT_RANGE, value);
            }
            response
        }
    }
}

/// For a request that is refused before it is examined.
pub fn refused(app: &App, note: &Note, path: &str, e: &Error) -> Response<AnswerBody> {
    let mut response = error::response(
        e,
        &Place {
            note,
            path,
            node: &app.node_id,
            provider: "",
            bucket: "",
            name: "",
        },
    );
    response.headers_mut().insert(
        http::header::CONNECTION,
        http::HeaderValue::from_static("close"),
    );
    response
}

pub fn api_of(path: &str) -> Api {
    if path.starts_with("/v1/ml/") {
        Api::Batch
    } else if path.starts_with("/v1/forebay/") {
        Api::Node
    } else {
        Api::Objects
    }
}

/// The decoded path after `/v1/`: its first two parts, and the rest as one part, since an object's
/// name contains slashes.
fn segments(path: &str) -> Result<[String; 3]> {
    let mut parts = path
        .trim_start_matches('/')
        .strip_prefix("v1")
        .unwrap_or_default()
        .trim_start_matches('/')
        .splitn(3, '/');
    let mut next = || decode(parts.next().unwrap_or_default());
    Ok([next()?, next()?, next()?])
}

async fn route(call: &Call, [first, second, rest]: &[String; 3]) -> Result<Response<AnswerBody>> {
    // A bucket of the same name in another namespace would be another bucket.
    let is_named = |n: &str| !matches!(n, "" | "@#");
    if let Some(namespace) = call.query("namespace").filter(|n| is_named(n)) {
        return Err(Error::unsupported(format!(
            "the namespace {:?} is not offered here: buckets have no namespaces",
            forebay_core::name::shorten(namespace)
        ))
        .hint("leave it out"));
    }
    match (first.as_str(), second.as_str()) {
        ("ml", "moss") => batch::moss(call, rest.trim_end_matches('/')).await,
        ("objects", bucket) => objects::objects(call, bucket, rest).await,
        ("buckets", bucket) => buckets::buckets(call, bucket, rest).await,
        ("checkpoints", bucket) => {
            checkpoints::checkpoints(call, bucket, rest.trim_end_matches('/')).await
        }
        ("datasets", "compositions") => compositions::compositions(call, rest).await,
        ("datasets", "plans") => plans::plans(call, rest).await,
        ("datasets", "streams") => streams::streams(call, rest).await,
        ("datasets", id) => datasets::datasets(call, id, rest).await,
        ("daemon", "") | ("reverse", "daemon") => cluster::daemon(call).await,
        ("cluster", "") => cluster::cluster(call).await,
        ("download" | "etl" | "sort", "") => cluster::no_jobs(call),
        ("health", _) => cluster::health(call),
        ("forebay", what) => node::node(call, what, rest).await,
        _ => Err(not_offered(call)),
    }
}

fn not_offered(call: &Call) -> Error {
    Error::unsupported(format!(
        "{} {} is not offered here",
        call.note.method, call.path
    ))
    .hint(
        "see /v1/objects, /v1/buckets, /v1/ml/moss, /v1/datasets, /v1/checkpoints and /v1/forebay",
    )
}

/// What to do instead of an AIStore action that this node does not support.
const INSTEAD: &[(&str, &str)] = &[
    (
        "archive",
        "make the archive where it is needed, from a batch, and put it",
    ),
    (
        "blob-download",
        "read the object: large ones are fetched in parts",
    ),
    (
        "copy-bck",
        "copy the objects with an S3 client: copies within an origin are made there",
    ),
    (
        "copy-listrange",
        "copy the objects with an S3 client: copies within an origin are made there",
    ),
    ("create-inventory", NO_INVENTORY),
    (
        "delete-listrange",
        "delete the objects one by one, or a thousand at a time by S3's DeleteObjects",
    ),
    ("destroy-inventory", NO_INVENTORY),
    ("etl-bck", NO_TRANSFORM),
    ("etl-listrange", NO_TRANSFORM),
    (
        "evict-listrange",
        "forebay evict, or POST /v1/forebay/evict",
    ),
    (
        "evict-remote-bck",
        "forebay evict, or POST /v1/forebay/evict",
    ),
    (
        "move-bck",
        "make the other bucket, copy the objects with an S3 client, and destroy this bucket",
    ),
    (
        "prefetch-listrange",
        "forebay warm, or POST /v1/forebay/warm",
    ),
    (
        "promote",
        "map the directory as an origin, or put its files",
    ),
    (
        "set-bprops",
        "rules for buckets are in the node's configuration",
    ),
    ("show-inventory", NO_INVENTORY),
];

const NO_INVENTORY: &str = "list the bucket: its origin is asked, and no inventory is kept";
const NO_TRANSFORM: &str = "transform what you read, and put the results";

/// The error for a request whose field `action` asks for something unsupported.
fn action_not_offered(action: &str) -> Error {
    let e = Error::unsupported(format!(
        "the action {:?} is not offered here",
        forebay_core::name::shorten(action)
    ));
    match INSTEAD.iter().find(|(name, _)| *name == action) {
        Some((_, instead)) => e.hint(*instead),
        None => e,
    }
}

/// Refuses a request whose body may name an action.
async fn refuse(call: &Call) -> Result<Response<AnswerBody>> {
    let message = call.json().await?;
    Err(match buckets::action(&message) {
        "" => not_offered(call),
        action => action_not_offered(action),
    })
}

/// An empty answer.
fn done(status: StatusCode) -> Response<AnswerBody> {
    let mut response = Response::new(AnswerBody::Empty);
    *response.status_mut() = status;
    response
}

/// Whether the sender is on the Unix socket.
fn is_local(call: &Call) -> bool {
    call.note.peer == Peer::Unix
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_keep_their_slashes_and_are_decoded_once() {
        let of = |p: &str| segments(p).unwrap();
        assert_eq!(
            of("/v1/objects/b/a%2Fb/c%20%2525"),
            ["objects", "b", "a/b/c %25"]
        );
        assert_eq!(of("/v1/buckets/b"), ["buckets", "b", ""]);
        assert_eq!(of("/v1/health"), ["health", "", ""]);
        assert_eq!(of("/v1/objects/b/%C3%BC"), ["objects", "b", "ü"]);
        assert!(segments("/v1/objects/b/%ff").is_err());
        assert_eq!(api_of("/v1/ml/moss/b"), Api::Batch);
    }
}
