//! The client against nodes that are down, silent, not nodes at all, or that answer what no node
//! answers. (Tests from Python and the command line cover what a healthy node says, with a real
//! one.)

use bytes::Bytes;
use forebay_client::{Call, Client, Failure, Lines, Settings, StartNode, Timeouts};
use forebay_core::{Error, ErrorKind};
use forebay_protocol::{
    Address,
    node::{NodeInfo, host_id},
};
use forebay_tls::{Identity, ServerTls};
use futures::{StreamExt, future::BoxFuture};
use http::{HeaderName, Method, StatusCode};
use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpSocket, UnixListener},
    time::timeout,
};

/// Short, so that its tests do not take long.
const QUICK: Duration = Duration::from_millis(300);

fn settings(address: &str) -> Settings {
    Settings::new(Address::parse(address).unwrap(), "test/0")
}

fn client(address: &str) -> Client {
    Client::new(settings(address)).unwrap()
}

fn get(path: &str) -> Call {
    Call::new(Method::GET, path)
}

async fn failure(client: &Client, path: &str) -> Failure {
    match timeout(Duration::from_secs(20), client.call(&get(path)))
        .await
        .expect("an end")
    {
        Ok(answer) => panic!("{} for {path}", answer.status),
        Err(failure) => failure,
    }
}

/// The head of a request, with what arrived of its body; `None` if the connection ends.
async fn head(io: &mut (impl AsyncRead + Unpin)) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(io.read_u8().await.ok()?);
    }
    Some(String::from_utf8(head).unwrap())
}

/// Answers each request of a connection with what `answer` makes of its head. An empty answer sends
/// nothing and ends the connection.
async fn serve(
    mut io: impl AsyncRead + AsyncWrite + Unpin,
    answer: impl Fn(&str) -> Vec<u8>,
) -> Option<()> {
    loop {
        let head = head(&mut io).await?;
        let bytes = answer(&head);
        if bytes.is_empty() {
            return None;
        }
        io.write_all(&bytes).await.ok()?;
    }
}

/// A node that answers like this, and the heads of the requests that it got.
async fn node(
    answer: impl Fn(&str) -> Vec<u8> + Clone + Send + 'static,
) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let heads = Arc::new(Mutex::new(Vec::new()));
    let seen = heads.clone();
    tokio::spawn(async move {
        loop {
            let (io, _) = listener.accept().await.unwrap();
            let (answer, seen) = (answer.clone(), seen.clone());
            tokio::spawn(serve(io, move |head| {
                seen.lock().unwrap().push(head.to_owned());
                answer(head)
            }));
        }
    });
    (url, heads)
}

