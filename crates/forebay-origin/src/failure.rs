//! The meaning of an origin's failure: maps HTTP statuses, S3 error codes, transport and file
//! errors to an [`ErrorKind`] and a hint.
//!
//! One place for all origins, because the layers above decide by the kind alone: whether to retry,
//! whether a batch may use a placeholder, which status the client gets. A `Site` names the origin
//! and the object, so that every message says where it happened.

use crate::s3::xml;
use forebay_core::{Error, ErrorKind, name::shorten};
use http::{HeaderMap, StatusCode};
use std::{error::Error as _, io, time::Duration};

/// Where a request went: for messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site<'a> {
    /// As [`Origin::describe`](crate::Origin::describe) gives it.
    pub origin: &'a str,
    pub operation: &'a str,
    /// Empty for requests that name no object.
    pub key: &'a str,
}

impl Site<'_> {
    pub(crate) fn prefix(&self) -> String {
        if self.key.is_empty() {
            format!("{} at {}", self.operation, self.origin)
        } else {
            format!(
                "{} {:?} at {}",
                self.operation,
                shorten(self.key),
                self.origin
            )
        }
    }
}

/// The parts of an error document that S3, GCS (XML) and Azure share.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ErrorDocument {
    pub code: String,
    pub message: String,
}

impl ErrorDocument {
    /// Reads `<Code>` and `<Message>`, or the JSON `"message"` of GCS; missing parts stay empty.
    pub(crate) fn parse(body: &str) -> Self {
        if body
            .trim_start_matches('\u{feff}')
            .trim_start()
            .starts_with('<')
        {
            return xml::error_document(body);
        }
        let json = serde_json::from_str::<serde_json::Value>(body).unwrap_or_default();
        let message = json["error"]["message"]
            .as_str()
            .or(json["error"].as_str())
            .unwrap_or_default();
        let code = json["error"]["errors"][0]["reason"]
            .as_str()
            .unwrap_or_default();
        Self {
            code: code.to_owned(),
            message: message.to_owned(),
        }
    }
}

/// `Retry-After` in seconds, if the origin sent one; else the time until a rate limit ends, as in
/// `RateLimit: "resolvers";r=0;t=172` (draft-ietf-httpapi-ratelimit-headers).
pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name)?.to_str().ok();
    let limited = || {
        let limits = text("ratelimit")?.split(',');
        let of = |limit: &str, name: &str| {
            let mut parts = limit.split(';').map(str::trim);
            let part = parts.find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
            part?.parse::<u64>().ok()
        };
        let spent = limits.filter(|limit| of(limit, "r") == Some(0));
        spent.filter_map(|limit| of(limit, "t")).max()
    };
    let seconds = text("retry-after").and_then(|t| t.trim().parse().ok());
    Some(Duration::from_secs(seconds.or_else(limited)?.min(60)))
}

/// The error for an answer that is not a success.
pub(crate) fn from_status(
    site: Site<'_>,
    status: StatusCode,
    headers: &HeaderMap,
    body: &str,
) -> Error {
    let mut doc = ErrorDocument::parse(body);
    // Azure also says it in a header, the only place in answers to HEAD.
    if let Some(code) = headers
        .get("x-ms-error-code")
        .and_then(|v| v.to_str().ok())
        .filter(|_| doc.code.is_empty())
    {
        doc.code = code.to_owned();
    }
    let kind = kind_of(status, &doc.code);
    let mut text = format!("{}: status {}", site.prefix(), status.as_u16());
    for part in [&doc.code, &doc.message] {
        if !part.is_empty() {
            text.push_str(if part == &doc.code { " " } else { ": " });
            text.extend(part.chars().take(300).filter(|c| !c.is_control()));
        }
    }
    let mut error = Error::new(kind, text);
    if let Some(hint) = hint_for(kind, status, &doc.code, site, headers) {
        error = error.hint(hint);
    }
    match retry_after(headers) {
        Some(after) if kind.is_transient() => error.retry_after(after),
        _ => error,
    }
}

