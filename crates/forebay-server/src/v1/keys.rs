//! `/v1/datasets/<id>/keys?column=…`: which rows have a key in a column.
//!
//! - `POST` without a body answers when the column is indexed, as JSON: how many rows have a key. With
//!   `?progress=true` the answer is JSON lines, one now and then while it is indexed, and one at the
//!   end. When the client leaves, the indexing goes on for whoever comes next.
//! - `POST` with a JSON list of keys (`forebay_protocol::keys`): for each of them the first row that
//!   has it, as little-endian `u64`, 2^64 - 1 for none; with `?all=true` instead all rows that have one
//!   of them, ascending. A column that is not indexed yet is indexed before.
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
use forebay_core::{Error, Reservation, Result, limits};
use forebay_dataset::{Dataset, keys::WatchedKeys};
use forebay_protocol::{
    ErrorDocument, LINES_CONTENT_TYPE,
    keys::{self, Indexed, KeyHash, KeysEvent},
};
use futures::FutureExt;
use http::{Response, StatusCode};
use std::sync::Arc;

/// What stands for a key that no row has.
const NO_ROW: u64 = u64::MAX;

pub async fn keys(call: &Call, id: &str) -> Result<Response<AnswerBody>> {
    // Permission is checked before the body is read.
    let dataset = dataset(call, id).await?;
    let column = column(call, "column")?.ok_or_else(|| {
        Error::invalid("the query parameter `column` is missing").hint("column=__key__")
    })?;
    let body = call.read_body(limits::KEYS_BODY_MAX_BYTES).await?;
    let of = call.app.keys.clone();
    if !body.is_empty() {
        let (wanted, _memory) = read(call, body).await?;
        let rows = match call.query("all").is_some_and(|v| v == "true" || v == "1") {
            true => of.all(&dataset, &column, wanted).await?,
            false => {
                let first = of.first(&dataset, &column, wanted).await?;
                first.into_iter().map(|row| row.unwrap_or(NO_ROW)).collect()
            }
        };
        let memory = call.app.engine.budget();
        let memory = memory.try_hold((rows.len() * size_of::<u64>()).max(1) as u64)?;
        let answer = Counted {
            bytes: rows.iter().flat_map(|row| row.to_le_bytes()).collect(),
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

/// The keys of a body, within the memory budget.
pub(super) async fn read(call: &Call, body: Bytes) -> Result<(Vec<KeyHash>, Reservation)> {
    // A key takes two bytes or more, and 16 when it is read; a list grows by doubling.
    let bytes = (body.len() as u64 / 2 * 16).min(2 * 16 * limits::KEYS_MAX as u64);
    let memory = call.app.engine.budget().try_hold(bytes.max(1))?;
    let read = tokio::task::spawn_blocking(move || keys::read(&body)).await;
    let read = read.map_err(|e| Error::internal("keys could not be read").caused_by(e))??;
    Ok((read, memory))
}

/// The rows that have the keys of a body.
///
/// # Errors
/// `NotFound` for keys that no row has.
pub(super) async fn rows_of(
    call: &Call,
    dataset: &Arc<Dataset>,
    column: &str,
    body: Bytes,
) -> Result<Vec<u64>> {
    let (wanted, _memory) = read(call, body).await?;
    if wanted.len() > limits::ROWS_PER_REQUEST_MAX {
        return Err(super::rows::too_many());
    }
    let found = call.app.keys.first(dataset, column, wanted).await?;
    let missing = found.iter().filter(|row| row.is_none()).count();
    if let Some(first) = found.iter().position(Option::is_none) {
        return Err(Error::not_found(format!(
            "no row has key {first} of the {} that were asked for, counted from 0, in column {column:?}; {missing} are missing in all",
            found.len()
        ))
        .hint("keys are compared exactly, with their type: \"17\" is neither 17 nor \"017\""));
    }
    Ok(found.into_iter().flatten().collect())
}
