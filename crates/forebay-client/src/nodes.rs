//! The nodes that a client may ask, and which of them the next call goes to.
//!
//! Each client has an order of preference: a node on this machine, then the others in an order that
//! is random for each client, so that many clients spread over all nodes. Calls go to the first node
//! of that order that is not known to have failed, so that connections and what a node has opened
//! stay warm. One that failed is looked at in the background, [`PROBE_AFTER`] later, when a call is
//! made; calls go to it again once it answers.
//!
//! A name that leads to several addresses, as that of a headless service, is that many nodes. Names
//! are resolved again in the background every [`RESOLVE_EVERY`], or [`RESOLVE_PAUSE`] if a node
//! failed; where all have failed, the next call waits for that.
//!
//! Invariant: a client of one node asks that one, and does nothing else.

use crate::{
    client::Settings,
    failure::{Failure, Missed, Result},
    node::{Common, Node},
    owners,
};
use forebay_core::{sync::Mutex, threads::blocking};
use forebay_protocol::{ADDRESSES_MAX, Address};
use futures::future::BoxFuture;
use std::{
    cmp::Reverse,
    hash::{BuildHasher, RandomState},
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};
use tokio::{
    sync::Mutex as AsyncMutex,
    time::{Instant, timeout},
};

/// How long after its failure a node is looked at again.
pub(crate) const PROBE_AFTER: Duration = Duration::from_secs(5);
/// How long connecting to a node may take, at most, where another could be asked.
pub(crate) const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How often names are resolved: while all is well, and at most.
const RESOLVE_EVERY: Duration = Duration::from_secs(30);
const RESOLVE_PAUSE: Duration = Duration::from_secs(2);
/// How many nodes are asked at a time whether they are on this machine.
const SEARCHES_MAX: usize = 8;

/// Finds the addresses of a name.
pub trait Resolve: Send + Sync {
    /// All addresses of `host`, with this port.
    ///
    /// # Errors
    /// Why there are none.
    fn resolve<'a>(
        &'a self,
        host: &'a str,
        port: u16,
    ) -> BoxFuture<'a, io::Result<Vec<SocketAddr>>>;
}

/// The system's resolver.
pub(crate) struct System;

impl Resolve for System {
    fn resolve<'a>(
        &'a self,
        host: &'a str,
        port: u16,
    ) -> BoxFuture<'a, io::Result<Vec<SocketAddr>>> {
        let host = host.to_owned();
        Box::pin(async move {
            if let Ok(ip) = host.parse::<IpAddr>() {
                return Ok(vec![SocketAddr::new(ip, port)]);
            }
            // Not the runtime's own way, which panics where the system gives no thread.
            let found = blocking(move || (host.as_str(), port).to_socket_addrs()).await;
            Ok(found.map_err(io::Error::other)??.collect())
        })
    }
}

pub(crate) struct Nodes {
    common: Arc<Common>,
    /// In the order of preference.
    current: Mutex<Arc<[Arc<Node>]>>,
    /// Whether some addresses are names that may lead to several nodes.
    has_names: bool,
    /// Held while names are resolved.
    resolving: AsyncMutex<()>,
    /// When names were last resolved, and whether a node has failed since.
    resolved: Mutex<(Option<Instant>, bool)>,
    /// What makes the order random.
    random: (RandomState, u128),
    /// A node that said that it is on this machine.
    here: Mutex<Option<(Address, Option<SocketAddr>)>>,
    searched: AtomicBool,
    moves: AtomicU64,
    owners: Mutex<owners::Known>,
}

impl Nodes {
    pub fn new(settings: Settings) -> Result<Nodes> {
        let has_names = settings.addresses.all().iter().any(may_be_several);
        let common = Arc::new(Common::new(settings)?);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        // A forked process would otherwise have its parent's randomness.
        let salt = now.map_or(0, |d| d.as_nanos()) ^ (u128::from(std::process::id()) << 64);
        let nodes = Nodes {
            common,
            current: Mutex::new(Arc::new([])),
            has_names,
            resolving: AsyncMutex::default(),
            resolved: Mutex::default(),
            random: (RandomState::new(), salt),
            here: Mutex::default(),
            searched: AtomicBool::new(false),
            moves: AtomicU64::new(0),
            owners: Mutex::default(),
        };
        let given = nodes.settings().addresses.all().iter();
        nodes.replace(given.map(|address| (address.clone(), None)).collect())?;
        Ok(nodes)
    }

