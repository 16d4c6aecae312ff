//! Disks that are full, failing or read-only, and disks that lie.

use crate::common::*;
use forebay_core::{ErrorKind, limits::CHUNK_BYTES};
use forebay_store::{
    DirState, Part, PinnedLater, Store, StoreConfig, Wait,
    disk::RealDisk,
    faults::{Fault, Faults, FaultyDisk, Op, Rule},
};
use std::{sync::Arc, time::Duration};

const MIB: u64 = 1 << 20;

fn open_faulty(config: &StoreConfig) -> (Store, Faults, Arc<forebay_core::ManualClock>) {
    let (disk, faults) = FaultyDisk::new(RealDisk);
    let clock = clock();
    (
        Store::open_on(Arc::new(disk), config.clone(), clock.clone()).unwrap(),
        faults,
        clock,
    )
}

fn put(store: &Store, n: &str, seed: u64) -> forebay_core::Result<()> {
    store.put_head(
        &name(n),
        &meta(5000, &format!("{seed}")),
        5,
        Some(&bytes(seed, 5000)),
    )
}

#[test]
fn pins_are_written_to_a_new_directory_together() {
    let (old, new) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = open_unsynced(&config(&[(old.path(), 64 * MIB)]));
    let names: Vec<_> = (0..300).map(|i| name(&format!("p{i}"))).collect();
    names.iter().for_each(|name| store.pin(name).unwrap());
    drop(store);
    let (disk, faults) = FaultyDisk::new(RealDisk);
    faults.add(Rule::new(Op::Sync, Fault::Skip));
    let both = config(&[(old.path(), 64 * MIB), (new.path(), 64 * MIB)]);
    let store = Store::open_on(Arc::new(disk), both, clock()).unwrap();
    assert!(faults.happened() < 50, "{}", faults.happened());
    drop(store);
    let store = open(&config(&[(new.path(), 64 * MIB)]));
    assert!(names.iter().all(|name| store.is_pinned(name)));
}

#[test]
fn a_list_of_pins_is_synced_together() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 64 * MIB)]);
    let (store, faults, clock) = open_faulty(&config);
    faults.add(Rule::new(Op::Sync, Fault::Skip));
    let names: Vec<_> = (0..1200).map(|i| name(&format!("p{i}"))).collect();
    store.pin(&names[7]).unwrap();
    let before = faults.happened();
    let pinned = store.pin_all(&names);
    for (i, pinned) in pinned.into_iter().enumerate() {
        assert_eq!(pinned.unwrap(), i != 7, "{i}");
    }
    assert!(faults.happened() - before < 50, "{}", faults.happened());
    // What cannot be synced is no pin.
    faults.clear();
    faults.add(Rule::new(Op::Sync, Fault::Error(libc::EIO)));
    let lost = [name("x"), name("y"), name("x"), names[7].clone()];
    let failed = store
        .pin_all(&lost)
        .into_iter()
        .map(|pinned| pinned.is_err());
    assert_eq!(failed.collect::<Vec<_>>(), [true, true, true, false]);
    assert!(!store.is_pinned(&lost[0]) && !store.is_pinned(&lost[1]));
    // Nor is it one after a restart, nor one that was refused alone.
    faults.clear();
    faults.add(Rule::new(Op::Sync, Fault::Skip));
    clock.advance(Duration::from_secs(31));
    store.pin(&name("z")).unwrap();
    faults.clear();
    faults.add(Rule::new(Op::Sync, Fault::Error(libc::EIO)));
    assert!(store.pin(&name("w")).is_err());
    drop(store);
    let store = open(&config);
    assert!(names.iter().all(|name| store.is_pinned(name)));
    assert!(store.is_pinned(&name("z")) && !store.is_pinned(&name("w")));
    assert!(!store.is_pinned(&lost[0]) && !store.is_pinned(&lost[1]));
}

