//! The blocks that an order needs next, fetched and decoded before a step asks for them.
//!
//! From the place that was handed over last, the order is walked ahead, stretch by stretch; each
//! block that a stretch needs for the first time is held (`Rows::hold`), several at a time. A block
//! is released when the last stretch that needs it has been handed over. With a block shuffle this
//! makes the next group ready while rows of the current one are sent; with `none` and `window`, the
//! next blocks.
//!
//! Bounded: blocks that are ready and not yet used take at most [`AHEAD_BYTES`]; if there is no
//! memory to hold blocks, nothing is held until the stream has moved on. A row-wise shuffle needs
//! as many blocks as rows, so nothing is held for it.

use super::{
    source::{Held, Source},
    stats::StreamStats,
};
use forebay_core::ErrorKind;
use forebay_plan::{Plan, Shuffle};
use futures::{StreamExt, stream::FuturesUnordered};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, atomic::Ordering::Relaxed},
};
use tokio::sync::watch;

const AHEAD_BYTES: u64 = 64 << 20;
/// Blocks that are made ready at the same time.
const AT_ONCE: usize = 8;
/// Positions that are inspected at once.
const STRETCH_MAX_ROWS: u64 = 1 << 16;
/// How far the order is walked ahead at most, in stretches: enough if blocks take no memory.
const STRETCHES_AHEAD_MAX: u64 = 64;

type Key = (u32, u64);
/// Epoch and position.
type Place = (u64, u64);

pub(super) struct Ahead<S> {
    source: Arc<S>,
    plan: Arc<Plan>,
    given: watch::Receiver<Place>,
    /// The epoch before which the stream ends.
    until: u64,
    stats: Arc<StreamStats>,
    /// How far the order has been walked.
    walked: Place,
    stretch: u64,
    /// Found and not yet started, with the place of their first use.
    todo: VecDeque<(Key, Place)>,
    /// Being made ready: adjacent stretches need the same blocks.
    coming: HashSet<Key>,
    held: HashMap<Key, (Held, Place)>,
    /// Where the last walked stretch that needs the block ends. Asking the plan for the next use of
    /// each block instead would take longer than reading the rows.
    needed_until: HashMap<Key, Place>,
}

impl<S: Source> Ahead<S> {
    pub fn new(
        source: Arc<S>,
        plan: Arc<Plan>,
        given: watch::Receiver<Place>,
        until: u64,
        stats: Arc<StreamStats>,
    ) -> Self {
        let blocks: u64 = plan.spec().sources.iter().map(|s| s.shape.blocks()).sum();
        let rows: u64 = plan.spec().sources.iter().map(|s| s.shape.rows()).sum();
        let stretch = (rows / blocks.max(1)).clamp(1, STRETCH_MAX_ROWS);
        let walked = *given.borrow();
        let (todo, coming, held, needed_until) = (
            VecDeque::new(),
            HashSet::new(),
            HashMap::new(),
            HashMap::new(),
        );
        Ahead {
            source,
            plan,
            given,
            until,
            stats,
            walked,
            stretch,
            todo,
            coming,
            held,
            needed_until,
        }
    }

    pub async fn run(mut self) {
        if self.plan.spec().shuffle == Shuffle::Full {
            return;
        }
        let source = self.source.clone();
        let mut holding = FuturesUnordered::new();
        let mut busy = false;
        loop {
            let at = *self.given.borrow_and_update();
            self.let_go(at);
            while !busy && holding.len() < AT_ONCE && self.ahead_bytes(at) < AHEAD_BYTES {
                let Some((key, first)) = self.next_block(at) else {
                    break;
                };
                self.coming.insert(key);
                let hold = source.hold(key.0, key.1);
                holding.push(async move { (key, first, hold.await) });
            }
            tokio::select! {
                moved = self.given.changed() => {
                    if moved.is_err() {
                        return;
                    }
                    busy = false;
                }
                Some((key, first, held)) = holding.next() => match (self.coming.remove(&key), held) {
                    (_, Ok(held)) => {
                        self.stats.blocks_ahead.fetch_add(1, Relaxed);
                        self.stats.blocks_ahead_cold.fetch_add(held.cold.into(), Relaxed);
                        self.held.insert(key, (held, first));
                    }
                    (_, Err(e)) if e.kind() == ErrorKind::Busy => {
                        self.stats.ahead_busy.fetch_add(1, Relaxed);
                        busy = true;
                    }
                    // Whoever reads a row of it gets the error.
                    (_, Err(e)) => tracing::debug!(error = %e.describe(), block = key.1, "a block could not be made ready ahead of a stream"),
                },
            }
        }
    }

    /// Bytes of blocks that are ready and not yet used.
    fn ahead_bytes(&self, at: Place) -> u64 {
        self.held
            .values()
            .filter(|(_, first)| *first > at)
            .map(|(held, _)| held.bytes)
            .sum()
    }

    fn let_go(&mut self, at: Place) {
        let needed = &mut self.needed_until;
        needed.retain(|_, until| *until > at);
        self.held.retain(|key, _| needed.contains_key(key));
    }

    /// The next block to make ready.
    fn next_block(&mut self, at: Place) -> Option<(Key, Place)> {
        loop {
            while let Some((key, first)) = self.todo.pop_front() {
                if self.needed_until.contains_key(&key)
                    && !self.held.contains_key(&key)
                    && !self.coming.contains(&key)
                {
                    return Some((key, first));
                }
            }
            // A stream that was faster than this continues from where it is.
            self.walked = self.walked.max(at);
            let rows = self.plan.rows_per_epoch();
            let distance = (self.walked.0 - at.0)
                .saturating_mul(rows)
                .saturating_add(self.walked.1)
                .saturating_sub(at.1);
            if distance > self.stretch.saturating_mul(STRETCHES_AHEAD_MAX)
                || self.walked.0 >= self.until
            {
                return None;
            }
            let (epoch, from) = self.walked;
            let to = (from + self.stretch).min(rows);
            let blocks = self.plan.blocks_of(epoch, from..to);
            self.walked = if to == rows {
                (epoch + 1, 0)
            } else {
                (epoch, to)
            };
            for key in blocks {
                self.needed_until.insert(key, self.walked);
                self.todo.push_back((key, (epoch, from)));
            }
        }
    }
}
