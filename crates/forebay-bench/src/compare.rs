//! Two reports side by side: what changed, and whether it changed by more than the repetitions of
//! one report differ from each other.

use crate::report::{Line, Report, Stat, Tone, aligned, show};

/// Changes below this are noise even if the repetitions happened to agree.
const NOISE_FLOOR: f64 = 0.02;
/// A single run does not show its spread.
const NOISE_OF_ONE: f64 = 0.05;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Noise,
    Better,
    Worse,
}

/// Whether a larger figure is better; `None` for figures that describe the machine.
fn more_is_better(figure: &str) -> Option<bool> {
    match figure {
        f if f.contains("cpy_bytes") || f.contains("copy_bytes") || f.starts_with("nginx_") => None,
        f if f.ends_with("_per_s") || f.starts_with("of_") => Some(true),
        _ => Some(false),
    }
}

/// Half the width of the repetitions' spread, as a share of the median.
fn noise(stat: &Stat, repeats: usize) -> f64 {
    if repeats < 2 {
        NOISE_OF_ONE
    } else {
        (stat.max - stat.min) / 2.0 / stat.median.abs().max(f64::MIN_POSITIVE)
    }
}

fn judge(figure: &str, a: (&Stat, usize), b: (&Stat, usize)) -> (f64, Change) {
    let change = if a.0.median == 0.0 {
        0.0
    } else {
        b.0.median / a.0.median - 1.0
    };
    let within = (noise(a.0, a.1) + noise(b.0, b.1)).max(NOISE_FLOOR);
    let change_of = match more_is_better(figure) {
        Some(up) if change.abs() > within => {
            if (change > 0.0) == up {
                Change::Better
            } else {
                Change::Worse
            }
        }
        _ => Change::Noise,
    };
    (change, change_of)
}

/// The lines of the comparison. Rows are matched by name.
pub(crate) fn compare(a: &Report, b: &Report) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut counts = [0usize; 2];
    for row in &a.rows {
        let Some(other) = b.rows.iter().find(|r| r.name == row.name) else {
            let text = format!("{}: only in the first", row.name);
            lines.push(Line::new(Tone::Warning, text));
            continue;
        };
        lines.push(Line::new(Tone::Heading, &row.name));
        let mut cells = Vec::new();
        let mut marks = Vec::new();
        for (figure, before) in &row.figures {
            let Some(after) = other.figures.get(figure) else {
                continue;
            };
            let (change, kind) = judge(figure, (before, row.repeats), (after, other.repeats));
            cells.push(vec![
                format!("  {}", figure.replace('_', " ")),
                show(figure, before.median),
                show(figure, after.median),
                format!("{:+.1} %", change * 100.0),
            ]);
            marks.push(kind);
        }
        for (line, kind) in aligned(&cells).into_iter().zip(marks) {
            lines.push(match kind {
                Change::Noise => Line::new(Tone::Plain, line),
                Change::Better => {
                    counts[0] += 1;
                    Line::new(Tone::Good, format!("{line}  better"))
                }
                Change::Worse => {
                    counts[1] += 1;
                    Line::new(Tone::Bad, format!("{line}  worse"))
                }
            });
        }
    }
    for row in b
        .rows
        .iter()
        .filter(|r| a.rows.iter().all(|o| o.name != r.name))
    {
        let text = format!("{}: only in the second", row.name);
        lines.push(Line::new(Tone::Warning, text));
    }
    let text = format!(
        "outside the noise of the repetitions: {} better, {} worse",
        counts[0], counts[1]
    );
    lines.push(Line::new(Tone::Plain, text));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Figures, Row};

    fn report(name: &str, values: &[f64]) -> Report {
        let runs: Vec<Figures> = values
            .iter()
            .map(|v| {
                Figures::from([
                    ("objects_per_s".to_owned(), *v),
                    ("server_cpu_us_per_object".to_owned(), 1e6 / v),
                    ("copy_bytes_per_s".to_owned(), v * 9.0),
                ])
            })
            .collect();
        Report {
            program: String::new(),
            time: String::new(),
            cpus: 2,
            seed: 1,
            seconds: 1.0,
            notes: vec![],
            rows: vec![Row::of(name.into(), &runs, vec![])],
        }
    }

    #[test]
    fn what_is_outside_the_noise_is_marked() {
        let text = |a: &Report, b: &Report| {
            let lines: Vec<_> = compare(a, b).into_iter().map(|line| line.text).collect();
            lines.join("\n")
        };
        let base = report("r", &[100.0, 101.0, 99.0]);
        let faster = text(&base, &report("r", &[120.0, 121.0, 119.0]));
        assert!(
            faster.contains("+20.0 %  better") && faster.contains("2 better, 0 worse"),
            "{faster}"
        );
        assert!(text(&base, &report("r", &[80.0, 81.0, 79.0])).contains("0 better, 2 worse"));
        // Within the spread of the repetitions.
        assert!(
            text(
                &report("r", &[80.0, 100.0, 120.0]),
                &report("r", &[110.0, 90.0, 120.0])
            )
            .contains("0 better, 0 worse")
        );
        // A single run shows no spread, so 4 % means nothing.
        assert!(text(&report("r", &[100.0]), &report("r", &[104.0])).contains("0 better, 0 worse"));
        let apart = text(&base, &report("other", &[1.0]));
        assert!(
            apart.contains("r: only in the first") && apart.contains("other: only in the second")
        );
    }
}
