//! Converts between HTTP headers and what the rest of the program knows: object metadata,
//! attributes, ranges.

use super::past_the_end;
use crate::failure::Site;
use forebay_core::{Attributes, Error, ObjectMeta, Result};
use http::{
    HeaderMap, HeaderName, HeaderValue, StatusCode,
    header::{
        CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH,
        CONTENT_RANGE, CONTENT_TYPE, ETAG, LAST_MODIFIED,
    },
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};
use std::ops::Range;

/// The characters that SigV4 leaves as they are: `A-Z a-z 0-9 - . _ ~`, and `/` in paths.
const QUERY: AsciiSet = NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');
const PATH: AsciiSet = QUERY.remove(b'/');

pub(crate) fn encode_path(key: &str) -> PercentEncode<'_> {
    utf8_percent_encode(key, &PATH)
}

pub(crate) fn encode_query(value: &str) -> PercentEncode<'_> {
    utf8_percent_encode(value, &QUERY)
}

/// Services use different names for the same things.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Amazon,
    Google,
    Azure,
    /// A plain web server, which has no user metadata.
    Web,
}

impl Dialect {
    fn user_prefix(self) -> &'static str {
        match self {
            Dialect::Amazon => "x-amz-meta-",
            Dialect::Google => "x-goog-meta-",
            Dialect::Azure => "x-ms-meta-",
            Dialect::Web => "x-meta-",
        }
    }

    fn storage_class(self) -> HeaderName {
        HeaderName::from_static(match self {
            Dialect::Amazon => "x-amz-storage-class",
            Dialect::Google => "x-goog-storage-class",
            Dialect::Azure => "x-ms-access-tier",
            Dialect::Web => "x-storage-class",
        })
    }
}

/// A header's value: only visible ASCII, because nothing else can be signed and sent safely.
pub(crate) fn value(name: &str, text: &str) -> Result<HeaderValue> {
    if !text.bytes().all(|b| (0x20..0x7f).contains(&b)) {
        return Err(Error::invalid(format!(
            "the value of {name} contains characters that a header cannot carry"
        ))
        .hint("encode it: only visible ASCII characters can be sent"));
    }
    HeaderValue::from_str(text)
        .map_err(|_| Error::invalid(format!("the value of {name} cannot be sent as a header")))
}

pub(crate) fn range(range: &Range<u64>) -> HeaderValue {
    let text = if range.end == u64::MAX {
        format!("bytes={}-", range.start)
    } else {
        format!("bytes={}-{}", range.start, range.end - 1)
    };
    HeaderValue::from_str(&text).expect("digits and '-' are a valid header")
}

/// The headers that write attributes.
pub(crate) fn attributes(dialect: Dialect, a: &Attributes) -> Result<HeaderMap> {
    let mut h = HeaderMap::new();
    let standard = [
        (CONTENT_TYPE, &a.content_type),
        (CONTENT_ENCODING, &a.content_encoding),
        (CONTENT_LANGUAGE, &a.content_language),
        (CONTENT_DISPOSITION, &a.content_disposition),
        (CACHE_CONTROL, &a.cache_control),
        (dialect.storage_class(), &a.storage_class),
    ];
    for (name, text) in standard {
        if let Some(text) = text {
            let v = value(name.as_str(), text)?;
            let name = match dialect {
                Dialect::Azure if !name.as_str().starts_with("x-ms-") => {
                    HeaderName::from_bytes(format!("x-ms-blob-{name}").as_bytes())
                        .map_err(|e| Error::internal(format!("a header name: {e}")))?
                }
                _ => name,
            };
            h.insert(name, v);
        }
    }
    for (name, text) in &a.user {
        let header = HeaderName::from_bytes(format!("{}{name}", dialect.user_prefix()).as_bytes())
            .map_err(|_| {
                Error::invalid(format!("{name:?} is not a valid name for user metadata"))
                    .hint("use letters, digits and '-'")
            })?;
        h.insert(header, value(name, text)?);
    }
    Ok(h)
}

/// The ETag as the rest of the program sees it.
pub(crate) fn etag(dialect: Dialect, h: &HeaderMap) -> Option<String> {
    if dialect == Dialect::Google {
        return text(h, super::google::GENERATION).map(|g| format!("\"{g}\""));
    }
    h.get(ETAG).and_then(|v| v.to_str().ok()).map(str::to_owned)
}

fn text(h: &HeaderMap, name: impl http::header::AsHeaderName) -> Option<String> {
    h.get(name)
        .map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned())
}

/// The metadata of an answer to HEAD or to a GET of the whole object.
pub(crate) fn meta(dialect: Dialect, site: Site<'_>, h: &HeaderMap) -> Result<ObjectMeta> {
    let size = h
        .get(CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.trim().parse().ok())
        .ok_or_else(|| {
            Error::unsupported(format!(
                "{} {:?} at {}: the answer does not say its \
            length",
                site.operation, site.key, site.origin
            ))
            .hint(
                "Forebay needs objects of a known size: serve them without on-the-fly \
                compression or chunking",
            )
        })?;
    Ok(with_size(dialect, h, size))
}

