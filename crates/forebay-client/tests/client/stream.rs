//! The receiver against nodes that have bad luck: every step arrives once, in order and complete;
//! or there is an error that says why.
//!
//! `FOREBAY_TEST_SEED=n` replays, `FOREBAY_TEST_CASES=<factor>` tries more.

use crate::common::{Luck, TestNode, assert_step, client};
use forebay_client::stream::{Options, Stream};
use forebay_core::ErrorKind;
use forebay_testing::seeded::random_seeds;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    runtime::Handle,
    time::timeout,
};

const PATIENCE: Duration = Duration::from_secs(60);

fn open(nodes: &[&Arc<TestNode>], options: Options) -> Stream {
    let nodes = nodes.iter().map(|n| client(n.addr)).collect();
    Stream::open(&Handle::current(), nodes, b"{}".to_vec(), options).unwrap()
}

fn quick(connections: Option<u32>) -> Options {
    Options {
        connections,
        silence: Duration::from_secs(5),
        retry_for: Duration::from_secs(20),
        ..Options::default()
    }
}

/// Reads to the end; returns the steps that arrived.
async fn read_all(stream: &Stream, from: u64, most_bytes: u64) -> u64 {
    let mut step = from;
    while let Some(received) = timeout(PATIENCE, stream.next())
        .await
        .expect("a step in time")
        .unwrap()
    {
        assert_step(&received, step, most_bytes);
        step += 1;
    }
    step
}

