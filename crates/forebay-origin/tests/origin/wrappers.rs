//! Retries, continuation, limits and counters, against scripted faults.

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_origin::{
    Circuit, Counted, Counters, ForwardBody, ForwardRequest, GetRequest, Limited, Limiter,
    LocalOrigin, Operation, Origin, PutCondition, PutRequest, Resilient, RetryPolicy, Timed, body,
};
use forebay_testing::{Fault, Faults, Faulty, conformance::pattern};
use futures::{FutureExt, StreamExt, stream};
use http::{HeaderMap, Method};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

struct Bench {
    _dir: tempfile::TempDir,
    local: Arc<dyn Origin>,
    faults: Faults,
    counters: Arc<Counters>,
    origin: Arc<dyn Origin>,
    content: Bytes,
}

const SIZE: usize = 1_000_000;
/// On a busy machine, the local disk takes its time too.
const IDLE: Duration = Duration::from_secs(3);

/// A circuit that nothing is reported to.
fn closed() -> Arc<Circuit> {
    Arc::new(Circuit::new(IDLE))
}

fn policy() -> RetryPolicy {
    RetryPolicy {
        attempts: 3,
        first_delay: Duration::from_millis(1),
        longest_delay: Duration::from_millis(5),
        deadline: Duration::from_secs(60),
    }
}

async fn bench() -> Bench {
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
    let faulty = Arc::new(Faulty::new(local.clone(), faults.clone()));
    let timed = Arc::new(Timed::new(faulty, IDLE, closed()));
    let counted = Arc::new(Counted::new(timed, counters.clone()));
    let origin = Arc::new(Resilient::new(
        counted,
        policy(),
        counters.clone(),
        closed(),
    ));
    Bench {
        _dir: dir,
        local,
        faults,
        counters,
        origin,
        content,
    }
}

async fn read(origin: &dyn Origin, key: &str, request: GetRequest) -> Result<Bytes> {
    body::collect(origin.get(key, request).await?.body, u64::MAX).await
}

#[tokio::test]
async fn transient_errors_are_retried_and_others_are_not() {
    let b = bench().await;
    for kind in [ErrorKind::Timeout, ErrorKind::OriginUnavailable] {
        b.faults.next(Operation::Head, Fault::Error(kind));
    }
    assert_eq!(b.origin.head("a").await.unwrap().size, SIZE as u64);
    assert_eq!(
        (b.faults.calls(Operation::Head), b.counters.stats().retries),
        (3, 2)
    );
    for kind in [
        ErrorKind::NotFound,
        ErrorKind::PermissionDenied,
        ErrorKind::PreconditionFailed,
        ErrorKind::Busy,
    ] {
        let before = b.faults.calls(Operation::Head);
        b.faults.next(Operation::Head, Fault::Error(kind));
        assert_eq!(b.origin.head("a").await.unwrap_err().kind(), kind);
        assert_eq!(b.faults.calls(Operation::Head), before + 1);
    }
    b.faults
        .always(Operation::Head, Fault::Error(ErrorKind::OriginUnavailable));
    let before = b.faults.calls(Operation::Head);
    let e = b.origin.head("a").await.unwrap_err();
    assert_eq!(
        (e.kind(), b.faults.calls(Operation::Head)),
        (ErrorKind::OriginUnavailable, before + 3)
    );
    assert!(e.to_string().contains("after 3 attempts"), "{e}");
}

#[tokio::test]
async fn an_origin_that_never_answers_times_out() {
    let b = bench().await;
    b.faults.next(Operation::List, Fault::Stall);
    assert_eq!(
        b.origin
            .list(forebay_origin::ListRequest {
                max_keys: 5,
                ..Default::default()
            })
            .await
            .unwrap()
            .entries
            .len(),
        1
    );
    b.faults.always(Operation::Get, Fault::Stall);
    let begun = Instant::now();
    assert_eq!(
        read(&*b.origin, "a", GetRequest::default())
            .await
            .unwrap_err()
            .kind(),
        ErrorKind::Timeout
    );
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test]
async fn no_attempt_begins_after_the_deadline() {
    let b = bench().await;
    let slow = RetryPolicy {
        attempts: 1000,
        first_delay: Duration::from_millis(40),
        deadline: Duration::from_millis(150),
        ..policy()
    };
    let origin = Resilient::new(
        Arc::new(Faulty::new(b.local.clone(), b.faults.clone())),
        slow,
        b.counters.clone(),
        closed(),
    );
    b.faults
        .always(Operation::Head, Fault::Error(ErrorKind::OriginUnavailable));
    assert!(origin.head("a").await.is_err());
    // A thousand attempts take much longer.
    let calls = b.faults.calls(Operation::Head);
    assert!((1..500).contains(&calls), "{calls}");
}

