//! A pass over all that is cached, for a node that owns it now.

use forebay_core::{Attributes, ManualClock, ObjectMeta, ObjectName, limits::CHUNK_BYTES};
use forebay_store::{DirConfig, Held, HeldAs, Part, Store, StoreConfig, Walk};
use std::{collections::BTreeSet, sync::Arc};

const MIB: usize = 1 << 20;

fn open(dir: &std::path::Path) -> Store {
    let config = StoreConfig {
        dirs: vec![DirConfig {
            path: dir.to_owned(),
            capacity_bytes: 256 << 20,
        }],
        ..StoreConfig::default()
    };
    Store::open(
        config,
        Arc::new(ManualClock::at(std::time::Duration::from_secs(1000))),
    )
    .unwrap()
}

fn name(key: &str) -> ObjectName {
    ObjectName::new("data", key).unwrap()
}

fn meta(size: usize, etag: &str) -> ObjectMeta {
    ObjectMeta {
        size: size as u64,
        etag: Some(etag.to_owned()),
        last_modified_ms: 1,
        attributes: Attributes::default(),
    }
}

fn small(store: &Store, key: &str, size: usize, etag: &str, at: u32) {
    let data = vec![key.len() as u8; size];
    let meta = meta(size, etag);
    store.put_head(&name(key), &meta, at, Some(&data)).unwrap();
}

/// Walks to the end, and restarts before each step.
fn all(store: &Store, bytes: u64, wanted: &dyn Fn(u128, u64) -> bool) -> Vec<Held> {
    let (mut found, mut at): (_, Option<Walk>) = (Vec::new(), None);
    loop {
        let step = store.walk(at.clone(), bytes, wanted);
        let most = bytes + CHUNK_BYTES + 4096;
        assert!(step.found.iter().map(Held::bytes).sum::<u64>() <= most);
        found.extend(step.found);
        let Some(next) = step.next else {
            assert_eq!(step.left_bytes, 0);
            return found;
        };
        assert!(at.is_none_or(|at| next.is_after(&at) && !at.is_after(&next)));
        let sent = serde_json::to_vec(&next).unwrap();
        at = Some(serde_json::from_slice(&sent).unwrap());
    }
}

fn keys(found: &[Held]) -> Vec<String> {
    found
        .iter()
        .map(|h| format!("{}@{}", h.name.key(), h.at()))
        .collect()
}

#[test]
fn a_walk_gives_what_is_current_and_wanted_once_in_bounded_steps() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for i in 0..300 {
        small(&store, &format!("small-{i}"), 10_000 + i, "a", 7);
    }
    small(&store, "small-3", 500, "b", 9);
    store.remove(&name("small-4"));
    store.touch(&name("small-5"), meta(10_005, "a").version(), 11);
    let large = meta(3 * MIB, "l");
    store.put_head(&name("large"), &large, 8, None).unwrap();
    for chunk in 0..3 {
        let data = vec![chunk as u8; MIB];
        let part = Part::Chunk(chunk);
        let put = store.put_part(&name("large"), large.version(), part, &data);
        put.unwrap();
    }
    let aux = Part::Aux(1, 0);
    store
        .put_part(&name("large"), large.version(), aux, b"index")
        .unwrap();

    let found = all(&store, 100_000, &|_, _| true);
    let mut expected: BTreeSet<String> = (0..300).map(|i| format!("small-{i}@0")).collect();
    expected.remove("small-4@0");
    expected.extend(["large@0".to_owned()]);
    expected.extend((1..3).map(|i| format!("large@{}", i * MIB)));
    assert_eq!(keys(&found).into_iter().collect::<BTreeSet<_>>(), expected);
    // The head of the large one, and its first chunk.
    assert_eq!(found.len(), expected.len() + 1);
    let head = |key: &str| {
        let of_key = found.iter().filter(|h| h.name.key() == key);
        let head = of_key.map(|held| match &held.what {
            HeldAs::Head {
                meta,
                validated_at_secs,
                data,
            } => Some(((**meta).clone(), *validated_at_secs, data.clone())),
            HeldAs::Chunk { .. } => None,
        });
        head.flatten().next().unwrap()
    };
    assert_eq!(head("small-3").2.unwrap().len(), 500);
    assert_eq!(head("small-5").1, 11, "when it was last validated");
    assert_eq!((head("large").0, head("large").2), (large, None));

    let of_others = name("small-7").hash128();
    let found = all(&store, 100_000, &|name, at| name != of_others && at == 0);
    assert_eq!(
        found.len(),
        expected.len() - 2,
        "no later chunks, and not small-7"
    );
    assert!(all(&store, 1, &|_, _| false).is_empty());
}

