//! `/v1/checkpoints/BUCKET/PREFIX`: checkpoints, staged here and flushed to their bucket
//! (`forebay-stage`).
//!
//! - `POST …` begins one: JSON `{"replace": bool, "bytes": about how many}`, and `id` and `part` for a
//!   part of one that another node began. The answer is its status, with its `id`;
//! - `PUT …?id=ID&file=NAME` stages a file, the body; the answer comes when it is on disk and synced;
//! - `POST …?id=ID&commit=true` commits: JSON `{"files": [{"name", "size"}], "last": [NAME],
//!   "elsewhere": […], "meta": …, "deadline_s": …}`;
//! - `GET …` is its status, `?id=ID` that of one of several of the name; with
//!   `?until=staged|durable&wait_s=N` it waits;
//! - `GET …?manifest=true` says what a reader reads (`durable=true`: what the origin has); with
//!   `content=NAME`, the bytes of that file come along if it is small and on this disk:
//!   `"content": {"name", "base64"}`; with `ahead=true`, it does not wait for the origin if what is on
//!   this disk may have been replaced there: `"question": NAME` says that the origin is being asked;
//! - `GET …?manifest=true&question=NAME` waits for that answer: `{"id": ID}`, or null if there is none;
//! - `GET …?id=ID&file=NAME`, with or without a range, reads a file: from this disk, or like any
//!   object; on the Unix socket, what is on this disk is lent to clients that ask for that
//!   ([`forebay_protocol::lent`]);
//! - `DELETE …?id=ID` gives one up; `DELETE …?durable=true` removes a durable one from its bucket;
//! - `GET /v1/checkpoints` lists those on this node's disk.
//!
//! Invariant: a caller who may not read what is under a prefix learns nothing of its checkpoints.

use super::{
    Call, done,
    error::json_response,
    lend, not_offered,
    objects::{set, upload_stream},
};
use crate::{body::AnswerBody, config::Action, object};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use forebay_core::{CacheStatus, Error, Result};
use forebay_stage::{Begin, Commit, Manifest, Place, Stages, Until};
use http::{Method, Response, StatusCode, header};
use serde::{Serialize, de::DeserializeOwned};
use std::{sync::Arc, time::Duration};

/// The longest that one request waits.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// The largest commit: a hundred thousand names.
const COMMIT_MAX_BYTES: usize = 64 << 20;
/// Manifests of more files are made into text away from the runtime's threads.
const WRITTEN_HERE_FILES: usize = 500;
/// And those with which more of a file's bytes come.
const WRITTEN_HERE_BYTES: usize = 64 << 10;
/// The largest file that comes with a manifest. Larger ones are lent, and not worth a copy.
const CONTENT_MAX_BYTES: u64 = 1 << 20;

