//! Compositions that a node knows: who may use them, how long they are kept, and what the cache
//! makes of plans over them.

use crate::support::{Bench, Only, parquet, registration};
use bytes::Bytes;
use forebay_core::ErrorKind;
use forebay_dataset::{Dataset, Everything, Rows, RowsConfig, View, follow::Plans};
use forebay_plan::{Plan, PlanSpec, RowRef, RowSet, RowsOf, Shuffle, Source};
use forebay_protocol::composition::{Header, Parts, PieceHeader, PieceKind};
use forebay_store::{Cached, NextUse};
use forebay_testing::seeded::{random_seeds, rng_of};
use rand::{RngExt, rngs::StdRng, seq::SliceRandom};
use std::{ops::Range, sync::Arc};

/// Parts of a composition, and the pieces that it needs.
#[derive(Default)]
struct Pieces {
    headers: Vec<PieceHeader>,
    bytes: Vec<Bytes>,
}

impl Pieces {
    fn add(&mut self, kind: PieceKind, bytes: Vec<u8>) -> usize {
        self.headers.push(PieceHeader {
            kind,
            bytes: bytes.len() as u64,
        });
        self.bytes.push(bytes.into());
        self.bytes.len() - 1
    }

    fn set(&mut self, universe: u64, rows: impl IntoIterator<Item = u64>) -> usize {
        let set = RowSet::of(universe, rows).unwrap();
        self.add(PieceKind::Set, set.encode())
    }

    fn rows(&mut self, rows: &[u64]) -> usize {
        let bytes = rows.iter().flat_map(|row| row.to_le_bytes());
        self.add(PieceKind::Rows, bytes.collect())
    }

    fn body(self, bases: &[&Dataset], rows_of: RowsOf) -> Bytes {
        let header = Header {
            bases: bases.iter().map(|base| base.id().to_owned()).collect(),
            rows_of,
            pieces: self.headers,
        };
        let pieces = self.bytes;
        Parts { header, pieces }.body().unwrap()
    }
}

fn base(number: u32) -> Box<RowsOf> {
    Box::new(RowsOf::Base(number))
}

fn range(of: Range<u64>) -> RowsOf {
    RowsOf::Range {
        of: base(0),
        start: of.start,
        step: 1,
        count: of.end - of.start,
    }
}

/// Two datasets of a few files each.
async fn two(bench: &Bench) -> [Arc<Dataset>; 2] {
    for (file, groups) in [&[30, 7, 50][..], &[20], &[11, 11, 11]]
        .into_iter()
        .enumerate()
    {
        bench.put(&format!("a/{file}.parquet"), parquet(groups));
    }
    for (file, groups) in [&[64, 64][..], &[5, 40]].into_iter().enumerate() {
        bench.put(&format!("b/{file}.parquet"), parquet(groups));
    }
    let mut open = Vec::new();
    for source in ["bk/a/", "bk/b/"] {
        open.push(bench.open(source).await.unwrap().dataset);
    }
    open.try_into().unwrap()
}

#[tokio::test]
async fn a_composition_has_the_id_that_its_parts_have() {
    let bench = Bench::new();
    let [a, b] = two(&bench).await;
    let mut pieces = Pieces::default();
    let piece = pieces.rows(&[3, 1, 2]);
    let rows_of = RowsOf::Concat(vec![range(10..20), RowsOf::Picks { of: base(1), piece }]);
    let body = pieces.body(&[&a, &b], rows_of);
    let view = bench
        .datasets
        .compose(body.clone(), &Everything)
        .await
        .unwrap();
    assert_eq!(view.id(), Parts::read(&body).unwrap().identity());
    assert_eq!(view.shape().rows(), 13);
    let before = bench.datasets.told_kept();
    bench.datasets.compose(body, &Everything).await.unwrap();
    assert_eq!(bench.datasets.told_kept(), before, "the same again");
    let found = bench.datasets.view(view.id(), &Everything).await.unwrap();
    assert_eq!((found.id(), found.shape()), (view.id(), view.shape()));
    let whole = bench.datasets.view(a.id(), &Everything).await.unwrap();
    assert_eq!((whole.id(), whole.shape().rows()), (a.id(), a.rows()));

    // A node that does not know a dataset says so.
    let fresh = bench.fresh();
    let body = Pieces::default().body(&[&a], range(0..3));
    let e = fresh.compose(body, &Everything).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound, "{e}");
    let e = fresh.view(view.id(), &Everything).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound, "{e}");
}

