//! `forebay shuffle-report`: how good orders are, beside a uniform one. No node is asked: an order
//! follows from the shape of the dataset.

use crate::{
    cli::Common,
    fail::{Failure, Outcome, file_error},
    out::{Out, grouped},
};
use forebay_core::{Error, limits};
use forebay_plan::{
    Plan, PlanSpec, Shape, Shuffle,
    quality::{Given, Labels, Ordering, Picture, Report, Stretches, Uniform, expected, measure},
};
use serde::Serialize;
use std::{path::PathBuf, sync::Arc};

mod picture;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay shuffle-report --rows 1000000 --block-rows 1000 --shuffle none --shuffle window:16000 --shuffle block:16
  forebay shuffle-report --rows 50000 --block-rows 500 --shuffle block:8 --labels labels.txt --svg order.svg
  forebay shuffle-report --shape dataset.shape --shuffle block:16

The measures, and what they are in a uniform order:
  displacement    how far rows are from their place, as part of the epoch: 1/3
  rank corr.      rank correlation of position and row: 0
  co-location     how often two rows of a batch are of one block: as often as any two rows
  dispersion      how much more labels vary from batch to batch than in fair samples: 1
  gap entropy     of the distance from one row to the next, as part of what is possible: 1
  overlap         how many of a row's batch are in its batch again in the next epoch: next to none
  epoch corr.     rank correlation of positions in one epoch and the next: 0

JSON: {\"rows\", \"blocks\", \"batch\", \"seed\", \"labels\", \"orders\": [{\"order\", ...measures}]}; \"expected\" is a uniform order by calculation,
\"uniform\" one that was shuffled as an array.")]
pub struct Args {
    /// Rows of the dataset
    #[arg(
        long,
        value_name = "N",
        required_unless_present = "shape",
        conflicts_with = "shape"
    )]
    rows: Option<u64>,
    /// Rows of each block: of a row group, a record batch, a shard
    #[arg(long, value_name = "N", default_value_t = 1000)]
    block_rows: u64,
    /// The shape of a dataset in a file, as a node gives it, in the place of numbers
    #[arg(long, value_name = "FILE")]
    shape: Option<PathBuf>,
    /// An order to measure: none, window:ROWS, block:BLOCKS or full; more than once for several
    #[arg(long, value_name = "SHUFFLE", required = true, value_parser = |text: &str| text.parse::<Shuffle>().map_err(|e| e.to_string()))]
    shuffle: Vec<Shuffle>,
    /// Rows of a batch
    #[arg(long, value_name = "N", default_value_t = 32)]
    batch: u32,
    /// The label of each row, one on a line
    #[arg(long, value_name = "FILE")]
    labels: Option<PathBuf>,
    /// Without labels: this many equal stretches of the dataset stand for them
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::PLAN_STRETCHES_MAX)))]
    stretches: u32,
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Draw the orders
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// One order's line of the report.
#[derive(Serialize)]
struct Line {
    order: String,
    #[serde(flatten)]
    report: Report,
}

pub fn run(args: Args, common: &Common) -> Outcome {
    let shape = Arc::new(match (&args.shape, args.rows) {
        (Some(path), _) => {
            Shape::decode(&std::fs::read(path).map_err(|e| file_error("the shape", path, e))?)?
        }
        (None, rows) => {
            Shape::uniform(rows.unwrap_or(0), args.block_rows).map_err(Failure::Usage)?
        }
    });
    let plan = |shuffle| {
        Plan::new(PlanSpec::single(
            "dataset",
            shape.clone(),
            args.seed,
            shuffle,
        ))
        .map_err(Failure::Usage)
    };
    let given = args
        .labels
        .as_ref()
        .map(|path| labels(path, shape.rows()))
        .transpose()?;

    let (mut lines, mut pictures): (Vec<Line>, Vec<(String, Picture)>) = (Vec::new(), Vec::new());
    let mut add = |name: String, plan: &Plan, order: &dyn Ordering| -> Outcome {
        let stretches = Stretches {
            plan,
            stretches: args.stretches,
        };
        let labels: &dyn Labels = given.as_ref().map_or(&stretches, |given| given);
        let (report, picture) = measure(plan, order, args.batch, labels).map_err(Failure::Usage)?;
        lines.push(Line {
            order: name.clone(),
            report,
        });
        pictures.push((name, picture));
        Ok(())
    };
    for &shuffle in &args.shuffle {
        let plan = plan(shuffle)?;
        add(shuffle.to_string(), &plan, &plan)?;
    }
    let plan = plan(Shuffle::None)?;
    if let Some(uniform) = Uniform::new(&plan, args.seed) {
        add("uniform".into(), &plan, &uniform)?;
    }
    lines.push(Line {
        order: "expected".into(),
        report: expected(&plan, args.batch),
    });

    let labels = given.as_ref().map_or_else(
        || format!("{} equal stretches of the dataset", args.stretches),
        |_| "given".into(),
    );
    if let Some(path) = &args.svg {
        let title = format!(
            "{} rows in {} blocks, seed {}",
            grouped(shape.rows()),
            grouped(shape.blocks()),
            args.seed
        );
        std::fs::write(path, picture::svg(&title, &pictures))
            .map_err(|e| file_error("the picture", path, e))?;
    }
    let mut out = Out::new(common.json);
    if out.json {
        return out.object(&serde_json::json!({
            "rows": shape.rows(), "blocks": shape.blocks(), "batch": args.batch, "seed": args.seed, "labels": labels, "orders": lines,
        }));
    }
    for line in table(&lines) {
        out.line(line)?;
    }
    out.line("")?;
    let measured = lines[0].report.measured_rows;
    out.line(format!(
        "{} rows in {} blocks, batches of {}, {} rows measured; labels: {labels}",
        grouped(shape.rows()),
        grouped(shape.blocks()),
        args.batch,
        grouped(measured)
    ))?;
    let uniform = if lines.iter().any(|line| line.order == "uniform") {
        "uniform: an array, shuffled; "
    } else {
        ""
    };
    out.line(format!(
        "{uniform}expected: what a uniform order has on average"
    ))?;
    out.flush()
}

