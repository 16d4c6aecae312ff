//! The signature (Version 4) of a plain read: a GET or HEAD of an object, signed in its headers and
//! without a body. This is what SDKs send all day, so it is checked here, with signing keys that
//! are kept. Every other request, and every read that is not found right here, goes through the S3
//! library, which can say what is wrong with it.
//!
//! Follows "Signature Calculations for the Authorization Header: Transferring Payload in a Single
//! Chunk" of the S3 API reference.
//!
//! Invariant: this accepts at most what the library accepts. The canonical request is made from
//! what the node acts on afterwards (the decoded path, the parsed query), each signed header occurs
//! exactly once, and whatever is unusual (a token, a header twice, an odd scope) is left to the
//! library.

use super::path::Target;
use crate::{auth::Access, config::Secret};
use chrono::{DateTime, NaiveDate, Utc};
use forebay_core::sync::RwLock;
use hmac::{Hmac, KeyInit, Mac};
use http::{
    HeaderMap, HeaderName,
    header::{AUTHORIZATION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING},
    request::Parts,
};
use percent_encoding::percent_decode_str;
use sha2::{Digest, Sha256};
use std::collections::HashMap;

/// How far the clocks of sender and node may differ: the limit of S3 and of the library.
const SKEW_MAX_SECS: u64 = 900;
/// How many signing keys are kept: one for each access key, day and region in use.
const SIGNING_KEYS_MAX: usize = 1024;
/// SHA-256 of nothing.
const EMPTY_PAYLOAD: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

/// The MAC, with what AWS calls the signing key: HMAC's inner and outer blocks are hashed once for
/// all requests of a day.
type SigningKey = Hmac<Sha256>;

/// Checks the signatures of plain reads.
#[derive(Default)]
pub struct Reads {
    /// By access key, day and region, with the secret that the key was made from. A key is added
    /// only after a signature with it was found right, so strangers cannot fill the table.
    keys: RwLock<HashMap<(String, String, String), (Secret, SigningKey)>>,
}

/// The parts of an `Authorization` header.
struct Authorization<'a> {
    access_key: &'a str,
    date: &'a str,
    region: &'a str,
    signed_headers: &'a str,
    signature: &'a str,
}

impl<'a> Authorization<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let rest = text.strip_prefix("AWS4-HMAC-SHA256 Credential=")?;
        let (credential, rest) = rest.split_once(',')?;
        let (signed_headers, rest) = rest
            .trim_start_matches(' ')
            .strip_prefix("SignedHeaders=")?
            .split_once(',')?;
        let signature = rest.trim_start_matches(' ').strip_prefix("Signature=")?;
        let mut parts = credential.split('/');
        let (access_key, date, region) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next()? != "s3" || parts.next()? != "aws4_request" || parts.next().is_some() {
            return None;
        }
        Some(Authorization {
            access_key,
            date,
            region,
            signed_headers,
            signature,
        })
    }
}

impl Reads {
    /// The access key that signed a read, if the signature is right. `None` does not mean that it
    /// is wrong: the request must go through the library.
    pub fn verified<'a>(
        &self,
        head: &'a Parts,
        target: &Target,
        access: &Access,
        now: DateTime<Utc>,
    ) -> Option<&'a str> {
        let headers = &head.headers;
        if headers.contains_key(TRANSFER_ENCODING)
            || headers.contains_key("x-amz-security-token")
            || once(headers, &CONTENT_LENGTH).is_some_and(|length| length != "0")
            || target.query.iter().any(|(name, _)| {
                name.get(..6)
                    .is_some_and(|p| p.eq_ignore_ascii_case("x-amz-"))
            })
        {
            return None;
        }
        let given = Authorization::parse(once(headers, &AUTHORIZATION)?)?;
        let time = once(headers, &HeaderName::from_static("x-amz-date"))?;
        if time.get(..8)? != given.date
            || seconds_of(time)?.abs_diff(now.timestamp()) > SKEW_MAX_SECS
        {
            return None;
        }
        let payload = once(headers, &HeaderName::from_static("x-amz-content-sha256"))?;
        if payload != "UNSIGNED-PAYLOAD" && payload != EMPTY_PAYLOAD {
            return None;
        }
        let signature = unhex(given.signature)?;
        let canonical = canonical_request(head, target, given.signed_headers, payload)?;

        let secret = access.secret(given.access_key)?;
        let name = (
            given.access_key.to_owned(),
            given.date.to_owned(),
            given.region.to_owned(),
        );
        let kept = self
            .keys
            .read()
            .get(&name)
            .filter(|(made_from, _)| made_from.reveal() == secret.reveal())
            .map(|(_, key)| key.clone());
        let fresh = kept.is_none();
        let key = match kept {
            Some(key) => key,
            None => signing_key(&secret, given.date, given.region)?,
        };
        let mut mac = key.clone();
        mac.update(b"AWS4-HMAC-SHA256\n");
        mac.update(time.as_bytes());
        mac.update(b"\n");
        for part in [given.date, "/", given.region, "/s3/aws4_request\n"] {
            mac.update(part.as_bytes());
        }
        let mut hash = [0; 64];
        hex(&Sha256::digest(canonical.as_bytes()).into(), &mut hash);
        mac.update(&hash);
        // Compares in constant time.
        mac.verify_slice(&signature).ok()?;
        if fresh {
            let mut keys = self.keys.write();
            if keys.len() >= SIGNING_KEYS_MAX {
                // Mostly keys of days that are over.
                keys.clear();
            }
            keys.insert(name, (secret, key));
        }
        Some(given.access_key)
    }
}

