//! A small node of frames for tests: it sends steps whose content follows from their number, and
//! has as much bad luck as it is told to.
//!
//! Everything else that it says was recorded from a real node (`tests/python/test_recorded.py`),
//! with proxies' habits added: interim answers, other letter case, chunk extensions.

use arrow_array::{ArrayRef, BinaryArray, RecordBatch, UInt64Array};
use forebay_client::{Client, Settings, stream::Received};
use forebay_core::{Error, ErrorKind};
use forebay_protocol::{
    Address, ErrorDocument,
    frame::{Frame, FrameTag},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::AbortHandle,
};

/// What goes wrong at a node.
#[derive(Clone, Default)]
pub struct Luck {
    /// One in this many connections is cut after a random number of bytes.
    pub cut_one_in: u64,
    /// The most bytes before a cut.
    pub cut_within_bytes: u64,
    /// One in this many connections delivers a frame with a wrong byte.
    pub damage_one_in: u64,
    /// One in this many requests is answered with 503.
    pub refuse_one_in: u64,
    /// Every request is answered with this status.
    pub always: Option<u16>,
    /// The `Retry-After` of these answers and of refusals.
    pub retry_after_secs: Option<u64>,
    /// This step is a permanent error.
    pub broken_step: Option<u64>,
    /// Pause before each frame.
    pub pause: Duration,
}

pub struct TestNode {
    pub addr: SocketAddr,
    pub steps: u64,
    pub most_bytes: u64,
    pub luck: Mutex<Luck>,
    pub rng: Mutex<StdRng>,
    pub open: AtomicI64,
    pub requests: AtomicU64,
    pub sent_bytes: AtomicU64,
    pub lanes: Mutex<Vec<(u64, u64, u64)>>,
    pub down: AtomicBool,
    accept: Mutex<Option<AbortHandle>>,
}

/// A recorded answer of a real node.
fn recorded(name: &str) -> Value {
    let answers = include_str!("../../../../tests/recorded/answers.json");
    serde_json::from_str::<Value>(answers).unwrap()[name].clone()
}

/// The body of a refusal, in the form that a node uses to refuse a stream.
fn refusal(status: u16) -> String {
    let document = recorded("no_such_dataset")["body"].clone();
    let document = ErrorDocument {
        status,
        code: ErrorKind::from_http_status(status).code().to_owned(),
        message: "not now".to_owned(),
        ..serde_json::from_value(document).unwrap()
    };
    serde_json::to_string(&document).unwrap()
}

/// What a node reports about itself in a frame without rows.
fn says(origin_seconds: f64) -> Vec<u8> {
    let frames = recorded("stream")["frames"].clone();
    let last = frames.as_array().unwrap().last().unwrap();
    let names = last["payload"].as_array().unwrap().iter();
    let mut all: BTreeMap<&str, f64> = names.map(|n| (n.as_str().unwrap(), 0.0)).collect();
    *all.get_mut("origin_seconds").expect("a node says so") = origin_seconds;
    serde_json::to_vec(&all).unwrap()
}

