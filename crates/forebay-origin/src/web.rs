//! A plain web server as a read-only bucket: GET, HEAD, ranges; listings if the server speaks
//! WebDAV (PROPFIND).
//!
//! Servers that ignore ranges are tolerated if little has to be skipped. Redirects are followed;
//! one that ends at a directory is not an object. Versions are ETags, or size and modification time
//! if there are none; a weak ETag is compared here, because `If-Match` never holds for it.

use crate::{
    ByteStream, GetRequest, GetResponse, ListPage, ListRequest, OriginConfig,
    body::{self, exact},
    failure::{self, Site},
    read_only::ReadOnly,
    s3::{
        get_checks,
        headers::{self, Dialect},
        past_the_end, xml,
    },
    transport::{Payload, Redirects, Transport, body_of},
    walked::{self, Directories, Named},
};
use async_trait::async_trait;
use forebay_core::{Error, ErrorKind, ObjectMeta, Result};
use futures::{StreamExt, stream};
use http::{
    HeaderMap, HeaderValue, Method,
    header::{ACCEPT_ENCODING, AUTHORIZATION, IF_MATCH, IF_NONE_MATCH, RANGE},
};
use std::{ops::Range, sync::Arc};
use url::Url;

/// The most that is discarded of an answer to reach the start of a range.
const SKIP_MAX_BYTES: u64 = 8 << 20;
const DOCUMENT_MAX_BYTES: u64 = 64 << 20;

/// A web server's directory.
pub struct WebOrigin {
    transport: Transport,
    base: Url,
    authorization: Option<HeaderValue>,
    description: String,
}

impl WebOrigin {
    pub(crate) fn new(config: &OriginConfig, base: Url) -> Result<Self> {
        let transport = Transport::new(config, &base, Redirects::Follow)?;
        let authorization = match &config.bearer_token {
            None => None,
            Some(token) => {
                let mut value =
                    headers::value("bearer_token", &format!("Bearer {}", token.reveal()))?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        Ok(Self {
            transport,
            description: base.to_string(),
            base,
            authorization,
        })
    }

    fn site<'a>(&'a self, operation: &'a str, key: &'a str) -> Site<'a> {
        Site {
            origin: &self.description,
            operation,
            key,
        }
    }

    fn url(&self, key: &str) -> Result<Url> {
        if key.split('/').any(|part| part == "." || part == "..") {
            return Err(Error::invalid(format!(
                "{key:?} cannot be requested: a part of it is '.' or '..'"
            )));
        }
        Url::parse(&format!("{}{}", self.base, headers::encode_path(key)))
            .map_err(|e| Error::invalid(format!("{key:?} cannot be put into an address: {e}")))
    }

    async fn send(
        &self,
        site: Site<'_>,
        method: Method,
        mut h: HeaderMap,
    ) -> Result<reqwest::Response> {
        if let Some(value) = &self.authorization {
            h.insert(AUTHORIZATION, value.clone());
        }
        h.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let answer = self
            .transport
            .send(site, method.clone(), self.url(site.key)?, h, Payload::Empty)
            .await?;
        // The server redirected us to a directory, whose contents it may not show.
        if answer.url().path().ends_with('/') && !site.key.is_empty() && !site.key.ends_with('/') {
            return Err(Error::not_found(format!(
                "{} {:?} at {}: it is a directory",
                site.operation, site.key, site.origin
            )));
        }
        let status = answer.status();
        if !status.is_success() {
            let headers = answer.headers().clone();
            let text = self.transport.error_text(answer).await;
            return Err(failure::from_status(site, status, &headers, &text));
        }
        Ok(answer)
    }

