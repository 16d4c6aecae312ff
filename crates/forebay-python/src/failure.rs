//! What can go wrong between this process and the node, as Rust values that become Python
//! exceptions at the boundary.
//!
//! Each [`Failure`] names the exception class in `forebay.errors` that it becomes. The kind in the
//! node's error document decides the class, and the document gives message and hint, so that Python
//! users see the same words as users of every other protocol.

use forebay_core::ErrorKind;
use forebay_protocol::ErrorDocument;
use pyo3::{
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyModule},
};

/// The exception classes of `forebay.errors`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Error,
    InvalidRequest,
    NotFound,
    Unauthenticated,
    PermissionDenied,
    Conflict,
    AlreadyExists,
    PreconditionFailed,
    RangeNotSatisfiable,
    TooLarge,
    Busy,
    Unsupported,
    ServerError,
    Damaged,
    ConnectionFailed,
    Timeout,
    Truncated,
    EntryFailed,
}

impl Class {
    fn name(self) -> &'static str {
        match self {
            Class::Error => "Error",
            Class::InvalidRequest => "InvalidRequest",
            Class::NotFound => "NotFound",
            Class::Unauthenticated => "Unauthenticated",
            Class::PermissionDenied => "PermissionDenied",
            Class::Conflict => "Conflict",
            Class::AlreadyExists => "AlreadyExists",
            Class::PreconditionFailed => "PreconditionFailed",
            Class::RangeNotSatisfiable => "RangeNotSatisfiable",
            Class::TooLarge => "TooLarge",
            Class::Busy => "Busy",
            Class::Unsupported => "Unsupported",
            Class::ServerError => "ServerError",
            Class::Damaged => "Damaged",
            Class::ConnectionFailed => "ConnectionFailed",
            Class::Timeout => "Timeout",
            Class::Truncated => "Truncated",
            Class::EntryFailed => "EntryFailed",
        }
    }

    fn of(kind: ErrorKind) -> Class {
        match kind {
            ErrorKind::Invalid | ErrorKind::UnknownFormat | ErrorKind::TooSmall => {
                Class::InvalidRequest
            }
            ErrorKind::Unauthenticated => Class::Unauthenticated,
            ErrorKind::PermissionDenied => Class::PermissionDenied,
            ErrorKind::NotFound | ErrorKind::BucketNotFound => Class::NotFound,
            ErrorKind::AlreadyExists => Class::AlreadyExists,
            ErrorKind::Conflict => Class::Conflict,
            ErrorKind::PreconditionFailed | ErrorKind::NotModified => Class::PreconditionFailed,
            ErrorKind::TooLarge => Class::TooLarge,
            ErrorKind::RangeNotSatisfiable => Class::RangeNotSatisfiable,
            ErrorKind::Busy | ErrorKind::ShuttingDown | ErrorKind::VersionChanged => Class::Busy,
            ErrorKind::Unsupported => Class::Unsupported,
            ErrorKind::Timeout => Class::Timeout,
            ErrorKind::Corrupt => Class::Damaged,
            ErrorKind::OriginUnavailable | ErrorKind::Internal | ErrorKind::NoRoom => {
                Class::ServerError
            }
        }
    }
}

/// One failed call: what failed, of which class, and what to do.
#[derive(Clone, Debug)]
pub struct Failure {
    pub class: Class,
    pub message: String,
    pub hint: Option<String>,
    pub status: Option<u16>,
    pub request_id: Option<String>,
    /// The code of its kind, which says more than the class; none where only this process has
    /// looked.
    pub code: Option<&'static str>,
}

pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    pub fn new(class: Class, message: impl Into<String>) -> Self {
        Failure {
            class,
            message: message.into(),
            hint: None,
            status: None,
            request_id: None,
            code: None,
        }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Class::InvalidRequest, message)
    }

    pub fn connection(message: impl Into<String>) -> Self {
        Self::new(Class::ConnectionFailed, message)
    }

    pub fn truncated(message: impl Into<String>) -> Self {
        Self::new(Class::Truncated, message)
    }

    pub fn timeout(message: impl Into<String>) -> Self {
        Self::new(Class::Timeout, message)
    }

    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Sets this hint, unless there already is one.
    fn or_hint(mut self, hint: &str) -> Self {
        self.hint.get_or_insert_with(|| hint.to_owned());
        self
    }

    /// Puts the place in front of the message, unless the message already begins with it.
    pub fn context(mut self, context: impl std::fmt::Display) -> Self {
        let context = context.to_string();
        if !self.message.contains(&context) {
            self.message = format!("{context}: {}", self.message);
        }
        self
    }

    /// What the node's error document says.
    pub fn of_document(document: ErrorDocument) -> Self {
        let kind = document.kind();
        // The message names the place in the words of AIStore's clients, which parse it. Names in
        // Python have no `ais://`.
        let message = match &document.place {
            Some(place) => {
                let name = place.strip_prefix("ais://").unwrap_or(place);
                document.message.replacen(place.as_str(), name, 1)
            }
            None => document.message,
        };
        Failure {
            class: Class::of(kind),
            message,
            hint: document.hint,
            status: Some(document.status),
            request_id: document.request_id,
            code: Some(kind.code()),
        }
    }

    /// Whether the node refused the request before it began, so that the same request may be sent
    /// again.
    pub fn is_refusal(&self) -> bool {
        matches!(self.status, Some(429 | 503))
    }
}

impl From<forebay_core::Error> for Failure {
    fn from(e: forebay_core::Error) -> Self {
        Failure {
            class: Class::of(e.kind()),
            message: e.message().to_owned(),
            hint: e.hint_text().map(str::to_owned),
            status: None,
            request_id: None,
            code: Some(e.kind().code()),
        }
    }
}

impl From<forebay_client::Failure> for Failure {
    fn from(failure: forebay_client::Failure) -> Self {
        use forebay_client::Failure as Client;
        let of = |class, e: forebay_core::Error| Failure {
            class,
            ..Failure::from(e)
        };
        match failure {
            Client::NotSent(e) | Client::Malformed(e) => Failure::from(e),
            Client::Unreachable(e) => of(Class::ConnectionFailed, e).or_hint(
                "is the node running? forebay serve --origin s3://bucket --cache DIR:SIZE",
            ),
            Client::Broken(e) => of(Class::ConnectionFailed, e),
            Client::TimedOut(e) => {
                of(Class::Timeout, e).or_hint("raise timeout=, or look at the node's log")
            }
            Client::Truncated { error, request_id } => Failure {
                request_id,
                ..of(Class::Truncated, error)
            },
            Client::Refused(said) => Failure::of_document(*said),
        }
    }
}

impl From<Failure> for PyErr {
    fn from(f: Failure) -> PyErr {
        Python::attach(|py| {
            let made = exception_module(py).and_then(|module| {
                let kwargs = PyDict::new(py);
                kwargs.set_item("hint", &f.hint)?;
                kwargs.set_item("status", f.status)?;
                kwargs.set_item("request_id", &f.request_id)?;
                kwargs.set_item("code", f.code)?;
                module
                    .getattr(f.class.name())?
                    .call((&f.message,), Some(&kwargs))
            });
            match made {
                Ok(exception) => PyErr::from_value(exception),
                Err(error) => error,
            }
        })
    }
}

fn exception_module(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    MODULE
        .get_or_try_init(py, || {
            PyModule::import(py, "forebay.errors").map(Bound::unbind)
        })
        .map(|m| m.bind(py))
}
