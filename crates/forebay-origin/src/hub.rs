//! A repository of the Hugging Face Hub as a read-only bucket, by the Hub's HTTP API
//! (<https://huggingface.co/docs/hub/api>).
//!
//! A file's address answers with the file, or, for large ones, with a redirect to where its bytes
//! are: a signed address that holds for a while and is kept meanwhile. What identifies a version is
//! in the first answer (`X-Linked-Etag`, or `ETag`): the SHA-256 of a large file, the id in git of
//! others, as in the Hub's own cache. Listings (`/api/…/tree/…`) name the same. A branch may move
//! between two requests; a version never changes.

use crate::{
    ByteStream, GetRequest, GetResponse, ListPage, ListRequest, Origin, OriginConfig, PutRequest,
    PutResponse, UploadedPart, body,
    config::{HubKind, HubRepository},
    failure::{self, Site},
    s3::{
        get_checks,
        headers::{self, Dialect},
    },
    transport::{Payload, Redirects, Transport},
    walked::{self, Directories, Named},
    web::delivered,
};
use async_trait::async_trait;
use forebay_core::{Attributes, Error, ErrorKind, ObjectMeta, Result, sync::Mutex};
use http::{
    HeaderMap, HeaderValue, Method, StatusCode,
    header::{ACCEPT_ENCODING, AUTHORIZATION, ETAG, LINK, LOCATION, RANGE},
};
use serde::Deserialize;
use std::{collections::HashMap, path::PathBuf, sync::Arc, time::Duration};
use tokio::time::Instant;
use url::Url;

/// Where the Hub is.
pub(crate) const ENDPOINT: &str = "https://huggingface.co";
/// A page of a listing.
const DOCUMENT_MAX_BYTES: u64 = 64 << 20;
/// Names of one directory; the Hub itself allows 10,000.
const DIRECTORY_MAX_NAMES: usize = 1 << 20;
/// Relative redirects, as of repositories that were renamed.
const REDIRECTS_MAX: usize = 5;
/// Signed addresses hold for an hour.
const PLACE_KEPT: Duration = Duration::from_secs(600);
/// About 1 KiB each.
const PLACES_MAX: usize = 4096;
/// For how long the next pages of a listing go on with the directories that were read for it.
const DIRECTORY_KEPT: Duration = Duration::from_secs(60);
/// The most names that are kept for that.
const NAMES_KEPT: usize = 100_000;

/// A repository, in one of its revisions.
pub struct HubOrigin {
    transport: Transport,
    /// Of the Hub; ends in `/`.
    base: Url,
    repository: HubRepository,
    authorization: Option<HeaderValue>,
    description: String,
    places: Mutex<HashMap<String, Place>>,
    recent: Mutex<HashMap<String, (Instant, Arc<Vec<Named>>)>>,
}

/// Where the bytes of a version are.
#[derive(Clone)]
struct Place {
    url: Url,
    meta: ObjectMeta,
    since: Instant,
}

/// The first answer for a file.
enum First {
    /// The file itself.
    Answer(reqwest::Response),
    /// Its bytes are elsewhere.
    Elsewhere(Place),
}

/// An entry of `tree`.
#[derive(Deserialize)]
struct Entry {
    r#type: String,
    path: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    oid: String,
    #[serde(default)]
    lfs: Option<Large>,
}

#[derive(Deserialize)]
struct Large {
    oid: String,
    size: u64,
}

impl HubOrigin {
    /// The token is the setting's `bearer_token`, `HF_TOKEN`, or the one that `hf auth login` kept;
    /// none if the setting is `anonymous`.
    pub(crate) fn new(config: &OriginConfig, repository: HubRepository) -> Result<Self> {
        let base = endpoint(config)?;
        let transport = Transport::new(config, &base, Redirects::Refuse)?;
        let token = match &config.bearer_token {
            _ if config.anonymous => None,
            Some(token) => Some(token.reveal().to_owned()),
            None => token_of_environment(),
        };
        let authorization = match token {
            None => None,
            Some(token) => {
                let mut value = headers::value("bearer_token", &format!("Bearer {token}"))?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        Ok(Self {
            transport,
            description: format!("{repository} at {base}"),
            base,
            repository,
            authorization,
            places: Mutex::default(),
            recent: Mutex::default(),
        })
    }

    fn site<'a>(&'a self, operation: &'a str, key: &'a str) -> Site<'a> {
        Site {
            origin: &self.description,
            operation,
            key,
        }
    }

