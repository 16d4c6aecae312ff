//! What AIStore's clients ask for beyond S3: members of an archive by a pattern, and custom
//! properties.

use crate::common::{Answer, Client, TestNode, start, start_in, tar};
use forebay_core::ManualClock;
use forebay_format::{ArchiveKind, ArchiveWriter};
use forebay_server::{Config, Node, config::Override};
use forebay_testing::{Reply, Scripted};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Names and contents of a tar's members, up to its end.
fn members(tar: &[u8]) -> Vec<(String, Vec<u8>)> {
    let (mut found, mut at) = (Vec::new(), 0);
    while tar[at] != 0 {
        let text = |from: usize, to: usize| {
            let field = &tar[at + from..at + to];
            let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
            String::from_utf8(field[..end].to_vec()).unwrap()
        };
        let (name, size) = (text(0, 100), text(124, 135));
        let size = usize::from_str_radix(size.trim(), 8).unwrap();
        found.push((name, tar[at + 512..at + 512 + size].to_vec()));
        at += 512 + size.next_multiple_of(512);
    }
    assert_eq!(tar[at..], [0; 1024]);
    found
}

fn names(answer: &Answer) -> Vec<String> {
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let body = answer.body.as_ref().unwrap();
    assert_eq!(answer.header("content-length"), body.len().to_string());
    members(body).into_iter().map(|(name, _)| name).collect()
}

#[tokio::test]
async fn members_by_a_pattern_are_a_tar_in_the_archives_order() {
    let n = start(&[("batch.max_entries", "4")]).await;
    let content = |name: &str| name.repeat(1000).into_bytes();
    let all = ["d/b.jpg", "d/b.cls", "d/a.jpg", "d/a.seg.png", "e"];
    for (file, kind) in [
        ("s.tar", ArchiveKind::Tar),
        ("s.tgz", ArchiveKind::TarGz),
        ("s.tar.lz4", ArchiveKind::TarLz4),
        ("s.zip", ArchiveKind::Zip),
    ] {
        let (mut archive, mut out) = (ArchiveWriter::new(kind), Vec::new());
        for name in all {
            let bytes = content(name);
            archive
                .begin_entry(name, bytes.len() as u64, 1_000_000_000, &mut out)
                .unwrap();
            archive.data(&bytes, &mut out).unwrap();
            archive.end_entry(&mut out).unwrap();
        }
        archive.finish(&mut out).unwrap();
        n.write(file, &out);
    }
    let mut c = n.client().await;
    for file in ["s.tar", "s.tgz", "s.tar.lz4", "s.zip"] {
        let path = format!("/v1/objects/data/{file}?provider=ais&archpath=");
        for (mode, pattern, wanted) in [
            ("prefix", "d/b", &all[..2]),
            ("suffix", ".jpg", &["d/b.jpg", "d/a.jpg"]),
            ("substr", "/a.", &all[2..4]),
            ("wdskey", "d/b", &all[..2]),
            (
                "regexp",
                "%5Ed/.%5C.(cls%7Cseg.*)$",
                &["d/b.cls", "d/a.seg.png"],
            ),
        ] {
            let path = format!("{path}&archmode={mode}&archregx={pattern}");
            let a = c.get(&path).await;
            assert_eq!(names(&a), wanted, "{file} {mode}");
            assert_eq!(a.header("content-type"), "application/x-tar");
            for (name, bytes) in members(a.body.as_ref().unwrap()) {
                assert_eq!(bytes, content(&name));
            }
            let again = c.get(&path).await;
            assert_eq!(again.body.unwrap(), a.body.unwrap(), "{file} {mode}");
            let head = c.send(Method::HEAD, &path, &[], "").await;
            assert_eq!(
                (head.status, head.headers["content-length"].clone()),
                (StatusCode::OK, a.headers["content-length"].clone())
            );
        }
        // Without a mode, it is a regular expression.
        assert_eq!(
            names(&c.get(&format!("{path}&archregx=%5Ee$")).await),
            ["e"]
        );
    }
    for (query, range, status, says) in [
        (
            "archregx=none&archmode=prefix",
            "",
            404,
            "none of the 5 members",
        ),
        ("archregx=(&archmode=regexp", "", 400, "unclosed group"),
        ("archregx=x&archmode=glob", "", 400, "archmode"),
        (
            "archregx=d&archmode=prefix&archpath=e",
            "",
            400,
            "exclude each other",
        ),
        ("archregx=d&archmode=prefix", "bytes=0-9", 501, "range"),
        ("archmode=regexp", "", 413, "batch.max_entries = 4"),
    ] {
        let headers = [("range", range)];
        let headers = if range.is_empty() { &[] } else { &headers[..] };
        let path = format!("/v1/objects/data/s.tar?{query}");
        let a = c.get_with(&path, headers).await;
        assert_eq!(a.status.as_u16(), status, "{query}: {}", a.text());
        let message = a.json()["message"].as_str().unwrap().to_owned();
        assert!(message.contains(says), "{query}: {message}");
    }
    let a = c
        .get("/v1/objects/data/none.tar?archregx=d&archmode=prefix")
        .await;
    assert_eq!(a.status, StatusCode::NOT_FOUND);
    n.write("k", b"no archive");
    let a = c.get("/v1/objects/data/k?archregx=d&archmode=prefix").await;
    assert_eq!(a.status, StatusCode::NOT_IMPLEMENTED, "{}", a.text());
}

