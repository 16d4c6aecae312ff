//! Accepting connections, over TCP and the Unix socket, and serving HTTP/1.1 on them.
//!
//! Past the limit of open connections, the next one is told so with 503 and closed (`refuse.rs`).
//! Refusals are bounded too, and further connections wait in the kernel's queue. When the node
//! stops, it accepts no more connections, closes idle ones, and closes busy ones after their
//! answer.

use crate::{
    app::App,
    io::Watched,
    metrics::Connections,
    note::Peer,
    refuse::{self, refuse},
    service,
    wire::Wire,
};
use arc_swap::Guard;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::{
    io,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The number of headers that the HTTP library takes without an allocation for each request.
const HEADERS_ON_THE_STACK: usize = 100;
/// A pause after an error that the next accept would meet again at once, such as too many open
/// files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often such errors are logged; those in between are counted.
const ACCEPT_ERRORS_TOLD_EVERY: Duration = Duration::from_secs(60);

/// Tells a listener and its connections to stop, and waits for them.
#[derive(Clone, Default)]
pub struct Stop {
    /// Take on nothing new.
    pub stop: CancellationToken,
    /// Take on nothing new from other nodes either. This comes later than `stop`: other nodes tell this
    /// one of writes for as long as it holds its lease.
    pub peers: CancellationToken,
    /// The time is up: break off.
    pub abort: CancellationToken,
    pub tasks: TaskTracker,
}

/// What connections share.
#[derive(Clone)]
pub struct Gate {
    app: Arc<App>,
    refusals: Arc<Semaphore>,
    stop: Stop,
}

pub async fn serve_tcp(listener: TcpListener, gate: Gate) {
    let mut failures = Failures::default();
    loop {
        let Some(seat) = gate.seat().await else {
            return;
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = gate.stop.stop.cancelled() => return,
        };
        match accepted {
            Ok((stream, peer)) => {
                // Answers are written in large pieces; a small one must not wait for more data.
                if let Err(e) = stream.set_nodelay(true) {
                    tracing::debug!(%peer, error = %e, "TCP_NODELAY");
                }
                let stream = Wire::new(stream, gate.app.tls.clone(), &gate.app.metrics);
                gate.spawn(stream, Peer::Tcp(peer), seat);
            }
            Err(e) => accept_failed(&e, &mut failures).await,
        }
    }
}

pub async fn serve_unix(listener: UnixListener, gate: Gate) {
    let mut failures = Failures::default();
    loop {
        let Some(seat) = gate.seat().await else {
            return;
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = gate.stop.stop.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => gate.spawn(stream, Peer::Unix, seat),
            Err(e) => accept_failed(&e, &mut failures).await,
        }
    }
}

/// Logs connections that could not be accepted, now and then.
#[derive(Default)]
pub struct Failures {
    told: Option<Instant>,
    untold: u64,
}

impl Failures {
    /// Whether to log one more failure; if so, how many before it were not logged.
    fn tell(&mut self, now: Instant) -> Option<u64> {
        let is_time = self
            .told
            .is_none_or(|told| now.duration_since(told) >= ACCEPT_ERRORS_TOLD_EVERY);
        if !is_time {
            self.untold += 1;
            return None;
        }
        self.told = Some(now);
        Some(std::mem::take(&mut self.untold))
    }
}

/// Logs an error and pauses, so that the next attempt may succeed.
pub async fn accept_failed(e: &io::Error, failures: &mut Failures) {
    // A client that left before it was accepted is no problem.
    if matches!(
        e.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::Interrupted
    ) {
        return;
    }
    if let Some(untold) = failures.tell(Instant::now()) {
        tracing::error!(error = %e, untold, "a connection could not be accepted; if too many \
            files are open, raise the limit (ulimit -n)");
    }
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

impl Gate {
    pub fn new(app: Arc<App>, stop: Stop) -> Self {
        Gate {
            app,
            refusals: Arc::new(Semaphore::new(refuse::REFUSALS_MAX)),
            stop,
        }
    }

    /// What the next connection takes at the least: room to be refused.
    async fn seat(&self) -> Option<OwnedSemaphorePermit> {
        tokio::select! {
            seat = self.refusals.clone().acquire_owned() => seat.ok(),
            () = self.stop.stop.cancelled() => None,
        }
    }

    fn spawn<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        &self,
        stream: S,
        peer: Peer,
        seat: OwnedSemaphorePermit,
    ) {
        let gate = self.clone();
        let Some(place) = self.app.connections.try_take() else {
            self.app.metrics.refused_connections.fetch_add(1, Relaxed);
            tracing::debug!(%peer, "a connection was refused: the limit of open connections is reached");
            self.stop.tasks.spawn(async move {
                let _seat = seat;
                refuse(stream, gate.app.connections.most()).await;
            });
            return;
        };
        self.stop.tasks.spawn(async move {
            let _place = place;
            let _open = Open::new(&gate.app, peer);
            gate.serve(stream, peer).await;
        });
    }

    async fn serve<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        &self,
        stream: S,
        peer: Peer,
    ) {
        let config = Guard::into_inner(self.app.config());
        let limits = &config.limits;
        let io = TokioIo::new(Watched::new(
            stream,
            limits.write_timeout.0,
            limits.slowest_client.0,
        ));
        let app = self.app.clone();
        let service = service_fn(move |request| {
            let app = app.clone();
            async move { Ok::<_, std::convert::Infallible>(service::handle(app, request, peer).await) }
        });
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(limits.idle_timeout.0);
        builder.max_header_size(usize::try_from(limits.head.0).unwrap_or(usize::MAX));
        if limits.headers != HEADERS_ON_THE_STACK {
            builder.max_headers(limits.headers);
        }
        // On the Unix socket, files are lent (`v1/lend.rs`).
        let connection = builder.serve_connection(io, service).with_upgrades();
        let mut connection = std::pin::pin!(connection);
        let result = tokio::select! {
            result = connection.as_mut() => result,
            () = self.stop.stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                tokio::select! {
                    result = connection.as_mut() => result,
                    () = self.stop.abort.cancelled() => {
                        tracing::warn!(%peer, "an answer was broken off because the node is \
                            stopping");
                        return;
                    }
                }
            }
        };
        if let Err(e) = result {
            // Clients that leave, time out or send something that is not HTTP. What was wrong with
            // an answer is in its own log line.
            tracing::debug!(%peer, error = %e, "the connection ended");
        }
    }
}

/// Counts a connection while it is open.
struct Open {
    app: Arc<App>,
    peer: Peer,
}

impl Open {
    fn new(app: &Arc<App>, peer: Peer) -> Self {
        let open = Open {
            app: app.clone(),
            peer,
        };
        open.connections().open.fetch_add(1, Relaxed);
        open.connections().accepted.fetch_add(1, Relaxed);
        open
    }

    fn connections(&self) -> &Connections {
        match self.peer {
            Peer::Tcp(_) => &self.app.metrics.tcp,
            Peer::Unix => &self.app.metrics.unix,
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.connections().open.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_come_ten_times_a_second_are_told_once_in_a_while() {
        let (mut failures, began) = (Failures::default(), Instant::now());
        let told: Vec<u64> = (0..1300)
            .filter_map(|i| failures.tell(began + i * Duration::from_millis(100)))
            .collect();
        assert_eq!(told, [0, 599, 599]);
    }
}
