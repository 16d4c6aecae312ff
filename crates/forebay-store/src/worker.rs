//! The store's only thread: writes checkpoints when they are due, and makes room ahead of need.

use crate::inner::Inner;
use forebay_core::{
    Error, Result,
    sync::{Condvar, Mutex},
};
use std::{
    sync::{Arc, Weak},
    thread::JoinHandle,
    time::{Duration, Instant},
};

const TICK: Duration = Duration::from_millis(200);

pub struct Worker {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub fn start(inner: &Arc<Inner>) -> Result<Self> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let (weak, signal) = (Arc::downgrade(inner), stop.clone());
        let thread = std::thread::Builder::new()
            .name("forebay-store".into())
            .spawn(move || run(&weak, &signal))
            .map_err(|e| Error::internal("the cache's thread could not be started").caused_by(e))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        *self.stop.0.lock() = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the cache's thread panicked");
        }
    }
}

fn run(inner: &Weak<Inner>, stop: &(Mutex<bool>, Condvar)) {
    let mut last = Instant::now();
    loop {
        if stop
            .1
            .wait_until(stop.0.lock(), Instant::now() + TICK, |stop| *stop)
        {
            return;
        }
        let Some(inner) = inner.upgrade() else { return };
        let Ok(_open) = inner.open_for_writes() else {
            return;
        };
        for dir in &inner.dirs {
            dir.measure(inner.now());
            if let Err(e) = inner.reclaim_ahead(dir) {
                tracing::debug!(dir = %dir.path.display(), error = %e, "no room could be made \
                    ahead of need");
            }
        }
        let (mut appended, mut many) = (false, false);
        for dir in &inner.dirs {
            let state = dir.state.lock();
            appended |= state.appended_since_checkpoint > 0;
            // With millions of small records, the index is about as large as they are: it is not
            // written out for fewer bytes than it takes.
            many |= state.appended_since_checkpoint >= inner.config.checkpoint_records
                && state.bytes_since_checkpoint >= state.checkpoint_bytes;
        }
        if many || (appended && last.elapsed() >= inner.config.checkpoint_interval) {
            last = Instant::now();
            if let Err(e) = inner.checkpoint() {
                tracing::warn!(error = %e, "the index could not be written out; a restart would \
                    take longer");
            }
        }
    }
}
