//! A node: putting its parts together, starting and stopping it.
//!
//! Order matters twice. At the start, addresses are bound first (so that a mistake there shows at
//! once), then the store is opened (which may read a log), and only then are connections accepted.
//! At the end, nothing new is accepted, answers in flight finish, and the store is closed last.

use crate::{
    admin,
    app::App,
    auth::{
        Access,
        watch::{Reload, watch},
    },
    buckets::OriginBuckets,
    config::{Cluster, Config},
    figures::{self, Differences},
    jobs::Jobs,
    listener::{self, Gate, Stop},
    logging,
    metrics::Metrics,
    openings::AtOtherNodes,
    operate::{self, Orders},
    peers,
    pins::Register,
    places::Places,
    reload::{self, ConfigReload},
    request_id::RequestId,
    s3::Front,
    socket,
    tls::Tls,
    uploads::Uploads,
    v1::Appends,
};
use arc_swap::{ArcSwap, Guard};
use forebay_batch::Batcher;
use forebay_core::{Clock, Error, ErrorKind, MemoryBudget, Result, SystemClock, threads::blocking};
use forebay_dataset::{
    Datasets, Rows, filter::Filters, follow::Plans, keys::Keys, stream::Streams,
};
use forebay_engine::{Buckets, Engine};
use forebay_peer::{ClusterAdvice, ClusterBuckets};
use forebay_stage::Stages;
use forebay_store::{DirConfig, Sources, Store, StoreConfig};
use futures::future::BoxFuture;
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::{net::TcpListener, sync::Notify, time::timeout};
use tokio_util::task::AbortOnDropHandle;

/// How long connections may take to end after the deadline.
const ABORT_GRACE: Duration = Duration::from_secs(2);
/// How long connections of other nodes may take to end after the node has left the cluster.
const PEERS_GRACE: Duration = Duration::from_secs(1);
/// How long a node in a cluster that stops keeps its lease for the writes that are under way.
const LAST_WRITES: Duration = Duration::from_secs(10);

/// A running node. Dropping it breaks everything off; [`Node::shutdown`] is the graceful way.
///
/// Its futures are boxed, and so compiled here: the body of an `async fn`, with all that it awaits,
/// is compiled in each program that polls it.
pub struct Node {
    app: Arc<App>,
    stop: Stop,
    reload: Arc<Notify>,
    /// A fork of this process must not remove the parent's socket.
    pid: u32,
}

