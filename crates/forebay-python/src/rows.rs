//! Datasets at a node: opening one, and asking for rows by their numbers. No Python in here but the
//! reading of row numbers.

use crate::{
    failure::{Failure, Result},
    frame::receive_rows,
    names::escape_segment,
    transport::{Call, Transport},
};
use bytes::Bytes;
use forebay_core::limits::ROWS_PER_REQUEST_MAX;
use http::{Method, header};
use pyo3::{buffer::PyBuffer, exceptions::PyTypeError, prelude::*};
use std::sync::Arc;

/// Opens a dataset; `spec` and the answer are JSON.
pub async fn open(transport: &Arc<Transport>, spec: String) -> Result<Bytes> {
    transport
        .call(&Call::new(Method::POST, "/v1/datasets".into()).json(spec))
        .await?
        .collect()
        .await
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
