//! The HTTP client under the S3 and web origins: one connection pool per origin, with timeouts
//! where hanging is possible and none where a large body is merely large.
//!
//! HTTP/1.1 on purpose: each body has its own connection, and no shared flow-control window caps it
//! over long distances.

use crate::{
    ByteStream,
    config::OriginConfig,
    failure::{self, Site},
};
use bytes::Bytes;
use forebay_core::{Error, Result, sync::Mutex};
use futures::{StreamExt, TryStreamExt, stream};
use http::{HeaderMap, Method};
use std::{
    fmt,
    sync::{Arc, Once},
    task::Poll,
    time::Duration,
};
use tokio::time::Instant;

/// Error documents longer than this are cut.
const ERROR_BODY_MAX_BYTES: usize = 16 << 10;
/// Bodies in memory go out in pieces of this size: how far one has got can then be seen.
const PIECE_BYTES: usize = 64 << 10;
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Makes *ring* the process's TLS provider, once; a provider that the program chose earlier stays.
pub(crate) fn install_tls_provider() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // An error means that one is already installed, which is enough.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

/// What a request carries.
pub(crate) enum Payload {
    Empty,
    Bytes(Bytes),
    /// A stream of a known length.
    Stream(u64, ByteStream),
    /// The same, for a body that is already framed (`s3/trailed.rs`).
    Framed(u64, ByteStream),
}

/// The cause of a failure to send a body: the connection broke before there was an answer.
#[derive(Debug)]
pub(crate) struct Broken {
    /// Bytes that were handed to the connection. Some of them may not have been sent.
    taken: u64,
    length: u64,
}

impl Broken {
    pub(crate) fn of(e: &Error) -> Option<&Broken> {
        std::error::Error::source(e)?.downcast_ref()
    }

    /// Whether the service has certainly not had the whole body: it has made nothing of it, then.
    pub(crate) fn is_cut_short(&self) -> bool {
        self.taken < self.length
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { taken, length } = self;
        write!(
            f,
            "{taken} of the {length} bytes of the body were on their way"
        )
    }
}

impl std::error::Error for Broken {}

pub(crate) struct Transport {
    client: reqwest::Client,
    idle_timeout: Duration,
}

/// How a client treats redirects: S3 redirects for wrong regions, web servers for moved files.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redirects {
    Refuse,
    Follow,
}

/// A client for one endpoint, with the right authorities, timeouts and proxy.
pub(crate) fn client(
    config: &OriginConfig,
    endpoint: &url::Url,
    redirects: Redirects,
) -> Result<reqwest::Client> {
    install_tls_provider();
    let roots = match &config.ca_file {
        None => Vec::new(),
        Some(path) => {
            let bad = |e: String| {
                Error::invalid(format!("ca_file {}: {e}", path.display()))
                    .hint("it must be a file of PEM certificates")
            };
            let pem = std::fs::read(path).map_err(|e| bad(e.to_string()))?;
            reqwest::Certificate::from_pem_bundle(&pem).map_err(|e| bad(e.to_string()))?
        }
    };
    let builder = |own_roots_only: bool| {
        let mut b = reqwest::Client::builder()
            .user_agent(concat!("forebay/", env!("CARGO_PKG_VERSION")))
            .http1_only()
            .connect_timeout(config.connect_timeout)
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            .pool_max_idle_per_host(config.requests_in_flight)
            .tcp_keepalive(Duration::from_secs(30))
            .redirect(match redirects {
                Redirects::Refuse => reqwest::redirect::Policy::none(),
                Redirects::Follow => reqwest::redirect::Policy::limited(5),
            });
        b = if own_roots_only {
            b.tls_certs_only(roots.clone())
        } else {
            b.tls_certs_merge(roots.clone())
        };
        // A proxy from the environment cannot reach this machine's own loopback, nor the services
        // that each machine has for itself.
        if is_loopback(endpoint) || is_link_local(endpoint) {
            b.no_proxy()
        } else {
            b
        }
    };
    let client = match builder(false).build() {
        // A machine without a certificate store can still use plain HTTP.
        Err(_) if endpoint.scheme() == "http" => builder(true).build(),
        other => other,
    };
    client.map_err(|e| {
        Error::invalid(format!(
            "the HTTP client for {} cannot be created: {e}",
            endpoint.origin().ascii_serialization()
        ))
        .hint("install the ca-certificates package, or set ca_file")
    })
}

impl Transport {
    pub(crate) fn new(
        config: &OriginConfig,
        endpoint: &url::Url,
        redirects: Redirects,
    ) -> Result<Self> {
        Ok(Self {
            client: client(config, endpoint, redirects)?,
            idle_timeout: config.idle_timeout,
        })
    }