    /// The address of a file.
    fn file(&self, key: &str) -> Result<Url> {
        if key.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(Error::not_found(format!(
                "{key:?} at {}: no file of a repository has such a name",
                self.description
            )));
        }
        let at = match self.repository.kind {
            HubKind::Model => "",
            HubKind::Dataset => "datasets/",
            HubKind::Space => "spaces/",
        };
        let revision = headers::encode_query(&self.repository.revision);
        let path = headers::encode_path(key);
        self.address(&format!(
            "{at}{}/resolve/{revision}/{path}",
            self.repository.name
        ))
    }

    /// The address of a directory's listing.
    fn tree(&self, dir: &str) -> Result<Url> {
        let of = match self.repository.kind {
            HubKind::Model => "models",
            HubKind::Dataset => "datasets",
            HubKind::Space => "spaces",
        };
        let revision = headers::encode_query(&self.repository.revision);
        let path = headers::encode_path(dir.trim_end_matches('/'));
        let slash = if dir.is_empty() { "" } else { "/" };
        let name = &self.repository.name;
        self.address(&format!("api/{of}/{name}/tree/{revision}{slash}{path}"))
    }

    fn address(&self, path: &str) -> Result<Url> {
        Url::parse(&format!("{}{path}", self.base))
            .map_err(|e| Error::invalid(format!("{path:?} cannot be put into an address: {e}")))
    }

    /// Asks the Hub, and follows to wherever it keeps the repository under another name.
    async fn ask(
        &self,
        site: Site<'_>,
        method: Method,
        mut url: Url,
        mut h: HeaderMap,
    ) -> Result<reqwest::Response> {
        h.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if let Some(value) = &self.authorization {
            h.insert(AUTHORIZATION, value.clone());
        }
        for _ in 0..REDIRECTS_MAX {
            let answer = self
                .transport
                .send(site, method.clone(), url.clone(), h.clone(), Payload::Empty)
                .await?;
            let status = answer.status();
            if status.is_success() {
                return Ok(answer);
            }
            if !status.is_redirection() || status == StatusCode::NOT_MODIFIED {
                return Err(self.refusal(site, answer).await);
            }
            if linked(answer.headers()).is_some() {
                return Ok(answer);
            }
            let to = place_of(&url, answer.headers()).filter(|to| to.origin() == url.origin());
            let Some(to) = to else {
                return Err(Error::unsupported(format!(
                    "{} {:?} at {}: it redirects to another place, without the size and the \
                     version of a file",
                    site.operation, site.key, site.origin
                ))
                .hint("check endpoint: it must be the address of a Hub"));
            };
            url = to;
        }
        Err(Error::origin_unavailable(format!(
            "{} {:?} at {}: it redirects again and again",
            site.operation, site.key, site.origin
        )))
    }

    async fn refusal(&self, site: Site<'_>, answer: reqwest::Response) -> Error {
        let (status, headers) = (answer.status(), answer.headers().clone());
        let text = self.transport.error_text(answer).await;
        let told = |name: &str| {
            let value = headers.get(name)?.to_str().ok()?;
            Some(value.chars().take(300).collect::<String>())
        };
        let error = failure::from_status(site, status, &headers, &text);
        let code = told("x-error-code").unwrap_or_default();
        let message = told("x-error-message").unwrap_or_default();
        let kind = match code.as_str() {
            "RepoNotFound" | "RevisionNotFound" => ErrorKind::BucketNotFound,
            "EntryNotFound" => ErrorKind::NotFound,
            "GatedRepo" => ErrorKind::PermissionDenied,
            _ if status == StatusCode::UNAUTHORIZED => ErrorKind::PermissionDenied,
            _ => return error,
        };
        let message = match message.is_empty() {
            true => error.message().to_owned(),
            false => format!("{}: {message}", site.prefix()),
        };
        let error = Error::new(kind, message);
        let has_token = match self.authorization {
            Some(_) => "check the token",
            None => "set HF_TOKEN or bearer_token",
        };
        match code.as_str() {
            "GatedRepo" => error.hint(format!(
                "accept the repository's conditions on its page, and {has_token}"
            )),
            // What may not be seen is told to be not there.
            "RepoNotFound" => error.hint(format!(
                "check the name; if the repository is private, {has_token}"
            )),
            "RevisionNotFound" => error.hint("check what stands behind the @"),
            _ if kind == ErrorKind::PermissionDenied => error.hint(has_token.to_owned()),
            _ => error,
        }
    }

    /// Asks for a file, or for its head.
    async fn first(&self, site: Site<'_>, method: Method, h: HeaderMap) -> Result<First> {
        let answer = self.ask(site, method, self.file(site.key)?, h).await?;
        let linked = linked(answer.headers()).filter(|_| answer.status().is_redirection());
        let Some((etag, size)) = linked else {
            return Ok(First::Answer(answer));
        };
        let Some(url) = place_of(answer.url(), answer.headers()) else {
            return Err(Error::corrupt(format!(
                "{} {:?} at {}: a redirect without a place",
                site.operation, site.key, site.origin
            )));
        };
        let place = Place {
            url,
            meta: ObjectMeta {
                size,
                etag: Some(etag),
                last_modified_ms: 0,
                attributes: Attributes::default(),
            },
            since: Instant::now(),
        };
        let mut places = self.places.lock();
        if places.len() >= PLACES_MAX {
            places.retain(|_, place| place.since.elapsed() < PLACE_KEPT);
        }
        if places.len() >= PLACES_MAX {
            places.clear();
        }
        places.insert(site.key.to_owned(), place.clone());
        Ok(First::Elsewhere(place))
    }

    /// Where the version lies that is asked for, if that is known.
    fn known(&self, key: &str, request: &GetRequest) -> Option<Place> {
        let wanted = request.if_match.as_deref()?;
        let place = self.places.lock().get(key).cloned()?;
        let is_it = place.meta.etag.as_deref() == Some(wanted);
        (is_it && place.since.elapsed() < PLACE_KEPT).then_some(place)
    }

    /// Reads from where the bytes are.
    async fn read_at(
        &self,
        site: Site<'_>,
        request: &GetRequest,
        place: &Place,
    ) -> Result<GetResponse> {
        get_checks(&place.meta, request, site.key)?;
        let mut h = HeaderMap::new();
        h.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if let Some(range) = &request.range {
            if range.start >= range.end || place.meta.size == 0 {
                return nothing(site, request, place.meta.clone());
            }
            h.insert(RANGE, headers::range(range));
        }
        if place.url.origin() == self.base.origin()
            && let Some(value) = &self.authorization
        {
            h.insert(AUTHORIZATION, value.clone());
        }
        let answer = self
            .transport
            .send(site, Method::GET, place.url.clone(), h, Payload::Empty)
            .await?;
        let (status, headers) = (answer.status(), answer.headers().clone());
        if !status.is_success() {
            let text = self.transport.error_text(answer).await;
            return Err(failure::from_status(site, status, &headers, &text));
        }
        let (there, sent) = headers::meta_and_range(Dialect::Web, site, status, &headers)?;
        if there.size != place.meta.size {
            return Err(Error::corrupt(format!(
                "{} {:?} at {}: it has {} bytes by the Hub, and {} where they are",
                site.operation, site.key, site.origin, place.meta.size, there.size
            )));
        }
        delivered(site, request, place.meta.clone(), sent, answer)
    }

    fn read_only<T>(&self, what: &str) -> Result<T> {
        Err(
            Error::unsupported(format!("{what}: {} is read-only here", self.description))
                .hint("`hf upload` writes to the Hub"),
        )
    }
}

