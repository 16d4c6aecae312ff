//! Nodes in one process, each with its own store, over one bucket that counts what leaves it.

use forebay_cluster::{Map, Member, MemberState, Placed, Unit};
use forebay_core::{ByteRange, ManualClock, MemoryBudget};
use forebay_engine::{
    BucketRule, BucketRules, CacheChange, Engine, EngineConfig, FixedBuckets, Freshness,
    PutRequest, ReadOptions,
};
use forebay_format::{ArchiveKind, ArchiveWriter};
use forebay_peer::{
    Answers, Cluster, ClusterAdvice, ClusterBuckets, Dial, Identity, Io, TcpDial, Timing,
};
use forebay_store::{DirConfig, Store, StoreConfig};
use forebay_testing::engine::{MemoryOrigin, NOW, collect, name, noise};
use futures::{StreamExt, future::join_all, stream};
use std::{
    cell::RefCell,
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::{
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
};

#[path = "cluster/batches.rs"]
mod batches;
#[path = "cluster/hot.rs"]
mod hot;
#[path = "cluster/lies.rs"]
mod lies;
#[path = "cluster/mirrors.rs"]
mod mirrors;
#[path = "cluster/slow.rs"]
mod slow;

const MIB: usize = 1 << 20;
const HOUR: Freshness = Freshness::RevalidateAfter(Duration::from_secs(3600));

struct Node {
    id: u64,
    engine: Engine,
    cluster: Arc<Cluster>,
    dial: Arc<SlowDial>,
    /// Accepts connections of peers.
    listening: AbortHandle,
    _tending: JoinSet<()>,
    _dir: tempfile::TempDir,
}

#[derive(Clone, Copy)]
struct Sizes {
    budget: u64,
    cache: u64,
    /// How long a node waits for a sign of life of another one, or for a connection.
    silence: Duration,
    /// No answer of another node is late before.
    late: Duration,
    /// How long a node waits for an answer of another one that is at it.
    answer: Duration,
}

const SIZES: Sizes = Sizes {
    budget: 64 << 20,
    cache: 256 << 20,
    silence: Duration::from_millis(400),
    late: HARDLY_EVER,
    answer: Duration::from_secs(5),
};

/// Where it is not about nodes that answer slowly: this machine may be slow at any time.
const HARDLY_EVER: Duration = Duration::from_secs(3600);

const PATIENT: Sizes = Sizes {
    silence: Duration::from_secs(20),
    ..SIZES
};

struct Nodes {
    origin: Arc<MemoryOrigin>,
    clock: ManualClock,
    nodes: Vec<Node>,
    placed: RefCell<Option<Placed>>,
}

fn map_of(addresses: &[(u64, String, u64)]) -> Map {
    let members = addresses
        .iter()
        .map(|(id, address, weight)| Member {
            id: *id,
            name: String::new(),
            address: address.clone(),
            url: String::new(),
            zone: String::new(),
            weight: *weight,
            state: MemberState::Active,
        })
        .collect();
    Map::new("test", 7, members).unwrap()
}

fn identity(node: u64) -> Identity {
    Identity {
        cluster: "test".into(),
        node,
        boot: 1,
        member: None,
    }
}

/// TCP that takes its time to connect, and counts.
#[derive(Default)]
struct SlowDial {
    after: Duration,
    dials: AtomicU64,
    /// What is changed on the way.
    lie: lies::OnTheWay,
}

#[async_trait::async_trait]
impl Dial for SlowDial {
    async fn dial(&self, node: u64, address: &str) -> std::io::Result<Box<dyn Io>> {
        self.dials.fetch_add(1, SeqCst);
        tokio::time::sleep(self.after).await;
        Ok(self.lie.between(node, TcpDial.dial(node, address).await?))
    }
}

/// Answers peers until it is aborted, which also cuts the connections.
fn listen(listener: TcpListener, cluster: Arc<Cluster>, engine: Engine) -> AbortHandle {
    let answers = Arc::new(Answers::new(cluster, engine));
    let accepting = tokio::spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let answers = answers.clone();
            connections.spawn(async move {
                let _ = answers.serve(stream, std::future::pending()).await;
            });
        }
    });
    accepting.abort_handle()
}

impl Nodes {
    async fn start(n: u64, freshness: Freshness) -> Nodes {
        let maps = |addresses: &[(u64, String, u64)]| vec![map_of(addresses); n as usize];
        Self::with_maps(n, freshness, SIZES, Duration::ZERO, maps).await
    }

    /// Where no node is given up only because this machine has much to do.
    async fn patient(n: u64) -> Nodes {
        let maps = |addresses: &[(u64, String, u64)]| vec![map_of(addresses); n as usize];
        Self::with_maps(n, HOUR, PATIENT, Duration::ZERO, maps).await
    }

