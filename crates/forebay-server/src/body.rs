//! Bodies of answers.
//!
//! Invariant: a body of a known length yields exactly that many bytes or ends with an error, and
//! after an error nothing follows. hyper breaks the connection off on an error, so a cut answer
//! looks cut to the client.

use bytes::Bytes;
use forebay_core::Error;
use forebay_engine::ByteStream;
use http_body::{Body, Frame, SizeHint};
use std::{
    pin::Pin,
    task::{Context, Poll},
};

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The body of an answer.
#[derive(Default)]
pub enum AnswerBody {
    #[default]
    Empty,
    Full(Bytes),
    /// `remaining` is `None` where the length is not known before the end.
    Stream {
        stream: ByteStream,
        remaining: Option<u64>,
    },
    /// A body from the S3 library.
    S3(s3s::Body),
}

impl AnswerBody {
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        if bytes.is_empty() {
            AnswerBody::Empty
        } else {
            AnswerBody::Full(bytes)
        }
    }

    pub fn stream(stream: ByteStream, length: Option<u64>) -> Self {
        AnswerBody::Stream {
            stream,
            remaining: length,
        }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        let polled = match this {
            AnswerBody::Empty => return Poll::Ready(None),
            AnswerBody::Full(bytes) => {
                let bytes = std::mem::take(bytes);
                *this = AnswerBody::Empty;
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            AnswerBody::S3(body) => match std::task::ready!(Pin::new(body).poll_frame(cx)) {
                Some(Ok(frame)) => return Poll::Ready(Some(Ok(frame))),
                Some(Err(e)) => Err(e),
                None => Ok(None),
            },
            AnswerBody::Stream { stream, remaining } => {
                match std::task::ready!(stream.as_mut().poll_next(cx)) {
                    Some(Ok(bytes)) => match remaining {
                        Some(n) if (bytes.len() as u64) > *n => {
                            Err(Error::internal("the body is longer than was announced").into())
                        }
                        _ => {
                            if let Some(n) = remaining {
                                *n -= bytes.len() as u64;
                            }
                            Ok(Some(bytes))
                        }
                    },
                    Some(Err(e)) => Err(e.into()),
                    None if remaining.is_none_or(|n| n == 0) => Ok(None),
                    None => Err(Error::internal("the body is shorter than was announced").into()),
                }
            }
        };
        match polled {
            Ok(Some(bytes)) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            Ok(None) => {
                *this = AnswerBody::Empty;
                Poll::Ready(None)
            }
            Err(e) => {
                *this = AnswerBody::Empty;
                Poll::Ready(Some(Err(e)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            AnswerBody::Empty => true,
            AnswerBody::Full(_) => false,
            // The stream is polled to its end even when all bytes are out: it may still report an
            // error.
            AnswerBody::Stream { .. } => false,
            AnswerBody::S3(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            AnswerBody::Empty => SizeHint::with_exact(0),
            AnswerBody::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            AnswerBody::Stream {
                remaining: Some(n), ..
            } => SizeHint::with_exact(*n),
            AnswerBody::Stream { .. } => SizeHint::default(),
            AnswerBody::S3(body) => body.size_hint(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{StreamExt, stream};
    use http_body_util::BodyExt;

    async fn read(
        length: Option<u64>,
        pieces: Vec<Result<&'static str, Error>>,
    ) -> Result<Bytes, BoxError> {
        let pieces = stream::iter(
            pieces
                .into_iter()
                .map(|p| p.map(|s| Bytes::from_static(s.as_bytes()))),
        )
        .boxed();
        AnswerBody::stream(pieces, length)
            .collect()
            .await
            .map(|c| c.to_bytes())
    }

    #[tokio::test]
    async fn a_body_is_exactly_as_long_as_announced_or_an_error() {
        assert_eq!(
            read(Some(4), vec![Ok("ab"), Ok("cd")]).await.unwrap(),
            "abcd"
        );
        assert_eq!(read(None, vec![Ok("ab")]).await.unwrap(), "ab");
        assert!(
            read(Some(5), vec![Ok("ab"), Ok("cd")]).await.is_err(),
            "short"
        );
        assert!(
            read(Some(3), vec![Ok("ab"), Ok("cd")]).await.is_err(),
            "long"
        );
        assert!(
            read(None, vec![Ok("ab"), Err(Error::timeout("x")), Ok("cd")])
                .await
                .is_err(),
            "cut"
        );
    }
}
