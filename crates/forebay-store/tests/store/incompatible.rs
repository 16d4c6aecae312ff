//! Cache directories that another version wrote, whose identity is damaged, or whose buckets lead
//! elsewhere by now.

use crate::common::*;
use forebay_core::{ErrorKind, ObjectMeta};
use forebay_store::{Part, Sources, Store, StoreConfig};
use std::{fs, path::Path};

const MIB: u64 = 1 << 20;
const IDENTITY: &str = "identity.json";
const COPY: &str = "identity.copy";

fn put(store: &Store, key: &str, seed: u64) {
    let data = bytes(seed, 5000);
    let meta = meta(5000, &seed.to_string());
    store.put_head(&name(key), &meta, 7, Some(&data)).unwrap();
}

/// A directory with some objects, closed.
fn filled(dir: &Path) -> StoreConfig {
    let config = config(&[(dir, 16 * MIB)]);
    let store = open(&config);
    (0..20).for_each(|i| put(&store, &format!("o/{i}"), i));
    store.pin(&name("o/3")).unwrap();
    store.close().unwrap();
    config
}

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap())
        .filter(|e| e.file_name() != "lock")
        .map(|e| {
            let name = e.file_name().into_string().unwrap();
            (name, fs::read(e.path()).unwrap())
        })
        .collect();
    files.sort();
    files
}

fn copy(from: &Path, to: &Path) {
    for (name, bytes) in files(from) {
        fs::write(to.join(name), bytes).unwrap();
    }
}

#[test]
fn a_cache_of_another_format_is_kept_until_somebody_says_that_it_may_go() {
    let set_format = |dir: &Path| {
        let text = fs::read_to_string(dir.join(IDENTITY)).unwrap();
        let text = text.replace("\"format\":1,", "\"format\":2,");
        fs::write(dir.join(IDENTITY), text).unwrap();
    };
    let damage_both = |dir: &Path| {
        fs::write(dir.join(IDENTITY), "garbage").unwrap();
        fs::write(dir.join(COPY), "garbage").unwrap();
    };
    let lose_both = |dir: &Path| {
        fs::remove_file(dir.join(IDENTITY)).unwrap();
        fs::remove_file(dir.join(COPY)).unwrap();
    };
    let breaks: [(&dyn Fn(&Path), &str); 3] = [
        (&set_format, "format 2"),
        (&damage_both, "is damaged"),
        (&lose_both, "is not there"),
    ];
    for (break_it, says) in breaks {
        let dir = tempfile::tempdir().unwrap();
        let config = filled(dir.path());
        break_it(dir.path());
        fs::write(dir.path().join("somebody's"), "file").unwrap();
        let before = files(dir.path());
        let refused = Store::open(config.clone(), clock()).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Invalid);
        let text = refused.describe();
        assert!(text.contains(says) && text.contains("1 segments"), "{text}");
        let hint = refused.hint_text().unwrap();
        assert!(hint.contains("cache.discard_incompatible"), "{hint}");
        assert_eq!(files(dir.path()), before, "nothing was touched");
        let discarding = StoreConfig {
            discard_incompatible: true,
            ..config.clone()
        };
        let store = Store::open(discarding.clone(), clock()).unwrap();
        assert_eq!(store.stats().entries, 0);
        put(&store, "new", 1);
        store.close().unwrap();
        drop(store);
        // Readable contents are not discarded.
        let store = Store::open(discarding, clock()).unwrap();
        assert_eq!(read_inline(&store, &name("new")).unwrap(), bytes(1, 5000));
        assert!(dir.path().join("somebody's").exists());
    }
}

#[test]
fn a_damaged_identity_is_made_anew_from_its_copy_and_everything_is_asked_about() {
    let lost = |dir: &Path| fs::remove_file(dir.join(IDENTITY)).unwrap();
    let cut = |dir: &Path| fs::write(dir.join(IDENTITY), "{\"format\":").unwrap();
    let empty = |dir: &Path| fs::write(dir.join(IDENTITY), "").unwrap();
    for break_it in [&lost as &dyn Fn(&Path), &cut, &empty] {
        let dir = tempfile::tempdir().unwrap();
        let config = filled(dir.path());
        break_it(dir.path());
        for _ in 0..2 {
            let store = open(&config);
            for i in 0..20 {
                let n = name(&format!("o/{i}"));
                assert_eq!(read_inline(&store, &n).unwrap(), bytes(i, 5000));
                assert_eq!(store.peek(&n).unwrap().validated_at_secs, 0);
            }
            assert_eq!(store.pinned(), [name("o/3")]);
            store.close().unwrap();
        }
        // A cache that has no copy yet gets one.
        fs::remove_file(dir.path().join(COPY)).unwrap();
        drop(open(&config));
        assert!(dir.path().join(COPY).exists());
    }
}

