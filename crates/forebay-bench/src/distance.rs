//! `forebay distance`: a TCP proxy that puts a server at a distance.
//!
//! A test server on loopback answers in microseconds, which no bucket does. This proxy adds what
//! distance adds: half a round trip in each direction, a round trip for each new connection (TCP's
//! handshake), a wait before the first byte of each answer, and, for each direction, one bandwidth
//! that all connections share. It counts connections, requests and bytes, so that a demo or a test
//! can say what reached the origin.
//!
//! [`link`] holds one direction of one connection; this file holds the listener, the counters and
//! the command. Invariants: bytes are never lost, repeated or reordered; what is in flight is
//! bounded ([`Config::window_bytes`] for each direction of each connection), so a reader that stops
//! makes its writer stop; a peer's reset becomes a reset on the other side, never an orderly end.

mod link;
mod tail;
#[cfg(test)]
mod tests;
mod timer;

use forebay_core::{Error, ErrorKind, Result, name::shorten, units};
use http_body_util::Full;
use hyper::{Request, Response, body::Bytes, body::Incoming, header, service::service_fn};
use hyper_util::rt::TokioIo;
use link::{Bucket, Ended, Turn};
use serde::Serialize;
use std::{
    future::Future,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, MissedTickBehavior},
};

/// Connections open at the same time; the next one waits in the listener's backlog.
const CONNECTIONS_MAX: usize = 4096;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const STATS_FILE_EVERY: Duration = Duration::from_millis(200);
const SIGMA_MAX: f64 = 3.0;
const WINDOW_MIN_BYTES: u64 = 1 << 20;
const WINDOW_MAX_BYTES: u64 = 64 << 20;

/// How far away the server is.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Where clients connect; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The server, as `host:port`.
    pub to: String,
    /// Round-trip time: half in each direction, and once for each new connection.
    pub rtt: Duration,
    /// Added before each request reaches the server.
    pub first_byte: Duration,
    /// Makes `first_byte` the median of what is added, instead of a constant.
    pub tail: Option<Tail>,
    /// Bytes per second in each direction, shared by all connections; `None`: unlimited.
    pub rate_bytes_per_s: Option<u64>,
}

/// A service time with a long tail: log-normal. Request number `n` of a seed always waits equally
/// long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tail {
    /// Of the logarithm: with 1.0 the 99th percentile is ten times the median.
    pub sigma: f64,
    pub seed: u64,
}

impl Config {
    /// How long request number `n` waits before it reaches the server.
    fn first_byte_of(&self, n: u64) -> Duration {
        self.tail
            .map_or(self.first_byte, |tail| tail::wait(self.first_byte, tail, n))
    }

    /// Bytes in flight in one direction of one connection: twice what the link itself holds.
    pub fn window_bytes(&self) -> u64 {
        let link = self
            .rate_bytes_per_s
            .map(|rate| rate as f64 * (self.rtt / 2 + self.first_byte).as_secs_f64());
        link.map_or(WINDOW_MAX_BYTES / 4, |bytes| 2 * bytes as u64)
            .clamp(WINDOW_MIN_BYTES, WINDOW_MAX_BYTES)
    }
}

/// What has passed through. All counters only grow, except `connections_open`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct DistanceStats {
    pub connections: AtomicU64,
    pub connections_open: AtomicU64,
    /// How often a client spoke after the server had spoken last: HTTP/1.1 requests, as long as
    /// nobody pipelines.
    pub requests: AtomicU64,
    pub bytes_to_server: AtomicU64,
    pub bytes_to_client: AtomicU64,
    /// Connections that could not be made to the server; the client saw a reset.
    pub connect_errors: AtomicU64,
    /// Connections that either side ended with a reset.
    pub resets: AtomicU64,
}

/// A listener that already has its port, so that port 0 can be announced before anyone connects.
pub(crate) struct Distance {
    listener: TcpListener,
    config: Config,
}

impl Distance {
    pub async fn bind(config: Config) -> Result<Self> {
        let listener = listen(config.listen).await?;
        Ok(Self { listener, config })
    }

    pub fn local_addr(&self) -> Result<SocketAddr> {
        self.listener
            .local_addr()
            .map_err(|e| Error::internal("the listener's address").caused_by(e))
    }

    /// Serves until `shutdown` resolves, then drops every connection.
    pub async fn run(
        self,
        stats: Arc<DistanceStats>,
        shutdown: impl Future<Output = ()>,
    ) -> Result<()> {
        let to_server = Arc::new(Bucket::new(self.config.rate_bytes_per_s));
        let to_client = Arc::new(Bucket::new(self.config.rate_bytes_per_s));
        let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let config = Arc::new(self.config);
        let mut connections = JoinSet::new();
        let accepting = async {
            loop {
                let Ok(slot) = slots.clone().acquire_owned().await else {
                    return;
                };
                let client = match self.listener.accept().await {
                    Ok((client, _)) => client,
                    Err(e) => {
                        // Out of file descriptors, or the client left before it was accepted:
                        // neither ends the listener.
                        tracing::warn!(error = %e, "accept failed");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                        continue;
                    }
                };
                let (config, stats) = (config.clone(), stats.clone());
                let (to_server, to_client) = (to_server.clone(), to_client.clone());
                connections.spawn(async move {
                    let _slot = slot;
                    let _open = Open::new(&stats);
                    connection(client, &config, &stats, &to_server, &to_client).await;
                });
                while connections.try_join_next().is_some() {}
            }
        };
        tokio::select! {
            () = accepting => {}
            () = shutdown => {}
        }
        connections.shutdown().await;
        Ok(())
    }
}