pub async fn checkpoints(call: &Call, bucket: &str, prefix: &str) -> Result<Response<AnswerBody>> {
    let method = &call.note.method;
    if bucket.is_empty() {
        return match *method {
            Method::GET => Ok(list(call)),
            _ => Err(not_offered(call)),
        };
    }
    call.note.set_name(bucket, prefix);
    let place = Place::new(bucket, prefix)?;
    let under = format!("{}/", place.prefix);
    call.permit(
        match *method {
            Method::GET => Action::Read,
            _ => Action::Write,
        },
        bucket,
        &under,
    )?;
    let stages = stages(call)?;
    let (id, part, file) = (call.query("id"), call.query("part"), call.query("file"));
    match (method, id, file) {
        (&Method::POST, None, None) => {
            let begin: Begin = body(call).await?;
            let status = stages.begin(&place, begin).await?;
            Ok(json_response(StatusCode::OK, &status))
        }
        (&Method::POST, Some(id), None) if is_set(call, "commit") => {
            let commit: Commit = body(call).await?;
            let status = stages.commit(&place, id, part, commit).await?;
            Ok(json_response(StatusCode::OK, &status))
        }
        (&Method::PUT, Some(id), Some(file)) => {
            let (body, length) = upload_stream(call)?;
            let size = stages.put(&place, id, part, file, length, body).await?;
            Ok(json_response(
                StatusCode::OK,
                &serde_json::json!({ "size": size }),
            ))
        }
        (&Method::GET, Some(id), Some(file)) => read(call, stages, &place, id, file).await,
        (&Method::GET, id, None) if is_set(call, "manifest") => {
            if let Some(question) = call.query("question") {
                let id = stages.answer(&place, question).await?;
                return Ok(json_response(
                    StatusCode::OK,
                    &serde_json::json!({ "id": id }),
                ));
            }
            let durable = is_set(call, "durable");
            let ahead = match id {
                None if is_set(call, "ahead") => stages.manifest_ahead(&place, durable)?,
                _ => None,
            };
            let (manifest, question) = match ahead {
                Some((manifest, question)) => (manifest, Some(question)),
                None => (stages.manifest(&place, id, durable).await?, None),
            };
            let content = match call.query("content") {
                Some(name) => content_of(stages, &place, &manifest, name).await,
                None => None,
            };
            written(manifest, question, content).await
        }
        (&Method::GET, id, None) => {
            let status = match until(call)? {
                Some((until, patience)) => stages.wait(&place, id, part, until, patience).await?,
                None => stages.status(&place, id, part).await?,
            };
            Ok(json_response(StatusCode::OK, &status))
        }
        (&Method::DELETE, id, None) if is_set(call, "durable") => {
            stages.remove(&place, id).await?;
            Ok(done(StatusCode::OK))
        }
        (&Method::DELETE, Some(id), None) => {
            stages.abandon(&place, id, part).await?;
            Ok(done(StatusCode::OK))
        }
        _ => Err(not_offered(call)),
    }
}

/// What a reader reads, and the bytes of a file that it asked for at once.
#[derive(Serialize)]
struct Answer {
    #[serde(flatten)]
    manifest: Manifest,
    /// The answer to this is still to be fetched.
    #[serde(skip_serializing_if = "Option::is_none")]
    question: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Content>,
}

#[derive(Serialize)]
struct Content {
    name: String,
    base64: String,
}

/// The bytes of a file of this checkpoint, if they are at hand. Whoever does not get them here asks for
/// the file, and is told what is wrong with it.
async fn content_of(
    stages: &Stages,
    place: &Place,
    manifest: &Manifest,
    name: &str,
) -> Option<(String, Vec<u8>)> {
    let found = stages.small_file(place, &manifest.id, name, CONTENT_MAX_BYTES);
    match found.await {
        Ok(found) => found.map(|bytes| (name.to_owned(), bytes)),
        Err(e) => {
            tracing::debug!(checkpoint = %place, id = manifest.id, error = %e.describe(), "a file does \
                not come with its manifest");
            None
        }
    }
}

async fn written(
    manifest: Manifest,
    question: Option<String>,
    content: Option<(String, Vec<u8>)>,
) -> Result<Response<AnswerBody>> {
    let bytes = content.as_ref().map_or(0, |(_, bytes)| bytes.len());
    let is_small = manifest.files.len() <= WRITTEN_HERE_FILES && bytes <= WRITTEN_HERE_BYTES;
    let write = move || {
        let content = content.map(|(name, bytes)| Content {
            name,
            base64: STANDARD.encode(bytes),
        });
        let answer = Answer {
            manifest,
            question,
            content,
        };
        json_response(StatusCode::OK, &answer)
    };
    if is_small {
        return Ok(write());
    }
    let written = tokio::task::spawn_blocking(write).await;
    written.map_err(|e| Error::internal("a manifest could not be written").caused_by(e))
}

fn stages(call: &Call) -> Result<&Stages> {
    call.app.stages.as_ref().ok_or_else(|| {
        Error::unsupported("this node has no cache directory, so it cannot stage checkpoints")
            .hint("start it with --cache DIR:SIZE")
    })
}

