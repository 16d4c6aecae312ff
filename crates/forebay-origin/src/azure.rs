//! Azure Blob Storage. Credentials and signatures come from `object_store`; the operations are
//! here, for the reasons given in the S3 origin.
//!
//! A multipart upload has no server-side state but its uncommitted blocks: its id holds the
//! attributes and the condition that its completion needs. Only this process remembers an aborted
//! upload; its blocks expire at the service after a week.

use crate::{
    ByteStream, GetRequest, GetResponse, ListEntry, ListPage, ListRequest, ListedPart, Origin,
    OriginConfig, PartsPage, PutCondition, PutRequest, PutResponse, UploadedPart,
    body::{self, exact},
    credentials,
    failure::{self, Site},
    s3::{
        conditions, get_checks,
        headers::{self, Dialect},
        past_the_end, unmet, xml,
    },
    transport::{Payload, Redirects, Transport, body_of},
};
use async_trait::async_trait;
use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use forebay_core::{Attributes, Error, ErrorKind, ObjectMeta, Result, limits, sync::Mutex};
use http::{
    HeaderMap, HeaderValue, Method,
    header::{CONTENT_LENGTH, IF_MATCH, IF_NONE_MATCH, RANGE},
};
use object_store::{
    azure::{AzureAuthorizer, AzureCredentialProvider},
    client::{HttpRequest, HttpRequestBody},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, VecDeque, btree_map::Entry},
    time::Duration,
};
use url::Url;

const BUFFERED_BODY_MAX_BYTES: u64 = 8 << 20;
const DOCUMENT_MAX_BYTES: u64 = 32 << 20;
/// Names requested at once, however few are wanted: pages that begin after a name are cut out of
/// these.
const LIST_CHUNK: usize = 1000;
/// Chunks that one page may skip to reach its first name.
const LIST_CHUNKS_MAX: usize = 1000;
const ABORTED_REMEMBERED: usize = 4096;
const COPY_TIMEOUT: Duration = Duration::from_secs(300);

/// One container.
pub struct AzureOrigin {
    transport: Transport,
    /// Without a trailing `/`.
    container_url: String,
    account: String,
    credentials: Option<AzureCredentialProvider>,
    description: String,
    aborted: Mutex<VecDeque<String>>,
}

/// The contents of an upload's id.
#[derive(Clone, Serialize, Deserialize)]
struct Upload {
    id: u64,
    attributes: Attributes,
    if_absent: bool,
    if_match: Option<String>,
}

/// Where a page begins: in the service's chunk at `marker`, after a name.
#[derive(Default, Serialize, Deserialize)]
struct Token {
    marker: Option<String>,
    after: Option<String>,
}

impl AzureOrigin {
    pub(crate) fn new(config: &OriginConfig, container: &str) -> Result<Self> {
        let account = config.account.clone().or_else(|| {
            std::env::var("AZURE_STORAGE_ACCOUNT_NAME")
                .ok()
                .filter(|a| !a.is_empty())
        });
        let account = account.ok_or_else(|| {
            Error::invalid(format!(
                "origin {}: no storage account is given",
                config.url
            ))
            .hint("set account, or AZURE_STORAGE_ACCOUNT_NAME")
        })?;
        let endpoint = config
            .endpoint
            .clone()
            .unwrap_or_else(|| format!("https://{account}.blob.core.windows.net"));
        let parsed = Url::parse(&endpoint).map_err(|e| {
            Error::invalid(format!("the endpoint {endpoint:?} is not an address: {e}"))
        })?;
        let transport = Transport::new(config, &parsed, Redirects::Refuse)?;
        let credentials = if config.anonymous {
            None
        } else {
            Some(credentials::azure(config, &account, container)?)
        };
        let container_url = format!("{}/{container}", endpoint.trim_end_matches('/'));
        let description = format!("az://{container} at {}", endpoint.trim_end_matches('/'));
        Ok(Self {
            transport,
            container_url,
            account,
            credentials,
            description,
            aborted: Mutex::default(),
        })
    }

