//! A client's connection over TCP: plain, or TLS, where the first read or write makes the
//! handshake.
//!
//! So a connection that has only begun is counted, limited, refused and stopped like any other. A
//! client that speaks plain HTTP to a TLS port is told so in plain HTTP.
//!
//! Invariant: with a certificate, every byte of a request that is handed on came through TLS.

use crate::{metrics::Metrics, tls::Tls};
use forebay_tls::{Accept, ServerStream};
use std::{
    future::Future,
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Sleep, sleep},
};

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The first byte of TLS: a record of the handshake.
const HANDSHAKE_RECORD: u8 = 22;
/// How much of a plain request is read away, so that a reset does not swallow the answer.
const PLAIN_MAX_BYTES: usize = 1 << 20;
const PLAIN_ANSWER: &[u8] = b"HTTP/1.1 400 Bad Request\r\nServer: forebay\r\nContent-Type: text/plain\r\nContent-Length: 41\r\nConnection: close\r\n\r\n\
this port speaks TLS: use https:// there\n";

pub struct Wire {
    state: State,
    metrics: Arc<Metrics>,
}

enum State {
    Plain(TcpStream),
    /// Connected, and nothing has arrived yet.
    Fresh(TcpStream, Arc<Tls>, Pin<Box<Sleep>>),
    Handshake(Box<Accept>, Pin<Box<Sleep>>),
    Tls(Box<ServerStream>),
    /// The client was told that this port speaks TLS; this many bytes of its request were read
    /// away.
    Refused(TcpStream, usize),
    Failed,
}

impl Wire {
    pub fn new(stream: TcpStream, tls: Option<Arc<Tls>>, metrics: &Arc<Metrics>) -> Self {
        let state = match tls {
            None => State::Plain(stream),
            Some(tls) => State::Fresh(stream, tls, Box::pin(sleep(HANDSHAKE_TIMEOUT))),
        };
        Wire {
            state,
            metrics: metrics.clone(),
        }
    }

    /// Completes the handshake. Then there is a stream, except for a client that was refused.
    fn opened(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Stream<'_>>>> {
        if let Err(e) = ready!(self.shake_hands(cx)) {
            self.state = State::Failed;
            // A client that connects and leaves without a word has not tried.
            if e.kind() != io::ErrorKind::UnexpectedEof {
                self.metrics.tls_failed.fetch_add(1, Relaxed);
            }
            return Poll::Ready(Err(e));
        }
        Poll::Ready(match &mut self.state {
            State::Plain(stream) => Ok(Some(Stream::Plain(Pin::new(stream)))),
            State::Tls(stream) => Ok(Some(Stream::Tls(Pin::new(stream.as_mut())))),
            State::Refused(..) => Ok(None),
            State::Fresh(..) | State::Handshake(..) | State::Failed => {
                Err(io::Error::from(io::ErrorKind::NotConnected))
            }
        })
    }

    fn shake_hands(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            self.state = match std::mem::replace(&mut self.state, State::Failed) {
                State::Fresh(stream, tls, mut limit) => {
                    let mut first = [0];
                    match stream.poll_peek(cx, &mut ReadBuf::new(&mut first)) {
                        Poll::Pending => {
                            let over = limit.as_mut().poll(cx).is_ready();
                            self.state = State::Fresh(stream, tls, limit);
                            return if over {
                                Poll::Ready(Err(io::Error::from(io::ErrorKind::TimedOut)))
                            } else {
                                Poll::Pending
                            };
                        }
                        Poll::Ready(Err(e)) => return Poll::Ready(Err(e)),
                        Poll::Ready(Ok(0)) => {
                            return Poll::Ready(Err(io::Error::from(io::ErrorKind::UnexpectedEof)));
                        }
                        Poll::Ready(Ok(_)) if first[0] == HANDSHAKE_RECORD => {
                            State::Handshake(Box::new(tls.accept(stream)), limit)
                        }
                        Poll::Ready(Ok(_)) if first[0].is_ascii_uppercase() => {
                            // The send buffer of a new connection has room for it.
                            stream.try_write(PLAIN_ANSWER)?;
                            self.metrics.tls_failed.fetch_add(1, Relaxed);
                            State::Refused(stream, 0)
                        }
                        Poll::Ready(Ok(_)) => {
                            return Poll::Ready(Err(io::Error::other(
                                "the client does not speak TLS",
                            )));
                        }
                    }
                }
                State::Handshake(mut accept, mut limit) => match Pin::new(accept.as_mut()).poll(cx)
                {
                    Poll::Ready(stream) => State::Tls(Box::new(stream?)),
                    Poll::Pending => {
                        let over = limit.as_mut().poll(cx).is_ready();
                        self.state = State::Handshake(accept, limit);
                        return if over {
                            Poll::Ready(Err(io::Error::from(io::ErrorKind::TimedOut)))
                        } else {
                            Poll::Pending
                        };
                    }
                },
                done => {
                    self.state = done;
                    return Poll::Ready(Ok(()));
                }
            };
        }
    }

    /// Reads on what a refused client sends, and then reports end of file.
    fn read_away(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let State::Refused(stream, bytes) = &mut self.state else {
            return Poll::Ready(Ok(()));
        };
        let mut scratch = [0; 4096];
        while *bytes < PLAIN_MAX_BYTES {
            let mut buffer = ReadBuf::new(&mut scratch);
            ready!(Pin::new(&mut *stream).poll_read(cx, &mut buffer))?;
            match buffer.filled().len() {
                0 => break,
                n => *bytes += n,
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// The stream that bytes go through once the handshake is done.
enum Stream<'a> {
    Plain(Pin<&'a mut TcpStream>),
    Tls(Pin<&'a mut ServerStream>),
}

/// Makes the same call on either.
macro_rules! either {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream {
            Stream::Plain($inner) => $call,
            Stream::Tls($inner) => $call,
        }
    };
}

/// Nothing can be written to a client that was refused.
fn refused<T>() -> Poll<io::Result<T>> {
    Poll::Ready(Err(io::Error::from(io::ErrorKind::BrokenPipe)))
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(stream) = ready!(this.opened(cx))? {
            return either!(stream, s => s.poll_read(cx, buf));
        }
        this.read_away(cx)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match ready!(self.get_mut().opened(cx))? {
            Some(stream) => either!(stream, s => s.poll_write(cx, buf)),
            None => refused(),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match ready!(self.get_mut().opened(cx))? {
            Some(stream) => either!(stream, s => s.poll_write_vectored(cx, bufs)),
            None => refused(),
        }
    }

    fn is_write_vectored(&self) -> bool {
        // TLS gathers the slices into its records.
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().state {
            State::Plain(stream) => Pin::new(stream).poll_flush(cx),
            State::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
            // Nothing was written yet.
            _ => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().state {
            State::Plain(stream) | State::Fresh(stream, ..) | State::Refused(stream, _) => {
                Pin::new(stream).poll_shutdown(cx)
            }
            State::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
            State::Handshake(..) | State::Failed => Poll::Ready(Ok(())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_to_plain_http_is_whole() {
        let text = std::str::from_utf8(PLAIN_ANSWER).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Server: {}\r\n", forebay_protocol::SERVER)));
        assert!(
            head.contains(&format!("Content-Length: {}\r\n", body.len())),
            "{}",
            body.len()
        );
    }
}
