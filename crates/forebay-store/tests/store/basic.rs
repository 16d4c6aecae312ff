//! Each operation by itself, sizes at their boundaries, restarts, pins, several directories.

use crate::common::*;
use forebay_core::{ErrorKind, limits::CHUNK_BYTES};
use forebay_store::{BLOCK_BYTES, Part, Store, Wait};

#[test]
fn objects_of_all_sizes_come_back_whole_and_by_range() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 64 << 20)]);
    let block = BLOCK_BYTES;
    let sizes = [
        0,
        1,
        63,
        64,
        65,
        4095,
        block - 1,
        block,
        block + 1,
        2 * block,
        3 * block + 7,
        CHUNK_BYTES as usize - 1,
        CHUNK_BYTES as usize,
    ];
    let store = open(&config);
    for (i, size) in sizes.into_iter().enumerate() {
        let m = meta(size as u64, &format!("e{i}"));
        store
            .put_head(
                &name(&format!("o/{i}")),
                &m,
                7,
                Some(&bytes(i as u64, size)),
            )
            .unwrap();
        store
            .put_part(
                &name("big"),
                m.version(),
                Part::Chunk(i as u32),
                &bytes(i as u64, size),
            )
            .unwrap();
    }
    let check = |store: &Store| {
        for (i, size) in sizes.into_iter().enumerate() {
            let (n, want) = (name(&format!("o/{i}")), bytes(i as u64, size));
            let m = meta(size as u64, &format!("e{i}"));
            assert_eq!(
                store
                    .peek(&n)
                    .map(|p| (p.inline, p.validated_at_secs, p.pinned)),
                Some((true, 7, false))
            );
            let head = read_head(store, &n).unwrap();
            assert_eq!((*head.meta).clone(), m);
            assert_eq!(head.data.unwrap(), want);
            assert_eq!(read_inline(store, &n).unwrap(), want);
            assert_eq!(store.coverage(&n, &m), size as u64);
            assert!(store.has_part(&name("big"), m.version(), Part::Chunk(i as u32)));
            let cuts = [
                0,
                1,
                block - 1,
                block,
                block + 1,
                2 * block,
                size / 2,
                size.saturating_sub(1),
                size,
            ];
            for a in cuts.into_iter().filter(|a| *a <= size) {
                for b in cuts.into_iter().filter(|b| *b >= a && *b <= size) {
                    let part = read_part(
                        store,
                        &name("big"),
                        m.version(),
                        Part::Chunk(i as u32),
                        a as u64..b as u64,
                    );
                    assert_eq!(part.unwrap(), want[a..b], "{size}: {a}..{b}");
                    let part = read_unverified(
                        store,
                        &name("big"),
                        m.version(),
                        (Part::Chunk(i as u32), size as u64),
                        a as u64..b as u64,
                    );
                    assert_eq!(part.unwrap(), want[a..b], "{size}: {a}..{b}");
                    {
                        let mut out = vec![9];
                        let range = a as u64..b as u64;
                        let appended = store
                            .append_inline(&n, Wait::May, &mut out, |_, _| Some(range.clone()))
                            .unwrap();
                        assert_eq!(appended.unwrap().range, range);
                        assert_eq!((out[0], &out[1..]), (9, &want[a..b]), "{size}: {a}..{b}");
                    }
                }
            }
            assert!(
                read_part(
                    store,
                    &name("big"),
                    m.version(),
                    Part::Chunk(i as u32),
                    0..size as u64 + 1
                )
                .is_none()
            );
            // Nor what it would have if it were smaller, or if the record were all data.
            for (of, range) in [
                (0, 0..1),
                (size as u64, 0..size as u64 + 1),
                (1 << 32, 0..1),
            ] {
                let part = (Part::Chunk(i as u32), of);
                let read = read_unverified(store, &name("big"), m.version(), part, range);
                assert!(read.is_none());
            }
            assert!(
                store
                    .append_inline(&n, Wait::May, &mut vec![], |m, _| Some(0..m.size + 1))
                    .unwrap()
                    .is_none()
            );
        }
    };
    check(&store);
    store.close().unwrap();
    assert_eq!(
        store
            .put_head(&name("x"), &meta(0, "x"), 0, Some(&[]))
            .unwrap_err()
            .kind(),
        ErrorKind::ShuttingDown
    );
    check(&store);
    drop(store);
    check(&open(&config));
    // Without the checkpoint.
    std::fs::remove_file(dir.path().join("checkpoint")).unwrap();
    check(&open(&config));
}