    /// Sends, and waits at most the idle timeout for the headers of the answer. While the service takes
    /// a body, that timeout begins anew with each piece of it: over a slow link, 8 MiB take long.
    pub(crate) async fn send(
        &self,
        site: Site<'_>,
        method: Method,
        url: url::Url,
        headers: HeaderMap,
        payload: Payload,
    ) -> Result<reqwest::Response> {
        let mut request = reqwest::Request::new(method, url);
        *request.headers_mut() = headers;
        match payload {
            Payload::Empty => {}
            Payload::Bytes(bytes) if bytes.len() > PIECE_BYTES => {
                let length = bytes.len() as u64;
                request
                    .headers_mut()
                    .insert(http::header::CONTENT_LENGTH, length.into());
                return self
                    .send_stream(site, request, length, pieces_of(bytes))
                    .await;
            }
            Payload::Bytes(bytes) => *request.body_mut() = Some(bytes.into()),
            Payload::Stream(length, body) | Payload::Framed(length, body) => {
                request
                    .headers_mut()
                    .insert(http::header::CONTENT_LENGTH, length.into());
                return self.send_stream(site, request, length, body).await;
            }
        }
        match tokio::time::timeout(self.idle_timeout, self.client.execute(request)).await {
            Ok(answer) => answer.map_err(|e| failure::from_transport(site, &e)),
            Err(_) => Err(no_answer(site, self.idle_timeout)),
        }
    }

    /// A streamed body: the wait for the service counts only from when the last piece was taken
    /// from the body, not while waiting for the body itself, which may be paced or come from a slow
    /// sender. If the body fails, its error is the one reported.
    async fn send_stream(
        &self,
        site: Site<'_>,
        mut request: reqwest::Request,
        length: u64,
        body: ByteStream,
    ) -> Result<reqwest::Response> {
        struct Progress {
            /// When the service was last seen to take something; `None` while waiting for the body.
            since: Option<Instant>,
            /// Bytes that were taken from the body.
            taken: u64,
            error: Option<Error>,
        }
        let progress = Arc::new(Mutex::new(Progress {
            since: Some(Instant::now()),
            taken: 0,
            error: None,
        }));
        let (seen, mut body) = (progress.clone(), body);
        let body = stream::poll_fn(move |context| {
            let next = body.poll_next_unpin(context);
            let mut progress = seen.lock();
            progress.since = next.is_ready().then(Instant::now);
            match &next {
                Poll::Ready(Some(Ok(piece))) => progress.taken += piece.len() as u64,
                Poll::Ready(Some(Err(e))) => progress.error = Some(e.clone()),
                _ => {}
            }
            next
        });
        *request.body_mut() = Some(reqwest::Body::wrap_stream(body));
        let failed = |e: reqwest::Error| {
            let (own, taken) = {
                let mut progress = progress.lock();
                (progress.error.take(), progress.taken)
            };
            match own {
                Some(own) => own,
                None if e.is_connect() || e.is_timeout() => failure::from_transport(site, &e),
                None => failure::from_transport(site, &e).caused_by(Broken { taken, length }),
            }
        };
        let answer = self.client.execute(request);
        tokio::pin!(answer);
        loop {
            let since = progress.lock().since.unwrap_or_else(Instant::now);
            tokio::select! {
                answer = &mut answer => return answer.map_err(failed),
                () = tokio::time::sleep_until(since + self.idle_timeout) => {
                    let since = progress.lock().since;
                    if since.is_some_and(|s| s + self.idle_timeout <= Instant::now()) {
                        return Err(no_answer(site, self.idle_timeout));
                    }
                }
            }
        }
    }

    /// A body that ends with an error when it has been silent for the idle timeout.
    pub(crate) fn unstalled(&self, site: Site<'_>, body: ByteStream) -> ByteStream {
        let after = self.idle_timeout;
        let silent = no_answer(site, after);
        futures::stream::unfold(Some((body, silent)), move |state| async move {
            let (mut body, silent) = state?;
            match tokio::time::timeout(after, body.next()).await {
                Ok(Some(Ok(piece))) => Some((Ok(piece), Some((body, silent)))),
                Ok(Some(Err(e))) => Some((Err(e), None)),
                Ok(None) => None,
                Err(_) => Some((Err(silent), None)),
            }
        })
        .boxed()
    }

