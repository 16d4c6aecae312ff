//! The client's side of HTTP/1.1, by hand: one blocking socket, one buffer that every read reuses,
//! and a parser for what the node answers.
//!
//! A load generator shares its cores with the server that it measures, so it may do little more
//! than receive. What it receives is handed on as slices of the one buffer. Invariant: a body is
//! handed on completely or [`Connection::body`] is an error: neither a connection that ends early
//! nor broken framing passes for the end of a body.

use forebay_core::{Error, ErrorKind, Result};
use std::{
    io::{ErrorKind as Io, Read, Write},
    net::{SocketAddr, TcpStream},
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::PathBuf,
    time::Duration,
};

/// An answer that is silent for this long is considered lost.
const SILENCE: Duration = Duration::from_secs(30);
/// Longest head, and longest line of the chunked framing.
const HEAD_MAX_BYTES: usize = 32 << 10;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Tcp(at) => write!(f, "{at}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

pub enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    pub fn connect(to: &Address) -> Result<Self> {
        let failed = |e: std::io::Error| {
            Error::new(
                ErrorKind::OriginUnavailable,
                format!("cannot connect to {to}: {e}"),
            )
            .caused_by(e)
        };
        let set = |e: std::io::Error| Error::internal(format!("socket option: {e}")).caused_by(e);
        Ok(match to {
            Address::Tcp(at) => {
                let stream = TcpStream::connect(at).map_err(failed)?;
                stream.set_nodelay(true).map_err(set)?;
                stream
                    .set_read_timeout(Some(SILENCE))
                    .and_then(|()| stream.set_write_timeout(Some(SILENCE)))
                    .map_err(set)?;
                Stream::Tcp(stream)
            }
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).map_err(failed)?;
                stream
                    .set_read_timeout(Some(SILENCE))
                    .and_then(|()| stream.set_write_timeout(Some(SILENCE)))
                    .map_err(set)?;
                Stream::Unix(stream)
            }
        })
    }

    pub fn raw_fd(&self) -> i32 {
        match self {
            Stream::Tcp(s) => s.as_raw_fd(),
            Stream::Unix(s) => s.as_raw_fd(),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.read(buf),
            Stream::Unix(s) => s.read(buf),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.write(buf),
            Stream::Unix(s) => s.write(buf),
        }
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What the head of an answer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub status: u16,
    pub framing: Framing,
    /// The server ends the connection after this answer.
    pub close: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    Length(u64),
    Chunked,
}

/// Requests a path: [`exchange`].
pub fn ask(from: &Address, path: &str) -> Result<(u16, Vec<u8>)> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    exchange(from, request.as_bytes())
}

/// One request and its small answer, on a connection of its own: status and body.
pub fn exchange(with: &Address, request: &[u8]) -> Result<(u16, Vec<u8>)> {
    let mut connection = Connection::new(Stream::connect(with)?, 0);
    connection.send(request)?;
    let head = connection.head()?;
    let mut answer = Vec::new();
    connection.body(&head, |piece| {
        answer.extend_from_slice(piece);
        Ok(())
    })?;
    Ok((head.status, answer))
}

/// The body of one small answer: counters, metrics.
pub fn fetch(from: &Address, path: &str) -> Result<Vec<u8>> {
    match ask(from, path)? {
        (200, answer) => Ok(answer),
        (status, _) => Err(Error::new(
            ErrorKind::OriginUnavailable,
            format!("{from}{path}: status {status}"),
        )),
    }
}

/// One keep-alive connection and its buffer: `buffer[start..end]` was received and not yet handed
/// on.
pub struct Connection<S = Stream> {
    stream: S,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl<S: Read + Write> Connection<S> {
    pub fn new(stream: S, buffer_bytes: usize) -> Self {
        Self {
            stream,
            buffer: vec![0; buffer_bytes.max(HEAD_MAX_BYTES)].into(),
            start: 0,
            end: 0,
        }
    }

    pub fn stream(&self) -> &S {
        &self.stream
    }

    pub fn send(&mut self, request: &[u8]) -> Result<()> {
        self.stream.write_all(request).map_err(|e| {
            Error::new(
                ErrorKind::OriginUnavailable,
                format!("cannot send a request: {e}"),
            )
            .caused_by(e)
        })
    }

    /// Receives more after what is there; 0: the server has ended the connection.
    fn fill(&mut self) -> Result<usize> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        loop {
            match self.stream.read(&mut self.buffer[self.end..]) {
                Ok(n) => {
                    self.end += n;
                    return Ok(n);
                }
                Err(e) if e.kind() == Io::Interrupted => {}
                Err(e) if matches!(e.kind(), Io::WouldBlock | Io::TimedOut) => {
                    return Err(Error::timeout(format!(
                        "the server was silent for {} s in mid-answer",
                        SILENCE.as_secs()
                    )));
                }
                Err(e) => {
                    return Err(Error::new(
                        ErrorKind::OriginUnavailable,
                        format!("cannot receive: {e}"),
                    )
                    .caused_by(e));
                }
            }
        }
    }

