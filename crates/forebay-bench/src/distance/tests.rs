//! The proxy over real sockets: what it adds, and that it changes nothing else.

use super::*;
use std::io;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::tcp::{OwnedReadHalf, OwnedWriteHalf},
    sync::oneshot,
    task::JoinHandle,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// A proxy in front of our own listener; the proxy ends when this is dropped.
struct Far {
    at: SocketAddr,
    server: TcpListener,
    stats: Arc<DistanceStats>,
    stop: Option<oneshot::Sender<()>>,
    proxy: JoinHandle<Result<()>>,
}

impl Far {
    async fn new(rtt_ms: u64, first_byte_ms: u64, rate: Option<u64>) -> Far {
        Self::at(Duration::from_millis(rtt_ms), first_byte_ms, rate).await
    }

    async fn at(rtt: Duration, first_byte_ms: u64, rate: Option<u64>) -> Far {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let config = Config {
            listen: "127.0.0.1:0".parse().unwrap(),
            to: server.local_addr().unwrap().to_string(),
            rtt,
            first_byte: Duration::from_millis(first_byte_ms),
            tail: None,
            rate_bytes_per_s: rate,
        };
        let distance = Distance::bind(config).await.unwrap();
        let at = distance.local_addr().unwrap();
        let stats = Arc::new(DistanceStats::default());
        let (stop, stopped) = oneshot::channel::<()>();
        let proxy = tokio::spawn(distance.run(stats.clone(), async move {
            let _ = stopped.await;
        }));
        Far {
            at,
            server,
            stats,
            stop: Some(stop),
            proxy,
        }
    }

    /// Both ends of a new connection: the client's and the server's.
    async fn connect(&self) -> (TcpStream, TcpStream) {
        let (client, accepted) = tokio::join!(TcpStream::connect(self.at), self.server.accept());
        let client = client.unwrap();
        client.set_nodelay(true).unwrap();
        (client, accepted.unwrap().0)
    }

    async fn stop(mut self) -> Arc<DistanceStats> {
        self.stop.take().unwrap().send(()).unwrap();
        tokio::time::timeout(PATIENCE, self.proxy)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        self.stats
    }
}

async fn soon<T>(f: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, f)
        .await
        .expect("it did not end")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_distance_is_as_short_as_it_says() {
    let rtt = Duration::from_micros(200);
    let far = Far::at(rtt, 0, None).await;
    let (mut client, server) = far.connect().await;
    let answering = tokio::spawn(answer_lines(server));
    // The quickest of many: delays of a busy machine are not the proxy's.
    let mut quickest = Duration::MAX;
    for _ in 0..200 {
        let began = Instant::now();
        client.write_all(b"ask\n").await.unwrap();
        let mut answer = [0; 7];
        soon(client.read_exact(&mut answer)).await.unwrap();
        quickest = quickest.min(began.elapsed());
    }
    assert!(
        quickest >= rtt && quickest < Duration::from_millis(1),
        "{quickest:?}"
    );
    drop(client);
    soon(answering).await.unwrap();
    far.stop().await;
}

/// Reads a line and answers with a line, until the end.
async fn answer_lines(mut server: TcpStream) {
    let mut byte = [0];
    while server.read_exact(&mut byte).await.is_ok() {
        if byte[0] == b'\n' {
            server.write_all(b"answer\n").await.unwrap();
        }
    }
}

async fn ask(client: &mut TcpStream) -> Duration {
    let asked = Instant::now();
    client.write_all(b"GET /\n").await.unwrap();
    let mut answer = [0; 7];
    soon(client.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer, b"answer\n");
    asked.elapsed()
}

/// xorshift: a test replays from its seed.
fn numbers(seed: u64) -> impl FnMut() -> u64 {
    let mut x = seed | 1;
    move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    }
}

