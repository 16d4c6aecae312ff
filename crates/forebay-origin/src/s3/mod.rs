//! S3 and compatible services, and Google Cloud Storage, whose XML API is S3's with other names,
//! and with tokens instead of signatures.
//!
//! Signatures come from `object_store` (but see `trailed.rs`), and so do Google's tokens; AWS
//! credentials come from [`aws`](crate::aws). The operations are here, because those of
//! `object_store` cannot keep three promises of [`Origin`]: its `Path` turns the key `dir/` into
//! `dir` (a listing would give one object another's name), it needs a whole part in memory to send
//! it (up to 5 GiB), and it hides the status of an error. Bodies stream in both directions. Nothing
//! here retries (except the pieces of a session at Google): the [`Resilient`](crate::Resilient)
//! wrapper does, which also sends long bodies in parts.
//!
//! A conditional multipart upload keeps its condition in its id (`fb-absent.…`,
//! `fb-match.<etag>.…`), because S3 needs it when the upload is completed, and any node may do
//! that.

mod client;
mod google;
pub(crate) mod headers;
mod trailed;
pub(crate) mod xml;

pub(crate) use client::{Address, Answer, Call, Client, S3Endpoint};
pub(crate) use google::PIECE_BYTES as GOOGLE_PIECE_BYTES;

use crate::*;
use crate::{
    body::{self, exact},
    failure::Site,
    transport::{Broken, Payload, body_of},
};
use async_trait::async_trait;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, ObjectMeta, Result, limits, units::count};
use headers::Dialect;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode,
    header::{DATE, IF_MATCH, IF_NONE_MATCH, RANGE},
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Bodies of a known length up to this are held in memory and signed with their hash; longer ones
/// are sent in parts. Parts of clients' own uploads may be longer: they stream, unsigned, which is
/// safe because a part that breaks off is never acknowledged.
const SIGNED_BODY_MAX_BYTES: u64 = 8 << 20;
/// How far apart the clocks of one service's machines may be, and how coarse its dates are.
const CLOCKS_APART_MAX: Duration = Duration::from_secs(10);
/// Longest answer document: a page of 1,000 keys of 1,024 bytes, each character encoded by three.
const DOCUMENT_MAX_BYTES: u64 = 16 << 20;

/// One bucket of an S3 service.
pub struct S3Origin {
    client: Arc<Client>,
    description: String,
    /// For Google's sessions, whose pieces are retried here: only the code that holds them can do
    /// that.
    retry: (RetryPolicy, Arc<Counters>),
}

impl S3Origin {
    pub(crate) fn new(client: Client, retry: (RetryPolicy, Arc<Counters>)) -> Self {
        let description = client.describe();
        Self {
            client: Arc::new(client),
            description,
            retry,
        }
    }

