//! One connection of a stream: steps are read ahead of the socket, several at a time, put into
//! frames, and handed over in order.
//!
//! The connection's window limits the bytes being read and ready (`window.rs`). The memory of rows
//! is released when the socket has taken their last byte.

use super::{
    reach::{Farther, Reach},
    source::Source,
    stats::Open,
    walk::Walk,
    window::{Place, Window},
};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result, limits, request};
use forebay_plan::Step;
use forebay_protocol::{
    frame::{Frame, FrameTag},
    stream::Lane,
};
use futures::{StreamExt, stream::FuturesOrdered};
use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{MissedTickBehavior, interval_at},
};

/// Steps of unknown size that are read at once to begin with.
const FIRST_STEPS: u64 = 4;

/// A task that is aborted when its owner goes away.
pub(super) struct Task<T>(JoinHandle<T>);

impl<T: Send + 'static> Task<T> {
    pub fn spawn(work: impl Future<Output = T> + Send + 'static) -> Self {
        Task(request::spawn(work))
    }
}

impl<T> Future for Task<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(cx).map(|done| {
            done.map_err(|e| Error::internal("a task of a stream failed").caused_by(e.to_string()))
        })
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Where frames go, and the state of sending them.
pub(super) struct Outlet {
    pub window: Arc<Window>,
    pub reach: Reach,
    pub pieces: mpsc::UnboundedSender<Bytes>,
    /// The place after what was handed over last.
    pub given: watch::Sender<(u64, u64)>,
    pub open: Arc<Open>,
    /// Whether the node is stopping.
    pub stop: watch::Receiver<bool>,
}

pub(super) struct Producer<S> {
    of: u64,
    next: u64,
    walk: Walk,
    source: Arc<S>,
    outlet: Outlet,
    /// The expected size of a step, judging by earlier ones.
    expected_bytes: u64,
    farther: Farther,
}

/// A step that is ready to be sent.
struct Ready {
    frame: Frame,
    place: Place,
    memory: Box<dyn Send + Sync>,
    after: (u64, u64),
}

impl<S: Source> Producer<S> {
    pub fn new(lane: Lane, walk: Walk, source: Arc<S>, outlet: Outlet) -> Self {
        let rows = u64::from(walk.most_rows());
        let mut expected_bytes = source
            .expected_row_bytes()
            .saturating_mul(rows)
            .saturating_add(4096);
        if walk.is_bounded() {
            // Batches usually have far fewer rows than they may have.
            expected_bytes = expected_bytes.min(outlet.window.size / FIRST_STEPS);
        }
        Producer {
            farther: Farther::new(outlet.reach, source.work()),
            of: lane.of.into(),
            next: lane.first(),
            walk,
            source,
            outlet,
            expected_bytes,
        }
    }

