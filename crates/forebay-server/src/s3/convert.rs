//! Conversions between the S3 library's types and ours.

use super::error::Refusal;
use crate::{auth::Policy, note::Note, object};
use forebay_core::{Attributes, Error, ObjectName, Result};
use forebay_engine::{ByteStream, PutCondition};
use futures::{StreamExt, TryStreamExt};
use http::{HeaderMap, HeaderValue, header};
use s3s::{
    S3Error, S3Request, S3Result,
    dto::{ETag, ETagCondition, Metadata, StreamingBlob, Timestamp},
};
use std::{
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

/// The note of a request, which the front put into it.
pub fn note<T>(request: &S3Request<T>) -> S3Result<Arc<Note>> {
    request
        .extensions
        .get::<Arc<Note>>()
        .cloned()
        .ok_or_else(|| s3s::s3_error!(InternalError, "a request without its note"))
}

/// What the sender of a request may do. The front or the gate put it into the request.
pub fn policy<T>(request: &S3Request<T>) -> S3Result<Arc<Policy>> {
    request
        .extensions
        .get::<Arc<Policy>>()
        .cloned()
        .ok_or_else(|| s3s::s3_error!(InternalError, "a request without its policy"))
}

/// Ends an operation: an error is noted for the log and becomes an S3 error.
pub fn answer<T>(result: Result<T>, note: &Note) -> S3Result<T> {
    result.map_err(|e| failed(e, note))
}

pub fn failed(e: Error, note: &Note) -> S3Error {
    Refusal::from(e).to_s3(note)
}

pub fn name(bucket: &str, key: &str) -> Result<ObjectName> {
    object::name(bucket, key)
}

/// An ETag in the library's form; one that an origin gave without quotes gets them.
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

pub fn timestamp(ms: i64) -> Timestamp {
    Timestamp::from(UNIX_EPOCH + Duration::from_millis(ms.max(0) as u64))
}

/// Puts quotes around an ETag that a client sent without them as the condition of a write, as S3 takes
/// it. The library takes it only if it has no dot; those of files have.
pub fn quote_etags(headers: &mut HeaderMap) {
    for name in [header::IF_MATCH, header::IF_NONE_MATCH] {
        if headers.get_all(&name).iter().nth(1).is_some() {
            continue;
        }
        let sent = headers.get(&name).and_then(|v| v.to_str().ok());
        let sent = sent.unwrap_or_default().trim();
        let is_bare = !sent.is_empty() && sent != "*" && !sent.contains(['"', ',']);
        if is_bare && let Ok(quoted) = HeaderValue::from_str(&format!("\"{sent}\"")) {
            headers.insert(name, quoted);
        }
    }
}

/// The condition of a write: `If-None-Match: *` or `If-Match`.
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

/// User metadata, sorted, with lower-case names.
pub fn user_metadata(metadata: Option<Metadata>) -> Vec<(String, String)> {
    let mut user: Vec<(String, String)> = metadata
        .into_iter()
        .flatten()
        .map(|(n, v)| (n.to_ascii_lowercase(), v))
        .collect();
    user.sort();
    user
}

/// `Content-Encoding` without the upload's framing.
pub fn content_encoding(value: Option<String>) -> Option<String> {
    let kept: Vec<&str> = value
        .as_deref()?
        .split(',')
        .map(str::trim)
        .filter(|e| !e.is_empty() && !e.eq_ignore_ascii_case("aws-chunked"))
        .collect();
    (!kept.is_empty()).then(|| kept.join(", "))
}

/// The attributes of a write, from any of the library's input types.
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

/// Refuses what the attributes cannot express.
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
    fn an_etag_without_quotes_is_a_condition() {
        for (sent, meant) in [
            ("a1-2-crc32c.0ab7", "\"a1-2-crc32c.0ab7\""),
            (" a ", "\"a\""),
            ("\"a.b\"", "\"a.b\""),
            ("W/\"a\"", "W/\"a\""),
            ("a, b", "a, b"),
            ("*", "*"),
            ("", ""),
        ] {
            let value = HeaderValue::from_str(sent).unwrap();
            let mut headers = HeaderMap::from_iter([(header::IF_MATCH, value)]);
            quote_etags(&mut headers);
            assert_eq!(headers[header::IF_MATCH], meant, "{sent:?}");
        }
        let mut two = HeaderMap::new();
        for etag in ["a", "b"] {
            two.append(header::IF_MATCH, HeaderValue::from_static(etag));
        }
        quote_etags(&mut two);
        assert_eq!(two.get_all(header::IF_MATCH).iter().count(), 2);
    }

    #[test]
    fn framing_is_not_a_content_encoding() {
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
