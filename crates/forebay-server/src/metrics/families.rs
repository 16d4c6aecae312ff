//! Every metric of the node, declared where its numbers are read: kind, name, labels and help
//! appear only here. These functions make the metrics page and, for a node where nothing has
//! happened, `docs/METRICS.md`.

use super::{
    Metrics, STATUSES,
    page::{
        Kind::{Counter, Gauge, Info},
        NONE, Page,
    },
};
use crate::{app::App, auth::watch::ReloadStats, note::Api, process};
use forebay_batch::BatchSnapshot;
use forebay_cluster::{Map, Member, MemberState};
use forebay_dataset::{
    Asked, DatasetStats, RowsSnapshot, filter::FilterStats, follow::FollowStats,
    stream::StreamStats,
};
use forebay_engine::EngineSnapshot;
use forebay_membership::Report;
use forebay_origin::{OriginStats, is_failure};
use forebay_peer::{Coherence, CopiesStatus, HandOverStatus, LinkStatus};
use forebay_stage::{StageGauges, StageStats};
use forebay_store::{DirState, StoreStats};
use std::{collections::HashMap, sync::atomic::Ordering::Relaxed};

/// All metrics of a node.
pub fn page(app: &App) -> Page {
    let mut page = Page::default();
    clients(&mut page, &app.metrics);
    let engine = app.engine.stats().snapshot();
    cache(&mut page, &engine, app.engine.fills_in_flight());
    let stats = app.engine.cache_stats();
    store(&mut page, &stats.unwrap_or_default());
    origins(&mut page, &app.origins.stats());
    batches(&mut page, &app.batcher.stats().snapshot());
    let (kept, composed) = (app.datasets.kept(), app.datasets.told_kept());
    datasets(
        &mut page,
        app.datasets.stats(),
        kept,
        composed,
        app.plans.stats(),
        app.plans.counts(),
    );
    rows(&mut page, &app.rows.stats());
    let of = &app.filters;
    filters(&mut page, of.stats(), of.asked(), of.kept(), of.under_way());
    let of = &app.keys;
    keys(&mut page, of.asked(), of.kept(), of.under_way());
    streams(&mut page, app.streams.stats(), app.streams.window_bytes());
    let none = StageStats::default();
    let (stats, gauges) = match &app.stages {
        Some(stages) => (stages.stats(), stages.gauges()),
        None => (&none, StageGauges::default()),
    };
    checkpoints(&mut page, stats, &gauges);
    cluster(&mut page, ClusterNow::of(app));
    let reloads: Vec<_> = app.reloads.iter().map(|r| (r.name(), r.stats())).collect();
    node(&mut page, &NodeNow::of(app), &reloads);
    let energy = app.energy.as_ref();
    energy_used(&mut page, &energy.map(|e| e.totals()).unwrap_or_default());
    page
}

/// Every declared metric, without numbers.
pub fn declared() -> Page {
    let mut page = Page::default();
    clients(&mut page, &Metrics::default());
    cache(&mut page, &EngineSnapshot::default(), 0);
    store(&mut page, &StoreStats::default());
    origins(&mut page, &[]);
    batches(&mut page, &BatchSnapshot::default());
    datasets(
        &mut page,
        &DatasetStats::default(),
        (0, 0),
        (0, 0),
        &FollowStats::default(),
        (0, 0),
    );
    rows(&mut page, &RowsSnapshot::default());
    let asked = Asked::default();
    filters(&mut page, &FilterStats::default(), &asked, (0, 0), 0);
    keys(&mut page, &asked, (0, 0), 0);
    streams(&mut page, &StreamStats::default(), 0);
    checkpoints(&mut page, &StageStats::default(), &StageGauges::default());
    cluster(&mut page, None);
    node(&mut page, &NodeNow::default(), &[]);
    energy_used(&mut page, &[]);
    page
}

/// What the node itself knows at one moment.
#[derive(Default)]
struct NodeNow {
    budget_bytes: u64,
    budget_used_bytes: u64,
    uploads: usize,
    keys: usize,
    waiting_settings: usize,
    tls_failed: u64,
    certificate_seconds: Option<i64>,
    peer_certificate_seconds: Option<i64>,
    ready: bool,
    node_id: String,
    started_secs: u64,
}

impl NodeNow {
    fn of(app: &App) -> Self {
        let budget = app.engine.budget();
        let now_secs = app.clock.now_ms() / 1000;
        let ends = app.tls.as_ref().and_then(|tls| tls.not_after_secs());
        let peers = app.peer_certificates.as_ref();
        let peer_ends = peers.and_then(|peers| peers.tls().not_after_secs());
        NodeNow {
            budget_bytes: budget.total_bytes(),
            budget_used_bytes: budget.used_bytes(),
            uploads: app.uploads.len(),
            keys: app.access.len(),
            waiting_settings: app.reload.waiting(),
            tls_failed: app.metrics.tls_failed.load(Relaxed),
            certificate_seconds: ends.map(|end| end - now_secs),
            peer_certificate_seconds: peer_ends.map(|end| end - now_secs),
            ready: app.ready.load(Relaxed),
            node_id: app.node_id.clone(),
            started_secs: app.started_secs,
        }
    }
}

