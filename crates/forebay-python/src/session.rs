//! What a client has per process: connections, receive buffers, the limit on bytes ahead.
//!
//! A client object may be carried into a forked child. The session in it then belongs to another
//! process: it stays untouched (see [`process`]), and a new one takes its place.

use crate::{
    embedded::Engine,
    failure::{Failure, Result},
    inflight::InFlight,
    process,
    region::RegionPool,
};
use forebay_client::{Client, Settings, StartNode, Timeouts};
use forebay_protocol::{Address, Addresses};
use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicPtr, Ordering},
    },
    time::Duration,
};

/// How requests identify their sender.
const USER_AGENT: &str = concat!("forebay-python/", env!("CARGO_PKG_VERSION"));

/// What a client was made with. The token is never shown and never pickled.
#[derive(Clone)]
pub struct Config {
    /// Where nodes are; empty for an engine inside this process.
    pub urls: Vec<String>,
    pub origins: Vec<String>,
    pub cache: Option<String>,
    pub token: Option<Arc<str>>,
    /// Authorities to trust at an `https://` URL; the system's if no file is given.
    pub ca: Option<String>,
    pub timeout: Duration,
    pub max_inflight_bytes: u64,
    /// [`Settings::direct`].
    pub direct: Option<bool>,
}

/// The nodes that these name: one text may be a list, separated by commas.
pub fn addresses(urls: &[String]) -> Result<Addresses> {
    Ok(match urls {
        [one] => Addresses::parse(one)?,
        several => Addresses::of(several)?,
    })
}

pub struct Session {
    pid: u32,
    pub node: Client,
    pub regions: Arc<RegionPool>,
    pub inflight: Arc<InFlight>,
}

/// The session of the process that asks.
pub struct Sessions {
    pub config: Config,
    current: AtomicPtr<Session>,
}

impl Sessions {
    pub fn new(config: Config) -> Self {
        Sessions {
            config,
            current: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// This process's session, made on first use. It connects, and starts an engine, at the first
    /// call.
    pub fn get(&self) -> Result<Arc<Session>> {
        let found = self.current.load(Ordering::Acquire);
        if let Some(session) = self.usable(found) {
            return Ok(session);
        }
        let (addresses, engine) = if self.config.urls.is_empty() {
            let engine = Engine::new(&self.config)?;
            (Address::Unix(engine.socket.clone()).into(), Some(engine))
        } else {
            (addresses(&self.config.urls)?, None)
        };
        let settings = Settings {
            token: self.config.token.clone(),
            ca: self.config.ca.as_ref().map(PathBuf::from),
            timeouts: Timeouts::all(self.config.timeout),
            find_socket: true,
            direct: self.config.direct,
            starter: engine.map(|engine| Arc::new(engine) as Arc<dyn StartNode>),
            ..Settings::new(addresses, USER_AGENT)
        };
        let made = Arc::new(Session {
            pid: process::pid(),
            node: Client::new(settings)?,
            regions: Arc::default(),
            inflight: InFlight::new(self.config.max_inflight_bytes),
        });
        let raw = Arc::into_raw(made.clone()).cast_mut();
        match self
            .current
            .compare_exchange(found, raw, Ordering::AcqRel, Ordering::Acquire)
        {
            // The previous pointer is null or the parent's, which is leaked on purpose.
            Ok(_) => Ok(made),
            Err(winner) => {
                // SAFETY: `raw` came from `into_raw` and was not published.
                drop(unsafe { Arc::from_raw(raw) });
                self.usable(winner).ok_or_else(|| {
                    Failure::connection("the process forked in the middle of a call")
                })
            }
        }
    }

    fn usable(&self, at: *mut Session) -> Option<Arc<Session>> {
        // SAFETY: a published pointer came from `Arc::into_raw`, and `self` holds its count until
        // `drop`.
        let session = unsafe { at.as_ref() }?;
        if session.pid != process::pid() {
            return None;
        }
        // SAFETY: as above; the new `Arc` gives back the count that is added here.
        unsafe {
            Arc::increment_strong_count(at);
            Some(Arc::from_raw(at))
        }
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        let at = *self.current.get_mut();
        // SAFETY: as in `usable`; the count that `self` held ends here, and only in the process
        // that made it.
        if let Some(session) = unsafe { at.as_ref() }
            && session.pid == process::pid()
        {
            // SAFETY: see above.
            drop(unsafe { Arc::from_raw(at) });
        }
    }
}
