//! Exact resume: however often a job is interrupted, and with whatever number of ranks, workers,
//! batch size and rule it continues, its rows are those of the plan, none lost, none twice.

use crate::common::{Rng, cases};
use forebay_core::Result;
use forebay_plan::{
    Batching, Lengths, Partition, Plan, PlanSpec, RowRef, Shape, Shuffle, Source, State, Step,
    Steps, TooLong, Uneven,
};
use std::sync::Arc;

fn random_plan(rng: &mut Rng) -> Arc<Plan> {
    let shuffle = match rng.below(4) {
        0 => Shuffle::None,
        1 => Shuffle::Window {
            rows: 1 + rng.below(100),
        },
        2 => Shuffle::Block {
            blocks: 1 + rng.below(10),
        },
        _ => Shuffle::Full,
    };
    let sources: Vec<_> = (0..1 + rng.below(3))
        .map(|i| {
            let blocks: Vec<u64> = (0..1 + rng.below(30))
                .map(|_| rng.below(20))
                .chain([7])
                .collect();
            Source {
                dataset: format!("d{i}"),
                shape: Arc::new(Shape::from_blocks(blocks).expect("small")),
                weight: (1 + rng.below(9)) as f64,
            }
        })
        .collect();
    let epoch_rows = if rng.chance(2) {
        Some(1 + rng.below(500))
    } else {
        None
    };
    Arc::new(
        Plan::new(PlanSpec {
            sources,
            seed: rng.next(),
            shuffle,
            epoch_rows,
            schedule: Vec::new(),
        })
        .expect("a plan"),
    )
}

fn random_uneven(rng: &mut Rng) -> Uneven {
    [Uneven::Drop, Uneven::Pad, Uneven::Repeat][rng.below(3) as usize]
}

/// Each rank's loader: workers that are asked in turn.
struct Rank(Vec<Steps>, usize);

impl Rank {
    fn next(&mut self) -> Option<Result<Step>> {
        let worker = self.1 % self.0.len();
        self.1 += 1;
        self.0[worker].next()
    }
}

fn ranks(
    plan: &Arc<Plan>,
    state: &State,
    world: u32,
    workers: u32,
    batch: Batching,
    uneven: Uneven,
    lengths: Option<Arc<dyn Lengths>>,
) -> Result<Vec<Rank>> {
    (0..world)
        .map(|rank| {
            let worker = |worker| {
                let steps = Steps::new(
                    plan.clone(),
                    Partition {
                        world,
                        rank,
                        batch,
                        uneven,
                    },
                    state,
                )?
                .of_worker(worker, workers)?;
                Ok(match &lengths {
                    Some(lengths) => steps.with_lengths(lengths.clone()),
                    None => steps,
                })
            };
            Ok(Rank((0..workers).map(worker).collect::<Result<_>>()?, 0))
        })
        .collect()
}

/// One step of all ranks: they agree on where the job is after it.
fn together(ranks: &mut [Rank]) -> Vec<Step> {
    let steps: Vec<Step> = ranks
        .iter_mut()
        .map(|rank| rank.next().expect("plans have no end").expect("a step"))
        .collect();
    assert!(steps.iter().all(|step| step.next == steps[0].next
        && step.epoch == steps[0].epoch
        && step.step == steps[0].step));
    steps
}

fn through_json(state: &State) -> State {
    serde_json::from_str(&serde_json::to_string(state).expect("a state as JSON"))
        .expect("the state again")
}

