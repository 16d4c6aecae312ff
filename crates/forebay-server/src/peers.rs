//! This node's part in a cluster: who it is, the map, and the listener for other nodes.
//!
//! What nodes ask each other, and when, is in `forebay-peer`. Peers carry no users: whoever is let
//! in here may read everything, so it takes a certificate of the cluster's CA, or an operator who
//! says that the network is trusted (`cluster.plain`).

use crate::{
    auth::watch::{Reload, ReloadStats},
    config::Config,
    listener::{Failures, Stop, accept_failed},
    peer_certificates::PeerCertificates,
    peer_threads::{DialThere, PeerThreads},
};
use forebay_cluster::{Map, Member, MemberState, Order, Placed, member_named};
use forebay_core::{Error, ErrorKind, Result, sync::Mutex};
use forebay_engine::Engine;
use forebay_membership::{Driver, EtcdAccess, Joining, Registration, Report, Source};
use forebay_peer::{
    Answers, Cluster, Dial, HandOver, Identity, Operator, TcpDial, Timing, TlsDial,
};
use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::timeout,
};

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a node that stops tries to say so, and an order waits to be seen.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// What is configured about the cluster, read and found to work.
pub struct Settings {
    map: MapAt,
    certificates: Option<Arc<PeerCertificates>>,
    cluster: crate::config::Cluster,
    cache_bytes: u64,
    client_scheme: &'static str,
}

/// Where the map is.
enum MapAt {
    File {
        path: PathBuf,
        text: Vec<u8>,
        placed: Arc<Placed>,
    },
    /// Nodes enter themselves.
    Joined(Source),
}

/// Where this node listens.
#[derive(Clone, Copy, Debug)]
pub struct Listening {
    /// For other nodes.
    pub peer: SocketAddr,
    /// For clients.
    pub s3: Option<SocketAddr>,
}

/// Which start of which release this is.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// New at each start.
    pub boot: u64,
    /// Since the Unix epoch.
    pub secs: u64,
}

impl Settings {
    /// `None` where no map is configured. May block, and computes for some 100 ms in large clusters.
    ///
    /// # Errors
    /// `Invalid` for files that cannot be used.
    pub fn read(config: &Config) -> Result<Option<Self>> {
        let cluster = &config.cluster;
        let Some(source) = &cluster.map else {
            return Ok(None);
        };
        let map = match source {
            Source::File(path) => {
                let text = read(path)?;
                let placed = Placed::parse(&text).map_err(|e| e.context(path.display()))?;
                if let Some(name) = &cluster.node {
                    // Before the cache directories are told whose they are.
                    has_member(&placed, member_named(name)).map_err(|e| {
                        let named = format!("cluster.node = {name:?}");
                        e.context(named).context(path.display())
                    })?;
                }
                MapAt::File {
                    path: path.clone(),
                    text,
                    placed: Arc::new(placed),
                }
            }
            other => MapAt::Joined(other.clone()),
        };
        Ok(Some(Settings {
            map,
            certificates: PeerCertificates::open(cluster)?,
            cluster: cluster.clone(),
            cache_bytes: config.cache.dirs.iter().map(|d| d.size.0).sum(),
            client_scheme: match config.tls.cert {
                Some(_) => "https",
                None => "http",
            },
        }))
    }

    /// This node as a member.
    fn member(&self, node: u64, at: Listening) -> Member {
        let c = &self.cluster;
        let address = c
            .address
            .clone()
            .unwrap_or_else(|| match at.peer.ip().is_unspecified() {
                true => format!("{}:{}", machine(), at.peer.port()),
                false => at.peer.to_string(),
            });
        let host = address.rsplit_once(':').map_or(&*address, |(host, _)| host);
        let url = |s3: SocketAddr| format!("{}://{host}:{}", self.client_scheme, s3.port());
        Member {
            id: node,
            name: c.node.clone().unwrap_or_else(machine),
            url: c.url.clone().or(at.s3.map(url)).unwrap_or_default(),
            zone: c.zone.clone(),
            weight: c.weight.map_or(self.cache_bytes, |weight| weight.0),
            state: MemberState::Active,
            address,
        }
    }
}

