//! Metrics of the node.
//!
//! What requests do is counted here as it happens ([`Metrics`]). The engine, the store, the origins
//! and the batcher count their own work and are asked for it when the page is made. `families.rs`
//! names and explains each metric, `page.rs` writes them.

mod families;
mod page;

pub(crate) use families::{declared, page};
pub(crate) use page::Format;

use crate::note::Api;
use arc_swap::ArcSwap;
use forebay_core::{CacheStatus, Histogram, sync::Mutex};
use http::Method;
use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

const STATUSES: [CacheStatus; 5] = [
    CacheStatus::Hit,
    CacheStatus::Miss,
    CacheStatus::Revalidated,
    CacheStatus::Stale,
    CacheStatus::Bypass,
];

/// One counter for each cache status.
#[derive(Default)]
pub(crate) struct ByStatus([AtomicU64; STATUSES.len()]);

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
        CacheStatus::Stale => 3,
        CacheStatus::Bypass => 4,
    }
}

/// One counter for each interface.
#[derive(Default)]
pub(crate) struct ByApi([AtomicU64; 4]);

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
pub(crate) struct Connections {
    pub open: AtomicI64,
    pub accepted: AtomicU64,
}

/// Distinct label combinations that are kept; further requests are counted under the bucket and
/// caller `other`. The operator chooses both names, so only many keys times many buckets get that
/// far.
const SERIES_MAX: usize = 4096;
/// A bucket that the operator has not named, or one combination too many.
const OTHER: &str = "other";

/// The labels of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Labels {
    api: Api,
    method: &'static str,
    status: u16,
    bucket: Arc<str>,
    caller: Arc<str>,
}

/// Counts what requests do.
pub(crate) struct Metrics {
    /// By the `X-Cache` header; counted by [`crate::note::Note::x_cache`] alone.
    pub answers: ByStatus,
    requests: Mutex<BTreeMap<Labels, u64>>,
    sent_bytes: Mutex<BTreeMap<(Api, Arc<str>, Arc<str>), u64>>,
    /// The buckets that may be a label; names that clients make up may not.
    buckets: ArcSwap<HashSet<Arc<str>>>,
    pub refused_overload: AtomicU64,
    pub refused_stopping: AtomicU64,
    /// Connections, not requests: what they would have asked for is unknown.
    pub refused_connections: AtomicU64,
    /// TLS handshakes that failed.
    pub tls_failed: AtomicU64,
    pub cut: ByApi,
    pub abandoned: ByApi,
    pub in_flight: AtomicI64,
    pub tcp: Connections,
    pub unix: Connections,
    get_first_byte: [Histogram; STATUSES.len()],
    get_duration: [Histogram; STATUSES.len()],
    batch_first_byte: Histogram,
    batch_duration: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        let by_status = || std::array::from_fn(|_| Histogram::default());
        Metrics {
            answers: ByStatus::default(),
            requests: Mutex::default(),
            sent_bytes: Mutex::default(),
            buckets: ArcSwap::default(),
            refused_overload: AtomicU64::new(0),
            refused_stopping: AtomicU64::new(0),
            refused_connections: AtomicU64::new(0),
            tls_failed: AtomicU64::new(0),
            cut: ByApi::default(),
            abandoned: ByApi::default(),
            in_flight: AtomicI64::new(0),
            tcp: Connections::default(),
            unix: Connections::default(),
            get_first_byte: by_status(),
            get_duration: by_status(),
            batch_first_byte: Histogram::default(),
            batch_duration: Histogram::default(),
        }
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

impl Metrics {
    /// Sets the buckets that get their own label.
    pub fn set_buckets(&self, names: impl IntoIterator<Item = String>) {
        let names = names.into_iter().map(Arc::from).collect();
        self.buckets.store(Arc::new(names));
    }

    /// A bucket as a label.
    fn bucket(&self, name: &str) -> Arc<str> {
        match self.buckets.load().get(name) {
            Some(known) => known.clone(),
            None if name.is_empty() => Arc::default(),
            None => OTHER.into(),
        }
    }

