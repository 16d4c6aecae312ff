//! A node whose origin stalls.

use forebay_core::ManualClock;
use forebay_server::{Config, Node, config::Override};
use forebay_testing::{Reply, Scripted};
use http::{Method, StatusCode};
use serde_json::json;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::common::{Client, TestNode};

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

/// A node whose bucket `data` is at this service. What answers has two seconds for it, on a busy
/// machine too.
async fn node_before(server: &Scripted, settings: &[(&str, &str)]) -> TestNode {
    node_with(server, "idle_timeout = \"4s\"", settings).await
}

/// The same, with these settings of the origin.
async fn node_with(server: &Scripted, origin: &str, settings: &[(&str, &str)]) -> TestNode {
    node_at(server, "s3://data", origin, settings).await
}

/// The same, with this address of the bucket.
async fn node_at(
    server: &Scripted,
    url: &str,
    origin: &str,
    settings: &[(&str, &str)],
) -> TestNode {
    let dir = tempfile::tempdir().unwrap();
    let origin = format!(
        "[{{name = \"data\", url = \"{url}\", endpoint = \"{}\", anonymous = true, \
         attempts = 1, {origin}}}]",
        server.address()
    );
    let cache = format!("{}/cache:64MiB", dir.path().display());
    let mut overrides = vec![
        Override::cache(&[cache], "test").unwrap(),
        Override::text("listen.s3", "127.0.0.1:0", "test").unwrap(),
        Override::text("listen.admin", "127.0.0.1:0", "test").unwrap(),
    ];
    let settings = settings.iter();
    overrides.extend(settings.map(|(k, v)| Override::text(k, v, "test").unwrap()));
    let env = [("FOREBAY__ORIGINS".to_owned(), origin)];
    let config = Config::load(None, env, &overrides).unwrap();
    let clock = ManualClock::at(Duration::from_secs(1_800_000_000));
    let node = Node::start_with(config, Arc::new(clock.clone()))
        .await
        .unwrap();
    TestNode { node, clock, dir }
}

/// A listing with members, from this token on: the names of its entries, and the next token.
async fn with_members(c: &mut Client, token: &str) -> (Vec<String>, String) {
    listed(c, json!({"flags": "8", "continuation_token": token})).await
}

async fn listed(c: &mut Client, value: serde_json::Value) -> (Vec<String>, String) {
    let message = json!({"action": "list", "value": value});
    let headers = [("content-type", "application/json")];
    let url = "/v1/buckets/data";
    let a = c
        .send(Method::GET, url, &headers, message.to_string())
        .await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    let page = a.json();
    let entries = page["entries"].as_array().cloned().unwrap_or_default();
    let names = entries
        .iter()
        .map(|e| e["name"].as_str().unwrap().to_owned());
    let token = page["continuation_token"].as_str().unwrap_or_default();
    (names.collect(), token.to_owned())
}

/// The node takes the token that it gave, also if nothing was found yet.
#[tokio::test]
async fn a_listing_with_members_that_begins_before_its_prefix_goes_on_behind_empty_pages() {
    let server = Scripted::start(|request, _| {
        if !request.path.contains("list-type=2") {
            return Reply::new(404, "");
        }
        let token = request.path.split_once("continuation-token=t");
        let token = token.map(|(_, rest)| rest.split('&').next().unwrap_or(rest));
        let number = token.map_or(0, |token| token.parse::<usize>().unwrap());
        let page = match number + 1 {
            18.. => "<Contents><Key>b/last.txt</Key><Size>4</Size><ETag>\"1\"</ETag></Contents>\
                <IsTruncated>false</IsTruncated>"
                .to_owned(),
            next => format!(
                "<IsTruncated>true</IsTruncated>\
                <NextContinuationToken>t{next}</NextContinuationToken>"
            ),
        };
        Reply::new(200, format!("<ListBucketResult>{page}</ListBucketResult>"))
    })
    .await;
    let n = node_before(&server, &[]).await;
    let mut c = n.client().await;
    let value = |token: &str| {
        json!({"flags": "8", "prefix": "b/", "start_after": "a",
            "continuation_token": token})
    };
    let (names, token) = listed(&mut c, value("")).await;
    assert!(
        names.is_empty() && !token.is_empty(),
        "{names:?}, {token:?}"
    );
    let (names, token) = listed(&mut c, value(&token)).await;
    assert_eq!((names, token.as_str()), (vec!["b/last.txt".to_owned()], ""));
}

