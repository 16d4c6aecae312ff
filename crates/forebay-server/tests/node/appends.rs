//! Appends to objects (`append_type`), at the node's limits.

use crate::common::{Client, start};
use forebay_core::limits::APPENDS_MAX;
use http::{Method, StatusCode};
use std::time::Duration;
use tokio::io::AsyncWriteExt;

async fn append(c: &mut Client, key: &str, body: &'static str) -> (StatusCode, String) {
    let path = format!("/v1/objects/data/{key}?append_type=append");
    let a = c.send(Method::PUT, &path, &[], body).await;
    (a.status, a.header("ais-append-handle").to_owned())
}

async fn flush(c: &mut Client, key: &str, handle: &str) -> StatusCode {
    let path = format!("/v1/objects/data/{key}?append_type=flush&append_handle={handle}");
    c.send(Method::PUT, &path, &[], "").await.status
}

#[tokio::test]
async fn what_is_flushed_makes_room_for_other_appends() {
    let n = start(&[("memory.budget", "4GiB")]).await;
    let mut c = n.client().await;
    let mut handles = Vec::new();
    for i in 0..APPENDS_MAX {
        let (status, handle) = append(&mut c, &format!("k{i}"), "one ").await;
        assert_eq!(status, StatusCode::OK, "{i}");
        handles.push(handle);
    }
    let path = "/v1/objects/data/more?append_type=append";
    let refused = c.send(Method::PUT, path, &[], "x").await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.text().contains("flush"), "{}", refused.text());
    assert_eq!(flush(&mut c, "k7", &handles[7]).await, StatusCode::OK);
    assert_eq!(c.get("/data/k7").await.text(), "one ");
    let (status, handle) = append(&mut c, "more", "two").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(flush(&mut c, "more", &handle).await, StatusCode::OK);
    assert_eq!(c.get("/data/more").await.text(), "two");
    // The handle that made room is no longer known; the others are.
    assert_eq!(
        flush(&mut c, "k7", &handles[7]).await,
        StatusCode::NOT_FOUND
    );
    assert_eq!(flush(&mut c, "k8", &handles[8]).await, StatusCode::OK);
}

#[tokio::test]
async fn appends_that_nobody_flushed_are_given_up_with_the_node() {
    let n = start(&[]).await;
    let mut c = n.client().await;
    let (_, handle) = append(&mut c, "k", "one ").await;
    let path = format!("/v1/objects/data/other?append_type=append&append_handle={handle}");
    let other = c.send(Method::PUT, &path, &[], "x").await;
    assert_eq!(other.status, StatusCode::NOT_FOUND, "of another object");
    assert_eq!(c.get("/data/k").await.status, StatusCode::NOT_FOUND);
    n.node.shutdown(Duration::from_secs(60)).await.unwrap();
    assert!(!n.file("k").exists());
}

#[tokio::test]
async fn an_append_whose_client_leaves_before_it_has_a_handle_is_given_up_at_once() {
    let n = start(&[]).await;
    let there = vec![7; 3 << 20];
    n.write("k", &there);
    let used = async || n.metric("forebay_memory_used_bytes", "").await as u64;
    // What is there is read again, so that it is in the cache and no fill holds memory later.
    let mut c = n.client().await;
    assert_eq!(c.get("/data/k").await.status, StatusCode::OK);
    let mut client = tokio::net::TcpStream::connect(n.node.addr().unwrap())
        .await
        .unwrap();
    let head = "PUT /v1/objects/data/k?append_type=append HTTP/1.1\r\nhost: 127.0.0.1\r\n\
                content-length: 1000000\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    client.write_all(&[8; 500_000]).await.unwrap();
    let mut waited = 0;
    while used().await < there.len() as u64 {
        waited += 1;
        assert!(waited < 3000, "the append does not begin");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Neither the clock nor anybody's next request is needed.
    drop(client);
    waited = 0;
    while used().await > 0 {
        waited += 1;
        assert!(waited < 3000, "{} bytes are still held", used().await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(std::fs::read(n.file("k")).unwrap(), there);
}
