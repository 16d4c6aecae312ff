//! Datasets at a node: opening one, and requesting rows by their numbers. The only Python in here
//! is the reading of row numbers.

use crate::{
    failure::{Class, Failure, Result},
    frame::receive_rows,
    objects::{SHORT_ANSWER_MAX_BYTES, is_cut, whole},
    session::Session,
};
use bytes::Bytes;
use forebay_client::{Answer, Call, Client, Lines};
use forebay_core::limits::ROWS_PER_REQUEST_MAX;
use forebay_protocol::{
    COMPOSITIONS_PATH, DATASETS_PATH, ErrorDocument, PLANS_PATH, REQUEST_ID_HEADER,
    dataset::{DatasetSpec, OpenEvent},
    filter::FilterEvent,
    job::{JOB_HEADER, JOBS_PATH, SOURCES_HEADER},
    keys::KeysEvent,
    path::encode,
};
use http::{HeaderName, Method};
use pyo3::{buffer::PyBuffer, exceptions::PyTypeError, prelude::*};
use std::time::Duration;
use tokio::time::Instant;

/// Pauses between requests to a node that is too busy to open a dataset.
const REFUSED_PAUSE: Duration = Duration::from_millis(200);
const REFUSED_PAUSE_MAX: Duration = Duration::from_secs(5);

/// After so many of them, progress gives work no more time.
const RENEWED_AFTER_REFUSALS: u32 = 3;

/// A line of work that tells its progress.
enum Told<T> {
    Progress,
    Done(T),
    Failed(Box<ErrorDocument>),
    /// An event of a later release.
    Other,
}

/// Work of a node that tells its progress in lines, and its outcome in the last one.
struct Work<'w, T> {
    call: Call,
    /// What it is, for messages: `opening the dataset`.
    of: &'static str,
    /// What to do if it stops in the middle.
    hint: &'static str,
    sort: &'w (dyn Fn(&[u8]) -> serde_json::Result<Told<T>> + Sync),
}

impl<T> Work<'_, T> {
    /// The last line, and what it says. The node sends a line now and then while it works, so that
    /// the work may take longer than the client's `timeout`. `progress` is called with each line
    /// before the last one. If the node is too busy, the request is repeated for `timeout`, like
    /// every call, counted from the last line that told something new.
    async fn done(&self, node: &Client, mut progress: impl FnMut(&[u8])) -> Result<(Bytes, T)> {
        let mut deadline = Instant::now() + node.timeouts().refused;
        let (mut pause, mut cuts, mut refused, mut last) = (REFUSED_PAUSE, 0, 0, Vec::new());
        loop {
            let answer = node.call(&self.call).await?;
            let mut heard = |line: &[u8]| {
                // Work that waits tells the same again; and what was begun anew is not new.
                if last != line && refused < RENEWED_AFTER_REFUSALS {
                    deadline = Instant::now() + node.timeouts().refused;
                    last = line.to_vec();
                }
                progress(line);
            };
            let failure = match self.ended(answer, &mut heard).await {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(failure)) => failure,
                // Another node does it as well.
                Err(failure) if is_cut(&failure) && cuts + 1 < node.count() => {
                    cuts += 1;
                    continue;
                }
                Err(failure) => return Err(failure),
            };
            if !failure.is_refusal() || Instant::now() + pause > deadline {
                return Err(failure);
            }
            refused += 1;
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(REFUSED_PAUSE_MAX);
        }
    }

    /// Reads the answer: either the line that says what was done, or the error in the node's last
    /// line. The head of the answer is sent long before the outcome is known.
    async fn ended(
        &self,
        answer: Answer,
        progress: &mut impl FnMut(&[u8]),
    ) -> Result<Result<(Bytes, T)>> {
        let mut lines = Lines::of(answer);
        let mut last = None;
        while let Some(line) = lines.next().await? {
            let told = (self.sort)(&line).map_err(|e| {
                let of = self.of;
                let message = format!("the node sent an unreadable event while {of}: {e}");
                Failure::new(Class::ServerError, message).hint(
                    "check the address (--node, url=, FOREBAY_NODE): is it that of a Forebay node \
                     of this version?",
                )
            })?;
            match told {
                Told::Progress => progress(&line),
                Told::Done(done) => last = Some(Ok((line.into(), done))),
                Told::Failed(mut said) => {
                    let id = || lines.header(REQUEST_ID_HEADER).map(str::to_owned);
                    said.request_id = said.request_id.or_else(id);
                    last = Some(Err(Failure::of_document(*said)));
                }
                Told::Other => {}
            }
        }
        last.ok_or_else(|| {
            let message = format!("the node stopped in the middle of {}", self.of);
            Failure::truncated(message).hint(self.hint)
        })
    }
}

