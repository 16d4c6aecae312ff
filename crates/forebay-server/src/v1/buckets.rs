//! `/v1/buckets[/BUCKET]`: listings, and making and destroying buckets.
//!
//! A listing with the archive flag shows each archive's members after the archive itself, as
//! `ARCHIVE/MEMBER`. Such a page may end inside an archive, so its token says after which member to
//! continue. The token holds no state on the node.
//!
//! The flag "cached" means that an object is on this node's own disks: in the cache, or in a bucket
//! that is a directory.

use super::{
    Call, action_not_offered, done,
    error::json_response,
    msgpack, not_offered,
    provider::{self, Provider},
    refuse, summary,
};
use crate::{body::AnswerBody, config::Action, s3};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use forebay_core::{
    Error, ErrorKind, ObjectName, Result, limits,
    name::{shorten, validate_bucket},
};
use forebay_engine::{ListEntry, ListRequest, ReadOptions};
use forebay_format::ArchiveKind;
use forebay_protocol::listing::{
    self, Bucket, CACHED, Entry, IS_CACHED, IS_DIR, IS_MEMBER, ListMessage, MEMBERS, NAME_ONLY,
    NO_DIRS, NOT_CACHED, ONE_LEVEL, Page,
};
use futures::{StreamExt, TryStreamExt, stream};
use http::{HeaderValue, Method, Response, StatusCode, header};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

const MSGPACK: &str = "application/msgpack";
/// AIStore's request flags that are not offered here.
const NOT_OFFERED_FLAGS: u64 = (1 << 1) | (1 << 2) | (1 << 12) | (1 << 15);
/// How many pages without an entry one request fetches from an origin before it answers with an
/// empty one.
const EMPTY_PAGES_PER_ANSWER: usize = 16;
/// How many removals of one bucket run at the same time.
const REMOVALS_IN_FLIGHT: usize = 32;

pub async fn buckets(call: &Call, bucket: &str, rest: &str) -> Result<Response<AnswerBody>> {
    call.note.set_name(bucket, "");
    if !rest.is_empty() && call.note.method != Method::HEAD {
        let name = format!("{bucket}/{rest}");
        return Err(
            Error::invalid(format!("{:?} is not a bucket name", shorten(&name)))
                .hint("objects are under /v1/objects/BUCKET/NAME"),
        );
    }
    match (call.note.method.clone(), bucket) {
        (Method::GET, "") => list_buckets(call).await,
        (Method::GET, bucket) => get(call, bucket).await,
        (Method::HEAD, bucket) if !bucket.is_empty() => head(call, bucket, rest).await,
        (Method::POST, bucket) if !bucket.is_empty() => post(call, bucket).await,
        (Method::DELETE, bucket) if !bucket.is_empty() => remove(call, bucket).await,
        (Method::PUT | Method::PATCH, bucket) if !bucket.is_empty() => refuse(call).await,
        _ => Err(not_offered(call)),
    }
}

/// The buckets in which the sender may do something; only those of one provider, where one is
/// named.
async fn list_buckets(call: &Call) -> Result<Response<AnswerBody>> {
    let message = call.json().await?;
    match action(&message) {
        listing::LIST | "" => {}
        "summary-bck" => {
            return Err(Error::unsupported(
                "the summary of all buckets at once is not offered here",
            )
            .hint("ask for the summary of each bucket"));
        }
        other => return Err(action_not_offered(other)),
    }
    let wanted = call.provider_named()?;
    let buckets = call.app.engine.buckets().as_ref();
    let mut listed = buckets.list().await?;
    listed.retain(|bucket| call.policy.knows(&bucket.name));
    let entries: Vec<Bucket> = listed
        .into_iter()
        .map(|bucket| (Provider::of(buckets, &bucket.name), bucket.name))
        .filter(|(provider, _)| wanted.is_none_or(|w| w == *provider))
        .map(|(provider, name)| Bucket {
            name,
            provider: provider.word().to_owned(),
            ..Bucket::default()
        })
        .collect();
    Ok(json_response(StatusCode::OK, &entries))
}

pub fn action(message: &Value) -> &str {
    message["action"].as_str().unwrap_or_default()
}

