//! The error document: the JSON that says what went wrong.
//!
//! It is the body of every answer under `/v1/` that is not a success, the last line of an opening
//! that fails, the payload of a frame of kind `Error`, and what the command line prints with
//! `--json`. `code` names the kind, so no client has to guess it from a status that several kinds
//! share. The fields that AIStore's clients read ([`AisFields`]) are next to ours.
//!
//! Invariant: [`ErrorDocument::of`] and [`ErrorDocument::to_error`] keep kind, message, hint and
//! retry delay.

use forebay_core::{Error, ErrorKind, error::without_name};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How much is shown of an answer that is not such a document, such as a proxy's page.
const FOREIGN_TEXT_MAX_CHARS: usize = 500;

/// What the user should do if another server answered.
const FOREIGN_HINT: &str = "check the address: `forebay serve` prints that of the node. If a proxy \
    is in front of it, see whether that reaches the node";

/// The longest pause that an answer can ask for. One that asks for more is wrong, or wants to be
/// rid of us for longer than anybody waits.
const RETRY_AFTER_MAX_SECS: u64 = 24 * 3600;

/// What went wrong, where, and what to do about it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ErrorDocument {
    /// The HTTP status, even if it comes too late to be one; 0: unknown.
    #[serde(skip_serializing_if = "is_zero")]
    pub status: u16,
    /// [`ErrorKind::code`].
    #[serde(skip_serializing_if = "String::is_empty")]
    pub code: String,
    /// What happened, with its causes. If `where` is given, the message begins with it (in a batch,
    /// after the entry's number, as in `in[3] ais://bucket/name: …`): AIStore's clients look for it
    /// there.
    pub message: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// The bucket or object concerned, `provider://bucket/name`.
    #[serde(rename = "where", skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
    /// The id under which the node logged the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// When to try again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_seconds: Option<u64>,
    /// For AIStore's clients; absent if no request belongs to the document.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub ais: Option<AisFields>,
}

/// What AIStore's clients read besides `status` and `message`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AisFields {
    /// The HTTP method of the request.
    pub method: String,
    /// The path of the request, without its query.
    pub url_path: String,
    /// The address that the request came from.
    pub remote_addr: String,
    /// The name of the key or token that came with the request; empty until it is known.
    pub caller: String,
    /// The id of the node that answered.
    pub node: String,
    /// AIStore's class of the error, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcode: Option<String>,
}

fn is_zero(n: &u16) -> bool {
    *n == 0
}

impl ErrorDocument {
    /// The document for an error, with the bucket or object that the error names, and without what
    /// depends on the request.
    pub fn of(error: &Error) -> Self {
        ErrorDocument {
            status: error.kind().http_status(),
            code: error.kind().code().to_owned(),
            message: error.message_with_causes(),
            place: error.place().map(str::to_owned),
            hint: error.hint_text().map(str::to_owned),
            retry_after_seconds: error
                .retry_after_hint()
                .map(|after| after.as_secs_f64().ceil() as u64),
            ..Self::default()
        }
    }

    /// Adds the bucket or object concerned.
    pub fn at(mut self, place: String) -> Self {
        // The origin's URL, which the message may contain, must not be taken for it.
        if !self.message.starts_with(&place) {
            // Errors of the engine begin with the name alone.
            let name = place.split_once("://").map_or(&*place, |(_, name)| name);
            self.message = format!("{place}: {}", without_name(&self.message, name));
        }
        self.place = Some(place);
        self
    }

