//! What Google Cloud Storage does through its JSON API instead of S3's: small writes, listings,
//! copies. (Reads and multipart uploads use the XML API.)
//!
//! The ETag of an object is its generation, in quotes: the number that Google's conditions refer
//! to. It is the same in both APIs, unlike the ETags that they return.

use super::{
    DOCUMENT_MAX_BYTES, S3Origin,
    client::{Call, Client},
};
use crate::{
    ByteStream, ListEntry, ListPage, ListRequest, PutCondition, PutRequest, PutResponse, assemble,
    body::exact, failure::Site, retry::Attempts, transport::Payload,
};
use bytes::Bytes;
use forebay_core::{Attributes, Error, ErrorKind, Result, limits};
use futures::{StreamExt, stream};
use http::{
    HeaderMap, HeaderValue, Method, StatusCode,
    header::{CONTENT_RANGE, CONTENT_TYPE, LOCATION, RANGE},
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use std::sync::{Arc, atomic::Ordering::Relaxed};
use url::Url;

/// A multiple of 256 KiB, as Google asks.
pub(crate) const PIECE_BYTES: u64 = 8 << 20;

pub(super) const GENERATION: &str = "x-goog-generation";
pub(super) const GENERATION_MATCH: &str = "x-goog-if-generation-match";

/// The generation in one of our ETags. An ETag that was never ours matches no version.
pub(super) fn generation(etag: &str) -> Result<&str> {
    let inner = etag.trim_matches('"');
    if !inner.is_empty() && inner.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(inner);
    }
    Err(Error::new(
        ErrorKind::PreconditionFailed,
        format!("{etag} does not name a version of the object"),
    ))
}

fn etag_of(object: &Value) -> Option<String> {
    match &object["generation"] {
        Value::String(g) => Some(format!("\"{g}\"")),
        Value::Number(g) => Some(format!("\"{g}\"")),
        _ => None,
    }
}

fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

fn metadata(key: &str, a: &Attributes) -> Value {
    let mut v = json!({ "name": key });
    let standard = [
        ("contentType", &a.content_type),
        ("contentEncoding", &a.content_encoding),
        ("contentLanguage", &a.content_language),
        ("contentDisposition", &a.content_disposition),
        ("cacheControl", &a.cache_control),
        ("storageClass", &a.storage_class),
    ];
    for (name, text) in standard {
        if let Some(text) = text {
            v[name] = json!(text);
        }
    }
    if !a.user.is_empty() {
        v["metadata"] = a
            .user
            .iter()
            .map(|(k, t)| (k.clone(), json!(t)))
            .collect::<serde_json::Map<_, _>>()
            .into();
    }
    v
}

fn encoded(name: &str) -> String {
    utf8_percent_encode(name, NON_ALPHANUMERIC).to_string()
}

/// A resumable upload. If it is dropped before its end, a separate task cancels it: otherwise the
/// service would keep its data for a week.
struct Session {
    client: Arc<Client>,
    description: String,
    key: String,
    address: Url,
    open: bool,
}

/// The service's answer to a piece.
enum Progress {
    /// The object was made.
    Done(PutResponse),
    /// This many bytes from the beginning are there.
    Kept(u64),
}

impl Session {
    /// Sends the bytes from position `at`; `total` comes with the last ones.
    async fn send(&self, at: u64, piece: Bytes, total: Option<u64>) -> Result<Progress> {
        let range = match (piece.len() as u64, total) {
            (0, Some(total)) => format!("bytes */{total}"),
            (n, Some(total)) => format!("bytes {at}-{}/{total}", at + n - 1),
            (n, None) => format!("bytes {at}-{}/*", at + n - 1),
        };
        let payload = if piece.is_empty() {
            Payload::Empty
        } else {
            Payload::Bytes(piece)
        };
        self.put(range, payload).await
    }

    /// Asks how much has arrived.
    async fn ask(&self, total: Option<u64>) -> Result<Progress> {
        let total = total.map_or("*".to_owned(), |n| n.to_string());
        self.put(format!("bytes */{total}"), Payload::Empty).await
    }