#[tokio::test]
async fn what_makes_no_sense_is_refused() {
    let bench = Bench::new();
    let [a, _] = two(&bench).await;
    let mut wrong = Pieces::default();
    let piece = wrong.set(7, [1]);
    let other_universe = wrong.body(&[&a], RowsOf::Set { of: base(0), piece });
    let no_base = Pieces::default().body(&[&a], RowsOf::Base(1));
    let past_the_end = Pieces::default().body(&[&a], range(0..a.rows() + 1));
    // Blocks of two sizes, so that a node would keep a run for each.
    let blocks = RowsOf::Repeat {
        of: base(0),
        times: 1 << 30,
    };
    let too_many = Pieces::default().body(&[&a], blocks);
    let torn = too_many.slice(..too_many.len() - 1);
    for body in [other_universe, no_base, past_the_end, too_many, torn] {
        let e = bench.datasets.compose(body, &Everything).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Invalid, "{e}");
    }
    assert_eq!(bench.datasets.told_kept(), (0, 0));
}

#[tokio::test]
async fn lengths_are_told_of_a_dataset_or_a_composition_and_are_for_all_of_its_rows() {
    let bench = Bench::new();
    let [a, _] = two(&bench).await;
    let body = Pieces::default().body(&[&a], range(3..9));
    let view = bench.datasets.compose(body, &Everything).await.unwrap();
    let lengths = |rows: u64| {
        let lengths: Vec<u32> = (0..rows as u32).collect();
        forebay_protocol::composition::lengths_body(&lengths).unwrap()
    };
    for (id, rows) in [(a.id(), a.rows()), (view.id(), 6)] {
        let (body, name) = lengths(rows);
        let told = bench.datasets.measure(id, body, &Everything).await.unwrap();
        assert_eq!(told, (name, rows));
        let (few, _) = lengths(rows - 1);
        let e = bench
            .datasets
            .measure(id, few, &Everything)
            .await
            .unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Invalid, "{e}");
        let (body, _) = lengths(rows);
        let e = bench
            .datasets
            .measure(id, body, &Only("b/"))
            .await
            .unwrap_err();
        assert_eq!(e.kind(), ErrorKind::PermissionDenied, "{e}");
    }
    let e = bench
        .datasets
        .measure("nothing", lengths(1).0, &Everything)
        .await;
    assert_eq!(e.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(bench.datasets.told_kept().0, 3);
}

#[tokio::test]
async fn what_there_is_no_memory_for_is_refused_at_once() {
    let bench = Bench::new();
    let [a, _] = two(&bench).await;
    let budget = bench.engine.budget();
    let rows: Vec<u64> = (0..100_000).map(|n| n % a.rows()).collect();
    let body = || {
        let mut pieces = Pieces::default();
        let piece = pieces.rows(&rows);
        pieces.body(&[&a], RowsOf::Picks { of: base(0), piece })
    };
    let others = budget.try_hold(budget.holdable_bytes()).unwrap();
    let e = bench
        .datasets
        .compose(body(), &Everything)
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Busy, "{e}");
    drop(others);
    let used = budget.used_bytes();
    let view = bench.datasets.compose(body(), &Everything).await.unwrap();
    // The numbers, and the way back from them.
    assert!(budget.used_bytes() >= used + 16 * 100_000);
    assert_eq!(view.shape().rows(), 100_000);
}

#[tokio::test]
async fn a_composition_is_for_those_who_may_read_all_that_it_is_made_of() {
    let bench = Bench::new();
    let [a, b] = two(&bench).await;
    let rows_of = RowsOf::Concat(vec![range(0..3), RowsOf::Base(1)]);
    let body = Pieces::default().body(&[&a, &b], rows_of);
    for half in ["a/", "b/"] {
        let denied = bench.datasets.compose(body.clone(), &Only(half)).await;
        assert_eq!(denied.unwrap_err().kind(), ErrorKind::PermissionDenied);
    }
    let view = bench.datasets.compose(body, &Everything).await.unwrap();
    for half in ["a/", "b/"] {
        let denied = bench.datasets.view(view.id(), &Only(half)).await;
        assert_eq!(denied.unwrap_err().kind(), ErrorKind::PermissionDenied);
    }
    bench.datasets.view(view.id(), &Only("")).await.unwrap();
}

