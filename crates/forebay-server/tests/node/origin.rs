//! A node whose origin stalls.

use forebay_core::ManualClock;
use forebay_server::{Config, Node, config::Override};
use forebay_testing::{Reply, Scripted};
use http::StatusCode;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::common::TestNode;

const CONTENT: &str = "hello, world";

/// An S3 service with one object for each name, until it stalls.
async fn service() -> (Scripted, Arc<AtomicBool>) {
    let stalled = Arc::new(AtomicBool::new(false));
    let state = stalled.clone();
    let server = Scripted::start(move |request, _| {
        if state.load(Relaxed) {
            return Reply::never();
        }
        if request.header("if-none-match") == Some("\"1\"") {
            return Reply::new(304, "").header("ETag", "\"1\"");
        }
        Reply::new(206, CONTENT)
            .header("ETag", "\"1\"")
            .header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
            .header("Content-Range", format!("bytes 0-11/{}", CONTENT.len()))
    })
    .await;
    (server, stalled)
}

#[tokio::test]
async fn a_stalled_origin_costs_one_timeout_and_what_is_cached_is_served_stale() {
    let (server, stalled) = service().await;
    let dir = tempfile::tempdir().unwrap();
    let origin = format!(
        "[{{name = \"data\", url = \"s3://data\", endpoint = \"{}\", anonymous = true, \
         idle_timeout = \"500ms\", attempts = 1}}]",
        server.address()
    );
    let cache = format!("{}/cache:64MiB", dir.path().display());
    let overrides = [
        Override::cache(&[cache], "test").unwrap(),
        Override::text("listen.s3", "127.0.0.1:0", "test").unwrap(),
        Override::text("listen.admin", "127.0.0.1:0", "test").unwrap(),
        Override::text("cache.stale_if_error", "10m", "test").unwrap(),
    ];
    let env = [("FOREBAY__ORIGINS".to_owned(), origin)];
    let config = Config::load(None, env, &overrides).unwrap();
    let clock = ManualClock::at(Duration::from_secs(1_800_000_000));
    let node = Node::start_with(config, Arc::new(clock.clone()))
        .await
        .unwrap();
    let n = TestNode { node, clock, dir };
    let mut c = n.client().await;
    assert_eq!(c.get("/data/a").await.header("x-cache"), "MISS");

    stalled.store(true, Relaxed);
    n.clock.advance(Duration::from_secs(61));
    let begun = Instant::now();
    let a = c.get("/data/a").await;
    assert_eq!(
        (a.status, a.header("x-cache"), a.text().as_str()),
        (StatusCode::OK, "STALE", CONTENT)
    );
    assert!(begun.elapsed() >= Duration::from_millis(500), "one timeout");

    let (begun, asked) = (Instant::now(), server.requests().len());
    for i in 0..30 {
        assert_eq!(c.get("/data/a").await.header("x-cache"), "STALE");
        let missing = c.get(&format!("/data/not-here-{i}")).await;
        assert_eq!(missing.status, StatusCode::GATEWAY_TIMEOUT);
        assert!(!missing.header("retry-after").is_empty());
    }
    // A probe may have cost a timeout; none of the others did.
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
    let probes = server.requests().len() - asked;
    assert!(
        probes <= 3,
        "{probes} requests to an origin that does not answer"
    );
    assert_eq!(
        n.metric("forebay_origin_circuit_open", "origin=\"data\"")
            .await,
        1.0
    );
    assert!(
        n.metric("forebay_origin_circuit_refused_total", "data")
            .await
            >= 50.0
    );
    assert!(n.metric("forebay_reads_total", "status=\"STALE\"").await >= 31.0);
    assert!(n.metric("forebay_answers_total", "x_cache=\"STALE\"").await >= 31.0);

    n.clock.advance(Duration::from_secs(600));
    let late = c.get("/data/a").await;
    assert_eq!(late.status, StatusCode::GATEWAY_TIMEOUT, "past the bound");

    stalled.store(false, Relaxed);
    let begun = Instant::now();
    while c.get("/data/a").await.header("x-cache") != "REVALIDATED" {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "it answers again"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(
        n.metric("forebay_origin_circuit_open", "origin=\"data\"")
            .await,
        0.0
    );
}
