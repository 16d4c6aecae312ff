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
use std::sync::Arc;

pub(super) const ALGORITHMS: [&str; 5] = ["crc32", "crc32c", "crc64nvme", "sha1", "sha256"];

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
}

impl Verified {
    /// Why the body was refused, if it was.
    pub fn failure(&self) -> Option<Refusal> {
        self.0.lock().failure.clone()
    }

    /// The requested checksums, as computed.
    pub fn checksum(&self) -> Checksum {
        self.0.lock().checksum.clone().unwrap_or_default()
    }
}

struct Check {
    body: ByteStream,
    expected_length: u64,
    length: u64,
    md5: Option<(Md5, Vec<u8>)>,
    payload: Option<(Sha256, String)>,
    hasher: ChecksumHasher,
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
    for algorithm in ALGORITHMS {
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
        match ALGORITHMS
            .iter()
            .find(|a| name.strip_prefix("x-amz-checksum-") == Some(**a))
        {
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
    for (algorithm, _) in &expected {
        match *algorithm {
            "crc32" => hasher.crc32 = Some(s3s::crypto::Crc32::new()),
            "crc32c" => hasher.crc32c = Some(s3s::crypto::Crc32c::new()),
            "crc64nvme" => hasher.crc64nvme = Some(s3s::crypto::Crc64Nvme::new()),
            "sha1" => hasher.sha1 = Some(s3s::crypto::Sha1::new()),
            _ => hasher.sha256 = Some(Sha256::new()),
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
            if value(&checksum, algorithm) != Some(expected.as_str()) {
                return self.fail(
                    "BadDigest",
                    format!("the body does not have the {name} that was sent"),
                );
            }
        }
        self.outcome.0.lock().checksum = Some(checksum);
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

/// Whether it is a value of the algorithm, in base64.
fn is_value(text: &str, algorithm: &str) -> bool {
    let bytes = match algorithm {
        "crc32" | "crc32c" => 4,
        "crc64nvme" => 8,
        "sha1" => 20,
        _ => 32,
    };
    STANDARD
        .decode(text)
        .is_ok_and(|value| value.len() == bytes)
}

/// The base64 value for one algorithm.
pub fn value<'a>(checksum: &'a Checksum, algorithm: &str) -> Option<&'a str> {
    match algorithm {
        "crc32" => checksum.checksum_crc32.as_deref(),
        "crc32c" => checksum.checksum_crc32c.as_deref(),
        "crc64nvme" => checksum.checksum_crc64nvme.as_deref(),
        "sha1" => checksum.checksum_sha1.as_deref(),
        _ => checksum.checksum_sha256.as_deref(),
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

    #[tokio::test]
    async fn every_checksum_is_checked() {
        let good = [
            ("content-md5", "XUFAKrxLKna5cZ2REBfFkg=="),
            ("x-amz-checksum-crc32", "NhCmhg=="),
            ("x-amz-checksum-sha1", "qvTGHdzF6KLavt4PO0gs2a6pQ00="),
            (
                "x-amz-content-sha256",
                "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
            ),
        ];
        let checksum = upload("hello", 5, &good, Trailing::None).await.unwrap();
        assert_eq!(checksum.checksum_crc32.as_deref(), Some("NhCmhg=="));
        for (name, _) in good {
            let (wrong, code) = match name {
                "content-md5" => ("AAAAAAAAAAAAAAAAAAAAAA==", "BadDigest"),
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
