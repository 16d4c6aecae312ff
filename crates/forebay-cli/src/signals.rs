//! SIGINT and SIGTERM: a client command stops at once, and what it holds (a temporary file, a
//! terminal) is put right as it is dropped.

use forebay_core::{Error, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGHUP, as it comes.
pub fn hangups() -> Result<Signal> {
    signal(SignalKind::hangup())
        .map_err(|e| Error::internal(format!("cannot catch SIGHUP: {e}")).caused_by(e))
}

/// The two signals that ask a program to stop.
pub struct Signals {
    int: Signal,
    term: Signal,
}

impl Signals {
    /// Takes the signals over from whoever had them (Python's interpreter, in the wheel's console
    /// script).
    pub fn listen() -> Result<Self> {
        let catch = |kind, name| {
            signal(kind)
                .map_err(|e| Error::internal(format!("cannot catch {name}: {e}")).caused_by(e))
        };
        Ok(Self {
            int: catch(SignalKind::interrupt(), "SIGINT")?,
            term: catch(SignalKind::terminate(), "SIGTERM")?,
        })
    }

    /// Waits for the next one; its number.
    pub async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.int.recv() => libc::SIGINT,
            _ = self.term.recv() => libc::SIGTERM,
        }
    }
}
