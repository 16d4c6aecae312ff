//! SIGINT and SIGTERM, for code that runs in threads: they are noted, and checked wherever
//! something waits.

use forebay_core::{Error, Result};
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

static SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(number: i32) {
    SIGNAL.store(number, Relaxed);
}

/// From here on the two signals are noted and do not end the process by themselves.
pub fn listen() {
    for number in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler does nothing but store into an atomic.
        unsafe { libc::signal(number, note as *const () as libc::sighandler_t) };
    }
}

/// The signal that has arrived, if any.
pub fn signal() -> Option<i32> {
    Some(SIGNAL.load(Relaxed)).filter(|n| *n != 0)
}

/// An error if a signal has arrived, to end what is running.
pub fn check() -> Result<()> {
    signal().map_or(Ok(()), |n| {
        Err(Error::internal(format!("interrupted by signal {n}")))
    })
}
