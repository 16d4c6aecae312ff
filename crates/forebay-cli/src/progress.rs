//! Progress of long work: a bar on stderr, if that is a terminal and the work takes longer than a moment.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

/// Work that is done sooner than this shows no bar.
const SHOW_AFTER: Duration = Duration::from_millis(500);

/// A bar that appears late and leaves nothing behind.
pub struct Progress {
    bar: ProgressBar,
    began: Instant,
    wanted: bool,
}

impl Progress {
    /// For `total` bytes, or an unknown number of them.
    pub fn bytes(label: &str, total: Option<u64>) -> Self {
        let style = match total {
            Some(_) => "{msg} {wide_bar:.cyan/dim} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
            None => "{msg} {spinner} {binary_bytes} {binary_bytes_per_sec} {elapsed}",
        };
        Self::new(label, total, style)
    }

    /// For `total` objects, or an unknown number of them.
    pub fn objects(label: &str, total: Option<u64>) -> Self {
        let style = match total {
            Some(_) => "{prefix} {wide_bar:.cyan/dim} {human_pos}/{human_len} objects  {msg}  {eta}",
            None => "{prefix} {spinner} {human_pos} objects  {msg}  {elapsed}",
        };
        Self::new(label, total, style)
    }

    fn new(label: &str, total: Option<u64>, template: &str) -> Self {
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden());
        bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        if template.contains("{prefix}") {
            bar.set_prefix(label.to_owned());
        } else {
            bar.set_message(label.to_owned());
        }
        Self { bar, began: Instant::now(), wanted: std::io::stderr().is_terminal() }
    }

    fn maybe_show(&mut self) {
        if self.wanted && self.began.elapsed() >= SHOW_AFTER {
            self.wanted = false;
            self.bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(8));
            self.bar.reset_eta();
        }
    }

    pub fn advance(&mut self, by: u64) {
        self.maybe_show();
        self.bar.inc(by);
    }

    pub fn set(&mut self, done: u64, total: Option<u64>, message: String) {
        self.maybe_show();
        if let Some(total) = total {
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
