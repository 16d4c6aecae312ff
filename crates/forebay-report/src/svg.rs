//! The pictures of a report, as inline SVG. Colours are CSS variables of the page, so that they
//! suit light and dark.

use crate::{
    figures::{Epoch, NODE_CAUSES, Quality, SOURCES, Sources, Timeline, Waits},
    text::{percent, seconds},
};
use forebay_core::units::format_bytes;
use std::fmt::Write;

const WIDTH: f64 = 720.0;

/// For texts and attributes of HTML and SVG.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// A part of a bar: what it is, its size, how that is written, and the variable of its colour.
struct Part {
    name: String,
    size: f64,
    shown: String,
    colour: &'static str,
}

/// One bar of parts, with a legend below.
fn stacked(title: &str, parts: &[Part]) -> String {
    let all: f64 = parts.iter().map(|p| p.size).sum();
    if all <= 0.0 {
        return String::new();
    }
    let shown: Vec<&Part> = parts.iter().filter(|p| p.size > 0.0).collect();
    const EACH: f64 = 240.0;
    let per_line = (WIDTH / EACH) as usize;
    let height = 48.0 + 20.0 * shown.len().div_ceil(per_line) as f64;
    let mut out = open(title, height);
    let mut x = 0.0;
    for part in &shown {
        let width = part.size / all * WIDTH;
        let _ = write!(
            out,
            "<rect x=\"{x:.1}\" y=\"4\" width=\"{width:.1}\" height=\"30\" style=\"fill:var(--{})\">\
             <title>{}: {}</title></rect>",
            part.colour,
            escaped(&part.name),
            escaped(&part.shown)
        );
        if width > 52.0 {
            let _ = write!(
                out,
                "<text x=\"{:.1}\" y=\"24\" text-anchor=\"middle\" class=\"on\">{:.0} %</text>",
                x + width / 2.0,
                part.size / all * 100.0
            );
        }
        x += width;
    }
    for (i, part) in shown.iter().enumerate() {
        let (x, y) = (
            (i % per_line) as f64 * EACH,
            48.0 + 20.0 * (i / per_line) as f64,
        );
        let _ = write!(
            out,
            "<rect x=\"{x}\" y=\"{y}\" width=\"11\" height=\"11\" style=\"fill:var(--{})\"/>\
             <text x=\"{}\" y=\"{}\">{} <tspan class=\"dim\">{}</tspan></text>",
            part.colour,
            x + 17.0,
            y + 10.0,
            escaped(&part.name),
            escaped(&part.shown)
        );
    }
    out + "</svg>"
}

fn open(title: &str, height: f64) -> String {
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{0}\"><title>{0}</title>",
        escaped(title)
    )
}

/// Where the time of the loop went.
pub(crate) fn time(compute_s: f64, waits: &Waits) -> String {
    let mut parts = vec![Part {
        name: "computing".into(),
        size: compute_s,
        shown: format!("{} s", seconds(compute_s)),
        colour: "good",
    }];
    let mut add = |name: String, s: f64, colour| {
        parts.push(Part {
            name,
            size: s,
            shown: format!("{} s", seconds(s)),
            colour,
        });
    };
    let colours = ["c-origin", "c-disk", "c-prepare", "c-network"];
    for ((name, s), colour) in NODE_CAUSES.iter().zip(waits.of_node()).zip(colours) {
        add(format!("wait: {name}"), s, colour);
    }
    add("wait: decoding".into(), waits.decode_s, "c-decode");
    add("wait: collating".into(), waits.collate_s, "c-collate");
    stacked("Where the time went", &parts)
}

const SOURCE_COLOURS: [&str; 4] = ["good", "c-disk", "c-network", "c-origin"];

/// Where the bytes came from.
pub(crate) fn bytes(sources: &Sources) -> String {
    let parts: Vec<Part> = SOURCES
        .iter()
        .zip(sources.each())
        .zip(SOURCE_COLOURS)
        .map(|((name, bytes), colour)| Part {
            name: (*name).into(),
            size: bytes as f64,
            shown: format_bytes(bytes),
            colour,
        })
        .collect();
    stacked("Where the bytes came from", &parts)
}

