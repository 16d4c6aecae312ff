//! A client of several nodes: what is asked again at another one and what is not, which node is
//! preferred, and names that lead to several.

use bytes::Bytes;
use forebay_client::{Call, Client, Failure, Resolve, Settings, Timeouts};
use forebay_core::Error;
use forebay_protocol::{Addresses, ErrorDocument};
use futures::future::BoxFuture;
use http::Method;
use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
};

/// What a scripted node does with each request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    Answer,
    /// Closes the connection instead of answering.
    Close,
    /// 503: the node is stopping.
    Stop,
    /// 500.
    Fail,
    /// Announces the object, sends so many bytes of it, and closes.
    Cut(usize),
    /// Answers nothing but what it is.
    Hang,
    /// Says nothing at all: its machine is gone.
    Silent,
}

const OBJECT: &[u8] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// A node that does as it is told, and what it was asked.
struct Node {
    at: SocketAddr,
    does: Mutex<Does>,
    heads: Mutex<Vec<String>>,
    etag: Mutex<&'static str>,
    /// Nobody listens.
    is_down: Arc<AtomicBool>,
}

impl Node {
    async fn start(does: Does) -> Arc<Node> {
        Node::start_at("127.0.0.1:0", does).await
    }

    async fn start_at(at: &str, does: Does) -> Arc<Node> {
        let listener = TcpListener::bind(at).await.unwrap();
        let node = Arc::new(Node {
            at: listener.local_addr().unwrap(),
            does: Mutex::new(does),
            heads: Mutex::default(),
            etag: Mutex::new("\"v1\""),
            is_down: Arc::default(),
        });
        let served = node.clone();
        tokio::spawn(async move {
            loop {
                let (io, _) = listener.accept().await.unwrap();
                if !served.is_down.load(SeqCst) {
                    tokio::spawn(served.clone().serve(io));
                }
            }
        });
        node
    }

    async fn serve(self: Arc<Self>, mut io: TcpStream) -> Option<()> {
        loop {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(io.read_u8().await.ok()?);
            }
            let head = String::from_utf8(head).unwrap().to_lowercase();
            let length = field(&head, "content-length").and_then(|n| n.parse().ok());
            io.read_exact(&mut vec![0; length.unwrap_or(0)])
                .await
                .ok()?;
            let does = *self.does.lock().unwrap();
            if self.is_down.load(SeqCst) {
                return None;
            }
            // What a client asks of its own accord.
            if head.contains("/v1/forebay/info") {
                let status = match does {
                    Does::Silent => std::future::pending().await,
                    Does::Answer | Does::Hang => 404,
                    _ => 503,
                };
                io.write_all(&answer(status, "", b"")).await.ok()?;
                continue;
            }
            self.heads.lock().unwrap().push(head.clone());
            let from = field(&head, "range").map_or(0, |range| {
                let from = range.trim_start_matches("bytes=").split('-').next();
                from.unwrap().parse().unwrap()
            });
            let etag = *self.etag.lock().unwrap();
            let more = match from {
                0 => format!("etag: {etag}\r\n"),
                from => format!(
                    "etag: {etag}\r\ncontent-range: bytes {from}-{}/{}\r\n",
                    OBJECT.len() - 1,
                    OBJECT.len()
                ),
            };
            let whole = answer(if from == 0 { 200 } else { 206 }, &more, &OBJECT[from..]);
            match does {
                Does::Answer => io.write_all(&whole).await.ok()?,
                Does::Close => return None,
                Does::Hang | Does::Silent => std::future::pending().await,
                Does::Stop => {
                    let e = Error::new(forebay_core::ErrorKind::ShuttingDown, "it is stopping");
                    let body = serde_json::to_vec(&ErrorDocument::of(&e)).unwrap();
                    io.write_all(&answer(503, "retry-after: 1\r\n", &body))
                        .await
                        .ok()?;
                }
                Does::Fail => io.write_all(&answer(500, "", b"oh")).await.ok()?,
                Does::Cut(bytes) => {
                    let left = OBJECT.len() - from - bytes;
                    io.write_all(&whole[..whole.len() - left]).await.ok()?;
                    return None;
                }
            }
        }
    }

    fn does(&self, does: Does) {
        *self.does.lock().unwrap() = does;
    }

    fn asked(&self) -> usize {
        self.heads.lock().unwrap().len()
    }

    fn url(&self) -> String {
        format!("http://{}", self.at)
    }
}

fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let line = head.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.strip_prefix(':')).map(str::trim)
}

fn answer(status: u16, headers: &str, body: &[u8]) -> Vec<u8> {
    // By it, a client knows that a node answers.
    let id = match status {
        200..300 => "x-request-id: r-0\r\n",
        _ => "",
    };
    let head = format!(
        "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n{id}{headers}\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// A port that nobody listens at, and that nobody else gets as long as the tests run.
fn nobody() -> String {
    let bound = Box::leak(Box::new(TcpSocket::new_v4().unwrap()));
    bound.bind(([127, 0, 0, 1], 0).into()).unwrap();
    format!("http://{}", bound.local_addr().unwrap())
}

fn settings(urls: &[&str]) -> Settings {
    Settings {
        in_order: true,
        timeouts: Timeouts {
            refused: Duration::ZERO,
            ..Timeouts::all(Duration::from_secs(20))
        },
        ..Settings::new(Addresses::of(urls).unwrap(), "test/0")
    }
}

fn client(urls: &[&str]) -> Client {
    Client::new(settings(urls)).unwrap()
}

fn get() -> Call {
    Call::new(Method::GET, "/v1/objects/b/k")
}

fn put() -> Call {
    Call::new(Method::PUT, "/v1/objects/b/k").body("text/plain", "x")
}

async fn body(client: &Client, call: &Call) -> Result<Bytes, Failure> {
    client.call(call).await?.collect(1000).await
}

#[tokio::test]
async fn a_call_goes_to_the_next_node_if_it_may_be_made_twice() {
    for (first, call, again) in [
        (Does::Close, get(), true),
        (
            Does::Close,
            Call::new(Method::POST, "/q").repeatable(),
            true,
        ),
        // It may have been carried out.
        (Does::Close, put(), false),
        (
            Does::Close,
            Call::new(Method::DELETE, "/v1/objects/b/k"),
            false,
        ),
        // It has not begun.
        (Does::Stop, get(), true),
        (Does::Stop, put(), true),
        // An answer is an answer.
        (Does::Fail, get(), false),
        (Does::Fail, put(), false),
    ] {
        let (a, b) = (Node::start(first).await, Node::start(Does::Answer).await);
        let client = client(&[&a.url(), &b.url()]);
        let done = body(&client, &call).await;
        let what = format!("{first:?} {}", call.method);
        assert_eq!((a.asked(), b.asked()), (1, usize::from(again)), "{what}");
        assert_eq!(done.is_ok(), again, "{what}: {done:?}");
        if again {
            // It is known to have failed: nobody waits for it again.
            body(&client, &call).await.unwrap();
            assert_eq!((a.asked(), b.asked()), (1, 2), "{what}");
            assert!(client.route().contains(&b.at.to_string()) && client.moves() == 1);
        } else {
            let e = Error::from(done.unwrap_err());
            let unknown = first == Does::Close;
            assert_eq!(
                e.message().contains("not known whether"),
                unknown,
                "{what}: {e:?}"
            );
        }
    }
}

#[tokio::test]
async fn what_was_never_sent_goes_to_the_next_node() {
    let (down, up) = (nobody(), Node::start(Does::Answer).await);
    for call in [get(), put(), Call::new(Method::DELETE, "/v1/objects/b/k")] {
        body(&client(&[&down, &up.url()]), &call).await.unwrap();
    }
    let pieces = futures::stream::iter([Ok(Bytes::from_static(b"x"))]);
    let client = client(&[&down, &up.url()]);
    client.upload(&put(), Some(1), pieces).await.unwrap();
    assert_eq!(up.asked(), 4);
    // A connection that was kept, and is closed before the next call.
    let (a, b) = (
        Node::start(Does::Answer).await,
        Node::start(Does::Answer).await,
    );
    let client = self::client(&[&a.url(), &b.url()]);
    body(&client, &get()).await.unwrap();
    a.is_down.store(true, SeqCst);
    assert_eq!(body(&client, &get()).await.unwrap(), OBJECT);
    assert_eq!(b.asked(), 1);
}

#[tokio::test]
async fn one_node_is_asked_as_ever() {
    let node = Node::start(Does::Close).await;
    // A name for it twice is one node.
    for urls in [vec![node.url()], vec![node.url(), node.at.to_string()]] {
        let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
        let (client, before) = (client(&urls), node.asked());
        assert_eq!(client.count(), 1);
        match body(&client, &get()).await {
            Err(Failure::Broken(e)) => assert!(e.message().starts_with(&node.url()), "{e:?}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(node.asked(), before + 1);
        // It is asked again at once.
        node.does(Does::Answer);
        body(&client, &get()).await.unwrap();
        node.does(Does::Cut(5));
        let cut = body(&client, &get()).await;
        assert!(matches!(cut, Err(Failure::Truncated { .. })), "{cut:?}");
        node.does(Does::Close);
    }
}

#[tokio::test]
async fn if_all_nodes_fail_the_error_names_each() {
    let (down, closing) = (nobody(), Node::start(Does::Close).await);
    match body(&client(&[&down, &closing.url()]), &get()).await {
        Err(Failure::Broken(e)) => {
            let refused = format!("cannot connect to {down}: connection refused");
            for part in ["none of 2 nodes answered: ", &refused, &closing.url()] {
                assert!(e.message().contains(part), "{part}: {e:?}");
            }
        }
        other => panic!("{other:?}"),
    }
    let mut many = Vec::new();
    for _ in 0..9 {
        many.push(nobody());
    }
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    match body(&client(&many), &get()).await {
        Err(Failure::Unreachable(e)) => {
            assert!(
                e.message().starts_with("none of 9 nodes answered: "),
                "{e:?}"
            );
            assert!(e.message().ends_with("; and 4 more"), "{e:?}");
        }
        other => panic!("{other:?}"),
    }
    // All are stopping: that may pass, and is waited for as at one node.
    let (a, b) = (Node::start(Does::Stop).await, Node::start(Does::Stop).await);
    let mut settings = settings(&[&a.url(), &b.url()]);
    match body(&Client::new(settings.clone()).unwrap(), &get()).await {
        Err(Failure::Refused(said)) => {
            assert!(said.message.contains("none of 2 nodes"), "{said:?}");
            assert!(said.message.contains("it is stopping"), "{said:?}");
        }
        other => panic!("{other:?}"),
    }
    settings.timeouts.refused = Duration::from_secs(20);
    let waiting = Client::new(settings).unwrap();
    let (call, later) = (get(), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        b.does(Does::Answer);
    });
    let (answered, ()) = tokio::join!(body(&waiting, &call), later);
    assert_eq!(answered.unwrap(), OBJECT);
}

#[tokio::test]
async fn a_node_that_failed_is_looked_at_later_and_used_again() {
    let (a, b) = (
        Node::start(Does::Close).await,
        Node::start(Does::Answer).await,
    );
    let (client, began) = (client(&[&a.url(), &b.url()]), Instant::now());
    body(&client, &get()).await.unwrap();
    a.does(Does::Answer);
    // Not before its time, however many calls there are.
    for _ in 0..20 {
        body(&client, &get()).await.unwrap();
        let so_far = (a.asked(), client.moves());
        if began.elapsed() < Duration::from_secs(5) {
            assert_eq!(so_far, (1, 1));
        }
    }
    tokio::time::sleep(Duration::from_millis(5100)).await;
    let until = Instant::now() + Duration::from_secs(60);
    while a.asked() == 1 {
        assert!(Instant::now() < until, "it is used again");
        body(&client, &get()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(
        client.moves(),
        2,
        "who counts on a node learns that it is another"
    );
}

#[tokio::test]
async fn the_body_of_an_object_goes_on_at_another_node() {
    let nodes = [
        Node::start(Does::Cut(5)).await,
        Node::start(Does::Cut(7)).await,
        Node::start(Does::Answer).await,
    ];
    let urls = nodes.each_ref().map(|node| node.url());
    let client = client(&urls.each_ref().map(String::as_str));
    assert_eq!(body(&client, &get()).await.unwrap(), OBJECT);
    let ranges = nodes.each_ref().map(|node| {
        let heads = node.heads.lock().unwrap();
        heads
            .iter()
            .map(|head| field(head, "range").map(str::to_owned))
            .collect::<Vec<_>>()
    });
    let range = |from: &str| vec![Some(from.to_owned())];
    assert_eq!(
        ranges,
        [vec![None], range("bytes=5-35"), range("bytes=12-35")]
    );
    for node in &nodes[1..] {
        assert_eq!(
            field(&node.heads.lock().unwrap()[0], "if-match"),
            Some("\"v1\"")
        );
    }
    // Not with another version.
    let (a, b) = (
        Node::start(Does::Cut(5)).await,
        Node::start(Does::Answer).await,
    );
    *b.etag.lock().unwrap() = "\"v2\"";
    let cut = body(&self::client(&[&a.url(), &b.url()]), &get()).await;
    assert!(matches!(cut, Err(Failure::Truncated { .. })), "{cut:?}");
    // Nor if nothing tells versions apart.
    for node in [&a, &b] {
        *node.etag.lock().unwrap() = "\"fb-24-0\"";
    }
    let asked = b.asked();
    let cut = body(&self::client(&[&a.url(), &b.url()]), &get()).await;
    assert!(matches!(cut, Err(Failure::Truncated { .. })), "{cut:?}");
    assert_eq!(b.asked(), asked);
    // The answer to a question without a version is asked for anew, by those who can.
    let ask = || async {
        let call = Call::new(Method::POST, "/q").repeatable();
        body(&client, &call).await
    };
    nodes[2].does(Does::Cut(1));
    nodes[0].does(Does::Answer);
    let is_cut = |e: &Failure| matches!(e, Failure::Truncated { .. });
    assert_eq!(client.whole(ask, is_cut).await.unwrap(), OBJECT);
}

/// A resolver that says what it is told.
struct Names {
    known: Mutex<Vec<SocketAddr>>,
    asked: AtomicUsize,
}

impl Resolve for Names {
    fn resolve<'a>(&'a self, host: &'a str, _: u16) -> BoxFuture<'a, io::Result<Vec<SocketAddr>>> {
        assert_eq!(host, "nodes.test");
        self.asked.fetch_add(1, SeqCst);
        let known = self.known.lock().unwrap().clone();
        Box::pin(async move { Ok(known) })
    }
}

fn named(known: &[&Arc<Node>]) -> (Arc<Names>, impl Fn() -> Client + use<>) {
    let names = Arc::new(Names {
        known: Mutex::new(known.iter().map(|node| node.at).collect()),
        asked: AtomicUsize::new(0),
    });
    let resolver = names.clone();
    let made = move || {
        Client::new(Settings {
            in_order: false,
            resolver: resolver.clone(),
            ..settings(&["http://nodes.test:80"])
        })
        .unwrap()
    };
    (names, made)
}

#[tokio::test]
async fn each_address_of_a_name_is_a_node() {
    let nodes = [
        Node::start(Does::Answer).await,
        Node::start(Does::Answer).await,
        Node::start(Does::Answer).await,
    ];
    let (names, client) = named(&nodes.each_ref());
    // A client that needs two seconds asks for the name again, before each call but the first.
    let mut again = 0;
    for _ in 0..60 {
        let (client, began) = (client(), Instant::now());
        for _ in 0..3 {
            body(&client, &get()).await.unwrap();
        }
        assert_eq!(client.count(), 3);
        again += 2 * usize::from(began.elapsed() >= Duration::from_secs(2));
    }
    let asked = nodes.each_ref().map(|node| node.asked());
    assert!(
        asked.iter().all(|n| *n >= 15 && n % 3 == 0),
        "each keeps to one: {asked:?}"
    );
    let resolved = names.asked.load(SeqCst);
    assert!(
        (60..=60 + again).contains(&resolved),
        "once for each client: {resolved}"
    );
    assert!(nodes[0].heads.lock().unwrap()[0].contains("host: nodes.test:80"));
    // One of them goes away, and another comes.
    let (client, began) = (client(), Instant::now());
    body(&client, &get()).await.unwrap();
    let preferred = nodes
        .iter()
        .find(|node| client.route().contains(&node.at.ip().to_string()));
    assert!(preferred.is_some(), "{}", client.route());
    for node in &nodes {
        node.is_down.store(true, SeqCst);
    }
    let e = Error::from(body(&client, &get()).await.unwrap_err());
    let said = "none of 3 nodes answered: http://nodes.test:80 at 127.0.0.1";
    assert!(e.message().contains(said), "{e:?}");
    let other = Node::start(Does::Answer).await;
    *names.known.lock().unwrap() = vec![nodes[0].at, other.at];
    let before = names.asked.load(SeqCst);
    let early = body(&client, &get()).await;
    // Two seconds after it was asked, it is time.
    if began.elapsed() < Duration::from_secs(2) {
        assert!(early.is_err());
        assert_eq!(names.asked.load(SeqCst), before, "not before its time");
    }
    tokio::time::sleep(Duration::from_millis(2100)).await;
    let asked = other.asked();
    assert_eq!(body(&client, &get()).await.unwrap(), OBJECT);
    assert_eq!((client.count(), other.asked()), (2, asked + 1));
    // A name that cannot be resolved for a moment means what it meant; one that leads to one
    // address is that node.
    other.does(Does::Close);
    for (known, count) in [(vec![], 2), (vec![other.at], 1)] {
        *names.known.lock().unwrap() = known;
        assert!(body(&client, &get()).await.is_err());
        tokio::time::sleep(Duration::from_millis(2100)).await;
        assert!(body(&client, &get()).await.is_err());
        assert_eq!(client.count(), count);
    }
}

#[tokio::test]
async fn a_node_on_this_machine_is_preferred() {
    let here = Node::start(Does::Answer).await;
    // An address for documentation, which nobody has.
    let far = "http://192.0.2.1:80";
    for _ in 0..20 {
        let client = Client::new(Settings {
            in_order: false,
            ..settings(&[far, &here.url()])
        });
        body(&client.unwrap(), &get()).await.unwrap();
    }
    assert_eq!(here.asked(), 20);
}

#[tokio::test]
async fn a_node_that_is_silent_is_left_only_if_it_is_gone() {
    let asked = |does, call: Call| async move {
        let (a, b) = (Node::start(does).await, Node::start(Does::Answer).await);
        let mut settings = settings(&[&a.url(), &b.url()]);
        // A node is gone if it says nothing for five seconds.
        settings.timeouts.answer = Duration::from_secs(12);
        let answered = body(&Client::new(settings).unwrap(), &call).await;
        (answered, a.asked(), b.asked())
    };
    let (slow, gone, written) = tokio::join!(
        asked(Does::Hang, get()),
        asked(Does::Silent, get()),
        asked(Does::Silent, put())
    );
    // It is at it: another one would only do the same work.
    assert!(
        matches!(slow, (Err(Failure::TimedOut(_)), 1, 0)),
        "{slow:?}"
    );
    assert_eq!((gone.0.unwrap(), gone.2), (Bytes::from_static(OBJECT), 1));
    assert!(
        matches!(written, (Err(Failure::TimedOut(_)), 1, 0)),
        "{written:?}"
    );
}
