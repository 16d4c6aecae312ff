//! A repository of the Hugging Face Hub as a read-only bucket, by the Hub's HTTP API
//! (<https://huggingface.co/docs/hub/api>).
//!
//! A file's address answers with the file, or, for large ones, with a redirect to where its bytes
//! are: a signed address that holds for a while and is kept meanwhile. What identifies a version is
//! in the first answer (`X-Linked-Etag`, or `ETag`): the SHA-256 of a large file, the id in git of
//! others, as in the Hub's own cache. Listings (`/api/…/tree/…`) name the same. A branch may move
//! between two requests; a version never changes, and a listing is of one commit from its first page
//! to its last.

use crate::{
    GetRequest, GetResponse, ListPage, ListRequest, OriginConfig, body,
    config::{HubKind, HubRepository},
    failure::{self, Site},
    read_only::ReadOnly,
    s3::{
        get_checks,
        headers::{self, Dialect},
        past_the_end,
    },
    transport::{Payload, Redirects, Transport},
    walked::{self, Directories, Named},
    web::delivered,
};
use async_trait::async_trait;
use forebay_core::{Attributes, Error, ErrorKind, ObjectMeta, Result, sync::Mutex};
use http::{
    HeaderMap, HeaderValue, Method, StatusCode,
    header::{ACCEPT_ENCODING, AUTHORIZATION, ETAG, IF_NONE_MATCH, LINK, LOCATION, RANGE},
};
use serde::Deserialize;
use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::Instant;
use url::Url;

/// Where the Hub is.
pub(crate) const ENDPOINT: &str = "https://huggingface.co";
/// A page of a listing.
const DOCUMENT_MAX_BYTES: u64 = 64 << 20;
/// Most memory of the listings that are kept, each of one directory in one commit.
const LISTINGS_MAX_BYTES: usize = 64 << 20;
/// What a name takes besides its text.
const NAME_BYTES: usize = 128;
/// Redirects of one request: of repositories that were renamed, and between hosts of files.
const REDIRECTS_MAX: usize = 5;
/// Signed addresses hold for an hour.
const PLACE_KEPT: Duration = Duration::from_secs(600);
/// About 1 KiB each.
const PLACES_MAX: usize = 4096;

/// A repository, in one of its revisions.
pub struct HubOrigin {
    transport: Transport,
    /// Of the Hub; ends in `/`.
    base: Url,
    repository: HubRepository,
    authorization: Option<HeaderValue>,
    description: String,
    places: Mutex<HashMap<String, Place>>,
    /// The newest last.
    listings: Mutex<Vec<(Of, Arc<Listing>)>>,
}

/// What a listing is of.
#[derive(Clone, PartialEq, Eq)]
struct Of {
    commit: String,
    dir: String,
    /// With all that is below the directory.
    is_deep: bool,
}

/// A listing, as far as it was read: whoever goes on after an attempt that took too long begins where
/// that one ended.
#[derive(Default)]
struct Listing {
    bytes: AtomicUsize,
    read: tokio::sync::Mutex<Read>,
}

#[derive(Default)]
struct Read {
    names: Vec<Named>,
    next: Option<Url>,
    done: Option<Arc<Vec<Named>>>,
}

