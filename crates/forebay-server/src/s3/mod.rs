//! The S3 front: path-style and virtual-host, anonymous or signed.
//!
//! A request passes the guards (`guard.rs`), then its sender is determined, then it reaches the
//! operation. The `s3s` library checks signatures; `signature.rs` checks those of plain reads
//! before it. Requests that need no signature (over the Unix socket, or while no keys are
//! configured) may carry one all the same, since SDKs sign with whatever keys they find: it is
//! removed unread. The framing of uploads is undone on the way (`chunked.rs`).
//!
//! Then both kinds are treated alike ([`Serving::serve`]), each with its sender's policy:
//! - reads of objects come from the engine (`read.rs`);
//! - what only the origin can do goes there, if it is an S3 service (`forward.rs`);
//! - copies are made (`copy.rs`);
//! - the other operations use the library's types for them (`list.rs`, `write.rs`, `multipart`).
//!
//! `late.rs` keeps the connection alive where a copy or the completion of an upload takes long.
//!
//! Invariant: nothing reaches an operation unless its sender is known and may do this (`access.rs`,
//! `forward.rs`), and what an operation does not support is refused, not ignored.

mod access;
pub(crate) mod chunked;
mod convert;
mod copy;
pub mod error;
mod forward;
mod guard;
mod late;
mod list;
mod multipart;
mod path;
mod read;
mod signature;
mod verify;
mod write;

pub use forward::change_bucket;
pub use path::Target;

pub(crate) use convert::check_attributes;

use crate::{
    auth::{Access, Policy},
    body::AnswerBody,
    config::{Action, Config},
    note::Note,
    request_body::UploadBody,
    uploads::Uploads,
};
use bytes::Bytes;
use chrono::Utc;
use error::Refusal;
use forebay_core::{Error, MemoryBudget, name::validate_bucket, sync::Mutex};
use forebay_engine::{ByteStream, Engine};
use forward::Operation;
use futures::{StreamExt, TryStreamExt};
use http::{
    Extensions, HeaderMap, HeaderValue, Method, Request, Response, Uri, header, request::Parts,
};
use http_body::Frame;
use http_body_util::{BodyDataStream, BodyExt, StreamBody};
use s3s::{
    Body, S3, S3Error, S3ErrorCode, S3Request, S3Response, S3Result,
    auth::{S3Auth, SecretKey},
    config::{S3Config, StaticConfigProvider},
    dto::*,
    host::{S3Host, VirtualHost},
    route::S3Route,
    service::{S3Service, S3ServiceBuilder},
    validation::NameValidation,
};
use std::{sync::Arc, time::Duration};
use verify::Trailing;

/// Longer than any error answer: the head of the request bounds resource and message.
const ERROR_BODY_MAX_BYTES: usize = 1 << 20;

/// The keys in force.
struct Keys(Arc<Access>);

#[async_trait::async_trait]
impl S3Auth for Keys {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        let unknown = || {
            S3Error::with_message(
                S3ErrorCode::InvalidAccessKeyId,
                "the access key is not one of this node's (see auth.keys)",
            )
        };
        self.0
            .secret(access_key)
            .map(|secret| secret.reveal().into())
            .ok_or_else(unknown)
    }
}

/// The operations, over the engine.
#[derive(Clone)]
pub(crate) struct Ops {
    engine: Engine,
    uploads: Arc<Uploads>,
    /// For chunks with their own signatures.
    chunks: MemoryBudget,
}

/// Answers S3 requests.
pub struct Front {
    hostnames: Vec<String>,
    access: Arc<Access>,
    serving: Arc<Serving>,
    /// Checks the signatures of plain reads.
    reads: signature::Reads,
    /// Checks signatures and passes the requests with right ones to `serving`.
    verifier: S3Service,
}

/// Answers requests whose sender is known.
struct Serving {
    ops: Ops,
    access: Arc<Access>,
    /// For how long the client of a copy or a completion that is made here hears nothing.
    silence: Duration,
    /// The operations in the library's form. It checks no signatures, only what the policy allows.
    library: S3Service,
}

