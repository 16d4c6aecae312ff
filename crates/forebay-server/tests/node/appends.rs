//! Appends to objects (`append_type`), at the node's limits.

use crate::common::{Client, start};
use forebay_core::limits::APPENDS_MAX;
use http::{Method, StatusCode};
use std::time::Duration;

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
    n.node.shutdown(Duration::from_secs(5)).await.unwrap();
    assert!(!n.file("k").exists());
}