#[tokio::test]
async fn members_by_a_pattern_are_of_one_version_or_cut() {
    let n = start(&[]).await;
    let shard = |fill: u8| {
        let member = vec![fill; 10 << 10];
        let names: Vec<String> = (0..4000).map(|i| format!("{i:04}")).collect();
        let members: Vec<_> = names.iter().map(|n| (n.as_str(), &member[..])).collect();
        tar(&members)
    };
    n.write("s.tar", &shard(b'a'));
    let mut reader = tokio::net::TcpStream::connect(n.node.addr().unwrap())
        .await
        .unwrap();
    let request = "GET /v1/objects/data/s.tar?archregx=x*&archmode=regexp HTTP/1.1\r\n\
                   host: 127.0.0.1\r\nconnection: close\r\n\r\n";
    reader.write_all(request.as_bytes()).await.unwrap();
    let mut answer = vec![0; 4096];
    reader.read_exact(&mut answer).await.unwrap();
    // Most of it is still to come when the archive is replaced.
    let mut c = n.client().await;
    let a = c.put("/v1/objects/data/s.tar", &[], shard(b'b')).await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    // A reset is as good as an end here.
    let _ = reader.read_to_end(&mut answer).await;
    let head = answer.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
    let text = String::from_utf8_lossy(&answer[..head]).to_lowercase();
    assert!(text.starts_with("http/1.1 200"), "{text}");
    let entry = 512 + (10 << 10);
    let whole = 4000 * entry + 1024;
    assert!(text.contains(&format!("content-length: {whole}")), "{text}");
    let tar = &answer[head..];
    assert!(tar.len() < whole, "the answer is whole");
    assert!(!tar.contains(&b'b'), "the answer is of two versions");
    // The tar does not end between two members.
    assert!(!tar.len().is_multiple_of(entry));
    let a = c
        .get("/v1/objects/data/s.tar?archregx=0007&archmode=wdskey")
        .await;
    assert!(members(&a.body.unwrap())[0].1.iter().all(|b| *b == b'b'));
}

#[tokio::test]
async fn members_by_a_pattern_are_looked_up_once() {
    let n = start(&[("cache.freshness", "always")]).await;
    let member = vec![1; 100 << 10];
    let called: Vec<String> = (0..200).map(|i| format!("{i:03}")).collect();
    let all: Vec<_> = called.iter().map(|n| (n.as_str(), &member[..])).collect();
    n.write("s.tar", &tar(&all));
    let mut c = n.client().await;
    let path = "/v1/objects/data/s.tar?archmode=prefix";
    assert_eq!(names(&c.get(path).await), called);
    let asked = async || n.metric("forebay_origin_requests_total", "").await;
    let before = asked().await;
    assert_eq!(names(&c.get(path).await), called);
    let more = asked().await - before;
    assert!(more <= 1.0, "the origin was asked {more} times");
}

