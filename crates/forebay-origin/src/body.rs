//! Bodies: streams of bytes whose length is part of the contract.
//!
//! [`exact`] keeps the promise of [`GetResponse`](crate::GetResponse): exactly the announced bytes
//! or an error, whatever the origin sends.

use crate::ByteStream;
use bytes::{Bytes, BytesMut};
use forebay_core::{Error, ErrorKind, Result};
use futures::{StreamExt, TryStreamExt, stream};

/// A body of one buffer.
pub fn from_bytes(bytes: Bytes) -> ByteStream {
    if bytes.is_empty() {
        empty()
    } else {
        stream::once(async move { Ok(bytes) }).boxed()
    }
}

/// A body without bytes.
pub fn empty() -> ByteStream {
    stream::empty().boxed()
}

/// The error of an origin for a body that only [`Resilient`](crate::Resilient) can send it, in
/// parts.
pub(crate) fn needs_parts(key: &str, limit: u64) -> Error {
    Error::new(
        ErrorKind::TooLarge,
        format!(
            "put {key:?}: a body of unknown length, or of more than {limit} bytes, must be sent \
            in parts"
        ),
    )
}

/// Reads a body of at most `limit` bytes into one buffer.
///
/// # Errors
/// The body's own error, or `TooLarge`.
pub async fn collect(mut body: ByteStream, limit: u64) -> Result<Bytes> {
    let Some(first) = body.try_next().await? else {
        return Ok(Bytes::new());
    };
    let mut rest = BytesMut::new();
    while let Some(chunk) = body.try_next().await? {
        if rest.is_empty() {
            rest.extend_from_slice(&first);
        }
        if rest.len() as u64 + chunk.len() as u64 > limit {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("the body is longer than {limit} bytes"),
            ));
        }
        rest.extend_from_slice(&chunk);
    }
    if first.len() as u64 > limit {
        return Err(Error::new(
            ErrorKind::TooLarge,
            format!("the body is longer than {limit} bytes"),
        ));
    }
    Ok(if rest.is_empty() {
        first
    } else {
        rest.freeze()
    })
}

/// Passes on exactly `expected` bytes: a body that ends early or goes on too long ends in an error
/// that names `what`.
pub fn exact(body: ByteStream, expected: u64, what: String) -> ByteStream {
    struct State {
        body: Option<ByteStream>,
        done: u64,
        expected: u64,
        what: String,
    }
    let state = State {
        body: Some(body),
        done: 0,
        expected,
        what,
    };
    stream::unfold(state, |mut s| async move {
        let body = s.body.as_mut()?;
        loop {
            let error = match body.next().await {
                Some(Ok(chunk)) if chunk.is_empty() => continue,
                Some(Ok(chunk)) => {
                    s.done += chunk.len() as u64;
                    if s.done <= s.expected {
                        return Some((Ok(chunk), s));
                    }
                    Error::origin_unavailable(format!(
                        "{}: more than the announced {} bytes came",
                        s.what, s.expected
                    ))
                    .with_kind(ErrorKind::Corrupt)
                    .hint("the origin, or a proxy in front of it, sends wrong lengths")
                }
                Some(Err(e)) => e,
                None if s.done == s.expected => return None,
                None => Error::origin_unavailable(format!(
                    "{}: the body ended after {} of {} bytes",
                    s.what, s.done, s.expected
                )),
            };
            s.body = None;
            return Some((Err(error), s));
        }
    })
    .fuse()
    .boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(parts: &[&'static str]) -> ByteStream {
        stream::iter(
            parts
                .iter()
                .map(|p| Ok(Bytes::from_static(p.as_bytes())))
                .collect::<Vec<_>>(),
        )
        .boxed()
    }

    #[tokio::test]
    async fn a_body_is_exact_or_an_error() {
        let read =
            |n, parts| async move { collect(exact(chunks(parts), n, "x".into()), 100).await };
        assert_eq!(read(4, &["ab", "", "cd"]).await.unwrap(), "abcd");
        assert_eq!(read(0, &[]).await.unwrap(), "");
        assert_eq!(
            read(5, &["ab", "cd"]).await.unwrap_err().kind(),
            ErrorKind::OriginUnavailable
        );
        assert_eq!(
            read(3, &["ab", "cd"]).await.unwrap_err().kind(),
            ErrorKind::Corrupt
        );
        let mut s = exact(chunks(&["ab"]), 5, "x".into());
        assert!(
            s.next().await.unwrap().is_ok()
                && s.next().await.unwrap().is_err()
                && s.next().await.is_none()
        );
    }

    #[tokio::test]
    async fn collecting_is_bounded() {
        assert_eq!(collect(chunks(&["ab", "cd"]), 4).await.unwrap(), "abcd");
        assert_eq!(
            collect(chunks(&["ab", "cd"]), 3).await.unwrap_err().kind(),
            ErrorKind::TooLarge
        );
        assert_eq!(
            collect(chunks(&["abcd"]), 3).await.unwrap_err().kind(),
            ErrorKind::TooLarge
        );
    }
}
