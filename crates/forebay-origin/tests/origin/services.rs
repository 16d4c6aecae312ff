//! Answers that real services cannot be made to give: lost answers, half-kept uploads, objects
//! without versions.

use bytes::Bytes;
use forebay_core::ErrorKind;
use forebay_origin::{
    ForwardBody, ForwardRequest, GetRequest, OriginConfig, Origins, PartsPage, PutCondition,
    PutRequest, Secret, UploadedPart, body, open,
};
use forebay_testing::{Reply, Scripted, conformance::pattern};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method,
    header::{CONTENT_DISPOSITION, IF_MATCH, IF_NONE_MATCH},
};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

/// Longer than this machine is busy with something else.
const IDLE: Duration = Duration::from_secs(3);

fn config(url: &str, endpoint: &Scripted) -> OriginConfig {
    OriginConfig {
        url: url.into(),
        endpoint: Some(endpoint.address()),
        anonymous: true,
        account: url.starts_with("az:").then(|| "account".into()),
        idle_timeout: IDLE,
        ..Default::default()
    }
}

/// A fake Google that keeps what a session sends it, with the troubles of `script` in the order of
/// the requests that bring bytes.
async fn google(script: &'static [&'static str]) -> (Scripted, Arc<Mutex<Vec<u8>>>) {
    let kept = Arc::new(Mutex::new(Vec::<u8>::new()));
    let (store, made) = (kept.clone(), AtomicBool::new(false));
    let step = Mutex::new(script.iter());
    let address = Arc::new(Mutex::new(String::new()));
    let own = address.clone();
    let server = Scripted::start(move |request, _| {
        let object = || Reply::new(200, r#"{"generation":"7"}"#);
        if request.method == "POST" {
            let session = format!("{}/session", own.lock().unwrap());
            return Reply::new(200, "").header("Location", session);
        }
        if request.method != "PUT" {
            return Reply::new(499, "");
        }
        let mut kept = store.lock().unwrap();
        let so_far = |kept: &Vec<u8>| match kept.len() {
            0 => Reply::new(308, ""),
            n => Reply::new(308, "").header("Range", format!("bytes=0-{}", n - 1)),
        };
        let range = request.header("content-range").unwrap().to_owned();
        let (at, total) = range
            .strip_prefix("bytes ")
            .unwrap()
            .split_once('/')
            .unwrap();
        let sent = request.body.as_bytes();
        let trouble = if sent.is_empty() {
            None
        } else {
            step.lock().unwrap().next().copied()
        };
        if trouble == Some("503") {
            return Reply::new(503, "");
        }
        if trouble == Some("silence") {
            return Reply::never();
        }
        let begin = at.split('-').next().unwrap().parse::<usize>();
        if let Ok(begin) = begin {
            assert_eq!(begin, kept.len(), "only what is missing is sent");
        }
        let take = match trouble {
            Some("half") => (sent.len() / 2) >> 18 << 18,
            Some("nothing") => 0,
            _ => sent.len(),
        };
        kept.extend_from_slice(&sent[..take]);
        if total.parse() == Ok(kept.len()) {
            made.store(true, Relaxed);
        }
        match (trouble, made.load(Relaxed)) {
            (Some("lost"), _) => Reply::new(502, ""),
            (_, true) => object(),
            _ => so_far(&kept),
        }
    })
    .await;
    *address.lock().unwrap() = server.address();
    (server, kept)
}

#[tokio::test]
async fn a_long_body_for_google_continues_from_what_was_kept() {
    let content = text(20 << 20);
    for script in [
        &["503"][..],
        &["ok", "half", "503", "nothing", "half"],
        // The answer to the last piece is lost: the object was made.
        &["ok", "lost", "ok", "lost"],
        &["silence", "ok", "silence"],
    ] {
        let (server, kept) = google(script).await;
        let origin = open(&config("gs://bucket", &server)).unwrap();
        let done = origin
            .put(
                "k",
                PutRequest::default(),
                None,
                body::from_bytes(content.clone()),
            )
            .await
            .unwrap();
        assert_eq!(done.etag.as_deref(), Some("\"7\""));
        assert!(*kept.lock().unwrap() == content, "{script:?}");
    }
}

#[tokio::test]
async fn a_session_at_google_is_cancelled_when_its_writer_fails_or_goes_away() {
    let (server, _) = google(&["503"; 100]).await;
    let origin = open(&config("gs://bucket", &server)).unwrap();
    let put = || {
        let body = body::from_bytes(text(9 << 20));
        origin.put("k", PutRequest::default(), None, body)
    };
    let e = put().await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OriginUnavailable, "{e}");
    let deleted = || {
        let requests = server.requests();
        requests.iter().filter(|r| r.method == "DELETE").count()
    };
    assert_eq!(deleted(), 1);
    let pieces = || {
        let requests = server.requests();
        requests.iter().filter(|r| r.method == "PUT").count()
    };
    // It goes away while its bytes are sent again and again.
    let before = pieces();
    let is_sending = async {
        while pieces() == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        gone = put() => assert!(gone.is_err()),
        () = is_sending => {}
    }
    let begun = Instant::now();
    while deleted() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Services that read numbers of 63 bits ignore a range with a larger one.
#[tokio::test]
async fn a_range_past_the_end_is_one_also_where_the_service_sends_the_whole_object() {
    let server = Scripted::start(|_, _| Reply::new(200, "hello").header("ETag", "\"1\"")).await;
    for url in ["s3://bucket", "az://container"] {
        let origin = open(&config(url, &server)).unwrap();
        for range in [5..9, u64::MAX - 1..u64::MAX, u64::MAX..u64::MAX] {
            let request = GetRequest {
                range: Some(range.clone()),
                ..Default::default()
            };
            let kind = origin.get("k", request).await.err().map(|e| e.kind());
            let expected = Some(ErrorKind::RangeNotSatisfiable);
            assert_eq!(kind, expected, "{url}: {range:?}");
        }
    }
}

#[tokio::test]
async fn a_completion_at_azure_can_be_repeated() {
    let server = Scripted::start(|_, number| match number {
        1 => Reply::new(500, "").header("x-ms-error-code", "InternalError"),
        _ => Reply::new(201, "").header("ETag", "\"1\""),
    })
    .await;
    let origin = open(&config("az://container", &server)).unwrap();
    let id = origin
        .create_upload("k", PutRequest::default())
        .await
        .unwrap();
    let part = origin.upload_part("k", &id, 1, 3, body::from_bytes("one".into()));
    let part = part.await.unwrap();
    let block = part.etag.trim_matches('"').to_owned();
    let done = origin.complete_upload("k", &id, vec![part], PutCondition::Always);
    done.await.unwrap();
    let requests = server.requests();
    assert_eq!(requests.len(), 3);
    // A committed block is no longer an uncommitted one.
    let list = format!("<BlockList><Latest>{block}</Latest></BlockList>");
    assert!(requests[2].body.ends_with(&list), "{}", requests[2].body);
}

#[tokio::test]
async fn parts_with_each_others_etags_are_refused_at_azure() {
    let server = Scripted::start(|_, _| Reply::new(201, "").header("ETag", "\"1\"")).await;
    let origin = open(&config("az://container", &server)).unwrap();
    let (mut ids, mut parts) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let id = origin.create_upload("k", PutRequest::default()).await;
        let id = id.unwrap();
        for number in [1, 2] {
            let part = body::from_bytes("x".into());
            let part = origin.upload_part("k", &id, number, 1, part).await;
            parts.push(part.unwrap());
        }
        ids.push(id);
    }
    let complete = async |etags: [usize; 2]| {
        let listed = etags.iter().zip(1..).map(|(&of, number)| UploadedPart {
            number,
            ..parts[of].clone()
        });
        let listed = listed.collect();
        let done = origin.complete_upload("k", &ids[0], listed, PutCondition::Always);
        done.await.map(drop).map_err(|e| e.kind())
    };
    // In each other's place, and of another upload.
    for etags in [[1, 0], [0, 3]] {
        assert_eq!(complete(etags).await, Err(ErrorKind::Invalid));
    }
    assert_eq!(complete([0, 1]).await, Ok(()));
}

