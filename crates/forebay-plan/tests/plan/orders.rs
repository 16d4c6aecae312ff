//! Orders are bijections, in both directions, whatever the shape, the shuffle, the mix.

use crate::common::{Rng, cases};
use forebay_plan::{Permutation, Plan, PlanSpec, RowRef, Shape, Shuffle, Source, Stage};
use std::{collections::HashSet, sync::Arc};

fn random_shape(rng: &mut Rng) -> Shape {
    match rng.below(3) {
        0 => Shape::uniform(1 + rng.below(3000), 1 + rng.below(200)),
        1 => Shape::from_blocks(
            (0..1 + rng.below(60))
                .map(|_| rng.below(40))
                .chain([1])
                .collect::<Vec<_>>(),
        ),
        _ => Shape::from_runs(
            (0..1 + rng.below(8))
                .map(|_| (1 + rng.below(9), 1 + rng.below(50)))
                .collect::<Vec<_>>(),
        ),
    }
    .expect("small")
}

fn random_shuffle(rng: &mut Rng) -> Shuffle {
    match rng.below(4) {
        0 => Shuffle::None,
        1 => Shuffle::Window {
            rows: 1 + rng.below(400),
        },
        2 => Shuffle::Block {
            blocks: 1 + rng.below(20),
        },
        _ => Shuffle::Full,
    }
}

#[test]
fn an_epoch_holds_each_row_once_and_every_way_of_asking_agrees() {
    cases("an_epoch_holds_each_row_once", 300, |rng| {
        let shape = Arc::new(random_shape(rng));
        let shuffle = random_shuffle(rng);
        let plan =
            Plan::new(PlanSpec::single("d", shape.clone(), rng.next(), shuffle)).expect("a plan");
        let epoch = rng.below(5);
        let rows = plan.rows_per_epoch();
        let mut order = Vec::new();
        plan.fill(epoch, 0..rows, &mut order);
        assert_eq!(order.iter().collect::<HashSet<_>>().len() as u64, rows);
        for (position, row) in order.iter().enumerate() {
            assert_eq!(plan.row_at(epoch, position as u64), *row, "{shuffle}");
            assert_eq!(
                plan.position_of(epoch, *row),
                Some(position as u64),
                "{shuffle}"
            );
            if let Shuffle::Window { rows } = shuffle {
                assert!(row.row.abs_diff(position as u64) < rows);
            }
        }
        let (a, b) = (rng.below(rows + 1), rng.below(rows + 1));
        let (a, b) = (a.min(b), a.max(b));
        let mut part = Vec::new();
        plan.fill(epoch, a..b, &mut part);
        assert_eq!(part, order[a as usize..b as usize]);
        let mut blocks = Vec::new();
        let mut seen = HashSet::new();
        for row in &part {
            if seen.insert(shape.block_of(row.row)) {
                blocks.push((0, shape.block_of(row.row)));
            }
        }
        assert_eq!(plan.blocks_of(epoch, a..b), blocks, "{shuffle}");
        let mut both = order.clone();
        plan.fill(epoch + 1, 0..rows, &mut both);
        for block in 0..shape.blocks() {
            let expected = (a..2 * rows)
                .find(|&p| shape.block_of(both[p as usize].row) == block)
                .map(|p| (epoch + p / rows, p % rows));
            assert_eq!(
                plan.next_use(epoch, a, 0, block),
                expected,
                "{shuffle}, block {block} from {a} of {rows}"
            );
        }
    });
}

