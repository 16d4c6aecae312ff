//! InfluxDB's line protocol: `measurement,tag=value field=value timestamp`.

use crate::monitor::{Sample, Sensor};
use std::fmt::Write;

/// What has a meaning in a measurement's name, or in keys and values of tags, is written after a
/// backslash. A line break cannot be written at all.
fn escaped(text: &str, equals: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            ',' | ' ' => out.extend(['\\', c]),
            '=' if equals => out.extend(['\\', c]),
            '\n' | '\r' => out.push_str("\\ "),
            c => out.push(c),
        }
    }
    // A backslash at the end would take the comma or the space that follows with it.
    while out.ends_with('\\') {
        out.pop();
    }
    out
}

/// A line that says something to people, and nothing to a database.
pub fn comment(text: &str) -> String {
    format!("# {}\n", text.replace(['\n', '\r'], " "))
}

/// Samples as lines: one for each sensor and moment, with the joules since the monitor began and,
/// from the second sample on, the power since the one before. Times are in nanoseconds since the
/// Unix epoch. `tags` go with each line (`host`, `job`); empty values are left out.
pub fn line_protocol(sensors: &[Sensor], samples: &[Sample], tags: &[(&str, &str)]) -> String {
    let mut out = String::new();
    let tags: String = tags
        .iter()
        .map(|(name, value)| (escaped(name, true), escaped(value, true)))
        .filter(|(name, value)| !name.is_empty() && !value.is_empty())
        .map(|(name, value)| format!(",{name}={value}"))
        .collect();
    let mut before: Option<&Sample> = None;
    for sample in samples {
        for (i, sensor) in sensors.iter().enumerate() {
            let Some(joules) = sample.joules.get(i).copied().flatten() else {
                continue;
            };
            // Writing to a string cannot fail.
            let _ = write!(
                out,
                "forebay_energy{tags},source={},domain={}{} joules={joules}",
                escaped(&sensor.source, true),
                escaped(&sensor.domain, true),
                if sensor.estimate {
                    ",estimate=true"
                } else {
                    ""
                }
            );
            let last = before.and_then(|b| Some((b.at_ns, b.joules.get(i).copied().flatten()?)));
            if let Some((at, was)) = last
                && sample.at_ns > at
            {
                let watts = (joules - was) / ((sample.at_ns - at) as f64 / 1e9);
                let _ = write!(out, ",watts={watts}");
            }
            let _ = writeln!(out, " {}", sample.utc_ns);
        }
        before = Some(sample);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_as_the_protocol_has_them() {
        let sensor = |domain: &str, estimate| Sensor {
            source: "rapl".into(),
            domain: domain.into(),
            estimate,
        };
        let sample = |at_ns: u64, joules: Vec<Option<f64>>| Sample {
            at_ns,
            utc_ns: 1_700_000_000_000_000_000 + at_ns as i64,
            joules,
        };
        let text = line_protocol(
            &[sensor("package-0", false), sensor("a b,c=d", true)],
            &[
                sample(0, vec![Some(0.0), None]),
                sample(100_000_000, vec![Some(5.5), Some(1.0)]),
            ],
            &[("host", "node 1"), ("job", "")],
        );
        assert_eq!(
            text,
            "forebay_energy,host=node\\ 1,source=rapl,domain=package-0 joules=0 \
             1700000000000000000\n\
             forebay_energy,host=node\\ 1,source=rapl,domain=package-0 joules=5.5,watts=55 \
             1700000000100000000\n\
             forebay_energy,host=node\\ 1,source=rapl,domain=a\\ b\\,c\\=d,estimate=true joules=1 \
             1700000000100000000\n"
        );
        assert_eq!(escaped("a\nb", true), "a\\ b");
        assert_eq!(escaped("ends\\", true), "ends");
        assert_eq!(comment("no sensor\njoules=1"), "# no sensor joules=1\n");
    }
}