#[tokio::test]
async fn a_body_that_breaks_off_is_continued() {
    let b = bench().await;
    let breaks = [
        Fault::Break { at: 300_000 },
        Fault::Truncate { at: 100_001 },
        Fault::StallBody { at: 70_000 },
        Fault::Break { at: 0 },
    ];
    for fault in breaks {
        b.faults.next(Operation::Get, fault);
    }
    assert_eq!(
        read(&*b.origin, "a", GetRequest::default()).await.unwrap(),
        b.content
    );
    assert_eq!(b.counters.stats().continuations, 4);
    b.faults.next(Operation::Get, Fault::Truncate { at: 10 });
    b.faults
        .next(Operation::Get, Fault::Error(ErrorKind::Timeout));
    let part = GetRequest {
        range: Some(500..2000),
        ..Default::default()
    };
    assert_eq!(
        read(&*b.origin, "a", part).await.unwrap(),
        b.content[500..2000]
    );
}

#[tokio::test]
async fn a_body_that_makes_no_progress_is_given_up() {
    let b = bench().await;
    b.faults.always(Operation::Get, Fault::Truncate { at: 10 });
    let e = read(&*b.origin, "a", GetRequest::default())
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OriginUnavailable);
    assert_eq!(b.faults.calls(Operation::Get), 3);
    // With progress between the breaks there is no such limit.
    b.faults.always(Operation::Get, Fault::Break { at: 70_000 });
    assert_eq!(
        read(&*b.origin, "a", GetRequest::default()).await.unwrap(),
        b.content
    );
}

#[tokio::test]
async fn an_object_that_changes_between_the_pieces_is_never_mixed() {
    for delete in [false, true] {
        let b = bench().await;
        b.faults.next(Operation::Get, Fault::Break { at: 300_000 });
        let local = b.local.clone();
        let hook = move |key: String| {
            let local = local.clone();
            async move {
                match delete {
                    true => local.delete(&key).await.unwrap(),
                    false => drop(
                        local
                            .put(
                                &key,
                                PutRequest::default(),
                                Some(SIZE as u64),
                                body::from_bytes(vec![7; SIZE].into()),
                            )
                            .await
                            .unwrap(),
                    ),
                }
            }
            .boxed()
        };
        b.faults.next(Operation::Get, Fault::Hook(Arc::new(hook)));
        let e = read(&*b.origin, "a", GetRequest::default())
            .await
            .unwrap_err();
        assert_eq!(e.kind(), ErrorKind::VersionChanged, "{e}");
    }
}

#[tokio::test]
async fn lies_about_lengths_and_ranges_are_errors() {
    let b = bench().await;
    b.faults.next(Operation::Get, Fault::Extra { bytes: 3 });
    let got = read(
        &*b.origin,
        "a",
        GetRequest {
            range: Some(10..20),
            ..Default::default()
        },
    )
    .await;
    assert_eq!(got.unwrap_err().kind(), ErrorKind::Corrupt);
    b.faults.next(Operation::Get, Fault::Break { at: 5 });
    b.faults.next(Operation::Get, Fault::WrongRange);
    let got = read(
        &*b.origin,
        "a",
        GetRequest {
            range: Some(10..20),
            ..Default::default()
        },
    )
    .await;
    assert_eq!(got.unwrap_err().kind(), ErrorKind::Corrupt);
}

