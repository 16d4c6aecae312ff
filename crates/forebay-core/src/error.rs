//! One error type for the whole program.
//!
//! An [`Error`] says *what* went wrong (`message`), its class ([`ErrorKind`], the only thing that
//! callers branch on and that protocols map to a status), and *what to do* (`hint`). It is cheap to
//! clone, because a single-flight fill hands the same failure to every reader that waited for it.
//! It never holds a secret: constructors take text written for people.

use std::{fmt, io, path::Path, sync::Arc, time::Duration};

/// What may fail with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The table of kinds: name, code, HTTP status, each once. Where several kinds have one status, the
/// first of them is what that status means by itself ([`ErrorKind::from_http_status`]).
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident, $code:literal, $status:literal;)*) => {
        /// The class of an error: what a caller can decide by.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorKind {
            $($(#[$doc])* #[doc = concat!(" HTTP ", $status, ".")] $kind,)*
        }

        impl ErrorKind {
            /// All kinds, in the order of the table.
            pub const ALL: &[ErrorKind] = &[$(ErrorKind::$kind),*];

            /// The HTTP status that each of our protocols answers with.
            pub const fn http_status(self) -> u16 {
                match self { $(ErrorKind::$kind => $status,)* }
            }

            /// A short stable code for logs, JSON errors and metric labels.
            pub const fn code(self) -> &'static str {
                match self { $(ErrorKind::$kind => $code,)* }
            }
        }
    };
}

kinds! {
    /// `If-None-Match` or `If-Modified-Since` did not hold.
    NotModified, "not_modified", 304;
    /// The request is malformed: a bad name, bad JSON, bad parameter.
    Invalid, "invalid", 400;
    /// The request names an archive format that this node does not know.
    UnknownFormat, "unknown_format", 400;
    /// A part of an upload, not the last one, is smaller than its origin takes.
    TooSmall, "too_small", 400;
    /// No credentials, or wrong ones. (S3: 403.)
    Unauthenticated, "unauthenticated", 401;
    /// The credentials, or the origin's, do not allow it.
    PermissionDenied, "permission_denied", 403;
    /// The object, or the archive member, does not exist.
    NotFound, "not_found", 404;
    /// The bucket is not one that this node serves.
    BucketNotFound, "bucket_not_found", 404;
    /// A bucket that is to be removed still has objects, or an upload is in the wrong state.
    Conflict, "conflict", 409;
    /// A bucket or object is there already.
    AlreadyExists, "already_exists", 409;
    /// `If-Match` or `If-Unmodified-Since` did not hold.
    PreconditionFailed, "precondition_failed", 412;
    /// The request is larger than this node accepts.
    TooLarge, "too_large", 413;
    /// The byte range lies outside the object or the member.
    RangeNotSatisfiable, "range_not_satisfiable", 416;
    /// Over a limit of this node: try again later, as Retry-After says. (S3: 503.)
    Busy, "busy", 429;
    /// A defect of this program, or a local disk that failed.
    Internal, "internal", 500;
    /// Not offered here, or not by this origin.
    Unsupported, "unsupported", 501;
    /// The origin cannot be reached or answers with errors.
    OriginUnavailable, "origin_unavailable", 502;
    /// Bytes that fail their checksum, an archive that cannot be parsed.
    Corrupt, "corrupt", 502;
    /// The node is stopping.
    ShuttingDown, "shutting_down", 503;
    /// The object changed at the origin while it was being read; a read never mixes versions. An
    /// error before the first byte, a cut stream after.
    VersionChanged, "version_changed", 503;
    /// The origin did not answer in time.
    Timeout, "timeout", 504;
    /// The disk, or what may be used of it, has no room for so much.
    NoRoom, "no_room", 507;
}

