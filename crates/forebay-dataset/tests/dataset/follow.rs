//! Plans that the cache follows: leases begin, move, end and expire; wanted data is kept and
//! fetched ahead; what nobody wants is released.

use forebay_core::{ErrorKind, MemoryBudget, Result, SystemClock, limits};
use forebay_dataset::{
    Access, Caller, Dataset, DatasetSpec, Datasets, DatasetsConfig, Everything, Format, Rows,
    RowsConfig, View, Views,
    follow::{Plans, Reads},
};
use forebay_engine::{BucketRule, BucketRules, Engine, EngineConfig, FixedBuckets, Freshness};
use forebay_origin::{LocalOrigin, Origin};
use forebay_plan::{Batching, Plan, PlanDocument, PlanSpec, Shuffle, Uneven};
use forebay_protocol::plan::{Readers, Registration};
use forebay_store::{Cached, DirConfig, NextUse, Store, StoreConfig};
use std::{
    future::Future,
    ops::Range,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

const OBJECTS: usize = 256;
const OBJECT_BYTES: usize = 16 << 10;

struct World {
    _dir: tempfile::TempDir,
    engine: Engine,
    plans: Plans,
    dataset: Arc<Dataset>,
}

fn content(i: usize) -> Vec<u8> {
    (0..OBJECT_BYTES)
        .map(|at| (i * 31 + at / 7) as u8)
        .collect()
}

/// Objects, and a node's components over them with a cache for `cache` of them.
async fn world(cache: usize) -> World {
    let dir = tempfile::tempdir().unwrap();
    let origin = dir.path().join("origin");
    std::fs::create_dir_all(origin.join("o")).unwrap();
    for i in 0..OBJECTS {
        std::fs::write(origin.join(format!("o/{i:04}")), content(i)).unwrap();
    }
    let capacity_bytes = (cache * (OBJECT_BYTES + 256) + (256 << 10)) as u64;
    let config = StoreConfig {
        dirs: vec![DirConfig {
            path: dir.path().join("cache"),
            capacity_bytes,
        }],
        segment_bytes: Some(64 << 10),
        background: false,
        ..StoreConfig::default()
    };
    let store = Arc::new(Store::open(config, Arc::new(SystemClock)).unwrap());
    let mut buckets = FixedBuckets::default();
    buckets.0.insert(
        "bucket".into(),
        Arc::new(LocalOrigin::open(&origin).unwrap()) as Arc<dyn Origin>,
    );
    let rule = BucketRule {
        freshness: Freshness::Immutable,
        cache: true,
        ..BucketRule::default()
    };
    let config = EngineConfig {
        rules: BucketRules {
            default: rule,
            ..BucketRules::default()
        },
        ..EngineConfig::default()
    };
    let engine = Engine::new(
        config,
        Arc::new(buckets),
        Some(store),
        Arc::new(SystemClock),
        MemoryBudget::new(64 << 20),
    );
    let datasets = Datasets::new(engine.clone(), DatasetsConfig::default());
    let rows = Rows::new(engine.clone(), RowsConfig::default());
    let plans = Plans::new(&datasets, &rows);
    let spec = DatasetSpec {
        sources: vec!["bucket/o/**".into()],
        format: Some(Format::Objects),
        block_rows: Some(8),
        ..DatasetSpec::default()
    };
    let dataset = datasets.open(&spec, &Everything).await.unwrap().dataset;
    assert_eq!(dataset.rows(), OBJECTS as u64);
    World {
        _dir: dir,
        engine,
        plans,
        dataset,
    }
}

impl World {
    fn views(&self) -> Views {
        Views::new(vec![Arc::new(View::whole(self.dataset.clone()))]).unwrap()
    }

    fn plan(&self, seed: u64, shuffle: Shuffle) -> Arc<Plan> {
        Arc::new(
            Plan::new(PlanSpec::single(
                self.dataset.id(),
                self.dataset.shape().clone(),
                seed,
                shuffle,
            ))
            .unwrap(),
        )
    }

    fn registration(&self, plan: &Plan) -> Registration {
        Registration {
            plan: plan.spec().document(),
            job: None,
            epoch: 0,
            position: 0,
            until_epoch: None,
            lease_seconds: 60,
            ahead_bytes: 0,
            partition: None,
            columns: None,
        }
    }

    async fn read(&self, row: u64) {
        let file = self.dataset.file(row as u32);
        let mut out = Vec::new();
        self.engine
            .read_version(&file.name, &Arc::new(file.meta()), 0..file.size, &mut out)
            .await
            .unwrap();
        assert!(out == content(row as usize), "row {row}");
    }

    fn fetched(&self) -> u64 {
        self.engine.stats().bytes_from_origin.load(Relaxed)
    }

    fn is_here(&self, row: u64) -> bool {
        self.engine
            .store()
            .unwrap()
            .peek(&self.dataset.file(row as u32).name)
            .is_some()
    }

    /// For each epoch, the share that was not fetched.
    async fn epochs(&self, plan: &Plan, lease: Option<&str>, epochs: u64) -> Vec<f64> {
        let mut found = Vec::new();
        for epoch in 0..epochs {
            let before = self.fetched();
            for position in 0..plan.rows_per_epoch() {
                self.read(plan.row_at(epoch, position).row).await;
                if let Some(lease) = lease {
                    self.plans
                        .progress(lease, epoch, position + 1, &Everything)
                        .unwrap();
                }
            }
            found.push(1.0 - (self.fetched() - before) as f64 / (OBJECTS * OBJECT_BYTES) as f64);
        }
        found
    }
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(test);
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[test]
fn the_cache_follows_a_plan() {
    run(async {
        for shuffle in [Shuffle::Full, Shuffle::Block { blocks: 4 }] {
            let w = world(OBJECTS / 2).await;
            let plan = w.plan(7, shuffle);
            let lease = w
                .plans
                .register(&w.registration(&plan), &Everything)
                .await
                .unwrap();
            let found = w.epochs(&plan, Some(&lease.lease), 4).await;
            assert!(
                found[1..].iter().all(|f| *f > 0.42),
                "{shuffle}: {found:?} of half"
            );
            let w = world(OBJECTS / 2).await;
            let default = w.epochs(&plan, None, 4).await;
            let mean = |f: &[f64]| f[1..].iter().sum::<f64>() / 3.0;
            assert!(
                mean(&found) > mean(&default) + 0.1,
                "{shuffle}: {found:?}, and by default {default:?}"
            );
        }
    });
}

#[test]
fn jobs_over_one_dataset_share_what_they_fetch() {
    run(async {
        let w = world(OBJECTS / 2).await;
        let plans = [w.plan(1, Shuffle::Full), w.plan(2, Shuffle::Full)];
        let mut leases = Vec::new();
        for plan in &plans {
            leases.push(
                w.plans
                    .register(&w.registration(plan), &Everything)
                    .await
                    .unwrap()
                    .lease,
            );
        }
        let mut found = Vec::new();
        for epoch in 0..3 {
            let before = w.fetched();
            for position in 0..OBJECTS as u64 {
                for (plan, lease) in plans.iter().zip(&leases) {
                    w.read(plan.row_at(epoch, position).row).await;
                    w.plans
                        .progress(lease, epoch, position + 1, &Everything)
                        .unwrap();
                }
            }
            found.push(1.0 - (w.fetched() - before) as f64 / (2 * OBJECTS * OBJECT_BYTES) as f64);
        }
        assert!(
            found[1..].iter().all(|f| *f > 0.5),
            "each alone would find less than half: {found:?}"
        );
    });
}

#[test]
fn a_lease_that_ends_or_runs_out_lets_go() {
    run(async {
        let w = world(OBJECTS / 2).await;
        let plan = w.plan(3, Shuffle::Full);
        let lease = w
            .plans
            .register(&w.registration(&plan), &Everything)
            .await
            .unwrap();
        let again = w
            .plans
            .register(&w.registration(&plan), &Everything)
            .await
            .unwrap();
        assert_eq!((lease.plan.as_str(), again.leases), (plan.identity(), 2));
        assert_eq!(w.plans.counts(), (2, 1), "equal plans are one");
        for position in 0..OBJECTS as u64 {
            w.read(plan.row_at(0, position).row).await;
            w.plans
                .progress(&lease.lease, 0, position + 1, &Everything)
                .unwrap();
        }
        // The other job has not read anything yet.
        let mut places: Vec<_> = w
            .plans
            .list(&Everything)
            .iter()
            .map(|l| (l.epoch, l.position))
            .collect();
        places.sort_unstable();
        assert_eq!(places, [(0, 0), (1, 0)]);
        w.plans.release(&lease.lease, &Everything).unwrap();
        assert_eq!(w.plans.counts(), (1, 1));
        w.plans.release(&again.lease, &Everything).unwrap();
        assert_eq!(w.plans.counts(), (0, 0));
        assert_eq!(
            w.plans
                .release(&again.lease, &Everything)
                .unwrap_err()
                .kind(),
            ErrorKind::NotFound
        );

        // A job that registers again, in each of its epochs and workers, has one lease.
        let named = |job: &str, epoch| Registration {
            job: Some(job.into()),
            epoch,
            ..w.registration(&plan)
        };
        let first = w
            .plans
            .register(&named("job", 0), &Everything)
            .await
            .unwrap();
        let renewed = w
            .plans
            .register(&named("job", 2), &Everything)
            .await
            .unwrap();
        assert_eq!(
            (&first.lease, renewed.epoch, w.plans.counts()),
            (&renewed.lease, 2, (1, 1))
        );
        let other = w
            .plans
            .register(&named("other", 0), &Everything)
            .await
            .unwrap();
        assert_eq!(
            (w.plans.counts(), w.plans.stats().renewed.load(Relaxed)),
            ((2, 1), 1)
        );
        for lease in [first, other] {
            w.plans.release(&lease.lease, &Everything).unwrap();
        }
        for wrong in ["", &"j".repeat(129)] {
            assert_eq!(
                w.plans
                    .register(&named(wrong, 0), &Everything)
                    .await
                    .unwrap_err()
                    .kind(),
                ErrorKind::Invalid
            );
        }

        // Long enough for a word, on a busy machine too.
        let short = Registration {
            lease_seconds: 4,
            ..w.registration(&plan)
        };
        let short = w.plans.register(&short, &Everything).await.unwrap();
        w.plans.progress(&short.lease, 0, 5, &Everything).unwrap();
        until("a lease without a word runs out", || {
            w.plans.counts() == (0, 0)
        })
        .await;
        assert_eq!(w.plans.stats().expired.load(Relaxed), 1);
        let gone = w
            .plans
            .progress(&short.lease, 0, 6, &Everything)
            .unwrap_err();
        assert_eq!(gone.kind(), ErrorKind::NotFound);
        assert!(
            gone.describe().contains("register the plan again"),
            "{}",
            gone.describe()
        );

        let following = w
            .plans
            .follow(
                plan.clone(),
                &w.views(),
                (0, 0),
                &Reads::default(),
                Caller::Key(1),
            )
            .unwrap();
        following.progress(0, 9).unwrap();
        assert_eq!(
            (w.plans.counts(), w.plans.list(&Everything)[0].position),
            ((1, 1), 9)
        );
        drop(following);
        assert_eq!(
            w.plans.counts(),
            (0, 0),
            "what is no longer kept is released"
        );

        // What the plan held is evicted like anything else: a scan displaces it.
        let (held, missing): (Vec<u64>, Vec<u64>) =
            (0..OBJECTS as u64).partition(|row| w.is_here(*row));
        assert!(held.len() > OBJECTS / 3 && missing.len() > OBJECTS / 3);
        for row in missing.iter().chain(&missing).chain(&missing) {
            w.engine
                .store()
                .unwrap()
                .evict(&w.dataset.file(*row as u32).name);
            w.read(*row).await;
        }
        let left = held.iter().filter(|row| w.is_here(**row)).count();
        assert!(
            left < held.len() / 2,
            "{left} of {} are left of a plan that ended",
            held.len()
        );
    });
}

#[test]
fn what_comes_next_is_fetched_ahead_within_its_budget() {
    run(async {
        let w = world(OBJECTS * 2).await;
        let plan = w.plan(5, Shuffle::Full);
        // A 64th of the cache: eight objects.
        let most =
            w.engine.store().unwrap().stats().dirs[0].capacity_bytes / 64 / OBJECT_BYTES as u64;
        let registration = Registration {
            ahead_bytes: u64::MAX,
            ..w.registration(&plan)
        };
        let lease = w.plans.register(&registration, &Everything).await.unwrap();
        until("the first objects are there", || {
            (0..most).all(|at| w.is_here(plan.row_at(0, at).row))
        })
        .await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(
            w.fetched(),
            most * OBJECT_BYTES as u64,
            "no more than the budget"
        );
        w.plans.progress(&lease.lease, 0, 100, &Everything).unwrap();
        until("it goes on from where the job is", || {
            (100..100 + most).all(|at| w.is_here(plan.row_at(0, at).row))
        })
        .await;
        w.plans.release(&lease.lease, &Everything).unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        let fetched = w.fetched();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(
            w.fetched(),
            fetched,
            "nothing is fetched for a plan that ended"
        );
    });
}

#[test]
fn rows_that_are_asked_for_say_where_a_job_is() {
    run(async {
        let w = world(OBJECTS).await;
        let plan = w.plan(11, Shuffle::Full);
        let lease = w
            .plans
            .register(&w.registration(&plan), &Everything)
            .await
            .unwrap();
        let rows = |epoch, positions: Range<u64>| -> Vec<u64> {
            positions.map(|p| plan.row_at(epoch, p).row).collect()
        };
        let place = || {
            let lease = w.plans.list(&Everything).remove(0);
            (lease.epoch, lease.position)
        };
        w.plans.asked(w.dataset.id(), &rows(0, 8..16));
        assert_eq!(place(), (0, 8));
        w.plans.asked(w.dataset.id(), &rows(0, 0..8));
        assert_eq!(place(), (0, 8), "it does not go back");
        let other = w.plan(12, Shuffle::Full);
        for p in 0..16 {
            let rows: Vec<u64> = (p * 16..p * 16 + 16)
                .map(|p| other.row_at(0, p).row)
                .collect();
            w.plans.asked(w.dataset.id(), &rows);
        }
        assert_eq!(place(), (0, 8), "what another order asks for says nothing");
        w.plans.asked("another dataset", &rows(0, 16..32));
        assert_eq!(place(), (0, 8));
        w.plans
            .progress(&lease.lease, 0, OBJECTS as u64 - 1, &Everything)
            .unwrap();
        w.plans.asked(w.dataset.id(), &rows(1, 0..16));
        assert_eq!(place().0, 1, "over the end of an epoch");
    });
}

#[test]
fn a_registration_that_makes_no_sense_is_refused() {
    run(async {
        let w = world(OBJECTS).await;
        let good = w.registration(&w.plan(1, Shuffle::Full));
        let nothing = PlanDocument {
            sources: vec![],
            ..good.plan.clone()
        };
        let cases = [
            Registration {
                lease_seconds: 0,
                ..good.clone()
            },
            Registration {
                lease_seconds: u64::MAX,
                ..good.clone()
            },
            Registration {
                position: OBJECTS as u64 + 1,
                ..good.clone()
            },
            Registration {
                epoch: u64::MAX,
                ..good.clone()
            },
            Registration {
                epoch: 3,
                until_epoch: Some(3),
                ..good.clone()
            },
            Registration {
                plan: nothing,
                ..good.clone()
            },
        ];
        for registration in cases {
            let refused = w
                .plans
                .register(&registration, &Everything)
                .await
                .unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Invalid, "{registration:?}");
        }
        let mut unknown = good.clone();
        unknown.plan.sources[0].dataset = "00".repeat(16);
        assert_eq!(
            w.plans
                .register(&unknown, &Everything)
                .await
                .unwrap_err()
                .kind(),
            ErrorKind::NotFound
        );
        let lease = w.plans.register(&good, &Everything).await.unwrap().lease;
        assert_eq!(
            w.plans
                .progress(&lease, 0, OBJECTS as u64 + 1, &Everything)
                .unwrap_err()
                .kind(),
            ErrorKind::Invalid
        );
        assert_eq!(
            w.plans.progress("0", 0, 0, &Everything).unwrap_err().kind(),
            ErrorKind::NotFound
        );
        assert_eq!(w.plans.counts(), (1, 1));
    });
}

/// A key that may read everything.
#[derive(Clone, Copy)]
struct Key(u128);

impl Access for Key {
    fn read(&self, _: &str, _: &str) -> Result<()> {
        Ok(())
    }

    fn list(&self, _: &str, _: &str) -> Result<()> {
        Ok(())
    }

    fn rights(&self) -> u128 {
        0
    }

    fn caller(&self) -> Caller {
        Caller::Key(self.0)
    }

    fn shared(&self) -> Arc<dyn Access> {
        Arc::new(*self)
    }
}

#[test]
fn a_lease_obeys_the_key_that_registered_it_and_no_other() {
    run(async {
        let w = world(64).await;
        let plan = w.plan(1, Shuffle::Full);
        let named = Registration {
            job: Some("job".into()),
            ..w.registration(&plan)
        };
        let (mine, other) = (Key(1), Key(2));
        let lease = w.plans.register(&named, &mine).await.unwrap().lease;
        let missing = ErrorKind::NotFound;
        let moved = w.plans.progress(&lease, 0, 9, &other);
        assert_eq!(moved.unwrap_err().kind(), missing);
        let ended = w.plans.release(&lease, &other);
        assert_eq!(ended.unwrap_err().kind(), missing);
        assert!(w.plans.list(&other).is_empty());
        // The same job name under another key is another job.
        let theirs = w.plans.register(&named, &other).await.unwrap().lease;
        assert_ne!(theirs, lease);
        assert_eq!(w.plans.list(&other).len(), 1);
        assert_eq!(w.plans.list(&mine)[0].lease, lease);
        assert_eq!(w.plans.list(&Everything).len(), 2);
        assert_eq!(w.plans.progress(&lease, 0, 9, &mine).unwrap().position, 9);
        w.plans.release(&theirs, &Everything).unwrap();

        // Its caller sees a stream's lease, and the lease ends only with the stream.
        let following = w
            .plans
            .follow(
                plan.clone(),
                &w.views(),
                (0, 0),
                &Reads::default(),
                other.caller(),
            )
            .unwrap();
        let of_stream = w.plans.list(&other).remove(0).lease;
        for access in [&mine as &dyn Access, &other, &Everything] {
            let moved = w.plans.progress(&of_stream, 0, 9, access);
            assert_eq!(moved.unwrap_err().kind(), missing);
            let ended = w.plans.release(&of_stream, access);
            assert_eq!(ended.unwrap_err().kind(), missing);
        }
        assert_eq!(w.plans.list(&mine).len(), 1);
        drop(following);
        w.plans.release(&lease, &mine).unwrap();
        assert_eq!(w.plans.counts(), (0, 0));
    });
}

#[test]
fn a_job_cannot_continue_from_the_end_of_the_last_epoch() {
    run(async {
        let w = world(64).await;
        let plan = w.plan(1, Shuffle::Full);
        let last = Registration {
            epoch: limits::PLAN_EPOCHS_MAX - 1,
            position: OBJECTS as u64,
            ahead_bytes: 1 << 20,
            ..w.registration(&plan)
        };
        let refused = w.plans.register(&last, &Everything).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid);
        // One row earlier: fetching ahead ends with the epochs.
        let before = Registration {
            position: OBJECTS as u64 - 1,
            ..last
        };
        let lease = w.plans.register(&before, &Everything).await.unwrap().lease;
        let row = plan.row_at(limits::PLAN_EPOCHS_MAX - 1, OBJECTS as u64 - 1);
        until("the last row is fetched ahead", || w.is_here(row.row)).await;
        w.plans.release(&lease, &Everything).unwrap();
    });
}

