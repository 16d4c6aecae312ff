//! The documents of the S3 protocol that this origin reads and writes: listings, uploads, copies.
//!
//! Listings ask for `encoding-type=url`, because a key may hold characters that XML cannot
//! represent. Not every server obeys: the answer's own `EncodingType` decides whether names are
//! decoded.

use crate::{
    ListEntry, ListPage, ListedBucket, ListedPart, PartsPage, UploadedPart,
    failure::{self, ErrorDocument},
    walked::Named,
};
use forebay_core::{Error, Result, name::shorten};
use quick_xml::{Reader, events::Event};

/// What [`walk`] finds, with the path of the element: `ListBucketResult/Contents/Key`.
enum Meet<'a> {
    Open(&'a str),
    /// The end of an element without child elements, with its text.
    Text(&'a str, String),
}

/// Documents are at most this deep; the work is proportional to the depth.
const DEPTH_MAX: usize = 32;

/// Walks a document once, in order. Namespaces are ignored; text is kept as it is, including
/// spaces.
fn walk(text: &str, mut meet: impl FnMut(Meet<'_>)) -> Result<()> {
    let bad =
        |e: String| Error::corrupt(format!("the origin's answer is not XML: {}", shorten(&e)));
    let mut reader = Reader::from_str(text);
    let mut path = String::new();
    let mut current = String::new();
    let (mut leaf, mut depth) = (false, 0);
    loop {
        match reader.read_event().map_err(|e| bad(e.to_string()))? {
            Event::Start(e) => {
                depth += 1;
                if depth > DEPTH_MAX {
                    return Err(bad(format!("it has elements more than {DEPTH_MAX} deep")));
                }
                if !path.is_empty() {
                    path.push('/');
                }
                path.push_str(&String::from_utf8_lossy(e.local_name().as_ref()));
                current.clear();
                leaf = true;
                meet(Meet::Open(&path));
            }
            Event::Empty(e) => {
                let inner = format!(
                    "{path}/{}",
                    String::from_utf8_lossy(e.local_name().as_ref())
                );
                meet(Meet::Open(&inner));
                meet(Meet::Text(&inner, String::new()));
                leaf = false;
            }
            Event::Text(e) => current.push_str(&e.decode().map_err(|e| bad(e.to_string()))?),
            Event::CData(e) => current.push_str(&e.decode().map_err(|e| bad(e.to_string()))?),
            Event::GeneralRef(e) => {
                let name = e.decode().map_err(|e| bad(e.to_string()))?;
                let resolved = quick_xml::escape::unescape(&format!("&{name};"))
                    .map(|s| s.into_owned())
                    .map_err(|e| bad(e.to_string()))?;
                current.push_str(&resolved);
            }
            Event::End(_) => {
                depth -= 1;
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

/// The code and the message of an error document, as far as they can be read: it may be cut short,
/// or be a proxy's page.
pub(crate) fn error_document(text: &str) -> ErrorDocument {
    let (mut code, mut message) = (None, None);
    let read = walk(text.trim_start_matches('\u{feff}'), |met| {
        if let Meet::Text(path, value) = met {
            match path.rsplit('/').next() {
                Some("Code") => drop(code.get_or_insert(value)),
                Some("Message") => drop(message.get_or_insert(value)),
                _ => {}
            }
        }
    });
    if let Err(e) = read {
        tracing::debug!(error = %e, "an error document that is not whole");
    }
    ErrorDocument {
        code: code.unwrap_or_default(),
        message: message.unwrap_or_default(),
    }
}

/// Decodes `application/x-www-form-urlencoded`, as `encoding-type=url` writes names: `+` is a
/// space.
fn url_decode(text: &str) -> Result<String> {
    let spaced = text.replace('+', " ");
    percent_encoding::percent_decode_str(&spaced)
        .decode_utf8()
        .map(|s| s.into_owned())
        .map_err(|_| {
            Error::corrupt(format!(
                "the origin lists a name that is not UTF-8: {:?}",
                shorten(text)
            ))
        })
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
        Meet::Text(path, value) => match (
            path.strip_prefix("ListBucketResult/").unwrap_or_default(),
            entries.last_mut(),
        ) {
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
        let size = raw.size.trim().parse();
        let size = size.map_err(|_| {
            Error::corrupt(format!(
                "the origin lists {:?} with the size {:?}",
                shorten(&raw.key),
                shorten(&raw.size)
            ))
        })?;
        let last_modified_ms = chrono::DateTime::parse_from_rfc3339(raw.modified.trim())
            .map(|t| t.timestamp_millis())
            .unwrap_or(0);
        page.entries.push(ListEntry {
            key: decode(raw.key)?,
            size,
            etag: Some(raw.etag).filter(|e| !e.is_empty()),
            last_modified_ms,
        });
    }
    page.prefixes = prefixes.into_iter().map(decode).collect::<Result<_>>()?;
    if truncated {
        page.next_token = Some(token.ok_or_else(|| {
            Error::corrupt("the origin's listing is truncated but has no continuation token")
        })?);
    }
    Ok(page)
}

/// A `ListPartsResult`.
pub(crate) fn parse_parts(text: &str) -> Result<PartsPage> {
    #[derive(Default)]
    struct Raw {
        number: String,
        etag: String,
        size: String,
        modified: String,
    }
    let mut parts: Vec<Raw> = Vec::new();
    let (mut truncated, mut seen) = (false, false);
    walk(text, |met| match met {
        Meet::Open("ListPartsResult") => seen = true,
        Meet::Open("ListPartsResult/Part") => parts.push(Raw::default()),
        Meet::Open(_) => {}
        Meet::Text(path, value) => match (
            path.strip_prefix("ListPartsResult/").unwrap_or_default(),
            parts.last_mut(),
        ) {
            ("Part/PartNumber", Some(part)) => part.number = value,
            ("Part/ETag", Some(part)) => part.etag = value,
            ("Part/Size", Some(part)) => part.size = value,
            ("Part/LastModified", Some(part)) => part.modified = value,
            ("IsTruncated", _) => truncated = value.trim() == "true",
            _ => {}
        },
    })?;
    if !seen {
        return Err(not_expected("a ListPartsResult", text));
    }
    let mut page = PartsPage {
        parts: Vec::with_capacity(parts.len()),
        is_truncated: truncated,
    };
    for raw in parts {
        let (number, size) = (raw.number.trim().parse(), raw.size.trim().parse());
        let (Ok(number), Ok(size)) = (number, size) else {
            return Err(Error::corrupt(format!(
                "the origin lists a part {:?} of {:?} bytes",
                shorten(&raw.number),
                shorten(&raw.size)
            )));
        };
        page.parts.push(ListedPart {
            part: UploadedPart {
                number,
                etag: raw.etag,
                size: Some(size),
            },
            last_modified_ms: chrono::DateTime::parse_from_rfc3339(raw.modified.trim())
                .map(|t| t.timestamp_millis())
                .unwrap_or(0),
        });
    }
    Ok(page)
}

/// The blocks in a `BlockList` of Azure, by id.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Blocks {
    pub committed: Vec<String>,
    /// Each with its size in bytes.
    pub uncommitted: Vec<(String, u64)>,
}

/// A `BlockList`.
pub(crate) fn parse_blocks(text: &str) -> Result<Blocks> {
    let (mut blocks, mut name) = (Blocks::default(), String::new());
    let (mut seen, mut bad) = (false, None);
    walk(text, |met| match met {
        Meet::Open("BlockList") => seen = true,
        Meet::Open(_) => {}
        Meet::Text(path, value) => match path.strip_prefix("BlockList/").unwrap_or_default() {
            "CommittedBlocks/Block/Name" => blocks.committed.push(value),
            "UncommittedBlocks/Block/Name" => name = value,
            "UncommittedBlocks/Block/Size" => match value.trim().parse() {
                Ok(size) => blocks.uncommitted.push((std::mem::take(&mut name), size)),
                Err(_) => bad = Some(value),
            },
            _ => {}
        },
    })?;
    match bad {
        Some(size) => Err(Error::corrupt(format!(
            "the origin lists a block of {:?} bytes",
            shorten(&size)
        ))),
        None if seen => Ok(blocks),
        None => Err(not_expected("a BlockList", text)),
    }
}

/// Entries, prefixes and the marker of the next chunk, from Azure's `EnumerationResults`.
pub(crate) fn parse_azure_list(
    text: &str,
) -> Result<(Vec<ListEntry>, Vec<String>, Option<String>)> {
    let mut entries: Vec<ListEntry> = Vec::new();
    let (mut prefixes, mut marker, mut seen, mut bad) = (Vec::new(), None, false, None);
    walk(text, |met| match met {
        Meet::Open("EnumerationResults") => seen = true,
        Meet::Open("EnumerationResults/Blobs/Blob") => {
            entries.push(ListEntry {
                key: String::new(),
                size: 0,
                etag: None,
                last_modified_ms: 0,
            });
        }
        Meet::Open(_) => {}
        Meet::Text(path, value) => match (
            path.strip_prefix("EnumerationResults/").unwrap_or_default(),
            entries.last_mut(),
        ) {
            ("Blobs/Blob/Name", Some(e)) => e.key = value,
            ("Blobs/Blob/Properties/Content-Length", Some(e)) => match value.trim().parse() {
                Ok(size) => e.size = size,
                Err(_) => bad = Some(value),
            },
            // Here without quotes, in headers with quotes.
            ("Blobs/Blob/Properties/Etag", Some(e)) => {
                e.etag = Some(format!("\"{}\"", value.trim_matches('"')))
            }
            ("Blobs/Blob/Properties/Last-Modified", Some(e)) => {
                e.last_modified_ms = http_date(&value)
            }
            ("Blobs/BlobPrefix/Name", _) => prefixes.push(value),
            ("NextMarker", _) => marker = Some(value).filter(|m| !m.is_empty()),
            _ => {}
        },
    })?;
    match bad {
        Some(size) => Err(Error::corrupt(format!(
            "the origin lists a size of {:?}",
            shorten(&size)
        ))),
        None if seen => Ok((entries, prefixes, marker)),
        None => Err(not_expected("an EnumerationResults", text)),
    }
}

/// The names in the directory with path `own`; names that are not keys are left out.
pub(crate) fn parse_dav(text: &str, own: &str) -> Result<Vec<Named>> {
    let path_of = |href: &str| -> Option<String> {
        let path = match href.split_once("://") {
            Some((_, rest)) => &rest[rest.find('/')?..],
            None => href,
        };
        percent_encoding::percent_decode_str(path)
            .decode_utf8()
            .ok()
            .map(|s| s.into_owned())
    };
    let own = path_of(own).unwrap_or_default();
    let mut entries: Vec<(Named, bool)> = Vec::new();
    let mut seen = false;
    walk(text, |met| match met {
        Meet::Open("multistatus") => seen = true,
        Meet::Open("multistatus/response") => {
            entries.push((
                Named {
                    name: String::new(),
                    size: 0,
                    etag: None,
                    last_modified_ms: 0,
                },
                false,
            ));
        }
        Meet::Open("multistatus/response/propstat/prop/resourcetype/collection") => {
            if let Some(last) = entries.last_mut() {
                last.1 = true;
            }
        }
        Meet::Open(_) => {}
        Meet::Text(path, value) => match (
            path.strip_prefix("multistatus/response/")
                .unwrap_or_default(),
            entries.last_mut(),
        ) {
            ("href", Some((e, _))) => e.name = value.trim().to_owned(),
            ("propstat/prop/getcontentlength", Some((e, _))) => {
                e.size = value.trim().parse().unwrap_or(0)
            }
            ("propstat/prop/getetag", Some((e, _))) => {
                e.etag = Some(value.trim().to_owned()).filter(|t| !t.is_empty())
            }
            ("propstat/prop/getlastmodified", Some((e, _))) => {
                e.last_modified_ms = http_date(&value)
            }
            _ => {}
        },
    })?;
    if !seen {
        return Err(not_expected("a multistatus", text));
    }
    let mut out = Vec::new();
    for (mut entry, is_directory) in entries {
        let Some(name) = path_of(&entry.name).and_then(|p| {
            p.strip_prefix(own.as_str())
                .map(|n| n.trim_end_matches('/').to_owned())
        }) else {
            continue;
        };
        if name.is_empty() || name.contains('/') || name.chars().any(char::is_control) {
            continue;
        }
        entry.name = if is_directory {
            format!("{name}/")
        } else {
            name
        };
        out.push(entry);
    }
    Ok(out)
}

fn http_date(text: &str) -> i64 {
    chrono::DateTime::parse_from_rfc2822(text.trim())
        .map(|t| t.timestamp_millis())
        .unwrap_or(0)
}

/// The buckets in a `ListAllMyBucketsResult`.
pub(crate) fn parse_buckets(text: &str) -> Result<Vec<ListedBucket>> {
    let mut buckets: Vec<ListedBucket> = Vec::new();
    let mut seen = false;
    walk(text, |met| match met {
        Meet::Open("ListAllMyBucketsResult") => seen = true,
        Meet::Open("ListAllMyBucketsResult/Buckets/Bucket") => buckets.push(Default::default()),
        Meet::Text("ListAllMyBucketsResult/Buckets/Bucket/Name", value) => {
            if let Some(bucket) = buckets.last_mut() {
                bucket.name = value;
            }
        }
        Meet::Text("ListAllMyBucketsResult/Buckets/Bucket/CreationDate", value) => {
            if let Some(bucket) = buckets.last_mut() {
                bucket.created_ms = chrono::DateTime::parse_from_rfc3339(value.trim())
                    .map(|t| t.timestamp_millis())
                    .unwrap_or(0);
            }
        }
        _ => {}
    })?;
    buckets.retain(|bucket| !bucket.name.is_empty());
    if seen {
        Ok(buckets)
    } else {
        Err(not_expected("a ListAllMyBucketsResult", text))
    }
}

/// The text of one element in an answer such as `InitiateMultipartUploadResult`; an `Error`
/// document in a 200 answer becomes that error.
pub(crate) fn field(text: &str, root: &str, name: &str) -> Result<Option<String>> {
    let mut found = None;
    let mut seen = false;
    let wanted = format!("{root}/{name}");
    walk(text, |met| match met {
        Meet::Open(path) => seen |= path == root,
        Meet::Text(path, value) if path == wanted => found = Some(value),
        Meet::Text(..) => {}
    })?;
    if seen {
        Ok(found)
    } else {
        Err(not_expected(root, text))
    }
}

fn not_expected(what: &str, text: &str) -> Error {
    let doc = ErrorDocument::parse(text);
    if doc.code.is_empty() {
        let start: String = text.chars().take(80).filter(|c| !c.is_control()).collect();
        Error::corrupt(format!("the origin's answer is not {what}: {start:?}"))
            .hint("check that the endpoint is an S3 service")
    } else {
        let what = format!(
            "the origin failed late: {} {}",
            shorten(&doc.code),
            shorten(&doc.message)
        );
        Error::new(failure::kind_of_late(&doc.code), what)
    }
}

/// The body of CompleteMultipartUpload.
pub(crate) fn complete_body(parts: &[UploadedPart]) -> String {
    use std::fmt::Write;
    let mut s =
        String::from("<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
    for p in parts {
        // Quotes stay as they are: Google does not understand &quot;.
        let etag = quick_xml::escape::partial_escape(p.etag.as_str());
        // Writing to a String cannot fail.
        let _ = write!(
            s,
            "<Part><PartNumber>{}</PartNumber><ETag>{etag}</ETag></Part>",
            p.number
        );
    }
    s.push_str("</CompleteMultipartUpload>");
    s
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_of_buckets_tells_their_dates() {
        let text = "<ListAllMyBucketsResult><Buckets><Bucket><CreationDate>2024-05-01T10:00:00.250Z\
                    </CreationDate><Name>a</Name></Bucket><Bucket><Name>b</Name></Bucket>\
                    <Bucket><Name>c</Name><CreationDate>soon</CreationDate></Bucket><Bucket/>\
                    </Buckets><Owner><ID>o</ID></Owner></ListAllMyBucketsResult>";
        let listed = parse_buckets(text).unwrap().into_iter();
        let listed: Vec<_> = listed.map(|b| (b.name, b.created_ms)).collect();
        let is = |name: &str, ms: i64| (name.to_owned(), ms);
        let all = [is("a", 1_714_557_600_250), is("b", 0), is("c", 0)];
        assert_eq!(listed, all);
        assert!(parse_buckets("<html/>").is_err());
    }

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
        let keys: Vec<_> = page
            .entries
            .iter()
            .map(|e| (e.key.as_str(), e.size, e.etag.as_deref()))
            .collect();
        assert_eq!(
            keys,
            [("a b+c&d", 7, Some("\"e\"")), ("dir/", 0, Some("\"f\""))]
        );
        assert_eq!(page.entries[0].last_modified_ms, 1_704_164_645_678);
        assert_eq!(
            (page.prefixes, page.next_token.as_deref()),
            (vec!["p q/".to_owned()], Some("t/1="))
        );
    }

    #[test]
    fn names_that_are_not_encoded_are_taken_as_they_are() {
        let page = parse_list(
            "<ListBucketResult><Contents><Key> a+%41 &lt;&#x26;&amp;amp; \
                </Key><Size>1</Size></Contents></ListBucketResult>",
        )
        .unwrap();
        assert_eq!(page.entries[0].key, " a+%41 <&&amp; ");
        assert!(parse_list("<html><body>hello</body></html>").is_err());
        let deep = format!("<ListBucketResult>{}", "<a>".repeat(100_000));
        assert!(parse_list(&deep).unwrap_err().to_string().contains("deep"));
        assert!(
            parse_list("<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>")
                .is_err()
        );
        assert!(parse_list("<ListBucketResult><Contents><Key>a</Key><Size>x</Size></Contents></ListBucketResult>").is_err());
    }

    #[test]
    fn a_listing_of_azure_is_read() {
        let (entries, prefixes, marker) = parse_azure_list(
            r#"<?xml version="1.0"?><EnumerationResults><Blobs><Blob><Name>a&amp;b/c</Name><Properties><Content-Length>5</Content-Length><Etag>0x8D</Etag>
            <Last-Modified>Tue, 02 Jan 2024 03:04:05 GMT</Last-Modified></Properties></Blob><BlobPrefix><Name>d/</Name></BlobPrefix></Blobs><NextMarker>m</NextMarker></EnumerationResults>"#,
        )
        .unwrap();
        assert_eq!(
            entries,
            [ListEntry {
                key: "a&b/c".into(),
                size: 5,
                etag: Some("\"0x8D\"".into()),
                last_modified_ms: 1_704_164_645_000
            }]
        );
        assert_eq!(
            (prefixes, marker.as_deref()),
            (vec!["d/".to_owned()], Some("m"))
        );
        assert!(parse_azure_list("<Error><Code>x</Code></Error>").is_err());
    }

    #[test]
    fn parts_of_an_upload_are_read() {
        let page = parse_parts(
            r#"<?xml version="1.0"?><ListPartsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><PartNumberMarker>1</PartNumberMarker>
            <IsTruncated>true</IsTruncated><Part><PartNumber>2</PartNumber><LastModified>2024-01-02T03:04:05.678Z</LastModified><ETag>&quot;e&quot;</ETag><Size>7</Size></Part>
            </ListPartsResult>"#,
        )
        .unwrap();
        let part = UploadedPart {
            number: 2,
            etag: "\"e\"".into(),
            size: Some(7),
        };
        let last_modified_ms = 1_704_164_645_678;
        let parts = vec![ListedPart {
            part,
            last_modified_ms,
        }];
        let is_truncated = true;
        assert_eq!(
            page,
            PartsPage {
                parts,
                is_truncated
            }
        );
        let bad = "<ListPartsResult><Part><PartNumber>x</PartNumber></Part></ListPartsResult>";
        assert!(parse_parts(bad).is_err() && parse_parts("<html/>").is_err());
    }

    #[test]
    fn a_directory_of_webdav_is_read() {
        let entries = parse_dav(
            r#"<D:multistatus xmlns:D="DAV:"><D:response><D:href>/x/</D:href><D:propstat><D:prop><D:resourcetype><D:collection/></D:resourcetype></D:prop></D:propstat></D:response>
            <D:response><D:href>http://h:1/x/a%20b</D:href><D:propstat><D:prop><D:getcontentlength>3</D:getcontentlength><D:resourcetype/></D:prop></D:propstat></D:response>
            <D:response><D:href>/x/sub</D:href><D:propstat><D:prop><D:resourcetype><D:collection/></D:resourcetype></D:prop></D:propstat></D:response>
            <D:response><D:href>/other</D:href></D:response></D:multistatus>"#,
            "/x/",
        )
        .unwrap();
        let names: Vec<_> = entries.iter().map(|e| (e.name.as_str(), e.size)).collect();
        assert_eq!(names, [("a b", 3), ("sub/", 0)]);
    }

    #[test]
    fn an_error_in_a_success_is_an_error() {
        let e = field(
            "<Error><Code>InternalError</Code><Message>m</Message></Error>",
            "CopyObjectResult",
            "ETag",
        )
        .unwrap_err();
        assert!(e.to_string().contains("InternalError"), "{e}");
        let ok = field(
            "<CopyObjectResult><ETag>\"x\"</ETag></CopyObjectResult>",
            "CopyObjectResult",
            "ETag",
        )
        .unwrap();
        assert_eq!(ok.as_deref(), Some("\"x\""));
    }
}
