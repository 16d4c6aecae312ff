//! What is held for receivers.
//!
//! A connection has a window: bytes that are being read for it, or are ready and not yet taken by
//! its socket. A step starts reading only if its expected size fits, or nothing else is in the
//! window. If it turns out larger than expected, its real size counts, so that the next steps wait.
//! The windows of all connections together are bounded too: a receiver that comes when there is no
//! more room gets a smaller one, and finally none.
//!
//! A window may reach farther than its size, with what no other window has: most of what all may take
//! is lent in this way, and is given back when it is not used. The rest is for the windows of those who
//! come then: beside them nothing is lent any more, so what was lent comes back as it is sent.

use forebay_core::{Error, Result, limits, sync::Mutex};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::sync::Notify;

/// All windows of a node.
pub(super) struct Windows {
    most_bytes: u64,
    /// The part of it that is lent, sizes included.
    far_bytes: u64,
    /// What is lent included.
    used_bytes: AtomicU64,
    lent_bytes: AtomicU64,
}

impl Windows {
    pub fn new(most_bytes: u64) -> Arc<Self> {
        let most_bytes = most_bytes.max(limits::STREAM_WINDOW_MIN_BYTES);
        Arc::new(Windows {
            most_bytes,
            far_bytes: most_bytes / 5 * 4,
            used_bytes: AtomicU64::new(0),
            lent_bytes: AtomicU64::new(0),
        })
    }

    /// What windows may reach beyond their sizes, all together.
    pub fn lendable_bytes(&self) -> u64 {
        self.far_bytes / 8 * 7
    }

    fn lend(&self, bytes: u64) -> bool {
        let within = |most: u64| move |used: u64| used.checked_add(bytes).filter(|n| *n <= most);
        let (lent, used) = (&self.lent_bytes, &self.used_bytes);
        if lent
            .fetch_update(Relaxed, Relaxed, within(self.lendable_bytes()))
            .is_err()
        {
            return false;
        }
        // Who comes next has room for a window.
        let most = self
            .far_bytes
            .saturating_sub(limits::STREAM_WINDOW_DEFAULT_BYTES);
        let fits = used.fetch_update(Relaxed, Relaxed, within(most));
        if fits.is_err() {
            lent.fetch_sub(bytes, Relaxed);
        }
        fits.is_ok()
    }

    fn take_back(&self, bytes: u64) {
        self.lent_bytes.fetch_sub(bytes, Relaxed);
        self.used_bytes.fetch_sub(bytes, Relaxed);
    }

    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Relaxed)
    }

    /// A window of this size, or of half of it, or of a quarter, … It reaches up to `reach` where
    /// that is lent.
    ///
    /// # Errors
    /// `Busy` if not even the smallest fits.
    pub fn open(self: &Arc<Self>, bytes: u64, reach: u64) -> Result<Arc<Window>> {
        let mut size = bytes.clamp(
            limits::STREAM_WINDOW_MIN_BYTES,
            limits::STREAM_WINDOW_MAX_BYTES,
        );
        loop {
            let fits = |used: u64| used.checked_add(size).filter(|sum| *sum <= self.most_bytes);
            if self.used_bytes.fetch_update(Relaxed, Relaxed, fits).is_ok() {
                return Ok(Arc::new(Window {
                    all: self.clone(),
                    size,
                    reach: reach.max(size),
                    lent: Mutex::default(),
                    used: AtomicU64::new(0),
                    ready: AtomicU64::new(0),
                    told: AtomicBool::new(false),
                    changed: Notify::new(),
                }));
            }
            if size == limits::STREAM_WINDOW_MIN_BYTES {
                return Err(Error::busy(format!(
                    "the windows of all streams already take {} of {} bytes",
                    self.used_bytes(),
                    self.most_bytes
                ))
                .hint("open fewer connections, or raise memory.budget")
                .retry_after(Duration::from_secs(1)));
            }
            size = (size / 2).max(limits::STREAM_WINDOW_MIN_BYTES);
        }
    }
}

/// The window of one connection.
pub(super) struct Window {
    all: Arc<Windows>,
    pub size: u64,
    reach: u64,
    /// What it has beyond its size.
    lent: Mutex<u64>,
    /// Bytes being read or ready.
    used: AtomicU64,
    /// The part of those that is ready.
    ready: AtomicU64,
    /// A progress message is on its way.
    told: AtomicBool,
    pub changed: Notify,
}

impl Window {
    /// Whether something of this size fits; with what can be borrowed, if `farther`.
    pub fn has_room(&self, bytes: u64, farther: bool) -> bool {
        let used = self.used.load(Relaxed);
        let with = used.saturating_add(bytes);
        used == 0 || with <= self.size || (farther && with <= self.reach && self.borrow(with))
    }

    /// Borrows what holding so much needs beyond its size.
    fn borrow(&self, bytes: u64) -> bool {
        let needs = bytes.saturating_sub(self.size);
        let mut lent = self.lent.lock();
        if needs > *lent {
            if !self.all.lend(needs - *lent) {
                return false;
            }
            *lent = needs;
        }
        true
    }

