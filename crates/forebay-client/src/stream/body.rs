//! As much of HTTP/1.1 as a stream needs: one request, the head of its answer, and a chunked body
//! that is read straight into the memory it is meant for.
//!
//! An HTTP library would read into its own buffers, and payloads would have to be copied from
//! there. Here only the heads of frames and chunks go through a small buffer ([`SCRATCH_BYTES`]);
//! the rest of a payload goes from the socket straight to its destination.
//!
//! Invariant: a body ends properly only at its last chunk. A connection that ends anywhere else is
//! an error.

use crate::{Io, node::Node};
use forebay_core::{Error, Result, limits};
use forebay_protocol::ErrorDocument;
use http::{HeaderName, HeaderValue, header};
use std::{mem::MaybeUninit, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWriteExt, ReadBuf},
    time::timeout,
};

const SCRATCH_BYTES: usize = 4 << 10;
/// The longest head of an answer.
const HEAD_MAX_BYTES: usize = 64 << 10;
const HEADERS_MAX: usize = 100;
/// Interim answers (100 Continue and the like) before the one that counts.
const INTERIM_MAX: usize = 8;
/// The longest line before a chunk, or trailer.
const LINE_MAX_BYTES: usize = 4 << 10;
/// A node that sends nothing for this long may be gone: it misses a sign of life.
const SILENT_AFTER: Duration = Duration::from_secs(limits::STREAM_KEEP_ALIVE_SECS + 2);
/// How much is read of an answer that is not a stream.
const REFUSAL_MAX_BYTES: usize = 256 << 10;

/// An answer whose body has not been read yet.
pub struct Body {
    io: Box<dyn Io>,
    patience: Patience,
    scratch: Box<[u8; SCRATCH_BYTES]>,
    at: usize,
    end: usize,
    framing: Framing,
}

/// How long the other side may be silent.
#[derive(Clone)]
pub struct Patience {
    /// Then it is given up.
    pub silence: Duration,
    /// A node in whose place another one could be asked, and how long connecting to it may take:
    /// when it is silent, one looks whether it is there at all. A machine that is gone closes no
    /// connection.
    pub replaceable: Option<(Arc<Node>, Duration)>,
}

impl Patience {
    /// Returns when the node is gone.
    async fn is_gone(&self) {
        match &self.replaceable {
            Some((node, limit)) => node.is_gone(SILENT_AFTER, *limit).await,
            None => std::future::pending().await,
        }
    }
}

enum Framing {
    Chunked { left: u64, first: bool },
    Length(u64),
    ToTheEnd,
    Ended,
}

/// The head of an answer.
struct Head {
    status: u16,
    headers: Vec<(String, String)>,
}

impl Head {
    /// Parses a complete head. Values that are not text are left out: nothing here looks at them.
    fn parse(bytes: &[u8]) -> Option<Head> {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut response = httparse::Response::new(&mut headers);
        let parsed = response.parse(bytes).ok()?;
        if !parsed.is_complete() || response.version != Some(1) {
            return None;
        }
        let text = |h: &httparse::Header<'_>| {
            let value = std::str::from_utf8(h.value).ok()?;
            Some((h.name.to_owned(), value.trim().to_owned()))
        };
        Some(Head {
            status: response.code?,
            headers: response.headers.iter().filter_map(text).collect(),
        })
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, v)| v.as_str())
    }
}

fn broken(what: impl std::fmt::Display) -> Error {
    Error::origin_unavailable(format!("the connection broke: {what}"))
}

/// The parts of a request.
pub struct Request<'a> {
    pub path: &'a str,
    pub headers: &'a [(HeaderName, HeaderValue)],
    pub body: &'a [u8],
}

