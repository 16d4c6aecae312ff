//! A file system that is smaller than the configured cache, and one that others fill.

use crate::common::*;
use forebay_core::{ErrorKind, ObjectName, SystemClock, limits::CHUNK_BYTES};
use forebay_store::{DirState, Part, Store, StoreConfig};
use std::{
    ffi::CString,
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;

/// Runs `test` with its own file system of this size: a tmpfs that only its thread, and those that
/// it starts, can see. If this process may not mount one, it says so and tests nothing.
fn with_file_system(bytes: u64, test: impl FnOnce(&Path) + Send) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    std::thread::scope(|scope| {
        scope.spawn(move || match mount(&path, bytes) {
            Ok(()) => test(&path),
            Err(e) => eprintln!("skipped: no file system can be mounted here: {e}"),
        });
    });
}

fn mount(path: &Path, bytes: u64) -> std::io::Result<()> {
    let c = |s: &str| CString::new(s).unwrap();
    let (none, root, tmpfs) = (c("none"), c("/"), c("tmpfs"));
    let (at, options) = (c(path.to_str().unwrap()), c(&format!("size={bytes}")));
    // SAFETY: strings that end with a zero, and no other memory. The changed mounts are those of
    // this thread alone, from the first call on.
    let done = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(
                none.as_ptr(),
                root.as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            ) == 0
            && libc::mount(
                tmpfs.as_ptr(),
                at.as_ptr(),
                tmpfs.as_ptr(),
                0,
                options.as_ptr().cast(),
            ) == 0
    };
    if done {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

fn settings(path: &Path, capacity: u64, keep_free: u64, background: bool) -> StoreConfig {
    StoreConfig {
        segment_bytes: Some(2 * MIB + 200_000),
        keep_free_bytes: Some(keep_free),
        background,
        ..config(&[(path, capacity)])
    }
}

fn shard() -> (ObjectName, forebay_core::ObjectMeta) {
    (name("shard"), meta(400 * CHUNK_BYTES, "shard"))
}

fn put_chunk(store: &Store, i: u32) -> forebay_core::Result<()> {
    let (name, meta) = shard();
    let data = bytes(u64::from(i), CHUNK_BYTES as usize);
    store.put_part(&name, meta.version(), Part::Chunk(i), &data)
}

/// The `chunks` that are there, each with its bytes checked.
fn present(store: &Store, chunks: std::ops::Range<u32>) -> Vec<u32> {
    let (name, meta) = shard();
    chunks
        .filter(|i| {
            let found = read_part(
                store,
                &name,
                meta.version(),
                Part::Chunk(*i),
                0..CHUNK_BYTES,
            );
            if let Some(found) = &found {
                assert_eq!(*found, bytes(u64::from(*i), CHUNK_BYTES as usize), "{i}");
            }
            found.is_some()
        })
        .collect()
}

fn fill(path: PathBuf, bytes: u64) -> std::io::Result<()> {
    let mut file = fs::File::options().append(true).create(true).open(path)?;
    (0..bytes / MIB).try_for_each(|_| file.write_all(&[1; MIB as usize]))
}

fn free_of(path: &Path) -> u64 {
    forebay_store::disk::space_of(path).unwrap().available_bytes
}

#[test]
fn a_cache_works_on_a_file_system_smaller_than_itself() {
    for keep_free in [0, 8 * MIB] {
        with_file_system(48 * MIB, |path| {
            let settings = settings(&path.join("c"), 1 << 30, keep_free, false);
            let store = Store::open(settings.clone(), clock()).unwrap();
            let dir = |store: &Store| store.stats().dirs[0].clone();
            assert!(dir(&store).effective_bytes <= 48 * MIB - keep_free);
            for i in 0..150 {
                put_chunk(&store, i).unwrap_or_else(|e| panic!("{i}: {}", e.describe()));
                assert!(dir(&store).used_bytes <= 48 * MIB);
                assert!(free_of(path) + MIB / 2 >= keep_free, "{}", free_of(path));
            }
            let here = present(&store, 0..150);
            assert!(here.len() >= 20, "{here:?}");
            assert!(here.contains(&149), "the newest is here");
            assert!(!here.contains(&0), "the oldest made room");
            assert_eq!(dir(&store).state, DirState::Ok);
            assert!(dir(&store).evicted_records >= 100);
            store.close().unwrap();
            drop(store);
            let store = Store::open(settings, clock()).unwrap();
            assert_eq!(present(&store, 0..150), here, "evicted is evicted");
            put_chunk(&store, 150).unwrap();
        });
    }
}

/// One that could not hold the four segments of the smallest cache.
#[test]
fn a_cache_goes_on_taking_writes_on_a_tiny_file_system() {
    for bytes in [4 * MIB, 5 * MIB, 7 * MIB] {
        with_file_system(bytes, |path| {
            let settings = settings(&path.join("c"), 1 << 30, 0, false);
            let store = Store::open(settings, clock()).unwrap();
            for i in 0..40 {
                put_chunk(&store, i).unwrap_or_else(|e| panic!("{bytes}, {i}: {}", e.describe()));
                assert_eq!(store.stats().dirs[0].state, DirState::Ok, "{bytes}, {i}");
            }
            let here = present(&store, 0..40);
            assert!(
                here.contains(&39) && !here.contains(&0),
                "{bytes}: {here:?}"
            );
        });
    }
}

#[test]
fn room_that_others_take_is_given_up_and_taken_again() {
    with_file_system(64 * MIB, |path| {
        let config = settings(&path.join("c"), 1 << 30, 8 * MIB, true);
        let store = Store::open(config, Arc::new(SystemClock)).unwrap();
        for i in 0..100 {
            put_chunk(&store, i).unwrap();
        }
        let before = store.stats().dirs[0].effective_bytes;
        assert!(before > 50 * MIB, "{before}");
        let until = |what: &str, done: &dyn Fn() -> bool| {
            let began = Instant::now();
            while !done() {
                assert!(
                    began.elapsed() < Duration::from_secs(60),
                    "{what}: {:?}",
                    store.stats().dirs[0]
                );
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        // Others never meet a full disk while they take less at a time than is kept free.
        for _ in 0..8 {
            fill(path.join("others"), 4 * MIB).expect("room is made for others");
            until("room is made", &|| free_of(path) >= 7 * MIB);
        }
        // What was free before may have been enough for the last of them.
        let others = 32 * MIB;
        until("less is taken", &|| {
            let stats = &store.stats().dirs[0];
            stats.effective_bytes <= 64 * MIB - others - 7 * MIB
                && stats.used_bytes <= stats.effective_bytes
        });
        let here = present(&store, 0..100);
        assert!(here.len() >= 8 && here.contains(&99), "{here:?}");
        put_chunk(&store, 100).unwrap();
        fs::remove_file(path.join("others")).unwrap();
        until("it grows again", &|| {
            store.stats().dirs[0].effective_bytes > 50 * MIB
        });
        for i in 101..140 {
            put_chunk(&store, i).unwrap();
        }
        assert!(present(&store, 0..140).len() >= 30);
    });
}

#[test]
fn room_that_was_set_aside_is_left_free_until_it_is_written() {
    with_file_system(96 * MIB, |path| {
        let settings = settings(&path.join("c"), 1 << 30, 0, false);
        let store = Store::open(settings, clock()).unwrap();
        store.set_aside(0, 48 * MIB, u64::MAX).unwrap();
        // The file system says that nearly all of it is free, and does not have it twice.
        assert!(free_of(path) > 90 * MIB);
        let more = store.set_aside(0, 60 * MIB, u64::MAX);
        assert_eq!(more.unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(store.aside_bytes(0), 48 * MIB);
        for i in 0..100 {
            put_chunk(&store, i).unwrap_or_else(|e| panic!("{i}: {}", e.describe()));
        }
        fill(path.join("staged"), 48 * MIB).expect("what was granted is there");
        store.aside_came(0, 48 * MIB);
        for i in 100..150 {
            put_chunk(&store, i).unwrap_or_else(|e| panic!("{i}: {}", e.describe()));
        }
        let here = present(&store, 0..150);
        assert!(here.len() >= 20 && here.contains(&149), "{here:?}");
        // What never came is the cache's again.
        store.set_aside(0, 8 * MIB, u64::MAX).unwrap();
        store.give_back(0, 8 * MIB, 8 * MIB);
        assert_eq!(store.aside_bytes(0), 48 * MIB);
        put_chunk(&store, 150).unwrap();
    });
}

#[test]
fn a_cache_on_a_full_file_system_goes_on_and_closes_without_an_error() {
    with_file_system(64 * MIB, |path| {
        let settings = settings(&path.join("c"), 1 << 30, 0, false);
        let store = Store::open(settings.clone(), clock()).unwrap();
        let small = |i: u32| name(&format!("small/{i}"));
        for i in 0..20 {
            put_chunk(&store, i).unwrap();
            let data = bytes(u64::from(i), 5000);
            store
                .put_head(&small(i), &meta(5000, "s"), 7, Some(&data))
                .unwrap();
        }
        store.pin(&small(3)).unwrap();
        // To the last byte.
        assert!(fill(path.join("others"), 64 * MIB).is_err());
        assert!(store.remove(&small(19)) && store.remove(&small(1)));
        for i in 20..60 {
            put_chunk(&store, i).unwrap_or_else(|e| panic!("{i}: {}", e.describe()));
        }
        let here = present(&store, 0..60);
        assert!(here.len() >= 5 && here.contains(&59), "{here:?}");
        assert!(store.peek(&small(3)).is_some(), "pinned");
        store.close().unwrap();
        drop(store);
        let store = Store::open(settings, clock()).unwrap();
        assert_eq!(present(&store, 0..60), here, "evicted is evicted");
        assert!(store.peek(&small(1)).is_none() && store.peek(&small(19)).is_none());
        assert_eq!(read_inline(&store, &small(3)).unwrap(), bytes(3, 5000));
        put_chunk(&store, 60).unwrap();
    });
}