    fn site<'a>(&'a self, operation: &'a str, key: &'a str) -> Site<'a> {
        Site {
            origin: &self.description,
            operation,
            key,
        }
    }

    fn address(&self, key: &str) -> String {
        match key {
            "" => self.container_url.clone(),
            key => format!("{}/{}", self.container_url, headers::encode_path(key)),
        }
    }

    async fn send(
        &self,
        site: Site<'_>,
        method: Method,
        query: &[(&str, &str)],
        mut headers: HeaderMap,
        payload: Payload,
    ) -> Result<reqwest::Response> {
        let mut url = Url::parse(&self.address(site.key)).map_err(|e| {
            Error::invalid(format!("{:?} is not an address: {e}", self.container_url))
        })?;
        if site.key.split('/').any(|part| part == "." || part == "..") {
            return Err(Error::invalid(format!(
                "{:?} cannot be requested: a part of it is '.' or '..'",
                site.key
            )));
        }
        if site.key.contains('\\') {
            return Err(Error::unsupported(format!(
                "{:?}: Azure treats a backslash as a slash, so this key would name another object",
                site.key
            ))
            .hint("use a name without backslashes"));
        }
        if !query.is_empty() {
            url.set_query(Some(
                &query
                    .iter()
                    .map(|(k, v)| format!("{k}={}", headers::encode_query(v)))
                    .collect::<Vec<_>>()
                    .join("&"),
            ));
        }
        let length = match &payload {
            Payload::Empty => 0,
            Payload::Bytes(bytes) => bytes.len() as u64,
            Payload::Stream(length, _) | Payload::Framed(length, _) => *length,
        };
        if length > 0 || method == Method::PUT {
            headers.insert(CONTENT_LENGTH, length.into());
        }
        let (url, headers) = self.sign(site, &method, url, headers).await?;
        let answer = self
            .transport
            .send(site, method, url, headers, payload)
            .await?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let headers = answer.headers().clone();
        let text = self.transport.error_text(answer).await;
        Err(failure::from_status(site, status, &headers, &text))
    }

    async fn sign(
        &self,
        site: Site<'_>,
        method: &Method,
        url: Url,
        headers: HeaderMap,
    ) -> Result<(Url, HeaderMap)> {
        let Some(provider) = &self.credentials else {
            let mut headers = headers;
            headers.insert("x-ms-version", HeaderValue::from_static("2023-11-03"));
            return Ok((url, headers));
        };
        let credential = provider
            .get_credential()
            .await
            .map_err(|e| credentials::azure_unavailable(site, &e))?;
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = method.clone();
        *request.uri_mut() = url
            .as_str()
            .parse()
            .map_err(|e| Error::invalid(format!("{} {:?}: {e}", site.operation, site.key)))?;
        *request.headers_mut() = headers;
        AzureAuthorizer::new(&credential, &self.account)
            .try_authorize(&mut request)
            .map_err(|e| {
                Error::internal(format!(
                    "{} at {}: the request cannot be signed: {e}",
                    site.operation, site.origin
                ))
            })?;
        // The query may hold a shared access signature.
        let url = Url::parse(&request.uri().to_string())
            .map_err(|e| Error::internal(format!("a signed address: {e}")))?;
        Ok((url, std::mem::take(request.headers_mut())))
    }

    async fn head_as(&self, site: Site<'_>, headers: HeaderMap) -> Result<(ObjectMeta, HeaderMap)> {
        let answer = self
            .send(site, Method::HEAD, &[], headers, Payload::Empty)
            .await?;
        Ok((
            headers::meta(Dialect::Azure, site, answer.headers())?,
            answer.headers().clone(),
        ))
    }

    async fn get_nothing(
        &self,
        key: &str,
        request: &GetRequest,
        start: u64,
    ) -> Result<GetResponse> {
        let (meta, _) = self
            .head_as(self.site("get", key), conditions(Dialect::Azure, request)?)
            .await?;
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

    fn upload(&self, text: &str) -> Result<Upload> {
        let gone = || {
            Error::not_found("the upload does not exist").hint("it was aborted, or never started")
        };
        if self.aborted.lock().iter().any(|a| a == text) {
            return Err(gone());
        }
        URL_SAFE_NO_PAD
            .decode(text)
            .ok()
            .and_then(|json| serde_json::from_slice(&json).ok())
            .ok_or_else(gone)
    }

    async fn chunk(
        &self,
        request: &ListRequest,
        marker: Option<&str>,
    ) -> Result<(Vec<ListEntry>, Vec<String>, Option<String>)> {
        let site = self.site("list", "");
        let count = LIST_CHUNK.to_string();
        let mut query = vec![
            ("restype", "container"),
            ("comp", "list"),
            ("maxresults", count.as_str()),
        ];
        if !request.prefix.is_empty() {
            query.push(("prefix", &request.prefix));
        }
        if let Some(delimiter) = &request.delimiter {
            query.push(("delimiter", delimiter));
        }
        if let Some(marker) = marker {
            query.push(("marker", marker));
        }
        let answer = self
            .send(site, Method::GET, &query, HeaderMap::new(), Payload::Empty)
            .await?;
        let text = self
            .transport
            .text(site, answer, DOCUMENT_MAX_BYTES)
            .await?;
        xml::parse_azure_list(text.trim_start_matches('\u{feff}'))
            .map_err(|e| e.context(format_args!("list at {}", self.description)))
    }
}