#[tokio::test]
async fn random_faults_never_change_content() {
    let b = bench().await;
    let faults = vec![
        (Operation::Get, Fault::Error(ErrorKind::Timeout)),
        (Operation::Get, Fault::Break { at: 100_000 }),
        (Operation::Get, Fault::Truncate { at: 200_000 }),
        (Operation::Get, Fault::Break { at: 1 }),
    ];
    b.faults.random(0.3, None, faults);
    let mut complete = 0;
    for at in 0..40 {
        let range = at * 10_000..at * 10_000 + 500_000;
        match read(
            &*b.origin,
            "a",
            GetRequest {
                range: Some(range.clone()),
                ..Default::default()
            },
        )
        .await
        {
            Ok(bytes) => {
                assert_eq!(bytes, b.content[range.start as usize..range.end as usize]);
                complete += 1;
            }
            Err(e) => assert!(e.kind().is_transient(), "{e}"),
        }
    }
    assert!(complete > 20, "only {complete} of 40");
}

#[tokio::test]
async fn small_writes_are_repeated_whole() {
    let b = bench().await;
    b.faults
        .next(Operation::Put, Fault::Error(ErrorKind::OriginUnavailable));
    b.faults
        .next(Operation::Put, Fault::LoseAnswer(ErrorKind::Timeout));
    let chunks =
        stream::iter([Ok(Bytes::from_static(b"ab")), Ok(Bytes::from_static(b"cd"))]).boxed();
    b.origin
        .put("b", PutRequest::default(), Some(4), chunks)
        .await
        .unwrap();
    assert_eq!(b.faults.calls(Operation::Put), 3);
    assert_eq!(
        read(&*b.local, "b", GetRequest::default()).await.unwrap(),
        "abcd"
    );
    let failing = stream::iter([Ok(Bytes::from_static(b"ab")), Err(Error::invalid("x"))]).boxed();
    assert_eq!(
        b.origin
            .put("c", PutRequest::default(), Some(4), failing)
            .await
            .unwrap_err()
            .kind(),
        ErrorKind::Invalid
    );
    assert_eq!(
        b.faults.calls(Operation::Put),
        3,
        "a body that fails reaches no origin"
    );
}

#[tokio::test]
async fn a_conditional_write_does_not_lose_to_itself() {
    let b = bench().await;
    b.faults
        .next(Operation::Put, Fault::LoseAnswer(ErrorKind::Timeout));
    let request = PutRequest {
        condition: PutCondition::IfAbsent,
        ..Default::default()
    };
    let e = b
        .origin
        .put("b", request.clone(), Some(1), body::from_bytes("x".into()))
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OriginUnavailable, "{e}");
    let e = b
        .origin
        .put("b", request, Some(1), body::from_bytes("x".into()))
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::PreconditionFailed, "{e}");
}

#[tokio::test]
async fn a_conditional_copy_or_completion_does_not_lose_to_itself() {
    let b = bench().await;
    let request = PutRequest {
        condition: PutCondition::IfAbsent,
        ..Default::default()
    };
    b.faults
        .next(Operation::Copy, Fault::LoseAnswer(ErrorKind::Timeout));
    let e = b
        .origin
        .copy("a", None, "b", request.clone())
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OriginUnavailable, "{e}");
    let e = b
        .origin
        .copy("a", None, "b", request.clone())
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::PreconditionFailed, "{e}");

    // The upload still exists, as at services that keep it for a while.
    let id = b.origin.create_upload("c", request).await.unwrap();
    let part = body::from_bytes("abc".into());
    let part = b.origin.upload_part("c", &id, 1, 3, part).await.unwrap();
    b.faults.next(
        Operation::CompleteUpload,
        Fault::Error(ErrorKind::OriginUnavailable),
    );
    b.faults.next(
        Operation::CompleteUpload,
        Fault::Error(ErrorKind::PreconditionFailed),
    );
    let always = PutCondition::Always;
    let e = b.origin.complete_upload("c", &id, vec![part], always).await;
    assert_eq!(e.unwrap_err().kind(), ErrorKind::OriginUnavailable);
}

