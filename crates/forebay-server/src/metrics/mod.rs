//! Metrics of the node.
//!
//! What requests do is counted here as it happens ([`Metrics`]); what the engine, the store, the
//! origins and the batcher count themselves is asked of them when the page is made (`scrape.rs`).
//! `table.rs` names and explains each.

mod scrape;
mod table;

pub use scrape::Scrape;
pub use table::{Kind, Metric, SECTIONS, reference};

use crate::note::Api;
use forebay_core::{CacheStatus, sync::Mutex};
use http::Method;
use prometheus_client::metrics::histogram::Histogram;
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

const STATUSES: [CacheStatus; 4] = [
    CacheStatus::Hit,
    CacheStatus::Miss,
    CacheStatus::Revalidated,
    CacheStatus::Bypass,
];

/// One counter for each cache status.
#[derive(Default)]
pub struct ByStatus([AtomicU64; 4]);

impl ByStatus {
    pub fn count(&self, status: CacheStatus) {
        self.0[index(status)].fetch_add(1, Relaxed);
    }

    pub fn get(&self, status: CacheStatus) -> u64 {
        self.0[index(status)].load(Relaxed)
    }
}

fn index(status: CacheStatus) -> usize {
    match status {
        CacheStatus::Hit => 0,
        CacheStatus::Miss => 1,
        CacheStatus::Revalidated => 2,
        CacheStatus::Bypass => 3,
    }
}

/// One counter for each interface.
#[derive(Default)]
pub struct ByApi([AtomicU64; 4]);

impl ByApi {
    pub fn add(&self, api: Api, n: u64) {
        self.0[api as usize].fetch_add(n, Relaxed);
    }

    pub fn get(&self, api: Api) -> u64 {
        self.0[api as usize].load(Relaxed)
    }
}

/// Connections of one listener.
#[derive(Default)]
pub struct Connections {
    pub open: AtomicI64,
    pub accepted: AtomicU64,
}

/// What requests do.
pub struct Metrics {
    /// By the `X-Cache` header; counted by [`crate::note::Note::x_cache`] alone.
    pub answers: ByStatus,
    requests: Mutex<BTreeMap<(Api, &'static str, u16), u64>>,
    pub refused_overload: AtomicU64,
    pub refused_stopping: AtomicU64,
    /// Connections, not requests: what they would have asked for is not known.
    pub refused_connections: AtomicU64,
    /// Handshakes that came to nothing.
    pub tls_failed: AtomicU64,
    pub cut: ByApi,
    pub abandoned: ByApi,
    pub sent_bytes: ByApi,
    pub in_flight: AtomicI64,
    pub tcp: Connections,
    pub unix: Connections,
    get_first_byte: [Histogram; 4],
    get_duration: [Histogram; 4],
    batch_first_byte: Histogram,
    batch_duration: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        // 50 µs to 100 s, four steps to the factor of ten.
        let histogram = || Histogram::new((0..26).map(|i| 5e-5 * 10f64.powf(i as f64 / 4.0)));
        let four = || std::array::from_fn(|_| histogram());
        Metrics {
            answers: ByStatus::default(),
            requests: Mutex::default(),
            refused_overload: AtomicU64::new(0),
            refused_stopping: AtomicU64::new(0),
            refused_connections: AtomicU64::new(0),
            tls_failed: AtomicU64::new(0),
            cut: ByApi::default(),
            abandoned: ByApi::default(),
            sent_bytes: ByApi::default(),
            in_flight: AtomicI64::new(0),
            tcp: Connections::default(),
            unix: Connections::default(),
            get_first_byte: four(),
            get_duration: four(),
            batch_first_byte: histogram(),
            batch_duration: histogram(),
        }
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

impl Metrics {
    pub fn request(&self, api: Api, method: &Method, status: u16) {
        // Methods are what clients like; labels must not be.
        let method = match *method {
            Method::GET => "GET",
            Method::HEAD => "HEAD",
            Method::PUT => "PUT",
            Method::POST => "POST",
            Method::DELETE => "DELETE",
            _ => "other",
        };
        *self
            .requests
            .lock()
            .entry((api, method, status))
            .or_default() += 1;
    }

    /// The head of an answer is there.
    pub fn first_byte(&self, api: Api, cache: Option<CacheStatus>, after: Duration) {
        match (api, cache) {
            (Api::Batch, _) => self.batch_first_byte.observe(after.as_secs_f64()),
            (_, Some(status)) => self.get_first_byte[index(status)].observe(after.as_secs_f64()),
            _ => {}
        }
    }

    /// The last byte of an answer is out.
    pub fn finished(&self, api: Api, cache: Option<CacheStatus>, after: Duration) {
        match (api, cache) {
            (Api::Batch, _) => self.batch_duration.observe(after.as_secs_f64()),
            (_, Some(status)) => self.get_duration[index(status)].observe(after.as_secs_f64()),
            _ => {}
        }
    }
}