#[test]
fn pins_that_are_made_one_by_one_can_be_synced_together() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 64 * MIB)]);
    let (store, faults, _) = open_faulty(&config);
    let later = |key: &str| match store.pin_later(&name(key), 2).unwrap() {
        PinnedLater::New(pin) => pin,
        other => panic!("{other:?}"),
    };
    faults.add(Rule::new(Op::Sync, Fault::Skip));
    let pins: Vec<_> = (0..300).map(|i| later(&format!("p{i}"))).collect();
    assert_eq!(faults.happened(), 0);
    // Whoever finds one answers when it is on the disk.
    assert!(!store.pin_on(&name("p7"), 1).unwrap());
    assert_eq!(faults.happened(), 2, "the file and the directory");
    let again = store.pin_later(&name("p7"), 2).unwrap();
    assert!(matches!(again, PinnedLater::Before));
    assert!(store.unpin(&name("p8")));
    assert!(store.sync_pins(&pins).iter().all(Result::is_ok));
    assert!(faults.happened() < 10, "{}", faults.happened());
    assert!(!store.is_pinned(&name("p8")));
    // A pin that the disk did not sync counts neither for the one who made it nor for others.
    faults.clear();
    faults.add(Rule::new(Op::Sync, Fault::Error(libc::EIO)));
    let lost = later("lost");
    assert!(store.pin(&name("lost")).is_err());
    assert!(store.sync_pins(&[lost])[0].is_err());
    assert!(!store.is_pinned(&name("lost")));
    faults.clear();
    drop(store);
    let store = open(&config);
    assert_eq!(store.pinned_on().len(), 299);
    assert!(store.pinned_on().iter().all(|(_, copies)| *copies == 2));
    assert!(!store.is_pinned(&name("p8")) && !store.is_pinned(&name("lost")));
}

/// The kernel tells of what it could not write once; the next sync of the file succeeds without it.
#[test]
fn a_pin_in_a_file_that_could_not_be_synced_for_another_one_is_no_pin() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 64 * MIB)]);
    let (store, faults, clock) = open_faulty(&config);
    let first = match store.pin_later(&name("first"), 1).unwrap() {
        PinnedLater::New(pin) => pin,
        other => panic!("{other:?}"),
    };
    faults.add(Rule::new(Op::Sync, Fault::Error(libc::EIO)).times(1));
    assert!(store.pin(&name("second")).is_err());
    assert!(store.sync_pins(&[first])[0].is_err());
    assert!(store.pinned().is_empty());
    // What is pinned again is in another file.
    clock.advance(Duration::from_secs(31));
    store.pin(&name("first")).unwrap();
    drop(store);
    assert_eq!(open(&config).pinned(), [name("first")]);
}

#[test]
fn a_directory_with_a_file_that_could_not_be_synced_is_not_closed_cleanly() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 64 * MIB)]);
    let (store, faults, _) = open_faulty(&config);
    put(&store, "k", 1).unwrap();
    let validated = |store: &Store| store.peek(&name("k")).unwrap().validated_at_secs;
    assert_eq!(validated(&store), 5);
    faults.add(Rule::new(Op::Sync, Fault::Error(libc::EIO)).times(1));
    assert!(store.pin(&name("p")).is_err());
    // The next sync of that file succeeds, whatever was lost of it.
    assert!(store.close().is_err());
    drop(store);
    // In the same boot, too: nothing tells the next run but one what was lost.
    let store = open(&config);
    assert_eq!(validated(&store), 0);
    assert_eq!(read_inline(&store, &name("k")).unwrap(), bytes(1, 5000));
    store.close().unwrap();
}

#[test]
fn a_segment_that_a_loss_of_power_took_leaves_its_number_unused() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 64 * MIB)]);
    let segments = || {
        let files = std::fs::read_dir(dir.path()).unwrap().flatten();
        let paths = files.map(|file| file.path());
        let is_segment = |path: &std::path::PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with("seg-"))
        };
        paths.filter(is_segment).collect::<Vec<_>>()
    };
    let store = open(&config);
    for i in 0..20 {
        put(&store, &format!("k{i}"), i).unwrap();
    }
    store.checkpoint().unwrap();
    drop(store);
    let lost = segments();
    assert_eq!(lost.len(), 1);
    std::fs::remove_file(&lost[0]).unwrap();
    // What is noted then is read by the start after it, whatever the old index says.
    let store = open(&config);
    assert!(store.peek(&name("k1")).is_none());
    store.pin(&name("p")).unwrap();
    put(&store, "k1", 100).unwrap();
    assert_ne!(segments(), lost);
    drop(store);
    let store = open(&config);
    assert!(store.is_pinned(&name("p")));
    assert_eq!(read_inline(&store, &name("k1")).unwrap(), bytes(100, 5000));
}

