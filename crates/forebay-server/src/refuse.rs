//! The answer to one connection too many: 503, without looking at the request.
//!
//! The node waits a moment until the request begins: HTTP libraries take an answer that comes before
//! for a broken connection. Before closing it, the node reads what arrives of the request within a
//! moment: closing over unread bytes would reset the connection, and the client would see the reset
//! instead of the answer.

use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Connections that are being refused at the same time; more than these wait in the kernel's queue.
pub const REFUSALS_MAX: usize = 64;
const LINGER: Duration = Duration::from_millis(500);
const LINGER_MAX_BYTES: u64 = 256 << 10;

pub async fn refuse<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, connections: usize) {
    let body = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>SlowDown</Code><Message>{connections} connections are open, the most that this node takes \
         (try again; limits.connections is the limit)</Message></Error>"
    );
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\nserver: {}\r\ncontent-type: application/xml\r\n\
         retry-after: 1\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        forebay_protocol::SERVER,
        body.len()
    );
    let mut begin = [0u8; 4096];
    let _ = tokio::time::timeout(LINGER, stream.read(&mut begin)).await;
    // A client that has left does not miss the answer.
    let _ = tokio::time::timeout(LINGER, async {
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await?;
        tokio::io::copy(
            &mut (&mut stream).take(LINGER_MAX_BYTES),
            &mut tokio::io::sink(),
        )
        .await
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_reads_the_whole_answer_although_it_sent_a_request() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = tokio::net::TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        client.write_all(&[b'x'; 100_000]).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let refused = tokio::spawn(refuse(stream, 7));
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        assert!(
            text.starts_with("HTTP/1.1 503 ")
                && text.contains("server: forebay\r\n")
                && text.contains("retry-after: 1\r\n")
                && text.contains("7 connections"),
            "{text}"
        );
        drop(client);
        refused.await.unwrap();
    }

    #[tokio::test]
    async fn nobody_is_answered_before_asking() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = tokio::net::TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let began = std::time::Instant::now();
        let refused = tokio::spawn(refuse(stream, 7));
        let mut byte = [0];
        let early = tokio::time::timeout(LINGER / 5, client.read(&mut byte)).await;
        if early.is_ok() {
            // A machine that stopped this test meanwhile.
            assert!(began.elapsed() >= LINGER, "{early:?}");
            return;
        }
        client.write_all(b"PUT /b/k HTTP/1.1\r\n").await.unwrap();
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        assert!(text.starts_with("HTTP/1.1 503 "), "{text}");
        refused.await.unwrap();
    }
}
