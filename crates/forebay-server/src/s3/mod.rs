//! The S3 front: path-style and virtual-host, anonymous or signed.
//!
//! A request goes through: the guards (`guard.rs`), who it is from, then the operation. Requests
//! that need no signature (over the Unix socket, or while no keys are configured) may carry one all
//! the same, since SDKs sign with whatever keys they find: it is taken off unread, with the framing
//! of uploads (`chunked.rs`). Signed requests are checked by the `s3s` library. Reads of objects
//! never take the library's own form (`read.rs`); the other operations do (`list.rs`, `write.rs`,
//! `multipart.rs`).
//!
//! Invariant: nothing reaches an operation unless its sender may come in and do this (`access.rs`),
//! and what an operation does not do is refused, not ignored.

mod access;
pub(crate) mod chunked;
mod convert;
pub mod error;
mod guard;
mod list;
mod multipart;
mod path;
mod read;
mod uploads;
mod verify;
mod write;

pub use path::{Target, decode, parse_query};
pub use uploads::{Part as StoredPart, Uploads};

use crate::{
    auth::{Access, Policy},
    body::AnswerBody,
    config::Config,
    note::Note,
    upload::UploadBody,
};
use forebay_core::{Error, name::validate_bucket};
use forebay_engine::{ByteStream, Engine};
use futures::{StreamExt, TryStreamExt};
use http::{HeaderValue, Request, Response, StatusCode, Uri, header};
use http_body::Frame;
use http_body_util::{BodyDataStream, BodyExt, StreamBody};
use s3s::{
    Body, S3, S3Error, S3ErrorCode, S3Request, S3Response, S3Result,
    auth::{S3Auth, SecretKey},
    config::{S3Config, StaticConfigProvider},
    dto::*,
    host::{S3Host, VirtualHost},
    service::{S3Service, S3ServiceBuilder},
    validation::NameValidation,
};
use std::sync::Arc;

/// More than any error answer has: resource and message are bounded by the head of the request.
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
}

/// Answers S3 requests.
pub struct Front {
    engine: Engine,
    hostnames: Vec<String>,
    access: Arc<Access>,
    /// Checks signatures.
    signed: S3Service,
    /// Does not.
    open: S3Service,
}

impl Front {
    pub fn new(
        config: &Config,
        engine: Engine,
        uploads: Arc<Uploads>,
        access: Arc<Access>,
    ) -> Self {
        let ops = Ops {
            engine: engine.clone(),
            uploads,
        };
        let builder = || {
            let mut builder = S3ServiceBuilder::new(ops.clone());
            builder.set_host(Hosts(config.listen.hostnames.clone()));
            builder.set_validation(Names);
            let mut limits = S3Config::default();
            limits.xml_max_body_size = guard::XML_MAX_BYTES;
            builder.set_config(Arc::new(StaticConfigProvider::new(Arc::new(limits))));
            builder
        };
        let mut signed = builder();
        signed.set_auth(Keys(access.clone()));
        signed.set_access(access::Gate(access.clone()));
        signed.set_route(read::ReadRoute(engine.clone(), access.clone()));
        Front {
            engine,
            hostnames: config.listen.hostnames.clone(),
            access,
            signed: signed.build(),
            open: builder().build(),
        }
    }

    /// Answers one request.
    pub async fn call(
        &self,
        request: Request<UploadBody>,
        note: Arc<Note>,
    ) -> Response<AnswerBody> {
        let resource = request.uri().path().to_owned();
        let refuse = |e: Error| {
            note.set_error(e.describe());
            error::response(&e, &resource, &note.id)
        };
        let target = match Target::of(request.uri(), request.headers(), &self.hostnames) {
            Ok(target) => Arc::new(target),
            Err(e) => return refuse(e),
        };
        note.set_name(&target.bucket, &target.key);
        if let Err((code, e)) = guard::check_name(&target) {
            note.set_error(e.describe());
            return error::response_as(code, StatusCode::BAD_REQUEST, &e, &resource, &note.id);
        }
        if let Err((code, status, e)) =
            guard::check_document(request.method(), &target, request.headers())
        {
            note.set_error(e.describe());
            return error::response_as(code, status, &e, &resource, &note.id);
        }
        if let Err(e) = guard::check_features(request.method(), &target, request.headers()) {
            return refuse(e);
        }
        if let Some(name) = self.access.open_to(note.peer) {
            note.set_caller(&name.into());
            return self.call_open(request, target, note).await;
        }
        if !self.access.has_keys() {
            return refuse(
                Error::permission_denied("this node has tokens for /v1/, but no keys for S3")
                    .hint("ask the operator to set auth.keys, or use the Unix socket"),
            );
        }
        if let Err(e) = guard::check_signature(&target, request.headers()) {
            return refuse(e);
        }
        if let Err((code, e)) = guard::check_scope(&target, request.headers()) {
            note.set_error(e.describe());
            return error::response_as(code, StatusCode::BAD_REQUEST, &e, &resource, &note.id);
        }
        let (mut head, body) = request.into_parts();
        head.extensions.insert(note.clone());
        head.extensions.insert(target);
        self.library(
            &self.signed,
            Request::from_parts(head, Body::http_body_unsync(body)),
            &note,
        )
        .await
    }