#[test]
fn a_mix_gives_each_source_its_quota_and_all_of_it_in_its_own_order() {
    cases("a_mix_gives_each_source_its_quota", 100, |rng| {
        let shuffle = random_shuffle(rng);
        let seed = rng.next();
        let sources: Vec<_> = (0..1 + rng.below(4))
            .map(|i| Source {
                dataset: format!("d{i}"),
                shape: Arc::new(random_shape(rng)),
                weight: (1 + rng.below(20)) as f64,
            })
            .collect();
        let plan = Plan::new(PlanSpec {
            sources: sources.clone(),
            seed,
            shuffle,
            epoch_rows: Some(1 + rng.below(2000)),
            schedule: Vec::new(),
        })
        .expect("a plan");
        let rows = plan.rows_per_epoch();
        let mut all: Vec<RowRef> = Vec::new();
        for epoch in 0..4 {
            let at = all.len();
            plan.fill(epoch, 0..rows, &mut all);
            let order = &all[at..];
            let (a, b) = (rng.below(rows + 1), rng.below(rows + 1));
            let (a, b) = (a.min(b), a.max(b));
            let mut part = Vec::new();
            plan.fill(epoch, a..b, &mut part);
            assert_eq!(part, order[a as usize..b as usize]);
            let mut seen = HashSet::new();
            let block_of = |row: &RowRef| {
                (
                    row.source,
                    sources[row.source as usize].shape.block_of(row.row),
                )
            };
            let blocks: Vec<_> = part
                .iter()
                .map(block_of)
                .filter(|block| seen.insert(*block))
                .collect();
            assert_eq!(plan.blocks_of(epoch, a..b), blocks);
            for (position, row) in order.iter().enumerate() {
                assert_eq!(plan.row_at(epoch, position as u64), *row);
                assert_eq!(
                    plan.position_of(epoch, *row),
                    order.iter().position(|r| r == row).map(|p| p as u64)
                );
            }
        }
        // Next use, from a place in the first epoch, as far as the four epochs can tell.
        let from = rng.below(rows);
        for (i, source) in sources.iter().enumerate() {
            for block in 0..source.shape.blocks() {
                let is_of_block = |row: &RowRef| {
                    row.source as usize == i && source.shape.block_of(row.row) == block
                };
                if let Some(p) = all[from as usize..].iter().position(is_of_block) {
                    let p = from + p as u64;
                    assert_eq!(
                        plan.next_use(0, from, i as u32, block),
                        Some((p / rows, p % rows))
                    );
                }
            }
        }
        let (quotas, cycle) = plan.quotas();
        for whole in all.chunks_exact(cycle as usize) {
            for (i, &quota) in quotas.iter().enumerate() {
                assert_eq!(
                    whole.iter().filter(|row| row.source as usize == i).count() as u64,
                    quota
                );
            }
        }
        // Each source alone, in its own order, one of its epochs after the other.
        for (i, source) in sources.iter().enumerate() {
            let mine: Vec<_> = all
                .iter()
                .filter(|row| row.source as usize == i)
                .map(|row| row.row)
                .collect();
            for pass in mine.chunks(source.shape.rows() as usize) {
                assert_eq!(
                    pass.iter().collect::<HashSet<_>>().len(),
                    pass.len(),
                    "a row twice before all were given once"
                );
            }
            if shuffle == Shuffle::None {
                assert!(
                    mine.iter()
                        .enumerate()
                        .all(|(at, &row)| row == at as u64 % source.shape.rows())
                );
            }
        }
    });
}