/// A request whose sender is known.
struct Verified {
    head: Parts,
    target: Arc<Target>,
    policy: Arc<Policy>,
    note: Arc<Note>,
    /// The body without the framing of an upload.
    body: ByteStream,
    trailing: Trailing,
}

impl Front {
    pub fn new(
        config: &Config,
        engine: Engine,
        uploads: Arc<Uploads>,
        access: Arc<Access>,
    ) -> Self {
        Self::silent_for(late::SILENCE_MAX, config, engine, uploads, access)
    }

    fn silent_for(
        silence: Duration,
        config: &Config,
        engine: Engine,
        uploads: Arc<Uploads>,
        access: Arc<Access>,
    ) -> Self {
        let ops = Ops {
            chunks: chunked::share_of(engine.budget()),
            engine,
            uploads,
        };
        let builder = || {
            let mut builder = S3ServiceBuilder::new(ops.clone());
            builder.set_host(Hosts(config.listen.hostnames.clone()));
            builder.set_validation(Names);
            let mut limits = S3Config::default();
            limits.xml_max_body_size = guard::XML_MAX_BYTES;
            builder.set_config(Arc::new(StaticConfigProvider::new(Arc::new(limits))));
            // Without keys, the library would not call the gate.
            builder.set_auth(Keys(access.clone()));
            builder
        };
        let mut library = builder();
        library.set_access(access::Gate);
        let serving = Arc::new(Serving {
            ops: ops.clone(),
            access: access.clone(),
            silence,
            library: library.build(),
        });
        let mut verifier = builder();
        verifier.set_route(SignatureIsRight(serving.clone()));
        Front {
            hostnames: config.listen.hostnames.clone(),
            access,
            serving,
            reads: signature::Reads::default(),
            verifier: verifier.build(),
        }
    }

    /// Answers one request.
    pub async fn call(
        &self,
        request: Request<UploadBody>,
        note: Arc<Note>,
    ) -> Response<AnswerBody> {
        let resource = request.uri().path().to_owned();
        match self.admit(request, note.clone()).await {
            Ok(response) => response,
            Err(refusal) => refusal.response(&resource, &note),
        }
    }

    /// What a request names. For AIStore's clients, `/s3` is an alias of the root, unless a bucket
    /// of that name is configured.
    fn target(&self, head: &Parts) -> Result<Target, Error> {
        let aliases = !self.serving.ops.engine.buckets().is_mapped("s3");
        Target::of(&head.uri, &head.headers, &self.hostnames, aliases)
    }

    async fn admit(
        &self,
        request: Request<UploadBody>,
        note: Arc<Note>,
    ) -> Result<Response<AnswerBody>, Refusal> {
        let (mut head, body) = request.into_parts();
        let mut target = self.target(&head)?;
        note.set_name(&target.bucket, &target.key);
        guard::check_name(&target)?;
        guard::check_document(&head.method, &target, &head.headers)?;
        guard::check_form(&head.method, &head.headers)?;
        let framing = Framing::of(&head.headers);
        let stream =
            |body| -> ByteStream { BodyDataStream::new(body).map_err(upload_error).boxed() };
        if let Some(name) = self.access.open_to(note.peer) {
            note.set_caller(&name.into());
            guard::unhoist(&target, &mut head.headers)?;
            target.query.retain(|(name, _)| !is_of_signature(name));
            head.headers.remove(header::AUTHORIZATION);
            head.uri = without_signature(&head.uri, &target);
            let (body, trailing) = match framing {
                Framing::None => (stream(body), Trailing::None),
                _ => unframed(stream(body), &mut head.headers),
            };
            let request = Verified {
                head,
                target: Arc::new(target),
                policy: Policy::full(),
                note,
                body,
                trailing,
            };
            return self.serving.serve(request).await;
        }
        if !self.access.has_keys() {
            return Err(Error::permission_denied(
                "this node has tokens for /v1/, but no keys for S3",
            )
            .hint("ask the operator to set auth.keys, or use the Unix socket")
            .into());
        }
        guard::check_signature(&target, &head.headers)?;
        guard::check_scope(&target, &head.headers)?;
        if read::is_read(&head.method, &target)
            && let Some(key) = self
                .reads
                .verified(&head, &target, &self.access, Utc::now())
            && let Some(caller) = self.access.of_key(key)
        {
            note.set_caller(&caller.name);
            head.headers.remove(header::AUTHORIZATION);
            head.uri = without_signature(&head.uri, &target);
            let request = Verified {
                head,
                target: Arc::new(target),
                policy: caller.policy,
                note,
                body: stream(body),
                trailing: Trailing::None,
            };
            return self.serving.serve(request).await;
        }
        let (body, aside) = match framing {
            // The body's length is needed.
            Framing::None => (Body::http_body_unsync(body), Aside::None),
            // No chunk has a signature to check: the library would only undo the framing, and keep
            // each chunk whole. It gets an empty body instead.
            Framing::Unsigned => (
                Body::from(Bytes::from_static(b"0\r\n\r\n")),
                Aside::Framed(stream(body)),
            ),
            Framing::Signed => {
                let ops = &self.serving.ops;
                let budgets = [ops.engine.budget().clone(), ops.chunks.clone()];
                let (body, refused) = chunked::bounded(stream(body), budgets);
                let body = StreamBody::new(body.map_ok(Frame::data));
                (Body::http_body_unsync(body), Aside::Bounded(refused))
            }
        };
        head.extensions.insert(note.clone());
        head.extensions.insert(Arc::new(target));
        head.extensions.insert(Arc::new(Mutex::new(aside)));
        let request = Request::from_parts(head, body);
        Ok(library(&self.verifier, request, &note, None).await)
    }
}

