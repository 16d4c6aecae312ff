//! Eviction under readers, and writers alongside removals, in many schedules: in whatever order the
//! threads take turns, a read gives what was put last or nothing, a removed object stays away, a
//! pinned one stays, and the directory stays within its size.
//!
//! A schedule that fails is printed together with what replays it. `FOREBAY_TEST_CASES=<factor>`
//! multiplies the number of schedules tried.

use crate::{
    DirConfig, Store, StoreConfig, Wait,
    dir::Class,
    disk::RealDisk,
    faults::{Fault, Faults, FaultyDisk, Op, Rule},
};
use forebay_core::{ManualClock, ObjectMeta, ObjectName};
use shuttle::{Config, Runner, scheduler::RandomScheduler, thread};
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

const CAPACITY: u64 = 96 << 10;
const SEGMENT: u64 = 12 << 10;
const NOW_SECS: u32 = 1_800_000_000;
const RECORD: usize = 3000;

fn explore(schedules: usize, test: impl Fn(&Path) + Send + Sync + 'static) {
    let factor: usize = std::env::var("FOREBAY_TEST_CASES")
        .map_or(1, |n| n.parse().expect("FOREBAY_TEST_CASES is a number"));
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    config.silence_warnings = true;
    let scheduler = match std::env::var("FOREBAY_TEST_SEED") {
        Ok(seed) => RandomScheduler::new_from_seed(
            seed.parse().expect("FOREBAY_TEST_SEED is a number"),
            schedules * factor,
        ),
        Err(_) => RandomScheduler::new(schedules * factor),
    };
    Runner::new(scheduler, config).run(move || {
        let dir = tempfile::tempdir().unwrap();
        test(dir.path());
    });
}

fn open(dir: &Path) -> Arc<Store> {
    opened(dir).0
}

fn opened(dir: &Path) -> (Arc<Store>, Faults) {
    let (disk, faults) = FaultyDisk::new(RealDisk);
    faults.add(Rule::new(Op::Sync, Fault::Skip));
    let config = StoreConfig {
        dirs: vec![DirConfig {
            path: dir.to_owned(),
            capacity_bytes: CAPACITY,
        }],
        segment_bytes: Some(SEGMENT),
        keep_free_bytes: Some(0),
        background: false,
        ..StoreConfig::default()
    };
    let clock = ManualClock::at(Duration::from_secs(NOW_SECS.into()));
    let store = Store::open_on(Arc::new(disk), config, Arc::new(clock)).unwrap();
    (Arc::new(store), faults)
}

fn name(i: u64) -> ObjectName {
    ObjectName::new("bucket", format!("o{i}")).unwrap()
}

fn put(store: &Store, i: u64, version: u64) {
    let data = vec![version as u8; RECORD];
    let meta = ObjectMeta {
        size: RECORD as u64,
        etag: Some(format!("\"{version}\"")),
        last_modified_ms: 1,
        attributes: Default::default(),
    };
    store.put_head(&name(i), &meta, 1, Some(&data)).unwrap();
}

/// The version that is cached, after checking its bytes.
fn version(store: &Store, i: u64) -> Option<u64> {
    let head = store.head(&name(i), Wait::May).unwrap()?;
    let version = head
        .meta
        .etag
        .as_ref()
        .unwrap()
        .trim_matches('"')
        .parse()
        .unwrap();
    assert_eq!(head.data.unwrap(), vec![version as u8; RECORD], "o{i}");
    Some(version)
}

fn check_space(dir: &Path, store: &Store) {
    let files = std::fs::read_dir(dir)
        .unwrap()
        .map(|f| f.unwrap().metadata().unwrap().len());
    let used: u64 = files.sum();
    assert!(used <= CAPACITY, "{used} bytes on a disk of {CAPACITY}");
    let stats = &store.stats().dirs[0];
    assert!(
        stats.live_bytes <= stats.used_bytes && stats.used_bytes <= CAPACITY,
        "{stats:?}"
    );
}

#[test]
fn eviction_under_readers_in_many_schedules() {
    explore(150, |dir| {
        let store = open(dir);
        (0..12).for_each(|i| put(&store, i, 1));
        store.pin(&name(3)).unwrap();
        put(&store, 3, 1);
        let writers = (0..2u64).map(|w| {
            let store = store.clone();
            thread::spawn(move || (0..14).for_each(|i| put(&store, 100 + w * 100 + i, 1)))
        });
        let readers = (0..2u64).map(|r| {
            let store = store.clone();
            thread::spawn(move || {
                for i in 0..12 {
                    let i = (i * 5 + r) % 12;
                    let found = version(&store, i);
                    assert!(found.is_none_or(|v| v == 1), "o{i} is of version {found:?}");
                    assert_eq!(version(&store, 3), Some(1), "what is pinned stays");
                }
            })
        });
        let all: Vec<_> = writers.chain(readers).collect();
        all.into_iter().for_each(|t| t.join().unwrap());
        assert!(
            store.stats().dirs[0].evicted_records > 0,
            "it came to evicting"
        );
        check_space(dir, &store);
    });
}

