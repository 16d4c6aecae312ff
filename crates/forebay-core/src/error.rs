//! One error type for the whole program.
//!
//! An [`Error`] says *what* went wrong (`message`), of which class it is ([`ErrorKind`], the only
//! thing that callers branch on and that protocols map to a status), and *what to do* (`hint`). It
//! is cheap to clone, because a single-flight fill hands the same failure to every reader that
//! waited for it. It never holds a secret: constructors take text that was made for people.

use std::{fmt, sync::Arc, time::Duration};

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The class of an error: what a caller can decide by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is malformed: a bad name, bad JSON, bad parameter. HTTP 400.
    Invalid,
    /// The object, or the archive member, does not exist. HTTP 404.
    NotFound,
    /// The bucket is not one that this node serves. HTTP 404.
    BucketNotFound,
    /// A bucket or object is there already. HTTP 409.
    AlreadyExists,
    /// A bucket that is to be removed still has objects, or an upload is in the wrong state. HTTP
    /// 409.
    Conflict,
    /// The byte range lies outside the object or the member. HTTP 416.
    RangeNotSatisfiable,
    /// `If-Match` or `If-Unmodified-Since` did not hold. HTTP 412.
    PreconditionFailed,
    /// `If-None-Match` or `If-Modified-Since` did not hold. HTTP 304.
    NotModified,
    /// The object changed at the origin while it was being read: one version or none. HTTP 503
    /// before the first byte, a cut stream after.
    VersionChanged,
    /// No credentials, or wrong ones. HTTP 401 (S3: 403).
    Unauthenticated,
    /// The credentials, or the origin's, do not allow it. HTTP 403.
    PermissionDenied,
    /// Over a limit of this node: try again later. HTTP 429 or 503, with Retry-After.
    Busy,
    /// The request is larger than this node accepts. HTTP 413.
    TooLarge,
    /// The origin did not answer in time. HTTP 504.
    Timeout,
    /// The origin cannot be reached or answers with errors. HTTP 502.
    OriginUnavailable,
    /// Bytes that fail their checksum, an archive that cannot be parsed. HTTP 502.
    Corrupt,
    /// Not offered here, or not by this origin. HTTP 501.
    Unsupported,
    /// The node is stopping. HTTP 503.
    ShuttingDown,
    /// A defect of this program, or a local disk that failed. HTTP 500.
    Internal,
}

impl ErrorKind {
    /// The HTTP status that each of our protocols answers with.
    pub fn http_status(self) -> u16 {
        use ErrorKind::*;
        match self {
            NotModified => 304,
            Invalid => 400,
            Unauthenticated => 401,
            PermissionDenied => 403,
            NotFound | BucketNotFound => 404,
            AlreadyExists | Conflict => 409,
            PreconditionFailed => 412,
            TooLarge => 413,
            RangeNotSatisfiable => 416,
            Busy => 429,
            Internal => 500,
            Unsupported => 501,
            OriginUnavailable | Corrupt => 502,
            VersionChanged | ShuttingDown => 503,
            Timeout => 504,
        }
    }

    /// A short stable code for logs, JSON errors and metric labels.
    pub fn code(self) -> &'static str {
        use ErrorKind::*;
        match self {
            Invalid => "invalid",
            NotFound => "not_found",
            BucketNotFound => "bucket_not_found",
            AlreadyExists => "already_exists",
            Conflict => "conflict",
            RangeNotSatisfiable => "range_not_satisfiable",
            PreconditionFailed => "precondition_failed",
            NotModified => "not_modified",
            VersionChanged => "version_changed",
            Unauthenticated => "unauthenticated",
            PermissionDenied => "permission_denied",
            Busy => "busy",
            TooLarge => "too_large",
            Timeout => "timeout",
            OriginUnavailable => "origin_unavailable",
            Corrupt => "corrupt",
            Unsupported => "unsupported",
            ShuttingDown => "shutting_down",
            Internal => "internal",
        }
    }

    /// The kind that [`code`](Self::code) gives this name.
    pub fn from_code(code: &str) -> Option<Self> {
        use ErrorKind::*;
        let all = [
            Invalid,
            NotFound,
            BucketNotFound,
            AlreadyExists,
            Conflict,
            RangeNotSatisfiable,
            PreconditionFailed,
            NotModified,
            VersionChanged,
            Unauthenticated,
            PermissionDenied,
            Busy,
            TooLarge,
            Timeout,
            OriginUnavailable,
            Corrupt,
            Unsupported,
            ShuttingDown,
            Internal,
        ];
        all.into_iter().find(|kind| kind.code() == code)
    }

    /// Whether the same request may succeed if it is sent again unchanged.
    pub fn is_transient(self) -> bool {
        use ErrorKind::*;
        matches!(
            self,
            Busy | Timeout | OriginUnavailable | VersionChanged | ShuttingDown
        )
    }

    /// Whether GetBatch counts it as soft: one entry's trouble, which `coer` turns into a
    /// placeholder.
    pub fn is_soft(self) -> bool {
        use ErrorKind::*;
        matches!(
            self,
            NotFound
                | RangeNotSatisfiable
                | VersionChanged
                | Timeout
                | OriginUnavailable
                | PermissionDenied
                | Corrupt
                | Unsupported
        )
    }
}

