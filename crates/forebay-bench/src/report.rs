//! The results of a benchmark: rows of figures, each the median of its repetitions with the minimum
//! and maximum, as a table and as JSON.
//!
//! A figure's name ends in its unit, which also says which direction is better: `…_per_s` and
//! `of_…` (shares of a ceiling) up, `…_us…` and `…_bytes` down.

use forebay_core::{
    Error, Result,
    units::{format_bytes, grouped},
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::Path};

/// The kind of a line, which a terminal may show as a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// Text and figures.
    Plain,
    /// The heading of a table or of a part.
    Heading,
    /// A goal that was met, or a figure that improved.
    Good,
    /// A goal that was missed, or a figure that got worse.
    Bad,
    /// Something to know before the figures are believed.
    Warning,
    /// Something that may be skipped.
    Aside,
}

/// One line for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// How it is shown.
    pub tone: Tone,
    /// Without a line break and without colours.
    pub text: String,
}

impl Line {
    pub(crate) fn new(tone: Tone, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { tone, text }
    }
}

/// One figure over the repetitions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stat {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Stat {
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            (sorted[middle - 1] + sorted[middle]) / 2.0
        };
        Some(Self { median, min, max })
    }
}

/// The figures of one repetition.
pub(crate) type Figures = BTreeMap<String, f64>;

/// What a figure should be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Goal {
    pub figure: String,
    pub wanted: f64,
    /// At most, instead of at least.
    #[serde(default)]
    pub at_most: bool,
}

impl Goal {
    pub fn at_least(figure: &str, wanted: f64) -> Self {
        Self {
            figure: figure.to_owned(),
            wanted,
            at_most: false,
        }
    }

    pub fn at_most(figure: &str, wanted: f64) -> Self {
        Self {
            figure: figure.to_owned(),
            wanted,
            at_most: true,
        }
    }

    /// `100,000 objects/s: met`, `75 % of copy: missed by 12 %`.
    fn verdict(&self, row: &Row) -> Line {
        let what = format!(
            "{} {}",
            if self.at_most { "≤" } else { "≥" },
            show_figure(&self.figure, self.wanted)
        );
        let Some(stat) = row.figures.get(&self.figure) else {
            return Line::new(Tone::Warning, format!("{what}: not measured"));
        };
        let off = if self.at_most {
            stat.median / self.wanted - 1.0
        } else {
            1.0 - stat.median / self.wanted
        };
        if off <= 0.0 {
            Line::new(Tone::Good, format!("{what}: met"))
        } else {
            let missed = (off * 100.0).ceil();
            Line::new(Tone::Bad, format!("{what}: missed by {missed:.0} %"))
        }
    }
}

/// One measurement and what it should reach: a line in each table.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// What was run, in words; rows of two reports are matched by it.
    pub name: String,
    pub repeats: usize,
    pub figures: BTreeMap<String, Stat>,
    #[serde(default)]
    pub goals: Vec<Goal>,
}

impl Row {
    /// Medians over repetitions. A figure counts only if every repetition has it.
    pub fn of(name: String, runs: &[Figures], goals: Vec<Goal>) -> Self {
        let mut figures = BTreeMap::new();
        for figure in runs.first().into_iter().flat_map(BTreeMap::keys) {
            let values: Option<Vec<f64>> = runs.iter().map(|r| r.get(figure).copied()).collect();
            if let Some(stat) = values.and_then(|v| Stat::of(&v)) {
                figures.insert(figure.clone(), stat);
            }
        }
        Self {
            name,
            repeats: runs.len(),
            figures,
            goals,
        }
    }
}

/// What one command measured, as `--save` writes it and `forebay bench cmp` reads it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    pub(crate) program: String,
    pub(crate) time: String,
    pub(crate) cpus: usize,
    pub(crate) seed: u64,
    pub(crate) seconds: f64,
    /// What the reader should know, such as a ceiling that could not be measured.
    pub(crate) notes: Vec<String>,
    pub(crate) rows: Vec<Row>,
}

