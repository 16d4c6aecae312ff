//! The S3 front, over a plain HTTP client.

use crate::common::{Answer, Client, start, start_in};
use http::{Method, StatusCode};

#[tokio::test]
async fn reads_say_how_they_were_answered_and_are_counted_so() {
    let n = start(&[]).await;
    n.write("a/b.txt", b"hello, world");
    let mut c = n.client().await;
    let mut seen = std::collections::BTreeMap::new();
    for (advance, path, expected) in [
        (0, "/data/a/b.txt", "MISS"),
        (0, "/data/a/b.txt", "HIT"),
        (61, "/data/a/b.txt", "REVALIDATED"),
        (0, "/data/a/b.txt", "HIT"),
    ] {
        n.clock.advance(std::time::Duration::from_secs(advance));
        let a = c.get(path).await;
        assert_eq!(
            (a.status, a.header("x-cache"), a.text().as_str()),
            (StatusCode::OK, expected, "hello, world")
        );
        assert_eq!(a.header("content-length"), "12");
        assert!(
            !a.header("etag").is_empty()
                && !a.header("last-modified").is_empty()
                && !a.header("x-amz-request-id").is_empty()
        );
        *seen.entry(expected).or_insert(0u32) += 1;
    }
    for header in [("cache-control", "no-cache"), ("x-forebay-cache", "bypass")] {
        let a = c.get_with("/data/a/b.txt", &[header]).await;
        assert_eq!(a.header("x-cache"), "BYPASS");
        *seen.entry("BYPASS").or_insert(0) += 1;
    }
    let head = c.send(Method::HEAD, "/data/a/b.txt", &[], "").await;
    assert_eq!(
        (
            head.status,
            head.header("content-length"),
            head.header("x-cache"),
            head.text().as_str()
        ),
        (StatusCode::OK, "12", "HIT", "")
    );
    *seen.entry("HIT").or_insert(0) += 1;
    n.write("a/b.txt", b"changed, and longer");
    n.clock.advance(std::time::Duration::from_secs(61));
    let a = c.get("/data/a/b.txt").await;
    assert_eq!(
        (a.header("x-cache"), a.text().as_str()),
        ("MISS", "changed, and longer")
    );
    *seen.entry("MISS").or_insert(0) += 1;
    for (status, count) in seen {
        assert_eq!(
            n.metric("forebay_answers_total", &format!("x_cache=\"{status}\""))
                .await,
            f64::from(count),
            "{status}"
        );
    }
    assert_eq!(
        n.metric("forebay_get_duration_seconds_count", "x_cache=\"HIT\"")
            .await,
        2.0,
        "HEAD is no GET"
    );
}

