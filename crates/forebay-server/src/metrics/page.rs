//! A page of metrics: families with their samples, written in the requested format.
//!
//! A family is declared where its numbers are read (`families.rs`): kind, name, labels, help. Units
//! are the base units of Prometheus, and a name ends with its unit.

use forebay_core::{HistogramSnapshot, histogram::BOUNDS_NS};
use std::fmt::{self, Write};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows; its samples end in `_total`.
    Counter,
    Gauge,
    /// Samples end in `_bucket`, `_sum` and `_count`.
    Histogram,
    /// Constant 1 with labels; its sample ends in `_info`.
    Info,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
            Kind::Info => "info",
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            Kind::Counter => "_total",
            Kind::Info => "_info",
            _ => "",
        }
    }
}

/// The formats that Prometheus reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// Prometheus' own text format, 0.0.4.
    Text,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl Format {
    /// The format that an `Accept` header asks for; the text format if it does not matter.
    pub fn of_accept(accept: &str) -> Self {
        let quality = |wanted: &[&str]| {
            accept
                .split(',')
                .filter_map(|item| {
                    let mut parts = item.split(';').map(str::trim);
                    let kind = parts.next()?;
                    let q = parts.find_map(|p| p.strip_prefix("q="));
                    let q: f64 = q.map_or(Ok(1.0), str::parse).ok()?;
                    let is_wanted = wanted.iter().any(|w| kind.eq_ignore_ascii_case(w));
                    is_wanted.then_some(q)
                })
                .fold(0.0, f64::max)
        };
        let open = quality(&["application/openmetrics-text"]);
        if open > 0.0 && open >= quality(&["text/plain"]) {
            Format::OpenMetrics
        } else {
            Format::Text
        }
    }

    pub fn content_type(self) -> &'static str {
        match self {
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

enum Value {
    Number(f64),
    Histogram(Box<HistogramSnapshot>),
}

struct Family {
    kind: Kind,
    /// The name without the suffix of its kind.
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
    samples: Vec<(Vec<String>, Value)>,
}

/// Families in the order of their declaration, in sections.
#[derive(Default)]
pub struct Page {
    sections: Vec<(&'static str, Vec<Family>)>,
}

/// A number that a sample may have.
pub trait Number {
    fn number(self) -> f64;
}
macro_rules! numbers { ($($t:ty),*) => { $( impl Number for $t { fn number(self) -> f64 { self as f64 } } )* } }
numbers!(u64, i64, usize, f64, u32);

/// The labels of a family without any.
pub const NONE: [&str; 0] = [];

impl Page {
    /// Starts a section for the families declared after it.
    pub fn section(&mut self, title: &'static str) {
        self.sections.push((title, Vec::new()));
    }

    /// Declares counters, gauges or infos of one name, with the values of their labels.
    pub fn family<L: AsRef<[S]>, S: AsRef<str>, N: Number>(
        &mut self,
        kind: Kind,
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
        samples: impl IntoIterator<Item = (L, N)>,
    ) {
        let samples = samples
            .into_iter()
            .map(|(l, n)| (l, Value::Number(n.number())));
        self.add(kind, name, labels, help, samples);
    }

    /// Declares one counter or gauge without labels.
    pub fn one(&mut self, kind: Kind, name: &'static str, help: &'static str, n: impl Number) {
        self.family(kind, name, &[], help, [(NONE, n)]);
    }

    pub fn histograms<L: AsRef<[S]>, S: AsRef<str>>(
        &mut self,
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
        samples: impl IntoIterator<Item = (L, HistogramSnapshot)>,
    ) {
        let samples = samples
            .into_iter()
            .map(|(l, h)| (l, Value::Histogram(Box::new(h))));
        self.add(Kind::Histogram, name, labels, help, samples);
    }

    fn add<L: AsRef<[S]>, S: AsRef<str>>(
        &mut self,
        kind: Kind,
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
        samples: impl IntoIterator<Item = (L, Value)>,
    ) {
        let samples = samples.into_iter().map(|(values, value)| {
            let values: Vec<String> = values.as_ref().iter().map(|v| v.as_ref().into()).collect();
            (values, value)
        });
        let family = Family {
            kind,
            name,
            labels,
            help,
            samples: samples.collect(),
        };
        match self.sections.last_mut() {
            Some((_, families)) => families.push(family),
            None => self.sections.push(("", vec![family])),
        }
    }

    /// How many metrics there are.
    pub fn len(&self) -> usize {
        self.sections.iter().map(|(_, f)| f.len()).sum()
    }

    pub fn text(&self, format: Format) -> String {
        let mut out = String::new();
        for family in self.sections.iter().flat_map(|(_, families)| families) {
            // Writing to a string cannot fail.
            let _ = family.write(format, &mut out);
        }
        if format == Format::OpenMetrics {
            out.push_str("# EOF\n");
        }
        out
    }

    /// Tables in Markdown: which metrics exist and what they mean.
    pub fn reference(&self) -> String {
        let mut out = String::new();
        for (title, families) in &self.sections {
            let _ = write!(
                out,
                "\n## {title}\n\n| metric | type | labels | |\n|---|---|---|---|\n"
            );
            for f in families {
                let labels: Vec<String> = f.labels.iter().map(|l| format!("`{l}`")).collect();
                let (suffix, kind) = (f.kind.suffix(), f.kind.as_str());
                let labels = labels.join(", ");
                let _ = writeln!(
                    out,
                    "| `{}{suffix}` | {kind} | {labels} | {} |",
                    f.name, f.help
                );
            }
        }
        out
    }
}

impl Family {
    fn write(&self, format: Format, out: &mut String) -> fmt::Result {
        let (name, suffix) = (self.name, self.kind.suffix());
        // OpenMetrics names the family without the suffix of its samples.
        let (family, kind) = match (format, self.kind) {
            (Format::OpenMetrics, kind) => (name.to_owned(), kind.as_str()),
            (Format::Text, Kind::Info) => (format!("{name}{suffix}"), "gauge"),
            (Format::Text, kind) => (format!("{name}{suffix}"), kind.as_str()),
        };
        writeln!(out, "# HELP {family} {}", escaped(self.help, false))?;
        writeln!(out, "# TYPE {family} {kind}")?;
        let unit = ["seconds", "bytes", "joules"]
            .into_iter()
            .find(|unit| name.strip_suffix(unit).is_some_and(|n| n.ends_with('_')));
        if let (Format::OpenMetrics, Some(unit)) = (format, unit) {
            writeln!(out, "# UNIT {family} {unit}")?;
        }
        for (values, value) in &self.samples {
            match value {
                Value::Number(n) => {
                    write!(out, "{name}{suffix}")?;
                    self.labels(values, None, out)?;
                    writeln!(out, " {n}")?;
                }
                Value::Histogram(h) => self.histogram(values, h, out)?,
            }
        }
        Ok(())
    }

    fn histogram(&self, values: &[String], h: &HistogramSnapshot, out: &mut String) -> fmt::Result {
        let mut so_far = 0;
        for (i, count) in h.counts.iter().enumerate() {
            so_far += count;
            let bound = match BOUNDS_NS.get(i) {
                // The same in both formats: the bound is a label, which is compared as text.
                Some(ns) if ns % 1_000_000_000 == 0 => format!("{}.0", ns / 1_000_000_000),
                Some(ns) => (*ns as f64 / 1e9).to_string(),
                None => "+Inf".to_owned(),
            };
            write!(out, "{}_bucket", self.name)?;
            self.labels(values, Some(&bound), out)?;
            writeln!(out, " {so_far}")?;
        }
        write!(out, "{}_sum", self.name)?;
        self.labels(values, None, out)?;
        writeln!(out, " {}", h.sum_seconds)?;
        write!(out, "{}_count", self.name)?;
        self.labels(values, None, out)?;
        writeln!(out, " {so_far}")
    }

    fn labels(&self, values: &[String], bound: Option<&str>, out: &mut String) -> fmt::Result {
        let values = values.iter().map(String::as_str);
        let labels = self.labels.iter().copied().zip(values);
        for (i, (label, value)) in labels.chain(bound.map(|b| ("le", b))).enumerate() {
            let before = if i == 0 { '{' } else { ',' };
            write!(out, "{before}{label}=\"{}\"", escaped(value, true))?;
        }
        if bound.is_some() || !self.labels.is_empty() {
            out.push('}');
        }
        Ok(())
    }
}

fn escaped(text: &str, quotes: bool) -> String {
    let text = text.replace('\\', "\\\\").replace('\n', "\\n");
    if quotes {
        text.replace('"', "\\\"")
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_format_is_what_is_asked_for() {
        for (accept, format) in [
            ("", Format::Text),
            ("*/*", Format::Text),
            ("text/plain", Format::Text),
            ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", Format::Text),
            ("application/openmetrics-text", Format::OpenMetrics),
            (
                "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
                Format::OpenMetrics,
            ),
            (
                "application/openmetrics-text;q=0.3,text/plain;q=0.5",
                Format::Text,
            ),
            ("application/openmetrics-text;q=0", Format::Text),
        ] {
            assert_eq!(Format::of_accept(accept), format, "{accept:?}");
        }
    }

    #[test]
    fn both_formats_name_families_as_they_must() {
        let mut page = Page::default();
        page.one(Kind::Counter, "x_seconds", "Time.", 1.5);
        page.family(Kind::Gauge, "y", &["a"], "Say \\.", [(["q\"\n\\"], 2_u64)]);
        page.family(Kind::Info, "z", &["v"], "Version.", [(["1"], 1_u64)]);
        let histogram = forebay_core::Histogram::default();
        histogram.observe(Duration::from_secs(1));
        page.histograms(
            "h_seconds",
            &["k"],
            "How long.",
            [(["v"], histogram.snapshot())],
        );
        let text = page.text(Format::Text);
        assert!(
            text.starts_with(
                "# HELP x_seconds_total Time.\n# TYPE x_seconds_total counter\nx_seconds_total \
                 1.5\n# HELP y Say \\\\.\n# TYPE y gauge\ny{a=\"q\\\"\\n\\\\\"} 2\n# HELP z_info \
                 Version.\n# TYPE z_info gauge\nz_info{v=\"1\"} 1\n# HELP h_seconds How long.\n"
            ),
            "{text}"
        );
        assert!(
            text.contains("h_seconds_bucket{k=\"v\",le=\"0.56\"} 0\n")
                && text.contains("h_seconds_bucket{k=\"v\",le=\"1.0\"} 1\n")
                && text.ends_with(
                    "h_seconds_bucket{k=\"v\",le=\"+Inf\"} 1\nh_seconds_sum{k=\"v\"} \
                     1\nh_seconds_count{k=\"v\"} 1\n"
                ),
            "{text}"
        );
        let open = page.text(Format::OpenMetrics);
        assert!(
            open.starts_with(
                "# HELP x_seconds Time.\n# TYPE x_seconds counter\n# UNIT x_seconds \
                 seconds\nx_seconds_total 1.5\n"
            ) && open.contains("# TYPE z info\nz_info{v=\"1\"} 1\n")
                && open.ends_with("# EOF\n"),
            "{open}"
        );
    }
}
