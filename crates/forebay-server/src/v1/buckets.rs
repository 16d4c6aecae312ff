//! `/v1/buckets[/BUCKET]`: listings, and making and removing buckets.
//!
//! A listing with the archive flag shows each archive's members after the archive itself, as
//! `ARCHIVE/MEMBER`. Such a page may end inside an archive, so its token says after which member to
//! go on; it holds nothing on the node.

use super::{Call, done, error::json_response, msgpack, not_offered};
use crate::{body::AnswerBody, config::Action};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use forebay_core::{Error, Result, limits, name::validate_bucket};
use forebay_engine::{ListEntry, ListRequest, ReadOptions};
use forebay_format::ArchiveKind;
use http::{HeaderValue, Method, Response, StatusCode, header};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

const MSGPACK: &str = "application/msgpack";
/// Bits of `flags` in a request.
const ARCHIVES: u64 = 1 << 3;
const NO_RECURSION: u64 = 1 << 11;
const NO_DIRS: u64 = 1 << 13;
const NOT_OFFERED_FLAGS: u64 = (1 << 1) | (1 << 2) | (1 << 9) | (1 << 12) | (1 << 15);
/// Bits of `flags` in an entry.
const IN_CACHE: u16 = 1 << 6;
const IN_ARCHIVE: u16 = 1 << 5;
const IS_DIR: u16 = 1 << 10;

pub struct Entry {
    pub name: String,
    pub size: u64,
    pub flags: u16,
    pub version: Option<String>,
}

pub struct Listing {
    pub uuid: String,
    pub token: String,
    pub entries: Vec<Entry>,
}

pub async fn buckets(call: &Call, bucket: &str, rest: &str) -> Result<Response<AnswerBody>> {
    call.note.set_name(bucket, "");
    if !rest.is_empty() && call.note.method == Method::HEAD {
        return Err(Error::unsupported(
            "the summary of a prefix is not offered here",
        ));
    }
    match (call.note.method.clone(), bucket) {
        (Method::GET, "") => list_buckets(call).await,
        (Method::GET, bucket) => get(call, bucket).await,
        (Method::HEAD, bucket) if !bucket.is_empty() => head(call, bucket).await,
        (Method::POST, bucket) if !bucket.is_empty() => post(call, bucket).await,
        (Method::DELETE, bucket) if !bucket.is_empty() => remove(call, bucket).await,
        _ => Err(not_offered(call)),
    }
}

/// The buckets in which something is allowed to the sender.
async fn list_buckets(call: &Call) -> Result<Response<AnswerBody>> {
    let message = call.json().await?;
    expect_action(&message, &["list", ""])?;
    let mut names = call.app.engine.buckets().list().await?;
    names.retain(|name| call.policy.knows(name));
    let entry = |name: &String| json!({"name": name, "provider": call.provider(), "namespace": {"uuid": "", "name": ""}});
    Ok(json_response(
        StatusCode::OK,
        &names.iter().map(entry).collect::<Vec<_>>(),
    ))
}

fn expect_action(message: &Value, known: &[&str]) -> Result<()> {
    let action = message["action"].as_str().unwrap_or_default();
    if known.contains(&action) {
        Ok(())
    } else {
        Err(Error::unsupported(format!(
            "the action {action:?} is not offered here"
        )))
    }
}

async fn head(call: &Call, bucket: &str) -> Result<Response<AnswerBody>> {
    if call.query("bsumm_remote").is_some() || call.query("uuid").is_some_and(|u| !u.is_empty()) {
        return Err(
            Error::unsupported("the summary of a bucket is not offered here").hint("list it"),
        );
    }
    exists(call, bucket).await?;
    let rule = call.app.engine.rule(bucket);
    let props = json!({
        "provider": call.provider(),
        "backend_bck": {"name": "", "provider": ""},
        "versioning": {"enabled": false},
        "mirror": {"enabled": false, "copies": 1},
        "ec": {"enabled": false},
        "checksum": {"type": "none"},
        "forebay": {"cache": rule.cache, "freshness": format!("{:?}", crate::config::FreshnessRule(rule.freshness))},
    });
    let mut response = done(StatusCode::OK);
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&props.to_string()) {
        headers.insert("ais-bucket-props", value);
    }
    headers.insert("ais-present", HeaderValue::from_static("true"));
    Ok(response)
}

/// Asks the origin, since a bucket that is configured may not be there.
async fn exists(call: &Call, bucket: &str) -> Result<()> {
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
    // Some clients send the request for a listing by POST.
    if message["action"] == "list" {
        return list(call, bucket, &message["value"]).await;
    }
    expect_action(&message, &["create-bck"])?;
    call.permit(Action::Admin, bucket, "")?;
    validate_bucket(bucket)?;
    call.app.engine.buckets().create(bucket).await?;
    Ok(done(StatusCode::OK))
}

