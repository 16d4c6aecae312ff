//! This node's part in a cluster: who it is, the map, and the listener for other nodes.
//!
//! What nodes ask each other, and when, is in `forebay-peer`. Peers carry no users: whoever is let
//! in here may read everything, so it takes a certificate of the cluster's CA, or an operator who
//! says that the network is trusted (`cluster.plain`).

use crate::{
    auth::watch::{Reload, ReloadStats},
    config,
    listener::{Failures, Stop, accept_failed},
    peer_certificates::PeerCertificates,
};
use forebay_cluster::{Placed, member_named};
use forebay_core::{Error, Result, sync::Mutex};
use forebay_engine::Engine;
use forebay_peer::{Answers, Cluster, Dial, Identity, TcpDial, Timing, TlsDial};
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::timeout,
};

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// What is configured about the cluster, read and found to work.
pub struct Settings {
    map: PathBuf,
    text: Vec<u8>,
    placed: Arc<Placed>,
    certificates: Option<Arc<PeerCertificates>>,
}

impl Settings {
    /// `None` where no map is configured. May block, and computes for some 100 ms in large clusters.
    ///
    /// # Errors
    /// `Invalid` for files that cannot be used.
    pub fn read(config: &config::Cluster) -> Result<Option<Self>> {
        let Some(map) = &config.map else {
            return Ok(None);
        };
        let text = read(map)?;
        let placed = Placed::parse(&text).map_err(|e| e.context(map.display()))?;
        if let Some(name) = &config.node {
            // Before the cache directories are told whose they are.
            has_member(&placed, member_named(name)).map_err(|e| {
                let named = format!("cluster.node = {name:?}");
                e.context(named).context(map.display())
            })?;
        }
        Ok(Some(Settings {
            map: map.clone(),
            text,
            placed: Arc::new(placed),
            certificates: PeerCertificates::open(config)?,
        }))
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
pub fn configured_node(config: &config::Cluster) -> Option<u64> {
    let named = config.node.as_deref().filter(|_| config.map.is_some());
    named.map(member_named)
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
    map: PathBuf,
    /// The text that was last accepted or refused; `None` while the file cannot be read.
    seen: Mutex<Option<Vec<u8>>>,
    stats: ReloadStats,
}

impl Settings {
    /// The node in the cluster, by what its cache directories say: they have been told what is
    /// configured. `boot` is new at each start.
    ///
    /// # Errors
    /// `Invalid` if it is unknown who it is, or the map does not have it.
    pub fn join(self, node: Option<u64>, boot: u64) -> Result<Joined> {
        let node = node.ok_or_else(|| {
            Error::invalid("neither cluster.node nor a cache directory says which node this is")
                .hint("set cluster.node to the name that the map was made with")
        })?;
        has_member(&self.placed, node).map_err(|e| e.context(self.map.display()))?;
        let me = Identity {
            cluster: self.placed.map().cluster.clone(),
            node,
            boot,
        };
        let dial: Arc<dyn Dial> = match &self.certificates {
            Some(certificates) => Arc::new(TlsDial(certificates.tls().clone())),
            None => Arc::new(TcpDial),
        };
        Ok(Joined {
            cluster: Cluster::new(me, self.placed, dial, Timing::default())?,
            certificates: self.certificates,
            map: self.map,
            seen: Mutex::new(Some(self.text)),
            stats: ReloadStats::default(),
        })
    }
}

impl Joined {
    /// Tries silent peers again, and tells them of writes that they missed, until the node stops.
    pub async fn tend(self: Arc<Self>, stop: Stop) {
        tokio::select! {
            () = self.cluster.tend() => {}
            () = stop.abort.cancelled() => {}
        }
    }

    /// Answers other nodes until the node stops: those who have asked get the rest of their answer
    /// as long as clients do. At most `connections` at a time; others wait to be accepted.
    pub async fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        connections: usize,
        engine: Engine,
        stop: Stop,
    ) {
        let answers = Arc::new(Answers::new(self.cluster.me().clone(), engine));
        let places = Arc::new(Semaphore::new(connections.max(1)));
        let mut failures = Failures::default();
        loop {
            let next = async {
                let place = places.clone().acquire_owned().await;
                (place, listener.accept().await)
            };
            let (place, accepted) = tokio::select! {
                (Ok(place), accepted) = next => (place, accepted),
                () = stop.stop.cancelled() => return,
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
        let stop = until.stop.cancelled();
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

impl Reload for Joined {
    fn name(&self) -> &'static str {
        "cluster_map"
    }

    fn reload(&self, asked: bool) {
        let mut seen = self.seen.lock();
        let text = match read(&self.map) {
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
        let placed = Placed::parse(&text).map(Arc::new);
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
                tracing::info!(file = %self.map.display(), epoch, members,
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
