//! Eviction by next use, on the store itself: epochs of block and full shuffles over a cache of
//! half the size. It counts what is found with the default rule, with an advisor, and with Belady's
//! optimum (which needs no segments and knows the future), and prints it: `cargo test --release --test
//! store follow:: -- --nocapture`.

use crate::common::*;
use forebay_core::{ObjectName, VersionId};
use forebay_store::{Advisor, Cached, NextUse, Part, Store, StoreConfig};
use forebay_testing::seeded::{rng_of, seeds};
use rand::seq::SliceRandom;
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
};

const EPOCHS: usize = 5;
const ITEMS: usize = 2400;
const ITEM_BYTES: usize = 3000;
/// The space that an item's record takes on disk.
const RECORD_BYTES: usize = 3200;
const SEGMENT: u64 = 48 << 10;
/// Items that are fetched ahead of the reader: they wait in the store.
const AHEAD: usize = 24;

/// Which item is read when, over all epochs.
struct Reads {
    order: Vec<usize>,
    per_epoch: usize,
    /// For each item, when it is read.
    uses: Vec<Vec<usize>>,
}

impl Reads {
    fn new(epochs: Vec<Vec<usize>>) -> Self {
        let per_epoch = epochs[0].len();
        let order: Vec<usize> = epochs.into_iter().flatten().collect();
        let mut uses = vec![Vec::new(); ITEMS];
        order
            .iter()
            .enumerate()
            .for_each(|(at, item)| uses[*item].push(at));
        Self {
            order,
            per_epoch,
            uses,
        }
    }

    fn next(&self, item: usize, at: usize) -> Option<usize> {
        let uses = &self.uses[item];
        uses.get(uses.partition_point(|u| *u < at)).copied()
    }
}

fn full(seed: u64, uses: usize) -> Reads {
    Reads::new(
        (0..EPOCHS as u64)
            .map(|epoch| {
                let mut order: Vec<usize> = (0..ITEMS * uses).map(|row| row / uses).collect();
                order.shuffle(&mut rng_of(seed, epoch));
                order
            })
            .collect(),
    )
}

/// Blocks of 20 items are permuted, then the items of each four blocks together.
fn block(seed: u64) -> Reads {
    Reads::new(
        (0..EPOCHS as u64)
            .map(|epoch| {
                let mut rng = rng_of(seed, epoch);
                let mut blocks: Vec<usize> = (0..ITEMS / 20).collect();
                blocks.shuffle(&mut rng);
                let group = |blocks: &[usize]| {
                    let mut items: Vec<usize> =
                        blocks.iter().flat_map(|b| b * 20..(b + 1) * 20).collect();
                    items.shuffle(&mut rng);
                    items
                };
                blocks.chunks(4).flat_map(group).collect()
            })
            .collect(),
    )
}

struct Plan {
    reads: Arc<Reads>,
    items: HashMap<u128, usize>,
    at: AtomicUsize,
    active: AtomicBool,
}

impl Advisor for Plan {
    fn is_active(&self) -> bool {
        self.active.load(Relaxed)
    }

    fn generation(&self) -> u64 {
        self.active.load(Relaxed) as u64
    }

    fn next_use(&self, entry: &Cached) -> NextUse {
        let Some(item) = self.items.get(&entry.name) else {
            return NextUse::Unknown;
        };
        let at = self.at.load(Relaxed);
        match self.reads.next(*item, at) {
            None => NextUse::Never,
            Some(next) if next / self.reads.per_epoch == at / self.reads.per_epoch => {
                NextUse::ThisRound((next - at) as u64)
            }
            Some(next) => NextUse::LaterRound((next - at) as u64),
        }
    }
}

/// How an item is kept: as a small object, or as a chunk of a large one.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kept {
    Head,
    Chunk,
}

fn put(store: &Store, name: &ObjectName, kept: Kept, data: &[u8]) {
    match kept {
        Kept::Head => store
            .put_head(name, &meta(data.len() as u64, "v"), 1, Some(data))
            .unwrap(),
        Kept::Chunk => store
            .put_part(name, VersionId(1), Part::Chunk(3), data)
            .unwrap(),
    }
}

fn is_here(store: &Store, name: &ObjectName, kept: Kept) -> bool {
    match kept {
        Kept::Head => store.peek(name).is_some(),
        Kept::Chunk => store.has_part(name, VersionId(1), Part::Chunk(3)),
    }
}

fn read(store: &Store, name: &ObjectName, kept: Kept) -> Option<Vec<u8>> {
    match kept {
        Kept::Head => read_inline(store, name),
        Kept::Chunk => read_part(
            store,
            name,
            VersionId(1),
            Part::Chunk(3),
            0..ITEM_BYTES as u64,
        )
        .map(|b| b.to_vec()),
    }
}