/// The repository in one commit.
struct AtCommit<'a> {
    hub: &'a HubOrigin,
    commit: &'a str,
    is_deep: bool,
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
    ///
    /// # Errors
    /// `Invalid` for an address that is none, and for a token that cannot be read or sent.
    pub(crate) fn new(config: &OriginConfig, repository: HubRepository) -> Result<Self> {
        let base = endpoint(config)?;
        let transport = Transport::new(config, &base, Redirects::Refuse)?;
        let token = match &config.bearer_token {
            _ if config.anonymous => None,
            Some(token) => Some(token.reveal().to_owned()),
            None => token_of_environment()?,
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
            listings: Mutex::default(),
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

    /// The address of something that the API tells about the repository.
    fn api(&self, what: &str) -> Result<Url> {
        let of = match self.repository.kind {
            HubKind::Model => "models",
            HubKind::Dataset => "datasets",
            HubKind::Space => "spaces",
        };
        self.address(&format!("api/{of}/{}/{what}", self.repository.name))
    }

    /// The commit that the revision is now.
    async fn commit(&self) -> Result<String> {
        #[derive(Deserialize)]
        struct Revision {
            sha: String,
        }
        let revision = &self.repository.revision;
        if is_commit(revision) {
            return Ok(revision.clone());
        }
        let site = self.site("list", "");
        let url = self.api(&format!("revision/{}", headers::encode_query(revision)))?;
        let answer = self.ask(site, Method::GET, url, HeaderMap::new()).await?;
        let text = self
            .transport
            .text(site, answer, DOCUMENT_MAX_BYTES)
            .await?;
        let found = serde_json::from_str::<Revision>(&text).ok();
        let commit = found.map(|found| found.sha).filter(|sha| is_commit(sha));
        commit.ok_or_else(|| not_expected(site, "it names no commit"))
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
        Err(again_and_again(site))
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
            // Without a token, the Hub answers so for a repository that does not exist, too; with one,
            // the token is not valid.
            _ if status == StatusCode::UNAUTHORIZED => match self.authorization {
                None => ErrorKind::BucketNotFound,
                Some(_) => ErrorKind::PermissionDenied,
            },
            _ => error.kind(),
        };
        let mut refusal = match message.is_empty() {
            true => Error::new(kind, error.message().to_owned()),
            false => Error::new(
                kind,
                format!("{}: status {}: {message}", site.prefix(), status.as_u16()),
            ),
        };
        if let Some(after) = error.retry_after_hint() {
            refusal = refusal.retry_after(after);
        }
        let token = match self.authorization {
            Some(_) => "check the token",
            None => "set HF_TOKEN or bearer_token",
        };
        match code.as_str() {
            "GatedRepo" => refusal.hint(format!(
                "accept the repository's conditions on its page, and {token}"
            )),
            "RevisionNotFound" => refusal.hint("check what stands behind the @"),
            _ if kind == ErrorKind::BucketNotFound => refusal.hint(format!(
                "check the repository's name; if it is private, {token}"
            )),
            _ if kind == ErrorKind::PermissionDenied => refusal.hint(token.to_owned()),
            _ => match error.hint_text() {
                Some(hint) => refusal.hint(hint.to_owned()),
                None => refusal,
            },
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
        let mut url = place.url.clone();
        for _ in 0..REDIRECTS_MAX {
            let mut h = h.clone();
            if url.origin() == self.base.origin()
                && let Some(value) = &self.authorization
            {
                h.insert(AUTHORIZATION, value.clone());
            }
            let answer = self
                .transport
                .send(site, Method::GET, url.clone(), h, Payload::Empty)
                .await?;
            let (status, headers) = (answer.status(), answer.headers().clone());
            if status.is_redirection()
                && let Some(to) = place_of(&url, &headers)
            {
                url = to;
                continue;
            }
            if !status.is_success() {
                let text = self.transport.error_text(answer).await;
                return Err(failure::from_status(site, status, &headers, &text));
            }
            let (there, sent) = headers::meta_and_range(Dialect::Web, site, status, &headers)?;
            if there.size != place.meta.size {
                return Err(Error::corrupt(format!(
                    "{}: it has {} bytes by the Hub, and {} where they are",
                    site.prefix(),
                    place.meta.size,
                    there.size
                )));
            }
            return delivered(site, request, place.meta.clone(), sent, answer);
        }
        Err(again_and_again(site))
    }

    /// The same; what leads nowhere is forgotten.
    async fn read(
        &self,
        site: Site<'_>,
        request: &GetRequest,
        place: &Place,
    ) -> Result<GetResponse> {
        use ErrorKind::{NotModified, PreconditionFailed, RangeNotSatisfiable};
        let read = self.read_at(site, request, place).await;
        if let Err(e) = &read
            && !matches!(
                e.kind(),
                NotModified | PreconditionFailed | RangeNotSatisfiable
            )
        {
            self.places.lock().remove(site.key);
        }
        read
    }

    /// The names of a directory in a commit.
    async fn names(&self, of: Of) -> Result<Arc<Vec<Named>>> {
        let listing = {
            let mut listings = self.listings.lock();
            let found = listings.iter().position(|(known, _)| *known == of);
            let found = found.map(|at| listings.remove(at).1);
            let listing = found.unwrap_or_default();
            let bytes = |l: &Arc<Listing>| l.bytes.load(Relaxed);
            let mut all: usize = listings.iter().map(|(_, l)| bytes(l)).sum();
            all += bytes(&listing);
            while all > LISTINGS_MAX_BYTES && !listings.is_empty() {
                all -= bytes(&listings.remove(0).1);
            }
            listings.push((of.clone(), listing.clone()));
            listing
        };
        // Who comes meanwhile waits for the one who reads it.
        let mut read = listing.read.lock().await;
        if let Some(done) = &read.done {
            return Ok(done.clone());
        }
        let site = self.site("list", &of.dir);
        let mut next = match read.next.take() {
            Some(next) => next,
            None => {
                read.names.clear();
                let path = headers::encode_path(of.dir.trim_end_matches('/'));
                let slash = if of.dir.is_empty() { "" } else { "/" };
                let mut url = self.api(&format!("tree/{}{slash}{path}", of.commit))?;
                if of.is_deep {
                    url.set_query(Some("recursive=true"));
                }
                url
            }
        };
        loop {
            // Whoever leaves here leaves what was read, and where it goes on.
            read.next = Some(next.clone());
            let answer = self.ask(site, Method::GET, next, HeaderMap::new()).await?;
            let after = next_page(&self.base, answer.headers())
                .map_err(|_| not_expected(site, "it has no address of the next page"))?;
            let text = self
                .transport
                .text(site, answer, DOCUMENT_MAX_BYTES)
                .await?;
            let entries: Vec<Entry> = serde_json::from_str(&text)
                .map_err(|e| not_expected(site, &format!("it is not a listing: {e}")))?;
            let found = entries.into_iter().filter_map(|entry| entry.named(&of));
            read.names.extend(found);
            let text = read.names.iter().map(|n| n.name.len() + NAME_BYTES);
            let bytes = text.sum();
            listing.bytes.store(bytes, Relaxed);
            if bytes > LISTINGS_MAX_BYTES {
                *read = Read::default();
                listing.bytes.store(0, Relaxed);
                return Err(Error::unsupported(format!(
                    "{}: the names take more than {} MiB",
                    site.prefix(),
                    LISTINGS_MAX_BYTES >> 20
                ))
                .hint("list a directory of it"));
            }
            match after {
                Some(after) => next = after,
                None => break,
            }
        }
        let mut names = std::mem::take(&mut read.names);
        names.sort_by(|a, b| a.name.cmp(&b.name));
        read.next = None;
        Ok(read.done.insert(Arc::new(names)).clone())
    }
}

impl Entry {
    /// The entry as listings name it. `None` for anything but files and directories, and for names
    /// that cannot be keys.
    fn named(self, of: &Of) -> Option<Named> {
        let name = self.path.strip_prefix(of.dir.as_str())?;
        if name.is_empty() || name.chars().any(char::is_control) {
            return None;
        }
        let (name, size, id) = match (self.r#type.as_str(), self.lfs) {
            ("directory", _) if of.is_deep => return None,
            ("directory", _) => (format!("{name}/"), 0, String::new()),
            ("file", Some(large)) => (name.to_owned(), large.size, large.oid),
            ("file", None) => (name.to_owned(), self.size, self.oid),
            _ => return None,
        };
        Some(Named {
            name,
            size,
            etag: quoted(&id),
            last_modified_ms: 0,
        })
    }
}

fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

fn not_expected(site: Site<'_>, what: &str) -> Error {
    Error::corrupt(format!(
        "{}: the answer is not the Hub's: {what}",
        site.prefix()
    ))
    .hint("check endpoint: it must be the address of a Hub")
}

fn again_and_again(site: Site<'_>) -> Error {
    Error::origin_unavailable(format!("{}: it redirects again and again", site.prefix()))
}

/// The Hub's address, with a `/` at its end.
///
/// # Errors
/// `Invalid` if it is none, has a user name or password, or is plain HTTP where that is refused.
pub(crate) fn endpoint(config: &OriginConfig) -> Result<Url> {
    let of_environment = std::env::var("HF_ENDPOINT").ok().filter(|e| !e.is_empty());
    let text = config.endpoint.clone().or(of_environment);
    let text = text.as_deref().unwrap_or(ENDPOINT).trim_end_matches('/');
    let url = Url::parse(&format!("{text}/")).ok();
    let is_address = |url: &Url| {
        matches!(url.scheme(), "http" | "https") && url.has_host() && url.query().is_none()
    };
    let bad = |why: &str| {
        Error::invalid(format!("the address of the Hub {why}"))
            .hint("set endpoint or HF_ENDPOINT to one such as https://huggingface.co")
    };
    let url = url
        .filter(is_address)
        .ok_or_else(|| bad("is not an address"))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(bad("must not contain a user name or password"));
    }
    if url.scheme() == "http" && config.allow_http == Some(false) {
        return Err(bad("is plain HTTP"));
    }
    Ok(url)
}

