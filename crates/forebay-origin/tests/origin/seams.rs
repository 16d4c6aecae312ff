//! What an S3 service, or a proxy in front of it, may send instead of the expected answer: each is
//! an error of the right kind, none is an object, and none takes long.

use forebay_core::{ErrorKind, Result};
use forebay_origin::{GetRequest, OriginConfig, Secret, open};
use futures::TryStreamExt;
use std::time::{Duration, Instant};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

/// A server that answers every request with the same bytes and closes the connection.
async fn answers(answer: impl Into<Vec<u8>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answer = answer.into();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let answer = answer.clone();
            tokio::spawn(async move {
                let (mut request, mut buffer) = (Vec::new(), [0; 4096]);
                while !request.windows(4).any(|w| w == b"\r\n\r\n") {
                    match socket.read(&mut buffer).await {
                        Ok(n) if n > 0 => request.extend_from_slice(&buffer[..n]),
                        _ => return,
                    }
                }
                let _ = socket.write_all(&answer).await;
                let _ = socket.shutdown().await;
            });
        }
    });
    format!("http://{address}")
}

async fn get(endpoint: String) -> Result<Vec<u8>> {
    let config = OriginConfig {
        endpoint: Some(endpoint),
        region: Some("eu-central-1".to_owned()),
        access_key_id: Some("id".to_owned()),
        secret_access_key: Some(Secret::new("secret")),
        ..OriginConfig::for_url("s3://bucket").unwrap()
    };
    let origin = open(&config).unwrap();
    let request = GetRequest {
        range: Some(0..1 << 20),
        ..Default::default()
    };
    let answer = origin.get("key", request).await?;
    let pieces: Vec<_> = answer.body.try_collect().await?;
    Ok(pieces.concat())
}

fn answer(status: &str, headers: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\n{headers}\r\n{body}",
        body.len()
    )
}

const OBJECT: &str = "etag: \"v1\"\r\nlast-modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n";
const ERROR: &str = "<?xml version=\"1.0\"?><Error><Code>InternalError</Code><Message>We \
    encountered an internal error</Message></Error>";

#[tokio::test]
async fn an_answer_that_is_no_object_is_an_error() {
    let elsewhere = answers(answer("200 OK", OBJECT, "of another host")).await;
    let redirect = format!("location: {elsewhere}/bucket/key\r\n");
    for (what, sent, kind) in [
        (
            "an error in a 200",
            answer("200 OK", "content-type: application/xml\r\n", ERROR),
            ErrorKind::OriginUnavailable,
        ),
        (
            "a page of a proxy",
            answer(
                "200 OK",
                "content-type: text/html\r\n",
                "<html>log in</html>",
            ),
            ErrorKind::OriginUnavailable,
        ),
        (
            "a redirect to another host",
            answer("307 Temporary Redirect", &redirect, ""),
            ErrorKind::OriginUnavailable,
        ),
        (
            "a redirect for good",
            answer("301 Moved Permanently", &redirect, ERROR),
            ErrorKind::OriginUnavailable,
        ),
        (
            "no such key",
            answer(
                "404 Not Found",
                "",
                &ERROR.replace("InternalError", "NoSuchKey"),
            ),
            ErrorKind::NotFound,
        ),
        (
            "another range",
            answer(
                "206 Partial Content",
                &format!("{OBJECT}content-range: bytes 5-9/10\r\n"),
                "56789",
            ),
            ErrorKind::Corrupt,
        ),
        (
            "a range without a size",
            answer(
                "206 Partial Content",
                &format!("{OBJECT}content-range: bytes 0-4/*\r\n"),
                "01234",
            ),
            ErrorKind::Corrupt,
        ),
    ] {
        let began = Instant::now();
        let e = get(answers(sent).await).await.expect_err(what);
        assert_eq!(e.kind(), kind, "{what}: {}", e.describe());
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "{what} took {:?}",
            began.elapsed()
        );
    }
    assert_eq!(
        get(answers(answer("200 OK", OBJECT, "an object")).await)
            .await
            .unwrap(),
        b"an object"
    );
}

#[tokio::test]
async fn a_body_that_is_shorter_than_announced_is_an_error() {
    let short = format!(
        "HTTP/1.1 206 Partial Content\r\ncontent-length: 10\r\n{OBJECT}content-range: bytes \
         0-9/10\r\n\r\n01234"
    );
    let e = get(answers(short).await).await.expect_err("it is short");
    assert!(
        e.kind().is_transient() || e.kind() == ErrorKind::Corrupt,
        "{}",
        e.describe()
    );
    let disagreeing = answer(
        "206 Partial Content",
        &format!("{OBJECT}content-range: bytes 0-9/10\r\n"),
        "01234",
    );
    let e = get(answers(disagreeing).await)
        .await
        .expect_err("its lengths disagree");
    assert!(
        e.kind().is_transient() || e.kind() == ErrorKind::Corrupt,
        "{}",
        e.describe()
    );
}