/// The call, on the account of a job.
fn for_job(call: Call, job: Option<&str>) -> Call {
    match job {
        Some(job) => call.header(HeaderName::from_static(JOB_HEADER), job),
        None => call,
    }
}

/// Opens a dataset, on the account of a job; the result is JSON. `progress` is called with lines of
/// JSON (files `listed`, `to_index` and `indexed`, `bytes`).
pub async fn open(
    node: &Client,
    spec: &DatasetSpec,
    job: Option<&str>,
    progress: impl FnMut(&[u8]),
) -> Result<Bytes> {
    let call = Call::new(Method::POST, format!("{DATASETS_PATH}?progress=true"));
    let work = Work {
        call: for_job(call.repeatable().json(spec.json()), job),
        of: "opening the dataset",
        hint: "open it again; the node keeps what it has read of the files",
        sort: &|line| {
            Ok(match serde_json::from_slice(line)? {
                OpenEvent::Progress(_) => Told::Progress,
                OpenEvent::Opened(_) => Told::Done(()),
                OpenEvent::Error(said) => Told::Failed(said),
                OpenEvent::Other => Told::Other,
            })
        },
    };
    Ok(work.done(node, progress).await?.0)
}

/// Tells the node of rows that are made of those of datasets which it knows; the answer is JSON.
pub async fn compose(node: &Client, body: Bytes) -> Result<Bytes> {
    let call = Call::new(Method::POST, COMPOSITIONS_PATH)
        .repeatable()
        .body("application/octet-stream", body);
    let mut answer = node.call(&call).await?;
    Ok(answer.collect(SHORT_ANSWER_MAX_BYTES).await?)
}

/// The rows of a dataset that an expression (a JSON document) leaves: what the node answers, and the
/// encoded set. `progress` is called with lines of JSON.
pub async fn filter(
    node: &Client,
    id: &str,
    expression: &str,
    progress: impl FnMut(&[u8]),
) -> Result<(Bytes, Vec<u8>)> {
    let path = format!("{DATASETS_PATH}/{}/filters", encode(id));
    let work = Work {
        // Whoever asks again joins the computation, or finds what it left.
        call: Call::new(Method::POST, format!("{path}?progress=true"))
            .repeatable()
            .json(expression.to_owned()),
        of: "computing the filter",
        hint: "ask again: another node can compute it",
        sort: &|line| {
            Ok(match serde_json::from_slice(line)? {
                FilterEvent::Progress(_) => Told::Progress,
                FilterEvent::Filtered(of) => Told::Done(of),
                FilterEvent::Error(said) => Told::Failed(said),
                FilterEvent::Other => Told::Other,
            })
        },
    };
    let (answer, of) = work.done(node, progress).await?;
    let path = format!("{path}/{}", encode(&of.filter));
    Ok((answer, whole(node, &Call::new(Method::GET, path)).await?))
}

/// Registers a job's plan with the node, whose cache follows it from now on; `registration` and the
/// answer, a lease, are JSON.
pub async fn follow(node: &Client, registration: String, job: Option<&str>) -> Result<Bytes> {
    // Of two leases, the one that nobody renews ends by itself.
    let call = Call::new(Method::POST, PLANS_PATH)
        .repeatable()
        .json(registration);
    let mut answer = node.call(&for_job(call, job)).await?;
    Ok(answer.collect(SHORT_ANSWER_MAX_BYTES).await?)
}

/// Ends a lease that [`follow`] gave.
pub async fn unfollow(node: &Client, lease: &str) -> Result<Bytes> {
    let path = format!("{PLANS_PATH}/{}", encode(lease));
    // Nobody else has this lease.
    let call = Call::new(Method::DELETE, path).repeatable();
    let mut answer = node.call(&call).await?;
    Ok(answer.collect(SHORT_ANSWER_MAX_BYTES).await?)
}

/// The `shape` or `manifest` of a dataset; with an empty `part`, what is known about it.
pub async fn part(node: &Client, id: &str, part: &str) -> Result<Vec<u8>> {
    let mut path = format!("{DATASETS_PATH}/{}", encode(id));
    if !part.is_empty() {
        path = format!("{path}/{part}");
    }
    whole(node, &Call::new(Method::GET, path)).await
}

/// Makes the index of a column of keys, or finds it; the answer is JSON. `progress` is called with
/// lines of JSON.
pub async fn index_keys(
    node: &Client,
    id: &str,
    column: &str,
    progress: impl FnMut(&[u8]),
) -> Result<Bytes> {
    let path = keys_path(id, column);
    let work = Work {
        // Whoever asks again joins the indexing, or finds the index.
        call: Call::new(Method::POST, format!("{path}&progress=true")).repeatable(),
        of: "indexing the keys",
        hint: "ask again: another node can index them",
        sort: &|line| {
            Ok(match serde_json::from_slice(line)? {
                KeysEvent::Progress(_) => Told::Progress,
                KeysEvent::Indexed(_) => Told::Done(()),
                KeysEvent::Error(said) => Told::Failed(said),
                KeysEvent::Other => Told::Other,
            })
        },
    };
    Ok(work.done(node, progress).await?.0)
}