#[test]
fn no_interruption_loses_a_row_or_gives_one_twice() {
    cases("no_interruption_loses_a_row", 300, |rng| {
        let plan = random_plan(rng);
        let all = plan.rows_per_epoch();
        let (mut epoch, mut position) = (0, 0);
        let mut state = State::start(&plan);
        for _ in 0..8 {
            let (world, workers) = (1 + rng.below(5) as u32, 1 + rng.below(4) as u32);
            let (rows, uneven) = (1 + rng.below(30) as u32, random_uneven(rng));
            let stride = u64::from(world) * u64::from(rows);
            let mut ranks = match ranks(
                &plan,
                &state,
                world,
                workers,
                Batching::Rows(rows),
                uneven,
                None,
            ) {
                Ok(ranks) => ranks,
                Err(e) => {
                    assert!(uneven == Uneven::Drop && all < stride, "{e}");
                    continue;
                }
            };
            for _ in 0..rng.below(12) {
                // What the rule says about an end that is shorter than a step.
                if all - position == 0 || uneven == Uneven::Drop && all - position < stride {
                    (epoch, position) = (epoch + 1, 0);
                }
                let steps = together(&mut ranks);
                assert_eq!(steps[0].epoch, epoch);
                let left = (all - position).min(stride);
                let mut expected = Vec::new();
                plan.fill(epoch, position..position + left, &mut expected);
                (left..stride)
                    .for_each(|i| expected.push(plan.row_at(epoch, (position + i) % all)));
                let got: Vec<RowRef> = steps
                    .iter()
                    .flat_map(|step| step.rows.iter().copied())
                    .collect();
                assert_eq!(got, expected);
                let real: Vec<RowRef> = steps
                    .iter()
                    .flat_map(|step| step.rows[..step.real].iter().copied())
                    .collect();
                let counted = if uneven == Uneven::Pad { left } else { stride };
                assert_eq!(real, expected[..counted as usize]);
                assert!(
                    steps.iter().all(|step| step.rows.len() == rows as usize),
                    "every rank has its whole batch"
                );
                position += left;
                // The end of an epoch, even if dropped rows follow it, is the beginning of the
                // next.
                if all - position == 0 || uneven == Uneven::Drop && all - position < stride {
                    (epoch, position) = (epoch + 1, 0);
                }
                state = through_json(&steps[0].next);
                assert_eq!((state.epoch, state.position), (epoch, position));
            }
        }
    });
}

#[test]
fn every_rank_and_worker_has_the_same_number_of_steps() {
    cases("every_rank_has_the_same_number_of_steps", 200, |rng| {
        let plan = random_plan(rng);
        let (world, uneven, rows) = (
            1 + rng.below(6) as u32,
            random_uneven(rng),
            1 + rng.below(20) as u32,
        );
        let (start, epochs) = (rng.below(plan.rows_per_epoch() + 1), 1 + rng.below(3));
        let state = State::at(&plan, 0, start);
        let mut counts = Vec::new();
        for rank in 0..world {
            let partition = Partition {
                world,
                rank,
                batch: Batching::Rows(rows),
                uneven,
            };
            let Ok(steps) = Steps::new(plan.clone(), partition, &state) else {
                return;
            };
            let steps = steps.until_epoch(epochs);
            let told = steps.total().expect("fixed batches are counted");
            assert_eq!(
                told,
                steps.inspect(|step| assert!(step.is_ok())).count() as u64
            );
            counts.push(told);
        }
        assert!(counts.iter().all(|&c| c == counts[0]));
    });
}

/// Lengths computed from the row.
struct Made(u64);

impl Made {
    fn of(&self, row: &RowRef) -> u64 {
        1 + (row.row * 7 + u64::from(row.source)) * 2_654_435_761 % self.0
    }
}

impl Lengths for Made {
    fn lengths(&self, rows: &[RowRef], out: &mut Vec<u64>) -> Result<()> {
        out.extend(rows.iter().map(|row| self.of(row)));
        Ok(())
    }
}