/// Whether an error code says that the keys themselves are not valid (any more): others may be.
pub(crate) fn is_about_keys(code: &str) -> bool {
    matches!(
        code,
        "ExpiredToken"
            | "ExpiredTokenException"
            | "InvalidToken"
            | "InvalidClientTokenId"
            | "TokenRefreshRequired"
            | "InvalidAccessKeyId"
    )
}

/// Whether a refusal is about how this node asked, regardless of what it asked for.
pub(crate) fn is_about_the_node(status: StatusCode, code: &str) -> bool {
    is_about_keys(code)
        || matches!(
            code,
            "SignatureDoesNotMatch" | "RequestTimeTooSkewed" | "AuthorizationHeaderMalformed"
        )
        || (status.is_redirection() && status != StatusCode::NOT_MODIFIED)
}

/// What an answer of a service means, by its status and its error code (which may be empty).
pub(crate) fn kind_of(status: StatusCode, code: &str) -> ErrorKind {
    use ErrorKind::*;
    match code {
        "NoSuchBucket" | "ContainerNotFound" => return BucketNotFound,
        "BucketAlreadyExists" | "BucketAlreadyOwnedByYou" | "ContainerAlreadyExists" => {
            return AlreadyExists;
        }
        "BucketNotEmpty" => return Conflict,
        "SlowDown" | "ServerBusy" | "RequestLimitExceeded" | "Throttling" | "InternalError" => {
            return OriginUnavailable;
        }
        "RequestTimeout" | "OperationTimedOut" => return Timeout,
        "EntityTooLarge" => return TooLarge,
        "EntityTooSmall" => return TooSmall,
        "NotImplemented" => return Unsupported,
        // The node's own credentials are wrong or stale: the client is not at fault, so this is not
        // `Unauthenticated`.
        "SignatureDoesNotMatch" => return PermissionDenied,
        code if is_about_keys(code) => return PermissionDenied,
        _ => {}
    }
    match status.as_u16() {
        304 => NotModified,
        401 | 403 => PermissionDenied,
        404 => NotFound,
        405 | 501 => Unsupported,
        408 | 504 => Timeout,
        409 => Conflict,
        410 => NotFound,
        412 => PreconditionFailed,
        413 => TooLarge,
        416 => RangeNotSatisfiable,
        429 | 500..=599 => OriginUnavailable,
        300..=399 => OriginUnavailable,
        _ => Invalid,
    }
}

