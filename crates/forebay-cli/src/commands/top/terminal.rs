//! The terminal while `top` runs: the alternate screen, no cursor, keys without Enter.
//!
//! Invariant: whatever ends the command (a key, a signal, an error, a panic), dropping [`Screen`]
//! restores the terminal.

use crate::fail::{Outcome, stdout_failure};
use rustix::termios::{self, LocalModes, OptionalActions, Termios};
use std::io::{IsTerminal, Write};
use tokio::sync::mpsc;

/// The other screen; no cursor; what is longer than a line is cut, not continued on the next one.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &[u8] = b"\x1b[?7h\x1b[?25h\x1b[?1049l";
/// Moves to the top left; clears the rest of a line; clears everything below.
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

pub struct Screen {
    before: Option<Termios>,
}

impl Screen {
    /// Whether there is a terminal to draw on.
    pub fn possible() -> bool {
        std::io::stdout().is_terminal() && std::env::var_os("TERM").is_some_and(|t| t != "dumb")
    }

    pub fn enter() -> Outcome<Self> {
        let before = std::io::stdin().is_terminal().then(quiet_keys).flatten();
        let screen = Screen { before };
        write(ENTER)?;
        Ok(screen)
    }

    /// Draws a whole page over the last one, cut to the window.
    pub fn draw(&mut self, lines: &[String]) -> Outcome {
        let rows = size().map_or(24, |(rows, _)| rows).max(1);
        let mut page = String::from(HOME);
        for (i, line) in lines.iter().take(rows).enumerate() {
            if i > 0 {
                page.push_str("\r\n");
            }
            page.push_str(line);
            page.push_str(CLEAR_LINE);
        }
        page.push_str(CLEAR_BELOW);
        write(page.as_bytes())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = write(LEAVE);
        if let Some(before) = &self.before {
            let _ = termios::tcsetattr(std::io::stdin(), OptionalActions::Now, before);
        }
    }
}

fn write(bytes: &[u8]) -> Outcome {
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(bytes)
        .and_then(|()| stdout.flush())
        .map_err(stdout_failure)
}

/// Makes keys arrive at once without being shown; Ctrl-C stays a signal. `None` if the terminal
/// cannot do that.
fn quiet_keys() -> Option<Termios> {
    let stdin = std::io::stdin();
    let before = termios::tcgetattr(&stdin).ok()?;
    let mut quiet = before.clone();
    quiet.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
    termios::tcsetattr(&stdin, OptionalActions::Now, &quiet).ok()?;
    Some(before)
}

/// Rows and columns of the window.
pub fn size() -> Option<(usize, usize)> {
    let window = termios::tcgetwinsize(std::io::stdout()).ok()?;
    (window.ws_row > 0 && window.ws_col > 0).then_some((window.ws_row.into(), window.ws_col.into()))
}

/// The keys as they are pressed. The thread that reads them ends with the process.
pub fn keys() -> mpsc::Receiver<u8> {
    let (to, keys) = mpsc::channel(16);
    if std::io::stdin().is_terminal() {
        std::thread::spawn(move || {
            let mut key = [0u8];
            while let Ok(1) = std::io::Read::read(&mut std::io::stdin(), &mut key) {
                if to.blocking_send(key[0]).is_err() {
                    return;
                }
            }
        });
    }
    keys
}