/// How the body of an upload is framed.
enum Framing {
    None,
    /// `aws-chunked`, with a checksum after it.
    Unsigned,
    /// `aws-chunked`, where each chunk has its own signature.
    Signed,
}

impl Framing {
    fn of(headers: &HeaderMap) -> Self {
        match headers.get("x-amz-content-sha256").map(|v| v.as_bytes()) {
            Some(b"STREAMING-UNSIGNED-PAYLOAD-TRAILER") => Framing::Unsigned,
            Some(v) if v.starts_with(b"STREAMING-") => Framing::Signed,
            _ => Framing::None,
        }
    }
}

/// The part of a body that the library does not see.
enum Aside {
    None,
    /// The whole body: it is unframed here.
    Framed(ByteStream),
    /// The reason if the body is refused on its way.
    Bounded(chunked::Refused),
}

/// Undoes the framing, and sets the length of the content.
fn unframed(body: ByteStream, headers: &mut HeaderMap) -> (ByteStream, Trailing) {
    let (body, trailers) = chunked::decode(body);
    headers.remove(header::CONTENT_LENGTH);
    if let Some(length) = headers.get("x-amz-decoded-content-length").cloned() {
        headers.insert(header::CONTENT_LENGTH, length);
    }
    (body, Trailing::Own(trailers))
}

/// Receives requests from the library once it has found their signature right.
struct SignatureIsRight(Arc<Serving>);

#[async_trait::async_trait]
impl S3Route for SignatureIsRight {
    fn is_match(&self, _: &Method, _: &Uri, _: &HeaderMap, _: &mut Extensions) -> bool {
        true
    }

