//! Checks an upload while it flows: its length, `Content-MD5`, `x-amz-content-sha256` and the
//! `x-amz-checksum-*` values, from headers or trailers.
//!
//! Invariant: a body that fails a check ends with an error, so the origin never acknowledges it.
//! Why it failed is kept beside it ([`Verified::failure`]), because the origin's own error says
//! only that the body broke off.

use super::{chunked::Trailers, error::Refusal};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result, sync::Mutex};
use forebay_engine::ByteStream;
use futures::{StreamExt, stream};
use http::HeaderMap;
use s3s::{
    TrailingHeaders,
    checksum::ChecksumHasher,
    crypto::{Checksum as _, Md5, Sha256},
    dto::Checksum,
};
use sha2::{Digest as _, Sha512};
use std::sync::Arc;
use xxhash_rust::{xxh3::Xxh3, xxh64::Xxh64};

/// The checksums of S3: as `x-amz-checksum-` names them, and the bytes that each has. The library
/// computes the first five.
const CHECKSUMS: [(&str, usize); 10] = [
    ("crc32", 4),
    ("crc32c", 4),
    ("crc64nvme", 8),
    ("sha1", 20),
    ("sha256", 32),
    ("sha512", 64),
    ("md5", 16),
    ("xxhash64", 8),
    ("xxhash3", 8),
    ("xxhash128", 16),
];

/// Where to find checksums that follow the body.
#[derive(Clone, Default)]
pub enum Trailing {
    #[default]
    None,
    /// Of a body that was unframed by this node.
    Own(Trailers),
    /// Of a body that the S3 library unframed.
    Library(TrailingHeaders),
}

impl Trailing {
    fn get(&self, name: &str) -> Option<String> {
        let of = |headers: &HeaderMap| {
            headers
                .get(name)
                .and_then(|v| v.to_str().ok())
                .map(str::to_owned)
        };
        match self {
            Trailing::None => None,
            Trailing::Own(trailers) => trailers.lock().as_ref().and_then(of),
            Trailing::Library(trailers) => trailers.read(of).flatten(),
        }
    }
}

/// What was found out about a body; complete when the body has ended.
#[derive(Clone, Default)]
pub struct Verified(Arc<Mutex<Outcome>>);

#[derive(Default)]
struct Outcome {
    failure: Option<Refusal>,
    checksum: Option<Checksum>,
    further: Vec<(&'static str, String)>,
}

/// A checksum that the library does not compute.
enum Further {
    Sha512(Sha512),
    Md5(Md5),
    Xxh64(Xxh64),
    Xxh3(Box<Xxh3>),
    Xxh3Wide(Box<Xxh3>),
}

impl Further {
    fn of(algorithm: &str) -> Option<Self> {
        Some(match algorithm {
            "sha512" => Further::Sha512(Sha512::new()),
            "md5" => Further::Md5(Md5::new()),
            "xxhash64" => Further::Xxh64(Xxh64::new(0)),
            "xxhash3" => Further::Xxh3(Box::new(Xxh3::new())),
            "xxhash128" => Further::Xxh3Wide(Box::new(Xxh3::new())),
            _ => return None,
        })
    }

    fn update(&mut self, piece: &[u8]) {
        match self {
            Further::Sha512(sum) => sum.update(piece),
            Further::Md5(sum) => sum.update(piece),
            Further::Xxh64(sum) => sum.update(piece),
            Further::Xxh3(sum) | Further::Xxh3Wide(sum) => sum.update(piece),
        }
    }

    /// In base64; of a number, the bytes from the highest on.
    fn value(self) -> String {
        match self {
            Further::Sha512(sum) => STANDARD.encode(sum.finalize()),
            Further::Md5(sum) => STANDARD.encode(sum.finalize()),
            Further::Xxh64(sum) => STANDARD.encode(sum.digest().to_be_bytes()),
            Further::Xxh3(sum) => STANDARD.encode(sum.digest().to_be_bytes()),
            Further::Xxh3Wide(sum) => STANDARD.encode(sum.digest128().to_be_bytes()),
        }
    }
}

impl Verified {
    /// Why the body was refused, if it was.
    pub fn failure(&self) -> Option<Refusal> {
        self.0.lock().failure.clone()
    }

