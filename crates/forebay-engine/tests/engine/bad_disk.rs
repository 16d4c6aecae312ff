//! A disk that is full, read-only, failing or damaged makes the node slower, but no answer wrong.

use forebay_engine::Freshness;
use forebay_store::{
    DirConfig, Store, StoreConfig,
    disk::RealDisk,
    faults::{Fault, Faults, FaultyDisk, Op, Rule},
};
use forebay_testing::engine::{self, Bench, MemoryOrigin, NOW, name, noise};
use futures::{FutureExt, future::join_all};
use std::{
    future::Future,
    sync::{
        Arc,
        atomic::Ordering::SeqCst,
        mpsc::{RecvTimeoutError, channel},
    },
    time::{Duration, Instant},
};

const MIB: usize = 1 << 20;

fn bench() -> (Bench, Faults) {
    let dir = tempfile::tempdir().unwrap();
    let clock = forebay_core::ManualClock::at(NOW);
    let (disk, faults) = FaultyDisk::new(RealDisk);
    let config = StoreConfig {
        dirs: vec![DirConfig {
            path: dir.path().to_owned(),
            capacity_bytes: 256 << 20,
        }],
        ..Default::default()
    };
    let store = Store::open_on(Arc::new(disk), config, Arc::new(clock.clone())).unwrap();
    let origin = Arc::new(MemoryOrigin::default());
    let minute = Freshness::RevalidateAfter(Duration::from_secs(60));
    (
        Bench::over(
            origin,
            minute,
            Some(Arc::new(store)),
            Some(dir),
            clock,
            64 << 20,
        ),
        faults,
    )
}

async fn read_all(b: &Bench) {
    for round in 0..2 {
        assert_eq!(b.get("small").await.unwrap().0, noise(10_000, 1), "{round}");
        assert_eq!(b.get("big").await.unwrap().0, noise(40 * MIB, 2), "{round}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_refuses_writes_is_bypassed_without_fetching_twice() {
    type Break = fn(&Faults);
    let full: Break = |f| f.full("");
    let read_only: Break = |f| f.read_only("");
    let failing: Break = |f| f.add(Rule::new(Op::Write, Fault::Error(libc::EIO)));
    for break_it in [full, read_only, failing] {
        let (b, faults) = bench();
        b.origin.set("small", noise(10_000, 1));
        b.origin.set("big", noise(40 * MIB, 2));
        break_it(&faults);
        read_all(&b).await;
        assert!(b.engine.stats().snapshot().store_writes_failed > 0);
        let fetched = b.origin.bytes_out.load(SeqCst) as usize;
        // Two rounds of everything, plus the runs fetched until the disk's state was noticed.
        assert!(fetched < 2 * 40 * MIB + 20 * MIB, "{} MiB", fetched / MIB);
        faults.clear();
        b.clock.advance(Duration::from_secs(31));
        tokio::time::sleep(Duration::from_millis(5100)).await;
        let began = Instant::now();
        loop {
            read_all(&b).await;
            if b.get("big").await.unwrap().1 == "HIT" {
                break;
            }
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "the disk is well again"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_bytes_are_a_miss_and_never_an_answer() {
    let (b, faults) = bench();
    b.origin.set("small", noise(10_000, 1));
    b.origin.set("big", noise(40 * MIB, 2));
    read_all(&b).await;
    faults.add(Rule::new(Op::Read, Fault::FlipBit(7_777)).times(20));
    read_all(&b).await;
    faults.clear();
    faults.add(Rule::new(Op::Read, Fault::Error(libc::EIO)).times(20));
    read_all(&b).await;
    assert!(faults.happened() >= 20);
}

/// The head is on disk, the chunks are not, the disk is full by now, and the object has changed:
/// the next read must learn that.
#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_changes_while_the_disk_is_full_is_read_anew() {
    let (b, faults) = bench();
    b.origin.set("big", noise(3 * MIB, 1));
    b.get_range("big", Some(forebay_core::ByteRange::Inclusive(0, 9)))
        .await
        .unwrap();
    engine::settled(&b.engine).await;
    faults.full("seg-");
    b.origin.set("small", noise(10, 2));
    b.get("small").await.unwrap();
    b.origin.set("big", noise(3 * MIB, 3));
    let tail = Some(forebay_core::ByteRange::From(2 * MIB as u64));
    assert_eq!(
        b.get_range("big", tail).await.unwrap().0,
        noise(3 * MIB, 3)[2 * MIB..]
    );
}

/// Runs `work` on a runtime with one thread, over a disk whose writes hang. Each is let go when
/// another task of the runtime has gone on for a while: none may be waited for by its thread.
fn goes_on_beside(faults: &Faults, what: &str, work: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (over, is_over) = channel::<()>();
    let watched = faults.clone();
    let watching = std::thread::spawn(move || {
        let (mut held_up, mut patience) = (false, Duration::from_secs(60));
        while is_over.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            (held_up, patience) = (true, Duration::from_millis(10));
            watched.clear();
        }
        watched.clear();
        held_up
    });
    let hangs = || Rule::new(Op::Write, Fault::Hang).on("seg-");
    let (faults, mut seen) = (faults.clone(), faults.happened());
    faults.add(hangs());
    runtime.block_on(async {
        let going_on = tokio::spawn(async move {
            loop {
                while faults.happened() == seen {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                seen = faults.happened();
                for _ in 0..5 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                faults.clear();
                faults.add(hangs());
            }
        });
        tokio::task::yield_now().await;
        work.await;
        going_on.abort();
    });
    drop(over);
    let held_up = watching.join().unwrap();
    assert!(!held_up, "{what}: the runtime's thread waits for the disk");
}

/// A disk that is slow to write delays the writers, and nobody else.
#[test]
fn a_slow_disk_holds_up_no_thread_of_the_runtime() {
    let (b, faults) = bench();
    let mut keys: Vec<String> = (0..12).map(|i| format!("o{i}")).collect();
    // A cold and a warm object in the same stripe of generations.
    let stripe = |key: &str| name(key).hash128() as usize % 1024;
    let cold = (0..)
        .map(|i| format!("cold{i}"))
        .find(|k| stripe(k) == stripe("warm"))
        .unwrap();
    keys.extend(["warm".to_owned(), cold.clone()]);
    for key in &keys {
        b.origin.set(key, noise(10_000, 1));
    }
    let warm_up = async {
        for key in keys.iter().filter(|k| **k != cold) {
            b.get(key).await.unwrap();
        }
    };
    tokio::runtime::Runtime::new().unwrap().block_on(warm_up);

    // Removed here after their removal at the origin.
    goes_on_beside(&faults, "removals", async {
        let names: Vec<_> = keys[..6].iter().map(|k| name(k)).collect();
        for done in join_all(names.iter().map(|n| b.engine.delete(n))).await {
            done.unwrap();
        }
    });

    // Gone or changed at the origin; revalidations find out.
    b.clock.advance(Duration::from_secs(61));
    b.origin.objects.lock().remove(&keys[6]);
    goes_on_beside(&faults, "revalidations", async {
        assert!(b.get(&keys[6]).await.is_err());
        assert_eq!(b.get("warm").await.unwrap().1, "REVALIDATED");
    });

    // A cold object is kept while a warm one of the same stripe is read.
    goes_on_beside(&faults, "fills", async {
        let cold = b.get(&cold).boxed();
        let warm = async {
            for _ in 0..20 {
                assert_eq!(b.get("warm").await.unwrap().1, "HIT");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let (cold, ()) = futures::join!(cold, warm);
        assert_eq!(cold.unwrap().1, "MISS");
    });
}