    async fn put(&self, range: String, payload: Payload) -> Result<Progress> {
        let site = self.site("put");
        let mut headers = HeaderMap::new();
        headers.insert(
            CONTENT_RANGE,
            HeaderValue::from_str(&range).expect("digits and signs"),
        );
        let answer = self
            .client
            .send_to(site, Method::PUT, &self.address, headers, payload)
            .await
            .map_err(|e| match e.kind() {
                // What is missing is the session.
                ErrorKind::NotFound => Error::corrupt(format!(
                    "put {:?} at {}: the upload is gone before its end",
                    self.key, self.description
                ))
                .caused_by(e),
                _ => e,
            })?;
        if answer.status() == StatusCode::PERMANENT_REDIRECT {
            // Without a range, nothing has arrived yet.
            let last = answer
                .headers()
                .get(RANGE)
                .and_then(|v| v.to_str().ok())
                .and_then(|v| v.rsplit('-').next()?.parse::<u64>().ok());
            return Ok(Progress::Kept(last.map_or(0, |last| last + 1)));
        }
        let text = self
            .client
            .transport()
            .text(site, answer, DOCUMENT_MAX_BYTES)
            .await?;
        let object: Value = serde_json::from_str(&text).map_err(|e| {
            Error::corrupt(format!(
                "put {:?} at {}: the answer is not JSON: {e}",
                self.key, self.description
            ))
        })?;
        Ok(Progress::Done(PutResponse {
            etag: etag_of(&object),
        }))
    }

    fn site<'a>(&'a self, operation: &'a str) -> Site<'a> {
        Site {
            origin: &self.description,
            operation,
            key: &self.key,
        }
    }

    async fn cancel(&self) {
        let (site, none) = (self.site("cancel the upload of"), HeaderMap::new());
        let delete = Method::DELETE;
        // Google answers 499 for a session that it has cancelled.
        if let Err(e) = self
            .client
            .send_to(site, delete, &self.address, none, Payload::Empty)
            .await
        {
            tracing::debug!(error = %e, "a session was cancelled, or will end by itself");
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        let taken = Session {
            client: self.client.clone(),
            description: std::mem::take(&mut self.description),
            key: std::mem::take(&mut self.key),
            address: self.address.clone(),
            open: false,
        };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { taken.cancel().await });
        }
    }
}

impl S3Origin {
    async fn json(&self, site: Site<'_>, call: Call<'_>) -> Result<Value> {
        let answer = self.client.send(call).await?;
        let text = self
            .client
            .transport()
            .text(site, answer, DOCUMENT_MAX_BYTES)
            .await?;
        serde_json::from_str(&text).map_err(|e| {
            Error::corrupt(format!(
                "{} at {}: the answer is not JSON: {e}",
                site.operation, site.origin
            ))
        })
    }

    pub(super) async fn google_put(
        &self,
        key: &str,
        request: &PutRequest,
        content: Bytes,
    ) -> Result<PutResponse> {
        let site = self.site("put", key);
        let boundary = format!("forebay-{:032x}", rand::random::<u128>());
        let kind = request
            .attributes
            .content_type
            .as_deref()
            .unwrap_or("application/octet-stream");
        // It becomes a line of a header.
        super::headers::value("Content-Type", kind)?;
        let head = metadata(key, &request.attributes);
        let before = format!(
            "--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{head}\r\n\
             --{boundary}\r\nContent-Type: {kind}\r\n\r\n"
        );
        let after = format!("\r\n--{boundary}--\r\n");
        // In pieces: a body in one would be a copy of the content, which may have 8 MiB.
        let body = [before.into(), content, after.into()];
        let length = body.iter().map(|piece: &Bytes| piece.len() as u64).sum();
        let body = stream::iter(body.map(Ok)).boxed();
        let mut headers = HeaderMap::new();
        let related = HeaderValue::from_str(&format!("multipart/related; boundary={boundary}"))
            .expect("letters and digits");
        headers.insert(CONTENT_TYPE, related);
        let mut call = Call::new(Method::POST, site)
            .path(format!(
                "upload/storage/v1/b/{}/o",
                encoded(self.client.bucket())
            ))
            .query("uploadType", "multipart")
            .headers(headers)
            .payload(Payload::Stream(length, body));
        match &request.condition {
            PutCondition::Always => {}
            PutCondition::IfAbsent => call = call.query("ifGenerationMatch", "0"),
            PutCondition::IfMatch(etag) => {
                call = call.query("ifGenerationMatch", generation(etag)?)
            }
        }
        let object = self
            .json(site, call)
            .await
            .map_err(|e| super::unmet(e, &request.condition))?;
        Ok(PutResponse {
            etag: etag_of(&object),
        })
    }