#[test]
fn a_pin_is_on_the_disk_with_the_name_of_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let (store, faults, clock) = open_faulty(&config(&[(dir.path(), 64 * MIB)]));
    faults.add(Rule::new(Op::Sync, Fault::Skip));
    store.pin(&name("a")).unwrap();
    assert_eq!(faults.happened(), 2, "the file and the directory");
    // The file has its name by now.
    store.pin(&name("b")).unwrap();
    assert_eq!(faults.happened(), 3);
    // What cannot be synced is no pin.
    faults.clear();
    faults.add(Rule::new(Op::Sync, Fault::Error(libc::EIO)));
    assert!(store.pin(&name("c")).is_err());
    assert!(!store.is_pinned(&name("c")) && store.is_pinned(&name("b")));
    // Its record is there, but not for certain on the disk: another one is written and synced.
    faults.clear();
    faults.add(Rule::new(Op::Sync, Fault::Skip));
    clock.advance(Duration::from_secs(31));
    let before = faults.happened();
    store.pin(&name("c")).unwrap();
    assert!(faults.happened() > before, "nothing was synced");
}

#[test]
fn a_pin_that_the_evictor_moves_is_on_the_disk_before_its_file_goes() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 16 * MIB)]);
    let (store, faults, _) = open_faulty(&config);
    let two_rounds = |of: &str| {
        for i in 0..5000 {
            put(&store, &format!("{of}{i}"), i).unwrap();
        }
    };
    faults.add(Rule::new(Op::Sync, Fault::Skip).on("seg-"));
    two_rounds("a");
    assert!(store.stats().dirs[0].evicted_records > 0);
    assert_eq!(faults.happened(), 0, "what is only cached is not synced");
    store.pin(&name("p")).unwrap();
    let before = faults.happened();
    two_rounds("b");
    let synced = faults.happened() - before;
    assert!((1..20).contains(&synced), "{synced}");
    drop(store);
    assert!(open(&config).is_pinned(&name("p")));
}

#[test]
fn a_pin_that_could_not_be_raised_is_what_it_was_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 64 * MIB)]);
    let (store, faults, _) = open_faulty(&config);
    assert!(store.pin_on(&name("a"), 2).unwrap());
    faults.add(Rule::new(Op::Sync, Fault::Error(libc::EIO)));
    assert!(store.pin_on(&name("a"), 3).is_err());
    assert_eq!(store.pinned_on(), [(name("a"), 2)]);
    assert_eq!(store.stats().dirs[0].state, DirState::Failing);
    faults.clear();
    drop(store);
    assert_eq!(open(&config).pinned_on(), [(name("a"), 2)]);
}

#[test]
fn a_full_disk_refuses_writes_serves_reads_and_is_tried_again() {
    for (errno, state) in [
        (libc::ENOSPC, DirState::Full),
        (libc::EROFS, DirState::ReadOnly),
        (libc::EIO, DirState::Failing),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (store, faults, clock) = open_faulty(&config(&[(dir.path(), 16 * MIB)]));
        put(&store, "a", 1).unwrap();
        put(&store, "b", 2).unwrap();
        faults.add(Rule::new(Op::Write, Fault::Error(errno)).on("seg-"));
        let error = put(&store, "c", 3).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal);
        assert!(
            error.describe().contains("a write failed") && error.hint_text().is_some(),
            "{}",
            error.describe()
        );
        assert_eq!(store.stats().dirs[0].state, state);
        assert_eq!(read_inline(&store, &name("a")).unwrap(), bytes(1, 5000));
        // If the put could not replace "b", it must not leave the old one either.
        assert!(put(&store, "b", 4).is_err());
        assert!(store.peek(&name("b")).is_none());
        let happened = faults.happened();
        assert!(put(&store, "c", 3).is_err());
        assert_eq!(faults.happened(), happened, "left alone for a while");
        faults.clear();
        assert!(put(&store, "c", 3).is_err(), "still left alone");
        clock.advance(Duration::from_secs(31));
        put(&store, "c", 3).unwrap();
        assert_eq!(store.stats().dirs[0].state, DirState::Ok);
        assert_eq!(read_inline(&store, &name("c")).unwrap(), bytes(3, 5000));
        assert!(store.stats().dirs[0].write_failures >= 1);
        assert!(store.peek(&name("b")).is_none());
    }
}

