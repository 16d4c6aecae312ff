//! Passes operations on to the origin, where it is an S3 service. The origin does what the cache
//! cannot, under the policy of whoever asks here and with this node's credentials.
//!
//! A request is mapped to an operation of the service model by its method and its *subresource*
//! (the one query parameter that says which part of a bucket or an object is meant: `?acl`,
//! `?tagging`). Each operation has an action that the caller's policy must allow. What makes data
//! public or locks it needs `admin`, like settings of buckets do. Then the request is built anew:
//! its query and headers as they were, without those of the caller's signature and connection; its
//! body as it was checked here (`verify.rs`); signed for the origin. The answer is the origin's:
//! its status, headers and document. What the request may have changed is dropped from the cache
//! beforehand (`Engine::forward`).
//!
//! Invariants:
//! - a parameter or header that is not listed is not passed on, because nobody knows what it would
//!   name or allow: such a request is refused with 501;
//! - the policy is checked for each object that a request names, before anything is looked up;
//! - a body is held in memory only up to [`HELD_BODY_MAX_BYTES`], within the memory budget; longer
//!   ones stream.

use super::{
    copy::Source,
    error::{ErrorDocument, Refusal},
    guard, late,
    path::Target,
    verify::{Trailing, Verified, algorithms, bytes_of, verify},
};
use crate::{auth::Policy, body::AnswerBody, config::Action, note::Note, object};
use bytes::{Bytes, BytesMut};
use forebay_core::{
    CacheStatus, Error, ErrorKind, MemoryBudget, ObjectName, Reservation, Result, limits,
    name::validate_bucket,
};
use forebay_engine::{
    ByteStream, Changes, Engine, ForwardBody, ForwardRequest, ForwardResponse, Origin, S3Place,
    Trailer,
};
use futures::StreamExt;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header};
use std::{borrow::Cow, sync::Arc};

/// Bodies up to this size are held in memory and sent with their hash; longer ones stream.
const HELD_BODY_MAX_BYTES: u64 = 8 << 20;
/// How large a body may grow before its memory is taken from the budget.
const UNRESERVED_BYTES: u64 = 64 << 10;

/// The subresources `?NAME` that are settings of a bucket.
const SETTINGS: &[&str] = &[
    "abac",
    "accelerate",
    "acl",
    "analytics",
    "cors",
    "encryption",
    "intelligent-tiering",
    "inventory",
    "lifecycle",
    "logging",
    "metadataConfiguration",
    "metadataInventoryTable",
    "metadataJournalTable",
    "metadataTable",
    "metrics",
    "notification",
    "object-lock",
    "ownershipControls",
    "policy",
    "policyStatus",
    "publicAccessBlock",
    "replication",
    "requestPayment",
    "tagging",
    "versioning",
    "website",
];

/// The other subresources of buckets and objects.
const OTHERS: &[&str] = &[
    "attributes",
    "delete",
    "legal-hold",
    "location",
    "restore",
    "retention",
    "select",
    "torrent",
    "uploadId",
    "uploads",
    "versions",
];

/// Parameters of operations, in addition to those of `guard::QUERY`.
const PARAMETERS: &[&str] = &[
    "id",
    "partNumber",
    "select-type",
    "version-id-marker",
    "versionId",
];

/// Headers that are passed on in addition to those of `guard::HEADERS`, or prefixes of them.
const HEADERS: &[&str] = &[
    "x-amz-acl",
    "x-amz-bucket-object-lock-",
    "x-amz-bypass-governance-retention",
    "x-amz-checksum-",
    "x-amz-confirm-remove-self-bucket-access",
    "x-amz-copy-source-server-side-encryption-",
    "x-amz-expected-bucket-owner",
    "x-amz-grant-",
    "x-amz-if-match-last-modified-time",
    "x-amz-if-match-size",
    "x-amz-meta-",
    "x-amz-mfa",
    "x-amz-object-lock-",
    "x-amz-object-ownership",
    "x-amz-server-side-encryption",
    "x-amz-source-expected-bucket-owner",
    "x-amz-tagging",
    "x-amz-tagging-directive",
    "x-amz-transition-default-minimum-object-size",
    "x-amz-website-redirect-location",
    "x-amz-write-offset-bytes",
];