impl ErrorKind {
    /// The kind with this [`code`](Self::code).
    pub fn from_code(code: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.code() == code)
    }

    /// What a status means where nothing else is known, as in the answer of a proxy. The node's own
    /// answers say their [`code`](Self::code).
    pub fn from_http_status(status: u16) -> Self {
        let plain = Self::ALL
            .iter()
            .copied()
            .find(|k| k.http_status() == status);
        plain.unwrap_or(match status {
            405 => ErrorKind::Unsupported,
            400..=499 => ErrorKind::Invalid,
            _ => ErrorKind::Internal,
        })
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
    place: Option<String>,
    /// Whether the message says the name of what the error is about.
    is_named: bool,
    hint: Option<String>,
    retry_after: Option<Duration>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of a kind; the message says what went wrong and where.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error(Arc::new(Inner {
            kind,
            message: message.into(),
            place: None,
            is_named: false,
            hint: None,
            retry_after: None,
            source: None,
        }))
    }

    /// An I/O error on a local file: which file, and where it is known, what to try.
    pub fn file(what: &str, path: &Path, e: io::Error) -> Self {
        let (kind, why, hint) = match e.kind() {
            io::ErrorKind::NotFound => (
                ErrorKind::NotFound,
                "no such file or directory".to_owned(),
                None,
            ),
            io::ErrorKind::PermissionDenied => (
                ErrorKind::PermissionDenied,
                "permission denied".to_owned(),
                Some("check who owns it, and its mode"),
            ),
            io::ErrorKind::StorageFull => (
                ErrorKind::Internal,
                "the disk is full".to_owned(),
                Some("free some space, or name another directory"),
            ),
            _ => (ErrorKind::Internal, e.to_string(), None),
        };
        let error = Self::new(kind, format!("{what}: {}: {why}", path.display())).caused_by(e);
        match hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
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
    pub fn caused_by(self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.edit(|i| i.source = Some(source.into()))
    }

    /// Puts where it happened in front of the message: `"<context>: <message>"`.
    pub fn context(self, context: impl fmt::Display) -> Self {
        self.edit(|i| i.message = format!("{context}: {}", i.message))
    }

    /// [`Error::context`] that says this name itself: the message begins with it no longer, if it did.
    pub fn context_naming(self, name: &str, context: impl fmt::Display) -> Self {
        self.edit(|i| i.message = format!("{context}: {}", without_name(&i.message, name)))
    }

    /// Puts the name of what it is about in front of the message, unless that says such a name already:
    /// see [`Error::naming`].
    pub fn of(self, name: impl fmt::Display) -> Self {
        match self.0.is_named {
            true => self,
            false => {
                let name = name.to_string();
                self.context_naming(&name, &name).naming()
            }
        }
    }

    /// Notes that the message says the name of what the error is about, elsewhere than in front of a
    /// colon.
    pub fn naming(self) -> Self {
        self.edit(|i| i.is_named = true)
    }

    /// Adds the bucket or object concerned, in the words of the message.
    pub fn about(self, place: impl Into<String>) -> Self {
        self.edit(|i| i.place = Some(place.into()))
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
                place: shared.place.clone(),
                is_named: shared.is_named,
                hint: shared.hint.clone(),
                retry_after: shared.retry_after,
                source: shared.source.as_ref().map(|s| s.to_string().into()),
            },
        };
        f(&mut inner);
        Error(Arc::new(inner))
    }

    /// Its class.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What went wrong, without causes and hint.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The bucket or object concerned, if [`Error::about`] named it.
    pub fn place(&self) -> Option<&str> {
        self.0.place.as_deref()
    }

    /// What to do about it.
    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// When to try again.
    pub fn retry_after_hint(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// The message with its causes and hint, for people: `message: cause (hint)`.
    pub fn describe(&self) -> String {
        let mut text = self.message_with_causes();
        if let Some(hint) = &self.0.hint {
            text.push_str(" (");
            text.push_str(hint);
            text.push(')');
        }
        text
    }

    /// `message: cause`, for callers that report the hint separately.
    pub fn message_with_causes(&self) -> String {
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
        text
    }
}

/// A message without the name (and the colon after it) that it may begin with, for whoever puts the
/// name in front in other words.
pub fn without_name<'a>(message: &'a str, name: &str) -> &'a str {
    message
        .strip_prefix(name)
        .and_then(|what| what.strip_prefix(": "))
        .unwrap_or(message)
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
    conflict => Conflict,
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
        let of = |message: &str| Error::not_found(message).context_naming("b/k", "s3://b/k");
        assert_eq!(of("b/k: gone").message(), "s3://b/k: gone");
        assert_eq!(of("b/k/m: gone").message(), "s3://b/k: b/k/m: gone");
        assert_eq!(of("gone").message(), "s3://b/k: gone");
    }

    #[test]
    fn a_name_is_said_once() {
        let of = |e: Error| e.of("b/k").message().to_owned();
        assert_eq!(of(Error::not_found("gone")), "b/k: gone");
        assert_eq!(of(Error::not_found("b/k: gone")), "b/k: gone");
        assert_eq!(of(Error::not_found("gone").of("b/k.idx")), "b/k.idx: gone");
        let changed = Error::version_changed("b/k changed").naming();
        let shared = changed.clone();
        assert_eq!(of(changed.with_kind(ErrorKind::Corrupt)), "b/k changed");
        assert_eq!(of(shared), "b/k changed");
    }

    #[test]
    fn each_kind_has_its_code_and_each_status_its_kind() {
        let mut codes = std::collections::HashSet::new();
        for &kind in ErrorKind::ALL {
            assert!(codes.insert(kind.code()), "{kind:?}");
            assert_eq!(ErrorKind::from_code(kind.code()), Some(kind));
            let status = kind.http_status();
            assert_eq!(ErrorKind::from_http_status(status).http_status(), status);
        }
        for (status, kind) in [
            (404, ErrorKind::NotFound),
            (409, ErrorKind::Conflict),
            (412, ErrorKind::PreconditionFailed),
            (502, ErrorKind::OriginUnavailable),
            (503, ErrorKind::ShuttingDown),
            (405, ErrorKind::Unsupported),
            (418, ErrorKind::Invalid),
            (599, ErrorKind::Internal),
        ] {
            assert_eq!(ErrorKind::from_http_status(status), kind, "{status}");
        }
        assert_eq!(ErrorKind::from_code("no such code"), None);
    }

    #[test]
    fn a_shared_error_can_still_be_given_context() {
        let e = Error::timeout("no answer in 5 s").caused_by("connection reset");
        let shared = e.clone();
        let e = e.context("bucket a");
        assert_eq!(shared.message(), "no answer in 5 s");
        assert_eq!(e.describe(), "bucket a: no answer in 5 s: connection reset");
    }
}
