//! How a command fails: its exit code, and what it prints on stderr.
//!
//! An error is one line, `error: what: where`, then `hint: what to try` if there is something to
//! try. `--verbose` adds the chain of causes. With `--json` it is a JSON object on stderr instead.
//! Invariant: every failure of this program goes through [`report`], so stdout holds results only.

use crate::style::Style;
use forebay_core::{Error, ErrorKind};
use forebay_protocol::ErrorDocument;
use std::{error::Error as _, io::Write};

/// Exit codes, as `forebay --help` lists them.
pub const EXIT_OK: i32 = 0;
pub const EXIT_FAILED: i32 = 1;
pub const EXIT_USAGE: i32 = 2;

/// Why a command did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// The command line or the configuration is wrong: nothing was attempted. Exit code 2.
    Usage(Error),
    /// The attempt failed. Exit code 1.
    Failed(Error),
    /// The result says that something failed, and has been printed. Exit code 1.
    Reported,
    /// The reader of stdout went away, as `head` does. Not an error: exit code 0, silently.
    BrokenPipe,
    /// A signal ended it. Exit code 128 plus the signal's number.
    Signal(i32),
}

pub type Outcome<T = ()> = std::result::Result<T, Failure>;

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Failure::Failed(e)
    }
}

impl From<forebay_client::Failure> for Failure {
    fn from(failure: forebay_client::Failure) -> Self {
        Failure::of_call(failure, "")
    }
}

impl Failure {
    /// A call that failed; `what` says what it was about.
    pub fn of_call(failure: forebay_client::Failure, what: &str) -> Self {
        use forebay_client::Failure as Call;
        let hinted = |error: Error, hint: &str| match error.hint_text() {
            Some(_) => error,
            None => error.hint(hint),
        };
        Failure::Failed(match failure {
            Call::NotSent(e) => e,
            Call::Unreachable(e) => hinted(
                e,
                "start one with `forebay serve`, or name another with --node or FOREBAY_NODE",
            ),
            Call::Broken(e) => hinted(e, "`forebay status` says whether the node is still up"),
            Call::TimedOut(e) => hinted(
                e,
                "check the address (--node, FOREBAY_NODE) and the firewall between; the node's \
                 log says what it does",
            ),
            Call::Truncated { error, .. } => hinted(error, "the node's log says why; try again"),
            Call::Malformed(e) => hinted(
                e,
                "check with `forebay version` and `forebay status` that it is a Forebay node of \
                 this version",
            ),
            Call::Refused(said) => refused(&said, what),
        })
    }

    pub fn exit_code(&self) -> i32 {
        match self {
            Failure::Usage(_) => EXIT_USAGE,
            Failure::Failed(_) | Failure::Reported => EXIT_FAILED,
            Failure::BrokenPipe => EXIT_OK,
            Failure::Signal(n) => 128 + n,
        }
    }
}

/// A failed write to stdout. If the reader left, that is not an error.
pub fn stdout_failure(e: std::io::Error) -> Failure {
    match e.kind() {
        std::io::ErrorKind::BrokenPipe => Failure::BrokenPipe,
        _ => Failure::Failed(Error::internal(format!("cannot write to stdout: {e}")).caused_by(e)),
    }
}