/// As Google's service does now and then: a page without a key that is not the last one.
#[tokio::test]
async fn a_listing_with_members_goes_on_behind_empty_pages() {
    const PAGES: usize = 20;
    let server = Scripted::start(|request, _| {
        if !request.path.contains("list-type=2") {
            return Reply::new(404, "");
        }
        let (_, query) = request.path.split_once('?').unwrap_or_default();
        let field = |name: &str| {
            let mut fields = query.split('&').filter_map(|f| f.split_once('='));
            fields.find(|(n, _)| *n == name).map(|(_, value)| value)
        };
        // A service refuses a listing that continues from a key and from a token.
        if field("start-after").is_some() {
            return Reply::new(400, "");
        }
        // The look-up of the bucket asks for one key.
        let number = field("continuation-token").map_or(0, |t| t[1..].parse::<usize>().unwrap());
        let page = match number + 1 {
            PAGES => "<Contents><Key>last.txt</Key><Size>4</Size><ETag>\"1\"</ETag></Contents>\
                <IsTruncated>false</IsTruncated>"
                .to_owned(),
            next => format!(
                "<IsTruncated>true</IsTruncated>\
                <NextContinuationToken>t{next}</NextContinuationToken>"
            ),
        };
        Reply::new(200, format!("<ListBucketResult>{page}</ListBucketResult>"))
    })
    .await;
    let n = node_before(&server, &[]).await;
    let mut c = n.client().await;
    let (names, token) = with_members(&mut c, "").await;
    let asked = server.requests();
    assert!(asked.len() <= 17, "{} requests for one page", asked.len());
    assert!(
        names.is_empty() && !token.is_empty(),
        "{names:?}, {token:?}"
    );
    let (names, token) = with_members(&mut c, &token).await;
    assert_eq!((names, token.as_str()), (vec!["last.txt".to_owned()], ""));
    let mut tokens: Vec<_> = (server.requests().into_iter())
        .filter_map(|r| Some(r.path.split_once("continuation-token=")?.1.to_owned()))
        .collect();
    tokens
        .iter_mut()
        .for_each(|t| t.truncate(t.find('&').unwrap_or(t.len())));
    let expected: Vec<_> = (1..PAGES).map(|i| format!("t{i}")).collect();
    assert_eq!(tokens, expected, "each page is asked for once");
}

#[tokio::test]
async fn a_304_costs_one_request_also_where_the_origin_is_always_asked() {
    let (server, _) = service().await;
    let n = node_before(&server, &[("cache.freshness", "always")]).await;
    let mut c = n.client().await;
    assert_eq!(c.get("/data/a").await.header("x-cache"), "MISS");
    for method in [Method::GET, Method::HEAD] {
        let asked = server.requests().len();
        let known = [("if-none-match", "\"1\"")];
        let a = c.send(method.clone(), "/data/a", &known, "").await;
        assert_eq!(
            (a.status, a.header("etag"), a.header("x-cache")),
            (StatusCode::NOT_MODIFIED, "\"1\"", "REVALIDATED"),
            "{method}"
        );
        assert_eq!(server.requests().len() - asked, 1, "{method}");
    }
}