#[tokio::test]
async fn parts_that_were_sent_twice_to_azure_are_not_listed() {
    let committed = Arc::new(AtomicBool::new(false));
    let ended = committed.clone();
    let kept = Mutex::new(Vec::<String>::new());
    let server = Scripted::start(move |request, _| {
        let mut kept = kept.lock().unwrap();
        if request.method == "PUT" {
            let (_, block) = request.path.split_once("blockid=").unwrap();
            kept.push(
                block
                    .replace("%3D", "=")
                    .replace("%2B", "+")
                    .replace("%2F", "/"),
            );
            return Reply::new(201, "");
        }
        if kept.is_empty() {
            return Reply::new(404, "").header("x-ms-error-code", "BlobNotFound");
        }
        let blocks: String = kept
            .iter()
            .map(|b| format!("<Block><Name>{b}</Name><Size>1</Size></Block>"))
            .collect();
        let (done, waiting) = match ended.load(Relaxed) {
            true => (&*blocks, ""),
            false => ("", &*blocks),
        };
        Reply::new(
            200,
            format!(
                "<BlockList><CommittedBlocks>{done}</CommittedBlocks>\
                 <UncommittedBlocks>{waiting}</UncommittedBlocks></BlockList>"
            ),
        )
    })
    .await;
    let origin = open(&config("az://container", &server)).unwrap();
    let id = origin.create_upload("k", PutRequest::default()).await;
    let id = id.unwrap();
    let listed = async || origin.list_parts("k", &id, 0, 10).await;
    assert_eq!(listed().await.unwrap(), PartsPage::default());
    let mut parts = Vec::new();
    for number in [1, 3, 2, 3] {
        let part = origin.upload_part("k", &id, number, 1, body::from_bytes("x".into()));
        parts.push(part.await.unwrap());
    }
    let page = listed().await.unwrap();
    let found: Vec<_> = page.parts.into_iter().map(|p| p.part).collect();
    assert_eq!(found, [parts[0].clone(), parts[2].clone()]);
    // Another upload of the object has none of these.
    let other = origin.create_upload("k", PutRequest::default()).await;
    let other = origin.list_parts("k", &other.unwrap(), 0, 10).await;
    assert_eq!(other.unwrap(), PartsPage::default());
    committed.store(true, Relaxed);
    assert_eq!(listed().await.unwrap_err().kind(), ErrorKind::NotFound);
}