    fn site<'a>(&'a self, operation: &'a str, key: &'a str) -> Site<'a> {
        Site {
            origin: &self.description,
            operation,
            key,
        }
    }

    async fn document(&self, site: Site<'_>, answer: reqwest::Response) -> Result<String> {
        self.client
            .transport()
            .text(site, answer, DOCUMENT_MAX_BYTES)
            .await
    }

    /// A range without bytes, of an object that may be empty: checked with HEAD.
    async fn get_nothing(
        &self,
        key: &str,
        request: &GetRequest,
        start: u64,
    ) -> Result<GetResponse> {
        let site = self.site("get", key);
        let call =
            Call::new(Method::HEAD, site).headers(conditions(self.client.dialect(), request)?);
        let answer = self.client.send(call).await?;
        let meta = headers::meta(self.client.dialect(), site, answer.headers())?;
        get_checks(&meta, request, key)?;
        if start > 0 && start >= meta.size {
            return Err(past_the_end(key, meta.size, start));
        }
        Ok(GetResponse {
            meta,
            age_secs: Some(0),
            range: start..start,
            body: body::empty(),
        })
    }

    async fn put_one(
        &self,
        key: &str,
        request: &PutRequest,
        content: Bytes,
    ) -> Result<PutResponse> {
        if self.client.dialect() == Dialect::Google {
            return self.google_put(key, request, content).await;
        }
        let site = self.site("put", key);
        let mut h = headers::attributes(self.client.dialect(), &request.attributes)?;
        match &request.condition {
            PutCondition::Always => {}
            PutCondition::IfAbsent => drop(h.insert(IF_NONE_MATCH, HeaderValue::from_static("*"))),
            PutCondition::IfMatch(etag) => {
                drop(h.insert(IF_MATCH, headers::value("If-Match", etag)?))
            }
        }
        let call = Call::new(Method::PUT, site)
            .headers(h.clone())
            .payload(Payload::Bytes(content));
        let begun = Instant::now();
        let answer = match self.client.send(call).await {
            Ok(answer) => answer,
            Err(e) => {
                let e = self.not_written(key, &h, Some(begun), e).await;
                return Err(unmet(e, &request.condition));
            }
        };
        Ok(PutResponse {
            etag: headers::etag(self.client.dialect(), answer.headers()),
        })
    }

    /// Why a write with these headers, begun at that time, has failed. A service that refuses one by its
    /// condition may answer before it has had the whole body, and close the connection: the answer is lost
    /// if the connection breaks while the body is sent. If nothing can have been written, the object tells
    /// whether the condition holds. `None` as the time: it completes an upload, and what that makes is
    /// dated back to when the upload was begun, so its age tells nothing.
    async fn not_written(
        &self,
        key: &str,
        headers: &HeaderMap,
        begun: Option<Instant>,
        e: Error,
    ) -> Error {
        let is_conditional = headers.contains_key(IF_MATCH) || headers.contains_key(IF_NONE_MATCH);
        let Some(broken) = Broken::of(&e).filter(|_| is_conditional) else {
            return e;
        };
        let now = match self.look(key).await {
            Ok((meta, age)) => {
                let is_older = age
                    .zip(begun)
                    .is_some_and(|(age, begun)| age >= begun.elapsed() + CLOCKS_APART_MAX);
                (broken.is_cut_short() || is_older).then_some(Some(meta))
            }
            Err(missing) if missing.kind() == ErrorKind::NotFound && broken.is_cut_short() => {
                Some(None)
            }
            Err(_) => None,
        };
        let Some(now) = now else {
            return e;
        };
        match unheld(headers, now.as_ref()) {
            Some((kind, why)) => {
                let what = self.site("write", key).prefix();
                Error::new(kind, format!("{what}: {why}"))
            }
            None => e,
        }
    }

    /// An object as it is now, and for how long it has been so, by the service's own clock.
    async fn look(&self, key: &str) -> Result<(ObjectMeta, Option<Duration>)> {
        let site = self.site("head", key);
        let answer = self.client.send(Call::new(Method::HEAD, site)).await?;
        let meta = headers::meta(self.client.dialect(), site, answer.headers())?;
        is_object(&meta, site)?;
        let date = answer.headers().get(DATE).and_then(|v| v.to_str().ok());
        let date = date.and_then(|d| chrono::DateTime::parse_from_rfc2822(d).ok());
        let age = date.filter(|_| meta.last_modified_ms > 0).and_then(|date| {
            let age_ms = date.timestamp_millis() - meta.last_modified_ms;
            Some(Duration::from_millis(u64::try_from(age_ms).ok()?))
        });
        Ok((meta, age))
    }

    /// Why an upload was not completed under a condition. S3 does not find the object of `If-Match`, nor
    /// an upload that has ended: if the object is there, it is the upload.
    async fn not_completed(&self, key: &str, e: Error, condition: &PutCondition) -> Error {
        let is_missing =
            e.kind() == ErrorKind::NotFound && matches!(condition, PutCondition::IfMatch(_));
        if is_missing && self.head(key).await.is_ok() {
            return e;
        }
        unmet(e, condition)
    }

    /// Refuses the completion of an upload under a condition where the service would ignore it.
    fn can_complete_under(&self, condition: &PutCondition) -> Result<()> {
        if *condition != PutCondition::Always && self.client.dialect() == Dialect::Google {
            return Err(Error::unsupported(format!(
                "{} cannot upload in parts with a condition",
                self.description
            ))
            .hint(format!(
                "write it in one request, of at most {} MiB",
                SIGNED_BODY_MAX_BYTES >> 20
            )));
        }
        Ok(())
    }
}