#[tokio::test]
async fn a_stalled_origin_costs_one_timeout_and_what_is_cached_is_served_stale() {
    let (server, stalled) = service().await;
    let settings = [("cache.stale_if_error", "10m")];
    let n = node_before(&server, &settings).await;
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
    assert!(begun.elapsed() >= Duration::from_secs(4), "one timeout");

    let (begun, asked) = (Instant::now(), server.requests().len());
    for i in 0..30 {
        assert_eq!(c.get("/data/a").await.header("x-cache"), "STALE");
        let missing = c.get(&format!("/data/not-here-{i}")).await;
        assert_eq!(missing.status, StatusCode::GATEWAY_TIMEOUT);
        assert!(!missing.header("retry-after").is_empty());
    }
    // A probe may have cost a timeout; none of the others did, which would have taken four minutes.
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(20), "{took:?}");
    // One begins a second after the one before has ended, at the earliest.
    let probes = server.requests().len() - asked;
    assert!(
        probes as u64 <= 3 + took.as_secs(),
        "{probes} requests to an origin that does not answer in {took:?}"
    );
    assert_eq!(
        n.metric("forebay_origin_circuit_open", "origin=\"data\"")
            .await,
        1.0
    );
    let refused = n.metric("forebay_origin_circuit_refused_total", "data");
    assert!(refused.await >= 50.0 - took.as_secs_f64());
    assert!(n.metric("forebay_reads_total", "status=\"STALE\"").await >= 31.0);
    assert!(n.metric("forebay_answers_total", "x_cache=\"STALE\"").await >= 31.0);

    n.clock.advance(Duration::from_secs(600));
    let late = c.get("/data/a").await;
    assert_eq!(late.status, StatusCode::GATEWAY_TIMEOUT, "past the bound");

    stalled.store(false, Relaxed);
    let begun = Instant::now();
    while c.get("/data/a").await.header("x-cache") != "REVALIDATED" {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
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

/// What clients send by S3 goes on as it is, and counts as what the node asks for itself does.
#[tokio::test]
async fn what_is_passed_on_is_counted_and_kept_to_the_rate() {
    const BYTES: usize = 200_000;
    let server = Scripted::start(|request, _| match request.path.as_str() {
        "/data/refused" => Reply::new(503, ""),
        path if path.starts_with("/data/none?") => Reply::new(404, ""),
        _ => Reply::new(200, "").header("ETag", "\"1\""),
    })
    .await;
    let n = node_with(&server, "bytes_per_second = 400000", &[]).await;
    let mut c = n.client().await;
    let begun = Instant::now();
    for (name, status) in [("a", 200), ("b", 200), ("refused", 503)] {
        let a = c
            .put(&format!("/data/{name}"), &[], vec![b'x'; BYTES])
            .await;
        assert_eq!(a.status.as_u16(), status, "{name}: {}", a.text());
    }
    let took = begun.elapsed();
    // Less what may pass at once.
    assert!(took >= Duration::from_millis(1400), "{took:?}");
    assert_eq!(c.get("/data/none?tagging").await.status.as_u16(), 404);

    let origin = &c.get("/v1/forebay/status").await.json()["origin_stats"][0];
    assert_eq!(origin["bytes_out"], 3 * BYTES);
    assert_eq!(
        origin["errors"],
        json!({"not_found": 1, "origin_unavailable": 1})
    );
    assert_eq!(origin["failures"], 1);
}

/// A key that an overloaded service did not remove is not reported as a mistake of the client.
#[tokio::test]
async fn keys_that_were_not_removed_for_now_may_be_tried_again() {
    let server = Scripted::start(|request, _| match request.path.as_str() {
        "/data/busy" => Reply::new(503, "<Error><Code>SlowDown</Code></Error>"),
        "/data/broken" => Reply::new(502, "<html>a proxy</html>"),
        "/data/wrong" => Reply::new(400, "<Error><Code>Strange</Code></Error>"),
        _ => Reply::new(200, ""),
    })
    .await;
    let n = node_before(&server, &[]).await;
    let mut c = n.client().await;
    let keys = [
        ("busy", "SlowDown"),
        ("broken", "InternalError"),
        ("wrong", "InvalidArgument"),
    ];
    for (key, code) in keys {
        let body = format!("<Delete><Object><Key>{key}</Key></Object></Delete>");
        let a = c.send(Method::POST, "/data?delete", &[], body).await;
        assert_eq!(a.status, StatusCode::OK, "{}", a.text());
        let code = format!("<Code>{code}</Code>");
        assert!(a.text().contains(&code), "{key}: {}", a.text());
    }
}

/// A page has a thousand keys: one request for each object would take hours.
#[tokio::test]
async fn buckets_are_summed_up_and_emptied_by_whole_pages() {
    const KEYS: usize = 3;
    let removed = Arc::new(AtomicUsize::new(0));
    let state = removed.clone();
    let server = Scripted::start(move |request, _| {
        let is_empty = state.load(Relaxed) >= KEYS;
        let path = request.path.split('?').next().unwrap_or_default();
        let is_bucket = path.trim_end_matches('/') == "/data";
        match (request.method.as_str(), is_bucket) {
            ("GET", true) => {
                let entry = |i| {
                    format!("<Contents><Key>{i}</Key><Size>4</Size><ETag>\"1\"</ETag></Contents>")
                };
                let count = if is_empty { 0 } else { KEYS };
                let entries: String = (0..count).map(entry).collect();
                let end = "<IsTruncated>false</IsTruncated>";
                Reply::new(
                    200,
                    format!("<ListBucketResult>{entries}{end}</ListBucketResult>"),
                )
            }
            ("DELETE", true) if !is_empty => {
                Reply::new(409, "<Error><Code>BucketNotEmpty</Code></Error>")
            }
            ("DELETE", true) => Reply::new(204, ""),
            ("DELETE", false) => {
                state.fetch_add(1, Relaxed);
                Reply::new(204, "")
            }
            _ => Reply::new(404, ""),
        }
    })
    .await;
    let n = node_before(&server, &[]).await;
    let mut c = n.client().await;
    let headers = [("content-type", "application/json")];
    let pages = || {
        let asked = server.requests().into_iter();
        asked.filter(|r| r.path.contains("max-keys=1000")).count()
    };

    let message = json!({"action": "summary-bck", "value": {"uuid": "summ-1"}}).to_string();
    let a = c
        .send(Method::GET, "/v1/buckets/data", &headers, message)
        .await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    assert_eq!(a.json()[0]["TotalSize"]["size_all_remote_objs"], "12");
    assert_eq!(pages(), 1);

    let message = json!({"action": "destroy-bck"}).to_string();
    let a = c
        .send(Method::DELETE, "/v1/buckets/data", &headers, message)
        .await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    assert_eq!((removed.load(Relaxed), pages()), (KEYS, 2));
}

/// Uploads to a prefix of a bucket are not passed on as they are.
#[tokio::test]
async fn a_part_that_is_too_small_for_the_origin_is_told_as_that() {
    let server = Scripted::start(|request, _| match &*request.method {
        "POST" if request.path.contains("uploads") => Reply::new(
            200,
            "<InitiateMultipartUploadResult><UploadId>id</UploadId>\
             </InitiateMultipartUploadResult>",
        ),
        "PUT" => Reply::new(200, "").header("ETag", "\"p\""),
        _ => Reply::new(400, "<Error><Code>EntityTooSmall</Code></Error>"),
    })
    .await;
    let n = node_at(&server, "s3://data/prefix", "idle_timeout = \"5s\"", &[]).await;
    let mut c = n.client().await;
    let begun = c.send(Method::POST, "/data/up?uploads", &[], "").await;
    assert_eq!(begun.status, StatusCode::OK, "{}", begun.text());
    for number in [1, 2] {
        let part = format!("/data/up?partNumber={number}&uploadId=id");
        let sent = c.put(&part, &[], "small").await;
        assert_eq!(sent.status, StatusCode::OK, "{}", sent.text());
    }
    // The third came through another node.
    for last in [2, 3] {
        let parts: String = [1, last]
            .map(|n| format!("<Part><PartNumber>{n}</PartNumber><ETag>\"p\"</ETag></Part>"))
            .concat();
        let body = format!("<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>");
        let end = "/data/up?uploadId=id";
        let a = c.send(Method::POST, end, &[], body).await;
        assert_eq!(a.status, StatusCode::BAD_REQUEST, "{}", a.text());
        assert!(
            a.text().contains("<Code>EntityTooSmall</Code>"),
            "{}",
            a.text()
        );
    }
}

/// The first version of the call goes on behind the last name of a page: it needs one.
#[tokio::test]
async fn a_listing_that_goes_on_behind_names_goes_on_behind_empty_pages() {
    let server = Scripted::start(|request, _| {
        let page = match request.path.split_once("continuation-token=t") {
            Some((_, rest)) if rest.starts_with('2') => {
                "<Contents><Key>last.txt</Key><Size>4</Size><ETag>\"1\"</ETag></Contents>\
                 <IsTruncated>false</IsTruncated>"
            }
            Some(_) => {
                "<IsTruncated>true</IsTruncated><NextContinuationToken>t2</NextContinuationToken>"
            }
            None => {
                "<IsTruncated>true</IsTruncated><NextContinuationToken>t1</NextContinuationToken>"
            }
        };
        Reply::new(200, format!("<ListBucketResult>{page}</ListBucketResult>"))
    })
    .await;
    let n = node_before(&server, &[]).await;
    let mut c = n.client().await;
    let a = c.get("/data").await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    for part in ["<Key>last.txt</Key>", "<IsTruncated>false</IsTruncated>"] {
        assert!(a.text().contains(part), "{}", a.text());
    }
}

#[tokio::test]
async fn a_listing_whose_pages_all_are_empty_does_not_end_without_an_error() {
    let server = Scripted::start(|_, _| {
        let page = "<IsTruncated>true</IsTruncated>\
            <NextContinuationToken>t</NextContinuationToken>";
        Reply::new(200, format!("<ListBucketResult>{page}</ListBucketResult>"))
    })
    .await;
    let n = node_before(&server, &[]).await;
    let mut c = n.client().await;
    let a = c.get("/data").await;
    assert_eq!(a.status, StatusCode::NOT_IMPLEMENTED, "{}", a.text());
}
