//! What every request can reach.

use crate::{
    auth::Access,
    config::Config,
    metrics::{Metrics, Scrape},
    s3::{Front, Uploads},
    tls::Tls,
};
use forebay_batch::Batcher;
use forebay_dataset::{Datasets, Rows, follow::Plans, stream::Streams};
use forebay_engine::Engine;
use forebay_origin::Origins;
use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::Instant,
};
use tokio::sync::Semaphore;

pub struct App {
    pub config: Arc<Config>,
    pub access: Arc<Access>,
    /// What the TCP listeners speak; `None`: plain HTTP.
    pub tls: Option<Arc<Tls>>,
    pub engine: Engine,
    pub batcher: Batcher,
    pub datasets: Datasets,
    pub rows: Rows,
    pub plans: Plans,
    pub streams: Streams,
    pub origins: Arc<Origins>,
    pub uploads: Arc<Uploads>,
    pub s3: Front,
    pub metrics: Arc<Metrics>,
    pub scrape: Arc<Scrape>,
    /// One permit for each request in flight, its body included.
    pub in_flight: Arc<Semaphore>,
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
    /// What URLs of the data port begin with.
    pub fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// The same for the admin port.
    pub fn admin_scheme(&self) -> &'static str {
        if self.tls.is_some() && self.config.tls.admin {
            "https"
        } else {
            "http"
        }
    }
}