#[tokio::test]
async fn a_request_takes_a_round_trip_and_the_first_byte() {
    // With a bandwidth limit, which must not shorten what is too small to be affected by it.
    let far = Far::new(40, 60, Some(100 << 20)).await;
    let (mut client, server) = far.connect().await;
    let server = tokio::spawn(answer_lines(server));
    let first = ask(&mut client).await;
    let (mut least, mut requests) = (Duration::MAX, 1);
    // The least of a few leaves room for late timers of a busy machine.
    while requests < 11 || (least >= Duration::from_millis(125) && requests < 100) {
        least = least.min(ask(&mut client).await);
        requests += 1;
    }
    assert!(
        first >= Duration::from_millis(139),
        "the first request also pays the handshake: {first:?}"
    );
    assert!(least >= Duration::from_millis(99), "{least:?}");
    assert!(least < Duration::from_millis(125), "{least:?}");
    drop(client);
    soon(server).await.unwrap();
    let stats = far.stop().await;
    assert_eq!(stats.requests.load(Relaxed), requests);
    assert_eq!(stats.bytes_to_server.load(Relaxed), requests * 6);
    assert_eq!(stats.bytes_to_client.load(Relaxed), requests * 7);
    assert_eq!(
        (
            stats.connections.load(Relaxed),
            stats.connections_open.load(Relaxed)
        ),
        (1, 0)
    );
}

#[tokio::test]
async fn a_continue_is_not_an_answer() {
    let far = Far::new(2, 0, None).await;
    let (mut client, mut server) = far.connect().await;
    let mut got = [0; 4];
    for (says, to_server) in [
        ("PUT ", true),
        ("HTTP/1.1 100 Continue\r\n\r\n", false),
        ("body", true),
        ("HTTP/1.1 200 OK\r\n\r\n", false),
    ] {
        let (from, to) = if to_server {
            (&mut client, &mut server)
        } else {
            (&mut server, &mut client)
        };
        from.write_all(says.as_bytes()).await.unwrap();
        let mut left = says.len();
        while left > 0 {
            left -= soon(to.read(&mut got[..left.min(4)])).await.unwrap();
        }
    }
    assert_eq!(far.stop().await.requests.load(Relaxed), 1);
}

#[tokio::test]
async fn connections_share_the_bandwidth() {
    let mut rates: Vec<f64> = Vec::new();
    // They never have more. A busy machine makes less of it, and not each time.
    while rates.len() < 10 && rates.last().is_none_or(|rate| *rate <= 0.9) {
        let rate = share_of_four().await;
        assert!(rate < 1.1, "{rate:.3} of the bandwidth");
        rates.push(rate);
    }
    assert!(rates.last().is_some_and(|rate| *rate > 0.9), "{rates:.3?}");
}

/// Which share of the bandwidth four connections have together.
async fn share_of_four() -> f64 {
    const RATE: u64 = 20 << 20;
    const EACH: usize = 5 << 20;
    let far = Far::new(4, 0, Some(RATE)).await;
    let mut done = JoinSet::new();
    let mut began = Instant::now();
    for i in 0..4 {
        let (client, server) = far.connect().await;
        if i == 0 {
            began = Instant::now();
        }
        let (mut from, mut to) = (server, client);
        done.spawn(async move { from.write_all(&vec![7; EACH]).await.unwrap() });
        done.spawn(async move {
            assert_eq!(
                tokio::io::copy(&mut to, &mut tokio::io::sink())
                    .await
                    .unwrap(),
                EACH as u64
            )
        });
    }
    soon(async {
        while let Some(r) = done.join_next().await {
            r.unwrap()
        }
    })
    .await;
    let rate = (4 * EACH) as f64 / began.elapsed().as_secs_f64() / RATE as f64;
    assert_eq!(
        far.stop().await.bytes_to_client.load(Relaxed),
        (4 * EACH) as u64
    );
    rate
}

/// Sends 10,000 pieces of random sizes and contents from `seed`, then the end.
async fn send_random(mut to: impl AsyncWrite + Unpin, seed: u64) {
    let mut number = numbers(seed);
    for _ in 0..10_000 {
        let piece: Vec<u8> = (0..number() % 3000).map(|_| number() as u8).collect();
        to.write_all(&piece).await.unwrap();
    }
    to.shutdown().await.unwrap();
}