/// Ranks of a job that deals out four rows at a time.
fn ranks(world: u32, ranks: &[u32]) -> Option<Readers> {
    Some(Readers {
        world,
        ranks: ranks.to_vec(),
        batch: Batching::Rows(4),
        uneven: Uneven::Drop,
    })
}

/// The rows that come to these ranks, from a position on, in order.
fn rows_of(plan: &Plan, (world, ranks): (u64, &[u64]), from: u64, count: usize) -> Vec<u64> {
    (from..plan.rows_per_epoch())
        .filter(|at| ranks.contains(&(at / 4 % world)))
        .take(count)
        .map(|at| plan.row_at(0, at).row)
        .collect()
}

#[test]
fn what_the_ranks_of_this_node_read_next_is_fetched_ahead_and_nothing_else() {
    run(async {
        let w = world(OBJECTS * 2).await;
        let plan = w.plan(5, Shuffle::Full);
        // A 64th of the cache: eight objects, of 32 positions for a rank of four.
        let most =
            w.engine.store().unwrap().stats().dirs[0].capacity_bytes / 64 / OBJECT_BYTES as u64 / 4
                * 4;
        let registration = |world, of: &[u32], position| Registration {
            job: Some(format!("{of:?}")),
            ahead_bytes: u64::MAX,
            position,
            partition: ranks(world, of),
            ..w.registration(&plan)
        };
        let lease = w
            .plans
            .register(&registration(4, &[1], 0), &Everything)
            .await
            .unwrap();
        assert_eq!(lease.ranks, Some((1, 4)));
        let own = rows_of(&plan, (4, &[1]), 0, most as usize);
        until("what rank 1 reads first is there", || {
            own.iter().all(|row| w.is_here(*row))
        })
        .await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        let ahead = w.fetched() / OBJECT_BYTES as u64;
        assert!(
            (most..most + 4).contains(&ahead),
            "{ahead} objects, and rank 1 may have {most} ahead"
        );
        let here = |rows: &[u64]| rows.iter().filter(|row| w.is_here(**row)).count();
        let others = rows_of(&plan, (4, &[0, 2, 3]), 0, OBJECTS);
        assert_eq!(here(&others), 0, "nobody here reads it");

        // Another rank of the job: what both read, from the one that is behind.
        let other = w
            .plans
            .register(&registration(4, &[2], 0), &Everything)
            .await
            .unwrap();
        let both = rows_of(&plan, (4, &[1, 2]), 0, most as usize);
        until("what ranks 1 and 2 read first is there", || {
            both.iter().all(|row| w.is_here(*row))
        })
        .await;
        w.plans.progress(&lease.lease, 0, 160, &Everything).unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        let later = rows_of(&plan, (4, &[1]), 160, 4);
        assert_eq!(here(&later), 0, "rank 2 is furthest behind");
        // It leaves, and is not waited for.
        w.plans.release(&other.lease, &Everything).unwrap();
        until("what rank 1 reads next is there", || {
            here(&later) == later.len()
        })
        .await;

        // The job goes on as two ranks, from 200 on, which is within a step of theirs.
        let resumed = registration(2, &[1], 204);
        w.plans.release(&lease.lease, &Everything).unwrap();
        let before = w.fetched();
        w.plans.register(&resumed, &Everything).await.unwrap();
        let next: Vec<u64> = (204..236)
            .filter(|at| (at - 204) / 4 % 2 == 1)
            .map(|at| plan.row_at(0, at).row)
            .collect();
        until("what the second of two ranks reads next is there", || {
            next[..most as usize].iter().all(|row| w.is_here(*row))
        })
        .await;
        let fetched = (w.fetched() - before) / OBJECT_BYTES as u64;
        assert!(fetched <= most + 4, "{fetched}");
    });
}