    /// An answer's head is on its way. `caller` is the name of a key or token, or empty.
    pub fn request(&self, api: Api, method: &Method, status: u16, bucket: &str, caller: &Arc<str>) {
        // Clients may send any method; labels must not be arbitrary.
        let method = match *method {
            Method::GET => "GET",
            Method::HEAD => "HEAD",
            Method::PUT => "PUT",
            Method::POST => "POST",
            Method::DELETE => "DELETE",
            _ => OTHER,
        };
        let labels = Labels {
            api,
            method,
            status,
            bucket: self.bucket(bucket),
            caller: caller.clone(),
        };
        let mut requests = self.requests.lock();
        let labels = if requests.len() < SERIES_MAX || requests.contains_key(&labels) {
            labels
        } else {
            Labels {
                bucket: OTHER.into(),
                caller: OTHER.into(),
                ..labels
            }
        };
        *requests.entry(labels).or_default() += 1;
    }

    /// All requests, those answered with 500 or above, and the bytes sent to clients.
    pub fn totals(&self) -> [u64; 3] {
        let (mut all, mut failed) = (0, 0);
        for (labels, n) in &*self.requests.lock() {
            all += n;
            failed += if labels.status >= 500 { *n } else { 0 };
        }
        [all, failed, self.sent_bytes.lock().values().sum()]
    }

    /// Counts bytes of an answer's body that were handed to its connection.
    pub fn sent(&self, api: Api, bucket: &str, caller: &Arc<str>, bytes: u64) {
        let series = (api, self.bucket(bucket), caller.clone());
        let mut sent = self.sent_bytes.lock();
        let series = if sent.len() < SERIES_MAX || sent.contains_key(&series) {
            series
        } else {
            (api, OTHER.into(), OTHER.into())
        };
        *sent.entry(series).or_default() += bytes;
    }

    /// The head of an answer is ready.
    pub fn first_byte(&self, api: Api, cache: Option<CacheStatus>, after: Duration) {
        match (api, cache) {
            (Api::Batch, _) => self.batch_first_byte.observe(after),
            (_, Some(status)) => self.get_first_byte[index(status)].observe(after),
            _ => {}
        }
    }

    /// The last byte of an answer is out.
    pub fn finished(&self, api: Api, cache: Option<CacheStatus>, after: Duration) {
        match (api, cache) {
            (Api::Batch, _) => self.batch_duration.observe(after),
            (_, Some(status)) => self.get_duration[index(status)].observe(after),
            _ => {}
        }
    }
}

/// `docs/METRICS.md`.
pub fn reference() -> String {
    let mut page = include_str!("head.md").to_owned();
    page.push_str(&declared().reference());
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_in_docs_is_current() {
        crate::docs::check("METRICS.md", &reference());
    }

    #[test]
    fn names_that_clients_make_up_are_not_labels() {
        let metrics = Metrics::default();
        metrics.set_buckets(["data".to_owned()]);
        let of = |bucket: &str, caller: &str| {
            metrics.request(Api::S3, &Method::GET, 200, bucket, &caller.into());
            metrics.sent(Api::S3, bucket, &caller.into(), 5);
        };
        of("data", "a");
        for i in 0..10_000 {
            of(&format!("made-up-{i}"), "a");
        }
        let seen = |bucket: &str| {
            let requests = metrics.requests.lock();
            let of_bucket = requests.iter().filter(|(l, _)| &*l.bucket == bucket);
            of_bucket.map(|(_, n)| *n).sum::<u64>()
        };
        assert_eq!((seen("data"), seen(OTHER)), (1, 10_000));
        assert_eq!(metrics.requests.lock().len(), 2);
        // Many keys, one after the other.
        for i in 0..2 * SERIES_MAX {
            of("data", &format!("key-{i}"));
        }
        assert!(metrics.requests.lock().len() <= SERIES_MAX + 1);
        assert!(metrics.sent_bytes.lock().len() <= SERIES_MAX + 1);
        let all: u64 = metrics.sent_bytes.lock().values().sum();
        assert_eq!(all, 5 * (10_001 + 2 * SERIES_MAX as u64));
    }
}