/// Headers of the caller's connection, signature and framing, and one that names another object.
const NOT_PASSED: &[&str] = &[
    "x-amz-api-version",
    "x-amz-content-sha256",
    "x-amz-copy-source",
    "x-amz-date",
    "x-amz-decoded-content-length",
    "x-amz-security-token",
    "x-amz-te",
    "x-amz-trailer",
    "x-amz-user-agent",
];

/// Standard HTTP headers that mean something to S3.
const STANDARD: &[HeaderName] = &[
    header::CACHE_CONTROL,
    header::CONTENT_DISPOSITION,
    header::CONTENT_LANGUAGE,
    header::CONTENT_TYPE,
    header::EXPIRES,
    header::IF_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_NONE_MATCH,
    header::IF_RANGE,
    header::IF_UNMODIFIED_SINCE,
    header::RANGE,
];

/// Headers of the origin's answer that concern its connection, or that this node sets itself.
const NOT_RETURNED: &[&str] = &[
    "connection",
    "date",
    "keep-alive",
    "proxy-authenticate",
    "server",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-amz-id-2",
    "x-amz-request-id",
];

/// What an operation is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    Object,
    /// The objects that are listed: those under the parameter `prefix`.
    Listing,
    Bucket,
}

/// An operation that an S3 origin can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// `None`: allowed to everyone who is allowed something in the bucket.
    action: Option<Action>,
    on: On,
    /// Whether the origin does it even if this node could.
    always: bool,
    changes: bool,
    /// Its answer names keys or buckets, so it cannot be used for a part of a bucket that is
    /// presented as a whole one.
    names: bool,
}

impl Operation {
    /// The operation that a request asks for; `None` if it is not one to pass on.
    ///
    /// # Errors
    /// `Unsupported` for an unknown parameter or header, or for two subresources at once: nobody
    /// knows what the origin would make of these.
    pub fn of(
        method: &Method,
        target: &Target,
        headers: &HeaderMap,
    ) -> Result<Option<Self>, Refusal> {
        let object = !target.key.is_empty();
        if target.bucket.is_empty() || (!object && *method == Method::POST) {
            return Ok(None);
        }
        let subresource = subresource(target)?;
        let operation = |action, on| Operation {
            action: Some(action),
            on,
            always: subresource.is_some(),
            changes: !matches!(*method, Method::GET | Method::HEAD),
            names: on != On::Object || matches!(subresource, Some("uploads" | "uploadId")),
        };
        let found = match (method.as_str(), object, subresource) {
            (_, false, Some("location")) => return Ok(None),
            ("GET", false, Some("versions" | "uploads") | None) => {
                operation(Action::List, On::Listing)
            }
            ("HEAD", false, None) => Operation {
                action: None,
                ..operation(Action::Read, On::Bucket)
            },
            ("PUT" | "DELETE", false, None) => Operation {
                always: true,
                ..operation(Action::Admin, On::Bucket)
            },
            ("GET" | "PUT" | "DELETE", false, Some(what)) if SETTINGS.contains(&what) => {
                operation(Action::Admin, On::Bucket)
            }
            (
                "GET" | "HEAD",
                true,
                None
                | Some("acl" | "tagging" | "attributes" | "legal-hold" | "retention" | "torrent"),
            ) => Operation {
                // The cache holds one version, as a whole and without its checksums.
                always: subresource.is_some()
                    || target.query("versionId").is_some()
                    || (*method == Method::HEAD && headers.contains_key("x-amz-checksum-mode")),
                ..operation(Action::Read, On::Object)
            },
            ("POST", true, Some("select")) => Operation {
                changes: false,
                ..operation(Action::Read, On::Object)
            },
            ("PUT", true, Some("acl" | "legal-hold" | "retention" | "encryption")) => {
                operation(Action::Admin, On::Object)
            }
            ("PUT" | "DELETE", true, None | Some("tagging" | "uploadId"))
            | ("POST", true, Some("uploads" | "uploadId" | "restore")) => Operation {
                always: true,
                ..operation(Action::Write, On::Object)
            },
            // Whoever may write the parts may list them.
            ("GET", true, Some("uploadId")) => operation(Action::Write, On::Object),
            _ => return Ok(None),
        };
        let known = |name: &str| {
            guard::HEADERS.contains(&name)
                || HEADERS
                    .iter()
                    .any(|h| name == *h || (h.ends_with('-') && name.starts_with(h)))
                || name.starts_with("x-amz-server-side-encryption")
        };
        match headers
            .keys()
            .find(|n| n.as_str().starts_with("x-amz-") && !known(n.as_str()))
        {
            Some(name) => Err(guard::not_offered(format!("the header {name}"))),
            None => Ok(Some(found)),
        }
    }

