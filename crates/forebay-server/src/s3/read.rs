//! GET and HEAD of objects, past the S3 library's own form of them: raw ranges and conditions go to the engine as they were sent.
//!
//! For requests whose signature is checked this is a route inside the library, taken after the check; others come here directly.

use super::{error, path::Target};
use crate::{body::AnswerBody, note::Note, object};
use forebay_core::{Error, ErrorKind};
use forebay_engine::Engine;
use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method, Response, Uri, header};
use s3s::{Body, S3Request, S3Response, S3Result, route::S3Route};
use std::sync::Arc;

/// Whether a request reads an object (and not its parts or attributes).
pub fn is_read(method: &Method, target: &Target) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
        && !target.key.is_empty()
        && (*method == Method::HEAD || (target.query("attributes").is_none() && target.query("uploadId").is_none()))
}

pub async fn read(engine: &Engine, target: &Target, method: &Method, headers: &HeaderMap, note: &Note) -> Response<AnswerBody> {
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
    match object::answer(engine, &name, method, headers, note).await {
        Ok(mut response) => {
            if response.status().is_success() {
                response.headers_mut().extend(overrides);
            }
            response
        }
        Err(e) => {
            let range = e.kind() == ErrorKind::RangeNotSatisfiable;
            if range && let Some(value) = object::unsatisfiable_range(engine, &name).await {
                note.set_error(e.describe());
                let size = value.to_str().ok().and_then(|v| v.rsplit('/').next()).unwrap_or_default().to_owned();
                let mut response = error::unsatisfiable_range(&e, &resource, &size, &note.id);
                response.headers_mut().insert(header::CONTENT_RANGE, value);
                return response;
            }
            failed(e)
        }
    }
}

/// `response-content-type` and its kin: headers that a presigned URL asks the answer to have.
fn response_overrides(target: &Target) -> forebay_core::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in target.query.iter().filter(|(n, _)| n.starts_with("response-")) {
        let name = match name.as_str() {
            "response-content-type" => header::CONTENT_TYPE,
            "response-content-language" => header::CONTENT_LANGUAGE,
            "response-expires" => header::EXPIRES,
            "response-cache-control" => header::CACHE_CONTROL,
            "response-content-disposition" => header::CONTENT_DISPOSITION,
            "response-content-encoding" => header::CONTENT_ENCODING,
            _ => return Err(Error::unsupported(format!("the query parameter {name:?} is not offered"))),
        };
        let value =
            HeaderValue::from_str(value).map_err(|_| Error::invalid(format!("the query parameter response-{name} is no header value")))?;
        headers.insert::<HeaderName>(name, value);
    }
    Ok(headers)
}

/// The route for requests whose signature the library has checked.
pub struct ReadRoute(pub Engine);

#[async_trait::async_trait]
impl S3Route for ReadRoute {
    fn is_match(&self, method: &Method, _uri: &Uri, _headers: &HeaderMap, extensions: &mut Extensions) -> bool {
        extensions.get::<Arc<Target>>().is_some_and(|t| is_read(method, t))
    }

    async fn call(&self, request: S3Request<Body>) -> S3Result<S3Response<Body>> {
        let (Some(target), Some(note)) = (request.extensions.get::<Arc<Target>>(), request.extensions.get::<Arc<Note>>()) else {
            return Err(s3s::s3_error!(InternalError, "a read without its target"));
        };
        let (head, body) = read(&self.0, target, &request.method, &request.headers, note).await.into_parts();
        let mut response = S3Response::with_headers(Body::http_body_unsync(body), head.headers);
        response.status = Some(head.status);
        Ok(response)
    }
}
