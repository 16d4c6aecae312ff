//! A report as lines for a terminal.

use crate::figures::{
    End, Energy, Figures, Money, MoneyLine, NODE_CAUSES, Report, SOURCES, Sources, Stage, Storage,
    is_counted, joules as sum_of_joules,
};
use forebay_core::units::{count, format_bytes, grouped};
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
        fed(run, report.unit(), &mut line);
        for stage in &run.stages {
            line(&stage.stage, in_stage(stage, ""));
            if !stage.energy.is_empty() {
                line("", each(&stage.energy));
            }
            for of_node in run.node_stages.iter().filter(|s| s.stage == stage.stage) {
                line("", format!("the node's machine: {}", each(&of_node.energy)));
            }
        }
    }
    for epoch in &report.epochs {
        let f = &epoch.figures;
        line(&format!("epoch {}", epoch.epoch), short(f, report.unit()));
        if !f.stages.is_empty() {
            let stages = f.stages.iter();
            let told = stages.map(|s| format!("{} {}", s.stage, in_stage(s, &sources(&s.energy))));
            line("", told.collect::<Vec<_>>().join("; "));
        }
        if !f.node_stages.is_empty() {
            let told = f.node_stages.iter().map(|s| {
                let by = of(&sources(&s.energy));
                format!("{} {}{by}", s.stage, joules_of(&s.energy))
            });
            let told = told.collect::<Vec<_>>().join("; ");
            line("", format!("the node's machine: {told}"));
        }
    }
    if report.epochs_left_out > 0 {
        let are = if report.epochs_left_out == 1 {
            "is"
        } else {
            "are"
        };
        let earlier = count(report.epochs_left_out, "earlier epoch");
        line(
            "epochs",
            format!("{earlier} {are} counted only in the totals"),
        );
    }
    for end in &report.ends {
        line(&end.name, used(end));
        for energy in &end.energy {
            line("", figure_of(energy));
        }
    }
    if let Some(origin) = &report.origin {
        let of = of(&origin.of);
        let requests = origin.reads_saved.map_or(String::new(), |saved| {
            format!("{} request{} and ", grouped(saved), plural(saved))
        });
        line(
            "origin",
            format!(
                "{} read and {} other request{}, {} read; the cache saved {requests}{}{of}",
                grouped(origin.reads),
                grouped(origin.writes),
                plural(origin.writes),
                format_bytes(origin.read_bytes),
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

fn plural(n: u64) -> &'static str {
    if n == 1 { "" } else { "s" }
}

fn of(whose: &str) -> String {
    match whose {
        "" => String::new(),
        whose => format!(" ({whose})"),
    }
}

/// `12.0 J package-0 (rapl)`.
fn figure_of(energy: &Energy) -> String {
    format!(
        "{} {} ({}{})",
        amount(energy.joules),
        energy.domain,
        energy.source,
        if energy.estimate { ", an ESTIMATE" } else { "" }
    )
}

/// Each figure, with its source; empty if there is none.
pub(crate) fn each(energy: &[Energy]) -> String {
    let figures: Vec<String> = energy.iter().map(figure_of).collect();
    figures.join(", ")
}

/// Where the sum of these comes from.
fn sources(energy: &[Energy]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for e in energy.iter().filter(|e| is_counted(energy, e)) {
        if !names.contains(&&*e.source) {
            names.push(&e.source);
        }
    }
    names.join(", ")
}

/// The sum of what was used.
fn joules_of(energy: &[Energy]) -> String {
    match sum_of_joules(energy) {
        Some((joules, true)) => format!("{} (an ESTIMATE)", amount(joules)),
        Some((joules, false)) => amount(joules),
        None => format!("joules {UNKNOWN}"),
    }
}

/// What was used in a stage; `by` says what measured the joules.
fn in_stage(stage: &Stage, by: &str) -> String {
    let cpu = match stage.cpu_seconds {
        Some(cpu) => format!("{} s", seconds(cpu)),
        None => UNKNOWN.into(),
    };
    let (joules, by) = (joules_of(&stage.energy), of(by));
    format!("{} s: CPU {cpu}, {joules}{by}", seconds(stage.seconds))
}

fn fed(run: &Figures, unit: &str, line: &mut impl FnMut(&str, String)) {
    // A node does not see the loop.
    let is_loop = run.compute_s + run.waited_s > 0.0;
    line(
        unit,
        format!(
            "{} in {} {}, {}, {} s: {} {unit}/s",
            grouped(run.samples),
            grouped(run.batches),
            if is_loop { "batches" } else { "reads" },
            format_bytes(run.bytes),
            seconds(run.seconds),
            grouped(run.samples_per_s.round() as u64)
        ),
    );
    if !is_loop {
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

fn short(f: &Figures, unit: &str) -> String {
    let mut text = format!(
        "{} {unit}, {} s, {} {unit}/s, AU {}",
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
    let unit = end.unit();
    let mut parts = Vec::new();
    match end.cpu_seconds {
        Some(cpu) => parts.push(format!(
            "CPU {} s{}",
            seconds(cpu),
            per_1000(cpu).map_or(String::new(), |s| format!(
                ", {} s per 1,000 {unit}",
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
                ", {} per 1,000 {unit}",
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
                    unit(l),
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
    for kept in &money.storage {
        line("", format!("keeping {}", kept_for(kept, &list.currency)));
    }
    line("", disclaimer(money));
}

/// What it costs to keep something, and that this is not part of what was spent.
fn kept_for(kept: &Storage, currency: &str) -> String {
    format!(
        "{} {} at the origin: {} at {} per GB and month = {} {STORED}",
        kept.by,
        kept.name,
        format_bytes(kept.bytes),
        price(kept.price, currency),
        price(kept.per_month, currency)
    )
}

/// What must be said beside each price of storage.
pub(crate) const STORED: &str = "per month, whatever is read: not in what was spent";

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

/// The unit of what is paid for: of one, in the singular.
pub(crate) fn unit(line: &MoneyLine) -> &str {
    let singular = line.unit.strip_suffix('s');
    singular
        .filter(|_| line.quantity == 1.0)
        .unwrap_or(&line.unit)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

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
        let of_node = End {
            unit: "rows".into(),
            ..end(vec![of("dram-0", 20.0, false)])
        };
        assert!(used(&of_node).contains("20.0 J, 10.0 J per 1,000 rows"));
        assert!(used(&of_node).contains("2.00 s per 1,000 rows"));
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
    fn epochs_that_are_left_out_are_told_by_their_number() {
        for (epochs_left_out, told) in [
            (1, "1 earlier epoch is counted only in the totals"),
            (1200, "1,200 earlier epochs are counted only in the totals"),
        ] {
            let report = Report {
                epochs_left_out,
                ..Report::default()
            };
            assert!(text(&report).contains(told), "{}", text(&report));
        }
    }

    /// A run of packs, over one epoch, with what its stages took.
    pub(crate) fn in_stages(energy: [Vec<Energy>; 2]) -> Report {
        let [waiting, computing] = energy;
        let stage = |stage: &str, seconds, cpu, energy| Stage {
            stage: stage.into(),
            seconds,
            cpu_seconds: Some(cpu),
            energy,
        };
        let figures = Figures {
            samples: 20,
            batches: 10,
            seconds: 8.0,
            compute_s: 6.0,
            waited_s: 2.0,
            stages: vec![
                stage("waiting", 2.0, 0.5, waiting),
                stage("computing", 6.0, 1.5, computing),
            ],
            ..Figures::default()
        };
        Report {
            unit: "packs".into(),
            epochs: vec![crate::Epoch {
                epoch: 3,
                figures: figures.clone(),
            }],
            run: Some(figures),
            ..Report::default()
        }
    }

    pub(crate) fn of(source: &str, domain: &str, joules: f64, estimate: bool) -> Energy {
        Energy {
            source: source.into(),
            domain: domain.into(),
            joules,
            estimate,
        }
    }

    #[test]
    fn joules_are_told_by_stage_with_their_sources() {
        let measured = in_stages([
            vec![
                of("rapl", "package-0", 10.0, false),
                of("rapl", "psys", 30.0, false),
                of("nvml", "gpu-0", 2.5, false),
            ],
            vec![
                of("rapl", "package-0", 40.0, false),
                of("rapl", "psys", 90.0, false),
                of("nvml", "gpu-0", 100.0, false),
            ],
        ]);
        let told = text(&measured);
        assert!(
            told.contains(
                "waiting      2.00 s: CPU 0.5000 s, 12.5 J\n             10.0 J package-0 (rapl), \
                 30.0 J psys (rapl), 2.5 J gpu-0 (nvml)\n"
            ),
            "{told}"
        );
        assert!(
            told.contains(
                "             waiting 2.00 s: CPU 0.5000 s, 12.5 J (rapl, nvml); computing 6.00 s: CPU \
                 1.50 s, 140.0 J (rapl, nvml)\n"
            ),
            "{told}"
        );
        let mut far = measured;
        let at_node = |stage: &str, joules| Stage {
            stage: stage.into(),
            energy: vec![of("rapl", "package-1", joules, false)],
            ..Stage::default()
        };
        let both = vec![at_node("waiting", 12.5), at_node("computing", 40.0)];
        far.epochs[0].figures.node_stages = both.clone();
        far.run
            .iter_mut()
            .for_each(|run| run.node_stages = both.clone());
        let told = text(&far);
        assert!(
            told.contains(
                "gpu-0 (nvml)\n             the node's machine: 12.5 J package-1 (rapl)\ncomputing "
            ),
            "{told}"
        );
        assert!(
            told.contains("the node's machine: waiting 12.5 J (rapl); computing 40.0 J (rapl)\n"),
            "{told}"
        );
        let modelled = in_stages([
            vec![of("cpu-watts=15", "cpu", 7.5, true)],
            vec![of("cpu-watts=15", "cpu", 22.5, true)],
        ]);
        let told = text(&modelled);
        assert_eq!(told.matches("ESTIMATE").count(), 6, "{told}");
        let told = text(&in_stages([Vec::new(), Vec::new()]));
        assert_eq!(told.matches("CPU 1.50 s, joules not measured").count(), 2);
        assert!(!told.contains(" J"), "{told}");
    }

    #[test]
    fn packs_are_called_packs_and_rows_rows() {
        let told = text(&in_stages([Vec::new(), Vec::new()]));
        assert!(told.contains("packs        20 in 10 batches"), "{told}");
        assert!(told.contains("20 packs, 8.00 s, 0 packs/s"), "{told}");
        assert!(!told.contains("samples"), "{told}");
        let of_node = Report {
            unit: "rows".into(),
            run: Some(Figures {
                samples: 1000,
                batches: 7,
                seconds: 10.0,
                samples_per_s: 100.0,
                ..Figures::default()
            }),
            ..Report::default()
        };
        let told = text(&of_node);
        assert!(
            told.contains("rows         1,000 in 7 reads, 0 B, 10.00 s: 100 rows/s"),
            "{told}"
        );
    }

    #[test]
    fn storage_is_by_the_month_and_not_spent() {
        let report = Report {
            money: Some(Money {
                prices: crate::PriceList {
                    currency: "USD".into(),
                    ..crate::PriceList::default()
                },
                storage: vec![Storage {
                    by: "dataset".into(),
                    name: "b/c4/*".into(),
                    bytes: 2_000_000_000_000,
                    price: 0.023,
                    per_month: 46.0,
                }],
                ..Money::default()
            }),
            ..Report::default()
        };
        let told = text(&report);
        assert!(told.contains("spent 0 USD, saved 0 USD"), "{told}");
        assert!(
            told.contains("keeping dataset b/c4/* at the origin: ")
                && told.contains(
                    "at 0.0230 USD per GB and month = 46.00 USD per month, whatever is read"
                )
                && told.contains("not in what was spent"),
            "{told}"
        );
    }

    #[test]
    fn one_request_is_told_in_the_singular() {
        let line = |quantity: f64, unit: &str| MoneyLine {
            what: "read requests".into(),
            quantity,
            unit: unit.into(),
            ..MoneyLine::default()
        };
        let report = Report {
            origin: Some(crate::OriginUse {
                writes: 1,
                reads_saved: Some(1),
                ..crate::OriginUse::default()
            }),
            money: Some(Money {
                spent: vec![
                    line(1.0, "requests"),
                    line(2.0, "requests"),
                    line(1.0, "GB"),
                ],
                ..Money::default()
            }),
            ..Report::default()
        };
        let told = text(&report);
        for part in [
            "0 read and 1 other request, ",
            "saved 1 request and ",
            ": 1 request at ",
            ": 2 requests at ",
            ": 1 GB at ",
        ] {
            assert!(told.contains(part), "{part:?} in {told}");
        }
        let page = crate::page(&report);
        assert!(page.contains("<td>request</td>") && page.contains("<td>requests</td>"));
    }

    #[test]
    fn requests_that_nobody_counted_are_not_zero() {
        let report = Report {
            origin: Some(crate::OriginUse {
                bytes_saved: 1 << 20,
                ..crate::OriginUse::default()
            }),
            ..Report::default()
        };
        let told = text(&report);
        assert!(told.contains("the cache saved 1.0 MiB\n"), "{told}");
        let page = crate::page(&report);
        assert!(page.contains("bytes that the cache saved"));
        assert!(!page.contains("requests that the cache saved"), "{page}");
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