#[test]
fn what_is_appended_meanwhile_is_given_too_and_a_walk_ends() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for i in 0..50 {
        small(&store, &format!("old-{i}"), 10_000, "a", 7);
    }
    let first = store.walk(None, 100_000, &|_, _| true);
    for i in 0..50 {
        small(&store, &format!("new-{i}"), 10_000, "a", 7);
    }
    let (mut found, mut at, mut steps) = (first.found, first.next, 0);
    while let Some(from) = at {
        // Somebody writes all the time.
        small(&store, &format!("more-{steps}"), 10_000, "a", 7);
        let step = store.walk(Some(from), 100_000, &|_, _| true);
        found.extend(step.found);
        (at, steps) = (step.next, steps + 1);
        assert!(steps < 100, "it ends");
    }
    let keys: BTreeSet<_> = keys(&found).into_iter().collect();
    for of in ["old", "new"] {
        assert!((0..50).all(|i| keys.contains(&format!("{of}-{i}@0"))));
    }
    assert_eq!(keys.len(), found.len(), "nothing twice");
}

#[test]
fn a_walk_goes_on_over_a_restart_and_over_segments_that_went() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for i in 0..200 {
        small(&store, &format!("old-{i}"), 100_000, "a", 7);
    }
    let first = store.walk(None, 1 << 20, &|_, _| true);
    store.close().unwrap();
    drop(store);
    let store = open(dir.path());
    let (mut found, mut at) = (first.found, first.next);
    while let Some(from) = at {
        let step = store.walk(Some(from), 1 << 20, &|_, _| true);
        found.extend(step.found);
        at = step.next;
    }
    let keys: BTreeSet<_> = keys(&found).into_iter().collect();
    assert_eq!((keys.len(), found.len()), (200, 200));
    // From nowhere that ever was.
    let none = r#"{"pass":1,"since":{"next":0,"open":[]},"until":{"next":0,"open":[]},"at":[3,7]}"#;
    let none: Walk = serde_json::from_str(none).unwrap();
    assert!(store.walk(Some(none), 1, &|_, _| true).found.len() <= 1);
}

/// Whoever follows a log sees each record, though some are being written whenever it asks, and a
/// walk that goes on later names nothing from before.
#[test]
fn a_later_walk_finds_all_that_was_written_since_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(open(dir.path()));
    let over = |from: Option<Walk>| {
        let (mut named, mut at) = (Vec::new(), from);
        loop {
            let (step, found) = store.walk_over(at, 64, &|_, _| true);
            assert!(found.len() <= 64);
            named.extend(found.into_iter().map(|(name, ..)| name.key().to_owned()));
            match step.next {
                Some(next) => at = Some(next),
                None => return (named, step.again),
            }
        }
    };
    for i in 0..200 {
        small(&store, &format!("old-{i}"), 1000, "a", 7);
    }
    let (named, again) = over(None);
    assert_eq!(named.len(), 200);
    assert!(over(again.clone()).0.is_empty());
    let writers: Vec<_> = (0..4)
        .map(|thread| {
            let store = store.clone();
            std::thread::spawn(move || {
                for i in 0..500 {
                    small(&store, &format!("new-{thread}-{i}"), 3000, "a", 7);
                }
            })
        })
        .collect();
    let (mut at, mut seen) = (again, Vec::new());
    loop {
        let is_over = writers.iter().all(|writer| writer.is_finished());
        let (named, again) = over(at);
        seen.extend(named);
        at = again;
        if is_over {
            break;
        }
    }
    let different: BTreeSet<_> = seen.iter().collect();
    assert_eq!(different.len(), 2000);
    assert!(seen.iter().all(|key| key.starts_with("new-")));
}
