//! The admin listener: metrics and health, for this machine and for monitoring. Nothing here
//! changes anything.

use crate::{
    app::App,
    io::Watched,
    listener::{Failures, Stop, accept_failed},
    metrics::{self, Format},
    service::date,
    wire::Wire,
};
use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use std::{
    convert::Infallible,
    fs::File,
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
    time::Duration,
};
use tokio::{
    net::TcpListener,
    sync::{Semaphore, SemaphorePermit, oneshot},
};

/// Open connections; monitoring needs few.
const CONNECTIONS_MAX: usize = 256;
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// A client that reads nothing of its answer for this long is cut off.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// A client that reads less than this per second over that time is cut off too.
const SLOWEST_CLIENT_BYTES_PER_SECOND: u64 = 1 << 10;
/// Of how long ago samples of the sensors are told, if nothing else is asked for. A collector that
/// asks every 10 s gets each of them several times, which a database keeps once.
const ENERGY_SECONDS: u64 = 60;
/// As long as samples are remembered.
const ENERGY_SECONDS_MAX: u64 = 600;
/// How many answers with samples there are at a time: with many sensors, one has megabytes.
static ENERGY_TURNS: Semaphore = Semaphore::const_new(2);
/// Files held open as a reserve. When the process can open no more, closing them makes room for a
/// monitoring connection and for what its answer reads.
const SPARE_FILES: usize = 4;

/// Serves until `stop.abort`: health and metrics answer while the node is draining.
pub async fn serve(listener: TcpListener, app: Arc<App>, stop: Stop) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut failures = Failures::default();
    let mut spare = spare();
    loop {
        let Ok(place) = places.clone().acquire_owned().await else {
            return;
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.abort.cancelled() => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => {
                if spare.len() < SPARE_FILES {
                    spare = self::spare();
                }
                stream
            }
            // Too many files are open: the reserve makes room for whoever asks how the node is.
            Err(_) if !spare.is_empty() => {
                spare.clear();
                continue;
            }
            Err(e) => {
                accept_failed(&e, &mut failures).await;
                spare = self::spare();
                continue;
            }
        };
        let (app, abort) = (app.clone(), stop.abort.clone());
        let stream = Wire::new(
            stream,
            app.tls.clone().filter(|_| app.admin_tls),
            &app.metrics,
        );
        tokio::spawn(async move {
            let _place = place;
            tokio::select! {
                () = converse(app, stream) => {}
                () = abort.cancelled() => {}
            }
        });
    }
}

/// Opens as many spare files as it can, up to [`SPARE_FILES`].
fn spare() -> Vec<File> {
    let open = || File::open("/dev/null").ok();
    std::iter::from_fn(open).take(SPARE_FILES).collect()
}

async fn converse(app: Arc<App>, stream: Wire) {
    let service = service_fn(move |request| {
        let app = app.clone();
        async move {
            let mut answer = answer(&app, &request).await;
            answer.headers_mut().insert(header::DATE, date(&*app.clock));
            Ok::<_, Infallible>(answer)
        }
    });
    let stream = Watched::new(stream, WRITE_TIMEOUT, SLOWEST_CLIENT_BYTES_PER_SECOND);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(e) = connection.await {
        tracing::debug!(error = %e, "the admin connection ended");
    }
}

async fn answer(app: &Arc<App>, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return text(
            StatusCode::METHOD_NOT_ALLOWED,
            "text/plain",
            "only GET is answered here\n".into(),
        );
    }
    match request.uri().path() {
        "/" => text(StatusCode::OK, "text/html; charset=utf-8", index(app)),
        "/metrics" => {
            let accept = request.headers().get_all(header::ACCEPT).iter();
            let accept: Vec<_> = accept.filter_map(|v| v.to_str().ok()).collect();
            let format = Format::of_accept(&accept.join(","));
            match written(app, move |app| metrics::page(app).text(format)).await {
                Some(page) => text(StatusCode::OK, format.content_type(), page),
                None => unreadable(),
            }
        }
        "/energy.influx" => {
            let last = match seconds(request.uri().query()) {
                Ok(last) => last,
                Err(why) => return text(StatusCode::BAD_REQUEST, "text/plain", why),
            };
            let Ok(turn) = ENERGY_TURNS.try_acquire() else {
                return busy();
            };
            match written(app, move |app| energy(app, last)).await {
                Some(lines) => {
                    let lines = Bytes::from_owner(Sent { lines, _turn: turn });
                    of_bytes(StatusCode::OK, "text/plain; charset=utf-8", lines)
                }
                None => unreadable(),
            }
        }
        // The process answers, so it lives.
        "/healthz" => text(StatusCode::OK, "text/plain", "ok\n".into()),
        "/readyz" => ready(app),
        _ => text(StatusCode::NOT_FOUND, "text/plain", "see /\n".into()),
    }
}

fn unreadable() -> Response<Full<Bytes>> {
    text(
        StatusCode::INTERNAL_SERVER_ERROR,
        "text/plain",
        "the metrics could not be read; the log says why\n".into(),
    )
}