fn answer(status: u16, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n{headers}\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

#[tokio::test]
async fn nobody_there_is_unreachable_and_named() {
    // Its port is nobody else's, and nobody listens there.
    let bound = TcpSocket::new_v4().unwrap();
    bound.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let at = bound.local_addr().unwrap();
    let url = format!("http://{at}");
    match failure(&client(&url), "/").await {
        Failure::Unreachable(e) => assert_eq!(
            e.message(),
            format!("cannot connect to {url}: connection refused")
        ),
        other => panic!("{other:?}"),
    }
    match failure(&client("unix:/no/such.sock"), "/").await {
        Failure::Unreachable(e) => assert_eq!(
            e.message(),
            "cannot connect to unix:/no/such.sock: no such socket"
        ),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn each_wait_has_a_limit() {
    let waits = |url: &str, most| {
        let mut settings = settings(url);
        settings.timeouts = Timeouts::all(most);
        Client::new(settings).unwrap()
    };
    let quick = |url: &str| waits(url, QUICK);
    // A TLS handshake that nobody answers: connecting still ends.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    match failure(&quick(&format!("https://{at}")), "/").await {
        Failure::TimedOut(e) => assert!(e.message().contains("cannot connect"), "{e:?}"),
        other => panic!("{other:?}"),
    }
    match failure(&quick(&format!("http://{at}")), "/").await {
        Failure::TimedOut(e) => assert!(e.message().contains("did not answer"), "{e:?}"),
        other => panic!("{other:?}"),
    }
    let (url, _) = node(|_| b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf".to_vec()).await;
    // Long enough for what does come, on a busy machine too.
    let patient = waits(&url, 10 * QUICK);
    let mut begun = patient.call(&get("/")).await.unwrap();
    assert_eq!(begun.piece().await.unwrap().as_deref(), Some(&b"half"[..]));
    match begun.piece().await.unwrap_err() {
        Failure::TimedOut(e) => assert!(e.message().contains("in the middle"), "{e:?}"),
        other => panic!("{other:?}"),
    }
}

/// A self-signed certificate for 127.0.0.1.
fn certificate(dir: &Path, name: &str) -> (PathBuf, PathBuf) {
    let (pem, key) = (
        dir.join(format!("{name}.pem")),
        dir.join(format!("{name}.key")),
    );
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt"])
        .args(["ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"])
        .args([
            "-subj",
            "/CN=test",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ])
        .args(["-addext", "basicConstraints=critical,CA:FALSE"])
        .arg("-out")
        .arg(&pem)
        .arg("-keyout")
        .arg(&key)
        .output()
        .expect("openssl is installed");
    assert!(made.status.success(), "{made:?}");
    (pem, key)
}

#[tokio::test]
async fn tls_connects_to_trusted_servers_only() {
    let dir = TempDir::new().unwrap();
    let (pem, key) = certificate(dir.path(), "node");
    let (stranger, _) = certificate(dir.path(), "stranger");
    let (certificate, key) = Identity::read(&pem, &key).unwrap();
    let tls = ServerTls::new(Identity::parse(&certificate, &key).unwrap()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (io, _) = listener.accept().await.unwrap();
            if let Ok(io) = tls.accept(io).await {
                tokio::spawn(serve(io, |_| answer(200, "", b"secret")));
            }
        }
    });
    let trusting = |ca: PathBuf| {
        let settings = Settings {
            ca: Some(ca),
            ..settings(&url)
        };
        Client::new(settings).unwrap()
    };
    let mut told = trusting(pem.clone()).call(&get("/")).await.unwrap();
    assert_eq!(told.collect(100).await.unwrap(), "secret");
    match failure(&trusting(stranger), "/").await {
        Failure::NotSent(e) => assert_eq!(e.kind(), ErrorKind::Unauthenticated, "{e:?}"),
        other => panic!("{other:?}"),
    }
    match failure(&trusting(dir.path().join("none.pem")), "/").await {
        Failure::NotSent(e) => assert!(e.message().contains("none.pem"), "{e:?}"),
        other => panic!("{other:?}"),
    }
    // A node that speaks plain HTTP gets the same error as any other nonsense.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let plain = format!("https://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut io, _) = listener.accept().await.unwrap();
        io.read_u8().await.unwrap();
        io.write_all(b"HTTP/1.1 400 No\r\n\r\n").await.unwrap();
    });
    let settings = Settings {
        ca: Some(pem),
        ..settings(&plain)
    };
    match failure(&Client::new(settings).unwrap(), "/").await {
        Failure::Unreachable(e) => assert!(e.message().contains("TLS"), "{e:?}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn each_request_names_its_sender_and_connections_are_kept() {
    let (url, heads) = node(|_| answer(200, "", b"ok")).await;
    let mut settings = settings(&url);
    settings.token = Some("abc".into());
    let client = Client::new(settings).unwrap();
    for _ in 0..3 {
        let mut answer = client
            .call(&get("/x").header(HeaderName::from_static("x-a"), "b"))
            .await
            .unwrap();
        assert_eq!(answer.collect(10).await.unwrap(), "ok");
    }
    let heads = heads.lock().unwrap().clone();
    assert_eq!(heads.len(), 3);
    for part in [
        "get /x http/1.1\r\n",
        &format!("host: {}\r\n", url.trim_start_matches("http://")),
        "user-agent: test/0\r\n",
        "authorization: bearer abc\r\n",
        "x-a: b\r\n",
    ] {
        assert!(
            heads[2].to_lowercase().contains(part),
            "{part} in {heads:?}"
        );
    }
    let bad = |token: &str| {
        let mut settings = self::settings(&url);
        settings.token = Some(token.into());
        Client::new(settings).err()
    };
    assert!(matches!(bad("a\nb"), Some(Failure::NotSent(_))));
    let call = get("/x").header(HeaderName::from_static("x-a"), "a\r\nb: c");
    assert!(matches!(
        client.call(&call).await.err(),
        Some(Failure::NotSent(_))
    ));
}

#[tokio::test]
async fn a_kept_connection_that_was_closed_is_replaced() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut io, _) = listener.accept().await.unwrap();
            // One answer; the second request finds the connection closed.
            tokio::spawn(async move {
                head(&mut io).await?;
                io.write_all(&answer(200, "", b"ok")).await.ok()?;
                head(&mut io).await
            });
        }
    });
    let client = client(&url);
    for _ in 0..5 {
        let mut answer = client.call(&get("/")).await.unwrap();
        assert_eq!(answer.collect(10).await.unwrap(), "ok");
    }
}

