//! Errors as S3 clients know them: a code for each kind, and a message that says what, where, and
//! what to do.

use crate::{body::AnswerBody, note::Note, request_id::RequestId};
use forebay_core::{Error, ErrorKind};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use s3s::{S3Error, S3ErrorCode};
use std::time::Duration;

/// The Retry-After of answers that say "later" but not when.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);

/// S3's own sentence, by which s3fs knows that a file was overwritten while it was open.
const PRECONDITION_FAILED: &str = "At least one of the pre-conditions you specified did not hold";
/// Another one: Zarr reads nothing, and does not fail, where a range begins past the end of an object.
const RANGE_NOT_SATISFIABLE: &str = "The requested range is not satisfiable";

/// The S3 error code and the status for a kind.
fn code(kind: ErrorKind) -> (&'static str, StatusCode) {
    use ErrorKind::*;
    match kind {
        Invalid | UnknownFormat => ("InvalidArgument", StatusCode::BAD_REQUEST),
        NotFound => ("NoSuchKey", StatusCode::NOT_FOUND),
        BucketNotFound => ("NoSuchBucket", StatusCode::NOT_FOUND),
        AlreadyExists => ("BucketAlreadyOwnedByYou", StatusCode::CONFLICT),
        Conflict => ("OperationAborted", StatusCode::CONFLICT),
        RangeNotSatisfiable => ("InvalidRange", StatusCode::RANGE_NOT_SATISFIABLE),
        PreconditionFailed => ("PreconditionFailed", StatusCode::PRECONDITION_FAILED),
        NotModified => ("NotModified", StatusCode::NOT_MODIFIED),
        Unauthenticated | PermissionDenied => ("AccessDenied", StatusCode::FORBIDDEN),
        Busy => ("SlowDown", StatusCode::SERVICE_UNAVAILABLE),
        VersionChanged | ShuttingDown => ("ServiceUnavailable", StatusCode::SERVICE_UNAVAILABLE),
        TooLarge => ("EntityTooLarge", StatusCode::BAD_REQUEST),
        TooSmall => ("EntityTooSmall", StatusCode::BAD_REQUEST),
        // Clients retry 5xx. S3 itself has no gateway statuses, so the code says what happened and
        // the status is HTTP's.
        Timeout => ("GatewayTimeout", StatusCode::GATEWAY_TIMEOUT),
        OriginUnavailable => ("BadGateway", StatusCode::BAD_GATEWAY),
        Corrupt => ("BadGateway", StatusCode::BAD_GATEWAY),
        Unsupported => ("NotImplemented", StatusCode::NOT_IMPLEMENTED),
        Internal | NoRoom => ("InternalError", StatusCode::INTERNAL_SERVER_ERROR),
    }
}

/// Why a request is refused, under S3's name for the reason.
#[derive(Clone, Debug)]
pub struct Refusal {
    code: &'static str,
    status: StatusCode,
    error: Error,
    /// The size of the object, if a range lies past its end.
    size: Option<u64>,
    /// The header whose condition does not hold, as S3 names it.
    condition: Option<&'static str>,
}

impl From<Error> for Refusal {
    /// Uses the code of the error's kind.
    fn from(error: Error) -> Self {
        let (code, status) = code(error.kind());
        let error = match error.kind() {
            ErrorKind::PreconditionFailed => error.context(PRECONDITION_FAILED),
            ErrorKind::RangeNotSatisfiable => error.context(RANGE_NOT_SATISFIABLE),
            _ => error,
        };
        Self::with_status(code, status, error)
    }
}

impl Refusal {
    /// A bad request under its own code: `KeyTooLongError`, `BadDigest`.
    pub fn bad(code: &'static str, error: Error) -> Self {
        Self::with_status(code, StatusCode::BAD_REQUEST, error)
    }

    pub fn with_status(code: &'static str, status: StatusCode, error: Error) -> Self {
        Refusal {
            code,
            status,
            error,
            size: None,
            condition: None,
        }
    }