    /// The rest of an error answer, cut at a limit.
    pub(crate) async fn error_text(&self, answer: reqwest::Response) -> String {
        let mut text = Vec::new();
        let mut body = answer.bytes_stream();
        let reading = async {
            while let Some(Ok(chunk)) = body.next().await {
                text.extend_from_slice(
                    &chunk[..chunk.len().min(ERROR_BODY_MAX_BYTES - text.len())],
                );
                if text.len() >= ERROR_BODY_MAX_BYTES {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(self.idle_timeout.min(Duration::from_secs(5)), reading).await;
        String::from_utf8_lossy(&text).into_owned()
    }

    /// A whole answer of at most `limit` bytes. A service may take long to complete an upload and
    /// send spaces meanwhile.
    pub(crate) async fn text(
        &self,
        site: Site<'_>,
        answer: reqwest::Response,
        limit: u64,
    ) -> Result<String> {
        let mut body = body_of(site, answer);
        let mut text = Vec::new();
        loop {
            match tokio::time::timeout(self.idle_timeout, body.try_next()).await {
                Err(_) => return Err(no_answer(site, self.idle_timeout)),
                Ok(Err(e)) => return Err(e),
                Ok(Ok(None)) => break,
                Ok(Ok(Some(chunk))) => text.extend_from_slice(&chunk),
            }
            if text.len() as u64 > limit {
                return Err(Error::corrupt(format!(
                    "{} at {}: the answer is longer than {limit} bytes",
                    site.operation, site.origin
                )));
            }
        }
        String::from_utf8(text).map_err(|_| {
            Error::corrupt(format!(
                "{} at {}: the answer is not UTF-8",
                site.operation, site.origin
            ))
        })
    }
}

/// A body in memory as a stream.
fn pieces_of(mut bytes: Bytes) -> ByteStream {
    let pieces = std::iter::from_fn(move || {
        let piece = bytes.split_to(bytes.len().min(PIECE_BYTES));
        (!piece.is_empty()).then_some(Ok(piece))
    });
    stream::iter(pieces).boxed()
}

/// The body of an answer; transport errors name the object.
pub(crate) fn body_of(site: Site<'_>, answer: reqwest::Response) -> ByteStream {
    let (origin, operation, key) = (
        site.origin.to_owned(),
        site.operation.to_owned(),
        site.key.to_owned(),
    );
    answer
        .bytes_stream()
        .map_err(move |e| {
            failure::from_transport(
                Site {
                    origin: &origin,
                    operation: &operation,
                    key: &key,
                },
                &e,
            )
        })
        .boxed()
}

fn no_answer(site: Site<'_>, after: Duration) -> Error {
    Error::timeout(format!(
        "{} {:?}: {} did not answer within {after:?}",
        site.operation,
        forebay_core::name::shorten(site.key),
        site.origin
    ))
    .hint("check the origin, or raise idle_timeout")
}

pub(crate) fn is_loopback(url: &url::Url) -> bool {
    match url.host() {
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        Some(url::Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        None => false,
    }
}

/// Metadata services: 169.254.0.0/16, and Amazon's in IPv6, fd00:ec2::/32.
fn is_link_local(url: &url::Url) -> bool {
    match url.host() {
        Some(url::Host::Ipv4(ip)) => ip.is_link_local(),
        Some(url::Host::Ipv6(ip)) => ip.segments()[..2] == [0xfd00, 0xec2],
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
        time::sleep,
    };

    /// A service that takes the first quarter of a body slowly, and answers when it has all of it.
    async fn slow(listener: TcpListener, length: usize) {
        let (mut io, _) = listener.accept().await.unwrap();
        let (mut piece, mut head) = (vec![0; 256 << 10], Vec::new());
        let mut came = loop {
            let n = io.read(&mut piece).await.unwrap();
            assert!(n > 0, "the client went away");
            head.extend_from_slice(&piece[..n]);
            if let Some(at) = head.windows(4).position(|w| w == b"\r\n\r\n") {
                break head.len() - (at + 4);
            }
        };
        while came < length {
            if came < length / 4 {
                sleep(Duration::from_millis(120)).await;
            }
            let n = io.read(&mut piece).await.unwrap();
            assert!(n > 0, "the client went away");
            came += n;
        }
        io.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn a_body_in_memory_may_take_longer_than_the_idle_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let url = url::Url::parse(&format!("http://{address}/o")).unwrap();
        let config = OriginConfig {
            idle_timeout: Duration::from_secs(3),
            ..OriginConfig::default()
        };
        let transport = Transport::new(&config, &url, Redirects::Refuse).unwrap();
        let site = Site {
            origin: "here",
            operation: "put",
            key: "o",
        };
        // More than the buffers of a connection take at once.
        let body = Bytes::from(vec![7; 32 << 20]);
        let service = tokio::spawn(slow(listener, body.len()));
        let began = Instant::now();
        let payload = Payload::Bytes(body);
        let sent = transport.send(site, Method::PUT, url, HeaderMap::new(), payload);
        assert!(sent.await.unwrap().status().is_success());
        assert!(began.elapsed() > config.idle_timeout);
        service.await.unwrap();
    }
}
