//! Copies: CopyObject and UploadPartCopy. They bypass the S3 library, which accepts no source in a
//! bucket whose name does not follow Amazon's rules.
//!
//! If source and target are in one S3 service, that service makes the copy (`forward.rs`).
//! Otherwise the node does: on the origin's side if it can, else by reading and writing.
//!
//! Invariant: a copy is of the version that was at the source's origin when the copy was requested,
//! and that met its conditions; what is cached here may be older.

use super::{
    Ops,
    convert::{content_encoding, name},
    error::{self, Refusal, escape},
    multipart::{part_number, upload_failed},
    path::Target,
};
use crate::{body::AnswerBody, note::Note, object, uploads::NewPart, url::decode};
use chrono::{DateTime, SecondsFormat};
use forebay_core::{Attributes, ByteRange, Error, ErrorKind, ObjectMeta, ObjectName, Result};
use forebay_engine::{Conditions, Engine, PutCondition, PutRequest, ReadOptions, S3Place};
use http::{HeaderMap, HeaderValue, Response, header};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::Checksum;

const SOURCE: &str = "x-amz-copy-source";
const SOURCE_RANGE: &str = "x-amz-copy-source-range";
/// The characters that a signed header's value may hold unencoded.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'/');

/// The source of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub name: ObjectName,
    version: Option<String>,
}

impl Source {
    /// The source that the headers name, if they do.
    ///
    /// # Errors
    /// `Invalid` for one that does not name an object, `Unsupported` for an access point.
    pub fn of(headers: &HeaderMap) -> Result<Option<Self>> {
        let Some(value) = headers.get(SOURCE) else {
            return Ok(None);
        };
        if headers.get_all(SOURCE).iter().nth(1).is_some() {
            return Err(Error::invalid(format!(
                "the header {SOURCE} is there twice"
            )));
        }
        let text = value
            .to_str()
            .map_err(|_| Error::invalid(format!("the header {SOURCE} is not percent-encoded")))?;
        if text.starts_with("arn:") {
            return Err(Error::unsupported("a copy from an access point"));
        }
        let (path, version) = match text.split_once("?versionId=") {
            Some((path, version)) => (path, Some(decode(version)?)),
            None => (text, None),
        };
        // S3 takes a plus sign here for a space, and s5cmd writes spaces so.
        let path = decode(&path.replace('+', "%20"))?;
        let (bucket, key) = path
            .trim_start_matches('/')
            .split_once('/')
            .ok_or_else(|| {
                Error::invalid(format!(
                    "{SOURCE}: {:?}",
                    forebay_core::name::shorten(&path)
                ))
                .hint("as in bucket/key, percent-encoded")
            })?;
        Ok(Some(Source {
            name: name(bucket, key)?,
            version,
        }))
    }

    /// The value of the header as the service at `place` wants it, where the source is.
    pub fn header(&self, place: &S3Place) -> Result<HeaderValue> {
        let key = format!("{}{}", place.prefix, self.name.key());
        let mut text = format!("/{}/{}", place.bucket, utf8_percent_encode(&key, ENCODED));
        if let Some(version) = &self.version {
            text.push_str("?versionId=");
            text.extend(utf8_percent_encode(version, ENCODED));
        }
        HeaderValue::from_str(&text).map_err(|_| Error::internal(SOURCE))
    }

    /// Where the source is, if the same service holds `target`.
    pub async fn at(&self, engine: &Engine, target: &S3Place) -> Result<Option<S3Place>> {
        let origin = engine.buckets().origin(self.name.bucket()).await?;
        Ok(origin.s3().filter(|at| at.service == target.service))
    }

    /// Checks that the source names no version: objects that the node copies have just one, which
    /// S3 calls null.
    fn only_version(&self) -> Result<()> {
        match self.version.as_deref() {
            None | Some("null") => Ok(()),
            Some(_) => Err(Error::unsupported(
                "a copy from a version: objects have one version here",
            )),
        }
    }
}