/// What the ids of all blocks begin with that were uploaded as this part.
fn block_begin(upload: u64, number: u32) -> String {
    format!("{upload:016x}-{number:05}-")
}

/// The part that a block is, if it is one of this upload.
fn number_of_block(upload: u64, block: &str) -> Option<u32> {
    let id = String::from_utf8(STANDARD.decode(block).ok()?).ok()?;
    let rest = id.strip_prefix(&format!("{upload:016x}-"))?;
    rest.split_once('-')?.0.parse().ok()
}

fn condition_headers(condition: &PutCondition, h: &mut HeaderMap) -> Result<()> {
    match condition {
        PutCondition::Always => {}
        PutCondition::IfAbsent => drop(h.insert(IF_NONE_MATCH, HeaderValue::from_static("*"))),
        PutCondition::IfMatch(etag) => drop(h.insert(IF_MATCH, headers::value("If-Match", etag)?)),
    }
    Ok(())
}

#[async_trait]
impl Origin for AzureOrigin {
    fn describe(&self) -> String {
        self.description.clone()
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        Ok(self
            .head_as(self.site("head", key), HeaderMap::new())
            .await?
            .0)
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        let site = self.site("get", key);
        let mut h = conditions(Dialect::Azure, &request)?;
        if let Some(range) = &request.range {
            if range.start >= range.end {
                return self.get_nothing(key, &request, range.start).await;
            }
            h.insert(RANGE, headers::range(range));
        }
        let answer = match self.send(site, Method::GET, &[], h, Payload::Empty).await {
            Err(e)
                if e.kind() == ErrorKind::RangeNotSatisfiable
                    && request.range.as_ref().is_some_and(|r| r.start == 0) =>
            {
                return self.get_nothing(key, &request, 0).await;
            }
            other => other?,
        };
        let (meta, range) = match headers::meta_and_range(
            Dialect::Azure,
            site,
            answer.status(),
            answer.headers(),
        ) {
            Err(e)
                if e.kind() == ErrorKind::RangeNotSatisfiable
                    && request.range.as_ref().is_some_and(|r| r.start == 0) =>
            {
                return self.get_nothing(key, &request, 0).await;
            }
            other => other?,
        };
        get_checks(&meta, &request, key)?;
        // As S3 services do, it may send the whole object if the number is larger than it can read.
        if let Some(asked) = &request.range
            && asked.start > 0
            && asked.start >= meta.size
        {
            return Err(past_the_end(key, meta.size, asked.start));
        }
        if request
            .range
            .as_ref()
            .is_some_and(|asked| range.start != asked.start || range.end > asked.end)
        {
            return Err(Error::corrupt(format!(
                "get {key:?} at {}: asked for {:?}, got {range:?}",
                self.description, request.range
            )));
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
        let max = request.max_keys.clamp(1, limits::LIST_PAGE_MAX_KEYS);
        let mut token = match &request.token {
            None => Token {
                marker: None,
                after: request.start_after.clone(),
            },
            Some(text) => serde_json::from_str(text).map_err(|_| {
                Error::invalid("this continuation token does not come from this origin")
            })?,
        };
        for _ in 0..LIST_CHUNKS_MAX {
            let (entries, prefixes, next) = self.chunk(&request, token.marker.as_deref()).await?;
            let later = |name: &str| token.after.as_deref().is_none_or(|a| name > a);
            let mut names: Vec<(String, Option<ListEntry>)> = entries
                .into_iter()
                .map(|e| (e.key.clone(), Some(e)))
                .chain(prefixes.into_iter().map(|p| (p, None)))
                .filter(|(n, _)| later(n))
                .collect();
            names.sort_by(|a, b| a.0.cmp(&b.0));
            let more_here = names.len() > max;
            names.truncate(max);
            let following = match (more_here, next) {
                (true, _) => Some(Token {
                    marker: token.marker.clone(),
                    after: names.last().map(|n| n.0.clone()),
                }),
                // Names of later chunks are greater, except those of a first page that begins after
                // a name.
                (false, Some(next)) => Some(Token {
                    marker: Some(next),
                    after: token.after.clone(),
                }),
                (false, None) => None,
            };
            match following {
                Some(following) if names.is_empty() => token = following,
                following => {
                    let mut page = ListPage::default();
                    for (name, entry) in names {
                        match entry {
                            Some(entry) => page.entries.push(entry),
                            None => page.prefixes.push(name),
                        }
                    }
                    let text = following.map(|t| serde_json::to_string(&t)).transpose();
                    page.next_token =
                        text.map_err(|e| Error::internal(format!("a continuation token: {e}")))?;
                    return Ok(page);
                }
            }
        }
        Err(Error::unsupported(format!(
            "list at {}: more than {} names come before the first one that is wanted",
            self.description,
            LIST_CHUNKS_MAX * LIST_CHUNK
        ))
        .hint("give a longer prefix: Azure cannot start a listing at a given name"))
    }

    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        let Some(n) = size.filter(|n| *n <= BUFFERED_BODY_MAX_BYTES) else {
            return Err(body::needs_parts(key, BUFFERED_BODY_MAX_BYTES));
        };
        let content = body::collect(exact(body, n, format!("the body of put {key:?}")), n).await?;
        let mut h = headers::attributes(Dialect::Azure, &request.attributes)?;
        condition_headers(&request.condition, &mut h)?;
        h.insert("x-ms-blob-type", HeaderValue::from_static("BlockBlob"));
        let payload = if content.is_empty() {
            Payload::Empty
        } else {
            Payload::Bytes(content)
        };
        let answer = self
            .send(self.site("put", key), Method::PUT, &[], h, payload)
            .await
            .map_err(|e| unmet(e, &request.condition))?;
        Ok(PutResponse {
            etag: headers::etag(Dialect::Azure, answer.headers()),
        })
    }

