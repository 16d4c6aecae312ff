//! Which objects a cache request refers to: a prefix of a bucket, or a list of names.
//!
//! Invariant: whoever gets a selection from here is allowed to do what the request asks to all of
//! it.

use super::Call;
use crate::{config::Action, object};
use forebay_core::{Error, ObjectName, Result, limits};
use forebay_engine::{Engine, ListRequest};
use forebay_protocol::cache::Selection;

/// The objects that `call` names, after checking that the caller may administer them. A JSON body
/// describes them. A body of another type is a manifest; the rest then comes from the query.
pub async fn of(call: &Call) -> Result<Selection> {
    let body = call.read_body(super::CONTROL_BODY_MAX_BYTES).await?;
    let is_json = call
        .headers
        .get(http::header::CONTENT_TYPE)
        .is_none_or(|v| v.as_bytes().starts_with(b"application/json"));
    let mut selection: Selection = if is_json && !body.is_empty() {
        serde_json::from_slice(&body).map_err(|e| {
            Error::invalid(format!("the body of the request: {e}"))
                .hint("give \"bucket\", and one of \"prefix\", \"keys\" and \"manifest\"")
        })?
    } else {
        let manifest =
            std::str::from_utf8(&body).map_err(|_| Error::invalid("the manifest is not UTF-8"))?;
        Selection {
            manifest: (!manifest.is_empty()).then(|| manifest.to_owned()),
            ..Selection::default()
        }
    };
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
    permit(&selection, call)?;
    Ok(selection)
}

/// Checks all of it or refuses: changes to the cache need `admin`.
fn permit(selection: &Selection, call: &Call) -> Result<()> {
    match &selection.prefix {
        Some(prefix) => call.permit(Action::Admin, &selection.bucket, prefix),
        None if call.policy.is_full() => Ok(()),
        None => names(selection)?
            .iter()
            .try_for_each(|n| call.permit(Action::Admin, n.bucket(), n.key())),
    }
}

/// The names of a list or manifest.
pub fn names(selection: &Selection) -> Result<Vec<ObjectName>> {
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
        let line = line.strip_prefix("s3://").unwrap_or(line);
        let name = if selection.bucket.is_empty() {
            let (bucket, key) = line.split_once('/').ok_or_else(|| {
                Error::invalid(format!(
                    "line {} of the manifest: {:?} does not name a bucket",
                    i + 1,
                    forebay_core::name::shorten(line)
                ))
                .hint("write BUCKET/KEY, or give the bucket in the request")
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