/// The error of a range that begins at the end of an object or past it.
pub(crate) fn past_the_end(key: &str, size: u64, start: u64) -> Error {
    Error::range_not_satisfiable(format!(
        "{key:?} has {}, none from byte {start} on",
        count(size, "byte")
    ))
}

/// S3 answers 404 to `If-Match` on an object that does not exist, and 409 when two conditional
/// writes collide.
pub(crate) fn unmet(e: Error, condition: &PutCondition) -> Error {
    match (condition, e.kind()) {
        (PutCondition::IfMatch(_), ErrorKind::NotFound) => {
            e.with_kind(ErrorKind::PreconditionFailed)
        }
        (
            PutCondition::IfMatch(_) | PutCondition::IfAbsent,
            ErrorKind::Conflict | ErrorKind::NotModified,
        ) => e.with_kind(ErrorKind::PreconditionFailed),
        _ => e,
    }
}

/// Which condition of a write does not hold for what is there now, in the words of S3: it does not find
/// the object that `If-Match` asks for.
fn unheld(headers: &HeaderMap, now: Option<&ObjectMeta>) -> Option<(ErrorKind, &'static str)> {
    let names = |name: HeaderName, etag: Option<&str>| {
        let bare = |tag: &str| {
            tag.trim()
                .trim_start_matches("W/")
                .trim_matches('"')
                .to_owned()
        };
        let etag = etag.map(bare);
        let values = headers.get_all(name).iter();
        let mut tags = values
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .map(bare);
        tags.any(|tag| tag == "*" || Some(&tag) == etag.as_ref())
    };
    let must_match = headers.contains_key(IF_MATCH);
    match now {
        None => must_match.then_some((ErrorKind::NotFound, "the object does not exist")),
        Some(now) => {
            let etag = now.etag.as_deref();
            let is_other = must_match && !names(IF_MATCH, etag);
            let told = match (is_other, names(IF_NONE_MATCH, etag)) {
                (true, _) => "the object has another version",
                (_, true) => "the object is there",
                _ => return None,
            };
            Some((ErrorKind::PreconditionFailed, told))
        }
    }
}

/// Every object has a version. An answer without one is a proxy's page, or an error document with
/// status 200: its bytes do not belong to any object.
fn is_object(meta: &ObjectMeta, site: Site<'_>) -> Result<()> {
    if meta.etag.is_none() && meta.last_modified_ms == 0 {
        let what = format!(
            "{} {:?} at {}: the answer has neither ETag nor Last-Modified",
            site.operation, site.key, site.origin
        );
        return Err(Error::origin_unavailable(what)
            .hint("this is not the object: check the endpoint, and any proxy in front of it"));
    }
    Ok(())
}

/// Checks the conditions again on the answer: for services and proxies that ignore them.
pub(crate) fn get_checks(meta: &ObjectMeta, request: &GetRequest, key: &str) -> Result<()> {
    let current = meta.etag.as_deref().unwrap_or_default();
    if request
        .if_match
        .as_ref()
        .is_some_and(|wanted| wanted != current && wanted != "*")
    {
        return Err(Error::new(
            ErrorKind::PreconditionFailed,
            format!("{key:?} has another version: {current}"),
        ));
    }
    if request
        .if_none_match
        .as_ref()
        .is_some_and(|known| known == current)
    {
        return Err(Error::new(
            ErrorKind::NotModified,
            format!("{key:?} is still {current}"),
        ));
    }
    Ok(())
}

