//! A node without keys, reached by the browser of somebody on its machine.

use crate::common::start;
use http::{Method, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const DELETE_ALL: &str = "<Delete><Object><Key>k</Key></Object></Delete>";

#[tokio::test]
async fn a_web_page_removes_and_reads_nothing_through_a_browser() {
    let n = start(&[]).await;
    n.write("k", b"content");
    let mut c = n.client().await;
    for header in [
        ("origin", "http://evil.example"),
        ("sec-fetch-site", "cross-site"),
    ] {
        let headers = [header, ("content-type", "text/plain")];
        let a = c
            .send(Method::POST, "/data?delete", &headers, DELETE_ALL)
            .await;
        assert_eq!(
            (a.status, n.file("k").exists()),
            (StatusCode::FORBIDDEN, true),
            "{header:?}"
        );
        c = n.client().await;
        let a = c
            .send(Method::POST, "/v1/ml/moss/data", &headers, "{}")
            .await;
        assert_eq!(a.status, StatusCode::FORBIDDEN, "{header:?}");
        c = n.client().await;
    }
    // Under the page's own name, which resolves here.
    let status_as = async |host: &str| {
        let mut connection = tokio::net::TcpStream::connect(n.node.addr().unwrap())
            .await
            .unwrap();
        let request = format!("GET /data/k HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        connection.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await.unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(status_as("evil.example:8080").await, "403");
    for host in ["127.0.0.1:8080", "localhost", "[::1]:80", "forebay"] {
        assert_eq!(status_as(host).await, "200", "{host}");
    }
    // Clients that are not browsers keep working.
    let a = c.send(Method::POST, "/data?delete", &[], DELETE_ALL).await;
    assert_eq!((a.status, n.file("k").exists()), (StatusCode::OK, false));
}

#[tokio::test]
async fn a_node_in_a_network_is_known_by_any_name() {
    let n = start(&[("listen.s3", "0.0.0.0:0"), ("auth.anonymous", "true")]).await;
    n.write("k", b"content");
    let port = n.node.addr().unwrap().port();
    let mut connection = tokio::net::TcpStream::connect(("127.0.0.1", port))
        .await
        .unwrap();
    let request = "GET /data/k HTTP/1.1\r\nhost: forebay.training.svc.cluster.local:8080\r\n\
                   connection: close\r\n\r\n";
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}