#[test]
fn a_new_head_replaces_the_old_and_its_parts() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 16 << 20)]);
    let store = open(&config);
    let (n, old, new) = (name("a"), meta(2 * CHUNK_BYTES, "old"), meta(3, "new"));
    store.put_head(&n, &old, 5, None).unwrap();
    store
        .put_part(
            &n,
            old.version(),
            Part::Chunk(0),
            &bytes(1, CHUNK_BYTES as usize),
        )
        .unwrap();
    store
        .put_part(&n, old.version(), Part::Aux(1, 0), b"index")
        .unwrap();
    assert!(
        store.has_part(&n, old.version(), Part::Chunk(0))
            && !store.has_part(&n, old.version(), Part::Chunk(1))
    );
    assert_eq!(store.coverage(&n, &old), CHUNK_BYTES);
    assert!(read_head(&store, &n).unwrap().data.is_none() && read_inline(&store, &n).is_none());
    store.put_head(&n, &new, 6, Some(b"abc")).unwrap();
    assert!(!store.touch(&n, old.version(), 99), "another version");
    assert!(store.touch(&n, new.version(), 100));
    let check = |store: &Store| {
        assert_eq!(read_head(store, &n).unwrap().data.unwrap(), b"abc"[..]);
        assert!(!store.has_part(&n, new.version(), Part::Aux(1, 0)));
    };
    check(&store);
    drop(store);
    check(&open(&config));
}

#[test]
fn what_is_removed_stays_away() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 16 << 20)]);
    let store = open(&config);
    let big = meta(2 * CHUNK_BYTES + 5, "big");
    store
        .put_head(&name("a"), &meta(1, "1"), 5, Some(b"1"))
        .unwrap();
    store
        .put_head(&name("a"), &meta(1, "2"), 5, Some(b"2"))
        .unwrap();
    store.put_head(&name("b"), &big, 5, None).unwrap();
    store
        .put_part(&name("b"), big.version(), Part::Chunk(2), b"12345")
        .unwrap();
    store
        .put_head(&name("c"), &meta(1, "3"), 5, Some(b"3"))
        .unwrap();
    assert_eq!(store.coverage(&name("b"), &big), 5);
    assert!(store.remove(&name("a")) && !store.remove(&name("a")));
    // What an eviction frees is known in advance: head and chunks, with their padding.
    let evictable = store.evictable_bytes(&name("b"));
    assert!(evictable > 5 && evictable > store.peek(&name("b")).unwrap().record_bytes);
    assert_eq!(store.evict(&name("b")), evictable);
    assert_eq!(
        (store.evictable_bytes(&name("b")), store.evict(&name("b"))),
        (0, 0)
    );
    let check = |store: &Store| {
        assert!(store.peek(&name("a")).is_none() && read_head(store, &name("a")).is_none());
        assert!(store.peek(&name("b")).is_none());
        assert_eq!(read_inline(store, &name("c")).unwrap(), b"3");
    };
    check(&store);
    drop(store);
    check(&open(&config));
    let store = open(&config);
    store.checkpoint().unwrap();
    drop(store);
    check(&open(&config));
    std::fs::remove_file(dir.path().join("checkpoint")).unwrap();
    check(&open(&config));
}