#[test]
fn bounded_batches_keep_their_bounds_and_resume_exactly() {
    cases("bounded_batches_resume_exactly", 200, |rng| {
        let plan = random_plan(rng);
        let longest = 1 + rng.below(50);
        let lengths = Arc::new(Made(longest));
        let too_long = [TooLong::Error, TooLong::Alone, TooLong::Skip][rng.below(3) as usize];
        let max_total = match too_long {
            TooLong::Error => longest + rng.below(200),
            // Some rows are longer than a batch may be.
            TooLong::Alone | TooLong::Skip => 1 + rng.below(longest + 20),
        };
        let max_rows = 1 + rng.below(20) as u32;
        let padded = rng.chance(2);
        let batch = Batching::Bounded {
            max_total,
            max_rows,
            lookahead_rows: 1 + rng.below(200) as u32,
            padded,
            too_long,
        };
        let fits = |row: &RowRef| lengths.of(row) <= max_total;
        // One rank, one worker, never interrupted: the sequence of batches that all others must
        // reproduce.
        let epochs = 3;
        let alone = Steps::new(
            plan.clone(),
            Partition::alone(batch, Uneven::Drop),
            &State::start(&plan),
        )
        .expect("steps")
        .until_epoch(epochs);
        let reference: Vec<Step> = match alone.with_lengths(lengths.clone()).collect() {
            Ok(steps) => steps,
            // Nothing is left of an epoch.
            Err(e) => {
                assert!(
                    too_long == TooLong::Skip && e.to_string().contains("0 batches"),
                    "{e}"
                );
                return;
            }
        };
        for epoch in 0..epochs {
            let mut got: Vec<RowRef> = reference
                .iter()
                .filter(|s| s.epoch == epoch)
                .flat_map(|s| s.rows.iter().copied())
                .collect();
            let mut expected = Vec::new();
            plan.fill(epoch, 0..plan.rows_per_epoch(), &mut expected);
            expected.retain(|row| too_long != TooLong::Skip || fits(row));
            got.sort_unstable();
            expected.sort_unstable();
            assert_eq!(got, expected, "an epoch's batches hold its rows");
        }
        for step in &reference {
            let (sum, most) = (
                step.rows.iter().map(|r| lengths.of(r)).sum::<u64>(),
                step.rows.iter().map(|r| lengths.of(r)).max(),
            );
            let total = if padded {
                most.expect("batches are not empty") * step.rows.len() as u64
            } else {
                sum
            };
            assert!(step.rows.len() <= max_rows as usize && !step.rows.is_empty());
            let alone = too_long == TooLong::Alone && step.rows.len() == 1;
            assert!(total <= max_total || alone && !fits(&step.rows[0]));
        }
        let (mut at, mut state) = (0, State::start(&plan));
        'job: while at < reference.len() {
            let (world, workers, uneven) = (
                1 + rng.below(4) as u32,
                1 + rng.below(3) as u32,
                random_uneven(rng),
            );
            let mut ranks = ranks(
                &plan,
                &state,
                world,
                workers,
                batch,
                uneven,
                Some(lengths.clone()),
            )
            .expect("ranks");
            for _ in 0..1 + rng.below(6) {
                let epoch = reference[at].epoch;
                let left = reference[at..].iter().filter(|s| s.epoch == epoch).count();
                if left < world as usize && uneven == Uneven::Drop {
                    let whole = at == 0 || reference[at - 1].epoch != epoch;
                    if whole {
                        // An epoch with fewer batches than ranks: an error, not an endless loop.
                        assert!(ranks[0].next().expect("not the end").is_err());
                        break;
                    }
                    at += left;
                    if at == reference.len() {
                        break 'job;
                    }
                    // Asked for again, in the next epoch.
                    let again = reference[at..]
                        .iter()
                        .filter(|s| s.epoch == epoch + 1)
                        .count();
                    if again < world as usize {
                        assert!(ranks[0].next().expect("not the end").is_err());
                        break 'job;
                    }
                }
                let (epoch, left) = (
                    reference[at].epoch,
                    reference[at..]
                        .iter()
                        .filter(|s| s.epoch == reference[at].epoch)
                        .count(),
                );
                let steps = together(&mut ranks);
                for (rank, step) in steps.iter().enumerate() {
                    assert_eq!(step.epoch, epoch);
                    if rank < left {
                        assert_eq!(
                            (&step.rows, step.real),
                            (&reference[at + rank].rows, step.rows.len())
                        );
                    } else {
                        assert_ne!(uneven, Uneven::Drop);
                        assert_eq!(
                            step.real,
                            if uneven == Uneven::Pad {
                                0
                            } else {
                                step.rows.len()
                            }
                        );
                        assert!(!step.rows.is_empty());
                    }
                }
                at += left.min(world as usize);
                state = through_json(&steps[0].next);
                if at == reference.len() {
                    break 'job;
                }
            }
        }
    });
}

