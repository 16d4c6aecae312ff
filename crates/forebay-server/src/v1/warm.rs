//! `POST /v1/forebay/warm`: brings objects to the local disk, or in a cluster to the disks of the
//! nodes that own them, and reports progress line by line.
//!
//! The answer is JSON lines: `{"event":"progress",…}` now and then, one `{"event":"object",…}` for
//! each object that was not warmed, and at the end exactly one `{"event":"report",…}`. When the
//! client leaves, the body is dropped, and the work stops.

use super::{Call, selection};
use crate::{body::AnswerBody, operate::Everywhere};
use bytes::Bytes;
use forebay_core::{Error, ObjectName, Result};
use forebay_engine::{Engine, WarmOutcome, WarmReport};
use forebay_protocol::{
    LINES_CONTENT_TYPE,
    cache::{NotWarmed, NotWarmedWhy, Selection, WarmEvent, WarmReport as Sums},
};
use futures::{
    FutureExt, StreamExt,
    future::{BoxFuture, OptionFuture},
    stream,
    stream::FuturesUnordered,
};
use http::{HeaderValue, Response, header};
use std::{collections::VecDeque, sync::Arc, time::Duration};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

const PROGRESS_EVERY: Duration = Duration::from_millis(500);

pub async fn warm(call: &Call) -> Result<Response<AnswerBody>> {
    call.needs_chunks("a warm-up")?;
    let selection::Selected { selection, names } = selection::of(call).await?;
    let engine = call.app.engine.clone();
    let everywhere = Everywhere::of(call);
    let most = call.app.config().limits.warm_concurrency.max(1);
    let concurrency = selection.concurrency.unwrap_or(most).clamp(1, most);
    let (queue, token) = if selection.prefix.is_some() {
        // Fetch the first page now, so that a missing bucket is an error and not an empty report.
        let (names, next) = selection::page(&selection, &engine, None).await?;
        (names, next)
    } else {
        (names.into_iter().map(|n| (n, 0)).collect(), None)
    };
    let mut ticks = interval_at(Instant::now() + PROGRESS_EVERY, PROGRESS_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let work = Work {
        listed: queue.len() as u64,
        queue: queue.into(),
        listing_done: token.is_none(),
        token,
        listing: None,
        in_flight: FuturesUnordered::new(),
        concurrency,
        report: WarmReport::default(),
        ticks,
        began: Instant::now(),
        error: None,
        reported: false,
        selection,
        engine,
        everywhere,
    };
    let lines = stream::unfold(work, |mut work| async move {
        let event = work.next().await?;
        Some((line(&event), work))
    });
    let mut response = Response::new(AnswerBody::stream(lines.boxed(), None));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static(LINES_CONTENT_TYPE),
    );
    Ok(response)
}

/// Names with their sizes, and where the next page begins.
type Page = (Vec<(ObjectName, u64)>, Option<String>);

struct Work {
    engine: Engine,
    /// The nodes that each bring what they own; `None`: this node brings everything.
    everywhere: Option<Arc<Everywhere>>,
    selection: Selection,
    /// Listed but not begun.
    queue: VecDeque<(ObjectName, u64)>,
    listed: u64,
    token: Option<String>,
    listing_done: bool,
    /// The page that is on its way.
    listing: Option<BoxFuture<'static, Result<Page>>>,
    in_flight: FuturesUnordered<BoxFuture<'static, (ObjectName, WarmOutcome)>>,
    concurrency: usize,
    report: WarmReport,
    ticks: Interval,
    began: Instant,
    /// Why the listing broke off; the report says so.
    error: Option<String>,
    reported: bool,
}

impl Work {
    /// The next line; `None` after the report.
    async fn next(&mut self) -> Option<WarmEvent> {
        loop {
            if self.reported {
                return None;
            }
            while self.in_flight.len() < self.concurrency {
                let Some((name, _)) = self.queue.pop_front() else {
                    break;
                };
                let (engine, dry_run) = (self.engine.clone(), self.selection.dry_run);
                let everywhere = self.everywhere.clone();
                let warm = async move {
                    let outcome = match everywhere {
                        Some(everywhere) => everywhere.warm(&name, dry_run).await,
                        None => engine.warm(&name, dry_run).await,
                    };
                    (name, outcome)
                };
                self.in_flight.push(warm.boxed());
            }
            if self.queue.is_empty() && !self.listing_done && self.listing.is_none() {
                let (selection, engine) = (self.selection.clone(), self.engine.clone());
                let token = self.token.take();
                let page = async move { selection::page(&selection, &engine, token).await };
                self.listing = Some(page.boxed());
            }
            if self.in_flight.is_empty() && self.listing.is_none() {
                self.reported = true;
                return Some(WarmEvent::Report(self.so_far()));
            }
            // What is in flight goes on while a page is listed.
            tokio::select! {
                Some((name, outcome)) = self.in_flight.next() => {
                    self.report.count(&outcome);
                    let everywhere = self.everywhere.as_deref();
                    if let Some(not_warmed) = complaint(&name, &outcome, everywhere) {
                        return Some(WarmEvent::Object(not_warmed));
                    }
                }
                Some(page) = OptionFuture::from(self.listing.as_mut()) => {
                    self.listing = None;
                    match page {
                        Ok((names, next)) => {
                            self.listed += names.len() as u64;
                            self.queue.extend(names);
                            self.listing_done = next.is_none();
                            self.token = next;
                        }
                        Err(e) => {
                            // Finish what was begun, so that the report is exact about it.
                            self.listing_done = true;
                            self.error = Some(e.context("the listing broke off").describe());
                        }
                    }
                }
                _ = self.ticks.tick() => return Some(WarmEvent::Progress(self.so_far())),
            }
        }
    }

