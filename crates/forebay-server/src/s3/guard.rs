//! What is refused before an S3 request goes anywhere.
//!
//! Three guards. *Features*: a header or a query parameter that asks for something this node does not do is answered 501; accepting the request
//! without it would be a lie (an encrypted upload that is not encrypted). What is accepted is listed, so that what S3 adds tomorrow is refused too.
//! *Signatures*: `x-amz-*` headers that the signature does not cover could have been added on the way; the S3 library does not look. *Forms* of
//! authentication that are out of date (Signature Version 2) or not offered (POST forms).

use super::path::Target;
use forebay_core::{Error, ErrorKind, Result};
use http::{
    HeaderMap, Method,
    header::{AUTHORIZATION, CONTENT_TYPE},
};

/// Query parameters that operations here know, besides `response-*` and `X-Amz-*`.
const QUERY: &[&str] = &[
    "attributes",
    "bucket-region",
    "continuation-token",
    "delete",
    "delimiter",
    "encoding-type",
    "fetch-owner",
    "key-marker",
    "list-type",
    "location",
    "marker",
    "max-buckets",
    "max-keys",
    "max-parts",
    "max-uploads",
    "part-number-marker",
    "prefix",
    "start-after",
    "upload-id-marker",
    "uploads",
    "x-id",
];

/// `x-amz-*` headers that are understood, or that may be ignored without harm.
const HEADERS: &[&str] = &[
    "x-amz-acl",
    // The C++ SDK names the protocol's one version in each request.
    "x-amz-api-version",
    "x-amz-checksum-algorithm",
    "x-amz-checksum-crc32",
    "x-amz-checksum-crc32c",
    "x-amz-checksum-crc64nvme",
    "x-amz-checksum-mode",
    "x-amz-checksum-sha1",
    "x-amz-checksum-sha256",
    "x-amz-checksum-type",
    "x-amz-content-sha256",
    "x-amz-copy-source",
    "x-amz-copy-source-if-match",
    "x-amz-copy-source-if-modified-since",
    "x-amz-copy-source-if-none-match",
    "x-amz-copy-source-if-unmodified-since",
    "x-amz-copy-source-range",
    "x-amz-date",
    "x-amz-decoded-content-length",
    "x-amz-max-parts",
    "x-amz-metadata-directive",
    "x-amz-mp-object-size",
    "x-amz-object-attributes",
    // RestoreStatus, for objects in an archive tier: none here is in one.
    "x-amz-optional-object-attributes",
    "x-amz-part-number-marker",
    "x-amz-request-payer",
    "x-amz-sdk-checksum-algorithm",
    "x-amz-security-token",
    "x-amz-storage-class",
    "x-amz-tagging-directive",
    "x-amz-te",
    "x-amz-trailer",
    "x-amz-user-agent",
];

/// Refuses what is not offered.
///
/// # Errors
/// `Unsupported` with the name of the header or parameter.
pub fn check_features(method: &Method, target: &Target, headers: &HeaderMap) -> Result<()> {
    let object = !target.key.is_empty();
    for (name, value) in &target.query {
        let known = QUERY.contains(&name.as_str())
            || name.starts_with("response-")
            || name.get(..6).is_some_and(|p| p.eq_ignore_ascii_case("x-amz-"))
            // An upload's parts. Reading the first part of an object is offered where it is the whole (see `read`).
            || (name == "uploadId" && object)
            || (name == "partNumber" && object && (target.query("uploadId").is_some() || (value == "1" && super::read::is_read(method, target))))
            // Objects have one version, which S3 calls null.
            || (name == "versionId" && value == "null");
        if !known {
            return Err(not_offered(format!("the query parameter {:?}", forebay_core::name::shorten(name))));
        }
    }
    for (name, value) in headers {
        let name = name.as_str();
        if !name.starts_with("x-amz-") || name.starts_with("x-amz-meta-") {
            continue;
        }
        let value = value.as_bytes();
        let ok = HEADERS.contains(&name)
            && match name {
                "x-amz-acl" => value == b"private" || value == b"bucket-owner-full-control",
                "x-amz-tagging-directive" => value == b"COPY",
                _ => true,
            };
        if !ok {
            return Err(not_offered(format!("the header {name}: {}", forebay_core::name::shorten(&String::from_utf8_lossy(value)))));
        }
    }
    if *method == Method::DELETE && headers.contains_key("if-match") {
        return Err(not_offered("a conditional DELETE".into()));
    }
    if *method == Method::POST
        && headers.get(CONTENT_TYPE).is_some_and(|v| v.as_bytes().get(..19).is_some_and(|p| p.eq_ignore_ascii_case(b"multipart/form-data")))
    {
        return Err(not_offered("an upload by POST form".into()));
    }
    Ok(())
}

fn not_offered(what: String) -> Error {
    Error::unsupported(format!("{what} asks for something that is not offered here"))
        .hint("leave it out, or send the request to the origin")
}

