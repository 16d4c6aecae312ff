//! The summary of a bucket: how many objects it has and how large they are, at its origin and in
//! the cache.
//!
//! AIStore runs a job for it, and its clients ask in two steps: the first answer is 202 with the
//! job's id, and the second request, under that id, returns the result. Here the first step only
//! makes an id and the second lists the bucket, so nothing is held in between. The id of `HEAD`
//! contains the prefix, which the second request leaves out.
//!
//! A summary is computed within its request: a bucket of more than [`OBJECTS_MAX`] objects is
//! refused.

use super::{
    Call,
    buckets::{describe, exists},
    done,
    error::json_response,
    provider::Provider,
};
use crate::{body::AnswerBody, config::Action, object};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use forebay_core::{Error, Result, limits, name::validate_bucket};
use forebay_engine::ListRequest;
use http::{HeaderValue, Response, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The most objects in one summary: a few hundred requests to the origin.
const OBJECTS_MAX: u64 = 200_000;
/// What ids of `HEAD` begin with.
const ID_PREFIX: &str = "summ-";

/// The parameters of the request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Message {
    uuid: String,
    prefix: String,
    /// Only objects in the cache.
    cached: bool,
}

#[derive(Debug, Default)]
struct Sums {
    objects: u64,
    bytes: u64,
    smallest: Option<u64>,
    largest: u64,
    cached_objects: u64,
    cached_bytes: u64,
}

/// A counter as AIStore writes it: a number as a string.
fn text(n: u64) -> Value {
    n.to_string().into()
}

impl Sums {
    /// In AIStore's fields. A directory's objects are all "present", and none of them is remote.
    fn result(&self, bucket: &str, provider: &str, local: bool) -> Value {
        let (remote, remote_bytes) = match local {
            true => (0, 0),
            false => (self.objects, self.bytes),
        };
        json!({
            "name": bucket,
            "provider": provider,
            "namespace": {"uuid": "", "name": ""},
            "ObjCount": {
                "obj_count_present": text(self.cached_objects),
                "obj_count_remote": text(remote),
            },
            "ObjSize": {
                "obj_min_size": self.smallest.unwrap_or(0),
                "obj_avg_size": self.bytes.checked_div(self.objects).unwrap_or(0),
                "obj_max_size": self.largest,
            },
            "TotalSize": {
                "size_on_disk": text(self.cached_bytes),
                "size_all_present_objs": text(self.cached_bytes),
                "size_all_remote_objs": text(remote_bytes),
                "total_disks_size": text(0),
            },
            "used_pct": 0,
            "is_present": true,
        })
    }
}

/// `GET /v1/buckets/BUCKET` with the action `summary-bck`.
pub async fn summary(call: &Call, bucket: &str, value: &Value) -> Result<Response<AnswerBody>> {
    let message = match value {
        Value::Null => Message::default(),
        value => Message::deserialize(value).map_err(|e| Error::invalid(format!("value: {e}")))?,
    };
    call.permit(Action::List, bucket, &message.prefix)?;
    if message.uuid.is_empty() {
        exists(call, bucket).await?;
        let id = format!("{ID_PREFIX}{}", call.note.id);
        return Ok(json_response(StatusCode::ACCEPTED, &id));
    }
    let (sums, local) = sum(call, bucket, &message.prefix, message.cached).await?;
    let result = sums.result(bucket, call.provider(), local);
    Ok(json_response(StatusCode::OK, &[result]))
}

/// What a summary is asked for, encoded in the id of its second step.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Asked {
    prefix: String,
    all: bool,
}

fn id_of(asked: &Asked) -> String {
    let text = serde_json::to_vec(asked).unwrap_or_default();
    format!("{ID_PREFIX}{}", URL_SAFE_NO_PAD.encode(text))
}

fn asked_by(id: &str) -> Option<Asked> {
    let encoded = id.strip_prefix(ID_PREFIX)?;
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(encoded).ok()?).ok()
}