impl Report {
    /// Writes it to a file, as JSON.
    pub fn save(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_vec_pretty(self)
            .map_err(|e| Error::internal(format!("the report: {e}")))?;
        std::fs::write(path, text).map_err(|e| Error::file("cannot write", path, e))
    }

    /// Reads one that [`Report::save`] has written.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).map_err(|e| Error::file("cannot read", path, e))?;
        serde_json::from_slice(&text).map_err(|e| {
            Error::invalid(format!("{} is not a report: {e}", path.display()))
                .hint("`forebay bench … --save FILE` writes one")
        })
    }
}

/// A figure as people read it, without its name.
pub(crate) fn show(figure: &str, value: f64) -> String {
    if figure.starts_with("of_") || figure.ends_with("_share") {
        format!("{:.0} %", value * 100.0)
    } else if figure.starts_with("found_") || figure.starts_with("from_cache") {
        format!("{:.1} %", value * 100.0)
    } else if figure.starts_with("times_") {
        format!("{value:.1} ×")
    } else if figure.ends_with("bytes_per_s") {
        format!("{:.0} MiB/s", value / 1048576.0)
    } else if figure.ends_with("_per_s") {
        if value < 100.0 {
            format!("{value:.1}/s")
        } else {
            format!("{}/s", grouped(value.round() as u64))
        }
    } else if figure.ends_with("_us") || figure.contains("_us_per_") {
        match value {
            v if v >= 100_000.0 => format!("{:.0} ms", v / 1000.0),
            v if v >= 1000.0 => format!("{:.1} ms", v / 1000.0),
            v if v >= 100.0 => format!("{v:.0} µs"),
            v => format!("{v:.2} µs"),
        }
    } else if figure.ends_with("_bytes") {
        format_bytes(value as u64)
    } else {
        format!("{value:.2}")
    }
}

/// The same with its name: `100,000 objects/s`, `50 % of copy`.
fn show_figure(figure: &str, value: f64) -> String {
    match figure {
        "objects_per_s" => format!("{} objects/s", grouped(value.round() as u64)),
        "round_trips" => format!("{value:.0} round trips"),
        "index_bytes" => format!("{} of memory", show(figure, value)),
        "found_of_cache" => format!(
            "{} of what the cache has room for, in each later epoch",
            show(figure, value)
        ),
        "from_cache_least" => format!("{} of each later epoch from the cache", show(figure, value)),
        f if f.starts_with("ready_") => format!(
            "{} {}",
            show(f, value),
            f.trim_end_matches("_us").replace('_', " ")
        ),
        f if f.starts_with("of_") => format!("{} of {}", show(f, value), f[3..].replace('_', " ")),
        f => show(f, value),
    }
}

/// The columns of the first table: heading and figure. A column that no row has is left out.
const RATES: [(&str, &str); 20] = [
    ("objects", "objects_per_s"),
    ("payload", "bytes_per_s"),
    ("copy", "copy_bytes_per_s"),
    ("share", "of_copy"),
    ("uncached", "uncached_copy_bytes_per_s"),
    ("share", "of_uncached_copy"),
    ("nginx", "nginx_objects_per_s"),
    ("share", "of_nginx"),
    ("of objects", "of_objects"),
    ("of unsigned", "of_unsigned"),
    ("than one GET", "times_one_get"),
    ("than 32 GETs", "times_32_gets"),
    ("time", "batch_us"),
    ("transfer", "transfer_us"),
    ("round trips", "round_trips"),
    ("strictly", "strict_round_trips"),
    ("origin requests", "origin_requests"),
    ("connections", "origin_connections"),
    ("origin bytes", "origin_bytes"),
    ("paused", "paused_share"),
];

