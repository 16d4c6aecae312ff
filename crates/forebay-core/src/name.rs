//! Bucket and object names: what is accepted, and how it is shown.
//!
//! Invariant: an [`ObjectName`] that exists has passed [`validate_bucket`] and [`validate_key`], so
//! no layer below checks again, and none can be led out of a bucket by `..` or to a file by NUL.

use crate::{Error, Result, limits};
use std::{fmt, sync::Arc};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// A bucket and a key in it, both valid.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectName {
    bucket: Arc<str>,
    key: Arc<str>,
}

impl ObjectName {
    /// Checks both parts.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) with the reason.
    pub fn new(bucket: impl Into<Arc<str>>, key: impl Into<Arc<str>>) -> Result<Self> {
        let (bucket, key) = (bucket.into(), key.into());
        validate_bucket(&bucket)?;
        validate_key(&key)?;
        Ok(Self { bucket, key })
    }

    /// The bucket.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// The bucket, to be shared.
    pub fn bucket_arc(&self) -> &Arc<str> {
        &self.bucket
    }

    /// The key.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// 128 bits that stand for the name; equal names hash equally on every platform and release.
    pub fn hash128(&self) -> u128 {
        hash_name(&self.bucket, &self.key)
    }
}

/// The hash behind [`ObjectName::hash128`], for callers that hold the parts only.
pub fn hash_name(bucket: &str, key: &str) -> u128 {
    xxh3_128_with_seed(key.as_bytes(), hash_bucket(bucket))
}

/// A hash of a bucket's name, the same on all nodes.
pub fn hash_bucket(bucket: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bucket.as_bytes())
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.bucket, self.key)
    }
}

impl fmt::Debug for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", format_args!("{self}"))
    }
}

/// An address without its scheme. People copy addresses from elsewhere; which service a bucket is
/// in is the node's configuration.
pub fn without_scheme(text: &str) -> &str {
    const SCHEMES: [&str; 5] = ["s3", "gs", "az", "ais", "forebay"];
    match text.split_once("://") {
        Some((scheme, rest)) if SCHEMES.contains(&scheme) => rest,
        _ => text,
    }
}

/// A bucket name: 2 to 63 characters of `a-z A-Z 0-9 . _ -`, beginning with a letter or digit.
/// (S3's rule widened by what AIStore, GCS and Azure allow. `v1` is taken by the API.)
pub fn validate_bucket(bucket: &str) -> Result<()> {
    let ok_len =
        (limits::BUCKET_NAME_MIN_BYTES..=limits::BUCKET_NAME_MAX_BYTES).contains(&bucket.len());
    let ok_chars = bucket
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    let ok_start = bucket
        .bytes()
        .next()
        .is_some_and(|b| b.is_ascii_alphanumeric());
    if !(ok_len && ok_chars && ok_start) || bucket.contains("..") {
        return Err(
            Error::invalid(format!("{:?} is not a bucket name", shorten(bucket)))
                .hint("2 to 63 characters of a-z A-Z 0-9 . _ -, beginning with a letter or digit"),
        );
    }
    if bucket == "v1" {
        return Err(Error::invalid(
            "\"v1\" cannot be the name of a bucket: /v1/ is the path of the API",
        ));
    }
    Ok(())
}

/// An object key: 1 to 1,024 bytes of UTF-8 without control characters, with no segment that is
/// empty, `.` or `..`.
pub fn validate_key(key: &str) -> Result<()> {
    let bad = |why: &str| {
        Err(Error::invalid(format!(
            "{:?} is not an object name: {why}",
            shorten(key)
        )))
    };
    if key.is_empty() {
        return bad("it is empty");
    }
    if key.len() > limits::OBJECT_KEY_MAX_BYTES {
        return bad("it is longer than 1024 bytes");
    }
    if key.chars().any(|c| c.is_control()) {
        return bad("it holds a control character");
    }
    if key.split('/').any(|s| s == "." || s == "..") {
        return bad("a part of it is '.' or '..'");
    }
    let body = key.strip_suffix('/').unwrap_or(key);
    if body.split('/').any(str::is_empty) {
        return bad("it begins with '/' or holds '//'");
    }
    Ok(())
}

/// At most 80 characters of a name, for error messages.
pub fn shorten(name: &str) -> String {
    match name.char_indices().nth(80) {
        Some((at, _)) => format!("{}…", &name[..at]),
        None => name.to_owned(),
    }
}

/// The known word that was probably meant: at an edit distance of at most a third of the word's
/// length.
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let allowed = (word.len() / 3).max(1);
    known
        .iter()
        .filter(|k| k.len().abs_diff(word.len()) <= allowed)
        .map(|k| (strsim::damerau_levenshtein(word, k), *k))
        .filter(|(d, _)| *d <= allowed)
        .min()
        .map(|(_, k)| k)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_is_written_wrong_is_found() {
        let known = ["name", "region", "profile"];
        for (word, found) in [
            ("nmae", Some("name")),
            ("regoin", Some("region")),
            ("profil", Some("profile")),
            ("secret", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, &known), found, "{word}");
        }
    }

    #[test]
    fn the_scheme_of_an_address_has_no_meaning() {
        for (text, without) in [
            ("s3://bk/k", "bk/k"),
            ("gs://bk/k", "bk/k"),
            ("az://bk/k", "bk/k"),
            ("bk/k", "bk/k"),
            ("bk/s3://k", "bk/s3://k"),
            ("http://bk/k", "http://bk/k"),
        ] {
            assert_eq!(without_scheme(text), without);
        }
    }

    #[test]
    fn names_are_checked() {
        for ok in [
            "a/b.jpg",
            "ü/日本.txt",
            "a b",
            "%41",
            "a..b/c",
            &"x".repeat(1024),
        ] {
            assert!(ObjectName::new("bucket-1", ok).is_ok(), "{ok}");
        }
        for bad in [
            "",
            "/a",
            "a//b",
            "../a",
            "a/./b",
            "a/..",
            "a\0b",
            "a\nb",
            &"x".repeat(1025),
        ] {
            assert!(ObjectName::new("bucket-1", bad).is_err(), "{bad:?}");
        }
        for bad in ["", "a", "v1", "a..b", ".a", "a/b", "ü", &"x".repeat(64)] {
            assert!(ObjectName::new(bad, "k").is_err(), "{bad:?}");
        }
    }

    #[test]
    fn hashes_do_not_change_between_releases() {
        assert_eq!(
            hash_name("bucket", "a/b"),
            ObjectName::new("bucket", "a/b").unwrap().hash128()
        );
        assert_ne!(hash_name("bucket", "a/b"), hash_name("bucketa", "/b"));
    }
}
