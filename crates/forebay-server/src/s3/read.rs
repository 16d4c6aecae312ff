//! GET and HEAD of objects, bypassing the S3 library: ranges and conditions go to the engine as
//! they were sent.

use super::{
    error::{self, Refusal},
    path::Target,
};
use crate::{body::AnswerBody, note::Note, object};
use forebay_core::{Error, ErrorKind, ObjectName, Result};
use forebay_engine::{Engine, ReadOptions};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header};

/// Whether a request reads an object or its attributes (and not the parts of an upload).
pub fn is_read(method: &Method, target: &Target) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
        && !target.key.is_empty()
        && (*method == Method::HEAD || target.query("uploadId").is_none())
}

/// Reads an object or its attributes. `Ok(None)` if only the origin knows the answer: the parts
/// that an object was uploaded in.
pub async fn read(
    engine: &Engine,
    target: &Target,
    method: &Method,
    headers: &HeaderMap,
    note: &Note,
) -> Result<Option<Response<AnswerBody>>, Refusal> {
    let overrides = response_overrides(target)?;
    let name = object::name(&target.bucket, &target.key)?;
    let answered = if *method == Method::GET && target.query("attributes").is_some() {
        attributes(engine, &name, headers, note).await
    } else {
        object::answer(engine, &name, method, headers, note).await
    };
    match answered {
        Ok(mut response) => {
            if target.query("partNumber").is_some() && !as_only_part(&mut response)? {
                return Ok(None);
            }
            if response.status().is_success() {
                response.headers_mut().extend(overrides);
            }
            Ok(Some(response))
        }
        Err(e) if e.kind() == ErrorKind::RangeNotSatisfiable => {
            Err(match object::size_of(engine, &name).await {
                Some(size) => Refusal::unsatisfiable_range(e, size),
                None => e.into(),
            })
        }
        Err(e) => {
            let condition = error::condition(headers, &["If-Match", "If-Unmodified-Since"]);
            Err(Refusal::from(e).of_condition(condition))
        }
    }
}

/// GetObjectAttributes: those of the requested attributes that are known here. In this one answer
/// the ETag has no quotes, as in S3.
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
                let etag = head.meta.shown_etag();
                let etag = error::escape(etag.trim_matches('"'));
                xml.push_str(&format!("<ETag>{etag}</ETag>"));
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
            // These are unknown here, which is an answer that S3 gives too.
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

/// `partNumber=1`, which the AWS SDKs' C runtime sends to learn how large an object is. For an
/// object that was written in one piece, the answer is the whole object with the status and range
/// of a part. False for objects that an S3 service put together: where their parts end is not known
/// here.
fn as_only_part(response: &mut Response<AnswerBody>) -> Result<bool> {
    let text = |name| {
        response
            .headers()
            .get(name)
            .and_then(|v: &HeaderValue| v.to_str().ok())
    };
    if text(header::ETAG).is_some_and(is_of_parts) {
        return Ok(false);
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
    Ok(true)
}

/// Whether an ETag is an S3 service's for an upload in parts: an MD5, and their number. The ETags
/// of files, which have no parts, have hyphens too.
fn is_of_parts(etag: &str) -> bool {
    etag.trim_matches('"')
        .split_once('-')
        .is_some_and(|(md5, count)| md5.len() == 32 && count.parse::<u32>().is_ok())
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
                "the value of the query parameter response-{name} is not a valid header value"
            ))
        })?;
        headers.insert::<HeaderName>(name, value);
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_no_parts() {
        assert!(is_of_parts("\"d41d8cd98f00b204e9800998ecf8427e-2\""));
        for whole in [
            "\"d41d8cd98f00b204e9800998ecf8427e\"",
            "\"a3495e-18ec60df3571504f-a-ad8553ca3fc03b23-crc32c.280c069e\"",
            "\"a2c4a2-18ec5fbd9e828976-500\"",
            "\"686897696a7c876b7e-1\"",
            "",
        ] {
            assert!(!is_of_parts(whole), "{whole}");
        }
    }
}
