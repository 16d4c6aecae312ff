//! Reading files again while the node runs: when they change, and when the node is told to do so
//! (SIGHUP).
//!
//! Files are compared by their contents, not by their times: a change is noticed even if a file is
//! replaced twice within one tick of the file system's clock, or written in two steps. The files
//! are small and are read once a second.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{sync::Notify, time::interval};
use tokio_util::sync::CancellationToken;

/// The longest time that a change goes unnoticed.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Something that is built from files and can be built again.
pub trait Reload: Send + Sync + 'static {
    /// A metric label.
    fn name(&self) -> &'static str;

    /// Reads the files and takes over what changed. `asked`: even if nothing changed. May block.
    fn reload(&self, asked: bool);

    fn stats(&self) -> &ReloadStats;
}

/// Results of reloading.
#[derive(Default)]
pub struct ReloadStats {
    done: AtomicU64,
    failures: AtomicU64,
    stale: AtomicBool,
}

impl ReloadStats {
    pub fn succeeded(&self) {
        self.done.fetch_add(1, Relaxed);
        self.stale.store(false, Relaxed);
    }

    pub fn failed(&self) {
        self.failures.fetch_add(1, Relaxed);
        self.stale.store(true, Relaxed);
    }

    pub fn done(&self) -> u64 {
        self.done.load(Relaxed)
    }

    pub fn failures(&self) -> u64 {
        self.failures.load(Relaxed)
    }

    /// Whether the values in force are older than the file, because the file could not be used.
    pub fn is_stale(&self) -> bool {
        self.stale.load(Relaxed)
    }
}

/// Watches files until the node stops.
pub async fn watch(files: Vec<Arc<dyn Reload>>, asked: Arc<Notify>, stop: CancellationToken) {
    let mut ticks = interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let asked = tokio::select! {
            _ = ticks.tick() => false,
            () = asked.notified() => true,
            () = stop.cancelled() => return,
        };
        for file in &files {
            let file = file.clone();
            if let Err(e) = tokio::task::spawn_blocking(move || file.reload(asked)).await {
                tracing::error!(error = %e, "a file could not be looked at");
            }
        }
    }
}
