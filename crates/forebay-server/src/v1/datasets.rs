//! `/v1/datasets`: opening, describing and reading datasets.
//!
//! - `POST /v1/datasets` opens what the JSON of the body describes and answers when it is open;
//!   with `?progress=true` the answer is JSON lines, one now and then while opening and one at the
//!   end;
//! - `GET /v1/datasets`, `GET /v1/datasets/<id>`: what is open; `schema` has the columns, `besides`
//!   those that are read only if they are named;
//! - `GET /v1/datasets/<id>/shape`: rows per block, encoded, for plans;
//! - `GET /v1/datasets/<id>/manifest`: its files as JSON lines; `POST …/manifest?to=bucket/key`
//!   writes them into an object.
//! - `POST /v1/datasets/<id>/rows`: rows by their numbers, or keys (`rows.rs`);
//! - `POST /v1/datasets/<id>/lengths`: how long its rows are (`compositions.rs`);
//! - `POST /v1/datasets/<id>/filters`, `GET …/filters/<filter>`: which rows an expression leaves
//!   (`filters.rs`);
//! - `POST /v1/datasets/<id>/keys`: which rows have a key (`keys.rs`).
//!
//! Invariant: a caller learns nothing about a dataset with a file that it may not read.

use super::{Call, error::json_response, not_offered};
use crate::{auth::Policy, body::AnswerBody, config::Action, object};
use bytes::Bytes;
use forebay_core::{
    Attributes, Error, Reservation, Result,
    error::without_name,
    limits,
    request::{self, Tally},
};
use forebay_dataset::{Access, Caller, Dataset, DatasetSpec, Opened, Watched, parse_spec};
use forebay_engine::PutRequest;
use forebay_format::tabular::type_name;
use forebay_protocol::{
    ErrorDocument, LINES_CONTENT_TYPE,
    dataset::{
        Column, Datasets as Descriptions, Description, OpenEvent, OpenedDataset, SkippedFile,
    },
    job::JOB_HEADER,
};
use futures::{
    FutureExt, Stream, StreamExt,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use http::{HeaderValue, Method, Response, StatusCode, header};
use serde::Serialize;
use serde_json::json;
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

const PROGRESS_EVERY: Duration = Duration::from_millis(200);
/// How many skipped files are listed one by one.
const SKIPPED_TOLD: usize = 100;
/// How many lines of a manifest are sent in one piece.
const MANIFEST_PIECE_LINES: usize = 1000;

/// What a key may do, as the registry of datasets asks for it.
#[derive(Clone)]
pub(crate) struct Allowed(pub Arc<Policy>);

impl Access for Allowed {
    fn read(&self, bucket: &str, name: &str) -> Result<()> {
        self.0.check(Action::Read, bucket, name)
    }

    fn list(&self, bucket: &str, prefix: &str) -> Result<()> {
        self.0.check(Action::List, bucket, prefix)
    }

    fn rights(&self) -> u128 {
        self.0.rights()
    }

    fn caller(&self) -> Caller {
        self.0.key().map_or(Caller::Operator, Caller::Key)
    }

    fn shared(&self) -> Arc<dyn Access> {
        Arc::new(self.clone())
    }
}

pub async fn datasets(call: &Call, id: &str, rest: &str) -> Result<Response<AnswerBody>> {
    match (&call.note.method, id, rest.trim_end_matches('/')) {
        (&Method::POST, "", "") => open(call).await,
        (&Method::GET, "", "") => {
            let open = call.app.datasets.list(&allowed(call)).await;
            let datasets = open.iter().map(|d| describe(d)).collect();
            Ok(json_response(StatusCode::OK, &Descriptions { datasets }))
        }
        (&Method::GET, id, "") => Ok(json_response(
            StatusCode::OK,
            &describe(&*dataset(call, id).await?),
        )),
        (&Method::GET, id, "shape") => {
            let shape = dataset(call, id).await?.shape().encode();
            Ok(of_type(AnswerBody::full(shape), "application/octet-stream"))
        }
        (&Method::GET, id, "manifest") => {
            call.needs_chunks("a manifest")?;
            let lines = manifest(dataset(call, id).await?).map(Ok).boxed();
            Ok(of_type(AnswerBody::stream(lines, None), LINES_CONTENT_TYPE))
        }
        (&Method::POST, id, "manifest") => write_manifest(call, id).await,
        (&Method::POST, id, "rows") => super::rows::rows(call, id).await,
        (&Method::POST, id, "lengths") => super::compositions::lengths(call, id).await,
        (&Method::POST, id, "filters") => super::filters::filter(call, id).await,
        (&Method::GET, id, rest) if let Some(filter) = rest.strip_prefix("filters/") => {
            super::filters::rows(call, id, filter).await
        }
        (&Method::POST, id, "keys") => super::keys::keys(call, id).await,
        _ => Err(not_offered(call)),
    }
}

pub(crate) fn allowed(call: &Call) -> Allowed {
    Allowed(call.policy.clone())
}

/// Counts what a request takes for the job that it names, if it names one.
pub(super) fn tally(call: &Call) -> Result<Arc<Tally>> {
    let (app, caller) = (&call.app, call.note.learned().caller.clone());
    let job = call.headers.get(JOB_HEADER);
    let job = job.map(|name| name.to_str().unwrap_or_default());
    app.jobs.begin(&caller, job, &app.so_far())
}

/// The dataset with this id, if the caller may read it.
pub(crate) async fn dataset(call: &Call, id: &str) -> Result<Arc<Dataset>> {
    call.app.datasets.get(id, &allowed(call)).await
}

/// The bytes of an answer, and the memory that they take until they are sent.
pub(super) struct Counted {
    pub bytes: Vec<u8>,
    pub _memory: Reservation,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

pub(super) fn of_type(body: AnswerBody, content_type: &'static str) -> Response<AnswerBody> {
    let mut response = Response::new(body);
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

pub(super) fn wants_progress(call: &Call) -> bool {
    call.query("progress")
        .is_some_and(|v| v == "true" || v == "1")
}

async fn open(call: &Call) -> Result<Response<AnswerBody>> {
    let body = call.read_body(limits::DATASET_SPEC_MAX_BYTES).await?;
    // There may be up to a million names.
    let spec = tokio::task::spawn_blocking(move || parse_spec(&body))
        .await
        .map_err(|e| Error::internal("a description could not be read").caused_by(e))??;
    let tally = tally(call)?;
    if wants_progress(call) {
        call.needs_chunks("an opening that tells its progress")?;
        return Ok(of_type(
            AnswerBody::stream(events(call, spec, tally), None),
            LINES_CONTENT_TYPE,
        ));
    }
    let (datasets, access) = (&call.app.datasets, allowed(call));
    let opened = request::tallied(tally, datasets.open(&spec, &access)).await?;
    Ok(json_response(StatusCode::OK, &describe_opened(&opened)))
}

/// Sends one line now and then, and one at the end. When the client leaves, the opening goes on for
/// whoever comes next.
fn events(call: &Call, spec: DatasetSpec, tally: Arc<Tally>) -> BoxStream<'static, Result<Bytes>> {
    let (datasets, allowed) = (call.app.datasets.clone(), allowed(call));
    let watched = Arc::new(Watched::default());
    let seen = watched.clone();
    let opening = async move { datasets.open_watched(&spec, &allowed, &seen).await };
    let opening = request::tallied(tally, opening);
    with_progress(opening.boxed(), ended, move || {
        line(&OpenEvent::Progress(watched.now()))
    })
}

/// The lines of work that tells its progress: `progress` now and then, and what `ended` makes of its
/// outcome at the end.
pub(super) fn with_progress<T: Send + 'static, E: Serialize + 'static>(
    work: BoxFuture<'static, Result<T>>,
    ended: fn(Result<T>) -> E,
    progress: impl Fn() -> Result<Bytes> + Send + Sync + 'static,
) -> BoxStream<'static, Result<Bytes>> {
    let mut ticks = interval_at(Instant::now() + PROGRESS_EVERY, PROGRESS_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let progress = Arc::new(progress);
    stream::unfold(Some((work, ticks)), move |state| {
        let progress = progress.clone();
        async move {
            let (mut work, mut ticks) = state?;
            tokio::select! {
                outcome = &mut work => Some((line(&ended(outcome)), None)),
                _ = ticks.tick() => Some((progress(), Some((work, ticks)))),
            }
        }
    })
    .boxed()
}

fn ended(opened: Result<Opened>) -> OpenEvent {
    match opened {
        Ok(opened) => OpenEvent::Opened(Box::new(describe_opened(&opened))),
        Err(e) => OpenEvent::Error(Box::new(ErrorDocument::of(&e))),
    }
}

pub(super) fn line(event: &impl Serialize) -> Result<Bytes> {
    let mut text = serde_json::to_vec(event)
        .map_err(|e| Error::internal("an event that cannot be written").caused_by(e))?;
    text.push(b'\n');
    Ok(Bytes::from(text))
}

fn describe(d: &Dataset) -> Description {
    let column = |name: &str, data_type, nullable| Column {
        name: name.to_owned(),
        data_type,
        nullable,
    };
    let columns = d.schema().fields().iter();
    let columns = columns.map(|f| column(f.name(), type_name(f), f.is_nullable()));
    let besides = d.besides();
    let besides = besides.iter();
    let besides = besides.map(|f| column(f.name(), type_name(f), f.is_nullable()));
    Description {
        id: d.id().to_owned(),
        format: d.format().name().to_owned(),
        rows: d.rows(),
        blocks: d.shape().blocks(),
        files: d.files().len() as u64,
        bytes: d.files().total_bytes(),
        schema: columns.collect(),
        besides: besides.collect(),
        memory_bytes: d.memory_bytes(),
    }
}

fn describe_opened(opened: &Opened) -> OpenedDataset {
    let skipped = |(name, e): &(String, Error)| SkippedFile {
        name: name.clone(),
        message: without_name(&e.describe(), name).to_owned(),
    };
    OpenedDataset {
        dataset: describe(&opened.dataset),
        opened_ms: opened.took.as_secs_f64() * 1000.0,
        indexed_files: opened.indexed_files,
        indexed_bytes: opened.indexed_bytes,
        reused_files: opened.reused_files,
        previous: opened.previous.clone(),
        skipped_files: opened.skipped.len() as u64,
        skipped: opened
            .skipped
            .iter()
            .take(SKIPPED_TOLD)
            .map(skipped)
            .collect(),
        unreadable_names: opened.unreadable.0,
        unreadable_name: opened.unreadable.1.clone(),
    }
}

/// The lines of a manifest, a few at a time.
fn manifest(dataset: Arc<Dataset>) -> impl Stream<Item = Bytes> + Send + 'static {
    let lines = dataset.manifest_lines();
    stream::unfold(0, move |from| {
        let until = (from + MANIFEST_PIECE_LINES).min(lines.len());
        let piece: String = (from..until).map(|i| lines.line(i)).collect();
        futures::future::ready((from < until).then(|| (Bytes::from(piece), until)))
    })
}

async fn write_manifest(call: &Call, id: &str) -> Result<Response<AnswerBody>> {
    let to = call.query("to").ok_or_else(|| {
        Error::invalid("the query parameter `to` is missing").hint("to=bucket/key")
    })?;
    let to = forebay_core::name::without_scheme(to);
    let (bucket, key) = to.split_once('/').ok_or_else(|| {
        Error::invalid(format!("to={to:?} does not name an object")).hint("to=bucket/key")
    })?;
    call.note.set_name(bucket, key);
    call.permit(Action::Write, bucket, key)?;
    let name = object::name(bucket, key)?;
    let dataset = dataset(call, id).await?;
    let files = dataset.files().len();
    let attributes = Attributes {
        content_type: Some(LINES_CONTENT_TYPE.into()),
        ..Attributes::default()
    };
    let request = PutRequest {
        attributes,
        ..PutRequest::default()
    };
    let put = call
        .app
        .engine
        .put(&name, request, None, manifest(dataset).map(Ok).boxed())
        .await?;
    Ok(json_response(
        StatusCode::OK,
        &json!({"name": name.to_string(), "files": files, "etag": put.etag}),
    ))
}