fn labels(path: &PathBuf, rows: u64) -> Outcome<Given> {
    let text = std::fs::read_to_string(path).map_err(|e| file_error("the labels", path, e))?;
    let given = Given::from_text(text.lines());
    if given.rows() != rows {
        return Err(Failure::Usage(
            Error::invalid(format!(
                "{}: {} labels for {rows} rows",
                path.display(),
                given.rows()
            ))
            .hint("one label on each line, in the order of the rows"),
        ));
    }
    Ok(given)
}

fn table(lines: &[Line]) -> Vec<String> {
    let width = lines
        .iter()
        .map(|line| line.order.len())
        .max()
        .unwrap_or(0)
        .max(5);
    let head = [
        "displacement",
        "rank corr.",
        "co-location",
        "dispersion",
        "gap entropy",
        "overlap",
        "epoch corr.",
    ];
    let row = |name: &str, cells: &[String]| {
        cells
            .iter()
            .zip(head)
            .fold(format!("{name:<width$}"), |line, (cell, head)| {
                format!("{line}  {cell:>0$}", head.len())
            })
    };
    let mut text = vec![row("order", &head.map(String::from))];
    text.extend(lines.iter().map(|Line { order, report: r }| {
        let figures = [
            r.displacement,
            r.rank_correlation,
            r.co_location,
            r.label_dispersion,
            r.gap_entropy,
            r.epoch_overlap,
            r.epoch_correlation,
        ];
        row(order, &figures.map(figure))
    }));
    text
}

/// Four digits that say something: small parts are not all zeros.
fn figure(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        size if size < 0.001 => format!("{value:.1e}"),
        size if size < 10.0 => format!("{value:.4}"),
        _ => format!("{value:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_line_for_each_order_and_columns_that_line_up() {
        let shape = Arc::new(Shape::uniform(10_000, 100).expect("small"));
        let plan = Plan::new(PlanSpec::single(
            "d",
            shape,
            1,
            Shuffle::Block { blocks: 4 },
        ))
        .expect("a plan");
        let (report, picture) = measure(
            &plan,
            &plan,
            20,
            &Stretches {
                plan: &plan,
                stretches: 10,
            },
        )
        .expect("measured");
        let lines = table(&[
            Line {
                order: "block:4".into(),
                report,
            },
            Line {
                order: "expected".into(),
                report: expected(&plan, 20),
            },
        ]);
        assert_eq!(lines.len(), 3);
        assert!(
            lines.iter().all(|line| line.len() == lines[0].len()),
            "{lines:#?}"
        );
        assert!(
            lines[2].contains("0.3333") && lines[1].starts_with("block:4 "),
            "{lines:#?}"
        );

        let svg = picture::svg("10,000 rows <&>", &[("block:4".into(), picture)]);
        assert!(
            svg.starts_with("<svg ")
                && svg.ends_with("</svg>\n")
                && svg.contains("10,000 rows &lt;&amp;&gt;")
        );
        assert_eq!(svg.matches("<g ").count(), svg.matches("</g>").count());
    }

    #[test]
    fn figures_are_short() {
        assert_eq!(
            [0.0, 1.0 / 3.0, 31.25, 0.000_031, -0.5].map(figure),
            ["0", "0.3333", "31.2", "3.1e-5", "-0.5000"]
        );
    }
}