/// A header's value, if it has any.
///
/// # Errors
/// `Invalid` if the value is not UTF-8: the copy would be made without what the client asked for.
fn text(headers: &HeaderMap, name: &str) -> Result<Option<String>> {
    let value = headers.get(name).map(|v| utf8(name, v)).transpose()?;
    Ok(value.map(|v| v.trim().to_owned()).filter(|v| !v.is_empty()))
}

fn utf8<'a>(name: &str, value: &'a HeaderValue) -> Result<&'a str> {
    std::str::from_utf8(value.as_bytes()).map_err(|_| {
        Error::invalid(format!("the header {name} is not UTF-8"))
            .hint("send text of other languages as UTF-8")
    })
}

/// Reads what is at the origin, not what the node knows of it.
fn current() -> ReadOptions {
    ReadOptions {
        bypass: true,
        ..ReadOptions::default()
    }
}

/// Checks the conditions on the source. One that does not hold is `PreconditionFailed`, even where
/// a read would be "not modified".
fn check_conditions(headers: &HeaderMap, source: &ObjectMeta) -> Result<(), Refusal> {
    let date = |name| text(headers, name).map(|t| t.and_then(|t| object::parse_http_date(&t)));
    let conditions = Conditions {
        if_match: text(headers, "x-amz-copy-source-if-match")?,
        if_none_match: text(headers, "x-amz-copy-source-if-none-match")?,
        if_modified_since_ms: date("x-amz-copy-source-if-modified-since")?,
        if_unmodified_since_ms: date("x-amz-copy-source-if-unmodified-since")?,
    };
    conditions.check(source).map_err(|e| {
        let header = match e.kind() {
            ErrorKind::PreconditionFailed if conditions.if_match.is_some() => {
                "x-amz-copy-source-If-Match"
            }
            ErrorKind::PreconditionFailed => "x-amz-copy-source-If-Unmodified-Since",
            ErrorKind::NotModified if conditions.if_none_match.is_some() => {
                "x-amz-copy-source-If-None-Match"
            }
            ErrorKind::NotModified => "x-amz-copy-source-If-Modified-Since",
            _ => return Refusal::from(e),
        };
        let e = Error::new(
            ErrorKind::PreconditionFailed,
            "a condition on the source of the copy does not hold",
        );
        Refusal::from(e).of_condition(Some(header))
    })
}

/// The condition on the target: `If-None-Match: *`, or `If-Match` with one ETag.
fn target_condition(headers: &HeaderMap) -> Result<PutCondition> {
    let is_etag = |text: &str| {
        let strong = text.strip_prefix("W/").unwrap_or(text);
        let inner = strong.strip_prefix('"').and_then(|t| t.strip_suffix('"'));
        inner.is_some_and(|inner| !inner.contains('"'))
    };
    let is_one = headers.get_all(header::IF_MATCH).iter().nth(1).is_none();
    // One that is no text is not taken for none.
    let has_none = |name| error::condition(headers, &[name]).is_none();
    let (no_none_match, no_match) = (has_none("If-None-Match"), has_none("If-Match"));
    let told = |name| text(headers, name).ok().flatten();
    match (told("if-none-match"), told("if-match")) {
        (None, None) if no_none_match && no_match => Ok(PutCondition::Always),
        (Some(any), None) if no_match && any == "*" => Ok(PutCondition::IfAbsent),
        (None, Some(etag)) if no_none_match && is_one && is_etag(&etag) => {
            Ok(PutCondition::IfMatch(etag))
        }
        _ => Err(Error::unsupported(
            "of the conditions on the target of a copy only If-None-Match: * and If-Match with one \
             ETag are offered",
        )),
    }
}

