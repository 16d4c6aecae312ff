//! `POST /v1/datasets/<id>/rows[?columns=a,b | ?column=a&column=b][&key=c]`: rows by their numbers.
//!
//! The body is the row numbers as little-endian `u64`, in the wanted order, duplicates included. With
//! `?key=id` it is a list of keys in that column instead (`keys.rs`), and the answer has the first row
//! of each, with a last column of their numbers (`__row__`); or it is an error that says which of
//! the keys no row has.
//! The answer is one frame (`forebay_protocol::frame`): an Arrow record batch with a checksum.
//! Nothing is sent before all of it is ready, so an error is always an answer of its own.

use super::{Call, datasets::dataset};
use crate::body::AnswerBody;
use bytes::Bytes;
use forebay_core::{
    Error, ErrorKind, Result,
    limits::{KEYS_BODY_MAX_BYTES, ROWS_PER_REQUEST_MAX},
    request::{self, Cost, Tally},
};
use forebay_dataset::Shares;
use forebay_format::tabular::Projection;
use forebay_protocol::{
    FRAME_CONTENT_TYPE,
    frame::{Frame, FrameTag},
    job::{JOB_HEADER, SOURCES_HEADER},
    keys::with_numbers,
};
use futures::{StreamExt, stream};
use http::{HeaderValue, Response, header};
use std::time::{Duration, Instant};

const ROW_NUMBER_BYTES: usize = size_of::<u64>();

pub async fn rows(call: &Call, id: &str) -> Result<Response<AnswerBody>> {
    // Permission is checked before anything is looked up, and before the body is read.
    let dataset = dataset(call, id).await?;
    let columns = columns(call)?;
    let key = super::keys::column(call, "key")?;
    let most = match key {
        Some(_) => KEYS_BODY_MAX_BYTES,
        None => ROWS_PER_REQUEST_MAX * ROW_NUMBER_BYTES,
    };
    let body = call.read_body(most).await.map_err(|e| match e.kind() {
        ErrorKind::TooLarge if key.is_none() => too_many(),
        _ => e,
    })?;
    let numbers = match &key {
        Some(column) => super::keys::rows_of(call, &dataset, column, body).await?,
        None => numbers(&body)?,
    };
    // Says how far the jobs are whose plans the cache follows.
    call.app.plans.asked(dataset.id(), &numbers);
    let (began, moment) = (Instant::now(), call.app.rows.moment());
    let caller = call.note.learned().caller.clone();
    let job = call.headers.get(JOB_HEADER);
    let job = job.map(|name| name.to_str().unwrap_or_default().to_owned());
    let app = &call.app;
    let tally = app.jobs.begin(&caller, job.as_deref(), &app.so_far())?;
    let reading = app.rows.read_now(&dataset, &numbers, &columns);
    let read = request::tallied(tally.clone(), reading)
        .await
        .map_err(|e| match e.kind() {
            // The condition that failed is the version that the dataset was built from. Retrying
            // cannot help, so it is not a 503.
            ErrorKind::VersionChanged => e.with_kind(ErrorKind::PreconditionFailed),
            _ => e,
        })?;
    let (took, shares) = (began.elapsed(), call.app.rows.shares_since(&moment));
    let batch = match key {
        Some(_) => with_numbers(&read.batch, numbers)?,
        None => read.batch,
    };
    app.jobs.served(&caller, job.as_deref(), &app.so_far());
    let framed = tokio::task::spawn_blocking(move || Frame::rows(FrameTag::default(), &batch));
    let frame = framed
        .await
        .map_err(|e| Error::internal("rows could not be framed").caused_by(e))??;
    let length = frame.wire_bytes();
    let pieces = frame.into_pieces(read.memory).into_iter().map(Ok);
    let mut response = Response::new(AnswerBody::stream(
        stream::iter(pieces).boxed(),
        Some(length),
    ));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static(FRAME_CONTENT_TYPE),
    );
    response.headers_mut().insert(
        "server-timing",
        server_timing(took, began.elapsed(), shares)?,
    );
    response
        .headers_mut()
        .insert(SOURCES_HEADER, sources(&tally)?);
    response
        .headers_mut()
        .insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    Ok(response)
}

pub(super) fn too_many() -> Error {
    Error::new(
        ErrorKind::TooLarge,
        format!("more than {ROWS_PER_REQUEST_MAX} rows in one request"),
    )
    .hint("ask for them in several requests")
}

/// Where the time of this answer went (`Server-Timing`, W3C; milliseconds): waiting for the origin,
/// reading the disk, and the rest, which is decoding, ordering and framing. The shares are those of
/// everything that the node read meanwhile.
fn server_timing(read: Duration, all: Duration, shares: Shares) -> Result<HeaderValue> {
    let ms = |seconds: f64| seconds * 1e3;
    let (origin, disk) = (
        read.as_secs_f64() * shares.origin,
        read.as_secs_f64() * shares.disk,
    );
    let rest = all.as_secs_f64() - origin - disk;
    let value = format!(
        "origin;dur={:.3}, disk;dur={:.3}, prepare;dur={:.3}",
        ms(origin),
        ms(disk),
        ms(rest)
    );
    HeaderValue::from_str(&value)
        .map_err(|e| Error::internal("the times cannot be sent as a header").caused_by(e))
}

/// Where the bytes of this answer came from.
fn sources(tally: &Tally) -> Result<HeaderValue> {
    let value = format!(
        "memory={}, disk={}, peer={}, origin={}",
        tally.get(Cost::MemoryBytes),
        tally.get(Cost::DiskBytes),
        tally.get(Cost::PeerBytes),
        tally.origin_bytes()
    );
    HeaderValue::from_str(&value)
        .map_err(|e| Error::internal("the sources cannot be sent as a header").caused_by(e))
}

fn numbers(body: &Bytes) -> Result<Vec<u64>> {
    let (numbers, rest) = body.as_chunks::<ROW_NUMBER_BYTES>();
    if !rest.is_empty() {
        return Err(Error::invalid(format!(
            "a body of {} bytes is not a list of row numbers",
            body.len()
        ))
        .hint("send row numbers as little-endian 64-bit integers, 8 bytes each"));
    }
    Ok(numbers.iter().map(|n| u64::from_le_bytes(*n)).collect())
}

fn columns(call: &Call) -> Result<Projection> {
    let each: Vec<String> = call
        .query
        .iter()
        .filter(|(name, _)| name == "column")
        .map(|(_, value)| value.clone())
        .collect();
    match (call.query("columns"), each.is_empty()) {
        (None, true) => Ok(Projection::All),
        (None, false) => Ok(Projection::Columns(each)),
        (Some(list), true) => Ok(Projection::Columns(
            list.split(',')
                .filter(|name| !name.is_empty())
                .map(str::to_owned)
                .collect(),
        )),
        (Some(_), false) => Err(Error::invalid("columns= and column= exclude each other")
            .hint("if names contain commas, give column= once for each")),
    }
}
