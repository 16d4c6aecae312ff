//! The limit on what batches may hold ahead of their consumer: bytes, and requests.
//!
//! A batch counts until somebody asks for it: waits for it, iterates over it, or takes it from
//! `batches()`. From then on its bytes are the caller's. While the limit in bytes is reached, a
//! batch that nobody has asked for stops reading from its connection (so the node waits too), and
//! it does not start while [`BATCHES_AHEAD_MAX`] others are ahead. A batch that somebody has asked
//! for is never held back, so the one at the head of the line always gets through: there is no
//! deadlock, in whatever order batches are asked for.

use crate::{process, sync::Mutex};
use std::sync::Arc;
use tokio::sync::Notify;

/// The most batches that one client receives ahead of their consumers.
pub const BATCHES_AHEAD_MAX: usize = 16;

/// Shared by all batches of a client in one process.
pub struct InFlight {
    limit_bytes: u64,
    used: Mutex<Used>,
    /// Woken when something was given back, or a batch was asked for.
    changed: Notify,
}

#[derive(Default)]
struct Used {
    bytes: u64,
    batches: usize,
}

/// One batch's share.
pub struct Share {
    pid: u32,
    line: Arc<InFlight>,
    mine: Mutex<Mine>,
}

#[derive(Default)]
struct Mine {
    asked_for: bool,
    started: bool,
    bytes: u64,
}

impl InFlight {
    pub fn new(limit_bytes: u64) -> Arc<Self> {
        Arc::new(InFlight {
            limit_bytes,
            used: Mutex::default(),
            changed: Notify::new(),
        })
    }

    /// Bytes held by batches that nobody has asked for yet.
    pub fn used_bytes(&self) -> u64 {
        self.used.lock().bytes
    }
}

impl Share {
    pub fn new(line: &Arc<InFlight>) -> Self {
        Share {
            pid: process::pid(),
            line: line.clone(),
            mine: Mutex::default(),
        }
    }

    /// Waits until this batch may be requested.
    pub async fn start(&self) {
        self.until(|mine, used| {
            let go = mine.asked_for || used.batches < BATCHES_AHEAD_MAX;
            if go && !mine.asked_for {
                mine.started = true;
                used.batches += 1;
            }
            go
        })
        .await
    }

    /// Waits until this batch may continue reading.
    pub async fn room(&self) {
        self.until(|mine, used| mine.asked_for || used.bytes < self.line.limit_bytes)
            .await
    }

    async fn until(&self, mut go: impl FnMut(&mut Mine, &mut Used) -> bool) {
        loop {
            let mut changed = std::pin::pin!(self.line.changed.notified());
            // Registered before the check, so that a change in between is not missed.
            changed.as_mut().enable();
            if go(&mut self.mine.lock(), &mut self.line.used.lock()) {
                return;
            }
            changed.await;
        }
    }

    pub fn add(&self, bytes: u64) {
        let mut mine = self.mine.lock();
        if !mine.asked_for {
            mine.bytes += bytes;
            self.line.used.lock().bytes += bytes;
        }
    }

    /// Somebody asks for this batch now: its bytes are theirs.
    pub fn ask(&self) {
        let mut mine = self.mine.lock();
        if mine.asked_for {
            return;
        }
        mine.asked_for = true;
        {
            let mut used = self.line.used.lock();
            used.bytes -= std::mem::take(&mut mine.bytes);
            used.batches -= usize::from(std::mem::take(&mut mine.started));
        }
        self.line.changed.notify_waiters();
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // In a forked child the line is a dead copy, and a thread that does not exist there may
        // hold its lock.
        if self.pid == process::pid() {
            self.ask();
        }
    }
}