/// The Hub's address, with a `/` at its end.
fn endpoint(config: &OriginConfig) -> Result<Url> {
    let of_environment = std::env::var("HF_ENDPOINT").ok().filter(|e| !e.is_empty());
    let text = config.endpoint.clone().or(of_environment);
    let text = text.as_deref().unwrap_or(ENDPOINT).trim_end_matches('/');
    let url = Url::parse(&format!("{text}/")).ok();
    url.filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
        .ok_or_else(|| {
            Error::invalid(format!("the Hub's address {text:?} is not an address"))
                .hint("set endpoint or HF_ENDPOINT to one such as https://huggingface.co")
        })
}

/// As the Hub's own library looks for it.
fn token_of_environment() -> Option<String> {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    if let Some(token) = set("HF_TOKEN") {
        return Some(token);
    }
    let path = set("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| {
        let home = set("HF_HOME").map(PathBuf::from).or_else(|| {
            let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
            let cache = cache.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")));
            Some(cache?.join("huggingface"))
        });
        Some(home?.join("token"))
    });
    let token = std::fs::read_to_string(path?).ok()?;
    let token = token.trim();
    (!token.is_empty()).then(|| token.to_owned())
}

/// Version and size of a file whose bytes are elsewhere.
fn linked(h: &HeaderMap) -> Option<(String, u64)> {
    let text = |name: &str| h.get(name)?.to_str().ok();
    let etag = quoted(text("x-linked-etag")?)?;
    Some((etag, text("x-linked-size")?.trim().parse().ok()?))
}

/// The version of a file that is in the answer.
fn version_of(h: &HeaderMap) -> Option<String> {
    let etag = h.get("x-linked-etag").or_else(|| h.get(ETAG))?;
    quoted(etag.to_str().ok()?)
}