/// The attributes that a request's headers give to an object.
fn attributes(headers: &HeaderMap) -> Result<Attributes> {
    let mut user = Vec::new();
    for (name, value) in headers {
        if let Some(key) = name.as_str().strip_prefix("x-amz-meta-") {
            user.push((key.to_owned(), utf8(name.as_str(), value)?.to_owned()));
        }
    }
    user.sort();
    Ok(Attributes {
        content_type: text(headers, "content-type")?,
        content_encoding: content_encoding(text(headers, "content-encoding")?),
        content_language: text(headers, "content-language")?,
        content_disposition: text(headers, "content-disposition")?,
        cache_control: text(headers, "cache-control")?,
        storage_class: text(headers, "x-amz-storage-class")?,
        user,
    })
}

/// The range of the source that a part is copied from. Both of its ends must be given.
fn source_range(headers: &HeaderMap) -> Result<Option<(u64, ByteRange)>> {
    let Some(sent) = text(headers, SOURCE_RANGE)? else {
        return Ok(None);
    };
    let ends = sent.strip_prefix("bytes=").and_then(|r| r.split_once('-'));
    let last = ends.and_then(|(first, last)| {
        let (first, last) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
        (first <= last).then_some(last)
    });
    let range = match last {
        Some(_) => ByteRange::parse_header(&sent)?,
        None => None,
    };
    match (last, range) {
        (Some(last), Some(range)) => Ok(Some((last, range))),
        _ => Err(Error::invalid(format!("{SOURCE_RANGE}: {sent:?}"))
            .hint("as in bytes=0-99: the first and the last byte")),
    }
}

fn document(root: &str, etag: Option<&str>, modified_ms: i64) -> Response<AnswerBody> {
    let modified = DateTime::from_timestamp_millis(modified_ms.max(0))
        .unwrap_or_default()
        .to_rfc3339_opts(SecondsFormat::Millis, true);
    let etag = etag.map_or_else(String::new, |etag| {
        format!("<ETag>\"{}\"</ETag>", escape(etag.trim_matches('"')))
    });
    let xml = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<{root} \
         xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><LastModified>{modified}</LastModified>\
         {etag}</{root}>"
    );
    let mut response = Response::new(AnswerBody::full(xml));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/xml"),
    );
    response
}

impl Ops {
    /// A copy that this node makes.
    pub(super) async fn copy(
        &self,
        target: &Target,
        headers: &HeaderMap,
        source: &Source,
        note: &Note,
    ) -> Result<Response<AnswerBody>, Refusal> {
        source.only_version()?;
        let to = name(&target.bucket, &target.key)?;
        match target.query("uploadId") {
            Some(upload) => {
                self.copy_part(target, headers, source, &to, upload, note)
                    .await
            }
            None => self.copy_object(headers, source, &to).await,
        }
    }

    async fn copy_object(
        &self,
        headers: &HeaderMap,
        source: &Source,
        to: &ObjectName,
    ) -> Result<Response<AnswerBody>, Refusal> {
        let now = self.engine.head(&source.name, &current()).await?.meta;
        check_conditions(headers, &now)?;
        let storage_class = text(headers, "x-amz-storage-class")?;
        let attributes = match text(headers, "x-amz-metadata-directive")?.as_deref() {
            None | Some("COPY") if source.name == *to && storage_class.is_none() => {
                let e = Error::invalid("a copy of an object onto itself that changes nothing")
                    .hint("use x-amz-metadata-directive: REPLACE");
                return Err(Refusal::bad("InvalidRequest", e));
            }
            None | Some("COPY") => Attributes {
                storage_class: storage_class.or(now.attributes.storage_class.clone()),
                ..now.attributes.clone()
            },
            Some("REPLACE") => attributes(headers)?,
            Some(other) => {
                let e = Error::invalid(format!("x-amz-metadata-directive: {other:?}"));
                return Err(e.hint("COPY or REPLACE").into());
            }
        };
        super::convert::check_attributes(&attributes, None)?;
        let condition = target_condition(headers)?;
        let request = PutRequest {
            attributes,
            condition: condition.clone(),
        };
        let copied = self.engine.copy(&source.name, Some(&now), to, request);
        let done = match copied.await {
            Ok(done) => done,
            Err(e) => {
                let named = match &condition {
                    PutCondition::Always => None,
                    PutCondition::IfAbsent => Some("If-None-Match"),
                    PutCondition::IfMatch(_) => Some("If-Match"),
                };
                let refusal = Refusal::from(source_changed(e, &condition)).of_condition(named);
                return Err(self.unmet(to, &condition, refusal).await);
            }
        };
        // The copy is done; failing to learn its date does not undo it.
        let modified_ms = match self.engine.head(to, &ReadOptions::default()).await {
            Ok(head) => head.meta.last_modified_ms,
            Err(_) => self.engine.clock().now_ms(),
        };
        Ok(document(
            "CopyObjectResult",
            done.etag.as_deref(),
            modified_ms,
        ))
    }