#[test]
fn a_directory_with_room_again_is_not_full_until_the_next_write() {
    let dir = tempfile::tempdir().unwrap();
    let config = StoreConfig {
        background: true,
        ..config(&[(dir.path(), 16 * MIB)])
    };
    let (store, faults, _) = open_faulty(&config);
    let state = || store.stats().dirs[0].state;
    faults.say_available(Some(100 * MIB));
    faults.add(Rule::new(Op::Write, Fault::Error(libc::ENOSPC)).on("seg-"));
    assert!(put(&store, "a", 1).is_err());
    faults.clear();
    // The store's thread asks the file system five times a second.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(state(), DirState::Full);
    faults.say_available(Some(200 * MIB));
    let began = std::time::Instant::now();
    while state() != DirState::Ok {
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(20));
    }
    put(&store, "a", 1).unwrap();
}

#[test]
fn another_directory_takes_what_a_failing_one_refuses() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = config(&[(a.path(), 16 * MIB), (b.path(), 16 * MIB)]);
    let (store, faults, clock) = open_faulty(&config);
    for i in 0..40 {
        put(&store, &format!("o/{i}"), i).unwrap();
    }
    let in_a = store.stats().dirs[0].records;
    assert!(in_a > 5 && in_a < 35);
    faults.read_only(a.path().to_str().unwrap());
    for i in 0..40 {
        put(&store, &format!("o/{i}"), 100 + i).unwrap();
        assert!(store.remove(&name(&format!("o/{}", 39 - i))) || i >= 20);
    }
    for i in 0..20 {
        assert!(
            store.peek(&name(&format!("o/{i}"))).is_none(),
            "removed after it was put"
        );
    }
    for i in 20..40 {
        assert_eq!(
            read_inline(&store, &name(&format!("o/{i}"))).unwrap(),
            bytes(100 + i, 5000)
        );
    }
    assert_eq!(store.stats().dirs[0].state, DirState::ReadOnly);
    drop(store);
    // The removals are not in the first directory's log. None of its records may be used without
    // asking the origin.
    faults.clear();
    clock.advance(Duration::from_secs(60));
    let store = open(&config);
    for i in 0..40 {
        let n = name(&format!("o/{i}"));
        match store.peek(&n) {
            None => assert!(i < 20),
            Some(p) if i < 20 => assert_eq!(p.validated_at_secs, 0, "{i}"),
            Some(p) => {
                let got = read_inline(&store, &n).unwrap();
                assert!(
                    got == bytes(100 + i, 5000) || p.validated_at_secs == 0,
                    "{i}"
                );
            }
        }
    }
}

#[test]
fn a_removal_on_a_full_disk_still_holds_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 16 * MIB)]);
    let (store, faults, _) = open_faulty(&config);
    put(&store, "a", 1).unwrap();
    put(&store, "b", 2).unwrap();
    store.checkpoint().unwrap();
    // No new space; overwriting in place works, as on a disk without copy-on-write.
    faults.add(Rule::new(Op::Create, Fault::Error(libc::ENOSPC)));
    faults.add(
        Rule::new(Op::Write, Fault::Error(libc::ENOSPC))
            .on("seg-")
            .times(1),
    );
    assert!(store.remove(&name("a")));
    assert!(store.peek(&name("a")).is_none());
    drop(store);
    let store = open(&config);
    assert!(read_inline(&store, &name("a")).is_none());
    assert_eq!(
        store.peek(&name("b")).unwrap().validated_at_secs,
        0,
        "other removals may have been lost with it"
    );
    assert_eq!(read_inline(&store, &name("b")).unwrap(), bytes(2, 5000));
}