#[test]
fn rows_that_are_too_long_are_an_error_alone_or_left_out_as_the_rule_says() {
    /// Row 5 has length 100, all others length 10.
    struct OneLong;
    impl Lengths for OneLong {
        fn lengths(&self, rows: &[RowRef], out: &mut Vec<u64>) -> Result<()> {
            out.extend(rows.iter().map(|r| if r.row == 5 { 100 } else { 10 }));
            Ok(())
        }
    }
    let shape = Arc::new(Shape::uniform(12, 12).expect("small"));
    let plan = Arc::new(Plan::new(PlanSpec::single("d", shape, 1, Shuffle::None)).expect("a plan"));
    let batching = |too_long, lookahead_rows| Batching::Bounded {
        max_total: 20,
        max_rows: 8,
        lookahead_rows,
        padded: false,
        too_long,
    };
    let steps = |batching, state: &State| {
        Steps::new(
            plan.clone(),
            Partition::alone(batching, Uneven::Drop),
            state,
        )
        .expect("steps")
        .until_epoch(1)
        .with_lengths(Arc::new(OneLong))
        .collect::<Result<Vec<Step>>>()
    };
    let start = State::start(&plan);
    let lengths_of = |steps: &[Step]| {
        let mut rows: Vec<Vec<u64>> = steps
            .iter()
            .map(|step| step.rows.iter().map(|r| r.row).collect())
            .collect();
        rows.sort();
        rows
    };

    let refused = steps(batching(TooLong::Error, 4), &start).expect_err("refused");
    assert!(
        refused
            .to_string()
            .contains("row 5 of dataset \"d\" has the length 100")
    );
    let hint = refused.hint_text().expect("a hint");
    assert!(
        hint.contains("\"alone\"") && hint.contains("\"skip\""),
        "{hint}"
    );

    let alone = lengths_of(&steps(batching(TooLong::Alone, 4), &start).expect("steps"));
    assert!(alone.contains(&vec![5]), "{alone:?}");
    assert_eq!(alone.concat().len(), 12);
    let skip = lengths_of(&steps(batching(TooLong::Skip, 4), &start).expect("steps"));
    assert!(!skip.concat().contains(&5), "{skip:?}");
    assert_eq!(skip.concat().len(), 11);
    // A look-ahead window with only the long row has no batches.
    let one_by_one = steps(batching(TooLong::Skip, 1), &start).expect("steps");
    assert_eq!(one_by_one.len(), 11);
    assert_eq!(
        one_by_one[4].next.position, 6,
        "the place is after what is left out"
    );

    // A state within a window contains the rule, unless it is the default: a state that an earlier
    // release saved has none.
    let mut jobs = Steps::new(
        plan.clone(),
        Partition::alone(batching(TooLong::Error, 4), Uneven::Drop),
        &start,
    )
    .expect("steps")
    .with_lengths(Arc::new(OneLong));
    let old = jobs.next().expect("a step").expect("a step").next;
    let text = serde_json::to_string(&old).expect("JSON");
    assert!(old.within.is_some() && !text.contains("too_long"), "{text}");
    assert_eq!(through_json(&old), old);
    // A job that stopped at a row that is too long continues under another rule, exactly.
    for (rule, left) in [(TooLong::Alone, 10), (TooLong::Skip, 9)] {
        let rest = steps(batching(rule, 4), &old).expect("steps");
        assert_eq!(lengths_of(&rest).concat().len(), left);
        // But not under a third one.
        let within = State {
            within: Some(forebay_plan::Within {
                batches: 1,
                batching: batching(rule, 4),
            }),
            ..start.clone()
        };
        assert!(
            serde_json::to_string(&within)
                .expect("JSON")
                .contains("too_long")
        );
        let other = Partition::alone(batching(TooLong::Error, 4), Uneven::Drop);
        let refused = Steps::new(plan.clone(), other, &within)
            .err()
            .expect("refused");
        assert!(refused.to_string().contains("other bounds"));
    }

    // An epoch of which nothing is left is an error, not an endless loop.
    struct AllLong;
    impl Lengths for AllLong {
        fn lengths(&self, rows: &[RowRef], out: &mut Vec<u64>) -> Result<()> {
            out.extend(rows.iter().map(|_| u64::MAX));
            Ok(())
        }
    }
    for uneven in [Uneven::Drop, Uneven::Pad, Uneven::Repeat] {
        let mut none = Steps::new(
            plan.clone(),
            Partition::alone(batching(TooLong::Skip, 4), uneven),
            &start,
        )
        .expect("steps")
        .with_lengths(Arc::new(AllLong));
        let refused = none.next().expect("not the end").expect_err("refused");
        assert!(refused.to_string().contains("0 batches"), "{refused}");
    }
    let each = Steps::new(
        plan.clone(),
        Partition::alone(batching(TooLong::Alone, 4), Uneven::Drop),
        &start,
    )
    .expect("steps")
    .until_epoch(1)
    .with_lengths(Arc::new(AllLong));
    assert_eq!(each.count(), 12);
}