    /// Whether an answer is a node's: it has the id that a node gives its answers, or is of
    /// [`SERVER`](crate::SERVER). `header` looks up a header of the answer.
    pub fn is_of_node<'a>(header: impl Fn(&'static str) -> Option<&'a str>) -> bool {
        header(crate::REQUEST_ID_HEADER).is_some() || header("server") == Some(crate::SERVER)
    }

    /// Reads an answer with this status from this address, whoever sent it: a body that is not one of
    /// our documents is shown, shortened. If it is a page or not [of a node](Self::is_of_node), the
    /// message says so. An answer of somebody else's success is an error, too.
    pub fn read<'a>(
        at: &str,
        status: u16,
        header: impl Fn(&'static str) -> Option<&'a str>,
        body: &[u8],
    ) -> Self {
        let is_success = (200..300).contains(&status);
        let mut read = match is_success {
            true => ErrorDocument {
                code: ErrorKind::OriginUnavailable.code().to_owned(),
                ..ErrorDocument::default()
            },
            false => serde_json::from_slice(body).unwrap_or_default(),
        };
        read.status = status;
        if read.message.is_empty() {
            let text = String::from_utf8_lossy(body);
            let text = text.trim();
            let is_page = ["<!doctype html", "<html"].iter().any(|begin| {
                let found = text.as_bytes().get(..begin.len());
                found.is_some_and(|found| found.eq_ignore_ascii_case(begin.as_bytes()))
            });
            // The HTTP library answers by itself, too: with errors that have no body.
            let is_ours = !is_success && (Self::is_of_node(&header) || text.is_empty());
            let shown = match text.starts_with('<') {
                true => text_of_page(text),
                false => text.to_owned(),
            };
            let shown: String = shown.chars().take(FOREIGN_TEXT_MAX_CHARS).collect();
            let shown = match shown.is_empty() {
                true if is_success => "and nothing more".to_owned(),
                true => read.kind().code().replace('_', " "),
                false => shown,
            };
            if is_page || !is_ours {
                read.message = format!(
                    "what answers at {at} is not a Forebay node: it said {status} ({shown})"
                );
                read.hint = Some(FOREIGN_HINT.to_owned());
            } else if text.is_empty() {
                read.message = format!("the node answered {status} ({shown})");
            } else {
                read.message = shown;
            }
        }
        let id = || header(crate::REQUEST_ID_HEADER).or_else(|| header("x-amz-request-id"));
        read.request_id = read.request_id.or_else(|| id().map(str::to_owned));
        read.retry_after_seconds = header("retry-after")
            .and_then(|s| s.trim().parse().ok())
            .or(read.retry_after_seconds);
        read
    }

    /// The kind given by the code; or by the status, if there is no code or it is from a later
    /// release.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::from_code(&self.code).unwrap_or_else(|| ErrorKind::from_http_status(self.status))
    }

    /// The message without the place that it begins with.
    pub fn what(&self) -> &str {
        self.place
            .as_deref()
            .and_then(|place| self.message.strip_prefix(place)?.strip_prefix(": "))
            .unwrap_or(&self.message)
    }

    /// When to try again, if the document says so: in a day at the latest.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after_seconds
            .map(|seconds| Duration::from_secs(seconds.min(RETRY_AFTER_MAX_SECS)))
    }

    /// The error that the document describes.
    pub fn to_error(&self) -> Error {
        let mut error = Error::new(self.kind(), self.message.clone());
        if let Some(hint) = &self.hint {
            error = error.hint(hint.clone());
        }
        match self.retry_after() {
            Some(after) => error.retry_after(after),
            None => error,
        }
    }
}

