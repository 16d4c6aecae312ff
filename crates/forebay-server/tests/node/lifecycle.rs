//! Starting, stopping, overload, signatures, and the admin port.

use crate::common::{Client, config, start, start_in, start_on_the_real_clock};
use forebay_core::ErrorKind;
use forebay_server::{Embedded, Node, embedded, metrics};
use http::{Method, StatusCode};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// More than the socket buffers hold, so that an answer waits for its reader.
const LARGE: usize = 24 << 20;

async fn slow_get(n: &crate::common::TestNode) -> tokio::net::TcpStream {
    let mut s = tokio::net::TcpStream::connect(n.node.addr().unwrap())
        .await
        .unwrap();
    s.write_all(b"GET /data/large HTTP/1.1\r\nHost: h\r\n\r\n")
        .await
        .unwrap();
    let mut head = [0u8; 12];
    s.read_exact(&mut head).await.unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
    s
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_finishes_answers_and_takes_nothing_new() {
    let n = start(&[]).await;
    n.write("large", &vec![9; LARGE]);
    let mut s = slow_get(&n).await;
    let admin = n.node.admin_addr().unwrap();
    let mut idle = n.client().await;
    assert_eq!(idle.get("/data?list-type=2").await.status, StatusCode::OK);
    let addr = n.node.addr().unwrap();
    let socket = n.node.unix_path().unwrap().to_owned();
    let n = std::sync::Arc::new(n);
    let stopping = tokio::spawn({
        let n = n.clone();
        async move { n.node.shutdown(Duration::from_secs(30)).await }
    });
    while Client::tcp(admin).await.get("/readyz").await.status != StatusCode::SERVICE_UNAVAILABLE {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // Nothing new is taken.
    until(async || tokio::net::TcpStream::connect(addr).await.is_err()).await;
    assert!(!stopping.is_finished(), "an answer is in flight");
    let mut rest = Vec::new();
    s.read_to_end(&mut rest).await.unwrap();
    assert!(
        rest.len() > LARGE && rest.ends_with(&[9; 1000]),
        "the answer is whole: {}",
        rest.len()
    );
    stopping.await.unwrap().unwrap();
    assert!(!socket.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_outlives_the_deadline_looks_cut() {
    let n = start(&[]).await;
    n.write("large", &vec![9; LARGE]);
    let mut s = slow_get(&n).await;
    let e = n
        .node
        .shutdown(Duration::from_millis(100))
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Timeout);
    let mut rest = Vec::new();
    let _ = s.read_to_end(&mut rest).await;
    assert!(rest.len() < LARGE, "{}", rest.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn past_the_limit_requests_are_refused_and_a_client_that_reads_nothing_is_cut() {
    let n = start(&[
        ("limits.requests_in_flight", "1"),
        // Longer than what comes before the client is cut off takes, on a busy machine too.
        ("limits.write_timeout", "5s"),
    ])
    .await;
    n.write("large", &vec![9; LARGE]);
    let s = slow_get(&n).await;
    let mut c = n.client().await;
    let a = c.get("/data/large").await;
    assert_eq!(
        (a.status, a.header("retry-after")),
        (StatusCode::SERVICE_UNAVAILABLE, "1")
    );
    assert!(a.text().contains("<Code>SlowDown</Code>"), "{}", a.text());
    let a = n.client().await.get("/v1/objects/data/large").await;
    assert_eq!(
        (a.status, a.header("retry-after")),
        (StatusCode::TOO_MANY_REQUESTS, "1")
    );
    assert_eq!(
        n.metric("forebay_requests_refused_total", "overload").await,
        2.0
    );
    // The client that reads nothing is cut off, and its place is free again.
    until(async || {
        let mut client = n.client().await;
        let head = client.send(Method::HEAD, "/data/large", &[], "").await;
        head.status == StatusCode::OK
    })
    .await;
    drop(s);
    let abandoned = async || {
        n.metric("forebay_answers_abandoned_total", "api=\"s3\"")
            .await
    };
    until(async || abandoned().await == 1.0).await;
}

/// Waits until something holds.
async fn until(holds: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_shrinks_while_it_is_read_is_a_cut_answer() {
    for bypass in ["", "x-forebay-cache: bypass\r\n"] {
        let n = start(&[]).await;
        n.write("large", &vec![9; LARGE]);
        let mut s = tokio::net::TcpStream::connect(n.node.addr().unwrap())
            .await
            .unwrap();
        s.write_all(format!("GET /data/large HTTP/1.1\r\nHost: h\r\n{bypass}\r\n").as_bytes())
            .await
            .unwrap();
        let mut head = [0u8; 12];
        s.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        std::fs::OpenOptions::new()
            .write(true)
            .open(n.file("large"))
            .unwrap()
            .set_len(1 << 20)
            .unwrap();
        let mut rest = Vec::new();
        // The connection ends in time, and before the announced length.
        let _ = tokio::time::timeout(Duration::from_secs(20), s.read_to_end(&mut rest))
            .await
            .unwrap();
        assert!(rest.len() < LARGE, "{bypass:?}: {}", rest.len());
        // The client may see the end before it is counted.
        let cut = async || n.metric("forebay_answers_cut_total", "api=\"s3\"").await;
        until(async || cut().await == 1.0).await;
        until(async || n.metric("forebay_requests_in_flight", "").await == 0.0).await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_its_answer_is_not_in_flight_any_more() {
    let n = start(&[]).await;
    let mut s = tokio::net::TcpStream::connect(n.node.addr().unwrap())
        .await
        .unwrap();
    // The rest of the upload never arrives.
    s.write_all(b"PUT /data/k HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\nhalf")
        .await
        .unwrap();
    let in_flight = async || n.metric("forebay_requests_in_flight", "").await;
    until(async || in_flight().await == 1.0).await;
    drop(s);
    until(async || in_flight().await == 0.0).await;
    assert!(!n.file("k").exists(), "half an upload is no object");
}

#[tokio::test]
async fn a_restart_finds_the_cache_again() {
    let n = start(&[]).await;
    n.write("k", b"object");
    assert_eq!(
        n.client().await.get("/data/k").await.header("x-cache"),
        "MISS"
    );
    n.node.shutdown(Duration::from_secs(60)).await.unwrap();
    let dir = n.dir;
    drop(n.node);
    let n = start_in(dir, &[]).await;
    assert_eq!(
        n.client().await.get("/data/k").await.header("x-cache"),
        "HIT"
    );
}

#[tokio::test]
async fn what_is_from_the_future_at_a_start_is_shown_as_what_the_next_read_asks_about() {
    let n = start(&[]).await;
    n.write("k", b"object");
    n.clock.advance(Duration::from_secs(3600));
    n.client().await.get("/data/k").await;
    n.node.shutdown(Duration::from_secs(60)).await.unwrap();
    let dir = n.dir;
    drop(n.node);
    let n = start_in(dir, &[]).await;
    let mut c = n.client().await;
    let stat = c.get("/v1/forebay/stat/data/k").await.json();
    assert!(
        stat["validated_at"].is_null() && stat["fresh_until"].is_null(),
        "{stat}"
    );
}

#[tokio::test]
async fn requests_over_tcp_must_be_signed_where_there_are_keys() {
    let n = start(&[("auth.keys", "[{access_key = \"AK\", secret_key = \"SK\"}]")]).await;
    n.write("k", b"object");
    let mut c = n.client().await;
    let a = c.get("/data/k").await;
    assert!(
        a.status == StatusCode::FORBIDDEN && a.text().contains("<Code>AccessDenied</Code>"),
        "{}",
        a.text()
    );
    let a = c.get("/data?list-type=2").await;
    assert_eq!(a.status, StatusCode::FORBIDDEN);
    let a = c
        .get_with("/data/k", &[("authorization", "AWS AK:c2ln")])
        .await;
    assert_eq!(a.status, StatusCode::BAD_REQUEST, "version 2");
    let forged = "AWS4-HMAC-SHA256 Credential=AK/20260101/us-east-1/s3/aws4_request, \
        SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature=00";
    let headers = [
        ("authorization", forged),
        ("x-amz-date", "20260101T000000Z"),
        ("x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
    ];
    let a = c.get_with("/data/k", &headers).await;
    assert!(
        a.status == StatusCode::FORBIDDEN && !a.text().contains("object"),
        "{}",
        a.text()
    );
    let mut unsigned = headers.to_vec();
    unsigned.push(("x-amz-copy-source", "/data/k"));
    let a = c.put("/data/other", &unsigned, "").await;
    assert!(
        a.status == StatusCode::FORBIDDEN && a.text().contains("x-amz-copy-source"),
        "{}",
        a.text()
    );
    assert_eq!(
        c.get("/v1/objects/data/k").await.status,
        StatusCode::UNAUTHORIZED,
        "no tokens: /v1/ is closed"
    );
    let mut local = Client::unix(n.node.unix_path().unwrap()).await;
    assert_eq!(local.get("/data/k").await.text(), "object");
}

#[tokio::test]
async fn an_address_that_others_reach_needs_keys() {
    let dir = tempfile::tempdir().unwrap();
    let open = config(&dir, &[("listen.s3", "0.0.0.0:0")]);
    let e = Node::start_with(open, std::sync::Arc::new(forebay_core::SystemClock))
        .await
        .err()
        .unwrap();
    assert!(
        e.kind() == ErrorKind::Invalid && e.to_string().contains("auth.keys"),
        "{e}"
    );
}

#[tokio::test]
async fn a_second_process_uses_the_node_that_is_there() {
    let n = start_on_the_real_clock(tempfile::tempdir().unwrap(), &[]).await;
    n.write("k", b"object");
    let e = Node::start_with(
        config(&n.dir, &[]),
        std::sync::Arc::new(forebay_core::SystemClock),
    )
    .await
    .err()
    .unwrap();
    assert_eq!(e.kind(), ErrorKind::Conflict, "{e}");
    let Embedded::Existing(path) = embedded(config(&n.dir, &[])).await.unwrap() else {
        panic!("the directory is taken")
    };
    assert_eq!(
        Client::unix(&path).await.get("/data/k").await.text(),
        "object"
    );
    n.node.shutdown(Duration::from_secs(60)).await.unwrap();
    let dir = n.dir;
    drop(n.node);
    // A socket that a dead process left behind.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let Embedded::Started(node) = embedded(config(&dir, &[])).await.unwrap() else {
        panic!("the directory is free")
    };
    assert_eq!((node.addr(), node.admin_addr()), (None, None));
    assert_eq!(
        Client::unix(node.unix_path().unwrap())
            .await
            .get("/data/k")
            .await
            .text(),
        "object"
    );
}

#[tokio::test]
async fn the_admin_port_tells_every_metric_and_no_other() {
    let n = start(&[]).await;
    n.write("k", b"object");
    n.client().await.get("/data/k").await;
    let mut admin = Client::tcp(n.node.admin_addr().unwrap()).await;
    assert_eq!(admin.get("/healthz").await.text(), "ok\n");
    assert_eq!(admin.get("/readyz").await.json()["ready"], true);
    assert!(admin.get("/").await.text().contains("/metrics"));
    assert_eq!(admin.get("/data/k").await.status, StatusCode::NOT_FOUND);
    assert_eq!(
        admin.send(Method::POST, "/metrics", &[], "").await.status,
        StatusCode::METHOD_NOT_ALLOWED
    );
    let page = admin.get("/metrics").await;
    let plain = "text/plain; version=0.0.4";
    assert!(page.header("content-type").starts_with(plain));
    let told: Vec<String> = page
        .text()
        .lines()
        .filter_map(|l| l.strip_prefix("# TYPE "))
        .map(|l| l.split(' ').next().unwrap().to_owned())
        .collect();
    let reference = metrics::reference();
    let known: Vec<&str> = reference
        .lines()
        .filter_map(|l| l.strip_prefix("| `")?.split('`').next())
        .collect();
    assert!(told == known && known.len() > 100, "{told:?}\n{known:?}");
    let open = [("accept", "application/openmetrics-text;version=1.0.0")];
    let page = admin.send(Method::GET, "/metrics", &open, "").await;
    let kind = page.header("content-type");
    assert!(kind.starts_with("application/openmetrics-text"), "{kind}");
    assert!(page.text().ends_with("# EOF\n"));
    assert_eq!(
        n.metric("forebay_requests_total", "status=\"200\"").await,
        1.0
    );
    assert_eq!(
        n.metric(
            "forebay_origin_requests_total",
            "origin=\"data\",op=\"get\""
        )
        .await,
        1.0
    );
    assert!(
        n.metric("process_cpu_seconds_total", "").await > 0.0
            && n.metric("process_open_fds", "").await > 5.0
    );
}

#[tokio::test]
async fn the_date_follows_the_clock_back() {
    let n = start(&[]).await;
    n.write("k", b"object");
    let (mut client, mut admin) = (
        n.client().await,
        Client::tcp(n.node.admin_addr().unwrap()).await,
    );
    for (seconds, date) in [
        (1_800_000_000, "Fri, 15 Jan 2027 08:00:00 GMT"),
        (1_900_000_000, "Sun, 17 Mar 2030 17:46:40 GMT"),
        (1_800_000_001, "Fri, 15 Jan 2027 08:00:01 GMT"),
    ] {
        n.clock.set(Duration::from_secs(seconds));
        assert_eq!(client.get("/data/k").await.header("date"), date);
        assert_eq!(admin.get("/healthz").await.header("date"), date);
    }
}

#[tokio::test]
async fn an_admin_client_that_takes_nothing_does_not_keep_its_place() {
    // Answers that are requested again and again and never read fill the socket.
    let n = start(&[]).await;
    let addr = n.node.admin_addr().unwrap();
    let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
    let request = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n".repeat(2000);
    let sent = tokio::time::timeout(Duration::from_secs(40), async {
        loop {
            if let Err(e) = stream.write_all(&request).await {
                return e;
            }
        }
    });
    sent.await.expect("it is cut off, and told so by a reset");
}

#[tokio::test]
async fn an_answer_without_a_length_needs_http_1_1() {
    let n = start(&[]).await;
    n.write("k.txt", b"object");
    let opened = n
        .client()
        .await
        .send(
            Method::POST,
            "/v1/datasets",
            &[],
            "{\"sources\": [\"data/k.txt\"]}",
        )
        .await
        .json();
    let manifest = format!(
        "GET /v1/datasets/{}/manifest",
        opened["id"].as_str().unwrap()
    );
    for (request, body) in [
        (manifest.as_str(), ""),
        (
            "POST /v1/datasets?progress=true",
            "{\"sources\": [\"data/k.txt\"]}",
        ),
        (
            "POST /v1/forebay/warm",
            "{\"bucket\": \"data\", \"prefix\": \"\"}",
        ),
    ] {
        for (version, status) in [("1.0", "400"), ("1.1", "200")] {
            let mut s = tokio::net::TcpStream::connect(n.node.addr().unwrap())
                .await
                .unwrap();
            let head = format!(
                "{request} HTTP/{version}\r\nhost: h\r\nconnection: close\r\ncontent-length: \
                 {}\r\n\r\n{body}",
                body.len()
            );
            s.write_all(head.as_bytes()).await.unwrap();
            let mut answer = String::new();
            s.read_to_string(&mut answer).await.unwrap();
            let seen = answer.split(' ').nth(1);
            assert_eq!(seen, Some(status), "{request} {version}: {answer}");
        }
    }
}