async fn remove(call: &Call, bucket: &str) -> Result<Response<AnswerBody>> {
    let message = call.json().await?;
    expect_action(&message, &["destroy-bck"])?;
    call.permit(Action::Admin, bucket, "")?;
    validate_bucket(bucket)?;
    call.app.engine.buckets().remove(bucket).await?;
    Ok(done(StatusCode::OK))
}

async fn get(call: &Call, bucket: &str) -> Result<Response<AnswerBody>> {
    let message = call.json().await?;
    expect_action(&message, &["list", ""])?;
    list(call, bucket, &message["value"]).await
}

/// What a listing asks for.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ListMessage {
    prefix: String,
    pagesize: i64,
    uuid: String,
    continuation_token: String,
    start_after: String,
    /// A number, or a number in text.
    flags: Value,
    props: String,
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
    let flags = match &message.flags {
        Value::Null => 0,
        Value::Number(n) => n
            .as_u64()
            .ok_or_else(|| Error::invalid("value.flags is not a number of flags"))?,
        Value::String(text) if text.is_empty() => 0,
        Value::String(text) => text
            .parse()
            .map_err(|_| Error::invalid("value.flags is not a number of flags"))?,
        _ => return Err(Error::invalid("value.flags is not a number of flags")),
    };
    if flags & NOT_OFFERED_FLAGS != 0 {
        return Err(Error::unsupported(format!(
            "the listing flags {flags:#x} ask for something that is not offered here"
        )));
    }
    let page = if flags & ARCHIVES != 0 {
        with_members(call, bucket, &message).await?
    } else {
        objects(call, bucket, &message, flags).await?
    };
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
    let entry = |e: &Entry| json!({"name": e.name, "size": e.size.to_string(), "flags": e.flags});
    let entries: Vec<Value> = page.entries.iter().map(entry).collect();
    Ok(json_response(
        StatusCode::OK,
        &json!({"uuid": page.uuid, "continuation_token": page.token, "entries": entries, "flags": 0}),
    ))
}

fn page_size(message: &ListMessage) -> usize {
    match usize::try_from(message.pagesize) {
        Ok(0) | Err(_) => limits::LIST_PAGE_MAX_KEYS,
        Ok(n) => n.min(limits::LIST_PAGE_MAX_KEYS),
    }
}

fn uuid(call: &Call, message: &ListMessage) -> String {
    // It names the listing; all that a listing needs is in its token.
    if message.uuid.is_empty() {
        call.note.id.to_string()
    } else {
        message.uuid.clone()
    }
}

fn object_entry(call: &Call, bucket: &str, e: ListEntry, with_version: bool) -> Entry {
    // What lies in the cache is told to those who may read it.
    let readable = call.policy.allows(Action::Read, bucket, &e.key);
    let cached = readable
        && crate::object::name(bucket, &e.key).is_ok_and(|n| call.app.engine.is_cached(&n));
    let version = if with_version {
        e.etag.map(|t| t.trim_matches('"').to_owned())
    } else {
        None
    };
    Entry {
        name: e.key,
        size: e.size,
        flags: if cached { IN_CACHE } else { 0 },
        version,
    }
}

async fn objects(call: &Call, bucket: &str, message: &ListMessage, flags: u64) -> Result<Listing> {
    let request = ListRequest {
        prefix: message.prefix.clone(),
        delimiter: (flags & NO_RECURSION != 0).then(|| "/".to_owned()),
        start_after: Some(message.start_after.clone()).filter(|s| !s.is_empty()),
        token: Some(message.continuation_token.clone()).filter(|t| !t.is_empty()),
        max_keys: page_size(message),
    };
    let page = call.app.engine.list(bucket, request).await?;
    let with_version = message.props.split(',').any(|p| p.trim() == "version");
    let mut entries: Vec<Entry> = page
        .entries
        .into_iter()
        .map(|e| object_entry(call, bucket, e, with_version))
        .collect();
    if flags & NO_DIRS == 0 && !page.prefixes.is_empty() {
        entries.extend(page.prefixes.into_iter().map(|name| Entry {
            name,
            size: 0,
            flags: IS_DIR,
            version: None,
        }));
        entries.sort_by(|a, b| a.name.cmp(&b.name));
    }
    Ok(Listing {
        uuid: uuid(call, message),
        token: page.next_token.unwrap_or_default(),
        entries,
    })
}