fn with_size(dialect: Dialect, h: &HeaderMap, size: u64) -> ObjectMeta {
    let last_modified_ms = text(h, LAST_MODIFIED)
        .and_then(|t| chrono::DateTime::parse_from_rfc2822(&t).ok())
        .map(|t| t.timestamp_millis())
        .unwrap_or(0);
    let mut user: Vec<_> = h
        .iter()
        .filter_map(|(n, v)| {
            Some((
                n.as_str().strip_prefix(dialect.user_prefix())?.to_owned(),
                String::from_utf8_lossy(v.as_bytes()).into_owned(),
            ))
        })
        .collect();
    user.sort();
    ObjectMeta {
        size,
        etag: etag(dialect, h),
        last_modified_ms,
        attributes: Attributes {
            content_type: text(h, CONTENT_TYPE),
            content_encoding: text(h, CONTENT_ENCODING).filter(|e| e != "identity"),
            content_language: text(h, CONTENT_LANGUAGE),
            content_disposition: text(h, CONTENT_DISPOSITION),
            cache_control: text(h, CACHE_CONTROL),
            // Azure names a tier for every blob, whether or not it was asked for.
            storage_class: text(h, dialect.storage_class())
                .filter(|c| c != "STANDARD" && dialect != Dialect::Azure),
            user,
        },
    }
}

/// The object's metadata, and the range of bytes in an answer to GET.
pub(crate) fn meta_and_range(
    dialect: Dialect,
    site: Site<'_>,
    status: StatusCode,
    h: &HeaderMap,
) -> Result<(ObjectMeta, Range<u64>)> {
    if status != StatusCode::PARTIAL_CONTENT {
        let meta = meta(dialect, site, h)?;
        let whole = 0..meta.size;
        return Ok((meta, whole));
    }
    let parsed = h
        .get(CONTENT_RANGE)
        .and_then(|v| v.to_str().ok())
        .and_then(parse_content_range);
    let (range, size) = parsed.ok_or_else(|| {
        Error::corrupt(format!(
            "get {:?} at {}: a partial answer without a valid Content-Range",
            site.key, site.origin
        ))
    })?;
    // Azurite's equivalent of 416.
    if range.start >= size {
        return Err(past_the_end(site.key, size, range.start));
    }
    Ok((with_size(dialect, h, size), range))
}

/// `bytes 0-9/100`. A range entirely past the end is returned as an empty one.
pub(crate) fn parse_content_range(value: &str) -> Option<(Range<u64>, u64)> {
    let (range, size) = value.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, size): (u64, u64) = (first.parse().ok()?, size.parse().ok()?);
    if first >= size {
        return Some((first..first, size));
    }
    let last: u64 = last.parse().ok()?;
    (first <= last && last < size).then(|| (first..last + 1, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges() {
        assert_eq!(parse_content_range("bytes 0-9/100"), Some((0..10, 100)));
        assert_eq!(
            parse_content_range("bytes 100-99/100"),
            Some((100..100, 100))
        );
        assert_eq!(parse_content_range("bytes 0--1/0"), Some((0..0, 0)));
        for bad in [
            "bytes 0-9/*",
            "bytes 9-0/100",
            "bytes 0-100/100",
            "items 0-1/2",
            "bytes 0-18446744073709551615/1",
        ] {
            assert_eq!(parse_content_range(bad), None, "{bad}");
        }
        assert_eq!(range(&(3..5)), "bytes=3-4");
        assert_eq!(range(&(3..u64::MAX)), "bytes=3-");
    }

    #[test]
    fn attributes_go_there_and_back() {
        let a = Attributes {
            content_type: Some("text/plain".into()),
            cache_control: Some("no-store".into()),
            user: vec![("a".into(), "1".into()), ("b-c".into(), "x y".into())],
            ..Default::default()
        };
        for dialect in [Dialect::Amazon, Dialect::Google] {
            let mut h = attributes(dialect, &a).unwrap();
            h.insert(CONTENT_LENGTH, 3.into());
            let site = Site {
                origin: "o",
                operation: "head",
                key: "k",
            };
            assert_eq!(meta(dialect, site, &h).unwrap().attributes, a);
        }
        let bad = |user: (&str, &str)| {
            attributes(
                Dialect::Amazon,
                &Attributes {
                    user: vec![(user.0.into(), user.1.into())],
                    ..Default::default()
                },
            )
            .is_err()
        };
        assert!(bad(("a b", "x")) && bad(("a", "ü")) && bad(("a", "x\ny")));
    }
}