async fn expect_random(mut from: impl AsyncRead + Unpin, seed: u64) {
    let mut number = numbers(seed);
    let mut total = 0;
    for _ in 0..10_000 {
        let piece: Vec<u8> = (0..number() % 3000).map(|_| number() as u8).collect();
        let mut got = vec![0; piece.len()];
        from.read_exact(&mut got)
            .await
            .unwrap_or_else(|e| panic!("seed {seed}, after {total} bytes: {e}"));
        assert!(
            got == piece,
            "seed {seed}: other bytes within {} bytes after {total}",
            piece.len()
        );
        total += piece.len();
    }
    assert_eq!(
        from.read(&mut [0]).await.unwrap(),
        0,
        "seed {seed}: more than was sent"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_ways_at_once_byte_for_byte() {
    let seed =
        std::process::id() as u64 ^ std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let far = Far::new(6, 1, Some(64 << 20)).await;
    let (client, server) = far.connect().await;
    let ((client_read, client_write), (server_read, server_write)) =
        (client.into_split(), server.into_split());
    let mut all = JoinSet::new();
    all.spawn(send_random(client_write, seed));
    all.spawn(send_random(server_write, seed ^ 0xabcd));
    all.spawn(expect_random(server_read, seed));
    all.spawn(expect_random(client_read, seed ^ 0xabcd));
    soon(async {
        while let Some(r) = all.join_next().await {
            r.unwrap()
        }
    })
    .await;
    assert_eq!(far.stop().await.resets.load(Relaxed), 0);
}

#[tokio::test]
async fn an_end_in_one_direction_leaves_the_other_open() {
    let far = Far::new(10, 0, None).await;
    let (mut client, mut server) = far.connect().await;
    client.write_all(b"all that I ask").await.unwrap();
    client.shutdown().await.unwrap();
    let mut asked = Vec::new();
    soon(server.read_to_end(&mut asked)).await.unwrap();
    assert_eq!(asked, b"all that I ask");
    server.write_all(b"all that I answer").await.unwrap();
    drop(server);
    let mut answered = Vec::new();
    soon(client.read_to_end(&mut answered)).await.unwrap();
    assert_eq!(answered, b"all that I answer");
    assert_eq!(far.stop().await.resets.load(Relaxed), 0);
}

async fn is_reset(read: io::Result<usize>) {
    assert_eq!(
        read.expect_err("an orderly end where the peer had reset")
            .kind(),
        io::ErrorKind::ConnectionReset
    );
}

#[tokio::test]
async fn a_reset_is_a_reset_on_the_other_side() {
    for by_client in [true, false] {
        let far = Far::new(10, 0, None).await;
        let (client, server) = far.connect().await;
        let (mut gone, mut stays) = if by_client {
            (client, server)
        } else {
            (server, client)
        };
        stays.write_all(b"x").await.unwrap();
        soon(gone.read_exact(&mut [0])).await.unwrap();
        gone.set_zero_linger().unwrap();
        drop(gone);
        is_reset(soon(stays.read(&mut [0; 8])).await).await;
        let stats = far.stop().await;
        assert_eq!(
            stats.resets.load(Relaxed),
            1,
            "by the client: {by_client}, {stats:?}"
        );
    }
}

#[tokio::test]
async fn no_server_is_a_reset_and_is_counted() {
    let mut far = Far::new(10, 0, None).await;
    // Removes the server: its port now refuses.
    let other = TcpListener::bind("127.0.0.1:0").await.unwrap();
    drop(std::mem::replace(&mut far.server, other));
    let mut client = TcpStream::connect(far.at).await.unwrap();
    is_reset(soon(client.read(&mut [0; 8])).await).await;
    assert_eq!(far.stop().await.connect_errors.load(Relaxed), 1);
}

#[tokio::test]
async fn a_reader_that_stops_makes_the_writer_stop() {
    let far = Far::new(2, 0, Some(1 << 30)).await;
    let (client, mut server) = far.connect().await;
    let block = vec![1; 1 << 20];
    let mut sent: u64 = 0;
    // The window, and what the two kernels' buffers hold; a proxy without a limit would take all
    // 256 MiB.
    while sent < 256 << 20 {
        match tokio::time::timeout(Duration::from_secs(1), server.write(&block)).await {
            Ok(written) => sent += written.unwrap() as u64,
            Err(_) => break,
        }
    }
    assert!(
        sent < 64 << 20,
        "{} MiB went in and nobody read",
        sent >> 20
    );
    let (mut read, _write): (OwnedReadHalf, OwnedWriteHalf) = client.into_split();
    let reader =
        tokio::spawn(async move { tokio::io::copy(&mut read, &mut tokio::io::sink()).await });
    drop(server);
    assert_eq!(
        soon(reader).await.unwrap().unwrap(),
        sent,
        "and every byte of it arrives once somebody reads"
    );
    far.stop().await;
}
