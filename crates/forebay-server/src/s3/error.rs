//! Errors as S3 clients know them: a code by the kind, and a message that says what, where, and
//! what to do.

use crate::{body::AnswerBody, request_id::RequestId};
use forebay_core::{Error, ErrorKind};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use s3s::{S3Error, S3ErrorCode};
use std::time::Duration;

/// Retry-After of answers that say "later" without saying when.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);

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
        // Clients retry 5xx; S3 itself has no gateway statuses, so the code says it and the status
        // is HTTP's.
        Timeout => ("GatewayTimeout", StatusCode::GATEWAY_TIMEOUT),
        OriginUnavailable => ("BadGateway", StatusCode::BAD_GATEWAY),
        Corrupt => ("BadGateway", StatusCode::BAD_GATEWAY),
        Unsupported => ("NotImplemented", StatusCode::NOT_IMPLEMENTED),
        Internal => ("InternalError", StatusCode::INTERNAL_SERVER_ERROR),
    }
}

/// For operations that go through the S3 library.
pub fn to_s3(error: Error, id: &RequestId) -> S3Error {
    let (code, status) = code(error.kind());
    with_code(code, status, &error, id)
}

/// The same under another code: `NoSuchUpload`, `BadDigest`.
pub fn with_code(code: &str, status: StatusCode, error: &Error, id: &RequestId) -> S3Error {
    let code = S3ErrorCode::from_bytes(code.as_bytes()).unwrap_or(S3ErrorCode::InternalError);
    let mut out = S3Error::with_message(code, error.describe());
    out.set_status_code(status);
    out.set_request_id(id.as_str());
    let mut headers = HeaderMap::new();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/xml"),
    );
    retry_after(error, &mut headers);
    out.set_headers(headers);
    out
}

fn retry_after(error: &Error, headers: &mut HeaderMap) {
    if matches!(
        error.kind(),
        ErrorKind::Busy | ErrorKind::ShuttingDown | ErrorKind::VersionChanged
    ) {
        let seconds = error
            .retry_after_hint()
            .unwrap_or(RETRY_AFTER_DEFAULT)
            .as_secs_f64()
            .ceil()
            .max(1.0) as u64;
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
}

/// What is wrong and what to do, for codes that the S3 library answers with and says nothing about.
fn explain(code: &str) -> (&'static str, &'static str) {
    match code {
        "SignatureDoesNotMatch" => (
            "the signature is not the one that is calculated here",
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
            "make the URL anew with an SDK",
        ),
        "NotImplemented" => (
            "this operation is not offered here",
            "send the request to the origin",
        ),
        _ => ("the request was refused", "see the code in the S3 API"),
    }
}

/// An error of the S3 library as ours are: with a message, and with the id of the request. `None`
/// for one that has both.
pub fn completed(xml: &str, resource: &str, id: &RequestId) -> Option<(String, String)> {
    let between = |open: &str, close: &str| {
        let (_, rest) = xml.split_once(open)?;
        rest.split_once(close)
            .map(|(text, _)| text.to_owned())
            .filter(|text| !text.is_empty())
    };
    let (has_message, has_id) = (
        between("<Message>", "</Message>"),
        xml.contains("<RequestId>"),
    );
    if !xml.contains("<Error>") || has_message.is_some() && has_id {
        return None;
    }
    let code = between("<Code>", "</Code>")?;
    let (what, hint) = explain(&code);
    let message = has_message.unwrap_or_else(|| escape(&format!("{what} ({hint})")));
    let log = format!("{code}: {message}");
    let completed = format!(
        "<?xml version=\"1.0\" \
         encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>{message}</Message><Resource>{}</Resource><RequestId>{}</RequestId></Error>",
        escape(resource),
        escape(id.as_str())
    );
    Some((completed, log))
}

/// For answers of our own.
pub fn response(error: &Error, resource: &str, id: &RequestId) -> Response<AnswerBody> {
    let (code, status) = code(error.kind());
    with_details(code, status, error, "", resource, id)
}

/// The same under another code: `KeyTooLongError`.
pub fn response_as(
    code: &str,
    status: StatusCode,
    error: &Error,
    resource: &str,
    id: &RequestId,
) -> Response<AnswerBody> {
    with_details(code, status, error, "", resource, id)
}

/// 416 with the size of the object: the C runtime of the AWS SDKs learns from it that an object is
/// empty.
pub fn unsatisfiable_range(
    error: &Error,
    resource: &str,
    size: u64,
    id: &RequestId,
) -> Response<AnswerBody> {
    let (code, status) = code(error.kind());
    let mut response = with_details(
        code,
        status,
        error,
        &format!("<ActualObjectSize>{size}</ActualObjectSize>"),
        resource,
        id,
    );
    if let Ok(value) = HeaderValue::from_str(&format!("bytes */{size}")) {
        response.headers_mut().insert(header::CONTENT_RANGE, value);
    }
    response
}

/// `details` is XML that stands after the message.
fn with_details(
    code: &str,
    status: StatusCode,
    error: &Error,
    details: &str,
    resource: &str,
    id: &RequestId,
) -> Response<AnswerBody> {
    let mut response = Response::new(AnswerBody::Empty);
    *response.status_mut() = status;
    retry_after(error, response.headers_mut());
    if status == StatusCode::NOT_MODIFIED {
        return response;
    }
    let xml = format!(
        "<?xml version=\"1.0\" \
         encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>{}</Message>{details}<Resource>{}</Resource><RequestId>{}</RequestId></Error>",
        escape(&error.describe()),
        escape(resource),
        escape(id.as_str())
    );
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/xml"),
    );
    *response.body_mut() = AnswerBody::full(xml);
    response
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
    use http_body_util::BodyExt;

    #[tokio::test]
    async fn an_error_is_xml_with_code_message_and_request_id() {
        let error = Error::busy("too many <requests>")
            .hint("try again")
            .retry_after(Duration::from_millis(2500));
        let id = RequestId::new();
        let answer = response(&error, "/b/a&b", &id);
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
    fn an_error_of_the_library_is_completed() {
        let id = RequestId::new();
        let (xml, log) = completed(
            "<?xml version=\"1.0\"?><Error><Code>SignatureDoesNotMatch</Code></Error>",
            "/b/<k>",
            &id,
        )
        .unwrap();
        assert!(
            xml.contains("<Code>SignatureDoesNotMatch</Code><Message>the signature is not")
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
                &id
            )
            .is_none()
        );
    }

    #[test]
    fn every_code_is_one_that_the_library_knows_or_passes_on() {
        let id = RequestId::new();
        for kind in [
            ErrorKind::Invalid,
            ErrorKind::Busy,
            ErrorKind::Timeout,
            ErrorKind::OriginUnavailable,
            ErrorKind::Unsupported,
        ] {
            let s3 = to_s3(Error::new(kind, "x"), &id);
            assert_eq!(s3.code().as_str(), code(kind).0);
            assert_eq!(s3.status_code(), Some(code(kind).1));
        }
    }
}
