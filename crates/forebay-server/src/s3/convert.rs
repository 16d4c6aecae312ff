//! Between the S3 library's types and ours.

use super::error;
use crate::{auth::Policy, note::Note, object};
use forebay_core::{Attributes, Error, ErrorKind, ObjectName, Result};
use forebay_engine::{ByteStream, Conditions, PutCondition};
use futures::{StreamExt, TryStreamExt};
use s3s::{
    S3Error, S3Request, S3Result,
    dto::{CopySource, ETag, ETagCondition, Metadata, StreamingBlob, Timestamp, TimestampFormat},
};
use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The note of a request; the front puts one into each.
pub fn note<T>(request: &S3Request<T>) -> S3Result<Arc<Note>> {
    request
        .extensions
        .get::<Arc<Note>>()
        .cloned()
        .ok_or_else(|| s3s::s3_error!(InternalError, "a request without its note"))
}

/// What the sender of a request may do; the front or the gate puts it into each.
pub fn policy<T>(request: &S3Request<T>) -> S3Result<Arc<Policy>> {
    request
        .extensions
        .get::<Arc<Policy>>()
        .cloned()
        .ok_or_else(|| s3s::s3_error!(InternalError, "a request without its policy"))
}

/// Ends an operation: an error is noted for the log and becomes S3's.
pub fn answer<T>(result: Result<T>, note: &Note) -> S3Result<T> {
    result.map_err(|e| failed(e, note))
}

pub fn failed(e: Error, note: &Note) -> S3Error {
    note.set_error(e.describe());
    error::to_s3(e, &note.id)
}

pub fn name(bucket: &str, key: &str) -> Result<ObjectName> {
    object::name(bucket, key)
}

/// As the library writes ETags; an origin's form without quotes gets them.
pub fn etag(text: Option<&str>) -> Option<ETag> {
    text.map(|t| {
        t.parse()
            .unwrap_or_else(|_| ETag::Strong(t.trim_matches('"').to_owned()))
    })
}

/// With its quotes, as the origin gave it.
pub fn etag_text(etag: &ETag) -> String {
    match etag {
        ETag::Strong(v) => format!("\"{v}\""),
        ETag::Weak(v) => format!("W/\"{v}\""),
    }
}

fn condition_text(condition: &ETagCondition) -> String {
    match condition {
        ETagCondition::Any => "*".to_owned(),
        ETagCondition::ETag(e) => etag_text(e),
    }
}

pub fn timestamp(ms: i64) -> Timestamp {
    Timestamp::from(UNIX_EPOCH + Duration::from_millis(ms.max(0) as u64))
}

pub fn now() -> Timestamp {
    Timestamp::from(SystemTime::now())
}

fn timestamp_ms(t: &Timestamp) -> Option<i64> {
    let mut text = Vec::new();
    t.format(TimestampFormat::HttpDate, &mut text).ok()?;
    object::parse_http_date(std::str::from_utf8(&text).ok()?)
}

/// `If-None-Match: *` or `If-Match` of a write.
pub fn put_condition(
    if_match: Option<&ETagCondition>,
    if_none_match: Option<&ETagCondition>,
) -> Result<PutCondition> {
    match (if_match, if_none_match) {
        (None, None) => Ok(PutCondition::Always),
        (None, Some(ETagCondition::Any)) => Ok(PutCondition::IfAbsent),
        (Some(ETagCondition::ETag(e)), None) => Ok(PutCondition::IfMatch(etag_text(e))),
        _ => Err(Error::unsupported(
            "of the conditions on a write only If-None-Match: * and If-Match with one ETag are \
             offered",
        )),
    }
}

/// The conditions on the source of a copy. What does not hold is `PreconditionFailed`, also where a
/// read would be "not modified".
pub struct SourceConditions(pub Conditions);

impl SourceConditions {
    pub fn new(
        if_match: Option<&ETagCondition>,
        if_none_match: Option<&ETagCondition>,
        modified: Option<&Timestamp>,
        unmodified: Option<&Timestamp>,
    ) -> Self {
        SourceConditions(Conditions {
            if_match: if_match.map(condition_text),
            if_none_match: if_none_match.map(condition_text),
            if_modified_since_ms: modified.and_then(timestamp_ms),
            if_unmodified_since_ms: unmodified.and_then(timestamp_ms),
        })
    }