    pub fn settings(&self) -> &Settings {
        &self.common.settings
    }

    pub fn common(&self) -> &Arc<Common> {
        &self.common
    }

    pub fn owners(&self) -> &Mutex<owners::Known> {
        &self.owners
    }

    /// How often calls moved to another node, or could not.
    pub fn moves(&self) -> u64 {
        self.moves.load(Relaxed)
    }

    /// The nodes that are known, in the order of preference; at least one.
    pub fn known(&self) -> Arc<[Arc<Node>]> {
        self.current.lock().clone()
    }

    /// How long connecting to one of them may take.
    pub fn connect_limit(&self, nodes: &[Arc<Node>]) -> Duration {
        let limit = self.settings().timeouts.connect;
        match nodes.len() {
            1 => limit,
            _ => limit.min(CONNECT_MAX),
        }
    }

    /// The node that a call would go to now.
    pub fn preferred(&self) -> Arc<Node> {
        let nodes = self.known();
        let well = nodes.iter().find(|node| node.failed().is_none());
        let least = || nodes.iter().min_by_key(|node| node.failed());
        match well.or_else(least) {
            Some(node) => node.clone(),
            None => unreachable!("there is at least one node"),
        }
    }

    /// The nodes for one call: those that answer first, then those that failed, longest ago first.
    /// Begins what is due in the background.
    pub async fn to_ask(self: &Arc<Self>) -> Arc<[Arc<Node>]> {
        if self.has_names {
            self.resolve_if_due().await;
        }
        let nodes = self.known();
        if nodes.len() == 1 {
            return nodes;
        }
        self.find_here(&nodes);
        if nodes[0].failed().is_none() {
            return nodes;
        }
        for node in nodes.iter() {
            let failed = node.failed().is_some();
            if failed && node.claim_probe(PROBE_AFTER) {
                let (all, node) = (self.clone(), node.clone());
                tokio::spawn(async move {
                    let limit = all.settings().timeouts.connect.min(CONNECT_MAX);
                    if node.probe(limit).await {
                        all.moves.fetch_add(1, Relaxed);
                    }
                });
            }
            if !failed {
                break;
            }
        }
        let mut sorted = nodes.to_vec();
        // Cached, because it may change meanwhile.
        sorted.sort_by_cached_key(|node| node.failed());
        sorted.into()
    }

    /// Notes that a node failed.
    pub fn fails(&self, node: &Node) {
        if self.known().len() == 1 || node.fails() {
            self.moves.fetch_add(1, Relaxed);
        }
        self.resolved.lock().1 = true;
    }

    /// Notes that a node answered.
    pub fn works(&self, node: &Node) {
        if node.works() {
            self.moves.fetch_add(1, Relaxed);
        }
    }

    /// Asks nodes in turn until one answers, as far as that is allowed ([`Missed::elsewhere`]).
    pub async fn ask<T, Asked>(
        self: &Arc<Self>,
        mut ask: impl FnMut(Arc<Node>, Duration) -> Asked,
    ) -> Result<T>
    where
        Asked: Future<Output = Result<T, Missed>>,
    {
        let nodes = self.to_ask().await;
        let limit = self.connect_limit(&nodes);
        let began = Instant::now();
        let mut missed = Vec::new();
        for node in nodes.iter() {
            match ask(node.clone(), limit).await {
                Ok(answer) => {
                    self.works(node);
                    return Ok(answer);
                }
                Err(Missed { failure, elsewhere }) if elsewhere => {
                    self.fails(node);
                    missed.push((node.to_string(), failure));
                }
                Err(Missed { failure, .. }) if nodes.len() == 1 => return Err(failure),
                Err(Missed { failure, .. }) => return Err(failure.said_by(&node.to_string())),
            }
            // However many there are: they may all be behind one wall.
            if began.elapsed() >= self.settings().timeouts.connect {
                break;
            }
        }
        let untried = nodes.len() - missed.len();
        Err(Failure::of_all(missed, untried))
    }

    // Which nodes there are