    fn fill_more(&mut self) -> Result<()> {
        match self.fill()? {
            0 => Err(cut()),
            _ => Ok(()),
        }
    }

    /// Receives whatever comes next, without any framing; returns the number of bytes. For the
    /// plain copy.
    pub fn raw(&mut self) -> Result<usize> {
        (self.start, self.end) = (0, 0);
        match self.fill()? {
            0 => Err(cut()),
            n => Ok(n),
        }
    }

    /// Receives the head of the next answer.
    pub fn head(&mut self) -> Result<Head> {
        let mut looked = 0;
        loop {
            let held = &self.buffer[self.start..self.end];
            // A terminator may be split between two receptions.
            let from = looked.min(held.len()).saturating_sub(3);
            if let Some(at) = held[from..].windows(4).position(|w| w == b"\r\n\r\n") {
                let head = parse_head(&held[..from + at + 2])?;
                self.start += from + at + 4;
                return Ok(head);
            }
            looked = held.len();
            if looked > HEAD_MAX_BYTES {
                return Err(malformed("a head that does not end"));
            }
            self.fill_more()?;
        }
    }

    /// Hands on the body of this answer in pieces; returns its length.
    pub fn body(&mut self, head: &Head, mut sink: impl FnMut(&[u8]) -> Result<()>) -> Result<u64> {
        match head.framing {
            Framing::Length(n) => self.pass(n, &mut sink).map(|()| n),
            Framing::Chunked => {
                let mut total = 0;
                loop {
                    let size = self.line(chunk_size)?;
                    if size == 0 {
                        // Trailers, up to an empty line.
                        while !self.line(|line| Ok(line.is_empty()))? {}
                        return Ok(total);
                    }
                    self.pass(size, &mut sink)?;
                    if !self.line(|line| Ok(line.is_empty()))? {
                        return Err(malformed("a chunk that is longer than it said"));
                    }
                    total += size;
                }
            }
        }
    }

    fn pass(&mut self, mut left: u64, sink: &mut impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        while left > 0 {
            if self.start == self.end {
                self.fill_more()?;
            }
            let n = ((self.end - self.start) as u64).min(left) as usize;
            sink(&self.buffer[self.start..self.start + n])?;
            self.start += n;
            left -= n as u64;
        }
        Ok(())
    }

    /// One line of the chunked framing, without its end.
    fn line<T>(&mut self, read: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
        loop {
            let held = &self.buffer[self.start..self.end];
            if let Some(at) = held.iter().take(HEAD_MAX_BYTES).position(|b| *b == b'\n') {
                let line = held[..at]
                    .strip_suffix(b"\r")
                    .ok_or_else(|| malformed("a line of the framing that does not end in CRLF"))?;
                let answer = read(line)?;
                self.start += at + 1;
                return Ok(answer);
            }
            if held.len() >= HEAD_MAX_BYTES {
                return Err(malformed("a line of the framing that does not end"));
            }
            self.fill_more()?;
        }
    }
}

fn chunk_size(line: &[u8]) -> Result<u64> {
    let digits = line.split(|b| *b == b';').next().unwrap_or_default();
    let text = std::str::from_utf8(digits).unwrap_or_default().trim();
    u64::from_str_radix(text, 16).map_err(|_| malformed("a chunk size that is not a number"))
}

