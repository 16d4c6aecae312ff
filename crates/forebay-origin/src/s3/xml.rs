//! The documents of the S3 protocol that this origin reads and writes: listings, uploads, copies.
//!
//! Listings ask for `encoding-type=url`, because a key may hold characters that XML cannot. Not every server obeys: the answer's own
//! `EncodingType` decides whether names are decoded.

use crate::{ListEntry, ListPage, UploadedPart, failure::ErrorDocument};
use forebay_core::{Error, Result};
use quick_xml::{Reader, events::Event};

/// What [`walk`] meets, with the path of the element: `ListBucketResult/Contents/Key`.
enum Meet<'a> {
    Open(&'a str),
    /// An element that holds no other, when it ends, with its text.
    Text(&'a str, String),
}

/// Goes through a document once, in order. Namespaces are ignored; text is kept as it is, spaces included.
fn walk(text: &str, mut meet: impl FnMut(Meet<'_>)) -> Result<()> {
    let bad = |e: String| Error::corrupt(format!("the origin's answer is not XML: {e}"));
    let mut reader = Reader::from_str(text);
    let mut path = String::new();
    let mut current = String::new();
    let mut leaf = false;
    loop {
        match reader.read_event().map_err(|e| bad(e.to_string()))? {
            Event::Start(e) => {
                if !path.is_empty() {
                    path.push('/');
                }
                path.push_str(&String::from_utf8_lossy(e.local_name().as_ref()));
                current.clear();
                leaf = true;
                meet(Meet::Open(&path));
            }
            Event::Empty(e) => {
                let inner = format!("{path}/{}", String::from_utf8_lossy(e.local_name().as_ref()));
                meet(Meet::Open(&inner));
                meet(Meet::Text(&inner, String::new()));
                leaf = false;
            }
            Event::Text(e) => current.push_str(&e.decode().map_err(|e| bad(e.to_string()))?),
            Event::CData(e) => current.push_str(&e.decode().map_err(|e| bad(e.to_string()))?),
            Event::GeneralRef(e) => {
                let name = e.decode().map_err(|e| bad(e.to_string()))?;
                let resolved = quick_xml::escape::unescape(&format!("&{name};")).map(|s| s.into_owned()).map_err(|e| bad(e.to_string()))?;
                current.push_str(&resolved);
            }
            Event::End(_) => {
                if leaf {
                    meet(Meet::Text(&path, std::mem::take(&mut current)));
                }
                leaf = false;
                current.clear();
                path.truncate(path.rfind('/').unwrap_or(0));
            }
            Event::Eof => return Ok(()),
            _ => {}
        }
    }
}

/// `application/x-www-form-urlencoded`, as `encoding-type=url` writes names: `+` is a space.
fn url_decode(text: &str) -> Result<String> {
    let spaced = text.replace('+', " ");
    percent_encoding::percent_decode_str(&spaced)
        .decode_utf8()
        .map(|s| s.into_owned())
        .map_err(|_| Error::corrupt(format!("the origin lists a name that is not UTF-8: {text:?}")))
}

/// A `ListBucketResult` of ListObjectsV2.
pub(crate) fn parse_list(text: &str) -> Result<ListPage> {
    #[derive(Default)]
    struct Raw {
        key: String,
        size: String,
        etag: String,
        modified: String,
    }
    let mut entries: Vec<Raw> = Vec::new();
    let mut prefixes: Vec<String> = Vec::new();
    let (mut token, mut truncated, mut encoded, mut seen) = (None, false, false, false);
    walk(text, |met| match met {
        Meet::Open("ListBucketResult") => seen = true,
        Meet::Open("ListBucketResult/Contents") => entries.push(Raw::default()),
        Meet::Open(_) => {}
        Meet::Text(path, value) => match (path.strip_prefix("ListBucketResult/").unwrap_or_default(), entries.last_mut()) {
            ("Contents/Key", Some(entry)) => entry.key = value,
            ("Contents/Size", Some(entry)) => entry.size = value,
            ("Contents/ETag", Some(entry)) => entry.etag = value,
            ("Contents/LastModified", Some(entry)) => entry.modified = value,
            ("CommonPrefixes/Prefix", _) => prefixes.push(value),
            ("NextContinuationToken", _) => token = Some(value),
            ("IsTruncated", _) => truncated = value.trim() == "true",
            ("EncodingType", _) => encoded = value.trim() == "url",
            _ => {}
        },
    })?;
    if !seen {
        return Err(not_expected("a ListBucketResult", text));
    }
    let decode = |s: String| if encoded { url_decode(&s) } else { Ok(s) };
    let mut page = ListPage::default();
    for raw in entries {
        let size =
            raw.size.trim().parse().map_err(|_| Error::corrupt(format!("the origin lists {:?} with the size {:?}", raw.key, raw.size)))?;
        let last_modified_ms = chrono::DateTime::parse_from_rfc3339(raw.modified.trim()).map(|t| t.timestamp_millis()).unwrap_or(0);
        page.entries.push(ListEntry { key: decode(raw.key)?, size, etag: Some(raw.etag).filter(|e| !e.is_empty()), last_modified_ms });
    }
    page.prefixes = prefixes.into_iter().map(decode).collect::<Result<_>>()?;
    if truncated {
        page.next_token = Some(token.ok_or_else(|| Error::corrupt("the origin's listing is truncated but has no continuation token"))?);
    }
    Ok(page)
}

/// The names in a `ListAllMyBucketsResult`.
pub(crate) fn parse_buckets(text: &str) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let mut seen = false;
    walk(text, |met| match met {
        Meet::Open("ListAllMyBucketsResult") => seen = true,
        Meet::Text("ListAllMyBucketsResult/Buckets/Bucket/Name", value) => names.push(value),
        _ => {}
    })?;
    if seen { Ok(names) } else { Err(not_expected("a ListAllMyBucketsResult", text)) }
}

/// The text of one element of an answer such as `InitiateMultipartUploadResult`; an `Error` document in a 200 answer is that error.
pub(crate) fn field(text: &str, root: &str, name: &str) -> Result<Option<String>> {
    let mut found = None;
    let mut seen = false;
    let wanted = format!("{root}/{name}");
    walk(text, |met| match met {
        Meet::Open(path) => seen |= path == root,
        Meet::Text(path, value) if path == wanted => found = Some(value),
        Meet::Text(..) => {}
    })?;
    if seen { Ok(found) } else { Err(not_expected(root, text)) }
}

fn not_expected(what: &str, text: &str) -> Error {
    let doc = ErrorDocument::parse(text);
    if doc.code.is_empty() {
        let start: String = text.chars().take(80).filter(|c| !c.is_control()).collect();
        Error::corrupt(format!("the origin's answer is not {what}: {start:?}")).hint("check that the endpoint is an S3 service")
    } else {
        Error::origin_unavailable(format!("the origin failed late: {} {}", doc.code, doc.message))
    }
}

/// The body of CompleteMultipartUpload.
pub(crate) fn complete_body(parts: &[UploadedPart]) -> String {
    use std::fmt::Write;
    let mut s = String::from("<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
    for p in parts {
        let etag = quick_xml::escape::escape(p.etag.as_str());
        // Writing to a String cannot fail.
        let _ = write!(s, "<Part><PartNumber>{}</PartNumber><ETag>{etag}</ETag></Part>", p.number);
    }
    s.push_str("</CompleteMultipartUpload>");
    s
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_read_exactly() {
        let page = parse_list(
            r#"<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><Prefix/>
            <EncodingType>url</EncodingType><IsTruncated>true</IsTruncated><NextContinuationToken>t/1=</NextContinuationToken>
            <Contents><Key>a+b%2Bc%26d</Key><LastModified>2024-01-02T03:04:05.678Z</LastModified><ETag>&quot;e&quot;</ETag><Size>7</Size></Contents>
            <Contents><Size>0</Size><Key>dir/</Key><ETag>"f"</ETag><LastModified>2024-01-02T03:04:05Z</LastModified></Contents>
            <CommonPrefixes><Prefix>p%20q/</Prefix></CommonPrefixes></ListBucketResult>"#,
        )
        .unwrap();
        let keys: Vec<_> = page.entries.iter().map(|e| (e.key.as_str(), e.size, e.etag.as_deref())).collect();
        assert_eq!(keys, [("a b+c&d", 7, Some("\"e\"")), ("dir/", 0, Some("\"f\""))]);
        assert_eq!(page.entries[0].last_modified_ms, 1_704_164_645_678);
        assert_eq!((page.prefixes, page.next_token.as_deref()), (vec!["p q/".to_owned()], Some("t/1=")));
    }

    #[test]
    fn names_that_are_not_encoded_are_taken_as_they_are() {
        let page =
            parse_list("<ListBucketResult><Contents><Key> a+%41 &lt;&#x26;&amp;amp; </Key><Size>1</Size></Contents></ListBucketResult>")
                .unwrap();
        assert_eq!(page.entries[0].key, " a+%41 <&&amp; ");
        assert!(parse_list("<html><body>hello</body></html>").is_err());
        assert!(parse_list("<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>").is_err());
        assert!(parse_list("<ListBucketResult><Contents><Key>a</Key><Size>x</Size></Contents></ListBucketResult>").is_err());
    }

    #[test]
    fn an_error_in_a_success_is_an_error() {
        let e = field("<Error><Code>InternalError</Code><Message>m</Message></Error>", "CopyObjectResult", "ETag").unwrap_err();
        assert!(e.to_string().contains("InternalError"), "{e}");
        let ok = field("<CopyObjectResult><ETag>\"x\"</ETag></CopyObjectResult>", "CopyObjectResult", "ETag").unwrap();
        assert_eq!(ok.as_deref(), Some("\"x\""));
    }
}