/// An ETag as listings have it: not weak, in quotes.
fn quoted(etag: &str) -> Option<String> {
    let etag = etag.trim();
    let etag = etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"');
    (!etag.is_empty()).then(|| format!("\"{etag}\""))
}

fn place_of(from: &Url, h: &HeaderMap) -> Option<Url> {
    let url = from.join(h.get(LOCATION)?.to_str().ok()?).ok()?;
    matches!(url.scheme(), "http" | "https").then_some(url)
}

/// The address of the next page, if there is one: `<address>; rel="next"`.
fn next_page(from: &Url, h: &HeaderMap) -> Option<Url> {
    let links = h.get_all(LINK).iter().filter_map(|link| link.to_str().ok());
    let mut links = links.flat_map(|link| link.split(','));
    links.find_map(|link| {
        let (address, rest) = link.trim().strip_prefix('<')?.split_once('>')?;
        let mut attributes = rest.split(';').map(str::trim);
        let is_next = attributes.any(|a| matches!(a, "rel=\"next\"" | "rel=next"));
        is_next.then(|| from.join(address).ok())?
    })
}

/// An answer without bytes.
fn nothing(site: Site<'_>, request: &GetRequest, meta: ObjectMeta) -> Result<GetResponse> {
    get_checks(&meta, request, site.key)?;
    let start = request.range.as_ref().map_or(0, |range| range.start);
    if start > 0 && start >= meta.size {
        return Err(Error::range_not_satisfiable(format!(
            "{:?} has {} bytes, none from byte {start} on",
            site.key, meta.size
        )));
    }
    Ok(GetResponse {
        meta,
        age_secs: Some(0),
        range: start..start,
        body: body::empty(),
    })
}

#[async_trait]
impl Directories for HubOrigin {
    async fn directory(&self, dir: &str, goes_on: bool) -> Result<Arc<Vec<Named>>> {
        if goes_on
            && let Some((since, names)) = self.recent.lock().get(dir)
            && since.elapsed() < DIRECTORY_KEPT
        {
            return Ok(names.clone());
        }
        let site = self.site("list", dir);
        let mut names = Vec::new();
        let mut page = Some(self.tree(dir)?);
        while let Some(url) = page {
            let answer = self
                .ask(site, Method::GET, url.clone(), HeaderMap::new())
                .await?;
            // The token goes to the Hub alone.
            page = next_page(answer.url(), answer.headers());
            if page
                .as_ref()
                .is_some_and(|p| p.origin() != self.base.origin())
            {
                return Err(Error::corrupt(format!(
                    "{}: the next page of the listing is at another host",
                    site.prefix()
                )));
            }
            let text = self
                .transport
                .text(site, answer, DOCUMENT_MAX_BYTES)
                .await?;
            let entries: Vec<Entry> = serde_json::from_str(&text).map_err(|e| {
                Error::corrupt(format!(
                    "{}: the answer is not a listing: {e}",
                    site.prefix()
                ))
                .hint("check endpoint: it must be the address of a Hub")
            })?;
            for entry in entries {
                let Some(name) = entry.path.strip_prefix(dir).filter(|n| !n.is_empty()) else {
                    continue;
                };
                let (name, size, id) = match (entry.r#type.as_str(), entry.lfs) {
                    ("directory", _) => (format!("{name}/"), 0, String::new()),
                    ("file", Some(large)) => (name.to_owned(), large.size, large.oid),
                    ("file", None) => (name.to_owned(), entry.size, entry.oid),
                    _ => continue,
                };
                names.push(Named {
                    name,
                    size,
                    etag: quoted(&id),
                    last_modified_ms: 0,
                });
            }
            if names.len() > DIRECTORY_MAX_NAMES {
                return Err(Error::unsupported(format!(
                    "{}: it has more than {DIRECTORY_MAX_NAMES} names",
                    site.prefix()
                )));
            }
        }
        names.sort_by(|a, b| a.name.cmp(&b.name));
        let names = Arc::new(names);
        let mut recent = self.recent.lock();
        recent.retain(|_, (since, _)| since.elapsed() < DIRECTORY_KEPT);
        let kept: usize = recent.values().map(|(_, names)| names.len()).sum();
        if kept + names.len() > NAMES_KEPT {
            recent.clear();
        }
        if names.len() <= NAMES_KEPT {
            recent.insert(dir.to_owned(), (Instant::now(), names.clone()));
        }
        Ok(names)
    }
}