/// As after a restart, nobody knows the sizes of the parts.
#[tokio::test]
async fn a_completion_whose_answer_is_lost_is_known_by_the_etags_of_its_parts() {
    let part = |number, etag: &str| UploadedPart {
        number,
        etag: etag.into(),
        size: None,
    };
    let parts = vec![
        part(1, "\"0cc175b9c0f1b6a831c399e269772661\""),
        part(2, "\"92eb5ffee6ae2fec3ad71c777531578f\""),
    ];
    let made = "\"96e024ba2074fe77e8e965ba43a704be-2\"";
    let other = "\"96e024ba2074fe77e8e965ba43a704be-3\"";
    let unknown = Err(ErrorKind::OriginUnavailable);
    for (there, expected) in [
        (Some(made), Ok(Some(made.to_owned()))),
        (Some(other), unknown),
        (None, Err(ErrorKind::NotFound)),
    ] {
        let server = Scripted::start(move |request, number| match (&*request.method, there) {
            ("HEAD", Some(etag)) => Reply::new(200, "ab").header("ETag", etag),
            ("POST", _) if number == 0 => Reply::new(500, ""),
            _ => Reply::new(404, ""),
        })
        .await;
        let origin = open(&config("s3://bucket", &server)).unwrap();
        let done = origin.complete_upload("k", "id", parts.clone(), PutCondition::Always);
        let done = done.await.map(|put| put.etag).map_err(|e| e.kind());
        assert_eq!(done, expected);
    }
}