#[tokio::test]
async fn ranges_and_conditions() {
    let n = start(&[]).await;
    n.write("k", b"0123456789");
    n.write("empty", b"");
    let mut c = n.client().await;
    for (range, status, body, content_range) in [
        ("bytes=2-4", 206, "234", "bytes 2-4/10"),
        ("bytes=-3", 206, "789", "bytes 7-9/10"),
        ("bytes=8-100", 206, "89", "bytes 8-9/10"),
        ("bytes=nonsense", 200, "0123456789", ""),
        ("items=0-1", 200, "0123456789", ""),
    ] {
        let a = c.get_with("/data/k", &[("range", range)]).await;
        assert_eq!(
            (
                a.status.as_u16(),
                a.text().as_str(),
                a.header("content-range")
            ),
            (status, body, content_range),
            "{range}"
        );
    }
    let a = c.get_with("/data/k", &[("range", "bytes=10-")]).await;
    assert_eq!(
        (a.status.as_u16(), a.header("content-range")),
        (416, "bytes */10")
    );
    assert!(
        a.text().contains("<Code>InvalidRange</Code>")
            && a.text().contains("<ActualObjectSize>10<"),
        "{}",
        a.text()
    );
    let a = c.get_with("/data/k", &[("range", "bytes=0-1,3-4")]).await;
    assert_eq!(a.status, StatusCode::NOT_IMPLEMENTED);
    assert_eq!(c.get("/data/empty").await.header("content-length"), "0");

    let etag = c.get("/data/k").await.header("etag").to_owned();
    let a = c.get_with("/data/k", &[("if-none-match", &etag)]).await;
    assert_eq!(
        (a.status, a.header("etag"), a.text().as_str()),
        (StatusCode::NOT_MODIFIED, etag.as_str(), "")
    );
    let a = c.get_with("/data/k", &[("if-match", "\"other\"")]).await;
    assert!(
        a.status == StatusCode::PRECONDITION_FAILED
            && a.text().contains("<Code>PreconditionFailed</Code>")
            && a.text().contains("<Condition>If-Match</Condition>")
    );
    let before = ("if-unmodified-since", "Thu, 01 Jan 1970 00:00:01 GMT");
    let a = c.get_with("/data/k", &[before]).await;
    assert!(
        a.text()
            .contains("<Condition>If-Unmodified-Since</Condition>"),
        "{}",
        a.text()
    );
    assert_eq!(
        c.get_with("/data/k", &[("if-match", &etag)]).await.status,
        StatusCode::OK
    );
    let a = c
        .get_with("/data/k", &[("if-range", &etag), ("range", "bytes=1-2")])
        .await;
    assert_eq!((a.status.as_u16(), a.text().as_str()), (206, "12"));
    let a = c
        .get_with(
            "/data/k",
            &[("if-range", "\"other\""), ("range", "bytes=1-2")],
        )
        .await;
    assert_eq!((a.status.as_u16(), a.text().as_str()), (200, "0123456789"));
    let a = c
        .get_with(
            "/data/k?attributes",
            &[("x-amz-object-attributes", "ETag, ObjectSize,Checksum")],
        )
        .await;
    assert!(
        a.text().contains(&format!(
            "<ETag>{}</ETag><ObjectSize>10</ObjectSize>",
            etag.trim_matches('"')
        )),
        "{}",
        a.text()
    );
    assert_eq!(
        c.get("/data/k?attributes").await.status,
        StatusCode::BAD_REQUEST
    );
    let a = c
        .get("/data/k?response-content-type=text%2Fplain&response-cache-control=max-age%3D5")
        .await;
    assert_eq!(
        (a.header("content-type"), a.header("cache-control")),
        ("text/plain", "max-age=5")
    );
}