/// A node that answers the first request of each connection and, having read the second, breaks the
/// connection; with the second requests' heads.
async fn breaks_at_the_second() -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let heads = Arc::new(Mutex::new(Vec::new()));
    let seen = heads.clone();
    tokio::spawn(async move {
        loop {
            let (mut io, _) = listener.accept().await.unwrap();
            let seen = seen.clone();
            tokio::spawn(async move {
                head(&mut io).await?;
                io.write_all(&answer(200, "", b"ok")).await.ok()?;
                let second = head(&mut io).await?;
                seen.lock().unwrap().push(second);
                Some(())
            });
        }
    });
    (url, heads)
}

#[tokio::test]
async fn what_writes_is_not_sent_again_once_any_of_it_was_sent() {
    let (url, broken) = breaks_at_the_second().await;
    let client = client(&url);
    let keep_one = async || {
        let mut answer = client.call(&get("/")).await.unwrap();
        assert_eq!(answer.collect(10).await.unwrap(), "ok");
    };
    let questions = [get("/"), Call::new(Method::POST, "/rows").repeatable()];
    for call in questions {
        keep_one().await;
        let mut answer = client.call(&call).await.unwrap();
        assert_eq!(answer.collect(10).await.unwrap(), "ok");
        assert_eq!(broken.lock().unwrap().drain(..).count(), 1);
        // The connection that answered is kept, and breaks at the next one.
        client.call(&get("/")).await.unwrap();
        broken.lock().unwrap().clear();
    }
    for method in [Method::DELETE, Method::POST, Method::PUT] {
        keep_one().await;
        match client.call(&Call::new(method.clone(), "/k")).await.err() {
            Some(Failure::Broken(e)) => {
                assert_eq!(e.kind(), ErrorKind::OriginUnavailable);
                let unknown = format!("it is not known whether the {method} was carried out");
                assert!(e.message().contains(&unknown), "{e:?}");
            }
            other => panic!("{method}: {other:?}"),
        }
        let heads: Vec<String> = broken.lock().unwrap().drain(..).collect();
        assert_eq!(heads.len(), 1, "{heads:?}");
        assert!(heads[0].starts_with(&format!("{method} /k ")), "{heads:?}");
    }
}