    pub fn check(&self, meta: &forebay_core::ObjectMeta) -> Result<()> {
        self.0.check(meta).map_err(|e| {
            let failed = Error::new(
                ErrorKind::PreconditionFailed,
                "a condition on the source of the copy does not hold",
            );
            if matches!(
                e.kind(),
                ErrorKind::NotModified | ErrorKind::PreconditionFailed
            ) {
                failed
            } else {
                e
            }
        })
    }
}

/// The source of a copy: an object of this node, in its one version.
pub fn copy_source(source: &CopySource) -> Result<ObjectName> {
    match source {
        CopySource::Bucket {
            bucket,
            key,
            version_id,
        } if version_id.as_deref().is_none_or(|v| v == "null") => name(bucket, key),
        CopySource::Bucket { .. } => Err(Error::unsupported(
            "a copy from a version: objects have one version here",
        )),
        _ => Err(Error::unsupported("a copy from an access point")),
    }
}

/// User metadata: lower-case names, sorted.
pub fn user_metadata(metadata: Option<Metadata>) -> Vec<(String, String)> {
    let mut user: Vec<(String, String)> = metadata
        .into_iter()
        .flatten()
        .map(|(n, v)| (n.to_ascii_lowercase(), v))
        .collect();
    user.sort();
    user
}

/// `Content-Encoding` without the framing of the upload.
pub fn content_encoding(value: Option<String>) -> Option<String> {
    let kept: Vec<&str> = value
        .as_deref()?
        .split(',')
        .map(str::trim)
        .filter(|e| !e.is_empty() && !e.eq_ignore_ascii_case("aws-chunked"))
        .collect();
    (!kept.is_empty()).then(|| kept.join(", "))
}

/// The attributes that a write carries, out of any of the library's inputs.
macro_rules! attributes {
    ($input:expr) => {
        forebay_core::Attributes {
            content_type: $input.content_type.take().map(|t| t.to_string()),
            content_encoding: $crate::s3::convert::content_encoding($input.content_encoding.take()),
            content_language: $input.content_language.take(),
            content_disposition: $input.content_disposition.take(),
            cache_control: $input.cache_control.take(),
            storage_class: $input.storage_class.take().map(|c| c.as_str().to_owned()),
            user: $crate::s3::convert::user_metadata($input.metadata.take()),
        }
    };
}
pub(super) use attributes;

/// Refuses what the attributes cannot hold.
pub fn check_attributes(attributes: &Attributes, expires: Option<&Timestamp>) -> Result<()> {
    if expires.is_some() {
        return Err(
            Error::unsupported("the header Expires is not kept with objects here")
                .hint("use Cache-Control: max-age"),
        );
    }
    let bytes: usize = attributes.user.iter().map(|(n, v)| n.len() + v.len()).sum();
    if bytes > 2048 {
        return Err(
            Error::invalid(format!("user metadata of {bytes} bytes")).hint("2048 bytes at most")
        );
    }
    Ok(())
}

/// An upload's body as the engine takes it.
pub fn body(blob: Option<StreamingBlob>) -> ByteStream {
    match blob {
        None => futures::stream::empty().boxed(),
        Some(blob) => blob
            .map_err(|e| match e.downcast::<Error>() {
                Ok(e) => *e,
                Err(e) => {
                    Error::invalid(format!("the body of the upload: {e}")).hint("send it again")
                }
            })
            .boxed(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags_keep_their_form() {
        for text in ["\"a-1\"", "W/\"x\"", "\"with space\""] {
            assert_eq!(etag_text(&etag(Some(text)).unwrap()), text);
        }
        assert_eq!(etag_text(&etag(Some("0x8D=")).unwrap()), "\"0x8D=\"");
    }

    #[test]
    fn framing_is_no_content_encoding() {
        assert_eq!(content_encoding(Some("aws-chunked".into())), None);
        assert_eq!(
            content_encoding(Some("gzip,aws-chunked".into())).as_deref(),
            Some("gzip")
        );
        assert_eq!(
            content_encoding(Some("gzip".into())).as_deref(),
            Some("gzip")
        );
    }
}