/// The rows of a step.
pub fn batch(step: u64, most_bytes: u64) -> RecordBatch {
    let mut rng = StdRng::seed_from_u64(step);
    let rows = rng.random_range(1..5usize);
    let data: Vec<Vec<u8>> = (0..rows)
        .map(|_| vec![step as u8; rng.random_range(0..=most_bytes as usize / rows)])
        .collect();
    let columns: Vec<(&str, ArrayRef)> = vec![
        (
            "row",
            Arc::new(UInt64Array::from_iter_values(
                (0..rows as u64).map(|i| step * 10 + i),
            )),
        ),
        ("data", Arc::new(BinaryArray::from_iter_values(&data))),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

impl TestNode {
    pub async fn start(steps: u64, most_bytes: u64, luck: Luck, seed: u64) -> Arc<TestNode> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let node = Arc::new(TestNode {
            addr: listener.local_addr().unwrap(),
            steps,
            most_bytes,
            luck: Mutex::new(luck),
            rng: Mutex::new(StdRng::seed_from_u64(seed)),
            open: AtomicI64::new(0),
            requests: AtomicU64::new(0),
            sent_bytes: AtomicU64::new(0),
            lanes: Mutex::default(),
            down: AtomicBool::new(false),
            accept: Mutex::default(),
        });
        let task = tokio::spawn(node.clone().accept(listener));
        *node.accept.lock().unwrap() = Some(task.abort_handle());
        node
    }

    /// Acts like a killed process: connections break, and nobody listens.
    pub fn kill(&self) {
        self.down.store(true, SeqCst);
    }

    pub fn revive(&self) {
        self.down.store(false, SeqCst);
    }

    async fn accept(self: Arc<Self>, listener: TcpListener) {
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            let node = self.clone();
            tokio::spawn(async move {
                node.open.fetch_add(1, SeqCst);
                if !node.down.load(SeqCst) {
                    let _ = node.serve(socket).await;
                }
                node.open.fetch_sub(1, SeqCst);
            });
        }
    }

    fn one_in(&self, n: u64) -> bool {
        n > 0 && self.rng.lock().unwrap().random_range(0..n) == 0
    }

    async fn serve(&self, mut socket: TcpStream) -> std::io::Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await?);
        }
        let head = String::from_utf8(head).unwrap().to_lowercase();
        let length: usize = head
            .split("content-length: ")
            .nth(1)
            .unwrap()
            .split('\r')
            .next()
            .unwrap()
            .parse()
            .unwrap();
        socket.read_exact(&mut vec![0; length]).await?;
        self.requests.fetch_add(1, SeqCst);
        let query = |name: &str| -> u64 {
            let value = head.split(&format!("{name}=")).nth(1).unwrap();
            value
                .split(|c: char| !c.is_ascii_digit())
                .next()
                .unwrap()
                .parse()
                .unwrap()
        };
        let (connection, of, from) = (query("connection"), query("&of"), query("from_step"));
        self.lanes.lock().unwrap().push((connection, of, from));
        let luck = self.luck.lock().unwrap().clone();
        let status = luck
            .always
            .or(self.one_in(luck.refuse_one_in).then_some(503));
        if let Some(status) = status {
            let body = refusal(status);
            let after = luck.retry_after_secs;
            let after = after.map_or(String::new(), |s| format!("retry-after: {s}\r\n"));
            let answer = format!(
                "HTTP/1.1 {status} No\r\n{after}content-length: {}\r\n\r\n{body}",
                body.len()
            );
            return socket.write_all(answer.as_bytes()).await;
        }
        let cut = self.one_in(luck.cut_one_in).then(|| {
            self.rng
                .lock()
                .unwrap()
                .random_range(0..=luck.cut_within_bytes)
        });
        let damage = self.one_in(luck.damage_one_in);
        let mut sent = 0;
        let headers = recorded("stream")["headers"].clone();
        let headers: BTreeMap<String, String> = serde_json::from_value(headers).unwrap();
        let mut head = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n".to_owned();
        for (name, value) in headers {
            let value = match name.as_str() {
                "transfer-encoding" => value.to_uppercase(),
                _ => value,
            };
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        self.send(&mut socket, head.as_bytes(), &mut sent, cut)
            .await?;
        let mut step = from;
        loop {
            if !luck.pause.is_zero() {
                tokio::time::sleep(luck.pause).await;
                self.chunk(
                    &mut socket,
                    &Frame::keep_alive(FrameTag::default(), says(0.5))
                        .into_pieces(())
                        .concat(),
                    &mut sent,
                    cut,
                )
                .await?;
            }
            let tag = FrameTag {
                epoch: 0,
                step,
                next: step + 1,
                padding: 0,
            };
            if step % of != connection {
                step += 1;
                continue;
            }
            if Some(step) == luck.broken_step {
                let error =
                    Error::corrupt(format!("row {} is damaged", step * 10)).hint("look at it");
                self.chunk(
                    &mut socket,
                    &Frame::error(tag, &error).into_pieces(()).concat(),
                    &mut sent,
                    cut,
                )
                .await?;
                return Ok(());
            }
            if step >= self.steps {
                self.chunk(
                    &mut socket,
                    &Frame::end(tag, says(1.5)).into_pieces(()).concat(),
                    &mut sent,
                    cut,
                )
                .await?;
                return self.send(&mut socket, b"0\r\n\r\n", &mut sent, cut).await;
            }
            for (i, piece) in Frame::rows(tag, &batch(step, self.most_bytes))
                .unwrap()
                .into_pieces(())
                .into_iter()
                .enumerate()
            {
                let mut piece = piece.to_vec();
                if damage && i == 0 && step > from {
                    let at = self.rng.lock().unwrap().random_range(0..piece.len());
                    piece[at] ^= 1;
                }
                // Chunks of any size, also splitting the head of a frame.
                let at = self.rng.lock().unwrap().random_range(0..=piece.len());
                for part in [&piece[..at], &piece[at..]]
                    .into_iter()
                    .filter(|p| !p.is_empty())
                {
                    self.chunk(&mut socket, part, &mut sent, cut).await?;
                }
            }
            step += of;
        }
    }

    async fn chunk(
        &self,
        socket: &mut TcpStream,
        bytes: &[u8],
        sent: &mut u64,
        cut: Option<u64>,
    ) -> std::io::Result<()> {
        let mut chunk = format!("{:X};x=y\r\n", bytes.len()).into_bytes();
        chunk.extend_from_slice(bytes);
        chunk.extend_from_slice(b"\r\n");
        self.send(socket, &chunk, sent, cut).await
    }

    async fn send(
        &self,
        socket: &mut TcpStream,
        bytes: &[u8],
        sent: &mut u64,
        cut: Option<u64>,
    ) -> std::io::Result<()> {
        let gone = || std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        if self.down.load(SeqCst) {
            return Err(gone());
        }
        let left = cut.map_or(bytes.len(), |cut| {
            (cut - *sent).min(bytes.len() as u64) as usize
        });
        socket.write_all(&bytes[..left]).await?;
        *sent += left as u64;
        self.sent_bytes.fetch_add(left as u64, SeqCst);
        if left < bytes.len() {
            Err(gone())
        } else {
            Ok(())
        }
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        if let Some(task) = self.accept.lock().unwrap().take() {
            task.abort();
        }
    }
}

/// Reaches a test node over TCP.
pub fn client(at: SocketAddr) -> Client {
    let address = Address::parse(&at.to_string()).unwrap();
    Client::new(Settings::new(address, "test/0")).unwrap()
}

/// Checks that this is the step, complete.
pub fn assert_step(received: &Received, step: u64, most_bytes: u64) {
    assert_eq!(received.header.tag.step, step);
    assert_eq!(received.payload.as_ptr() as usize % 64, 0, "not aligned");
    let got = forebay_protocol::frame::decode_checked(&received.header, &received.payload).unwrap();
    assert_eq!(got, batch(step, most_bytes), "step {step}");
}