#[test]
fn a_read_only_directory_is_closed_without_an_error_unless_it_missed_a_removal() {
    for (was_read_only, removes) in [(true, false), (false, false), (true, true), (false, true)] {
        let dir = tempfile::tempdir().unwrap();
        let config = config(&[(dir.path(), 16 * MIB)]);
        let store = open(&config);
        put(&store, "a", 1).unwrap();
        store.close().unwrap();
        drop(store);
        let (disk, faults) = FaultyDisk::new(RealDisk);
        if was_read_only {
            faults.read_only("");
        }
        let store = Store::open_on(Arc::new(disk), config.clone(), clock()).unwrap();
        if !was_read_only {
            put(&store, "b", 2).unwrap();
            faults.read_only("");
        }
        if removes {
            assert!(store.remove(&name("a")));
        }
        let closed = store.close();
        assert_eq!(
            closed.is_err(),
            removes,
            "{was_read_only}, {removes}: {closed:?}"
        );
        drop(store);
        let store = open(&config);
        assert_eq!(read_inline(&store, &name("a")).unwrap(), bytes(1, 5000));
        let b = read_inline(&store, &name("b"));
        assert_eq!(b.is_some(), !was_read_only);
    }
}

#[test]
fn a_read_only_directory_that_missed_a_removal_is_noted_in_another_one() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = config(&[(a.path(), 16 * MIB), (b.path(), 16 * MIB)]);
    let (store, faults, _) = open_faulty(&config);
    for i in 0..40 {
        put(&store, &format!("o/{i}"), i).unwrap();
    }
    assert!((5..35).contains(&store.stats().dirs[0].records));
    faults.read_only(a.path().to_str().unwrap());
    for i in 0..40 {
        assert!(store.remove(&name(&format!("o/{i}"))));
    }
    store.close().unwrap();
}

#[test]
fn a_read_only_directory_is_served_and_must_be_revalidated() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 16 * MIB)]);
    let store = open(&config);
    put(&store, "a", 1).unwrap();
    store.close().unwrap();
    drop(store);
    let (disk, faults) = FaultyDisk::new(RealDisk);
    faults.read_only("");
    let store = Store::open_on(Arc::new(disk), config.clone(), clock()).unwrap();
    assert_eq!(store.stats().dirs[0].state, DirState::ReadOnly);
    assert_eq!(read_inline(&store, &name("a")).unwrap(), bytes(1, 5000));
    assert_eq!(store.peek(&name("a")).unwrap().validated_at_secs, 0);
    assert!(put(&store, "b", 2).is_err());
    // A removal that cannot be written still holds as long as the process lives.
    assert!(store.remove(&name("a")) && store.peek(&name("a")).is_none());
}

#[test]
fn flipped_bits_are_misses_anywhere_in_a_record() {
    let dir = tempfile::tempdir().unwrap();
    let (store, faults, _) = open_faulty(&config(&[(dir.path(), 64 * MIB)]));
    let m = meta(3 * CHUNK_BYTES, "big");
    let data = bytes(1, CHUNK_BYTES as usize);
    let mut failures = 0;
    for at in (0..5300).step_by(53) {
        put(&store, "a", 1).unwrap();
        faults.add(Rule::new(Op::Read, Fault::FlipBit(at)).on("seg-").times(1));
        let got = read_inline(&store, &name("a"));
        faults.clear();
        if let Some(got) = got {
            assert_eq!(got, bytes(1, 5000), "bit of byte {at}");
        } else {
            failures += 1;
            assert!(
                store.peek(&name("a")).is_none(),
                "a damaged entry is dropped"
            );
        }
        assert_eq!(store.stats().dirs[0].checksum_failures, failures);
    }
    assert!(failures >= 99, "{failures}");
    // A large record: only what the range touches is read, and it is checked.
    store
        .put_part(&name("big"), m.version(), Part::Chunk(0), &data)
        .unwrap();
    faults.add(
        Rule::new(Op::Read, Fault::FlipBit(70_000))
            .on("seg-")
            .after(1)
            .times(1),
    );
    assert!(
        read_part(
            &store,
            &name("big"),
            m.version(),
            Part::Chunk(0),
            0..CHUNK_BYTES
        )
        .is_none()
    );
    assert!(!store.has_part(&name("big"), m.version(), Part::Chunk(0)));
    store
        .put_part(&name("big"), m.version(), Part::Chunk(0), &data)
        .unwrap();
    assert_eq!(
        read_part(
            &store,
            &name("big"),
            m.version(),
            Part::Chunk(0),
            300_000..300_001
        )
        .unwrap(),
        data[300_000..300_001]
    );
}

