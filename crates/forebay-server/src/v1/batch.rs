//! `/v1/ml/moss[/BUCKET]`: GetBatch, by GET with a body and by POST alike.

use super::{Call, not_offered};
use crate::{body::AnswerBody, config::Action};
use forebay_batch::{MayRead, RunOptions};
use forebay_core::{Error, Result};
use forebay_protocol::batch::{ENTRY_ERRORS_HEADER, ENTRY_ERRORS_PAX};
use http::{HeaderValue, Method, Response, header};

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
        pax_errors: call.headers.get(ENTRY_ERRORS_HEADER).is_some_and(|v| {
            v.as_bytes()
                .eq_ignore_ascii_case(ENTRY_ERRORS_PAX.as_bytes())
        }),
    };
    let default_bucket = Some(bucket).filter(|b| !b.is_empty());
    let answer = call.app.batcher.run(default_bucket, body, options).await?;
    let mut response = Response::new(AnswerBody::stream(answer.body, answer.content_length));
    let content_type = HeaderValue::from_str(&answer.content_type)
        .map_err(|e| Error::internal(format!("content type of a batch: {e}")))?;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, content_type);
    Ok(response)
}
