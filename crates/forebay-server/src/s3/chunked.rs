//! `aws-chunked` bodies from clients whose signatures are not asked for.
//!
//! SDKs frame uploads as `SIZE[;chunk-signature=…]\r\nDATA\r\n…0\r\nTRAILERS\r\n` even where nobody
//! checks the signatures, as on loopback without keys. The S3 library undoes the framing only
//! together with the signature, so here it is done without. Trailers hold checksums, which are
//! checked.
//!
//! Invariant: the body ends well only after its final chunk; one that breaks off before is an
//! error.

use bytes::{Buf, Bytes, BytesMut};
use forebay_core::{Error, Result, sync::Mutex};
use forebay_engine::ByteStream;
use futures::{StreamExt, stream};
use http::{HeaderMap, HeaderName, HeaderValue};
use std::sync::Arc;

const LINE_MAX_BYTES: usize = 1024;
const TRAILERS_MAX_BYTES: usize = 16 << 10;

/// The trailers, once the body is at its end.
pub type Trailers = Arc<Mutex<Option<HeaderMap>>>;

/// The body without its framing, and where its trailers will be.
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
                    let size = line.split(';').next().unwrap_or_default().trim();
                    // Parsing alone would take a sign.
                    let digits = Some(size).filter(|s| s.bytes().all(|b| b.is_ascii_hexdigit()));
                    self.left = digits
                        .and_then(|s| u64::from_str_radix(s, 16).ok())
                        .ok_or_else(|| malformed("a chunk's size is not a hexadecimal number"))?;
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
                    // The last CRLF is left out by some clients: the end of the body ends the
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
                            .map_err(|_| malformed("a trailer's name is not one"))?;
                        let value = HeaderValue::from_str(value.trim())
                            .map_err(|_| malformed("a trailer's value is not one"))?;
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