fn is_set(call: &Call, name: &str) -> bool {
    call.query(name).is_some_and(|v| v == "true" || v == "1")
}

async fn body<T: DeserializeOwned + Default + Send + 'static>(call: &Call) -> Result<T> {
    let body = call.read_body(COMMIT_MAX_BYTES).await?;
    if body.is_empty() {
        return Ok(T::default());
    }
    let read = move || serde_json::from_slice(&body);
    let parsed = tokio::task::spawn_blocking(read).await;
    parsed
        .map_err(|e| Error::internal("a body could not be read").caused_by(e))?
        .map_err(|e| {
            Error::invalid(format!(
                "the body of the request is not as it should be: {e}"
            ))
        })
}

fn until(call: &Call) -> Result<Option<(Until, Duration)>> {
    let until = match call.query("until") {
        None => return Ok(None),
        Some("staged") => Until::Staged,
        Some("durable") => Until::Durable,
        Some(other) => {
            return Err(Error::invalid(format!(
                "until={} is not known",
                forebay_core::name::shorten(other)
            ))
            .hint("staged or durable"));
        }
    };
    let wait = call.query("wait_s").map_or(Ok(WAIT_MAX), |text| {
        let seconds = text
            .parse::<f64>()
            .ok()
            .filter(|s| s.is_finite() && *s >= 0.0);
        let wait = seconds.map(|s| Duration::from_secs_f64(s.min(WAIT_MAX.as_secs_f64())));
        wait.ok_or_else(|| Error::invalid("wait_s is not a number of seconds"))
    })?;
    Ok(Some((until, wait)))
}

fn list(call: &Call) -> Response<AnswerBody> {
    let all = call.app.stages.as_ref().map_or(Vec::new(), Stages::list);
    let mine: Vec<_> = all
        .into_iter()
        .filter(|s| {
            let under = format!("{}/", s.prefix);
            call.policy.allows(Action::Read, &s.bucket, &under)
        })
        .collect();
    json_response(StatusCode::OK, &serde_json::json!({ "checkpoints": mine }))
}

async fn read(
    call: &Call,
    stages: &Stages,
    place: &Place,
    id: &str,
    file: &str,
) -> Result<Response<AnswerBody>> {
    let to_lend = lend::is_asked(call);
    let staged = match stages.open_file(place, id, file).await? {
        Some(staged) => Arc::new(staged),
        // Whoever only wants to borrow it is not to wait for the origin.
        None if to_lend => {
            return Err(Error::not_found(format!(
                "{place}: {file:?} is not on this node's disk"
            )));
        }
        None => return from_origin(call, place, id, file).await,
    };
    if to_lend && let Some(answer) = lend::lent(call, stages, &staged) {
        return Ok(answer);
    }
    let size = staged.size();
    let asked = object::range_header(&call.headers)?;
    let range = match asked {
        Some(range) => range.resolve(size)?,
        None => 0..size,
    };
    let Some(body) = stages.read(&staged, range.clone()).await? else {
        return from_origin(call, place, id, file).await;
    };
    let length = range.end - range.start;
    let mut response = object::streamed(body, length, CacheStatus::Hit, &call.note);
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/octet-stream"),
    );
    if asked.is_some() {
        let last = range.end.saturating_sub(1);
        let value = format!("bytes {}-{last}/{size}", range.start);
        set(headers, "content-range", &value);
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Ok(response)
}

async fn from_origin(
    call: &Call,
    place: &Place,
    id: &str,
    file: &str,
) -> Result<Response<AnswerBody>> {
    let name = object::name(&place.bucket, &format!("{}/{id}/{file}", place.prefix))?;
    object::answer(
        &call.app.engine,
        &name,
        &call.note.method,
        &call.headers,
        &call.note,
    )
    .await
}
