//! `aws-chunked` bodies from clients whose signatures are not checked.
//!
//! SDKs frame uploads as `SIZE[;chunk-signature=…]\r\nDATA\r\n…0\r\nTRAILERS\r\n` even where nobody
//! checks the signatures, as on loopback without keys. The S3 library undoes the framing only
//! together with checking the signature, so this module undoes it without. Trailers hold checksums,
//! which are checked.
//!
//! Where each chunk has its own signature, the library undoes the framing, and keeps a whole chunk
//! before it gives any of it out. [`bounded`] makes sure that it does not keep much, and that what
//! it keeps is taken from the memory budget.
//!
//! Invariant: the body succeeds only after its final chunk; one that breaks off earlier is an
//! error.

use bytes::{Buf, Bytes, BytesMut};
use forebay_core::{Error, ErrorKind, MemoryBudget, Reservation, Result, sync::Mutex};
use forebay_engine::ByteStream;
use futures::{StreamExt, stream};
use http::{HeaderMap, HeaderName, HeaderValue};
use std::sync::Arc;

const LINE_MAX_BYTES: usize = 1024;
const TRAILERS_MAX_BYTES: usize = 16 << 10;

/// The largest chunk with its own signature. SDKs send 64 KiB to 1 MiB.
pub const SIGNED_CHUNK_MAX_BYTES: u64 = 16 << 20;

/// The trailers, once the body has ended.
pub type Trailers = Arc<Mutex<Option<HeaderMap>>>;

/// Returns the body without its framing, and the place where its trailers will appear.
pub fn decode(body: ByteStream) -> (ByteStream, Trailers) {
    let trailers = Trailers::default();
    let decoder = Decoder {
        body,
        buffer: BytesMut::new(),
        left: 0,
        state: State::Size,
        trailers: trailers.clone(),
    };
    let decoded = stream::try_unfold(decoder, |mut d| async move {
        Ok(d.next().await?.map(|piece| (piece, d)))
    });
    (decoded.boxed(), trailers)
}

struct Decoder {
    body: ByteStream,
    buffer: BytesMut,
    /// Bytes of the current chunk that are still to come.
    left: u64,
    state: State,
    trailers: Trailers,
}

#[derive(PartialEq)]
enum State {
    Size,
    Data,
    DataEnd,
    Trailers,
    Done,
}

impl Decoder {
    async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            match self.state {
                State::Size => {
                    let line = self.line().await?;
                    self.left = chunk_size(&line)?;
                    self.state = if self.left == 0 {
                        State::Trailers
                    } else {
                        State::Data
                    };
                }
                State::Data => {
                    if self.buffer.is_empty() && !self.fill().await? {
                        return Err(cut());
                    }
                    let take = (self.left).min(self.buffer.len() as u64) as usize;
                    self.left -= take as u64;
                    if self.left == 0 {
                        self.state = State::DataEnd;
                    }
                    return Ok(Some(self.buffer.split_to(take).freeze()));
                }
                State::DataEnd => {
                    if !self.line().await?.is_empty() {
                        return Err(malformed("a chunk is longer than its size"));
                    }
                    self.state = State::Size;
                }
                State::Trailers => {
                    let mut trailers = HeaderMap::new();
                    let mut bytes = 0;
                    // Some clients leave out the last CRLF, so the end of the body ends the
                    // trailers too.
                    while let Some(line) = self.line_or_end().await? {
                        bytes += line.len();
                        if bytes > TRAILERS_MAX_BYTES {
                            return Err(malformed("the trailers are too long"));
                        }
                        if line.is_empty() {
                            continue;
                        }
                        let (name, value) = line
                            .split_once(':')
                            .ok_or_else(|| malformed("a trailer has no colon"))?;
                        let name: HeaderName = name
                            .trim()
                            .parse()
                            .map_err(|_| malformed("the name of a trailer is not valid"))?;
                        let value = HeaderValue::from_str(value.trim())
                            .map_err(|_| malformed("the value of a trailer is not valid"))?;
                        trailers.append(name, value);
                    }
                    *self.trailers.lock() = Some(trailers);
                    self.state = State::Done;
                }
                State::Done => return Ok(None),
            }
        }
    }

    async fn fill(&mut self) -> Result<bool> {
        match self.body.next().await {
            None => Ok(false),
            Some(piece) => {
                let piece = piece?;
                // The usual case costs no copy: what arrived becomes the buffer.
                if self.buffer.is_empty() {
                    self.buffer = BytesMut::from(piece);
                } else {
                    self.buffer.extend_from_slice(&piece);
                }
                Ok(true)
            }
        }
    }

    async fn line(&mut self) -> Result<String> {
        self.line_or_end().await?.ok_or_else(cut)
    }

    /// A line without its end; `None` at the end of the body.
    async fn line_or_end(&mut self) -> Result<Option<String>> {
        loop {
            if let Some(at) = self
                .buffer
                .iter()
                .take(LINE_MAX_BYTES + 1)
                .position(|b| *b == b'\n')
            {
                let line = self.buffer.split_to(at);
                self.buffer.advance(1);
                let line =
                    std::str::from_utf8(&line).map_err(|_| malformed("a line is not text"))?;
                return Ok(Some(line.trim_end_matches('\r').to_owned()));
            }
            if self.buffer.len() > LINE_MAX_BYTES {
                return Err(malformed("a line is too long"));
            }
            if !self.fill().await? {
                if self.buffer.is_empty() {
                    return Ok(None);
                }
                let rest = self.buffer.split();
                let line =
                    std::str::from_utf8(&rest).map_err(|_| malformed("a line is not text"))?;
                return Ok(Some(line.trim_end_matches('\r').to_owned()));
            }
        }
    }
}

