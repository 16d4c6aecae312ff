//! `/v1/datasets/<id>/keys?column=…`: which rows have a key in a column.
//!
//! - `POST` without a body answers when the column is indexed, as JSON: how many rows have a key. With
//!   `?progress=true` the answer is JSON lines, one now and then while it is indexed, and one at the
//!   end. When the client leaves, the indexing goes on for whoever comes next.
//! - `POST` with a JSON list of keys (`forebay_protocol::keys`): for each of them the first row that
//!   has it, as little-endian `u64`, 2^64 - 1 for none; with `?all=true` instead all rows that have one
//!   of them, as pairs of the key's number in the list and a row. A column that is not indexed is 404.
//!
//! Rows themselves, by their keys: `rows.rs`.
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
use forebay_dataset::{
    Dataset,
    keys::{NO_ROW, WatchedKeys},
};
use forebay_protocol::{
    ErrorDocument, LINES_CONTENT_TYPE,
    keys::{Indexed, KeysEvent},
};
use futures::FutureExt;
use http::{Response, StatusCode};
use std::sync::Arc;

pub async fn keys(call: &Call, id: &str) -> Result<Response<AnswerBody>> {
    // Permission is checked before the body is read.
    let dataset = dataset(call, id).await?;
    let column = column(call, "column")?.ok_or_else(|| {
        Error::invalid("the query parameter `column` is missing").hint("column=__key__")
    })?;
    let body = call.read_body(limits::KEYS_BODY_MAX_BYTES).await?;
    let of = call.app.keys.clone();
    if !body.is_empty() {
        let found = match call.query("all").is_some_and(|v| v == "true" || v == "1") {
            true => of.all(&dataset, &column, body).await?,
            false => of.first(&dataset, &column, body).await?,
        };
        let memory = call.app.engine.budget();
        let memory = memory.try_hold((8 * found.numbers.len()).max(1) as u64)?;
        let answer = Counted {
            bytes: (found.numbers.iter())
                .flat_map(|n| n.to_le_bytes())
                .collect(),
            _memory: memory,
        };
        let body = AnswerBody::full(Bytes::from_owner(answer));
        return Ok(of_type(body, "application/octet-stream"));
    }
    if wants_progress(call) {
        call.needs_chunks("an index that tells its progress")?;
        let watched = Arc::new(WatchedKeys::default());
        let seen = watched.clone();
        let indexing = async move { of.index(&dataset, &column, &seen).await };
        let lines = with_progress(indexing.boxed(), ended, move || {
            line(&KeysEvent::Progress(watched.now()))
        });
        return Ok(of_type(AnswerBody::stream(lines, None), LINES_CONTENT_TYPE));
    }
    let indexed = of.index(&dataset, &column, &WatchedKeys::default()).await?;
    Ok(json_response(StatusCode::OK, &indexed))
}

fn ended(indexed: Result<Indexed>) -> KeysEvent {
    match indexed {
        Ok(indexed) => KeysEvent::Indexed(indexed),
        Err(e) => KeysEvent::Error(Box::new(ErrorDocument::of(&e))),
    }
}

/// The column that a query parameter names.
pub(super) fn column(call: &Call, parameter: &str) -> Result<Option<String>> {
    let named: Vec<&String> = (call.query.iter())
        .filter(|(name, _)| name == parameter)
        .map(|(_, value)| value)
        .collect();
    match named[..] {
        [] => Ok(None),
        [one] => Ok(Some(one.clone())),
        _ => Err(
            Error::invalid(format!("{parameter}= is there more than once"))
                .hint("keys are those of one column"),
        ),
    }
}

/// The rows that have the keys of a body.
///
/// # Errors
/// `NotFound` for keys that no row has, and for a column that is not indexed.
pub(super) async fn rows_of(
    call: &Call,
    dataset: &Arc<Dataset>,
    column: &str,
    body: Bytes,
) -> Result<Vec<u64>> {
    let found = call.app.keys.first(dataset, column, body).await?.numbers;
    if found.len() > limits::ROWS_PER_REQUEST_MAX {
        return Err(super::rows::too_many());
    }
    let Some(first) = found.iter().position(|row| *row == NO_ROW) else {
        return Ok(found);
    };
    let missing = found.iter().filter(|row| **row == NO_ROW).count();
    Err(Error::not_found(format!(
        "no row has key {first} of the {} that were asked for, counted from 0, in column {column:?}; {missing} are missing in all",
        found.len()
    ))
    .hint("keys are compared exactly, with their type: \"17\" is neither 17 nor \"017\""))
}