/// A document over the two datasets, and the rows that it has.
fn random(
    rng: &mut StdRng,
    bases: &[u64; 2],
    depth: u32,
    pieces: &mut Pieces,
) -> (RowsOf, Vec<RowRef>) {
    if depth == 0 {
        let source = rng.random_range(0..2u32);
        let rows = 0..bases[source as usize];
        return (
            RowsOf::Base(source),
            rows.map(|row| RowRef { source, row }).collect(),
        );
    }
    let (inner, rows) = random(rng, bases, depth - 1, pieces);
    let (of, n) = (Box::new(inner), rows.len() as u64);
    let chosen = |of: &[u64]| of.iter().map(|row| rows[*row as usize]).collect();
    match rng.random_range(0..5) {
        0 if n > 0 => {
            let start = rng.random_range(0..n);
            let step = [1i64, 3, -1, -2][rng.random_range(0..4)];
            let most = if step > 0 { n - start - 1 } else { start } / step.unsigned_abs() + 1;
            let count = rng.random_range(1..=most);
            let picked: Vec<u64> = (0..count as i64)
                .map(|i| (start as i64 + i * step) as u64)
                .collect();
            let document = RowsOf::Range {
                of,
                start,
                step,
                count,
            };
            (document, chosen(&picked))
        }
        1 if n > 0 => {
            let part = rng.random_range(1..5);
            let picked: Vec<u64> = (0..n).filter(|_| rng.random_range(0..5) < part).collect();
            let piece = pieces.set(n, picked.iter().copied());
            (RowsOf::Set { of, piece }, chosen(&picked))
        }
        2 if n > 0 => {
            let mut picked: Vec<u64> = (0..n).collect();
            if rng.random_range(0..2) == 0 {
                picked.shuffle(rng);
            }
            picked.truncate(rng.random_range(1..100));
            let piece = pieces.rows(&picked);
            (RowsOf::Picks { of, piece }, chosen(&picked))
        }
        3 => {
            let (other, more) = random(rng, bases, depth - 1, pieces);
            (RowsOf::Concat(vec![*of, other]), [rows, more].concat())
        }
        _ => {
            let times = rng.random_range(1..4);
            (RowsOf::Repeat { of, times }, rows.repeat(times as usize))
        }
    }
}

fn entry(dataset: &Dataset, file: u32) -> Cached {
    let of = dataset.file(file);
    Cached {
        bucket: forebay_core::name::hash_bucket(of.name.bucket()),
        name: of.name.hash128(),
        version: of.version(),
        part: None,
    }
}

