//! How a call can fail, by how far it got.
//!
//! What to do about a failure depends on the caller: a command has `--node`, Python has `timeout=`.
//! So the errors here carry hints only if the node gave them, and callers add their own for each
//! variant.

use forebay_core::{Error, ErrorKind};
use forebay_protocol::ErrorDocument;
use std::time::Duration;

/// Why a call failed.
#[derive(Clone, Debug)]
pub enum Failure {
    /// The request was not sent: a token or header that HTTP cannot carry, a CA file that cannot be
    /// read, a certificate that is not trusted.
    NotSent(Error),
    /// No connection could be made.
    Unreachable(Error),
    /// The connection broke before the head of an answer arrived.
    Broken(Error),
    /// Nothing arrived, or nothing was accepted, for as long as [`Timeouts`](crate::Timeouts)
    /// allow.
    TimedOut(Error),
    /// The answer broke off. What arrived is not all of it.
    Truncated {
        /// How it broke off.
        error: Error,
        /// The id under which the node logged the request.
        request_id: Option<String>,
    },
    /// The answer is not one that a node gives: it is too long, or has another form.
    Malformed(Error),
    /// The node answered with an error.
    Refused(Box<ErrorDocument>),
}

/// The result of a call.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// Whether the node refused the request before it began, so that it may be sent again.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Failure::Refused(said) if matches!(said.status, 429 | 503))
    }

    /// When the node wants the request again, if it said so.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Failure::Refused(said) => said.retry_after(),
            _ => None,
        }
    }

    /// A TLS error as a failure that says who prevented the call.
    pub(crate) fn of_tls(error: Error) -> Failure {
        match error.kind() {
            ErrorKind::OriginUnavailable => Failure::Unreachable(error),
            _ => Failure::NotSent(error),
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        match failure {
            Failure::NotSent(e)
            | Failure::Unreachable(e)
            | Failure::Broken(e)
            | Failure::TimedOut(e)
            | Failure::Truncated { error: e, .. }
            | Failure::Malformed(e) => e,
            Failure::Refused(said) => said.to_error(),
        }
    }
}

/// An error with its causes, in one line.
pub(crate) fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut cause = e.source();
    while let Some(c) = cause {
        text.push_str(": ");
        text.push_str(&c.to_string());
        cause = c.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_those_that_the_node_answered_before_it_began() {
        let refused = |status| {
            let document = ErrorDocument {
                status,
                retry_after_seconds: Some(3),
                ..ErrorDocument::default()
            };
            Failure::Refused(Box::new(document))
        };
        assert!(refused(429).is_refusal() && refused(503).is_refusal());
        assert!(!refused(500).is_refusal());
        assert_eq!(refused(503).retry_after(), Some(Duration::from_secs(3)));
        let broken = Failure::Broken(Error::origin_unavailable("gone"));
        assert!(!broken.is_refusal() && broken.retry_after().is_none());
        assert_eq!(Error::from(refused(404)).kind(), ErrorKind::NotFound);
    }
}
