//! What was received but not yet yielded, in the order of steps.
//!
//! Lanes put steps in as they arrive; one reader takes them out in order. The shelf is limited in
//! bytes: a lane asks for room before it reads a payload, and while there is none it does not read,
//! so that its node stops too. The next step to be yielded always has room, so the lane that
//! everybody waits for is never held back, and the limit is exceeded by at most one frame.
//!
//! Invariant: each step before the end is yielded exactly once, in order; an error is yielded in
//! place of its step.

use arrow_buffer::Buffer;
use forebay_core::{Error, Result, sync::Mutex};
use forebay_protocol::frame::FrameHeader;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// A step's rows as they arrived, checked against their checksum.
#[derive(Clone, Debug)]
pub struct Received {
    /// Which step, and how many rows.
    pub header: FrameHeader,
    /// An Arrow IPC stream: see [`forebay_protocol::frame::decode_checked`].
    pub payload: Buffer,
}

pub struct Shelf {
    limit_bytes: u64,
    inner: Mutex<Inner>,
    /// Signals that there may be room now.
    room: Notify,
    /// Signals that there may be something to yield now.
    ready: Notify,
}

#[derive(Default)]
struct Inner {
    next: u64,
    steps: BTreeMap<u64, Received>,
    /// Counts what is on the shelf and what is being received.
    bytes: u64,
    most_bytes: u64,
    /// The first step that does not exist.
    end: Option<u64>,
    failed: BTreeMap<u64, Error>,
    /// The stream is over, whatever step comes next: nothing more arrives.
    over: Option<Error>,
    /// The highest step whose header was seen.
    seen: Option<u64>,
    waited: Duration,
    waiting_since: Option<Instant>,
}

/// How full the shelf is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Level {
    pub bytes: u64,
    pub most_bytes: u64,
    pub steps: u64,
    pub next: u64,
    pub seen: Option<u64>,
    /// The total time that the reader has waited.
    pub waited: Duration,
}

/// Bytes that a lane may receive. They are given back unless they become a step.
pub struct Room<'a> {
    shelf: &'a Shelf,
    bytes: u64,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.shelf.inner.lock().bytes -= self.bytes;
            self.shelf.room.notify_waiters();
        }
    }
}

impl Shelf {
    /// A shelf whose first step is `next`.
    pub fn starting_at(next: u64, limit_bytes: u64) -> Self {
        let inner = Mutex::new(Inner {
            next,
            ..Inner::default()
        });
        Shelf {
            limit_bytes,
            inner,
            room: Notify::new(),
            ready: Notify::new(),
        }
    }

    /// Waits until a step of `bytes` may be received; also returns how long that took.
    pub async fn room(&self, step: u64, bytes: u64) -> (Room<'_>, Duration) {
        let mut began = None;
        loop {
            let mut changed = std::pin::pin!(self.room.notified());
            // Registered before the check, so that a change in between is not missed.
            changed.as_mut().enable();
            {
                let mut inner = self.inner.lock();
                inner.seen = inner.seen.max(Some(step));
                if step == inner.next
                    || inner.bytes == 0
                    || inner.bytes.saturating_add(bytes) <= self.limit_bytes
                {
                    inner.bytes += bytes;
                    inner.most_bytes = inner.most_bytes.max(inner.bytes);
                    return (
                        Room { shelf: self, bytes },
                        began.map_or(Duration::ZERO, |b: Instant| b.elapsed()),
                    );
                }
            }
            began.get_or_insert_with(Instant::now);
            changed.await;
        }
    }

    pub fn put(&self, mut room: Room<'_>, step: u64, received: Received) {
        let mut inner = self.inner.lock();
        if inner.over.is_some() || step < inner.next || inner.steps.contains_key(&step) {
            // The step is dropped with its room: each step is yielded once, whatever lanes do.
            drop(inner);
            return;
        }
        // From now on, the step itself counts for the bytes.
        inner.bytes = inner.bytes - room.bytes + received.header.payload_bytes;
        room.bytes = 0;
        inner.steps.insert(step, received);
        let is_next = step == inner.next;
        drop(inner);
        if is_next {
            self.ready.notify_waiters();
        }
    }

    /// A node says that this step does not exist.
    pub fn end_at(&self, step: u64) {
        let mut inner = self.inner.lock();
        inner.end = Some(inner.end.map_or(step, |end| end.min(step)));
        drop(inner);
        self.ready.notify_waiters();
    }

    /// This step cannot be had.
    pub fn fail_at(&self, step: u64, error: Error) {
        self.inner.lock().failed.entry(step).or_insert(error);
        self.ready.notify_waiters();
    }

    /// No more steps can be had, except those that are on the shelf.
    pub fn fail(&self, error: Error) {
        self.inner.lock().over.get_or_insert(error);
        self.ready.notify_waiters();
    }

    /// The next step, its error, or the end, if already known.
    pub fn try_next(&self) -> Option<Result<Option<Received>>> {
        let mut inner = self.inner.lock();
        let next = inner.next;
        let found = if let Some(received) = inner.steps.remove(&next) {
            inner.next += 1;
            inner.bytes -= received.header.payload_bytes;
            Some(Ok(Some(received)))
        } else if let Some(error) = inner.failed.get(&next).or(inner.over.as_ref()) {
            Some(Err(error.clone()))
        } else {
            inner.end.filter(|end| next >= *end).map(|_| Ok(None))
        };
        if found.is_some()
            && let Some(since) = inner.waiting_since.take()
        {
            inner.waited += since.elapsed();
        }
        drop(inner);
        if matches!(found, Some(Ok(Some(_)))) {
            self.room.notify_waiters();
        }
        found
    }