    async fn delete(&self, key: &str) -> Result<()> {
        match self
            .send(
                self.site("delete", key),
                Method::DELETE,
                &[],
                HeaderMap::new(),
                Payload::Empty,
            )
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
        if request.condition != PutCondition::Always || request.attributes != Attributes::default()
        {
            return Err(Error::unsupported(format!(
                "{} cannot copy with a condition or with other attributes",
                self.description
            ))
            .hint("read the object and write it under the new name"));
        }
        let site = self.site("copy", to);
        let mut h = HeaderMap::new();
        h.insert(
            "x-ms-copy-source",
            headers::value("x-ms-copy-source", &self.address(from))?,
        );
        if let Some(etag) = if_match {
            h.insert(
                "x-ms-source-if-match",
                headers::value("x-ms-source-if-match", etag)?,
            );
        }
        let answer = self.send(site, Method::PUT, &[], h, Payload::Empty).await?;
        let mut status = answer.headers().clone();
        let begun = tokio::time::Instant::now();
        loop {
            match status
                .get("x-ms-copy-status")
                .and_then(|v| v.to_str().ok())
                .unwrap_or("success")
            {
                "success" => {
                    return Ok(PutResponse {
                        etag: headers::etag(Dialect::Azure, &status),
                    });
                }
                "pending" if begun.elapsed() < COPY_TIMEOUT => {
                    tokio::time::sleep(Duration::from_millis(300)).await;
                    status = self.head_as(site, HeaderMap::new()).await?.1;
                }
                other => {
                    return Err(Error::origin_unavailable(format!(
                        "copy {to:?} at {}: the status of the copy is {other}",
                        self.description
                    )));
                }
            }
        }
    }

    async fn create_upload(&self, _key: &str, request: PutRequest) -> Result<String> {
        headers::attributes(Dialect::Azure, &request.attributes)?;
        let (if_absent, if_match) = match request.condition {
            PutCondition::Always => (false, None),
            PutCondition::IfAbsent => (true, None),
            PutCondition::IfMatch(etag) => (false, Some(etag)),
        };
        let upload = Upload {
            id: rand::random(),
            attributes: request.attributes,
            if_absent,
            if_match,
        };
        let json = serde_json::to_vec(&upload)
            .map_err(|e| Error::internal(format!("an upload id: {e}")))?;
        Ok(URL_SAFE_NO_PAD.encode(json))
    }