#[test]
fn whoever_asks_what_an_eviction_would_free_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (store, faults, _) = open_faulty(&config(&[(dir.path(), 64 * MIB)]));
    put(&store, "a", 1).unwrap();
    let whole = store.evictable_bytes(&name("a"));
    assert!(whole > 5000);
    let asked = |fault| {
        faults.add(Rule::new(Op::Read, fault).on("seg-"));
        let bytes = store.evictable_bytes(&name("a"));
        faults.clear();
        assert!(store.peek(&name("a")).is_some(), "it is still there");
        assert_eq!(store.stats().dirs[0].checksum_failures, 0);
        bytes
    };
    assert_eq!(asked(Fault::FlipBit(100)), whole);
    assert_eq!(asked(Fault::Error(libc::EIO)), whole);
    // So much is what the eviction then frees, damaged or not.
    faults.add(Rule::new(Op::Read, Fault::FlipBit(100)).on("seg-"));
    assert_eq!(store.evict(&name("a")), whole);
    assert!(store.peek(&name("a")).is_none());
}

#[test]
fn what_is_written_wrong_is_never_read() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 64 * MIB)]);
    let (store, faults, _) = open_faulty(&config);
    for at in 0..60 {
        faults.add(
            Rule::new(
                Op::Write,
                if at % 2 == 0 {
                    Fault::FlipBit(at * 90)
                } else {
                    Fault::Torn(at * 90)
                },
            )
            .on("seg-")
            .times(1),
        );
        put(&store, &format!("o/{at}"), at as u64).unwrap();
        put(&store, &format!("whole/{at}"), at as u64).unwrap();
    }
    faults.clear();
    let check = |store: &Store| {
        for at in 0..60 {
            assert!(
                read_inline(store, &name(&format!("o/{at}")))
                    .is_none_or(|got| got == bytes(at, 5000))
            );
            assert_eq!(
                read_inline(store, &name(&format!("whole/{at}"))).unwrap(),
                bytes(at, 5000)
            );
        }
    };
    drop(store);
    check(&open(&config)); // from the log, past the damaged records
    let store = open(&config);
    check(&store);
    store.close().unwrap();
    drop(store);
    check(&open(&config));
}

#[test]
fn a_read_error_is_a_miss_and_a_counter() {
    let dir = tempfile::tempdir().unwrap();
    let (store, faults, _) = open_faulty(&config(&[(dir.path(), 16 * MIB)]));
    put(&store, "a", 1).unwrap();
    faults.add(Rule::new(Op::Read, Fault::Error(libc::EIO)).on("seg-"));
    let mut out = vec![1, 2, 3];
    assert!(
        store
            .append_inline(&name("a"), Wait::May, &mut out, |meta, out| {
                out.push(4);
                Some(0..meta.size)
            })
            .unwrap()
            .is_none()
    );
    assert_eq!(out, [1, 2, 3]);
    assert!(store.peek(&name("a")).is_none());
    assert_eq!(store.stats().dirs[0].read_failures, 1);
}

