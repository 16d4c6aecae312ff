//! `forebay shuffle-report`: how good orders are, compared with a uniform one. It needs no node: an
//! order follows from the shape of the dataset.

use crate::{
    cli::Common,
    fail::{Failure, Outcome},
    out::{Out, grouped},
};
use forebay_core::{Error, limits};
use forebay_plan::{
    Plan, PlanSpec, RowRef, Shape, Shuffle,
    quality::{Given, Labels, Ordering, Picture, Report, Stretches, Uniform, expected, measure},
};
use serde::Serialize;
use std::{path::PathBuf, sync::Arc};

mod picture;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay shuffle-report --rows 1000000 --block-rows 1000 \\
    --shuffle none --shuffle window:16000 --shuffle block:16
  forebay shuffle-report --rows 50000 --block-rows 500 --shuffle block:8 \\
    --labels labels.txt --svg order.svg
  forebay shuffle-report --shape dataset.shape --shuffle block:16
  forebay shuffle-report --rows 50000 --block-rows 500 --order buffer.txt

The measures, and what they are in a uniform order:
  displacement    how far rows are from their place, as part of the epoch: 1/3
  rank corr.      rank correlation of position and row: 0
  co-location     how often two rows of a batch are of one block: as often as any two rows
  dispersion      how much more labels vary from batch to batch than in fair samples: 1
  gap entropy     of the distance from one row to the next, as part of what is possible: 1
  overlap         how many of a row's batch are in its batch again in the next epoch: next to none
  epoch corr.     rank correlation of positions in one epoch and the next: 0

JSON: {\"rows\", \"blocks\", \"batch\", \"seed\", \"labels\", \"orders\": [{\"order\", ...measures}]}; \"expected\" is a uniform order by calculation, \
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
    /// Rows of each block: of a row group, a record batch or a shard
    #[arg(long, value_name = "N", default_value_t = 1000)]
    block_rows: u64,
    /// A file with the shape of a dataset, as a node gives it, instead of numbers
    #[arg(long, value_name = "FILE")]
    shape: Option<PathBuf>,
    /// An order to measure: none, window:ROWS, block:BLOCKS or full; may be given again
    #[arg(long, value_name = "SHUFFLE", required_unless_present = "order", value_parser = |text: &str| text.parse::<Shuffle>().map_err(|e| e.to_string()))]
    shuffle: Vec<Shuffle>,
    /// Another program's order to measure: row numbers, one on each line, of one epoch and the
    /// next; may be given again
    #[arg(long, value_name = "FILE")]
    order: Vec<PathBuf>,
    /// Rows of a batch
    #[arg(long, value_name = "N", default_value_t = 32)]
    batch: u32,
    /// The label of each row, one on each line
    #[arg(long, value_name = "FILE")]
    labels: Option<PathBuf>,
    /// Without labels: this many equal stretches of the dataset stand for them
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::PLAN_STRETCHES_MAX)))]
    stretches: u32,
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Draw the orders, as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// One order's line in the report.
#[derive(Serialize)]
struct Line {
    order: String,
    #[serde(flatten)]
    report: Report,
}

pub fn run(args: Args, common: &Common) -> Outcome {
    let shape = Arc::new(match (&args.shape, args.rows) {
        (Some(path), _) => {
            Shape::decode(&std::fs::read(path).map_err(|e| Error::file("the shape", path, e))?)?
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
    for path in &args.order {
        add(
            path.file_stem().unwrap_or_default().display().to_string(),
            &plan,
            &Listed::read(path, shape.rows())?,
        )?;
    }
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
            .map_err(|e| Error::file("the picture", path, e))?;
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

/// An order that was written down: two epochs, and the position of each row in them.
struct Listed {
    rows: [Vec<u64>; 2],
    positions: [Vec<u64>; 2],
}

impl Listed {
    fn read(path: &PathBuf, rows: u64) -> Outcome<Self> {
        let wrong = |what: String| {
            Failure::Usage(Error::invalid(format!("{}: {what}", path.display())).hint(
                "list each row once, and then each once again: numbers from 0, one on each line",
            ))
        };
        let text = std::fs::read_to_string(path).map_err(|e| Error::file("the order", path, e))?;
        let numbers = text
            .lines()
            .enumerate()
            .map(|(line, n)| {
                n.trim()
                    .parse::<u64>()
                    .ok()
                    .filter(|&n| n < rows)
                    .ok_or_else(|| {
                        wrong(format!("line {} must be a row number, not {n:?}", line + 1))
                    })
            })
            .collect::<Outcome<Vec<u64>>>()?;
        if numbers.len() as u64 != 2 * rows {
            return Err(wrong(format!(
                "it has {} lines, but two epochs of {rows} rows need {}",
                numbers.len(),
                2 * rows
            )));
        }
        let (first, second) = numbers.split_at(rows as usize);
        let mut positions = [vec![u64::MAX; first.len()], vec![u64::MAX; first.len()]];
        for (epoch, places) in [first, second].into_iter().zip(&mut positions) {
            for (&row, at) in epoch.iter().zip(0..) {
                if std::mem::replace(&mut places[row as usize], at) != u64::MAX {
                    return Err(wrong(format!("row {row} occurs twice in an epoch")));
                }
            }
        }
        Ok(Self {
            rows: [first.to_vec(), second.to_vec()],
            positions,
        })
    }
}

impl Ordering for Listed {
    fn rows_per_epoch(&self) -> u64 {
        self.rows[0].len() as u64
    }

    fn row_at(&self, epoch: u64, position: u64) -> RowRef {
        RowRef {
            source: 0,
            row: self.rows[epoch as usize % 2][position as usize],
        }
    }

    fn position_of(&self, epoch: u64, row: RowRef) -> Option<u64> {
        self.positions[epoch as usize % 2]
            .get(row.row as usize)
            .copied()
    }
}

fn labels(path: &PathBuf, rows: u64) -> Outcome<Given> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::file("the labels", path, e))?;
    let given = Given::from_text(text.lines());
    if given.rows() != rows {
        return Err(Failure::Usage(
            Error::invalid(format!(
                "{}: {} labels for {rows} rows",
                path.display(),
                given.rows()
            ))
            .hint("write one label on each line, in the order of the rows"),
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

/// Four significant digits, so that small shares are not all zeros.
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
    fn a_listed_order_is_measured_and_an_invalid_one_is_refused() {
        let path = std::env::temp_dir().join(format!("forebay-order-{}", std::process::id()));
        let listed = |text: &str| {
            std::fs::write(&path, text).expect("written");
            Listed::read(&path, 3)
        };
        let Ok(order) = listed("2\n0\n1\n0\n1\n2\n") else {
            panic!("this is an order");
        };
        let row = |row| RowRef { source: 0, row };
        assert_eq!(order.rows_per_epoch(), 3);
        assert_eq!([0, 1, 2].map(|at| order.row_at(0, at).row), [2, 0, 1]);
        assert_eq!(
            [0, 1, 2].map(|n| order.position_of(0, row(n))),
            [Some(1), Some(2), Some(0)]
        );
        assert_eq!(
            [0, 1, 2].map(|n| order.position_of(1, row(n))),
            [Some(0), Some(1), Some(2)]
        );
        for wrong in [
            "",
            "0\n1\n2\n",
            "0\n1\n3\n0\n1\n2\n",
            "0\n1\n1\n0\n1\n2\n",
            "a\n",
        ] {
            assert!(listed(wrong).is_err(), "{wrong:?}");
        }
        std::fs::remove_file(&path).expect("removed");
    }

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
