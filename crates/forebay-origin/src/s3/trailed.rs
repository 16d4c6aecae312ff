//! Bodies followed by their checksum: the `aws-chunked` framing with trailers, and the signature of
//! such a request, which `object_store`'s authorizer does not make.
//!
//! The framing is added on the way, to pieces as they arrive: the length of the body is known, so
//! the framed length is known too, and nothing is buffered.

use crate::{ByteStream, Trailer};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use forebay_core::{Error, Result};
use futures::{StreamExt, stream};
use http::{HeaderMap, HeaderValue, Method, header};
use object_store::aws::AwsCredential;
use ring::{digest, hmac};
use url::{Position, Url};

const PAYLOAD: &str = "STREAMING-UNSIGNED-PAYLOAD-TRAILER";
/// The same size as in most SDKs.
const CHUNK_BYTES: u64 = 1 << 20;

/// The headers that say that a body of `length` bytes is framed, and its framed length.
pub(super) fn announce(headers: &mut HeaderMap, length: u64, trailer: &Trailer) -> Result<u64> {
    let name = HeaderValue::from_str(&trailer.name)
        .map_err(|_| Error::internal(format!("the trailer {:?}", trailer.name)))?;
    headers.insert("x-amz-trailer", name);
    headers.insert("x-amz-decoded-content-length", length.into());
    // In addition to the encoding of the object itself.
    let encoding = match headers.get(header::CONTENT_ENCODING) {
        Some(own) => [b"aws-chunked,", own.as_bytes()].concat(),
        None => b"aws-chunked".to_vec(),
    };
    let encoding = HeaderValue::from_bytes(&encoding)
        .map_err(|_| Error::internal("the encoding of a framed body"))?;
    headers.insert(header::CONTENT_ENCODING, encoding);
    let line = |n: u64| format!("{n:x}\r\n").len() as u64;
    let (full, rest) = (length / CHUNK_BYTES, length % CHUNK_BYTES);
    let mut framed = full * (line(CHUNK_BYTES) + CHUNK_BYTES + 2);
    if rest > 0 {
        framed += line(rest) + rest + 2;
    }
    let trailer_bytes = trailer.name.len() + 1 + trailer.value_bytes + 2;
    Ok(framed + line(0) + trailer_bytes as u64 + 2)
}

/// The body, framed, followed by the trailer. `body` has exactly `length` bytes, or fails.
pub(super) fn framed(body: ByteStream, length: u64, trailer: Trailer) -> ByteStream {
    struct State {
        body: ByteStream,
        /// Received, not yet returned.
        piece: Bytes,
        /// Bytes of the body not yet returned.
        left: u64,
        /// The same for the current chunk.
        in_chunk: u64,
        trailer: Option<Trailer>,
    }
    let state = State {
        body,
        piece: Bytes::new(),
        left: length,
        in_chunk: 0,
        trailer: Some(trailer),
    };
    stream::try_unfold(state, |mut s| async move {
        while s.piece.is_empty() {
            match s.body.next().await {
                Some(piece) => s.piece = piece?,
                None if s.left > 0 => {
                    return Err(Error::invalid("the body is shorter than was announced"));
                }
                None => {
                    let Some(trailer) = s.trailer.take() else {
                        return Ok(None);
                    };
                    let value = (trailer.value)()?;
                    let end = format!("0\r\n{}:{value}\r\n\r\n", trailer.name);
                    return Ok(Some((Bytes::from(end), s)));
                }
            }
        }
        if s.in_chunk == 0 {
            s.in_chunk = s.left.min(CHUNK_BYTES);
            if s.in_chunk == 0 {
                return Err(Error::invalid("the body is longer than was announced"));
            }
            return Ok(Some((Bytes::from(format!("{:x}\r\n", s.in_chunk)), s)));
        }
        let take = s.in_chunk.min(s.piece.len() as u64);
        let mut piece = s.piece.split_to(take as usize);
        s.in_chunk -= take;
        s.left -= take;
        if s.in_chunk == 0 {
            piece = [piece.as_ref(), b"\r\n"].concat().into();
        }
        Ok(Some((piece, s)))
    })
    .boxed()
}