#[tokio::test]
async fn what_writes_is_sent_over_a_new_connection_where_the_kept_one_was_closed_before() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut io, _) = listener.accept().await.unwrap();
            head(&mut io).await.unwrap();
            // The connection is closed right behind the answer.
            io.write_all(&answer(200, "", b"ok")).await.unwrap();
        }
    });
    let client = client(&url);
    for _ in 0..50 {
        let mut answer = client.call(&Call::new(Method::DELETE, "/k")).await.unwrap();
        assert_eq!(answer.collect(10).await.unwrap(), "ok");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn refused_requests_are_repeated_as_the_node_says_and_in_time() {
    let refusals = Arc::new(AtomicU32::new(0));
    let count = refusals.clone();
    let (url, _) = node(move |head| match count.fetch_add(1, SeqCst) {
        _ if head.contains("/forever") => {
            // The largest possible number of seconds.
            answer(503, "retry-after: 18446744073709551615\r\n", b"")
        }
        0 | 1 => answer(429, "retry-after: 0\r\n", br#"{"message": "full"}"#),
        _ => answer(200, "", b"ok"),
    })
    .await;
    let mut patient = settings(&url);
    patient.timeouts.refused = Duration::from_secs(60);
    let patient = Client::new(patient).unwrap();
    let began = Instant::now();
    assert_eq!(patient.call(&get("/")).await.unwrap().status, 200);
    assert_eq!(refusals.load(SeqCst), 3);
    assert!(began.elapsed() > Duration::from_millis(150), "no pause");
    let began = Instant::now();
    let refused = failure(&patient, "/forever").await;
    assert!(refused.is_refusal() && refused.retry_after().is_some());
    assert!(began.elapsed() < Duration::from_secs(30), "it waited");
    // Without patience, the first refusal is the answer.
    let (url, heads) = node(|_| answer(429, "", b"")).await;
    let mut hasty = settings(&url);
    hasty.timeouts.refused = Duration::ZERO;
    assert!(
        failure(&Client::new(hasty).unwrap(), "/")
            .await
            .is_refusal()
    );
    assert_eq!(heads.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn errors_are_read_whatever_the_body_is() {
    let endless = vec![b'x'; 1 << 20];
    let deep = "[".repeat(100_000);
    let bodies: [(&[u8], ErrorKind, &str); 8] = [
        (
            br#"{"code": "corrupt", "message": "bk/a: no footer", "hint": "look"}"#,
            ErrorKind::Corrupt,
            "bk/a: no footer",
        ),
        (
            br#"{"code": "of_tomorrow", "message": "m"}"#,
            ErrorKind::NotFound,
            "m",
        ),
        (
            b"",
            ErrorKind::NotFound,
            "the node answered 404 (not found)",
        ),
        (
            b"<html>gone</html>",
            ErrorKind::NotFound,
            "what answers at AT is not a Forebay node: it said 404 (gone)",
        ),
        (b"\xff\xfe", ErrorKind::NotFound, "\u{fffd}\u{fffd}"),
        (
            br#"{"message": 7}"#,
            ErrorKind::NotFound,
            r#"{"message": 7}"#,
        ),
        (deep.as_bytes(), ErrorKind::NotFound, &deep[..500]),
        // Longer than any error: the body is ignored, the status counts.
        (
            &endless,
            ErrorKind::NotFound,
            "the node answered 404 (not found)",
        ),
    ];
    for (body, kind, message) in bodies {
        let said = body.to_vec();
        let (url, _) = node(move |_| answer(404, "x-request-id: r-1\r\n", &said)).await;
        let Failure::Refused(document) = failure(&client(&url), "/").await else {
            panic!("{message}");
        };
        assert_eq!(document.request_id.as_deref(), Some("r-1"), "{message}");
        let error = Error::from(Failure::Refused(document));
        let message = message.replace("AT", &url);
        assert_eq!((error.kind(), error.message()), (kind, &*message));
    }
    // An error that breaks off is still an error, and so is one without a body.
    let (url, _) = node(|head| match head.starts_with("HEAD") {
        true => b"HTTP/1.1 403 No\r\ncontent-length: 70\r\n\r\n".to_vec(),
        false => answer(200, "", b""),
    })
    .await;
    let refused = client(&url).call(&Call::new(Method::HEAD, "/")).await;
    assert_eq!(
        Error::from(refused.err().unwrap()).kind(),
        ErrorKind::PermissionDenied
    );
}

#[tokio::test]
async fn who_answers_to_everything_is_not_taken_for_a_node() {
    for method in [Method::GET, Method::PUT, Method::HEAD] {
        let (url, _) = node(|head| match head.starts_with("HEAD") {
            true => b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n".to_vec(),
            false => b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n<p>Sign in</p>".to_vec(),
        })
        .await;
        let failed = client(&url)
            .call(&Call::new(method.clone(), "/v1/objects/b/k"))
            .await;
        let error = Error::from(failed.err().unwrap());
        assert_eq!(error.kind(), ErrorKind::OriginUnavailable, "{method}");
        let said = error.message();
        assert!(
            said.contains("is not a Forebay node: it said 200"),
            "{said}"
        );
        assert!(error.hint_text().unwrap().contains("check the address"));
    }
}

#[tokio::test]
async fn a_page_is_no_answer_to_a_write() {
    let headers = "x-request-id: r-1\r\ncontent-type: text/html; charset=utf-8\r\n";
    let (url, _) = node(move |_| answer(200, headers, b"<p>Sign in</p>")).await;
    let object = |method| Call::new(method, "/v1/objects/b/k");
    let failed = client(&url).call(&object(Method::PUT)).await;
    let error = Error::from(failed.err().unwrap());
    let said = "is not a Forebay node: it said 200 (Sign in)";
    assert!(error.message().contains(said), "{}", error.message());
    // But an object may be one.
    assert!(client(&url).call(&object(Method::GET)).await.is_ok());
}

#[tokio::test]
async fn an_answer_that_is_cut_looks_cut() {
    for cut in [
        &b"HTTP/1.1 200 OK\r\nx-request-id: r-1\r\ncontent-length: 9\r\n\r\nhalf"[..],
        b"HTTP/1.1 200 OK\r\nx-request-id: r-1\r\ntransfer-encoding: chunked\r\n\r\n9\r\nhalf",
        b"HTTP/1.1 200 OK\r\nx-request-id: r-1\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let (mut io, _) = listener.accept().await.unwrap();
            head(&mut io).await;
            io.write_all(cut).await.unwrap();
        });
        let mut answer = client(&url).call(&get("/")).await.unwrap();
        match answer.collect(100).await.unwrap_err() {
            Failure::Truncated { error, request_id } => {
                assert_eq!(request_id.as_deref(), Some("r-1"));
                assert!(error.message().contains("broke off"), "{error:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    for nothing in [
        &b""[..],
        b"HTTP/1.1 200",
        b"220 mail.example ESMTP\r\n\r\n",
        b"\x16\x03\x01\x00\x05hello\r\n\r\n",
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let (mut io, _) = listener.accept().await.unwrap();
            head(&mut io).await;
            io.write_all(nothing).await.unwrap();
        });
        match failure(&client(&url), "/").await {
            Failure::Broken(e) => assert_eq!(e.kind(), ErrorKind::OriginUnavailable, "{e:?}"),
            other => panic!("{other:?} for {nothing:?}"),
        }
    }
}

#[tokio::test]
async fn answers_that_are_too_long_or_malformed_are_errors() {
    let (url, _) = node(|_| answer(200, "", b"{\"a\": 1}\n{\"a\": 2}\nrest")).await;
    let client = client(&url);
    let mut long = client.call(&get("/")).await.unwrap();
    assert!(matches!(
        long.collect(10).await.unwrap_err(),
        Failure::Malformed(_)
    ));
    let mut lines = client.call(&get("/")).await.unwrap();
    assert!(matches!(
        lines.json::<serde_json::Value>().await.unwrap_err(),
        Failure::Malformed(_)
    ));
    let mut lines = Lines::of(client.call(&get("/")).await.unwrap());
    for line in [&b"{\"a\": 1}"[..], b"{\"a\": 2}", b"rest"] {
        assert_eq!(lines.next().await.unwrap().as_deref(), Some(line));
    }
    assert_eq!(lines.next().await.unwrap(), None);
}

#[tokio::test]
async fn an_upload_may_take_longer_than_an_answer_while_it_goes_on() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut io, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let length = match head(&mut io).await?.contains("content-length: 8\r\n") {
                    true => 8,
                    false => 1 << 20,
                };
                io.read_exact(&mut vec![0; length]).await.ok()?;
                io.write_all(&answer(200, "", b"ok")).await.ok()
            });
        }
    });
    let mut settings = settings(&url);
    settings.timeouts.answer = Duration::from_secs(6);
    let client = Client::new(settings).unwrap();
    let pieces = |n: usize, pause| {
        futures::stream::iter(0..n).then(move |_| async move {
            tokio::time::sleep(pause).await;
            Ok(Bytes::from_static(b"x"))
        })
    };
    let put = Call::new(Method::PUT, "/");
    let slow = pieces(8, Duration::from_secs(1));
    let answer = client.upload(&put, Some(8), slow).await.unwrap();
    assert_eq!(answer.status, StatusCode::OK);
    let stalled = pieces(8, Duration::from_secs(60));
    assert!(matches!(
        client.upload(&put, Some(8), stalled).await.err(),
        Some(Failure::TimedOut(_))
    ));
    // A source that fails breaks the request off: half of it must not look complete.
    let failing = futures::stream::iter([
        Ok(Bytes::from_static(b"half")),
        Err(std::io::Error::other("the disk is gone")),
    ]);
    match client.upload(&put, None, failing).await.err() {
        Some(Failure::Broken(e)) => assert!(e.message().contains("the disk is gone"), "{e:?}"),
        other => panic!("{other:?}"),
    }
}