#[test]
fn what_other_ranks_read_is_not_kept_for_this_epoch_unless_they_ask_this_node() {
    run(async {
        let w = world(OBJECTS * 2).await;
        let plan = w.plan(6, Shuffle::Full);
        let registration = Registration {
            partition: ranks(4, &[3]),
            until_epoch: Some(2),
            ..w.registration(&plan)
        };
        let lease = w.plans.register(&registration, &Everything).await.unwrap();
        w.plans.progress(&lease.lease, 0, 64, &Everything).unwrap();
        let advisor = w.plans.advisor();
        let entry = |row: u64| {
            let file = w.dataset.file(row as u32);
            Cached {
                bucket: forebay_core::name::hash_bucket(file.name.bucket()),
                name: file.name.hash128(),
                version: file.version(),
                part: None,
            }
        };
        let (mut never, mut later) = (0, 0);
        for position in 0..OBJECTS as u64 {
            let row = plan.row_at(0, position).row;
            let next = advisor.next_use(&entry(row));
            let at = plan.position_of(1, plan.row_at(0, position)).unwrap();
            match (position >= 64 && position / 4 % 4 == 3, at / 4 % 4 == 3) {
                (true, _) => {
                    let bytes = (position - 64) * OBJECT_BYTES as u64 / 4;
                    assert_eq!(next, NextUse::ThisRound(bytes), "position {position}");
                }
                (false, true) => {
                    later += 1;
                    assert!(matches!(next, NextUse::LaterRound(_)), "{next:?}");
                }
                (false, false) => {
                    never += 1;
                    assert_eq!(next, NextUse::Never, "the job ends after the next epoch");
                }
            }
            // Ranks at other nodes of a cluster ask whoever owns it.
            let by_all = advisor.next_use_by_all(&entry(row));
            let soon = matches!(by_all, NextUse::ThisRound(_));
            assert_eq!(soon, position >= 64, "position {position}: {by_all:?}");
        }
        assert!(
            never > OBJECTS / 2 && later > OBJECTS / 8,
            "{never} {later}"
        );
    });
}