#[test]
fn validation_times_survive_a_clean_restart_and_not_another_boot() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 16 << 20)]);
    let n = name("a");
    let reboot = |text: &str| {
        let path = dir.path().join("identity.json");
        let mut identity: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        identity["boot_id"] = text.into();
        std::fs::write(&path, identity.to_string()).unwrap();
    };
    let validated = |store: &Store| store.peek(&n).unwrap().validated_at_secs;
    let store = open(&config);
    store.put_head(&n, &meta(1, "1"), 5, Some(b"1")).unwrap();
    assert!(store.touch(&n, meta(1, "1").version(), 50));
    store.checkpoint().unwrap();
    drop(store); // not closed: as after kill -9
    let store = open(&config);
    assert_eq!(validated(&store), 50);
    store.close().unwrap();
    drop(store);
    reboot("another boot, after a clean close");
    let store = open(&config);
    assert_eq!(validated(&store), 50);
    drop(store);
    reboot("another boot, without a clean close");
    let store = open(&config);
    assert_eq!(validated(&store), 0);
    assert_eq!(read_inline(&store, &n).unwrap(), b"1");
    drop(store);
    std::fs::remove_file(dir.path().join("checkpoint")).unwrap();
    let store = open(&config);
    assert_eq!(
        validated(&store),
        0,
        "distrust outlives a crash right after the restart"
    );
    assert!(store.touch(&n, meta(1, "1").version(), 60));
    store.checkpoint().unwrap();
    drop(store);
    assert_eq!(validated(&open(&config)), 60);
}

#[test]
fn a_directory_serves_one_process_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 16 << 20)]);
    let _store = open(&config);
    let error = Store::open(config, clock()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(
        error.to_string().contains("in use by another process"),
        "{error}"
    );
}

#[test]
fn the_active_segment_is_prepared_and_no_other_is() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 64 << 20)]);
    let segments = || {
        let mut files: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|f| f.unwrap().path())
            .collect();
        files.retain(|f| f.file_name().unwrap().to_str().unwrap().starts_with("seg-"));
        files.sort();
        files
            .into_iter()
            .map(|f| std::fs::read(f).unwrap())
            .collect::<Vec<_>>()
    };
    let prepared = |segment: &Vec<u8>| segment.len() - records_end(segment);
    let put = |store: &Store, i: u64| {
        store
            .put_head(
                &name(&format!("o/{i}")),
                &meta(5000, "o"),
                5,
                Some(&bytes(i, 5000)),
            )
            .unwrap()
    };
    let store = open(&config);
    put(&store, 0);
    assert!(
        (64 << 10..=256 << 10).contains(&segments()[0].len()),
        "one step is prepared"
    );
    assert!(
        store.stats().dirs[0].used_bytes < 6000,
        "which is not used yet"
    );
    (1..1000).for_each(|i| put(&store, i));
    let files = segments();
    let (active, sealed) = files.split_last().unwrap();
    assert!(sealed.len() > 1 && sealed.iter().all(|s| prepared(s) < 64) && prepared(active) > 64);
    // Killed: the zeros are not damage, and nothing is lost.
    drop(store);
    let store = open(&config);
    assert!(store.stats().dirs[0].used_bytes >= files.iter().map(Vec::len).sum::<usize>() as u64);
    (1000..1001).for_each(|i| put(&store, i));
    store.close().unwrap();
    assert!(prepared(segments().last().unwrap()) < 64, "closed in order");
    drop(store);
    let store = open(&config);
    for i in 0..1001 {
        assert_eq!(
            read_inline(&store, &name(&format!("o/{i}"))).unwrap(),
            bytes(i, 5000)
        );
    }
}