#[tokio::test]
async fn writes_are_readable_at_once_and_checked() {
    let n = start(&[]).await;
    let mut c = n.client().await;
    let a = c
        .put(
            "/data/new/k.txt",
            &[
                ("content-type", "text/plain"),
                ("x-amz-meta-color", "red"),
                ("content-md5", "XUFAKrxLKna5cZ2REBfFkg=="),
            ],
            "hello",
        )
        .await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    let a = c.get("/data/new/k.txt").await;
    assert_eq!((a.text().as_str(), a.status), ("hello", StatusCode::OK));
    let a = c.put("/data/new/k.txt", &[], "changed").await;
    assert_eq!(a.status, StatusCode::OK);
    assert_eq!(c.get("/data/new/k.txt").await.text(), "changed");

    let a = c
        .put(
            "/data/bad",
            &[("content-md5", "AAAAAAAAAAAAAAAAAAAAAA==")],
            "hello",
        )
        .await;
    assert!(
        a.status == StatusCode::BAD_REQUEST && a.text().contains("<Code>BadDigest</Code>"),
        "{}",
        a.text()
    );
    let a = c
        .put(
            "/data/bad",
            &[("x-amz-checksum-crc32", "AAAAAA==")],
            "hello",
        )
        .await;
    assert!(a.text().contains("<Code>BadDigest</Code>"), "{}", a.text());
    assert_eq!(
        c.get("/data/bad").await.status,
        StatusCode::NOT_FOUND,
        "what was refused is not there"
    );

    let chunked = "5;chunk-signature=0\r\nhello\r\n0;chunk-signature=0\r\n\r\n";
    let framed = [
        ("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"),
        ("x-amz-decoded-content-length", "5"),
        (
            "authorization",
            "AWS4-HMAC-SHA256 Credential=x/20260101/r/s3/aws4_request, SignedHeaders=host, \
             Signature=0",
        ),
    ];
    let a = c.put("/data/framed", &framed, chunked).await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    assert_eq!(c.get("/data/framed").await.text(), "hello");
    let trailed = "5\r\nhello\r\n0\r\nx-amz-checksum-crc32:NhCmhg==\r\n\r\n";
    let headers = [
        ("x-amz-content-sha256", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"),
        ("x-amz-decoded-content-length", "5"),
        ("x-amz-trailer", "x-amz-checksum-crc32"),
    ];
    assert_eq!(
        c.put("/data/trailed", &headers, trailed).await.status,
        StatusCode::OK
    );
    let a = c
        .put(
            "/data/trailed",
            &headers,
            trailed.replace("NhCmhg", "AAAAAA"),
        )
        .await;
    assert!(a.text().contains("<Code>BadDigest</Code>"), "{}", a.text());
    assert_eq!(c.get("/data/trailed").await.text(), "hello");
    // The library knows neither of these.
    let newer = [
        headers[0],
        headers[1],
        ("x-amz-trailer", "x-amz-checksum-xxhash64"),
    ];
    let right = trailed.replace("crc32:NhCmhg==", "xxhash64:JseCfYifbaM=");
    let a = c.put("/data/trailed", &newer, right.clone()).await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    assert_eq!(a.header("x-amz-checksum-xxhash64"), "JseCfYifbaM=");
    let wrong = right.replace("JseC", "AAAA");
    let a = c.put("/data/trailed", &newer, wrong).await;
    assert!(a.text().contains("<Code>BadDigest</Code>"), "{}", a.text());
    let md5 = [("x-amz-checksum-md5", "XUFAKrxLKna5cZ2REBfFkg==")];
    let a = c.put("/data/trailed", &md5, "hello").await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    let a = c.put("/data/trailed", &md5, "other").await;
    assert!(a.text().contains("<Code>BadDigest</Code>"), "{}", a.text());

    let a = c
        .put("/data/new/k.txt", &[("if-none-match", "*")], "x")
        .await;
    assert_eq!(a.status, StatusCode::PRECONDITION_FAILED);
    assert!(
        a.text().contains("<Condition>If-None-Match</Condition>")
            && a.text().contains("<RequestId>"),
        "{}",
        a.text()
    );
    let a = c
        .put(
            "/data/copy",
            &[("x-amz-copy-source", "/data/new/k.txt")],
            "",
        )
        .await;
    assert!(
        a.status == StatusCode::OK && a.text().contains("CopyObjectResult"),
        "{}",
        a.text()
    );
    assert_eq!(c.get("/data/copy").await.text(), "changed");
    let a = c.send(Method::DELETE, "/data/copy", &[], "").await;
    assert_eq!(a.status, StatusCode::NO_CONTENT);
    assert_eq!(c.get("/data/copy").await.status, StatusCode::NOT_FOUND);
    let body =
        "<Delete><Object><Key>framed</Key></Object><Object><Key>not-there</Key></Object></Delete>";
    let a = c.send(Method::POST, "/data?delete", &[], body).await;
    assert!(
        a.status == StatusCode::OK && a.text().matches("<Deleted>").count() == 2,
        "{}",
        a.text()
    );
    assert_eq!(c.get("/data/framed").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn listings() {
    let n = start(&[]).await;
    for k in ["a/1", "a/2", "b c+ü", "d"] {
        n.write(k, b"x");
    }
    let mut c = n.client().await;
    let a = c
        .get("/data?list-type=2&delimiter=%2F&encoding-type=url")
        .await;
    let text = a.text();
    assert!(
        text.contains("<Prefix>a/</Prefix>")
            && text.contains("<Key>b%20c%2B%C3%BC</Key>")
            && text.contains("<KeyCount>3</KeyCount>"),
        "{text}"
    );
    let a = c.get("/data?list-type=2&max-keys=1").await.text();
    assert!(
        a.contains("<IsTruncated>true</IsTruncated>") && a.contains("<Key>a/1</Key>"),
        "{a}"
    );
    let token = a
        .split("<NextContinuationToken>")
        .nth(1)
        .unwrap()
        .split('<')
        .next()
        .unwrap()
        .to_owned();
    let token: String = token.bytes().map(|b| format!("%{b:02X}")).collect();
    let a = c
        .get(&format!(
            "/data?list-type=2&max-keys=1&continuation-token={token}"
        ))
        .await
        .text();
    assert!(a.contains("<Key>a/2</Key>"), "{a}");
    let a = c.get("/data?list-type=2&max-keys=0").await.text();
    assert!(
        a.contains("<IsTruncated>false</IsTruncated>") && !a.contains("<Key>"),
        "{a}"
    );
    // Both versions encode the prefix too, as S3 does, though boto3 does not decode that of version 1.
    for version in ["", "&list-type=2"] {
        let list = format!("/data?prefix=b%20c&encoding-type=url{version}");
        let a = c.get(&list).await.text();
        assert!(
            a.contains("<Prefix>b%20c</Prefix>") && a.contains("<Key>b%20c%2B%C3%BC</Key>"),
            "{a}"
        );
    }
    // Version 1, page by page, over rolled-up prefixes.
    let (mut marker, mut names) = (String::new(), Vec::new());
    loop {
        let a = c
            .get(&format!(
                "/data?delimiter=%2F&max-keys=1&encoding-type=url&marker={marker}"
            ))
            .await
            .text();
        names.extend(
            a.split("<Key>")
                .skip(1)
                .map(|s| s.split('<').next().unwrap().to_owned()),
        );
        names.extend(
            a.split("<CommonPrefixes><Prefix>")
                .skip(1)
                .map(|s| s.split('<').next().unwrap().to_owned()),
        );
        if a.contains("<IsTruncated>false</IsTruncated>") {
            break;
        }
        marker = a
            .split("<NextMarker>")
            .nth(1)
            .unwrap()
            .split('<')
            .next()
            .unwrap()
            .to_owned();
        assert!(names.len() < 9, "{names:?}");
    }
    assert_eq!(names, ["a/", "b%20c%2B%C3%BC", "d"]);
    let a = c.get("/").await.text();
    assert!(
        a.contains("<Name>data</Name>") && a.contains("<Name>other</Name>"),
        "{a}"
    );
    assert!(
        c.get("/data?location")
            .await
            .text()
            .contains("LocationConstraint")
    );
    assert_eq!(
        c.send(Method::HEAD, "/data", &[], "").await.status,
        StatusCode::OK
    );
    assert_eq!(
        c.send(Method::HEAD, "/nothing", &[], "").await.status,
        StatusCode::NOT_FOUND
    );
    assert_eq!(c.put("/made", &[], "").await.status, StatusCode::OK);
    assert_eq!(c.put("/made", &[], "").await.status, StatusCode::CONFLICT);
    assert_eq!(
        c.send(Method::DELETE, "/made", &[], "").await.status,
        StatusCode::NO_CONTENT
    );
}

#[tokio::test]
async fn errors_are_clear_and_what_is_not_offered_is_501() {
    let n = start(&[]).await;
    n.write("k", b"object");
    let mut c = n.client().await;
    for (path, status, code) in [
        ("/data/none", 404, "NoSuchKey"),
        ("/nobucket/k", 404, "NoSuchBucket"),
        ("/nobucket?list-type=2", 404, "NoSuchBucket"),
        ("/data/a//b", 400, "InvalidArgument"),
        ("/data/%ff", 400, "InvalidArgument"),
        ("/data?max-keys=-1", 400, "InvalidArgument"),
        ("/data/k?acl", 501, "NotImplemented"),
        ("/data/k?tagging", 501, "NotImplemented"),
        ("/data/k?torrent", 501, "NotImplemented"),
        ("/data/k?versionId=7", 501, "NotImplemented"),
        ("/data?versioning", 501, "NotImplemented"),
        ("/data?policy", 501, "NotImplemented"),
        ("/data?versions", 501, "NotImplemented"),
        ("/data/k?uploadId=1", 404, "NoSuchUpload"),
    ] {
        let a = c.get_with(path, &[("x-request-id", "the-id-7")]).await;
        assert_eq!(a.status.as_u16(), status, "{path}: {}", a.text());
        assert!(
            a.text().contains(&format!("<Code>{code}</Code>")),
            "{path}: {}",
            a.text()
        );
        assert!(!a.text().contains("object</"), "{path}");
        assert_eq!(
            (a.header("x-request-id"), a.header("x-amz-request-id")),
            ("the-id-7", "the-id-7")
        );
        assert!(a.text().contains("<Message>"), "{path}: {}", a.text());
    }
    for header in [
        "x-amz-server-side-encryption",
        "x-amz-object-lock-mode",
        "x-amz-tagging",
        "x-amz-rename-source",
    ] {
        let a = c.put("/data/k", &[(header, "x")], "overwritten").await;
        assert_eq!(a.status, StatusCode::NOT_IMPLEMENTED, "{header}");
    }
    assert_eq!(
        c.put("/data/k?renameObject", &[], "").await.status,
        StatusCode::NOT_IMPLEMENTED
    );
    assert_eq!(
        c.send(
            Method::POST,
            "/data",
            &[("content-type", "multipart/form-data; boundary=x")],
            "--x--"
        )
        .await
        .status,
        StatusCode::NOT_IMPLEMENTED
    );
    assert_eq!(
        c.get("/data/k").await.text(),
        "object",
        "nothing was changed"
    );
}

/// The S3 library takes no notice of them there: it would write or remove the object, or the bucket.
#[tokio::test]
async fn a_part_of_an_object_does_not_stand_for_the_whole() {
    let n = start(&[]).await;
    n.write("k", b"content");
    let mut c = n.client().await;
    for (method, path) in [
        (Method::PUT, "/data/k?uploads"),
        (Method::PUT, "/data/k?attributes"),
        (Method::DELETE, "/data/k?uploads"),
        (Method::DELETE, "/data/k?delete"),
        (Method::DELETE, "/data/k?attributes"),
        (Method::DELETE, "/other?location"),
        (Method::DELETE, "/other?delete"),
        (Method::DELETE, "/other?uploads"),
    ] {
        let a = c.send(method.clone(), path, &[], "").await;
        assert_eq!(a.status, StatusCode::NOT_IMPLEMENTED, "{method} {path}");
        assert_eq!(std::fs::read(n.file("k")).unwrap(), b"content");
        assert!(n.dir.path().join("many/other").is_dir(), "{method} {path}");
    }
}

#[tokio::test]
async fn buckets_in_the_host_name() {
    let n = start(&[("listen.hostnames", "[\"s3.test\"]")]).await;
    n.write("k", b"object");
    let addr = n.node.addr().unwrap();
    for (host, path) in [
        ("data.s3.test", "/k"),
        ("s3.test", "/data/k"),
        ("127.0.0.1", "/data/k"),
    ] {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut s = tokio::net::TcpStream::connect(addr).await.unwrap();
        s.write_all(
            format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").as_bytes(),
        )
        .await
        .unwrap();
        let mut text = String::new();
        s.read_to_string(&mut text).await.unwrap();
        assert!(
            text.starts_with("HTTP/1.1 200") && text.ends_with("object"),
            "{host}{path}: {text}"
        );
        let mut s = tokio::net::TcpStream::connect(addr).await.unwrap();
        let list = if host.starts_with("data") {
            "/?list-type=2"
        } else {
            "/data?list-type=2"
        };
        s.write_all(
            format!("GET {list} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").as_bytes(),
        )
        .await
        .unwrap();
        let mut text = String::new();
        s.read_to_string(&mut text).await.unwrap();
        assert!(text.contains("<Key>k</Key>"), "{host}{list}: {text}");
    }
}

#[tokio::test]
async fn a_copy_takes_place_only_if_its_target_is_as_expected() {
    let n = start(&[]).await;
    n.write("from", b"the source");
    let mut c = n.client().await;
    let source = ("x-amz-copy-source", "/data/from");
    for (directive, key) in [("COPY", "a"), ("REPLACE", "b")] {
        n.write(key, b"there before");
        let to = format!("/data/{key}");
        let etag = c.get(&to).await.header("etag").to_owned();
        let directive = ("x-amz-metadata-directive", directive);
        let with = [source, directive, ("if-match", r#""another""#)];
        let a = c.put(&to, &with, "").await;
        assert_eq!(a.status, StatusCode::PRECONDITION_FAILED, "{}", a.text());
        let condition = "<Condition>If-Match</Condition>";
        assert!(a.text().contains(condition), "{}", a.text());
        assert_eq!(std::fs::read(n.file(key)).unwrap(), b"there before");
        let with = [source, directive, ("if-match", etag.as_str())];
        let a = c.put(&to, &with, "").await;
        assert_eq!(a.status, StatusCode::OK, "{}", a.text());
        assert_eq!(std::fs::read(n.file(key)).unwrap(), b"the source");
        // As by S3, there is no object that could match.
        let a = c.put("/data/none", &with, "").await;
        assert_eq!(a.status, StatusCode::NOT_FOUND, "{}", a.text());
        assert!(!n.file("none").exists());
    }
}

#[tokio::test]
async fn a_copy_is_of_what_is_at_the_origin_and_not_of_what_is_cached() {
    let n = start(&[]).await;
    n.write("from", b"version A");
    let mut c = n.client().await;
    let old = c.get("/data/from").await.header("etag").to_owned();
    n.write("from", b"another version");
    assert_eq!(
        c.get("/data/from").await.header("x-cache"),
        "HIT",
        "the old version is here and fresh"
    );
    let source = ("x-amz-copy-source", "/data/from");
    let only_old = ("x-amz-copy-source-if-match", old.as_str());
    let a = c.put("/data/to", &[source, only_old], "").await;
    assert_eq!(
        (a.status, n.file("to").exists()),
        (StatusCode::PRECONDITION_FAILED, false),
        "{}",
        a.text()
    );
    assert!(
        a.text()
            .contains("<Condition>x-amz-copy-source-If-Match</Condition>"),
        "{}",
        a.text()
    );
    for directive in ["COPY", "REPLACE"] {
        let headers = [
            source,
            ("x-amz-metadata-directive", directive),
            ("content-type", "text/x"),
        ];
        let a = c.put("/data/to", &headers, "").await;
        assert_eq!(a.status, StatusCode::OK, "{}", a.text());
        assert_eq!(std::fs::read(n.file("to")).unwrap(), b"another version");
    }
    // A part of an upload too.
    let begun = c
        .send(Method::POST, "/data/up?uploads", &[], "")
        .await
        .text();
    let id = upload_id(&begun);
    let part = format!("/data/up?partNumber=1&uploadId={id}");
    let a = c.put(&part, &[source, only_old], "").await;
    assert_eq!(a.status, StatusCode::PRECONDITION_FAILED, "{}", a.text());
    let a = c.put(&part, &[source], "").await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    let listed = c.get(&format!("/data/up?uploadId={id}")).await.text();
    assert!(listed.contains("<Size>15</Size>"), "{listed}");
    // Whoever goes on from a page without an entry never ends.
    for of_none in [
        format!("/data/up?uploadId={id}&max-parts=0"),
        "/data?uploads&max-uploads=0".to_owned(),
    ] {
        let listed = c.get(&of_none).await.text();
        assert!(
            listed.contains("<IsTruncated>false</IsTruncated>"),
            "{listed}"
        );
    }
}

fn upload_id(begun: &str) -> &str {
    let id = begun.split_once("<UploadId>").unwrap().1;
    id.split_once('<').unwrap().0
}

#[tokio::test]
async fn a_listing_of_uploads_rolls_up_by_a_delimiter() {
    let n = start(&[]).await;
    let mut c = n.client().await;
    for key in ["a/1", "a/2", "b", "b", "c d/x", "e"] {
        let begin = format!("/data/{}?uploads", key.replace(' ', "%20"));
        let a = c.send(Method::POST, &begin, &[], "").await;
        assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    }
    let between = |text: &str, open: &str, close: &str| -> Vec<String> {
        let found = text.split(open).skip(1);
        found
            .map(|rest| rest.split(close).next().unwrap().to_owned())
            .collect()
    };
    for max in [1, 2, 1000] {
        let (mut keys, mut prefixes, mut next) = (Vec::new(), Vec::new(), String::new());
        loop {
            let list =
                format!("/data?uploads&delimiter=%2F&encoding-type=url&max-uploads={max}{next}");
            let a = c.get(&list).await.text();
            assert!(a.contains("<Delimiter>/</Delimiter>"), "{a}");
            let (more, rolled) = (
                between(&a, "<Key>", "</Key>"),
                between(&a, "<CommonPrefixes><Prefix>", "</Prefix>"),
            );
            assert!(more.len() + rolled.len() <= max, "{a}");
            keys.extend(more);
            prefixes.extend(rolled);
            if a.contains("<IsTruncated>false</IsTruncated>") {
                break;
            }
            let marker = between(&a, "<NextKeyMarker>", "<").remove(0);
            next = format!("&key-marker={marker}");
            if let Some(id) = between(&a, "<NextUploadIdMarker>", "<").first() {
                next += &format!("&upload-id-marker={id}");
            }
        }
        assert_eq!(keys, ["b", "b", "e"], "{max}");
        assert_eq!(prefixes, ["a/", "c%20d/"], "{max}");
    }
    let under = "/data?uploads&delimiter=%2F&prefix=a%2F";
    let a = c.get(under).await.text();
    assert_eq!(between(&a, "<Key>", "</Key>"), ["a/1", "a/2"], "{a}");
    assert!(!a.contains("<CommonPrefixes>"), "{a}");
}

/// Parts may come through any of the nodes before a bucket: its origin knows all of them.
#[tokio::test]
async fn an_upload_is_completed_though_parts_came_through_another_node() {
    let one = start(&[]).await;
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(one.dir.path().join("data"), dir.path().join("data")).unwrap();
    let other = start_in(dir, &[]).await;
    let (mut c, mut d) = (one.client().await, other.client().await);
    let begun = c
        .send(Method::POST, "/data/up?uploads", &[], "")
        .await
        .text();
    let id = upload_id(&begun);
    let mut listed = String::new();
    for (number, client, bytes) in [(1, &mut c, "one "), (2, &mut d, "two")] {
        let part = format!("/data/up?partNumber={number}&uploadId={id}");
        let a = client.put(&part, &[], bytes).await;
        assert_eq!(a.status, StatusCode::OK, "{}", a.text());
        let etag = a.header("etag");
        listed += &format!("<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>");
    }
    let end = format!("/data/up?uploadId={id}");
    // Each lists what came through the other one too.
    for client in [&mut c, &mut d] {
        let a = client.get(&end).await.text();
        let numbers = a.matches("<PartNumber>").count();
        assert!(numbers == 2 && a.contains("<Size>4</Size>"), "{a}");
        let a = client.get(&format!("{end}&max-parts=1")).await.text();
        assert!(a.contains("<IsTruncated>true</IsTruncated>"), "{a}");
        assert!(
            a.contains("<NextPartNumberMarker>1</NextPartNumberMarker>"),
            "{a}"
        );
        let next = format!("{end}&max-parts=1&part-number-marker=1");
        let a = client.get(&next).await.text();
        assert!(a.contains("<PartNumber>2</PartNumber>"), "{a}");
        assert!(a.contains("<IsTruncated>false</IsTruncated>"), "{a}");
    }
    let list_of =
        |parts: &str| format!("<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>");
    let missing = "<Part><PartNumber>3</PartNumber><ETag>\"x\"</ETag></Part>";
    let body = list_of(&format!("{listed}{missing}"));
    let a = c.send(Method::POST, &end, &[], body).await;
    assert_eq!(a.status, StatusCode::BAD_REQUEST, "{}", a.text());
    assert!(
        a.text().contains("<Code>InvalidPart</Code>"),
        "{}",
        a.text()
    );
    let a = c.send(Method::POST, &end, &[], list_of(&listed)).await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    assert_eq!(std::fs::read(one.file("up")).unwrap(), b"one two");
    for client in [&mut c, &mut d] {
        let a = client.get(&end).await;
        assert_eq!(a.status, StatusCode::NOT_FOUND, "{}", a.text());
    }
}

/// A client that got no answer from one node sends the part again, and a balancer takes it elsewhere.
#[tokio::test]
async fn an_upload_is_completed_though_a_part_came_again_through_another_node() {
    let one = start(&[]).await;
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(one.dir.path().join("data"), dir.path().join("data")).unwrap();
    let other = start_in(dir, &[]).await;
    let (mut c, mut d) = (one.client().await, other.client().await);
    let begun = c.send(Method::POST, "/data/up?uploads", &[], "").await;
    let begun = begun.text();
    let id = upload_id(&begun);
    let part = format!("/data/up?partNumber=1&uploadId={id}");
    c.put(&part, &[], "first").await;
    let etag = d.put(&part, &[], "second").await.header("etag").to_owned();
    let body = format!(
        "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part>\
         </CompleteMultipartUpload>"
    );
    let end = format!("/data/up?uploadId={id}");
    let a = c.send(Method::POST, &end, &[], body).await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    assert_eq!(std::fs::read(one.file("up")).unwrap(), b"second");
}

/// As after a restart, another node knows nothing of the upload.
#[tokio::test]
async fn parts_with_each_others_etags_are_refused_also_where_nothing_is_known_of_them() {
    let one = start(&[]).await;
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(one.dir.path().join("data"), dir.path().join("data")).unwrap();
    let other = start_in(dir, &[]).await;
    let (mut c, mut d) = (one.client().await, other.client().await);
    let begun = c.send(Method::POST, "/data/up?uploads", &[], "").await;
    let begun = begun.text();
    let id = upload_id(&begun);
    let mut etags = Vec::new();
    for number in [1, 2] {
        let part = format!("/data/up?partNumber={number}&uploadId={id}");
        etags.push(c.put(&part, &[], "x").await.header("etag").to_owned());
    }
    let body = format!(
        "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>{}</ETag></Part>\
         <Part><PartNumber>2</PartNumber><ETag>{}</ETag></Part></CompleteMultipartUpload>",
        etags[1], etags[0]
    );
    let end = format!("/data/up?uploadId={id}");
    for client in [&mut c, &mut d] {
        let a = client.send(Method::POST, &end, &[], body.clone()).await;
        assert_eq!(a.status, StatusCode::BAD_REQUEST, "{}", a.text());
        assert!(
            a.text().contains("<Code>InvalidPart</Code>"),
            "{}",
            a.text()
        );
    }
    // The one that knows them does not know that the second came again.
    let part = format!("/data/up?partNumber=2&uploadId={id}");
    d.put(&part, &[], "again").await;
    let parts: String = [1, 2]
        .map(|n| {
            let etag = &etags[n - 1];
            format!("<Part><PartNumber>{n}</PartNumber><ETag>{etag}</ETag></Part>")
        })
        .concat();
    let body = format!("<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>");
    let a = c.send(Method::POST, &end, &[], body).await;
    assert!(
        a.text().contains("<Code>InvalidPart</Code>"),
        "{}",
        a.text()
    );
}

/// Uploads an object in one part and completes it under a condition.
async fn upload(c: &mut Client, content: &'static str, condition: (&str, &str)) -> Answer {
    let begun = c.send(Method::POST, "/data/up?uploads", &[], "").await;
    let begun = begun.text();
    let id = upload_id(&begun);
    let part = format!("/data/up?partNumber=1&uploadId={id}");
    let sent = c.put(&part, &[], content).await;
    assert_eq!(sent.status, StatusCode::OK, "{}", sent.text());
    let etag = sent.header("etag");
    let body = format!(
        "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part>\
         </CompleteMultipartUpload>"
    );
    let end = format!("/data/up?uploadId={id}");
    c.send(Method::POST, &end, &[condition], body).await
}

/// s3fs completes under `If-None-Match: *` what it opened with `xb`.
#[tokio::test]
async fn an_upload_is_completed_only_if_its_condition_holds() {
    let n = start(&[]).await;
    let mut c = n.client().await;
    let absent = ("if-none-match", "*");
    let a = upload(&mut c, "first", absent).await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    let etag = c.get("/data/up").await.header("etag").to_owned();
    for (condition, content, status, there) in [
        (absent, "second", 412, "first"),
        (("if-match", "\"other\""), "second", 412, "first"),
        (("if-match", etag.as_str()), "third", 200, "third"),
        (("if-match", etag.as_str()), "fourth", 412, "third"),
    ] {
        let a = upload(&mut c, content, condition).await;
        assert_eq!(a.status.as_u16(), status, "{content}: {}", a.text());
        assert_eq!(c.get("/data/up").await.text(), there);
    }
}

#[tokio::test]
async fn what_is_not_there_cannot_be_replaced() {
    let n = start(&[]).await;
    let mut c = n.client().await;
    let version = ("if-match", "\"a\"");
    let put = c.put("/data/up", &[version], "x").await;
    let completed = upload(&mut c, "x", version).await;
    for a in [put, completed] {
        assert_eq!(a.status, StatusCode::NOT_FOUND, "{}", a.text());
        assert!(a.text().contains("<Code>NoSuchKey</Code>"), "{}", a.text());
    }
    assert!(!n.file("up").exists());
}

/// Names that Amazon does not allow, and the S3 library refuses as the source of a copy.
#[tokio::test]
async fn a_copy_can_be_from_any_bucket_that_is_served() {
    let n = start(&[]).await;
    let mut c = n.client().await;
    for bucket in ["My_Bucket", "ab"] {
        let dir = n.dir.path().join("many").join(bucket);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("a file"), bucket).unwrap();
        let source = format!("/{bucket}/a%20file");
        let source = ("x-amz-copy-source", source.as_str());
        // To another bucket, and within its own.
        for to in ["data/to".to_owned(), format!("{bucket}/to")] {
            let a = c.put(&format!("/{to}"), &[source], "").await;
            assert_eq!(a.status, StatusCode::OK, "{bucket} to {to}: {}", a.text());
            assert!(a.text().contains("<CopyObjectResult"), "{}", a.text());
            assert_eq!(c.get(&format!("/{to}")).await.text(), bucket);
        }
        let begun = c.send(Method::POST, "/data/up?uploads", &[], "").await;
        let begun = begun.text();
        let id = upload_id(&begun);
        let range = ("x-amz-copy-source-range", "bytes=0-1");
        let part = format!("/data/up?partNumber=1&uploadId={id}");
        let a = c.put(&part, &[source, range], "").await;
        assert_eq!(a.status, StatusCode::OK, "{bucket}: {}", a.text());
        assert!(a.text().contains("<CopyPartResult"), "{}", a.text());
        let listed = c.get(&format!("/data/up?uploadId={id}")).await.text();
        assert!(listed.contains("<Size>2</Size>"), "{listed}");
    }
}