/// As the Hub's own library looks for it.
fn token_of_environment() -> Result<Option<String>> {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let trimmed = |text: String| {
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    };
    let named = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"];
    if let Some(token) = named.iter().find_map(|name| trimmed(set(name)?)) {
        return Ok(Some(token));
    }
    let path = set("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| {
        let home = set("HF_HOME").map(PathBuf::from).or_else(|| {
            let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
            let cache = cache.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")));
            Some(cache?.join("huggingface"))
        });
        Some(home?.join("token"))
    });
    let Some(path) = path else {
        return Ok(None);
    };
    match std::fs::read_to_string(&path) {
        Ok(token) => Ok(trimmed(token)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::invalid(format!(
            "the token for the Hub, {}, cannot be read: {e}",
            path.display()
        ))
        .hint("set HF_TOKEN or bearer_token, or anonymous = true")),
    }
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

/// The address of the next page, if there is one: `<address>; rel="next"` (RFC 8288). It is asked of
/// the Hub, whatever host it names: the token goes nowhere else.
///
/// # Errors
/// There is one, and it has no address.
fn next_page(base: &Url, h: &HeaderMap) -> std::result::Result<Option<Url>, ()> {
    for link in h.get_all(LINK) {
        let mut rest = link.to_str().map_err(drop)?;
        while let Some((_, after)) = rest.split_once('<') {
            let Some((address, after)) = after.split_once('>') else {
                break;
            };
            // Attributes end where the next link begins.
            let end = after.find('<').unwrap_or(after.len());
            let mut attributes = after[..end].split([';', ',']).map(str::trim);
            if attributes.any(|a| matches!(a, "rel=\"next\"" | "rel=next")) {
                let there = base.join(address).map_err(drop)?;
                let mut url = base.clone();
                url.set_path(there.path());
                url.set_query(there.query());
                return Ok(Some(url));
            }
            rest = &after[end..];
        }
        if rest.contains("next") {
            return Err(());
        }
    }
    Ok(None)
}

