//! Draws orders: for each, a scatter plot of row over position, and a histogram of the gaps from
//! one row to the next. SVG, written by hand.
//!
//! A uniform order is an even grey square above a triangle of gaps. A diagonal means that the
//! stored order shows through; columns of dashes are blocks.

use forebay_plan::quality::Picture;
use std::fmt::Write;

const SIDE: f32 = 220.0;
const GAPS: f32 = 70.0;
const MARGIN: f32 = 46.0;
const BETWEEN: f32 = 40.0;
const TOP: f32 = 62.0;

/// A panel for each order, side by side.
pub fn svg(title: &str, orders: &[(String, Picture)]) -> String {
    let width = 2.0 * MARGIN + orders.len() as f32 * (SIDE + BETWEEN) - BETWEEN;
    let height = TOP + SIDE + BETWEEN + GAPS + MARGIN;
    let mut to = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"11\" fill=\"#222\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"{MARGIN}\" y=\"24\" font-size=\"15\" font-weight=\"bold\">{}</text>\n",
        escaped(title)
    );
    // One scale for all histograms, so that they can be compared; higher bars are cut off at the
    // top.
    let scale = GAPS
        / orders
            .iter()
            .map(|(_, p)| second_highest(&p.gaps))
            .fold(0.04, f32::min)
            .max(0.02);
    for (i, (name, picture)) in orders.iter().enumerate() {
        let left = MARGIN + i as f32 * (SIDE + BETWEEN);
        // Writing to a string cannot fail.
        let _ = writeln!(to, "<g transform=\"translate({left} {TOP})\">");
        let _ = writeln!(
            to,
            "<text y=\"-10\" font-size=\"13\">{}</text>",
            escaped(name)
        );
        let _ = writeln!(
            to,
            "<rect width=\"{SIDE}\" height=\"{SIDE}\" fill=\"#f4f5f7\" stroke=\"#bbb\"/>"
        );
        let _ = write!(
            to,
            "<path fill=\"none\" stroke=\"#1b5fa8\" stroke-opacity=\"0.55\" stroke-width=\"1.3\" \
             stroke-linecap=\"round\" d=\""
        );
        for (position, row) in &picture.points {
            let _ = write!(to, "M{:.1} {:.1}h0", position * SIDE, (1.0 - row) * SIDE);
        }
        to.push_str("\"/>\n");
        let _ = writeln!(
            to,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">position</text>",
            SIDE / 2.0,
            SIDE + 15.0
        );
        if i == 0 {
            let _ = writeln!(
                to,
                "<text transform=\"translate(-10 {}) rotate(-90)\" \
                 text-anchor=\"middle\">row</text>",
                SIDE / 2.0
            );
        }
        let base = SIDE + BETWEEN + GAPS;
        let bar = SIDE / picture.gaps.len() as f32;
        let _ = write!(to, "<path fill=\"#c8632b\" d=\"");
        for (cell, share) in picture
            .gaps
            .iter()
            .enumerate()
            .filter(|(_, share)| **share > 0.0)
        {
            let tall = (share * scale).min(GAPS);
            let _ = write!(
                to,
                "M{:.2} {base}v{:.2}h{:.2}v{:.2}z",
                cell as f32 * bar,
                -tall,
                bar * 0.9,
                tall
            );
        }
        to.push_str("\"/>\n");
        let _ = writeln!(to, "<path stroke=\"#888\" d=\"M0 {base}h{SIDE}\"/>");
        for (at, text) in [(0.0, "−1"), (0.5, "0"), (1.0, "1")] {
            let _ = writeln!(
                to,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
                at * SIDE,
                base + 14.0
            );
        }
        let _ = writeln!(
            to,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">gap to the next row</text>",
            SIDE / 2.0,
            base + 30.0
        );
        to.push_str("</g>\n");
    }
    to.push_str("</svg>\n");
    to
}

fn second_highest(shares: &[f32]) -> f32 {
    let mut sorted = shares.to_vec();
    sorted.sort_by(f32::total_cmp);
    sorted
        .get(sorted.len().saturating_sub(2))
        .copied()
        .unwrap_or(0.0)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
