//! Writing, copying and removing objects; buckets; the attributes of an object.

use super::{
    Ops,
    convert::{
        SourceConditions, answer, attributes, body, check_attributes, copy_source, etag, failed,
        name, note, now, policy, put_condition, timestamp,
    },
    error,
    verify::{Failure, Trailing, Verified, verify},
};
use crate::{config::Action, note::Note};
use forebay_core::{CacheStatus, Error, ErrorKind, Result, limits, name::validate_bucket};
use forebay_engine::{ListRequest, PutCondition, PutRequest, ReadOptions};
use futures::{StreamExt, stream};
use http::{HeaderMap, StatusCode};
use s3s::{S3Error, S3Request, S3Response, S3Result, dto::*};

/// Removals of one DeleteObjects request that are under way at the same time.
const DELETES_IN_FLIGHT: usize = 32;

/// The length of an upload's body, which must be known.
pub(super) fn length(
    content_length: Option<i64>,
    headers: &HeaderMap,
    note: &Note,
) -> S3Result<u64> {
    let length = content_length.and_then(|n| u64::try_from(n).ok());
    // The library counts a framed body as nothing; the client has said how much is in it.
    let decoded = headers
        .get("x-amz-decoded-content-length")
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.parse().ok());
    let Some(length) = decoded.or(length) else {
        let e = Error::invalid("the length of the upload is not known")
            .hint("send Content-Length, or x-amz-decoded-content-length");
        note.set_error(e.describe());
        return Err(error::with_code(
            "MissingContentLength",
            StatusCode::LENGTH_REQUIRED,
            &e,
            &note.id,
        ));
    };
    if length > limits::PUT_OBJECT_MAX_BYTES {
        let e = Error::new(
            ErrorKind::TooLarge,
            format!(
                "{length} bytes in one request, more than {}",
                limits::PUT_OBJECT_MAX_BYTES
            ),
        )
        .hint("use a multipart upload");
        return Err(failed(e, note));
    }
    Ok(length)
}

/// A body that did not hold what its checksums said.
pub(super) fn refused(failure: &Failure, note: &Note) -> S3Error {
    note.set_error(failure.error.describe());
    error::with_code(
        failure.code,
        StatusCode::BAD_REQUEST,
        &failure.error,
        &note.id,
    )
}

/// Why a write failed: what was found wrong with its body outranks what the origin made of the
/// broken body.
pub(super) fn write_failed(e: Error, verified: &Verified, note: &Note) -> S3Error {
    match verified.failure() {
        Some(failure) if failure.error.kind() == ErrorKind::Invalid => refused(&failure, note),
        Some(failure) => failed(failure.error, note),
        None => failed(e, note),
    }
}

pub(super) fn trailing<T>(request: &S3Request<T>) -> Trailing {
    match (
        &request.trailing_headers,
        request.extensions.get::<super::chunked::Trailers>(),
    ) {
        (Some(headers), _) => Trailing::Library(headers.clone()),
        (None, Some(own)) => Trailing::Own(own.clone()),
        (None, None) => Trailing::None,
    }
}

impl Ops {
    pub(super) async fn put(
        &self,
        request: S3Request<PutObjectInput>,
    ) -> S3Result<S3Response<PutObjectOutput>> {
        let note = note(&request)?;
        let trailing = trailing(&request);
        let S3Request {
            mut input, headers, ..
        } = request;
        note.set_name(&input.bucket, &input.key);
        let name = answer(name(&input.bucket, &input.key), &note)?;
        let length = length(input.content_length, &headers, &note)?;
        let condition = answer(
            put_condition(input.if_match.as_ref(), input.if_none_match.as_ref()),
            &note,
        )?;
        let attributes = attributes!(input);
        answer(check_attributes(&attributes, input.expires.as_ref()), &note)?;
        let (body, verified) = verify(body(input.body.take()), length, &headers, trailing)
            .map_err(|f| refused(&f, &note))?;
        let put = self
            .engine
            .put(
                &name,
                PutRequest {
                    attributes,
                    condition,
                },
                Some(length),
                body,
            )
            .await;
        let done = put.map_err(|e| write_failed(e, &verified, &note))?;
        let sums = verified.checksum();
        Ok(S3Response::new(PutObjectOutput {
            e_tag: etag(done.etag.as_deref()),
            checksum_crc32: sums.checksum_crc32,
            checksum_crc32c: sums.checksum_crc32c,
            checksum_crc64nvme: sums.checksum_crc64nvme,
            checksum_sha1: sums.checksum_sha1,
            checksum_sha256: sums.checksum_sha256,
            ..Default::default()
        }))
    }