#[test]
fn blocks_whose_rows_are_read_together_stay_in_an_order_that_does_not_change() {
    run(async {
        const FILES: usize = 24;
        const ROWS: usize = 50;
        let w = world(OBJECTS).await;
        let folder = w._dir.path().join("origin/lines");
        std::fs::create_dir_all(&folder).unwrap();
        for i in 0..FILES {
            let line = |n| format!("{{\"n\": {}}}\n", i * ROWS + n);
            let lines: String = (0..ROWS).map(line).collect();
            std::fs::write(folder.join(format!("{i:02}.jsonl")), lines).unwrap();
        }
        let spec = DatasetSpec {
            sources: vec!["bucket/lines/**".into()],
            ..DatasetSpec::default()
        };
        let datasets = Datasets::new(w.engine.clone(), DatasetsConfig::default());
        let dataset = datasets.open(&spec, &Everything).await.unwrap().dataset;
        let views = Views::new(vec![Arc::new(View::whole(dataset.clone()))]).unwrap();
        let shape = dataset.shape().clone();
        let plan = PlanSpec::single(dataset.id(), shape, 3, Shuffle::Full);
        let plan = Arc::new(Plan::new(plan).unwrap());
        let advisor = w.plans.advisor();
        // When each file is said to be wanted, at several places of the order.
        let said = |together: bool| -> Vec<Vec<NextUse>> {
            let reads = Reads {
                together,
                ..Reads::default()
            };
            let following = w
                .plans
                .follow(plan.clone(), &views, (0, 0), &reads, Caller::Operator)
                .unwrap();
            let places = [0, 300, 600].into_iter();
            let of_files = |place| {
                following.progress(0, place).unwrap();
                (0..FILES)
                    .map(|file| {
                        let file = dataset.file(file as u32);
                        advisor.next_use(&Cached {
                            bucket: forebay_core::name::hash_bucket(file.name.bucket()),
                            name: file.name.hash128(),
                            version: file.version(),
                            part: None,
                        })
                    })
                    .collect()
            };
            places.map(of_files).collect()
        };
        let alone = said(false);
        assert_ne!(alone[0], alone[1], "by the place of its next row");
        let together = said(true);
        assert!(together[0] == together[1] && together[1] == together[2]);
        let mut distances: Vec<u64> = together[0]
            .iter()
            .map(|next| match next {
                NextUse::ThisRound(bytes) => *bytes,
                other => panic!("{other:?}"),
            })
            .collect();
        distances.sort_unstable();
        distances.dedup();
        assert_eq!(distances.len(), FILES, "no two stay alike");
        let all = dataset.bytes();
        assert!(distances[0] < all / 4 && distances[FILES - 1] > all / 4 * 3);
        assert!(distances[FILES - 1] <= all, "within an epoch");
    });
}

