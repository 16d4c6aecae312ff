//! Answers to what may take minutes: the completion of an upload, and a copy.
//!
//! Clients that hear nothing for a minute or so close the connection and ask again. So the node begins
//! such an answer before it knows it, as S3 does, when it has had the whole request for some time: it
//! sends the status 200, the first line of a document, and then a space every [`SILENCE_MAX`]. The rest
//! of the document follows when it is there. It may be an error: clients of S3 look for that in these
//! answers.

use super::error::{ErrorDocument, Refusal};
use crate::{body::AnswerBody, note::Note};
use bytes::Bytes;
use forebay_core::{Error, Result};
use futures::{FutureExt, StreamExt, stream};
use http::{HeaderValue, Response, header};
use http_body_util::BodyExt;
use std::{future::Future, sync::Arc, time::Duration};

/// The longest time for which a client hears nothing.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);

const DECLARATION: &[u8] = b"<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";

type Answer = Result<Response<AnswerBody>, Refusal>;

/// The answer to a request for `resource`. If there is none after `silence`, its beginning: the rest
/// follows in its body.
pub async fn begun(
    answer: impl Future<Output = Answer> + Send + 'static,
    silence: Duration,
    resource: String,
    note: Arc<Note>,
) -> Answer {
    let mut answer = answer.boxed();
    if let Ok(answered) = tokio::time::timeout(silence, &mut answer).await {
        return answered;
    }
    let first = stream::once(async { Ok::<_, Error>(Bytes::from_static(DECLARATION)) });
    let rest = stream::unfold(Some(answer), move |waiting| {
        let (resource, note) = (resource.clone(), note.clone());
        async move {
            let mut answer = waiting?;
            match tokio::time::timeout(silence, &mut answer).await {
                Err(_) => Some((Ok(Bytes::from_static(b" ")), Some(answer))),
                Ok(answered) => Some((document(answered, &resource, &note).await, None)),
            }
        }
    });
    let mut response = Response::new(AnswerBody::stream(first.chain(rest).boxed(), None));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/xml"),
    );
    Ok(response)
}

/// The document of an answer, without its declaration. If the answer is a failure, it is always a
/// document of an error.
async fn document(answered: Answer, resource: &str, note: &Note) -> Result<Bytes> {
    let response = answered.unwrap_or_else(|refusal| refusal.response(resource, note));
    let status = response.status();
    let mut document = bytes_of(response).await?;
    if !status.is_success() {
        let text = std::str::from_utf8(&document).ok();
        if text.and_then(ErrorDocument::parse).is_none() {
            let e = Error::origin_unavailable(format!("the origin answered {status}"));
            document = bytes_of(Refusal::from(e).response(resource, note)).await?;
        }
    }
    Ok(without_declaration(&document))
}

async fn bytes_of(response: Response<AnswerBody>) -> Result<Bytes> {
    let whole = response.into_body().collect().await;
    let whole = whole.map_err(|e| Error::internal("an answer broke off").caused_by(e))?;
    Ok(whole.to_bytes())
}

fn without_declaration(document: &Bytes) -> Bytes {
    let spaces = document.len() - document.trim_ascii_start().len();
    let rest = document.slice(spaces..);
    match rest.windows(2).position(|pair| pair == b"?>") {
        Some(at) if rest.starts_with(b"<?xml") => rest.slice(at + 2..),
        _ => rest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{metrics::Metrics, note::Peer, request_id::RequestId};
    use http::{Method, StatusCode};
    use tokio::sync::oneshot;

    /// What a client gets of an answer that is there at once, or after the second space.
    async fn told(is_late: bool, answer: Answer) -> (StatusCode, String) {
        let metrics = Arc::new(Metrics::default());
        let note = Note::new(RequestId::new(), Peer::Unix, Method::POST, metrics);
        let (sender, receiver) = oneshot::channel::<()>();
        let mut waits = is_late.then_some(sender);
        let answer = async move {
            // It waits until the sender is dropped, which is an error here.
            let _ = receiver.await;
            answer
        };
        let silence = Duration::from_millis(20);
        let begun = begun(answer, silence, "/b/k".into(), note.clone()).await;
        let response = begun.unwrap_or_else(|refusal| refusal.response("/b/k", &note));
        let (status, mut body) = (response.status(), response.into_body());
        let mut text = String::new();
        while let Some(frame) = body.frame().await {
            let bytes = frame.unwrap().into_data().unwrap();
            text.push_str(std::str::from_utf8(&bytes).unwrap());
            if text.ends_with("  ") {
                drop(waits.take());
            }
        }
        (status, text)
    }

    fn answer(status: StatusCode, document: &'static str) -> Answer {
        let mut response = Response::new(AnswerBody::full(document));
        *response.status_mut() = status;
        Ok(response)
    }

    fn refused() -> Answer {
        let e = Error::new(forebay_core::ErrorKind::PreconditionFailed, "no");
        Err(e.into())
    }

    #[tokio::test]
    async fn an_answer_that_takes_long_begins_with_spaces_and_ends_with_its_document() {
        let ok = StatusCode::OK;
        let made = "<?xml version=\"1.0\"?>\n<Done/>";
        assert_eq!(told(false, answer(ok, made)).await, (ok, made.to_owned()));
        let (status, _) = told(false, refused()).await;
        assert_eq!(status, StatusCode::PRECONDITION_FAILED);

        let (status, text) = told(true, answer(ok, made)).await;
        let declaration = String::from_utf8_lossy(DECLARATION);
        let rest = text.strip_prefix(&*declaration).unwrap();
        assert_eq!((status, rest), (ok, "  \n<Done/>"));
        let error = "<Error><Code>EntityTooSmall</Code></Error>";
        for (answer, code) in [
            (refused(), "PreconditionFailed"),
            (answer(StatusCode::BAD_REQUEST, error), "EntityTooSmall"),
            (answer(StatusCode::BAD_GATEWAY, "<html/>"), "BadGateway"),
        ] {
            let (status, text) = told(true, answer).await;
            assert_eq!(status, ok);
            let document = ErrorDocument::parse(&text).unwrap();
            assert_eq!(document.code, code, "{text}");
        }
    }
}
