//! `/v1/objects/BUCKET/NAME`: objects and archive members.

use super::{Call, action_not_offered, append, done, members, not_offered, properties, refuse};
use crate::{
    body::AnswerBody,
    config::Action,
    object,
    uploads::{NewPart, Part},
};
use forebay_core::{Error, ErrorKind, ObjectMeta, ObjectName, Result, limits, name::shorten};
use forebay_engine::{
    ByteStream, Conditions, Engine, PutCondition, PutRequest, PutResponse, ReadOptions,
    UploadedPart,
};
use forebay_origin::crc32c_in_etag;
use futures::{StreamExt, TryStreamExt};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header};
use http_body_util::BodyDataStream;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

/// Query parameters for features that this node does not offer.
const NOT_OFFERED: [&str; 6] = [
    "etl_name",
    "etl_pipeline",
    "etl_fqn",
    "archmime",
    "object_to_etl",
    "dpq",
];

pub async fn objects(call: &Call, bucket: &str, key: &str) -> Result<Response<AnswerBody>> {
    call.note.set_name(bucket, key);
    for name in NOT_OFFERED {
        if call.query(name).is_some_and(|v| !v.is_empty()) {
            return Err(Error::unsupported(format!(
                "the query parameter {name} asks for something that is not offered here"
            ))
            .hint("leave it out: objects are read and written as they are"));
        }
    }
    if key.is_empty() {
        return match call.note.method {
            Method::POST => refuse(call).await,
            _ => Err(not_offered(call)),
        };
    }
    let copies = call.note.method == Method::PUT && copy_target(call).is_some();
    let reads = copies || matches!(call.note.method, Method::GET | Method::HEAD);
    call.permit(
        if reads { Action::Read } else { Action::Write },
        bucket,
        key,
    )?;
    let name = object::name(bucket, key)?;
    let archpath = call.query("archpath").filter(|p| !p.is_empty());
    if let Some(asked) = members::Asked::of(call)? {
        return match call.note.method {
            Method::GET | Method::HEAD => members::matching(call, &name, asked).await,
            _ => Err(Error::unsupported(
                "archregx and archmode select members to read: nothing else is offered with them",
            )),
        };
    }
    match (call.note.method.clone(), archpath) {
        (Method::GET | Method::HEAD, Some(member)) => read_member(call, &name, member).await,
        (method @ (Method::GET | Method::HEAD), None) => read(call, &name, &method).await,
        (_, Some(_)) => Err(
            Error::unsupported("writing into archives is not offered here")
                .hint("write the whole archive anew"),
        ),
        (Method::PUT, None) => put(call, &name).await,
        (Method::POST, None) => upload(call, &name).await,
        (Method::DELETE, None) => delete(call, &name).await,
        (Method::PATCH, None) => properties::set(call, &name).await,
        _ => Err(not_offered(call)),
    }
}

/// The name that a PUT copies this object to.
fn copy_target(call: &Call) -> Option<&str> {
    call.query("object_to").filter(|t| !t.is_empty())
}

/// `latest-ver`: the origin is asked whatever the freshness rule says, and its answer is kept.
pub(super) fn options(call: &Call) -> ReadOptions {
    let mut options = object::read_options(&call.headers);
    options.latest |= call.query("latest-ver") == Some("true");
    options
}

async fn read(call: &Call, name: &ObjectName, method: &Method) -> Result<Response<AnswerBody>> {
    let (engine, headers) = (&call.app.engine, &call.headers);
    let answered =
        object::answer_with(engine, name, method, headers, options(call), &call.note).await?;
    let object::Answered { mut response, meta } = answered;
    let props = call
        .query("props")
        .filter(|p| *method == Method::HEAD && !p.is_empty());
    if props.is_some() {
        let kept = [
            header::CONTENT_LENGTH,
            header::CONTENT_RANGE,
            header::ETAG,
            header::LAST_MODIFIED,
            HeaderName::from_static("x-cache"),
        ];
        let old = std::mem::take(response.headers_mut());
        response.headers_mut().extend(
            kept.into_iter()
                .filter_map(|n| old.get(&n).cloned().map(|v| (n, v))),
        );
    }
    describe(call, name, &meta, props, response.headers_mut());
    Ok(response)
}

