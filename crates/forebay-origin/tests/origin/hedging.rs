//! Hedged reads against an origin whose answers are late, wrong or refused on command.

use bytes::Bytes;
use forebay_core::{ErrorKind, Result};
use forebay_origin::{
    Counted, Counters, GetRequest, Hedged, Hedging, Limited, Limiter, LocalOrigin, Operation,
    Origin, PutRequest, body,
};
use forebay_testing::{Distance, Fault, Faults, Faulty, conformance::pattern};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const SIZE: usize = 10_000;
/// Nobody waits for it.
const LATE: Duration = Duration::from_secs(30);

struct Bench {
    _dir: tempfile::TempDir,
    faults: Faults,
    counters: Arc<Counters>,
    limiter: Arc<Limiter>,
    origin: Arc<dyn Origin>,
    content: Bytes,
}

/// An origin that answers after 10 ms, whose tail is known by now, and that has saved up a few
/// second requests.
async fn bench(percent: u32, places: usize) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let local: Arc<dyn Origin> = Arc::new(LocalOrigin::open(dir.path()).unwrap());
    let content = pattern(SIZE);
    local
        .put(
            "a",
            PutRequest::default(),
            Some(SIZE as u64),
            body::from_bytes(content.clone()),
        )
        .await
        .unwrap();
    let (faults, counters) = (Faults::new(), Arc::new(Counters::default()));
    let limiter = Arc::new(Limiter::new(places, None, counters.clone()));
    let counted = Arc::new(Counted::new(
        Arc::new(Faulty::new(local, faults.clone())),
        counters.clone(),
    ));
    let hedging = Arc::new(Hedging::new(percent, limiter.clone(), counters.clone()));
    let origin: Arc<dyn Origin> = Arc::new(Limited::new(
        Arc::new(Hedged::new(counted, hedging)),
        limiter.clone(),
    ));
    faults.distance(Distance {
        latency: Duration::from_millis(10),
        bandwidth: None,
    });
    let b = Bench {
        _dir: dir,
        faults,
        counters,
        limiter,
        origin,
        content,
    };
    for _ in 0..100 {
        read(&*b.origin).await.unwrap();
    }
    b
}

async fn read(origin: &dyn Origin) -> Result<Bytes> {
    let request = GetRequest {
        range: Some(100..5000),
        ..Default::default()
    };
    body::collect(origin.get("a", request).await?.body, u64::MAX).await
}

#[tokio::test]
async fn the_first_answer_is_taken_and_the_loser_is_let_go() {
    let b = bench(10, 8).await;
    let free = b.limiter.free();
    b.faults.next(Operation::Get, Fault::Delay(LATE));
    let begun = Instant::now();
    assert_eq!(read(&*b.origin).await.unwrap(), b.content.slice(100..5000));
    assert!(begun.elapsed() < LATE / 2, "{:?}", begun.elapsed());
    let stats = b.counters.stats();
    assert!(stats.hedges >= 1 && stats.hedges_won >= 1, "{stats:?}");
    assert_eq!((stats.in_flight, b.limiter.free()), (0, free));
}

#[tokio::test]
async fn a_second_request_that_fails_or_is_late_does_no_harm() {
    let b = bench(10, 8).await;
    for second in [
        Fault::Delay(LATE),
        Fault::Error(ErrorKind::OriginUnavailable),
    ] {
        let before = b.counters.stats();
        b.faults
            .next(Operation::Get, Fault::Delay(Duration::from_secs(3)));
        b.faults.next(Operation::Get, second);
        let begun = Instant::now();
        assert_eq!(read(&*b.origin).await.unwrap(), b.content.slice(100..5000));
        assert!(begun.elapsed() < LATE / 2);
        let after = b.counters.stats();
        assert_eq!(
            (
                after.hedges - before.hedges,
                after.hedges_won - before.hedges_won,
                after.in_flight
            ),
            (1, 0, 0)
        );
    }
}

#[tokio::test]
async fn an_error_that_is_an_answer_is_not_asked_again() {
    let b = bench(10, 8).await;
    let before = b.faults.calls(Operation::Get);
    b.faults
        .next(Operation::Get, Fault::Error(ErrorKind::PreconditionFailed));
    assert_eq!(
        read(&*b.origin).await.unwrap_err().kind(),
        ErrorKind::PreconditionFailed
    );
    assert_eq!(b.faults.calls(Operation::Get), before + 1);
    // A first attempt that fails late is saved by the second.
    b.faults.next(Operation::Get, Fault::Delay(LATE));
    assert!(read(&*b.origin).await.is_ok());
}

#[tokio::test]
async fn second_requests_are_a_bounded_share() {
    let b = bench(5, 8).await;
    b.faults.distance(Distance {
        latency: Duration::from_millis(150),
        bandwidth: None,
    });
    // Everything is slower than what was learnt: without a bound, each of these would be sent
    // twice.
    for _ in 0..40 {
        read(&*b.origin).await.unwrap();
    }
    let hedges = b.counters.stats().hedges;
    assert!(
        (1..=7).contains(&hedges),
        "{hedges} second requests for 140"
    );
}

#[tokio::test]
async fn an_origin_that_fails_and_a_full_limiter_get_no_second_requests() {
    // SlowDown, 429 and 503 are OriginUnavailable.
    for kind in [ErrorKind::OriginUnavailable, ErrorKind::Timeout] {
        let b = bench(20, 8).await;
        b.faults.next(Operation::Get, Fault::Error(kind));
        assert_eq!(read(&*b.origin).await.unwrap_err().kind(), kind);
        let before = b.counters.stats().hedges;
        b.faults
            .next(Operation::Get, Fault::Delay(Duration::from_millis(200)));
        assert!(read(&*b.origin).await.is_ok());
        assert_eq!(b.counters.stats().hedges, before);
    }

    let b = bench(20, 2).await;
    assert_eq!(b.limiter.free().0, 1);
    let before = b.counters.stats().hedges;
    assert_eq!(before, 0, "the only place was taken by each first request");
    b.faults
        .next(Operation::Get, Fault::Delay(Duration::from_millis(200)));
    assert!(read(&*b.origin).await.is_ok());
    assert_eq!(b.counters.stats().hedges, before);
}

#[tokio::test]
async fn writes_are_never_sent_twice() {
    let b = bench(50, 8).await;
    for operation in [Operation::Put, Operation::Delete, Operation::Copy] {
        b.faults
            .next(operation, Fault::Delay(Duration::from_millis(150)));
    }
    b.origin
        .put(
            "b",
            PutRequest::default(),
            Some(3),
            body::from_bytes("123".into()),
        )
        .await
        .unwrap();
    b.origin
        .copy("b", None, "c", PutRequest::default())
        .await
        .unwrap();
    b.origin.delete("b").await.unwrap();
    for operation in [Operation::Put, Operation::Delete, Operation::Copy] {
        assert_eq!(b.faults.calls(operation), 1);
    }
}