/// Waiting, and samples per second, over time; `unit` is what these are called.
pub(crate) fn timeline(timeline: &Timeline, unit: &str) -> String {
    let bins = &timeline.bins;
    if bins.len() < 2 || timeline.bin_seconds <= 0.0 {
        return String::new();
    }
    const TALL: f64 = 110.0;
    const LEFT: f64 = 52.0;
    let wide = WIDTH - LEFT;
    let mut rates: Vec<f64> = bins
        .iter()
        .map(|bin| bin.samples as f64 / timeline.bin_seconds)
        .collect();
    // The last bin has only begun: with the end of the one before, it is as long as the others.
    if let (Some(last), [.., before, rate]) = (bins.last(), &mut rates[..]) {
        let lasted = (last.waited_s + last.compute_s) / timeline.bin_seconds;
        *rate += *before * (1.0 - lasted).max(0.0);
    }
    let most = rates.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let mut out = open(
        &format!("{unit} per second and waiting over time"),
        2.0 * TALL + 74.0,
    );
    let each = wide / bins.len() as f64;
    let mut path = String::new();
    for (i, rate) in rates.iter().enumerate() {
        let y = 16.0 + TALL * (1.0 - rate / most);
        let x = LEFT + i as f64 * each;
        let _ = write!(
            path,
            "{}{x:.1} {y:.1}H{:.1}",
            if i == 0 { "M" } else { "L" },
            x + each
        );
    }
    let base = 16.0 + TALL;
    let _ = write!(
        out,
        "<path d=\"{path}\" fill=\"none\" style=\"stroke:var(--accent)\" stroke-width=\"1.6\"/>\
         <path d=\"M{LEFT} {base}H{WIDTH}\" class=\"axis\"/>\
         <text x=\"{LEFT}\" y=\"11\" class=\"dim\">{}/s</text>\
         <text x=\"{}\" y=\"20\" text-anchor=\"end\" class=\"dim\">{}</text>\
         <text x=\"{}\" y=\"{base}\" text-anchor=\"end\" class=\"dim\">0</text>",
        escaped(unit),
        LEFT - 6.0,
        short(most),
        LEFT - 6.0,
    );
    let top = base + 28.0;
    for (i, bin) in bins.iter().enumerate() {
        let share = match bin.waited_s + bin.compute_s {
            all if all > 0.0 => bin.waited_s / all,
            _ => 0.0,
        };
        let tall = TALL * share;
        let _ = write!(
            out,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{tall:.1}\" \
             style=\"fill:var(--c-origin)\"/>",
            LEFT + i as f64 * each,
            top + TALL - tall,
            each.max(0.6)
        );
    }
    let bottom = top + TALL;
    let _ = write!(
        out,
        "<path d=\"M{LEFT} {bottom}H{WIDTH}\" class=\"axis\"/>\
         <text x=\"{LEFT}\" y=\"{}\" class=\"dim\">share of the time waited</text>\
         <text x=\"{}\" y=\"{}\" text-anchor=\"end\" class=\"dim\">100 %</text>\
         <text x=\"{}\" y=\"{bottom}\" text-anchor=\"end\" class=\"dim\">0</text>\
         <text x=\"{LEFT}\" y=\"{}\" class=\"dim\">0 s</text>\
         <text x=\"{WIDTH}\" y=\"{}\" text-anchor=\"end\" class=\"dim\">{} s</text>",
        top - 6.0,
        LEFT - 6.0,
        top + 9.0,
        LEFT - 6.0,
        bottom + 16.0,
        bottom + 16.0,
        seconds(timeline.bin_seconds * bins.len() as f64)
    );
    out + "</svg>"
}

/// A number for an axis.
fn short(n: f64) -> String {
    match n {
        n if n >= 1e6 => format!("{:.1}M", n / 1e6),
        n if n >= 1e4 => format!("{:.0}k", n / 1e3),
        n if n >= 10.0 => format!("{n:.0}"),
        n => format!("{n:.1}"),
    }
}

