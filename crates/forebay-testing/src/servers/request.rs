//! The request that creates a server's bucket.

use super::process::Server;
use http::Method;
use object_store::client::{HttpRequest, HttpRequestBody};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

pub(super) fn put(url: &str) -> HttpRequest {
    request(Method::PUT, url)
}

pub(super) fn post(url: &str) -> HttpRequest {
    request(Method::POST, url)
}

fn request(method: Method, url: &str) -> HttpRequest {
    let mut request = HttpRequest::new(HttpRequestBody::empty());
    *request.method_mut() = method;
    *request.uri_mut() = url.parse().expect("a URL");
    request
}

/// Sends the request that creates a bucket, and panics with the server's own message if that fails.
pub(super) async fn made(server: &Server, request: HttpRequest, body: &str) {
    let uri = request.uri();
    let target = uri.path_and_query().map_or("/", |p| p.as_str());
    let mut text = format!("{} {target} HTTP/1.1\r\n", request.method());
    let host = uri.authority().expect("a host").to_string();
    for (name, value) in request.headers() {
        if name != http::header::HOST {
            text.push_str(&format!("{name}: {}\r\n", value.to_str().expect("text")));
        }
    }
    text.push_str(&format!(
        "Host: {host}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    ));
    let mut stream = TcpStream::connect(&host).await.expect("it listens");
    stream.write_all(text.as_bytes()).await.expect("it reads");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("it answers");
    let answer = String::from_utf8_lossy(&answer);
    assert!(
        answer.starts_with("HTTP/1.1 2"),
        "{target}: {answer}: {}",
        server.log()
    );
}
