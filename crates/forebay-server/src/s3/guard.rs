//! What is refused before an S3 request goes anywhere.
//!
//! Three guards. *Features*: if a header or a query parameter asks for something that this node
//! does not do itself, the request goes to the origin (`forward.rs`) where that can do it;
//! otherwise it is answered with 501. Accepting the request without that feature would be a lie (an
//! encrypted upload that is not encrypted). The guard lists what is accepted, so that whatever S3
//! adds tomorrow is refused too. *Signatures*: `x-amz-*` headers that the signature does not cover
//! could have been added on the way, and the S3 library does not check this. *Forms* of
//! authentication that are out of date (Signature Version 2) or not offered (POST forms).

use super::{
    error::{self, Refusal},
    path::Target,
};
use forebay_core::{
    Error, ErrorKind, limits,
    name::{shorten, validate_bucket},
};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode,
    header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, EXPIRES, TRANSFER_ENCODING},
};

/// Query parameters that operations here know, in addition to `response-*` and `X-Amz-*`.
pub(super) const QUERY: &[&str] = &[
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
pub(super) const HEADERS: &[&str] = &[
    "x-amz-acl",
    // The C++ SDK sends the protocol's only version in each request.
    "x-amz-api-version",
    "x-amz-bucket-object-lock-enabled",
    "x-amz-checksum-algorithm",
    "x-amz-checksum-crc32",
    "x-amz-checksum-crc32c",
    "x-amz-checksum-crc64nvme",
    "x-amz-checksum-md5",
    "x-amz-checksum-mode",
    "x-amz-checksum-sha1",
    "x-amz-checksum-sha256",
    "x-amz-checksum-sha512",
    "x-amz-checksum-type",
    "x-amz-checksum-xxhash128",
    "x-amz-checksum-xxhash3",
    "x-amz-checksum-xxhash64",
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
    // RestoreStatus, for objects in an archive tier: no object here is in one.
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

/// Headers of DeleteObjects that an S3 origin is told with each of the removals (`forward::remove`).
/// For other origins, `write.rs` refuses them.
pub(super) const OF_REMOVALS: &[&str] = &[
    "x-amz-bypass-governance-retention",
    "x-amz-expected-bucket-owner",
    "x-amz-mfa",
];

/// Headers whose values may be shown. Some of the others hold secrets: encryption keys, tokens.
const SHOWN: &[&str] = &["x-amz-acl", "x-amz-tagging-directive"];

/// Room for a thousand keys to remove, each of the longest and with every byte escaped, or for ten
/// thousand parts.
pub const XML_MAX_BYTES: usize = 8 << 20;

/// The longest validity of a presigned request: S3's limit of a week.
const EXPIRES_MAX_SECS: u64 = 604_800;

/// Refuses invalid names, with the codes that S3 has for them.
///
/// # Errors
/// `Invalid`.
pub fn check_name(target: &Target) -> Result<(), Refusal> {
    if target.bucket.is_empty() && target.key.is_empty() {
        return Ok(());
    }
    validate_bucket(&target.bucket).map_err(|e| Refusal::bad("InvalidBucketName", e))?;
    if target.key.len() > limits::OBJECT_KEY_MAX_BYTES {
        let (len, max) = (target.key.len(), limits::OBJECT_KEY_MAX_BYTES);
        let e = Error::invalid(format!("{:?} is {len} bytes long", shorten(&target.key)));
        return Err(Refusal::bad(
            "KeyTooLongError",
            e.hint(format!("a key has at most {max} bytes of UTF-8")),
        ));
    }
    Ok(())
}

/// Refuses documents (all bodies that are not objects) that are too large or of unknown length,
/// because they are held in memory.
///
/// # Errors
/// `MissingContentLength`, or `TooLarge`.
pub fn check_document(
    method: &Method,
    target: &Target,
    headers: &HeaderMap,
) -> Result<(), Refusal> {
    if !(*method == Method::POST || *method == Method::PUT && target.key.is_empty()) {
        return Ok(());
    }
    if headers.contains_key(TRANSFER_ENCODING) {
        let e = Error::invalid("the length of the body is not known").hint("send Content-Length");
        return Err(Refusal::with_status(
            "MissingContentLength",
            StatusCode::LENGTH_REQUIRED,
            e,
        ));
    }
    let length = headers
        .get(CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.parse::<u64>().ok())
        .unwrap_or(0);
    if length > XML_MAX_BYTES as u64 {
        let e = Error::new(
            ErrorKind::TooLarge,
            format!("{length} bytes in the body of this operation"),
        );
        return Err(Refusal::bad(
            "MaxMessageLengthExceeded",
            e.hint(format!("{XML_MAX_BYTES} at most")),
        ));
    }
    Ok(())
}

/// Whether a parameter that names a part of a bucket or an object goes with the method. If it does
/// not, the S3 library ignores it, and would write or remove the whole bucket or object.
fn is_in_its_place(name: &str, method: &Method, object: bool) -> bool {
    match name {
        "attributes" => *method == Method::GET && object,
        "delete" => *method == Method::POST && !object,
        "location" => *method == Method::GET && !object,
        "uploads" => match object {
            true => *method == Method::POST,
            false => *method == Method::GET,
        },
        _ => true,
    }
}

/// What a request asks for that this node does not do itself, as the refusal to send if the origin
/// cannot do it either. It names the header or the parameter.
pub fn foreign(method: &Method, target: &Target, headers: &HeaderMap) -> Option<Refusal> {
    let object = !target.key.is_empty();
    let removes =
        *method == Method::POST && !object && target.query.iter().any(|(n, _)| n == "delete");
    for (name, value) in &target.query {
        let known = (QUERY.contains(&name.as_str()) && is_in_its_place(name, method, object))
            || name.starts_with("response-")
            // Those that are no part of the signature are headers by now (`unhoist`).
            || name.get(..6).is_some_and(|p| p.eq_ignore_ascii_case("x-amz-"))
            // The parts of an upload. Reading the first part of an object is offered if it is the
            // whole object (see `read`).
            || (name == "uploadId"
                && object
                && (*method != Method::PUT || target.query("partNumber").is_some()))
            || (name == "partNumber" && object && (target.query("uploadId").is_some() || (value == "1" && super::read::is_read(method, target))))
            // Objects have one version, which S3 calls null.
            || (name == "versionId" && value == "null");
        if !known {
            return Some(not_offered(format!(
                "the query parameter {:?}",
                shorten(name)
            )));
        }
    }
    for (name, value) in headers {
        let name = name.as_str();
        if !name.starts_with("x-amz-") || name.starts_with("x-amz-meta-") {
            continue;
        }
        if removes && OF_REMOVALS.contains(&name) {
            continue;
        }
        let value = value.as_bytes();
        let ok = HEADERS.contains(&name)
            && match name {
                "x-amz-acl" => is_private(value),
                // rclone says so with each bucket that it makes.
                "x-amz-bucket-object-lock-enabled" => value.eq_ignore_ascii_case(b"false"),
                "x-amz-tagging-directive" => value == b"COPY",
                _ => true,
            };
        if !ok {
            return Some(not_offered(match SHOWN.contains(&name) {
                true => format!(
                    "the header {name}: {}",
                    shorten(&String::from_utf8_lossy(value))
                ),
                false => format!("the header {name}"),
            }));
        }
    }
    // An empty condition counts as none.
    if *method == Method::DELETE && error::condition(headers, &["If-Match"]).is_some() {
        return Some(not_offered("a conditional DELETE".into()));
    }
    if matches!(*method, Method::PUT | Method::POST) && headers.contains_key(EXPIRES) {
        return Some(not_offered("the header Expires".into()));
    }
    None
}

/// Whether a query parameter belongs to a presigned request itself, or says how its body was to be
/// sent, of which nothing can be known when it is presigned.
fn is_of_presigning(name: &str) -> bool {
    matches!(
        name,
        "x-amz-algorithm"
            | "x-amz-content-sha256"
            | "x-amz-credential"
            | "x-amz-date"
            | "x-amz-expires"
            | "x-amz-security-token"
            | "x-amz-signature"
            | "x-amz-signedheaders"
    ) || name.starts_with("x-amz-checksum-")
        || name.starts_with("x-amz-sdk-")
}

/// Makes headers of the `x-amz-*` query parameters that are headers by nature. SDKs move headers
/// there when they presign a request. From here on they mean what the headers mean.
///
/// # Errors
/// `Invalid` if a value cannot be a header's, or differs from the header that was sent too.
pub fn unhoist(target: &Target, headers: &mut HeaderMap) -> Result<(), Refusal> {
    for (name, value) in &target.query {
        if !name
            .get(..6)
            .is_some_and(|p| p.eq_ignore_ascii_case("x-amz-"))
        {
            continue;
        }
        let name = name.to_ascii_lowercase();
        if is_of_presigning(&name) {
            continue;
        }
        let invalid = |what: &str| {
            let e = Error::invalid(format!("the query parameter {:?} {what}", shorten(&name)));
            e.hint("send it as a header")
        };
        let (Ok(header), Ok(value)) = (
            HeaderName::from_bytes(name.as_bytes()),
            HeaderValue::from_bytes(value.as_bytes()),
        ) else {
            return Err(invalid("cannot be a header").into());
        };
        match headers.get(&header) {
            None => drop(headers.insert(header, value)),
            Some(same) if *same == value => {}
            Some(_) => return Err(invalid("is there twice, with different values").into()),
        }
    }
    Ok(())
}

/// The ACLs of objects that nobody else may access.
pub(super) fn is_private(acl: &[u8]) -> bool {
    acl == b"private" || acl == b"bucket-owner-full-control"
}

/// Refuses uploads by POST form: they carry the object's name and the sender's permissions inside.
///
/// # Errors
/// `Unsupported`.
pub fn check_form(method: &Method, headers: &HeaderMap) -> Result<(), Refusal> {
    let is_form = |v: &http::HeaderValue| {
        v.as_bytes()
            .get(..19)
            .is_some_and(|p| p.eq_ignore_ascii_case(b"multipart/form-data"))
    };
    if *method == Method::POST && headers.get(CONTENT_TYPE).is_some_and(is_form) {
        return Err(not_offered("an upload by POST form".into()));
    }
    Ok(())
}

pub(super) fn not_offered(what: String) -> Refusal {
    Error::unsupported(format!(
        "{what} asks for something that is not offered here"
    ))
    .hint("leave it out, or send the request to the origin")
    .into()
}

/// Checks what the S3 library leaves open about signatures. The library checks that they are right.
///
/// # Errors
/// `PermissionDenied` for unsigned `x-amz-*` headers; `Invalid`, or `Unsupported` where presigned,
/// for Signature Version 2.
pub fn check_signature(target: &Target, headers: &HeaderMap) -> Result<(), Refusal> {
    let version_2 = target.query("Signature").is_some() || target.query("AWSAccessKeyId").is_some();
    let authorization = headers
        .get(AUTHORIZATION)
        .map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned());
    if authorization
        .as_deref()
        .is_some_and(|a| a.trim_start().starts_with("AWS "))
    {
        return Err(Error::invalid("Signature Version 2 is not accepted")
            .hint("use AWS4-HMAC-SHA256, which every current SDK does by itself")
            .into());
    }
    if version_2 {
        return Err(Error::unsupported("Signature Version 2 is not accepted")
            .hint(
                "sign with Version 4 (AWS4-HMAC-SHA256); boto3 presigns with it when its client \
                 is made with config=botocore.config.Config(signature_version=\"s3v4\")",
            )
            .into());
    }
    let (signed, presigned) = if let Some(names) = target.query("X-Amz-SignedHeaders") {
        (names.to_owned(), true)
    } else if let Some(authorization) = &authorization {
        let Some((_, rest)) = authorization.split_once("SignedHeaders=") else {
            return Ok(());
        };
        (
            rest.split([',', ' ']).next().unwrap_or_default().to_owned(),
            false,
        )
    } else {
        return Ok(());
    };
    let signed: Vec<String> = signed.split(';').map(str::to_ascii_lowercase).collect();
    let covered = |name: &str| signed.iter().any(|s| s == name);
    if !covered("host") {
        let e = Error::permission_denied("the signature does not cover the header host");
        return Err(e.into());
    }
    for name in headers
        .keys()
        .map(|n| n.as_str())
        .filter(|n| n.starts_with("x-amz-"))
    {
        // For a presigned request, the body's hash is checked against the body itself, so it cannot
        // be forged.
        if !(covered(name) || presigned && name == "x-amz-content-sha256") {
            return Err(Error::new(
                ErrorKind::PermissionDenied,
                format!("the header {name} is not covered by the signature"),
            )
            .hint("sign every x-amz-* header that is sent")
            .into());
        }
    }
    Ok(())
}

/// Checks what the S3 library does not check in a signature's scope: the service that it is for,
/// and how long it is valid.
///
/// # Errors
/// `Invalid`.
pub fn check_scope(target: &Target, headers: &HeaderMap) -> Result<(), Refusal> {
    let malformed = "AuthorizationQueryParametersError";
    if let Some(expires) = target.query("X-Amz-Expires") {
        let week = |n: &u64| (1..=EXPIRES_MAX_SECS).contains(n);
        if target
            .query
            .iter()
            .filter(|(n, _)| n == "X-Amz-Expires")
            .count()
            > 1
            || expires.parse::<u64>().ok().filter(week).is_none()
        {
            let e = Error::invalid("X-Amz-Expires is not a number of seconds up to a week");
            return Err(Refusal::bad(
                malformed,
                e.hint(format!("1 to {EXPIRES_MAX_SECS}")),
            ));
        }
    }
    let (code, credential) = match (
        target.query("X-Amz-Credential"),
        headers.get(AUTHORIZATION).and_then(|v| v.to_str().ok()),
    ) {
        (Some(credential), _) => (malformed, credential.to_owned()),
        (None, Some(text)) => {
            let Some((_, rest)) = text.split_once("Credential=") else {
                return Ok(());
            };
            (
                "AuthorizationHeaderMalformed",
                rest.split([',', ' ']).next().unwrap_or_default().to_owned(),
            )
        }
        (None, None) => return Ok(()),
    };
    match credential.rsplit('/').nth(1) {
        Some("s3") | None => Ok(()),
        Some(other) => {
            let e = Error::invalid(format!(
                "the signature is for the service {:?}",
                shorten(other)
            ));
            Err(Refusal::bad(code, e.hint("sign for the service s3")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(n, v)| (n.parse::<http::HeaderName>().unwrap(), v.parse().unwrap()))
            .collect()
    }

    fn target(uri: &str) -> Target {
        Target::of(&uri.parse().unwrap(), &HeaderMap::new(), &[], false).unwrap()
    }

    #[test]
    fn what_is_not_offered_is_refused() {
        let check = |method: Method, uri: &str, pairs: &[(&'static str, &str)]| match foreign(
            &method,
            &target(uri),
            &headers(pairs),
        ) {
            Some(refusal) => Err(refusal.error().kind()),
            None => Ok(()),
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
            // The S3 library would write the object.
            (Method::PUT, "/b/k?uploadId=1"),
            (Method::PUT, "/b/k?uploads"),
            (Method::PUT, "/b/k?attributes"),
            // And these would remove it, or the bucket.
            (Method::DELETE, "/b/k?uploads"),
            (Method::DELETE, "/b/k?delete"),
            (Method::DELETE, "/b?location"),
            (Method::DELETE, "/b?delete"),
        ] {
            assert_eq!(
                check(method, uri, &[]),
                Err(ErrorKind::Unsupported),
                "{uri}"
            );
        }
        for (method, uri) in [
            (Method::GET, "/b/k?attributes"),
            (Method::GET, "/b?location"),
            (Method::GET, "/b?uploads"),
            (Method::POST, "/b/k?uploads"),
            (Method::POST, "/b?delete"),
        ] {
            assert_eq!(check(method, uri, &[]), Ok(()), "{uri}");
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
            assert_eq!(
                check(Method::PUT, "/b/k", &[header]),
                Err(ErrorKind::Unsupported),
                "{header:?}"
            );
        }
        assert!(
            check(
                Method::PUT,
                "/b/k?partNumber=1&uploadId=x",
                &[("x-amz-meta-a", "b"), ("x-amz-acl", "private")]
            )
            .is_ok()
        );
        assert!(check(Method::GET, "/b/k?x-id=GetObject&response-content-type=text%2Fplain&X-Amz-Signature=0&versionId=null", &[]).is_ok());
        let lock = "x-amz-bucket-object-lock-enabled";
        assert!(check(Method::PUT, "/b", &[(lock, "false")]).is_ok());
        assert!(check(Method::PUT, "/b", &[(lock, "true")]).is_err());
        let bypass = [("x-amz-bypass-governance-retention", "true")];
        assert!(check(Method::POST, "/b?delete", &bypass).is_ok());
        assert!(check(Method::DELETE, "/b/k", &bypass).is_err());
        assert!(check(Method::PUT, "/b/k", &[("expires", "0")]).is_err());
        assert!(check(Method::DELETE, "/b/k", &[("if-match", "\"a\"")]).is_err());
        assert!(check(Method::DELETE, "/b/k", &[("if-match", "")]).is_ok());
        assert!(
            check_form(
                &Method::POST,
                &headers(&[("content-type", "multipart/form-data; boundary=x")])
            )
            .is_err()
        );
    }

    #[test]
    fn names_that_cannot_be_have_codes_of_their_own() {
        let code = |bucket: &str, key: &str| {
            let target = Target {
                bucket: bucket.into(),
                key: key.into(),
                ..Target::default()
            };
            check_name(&target).err().map(|r| r.code())
        };
        assert_eq!(code("http:", "k"), Some("InvalidBucketName"));
        assert_eq!(code("", "k"), Some("InvalidBucketName"));
        assert_eq!(code("bucket", &"k".repeat(1025)), Some("KeyTooLongError"));
        assert_eq!(code("bucket", &"k".repeat(1024)), None);
        assert_eq!(code("", ""), None, "the service itself");
    }

    #[test]
    fn documents_have_a_length_and_not_a_large_one() {
        let code = |method: Method, uri: &str, header: (&'static str, &str)| {
            check_document(&method, &target(uri), &headers(&[header]))
                .err()
                .map(|r| r.code())
        };
        let (most, more) = (XML_MAX_BYTES.to_string(), (XML_MAX_BYTES + 1).to_string());
        assert_eq!(
            code(Method::POST, "/b?delete", ("content-length", &most)),
            None
        );
        assert_eq!(
            code(Method::POST, "/b?delete", ("content-length", &more)),
            Some("MaxMessageLengthExceeded")
        );
        assert_eq!(
            code(
                Method::POST,
                "/b/k?uploadId=1",
                ("transfer-encoding", "chunked")
            ),
            Some("MissingContentLength")
        );
        assert_eq!(
            code(Method::PUT, "/b", ("content-length", &more)),
            Some("MaxMessageLengthExceeded")
        );
        assert_eq!(
            code(Method::PUT, "/b/k", ("content-length", &more)),
            None,
            "an object"
        );
    }

    #[test]
    fn a_header_that_was_moved_into_the_query_is_still_a_header() {
        let asked = |uri: &str, given: &[(&'static str, &str)]| {
            let (target, mut headers) = (target(uri), headers(given));
            unhoist(&target, &mut headers).map_err(|r| r.code())?;
            let refused = foreign(&Method::PUT, &target, &headers);
            Ok::<_, &str>((refused.map(|r| r.error().describe()), headers))
        };
        for (parameter, refused) in [
            ("x-amz-server-side-encryption=AES256", true),
            ("X-Amz-Server-Side-Encryption=AES256", true),
            ("x-amz-acl=public-read", true),
            ("x-amz-acl=private", false),
            ("x-amz-tagging=a%3Db", true),
            ("x-amz-website-redirect-location=%2Fx", true),
            ("x-amz-storage-class=STANDARD_IA", false),
            ("x-amz-meta-a=b", false),
            ("x-amz-checksum-crc32=AAAAAA%3D%3D", false),
            ("x-amz-sdk-checksum-algorithm=CRC32", false),
            ("X-Amz-Content-Sha256=UNSIGNED-PAYLOAD", false),
            ("X-Amz-Security-Token=t&X-Amz-SignedHeaders=host", false),
            (
                "X-Amz-Algorithm=a&X-Amz-Date=d&X-Amz-Expires=1&X-Amz-Credential=c",
                false,
            ),
            ("X-Amz-Signature=s&x-id=PutObject", false),
        ] {
            let (why, _) = asked(&format!("/b/k?{parameter}"), &[]).unwrap();
            assert_eq!(why.is_some(), refused, "{parameter}: {why:?}");
        }
        let (_, passed) = asked("/b/k?x-amz-meta-a=b%20c&X-Amz-Date=d", &[]).unwrap();
        assert_eq!(
            (passed.len(), &passed["x-amz-meta-a"]),
            (1, &"b c".parse().unwrap())
        );
        let same = [("x-amz-acl", "private")];
        assert!(asked("/b/k?x-amz-acl=private", &same).is_ok());
        let other = asked("/b/k?x-amz-acl=bucket-owner-full-control", &same);
        assert_eq!(other.unwrap_err(), "InvalidArgument");
        assert!(asked("/b/k?x-amz-meta-a=b%0Ac", &[]).is_err());
    }

    #[test]
    fn an_error_shows_no_value_that_may_be_secret() {
        let e = foreign(
            &Method::GET,
            &target("/b/k"),
            &headers(&[("x-amz-server-side-encryption-customer-key", "SECRET")]),
        );
        let text = e.unwrap().error().describe();
        assert!(
            text.contains("x-amz-server-side-encryption-customer-key") && !text.contains("SECRET"),
            "{text}"
        );
        let text = Target::of(
            &"/b/k?X-Amz-Signature=SECRET%ff".parse().unwrap(),
            &HeaderMap::new(),
            &[],
            false,
        )
        .unwrap_err()
        .describe();
        assert!(
            text.contains("X-Amz-Signature") && !text.contains("SECRET"),
            "{text}"
        );
    }

    #[test]
    fn a_signature_is_for_s3_and_for_a_week_at_most() {
        let code = |uri: &str, authorization: Option<&str>| {
            let pairs: Vec<_> = authorization
                .map(|a| ("authorization", a))
                .into_iter()
                .collect();
            check_scope(&target(uri), &headers(&pairs))
                .err()
                .map(|r| r.code())
        };
        let scope = |service: &str| {
            format!(
                "AWS4-HMAC-SHA256 Credential=A/20260101/r/{service}/aws4_request, \
                 SignedHeaders=host, Signature=0"
            )
        };
        assert_eq!(code("/b/k", Some(&scope("s3"))), None);
        assert_eq!(
            code("/b/k", Some(&scope("sts"))),
            Some("AuthorizationHeaderMalformed")
        );
        let presigned = |expires: &str| {
            code(
                &format!(
                    "/b/k?X-Amz-Credential=A%2F2%2Fr%2Fs3%2Faws4_request&X-Amz-Expires={expires}"
                ),
                None,
            )
        };
        assert_eq!((presigned("1"), presigned("604800")), (None, None));
        for bad in ["0", "604801", "-1", "x", "", "60&X-Amz-Expires=6000"] {
            assert_eq!(
                presigned(bad),
                Some("AuthorizationQueryParametersError"),
                "{bad}"
            );
        }
    }

    #[test]
    fn headers_left_out_of_the_signature_are_refused() {
        let auth = "AWS4-HMAC-SHA256 Credential=A/20260101/r/s3/aws4_request, \
            SignedHeaders=host;x-amz-date, Signature=0";
        let check = |uri: &str, pairs: &[(&'static str, &str)]| {
            check_signature(&target(uri), &headers(pairs)).map_err(|r| r.error().kind())
        };
        assert!(check("/b/k", &[("authorization", auth), ("x-amz-date", "d")]).is_ok());
        assert_eq!(
            check(
                "/b/k",
                &[("authorization", auth), ("x-amz-copy-source", "b/x")]
            ),
            Err(ErrorKind::PermissionDenied)
        );
        assert!(
            check(
                "/b/k?X-Amz-SignedHeaders=host",
                &[("x-amz-content-sha256", "UNSIGNED-PAYLOAD")]
            )
            .is_ok()
        );
        assert_eq!(
            check("/b/k?X-Amz-SignedHeaders=host", &[("x-amz-acl", "private")]),
            Err(ErrorKind::PermissionDenied)
        );
        assert_eq!(
            check(
                "/b/k",
                &[(
                    "authorization",
                    "AWS4-HMAC-SHA256 Credential=A, SignedHeaders=x-amz-date, Signature=0"
                )]
            ),
            Err(ErrorKind::PermissionDenied)
        );
        assert_eq!(
            check("/b/k", &[("authorization", "AWS AK:sig")]),
            Err(ErrorKind::Invalid)
        );
        assert_eq!(
            check("/b/k?AWSAccessKeyId=A&Signature=s&Expires=9", &[]),
            Err(ErrorKind::Unsupported)
        );
        assert!(
            check("/b/k", &[]).is_ok(),
            "without a signature there is nothing to cover; anonymous requests are refused \
             elsewhere"
        );
    }
}