    /// Whether the origin does it even if this node could.
    pub fn is_always_the_origins(&self) -> bool {
        self.always
    }

    /// Checks that the caller may do this, with these headers.
    ///
    /// # Errors
    /// `PermissionDenied`.
    pub fn permit(
        &self,
        policy: &Policy,
        target: &Target,
        headers: &HeaderMap,
        source: Option<&Source>,
    ) -> Result<()> {
        let name = match self.on {
            On::Object => target.key.as_str(),
            On::Listing => target.query("prefix").unwrap_or_default(),
            On::Bucket => "",
        };
        match self.action {
            Some(action) => policy.check(action, &target.bucket, name)?,
            None => policy.check_known(&target.bucket)?,
        }
        let gives_away = headers.iter().any(|(name, value)| match name.as_str() {
            "x-amz-acl" => !guard::is_private(value.as_bytes()),
            "x-amz-bypass-governance-retention" => true,
            name => name.starts_with("x-amz-grant-") || name.starts_with("x-amz-object-lock-"),
        });
        if gives_away {
            policy.check(Action::Admin, &target.bucket, name)?;
        }
        match source {
            Some(source) => policy.check(Action::Read, source.name.bucket(), source.name.key()),
            None => Ok(()),
        }
    }

    fn changes(&self, method: &Method, target: &Target) -> Result<Changes> {
        Ok(match (self.changes, self.on) {
            (false, _) => Changes::Nothing,
            (true, On::Object) => {
                let name = object::name(&target.bucket, &target.key)?;
                match subresource(target) {
                    Ok(Some("uploads")) => Changes::Upload,
                    // POST completes it.
                    Ok(Some("uploadId")) if *method != Method::POST => Changes::Upload,
                    _ => Changes::Object(name),
                }
            }
            (true, _) => Changes::Bucket(target.bucket.clone()),
        })
    }

    /// The origin that does it, if there is one: an S3 service, for the whole bucket or for its
    /// objects.
    ///
    /// # Errors
    /// If there is no such bucket.
    pub async fn origin(
        &self,
        engine: &Engine,
        method: &Method,
        target: &Target,
    ) -> Result<Option<(Arc<dyn Origin>, S3Place)>> {
        let makes = self.on == On::Bucket && *method == Method::PUT && self.changes;
        let origin = if makes && subresource(target).is_ok_and(|s| s.is_none()) {
            match engine.buckets().origin_to_be(&target.bucket).await {
                // This node makes the bucket, then, or refuses to.
                Err(e) if e.kind() == ErrorKind::BucketNotFound => return Ok(None),
                other => other?,
            }
        } else {
            engine.buckets().origin(&target.bucket).await?
        };
        let place = origin
            .s3()
            .filter(|place| place.prefix.is_empty() || !self.names);
        Ok(place.map(|place| (origin, place)))
    }
}