struct Outcome {
    /// For each epoch, the share of its reads that needed no fetch.
    found: Vec<f64>,
    /// Bytes written and moved per byte fetched, after the first epoch.
    amplification: f64,
}

impl Outcome {
    fn later(&self) -> f64 {
        self.found[1..].iter().sum::<f64>() / (self.found.len() - 1) as f64
    }

    fn print(&self, what: &str) {
        let epochs: Vec<_> = self
            .found
            .iter()
            .map(|f| format!("{:4.1}", f * 100.0))
            .collect();
        println!(
            "  {what:<10} {} %   written for each byte fetched: {:.2}",
            epochs.join("  "),
            self.amplification
        );
    }
}

fn store_of(dir: &std::path::Path) -> (Store, u64) {
    let half = (ITEMS * ITEM_BYTES / 2) as u64;
    let config = StoreConfig {
        segment_bytes: Some(SEGMENT),
        ..config(&[(dir, half)])
    };
    (open_unsynced(&config), half)
}

fn run(reads: &Arc<Reads>, kept: Kept, advised: bool) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    let (store, half) = store_of(dir.path());
    let names: Vec<ObjectName> = (0..ITEMS).map(|i| name(&format!("item-{i}"))).collect();
    let plan = Arc::new(Plan {
        reads: reads.clone(),
        items: names
            .iter()
            .enumerate()
            .map(|(i, n)| (n.hash128(), i))
            .collect(),
        at: AtomicUsize::new(0),
        active: AtomicBool::new(true),
    });
    if advised {
        store.set_advisor(Some(plan.clone()));
    }
    let amount = || {
        store
            .stats()
            .dirs
            .iter()
            .map(|d| d.written_bytes + d.relocated_bytes)
            .sum::<u64>()
    };
    let (mut found, mut wrote_first, mut fetched_later) = (Vec::new(), 0, 0u64);
    let mut ahead = 0;
    let mut fetched = 0;
    for at in 0..reads.order.len() {
        plan.at.store(at, Relaxed);
        // What is missing is fetched ahead of its turn.
        while ahead < (at + AHEAD).min(reads.order.len()) {
            let item = reads.order[ahead];
            if !is_here(&store, &names[item], kept) {
                put(&store, &names[item], kept, &bytes(item as u64, ITEM_BYTES));
                fetched += 1;
            }
            ahead += 1;
        }
        let item = reads.order[at];
        match read(&store, &names[item], kept) {
            Some(data) => assert!(
                data == bytes(item as u64, ITEM_BYTES),
                "item {item} at {at}"
            ),
            None => {
                // It was evicted before its turn came.
                put(&store, &names[item], kept, &bytes(item as u64, ITEM_BYTES));
                fetched += 1;
            }
        }
        if (at + 1) % reads.per_epoch == 0 {
            if found.is_empty() {
                wrote_first = amount();
            } else {
                fetched_later += fetched;
            }
            found.push(1.0 - fetched as f64 / reads.per_epoch as f64);
            fetched = 0;
            assert!(disk_bytes(dir.path()) <= half);
        }
    }
    Outcome {
        found,
        amplification: (amount() - wrote_first) as f64 / (fetched_later * ITEM_BYTES as u64) as f64,
    }
}

/// The best possible result with a cache of `capacity` items that may refuse any.
fn optimum(reads: &Reads, capacity: usize) -> Outcome {
    let mut held: BTreeSet<(usize, usize)> = BTreeSet::new();
    let mut next_of = vec![None; ITEMS];
    let mut found = Vec::new();
    let mut hits = 0;
    for (at, item) in reads.order.iter().enumerate() {
        if next_of[*item].take() == Some(at) && held.remove(&(at, *item)) {
            hits += 1;
        }
        if let Some(next) = reads.next(*item, at + 1) {
            held.insert((next, *item));
            next_of[*item] = Some(next);
            if held.len() > capacity {
                held.pop_last();
            }
        }
        if (at + 1) % reads.per_epoch == 0 {
            found.push(hits as f64 / reads.per_epoch as f64);
            hits = 0;
        }
    }
    Outcome {
        found,
        amplification: 0.0,
    }
}

fn compare(what: &str, reads: Reads, kept: Kept) -> (Outcome, Outcome, Outcome) {
    let reads = Arc::new(reads);
    let (default, advised) = (run(&reads, kept, false), run(&reads, kept, true));
    let best = optimum(&reads, ITEMS / 2 * ITEM_BYTES / RECORD_BYTES);
    println!("{what}, {kept:?}: found in each epoch");
    default.print("default");
    advised.print("by plan");
    best.print("optimum");
    (default, advised, best)
}