/// The value of a header that occurs exactly once, without the spaces around it.
fn once<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then(|| value.trim())
}

/// `20260801T120000Z` in seconds since 1970.
fn seconds_of(time: &str) -> Option<i64> {
    let bytes = time.as_bytes();
    if bytes.len() != 16 || bytes[8] != b'T' || bytes[15] != b'Z' {
        return None;
    }
    let number = |from: usize, to: usize| -> Option<u32> {
        let digits = &time.get(from..to)?;
        digits
            .bytes()
            .all(|b| b.is_ascii_digit())
            .then(|| digits.parse().ok())?
    };
    let year = i32::try_from(number(0, 4)?).ok()?;
    let date = NaiveDate::from_ymd_opt(year, number(4, 6)?, number(6, 8)?)?;
    let time = date.and_hms_opt(number(9, 11)?, number(11, 13)?, number(13, 15)?)?;
    Some(time.and_utc().timestamp())
}

fn signing_key(secret: &Secret, date: &str, region: &str) -> Option<SigningKey> {
    let mut key = [b"AWS4", secret.reveal().as_bytes()].concat();
    for part in [date, region, "s3", "aws4_request"] {
        let mut mac = SigningKey::new_from_slice(&key).ok()?;
        mac.update(part.as_bytes());
        key.clear();
        key.extend_from_slice(&mac.finalize().into_bytes());
    }
    SigningKey::new_from_slice(&key).ok()
}

fn canonical_request(
    head: &Parts,
    target: &Target,
    signed_headers: &str,
    payload: &str,
) -> Option<String> {
    let headers = &head.headers;
    let mut text = String::with_capacity(512);
    text.push_str(head.method.as_str());
    text.push('\n');
    encode(percent_decode_str(head.uri.path()), true, &mut text);
    text.push('\n');
    let mut query: Vec<(String, String)> = target
        .query
        .iter()
        .map(|(name, value)| {
            let (mut n, mut v) = (String::new(), String::new());
            encode(name.bytes(), false, &mut n);
            encode(value.bytes(), false, &mut v);
            (n, v)
        })
        .collect();
    query.sort_by(|a, b| a.0.cmp(&b.0));
    for (i, (name, value)) in query.iter().enumerate() {
        if i > 0 {
            text.push('&');
        }
        text.push_str(name);
        text.push('=');
        text.push_str(value);
    }
    text.push('\n');
    let (mut last, mut host) = ("", false);
    for name in signed_headers.split(';') {
        // Sorted and without duplicates, so that the list means what it says.
        if name <= last || name == AUTHORIZATION.as_str() {
            return None;
        }
        last = name;
        let name = HeaderName::from_lowercase(name.as_bytes()).ok()?;
        host |= name == HOST;
        text.push_str(name.as_str());
        text.push(':');
        for (i, word) in once(headers, &name)?.split_whitespace().enumerate() {
            if i > 0 {
                text.push(' ');
            }
            text.push_str(word);
        }
        text.push('\n');
    }
    text.push('\n');
    text.push_str(signed_headers);
    text.push('\n');
    text.push_str(payload);
    host.then_some(text)
}

/// Percent-encodes all but the characters that RFC 3986 leaves unreserved, as AWS's `UriEncode`.
fn encode(bytes: impl Iterator<Item = u8>, path: bool, to: &mut String) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for byte in bytes {
        if byte.is_ascii_alphanumeric()
            || matches!(byte, b'-' | b'.' | b'_' | b'~')
            || path && byte == b'/'
        {
            to.push(byte.into());
        } else {
            to.push('%');
            to.push(DIGITS[usize::from(byte >> 4)].into());
            to.push(DIGITS[usize::from(byte & 15)].into());
        }
    }
}

fn hex(bytes: &[u8; 32], to: &mut [u8; 64]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (byte, pair) in bytes.iter().zip(to.chunks_exact_mut(2)) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
}