    pub(super) async fn copy(
        &self,
        request: S3Request<CopyObjectInput>,
    ) -> S3Result<S3Response<CopyObjectOutput>> {
        let note = note(&request)?;
        let S3Request { input, headers, .. } = request;
        note.set_name(&input.bucket, &input.key);
        answer(self.copy_inner(input, &headers).await, &note).map(S3Response::new)
    }

    async fn copy_inner(
        &self,
        mut input: CopyObjectInput,
        headers: &HeaderMap,
    ) -> Result<CopyObjectOutput> {
        let to = name(&input.bucket, &input.key)?;
        let from = copy_source(&input.copy_source)?;
        let source = self.engine.head(&from, &current()).await?.meta;
        SourceConditions::new(
            input.copy_source_if_match.as_ref(),
            input.copy_source_if_none_match.as_ref(),
            input.copy_source_if_modified_since.as_ref(),
            input.copy_source_if_unmodified_since.as_ref(),
        )
        .check(&source)?;
        let attributes = match input.metadata_directive.as_ref().map(|d| d.as_str()) {
            None | Some("COPY") if from == to => {
                return Err(
                    Error::invalid("a copy of an object onto itself that changes nothing")
                        .hint("use x-amz-metadata-directive: REPLACE"),
                );
            }
            None | Some("COPY") => {
                let storage_class = input.storage_class.take().map(|c| c.as_str().to_owned());
                forebay_core::Attributes {
                    storage_class: storage_class.or(source.attributes.storage_class.clone()),
                    ..source.attributes.clone()
                }
            }
            Some("REPLACE") => attributes!(input),
            Some(other) => {
                return Err(
                    Error::invalid(format!("x-amz-metadata-directive: {other:?}"))
                        .hint("COPY or REPLACE"),
                );
            }
        };
        check_attributes(&attributes, input.expires.as_ref())?;
        let condition = match (
            headers.get("if-none-match").map(|v| v.as_bytes()),
            headers.get("if-match"),
        ) {
            (None, None) => PutCondition::Always,
            (Some(b"*"), None) => PutCondition::IfAbsent,
            _ => {
                return Err(Error::unsupported(
                    "of the conditions on the target of a copy only If-None-Match: * is offered",
                ));
            }
        };
        let done = self
            .engine
            .copy(
                &from,
                source.etag.as_deref(),
                &to,
                PutRequest {
                    attributes,
                    condition: condition.clone(),
                },
            )
            .await
            .map_err(|e| source_changed(e, &condition))?;
        // The copy is made; that its date cannot be told is no reason to say that it is not.
        let last_modified = self
            .engine
            .head(&to, &ReadOptions::default())
            .await
            .map_or_else(|_| now(), |h| timestamp(h.meta.last_modified_ms));
        let result = CopyObjectResult {
            e_tag: etag(done.etag.as_deref()),
            last_modified: Some(last_modified),
            ..Default::default()
        };
        Ok(CopyObjectOutput {
            copy_object_result: Some(result),
            ..Default::default()
        })
    }

    pub(super) async fn delete(
        &self,
        request: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        let note = note(&request)?;
        let input = request.input;
        note.set_name(&input.bucket, &input.key);
        let name = answer(name(&input.bucket, &input.key), &note)?;
        answer(self.engine.delete(&name).await, &note)?;
        Ok(S3Response::with_status(
            DeleteObjectOutput::default(),
            StatusCode::NO_CONTENT,
        ))
    }

    pub(super) async fn delete_many(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let (note, policy) = (note(&request)?, policy(&request)?);
        let DeleteObjectsInput { bucket, delete, .. } = request.input;
        note.set_name(&bucket, "");
        answer(validate_bucket(&bucket), &note)?;
        answer(self.engine.buckets().origin(&bucket).await.map(drop), &note)?;
        if delete.objects.len() > limits::DELETE_OBJECTS_MAX_KEYS {
            let e = Error::invalid(format!(
                "{} keys in one DeleteObjects request",
                delete.objects.len()
            ))
            .hint("1000 at most");
            return Err(error::with_code(
                "MalformedXML",
                StatusCode::BAD_REQUEST,
                &e,
                &note.id,
            ));
        }
        let removals = delete.objects.into_iter().map(|o| {
            let (bucket, permitted) = (&bucket, policy.check(Action::Write, &bucket, &o.key));
            async move {
                let removed = match &o.version_id {
                    _ if permitted.is_err() => permitted,
                    Some(v) if v != "null" => {
                        Err(Error::unsupported("objects have one version here"))
                    }
                    _ if o.e_tag.is_some()
                        || o.last_modified_time.is_some()
                        || o.size.is_some() =>
                    {
                        Err(Error::unsupported("a conditional removal is not offered"))
                    }
                    _ => match name(bucket, &o.key) {
                        Ok(name) => self.engine.delete(&name).await,
                        Err(e) => Err(e),
                    },
                };
                (o.key, removed)
            }
        });
        let results: Vec<(String, Result<()>)> = stream::iter(removals)
            .buffered(DELETES_IN_FLIGHT)
            .collect()
            .await;
        let (mut deleted, mut errors) = (Vec::new(), Vec::new());
        for (key, result) in results {
            match result {
                Ok(()) => deleted.push(DeletedObject {
                    key: Some(key),
                    ..Default::default()
                }),
                Err(e) => {
                    let s3 = error::to_s3(e, &note.id);
                    let code = Some(s3.code().as_str().to_owned());
                    errors.push(s3s::dto::Error {
                        key: Some(key),
                        code,
                        message: s3.message().map(str::to_owned),
                        ..Default::default()
                    });
                }
            }
        }
        if delete.quiet == Some(true) {
            deleted.clear();
        }
        Ok(S3Response::new(DeleteObjectsOutput {
            deleted: Some(deleted),
            errors: Some(errors),
            ..Default::default()
        }))
    }

