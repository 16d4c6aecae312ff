//! Nodes that are one cache: the map in a file, certificates, and a node that goes away.

use crate::common::{TestNode, config, start_in};
use forebay_cluster::{Map, Member, MemberState, member_named};
use forebay_core::{ErrorKind, ManualClock};
use forebay_server::Node;
use forebay_tls::{Authority, PeerFiles, PeerTls};
use http::{Method, StatusCode};
use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const NODES: [&str; 3] = ["a", "b", "c"];

/// What the nodes share: the bucket, the map, the certificates.
struct Shared {
    dir: tempfile::TempDir,
    peers: Vec<String>,
}

fn member(name: &str, address: &str) -> Member {
    Member {
        id: member_named(name),
        name: name.to_owned(),
        address: address.to_owned(),
        url: String::new(),
        zone: String::new(),
        weight: 64 << 20,
        state: MemberState::Active,
    }
}

impl Shared {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("data")).unwrap();
        // Below those that the system hands out by itself: between here and the start of a node, one of
        // these could go to somebody else.
        let tried = std::iter::repeat_with(|| rand::random_range(10_000..32_000u16));
        let bound = tried.filter_map(|port| TcpListener::bind(("127.0.0.1", port)).ok());
        let free: Vec<_> = bound.take(NODES.len()).collect();
        let peers = free
            .iter()
            .map(|l| l.local_addr().unwrap().to_string())
            .collect();
        let shared = Shared { dir, peers };
        shared.certify(&Authority::new("test", 2).unwrap(), &NODES);
        shared
    }

    /// Gives nodes certificates of this CA.
    fn certify(&self, ca: &Authority, nodes: &[&str]) {
        for node in nodes {
            let issued = ca.issue(node, 1).unwrap();
            let put = |what: &str, pem: &[u8]| {
                std::fs::write(self.path(&format!("{node}.{what}")), pem).unwrap();
            };
            put("ca", ca.certificate());
            put("key", issued.key.as_bytes());
            put("pem", issued.certificate.as_bytes());
        }
    }

    /// Whether the node lets in who shows the certificate of `with`.
    async fn lets_in(&self, node: &str, with: &PeerTls) -> bool {
        let at = NODES.iter().position(|n| *n == node).unwrap();
        let stream = TcpStream::connect(&self.peers[at]).await.unwrap();
        with.connect(stream).await.is_ok()
    }

    /// What the node of this name speaks with.
    fn tls(&self, node: &str) -> PeerTls {
        let [ca, certificate, key] =
            ["ca", "pem", "key"].map(|what| self.path(&format!("{node}.{what}")));
        PeerTls::new(&PeerFiles::read(&ca, &certificate, &key).unwrap()).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, key: &str, bytes: &[u8]) {
        std::fs::write(self.path("data").join(key), bytes).unwrap();
    }

    fn members(&self, nodes: &[&str]) -> Vec<Member> {
        let all = NODES.iter().zip(&self.peers);
        all.filter(|(name, _)| nodes.contains(name))
            .map(|(name, address)| member(name, address))
            .collect()
    }

    fn put_map(&self, map: &Map) {
        std::fs::write(self.path("map.new"), map.json()).unwrap();
        std::fs::rename(self.path("map.new"), self.path("map.json")).unwrap();
    }

    async fn start(&self, node: &str) -> TestNode {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(self.path("data"), dir.path().join("data")).unwrap();
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let at = NODES.iter().position(|n| *n == node).unwrap();
        let settings = [
            ("listen.peer", self.peers[at].clone()),
            ("cluster.map", text(&self.path("map.json"))),
            ("cluster.node", node.to_owned()),
            ("cluster.ca", text(&self.path(&format!("{node}.ca")))),
            ("cluster.cert", text(&self.path(&format!("{node}.pem")))),
            ("cluster.key", text(&self.path(&format!("{node}.key")))),
            ("cache.freshness", "immutable".to_owned()),
        ];
        let settings: Vec<_> = settings.iter().map(|(k, v)| (*k, v.as_str())).collect();
        start_in(dir, &settings).await
    }
}

fn bytes_of(number: usize, size: usize) -> Vec<u8> {
    (0..size).map(|i| (i / 7 * (number + 3)) as u8).collect()
}