/// `HEAD /v1/buckets/BUCKET[/PREFIX]` with `bsumm_remote`: properties, and a summary in a header.
pub async fn info(
    call: &Call,
    bucket: &str,
    prefix: &str,
    uuid: Option<&str>,
) -> Result<Response<AnswerBody>> {
    let truth = |v: &str| matches!(v.to_ascii_lowercase().as_str(), "true" | "1" | "yes" | "on");
    let Some(uuid) = uuid else {
        let asked = Asked {
            prefix: prefix.to_owned(),
            all: call.query("bsumm_remote").is_some_and(truth),
        };
        call.permit(Action::List, bucket, prefix)?;
        exists(call, bucket).await?;
        // 1 and 3 are "no properties" and "present, no properties": there is nothing to wait for.
        let wants_none = matches!(call.query("presence"), Some("1" | "3"));
        let mut response = done(match wants_none {
            true => StatusCode::OK,
            false => StatusCode::ACCEPTED,
        });
        describe(call, bucket, response.headers_mut());
        if let Ok(id) = HeaderValue::from_str(&id_of(&asked)) {
            response.headers_mut().insert("ais-xaction-id", id);
        }
        return Ok(response);
    };
    let asked = asked_by(uuid).ok_or_else(|| {
        Error::invalid("the uuid does not belong to a summary").hint("start without one")
    })?;
    call.permit(Action::List, bucket, &asked.prefix)?;
    let (sums, local) = sum(call, bucket, &asked.prefix, !asked.all).await?;
    let result = sums.result(bucket, call.provider(), local);
    let mut response = done(StatusCode::OK);
    describe(call, bucket, response.headers_mut());
    if let Ok(value) = HeaderValue::from_str(&result.to_string()) {
        response.headers_mut().insert("ais-bucket-summ", value);
    }
    Ok(response)
}

/// Lists all objects, or only the cached ones, and adds them up. The second result says whether the
/// bucket is a directory.
async fn sum(call: &Call, bucket: &str, prefix: &str, cached_only: bool) -> Result<(Sums, bool)> {
    validate_bucket(bucket)?;
    let engine = &call.app.engine;
    let local = Provider::of(engine.buckets().as_ref(), bucket) == Provider::Ais;
    let (mut sums, mut token, mut seen) = (Sums::default(), None, 0);
    loop {
        let request = ListRequest {
            prefix: prefix.to_owned(),
            token,
            max_keys: limits::LIST_PAGE_MAX_KEYS,
            ..ListRequest::default()
        };
        let page = engine.list(bucket, request).await?;
        seen += page.entries.len() as u64;
        if seen > OBJECTS_MAX {
            return Err(Error::unsupported(format!(
                "the bucket has more than {OBJECTS_MAX} objects: its summary would be a job, and \
                 jobs are not offered here"
            ))
            .hint("ask for the summary of a prefix, or list it"));
        }
        for entry in &page.entries {
            // Only those who may read an object learn whether it is in the cache.
            let cached = local
                || (call.policy.allows(Action::Read, bucket, &entry.key)
                    && object::name(bucket, &entry.key).is_ok_and(|n| engine.is_cached(&n)));
            if cached {
                sums.cached_objects += 1;
                sums.cached_bytes += entry.size;
            }
            if cached || !cached_only {
                sums.objects += 1;
                sums.bytes += entry.size;
                sums.smallest = Some(sums.smallest.unwrap_or(entry.size).min(entry.size));
                sums.largest = sums.largest.max(entry.size);
            }
        }
        token = page.next_token;
        if token.is_none() {
            return Ok((sums, local));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_step_knows_what_the_first_was_asked() {
        let asked = Asked {
            prefix: "a/ü".into(),
            all: true,
        };
        assert_eq!(asked_by(&id_of(&asked)), Some(asked));
        assert_eq!(asked_by("summ-!"), None);
        assert_eq!(asked_by("x"), None);
    }
}