/// With KMS, ETags of parts are no MD5s.
#[tokio::test]
async fn a_completion_of_an_empty_part_whose_answer_is_lost_is_known_by_the_size() {
    let made = Ok(Some("\"made\"".to_owned()));
    let unknown = Err(ErrorKind::OriginUnavailable);
    for (size, expected) in [(Some(0), made), (None, unknown)] {
        let server = Scripted::start(|request, number| match &*request.method {
            "HEAD" => Reply::new(200, "").header("ETag", "\"made\""),
            "POST" if number == 0 => Reply::new(500, ""),
            _ => Reply::new(404, ""),
        })
        .await;
        let origin = open(&config("s3://bucket", &server)).unwrap();
        let part = UploadedPart {
            number: 1,
            etag: "\"kms\"".into(),
            size,
        };
        let done = origin.complete_upload("k", "id", vec![part], PutCondition::Always);
        let done = done.await.map(|put| put.etag).map_err(|e| e.kind());
        assert_eq!(done, expected);
    }
}

/// As of services that take long and keep the connection alive meanwhile.
#[tokio::test]
async fn an_error_in_an_answer_of_success_is_what_it_says() {
    for (code, kind) in [
        ("EntityTooSmall", ErrorKind::TooSmall),
        ("InvalidPart", ErrorKind::Invalid),
        ("NoSuchUpload", ErrorKind::NotFound),
        ("PreconditionFailed", ErrorKind::PreconditionFailed),
    ] {
        let server = Scripted::start(move |_, _| {
            let error = format!("<Error><Code>{code}</Code></Error>");
            Reply::new(200, format!("<?xml version=\"1.0\"?>\n  {error}"))
        })
        .await;
        let origin = open(&config("s3://bucket", &server)).unwrap();
        let part = UploadedPart {
            number: 1,
            etag: "\"p\"".into(),
            size: Some(2),
        };
        let done = origin.complete_upload("k", "id", vec![part], PutCondition::Always);
        assert_eq!(done.await.map_err(|e| e.kind()).err(), Some(kind), "{code}");
    }
}

#[tokio::test]
async fn an_upload_that_has_ended_is_no_condition_that_does_not_hold() {
    for (is_there, kind) in [
        (true, ErrorKind::NotFound),
        (false, ErrorKind::PreconditionFailed),
    ] {
        let server = Scripted::start(move |request, _| match (&*request.method, is_there) {
            ("HEAD", true) => Reply::new(200, "ab").header("ETag", "\"v\""),
            _ => Reply::new(404, ""),
        })
        .await;
        let origin = open(&config("s3://bucket", &server)).unwrap();
        let part = UploadedPart {
            number: 1,
            etag: "\"p\"".into(),
            size: Some(2),
        };
        let condition = PutCondition::IfMatch("\"v\"".into());
        let done = origin.complete_upload("k", "id", vec![part], condition);
        assert_eq!(done.await.map_err(|e| e.kind()).err(), Some(kind));
    }
}

#[tokio::test]
async fn a_body_whose_version_has_no_name_is_not_continued() {
    for (etag, continued) in [(None, false), (Some("\"v\""), true)] {
        let server = Scripted::start(move |request, number| {
            let reply = if number == 0 {
                Reply::new(200, text(50)).promise(100)
            } else {
                assert_eq!(request.header("range"), Some("bytes=50-99"));
                Reply::new(206, text(50)).header("Content-Range", "bytes 50-99/100")
            };
            match etag {
                Some(etag) => reply.header("ETag", etag),
                None => reply,
            }
        })
        .await;
        let config = OriginConfig::for_url(&format!("{}/dir/", server.address())).unwrap();
        let answer = open(&config)
            .unwrap()
            .get("k", GetRequest::default())
            .await
            .unwrap();
        let read = body::collect(answer.body, 1000).await;
        assert_eq!(read.is_ok(), continued, "{read:?}");
        assert_eq!(server.requests().len(), if continued { 2 } else { 1 });
    }
}

#[tokio::test]
async fn a_paced_or_slow_body_is_not_the_services_silence() {
    use futures::{StreamExt, stream};
    let server = Scripted::start(|_, _| Reply::new(200, "").header("ETag", "\"1\"")).await;
    let origin = open(&config("s3://bucket", &server)).unwrap();
    // Pieces that come later than the idle timeout, for a part that is streamed.
    let pieces = stream::iter(0..3).then(|_| async {
        tokio::time::sleep(IDLE + IDLE / 6).await;
        Ok(text(3 << 20))
    });
    let sent = origin
        .upload_part("k", "id", 1, 9 << 20, pieces.boxed())
        .await
        .unwrap();
    assert_eq!(sent.size, Some(9 << 20));
}