/// `data/format-2` was written by the program as it was when its records had blocks of 16 KiB.
#[test]
fn a_cache_of_the_version_before_is_read_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    copy(Path::new("tests/data/format-2"), dir.path());
    let config = StoreConfig {
        segment_bytes: Some(1 << 18),
        ..config(&[(dir.path(), 2 * MIB)])
    };
    let big: ObjectMeta = meta(3 << 20, "big");
    let check = |store: &Store, chunk: bool| {
        for (i, len) in [(1, 5_000), (2, 20_000), (4, 0)] {
            let n = name(&format!("small/{i}"));
            assert_eq!(read_inline(store, &n).unwrap(), bytes(i, len), "{i}");
        }
        assert_eq!(
            read_inline(store, &name("small/3")).unwrap(),
            bytes(3, 200),
            "replaced"
        );
        assert!(store.peek(&name("small/5")).is_none(), "removed");
        assert_eq!(*read_head(store, &name("big")).unwrap().meta, big);
        let part = |range: std::ops::Range<u64>| {
            read_part(store, &name("big"), big.version(), Part::Chunk(1), range)
        };
        if chunk {
            let want = bytes(11, 50_000);
            for range in [0..50_000, 16_383..16_385, 20_000..20_001, 49_999..50_000] {
                let within = range.start as usize..range.end as usize;
                assert_eq!(part(range).unwrap(), want[within]);
            }
        }
    };
    let store = open(&config);
    check(&store, true);
    assert_eq!(store.peek(&name("small/1")).unwrap().validated_at_secs, 7);
    assert_eq!(store.pinned(), [name("small/1")]);
    // They stay readable when the evictor moves them, alongside records of this version, and when
    // the index is loaded from a checkpoint.
    for i in 0..400 {
        put(&store, &format!("new/{i}"), 1000 + i);
        check(&store, false);
    }
    assert!(store.stats().dirs[0].relocated_bytes > 25_000);
    store.close().unwrap();
    drop(store);
    let store = open(&config);
    check(&store, false);
    assert_eq!(
        read_inline(&store, &name("new/399")).unwrap(),
        bytes(1399, 5000)
    );
    assert_eq!(store.stats().dirs[0].checksum_failures, 0);
}

fn of(config: &StoreConfig, origins: &[(&str, &str)], others: &str) -> StoreConfig {
    let named = origins.iter().map(|(b, o)| (b.to_string(), o.to_string()));
    StoreConfig {
        sources: Sources::new(named, others),
        ..config.clone()
    }
}

#[test]
fn what_one_origin_said_is_not_used_for_another() {
    let dir = tempfile::tempdir().unwrap();
    let base = config(&[(dir.path(), 16 * MIB)]);
    let (a, b) = (
        of(&base, &[("bucket", "s3 a"), ("x", "s3 x")], "none"),
        of(&base, &[("x", "s3 x"), ("bucket", "s3 b")], "none"),
    );
    let chunk = |store: &Store| {
        let m = meta(2 * MIB, "same");
        read_part(store, &name("big"), m.version(), Part::Chunk(0), 0..100)
    };
    let store = Store::open(a.clone(), clock()).unwrap();
    put(&store, "o", 1);
    let m = meta(2 * MIB, "same");
    store.put_head(&name("big"), &m, 7, None).unwrap();
    store
        .put_part(&name("big"), m.version(), Part::Chunk(0), &bytes(5, 100))
        .unwrap();
    store.pin(&name("o")).unwrap();
    store.close().unwrap();
    drop(store);
    let store = Store::open(b.clone(), clock()).unwrap();
    assert!(store.peek(&name("o")).is_none() && store.peek(&name("big")).is_none());
    assert!(read_inline(&store, &name("o")).is_none() && chunk(&store).is_none());
    assert!(!store.has_part(&name("big"), m.version(), Part::Chunk(0)));
    assert_eq!(store.pinned(), [name("o")], "a pin is of a name");
    put(&store, "o", 2);
    assert!(store.remove(&name("big")) || chunk(&store).is_none());
    store.close().unwrap();
    drop(store);
    // Each finds its own records, as long as they are there.
    let store = Store::open(a, clock()).unwrap();
    assert_eq!(read_inline(&store, &name("o")).unwrap(), bytes(1, 5000));
    assert_eq!(chunk(&store).unwrap(), bytes(5, 100));
    drop(store);
    let store = Store::open(b, clock()).unwrap();
    assert_eq!(read_inline(&store, &name("o")).unwrap(), bytes(2, 5000));
    assert!(store.peek(&name("o")).unwrap().pinned);
}

