//! SIGINT and SIGTERM: a client command stops at once, and dropping what it holds cleans up (a
//! temporary file, a terminal).

use forebay_core::{Error, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGHUP signals, as they arrive.
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
    /// Takes the signals over from their previous handler (Python's interpreter, in the wheel's
    /// console script).
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

    /// Waits for the next signal and returns its number.
    pub async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.int.recv() => libc::SIGINT,
            _ = self.term.recv() => libc::SIGTERM,
        }
    }
}
