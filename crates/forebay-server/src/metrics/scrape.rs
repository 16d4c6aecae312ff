//! The `/metrics` page: what was counted here, and what the other layers say when they are asked.

use super::{Kind, Metrics, STATUSES, table};
use crate::{
    auth::{Access, watch::Reload},
    note::Api,
    process,
    s3::Uploads,
    tls::Tls,
};
use forebay_batch::Batcher;
use forebay_dataset::{Datasets, Rows, follow::Plans, stream::Streams};
use forebay_engine::Engine;
use forebay_origin::Origins;
use forebay_store::DirState;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, text::encode},
    metrics::{MetricType, histogram::Histogram},
    registry::Registry,
};
use std::{
    fmt::{Error, Result},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// Everything that the page asks.
pub struct Scrape {
    pub metrics: Arc<Metrics>,
    pub engine: Engine,
    pub batcher: Batcher,
    pub datasets: Datasets,
    pub rows: Rows,
    pub plans: Plans,
    pub streams: Streams,
    pub origins: Arc<Origins>,
    pub uploads: Arc<Uploads>,
    pub ready: Arc<AtomicBool>,
    pub version: &'static str,
    pub node_id: String,
    pub started_secs: u64,
    pub access: Arc<Access>,
    pub tls: Option<Arc<Tls>>,
    /// What is read again while the node runs.
    pub reloads: Vec<Arc<dyn Reload>>,
}

impl Scrape {
    /// The page, in OpenMetrics text.
    pub fn page(self: &Arc<Self>) -> std::result::Result<String, Error> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Page(self.clone())));
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

struct Page(Arc<Scrape>);

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> Result {
        f.write_str("Page")
    }
}

/// One sample: label values in the order of the table, and the number.
type Sample<'a> = (Vec<&'a str>, f64);

/// Writes families, their help from the table.
struct Out<'a>(DescriptorEncoder<'a>);

