//! What every origin must do, as a suite that runs for each one against its real server.
//!
//! [`run`] takes an empty bucket and a [`Profile`] that says what the origin is known not to offer;
//! everything else must hold. A failure is an `Err` with the name of the check and what was seen,
//! so that tests print one useful line.

mod listing;
mod reading;
mod writing;

use bytes::Bytes;
use forebay_core::{ErrorKind, Result};
use forebay_origin::{GetRequest, Origin, PutRequest, body};
use std::{future::Future, pin::Pin};

/// What an origin offers. [`Profile::FULL`] is S3.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    /// `If-Match` on writes; a writable origin always needs `IfAbsent`.
    pub put_if_match: bool,
    /// User metadata and attributes come back.
    pub attributes: bool,
    /// Keys that a file system cannot hold together (`a` and `a/b`), and keys that end in `/`.
    pub keys_are_strings: bool,
    /// Multipart uploads can begin with a condition.
    pub conditional_uploads: bool,
    /// Copies within the origin.
    pub copy: bool,
    /// Copies of one specific version of the source.
    pub pinned_copies: bool,
    /// S3's multipart uploads.
    pub parts: bool,
    /// Keys may hold a backslash.
    pub backslash: bool,
    /// No page is longer than requested, and no prefix is on two pages.
    pub exact_pages: bool,
    /// Roll-up at strings other than `/`.
    pub any_delimiter: bool,
    /// The minimum size of parts before the last.
    pub part_bytes: usize,
}

impl Profile {
    /// Everything, with S3's parts of 5 MiB.
    pub const FULL: Profile = Profile {
        put_if_match: true,
        attributes: true,
        keys_are_strings: true,
        conditional_uploads: true,
        copy: true,
        pinned_copies: true,
        parts: true,
        exact_pages: true,
        backslash: true,
        any_delimiter: true,
        part_bytes: 5 << 20,
    };
}

/// A check that failed, and how.
pub type Failure = String;
pub(crate) type Check<'a> = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send + 'a>>;

/// Runs every check against an empty bucket, each under its own prefix.
///
/// # Errors
/// All failed checks, one line for each.
pub async fn run(origin: &dyn Origin, profile: Profile) -> Result<(), Failure> {
    let mut failures = Vec::new();
    let mut checks: Vec<(&str, Check<'_>)> = Vec::new();
    checks.extend(reading::checks(origin, profile));
    checks.extend(listing::checks(origin, profile));
    checks.extend(writing::checks(origin, profile));
    for (name, check) in checks {
        if let Err(e) = check.await {
            failures.push(format!("{name}: {e}"));
        }
    }
    if failures.is_empty() {
        Ok(())
    } else {
        Err(format!(
            "{}:\n  {}",
            origin.describe(),
            failures.join("\n  ")
        ))
    }
}

/// Checks reads of an origin that is read-only: `small` holds [`SMALL`], `empty` nothing, `absent`
/// does not exist.
pub async fn run_read_only(
    origin: &dyn Origin,
    small: &str,
    empty: &str,
    absent: &str,
) -> Result<(), Failure> {
    reading::reads(origin, small, empty, absent)
        .await
        .map_err(|e| format!("{}: {e}", origin.describe()))
}

/// The content of the small test object.
pub const SMALL: &[u8] = b"The quick brown fox jumps over the lazy dog.";

/// Bytes that show where they belong: different at every offset that a mistake could produce.
pub fn pattern(len: usize) -> Bytes {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out.extend_from_slice(&x.to_le_bytes());
    }
    out.truncate(len);
    out.into()
}

/// Fails a check unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
pub(crate) use ensure;

pub(crate) trait Explain<T> {
    /// A failure, with what was being done.
    fn during(self, what: &str) -> Result<T, Failure>;
}

impl<T> Explain<T> for Result<T> {
    fn during(self, what: &str) -> Result<T, Failure> {
        self.map_err(|e| format!("{what}: {:?} {e}", e.kind()))
    }
}

pub(crate) async fn put(
    origin: &dyn Origin,
    key: &str,
    content: &[u8],
) -> Result<Option<String>, Failure> {
    put_as(origin, key, content, PutRequest::default())
        .await
        .during(&format!("put {key:?}"))
}

pub(crate) async fn put_as(
    origin: &dyn Origin,
    key: &str,
    content: &[u8],
    request: PutRequest,
) -> Result<Option<String>> {
    let body = body::from_bytes(Bytes::copy_from_slice(content));
    Ok(origin
        .put(key, request, Some(content.len() as u64), body)
        .await?
        .etag)
}

pub(crate) async fn read(
    origin: &dyn Origin,
    key: &str,
    request: GetRequest,
) -> Result<(Bytes, forebay_origin::GetResponse)> {
    let mut answer = origin.get(key, request).await?;
    let stream = std::mem::replace(&mut answer.body, body::empty());
    let bytes = body::collect(stream, 1 << 30).await?;
    Ok((bytes, answer))
}

pub(crate) fn expect_kind<T>(
    result: Result<T>,
    kind: ErrorKind,
    what: &str,
) -> Result<(), Failure> {
    match result {
        Err(e) if e.kind() == kind => Ok(()),
        Err(e) => Err(format!(
            "{what}: expected {kind:?}, got {:?}: {e}",
            e.kind()
        )),
        Ok(_) => Err(format!("{what}: expected {kind:?}, got success")),
    }
}
