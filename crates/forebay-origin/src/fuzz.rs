//! Mutated answers of origins: listings, error documents, headers. Origins are not enemies, but
//! anything between them and this node may answer anything.

#[path = "../../../tests/fuzz/harness.rs"]
mod harness;

use crate::s3::{headers::parse_content_range, xml};
use forebay_core::{Error, ErrorKind, Result};
use harness::{Target, outcome};

const S3: &str = r#"<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><Prefix/>
    <EncodingType>url</EncodingType><IsTruncated>true</IsTruncated><NextContinuationToken>t/1=</NextContinuationToken>
    <Contents><Key>a+b%2Bc%26d</Key><LastModified>2024-01-02T03:04:05.678Z</LastModified><ETag>&quot;e&quot;</ETag><Size>7</Size></Contents>
    <Contents><Size>0</Size><Key><![CDATA[dir/]]></Key><ETag>"f"</ETag></Contents><CommonPrefixes><Prefix>p%20q/</Prefix></CommonPrefixes></ListBucketResult>"#;
const AZURE: &str = r#"<EnumerationResults><Blobs><Blob><Name>a&amp;b/c</Name><Properties><Content-Length>5</Content-Length><Etag>0x8D</Etag>
    <Last-Modified>Tue, 02 Jan 2024 03:04:05 GMT</Last-Modified></Properties></Blob><BlobPrefix><Name>d/</Name></BlobPrefix></Blobs><NextMarker>m</NextMarker></EnumerationResults>"#;
const DAV: &str = r#"<D:multistatus xmlns:D="DAV:"><D:response><D:href>/x/</D:href><D:propstat><D:prop><D:resourcetype><D:collection/></D:resourcetype></D:prop></D:propstat></D:response>
    <D:response><D:href>http://h:1/x/a%20b</D:href><D:propstat><D:prop><D:getcontentlength>3</D:getcontentlength></D:prop></D:propstat></D:response></D:multistatus>"#;
const BUCKETS: &str = "<ListAllMyBucketsResult><Buckets><Bucket><Name>one</Name></Bucket></Buckets></ListAllMyBucketsResult>";
const UPLOAD: &str = "<InitiateMultipartUploadResult><Bucket>b</Bucket><UploadId>u&#x41;</UploadId></InitiateMultipartUploadResult>";
const ERROR: &str = "<Error><Code>InternalError</Code><Message>We \
    &lt;failed&gt;</Message><Resource>/b/k</Resource></Error>";

/// Every error must say that the origin's answer makes no sense, or that the origin reported a
/// failure.
fn checked<T>(result: Result<T>) -> Result<T> {
    result.inspect_err(|e| {
        assert!(
            matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::OriginUnavailable),
            "{e:?}"
        );
        assert!(
            e.to_string().len() < 4000,
            "a message of {} bytes",
            e.to_string().len()
        );
    })
}

#[test]
fn fuzz_documents_of_origins() {
    let corpus = [S3, AZURE, DAV, BUCKETS, UPLOAD, ERROR]
        .map(|text| text.as_bytes().to_vec())
        .to_vec();
    let words: &[&[u8]] = &[
        b"<Contents>",
        b"</Contents>",
        b"<Contents><Key>k</Key><Size>1</Size></Contents>",
        b"<Key>",
        b"&amp;",
        b"&lt;",
        b"&#x0;",
        b"&#55296;",
        b"&bomb;",
        b"<![CDATA[",
        b"]]>",
        b"<!--",
        b"-->",
        b"<a>",
        b"<b/>",
        b"</a>",
        b"<?x",
        b"%ff",
        b"%zz",
        b"<!DOCTYPE x [<!ENTITY bomb \"&bomb;&bomb;\">]>",
        b"<Size>18446744073709551616</Size>",
    ];
    let target = Target {
        name: "documents_of_origins",
        corpus,
        words,
        max_len: 1 << 18,
        memory: (256 << 10, 300),
    };
    target.run(
        |_, _| {},
        |bytes, _| {
            let text = String::from_utf8_lossy(bytes);
            let list = checked(xml::parse_list(&text)).map(|page| {
                assert!(
                    page.entries.len() * 20 <= text.len(),
                    "more entries than there can be"
                );
                (
                    page.entries.len().min(5),
                    page.prefixes.len().min(3),
                    page.next_token.is_some(),
                )
            });
            let azure = checked(xml::parse_azure_list(&text)).map(|(entries, prefixes, marker)| {
                (
                    entries.len().min(5),
                    prefixes.len().min(3),
                    marker.is_some(),
                )
            });
            let dav = checked(xml::parse_dav(&text, "/x/")).map(|entries| {
                assert!(
                    entries
                        .iter()
                        .all(|e| !e.name.is_empty() && !e.name.trim_end_matches('/').contains('/'))
                );
                entries.len().min(5)
            });
            let buckets = checked(xml::parse_buckets(&text)).map(|names| names.len().min(3));
            let upload = checked(xml::field(
                &text,
                "InitiateMultipartUploadResult",
                "UploadId",
            ))
            .map(|id| id.is_some());
            let all = [
                outcome(list),
                outcome(azure),
                outcome(dav),
                outcome(buckets),
                outcome(upload),
            ];
            outcome::<_, Error>(Ok(all))
        },
    );
}

#[test]
fn fuzz_content_range_of_origins() {
    let corpus = [
        "bytes 0-9/100",
        "bytes 100-99/100",
        "bytes 0--1/0",
        " bytes 5-18446744073709551615/18446744073709551615",
    ]
    .map(|t| t.as_bytes().to_vec())
    .to_vec();
    let target = Target {
        name: "content_range_of_origins",
        corpus,
        words: &[b"bytes ", b"/", b"-", b"*", b"18446744073709551615"],
        max_len: 1000,
        memory: (4096, 4),
    };
    target.run(
        |_, _| {},
        |bytes, _| {
            let parsed = std::str::from_utf8(bytes)
                .ok()
                .and_then(parse_content_range);
            if let Some((range, size)) = &parsed {
                assert!(
                    range.start <= range.end && (range.end <= *size || range.is_empty()),
                    "{range:?} {size}"
                );
            }
            outcome::<_, Error>(Ok(parsed.map(|(range, _)| range.is_empty())))
        },
    );
}