#[tokio::test]
async fn an_upload_whose_writer_goes_away_is_aborted() {
    let late = Fault::Delay(Duration::from_millis(150));
    for (operation, fault) in [
        (Operation::CreateUpload, late),
        (Operation::UploadPart, Fault::Stall),
        (Operation::CompleteUpload, Fault::Stall),
    ] {
        let b = bench().await;
        b.faults.next(operation, fault);
        let origin = b.origin.clone();
        let body = body::from_bytes(pattern(20 << 20));
        let writer =
            tokio::spawn(
                async move { origin.put("long", PutRequest::default(), None, body).await },
            );
        until(|| b.faults.calls(operation) > 0).await;
        writer.abort();
        assert!(writer.await.unwrap_err().is_cancelled());
        until(|| b.faults.calls(Operation::AbortUpload) == 1).await;
        let uploads = b._dir.path().join(".forebay/uploads");
        until(|| std::fs::read_dir(&uploads).is_ok_and(|d| d.count() == 0)).await;
        assert!(b.local.head("long").await.is_err(), "{operation:?}");
    }
}

/// Waits for what happens in another task.
async fn until(done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "it does not happen"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn parts_in_flight_stay_within_what_a_write_reserves() {
    const GIB: u64 = 1 << 30;
    // Parts of 8 MiB, of 17 MB, and of 43 MB, which pass through without being held.
    for (size, in_flight) in [(None, 3), (Some(160 * GIB), 1), (Some(400 * GIB), 1)] {
        let b = bench().await;
        b.faults.always(Operation::UploadPart, Fault::Stall);
        let piece = pattern(1 << 20);
        let read = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let counter = read.clone();
        let body = stream::repeat_with(move || {
            counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Ok(piece.clone())
        });
        let origin = b.origin.clone();
        let writer = tokio::spawn(async move {
            origin
                .put("long", PutRequest::default(), size, body.boxed())
                .await
        });
        until(|| b.faults.calls(Operation::UploadPart) == in_flight).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(b.faults.calls(Operation::UploadPart), in_flight);
        let taken = read.load(std::sync::atomic::Ordering::Relaxed);
        assert!(
            taken <= 33,
            "{taken} MiB were taken from a body of {size:?}"
        );
        writer.abort();
    }
}

#[tokio::test]
async fn waiting_for_ones_turn_is_not_the_origins_silence() {
    let b = bench().await;
    b.faults
        .always(Operation::Get, Fault::Delay(Duration::from_millis(800)));
    // One read at a time, ten of which take twice the idle timeout; and slow bytes.
    let limiter = Arc::new(Limiter::new(1, Some(60_000), b.counters.clone()));
    let faulty = Arc::new(Faulty::new(b.local.clone(), b.faults.clone()));
    let idle = Duration::from_secs(4);
    let timed = Arc::new(Timed::new(faulty, idle, Arc::new(Circuit::new(idle))));
    let once = RetryPolicy {
        attempts: 1,
        ..policy()
    };
    let limited = Arc::new(Limited::new(timed, limiter));
    let origin = Resilient::new(limited, once, b.counters.clone(), closed());
    let range = GetRequest {
        range: Some(0..1000),
        ..Default::default()
    };
    let reads = (0..10).map(|_| read(&origin, "a", range.clone()));
    for read in futures::future::join_all(reads).await {
        assert_eq!(read.unwrap(), b.content[..1000]);
    }
    b.faults.clear();
    let range = GetRequest {
        range: Some(0..400_000),
        ..Default::default()
    };
    assert_eq!(
        read(&origin, "a", range).await.unwrap(),
        b.content[..400_000],
        "a piece of 256 KiB takes longer than that at this rate"
    );
}

#[tokio::test]
async fn a_stalled_origin_costs_one_timeout() {
    // Within the second after which the next one would be tried.
    for _ in 0..5 {
        if stalls_for_one_timeout().await {
            return;
        }
    }
    panic!("requests are not refused at once");
}

/// `false`: that took so long that one may have been tried.
async fn stalls_for_one_timeout() -> bool {
    let b = bench().await;
    let circuit = closed();
    let faulty = Arc::new(Faulty::new(b.local.clone(), b.faults.clone()));
    let timed = Arc::new(Timed::new(faulty, IDLE, circuit.clone()));
    let once = RetryPolicy {
        attempts: 1,
        ..policy()
    };
    let origin = Resilient::new(timed, once, b.counters.clone(), circuit.clone());
    assert!(origin.head("a").await.is_ok());
    for operation in [Operation::Head, Operation::Get, Operation::Put] {
        b.faults.always(operation, Fault::Stall);
    }
    let begun = Instant::now();
    let e = origin.head("a").await.unwrap_err();
    assert_eq!((e.kind(), circuit.is_open()), (ErrorKind::Timeout, true));

    let mut refused = Vec::new();
    for _ in 0..50 {
        let body = body::from_bytes("x".into());
        refused.extend([
            origin.head("a").await.err(),
            read(&origin, "a", GetRequest::default()).await.err(),
            origin
                .put("b", PutRequest::default(), Some(1), body)
                .await
                .err(),
        ]);
    }
    if begun.elapsed() >= IDLE + Duration::from_millis(900) {
        return false;
    }
    for e in refused.into_iter().map(Option::unwrap) {
        assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
        assert!(e.retry_after_hint().is_some(), "{e}");
    }
    let s = b.counters.stats();
    assert_eq!(
        (s.circuit_refused, b.faults.calls(Operation::Get)),
        (150, 0)
    );

    b.faults.clear();
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert!(origin.head("a").await.is_ok(), "the probe");
    assert!(!circuit.is_open() && origin.head("a").await.is_ok());
    true
}

#[tokio::test]
async fn a_single_request_is_tried_again_though_it_opened_the_circuit() {
    let b = bench().await;
    let circuit = closed();
    let faulty = Arc::new(Faulty::new(b.local.clone(), b.faults.clone()));
    let timed = Arc::new(Timed::new(faulty, IDLE, circuit.clone()));
    let origin = Resilient::new(timed, policy(), b.counters.clone(), circuit.clone());
    b.faults.next(Operation::Head, Fault::Stall);
    assert!(origin.head("a").await.is_ok());
    assert!(!circuit.is_open());
    assert_eq!(b.counters.stats().retries, 1);
}

#[tokio::test]
async fn bodies_that_are_silent_for_a_while_are_continued_though_they_opened_the_circuit() {
    let b = bench().await;
    let circuit = closed();
    let faulty = Arc::new(Faulty::new(b.local.clone(), b.faults.clone()));
    let timed = Arc::new(Timed::new(faulty, IDLE, circuit.clone()));
    let origin = Resilient::new(timed, policy(), b.counters.clone(), circuit.clone());
    b.faults
        .next(Operation::Get, Fault::StallBody { at: 300_000 });
    let whole = read(&origin, "a", GetRequest::default()).await;
    assert_eq!(whole.unwrap(), b.content);
    assert!(!circuit.is_open());
    // Of several, one finds out whether the origin answers again, and the others wait for that.
    for fault in [
        Fault::StallBody { at: 300_000 },
        Fault::Delay(Duration::from_millis(250)),
    ] {
        (0..4).for_each(|_| b.faults.next(Operation::Get, fault.clone()));
    }
    let reads = (0..4).map(|_| read(&origin, "a", GetRequest::default()));
    for whole in futures::future::join_all(reads).await {
        assert_eq!(whole.unwrap(), b.content);
    }
    assert!(!circuit.is_open());
}

#[tokio::test]
async fn what_continues_a_read_waits_for_its_turn_though_the_circuit_is_open() {
    // Within the second after which the next one would be tried.
    for _ in 0..5 {
        if what_continues_waits_for_its_turn().await {
            return;
        }
    }
    panic!("requests are not refused at once");
}

/// `false`: that took so long that one may have been tried.
async fn what_continues_waits_for_its_turn() -> bool {
    let b = bench().await;
    let circuit = closed();
    let faulty = Arc::new(Faulty::new(b.local.clone(), b.faults.clone()));
    let timed = Arc::new(Timed::new(faulty, IDLE, circuit.clone()));
    let once = RetryPolicy {
        attempts: 1,
        ..policy()
    };
    let others = Resilient::new(timed.clone(), once, b.counters.clone(), circuit.clone());
    let origin = Resilient::new(timed, policy(), b.counters.clone(), circuit.clone());
    b.faults.next(Operation::Head, Fault::Stall);
    let begun = Instant::now();
    assert!(others.head("a").await.is_err());
    let part = GetRequest {
        range: Some(500_000..SIZE as u64),
        ..Default::default()
    };
    let refused = read(&origin, "a", part.clone()).await;
    if begun.elapsed() >= IDLE + Duration::from_millis(900) {
        return false;
    }
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(b.faults.calls(Operation::Get), 0);
    let next = GetRequest {
        continues: true,
        ..part
    };
    // One finds out whether the origin answers again, and the others wait for that.
    (0..3).for_each(|_| b.faults.next(Operation::Get, Fault::Delay(IDLE / 2)));
    let reads = (0..3).map(|_| read(&origin, "a", next.clone()));
    for bytes in futures::future::join_all(reads).await {
        assert_eq!(bytes.unwrap(), b.content[500_000..]);
    }
    assert!(!circuit.is_open());
    true
}

#[tokio::test]
async fn what_a_client_breaks_off_does_not_open_the_circuit() {
    let b = bench().await;
    let circuit = closed();
    let timed = Arc::new(Timed::new(b.local.clone(), IDLE, circuit.clone()));
    let origin = Resilient::new(timed, policy(), b.counters.clone(), circuit.clone());
    for _ in 0..3 {
        let late = stream::once(async {
            tokio::time::sleep(IDLE + IDLE / 4).await;
            Err(Error::timeout("the client is silent"))
        });
        let put = origin.put("b", PutRequest::default(), None, late.boxed());
        assert_eq!(put.await.unwrap_err().kind(), ErrorKind::Timeout);
        assert!(!circuit.is_open());
    }
}

#[tokio::test]
async fn a_completion_whose_answer_is_lost_is_found_done() {
    let b = bench().await;
    let id = b
        .origin
        .create_upload("b", PutRequest::default())
        .await
        .unwrap();
    b.faults.next(
        Operation::UploadPart,
        Fault::Error(ErrorKind::OriginUnavailable),
    );
    let part = b
        .origin
        .upload_part("b", &id, 1, 3, body::from_bytes("abc".into()))
        .await
        .unwrap();
    b.faults.next(
        Operation::CompleteUpload,
        Fault::LoseAnswer(ErrorKind::Timeout),
    );
    let done = b
        .origin
        .complete_upload("b", &id, vec![part], PutCondition::Always)
        .await
        .unwrap();
    assert_eq!(done.etag, b.local.head("b").await.unwrap().etag);
}

#[tokio::test]
async fn long_bodies_are_written_in_parts_and_aborted_when_they_fail() {
    let b = bench().await;
    let content = pattern(20 << 20);
    let chunks = || {
        stream::iter(
            (0..20)
                .map(|i| Ok(content.slice(i << 20..(i + 1) << 20)))
                .collect::<Vec<Result<Bytes>>>(),
        )
    };
    b.faults
        .next(Operation::UploadPart, Fault::Error(ErrorKind::Timeout));
    b.origin
        .put("long", PutRequest::default(), None, chunks().boxed())
        .await
        .unwrap();
    assert_eq!(
        (
            b.faults.calls(Operation::UploadPart),
            b.faults.calls(Operation::CompleteUpload)
        ),
        (4, 1)
    );
    assert_eq!(
        read(&*b.local, "long", GetRequest::default())
            .await
            .unwrap(),
        content
    );
    let failing = chunks()
        .chain(stream::iter([Err(Error::invalid("x"))]))
        .boxed();
    assert_eq!(
        b.origin
            .put("none", PutRequest::default(), None, failing)
            .await
            .unwrap_err()
            .kind(),
        ErrorKind::Invalid
    );
    assert_eq!(b.faults.calls(Operation::AbortUpload), 1);
    assert_eq!(
        b.local.head("none").await.unwrap_err().kind(),
        ErrorKind::NotFound
    );
    let left = std::fs::read_dir(b._dir.path().join(".forebay/uploads"))
        .unwrap()
        .count();
    assert_eq!(left, 0, "uploads are left");
    assert_eq!(
        std::fs::read_dir(b._dir.path().join(".forebay/tmp"))
            .unwrap()
            .count(),
        0,
        "unfinished files are left"
    );
}

#[tokio::test]
async fn places_are_held_until_the_body_is_gone() {
    let b = bench().await;
    let limiter = Arc::new(Limiter::new(4, None, b.counters.clone()));
    assert_eq!(limiter.free(), (3, 1));
    let origin = Arc::new(Limited::new(b.local.clone(), limiter.clone()));
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(origin.get("a", GetRequest::default()).await.unwrap());
    }
    assert_eq!(limiter.free(), (0, 1));
    let mut waiting = Box::pin(origin.head("a"));
    assert!(
        tokio::time::timeout(Duration::from_millis(30), &mut waiting)
            .await
            .is_err()
    );
    assert_eq!(b.counters.stats().waiting, 1);
    // Writes go on: a copy through this node must not wait for itself.
    origin
        .put("b", PutRequest::default(), Some(0), body::empty())
        .await
        .unwrap();
    drop(held.pop());
    assert!(waiting.await.is_ok());
    assert_eq!((b.counters.stats().waiting, limiter.free().0), (0, 1));
    let last = held.pop().unwrap();
    assert_eq!(body::collect(last.body, u64::MAX).await.unwrap(), b.content);
    assert_eq!(limiter.free().0, 2);
}

