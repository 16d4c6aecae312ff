//! `/v1/ml/moss[/BUCKET]`: GetBatch, by GET with a body and by POST alike.

use super::{Call, is_local, not_offered};
use crate::{body::AnswerBody, config::Action};
use forebay_batch::{MayRead, Owners, Ran, RunOptions};
use forebay_core::{Error, Result};
use forebay_protocol::batch::{ENTRY_ERRORS_HEADER, ENTRY_ERRORS_PAX};
use http::{HeaderValue, Method, Response, StatusCode, header};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

/// What is in the query of a request that another node sent here: it is answered here.
const SENT_HERE: &str = "forebay_sent";

pub async fn moss(call: &Call, bucket: &str) -> Result<Response<AnswerBody>> {
    if !matches!(call.note.method, Method::GET | Method::POST) {
        return Err(not_offered(call));
    }
    call.note.set_name(bucket, "");
    call.needs_chunks("a batch")?;
    let body = call
        .read_body(call.app.batcher.config().max_body_bytes)
        .await?;
    let policy = call.policy.clone();
    let options = RunOptions {
        may_read: (!policy.is_full()).then(|| {
            MayRead::new(move |name| policy.check(Action::Read, name.bucket(), name.key()))
        }),
        coloc: call.query("coloc").map(str::to_owned),
        owners: owners(call),
        pax_errors: call.headers.get(ENTRY_ERRORS_HEADER).is_some_and(|v| {
            v.as_bytes()
                .eq_ignore_ascii_case(ENTRY_ERRORS_PAX.as_bytes())
        }),
    };
    let default_bucket = Some(bucket).filter(|b| !b.is_empty());
    let batcher = &call.app.batcher;
    let ran = batcher.run(default_bucket, body.clone(), options.clone());
    let answer = match ran.await? {
        Ran::Here(answer) => answer,
        Ran::There(node) => match sent_on(call, bucket, node) {
            Some(response) => return Ok(response),
            None => {
                let options = RunOptions {
                    owners: None,
                    ..options
                };
                batcher.run(default_bucket, body, options).await?.here()?
            }
        },
    };
    let mut response = Response::new(AnswerBody::stream(answer.body, answer.content_length));
    let content_type = HeaderValue::from_str(&answer.content_type)
        .map_err(|e| Error::internal(format!("content type of a batch: {e}")))?;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, content_type);
    Ok(response)
}

/// Which other nodes a request with `coloc` may be sent to: those that answer this one. Whoever came
/// over the Unix socket may have no key that opens others.
fn owners(call: &Call) -> Option<Owners> {
    let joined = call.app.joined.as_ref()?;
    if is_local(call) || call.query(SENT_HERE).is_some() {
        return None;
    }
    let cluster = joined.cluster.clone();
    let me = cluster.me().node;
    Some(Owners::new(move |name, at| {
        let owner = cluster.owner(name, at)?;
        (owner != me && cluster.answers(owner)).then_some(owner)
    }))
}

/// 307 to another node, which answers there; `None` if nobody knows where clients reach it.
fn sent_on(call: &Call, bucket: &str, node: u64) -> Option<Response<AnswerBody>> {
    let map = call.app.joined.as_ref()?.cluster.map();
    let url = &map.members.iter().find(|m| m.id == node)?.url;
    if url.is_empty() {
        return None;
    }
    let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let mut location = format!("{}/v1/ml/moss", url.trim_end_matches('/'));
    if !bucket.is_empty() {
        location = format!("{location}/{}", encoded(bucket));
    }
    location = format!("{location}?{SENT_HERE}=1");
    for (name, value) in &call.query {
        location = format!("{location}&{}={}", encoded(name), encoded(value));
    }
    let mut response = Response::new(AnswerBody::full(""));
    *response.status_mut() = StatusCode::TEMPORARY_REDIRECT;
    let location = HeaderValue::from_str(&location).ok()?;
    response.headers_mut().insert(header::LOCATION, location);
    Some(response)
}