/// The one parameter that says which part of a bucket or an object is meant.
fn subresource(target: &Target) -> Result<Option<&str>, Refusal> {
    let mut found: Option<&str> = None;
    for (i, (name, _)) in target.query.iter().enumerate() {
        if target.query[..i].iter().any(|(n, _)| n == name) {
            let e = Error::invalid(format!("the query parameter {name:?} is there twice"));
            return Err(e.hint("send it once").into());
        }
        let what = SETTINGS.iter().chain(OTHERS).find(|s| *s == name).copied();
        match (what, found) {
            (Some(what), None) => found = Some(what),
            (Some(what), Some(other)) => {
                let e = Error::invalid(format!("both {other:?} and {what:?} are asked for"));
                return Err(e.hint("send one request for each").into());
            }
            (None, _) if is_parameter(name) => {}
            (None, _) => {
                return Err(guard::not_offered(format!(
                    "the query parameter {:?}",
                    forebay_core::name::shorten(name)
                )));
            }
        }
    }
    Ok(found)
}

fn is_parameter(name: &str) -> bool {
    guard::QUERY.contains(&name)
        || PARAMETERS.contains(&name)
        || name.starts_with("response-")
        || is_of_signature(name)
}

/// Presigned requests carry their signature, and sometimes headers, in parameters; those are
/// headers again by now (`guard::unhoist`).
fn is_of_signature(name: &str) -> bool {
    name.get(..6)
        .is_some_and(|p| p.eq_ignore_ascii_case("x-amz-"))
}

/// A request that was checked here.
pub struct Checked<'a> {
    pub method: &'a Method,
    pub target: &'a Target,
    pub headers: &'a HeaderMap,
    pub body: ByteStream,
    pub trailing: Trailing,
    /// For a copy.
    pub source: Option<(&'a Source, S3Place)>,
}

/// Sends a request to its origin and gives back the answer.
///
/// # Errors
/// What is wrong with the request's body, or that the origin could not be asked.
pub async fn forward(
    engine: &Engine,
    operation: &Operation,
    origin: Arc<dyn Origin>,
    request: Checked<'_>,
    note: &Arc<Note>,
) -> Result<Response<AnswerBody>, Refusal> {
    let Checked {
        method,
        target,
        headers,
        body,
        trailing,
        source,
    } = request;
    let takes_long =
        source.is_some() || *method == Method::POST && target.query("uploadId").is_some();
    let mut passed = passed(headers);
    if let Some((source, place)) = source {
        passed.insert("x-amz-copy-source", source.header(&place)?);
    }
    let length = length(method, headers)?;
    let (mut held, mut verified) = (Vec::new(), None::<Verified>);
    let body = if length == 0 {
        ForwardBody::Empty
    } else {
        let of_the_body = of_the_body(method, target, headers);
        let (body, outcome) = verify(body, length, &of_the_body, trailing)?;
        verified = Some(outcome.clone());
        if length <= HELD_BODY_MAX_BYTES {
            let bytes = collect(body, length, engine.budget(), &mut held)
                .await
                .map_err(|e| outcome.failure().unwrap_or_else(|| e.into()))?;
            // Checksums that followed the body are sent before it.
            add_checksums(&mut passed, headers, &outcome)?;
            ForwardBody::Bytes(bytes)
        } else {
            let trailer = trailer(headers, &outcome);
            ForwardBody::Stream(length, body, trailer)
        }
    };
    let request = ForwardRequest {
        method: method.clone(),
        key: target.key.clone(),
        query: target
            .query
            .iter()
            .filter(|(n, _)| !is_of_signature(n) && n != "x-id")
            .cloned()
            .collect(),
        headers: passed,
        body,
    };
    let changes = operation.changes(method, target)?;
    let is_read = operation.on == On::Object
        && matches!(*method, Method::GET | Method::HEAD)
        && subresource(target).is_ok_and(|s| s.is_none());
    let changed = changes != Changes::Nothing;
    let (engine, noted) = (engine.clone(), note.clone());
    let answer = async move {
        let answer = match engine.forward(origin, request, changes, held).await {
            Ok(answer) => answer,
            // What was found wrong with the body matters more than what the origin made of the
            // broken body.
            Err(e) => {
                let failure = verified.and_then(|v| v.failure());
                return Err(failure.unwrap_or_else(|| e.into()));
            }
        };
        returned(answer, is_read, changed, &noted).await
    };
    if !takes_long {
        return answer.await;
    }
    let resource = format!("/{}/{}", target.bucket, target.key);
    late::begun(answer, late::SILENCE_MAX, resource, note.clone()).await
}

