//! The steps of one connection, found before they are read.
//!
//! Steps of batches with a fixed number of rows are found at once. Batches bounded by length are
//! found by going through all before them, which sorts windows of rows: threads for such work do
//! that. A few streams at a time have one, each for a moment ([`TURN`]), so that no thread waits for
//! a receiver, and no stream for one that has far to go. When the connection has gone, the thread
//! stops at the next window.

use super::{Bounded, Lane};
use crate::blocking::blocking;
use forebay_core::{Error, Result};
use forebay_plan::{Step, Steps};
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{sync::Semaphore, task::JoinHandle};

/// Steps that are found together.
const STEPS_AT_ONCE: usize = 4;
/// For how long a thread goes on with one stream.
const TURN: Duration = Duration::from_millis(50);

type Found = VecDeque<Result<Option<Step>>>;

pub(super) struct Walk {
    /// `None` while a thread has them.
    steps: Option<Steps>,
    /// The next step that is wanted, and the distance to the one after it.
    next: u64,
    of: u64,
    most_rows: u32,
    bounded: Option<Bounded>,
    found: Found,
    walking: Option<JoinHandle<Result<Turn>>>,
}

/// What came of a turn.
struct Turn {
    steps: Steps,
    found: Found,
    next: u64,
}

impl Walk {
    /// The steps of a lane. `bounded`: what batches that are bounded by length need.
    pub fn new(steps: Steps, lane: Lane, bounded: Option<Bounded>) -> Self {
        Self {
            most_rows: Steps::partition(&steps).batch.most_rows(),
            steps: Some(steps),
            next: lane.first(),
            of: lane.of.into(),
            bounded,
            found: Found::new(),
            walking: None,
        }
    }

    /// The most rows that a step has.
    pub fn most_rows(&self) -> u32 {
        self.most_rows
    }

    /// Whether batches are bounded by length.
    pub fn is_bounded(&self) -> bool {
        self.bounded.is_some()
    }

    /// The next step: `Some(Ok(None))` at the end. `None`: it is being looked for, and
    /// [`found`](Walk::found) waits for it.
    pub fn known(&mut self) -> Option<Result<Option<Step>>> {
        if let Some(step) = self.found.pop_front() {
            return Some(step);
        }
        let mut steps = self.steps.take()?;
        let Some(bounded) = &self.bounded else {
            let step = steps.step(self.next);
            self.next += self.of;
            self.steps = Some(steps);
            return Some(step);
        };
        let (next, of, walks) = (self.next, self.of, bounded.walks.clone());
        self.walking = Some(tokio::spawn(take_turn(steps, next, of, walks)));
        None
    }

    /// Waits for what is being looked for; for ever, if nothing is.
    pub async fn found(&mut self) {
        let Some(walking) = &mut self.walking else {
            return std::future::pending().await;
        };
        let done = walking.await;
        self.walking = None;
        match done.unwrap_or_else(|e| Err(Error::internal("a walk failed").caused_by(e))) {
            Ok(turn) => {
                (self.steps, self.next) = (Some(turn.steps), turn.next);
                self.found.extend(turn.found);
            }
            Err(e) => {
                let e = e.context("the steps of a stream could not be found");
                self.found.push_back(Err(e));
            }
        }
    }
}

/// Goes on for a moment, when it is this stream's turn.
async fn take_turn(
    mut steps: Steps,
    mut next: u64,
    of: u64,
    walks: Arc<Semaphore>,
) -> Result<Turn> {
    let permit = walks.acquire_owned().await;
    blocking(move || {
        let (began, mut found) = (Instant::now(), Found::new());
        while found.len() < STEPS_AT_ONCE {
            match steps.step_within(next, || began.elapsed() < TURN) {
                Ok(None) => break,
                Ok(Some(Some(step))) => {
                    found.push_back(Ok(Some(step)));
                    next += of;
                }
                Ok(Some(None)) => {
                    found.push_back(Ok(None));
                    break;
                }
                Err(e) => {
                    found.push_back(Err(e));
                    break;
                }
            }
        }
        drop(permit);
        Turn { steps, found, next }
    })
    .await
}
