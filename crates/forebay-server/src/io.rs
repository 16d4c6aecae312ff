//! A connection that is cut when its client reads nothing, or next to nothing, for too long.

use crate::pace::Pace;
use std::{
    future::Future,
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

pub struct Watched<S> {
    inner: S,
    timeout: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    /// Whether a write is waiting, with the timer running.
    waiting: bool,
    pace: Pace,
}

impl<S> Watched<S> {
    /// Cuts off a client that reads nothing for `timeout`, or less than `bytes_per_second` over
    /// that much waiting.
    pub fn new(inner: S, timeout: Duration, bytes_per_second: u64) -> Self {
        Watched {
            inner,
            timeout,
            timer: None,
            waiting: false,
            pace: Pace::new(timeout, bytes_per_second),
        }
    }

    /// The connection, unwatched.
    pub fn into_inner(self) -> S {
        self.inner
    }

    /// Like [`Watched::watch`], for writes of data: a client that reads too little is cut off too.
    fn watch_write(
        &mut self,
        cx: &mut Context<'_>,
        outcome: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        match &outcome {
            Poll::Pending => self.pace.wait(Instant::now()),
            Poll::Ready(Ok(n)) if !self.pace.moved(Instant::now(), *n as u64) => {
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the client read too slowly for too long",
                )));
            }
            Poll::Ready(_) => {}
        }
        self.watch(cx, outcome)
    }

    /// Passes a write's outcome on; one that waits too long becomes an error.
    fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        outcome: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.waiting = false;
            return outcome;
        }
        let timeout = self.timeout;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(timeout)));
        if !self.waiting {
            timer.as_mut().reset(Instant::now() + timeout);
            self.waiting = true;
        }
        match timer.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the client read nothing for too long",
            ))),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.inner).poll_write(cx, buf);
        this.watch_write(cx, outcome)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.inner).poll_write_vectored(cx, bufs);
        this.watch_write(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.inner).poll_flush(cx);
        this.watch(cx, outcome)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.inner).poll_shutdown(cx);
        this.watch(cx, outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn a_client_that_takes_nothing_is_cut() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut watched = Watched::new(near, Duration::from_millis(50), 0);
        watched.write_all(&[0; 64]).await.unwrap();
        let e = watched.write_all(&[0; 1]).await.unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::TimedOut);
        far.read_exact(&mut [0; 64]).await.unwrap();
        watched.write_all(&[0; 64]).await.unwrap();
    }

    #[tokio::test]
    async fn a_client_that_takes_a_byte_now_and_then_is_cut() {
        let (near, mut far) = tokio::io::duplex(8);
        let mut watched = Watched::new(near, Duration::from_millis(100), 10_000);
        let reader = tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(5)).await;
                if far.read_exact(&mut [0; 1]).await.is_err() {
                    return;
                }
            }
        });
        let e = watched.write_all(&[0; 1000]).await.unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::TimedOut);
        drop(watched);
        reader.await.unwrap();
    }
}