async fn head(call: &Call, bucket: &str, prefix: &str) -> Result<Response<AnswerBody>> {
    let uuid = call.query("uuid").filter(|u| !u.is_empty());
    if call.query("bsumm_remote").is_some() || uuid.is_some() {
        return summary::info(call, bucket, prefix, uuid).await;
    }
    if !prefix.is_empty() {
        return Err(
            Error::unsupported("the properties of a prefix are not offered here")
                .hint("its summary is, with bsumm_remote"),
        );
    }
    exists(call, bucket).await?;
    let mut response = done(StatusCode::OK);
    describe(call, bucket, response.headers_mut());
    Ok(response)
}

/// What AIStore calls the properties of a bucket. `provider` is the provider to show in them;
/// `None`: that of the bucket's origin.
pub fn properties(call: &Call, bucket: &str, provider: Option<&str>) -> Value {
    let buckets = call.app.engine.buckets().as_ref();
    let rule = call.app.engine.rule(bucket);
    let origin = Provider::of(buckets, bucket).word();
    json!({
        "provider": provider.unwrap_or(origin),
        "backend_bck": {"name": "", "provider": "", "namespace": {"uuid": "", "name": ""}},
        "versioning": {"enabled": false},
        "mirror": {"enabled": false, "copies": 1},
        "ec": {"enabled": false},
        "checksum": {"type": "none"},
        "access": property_access(),
        "features": "0",
        "bid": "0",
        "created": "0",
        "forebay": {
            "origin": origin,
            "cache": rule.cache,
            "freshness": format!("{:?}", crate::config::FreshnessRule(rule.freshness)),
        },
    })
}

/// Every right that AIStore has a bit for. The caller's policy says what may really be done.
fn property_access() -> String {
    u64::MAX.to_string()
}

pub fn describe(call: &Call, bucket: &str, headers: &mut http::HeaderMap) {
    let named = call.query("provider").and_then(provider::parse);
    let properties = properties(call, bucket, named.map(Provider::word));
    if let Ok(value) = HeaderValue::from_str(&properties.to_string()) {
        headers.insert("ais-bucket-props", value);
    }
    headers.insert("ais-present", HeaderValue::from_static("true"));
}

/// Asks the origin, since a configured bucket may not exist.
pub async fn exists(call: &Call, bucket: &str) -> Result<()> {
    call.policy.check_known(bucket)?;
    validate_bucket(bucket)?;
    call.app
        .engine
        .list(
            bucket,
            ListRequest {
                max_keys: 1,
                ..ListRequest::default()
            },
        )
        .await
        .map(drop)
}

async fn post(call: &Call, bucket: &str) -> Result<Response<AnswerBody>> {
    let message = call.json().await?;
    match action(&message) {
        // Some clients send the request for a listing by POST.
        "list" => return list(call, bucket, &message["value"]).await,
        "create-bck" => {}
        other => return Err(action_not_offered(other)),
    }
    call.provider_named()?;
    let has_properties = message["value"].as_object().is_some_and(|v| !v.is_empty());
    if has_properties {
        return Err(
            Error::unsupported("properties of a new bucket are not offered here").hint(
                "create it without properties; rules for buckets are in the node's configuration",
            ),
        );
    }
    let engine = &call.app.engine;
    s3::change_bucket(engine, &call.policy, &Method::PUT, bucket).await?;
    Ok(done(StatusCode::OK))
}