#[test]
fn eviction_goes_on_through_failures_and_never_over_the_limit() {
    for (op, errno) in [
        (Op::Delete, libc::EIO),
        (Op::Create, libc::EMFILE),
        (Op::Read, libc::EIO),
        (Op::Write, libc::ENOSPC),
        (Op::Resize, libc::EIO),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(&[(dir.path(), 2 * MIB)]);
        config.segment_bytes = Some(128 << 10);
        config.retry_after = Duration::ZERO;
        let (store, faults, _) = open_faulty(&config);
        let mut failed = 0;
        for i in 0..3000u64 {
            if i % 50 == 0 {
                faults.clear();
                faults.add(
                    Rule::new(op, Fault::Error(errno))
                        .on("seg-")
                        .after(i % 7)
                        .times(5),
                );
            }
            failed += put(&store, &format!("o/{i}"), i).is_err() as u32;
            let earlier = name(&format!("o/{}", i / 2));
            let here = store.peek(&earlier).is_some();
            let got = read_inline(&store, &earlier);
            assert!(got.is_none() || got == Some(bytes(i / 2, 5000)));
            assert!(got.is_some() == here || op == Op::Read, "{op:?} {i}");
            if i % 10 == 0 {
                assert!(disk_bytes(dir.path()) <= 2 * MIB, "{op:?} {i}");
            }
        }
        assert!(failed < 600, "{op:?}: {failed}");
        assert!(faults.happened() > 0, "{op:?}");
        faults.clear();
        for i in 3000..3010 {
            put(&store, &format!("o/{i}"), i).unwrap();
            assert_eq!(
                read_inline(&store, &name(&format!("o/{i}"))).unwrap(),
                bytes(i, 5000)
            );
        }
        drop(store);
        let store = open(&config);
        for i in 0..3010u64 {
            assert!(
                read_inline(&store, &name(&format!("o/{i}")))
                    .is_none_or(|got| got == bytes(i, 5000)),
                "{op:?} {i}"
            );
        }
    }
}

#[test]
fn what_is_prepared_and_cannot_be_cut_off_counts_as_used() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&[(dir.path(), 2 * MIB)]);
    config.segment_bytes = Some(128 << 10);
    let (store, faults, _) = open_faulty(&config);
    faults.add(Rule::new(Op::Resize, Fault::Error(libc::EIO)));
    for i in 0..2000u64 {
        put(&store, &format!("o/{i}"), i).unwrap();
        assert!(disk_bytes(dir.path()) <= 2 * MIB, "{i}");
    }
    store.close().unwrap();
    assert!(faults.happened() > 50);
    let size = |file| std::fs::metadata(dir.path().join(file)).unwrap().len();
    let identity = size("identity.json") + size("identity.copy");
    assert_eq!(
        store.stats().dirs[0].used_bytes,
        disk_bytes(dir.path()) - identity
    );
}

#[test]
fn a_record_within_an_object_is_not_taken_for_a_record() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&[(dir.path(), 64 * MIB)]);
    let store = open(&config);
    put(&store, "secret", 1).unwrap();
    let segment = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|f| f.unwrap().path())
        .find(|f| f.to_str().unwrap().contains("seg-"))
        .unwrap();
    let mut log = std::fs::read(&segment).unwrap();
    log.truncate(records_end(&log));
    // An object that is a copy of the log, at every offset of the grid; then its own header is
    // destroyed, so that the scan must find its way through its data.
    store.remove(&name("secret"));
    for i in 0..8u64 {
        let data = [vec![0; i as usize * 8], log.clone()].concat();
        store
            .put_head(
                &name(&format!("copy/{i}")),
                &meta(data.len() as u64, "c"),
                5,
                Some(&data),
            )
            .unwrap();
    }
    put(&store, "last", 2).unwrap();
    drop(store);
    let bytes_before = std::fs::read(&segment).unwrap();
    let mut damaged = bytes_before.clone();
    // The first header is that of "secret"; the copies' headers come after the tombstone.
    for at in (log.len().next_multiple_of(64)..damaged.len()).step_by(64) {
        if damaged[at..].starts_with(b"FBR3")
            && damaged[at + 4] == 1
            && !damaged[at..at + 200].windows(4).any(|w| w == b"last")
        {
            damaged[at + 9] ^= 0xff;
        }
    }
    assert_ne!(damaged, bytes_before);
    std::fs::write(&segment, damaged).unwrap();
    let store = open(&config);
    assert!(store.peek(&name("secret")).is_none());
    assert_eq!(read_inline(&store, &name("last")).unwrap(), bytes(2, 5000));
    assert_eq!(store.stats().entries, 1);
}
