//! Random operations against a model: every read returns one version that the freshness rule
//! allows, whole, or an error.
//!
//! The model is the origin's own history (`history.rs`): it knows every version of each object,
//! when it was current, and the time on the node's clock then. Reads, writes through the node,
//! changes behind its back, evictions, faults of the origin and of the disk run one at a time and
//! several at a time; between them the clock jumps and the node restarts. Each operation has a
//! deadline: a hang is a failure.

mod history;

use bytes::Bytes;
use forebay_core::{
    ByteRange, Clock, ErrorKind, ManualClock, MemoryBudget, ObjectMeta, ObjectName, Result,
    sync::Mutex,
};
use forebay_engine::{
    BucketRule, BucketRules, ByteStream, Conditions, Engine, EngineConfig, FixedBuckets, Freshness,
    ReadOptions,
};
use forebay_format::{ArchiveKind, ArchiveWriter};
use forebay_origin::{
    Circuit, Counters, Operation, PutCondition, PutRequest, Resilient, RetryPolicy, Timed,
};
use forebay_store::{
    DirConfig, Store, StoreConfig,
    disk::RealDisk,
    faults::{Fault as DiskFault, Faults as DiskFaults, FaultyDisk, Op, Rule},
};
use forebay_testing::{
    Fault, Faults as OriginFaults, Faulty, Hook,
    engine::{NOW, noise},
    seeded::{self, Log, rng_of, seeds},
};
use futures::{FutureExt, StreamExt, future::join_all, stream};
use history::{History, Version};
use rand::{RngExt, rngs::StdRng};
use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

const MIB: usize = 1 << 20;
/// Longer than any fault may delay an operation.
const DEADLINE: Duration = Duration::from_secs(60);
const TTL: Duration = Duration::from_secs(60);
const BUCKETS: [(&str, Freshness); 3] = [
    ("always", Freshness::Always),
    ("minute", Freshness::RevalidateAfter(TTL)),
    ("immutable", Freshness::Immutable),
];
const PLAIN: [&str; 4] = ["a", "b", "c/d", "e"];
const ARCHIVES: [&str; 4] = ["s.tar", "s.tgz", "s.tar.lz4", "s.zip"];

type Members = Arc<Vec<(String, Vec<u8>)>>;

/// The conditions of a read; only those that are set are printed.
#[derive(Clone, Default)]
struct Given(Conditions);

impl std::fmt::Debug for Given {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 == Conditions::default() {
            f.write_str("none")
        } else {
            self.0.fmt(f)
        }
    }
}

#[derive(Clone, Debug)]
enum Action {
    Read {
        bucket: usize,
        key: &'static str,
        range: Option<ByteRange>,
        conditions: Given,
        bypass: bool,
        leave: bool,
    },
    Head {
        bucket: usize,
        key: &'static str,
        conditions: Given,
    },
    Member {
        bucket: usize,
        key: &'static str,
        member: usize,
        range: Option<ByteRange>,
    },
    Put {
        bucket: usize,
        key: &'static str,
        content: u64,
    },
    Multipart {
        bucket: usize,
        key: &'static str,
        content: u64,
    },
    Copy {
        bucket: usize,
        from: &'static str,
        to: &'static str,
    },
    Delete {
        bucket: usize,
        key: &'static str,
    },
    Behind {
        bucket: usize,
        key: &'static str,
        content: Option<u64>,
    },
    Evict {
        bucket: usize,
        key: &'static str,
    },
    Clock {
        by: Duration,
    },
}

/// The content of an object: a function of its name and a number.
fn content(key: &str, number: u64, known: &Mutex<HashMap<u64, Members>>) -> Bytes {
    let kind = ArchiveKind::from_name(key);
    let (Some(kind), true) = (kind, !number.is_multiple_of(11)) else {
        let sizes = [
            0,
            1,
            1000,
            60_000,
            300_000,
            MIB,
            MIB + 1,
            5 * MIB / 2,
            1000,
            60_000,
            9 * MIB + 77,
        ];
        // An object that has an archive's name but is not an archive is short.
        let size = if kind.is_some() {
            5000
        } else {
            sizes[number as usize % sizes.len()]
        };
        return noise(size, number).into();
    };
    let sizes = [0, 10, 512, 5000, 70_000, 400_000, MIB + 9];
    let members: Vec<(String, Vec<u8>)> = (0..1 + number % 5)
        .map(|i| {
            (
                format!("m/{i}.bin"),
                noise(
                    sizes[(number / 5 + i * 3) as usize % sizes.len()],
                    number * 100 + i,
                ),
            )
        })
        .collect();
    let mut writer = ArchiveWriter::new(kind);
    let mut out = Vec::new();
    for (name, data) in &members {
        writer.entry(name, data, 0, &mut out).unwrap();
    }
    writer.finish(&mut out).unwrap();
    known.lock().insert(fingerprint(&out), Arc::new(members));
    out.into()
}

