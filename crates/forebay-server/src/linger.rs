//! Keeps reading for a moment what a client sends after it was answered.
//!
//! A request may be answered before its body is read: refused because of overload, a missing key or
//! its headers. Closing the connection over unread bytes resets it, and a client that is still
//! sending sees the reset instead of the answer. So a task that holds nothing else reads the rest
//! of the body away, within bounds.
//!
//! Invariants: this never tells a client to send that waits to be told (`Expect: 100-continue`).
//! Where such a client has its answer before a byte of its body came, the connection ends with the
//! answer ([`Unasked`]): the client may take the answer for the end of its request and send the next
//! one (botocore does), whose first bytes the HTTP library would take for the body.

use bytes::Bytes;
use http::{Request, header::EXPECT};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

const LINGER: Duration = Duration::from_secs(2);
const LINGER_MAX_BYTES: usize = 16 << 20;

/// The body of a request. When it is dropped, the rest of it is read away.
pub struct Lingering {
    inner: Option<Incoming>,
    /// Whether the client sends the body: unasked, or because we asked for it.
    coming: bool,
    /// Set once the client has begun to send what it waits to be asked for.
    begun: Option<Arc<AtomicBool>>,
}

/// Whether a client still waits to be told to send its body.
pub struct Unasked(Option<Arc<AtomicBool>>);

impl Unasked {
    /// True as long as nothing of a body has come that waits to be asked for. An answer that leaves
    /// now must close its connection.
    pub fn still(&self) -> bool {
        self.0.as_ref().is_some_and(|begun| !begun.load(Relaxed))
    }
}

impl Lingering {
    pub fn of(request: Request<Incoming>) -> (Request<Lingering>, Unasked) {
        let waits = request.headers().contains_key(EXPECT);
        let begun = (waits && !request.body().is_end_stream()).then(Arc::default);
        let unasked = Unasked(begun.clone());
        let lingering = request.map(|body| Lingering {
            inner: Some(body),
            coming: !waits,
            begun,
        });
        (lingering, unasked)
    }
}

impl Body for Lingering {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        this.coming = true;
        match &mut this.inner {
            None => Poll::Ready(None),
            Some(body) => {
                let polled = std::task::ready!(Pin::new(body).poll_frame(cx));
                if let Some(begun) = &this.begun {
                    begun.store(true, Relaxed);
                }
                // After its end or an error, the body yields nothing more.
                if !matches!(polled, Some(Ok(_))) {
                    this.inner = None;
                }
                Poll::Ready(polled)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        let rest = self
            .inner
            .take()
            .filter(|body| self.coming && !body.is_end_stream());
        // Without a runtime the process is ending, and the connection ends with it.
        if let (Some(body), Ok(runtime)) = (rest, tokio::runtime::Handle::try_current()) {
            runtime.spawn(tokio::time::timeout(LINGER, read_away(body)));
        }
    }
}

async fn read_away(mut body: Incoming) {
    let mut bytes = 0;
    while let Some(Ok(frame)) = body.frame().await {
        bytes += frame.data_ref().map_or(0, Bytes::len);
        if bytes > LINGER_MAX_BYTES {
            return;
        }
    }
}