    async fn call(&self, request: S3Request<Body>) -> S3Result<S3Response<Body>> {
        let mut extensions = request.extensions;
        let (Some(target), Some(note), Some(aside)) = (
            extensions.remove::<Arc<Target>>(),
            extensions.remove::<Arc<Note>>(),
            extensions.remove::<Arc<Mutex<Aside>>>(),
        ) else {
            return Err(s3s::s3_error!(
                InternalError,
                "a request without its target"
            ));
        };
        let policy = access::policy_of(&self.0.access, request.credentials.as_ref(), Some(&note))?;
        let (mut head, ()) = Request::new(()).into_parts();
        (head.method, head.uri, head.headers) = (
            request.method,
            without_signature(&request.uri, &target),
            request.headers,
        );
        head.headers.remove(header::AUTHORIZATION);
        let aside = std::mem::replace(&mut *aside.lock(), Aside::None);
        let (body, trailing) = match aside {
            Aside::Framed(body) => unframed(body, &mut head.headers),
            other => {
                let refused = match other {
                    Aside::Bounded(refused) => Some(refused),
                    _ => None,
                };
                let body = BodyDataStream::new(request.input).map_err(move |e| {
                    let why = refused.as_ref().and_then(|r| r.lock().clone());
                    why.unwrap_or_else(|| upload_error(e))
                });
                let trailing = request
                    .trailing_headers
                    .map_or(Trailing::None, Trailing::Library);
                (body.boxed(), trailing)
            }
        };
        let resource = head.uri.path().to_owned();
        let verified = Verified {
            head,
            target,
            policy,
            note: note.clone(),
            body,
            trailing,
        };
        let response = match self.0.serve(verified).await {
            Ok(response) => response,
            Err(refusal) => refusal.response(&resource, &note),
        };
        let (head, body) = response.into_parts();
        let mut response = S3Response::with_headers(Body::http_body_unsync(body), head.headers);
        response.status = Some(head.status);
        Ok(response)
    }
}

impl Serving {
    async fn serve(&self, request: Verified) -> Result<Response<AnswerBody>, Refusal> {
        let Verified {
            mut head,
            target,
            policy,
            note,
            body,
            trailing,
        } = request;
        let engine = &self.ops.engine;
        guard::unhoist(&target, &mut head.headers)?;
        let foreign = guard::foreign(&head.method, &target, &head.headers);
        let source = copy::Source::of(&head.headers)?
            .filter(|_| head.method == Method::PUT && !target.key.is_empty());
        // A request that cannot be passed on is refused only if it cannot be done here.
        let operation = match Operation::of(&head.method, &target, &head.headers) {
            Err(refusal) if foreign.is_some() => return Err(refusal),
            other => other.unwrap_or_default(),
        };
        let can = |operation: &Operation| {
            operation.permit(&policy, &target, &head.headers, source.as_ref())
        };
        if let Some(operation) = operation
            && (foreign.is_some() || operation.is_always_the_origins())
        {
            can(&operation)?;
            if let Some((origin, place)) = operation.origin(engine, &head.method, &target).await? {
                let source = match &source {
                    Some(source) => source.at(engine, &place).await?.map(|at| (source, at)),
                    None => None,
                };
                // A copy from another service is made here.
                if source.is_some() || !head.headers.contains_key("x-amz-copy-source") {
                    let request = forward::Checked {
                        method: &head.method,
                        target: &target,
                        headers: &head.headers,
                        body,
                        trailing,
                        source,
                    };
                    return forward::forward(engine, &operation, origin, request, &note).await;
                }
            }
        }
        if let Some(refusal) = foreign {
            return Err(refusal);
        }
        if read::is_read(&head.method, &target) {
            policy.check(Action::Read, &target.bucket, &target.key)?;
            let (method, headers) = (&head.method, &head.headers);
            if let Some(answer) = read::read(engine, &target, method, headers, &note).await? {
                return Ok(answer);
            }
            // The object has parts, which only its origin knows.
            if let Some(operation) = operation
                && let Some((origin, _)) = operation.origin(engine, method, &target).await?
            {
                let request = forward::Checked {
                    method,
                    target: &target,
                    headers,
                    body,
                    trailing,
                    source: None,
                };
                return forward::forward(engine, &operation, origin, request, &note).await;
            }
            let e = Error::unsupported("a part of an object that was uploaded in several");
            return Err(e.hint("read it by ranges").into());
        }
        convert::quote_etags(&mut head.headers);
        if let Some(source) = &source {
            policy.check(Action::Write, &target.bucket, &target.key)?;
            policy.check(Action::Read, source.name.bucket(), source.name.key())?;
            let (ops, source, noted) = (self.ops.clone(), source.clone(), note.clone());
            let (resource, headers) = (head.uri.path().to_owned(), head.headers);
            let answer = async move { ops.copy(&target, &headers, &source, &noted).await };
            return late::begun(answer, self.silence, resource, note).await;
        }
        let completes = head.method == Method::POST
            && !target.key.is_empty()
            && target.query("uploadId").is_some();
        // Of the list of what is to be removed, the library checks no checksum.
        let removes =
            head.method == Method::POST && target.query.iter().any(|(n, _)| n == "delete");
        let (body, checked) = match removes {
            true => {
                let length = forward::length(&head.method, &head.headers)?;
                let (body, checked) =
                    verify::verify(body, length, &head.headers, trailing.clone())?;
                (body, Some(checked))
            }
            false => (body, None),
        };
        // The list of parts is read before the time begins after which the client is sent 200.
        let mut held = Vec::new();
        let body = match completes {
            true => {
                let of_the_body = forward::of_the_body(&head.method, &target, &head.headers);
                let length = forward::length(&head.method, &head.headers)?;
                let (body, checked) = verify::verify(body, length, &of_the_body, trailing.clone())?;
                let list = forward::collect(body, length, engine.budget(), &mut held).await;
                Body::from(list.map_err(|e| checked.failure().unwrap_or_else(|| e.into()))?)
            }
            false => Body::http_body_unsync(StreamBody::new(body.map_ok(Frame::data))),
        };
        head.extensions.insert(note.clone());
        head.extensions.insert(policy);
        head.extensions.insert(trailing);
        let condition = error::condition(&head.headers, &["If-Match", "If-None-Match"]);
        let request = Request::from_parts(head, body);
        if completes {
            let resource = request.uri().path().to_owned();
            let (service, noted) = (self.library.clone(), note.clone());
            let answer = async move {
                let _held = held;
                Ok::<_, Refusal>(library(&service, request, &noted, condition).await)
            };
            return late::begun(answer, self.silence, resource, note).await;
        }
        let answer = library(&self.library, request, &note, condition).await;
        match checked.and_then(|checked| checked.failure()) {
            Some(failure) => Err(failure),
            None => Ok(answer),
        }
    }
}

