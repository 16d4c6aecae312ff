//! `POST /v1/datasets/streams?connection=k&of=K&from_step=S`: one connection of a push stream.
//!
//! The body is JSON ([`StreamRequest`]). The answer is an endless body of frames
//! ([`forebay_protocol::frame`]): steps, now and then a sign of life, and finally a proper end or
//! an error.

use super::{Call, datasets::allowed, not_offered};
use crate::body::AnswerBody;
use forebay_core::{Result, limits};
use forebay_protocol::{
    FRAMES_CONTENT_TYPE,
    stream::{Lane, StreamRequest},
};
use futures::StreamExt;
use http::{HeaderValue, Method, Response, header};

pub async fn streams(call: &Call, rest: &str) -> Result<Response<AnswerBody>> {
    if call.note.method != Method::POST || !rest.is_empty() {
        return Err(not_offered(call));
    }
    call.needs_chunks("a stream")?;
    let lane = Lane::parse(|name| call.query(name))?;
    let request = StreamRequest::parse(&call.read_body(limits::STREAM_BODY_MAX_BYTES).await?)?;
    let body = call.app.streams.open(lane, request, &allowed(call)).await?;
    let mut response = Response::new(AnswerBody::stream(body.boxed(), None));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static(FRAMES_CONTENT_TYPE),
    );
    Ok(response)
}