#[tokio::test]
async fn bytes_per_second_are_kept_and_shared() {
    let b = bench().await;
    let limiter = Arc::new(Limiter::new(8, Some(4_000_000), b.counters.clone()));
    let origin = Limited::new(b.local.clone(), limiter);
    let begun = Instant::now();
    let (x, y) = tokio::join!(
        read(&origin, "a", GetRequest::default()),
        read(&origin, "a", GetRequest::default())
    );
    assert!(x.is_ok() && y.is_ok());
    let took = begun.elapsed();
    assert!(
        took > Duration::from_millis(400),
        "2 MB at 4 MB/s in {took:?}"
    );
    assert!(b.counters.stats().throttled_seconds > 0.3);
}

#[tokio::test]
async fn what_is_passed_on_is_counted_by_what_it_costs() {
    use Operation::{Forward, ForwardDelete, ForwardRead};
    let b = bench().await;
    for (method, key, query) in [
        (Method::GET, "a", "tagging"),
        (Method::HEAD, "a", "versionId"),
        (Method::POST, "a", "select"),
        (Method::DELETE, "a", "tagging"),
        (Method::DELETE, "", "cors"),
        (Method::PUT, "a", "tagging"),
        (Method::GET, "a", "uploadId"),
        (Method::GET, "", "versions"),
        (Method::GET, "", "prefix"),
        (Method::GET, "", "acl"),
        (Method::HEAD, "", "x-id"),
    ] {
        let request = ForwardRequest {
            method,
            key: key.into(),
            query: vec![(query.into(), String::new())],
            headers: HeaderMap::new(),
            body: ForwardBody::Empty,
        };
        // A directory takes none of them.
        assert!(b.origin.forward(request).await.is_err());
    }
    let stats = b.counters.stats();
    let counted = [ForwardRead, ForwardDelete, Forward].map(|o| stats.requests(o));
    assert_eq!(counted, [5, 2, 4]);
}

#[tokio::test]
async fn everything_is_counted() {
    let b = bench().await;
    let before = b.counters.stats();
    assert_eq!((before.requests_total(), before.in_flight), (0, 0));
    let answer = b
        .origin
        .get(
            "a",
            GetRequest {
                range: Some(0..1000),
                ..Default::default()
            },
        )
        .await
        .unwrap();
    assert_eq!(b.counters.stats().in_flight, 1);
    body::collect(answer.body, 1000).await.unwrap();
    b.origin
        .put(
            "b",
            PutRequest::default(),
            Some(5),
            body::from_bytes("12345".into()),
        )
        .await
        .unwrap();
    assert!(b.origin.head("none").await.is_err());
    let s = b.counters.stats();
    assert_eq!(
        (
            s.requests(Operation::Get),
            s.requests(Operation::Put),
            s.requests(Operation::Head)
        ),
        (1, 1, 1)
    );
    assert_eq!((s.bytes_in, s.bytes_out, s.in_flight), (1000, 5, 0));
    assert_eq!(s.errors, [(ErrorKind::NotFound, 1)]);
    assert!(
        s.operations
            .iter()
            .find(|o| o.operation == Operation::Put)
            .unwrap()
            .latency
            .count()
            > 0
    );
}