/// Checks what the S3 library leaves open about signatures; that they are right is its matter.
///
/// # Errors
/// `PermissionDenied` for unsigned `x-amz-*` headers, `Invalid` for Signature Version 2.
pub fn check_signature(target: &Target, headers: &HeaderMap) -> Result<()> {
    let version_2 = target.query("Signature").is_some() || target.query("AWSAccessKeyId").is_some();
    let authorization = headers.get(AUTHORIZATION).map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned());
    if version_2 || authorization.as_deref().is_some_and(|a| a.trim_start().starts_with("AWS ")) {
        return Err(
            Error::invalid("Signature Version 2 is not accepted").hint("use AWS4-HMAC-SHA256, which every current SDK does by itself")
        );
    }
    let (signed, presigned) = if let Some(names) = target.query("X-Amz-SignedHeaders") {
        (names.to_owned(), true)
    } else if let Some(authorization) = &authorization {
        let Some((_, rest)) = authorization.split_once("SignedHeaders=") else { return Ok(()) };
        (rest.split([',', ' ']).next().unwrap_or_default().to_owned(), false)
    } else {
        return Ok(());
    };
    let signed: Vec<String> = signed.split(';').map(str::to_ascii_lowercase).collect();
    let covered = |name: &str| signed.iter().any(|s| s == name);
    if !covered("host") {
        return Err(Error::permission_denied("the signature does not cover the header host"));
    }
    for name in headers.keys().map(|n| n.as_str()).filter(|n| n.starts_with("x-amz-")) {
        // Of a presigned request the body's hash is checked against the body itself, so that it cannot be forged.
        if !(covered(name) || presigned && name == "x-amz-content-sha256") {
            return Err(Error::new(ErrorKind::PermissionDenied, format!("the header {name} is not covered by the signature"))
                .hint("sign every x-amz-* header that is sent"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(n, v)| (n.parse::<http::HeaderName>().unwrap(), v.parse().unwrap())).collect()
    }

    fn target(uri: &str) -> Target {
        Target::of(&uri.parse().unwrap(), &HeaderMap::new(), &[]).unwrap()
    }

    #[test]
    fn what_is_not_offered_is_refused() {
        let check = |method: Method, uri: &str, pairs: &[(&'static str, &str)]| {
            check_features(&method, &target(uri), &headers(pairs)).map_err(|e| e.kind())
        };
        for (method, uri) in [
            (Method::GET, "/b/k?acl"),
            (Method::GET, "/b/k?tagging"),
            (Method::GET, "/b?versioning"),
            (Method::GET, "/b/k?torrent"),
            (Method::GET, "/b/k?versionId=3"),
            (Method::GET, "/b/k?partNumber=2"),
            (Method::PUT, "/b/k?renameObject"),
            (Method::GET, "/b?versions"),
            (Method::GET, "/b?uploadId=1"),
        ] {
            assert_eq!(check(method, uri, &[]), Err(ErrorKind::Unsupported), "{uri}");
        }
        for header in [
            ("x-amz-server-side-encryption", "AES256"),
            ("x-amz-server-side-encryption-customer-key", "k"),
            ("x-amz-acl", "public-read"),
            ("x-amz-tagging", "a=b"),
            ("x-amz-object-lock-mode", "GOVERNANCE"),
            ("x-amz-rename-source", "/b/x"),
            ("x-amz-website-redirect-location", "/"),
            ("x-amz-expected-bucket-owner", "1"),
        ] {
            assert_eq!(check(Method::PUT, "/b/k", &[header]), Err(ErrorKind::Unsupported), "{header:?}");
        }
        assert!(check(Method::PUT, "/b/k?partNumber=1&uploadId=x", &[("x-amz-meta-a", "b"), ("x-amz-acl", "private")]).is_ok());
        assert!(check(Method::GET, "/b/k?x-id=GetObject&response-content-type=text%2Fplain&X-Amz-Signature=0&versionId=null", &[]).is_ok());
        assert!(check(Method::POST, "/b", &[("content-type", "multipart/form-data; boundary=x")]).is_err());
    }

    #[test]
    fn headers_left_out_of_the_signature_are_refused() {
        let auth = "AWS4-HMAC-SHA256 Credential=A/20260101/r/s3/aws4_request, SignedHeaders=host;x-amz-date, Signature=0";
        let check = |uri: &str, pairs: &[(&'static str, &str)]| check_signature(&target(uri), &headers(pairs)).map_err(|e| e.kind());
        assert!(check("/b/k", &[("authorization", auth), ("x-amz-date", "d")]).is_ok());
        assert_eq!(check("/b/k", &[("authorization", auth), ("x-amz-copy-source", "b/x")]), Err(ErrorKind::PermissionDenied));
        assert!(check("/b/k?X-Amz-SignedHeaders=host", &[("x-amz-content-sha256", "UNSIGNED-PAYLOAD")]).is_ok());
        assert_eq!(check("/b/k?X-Amz-SignedHeaders=host", &[("x-amz-acl", "private")]), Err(ErrorKind::PermissionDenied));
        assert_eq!(
            check("/b/k", &[("authorization", "AWS4-HMAC-SHA256 Credential=A, SignedHeaders=x-amz-date, Signature=0")]),
            Err(ErrorKind::PermissionDenied)
        );
        assert_eq!(check("/b/k", &[("authorization", "AWS AK:sig")]), Err(ErrorKind::Invalid));
        assert!(check("/b/k", &[]).is_ok(), "without a signature there is nothing to cover; anonymous requests are refused elsewhere");
    }
}