#[async_trait]
impl Origin for HubOrigin {
    fn describe(&self) -> String {
        self.description.clone()
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        let site = self.site("head", key);
        match self.first(site, Method::HEAD, HeaderMap::new()).await? {
            First::Elsewhere(place) => Ok(place.meta),
            First::Answer(answer) => Ok(ObjectMeta {
                etag: version_of(answer.headers()),
                ..headers::meta(Dialect::Web, site, answer.headers())?
            }),
        }
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        let site = self.site("get", key);
        if let Some(place) = self.known(key, &request) {
            match self.read_at(site, &request, &place).await {
                // The address has expired, or leads to nothing any more.
                Err(e) if matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::NotFound) => {
                    self.places.lock().remove(key);
                }
                other => return other,
            }
        }
        let mut h = HeaderMap::new();
        match &request.range {
            Some(range) if range.start >= range.end => {
                return nothing(site, &request, self.head(key).await?);
            }
            Some(range) => drop(h.insert(RANGE, headers::range(range))),
            None => {}
        }
        match self.first(site, Method::GET, h).await {
            Err(e)
                if e.kind() == ErrorKind::RangeNotSatisfiable
                    && request.range.as_ref().is_some_and(|r| r.start == 0) =>
            {
                nothing(site, &request, self.head(key).await?)
            }
            Err(e) => Err(e),
            Ok(First::Elsewhere(place)) => self.read_at(site, &request, &place).await,
            Ok(First::Answer(answer)) => {
                let (mut meta, sent) =
                    headers::meta_and_range(Dialect::Web, site, answer.status(), answer.headers())?;
                meta.etag = version_of(answer.headers());
                delivered(site, &request, meta, sent, answer)
            }
        }
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        walked::list(self, request).await
    }

    async fn put(
        &self,
        key: &str,
        _: PutRequest,
        _: Option<u64>,
        _: ByteStream,
    ) -> Result<PutResponse> {
        self.read_only(&format!("put {key:?}"))
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.read_only(&format!("delete {key:?}"))
    }

    async fn copy(&self, _: &str, _: Option<&str>, to: &str, _: PutRequest) -> Result<PutResponse> {
        self.read_only(&format!("copy {to:?}"))
    }

    async fn create_upload(&self, key: &str, _: PutRequest) -> Result<String> {
        self.read_only(&format!("upload {key:?}"))
    }

    async fn upload_part(
        &self,
        key: &str,
        _: &str,
        _: u32,
        _: u64,
        _: ByteStream,
    ) -> Result<UploadedPart> {
        self.read_only(&format!("upload {key:?}"))
    }

    async fn complete_upload(
        &self,
        key: &str,
        _: &str,
        _: Vec<UploadedPart>,
    ) -> Result<PutResponse> {
        self.read_only(&format!("upload {key:?}"))
    }

    async fn abort_upload(&self, key: &str, _: &str) -> Result<()> {
        self.read_only(&format!("upload {key:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_say_where_and_which() {
        let h = |pairs: &[(&'static str, &str)]| {
            let pairs = pairs.iter().map(|(name, value)| {
                (
                    http::HeaderName::from_static(name),
                    HeaderValue::from_str(value).unwrap(),
                )
            });
            pairs.collect::<HeaderMap>()
        };
        let both = h(&[("x-linked-etag", "\"ab\""), ("x-linked-size", "12")]);
        assert_eq!(linked(&both), Some(("\"ab\"".to_owned(), 12)));
        for odd in [
            h(&[("x-linked-etag", "\"ab\"")]),
            h(&[("x-linked-etag", "\"\""), ("x-linked-size", "12")]),
            h(&[("x-linked-etag", "\"ab\""), ("x-linked-size", "-1")]),
        ] {
            assert_eq!(linked(&odd), None);
        }
        assert_eq!(quoted("W/\"ab\"").as_deref(), Some("\"ab\""));
        let from = Url::parse("https://h/api/x?a=1").unwrap();
        let next = |link: &str| next_page(&from, &h(&[("link", link)])).map(|url| url.to_string());
        assert_eq!(
            next("</y>; rel=\"prev\", <https://h/api/x?cursor=2>; rel=\"next\"").as_deref(),
            Some("https://h/api/x?cursor=2")
        );
        assert_eq!(
            next("</y?c=3>;rel=next").as_deref(),
            Some("https://h/y?c=3")
        );
        for none in ["", "<x", "</y>; rel=\"last\"", "no; rel=\"next\""] {
            assert_eq!(next(none), None, "{none}");
        }
        let place = |to: &str| place_of(&from, &h(&[("location", to)])).map(|url| url.to_string());
        assert_eq!(place("/z").as_deref(), Some("https://h/z"));
        assert_eq!(place("file:///etc/passwd"), None);
    }
}
