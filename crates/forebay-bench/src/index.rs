//! How a cache with very many small objects performs: memory of its index, time until it is ready
//! again, and speed compared with smaller caches.
//!
//! Caches of three sizes are filled through the store itself (ten million objects over HTTP would
//! measure patience). Then a node is started over each, in its own process, with an origin that
//! holds nothing: whatever it serves comes from the cache. A sample of each cache is read with
//! every byte compared, then batches of entries drawn from all over it, node after node in turns,
//! so that other load on the machine affects all of them alike. Then the same is done with a few
//! thousand entries, which are also spread over the whole cache but fit into the CPU's caches. What
//! is slower there is due to the size of the cache; what is slower in the first measurement is also
//! due to the amount of data that is read.
//!
//! The memory of an index is the most that its node held since its start, less the same for the
//! smallest cache's node: loading is part of it. Ways to become ready again: after a clean stop;
//! the same with nothing of the cache in the page cache, as after a reboot; after a kill, with an
//! eighth of the entries written since the last checkpoint; and with no checkpoint at all.

use crate::{
    child::{Node, NodeOptions},
    data::{self, BUCKET, Dataset, Random},
    interrupt,
    load::Load,
    measure::{self, Timing},
    report::{Figures, Goal, Row},
    request::{Kind, Maker, Request},
    site::{Asked, Plan},
    usage::Process,
};
use forebay_core::{
    Attributes, Clock, Error, ObjectMeta, ObjectName, Result, SystemClock, crc32c,
    units::format_bytes,
};
use forebay_server::{OriginBuckets, config::NamedOrigin};
use forebay_store::{DirConfig, Store, StoreConfig};
use rustix::fs::Advice;
use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// Entries of the smallest cache; the next has a tenth of the largest.
const SMALLEST: u64 = 10_000;
const BATCH: usize = 128;
/// Batches to choose from: the same number for each cache, so that making the client's requests
/// costs the same.
const BATCHES: usize = 2048;
const CLIENTS: usize = 4;
/// The most disk space that one entry should need besides its bytes: record, checkpoint and the
/// next checkpoint.
const ENTRY_DISK_BYTES: u64 = 450;
/// One in this many entries was written by a killed node after its last checkpoint.
const TAIL_SHARE: u64 = 8;
/// Entries between two checks for an interruption.
const CHECK_EVERY: u64 = 1 << 16;
const GIB: f64 = (1u64 << 30) as f64;

/// Names as in real data sets, 40 bytes including the bucket's.
fn key(i: u64) -> String {
    format!("train/n{:05}/img_{i:010}_crop.jpg", i % 10_007)
}

/// One cache.
struct Case<'a> {
    plan: &'a Plan,
    count: u64,
    dir: tempfile::TempDir,
}

impl Case<'_> {
    fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    /// Large enough that nothing is evicted.
    fn capacity(&self) -> u64 {
        self.count * (self.plan.size + ENTRY_DISK_BYTES) * 2 + (1 << 30)
    }

    /// The bucket's origin, an empty directory, as the node's `--origin` has it.
    fn origin(&self) -> Result<String> {
        let origin = self.dir.path().join("origin");
        std::fs::create_dir_all(&origin).map_err(|e| Error::file("cannot make", &origin, e))?;
        Ok(format!("{BUCKET}=file://{}", origin.display()))
    }

    fn open(&self, background: bool) -> Result<Store> {
        // Records are found under the origin that they came from.
        let origins = OriginBuckets::open(&[NamedOrigin::parse(&self.origin()?)?])?;
        let dirs = vec![DirConfig {
            path: self.cache(),
            capacity_bytes: self.capacity(),
        }];
        Store::open(
            StoreConfig {
                dirs,
                background,
                sources: origins.sources(),
                ..StoreConfig::default()
            },
            Arc::new(SystemClock),
        )
    }

    fn fill(&self, store: &Store, numbers: std::ops::Range<u64>) -> Result<()> {
        let (now, size) = (SystemClock.now_secs(), self.plan.size);
        for i in numbers {
            let bytes = data::content(self.plan.seed, i, size);
            let attributes = Attributes {
                content_type: Some("image/jpeg".into()),
                ..Attributes::default()
            };
            let meta = ObjectMeta {
                size,
                etag: Some(format!("\"{i:032x}\"")),
                last_modified_ms: 1_700_000_000_000,
                attributes,
            };
            store.put_head(&ObjectName::new(BUCKET, key(i))?, &meta, now, Some(&bytes))?;
            if i % CHECK_EVERY == 0 {
                interrupt::check()?;
            }
        }
        Ok(())
    }

    /// Starts a node over it; also returns how long that took.
    fn start(&self) -> Result<(Node, Duration)> {
        let options = NodeOptions {
            program: self.plan.program.clone(),
            origin: self.origin()?.into(),
            cache: self.cache(),
            cache_bytes: self.capacity(),
            sets: self.plan.sets.clone(),
        };
        let began = Instant::now();
        let node = Node::start(&options)?;
        Ok((node, began.elapsed()))
    }

    /// Some of the entries, from all over the cache.
    fn sample(&self) -> Dataset {
        let count = self.count.min((BATCH * BATCHES) as u64);
        let step = self.count / count;
        let mut random = Random::new(self.plan.seed, self.count);
        Dataset::new(
            BUCKET,
            (0..count).map(|i| {
                let i = i * step + random.below(step as usize) as u64;
                (
                    key(i),
                    None,
                    self.plan.size,
                    Some(crc32c(&data::content(self.plan.seed, i, self.plan.size))),
                )
            }),
        )
    }
}