#[test]
fn eviction_keeps_what_is_read_and_what_is_pinned() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 8 << 20)]);
    let store = open(&config);
    store.pin(&name("pinned/before")).unwrap();
    let put = |i: u64, n: &str| {
        store
            .put_head(&name(n), &meta(100_000, n), 5, Some(&bytes(i, 100_000)))
            .unwrap()
    };
    put(1, "pinned/before");
    put(2, "pinned/after");
    store.pin(&name("pinned/after")).unwrap();
    put(3, "hot");
    let chunked = meta(3 * CHUNK_BYTES, "chunked");
    let rows = Part::Rows {
        columns: 1,
        block: 2,
        piece: 3,
    };
    assert_eq!(store.evict(&name("pinned/after")), 0);
    for i in 0..400 {
        put(i, &format!("cold/{i}"));
        assert!(read_inline(&store, &name("hot")).is_some(), "{i}");
        assert!(disk_bytes(dir.path()) <= 8 << 20);
        if i == 100 {
            store
                .put_head(&name("pinned/chunked"), &chunked, 5, None)
                .unwrap();
            store.pin(&name("pinned/chunked")).unwrap();
            store
                .put_part(
                    &name("pinned/chunked"),
                    chunked.version(),
                    Part::Chunk(1),
                    &bytes(9, 1 << 20),
                )
                .unwrap();
            store
                .put_part(&name("pinned/chunked"), chunked.version(), rows, b"decoded")
                .unwrap();
            assert!(store.has_part(&name("pinned/chunked"), chunked.version(), rows));
        }
    }
    assert!(
        !store.has_part(&name("pinned/chunked"), chunked.version(), rows),
        "decoded rows are made again when they are gone"
    );
    let check = |store: &Store| {
        assert_eq!(
            read_inline(store, &name("pinned/before")).unwrap(),
            bytes(1, 100_000)
        );
        assert_eq!(
            read_inline(store, &name("pinned/after")).unwrap(),
            bytes(2, 100_000)
        );
        assert_eq!(
            read_part(
                store,
                &name("pinned/chunked"),
                chunked.version(),
                Part::Chunk(1),
                0..1 << 20
            )
            .unwrap(),
            bytes(9, 1 << 20)
        );
        assert!(store.peek(&name("cold/0")).is_none() && store.peek(&name("cold/399")).is_some());
        assert!(
            store.peek(&name("pinned/after")).unwrap().pinned
                && !store.peek(&name("cold/399")).unwrap().pinned
        );
        assert_eq!(
            store.pinned(),
            [
                name("pinned/after"),
                name("pinned/before"),
                name("pinned/chunked")
            ]
        );
    };
    check(&store);
    assert!(store.stats().dirs[0].evicted_records > 100);
    let huge = name("huge");
    store
        .put_head(&huge, &meta(4 << 20, "huge"), 5, None)
        .unwrap();
    let error = store.pin(&huge).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    drop(store);
    let store = open(&config);
    check(&store);
    assert!(store.unpin(&name("pinned/after")) && !store.unpin(&name("pinned/after")));
    assert!(store.evict(&name("pinned/after")) > 100_000);
    drop(store);
    assert_eq!(
        open(&config).pinned(),
        [name("pinned/before"), name("pinned/chunked")]
    );
}

/// A cluster keeps some of what is pinned on several nodes; each of them remembers that.
#[test]
fn a_pin_remembers_on_how_many_nodes_it_is_to_be() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let only_a = config(&[(a.path(), 16 << 20)]);
    let both = config(&[(a.path(), 16 << 20), (b.path(), 16 << 20)]);
    let store = open(&only_a);
    let of = |store: &Store, key: &str| store.copies_of_pin(&name(key));
    assert_eq!(of(&store, "none"), 1);
    assert!(store.pin_on(&name("two"), 2).unwrap());
    assert!(
        !store.pin_on(&name("two"), 2).unwrap(),
        "it was pinned on as many before"
    );
    store.pin(&name("raised")).unwrap();
    assert!(store.pin_on(&name("raised"), 3).unwrap());
    assert!(!store.pin_on(&name("raised"), 2).unwrap(), "never less");
    store.pin(&name("one")).unwrap();
    store.pin(&name("two")).unwrap();
    assert!(store.pin_on(&name("gone"), 2).unwrap());
    assert!(store.unpin(&name("gone")));
    let all = [("one", 1), ("raised", 3), ("two", 2)];
    let all: Vec<_> = all.map(|(key, copies)| (name(key), copies)).into();
    assert_eq!(store.pinned_on(), all);
    drop(store);
    let store = open(&both);
    assert_eq!(store.pinned_on(), all);
    drop(store);
    // The second directory learned it.
    let store = open(&config(&[(b.path(), 16 << 20)]));
    assert_eq!(store.pinned_on(), all);
    assert_eq!((of(&store, "two"), of(&store, "gone")), (2, 1));
    for (name, _) in all {
        assert!(store.unpin(&name));
        assert_eq!(store.copies_of_pin(&name), 1);
    }
}