    pub(super) async fn head_bucket(
        &self,
        request: S3Request<HeadBucketInput>,
    ) -> S3Result<S3Response<HeadBucketOutput>> {
        let note = note(&request)?;
        note.set_name(&request.input.bucket, "");
        answer(self.bucket_exists(&request.input.bucket).await, &note)?;
        Ok(S3Response::new(HeadBucketOutput {
            bucket_region: Some("us-east-1".into()),
            ..Default::default()
        }))
    }

    /// Asks the origin, not only the configuration: a bucket that is configured may not be there.
    async fn bucket_exists(&self, bucket: &str) -> Result<()> {
        validate_bucket(bucket).map_err(|e| e.with_kind(ErrorKind::BucketNotFound))?;
        self.engine
            .list(
                bucket,
                ListRequest {
                    max_keys: 1,
                    ..ListRequest::default()
                },
            )
            .await
            .map(drop)
    }

    pub(super) async fn location(
        &self,
        request: S3Request<GetBucketLocationInput>,
    ) -> S3Result<S3Response<GetBucketLocationOutput>> {
        let note = note(&request)?;
        note.set_name(&request.input.bucket, "");
        answer(
            self.engine
                .buckets()
                .origin(&request.input.bucket)
                .await
                .map(drop),
            &note,
        )?;
        // No constraint is S3's way to say us-east-1, the region that clients of this node sign for
        // by default.
        Ok(S3Response::new(GetBucketLocationOutput::default()))
    }

    pub(super) async fn create(
        &self,
        request: S3Request<CreateBucketInput>,
    ) -> S3Result<S3Response<CreateBucketOutput>> {
        let note = note(&request)?;
        let bucket = request.input.bucket;
        note.set_name(&bucket, "");
        answer(validate_bucket(&bucket), &note)?;
        answer(self.engine.buckets().create(&bucket).await, &note)?;
        Ok(S3Response::new(CreateBucketOutput {
            location: Some(format!("/{bucket}")),
        }))
    }

    pub(super) async fn remove_bucket(
        &self,
        request: S3Request<DeleteBucketInput>,
    ) -> S3Result<S3Response<DeleteBucketOutput>> {
        let note = note(&request)?;
        let bucket = request.input.bucket;
        note.set_name(&bucket, "");
        let removed = self.engine.buckets().remove(&bucket).await;
        if let Err(e) = &removed
            && e.kind() == ErrorKind::Conflict
        {
            note.set_error(e.describe());
            return Err(error::with_code(
                "BucketNotEmpty",
                StatusCode::CONFLICT,
                e,
                &note.id,
            ));
        }
        answer(removed, &note)?;
        Ok(S3Response::with_status(
            DeleteBucketOutput::default(),
            StatusCode::NO_CONTENT,
        ))
    }
}

/// A copy is made of what is at the origin when it is asked for; what is here may be older.
pub(super) fn current() -> ReadOptions {
    ReadOptions {
        bypass: true,
        ..ReadOptions::default()
    }
}

/// The conditions on the source held when it was looked at. What failed is then that it changed
/// afterwards, which the client can try again.
fn source_changed(e: Error, target: &PutCondition) -> Error {
    if e.kind() == ErrorKind::PreconditionFailed && *target == PutCondition::Always {
        return Error::version_changed("the source of the copy was changed meanwhile")
            .hint("copy it again");
    }
    e
}

/// Bytes of a source under one version, for copies of parts.
pub(super) struct Source {
    pub body: forebay_engine::ByteStream,
    pub length: u64,
    pub cache: CacheStatus,
}
