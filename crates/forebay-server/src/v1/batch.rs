//! `/v1/ml/moss[/BUCKET]`: GetBatch, by GET with a body and by POST alike.
//!
//! With `coloc`, a node of a cluster sends a batch to the node that owns most of it, by a redirect.
//! A request is redirected once at most: its new URL says who did it ([`REDIRECTED_BY`]), and is
//! answered by whoever gets it.

use super::{Call, is_local, not_offered};
use crate::{body::AnswerBody, config::Action};
use forebay_batch::{Answered, Elsewhere, MayRead, RunOptions};
use forebay_core::{Error, Result};
use forebay_protocol::batch::{ENTRY_ERRORS_HEADER, ENTRY_ERRORS_PAX};
use http::{HeaderValue, Method, Response, StatusCode, header};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

/// The parameter by which AIStore's gateways say who has sent a request on.
const REDIRECTED_BY: &str = "pid";

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
        elsewhere: elsewhere(call),
        pax_errors: call.headers.get(ENTRY_ERRORS_HEADER).is_some_and(|v| {
            v.as_bytes()
                .eq_ignore_ascii_case(ENTRY_ERRORS_PAX.as_bytes())
        }),
    };
    let default_bucket = Some(bucket).filter(|b| !b.is_empty());
    let answer = match call.app.batcher.run(default_bucket, body, options).await? {
        Answered::Here(answer) => answer,
        Answered::Elsewhere(url) => return redirect(call, &url),
    };
    let mut response = Response::new(AnswerBody::stream(answer.body, answer.content_length));
    let content_type = HeaderValue::from_str(&answer.content_type)
        .map_err(|e| Error::internal(format!("content type of a batch: {e}")))?;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, content_type);
    Ok(response)
}

/// Who may be sent to another node. Not who has shown a key: HTTP clients do not show it to another
/// host when they follow a redirect. And not who is on the Unix socket, where what they may do can
/// be more.
fn elsewhere(call: &Call) -> Option<Elsewhere> {
    let joined = call.app.joined.as_ref()?;
    let stays = call.query(REDIRECTED_BY).is_some()
        || call.headers.contains_key(header::AUTHORIZATION)
        || is_local(call);
    let cluster = (!stays).then(|| joined.cluster.clone())?;
    Some(Elsewhere::new(move |entries| cluster.dominant(entries)))
}

/// The same request, at another node.
fn redirect(call: &Call, url: &str) -> Result<Response<AnswerBody>> {
    let joined = call.app.joined.as_ref();
    let me = joined.map_or(0, |joined| joined.cluster.me().node);
    let mut location = format!(
        "{}{}?{REDIRECTED_BY}={me:016x}",
        url.trim_end_matches('/'),
        call.path
    );
    let encoded = |text| utf8_percent_encode(text, NON_ALPHANUMERIC);
    for (name, value) in &call.query {
        location.push_str(&format!("&{}={}", encoded(name), encoded(value)));
    }
    let location = HeaderValue::from_str(&location)
        .map_err(|e| Error::internal(format!("the URL of another node: {e}")))?;
    let mut response = Response::new(AnswerBody::Empty);
    *response.status_mut() = StatusCode::TEMPORARY_REDIRECT;
    response.headers_mut().insert(header::LOCATION, location);
    Ok(response)
}