/// Where a listing with members goes on.
#[derive(Serialize, Deserialize)]
struct Resume {
    /// The last object of the page.
    #[serde(rename = "k")]
    key: String,
    /// Its members that were listed; `None`: all of them.
    #[serde(rename = "m")]
    members: Option<usize>,
}

impl Resume {
    fn encode(&self) -> String {
        URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).unwrap_or_default())
    }

    fn decode(token: &str) -> Result<Self> {
        let bad = || Error::invalid("value.continuation_token is not one of this listing");
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(token).map_err(|_| bad())?)
            .map_err(|_| bad())
    }
}

async fn with_members(call: &Call, bucket: &str, message: &ListMessage) -> Result<Listing> {
    let size = page_size(message);
    let mut entries: Vec<Entry> = Vec::new();
    let mut after = Some(message.start_after.clone()).filter(|s| !s.is_empty());
    let finish = |entries: Vec<Entry>, resume: Option<Resume>| Listing {
        uuid: uuid(call, message),
        token: resume.map(|r| r.encode()).unwrap_or_default(),
        entries,
    };
    if !message.continuation_token.is_empty() {
        let resume = Resume::decode(&message.continuation_token)?;
        if !resume.key.starts_with(&message.prefix) {
            return Err(Error::invalid(
                "value.continuation_token is not one of this listing",
            ));
        }
        if let Some(from) = resume.members
            && let Some(reached) =
                add_members(call, bucket, &resume.key, from, size, &mut entries).await?
        {
            return Ok(finish(
                entries,
                Some(Resume {
                    key: resume.key,
                    members: Some(reached),
                }),
            ));
        }
        if entries.len() >= size {
            return Ok(finish(
                entries,
                Some(Resume {
                    key: resume.key,
                    members: None,
                }),
            ));
        }
        after = Some(resume.key);
    }
    while entries.len() < size {
        let request = ListRequest {
            prefix: message.prefix.clone(),
            start_after: after.clone(),
            max_keys: size - entries.len(),
            ..ListRequest::default()
        };
        let page = call.app.engine.list(bucket, request).await?;
        let more = page.next_token.is_some();
        let last = page.entries.len();
        for (i, object) in page.entries.into_iter().enumerate() {
            let key = object.key.clone();
            entries.push(object_entry(call, bucket, object, false));
            if ArchiveKind::from_name(&key).is_some()
                && let Some(reached) =
                    add_members(call, bucket, &key, 0, size, &mut entries).await?
            {
                return Ok(finish(
                    entries,
                    Some(Resume {
                        key,
                        members: Some(reached),
                    }),
                ));
            }
            if entries.len() >= size && (more || i + 1 < last) {
                return Ok(finish(entries, Some(Resume { key, members: None })));
            }
            after = Some(key);
        }
        if !more {
            break;
        }
    }
    Ok(finish(entries, None))
}

/// Adds members from number `from` on until the page is full; returns where it stopped, if before
/// the end.
async fn add_members(
    call: &Call,
    bucket: &str,
    key: &str,
    from: usize,
    size: usize,
    entries: &mut Vec<Entry>,
) -> Result<Option<usize>> {
    // The names in an archive are its content. A token, which says where to go on, is what the
    // client sends: it leads nowhere else.
    if !call.policy.allows(Action::Read, bucket, key) {
        return Ok(None);
    }
    let name = crate::object::name(bucket, key)?;
    let index = match call
        .app
        .engine
        .members(&name, &ReadOptions::default())
        .await
    {
        Ok(index) => index,
        // An object that only looks like an archive is listed as itself.
        Err(e) if e.kind() == forebay_core::ErrorKind::Corrupt => return Ok(None),
        Err(e) => return Err(e),
    };
    for number in from..index.len() {
        if entries.len() >= size {
            return Ok(Some(number));
        }
        if let Some(member) = index.member(number) {
            entries.push(Entry {
                name: format!("{key}/{}", member.name),
                size: member.extent.size,
                flags: IN_ARCHIVE,
                version: None,
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
        }
        .encode();
        let resume = Resume::decode(&token).unwrap();
        assert_eq!((resume.key.as_str(), resume.members), ("a/ü.tar", Some(7)));
        assert!(Resume::decode("nonsense!").is_err());
    }

    #[test]
    fn flags_come_as_numbers_and_as_text() {
        let message: ListMessage = serde_json::from_value(
            json!({"prefix": "a", "pagesize": 5, "flags": "8", "target": ""}),
        )
        .unwrap();
        assert_eq!(
            (message.flags.as_str(), page_size(&message)),
            (Some("8"), 5)
        );
        assert_eq!(
            page_size(&ListMessage {
                pagesize: -1,
                ..ListMessage::default()
            }),
            1000
        );
    }
}
