//! Answers GET and HEAD of an object: ranges, conditions and headers, the same for the S3 front and
//! for `/v1/objects`.

use crate::{body::AnswerBody, note::Note};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use chrono::DateTime;
use forebay_core::{
    Attributes, ByteRange, CacheStatus, Error, ErrorKind, ObjectMeta, ObjectName, Result,
};
use forebay_engine::{Conditions, Engine, ReadOptions, Unmodified};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header};
use std::{
    borrow::Cow,
    ops::Range,
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

/// Asks for an answer that bypasses the cache, as `Cache-Control: no-cache` does.
pub const BYPASS_HEADER: HeaderName = HeaderName::from_static("x-forebay-cache");

/// What a request's headers ask of a read.
pub fn read_options(headers: &HeaderMap) -> ReadOptions {
    let text = |name: HeaderName| {
        headers
            .get(name)
            .and_then(|v| v.to_str().ok())
            // An empty condition counts as none: s3fs sends `If-Match:` for an object without an
            // ETag.
            .filter(|v| !v.trim().is_empty())
            .map(str::to_owned)
    };
    // A client may send a list in several lines. No object has the ETags of a line that is not text.
    let list = |name: HeaderName| {
        let lines: Vec<Cow<'_, str>> = headers
            .get_all(name)
            .iter()
            .map(|v| String::from_utf8_lossy(v.as_bytes()))
            .filter(|v| !v.trim().is_empty())
            .collect();
        (!lines.is_empty()).then(|| lines.join(", "))
    };
    // A date that cannot be read is ignored: RFC 9110, section 13.1.3.
    let date = |name: HeaderName| text(name).and_then(|t| parse_http_date(&t));
    let has = |name: HeaderName, word: &str| {
        headers
            .get_all(name)
            .iter()
            .filter_map(|v| v.to_str().ok())
            .any(|v| v.split(',').any(|w| w.trim().eq_ignore_ascii_case(word)))
    };
    ReadOptions {
        conditions: Conditions {
            if_match: list(header::IF_MATCH),
            if_none_match: list(header::IF_NONE_MATCH),
            if_modified_since_ms: date(header::IF_MODIFIED_SINCE),
            if_unmodified_since_ms: date(header::IF_UNMODIFIED_SINCE),
        },
        bypass: has(header::CACHE_CONTROL, "no-cache") || has(BYPASS_HEADER, "bypass"),
        ..ReadOptions::default()
    }
}

/// The single range of a request, if it has any.
pub fn range_header(headers: &HeaderMap) -> Result<Option<ByteRange>> {
    if headers.get_all(header::RANGE).iter().nth(1).is_some() {
        // We cannot know which of them a proxy before this node acted on.
        return Err(Error::invalid("the header Range is there twice")
            .hint("send one request for each range"));
    }
    match headers.get(header::RANGE).map(|v| v.to_str()) {
        None | Some(Err(_)) => Ok(None),
        Some(Ok(text)) => ByteRange::parse_header(text),
    }
}

/// An answer, and the metadata of the version that it comes from.
pub struct Answered {
    pub response: Response<AnswerBody>,
    pub meta: Arc<ObjectMeta>,
}

/// Answers a GET or HEAD of one object.
///
/// # Errors
/// The engine's errors, except "not modified", which becomes an answer.
pub async fn answer(
    engine: &Engine,
    name: &ObjectName,
    method: &Method,
    headers: &HeaderMap,
    note: &Note,
) -> Result<Response<AnswerBody>> {
    let options = read_options(headers);
    let answered = answer_with(engine, name, method, headers, options, note).await?;
    Ok(answered.response)
}

/// [`answer`] with the caller's options, which already hold what `headers` ask of a read.
///
/// # Errors
/// As [`answer`].
pub async fn answer_with(
    engine: &Engine,
    name: &ObjectName,
    method: &Method,
    headers: &HeaderMap,
    mut options: ReadOptions,
    note: &Note,
) -> Result<Answered> {
    let mut range = range_header(headers)?;
    // The caller's options, where the range is read of the version that was compared alone.
    let mut whole = None;
    if range.is_some() && headers.contains_key(header::IF_RANGE) {
        let asked = options.clone();
        match if_range(engine, name, headers, &mut options).await? {
            true => whole = Some(asked),
            false => range = None,
        }
    }
    let mut answer = get_or_head(engine, name, method, range, &options, note).await;
    let refused = answer.as_ref().err().map(Error::kind);
    if let Some(asked) = whole.filter(|_| refused == Some(ErrorKind::PreconditionFailed)) {
        // It has changed since it was compared, and then all of it is the answer; or a condition of
        // the client's own does not hold, which it is told.
        answer = get_or_head(engine, name, method, None, &asked, note).await;
    }
    answer.or_else(|e| match Unmodified::of(&e) {
        Some(known) => Ok(not_modified(known, note)),
        None => Err(e),
    })
}

async fn get_or_head(
    engine: &Engine,
    name: &ObjectName,
    method: &Method,
    range: Option<ByteRange>,
    options: &ReadOptions,
    note: &Note,
) -> Result<Answered> {
    match *method == Method::HEAD {
        true => head(engine, name, range, options, note).await,
        false => get(engine, name, range, options, note).await,
    }
}

async fn get(
    engine: &Engine,
    name: &ObjectName,
    range: Option<ByteRange>,
    options: &ReadOptions,
    note: &Note,
) -> Result<Answered> {
    let read = engine.read(name, range, options).await?;
    let mut response = described(&read.meta, range.map(|_| read.range.clone()));
    note.x_cache(response.headers_mut(), read.cache);
    let length = read.range.end - read.range.start;
    *response.body_mut() = if length == 0 {
        AnswerBody::Empty
    } else {
        AnswerBody::stream(read.body, Some(length))
    };
    Ok(Answered {
        response,
        meta: read.meta,
    })
}

async fn head(
    engine: &Engine,
    name: &ObjectName,
    range: Option<ByteRange>,
    options: &ReadOptions,
    note: &Note,
) -> Result<Answered> {
    let head = engine.head(name, options).await?;
    let range = range
        .map(|r| r.resolve(head.meta.size))
        .transpose()
        .map_err(|e| e.context(name))?;
    let mut response = described(&head.meta, range);
    note.x_cache(response.headers_mut(), head.cache);
    Ok(Answered {
        response,
        meta: head.meta,
    })
}

/// Whether `If-Range` lets the range apply; if it does, the read is also held to that version.
async fn if_range(
    engine: &Engine,
    name: &ObjectName,
    headers: &HeaderMap,
    options: &mut ReadOptions,
) -> Result<bool> {
    let wanted = headers
        .get(header::IF_RANGE)
        .and_then(|v| v.to_str().ok())
        .unwrap_or_default()
        .trim()
        .to_owned();
    let meta = engine
        .head(
            name,
            &ReadOptions {
                bypass: options.bypass,
                latest: options.latest,
                ..Default::default()
            },
        )
        .await?
        .meta;
    let holds = if wanted.starts_with('"') {
        meta.shown_etag() == wanted
    } else {
        parse_http_date(&wanted)
            .is_some_and(|t| t.div_euclid(1000) == meta.last_modified_ms.div_euclid(1000))
    };
    if holds && options.conditions.if_match.is_none() {
        match meta.shown_etag() {
            // A weak one matches nothing, so the date that was compared must do.
            etag if etag.starts_with("W/") => {
                let until = &mut options.conditions.if_unmodified_since_ms;
                let asked = until.unwrap_or(i64::MAX);
                *until = Some(asked.min(meta.last_modified_ms));
            }
            etag => options.conditions.if_match = Some(etag.into_owned()),
        }
    }
    Ok(holds)
}

/// A 304 names the version that the client has.
fn not_modified(known: &Unmodified, note: &Note) -> Answered {
    let meta = &known.meta;
    let mut response = Response::new(AnswerBody::Empty);
    *response.status_mut() = StatusCode::NOT_MODIFIED;
    let headers = response.headers_mut();
    note.x_cache(headers, known.cache);
    set(headers, header::ETAG, Some(&meta.shown_etag()));
    set(
        headers,
        header::CACHE_CONTROL,
        meta.attributes.cache_control.as_deref(),
    );
    set(
        headers,
        header::LAST_MODIFIED,
        Some(&http_date(meta.last_modified_ms)),
    );
    Answered {
        response,
        meta: meta.clone(),
    }
}

/// The head of an answer: 206 with `Content-Range` if a range was asked for, 200 otherwise.
fn described(meta: &ObjectMeta, range: Option<Range<u64>>) -> Response<AnswerBody> {
    let mut response = Response::new(AnswerBody::Empty);
    let length = range.as_ref().map_or(meta.size, |r| r.end - r.start);
    if let Some(range) = range {
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        let value = format!(
            "bytes {}-{}/{}",
            range.start,
            range.end.saturating_sub(1),
            meta.size
        );
        set(response.headers_mut(), header::CONTENT_RANGE, Some(&value));
    }
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    set(headers, header::ETAG, Some(&meta.shown_etag()));
    set(
        headers,
        header::LAST_MODIFIED,
        Some(&http_date(meta.last_modified_ms)),
    );
    set_attributes(headers, &meta.attributes);
    response
}

fn set_attributes(headers: &mut HeaderMap, a: &Attributes) {
    set(
        headers,
        header::CONTENT_TYPE,
        Some(a.content_type.as_deref().unwrap_or("binary/octet-stream")),
    );
    set(
        headers,
        header::CONTENT_ENCODING,
        a.content_encoding.as_deref(),
    );
    set(
        headers,
        header::CONTENT_LANGUAGE,
        a.content_language.as_deref(),
    );
    set(
        headers,
        header::CONTENT_DISPOSITION,
        a.content_disposition.as_deref(),
    );
    set(headers, header::CACHE_CONTROL, a.cache_control.as_deref());
    if let Some(class) = a.storage_class.as_deref().filter(|c| *c != "STANDARD") {
        set(
            headers,
            HeaderName::from_static("x-amz-storage-class"),
            Some(class),
        );
    }
    for (name, value) in &a.user {
        if let Ok(name) = format!("x-amz-meta-{name}").parse::<HeaderName>() {
            set(headers, name, Some(&header_text(value)));
        }
    }
}

/// Metadata that is not ASCII is encoded in headers as RFC 2047 says, like S3 does.
fn header_text(value: &str) -> String {
    if value.bytes().all(|b| (b' '..=b'~').contains(&b)) {
        value.to_owned()
    } else {
        format!("=?UTF-8?B?{}?=", STANDARD.encode(value))
    }
}

/// Sets a header, to UTF-8 where the text is not ASCII.
fn set(headers: &mut HeaderMap, name: HeaderName, value: Option<&str>) {
    if let Some(value) = value.and_then(|v| HeaderValue::from_bytes(v.as_bytes()).ok()) {
        headers.insert(name, value);
    }
}

/// The object's length, for a 416 answer.
pub async fn size_of(engine: &Engine, name: &ObjectName) -> Option<u64> {
    engine
        .head(name, &ReadOptions::default())
        .await
        .ok()
        .map(|h| h.meta.size)
}

/// Sends the bytes of a member or of a whole answer under one cache status.
pub fn streamed(
    body: forebay_engine::ByteStream,
    length: u64,
    cache: CacheStatus,
    note: &Note,
) -> Response<AnswerBody> {
    let mut response = Response::new(if length == 0 {
        AnswerBody::Empty
    } else {
        AnswerBody::stream(body, Some(length))
    });
    response
        .headers_mut()
        .insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    note.x_cache(response.headers_mut(), cache);
    response
}

/// The last moment that an HTTP date can express: the end of the year 9999.
pub const DATE_MAX_MS: i64 = 253_402_300_799_000;

/// `Sun, 06 Nov 1994 08:49:37 GMT`. A time outside of 1970 to 9999 becomes the nearest one that can
/// be expressed.
pub fn http_date(ms: i64) -> String {
    let ms = ms.clamp(0, DATE_MAX_MS).unsigned_abs();
    httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_millis(ms))
}