#[tokio::test]
async fn what_is_written_to_a_directory_tells_its_checksum() {
    let n = start(&[]).await;
    let mut c = n.client().await;
    let path = "/v1/objects/data/k";
    // The check value of CRC-32C.
    let put = c.put(path, &[], "123456789").await;
    assert_eq!(put.header("ais-checksum-type"), "crc32c");
    assert_eq!(put.header("ais-checksum-value"), "e3069283");
    let told = async |c: &mut Client| {
        let head = c.send(Method::HEAD, path, &[], "").await;
        let list = json!({
            "action": "list", "name": "", "value": {"props": "name,checksum", "flags": "0"},
        });
        let list = c
            .send(
                Method::GET,
                "/v1/buckets/data",
                &[("content-type", "application/json")],
                list.to_string(),
            )
            .await;
        let [kind, value] = ["ais-checksum-type", "ais-checksum-value"].map(|h| head.header(h));
        let listed = list.json()["entries"][0]["checksum"].clone();
        (kind.to_owned(), value.to_owned(), listed)
    };
    let sum = "e3069283".to_owned();
    assert_eq!(
        told(&mut c).await,
        ("crc32c".to_owned(), sum.clone(), json!(sum))
    );
    assert_eq!(c.get("/data/k").await.text(), "123456789");
    tokio::time::sleep(Duration::from_millis(20)).await;
    n.write("k", b"by others");
    n.clock.advance(Duration::from_secs(61));
    let (kind, value, listed) = told(&mut c).await;
    assert_eq!((&*kind, &*value), ("none", ""));
    assert!(listed.is_null() || listed == "", "{listed}");
}

async fn patch(c: &mut Client, path: &str, value: Value) -> Answer {
    let message = json!({"action": "", "name": "", "value": value}).to_string();
    c.send(Method::PATCH, path, &[], message).await
}

/// The custom properties that a HEAD returns, sorted.
async fn custom(c: &mut Client, n: &TestNode, path: &str) -> String {
    let head = c
        .send(Method::HEAD, &format!("{path}?props=custom"), &[], "")
        .await;
    assert_eq!(head.status, StatusCode::OK);
    let from_s3 = n
        .client()
        .await
        .send(Method::HEAD, "/data/k", &[], "")
        .await;
    let told = head.headers.get_all("ais-custom-md").iter();
    let told: Vec<&str> = told.map(|v| v.to_str().unwrap()).collect();
    for pair in &told {
        let (name, value) = pair.split_once('=').unwrap();
        assert_eq!(from_s3.header(&format!("x-amz-meta-{name}")), value);
    }
    told.join(",")
}

