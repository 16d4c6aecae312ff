//! A report as lines for a terminal.

use crate::figures::{
    End, Figures, Money, NODE_CAUSES, Report, SOURCES, Sources, joules as sum_of_joules,
};
use forebay_core::units::{format_bytes, grouped};
use std::fmt::Write;

/// What a figure is where it was not measured.
const UNKNOWN: &str = "not measured";

/// The whole report; its lines have no colours.
pub fn text(report: &Report) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{name:<13}{value}");
    };
    line("run", report.title.clone());
    if let Some(job) = &report.job {
        line("job", job.clone());
    }
    if let Some(run) = &report.run {
        fed(run, &mut line);
    }
    for epoch in &report.epochs {
        line(&format!("epoch {}", epoch.epoch), short(&epoch.figures));
    }
    if report.epochs_left_out > 0 {
        line(
            "epochs",
            format!(
                "{} earlier epochs are counted only in the totals",
                report.epochs_left_out
            ),
        );
    }
    for end in &report.ends {
        line(&end.name, used(end));
        for energy in &end.energy {
            line(
                "",
                format!(
                    "{} {} ({}{})",
                    amount(energy.joules),
                    energy.domain,
                    energy.source,
                    if energy.estimate { ", an ESTIMATE" } else { "" }
                ),
            );
        }
    }
    if let Some(origin) = &report.origin {
        let of = of(&origin.of);
        line(
            "origin",
            format!(
                "{} read and {} other requests, {} read; the cache saved {} requests and {}{of}",
                grouped(origin.reads),
                grouped(origin.writes),
                format_bytes(origin.read_bytes),
                grouped(origin.reads_saved),
                format_bytes(origin.bytes_saved)
            ),
        );
    }
    if let Some(money) = &report.money {
        spent(money, &mut line);
    }
    if let Some(quality) = &report.shuffle {
        let measures: Vec<String> = quality
            .measures
            .iter()
            .map(|(name, value, uniform)| {
                format!("{name} {} ({})", figure(*value), figure(*uniform))
            })
            .collect();
        line("order", format!("{}; beside a uniform one:", quality.order));
        for some in measures.chunks(3) {
            line("", some.join(", "));
        }
    }
    for absent in &report.absent {
        line("absent", absent.clone());
    }
    for warning in &report.warnings {
        line("warning", warning.what.clone());
        line("", format!("→ {}", warning.advice));
    }
    out
}

fn of(whose: &str) -> String {
    match whose {
        "" => String::new(),
        whose => format!(" ({whose})"),
    }
}

fn fed(run: &Figures, line: &mut impl FnMut(&str, String)) {
    line(
        "samples",
        format!(
            "{} in {} batches, {}, {} s: {} samples/s",
            grouped(run.samples),
            grouped(run.batches),
            format_bytes(run.bytes),
            seconds(run.seconds),
            grouped(run.samples_per_s.round() as u64)
        ),
    );
    if run.compute_s + run.waited_s == 0.0 {
        // A node does not see the loop.
        match &run.sources {
            Some(sources) => line("bytes from", from(sources)),
            None => line("bytes from", UNKNOWN.into()),
        }
        return;
    }
    line(
        "utilization",
        match run.au {
            Some(au) => format!(
                "AU {} (computing {} s, waiting {} s, of which {} s for first batches)",
                percent(au),
                seconds(run.compute_s),
                seconds(run.waited_s),
                seconds(run.first_wait_s)
            ),
            None => format!("AU {UNKNOWN}: it takes two batches or more"),
        },
    );
    let waits = &run.waits;
    line(
        "waited for",
        format!(
            "node {} s, decoding {} s, collating {} s",
            seconds(waits.node_s),
            seconds(waits.decode_s),
            seconds(waits.collate_s)
        ),
    );
    if waits.node_s > 0.0 {
        let parts: Vec<String> = NODE_CAUSES
            .iter()
            .zip(waits.of_node())
            .map(|(name, s)| format!("{name} {} s", seconds(s)))
            .collect();
        line("", format!("the node: {}", parts.join(", ")));
    }
    match &run.sources {
        Some(sources) => line("bytes from", from(sources)),
        None => line("bytes from", UNKNOWN.into()),
    }
}

fn from(sources: &Sources) -> String {
    let parts: Vec<String> = SOURCES
        .iter()
        .zip(sources.each())
        .map(|(name, bytes)| format!("{name} {}", format_bytes(bytes)))
        .collect();
    let hit = sources
        .hit_ratio()
        .map(|hit| format!("; hit ratio {}", percent(hit)));
    parts.join(", ") + &hit.unwrap_or_default()
}

fn short(f: &Figures) -> String {
    let mut text = format!(
        "{} samples, {} s, {} samples/s, AU {}",
        grouped(f.samples),
        seconds(f.seconds),
        grouped(f.samples_per_s.round() as u64),
        f.au.map_or(UNKNOWN.into(), percent)
    );
    if let Some(hit) = f.hit_ratio {
        let _ = write!(text, ", hit ratio {}", percent(hit));
    }
    if let Some((joules, estimate)) = sum_of_joules(&f.energy) {
        let _ = write!(
            text,
            ", {}{}",
            amount(joules),
            if estimate { " (an ESTIMATE)" } else { "" }
        );
    }
    text
}