/// What a directory says that was away is outdated, and must not count at a later start either.
#[test]
fn a_directory_that_was_away_neither_raises_a_pin_nor_brings_one_back() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let only_a = config(&[(a.path(), 16 << 20)]);
    let both = config(&[(a.path(), 16 << 20), (b.path(), 16 << 20)]);
    let store = open(&both);
    assert!(store.pin_on(&name("lowered"), 3).unwrap());
    assert!(store.pin_on(&name("gone"), 3).unwrap());
    assert!(store.pin_on(&name("raised"), 2).unwrap());
    drop(store);
    let store = open(&only_a);
    assert!(store.unpin(&name("lowered")) && store.unpin(&name("gone")));
    assert!(store.pin_on(&name("lowered"), 1).unwrap());
    assert!(store.pin_on(&name("raised"), 3).unwrap());
    drop(store);
    let all = [(name("lowered"), 1), (name("raised"), 3)];
    for _ in 0..3 {
        assert_eq!(open(&both).pinned_on(), all);
    }
    // And the directory that was away has learned it.
    let only_b = config(&[(b.path(), 16 << 20)]);
    assert_eq!(open(&only_b).pinned_on(), all);
}

#[test]
fn directories_may_come_and_go() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let both = config(&[(a.path(), 16 << 20), (b.path(), 16 << 20)]);
    let only_a = config(&[(a.path(), 16 << 20)]);
    let store = open(&both);
    store.pin(&name("pinned")).unwrap();
    for i in 0..100u64 {
        store
            .put_head(
                &name(&format!("o/{i}")),
                &meta(1000, "v1"),
                5,
                Some(&bytes(i, 1000)),
            )
            .unwrap();
    }
    assert!(
        store.stats().dirs.iter().all(|d| d.records > 20),
        "spread by hash"
    );
    drop(store);
    let store = open(&only_a);
    assert_eq!(store.pinned(), [name("pinned")]);
    let here: Vec<u64> = (0..100)
        .filter(|i| store.peek(&name(&format!("o/{i}"))).is_some())
        .collect();
    assert!(here.len() > 20 && here.len() < 80);
    for i in 0..100u64 {
        if i % 2 == 0 {
            store.remove(&name(&format!("o/{i}")));
        } else {
            store
                .put_head(
                    &name(&format!("o/{i}")),
                    &meta(1000, "v2"),
                    6,
                    Some(&bytes(1000 + i, 1000)),
                )
                .unwrap();
        }
    }
    store.unpin(&name("pinned"));
    drop(store);
    let store = open(&both);
    assert!(store.pinned().is_empty());
    for i in 0..100u64 {
        let n = name(&format!("o/{i}"));
        match store.peek(&n) {
            // It was in the directory that was away: the origin must be asked.
            Some(p) if i % 2 == 0 => {
                assert_eq!((p.validated_at_secs, here.contains(&i)), (0, false))
            }
            None => assert!(i % 2 == 0),
            Some(p) => {
                assert_eq!(p.validated_at_secs, 6);
                assert_eq!(read_inline(&store, &n).unwrap(), bytes(1000 + i, 1000));
            }
        }
    }
}

#[test]
fn a_checkpoint_of_several_pieces_is_loaded_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 256 << 20)]);
    let store = open(&config);
    // 40 bytes each, read a MiB at a time.
    let count = 60_000;
    let of = |i: u32| name(&format!("s/{i}"));
    let m = meta(3, "e");
    for i in 0..count {
        store
            .put_head(&of(i), &m, 7, Some(&bytes(i.into(), 3)))
            .unwrap();
    }
    // Only a checkpoint knows about these.
    assert!((0..count).all(|i| store.touch(&of(i), m.version(), 9)));
    store.checkpoint().unwrap();
    drop(store);
    let times = |expected: u32| {
        let store = open(&config);
        let right = |i: &u32| store.peek(&of(*i)).map(|p| p.validated_at_secs) == Some(expected);
        assert_eq!(
            (0..count).filter(right).count(),
            count as usize,
            "of time {expected}"
        );
        assert_eq!(
            read_head(&store, &of(count - 1)).unwrap().data.unwrap(),
            bytes((count - 1).into(), 3)
        );
    };
    times(9);
    let checkpoint = dir.path().join("checkpoint");
    let whole = std::fs::read(&checkpoint).unwrap();
    assert!(whole.len() > 2 << 20);
    for at in [9, 70, whole.len() / 2, whole.len() - 50, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        std::fs::write(&checkpoint, damaged).unwrap();
        times(7);
    }
    std::fs::write(&checkpoint, &whole[..whole.len() - 40]).unwrap();
    times(7);
    std::fs::write(&checkpoint, &whole).unwrap();
    times(9);
}
