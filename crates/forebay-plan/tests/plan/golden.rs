//! The orders of this version of the algorithm, written down: the same on every platform, in every
//! release with this version. If one of these tests fails, the orders have changed: undo that, or
//! raise `ALGORITHM` and write down the new ones.

use forebay_plan::{ALGORITHM, Permutation, Plan, PlanSpec, Shape, Shuffle, Source};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

#[test]
fn permutations_are_those_of_version_1() {
    assert_eq!(ALGORITHM, 1);
    let big = 1u64 << 42;
    let sizes = [
        (1, 0),
        (10, 0),
        (32, 7),
        (33, 7),
        (4096, u64::MAX),
        (4097, u64::MAX),
        (1_000_000, 42),
        (1 << 40, 42),
        (big, 42),
        (big + 1, 42),
        (1 << 62, 42),
    ];
    let line = |(n, key): (u64, u64)| {
        let order = Permutation::new(n, key);
        let places = [0, 1, 2, n / 2, n.saturating_sub(2), n - 1].map(|i: u64| i.min(n - 1));
        places
            .iter()
            .for_each(|&i| assert_eq!(order.position_of(order.at(i)), i));
        format!("{n} {key} {:?}", places.map(|i| order.at(i)))
    };
    let found = sizes.map(line).join("\n");
    assert_eq!(
        found,
        include_str!("../golden-permutations.txt").trim_end(),
        "the permutations have changed:\n{found}\n"
    );
}

/// A digest of the whole of epochs 0, 1 and 1000.
fn digest(plan: &Plan) -> String {
    let mut rows = Vec::new();
    [0, 1, 1000]
        .into_iter()
        .for_each(|epoch| plan.fill(epoch, 0..plan.rows_per_epoch(), &mut rows));
    let bytes: Vec<u8> = rows
        .iter()
        .flat_map(|r| [u64::from(r.source).to_le_bytes(), r.row.to_le_bytes()].concat())
        .collect();
    format!("{:016x}", xxh3_64(&bytes))
}

#[test]
fn orders_and_identities_are_those_of_version_1() {
    let even = Arc::new(Shape::uniform(10_007, 100).expect("small"));
    let uneven = Arc::new(Shape::from_blocks((0..300).map(|b| b * 37 % 91)).expect("small"));
    let mut found = Vec::new();
    for (name, shape) in [("even", &even), ("uneven", &uneven)] {
        for shuffle in [
            "none",
            "window:1000",
            "window:2",
            "block:16",
            "block:1",
            "full",
        ] {
            let plan = Plan::new(PlanSpec::single(
                "d",
                shape.clone(),
                2024,
                shuffle.parse().expect("a shuffle"),
            ))
            .expect("a plan");
            found.push(format!(
                "{name} {shuffle} {} {}",
                plan.identity(),
                digest(&plan)
            ));
        }
    }
    let source = |dataset: &str, shape: &Arc<Shape>, weight| Source {
        dataset: dataset.into(),
        shape: shape.clone(),
        weight,
    };
    for (weights, epoch_rows) in [([0.7, 0.3], None), ([1.0, 0.618_033_988_75], Some(5000))] {
        let sources = vec![
            source("a", &even, weights[0]),
            source("b", &uneven, weights[1]),
        ];
        let plan = Plan::new(PlanSpec {
            sources,
            seed: 3,
            shuffle: Shuffle::Block { blocks: 8 },
            epoch_rows,
            schedule: Vec::new(),
        })
        .expect("a plan");
        found.push(format!(
            "mix {:?} {} {}",
            plan.quotas().0,
            plan.identity(),
            digest(&plan)
        ));
    }
    let found = found.join("\n");
    assert_eq!(
        found,
        include_str!("../golden-orders.txt").trim_end(),
        "the orders have changed:\n{found}\n"
    );
}