/// What this machine is called.
fn machine() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "localhost".to_owned(),
        name => name.to_owned(),
    }
}

fn has_member(placed: &Placed, node: u64) -> Result<()> {
    let map = placed.map();
    if map.members.iter().any(|m| m.id == node) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the map of cluster {:?} does not have this node, {node:016x}",
        map.cluster
    ))
    .hint("add it to the map, or use the name that is there (forebay cluster map --member NAME=…)"))
}

/// Who this node is by its configuration; `None`: who its cache directories say.
pub fn configured_node(config: &crate::config::Cluster) -> Option<u64> {
    let named = config.node.as_deref().filter(|_| config.map.is_some());
    named.map(member_named)
}

/// Whether a node that neither its configuration nor its cache directories name makes up who it is.
pub fn makes_itself_up(config: &crate::config::Cluster) -> bool {
    matches!(&config.map, Some(source) if !matches!(source, Source::File(_)))
}

fn read(map: &PathBuf) -> Result<Vec<u8>> {
    std::fs::read(map).map_err(|e| {
        Error::invalid(format!(
            "cluster.map: {} cannot be read: {e}",
            map.display()
        ))
        .hint("`forebay cluster map` writes one")
    })
}

/// A node in its cluster.
pub struct Joined {
    pub cluster: Arc<Cluster>,
    pub certificates: Option<Arc<PeerCertificates>>,
    /// Where it speaks with other nodes.
    pub threads: PeerThreads,
    membership: Follows,
}

/// Where new maps come from.
enum Follows {
    File(Arc<MapFile>),
    Driver {
        joining: Box<Joining>,
        /// Once this node is a member.
        driver: OnceLock<Arc<Driver>>,
    },
}

impl Settings {
    /// The node in the cluster, by what its cache directories say: they have been told what is
    /// configured. It is a member once [`Joined::enter`] returns.
    ///
    /// # Errors
    /// `Invalid` if it is unknown who it is, or the map does not have it; `Internal` if there are no
    /// threads for it.
    pub fn join(self, node: Option<u64>, at: Listening, start: Start) -> Result<Joined> {
        let node = node.ok_or_else(|| {
            Error::invalid("neither cluster.node nor a cache directory says which node this is")
                .hint("set cluster.node to the name that the map was made with")
        })?;
        let member = self.member(node, at);
        let dial: Arc<dyn Dial> = match &self.certificates {
            Some(certificates) => Arc::new(TlsDial(certificates.tls().clone())),
            None => Arc::new(TcpDial),
        };
        let threads = PeerThreads::start()?;
        let dial: Arc<dyn Dial> = Arc::new(DialThere::new(dial, &threads));
        let me = |cluster: &str| Identity {
            cluster: cluster.to_owned(),
            node,
            boot: start.boot,
            member: Some(member.clone()),
        };
        let (cluster, membership) = match self.map {
            MapAt::File { path, text, placed } => {
                has_member(&placed, node).map_err(|e| e.context(path.display()))?;
                let me = me(&placed.map().cluster);
                let cluster = Cluster::new(me, placed, dial, Timing::default())?;
                let file = MapFile {
                    cluster: cluster.clone(),
                    path,
                    seen: Mutex::new(Some(text)),
                    stats: ReloadStats::default(),
                };
                (cluster, Follows::File(Arc::new(file)))
            }
            MapAt::Joined(source) => {
                let c = &self.cluster;
                let user = c.etcd_user.clone().zip(c.etcd_password_file.clone());
                let joining = Joining {
                    source,
                    access: EtcdAccess {
                        user,
                        ca: c.etcd_ca.clone(),
                    },
                    forget_after: c.forget_after.0,
                    alone: c.alone,
                    registration: Registration {
                        boot: start.boot,
                        version: crate::VERSION.to_owned(),
                        started_secs: start.secs,
                        term: 0,
                        member: member.clone(),
                    },
                };
                let alone = Placed::new(forebay_membership::alone(&joining)?);
                let me = me(&alone.map().cluster);
                let cluster = Cluster::new(me, Arc::new(alone), dial, Timing::default())?;
                joining.hold_leases(&cluster, c.writes.into());
                let (joining, driver) = (Box::new(joining), OnceLock::new());
                (cluster, Follows::Driver { joining, driver })
            }
        };
        Ok(Joined {
            cluster,
            certificates: self.certificates,
            threads,
            membership,
        })
    }
}