fn info(node_id: &str, host: &str, socket: &Path) -> Vec<u8> {
    let info = NodeInfo {
        node_id: node_id.into(),
        host_id: host.into(),
        unix_socket: Some(socket.display().to_string()),
        ..NodeInfo::default()
    };
    answer(200, "", &serde_json::to_vec(&info).unwrap())
}

#[tokio::test]
async fn the_unix_socket_is_used_where_it_leads_to_the_same_node() {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let here = host_id(&boot);
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("node.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let (path, machine) = (socket.clone(), here.clone());
    tokio::spawn(async move {
        loop {
            let (io, _) = listener.accept().await.unwrap();
            let (path, machine) = (path.clone(), machine.clone());
            tokio::spawn(serve(io, move |head| {
                match head.starts_with("GET /v1/forebay/info ") {
                    true => info("n1", &machine, &path),
                    false => answer(200, "", b"over the socket"),
                }
            }));
        }
    });
    let none = dir.path().join("none.sock");
    let cases: [(&str, &str, &Path, bool); 4] = [
        ("n1", &here, &socket, true),
        // Another node has the socket of that name on this machine.
        ("n2", &here, &socket, false),
        // A path on another machine.
        ("n1", "0123456789abcdef", &socket, false),
        ("n1", &here, &none, false),
    ];
    for (id, host, at, used) in cases {
        let said = info(id, host, at);
        let (url, _) = node(move |head| match head.contains("/v1/forebay/info") {
            true => said.clone(),
            false => answer(200, "", b"over tcp"),
        })
        .await;
        let mut settings = settings(&url);
        settings.find_socket = true;
        let client = Client::new(settings.clone()).unwrap();
        assert_eq!(client.route().to_string(), url, "it has not looked yet");
        let mut answer = client.call(&get("/")).await.unwrap();
        let (route, body) = match used {
            true => (format!("unix:{}", socket.display()), "over the socket"),
            false => (url, "over tcp"),
        };
        assert_eq!(client.route().to_string(), route, "{id} {host}");
        assert_eq!(answer.collect(100).await.unwrap(), body);
        if used {
            // The way over TCP remains when the socket goes away.
            std::fs::rename(&socket, dir.path().join("away")).unwrap();
            let mut first = client.call(&get("/")).await.unwrap();
            let mut second = client.call(&get("/")).await.unwrap();
            assert_eq!(first.collect(100).await.unwrap(), "over the socket");
            assert_eq!(second.collect(100).await.unwrap(), "over tcp");
            std::fs::rename(dir.path().join("away"), &socket).unwrap();
            settings.find_socket = false;
            let plain = Client::new(settings).unwrap();
            let mut answer = plain.call(&get("/")).await.unwrap();
            assert_eq!(answer.collect(100).await.unwrap(), "over tcp");
        }
    }
    // Whatever the answer to the question is, the client goes on.
    for said in [
        answer(404, "", b""),
        answer(200, "", b"<html>"),
        answer(200, "", &vec![b' '; 200_000]),
        answer(200, "", br#"{"unix_socket": 7}"#),
    ] {
        let (url, _) = node(move |head| match head.contains("/v1/forebay/info") {
            true => said.clone(),
            false => answer(200, "", b"over tcp"),
        })
        .await;
        let mut settings = settings(&url);
        settings.find_socket = true;
        let mut answer = Client::new(settings)
            .unwrap()
            .call(&get("/"))
            .await
            .unwrap();
        assert_eq!(answer.collect(100).await.unwrap(), "over tcp");
    }
}

/// Starts a node, or fails to.
struct Starter {
    socket: PathBuf,
    started: AtomicU32,
    why_not: Option<Error>,
}

impl StartNode for Starter {
    fn start(&self) -> BoxFuture<'_, forebay_core::Result<()>> {
        Box::pin(async {
            if let Some(why) = &self.why_not {
                return Err(why.clone());
            }
            self.started.fetch_add(1, SeqCst);
            let listener = UnixListener::bind(&self.socket).unwrap();
            tokio::spawn(async move {
                loop {
                    let (io, _) = listener.accept().await.unwrap();
                    tokio::spawn(serve(io, |_| answer(200, "", b"ok")));
                }
            });
            Ok(())
        })
    }

    fn check(&self) -> BoxFuture<'_, forebay_core::Result<()>> {
        Box::pin(async { self.why_not.clone().map_or(Ok(()), Err) })
    }
}