/// A node over a cache, and the requests it gets.
struct Serving {
    node: Node,
    asked: Asked,
    data: Dataset,
    requests: Vec<Request>,
    /// For as many entries as the smallest cache has.
    few: Vec<Request>,
}

pub fn run(plan: &Plan, timing: &Timing, mut say: impl FnMut(&str)) -> Result<Vec<Row>> {
    let mut counts = vec![
        SMALLEST.min(plan.count),
        (plan.count / 10).max(1),
        plan.count,
    ];
    counts.sort_unstable();
    counts.dedup();
    let dir = data::scratch(plan.within.as_deref())?;
    let need = counts.iter().sum::<u64>() * (plan.size + ENTRY_DISK_BYTES) + (1 << 30);
    let free = free_bytes(dir.path())?;
    if free < need {
        return Err(Error::invalid(format!(
            "{} are free here, and {} may be needed",
            format_bytes(free),
            format_bytes(need)
        ))
        .hint("--dir names another place, --count makes it smaller"));
    }
    say(&format!(
        "index: up to {} of {} that are free will be taken for a while",
        format_bytes(need),
        format_bytes(free)
    ));
    drop(dir);

    let (mut cases, mut known) = (Vec::new(), Vec::new());
    for &count in &counts {
        say(&format!(
            "index: writing {} objects",
            forebay_core::units::grouped(count)
        ));
        let case = Case {
            plan,
            count,
            dir: data::scratch(plan.within.as_deref())?,
        };
        known.push(written(&case)?);
        cases.push(case);
    }
    let mut serving = Vec::new();
    for (case, known) in cases.iter().zip(&mut known) {
        forget_pages(&case.cache())?;
        let (node, cold) = case.start()?;
        drop(node);
        let (node, ready) = case.start()?;
        known.insert("ready_us".into(), micros(ready));
        known.insert("ready_disk_cold_us".into(), micros(cold));
        say(&format!(
            "index: {} objects: a sample is read, every byte compared",
            forebay_core::units::grouped(case.count)
        ));
        serving.push(serve(case, node, timing)?);
    }
    let peak = |s: &Serving| {
        s.asked
            .process
            .and_then(Process::peak_bytes)
            .unwrap_or_default() as f64
    };
    let least = serving.first().map_or(0.0, peak);
    for (s, known) in serving.iter().zip(&mut known).skip(1) {
        known.insert("index_bytes".into(), peak(s) - least);
    }
    say("index: batches of all caches in turns");
    let mut runs: Vec<Vec<Figures>> = vec![Vec::new(); serving.len()];
    for _ in 0..timing.repeats {
        for (s, runs) in serving.iter().zip(&mut runs) {
            let mut figures = turn(s, &s.requests, timing)?;
            figures.insert(
                "few_per_s".into(),
                turn(s, &s.few, timing)?["objects_per_s"],
            );
            runs.push(figures);
            interrupt::check()?;
        }
        let least = runs[0].last().cloned().unwrap_or_default();
        for runs in &mut runs[1..] {
            if let Some(last) = runs.last_mut() {
                last.insert(
                    "of_smallest".into(),
                    last["objects_per_s"] / least["objects_per_s"],
                );
                last.insert(
                    "of_smallest_by_few".into(),
                    last["few_per_s"] / least["few_per_s"],
                );
            }
        }
    }
    drop(serving);
    if let (Some(case), Some(known)) = (cases.last(), known.last_mut()) {
        say("index: a node that was killed, and one without a checkpoint");
        killed(case, known)?;
    }
    let last = cases.len() - 1;
    Ok(cases
        .iter()
        .zip(known)
        .zip(runs)
        .enumerate()
        .map(|(i, ((case, known), mut runs))| {
            runs.iter_mut().for_each(|r| r.extend(known.clone()));
            let goals = if i == last { goals() } else { vec![] };
            Row::of(
                format!(
                    "cache of {} × {}",
                    forebay_core::units::grouped(case.count),
                    format_bytes(plan.size)
                ),
                &runs,
                goals,
            )
        })
        .collect())
}

