//! Bodies of requests: how much of the memory budget they hold while they arrive.

use crate::common::start;
use http::{Method, StatusCode};
use tokio::io::AsyncWriteExt;

#[tokio::test]
async fn an_announced_length_holds_no_memory_before_its_bytes_come() {
    let n = start(&[]).await;
    n.write("k", b"content");
    let used = "forebay_memory_used_bytes";
    assert_eq!(n.metric(used, "").await, 0.0);
    // Two that together announce more than may be held at once.
    let mut slow = Vec::new();
    for _ in 0..2 {
        let mut connection = tokio::net::TcpStream::connect(n.node.addr().unwrap())
            .await
            .unwrap();
        let head = format!(
            "POST /v1/ml/moss/data HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {}\r\n\r\n{{",
            100 << 20
        );
        connection.write_all(head.as_bytes()).await.unwrap();
        slow.push(connection);
    }
    let mut c = n.client().await;
    let batch = r#"{"in":[{"objname":"k"}]}"#;
    for _ in 0..5 {
        let a = c.send(Method::POST, "/v1/ml/moss/data", &[], batch).await;
        assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    }
    // One that does send is charged for what it sent, and at most twice that.
    let sent = 8 << 20;
    slow[0].write_all(&vec![b' '; sent]).await.unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        let held = n.metric(used, "").await;
        assert!(held <= 2.0 * sent as f64 + 1024.0, "{held}");
        if held >= sent as f64 / 2.0 {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "{held}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}