impl Joined {
    /// Becomes a member, where nodes enter themselves. Others must be able to ask this node by then.
    ///
    /// # Errors
    /// As [`Driver::join`].
    pub async fn enter(&self) -> Result<()> {
        if let Follows::Driver { joining, driver } = &self.membership {
            let joined = Driver::join((**joining).clone(), self.cluster.clone()).await?;
            let _ = driver.set(joined);
        }
        Ok(())
    }

    /// Tries silent peers again, tells them of writes that they missed, and takes over new maps,
    /// until the node stops.
    pub async fn tend(self: Arc<Self>, stop: Stop) {
        let driver = self.driver().ok().cloned();
        let follow = async {
            match &driver {
                Some(driver) => driver.run().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.cluster.tend() => {}
            () = follow => {}
            () = stop.abort.cancelled() => {}
        }
    }

    /// Takes over what former owners have of this node's share, until the node stops.
    pub async fn hand_over(self: Arc<Self>, engine: Engine, bytes_per_second: u64, stop: Stop) {
        let hand_over = HandOver::new(self.cluster.clone(), engine, bytes_per_second);
        tokio::select! {
            () = hand_over.run() => {}
            () = stop.stop.cancelled() => {}
        }
    }

    /// Tells the others that this node is going.
    pub async fn leave(&self) {
        if let Ok(driver) = self.driver() {
            let _ = timeout(LEAVE_TIMEOUT, driver.leave()).await;
        }
    }

    /// What follows the map if it is in a file.
    pub fn file(&self) -> Option<Arc<MapFile>> {
        match &self.membership {
            Follows::File(file) => Some(file.clone()),
            Follows::Driver { .. } => None,
        }
    }

    /// How the membership stands; `None` if the map is in a file.
    pub fn report(&self) -> Option<Report> {
        self.driver().ok().map(|driver| driver.report())
    }

    /// Where the map comes from.
    pub fn source(&self) -> String {
        match &self.membership {
            Follows::File(file) => file.path.display().to_string(),
            Follows::Driver { joining, .. } => joining.source.to_string(),
        }
    }

    /// Changes the map as an operator orders; returns the map afterwards.
    ///
    /// # Errors
    /// As [`Driver::order`]; `Unsupported` if the map is in a file.
    pub async fn order(&self, order: Order) -> Result<Map> {
        self.driver()?.order(order).await
    }

    /// Waits a moment for this node to go by a map of this epoch.
    pub async fn wait_for(&self, epoch: u64) {
        let reached = async {
            while self.cluster.map().epoch < epoch {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = timeout(LEAVE_TIMEOUT, reached).await;
    }

    fn driver(&self) -> Result<&Arc<Driver>> {
        match &self.membership {
            Follows::Driver { driver, .. } => driver.get().ok_or_else(|| {
                Error::new(ErrorKind::Busy, "this node is just joining its cluster")
            }),
            Follows::File(file) => Err(Error::unsupported(format!(
                "the map of this cluster is the file {}, which is yours to change",
                file.path.display()
            ))
            .hint("`forebay cluster map --after` writes the next one")),
        }
    }

    /// Answers other nodes until `stop.peers`: those who have asked get the rest of their answer as long
    /// as clients do. At most `connections` at a time; others wait to be accepted.
    pub async fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        connections: usize,
        engine: Engine,
        operator: Arc<dyn Operator>,
        stop: Stop,
    ) {
        let answers = Answers::new(self.cluster.clone(), engine).with_operator(operator);
        let answers = Arc::new(answers);
        let places = Arc::new(Semaphore::new(connections.max(1)));
        let mut failures = Failures::default();
        loop {
            let next = async {
                let place = places.clone().acquire_owned().await;
                (place, listener.accept().await)
            };
            let (place, accepted) = tokio::select! {
                (Ok(place), accepted) = next => (place, accepted),
                () = stop.peers.cancelled() => return,
                else => return,
            };
            let (stream, from) = match accepted {
                Ok(accepted) => accepted,
                Err(e) => {
                    accept_failed(&e, &mut failures).await;
                    continue;
                }
            };
            let (joined, answers, until) = (self.clone(), answers.clone(), stop.clone());
            stop.tasks.spawn(async move {
                let _place = place;
                tokio::select! {
                    ended = joined.converse(stream, &answers, &until) => {
                        if let Err(e) = ended {
                            tracing::debug!(%from, error = %e, "a connection of another node ended");
                        }
                    }
                    () = until.abort.cancelled() => {}
                }
            });
        }
    }

    async fn converse(
        &self,
        stream: TcpStream,
        answers: &Answers,
        until: &Stop,
    ) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let stop = until.peers.cancelled();
        match &self.certificates {
            None => answers.serve(stream, stop).await,
            Some(certificates) => {
                let accepted = certificates.tls().accept(stream);
                let stream = timeout(HANDSHAKE_TIMEOUT, accepted).await??;
                answers.serve(stream, stop).await
            }
        }
    }
}

/// A map in a file, which is read again when it changes.
pub struct MapFile {
    cluster: Arc<Cluster>,
    path: PathBuf,
    /// The text that was last accepted or refused; `None` while the file cannot be read.
    seen: Mutex<Option<Vec<u8>>>,
    stats: ReloadStats,
}

impl Reload for MapFile {
    fn name(&self) -> &'static str {
        "cluster_map"
    }