    /// Each with a cache of this size.
    async fn with_caches(n: u64, cache: usize) -> Nodes {
        let maps = |addresses: &[(u64, String, u64)]| vec![map_of(addresses); n as usize];
        let sizes = Sizes {
            cache: cache as u64,
            ..PATIENT
        };
        Self::with_maps(n, HOUR, sizes, Duration::ZERO, maps).await
    }

    /// Each node has its own map.
    async fn with_maps(
        n: u64,
        freshness: Freshness,
        sizes: Sizes,
        after: Duration,
        maps: impl Fn(&[(u64, String, u64)]) -> Vec<Map>,
    ) -> Nodes {
        let origin = Arc::new(MemoryOrigin::default());
        let clock = ManualClock::at(NOW);
        let mut listeners = Vec::new();
        for _ in 0..n {
            listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
        }
        let addresses: Vec<_> = (1..=n)
            .zip(&listeners)
            .map(|(id, l)| (id, l.local_addr().unwrap().to_string(), 1 << 40))
            .collect();
        let nodes = maps(&addresses)
            .into_iter()
            .zip(listeners)
            .zip(1..)
            .map(|((map, listener), id)| {
                let dial = Arc::new(SlowDial {
                    after,
                    ..SlowDial::default()
                });
                Node::start(id, map, listener, dial, &origin, &clock, freshness, sizes)
            })
            .collect();
        Nodes {
            origin,
            clock,
            nodes,
            placed: RefCell::default(),
        }
    }

    /// The place of the node that owns this byte, by the first node's map.
    fn owner(&self, key: &str, at: usize) -> usize {
        let map = self.nodes[0].cluster.map();
        let mut known = self.placed.borrow_mut();
        if known.as_ref().is_none_or(|placed| *placed.map() != map) {
            *known = Some(Placed::new(map));
        }
        let unit = Unit::at(name(key).hash128(), at as u64);
        let owner = known.as_ref().unwrap().owner(&unit).unwrap();
        self.nodes.iter().position(|n| n.id == owner).unwrap()
    }

    /// The place of the node that owns the first unit of an object.
    fn home(&self, key: &str) -> usize {
        self.owner(key, 0)
    }

    /// Keys whose home is this node.
    fn keys_at<const N: usize>(&self, place: usize) -> [String; N] {
        let keys = (0..).map(|n| format!("key-{n}"));
        let keys: Vec<_> = keys.filter(|key| self.home(key) == place).take(N).collect();
        keys.try_into().unwrap()
    }

    /// Puts objects into the bucket.
    fn have(&self, objects: &Objects) {
        for (key, data) in objects {
            self.origin.set(key, data.clone());
        }
    }

    /// Waits until no node makes room any more, which goes on in the background.
    async fn at_rest(&self, objects: &Objects) {
        let all_here = || -> usize {
            let here = |node: &Node| objects.keys().filter(|key| node.has(key)).count();
            self.nodes.iter().map(here).sum()
        };
        let (mut before, mut looks) = (all_here(), 0);
        while looks < 3 {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let now = all_here();
            looks = if now == before { looks + 1 } else { 0 };
            before = now;
        }
    }

    fn left_bucket(&self) -> u64 {
        self.origin.bytes_out.load(SeqCst)
    }
}

impl Node {
    fn start(
        id: u64,
        map: Map,
        listener: TcpListener,
        dial: Arc<SlowDial>,
        origin: &Arc<MemoryOrigin>,
        clock: &ManualClock,
        freshness: Freshness,
        sizes: Sizes,
    ) -> Node {
        let timing = Timing {
            probe: Duration::from_millis(50),
            answer: sizes.answer,
            silence: sizes.silence,
            late: sizes.late,
            connect: sizes.silence.max(Timing::default().connect),
        };
        let placed = Arc::new(Placed::new(map));
        let cluster = Cluster::new(identity(id), placed, dial.clone(), timing).unwrap();
        let mut buckets = FixedBuckets::default();
        buckets.0.insert("data".into(), origin.clone());
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(
            StoreConfig {
                dirs: vec![DirConfig {
                    path: dir.path().to_owned(),
                    capacity_bytes: sizes.cache,
                }],
                ..Default::default()
            },
            Arc::new(clock.clone()),
        )
        .unwrap();
        let rules = BucketRules {
            default: BucketRule {
                freshness,
                cache: true,
                ..BucketRule::default()
            },
            ..Default::default()
        };
        let engine = Engine::new(
            EngineConfig {
                rules,
                ..Default::default()
            },
            Arc::new(ClusterBuckets::new(Arc::new(buckets), cluster.clone())),
            Some(Arc::new(store)),
            Arc::new(clock.clone()),
            MemoryBudget::new(sizes.budget),
        );
        let advice = ClusterAdvice::new(cluster.clone(), None);
        engine.set_advisor(Some(Arc::new(advice)));
        let mut tending = JoinSet::new();
        let tended = cluster.clone();
        tending.spawn(async move { tended.tend().await });
        Node {
            id,
            listening: listen(listener, cluster.clone(), engine.clone()),
            engine,
            cluster,
            dial,
            _tending: tending,
            _dir: dir,
        }
    }

