//! What every request can reach.

use crate::{
    auth::{Access, watch::Reload},
    buckets::OriginBuckets,
    config::Config,
    figures::Differences,
    jobs::Jobs,
    metrics::Metrics,
    peer_certificates::PeerCertificates,
    peers::Joined,
    pins::Register,
    places::Places,
    reload::ConfigReload,
    s3::Front,
    tls::Tls,
    uploads::Uploads,
    v1::Appends,
};
use arc_swap::{ArcSwap, Guard};
use forebay_batch::Batcher;
use forebay_core::Clock;
use forebay_dataset::{
    Datasets, Rows, filter::Filters, follow::Plans, keys::Keys, stream::Streams,
};
use forebay_energy::Monitor;
use forebay_engine::Engine;
use forebay_stage::Stages;
use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::Instant,
};

pub struct App {
    /// The configuration in force. A reload replaces it.
    pub(crate) config: ArcSwap<Config>,
    pub reload: Arc<ConfigReload>,
    pub clock: Arc<dyn Clock>,
    pub access: Arc<Access>,
    /// Whether the admin port speaks TLS too.
    pub admin_tls: bool,
    /// TLS on the TCP listeners; `None`: plain HTTP.
    pub tls: Option<Arc<Tls>>,
    /// TLS between nodes of the cluster; `None` without.
    pub peer_certificates: Option<Arc<PeerCertificates>>,
    pub engine: Engine,
    pub batcher: Batcher,
    pub datasets: Datasets,
    pub rows: Rows,
    pub filters: Filters,
    pub keys: Keys,
    pub plans: Plans,
    pub streams: Streams,
    pub origins: Arc<OriginBuckets>,
    pub uploads: Arc<Uploads>,
    pub appends: Arc<Appends>,
    /// Checkpoints; `None` without a cache directory.
    pub stages: Option<Stages>,
    pub s3: Front,
    pub metrics: Arc<Metrics>,
    /// Held by who writes a page of metrics.
    pub metrics_turn: Arc<tokio::sync::Mutex<()>>,
    /// What each job took.
    pub jobs: Jobs,
    /// The energy of this machine; `None`: it is not sampled.
    pub energy: Option<Monitor>,
    /// One for each request in flight, its body included.
    pub in_flight: Arc<Places>,
    /// One for each open connection of a client.
    pub connections: Arc<Places>,
    /// One for each file that is lent, among them.
    pub lent: Arc<Places>,
    /// This node's part in a cluster; `None`: it is alone.
    pub joined: Option<Arc<Joined>>,
    /// What the cluster was told to pin; `None`: this node is alone.
    pub pins: Option<Arc<Register>>,
    /// In what other nodes of the cluster differ from this one.
    pub differences: Differences,
    /// What can be reloaded while the node runs.
    pub reloads: Vec<Arc<dyn Reload>>,
    /// `false` once the node is stopping.
    pub ready: Arc<AtomicBool>,
    /// New at each start.
    pub node_id: String,
    pub began: Instant,
    pub started_secs: u64,
    pub s3_addr: Option<SocketAddr>,
    pub admin_addr: Option<SocketAddr>,
    pub unix_path: Option<PathBuf>,
}

impl App {
    /// What this node has done so far, for the account of a job.
    pub(crate) fn so_far(&self) -> crate::jobs::Node<'_> {
        crate::jobs::Node {
            now_secs: self.clock.now().as_secs(),
            rows: self.rows.stats().rows,
            energy: self.energy.as_ref(),
        }
    }

    /// The configuration in force at this moment. It is found without a lock, for one piece of work:
    /// what waits, or stays, keeps `Guard::into_inner` of it.
    pub fn config(&self) -> Guard<Arc<Config>> {
        self.config.load()
    }

    pub fn set_config(&self, config: Config) {
        self.config.store(Arc::new(config));
    }

    /// The scheme of the data port's URLs.
    pub fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// The same for the admin port.
    pub fn admin_scheme(&self) -> &'static str {
        if self.tls.is_some() && self.admin_tls {
            "https"
        } else {
            "http"
        }
    }
}