/// The result of removing an object.
#[derive(Debug, Default)]
pub struct Removed {
    /// Whether a delete marker was created or removed.
    pub is_marker: bool,
    pub marker: Option<String>,
}

/// Removes an object, or one version of it, at its origin, which is told `headers` with it; `None` if
/// that is not an S3 service.
///
/// # Errors
/// The origin's error, under its own code where S3 documents that code for removals.
pub async fn remove(
    engine: &Engine,
    name: &ObjectName,
    version: Option<&str>,
    headers: HeaderMap,
) -> Result<Option<Removed>, Refusal> {
    let origin = engine.buckets().origin(name.bucket()).await?;
    if origin.s3().is_none() {
        return Ok(None);
    }
    let request = ForwardRequest {
        method: Method::DELETE,
        key: name.key().to_owned(),
        query: version
            .map(|version| ("versionId".to_owned(), version.to_owned()))
            .into_iter()
            .collect(),
        headers,
        body: ForwardBody::Empty,
    };
    let changes = Changes::Object(name.clone());
    let answer = engine.forward(origin, request, changes, Vec::new()).await?;
    let header = |name: &str| {
        let value = answer.headers.get(name)?;
        value.to_str().ok().map(str::to_owned)
    };
    if answer.status.is_success() {
        return Ok(Some(Removed {
            is_marker: header("x-amz-delete-marker").as_deref() == Some("true"),
            marker: header("x-amz-version-id"),
        }));
    }
    let status = answer.status;
    let said = said(answer).await;
    let e = Error::invalid(format!("the origin answered {status} {}", said.describe()));
    Err(Refusal::bad(
        match said.code.as_str() {
            "AccessDenied" => "AccessDenied",
            "NoSuchVersion" => "NoSuchVersion",
            "InternalError" => "InternalError",
            // Tried often enough here, but not wrong: it may be asked for again.
            _ if matches!(status.as_u16(), 429 | 503) => "SlowDown",
            _ if status.is_server_error() => "InternalError",
            _ => "InvalidArgument",
        },
        e,
    ))
}

/// Creates (`PUT`) or removes (`DELETE`) a bucket, for APIs other than S3: at its origin where that
/// is an S3 service, otherwise as this node can. A bucket that holds objects is not removed.
///
/// # Errors
/// `PermissionDenied` without `admin`; `AlreadyExists`, `BucketNotFound`, `Conflict` for a bucket
/// that is not empty, or whatever else the origin said.
pub async fn change_bucket(
    engine: &Engine,
    policy: &Policy,
    method: &Method,
    bucket: &str,
) -> Result<()> {
    validate_bucket(bucket)?;
    let (target, headers) = (
        Target {
            bucket: bucket.to_owned(),
            ..Target::default()
        },
        HeaderMap::new(),
    );
    let operation = Operation::of(method, &target, &headers).map_err(|r| r.error().clone())?;
    let operation = operation.ok_or_else(|| Error::internal("no operation on buckets"))?;
    operation.permit(policy, &target, &headers, None)?;
    let Some((origin, place)) = operation.origin(engine, method, &target).await? else {
        return match *method {
            Method::PUT => engine.buckets().create(bucket).await,
            _ => engine.buckets().remove(bucket).await,
        };
    };
    let elsewhere = *method == Method::PUT && !matches!(&*place.region, "" | "us-east-1");
    let body = match elsewhere {
        true => ForwardBody::Bytes(
            format!(
                "<CreateBucketConfiguration xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
                 <LocationConstraint>{}</LocationConstraint></CreateBucketConfiguration>",
                super::error::escape(&place.region)
            )
            .into(),
        ),
        false => ForwardBody::Empty,
    };
    let request = ForwardRequest {
        method: method.clone(),
        key: String::new(),
        query: Vec::new(),
        headers,
        body,
    };
    let changes = operation.changes(method, &target)?;
    let answer = engine.forward(origin, request, changes, Vec::new()).await?;
    if answer.status.is_success() {
        return Ok(());
    }
    let status = answer.status;
    let said = said(answer).await;
    let kind = match &*said.code {
        "BucketAlreadyExists" | "BucketAlreadyOwnedByYou" => ErrorKind::AlreadyExists,
        "BucketNotEmpty" => ErrorKind::Conflict,
        "NoSuchBucket" => ErrorKind::BucketNotFound,
        _ => ErrorKind::from_http_status(status.as_u16()),
    };
    Err(Error::new(
        kind,
        format!("the origin answered {status} {}", said.describe()),
    ))
}

