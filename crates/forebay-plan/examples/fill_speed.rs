//! Rows per second of `Plan::fill` for each shuffle:
//! `cargo run --release -p forebay-plan --example fill_speed`.

use forebay_plan::{Plan, PlanSpec, Shape, Shuffle, Source};
use std::{hint::black_box, sync::Arc, time::Instant};

/// Seconds that this thread has run, so that others on the machine do not count; wall time if the
/// system does not say.
fn seconds(begin: Instant) -> f64 {
    let run = std::fs::read_to_string("/proc/thread-self/schedstat")
        .ok()
        .and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    run.map_or_else(|| begin.elapsed().as_secs_f64(), |ns| ns as f64 * 1e-9)
}

fn main() -> forebay_core::Result<()> {
    let start = Instant::now();
    let rows: u64 = 400_000_000;
    let even = Arc::new(Shape::uniform(rows, 1000)?);
    // 10,000 files of 40 row groups of 1,000 rows, the last group of each shorter.
    let uneven = Arc::new(Shape::from_runs(
        (0..10_000).flat_map(|i| [(39, 1000), (1, 500 + i % 400)]),
    )?);
    println!(
        "{:<44}{:>14}{:>16}{:>14}",
        "order", "fill, M/s", "of 32, M/s", "row_at, M/s"
    );
    let line = |name: &str, plan: Plan| {
        let mut out = Vec::new();
        let mut rate = |count: u64, mut work: Box<dyn FnMut(u64, &mut Vec<_>)>| {
            work(0, &mut out);
            let begin = seconds(start);
            for i in 0..count {
                out.clear();
                work(i, &mut out);
                black_box(&out);
            }
            (seconds(start) - begin) / count as f64
        };
        let plan = Arc::new(plan);
        let (a, b, c) = (plan.clone(), plan.clone(), plan);
        let long = 1e6
            / rate(
                20,
                Box::new(move |i, out| a.fill(1, i * 1_000_000..(i + 1) * 1_000_000, out)),
            );
        let short = 32.0
            / rate(
                200_000,
                Box::new(move |i, out| b.fill(1, i * 32..(i + 1) * 32, out)),
            );
        let one = 1.0
            / rate(
                300_000,
                Box::new(move |i, out| out.push(c.row_at(1, i * 7919 % 300_000_000))),
            );
        println!(
            "{name:<44}{:>14.1}{:>16.1}{:>14.2}",
            long / 1e6,
            short / 1e6,
            one / 1e6
        );
    };
    for shuffle in [
        "none",
        "window:10000",
        "window:1000000",
        "block:16",
        "block:1000",
        "full",
    ] {
        line(
            shuffle,
            Plan::new(PlanSpec::single("d", even.clone(), 1, shuffle.parse()?))?,
        );
    }
    for shuffle in ["block:16", "block:1000"] {
        line(
            &format!("{shuffle}, unequal blocks"),
            Plan::new(PlanSpec::single("d", uneven.clone(), 1, shuffle.parse()?))?,
        );
    }
    let source = |weight| Source {
        dataset: "d".into(),
        shape: even.clone(),
        weight,
    };
    let mix = |weights: &[f64]| PlanSpec {
        sources: weights.iter().map(|&w| source(w)).collect(),
        seed: 1,
        shuffle: Shuffle::Block { blocks: 16 },
        epoch_rows: None,
        schedule: Vec::new(),
    };
    line(
        "block:16, a mix of 2 (cycle of 10)",
        Plan::new(mix(&[0.7, 0.3]))?,
    );
    line(
        "block:16, a mix of 3 (cycle of thousands)",
        Plan::new(mix(&[0.6180339, 0.2718281, 0.0314159]))?,
    );
    Ok(())
}