    /// A body of unknown length, or one that is not held in memory: a resumable upload, which makes
    /// the object when its last piece has arrived.
    pub(super) async fn google_stream(
        &self,
        key: &str,
        request: &PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        let site = self.site("put", key);
        let mut headers = HeaderMap::new();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/json; charset=UTF-8"),
        );
        if let Some(kind) = &request.attributes.content_type {
            headers.insert(
                "x-upload-content-type",
                super::headers::value("Content-Type", kind)?,
            );
        }
        let mut call = Call::new(Method::POST, site)
            .path(format!(
                "upload/storage/v1/b/{}/o",
                encoded(self.client.bucket())
            ))
            .query("uploadType", "resumable")
            .query("name", key)
            .headers(headers)
            .payload(Payload::Bytes(
                metadata(key, &request.attributes).to_string().into(),
            ));
        match &request.condition {
            PutCondition::Always => {}
            PutCondition::IfAbsent => call = call.query("ifGenerationMatch", "0"),
            PutCondition::IfMatch(etag) => {
                call = call.query("ifGenerationMatch", generation(etag)?)
            }
        }
        let answer = self
            .client
            .send(call)
            .await
            .map_err(|e| super::unmet(e, &request.condition))?;
        let session = answer
            .headers()
            .get(LOCATION)
            .and_then(|v| v.to_str().ok())
            .and_then(|v| Url::parse(v).ok());
        let session = session.ok_or_else(|| {
            Error::corrupt(format!(
                "put {key:?} at {}: the answer has no address to upload to",
                site.origin
            ))
        })?;
        let mut session = Session {
            client: self.client.clone(),
            description: self.description.clone(),
            key: key.to_owned(),
            address: session,
            open: true,
        };
        match self.google_pieces(&session, size, body).await {
            Ok(done) => {
                session.open = false;
                Ok(done)
            }
            Err(e) => {
                session.cancel().await;
                session.open = false;
                Err(super::unmet(e, &request.condition))
            }
        }
    }

    /// Sends a body in pieces, each again from where the service has kept it, until the service has
    /// all of it.
    async fn google_pieces(
        &self,
        session: &Session,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        let (policy, counters) = &self.retry;
        let mut body = match size {
            Some(n) => exact(body, n, format!("the body of put {:?}", session.key)),
            None => body.fuse().boxed(),
        };
        let mut left_over = Bytes::new();
        // How many bytes the service has kept; those of `piece` begin there.
        let mut kept = 0u64;
        loop {
            let mut piece = assemble::next_part(&mut body, &mut left_over, PIECE_BYTES).await?;
            let total = ((piece.len() as u64) < PIECE_BYTES).then(|| kept + piece.len() as u64);
            let end = kept + piece.len() as u64;
            let mut attempts = Attempts::begin(policy);
            let mut answer = session.send(kept, piece.clone(), total).await;
            // Until all of the piece is known to be kept, or the object to be made.
            loop {
                let trouble = match answer {
                    Ok(Progress::Done(done)) => return Ok(done),
                    Ok(Progress::Kept(now)) if now == end && total.is_none() => {
                        kept = now;
                        break;
                    }
                    Ok(Progress::Kept(now)) if now > end || now < kept => {
                        return Err(Error::origin_unavailable(format!(
                            "put {:?} at {}: {now} bytes were kept, of {kept} that had been kept \
                             before and {end} sent",
                            session.key, session.description
                        )));
                    }
                    Ok(Progress::Kept(now)) => {
                        let short = Error::origin_unavailable(format!(
                            "put {:?} at {}: {now} of {end} bytes were kept",
                            session.key, session.description
                        ));
                        if now > kept {
                            piece = piece.slice((now - kept) as usize..);
                            kept = now;
                            attempts = Attempts::begin(policy);
                        }
                        attempts.again(short).await?;
                        counters.retries.fetch_add(1, Relaxed);
                        answer = session.send(kept, piece.clone(), total).await;
                        continue;
                    }
                    Err(e) => e,
                };
                attempts.again(trouble).await?;
                counters.retries.fetch_add(1, Relaxed);
                answer = session.ask(total).await;
            }
        }
    }

    pub(super) async fn google_copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        request: &PutRequest,
    ) -> Result<PutResponse> {
        if request.attributes != Attributes::default() {
            return Err(Error::unsupported(format!(
                "{} cannot copy with other attributes",
                self.client.describe()
            ))
            .hint("read the object and write it with the attributes"));
        }
        let site = self.site("copy", to);
        let bucket = encoded(self.client.bucket());
        let path = format!(
            "storage/v1/b/{bucket}/o/{}/rewriteTo/b/{bucket}/o/{}",
            encoded(from),
            encoded(to)
        );
        let mut token: Option<String> = None;
        // A large object is rewritten in steps, each with the token of the previous one.
        for _ in 0..10_000 {
            let mut call = Call::new(Method::POST, site).path(path.clone());
            if let Some(etag) = if_match {
                call = call.query("ifSourceGenerationMatch", generation(etag)?);
            }
            if let Some(token) = &token {
                call = call.query("rewriteToken", token);
            }
            let answer = self.json(site, call).await?;
            if answer["done"].as_bool() == Some(true) {
                return Ok(PutResponse {
                    etag: etag_of(&answer["resource"]),
                });
            }
            token = answer["rewriteToken"].as_str().map(str::to_owned);
            if token.is_none() {
                break;
            }
        }
        Err(Error::origin_unavailable(format!(
            "copy {to:?} at {}: the copy does not finish",
            site.origin
        )))
    }

    pub(super) async fn google_list(&self, request: ListRequest) -> Result<ListPage> {
        let site = self.site("list", "");
        let mut call = Call::new(Method::GET, site)
            .path(format!("storage/v1/b/{}/o", encoded(self.client.bucket())))
            .query(
                "maxResults",
                request
                    .max_keys
                    .clamp(1, limits::LIST_PAGE_MAX_KEYS)
                    .to_string(),
            )
            .query(
                "fields",
                "items(name,size,generation,updated),prefixes,nextPageToken",
            );
        if !request.prefix.is_empty() {
            call = call.query("prefix", request.prefix);
        }
        if let Some(delimiter) = request.delimiter {
            call = call.query("delimiter", delimiter);
        }
        let after = request
            .start_after
            .filter(|a| !a.is_empty() && request.token.is_none());
        if let Some(token) = request.token {
            call = call.query("pageToken", token);
        } else if let Some(after) = &after {
            call = call.query("startOffset", after);
        }
        let answer = self.json(site, call).await?;
        // Google's offset includes the name itself.
        let later = |name: &str| after.as_deref().is_none_or(|a| name > a);
        let mut page = ListPage {
            next_token: answer["nextPageToken"]
                .as_str()
                .filter(|t| !t.is_empty())
                .map(str::to_owned),
            ..Default::default()
        };
        for item in answer["items"].as_array().into_iter().flatten() {
            let (Some(key), Some(size)) = (item["name"].as_str(), number(&item["size"])) else {
                return Err(Error::corrupt(format!(
                    "list at {}: an object without a name or size: {item}",
                    site.origin
                )));
            };
            if later(key) {
                let updated = item["updated"]
                    .as_str()
                    .and_then(|t| chrono::DateTime::parse_from_rfc3339(t).ok());
                let last_modified_ms = updated.map_or(0, |t| t.timestamp_millis());
                page.entries.push(ListEntry {
                    key: key.to_owned(),
                    size,
                    etag: etag_of(item),
                    last_modified_ms,
                });
            }
        }
        let prefixes = answer["prefixes"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str);
        page.prefixes = prefixes.filter(|p| later(p)).map(str::to_owned).collect();
        page.entries.sort_by(|a, b| a.key.cmp(&b.key));
        page.prefixes.sort();
        Ok(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags_are_generations() {
        assert_eq!(generation("\"17\"").unwrap(), "17");
        assert_eq!(
            generation("\"abc\"").unwrap_err().kind(),
            ErrorKind::PreconditionFailed
        );
        assert_eq!(
            etag_of(&json!({"generation": "5"})).as_deref(),
            Some("\"5\"")
        );
        assert_eq!(etag_of(&json!({"generation": 5})).as_deref(), Some("\"5\""));
    }
}