/// The columns of the second table: one table with all of them would be wider than a terminal.
const COSTS: [(&str, &str); 12] = [
    ("batch P50", "batch_p50_us"),
    ("P95", "batch_p95_us"),
    ("P99", "batch_p99_us"),
    ("object P50", "object_p50_us"),
    ("P95", "object_p95_us"),
    ("P99", "object_p99_us"),
    ("CPU/object: server", "server_cpu_us_per_object"),
    ("client", "client_cpu_us_per_object"),
    ("nginx", "nginx_cpu_us_per_object"),
    ("memory: server", "server_peak_bytes"),
    ("client", "client_peak_bytes"),
    ("of memcpy", "of_memcpy"),
];

/// For caches with many entries.
const CACHE: [(&str, &str); 11] = [
    ("of smallest", "of_smallest"),
    ("by few", "of_smallest_by_few"),
    ("puts", "puts_per_s"),
    ("index memory", "index_bytes"),
    ("table B/entry", "table_bytes_per_entry"),
    ("checkpoint", "checkpoint_bytes"),
    ("close", "close_us"),
    ("ready", "ready_us"),
    ("disk cold", "ready_disk_cold_us"),
    ("killed", "ready_killed_us"),
    ("no checkpoint", "ready_no_checkpoint_us"),
];

/// For caches that are smaller than what is read, epoch after epoch: what was found in each.
const EPOCHS: [(&str, &str); 10] = [
    ("cache", "cache_bytes"),
    ("of dataset", "of_dataset"),
    ("held", "held_share"),
    ("epoch 1", "found_in_1"),
    ("epoch 2", "found_in_2"),
    ("epoch 3", "found_in_3"),
    ("epoch 4", "found_in_4"),
    ("later", "found_later"),
    ("from cache", "from_cache_least"),
    ("written/fetched", "written_per_fetched"),
];

/// Pauses of a smaller share are not mentioned.
const PAUSED_TOLD: f64 = 0.01;

/// The lines of the tables, then those of the goals.
pub fn table(report: &Report) -> Vec<Line> {
    let mut lines = Vec::new();
    for part in [&RATES[..], &COSTS[..], &CACHE[..], &EPOCHS[..]] {
        let columns: Vec<_> = part
            .iter()
            .filter(|(_, f)| report.rows.iter().any(|r| r.figures.contains_key(*f)))
            .collect();
        if columns.is_empty() {
            continue;
        }
        let mut cells = vec![
            std::iter::once(String::new())
                .chain(columns.iter().map(|(h, _)| (*h).to_owned()))
                .collect::<Vec<_>>(),
        ];
        for row in &report.rows {
            let figures = columns.iter().map(|(_, f)| {
                row.figures
                    .get(*f)
                    .map_or(String::new(), |s| show(f, s.median))
            });
            cells.push(std::iter::once(row.name.clone()).chain(figures).collect());
        }
        let mut tone = Tone::Heading;
        for text in aligned(&cells) {
            lines.push(Line::new(tone, text));
            tone = Tone::Plain;
        }
        lines.push(Line::new(Tone::Plain, ""));
    }
    // The main figure of each row.
    let main = |r: &Row| {
        ["objects_per_s", "batch_us"]
            .iter()
            .find_map(|f| r.figures.get(*f).copied())
    };
    let spread = report
        .rows
        .iter()
        .filter_map(main)
        .map(|s| (s.max - s.min) / s.median)
        .fold(0.0, f64::max);
    if report.rows.iter().any(|r| r.repeats > 1) {
        let text = format!(
            "medians of {} repetitions, which lie at most {:.0} % apart",
            report.rows[0].repeats,
            spread * 100.0
        );
        lines.push(Line::new(Tone::Aside, text));
    }
    let paused = report
        .rows
        .iter()
        .filter_map(|r| r.figures.get("paused_share"))
        .map(|s| s.median)
        .fold(0.0, f64::max);
    if paused > PAUSED_TOLD {
        let text = "of their time the node paused batches because the machine was busy \
            (batch.throttle_ready_per_core)";
        let text = format!(
            "for up to {:.0} % {text}; --set batch.throttle_ready_per_core=0 measures without",
            paused * 100.0
        );
        lines.push(Line::new(Tone::Warning, text));
    }
    lines.extend(report.notes.iter().map(|n| Line::new(Tone::Warning, n)));
    let (mut cells, mut tones) = (Vec::new(), Vec::new());
    for row in &report.rows {
        for goal in &row.goals {
            let figure = row.figures.get(&goal.figure);
            let figure = figure.map_or("-".into(), |s| show(&goal.figure, s.median));
            let verdict = goal.verdict(row);
            cells.push(vec![row.name.clone(), figure, verdict.text]);
            tones.push(verdict.tone);
        }
    }
    if !cells.is_empty() {
        lines.push(Line::new(Tone::Plain, ""));
        lines.push(Line::new(Tone::Heading, "targets"));
        let goals = aligned(&cells).into_iter().zip(tones);
        lines.extend(goals.map(|(text, tone)| Line { tone, text }));
    }
    lines
}