impl Node {
    /// Starts a node and sends this process's logs where `config.log` says.
    ///
    /// # Errors
    /// `Invalid` for a configuration that cannot work, `AlreadyExists` for an address that is
    /// taken, `Conflict` for a cache directory that another process has open.
    pub fn start(config: Config) -> BoxFuture<'static, Result<Node>> {
        Box::pin(async move {
            config.checked()?;
            logging::init(&config.log)?;
            Self::start_with(config, Arc::new(SystemClock)).await
        })
    }

    /// The same with the caller's clock, and without touching the process's logs.
    pub fn start_with(config: Config, clock: Arc<dyn Clock>) -> BoxFuture<'static, Result<Node>> {
        Box::pin(Self::started(config, clock))
    }

    async fn started(config: Config, clock: Arc<dyn Clock>) -> Result<Node> {
        config.checked()?;
        let access = Arc::new(Access::new(&config.auth)?);
        let tls = Tls::open(&config.tls)?.map(Arc::new);
        let s3 = bind("listen.s3", &config.listen.s3).await?;
        let admin = bind("listen.admin", &config.listen.admin).await?;
        let peer = bind("listen.peer", &config.listen.peer).await?;
        let settings = config.clone();
        let settings = blocking(move || peers::Settings::read(&settings)).await;
        let settings = settings.map_err(|e| e.context("reading the map"))??;
        let origins = Arc::new(OriginBuckets::open(&config.origins)?);
        let store = open_store(&config, origins.sources(), clock.clone()).await?;
        let node_id = RequestId::new().to_string();
        let joined = match (settings, &store, local_addr(peer.as_ref())) {
            (Some(settings), Some(store), Some(peer)) => {
                let start = peers::Start {
                    boot: forebay_core::name::hash_name("boot", &node_id) as u64,
                    secs: clock.now().as_secs(),
                };
                let at = peers::Listening {
                    peer,
                    s3: local_addr(s3.as_ref()),
                };
                Some(Arc::new(settings.join(store.node(), at, start)?))
            }
            _ => None,
        };
        // After the store: its lock says that this socket is ours.
        let unix_path = config.unix_path();
        let unix = match &unix_path {
            Some(path) => Some(socket::bind(path, config.listen.unix_mode.0)?),
            None => None,
        };

        let budget = MemoryBudget::new(config.memory_budget_bytes());
        let buckets: Arc<dyn Buckets> = match &joined {
            Some(joined) => {
                let cluster = joined.cluster.clone();
                Arc::new(ClusterBuckets::new(origins.clone(), cluster))
            }
            None => origins.clone(),
        };
        if let (Some(joined), Some(store)) = (&joined, &store) {
            joined.cluster.set_pins(store.clone());
        }
        let pins = match &joined {
            Some(joined) => {
                let cluster = joined.cluster.me().cluster.clone();
                let dirs = config.cache.dirs.iter().map(|d| d.path.clone()).collect();
                let clock = clock.clone();
                let open = move || Register::open(&cluster, dirs, clock);
                let opened = blocking(open).await;
                let failed = |e: Error| e.context("reading what is pinned");
                Some(Arc::new(opened.map_err(failed)?))
            }
            None => None,
        };
        let engine = Engine::new(
            config.engine(),
            buckets,
            store.clone(),
            clock.clone(),
            budget,
        );
        let batcher = Batcher::new(engine.clone(), config.batcher());
        let datasets = Datasets::new(engine.clone(), config.datasets());
        let rows = Rows::new(engine.clone(), config.rows());
        let (of, filters_dir, keys_dir) = (rows.clone(), config.filters_dir(), config.keys_dir());
        let kept = move || {
            (
                Filters::new(of.clone(), filters_dir),
                Keys::new(of, keys_dir),
            )
        };
        let kept = blocking(kept).await;
        let (filters, keys) = kept.map_err(|e| e.context("opening what is kept of datasets"))?;
        let plans = Plans::new(&datasets, &rows);
        if let Some(joined) = &joined {
            joined.cluster.set_copies(&config.engine().rules);
            datasets.set_homes(Arc::new(AtOtherNodes(joined.cluster.clone())));
        }
        let streams = Streams::new(datasets.clone(), rows.clone(), plans.clone());
        let uploads = Arc::new(Uploads::new(config.limits.uploads));
        let appends = Arc::new(Appends::new(engine.clone()));
        let metrics = Arc::new(Metrics::default());
        metrics.set_buckets(config.bucket_names());
        let energy =
            (config.energy.monitor()?).map(|energy| forebay_energy::Monitor::start(&energy));
        // This comes after all else that may fail: flushes go on from this moment.
        let stages = open_stages(&config, &engine, store).await?;
        if let Some(joined) = &joined {
            // The advice holds the cache, so the cache stays locked until the engine is closed. If the
            // start fails from here on, the engine is closed.
            let advice = ClusterAdvice::new(joined.cluster.clone(), Some(plans.advisor()));
            engine.set_advisor(Some(Arc::new(advice)));
        }
        let ready = Arc::new(AtomicBool::new(true));
        let started_secs = clock.now().as_secs();
        let reload = Arc::new(ConfigReload::new(&config));
        let mut reloads: Vec<Arc<dyn Reload>> = vec![reload.clone(), access.clone()];
        if let Some(tls) = &tls {
            reloads.push(tls.clone());
        }
        if let Some(file) = joined.as_ref().and_then(|joined| joined.file()) {
            reloads.push(file);
        }
        let peer_certificates = joined.as_ref().and_then(|j| j.certificates.clone());
        if let Some(certificates) = &peer_certificates {
            reloads.push(certificates.clone());
        }
        let app = Arc::new(App {
            s3: Front::new(&config, engine.clone(), uploads.clone(), access.clone()),
            in_flight: Places::new(config.limits.requests_in_flight),
            connections: Places::new(config.connections_most()),
            lent: Places::new(config.connections_most() / 4),
            joined: joined.clone(),
            pins,
            differences: Differences::default(),
            reloads: reloads.clone(),
            reload,
            clock,
            engine,
            batcher,
            datasets,
            rows,
            filters,
            keys,
            plans,
            streams,
            origins,
            appends,
            stages,
            uploads,
            metrics,
            metrics_turn: Arc::default(),
            energy,
            jobs: Jobs::default(),
            ready,
            node_id,
            began: Instant::now(),
            started_secs,
            s3_addr: local_addr(s3.as_ref()),
            admin_addr: local_addr(admin.as_ref()),
            unix_path,
            access,
            admin_tls: config.tls.admin,
            tls,
            peer_certificates,
            config: ArcSwap::from_pointee(config),
        });
        let stop = Stop::default();
        if let (Some(joined), Some(listener)) = (joined, peer) {
            let (engine, most) = (
                app.engine.clone(),
                app.config.load().peer_connections_most(),
            );
            let operator = Arc::new(Orders::new(app.clone()));
            // Before it is a member: others ask it as soon as it is.
            let threads = &joined.threads;
            let listener = threads.take(listener).map_err(|e| {
                Error::internal(format!("listen.peer cannot be used: {e}")).caused_by(e)
            });
            let entered = match listener {
                Ok(listener) => {
                    let serving =
                        joined
                            .clone()
                            .serve(listener, most, engine, operator, stop.clone());
                    stop.tasks.spawn_on(serving, threads.handle());
                    let entering = joined.clone();
                    let entering = threads.spawn(async move { entering.enter().await });
                    AbortOnDropHandle::new(entering).await.unwrap_or_else(|e| {
                        Err(Error::internal(format!("joining the cluster: {e}")))
                    })
                }
                Err(e) => Err(e),
            };
            if let Err(e) = entered {
                stop.stop.cancel();
                stop.peers.cancel();
                stop.abort.cancel();
                stop.tasks.close();
                let _ = timeout(ABORT_GRACE, stop.tasks.wait()).await;
                if let Some(path) = &app.unix_path {
                    socket::remove(path);
                }
                if let Some(stages) = &app.stages {
                    // Flushes go on from the moment that they are opened, and need the engine.
                    let _ = timeout(ABORT_GRACE, stages.close()).await;
                }
                if let Err(e) = app.engine.close(ABORT_GRACE).await {
                    tracing::warn!(error = %e.describe(), "the cache was not closed cleanly");
                }
                return Err(e);
            }
            let map = joined.cluster.map();
            tracing::info!(
                cluster = map.cluster,
                epoch = map.epoch,
                members = map.members.len(),
                node = format_args!("{:016x}", joined.cluster.me().node),
                "this node is part of a cluster"
            );
            threads.spawn(joined.clone().tend(stop.clone()));
            tokio::spawn(figures::watch(app.clone(), stop.clone()));
            let rate = app.config.load().cluster.hand_over_rate.0;
            // What these put into the cache is put before that is closed.
            stop.tasks
                .spawn(operate::tend_pins(app.clone(), stop.clone()));
            stop.tasks
                .spawn(joined.hand_over(app.engine.clone(), rate, stop.clone()));
        }
        let gate = Gate::new(app.clone(), stop.clone());
        if let Some(listener) = s3 {
            stop.tasks
                .spawn(listener::serve_tcp(listener, gate.clone()));
        }
        if let Some(listener) = unix {
            stop.tasks.spawn(listener::serve_unix(listener, gate));
        }
        if let Some(listener) = admin {
            tokio::spawn(admin::serve(listener, app.clone(), stop.clone()));
        }
        let reload = Arc::new(Notify::new());
        tokio::spawn(watch(reloads, reload.clone(), stop.abort.clone()));
        tracing::info!(
            version = crate::VERSION,
            node_id = %app.node_id,
            s3 = app.s3_addr.map(|a| a.to_string()),
            admin = app.admin_addr.map(|a| a.to_string()),
            unix = app.unix_path.as_ref().map(|p| p.display().to_string()),
            "the node is ready"
        );
        Ok(Node {
            app,
            stop,
            reload,
            pid: std::process::id(),
        })
    }

    /// Where S3 and the batch API listen over TCP.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.app.s3_addr
    }

    /// The data port as a URL for clients on this machine.
    pub fn url(&self) -> Option<String> {
        self.app
            .s3_addr
            .map(|a| format!("{}://{}", self.app.scheme(), connectable(a)))
    }

    /// The admin port as a URL for clients on this machine.
    pub fn admin_url(&self) -> Option<String> {
        self.app
            .admin_addr
            .map(|a| format!("{}://{}", self.app.admin_scheme(), connectable(a)))
    }

    /// Where the admin port listens; `None` if it is off.
    pub fn admin_addr(&self) -> Option<SocketAddr> {
        self.app.admin_addr
    }

    /// The path of the Unix socket; `None` if it is off.
    pub fn unix_path(&self) -> Option<&Path> {
        self.app.unix_path.as_deref()
    }

    /// New at each start.
    pub fn node_id(&self) -> &str {
        &self.app.node_id
    }

    /// The engine that all interfaces read and write through.
    pub fn engine(&self) -> &Engine {
        &self.app.engine
    }

    /// The configuration in force at this moment.
    pub fn config(&self) -> Arc<Config> {
        Guard::into_inner(self.app.config())
    }

    /// Applies another configuration, as far as a running node can, and reads the key and
    /// certificate files again. The log says what was done, what failed and what needs a restart. A
    /// configuration that cannot be read or used changes nothing.
    pub fn reload(&self, loaded: Result<Config>) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let app = self.app.clone();
            let done = blocking(move || reload::reload(&app, loaded)).await;
            if let Err(e) = done {
                tracing::error!(error = %e.describe(), "the configuration could not be taken over");
            }
            self.reload.notify_one();
        })
    }

    /// Accepts nothing new, lets answers in flight finish until `deadline`, and closes the store.
    ///
    /// # Errors
    /// `Timeout` if answers had to be broken off; everything else is still done. Or the error that
    /// kept the store from closing.
    pub fn shutdown(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.ended(deadline))
    }

    async fn ended(&self, deadline: Duration) -> Result<()> {
        let began = Instant::now();
        self.app.ready.store(false, Relaxed);
        self.stop.stop.cancel();
        // Streams never end by themselves.
        self.app.streams.stop();
        self.app.filters.stop();
        self.app.keys.stop();
        if let Some(stages) = &self.app.stages {
            stages.answer_waiting();
        }
        self.stop.tasks.close();
        let leave = async {
            let Some(joined) = &self.app.joined else {
                return None;
            };
            // The lease is what promises that others see a write. So writes that are under way end
            // while there is a lease, and those that wait meanwhile find that there is none.
            let _paused = match joined.cluster.lease() {
                Some(_) => {
                    let patience = LAST_WRITES.min(deadline / 2);
                    self.app.engine.pause_writes(patience).await
                }
                None => None,
            };
            // Once it serves no peers, nobody can tell this node of writes, and others would wait for
            // it. So it says first that it trusts nothing that it knows.
            joined.leave().await;
            self.stop.peers.cancel();
            Some(began.elapsed())
        };
        let drained = timeout(deadline, self.stop.tasks.wait());
        let (mut drained, left) = tokio::join!(drained, leave);
        if drained.is_err() && left.is_some_and(|left| left + PEERS_GRACE > deadline) {
            // Whoever answers other nodes ends after that, which an etcd that does not answer delays.
            drained = timeout(PEERS_GRACE, self.stop.tasks.wait()).await;
        }
        let in_time = drained.is_ok();
        let open = self.stop.tasks.len();
        self.stop.abort.cancel();
        if !in_time {
            let _ = timeout(ABORT_GRACE, self.stop.tasks.wait()).await;
        }
        if let Some(path) = &self.app.unix_path {
            socket::remove(path);
        }
        // Gives up the parts at the origin, as far as it answers.
        let _ = timeout(ABORT_GRACE, self.app.appends.close()).await;
        if let Some(stages) = &self.app.stages {
            // What is staged stays, and the next start goes on with it.
            let _ = timeout(ABORT_GRACE, stages.close()).await;
        }
        self.app.engine.close(ABORT_GRACE).await?;
        if in_time {
            tracing::info!("the node has stopped");
            return Ok(());
        }
        Err(Error::timeout(format!(
            "{open} connections were broken off after {deadline:?}"
        ))
        .hint("limits.drain_timeout is how long they may take"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if !self.stop.abort.is_cancelled() && self.pid == std::process::id() {
            self.app.ready.store(false, Relaxed);
            self.stop.stop.cancel();
            self.stop.peers.cancel();
            self.stop.abort.cancel();
            if let Some(path) = &self.app.unix_path {
                socket::remove(path);
            }
        }
    }
}

fn local_addr(listener: Option<&TcpListener>) -> Option<SocketAddr> {
    listener.and_then(|l| l.local_addr().ok())
}

/// Where a client on this machine reaches a listener: `0.0.0.0` and `[::]` stand for every address,
/// and are none to connect to.
fn connectable(address: SocketAddr) -> SocketAddr {
    let ip: IpAddr = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        _ => return address,
    };
    SocketAddr::new(ip, address.port())
}