/// The conditions of a read. Google's are on generations; the caller checks that a version is *not*
/// the current one.
pub(crate) fn conditions(dialect: Dialect, request: &GetRequest) -> Result<HeaderMap> {
    let mut h = HeaderMap::new();
    if dialect == Dialect::Google {
        if let Some(etag) = &request.if_match {
            h.insert(
                google::GENERATION_MATCH,
                headers::value("If-Match", google::generation(etag)?)?,
            );
        }
        // Otherwise objects stored as gzip would be unpacked on the way.
        h.insert(
            http::header::ACCEPT_ENCODING,
            HeaderValue::from_static("gzip"),
        );
        return Ok(h);
    }
    if let Some(etag) = &request.if_match {
        h.insert(IF_MATCH, headers::value("If-Match", etag)?);
    }
    if let Some(etag) = &request.if_none_match {
        h.insert(IF_NONE_MATCH, headers::value("If-None-Match", etag)?);
    }
    Ok(h)
}

#[async_trait]
impl Origin for S3Origin {
    fn describe(&self) -> String {
        self.description.clone()
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        Ok(self.look(key).await?.0)
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        let site = self.site("get", key);
        let mut h = conditions(self.client.dialect(), &request)?;
        if self.client.dialect() == Dialect::Google && request.if_none_match.is_some() {
            get_checks(&self.head(key).await?, &request, key)?;
        }
        if let Some(range) = &request.range {
            if range.start >= range.end {
                return self.get_nothing(key, &request, range.start).await;
            }
            h.insert(RANGE, headers::range(range));
        }
        let answer = match self
            .client
            .send(Call::new(Method::GET, site).headers(h))
            .await
        {
            Err(e)
                if e.kind() == ErrorKind::RangeNotSatisfiable
                    && request.range.as_ref().is_some_and(|r| r.start == 0) =>
            {
                return self.get_nothing(key, &request, 0).await;
            }
            other => other?,
        };
        let (meta, range) = headers::meta_and_range(
            self.client.dialect(),
            site,
            answer.status(),
            answer.headers(),
        )?;
        is_object(&meta, site)?;
        get_checks(&meta, &request, key)?;
        match &request.range {
            // Some services send the whole object if the number is larger than they can read.
            Some(asked) if asked.start > 0 && asked.start >= meta.size => {
                return Err(past_the_end(key, meta.size, asked.start));
            }
            // Some services answer 200 to a range that covers the object.
            Some(asked) if range.start != asked.start || range.end > asked.end => {
                return Err(Error::corrupt(format!(
                    "get {key:?} at {}: asked for bytes {asked:?}, got {range:?}",
                    self.description
                ))
                .hint("the origin, or a proxy in front of it, does not handle ranges correctly"));
            }
            _ => {}
        }
        let length = range.end - range.start;
        let what = format!("get {key:?} at {}", self.description);
        Ok(GetResponse {
            meta,
            age_secs: Some(0),
            range,
            body: exact(body_of(site, answer), length, what),
        })
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        if self.client.dialect() == Dialect::Google {
            return self.google_list(request).await;
        }
        let site = Site {
            origin: &self.description,
            operation: "list",
            key: "",
        };
        let mut call = Call::new(Method::GET, site)
            .query("list-type", "2")
            .query("encoding-type", "url")
            .query(
                "max-keys",
                request
                    .max_keys
                    .clamp(1, limits::LIST_PAGE_MAX_KEYS)
                    .to_string(),
            );
        if !request.prefix.is_empty() {
            call = call.query("prefix", request.prefix);
        }
        if let Some(delimiter) = request.delimiter {
            call = call.query("delimiter", delimiter);
        }
        match (request.token, request.start_after) {
            (Some(token), _) => call = call.query("continuation-token", token),
            (None, Some(after)) => call = call.query("start-after", after),
            (None, None) => {}
        }
        let answer = self.client.send(call).await?;
        xml::parse_list(&self.document(site, answer).await?)
            .map_err(|e| e.context(format_args!("list at {}", self.description)))
    }

    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        match size {
            Some(n) if n <= SIGNED_BODY_MAX_BYTES => {
                let what = format!("the body of put {key:?}");
                let bytes = body::collect(exact(body, n, what), n).await?;
                self.put_one(key, &request, bytes).await
            }
            _ if self.client.dialect() == Dialect::Google => {
                self.google_stream(key, &request, size, body).await
            }
            _ => Err(body::needs_parts(key, SIGNED_BODY_MAX_BYTES)),
        }
    }

    async fn delete(&self, key: &str) -> Result<()> {
        match self
            .client
            .send(Call::new(Method::DELETE, self.site("delete", key)))
            .await
        {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            other => other.map(drop),
        }
    }

    async fn copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        request: PutRequest,
    ) -> Result<PutResponse> {
        if request.condition != PutCondition::Always {
            return Err(Error::unsupported(format!(
                "{} cannot copy with a condition",
                self.description
            ))
            .hint("read the object and write it with the condition"));
        }
        if self.client.dialect() == Dialect::Google {
            return self.google_copy(from, if_match, to, &request).await;
        }
        let site = self.site("copy", to);
        let mut h = headers::attributes(self.client.dialect(), &request.attributes)?;
        h.insert(
            "x-amz-copy-source",
            headers::value("x-amz-copy-source", &self.client.copy_source(from))?,
        );
        if let Some(etag) = if_match {
            h.insert(
                "x-amz-copy-source-if-match",
                headers::value("x-amz-copy-source-if-match", etag)?,
            );
        }
        if request.attributes != Default::default() {
            h.insert(
                "x-amz-metadata-directive",
                HeaderValue::from_static("REPLACE"),
            );
        }
        let answer = match self
            .client
            .send(Call::new(Method::PUT, site).headers(h))
            .await
        {
            // S3 refuses to copy more than this in one request, with a general "bad request".
            Err(e)
                if e.kind() == ErrorKind::Invalid
                    && self.head(from).await?.size > limits::PUT_OBJECT_MAX_BYTES =>
            {
                return Err(e.with_kind(ErrorKind::Unsupported));
            }
            other => other?,
        };
        let text = self.document(site, answer).await?;
        Ok(PutResponse {
            etag: xml::field(&text, "CopyObjectResult", "ETag")
                .map_err(|e| e.context(format_args!("copy {to:?}")))?,
        })
    }

    fn s3(&self) -> Option<S3Place> {
        // Google's XML API has different headers and documents.
        (self.client.dialect() == Dialect::Amazon).then(|| S3Place {
            service: self.client.service_id(),
            bucket: self.client.bucket().to_owned(),
            prefix: String::new(),
            region: self.client.region().to_owned(),
        })
    }

    async fn forward(&self, request: ForwardRequest) -> Result<ForwardResponse> {
        if self.client.dialect() != Dialect::Amazon {
            return Err(Error::unsupported(format!(
                "{} is not a bucket of an S3 service",
                self.description
            )));
        }
        let ForwardRequest {
            method,
            key,
            query,
            headers,
            body,
        } = request;
        let operation = format!("forward {method}");
        let site = self.site(&operation, &key);
        // What is signed is text.
        let is_text = |v: &HeaderValue| std::str::from_utf8(v.as_bytes()).is_ok();
        if let Some((name, _)) = headers.iter().find(|(_, v)| !is_text(v)) {
            let e = Error::invalid(format!("{}: the header {name} is not UTF-8", site.prefix()));
            return Err(e.hint("send text of other languages as UTF-8"));
        }
        // Writes of objects: the other requests have no such conditions.
        let is_write = match method {
            Method::PUT => query.is_empty(),
            Method::POST => query.iter().any(|(name, _)| name == "uploadId"),
            _ => false,
        };
        let begun = (method == Method::PUT).then(Instant::now);
        let asked = is_write.then(|| (headers.clone(), begun));
        let mut headers = headers;
        let payload = match body {
            ForwardBody::Empty => Payload::Empty,
            ForwardBody::Bytes(bytes) => Payload::Bytes(bytes),
            ForwardBody::Stream(length, body, trailer) => {
                let body = exact(body, length, format!("the body for {key:?}"));
                match trailer {
                    None => Payload::Stream(length, body),
                    Some(trailer) => {
                        let framed = trailed::announce(&mut headers, length, &trailer)?;
                        Payload::Framed(framed, trailed::framed(body, length, trailer))
                    }
                }
            }
        };
        let mut call = Call::new(method, site).headers(headers).payload(payload);
        for (name, value) in query {
            call = call.query(name, value);
        }
        let answer = match (self.client.send_as_is(call).await, asked) {
            (Err(e), Some((asked, begun))) => {
                return Err(self.not_written(&key, &asked, begun, e).await);
            }
            (answer, _) => answer?,
        };
        Ok(match answer {
            Answer::Refusal(status, headers, text) => ForwardResponse {
                status,
                headers,
                body: body::from_bytes(Bytes::from(text)),
            },
            Answer::Success(answer) => ForwardResponse {
                status: answer.status(),
                headers: answer.headers().clone(),
                body: self
                    .client
                    .transport()
                    .unstalled(site, body_of(site, answer)),
            },
        })
    }

    async fn create_upload(&self, key: &str, request: PutRequest) -> Result<String> {
        self.can_complete_under(&request.condition)?;
        let site = self.site("create an upload of", key);
        let call = Call::new(Method::POST, site)
            .query("uploads", "")
            .headers(headers::attributes(
                self.client.dialect(),
                &request.attributes,
            )?);
        let answer = self.client.send(call).await?;
        let text = self.document(site, answer).await?;
        let id = xml::field(&text, "InitiateMultipartUploadResult", "UploadId")?
            .filter(|id| !id.is_empty())
            .ok_or_else(|| {
                Error::corrupt(format!(
                    "create an upload at {}: the answer has no id",
                    self.description
                ))
            })?;
        Ok(match request.condition {
            PutCondition::Always => id,
            PutCondition::IfAbsent => format!("fb-absent.{id}"),
            PutCondition::IfMatch(etag) => {
                format!("fb-match.{}.{id}", URL_SAFE_NO_PAD.encode(etag))
            }
        })
    }

    async fn upload_part(
        &self,
        key: &str,
        upload: &str,
        number: u32,
        size: u64,
        body: ByteStream,
    ) -> Result<UploadedPart> {
        let site = self.site("upload a part of", key);
        let body = exact(body, size, format!("part {number} of {key:?}"));
        let payload = if size <= SIGNED_BODY_MAX_BYTES {
            Payload::Bytes(body::collect(body, size).await?)
        } else {
            Payload::Stream(size, body)
        };
        let (_, id) = split_upload(upload)?;
        let call = Call::new(Method::PUT, site)
            .query("partNumber", number.to_string())
            .query("uploadId", id)
            .payload(payload);
        let answer = self.client.send(call).await?;
        let etag = headers::etag(Dialect::Amazon, answer.headers()).ok_or_else(|| {
            Error::corrupt(format!(
                "part {number} of {key:?} at {}: the answer has no ETag",
                self.description
            ))
        })?;
        Ok(UploadedPart {
            number,
            etag,
            size: Some(size),
        })
    }

    async fn list_parts(
        &self,
        key: &str,
        upload: &str,
        after: u32,
        max: usize,
    ) -> Result<PartsPage> {
        let (_, id) = split_upload(upload)?;
        let site = self.site("list the parts of an upload of", key);
        let mut call = Call::new(Method::GET, site)
            .query("max-parts", max.to_string())
            .query("uploadId", id);
        if after > 0 {
            call = call.query("part-number-marker", after.to_string());
        }
        let answer = self.client.send(call).await?;
        let page = xml::parse_parts(&self.document(site, answer).await?)
            .map_err(|e| e.context(format_args!("list parts at {}", self.description)))?;
        // For services that ignore where it begins, or how long it may be.
        let cut = PartsPage::of(page.parts, after, max);
        Ok(PartsPage {
            is_truncated: cut.is_truncated || page.is_truncated,
            ..cut
        })
    }

    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        let site = self.site("complete the upload of", key);
        let (created, id) = split_upload(upload)?;
        let condition = condition.or(created);
        self.can_complete_under(&condition)?;
        let mut h = HeaderMap::new();
        match &condition {
            PutCondition::Always => {}
            PutCondition::IfAbsent => drop(h.insert(IF_NONE_MATCH, HeaderValue::from_static("*"))),
            PutCondition::IfMatch(etag) => {
                drop(h.insert(IF_MATCH, headers::value("If-Match", etag)?))
            }
        }
        let body = Payload::Bytes(Bytes::from(xml::complete_body(&parts)));
        let call = Call::new(Method::POST, site)
            .query("uploadId", id)
            .headers(h.clone())
            .payload(body);
        let answer = match self.client.send(call).await {
            Ok(answer) => answer,
            Err(e) => {
                let e = self.not_written(key, &h, None, e).await;
                return Err(self.not_completed(key, e, &condition).await);
            }
        };
        let generation = (self.client.dialect() == Dialect::Google)
            .then(|| headers::etag(Dialect::Google, answer.headers()))
            .flatten();
        let text = self.document(site, answer).await?;
        let etag = match xml::field(&text, "CompleteMultipartUploadResult", "ETag") {
            Ok(etag) => etag,
            Err(e) => {
                let e = e.context(format_args!("complete {key:?}"));
                return Err(self.not_completed(key, e, &condition).await);
            }
        };
        Ok(PutResponse {
            etag: generation.or(etag),
        })
    }

    async fn abort_upload(&self, key: &str, upload: &str) -> Result<()> {
        let (_, id) = split_upload(upload)?;
        let call =
            Call::new(Method::DELETE, self.site("abort the upload of", key)).query("uploadId", id);
        match self.client.send(call).await {
            // Already aborted or completed: nothing is left to remove.
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            other => other.map(drop),
        }
    }
}