/// The kind of an error that comes after the status 200: S3 begins some answers before it knows how
/// they end.
pub(crate) fn kind_of_late(code: &str) -> ErrorKind {
    let status = match code {
        "InvalidPart" | "InvalidPartOrder" | "InvalidRequest" => StatusCode::BAD_REQUEST,
        "AccessDenied" => StatusCode::FORBIDDEN,
        "NoSuchKey" | "NoSuchUpload" => StatusCode::NOT_FOUND,
        "ConditionalRequestConflict" => StatusCode::CONFLICT,
        "PreconditionFailed" => StatusCode::PRECONDITION_FAILED,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    kind_of(status, code)
}

fn hint_for(
    kind: ErrorKind,
    status: StatusCode,
    code: &str,
    site: Site<'_>,
    headers: &HeaderMap,
) -> Option<String> {
    let region = headers
        .get("x-amz-bucket-region")
        .and_then(|v| v.to_str().ok());
    Some(match (kind, code) {
        (_, "InvalidAccessKeyId") => format!(
            "{} does not know the access key of this node: check its keys or profile",
            site.origin
        ),
        (_, "SignatureDoesNotMatch") => {
            "the secret key of this node does not match its access key, or a proxy changes requests"
                .to_owned()
        }
        (_, "RequestTimeTooSkewed") => "the clock of this machine is wrong: set it".to_owned(),
        (_, "ExpiredToken" | "InvalidToken" | "TokenRefreshRequired") => {
            "the session token has expired: get a new one".to_owned()
        }
        (
            _,
            "AuthorizationHeaderMalformed"
            | "PermanentRedirect"
            | "IllegalLocationConstraintException",
        ) => match region {
            Some(region) => format!("set the origin's region to {region}"),
            None => "check the origin's region and endpoint".to_owned(),
        },
        (_, "SlowDown") => {
            "the origin asks for fewer requests: lower requests_in_flight of this origin".to_owned()
        }
        (ErrorKind::BucketNotFound, _) => format!(
            "check the bucket's name and the endpoint of {}",
            site.origin
        ),
        (ErrorKind::PermissionDenied, _) => {
            format!(
                "the credentials of this node do not allow this ({}): check them and the bucket's \
                 policy",
                site.prefix()
            )
        }
        (ErrorKind::OriginUnavailable, _) if status.is_redirection() => match region {
            Some(region) => format!("the bucket is in region {region}: set the origin's region"),
            None => "the origin redirects: check its endpoint, region and path_style".to_owned(),
        },
        (ErrorKind::OriginUnavailable | ErrorKind::Timeout, _) => {
            format!("the trouble is at {}: try again later", site.origin)
        }
        _ => return None,
    })
}

/// The error for a request that got no answer, or a body that broke off.
pub(crate) fn from_transport(site: Site<'_>, error: &reqwest::Error) -> Error {
    let mut causes = Vec::new();
    let mut source = error.source();
    while let Some(cause) = source {
        causes.push(cause.to_string());
        source = cause.source();
    }
    // The innermost cause is the informative one: "Connection refused", "certificate has expired".
    let cause = causes.last().cloned().unwrap_or_else(|| {
        if error.is_timeout() {
            "timed out".into()
        } else {
            "no answer".into()
        }
    });
    let text = format!("{}: {cause}", site.prefix());
    if error.is_connect() {
        let error = Error::origin_unavailable(text);
        let joined = causes.join(" ");
        return if joined.contains("certificate") || joined.contains("TLS") || joined.contains("tls")
        {
            error.hint(format!(
                "the TLS certificate of {} is not trusted here: set ca_file, or check the endpoint",
                site.origin
            ))
        } else {
            error.hint(format!(
                "check that {} is up and reachable from this machine",
                site.origin
            ))
        };
    }
    if error.is_timeout() {
        return Error::timeout(text).hint(format!("{} is slow or unreachable", site.origin));
    }
    Error::origin_unavailable(text).hint(format!("the connection to {} broke off", site.origin))
}

/// The error for a failed local file operation.
pub(crate) fn from_io(site: Site<'_>, error: io::Error) -> Error {
    let text = format!("{}: {error}", site.prefix());
    let e = match error.kind() {
        io::ErrorKind::NotFound => Error::not_found(text),
        io::ErrorKind::PermissionDenied => Error::permission_denied(text)
            .hint("check the owner and mode of the files and directories"),
        io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => {
            Error::new(ErrorKind::Conflict, text)
                .hint("in a local directory, a name cannot be both an object and a folder")
        }
        io::ErrorKind::InvalidFilename => Error::invalid(text)
            .hint("a part of a name can be at most 255 bytes in a local directory"),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Error::origin_unavailable(text).hint("the disk is full: free some space")
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            Error::permission_denied(text).hint("the file system is mounted read-only")
        }
        _ => Error::internal(text).hint("check the disk and the system's log"),
    };
    e.caused_by(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(status: u16, body: &str) -> Error {
        let site = Site {
            origin: "s3://b at http://h",
            operation: "get",
            key: "k",
        };
        from_status(
            site,
            StatusCode::from_u16(status).unwrap(),
            &HeaderMap::new(),
            body,
        )
    }

    #[test]
    fn a_status_and_its_code_become_a_kind() {
        let xml =
            |code: &str| format!("<Error><Code>{code}</Code><Message>a &amp; b</Message></Error>");
        for (status, code, kind) in [
            (304, "", ErrorKind::NotModified),
            (403, "AccessDenied", ErrorKind::PermissionDenied),
            (403, "SignatureDoesNotMatch", ErrorKind::PermissionDenied),
            (400, "ExpiredToken", ErrorKind::PermissionDenied),
            (400, "RequestTimeout", ErrorKind::Timeout),
            (404, "NoSuchKey", ErrorKind::NotFound),
            (404, "NoSuchBucket", ErrorKind::BucketNotFound),
            (404, "ContainerNotFound", ErrorKind::BucketNotFound),
            (404, "NoSuchUpload", ErrorKind::NotFound),
            (409, "BucketNotEmpty", ErrorKind::Conflict),
            (412, "PreconditionFailed", ErrorKind::PreconditionFailed),
            (416, "InvalidRange", ErrorKind::RangeNotSatisfiable),
            (429, "", ErrorKind::OriginUnavailable),
            (503, "SlowDown", ErrorKind::OriginUnavailable),
            (504, "", ErrorKind::Timeout),
            (501, "NotImplemented", ErrorKind::Unsupported),
            (400, "MalformedXML", ErrorKind::Invalid),
            (400, "EntityTooSmall", ErrorKind::TooSmall),
        ] {
            let e = map(status, &xml(code));
            assert_eq!(e.kind(), kind, "{status} {code}");
            assert!(
                e.message().contains("get \"k\" at s3://b at http://h"),
                "{e}"
            );
        }
        assert!(
            map(403, &xml("InvalidAccessKeyId"))
                .message()
                .contains("a & b")
        );
    }

    #[test]
    fn error_documents_are_read_as_xml() {
        let read = |body: &str| {
            let doc = ErrorDocument::parse(body);
            (doc.code, doc.message)
        };
        let is = |code: &str, message: &str| (code.to_owned(), message.to_owned());
        assert_eq!(
            read(
                "<?xml version=\"1.0\"?>\n<!-- <Code>No</Code> --><Error xmlns='x'><Code a=\"1\">\
                 SlowDown</Code><Message><![CDATA[a < b]]> &#38; c</Message></Error>"
            ),
            is("SlowDown", "a < b & c")
        );
        // As STS wraps it, and as Azure begins it.
        assert_eq!(
            read("<ErrorResponse><Error><Code>ExpiredToken</Code></Error></ErrorResponse>"),
            is("ExpiredToken", "")
        );
        assert_eq!(
            read("\u{feff}<?xml version=\"1.0\"?><Error><Code>ServerBusy</Code></Error>"),
            is("ServerBusy", "")
        );
        // Cut short: what arrived counts.
        assert_eq!(
            read("<Error><Code>NoSuchBucket</Code><Message>The spec"),
            is("NoSuchBucket", "")
        );
        assert_eq!(read("<html><p>Bad gateway<br></html>"), is("", ""));
    }

    #[test]
    fn the_json_errors_of_gcs_are_read() {
        let e = map(
            404,
            r#"{"error":{"code":404,"message":"No such object","errors":[{"reason":"notFound"}]}}"#,
        );
        assert_eq!(e.kind(), ErrorKind::NotFound);
        assert!(e.message().contains("No such object"), "{e}");
    }

    #[test]
    fn retry_after_is_read_and_bounded() {
        let mut h = HeaderMap::new();
        h.insert("retry-after", "7".parse().unwrap());
        assert_eq!(retry_after(&h), Some(Duration::from_secs(7)));
        h.insert("retry-after", "99999".parse().unwrap());
        assert_eq!(retry_after(&h), Some(Duration::from_secs(60)));
        h.insert(
            "retry-after",
            "Wed, 21 Oct 2015 07:28:00 GMT".parse().unwrap(),
        );
        assert_eq!(retry_after(&h), None);
    }
}