/// 64 digits in lower case, as every client writes them.
fn unhex(text: &str) -> Option<[u8; 32]> {
    let digits: &[u8; 64] = text.as_bytes().try_into().ok()?;
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let value = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        };
        *byte = value(pair[0])? << 4 | value(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Auth, KeyPair};
    use http::{HeaderValue, header::RANGE};

    /// The key of the examples in the S3 API reference.
    fn access() -> Access {
        let auth = Auth {
            keys: vec![KeyPair {
                access_key: "AKIAIOSFODNN7EXAMPLE".into(),
                secret_key: Secret::new("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
                ..KeyPair::default()
            }],
            ..Auth::default()
        };
        Access::new(&auth).unwrap()
    }

    /// "Example: GET Object" of the S3 API reference, with the signature that is printed there.
    fn example() -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("host", "examplebucket.s3.amazonaws.com"),
            ("range", "bytes=0-9"),
            ("x-amz-content-sha256", EMPTY_PAYLOAD),
            ("x-amz-date", "20130524T000000Z"),
            (
                "authorization",
                "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,\
                 SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,\
                 Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
            ),
        ] {
            headers.insert(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
        }
        headers
    }

    fn verified(reads: &Reads, uri: &str, headers: &HeaderMap, access: &Access, late: i64) -> bool {
        let (mut head, ()) = http::Request::get(uri).body(()).unwrap().into_parts();
        head.headers = headers.clone();
        let target =
            Target::of(&head.uri, headers, &["s3.amazonaws.com".to_owned()], false).unwrap();
        let now = DateTime::from_timestamp(1_369_353_600 + late, 0).unwrap();
        reads.verified(&head, &target, access, now) == Some("AKIAIOSFODNN7EXAMPLE")
    }

    #[test]
    fn the_example_of_the_s3_reference_is_right_and_its_key_is_kept() {
        let (reads, access) = (Reads::default(), access());
        for late in [0, 900, -900] {
            assert!(verified(&reads, "/test.txt", &example(), &access, late));
        }
        assert_eq!(reads.keys.read().len(), 1);
        // The same key, with one character escaped that needs no escaping.
        assert!(verified(&reads, "/t%65st.txt", &example(), &access, 0));
    }

    #[test]
    fn a_read_that_differs_from_what_was_signed_is_left_to_the_library() {
        let (reads, access) = (Reads::default(), access());
        assert!(verified(&reads, "/test.txt", &example(), &access, 0));
        for uri in [
            "/test.txu",
            "/test.txt?x=1",
            "/test.txt?partNumber=1",
            "//test.txt",
        ] {
            assert!(!verified(&reads, uri, &example(), &access, 0), "{uri}");
        }
        for late in [901, -901] {
            assert!(!verified(&reads, "/test.txt", &example(), &access, late));
        }
        let changes: [(&str, &'static str); 10] = [
            ("range", "bytes=0-10"),
            ("host", "examplebucket.s3.amazonaws.com:1"),
            ("x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
            ("x-amz-date", "20130524T000001Z"),
            ("x-amz-date", "20130525T000000Z"),
            ("x-amz-date", "2013-05-24T00:00"),
            ("content-length", "1"),
            ("transfer-encoding", "chunked"),
            ("x-amz-security-token", "t"),
            (
                "authorization",
                "AWS4-HMAC-SHA256 Credential=,SignedHeaders=,Signature=",
            ),
        ];
        for (name, value) in changes {
            let mut headers = example();
            headers.insert(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
            assert!(
                !verified(&reads, "/test.txt", &headers, &access, 0),
                "{name}: {value}"
            );
        }
        let mut twice = example();
        twice.append(RANGE, HeaderValue::from_static("bytes=0-9"));
        assert!(!verified(&reads, "/test.txt", &twice, &access, 0));
        let given = example()[AUTHORIZATION].to_str().unwrap().to_owned();
        for (from, to) in [
            ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLF"),
            ("us-east-1", "us-east-2"),
            ("20130524", "20130523"),
            ("/s3/", "/sts/"),
            ("host;range", "range;host"),
            ("host;range", "host;host;range"),
            ("host;range;", "range;"),
            ("f0e8", "f0e9"),
            ("f0e8", "F0E8"),
            ("db41", "db4"),
        ] {
            let mut headers = example();
            headers.insert(AUTHORIZATION, given.replace(from, to).parse().unwrap());
            assert!(
                !verified(&reads, "/test.txt", &headers, &access, 0),
                "{from} → {to}"
            );
        }
    }

    #[test]
    fn a_kept_key_is_of_no_use_once_its_secret_changed() {
        let (reads, access) = (Reads::default(), access());
        assert!(verified(&reads, "/test.txt", &example(), &access, 0));
        let mut auth = Auth::default();
        auth.keys.push(KeyPair {
            access_key: "AKIAIOSFODNN7EXAMPLE".into(),
            secret_key: Secret::new("another secret"),
            ..KeyPair::default()
        });
        let access = Access::new(&auth).unwrap();
        assert!(!verified(&reads, "/test.txt", &example(), &access, 0));
        let access = Access::new(&Auth::default()).unwrap();
        assert!(!verified(&reads, "/test.txt", &example(), &access, 0));
    }

    #[test]
    fn names_and_queries_are_encoded_as_the_sender_did() {
        let mut text = String::new();
        encode("/a b/ü+~%".bytes(), true, &mut text);
        assert_eq!(text, "/a%20b/%C3%BC%2B~%25");
        text.clear();
        encode("a/b=c&".bytes(), false, &mut text);
        assert_eq!(text, "a%2Fb%3Dc%26");
    }
}