fn keys_path(id: &str, column: &str) -> String {
    format!(
        "{DATASETS_PATH}/{}/keys?column={}",
        encode(id),
        encode(column)
    )
}

/// The rows that have keys (a JSON list): the first row of each, 2^64 - 1 for none; or `all` of them, as
/// pairs of the key's number and a row. Little-endian numbers of 64 bits.
pub async fn find_keys(
    node: &Client,
    id: &str,
    column: &str,
    keys: Bytes,
    all: bool,
) -> Result<Vec<u8>> {
    let all = if all { "&all=true" } else { "" };
    let path = format!("{}{all}", keys_path(id, column));
    let call = Call::new(Method::POST, path)
        .repeatable()
        .body("application/json", keys);
    whole(node, &call).await
}

/// Which rows are asked for.
pub enum Wanted<'w> {
    /// Those with these numbers: little-endian, 64 bits each.
    Numbers(Bytes),
    /// Those with these keys (a JSON list) in a column.
    Keys(&'w str, Bytes),
}

/// The rows that are wanted, in this order; and what the node says about its answer. Rows that were
/// asked for by keys have a last column with their numbers.
pub async fn take(
    session: &Session,
    id: &str,
    wanted: Wanted<'_>,
    columns: Option<&[String]>,
    job: Option<&str>,
) -> Result<(arrow_array::RecordBatch, Node)> {
    let mut path = format!("{DATASETS_PATH}/{}/rows", encode(id));
    // One parameter for each column, because names may contain commas. No column at all is an empty
    // list.
    for (i, column) in columns.unwrap_or_default().iter().enumerate() {
        path.push_str(if i == 0 { "?column=" } else { "&column=" });
        path.push_str(&encode(column));
    }
    if columns.is_some_and(<[String]>::is_empty) {
        path.push_str("?columns=");
    }
    let (body, content_type) = match wanted {
        Wanted::Numbers(numbers) => (numbers, "application/octet-stream"),
        Wanted::Keys(column, keys) => {
            path.push(if path.contains('?') { '&' } else { '?' });
            path.push_str("key=");
            path.push_str(&encode(column));
            (keys, "application/json")
        }
    };
    let call = Call::new(Method::POST, path)
        .repeatable()
        .body(content_type, body);
    let call = for_job(call, job);
    let ask = || async {
        let mut answer = session.node.call(&call).await?;
        let times = answer
            .header("server-timing")
            .map(server_timing)
            .unwrap_or_default();
        let bytes = answer
            .header(SOURCES_HEADER)
            .map(sources)
            .unwrap_or_default();
        let node = Node {
            seconds: times,
            bytes,
        };
        Ok((receive_rows(&mut answer, &session.regions).await?, node))
    };
    session.node.whole(ask, is_cut).await
}

/// What a node says about an answer with rows.
#[derive(Default)]
pub struct Node {
    /// The seconds that it spent, by activity.
    pub seconds: Vec<(String, f64)>,
    /// Where the bytes came from.
    pub bytes: Vec<(String, u64)>,
}

/// `memory=1, disk=2`. What cannot be parsed is left out.
fn sources(value: &str) -> Vec<(String, u64)> {
    let one = |part: &str| {
        let (name, bytes) = part.trim().split_once('=')?;
        Some((name.to_owned(), bytes.parse().ok()?))
    };
    value.split(',').take(16).filter_map(one).collect()
}

/// What a node knows of a job, as JSON.
pub async fn job(node: &Client, name: &str) -> Result<Vec<u8>> {
    let path = format!("{JOBS_PATH}/{}", encode(name));
    whole(node, &Call::new(Method::GET, path)).await
}

/// Names and durations of a `Server-Timing` header, in seconds. What cannot be parsed is left out.
fn server_timing(value: &str) -> Vec<(String, f64)> {
    let one = |metric: &str| {
        let mut parts = metric.split(';').map(str::trim);
        let name = parts.next()?.to_owned();
        let ms: f64 = parts.find_map(|p| p.strip_prefix("dur="))?.parse().ok()?;
        (ms.is_finite() && ms >= 0.0).then_some((name, ms / 1e3))
    };
    value.split(',').take(16).filter_map(one).collect()
}

/// Row numbers as they are sent: little-endian `u64`. From a buffer of `int64` or `uint64` (an
/// array), or any iterable of int.
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
            // The node refuses more, and an iterable may be endless.
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
            format!("the request names more than {ROWS_PER_REQUEST_MAX} rows"),
        )
        .hint("split the request")
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
            "the row numbers have {dimensions} dimensions; flatten the array"
        )))
    }
}