    /// The requested checksums, as computed, of those that the library knows.
    pub fn checksum(&self) -> Checksum {
        self.0.lock().checksum.clone().unwrap_or_default()
    }

    /// The others that were requested: algorithms and base64 values.
    pub fn further(&self) -> Vec<(&'static str, String)> {
        self.0.lock().further.clone()
    }

    /// The base64 value for one algorithm, if it was requested.
    pub fn value(&self, algorithm: &str) -> Option<String> {
        let outcome = self.0.lock();
        let known = outcome.checksum.as_ref();
        let known = known.and_then(|sums| value(sums, algorithm));
        known
            .or_else(|| value_among(&outcome.further, algorithm))
            .map(str::to_owned)
    }
}

struct Check {
    body: ByteStream,
    expected_length: u64,
    length: u64,
    md5: Option<(Md5, Vec<u8>)>,
    payload: Option<(Sha256, String)>,
    hasher: ChecksumHasher,
    further: Vec<(&'static str, Further)>,
    /// Algorithm and expected value; `None`: it is in the trailers.
    expected: Vec<(&'static str, Option<String>)>,
    trailing: Trailing,
    outcome: Verified,
}

/// Wraps the body of an upload of `length` bytes.
///
/// # Errors
/// `InvalidDigest` or `InvalidRequest` for a header that cannot be read.
pub fn verify(
    body: ByteStream,
    length: u64,
    headers: &HeaderMap,
    trailing: Trailing,
) -> Result<(ByteStream, Verified), Refusal> {
    let text = |name: &str| {
        headers
            .get(name)
            .map(|v| v.to_str().unwrap_or_default().trim().to_owned())
    };
    let bad = |code, message: String| Refusal::bad(code, Error::invalid(message));
    let md5 = match text("content-md5") {
        None => None,
        Some(value) => match STANDARD.decode(&value) {
            Ok(bytes) if bytes.len() == 16 => Some((Md5::new(), bytes)),
            _ => {
                return Err(bad(
                    "InvalidDigest",
                    format!("Content-MD5: {value:?} is not 16 bytes in base64"),
                ));
            }
        },
    };
    // If the signature is checked, the library checks this hash as well. Checking it twice does no
    // harm, but only the other case needs it.
    let payload = text("x-amz-content-sha256")
        .filter(|v| v.len() == 64 && matches!(trailing, Trailing::Own(_) | Trailing::None))
        .map(|v| (Sha256::new(), v));
    let mut expected: Vec<(&'static str, Option<String>)> = Vec::new();
    for algorithm in algorithms() {
        let name = format!("x-amz-checksum-{algorithm}");
        if let Some(value) = text(&name) {
            if !is_value(&value, algorithm) {
                let message = format!("the value of the header {name} is not a {algorithm}");
                return Err(bad("InvalidRequest", message));
            }
            expected.push((algorithm, Some(value)));
        }
    }
    // A list, on one line or on several.
    for name in headers
        .get_all("x-amz-trailer")
        .iter()
        .flat_map(|v| v.to_str().unwrap_or_default().split(','))
        .map(|n| n.trim().to_ascii_lowercase())
        .filter(|n| !n.is_empty())
    {
        match algorithms().find(|a| name.strip_prefix("x-amz-checksum-") == Some(*a)) {
            Some(algorithm) => expected.push((algorithm, None)),
            None => {
                return Err(bad(
                    "InvalidRequest",
                    format!("the trailer {name:?} is not a checksum that is known here"),
                ));
            }
        }
    }
    let mut hasher = ChecksumHasher::default();
    let mut further: Vec<(&'static str, Further)> = Vec::new();
    for (algorithm, _) in &expected {
        match *algorithm {
            "crc32" => hasher.crc32 = Some(s3s::crypto::Crc32::new()),
            "crc32c" => hasher.crc32c = Some(s3s::crypto::Crc32c::new()),
            "crc64nvme" => hasher.crc64nvme = Some(s3s::crypto::Crc64Nvme::new()),
            "sha1" => hasher.sha1 = Some(s3s::crypto::Sha1::new()),
            "sha256" => hasher.sha256 = Some(Sha256::new()),
            other => further.extend(Further::of(other).map(|sum| (other, sum))),
        }
    }
    let outcome = Verified::default();
    let check = Check {
        body,
        expected_length: length,
        length: 0,
        md5,
        payload,
        hasher,
        further,
        expected,
        trailing,
        outcome: outcome.clone(),
    };
    let checked = stream::try_unfold(Some(check), |check| async move {
        let Some(mut check) = check else {
            return Ok(None);
        };
        match check.body.next().await {
            Some(Ok(piece)) => {
                check.update(&piece)?;
                Ok(Some((piece, Some(check))))
            }
            Some(Err(e)) => {
                // The library also checks the hash that was signed, before it hands on the last
                // piece. Its error has a private type, so the text is all there is.
                let refusal = match e.kind() {
                    ErrorKind::Invalid if e.message().contains("Sha256Mismatch") => {
                        Refusal::bad("XAmzContentSHA256Mismatch", e.clone())
                    }
                    ErrorKind::Invalid => Refusal::bad("IncompleteBody", e.clone()),
                    _ => Refusal::from(e.clone()),
                };
                check.outcome.0.lock().failure.get_or_insert(refusal);
                Err(e)
            }
            None => check.finish().map(|()| None),
        }
    });
    Ok((checked.boxed(), outcome))
}

impl Check {
    fn update(&mut self, piece: &Bytes) -> Result<()> {
        self.length += piece.len() as u64;
        if self.length > self.expected_length {
            return self.fail(
                "IncompleteBody",
                format!(
                    "the body is longer than the {} bytes announced",
                    self.expected_length
                ),
            );
        }
        if let Some((md5, _)) = &mut self.md5 {
            md5.update(piece);
        }
        if let Some((sha256, _)) = &mut self.payload {
            sha256.update(piece);
        }
        self.hasher.update(piece);
        for (_, sum) in &mut self.further {
            sum.update(piece);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        if self.length != self.expected_length {
            return self.fail(
                "IncompleteBody",
                format!("{} of {} bytes arrived", self.length, self.expected_length),
            );
        }
        if let Some((md5, expected)) = self.md5.take()
            && md5.finalize().as_slice() != expected.as_slice()
        {
            return self.fail(
                "BadDigest",
                "the body does not have the Content-MD5 that was sent".into(),
            );
        }
        self.check_payload()?;
        let checksum = std::mem::take(&mut self.hasher).finalize();
        let further = std::mem::take(&mut self.further).into_iter();
        let further: Vec<_> = further.map(|(name, sum)| (name, sum.value())).collect();
        for (algorithm, expected) in std::mem::take(&mut self.expected) {
            let name = format!("x-amz-checksum-{algorithm}");
            let Some(expected) = expected.or_else(|| self.trailing.get(&name)) else {
                return self.fail(
                    "MalformedTrailerError",
                    format!("the trailer {name} was announced and is missing"),
                );
            };
            if !is_value(&expected, algorithm) {
                return self.fail(
                    "InvalidRequest",
                    format!("the value of the trailer {name} is not a {algorithm}"),
                );
            }
            let computed = value(&checksum, algorithm);
            let computed = computed.or_else(|| value_among(&further, algorithm));
            if computed != Some(expected.as_str()) {
                return self.fail(
                    "BadDigest",
                    format!("the body does not have the {name} that was sent"),
                );
            }
        }
        let mut outcome = self.outcome.0.lock();
        outcome.checksum = Some(checksum);
        outcome.further = further;
        Ok(())
    }

    fn check_payload(&mut self) -> Result<()> {
        let Some((sha256, expected)) = self.payload.take() else {
            return Ok(());
        };
        let digest = sha256.finalize();
        let actual: String = digest.as_ref().iter().map(|b| format!("{b:02x}")).collect();
        if actual.eq_ignore_ascii_case(&expected) {
            return Ok(());
        }
        self.fail(
            "XAmzContentSHA256Mismatch",
            "the body does not have the x-amz-content-sha256 that was sent".into(),
        )
    }

    fn fail(&self, code: &'static str, message: String) -> Result<()> {
        let error = Error::invalid(message).hint("send it again");
        self.outcome.0.lock().failure = Some(Refusal::bad(code, error.clone()));
        Err(error)
    }
}

/// The algorithms, as `x-amz-checksum-` names them.
pub(super) fn algorithms() -> impl Iterator<Item = &'static str> {
    CHECKSUMS.into_iter().map(|(algorithm, _)| algorithm)
}

/// How many bytes a value of the algorithm has.
pub(super) fn bytes_of(algorithm: &str) -> Option<usize> {
    let mut known = CHECKSUMS.into_iter();
    let found = known.find(|(name, _)| *name == algorithm);
    found.map(|(_, bytes)| bytes)
}

/// Whether it is a value of the algorithm, in base64.
fn is_value(text: &str, algorithm: &str) -> bool {
    let value = STANDARD.decode(text).ok();
    value.is_some_and(|value| bytes_of(algorithm) == Some(value.len()))
}

fn value_among<'a>(sums: &'a [(&'static str, String)], algorithm: &str) -> Option<&'a str> {
    let found = sums.iter().find(|(name, _)| *name == algorithm);
    found.map(|(_, value)| value.as_str())
}

/// The base64 value for one of the algorithms that the library knows.
pub fn value<'a>(checksum: &'a Checksum, algorithm: &str) -> Option<&'a str> {
    match algorithm {
        "crc32" => checksum.checksum_crc32.as_deref(),
        "crc32c" => checksum.checksum_crc32c.as_deref(),
        "crc64nvme" => checksum.checksum_crc64nvme.as_deref(),
        "sha1" => checksum.checksum_sha1.as_deref(),
        "sha256" => checksum.checksum_sha256.as_deref(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::TryStreamExt;

    async fn upload(
        body: &'static str,
        length: u64,
        pairs: &[(&'static str, &str)],
        trailing: Trailing,
    ) -> Result<Checksum, &'static str> {
        let headers: HeaderMap = pairs
            .iter()
            .map(|(n, v)| (n.parse::<http::HeaderName>().unwrap(), v.parse().unwrap()))
            .collect();
        let (body, outcome) = verify(
            stream::iter([Ok(Bytes::from_static(body.as_bytes()))]).boxed(),
            length,
            &headers,
            trailing,
        )
        .map_err(|r| r.code())?;
        match body.try_collect::<Vec<_>>().await {
            Ok(_) => Ok(outcome.checksum()),
            Err(_) => Err(outcome.failure().unwrap().code()),
        }
    }

    /// 64 bytes of 0.
    const NO_SHA512: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\
                             AAAAAAAAAAAAAA==";

    #[tokio::test]
    async fn every_checksum_is_checked() {
        let good = [
            ("content-md5", "XUFAKrxLKna5cZ2REBfFkg=="),
            ("x-amz-checksum-crc32", "NhCmhg=="),
            ("x-amz-checksum-sha1", "qvTGHdzF6KLavt4PO0gs2a6pQ00="),
            ("x-amz-checksum-md5", "XUFAKrxLKna5cZ2REBfFkg=="),
            (
                "x-amz-checksum-sha512",
                "m3HSJL1i83hdltRq0+o9czGb+8KJDKra4t/3JRlnPKcjI8PZm6XBHXx6zG4UuMXaDEZjR1wuXDre9G9z\
                 vN7AQw==",
            ),
            ("x-amz-checksum-xxhash64", "JseCfYifbaM="),
            ("x-amz-checksum-xxhash3", "lVXoVVxi3P0="),
            ("x-amz-checksum-xxhash128", "tenBrQcbPn/Hec+qXlI4GA=="),
            (
                "x-amz-content-sha256",
                "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
            ),
        ];
        let checksum = upload("hello", 5, &good, Trailing::None).await.unwrap();
        assert_eq!(checksum.checksum_crc32.as_deref(), Some("NhCmhg=="));
        for (name, _) in good {
            let (wrong, code) = match name {
                "content-md5" | "x-amz-checksum-md5" | "x-amz-checksum-xxhash128" => {
                    ("AAAAAAAAAAAAAAAAAAAAAA==", "BadDigest")
                }
                "x-amz-checksum-sha512" => (NO_SHA512, "BadDigest"),
                "x-amz-checksum-xxhash64" | "x-amz-checksum-xxhash3" => {
                    ("AAAAAAAAAAA=", "BadDigest")
                }
                "x-amz-content-sha256" => (
                    "0000000000000000000000000000000000000000000000000000000000000000",
                    "XAmzContentSHA256Mismatch",
                ),
                "x-amz-checksum-sha1" => ("AAAAAAAAAAAAAAAAAAAAAAAAAAA=", "BadDigest"),
                _ => ("AAAAAA==", "BadDigest"),
            };
            assert_eq!(
                upload("hello", 5, &[(name, wrong)], Trailing::None)
                    .await
                    .unwrap_err(),
                code,
                "{name}"
            );
        }
        assert_eq!(
            upload("hello", 6, &[], Trailing::None).await.unwrap_err(),
            "IncompleteBody"
        );
        assert_eq!(
            upload("hello", 4, &[], Trailing::None).await.unwrap_err(),
            "IncompleteBody"
        );
        assert_eq!(
            upload("hello", 5, &[("content-md5", "no")], Trailing::None)
                .await
                .unwrap_err(),
            "InvalidDigest"
        );
    }

    #[tokio::test]
    async fn a_value_that_is_no_checksum_is_refused_as_such() {
        for (name, value) in [
            ("x-amz-checksum-crc32", "nonsense"),
            ("x-amz-checksum-crc32", "AAAA"),
            ("x-amz-checksum-crc32c", "NhCmhg"),
            ("x-amz-checksum-crc64nvme", "AAAAAA=="),
            ("x-amz-checksum-sha1", "AAAAAA=="),
            ("x-amz-checksum-sha256", ""),
            ("x-amz-checksum-sha512", "AAAAAA=="),
            ("x-amz-checksum-md5", "AAAAAA=="),
            ("x-amz-checksum-xxhash64", "AAAAAAAAAAAAAAAAAAAAAA=="),
            ("x-amz-checksum-xxhash3", "AAAAAA=="),
            ("x-amz-checksum-xxhash128", "AAAAAAAAAAA="),
        ] {
            let sent = upload("hello", 5, &[(name, value)], Trailing::None).await;
            assert_eq!(sent.unwrap_err(), "InvalidRequest", "{name}: {value}");
        }
    }

    #[tokio::test]
    async fn a_checksum_in_the_trailers_is_checked_and_must_come() {
        let trailers = |value: &str| {
            let headers: HeaderMap = [(
                "x-amz-checksum-crc32".parse::<http::HeaderName>().unwrap(),
                value.parse().unwrap(),
            )]
            .into_iter()
            .collect();
            Trailing::Own(Arc::new(Mutex::new(Some(headers))))
        };
        let announced = [("x-amz-trailer", "x-amz-checksum-crc32")];
        assert!(
            upload("hello", 5, &announced, trailers("NhCmhg=="))
                .await
                .is_ok()
        );
        assert_eq!(
            upload("hello", 5, &announced, trailers("AAAAAA=="))
                .await
                .unwrap_err(),
            "BadDigest"
        );
        assert_eq!(
            upload("hello", 5, &announced, trailers("AAAA"))
                .await
                .unwrap_err(),
            "InvalidRequest"
        );
        assert_eq!(
            upload("hello", 5, &announced, Trailing::None)
                .await
                .unwrap_err(),
            "MalformedTrailerError"
        );
    }

    #[test]
    fn the_names_of_trailers_may_come_in_several_lines() {
        let verified = |second: &str| {
            let mut headers = HeaderMap::new();
            headers.append("x-amz-trailer", "x-amz-checksum-crc32".parse().unwrap());
            headers.append("x-amz-trailer", second.parse().unwrap());
            let body = stream::iter([]).boxed();
            verify(body, 0, &headers, Trailing::None)
                .map(drop)
                .map_err(|r| r.code())
        };
        assert_eq!(verified("x-amz-checksum-sha1"), Ok(()));
        assert_eq!(verified("x-amz-other"), Err("InvalidRequest"));
    }
}