/// A node's cluster at one moment.
struct ClusterNow {
    map: Map,
    node: u64,
    /// With what each peer is called in labels.
    links: Vec<(String, LinkStatus)>,
    report: Option<Report>,
    differs: [(&'static str, u64); 3],
    coherence: Option<Coherence>,
    hand_over: HandOverStatus,
    copies: CopiesStatus,
    /// Units that are hot, and answers with bytes of hot ones.
    hot: (usize, u64),
}

impl ClusterNow {
    /// `None` for a node that is alone.
    fn of(app: &App) -> Option<Self> {
        let joined = app.joined.as_ref()?;
        let map = joined.cluster.map();
        let labels: HashMap<u64, String> = map.members.iter().map(|m| (m.id, m.label())).collect();
        let label = |node: u64| {
            let known = labels.get(&node).cloned();
            known.unwrap_or_else(|| format!("{node:016x}"))
        };
        let links = joined.cluster.links().into_iter();
        Some(ClusterNow {
            links: links.map(|link| (label(link.node), link)).collect(),
            map,
            node: joined.cluster.me().node,
            report: joined.report(),
            differs: app.differences.counts(),
            coherence: joined.cluster.coherence(),
            hand_over: joined.cluster.hand_over_status(),
            copies: joined.cluster.copies_status(),
            hot: joined.cluster.hot_units(),
        })
    }

    /// What a member is called in labels.
    fn label(&self, node: u64) -> String {
        let member = self.map.members.iter().find(|m| m.id == node);
        member.map_or_else(|| format!("{node:016x}"), Member::label)
    }
}

fn clients(page: &mut Page, m: &Metrics) {
    page.section("Requests of clients");
    page.family(
        Counter,
        "forebay_answers",
        &["x_cache"],
        "Answers by the X-Cache header that they carried, counted where \
the header is set.",
        STATUSES.map(|s| (vec![s.as_str()], m.answers.get(s))),
    );
    page.family(
        Counter,
        "forebay_requests",
        &["api", "method", "status", "bucket", "caller"],
        "Requests by interface, method, HTTP status, bucket and name of \
the key or token. A bucket that is not configured by name is \
`other`.",
        m.requests.lock().iter().map(|(r, n)| {
            let labels = [
                r.api.as_str().into(),
                r.method.into(),
                r.status.to_string(),
                r.bucket.to_string(),
                r.caller.to_string(),
            ];
            (labels, *n)
        }),
    );
    let refused = [
        ("connections", &m.refused_connections),
        ("overload", &m.refused_overload),
        ("stopping", &m.refused_stopping),
    ];
    page.family(
        Counter,
        "forebay_requests_refused",
        &["reason"],
        "Requests refused before work began: connections (too many are \
open), overload, stopping.",
        refused.map(|(reason, n)| (vec![reason], n.load(Relaxed))),
    );
    page.family(
        Counter,
        "forebay_answers_cut",
        &["api"],
        "Answers that were broken off after their first byte because of an \
error.",
        Api::ALL.map(|a| (vec![a.as_str()], m.cut.get(a))),
    );
    page.family(
        Counter,
        "forebay_answers_abandoned",
        &["api"],
        "Answers that the client did not wait for.",
        Api::ALL.map(|a| (vec![a.as_str()], m.abandoned.get(a))),
    );
    page.family(
        Counter,
        "forebay_sent_bytes",
        &["api", "bucket", "caller"],
        "Bytes of answers' bodies that were handed to connections; labels \
as of forebay_requests.",
        m.sent_bytes
            .lock()
            .iter()
            .map(|((api, bucket, caller), n)| ([api.as_str(), bucket, caller], *n)),
    );
    page.one(
        Gauge,
        "forebay_requests_in_flight",
        "Requests being worked on, bodies included.",
        m.in_flight.load(Relaxed),
    );
    let listeners = [("tcp", &m.tcp), ("unix", &m.unix)];
    page.family(
        Gauge,
        "forebay_connections_open",
        &["listener"],
        "Open client connections.",
        listeners.map(|(l, c)| (vec![l], c.open.load(Relaxed))),
    );
    page.family(
        Counter,
        "forebay_connections",
        &["listener"],
        "Client connections accepted.",
        listeners.map(|(l, c)| (vec![l], c.accepted.load(Relaxed))),
    );
    page.histograms(
        "forebay_get_first_byte_seconds",
        &["x_cache"],
        "From a GET of an object to the head of its answer.",
        STATUSES
            .iter()
            .zip(&m.get_first_byte)
            .map(|(s, h)| ([s.as_str()], h.snapshot())),
    );
    page.histograms(
        "forebay_get_duration_seconds",
        &["x_cache"],
        "From a GET of an object to the last byte of its answer, whole \
answers only.",
        STATUSES
            .iter()
            .zip(&m.get_duration)
            .map(|(s, h)| ([s.as_str()], h.snapshot())),
    );
    page.histograms(
        "forebay_batch_first_byte_seconds",
        &[],
        "From a batch request to the head of its answer.",
        [(NONE, m.batch_first_byte.snapshot())],
    );
    page.histograms(
        "forebay_batch_duration_seconds",
        &[],
        "From a batch request to the last byte of its answer, whole \
answers only.",
        [(NONE, m.batch_duration.snapshot())],
    );
}

fn cache(page: &mut Page, s: &EngineSnapshot, fills_in_flight: usize) {
    page.section("Cache");
    let reads = [
        ("HIT", s.reads_hit),
        ("MISS", s.reads_miss),
        ("REVALIDATED", s.reads_revalidated),
        ("STALE", s.reads_stale),
        ("BYPASS", s.reads_bypass),
    ];
    page.family(
        Counter,
        "forebay_reads",
        &["status"],
        "Reads of the engine by how they were answered. One read is one \
object GET or one entry of a batch.",
        reads.map(|(status, n)| (vec![status], n)),
    );
    page.one(
        Counter,
        "forebay_reads_failed",
        "Reads that failed before their first byte.",
        s.reads_failed,
    );
    let bytes = [
        ("cache", s.bytes_from_cache),
        ("origin", s.bytes_from_origin),
    ];
    page.family(
        Counter,
        "forebay_read_bytes",
        &["source"],
        "Bytes that reads took from the local disk (cache), and from \
origins or other nodes of a cluster (origin).",
        bytes.map(|(source, n)| (vec![source], n)),
    );
    page.one(
        Counter,
        "forebay_fills",
        "Origin requests that fill the cache.",
        s.fills,
    );
    page.one(
        Counter,
        "forebay_fills_failed",
        "Fills that ended in an error.",
        s.fills_failed,
    );
    page.one(
        Counter,
        "forebay_fills_joined",
        "Readers that waited for somebody else's fill instead of asking \
the origin.",
        s.fills_joined,
    );
    page.one(
        Gauge,
        "forebay_fills_in_flight",
        "Fills under way.",
        fills_in_flight,
    );
    page.one(
        Counter,
        "forebay_revalidations",
        "Origin requests that asked whether a version is still current.",
        s.revalidations,
    );
    page.one(
        Counter,
        "forebay_revalidations_changed",
        "Of those, answered with a new version.",
        s.revalidations_changed,
    );
    page.one(
        Counter,
        "forebay_version_changes",
        "Objects that changed at the origin while they were read.",
        s.version_changes,
    );
    page.one(
        Counter,
        "forebay_store_writes_failed",
        "Results that were passed through because the disk refused them.",
        s.store_writes_failed,
    );
    let indexes = [
        ("built", s.indexes_built),
        ("in_passing", s.indexes_built_in_passing),
        ("loaded", s.indexes_loaded),
    ];
    page.family(
        Counter,
        "forebay_member_indexes",
        &["how"],
        "Member indexes of archives: built for a read, built in passing, \
loaded from the store.",
        indexes.map(|(how, n)| (vec![how], n)),
    );
    page.one(
        Counter,
        "forebay_archives_with_repeated_names",
        "Archives whose index was built or loaded and that have several members of the same name: \
`cache.repeated_members` says which of them counts.",
        s.indexes_with_repeated_names,
    );
    page.one(
        Counter,
        "forebay_archives_unpacked",
        "Compressed archives unpacked into the store.",
        s.archives_unpacked,
    );
    page.one(
        Counter,
        "forebay_writes",
        "Objects written to origins.",
        s.writes,
    );
    page.one(
        Counter,
        "forebay_written_bytes",
        "Bytes written to origins.",
        s.bytes_written,
    );
    page.one(
        Counter,
        "forebay_deletes",
        "Objects removed at origins.",
        s.deletes,
    );
}

fn store(page: &mut Page, stats: &StoreStats) {
    page.section("Store");
    let dirs: Vec<_> = stats
        .dirs
        .iter()
        .map(|d| (d.path.display().to_string(), d))
        .collect();
    macro_rules! per_dir {
        ($($kind:ident $name:literal, $help:literal => $field:ident),* $(,)?) => { $(
            let values = dirs.iter().map(|(dir, d)| ([dir], d.$field));
            page.family($kind, $name, &["dir"], $help, values);
        )* };
    }
    per_dir! {
        Gauge "forebay_store_capacity_bytes", "What a cache directory may use." => capacity_bytes,
        Gauge "forebay_store_effective_bytes",
            "What of the capacity there is room for on the file system." => effective_bytes,
        Gauge "forebay_store_free_bytes",
            "What may still be written to the file system, by anybody." => free_bytes,
        Gauge "forebay_store_used_bytes",
            "What it uses; never more than its capacity." => used_bytes,
        Gauge "forebay_store_live_bytes", "Of that, records that can be read." => live_bytes,
        Gauge "forebay_store_records", "Records that can be read." => records,
    }
    let states = [
        DirState::Ok,
        DirState::Full,
        DirState::ReadOnly,
        DirState::Failing,
    ];
    let of_states = dirs.iter().flat_map(|(dir, d)| {
        states.map(|s| (vec![dir.as_str(), s.as_str()], u64::from(d.state == s)))
    });
    page.family(
        Gauge,
        "forebay_store_dir_state",
        &["dir", "state"],
        "1 for the state that a directory is in: ok, full, read-only, \
failing.",
        of_states,
    );
    per_dir! {
        Counter "forebay_store_evicted_records", "Records evicted." => evicted_records,
        Counter "forebay_store_evicted_bytes", "Bytes evicted." => evicted_bytes,
        Counter "forebay_store_relocated_bytes",
            "Bytes copied by the evictor: write amplification." => relocated_bytes,
        Counter "forebay_store_written_bytes", "Bytes written to the directory." => written_bytes,
        Counter "forebay_store_checksum_failures",
            "Blocks that failed their checksum; each was treated as a miss." => checksum_failures,
        Counter "forebay_store_read_failures", "Reads that the disk failed." => read_failures,
        Counter "forebay_store_write_failures", "Writes that the disk failed." => write_failures,
    }
    page.histograms(
        "forebay_store_disk_seconds",
        &["dir", "op"],
        "How long the disk of a cache directory took for one read or \
write; reads that the page cache answered without waiting are \
left out.",
        dirs.iter().flat_map(|(dir, d)| {
            [
                ([dir.as_str(), "read"], d.read_latency.clone()),
                ([dir.as_str(), "write"], d.write_latency.clone()),
            ]
        }),
    );
    page.one(
        Gauge,
        "forebay_store_entries",
        "Entries of the index: heads, parts and pins.",
        stats.entries,
    );
    page.one(
        Gauge,
        "forebay_store_index_bytes",
        "Memory that the index takes.",
        stats.index_bytes,
    );
    page.one(Gauge, "forebay_store_pins", "Pinned names.", stats.pins);
    page.one(
        Gauge,
        "forebay_store_pinned_bytes",
        "What the pinned objects take.",
        stats.pinned_bytes,
    );
    page.one(
        Gauge,
        "forebay_store_pins_not_held",
        "Pinned names that are not held because the pins would take over \
half of the cache.",
        stats.pins_not_held,
    );
}

fn origins(page: &mut Page, stats: &[(String, OriginStats)]) {
    page.section("Origins");
    let operations = || {
        stats
            .iter()
            .flat_map(|(name, s)| s.operations.iter().map(move |o| (name.as_str(), o)))
    };
    page.family(
        Counter,
        "forebay_origin_requests",
        &["origin", "op"],
        "Requests to an origin, each attempt counted.",
        operations().map(|(name, o)| (vec![name, o.operation.as_str()], o.requests)),
    );
    let errors = stats.iter().flat_map(|(name, s)| {
        s.errors.iter().map(move |(kind, n)| {
            let class = if is_failure(*kind) {
                "failure"
            } else {
                "answer"
            };
            ([name.as_str(), kind.code(), class], *n)
        })
    });
    page.family(
        Counter,
        "forebay_origin_errors",
        &["origin", "status", "class"],
        "Errors of an origin by kind: failure (the origin, its credentials or the way to it are in \
         trouble) or answer (not_found, not_modified, and what clients should not have asked for).",
        errors,
    );
    page.histograms(
        "forebay_origin_latency_seconds",
        &["origin", "op"],
        "From a request to an origin to the head of its answer, each \
attempt by itself.",
        operations()
            .filter(|(_, o)| o.requests > 0)
            .map(|(name, o)| ([name, o.operation.as_str()], o.latency.clone())),
    );
    macro_rules! per_origin {
        ($($kind:ident $name:literal, $help:literal => $field:ident),* $(,)?) => { $(
            let values = stats.iter().map(|(name, s)| ([name], s.$field));
            page.family($kind, $name, &["origin"], $help, values);
        )* };
    }
    per_origin! {
        Counter "forebay_origin_received_bytes",
            "Bytes of objects read from an origin." => bytes_in,
        Counter "forebay_origin_sent_bytes", "Bytes of objects written to an origin." => bytes_out,
        Gauge "forebay_origin_requests_in_flight",
            "Requests whose answer or body is not finished." => in_flight,
        Gauge "forebay_origin_requests_waiting",
            "Requests that wait for a place under requests_in_flight." => waiting,
        Counter "forebay_origin_throttled_seconds",
            "Seconds that bytes waited for bytes_per_second, summed." => throttled_seconds,
        Counter "forebay_origin_retries", "Second and later attempts." => retries,
        Counter "forebay_origin_continuations",
            "Bodies that broke off and were continued." => continuations,
        Counter "forebay_origin_hedges",
            "Slow GETs that were sent a second time (hedge_percent)." => hedges,
        Counter "forebay_origin_hedges_won",
            "Those of them whose second answer came first." => hedges_won,
        Gauge "forebay_origin_circuit_open",
            "1 while the origin does not answer and requests to it fail at once (of Amazon's \
             buckets under one wildcard: how many), until the next answer." => circuits_open,
        Counter "forebay_origin_circuit_refused",
            "Requests that failed at once because the origin did not answer." => circuit_refused,
    }
}

fn checkpoints(page: &mut Page, s: &StageStats, g: &StageGauges) {
    page.section("Checkpoints");
    let states = [
        ("staging", g.staging),
        ("staged", g.waiting),
        ("flushing", g.flushing),
        ("failed", g.failed),
        ("durable", g.warm),
    ];
    page.family(
        Gauge,
        "forebay_checkpoints",
        &["state"],
        "Checkpoints on this node's disk, by state; a failed one is tried again, a durable one is kept \
to be read.",
        states.map(|(state, n)| ([state], n as u64)),
    );
    macro_rules! alone {
        ($($kind:ident $name:literal, $help:literal => $value:expr),* $(,)?) => { $(
            page.one($kind, $name, $help, $value);
        )* };
    }
    alone! {
        Gauge "forebay_checkpoint_staged_bytes",
            "What checkpoints take on disk that are not durable." => g.pending_bytes,
        Gauge "forebay_checkpoint_warm_bytes",
            "What durable checkpoints take on disk." => g.warm_bytes,
        Gauge "forebay_checkpoint_oldest_seconds",
            "Time since the commit of the oldest checkpoint that is not durable; 0: all are." =>
            g.oldest_seconds,
        Gauge "forebay_checkpoints_overdue",
            "Checkpoints that are not durable, past their deadline." => g.overdue as u64,
        Gauge "forebay_checkpoints_lost",
            "Checkpoints that are not durable, of which files are gone from this node's disks." =>
            g.lost as u64,
        Counter "forebay_checkpoints_begun", "Checkpoints that were begun." =>
            s.begun.load(Relaxed),
        Counter "forebay_checkpoints_staged", "Checkpoints that were committed." =>
            s.staged.load(Relaxed),
        Counter "forebay_checkpoints_durable", "Checkpoints that became durable." =>
            s.durable.load(Relaxed),
        Counter "forebay_checkpoints_abandoned",
            "Checkpoints that were given up, by their writer or because nothing was heard of it." =>
            s.abandoned.load(Relaxed),
        Counter "forebay_checkpoints_late",
            "Checkpoints that were not durable by their deadline." => s.late.load(Relaxed),
        Counter "forebay_checkpoint_failures",
            "Attempts to bring a checkpoint to its origin that failed." => s.failures.load(Relaxed),
        Counter "forebay_checkpoint_refused",
            "Files that were refused because there was no room for them." => s.refused.load(Relaxed),
        Counter "forebay_checkpoint_received_bytes", "Bytes of files that were staged." =>
            s.staged_bytes.load(Relaxed),
        Counter "forebay_checkpoint_flush_bytes",
            "Bytes of checkpoints that origins acknowledged." => s.flushed_bytes.load(Relaxed),
        Counter "forebay_checkpoint_read_bytes", "Bytes that were read from staged files and sent." =>
            s.read_bytes.load(Relaxed),
        Counter "forebay_checkpoint_lent",
            "Staged files that were lent to clients on this machine, which read them themselves." =>
            s.lent.load(Relaxed),
    }
}

fn cluster(page: &mut Page, now: Option<ClusterNow>) {
    page.section("The cluster; none of them where a node is alone");
    let members = |state: MemberState| {
        let members = now.iter().flat_map(|c| &c.map.members);
        members.filter(|m| m.state == state).count()
    };
    let states = [
        ("active", MemberState::Active),
        ("draining", MemberState::Draining),
    ];
    page.family(
        Gauge,
        "forebay_cluster_members",
        &["state"],
        "Members of the map by which this node goes.",
        now.iter()
            .flat_map(|_| states.map(|(name, state)| ([name], members(state)))),
    );
    page.family(
        Gauge,
        "forebay_cluster_epoch",
        &[],
        "The number of that map. Nodes of one cluster with a map in etcd or in a file have the same \
         one.",
        now.iter().map(|c| (NONE, c.map.epoch)),
    );
    page.family(
        Gauge,
        "forebay_cluster_node",
        &["cluster", "node"],
        "1, with the cluster's name, and what this node is called in it.",
        now.iter()
            .map(|c| ([c.map.cluster.clone(), c.label(c.node)], 1_u64)),
    );
    let report = now.as_ref().and_then(|c| c.report.as_ref());
    page.family(
        Gauge,
        "forebay_cluster_source_failing",
        &[],
        "1 while the source of the map (etcd, DNS) cannot be used; the map in force stays. None \
         where it is a file.",
        report.map(|r| (NONE, u64::from(r.error.is_some()))),
    );
    page.family(
        Gauge,
        "forebay_cluster_lease_seconds",
        &[],
        "How long this node's lease in etcd lasts if it is not renewed; 0 without one.",
        report
            .filter(|r| r.source.starts_with("etcd"))
            .map(|r| (NONE, r.lease.unwrap_or_default().as_secs_f64())),
    );
    page.family(
        Gauge,
        "forebay_cluster_differs",
        &["what"],
        "Other nodes whose keys and policies, buckets and origins, or release are not those of this \
         node, as far as they answered.",
        now.iter().flat_map(|c| c.differs.iter().map(|(what, n)| ([*what], *n))),
    );
    let coherence = now.as_ref().and_then(|c| c.coherence.as_ref());
    page.family(
        Gauge,
        "forebay_cluster_trusted",
        &[],
        "1 while this node answers from the versions that it knows to be current, because all nodes \
         tell it of writes; 0 while it asks the bucket, where objects change. None where nodes hold \
         no leases (a map by DNS or in a file).",
        coherence.map(|c| (NONE, u64::from(c.trusted))),
    );
    page.family(
        Counter,
        "forebay_cluster_writes_told",
        &[],
        "Writes through this node of which it told the others.",
        coherence.map(|c| (NONE, c.told)),
    );
    page.family(
        Counter,
        "forebay_cluster_writes_waited",
        &[],
        "Those that waited until the lease of a node that did not answer had ended.",
        coherence.map(|c| (NONE, c.waited)),
    );
    page.family(
        Counter,
        "forebay_cluster_writes_degraded",
        &[],
        "Those that were acknowledged without a lease: other nodes see them by the bucket's \
         freshness rule.",
        coherence.map(|c| (NONE, c.degraded)),
    );
    macro_rules! hand_over {
        ($($kind:ident $name:literal, $help:literal => $value:expr),* $(,)?) => { $(
            let value: fn(&HandOverStatus) -> u64 = $value;
            page.family($kind, $name, &[], $help, now.iter().map(|c| (NONE, value(&c.hand_over))));
        )* };
    }
    hand_over! {
        Gauge "forebay_cluster_gaining_slots",
            "Of 262,144 slots, those of this node whose former owners are still asked for what it \
             lacks." => |h| h.gaining_slots,
        Gauge "forebay_cluster_losing_slots",
            "Those that this node had, and whose owners are not known to have everything." =>
            |h| h.losing_slots,
        Counter "forebay_hand_over_taken_entries",
            "Entries of the cache (small objects, attributes, chunks) taken over from former \
             owners." => |h| h.pulled_entries,
        Counter "forebay_hand_over_taken_bytes", "Bytes of objects in them." => |h| h.pulled_bytes,
        Counter "forebay_hand_over_given_entries", "Entries given to new owners." =>
            |h| h.given_entries,
        Counter "forebay_hand_over_given_bytes", "Bytes sent for that." => |h| h.given_bytes,
    }
    macro_rules! mirror {
        ($($kind:ident $name:literal, $help:literal => $value:expr),* $(,)?) => { $(
            let value: fn(&CopiesStatus) -> u64 = $value;
            page.family($kind, $name, &[], $help, now.iter().map(|c| (NONE, value(&c.copies))));
        )* };
    }
    mirror! {
        Counter "forebay_mirror_copied_entries",
            "Entries of the cache (small objects, attributes, chunks) copied from other nodes that \
             keep them too, because a bucket has `mirror = 2` or 3." => |c| c.entries,
        Counter "forebay_mirror_copied_bytes", "Bytes of objects in them." => |c| c.bytes,
        Counter "forebay_mirror_given_bytes", "Bytes sent to other nodes that keep copies." =>
            |c| c.given_bytes,
        Counter "forebay_mirror_left_out_entries",
            "Entries that were not copied, because it was not known for too long whether a write had \
             made them old." => |c| c.left_out,
        Gauge "forebay_mirror_behind_members",
            "Other nodes that may have more of what this node is to keep: since the map changed, or \
             one of the two started, this node has not looked through all that they have." =>
            |c| c.behind,
        Gauge "forebay_mirror_left_bytes",
            "Bytes of their caches that are to be looked through, as far as is known." =>
            |c| c.left_bytes,
    }
    page.family(
        Gauge,
        "forebay_cluster_hot_units",
        &[],
        "Parts of objects (of 8 MiB) that many nodes want, as their owners say: this node keeps copies \
         of them for a while.",
        now.iter().map(|c| (NONE, c.hot.0 as u64)),
    );
    page.family(
        Counter,
        "forebay_cluster_hot_answers",
        &[],
        "Answers to other nodes with bytes of what many want.",
        now.iter().map(|c| (NONE, c.hot.1)),
    );
    page.family(
        Gauge,
        "forebay_hand_over_idle_seconds",
        &[],
        "Since something was last taken over, while more is expected; none otherwise.",
        now.iter()
            .filter_map(|c| c.hand_over.idle)
            .map(|idle| (NONE, idle.as_secs_f64())),
    );
    let peers = || {
        let links = now.iter().flat_map(|c| &c.links);
        links.map(|(name, link)| ([name.as_str()], link))
    };
    page.histograms(
        "forebay_peer_latency_seconds",
        &["peer"],
        "From a question to another node to the beginning of its answer.",
        peers()
            .filter(|(_, l)| l.questions > 0)
            .map(|(peer, l)| (peer, l.first_byte.clone())),
    );
    macro_rules! per_peer {
        ($($kind:ident $name:literal, $help:literal => $value:expr),* $(,)?) => { $(
            let value: fn(&LinkStatus) -> u64 = $value;
            page.family($kind, $name, &["peer"], $help, peers().map(|(peer, l)| (peer, value(l))));
        )* };
    }
    per_peer! {
        Gauge "forebay_peer_up",
            "1 while another node answers this one; 0 from a question that it did not answer until \
             it says hello again." => |l| u64::from(l.answers),
        Counter "forebay_peer_questions", "Questions to another node." => |l| l.questions,
        Counter "forebay_peer_misses",
            "Those that it answered with not having the bytes." => |l| l.misses,
        Counter "forebay_peer_failures", "Those that it answered with an error." => |l| l.failures,
        Counter "forebay_peer_silences",
            "Times that it did not answer, and others were asked from then on." => |l| l.silences,
        Counter "forebay_peer_hedged_questions",
            "Questions whose answer was late, so that another source was asked as well." =>
            |l| l.hedged,
        Counter "forebay_peer_overtaken_questions",
            "Those of which the other source was the first to answer." => |l| l.overtaken,
        Counter "forebay_peer_left_alone",
            "Times that it was late so often that others were asked for a while." => |l| l.left_alone,
        Counter "forebay_peer_connections", "Connections made to it." => |l| l.connections,
        Counter "forebay_peer_gathered_entries",
            "Entries of batches that it sent to this node together with others, many in one answer." =>
            |l| l.gathered,
        Counter "forebay_peer_received_bytes",
            "Bytes of objects that it sent to this node." => |l| l.received_bytes,
        Gauge "forebay_peer_questions_in_flight",
            "Questions whose answer is not finished." => |l| l.under_way as u64,
    }
}

fn batches(page: &mut Page, s: &BatchSnapshot) {
    page.section("GetBatch (section 2.4.4 of the paper; its names follow `forebay_`)");
    page.one(
        Counter,
        "forebay_getbatch_n",
        "Batches that were completed.",
        s.batches,
    );
    page.one(
        Counter,
        "forebay_getbatch_obj_n",
        "Whole objects, and ranges of them, delivered.",
        s.objects,
    );
    page.one(
        Counter,
        "forebay_getbatch_file_n",
        "Archive members, and ranges of them, delivered.",
        s.members,
    );
    page.one(
        Counter,
        "forebay_getbatch_obj_size_bytes",
        "Bytes of those objects.",
        s.object_bytes,
    );
    page.one(
        Counter,
        "forebay_getbatch_file_size_bytes",
        "Bytes of those members.",
        s.member_bytes,
    );
    page.one(
        Counter,
        "forebay_getbatch_rxwait_seconds",
        "Seconds that cursors waited for an entry to come from elsewhere.",
        s.wait_ns as f64 / 1e9,
    );
    page.one(
        Counter,
        "forebay_getbatch_throttle_seconds",
        "Seconds that batches were slowed down on purpose.",
        s.throttle_ns as f64 / 1e9,
    );
    page.one(
        Counter,
        "forebay_err_soft_getbatch_n",
        "Entries answered with a placeholder.",
        s.errors_soft,
    );
    page.one(
        Counter,
        "forebay_err_getbatch_n",
        "Batches that failed: refused, answered with an error, or cut.",
        s.errors_hard,
    );
    page.one(
        Counter,
        "forebay_getbatch_refused",
        "Batches refused for want of memory.",
        s.refused,
    );
    page.one(
        Counter,
        "forebay_getbatch_cut",
        "Batches cut after their first byte.",
        s.cut,
    );
    page.one(
        Counter,
        "forebay_getbatch_redirected",
        "Batches that were sent to the node that owns most of their entries (coloc).",
        s.redirected,
    );
    page.one(
        Counter,
        "forebay_getbatch_recoveries",
        "Second and later attempts for an entry.",
        s.recoveries,
    );
    page.one(
        Counter,
        "forebay_getbatch_recoveries_failed",
        "Entries that failed after all attempts.",
        s.recoveries_failed,
    );
    page.one(
        Gauge,
        "forebay_getbatch_in_flight",
        "Batches in flight.",
        s.in_flight,
    );
    page.one(
        Counter,
        "forebay_getbatch_sent_bytes",
        "Bytes of batch answers, headers and padding included.",
        s.bytes_sent,
    );
}

fn datasets(
    page: &mut Page,
    s: &DatasetStats,
    (kept, bytes): (usize, u64),
    (composed, composed_bytes): (usize, u64),
    f: &FollowStats,
    (leases, plans): (usize, usize),
) {
    page.section("Datasets");
    let opened = [
        ("opened", &s.opened),
        ("joined", &s.joined),
        ("failed", &s.failed),
    ];
    page.family(
        Counter,
        "forebay_datasets_openings",
        &["outcome"],
        "Openings of datasets: opened, joined to one that was under way, \
failed.",
        opened.map(|(outcome, n)| (vec![outcome], n.get())),
    );
    page.one(
        Counter,
        "forebay_datasets_opening_seconds",
        "Seconds that openings took, summed.",
        s.open_us.get() as f64 / 1e6,
    );
    let files = [
        ("indexed", &s.files_indexed),
        ("reused", &s.files_reused),
        ("skipped", &s.files_skipped),
    ];
    page.family(
        Counter,
        "forebay_datasets_files",
        &["how"],
        "Files of opened datasets: indexed (footer, headers or directory \
read), reused (known already), skipped (damaged).",
        files.map(|(how, n)| (vec![how], n.get())),
    );
    page.one(
        Counter,
        "forebay_datasets_indexed_bytes",
        "Bytes that were read for these indexes.",
        s.indexed_bytes.get(),
    );
    page.one(
        Counter,
        "forebay_datasets_loaded",
        "Datasets whose index was read back from disk.",
        s.loaded.get(),
    );
    page.one(
        Counter,
        "forebay_datasets_opened_at_home",
        "Datasets that another node of the cluster opened for this one.",
        s.opened_at_home.get(),
    );
    page.one(
        Counter,
        "forebay_datasets_keep_failed",
        "Indexes that could not be written to disk.",
        s.keep_failed.get(),
    );
    page.one(Gauge, "forebay_datasets_kept", "Datasets in memory.", kept);
    page.one(
        Gauge,
        "forebay_datasets_memory_bytes",
        "What they take.",
        bytes,
    );
    page.one(
        Gauge,
        "forebay_datasets_compositions_kept",
        "Compositions of datasets, and lengths of rows, in memory.",
        composed,
    );
    page.one(
        Gauge,
        "forebay_datasets_compositions_memory_bytes",
        "What they take.",
        composed_bytes,
    );
    page.one(
        Gauge,
        "forebay_plans_followed",
        "Plans that the cache follows: it keeps and fetches by their order.",
        plans,
    );
    page.one(Gauge, "forebay_plan_leases_held", "Leases on them.", leases);
    let ended = [
        ("registered", &f.registered),
        ("renewed", &f.renewed),
        ("released", &f.released),
        ("expired", &f.expired),
    ];
    page.family(
        Counter,
        "forebay_plan_leases",
        &["what"],
        "Leases registered, renewed by registering again, released by \
their jobs, and expired.",
        ended.map(|(what, n)| (vec![what], n.load(Relaxed))),
    );
    page.one(
        Counter,
        "forebay_plan_ahead_bytes",
        "Bytes fetched ahead of plans' positions because they were not there.",
        f.ahead_bytes.load(Relaxed),
    );
    page.one(
        Counter,
        "forebay_plan_ahead_failed",
        "Pieces that could not be fetched ahead.",
        f.ahead_failed.load(Relaxed),
    );
}

fn rows(page: &mut Page, s: &RowsSnapshot) {
    let requests = [("answered", s.requests), ("failed", s.failed)];
    page.family(
        Counter,
        "forebay_rows_requests",
        &["outcome"],
        "Requests for rows by number, those of streams included.",
        requests.map(|(outcome, n)| (vec![outcome], n)),
    );
    page.one(
        Counter,
        "forebay_rows_read",
        "Rows in their answers.",
        s.rows,
    );
    page.one(
        Counter,
        "forebay_rows_read_bytes",
        "Bytes of these rows.",
        s.bytes,
    );
    let blocks = [
        ("whole", s.blocks_decoded),
        ("in_part", s.blocks_read_in_part),
        ("joined", s.parts_joined),
        ("reused", s.blocks_reused),
    ];
    page.family(
        Counter,
        "forebay_rows_blocks",
        &["how"],
        "Blocks of rows (row groups, record batches) that were decoded \
whole or in part, read together with another request (`joined`), \
or found decoded.",
        blocks.map(|(how, n)| (vec![how], n)),
    );
    page.one(
        Counter,
        "forebay_rows_laid_blocks",
        "Blocks that were kept decoded in the cache, because they are read row by row.",
        s.blocks_laid,
    );
    page.one(
        Counter,
        "forebay_rows_laid_bytes",
        "Bytes that were written for them.",
        s.laid_bytes,
    );
    page.one(
        Counter,
        "forebay_rows_laid_read",
        "Rows that were read from blocks that are kept decoded.",
        s.rows_laid,
    );
    page.one(
        Counter,
        "forebay_rows_laid_lost",
        "Times that such a block was found to be gone, in part or damaged; its rows were decoded.",
        s.laid_lost,
    );
    page.one(
        Counter,
        "forebay_rows_soon_blocks",
        "Times that rows of a block were decoded, and as many others or more, which an order reads soon.",
        s.soon_blocks,
    );
    page.one(
        Counter,
        "forebay_rows_soon_kept",
        "Rows that were kept in memory for that.",
        s.soon_kept,
    );
    page.one(
        Counter,
        "forebay_rows_soon_read",
        "Rows that were read from there.",
        s.soon_read,
    );
    page.one(
        Counter,
        "forebay_rows_ranges_fetched",
        "Ranges of blocks that came from an origin.",
        s.ranges_fetched,
    );
    let seconds = [
        ("all", s.read_ns),
        ("fetch", s.fetch_ns),
        ("decode", s.decode_ns),
        ("gather", s.gather_ns),
    ];
    page.family(
        Counter,
        "forebay_rows_seconds",
        &["what"],
        "Seconds, summed: all of reading rows; waiting for bytes of \
blocks and of what opens their files, decoding blocks, putting rows in order.",
        seconds.map(|(what, ns)| (vec![what], (ns as f64 / 1e9))),
    );
    page.one(
        Gauge,
        "forebay_rows_cached_blocks",
        "Decoded blocks in memory.",
        s.cached_blocks,
    );
    page.one(
        Gauge,
        "forebay_rows_cached_bytes",
        "What they take.",
        s.cached_bytes,
    );
    page.one(
        Gauge,
        "forebay_rows_soon_bytes",
        "What rows take that are kept because an order reads them soon.",
        s.soon_bytes,
    );
}

/// How callers came to what is computed of a dataset once.
fn outcomes(a: &Asked) -> impl Iterator<Item = (Vec<&'static str>, u64)> {
    let outcomes = [
        ("computed", &a.computed),
        ("failed", &a.failed),
        ("joined", &a.joined),
        ("memory", &a.hits_memory),
        ("disk", &a.hits_disk),
    ];
    outcomes
        .map(|(outcome, n)| (vec![outcome], n.get()))
        .into_iter()
}

fn filters(
    page: &mut Page,
    s: &FilterStats,
    asked: &Asked,
    (kept, bytes): (usize, u64),
    under_way: usize,
) {
    page.section("Filters");
    page.family(
        Counter,
        "forebay_filters",
        &["outcome"],
        "Filters by an expression: computed, failed, joined to a computation that was under way, \
found in memory or on the disk.",
        outcomes(asked),
    );
    let decided = [
        ("looked_at", &s.looked_at),
        ("statistics", &s.by_statistics),
        ("pages", &s.by_pages),
        ("bloom", &s.by_bloom),
    ];
    page.family(
        Counter,
        "forebay_filters_rows",
        &["how"],
        "Rows that filters decided: by looking at their values, or by what Parquet files say \
(statistics of row groups, indexes of pages, bloom filters).",
        decided.map(|(how, n)| (vec![how], n.get())),
    );
    page.one(
        Counter,
        "forebay_filters_keep_failed",
        "Sets of rows that could not be written to disk.",
        asked.keep_failed.get(),
    );
    page.one(
        Gauge,
        "forebay_filters_under_way",
        "Filters that are computed, or wait for that.",
        under_way,
    );
    page.one(
        Gauge,
        "forebay_filters_kept",
        "Sets of rows in memory.",
        kept,
    );
    page.one(
        Gauge,
        "forebay_filters_memory_bytes",
        "What they take.",
        bytes,
    );
}

fn keys(page: &mut Page, asked: &Asked, (kept, bytes): (usize, u64), under_way: usize) {
    page.section("Rows by key");
    page.family(
        Counter,
        "forebay_row_keys",
        &["outcome"],
        "Indexes of a column of keys that were asked for: made, failed, joined to an indexing that \
was under way, found in memory or on the disk.",
        outcomes(asked),
    );
    page.one(
        Counter,
        "forebay_row_keys_keep_failed",
        "Indexes of keys that could not be written to disk.",
        asked.keep_failed.get(),
    );
    page.one(
        Gauge,
        "forebay_row_keys_under_way",
        "Indexes of keys that are made, or wait for that.",
        under_way,
    );
    page.one(
        Gauge,
        "forebay_row_keys_kept",
        "Indexes of keys in memory.",
        kept,
    );
    page.one(
        Gauge,
        "forebay_row_keys_memory_bytes",
        "What they take.",
        bytes,
    );
}

fn streams(page: &mut Page, s: &StreamStats, window_bytes: u64) {
    page.section("Streams");
    page.one(
        Gauge,
        "forebay_streams_open",
        "Connections of streams that are open.",
        s.open.load(Relaxed),
    );
    let connections = [
        ("opened", &s.opened),
        ("refused", &s.refused),
        ("failed", &s.failed),
    ];
    page.family(
        Counter,
        "forebay_streams_connections",
        &["outcome"],
        "Connections of streams: opened, refused (no room for another \
window), failed (ended with an error).",
        connections.map(|(outcome, n)| (vec![outcome], n.load(Relaxed))),
    );
    page.one(
        Counter,
        "forebay_streams_steps",
        "Steps that were sent.",
        s.steps.load(Relaxed),
    );
    page.one(
        Counter,
        "forebay_streams_rows",
        "Rows in them.",
        s.rows.load(Relaxed),
    );
    page.one(
        Counter,
        "forebay_streams_bytes",
        "Bytes of them, as they go over the wire.",
        s.bytes.load(Relaxed),
    );
    page.one(
        Gauge,
        "forebay_streams_window_bytes",
        "What receivers that do not read may hold at most: their windows, and \
what these have borrowed.",
        window_bytes,
    );
    let times = [
        ("read", &s.read_us),
        ("frame", &s.frame_us),
        ("wait", &s.wait_us),
        ("socket", &s.socket_us),
    ];
    page.family(
        Counter,
        "forebay_streams_seconds",
        &["what"],
        "Seconds, summed over steps: read (rows until they are there), \
frame; over connections: wait (nothing to send yet), socket (the \
window is full, for the receiver or the line is slower).",
        times.map(|(what, us)| (vec![what], us.load(Relaxed) as f64 / 1e6)),
    );
    let cold = s.blocks_ahead_cold.load(Relaxed);
    let ahead = [
        ("cold", cold),
        ("ready", s.blocks_ahead.load(Relaxed).saturating_sub(cold)),
        ("no_memory", s.ahead_busy.load(Relaxed)),
    ];
    page.family(
        Counter,
        "forebay_streams_blocks_ahead",
        &["how"],
        "Blocks made ready before a step needs them: cold (fetched or \
decoded), ready (they were there), no_memory (not made ready).",
        ahead.map(|(how, n)| (vec![how], n)),
    );
}

fn energy_used(page: &mut Page, readings: &[forebay_energy::Reading]) {
    page.section("Energy of the machine; only what is measured");
    page.family(
        Counter,
        "forebay_energy_joules",
        &["source", "domain", "estimate"],
        "Joules that each sensor measured since the node started. `source` is what it was read through (rapl, \
         nvml, hwmon, ipmi), `domain` what it measures: package-N, dram-N and gpu-N do not overlap; psys and \
         board contain them, and core-N and uncore-N are parts of packages. What no sensor measures has no \
         sample. `estimate` is `true` for what `energy.model` estimates, and empty otherwise.",
        readings.iter().map(|r| {
            let estimate = if r.sensor.estimate { "true" } else { "" };
            let labels = [&*r.sensor.source, &*r.sensor.domain, estimate];
            (labels, r.joules)
        }),
    );
}

fn node(page: &mut Page, n: &NodeNow, reloads: &[(&str, &ReloadStats)]) {
    page.section("Node");
    page.one(
        Gauge,
        "forebay_memory_budget_bytes",
        "The memory budget for buffers.",
        n.budget_bytes,
    );
    page.one(
        Gauge,
        "forebay_memory_used_bytes",
        "What of it is reserved.",
        n.budget_used_bytes,
    );
    page.one(
        Gauge,
        "forebay_uploads_open",
        "Multipart uploads under way that the node remembers.",
        n.uploads,
    );
    page.one(
        Gauge,
        "forebay_keys",
        "Access keys and tokens in force.",
        n.keys,
    );
    page.family(
        Counter,
        "forebay_reloads",
        &["what"],
        "Times that something was read again and taken over while the node \
ran: configuration, keys, certificate, the map and certificates of the cluster.",
        reloads.iter().map(|(what, r)| ([what], r.done())),
    );
    page.family(
        Counter,
        "forebay_reloads_failed",
        &["what"],
        "Times that what was read again could not be used; what was in \
force stayed.",
        reloads.iter().map(|(what, r)| ([what], r.failures())),
    );
    page.family(
        Gauge,
        "forebay_reload_stale",
        &["what"],
        "1 while what is in force is older than its file, which cannot be \
used.",
        reloads
            .iter()
            .map(|(what, r)| ([what], u64::from(r.is_stale()))),
    );
    page.one(
        Gauge,
        "forebay_settings_waiting_for_restart",
        "Settings of the configuration as it was last read that a running \
node cannot take over; the log names them.",
        n.waiting_settings,
    );
    page.one(
        Counter,
        "forebay_tls_handshakes_failed",
        "TLS handshakes on the data port that came to nothing.",
        n.tls_failed,
    );
    page.family(
        Gauge,
        "forebay_tls_certificate_expiry_seconds",
        &[],
        "Seconds until the certificate in force ends; none without TLS.",
        n.certificate_seconds.map(|left| (NONE, left)),
    );
    page.family(
        Gauge,
        "forebay_cluster_certificate_expiry_seconds",
        &[],
        "Seconds until the certificate that this node shows other nodes of \
its cluster ends; none without one.",
        n.peer_certificate_seconds.map(|left| (NONE, left)),
    );
    page.one(
        Gauge,
        "forebay_ready",
        "1 while the node takes new requests.",
        u64::from(n.ready),
    );
    page.family(
        Info,
        "forebay_build",
        &["version", "node_id"],
        "The version that runs.",
        [([crate::VERSION, n.node_id.as_str()], 1_u64)],
    );
    page.one(
        Counter,
        "process_cpu_seconds",
        "User and system time of the process.",
        process::cpu_time().as_secs_f64(),
    );
    page.one(
        Gauge,
        "process_resident_memory_bytes",
        "Resident memory of the process.",
        process::resident_bytes(),
    );
    page.one(
        Gauge,
        "process_open_fds",
        "Open file descriptors of the process.",
        process::open_fds(),
    );
    page.one(
        Gauge,
        "process_max_fds",
        "How many file descriptors the process may have open.",
        process::open_files_limit(),
    );
    page.one(
        Gauge,
        "process_start_time_seconds",
        "When the process began to serve, since the Unix epoch.",
        n.started_secs,
    );
}