/// Prints the failure on stderr.
pub fn report(failure: &Failure, json: bool, verbose: bool) {
    let (Failure::Usage(e) | Failure::Failed(e)) = failure else {
        return;
    };
    let text = if json {
        as_json(e)
    } else {
        as_text(e, verbose, Style::stderr())
    };
    // Nothing can be done about a stderr that is closed.
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

fn causes(e: &Error) -> Vec<String> {
    let mut all = Vec::new();
    let mut next = e.source();
    while let Some(c) = next {
        all.push(one_line(&c.to_string()));
        next = c.source();
    }
    all
}

fn as_text(e: &Error, verbose: bool, style: Style) -> String {
    let mut text = format!("{} {}\n", style.red("error:"), one_line(e.message()));
    if verbose {
        for cause in causes(e) {
            text.push_str(&format!("{} {cause}\n", style.dim("caused by:")));
        }
    }
    if let Some(hint) = e.hint_text() {
        text.push_str(&format!("{} {hint}\n", style.bold("hint:")));
    }
    text
}

fn as_json(e: &Error) -> String {
    #[derive(serde::Serialize)]
    struct Ended {
        #[serde(flatten)]
        document: ErrorDocument,
        causes: Vec<String>,
    }
    let document = ErrorDocument {
        // The causes are listed separately, and the status says no more than the code.
        message: e.message().to_owned(),
        status: 0,
        ..ErrorDocument::of(e)
    };
    let causes = causes(e);
    let object = serde_json::json!({"error": Ended { document, causes }});
    format!("{object}\n")
}

/// The node's words, in our order: what happened, then to what.
pub fn refused(said: &ErrorDocument, what: &str) -> Error {
    let (kind, status) = (said.kind(), said.status);
    let error = Error::new(kind, placed(said.what(), what)).caused_by(match &said.request_id {
        Some(id) => format!("HTTP {status}, request id {id}"),
        None => format!("HTTP {status}"),
    });
    let hint = said.hint.as_deref().or(advice(kind));
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

fn placed(said: &str, what: &str) -> String {
    if said.contains(what) {
        said.to_owned()
    } else {
        // Origins end their sentences.
        format!("{}: {what}", said.trim_end_matches('.'))
    }
}

fn advice(kind: ErrorKind) -> Option<&'static str> {
    match kind {
        ErrorKind::BucketNotFound => Some("`forebay ls` lists the buckets that this node serves"),
        ErrorKind::NotFound => Some("`forebay ls bucket/prefix` lists what is there"),
        ErrorKind::RangeNotSatisfiable => Some("`forebay stat` shows the size"),
        ErrorKind::Unauthenticated => Some("this node wants a token: set FOREBAY_TOKEN"),
        ErrorKind::Busy => Some("the node is at a limit: try again in a moment"),
        ErrorKind::OriginUnavailable | ErrorKind::Timeout => {
            Some("the origin is in trouble: see `forebay status` and the node's log")
        }
        _ => None,
    }
}

/// Messages from elsewhere may contain line breaks or control the terminal; neither may get
/// through.
pub fn one_line(text: &str) -> String {
    text.split(|c: char| c.is_control())
        .filter(|s| !s.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_line_then_a_hint() {
        let e = Error::invalid("bad size: \"10X\"\nin --cache")
            .hint("as in 10GiB")
            .caused_by("inner");
        assert_eq!(
            as_text(&e, false, Style::PLAIN),
            "error: bad size: \"10X\" in --cache\nhint: as in 10GiB\n"
        );
        assert!(as_text(&e, true, Style::PLAIN).contains("\ncaused by: inner\n"));
        let v: serde_json::Value = serde_json::from_str(&as_json(&e)).unwrap();
        assert_eq!(v["error"]["code"], "invalid");
        assert_eq!(v["error"]["hint"], "as in 10GiB");
        assert_eq!(Failure::Usage(e).exit_code(), 2);
    }

    #[test]
    fn the_words_of_the_node_are_put_in_our_order() {
        let said = |error: Error| {
            let document = ErrorDocument::of(&error).at("ais://bk/key".into());
            let error = refused(&document, "bk/key");
            (
                error.message().to_owned(),
                error.hint_text().map(str::to_owned),
            )
        };
        let advised = advice(ErrorKind::NotFound).map(str::to_owned);
        assert_eq!(
            said(Error::not_found("no such object")),
            ("no such object: bk/key".into(), advised)
        );
        assert_eq!(
            said(Error::invalid("bk/key: too large").hint("write it in parts")),
            ("too large: bk/key".into(), Some("write it in parts".into()))
        );
        assert_eq!(
            said(Error::invalid("a limit (of 5 MiB and more)")),
            ("a limit (of 5 MiB and more): bk/key".into(), None)
        );
        assert_eq!(
            said(Error::invalid("The key is not valid.")).0,
            "The key is not valid: bk/key"
        );
        let no_tokens = Error::new(ErrorKind::Unauthenticated, "no tokens");
        assert_eq!(
            said(no_tokens.hint("use the Unix socket")),
            (
                "no tokens: bk/key".into(),
                Some("use the Unix socket".into())
            )
        );
    }
}
