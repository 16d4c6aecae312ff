//! The engine inside this process, for clients without a URL.
//!
//! It is a whole node without TCP listeners: it serves a Unix socket in its cache directory, and
//! the client of this process talks to it as to any other node. So there is one read path, and
//! other processes (DataLoader workers, other ranks) share the cache: whoever opens the directory
//! first owns it, the others find it locked and connect to its socket. When the owner has ended,
//! the next client that fails to connect opens the directory itself.
//!
//! A node that was started here runs until the process ends, on its own threads, and is stopped
//! properly at interpreter exit.

use crate::{
    failure::{Class, Failure, Result},
    session::Config,
};
use std::path::PathBuf;

const NEITHER: &str = "Client(\"http://host:port\") for a node, Client(origin=\"s3://bucket\", cache=\"/nvme/forebay:100GiB\") for one inside this process, \
     or set FOREBAY_NODE";

/// Checks that the arguments can describe an engine at all, when the client is made and not at its
/// first call.
pub fn check(origins: &[String], cache: Option<&str>) -> Result<()> {
    match (origins, cache) {
        ([], _) => {
            Err(Failure::invalid("the client was given neither a node nor an origin").hint(NEITHER))
        }
        (_, None) => Err(Failure::invalid("origin= needs cache=")
            .hint("cache=\"/nvme/forebay:100GiB\": a directory and how much it may hold")),
        _ if cfg!(feature = "node") => Ok(()),
        _ => Err(
            Failure::new(Class::Unsupported, "this build has only the client").hint(
                "install the full wheel to run a node in this process, or give the URL of a \
                     node",
            ),
        ),
    }
}

/// An engine that this process may have to start.
pub struct Engine {
    /// Where it listens, here or in the process that owns the cache directory.
    pub socket: PathBuf,
    #[cfg(feature = "node")]
    config: forebay_server::Config,
}

#[cfg(not(feature = "node"))]
impl Engine {
    pub fn new(config: &Config) -> Result<Engine> {
        check(&config.origins, config.cache.as_deref())?;
        Err(Failure::new(
            Class::Unsupported,
            "this build has only the client",
        ))
    }

    async fn start(&self) -> forebay_core::Result<()> {
        Ok(())
    }

    async fn check(&self) -> forebay_core::Result<()> {
        Ok(())
    }
}

impl forebay_client::StartNode for Engine {
    fn start(&self) -> futures::future::BoxFuture<'_, forebay_core::Result<()>> {
        Box::pin(self.start())
    }

    fn check(&self) -> futures::future::BoxFuture<'_, forebay_core::Result<()>> {
        Box::pin(self.check())
    }
}

#[cfg(not(feature = "node"))]
pub fn stop_nodes() {}

#[cfg(feature = "node")]
pub use with_node::stop_nodes;

#[cfg(feature = "node")]
mod with_node {
    use super::{Config, Engine, Failure, Result, check};
    use crate::{process, sync::Mutex};
    use forebay_core::Error;
    use forebay_server::{
        Embedded,
        config::{NamedOrigin, Override},
    };
    use std::{
        path::{Path, PathBuf},
        sync::atomic::{AtomicPtr, AtomicUsize, Ordering},
        time::{Duration, Instant},
    };
    use tokio::{
        runtime::Runtime,
        sync::{Mutex as AsyncMutex, oneshot, watch},
    };

    /// How long answers in flight may take when the interpreter ends.
    const STOP_DEADLINE: Duration = Duration::from_secs(5);

    /// The nodes of one process. As with the client's runtime, a forked child does not touch the
    /// parent's and makes its own.
    struct Host {
        pid: u32,
        runtime: Runtime,
        stop: watch::Sender<bool>,
        running: AtomicUsize,
        /// Held while one is started, until it is in `serving`.
        starting: AsyncMutex<()>,
        /// The socket and the origins of each node that runs in this process.
        serving: Mutex<Vec<(PathBuf, Vec<NamedOrigin>)>>,
    }

    impl Host {
        fn serves(&self, socket: &Path) -> bool {
            self.serving.lock().iter().any(|(at, _)| at == socket)
        }