async fn listen(at: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(at).await.map_err(|e| {
        Error::new(ErrorKind::Invalid, format!("cannot listen on {at}"))
            .caused_by(e)
            .hint("choose another address, or port 0 for a free one")
    })
}

struct Open<'a>(&'a DistanceStats);

impl<'a> Open<'a> {
    fn new(stats: &'a DistanceStats) -> Self {
        stats.connections.fetch_add(1, Relaxed);
        stats.connections_open.fetch_add(1, Relaxed);
        Self(stats)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.connections_open.fetch_sub(1, Relaxed);
    }
}

/// One connection, from accept to the end of both directions.
async fn connection(
    mut client: TcpStream,
    config: &Config,
    stats: &DistanceStats,
    to_server: &Bucket,
    to_client: &Bucket,
) {
    // The handshake that loopback did for free: nothing reaches the server before it would have
    // finished.
    let handshake_over = Instant::now() + config.rtt;
    let mut server =
        match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(&config.to)).await {
            Ok(Ok(server)) => server,
            failed => {
                let why = failed.map_or_else(
                    |_| "timed out".to_owned(),
                    |r| r.map_or_else(|e| e.to_string(), |_| String::new()),
                );
                tracing::warn!(to = %config.to, error = %why, "cannot connect to the server");
                stats.connect_errors.fetch_add(1, Relaxed);
                tokio::time::sleep_until(handshake_over).await;
                return reset(&client);
            }
        };
    for side in [&client, &server] {
        // Delays are added here on purpose; Nagle's algorithm would add its own.
        if let Err(e) = side.set_nodelay(true) {
            tracing::debug!(error = %e, "TCP_NODELAY");
        }
    }
    let turn = Turn::default();
    let (client_read, client_write) = client.split();
    let (server_read, server_write) = server.split();
    let up = link::Link {
        delay: config.rtt / 2,
        not_before: handshake_over,
        window_bytes: config.window_bytes(),
        bucket: to_server,
    };
    let down = link::Link {
        bucket: to_client,
        ..up
    };
    let up = up.carry(client_read, server_write, |bytes| {
        stats.bytes_to_server.fetch_add(bytes.len() as u64, Relaxed);
        if !turn.client_speaks() {
            return Duration::ZERO;
        }
        config.first_byte_of(stats.requests.fetch_add(1, Relaxed))
    });
    let down = down.carry(server_read, client_write, |bytes| {
        stats.bytes_to_client.fetch_add(bytes.len() as u64, Relaxed);
        turn.server_speaks(bytes);
        Duration::ZERO
    });
    // The first reset ends both directions.
    if tokio::try_join!(up, down).is_err_and(|Ended::Reset| true) {
        stats.resets.fetch_add(1, Relaxed);
        reset(&client);
        reset(&server);
    }
}

/// Makes this socket end with a reset: a cut stream must look cut.
fn reset(socket: &TcpStream) {
    if let Err(e) = socket.set_zero_linger() {
        tracing::debug!(error = %e, "SO_LINGER");
    }
}

/// `forebay distance --listen ADDR --to ADDR …`
#[derive(clap::Args, Clone, Debug)]
pub struct DistanceArgs {
    /// Where clients connect; port 0 takes a free one, which is printed
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// The server to put at a distance
    #[arg(long, value_name = "HOST:PORT")]
    pub to: String,
    /// Round-trip time: half in each direction, and once for each new connection
    #[arg(long, value_name = "TIME", default_value = "30ms", value_parser = units::parse_duration)]
    pub rtt: Duration,
    /// Added before each request reaches the server
    #[arg(long, value_name = "TIME", default_value = "0ms", value_parser = units::parse_duration)]
    pub first_byte: Duration,
    /// Makes --first-byte the median of a log-normal distribution; this is the deviation of its
    /// logarithm
    #[arg(long, value_name = "NUMBER", requires = "first_byte")]
    pub first_byte_sigma: Option<f64>,
    /// Fixes how long each request waits with --first-byte-sigma
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Bytes per second in each direction, shared by all connections [default: no cap]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    pub rate: Option<u64>,
    /// Keep the counters in this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub stats_file: Option<PathBuf>,
    /// Answer HTTP requests here with the counters, as JSON
    #[arg(long, value_name = "ADDR")]
    pub stats_listen: Option<SocketAddr>,
}