    /// Reads the part here and writes it to the origin.
    async fn copy_part(
        &self,
        target: &Target,
        headers: &HeaderMap,
        source: &Source,
        to: &ObjectName,
        upload: &str,
        note: &Note,
    ) -> Result<Response<AnswerBody>, Refusal> {
        let number = target.query("partNumber").and_then(|n| n.parse().ok());
        let number = part_number(number.unwrap_or_default())?;
        let range = source_range(headers)?;
        let read = self
            .engine
            .read(&source.name, range.map(|(_, range)| range), &current())
            .await?;
        check_conditions(headers, &read.meta)?;
        if let Some((last, _)) = range
            && last >= read.meta.size
        {
            let e = Error::invalid(format!(
                "{SOURCE_RANGE} ends past the source, which has {} bytes",
                read.meta.size
            ));
            return Err(Refusal::bad("InvalidRequest", e));
        }
        let new = NewPart {
            number,
            size: read.range.end - read.range.start,
            body: read.body,
        };
        let stored = self
            .uploads
            .send_part(&self.engine, to, upload, new, Checksum::default)
            .await
            .map_err(upload_failed)?;
        let etag = Some(stored.part.etag.as_str());
        let mut response = document("CopyPartResult", etag, stored.stored_ms);
        note.x_cache(response.headers_mut(), read.cache);
        Ok(response)
    }
}