#[tokio::test]
async fn custom_properties_are_merged_or_replaced() {
    let n = start(&[]).await;
    let path = "/v1/objects/data/k";
    let mut c = n.client().await;
    let headers = [("content-type", "text/plain"), ("x-amz-meta-old", "1")];
    assert_eq!(
        c.put("/data/k", &headers, "the bytes").await.status,
        StatusCode::OK
    );
    // Cached, with the properties that it had.
    assert_eq!(c.get("/data/k").await.text(), "the bytes");
    assert_eq!(custom(&mut c, &n, path).await, "old=1");
    let a = patch(&mut c, path, json!({"Label": "cat", "run": "7 of=9"})).await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    assert_eq!(custom(&mut c, &n, path).await, "label=cat,old=1,run=7 of=9");
    let a = patch(&mut c, path, json!({"label": "dog"})).await;
    assert_eq!(a.status, StatusCode::OK);
    assert_eq!(custom(&mut c, &n, path).await, "label=dog,old=1,run=7 of=9");
    // A change that changes nothing writes nothing.
    let etag = c.get("/data/k").await.header("etag").to_owned();
    assert_eq!(patch(&mut c, path, json!({})).await.status, StatusCode::OK);
    let a = patch(&mut c, path, json!({"label": "dog"})).await;
    assert_eq!(a.status, StatusCode::OK);
    assert_eq!(c.get("/data/k").await.header("etag"), etag);
    let new = format!("{path}?provider=ais&set-new-custom=true");
    assert_eq!(
        patch(&mut c, &new, json!({"only": "x"})).await.status,
        StatusCode::OK
    );
    assert_eq!(custom(&mut c, &n, path).await, "only=x");
    assert_eq!(patch(&mut c, &new, json!({})).await.status, StatusCode::OK);
    assert_eq!(custom(&mut c, &n, path).await, "");
    let a = c.get("/data/k").await;
    assert_eq!(
        (a.text().as_str(), a.header("content-type")),
        ("the bytes", "text/plain")
    );
    for (path, value, status) in [
        (path, json!({"a": "x,y"}), 400),
        (path, json!({"a b": "x"}), 400),
        (path, json!("x"), 400),
        (path, json!({"a": "x".repeat(3000)}), 400),
        ("/v1/objects/data/none", json!({"a": "x"}), 404),
        ("/v1/objects/data/k?archpath=m", json!({"a": "x"}), 501),
    ] {
        let a = patch(&mut c, path, value.clone()).await;
        assert_eq!(a.status.as_u16(), status, "{path} {value}: {}", a.text());
    }
    let rename = r#"{"action": "rename-obj", "name": "x"}"#;
    let a = c.send(Method::PATCH, path, &[], rename).await;
    assert!(a.status == StatusCode::NOT_IMPLEMENTED && a.text().contains("rename-obj"));
    assert_eq!(custom(&mut c, &n, path).await, "");
}

#[tokio::test]
async fn custom_properties_need_read_and_write() {
    let grants = ["read", "write", "read\", \"write"].map(|actions| {
        format!(
            "{{token = \"{}\", allow = [{{bucket = \"data\", actions = [\"{actions}\"]}}]}}",
            actions.len()
        )
    });
    let n = start(&[("auth.keys", &format!("[{}]", grants.join(", ")))]).await;
    n.write("k", b"object");
    let mut c = n.client().await;
    for (token, status) in [("4", 403), ("5", 403), ("13", 200)] {
        let bearer = format!("Bearer {token}");
        let body = r#"{"value": {"a": "1"}}"#;
        let headers = [("authorization", bearer.as_str())];
        let a = c
            .send(Method::PATCH, "/v1/objects/data/k", &headers, body)
            .await;
        assert_eq!(a.status.as_u16(), status, "{token}: {}", a.text());
    }
}

#[tokio::test]
async fn setting_properties_does_not_lose_the_bytes_of_another_writer() {
    let n = start(&[]).await;
    let path = "/v1/objects/data/k";
    let (mut writer, mut setter) = (n.client().await, n.client().await);
    let content = |round: u8| vec![round; 2 << 20];
    assert_eq!(
        writer.put(path, &[], content(0)).await.status,
        StatusCode::OK
    );
    for round in 1..=40 {
        let put = async {
            // At varying times while the properties are being set.
            tokio::time::sleep(Duration::from_micros(u64::from(round) * 200)).await;
            writer.put(path, &[], content(round)).await
        };
        let value = json!({"round": round.to_string()});
        let (put, set) = tokio::join!(put, patch(&mut setter, path, value));
        assert_eq!(put.status, StatusCode::OK, "{}", put.text());
        assert_eq!(set.status, StatusCode::OK, "{}", set.text());
        let now = writer.get(path).await.body.unwrap();
        assert!(
            now == content(round),
            "round {round}: these are bytes of {}",
            now[0]
        );
    }
}