async fn bind(key: &str, address: &str) -> Result<Option<TcpListener>> {
    if address == "off" {
        return Ok(None);
    }
    TcpListener::bind(address).await.map(Some).map_err(|e| {
        let failed = |kind, hint: &str| {
            Error::new(kind, format!("{key}: cannot listen on {address}: {e}")).hint(hint)
        };
        match e.kind() {
            std::io::ErrorKind::AddrInUse => failed(
                ErrorKind::AlreadyExists,
                "another process listens there: choose another port, or stop it",
            ),
            std::io::ErrorKind::PermissionDenied => failed(
                ErrorKind::PermissionDenied,
                "ports below 1024 need a privilege: choose a higher one",
            ),
            _ => failed(
                ErrorKind::Invalid,
                "it must be an address of this machine, as in 127.0.0.1:8080",
            ),
        }
    })
}

async fn open_store(
    config: &Config,
    sources: Sources,
    clock: Arc<dyn Clock>,
) -> Result<Option<Arc<Store>>> {
    if config.cache.dirs.is_empty() {
        return Ok(None);
    }
    let dirs: Vec<DirConfig> = config
        .cache
        .dirs
        .iter()
        .map(|d| DirConfig {
            path: d.path.clone(),
            capacity_bytes: d.size.0,
        })
        .collect();
    let store_config = StoreConfig {
        dirs,
        keep_free_bytes: config.cache.keep_free.map(|b| b.0),
        sources,
        node: peers::configured_node(&config.cluster),
        makes_node: peers::makes_itself_up(&config.cluster),
        discard_incompatible: config.cache.discard_incompatible,
        ..StoreConfig::default()
    };
    let opened = blocking(move || Store::open(store_config, clock)).await;
    opened
        .map_err(|e| e.context("opening the cache"))?
        .map(|s| Some(Arc::new(s)))
}

