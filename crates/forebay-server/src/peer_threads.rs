//! Threads of their own for what nodes say to each other.
//!
//! A node has to answer others within a moment, or they give it up and read from the bucket what it
//! has. On the threads that serve clients its word would wait behind hundreds of answers that are
//! being written. So what listens to other nodes, connects to them and keeps this node in the map
//! runs here, and the kernel gives these threads their turn.

use async_trait::async_trait;
use forebay_core::{Error, Result};
use forebay_peer::{Dial, Io};
use std::{future::Future, io, sync::Arc};
use tokio::{
    net::TcpListener,
    runtime::{Builder, Handle, Runtime},
    task::JoinHandle,
};
use tokio_util::task::AbortOnDropHandle;

/// The threads; they end with this value.
pub struct PeerThreads {
    runtime: Option<Runtime>,
    /// A fork of this process has no such threads, and cannot end them.
    pid: u32,
}

impl PeerThreads {
    /// Starts them.
    ///
    /// # Errors
    /// `Internal` if the system has no more threads.
    pub fn start() -> Result<PeerThreads> {
        let runtime = Builder::new_multi_thread()
            .thread_name("forebay-peers")
            .enable_all()
            .build();
        let runtime = runtime.map_err(|e| {
            Error::internal(format!("threads for other nodes cannot be started: {e}")).caused_by(e)
        })?;
        Ok(PeerThreads {
            runtime: Some(runtime),
            pid: std::process::id(),
        })
    }

    /// Where to spawn what is to run here.
    pub fn handle(&self) -> &Handle {
        let runtime = self.runtime.as_ref();
        runtime.expect("it is there until it is dropped").handle()
    }

    /// Runs a future here.
    pub fn spawn<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.handle().spawn(future)
    }

    /// The same listener, whose connections are looked after here.
    ///
    /// # Errors
    /// If the system does not let it move.
    pub fn take(&self, listener: TcpListener) -> io::Result<TcpListener> {
        let listener = listener.into_std()?;
        let _here = self.handle().enter();
        TcpListener::from_std(listener)
    }
}

impl Drop for PeerThreads {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else {
            return;
        };
        match self.pid == std::process::id() {
            true => runtime.shutdown_background(),
            false => std::mem::forget(runtime),
        }
    }
}

/// Connects to other nodes on their threads.
pub struct DialThere {
    dial: Arc<dyn Dial>,
    threads: Handle,
}

impl DialThere {
    /// What `dial` does, on these threads.
    pub fn new(dial: Arc<dyn Dial>, threads: &PeerThreads) -> DialThere {
        DialThere {
            dial,
            threads: threads.handle().clone(),
        }
    }
}

#[async_trait]
impl Dial for DialThere {
    async fn dial(&self, node: u64, address: &str) -> io::Result<Box<dyn Io>> {
        let (dial, address) = (self.dial.clone(), address.to_owned());
        let dialing = self
            .threads
            .spawn(async move { dial.dial(node, &address).await });
        // Whoever leaves takes the attempt along.
        AbortOnDropHandle::new(dialing)
            .await
            .map_err(io::Error::other)?
    }
}
