//! SIGINT and SIGTERM, for code that runs in threads: noted, and asked for where something waits.

use forebay_core::{Error, Result};
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

static SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(number: i32) {
    SIGNAL.store(number, Relaxed);
}

/// From here on the two signals are noted and end nothing by themselves.
pub fn listen() {
    for number in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler does nothing but store into an atomic.
        unsafe { libc::signal(number, note as *const () as libc::sighandler_t) };
    }
}

/// The signal that has come, if one has.
pub fn signal() -> Option<i32> {
    Some(SIGNAL.load(Relaxed)).filter(|n| *n != 0)
}

/// An error if a signal has come: ends what is under way.
pub fn check() -> Result<()> {
    signal().map_or(Ok(()), |n| {
        Err(Error::internal(format!("interrupted by signal {n}")))
    })
}
