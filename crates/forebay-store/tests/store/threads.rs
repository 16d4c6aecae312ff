//! Readers and writers at the same time, during eviction, checkpoints and pins.

use crate::common::*;
use forebay_store::{
    Part, Store, StoreConfig, Wait,
    disk::RealDisk,
    faults::{Fault, FaultyDisk, Op, Rule},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

const WRITERS: u64 = 3;
const READERS: u64 = 3;
const NAMES: u64 = 60;

fn content(version: u64) -> Vec<u8> {
    bytes(version, (version.wrapping_mul(104_729) % 40_000) as usize)
}

#[test]
fn readers_and_writers_never_see_anything_but_what_was_put() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let capacity = 2 << 20;
    let config = StoreConfig {
        segment_bytes: Some(128 << 10),
        checkpoint_records: 500,
        background: true,
        ..config(&[(a.path(), capacity), (b.path(), capacity)])
    };
    let store = open_unsynced(&config);
    let (stop, reads, hits) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    store.pin(&name("pinned")).unwrap();
    store
        .put_head(
            &name("pinned"),
            &meta(20_000, "p"),
            5,
            Some(&bytes(1, 20_000)),
        )
        .unwrap();
    std::thread::scope(|scope| {
        for w in 0..WRITERS {
            let (store, stop) = (&store, &stop);
            scope.spawn(move || {
                let mut rng = StdRng::seed_from_u64(w);
                let mut version = w * 1_000_000;
                while !stop.load(Relaxed) {
                    let n = name(&format!("{w}/{}", rng.random_range(0..NAMES)));
                    version += 1;
                    let data = content(version);
                    let m = meta(data.len() as u64, &version.to_string());
                    match rng.random_range(0..10) {
                        0..6 => {
                            store.put_head(&n, &m, 5, Some(&data)).unwrap();
                            // Only this thread writes the name: it is this version, or evicted.
                            assert!(read_head(store, &n).is_none_or(|h| *h.meta == m));
                        }
                        6..8 => {
                            store.put_head(&n, &m, 5, None).unwrap();
                            store
                                .put_part(&n, m.version(), Part::Chunk(0), &data)
                                .unwrap();
                            assert!(
                                read_part(
                                    store,
                                    &n,
                                    m.version(),
                                    Part::Chunk(0),
                                    0..data.len() as u64
                                )
                                .is_none_or(|got| got == data)
                            );
                        }
                        _ => {
                            store.remove(&n);
                            assert!(
                                store.peek(&n).is_none() && read_head(store, &n).is_none(),
                                "removed"
                            );
                        }
                    }
                }
            });
        }
        for r in 0..READERS {
            let (store, stop, reads, hits) = (&store, &stop, &reads, &hits);
            scope.spawn(move || {
                let mut rng = StdRng::seed_from_u64(100 + r);
                while !stop.load(Relaxed) {
                    let n = name(&format!(
                        "{}/{}",
                        rng.random_range(0..WRITERS),
                        rng.random_range(0..NAMES)
                    ));
                    reads.fetch_add(1, Relaxed);
                    let Some(head) = read_head(store, &n) else {
                        continue;
                    };
                    let version: u64 = head
                        .meta
                        .etag
                        .as_ref()
                        .unwrap()
                        .trim_matches('"')
                        .parse()
                        .unwrap();
                    let want = content(version);
                    match head.data {
                        Some(data) => assert!(data == want, "{n} {version}"),
                        None => {
                            let got = read_part(
                                store,
                                &n,
                                head.meta.version(),
                                Part::Chunk(0),
                                0..want.len() as u64,
                            );
                            assert!(got.is_none_or(|got| got == want), "{n} {version}");
                        }
                    }
                    let mut out = Vec::new();
                    let mut version = 0u64;
                    let appended = store.append_inline(&n, Wait::May, &mut out, |m, _| {
                        version = m.etag.as_ref().unwrap().trim_matches('"').parse().unwrap();
                        Some(0..m.size)
                    });
                    assert!(
                        appended.unwrap().is_none() || out == content(version),
                        "{n} {version}"
                    );
                    hits.fetch_add(1, Relaxed);
                }
            });
        }
        let begin = Instant::now();
        let mut round = 0;
        let is_enough = || {
            let stats = store.stats();
            hits.load(Relaxed) > 100 && stats.dirs.iter().all(|d| d.evicted_records > 0)
        };
        let lasts = |secs| begin.elapsed() < Duration::from_secs(secs);
        while lasts(3) || (lasts(120) && !is_enough()) {
            for dir in [a.path(), b.path()] {
                assert!(disk_bytes(dir) <= capacity);
            }
            assert_eq!(
                read_inline(&store, &name("pinned")).unwrap(),
                bytes(1, 20_000)
            );
            round += 1;
            if round % 20 == 0 {
                store.checkpoint().unwrap();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Relaxed);
    });
    store.close().unwrap();
    let stats = store.stats();
    assert!(
        hits.load(Relaxed) > 100,
        "{} hits of {} reads",
        hits.load(Relaxed),
        reads.load(Relaxed)
    );
    assert!(
        stats
            .dirs
            .iter()
            .all(|d| d.evicted_records > 0 && d.checksum_failures == 0 && d.read_failures == 0),
        "{stats:?}"
    );
    // The charged bytes and the live records are exactly what the index says.
    let entries: u64 = stats.dirs.iter().map(|d| d.records).sum();
    assert_eq!(entries, stats.entries);
    drop(store);
    let store = open_unsynced(&config);
    assert_eq!(store.stats().entries, entries, "a restart finds the same");
}

#[test]
fn a_checkpoint_during_a_write_does_not_lose_the_write() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 16 << 20)]);
    let (disk, faults) = FaultyDisk::new(RealDisk);
    let store = Store::open_on(Arc::new(disk), config.clone(), clock()).unwrap();
    store
        .put_head(&name("before"), &meta(5, "1"), 5, Some(b"12345"))
        .unwrap();
    faults.add(Rule::new(Op::Write, Fault::Hang).on("seg-").times(1));
    std::thread::scope(|scope| {
        let (over, is_over) = std::sync::mpsc::channel::<()>();
        let hanging = faults.clone();
        scope.spawn(move || {
            // It ends even if the test fails, or waits for it.
            let _ = is_over.recv_timeout(Duration::from_secs(60));
            hanging.clear();
        });
        scope.spawn(|| {
            store
                .put_head(&name("slow"), &meta(5, "2"), 5, Some(b"slow!"))
                .unwrap()
        });
        while faults.happened() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The record has its place by now, but neither its bytes nor an entry.
        store
            .put_head(&name("quick"), &meta(5, "3"), 5, Some(b"quick"))
            .unwrap();
        store.checkpoint().unwrap();
        assert!(store.peek(&name("slow")).is_none(), "still being written");
        drop(over);
    });
    drop(store);
    let store = open(&config);
    for (n, want) in [
        ("before", b"12345"),
        ("slow", b"slow!"),
        ("quick", b"quick"),
    ] {
        assert_eq!(
            read_inline(&store, &name(n)).as_deref(),
            Some(&want[..]),
            "{n}"
        );
    }
}
