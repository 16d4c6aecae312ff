//! Nodes that answer slowly.

use super::{
    batches::{entry, expected},
    lies::{ENTRIES, FOUND, Frame, Said, honest},
    *,
};
use std::sync::atomic::AtomicBool;

/// How much later a slow node answers than others, whose answers this machine hardly ever keeps for
/// so long.
const SLOW: Duration = Duration::from_secs(6);
/// No answer is late before: much more than one takes, and much less than a slow one.
const LATE: Duration = Duration::from_millis(500);

/// Three nodes, of which the second is slow to the first whenever this is so.
async fn with_a_slow_node() -> (Nodes, Arc<AtomicBool>) {
    with_sizes(Sizes {
        late: LATE,
        answer: Duration::from_secs(60),
        ..PATIENT
    })
    .await
}

async fn with_sizes(sizes: Sizes) -> (Nodes, Arc<AtomicBool>) {
    let maps = |addresses: &[(u64, String, u64)]| vec![map_of(addresses); 3];
    let n = Nodes::with_maps(3, HOUR, sizes, Duration::ZERO, maps).await;
    let is_slow = Arc::new(AtomicBool::new(false));
    let slow = is_slow.clone();
    let lie = move |frame: Frame, _| match [FOUND, ENTRIES].contains(&frame.0) && slow.load(SeqCst)
    {
        true => Said::Late(frame, SLOW),
        false => honest(frame),
    };
    n.nodes[0].dial.lie.set_of(2, lie);
    (n, is_slow)
}

/// The first node reads so many objects of each of the two others, which have them: from then on it
/// knows how quickly they answer.
async fn known(n: &Nodes, each: usize) {
    let all = small_objects("known", 8 * each, 3000);
    n.have(&all);
    let of = |place: usize| -> Objects {
        let of = all.iter().filter(|(key, _)| n.home(key) == place);
        of.map(|(k, d)| (k.clone(), d.clone())).take(each).collect()
    };
    for (place, objects) in [(1, of(1)), (2, of(2))] {
        assert_eq!(objects.len(), each);
        n.nodes[place].read_all(&objects, 0).await;
        for key in objects.keys() {
            n.nodes[0].get(key).await.unwrap();
        }
    }
    // What is late is looked at now and then.
    tokio::time::sleep(Duration::from_millis(300)).await;
}

/// Of the second node, as the first one sees it.
fn link(n: &Nodes) -> forebay_peer::LinkStatus {
    let links = n.nodes[0].cluster.links();
    links.into_iter().find(|link| link.node == 2).unwrap()
}

/// More objects, of the node at this place, which has them.
async fn more(n: &Nodes, place: usize, of: &str, count: usize) -> Objects {
    let keys = (0u64..).map(|i| format!("{of}-{i}"));
    let keys = keys.filter(|key| n.home(key) == place).take(count);
    let more: Objects = (0..)
        .zip(keys)
        .map(|(i, key)| (key, noise(1500 + 100 * i, i as u64)))
        .collect();
    n.have(&more);
    n.nodes[place].read_all(&more, 0).await;
    more
}

/// Four objects of the third node, which is never slow: if it is late once by itself, its other
/// answers show that it is the second one that is late.
async fn quick(n: &Nodes, round: usize) {
    for key in more(n, 2, &format!("quick-{round}"), 4).await.keys() {
        n.nodes[0].get(key).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_node_is_overtaken_and_then_left_alone_until_it_is_quick_again() {
    let (n, is_slow) = with_a_slow_node().await;
    // All second questions that can be saved up are.
    known(&n, 160).await;
    let (objects, before) = (more(&n, 1, "more", 40).await, link(&n));
    is_slow.store(true, SeqCst);
    let mut times = Vec::new();
    for (round, (key, data)) in objects.iter().enumerate() {
        quick(&n, round).await;
        let began = Instant::now();
        assert!(n.nodes[0].get(key).await.unwrap() == *data, "{key}");
        times.push(began.elapsed());
    }
    let after = link(&n);
    println!("{times:.0?}; {after:?}");
    let overtaken = after.overtaken - before.overtaken;
    // 16 that were saved up, and one for twenty questions.
    assert!((1..=26).contains(&overtaken), "{after:?}");
    assert!(after.hedged >= overtaken);
    assert!(after.left_alone > before.left_alone, "{after:?}");
    assert!(after.answers, "it does answer");
    let slow = times.iter().filter(|time| **time > SLOW).count();
    assert!(slow <= 8, "{slow} of {} were slow: {times:?}", times.len());
    // It is asked again some time later, and then as before.
    is_slow.store(false, SeqCst);
    let began = Instant::now();
    loop {
        let some = more(&n, 1, &format!("later-{:?}", began.elapsed()), 3).await;
        let questions = link(&n).questions;
        for key in some.keys() {
            n.nodes[0].get(key).await.unwrap();
        }
        if link(&n).questions - questions >= 3 {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(180), "it stays alone");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_go_past_a_slow_node() {
    let (n, is_slow) = with_a_slow_node().await;
    known(&n, 80).await;
    is_slow.store(true, SeqCst);
    let mut times = Vec::new();
    for round in 0..24 {
        quick(&n, round).await;
        let objects = more(&n, 1, &format!("batch-{round}"), 12).await;
        let keys: Vec<&String> = objects.keys().collect();
        let entries: Vec<String> = keys.iter().map(|key| entry(key)).collect();
        let began = Instant::now();
        assert!(n.nodes[0].batch(&entries).await.unwrap() == expected(&keys, &objects));
        times.push(began.elapsed());
    }
    let slow = times.iter().filter(|time| **time > SLOW).count();
    println!("{times:.0?}; {:?}", link(&n));
    assert!(slow <= 4, "{slow} of {} were slow: {times:?}", times.len());
    assert!(link(&n).left_alone > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_waits_for_the_bucket_is_not_slow() {
    // Late is what this machine hardly ever is by itself, and the bucket later than that.
    let sizes = Sizes {
        late: Duration::from_secs(4),
        answer: Duration::from_secs(60),
        ..PATIENT
    };
    let (n, _) = with_sizes(sizes).await;
    known(&n, 80).await;
    *n.origin.latency.lock() = Duration::from_secs(7);
    let before = n.left_bucket();
    let (all, large) = (small_objects("cold", 60, 3000), noise(9 * MIB, 1));
    n.have(&all);
    n.origin.set("large", large.clone());
    let reads = all.keys().map(|key| n.nodes[0].get(key));
    let (read, of_large) = tokio::join!(join_all(reads), n.nodes[0].get("large"));
    assert!(
        read.into_iter()
            .map(Result::unwrap)
            .eq(all.values().cloned())
    );
    assert!(of_large.unwrap() == large);
    // Nobody else was asked to fetch it too.
    let left = n.left_bucket() - before;
    assert_eq!(left, bytes_of(&all) + large.len() as u64);
    let links = n.nodes[0].cluster.links();
    let hedged: u64 = links.iter().map(|link| link.hedged).sum();
    assert_eq!(hedged, 0, "{links:?}");
    assert!(links.iter().all(|link| link.left_alone == 0));
}
