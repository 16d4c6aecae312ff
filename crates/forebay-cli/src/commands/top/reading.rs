//! What happened between two scrapes.

use super::names;
use forebay_protocol::metrics::Page;
use serde::Serialize;

/// Rates are per second of the interval.
#[derive(Debug, Default, Serialize)]
pub struct Reading {
    pub time_ms: i64,
    pub seconds: f64,
    pub served_bytes_per_s: f64,
    pub requests_per_s: f64,
    /// The share of reads that the cache could answer; `None` without any reads.
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
    pub stale: f64,
    pub bypass: f64,
}

/// Seconds from the GET of an object to the last byte of its answer; for batches, if only batches
/// were requested.
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
    /// What was added from `earlier` to `later`, `seconds` apart, and the levels in `later`.
    pub fn between(earlier: &Page, later: &Page, seconds: f64) -> Self {
        let added = |name: &str, labels: &[(&str, &str)]| {
            let now = later.sum(name, labels).unwrap_or(0.0);
            // A node that restarted in between counts from zero.
            let then = earlier
                .sum(name, labels)
                .filter(|then| *then <= now)
                .unwrap_or(0.0);
            now - then
        };
        let rate = |name: &str, labels: &[(&str, &str)]| added(name, labels) / seconds.max(1e-9);
        let reads = |status: &str| rate(names::READS, &[("status", status)]);
        let cache = Cache {
            hit: reads("HIT"),
            miss: reads("MISS"),
            revalidated: reads("REVALIDATED"),
            stale: reads("STALE"),
            bypass: reads("BYPASS"),
        };
        let asked = cache.hit + cache.miss + cache.revalidated + cache.stale;
        let durations = |name: &str| {
            later
                .histogram(name, &[])
                .since(&earlier.histogram(name, &[]))
        };
        let latency = durations(names::GET_DURATION);
        let latency = if latency.count() > 0.0 {
            latency
        } else {
            durations(names::BATCH_DURATION)
        };
        Reading {
            time_ms: chrono::Utc::now().timestamp_millis(),
            seconds,
            served_bytes_per_s: rate(names::SENT_BYTES, &[]),
            requests_per_s: rate(names::REQUESTS, &[]),
            hit_ratio: (asked > 0.0)
                .then_some((cache.hit + cache.revalidated + cache.stale) / asked),
            cache,
            latency: Latency {
                p50: latency.quantile(0.5),
                p90: latency.quantile(0.9),
                p99: latency.quantile(0.99),
            },
            origin: Origin {
                requests_per_s: rate(names::ORIGIN_REQUESTS, &[]),
                errors_per_s: rate(names::ORIGIN_ERRORS, &[("class", "failure")]),
                bytes_per_s: rate(names::ORIGIN_BYTES, &[]),
            },
            batch: Batch {
                batches_per_s: rate(names::BATCHES, &[]),
                entries_per_s: rate(names::BATCH_OBJECTS, &[]) + rate(names::BATCH_MEMBERS, &[]),
                bytes_per_s: rate(names::BATCH_BYTES, &[]),
                soft_errors_per_s: rate(names::BATCH_SOFT_ERRORS, &[]),
            },
            memory: Level::of(later, names::MEMORY_USED, names::MEMORY_BUDGET),
            disk: Level::of(later, names::STORE_USED, names::STORE_CAPACITY),
        }
    }
}

impl Level {
    fn of(page: &Page, used: &str, total: &str) -> Option<Self> {
        Some(Level {
            used: page.sum(used, &[])?,
            total: page.sum(total, &[])?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_interval() {
        let earlier = Page::parse(
            "forebay_reads_total{status=\"HIT\"} 100\nforebay_reads_total{status=\"MISS\"} \
             100\nforebay_sent_bytes_total{api=\"s3\"} 5000\n",
        );
        let later = Page::parse(
            "forebay_reads_total{status=\"HIT\"} 130\nforebay_reads_total{status=\"MISS\"} 110\nforebay_sent_bytes_total{api=\"s3\"} 7000\n\
             forebay_memory_used_bytes 3\nforebay_memory_budget_bytes 10\nforebay_origin_errors_total{status=\"not_found\",class=\"answer\"} 4\n\
             forebay_origin_errors_total{status=\"timeout\",class=\"failure\"} 2\n\
             forebay_get_duration_seconds_bucket{le=\"0.001\"} \
                 8\nforebay_get_duration_seconds_bucket{le=\"+Inf\"} 8\n",
        );
        let r = Reading::between(&earlier, &later, 2.0);
        assert_eq!(
            (r.cache.hit, r.cache.miss, r.hit_ratio),
            (15.0, 5.0, Some(0.75))
        );
        assert_eq!((r.served_bytes_per_s, r.origin.errors_per_s), (1000.0, 1.0));
        assert_eq!(
            (r.memory.map(|m| m.total), r.disk.is_none()),
            (Some(10.0), true)
        );
        assert_eq!(r.latency.p50, Some(0.0005));
        // The node restarted: what it has counted since then is what happened.
        let r = Reading::between(&later, &earlier, 1.0);
        assert_eq!((r.cache.hit, r.latency.p50), (100.0, None));
    }
}