/// Waits until no connection of the node is open.
async fn let_go(node: &TestNode) {
    for _ in 0..6000 {
        if node.open.load(SeqCst) == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{} connections are still open", node.open.load(SeqCst));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_number_of_connections_with_any_luck_gives_every_step_once_in_order() {
    for seed in random_seeds(25) {
        let mut rng = StdRng::seed_from_u64(seed);
        let (steps, most_bytes) = (
            rng.random_range(0..120),
            [10, 5_000, 200_000][rng.random_range(0..3)],
        );
        let luck = Luck {
            cut_one_in: rng.random_range(0..4),
            cut_within_bytes: most_bytes * rng.random_range(2..20) + 2000,
            damage_one_in: rng.random_range(0..5),
            refuse_one_in: if rng.random_bool(0.3) { 4 } else { 0 },
            ..Luck::default()
        };
        // If every connection had bad luck, the test would never end.
        let luck = Luck {
            cut_one_in: luck.cut_one_in.max(2),
            damage_one_in: luck.damage_one_in.max(3),
            ..luck
        };
        let mut nodes = Vec::new();
        for i in 0..rng.random_range(1..4) {
            nodes.push(TestNode::start(steps, most_bytes, luck.clone(), seed + i).await);
        }
        let from_step = if rng.random_bool(0.5) {
            0
        } else {
            rng.random_range(0..=steps)
        };
        let options = Options {
            ahead_bytes: most_bytes * rng.random_range(1..10),
            from_step,
            ..quick((!rng.random_bool(0.2)).then(|| rng.random_range(1..9)))
        };
        let stream = open(&nodes.iter().collect::<Vec<_>>(), options.clone());
        assert_eq!(read_all(&stream, from_step, most_bytes).await, steps);
        let stats = stream.stats();
        assert_eq!(stats.steps, steps - from_step);
        assert!(
            stats.ahead_bytes_max <= options.ahead_bytes + 2 * most_bytes + 4096,
            "{stats:?}"
        );
        assert_eq!((stats.ahead_bytes, stats.ahead_steps), (0, 0));
        drop(stream);
        for node in &nodes {
            let_go(node).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_stops_makes_the_node_stop() {
    let node = TestNode::start(100_000, 100_000, Luck::default(), 1).await;
    let ahead = 1 << 20;
    let stream = open(
        &[&node],
        Options {
            ahead_bytes: ahead,
            ..quick(Some(4))
        },
    );
    for step in 0..10 {
        assert_step(&stream.next().await.unwrap().unwrap(), step, 100_000);
    }
    let mut sent = 0;
    loop {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let now = node.sent_bytes.load(SeqCst);
        if now == sent {
            break;
        }
        sent = now;
    }
    let stats = stream.stats();
    assert!(stats.ahead_bytes <= ahead + 200_000, "{stats:?}");
    // What is neither here nor taken is in the buffers of four sockets.
    assert!(
        sent < 10 * 100_000 + ahead + 4 * (40 << 20),
        "{sent} bytes were sent to a reader that took ten steps"
    );
    for step in 10..300 {
        assert_step(&stream.next().await.unwrap().unwrap(), step, 100_000);
    }
    assert!(stream.stats().paused_seconds > 0.1, "{:?}", stream.stats());
    drop(stream);
    let_go(&node).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_dies_is_replaced_by_the_others_and_one_that_returns_is_used_again() {
    let luck = Luck {
        pause: Duration::from_millis(1),
        ..Luck::default()
    };
    let (first, second) = (
        TestNode::start(400, 2000, luck.clone(), 1).await,
        TestNode::start(400, 2000, luck, 2).await,
    );
    let stream = open(
        &[&first, &second],
        Options {
            ahead_bytes: 10_000,
            ..quick(Some(4))
        },
    );
    let mut step = 0;
    while let Some(received) = timeout(PATIENCE, stream.next()).await.unwrap().unwrap() {
        assert_step(&received, step, 2000);
        match step {
            50 => first.kill(),
            150 => first.revive(),
            200 => second.kill(),
            300 => second.revive(),
            _ => {}
        }
        step += 1;
    }
    assert_eq!(step, 400);
    assert!(stream.stats().reopened >= 4, "{:?}", stream.stats());
    assert!(
        stream.stats().node["origin_seconds"] > 1.0,
        "{:?}",
        stream.stats()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_stays_away_is_an_error_after_a_while() {
    let node = TestNode::start(
        100,
        1000,
        Luck {
            pause: Duration::from_millis(1),
            ..Luck::default()
        },
        1,
    )
    .await;
    let stream = open(
        &[&node],
        Options {
            retry_for: Duration::from_millis(300),
            ahead_bytes: 1,
            ..quick(Some(2))
        },
    );
    assert_step(&stream.next().await.unwrap().unwrap(), 0, 1000);
    node.kill();
    let error = loop {
        match timeout(PATIENCE, stream.next()).await.expect("an end") {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the end, of a stream that broke"),
            Err(e) => break e,
        }
    };
    assert!(
        error.kind().is_transient() && error.message().contains("did not arrive"),
        "{error:?}"
    );
    assert_eq!(
        stream.next().await.unwrap_err().message(),
        error.message(),
        "nothing follows"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_of_a_step_comes_in_its_place() {
    let node = TestNode::start(
        100,
        1000,
        Luck {
            broken_step: Some(37),
            ..Luck::default()
        },
        1,
    )
    .await;
    let stream = open(&[&node], quick(Some(3)));
    for step in 0..37 {
        assert_step(
            &timeout(PATIENCE, stream.next())
                .await
                .unwrap()
                .unwrap()
                .unwrap(),
            step,
            1000,
        );
    }
    let error = stream.next().await.unwrap_err();
    assert_eq!(
        (error.kind(), error.message(), error.hint_text()),
        (ErrorKind::Corrupt, "row 370 is damaged", Some("look at it"))
    );
    assert!(
        node.requests.load(SeqCst) <= 3,
        "what cannot be had is not asked for again"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_is_an_error_at_once_unless_another_node_accepts() {
    let refusing = TestNode::start(
        20,
        1000,
        Luck {
            always: Some(404),
            ..Luck::default()
        },
        1,
    )
    .await;
    let stream = open(&[&refusing], quick(Some(1)));
    // Long before it would be given up.
    let error = timeout(Duration::from_secs(15), stream.next())
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.message().ends_with("not now"), "{error:?}");
    let accepting = TestNode::start(20, 1000, Luck::default(), 1).await;
    let stream = open(&[&refusing, &accepting], quick(Some(3)));
    assert_eq!(read_all(&stream, 0, 1000).await, 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_wants_to_be_left_alone_for_an_hour_is_given_up_in_time() {
    let luck = Luck {
        always: Some(503),
        retry_after_secs: Some(3600),
        ..Luck::default()
    };
    let node = TestNode::start(20, 1000, luck, 1).await;
    let options = Options {
        retry_for: Duration::from_millis(300),
        ..quick(Some(1))
    };
    let stream = open(&[&node], options);
    let given_up = timeout(PATIENCE, stream.next()).await;
    let error = given_up.expect("an end in time").unwrap_err();
    assert!(error.message().contains("did not arrive"), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_connections_are_opened_while_that_makes_it_faster_and_no_step_is_lost_or_doubled() {
    // A connection delivers a frame every five milliseconds, however many there are.
    let luck = Luck {
        pause: Duration::from_millis(5),
        ..Luck::default()
    };
    let options = Options {
        silence: Duration::from_secs(30),
        ..quick(None)
    };
    let mut all = Vec::new();
    // A machine that is busy with something else makes a stream slower, and not each of them.
    for _ in 0..6 {
        let node = TestNode::start(3000, 2000, luck.clone(), 1).await;
        let stream = open(&[&node], options.clone());
        assert_eq!(read_all(&stream, 0, 2000).await, 3000);
        assert_eq!(stream.stats().reopened, 0);
        let_go(&node).await;
        let lanes = node.lanes.lock().unwrap();
        let most = lanes.iter().map(|(_, of, _)| *of).max();
        if most == Some(16) {
            return;
        }
        all.push(most);
    }
    panic!("so many connections at most: {all:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_node_is_given_up_and_asked_again() {
    let node = TestNode::start(
        6,
        1000,
        Luck {
            // It says nothing.
            pause: Duration::from_secs(3600),
            ..Luck::default()
        },
        1,
    )
    .await;
    let stream = open(
        &[&node],
        Options {
            silence: Duration::from_millis(100),
            retry_for: Duration::from_secs(5),
            ..quick(Some(1))
        },
    );
    let error = timeout(PATIENCE, stream.next()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
    assert!(node.requests.load(SeqCst) > 1);
}

/// Accepts connections and says nothing on them; or only which node it is, to those that ask.
async fn silent(is_there: bool) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut held = Vec::new();
        loop {
            let (mut io, _) = listener.accept().await.unwrap();
            let mut head = [0; 8];
            io.read_exact(&mut head).await.unwrap();
            if is_there && head.starts_with(b"GET ") {
                let info = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
                io.write_all(info).await.unwrap();
            }
            held.push(io);
        }
    });
    addr
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_several_that_is_gone_is_left_before_its_time() {
    let silence = Duration::from_secs(12);
    let all_of = |is_there| async move {
        let well = TestNode::start(20, 1000, Luck::default(), 1).await;
        let nodes = vec![client(silent(is_there).await), client(well.addr)];
        let options = Options {
            silence,
            ..quick(Some(2))
        };
        let began = Instant::now();
        let stream = Stream::open(&Handle::current(), nodes, b"{}".to_vec(), options).unwrap();
        assert_eq!(read_all(&stream, 0, 1000).await, 20);
        began.elapsed()
    };
    let (gone, slow) = tokio::join!(all_of(false), all_of(true));
    assert!(gone < silence - Duration::from_secs(1), "{gone:?}");
    // It may be at it.
    assert!(slow >= silence, "{slow:?}");
}
