//! Entries of a former owner, put into the cache of the new one.

use bytes::Bytes;
use forebay_core::{Attributes, ManualClock, MemoryBudget, ObjectMeta, ObjectName};
use forebay_engine::{
    CacheChange, Engine, EngineConfig, EntryName, FixedBuckets, Freshness, Holding, TakenOver, Wait,
};
use forebay_store::{DirConfig, Held, HeldAs, Store, StoreConfig};
use forebay_testing::engine::{Bench, NOW, name, noise};
use std::{sync::Arc, time::Duration};

fn engine(dir: &std::path::Path) -> Engine {
    let clock = Arc::new(ManualClock::at(Duration::from_secs(1000)));
    let config = StoreConfig {
        dirs: vec![DirConfig {
            path: dir.to_owned(),
            capacity_bytes: 24 << 20,
        }],
        ..StoreConfig::default()
    };
    let store = Arc::new(Store::open(config, clock.clone()).unwrap());
    Engine::new(
        EngineConfig::default(),
        Arc::new(FixedBuckets::default()),
        Some(store),
        clock,
        MemoryBudget::new(64 << 20),
    )
}

fn head(key: &str, etag: &str, bytes: usize, at: u32) -> Held {
    let meta = ObjectMeta {
        size: bytes as u64,
        etag: Some(etag.to_owned()),
        last_modified_ms: 1,
        attributes: Attributes::default(),
    };
    Held {
        name: ObjectName::new("data", key).unwrap(),
        version: meta.version(),
        what: HeldAs::Head {
            meta: Arc::new(meta),
            validated_at_secs: at,
            data: Some(Bytes::from(vec![1; bytes])),
        },
    }
}

#[tokio::test]
async fn what_is_taken_over_is_as_old_as_it_was_and_replaces_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    let store = engine.store().unwrap().clone();
    let at = |key: &str| {
        let name = ObjectName::new("data", key).unwrap();
        store.head(&name, Wait::May).unwrap()
    };
    let both = vec![head("a", "1", 10, 900), head("b", "1", 10, 0)];
    let taken = engine.take_over(both.clone(), false, |_| false).await;
    let taken = taken.unwrap();
    assert_eq!((taken.entries, taken.bytes, taken.is_full), (2, 20, false));
    assert_eq!(at("a").unwrap().validated_at_secs, 900);
    assert_eq!(at("b").unwrap().validated_at_secs, 0);
    // It is here already; another version is; it was written.
    let mut again = both;
    again.extend([head("a", "2", 20, 999), head("c", "1", 10, 999)]);
    let is_old = |name: &ObjectName| name.key() == "c";
    let taken = engine.take_over(again, true, is_old).await.unwrap();
    assert_eq!(taken, TakenOver::default());
    let a = at("a").unwrap();
    assert_eq!((a.validated_at_secs, a.meta.size), (900, 10));
    assert!(at("c").is_none());
    let chunk = |version| Held {
        name: ObjectName::new("data", "a").unwrap(),
        version,
        what: HeldAs::Chunk {
            index: 1,
            data: Bytes::from_static(b"of another version"),
        },
    };
    let other = vec![chunk(head("a", "3", 9, 0).version)];
    let taken = engine.take_over(other, true, |_| false).await.unwrap();
    assert_eq!(taken.entries, 0);
}

#[tokio::test]
async fn nothing_goes_for_it_unless_it_may() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    let store = engine.store().unwrap().clone();
    let many: Vec<_> = (0..40)
        .map(|i| head(&format!("key-{i}"), "1", 1 << 20, 900))
        .collect();
    let taken = engine
        .take_over(many.clone(), false, |_| false)
        .await
        .unwrap();
    assert!(
        taken.is_full && (1..24).contains(&taken.entries),
        "{taken:?}"
    );
    assert!(store.peek(&many[0].name).is_some());
    let taken = engine
        .take_over(many.clone(), true, |_| false)
        .await
        .unwrap();
    assert!(!taken.is_full);
    assert!(store.peek(&many[39].name).is_some() && store.peek(&many[0].name).is_none());
}

#[tokio::test]
async fn what_another_node_has_is_kept_where_it_is_pinned_and_as_new() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(dir.path());
    let name = |key: &str| ObjectName::new("data", key).unwrap();
    let keeps = async |key: &str, held: Holding| {
        let kept = engine.keeps_what_is_held(vec![(name(key), held)]).await;
        kept.unwrap()[0]
    };
    let here = vec![head("a", "1", 10, 900)];
    let version = here[0].version;
    engine.take_over(here, false, |_| false).await.unwrap();
    let held = |chunks| Holding {
        version,
        validated_at_secs: 900,
        size: 10,
        chunks,
    };
    let whole = || held(std::iter::once(0..1).collect());
    let nothing = || held(Vec::new());
    assert!(!keeps("a", whole()).await && !keeps("a", nothing()).await);
    assert!(!keeps("gone", nothing()).await);
    let pinned = vec![name("a"), name("gone")];
    let pin = engine.change_cache(CacheChange::Pin, pinned, false);
    pin.await.unwrap();
    // Who holds no bytes gives away its pin alone, also of what is nowhere yet.
    assert!(keeps("a", whole()).await && keeps("a", nothing()).await);
    assert!(keeps("gone", nothing()).await && !keeps("gone", whole()).await);
}

/// The store may have given up the head of a large object that is still in memory.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_does_not_replace_a_newer_version_that_is_known_in_memory_alone() {
    const BYTES: usize = 3 << 20;
    let b = Bench::new(Freshness::RevalidateAfter(Duration::from_secs(60)));
    let meta = || Arc::new(b.origin.objects.lock()["a"].1.clone());
    b.origin.set("a", noise(BYTES, 1));
    let before = meta();
    b.origin.set("a", noise(BYTES, 2));
    let now = meta();
    assert!(b.get("a").await.unwrap().0 == noise(BYTES, 2));
    let store = b.engine.store().unwrap().clone();
    let take = async |meta: &Arc<ObjectMeta>| {
        store.evict(&name("a"));
        let held = Held {
            name: name("a"),
            version: meta.version(),
            what: HeldAs::Head {
                meta: meta.clone(),
                validated_at_secs: NOW.as_secs() as u32 - 10,
                data: None,
            },
        };
        let lacking = b.engine.lacking(vec![EntryName::of(&held)]).await.unwrap();
        let copies = lacking.into_iter().map(|lacking| (held.clone(), lacking));
        let taken = b.engine.take_copies(copies.collect()).await;
        taken.unwrap().entries
    };
    assert_eq!(take(&before).await, 0);
    assert!(store.peek(&name("a")).is_none());
    assert!(b.get("a").await.unwrap().0 == noise(BYTES, 2));
    // It is as new as it is known to be here.
    assert_eq!(take(&now).await, 1);
    let kept = store.peek(&name("a")).unwrap();
    assert_eq!(u64::from(kept.validated_at_secs), NOW.as_secs());
}
