//! Errors under `/v1/`: the document that our clients read ([`ErrorDocument`]), plus what AIStore's
//! clients read.

use crate::{body::AnswerBody, note::Note};
use forebay_core::{Error, ErrorKind};
use forebay_protocol::{AisFields, ErrorDocument};
use http::{HeaderValue, Response, StatusCode, header};

/// When to try again, if the error does not say.
const RETRY_AFTER_DEFAULT_SECS: u64 = 1;

/// What an error text needs to know about its request.
pub struct Place<'a> {
    pub note: &'a Note,
    pub path: &'a str,
    pub node: &'a str,
    /// As the client wrote it. Its error classes are told apart by `provider://bucket/name` in the
    /// message.
    pub provider: &'a str,
    pub bucket: &'a str,
    pub name: &'a str,
}

fn tcode(kind: ErrorKind) -> Option<&'static str> {
    Some(match kind {
        ErrorKind::NotFound => "ErrNotFound",
        ErrorKind::BucketNotFound => "ErrBckNotFound",
        ErrorKind::RangeNotSatisfiable => "ErrRangeNotSatisfiable",
        ErrorKind::AlreadyExists => "ErrBckAlreadyExists",
        ErrorKind::UnknownFormat => "errUnknownMime",
        _ => return None,
    })
}

/// The answer for an error.
pub fn response(error: &Error, place: &Place<'_>) -> Response<AnswerBody> {
    let kind = error.kind();
    let status =
        StatusCode::from_u16(kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let missing = match kind {
        _ if place.bucket.is_empty() => None,
        ErrorKind::NotFound if !place.name.is_empty() => {
            Some("the object, or what is asked for of it, does not exist")
        }
        ErrorKind::BucketNotFound => Some("the bucket does not exist"),
        _ => None,
    };
    // In AIStore's words, which its clients look for.
    let mut document = match missing {
        Some(missing) => ErrorDocument::of(&error.clone().context(missing)),
        None => ErrorDocument::of(error),
    };
    if !place.bucket.is_empty() {
        let whole = matches!(kind, ErrorKind::BucketNotFound | ErrorKind::AlreadyExists);
        document = document.at(if whole || place.name.is_empty() {
            format!("{}://{}", place.provider, place.bucket)
        } else {
            format!("{}://{}/{}", place.provider, place.bucket, place.name)
        });
    }
    place.note.set_error(match &document.hint {
        Some(hint) => format!("{} ({hint})", document.message),
        None => document.message.clone(),
    });
    let later = error.retry_after_hint().is_some()
        || matches!(
            kind,
            ErrorKind::Busy | ErrorKind::ShuttingDown | ErrorKind::VersionChanged
        );
    document.retry_after_seconds = later.then(|| {
        document
            .retry_after_seconds
            .map_or(RETRY_AFTER_DEFAULT_SECS, |seconds| seconds.max(1))
    });
    document.request_id = Some(place.note.id.to_string());
    document.ais = Some(AisFields {
        method: place.note.method.to_string(),
        url_path: place.path.to_owned(),
        remote_addr: place.note.peer.to_string(),
        caller: place.note.learned().caller.to_string(),
        node: place.node.to_owned(),
        tcode: tcode(kind).map(str::to_owned),
    });
    let mut response = json_response(status, &document);
    if let Some(seconds) = document.retry_after_seconds {
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if kind == ErrorKind::Unauthenticated {
        response
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

pub fn json_response(status: StatusCode, body: &impl serde::Serialize) -> Response<AnswerBody> {
    let text = serde_json::to_vec(body)
        .unwrap_or_else(|e| format!("{{\"message\":{:?}}}", e.to_string()).into_bytes());
    let mut response = Response::new(AnswerBody::full(text));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}