#[tokio::test]
async fn an_origin_that_keeps_no_properties_says_so() {
    let server = Scripted::start(|_, _| {
        Reply::new(200, "the bytes")
            .header("ETag", "\"1\"")
            .header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let overrides = [
        Override::origins(&[format!("data={}/files", server.address())], "test").unwrap(),
        Override::cache(&[format!("{}/cache:64MiB", dir.path().display())], "test").unwrap(),
        Override::text("listen.s3", "127.0.0.1:0", "test").unwrap(),
        Override::text("listen.admin", "127.0.0.1:0", "test").unwrap(),
    ];
    let config = Config::load(None, [], &overrides).unwrap();
    let clock = ManualClock::at(Duration::from_secs(1_800_000_000));
    let node = Node::start_with(config, Arc::new(clock)).await.unwrap();
    let mut c = Client::tcp(node.addr().unwrap()).await;
    assert_eq!(c.get("/v1/objects/data/k").await.text(), "the bytes");
    let a = patch(&mut c, "/v1/objects/data/k", json!({"a": "1"})).await;
    assert!(
        a.status == StatusCode::NOT_IMPLEMENTED && a.text().contains("read-only"),
        "{} {}",
        a.status,
        a.text()
    );
}

#[tokio::test]
async fn the_number_of_a_part_is_taken_as_it_is() {
    let n = start(&[]).await;
    let mut c = n.client().await;
    let object = "/v1/objects/data/up";
    let begin = json!({"action": "mpt-upload"}).to_string();
    let begun = c.send(Method::POST, object, &[], begin).await;
    assert_eq!(begun.status, StatusCode::OK, "{}", begun.text());
    let id = begun.text();
    let part = format!("{object}?uploadId={id}&partNumber=1");
    let sent = c.put(&part, &[], "content").await;
    assert_eq!(sent.status, StatusCode::OK, "{}", sent.text());
    let end = format!("{object}?uploadId={id}");
    // 2^32 + 1 is not 1.
    for (number, status) in [(4_294_967_297_u64, 400), (2, 400), (1, 200)] {
        let value = json!([{"part-number": number, "etag": ""}]);
        let body = json!({"action": "mpt-complete", "value": value}).to_string();
        let a = c.send(Method::POST, &end, &[], body).await;
        assert_eq!(a.status.as_u16(), status, "{number}: {}", a.text());
        assert_eq!(n.file("up").exists(), status == 200);
    }
    // Who missed the answer asks again, and is answered as before; not about other parts.
    for (number, status) in [(1, 200), (2, 404)] {
        let value = json!([{"part-number": number, "etag": ""}]);
        let body = json!({"action": "mpt-complete", "value": value}).to_string();
        let a = c.send(Method::POST, &end, &[], body).await;
        assert_eq!(a.status.as_u16(), status, "{number}: {}", a.text());
    }
}

/// Clients name parts by their numbers: the origin knows what came through another node.
#[tokio::test]
async fn an_upload_is_completed_by_numbers_though_parts_came_through_another_node() {
    let one = start(&[]).await;
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(one.dir.path().join("data"), dir.path().join("data")).unwrap();
    let other = start_in(dir, &[]).await;
    let (mut c, mut d) = (one.client().await, other.client().await);
    let object = "/v1/objects/data/up";
    let begin = json!({"action": "mpt-upload"}).to_string();
    let id = c.send(Method::POST, object, &[], begin).await.text();
    let end = format!("{object}?uploadId={id}");
    // The first comes again, through the other node.
    for (number, by_other, bytes) in [(1, false, "other"), (2, true, "two"), (1, true, "one ")] {
        let client = if by_other { &mut d } else { &mut c };
        let sent = client
            .put(&format!("{end}&partNumber={number}"), &[], bytes)
            .await;
        assert_eq!(sent.status, StatusCode::OK, "{}", sent.text());
    }
    let complete = |numbers: &[u32]| {
        let value: Vec<_> = numbers
            .iter()
            .map(|n| json!({"part-number": n, "etag": ""}))
            .collect();
        json!({"action": "mpt-complete", "value": value}).to_string()
    };
    let a = d.send(Method::POST, &end, &[], complete(&[1, 2, 3])).await;
    assert_eq!(a.status, StatusCode::BAD_REQUEST, "{}", a.text());
    let a = c.send(Method::POST, &end, &[], complete(&[1, 2])).await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    assert_eq!(std::fs::read(one.file("up")).unwrap(), b"one two");
    let a = d.send(Method::POST, &end, &[], complete(&[1, 2])).await;
    assert_eq!(a.status, StatusCode::NOT_FOUND, "{}", a.text());
}