    /// Gives back what holding so much as it does now does not need.
    fn give_back(&self) {
        let mut lent = self.lent.lock();
        let needs = self.used.load(Relaxed).saturating_sub(self.size);
        if needs < *lent {
            self.all.take_back(*lent - needs);
            *lent = needs;
        }
    }

    /// Whether nothing waits for the socket.
    pub fn is_drained(&self) -> bool {
        self.ready.load(Relaxed) == 0
    }

    /// Reserves room for what is about to be read.
    pub fn take(self: &Arc<Self>, expected: u64) -> Place {
        let with = self.used.fetch_add(expected, Relaxed) + expected;
        if with <= self.reach {
            // Somebody may have given back meanwhile what `has_room` had borrowed.
            self.borrow(with);
        }
        Place {
            window: self.clone(),
            bytes: expected,
            ready: false,
        }
    }

    /// The right to send a message that is not counted, if none is on its way already.
    pub fn tell(self: &Arc<Self>) -> Option<Told> {
        (!self.told.swap(true, Relaxed)).then(|| Told(self.clone()))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.give_back();
        self.all.used_bytes.fetch_sub(self.size, Relaxed);
    }
}

/// Bytes in a window, until dropped.
pub(super) struct Place {
    window: Arc<Window>,
    bytes: u64,
    ready: bool,
}

impl Place {
    /// The data has arrived, and has this size.
    pub fn ready(mut self, bytes: u64) -> Self {
        self.window.used.fetch_add(bytes, Relaxed);
        self.window.used.fetch_sub(self.bytes, Relaxed);
        self.window.ready.fetch_add(bytes, Relaxed);
        (self.bytes, self.ready) = (bytes, true);
        // It may be smaller than expected.
        self.window.changed.notify_one();
        self
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.window.used.fetch_sub(self.bytes, Relaxed);
        self.window.give_back();
        if self.ready {
            self.window.ready.fetch_sub(self.bytes, Relaxed);
        }
        self.window.changed.notify_one();
    }
}

pub(super) struct Told(Arc<Window>);

impl Drop for Told {
    fn drop(&mut self) {
        self.0.told.store(false, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_shrink_and_end_and_come_back() {
        let windows = Windows::new(10 << 20);
        let first = windows.open(8 << 20, 0).unwrap();
        let second = windows.open(8 << 20, 0).unwrap();
        assert_eq!((first.size, second.size), (8 << 20, 2 << 20));
        assert_eq!(
            windows.open(1, 0).err().unwrap().kind(),
            forebay_core::ErrorKind::Busy
        );
        drop(first);
        assert_eq!(windows.open(u64::MAX, 0).unwrap().size, 8 << 20);
        drop(second);
        assert_eq!(windows.used_bytes(), 0);
    }

    #[test]
    fn a_window_counts_what_is_in_it() {
        let window = Windows::new(1 << 30).open(100_000, 0).unwrap();
        assert!(window.has_room(1 << 40, true), "something always fits");
        let place = window.take(60_000);
        assert!(window.has_room(40_000, true) && !window.has_room(40_001, true));
        let place = place.ready(90_000);
        assert!(
            window.has_room(10_000, true) && !window.has_room(10_001, true) && !window.is_drained()
        );
        drop(place);
        assert!(window.is_drained() && window.has_room(1 << 40, true));
        let told = window.tell().unwrap();
        assert!(window.tell().is_none());
        drop(told);
        assert!(window.tell().is_some());
    }

    #[test]
    fn a_window_reaches_farther_with_what_nobody_has() {
        let windows = Windows::new(40 << 20);
        let first = windows.open(2 << 20, 30 << 20).unwrap();
        let place = first.take(2 << 20);
        assert!(first.has_room(19 << 20, true));
        let more = first.take(19 << 20);
        assert!(
            !first.has_room(4 << 20, true),
            "of four fifths, all but a window's size is lent"
        );
        assert_eq!(windows.used_bytes(), 21 << 20);
        // There is room for others, who may not reach as far.
        let second = windows.open(2 << 20, 4 << 20).unwrap();
        let own = second.take(2 << 20);
        assert!(second.has_room(1 << 20, true) && !second.has_room(2 << 20, true));
        drop(more);
        assert_eq!(windows.used_bytes(), 5 << 20, "given back at once");
        assert!(!first.has_room(29 << 20, true), "beyond its reach");
        assert!(second.has_room(2 << 20, true) && !second.has_room(3 << 20, true));
        assert_eq!(windows.used_bytes(), 6 << 20);
        drop(own);
        // What is larger than its window counts there, and is not borrowed.
        let large = second.take(30 << 20);
        assert!(!second.has_room(1, true));
        assert_eq!(windows.used_bytes(), 4 << 20);
        drop((place, large, first, second));
        assert_eq!(windows.used_bytes(), 0);
        assert_eq!(windows.lent_bytes.load(Relaxed), 0);
        // Beside one that reaches as far as it may, there is room for others.
        let first = windows.open(2 << 20, 40 << 20).unwrap();
        let place = first.take(2 << 20);
        assert!(first.has_room(22 << 20, true));
        let more = first.take(22 << 20);
        let second = windows.open(8 << 20, 0).unwrap();
        let third = windows.open(8 << 20, 0).unwrap();
        assert_eq!((second.size, third.size), (8 << 20, 8 << 20));
        drop((place, more, first));
    }
}