#[tokio::test]
async fn buckets_behind_one_address_share_its_circuit() {
    // Within the second after which the next one would be tried.
    for _ in 0..5 {
        if they_share_a_circuit().await {
            return;
        }
    }
    panic!("requests are not refused at once");
}

/// `false`: that took so long that one may have been tried.
async fn they_share_a_circuit() -> bool {
    let stalled = Arc::new(AtomicBool::new(true));
    let state = stalled.clone();
    let server = Scripted::start(move |_, _| match state.load(Relaxed) {
        true => Reply::never(),
        false => Reply::new(404, "<Error><Code>NoSuchKey</Code></Error>"),
    })
    .await;
    let mut origins = Origins::new();
    for name in ["one", "two"] {
        let once = OriginConfig {
            attempts: 1,
            ..config(&format!("s3://{name}"), &server)
        };
        origins.add_config(name, &once).unwrap();
    }
    let once = OriginConfig {
        attempts: 1,
        ..config("s3://", &server)
    };
    origins.add_config("*", &once).unwrap();
    let get = async |bucket: &str| origins.get(bucket).unwrap().head("k").await.unwrap_err();
    let begun = Instant::now();
    assert_eq!(get("one").await.kind(), ErrorKind::Timeout);
    let asked = server.requests().len();
    let mut refused = Vec::new();
    for bucket in ["one", "two", "three", "four"] {
        refused.push(get(bucket).await);
    }
    if begun.elapsed() >= IDLE + Duration::from_millis(900) {
        return false;
    }
    for e in refused {
        assert_eq!(e.kind(), ErrorKind::Timeout);
        assert!(e.message().contains("not asked"), "{e}");
    }
    assert_eq!(server.requests().len(), asked, "no further timeouts");
    assert!(origins.stats().iter().all(|(_, s)| s.circuits_open == 1));
    stalled.store(false, Relaxed);
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(get("two").await.kind(), ErrorKind::NotFound);
    assert_eq!(get("four").await.kind(), ErrorKind::NotFound);
    assert!(origins.stats().iter().all(|(_, s)| s.circuits_open == 0));
    true
}

#[tokio::test]
async fn a_copy_that_is_too_large_is_known_by_its_size() {
    for (size, kind) in [
        (6u64 << 30, ErrorKind::Unsupported),
        (5, ErrorKind::Invalid),
    ] {
        let server = Scripted::start(move |request, _| match request.method.as_str() {
            "HEAD" => Reply::new(200, "")
                .promise(size as usize)
                .header("ETag", "\"1\""),
            _ => Reply::new(400, "<Error><Code>InvalidRequest</Code></Error>"),
        })
        .await;
        let origin = open(&config("s3://bucket", &server)).unwrap();
        let e = origin.copy("a", None, "b", PutRequest::default()).await;
        assert_eq!(e.unwrap_err().kind(), kind);
    }
}

/// A request that is passed on as it is, with a body that can be sent again.
fn tagging() -> ForwardRequest {
    ForwardRequest {
        method: Method::PUT,
        key: "key".into(),
        query: vec![("tagging".into(), String::new())],
        headers: HeaderMap::new(),
        body: ForwardBody::Bytes("<Tagging/>".into()),
    }
}

#[tokio::test]
async fn an_answer_that_says_later_holds_no_place_for_which_the_next_attempt_waits() {
    const LATER: &str = "<Error><Code>SlowDown</Code></Error>";
    for (later, status) in [(1, 200), (9, 503)] {
        let server = Scripted::start(move |_, number| match number < later {
            true => Reply::new(503, LATER),
            false => Reply::new(200, ""),
        })
        .await;
        // One place for reads, and one for writes.
        let origin = open(&OriginConfig {
            requests_in_flight: 1,
            attempts: 3,
            ..config("s3://bucket", &server)
        })
        .unwrap();
        let begun = Instant::now();
        let answer = origin.forward(tagging()).await.unwrap();
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "it waited for a place"
        );
        assert_eq!(answer.status.as_u16(), status);
        let document = body::collect(answer.body, 1000).await.unwrap();
        assert_eq!(document, if status == 200 { "" } else { LATER });
        assert_eq!(server.requests().len(), if status == 200 { 2 } else { 3 });
    }
}