/// Against a model that goes through the order from its beginning: each stage has the cycles that a
/// plan with its weights alone has shares of, the last one broken off, and each source goes on where
/// it was.
#[test]
fn weights_change_where_the_schedule_says_and_every_way_of_asking_agrees() {
    cases("weights_change_where_the_schedule_says", 100, |rng| {
        let (shuffle, seed) = (random_shuffle(rng), rng.next());
        let sources: Vec<_> = (0..1 + rng.below(4))
            .map(|i| Source {
                dataset: format!("d{i}"),
                shape: Arc::new(random_shape(rng)),
                weight: 1.0,
            })
            .collect();
        let mut from = 0;
        let schedule: Vec<_> = (0..1 + rng.below(6))
            .map(|_| {
                let mut weights: Vec<_> = sources.iter().map(|_| rng.below(6) as f64).collect();
                weights[rng.below(sources.len() as u64) as usize] += 1.0;
                let stage = Stage { from, weights };
                from += 1 + rng.below(700);
                stage
            })
            .collect();
        let spec = |schedule: Vec<Stage>, sources: Vec<Source>| PlanSpec {
            sources,
            seed,
            shuffle,
            epoch_rows: Some(1 + seed % 900),
            schedule,
        };
        let plan = Plan::new(spec(schedule.clone(), sources.clone())).expect("a plan");
        let rows = plan.rows_per_epoch();
        let epochs = 4;
        let all_rows = epochs * rows;
        let mut all: Vec<RowRef> = Vec::new();
        (0..epochs).for_each(|epoch| plan.fill(epoch, 0..rows, &mut all));

        // Each source alone, in its own order, each epoch after the other.
        let orders: Vec<_> = sources
            .iter()
            .map(|source| {
                let mine: Vec<_> = all
                    .iter()
                    .filter(|r| r.source as usize == index(&sources, source))
                    .collect();
                (source.shape.rows(), mine)
            })
            .collect();
        for (n, mine) in &orders {
            for pass in mine.chunks(*n as usize) {
                assert_eq!(pass.iter().collect::<HashSet<_>>().len(), pass.len());
            }
        }
        // The shares of each stage.
        for (at, stage) in schedule.iter().enumerate() {
            let end = schedule
                .get(at + 1)
                .map_or(all_rows, |next| next.from)
                .min(all_rows);
            let taken: Vec<_> = (0..sources.len())
                .filter(|&i| stage.weights[i] > 0.0)
                .collect();
            let alone = Plan::new(spec(
                Vec::new(),
                taken
                    .iter()
                    .map(|&i| Source {
                        weight: stage.weights[i],
                        ..sources[i].clone()
                    })
                    .collect(),
            ))
            .expect("a plan");
            let (quotas, cycle) = alone.quotas();
            if stage.from >= end {
                continue;
            }
            let part = &all[stage.from as usize..end as usize];
            for (n, cycle_rows) in part.chunks(cycle as usize).enumerate() {
                for (i, source) in (0..sources.len()).zip(0u32..) {
                    let quota = taken.iter().position(|&t| t == i).map_or(0, |t| quotas[t]);
                    let got = cycle_rows.iter().filter(|r| r.source == source).count() as u64;
                    let whole = cycle_rows.len() as u64 == cycle;
                    assert!(
                        if whole { got == quota } else { got <= quota },
                        "stage {at}, cycle {n}: {got} rows of source {i}, and its quota is {quota}"
                    );
                }
            }
        }
        // One position at a time, backwards, and parts.
        for epoch in 0..epochs {
            let order = &all[(epoch * rows) as usize..((epoch + 1) * rows) as usize];
            for (position, row) in order.iter().enumerate() {
                assert_eq!(plan.row_at(epoch, position as u64), *row);
                assert_eq!(
                    plan.position_of(epoch, *row),
                    order.iter().position(|r| r == row).map(|p| p as u64)
                );
            }
            let (a, b) = (rng.below(rows + 1), rng.below(rows + 1));
            let (a, b) = (a.min(b), a.max(b));
            let mut part = Vec::new();
            plan.fill(epoch, a..b, &mut part);
            assert_eq!(part, order[a as usize..b as usize]);
            let mut seen = HashSet::new();
            let blocks: Vec<_> = part
                .iter()
                .map(|r| (r.source, sources[r.source as usize].shape.block_of(r.row)))
                .filter(|block| seen.insert(*block))
                .collect();
            assert_eq!(plan.blocks_of(epoch, a..b), blocks);
        }
        let from = rng.below(rows);
        for (i, source) in sources.iter().enumerate() {
            for block in 0..source.shape.blocks() {
                let next = (from..all_rows).find(|&p| {
                    let row = all[p as usize];
                    row.source as usize == i && source.shape.block_of(row.row) == block
                });
                let found = plan.next_use(0, from, i as u32, block);
                match next {
                    Some(p) => assert_eq!(found, Some((p / rows, p % rows))),
                    // Later than the epochs here, or never: its last weight is 0.
                    None => assert!(found.is_none_or(|(epoch, _)| epoch >= epochs)),
                }
            }
        }
    });
}

fn index(sources: &[Source], source: &Source) -> usize {
    sources
        .iter()
        .position(|s| s.dataset == source.dataset)
        .expect("it is one of them")
}