/// The checkpoints in the cache directories.
async fn open_stages(
    config: &Config,
    engine: &Engine,
    store: Option<Arc<Store>>,
) -> Result<Option<Stages>> {
    let Some(store) = store else {
        return Ok(None);
    };
    let (config, engine) = (config.stages(), engine.clone());
    let opened = blocking(move || Stages::open(config, engine, store)).await;
    opened
        .map_err(|e| e.context("opening the checkpoints"))?
        .map(Some)
}

/// A node inside another process, or the node that already has the cache directory.
pub enum Embedded {
    /// Started here; it listens only on the Unix socket.
    Started(Node),
    /// Another process serves this cache directory: connect to its socket.
    Existing(PathBuf),
}

/// How long the process that holds the cache directory may take to start listening, or to end.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(10);
const TAKEOVER_PAUSE: Duration = Duration::from_millis(50);

/// Starts a node without TCP listeners, on a Unix socket in the first cache directory. If another
/// process has the directory open, returns that process's socket; if that process is just starting
/// or ending, waits a moment for one or the other.
///
/// # Errors
/// As [`Node::start`]; `Conflict` if the directory stays taken and nobody listens.
pub fn embedded(config: Config) -> BoxFuture<'static, Result<Embedded>> {
    Box::pin(start_or_find(config))
}