    async fn get_nothing(
        &self,
        key: &str,
        request: &GetRequest,
        start: u64,
    ) -> Result<GetResponse> {
        let meta = self.head(key).await?;
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
}

/// `body` from `skip` on, at most `length` bytes of it.
fn cut(body: ByteStream, skip: u64, length: u64) -> ByteStream {
    stream::unfold(
        (body, skip, length),
        |(mut body, mut skip, length)| async move {
            if length == 0 {
                return None;
            }
            loop {
                match body.next().await? {
                    Ok(bytes) => {
                        let drop = skip.min(bytes.len() as u64);
                        skip -= drop;
                        let rest = bytes.slice(drop as usize..);
                        let take = (rest.len() as u64).min(length);
                        if take > 0 {
                            return Some((
                                Ok(rest.slice(..take as usize)),
                                (body, skip, length - take),
                            ));
                        }
                    }
                    Err(e) => return Some((Err(e), (body, skip, 0))),
                }
            }
        },
    )
    .boxed()
}

/// The part of an object that was asked for, of an answer with the bytes `sent` of it.
pub(crate) fn delivered(
    site: Site<'_>,
    request: &GetRequest,
    meta: ObjectMeta,
    sent: Range<u64>,
    answer: reqwest::Response,
) -> Result<GetResponse> {
    let (key, origin) = (site.key, site.origin);
    get_checks(&meta, request, key)?;
    let range = match &request.range {
        None => 0..meta.size,
        Some(asked) if asked.start >= meta.size && asked.start > 0 => {
            return Err(past_the_end(key, meta.size, asked.start));
        }
        Some(asked) => asked.start..asked.end.min(meta.size),
    };
    if sent.start > range.start || sent.end < range.end {
        return Err(Error::corrupt(format!(
            "get {key:?} at {origin}: asked for bytes {range:?}, got {sent:?}"
        )));
    }
    let skip = range.start - sent.start;
    if skip > SKIP_MAX_BYTES {
        return Err(Error::unsupported(format!(
            "{origin} ignores ranges, and {skip} bytes of {key:?} would have to be skipped"
        ))
        .hint("serve the files with a web server that answers ranges"));
    }
    let length = range.end - range.start;
    let what = format!("get {key:?} at {origin}");
    let body = body_of(site, answer);
    let body = if sent == range {
        body
    } else {
        cut(body, skip, length)
    };
    Ok(GetResponse {
        meta,
        age_secs: Some(0),
        range,
        body: exact(body, length, what),
    })
}

#[async_trait]
impl Directories for WebOrigin {
    async fn directory(&self, dir: &str) -> Result<Arc<Vec<Named>>> {
        let site = self.site("list", dir);
        let mut h = HeaderMap::new();
        h.insert("depth", HeaderValue::from_static("1"));
        let method = Method::from_bytes(b"PROPFIND").expect("a token");
        let answer = self
            .send(site, method, h)
            .await
            .map_err(|e| match e.kind() {
                ErrorKind::Unsupported | ErrorKind::Invalid => Error::unsupported(format!(
                    "{} cannot be listed: it does not know PROPFIND",
                    self.description
                ))
                .hint("objects can be read by name; for listings the server needs WebDAV"),
                _ => e,
            })?;
        if answer.status().as_u16() != 207 {
            return Err(Error::unsupported(format!(
                "{} cannot be listed: it answers PROPFIND with {}",
                self.description,
                answer.status()
            ))
            .hint("objects can be read by name; for listings the server needs WebDAV"));
        }
        let own = answer.url().path().to_owned();
        let text = self
            .transport
            .text(site, answer, DOCUMENT_MAX_BYTES)
            .await?;
        let mut entries = xml::parse_dav(&text, &own)
            .map_err(|e| e.context(format_args!("list {dir:?} at {}", self.description)))?;
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Arc::new(entries))
    }
}

#[async_trait]
impl ReadOnly for WebOrigin {
    fn describe(&self) -> String {
        self.description.clone()
    }

    fn why(&self) -> &'static str {
        "a plain web server is read-only"
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        let site = self.site("head", key);
        let answer = self.send(site, Method::HEAD, HeaderMap::new()).await?;
        headers::meta(Dialect::Web, site, answer.headers())
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        let site = self.site("get", key);
        let mut h = HeaderMap::new();
        if let Some(etag) = request.if_match.as_ref().filter(|e| !e.starts_with("W/")) {
            h.insert(IF_MATCH, headers::value("If-Match", etag)?);
        }
        if let Some(etag) = &request.if_none_match {
            h.insert(IF_NONE_MATCH, headers::value("If-None-Match", etag)?);
        }
        if let Some(range) = &request.range {
            if range.start >= range.end {
                return self.get_nothing(key, &request, range.start).await;
            }
            h.insert(RANGE, headers::range(range));
        }
        let answer = match self.send(site, Method::GET, h).await {
            Err(e)
                if e.kind() == ErrorKind::RangeNotSatisfiable
                    && request.range.as_ref().is_some_and(|r| r.start == 0) =>
            {
                return self.get_nothing(key, &request, 0).await;
            }
            other => other?,
        };
        let (meta, sent) =
            headers::meta_and_range(Dialect::Web, site, answer.status(), answer.headers())?;
        delivered(site, &request, meta, sent, answer)
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        walked::list(self, request).await
    }
}
