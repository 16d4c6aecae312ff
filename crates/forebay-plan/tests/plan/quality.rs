//! The measures of quality tell good orders from bad ones, and give the expected figures where
//! these can be predicted.

use forebay_plan::{
    Plan, PlanSpec, Shape, Shuffle, Source,
    quality::{Given, Report, Stretches, Uniform, expected, measure},
};
use std::sync::Arc;

fn plan(rows: u64, block: u64, shuffle: &str) -> Plan {
    let shape = Arc::new(Shape::uniform(rows, block).expect("small"));
    Plan::new(PlanSpec::single(
        "d",
        shape,
        5,
        shuffle.parse().expect("a shuffle"),
    ))
    .expect("a plan")
}

fn report(plan: &Plan, batch: u32) -> Report {
    measure(
        plan,
        plan,
        batch,
        &Stretches {
            plan,
            stretches: 10,
        },
    )
    .expect("measured")
    .0
}

fn near(a: f64, b: f64, by: f64) {
    assert!((a - b).abs() <= by, "{a} is not within {by} of {b}");
}

#[test]
fn an_unshuffled_order_is_as_bad_as_can_be() {
    let found = report(&plan(100_000, 1000, "none"), 50);
    assert_eq!(
        (
            found.displacement,
            found.displacement_max,
            found.co_location,
            found.epoch_overlap
        ),
        (0.0, 0.0, 1.0, 1.0)
    );
    near(found.rank_correlation, 1.0, 1e-9);
    near(found.epoch_correlation, 1.0, 1e-9);
    assert_eq!(found.gap_entropy, 0.0);
    // Batches with one label of ten: a chi-square of 9 · 50 with 9 degrees of freedom.
    near(found.label_dispersion, 50.0, 0.1);
}

#[test]
fn full_is_as_good_as_an_array_that_was_shuffled() {
    let plan = plan(100_000, 1000, "full");
    let uniform = Uniform::new(&plan, 9).expect("small enough");
    let labels = Stretches {
        plan: &plan,
        stretches: 10,
    };
    let (array, _) = measure(&plan, &uniform, 50, &labels).expect("measured");
    let told = expected(&plan, 50);
    for found in [report(&plan, 50), array] {
        near(found.displacement, told.displacement, 0.004);
        near(found.rank_correlation, 0.0, 0.015);
        near(found.epoch_correlation, 0.0, 0.015);
        near(found.co_location, told.co_location, 0.0005);
        near(found.label_dispersion, 1.0, 0.05);
        near(found.gap_entropy, 1.0, 0.001);
        near(found.epoch_overlap, told.epoch_overlap, 0.0005);
    }
}

#[test]
fn window_and_block_are_between_and_block_is_the_better() {
    // The same number of rows in the buffer.
    let (window, block) = (
        report(&plan(1_000_000, 1000, "window:16000"), 50),
        report(&plan(1_000_000, 1000, "block:16"), 50),
    );
    assert!(window.displacement < 0.016 && block.displacement > 0.3);
    assert!(window.rank_correlation > 0.99 && block.rank_correlation.abs() < 0.2);
    assert!(
        window.label_dispersion > 20.0 && block.label_dispersion < 6.0,
        "{} {}",
        window.label_dispersion,
        block.label_dispersion
    );
    assert!(
        window.gap_entropy < 0.5 && block.gap_entropy > 0.9,
        "{} {}",
        window.gap_entropy,
        block.gap_entropy
    );
    // Two rows of a batch are from one of its 16 blocks.
    near(block.co_location, 1.0 / 16.0, 0.002);
    assert!(window.epoch_correlation > 0.99 && block.epoch_correlation.abs() < 0.3);
}

#[test]
fn labels_can_be_given() {
    let plan = plan(1000, 10, "none");
    let alternate = Given::from_text((0..1000).map(|i| if i % 2 == 0 { "cat" } else { "dog" }));
    assert_eq!(alternate.rows(), 1000);
    // Each batch of 20 has ten of each: less variation than by chance.
    near(
        measure(&plan, &plan, 20, &alternate)
            .expect("measured")
            .0
            .label_dispersion,
        0.0,
        1e-9,
    );
    let sorted = Given::from_text((0..1000).map(|i| if i < 500 { "cat" } else { "dog" }));
    near(
        measure(&plan, &plan, 20, &sorted)
            .expect("measured")
            .0
            .label_dispersion,
        20.0,
        1.0,
    );
}

#[test]
fn mixes_are_measured_too() {
    let source = |rows| Source {
        dataset: "d".into(),
        shape: Arc::new(Shape::uniform(rows, 100).expect("small")),
        weight: 1.0,
    };
    let spec = PlanSpec {
        sources: vec![source(50_000), source(20_000)],
        seed: 1,
        shuffle: Shuffle::Full,
        epoch_rows: Some(40_000),
        schedule: Vec::new(),
    };
    let plan = Plan::new(spec).expect("a plan");
    let (found, told) = (report(&plan, 40), expected(&plan, 40));
    near(found.co_location, told.co_location, 0.0005);
    near(found.label_dispersion, 1.0, 0.2);
    assert!(Uniform::new(&plan, 1).is_none());
    assert!(
        measure(
            &plan,
            &plan,
            1,
            &Stretches {
                plan: &plan,
                stretches: 2
            }
        )
        .is_err()
    );
}