#[test]
fn rows_that_are_asked_for_move_the_rank_that_reads_them() {
    run(async {
        let w = world(OBJECTS * 2).await;
        let plan = w.plan(8, Shuffle::Full);
        let mut leases = Vec::new();
        for of in [0, 1] {
            let registration = Registration {
                partition: ranks(4, &[of]),
                ..w.registration(&plan)
            };
            let lease = w.plans.register(&registration, &Everything).await.unwrap();
            leases.push(lease.lease);
        }
        let places = || -> Vec<u64> {
            let all = w.plans.list(&Everything);
            let of = |lease: &String| all.iter().find(|l| l.lease == *lease).unwrap().position;
            leases.iter().map(of).collect()
        };
        let ask = |positions: Range<u64>| {
            let rows: Vec<u64> = positions.map(|at| plan.row_at(0, at).row).collect();
            w.plans.asked(w.dataset.id(), &rows);
        };
        ask(20..24);
        assert_eq!(places(), [0, 20], "16..20 is of rank 0, 20..24 of rank 1");
        ask(16..20);
        assert_eq!(places(), [16, 20]);
        ask(24..28);
        assert_eq!(places(), [16, 20], "rank 2 reads at another node");
    });
}

#[test]
fn a_registration_of_impossible_ranks_or_columns_is_refused() {
    run(async {
        let w = world(OBJECTS).await;
        let plan = w.plan(9, Shuffle::Full);
        let of = |partition, columns: Option<&[&str]>| Registration {
            partition,
            columns: columns.map(|c| c.iter().map(|&name| name.into()).collect()),
            ahead_bytes: u64::MAX,
            ..w.registration(&plan)
        };
        for (wrong, says) in [
            (of(ranks(4, &[]), None), "no rank"),
            (of(ranks(4, &[4]), None), "rank 4 in a world of 4"),
            (of(ranks(0, &[0]), None), "a world of 0 ranks"),
            (of(None, Some(&["key", "dta"])), "\"dta\""),
        ] {
            let e = w.plans.register(&wrong, &Everything).await.unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Invalid);
            assert!(e.describe().contains(says), "{}", e.describe());
        }
        // Who reads names only needs nothing of the objects.
        let keys = of(ranks(2, &[0]), Some(&["key"]));
        w.plans.register(&keys, &Everything).await.unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(w.fetched(), 0);
    });
}
