//! Writing and removing objects; buckets.

use super::{
    Ops,
    convert::{
        answer, attributes, body, check_attributes, etag, failed, name, note, policy, put_condition,
    },
    error::Refusal,
    forward::{self, Removed},
    guard,
    verify::{Trailing, Verified, verify},
};
use crate::{config::Action, note::Note};
use forebay_core::{Error, ErrorKind, ObjectName, Result, limits, name::validate_bucket};
use forebay_engine::{ListRequest, PutCondition, PutRequest, ReadOptions};
use futures::{StreamExt, stream};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use s3s::{S3Request, S3Response, S3Result, dto::*};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
};

/// How many objects of one DeleteObjects request are removed at the same time.
const DELETES_IN_FLIGHT: usize = 32;

/// The length of an upload's body, which must be known.
pub(super) fn length(
    content_length: Option<i64>,
    headers: &HeaderMap,
    note: &Note,
) -> S3Result<u64> {
    let length = content_length.and_then(|n| u64::try_from(n).ok());
    // The library gives a framed body no length; the client has said how much is in it.
    let decoded = headers
        .get("x-amz-decoded-content-length")
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.parse().ok());
    let Some(length) = decoded.or(length) else {
        let e = Error::invalid("the length of the upload is not known")
            .hint("send Content-Length, or x-amz-decoded-content-length");
        let refusal = Refusal::with_status("MissingContentLength", StatusCode::LENGTH_REQUIRED, e);
        return Err(refusal.to_s3(note));
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

/// Why a write failed: what was found wrong with its body matters more than what the origin made of
/// the broken body.
pub(super) fn write_failed(e: Error, verified: &Verified) -> Refusal {
    verified.failure().unwrap_or_else(|| e.into())
}

/// Where the front has put the checksums that follow the body.
pub(super) fn trailing<T>(request: &S3Request<T>) -> Trailing {
    request
        .extensions
        .get::<Trailing>()
        .cloned()
        .unwrap_or_default()
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
            .map_err(|refusal| refusal.to_s3(&note))?;
        let put = self
            .engine
            .put(
                &name,
                PutRequest {
                    attributes,
                    condition: condition.clone(),
                },
                Some(length),
                body,
            )
            .await;
        let done = match put {
            Ok(done) => done,
            Err(e) => {
                let refusal = self
                    .unmet(&name, &condition, write_failed(e, &verified))
                    .await;
                return Err(refusal.to_s3(&note));
            }
        };
        let sums = verified.checksum();
        let output = PutObjectOutput {
            e_tag: etag(done.etag.as_deref()),
            checksum_crc32: sums.checksum_crc32,
            checksum_crc32c: sums.checksum_crc32c,
            checksum_crc64nvme: sums.checksum_crc64nvme,
            checksum_sha1: sums.checksum_sha1,
            checksum_sha256: sums.checksum_sha256,
            ..Default::default()
        };
        // The output has no fields for the other checksums.
        let further = verified.further().into_iter().filter_map(|(name, sum)| {
            let name = HeaderName::try_from(format!("x-amz-checksum-{name}")).ok()?;
            Some((name, HeaderValue::try_from(sum).ok()?))
        });
        Ok(S3Response::with_headers(output, further.collect()))
    }

    /// Why a write under `condition` is refused. Origins say that `If-Match` does not hold where
    /// there is no object; S3 says that there is none.
    pub(super) async fn unmet(
        &self,
        name: &ObjectName,
        condition: &PutCondition,
        refusal: Refusal,
    ) -> Refusal {
        if refusal.error().kind() != ErrorKind::PreconditionFailed
            || !matches!(condition, PutCondition::IfMatch(_))
        {
            return refusal;
        }
        let now = ReadOptions {
            bypass: true,
            ..ReadOptions::default()
        };
        match self.engine.head(name, &now).await {
            Err(e) if e.kind() == ErrorKind::NotFound => e.into(),
            _ => refusal,
        }
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
        let told: HeaderMap = guard::OF_REMOVALS
            .iter()
            .filter_map(|name| {
                let value = request.headers.get(*name)?.clone();
                Some((HeaderName::from_static(name), value))
            })
            .collect();
        let DeleteObjectsInput { bucket, delete, .. } = request.input;
        note.set_name(&bucket, "");
        answer(validate_bucket(&bucket), &note)?;
        let origin = answer(self.engine.buckets().origin(&bucket).await, &note)?;
        if let (Some(header), None) = (told.keys().next(), origin.s3()) {
            let refusal = guard::not_offered(format!("the header {header}"));
            return Err(refusal.to_s3(&note));
        }
        if delete.objects.len() > limits::DELETE_OBJECTS_MAX_KEYS {
            let e = Error::invalid(format!(
                "{} keys in one DeleteObjects request",
                delete.objects.len()
            ))
            .hint("1000 at most");
            return Err(Refusal::bad("MalformedXML", e).to_s3(&note));
        }
        let bypasses = told.contains_key("x-amz-bypass-governance-retention");
        // What is asked of one object happens in the order of the request: some services lose one of
        // two removals of versions of it at a time.
        let mut objects: Vec<Vec<(usize, ObjectIdentifier)>> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        for (at, o) in delete.objects.into_iter().enumerate() {
            let place = *places.entry(o.key.clone()).or_insert(objects.len());
            if place == objects.len() {
                objects.push(Vec::new());
            }
            objects[place].push((at, o));
        }
        // Services that keep objects as files keep a name that ends in a slash as a directory, and
        // refuse to remove one with anything in it: what is in it goes first.
        let mut turns: BTreeMap<Reverse<usize>, Vec<Vec<(usize, ObjectIdentifier)>>> =
            BTreeMap::new();
        for of_one in objects {
            let key = of_one.first().map_or("", |(_, o)| o.key.as_str());
            let turn = match key.ends_with('/') {
                true => key.matches('/').count(),
                false => usize::MAX,
            };
            turns.entry(Reverse(turn)).or_default().push(of_one);
        }
        let mut results = Vec::new();
        for objects in turns.into_values() {
            let removals = objects.into_iter().map(|of_one| {
                let (bucket, told, policy) = (&bucket, &told, &policy);
                async move {
                    let mut results = Vec::with_capacity(of_one.len());
                    for (at, o) in of_one {
                        let mut permitted = policy.check(Action::Write, bucket, &o.key);
                        if bypasses {
                            let may = policy.check(Action::Admin, bucket, &o.key);
                            permitted = permitted.and(may);
                        }
                        let removed = match permitted {
                            Ok(()) => self.remove_one(bucket, &o, told).await,
                            Err(e) => Err(e.into()),
                        };
                        results.push((at, o, removed));
                    }
                    results
                }
            });
            let removed: Vec<Vec<_>> = stream::iter(removals)
                .buffered(DELETES_IN_FLIGHT)
                .collect()
                .await;
            results.extend(removed.into_iter().flatten());
        }
        results.sort_by_key(|(at, ..)| *at);
        let (mut deleted, mut errors) = (Vec::new(), Vec::new());
        for (_, object, result) in results {
            match result {
                Ok(removed) => deleted.push(DeletedObject {
                    key: Some(object.key),
                    version_id: object.version_id,
                    delete_marker: removed.is_marker.then_some(true),
                    delete_marker_version_id: removed.marker.filter(|_| removed.is_marker),
                }),
                Err(refusal) => {
                    errors.push(s3s::dto::Error {
                        key: Some(object.key),
                        version_id: object.version_id,
                        code: Some(refusal.code().to_owned()),
                        message: Some(refusal.error().describe()),
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

    /// The origin removes the object, or one version of it, where it is an S3 service; otherwise it
    /// is removed here, where objects have one version. An S3 service is told the headers `told`.
    /// Conditions are not offered.
    async fn remove_one(
        &self,
        bucket: &str,
        o: &ObjectIdentifier,
        told: &HeaderMap,
    ) -> Result<Removed, Refusal> {
        let name = name(bucket, &o.key)?;
        let is_conditional =
            o.e_tag.is_some() || o.last_modified_time.is_some() || o.size.is_some();
        if !is_conditional
            && let Some(removed) =
                forward::remove(&self.engine, &name, o.version_id.as_deref(), told.clone()).await?
        {
            return Ok(removed);
        }
        match o.version_id.as_deref() {
            None | Some("null") => {}
            Some(_) => return Err(Error::unsupported("objects have one version here").into()),
        }
        if is_conditional {
            let e = Error::unsupported("a condition on one of several removals is not offered");
            return Err(e.hint("remove the object by itself").into());
        }
        self.engine.delete(&name).await?;
        Ok(Removed::default())
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

    /// Asks the origin, not only the configuration: a configured bucket may not exist.
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
        // No constraint is how S3 says us-east-1, the region that clients of this node sign for by
        // default.
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
            let refusal = Refusal::with_status("BucketNotEmpty", StatusCode::CONFLICT, e.clone());
            return Err(refusal.to_s3(&note));
        }
        answer(removed, &note)?;
        self.uploads.forget_bucket(&bucket);
        Ok(S3Response::with_status(
            DeleteBucketOutput::default(),
            StatusCode::NO_CONTENT,
        ))
    }
}