/// Destroys a bucket with everything in it. Objects are removed one by one, as if they were
/// deleted, so that nothing of them stays in the cache. A request that was interrupted can be sent
/// again.
async fn remove(call: &Call, bucket: &str) -> Result<Response<AnswerBody>> {
    let message = call.json().await?;
    match action(&message) {
        "destroy-bck" => {}
        other => return Err(action_not_offered(other)),
    }
    if call.provider_named()?.is_some_and(|p| p != Provider::Ais) {
        return Err(Error::unsupported(format!(
            "destroying {}://{bucket} would only take it out of AIStore's list of buckets",
            call.provider()
        ))
        .hint(
            "to remove it at its origin with everything in it, name it ais://; to stop serving it, \
             change the node's configuration",
        ));
    }
    let engine = &call.app.engine;
    let destroy = || s3::change_bucket(engine, &call.policy, &Method::DELETE, bucket);
    // Try this first, so that nothing is removed from a bucket that must stay.
    let mut destroyed = destroy().await;
    let mut first_before = None;
    while let Err(e) = &destroyed
        && e.kind() == ErrorKind::Conflict
    {
        call.permit(Action::Write, bucket, "")?;
        let request = ListRequest {
            max_keys: limits::LIST_PAGE_MAX_KEYS,
            ..ListRequest::default()
        };
        let page = engine.list(bucket, request).await?;
        let names: Vec<ObjectName> = page
            .entries
            .iter()
            .filter_map(|e| crate::object::name(bucket, &e.key).ok())
            .collect();
        let first = names.first().map(|name| name.key().to_owned());
        if let (None, Some(other)) = (&first, page.entries.first()) {
            return Err(Error::unsupported(format!(
                "the bucket {bucket} has objects whose keys this node cannot name, such as {:?}",
                shorten(&other.key)
            ))
            .hint("remove them at the origin, then try again"));
        }
        if first.is_none() || first == first_before {
            break;
        }
        first_before = first;
        let delete = |name: ObjectName| {
            let engine = engine.clone();
            async move { engine.delete(&name).await }
        };
        stream::iter(names.into_iter().map(delete))
            .buffer_unordered(REMOVALS_IN_FLIGHT)
            .try_collect::<()>()
            .await?;
        destroyed = destroy().await;
    }
    destroyed?;
    call.app.uploads.forget_bucket(bucket);
    Ok(done(StatusCode::OK))
}

async fn get(call: &Call, bucket: &str) -> Result<Response<AnswerBody>> {
    let message = call.json().await?;
    match action(&message) {
        listing::LIST | "" => list(call, bucket, &message["value"]).await,
        "summary-bck" => summary::summary(call, bucket, &message["value"]).await,
        other => Err(action_not_offered(other)),
    }
}

/// How to show the entries of a listing.
#[derive(Clone, Copy)]
struct Shown {
    flags: u64,
    with_version: bool,
    with_checksum: bool,
    /// Whether the bucket is a directory, so that all of its objects are here.
    local: bool,
}

async fn list(call: &Call, bucket: &str, value: &Value) -> Result<Response<AnswerBody>> {
    let message: ListMessage = match value {
        Value::Null => ListMessage::default(),
        value => {
            ListMessage::deserialize(value).map_err(|e| Error::invalid(format!("value: {e}")))?
        }
    };
    call.permit(Action::List, bucket, &message.prefix)?;
    validate_bucket(bucket)?;
    let flags =
        (message.flags.bits()).ok_or_else(|| Error::invalid("value.flags is not a number"))?;
    if flags & NOT_OFFERED_FLAGS != 0 {
        return Err(Error::unsupported(format!(
            "the listing flags {flags:#x} ask for something that is not offered here"
        ))
        .hint("list without them; no inventory is kept"));
    }
    let has = |what: &str| message.props.split(',').any(|p| p.trim() == what);
    let shown = Shown {
        flags,
        with_version: flags & NAME_ONLY == 0 && has("version"),
        with_checksum: flags & NAME_ONLY == 0 && has("checksum"),
        local: call.app.engine.buckets().provider(bucket) == Provider::Ais.word(),
    };
    let mut page = if flags & MEMBERS != 0 {
        with_members(call, bucket, &message, shown).await?
    } else {
        objects(call, bucket, &message, shown).await?
    };
    match (flags & CACHED != 0, flags & NOT_CACHED != 0) {
        (true, true) => {
            return Err(Error::invalid(
                "the flags ask both for cached objects only and for uncached objects only",
            ));
        }
        (true, false) => page.entries.retain(|e| e.is(IS_CACHED)),
        (false, true) => page.entries.retain(|e| !e.is(IS_CACHED)),
        (false, false) => {}
    }
    let wants_msgpack = call
        .headers
        .get(header::ACCEPT)
        .is_some_and(|v| v.as_bytes() == MSGPACK.as_bytes());
    if wants_msgpack {
        let mut response = Response::new(AnswerBody::full(msgpack::listing(&page)));
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, HeaderValue::from_static(MSGPACK));
        return Ok(response);
    }
    Ok(json_response(StatusCode::OK, &page))
}