    async fn get(&self, key: &str) -> forebay_core::Result<Vec<u8>> {
        let options = ReadOptions::default();
        let read = self.engine.read(&name(key), None, &options).await?;
        collect(read.body).await
    }

    /// Reads all of them, a few at a time, in an order of its own.
    async fn read_all(&self, objects: &Objects, round: u64) {
        let mut keys: Vec<_> = objects.keys().collect();
        keys.sort_by_key(|key| name(key).hash128() as u64 ^ noise_of(self.id * 100 + round));
        let reads = stream::iter(keys).map(async |key: &String| {
            assert!(self.get(key).await.unwrap() == objects[key], "{key}");
        });
        reads.buffer_unordered(6).collect::<()>().await;
    }

    /// Questions that it has asked other nodes.
    fn questions(&self) -> u64 {
        self.cluster.links().iter().map(|l| l.questions).sum()
    }

    /// Bytes that other nodes have sent it.
    fn received(&self) -> u64 {
        self.cluster.links().iter().map(|l| l.received_bytes).sum()
    }

    fn has(&self, key: &str) -> bool {
        self.engine.is_cached(&name(key))
    }

    async fn put(&self, key: &str, data: &'static [u8]) {
        let body = stream::iter([Ok(data.into())]).boxed();
        self.engine
            .put(
                &name(key),
                PutRequest::default(),
                Some(data.len() as u64),
                body,
            )
            .await
            .unwrap();
    }
}

type Objects = BTreeMap<String, Vec<u8>>;

/// So many small objects, with these first letters.
fn small_objects(of: &str, n: usize, bytes: usize) -> Objects {
    let sized = |i: usize| bytes / 2 + bytes * i / n;
    (0..n)
        .map(|i| (format!("{of}-{i}"), noise(sized(i), i as u64)))
        .collect()
}

fn noise_of(seed: u64) -> u64 {
    u64::from_le_bytes(noise(8, seed).try_into().unwrap())
}