/// The words of an HTML or XML page, without its tags and escapes.
fn text_of_page(page: &str) -> String {
    let texts = page
        .split('<')
        .map(|piece| piece.split_once('>').map_or(piece, |(_, text)| text));
    let words: Vec<&str> = texts.flat_map(str::split_whitespace).collect();
    let mut text = words.join(" ");
    // What `&` stands for comes last: nothing is to be read twice.
    for (escape, character) in [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&apos;", "'"),
        ("&#39;", "'"),
        ("&amp;", "&"),
    ] {
        text = text.replace(escape, character);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none(_: &'static str) -> Option<&'static str> {
        None
    }

    #[test]
    fn an_error_arrives_as_it_was_sent() {
        for &kind in ErrorKind::ALL {
            let error = Error::new(kind, "what")
                .hint("do this")
                .retry_after(Duration::from_millis(1500));
            let json = serde_json::to_vec(&ErrorDocument::of(&error)).unwrap();
            let read = ErrorDocument::read("host", kind.http_status(), none, &json).to_error();
            assert_eq!(
                (read.kind(), read.message(), read.hint_text()),
                (kind, "what", Some("do this"))
            );
            assert_eq!(read.retry_after_hint(), Some(Duration::from_secs(2)));
        }
    }

    #[test]
    fn the_place_is_in_front_and_can_be_taken_off() {
        let error = Error::not_found("no such object").hint("look");
        let document = ErrorDocument::of(&error).at("ais://b/k".into());
        assert_eq!(document.message, "ais://b/k: no such object");
        assert_eq!(document.what(), "no such object");
        let named = ErrorDocument::of(&Error::not_found("b/k: no such object"));
        assert_eq!(named.at("ais://b/k".into()).message, document.message);
        let json = serde_json::to_value(&document).unwrap();
        assert_eq!(json["where"], "ais://b/k");
        assert!(json.get("method").is_none());
        let of_entry = Error::not_found("gone").context("in[3] ais://b/k");
        let of_entry = ErrorDocument::of(&of_entry.about("ais://b/k"));
        assert_eq!(of_entry.place.as_deref(), Some("ais://b/k"));
        assert_eq!(of_entry.what(), "in[3] ais://b/k: gone");
        let ais = ErrorDocument {
            ais: Some(AisFields::default()),
            ..document
        };
        let json = serde_json::to_value(&ais).unwrap();
        assert_eq!((&json["caller"], json.get("tcode")), (&"".into(), None));
        assert_eq!(serde_json::from_value::<ErrorDocument>(json).unwrap(), ais);
    }

    #[test]
    fn answers_of_others_are_errors_too() {
        let read =
            |status, body: &str| ErrorDocument::read("host:80", status, none, body.as_bytes());
        let error = read(503, "<html><p>gone\n<b>away</b></p></html>").to_error();
        assert_eq!(error.kind(), ErrorKind::ShuttingDown);
        let foreign = "what answers at host:80 is not a Forebay node: it said";
        assert_eq!(error.message(), format!("{foreign} 503 (gone away)"));
        assert!(error.hint_text().unwrap().contains("check the address"));
        let of = |status, body| read(status, body).message;
        assert_eq!(of(404, ""), "the node answered 404 (not found)");
        let of_s3 = "<?xml?><Error><Code>NoSuchBucket</Code></Error>";
        assert_eq!(of(404, of_s3), format!("{foreign} 404 (NoSuchBucket)"));
        let escaped = "<Error><Message>no &quot;a&amp;lt;b&quot;, &lt;c&gt;</Message></Error>";
        let shown = "no \"a&lt;b\", <c>";
        assert_eq!(of(404, escaped), format!("{foreign} 404 ({shown})"));
        assert_eq!(of(404, "no page\n"), format!("{foreign} 404 (no page)"));
        assert_eq!(read(404, "[1]").kind(), ErrorKind::NotFound);
        // As who answers with this to everything.
        assert_eq!(
            of(200, "<title>Sign in</title>"),
            format!("{foreign} 200 (Sign in)")
        );
        assert_eq!(of(200, ""), format!("{foreign} 200 (and nothing more)"));
        let said = r#"{"code": "not_found", "message": "m"}"#;
        assert_eq!(of(200, said), format!("{foreign} 200 ({said})"));
        assert_eq!(read(200, said).kind(), ErrorKind::OriginUnavailable);
        assert!(read(500, &"ü".repeat(5000)).message.len() < 1200);
        // A kind of a later release is treated as its status says.
        let later = r#"{"code": "of_tomorrow", "message": "m", "status": 429}"#;
        assert_eq!(read(429, later).kind(), ErrorKind::Busy);
        // What a node says before it has looked at a request.
        let of_node = |name| (name == "server").then_some(crate::SERVER);
        let slow = ErrorDocument::read("host", 503, of_node, b"<Error>many connections</Error>");
        assert_eq!(slow.message, "many connections");
        let header = |name: &'static str| match name {
            "retry-after" => Some("7"),
            "x-amz-request-id" => Some("id-1"),
            _ => None,
        };
        let read = ErrorDocument::read("host", 429, header, b"");
        assert_eq!(read.retry_after(), Some(Duration::from_secs(7)));
        assert_eq!(read.request_id.as_deref(), Some("id-1"));
        let forever = |_: &'static str| Some("18446744073709551615");
        let read = ErrorDocument::read("host", 503, forever, b"");
        assert_eq!(read.retry_after(), Some(Duration::from_secs(24 * 3600)));
    }
}
