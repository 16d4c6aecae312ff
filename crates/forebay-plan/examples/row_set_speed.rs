//! What a filter of 400 million rows takes, and how long it is to find its `k`-th row:
//! `cargo run --release -p forebay-plan --example row_set_speed`.

use forebay_plan::{Composition, Permutation, RowRef, RowSet, RowSetBuilder, RowsOf, Shape};
use std::{hint::black_box, sync::Arc, time::Instant};

const ROWS: u64 = 400_000_000;
const ASKED: u64 = 1_000_000;

/// CPU seconds of this thread, so that others on the machine do not count; wall time if the system
/// does not say.
fn seconds(begin: Instant) -> f64 {
    let run = std::fs::read_to_string("/proc/thread-self/schedstat")
        .ok()
        .and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    run.map_or_else(|| begin.elapsed().as_secs_f64(), |ns| ns as f64 * 1e-9)
}

fn main() -> forebay_core::Result<()> {
    let start = Instant::now();
    let timed = |work: &mut dyn FnMut()| {
        let begin = seconds(start);
        work();
        (seconds(start) - begin) / ASKED as f64 * 1e9
    };
    println!(
        "{:<30}{:>12}{:>10}{:>14}{:>12}",
        "of 400 M rows stay", "rows", "MiB", "select, ns", "rank, ns"
    );
    let random = |row: u64| row.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    let part = |share: u64| move |row: u64| random(row) % 1000 < share;
    let sets: [(&str, Box<dyn Fn(u64) -> bool>); 5] = [
        ("0.1 %, at random", Box::new(part(1))),
        ("1 %, at random", Box::new(part(10))),
        ("10 %, at random", Box::new(part(100))),
        ("50 %, at random", Box::new(part(500))),
        (
            "1 %, in runs of 10,000",
            Box::new(|row| row % 1_000_000 < 10_000),
        ),
    ];
    for (name, keeps) in sets {
        let mut builder = RowSetBuilder::new(ROWS);
        for row in (0..ROWS).filter(|&row| keeps(row)) {
            builder.push(row)?;
        }
        let set: RowSet = builder.finish();
        let places = Permutation::new(set.len(), 1);
        let rows = Permutation::new(ROWS, 1);
        let order: Vec<u64> = (0..ASKED).map(|i| places.at(i % set.len())).collect();
        let asked: Vec<u64> = (0..ASKED).map(|i| rows.at(i)).collect();
        let select = timed(&mut || {
            for &k in &order {
                black_box(set.select(k));
            }
        });
        let rank = timed(&mut || {
            for &row in &asked {
                black_box(set.rank(row));
            }
        });
        let mib = set.memory_bytes() as f64 / f64::from(1 << 20);
        println!(
            "{name:<30}{:>12}{mib:>10.2}{select:>14.0}{rank:>12.0}",
            set.len()
        );
    }
    let shape = Arc::new(Shape::uniform(ROWS, 1000)?);
    for (name, rest) in [
        ("a split's test part, 1 %", false),
        ("its train part", true),
    ] {
        let document = RowsOf::Split {
            of: Box::new(RowsOf::Base(0)),
            chosen: ROWS / 100,
            seed: 1,
            rest,
        };
        let made = Composition::new(&document, vec![shape.clone()], &[])?;
        let places = Permutation::new(made.rows(), 1);
        let order: Vec<u64> = (0..ASKED).map(|i| places.at(i)).collect();
        let mut out: Vec<RowRef> = Vec::new();
        let select = timed(&mut || {
            made.fill(&order, &mut out).expect("rows that are there");
        });
        let begin = Instant::now();
        let blocks = made.shape()?.blocks();
        println!(
            "{name:<30}{:>12}{:>10}{select:>14.0}   shape of {blocks} blocks in {:.2} s",
            made.rows(),
            0,
            begin.elapsed().as_secs_f64()
        );
    }
    Ok(())
}