#[test]
fn what_is_needed_last_goes_first() {
    for seed in seeds(1, 1) {
        for kept in [Kept::Head, Kept::Chunk] {
            for (what, reads) in [("full", full(seed, 1)), ("block", block(seed))] {
                let (default, advised, best) = compare(what, reads, kept);
                // The active segment, the room kept free, and what waits ahead of the reader take a
                // twentieth of this small cache.
                assert!(
                    advised.later() > best.later() * 0.9,
                    "seed {seed} {what}: {} of {}",
                    advised.later(),
                    best.later()
                );
                assert!(
                    advised.later() > default.later() + 0.1,
                    "seed {seed} {what}: {} by default",
                    default.later()
                );
                assert!(
                    advised.amplification < 1.6,
                    "seed {seed} {what}: {}",
                    advised.amplification
                );
            }
        }
        // Each item holds many rows, read one by one.
        let (default, advised, best) = compare("rows of chunks, full", full(seed, 12), Kept::Chunk);
        assert!(
            advised.later() > default.later() + 0.1,
            "seed {seed}: {} by default",
            default.later()
        );
        assert!(
            advised.later() > best.later() * 0.75,
            "seed {seed}: {} of {}",
            advised.later(),
            best.later()
        );
        assert!(
            advised.amplification < 2.2,
            "seed {seed}: {}",
            advised.amplification
        );
    }
}

#[test]
fn a_plan_that_ended_holds_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = store_of(dir.path());
    let reads = Arc::new(full(7, 1));
    let planned: Vec<ObjectName> = (0..ITEMS).map(|i| name(&format!("item-{i}"))).collect();
    let others: Vec<ObjectName> = (0..ITEMS).map(|i| name(&format!("other-{i}"))).collect();
    let plan = Arc::new(Plan {
        reads,
        items: planned
            .iter()
            .enumerate()
            .map(|(i, n)| (n.hash128(), i))
            .collect(),
        at: AtomicUsize::new(0),
        active: AtomicBool::new(true),
    });
    store.set_advisor(Some(plan.clone()));
    let here = |names: &[ObjectName]| names.iter().filter(|n| store.peek(n).is_some()).count();
    let fill = |names: &[ObjectName]| {
        names
            .iter()
            .enumerate()
            .for_each(|(i, n)| put(&store, n, Kept::Head, &bytes(i as u64, ITEM_BYTES)))
    };
    fill(&planned[..ITEMS * 2 / 5]);
    let before = here(&planned);
    fill(&others);
    assert!(
        here(&planned) > before * 9 / 10,
        "{} of {before}: what a plan wants stays",
        here(&planned)
    );
    plan.active.store(false, Relaxed);
    fill(&others);
    assert_eq!(
        here(&planned),
        0,
        "nobody wants it any more, and newer data came"
    );
}

#[test]
fn what_was_removed_or_replaced_stays_away_after_eviction_in_the_middle() {
    for seed in seeds(100, 3) {
        let dir = tempfile::tempdir().unwrap();
        let half = (ITEMS * ITEM_BYTES / 2) as u64;
        let config = StoreConfig {
            segment_bytes: Some(SEGMENT),
            ..config(&[(dir.path(), half)])
        };
        let names: Vec<ObjectName> = (0..ITEMS).map(|i| name(&format!("item-{i}"))).collect();
        let mut rng = rng_of(seed, 0);
        let mut current: HashMap<usize, String> = HashMap::new();
        for round in 0..4 {
            let store = open_unsynced(&config);
            let plan = Plan {
                reads: Arc::new(full(seed, 1)),
                items: names
                    .iter()
                    .enumerate()
                    .map(|(i, n)| (n.hash128(), i))
                    .collect(),
                at: AtomicUsize::new(round * 1000),
                active: AtomicBool::new(true),
            };
            store.set_advisor(Some(Arc::new(plan)));
            for i in 0..ITEMS * 2 {
                let item = rand::RngExt::random_range(&mut rng, 0..ITEMS);
                if i % 5 == 0 {
                    store.remove(&names[item]);
                    current.remove(&item);
                } else {
                    let etag = format!("{round}-{i}");
                    store
                        .put_head(
                            &names[item],
                            &meta(ITEM_BYTES as u64, &etag),
                            1,
                            Some(&bytes(i as u64, ITEM_BYTES)),
                        )
                        .unwrap();
                    current.insert(item, format!("\"{etag}\""));
                }
            }
            // Killed, and without a checkpoint: all records are read again.
            drop(store);
            let _ = std::fs::remove_file(dir.path().join("checkpoint"));
            let store = open_unsynced(&config);
            let mut here = 0;
            for (item, name) in names.iter().enumerate() {
                if let Some(head) = read_head(&store, name) {
                    assert_eq!(
                        head.meta.etag.as_ref(),
                        current.get(&item),
                        "seed {seed} round {round}: item {item}"
                    );
                    here += 1;
                }
            }
            assert!(here > ITEMS / 4, "seed {seed}: {here} are left");
            let tombstones = store.stats().dirs[0].used_bytes - store.stats().dirs[0].live_bytes;
            assert!(
                tombstones < half / 2,
                "seed {seed}: {tombstones} bytes of no use"
            );
        }
    }
}

