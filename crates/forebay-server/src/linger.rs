//! Reading on for a moment in what a client sends after it was answered.
//!
//! A request may be answered before its body is read: refused for overload, for want of a key, for
//! its headers. Closing the connection over unread bytes resets it, and a client that is still
//! sending sees the reset and not the answer. So what is left of a body is read away, within
//! bounds, by a task that holds nothing else.
//!
//! Invariant: a client that waits to be told to send (`Expect: 100-continue`) is not told so by
//! this.

use bytes::Bytes;
use http::{Request, header::EXPECT};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

const LINGER: Duration = Duration::from_secs(2);
const LINGER_MAX_BYTES: usize = 16 << 20;

/// The body of a request, whose rest is read away when it is dropped.
pub struct Lingering {
    inner: Option<Incoming>,
    /// Whether its client sends it: without being asked to, or asked by us.
    coming: bool,
}

impl Lingering {
    pub fn of(request: Request<Incoming>) -> Request<Lingering> {
        let coming = !request.headers().contains_key(EXPECT);
        request.map(|body| Lingering {
            inner: Some(body),
            coming,
        })
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
                // After its end, or an error, nothing more comes.
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
        // Without a runtime the process is ending, and the connection with it.
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