/// `condition` is the header under which the request is carried out.
async fn library(
    service: &S3Service,
    request: Request<Body>,
    note: &Note,
    condition: Option<&'static str>,
) -> Response<AnswerBody> {
    let resource = request.uri().path().to_owned();
    match service.call(request).await {
        Ok(response)
            if response.status().is_client_error() || response.status().is_server_error() =>
        {
            complete_error(response, &resource, note, condition).await
        }
        Ok(response) => response.map(AnswerBody::S3),
        Err(e) => {
            let cause: crate::body::BoxError = e.into();
            let e = Error::internal("the request could not be answered").caused_by(cause);
            Refusal::from(e).response(&resource, note)
        }
    }
}

/// The library's own errors have a code and often nothing else.
async fn complete_error(
    response: Response<Body>,
    resource: &str,
    note: &Note,
    condition: Option<&str>,
) -> Response<AnswerBody> {
    let (mut head, body) = response.into_parts();
    let Ok(body) = http_body_util::Limited::new(body, ERROR_BODY_MAX_BYTES)
        .collect()
        .await
        .map(|b| b.to_bytes())
    else {
        let e = Error::internal("the error of the S3 library could not be read");
        return Refusal::from(e).response(resource, note);
    };
    let completed = std::str::from_utf8(&body)
        .ok()
        .and_then(|xml| error::completed(xml, resource, &note.id, condition));
    let body = match completed {
        None => AnswerBody::full(body),
        Some((xml, log)) => {
            if note.learned().error.is_empty() {
                note.set_error(log);
            }
            head.headers.remove(header::CONTENT_LENGTH);
            AnswerBody::full(xml)
        }
    };
    Response::from_parts(head, body)
}

fn upload_error(e: crate::body::BoxError) -> Error {
    match e.downcast::<Error>() {
        Ok(e) => *e,
        Err(e) => Error::invalid(format!("the upload broke off: {e}")).hint("send it again"),
    }
}

fn is_of_signature(name: &str) -> bool {
    name.get(..6)
        .is_some_and(|p| p.eq_ignore_ascii_case("x-amz-"))
        || matches!(name, "Signature" | "AWSAccessKeyId" | "Expires")
}