    pub async fn next(&self) -> Result<Option<Received>> {
        loop {
            let mut changed = std::pin::pin!(self.ready.notified());
            changed.as_mut().enable();
            if let Some(next) = self.try_next() {
                return next;
            }
            self.inner
                .lock()
                .waiting_since
                .get_or_insert_with(Instant::now);
            changed.await;
        }
    }

    /// Drops everything on the shelf; from now on it yields only an error.
    pub fn close(&self) {
        let mut inner = self.inner.lock();
        let dropped = std::mem::take(&mut inner.steps);
        inner.bytes -= dropped
            .values()
            .map(|r| r.header.payload_bytes)
            .sum::<u64>();
        inner.over = Some(Error::invalid("the stream was closed"));
        drop(inner);
        self.ready.notify_waiters();
        self.room.notify_waiters();
    }

    pub fn level(&self) -> Level {
        let inner = self.inner.lock();
        Level {
            bytes: inner.bytes,
            most_bytes: inner.most_bytes,
            steps: inner.steps.len() as u64,
            next: inner.next,
            seen: inner.seen,
            waited: inner.waited
                + inner
                    .waiting_since
                    .map_or(Duration::ZERO, |since| since.elapsed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_protocol::frame::{FrameKind, FrameTag};
    use futures::FutureExt;

    fn received(step: u64, bytes: u64) -> Received {
        let tag = FrameTag {
            step,
            ..FrameTag::default()
        };
        let header = FrameHeader {
            kind: FrameKind::Rows,
            flags: 0,
            tag,
            rows: 1,
            payload_bytes: bytes,
            payload_crc: 0,
        };
        Received {
            header,
            payload: Buffer::from(vec![0u8; bytes as usize]),
        }
    }

    fn arrive(shelf: &Shelf, step: u64, bytes: u64) -> bool {
        let Some((room, _)) = shelf.room(step, bytes).now_or_never() else {
            return false;
        };
        shelf.put(room, step, received(step, bytes));
        true
    }

    #[test]
    fn steps_come_out_in_order_and_once() {
        let shelf = Shelf::starting_at(0, 100);
        assert!(arrive(&shelf, 2, 10) && arrive(&shelf, 1, 10));
        assert!(shelf.try_next().is_none());
        assert!(
            arrive(&shelf, 0, 10) && arrive(&shelf, 1, 10),
            "a second copy is taken and dropped"
        );
        let mut order = Vec::new();
        while let Some(Ok(Some(r))) = shelf.try_next() {
            order.push(r.header.tag.step);
        }
        assert_eq!(order, [0, 1, 2]);
        assert_eq!(shelf.level().bytes, 0);
        shelf.end_at(5);
        shelf.end_at(3);
        shelf.end_at(4);
        assert!(matches!(shelf.try_next(), Some(Ok(None))));
    }

    #[test]
    fn what_lies_here_is_bounded_and_the_next_step_always_has_room() {
        let shelf = Shelf::starting_at(0, 100);
        assert!(arrive(&shelf, 1, 60) && arrive(&shelf, 2, 40));
        assert!(!arrive(&shelf, 3, 1), "full");
        assert!(arrive(&shelf, 0, 1000), "the next one is never held back");
        assert!(matches!(shelf.try_next(), Some(Ok(Some(_)))));
        assert!(!arrive(&shelf, 3, 1), "still full");
        assert!(matches!(shelf.try_next(), Some(Ok(Some(_)))));
        assert!(arrive(&shelf, 3, 1));
        drop(shelf.room(4, 50).now_or_never().unwrap());
        assert_eq!(
            shelf.level().bytes,
            41,
            "room that was not used is given back"
        );
    }

    #[test]
    fn a_stream_that_is_over_gives_what_lies_here_and_then_its_error_for_ever() {
        let shelf = Shelf::starting_at(0, 100);
        assert!(arrive(&shelf, 0, 10) && arrive(&shelf, 1, 10));
        shelf.fail(Error::internal("a defect"));
        assert!(matches!(shelf.try_next(), Some(Ok(Some(_)))));
        assert!(matches!(shelf.try_next(), Some(Ok(Some(_)))));
        for _ in 0..2 {
            assert!(shelf.try_next().expect("not to be waited for").is_err());
        }
        // What a lane adds after the end, or after a close, is dropped.
        let shelf = Shelf::starting_at(0, 100);
        shelf.close();
        assert!(arrive(&shelf, 0, 10));
        for _ in 0..2 {
            assert!(shelf.try_next().expect("not to be waited for").is_err());
        }
        assert_eq!(shelf.level().bytes, 0);
    }

    #[test]
    fn an_error_waits_for_its_turn() {
        let shelf = Shelf::starting_at(0, 100);
        shelf.fail_at(1, Error::corrupt("row 7"));
        assert!(shelf.try_next().is_none());
        assert!(arrive(&shelf, 0, 10));
        assert!(matches!(shelf.try_next(), Some(Ok(Some(_)))));
        assert!(shelf.try_next().unwrap().is_err());
        assert!(shelf.try_next().unwrap().is_err(), "and stays");
    }
}
