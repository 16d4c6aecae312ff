//! `/v1/datasets/<id>/filters`: which rows of a dataset an expression leaves.
//!
//! - `POST` with the document of an expression (`forebay_protocol::filter`) answers when the rows are
//!   known: what they are fetched by, and how many there are. With `?progress=true` the answer is JSON
//!   lines, one now and then while they are found out, and one at the end. When the client leaves, the
//!   computation goes on for whoever comes next.
//! - `GET …/filters/<filter>`: the rows, as `forebay_plan::RowSet` encodes them.
//!
//! Invariant: only who may read all files of the dataset, and what lists its labels, learns anything
//! about its rows.

use super::{
    Call,
    datasets::{Counted, dataset, line, of_type, wants_progress, with_progress},
    error::json_response,
};
use crate::body::AnswerBody;
use bytes::Bytes;
use forebay_core::{Error, Result, limits};
use forebay_dataset::filter::WatchedFilter;
use forebay_protocol::{
    ErrorDocument, LINES_CONTENT_TYPE,
    filter::{FilterEvent, Filtered},
};
use futures::FutureExt;
use http::{Response, StatusCode};
use std::sync::Arc;

pub async fn filter(call: &Call, id: &str) -> Result<Response<AnswerBody>> {
    // Permission is checked before the body is read.
    let dataset = dataset(call, id).await?;
    let body = call.read_body(limits::FILTER_BODY_MAX_BYTES).await?;
    let filters = call.app.filters.clone();
    let expr = filters.parse(body).await?;
    if wants_progress(call) {
        call.needs_chunks("a filter that tells its progress")?;
        let watched = Arc::new(WatchedFilter::default());
        let seen = watched.clone();
        let filtering = async move { filters.filter_parsed(&dataset, &expr, &seen).await };
        let lines = with_progress(filtering.boxed(), ended, move || {
            line(&FilterEvent::Progress(watched.now()))
        });
        return Ok(of_type(AnswerBody::stream(lines, None), LINES_CONTENT_TYPE));
    }
    let watched = WatchedFilter::default();
    let filtered = filters.filter_parsed(&dataset, &expr, &watched).await?;
    Ok(json_response(StatusCode::OK, &filtered))
}

fn ended(filtered: Result<Filtered>) -> FilterEvent {
    match filtered {
        Ok(filtered) => FilterEvent::Filtered(filtered),
        Err(e) => FilterEvent::Error(Box::new(ErrorDocument::of(&e))),
    }
}

pub async fn rows(call: &Call, id: &str, filter: &str) -> Result<Response<AnswerBody>> {
    let dataset = dataset(call, id).await?;
    let found = call.app.filters.found(&dataset, filter).await?;
    let bytes = found.rows().memory_bytes() as u64 + 64;
    let memory = call.app.engine.budget().try_hold(bytes)?;
    let encoded = tokio::task::spawn_blocking(move || Counted {
        bytes: found.rows().encode(),
        _memory: memory,
    })
    .await
    .map_err(|e| Error::internal("a set of rows could not be encoded").caused_by(e))?;
    let bytes = Bytes::from_owner(encoded);
    Ok(of_type(AnswerBody::full(bytes), "application/octet-stream"))
}