fn used(end: &End) -> String {
    let per_1000 = |amount: f64| (end.samples > 0).then(|| amount * 1000.0 / end.samples as f64);
    let mut parts = Vec::new();
    match end.cpu_seconds {
        Some(cpu) => parts.push(format!(
            "CPU {} s{}",
            seconds(cpu),
            per_1000(cpu).map_or(String::new(), |s| format!(
                ", {} s per 1,000 samples",
                seconds(s)
            ))
        )),
        None => parts.push(format!("CPU {UNKNOWN}")),
    }
    match sum_of_joules(&end.energy) {
        Some((joules, estimate)) => parts.push(format!(
            "{}{}{}",
            amount(joules),
            per_1000(joules).map_or(String::new(), |j| format!(
                ", {} per 1,000 samples",
                amount(j)
            )),
            if estimate { " (an ESTIMATE)" } else { "" }
        )),
        None => parts.push(format!("joules {UNKNOWN}")),
    }
    parts.join("; ") + &of(&end.of)
}

fn spent(money: &Money, line: &mut impl FnMut(&str, String)) {
    let list = &money.prices;
    line(
        "money",
        format!(
            "spent {}, saved {}",
            price(money.spent_total, &list.currency),
            price(money.saved_total, &list.currency)
        ),
    );
    for (what, lines) in [("spent", &money.spent), ("saved", &money.saved)] {
        for l in lines {
            line(
                "",
                format!(
                    "{what} on {}: {} {} at {} = {}",
                    l.what,
                    quantity(l.quantity),
                    l.unit,
                    price(l.price, &list.currency),
                    price(l.cost, &list.currency)
                ),
            );
        }
    }
    for share in &money.shares {
        let part = |name: &str, amount: Option<f64>| {
            amount.map(|a| format!("{name} {}", price(a, &list.currency)))
        };
        let parts: Vec<String> = [part("spent", share.spent), part("saved", share.saved)]
            .into_iter()
            .flatten()
            .collect();
        line(
            "",
            format!("{} {}: {}", share.by, share.name, parts.join(", ")),
        );
    }
    line("", disclaimer(money));
}

/// What must be said beside each sum of money.
pub(crate) fn disclaimer(money: &Money) -> String {
    let list = &money.prices;
    format!(
        "by list prices of {} in {} as of {} ({}; from {}): check them against your own bill",
        list.provider, list.region, list.dated, list.source, list.file
    )
}

/// Seconds with as many places as are of use.
pub(crate) fn seconds(s: f64) -> String {
    match s.abs() {
        a if a >= 100.0 => grouped(s.round() as u64),
        a if a >= 1.0 => format!("{s:.2}"),
        0.0 => "0".into(),
        _ => format!("{s:.4}"),
    }
}

/// `40.0 %`.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Joules in a unit that suits them.
pub(crate) fn amount(joules: f64) -> String {
    match joules.abs() {
        a if a >= 3.6e6 => format!("{:.2} kWh", joules / 3.6e6),
        a if a >= 10_000.0 => format!("{:.1} kJ", joules / 1e3),
        _ => format!("{joules:.1} J"),
    }
}

/// An amount of money: two places, or four significant ones of little.
pub(crate) fn price(amount: f64, currency: &str) -> String {
    match amount.abs() {
        0.0 => format!("0 {currency}"),
        a if a >= 1.0 => format!("{amount:.2} {currency}"),
        a if a >= 0.001 => format!("{amount:.4} {currency}"),
        _ => format!("{amount:.2e} {currency}"),
    }
}

/// Four significant digits.
pub(crate) fn figure(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        size if size < 0.001 => format!("{value:.1e}"),
        size if size < 10.0 => format!("{value:.4}"),
        size if size < 1000.0 => format!("{value:.1}"),
        _ => grouped(value.round() as u64),
    }
}

/// As [`figure`]; whole numbers, as of requests, without decimals.
pub(crate) fn quantity(value: f64) -> String {
    match value.fract() == 0.0 {
        true => grouped(value as u64),
        false => figure(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::Energy;

    fn end(energy: Vec<Energy>) -> End {
        End {
            name: "node".into(),
            samples: 2000,
            cpu_seconds: Some(4.0),
            energy,
            ..End::default()
        }
    }

    #[test]
    fn joules_that_nobody_measured_are_not_zero() {
        assert_eq!(
            used(&end(Vec::new())),
            "CPU 4.00 s, 2.00 s per 1,000 samples; joules not measured"
        );
    }

    #[test]
    fn domains_that_contain_others_are_not_added_and_estimates_are_marked() {
        let of = |domain: &str, joules, estimate| Energy {
            source: "rapl".into(),
            domain: domain.into(),
            joules,
            estimate,
        };
        let measured = end(vec![
            of("package-0", 100.0, false),
            of("dram-0", 20.0, false),
            of("core-0", 60.0, false),
            of("psys", 150.0, false),
        ]);
        assert!(used(&measured).contains("120.0 J, 60.0 J per 1,000 samples"));
        assert!(!used(&measured).contains("ESTIMATE"));
        let modelled = end(vec![of("cpu", 100.0, true)]);
        assert!(used(&modelled).contains("(an ESTIMATE)"));
        let report = Report {
            ends: vec![modelled],
            ..Report::default()
        };
        assert_eq!(text(&report).matches("ESTIMATE").count(), 2);
    }

    #[test]
    fn figures_have_their_units() {
        assert_eq!(
            [0.0, 0.00001, 0.5, 12.345, 1e9].map(figure),
            ["0", "1.0e-5", "0.5000", "12.3", "1,000,000,000"]
        );
        assert_eq!([1.0, 2_000.0, 0.25].map(quantity), ["1", "2,000", "0.2500"]);
        assert_eq!(
            [0.0, 0.0000123, 0.0123, 12.345].map(|p| price(p, "USD")),
            ["0 USD", "1.23e-5 USD", "0.0123 USD", "12.35 USD"]
        );
        assert_eq!(
            [5.0, 50_000.0, 7.2e6].map(amount),
            ["5.0 J", "50.0 kJ", "2.00 kWh"]
        );
    }
}