    /// A 416 with the object's size: the C runtime of the AWS SDKs learns from it that an object is
    /// empty.
    pub fn unsatisfiable_range(error: Error, size: u64) -> Self {
        Refusal {
            size: Some(size),
            ..Refusal::from(error)
        }
    }

    /// Names the header of the condition, if one did not hold.
    pub fn of_condition(self, header: Option<&'static str>) -> Self {
        match self.error.kind() {
            ErrorKind::PreconditionFailed => Refusal {
                condition: header,
                ..self
            },
            _ => self,
        }
    }

    pub fn code(&self) -> &'static str {
        self.code
    }

    pub fn error(&self) -> &Error {
        &self.error
    }

    /// For operations that go through the S3 library. Also notes the error for the log.
    pub fn to_s3(&self, note: &Note) -> S3Error {
        note.set_error(self.error.describe());
        let code =
            S3ErrorCode::from_bytes(self.code.as_bytes()).unwrap_or(S3ErrorCode::InternalError);
        let mut out = S3Error::with_message(code, self.error.describe());
        out.set_status_code(self.status);
        out.set_request_id(note.id.as_str());
        let mut headers = HeaderMap::new();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/xml"),
        );
        retry_after(&self.error, &mut headers);
        out.set_headers(headers);
        out
    }

    /// For our own answers. Also notes the error for the log.
    pub fn response(&self, resource: &str, note: &Note) -> Response<AnswerBody> {
        note.set_error(self.error.describe());
        let mut response = Response::new(AnswerBody::Empty);
        *response.status_mut() = self.status;
        retry_after(&self.error, response.headers_mut());
        if self.status == StatusCode::NOT_MODIFIED {
            return response;
        }
        let mut details = element_of_condition(self.condition);
        if let Some(size) = self.size {
            details.push_str(&format!("<ActualObjectSize>{size}</ActualObjectSize>"));
        }
        if let Some(size) = self.size
            && let Ok(value) = HeaderValue::from_str(&format!("bytes */{size}"))
        {
            response.headers_mut().insert(header::CONTENT_RANGE, value);
        }
        let xml = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{}</Code>\
             <Message>{}</Message>{details}<Resource>{}</Resource><RequestId>{}</RequestId></Error>",
            self.code,
            escape(&self.error.describe()),
            escape(resource),
            escape(note.id.as_str())
        );
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/xml"),
        );
        *response.body_mut() = AnswerBody::full(xml);
        response
    }
}

