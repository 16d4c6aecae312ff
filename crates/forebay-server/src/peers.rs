//! This node's part in a cluster: who it is, the map, and the listener for other nodes.
//!
//! What nodes ask each other, and when, is in `forebay-peer`. Peers carry no users: whoever is let
//! in here may read everything, so it takes a certificate of the cluster's CA, or an operator who
//! says that the network is trusted (`cluster.plain`).

use crate::{
    auth::watch::{Reload, ReloadStats},
    config,
    listener::{Failures, Stop, accept_failed},
};
use forebay_cluster::{Placed, member_named};
use forebay_core::{Error, Result, sync::Mutex};
use forebay_engine::Engine;
use forebay_peer::{Answers, Cluster, Dial, Identity, TcpDial, Timing, TlsDial};
use forebay_tls::PeerTls;
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::timeout,
};

/// Connections of other nodes; each asks one question at a time, and keeps a few for the next.
const CONNECTIONS_MAX: usize = 4096;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// What is configured about the cluster, read and found to work.
pub struct Settings {
    map: PathBuf,
    text: Vec<u8>,
    placed: Arc<Placed>,
    tls: Option<PeerTls>,
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
        // The configuration's check has refused some without the others.
        let tls = match (&config.ca, &config.cert, &config.key) {
            (Some(ca), Some(cert), Some(key)) => Some(PeerTls::new(ca, cert, key)?),
            _ => None,
        };
        Ok(Some(Settings {
            map: map.clone(),
            text,
            placed: Arc::new(placed),
            tls,
        }))
    }
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
    tls: Option<PeerTls>,
    map: PathBuf,
    /// The text that was last accepted or refused; `None` while the file cannot be read.
    seen: Mutex<Option<Vec<u8>>>,
    stats: ReloadStats,
}

impl Joined {
    /// The node `node` in the cluster of the configured map. `boot` is new at each start.
    ///
    /// # Errors
    /// `Invalid` if the map does not have this node.
    pub fn new(settings: Settings, node: u64, boot: u64) -> Result<Self> {
        let me = Identity {
            cluster: settings.placed.map().cluster.clone(),
            node,
            boot,
        };
        let dial: Arc<dyn Dial> = match settings.tls.clone() {
            Some(tls) => Arc::new(TlsDial(tls)),
            None => Arc::new(TcpDial),
        };
        Ok(Joined {
            cluster: Cluster::new(me, settings.placed, dial, Timing::default())
                .map_err(|e| e.context(settings.map.display()))?,
            tls: settings.tls,
            map: settings.map,
            seen: Mutex::new(Some(settings.text)),
            stats: ReloadStats::default(),
        })
    }

    /// Tries silent peers again, and tells them of writes that they missed, until the node stops.
    pub async fn tend(self: Arc<Self>, stop: Stop) {
        tokio::select! {
            () = self.cluster.tend() => {}
            () = stop.abort.cancelled() => {}
        }
    }

    /// Answers other nodes until the node stops: those who have asked get the rest of their answer
    /// as long as clients do.
    pub async fn serve(self: Arc<Self>, listener: TcpListener, engine: Engine, stop: Stop) {
        let answers = Arc::new(Answers::new(self.cluster.me().clone(), engine));
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let mut failures = Failures::default();
        loop {
            let Ok(place) = places.clone().acquire_owned().await else {
                return;
            };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stop.stop.cancelled() => return,
            };
            let (stream, from) = match accepted {
                Ok(accepted) => accepted,
                Err(e) => {
                    accept_failed(&e, &mut failures).await;
                    continue;
                }
            };
            let (joined, answers, abort) = (self.clone(), answers.clone(), stop.abort.clone());
            tokio::spawn(async move {
                let _place = place;
                tokio::select! {
                    ended = joined.converse(stream, &answers) => {
                        if let Err(e) = ended {
                            tracing::warn!(%from, error = %e, "a connection of another node ended");
                        }
                    }
                    () = abort.cancelled() => {}
                }
            });
        }
    }

    async fn converse(&self, stream: TcpStream, answers: &Answers) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        match &self.tls {
            None => answers.serve(stream).await,
            Some(tls) => {
                let stream = timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await??;
                answers.serve(stream).await
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