#[tokio::test]
async fn a_node_is_started_where_nobody_listens() {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("node.sock");
    let starter = |why_not| {
        Arc::new(Starter {
            socket: socket.clone(),
            started: AtomicU32::new(0),
            why_not,
        })
    };
    let client = |starter: Arc<Starter>| {
        let settings = Settings {
            starter: Some(starter),
            ..settings(&format!("unix:{}", socket.display()))
        };
        Client::new(settings).unwrap()
    };
    let refusing = starter(Some(Error::invalid("no such cache")));
    match failure(&client(refusing), "/").await {
        Failure::NotSent(e) => assert_eq!(e.message(), "no such cache"),
        other => panic!("{other:?}"),
    }
    let other = client(starter(Some(Error::invalid("of others"))));
    let starting = starter(None);
    let client = client(starting.clone());
    for _ in 0..2 {
        let mut answer = client.call(&get("/")).await.unwrap();
        assert_eq!(answer.collect(10).await.unwrap(), "ok");
    }
    assert_eq!(starting.started.load(SeqCst), 1);
    // It listens now, and may not answer everybody.
    match failure(&other, "/").await {
        Failure::NotSent(e) => assert_eq!(e.kind(), ErrorKind::Invalid),
        other => panic!("{other:?}"),
    }
}
