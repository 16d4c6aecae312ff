//! `POST /v1/datasets/streams?connection=k&of=K&from_step=S`: one connection of a push stream.
//!
//! The body is JSON ([`StreamRequest`]). The answer is an endless body of frames
//! ([`forebay_protocol::frame`]): steps, now and then a sign of life, and finally a proper end or
//! an error.

use super::{Call, datasets::allowed, not_offered};
use crate::{app::App, body::AnswerBody};
use forebay_core::{Result, limits, request};
use forebay_protocol::{
    FRAMES_CONTENT_TYPE,
    job::JOB_PARAMETER,
    stream::{Lane, StreamRequest},
};
use futures::StreamExt;
use http::{HeaderValue, Method, Response, header};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// At most so often it is noted what a stream's job has taken.
const NOTED_EVERY: Duration = Duration::from_millis(10);

pub async fn streams(call: &Call, rest: &str) -> Result<Response<AnswerBody>> {
    if call.note.method != Method::POST || !rest.is_empty() {
        return Err(not_offered(call));
    }
    call.needs_chunks("a stream")?;
    let lane = Lane::parse(|name| call.query(name))?;
    let request = StreamRequest::parse(&call.read_body(limits::STREAM_BODY_MAX_BYTES).await?)?;
    let caller = call.note.learned().caller.clone();
    let (app, job) = (&call.app, call.query(JOB_PARAMETER).map(str::to_owned));
    let tally = app.jobs.begin(&caller, job.as_deref(), &app.so_far())?;
    let access = allowed(call);
    let opening = app.streams.open(lane, request, &access);
    let body = request::tallied(tally, opening).await?;
    let mut serving = Serving {
        app: app.clone(),
        caller,
        job,
        noted: None,
    };
    let body = body.inspect(move |_| serving.passed());
    let mut response = Response::new(AnswerBody::stream(body.boxed(), None));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static(FRAMES_CONTENT_TYPE),
    );
    Ok(response)
}

/// A stream is one request: its job is served as long as it lasts.
struct Serving {
    app: Arc<App>,
    caller: Arc<str>,
    job: Option<String>,
    noted: Option<Instant>,
}

impl Serving {
    fn passed(&mut self) {
        if self.noted.is_none_or(|at| at.elapsed() >= NOTED_EVERY) {
            self.note();
        }
    }

    fn note(&mut self) {
        let app = &self.app;
        app.jobs
            .served(&self.caller, self.job.as_deref(), &app.so_far());
        self.noted = Some(Instant::now());
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // What passed since then; not the time of a client that stayed and took nothing more, for
        // which up to ten milliseconds of its stream are not noted.
        if self.noted.is_some_and(|at| at.elapsed() < NOTED_EVERY) {
            self.note();
        }
    }
}