/// The error in an origin's answer, as far as it can be read.
async fn said(mut answer: ForwardResponse) -> ErrorDocument {
    let mut document = BytesMut::new();
    while let Some(Ok(piece)) = answer.body.next().await {
        document.extend_from_slice(&piece);
        if document.len() as u64 > limits::S3_ANSWER_MAX_BYTES {
            break;
        }
    }
    std::str::from_utf8(&document)
        .ok()
        .and_then(ErrorDocument::parse)
        .unwrap_or_default()
}

/// Turns the origin's answer into this node's.
async fn returned(
    answer: ForwardResponse,
    is_read: bool,
    changed: bool,
    note: &Note,
) -> Result<Response<AnswerBody>, Refusal> {
    let ForwardResponse {
        status,
        headers,
        mut body,
    } = answer;
    let mut response = Response::new(AnswerBody::Empty);
    *response.status_mut() = status;
    let length = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.parse::<u64>().ok());
    for (name, value) in &headers {
        if !NOT_RETURNED.contains(&name.as_str()) {
            response.headers_mut().append(name, value.clone());
        }
    }
    if is_read {
        note.x_cache(response.headers_mut(), CacheStatus::Bypass);
    }
    let has_none = note.method == Method::HEAD
        || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if has_none {
        if status.is_client_error() || status.is_server_error() {
            note.set_error(format!("the origin answered {status}"));
        }
        return Ok(response);
    }
    if changed || status.is_client_error() || status.is_server_error() {
        let mut document = BytesMut::new();
        while let Some(piece) = body.next().await {
            document.extend_from_slice(&piece?);
            if document.len() as u64 > limits::S3_ANSWER_MAX_BYTES {
                let e = Error::corrupt("the origin's answer is longer than any of S3's");
                return Err(e.into());
            }
        }
        response.headers_mut().remove(header::CONTENT_LENGTH);
        if !status.is_success() {
            let said = std::str::from_utf8(&document)
                .ok()
                .and_then(ErrorDocument::parse);
            note.set_error(match said {
                Some(said) => format!("the origin answered {status}: {}", said.describe()),
                None => format!("the origin answered {status}"),
            });
        }
        *response.body_mut() = AnswerBody::full(document.freeze());
    } else {
        *response.body_mut() = AnswerBody::stream(body, length);
    }
    Ok(response)
}

/// The headers that go to the origin.
fn passed(headers: &HeaderMap) -> HeaderMap {
    let mut out = HeaderMap::new();
    for (name, value) in headers {
        let is_ours = name.as_str().starts_with("x-amz-") && !NOT_PASSED.contains(&name.as_str());
        // An empty condition counts as none.
        let is_empty_condition = name.as_str().starts_with("if-") && value.is_empty();
        if (is_ours || STANDARD.contains(name)) && !is_empty_condition {
            out.append(name.clone(), value.clone());
        }
    }
    if let Some(md5) = headers.get("content-md5") {
        out.insert("content-md5", md5.clone());
    }
    let encoding = headers
        .get(header::CONTENT_ENCODING)
        .and_then(|v| v.to_str().ok())
        .map(str::to_owned);
    if let Some(kept) = super::convert::content_encoding(encoding)
        && let Ok(kept) = HeaderValue::from_str(&kept)
    {
        out.insert(header::CONTENT_ENCODING, kept);
    }
    out
}