/// The version of an object, made from its ETag.
pub fn version_of(etag: &str) -> String {
    etag.trim_matches('"').to_owned()
}

/// The MD5 of an object in hexadecimal, where its ETag is one: in S3 that of an object which was
/// written in one piece. (AIStore takes such ETags for MD5s, too. Those of objects that S3 encrypted
/// under a key of KMS look the same and are not.)
fn md5_of(etag: &str) -> Option<&str> {
    let tag = etag.trim_matches('"');
    let is_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    (tag.len() == 32 && tag.bytes().all(is_hex)).then_some(tag)
}

/// The checksum of an object as AIStore's clients know it, type and value, where its ETag tells it.
pub fn checksum_of(etag: &str) -> Option<(&'static str, &str)> {
    let md5 = md5_of(etag).map(|sum| ("md5", sum));
    md5.or_else(|| crc32c_in_etag(etag).map(|sum| ("crc32c", sum)))
}

pub(super) fn set(headers: &mut HeaderMap, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

pub(super) fn identify(call: &Call, name: &ObjectName, headers: &mut HeaderMap) {
    // Any object can be read here at any offset, cached or not, which is what clients use "present"
    // for.
    set(headers, "ais-present", "true");
    set(headers, "ais-bucket-name", name.bucket());
    set(headers, "ais-bucket-provider", call.provider());
}

/// Sets the `Ais-*` headers of an object: all, or those that `props` names.
fn describe(
    call: &Call,
    name: &ObjectName,
    meta: &ObjectMeta,
    props: Option<&str>,
    headers: &mut HeaderMap,
) {
    let wanted = |what: &str| props.is_none_or(|p| p.split(',').any(|w| w.trim() == what));
    identify(call, name, headers);
    if wanted("name") {
        set(
            headers,
            "ais-name",
            &percent_encoding::utf8_percent_encode(name.key(), percent_encoding::CONTROLS)
                .to_string(),
        );
    }
    if wanted("version") {
        let version = meta.etag.as_deref().map(version_of);
        set(headers, "ais-version", &version.unwrap_or_default());
    }
    if wanted("atime") {
        set(
            headers,
            "ais-atime",
            &(call.app.engine.clock().now_ms() as i128 * 1_000_000).to_string(),
        );
    }
    if wanted("checksum") {
        let told = meta.etag.as_deref().and_then(checksum_of);
        let (kind, value) = told.unwrap_or(("none", ""));
        set(headers, "ais-checksum-type", kind);
        set(headers, "ais-checksum-value", value);
    }
    if wanted("copies") {
        set(headers, "ais-mirror-copies", "1");
    }
    if wanted("location") {
        set(headers, "ais-location", &format!("t[{}]", call.app.node_id));
    }
    if wanted("custom") {
        // One header each: Go's client takes each for one property. Others join them by commas.
        for (n, v) in &meta.attributes.user {
            if let Ok(value) = HeaderValue::from_str(&format!("{n}={v}")) {
                headers.append("ais-custom-md", value);
            }
        }
    }
}

async fn read_member(
    call: &Call,
    archive: &ObjectName,
    member: &str,
) -> Result<Response<AnswerBody>> {
    let options = options(call);
    let range = object::range_header(&call.headers)?;
    let read = call
        .app
        .engine
        .read_member(archive, member, range, &options)
        .await?;
    let length = read.range.end - read.range.start;
    let body = if call.note.method == Method::HEAD {
        futures::stream::empty().boxed()
    } else {
        read.body
    };
    let mut response = if call.note.method == Method::HEAD {
        let mut head = object::streamed(body, 0, read.cache, &call.note);
        head.headers_mut()
            .insert(header::CONTENT_LENGTH, HeaderValue::from(length));
        head
    } else {
        object::streamed(body, length, read.cache, &call.note)
    };
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    set(
        headers,
        "last-modified",
        &object::http_date(read.archive.last_modified_ms),
    );
    if range.is_some() {
        set(
            headers,
            "content-range",
            &format!(
                "bytes {}-{}/{}",
                read.range.start,
                read.range.end.saturating_sub(1),
                read.size
            ),
        );
        identify(call, archive, headers);
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    } else {
        identify(call, archive, headers);
    }
    Ok(response)
}

/// The `Content-Range` of a 416 answer for an object.
pub async fn unsatisfiable(call: &Call, bucket: &str, key: &str) -> Option<HeaderValue> {
    if call.query("archpath").is_some_and(|p| !p.is_empty()) {
        return None;
    }
    let size = object::size_of(&call.app.engine, &object::name(bucket, key).ok()?).await?;
    HeaderValue::from_str(&format!("bytes */{size}")).ok()
}

/// The body of an upload, and its length if the client gave it.
pub(super) fn upload_stream(call: &Call) -> Result<(ByteStream, Option<u64>)> {
    let length = match call
        .headers
        .get(header::CONTENT_LENGTH)
        .map(|v| v.to_str().ok().and_then(|v| v.parse::<u64>().ok()))
    {
        None => None,
        Some(None) => return Err(Error::invalid("the Content-Length is not a number")),
        Some(length) => length,
    };
    let body = BodyDataStream::new(call.take_body()?).map_err(|e| match e.downcast::<Error>() {
        Ok(e) => *e,
        Err(e) => Error::invalid(format!("the upload broke off: {e}")),
    });
    Ok((body.boxed(), length))
}

async fn put(call: &Call, name: &ObjectName) -> Result<Response<AnswerBody>> {
    if let Some(to) = copy_target(call) {
        return copy(call, name, to).await;
    }
    if let Some(upload) = call.query("uploadId") {
        let upload = upload.to_owned();
        return put_part(call, name, &upload).await;
    }
    if let Some(what) = call.query("append_type").filter(|w| !w.is_empty()) {
        return append::append(call, name, what).await;
    }
    let (body, length) = upload_stream(call)?;
    let mut request = PutRequest {
        condition: condition(&call.headers)?,
        ..PutRequest::default()
    };
    request.attributes.content_type = call
        .headers
        .get(header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .map(str::to_owned);
    let put = call.app.engine.put(name, request, length, body).await?;
    Ok(written(&put))
}

/// The condition of a write: `If-None-Match: *`, or `If-Match` with one ETag, or none.
fn condition(headers: &HeaderMap) -> Result<PutCondition> {
    let text = |name: HeaderName| {
        headers
            .get(name)
            .map(|v| v.to_str().unwrap_or_default().trim())
    };
    match (text(header::IF_NONE_MATCH), text(header::IF_MATCH)) {
        (None, None) => Ok(PutCondition::Always),
        (Some("*"), None) => Ok(PutCondition::IfAbsent),
        (None, Some(etag)) if !matches!(etag, "" | "*") && !etag.contains(',') => {
            Ok(PutCondition::IfMatch(etag.to_owned()))
        }
        _ => Err(Error::unsupported(
            "of the conditions on a write only If-None-Match: * and If-Match with one ETag are \
             offered",
        )),
    }
}

/// The answer to a write: describes what it made.
pub(super) fn written(put: &PutResponse) -> Response<AnswerBody> {
    let mut response = done(StatusCode::OK);
    let headers = response.headers_mut();
    if let Some(etag) = &put.etag {
        set(headers, "etag", etag);
        set(headers, "ais-version", &version_of(etag));
        if let Some((kind, value)) = checksum_of(etag) {
            set(headers, "ais-checksum-type", kind);
            set(headers, "ais-checksum-value", value);
        }
    }
    response
}

/// `object_to` is a name in one string: `provider/@namespace#/bucket/name`.
async fn copy(call: &Call, from: &ObjectName, to: &str) -> Result<Response<AnswerBody>> {
    let bad = || {
        Error::invalid(format!("object_to={to:?} does not name an object"))
            .hint("PROVIDER/@#/BUCKET/NAME")
    };
    let mut parts = to.splitn(4, '/');
    let (_provider, namespace) = (parts.next().ok_or_else(bad)?, parts.next().ok_or_else(bad)?);
    if !namespace.starts_with('@') {
        return Err(bad());
    }
    let to = object::name(parts.next().ok_or_else(bad)?, parts.next().ok_or_else(bad)?)?;
    call.permit(Action::Write, to.bucket(), to.key())?;
    // Copies what is there now, not what was there within the bucket's freshness.
    let now = ReadOptions {
        bypass: true,
        ..ReadOptions::default()
    };
    let source = call.app.engine.head(from, &now).await?.meta;
    call.app
        .engine
        .copy(
            from,
            Some(&source),
            &to,
            PutRequest {
                attributes: source.attributes.clone(),
                ..PutRequest::default()
            },
        )
        .await?;
    Ok(done(StatusCode::OK))
}

async fn delete(call: &Call, name: &ObjectName) -> Result<Response<AnswerBody>> {
    if let Some(upload) = call.query("uploadId") {
        let app = &call.app;
        app.uploads.abort(&app.engine, name, upload).await?;
        return Ok(done(StatusCode::OK));
    }
    // Unlike S3's, this DELETE says if there was nothing to remove, but only to those who may know.
    if call.policy.allows(Action::Read, name.bucket(), name.key()) {
        call.app
            .engine
            .head(
                name,
                &ReadOptions {
                    conditions: Conditions::default(),
                    bypass: true,
                    ..Default::default()
                },
            )
            .await?;
    }
    call.app.engine.delete(name).await?;
    Ok(done(StatusCode::OK))
}

async fn put_part(call: &Call, name: &ObjectName, upload: &str) -> Result<Response<AnswerBody>> {
    let number = call
        .query("partNumber")
        .and_then(|n| n.parse::<u32>().ok())
        .filter(|n| (1..=limits::UPLOAD_PARTS_MAX as u32).contains(n))
        .ok_or_else(|| Error::invalid("partNumber is not a number from 1 to 10000"))?;
    // `as_file()` of a part appends, and then flushes. What is appended first is the part.
    let append = call.query("append_type").filter(|w| !w.is_empty());
    if append.is_some() && call.query("append_handle").is_some_and(|h| !h.is_empty()) {
        if append == Some("flush") {
            return Ok(done(StatusCode::OK));
        }
        return Err(Error::unsupported(format!(
            "part {number} was written already, and a part cannot be appended to"
        ))
        .hint("write a part at once: put_content, put_file, or one write of as_file"));
    }
    let is_append = append.is_some();
    let (body, length) = upload_stream(call)?;
    let length = length.ok_or_else(|| Error::invalid("a part needs a Content-Length"))?;
    let app = &call.app;
    if length == 0 {
        // `as_file("w")` sends an empty part first, and then appends to it. The node keeps no empty parts.
        let known = app.uploads.get(name, upload);
        let is_there = known.is_some_and(|upload| upload.parts.contains_key(&number));
        if is_there && !is_append {
            return Err(Error::invalid(format!(
                "part {number} was written already, and an empty one cannot take its place"
            ))
            .hint("write an empty object with one PUT"));
        }
        return Ok(done(StatusCode::OK));
    }
    let new = NewPart {
        number,
        size: length,
        body,
    };
    app.uploads
        .send_part(&app.engine, name, upload, new, Default::default)
        .await?;
    let mut response = done(StatusCode::OK);
    if is_append {
        let handle = HeaderValue::from_static("part");
        response.headers_mut().insert("ais-append-handle", handle);
    }
    Ok(response)
}

/// Multipart uploads by action: `mpt-upload`, `mpt-complete`, `mpt-abort`.
async fn upload(call: &Call, name: &ObjectName) -> Result<Response<AnswerBody>> {
    let message = call.json().await?;
    let id = || {
        call.query("uploadId")
            .ok_or_else(|| Error::invalid("the query parameter uploadId is missing"))
    };
    match message["action"].as_str().unwrap_or_default() {
        "mpt-upload" => {
            let id = call
                .app
                .engine
                .create_upload(name, PutRequest::default())
                .await?;
            call.app
                .uploads
                .begin(name, &id, call.app.engine.clock().now_ms());
            Ok(Response::new(AnswerBody::full(id)))
        }
        "mpt-complete" => {
            let (id, app) = (id()?, &call.app);
            let numbers = part_numbers(&message["value"])?;
            let known = app.uploads.get(name, id).map(|upload| upload.parts);
            if known.is_none() {
                // Who missed the answer asks again.
                let before = app.uploads.completed_before(name, id, &numbers);
                if let Some(put) = before {
                    return Ok(written(&put));
                }
            }
            let known = known.unwrap_or_default();
            let parts = match completed(&app.engine, name, id, &known, &numbers).await {
                Ok(parts) => parts,
                // It may have ended since, by a completion that was under way here.
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    let before = app.uploads.completed_by_now(name, id, &numbers).await;
                    return before.map(|put| written(&put)).ok_or(e);
                }
                Err(e) => return Err(e),
            };
            let always = PutCondition::Always;
            let put = app
                .uploads
                .complete(&app.engine, name, id, parts, always)
                .await?;
            Ok(written(&put))
        }
        "mpt-abort" => {
            let id = id()?;
            call.app.uploads.abort(&call.app.engine, name, id).await?;
            Ok(done(StatusCode::OK))
        }
        other => Err(action_not_offered(other)),
    }
}

/// The numbers of the parts of which an object is to be made, in ascending order.
fn part_numbers(value: &Value) -> Result<Vec<u32>> {
    let listed = value
        .as_array()
        .ok_or_else(|| Error::invalid("value is not a list of parts"))?;
    let mut numbers = Vec::with_capacity(listed.len().min(limits::UPLOAD_PARTS_MAX));
    for (i, part) in listed.iter().enumerate() {
        let number = part["part-number"]
            .as_u64()
            .and_then(|n| u32::try_from(n).ok())
            .ok_or_else(|| {
                Error::invalid(format!(
                    "value[{i}].part-number is not the number of a part"
                ))
                .hint(format!("1 to {}", limits::UPLOAD_PARTS_MAX))
            })?;
        numbers.push(number);
    }
    numbers.sort_unstable();
    if numbers.is_empty() {
        return Err(Error::invalid("value lists no parts"));
    }
    if let Some(twice) = numbers.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::invalid(format!("part {} is listed twice", twice[0])));
    }
    Ok(numbers)
}