/// What went wrong, where, and what to do about it.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
    retry_after: Option<Duration>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error(Arc::new(Inner {
            kind,
            message: message.into(),
            hint: None,
            retry_after: None,
            source: None,
        }))
    }

    /// Adds what to do about it: one sentence, shown after the message.
    pub fn hint(self, hint: impl Into<String>) -> Self {
        self.edit(|i| i.hint = Some(hint.into()))
    }

    /// Adds when to try again; protocols send it as `Retry-After`.
    pub fn retry_after(self, after: Duration) -> Self {
        self.edit(|i| i.retry_after = Some(after))
    }

    /// Adds the error below this one.
    pub fn source(self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.edit(|i| i.source = Some(source.into()))
    }

    /// Puts where it happened in front of the message: `"<context>: <message>"`.
    pub fn context(self, context: impl fmt::Display) -> Self {
        self.edit(|i| i.message = format!("{context}: {}", i.message))
    }

    /// The same error under another kind.
    pub fn with_kind(self, kind: ErrorKind) -> Self {
        self.edit(|i| i.kind = kind)
    }

    fn edit(self, f: impl FnOnce(&mut Inner)) -> Self {
        let mut inner = match Arc::try_unwrap(self.0) {
            Ok(inner) => inner,
            // Shared already: keep the text of the source, which cannot be cloned.
            Err(shared) => Inner {
                kind: shared.kind,
                message: shared.message.clone(),
                hint: shared.hint.clone(),
                retry_after: shared.retry_after,
                source: shared.source.as_ref().map(|s| s.to_string().into()),
            },
        };
        f(&mut inner);
        Error(Arc::new(inner))
    }

    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    pub fn message(&self) -> &str {
        &self.0.message
    }

    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    pub fn retry_after_hint(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// The message with its causes and hint, for people: `message: cause (hint)`.
    pub fn describe(&self) -> String {
        let mut text = self.0.message.clone();
        let mut cause = std::error::Error::source(self);
        while let Some(c) = cause {
            let c_text = c.to_string();
            if !text.contains(&c_text) {
                text.push_str(": ");
                text.push_str(&c_text);
            }
            cause = c.source();
        }
        if let Some(hint) = &self.0.hint {
            text.push_str(" (");
            text.push_str(hint);
            text.push(')');
        }
        text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        if let Some(hint) = &self.0.hint {
            write!(f, " ({hint})")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.0.kind, self.describe())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0
            .source
            .as_ref()
            .map(|s| &**s as &(dyn std::error::Error + 'static))
    }
}

macro_rules! constructors {
    ($($name:ident => $kind:ident),* $(,)?) => { impl Error { $(
        #[doc = concat!("An error of kind [`ErrorKind::", stringify!($kind), "`].")]
        pub fn $name(message: impl Into<String>) -> Self { Self::new(ErrorKind::$kind, message) }
    )* } };
}

constructors! {
    invalid => Invalid,
    not_found => NotFound,
    bucket_not_found => BucketNotFound,
    range_not_satisfiable => RangeNotSatisfiable,
    version_changed => VersionChanged,
    permission_denied => PermissionDenied,
    unsupported => Unsupported,
    corrupt => Corrupt,
    timeout => Timeout,
    origin_unavailable => OriginUnavailable,
    busy => Busy,
    internal => Internal,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_where_and_what_to_do() {
        let e = Error::invalid("the name is empty")
            .context("entry 3")
            .hint("give each entry an objname");
        assert_eq!(e.kind(), ErrorKind::Invalid);
        assert_eq!(
            e.to_string(),
            "entry 3: the name is empty (give each entry an objname)"
        );
    }

    #[test]
    fn a_shared_error_can_still_be_given_context() {
        let e = Error::timeout("no answer in 5 s").source("connection reset");
        let shared = e.clone();
        let e = e.context("bucket a");
        assert_eq!(shared.message(), "no answer in 5 s");
        assert_eq!(e.describe(), "bucket a: no answer in 5 s: connection reset");
    }
}
