//! Rows that are kept in memory because an order reads them soon: they are those that decoding gives,
//! whatever else is read, and however the order jumps; and few blocks are decoded for them.

use crate::{
    laid::{KINDS, reference, write},
    support::*,
};
use forebay_dataset::{
    Caller, Dataset, Rows, RowsConfig, View, Views,
    follow::{Following, Plans, Reads},
};
use forebay_format::tabular::Projection;
use forebay_plan::{Plan, PlanSpec, Shuffle};
use forebay_testing::seeded::{factor, random_seed};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::sync::Arc;

/// Neither memory nor disk keeps blocks.
fn config() -> RowsConfig {
    RowsConfig {
        block_cache_bytes: 0,
        keep_decoded: false,
        ..RowsConfig::default()
    }
}

fn full(dataset: &Arc<Dataset>, seed: u64) -> (Arc<Plan>, Views) {
    let views = Views::new(vec![Arc::new(View::whole(dataset.clone()))]).unwrap();
    let plan = PlanSpec::single(dataset.id(), dataset.shape().clone(), seed, Shuffle::Full);
    (Arc::new(Plan::new(plan).unwrap()), views)
}

fn follow(
    plans: &Plans,
    (plan, views): &(Arc<Plan>, Views),
    columns: Option<Vec<String>>,
) -> Following {
    let reads = Reads {
        columns,
        ..Reads::default()
    };
    plans
        .follow(plan.clone(), views, (0, 0), &reads, Caller::Operator)
        .unwrap()
}

/// The rows of a step, which may be in two epochs.
fn step(plan: &Plan, at: u64, rows: u64) -> Vec<u64> {
    let all = plan.rows_per_epoch();
    (at..at + rows)
        .map(|at| plan.row_at(at / all, at % all).row)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_an_order_reads_soon_are_those_that_decoding_gives() {
    let mut rng = StdRng::seed_from_u64(random_seed());
    let mut read_soon = 0;
    for case in 0..8 * factor() {
        let what = ["parquet", "arrow"][rng.random_range(0..2)];
        let kinds: Vec<usize> = (0..rng.random_range(1..6))
            .map(|_| {
                let kind = rng.random_range(0..KINDS);
                // What a row does not have by itself comes now and then.
                if kind > 17 && rng.random_bool(0.8) {
                    1
                } else {
                    kind
                }
            })
            .collect();
        let bench = Bench::new();
        write(&bench, &mut rng, what, &kinds);
        let dataset = bench.open(&format!("{BUCKET}/{what}/**")).await.unwrap();
        let dataset = dataset.dataset;
        let (rows, direct) = (Rows::new(bench.engine.clone(), config()), reference(&bench));
        let plans = Plans::new(&bench.datasets, &rows);
        let order = full(&dataset, rng.random());
        let some = Projection::Columns(vec!["c0".into(), "id".into()]);
        let (columns, named) = match rng.random_bool(0.7) {
            true => (Projection::All, None),
            false => (some.clone(), Some(vec!["c0".into(), "id".into()])),
        };
        let mut following = Some(follow(&plans, &order, named.clone()));
        let all = order.0.rows_per_epoch();
        let mut at = 0;
        for round in 0..60 {
            match rng.random_range(0..30) {
                0 => at = rng.random_range(0..all * 2),
                1 => following = None,
                2 => following = Some(follow(&plans, &order, named.clone())),
                3 => {
                    let block = rng.random_range(0..dataset.shape().blocks());
                    rows.hold(&dataset, block, &columns).await.unwrap();
                }
                _ => {}
            }
            if let Some(following) = &following {
                following.progress(at / all, at % all).unwrap();
            }
            let mut steps: Vec<Vec<u64>> = Vec::new();
            for _ in 0..rng.random_range(1..6) {
                let count = rng.random_range(1..12);
                steps.push(step(&order.0, at, count));
                at += count;
            }
            // Somebody else reads other rows, some twice, and other columns.
            let other: Vec<u64> = (0..rng.random_range(1..5))
                .map(|_| rng.random_range(0..dataset.rows()))
                .chain([0, 0])
                .collect();
            let others = match rng.random_bool(0.5) {
                true => columns.clone(),
                false => some.clone(),
            };
            let steps = steps.into_iter().map(|step| (step, columns.clone()));
            let asked: Vec<_> = steps.chain([(other, others)]).collect();
            let reads = asked.iter().map(|(n, of)| rows.read(&dataset, n, of));
            let read = futures::future::join_all(reads).await;
            for (read, (wanted, of)) in read.into_iter().zip(&asked) {
                let read = read.unwrap_or_else(|e| panic!("{what} {kinds:?}: {e:?}"));
                let expected = direct.read(&dataset, wanted, of).await.unwrap();
                assert!(
                    read.batch == expected.batch,
                    "{what} {kinds:?}, case {case}, round {round}: {wanted:?} of {of:?}: {:?}",
                    rows.stats()
                );
            }
        }
        let stats = rows.stats();
        println!("{what} {kinds:?}: {stats:?}");
        assert!(stats.soon_read <= stats.soon_kept);
        read_soon += stats.soon_read;
        drop(following);
        assert_eq!(rows.stats().soon_bytes, 0, "nobody reads them any more");
    }
    assert!(read_soon > 0, "nothing was kept at all");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_is_decoded_once_for_many_rows_of_an_order() {
    let mut rng = StdRng::seed_from_u64(random_seed());
    let bench = Bench::new();
    write(&bench, &mut rng, "parquet", &[1, 0]);
    let dataset = bench.open(&format!("{BUCKET}/parquet/**")).await.unwrap();
    let dataset = dataset.dataset;
    let order = full(&dataset, rng.random());
    let all = order.0.rows_per_epoch();
    // With an order, and without.
    let mut decoded = Vec::new();
    for follows in [true, false] {
        let rows = Rows::new(bench.engine.clone(), config());
        let plans = Plans::new(&bench.datasets, &rows);
        let following = follows.then(|| follow(&plans, &order, None));
        for at in 0..3 * all {
            if let Some(following) = &following {
                following.progress(at / all, at % all).unwrap();
            }
            let wanted = step(&order.0, at, 1);
            rows.read(&dataset, &wanted, &Projection::All)
                .await
                .unwrap();
        }
        let stats = rows.stats();
        decoded.push(stats.blocks_read_in_part);
        assert_eq!(stats.soon_read + stats.blocks_read_in_part, 3 * all);
    }
    let [with, without] = decoded[..] else {
        unreachable!("two ways")
    };
    assert_eq!(without, 3 * all);
    // All fits: in each epoch, and the first time for a part of it, each block once.
    assert!(
        with <= 8 * dataset.shape().blocks(),
        "{with} for {all} rows"
    );
}