    /// Resolves names if it is time: in the background, as long as there is a node to ask.
    async fn resolve_if_due(self: &Arc<Self>) {
        if !self.is_due() {
            return;
        }
        let first = self.resolved.lock().0.is_none();
        let all_failed = || self.known().iter().all(|node| node.failed().is_some());
        if first || all_failed() {
            self.resolve().await;
        } else {
            let all = self.clone();
            tokio::spawn(async move { all.resolve().await });
        }
    }

    fn is_due(&self) -> bool {
        match *self.resolved.lock() {
            (None, _) => true,
            (Some(at), failed) => {
                at.elapsed() >= if failed { RESOLVE_PAUSE } else { RESOLVE_EVERY }
            }
        }
    }

    async fn resolve(&self) {
        let _one = self.resolving.lock().await;
        if !self.is_due() {
            return;
        }
        let (settings, before) = (self.settings(), self.known());
        let mut found = Vec::new();
        for address in settings.addresses.all() {
            let looked_up = match address {
                Address::Tcp { host, port, .. } if may_be_several(address) => {
                    let looked_up = settings.resolver.resolve(host, *port);
                    let looked_up = timeout(settings.timeouts.connect, looked_up).await;
                    looked_up.ok().and_then(io::Result::ok).unwrap_or_default()
                }
                _ => Vec::new(),
            };
            // A name that cannot be resolved for a moment means what it meant. If that is nothing,
            // it is dialled, which says why.
            let several = if looked_up.is_empty() {
                let known = before.iter().map(|node| node.key());
                known
                    .filter(|(of, _)| *of == address)
                    .filter_map(|(_, at)| at)
                    .collect()
            } else {
                several(looked_up)
            };
            if several.is_empty() {
                found.push((address.clone(), None));
            }
            found.extend(several.into_iter().map(|at| (address.clone(), Some(at))));
        }
        // The addresses were valid before.
        let _ = self.replace(found);
        *self.resolved.lock() = (Some(Instant::now()), false);
    }

    /// These are the nodes now; those that are known stay as they are.
    fn replace(&self, found: Vec<(Address, Option<SocketAddr>)>) -> Result<()> {
        let before = self.known();
        let here = self.here.lock().clone();
        let mut ranked: Vec<_> = found
            .into_iter()
            .enumerate()
            .map(|(i, key)| {
                let is_here = is_here(&key) || here.as_ref() == Some(&key);
                let random = match self.settings().in_order {
                    true => i as u64,
                    false => self
                        .random
                        .0
                        .hash_one((self.random.1, key.0.to_string(), key.1)),
                };
                let first = is_here && !self.settings().in_order;
                (Reverse(first), random, key)
            })
            .collect();
        ranked.sort_by_key(|(here, random, _)| (*here, *random));
        ranked.truncate(ADDRESSES_MAX);
        let nodes = ranked.into_iter().map(|(_, _, (address, at))| {
            let same = before.iter().find(|node| node.key() == (&address, at));
            match same {
                Some(node) => Ok(node.clone()),
                None => Ok(Arc::new(Node::new(self.common.clone(), address, at)?)),
            }
        });
        *self.current.lock() = nodes.collect::<Result<_>>()?;
        Ok(())
    }

    /// Looks, once and in the background, for a node on this machine, if none is known by its
    /// address: containers have addresses of their own.
    fn find_here(self: &Arc<Self>, nodes: &Arc<[Arc<Node>]>) {
        let settings = self.settings();
        if !settings.find_socket || settings.in_order || self.searched.swap(true, Relaxed) {
            return;
        }
        if nodes
            .iter()
            .any(|node| is_here(&(node.key().0.clone(), node.key().1)))
        {
            return;
        }
        let (all, nodes) = (self.clone(), nodes.clone());
        tokio::spawn(async move { all.search(&nodes).await });
    }