fn fingerprint(data: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    data.hash(&mut hasher);
    hasher.finish()
}

struct World {
    seed: u64,
    log: Log,
    clock: ManualClock,
    histories: Vec<History>,
    origin_faults: OriginFaults,
    disk_faults: DiskFaults,
    dir: PathBuf,
    capacity: Option<u64>,
    budget: u64,
    engine: Option<Engine>,
    members: Arc<Mutex<HashMap<u64, Members>>>,
    /// Whether anything may fail that is not the reader's own fault.
    faulty: bool,
}

impl World {
    fn new(seed: u64, dir: PathBuf, log: Log) -> Self {
        let clock = ManualClock::at(NOW);
        let with_etags = !seed.is_multiple_of(4);
        let capacity = [
            Some(24 << 20),
            Some(8 << 20),
            Some(256 << 20),
            Some(24 << 20),
            None,
        ][seed as usize % 5];
        let mut world = Self {
            seed,
            log,
            histories: BUCKETS
                .iter()
                .map(|_| History::new(clock.clone(), with_etags))
                .collect(),
            clock,
            origin_faults: OriginFaults::new(),
            disk_faults: DiskFaults::default(),
            dir,
            capacity,
            budget: [16 << 20, 64 << 20, 24 << 20][seed as usize % 3],
            engine: None,
            members: Arc::default(),
            faulty: false,
        };
        world.open();
        world
    }

    fn open(&mut self) {
        let (disk, faults) = FaultyDisk::new(RealDisk);
        faults.add(Rule::new(Op::Sync, DiskFault::Skip));
        self.disk_faults = faults;
        let store = self.capacity.map(|capacity_bytes| {
            let dirs = vec![DirConfig {
                path: self.dir.clone(),
                capacity_bytes,
            }];
            let config = StoreConfig {
                dirs,
                retry_after: Duration::ZERO,
                ..Default::default()
            };
            Arc::new(Store::open_on(Arc::new(disk), config, Arc::new(self.clock.clone())).unwrap())
        });
        let policy = RetryPolicy {
            attempts: 3,
            first_delay: Duration::from_millis(1),
            longest_delay: Duration::from_millis(5),
            deadline: Duration::from_secs(5),
        };
        let idle_timeout = Duration::from_millis(400);
        let (mut buckets, mut rules) = (FixedBuckets::default(), BucketRules::default());
        for ((bucket, freshness), history) in BUCKETS.iter().zip(&self.histories) {
            let faulty = Arc::new(Faulty::new(
                Arc::new(history.clone()),
                self.origin_faults.clone(),
            ));
            // Two circuits: the cost of one of the many faults is not what this test is about.
            let circuit = || Arc::new(Circuit::new(idle_timeout));
            buckets.0.insert(
                (*bucket).into(),
                Arc::new(Resilient::new(
                    Arc::new(Timed::new(faulty, idle_timeout, circuit())),
                    policy.clone(),
                    Arc::new(Counters::default()),
                    circuit(),
                )),
            );
            rules.buckets.insert(
                (*bucket).into(),
                BucketRule {
                    freshness: *freshness,
                    cache: true,
                    ..BucketRule::default()
                },
            );
        }
        let config = EngineConfig {
            rules,
            ..Default::default()
        };
        self.histories.iter().for_each(History::started);
        self.engine = Some(Engine::new(
            config,
            Arc::new(buckets),
            store,
            Arc::new(self.clock.clone()),
            MemoryBudget::new(self.budget),
        ));
    }

