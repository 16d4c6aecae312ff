//! One request on a data listener: id, admission, routing, log line.
//!
//! Invariants: each request is counted and logged once, when its answer is out, cut or abandoned;
//! its place among the requests in flight is held until then. Log lines hold no query strings,
//! which may carry signatures, and no header but `User-Agent`.

use crate::{
    app::App,
    body::{AnswerBody, BoxError},
    browser,
    linger::Lingering,
    note::{Api, Note, Peer},
    object::http_date,
    places::Place,
    request_body::UploadBody,
    request_id::{self, RequestId},
    s3, v1,
};
use bytes::Bytes;
use forebay_core::{Clock, Error, ErrorKind, units::milliseconds};
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use std::{
    cell::RefCell,
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll},
    time::Duration,
};

const AMZ_REQUEST_ID: HeaderName = HeaderName::from_static("x-amz-request-id");

/// Answers one request.
pub async fn handle(app: Arc<App>, request: Request<Incoming>, peer: Peer) -> Response<Tracked> {
    let note = Note::new(
        RequestId::of(request.headers()),
        peer,
        request.method().clone(),
        app.metrics.clone(),
    );
    note.set_user_agent(request.headers());
    let path = request.uri().path().to_owned();
    let is_v1 = path == "/v1" || path.starts_with("/v1/");
    note.set_api(if is_v1 { v1::api_of(&path) } else { Api::S3 });
    let (body_timeout, slowest_client) = {
        let limits = &app.config().limits;
        (limits.body_timeout.0, limits.slowest_client.0)
    };
    // Only other nodes are told it.
    let told = app.joined.is_some().then(|| note.id.shared().clone());
    let (request, unasked) = Lingering::of(request);
    let (place, refusal) = admit(&app);
    let refusal = refusal
        .or_else(|| check_host(&request).err())
        .or_else(|| check_browser(&app, &request, peer).err());
    let mut flight = Flight::begin(note.clone(), path.clone(), place);
    let mut response = match refusal {
        Some(e) => refuse(&app, &note, &path, is_v1, &e),
        None => {
            let request = request.map(|body| UploadBody::new(body, body_timeout, slowest_client));
            let answer = async {
                match is_v1 {
                    true => v1::call(app.clone(), request, note.clone()).await,
                    false => app.s3.call(request, note.clone()).await,
                }
            };
            forebay_core::request::scope(told.clone(), answer).await
        }
    };
    if note.method == Method::HEAD || response.status() == StatusCode::NOT_MODIFIED {
        *response.body_mut() = AnswerBody::Empty;
    }
    if unasked.still() {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    response
        .headers_mut()
        .insert(header::DATE, date(&*app.clock));
    if let Ok(id) = HeaderValue::from_str(note.id.as_str()) {
        if !is_v1 {
            response.headers_mut().insert(AMZ_REQUEST_ID, id.clone());
        }
        response.headers_mut().insert(request_id::HEADER, id);
    }
    let (api, cache) = {
        let learned = note.learned();
        // HEADs and listings do not count as GETs of objects.
        (
            learned.api.unwrap_or(Api::S3),
            learned.cache.filter(|_| note.method == Method::GET),
        )
    };
    let status = response.status().as_u16();
    let (bucket, caller) = note.who();
    app.metrics
        .request(api, &note.method, status, &bucket, &caller);
    if response.status().is_success() && (cache.is_some() || api == Api::Batch) {
        app.metrics.first_byte(api, cache, note.began.elapsed());
    }
    flight.answered = true;
    let status = response.status();
    let expected = response.body().size_hint().exact();
    response.map(|body| Tracked {
        body,
        flight,
        told,
        status,
        api,
        cache,
        expected,
        sent: 0,
        end: End::Open,
    })
}

/// The date of an answer, by the clock as it is now. (The HTTP library's own date does not go back
/// when the clock is set back.)
pub fn date(clock: &dyn Clock) -> HeaderValue {
    thread_local! {
        /// A second since the epoch, and its date.
        static LAST: RefCell<(u32, HeaderValue)> = RefCell::new((0, dated(0)));
    }
    let now = clock.now_secs();
    LAST.with_borrow_mut(|(second, date)| {
        if *second != now {
            (*second, *date) = (now, dated(now));
        }
        date.clone()
    })
}

fn dated(second: u32) -> HeaderValue {
    HeaderValue::from_str(&http_date(i64::from(second) * 1000)).expect("letters, digits and colons")
}

/// A place among the requests in flight, or the reason why there is none.
fn admit(app: &App) -> (Option<Place>, Option<Error>) {
    if !app.ready.load(Relaxed) {
        app.metrics.refused_stopping.fetch_add(1, Relaxed);
        return (
            None,
            Some(
                Error::new(ErrorKind::ShuttingDown, "the node is stopping")
                    .hint("try another, or again in a while"),
            ),
        );
    }
    match app.in_flight.try_take() {
        Some(place) => (Some(place), None),
        None => {
            app.metrics.refused_overload.fetch_add(1, Relaxed);
            let e = Error::busy(format!(
                "too many requests are in flight: the limit of this node is {}",
                app.in_flight.most()
            ))
            .hint("try again later, or raise limits.requests_in_flight")
            .retry_after(Duration::from_secs(1));
            (None, Some(e))
        }
    }
}

/// HTTP/1.1 requires exactly one `Host`: proxies that read different ones would not agree on what
/// is requested.
fn check_host<B>(request: &Request<B>) -> Result<(), Error> {
    let mut hosts = request.headers().get_all(http::header::HOST).iter();
    let bad = |what: &str| {
        Err(Error::invalid(format!("the header Host {what}"))
            .hint("send one Host header, as in Host: 127.0.0.1:8080"))
    };
    match (hosts.next(), hosts.next()) {
        (None, _) if request.version() >= http::Version::HTTP_11 => bad("is missing"),
        (None, _) => Ok(()),
        (Some(_), Some(_)) => bad("is there twice"),
        (Some(host), None) if host.is_empty() => Ok(()),
        (Some(host), None) => match http::uri::Authority::try_from(host.as_bytes()) {
            Ok(authority) if !authority.as_str().contains('@') => Ok(()),
            _ => bad("does not name a host"),
        },
    }
}

fn check_browser<B>(app: &App, request: &Request<B>, peer: Peer) -> Result<(), Error> {
    if peer == Peer::Unix || app.access.open_to(peer).is_none() {
        return Ok(());
    }
    let config = app.config();
    let reached = browser::Reached {
        by_loopback: app.tls.is_none() && app.s3_addr.is_some_and(|a| a.ip().is_loopback()),
        hostnames: &config.listen.hostnames,
    };
    browser::check(&reached, request.method(), request.headers())
}

fn refuse(app: &App, note: &Note, path: &str, is_v1: bool, e: &Error) -> Response<AnswerBody> {
    // The body of a refused request is not read, so its connection cannot go on; hyper closes it
    // when the client has read why (`linger.rs`).
    if is_v1 {
        v1::refused(app, note, path, e)
    } else {
        s3::refused(e, path, note)
    }
}

/// A request in flight, from its head to the end of its answer. If it is dropped before there is an
/// answer, its client has left.
struct Flight {
    note: Arc<Note>,
    path: String,
    answered: bool,
    _place: Option<Place>,
}

impl Flight {
    fn begin(note: Arc<Note>, path: String, place: Option<Place>) -> Self {
        note.metrics.in_flight.fetch_add(1, Relaxed);
        Flight {
            note,
            path,
            answered: false,
            _place: place,
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let note = &self.note;
        note.metrics.in_flight.fetch_sub(1, Relaxed);
        if !self.answered {
            let learned = note.learned();
            note.metrics
                .abandoned
                .add(learned.api.unwrap_or(Api::S3), 1);
            tracing::info!(
                target: "forebay::request",
                id = %note.id,
                peer = %note.peer,
                caller = %learned.caller,
                user_agent = %learned.user_agent,
                method = %note.method,
                path = %self.path,
                bucket = %learned.bucket,
                key = %learned.key,
                ms = milliseconds(note.began.elapsed()),
                outcome = "abandoned before there was an answer",
            );
        }
    }
}

/// How an answer ended.
enum End {
    Open,
    Complete,
    Cut(String),
}

/// The body of an answer, tracked to its end.
pub struct Tracked {
    body: AnswerBody,
    flight: Flight,
    /// The request's id, if other nodes are to know it.
    told: Option<Arc<str>>,
    status: StatusCode,
    api: Api,
    cache: Option<forebay_core::CacheStatus>,
    /// The length in bytes, where it is known in advance.
    expected: Option<u64>,
    sent: u64,
    end: End,
}

impl Body for Tracked {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        let body = Pin::new(&mut this.body);
        let polled = match &this.told {
            Some(id) => forebay_core::request::sync_scope(id, || body.poll_frame(cx)),
            None => body.poll_frame(cx),
        };
        let polled = std::task::ready!(polled);
        match &polled {
            Some(Ok(frame)) => this.sent += frame.data_ref().map_or(0, |d| d.len() as u64),
            Some(Err(e)) => {
                this.end = End::Cut(match e.downcast_ref::<Error>() {
                    Some(e) => e.describe(),
                    None => e.to_string(),
                });
            }
            None => this.end = End::Complete,
        }
        Poll::Ready(polled)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        let note = self.flight.note.clone();
        let metrics = &note.metrics;
        let took = note.began.elapsed();
        // A body that was sent to its last announced byte is complete, whether or not it was polled
        // for its end.
        if matches!(self.end, End::Open)
            && (self.body.is_end_stream() || self.expected == Some(self.sent))
        {
            self.end = End::Complete;
        }
        let learned = note.learned();
        metrics.sent(self.api, &learned.bucket, &learned.caller, self.sent);
        let (outcome, error) = match &self.end {
            End::Complete => {
                if self.status.is_success() && (self.cache.is_some() || self.api == Api::Batch) {
                    metrics.finished(self.api, self.cache, took);
                }
                ("complete", learned.error.as_str())
            }
            End::Open => {
                metrics.abandoned.add(self.api, 1);
                ("abandoned", learned.error.as_str())
            }
            End::Cut(error) => {
                metrics.cut.add(self.api, 1);
                ("cut", error.as_str())
            }
        };
        let status = self.status.as_u16();
        macro_rules! line { ($level:ident) => {
            tracing::$level!(
                target: "forebay::request",
                id = %note.id,
                peer = %note.peer,
                caller = %learned.caller,
                user_agent = %learned.user_agent,
                api = self.api.as_str(),
                method = %note.method,
                path = %self.flight.path,
                bucket = %learned.bucket,
                key = %learned.key,
                status,
                bytes = self.sent,
                cache = learned.cache.map(|c| c.as_str()),
                ms = milliseconds(took),
                outcome,
                error = (!error.is_empty()).then_some(error),
            )
        } }
        if status >= 500 || matches!(self.end, End::Cut(_)) {
            line!(warn)
        } else {
            line!(info)
        }
    }
}