#[test]
fn a_state_of_something_else_is_refused_with_the_reason() {
    let shape = |rows| Arc::new(Shape::uniform(rows, 10).expect("small"));
    let spec = |rows, seed, shuffle| PlanSpec::single("d@1", shape(rows), seed, shuffle);
    let plan = Arc::new(Plan::new(spec(1000, 1, Shuffle::Full)).expect("a plan"));
    let state = State::at(&plan, 2, 500);
    let refused = |other: PlanSpec, state: &State| {
        let other = Arc::new(Plan::new(other).expect("a plan"));
        Steps::new(
            other,
            Partition::alone(Batching::Rows(10), Uneven::Drop),
            state,
        )
        .err()
        .expect("refused")
        .to_string()
    };
    assert!(refused(spec(1001, 1, Shuffle::Full), &state).contains("another dataset"));
    let mut renamed = spec(1000, 1, Shuffle::Full);
    renamed.sources[0].dataset = "d@2".into();
    assert!(refused(renamed, &state).contains("another dataset"));
    assert!(refused(spec(1000, 2, Shuffle::Full), &state).contains("seed 1"));
    assert!(refused(spec(1000, 1, Shuffle::None), &state).contains("shuffle"));
    let own = spec(1000, 1, Shuffle::Full);
    assert!(
        refused(
            own.clone(),
            &State {
                algorithm: 2,
                ..state.clone()
            }
        )
        .contains("order of version 2")
    );
    assert!(
        refused(
            own.clone(),
            &State {
                version: 9,
                ..state.clone()
            }
        )
        .contains("format version 9")
    );
    assert!(
        refused(
            own.clone(),
            &State {
                position: 1001,
                ..state.clone()
            }
        )
        .contains("an epoch has 1000 rows")
    );
    assert!(
        refused(
            own.clone(),
            &State {
                epoch: u64::MAX,
                ..state.clone()
            }
        )
        .contains("an epoch has 1000 rows")
    );
    let bounded = |max_rows| Batching::Bounded {
        max_total: 10,
        max_rows,
        lookahead_rows: 100,
        padded: false,
        too_long: TooLong::Error,
    };
    let within = State {
        within: Some(forebay_plan::Within {
            batches: 3,
            batching: bounded(5),
        }),
        ..state
    };
    assert!(refused(own.clone(), &within).contains("other bounds"));
    let many = State {
        within: Some(forebay_plan::Within {
            batches: 3000,
            batching: bounded(5),
        }),
        ..within
    };
    let plan = Arc::new(Plan::new(own).expect("a plan"));
    let steps = Steps::new(plan, Partition::alone(bounded(5), Uneven::Drop), &many)
        .expect("only lengths tell");
    assert!(
        steps
            .with_lengths(Arc::new(Made(5)))
            .next()
            .expect("not the end")
            .expect_err("refused")
            .to_string()
            .contains("3000 batches")
    );
}