/// The conditions on the source held when it was looked at, so a failure means that it changed
/// afterwards. The client can try again.
fn source_changed(e: Error, target: &PutCondition) -> Error {
    if e.kind() == ErrorKind::PreconditionFailed && *target == PutCondition::Always {
        return Error::version_changed("the source of the copy changed during the copy")
            .hint("copy it again");
    }
    e
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        headers
    }

    #[test]
    fn a_source_is_any_object_of_this_node() {
        let of = |value: &str| Source::of(&headers(SOURCE, value));
        for (value, bucket, key, version) in [
            ("bucket/a%20b/c", "bucket", "a b/c", None),
            (
                "/My_Bucket/k?versionId=a%2Fb",
                "My_Bucket",
                "k",
                Some("a/b"),
            ),
            ("ab%2Fk%3FversionId=1", "ab", "k?versionId=1", None),
            ("bb/a+b%2Bc", "bb", "a b+c", None),
        ] {
            let source = of(value).unwrap().unwrap();
            assert_eq!(
                (
                    source.name.bucket(),
                    source.name.key(),
                    source.version.as_deref()
                ),
                (bucket, key, version)
            );
        }
        let place = S3Place {
            service: 0,
            bucket: "real".into(),
            prefix: "p/".into(),
            region: String::new(),
        };
        let source = of("bb/a%20b%3F?versionId=x+1").unwrap().unwrap();
        assert_eq!(
            source.header(&place).unwrap(),
            "/real/p/a%20b%3F?versionId=x%2B1"
        );
        for bad in ["bucket", "", "/bucket/", "bb/%ff", "bb/a/../c"] {
            assert!(of(bad).is_err(), "{bad:?}");
        }
        assert_eq!(
            of("arn:aws:s3:us-west-2:1:accesspoint/a/object/k")
                .unwrap_err()
                .kind(),
            ErrorKind::Unsupported
        );
        assert_eq!(Source::of(&HeaderMap::new()).unwrap(), None);
    }

    #[test]
    fn the_target_of_a_copy_has_one_condition() {
        let of = |name, value: &str| target_condition(&headers(name, value)).map_err(|e| e.kind());
        assert_eq!(of("if-none-match", "*"), Ok(PutCondition::IfAbsent));
        for etag in [r#""a-1""#, r#"W/"a""#] {
            assert_eq!(of("if-match", etag), Ok(PutCondition::IfMatch(etag.into())));
        }
        for (name, bad) in [
            ("if-none-match", r#""a""#),
            ("if-match", "*"),
            ("if-match", "a"),
            ("if-match", r#"""#),
            ("if-match", r#""a", "b""#),
        ] {
            assert_eq!(of(name, bad), Err(ErrorKind::Unsupported), "{name}: {bad}");
        }
        let mut both = headers("if-match", r#""a""#);
        both.append("if-match", r#""b""#.parse().unwrap());
        assert!(target_condition(&both).is_err());
        // What is no text is a condition too.
        for name in ["if-match", "if-none-match"] {
            let mut strange = HeaderMap::new();
            strange.insert(name, HeaderValue::from_bytes(b"\"\xe9\"").unwrap());
            assert!(target_condition(&strange).is_err(), "{name}");
        }
        let none = target_condition(&HeaderMap::new());
        assert_eq!(none.map_err(|e| e.kind()), Ok(PutCondition::Always));
    }

    #[test]
    fn what_a_copy_is_asked_for_is_never_left_out() {
        let text = |bytes: &[u8]| HeaderValue::from_bytes(bytes).unwrap();
        let mut given = headers("x-amz-meta-b", "x");
        given.insert("x-amz-meta-a", text("Zoë".as_bytes()));
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let user = attributes(&given).unwrap().user;
        assert_eq!(user, [pair("a", "Zoë"), pair("b", "x")]);
        let strange = |name: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, text(b"\"\xe9\""));
            headers
        };
        for name in ["x-amz-meta-a", "content-disposition"] {
            let refused = attributes(&strange(name)).err().map(|e| e.kind());
            assert_eq!(refused, Some(ErrorKind::Invalid), "{name}");
        }
        let source = ObjectMeta {
            size: 1,
            etag: Some("\"e\"".into()),
            last_modified_ms: 0,
            attributes: Attributes::default(),
        };
        for name in [
            "x-amz-copy-source-if-match",
            "x-amz-copy-source-if-none-match",
        ] {
            let refused = check_conditions(&strange(name), &source);
            let refused = refused.err().map(|refusal| refusal.error().kind());
            assert_eq!(refused, Some(ErrorKind::Invalid), "{name}");
        }
        let refused = source_range(&strange(SOURCE_RANGE)).err();
        assert_eq!(refused.map(|e| e.kind()), Some(ErrorKind::Invalid));
    }

    #[test]
    fn the_range_of_a_part_has_two_ends() {
        let kind = |value: &str| {
            source_range(&headers(SOURCE_RANGE, value))
                .map(|r| r.map(|(last, _)| last))
                .map_err(|e| e.kind())
        };
        assert_eq!(kind("bytes=5-9"), Ok(Some(9)));
        for bad in [
            "bytes=0-1,3-4",
            "bytes=-5",
            "bytes=5-",
            "bytes=9-5",
            "0-5",
            "x",
        ] {
            assert_eq!(kind(bad), Err(ErrorKind::Invalid), "{bad}");
        }
    }
}