async fn from_bucket(nodes: &[TestNode]) -> f64 {
    let mut sum = 0.0;
    for node in nodes {
        sum += node
            .metric("forebay_origin_received_bytes_total", "data")
            .await;
    }
    sum
}

async fn reads(node: &TestNode, objects: &[(String, Vec<u8>)]) {
    let mut client = node.client().await;
    for (key, bytes) in objects {
        let answer = client.get(&format!("/data/{key}")).await;
        assert_eq!(answer.status, 200, "{key}: {}", answer.text());
        assert!(*bytes == answer.body.unwrap(), "{key} has other bytes");
    }
}

/// How often nodes gave each other up, or were asked for something that another one was late with:
/// then more than one of them fetches it.
async fn detours(nodes: &[TestNode]) -> f64 {
    let mut sum = 0.0;
    for node in nodes {
        for metric in [
            "forebay_peer_silences_total",
            "forebay_peer_hedged_questions_total",
            "forebay_peer_left_alone_total",
        ] {
            sum += node.metric(metric, "peer").await;
        }
    }
    sum
}

/// Reads everything at all nodes, once none of them is given up by another one. On a machine that
/// is too busy for nodes to answer in time, it is tried again with other objects.
async fn each_byte_leaves_the_bucket_once(
    shared: &Shared,
    nodes: &[TestNode],
    objects: &[(String, Vec<u8>)],
) {
    for attempt in 0..10 {
        // Who was left alone in one attempt is asked again in the next.
        tokio::time::sleep(Duration::from_secs(attempt)).await;
        let objects: Vec<_> = match attempt {
            0 => objects.to_vec(),
            n => {
                let renamed =
                    |(key, bytes): &(String, _)| (format!("{n}-{key}"), Vec::clone(bytes));
                objects.iter().map(renamed).collect()
            }
        };
        for (key, bytes) in &objects {
            shared.write(key, bytes);
        }
        wait_for(async || {
            let mut up = true;
            for node in nodes {
                up &= node.metric("forebay_peer_up", "peer").await == (nodes.len() - 1) as f64;
            }
            up
        })
        .await;
        let (sent, detoured) = (from_bucket(nodes).await, detours(nodes).await);
        for node in nodes {
            reads(node, &objects).await;
        }
        if detours(nodes).await == detoured {
            let all: usize = objects.iter().map(|(_, bytes)| bytes.len()).sum();
            assert_eq!(from_bucket(nodes).await - sent, all as f64);
            return;
        }
    }
    panic!("nodes did not answer each other in time, ten times");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_nodes_are_one_cache_and_go_on_without_one_of_them() {
    let shared = Shared::new();
    let sizes = (0..30).map(|_| 200_000).chain([20 << 20, 0, 1]);
    let objects: Vec<_> = sizes
        .enumerate()
        .map(|(n, size)| (format!("o{n:02}"), bytes_of(n, size)))
        .collect();
    for (key, bytes) in &objects {
        shared.write(key, bytes);
    }
    let map = Map::new("test", 7, shared.members(&NODES)).unwrap();
    shared.put_map(&map);
    let mut nodes = Vec::new();
    for node in NODES {
        nodes.push(shared.start(node).await);
    }
    each_byte_leaves_the_bucket_once(&shared, &nodes, &objects).await;

    // One goes away: what it had is fetched again by others, and nothing fails.
    let gone = nodes.remove(1);
    gone.node.shutdown(Duration::from_secs(60)).await.unwrap();
    drop(gone);
    let fresh = [("new".to_owned(), bytes_of(99, 3 << 20))];
    shared.write(&fresh[0].0, &fresh[0].1);
    for node in &nodes {
        reads(node, &fresh).await;
        reads(node, &objects).await;
    }

    // The next map is taken over by itself, and one that cannot follow is not.
    let reloads = async |name: &str| nodes[0].metric(name, "what=\"cluster_map\"").await;
    shared.put_map(&map.with(shared.members(&["a", "c"])).unwrap());
    wait_for(async || reloads("forebay_reloads_total").await == 1.0).await;
    shared.put_map(&Map::new("other", 7, shared.members(&["a", "c"])).unwrap());
    wait_for(async || reloads("forebay_reloads_failed_total").await == 1.0).await;
    assert_eq!(reloads("forebay_reload_stale").await, 1.0);
    for node in &nodes {
        reads(node, &objects).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_replaced_for_new_connections() {
    let shared = Shared::new();
    let objects: Vec<_> = (0..30)
        .map(|n| (format!("o{n:02}"), bytes_of(n, 200_000)))
        .collect();
    for (key, bytes) in &objects {
        shared.write(key, bytes);
    }
    shared.put_map(&Map::new("test", 7, shared.members(&NODES)).unwrap());
    let mut nodes = vec![shared.start("a").await, shared.start("b").await];
    let old = shared.tls("a");
    assert!(shared.lets_in("a", &old).await && shared.lets_in("b", &old).await);
    let what = "what=\"cluster_certificate\"";
    let expiry = "forebay_cluster_certificate_expiry_seconds ";
    assert!(nodes[0].metrics().await.contains(expiry));

    // What cannot be used leaves the old ones in force, and is said.
    let kept = std::fs::read(shared.path("a.pem")).unwrap();
    std::fs::write(shared.path("a.pem"), "nothing").unwrap();
    wait_for(async || nodes[0].metric("forebay_reload_stale", what).await == 1.0).await;
    assert!(shared.lets_in("a", &old).await);
    std::fs::write(shared.path("a.pem"), kept).unwrap();
    wait_for(async || nodes[0].metric("forebay_reload_stale", what).await == 0.0).await;

    // All nodes change to another CA, and speak with each other and a third one by that.
    shared.certify(&Authority::new("test", 2).unwrap(), &NODES);
    let new = shared.tls("c");
    wait_for(async || shared.lets_in("a", &new).await && shared.lets_in("b", &new).await).await;
    assert!(!shared.lets_in("a", &old).await && !shared.lets_in("b", &old).await);
    nodes.push(shared.start("c").await);
    each_byte_leaves_the_bucket_once(&shared, &nodes, &objects).await;
}

/// An etcd that lets nobody in.
async fn forbidding_etcd() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let _ = stream.read(&mut [0; 4096]).await;
                let answer =
                    b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
                let _ = stream.write_all(answer).await;
                let _ = stream.shutdown().await;
                let _ = stream.read_to_end(&mut Vec::new()).await;
            });
        }
    });
    address.to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_cannot_join_lets_go_of_what_is_staged() {
    let shared = Shared::new();
    let node = start_in(tempfile::tempdir().unwrap(), &[]).await;
    // The checkpoint stays on its way: an object has the name of its folder.
    node.write("ck", b"0123456789");
    let mut client = node.client().await;
    let path = "/v1/checkpoints/data/ck";
    let begun = client.send(Method::POST, path, &[], "{}").await;
    assert_eq!(begun.status, StatusCode::OK, "{}", begun.text());
    let id = begun.json()["id"].as_str().unwrap().to_owned();
    let file = format!("{path}?id={id}&file=f");
    let put = client.put(&file, &[], "content").await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.text());
    let commit = format!("{path}?id={id}&commit=true");
    let files = r#"{"files": [{"name": "f", "size": 7}]}"#;
    let committed = client.send(Method::POST, &commit, &[], files).await;
    assert_eq!(committed.status, StatusCode::OK, "{}", committed.text());
    drop(client);
    node.node.shutdown(Duration::from_secs(60)).await.unwrap();
    let TestNode { node, dir, .. } = node;
    drop(node);

    let map = format!("etcd://{}/test", forbidding_etcd().await);
    let settings = [
        ("listen.peer", shared.peers[0].as_str()),
        ("cluster.map", map.as_str()),
        ("cluster.node", "a"),
        ("cluster.plain", "true"),
    ];
    let refused = async || {
        let clock = ManualClock::at(Duration::from_secs(1_800_000_000));
        let node = Node::start_with(config(&dir, &settings), Arc::new(clock)).await;
        node.err().map(|e| e.kind())
    };
    // Not `Conflict`: nobody has the cache directory open.
    for _ in 0..2 {
        wait_for(async || refused().await == Some(ErrorKind::PermissionDenied)).await;
    }
}

async fn wait_for(what: impl AsyncFn() -> bool) {
    for _ in 0..3000 {
        if what().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("it did not happen within a minute");
}
