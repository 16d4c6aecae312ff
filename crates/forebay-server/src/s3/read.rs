//! GET and HEAD of objects, past the S3 library's own form of them: raw ranges and conditions go to
//! the engine as they were sent.
//!
//! For requests whose signature is checked this is a route inside the library, taken after the
//! check; others come here directly.

use super::{error, path::Target};
use crate::{auth::Access, body::AnswerBody, config::Action, note::Note, object};
use forebay_core::{Error, ErrorKind, ObjectName, Result};
use forebay_engine::{Engine, ReadOptions};
use http::{
    Extensions, HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Uri, header,
};
use s3s::{Body, S3Request, S3Response, S3Result, route::S3Route};
use std::sync::Arc;

/// Whether a request reads an object or its attributes (and not the parts of an upload).
pub fn is_read(method: &Method, target: &Target) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
        && !target.key.is_empty()
        && (*method == Method::HEAD || target.query("uploadId").is_none())
}

pub async fn read(
    engine: &Engine,
    target: &Target,
    method: &Method,
    headers: &HeaderMap,
    note: &Note,
) -> Response<AnswerBody> {
    let resource = format!("/{}/{}", target.bucket, target.key);
    let failed = |e: Error| {
        note.set_error(e.describe());
        error::response(&e, &resource, &note.id)
    };
    let overrides = match response_overrides(target) {
        Ok(overrides) => overrides,
        Err(e) => return failed(e),
    };
    let name = match object::name(&target.bucket, &target.key) {
        Ok(name) => name,
        Err(e) => return failed(e),
    };
    let answered = if *method == Method::GET && target.query("attributes").is_some() {
        attributes(engine, &name, headers, note).await
    } else {
        object::answer(engine, &name, method, headers, note).await
    };
    match answered {
        Ok(mut response) => {
            if target.query("partNumber").is_some()
                && let Err(e) = as_only_part(&mut response)
            {
                return failed(e);
            }
            if response.status().is_success() {
                response.headers_mut().extend(overrides);
            }
            response
        }
        Err(e) if e.kind() == ErrorKind::RangeNotSatisfiable => {
            note.set_error(e.describe());
            match object::size_of(engine, &name).await {
                Some(size) => error::unsatisfiable_range(&e, &resource, size, &note.id),
                None => error::response(&e, &resource, &note.id),
            }
        }
        Err(e) => failed(e),
    }
}

/// GetObjectAttributes: what is known here of those that are asked for. The ETag is without quotes
/// in this one answer, as S3 has it.
async fn attributes(
    engine: &Engine,
    name: &ObjectName,
    headers: &HeaderMap,
    note: &Note,
) -> Result<Response<AnswerBody>> {
    let wanted: Vec<&str> = headers
        .get_all("x-amz-object-attributes")
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .map(str::trim)
        .collect();
    if wanted.is_empty() {
        return Err(
            Error::invalid("the header x-amz-object-attributes is missing")
                .hint("as in ETag,ObjectSize"),
        );
    }
    let head = engine.head(name, &ReadOptions::default()).await?;
    let mut xml = String::from(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<GetObjectAttributesResponse \
         xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">",
    );
    for what in wanted {
        match what {
            "ETag" => {
                if let Some(etag) = &head.meta.etag {
                    xml.push_str(&format!(
                        "<ETag>{}</ETag>",
                        error::escape(etag.trim_matches('"'))
                    ));
                }
            }
            "ObjectSize" => xml.push_str(&format!("<ObjectSize>{}</ObjectSize>", head.meta.size)),
            "StorageClass" => {
                let class = head
                    .meta
                    .attributes
                    .storage_class
                    .as_deref()
                    .unwrap_or("STANDARD");
                xml.push_str(&format!(
                    "<StorageClass>{}</StorageClass>",
                    error::escape(class)
                ));
            }
            // Nothing is known here of these, which is an answer that S3 gives too.
            "Checksum" | "ObjectParts" => {}
            other => {
                return Err(Error::invalid(format!(
                    "{other:?} is not an attribute of objects"
                )));
            }
        }
    }
    xml.push_str("</GetObjectAttributesResponse>");
    let mut response = Response::new(AnswerBody::full(xml));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/xml"),
    );
    if let Ok(date) = HeaderValue::from_str(&object::http_date(head.meta.last_modified_ms)) {
        response.headers_mut().insert(header::LAST_MODIFIED, date);
    }
    note.x_cache(response.headers_mut(), head.cache);
    Ok(response)
}