/// Columns of equal width: the first and the last left-aligned, the others right-aligned.
pub(crate) fn aligned(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|c| {
            rows.iter()
                .filter_map(|r| r.get(c))
                .map(|t| t.chars().count())
                .max()
                .unwrap_or(0)
        })
        .collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().enumerate().map(|(c, text)| {
            let pad = " ".repeat(widths[c] - text.chars().count());
            if c == 0 {
                format!("{text}{pad}")
            } else {
                format!("{pad}{text}")
            }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(values: &[f64]) -> Row {
        let runs: Vec<Figures> = values
            .iter()
            .map(|v| Figures::from([("objects_per_s".to_owned(), *v)]))
            .collect();
        Row::of(
            "r".into(),
            &runs,
            vec![Goal::at_least("objects_per_s", 100.0)],
        )
    }

    #[test]
    fn a_row_is_the_median_and_a_goal_says_by_how_much_it_was_missed() {
        assert_eq!(
            row(&[120.0, 80.0, 90.0]).figures["objects_per_s"],
            Stat {
                median: 90.0,
                min: 80.0,
                max: 120.0
            }
        );
        assert_eq!(row(&[1.0, 3.0]).figures["objects_per_s"].median, 2.0);
        let verdict = |values: &[f64]| row(values).goals[0].verdict(&row(values)).text;
        assert_eq!(verdict(&[90.0]), "≥ 100 objects/s: missed by 10 %");
        assert_eq!(verdict(&[100.0]), "≥ 100 objects/s: met");
        let trips = Row::of(
            "c".into(),
            &[Figures::from([("round_trips".to_owned(), 4.5)])],
            vec![],
        );
        assert_eq!(
            Goal::at_most("round_trips", 3.0).verdict(&trips),
            Line::new(Tone::Bad, "≤ 3 round trips: missed by 50 %")
        );
        assert_eq!(
            Goal::at_least("of_copy", 0.5).verdict(&trips),
            Line::new(Tone::Warning, "≥ 50 % of copy: not measured")
        );
    }

    #[test]
    fn figures_have_units_and_columns_are_aligned() {
        assert_eq!(show("of_copy", 0.756), "76 %");
        assert_eq!(show("bytes_per_s", 1048576.0 * 12.4), "12 MiB/s");
        assert_eq!(show("objects_per_s", 123_456.0), "123,456/s");
        assert_eq!(show("batch_p50_us", 1234.0), "1.2 ms");
        assert_eq!(show("server_cpu_us_per_object", 7.346), "7.35 µs");
        let lines = aligned(&[
            vec!["a".into(), "µ".into()],
            vec!["long".into(), "1234".into()],
        ]);
        assert_eq!(lines, ["a        µ", "long  1234"]);
    }
}