/// Why a body was refused on its way to the library, which only says that the body broke off.
pub type Refused = Arc<Mutex<Option<Error>>>;

/// What signed chunks may hold together, of a budget: a quarter of what may be held, because the
/// writes that take them may wait for more of it meanwhile. At least one chunk of the largest size
/// and the beginning of the next.
pub fn share_of(budget: &MemoryBudget) -> MemoryBudget {
    let bytes = budget.holdable_bytes() / 4;
    MemoryBudget::with_holdable(bytes.max(2 * SIGNED_CHUNK_MAX_BYTES))
}

/// The same framed body, with chunks that are limited in size and held from both `budgets` from
/// their first byte until the library, which gives out a chunk only when it has all of it, asks for
/// more than that chunk.
pub fn bounded(body: ByteStream, budgets: [MemoryBudget; 2]) -> (ByteStream, Refused) {
    let refused = Refused::default();
    let bounds = Bounds {
        body,
        budgets,
        line: Vec::new(),
        size: 0,
        left: 0,
        allowed: 0,
        ended: false,
        held: Vec::new(),
        ended_here: Vec::new(),
        refused: refused.clone(),
    };
    let bounded = stream::try_unfold(bounds, |mut b| async move {
        b.ended_here.clear();
        let Some(piece) = b.body.next().await.transpose()? else {
            return Ok(None);
        };
        match b.see(&piece) {
            Ok(()) => Ok(Some((piece, b))),
            Err(e) => {
                *b.refused.lock() = Some(e.clone());
                Err(e)
            }
        }
    });
    (bounded.boxed(), refused)
}

struct Bounds {
    body: ByteStream,
    budgets: [MemoryBudget; 2],
    /// What has arrived of the line before a chunk.
    line: Vec<u8>,
    /// The size of the current chunk and its line end, and how many of those bytes are still to
    /// come.
    size: u64,
    left: u64,
    /// How many bytes `held` covers.
    allowed: u64,
    /// Set after the last chunk. Trailers follow, which the library bounds itself.
    ended: bool,
    /// Memory for the bytes of the current chunk that have arrived.
    held: Vec<Reservation>,
    /// The same for chunks that ended in the last piece: the library still has them.
    ended_here: Vec<Reservation>,
    refused: Refused,
}

impl Bounds {
    fn see(&mut self, mut piece: &[u8]) -> Result<()> {
        while !self.ended && !piece.is_empty() {
            if self.left > 0 {
                let take = self.left.min(piece.len() as u64);
                self.left -= take;
                self.hold()?;
                piece = &piece[take as usize..];
                if self.left == 0 {
                    self.ended_here.append(&mut self.held);
                    self.allowed = 0;
                }
                continue;
            }
            let Some(at) = piece.iter().position(|b| *b == b'\n') else {
                self.line.extend_from_slice(piece);
                if self.line.len() > LINE_MAX_BYTES {
                    return Err(malformed("a line is too long"));
                }
                return Ok(());
            };
            self.line.extend_from_slice(&piece[..at]);
            piece = &piece[at + 1..];
            let line = std::mem::take(&mut self.line);
            let size = chunk_size(&String::from_utf8_lossy(&line))?;
            if size > SIGNED_CHUNK_MAX_BYTES {
                return Err(Error::new(
                    ErrorKind::TooLarge,
                    format!("a signed chunk of {size} bytes"),
                )
                .hint(format!(
                    "send chunks of at most {SIGNED_CHUNK_MAX_BYTES} bytes, or sign the body as a \
                     whole"
                )));
            }
            self.ended = size == 0;
            // The chunk and its line end.
            self.size = size + 2;
            self.left = self.size;
        }
        Ok(())
    }

    /// Reserves memory for what has arrived of the chunk. Each reservation doubles it, so that
    /// there are few.
    fn hold(&mut self) -> Result<()> {
        let come = self.size - self.left;
        if come > self.allowed {
            let more = (come - self.allowed).max(self.allowed.min(self.size - self.allowed));
            for budget in &self.budgets {
                let held = budget.try_hold(more);
                self.held
                    .push(held.map_err(|e| e.context("a signed chunk of the upload"))?);
            }
            self.allowed += more;
        }
        Ok(())
    }
}

/// The size in the line before a chunk.
fn chunk_size(line: &str) -> Result<u64> {
    let size = line.split(';').next().unwrap_or_default().trim();
    // Parsing alone would accept a sign.
    let digits = Some(size).filter(|s| s.bytes().all(|b| b.is_ascii_hexdigit()));
    digits
        .and_then(|s| u64::from_str_radix(s, 16).ok())
        .ok_or_else(|| malformed("a chunk's size is not a hexadecimal number"))
}

