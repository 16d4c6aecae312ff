//! Datasets at a node: opening one, and asking for rows by their numbers. No Python in here but the
//! reading of row numbers.

use crate::{
    failure::{Class, Failure, Result},
    frame::receive_rows,
    names::escape_segment,
    transport::{Answer, Call, Transport},
};
use bytes::Bytes;
use forebay_core::limits::ROWS_PER_REQUEST_MAX;
use http::{Method, header};
use pyo3::{buffer::PyBuffer, exceptions::PyTypeError, prelude::*};
use serde::Deserialize;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// Longest line about an opening: the last one describes the dataset, with its columns.
const EVENT_MAX_BYTES: usize = 16 << 20;
/// Pauses before a node is asked again that was too busy to open a dataset.
const REFUSED_PAUSE: Duration = Duration::from_millis(200);
const REFUSED_PAUSE_MAX: Duration = Duration::from_secs(5);

/// A line of the answer to an opening. The head of that answer is out long before its end is known.
#[derive(Deserialize)]
struct Event {
    event: String,
    #[serde(default)]
    status: u16,
}

/// Opens a dataset; `spec` and the result are JSON. The node sends a line now and then while it
/// works, so that an opening may take longer than the client's `timeout`; `progress` is called with
/// each (JSON: files `listed`, `to_index` and `indexed`, `bytes`). A node that is too busy is asked
/// again for `timeout`, as for every call.
pub async fn open(
    transport: &Arc<Transport>,
    spec: String,
    mut progress: impl FnMut(&[u8]),
) -> Result<Bytes> {
    let call = Call::new(Method::POST, "/v1/datasets?progress=true".into()).json(spec);
    let deadline = Instant::now() + transport.timeout();
    let mut pause = REFUSED_PAUSE;
    loop {
        let mut answer = transport.call(&call).await?;
        let failure = match last_line(&mut answer, &mut progress).await? {
            (event, line) if event.event == "opened" => return Ok(line),
            (event, line) => Failure::from_answer(event.status, &answer.headers, &line),
        };
        if !failure.is_refusal() || Instant::now() + pause > deadline {
            return Err(failure);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(REFUSED_PAUSE_MAX);
    }
}

/// The line that ends the answer to an opening. Those before it go to `progress`.
async fn last_line(
    answer: &mut Answer,
    progress: &mut impl FnMut(&[u8]),
) -> Result<(Event, Bytes)> {
    let mut rest = Vec::new();
    let mut last = None;
    while let Some(piece) = answer.piece().await? {
        rest.extend_from_slice(&piece);
        while let Some(end) = rest.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            let event: Event = serde_json::from_slice(&line).map_err(|e| {
                Failure::new(
                    Class::ServerError,
                    format!("the node said of an opening what is no event: {e}"),
                )
            })?;
            match event.event.as_str() {
                "progress" => progress(&line),
                "opened" | "error" => last = Some((event, line.into())),
                // Of a later release.
                _ => {}
            }
        }
        if rest.len() > EVENT_MAX_BYTES {
            return Err(Failure::new(
                Class::ServerError,
                format!("a line of more than {EVENT_MAX_BYTES} bytes about an opening"),
            ));
        }
    }
    last.ok_or_else(|| {
        Failure::truncated("the node stopped in the middle of opening the dataset")
            .hint("open it again; what was read of the files is kept")
    })
}

/// Tells the node a job's plan, which its cache follows from now on; `registration` and the answer,
/// a lease, are JSON.
pub async fn follow(transport: &Arc<Transport>, registration: String) -> Result<Bytes> {
    transport
        .call(&Call::new(Method::POST, "/v1/datasets/plans".into()).json(registration))
        .await?
        .collect()
        .await
}

/// Ends a lease that [`follow`] gave.
pub async fn unfollow(transport: &Arc<Transport>, lease: &str) -> Result<Bytes> {
    let path = format!("/v1/datasets/plans/{}", escape_segment(lease));
    transport
        .call(&Call::new(Method::DELETE, path))
        .await?
        .collect()
        .await
}

