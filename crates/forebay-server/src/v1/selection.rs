//! Which objects a cache request refers to: a prefix of a bucket, or a list of names.
//!
//! Invariant: whoever gets a selection from here is allowed to do what the request asks to all of
//! it.

use super::Call;
use crate::{config::Action, object};
use forebay_core::{Error, ObjectName, Result, limits};
use forebay_engine::{Engine, ListRequest};
use forebay_protocol::cache::Selection;

/// Shorter bodies are read on the runtime's threads.
const PARSED_HERE_BYTES: usize = 64 << 10;

/// What a request selects.
pub struct Selected {
    /// Without its list or manifest: `names` are what those say.
    pub selection: Selection,
    /// Empty if a prefix is given.
    pub names: Vec<ObjectName>,
}

/// The objects that `call` names, after checking that the caller may administer them. A JSON body
/// describes them. A body of another type is a manifest; the rest then comes from the query. There
/// may be a million names: long bodies are parsed, and their names checked, on threads for that.
pub async fn of(call: &Call) -> Result<Selected> {
    let body = call.read_body(super::CONTROL_BODY_MAX_BYTES).await?;
    let is_json = call
        .headers
        .get(http::header::CONTENT_TYPE)
        .is_none_or(|v| v.as_bytes().starts_with(b"application/json"));
    let short = body.len() < PARSED_HERE_BYTES;
    let mut selection = here_if(short, move || parse(&body, is_json)).await?;
    let text = |name: &str| {
        call.query(name)
            .filter(|v| !v.is_empty())
            .map(str::to_owned)
    };
    selection.bucket = text("bucket").unwrap_or(selection.bucket);
    // `prefix=` alone means the whole bucket.
    selection.prefix = call.query("prefix").map(str::to_owned).or(selection.prefix);
    selection.dry_run |= call
        .query("dry_run")
        .is_some_and(|v| matches!(v, "" | "1" | "true"));
    if let Some(text) = text("concurrency") {
        selection.concurrency = Some(
            text.parse()
                .map_err(|_| Error::invalid("concurrency is not a number"))?,
        );
    }
    if let Some(text) = text("mirror") {
        selection.mirror = Some(
            text.parse()
                .map_err(|_| Error::invalid("mirror is not a number").hint("1 to 3"))?,
        );
    }
    let named = selection.keys.is_some() || selection.manifest.is_some();
    if named && selection.prefix.is_some() {
        return Err(
            Error::invalid("both a prefix and a list of names are given").hint("give one of them"),
        );
    }
    if !named && selection.prefix.is_none() {
        return Err(Error::invalid("neither a prefix nor names are given")
            .hint("\"prefix\": \"\" means the whole bucket"));
    }
    if selection.prefix.is_some() || selection.keys.is_some() {
        forebay_core::name::validate_bucket(&selection.bucket)?;
    }
    call.note.set_name(
        &selection.bucket,
        selection.prefix.as_deref().unwrap_or_default(),
    );
    // Changes to the cache need `admin`, for all of it.
    let names = if let Some(prefix) = &selection.prefix {
        call.permit(Action::Admin, &selection.bucket, prefix)?;
        Vec::new()
    } else {
        let listed = Selection {
            bucket: selection.bucket.clone(),
            keys: selection.keys.take(),
            manifest: selection.manifest.take(),
            ..Selection::default()
        };
        let policy = call.policy.clone();
        let permitted = move || {
            let names = names(&listed)?;
            if !policy.is_full() {
                names
                    .iter()
                    .try_for_each(|n| policy.check(Action::Admin, n.bucket(), n.key()))?;
            }
            Ok(names)
        };
        here_if(short, permitted).await?
    };
    Ok(Selected { selection, names })
}

/// Does short work here, long work on a thread for that.
async fn here_if<T: Send + 'static>(
    short: bool,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    if short {
        return work();
    }
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Error::internal("the names of a request could not be read").caused_by(e))?
}

fn parse(body: &[u8], is_json: bool) -> Result<Selection> {
    if is_json && !body.is_empty() {
        return serde_json::from_slice(body).map_err(|e| {
            Error::invalid(format!("the body of the request: {e}"))
                .hint("give \"bucket\", and one of \"prefix\", \"keys\" and \"manifest\"")
        });
    }
    let manifest =
        std::str::from_utf8(body).map_err(|_| Error::invalid("the manifest is not UTF-8"))?;
    Ok(Selection {
        manifest: (!manifest.is_empty()).then(|| manifest.to_owned()),
        ..Selection::default()
    })
}

/// The names of a list or manifest.
fn names(selection: &Selection) -> Result<Vec<ObjectName>> {
    let mut names = Vec::new();
    for (i, key) in selection.keys.iter().flatten().enumerate() {
        names.push(
            object::name(&selection.bucket, key).map_err(|e| e.context(format!("keys[{i}]")))?,
        );
    }
    for (i, line) in selection
        .manifest
        .iter()
        .flat_map(|m| m.lines())
        .enumerate()
    {
        let line = line.trim_end_matches('\r');
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let line = forebay_core::name::without_scheme(line);
        let name = if selection.bucket.is_empty() {
            let (bucket, key) = line.split_once('/').ok_or_else(|| {
                Error::invalid(format!(
                    "line {} of the manifest: {:?} does not name a bucket",
                    i + 1,
                    forebay_core::name::shorten(line)
                ))
                .hint(
                    "write BUCKET/KEY on each line; in JSON, \"bucket\" may name one for all of them",
                )
            })?;
            object::name(bucket, key)
        } else {
            object::name(&selection.bucket, line)
        };
        names.push(name.map_err(|e| e.context(format!("line {} of the manifest", i + 1)))?);
    }
    Ok(names)
}

/// One page of a prefix, and the token for the next.
pub async fn page(
    selection: &Selection,
    engine: &Engine,
    token: Option<String>,
) -> Result<(Vec<(ObjectName, u64)>, Option<String>)> {
    let request = ListRequest {
        prefix: selection.prefix.clone().unwrap_or_default(),
        token,
        max_keys: limits::LIST_PAGE_MAX_KEYS,
        ..ListRequest::default()
    };
    let page = engine.list(&selection.bucket, request).await?;
    // Keys that are not valid names here (`a//b`) cannot be read through this node either.
    let names = page
        .entries
        .iter()
        .filter_map(|e| {
            Some((
                ObjectName::new(selection.bucket.as_str(), e.key.as_str()).ok()?,
                e.size,
            ))
        })
        .collect();
    Ok((names, page.next_token))
}