fn malformed(why: &str) -> Error {
    Error::invalid(format!("the aws-chunked body is malformed: {why}"))
}

fn cut() -> Error {
    Error::invalid("the aws-chunked body ends before its final chunk").hint("send it again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::TryStreamExt;

    async fn read(text: &str, piece: usize) -> Result<(String, Option<HeaderMap>)> {
        let pieces: Vec<Result<Bytes>> = text
            .as_bytes()
            .chunks(piece)
            .map(|c| Ok(Bytes::copy_from_slice(c)))
            .collect();
        let (body, trailers) = decode(stream::iter(pieces).boxed());
        let parts: Vec<Bytes> = body.try_collect().await?;
        let trailers = trailers.lock().take();
        Ok((String::from_utf8(parts.concat()).unwrap(), trailers))
    }

    #[tokio::test]
    async fn framing_is_undone_however_it_arrives() {
        let signed = "5;chunk-signature=00\r\nhello\r\n3;chunk-signature=00\r\n, \
            w\r\n0;chunk-signature=00\r\n\r\n";
        let trailed = "8\r\nhello, \
            w\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\nx-amz-trailer-signature:0\r\n\r\n";
        for piece in [1, 2, 7, 1000] {
            assert_eq!(read(signed, piece).await.unwrap().0, "hello, w");
            let (text, trailers) = read(trailed, piece).await.unwrap();
            assert_eq!(
                (
                    text.as_str(),
                    trailers.unwrap()["x-amz-checksum-crc32"].to_str().unwrap()
                ),
                ("hello, w", "AAAAAA==")
            );
        }
        assert_eq!(read("0\r\n", 9).await.unwrap().0, "");
    }

    #[tokio::test]
    async fn signed_chunks_are_held_while_they_come_and_are_not_too_large() {
        let budget = MemoryBudget::new(64 << 20);
        let framed = |size: usize, data: usize| {
            let mut body = format!("{size:x};chunk-signature=00\r\n").into_bytes();
            body.extend(vec![b'x'; data]);
            body
        };
        // Half of a 4 MiB chunk arrives, in pieces of odd sizes.
        let half = framed(4 << 20, 2 << 20);
        let pieces: Vec<Result<Bytes>> = half
            .chunks(10_007)
            .map(|c| Ok(Bytes::copy_from_slice(c)))
            .collect();
        let rest = [
            vec![b'x'; 2 << 20],
            b"\r\n0;chunk-signature=00\r\n\r\n".to_vec(),
        ];
        let all = stream::iter(pieces).chain(stream::iter(rest.map(|r| Ok(Bytes::from(r)))));
        let share = share_of(&budget);
        let budgets = || [budget.clone(), share.clone()];
        let (mut body, _) = bounded(all.boxed(), budgets());
        let mut passed = 0;
        while passed < half.len() {
            passed += body.next().await.unwrap().unwrap().len();
        }
        let held = budget.used_bytes();
        assert!((2 << 20..=(4 << 20) + 4096).contains(&held), "{held}");
        for _ in 0..2 {
            body.next().await.unwrap().unwrap();
            let held = budget.used_bytes();
            assert!(held >= 4 << 20, "nobody asked for more yet: {held}");
        }
        assert!(body.next().await.is_none());
        assert_eq!(budget.used_bytes(), 0, "the chunk was given out");
        assert_eq!(share.used_bytes(), 0);

        let large = framed(SIGNED_CHUNK_MAX_BYTES as usize + 1, 10);
        let one = stream::iter([Ok(Bytes::from(large))]).boxed();
        let (mut body, refused) = bounded(one, budgets());
        assert!(body.next().await.unwrap().is_err());
        assert_eq!(
            refused.lock().as_ref().map(Error::kind),
            Some(ErrorKind::TooLarge)
        );
        let small = MemoryBudget::new(1 << 20);
        let one = stream::iter([Ok(Bytes::from(framed(2 << 20, 1 << 20)))]).boxed();
        let (mut body, refused) = bounded(one, [small.clone(), share_of(&small)]);
        assert!(body.next().await.unwrap().is_err());
        assert!(refused.lock().is_some());
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_or_lies_is_an_error() {
        let whole = "5\r\nhello\r\n0\r\n\r\n";
        for end in 0..whole.len() - 4 {
            assert!(read(&whole[..end], 3).await.is_err(), "{end}");
        }
        for bad in [
            "x\r\n",
            "+5\r\nhello\r\n0\r\n\r\n",
            "-0\r\n\r\n",
            "10000000000000005\r\nhello\r\n0\r\n\r\n",
            "3\r\nhello\r\n0\r\n\r\n",
            "5\r\nhello\r\n0\r\nno colon\r\n\r\n",
        ] {
            assert!(read(bad, 100).await.is_err(), "{bad:?}");
        }
        assert!(read(&"f".repeat(5000), 100).await.is_err());
    }
}
