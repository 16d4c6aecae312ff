//! How a call can fail, by how far it got.
//!
//! What to do about a failure depends on the caller: a command has `--node`, Python has `timeout=`.
//! So the errors here carry hints only if the node gave them, and callers add their own for each
//! variant.

use forebay_core::{Error, ErrorKind};
use forebay_protocol::ErrorDocument;
use std::time::Duration;

/// How many nodes the error of a call that none of them answered names.
const NAMED_MAX: usize = 5;

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

    /// Whether it is what the node said.
    pub(crate) fn is_said(&self) -> bool {
        matches!(self, Failure::Refused(_))
    }

    /// The same, which says which of several nodes refused the request.
    pub(crate) fn said_by(mut self, node: &str) -> Failure {
        if let Failure::Refused(said) = &mut self
            && !said.message.contains(node)
        {
            said.message = format!("{} (said by {node})", said.message);
        }
        self
    }

    /// When the node wants the request again, if it said so.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Failure::Refused(said) => said.retry_after(),
            _ => None,
        }
    }

    /// The failure of a call that no node answered: what each of them, by its name, said in turn.
    /// `untried` more were not asked.
    pub(crate) fn of_all(mut missed: Vec<(String, Failure)>, untried: usize) -> Failure {
        let nodes = missed.len() + untried;
        if nodes <= 1 {
            let none =
                || Failure::Unreachable(Error::origin_unavailable("the client knows no node"));
            return missed.pop().map_or_else(none, |(_, failure)| failure);
        }
        let said: Vec<String> = missed
            .iter()
            .take(NAMED_MAX)
            .map(|(node, failure)| {
                let error = Error::from(failure.clone());
                match error.message() {
                    named if named.contains(node.as_str()) => named.to_owned(),
                    other => format!("{node}: {other}"),
                }
            })
            .collect();
        let asked = missed.len();
        let more = match asked - said.len() {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        let (who, others) = match untried {
            0 => (format!("none of {nodes} nodes answered"), String::new()),
            _ => (
                format!("{asked} of {nodes} nodes did not answer"),
                "; for the others there was no time".to_owned(),
            ),
        };
        let message = format!("{who}: {}{more}{others}", said.join("; "));
        // One that is stopping may be replaced: the call is worth another try.
        if let Some((_, Failure::Refused(stopping))) =
            missed.iter().find(|(_, failure)| failure.is_refusal())
        {
            let mut document = stopping.clone();
            (document.message, document.place) = (message, None);
            return Failure::Refused(document);
        }
        let is_timeout = |failure: &Failure| matches!(failure, Failure::TimedOut(_));
        let all_late = missed.iter().all(|(_, failure)| is_timeout(failure));
        let broken = missed
            .iter()
            .any(|(_, failure)| matches!(failure, Failure::Broken(_)));
        let error = Error::origin_unavailable(message);
        let error = match missed.pop() {
            Some((_, last)) => error.caused_by(Error::from(last)),
            None => error,
        };
        match (all_late, broken) {
            (true, _) => Failure::TimedOut(error.with_kind(ErrorKind::Timeout)),
            (_, true) => Failure::Broken(error),
            _ => Failure::Unreachable(error),
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

/// A failed attempt at one node.
pub(crate) struct Missed {
    pub failure: Failure,
    /// Whether the call may be made at another node: nothing of it was carried out, or it may be
    /// carried out twice.
    pub elsewhere: bool,
}

impl Missed {
    pub fn here(failure: Failure) -> Self {
        Missed {
            failure,
            elsewhere: false,
        }
    }

    pub fn elsewhere(failure: Failure) -> Self {
        Missed {
            failure,
            elsewhere: true,
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
        let named = refused(404)
            .said_by("http://a:8080")
            .said_by("http://a:8080");
        assert_eq!(Error::from(named).message(), " (said by http://a:8080)");
        let broken = Failure::Broken(Error::origin_unavailable("gone"));
        assert!(!broken.is_refusal() && broken.retry_after().is_none());
        assert_eq!(Error::from(refused(404)).kind(), ErrorKind::NotFound);
    }
}