#[tokio::test]
async fn a_forwarded_request_waits_as_long_as_the_service_says() {
    let server = Scripted::start(|_, number| match number {
        0 => Reply::new(503, "").header("Retry-After", "1"),
        _ => Reply::new(200, ""),
    })
    .await;
    let origin = open(&config("s3://bucket", &server)).unwrap();
    let begun = Instant::now();
    assert_eq!(origin.forward(tagging()).await.unwrap().status, 200);
    // The longest pause of its own would have been a tenth of that.
    assert!(
        begun.elapsed() >= Duration::from_secs(1),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(server.requests().len(), 2);
}

#[tokio::test]
async fn a_forwarded_header_that_is_no_text_is_refused() {
    let server = Scripted::start(|_, _| Reply::new(200, "")).await;
    let signed = OriginConfig {
        anonymous: false,
        region: Some("us-east-1".into()),
        access_key_id: Some("key".into()),
        secret_access_key: Some(Secret::new("secret")),
        ..config("s3://bucket", &server)
    };
    let origin = open(&signed).unwrap();
    for (value, kind) in [
        (&b"M\xfcller"[..], Some(ErrorKind::Invalid)),
        ("Müller".as_bytes(), None),
    ] {
        let value = HeaderValue::from_bytes(value).unwrap();
        let request = ForwardRequest {
            method: Method::PUT,
            key: "k".into(),
            query: Vec::new(),
            headers: HeaderMap::from_iter([(CONTENT_DISPOSITION, value)]),
            body: ForwardBody::Empty,
        };
        let sent = origin.forward(request).await;
        assert_eq!(sent.err().map(|e| e.kind()), kind);
    }
}

/// If the first attempt was carried out, a second one would find the object too long.
#[tokio::test]
async fn a_forwarded_append_is_sent_once() {
    let server = Scripted::start(|_, _| Reply::new(503, "")).await;
    let origin = open(&config("s3://bucket", &server)).unwrap();
    let mut request = tagging();
    request.query.clear();
    let offset = "5".parse().unwrap();
    request.headers.insert("x-amz-write-offset-bytes", offset);
    assert_eq!(origin.forward(request).await.unwrap().status, 503);
    assert_eq!(server.requests().len(), 1);
}

/// A service that closes the connection of each write as soon as it has its head: to whoever sends the
/// body, that is a service whose early answer was lost. `etag` is of the object that is there, which is
/// an hour old if `is_old`, or else of an age that it does not tell.
async fn hasty(etag: Option<&'static str>, is_old: bool) -> OriginConfig {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let (mut request, mut buffer) = (Vec::new(), [0; 4096]);
            while !request.windows(4).any(|w| w == b"\r\n\r\n") {
                match socket.read(&mut buffer).await {
                    Ok(n) if n > 0 => request.extend_from_slice(&buffer[..n]),
                    _ => break,
                }
            }
            if request.starts_with(b"HEAD ") {
                let head = match etag {
                    Some(etag) => format!("200 OK\r\ncontent-length: 5\r\netag: {etag}"),
                    None => "404 Not Found\r\ncontent-length: 0".to_owned(),
                };
                let dates = match is_old {
                    true => {
                        "\r\nlast-modified: Mon, 03 Mar 2025 10:00:00 GMT\
                         \r\ndate: Mon, 03 Mar 2025 11:00:00 GMT"
                    }
                    false => "",
                };
                let answer = format!("HTTP/1.1 {head}{dates}\r\nconnection: close\r\n\r\n");
                let _ = socket.write_all(answer.as_bytes()).await;
                let _ = socket.shutdown().await;
            }
        }
    });
    OriginConfig {
        url: "s3://bucket".into(),
        endpoint: Some(format!("http://{address}")),
        anonymous: true,
        attempts: 1,
        ..Default::default()
    }
}

