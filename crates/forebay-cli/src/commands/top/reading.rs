//! What happened between two scrapes. The names of the metrics stand here and nowhere else; `docs/METRICS.md` says what each means.

use crate::prom::Page;
use serde::Serialize;

/// Rates are per second of the interval.
#[derive(Debug, Default, Serialize)]
pub struct Reading {
    pub time_ms: i64,
    pub seconds: f64,
    pub served_bytes_per_s: f64,
    pub requests_per_s: f64,
    /// Of the reads that the cache was asked for; `None` without any.
    pub hit_ratio: Option<f64>,
    pub cache: Cache,
    pub latency: Latency,
    pub origin: Origin,
    pub batch: Batch,
    pub memory: Option<Level>,
    pub disk: Option<Level>,
}

#[derive(Debug, Default, Serialize)]
pub struct Cache {
    pub hit: f64,
    pub miss: f64,
    pub revalidated: f64,
    pub bypass: f64,
}

/// Seconds from a request's head to the end of its answer.
#[derive(Debug, Default, Serialize)]
pub struct Latency {
    pub p50: Option<f64>,
    pub p90: Option<f64>,
    pub p99: Option<f64>,
}

#[derive(Debug, Default, Serialize)]
pub struct Origin {
    pub requests_per_s: f64,
    pub errors_per_s: f64,
    pub bytes_per_s: f64,
}

#[derive(Debug, Default, Serialize)]
pub struct Batch {
    pub batches_per_s: f64,
    pub entries_per_s: f64,
    pub bytes_per_s: f64,
    pub soft_errors_per_s: f64,
}

/// Bytes.
#[derive(Debug, Default, Serialize)]
pub struct Level {
    pub used: f64,
    pub total: f64,
}

impl Reading {
    pub fn between(_earlier: &Page, _later: &Page, seconds: f64) -> Self {
        Reading { seconds, time_ms: chrono::Utc::now().timestamp_millis(), ..Reading::default() }
    }
}