/// An answer without bytes.
fn nothing(site: Site<'_>, request: &GetRequest, meta: ObjectMeta) -> Result<GetResponse> {
    get_checks(&meta, request, site.key)?;
    let start = request.range.as_ref().map_or(0, |range| range.start);
    if start > 0 && start >= meta.size {
        return Err(past_the_end(site.key, meta.size, start));
    }
    Ok(GetResponse {
        meta,
        age_secs: Some(0),
        range: start..start,
        body: body::empty(),
    })
}

#[async_trait]
impl Directories for AtCommit<'_> {
    async fn directory(&self, dir: &str) -> Result<Arc<Vec<Named>>> {
        let of = Of {
            commit: self.commit.to_owned(),
            dir: dir.to_owned(),
            is_deep: self.is_deep,
        };
        self.hub.names(of).await
    }

    /// git keeps no empty directories.
    fn has_none_empty(&self) -> bool {
        true
    }
}

#[async_trait]
impl ReadOnly for HubOrigin {
    fn describe(&self) -> String {
        self.description.clone()
    }

    fn why(&self) -> &'static str {
        "a repository of the Hub is read-only here: `hf upload` writes to it"
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        let site = self.site("head", key);
        match self.first(site, Method::HEAD, HeaderMap::new()).await? {
            First::Elsewhere(place) => Ok(place.meta),
            First::Answer(answer) => {
                let h = answer.headers();
                let mut meta = headers::meta(Dialect::Web, site, h)?;
                let size = h.get("x-linked-size").and_then(|size| size.to_str().ok());
                meta.size = size.and_then(|size| size.parse().ok()).unwrap_or(meta.size);
                meta.etag = version_of(h);
                Ok(meta)
            }
        }
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        let site = self.site("get", key);
        if let Some(place) = self.known(key, &request) {
            use ErrorKind::{NotModified, PreconditionFailed, RangeNotSatisfiable};
            match self.read(site, &request, &place).await {
                // It is the version that was asked for, current or not: the Hub was not asked.
                Ok(read) => {
                    return Ok(GetResponse {
                        age_secs: None,
                        ..read
                    });
                }
                Err(e)
                    if matches!(
                        e.kind(),
                        NotModified | PreconditionFailed | RangeNotSatisfiable
                    ) =>
                {
                    return Err(e);
                }
                // The address has expired, or leads nowhere any more.
                Err(_) => {}
            }
        }
        let mut h = HeaderMap::new();
        if let Some(etag) = &request.if_none_match {
            h.insert(IF_NONE_MATCH, headers::value("If-None-Match", etag)?);
        }
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
            Ok(First::Elsewhere(place)) => self.read(site, &request, &place).await,
            Ok(First::Answer(answer)) => {
                let (mut meta, sent) =
                    headers::meta_and_range(Dialect::Web, site, answer.status(), answer.headers())?;
                meta.etag = version_of(answer.headers());
                delivered(site, &request, meta, sent, answer)
            }
        }
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        let (commit, token) = match &request.token {
            None => (self.commit().await?, None),
            Some(token) => match token.split_once(':') {
                Some((commit, rest)) if is_commit(commit) => {
                    (commit.to_owned(), Some(rest.to_owned()))
                }
                _ => return Err(walked::not_ours()),
            },
        };
        let dir = request.prefix.rsplit_once('/').map_or("", |(dir, _)| dir);
        let is_part = |part: &str| !matches!(part, "" | "." | "..");
        if !dir.is_empty() && !dir.split('/').all(is_part) || request.prefix.starts_with('/') {
            return Ok(ListPage::default());
        }
        let of = AtCommit {
            hub: self,
            commit: &commit,
            // Directories stand for what is in them where that is wanted.
            is_deep: request.delimiter.as_deref() != Some("/"),
        };
        let mut page = walked::list(&of, ListRequest { token, ..request }).await?;
        page.next_token = page.next_token.map(|token| format!("{commit}:{token}"));
        Ok(page)
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
        let base = Url::parse("https://h/").unwrap();
        let next = |link: &str| {
            next_page(&base, &h(&[("link", link)])).map(|url| url.map(|url| url.to_string()))
        };
        for (link, url) in [
            (
                "</y>; rel=\"prev\", <https://h/api/x?cursor=2>; rel=\"next\"",
                "https://h/api/x?cursor=2",
            ),
            ("</y?c=3>;rel=next", "https://h/y?c=3"),
            ("<https://other/a,b?c=3>; rel=\"next\"", "https://h/a,b?c=3"),
        ] {
            assert_eq!(next(link), Ok(Some(url.to_owned())), "{link}");
        }
        for none in ["", "<x", "</y>; rel=\"last\""] {
            assert_eq!(next(none), Ok(None), "{none}");
        }
        for odd in [
            "no; rel=\"next\"",
            "<x; rel=\"next\"",
            "<http://[>; rel=next",
        ] {
            assert_eq!(next(odd), Err(()), "{odd}");
        }
        let place = |to: &str| place_of(&from, &h(&[("location", to)])).map(|url| url.to_string());
        assert_eq!(place("/z").as_deref(), Some("https://h/z"));
        assert_eq!(place("file:///etc/passwd"), None);
    }
}