/// The headers with a signature (AWS4-HMAC-SHA256) for a request whose body is framed like this.
pub(super) fn sign(
    credential: &AwsCredential,
    region: &str,
    method: &Method,
    url: &Url,
    mut headers: HeaderMap,
    now: DateTime<Utc>,
) -> Result<HeaderMap> {
    let bad = |_| Error::internal("a header of a signed request");
    let value = |text: &str| HeaderValue::from_str(text).map_err(bad);
    let (date, day) = (
        now.format("%Y%m%dT%H%M%SZ").to_string(),
        now.format("%Y%m%d").to_string(),
    );
    headers.insert("x-amz-date", value(&date)?);
    headers.insert("x-amz-content-sha256", HeaderValue::from_static(PAYLOAD));
    if let Some(token) = &credential.token {
        let mut token = value(token)?;
        token.set_sensitive(true);
        headers.insert("x-amz-security-token", token);
    }
    // The host is signed as the client will send it.
    let host = &url[Position::BeforeHost..Position::AfterPort];
    let mut signed: Vec<(&str, String)> = vec![("host", host.to_owned())];
    for name in headers.keys() {
        // Several spaces count as one.
        let values: Vec<String> = headers
            .get_all(name)
            .iter()
            .filter_map(|v| std::str::from_utf8(v.as_bytes()).ok())
            .map(|v| v.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        signed.push((name.as_str(), values.join(",")));
    }
    signed.sort();
    let names: Vec<&str> = signed.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");
    let lines: String = signed
        .iter()
        .map(|(name, value)| format!("{name}:{value}\n"))
        .collect();
    let mut query: Vec<&str> = url.query().map_or(Vec::new(), |q| q.split('&').collect());
    query.sort_unstable();
    let canonical = format!(
        "{method}\n{}\n{}\n{lines}\n{names}\n{PAYLOAD}",
        url.path(),
        query.join("&")
    );
    let scope = format!("{day}/{region}/s3/aws4_request");
    let to_sign = format!(
        "AWS4-HMAC-SHA256\n{date}\n{scope}\n{}",
        hex(digest::digest(&digest::SHA256, canonical.as_bytes()).as_ref())
    );
    let mac = |key: &[u8], text: &str| {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes())
    };
    let mut key = mac(format!("AWS4{}", credential.secret_key).as_bytes(), &day);
    for part in [region, "s3", "aws4_request"] {
        key = mac(key.as_ref(), part);
    }
    let signature = hex(mac(key.as_ref(), &to_sign).as_ref());
    let mut authorization = value(&format!(
        "AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={names}, Signature={signature}",
        credential.key_id
    ))?;
    authorization.set_sensitive(true);
    headers.insert(header::AUTHORIZATION, authorization);
    Ok(headers)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::TryStreamExt;

    fn trailer() -> Trailer {
        Trailer {
            name: "x-amz-checksum-crc32".into(),
            value_bytes: 8,
            value: Box::new(|| Ok("AAAAAA==".into())),
        }
    }

    #[tokio::test]
    async fn a_framed_body_is_as_long_as_announced_however_it_comes() {
        for length in [
            1usize,
            5,
            CHUNK_BYTES as usize,
            2 * CHUNK_BYTES as usize + 7,
        ] {
            let content: Vec<u8> = (0..length).map(|i| i as u8).collect();
            for piece in [1000, 700_001, 5 << 20] {
                let pieces: Vec<Result<Bytes>> = content
                    .chunks(piece)
                    .map(|c| Ok(Bytes::copy_from_slice(c)))
                    .collect();
                let mut headers = HeaderMap::new();
                headers.insert("content-encoding", HeaderValue::from_static("gzip"));
                let announced = announce(&mut headers, length as u64, &trailer()).unwrap();
                let body = framed(stream::iter(pieces).boxed(), length as u64, trailer());
                let sent = body.try_collect::<Vec<Bytes>>().await.unwrap().concat();
                assert_eq!(sent.len() as u64, announced);
                assert_eq!(headers["content-encoding"], "aws-chunked,gzip");
                let end = b"\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n";
                assert!(sent.ends_with(end));
                let (mut rest, mut got) = (&sent[..], Vec::new());
                loop {
                    let at = rest.iter().position(|b| *b == b'\n').unwrap();
                    let size = std::str::from_utf8(&rest[..at - 1]).unwrap();
                    let size = usize::from_str_radix(size, 16).unwrap();
                    if size == 0 {
                        break;
                    }
                    got.extend_from_slice(&rest[at + 1..][..size]);
                    rest = &rest[at + 1 + size + 2..];
                }
                assert!(got == content, "{length} in pieces of {piece}");
            }
        }
    }

    #[test]
    fn a_signature_covers_each_value_and_takes_several_spaces_for_one() {
        let credential = AwsCredential {
            key_id: "key".into(),
            secret_key: "secret".into(),
            token: None,
        };
        let url = Url::parse("http://127.0.0.1:9000/bucket/k").unwrap();
        let signature = |text: &str| {
            let value = HeaderValue::from_bytes(text.as_bytes()).unwrap();
            let headers = HeaderMap::from_iter([(header::CONTENT_DISPOSITION, value)]);
            let now = DateTime::UNIX_EPOCH;
            let signed = sign(&credential, "r", &Method::PUT, &url, headers, now).unwrap();
            signed[header::AUTHORIZATION].clone()
        };
        assert_eq!(signature("a b"), signature("  a   b "));
        assert_ne!(signature("a b"), signature("ab"));
        assert_ne!(signature("ü"), signature("ö"));
    }

    #[tokio::test]
    async fn a_body_of_another_length_has_no_end() {
        for (length, content) in [(3u64, "four"), (5, "four")] {
            let body = stream::iter([Ok(Bytes::from(content))]).boxed();
            let sent = framed(body, length, trailer())
                .try_collect::<Vec<Bytes>>()
                .await;
            assert!(sent.is_err(), "{length}");
        }
    }
}
