//! The steps of one connection, found before they are read.
//!
//! Steps of batches with a fixed number of rows are found at once. Batches bounded by length are
//! found by going through all before them, which sorts windows of rows: threads for such work do
//! that, a few steps at a time, so that no thread waits for a receiver.

use forebay_core::{Error, Result};
use forebay_plan::{Step, Steps};
use std::collections::VecDeque;
use tokio::task::JoinHandle;

/// Steps that are found together.
const STEPS_AT_ONCE: usize = 4;

type Found = VecDeque<Result<Option<Step>>>;

pub(super) struct Walk {
    /// `None` while a thread has them.
    steps: Option<Steps>,
    next: u64,
    of: u64,
    is_bounded: bool,
    found: Found,
    walking: Option<JoinHandle<(Steps, Found)>>,
}

impl Walk {
    /// Every `of`-th step, from `next` on.
    pub fn new(steps: Steps, next: u64, of: u64) -> Self {
        Self {
            is_bounded: steps.in_epoch(0).is_none(),
            steps: Some(steps),
            next,
            of,
            found: Found::new(),
            walking: None,
        }
    }

    /// The next step: `Some(Ok(None))` at the end. `None`: it is being looked for, and
    /// [`found`](Walk::found) waits for it.
    pub fn known(&mut self) -> Option<Result<Option<Step>>> {
        if let Some(step) = self.found.pop_front() {
            return Some(step);
        }
        let mut steps = self.steps.take()?;
        let (first, of) = (self.next, self.of);
        if !self.is_bounded {
            self.next += of;
            let step = steps.step(first);
            self.steps = Some(steps);
            return Some(step);
        }
        self.next += of * STEPS_AT_ONCE as u64;
        self.walking = Some(tokio::task::spawn_blocking(move || {
            let mut found = Found::new();
            for n in 0..STEPS_AT_ONCE as u64 {
                let step = steps.step(first + n * of);
                let is_last = !matches!(step, Ok(Some(_)));
                found.push_back(step);
                if is_last {
                    break;
                }
            }
            (steps, found)
        }));
        None
    }

    /// Waits for what is being looked for; for ever, if nothing is.
    pub async fn found(&mut self) {
        let Some(walking) = &mut self.walking else {
            return std::future::pending().await;
        };
        let done = walking.await;
        self.walking = None;
        match done {
            Ok((steps, found)) => {
                self.steps = Some(steps);
                self.found.extend(found);
            }
            Err(e) => {
                let e = Error::internal("the steps of a stream could not be found").caused_by(e);
                self.found.push_back(Err(e));
            }
        }
    }
}