fn split_upload(upload: &str) -> Result<(PutCondition, &str)> {
    if let Some(id) = upload.strip_prefix("fb-absent.") {
        return Ok((PutCondition::IfAbsent, id));
    }
    if let Some((etag, id)) = upload
        .strip_prefix("fb-match.")
        .and_then(|rest| rest.split_once('.'))
    {
        let etag = URL_SAFE_NO_PAD
            .decode(etag)
            .ok()
            .and_then(|e| String::from_utf8(e).ok());
        return match etag {
            Some(etag) => Ok((PutCondition::IfMatch(etag), id)),
            None => Err(Error::not_found(
                "this upload id does not come from this origin",
            )),
        };
    }
    Ok((PutCondition::Always, upload))
}

/// What a service offers besides its buckets' objects.
impl S3Endpoint {
    /// All buckets that the credentials may see.
    pub(crate) async fn list_buckets(&self) -> Result<Vec<ListedBucket>> {
        let description = self.describe();
        let site = Site {
            origin: &description,
            operation: "list the buckets",
            key: "",
        };
        let client = self.client(Address::Service)?;
        let answer = client.send(Call::new(Method::GET, site)).await?;
        if answer.status() != StatusCode::OK {
            return Err(Error::unsupported(format!(
                "listing the buckets of {description}"
            )));
        }
        let text = client
            .transport()
            .text(site, answer, DOCUMENT_MAX_BYTES)
            .await?;
        xml::parse_buckets(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upload_id_carries_its_condition() {
        assert_eq!(
            split_upload("abc.d").unwrap(),
            (PutCondition::Always, "abc.d")
        );
        assert_eq!(
            split_upload("fb-absent.abc").unwrap(),
            (PutCondition::IfAbsent, "abc")
        );
        let id = format!("fb-match.{}.a.b", URL_SAFE_NO_PAD.encode("\"e.1\""));
        assert_eq!(
            split_upload(&id).unwrap(),
            (PutCondition::IfMatch("\"e.1\"".into()), "a.b")
        );
        let unknown = split_upload("fb-match.!!.x").unwrap_err();
        assert_eq!(unknown.kind(), ErrorKind::NotFound);
    }
}