#[test]
fn what_cannot_be_dealt_out_says_so() {
    let shape = Arc::new(Shape::uniform(100, 10).expect("small"));
    let plan = Arc::new(
        Plan::new(PlanSpec::single("d", shape.clone(), 1, Shuffle::Full)).expect("a plan"),
    );
    let refused = |world, rank, batch, uneven| {
        Steps::new(
            plan.clone(),
            Partition {
                world,
                rank,
                batch,
                uneven,
            },
            &State::start(&plan),
        )
        .err()
        .expect("refused")
        .to_string()
    };
    assert!(refused(0, 0, Batching::Rows(1), Uneven::Drop).contains("a world of 0 ranks"));
    assert!(refused(2, 2, Batching::Rows(1), Uneven::Drop).contains("rank 2 in a world of 2"));
    assert!(refused(1, 0, Batching::Rows(0), Uneven::Drop).contains("batches of 0 rows"));
    assert!(
        refused(200, 0, Batching::Rows(1), Uneven::Drop)
            .contains("step of 200 ranks with 1 row each")
    );
    let long = Batching::Bounded {
        max_total: 3,
        max_rows: 5,
        lookahead_rows: 10,
        padded: false,
        too_long: TooLong::Error,
    };
    let steps = || {
        Steps::new(
            plan.clone(),
            Partition::alone(long, Uneven::Drop),
            &State::start(&plan),
        )
        .expect("steps")
    };
    assert!(
        steps()
            .next()
            .expect("not the end")
            .expect_err("no lengths")
            .to_string()
            .contains("are not known")
    );
    let too_long = steps()
        .with_lengths(Arc::new(Made(1000)))
        .next()
        .expect("not the end")
        .expect_err("too long")
        .to_string();
    assert!(
        too_long.contains("has the length") && too_long.contains("dataset \"d\""),
        "{too_long}"
    );

    // A dataset smaller than the world, with rules that give every rank its batch.
    for uneven in [Uneven::Pad, Uneven::Repeat] {
        let partition = Partition {
            world: 300,
            rank: 299,
            batch: Batching::Rows(2),
            uneven,
        };
        let step = Steps::new(plan.clone(), partition, &State::start(&plan))
            .expect("steps")
            .next()
            .expect("one")
            .expect("a step");
        assert_eq!(
            (step.rows.len(), step.real),
            (2, if uneven == Uneven::Pad { 0 } else { 2 })
        );
    }

    let spec = |sources: Vec<Source>| {
        Plan::new(PlanSpec {
            sources,
            seed: 0,
            shuffle: Shuffle::None,
            epoch_rows: None,
            schedule: Vec::new(),
        })
        .expect_err("refused")
        .to_string()
    };
    let source = |weight| Source {
        dataset: "x".into(),
        shape: shape.clone(),
        weight,
    };
    assert!(spec(vec![]).contains("has no source"));
    assert!(spec(vec![source(1.0), source(0.0)]).contains("weight 0"));
    assert!(spec(vec![source(f64::NAN), source(1.0)]).contains("weight NaN"));
    assert!(spec(vec![source(1.0), source(1e-9)]).contains("of the mix"));
    assert!(
        spec(vec![Source {
            shape: Arc::new(Shape::default()),
            ..source(1.0)
        }])
        .contains("has no rows")
    );
    for wrong in [
        "window",
        "window:0",
        "block:",
        "block:0",
        "fully",
        "full:3",
        "window:-1",
    ] {
        assert!(wrong.parse::<Shuffle>().is_err(), "{wrong}");
    }
}
