//! What is held for receivers.
//!
//! A connection has a window: bytes that are being read for it, or are ready and not yet taken by
//! its socket. A step starts reading only if its expected size fits, or nothing else is in the
//! window. If it turns out larger than expected, its real size counts, so that the next steps wait.
//! The windows of all connections together are bounded too: a receiver that comes when there is no
//! more room gets a smaller one, and finally none.

use forebay_core::{Error, Result, limits};
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
    used_bytes: AtomicU64,
}

impl Windows {
    pub fn new(most_bytes: u64) -> Arc<Self> {
        Arc::new(Windows {
            most_bytes: most_bytes.max(limits::STREAM_WINDOW_MIN_BYTES),
            used_bytes: AtomicU64::new(0),
        })
    }

    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Relaxed)
    }

    /// A window of this size, or of half of it, or of a quarter, …
    ///
    /// # Errors
    /// `Busy` if not even the smallest fits.
    pub fn open(self: &Arc<Self>, bytes: u64) -> Result<Arc<Window>> {
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
    /// Bytes being read or ready.
    used: AtomicU64,
    /// The part of those that is ready.
    ready: AtomicU64,
    /// A progress message is on its way.
    told: AtomicBool,
    pub changed: Notify,
}

impl Window {
    pub fn has_room(&self, bytes: u64) -> bool {
        let used = self.used.load(Relaxed);
        used == 0 || used.saturating_add(bytes) <= self.size
    }

    /// Whether nothing waits for the socket.
    pub fn is_drained(&self) -> bool {
        self.ready.load(Relaxed) == 0
    }

    /// Reserves room for what is about to be read.
    pub fn take(self: &Arc<Self>, expected: u64) -> Place {
        self.used.fetch_add(expected, Relaxed);
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
        let first = windows.open(8 << 20).unwrap();
        let second = windows.open(8 << 20).unwrap();
        assert_eq!((first.size, second.size), (8 << 20, 2 << 20));
        assert_eq!(
            windows.open(1).err().unwrap().kind(),
            forebay_core::ErrorKind::Busy
        );
        drop(first);
        assert_eq!(windows.open(u64::MAX).unwrap().size, 8 << 20);
        drop(second);
        assert_eq!(windows.used_bytes(), 0);
    }

    #[test]
    fn a_window_counts_what_is_in_it() {
        let window = Windows::new(1 << 30).open(100_000).unwrap();
        assert!(window.has_room(1 << 40), "something always fits");
        let place = window.take(60_000);
        assert!(window.has_room(40_000) && !window.has_room(40_001));
        let place = place.ready(90_000);
        assert!(window.has_room(10_000) && !window.has_room(10_001) && !window.is_drained());
        drop(place);
        assert!(window.is_drained() && window.has_room(1 << 40));
        let told = window.tell().unwrap();
        assert!(window.tell().is_none());
        drop(told);
        assert!(window.tell().is_some());
    }
}
