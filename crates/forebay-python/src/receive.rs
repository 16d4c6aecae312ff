//! A batch being received: a task requests and receives it, Python threads watch it.
//!
//! The task appends what arrives to the batch's region, lets the tar parser find complete entries,
//! and publishes them once per received piece. Whatever happens to the task, it ends in exactly one
//! of two ways: with all entries in order and the proper end of the stream, or with a failure. An
//! answer with fewer or more entries than requested, or in another order, is a failure. If there are
//! several nodes and an answer breaks off, another one is asked for the entries that are missing. In a
//! cluster, the nodes that own the entries may be asked first, each for its own ([`Source`]).

use crate::{
    failure::{Class, Failure, Result},
    inflight::Share,
    process,
    region::Region,
    request::BatchRequest,
    session::Session,
    source::{Source, ask_owners},
    sync::{Condvar, Mutex},
    tar::{Slot, TarParser, of_batch},
};
use forebay_client::{Merged, archive::BLOCK_BYTES};
use pyo3::prelude::*;
use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

/// A batch, as the receiving task and its readers share it.
pub struct Receiving {
    pid: u32,
    pub request: BatchRequest,
    share: Share,
    region: OnceLock<Region>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
pub struct State {
    /// The node has accepted the request.
    pub accepted: bool,
    pub slots: Vec<Slot>,
    pub finished: Option<Result<()>>,
    pub request_id: Option<String>,
}

impl Receiving {
    /// Starts to receive; returns at once.
    pub fn start(
        session: Arc<Session>,
        request: BatchRequest,
    ) -> Result<(Arc<Receiving>, tokio::task::AbortHandle)> {
        if request.len() == 0 {
            return Err(Failure::invalid("the batch is empty").hint("give at least one entry"));
        }
        let receiving = Arc::new(Receiving {
            pid: process::pid(),
            share: Share::new(&session.inflight),
            request,
            region: OnceLock::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let end = EndOfTask(receiving.clone());
        let task = process::runtime()?.spawn(async move {
            let result = end.0.run(&session).await;
            end.0.finish(result);
        });
        Ok((receiving, task.abort_handle()))
    }

    async fn run(&self, session: &Session) -> Result<()> {
        self.share.start().await;
        let mut parser = TarParser::default();
        let (mut seen, mut cuts) = (0, 0);
        let mut owners = ask_owners(session, &self.request);
        loop {
            let (before, of_owners) = (seen, owners.is_some());
            let received = self.receive(session, owners.take(), &mut parser, &mut seen);
            let cut = match received.await {
                // Whatever it is, any node says it, or has what is missing.
                Err(failure) if failure.class == Class::Truncated || of_owners => failure,
                done => return done,
            };
            // Another node sends the rest; unless this one said that an entry is missing.
            let tolerant = self.request.continue_on_error;
            if !tolerant && parser.why_missing().is_some() {
                return Err(cut);
            }
            if !of_owners {
                cuts = if seen > before { 1 } else { cuts + 1 };
            }
            let Some(region) = self.region() else {
                match of_owners {
                    true => continue,
                    false => return Err(cut),
                }
            };
            if cuts > 0 && cuts >= session.node.count() {
                return Err(cut);
            }
            parser.begin_again(region)?;
            if seen == self.request.len() {
                return region.append(&[0; 2 * BLOCK_BYTES]);
            }
        }
    }

    /// Requests the entries after the first `seen`, or takes what `owners` send, and receives them.
    async fn receive(
        &self,
        session: &Session,
        owners: Option<Merged>,
        parser: &mut TarParser,
        seen: &mut usize,
    ) -> Result<()> {
        let (first, of_owners) = (*seen, owners.is_some());
        let asked = Source::ask(session, &self.request, first, owners).await;
        let (mut answer, request_id) =
            asked.map_err(|failure| self.request.explained(self.goes_on(failure, first)))?;
        let region = match self.region() {
            Some(region) => region,
            None => {
                let region = Region::new(&session.regions)?;
                self.region.get_or_init(|| region)
            }
        };
        {
            let mut state = self.state.lock();
            state.accepted = true;
            state.request_id = request_id.clone();
            self.changed.notify_all();
        }
        let mut whole = Vec::new();
        let cut = |mut failure: Failure, parser: &TarParser, seen: usize| {
            failure.request_id = request_id.clone();
            failure.message = format!(
                "{} ({seen} of {} entries had arrived)",
                failure.message,
                self.request.len()
            );
            let missing = parser
                .why_missing()
                .filter(|_| !self.request.continue_on_error);
            if let Some(said) = parser.why_cut().or(missing) {
                // Of the entry that comes next, if not in this order.
                let number = |index| if of_owners { seen } else { first + index };
                failure.message = format!("{}: {}", of_batch(said, number), failure.message);
            }
            failure
        };
        loop {
            self.share.room().await;
            let piece = match answer.piece().await {
                Ok(Some(piece)) => piece,
                Ok(None) => break,
                Err(failure) => return Err(cut(failure, parser, *seen)),
            };
            self.share.add(piece.len() as u64);
            region.append(&piece)?;
            let parsed = parser.advance(region, |slot| {
                if *seen >= self.request.len() {
                    return Err(Failure::truncated(
                        "the answer holds more entries than were requested",
                    ));
                }
                if !self.request.answers(*seen, &slot.name(region)) {
                    return Err(Failure::truncated(format!(
                        "entry {seen} is {:?}, which is not what was requested",
                        slot.name(region)
                    )));
                }
                *seen += 1;
                whole.push(slot);
                Ok(())
            });
            let is_new = !whole.is_empty();
            self.state.lock().slots.append(&mut whole);
            if let Err(failure) = parsed {
                return Err(cut(failure, parser, *seen));
            }
            if is_new {
                self.changed.notify_all();
            }
        }
        if *seen != self.request.len() || !parser.ended() {
            return Err(cut(
                Failure::truncated("the answer ended early"),
                parser,
                *seen,
            ));
        }
        Ok(())
    }

    /// A refusal of the rest is one in the middle of the batch.
    fn goes_on(&self, failure: Failure, seen: usize) -> Failure {
        if seen == 0 || failure.class == Class::Truncated {
            return failure;
        }
        let (message, all) = (
            of_batch(&failure.message, |index| seen + index),
            self.request.len(),
        );
        Failure {
            class: Class::Truncated,
            message: format!("{message} ({seen} of {all} entries had arrived)"),
            ..failure
        }
    }

    fn finish(&self, result: Result<()>) {
        self.state.lock().finished.get_or_insert(result);
        self.changed.notify_all();
    }

    pub fn len(&self) -> usize {
        self.request.len()
    }

    /// The batch's memory, once the first byte may have arrived.
    pub fn region(&self) -> Option<&Region> {
        self.region.get()
    }

    /// Bytes received so far.
    pub fn received(&self) -> usize {
        self.region().map_or(0, Region::len)
    }

    /// What a reader sees now. In a forked child, only a batch that was complete before the fork
    /// can be used.
    pub fn look<T>(&self, look: impl FnOnce(&State) -> T) -> Result<T> {
        if self.pid == process::pid() {
            return Ok(look(&self.state.lock()));
        }
        match self.state.try_lock() {
            Some(state) if state.finished.is_some() => Ok(look(&state)),
            _ => Err(Failure::new(
                Class::Error,
                "this batch was still arriving when the process forked",
            )
            .hint("request batches in the process that uses them")),
        }
    }

    /// Waits until `ready`, the end of the batch, or for `patience`; returns true unless patience
    /// ran out. Signals interrupt it.
    pub fn wait(
        &self,
        py: Python<'_>,
        patience: Option<Duration>,
        ready: impl Fn(&State) -> bool + Sync,
    ) -> PyResult<bool> {
        let ready = |state: &State| state.finished.is_some() || ready(state);
        if self.look(ready)? {
            self.ask();
            return Ok(true);
        }
        self.ask();
        let deadline = patience.map(|p| Instant::now() + p);
        loop {
            let tick = Instant::now() + process::SIGNAL_TICK;
            let until = deadline.map_or(tick, |d| d.min(tick));
            let done = py.detach(|| self.changed.wait_until(self.state.lock(), until, ready));
            if done {
                return Ok(true);
            }
            py.check_signals()?;
            if deadline.is_some_and(|d| Instant::now() >= d) {
                return Ok(false);
            }
        }
    }

    /// From now on the batch's bytes are the caller's, and nothing holds the batch back.
    pub fn ask(&self) {
        if self.pid == process::pid() {
            self.share.ask();
        }
    }

    pub fn is_ours(&self) -> bool {
        self.pid == process::pid()
    }
}

/// Tells the readers when the task ends, however it ends, including a panic or an abort.
struct EndOfTask(Arc<Receiving>);

impl Drop for EndOfTask {
    fn drop(&mut self) {
        self.0.finish(Err(Failure::new(
            Class::Error,
            "the batch was cancelled before it was complete",
        )));
    }
}