/// Milliseconds since the epoch, of a date in any of the three formats of RFC 9110, section 5.6.7.
pub fn parse_http_date(text: &str) -> Option<i64> {
    let text = text.trim();
    if let Ok(t) = DateTime::parse_from_rfc2822(text) {
        return Some(t.timestamp_millis());
    }
    let obsolete = httpdate::parse_http_date(text).ok()?;
    let since = obsolete.duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_millis()).ok()
}

/// An object's name from a request.
pub fn name(bucket: &str, key: &str) -> Result<ObjectName> {
    ObjectName::new(bucket, key).map_err(|e| {
        if e.kind() == ErrorKind::Invalid {
            e
        } else {
            Error::invalid(e.message())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_engine::Freshness;
    use forebay_testing::engine::Bench;

    #[test]
    fn dates_go_both_ways() {
        let text = "Sun, 06 Nov 1994 08:49:37 GMT";
        assert_eq!(parse_http_date(text), Some(784_111_777_000));
        assert_eq!(http_date(784_111_777_999), text);
        for obsolete in ["Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"] {
            assert_eq!(parse_http_date(obsolete), Some(784_111_777_000));
        }
        assert_eq!(parse_http_date("yesterday"), None);
        for ms in (0..4_000_000_000_000).step_by(86_399_000_003) {
            let slow = DateTime::from_timestamp_millis(ms)
                .unwrap()
                .format("%a, %d %b %Y %H:%M:%S GMT")
                .to_string();
            assert_eq!(http_date(ms), slow);
        }
    }

    #[test]
    fn a_condition_that_is_no_text_does_not_hold() {
        let meta = ObjectMeta {
            size: 1,
            etag: Some("\"e\"".into()),
            last_modified_ms: 0,
            attributes: Attributes::default(),
        };
        let mut headers = HeaderMap::new();
        let strange = HeaderValue::from_bytes(b"\"\xe9\"").unwrap();
        headers.insert(header::IF_MATCH, strange.clone());
        let check = |headers: &HeaderMap| {
            let checked = read_options(headers).conditions.check(&meta);
            checked.map_err(|e| e.kind())
        };
        assert_eq!(check(&headers), Err(ErrorKind::PreconditionFailed));
        headers.append(header::IF_MATCH, HeaderValue::from_static("\"e\""));
        assert_eq!(check(&headers), Ok(()));
        headers.remove(header::IF_MATCH);
        headers.insert(header::IF_NONE_MATCH, strange);
        assert_eq!(check(&headers), Ok(()));
    }

    #[test]
    fn attributes_become_headers() {
        let meta = ObjectMeta {
            size: 10,
            etag: Some("\"e-1\"".into()),
            last_modified_ms: 0,
            attributes: Attributes {
                content_type: Some("image/png".into()),
                content_disposition: Some("inline; filename=\"ü.png\"".into()),
                user: vec![("a".into(), "ü".into()), ("b".into(), "x".into())],
                ..Attributes::default()
            },
        };
        let response = described(&meta, Some(2..5));
        let get = |n: &str| response.headers()[n].to_str().unwrap();
        assert_eq!(response.status(), StatusCode::PARTIAL_CONTENT);
        assert_eq!(
            (get("content-range"), get("content-length"), get("etag")),
            ("bytes 2-4/10", "3", "\"e-1\"")
        );
        assert_eq!(
            (
                get("content-type"),
                get("x-amz-meta-a"),
                get("x-amz-meta-b")
            ),
            ("image/png", "=?UTF-8?B?w7w=?=", "x")
        );
        assert_eq!(get("last-modified"), "Thu, 01 Jan 1970 00:00:00 GMT");
        // As it was written, and as services send it.
        let disposition = response.headers()[header::CONTENT_DISPOSITION].as_bytes();
        assert_eq!(disposition, "inline; filename=\"ü.png\"".as_bytes());
    }

    #[test]
    fn every_object_has_an_etag_for_clients() {
        let meta = ObjectMeta {
            size: 10,
            etag: None,
            last_modified_ms: 1_000_500,
            attributes: Attributes::default(),
        };
        let shown = described(&meta, None).headers()[header::ETAG].clone();
        // This is what a listing shows, whose dates have whole seconds.
        assert_eq!(shown, forebay_core::made_etag(10, 1_000_000));
        let check = |name: HeaderName, value: &HeaderValue, meta: &ObjectMeta| {
            let headers = [(name, value.clone())].into_iter().collect();
            read_options(&headers).conditions.check(meta)
        };
        let empty = HeaderValue::from_static("");
        let kind = |r: Result<()>| r.map_err(|e| e.kind());
        for meta in [
            meta.clone(),
            ObjectMeta {
                etag: Some("\"its own\"".into()),
                ..meta.clone()
            },
        ] {
            assert!(check(header::IF_MATCH, &shown, &meta).is_ok());
            assert_eq!(
                kind(check(header::IF_NONE_MATCH, &shown, &meta)),
                Err(ErrorKind::NotModified)
            );
            assert!(check(header::IF_MATCH, &empty, &meta).is_ok());
        }
        let changed = ObjectMeta { size: 11, ..meta };
        assert_eq!(
            kind(check(header::IF_MATCH, &shown, &changed)),
            Err(ErrorKind::PreconditionFailed)
        );
        assert!(check(header::IF_NONE_MATCH, &shown, &changed).is_ok());
    }

    #[test]
    fn a_client_may_ask_past_the_cache() {
        let with = |n: &'static str, v: &'static str| {
            read_options(
                &[(n.parse::<HeaderName>().unwrap(), v.parse().unwrap())]
                    .into_iter()
                    .collect(),
            )
        };
        assert!(
            with("cache-control", "max-age=0, No-Cache").bypass
                && with("x-forebay-cache", "bypass").bypass
        );
        assert!(!with("cache-control", "max-age=0").bypass);
        assert_eq!(
            with("if-none-match", "\"a\"")
                .conditions
                .if_none_match
                .as_deref(),
            Some("\"a\"")
        );
    }

    #[test]
    fn a_list_of_etags_may_come_in_several_lines() {
        let mut headers = HeaderMap::new();
        for name in [header::IF_MATCH, header::IF_NONE_MATCH] {
            for tag in ["\"a\"", "", "\"b\", \"c\""] {
                headers.append(&name, tag.parse().unwrap());
            }
        }
        let conditions = read_options(&headers).conditions;
        let list = Some("\"a\", \"b\", \"c\"");
        assert_eq!(conditions.if_match.as_deref(), list);
        assert_eq!(conditions.if_none_match.as_deref(), list);
    }

    fn note() -> Arc<Note> {
        Note::new(
            crate::request_id::RequestId::new(),
            crate::note::Peer::Unix,
            Method::GET,
            Arc::new(crate::metrics::Metrics::default()),
        )
    }

    #[tokio::test]
    async fn a_range_may_depend_on_the_date_of_an_object_with_a_weak_etag() {
        use http_body_util::BodyExt;
        let b = Bench::new(Freshness::Always);
        b.origin.set("k", "0123456789");
        let modified_ms = {
            let mut objects = b.origin.objects.lock();
            let meta = &mut objects.get_mut("k").unwrap().1;
            meta.etag = Some("W/\"a\"".into());
            meta.last_modified_ms
        };
        let note = note();
        let name = forebay_testing::engine::name("k");
        let get = async |date: String| {
            let headers = HeaderMap::from_iter([
                (header::RANGE, HeaderValue::from_static("bytes=1-2")),
                (header::IF_RANGE, date.parse().unwrap()),
            ]);
            let answered = answer(&b.engine, &name, &Method::GET, &headers, &note).await;
            let answered = answered.unwrap();
            let status = answered.status().as_u16();
            let body = answered.into_body().collect().await.unwrap();
            (status, body.to_bytes())
        };
        assert_eq!(get(http_date(modified_ms)).await, (206, "12".into()));
        let other = http_date(modified_ms + 5000);
        assert_eq!(get(other).await, (200, "0123456789".into()));
    }

    #[tokio::test]
    async fn a_range_is_not_applied_to_what_changes_after_the_comparison() {
        use forebay_core::{ManualClock, MemoryBudget};
        use forebay_engine::{EngineConfig, FixedBuckets};
        use forebay_origin::Operation;
        use forebay_testing::{
            Fault, Faults, Faulty,
            engine::{MemoryOrigin, NOW},
        };
        use futures::FutureExt;
        use http_body_util::BodyExt;
        let origin = Arc::new(MemoryOrigin::default());
        let faults = Faults::new();
        let mut buckets = FixedBuckets::default();
        let faulty = Faulty::new(origin.clone(), faults.clone());
        buckets.0.insert("data".into(), Arc::new(faulty));
        let engine = Engine::new(
            EngineConfig::default(),
            Arc::new(buckets),
            None,
            Arc::new(ManualClock::at(NOW)),
            MemoryBudget::new(64 << 20),
        );
        let (note, name) = (note(), forebay_testing::engine::name("k"));
        let get = async |own: Option<HeaderValue>| {
            origin.set("k", "0123456789");
            let etag = origin.objects.lock()["k"].1.etag.clone().unwrap();
            let mut headers = HeaderMap::from_iter([
                (header::RANGE, HeaderValue::from_static("bytes=1-2")),
                (header::IF_RANGE, etag.parse().unwrap()),
            ]);
            headers.extend(own.map(|own| (header::IF_MATCH, own)));
            let changed = origin.clone();
            let change = move |key: String| {
                let changed = changed.clone();
                async move { changed.set(&key, "abcdefghij") }.boxed()
            };
            faults.next(Operation::Get, Fault::Hook(Arc::new(change)));
            answer(&engine, &name, &Method::GET, &headers, &note).await
        };
        let answered = get(None).await.unwrap();
        assert_eq!(answered.status(), StatusCode::OK);
        let body = answered.into_body().collect().await.unwrap();
        assert_eq!(body.to_bytes(), "abcdefghij");
        let own = HeaderValue::from_static("\"another\"");
        let refused = get(Some(own)).await.err().map(|e| e.kind());
        assert_eq!(refused, Some(ErrorKind::PreconditionFailed));
    }

    #[tokio::test]
    async fn a_304_names_the_version_that_was_compared() {
        let b = Bench::new(Freshness::Always);
        b.origin.set("k", "one");
        let old = b.origin.objects.lock()["k"].1.etag.clone().unwrap();
        let headers = HeaderMap::from_iter([(header::IF_NONE_MATCH, old.parse().unwrap())]);
        let note = note();
        let name = forebay_testing::engine::name("k");
        let get = async || {
            let answered = answer(&b.engine, &name, &Method::GET, &headers, &note).await;
            let answered = answered.unwrap();
            let tag = answered.headers()[header::ETAG]
                .to_str()
                .unwrap()
                .to_owned();
            (answered.status(), tag)
        };
        assert_eq!(get().await, (StatusCode::NOT_MODIFIED, old));
        assert_eq!(
            b.origin.requests(),
            1,
            "nothing is asked after the comparison"
        );
        b.origin.set("k", "two");
        let new = b.origin.objects.lock()["k"].1.etag.clone().unwrap();
        assert_eq!(get().await, (StatusCode::OK, new));
    }
}