async fn start_or_find(mut config: Config) -> Result<Embedded> {
    config.listen.s3 = "off".into();
    config.listen.admin = "off".into();
    // Others find the nodes of a cluster at their addresses.
    config.listen.peer = "off".into();
    config.cluster = Cluster::default();
    if config.listen.unix == "off" || config.cache.dirs.is_empty() {
        return Err(
            Error::invalid("an embedded node needs a cache directory").hint("cache=\"DIR:SIZE\"")
        );
    }
    let path = config
        .unix_path()
        .ok_or_else(|| Error::invalid("an embedded node needs a Unix socket"))?;
    let began = Instant::now();
    loop {
        match Node::start_with(config.clone(), Arc::new(SystemClock)).await {
            Ok(node) => return Ok(Embedded::Started(node)),
            Err(e) if e.kind() == ErrorKind::Conflict => {
                if tokio::net::UnixStream::connect(&path).await.is_ok() {
                    return Ok(Embedded::Existing(path));
                }
                if began.elapsed() > TAKEOVER_TIMEOUT {
                    return Err(e.hint(format!(
                        "another process has the cache open, and no node answers at {}",
                        path.display()
                    )));
                }
                tokio::time::sleep(TAKEOVER_PAUSE).await;
            }
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_connects_to_an_address_that_stands_for_one_machine() {
        for (listens, reached) in [
            ("0.0.0.0:80", "127.0.0.1:80"),
            ("[::]:80", "[::1]:80"),
            ("10.1.2.3:80", "10.1.2.3:80"),
            ("[fd00::1]:80", "[fd00::1]:80"),
        ] {
            let address = connectable(listens.parse().unwrap());
            assert_eq!(address.to_string(), reached, "{listens}");
        }
    }
}