/// The length of the body, without its framing.
pub(super) fn length(method: &Method, headers: &HeaderMap) -> Result<u64, Refusal> {
    let number = |name: &str| match headers.get(name).map(|v| v.to_str()) {
        None => Ok(None),
        Some(text) => match text.ok().and_then(|t| t.parse::<u64>().ok()) {
            Some(n) => Ok(Some(n)),
            None => Err(Error::invalid(format!(
                "the header {name} is not a number of bytes"
            ))),
        },
    };
    let is_framed = headers
        .get("x-amz-content-sha256")
        .is_some_and(|v| v.as_bytes().starts_with(b"STREAMING-"));
    let length = match number("x-amz-decoded-content-length")? {
        Some(n) => Some(n),
        None => number("content-length")?,
    };
    match length {
        Some(n) if n > limits::PUT_OBJECT_MAX_BYTES => {
            let (most, kind) = (limits::PUT_OBJECT_MAX_BYTES, ErrorKind::TooLarge);
            let e = Error::new(kind, format!("{n} bytes in one request, more than {most}"));
            Err(e.hint("use a multipart upload").into())
        }
        Some(n) => Ok(n),
        None if (headers.contains_key(header::TRANSFER_ENCODING) || is_framed)
            && matches!(*method, Method::PUT | Method::POST) =>
        {
            let e = Error::invalid("the length of the body is not known")
                .hint("send Content-Length, or x-amz-decoded-content-length");
            Err(Refusal::with_status(
                "MissingContentLength",
                StatusCode::LENGTH_REQUIRED,
                e,
            ))
        }
        None => Ok(0),
    }
}

/// Collects a whole body. Memory is reserved as it arrives, so an announcement alone holds nothing.
/// Nobody waits for more of it while holding some: many bodies would wait for each other.
pub(super) async fn collect(
    mut body: ByteStream,
    length: u64,
    budget: &MemoryBudget,
    held: &mut Vec<Reservation>,
) -> Result<Bytes> {
    let mut whole = BytesMut::new();
    let mut allowed = UNRESERVED_BYTES;
    while let Some(piece) = body.next().await {
        let piece = piece?;
        let total = (whole.len() + piece.len()) as u64;
        if total > allowed {
            let more = (total - allowed).max(allowed.min(length.saturating_sub(allowed)));
            let taken = budget.try_hold(more);
            held.push(taken.map_err(|e| e.context("the body of the request"))?);
            allowed += more;
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole.freeze())
}

/// The headers that tell what the body is. Those of a completion tell the checksum of the object, and
/// its body is the list of the parts.
pub(super) fn of_the_body<'a>(
    method: &Method,
    target: &Target,
    headers: &'a HeaderMap,
) -> Cow<'a, HeaderMap> {
    if *method != Method::POST || target.query("uploadId").is_none() {
        return Cow::Borrowed(headers);
    }
    let mut headers = headers.clone();
    for algorithm in algorithms() {
        headers.remove(format!("x-amz-checksum-{algorithm}"));
    }
    Cow::Owned(headers)
}

/// The names of the checksums that follow the body.
fn trailers(headers: &HeaderMap) -> impl Iterator<Item = String> {
    headers
        .get_all("x-amz-trailer")
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
}

/// The checksum that follows a streaming body, sent after it again. S3 takes one.
fn trailer(headers: &HeaderMap, found: &Verified) -> Option<Trailer> {
    let name = trailers(headers).next()?;
    let algorithm = name.strip_prefix("x-amz-checksum-")?.to_owned();
    // In base64.
    let value_bytes = bytes_of(&algorithm)?.div_ceil(3) * 4;
    let found = found.clone();
    let value = move || {
        let sum = found.value(&algorithm);
        sum.ok_or_else(|| Error::internal(format!("the {algorithm} of an upload is not known")))
    };
    Some(Trailer {
        name,
        value_bytes,
        value: Box::new(value),
    })
}