#[tokio::test]
async fn the_cache_knows_when_rows_of_a_composition_are_read_next() {
    let bench = Bench::new();
    let datasets = two(&bench).await;
    let rows_of_bases = [datasets[0].rows(), datasets[1].rows()];
    let rows = Rows::new(bench.engine.clone(), RowsConfig::default());
    let plans = Plans::new(&bench.datasets, &rows);
    let (mut now, mut later, mut never, mut cases) = (0, 0, 0, 0);
    let mut guessed = 0;
    for seed in random_seeds(40) {
        let mut rng = rng_of(seed, 0);
        let mut pieces = Pieces::default();
        let depth = rng.random_range(1..4);
        let (document, made) = random(&mut rng, &rows_of_bases, depth, &mut pieces);
        if made.is_empty() {
            continue;
        }
        cases += 1;
        let body = pieces.body(&[&datasets[0], &datasets[1]], document.clone());
        let view = bench.datasets.compose(body, &Everything).await.unwrap();
        let shuffle = [
            Shuffle::None,
            Shuffle::Window { rows: 9 },
            Shuffle::Block { blocks: 3 },
            Shuffle::Full,
        ][rng.random_range(0..4)];
        let plan = plan(&view, shuffle, rng.random());
        let per_epoch = plan.rows_per_epoch();
        assert_eq!(per_epoch, made.len() as u64);
        let registration = registration(&plan);
        let lease = plans
            .register(&registration, &Everything)
            .await
            .unwrap()
            .lease;
        for _ in 0..5 {
            // Half of them near the end of the epoch, when most rows are read in the next one.
            let from = [0, per_epoch - per_epoch.div_ceil(5)][rng.random_range(0..2)];
            let at = rng.random_range(from..per_epoch);
            plans.progress(&lease, 0, at, &Everything).unwrap();
            for (source, dataset) in (0u32..).zip(&datasets) {
                for file in 0..dataset.files().len() {
                    let own = dataset.file_rows(file);
                    let first = |epoch: u64, from: u64| {
                        (from..per_epoch).find(|position| {
                            let row = plan.row_at(epoch, *position).row as usize;
                            made[row].source == source && own.contains(&made[row].row)
                        })
                    };
                    let bytes = |positions: u64| positions * view.row_bytes().max(1);
                    let expected = match (first(0, at), first(1, 0)) {
                        (Some(next), _) => {
                            now += 1;
                            NextUse::ThisRound(bytes(next - at))
                        }
                        (None, Some(next)) => {
                            later += 1;
                            NextUse::LaterRound(bytes(per_epoch - at + next))
                        }
                        (None, None) => {
                            never += 1;
                            NextUse::Never
                        }
                    };
                    let told = plans.advisor().next_use(&entry(dataset, file as u32));
                    // Of many rows that were picked one by one, some are taken to be read soon.
                    let is_guess = told == NextUse::ThisRound(0)
                        && expected != NextUse::Never
                        && format!("{document:?}").contains("Picks");
                    guessed += usize::from(is_guess && told != expected);
                    assert!(
                        told == expected || is_guess,
                        "{told:?} for {expected:?}: file {file} of {source} at {at} of {shuffle} \
                         over {document:?}"
                    );
                }
            }
        }
        plans.release(&lease, &Everything).unwrap();
    }
    assert!(
        cases < 10 || (now > 20 && later > 20 && never > 20),
        "{now} {later} {never} of {cases}"
    );
    assert!(
        cases < 10 || guessed < (now + later) / 4,
        "{guessed} of {now} and {later}"
    );
}

fn plan(view: &View, shuffle: Shuffle, seed: u64) -> Plan {
    let source = Source {
        dataset: view.id().to_owned(),
        shape: view.shape().clone(),
        weight: 1.0,
    };
    let spec = PlanSpec {
        sources: vec![source],
        seed,
        shuffle,
        epoch_rows: None,
        schedule: Vec::new(),
    };
    Plan::new(spec).unwrap()
}

#[tokio::test]
async fn requests_for_rows_of_a_dataset_move_the_job_that_chose_them() {
    let bench = Bench::new();
    let [a, _] = two(&bench).await;
    let rows = Rows::new(bench.engine.clone(), RowsConfig::default());
    let plans = Plans::new(&bench.datasets, &rows);
    let body = |of: Range<u64>| Pieces::default().body(&[&a], range(of));
    // Two sources of one plan are parts of one dataset.
    let left = bench
        .datasets
        .compose(body(0..60), &Everything)
        .await
        .unwrap();
    let right = bench
        .datasets
        .compose(body(60..120), &Everything)
        .await
        .unwrap();
    let source = |view: &View| Source {
        dataset: view.id().to_owned(),
        shape: view.shape().clone(),
        weight: 1.0,
    };
    let spec = PlanSpec {
        sources: vec![source(&left), source(&right)],
        seed: 1,
        shuffle: Shuffle::None,
        epoch_rows: None,
        schedule: Vec::new(),
    };
    let plan = Plan::new(spec).unwrap();
    let registration = registration(&plan);
    let lease = plans
        .register(&registration, &Everything)
        .await
        .unwrap()
        .lease;
    let at = || plans.list(&Everything)[0].position;
    let mut last = 0;
    for (source, shift) in [(0, 0), (1, 60)] {
        let mut rows: Vec<RowRef> = Vec::new();
        plan.fill(0, last..last + 12, &mut rows);
        let of = rows.iter().filter(|row| row.source == source);
        let numbers: Vec<u64> = of.map(|row| row.row + shift).collect();
        plans.asked(a.id(), &numbers);
        let first = rows.iter().position(|row| row.source == source).unwrap();
        assert_eq!(at(), last + first as u64, "source {source}");
        last = at();
    }
    plans.asked(a.id(), &[119]);
    assert_eq!(at(), last, "nobody would ask for that about now");
    plans.asked(a.id(), &[u64::MAX]);
    assert_eq!(at(), last, "the dataset has no such row");
    plans.release(&lease, &Everything).unwrap();
}