fn bytes_of(objects: &Objects) -> u64 {
    objects.values().map(|data| data.len() as u64).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_byte_leaves_the_bucket_once_for_all_nodes() {
    let n = Nodes::patient(3).await;
    let mut objects = BTreeMap::new();
    for i in 0..40usize {
        objects.insert(format!("small-{i}"), noise(10_000 + i, i as u64));
    }
    for i in 0..3usize {
        objects.insert(
            format!("large-{i}"),
            noise((9 + 8 * i) * MIB + 17, 99 + i as u64),
        );
    }
    for (key, data) in &objects {
        n.origin.set(key, data.clone());
    }
    for round in 0..2 {
        for node in &n.nodes {
            let reads = objects.iter().map(async |(key, data)| {
                assert!(
                    node.get(key).await.unwrap() == *data,
                    "round {round}: {key}"
                );
            });
            join_all(reads).await;
        }
    }
    let all: usize = objects.values().map(Vec::len).sum();
    assert_eq!(n.left_bucket(), all as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_readers_at_all_nodes_share_each_run_of_a_cold_object() {
    let n = Nodes::patient(3).await;
    let data = noise(30 * MIB, 1);
    n.origin.set("large", data.clone());
    *n.origin.latency.lock() = Duration::from_millis(20);
    let reads = (0..60).map(async |i: usize| {
        assert!(n.nodes[i % 3].get("large").await.unwrap() == data);
    });
    join_all(reads).await;
    assert_eq!(n.left_bucket(), data.len() as u64);
    let gets = n.origin.gets.lock().len();
    assert!(gets <= 8, "{gets} requests for four extents");
}

/// Parts of cold large objects, as loaders read them: whoever reads them, and wherever, each chunk
/// that somebody wants leaves the bucket once, and no other does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_readers_of_parts_share_each_run() {
    let data = noise(26 * MIB, 1);
    for (nodes, largest, readers) in [(3, MIB, 40), (5, 9 * MIB, 24), (5, 9, 5)] {
        let n = Nodes::patient(nodes).await;
        *n.origin.latency.lock() = Duration::from_millis(20);
        let mut wanted = 0;
        for object in 0..2 {
            let key = format!("large-{object}");
            n.origin.set(&key, data.clone());
            let part = |i: u64| {
                let seed = noise_of(1000 * nodes + 100 * object + i);
                let at = (seed % data.len() as u64) as usize;
                let length = 1 + (seed >> 32) as usize % largest;
                at..(at + length).min(data.len())
            };
            let mut chunks: Vec<bool> = vec![false; data.len() / MIB];
            let reads = (0..readers).map(|i| {
                let part = part(i);
                chunks[part.start / MIB..part.end.div_ceil(MIB)].fill(true);
                let (node, data, key) = (&n.nodes[i as usize % n.nodes.len()], &data, name(&key));
                async move {
                    // Some come while others are under way.
                    tokio::time::sleep(Duration::from_millis(i % 4 * 15)).await;
                    let range = ByteRange::Inclusive(part.start as u64, part.end as u64 - 1);
                    let options = ReadOptions::default();
                    let read = node.engine.read(&key, Some(range), &options).await.unwrap();
                    let read = collect(read.body).await.unwrap();
                    assert!(read == data[part.clone()], "{part:?} at node {}", node.id);
                }
            });
            join_all(reads.collect::<Vec<_>>()).await;
            wanted += chunks.iter().filter(|is| **is).count() * MIB;
        }
        let left = n.left_bucket() as usize;
        assert_eq!(
            left,
            wanted,
            "{nodes} nodes, {readers} readers of up to {largest} bytes: {:.2} times",
            left as f64 / wanted as f64
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_dies_costs_a_reroute_and_no_error() {
    let n = Nodes::start(3, HOUR).await;
    let data = noise(40 * MIB, 1);
    n.origin.set("large", data.clone());
    let asker = (n.home("large") + 1) % 3;
    // It dies in the middle of reads.
    let reads = (0..8).map(|_| n.nodes[asker].get("large"));
    let die = async {
        tokio::time::sleep(Duration::from_millis(30)).await;
        n.nodes[n.home("large")].listening.abort();
    };
    let (reads, ()) = tokio::join!(join_all(reads), die);
    assert!(reads.into_iter().all(|read| read.unwrap() == data));
    // And is dead for new ones.
    for i in 0..20 {
        let key = format!("small-{i}");
        n.origin.set(&key, noise(5000, i));
        assert_eq!(n.nodes[asker].get(&key).await.unwrap(), noise(5000, i));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_silent_is_given_up_within_a_second_and_then_not_asked() {
    // What is given up later than that is waited for.
    let sizes = Sizes {
        answer: Duration::from_secs(120),
        ..SIZES
    };
    let maps = |addresses: &[(u64, String, u64)]| vec![map_of(addresses); 2];
    let n = Nodes::with_maps(2, HOUR, sizes, Duration::ZERO, maps).await;
    let (silent, asker) = (&n.nodes[0], &n.nodes[1]);
    let [first, second] = n.keys_at(0);
    for (seed, key) in [&first, &second].into_iter().enumerate() {
        n.origin.set(key, noise(5000, seed as u64));
    }
    // The kernel still accepts connections for it.
    let address = n.nodes[0].cluster.map().members[0].address.clone();
    silent.listening.abort();
    while !silent.listening.is_finished() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let listener = TcpListener::bind(&address).await.unwrap();
    let began = Instant::now();
    assert_eq!(asker.get(&first).await.unwrap(), noise(5000, 0));
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
    let asked = asker.questions();
    assert_eq!(asker.get(&second).await.unwrap(), noise(5000, 1));
    assert_eq!(asker.questions(), asked);
    // It answers again, and is asked again.
    let _again = listen(listener, silent.cluster.clone(), silent.engine.clone());
    let mut later = n.keys_at::<12>(0).into_iter().skip(2);
    loop {
        for _ in 0..1200 {
            if n.nodes[1].cluster.answers(silent.id) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // On a busy machine it may be given up again meanwhile.
        let key = later.next().expect("its owner fetches one of them");
        n.origin.set(&key, noise(5000, 2));
        assert_eq!(asker.get(&key).await.unwrap(), noise(5000, 2));
        if silent.engine.is_cached(&name(&key)) {
            break;
        }
    }
    assert!(!silent.engine.is_cached(&name(&second)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_written_at_one_node_is_read_at_all() {
    let n = Nodes::patient(3).await;
    for (i, key) in (0..30).map(|i| (i, format!("key-{i}"))) {
        let (writer, reader) = (&n.nodes[i % 3], &n.nodes[(i / 3) % 3]);
        n.origin.set(&key, "old");
        assert_eq!(n.nodes[n.home(&key)].get(&key).await.unwrap(), b"old");
        writer.put(&key, b"new").await;
        assert_eq!(reader.get(&key).await.unwrap(), b"new", "{key}");
        assert_eq!(writer.get(&key).await.unwrap(), b"new", "{key}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_reads_what_it_wrote_though_its_home_did_not_hear_of_it() {
    let n = Nodes::start(2, HOUR).await;
    let [key] = n.keys_at(0);
    n.origin.set(&key, "old");
    assert_eq!(n.nodes[0].get(&key).await.unwrap(), b"old");
    let address = n.nodes[0].cluster.map().members[0].address.clone();
    n.nodes[0].listening.abort();
    while !n.nodes[0].listening.is_finished() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    n.nodes[1].put(&key, b"new").await;
    assert_eq!(n.nodes[1].get(&key).await.unwrap(), b"new");
    // The home comes back with what it knew, and hears of it.
    let listener = TcpListener::bind(&address).await.unwrap();
    let _again = listen(
        listener,
        n.nodes[0].cluster.clone(),
        n.nodes[0].engine.clone(),
    );
    for _ in 0..1200 {
        if n.nodes[0].get(&key).await.unwrap() == b"new" {
            return;
        }
        assert_eq!(n.nodes[1].get(&key).await.unwrap(), b"new");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the home was not told");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_each_think_the_other_owns_everything_do_not_wait_for_each_other() {
    let maps = |addresses: &[(u64, String, u64)]| {
        let weighted = |weights: [u64; 2]| {
            let with = addresses.iter().zip(weights);
            let with: Vec<_> = with.map(|((id, a, _), w)| (*id, a.clone(), w)).collect();
            map_of(&with)
        };
        vec![weighted([1, 1 << 40]), weighted([1 << 40, 1])]
    };
    // Both ask each other at the same time: for a small object, and for a chunk of a large one.
    let dial = Duration::from_millis(50);
    // If they waited, it would be for so long.
    let sizes = Sizes {
        answer: Duration::from_secs(120),
        ..SIZES
    };
    let n = Nodes::with_maps(2, HOUR, sizes, dial, maps).await;
    n.origin.set("small", noise(5000, 1));
    let read = join_all(n.nodes.iter().map(|node| node.get("small")));
    let read = tokio::time::timeout(Duration::from_secs(30), read);
    let read = read.await.expect("nobody waits for who waits for it");
    assert!(read.into_iter().all(|read| read.unwrap() == noise(5000, 1)));

    let n = Nodes::with_maps(2, HOUR, sizes, dial, maps).await;
    n.origin.set("large", noise(20 * MIB, 2));
    let meta = Arc::new(n.origin.objects.lock()["large"].1.clone());
    let large = name("large");
    let read = join_all(n.nodes.iter().map(async |node| {
        let mut out = Vec::new();
        let range = 9 << 20..12 << 20;
        let read = node.engine.read_version(&large, &meta, range, &mut out);
        read.await.unwrap();
        out
    }));
    let read = tokio::time::timeout(Duration::from_secs(30), read);
    let read = read.await.expect("nobody waits for who waits for it");
    assert!(
        read.iter()
            .all(|read| *read == noise(20 * MIB, 2)[9 << 20..12 << 20])
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_is_as_old_at_the_asker_as_at_its_home() {
    let n = Nodes::patient(2).await;
    let [key] = n.keys_at(0);
    n.origin.set(&key, "one");
    assert_eq!(n.nodes[0].get(&key).await.unwrap(), b"one");
    n.clock.advance(Duration::from_secs(3000));
    assert_eq!(n.nodes[1].get(&key).await.unwrap(), b"one");
    // Another program writes it.
    n.origin.set(&key, "two");
    n.clock.advance(Duration::from_secs(590));
    assert_eq!(
        n.nodes[1].get(&key).await.unwrap(),
        b"one",
        "within the hour"
    );
    n.clock.advance(Duration::from_secs(20));
    assert_eq!(n.nodes[1].get(&key).await.unwrap(), b"two");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_bucket_are_told_as_they_are() {
    let n = Nodes::patient(3).await;
    for i in 0..9 {
        let e = n.nodes[i % 3]
            .get(&format!("absent-{i}"))
            .await
            .unwrap_err();
        assert_eq!(e.kind(), forebay_core::ErrorKind::NotFound, "{e}");
    }
    let requests = n.origin.requests();
    assert_eq!(
        requests, 9,
        "nobody else was asked for what the home says is not there"
    );
}

#[tokio::test]
async fn only_nodes_of_the_cluster_are_answered() {
    let n = Nodes::start(1, HOUR).await;
    let address = n.nodes[0].cluster.map().members[0].address.clone();
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    for greeting in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], &[0xff; 64]] {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        stream.write_all(greeting).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(answer.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn questions_one_after_the_other_share_a_connection() {
    let n = Nodes::patient(2).await;
    n.origin.set("large", noise(20 * MIB, 1));
    for (i, key) in n.keys_at::<20>(0).iter().enumerate() {
        n.origin.set(key, noise(5000 + 100_000 * i, i as u64));
        n.nodes[1].get(key).await.unwrap();
    }
    n.nodes[1].get("large").await.unwrap();
    let dials = n.nodes[1].dial.dials.load(SeqCst);
    assert!(dials <= 3, "{dials} connections");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_was_written_past_the_cluster_is_read_anew() {
    let n = Nodes::patient(3).await;
    let (old, new) = (noise(40 * MIB, 1), noise(40 * MIB, 2));
    n.origin.set("large", old.clone());
    let home = n.home("large");
    let (large, options) = (name("large"), ReadOptions::default());
    let first = n.nodes[home].engine.read(&large, None, &options);
    let mut first = first.await.unwrap().body;
    assert!(first.next().await.unwrap().is_ok());
    drop(first);
    tokio::time::sleep(Duration::from_millis(100)).await;
    n.origin.set("large", new.clone());
    for place in [home + 1, home + 2, home] {
        let node = &n.nodes[place % 3];
        // The first may find out only while its answer is under way.
        for attempt in 0..3 {
            match node.get("large").await {
                Ok(read) => {
                    assert!(
                        read == new,
                        "node {place} mixes versions, or reads the old one"
                    );
                    break;
                }
                Err(e) => assert!(attempt < 2, "{e}"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_little_memory_do_not_wait_for_each_others() {
    // What others own is kept, or passes.
    for cache in [256 << 20, 16 << 20] {
        let maps = |addresses: &[(u64, String, u64)]| vec![map_of(addresses); 3];
        let sizes = Sizes {
            budget: 8 << 20,
            cache,
            ..SIZES
        };
        let n = Nodes::with_maps(3, HOUR, sizes, Duration::ZERO, maps).await;
        for i in 0..6 {
            n.origin.set(&format!("large-{i}"), noise(20 * MIB, i));
        }
        let reads = (0..36).map(async |i: usize| {
            let key = format!("large-{}", i % 6);
            let read = n.nodes[i / 6 % 3].get(&key).await.unwrap();
            assert!(read == noise(20 * MIB, i as u64 % 6));
        });
        let reads = tokio::time::timeout(Duration::from_secs(150), join_all(reads));
        reads.await.expect("memory goes round");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_fits_the_cluster_but_no_node_stays_partitioned() {
    let n = Nodes::with_caches(3, 56 * MIB).await;
    let mut objects = small_objects("small", 300, 200 << 10);
    for i in 0..3 {
        objects.insert(format!("large-{i}"), noise(11 * MIB + i, i as u64));
    }
    n.have(&objects);
    let all = bytes_of(&objects);
    assert!(all > 85 << 20);
    let mut after = Vec::new();
    for round in 0..3 {
        for node in &n.nodes {
            node.read_all(&objects, round).await;
            n.at_rest(&objects).await;
            after.push(n.left_bucket() as f64 / all as f64);
        }
    }
    println!("left the bucket, of all bytes, after each node's reading of all: {after:.3?}");
    assert!(after[8] <= 1.01, "{after:?}");
    // All that a node has room for besides is of others.
    for (place, node) in n.nodes.iter().enumerate() {
        let own = objects.keys().filter(|key| n.home(key) == place);
        let lacks: Vec<_> = own.filter(|key| !node.has(key)).collect();
        assert!(lacks.is_empty(), "node {place} lacks {lacks:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_fits_each_node_becomes_local() {
    let n = Nodes::with_caches(3, 64 * MIB).await;
    let mut objects = small_objects("small", 100, 200 << 10);
    objects.insert("large".into(), noise(19 * MIB, 1));
    n.have(&objects);
    for node in &n.nodes {
        node.read_all(&objects, 0).await;
    }
    let asked: Vec<_> = n.nodes.iter().map(Node::questions).collect();
    let requests = n.origin.requests();
    for node in &n.nodes {
        node.read_all(&objects, 1).await;
    }
    assert_eq!(
        n.nodes.iter().map(Node::questions).collect::<Vec<_>>(),
        asked
    );
    assert_eq!(n.origin.requests(), requests);
    assert_eq!(n.left_bucket(), bytes_of(&objects));
}

/// A cluster of two whose first node has no room to spare, and what fills it.
async fn with_a_full_node() -> (Nodes, Objects) {
    let n = Nodes::with_caches(2, 24 * MIB).await;
    let own = small_objects("own", 600, 100 << 10);
    let own: Objects = own.into_iter().filter(|(k, _)| n.home(k) == 0).collect();
    n.have(&own);
    assert!(bytes_of(&own) > 24 << 20);
    n.nodes[0].read_all(&own, 0).await;
    n.at_rest(&own).await;
    (n, own)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_has_no_room_passes_with_one_question_to_each_owner_of_a_run() {
    let (n, own) = with_a_full_node().await;
    let node = &n.nodes[0];
    let before: Vec<_> = own.keys().filter(|key| node.has(key)).collect();
    let small = small_objects("of-others", 50, 100 << 10);
    let small: Objects = small.into_iter().filter(|(k, _)| n.home(k) == 1).collect();
    n.have(&small);
    node.read_all(&small, 0).await;
    assert!(small.keys().all(|key| !node.has(key)));
    assert!(
        before.iter().all(|key| node.has(key)),
        "nothing goes for what others own"
    );

    let large = noise(60 * MIB, 3);
    n.origin.set("large", large.clone());
    let units = (0..60)
        .step_by(8)
        .filter(|mib| n.owner("large", mib * MIB) == 1);
    let units = units.count() as u64;
    assert!((2..=6).contains(&units), "both have some of it");
    let asked = node.questions();
    assert!(node.get("large").await.unwrap() == large);
    let asked = node.questions() - asked;
    assert!(asked <= units + 2, "{asked} questions for {units} units");

    // A part of a chunk comes alone.
    let large_name = name("large");
    let at = (0..60)
        .step_by(8)
        .find(|mib| n.owner("large", mib * MIB) == 1)
        .unwrap()
        * MIB;
    let (received, range) = (node.received(), at as u64 + 1000..at as u64 + 11_000);
    let mut out = Vec::new();
    let meta = Arc::new(n.origin.objects.lock()["large"].1.clone());
    let read = node
        .engine
        .read_version(&large_name, &meta, range, &mut out);
    read.await.unwrap();
    assert!(out == large[at + 1000..at + 11_000]);
    assert_eq!(node.received() - received, 10_000);

    // Readers who stop for a while keep nobody waiting.
    let slow = join_all((0..20).map(async |_| {
        let options = ReadOptions::default();
        let read = node.engine.read(&large_name, None, &options);
        let mut body = read.await.unwrap().body;
        body.next().await.unwrap().unwrap();
        body
    }));
    let slow = slow.await;
    let read = tokio::time::timeout(Duration::from_secs(30), node.get("large"));
    assert!(read.await.expect("there is memory for it").unwrap() == large);
    assert!(n.nodes[0].get(small.keys().next().unwrap()).await.is_ok());
    drop(slow);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_archive_of_others_is_indexed_run_by_run() {
    let (n, _own) = with_a_full_node().await;
    let node = &n.nodes[0];
    let (mut writer, mut tar) = (ArchiveWriter::new(ArchiveKind::Tar), Vec::new());
    for i in 0..300 {
        let data = noise(100_000, i);
        let begun = writer.begin_entry(&format!("{i}"), 100_000, 0, &mut tar);
        begun.unwrap();
        writer.data(&data, &mut tar).unwrap();
        writer.end_entry(&mut tar).unwrap();
    }
    writer.finish(&mut tar).unwrap();
    n.origin.set("a.tar", tar.clone());
    let (archive, options) = (name("a.tar"), ReadOptions::default());
    for member in [299, 150, 3] {
        let (asked, path) = (node.questions(), member.to_string());
        let read = node.engine.read_member(&archive, &path, None, &options);
        let read = collect(read.await.unwrap().body).await.unwrap();
        assert!(read == noise(100_000, member));
        let asked = node.questions() - asked;
        assert!(asked <= 8, "{asked} questions for {} MiB", tar.len() >> 20);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wanted_on_a_disk_is_kept_there_without_room_to_spare() {
    let (n, _own) = with_a_full_node().await;
    let node = &n.nodes[0];
    let [warmed, pinned, read] = n.keys_at(1);
    n.have(
        &[&warmed, &pinned, &read]
            .map(|k| (k.clone(), noise(50_000, 1)))
            .into(),
    );
    node.engine.warm(&name(&warmed), false).await;
    let pin = node
        .engine
        .change_cache(CacheChange::Pin, vec![name(&pinned)], false);
    pin.await.unwrap();
    for key in [&pinned, &read] {
        node.get(key).await.unwrap();
    }
    assert!(node.has(&warmed), "a warm-up");
    assert!(node.has(&pinned), "a pin");
    assert!(!node.has(&read));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stand_in_keeps_what_it_fetches() {
    let (n, _own) = with_a_full_node().await;
    let [first, second, third] = n.keys_at(1);
    n.have(
        &[&first, &second, &third]
            .map(|k| (k.clone(), noise(50_000, 1)))
            .into(),
    );
    n.nodes[0].get(&first).await.unwrap();
    assert!(!n.nodes[0].has(&first));
    n.nodes[1].listening.abort();
    while !n.nodes[1].listening.is_finished() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // The first to find out, and who knows.
    for key in [&second, &third] {
        n.nodes[0].get(key).await.unwrap();
        assert!(n.nodes[0].has(key));
    }
    let left = n.left_bucket();
    for key in [&second, &third] {
        n.nodes[0].get(key).await.unwrap();
    }
    assert_eq!(n.left_bucket(), left);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_owned_is_kept_for_the_new_owner_and_what_others_own_goes() {
    // The fourth node has next to nothing at first.
    let maps = |addresses: &[(u64, String, u64)]| {
        let mut addresses = addresses.to_vec();
        addresses[3].2 = 1;
        vec![map_of(&addresses); 4]
    };
    let sizes = Sizes {
        cache: 48 << 20,
        ..PATIENT
    };
    let n = Nodes::with_maps(4, HOUR, sizes, Duration::ZERO, maps).await;
    let objects = small_objects("old", 300, 100 << 10);
    n.have(&objects);
    for node in &n.nodes[..3] {
        node.read_all(&objects, 0).await;
    }
    let owned = [0, 1, 2].map(|place| {
        let keys = objects.keys().filter(|key| n.home(key) == place);
        keys.collect::<Vec<_>>()
    });
    let mut members = n.nodes[0].cluster.map().members;
    members[3].weight = members[0].weight;
    let map = n.nodes[0].cluster.map().with(members).unwrap();
    let map = Arc::new(Placed::new(map));
    for node in &n.nodes {
        node.cluster.advance(map.clone(), Duration::ZERO).unwrap();
    }
    let moved: Vec<_> = objects.keys().filter(|key| n.home(key) == 3).collect();
    assert!(moved.len() > 40);
    // Each node gets more that it owns now, and needs the room.
    let more = small_objects("new", 900, 100 << 10);
    n.have(&more);
    for (place, node) in n.nodes[..3].iter().enumerate() {
        let own = more.iter().filter(|(key, _)| n.home(key) == place);
        let own: Objects = own.map(|(k, d)| (k.clone(), d.clone())).collect();
        assert!(bytes_of(&own) > 16 << 20);
        node.read_all(&own, 0).await;
        n.at_rest(&own).await;
        let lacks = owned[place].iter().filter(|key| !node.has(key)).count();
        assert_eq!(
            lacks,
            0,
            "of {} that node {place} owned",
            owned[place].len()
        );
        let others = objects.keys().filter(|key| node.has(key)).count() - owned[place].len();
        assert!(others < 150, "{others} of others are left");
    }
    let left = n.left_bucket();
    // A version is asked for: which one is current only the bucket knows.
    for key in moved {
        let meta = Arc::new(n.origin.objects.lock()[key].1.clone());
        let (key, mut out) = (name(key), Vec::new());
        let whole = 0..meta.size;
        let read = n.nodes[3].engine.read_version(&key, &meta, whole, &mut out);
        read.await.unwrap();
        assert!(out == objects[key.key()]);
    }
    assert_eq!(n.left_bucket(), left, "it came from those who owned it");
}

/// A node that joins reads what the others have from them, heads included, but not what was written
/// since.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_joins_reads_nothing_again_and_nothing_old() {
    let mut n = Nodes::patient(3).await;
    let objects: Vec<_> = (0..60u64)
        .map(|i| (format!("key-{i}"), noise(3000 + i as usize, i)))
        .chain([("large".to_owned(), noise(20 * MIB, 99))])
        .collect();
    for (key, data) in &objects {
        n.origin.set(key, data.clone());
        assert!(n.nodes[0].get(key).await.unwrap() == *data);
    }
    let before = n.left_bucket();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut members = n.nodes[0].cluster.map().members;
    members.push(Member {
        id: 4,
        address: listener.local_addr().unwrap().to_string(),
        ..members[0].clone()
    });
    let old = n.nodes[0].cluster.map();
    let next = Arc::new(Placed::new(old.with(members.clone()).unwrap()));
    let alone = Map::new("test", 1, vec![members[3].clone()]).unwrap();
    // It learns the map before, as whoever joins by etcd does.
    let joins = Node::start(
        4,
        Map { epoch: 0, ..alone },
        listener,
        Arc::default(),
        &n.origin,
        &n.clock,
        HOUR,
        PATIENT,
    );
    let old = Arc::new(Placed::new(old));
    joins.cluster.advance(old, Duration::ZERO).unwrap();
    n.nodes.push(joins);
    for node in &n.nodes {
        node.cluster.advance(next.clone(), Duration::ZERO).unwrap();
    }
    let new: Vec<&String> = objects
        .iter()
        .map(|(key, _)| key)
        .filter(|key| next.owner(&Unit::at(name(key).hash128(), 0)) == Some(4))
        .collect();
    assert!(new.len() > 5, "{}", new.len());
    // One of them is written before anybody has read it at its new home.
    n.nodes[1].put(new[0], b"written since").await;
    for node in &n.nodes[1..] {
        for (key, data) in &objects {
            let read = node.get(key).await.unwrap();
            match key == new[0] {
                true => assert!(read == b"written since", "at node {}", node.id),
                false => assert!(read == *data, "{key} at node {}", node.id),
            }
        }
    }
    let again = n.left_bucket() - before;
    assert!(
        again <= 2 * b"written since".len() as u64,
        "{again} bytes were read again"
    );
}
