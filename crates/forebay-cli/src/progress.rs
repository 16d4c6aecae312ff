//! Progress of long work: a bar on stderr, if that is a terminal and the work takes longer than a
//! moment.

use crate::out::tell;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

/// Work that finishes sooner than this shows no bar.
const SHOW_AFTER: Duration = Duration::from_millis(500);

const BYTES: &str = "{prefix} {wide_bar:.cyan/dim} {binary_bytes}/{binary_total_bytes} \
    {binary_bytes_per_sec} {eta}";
const BYTES_SO_FAR: &str = "{prefix} {spinner} {binary_bytes} {binary_bytes_per_sec} {elapsed}";
const OBJECTS: &str = "{prefix} {wide_bar:.cyan/dim} {human_pos}/{human_len} objects  {msg}  {eta}";
const OBJECTS_SO_FAR: &str = "{prefix} {spinner} {human_pos} objects  {msg}  {elapsed}";

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// A bar that appears late and leaves nothing behind.
pub struct Progress {
    bar: ProgressBar,
    began: Instant,
    wanted: bool,
}

impl Progress {
    /// A bar for `total` bytes, or an unknown number of them.
    pub fn bytes(label: &str, total: Option<u64>) -> Self {
        Self::new(
            label,
            total,
            if total.is_some() { BYTES } else { BYTES_SO_FAR },
        )
    }

    /// A bar for objects, whose number is unknown at first.
    pub fn objects(label: &str) -> Self {
        Self::new(label, None, OBJECTS_SO_FAR)
    }

    fn new(label: &str, total: Option<u64>, template: &str) -> Self {
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden());
        bar.set_style(style(template));
        bar.set_prefix(label.to_owned());
        Self {
            bar,
            began: Instant::now(),
            wanted: std::io::stderr().is_terminal(),
        }
    }

    fn maybe_show(&mut self) {
        if self.wanted && self.began.elapsed() >= SHOW_AFTER {
            self.wanted = false;
            self.bar
                .set_draw_target(ProgressDrawTarget::stderr_with_hz(8));
            self.bar.reset_eta();
        }
    }

    pub fn advance(&mut self, by: u64) {
        self.maybe_show();
        self.bar.inc(by);
    }

    /// A line on stderr that stays, above the bar.
    pub fn above(&self, line: &str) {
        self.bar.suspend(|| tell(line));
    }

    pub fn set(&mut self, done: u64, total: Option<u64>, message: String) {
        self.maybe_show();
        if let (Some(total), None) = (total, self.bar.length()) {
            self.bar.set_style(style(OBJECTS));
            self.bar.set_length(total);
        }
        self.bar.set_position(done);
        self.bar.set_message(message);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