        /// Refuses origins that the node at this socket does not have, if it runs in this process: it
        /// would answer from its own origins.
        fn check(&self, socket: &Path, origins: &[NamedOrigin]) -> forebay_core::Result<()> {
            let serving = self.serving.lock().clone();
            let Some((_, served)) = serving.iter().find(|(at, _)| at == socket) else {
                return Ok(());
            };
            for origin in origins {
                if !origin.is_served_by(served)? {
                    return Err(Error::invalid(
                        "the engine of this cache directory runs in this process already, with \
                         other origins",
                    )
                    .hint(
                        "another cache= for these origins, or all origins in the first client that \
                         uses this one: an engine runs until its process ends",
                    ));
                }
            }
            Ok(())
        }
    }

    static HOST: AtomicPtr<Host> = AtomicPtr::new(std::ptr::null_mut());

    fn current() -> Option<&'static Host> {
        // SAFETY: null, or from `Box::into_raw` in `host` and never freed.
        unsafe { HOST.load(Ordering::Acquire).as_ref() }.filter(|h| h.pid == process::pid())
    }

    fn host() -> forebay_core::Result<&'static Host> {
        if let Some(host) = current() {
            return Ok(host);
        }
        let found = HOST.load(Ordering::Acquire);
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.thread_name("forebay-node").enable_all();
        let runtime = process::started(&mut builder)
            .map_err(|why| Error::internal(format!("cannot start the node's threads: {why}")))?;
        let host = Host {
            pid: process::pid(),
            runtime,
            stop: watch::channel(false).0,
            running: AtomicUsize::new(0),
            starting: AsyncMutex::default(),
            serving: Mutex::default(),
        };
        let made = Box::into_raw(Box::new(host));
        if HOST
            .compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            // SAFETY: not published.
            unsafe { Box::from_raw(made) }.runtime.shutdown_background();
        }
        current().ok_or_else(|| Error::internal("the process forked while its node was starting"))
    }

    impl Engine {
        /// Reads the configuration; starts nothing.
        pub fn new(config: &Config) -> Result<Engine> {
            check(&config.origins, config.cache.as_deref())?;
            let cache: Vec<String> = config.cache.iter().cloned().collect();
            let overrides = [
                Override::origins(&config.origins, "origin")?,
                Override::cache(&cache, "cache")?,
            ];
            let config = forebay_server::Config::load(None, std::env::vars(), &overrides)?;
            let socket = config.unix_path().ok_or_else(|| {
                Failure::invalid("listen.unix is off, and the engine has no other way in")
            })?;
            if let Some(host) = current() {
                host.check(&socket, &config.origins)?;
            }
            Ok(Engine { socket, config })
        }

        /// Makes sure that somebody serves the cache directory: another process, or this one from
        /// now on.
        pub(super) async fn start(&self) -> forebay_core::Result<()> {
            let host = host()?;
            let (started, outcome) = oneshot::channel();
            let (socket, config) = (self.socket.clone(), self.config.clone());
            let origins = config.origins.clone();
            // A separate task, so that a caller that stops waiting does not stop the node half-way.
            host.runtime.spawn(async move {
                let starting = host.starting.lock().await;
                let node = match forebay_server::embedded(config).await {
                    Ok(Embedded::Started(node)) => node,
                    Ok(Embedded::Existing(_)) => return drop(started.send(Ok(()))),
                    Err(e) => return drop(started.send(Err(e))),
                };
                host.running.fetch_add(1, Ordering::AcqRel);
                host.serving.lock().push((socket, origins));
                drop(starting);
                let mut stop = host.stop.subscribe();
                // The caller may have stopped waiting; the node stays.
                let _ = started.send(Ok(()));
                let _ = stop.wait_for(|stop| *stop).await;
                if let Err(e) = node.shutdown(STOP_DEADLINE).await {
                    eprintln!("forebay: {e}");
                }
                host.running.fetch_sub(1, Ordering::AcqRel);
            });
            outcome
                .await
                .map_err(|_| Error::internal("the node ended while it was starting"))?
        }

        /// Looks again whose the node is, now that somebody listens: another client may have started
        /// it since this one was made.
        pub(super) async fn check(&self) -> forebay_core::Result<()> {
            let Some(host) = current() else { return Ok(()) };
            if !host.serves(&self.socket) {
                // It may have been started here a moment ago.
                drop(host.starting.lock().await);
            }
            host.check(&self.socket, &self.config.origins)
        }
    }

    /// Stops the nodes of this process at interpreter exit.
    pub fn stop_nodes() {
        let Some(host) = current() else { return };
        host.stop.send_replace(true);
        let began = Instant::now();
        while host.running.load(Ordering::Acquire) > 0 && began.elapsed() < STOP_DEADLINE * 2 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