/// The first of these headers that has a value, if one has.
pub fn condition(headers: &HeaderMap, names: &[&'static str]) -> Option<&'static str> {
    let has_value = |name: &str| {
        let mut values = headers.get_all(name).iter();
        values.any(|v| !v.as_bytes().trim_ascii().is_empty())
    };
    names.iter().copied().find(|&name| has_value(name))
}

fn element_of_condition(header: Option<&str>) -> String {
    header.map_or_else(String::new, |h| format!("<Condition>{h}</Condition>"))
}

fn retry_after(error: &Error, headers: &mut HeaderMap) {
    if error.retry_after_hint().is_some()
        || matches!(
            error.kind(),
            ErrorKind::Busy | ErrorKind::ShuttingDown | ErrorKind::VersionChanged
        )
    {
        let seconds = error
            .retry_after_hint()
            .unwrap_or(RETRY_AFTER_DEFAULT)
            .as_secs_f64()
            .ceil()
            .max(1.0) as u64;
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
}

/// What is wrong and what to do, for codes that the S3 library returns without a message.
fn explain(code: &str) -> (&'static str, &'static str) {
    match code {
        "SignatureDoesNotMatch" => (
            "the signature does not match the one that the node calculates",
            "check the secret key; nothing on the way may change the method, the path, the \
             query, or a signed header such as Host",
        ),
        "MalformedXML" => (
            "the body of the request is not the XML that this operation takes",
            "see the operation in the S3 API",
        ),
        "MissingRequestBodyError" => (
            "this operation needs a body",
            "see the operation in the S3 API",
        ),
        "InvalidURI" => (
            "the path or the query of the request cannot be read",
            "encode names as UTF-8 first, then as %XX",
        ),
        "MethodNotAllowed" => (
            "the method is not one of S3's for this resource",
            "GET, HEAD, PUT, POST and DELETE are answered",
        ),
        "AuthorizationHeaderMalformed" => (
            "the Authorization header cannot be read",
            "AWS4-HMAC-SHA256 Credential=…, SignedHeaders=…, Signature=…",
        ),
        "AuthorizationQueryParametersError" => (
            "the X-Amz-* parameters of the presigned request cannot be read",
            "make the URL again with an SDK",
        ),
        "NotImplemented" => (
            "this operation is not offered here",
            "send the request to the origin",
        ),
        _ => ("the request was refused", "see the code in the S3 API"),
    }
}

/// What an error document says. Fields that it lacks are empty.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ErrorDocument {
    pub code: String,
    pub message: String,
    pub request_id: String,
}

impl ErrorDocument {
    /// `None` if it is not one.
    pub fn parse(xml: &str) -> Option<Self> {
        use quick_xml::{Reader, events::Event};
        let mut reader = Reader::from_str(xml);
        let mut found = ErrorDocument::default();
        let (mut path, mut is_error) = (Vec::<Vec<u8>>::new(), false);
        loop {
            match reader.read_event().ok()? {
                Event::Start(tag) => {
                    path.push(tag.local_name().as_ref().to_vec());
                    is_error |= path.len() == 1 && path[0] == b"Error";
                    // Somebody else's document may be nested arbitrarily deep.
                    if !is_error || path.len() > 16 {
                        return is_error.then_some(found);
                    }
                }
                Event::End(_) => drop(path.pop()),
                Event::Text(text) if path.len() == 2 => {
                    found.add(&path[1], &text.decode().ok()?);
                }
                Event::GeneralRef(name) if path.len() == 2 => {
                    let escaped = format!("&{};", name.decode().ok()?);
                    found.add(&path[1], &quick_xml::escape::unescape(&escaped).ok()?);
                }
                Event::Eof => return is_error.then_some(found),
                _ => {}
            }
        }
    }

    fn add(&mut self, tag: &[u8], text: &str) {
        match tag {
            b"Code" => self.code.push_str(text),
            b"Message" => self.message.push_str(text),
            b"RequestId" => self.request_id.push_str(text),
            _ => {}
        }
    }

    /// For the log.
    pub fn describe(&self) -> String {
        format!("{}: {}", self.code, self.message)
    }
}

/// An error of the S3 library, made like ours: with a message and the id of the request, and with the
/// header of the `condition` that does not hold. `None` for one that has all of it.
pub fn completed(
    xml: &str,
    resource: &str,
    id: &RequestId,
    condition: Option<&str>,
) -> Option<(String, String)> {
    let mut document = ErrorDocument::parse(xml)?;
    let condition = condition.filter(|_| document.code == "PreconditionFailed");
    let is_whole = !document.message.is_empty() && !document.request_id.is_empty();
    if document.code.is_empty() || is_whole && condition.is_none() {
        return None;
    }
    if document.message.is_empty() {
        let (what, hint) = explain(&document.code);
        document.message = format!("{what} ({hint})");
    }
    let completed = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{}</Code>\
         <Message>{}</Message>{}<Resource>{}</Resource><RequestId>{}</RequestId></Error>",
        escape(&document.code),
        escape(&document.message),
        element_of_condition(condition),
        escape(resource),
        escape(id.as_str())
    );
    Some((completed, document.describe()))
}

pub(super) fn escape(text: &str) -> String {
    let clean: String = text
        .chars()
        .map(|c| {
            if c.is_control() && c != '\n' && c != '\t' {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect();
    quick_xml::escape::escape(&clean).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{metrics::Metrics, note::Peer};
    use http_body_util::BodyExt;

    fn note() -> std::sync::Arc<Note> {
        let metrics = std::sync::Arc::new(Metrics::default());
        Note::new(RequestId::new(), Peer::Unix, http::Method::GET, metrics)
    }

    #[tokio::test]
    async fn an_error_is_xml_with_code_message_and_request_id() {
        let error = Error::busy("too many <requests>")
            .hint("try again")
            .retry_after(Duration::from_millis(2500));
        let note = note();
        let id = &note.id;
        let answer = Refusal::from(error).response("/b/a&b", &note);
        assert_eq!(
            (
                answer.status(),
                answer.headers()["retry-after"].to_str().unwrap()
            ),
            (StatusCode::SERVICE_UNAVAILABLE, "3")
        );
        let text = answer.into_body().collect().await.unwrap().to_bytes();
        let text = std::str::from_utf8(&text).unwrap();
        assert!(
            text.contains("<Code>SlowDown</Code>")
                && text.contains("too many &lt;requests&gt; (try again)")
                && text.contains(id.as_str()),
            "{text}"
        );
        assert!(text.contains("<Resource>/b/a&amp;b</Resource>"), "{text}");
    }

    #[test]
    fn what_clients_know_by_its_sentence_begins_with_it() {
        for (kind, sentence) in [
            (ErrorKind::PreconditionFailed, PRECONDITION_FAILED),
            (ErrorKind::RangeNotSatisfiable, RANGE_NOT_SATISFIABLE),
        ] {
            let refusal = Refusal::from(Error::new(kind, "b/k: why"));
            assert_eq!(refusal.error().message(), format!("{sentence}: b/k: why"));
        }
    }

    #[test]
    fn an_error_of_the_library_is_completed() {
        let id = RequestId::new();
        let (xml, log) = completed(
            "<?xml version=\"1.0\"?><Error><Code>SignatureDoesNotMatch</Code></Error>",
            "/b/<k>",
            &id,
            None,
        )
        .unwrap();
        assert!(
            xml.contains("<Code>SignatureDoesNotMatch</Code><Message>the signature does not match")
                && xml.contains("check the secret key"),
            "{xml}"
        );
        assert!(
            xml.contains(&format!(
                "<Resource>/b/&lt;k&gt;</Resource><RequestId>{id}</RequestId>"
            )),
            "{xml}"
        );
        assert!(
            log.starts_with("SignatureDoesNotMatch: the signature"),
            "{log}"
        );
        let (xml, _) = completed(
            "<Error><Code>X</Code><Message>its own &amp; only</Message></Error>",
            "/",
            &id,
            None,
        )
        .unwrap();
        assert!(
            xml.contains("<Message>its own &amp; only</Message>"),
            "{xml}"
        );
        assert!(
            completed(
                "<Error><Code>X</Code><Message>m</Message><RequestId>1</RequestId></Error>",
                "/",
                &id,
                Some("If-Match"),
            )
            .is_none()
        );
    }

    #[test]
    fn every_code_is_one_that_the_library_knows_or_passes_on() {
        let note = note();
        for kind in [
            ErrorKind::Invalid,
            ErrorKind::Busy,
            ErrorKind::Timeout,
            ErrorKind::OriginUnavailable,
            ErrorKind::Unsupported,
        ] {
            let s3 = Refusal::from(Error::new(kind, "x")).to_s3(&note);
            assert_eq!(s3.code().as_str(), code(kind).0);
            assert_eq!(s3.status_code(), Some(code(kind).1));
        }
    }

    #[test]
    fn an_error_document_is_read_as_xml() {
        let read = |xml: &str| ErrorDocument::parse(xml).map(|d| d.describe());
        assert_eq!(
            read(
                "<?xml version=\"1.0\"?>\n<Error xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
                 <Code >NoSuchKey</Code><Message>a &amp; b &#60;Code&#62;</Message></Error>"
            )
            .as_deref(),
            Some("NoSuchKey: a & b <Code>")
        );
        // Text inside an object is not the answer's code.
        assert_eq!(
            read("<Error><Detail><Code>Inner</Code></Detail><Code>Outer</Code></Error>").as_deref(),
            Some("Outer: ")
        );
        assert_eq!(
            read("<ListBucketResult><Error><Code>x</Code></Error>"),
            None
        );
        assert_eq!(read("not XML"), None);
        assert_eq!(read("<Error><Code>cut"), Some("cut: ".to_owned()));
    }
}