/// The parts with these numbers: clients name no ETags. The origin tells them, because each may have
/// come through another node, or come again through one; what it does not list may be `known` here.
async fn completed(
    engine: &Engine,
    name: &ObjectName,
    id: &str,
    known: &BTreeMap<u32, Part>,
    numbers: &[u32],
) -> Result<Vec<UploadedPart>> {
    let are_known = numbers.iter().all(|n| known.contains_key(n));
    let mut listed = HashMap::new();
    let (mut after, mut goes_on) = (0, true);
    while goes_on {
        let page = engine.list_parts(name, id, after, limits::LIST_PAGE_MAX_KEYS);
        let page = match page.await {
            Ok(page) => page,
            Err(_) if are_known => break,
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Unsupported) => {
                let text = format!("the upload {:?} is not known here", shorten(id));
                return Err(Error::new(ErrorKind::NotFound, text)
                    .hint("it has ended, or was started before the node was: start again")
                    .caused_by(e));
            }
            Err(e) => return Err(e),
        };
        let last = page.parts.last().map_or(0, |p| p.part.number);
        goes_on = page.is_truncated && last > after && (last as usize) < limits::UPLOAD_PARTS_MAX;
        after = last;
        listed.extend(page.parts.into_iter().map(|p| (p.part.number, p.part)));
    }
    let part = |n: &u32| {
        let listed = listed.get(n).cloned();
        listed
            .or_else(|| known.get(n).map(|p| p.part.clone()))
            .ok_or_else(|| {
                Error::invalid(format!("part {n} was not uploaded, or is empty"))
                    .hint("write an empty object with one PUT")
            })
    };
    numbers.iter().map(part).collect()
}