/// `partNumber=1`, with which the AWS SDKs' C runtime asks how large an object is: all of an object
/// that was written in one piece, with the status and range of a part. Where the parts of other
/// objects end (their ETags have the form `"hash-count"`) is not known here.
fn as_only_part(response: &mut Response<AnswerBody>) -> forebay_core::Result<()> {
    let text = |name| {
        response
            .headers()
            .get(name)
            .and_then(|v: &HeaderValue| v.to_str().ok())
    };
    if text(header::ETAG).is_some_and(|etag| etag.contains('-')) {
        return Err(
            Error::unsupported("a part of an object that was uploaded in several")
                .hint("read it by ranges"),
        );
    }
    let size: u64 = text(header::CONTENT_LENGTH)
        .and_then(|v| v.parse().ok())
        .unwrap_or(0);
    if response.status() == StatusCode::OK && size > 0 {
        let range = HeaderValue::from_str(&format!("bytes 0-{}/{size}", size - 1));
        let range = range.map_err(|e| Error::internal(format!("Content-Range: {e}")))?;
        response.headers_mut().insert(header::CONTENT_RANGE, range);
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Ok(())
}

/// `response-content-type` and its kin: headers that a presigned URL asks the answer to have.
fn response_overrides(target: &Target) -> Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in target
        .query
        .iter()
        .filter(|(n, _)| n.starts_with("response-"))
    {
        let name = match name.as_str() {
            "response-content-type" => header::CONTENT_TYPE,
            "response-content-language" => header::CONTENT_LANGUAGE,
            "response-expires" => header::EXPIRES,
            "response-cache-control" => header::CACHE_CONTROL,
            "response-content-disposition" => header::CONTENT_DISPOSITION,
            "response-content-encoding" => header::CONTENT_ENCODING,
            _ => {
                return Err(Error::unsupported(format!(
                    "the query parameter {name:?} is not offered"
                )));
            }
        };
        let value = HeaderValue::from_str(value).map_err(|_| {
            Error::invalid(format!(
                "the query parameter response-{name} is no header value"
            ))
        })?;
        headers.insert::<HeaderName>(name, value);
    }
    Ok(headers)
}

/// The route for requests whose signature the library has checked.
pub struct ReadRoute(pub Engine, pub Arc<Access>);

#[async_trait::async_trait]
impl S3Route for ReadRoute {
    fn is_match(
        &self,
        method: &Method,
        _uri: &Uri,
        _headers: &HeaderMap,
        extensions: &mut Extensions,
    ) -> bool {
        extensions
            .get::<Arc<Target>>()
            .is_some_and(|t| is_read(method, t))
    }

    async fn call(&self, request: S3Request<Body>) -> S3Result<S3Response<Body>> {
        let (Some(target), Some(note)) = (
            request.extensions.get::<Arc<Target>>(),
            request.extensions.get::<Arc<Note>>(),
        ) else {
            return Err(s3s::s3_error!(InternalError, "a read without its target"));
        };
        let policy = super::access::policy_of(&self.1, request.credentials.as_ref(), Some(note))?;
        if let Err(e) = policy.check(Action::Read, &target.bucket, &target.key) {
            note.set_error(e.describe());
            return Err(error::to_s3(e, &note.id));
        }
        let (head, body) = read(&self.0, target, &request.method, &request.headers, note)
            .await
            .into_parts();
        let mut response = S3Response::with_headers(Body::http_body_unsync(body), head.headers);
        response.status = Some(head.status);
        Ok(response)
    }
}