impl Out<'_> {
    fn family<'s>(
        &'s mut self,
        name: &'static str,
    ) -> std::result::Result<(MetricEncoder<'s>, &'static table::Metric), Error> {
        let metric = table::find(name).ok_or(Error)?;
        let kind = match metric.kind {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge => MetricType::Gauge,
            Kind::Histogram => MetricType::Histogram,
            Kind::Info => MetricType::Info,
        };
        Ok((
            self.0.encode_descriptor(name, metric.help, None, kind)?,
            metric,
        ))
    }

    fn samples<'v>(
        &mut self,
        name: &'static str,
        samples: impl IntoIterator<Item = Sample<'v>>,
    ) -> Result {
        let (mut family, metric) = self.family(name)?;
        for (values, number) in samples {
            let labels: Vec<(&str, &str)> = metric.labels.iter().copied().zip(values).collect();
            if labels.is_empty() {
                value(&mut family, metric.kind, number)?;
            } else {
                value(&mut family.encode_family(&labels)?, metric.kind, number)?;
            }
        }
        Ok(())
    }

    fn one(&mut self, name: &'static str, number: impl Number) -> Result {
        self.samples(name, [(Vec::new(), number.number())])
    }

    fn info(&mut self, name: &'static str, values: &[&str]) -> Result {
        let (mut family, metric) = self.family(name)?;
        let labels: Vec<(&str, &str)> = metric
            .labels
            .iter()
            .copied()
            .zip(values.iter().copied())
            .collect();
        family.encode_info(&labels)
    }

    fn histograms<'v>(
        &mut self,
        name: &'static str,
        histograms: impl IntoIterator<Item = (Vec<&'v str>, &'v Histogram)>,
    ) -> Result {
        let (mut family, metric) = self.family(name)?;
        for (values, histogram) in histograms {
            let labels: Vec<(&str, &str)> = metric.labels.iter().copied().zip(values).collect();
            if labels.is_empty() {
                return histogram.encode(family);
            }
            histogram.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

fn value(encoder: &mut MetricEncoder<'_>, kind: Kind, number: f64) -> Result {
    // Counts are whole numbers and read better so; they are exact up to 2^53.
    let whole = number.fract() == 0.0 && number.abs() < 9e15;
    match (kind, whole) {
        (Kind::Counter, true) => {
            encoder.encode_counter::<NoLabelSet, _, u64>(&(number as u64), None)
        }
        (Kind::Counter, false) => encoder.encode_counter::<NoLabelSet, _, u64>(&number, None),
        (_, true) => encoder.encode_gauge(&(number as i64)),
        (_, false) => encoder.encode_gauge(&number),
    }
}

trait Number {
    fn number(self) -> f64;
}
macro_rules! numbers { ($($t:ty),*) => { $( impl Number for $t { fn number(self) -> f64 { self as f64 } } )* } }
numbers!(u64, i64, usize, f64, u32);

impl Collector for Page {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result {
        let mut out = Out(encoder);
        self.clients(&mut out)?;
        self.cache(&mut out)?;
        self.store(&mut out)?;
        self.origins(&mut out)?;
        self.batches(&mut out)?;
        self.datasets(&mut out)?;
        self.rows(&mut out)?;
        self.streams(&mut out)?;
        self.node(&mut out)
    }
}

impl Page {
    fn clients(&self, out: &mut Out<'_>) -> Result {
        let m = &*self.0.metrics;
        out.samples(
            "forebay_answers",
            STATUSES.map(|s| (vec![s.as_str()], m.answers.get(s).number())),
        )?;
        let requests: Vec<_> = m
            .requests
            .lock()
            .iter()
            .map(|((api, method, status), n)| (*api, *method, status.to_string(), *n))
            .collect();
        out.samples(
            "forebay_requests",
            requests.iter().map(|(api, method, status, n)| {
                (vec![api.as_str(), method, status.as_str()], n.number())
            }),
        )?;
        let refused = [
            ("connections", &m.refused_connections),
            ("overload", &m.refused_overload),
            ("stopping", &m.refused_stopping),
        ];
        out.samples(
            "forebay_requests_refused",
            refused.map(|(reason, n)| (vec![reason], n.load(Relaxed).number())),
        )?;
        out.samples(
            "forebay_answers_cut",
            Api::ALL.map(|a| (vec![a.as_str()], m.cut.get(a).number())),
        )?;
        out.samples(
            "forebay_answers_abandoned",
            Api::ALL.map(|a| (vec![a.as_str()], m.abandoned.get(a).number())),
        )?;
        out.samples(
            "forebay_sent_bytes",
            Api::ALL.map(|a| (vec![a.as_str()], m.sent_bytes.get(a).number())),
        )?;
        out.one("forebay_requests_in_flight", m.in_flight.load(Relaxed))?;
        let listeners = [("tcp", &m.tcp), ("unix", &m.unix)];
        out.samples(
            "forebay_connections_open",
            listeners.map(|(l, c)| (vec![l], c.open.load(Relaxed).number())),
        )?;
        out.samples(
            "forebay_connections",
            listeners.map(|(l, c)| (vec![l], c.accepted.load(Relaxed).number())),
        )?;
        out.histograms(
            "forebay_get_first_byte_seconds",
            STATUSES
                .iter()
                .zip(&m.get_first_byte)
                .map(|(s, h)| (vec![s.as_str()], h)),
        )?;
        out.histograms(
            "forebay_get_duration_seconds",
            STATUSES
                .iter()
                .zip(&m.get_duration)
                .map(|(s, h)| (vec![s.as_str()], h)),
        )?;
        out.histograms(
            "forebay_batch_first_byte_seconds",
            [(Vec::new(), &m.batch_first_byte)],
        )?;
        out.histograms(
            "forebay_batch_duration_seconds",
            [(Vec::new(), &m.batch_duration)],
        )
    }

    fn cache(&self, out: &mut Out<'_>) -> Result {
        let s = self.0.engine.stats().snapshot();
        let reads = [
            ("HIT", s.reads_hit),
            ("MISS", s.reads_miss),
            ("REVALIDATED", s.reads_revalidated),
            ("BYPASS", s.reads_bypass),
        ];
        out.samples(
            "forebay_reads",
            reads.map(|(status, n)| (vec![status], n.number())),
        )?;
        out.one("forebay_reads_failed", s.reads_failed)?;
        let bytes = [
            ("cache", s.bytes_from_cache),
            ("origin", s.bytes_from_origin),
        ];
        out.samples(
            "forebay_read_bytes",
            bytes.map(|(source, n)| (vec![source], n.number())),
        )?;
        out.one("forebay_fills", s.fills)?;
        out.one("forebay_fills_failed", s.fills_failed)?;
        out.one("forebay_fills_joined", s.fills_joined)?;
        out.one("forebay_fills_in_flight", self.0.engine.fills_in_flight())?;
        out.one("forebay_revalidations", s.revalidations)?;
        out.one("forebay_revalidations_changed", s.revalidations_changed)?;
        out.one("forebay_version_changes", s.version_changes)?;
        out.one("forebay_store_writes_failed", s.store_writes_failed)?;
        let indexes = [
            ("built", s.indexes_built),
            ("in_passing", s.indexes_built_in_passing),
            ("loaded", s.indexes_loaded),
        ];
        out.samples(
            "forebay_member_indexes",
            indexes.map(|(how, n)| (vec![how], n.number())),
        )?;
        out.one("forebay_archives_unpacked", s.archives_unpacked)?;
        out.one("forebay_writes", s.writes)?;
        out.one("forebay_written_bytes", s.bytes_written)?;
        out.one("forebay_deletes", s.deletes)
    }

    fn store(&self, out: &mut Out<'_>) -> Result {
        let stats = self.0.engine.store().map(|s| s.stats());
        let dirs: Vec<_> = stats
            .iter()
            .flat_map(|s| s.dirs.iter())
            .map(|d| (d.path.display().to_string(), d))
            .collect();
        macro_rules! per_dir { ($($name:literal => $field:ident),* $(,)?) => { $(
            out.samples($name, dirs.iter().map(|(dir, d)| (vec![dir.as_str()], d.$field.number())))?;
        )* } }
        per_dir! {
            "forebay_store_capacity_bytes" => capacity_bytes,
            "forebay_store_effective_bytes" => effective_bytes,
            "forebay_store_free_bytes" => free_bytes,
            "forebay_store_used_bytes" => used_bytes,
            "forebay_store_live_bytes" => live_bytes,
            "forebay_store_records" => records,
        }
        let states = [
            DirState::Ok,
            DirState::Full,
            DirState::ReadOnly,
            DirState::Failing,
        ];
        let of_states = dirs.iter().flat_map(|(dir, d)| {
            states.map(|s| {
                (
                    vec![dir.as_str(), s.as_str()],
                    u64::from(d.state == s).number(),
                )
            })
        });
        out.samples("forebay_store_dir_state", of_states)?;
        per_dir! {
            "forebay_store_evicted_records" => evicted_records,
            "forebay_store_evicted_bytes" => evicted_bytes,
            "forebay_store_relocated_bytes" => relocated_bytes,
            "forebay_store_written_bytes" => written_bytes,
            "forebay_store_checksum_failures" => checksum_failures,
            "forebay_store_read_failures" => read_failures,
            "forebay_store_write_failures" => write_failures,
        }
        let of = |f: fn(&forebay_store::StoreStats) -> u64| stats.as_ref().map_or(0, f);
        out.one("forebay_store_entries", of(|s| s.entries))?;
        out.one("forebay_store_index_bytes", of(|s| s.index_bytes))?;
        out.one("forebay_store_pins", of(|s| s.pins))?;
        out.one("forebay_store_pinned_bytes", of(|s| s.pinned_bytes))?;
        out.one("forebay_store_pins_not_held", of(|s| s.pins_not_held))
    }

    fn origins(&self, out: &mut Out<'_>) -> Result {
        let stats = self.0.origins.stats();
        let operations = || {
            stats
                .iter()
                .flat_map(|(name, s)| s.operations.iter().map(move |o| (name.as_str(), o)))
        };
        out.samples(
            "forebay_origin_requests",
            operations().map(|(name, o)| (vec![name, o.operation.as_str()], o.requests.number())),
        )?;
        let errors = stats.iter().flat_map(|(name, s)| {
            s.errors
                .iter()
                .map(move |(kind, n)| (vec![name.as_str(), kind.code()], n.number()))
        });
        out.samples("forebay_origin_errors", errors)?;
        out.samples(
            "forebay_origin_latency_seconds",
            operations().map(|(name, o)| (vec![name, o.operation.as_str()], o.latency_seconds)),
        )?;
        macro_rules! per_origin { ($($name:literal => $field:ident),* $(,)?) => { $(
            out.samples($name, stats.iter().map(|(name, s)| (vec![name.as_str()], s.$field.number())))?;
        )* } }
        per_origin! {
            "forebay_origin_received_bytes" => bytes_in,
            "forebay_origin_sent_bytes" => bytes_out,
            "forebay_origin_requests_in_flight" => in_flight,
            "forebay_origin_requests_waiting" => waiting,
            "forebay_origin_throttled_seconds" => throttled_seconds,
            "forebay_origin_retries" => retries,
            "forebay_origin_continuations" => continuations,
            "forebay_origin_hedges" => hedges,
            "forebay_origin_hedges_won" => hedges_won,
        }
        Ok(())
    }

    fn batches(&self, out: &mut Out<'_>) -> Result {
        let s = self.0.batcher.stats().snapshot();
        out.one("forebay_getbatch_n", s.batches)?;
        out.one("forebay_getbatch_obj_n", s.objects)?;
        out.one("forebay_getbatch_file_n", s.members)?;
        out.one("forebay_getbatch_obj_size_bytes", s.object_bytes)?;
        out.one("forebay_getbatch_file_size_bytes", s.member_bytes)?;
        out.one("forebay_getbatch_rxwait_ns", s.wait_ns)?;
        out.one("forebay_getbatch_throttle_ns", s.throttle_ns)?;
        out.one("forebay_err_soft_getbatch_n", s.errors_soft)?;
        out.one("forebay_err_getbatch_n", s.errors_hard)?;
        out.one("forebay_getbatch_refused", s.refused)?;
        out.one("forebay_getbatch_cut", s.cut)?;
        out.one("forebay_getbatch_recoveries", s.recoveries)?;
        out.one("forebay_getbatch_recoveries_failed", s.recoveries_failed)?;
        out.one("forebay_getbatch_in_flight", s.in_flight)?;
        out.one("forebay_getbatch_sent_bytes", s.bytes_sent)
    }

    fn datasets(&self, out: &mut Out<'_>) -> Result {
        let s = self.0.datasets.stats();
        let opened = [
            ("opened", &s.opened),
            ("joined", &s.joined),
            ("failed", &s.failed),
        ];
        out.samples(
            "forebay_datasets_openings",
            opened.map(|(outcome, n)| (vec![outcome], n.get().number())),
        )?;
        out.one(
            "forebay_datasets_opening_seconds",
            s.open_us.get() as f64 / 1e6,
        )?;
        let files = [
            ("indexed", &s.files_indexed),
            ("reused", &s.files_reused),
            ("skipped", &s.files_skipped),
        ];
        out.samples(
            "forebay_datasets_files",
            files.map(|(how, n)| (vec![how], n.get().number())),
        )?;
        out.one("forebay_datasets_indexed_bytes", s.indexed_bytes.get())?;
        out.one("forebay_datasets_loaded", s.loaded.get())?;
        out.one("forebay_datasets_keep_failed", s.keep_failed.get())?;
        let (kept, bytes) = self.0.datasets.kept();
        out.one("forebay_datasets_kept", kept as u64)?;
        out.one("forebay_datasets_memory_bytes", bytes)?;
        let (leases, plans) = self.0.plans.counts();
        out.one("forebay_plans_followed", plans)?;
        out.one("forebay_plan_leases_held", leases)?;
        let f = self.0.plans.stats();
        let ended = [
            ("registered", &f.registered),
            ("renewed", &f.renewed),
            ("released", &f.released),
            ("expired", &f.expired),
        ];
        out.samples(
            "forebay_plan_leases",
            ended.map(|(what, n)| (vec![what], n.load(Relaxed).number())),
        )?;
        out.one("forebay_plan_ahead_bytes", f.ahead_bytes.load(Relaxed))?;
        out.one("forebay_plan_ahead_failed", f.ahead_failed.load(Relaxed))
    }

    fn rows(&self, out: &mut Out<'_>) -> Result {
        let s = self.0.rows.stats();
        let requests = [("answered", s.requests), ("failed", s.failed)];
        out.samples(
            "forebay_rows_requests",
            requests.map(|(outcome, n)| (vec![outcome], n.number())),
        )?;
        out.one("forebay_rows_read", s.rows)?;
        out.one("forebay_rows_read_bytes", s.bytes)?;
        let blocks = [
            ("whole", s.blocks_decoded),
            ("in_part", s.blocks_read_in_part),
            ("joined", s.parts_joined),
            ("reused", s.blocks_reused),
        ];
        out.samples(
            "forebay_rows_blocks",
            blocks.map(|(how, n)| (vec![how], n.number())),
        )?;
        out.one("forebay_rows_ranges_fetched", s.ranges_fetched)?;
        let seconds = [
            ("all", s.read_ns),
            ("fetch", s.fetch_ns),
            ("decode", s.decode_ns),
            ("gather", s.gather_ns),
        ];
        out.samples(
            "forebay_rows_seconds",
            seconds.map(|(what, ns)| (vec![what], (ns as f64 / 1e9).number())),
        )?;
        out.one("forebay_rows_cached_blocks", s.cached_blocks)?;
        out.one("forebay_rows_cached_bytes", s.cached_bytes)
    }

    fn streams(&self, out: &mut Out<'_>) -> Result {
        let s = self.0.streams.stats();
        out.one("forebay_streams_open", s.open.load(Relaxed))?;
        let connections = [
            ("opened", &s.opened),
            ("refused", &s.refused),
            ("failed", &s.failed),
        ];
        out.samples(
            "forebay_streams_connections",
            connections.map(|(outcome, n)| (vec![outcome], n.load(Relaxed).number())),
        )?;
        out.one("forebay_streams_steps", s.steps.load(Relaxed))?;
        out.one("forebay_streams_rows", s.rows.load(Relaxed))?;
        out.one("forebay_streams_bytes", s.bytes.load(Relaxed))?;
        out.one(
            "forebay_streams_window_bytes",
            self.0.streams.window_bytes(),
        )?;
        let times = [
            ("read", &s.read_us),
            ("frame", &s.frame_us),
            ("wait", &s.wait_us),
            ("socket", &s.socket_us),
        ];
        out.samples(
            "forebay_streams_seconds",
            times.map(|(what, us)| (vec![what], us.load(Relaxed) as f64 / 1e6)),
        )?;
        let cold = s.blocks_ahead_cold.load(Relaxed);
        let ahead = [
            ("cold", cold),
            ("ready", s.blocks_ahead.load(Relaxed).saturating_sub(cold)),
            ("no_memory", s.ahead_busy.load(Relaxed)),
        ];
        out.samples(
            "forebay_streams_blocks_ahead",
            ahead.map(|(how, n)| (vec![how], n.number())),
        )
    }

    fn node(&self, out: &mut Out<'_>) -> Result {
        let budget = self.0.engine.budget();
        out.one("forebay_memory_budget_bytes", budget.total_bytes())?;
        out.one("forebay_memory_used_bytes", budget.used_bytes())?;
        out.one("forebay_uploads_open", self.0.uploads.len())?;
        out.one("forebay_keys", self.0.access.len())?;
        let reloads = &self.0.reloads;
        out.samples(
            "forebay_reloads",
            reloads
                .iter()
                .map(|r| (vec![r.name()], r.stats().done().number())),
        )?;
        out.samples(
            "forebay_reloads_failed",
            reloads
                .iter()
                .map(|r| (vec![r.name()], r.stats().failures().number())),
        )?;
        out.samples(
            "forebay_reload_stale",
            reloads
                .iter()
                .map(|r| (vec![r.name()], u64::from(r.stats().is_stale()).number())),
        )?;
        out.one(
            "forebay_tls_handshakes_failed",
            self.0.metrics.tls_failed.load(Relaxed),
        )?;
        let expiry = self
            .0
            .tls
            .as_ref()
            .and_then(|t| t.not_after_secs())
            .map(|end| end - chrono::Utc::now().timestamp());
        out.samples(
            "forebay_tls_certificate_expiry_seconds",
            expiry.map(|left| (Vec::new(), left.number())),
        )?;
        out.one("forebay_ready", u64::from(self.0.ready.load(Relaxed)))?;
        out.info("forebay_build", &[self.0.version, &self.0.node_id])?;
        out.one("process_cpu_seconds", process::cpu_time().as_secs_f64())?;
        out.one("process_resident_memory_bytes", process::resident_bytes())?;
        out.one("process_open_fds", process::open_fds())?;
        out.one("process_start_time_seconds", self.0.started_secs)
    }
}