    async fn upload_part(
        &self,
        key: &str,
        upload: &str,
        number: u32,
        size: u64,
        body: ByteStream,
    ) -> Result<UploadedPart> {
        let Upload { id, .. } = self.upload(upload)?;
        // All block ids of a blob have the same length; this one is new each time, so that a part
        // that is sent again has another ETag.
        let begin = block_begin(id, number);
        let block = STANDARD.encode(format!("{begin}{:016x}", rand::random::<u64>()));
        let body = exact(body, size, format!("part {number} of {key:?}"));
        let payload = match size {
            0 => {
                return Err(
                    Error::unsupported(format!("part {number} of {key:?} is empty"))
                        .hint("Azure does not accept empty parts: write the object in one request"),
                );
            }
            n if n <= BUFFERED_BODY_MAX_BYTES => Payload::Bytes(body::collect(body, n).await?),
            n => Payload::Stream(n, body),
        };
        let query = [("comp", "block"), ("blockid", block.as_str())];
        self.send(
            self.site("upload a part of", key),
            Method::PUT,
            &query,
            HeaderMap::new(),
            payload,
        )
        .await?;
        Ok(UploadedPart {
            number,
            etag: format!("\"{block}\""),
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
        let Upload { id, .. } = self.upload(upload)?;
        let site = self.site("list the parts of an upload of", key);
        let query = [("comp", "blocklist"), ("blocklisttype", "all")];
        let sent = self.send(site, Method::GET, &query, HeaderMap::new(), Payload::Empty);
        let answer = match sent.await {
            Ok(answer) => answer,
            // Azure has no blob of this name, and no uncommitted blocks for one.
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(PartsPage::default()),
            Err(e) => return Err(e),
        };
        let text = self
            .transport
            .text(site, answer, DOCUMENT_MAX_BYTES)
            .await?;
        let blocks = xml::parse_blocks(text.trim_start_matches('\u{feff}'))
            .map_err(|e| e.context(format_args!("list parts at {}", self.description)))?;
        let is_own = |block: &String| number_of_block(id, block).is_some();
        if blocks.committed.iter().any(is_own) {
            return Err(Error::not_found("the upload does not exist").hint("it was completed"));
        }
        // If a part was sent more than once, nobody here can tell which block was the last: it is as
        // if it were not there, and may be sent again.
        let mut found: BTreeMap<u32, Option<ListedPart>> = BTreeMap::new();
        for (block, size) in blocks.uncommitted {
            let Some(number) = number_of_block(id, &block) else {
                continue;
            };
            let part = ListedPart {
                part: UploadedPart {
                    number,
                    etag: format!("\"{block}\""),
                    size: Some(size),
                },
                last_modified_ms: 0,
            };
            match found.entry(number) {
                Entry::Vacant(place) => {
                    place.insert(Some(part));
                }
                Entry::Occupied(mut place) => {
                    place.insert(None);
                }
            }
        }
        let parts = found.into_values().flatten().collect();
        Ok(PartsPage::of(parts, after, max))
    }

    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        let Upload {
            id,
            attributes,
            if_absent,
            if_match,
        } = self.upload(upload)?;
        let condition = condition.or(match (if_absent, if_match) {
            (true, _) => PutCondition::IfAbsent,
            (false, Some(etag)) => PutCondition::IfMatch(etag),
            (false, None) => PutCondition::Always,
        });
        let mut h = headers::attributes(Dialect::Azure, &attributes)?;
        condition_headers(&condition, &mut h)?;
        let mut list = String::from("<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>");
        // `Latest`: not yet committed, or committed by an attempt whose answer was lost. The ids
        // belong to this upload alone.
        for part in &parts {
            let block = part.etag.trim_matches('"');
            // The service would put blocks of other numbers, or of other uploads, in its place.
            let own = block_begin(id, part.number);
            let is_own = |bytes: Vec<u8>| bytes.starts_with(own.as_bytes());
            if !STANDARD.decode(block).is_ok_and(is_own) {
                return Err(Error::invalid(format!(
                    "part {} of {key:?} was not uploaded with the ETag {:?}",
                    part.number,
                    forebay_core::name::shorten(&part.etag)
                )));
            }
            list.push_str(&format!(
                "<Latest>{}</Latest>",
                quick_xml::escape::escape(block)
            ));
        }
        list.push_str("</BlockList>");
        let site = self.site("complete the upload of", key);
        let answer = self
            .send(
                site,
                Method::PUT,
                &[("comp", "blocklist")],
                h,
                Payload::Bytes(list.into()),
            )
            .await
            .map_err(|e| unmet(e, &condition))?;
        Ok(PutResponse {
            etag: headers::etag(Dialect::Azure, answer.headers()),
        })
    }

    async fn abort_upload(&self, _key: &str, upload: &str) -> Result<()> {
        let mut aborted = self.aborted.lock();
        if !aborted.iter().any(|a| a == upload) {
            if aborted.len() >= ABORTED_REMEMBERED {
                aborted.pop_front();
            }
            aborted.push_back(upload.to_owned());
        }
        Ok(())
    }
}
