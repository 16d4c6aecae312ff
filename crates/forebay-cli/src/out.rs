//! Results go to stdout: lines for people, or JSON.
//!
//! One buffered writer, flushed at the end of a command or after each object of a stream. A reader
//! that has left ([`Failure::BrokenPipe`]) ends the command silently.

use crate::{
    fail::{Outcome, stdout_failure},
    style::Style,
};
pub use forebay_core::units::{count, grouped};
use serde::Serialize;
use std::{
    io::{BufWriter, Stdout, Write},
    os::fd::AsFd,
};

/// The stdout of a command.
pub struct Out {
    to: BufWriter<Stdout>,
    pub json: bool,
    pub style: Style,
}

impl Out {
    pub fn new(json: bool) -> Self {
        Self {
            to: BufWriter::with_capacity(64 << 10, std::io::stdout()),
            json,
            style: Style::stdout(),
        }
    }

    /// One line for a person.
    pub fn line(&mut self, text: impl AsRef<str>) -> Outcome {
        self.to
            .write_all(text.as_ref().as_bytes())
            .and_then(|()| self.to.write_all(b"\n"))
            .map_err(stdout_failure)
    }

    /// The only JSON object of a command's answer.
    pub fn object(&mut self, value: &impl Serialize) -> Outcome {
        serde_json::to_writer_pretty(&mut self.to, value).map_err(|e| stdout_failure(e.into()))?;
        self.to.write_all(b"\n").map_err(stdout_failure)?;
        self.flush()
    }

    /// One object of a stream: a line of JSON.
    pub fn json_line(&mut self, value: &impl Serialize) -> Outcome {
        serde_json::to_writer(&mut self.to, value).map_err(|e| stdout_failure(e.into()))?;
        self.to.write_all(b"\n").map_err(stdout_failure)
    }

    pub fn flush(&mut self) -> Outcome {
        self.to.flush().map_err(stdout_failure)
    }
}

/// One line on stderr, if anybody reads it: `eprintln!` panics where stderr is a full disk, or a pipe
/// whose reader has left.
pub fn tell(line: impl AsRef<str>) {
    let _ = writeln!(std::io::stderr().lock(), "{}", line.as_ref());
}

/// Stdin or stdout as a file that is read and written off the main thread.
pub fn std_stream(stream: impl AsFd) -> std::io::Result<tokio::fs::File> {
    Ok(tokio::fs::File::from_std(std::fs::File::from(
        stream.as_fd().try_clone_to_owned()?,
    )))
}

/// Lines of `name  value`, aligned.
pub fn pairs(rows: &[(&str, String)]) -> Vec<String> {
    let width = rows
        .iter()
        .map(|(name, _)| name.chars().count())
        .max()
        .unwrap_or(0);
    rows.iter()
        .map(|(name, value)| format!("{name:<width$}  {value}"))
        .collect()
}

/// Milliseconds since the epoch → `2026-08-01 12:00:00Z`.
pub fn utc(ms: i64) -> String {
    chrono::DateTime::from_timestamp_millis(ms).map_or_else(
        || ms.to_string(),
        |t| t.format("%Y-%m-%d %H:%M:%SZ").to_string(),
    )
}

/// `59 s`, `3 min`, `2 h 5 min`, `4 d 2 h`.
pub fn duration(seconds: u64) -> String {
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, m) => format!("{m} min"),
        (0, h, m) => format!("{h} h {m} min"),
        (d, h, _) => format!("{d} d {h} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_read_it() {
        assert_eq!(
            pairs(&[("a", "1".into()), ("long", "2".into())]),
            ["a     1", "long  2"]
        );
        assert_eq!(utc(0), "1970-01-01 00:00:00Z");
        assert_eq!(utc(951_782_400_000), "2000-02-29 00:00:00Z");
        assert_eq!(utc(1_785_585_600_000), "2026-08-01 12:00:00Z");
    }
}