/// The URI below the root, without the query parameters of a signature: nobody checks it, or it was
/// already checked.
fn without_signature(uri: &Uri, target: &Target) -> Uri {
    let unaliased;
    let uri = match target.aliased {
        true => {
            unaliased = path::without_alias(uri);
            &unaliased
        }
        false => uri,
    };
    let Some(query) = uri.query() else {
        return uri.clone();
    };
    let is_signature = |pair: &str| is_of_signature(pair.split('=').next().unwrap_or_default());
    if !query.split('&').any(is_signature) {
        return uri.clone();
    }
    let kept: Vec<&str> = query
        .split('&')
        .filter(|pair| !is_signature(pair))
        .collect();
    let text = if kept.is_empty() {
        uri.path().to_owned()
    } else {
        format!("{}?{}", uri.path(), kept.join("&"))
    };
    // It was part of a valid URI.
    text.parse().unwrap_or_else(|_| uri.clone())
}

/// Our rule for bucket names is wider than S3's.
struct Names;

impl NameValidation for Names {
    fn validate_bucket_name(&self, name: &str) -> bool {
        validate_bucket(name).is_ok()
    }
}

struct Hosts(Vec<String>);

impl S3Host for Hosts {
    fn parse_host_header<'a>(&'a self, host: &'a str) -> S3Result<VirtualHost<'a>> {
        let found = VirtualHost::new(host);
        Ok(match path::virtual_host_bucket(host, &self.0) {
            Some(bucket) => found.with_bucket(bucket),
            None => found,
        })
    }
}

/// Forwards the operations that are offered; the others keep the library's answer, 501.
macro_rules! operations {
    ($($operation:ident($input:ty) -> $output:ty = $method:ident),* $(,)?) => {
        #[async_trait::async_trait]
        impl S3 for Ops { $(
            async fn $operation(&self, request: S3Request<$input>) -> S3Result<S3Response<$output>> {
                self.$method(request).await
            }
        )* }
    };
}

operations! {
    list_buckets(ListBucketsInput) -> ListBucketsOutput = buckets,
    head_bucket(HeadBucketInput) -> HeadBucketOutput = head_bucket,
    create_bucket(CreateBucketInput) -> CreateBucketOutput = create,
    delete_bucket(DeleteBucketInput) -> DeleteBucketOutput = remove_bucket,
    get_bucket_location(GetBucketLocationInput) -> GetBucketLocationOutput = location,
    list_objects(ListObjectsInput) -> ListObjectsOutput = list_v1,
    list_objects_v2(ListObjectsV2Input) -> ListObjectsV2Output = list_v2,
    put_object(PutObjectInput) -> PutObjectOutput = put,
    delete_object(DeleteObjectInput) -> DeleteObjectOutput = delete,
    delete_objects(DeleteObjectsInput) -> DeleteObjectsOutput = delete_many,
    create_multipart_upload(CreateMultipartUploadInput) -> CreateMultipartUploadOutput = create_upload,
    upload_part(UploadPartInput) -> UploadPartOutput = put_part,
    complete_multipart_upload(CompleteMultipartUploadInput) -> CompleteMultipartUploadOutput = complete,
    abort_multipart_upload(AbortMultipartUploadInput) -> AbortMultipartUploadOutput = abort,
    list_parts(ListPartsInput) -> ListPartsOutput = parts,
    list_multipart_uploads(ListMultipartUploadsInput) -> ListMultipartUploadsOutput = uploads,
}