impl Body {
    /// Sends the request and reads the head of its answer.
    ///
    /// # Errors
    /// The node's own error if it answers with one; `OriginUnavailable` and `Timeout` if it does
    /// not answer.
    pub async fn open(
        mut io: Box<dyn Io>,
        request: Request<'_>,
        patience: Patience,
    ) -> Result<Body> {
        let mut head = format!("POST {} HTTP/1.1\r\n", request.path).into_bytes();
        for (name, value) in request.headers {
            head.extend_from_slice(name.as_str().as_bytes());
            head.extend_from_slice(b": ");
            head.extend_from_slice(value.as_bytes());
            head.extend_from_slice(b"\r\n");
        }
        head.extend_from_slice(
            format!(
                "content-type: application/json\r\ncontent-length: {}\r\n\r\n",
                request.body.len()
            )
            .as_bytes(),
        );
        let sent = async {
            io.write_all(&head).await?;
            io.write_all(request.body).await?;
            io.flush().await
        };
        timeout(patience.silence, sent)
            .await
            .map_err(|_| Error::timeout("the node did not read the request in time"))?
            .map_err(broken)?;
        let scratch = Box::new([0; SCRATCH_BYTES]);
        let mut body = Body {
            io,
            patience,
            scratch,
            at: 0,
            end: 0,
            framing: Framing::ToTheEnd,
        };
        let head = body.head().await?;
        body.framing = match (head.get("transfer-encoding"), head.get("content-length")) {
            (Some(coding), _) if coding.trim().eq_ignore_ascii_case("chunked") => {
                Framing::Chunked {
                    left: 0,
                    first: true,
                }
            }
            (Some(coding), _) => {
                return Err(broken(format!(
                    "the answer has the content coding {coding:?}, which streams do not use"
                )));
            }
            (None, Some(length)) => Framing::Length(
                length
                    .trim()
                    .parse()
                    .map_err(|_| broken("the length of the answer is not a number"))?,
            ),
            (None, None) => Framing::ToTheEnd,
        };
        match head.status {
            200 if matches!(body.framing, Framing::Chunked { .. }) => Ok(body),
            // Without chunks, the end of the connection would pass for the end of the stream.
            200 => Err(
                Error::unsupported("the stream did not come in chunks").hint(
                    "a proxy in between may speak HTTP/1.0: in nginx set proxy_http_version 1.1",
                ),
            ),
            status => {
                let text = body.rest(REFUSAL_MAX_BYTES).await.unwrap_or_default();
                let mut headers = request.headers.iter();
                let host = headers.find(|(name, _)| name == header::HOST);
                let host = host.and_then(|(_, host)| host.to_str().ok());
                let host = host.unwrap_or("this address");
                Err(ErrorDocument::read(host, status, |name| head.get(name), &text).to_error())
            }
        }
    }

    async fn head(&mut self) -> Result<Head> {
        for _ in 0..=INTERIM_MAX {
            let mut bytes = Vec::new();
            while !bytes.ends_with(b"\r\n\r\n") && !bytes.ends_with(b"\n\n") {
                if bytes.len() == HEAD_MAX_BYTES {
                    return Err(broken("the head of an answer is too long"));
                }
                bytes.push(self.byte().await?);
            }
            let head = Head::parse(&bytes).ok_or_else(|| broken("the answer is not HTTP/1.1"))?;
            if head.status >= 200 {
                return Ok(head);
            }
        }
        Err(broken("interim answers only"))
    }

    async fn byte(&mut self) -> Result<u8> {
        if self.at == self.end && self.fill().await? == 0 {
            return Err(broken("it ended in the head of an answer or of a chunk"));
        }
        let byte = self.scratch[self.at];
        self.at += 1;
        Ok(byte)
    }

    /// A line of the chunked encoding, without its end. `total` limits the lines at one place
    /// together.
    async fn line(&mut self, total: &mut usize) -> Result<String> {
        let mut line = Vec::new();
        loop {
            match self.byte().await? {
                b'\n' => break,
                byte => line.push(byte),
            }
            *total += 1;
            if *total > LINE_MAX_BYTES {
                return Err(broken("the line before a chunk is too long"));
            }
        }
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        String::from_utf8(line).map_err(|_| broken("the line before a chunk is not text"))
    }

    /// Reads into the empty scratch buffer; 0 at the end of the connection.
    async fn fill(&mut self) -> Result<usize> {
        let n = receive(
            &mut self.io,
            &self.patience,
            &mut ReadBuf::new(&mut self.scratch[..]),
        )
        .await?;
        (self.at, self.end) = (0, n);
        Ok(n)
    }