/// Utilization, and bytes by source, of each epoch; the last ones, if there are many.
pub(crate) fn epochs(epochs: &[Epoch]) -> String {
    const MOST: usize = 24;
    const ROW: f64 = 22.0;
    // Room for "epoch 1000".
    const LEFT: f64 = 92.0;
    const BAR: f64 = 232.0;
    const SECOND: f64 = 408.0;
    if epochs.len() < 2 {
        return String::new();
    }
    let shown = &epochs[epochs.len().saturating_sub(MOST)..];
    let mut out = open("Epochs", ROW * shown.len() as f64 + 26.0);
    let _ = write!(
        out,
        "<text x=\"{LEFT}\" y=\"12\" class=\"dim\">accelerator utilization</text>\
         <text x=\"{SECOND}\" y=\"12\" class=\"dim\">bytes by source, and hit ratio</text>"
    );
    for (i, epoch) in shown.iter().enumerate() {
        let (f, y) = (&epoch.figures, 20.0 + ROW * i as f64);
        let _ = write!(
            out,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">epoch {}</text>\
             <rect x=\"{LEFT}\" y=\"{y}\" width=\"{BAR}\" height=\"15\" class=\"back\"/>",
            LEFT - 8.0,
            y + 12.0,
            epoch.epoch
        );
        if let Some(au) = f.au {
            let _ = write!(
                out,
                "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{:.1}\" height=\"15\" style=\"fill:var(--good)\"/>\
                 <text x=\"{}\" y=\"{}\">{}</text>",
                BAR * au.clamp(0.0, 1.0),
                LEFT + BAR + 6.0,
                y + 12.0,
                percent(au)
            );
        }
        if let Some(sources) = f.sources.as_ref().filter(|s| s.total() > 0) {
            let mut x = SECOND;
            for ((name, bytes), colour) in SOURCES.iter().zip(sources.each()).zip(SOURCE_COLOURS) {
                let width = BAR * bytes as f64 / sources.total() as f64;
                let _ = write!(
                    out,
                    "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"15\" \
                     style=\"fill:var(--{colour})\"><title>{name} {}</title></rect>",
                    format_bytes(bytes)
                );
                x += width;
            }
            let hit = sources.hit_ratio().unwrap_or_default();
            let _ = write!(
                out,
                "<text x=\"{}\" y=\"{}\">{}</text>",
                SECOND + BAR + 6.0,
                y + 12.0,
                percent(hit)
            );
        }
    }
    out + "</svg>"
}

/// Rows over positions.
pub(crate) fn order(quality: &Quality) -> String {
    const SIDE: f64 = 240.0;
    if quality.points.is_empty() {
        return String::new();
    }
    let mut out = format!(
        "<svg viewBox=\"0 0 {0} {0}\" class=\"square\" role=\"img\" aria-label=\"the order\">\
         <title>row over position</title>\
         <rect x=\"16\" y=\"2\" width=\"{SIDE}\" height=\"{SIDE}\" class=\"back\"/>\
         <path fill=\"none\" style=\"stroke:var(--accent)\" stroke-width=\"1.4\" \
         stroke-opacity=\"0.6\" stroke-linecap=\"round\" d=\"",
        SIDE + 20.0
    );
    for (position, row) in &quality.points {
        let _ = write!(
            out,
            "M{:.1} {:.1}h0",
            16.0 + f64::from(*position) * SIDE,
            2.0 + (1.0 - f64::from(*row)) * SIDE
        );
    }
    let _ = write!(
        out,
        "\"/><text x=\"{}\" y=\"{}\" text-anchor=\"middle\" class=\"dim\">position</text>\
         <text transform=\"translate(11 {}) rotate(-90)\" text-anchor=\"middle\" class=\"dim\">row</text></svg>",
        16.0 + SIDE / 2.0,
        SIDE + 16.0,
        SIDE / 2.0
    );
    out
}