fn parse_head(head: &[u8]) -> Result<Head> {
    let text = std::str::from_utf8(head).map_err(|_| malformed("a head that is not text"))?;
    let mut lines = text.split("\r\n");
    let status = lines
        .next()
        .and_then(|l| l.strip_prefix("HTTP/1."))
        .and_then(|l| l.get(2..5))
        .and_then(|s| s.parse().ok());
    let status: u16 = status.ok_or_else(|| malformed("something that is not HTTP/1.x"))?;
    let (mut length, mut chunked, mut close) = (None, false, false);
    for line in lines.filter(|l| !l.is_empty()) {
        let (name, value) = line
            .split_once(':')
            .ok_or_else(|| malformed("a header without a colon"))?;
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") {
            length = Some(
                value
                    .parse()
                    .map_err(|_| malformed("a Content-Length that is not a number"))?,
            );
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            chunked = value.eq_ignore_ascii_case("chunked");
        } else if name.eq_ignore_ascii_case("connection") {
            close = value.eq_ignore_ascii_case("close");
        }
    }
    let framing = match (chunked, length) {
        (true, _) => Framing::Chunked,
        (false, Some(n)) => Framing::Length(n),
        (false, None) if matches!(status, 204 | 304) => Framing::Length(0),
        (false, None) => {
            return Err(malformed(
                "a body whose end only the connection's end would tell",
            ));
        }
    };
    Ok(Head {
        status,
        framing,
        close,
    })
}

fn cut() -> Error {
    Error::new(
        ErrorKind::OriginUnavailable,
        "the server ended the connection in mid-answer",
    )
}

fn malformed(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the server sent {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Yields its bytes in pieces of `step`, then ends.
    struct Pieces {
        bytes: Vec<u8>,
        at: usize,
        step: usize,
    }

    impl Read for Pieces {
        fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
            let n = self.step.min(buf.len()).min(self.bytes.len() - self.at);
            buf[..n].copy_from_slice(&self.bytes[self.at..self.at + n]);
            self.at += n;
            Ok(n)
        }
    }

    impl Write for Pieces {
        fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
            Ok(buf.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn answers(bytes: &[u8], step: usize) -> Connection<Pieces> {
        Connection::new(
            Pieces {
                bytes: bytes.to_vec(),
                at: 0,
                step,
            },
            0,
        )
    }

    fn one(c: &mut Connection<Pieces>) -> Result<(u16, Vec<u8>)> {
        let head = c.head()?;
        let mut body = Vec::new();
        let n = c.body(&head, |piece| {
            body.extend_from_slice(piece);
            Ok(())
        })?;
        assert_eq!(n, body.len() as u64);
        Ok((head.status, body))
    }

    const LENGTH: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-LENGTH: 5\r\nX: y\r\n\r\nhello";
    const CHUNKED: &[u8] = b"HTTP/1.1 206 Partial\r\nTransfer-Encoding: chunked\r\nConnection: \
            close\r\n\r\n4;x=1\r\nwiki\r\nA\r\n0123456789\r\n0\r\nTrailer: 1\r\n\r\n";

    #[test]
    fn answers_are_read_however_they_are_cut_up() {
        let both = [LENGTH, CHUNKED, LENGTH].concat();
        for step in [1, 2, 3, 7, 64, 4096] {
            let mut c = answers(&both, step);
            assert_eq!(
                one(&mut c).unwrap(),
                (200, b"hello".to_vec()),
                "pieces of {step}"
            );
            let head = c.head().unwrap();
            assert_eq!(
                head,
                Head {
                    status: 206,
                    framing: Framing::Chunked,
                    close: true
                }
            );
            let mut body = Vec::new();
            c.body(&head, |p| {
                body.extend_from_slice(p);
                Ok(())
            })
            .unwrap();
            assert_eq!(body, b"wiki0123456789");
            assert_eq!(one(&mut c).unwrap().1, b"hello");
        }
    }

    #[test]
    fn an_answer_cut_anywhere_is_an_error() {
        for whole in [LENGTH, CHUNKED] {
            for end in 0..whole.len() {
                assert!(
                    one(&mut answers(&whole[..end], 16)).is_err(),
                    "cut after {end} of {:?}",
                    String::from_utf8_lossy(whole)
                );
            }
        }
    }

    #[test]
    fn what_is_not_an_answer_is_an_error() {
        let bad: [&[u8]; 6] = [
            b"HTTP/1.1 200 OK\r\n\r\nto the end of the connection",
            b"SMTP ready\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\nhello",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        ];
        for bytes in bad {
            assert!(
                one(&mut answers(bytes, 512)).is_err(),
                "{:?}",
                String::from_utf8_lossy(bytes)
            );
        }
        assert!(one(&mut answers(&[b'x'; 100_000], 4096)).is_err());
    }
}