/// `shape` or `manifest` of a dataset, or, empty, what is known of it.
pub async fn part(transport: &Arc<Transport>, id: &str, part: &str) -> Result<Vec<u8>> {
    let mut path = format!("/v1/datasets/{}", escape_segment(id));
    if !part.is_empty() {
        path = format!("{path}/{part}");
    }
    let mut answer = transport.call(&Call::new(Method::GET, path)).await?;
    let mut bytes = crate::buffer::room(answer.length().unwrap_or(0))?;
    while let Some(piece) = answer.piece().await? {
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

/// The rows with these numbers, in this order; and the seconds that the node says its work took, by
/// what it was spent on.
pub async fn take(
    transport: &Arc<Transport>,
    id: &str,
    rows: Bytes,
    columns: Option<&[String]>,
) -> Result<(arrow_array::RecordBatch, Vec<(String, f64)>)> {
    let mut path = format!("/v1/datasets/{}/rows", escape_segment(id));
    // One parameter for each column: names may hold commas. No column at all is an empty list.
    for (i, column) in columns.unwrap_or_default().iter().enumerate() {
        path.push_str(if i == 0 { "?column=" } else { "&column=" });
        path.push_str(&escape_segment(column));
    }
    if columns.is_some_and(<[String]>::is_empty) {
        path.push_str("?columns=");
    }
    let call = Call {
        body: rows,
        ..Call::new(Method::POST, path)
    }
    .header(header::CONTENT_TYPE, "application/octet-stream");
    let mut answer = transport.call(&call).await?;
    let times = answer
        .header("server-timing")
        .map(server_timing)
        .unwrap_or_default();
    Ok((receive_rows(&mut answer).await?, times))
}

/// Names and durations of a `Server-Timing` header, in seconds. What is not understood is left out.
fn server_timing(value: &str) -> Vec<(String, f64)> {
    let one = |metric: &str| {
        let mut parts = metric.split(';').map(str::trim);
        let name = parts.next()?.to_owned();
        let ms: f64 = parts.find_map(|p| p.strip_prefix("dur="))?.parse().ok()?;
        (ms.is_finite() && ms >= 0.0).then_some((name, ms / 1e3))
    };
    value.split(',').take(16).filter_map(one).collect()
}

/// Row numbers as they travel: little-endian `u64`. Of a buffer of `int64` or `uint64` (an array),
/// or any iterable of int.
pub fn row_numbers(rows: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    let py = rows.py();
    let negative = |row: i64| {
        Failure::invalid(format!("row {row} is negative")).hint("rows are numbered from 0")
    };
    let numbers: Vec<u64> = if let Ok(buffer) = PyBuffer::<u64>::get(rows) {
        flat(buffer.dimensions())?;
        buffer.to_vec(py)?
    } else if let Ok(buffer) = PyBuffer::<i64>::get(rows) {
        flat(buffer.dimensions())?;
        let signed = buffer.to_vec(py)?;
        if let Some(&row) = signed.iter().find(|row| **row < 0) {
            return Err(negative(row).into());
        }
        signed.into_iter().map(|row| row as u64).collect()
    } else {
        let items = rows.try_iter().map_err(|_| {
            PyTypeError::new_err("rows are an array of int64 or uint64, or an iterable of int")
        })?;
        let mut numbers = Vec::new();
        for item in items {
            let item = item?;
            let row: i64 = item.extract().map_err(|_| {
                PyTypeError::new_err(format!(
                    "a row number is an int, not {}",
                    crate::names::type_name(&item)
                ))
            })?;
            if row < 0 {
                return Err(negative(row).into());
            }
            // The node refuses more, and an iterable may have no end.
            if numbers.len() > ROWS_PER_REQUEST_MAX {
                break;
            }
            numbers.push(row as u64);
        }
        numbers
    };
    if numbers.len() > ROWS_PER_REQUEST_MAX {
        return Err(Failure::new(
            crate::failure::Class::TooLarge,
            format!("more than {ROWS_PER_REQUEST_MAX} rows in one request"),
        )
        .hint("ask for them in several requests")
        .into());
    }
    let mut bytes = Vec::with_capacity(numbers.len() * 8);
    for row in numbers {
        bytes.extend_from_slice(&row.to_le_bytes());
    }
    Ok(bytes.into())
}

fn flat(dimensions: usize) -> PyResult<()> {
    if dimensions == 1 {
        Ok(())
    } else {
        Err(PyTypeError::new_err(format!(
            "row numbers in {dimensions} dimensions; flatten the array"
        )))
    }
}
