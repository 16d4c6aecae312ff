//! Errors under `/v1/`: the JSON that AIStore's clients read.

use crate::{body::AnswerBody, note::Note};
use forebay_core::{Error, ErrorKind};
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::json;
use std::time::Duration;

/// What an error text needs of its request.
pub struct Place<'a> {
    pub note: &'a Note,
    pub path: &'a str,
    pub node: &'a str,
    /// As the client wrote it; its error classes are told apart by `provider://bucket/name` in the
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
        _ => return None,
    })
}

pub fn response(error: &Error, place: &Place<'_>) -> Response<AnswerBody> {
    let kind = error.kind();
    let status =
        StatusCode::from_u16(kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut message = error.describe();
    let full = match (kind, place.bucket, place.name) {
        (_, "", _) => String::new(),
        (ErrorKind::BucketNotFound | ErrorKind::AlreadyExists, bucket, _) | (_, bucket, "") => {
            format!("{}://{bucket}", place.provider)
        }
        (_, bucket, name) => format!("{}://{bucket}/{name}", place.provider),
    };
    // The origin's URL, which the message may name, must not be taken for it.
    if !full.is_empty() && !message.starts_with(&full) {
        message = format!("{full}: {message}");
    }
    place.note.set_error(message.clone());
    let mut body = json!({
        "message": message,
        "method": place.note.method.as_str(),
        "url_path": place.path,
        "remote_addr": place.note.peer.to_string(),
        "caller": "",
        "node": place.node,
        "status": status.as_u16(),
    });
    // The published client's table has a code of its own for an archive format that nobody knows.
    let tcode =
        if kind == ErrorKind::Invalid && error.message().contains("is not an archive format") {
            Some("errUnknownMime")
        } else {
            tcode(kind)
        };
    if let Some(tcode) = tcode {
        body["tcode"] = tcode.into();
    }
    let mut response = json_response(status, &body);
    if matches!(
        kind,
        ErrorKind::Busy | ErrorKind::ShuttingDown | ErrorKind::VersionChanged
    ) {
        let seconds = error
            .retry_after_hint()
            .unwrap_or(Duration::from_secs(1))
            .as_secs_f64()
            .ceil()
            .max(1.0) as u64;
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