    fn so_far(&self) -> Sums {
        let r = &self.report;
        Sums {
            dry_run: self.selection.dry_run,
            objects: r.objects(),
            listed: self.listed,
            listing_done: self.listing_done,
            warmed: r.warmed,
            warmed_bytes: r.warmed_bytes,
            already_there: r.already_there,
            already_there_bytes: r.already_there_bytes,
            missing: r.missing,
            denied: r.denied,
            failed: r.failed,
            bytes: r.warmed_bytes + r.already_there_bytes,
            seconds: self.began.elapsed().as_secs_f64(),
            error: self.error.clone(),
            // At the end only: there may be many nodes.
            nodes: match &self.everywhere {
                Some(everywhere) if self.reported => everywhere.work(),
                _ => Vec::new(),
            },
        }
    }
}

fn line(event: &WarmEvent) -> Result<Bytes> {
    let mut text = serde_json::to_vec(event)
        .map_err(|e| Error::internal("an event that cannot be written").caused_by(e))?;
    text.push(b'\n');
    Ok(Bytes::from(text))
}

/// What to report about an object that was not warmed.
fn complaint(
    name: &ObjectName,
    outcome: &WarmOutcome,
    everywhere: Option<&Everywhere>,
) -> Option<NotWarmed> {
    let (outcome, message) = match outcome {
        WarmOutcome::Warmed { .. } | WarmOutcome::AlreadyThere { .. } => return None,
        WarmOutcome::Missing => (
            NotWarmedWhy::Missing,
            "the object does not exist".to_owned(),
        ),
        WarmOutcome::Denied => (
            NotWarmedWhy::Denied,
            "the origin does not let this node read it".to_owned(),
        ),
        WarmOutcome::Failed(e) => {
            let message = match everywhere {
                Some(everywhere) => everywhere.reason(name, e),
                None => e.describe(),
            };
            (NotWarmedWhy::Failed, message)
        }
    };
    Some(NotWarmed {
        bucket: name.bucket().to_owned(),
        key: name.key().to_owned(),
        outcome,
        message,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_testing::engine::{Bench, name};

    #[tokio::test]
    async fn objects_go_on_and_progress_is_told_while_a_page_is_listed() {
        let b = Bench::new(forebay_engine::Freshness::Immutable);
        let (tell, told) = tokio::sync::oneshot::channel::<()>();
        let page = async {
            told.await.unwrap();
            Ok((vec![(name("none"), 0)], None))
        };
        let missing = async { (name("gone"), WarmOutcome::Missing) };
        // The object comes before.
        let every = Duration::from_secs(4);
        let mut work = Work {
            engine: b.engine.clone(),
            everywhere: None,
            selection: Selection::default(),
            queue: VecDeque::new(),
            listed: 1,
            token: None,
            listing_done: false,
            listing: Some(page.boxed()),
            in_flight: FuturesUnordered::from_iter([missing.boxed()]),
            concurrency: 4,
            report: WarmReport::default(),
            ticks: interval_at(Instant::now() + every, every),
            began: Instant::now(),
            error: None,
            reported: false,
        };
        let Some(WarmEvent::Object(_)) = work.next().await else {
            panic!("the object was looked up")
        };
        let Some(WarmEvent::Progress(sums)) = work.next().await else {
            panic!("it says how far it is")
        };
        assert_eq!(
            (sums.listed, sums.listing_done, sums.missing),
            (1, false, 1)
        );
        tell.send(()).unwrap();
        let report = loop {
            match work.next().await {
                Some(WarmEvent::Report(sums)) => break sums,
                Some(_) => {}
                None => panic!("a report comes last"),
            }
        };
        assert_eq!(
            (report.listed, report.listing_done, report.missing),
            (2, true, 2)
        );
        assert!(work.next().await.is_none());
    }
}