    /// Asks nodes until one says that it is on this machine, which is preferred from then on.
    async fn search(&self, nodes: &[Arc<Node>]) {
        for some in nodes.chunks(SEARCHES_MAX) {
            let asked = some.iter().map(|node| node.is_here());
            let said = futures::future::join_all(asked).await;
            // Nobody keeps a connection to each of many nodes.
            let preferred = self.preferred();
            for node in some.iter().filter(|node| !Arc::ptr_eq(node, &preferred)) {
                node.close_idle();
            }
            let Some(i) = said.into_iter().position(|is_here| is_here) else {
                continue;
            };
            let (address, at) = some[i].key();
            *self.here.lock() = Some((address.clone(), at));
            let known = self.known();
            let known = known
                .iter()
                .map(|node| (node.key().0.clone(), node.key().1));
            if self.replace(known.collect()).is_ok() {
                self.moves.fetch_add(1, Relaxed);
            }
            return;
        }
    }
}

/// Whether it is a name that may lead to several nodes.
fn may_be_several(address: &Address) -> bool {
    match address {
        Address::Unix(_) => false,
        Address::Tcp { host, .. } => {
            !address.is_local() && host.parse::<std::net::IpAddr>().is_err()
        }
    }
}

/// The addresses of a name, if each of them is a node; none if they are one node's. (One of IPv4 and
/// one of IPv6 are.)
fn several(found: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let six = found.first().is_some_and(SocketAddr::is_ipv6);
    let (mut same, mut other): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|at| at.is_ipv6() == six);
    for family in [&mut same, &mut other] {
        family.sort_unstable();
        family.dedup();
    }
    let mut all = if other.len() > same.len() {
        other
    } else {
        same
    };
    if all.len() == 1 {
        all.clear();
    }
    all
}

/// Whether a node can only be on this machine: nothing else can be bound to.
pub(crate) fn is_here((address, at): &(Address, Option<SocketAddr>)) -> bool {
    let ip = match (address, at) {
        (address, _) if address.is_local() => return true,
        (_, Some(at)) => Some(at.ip()),
        (Address::Tcp { host, .. }, None) => host.parse().ok(),
        (Address::Unix(_), None) => None,
    };
    ip.is_some_and(|ip| !ip.is_unspecified() && UdpSocket::bind((ip, 0)).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_protocol::{
        Addresses,
        node::{NodeInfo, host_id},
    };
    use tokio::{
        io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
        net::{TcpListener, UnixListener},
    };

    /// Says which node it is, to whoever asks anything.
    async fn says(mut io: impl AsyncRead + AsyncWrite + Unpin, info: NodeInfo) -> Option<()> {
        let body = serde_json::to_string(&info).ok()?;
        loop {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(io.read_u8().await.ok()?);
            }
            let answer = format!(
                "HTTP/1.1 200 X\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            io.write_all(answer.as_bytes()).await.ok()?;
        }
    }

    #[tokio::test]
    async fn a_node_in_another_container_of_this_machine_is_found() {
        let dir = tempfile::TempDir::new().unwrap();
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let info = |i: usize| NodeInfo {
            node_id: format!("n{i}"),
            host_id: if i == 1 { host_id(&boot) } else { "far".into() },
            unix_socket: Some(dir.path().join(i.to_string()).display().to_string()),
            ..NodeInfo::default()
        };
        let mut urls = Vec::new();
        for i in 0..3 {
            let unix = UnixListener::bind(dir.path().join(i.to_string())).unwrap();
            let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
            urls.push(tcp.local_addr().unwrap().to_string());
            let info = info(i);
            tokio::spawn(async move {
                loop {
                    tokio::select! {
                        io = unix.accept() => tokio::spawn(says(io.unwrap().0, info.clone())),
                        io = tcp.accept() => tokio::spawn(says(io.unwrap().0, info.clone())),
                    };
                }
            });
        }
        let settings = Settings {
            find_socket: true,
            ..Settings::new(Addresses::of(&urls).unwrap(), "test/0")
        };
        let nodes = Nodes::new(settings).unwrap();
        nodes.search(&nodes.known()).await;
        let here = nodes.here.lock().clone().unwrap();
        assert_eq!(here.0.to_string(), format!("http://{}", urls[1]));
        assert_eq!((nodes.moves(), nodes.known().len()), (1, 3));
        let (one, two): (SocketAddr, SocketAddr) = (
            "192.0.2.1:80".parse().unwrap(),
            "192.0.2.2:80".parse().unwrap(),
        );
        let six = "[2001:db8::1]:80".parse().unwrap();
        assert_eq!(several(vec![one, two, six, one]), [one, two]);
        assert_eq!(several(vec![six, one]), []);
    }
}