/// For a request that is refused before it is examined.
pub fn refused(e: &Error, resource: &str, note: &Note) -> Response<AnswerBody> {
    let mut response = Refusal::from(e.clone()).response(resource, note);
    response
        .headers_mut()
        .insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{metrics::Metrics, note::Peer, request_id::RequestId, uploads::NewPart};
    use forebay_engine::{Freshness, PutRequest};
    use forebay_testing::engine::Bench;
    use futures::stream;
    use http::StatusCode;

    /// The origin is no S3 service: the node makes the copy and completes the upload.
    #[tokio::test]
    async fn a_copy_or_completion_that_the_node_makes_keeps_the_connection_alive() {
        let bench = Bench::new(Freshness::Always);
        let (engine, origin) = (&bench.engine, &bench.origin);
        origin.set("from", "copied");
        let uploads = Arc::new(Uploads::new(10));
        let name = forebay_testing::engine::name("up");
        let begun = engine.create_upload(&name, PutRequest::default()).await;
        let id = begun.unwrap();
        uploads.begin(&name, &id, 0);
        let part = NewPart {
            number: 1,
            size: 8,
            body: stream::iter([Ok(Bytes::from_static(b"uploaded"))]).boxed(),
        };
        let sent = uploads.send_part(engine, &name, &id, part, Checksum::default);
        let etag = sent.await.unwrap().part.etag;
        let config = Config::default();
        let access = Arc::new(Access::new(&config.auth).unwrap());
        let silence = Duration::from_millis(20);
        let front = Front::silent_for(silence, &config, engine.clone(), uploads, access);
        let told = async |request: Request<String>, arrives_after: Duration| {
            let (mut head, body) = request.into_parts();
            let length = HeaderValue::from(body.len());
            head.headers.insert(header::CONTENT_LENGTH, length);
            let target = Target::of(&head.uri, &head.headers, &[], false).unwrap();
            let (method, metrics) = (head.method.clone(), Arc::new(Metrics::default()));
            let verified = Verified {
                head,
                target: Arc::new(target),
                policy: Policy::full(),
                note: Note::new(RequestId::new(), Peer::Unix, method, metrics),
                body: stream::once(async move {
                    tokio::time::sleep(arrives_after).await;
                    Ok(Bytes::from(body))
                })
                .boxed(),
                trailing: Trailing::None,
            };
            let answer = front.serving.serve(verified).await.unwrap();
            let (status, mut body) = (answer.status(), Box::pin(answer.into_body()));
            let mut document = String::new();
            let patience = Duration::from_secs(60);
            while let Some(frame) = tokio::time::timeout(patience, body.frame())
                .await
                .expect("the space comes, and then the answer")
            {
                let bytes = frame.unwrap().into_data().unwrap();
                document.push_str(std::str::from_utf8(&bytes).unwrap());
                if document.contains("?>\n ") {
                    origin.holds_acknowledgements.send_replace(false);
                }
            }
            (status, document)
        };

        let copy = Request::put("/data/to").header("x-amz-copy-source", "/data/from");
        let upload = format!("/data/up?uploadId={}", id.replace('#', "%23"));
        // What is wrong with a list is told by the status, however late the list comes.
        for bad in [
            "<CompleteMultipartUpload><Part>",
            "<CompleteMultipartUpload/>",
        ] {
            let completion = Request::post(&upload).body(bad.to_owned()).unwrap();
            let (status, document) = told(completion, silence * 5).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{document}");
            assert!(document.contains("<Code>MalformedXML</Code>"), "{document}");
        }
        let completion = Request::post(&upload);
        let parts = format!(
            "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>\"{etag}\"</ETag>\
             </Part></CompleteMultipartUpload>"
        );
        for (request, result, key, content) in [
            (
                copy.body(String::new()),
                "<CopyObjectResult",
                "to",
                "copied",
            ),
            (
                completion.body(parts),
                "<CompleteMultipartUploadResult",
                "up",
                "uploaded",
            ),
        ] {
            origin.holds_acknowledgements.send_replace(true);
            let (status, document) = told(request.unwrap(), Duration::ZERO).await;
            assert_eq!(status, StatusCode::OK, "{document}");
            // The space came before the answer was known.
            let is_late = document.contains("?>\n ");
            assert!(is_late && document.contains(result), "{document}");
            assert_eq!(origin.objects.lock()[key].0, content);
        }
    }

    #[test]
    fn a_signature_that_nobody_checks_is_taken_off() {
        let strip =
            |uri: &str| without_signature(&uri.parse().unwrap(), &Target::default()).to_string();
        assert_eq!(
            strip("/b/k?X-Amz-Signature=1&uploads&X-Amz-Date=2"),
            "/b/k?uploads"
        );
        assert_eq!(strip("/b/k?X-Amz-Signature=1"), "/b/k");
        assert_eq!(
            strip("/b?list-type=2&prefix=a%2Fb"),
            "/b?list-type=2&prefix=a%2Fb"
        );
    }
}