/// Adds checksums that came in trailers as headers.
fn add_checksums(passed: &mut HeaderMap, headers: &HeaderMap, found: &Verified) -> Result<()> {
    for name in trailers(headers) {
        let Some(sum) = name
            .strip_prefix("x-amz-checksum-")
            .and_then(|algorithm| found.value(algorithm))
        else {
            continue;
        };
        let name: HeaderName = name
            .parse()
            .map_err(|_| Error::internal("the name of a checksum"))?;
        let sum = HeaderValue::from_str(&sum).map_err(|_| Error::internal("a checksum"))?;
        passed.insert(name, sum);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_changes_when_its_upload_is_completed() {
        let changes = |method: Method, uri: &str| {
            let headers = HeaderMap::new();
            let target = Target::of(&uri.parse().unwrap(), &headers, &[], false).unwrap();
            let operation = Operation::of(&method, &target, &headers).unwrap().unwrap();
            operation.changes(&method, &target).unwrap()
        };
        for (method, uri) in [
            (Method::POST, "/bucket/k?uploads"),
            (Method::PUT, "/bucket/k?uploadId=1&partNumber=1"),
            (Method::DELETE, "/bucket/k?uploadId=1"),
        ] {
            assert_eq!(changes(method, uri), Changes::Upload, "{uri}");
        }
        let object = Changes::Object(object::name("bucket", "k").unwrap());
        for (method, uri) in [
            (Method::POST, "/bucket/k?uploadId=1"),
            (Method::PUT, "/bucket/k"),
            (Method::PUT, "/bucket/k?tagging"),
            (Method::DELETE, "/bucket/k"),
        ] {
            assert_eq!(changes(method, uri), object, "{uri}");
        }
        let listed = changes(Method::GET, "/bucket/k?uploadId=1");
        assert_eq!(listed, Changes::Nothing);
    }

    #[test]
    fn the_checksum_of_a_completed_upload_is_not_that_of_its_list_of_parts() {
        let sum = "x-amz-checksum-crc32";
        let headers = HeaderMap::from_iter([
            (
                HeaderName::from_static(sum),
                HeaderValue::from_static("AAAAAA==-2"),
            ),
            (header::CONTENT_LENGTH, HeaderValue::from_static("5")),
        ]);
        for (method, uri, is_of_the_body) in [
            (Method::POST, "/bucket/k?uploadId=1", false),
            (Method::PUT, "/bucket/k?uploadId=1&partNumber=1", true),
            (Method::POST, "/bucket/k?restore", true),
        ] {
            let target = Target::of(&uri.parse().unwrap(), &HeaderMap::new(), &[], false).unwrap();
            let checked = of_the_body(&method, &target, &headers);
            assert_eq!(checked.contains_key(sum), is_of_the_body, "{method} {uri}");
            assert!(checked.contains_key(header::CONTENT_LENGTH));
        }
        assert!(passed(&headers).contains_key(sum));
    }

    /// All of them hold something and want more: if they waited, it would be for each other.
    #[tokio::test]
    async fn bodies_that_need_more_memory_than_there_is_do_not_wait_for_each_other() {
        let budget = MemoryBudget::new(256 << 10);
        let length = 200 << 10;
        let pieces = || {
            let piece = || Ok(Bytes::from(vec![0; 20 << 10]));
            futures::stream::iter((0..10).map(move |_| piece()))
        };
        let bodies = (0..4).map(|_| {
            let budget = budget.clone();
            async move {
                let mut held = Vec::new();
                let body = pieces().then(|piece| async {
                    tokio::task::yield_now().await;
                    piece
                });
                collect(body.boxed(), length, &budget, &mut held).await
            }
        });
        let all = futures::future::join_all(bodies);
        let all = tokio::time::timeout(std::time::Duration::from_secs(20), all).await;
        for refused in all.expect("nobody waits") {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Busy);
        }
    }
}