fn goals() -> Vec<Goal> {
    let ready =
        ["ready_us", "ready_disk_cold_us", "ready_killed_us"].map(|f| Goal::at_most(f, 10e6));
    [
        Goal::at_most("index_bytes", GIB),
        Goal::at_least("of_smallest", 0.9),
        Goal::at_least("of_smallest_by_few", 0.9),
    ]
    .into_iter()
    .chain(ready)
    .collect()
}

/// Fills a cache and closes it.
fn written(case: &Case) -> Result<Figures> {
    let store = case.open(true)?;
    let began = Instant::now();
    case.fill(&store, 0..case.count)?;
    let rate = case.count as f64 / began.elapsed().as_secs_f64();
    let began = Instant::now();
    store.close()?;
    let (closed, stats) = (began.elapsed(), store.stats());
    Ok(Figures::from([
        ("puts_per_s".to_owned(), rate),
        (
            "table_bytes_per_entry".to_owned(),
            stats.index_bytes as f64 / stats.entries as f64,
        ),
        (
            "checkpoint_bytes".to_owned(),
            stats.dirs.iter().map(|d| d.checkpoint_bytes).sum::<u64>() as f64,
        ),
        ("close_us".to_owned(), micros(closed)),
    ]))
}

fn serve(case: &Case, node: Node, timing: &Timing) -> Result<Serving> {
    let asked = Asked::of(&node);
    let data = case.sample();
    asked.warm(&data, timing.seed)?;
    let maker = Maker {
        data: &data,
        host: asked.host(),
        token: None,
        sign: None,
    };
    let mut random = Random::new(timing.seed, 3);
    let all = data.entries.len();
    let mut batches = |step: usize| -> Vec<Request> {
        let mut one = || {
            (0..BATCH)
                .map(|_| (random.below(all / step) * step) as u32)
                .collect::<Vec<_>>()
        };
        (0..BATCHES).map(|_| maker.batch(&one())).collect()
    };
    let (requests, few) = (batches(1), batches((all / SMALLEST as usize).max(1)));
    Ok(Serving {
        node,
        asked,
        data,
        requests,
        few,
    })
}

fn turn(s: &Serving, requests: &[Request], timing: &Timing) -> Result<Figures> {
    let load = Load {
        at: &s.node.tcp,
        kind: Kind::Batch,
        data: &s.data,
        requests,
        clients: CLIENTS,
        buffer_bytes: timing.buffer_bytes,
        ramp: timing.ramp(),
        window: timing.window,
        verify: false,
        once: false,
        seed: timing.seed,
        // Its peak here is that of its whole life; a load would reset it.
        server: None,
        by_gets: None,
    };
    measure::observed(&load, BATCH, &s.asked)
}

/// The files that a killed node leaves: dropping the store without closing it leaves the same.
fn killed(case: &Case, figures: &mut Figures) -> Result<()> {
    let store = case.open(false)?;
    case.fill(&store, case.count..case.count + case.count / TAIL_SHARE)?;
    drop(store);
    let (node, ready) = case.start()?;
    figures.insert("ready_killed_us".into(), micros(ready));
    drop(node);
    let checkpoint = case.cache().join("checkpoint");
    std::fs::remove_file(&checkpoint).map_err(|e| Error::file("cannot remove", &checkpoint, e))?;
    let (node, ready) = case.start()?;
    figures.insert("ready_no_checkpoint_us".into(), micros(ready));
    drop(node);
    Ok(())
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn free_bytes(dir: &Path) -> Result<u64> {
    forebay_store::disk::space_of(dir)
        .map(|space| space.available_bytes)
        .map_err(|e| Error::file("cannot ask for the free space of", dir, e))
}

/// Asks the kernel to drop a closed cache's files from the page cache.
fn forget_pages(dir: &Path) -> Result<()> {
    let fail = |e| Error::file("cannot read", dir, e);
    for entry in std::fs::read_dir(dir).map_err(fail)? {
        let file = File::open(entry.map_err(fail)?.path()).map_err(fail)?;
        file.sync_all().map_err(fail)?;
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).map_err(|e| fail(e.into()))?;
    }
    Ok(())
}