/// What is pinned in memory is pinned on the disk, whoever pinned and unpinned at the same time.
#[test]
fn pins_and_unpins_of_one_name_in_many_schedules() {
    explore(300, |dir| {
        let store = open(dir);
        put(&store, 1, 1);
        let pinner = |copies: u8| {
            let store = store.clone();
            thread::spawn(move || {
                store.pin_on(&name(1), copies).unwrap();
            })
        };
        let unpinner = {
            let store = store.clone();
            thread::spawn(move || {
                store.unpin(&name(1));
            })
        };
        let all = [pinner(1), unpinner, pinner(2)];
        all.into_iter().for_each(|t| t.join().unwrap());
        let pinned = store.pinned_on();
        // As after a kill: the records are read.
        drop(store);
        assert_eq!(open(dir).pinned_on(), pinned);
    });
}

#[test]
fn writers_and_removals_of_one_name_in_many_schedules() {
    explore(150, |dir| {
        let store = open(dir);
        let written = Arc::new(AtomicU64::new(0));
        put(&store, 0, 0);
        // One thread alone writes and removes a name; others fill the log, so that its records are
        // moved and dropped meanwhile.
        let owner = {
            let (store, written) = (store.clone(), written.clone());
            thread::spawn(move || {
                for v in 1..8 {
                    put(&store, 0, v);
                    written.store(v, Relaxed);
                    let found = version(&store, 0);
                    assert!(
                        found.is_none_or(|f| f == v),
                        "{v} was put, {found:?} is there"
                    );
                    if v % 3 == 0 {
                        store.remove(&name(0));
                        assert_eq!(version(&store, 0), None, "it was removed");
                    }
                }
            })
        };
        let reader = {
            let (store, written) = (store.clone(), written.clone());
            thread::spawn(move || {
                for _ in 0..10 {
                    let before = written.load(Relaxed);
                    let found = version(&store, 0);
                    assert!(
                        found.is_none_or(|f| f >= before),
                        "{before} had been put, {found:?} is there"
                    );
                }
            })
        };
        let filler = {
            let store = store.clone();
            thread::spawn(move || (0..25).for_each(|i| put(&store, 100 + i, 1)))
        };
        [owner, reader, filler]
            .into_iter()
            .for_each(|t| t.join().unwrap());
        let last = version(&store, 0);
        assert!(last.is_none_or(|v| v == 7), "{last:?}");
        check_space(dir, &store);
        // What a kill leaves: no older version comes back.
        drop(store);
        let again = version(&open(dir), 0);
        assert!(
            again.is_none_or(|v| Some(v) == last),
            "{again:?} after a restart, {last:?} before"
        );
    });
}

#[test]
fn what_is_granted_is_never_taken_for_what_is_on_the_disk_in_many_schedules() {
    explore(150, |dir| {
        let (store, faults) = opened(dir);
        let of = &store.inner.dirs[0];
        // The file system has less room than the cache's size.
        let room = CAPACITY - SEGMENT;
        let used = of.state.lock().used;
        faults.say_available(Some(room - used));
        let other = {
            let store = store.clone();
            thread::spawn(move || {
                for _ in 0..4 {
                    let of = &store.inner.dirs[0];
                    assert!(of.set_aside(4 << 10, u64::MAX));
                    of.give_back(4 << 10, 4 << 10);
                }
            })
        };
        for _ in 0..6 {
            of.measure(NOW_SECS);
            assert_eq!(of.effective(), room);
        }
        other.join().unwrap();
    });
}

#[test]
fn what_was_squeezed_stays_so_whoever_measures_in_many_schedules() {
    explore(300, |dir| {
        let (store, faults) = opened(dir);
        faults.say_available(Some(1 << 40));
        store.inner.dirs[0].measure(NOW_SECS);
        (0..20).for_each(|i| put(&store, i, 1));
        let other = {
            let store = store.clone();
            thread::spawn(move || (0..3).for_each(|_| store.inner.dirs[0].measure(NOW_SECS)))
        };
        let of = &store.inner.dirs[0];
        let (before, squeezed) = of.squeeze(NOW_SECS);
        other.join().unwrap();
        assert_eq!((before, of.effective()), (CAPACITY, squeezed));
        assert!(squeezed < CAPACITY);
        of.unsqueeze((before, squeezed));
        assert_eq!(of.effective(), CAPACITY);
    });
}

fn no_space() -> std::io::Error {
    std::io::Error::from_raw_os_error(libc::ENOSPC)
}

#[test]
fn room_that_was_made_counts_whoever_takes_it_in_many_schedules() {
    explore(300, |dir| {
        let store = open(dir);
        (0..20).for_each(|i| put(&store, i, 1));
        let of = &store.inner.dirs[0];
        let seen = of.seen();
        let _ = of.write_failed(no_space(), NOW_SECS);
        let other = {
            let store = store.clone();
            thread::spawn(move || {
                let of = &store.inner.dirs[0];
                for _ in 0..6 {
                    if of.try_claim(SEGMENT, Class::Relocation) {
                        of.unclaim(SEGMENT);
                    }
                }
            })
        };
        assert!(store.inner.relieve(of, seen), "a segment was given up");
        other.join().unwrap();
    });
}

#[test]
fn a_disk_on_which_another_write_found_room_since_has_some() {
    explore(1, |dir| {
        let store = open(dir);
        (0..20).for_each(|i| put(&store, i, 1));
        let of = &store.inner.dirs[0];
        let (seen, used) = (of.seen(), of.state.lock().used);
        assert!(!store.inner.relieve(of, seen), "no write failed");
        let _ = of.write_failed(no_space(), NOW_SECS);
        of.write_succeeded();
        assert!(store.inner.relieve(of, seen));
        assert_eq!(of.state.lock().used, used, "nothing goes for it");
    });
}