#[test]
fn a_cache_from_before_origins_were_distinguished_belongs_to_the_first_ones() {
    let dir = tempfile::tempdir().unwrap();
    copy(Path::new("tests/data/format-2"), dir.path());
    let base = config(&[(dir.path(), 16 * MIB)]);
    let here = |config: &StoreConfig| {
        let store = Store::open(config.clone(), clock()).unwrap();
        let found = read_inline(&store, &name("small/1"));
        store.close().unwrap();
        found
            .inspect(|found| assert_eq!(*found, bytes(1, 5000)))
            .is_some()
    };
    let (a, b) = (
        of(&base, &[("bucket", "s3 a")], "none"),
        of(&base, &[("bucket", "s3 b")], "none"),
    );
    assert!(here(&a) && !here(&b) && here(&a));
    // A bucket matched by a wildcard.
    let other = tempfile::tempdir().unwrap();
    copy(Path::new("tests/data/format-2"), other.path());
    let base = config(&[(other.path(), 16 * MIB)]);
    let (a, b) = (of(&base, &[], "file /a/*"), of(&base, &[], "file /b/*"));
    assert!(here(&a) && !here(&b) && here(&a));
}

#[test]
fn a_node_keeps_its_identity_with_its_directories() {
    let temp = || tempfile::tempdir().unwrap();
    let (a, b, c) = (temp(), temp(), temp());
    let of = |node: Option<u64>, dirs: &[&Path]| {
        let dirs: Vec<_> = dirs.iter().map(|d| (*d, 16 * MIB)).collect();
        StoreConfig {
            node,
            ..config(&dirs)
        }
    };
    let node = |config: &StoreConfig| {
        let store = open(config);
        store.close().unwrap();
        store.node()
    };
    // Directories of a node that was alone become those of a member.
    assert_eq!(node(&of(None, &[a.path()])), None);
    assert_eq!(node(&of(Some(7), &[a.path()])), Some(7));
    assert_eq!(node(&of(None, &[a.path()])), Some(7));
    // A disk is added, and the first one is replaced.
    assert_eq!(node(&of(None, &[a.path(), b.path()])), Some(7));
    assert_eq!(node(&of(None, &[c.path(), b.path()])), Some(7));
    // The identity file is lost: its copy knows.
    fs::remove_file(b.path().join(IDENTITY)).unwrap();
    assert_eq!(node(&of(None, &[b.path()])), Some(7));

    let (other, alone) = (temp(), temp());
    assert_eq!(node(&of(Some(8), &[other.path()])), Some(8));
    assert_eq!(node(&of(None, &[alone.path()])), None);
    let refused = |config: &StoreConfig| {
        let e = Store::open(config.clone(), clock()).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Invalid);
        e.message().to_owned()
    };
    let (seven, eight) = (format!("{:016x}", 7), format!("{:016x}", 8));
    let said = refused(&of(None, &[a.path(), alone.path(), other.path()]));
    for named in [&other.path().display().to_string(), &seven, &eight] {
        assert!(said.contains(named), "{said}");
    }
    let said = refused(&of(Some(8), &[a.path()]));
    assert!(said.contains(&format!("and this one is {eight}")), "{said}");
    assert_eq!(node(&of(None, &[alone.path()])), None);
}