#[test]
fn a_schedule_is_part_of_the_identity_and_a_wrong_one_is_refused() {
    let source = |name: &str| Source {
        dataset: name.into(),
        shape: Arc::new(Shape::uniform(1000, 10).expect("a shape")),
        weight: 1.0,
    };
    let plan = |stages: &[(u64, &[f64])]| {
        Plan::new(PlanSpec {
            sources: vec![source("a"), source("b")],
            seed: 1,
            shuffle: Shuffle::Full,
            epoch_rows: None,
            schedule: stages
                .iter()
                .map(|(from, weights)| Stage {
                    from: *from,
                    weights: weights.to_vec(),
                })
                .collect(),
        })
    };
    let identity = |stages: &[(u64, &[f64])]| plan(stages).expect("a plan").identity().to_owned();
    let one = identity(&[(0, &[1.0, 1.0])]);
    assert_eq!(one, identity(&[]), "one stage is what plain weights are");
    let two = identity(&[(0, &[1.0, 1.0]), (500, &[1.0, 3.0])]);
    let later = identity(&[(0, &[1.0, 1.0]), (501, &[1.0, 3.0])]);
    let other = identity(&[(0, &[1.0, 1.0]), (500, &[1.0, 2.0])]);
    assert_eq!(
        HashSet::from([&one, &two, &later, &other]).len(),
        4,
        "the rows and the weights of each stage count"
    );
    let wrong: [&[(u64, &[f64])]; 7] = [
        &[(1, &[1.0, 1.0])],
        &[(0, &[1.0, 1.0]), (5, &[1.0, 2.0]), (5, &[1.0, 3.0])],
        &[(0, &[1.0, 1.0]), (9, &[1.0, 2.0]), (5, &[1.0, 3.0])],
        &[(0, &[1.0])],
        &[(0, &[1.0, -1.0])],
        &[(0, &[0.0, 0.0])],
        &[(0, &[1.0, f64::NAN])],
    ];
    for stages in wrong {
        assert!(plan(stages).is_err(), "{stages:?}");
    }
    let never = plan(&[(0, &[1.0, 1.0]), (10, &[1.0, 0.0])]).expect("a plan");
    assert_eq!(
        never.next_use(3, 0, 1, 0),
        None,
        "no row of it comes any more"
    );
}

#[test]
fn permutations_of_any_size_are_bijections_and_can_be_turned_around() {
    cases("permutations_of_any_size_are_bijections", 400, |rng| {
        // Small ones completely.
        let n = 1 + rng.below(5000);
        let order = Permutation::new(n, rng.next());
        let mut numbers = Vec::new();
        order.for_each(0..n, |v| numbers.push(v));
        numbers
            .iter()
            .zip(0..)
            .for_each(|(&v, i)| assert_eq!((order.at(i), order.position_of(v)), (v, i)));
        numbers.sort_unstable();
        assert!(numbers.iter().zip(0..).all(|(&v, i)| v == i));
        // Huge ones, up to 2^62, at some places; near powers of two and squares, where roots and
        // quotients could be off by one.
        let power = 1u64 << (13 + rng.below(49));
        let root = 1 + rng.below(1 << 30);
        let n = [
            power,
            power - 1,
            power + 1,
            root * root,
            root * root + 1,
            power - rng.below(power / 2),
        ][rng.below(6) as usize]
            .clamp(1, Permutation::MAX);
        let order = Permutation::new(n, rng.next());
        for i in [0, n - 1, rng.below(n), rng.below(n), rng.below(n)] {
            let v = order.at(i);
            assert!(v < n && order.position_of(v) == i, "place {i} of {n}");
            assert_eq!(order.at(order.position_of(i)), i, "number {i} of {n}");
            order.for_each(i..n.min(i + 3), |_| ());
        }
    });
}

#[test]
fn a_dataset_of_a_trillion_rows_costs_no_more_than_a_small_one() {
    for shuffle in ["window:10000", "block:16", "full"] {
        let shape = Arc::new(Shape::uniform(1 << 40, 1000).expect("within limits"));
        let plan = Plan::new(PlanSpec::single(
            "d",
            shape,
            7,
            shuffle.parse().expect("a shuffle"),
        ))
        .expect("a plan");
        let mut rng = Rng::new(3);
        for _ in 0..200 {
            let (epoch, position) = (rng.below(1000), rng.below(1 << 40));
            let row = plan.row_at(epoch, position);
            assert_eq!(plan.position_of(epoch, row), Some(position));
            assert!(plan.next_use(epoch, position, 0, row.row / 1000) == Some((epoch, position)));
        }
    }
}
