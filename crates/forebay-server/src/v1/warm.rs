//! `POST /v1/forebay/warm`: brings objects to the local disk and says, line by line, how it goes.
//!
//! The answer is JSON lines: `{"event":"progress",…}` now and then, one `{"event":"object",…}` for
//! each object that did not come, and at the end exactly one `{"event":"report",…}`. When the
//! client leaves, the body is dropped, and the work with it.

use super::{Call, node::Selection};
use crate::body::AnswerBody;
use bytes::Bytes;
use forebay_core::{ObjectName, Result};
use forebay_engine::{Engine, WarmOutcome, WarmReport};
use futures::{FutureExt, StreamExt, stream, stream::FuturesUnordered};
use http::{HeaderValue, Response, header};
use serde_json::{Value, json};
use std::{collections::VecDeque, time::Duration};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

const PROGRESS_EVERY: Duration = Duration::from_millis(500);

pub async fn warm(call: &Call) -> Result<Response<AnswerBody>> {
    call.needs_chunks("a warm-up")?;
    let selection = Selection::of(call).await?;
    let engine = call.app.engine.clone();
    let most = call.app.config().limits.warm_concurrency.max(1);
    let concurrency = selection.concurrency.unwrap_or(most).clamp(1, most);
    let (queue, token) = if selection.prefix.is_some() {
        // The first page now, so that a bucket that is not there is an error and not a report of
        // nothing.
        let (names, next) = selection.page(&engine, None).await?;
        (names, next)
    } else {
        (
            selection.names()?.into_iter().map(|n| (n, 0)).collect(),
            None,
        )
    };
    let mut ticks = interval_at(Instant::now() + PROGRESS_EVERY, PROGRESS_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let work = Work {
        listed: queue.len() as u64,
        queue: queue.into(),
        listing_done: token.is_none(),
        token,
        in_flight: FuturesUnordered::new(),
        concurrency,
        report: WarmReport::default(),
        ticks,
        began: Instant::now(),
        error: None,
        reported: false,
        selection,
        engine,
    };
    let lines = stream::unfold(work, |mut work| async move {
        let line = work.next().await?;
        let mut text = line.to_string();
        text.push('\n');
        Some((Ok(Bytes::from(text)), work))
    });
    let mut response = Response::new(AnswerBody::stream(lines.boxed(), None));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/x-ndjson"),
    );
    Ok(response)
}

struct Work {
    engine: Engine,
    selection: Selection,
    /// Listed and not begun.
    queue: VecDeque<(ObjectName, u64)>,
    listed: u64,
    token: Option<String>,
    listing_done: bool,
    in_flight: FuturesUnordered<futures::future::BoxFuture<'static, (ObjectName, WarmOutcome)>>,
    concurrency: usize,
    report: WarmReport,
    ticks: Interval,
    began: Instant,
    /// What broke the listing off; the report says so.
    error: Option<String>,
    reported: bool,
}

impl Work {
    /// The next line; `None` after the report.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if self.reported {
                return None;
            }
            while self.in_flight.len() < self.concurrency {
                let Some((name, _)) = self.queue.pop_front() else {
                    break;
                };
                let (engine, dry_run) = (self.engine.clone(), self.selection.dry_run);
                self.in_flight
                    .push(async move { (name.clone(), engine.warm(&name, dry_run).await) }.boxed());
            }
            if self.queue.is_empty() && !self.listing_done {
                match self.selection.page(&self.engine, self.token.take()).await {
                    Ok((names, next)) => {
                        self.listed += names.len() as u64;
                        self.queue = names.into();
                        self.listing_done = next.is_none();
                        self.token = next;
                        continue;
                    }
                    Err(e) => {
                        // What was begun is finished, so that the report is exact about it.
                        self.listing_done = true;
                        self.error = Some(e.context("the listing broke off").describe());
                        continue;
                    }
                }
            }
            if self.in_flight.is_empty() {
                self.reported = true;
                return Some(self.line("report"));
            }
            tokio::select! {
                Some((name, outcome)) = self.in_flight.next() => {
                    self.report.count(&outcome);
                    if let Some(line) = complaint(&name, &outcome) {
                        return Some(line);
                    }
                }
                _ = self.ticks.tick() => return Some(self.line("progress")),
            }
        }
    }

    fn line(&self, event: &str) -> Value {
        let r = &self.report;
        let mut line = json!({
            "event": event, "dry_run": self.selection.dry_run, "objects": r.objects(), "listed": self.listed, "listing_done": self.listing_done,
            "warmed": r.warmed, "warmed_bytes": r.warmed_bytes, "already_there": r.already_there, "already_there_bytes": r.already_there_bytes,
            "missing": r.missing, "denied": r.denied, "failed": r.failed, "bytes": r.warmed_bytes + r.already_there_bytes,
            "seconds": self.began.elapsed().as_secs_f64(),
        });
        if let Some(error) = &self.error {
            line["error"] = error.clone().into();
        }
        line
    }
}

/// A line for an object that did not come.
fn complaint(name: &ObjectName, outcome: &WarmOutcome) -> Option<Value> {
    let (outcome, message) = match outcome {
        WarmOutcome::Warmed { .. } | WarmOutcome::AlreadyThere { .. } => return None,
        WarmOutcome::Missing => ("missing", "there is no such object".to_owned()),
        WarmOutcome::Denied => (
            "denied",
            "the origin does not let this node read it".to_owned(),
        ),
        WarmOutcome::Failed(e) => ("failed", e.describe()),
    };
    Some(
        json!({"event": "object", "bucket": name.bucket(), "key": name.key(), "outcome": outcome, "message": message}),
    )
}