    async fn call_open(
        &self,
        request: Request<UploadBody>,
        target: Arc<Target>,
        note: Arc<Note>,
    ) -> Response<AnswerBody> {
        if read::is_read(request.method(), &target) {
            return read::read(
                &self.engine,
                &target,
                request.method(),
                request.headers(),
                &note,
            )
            .await;
        }
        let (mut head, body) = request.into_parts();
        head.headers.remove(header::AUTHORIZATION);
        head.uri = without_signature(&head.uri);
        let framed = head
            .headers
            .get("x-amz-content-sha256")
            .is_some_and(|v| v.as_bytes().starts_with(b"STREAMING-"));
        let body = if framed {
            let stream: ByteStream = BodyDataStream::new(body).map_err(upload_error).boxed();
            let (stream, trailers) = chunked::decode(stream);
            head.extensions.insert(trailers);
            head.headers.remove(header::CONTENT_LENGTH);
            if let Some(length) = head.headers.get("x-amz-decoded-content-length").cloned() {
                head.headers.insert(header::CONTENT_LENGTH, length);
            }
            Body::http_body_unsync(StreamBody::new(stream.map_ok(Frame::data)))
        } else {
            Body::http_body_unsync(body)
        };
        head.extensions.insert(note.clone());
        head.extensions.insert(Policy::full());
        self.library(&self.open, Request::from_parts(head, body), &note)
            .await
    }

    async fn library(
        &self,
        service: &S3Service,
        request: Request<Body>,
        note: &Note,
    ) -> Response<AnswerBody> {
        let resource = request.uri().path().to_owned();
        match service.call(request).await {
            Ok(response)
                if response.status().is_client_error() || response.status().is_server_error() =>
            {
                complete_error(response, &resource, note).await
            }
            Ok(response) => response.map(AnswerBody::S3),
            Err(e) => {
                let cause: crate::body::BoxError = e.into();
                let e = Error::internal("the request could not be answered").source(cause);
                note.set_error(e.describe());
                error::response(&e, &resource, &note.id)
            }
        }
    }
}

/// The library's own errors have a code and often nothing else.
async fn complete_error(
    response: Response<Body>,
    resource: &str,
    note: &Note,
) -> Response<AnswerBody> {
    let (mut head, body) = response.into_parts();
    let Ok(body) = http_body_util::Limited::new(body, ERROR_BODY_MAX_BYTES)
        .collect()
        .await
        .map(|b| b.to_bytes())
    else {
        let e = Error::internal("the error of the S3 library could not be read");
        note.set_error(e.describe());
        return error::response(&e, resource, &note.id);
    };
    let completed = std::str::from_utf8(&body)
        .ok()
        .and_then(|xml| error::completed(xml, resource, &note.id));
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

/// The URI without the query parameters of a signature that nobody checks.
fn without_signature(uri: &Uri) -> Uri {
    let Some(query) = uri.query() else {
        return uri.clone();
    };
    let is_signature = |pair: &str| {
        let name = pair.split('=').next().unwrap_or_default();
        name.get(..6)
            .is_some_and(|p| p.eq_ignore_ascii_case("x-amz-"))
            || matches!(name, "Signature" | "AWSAccessKeyId" | "Expires")
    };
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
    // It was part of a URI before.
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
    copy_object(CopyObjectInput) -> CopyObjectOutput = copy,
    delete_object(DeleteObjectInput) -> DeleteObjectOutput = delete,
    delete_objects(DeleteObjectsInput) -> DeleteObjectsOutput = delete_many,
    create_multipart_upload(CreateMultipartUploadInput) -> CreateMultipartUploadOutput = create_upload,
    upload_part(UploadPartInput) -> UploadPartOutput = put_part,
    upload_part_copy(UploadPartCopyInput) -> UploadPartCopyOutput = copy_part,
    complete_multipart_upload(CompleteMultipartUploadInput) -> CompleteMultipartUploadOutput = complete,
    abort_multipart_upload(AbortMultipartUploadInput) -> AbortMultipartUploadOutput = abort,
    list_parts(ListPartsInput) -> ListPartsOutput = parts,
    list_multipart_uploads(ListMultipartUploadsInput) -> ListMultipartUploadsOutput = uploads,
}

/// For a request that is refused before it is looked at.
pub fn refused(e: &Error, resource: &str, note: &Note) -> Response<AnswerBody> {
    note.set_error(e.describe());
    let mut response = error::response(e, resource, &note.id);
    response
        .headers_mut()
        .insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_that_nobody_checks_is_taken_off() {
        let strip = |uri: &str| without_signature(&uri.parse().unwrap()).to_string();
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
