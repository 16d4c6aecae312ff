//! How `top` shows a [`Reading`]: as a page on a terminal, or one line for a log.

use super::reading::{Level, Reading};
use crate::style::Style;
use forebay_core::units::format_bytes;
use std::collections::VecDeque;

const HISTORY: usize = 60;
const NAME_WIDTH: usize = 10;

/// The last minute of throughput, for the curve.
#[derive(Default)]
pub struct History(VecDeque<f64>);

impl History {
    pub fn push(&mut self, bytes_per_s: f64) {
        if self.0.len() == HISTORY {
            self.0.pop_front();
        }
        self.0.push_back(bytes_per_s);
    }

    fn curve(&self) -> String {
        const STEPS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let top = self.0.iter().copied().fold(1.0, f64::max);
        self.0
            .iter()
            .map(|v| STEPS[((v / top * 7.0).round() as usize).min(7)])
            .collect()
    }
}

pub fn rate(bytes_per_s: f64) -> String {
    format!("{}/s", format_bytes(bytes_per_s.max(0.0) as u64))
}

pub fn per_s(n: f64) -> String {
    if n >= 100.0 || n == 0.0 {
        format!("{n:.0}/s")
    } else {
        format!("{n:.1}/s")
    }
}

fn per_s_of(n: f64, what: &str) -> String {
    if n >= 100.0 || n == 0.0 {
        format!("{n:.0} {what}/s")
    } else {
        format!("{n:.1} {what}/s")
    }
}

pub fn share(part: Option<f64>) -> String {
    part.map_or("-".to_owned(), |p| format!("{:.1} %", p * 100.0))
}

fn time(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".to_owned(),
        Some(s) if s < 0.001 => format!("{:.0} µs", s * 1e6),
        Some(s) if s < 1.0 => format!("{:.1} ms", s * 1e3),
        Some(s) => format!("{s:.2} s"),
    }
}

fn gauge(level: &Level, width: usize, style: Style) -> String {
    let part = if level.total > 0.0 {
        (level.used / level.total).clamp(0.0, 1.0)
    } else {
        0.0
    };
    let full = (part * width as f64).round() as usize;
    let bar = "█".repeat(full);
    let bar = if part > 0.9 {
        style.yellow(&bar)
    } else {
        style.green(&bar)
    };
    let (used, total) = (
        format_bytes(level.used as u64),
        format_bytes(level.total as u64),
    );
    format!(
        "{bar}{}  {used} of {total}",
        style.dim(&"░".repeat(width - full))
    )
}

/// The page, line by line.
pub fn page(
    r: &Reading,
    history: &History,
    node: &str,
    columns: usize,
    style: Style,
) -> Vec<String> {
    let name = |n: &str| style.bold(&format!("{n:<NAME_WIDTH$}"));
    let wide = columns.saturating_sub(NAME_WIDTH + 30).clamp(10, 50);
    let mut lines = vec![
        format!(
            "{} {}",
            style.bold("forebay"),
            style.dim(&format!("{node}   q quits"))
        ),
        String::new(),
        format!(
            "{}{}   {}",
            name("served"),
            style.cyan(&rate(r.served_bytes_per_s)),
            per_s_of(r.requests_per_s, "requests")
        ),
        format!("{}{}", name(""), style.cyan(&history.curve())),
        format!(
            "{}hit ratio {}   hit {}   miss {}   revalidated {}   bypass {}",
            name("cache"),
            style.green(&share(r.hit_ratio)),
            per_s(r.cache.hit),
            per_s(r.cache.miss),
            per_s(r.cache.revalidated),
            per_s(r.cache.bypass)
        ),
        format!(
            "{}p50 {}   p90 {}   p99 {}",
            name("latency"),
            time(r.latency.p50),
            time(r.latency.p90),
            time(r.latency.p99)
        ),
        format!(
            "{}{}   {}   {}",
            name("origin"),
            rate(r.origin.bytes_per_s),
            per_s_of(r.origin.requests_per_s, "requests"),
            per_s_of(r.origin.errors_per_s, "errors")
        ),
        format!(
            "{}{}   {}   {}   {}",
            name("batches"),
            rate(r.batch.bytes_per_s),
            per_s_of(r.batch.batches_per_s, "batches"),
            per_s_of(r.batch.entries_per_s, "entries"),
            per_s_of(r.batch.soft_errors_per_s, "soft errors")
        ),
        String::new(),
    ];
    if let Some(memory) = &r.memory {
        lines.push(format!("{}{}", name("memory"), gauge(memory, wide, style)));
    }
    match &r.disk {
        Some(disk) => lines.push(format!("{}{}", name("disk"), gauge(disk, wide, style))),
        None => lines.push(format!("{}no cache directory", name("disk"))),
    }
    lines
}

/// One line, for a pipe.
pub fn line(r: &Reading) -> String {
    let level = |l: &Option<Level>| {
        l.as_ref().map_or("-".to_owned(), |l| {
            format!(
                "{} of {}",
                format_bytes(l.used as u64),
                format_bytes(l.total as u64)
            )
        })
    };
    format!(
        "{}  served {}  requests {}  hit ratio {}  p50 {}  p99 {}  origin {} {}  batches {}  \
         memory {}  disk {}",
        crate::out::utc(r.time_ms),
        rate(r.served_bytes_per_s),
        per_s(r.requests_per_s),
        share(r.hit_ratio),
        time(r.latency.p50),
        time(r.latency.p99),
        per_s(r.origin.requests_per_s),
        rate(r.origin.bytes_per_s),
        per_s(r.batch.batches_per_s),
        level(&r.memory),
        level(&r.disk)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_and_a_line_show_the_reading() {
        let mut reading = Reading {
            served_bytes_per_s: 3.0 * 1048576.0,
            hit_ratio: Some(0.975),
            ..Reading::default()
        };
        reading.latency.p99 = Some(0.0123);
        reading.disk = Some(Level {
            used: 512.0,
            total: 1024.0,
        });
        let mut history = History::default();
        history.push(1.0);
        history.push(7.0);
        let page = page(&reading, &history, "http://n", 80, Style::PLAIN).join("\n");
        for part in [
            "3.0 MiB/s",
            "97.5 %",
            "p99 12.3 ms",
            "512 B of 1.0 KiB",
            "▂█",
        ] {
            assert!(page.contains(part), "{part} in:\n{page}");
        }
        assert!(line(&reading).contains("hit ratio 97.5 %") && line(&reading).contains("memory -"));
    }
}