/// `seconds=`: of how long ago samples are wanted.
fn seconds(query: Option<&str>) -> Result<Duration, String> {
    let given = query
        .unwrap_or_default()
        .split('&')
        .filter(|p| !p.is_empty());
    let mut last = ENERGY_SECONDS;
    for parameter in given {
        last = parameter
            .strip_prefix("seconds=")
            .and_then(|n| n.parse().ok())
            .filter(|n| (1..=ENERGY_SECONDS_MAX).contains(n))
            .ok_or_else(|| {
                format!("give seconds=1 to seconds={ENERGY_SECONDS_MAX}, or nothing\n")
            })?;
    }
    Ok(Duration::from_secs(last))
}

/// The samples of the sensors, as InfluxDB reads them.
fn energy(app: &App, last: Duration) -> String {
    let Some(monitor) = &app.energy else {
        return forebay_energy::comment("energy.sample is false");
    };
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    monitor.lines(last, &[("host", host.trim()), ("node", &app.node_id)])
}

/// What is written by a thread of its own: in a cluster of a thousand nodes the metrics take it
/// 15 ms, in which no read may wait for a thread of the runtime. Nor may they wait for the threads
/// that wait for disks: who asks may want to know what is wrong with those.
async fn written(
    app: &Arc<App>,
    what: impl Fn(&App) -> String + Clone + Send + 'static,
) -> Option<String> {
    let (done, page) = oneshot::channel();
    // One at a time, also if those who asked have left.
    let turn = app.metrics_turn.clone().lock_owned().await;
    let (of, here) = (app.clone(), what.clone());
    let write = move || {
        drop(done.send(what(&of)));
        drop(turn);
    };
    match thread::Builder::new().name("metrics".into()).spawn(write) {
        // It ends without an answer only if it panics.
        Ok(_) => page.await.ok(),
        Err(_) => Some(here(app)),
    }
}

fn ready(app: &App) -> Response<Full<Bytes>> {
    let ready = app.ready.load(Relaxed);
    let dirs: Vec<_> = app
        .engine
        .cache_stats()
        .iter()
        .flat_map(|s| &s.dirs)
        .map(|d| json!({"path": d.path, "state": d.state.as_str()}))
        .collect();
    // A failing disk makes the node slower, not wrong: it stays ready.
    let body =
        json!({"ready": ready, "state": if ready { "ready" } else { "stopping" }, "cache": dirs});
    text(
        if ready {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        },
        "application/json",
        format!("{body}\n"),
    )
}

fn index(app: &App) -> String {
    let metrics = metrics::declared().len();
    format!(
        "<!doctype html><title>Forebay</title><h1>Forebay {}</h1><p>Node {}.</p><ul>\
         <li><a href=\"/metrics\">/metrics</a>: {metrics} metrics, for Prometheus\
         <li><a href=\"/energy.influx\">/energy.influx</a>: joules of this machine, for InfluxDB\
         <li><a href=\"/healthz\">/healthz</a>: the process lives\
         <li><a href=\"/readyz\">/readyz</a>: the node takes requests</ul>\n",
        crate::VERSION,
        app.node_id
    )
}

/// Samples, until a client has them.
struct Sent {
    lines: String,
    _turn: SemaphorePermit<'static>,
}

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        self.lines.as_bytes()
    }
}

fn busy() -> Response<Full<Bytes>> {
    let why = "the samples are being sent to others; ask again in a second\n";
    let mut response = text(StatusCode::SERVICE_UNAVAILABLE, "text/plain", why.into());
    let second = HeaderValue::from_static("1");
    response.headers_mut().insert(header::RETRY_AFTER, second);
    response
}

fn text(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    of_bytes(status, content_type, Bytes::from(body))
}

fn of_bytes(status: StatusCode, content_type: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_a_turn_until_they_were_sent() {
        let sent = || {
            let lines = String::from("lines");
            let turn = ENERGY_TURNS.try_acquire().ok()?;
            Some(Bytes::from_owner(Sent { lines, _turn: turn }))
        };
        let (first, second) = (sent().expect("a turn"), sent().expect("another"));
        let rest = first.slice(1..);
        drop(first);
        assert!(sent().is_none(), "a part of the first is still to be sent");
        assert_eq!((&rest[..], &second[..]), (&b"ines"[..], &b"lines"[..]));
        drop(rest);
        assert!(sent().is_some());
        assert_eq!(busy().headers()[header::RETRY_AFTER], "1");
    }

    #[test]
    fn a_while_is_one_to_six_hundred_seconds() {
        let of = |query: Option<&str>| seconds(query).map(|d| d.as_secs());
        assert_eq!(of(None), Ok(60));
        assert_eq!(of(Some("seconds=600")), Ok(600));
        for wrong in [
            "seconds=0",
            "seconds=601",
            "seconds=",
            "seconds=-1",
            "second=5",
            "since=1",
        ] {
            assert!(of(Some(wrong)).is_err(), "{wrong}");
        }
    }
}