/// Some of it is owned, the rest is others'.
struct Owners {
    /// By the name's hash.
    owned: HashSet<u128>,
    generation: AtomicUsize,
}

impl Advisor for Owners {
    fn is_active(&self) -> bool {
        true
    }

    fn generation(&self) -> u64 {
        self.generation.load(Relaxed) as u64
    }

    fn next_use(&self, entry: &Cached) -> NextUse {
        match self.owned.contains(&entry.name) {
            true => NextUse::Owned,
            false => NextUse::Never,
        }
    }
}

#[test]
fn what_others_own_goes_first_and_the_clock_goes_on_for_the_rest() {
    for kept in [Kept::Head, Kept::Chunk] {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = store_of(dir.path());
        let of = |of: &str| -> Vec<_> { (0..ITEMS).map(|i| name(&format!("{of}-{i}"))).collect() };
        let (own, others) = (of("own"), of("other"));
        let advice = Owners {
            owned: own.iter().map(ObjectName::hash128).collect(),
            generation: AtomicUsize::new(1),
        };
        store.set_advisor(Some(Arc::new(advice)));
        let data = |i: usize| bytes(i as u64, ITEM_BYTES);
        let here = |names: &[ObjectName]| -> usize {
            names.iter().filter(|n| is_here(&store, n, kept)).count()
        };
        // A third is owned, as in a cluster of three. All of it is read.
        for (i, mine) in own.iter().enumerate().take(300) {
            put(&store, mine, kept, &data(i));
            for other in [2 * i, 2 * i + 1] {
                put(&store, &others[other], kept, &data(other));
                assert!(read(&store, &others[other], kept).is_some());
            }
        }
        assert_eq!((here(&own), here(&others)), (300, 600));
        // What is owned takes all the room; nothing of it goes as long as others' is here.
        let mut most = 300;
        while here(&others) > 0 && most < ITEMS {
            put(&store, &own[most], kept, &data(most));
            most += 1;
            let lacks = most - here(&own);
            assert!(lacks <= most / 50, "{kept:?}: {lacks} of {most} went");
        }
        assert!(most > 900, "{kept:?}: {most}");
        // Then what was not read goes.
        let warm: Vec<_> = own[..100].to_vec();
        for (i, mine) in own.iter().enumerate().skip(most) {
            for name in &warm {
                read(&store, name, kept);
            }
            put(&store, mine, kept, &data(i));
        }
        assert!(here(&warm) > 95, "{kept:?}: {} of 100", here(&warm));
        assert!(here(&own[100..most]) < most / 2, "{kept:?}");
    }
}

#[test]
fn an_offer_takes_only_room_to_spare() {
    let dir = tempfile::tempdir().unwrap();
    let (store, half) = store_of(dir.path());
    let data = bytes(1, ITEM_BYTES);
    let of = meta(ITEM_BYTES as u64, "v");
    let offer = |key: &str| store.offer_head(&name(key), &of, 1, Some(&data)).unwrap();
    let mut taken = 0;
    while offer(&format!("offered-{taken}")) {
        taken += 1;
    }
    let stats = &store.stats().dirs[0];
    assert_eq!(stats.evicted_records, 0);
    let spare = half - stats.used_bytes;
    assert!(
        (3 * SEGMENT..6 * SEGMENT).contains(&spare),
        "{spare} bytes are left"
    );
    assert!(!store.takes_offer(&name("more"), None, ITEM_BYTES as u64));
    let part = Part::Chunk(0);
    assert!(
        !store
            .offer_part(&name("more"), VersionId(1), part, &data)
            .unwrap()
    );
    // An older head of the name is outdated all the same.
    let newer = meta(ITEM_BYTES as u64, "newer");
    let first = name("offered-0");
    assert!(!store.offer_head(&first, &newer, 1, Some(&data)).unwrap());
    assert!(store.peek(&first).is_none());
    // A pin wants it here.
    let pinned = name("pinned");
    store.pin(&pinned).unwrap();
    assert!(store.takes_offer(&pinned, None, ITEM_BYTES as u64));
    assert!(store.offer_head(&pinned, &of, 1, Some(&data)).unwrap());
    assert!(
        store
            .offer_part(&pinned, VersionId(1), part, &data)
            .unwrap()
    );
}