    fn engine(&self) -> &Engine {
        self.engine.as_ref().unwrap()
    }

    fn content(&self, key: &str, number: u64) -> Bytes {
        content(key, number, &self.members)
    }

    /// Waits until nothing runs in the background.
    async fn quiesce(&self) {
        let began = Instant::now();
        let busy = || {
            tokio::runtime::Handle::current()
                .metrics()
                .num_alive_tasks()
                > 0
                || self.engine().budget().used_bytes() > 0
        };
        while busy() {
            assert!(
                began.elapsed() < DEADLINE,
                "work goes on for ever: {} bytes are held",
                self.engine().budget().used_bytes()
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn step(&mut self, step: u64) {
        let mut rng = rng_of(self.seed, step);
        match rng.random_range(0..100) {
            0..48 => {
                let action = self.action(&mut rng);
                self.log.note(format!("{step}: {action:?}"));
                self.act(&action, false).await;
            }
            48..78 => {
                let actions: Vec<_> = (0..rng.random_range(2..7))
                    .map(|_| self.action(&mut rng))
                    .collect();
                self.log.note(format!("{step}: at a time {actions:?}"));
                join_all(actions.iter().map(|a| self.act(a, true))).await;
            }
            78..86 => {
                let by = Duration::from_secs([1, 20, 59, 60, 61, 1000][rng.random_range(0..6)]);
                self.log
                    .note(format!("{step}: the clock goes on by {by:?}"));
                History::pass(&self.histories, by);
            }
            86..88 => {
                self.quiesce().await;
                let by = Duration::from_secs([1, 30, 90, 5000][rng.random_range(0..4)]);
                self.log
                    .note(format!("{step}: the clock goes back by {by:?}"));
                self.clock.set(self.clock.now() - by);
            }
            88..92 => self.restart(step, &mut rng).await,
            92..96 => self.break_origin(step, &mut rng),
            96..97 => self.break_disk(step, &mut rng),
            _ => {
                self.log.note(format!("{step}: all is well again"));
                self.mend().await;
            }
        }
        self.check_space();
    }

    async fn mend(&mut self) {
        self.origin_faults.clear();
        self.disk_faults.clear();
        self.disk_faults.add(Rule::new(Op::Sync, DiskFault::Skip));
        self.quiesce().await;
        self.faulty = false;
    }

    fn break_origin(&mut self, step: u64, rng: &mut StdRng) {
        use Operation::*;
        let at = rng.random_range(0..1_200_000u64);
        let histories = self.histories.clone();
        let members = self.members.clone();
        let number = rng.random_range(1..1_000_000);
        // The object changes just before the request is answered.
        let change: Hook = Arc::new(move |key| {
            let history = histories.iter().find(|h| h.keys().contains(&key)).cloned();
            let data = content(&key, number, &members);
            async move { _ = history.map(|h| h.change(&key, Some(data))) }.boxed()
        });
        let mut faults = vec![(Get, Fault::Hook(change))];
        for operation in [Get, Head, Put, Delete, CompleteUpload, UploadPart, Copy] {
            for kind in [
                ErrorKind::OriginUnavailable,
                ErrorKind::Busy,
                ErrorKind::NotFound,
                ErrorKind::PermissionDenied,
                ErrorKind::Timeout,
            ] {
                faults.push((operation, Fault::Error(kind)));
            }
            faults.push((operation, Fault::LoseAnswer(ErrorKind::OriginUnavailable)));
            faults.push((operation, Fault::Delay(Duration::from_millis(30))));
        }
        for _ in 0..3 {
            faults.extend(
                [
                    Fault::Truncate { at },
                    Fault::Break { at },
                    Fault::Extra { bytes: 10 },
                    Fault::WrongRange,
                ]
                .map(|f| (Get, f)),
            );
        }
        faults.extend([Fault::StallBody { at }, Fault::Stall].map(|f| (Get, f)));
        faults.push((Head, Fault::Stall));
        let p = [0.1, 0.4, 1.0][rng.random_range(0..3)];
        self.log.note(format!(
            "{step}: the origin fails in {p} of all requests, bodies after {at} bytes"
        ));
        self.origin_faults.random(p, Some(rng.random()), faults);
        self.faulty = true;
    }

    fn break_disk(&mut self, step: u64, rng: &mut StdRng) {
        let (op, fault) = match rng.random_range(0..6) {
            0 => (Op::Read, DiskFault::Error(libc::EIO)),
            1 => (Op::Read, DiskFault::FlipBit(rng.random_range(0..100_000))),
            2 => (Op::Write, DiskFault::Error(libc::ENOSPC)),
            3 => (
                Op::Write,
                DiskFault::Short(rng.random_range(0..3000), libc::EIO),
            ),
            4 => (Op::Write, DiskFault::FlipBit(rng.random_range(0..100_000))),
            _ => (Op::Create, DiskFault::Error(libc::EROFS)),
        };
        let (after, times) = (rng.random_range(0..5), rng.random_range(1..20));
        self.log.note(format!(
            "{step}: the disk fails: {op:?} {fault:?} after {after}, {times} times"
        ));
        self.disk_faults
            .add(Rule::new(op, fault).on("seg-").after(after).times(times));
    }

    /// The node stops, in one of three ways, and comes back.
    async fn restart(&mut self, step: u64, rng: &mut StdRng) {
        let how = ["a clean stop", "a kill", "the machine goes down"][rng.random_range(0..3)];
        self.log.note(format!("{step}: restart after {how}"));
        let faulty = self.faulty;
        self.mend().await;
        self.faulty = faulty;
        let engine = self.engine.take().unwrap();
        let store = engine.store().cloned();
        drop(engine);
        if let Some(store) = store {
            // A removal that a failing disk could not note is noted now that the disk works.
            let meta = ObjectMeta {
                size: 1,
                etag: None,
                last_modified_ms: 1,
                attributes: Default::default(),
            };
            store
                .put_head(
                    &ObjectName::new("probe", "p").unwrap(),
                    &meta,
                    5,
                    Some(b"p"),
                )
                .unwrap();
            if how == "a clean stop" {
                store.close().unwrap();
            }
            assert_eq!(
                Arc::strong_count(&store),
                1,
                "somebody still works with the store"
            );
            drop(store);
            if how == "the machine goes down" {
                let file = self.dir.join("identity.json");
                let mut identity: serde_json::Value =
                    serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
                identity["boot_id"] = "another".into();
                std::fs::write(file, identity.to_string()).unwrap();
                self.histories.iter().for_each(History::machine_down);
            }
        }
        self.open();
    }

    fn check_space(&self) {
        let Some(capacity) = self.capacity else {
            return;
        };
        let files = std::fs::read_dir(&self.dir)
            .unwrap()
            .filter_map(|f| f.unwrap().metadata().ok());
        let used: u64 = files.map(|m| m.len()).sum();
        assert!(used <= capacity, "{used} bytes on a disk of {capacity}");
    }

    fn action(&self, rng: &mut StdRng) -> Action {
        let bucket = rng.random_range(0..BUCKETS.len());
        let archive = rng.random_bool(0.35);
        let key = if archive {
            ARCHIVES[rng.random_range(0..4)]
        } else {
            PLAIN[rng.random_range(0..4)]
        };
        let number = rng.random_range(1..1_000_000);
        match rng.random_range(0..100) {
            0..20 if archive => Action::Member {
                bucket,
                key,
                member: rng.random_range(0..5),
                range: if rng.random_bool(0.3) {
                    some_range(rng, 8000)
                } else {
                    None
                },
            },
            0..50 => {
                let scale = [100, 70_000, 2 << 20, 12 << 20][rng.random_range(0..4)];
                let range = if rng.random_bool(0.5) {
                    some_range(rng, scale)
                } else {
                    None
                };
                let conditions = some_conditions(rng, self.histories[bucket].event());
                Action::Read {
                    bucket,
                    key,
                    range,
                    conditions,
                    bypass: rng.random_bool(0.03),
                    leave: rng.random_bool(0.1),
                }
            }
            50..58 => Action::Head {
                bucket,
                key,
                conditions: some_conditions(rng, self.histories[bucket].event()),
            },
            58..68 => Action::Put {
                bucket,
                key,
                content: number,
            },
            68..70 => Action::Multipart {
                bucket,
                key,
                content: number,
            },
            70..73 => Action::Copy {
                bucket,
                from: key,
                to: if archive {
                    key
                } else {
                    PLAIN[rng.random_range(0..4)]
                },
            },
            73..77 => Action::Delete { bucket, key },
            77..95 => Action::Behind {
                bucket,
                key,
                content: rng.random_bool(0.9).then_some(number),
            },
            95..98 => Action::Clock {
                by: Duration::from_secs(rng.random_range(1..90)),
            },
            _ => Action::Evict { bucket, key },
        }
    }

    /// Performs an action, and compares. `together`: others act at the same time.
    async fn act(&self, action: &Action, together: bool) {
        match tokio::time::timeout(DEADLINE, self.act_now(action, together)).await {
            Ok(()) => {}
            Err(_) => panic!("{action:?} hangs"),
        }
    }

    async fn act_now(&self, action: &Action, together: bool) {
        let name = |bucket: usize, key: &str| ObjectName::new(BUCKETS[bucket].0, key).unwrap();
        let engine = self.engine();
        match action {
            Action::Read {
                bucket,
                key,
                range,
                conditions,
                bypass,
                leave,
            } => {
                let began = self.histories[*bucket].event();
                let options = ReadOptions {
                    conditions: conditions.0.clone(),
                    bypass: *bypass,
                    ..Default::default()
                };
                let read = engine.read(&name(*bucket, key), *range, &options).await;
                let got = match read {
                    Ok(read) if *leave => {
                        let mut body = read.body;
                        let _ = body.next().await;
                        return;
                    }
                    Ok(read) => Ok((read.meta, read.range, drain(read.body).await)),
                    Err(e) => Err(e),
                };
                let (allowed, ended) = self.allowed(*bucket, key, *bypass, began);
                let expected = |v: &Version| -> Expected {
                    let data = v.data.clone().ok_or(ErrorKind::NotFound)?;
                    conditions
                        .0
                        .check(&self.histories[*bucket].meta_of(v))
                        .map_err(|e| e.kind())?;
                    let bytes = range
                        .map_or(Ok(0..data.len() as u64), |r| r.resolve(data.len() as u64))
                        .map_err(|e| e.kind())?;
                    Ok((data, bytes))
                };
                let what = format!("{action:?} from event {began} to {ended}");
                let meta = got.as_ref().ok().map(|g| g.0.clone());
                self.compare(
                    &what,
                    *bucket,
                    got.map(|g| (g.1, g.2)),
                    meta,
                    &allowed,
                    expected,
                    together,
                );
            }
            Action::Head {
                bucket,
                key,
                conditions,
            } => {
                let began = self.histories[*bucket].event();
                let options = ReadOptions {
                    conditions: conditions.0.clone(),
                    ..Default::default()
                };
                let got = engine.head(&name(*bucket, key), &options).await;
                let (allowed, ended) = self.allowed(*bucket, key, false, began);
                let expected = |v: &Version| -> Expected {
                    v.data.as_ref().ok_or(ErrorKind::NotFound)?;
                    conditions
                        .0
                        .check(&self.histories[*bucket].meta_of(v))
                        .map_err(|e| e.kind())?;
                    Ok((Bytes::new(), 0..0))
                };
                let meta = got.as_ref().ok().map(|h| h.meta.clone());
                let what = format!("{action:?} from event {began} to {ended}");
                self.compare(
                    &what,
                    *bucket,
                    got.map(|_| (0..0, Ok(Vec::new()))),
                    meta,
                    &allowed,
                    expected,
                    together,
                );
            }
            Action::Member {
                bucket,
                key,
                member,
                range,
            } => {
                let began = self.histories[*bucket].event();
                let member = format!("m/{member}.bin");
                let got = match engine
                    .read_member(
                        &name(*bucket, key),
                        &member,
                        *range,
                        &ReadOptions::default(),
                    )
                    .await
                {
                    Ok(read) => Ok((read.archive, read.range, drain(read.body).await)),
                    Err(e) => Err(e),
                };
                let (allowed, ended) = self.allowed(*bucket, key, false, began);
                let expected = |v: &Version| -> Expected {
                    let archive = v.data.clone().ok_or(ErrorKind::NotFound)?;
                    let members = self
                        .members
                        .lock()
                        .get(&fingerprint(&archive))
                        .cloned()
                        .ok_or(ErrorKind::Corrupt)?;
                    let data = &members
                        .iter()
                        .find(|m| m.0 == member)
                        .ok_or(ErrorKind::NotFound)?
                        .1;
                    let bytes = range
                        .map_or(Ok(0..data.len() as u64), |r| r.resolve(data.len() as u64))
                        .map_err(|e| e.kind())?;
                    Ok((data.clone().into(), bytes))
                };
                let meta = got.as_ref().ok().map(|g| g.0.clone());
                let what = format!("{action:?} from event {began} to {ended}");
                self.compare(
                    &what,
                    *bucket,
                    got.map(|g| (g.1, g.2)),
                    meta,
                    &allowed,
                    expected,
                    together,
                );
            }
            Action::Put {
                bucket,
                key,
                content,
            } => {
                let data = self.content(key, *content);
                let began = self.histories[*bucket].event();
                let body = stream::iter([Ok(data.clone())]).boxed();
                let put = engine
                    .put(
                        &name(*bucket, key),
                        PutRequest::default(),
                        Some(data.len() as u64),
                        body,
                    )
                    .await;
                self.wrote(*bucket, key, began, put.map(|p| p.etag));
            }
            Action::Multipart {
                bucket,
                key,
                content,
            } => {
                let data = self.content(key, *content);
                let (name, began) = (name(*bucket, key), self.histories[*bucket].event());
                let done = async {
                    let upload = engine.create_upload(&name, PutRequest::default()).await?;
                    let half = data.len() / 2;
                    let mut parts = Vec::new();
                    for (number, piece) in [(1, data.slice(..half)), (2, data.slice(half..))] {
                        let size = piece.len() as u64;
                        parts.push(
                            engine
                                .upload_part(
                                    &name,
                                    &upload,
                                    number,
                                    size,
                                    stream::iter([Ok(piece)]).boxed(),
                                )
                                .await?,
                        );
                    }
                    engine
                        .complete_upload(&name, &upload, parts, PutCondition::Always)
                        .await
                };
                self.wrote(*bucket, key, began, done.await.map(|p| p.etag));
            }
            Action::Copy { bucket, from, to } => {
                let began = self.histories[*bucket].event();
                let copied = engine
                    .copy(
                        &name(*bucket, from),
                        None,
                        &name(*bucket, to),
                        PutRequest::default(),
                    )
                    .await;
                if !copied
                    .as_ref()
                    .is_err_and(|e| e.kind() == ErrorKind::NotFound)
                {
                    self.wrote(*bucket, to, began, copied.map(|p| p.etag));
                }
            }
            Action::Delete { bucket, key } => {
                let began = self.histories[*bucket].event();
                let deleted = engine.delete(&name(*bucket, key)).await;
                self.wrote(*bucket, key, began, deleted.map(|()| None));
            }
            Action::Behind {
                bucket,
                key,
                content,
            } => {
                let data = content.map(|c| self.content(key, c));
                self.histories[*bucket].change(key, data);
            }
            Action::Clock { by } => History::pass(&self.histories, *by),
            Action::Evict { bucket, key } => {
                if let Some(store) = engine.store() {
                    store.evict(&name(*bucket, key));
                }
            }
        }
    }

    /// The versions that a read ending now may return, and the number of this moment.
    fn allowed(&self, bucket: usize, key: &str, bypass: bool, began: u64) -> (Vec<Version>, u64) {
        let rule = if bypass || self.capacity.is_none() {
            Freshness::Always
        } else {
            BUCKETS[bucket].1
        };
        let ended = self.histories[bucket].event();
        (
            self.histories[bucket].admissible(key, rule, began, ended),
            ended,
        )
    }

    /// A write through the node returned.
    fn wrote(&self, bucket: usize, key: &str, began: u64, result: Result<Option<String>>) {
        match result {
            Ok(etag) => {
                let number = etag.map(|e| e.trim_matches(['"', 'v']).parse().unwrap());
                self.histories[bucket].written(key, number, began);
            }
            Err(e) => assert!(self.faulty, "a write failed: {}", e.describe()),
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn compare(
        &self,
        what: &str,
        bucket: usize,
        got: Result<(std::ops::Range<u64>, Drained)>,
        meta: Option<Arc<ObjectMeta>>,
        allowed: &[Version],
        expected: impl Fn(&Version) -> Expected,
        together: bool,
    ) {
        let may_fail = self.faulty || together;
        let numbers: Vec<u64> = allowed.iter().map(|v| v.number).collect();
        let (range, body) = match got {
            Ok(got) => got,
            Err(e) => {
                let fits = allowed
                    .iter()
                    .any(|v| expected(v).is_err_and(|kind| kind == e.kind()));
                let excused = self.faulty || (together && e.kind() == ErrorKind::VersionChanged);
                assert!(
                    fits || excused,
                    "{what}: {}; versions {numbers:?} may be read",
                    e.describe()
                );
                return;
            }
        };
        let meta = meta.expect("with an answer");
        let version = allowed
            .iter()
            .find(|v| self.histories[bucket].meta_of(v) == *meta);
        let Some(version) = version else {
            panic!("{what}: got {meta:?}, but only versions {numbers:?} may be read")
        };
        match expected(version) {
            Err(kind) => panic!(
                "{what}: got an answer of version {}, where {kind:?} was due",
                version.number
            ),
            Ok((data, bytes)) => {
                assert_eq!(range, bytes, "{what}: version {}", version.number);
                let right = &data[bytes.start as usize..bytes.end as usize];
                match body {
                    Ok(body) => {
                        assert!(
                            body == right,
                            "{what}: version {}: {} bytes are not what they must be",
                            version.number,
                            body.len()
                        )
                    }
                    Err((begun, kind)) => {
                        assert!(
                            right.starts_with(&begun),
                            "{what}: version {}: wrong bytes, then {kind:?}",
                            version.number
                        );
                        assert!(
                            begun.len() < right.len() || self.faulty,
                            "{what}: an error after the last byte: {kind:?}"
                        );
                        // The object changed behind the node's back, and chunks of the old version
                        // are gone: the body can only end like this.
                        let changed = kind == ErrorKind::VersionChanged;
                        assert!(
                            may_fail || changed,
                            "{what}: version {}: {kind:?} after {} bytes",
                            version.number,
                            begun.len()
                        );
                    }
                }
            }
        }
    }
}

/// The data and the range of them that is expected, or the error.
type Expected = Result<(Bytes, std::ops::Range<u64>), ErrorKind>;

/// A body, or the part of it that came before its error.
type Drained = Result<Vec<u8>, (Vec<u8>, ErrorKind)>;

async fn drain(mut body: ByteStream) -> Drained {
    let mut out = Vec::new();
    while let Some(piece) = body.next().await {
        match piece {
            Ok(piece) => out.extend_from_slice(&piece),
            Err(e) => return Err((out, e.kind())),
        }
    }
    Ok(out)
}

fn some_range(rng: &mut StdRng, scale: u64) -> Option<ByteRange> {
    let a = rng.random_range(0..scale);
    Some(match rng.random_range(0..4) {
        0 => ByteRange::From(a),
        1 => ByteRange::Suffix(a),
        _ => ByteRange::Inclusive(a, a + rng.random_range(0..scale)),
    })
}

fn some_conditions(rng: &mut StdRng, event: u64) -> Given {
    let number = rng.random_range(event.saturating_sub(40)..=event);
    let etag = Some(format!("\"v{number}\""));
    let time = Some(number as i64 * 1000);
    let mut c = Conditions::default();
    match rng.random_range(0..20) {
        0 => c.if_match = etag,
        1 => c.if_none_match = etag,
        2 => c.if_modified_since_ms = time,
        3 => c.if_unmodified_since_ms = time,
        _ => {}
    }
    Given(c)
}

fn case(seed: u64, steps: &[u64], log: &Log) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let dir = tempfile::tempdir().unwrap();
    runtime.block_on(async {
        let mut world = World::new(seed, dir.path().join("cache"), log.clone());
        for step in steps {
            world.step(*step).await;
        }
        world.mend().await;
    });
}

#[test]
fn the_engine_agrees_with_the_model() {
    for seed in seeds(1, 4) {
        seeded::run("the engine", seed, 150, case);
    }
}