    pub async fn run(mut self) {
        let mut reading = FuturesOrdered::new();
        let mut end = None;
        let mut stop = self.outlet.stop.clone();
        let window = self.outlet.window.clone();
        let every = Duration::from_secs(limits::STREAM_KEEP_ALIVE_SECS);
        let mut alive = interval_at(tokio::time::Instant::now() + every, every);
        alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            while end.is_none()
                && reading.len() < self.farther.steps()
                && window.has_room(self.expected_bytes, self.farther.is_on())
            {
                match self.walk.known() {
                    None => break,
                    Some(Ok(Some(step))) => {
                        reading.push_back(self.read(step));
                        self.next += self.of;
                    }
                    Some(Ok(None)) => end = Some(Ok(self.next)),
                    Some(Err(e)) => end = Some(Err(e)),
                }
            }
            match &end {
                Some(Ok(step)) if reading.is_empty() => return self.end(*step),
                Some(Err(e)) if reading.is_empty() => return self.fail(self.next, e),
                _ => {}
            }
            self.farther.look(|| self.source.work());
            let (began, idle, drained) = (Instant::now(), reading.is_empty(), window.is_drained());
            tokio::select! {
                Some(done) = reading.next() => match done {
                    Ok(Ok(ready)) => self.send(ready),
                    Ok(Err((step, e))) => return self.fail(step, &e),
                    Err(e) => return self.fail(self.next, &e),
                },
                () = self.walk.found() => {}
                () = window.changed.notified() => {}
                () = self.outlet.pieces.closed() => return,
                Ok(_) = stop.wait_for(|stop| *stop) => {
                    let e = Error::new(ErrorKind::ShuttingDown, "the node is stopping")
                        .hint("connect to another node, or to this one when it is back");
                    return self.fail(self.next, &e);
                }
                _ = alive.tick() => self.tell(),
            }
            if idle {
                self.outlet.open.was_full(began.elapsed());
            } else if drained {
                self.outlet.open.waited(began.elapsed());
            }
        }
    }

    /// Starts reading a step.
    fn read(&self, step: Step) -> Task<Result<Ready, (u64, Error)>> {
        let (source, open, place) = (
            self.source.clone(),
            self.outlet.open.clone(),
            self.outlet.window.take(self.expected_bytes),
        );
        Task::spawn(async move {
            let number = step.step;
            let made = async {
                let began = Instant::now();
                let given = source.read(&step.rows).await?;
                let read = began.elapsed();
                let after = (step.next.epoch, step.next.position);
                let next = if after.0 > step.epoch { 0 } else { after.1 };
                let padding = (step.rows.len() - step.real) as u32;
                let frame = Frame::rows(
                    FrameTag {
                        epoch: step.epoch,
                        step: number,
                        next,
                        padding,
                    },
                    &given.batch,
                )?;
                open.made(read, began.elapsed() - read);
                let place = place.ready(frame.wire_bytes());
                Ok(Ready {
                    frame,
                    place,
                    memory: given.memory,
                    after,
                })
            };
            made.await.map_err(|e: Error| {
                (
                    number,
                    e.context(format!("step {number} (epoch {})", step.epoch)),
                )
            })
        })
    }

    fn send(&mut self, ready: Ready) {
        let bytes = ready.frame.wire_bytes();
        // Follows the sizes of steps, erring on the high side.
        self.expected_bytes = if bytes > self.expected_bytes {
            bytes
        } else {
            (self.expected_bytes * 7 + bytes) / 8
        };
        self.outlet.open.sent(ready.frame.header.rows.into(), bytes);
        self.outlet.given.send_replace(ready.after);
        self.source.passed(ready.after.0, ready.after.1);
        for piece in ready.frame.into_pieces(Keep(ready.place, ready.memory)) {
            // The loop notices a receiver that has gone.
            let _ = self.outlet.pieces.send(piece);
        }
    }

    /// Sends a keep-alive with the progress, unless the last such message is still waiting.
    fn tell(&self) {
        let Some(told) = self.outlet.window.tell() else {
            return;
        };
        let json = self
            .outlet
            .open
            .json(self.source.shares())
            .to_string()
            .into_bytes();
        for piece in Frame::keep_alive(
            FrameTag {
                step: self.next,
                ..FrameTag::default()
            },
            json,
        )
        .into_pieces(told)
        {
            let _ = self.outlet.pieces.send(piece);
        }
    }

    fn end(&self, step: u64) {
        let json = self
            .outlet
            .open
            .json(self.source.shares())
            .to_string()
            .into_bytes();
        for piece in Frame::end(
            FrameTag {
                step,
                ..FrameTag::default()
            },
            json,
        )
        .into_pieces(())
        {
            let _ = self.outlet.pieces.send(piece);
        }
    }

    fn fail(&self, step: u64, e: &Error) {
        self.outlet.open.failed();
        tracing::warn!(step, error = %e.describe(), "a stream ended");
        // The condition that failed is the version that the dataset was built from: to ask again
        // would not help.
        let e = &match e.kind() {
            ErrorKind::VersionChanged => e.clone().with_kind(ErrorKind::PreconditionFailed),
            _ => e.clone(),
        };
        for piece in Frame::error(
            FrameTag {
                step,
                ..FrameTag::default()
            },
            e,
        )
        .into_pieces(())
        {
            let _ = self.outlet.pieces.send(piece);
        }
    }
}

/// What is released when the last byte of a step has been taken.
struct Keep(
    #[allow(dead_code)] Place,
    #[allow(dead_code)] Box<dyn Send + Sync>,
);