fn page_size(message: &ListMessage) -> usize {
    match usize::try_from(message.pagesize) {
        Ok(0) | Err(_) => limits::LIST_PAGE_MAX_KEYS,
        Ok(n) => n.min(limits::LIST_PAGE_MAX_KEYS),
    }
}

fn uuid(call: &Call, message: &ListMessage) -> String {
    // It names the listing; everything that a listing needs is in its token.
    if message.uuid.is_empty() {
        call.note.id.to_string()
    } else {
        message.uuid.clone()
    }
}

fn object_entry(call: &Call, bucket: &str, e: ListEntry, shown: Shown) -> Entry {
    // Only those who may read an object learn whether it is in the cache.
    let readable = shown.local || call.policy.allows(Action::Read, bucket, &e.key);
    let cached = readable
        && (shown.local
            || crate::object::name(bucket, &e.key).is_ok_and(|n| call.app.engine.is_cached(&n)));
    let etag = e.etag.as_deref();
    Entry {
        size: (shown.flags & NAME_ONLY == 0).then_some(e.size),
        flags: if cached { IS_CACHED } else { 0 },
        version: etag
            .filter(|_| shown.with_version)
            .map(super::objects::version_of),
        checksum: etag
            .filter(|_| shown.with_checksum)
            .and_then(super::objects::checksum_of)
            .map(|(_, value)| value.to_owned()),
        name: e.key,
    }
}

async fn objects(call: &Call, bucket: &str, message: &ListMessage, shown: Shown) -> Result<Page> {
    let request = ListRequest {
        prefix: message.prefix.clone(),
        delimiter: (shown.flags & ONE_LEVEL != 0).then(|| "/".to_owned()),
        start_after: Some(message.start_after.clone()).filter(|s| !s.is_empty()),
        token: Some(message.continuation_token.clone()).filter(|t| !t.is_empty()),
        max_keys: page_size(message),
    };
    let page = call.app.engine.list(bucket, request).await?;
    let mut entries: Vec<Entry> = page
        .entries
        .into_iter()
        .map(|e| object_entry(call, bucket, e, shown))
        .collect();
    if shown.flags & NO_DIRS == 0 && !page.prefixes.is_empty() {
        entries.extend(page.prefixes.into_iter().map(|name| Entry {
            name,
            size: Some(0),
            flags: IS_DIR,
            version: None,
            checksum: None,
        }));
        entries.sort_by(|a, b| a.name.cmp(&b.name));
    }
    Ok(Page {
        uuid: uuid(call, message),
        continuation_token: page.next_token.unwrap_or_default(),
        entries,
        ..Page::default()
    })
}

/// Where a listing with members continues.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Resume {
    /// The last object of the page; empty if nothing was found yet.
    #[serde(rename = "k")]
    key: String,
    /// How many of its members were listed; `None`: all of them.
    #[serde(rename = "m")]
    members: Option<usize>,
    /// The origin's own token, if its page was listed to the end.
    #[serde(rename = "t", default, skip_serializing_if = "Option::is_none")]
    token: Option<String>,
}

impl Resume {
    fn encode(&self) -> String {
        URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).unwrap_or_default())
    }

    fn decode(token: &str) -> Result<Self> {
        let bad = || Error::invalid("value.continuation_token does not belong to this listing");
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(token).map_err(|_| bad())?)
            .map_err(|_| bad())
    }
}

