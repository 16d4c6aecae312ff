//! The read and write path over an origin that records every request.

use async_trait::async_trait;
use forebay_core::{
    ByteRange, Clock, Error, ErrorKind, MemoryBudget, ObjectMeta, ObjectName, Result, limits,
    sync::Mutex,
};
use forebay_engine::{
    Announced, BucketRule, BucketRules, Buckets, Changes, Conditions, Engine, EngineConfig,
    FixedBuckets, ForwardBody, ForwardRequest, Freshness, ListedBucket, PutCondition, PutRequest,
    ReadOptions, WarmOutcome,
};
use forebay_origin::Origin;
use forebay_store::{DirConfig, Store, StoreConfig};
use forebay_testing::engine::{Bench, NOW, collect, name, noise, settled};
use futures::{FutureExt, StreamExt, future::join_all, stream};
use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::{
    runtime::Builder,
    sync::{Barrier, watch},
};

const MIB: usize = 1 << 20;
const MINUTE: Freshness = Freshness::RevalidateAfter(Duration::from_secs(60));

/// Waits until something holds.
async fn until(holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Leaves a write that the origin does not acknowledge, when it has taken effect there.
async fn leave<T>(write: impl Future<Output = T>, is_done: impl Fn() -> bool) {
    tokio::select! {
        _ = write => panic!("it was acknowledged"),
        () = until(is_done) => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_object_costs_one_request_and_then_none_and_then_a_revalidation() {
    let b = Bench::new(MINUTE);
    b.origin.set("a", noise(10_000, 1));
    assert_eq!(b.get("a").await.unwrap(), (noise(10_000, 1), "MISS"));
    assert_eq!(b.get("a").await.unwrap(), (noise(10_000, 1), "HIT"));
    assert_eq!(b.origin.requests(), 1);
    b.clock.advance(Duration::from_secs(61));
    assert_eq!(b.get("a").await.unwrap(), (noise(10_000, 1), "REVALIDATED"));
    assert_eq!(b.get("a").await.unwrap().1, "HIT");
    assert_eq!(b.origin.requests(), 2);
    b.origin.set("a", noise(500, 2));
    assert_eq!(
        b.get("a").await.unwrap().0,
        noise(10_000, 1),
        "fresh by the rule"
    );
    b.clock.advance(Duration::from_secs(61));
    assert_eq!(b.get("a").await.unwrap(), (noise(500, 2), "MISS"));
    let s = b.engine.stats().snapshot();
    assert_eq!((s.reads_miss, s.reads_hit, s.reads_revalidated), (2, 3, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_after_what_came_from_the_origin_continue_the_read() {
    let b = Bench::new(MINUTE);
    b.origin.set("a", noise(20 * MIB, 1));
    assert!(b.get("a").await.unwrap().0 == noise(20 * MIB, 1));
    let continued = b.origin.continued.lock().clone();
    assert!(
        continued.iter().any(|range| range.end == 20 * MIB as u64),
        "{continued:?}"
    );
    assert!(
        continued.iter().all(|range| range.start > 0),
        "{continued:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_after_what_was_read_ahead_continue_the_read() {
    let b = Bench::new(MINUTE);
    let data = noise(20 * MIB, 1);
    b.origin.set("a", data.clone());
    let first = ByteRange::Inclusive(0, MIB as u64 - 1);
    b.get_range("a", Some(first)).await.unwrap();
    settled(&b.engine).await;
    b.origin.gets.lock().clear();
    let options = ReadOptions::default();
    let read = b.engine.read(&name("a"), None, &options).await.unwrap();
    let (mut body, mut at) = (read.body, 0);
    while let Some(piece) = body.next().await {
        let piece = piece.unwrap();
        assert!(piece[..] == data[at..at + piece.len()]);
        at += piece.len();
        drop(piece);
        // So that each chunk is in the store before it is read.
        tokio::time::sleep(Duration::from_millis(20)).await;
        settled(&b.engine).await;
    }
    assert_eq!(at, data.len());
    let gets = b.origin.gets.lock().clone();
    let mut begun: Vec<u64> = gets
        .iter()
        .flat_map(|(_, r)| r.clone())
        .map(|r| r.start)
        .collect();
    begun.sort_unstable();
    let continued = b.origin.continued.lock().clone();
    let mut continued: Vec<u64> = continued.iter().map(|range| range.start).collect();
    continued.sort_unstable();
    // Nothing had come from the origin when the first of them was asked for.
    assert!(begun.len() > 1, "{begun:?}");
    assert_eq!(continued, begun[1..], "{begun:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn freshness_always_and_immutable() {
    let b = Bench::new(Freshness::Always);
    b.origin.set("a", "one");
    assert_eq!(b.get("a").await.unwrap().1, "MISS");
    assert_eq!(b.get("a").await.unwrap().1, "REVALIDATED");
    b.origin.set("a", "two");
    assert_eq!(b.get("a").await.unwrap(), (b"two".to_vec(), "MISS"));

    let b = Bench::new(Freshness::Immutable);
    b.origin.set("a", "one");
    b.get("a").await.unwrap();
    b.origin.set("a", "two");
    b.clock.advance(Duration::from_secs(1 << 25));
    assert_eq!(b.get("a").await.unwrap(), (b"one".to_vec(), "HIT"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_is_set_makes_nothing_fresh_again() {
    let b = Bench::new(MINUTE);
    let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3600));
    for key in ["a", "b"] {
        b.origin.set(key, "one");
        assert_eq!(b.get(key).await.unwrap().1, "MISS");
    }
    b.clock.set(NOW - 100 * second);
    b.clock.advance(30 * second);
    assert_eq!(b.get("a").await.unwrap().1, "HIT", "half a minute later");
    b.origin.set("a", "two");
    b.clock.advance(70 * second);
    assert_eq!(b.clock.now(), NOW);
    assert_eq!(b.get("a").await.unwrap(), (b"two".to_vec(), "MISS"));
    // One that is set ahead makes it old, and being set back asks no more.
    b.clock.set(NOW + hour);
    assert_eq!(b.get("a").await.unwrap().1, "REVALIDATED");
    b.clock.set(NOW);
    assert_eq!(b.get("a").await.unwrap().1, "HIT");
    // What a start finds to be from the future is old for ever, and so is all that is found with it.
    let started = |freshness| {
        let store = b.engine.store().cloned();
        Bench::over(
            b.origin.clone(),
            freshness,
            store,
            None,
            b.clock.clone(),
            64 << 20,
        )
    };
    let (minute, immutable) = (started(MINUTE), started(Freshness::Immutable));
    assert_eq!(minute.get("b").await.unwrap().1, "REVALIDATED");
    b.clock.advance(hour);
    assert_eq!(immutable.get("a").await.unwrap().1, "HIT");
    assert_eq!(minute.get("a").await.unwrap().1, "REVALIDATED");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_are_told_of_a_head_is_by_the_wall_clock() {
    let b = Bench::new(MINUTE);
    b.origin.set("a", "one");
    b.clock.set(NOW + Duration::from_secs(3600));
    assert_eq!(b.get("a").await.unwrap().1, "MISS");
    b.clock.set(NOW);
    let a = name("a");
    let held = b.engine.holdings(vec![a.clone()]).await.unwrap();
    let at_secs = held[0].as_ref().unwrap().validated_at_secs;
    assert_eq!(Duration::from_secs(at_secs.into()), NOW);
    let (_, state) = b.engine.stat(&a).await.unwrap();
    assert_eq!(state.validated_at_secs, at_secs);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_origin_without_etags_is_revalidated_by_its_head() {
    let b = Bench::new(MINUTE);
    b.origin.without_etags.store(true, SeqCst);
    b.origin.set("a", noise(3 * MIB, 1));
    b.get("a").await.unwrap();
    b.clock.advance(Duration::from_secs(61));
    assert_eq!(
        b.get("a").await.unwrap(),
        (noise(3 * MIB, 1), "REVALIDATED")
    );
    b.origin.set("a", noise(3 * MIB, 2));
    b.clock.advance(Duration::from_secs(61));
    assert_eq!(b.get("a").await.unwrap(), (noise(3 * MIB, 2), "MISS"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_without_a_version_is_never_assumed_unchanged_or_assembled() {
    let b = Bench::new(MINUTE);
    b.origin.without_versions.store(true, SeqCst);
    b.origin.set("a", "one");
    b.origin.set("large", noise(3 * MIB, 1));
    b.get("a").await.unwrap();
    b.origin.set("a", "two");
    b.clock.advance(Duration::from_secs(61));
    assert_eq!(b.get("a").await.unwrap(), (b"two".to_vec(), "MISS"));
    let e = b.get("large").await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
    b.engine.set_rules(BucketRules {
        default: BucketRule {
            freshness: Freshness::Immutable,
            ..BucketRule::default()
        },
        ..BucketRules::default()
    });
    assert_eq!(b.get("large").await.unwrap().0, noise(3 * MIB, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_range_of_a_large_object_fetches_only_the_chunks_it_touches() {
    let b = Bench::new(MINUTE);
    let data = noise(50 * MIB + 17, 3);
    b.origin.set("big", data.clone());
    let (from, to) = (20 * MIB + 5, 22 * MIB + 9);
    let range = Some(ByteRange::Inclusive(from as u64, to as u64 - 1));
    assert_eq!(
        b.get_range("big", range).await.unwrap(),
        (data[from..to].to_vec(), "MISS")
    );
    assert_eq!(b.origin.bytes_out.load(SeqCst), 3 * MIB as u64);
    assert_eq!(b.origin.requests(), 1, "one run for the whole range");
    assert_eq!(
        b.get_range("big", range).await.unwrap(),
        (data[from..to].to_vec(), "HIT")
    );
    assert_eq!(
        b.get_range("big", Some(ByteRange::Suffix(10)))
            .await
            .unwrap()
            .0,
        data[data.len() - 10..]
    );
    assert_eq!(
        b.get_range("big", Some(ByteRange::From(50 * MIB as u64)))
            .await
            .unwrap(),
        (data[50 * MIB..].to_vec(), "HIT")
    );
    assert_eq!(b.get("big").await.unwrap(), (data.clone(), "MISS"));
    assert_eq!(b.get("big").await.unwrap(), (data, "HIT"));
    let fetched = b.origin.bytes_out.load(SeqCst);
    assert_eq!(fetched, 50 * MIB as u64 + 17, "no chunk twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn sizes_and_ranges_at_every_edge() {
    let b = Bench::new(MINUTE);
    for size in [0, 1, MIB - 1, MIB, MIB + 1, 2 * MIB, 9 * MIB + 1] {
        let key = format!("o{size}");
        let data = noise(size, size as u64);
        b.origin.set(&key, data.clone());
        for round in ["MISS", "HIT"] {
            assert_eq!(b.get(&key).await.unwrap(), (data.clone(), round), "{size}");
        }
        for (range, expect) in [
            (ByteRange::From(0), 0..size),
            (ByteRange::Inclusive(0, 0), 0..1.min(size)),
            (
                ByteRange::From(size.saturating_sub(1) as u64),
                size.saturating_sub(1)..size,
            ),
            (ByteRange::Suffix(u64::MAX), 0..size),
            (ByteRange::Inclusive(0, u64::MAX), 0..size),
            (ByteRange::From(size as u64), 0..0),
            (ByteRange::Inclusive(u64::MAX - 1, u64::MAX), 0..0),
        ] {
            match b.get_range(&key, Some(range)).await {
                Ok((bytes, _)) => assert_eq!(bytes, data[expect.clone()], "{size} {range}"),
                Err(e) => assert!(
                    e.kind() == ErrorKind::RangeNotSatisfiable && expect.is_empty(),
                    "{size} {range}: {e}"
                ),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_readers_share_one_fill_and_those_who_leave_cancel_nothing() {
    let b = Bench::new(MINUTE);
    *b.origin.latency.lock() = Duration::from_millis(50);
    let data = noise(12 * MIB, 5);
    b.origin.set("big", data.clone());
    b.origin.set("small", noise(1000, 6));
    let leaver = tokio::spawn({
        let engine = b.engine.clone();
        async move {
            engine
                .read(&name("big"), None, &ReadOptions::default())
                .await
                .map(drop)
        }
    });
    tokio::time::sleep(Duration::from_millis(10)).await;
    leaver.abort();
    let reads = join_all((0..50).map(|i| b.get(if i % 2 == 0 { "big" } else { "small" }))).await;
    for (i, read) in reads.into_iter().enumerate() {
        assert_eq!(
            read.unwrap().0,
            if i % 2 == 0 {
                data.clone()
            } else {
                noise(1000, 6)
            }
        );
    }
    assert_eq!(
        b.origin.bytes_out.load(SeqCst),
        12 * MIB as u64 + 1000,
        "every byte once"
    );
    // The last bytes come shortly before the end.
    until(|| b.engine.fills_in_flight() == 0).await;
    settled(&b.engine).await;
}

/// The reader that asks the origin for all looks into the store again first, and may wait for memory
/// there. It leaves then; whoever follows it must not fail.
#[tokio::test]
async fn a_leader_that_leaves_before_it_asks_takes_nothing_from_its_followers() {
    let b = Bench::with(MINUTE, Some(64 << 20), 4 * MIB as u64);
    b.origin.set("a", noise(100_000, 1));
    b.get("a").await.unwrap();
    b.clock.advance(Duration::from_secs(61));
    let budget = b.engine.budget().clone();
    let all = budget.total_bytes();
    let read = || {
        let engine = b.engine.clone();
        tokio::spawn(async move {
            let read = engine
                .read(&name("a"), None, &ReadOptions::default())
                .await?;
            collect(read.body).await
        })
    };
    let take = || {
        let budget = budget.clone();
        tokio::spawn(async move { budget.reserve(all).await.unwrap() })
    };
    let queued = || tokio::time::sleep(Duration::from_millis(20));
    // Memory is given to those who wait for it in turn.
    let first = budget.reserve(all).await.unwrap();
    let leaver = read();
    queued().await;
    let second = take();
    queued().await;
    let follower = read();
    queued().await;
    let third = take();
    queued().await;
    drop(first);
    let second = second.await.unwrap();
    // It is asking for the object now, and waits for memory again.
    queued().await;
    drop(second);
    let third = third.await.unwrap();
    until(|| b.engine.stats().snapshot().fills_joined == 1).await;
    leaver.abort();
    queued().await;
    drop(third);
    assert_eq!(follower.await.unwrap().unwrap(), noise(100_000, 1));
    settled(&b.engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_changes_in_mid_read_is_never_mixed() {
    let b = Bench::new(MINUTE);
    b.origin.set("big", noise(40 * MIB, 1));
    let read = b
        .engine
        .read(&name("big"), None, &ReadOptions::default())
        .await
        .unwrap();
    let mut body = read.body;
    let mut got = body.next().await.unwrap().unwrap().to_vec();
    b.origin.set("big", noise(40 * MIB, 2));
    let error = loop {
        match body.next().await {
            Some(Ok(piece)) => got.extend_from_slice(&piece),
            Some(Err(e)) => break e,
            None => panic!("the body must not end well"),
        }
    };
    assert_eq!(error.kind(), ErrorKind::VersionChanged);
    assert_eq!(
        got,
        noise(40 * MIB, 1)[..got.len()],
        "what came is of one version"
    );
    assert_eq!(
        b.get("big").await.unwrap().0,
        noise(40 * MIB, 2),
        "and the next read has the new one, within the minute"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_body_is_an_error_and_nothing_of_it_is_kept() {
    let b = Bench::new(MINUTE);
    b.origin.set("a", noise(300_000, 1));
    b.origin.set("big", noise(5 * MIB, 2));
    *b.origin.cut_bodies_after.lock() = Some(100_000);
    assert_eq!(
        b.get("a").await.unwrap_err().kind(),
        ErrorKind::OriginUnavailable
    );
    assert!(b.get("big").await.is_err());
    *b.origin.cut_bodies_after.lock() = None;
    assert_eq!(b.get("a").await.unwrap(), (noise(300_000, 1), "MISS"));
    assert_eq!(b.get("big").await.unwrap().0, noise(5 * MIB, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_up_fetches_each_byte_once_and_reports_exactly() {
    let b = Bench::new(MINUTE);
    b.origin.set("small", noise(1000, 1));
    b.origin.set("big", noise(20 * MIB + 3, 2));
    for (key, size) in [("small", 1000), ("big", 20 * MIB as u64 + 3)] {
        let dry = b.engine.warm(&name(key), true).await;
        assert!(
            matches!(dry, WarmOutcome::Warmed { bytes } if bytes == size),
            "{key}: {dry:?}"
        );
    }
    assert_eq!(
        b.origin.bytes_out.load(SeqCst),
        0,
        "a dry run fetches nothing"
    );
    for (key, size) in [("small", 1000), ("big", 20 * MIB as u64 + 3)] {
        let warmed = b.engine.warm(&name(key), false).await;
        assert!(
            matches!(warmed, WarmOutcome::Warmed { bytes } if bytes == size),
            "{key}: {warmed:?}"
        );
        let again = b.engine.warm(&name(key), false).await;
        assert!(
            matches!(again, WarmOutcome::AlreadyThere { bytes } if bytes == size),
            "{key}: {again:?}"
        );
        assert_eq!(b.get(key).await.unwrap().1, "HIT");
    }
    assert_eq!(b.origin.bytes_out.load(SeqCst), 1000 + 20 * MIB as u64 + 3);
    assert!(matches!(
        b.engine.warm(&name("gone"), false).await,
        WarmOutcome::Missing
    ));
    b.origin.set("part", noise(9 * MIB, 3));
    b.get_range("part", Some(ByteRange::Inclusive(0, 0)))
        .await
        .unwrap();
    let rest = b.engine.warm(&name("part"), false).await;
    assert!(
        matches!(rest, WarmOutcome::Warmed { bytes } if bytes == 8 * MIB as u64),
        "{rest:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_written_is_read_at_once() {
    let b = Bench::new(Freshness::Immutable);
    let body = |d: &'static str| stream::iter([Ok(bytes::Bytes::from(d))]).boxed();
    b.origin.set("a", "old");
    assert_eq!(b.get("a").await.unwrap().0, b"old");
    b.engine
        .put(&name("a"), PutRequest::default(), Some(3), body("new"))
        .await
        .unwrap();
    assert_eq!(b.get("a").await.unwrap(), (b"new".to_vec(), "MISS"));
    b.engine
        .copy(&name("a"), None, &name("b"), PutRequest::default())
        .await
        .unwrap();
    assert_eq!(b.get("b").await.unwrap().0, b"new");
    b.engine.delete(&name("a")).await.unwrap();
    assert_eq!(b.get("a").await.unwrap_err().kind(), ErrorKind::NotFound);
    let id = b
        .engine
        .create_upload(&name("b"), PutRequest::default())
        .await
        .unwrap();
    let part = b
        .engine
        .upload_part(&name("b"), &id, 1, 4, body("part"))
        .await
        .unwrap();
    b.engine
        .complete_upload(&name("b"), &id, vec![part], PutCondition::Always)
        .await
        .unwrap();
    assert_eq!(b.get("b").await.unwrap().0, b"part");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_may_be_larger_than_a_put_of_s3() {
    let b = Bench::new(MINUTE);
    let broken = Err::<bytes::Bytes, _>(Error::invalid("the client left"));
    let body = stream::iter([broken]).boxed();
    let size = Some(limits::PUT_OBJECT_MAX_BYTES + 1);
    let a = name("a");
    let put = b.engine.put(&a, PutRequest::default(), size, body);
    // The body was asked for, rather than refused by its length.
    assert_eq!(put.await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn what_is_written_is_forgotten_though_the_system_gives_no_thread_for_it() {
    let threads = Builder::new_multi_thread().enable_all().build().unwrap();
    // No address space is left for a thread with such a stack.
    let mut without = Builder::new_current_thread();
    let without = without.thread_stack_size(1 << 60).enable_all();
    let without = without.build().unwrap();
    let b = threads.block_on(async {
        let b = Bench::new(Freshness::Immutable);
        b.origin.set("a", "one");
        assert_eq!(b.get("a").await.unwrap().1, "MISS");
        assert_eq!(b.get("a").await.unwrap().1, "HIT");
        b
    });
    without.block_on(async {
        let body = stream::iter([Ok("two".into())]).boxed();
        let a = name("a");
        let put = b.engine.put(&a, PutRequest::default(), Some(3), body);
        put.await.unwrap();
    });
    threads.block_on(async {
        assert_eq!(b.get("a").await.unwrap(), (b"two".to_vec(), "MISS"));
        drop(b);
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fill_that_began_before_a_write_does_not_bring_the_old_version_back() {
    let b = Bench::new(Freshness::Immutable);
    for round in 0..30u64 {
        *b.origin.latency.lock() = Duration::ZERO;
        let key = format!("k{round}");
        b.origin.set(&key, format!("old {round}"));
        *b.origin.latency.lock() = Duration::from_millis(3);
        let (engine, n) = (b.engine.clone(), name(&key));
        let reader = tokio::spawn(async move {
            engine
                .read(&n, None, &ReadOptions::default())
                .await
                .map(drop)
        });
        tokio::time::sleep(Duration::from_micros(round * 200)).await;
        let body = stream::iter([Ok(bytes::Bytes::from(format!("new {round}")))]).boxed();
        b.engine
            .put(&name(&key), PutRequest::default(), None, body)
            .await
            .unwrap();
        let _ = reader.await;
        assert_eq!(
            b.get(&key).await.unwrap().0,
            format!("new {round}").into_bytes()
        );
    }
}

/// The object changes, and time passes, while the node waits for memory for the body of the old
/// version.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_as_old_as_its_question() {
    let b = Bench::with(MINUTE, Some(64 << 20), 8 << 20);
    b.origin.set("a", "one");
    let memory = b
        .engine
        .budget()
        .reserve(b.engine.budget().total_bytes())
        .await
        .unwrap();
    let engine = b.engine.clone();
    let reader = tokio::spawn(async move {
        collect(
            engine
                .read(&name("a"), None, &ReadOptions::default())
                .await?
                .body,
        )
        .await
    });
    // The origin has answered, with the old version.
    until(|| b.origin.bytes_out.load(SeqCst) > 0).await;
    b.clock.advance(Duration::from_secs(50));
    b.origin.set("a", "two");
    drop(memory);
    assert_eq!(reader.await.unwrap().unwrap(), b"one");
    assert_eq!(b.get("a").await.unwrap(), (b"one".to_vec(), "HIT"));
    b.clock.advance(Duration::from_secs(10));
    assert_eq!(
        b.get("a").await.unwrap().0,
        b"two",
        "the origin spoke of the old version a minute ago"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn conditions_come_before_ranges() {
    for cache in [Some(64 << 20), None] {
        let b = Bench::with(MINUTE, cache, 64 << 20);
        b.origin.set("a", noise(1000, 1));
        let same = Conditions {
            if_none_match: Some("\"v1\"".into()),
            ..Default::default()
        };
        let options = ReadOptions {
            conditions: same,
            ..Default::default()
        };
        for start in [5000, 3 << 20] {
            let outside = Some(forebay_core::ByteRange::From(start));
            let e = b
                .engine
                .read(&name("a"), outside, &options)
                .await
                .err()
                .unwrap();
            assert_eq!(
                e.kind(),
                ErrorKind::NotModified,
                "cache {cache:?}, from {start}: {e}"
            );
            let e = b
                .engine
                .read(&name("a"), outside, &ReadOptions::default())
                .await
                .err()
                .unwrap();
            assert_eq!(
                e.kind(),
                ErrorKind::RangeNotSatisfiable,
                "cache {cache:?}, from {start}: {e}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn conditions_are_checked_on_hits_and_misses() {
    let b = Bench::new(MINUTE);
    b.origin.set("a", "one");
    for _ in 0..2 {
        let with = |c: Conditions| ReadOptions {
            conditions: c,
            ..Default::default()
        };
        let e = b
            .engine
            .read(
                &name("a"),
                None,
                &with(Conditions {
                    if_none_match: Some("\"v1\"".into()),
                    ..Default::default()
                }),
            )
            .await;
        assert_eq!(e.err().map(|e| e.kind()), Some(ErrorKind::NotModified));
        let e = b
            .engine
            .head(
                &name("a"),
                &with(Conditions {
                    if_match: Some("\"v2\"".into()),
                    ..Default::default()
                }),
            )
            .await;
        assert_eq!(
            e.err().map(|e| e.kind()),
            Some(ErrorKind::PreconditionFailed)
        );
    }
    assert_eq!(b.origin.requests(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_work_without_a_store_and_bypassing_it() {
    let b = Bench::with(MINUTE, None, 64 << 20);
    b.origin.set("a", noise(100, 1));
    b.origin.set("big", noise(7 * MIB, 2));
    for _ in 0..2 {
        assert_eq!(b.get("a").await.unwrap(), (noise(100, 1), "BYPASS"));
        assert_eq!(b.get("big").await.unwrap(), (noise(7 * MIB, 2), "BYPASS"));
    }
    let b = Bench::new(MINUTE);
    b.origin.set("big", noise(7 * MIB, 2));
    b.get("big").await.unwrap();
    let past = ReadOptions {
        bypass: true,
        ..Default::default()
    };
    let read = b
        .engine
        .read(&name("big"), Some(ByteRange::Suffix(5)), &past)
        .await
        .unwrap();
    assert_eq!(read.cache.as_str(), "BYPASS");
    assert_eq!(
        collect(read.body).await.unwrap(),
        noise(7 * MIB, 2)[7 * MIB - 5..]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_memory_budget_slows_reads_but_does_not_stop_them() {
    let b = Bench::with(MINUTE, Some(256 << 20), 4 << 20);
    for i in 0..8 {
        b.origin.set(&format!("big{i}"), noise(10 * MIB, i));
    }
    let reads = join_all((0..8).map(|i| {
        let b = &b;
        async move { b.get(&format!("big{i}")).await }
    }));
    let reads = tokio::time::timeout(Duration::from_secs(50), reads)
        .await
        .expect("no deadlock");
    for (i, read) in reads.into_iter().enumerate() {
        assert_eq!(read.unwrap().0, noise(10 * MIB, i as u64));
    }
    settled(&b.engine).await;
}

/// Writes wait for the memory that they may need, together at most half of the budget; so do
/// copies, which read too.
#[tokio::test(flavor = "multi_thread")]
async fn writes_take_their_memory_from_the_budget_and_wait_for_it() {
    let b = Bench::with(MINUTE, Some(256 << 20), 40 << 20);
    b.origin.set("from", noise(12 * MIB, 99));
    *b.origin.latency.lock() = Duration::from_millis(30);
    let budget = b.engine.budget().clone();
    let writing = join_all((0..10).map(|i| {
        let b = &b;
        async move {
            let data = noise(8 * MIB, i);
            let body = stream::iter(
                data.chunks(MIB)
                    .map(|c| Ok(bytes::Bytes::copy_from_slice(c)))
                    .collect::<Vec<_>>(),
            )
            .boxed();
            b.engine
                .put(
                    &name(&format!("w{i}")),
                    PutRequest::default(),
                    Some(8 * MIB as u64),
                    body,
                )
                .await
                .unwrap();
            // Attributes other than the source's: the copy is done by reading and writing.
            let mut other = PutRequest::default();
            other.attributes.content_type = Some("text/x-copy".into());
            b.engine
                .copy(&name("from"), None, &name(&format!("c{i}")), other)
                .await
                .unwrap();
        }
    }));
    let watched = async {
        let (mut writing, mut most) = (std::pin::pin!(writing), 0);
        loop {
            tokio::select! {
                _ = &mut writing => return most,
                () = tokio::time::sleep(Duration::from_millis(1)) => {
                    most = most.max(budget.used_bytes());
                }
            }
        }
    };
    let most = tokio::time::timeout(Duration::from_secs(50), watched)
        .await
        .expect("no standstill");
    // One of them takes at most its own bytes.
    assert!(most > 12 << 20, "two writes at a time at least: {most}");
    assert!(most <= 40 << 20);
    for i in 0..10 {
        assert_eq!(b.get(&format!("w{i}")).await.unwrap().0, noise(8 * MIB, i));
        assert_eq!(
            b.get(&format!("c{i}")).await.unwrap().0,
            noise(12 * MIB, 99)
        );
    }
}

/// A source without an ETag, as web servers have them, cannot be asked for by its version.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_a_source_without_an_etag_is_not_of_an_older_version() {
    let b = Bench::new(Freshness::Immutable);
    b.origin.without_etags.store(true, SeqCst);
    let now = ReadOptions {
        bypass: true,
        ..ReadOptions::default()
    };
    let head = async || b.engine.head(&name("from"), &now).await.unwrap().meta;
    // Attributes other than the source's: the copy is done by reading and writing.
    let mut other = PutRequest::default();
    other.attributes.content_type = Some("text/x-copy".into());
    let copy = async |version: Option<&ObjectMeta>| {
        let (from, to) = (name("from"), name("to"));
        b.engine.copy(&from, version, &to, other.clone()).await
    };

    b.origin.set("from", noise(2 * MIB, 1));
    let old = head().await;
    b.get("from").await.unwrap();
    b.origin.set("from", noise(2 * MIB, 2));
    let e = copy(Some(&old)).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::VersionChanged);
    assert!(b.get("to").await.is_err(), "nothing was written");

    b.origin.set("from", noise(2 * MIB, 3));
    copy(None).await.unwrap();
    assert_eq!(b.get("to").await.unwrap().0, noise(2 * MIB, 3));
    b.origin.set("from", noise(2 * MIB, 4));
    let new = head().await;
    copy(Some(&new)).await.unwrap();
    assert_eq!(b.get("to").await.unwrap().0, noise(2 * MIB, 4));
}

/// S3 answers the completion of an upload with spaces until the object is there.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_forwarded_request_changes_is_forgotten_at_the_end_of_its_answer() {
    let b = Bench::new(Freshness::Immutable);
    let request = || ForwardRequest {
        method: "POST".parse().unwrap(),
        key: "k".into(),
        query: vec![("uploadId".into(), "1".into())],
        headers: Default::default(),
        body: ForwardBody::Empty,
    };
    let forward = || {
        let changes = Changes::Object(name("k"));
        b.engine
            .forward(b.origin.clone(), request(), changes, Vec::new())
    };
    let meanwhile = async || {
        tokio::time::sleep(Duration::from_millis(30)).await;
        let read = b.get("k").await.unwrap().0;
        b.origin.set("k", "new");
        b.origin.ends_answer.notify_one();
        read
    };
    b.origin.set("k", "old");
    let (answer, read) = tokio::join!(forward(), meanwhile());
    assert_eq!(read, b"old");
    let document = collect(answer.unwrap().body).await.unwrap();
    assert_eq!(document, b"  <Done/>");
    assert_eq!(b.get("k").await.unwrap().0, b"new");

    // The same if the client leaves.
    b.origin.set("k", "old");
    b.engine.delete(&name("k")).await.unwrap();
    b.origin.set("k", "old");
    let leaves = tokio::time::timeout(Duration::from_millis(10), forward());
    assert!(leaves.await.is_err(), "the answer has not ended");
    assert_eq!(meanwhile().await, b"old");
    for _ in 0..6000 {
        if b.get("k").await.unwrap().0 == b"new" {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the old version is kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forwarded_part_of_an_upload_leaves_the_object_in_the_cache() {
    let b = Bench::new(Freshness::Immutable);
    b.origin.set("k", "old");
    assert_eq!(b.get("k").await.unwrap().1, "MISS");
    let request = ForwardRequest {
        method: "PUT".parse().unwrap(),
        key: "k".into(),
        query: vec![
            ("partNumber".into(), "1".into()),
            ("uploadId".into(), "1".into()),
        ],
        headers: Default::default(),
        body: ForwardBody::Bytes("part".into()),
    };
    b.origin.ends_answer.notify_one();
    let forward = b
        .engine
        .forward(b.origin.clone(), request, Changes::Upload, Vec::new());
    let document = collect(forward.await.unwrap().body).await.unwrap();
    assert_eq!(document, b"  <Done/>");
    assert_eq!(b.get("k").await.unwrap(), (b"old".to_vec(), "HIT"));
    let stats = b.engine.stats().snapshot();
    assert_eq!((stats.writes, stats.bytes_written), (0, 4));
}

/// A weak ETag, as many web servers give, meets no `If-Match`, though the version is the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_with_a_weak_etag_is_copied_and_not_in_an_older_version() {
    let b = Bench::new(Freshness::Immutable);
    let now = ReadOptions {
        bypass: true,
        ..ReadOptions::default()
    };
    let set = |etag: &str, data: &'static str| {
        b.origin.set("from", data);
        b.origin.objects.lock().get_mut("from").unwrap().1.etag = Some(etag.to_owned());
    };
    // Attributes other than the source's: the copy is done by reading and writing.
    let mut other = PutRequest::default();
    other.attributes.content_type = Some("text/x-copy".into());
    set("W/\"a\"", "one");
    let old = b.engine.head(&name("from"), &now).await.unwrap().meta;
    for request in [other.clone(), PutRequest::default()] {
        b.engine
            .copy(&name("from"), Some(&old), &name("to"), request)
            .await
            .unwrap();
        assert_eq!(b.get("to").await.unwrap().0, b"one");
    }
    set("W/\"b\"", "two");
    for request in [other, PutRequest::default()] {
        let copied = b
            .engine
            .copy(&name("from"), Some(&old), &name("to"), request)
            .await;
        assert_eq!(copied.unwrap_err().kind(), ErrorKind::VersionChanged);
    }
    assert_eq!(b.get("to").await.unwrap().0, b"one");
}

/// Clients that announce much and send little hold little.
#[tokio::test(flavor = "multi_thread")]
async fn writes_that_stall_leave_the_memory_to_others() {
    let b = Bench::with(MINUTE, Some(256 << 20), 1 << 30);
    b.origin.set("a", noise(3 * MIB, 1));
    let budget = b.engine.budget().clone();
    let begun = Arc::new(AtomicUsize::new(0));
    let (leave, left) = watch::channel(false);
    let stalled = join_all((0..16).map(|i| {
        let (b, begun, mut left) = (&b, begun.clone(), left.clone());
        async move {
            let first = stream::once(async move {
                begun.fetch_add(1, SeqCst);
                Ok(bytes::Bytes::from_static(b"begun"))
            });
            let rest = stream::once(async move {
                left.wait_for(|left| *left).await.unwrap();
                Err(Error::invalid("the client left"))
            });
            let (name, body) = (name(&format!("w{i}")), first.chain(rest).boxed());
            let put = b
                .engine
                .put(&name, PutRequest::default(), Some(1 << 30), body);
            assert!(put.await.is_err());
        }
    }));
    let others = async {
        while begun.load(SeqCst) < 16 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(budget.used_bytes(), 16 << 20);
        // What a batch asks for, which does not wait.
        let batch = budget.try_hold(64 << 20).unwrap();
        assert_eq!(b.get("a").await.unwrap().0, noise(3 * MIB, 1));
        drop(batch);
        leave.send(true).unwrap();
    };
    tokio::time::timeout(Duration::from_secs(50), async {
        tokio::join!(stalled, others);
        while budget.used_bytes() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .expect("no standstill");
}

/// Writes that hold all that they can need leave the share of those that grow to others.
#[tokio::test(flavor = "multi_thread")]
async fn long_writes_that_stall_leave_room_for_others_to_grow() {
    const STALLED: usize = 4;
    let b = Bench::with(MINUTE, Some(256 << 20), 1 << 30);
    let far = Arc::new(AtomicUsize::new(0));
    let (leave, left) = watch::channel(false);
    let piece = bytes::Bytes::from(noise(MIB, 1));
    let stalled = join_all((0..STALLED).map(|i| {
        let (b, far, mut left, piece) = (&b, far.clone(), left.clone(), piece.clone());
        async move {
            while far.load(SeqCst) < i {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let pieces = stream::iter(vec![Ok(piece); 24]);
            let rest = stream::once(async move {
                far.fetch_add(1, SeqCst);
                left.wait_for(|left| *left).await.unwrap();
                Err(Error::invalid("the client left"))
            });
            let (name, body) = (name(&format!("w{i}")), pieces.chain(rest).boxed());
            let put = b
                .engine
                .put(&name, PutRequest::default(), Some(1 << 30), body);
            assert!(put.await.is_err());
        }
    }));
    let others = async {
        while far.load(SeqCst) < STALLED {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let pieces = stream::iter(vec![Ok(piece.clone()); 6]).boxed();
        let size = Some(6 * MIB as u64);
        let short = name("short");
        let put = b.engine.put(&short, PutRequest::default(), size, pieces);
        put.await.unwrap();
        leave.send(true).unwrap();
    };
    tokio::time::timeout(Duration::from_secs(50), async {
        tokio::join!(stalled, others)
    })
    .await
    .expect("no standstill");
}

/// Together these writes need more than may be held, and each holds some of it when it needs more.
#[tokio::test(flavor = "multi_thread")]
async fn writes_that_grow_do_not_wait_for_each_other_in_a_circle() {
    const WRITES: usize = 24;
    let b = Bench::with(MINUTE, Some(256 << 20), 256 << 20);
    let budget = b.engine.budget().clone();
    let all_began = Arc::new(Barrier::new(WRITES));
    let piece = bytes::Bytes::from(noise(MIB, 1));
    let writing = join_all((0..WRITES).map(|i| {
        let (b, piece, all_began) = (&b, piece.clone(), all_began.clone());
        async move {
            let pieces = vec![Ok(piece.clone()); 5];
            let first = stream::once(async move {
                all_began.wait().await;
                Ok(piece)
            });
            let (name, body) = (name(&format!("w{i}")), first.chain(stream::iter(pieces)));
            let size = Some(6 * MIB as u64);
            let put = b
                .engine
                .put(&name, PutRequest::default(), size, body.boxed());
            put.await.unwrap();
        }
    }));
    tokio::time::timeout(Duration::from_secs(50), writing)
        .await
        .expect("no standstill");
    assert_eq!(budget.used_bytes(), 0);
    for i in 0..WRITES {
        let written = b.get(&format!("w{i}")).await.unwrap().0;
        assert_eq!(written.len(), 6 * MIB);
    }
}

/// Of these writes, as of those of a dataset, each sends what it reads meanwhile, which takes memory.
#[tokio::test(flavor = "multi_thread")]
async fn writes_leave_memory_to_those_who_read_what_they_write() {
    for (total, mebibytes) in [(32, 1), (64, 1), (96, 1), (128, 33), (256, 33)] {
        let total = total << 20;
        let b = Bench::with(MINUTE, Some(512 << 20), total);
        let budget = b.engine.budget().clone();
        let piece = bytes::Bytes::from(noise(MIB, 1));
        let writing = join_all((0..6).map(|i| {
            let (b, budget, piece) = (&b, budget.clone(), piece.clone());
            let read = move |at: usize| {
                let (budget, piece) = (budget.clone(), piece.clone());
                async move {
                    if at == mebibytes {
                        return None;
                    }
                    while budget.try_hold(MIB as u64).is_err() {
                        tokio::time::sleep(Duration::from_millis(2)).await;
                    }
                    Some((Ok::<_, Error>(piece), at + 1))
                }
            };
            async move {
                let (name, body) = (name(&format!("w{i}")), stream::unfold(0, read).boxed());
                let put = b.engine.put(&name, PutRequest::default(), None, body);
                put.await.unwrap();
            }
        }));
        tokio::time::timeout(Duration::from_secs(50), writing)
            .await
            .expect("no standstill");
        assert_eq!(budget.used_bytes(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_origin_that_is_down_fails_what_is_stale_and_serves_what_is_fresh() {
    let b = Bench::new(MINUTE);
    b.origin.set("a", "one");
    b.get("a").await.unwrap();
    b.origin.down.store(true, SeqCst);
    assert_eq!(b.get("a").await.unwrap().1, "HIT");
    b.clock.advance(Duration::from_secs(61));
    let e = b.get("a").await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OriginUnavailable);
    assert!(e.to_string().contains("data/a"), "{e}");
    b.origin.down.store(false, SeqCst);
    assert_eq!(b.get("a").await.unwrap().1, "REVALIDATED");
}

/// The client leaves when its last byte is sent: the origin has done the write, and nobody waits
/// for its answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_whose_client_left_is_forgotten_all_the_same() {
    let b = Bench::new(Freshness::Immutable);
    let body = |d: &'static str| stream::iter([Ok(bytes::Bytes::from(d))]).boxed();
    for key in ["put", "copied", "completed", "deleted", "from"] {
        b.origin.set(key, "old");
        assert_eq!(b.get(key).await.unwrap().0, b"old");
    }
    b.origin.set("from", "new");
    let upload = b
        .engine
        .create_upload(&name("completed"), PutRequest::default())
        .await
        .unwrap();
    let part = b
        .engine
        .upload_part(&name("completed"), &upload, 1, 3, body("new"))
        .await
        .unwrap();
    b.origin.holds_acknowledgements.send_replace(true);
    let there = |key: &str| {
        let objects = b.origin.objects.lock();
        objects.get(key).map(|(data, _)| data.clone())
    };
    let is_new = |key: &str| there(key).is_some_and(|data| data == "new");
    let e = &b.engine;
    let request = PutRequest::default;
    let to = name("put");
    let put = e.put(&to, request(), Some(3), body("new"));
    leave(put, || is_new("put")).await;
    let (from, to) = (name("from"), name("copied"));
    let copy = e.copy(&from, None, &to, request());
    leave(copy, || is_new("copied")).await;
    let to = name("completed");
    let complete = e.complete_upload(&to, &upload, vec![part], PutCondition::Always);
    leave(complete, || is_new("completed")).await;
    let to = name("deleted");
    leave(e.delete(&to), || there("deleted").is_none()).await;
    // Closing waits for writes that nobody else waits for.
    let released = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        b.origin.holds_acknowledgements.send_replace(false);
    };
    let (closed, ()) = tokio::join!(e.close(Duration::from_secs(60)), released);
    closed.unwrap();
    for key in ["put", "copied", "completed"] {
        assert_eq!(b.get(key).await.unwrap().0, b"new", "{key}");
    }
    let gone = b.get("deleted").await.unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
    settled(&b.engine).await;
}

/// A write that does not end in time is forgotten before the store is closed: it may yet happen.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_still_being_written_at_the_end_is_forgotten() {
    let b = Bench::new(Freshness::Immutable);
    b.origin.set("a", "old");
    b.get("a").await.unwrap();
    b.origin.holds_acknowledgements.send_replace(true);
    let a = name("a");
    let delete = b.engine.delete(&a);
    leave(delete, || b.origin.objects.lock().is_empty()).await;
    b.engine.close(Duration::from_millis(20)).await.unwrap();
    assert!(b.get("a").await.is_err(), "it is not here");
    let refused = b.engine.delete(&name("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ShuttingDown);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_whose_client_left_before_it_had_the_id_is_aborted() {
    let b = Bench::new(MINUTE);
    b.origin.holds_acknowledgements.send_replace(true);
    let upload = name("a");
    let begun = b.engine.create_upload(&upload, PutRequest::default());
    leave(begun, || b.origin.uploads.lock().len() == 1).await;
    b.origin.holds_acknowledgements.send_replace(false);
    until(|| b.origin.uploads.lock().is_empty()).await;
}

/// The id is there, and its caller leaves before it looks.
#[tokio::test]
async fn an_upload_whose_id_nobody_took_is_aborted() {
    let b = Bench::new(MINUTE);
    let upload = name("a");
    let mut begun = Box::pin(b.engine.create_upload(&upload, PutRequest::default()));
    assert!((&mut begun).now_or_never().is_none());
    // On this one thread, the upload is begun meanwhile, and nobody asks for its id.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(b.origin.uploads.lock().len(), 1);
    drop(begun);
    for _ in 0..1000 {
        if b.origin.uploads.lock().is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the upload is still there");
}

/// What comes from the cache takes as much memory as what comes from an origin: readers that do not
/// take their bytes still hold them, and that is counted.
#[tokio::test]
async fn a_node_warms_what_it_owns_part_after_part() {
    let b = Bench::new(MINUTE);
    let size = 20 * MIB as u64 + 3;
    b.origin.set("big", noise(20 * MIB + 3, 2));
    b.origin.set("small", noise(1000, 1));
    // The first and the last extent are this node's.
    let owns = |at: u64| !(8 << 20..16 << 20).contains(&at);
    let (big, other) = (name("big"), name("other"));
    let long = Duration::from_secs(60);
    let sums = async |most: u64, time: Duration| {
        let (mut from, mut sums, mut calls) = (0, (0, 0), 0);
        loop {
            let part = b.engine.warm_own(&big, owns, from, most, time, false);
            let part = part.await.unwrap();
            assert_eq!(part.size, size);
            (sums, calls) = ((sums.0 + part.brought, sums.1 + part.there), calls + 1);
            match part.next {
                Some(next) => assert!(next > from && owns(next), "{next}"),
                None => return (sums, calls),
            }
            from = part.next.unwrap();
        }
    };
    let mine = size - (8 << 20);
    let dry = b
        .engine
        .warm_own(&big, owns, 0, 1, long, true)
        .await
        .unwrap();
    assert_eq!((dry.brought, dry.there, dry.next), (mine, 0, None));
    let (brought, calls) = sums(4 << 20, long).await;
    assert_eq!(brought, (mine, 0));
    assert!((3..=4).contains(&calls), "{calls}");
    assert_eq!(
        sums(4 << 20, long).await,
        ((0, mine), 1),
        "all of it is there"
    );
    // Where no time is left nothing is begun, and nothing is lost.
    b.origin.set("other", noise(12 * MIB, 3));
    let none = b
        .engine
        .warm_own(&other, owns, 1 << 20, 64 << 20, Duration::ZERO, false);
    let none = none.await.unwrap();
    assert_eq!(
        (none.there, none.brought, none.next.is_some()),
        (0, 0, true)
    );
    let others = b
        .engine
        .warm_own(&name("small"), |_| false, 0, 1, long, false)
        .await
        .unwrap();
    assert_eq!((others.brought, others.there, others.next), (0, 0, None));
    let small = b
        .engine
        .warm_own(&name("small"), |_| true, 0, 1, long, false)
        .await
        .unwrap();
    assert_eq!((small.brought, small.there), (1000, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn warm_reads_take_their_memory_from_the_budget() {
    let b = Bench::with(MINUTE, Some(256 << 20), 8 << 20);
    b.origin.set("big", noise(16 * MIB, 1));
    b.origin.set("small", noise(MIB / 2, 2));
    b.get("big").await.unwrap();
    b.get("small").await.unwrap();
    settled(&b.engine).await;
    let used = || b.engine.budget().used_bytes() as usize;
    let open = |key: &'static str| {
        let engine = b.engine.clone();
        async move {
            engine
                .read(&name(key), None, &ReadOptions::default())
                .await
                .unwrap()
        }
    };
    let mut idle = Vec::new();
    for _ in 0..6 {
        idle.push(open("big").await);
    }
    assert!(used() >= 6 * MIB, "{}", used());
    idle.push(open("small").await);
    assert!(used() >= 6 * MIB + MIB / 2, "{}", used());
    assert_eq!(b.engine.stats().snapshot().reads_hit, 7);
    // Reads that find no memory wait for it.
    let waiting = tokio::time::timeout(
        Duration::from_millis(100),
        join_all((0..3).map(|_| open("big"))),
    );
    assert!(waiting.await.is_err());
    assert!(used() <= 8 * MIB);
    drop(idle);
    let all = join_all((0..40).map(|_| b.get("big")));
    for read in tokio::time::timeout(Duration::from_secs(60), all)
        .await
        .expect("no deadlock")
    {
        assert_eq!(read.unwrap(), (noise(16 * MIB, 1), "HIT"));
    }
    settled(&b.engine).await;
}

/// A stale small object holds memory while the origin is asked about it; its successor must not
/// wait for that.
#[tokio::test(flavor = "multi_thread")]
async fn revalidations_under_a_small_budget_do_not_wait_for_each_other() {
    let b = Bench::with(Freshness::Always, Some(64 << 20), 2 << 20);
    for i in 0..16 {
        b.origin.set(&format!("o{i}"), noise(MIB, i));
        b.get(&format!("o{i}")).await.unwrap();
        b.origin.set(&format!("o{i}"), noise(MIB, 100 + i));
    }
    let all = join_all((0..16).map(|i| {
        let b = &b;
        async move { b.get(&format!("o{i}")).await }
    }));
    let all = tokio::time::timeout(Duration::from_secs(50), all)
        .await
        .expect("no deadlock");
    for (i, read) in all.into_iter().enumerate() {
        assert_eq!(read.unwrap().0, noise(MIB, 100 + i as u64));
    }
    settled(&b.engine).await;
}

#[tokio::test]
async fn cached_data_stands_in_for_a_failing_origin_within_a_bound() {
    let b = Bench::new(MINUTE);
    let rule = BucketRule {
        freshness: MINUTE,
        stale_if_error: Duration::from_secs(600),
        ..BucketRule::default()
    };
    b.engine.set_rules(BucketRules {
        default: rule,
        ..BucketRules::default()
    });
    b.origin.set("a", "one");
    b.origin.set("written", "one");
    b.origin.set("whole", noise(3 * MIB, 1));
    b.origin.set("part", noise(3 * MIB, 2));
    for key in ["a", "written", "whole"] {
        b.get(key).await.unwrap();
    }
    let first = Some(ByteRange::Inclusive(0, 9));
    b.get_range("part", first).await.unwrap();
    settled(&b.engine).await;

    b.origin.down.store(true, SeqCst);
    b.clock.advance(Duration::from_secs(61));
    assert_eq!(b.get("a").await.unwrap(), (b"one".to_vec(), "STALE"));
    assert_eq!(b.get("whole").await.unwrap(), (noise(3 * MIB, 1), "STALE"));
    assert_eq!(b.get_range("part", first).await.unwrap().1, "STALE");
    let e = b.get("part").await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OriginUnavailable, "{e}");
    let head = b.engine.head(&name("a"), &ReadOptions::default()).await;
    assert_eq!(head.unwrap().cache.as_str(), "STALE");
    assert_eq!(b.engine.stats().snapshot().reads_stale, 3);
    // A write that may have happened leaves nothing here that could be older than it.
    let body = forebay_origin::body::from_bytes("two".into());
    let written = name("written");
    let put = b.engine.put(&written, PutRequest::default(), Some(3), body);
    assert!(put.await.is_err());
    assert!(b.get("written").await.is_err());

    b.origin.down.store(false, SeqCst);
    assert_eq!(b.get("a").await.unwrap().1, "REVALIDATED");
    b.origin.down.store(true, SeqCst);
    b.clock.advance(Duration::from_secs(659));
    assert_eq!(b.get("a").await.unwrap().1, "STALE");
    b.clock.advance(Duration::from_secs(1));
    assert!(b.get("a").await.is_err(), "past the bound");

    // An answer of the origin is not a failure.
    b.origin.down.store(false, SeqCst);
    b.get("a").await.unwrap();
    b.clock.advance(Duration::from_secs(61));
    b.origin.remove("a");
    assert_eq!(b.get("a").await.unwrap_err().kind(), ErrorKind::NotFound);
    b.origin.down.store(true, SeqCst);
    assert!(b.get("a").await.is_err(), "it is known to be gone");
}

/// Readers that come while the head is being kept find it before the chunks that came with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cold_object_leaves_the_bucket_once_however_many_read_it_at_once() {
    let b = Arc::new(Bench::new(MINUTE));
    let mut all = 0;
    for i in 0..60 {
        let (key, data) = (format!("cold-{i}"), noise(3 * MIB + 7, i));
        b.origin.set(&key, data.clone());
        all += data.len() as u64;
        let readers = (0..16).map(|late| {
            let (b, key, data) = (b.clone(), key.clone(), data.clone());
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_micros(200 * late)).await;
                assert!(b.get(&key).await.unwrap().0 == data);
            })
        });
        for reader in readers.collect::<Vec<_>>() {
            reader.await.unwrap();
        }
        assert_eq!(b.origin.bytes_out.load(SeqCst), all, "{key}");
    }
}

/// Buckets of a cluster whose other nodes were told at once, and look at this node when the write is
/// over.
struct Told {
    inner: FixedBuckets,
    engine: OnceLock<Engine>,
    cached_when_over: Arc<Mutex<Vec<bool>>>,
}

#[async_trait]
impl Buckets for Told {
    async fn origin(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        self.inner.origin(bucket).await
    }

    async fn list(&self) -> Result<Vec<ListedBucket>> {
        self.inner.list().await
    }

    async fn create(&self, bucket: &str) -> Result<()> {
        self.inner.create(bucket).await
    }

    async fn remove(&self, bucket: &str) -> Result<()> {
        self.inner.remove(bucket).await
    }

    async fn written(&self, of: &ObjectName, _: bool) -> (Result<()>, Announced) {
        struct Over(Engine, ObjectName, Arc<Mutex<Vec<bool>>>);

        impl Drop for Over {
            fn drop(&mut self) {
                self.2.lock().push(self.0.is_cached(&self.1));
            }
        }

        let engine = self.engine.get().unwrap().clone();
        assert!(
            engine.is_cached(of),
            "it is forgotten after the others were told"
        );
        let over = Over(engine, of.clone(), self.cached_when_over.clone());
        (Ok(()), Announced::until(over))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_is_over_when_its_node_has_forgotten_too() {
    let b = Bench::new(Freshness::Immutable);
    b.origin.set("a", "old");
    let mut inner = FixedBuckets::default();
    inner.0.insert("data".into(), b.origin.clone());
    let buckets = Arc::new(Told {
        inner,
        engine: OnceLock::new(),
        cached_when_over: Arc::default(),
    });
    let dir = tempfile::tempdir().unwrap();
    let config = StoreConfig {
        dirs: vec![DirConfig {
            path: dir.path().to_owned(),
            capacity_bytes: 256 << 20,
        }],
        ..Default::default()
    };
    let clock = Arc::new(b.clock.clone());
    let store = Arc::new(Store::open(config, clock.clone()).unwrap());
    let budget = MemoryBudget::new(64 << 20);
    let engine = Engine::new(
        EngineConfig::default(),
        buckets.clone(),
        Some(store),
        clock,
        budget,
    );
    buckets.engine.set(engine.clone()).ok().unwrap();
    let a = name("a");
    let read = engine
        .read(&a, None, &ReadOptions::default())
        .await
        .unwrap();
    assert_eq!(collect(read.body).await.unwrap(), b"old");
    settled(&engine).await;
    let new = stream::iter([Ok(bytes::Bytes::from("new"))]).boxed();
    engine
        .put(&a, PutRequest::default(), Some(3), new)
        .await
        .unwrap();
    assert_eq!(*buckets.cached_when_over.lock(), [false]);
}