impl DistanceArgs {
    /// # Errors
    /// `Invalid`: the values make no sense.
    pub fn check(&self) -> Result<()> {
        self.config().map(drop)
    }

    fn config(&self) -> Result<Config> {
        if self.rate == Some(0) {
            return Err(
                Error::invalid("--rate 0 lets nothing pass").hint("leave --rate out for no cap")
            );
        }
        if self
            .first_byte_sigma
            .is_some_and(|sigma| !(0.0..=SIGMA_MAX).contains(&sigma))
        {
            return Err(Error::invalid(format!(
                "--first-byte-sigma must be from 0 to {SIGMA_MAX}"
            ))
            .hint("1.0 is a long tail"));
        }
        let is_server = self
            .to
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        if !is_server || self.to.contains('/') {
            return Err(
                Error::invalid(format!("--to {:?} is not HOST:PORT", shorten(&self.to)))
                    .hint("as in 127.0.0.1:9000, without http://"),
            );
        }
        let tail = self.first_byte_sigma.map(|sigma| Tail {
            sigma,
            seed: self.seed,
        });
        let (rtt, first_byte, rate_bytes_per_s) = (self.rtt, self.first_byte, self.rate);
        Ok(Config {
            listen: self.listen,
            to: self.to.clone(),
            rtt,
            first_byte,
            tail,
            rate_bytes_per_s,
        })
    }
}

/// The command: prints one line with the address and serves until Ctrl-C or SIGTERM.
pub async fn main(args: DistanceArgs) -> Result<()> {
    let distance = Distance::bind(args.config()?).await?;
    let stats = Arc::new(DistanceStats::default());
    let mut background = JoinSet::new();
    let mut stats_at = String::new();
    if let Some(at) = args.stats_listen {
        let listener = listen(at).await?;
        let at = listener
            .local_addr()
            .map_err(|e| Error::internal("the listener's address").caused_by(e))?;
        stats_at = format!(" · counters at http://{at}/");
        background.spawn(serve_stats(listener, stats.clone()));
    }
    if let Some(path) = args.stats_file.clone() {
        write_stats(&path, &stats)?;
        let stats = stats.clone();
        background.spawn(async move {
            let mut tick = tokio::time::interval(STATS_FILE_EVERY);
            tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                tick.tick().await;
                if let Err(e) = write_stats(&path, &stats) {
                    tracing::warn!(error = %e.describe(), "the counters were not written");
                }
            }
        });
    }
    let rate = args.rate.map_or("no cap".to_owned(), |r| {
        format!("{}/s each way", units::format_bytes(r))
    });
    let tail = args
        .first_byte_sigma
        .map(|sigma| format!(", log-normal with sigma {sigma}"))
        .unwrap_or_default();
    println!(
        "distance: {} to {} · round trip {:?} · first byte +{:?}{tail} · {rate}{stats_at}",
        distance.local_addr()?,
        args.to,
        args.rtt,
        args.first_byte
    );
    distance.run(stats.clone(), stopped()).await?;
    background.shutdown().await;
    args.stats_file
        .map_or(Ok(()), |path| write_stats(&path, &stats))
}

async fn stopped() {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = match signal(SignalKind::terminate()) {
        Ok(s) => s,
        Err(e) => {
            tracing::warn!(error = %e, "SIGTERM cannot be caught");
            return std::future::pending().await;
        }
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

fn stats_json(stats: &DistanceStats) -> String {
    serde_json::to_string(stats).expect("plain counters always serialize")
}

/// Replaces the file in one step, so that a reader never sees half of it.
fn write_stats(path: &Path, stats: &DistanceStats) -> Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    std::fs::write(&part, stats_json(stats) + "\n")
        .and_then(|()| std::fs::rename(&part, path))
        .map_err(|e| {
            Error::new(
                ErrorKind::Invalid,
                format!("cannot write {}", path.display()),
            )
            .caused_by(e)
            .hint("check --stats-file")
        })
}

async fn serve_stats(listener: TcpListener, stats: Arc<DistanceStats>) {
    let mut clients = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        while clients.len() >= 16 {
            clients.join_next().await;
        }
        let stats = stats.clone();
        clients.spawn(async move {
            let answer = service_fn(|_: Request<Incoming>| {
                let mut response = Response::new(Full::new(Bytes::from(stats_json(&stats))));
                response.headers_mut().insert(
                    header::CONTENT_TYPE,
                    header::HeaderValue::from_static("application/json"),
                );
                std::future::ready(Ok::<_, std::convert::Infallible>(response))
            });
            let served = hyper::server::conn::http1::Builder::new()
                .keep_alive(false)
                .serve_connection(TokioIo::new(client), answer);
            // A client that sends nothing must not hold one of the few places.
            if let Ok(Err(e)) = tokio::time::timeout(Duration::from_secs(5), served).await {
                tracing::debug!(error = %e, "counters");
            }
        });
    }
}