async fn with_members(
    call: &Call,
    bucket: &str,
    message: &ListMessage,
    shown: Shown,
) -> Result<Page> {
    let size = page_size(message);
    let mut entries: Vec<Entry> = Vec::new();
    let finish = |entries: Vec<Entry>, resume: Option<Resume>| Page {
        uuid: uuid(call, message),
        continuation_token: resume.map(|r| r.encode()).unwrap_or_default(),
        entries,
        ..Page::default()
    };
    let mut at = Resume {
        key: message.start_after.clone(),
        ..Resume::default()
    };
    if !message.continuation_token.is_empty() {
        at = Resume::decode(&message.continuation_token)?;
        if !at.key.is_empty() && !at.key.starts_with(&message.prefix) {
            return Err(Error::invalid(
                "value.continuation_token does not belong to this listing",
            ));
        }
        if let Some(from) = at.members.take() {
            at.members =
                add_members(call, bucket, &at.key, from, size, shown, &mut entries).await?;
            if at.members.is_some() || entries.len() >= size {
                return Ok(finish(entries, Some(at)));
            }
        }
    }
    let mut empty_pages = 0;
    loop {
        let request = ListRequest {
            prefix: message.prefix.clone(),
            // An origin continues from its own token: a page may be empty and not the last.
            start_after: Some(at.key.clone()).filter(|k| !k.is_empty() && at.token.is_none()),
            token: at.token.clone(),
            max_keys: size - entries.len(),
            ..ListRequest::default()
        };
        let page = call.app.engine.list(bucket, request).await?;
        let (count, next) = (page.entries.len(), page.next_token);
        for (i, object) in page.entries.into_iter().enumerate() {
            at = Resume {
                key: object.key.clone(),
                ..Resume::default()
            };
            entries.push(object_entry(call, bucket, object, shown));
            if ArchiveKind::from_name(&at.key).is_some() {
                at.members =
                    add_members(call, bucket, &at.key, 0, size, shown, &mut entries).await?;
            }
            let is_last = i + 1 == count && next.is_none();
            if at.members.is_some() || (entries.len() >= size && !is_last) {
                return Ok(finish(entries, Some(at)));
            }
        }
        if next.is_none() {
            return Ok(finish(entries, None));
        }
        // The token says all. Where nothing was found yet, the key is where the listing was to
        // begin, which need not have the prefix.
        at = Resume {
            token: next,
            ..Resume::default()
        };
        empty_pages = if count == 0 { empty_pages + 1 } else { 0 };
        if empty_pages == EMPTY_PAGES_PER_ANSWER {
            return Ok(finish(entries, Some(at)));
        }
    }
}

/// Adds members from number `from` on until the page is full. Returns where it stopped, if before
/// the end.
async fn add_members(
    call: &Call,
    bucket: &str,
    key: &str,
    from: usize,
    size: usize,
    shown: Shown,
    entries: &mut Vec<Entry>,
) -> Result<Option<usize>> {
    // The names in an archive are part of its content. The client sends the token that says where
    // to continue, so it must not lead to other archives.
    if !call.policy.allows(Action::Read, bucket, key) {
        return Ok(None);
    }
    // The node lists a key that it does not take for a name (`a//b.tar`), and cannot read it.
    let Ok(name) = crate::object::name(bucket, key) else {
        return Ok(None);
    };
    let index = match call
        .app
        .engine
        .members(&name, &ReadOptions::default())
        .await
    {
        Ok(index) => index,
        // An object that only looks like an archive, or cannot be read as one, is listed as itself;
        // so is one that was removed since it was listed, or that the origin does not give out.
        Err(e)
            if matches!(
                e.kind(),
                ErrorKind::Corrupt
                    | ErrorKind::Unsupported
                    | ErrorKind::UnknownFormat
                    | ErrorKind::TooLarge
                    | ErrorKind::NotFound
                    | ErrorKind::PermissionDenied
                    | ErrorKind::RangeNotSatisfiable
            ) =>
        {
            return Ok(None);
        }
        Err(e) => return Err(e),
    };
    for number in from..index.len() {
        if entries.len() >= size {
            return Ok(Some(number));
        }
        if let Some(member) = index.member(number) {
            entries.push(Entry {
                name: format!("{key}/{}", member.name),
                size: (shown.flags & NAME_ONLY == 0).then_some(member.extent.size),
                flags: IS_MEMBER,
                version: None,
                checksum: None,
            });
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back() {
        let token = Resume {
            key: "a/ü.tar".into(),
            members: Some(7),
            token: None,
        }
        .encode();
        let resume = Resume::decode(&token).unwrap();
        assert_eq!((resume.key.as_str(), resume.members), ("a/ü.tar", Some(7)));
        assert!(Resume::decode("nonsense!").is_err());
    }

    #[test]
    fn a_page_has_so_many_entries() {
        let size = |pagesize| {
            page_size(&ListMessage {
                pagesize,
                ..ListMessage::default()
            })
        };
        assert_eq!((size(5), size(0), size(-1)), (5, 1000, 1000));
    }
}