    fn reload(&self, asked: bool) {
        let mut seen = self.seen.lock();
        let text = match read(&self.path) {
            Ok(text) if !asked && seen.as_ref() == Some(&text) => return,
            Ok(text) => text,
            Err(e) => {
                if seen.take().is_some() || asked {
                    self.stats.failed();
                    tracing::error!(error = %e.describe(), "the map of the cluster cannot be read; \
                        the one that was read before stays in force");
                }
                return;
            }
        };
        let placed = self.cluster.placed().then_parsed(&text).map(Arc::new);
        *seen = Some(text);
        let taken = placed.and_then(|placed| {
            let (epoch, members) = (placed.map().epoch, placed.map().members.len());
            let is = self.cluster.map().epoch;
            if epoch < is {
                return Err(Error::invalid(format!(
                    "it has epoch {epoch}, and the one in force {is}"
                ))
                .hint("make it from the map in force: forebay cluster map --after"));
            }
            if let Err(e) = has_member(&placed, self.cluster.me().node) {
                tracing::warn!(error = %e.describe(), "this node has left the cluster: it owns \
                    nothing, and will not start again with this map");
            }
            self.cluster.advance(placed, Duration::ZERO)?;
            Ok((epoch, members))
        });
        match taken {
            Ok((epoch, members)) => {
                self.stats.succeeded();
                tracing::info!(file = %self.path.display(), epoch, members,
                    "the map of the cluster was read again");
            }
            Err(e) => {
                self.stats.failed();
                tracing::error!(error = %e.describe(), "the map of the cluster cannot be used; \
                    the one that was read before stays in force");
            }
        }
    }

    fn stats(&self) -> &ReloadStats {
        &self.stats
    }
}
