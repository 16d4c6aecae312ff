//! A report as one HTML file: no scripts, no references to anything else, readable in light and
//! dark, and on paper.

use crate::{
    figures::{Epoch, Money, Report, joules},
    svg::{self, escaped},
    text::{STORED, amount, disclaimer, each, figure, percent, price, quantity, seconds, unit},
};
use forebay_core::units::{format_bytes, grouped};
use std::fmt::Write;

const STYLE: &str = include_str!("style.css");
const NOT_MEASURED: &str = "not measured";
const UNKNOWN: &str = "<span class=\"dim\">not measured</span>";

/// A whole page.
pub fn page(report: &Report) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <title>{}</title><style>html{{background:light-dark(#fff,#14171a)}}body{{margin:0}}</style>\
         </head><body>{}</body></html>\n",
        escaped(&heading(report)),
        fragment(report)
    )
}

fn heading(report: &Report) -> String {
    match &report.job {
        Some(job) => format!("Forebay: {} ({job})", report.title),
        None => format!("Forebay: {}", report.title),
    }
}

/// The same for a notebook: an element with a style of its own.
pub fn fragment(report: &Report) -> String {
    let mut out = format!("<div class=\"forebay-report\"><style>{STYLE}</style>");
    let _ = write!(
        out,
        "<header><h1>{}</h1><p class=\"dim\">{}{}</p></header>",
        escaped(&report.title),
        report
            .job
            .as_ref()
            .map_or(String::new(), |job| format!("job {} · ", escaped(job))),
        escaped(&report.made_at)
    );
    tiles(report, &mut out);
    if !report.warnings.is_empty() {
        out.push_str("<section class=\"warnings\">");
        for warning in &report.warnings {
            let _ = write!(
                out,
                "<p><b>{}</b><br>→ {}</p>",
                escaped(&warning.what),
                escaped(&warning.advice)
            );
        }
        out.push_str("</section>");
    }
    if let Some(run) = &report.run {
        section(
            "Where the time went",
            &svg::time(run.compute_s, &run.waits),
            &mut out,
        );
    }
    if let Some(timeline) = &report.timeline {
        let body = svg::timeline(timeline, report.unit());
        section("Over time", &body, &mut out);
    }
    if let Some(sources) = report.run.as_ref().and_then(|r| r.sources.as_ref()) {
        section("Where the bytes came from", &svg::bytes(sources), &mut out);
    }
    if !report.epochs.is_empty() {
        let body = svg::epochs(&report.epochs) + &table_of_epochs(&report.epochs, report.unit());
        section("Epochs", &body, &mut out);
    }
    section(
        "CPU time and energy while the loop waited, and while it computed",
        &stages(report),
        &mut out,
    );
    section("CPU time and energy", &ends(report), &mut out);
    if let Some(origin) = &report.origin {
        let mut rows = vec![
            ("read requests", grouped(origin.reads)),
            ("other requests", grouped(origin.writes)),
            ("bytes read", format_bytes(origin.read_bytes)),
            ("bytes written", format_bytes(origin.written_bytes)),
        ];
        if let Some(saved) = origin.reads_saved {
            rows.push(("requests that the cache saved", grouped(saved)));
        }
        rows.push((
            "bytes that the cache saved",
            format_bytes(origin.bytes_saved),
        ));
        let mut body = String::from("<table>");
        for (name, value) in rows {
            let _ = write!(body, "<tr><th>{name}</th><td>{value}</td></tr>");
        }
        body.push_str("</table>");
        if !origin.of.is_empty() {
            let _ = write!(body, "<p class=\"dim\">{}</p>", escaped(&origin.of));
        }
        section("The origin", &body, &mut out);
    }
    if let Some(money) = &report.money {
        section("Money", &spent(money), &mut out);
    }
    if let Some(quality) = &report.shuffle {
        let mut body = String::from("<div class=\"beside\">");
        body += &svg::order(quality);
        body.push_str(
            "<table><tr><th>measure</th><th class=\"n\">this order</th><th class=\"n\">uniform</th></tr>",
        );
        for (name, value, uniform) in &quality.measures {
            let _ = write!(
                body,
                "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
                escaped(name),
                figure(*value),
                figure(*uniform)
            );
        }
        body.push_str("</table></div>");
        section(&format!("The order: {}", quality.order), &body, &mut out);
    }
    if !report.absent.is_empty() {
        let mut body = String::from("<ul>");
        for line in &report.absent {
            let _ = write!(body, "<li>{}</li>", escaped(line));
        }
        body.push_str("</ul>");
        section("What is absent, and why", &body, &mut out);
    }
    out + "</div>"
}

fn section(title: &str, body: &str, out: &mut String) {
    if !body.is_empty() {
        let _ = write!(out, "<section><h2>{}</h2>{body}</section>", escaped(title));
    }
}

fn tiles(report: &Report, out: &mut String) {
    out.push_str("<div class=\"tiles\">");
    let mut tile = |name: &str, value: String, note: String| {
        let _ = write!(
            out,
            "<div><b>{}</b><span>{}</span><small>{}</small></div>",
            escaped(&value),
            escaped(name),
            escaped(&note)
        );
    };
    if let Some(run) = &report.run {
        tile(
            &format!("{}/s", report.unit()),
            grouped(run.samples_per_s.round() as u64),
            format!("{} in {} s", grouped(run.samples), seconds(run.seconds)),
        );
        if run.compute_s + run.waited_s > 0.0 {
            tile(
                "accelerator utilization",
                run.au.map_or(NOT_MEASURED.into(), percent),
                format!("waited {} s", seconds(run.waited_s)),
            );
        }
        tile(
            "hit ratio",
            run.hit_ratio.map_or(NOT_MEASURED.into(), percent),
            "bytes not from the origin".into(),
        );
    }
    for end in report.ends.iter().filter(|end| end.samples > 0) {
        let per_1000 = |amount: f64| amount * 1000.0 / end.samples as f64;
        let unit = end.unit();
        let (value, name) = match joules(&end.energy) {
            Some((j, true)) => (amount(per_1000(j)), format!("per 1,000 {unit} (ESTIMATE)")),
            Some((j, false)) => (amount(per_1000(j)), format!("per 1,000 {unit}")),
            None => match end.cpu_seconds {
                Some(cpu) => (
                    format!("{} s", seconds(per_1000(cpu))),
                    format!("CPU per 1,000 {unit}"),
                ),
                None => continue,
            },
        };
        tile(&name, value, end.name.clone());
    }
    if let Some(money) = &report.money {
        tile(
            "spent at the origin",
            price(money.spent_total, &money.prices.currency),
            format!("saved {}", price(money.saved_total, &money.prices.currency)),
        );
    }
    out.push_str("</div>");
}

fn table_of_epochs(epochs: &[Epoch], unit: &str) -> String {
    let unit = escaped(unit);
    let mut out = format!(
        "<div class=\"wide\"><table><tr><th>epoch</th><th class=\"n\">{unit}</th><th class=\"n\">seconds</th>\
         <th class=\"n\">{unit}/s</th><th class=\"n\">AU</th><th class=\"n\">waited</th>\
         <th class=\"n\">hit ratio</th><th class=\"n\">CPU</th><th class=\"n\">energy</th></tr>",
    );
    for Epoch { epoch, figures: f } in epochs {
        let known = |value: Option<String>| value.unwrap_or_else(|| "–".into());
        let energy = joules(&f.energy)
            .map(|(j, estimate)| amount(j) + if estimate { " (ESTIMATE)" } else { "" });
        let _ = write!(
            out,
            "<tr><td>{epoch}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{} s</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            grouped(f.samples),
            seconds(f.seconds),
            grouped(f.samples_per_s.round() as u64),
            known(f.au.map(percent)),
            seconds(f.waited_s),
            known(f.hit_ratio.map(percent)),
            known(f.cpu_seconds.map(|s| format!("{} s", seconds(s)))),
            known(energy)
        );
    }
    out + "</table></div>"
}

/// What was used in each stage, of the run and of each epoch.
fn stages(report: &Report) -> String {
    let run = report.run.iter().map(|f| ("all".to_owned(), f));
    let epochs = report.epochs.iter();
    let epochs = epochs.map(|e| (format!("epoch {}", e.epoch), &e.figures));
    let mut rows = String::new();
    for (of, figures) in run.chain(epochs) {
        let here = figures.stages.iter().map(|stage| ("process", stage));
        let there = figures.node_stages.iter().map(|stage| ("node", stage));
        for (end, stage) in here.chain(there) {
            let cpu = match stage.cpu_seconds {
                Some(s) => format!("{} s", seconds(s)),
                None if end == "node" => "–".into(),
                None => UNKNOWN.into(),
            };
            let energy = match joules(&stage.energy) {
                Some((j, true)) => amount(j) + " (ESTIMATE)",
                Some((j, false)) => amount(j),
                None => UNKNOWN.into(),
            };
            let _ = write!(
                rows,
                "<tr><td>{of}</td><td>{}</td><td>{end}</td><td class=\"n\">{} s</td>\
                 <td class=\"n\">{cpu}</td><td class=\"n\">{energy}</td><td>{}</td></tr>",
                escaped(&stage.stage),
                seconds(stage.seconds),
                escaped(&each(&stage.energy))
            );
        }
    }
    if rows.is_empty() {
        return rows;
    }
    format!(
        "<div class=\"wide\"><table><tr><th></th><th>the loop</th><th>where</th>\
         <th class=\"n\">time</th><th class=\"n\">CPU</th><th class=\"n\">energy</th>\
         <th>measured by</th></tr>{rows}</table></div>"
    )
}

fn ends(report: &Report) -> String {
    if report.ends.is_empty() {
        return String::new();
    }
    let mut out = String::from(
        "<div class=\"wide\"><table><tr><th>where</th><th>what</th><th>measured by</th>\
         <th class=\"n\">in all</th><th class=\"n\">per 1,000</th><th>unit</th></tr>",
    );
    for end in &report.ends {
        let per_1000 =
            |amount: f64| (end.samples > 0).then(|| amount * 1000.0 / end.samples as f64);
        let (name, unit) = (escaped(&end.name), escaped(end.unit()));
        let mut row = |what: &str, by: &str, all: String, each: String| {
            let _ = write!(
                out,
                "<tr><td>{name}</td><td>{}</td><td>{}</td><td class=\"n\">{all}</td><td class=\"n\">{each}</td><td>{unit}</td></tr>",
                escaped(what),
                escaped(by)
            );
        };
        let in_s = |s: f64| format!("{} s", seconds(s));
        match end.cpu_seconds {
            Some(cpu) => row(
                "CPU time",
                "the system",
                in_s(cpu),
                per_1000(cpu).map_or("–".into(), in_s),
            ),
            None => row("CPU time", "", UNKNOWN.into(), UNKNOWN.into()),
        }
        for e in &end.energy {
            let by = match e.estimate {
                true => format!("ESTIMATE by the model {}", e.source),
                false => e.source.clone(),
            };
            row(
                &e.domain,
                &by,
                amount(e.joules),
                per_1000(e.joules).map_or("–".into(), amount),
            );
        }
        if end.energy.is_empty() {
            row("energy", "", UNKNOWN.into(), UNKNOWN.into());
        }
    }
    out.push_str("</table></div>");
    for end in report.ends.iter().filter(|end| !end.of.is_empty()) {
        let _ = write!(
            out,
            "<p class=\"dim\">{}: {}</p>",
            escaped(&end.name),
            escaped(&end.of)
        );
    }
    out
}

fn spent(money: &Money) -> String {
    let currency = &money.prices.currency;
    let mut out = String::from(
        "<div class=\"wide\"><table><tr><th></th><th>what</th><th class=\"n\">quantity</th><th>unit</th>\
         <th class=\"n\">price</th><th class=\"n\">money</th></tr>",
    );
    for (what, lines, total) in [
        ("spent", &money.spent, money.spent_total),
        ("saved", &money.saved, money.saved_total),
    ] {
        for l in lines {
            let _ = write!(
                out,
                "<tr><td>{what}</td><td>{}</td><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{}</td>\
                 <td class=\"n\">{}</td></tr>",
                escaped(&l.what),
                quantity(l.quantity),
                escaped(unit(l)),
                escaped(&price(l.price, currency)),
                escaped(&price(l.cost, currency))
            );
        }
        let _ = write!(
            out,
            "<tr><th>{what}</th><th colspan=\"4\">in all</th><th class=\"n\">{}</th></tr>",
            escaped(&price(total, currency))
        );
    }
    out.push_str("</table></div>");
    if !money.shares.is_empty() {
        out.push_str(
            "<div class=\"wide\"><table><tr><th>by</th><th>name</th><th class=\"n\">spent</th><th class=\"n\">saved</th></tr>",
        );
        for share in &money.shares {
            let known = |of: Option<f64>| of.map_or("–".into(), |a| escaped(&price(a, currency)));
            let _ = write!(
                out,
                "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
                escaped(&share.by),
                escaped(&share.name),
                known(share.spent),
                known(share.saved)
            );
        }
        out.push_str("</table></div>");
    }
    if !money.storage.is_empty() {
        out.push_str(
            "<div class=\"wide\"><table><tr><th>kept at the origin</th><th>name</th><th class=\"n\">bytes</th>\
             <th class=\"n\">per GB and month</th><th class=\"n\">per month</th></tr>",
        );
        for kept in &money.storage {
            let _ = write!(
                out,
                "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
                escaped(&kept.by),
                escaped(&kept.name),
                format_bytes(kept.bytes),
                escaped(&price(kept.price, currency)),
                escaped(&price(kept.per_month, currency))
            );
        }
        let _ = write!(out, "</table></div><p class=\"dim\">{STORED}</p>");
    }
    let _ = write!(out, "<p class=\"dim\">{}</p>", escaped(&disclaimer(money)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{Bin, End, Energy, Figures, Quality, Sources, Timeline, Waits, Warning};

    /// One of everything, with texts that must be escaped.
    pub(super) fn full() -> Report {
        let figures = Figures {
            samples: 1000,
            batches: 10,
            seconds: 10.0,
            samples_per_s: 100.0,
            compute_s: 6.0,
            waited_s: 4.0,
            au: Some(0.6),
            waits: Waits {
                node_s: 3.0,
                decode_s: 1.0,
                origin_s: 2.0,
                ..Waits::default()
            },
            sources: Some(Sources {
                disk: 1 << 30,
                origin: 1 << 29,
                ..Sources::default()
            }),
            hit_ratio: Some(0.67),
            ..Figures::default()
        };
        Report {
            title: "<script>alert(1)</script> & \"more\"".into(),
            job: Some("a<b".into()),
            run: Some(figures.clone()),
            epochs: (0..3)
                .map(|epoch| Epoch {
                    epoch,
                    figures: figures.clone(),
                })
                .collect(),
            timeline: Some(Timeline {
                bin_seconds: 1.0,
                bins: vec![
                    Bin {
                        samples: 5,
                        waited_s: 0.5,
                        compute_s: 0.5
                    };
                    8
                ],
            }),
            ends: vec![End {
                name: "training process".into(),
                samples: 1000,
                cpu_seconds: Some(2.0),
                energy: vec![Energy {
                    source: "cpu-watts".into(),
                    domain: "cpu".into(),
                    joules: 50.0,
                    estimate: true,
                }],
                ..End::default()
            }],
            shuffle: Some(Quality {
                order: "block:16".into(),
                batch: 32,
                measures: vec![("displacement".into(), 0.3, 0.333)],
                points: vec![(0.5, 0.5)],
            }),
            absent: vec!["no <sensor>".into()],
            warnings: vec![Warning {
                what: "waited <much>".into(),
                advice: "do & don't".into(),
            }],
            ..Report::default()
        }
    }

    #[test]
    fn a_page_refers_to_nothing_and_runs_nothing() {
        let page = page(&full());
        for forbidden in [
            "<script", "http:", "https:", "src=", "url(", "@import", "href=",
        ] {
            assert!(!page.contains(forbidden), "{forbidden} in the page");
        }
        assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt; &amp; &quot;more&quot;"));
        assert!(page.contains("waited &lt;much&gt;") && page.contains("no &lt;sensor&gt;"));
        assert!(page.contains("prefers-color-scheme: dark"));
        for (open, close) in [
            ("<svg", "</svg>"),
            ("<section", "</section>"),
            ("<table", "</table>"),
            ("<div", "</div>"),
            ("<tr>", "</tr>"),
        ] {
            assert_eq!(
                page.matches(open).count(),
                page.matches(close).count(),
                "{open}"
            );
        }
        assert_eq!(page.matches("<svg").count(), 5);
    }

    #[test]
    fn estimates_are_marked_wherever_they_are_shown() {
        let page = page(&full());
        assert_eq!(page.matches("50.0 J").count(), 3, "tile, all, per 1,000");
        assert_eq!(page.matches("ESTIMATE").count(), 2, "tile and row");
    }

    #[test]
    fn a_bin_that_has_only_begun_is_no_drop() {
        let bin = |samples, waited_s| Bin {
            samples,
            waited_s,
            compute_s: 0.0,
        };
        let mut timeline = Timeline {
            bin_seconds: 1.0,
            bins: vec![bin(100, 1.0), bin(100, 1.0), bin(25, 0.25)],
        };
        let at_the_top =
            |timeline: &Timeline| svg::timeline(timeline, "samples").matches(" 16.0H").count();
        assert_eq!(at_the_top(&timeline), 3);
        // One that is as long as the others is what it is.
        timeline.bins[2].waited_s = 1.0;
        assert_eq!(at_the_top(&timeline), 2);
    }

    #[test]
    fn of_no_samples_nothing_is_told_per_1000() {
        let mut report = full();
        report.ends[0].samples = 0;
        let page = page(&report);
        assert_eq!(page.matches("50.0 J").count(), 1, "all");
        assert!(!page.contains("per 1,000 samples"));
    }

    #[test]
    fn a_page_tells_stages_units_and_storage() {
        let of = crate::text::tests::of;
        let mut report = crate::text::tests::in_stages([
            vec![of("rapl", "package-0", 12.0, false)],
            vec![of("<rapl>", "package-0", 34.0, false)],
        ]);
        let node = crate::Stage {
            stage: "waiting".into(),
            seconds: 2.0,
            energy: vec![of("rapl", "package-1", 5.0, false)],
            ..crate::Stage::default()
        };
        report.epochs[0].figures.node_stages = vec![node];
        let end = |name: &str, unit: &str| End {
            name: name.into(),
            samples: 1000,
            unit: unit.into(),
            cpu_seconds: Some(2.0),
            ..End::default()
        };
        report.ends = vec![end("process", "packs"), end("node", "rows")];
        report.money = Some(Money {
            storage: vec![crate::Storage {
                by: "dataset".into(),
                name: "b/<c4>/*".into(),
                bytes: 1 << 30,
                price: 0.02,
                per_month: 46.5,
            }],
            ..Money::default()
        });
        let page = page(&report);
        for there in [
            "<tr><td>epoch 3</td><td>computing</td><td>process</td>",
            "<tr><td>all</td><td>waiting</td><td>process</td>",
            "<tr><td>epoch 3</td><td>waiting</td><td>node</td><td class=\"n\">2.00 s</td>\
             <td class=\"n\">–</td><td class=\"n\">5.0 J</td><td>5.0 J package-1 (rapl)</td>",
            "34.0 J package-0 (&lt;rapl&gt;)",
            "12.0 J package-0 (rapl)",
            "CPU per 1,000 packs",
            "CPU per 1,000 rows",
            "<span>packs/s</span>",
            "b/&lt;c4&gt;/*",
            "46.50 ",
            "not in what was spent",
        ] {
            assert!(page.contains(there), "{there} in {page}");
        }
        assert!(!page.contains("samples"), "{page}");
        // Joules that nobody measured are not told in a stage either.
        let none = super::page(&crate::text::tests::in_stages([Vec::new(), Vec::new()]));
        assert!(none.contains("not measured") && !none.contains(" J<"));
    }

    #[test]
    fn what_is_not_measured_is_said_in_words() {
        let mut report = full();
        let run = report.run.as_mut().unwrap();
        (run.au, run.hit_ratio) = (None, None);
        let page = page(&report);
        assert_eq!(page.matches("<b>not measured</b>").count(), 2);
        assert!(!page.contains("&lt;span"), "markup as text");
    }

    #[test]
    fn an_empty_report_is_a_page_too() {
        let page = page(&Report::default());
        assert!(page.contains("forebay-report") && !page.contains("NaN"));
    }
}
