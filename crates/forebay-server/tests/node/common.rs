//! A node over a directory, and a plain HTTP client.

use bytes::Bytes;
use forebay_core::{ManualClock, SystemClock};
use forebay_server::{Config, Node, config::Override};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use std::{path::PathBuf, sync::Arc, time::Duration};

pub struct TestNode {
    pub node: Node,
    pub clock: ManualClock,
    pub dir: tempfile::TempDir,
}

/// `data` is a bucket over `<dir>/data`; `<dir>/many/*` are buckets that can be made and removed.
pub async fn start(settings: &[(&str, &str)]) -> TestNode {
    let dir = tempfile::tempdir().unwrap();
    start_in(dir, settings).await
}

pub async fn start_in(dir: tempfile::TempDir, settings: &[(&str, &str)]) -> TestNode {
    let config = config(&dir, settings);
    let clock = ManualClock::at(Duration::from_secs(1_800_000_000));
    let node = Node::start_with(config, Arc::new(clock.clone()))
        .await
        .unwrap();
    TestNode { node, clock, dir }
}

pub async fn start_on_the_real_clock(
    dir: tempfile::TempDir,
    settings: &[(&str, &str)],
) -> TestNode {
    let config = config(&dir, settings);
    let node = Node::start_with(config, Arc::new(SystemClock))
        .await
        .unwrap();
    TestNode {
        node,
        clock: ManualClock::at(Duration::ZERO),
        dir,
    }
}

pub fn config(dir: &tempfile::TempDir, settings: &[(&str, &str)]) -> Config {
    for sub in ["data", "many/other"] {
        std::fs::create_dir_all(dir.path().join(sub)).unwrap();
    }
    let root = dir.path().display();
    let mut overrides = vec![
        Override::origins(
            &[
                format!("data=file://{root}/data"),
                format!("file://{root}/many/*"),
            ],
            "test",
        )
        .unwrap(),
        Override::cache(&[format!("{root}/cache:64MiB")], "test").unwrap(),
        Override::text("listen.s3", "127.0.0.1:0", "test").unwrap(),
        Override::text("listen.admin", "127.0.0.1:0", "test").unwrap(),
        Override::text("memory.budget", "256MiB", "test").unwrap(),
    ];
    overrides.extend(
        settings
            .iter()
            .map(|(k, v)| Override::text(k, v, "test").unwrap()),
    );
    Config::load(None, [], &overrides).unwrap()
}

impl TestNode {
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join("data").join(name)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::create_dir_all(self.file(name).parent().unwrap()).unwrap();
        std::fs::write(self.file(name), bytes).unwrap();
    }

    pub async fn client(&self) -> Client {
        Client::tcp(self.node.addr().unwrap()).await
    }

    pub async fn metrics(&self) -> String {
        Client::tcp(self.node.admin_addr().unwrap())
            .await
            .get("/metrics")
            .await
            .text()
    }

    /// The sum of a metric's samples that carry `label`.
    pub async fn metric(&self, name: &str, label: &str) -> f64 {
        let page = self.metrics().await;
        page.lines()
            .filter(|l| {
                l.starts_with(name) && l[name.len()..].starts_with(['{', ' ']) && l.contains(label)
            })
            .filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Result<Bytes, hyper::Error>,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(self.body.as_ref().expect("a whole body")).into_owned()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |v| v.to_str().unwrap())
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.text()).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }
}

pub struct Client(SendRequest<Full<Bytes>>);

impl Client {
    pub async fn tcp(addr: std::net::SocketAddr) -> Self {
        Self::on(tokio::net::TcpStream::connect(addr).await.unwrap()).await
    }

    pub async fn unix(path: &std::path::Path) -> Self {
        Self::on(tokio::net::UnixStream::connect(path).await.unwrap()).await
    }

    async fn on<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static>(
        stream: S,
    ) -> Self {
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(async move {
            let _ = connection.await;
        });
        Client(sender)
    }

    pub async fn send(
        &mut self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Answer {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "127.0.0.1");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.0.ready().await.unwrap();
        let response = self
            .0
            .send_request(request.body(Full::new(body.into())).unwrap())
            .await
            .unwrap();
        let (head, body) = response.into_parts();
        let body = body.collect().await.map(|c| c.to_bytes());
        Answer {
            status: head.status,
            headers: head.headers,
            body,
        }
    }

    pub async fn get(&mut self, path: &str) -> Answer {
        self.send(Method::GET, path, &[], "").await
    }

    pub async fn get_with(&mut self, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.send(Method::GET, path, headers, "").await
    }

    pub async fn put(
        &mut self,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Answer {
        self.send(Method::PUT, path, headers, body).await
    }
}

/// A tar with these members.
pub fn tar(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, data) in members {
        let mut header = [0u8; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[100..107].copy_from_slice(b"0000644");
        header[108..115].copy_from_slice(b"0000000");
        header[116..123].copy_from_slice(b"0000000");
        header[124..135].copy_from_slice(format!("{:011o}", data.len()).as_bytes());
        header[136..147].copy_from_slice(b"00000000000");
        header[148..156].copy_from_slice(b"        ");
        header[156] = b'0';
        header[257..265].copy_from_slice(b"ustar\x0000");
        let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        out.extend_from_slice(&header);
        out.extend_from_slice(data);
        out.resize(out.len().next_multiple_of(512), 0);
    }
    out.resize(out.len() + 1024, 0);
    out
}
