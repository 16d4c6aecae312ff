//! The body of a request. It is given up when it is silent, or almost silent, for too long.

use crate::{body::BoxError, linger::Lingering, pace::Pace};
use bytes::Bytes;
use forebay_core::{Error, MemoryBudget, Reservation};
use http_body::{Body, Frame, SizeHint};
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::{Instant, Sleep, sleep};

pub struct UploadBody {
    inner: Lingering,
    timeout: Duration,
    /// Armed while waiting for a piece.
    timer: Option<Pin<Box<Sleep>>>,
    armed: bool,
    pace: Pace,
}

impl UploadBody {
    /// Gives up after a silence of `timeout`, or at less than `bytes_per_second` over that much
    /// waiting.
    pub fn new(inner: Lingering, timeout: Duration, bytes_per_second: u64) -> Self {
        UploadBody {
            inner,
            timeout,
            timer: None,
            armed: false,
            pace: Pace::new(timeout, bytes_per_second),
        }
    }
}

impl Body for UploadBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if let Poll::Ready(frame) = Pin::new(&mut this.inner).poll_frame(cx) {
            this.armed = false;
            let bytes = frame
                .as_ref()
                .and_then(|f| f.as_ref().ok())
                .and_then(|f| f.data_ref())
                .map_or(0, Bytes::len);
            if frame.is_some() && !this.pace.moved(Instant::now(), bytes as u64) {
                let e = Error::invalid(format!(
                    "the upload brought too little in {:?}",
                    this.timeout
                ));
                return Poll::Ready(Some(Err(e
                    .hint("limits.slowest_client is the limit")
                    .into())));
            }
            return Poll::Ready(frame.map(|f| {
                f.map_err(|e| {
                    Error::invalid(format!("the upload broke off: {e}"))
                        .hint("send it again")
                        .into()
                })
            }));
        }
        this.pace.wait(Instant::now());
        let timeout = this.timeout;
        let timer = this.timer.get_or_insert_with(|| Box::pin(sleep(timeout)));
        if !this.armed {
            timer.as_mut().reset(Instant::now() + timeout);
            this.armed = true;
        }
        match timer.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(Some(Err(Error::invalid(format!(
                "the upload was silent for {timeout:?}"
            ))
            .hint("limits.body_timeout is the limit")
            .into()))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// How large a body may grow before its memory is taken from the budget.
const UNRESERVED_BYTES: u64 = 256 << 10;

/// Reads a whole body of at most `limit` bytes. Large bodies come with their share of the memory
/// budget.
///
/// # Errors
/// `TooLarge` over the limit, `Busy` if the budget is used up, or the error that broke the upload
/// off.
pub async fn read_all(
    mut body: UploadBody,
    limit: usize,
    budget: &MemoryBudget,
) -> forebay_core::Result<(Bytes, Vec<Reservation>)> {
    use http_body_util::BodyExt;
    let too_large = || {
        Error::new(
            forebay_core::ErrorKind::TooLarge,
            format!("the body of the request is larger than {limit} bytes"),
        )
    };
    let announced = body.size_hint().exact();
    if announced.is_some_and(|n| n > limit as u64) {
        return Err(too_large());
    }
    let (mut held, mut allowed) = (Vec::new(), UNRESERVED_BYTES);
    let mut reserve = |total: u64| -> forebay_core::Result<()> {
        if total > allowed {
            // Grows like a buffer: at least doubles, so that there are few reservations, but never
            // beyond what was announced. Only what has arrived is held: an announcement costs
            // nothing.
            let most = announced.map_or(u64::MAX, |n| n.saturating_sub(allowed));
            let more = (total - allowed).max(allowed.min(most));
            held.push(
                budget
                    .try_hold(more)
                    .map_err(|e| e.context("the body of the request"))?,
            );
            allowed += more;
        }
        Ok(())
    };
    let mut first: Option<Bytes> = None;
    let mut all = bytes::BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| match e.downcast::<Error>() {
            Ok(e) => *e,
            Err(e) => Error::invalid(e.to_string()),
        })?;
        let Ok(piece) = frame.into_data() else {
            continue;
        };
        let total = all.len() + first.as_ref().map_or(0, Bytes::len) + piece.len();
        if total > limit {
            return Err(too_large());
        }
        reserve(total as u64)?;
        // A single piece, the usual case for small bodies, is not copied.
        match (first.take(), all.is_empty()) {
            (None, true) => first = Some(piece),
            (Some(one), _) => {
                all.extend_from_slice(&one);
                all.extend_from_slice(&piece);
            }
            (None, false) => all.extend_from_slice(&piece),
        }
    }
    Ok((first.unwrap_or_else(|| all.freeze()), held))
}