#[tokio::test]
async fn a_conditional_write_that_is_refused_early_is_told_as_refused() {
    use ErrorKind::{NotFound, OriginUnavailable, PreconditionFailed};
    let (there, other) = ("\"a\"", "\"b\"");
    // More than the buffers of a connection take.
    let content = text(32 << 20);
    let forwarded: [(HeaderName, &'static str, Option<&'static str>, ErrorKind); 8] = [
        (IF_NONE_MATCH, "*", Some(there), PreconditionFailed),
        (IF_NONE_MATCH, "*", None, OriginUnavailable),
        (IF_NONE_MATCH, other, Some(there), OriginUnavailable),
        (IF_MATCH, other, Some(there), PreconditionFailed),
        (IF_MATCH, there, Some(there), OriginUnavailable),
        (IF_MATCH, "a", Some(there), OriginUnavailable),
        (IF_MATCH, there, None, NotFound),
        (CONTENT_DISPOSITION, "*", Some(there), OriginUnavailable),
    ];
    for (name, value, etag, kind) in forwarded {
        let origin = open(&hasty(etag, false).await).unwrap();
        let request = ForwardRequest {
            method: Method::PUT,
            key: "k".into(),
            query: Vec::new(),
            headers: HeaderMap::from_iter([(name.clone(), HeaderValue::from_static(value))]),
            body: ForwardBody::Bytes(content.clone()),
        };
        let sent = origin.forward(request).await.err().map(|e| e.kind());
        assert_eq!(sent, Some(kind), "{name}: {value} on {etag:?}");
    }
    for (condition, etag, kind) in [
        (PutCondition::IfAbsent, Some(there), PreconditionFailed),
        (PutCondition::IfAbsent, None, OriginUnavailable),
        (
            PutCondition::IfMatch(other.into()),
            Some(there),
            PreconditionFailed,
        ),
        (
            PutCondition::IfMatch(other.into()),
            None,
            PreconditionFailed,
        ),
        (PutCondition::Always, Some(there), OriginUnavailable),
    ] {
        let origin = open(&hasty(etag, false).await).unwrap();
        let request = PutRequest {
            condition: condition.clone(),
            ..PutRequest::default()
        };
        let length = 8 << 20;
        let body = body::from_bytes(content.slice(..length));
        let put = origin.put("k", request, Some(length as u64), body).await;
        let told = put.err().map(|e| e.kind());
        assert_eq!(told, Some(kind), "{condition:?} on {etag:?}");
    }
    // All of it was on its way: only an object from before cannot be what was written.
    for (is_old, kind) in [(true, PreconditionFailed), (false, OriginUnavailable)] {
        let origin = open(&hasty(Some(there), is_old).await).unwrap();
        let request = PutRequest {
            condition: PutCondition::IfAbsent,
            ..PutRequest::default()
        };
        let length = 100 << 10;
        let body = body::from_bytes(content.slice(..length));
        let put = origin.put("k", request, Some(length as u64), body).await;
        assert_eq!(put.err().map(|e| e.kind()), Some(kind), "{is_old}");
    }
    // What an upload makes is as old as its beginning: its age does not tell whether it was made.
    let part = |number| UploadedPart {
        number,
        etag: "\"0123456789abcdef0123456789abcdef\"".into(),
        size: Some(5 << 20),
    };
    let parts: Vec<_> = (1..=1000).map(part).collect();
    let origin = open(&hasty(Some(there), true).await).unwrap();
    let made = origin.complete_upload("k", "id", parts, PutCondition::IfAbsent);
    let told = made.await.err().map(|e| e.kind());
    assert_eq!(told, Some(OriginUnavailable));
    let origin = open(&hasty(Some(there), true).await).unwrap();
    let request = ForwardRequest {
        method: Method::POST,
        key: "k".into(),
        query: vec![("uploadId".into(), "id".into())],
        headers: HeaderMap::from_iter([(IF_NONE_MATCH, HeaderValue::from_static("*"))]),
        body: ForwardBody::Bytes(content.slice(..100 << 10)),
    };
    let told = origin.forward(request).await.err().map(|e| e.kind());
    assert_eq!(told, Some(OriginUnavailable));
}

/// Bytes that are letters, so that they look the same as text.
fn text(length: usize) -> Bytes {
    pattern(length).iter().map(|b| b'a' + b % 26).collect()
}