    /// How many bytes may be read as body now; 0 at its proper end.
    async fn open_chunk(&mut self) -> Result<u64> {
        let (left, first) = match &self.framing {
            Framing::Ended => return Ok(0),
            Framing::Length(left) => return Ok(*left),
            Framing::ToTheEnd => return Ok(u64::MAX),
            Framing::Chunked { left, first } => (*left, *first),
        };
        if left > 0 {
            return Ok(left);
        }
        let mut total = 0;
        if !first && !self.line(&mut total).await?.is_empty() {
            return Err(broken("a chunk is longer than was announced"));
        }
        let line = self.line(&mut total).await?;
        let digits = line.split(';').next().unwrap_or_default().trim();
        let size = u64::from_str_radix(digits, 16)
            .map_err(|_| broken(format!("{line:?} is not the length of a chunk")))?;
        self.framing = Framing::Chunked {
            left: size,
            first: false,
        };
        if size == 0 {
            while !self.line(&mut total).await?.is_empty() {}
            self.framing = Framing::Ended;
        }
        Ok(size)
    }

    fn took(&mut self, n: u64) {
        match &mut self.framing {
            Framing::Chunked { left, .. } | Framing::Length(left) => *left -= n,
            Framing::ToTheEnd | Framing::Ended => {}
        }
    }

    /// Reads some bytes of the body, at most as many as `out` has room for; 0 at its proper end.
    pub async fn read(&mut self, out: &mut [MaybeUninit<u8>]) -> Result<usize> {
        let open = self.open_chunk().await?;
        let most = usize::try_from(open).unwrap_or(usize::MAX).min(out.len());
        if most == 0 {
            return Ok(0);
        }
        if self.at == self.end && most < SCRATCH_BYTES {
            let filled = self.fill().await?;
            if filled == 0 {
                return self.ended();
            }
        }
        let n = if self.at < self.end {
            let n = most.min(self.end - self.at);
            for (to, from) in out[..n].iter_mut().zip(&self.scratch[self.at..self.at + n]) {
                to.write(*from);
            }
            self.at += n;
            n
        } else {
            let n = receive(
                &mut self.io,
                &self.patience,
                &mut ReadBuf::uninit(&mut out[..most]),
            )
            .await?;
            if n == 0 {
                return self.ended();
            }
            n
        };
        self.took(n as u64);
        Ok(n)
    }

    fn ended(&mut self) -> Result<usize> {
        match self.framing {
            Framing::ToTheEnd => {
                self.framing = Framing::Ended;
                Ok(0)
            }
            _ => Err(broken("it ended in the middle of an answer")),
        }
    }

    /// Fills `out`; false if the body has ended properly before its first byte.
    pub async fn read_exact(&mut self, out: &mut [u8]) -> Result<bool> {
        let mut at = 0;
        while at < out.len() {
            let left = &mut out[at..];
            // SAFETY: initialized memory may be passed where uninitialized memory is expected;
            // `read` only writes bytes into it.
            let left = unsafe { &mut *(std::ptr::from_mut(left) as *mut [MaybeUninit<u8>]) };
            match self.read(left).await? {
                0 if at == 0 => return Ok(false),
                0 => return Err(broken("the answer ended in the middle of a frame")),
                n => at += n,
            }
        }
        Ok(true)
    }

    /// The rest of a short body.
    async fn rest(&mut self, most: usize) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        let mut piece = [0; 1024];
        while all.len() < most {
            // SAFETY: as in `read_exact`.
            let room =
                unsafe { &mut *(std::ptr::from_mut(&mut piece[..]) as *mut [MaybeUninit<u8>]) };
            match self.read(room).await? {
                0 => break,
                n => all.extend_from_slice(&piece[..n]),
            }
        }
        Ok(all)
    }
}

/// Reads once from the socket; 0 at its end.
async fn receive(
    io: &mut Box<dyn Io>,
    patience: &Patience,
    out: &mut ReadBuf<'_>,
) -> Result<usize> {
    let before = out.filled().len();
    let silent = |silence: Duration| {
        Error::timeout(format!(
            "the node sent nothing for {} s in the middle of a stream",
            silence.as_secs_f32()
        ))
    };
    let read = timeout(
        patience.silence,
        std::future::poll_fn(|cx| std::pin::Pin::new(&mut *io).poll_read(cx, out)),
    );
    // The second is not even begun where there is something to read.
    let read = tokio::select! {
        biased;
        read = read => read,
        () = patience.is_gone() => {
            return Err(silent(SILENT_AFTER).hint("it does not answer anything else either"));
        }
    };
    match read {
        Ok(Ok(())) => Ok(out.filled().len() - before),
        Ok(Err(e)) => Err(broken(e)),
        Err(_) => Err(silent(patience.silence)),
    }
}
