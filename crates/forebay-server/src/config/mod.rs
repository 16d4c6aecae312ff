//! The whole program's configuration: what can be set, where it is read from, whether it makes
//! sense, and how it is shown.
//!
//! Later sources win: defaults, the TOML file, environment variables `FOREBAY__SECTION__KEY`, the
//! command line. Each layer is checked on its own, so an error names the file and line, the
//! variable or the option at fault (`load.rs`). Unknown keys are refused. Secrets are never shown.

mod auth;
mod check;
mod load;
mod origin;
mod reference;
pub(crate) mod section;
mod show;
mod types;

pub(crate) use auth::KeysFile;
pub use auth::{Action, Auth, Grant, KeyPair};
pub use check::{Problem, Severity};
pub use load::Override;
pub use origin::NamedOrigin;
pub use reference::reference;
pub use types::{
    Bytes, CacheDir, ClusterWrites, FreshnessRule, LogFormat, Mode, RepeatedRule, Secret, Span,
};

use forebay_batch::BatchConfig;
use forebay_core::limits;
use forebay_dataset::{DatasetsConfig, RowsConfig};
use forebay_engine::{BucketRule, BucketRules, EngineConfig};
use forebay_membership::Source;
use forebay_stage::StageConfig;
use section::section;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf, time::Duration};

/// Everything that an operator can set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// `[listen]`: where the node listens.
    pub listen: Listen,
    /// `[[origins]]`: which buckets there are, and where each lies.
    pub origins: Vec<NamedOrigin>,
    /// `[cache]`: what this machine's disks hold.
    pub cache: Cache,
    /// `[buckets.NAME]`: settings that differ for one bucket.
    pub buckets: BTreeMap<String, Bucket>,
    /// `[memory]`: the budget for buffers.
    pub memory: Memory,
    /// `[batch]`: limits and waits of GetBatch.
    pub batch: Batch,
    /// `[datasets]`: what the indexes of datasets may take.
    pub datasets: Datasets,
    /// `[checkpoints]`: what staged checkpoints may use.
    pub checkpoints: Checkpoints,
    /// `[auth]`: who may ask for what.
    pub auth: Auth,
    /// `[tls]`: certificate and key of the data port.
    pub tls: Tls,
    /// `[cluster]`: other nodes.
    pub cluster: Cluster,
    /// `[limits]`: connections, requests and waits.
    pub limits: Limits,
    /// `[energy]`: the joules of this machine.
    pub energy: Energy,
    /// `[log]`: what the log says, and how.
    pub log: Log,
    /// Where each value that is not a default came from, by its dotted key.
    #[serde(skip)]
    pub(crate) sources: BTreeMap<String, String>,
}

section! {
    /// Where the node listens.
    Listen {
        /// Address of the data port: S3 at the root, the batch API under `/v1/`. `off` for none.
        s3: String = "127.0.0.1:8080".into(),
        /// Path of the Unix socket that clients on this machine use by default: the same protocol,
        /// at several times the bytes per second. `auto`: `forebay.sock` in the first cache
        /// directory, or in `$XDG_RUNTIME_DIR` where there is no cache. `off` for none.
        unix: String = "auto".into(),
        /// Permissions of the Unix socket. Whoever may open it is trusted and needs no key.
        /// `"0660"` opens it to the group.
        unix_mode: Mode = Mode(0o600),
        /// Address of the admin port: `/metrics`, `/energy.influx`, `/healthz`, `/readyz`. `off` for none.
        admin: String = "127.0.0.1:8081".into(),
        /// Address at which other nodes of a cluster ask this one. `off` for none.
        peer: String = "off".into(),
        /// Host names under which buckets are found in virtual-host style: with
        /// `["s3.example.com"]`, `http://bucket.s3.example.com/key`.
        hostnames: Vec<String> = Vec::new(),
    }
}

section! {
    /// The local cache.
    Cache {
        /// Directories and how much of each may be used, as `DIR:SIZE`; one for each disk. Without
        /// any, nothing is kept and every read goes to the origin.
        dirs: Vec<CacheDir> = Vec::new(),
        /// What the cache leaves free on each file system that it uses: when others fill it, the
        /// cache gives up its oldest data, and it grows again when there is room. Not set: a
        /// twentieth of the file system, at most 4 GiB.
        keep_free: Option<Bytes> = None,
        /// What to do with a cache directory that this version cannot read, because another version
        /// wrote it or its identity is damaged: `true` empties it, `false` refuses to start.
        discard_incompatible: bool = false,
        /// When a cached version may be served without asking the origin: `immutable` (never ask),
        /// `always` (ask each time), or a time after which to ask.
        freshness: FreshnessRule = FreshnessRule(forebay_engine::Freshness::default()),
        /// While the origin fails (no answer, or 5xx), a cached version is served for this long
        /// after it ceased to be fresh, with `X-Cache: STALE`. `0s`: never.
        stale_if_error: Span = Span(Duration::ZERO),
        /// Which member of an archive counts if several have the same name: the `first`, as in
        /// AIStore, or the `last`, as with `tar -x`. With `first`, members of an uncompressed tar that
        /// nobody has read yet are delivered while the rest of it is still coming, if they are
        /// requested by name; with `last`, they wait for the whole tar. (A pattern, `archregx`, always
        /// does.) A warning in the log names archives with repeated names.
        repeated_members: RepeatedRule = RepeatedRule(forebay_engine::Repeated::First),
        /// In a cluster: how many nodes keep each piece of what is cached, 1 to 3, as far as there are
        /// nodes. With 2, what a lost node or disk had is not read again from the origin. Must be the
        /// same on all nodes.
        mirror: u8 = 1,
        /// Memory for the member indexes of archives.
        member_index_memory: Bytes = Bytes(limits::MEMBER_INDEX_MEMORY_DEFAULT_BYTES),
        /// The longest run of missing chunks that one origin request fetches.
        fill_run: Bytes = Bytes(limits::FILL_RUN_MAX_BYTES),
    }
}

section! {
    /// Settings for one bucket, where it differs: `[buckets.NAME]`.
    Bucket {
        /// Like `cache.freshness`, which applies where this is not set.
        freshness: Option<FreshnessRule> = None,
        /// Like `cache.stale_if_error`, which applies where this is not set.
        stale_if_error: Option<Span> = None,
        /// Like `cache.repeated_members`, which applies where this is not set.
        repeated_members: Option<RepeatedRule> = None,
        /// `false`: every read goes to the origin and nothing is kept.
        cache: bool = true,
        /// Like `cache.mirror`, which applies where this is not set.
        mirror: Option<u8> = None,
    }
}

section! {
    /// Memory for buffers.
    Memory {
        /// One budget for the buffers of fills, batches and uploads; work that does not fit is
        /// refused with 429, or 503 by S3. Default: a sixteenth of the machine's memory, or of the
        /// limit of its control group if that is less, at most 16 GiB; where that is less than
        /// 1 GiB: 1 GiB, or a quarter of this memory.
        budget: Option<Bytes> = None,
    }
}

section! {
    /// GetBatch.
    Batch {
        /// Most entries in one request.
        max_entries: usize = BatchConfig::default().max_entries,
        /// Largest request body.
        max_body: Bytes = Bytes(BatchConfig::default().max_body_bytes as u64),
        /// How many entries may be missing or unreadable in one request with continue-on-error
        /// before it fails as a whole. Once the answer has begun, it no longer fails: each further
        /// such entry becomes a placeholder.
        soft_errors_max: u32 = BatchConfig::default().soft_errors_max,
        /// Entries of one request that are fetched at the same time, ahead of the one being sent.
        read_ahead_entries: usize = BatchConfig::default().read_ahead_entries,
        /// The size of the buffers that an answer is sent in. Each answer reserves six of them
        /// from the memory budget.
        frame: Bytes = Bytes(BatchConfig::default().frame_bytes as u64),
        /// An entry that is not there after this long counts as failed.
        entry_timeout: Span = Span(BatchConfig::default().entry_timeout),
        /// With continue-on-error, how long an answer that must be cut stays silent first: Lhotse's
        /// loader takes a broken connection for the end of the answer, but after silence (20 s,
        /// unless AIS_READ_TIMEOUT says otherwise) it gets what is missing entry by entry. Does not
        /// apply to clients that ask for the errors of entries, such as Forebay's own. 0: never.
        cut_pause: Span = Span(BatchConfig::default().cut_pause),
        /// Attempts for one entry, the first included, if its object changes while it is read or
        /// the node has no room for it. (Attempts at an origin are counted separately.)
        attempts: u32 = BatchConfig::default().attempts,
        /// Batches are slowed down while this many threads, for each core of the machine, are ready
        /// to run (a running average). 0: never.
        throttle_ready_per_core: u32 = BatchConfig::default().throttle_ready_per_core,
        /// Batches are also slowed down if, for more than this share of the last 10 s, in percent,
        /// everything waited for disks. 0: never.
        throttle_disk_percent: u32 = BatchConfig::default().throttle_disk_percent,
        /// The share of its time that a batch then pauses, in percent; at most 90.
        throttle_percent: u32 = BatchConfig::default().throttle_percent,
    }
}

section! {
    /// Datasets: which rows there are, and where. Their indexes are kept, so that opening one again
    /// reads only what changed.
    Datasets {
        /// Memory for the indexes of datasets; the least recently used ones beyond it are dropped,
        /// and read from disk when they are needed. What clients tell of datasets (selections,
        /// filters, lengths of rows) is in `memory.budget`; beyond a quarter of this, what was not
        /// used for a minute is dropped. The rows of filters, and indexes of keys, are in
        /// `memory.budget` too.
        memory: Bytes = Bytes(limits::DATASETS_MEMORY_DEFAULT_BYTES),
        /// Where indexes are kept. Not set: `datasets` in the first cache directory, or nowhere if
        /// there is none.
        dir: Option<PathBuf> = None,
        /// How much the indexes there may take, in addition to the size of the cache; the least
        /// recently used ones go first. The rows of filters take up to 1 GiB more, and indexes of
        /// keys up to 4 GiB.
        disk: Bytes = Bytes(limits::DATASETS_DISK_DEFAULT_BYTES),
        /// Whether row groups and the like that are read row by row are kept decoded in the cache,
        /// as a part of its size, so that a row costs one read. Only of datasets that it has room
        /// for in both forms.
        keep_decoded: bool = RowsConfig::default().keep_decoded,
    }
}

section! {
    /// Checkpoints: staged in the cache directories, in `staged`, and flushed to their buckets in the
    /// background.
    Checkpoints {
        /// How much of the cache's size staged checkpoints may take, those included that are durable
        /// and still on disk. Not set: half of it. What does not fit is refused with 507, or with 429
        /// where it will fit once others are durable.
        room: Option<Bytes> = None,
        /// Of that, how much durable checkpoints may take, which are kept so that they are read from
        /// the disk; the least recently read go first. Not set: half of it.
        warm: Option<Bytes> = None,
        /// Files go to the origin in parts of this size; larger ones where there would be more than
        /// 10,000.
        part: Bytes = Bytes(StageConfig::default().part_bytes),
        /// Parts on their way to origins at the same time, of all checkpoints together.
        parts_in_flight: usize = StageConfig::default().parts_in_flight,
        /// Whether files larger than a part begin to go out before the commit, while nothing else is on
        /// its way: as parts of multipart uploads, which nobody sees. What is given up before its commit
        /// is aborted there, and has cost the transfer.
        send_early: bool = StageConfig::default().send_early,
        /// A checkpoint that was begun and not committed is removed when the node has heard nothing of
        /// its writer for this long. A start of the node begins that time anew.
        abandon_after: Span = Span(StageConfig::default().abandon_after),
        /// How long after its commit a checkpoint is to be durable, unless its writer says so itself:
        /// past it, an error is logged and counted, and the flush goes on. `0s`: whenever.
        deadline: Span = Span(StageConfig::default().deadline),
    }
}

section! {
    /// TLS on the data port. The files are read again within a second when they change, and on
    /// SIGHUP: new connections use the new certificate, open ones go on. Files that cannot be used
    /// leave the current certificate in force, and the log and `forebay_reload_stale` say so.
    Tls {
        /// The certificate, in PEM: the node's own first, then those between it and its CA. With
        /// it, the data port speaks TLS (1.2, 1.3) and nothing else.
        cert: Option<PathBuf> = None,
        /// Its private key, in PEM, not encrypted.
        key: Option<PathBuf> = None,
        /// Whether the admin port speaks TLS too.
        admin: bool = false,
    }
}

section! {
    /// Other nodes over the same buckets, as one cache: each keeps its share, and any of them
    /// answers any request. `forebay cluster init` makes the CA, certificates and keys. They are
    /// read again within a second when they change, and on SIGHUP: new connections use the new
    /// ones, open ones go on. Files that cannot be used leave the current ones in force, and the
    /// log and `forebay_reload_stale` say so.
    Cluster {
        /// Where the map of the cluster is; the same on all nodes. `etcd://HOST:PORT[,…]/NAME`: in
        /// etcd (`etcds://` for TLS), where nodes enter themselves. `dns:HOST:PORT`: nowhere; nodes
        /// find each other at the addresses of this name, as of a headless service. A file, which
        /// `forebay cluster map` writes, and which is read again when it changes. Not set: this
        /// node is alone.
        map: Option<Source> = None,
        /// This node's name. With a map in a file: the one that the map was made with. Its cache
        /// directories remember whose they are. Not set: they say who this node is, and it is
        /// called after its machine.
        node: Option<String> = None,
        /// Where other nodes reach `listen.peer`. Not set: that address, or where it is a wildcard,
        /// the machine's name and that port.
        address: Option<String> = None,
        /// Where clients reach this node, as in `https://node-1:8080`. Not set: the host of
        /// `cluster.address`, and the port of `listen.s3`.
        url: Option<String> = None,
        /// What may fail together with this node: a rack, a machine. Other zones stand in for it.
        zone: String = String::new(),
        /// How much of the cluster's data this node keeps, beside the weights of others. Not set: the
        /// size of its cache.
        weight: Option<Bytes> = None,
        /// A node that was away for so long leaves the map, and others take over its share for good.
        /// (They stand in for it at once.) For maps in etcd and by DNS.
        forget_after: Span = Span(Duration::from_secs(600)),
        /// How many bytes each second this node takes over from those who had its share before, after
        /// the map has changed. 0: none; then it asks them for what is read.
        hand_over_rate: Bytes = Bytes(64 << 20),
        /// `true`: a node that cannot reach etcd when it starts begins alone, and joins later;
        /// otherwise it does not start.
        alone: bool = false,
        /// With a map in etcd, a write through any node is seen by later reads at every node. What
        /// becomes of writes while this node cannot make that sure, because it has no lease in
        /// etcd: `bounded`: they go through, and other nodes see them by the freshness rule of the
        /// bucket (`forebay_cluster_writes_degraded_total` counts them); `coherent`: they are
        /// refused with 503, or 429 under `/v1/`. Reads go on in any case.
        writes: ClusterWrites = ClusterWrites::Bounded,
        /// etcd's user for this cluster, if etcd has users: it needs to read and write below
        /// `/forebay/NAME/`.
        etcd_user: Option<String> = None,
        /// The file with the password of that user.
        etcd_password_file: Option<PathBuf> = None,
        /// The CA of etcd's certificate, in PEM. Not set: those that this machine trusts.
        etcd_ca: Option<PathBuf> = None,
        /// The cluster's own CA, in PEM. Whoever has a certificate of it for the host name
        /// `forebay-node` is a node, and may read everything.
        ca: Option<PathBuf> = None,
        /// This node's certificate, in PEM, for the host name `forebay-node`. Nodes speak TLS 1.3
        /// with each other.
        cert: Option<PathBuf> = None,
        /// Its private key, in PEM, not encrypted.
        key: Option<PathBuf> = None,
        /// `true`: nodes speak without encryption, and let in whoever reaches `listen.peer`: only
        /// for a network that nobody else can reach.
        plain: bool = false,
    }
}

section! {
    /// Limits on clients.
    Limits {
        /// Requests in progress at the same time; the next one is answered with 503, or 429 under
        /// `/v1/`, and Retry-After.
        requests_in_flight: usize = limits::REQUESTS_IN_FLIGHT_DEFAULT,
        /// Open client connections; the next one is answered with 503 and Retry-After, and closed.
        connections: usize = limits::CONNECTIONS_DEFAULT,
        /// Largest head of a request: its first line and its headers.
        head: Bytes = Bytes(64 << 10),
        /// Most headers in one request.
        headers: usize = 100,
        /// A connection on which no complete request head arrives for this long is closed.
        idle_timeout: Span = Span(Duration::from_secs(75)),
        /// An upload that is silent for this long is given up.
        body_timeout: Span = Span(Duration::from_secs(60)),
        /// A client that reads nothing of its answer for this long is cut off.
        write_timeout: Span = Span(Duration::from_secs(60)),
        /// A client that sends or reads less than this per second, over `body_timeout` or
        /// `write_timeout` of waiting for it, is cut off too. 0: never.
        slowest_client: Bytes = Bytes(1 << 10),
        /// Multipart uploads under way that the node remembers the parts of.
        uploads: usize = 10_000,
        /// Objects that one warm-up reads at the same time.
        warm_concurrency: usize = 32,
        /// How long a stopping node waits for answers in flight.
        drain_timeout: Span = Span(Duration::from_secs(limits::DRAIN_TIMEOUT_DEFAULT_SECS)),
    }
}

section! {
    /// The energy that this machine uses, for its metrics and for reports of runs. It is sampled
    /// every 100 ms where there are sensors; where there are none, no joules are reported.
    Energy {
        /// `false`: nothing is sampled.
        sample: bool = true,
        /// Where sysfs is: in a container, where the host's is mounted.
        sysfs: PathBuf = "/sys".into(),
        /// The library of NVIDIA's driver that tells what GPUs use; `off` for none.
        nvml: String = "libnvidia-ml.so.1".into(),
        /// Estimates what the node's own CPU time takes: `cpu-watts=15` are the watts of one busy
        /// core. Such joules have the label `estimate`. Not set: nothing is estimated.
        model: Option<String> = None,
    }
}

section! {
    /// Logs, on standard error.
    Log {
        /// `text` or `json`.
        format: LogFormat = LogFormat::Text,
        /// `error`, `warn`, `info`, `debug`, `trace`, or a filter such as
        /// `info,forebay_origin=debug`. Each request is one line at `info`.
        level: String = "info".into(),
    }
}

/// Files that a node always has open: listeners, the runtime's own, the admin port's.
const FILES_OF_THE_NODE: u64 = 64;
/// About how much of a cache directory one open file holds.
const SEGMENT_BYTES: u64 = 256 << 20;

/// Connections of other nodes; each asks one question at a time, and keeps a few for the next.
const PEER_CONNECTIONS_MAX: usize = 4096;

/// How many connections a process accepts that may open `files` files, so that some are left
/// for the cache and for the requests to origins that clients cause.
fn connections_for(files: u64, segments: u64, origin_requests: u64) -> u64 {
    let rest = files.saturating_sub(FILES_OF_THE_NODE);
    let rest = rest - segments.min(rest / 4);
    (rest - origin_requests.min(rest / 2)).max(1)
}

impl Energy {
    /// What to sample; `None`: nothing.
    ///
    /// # Errors
    /// `Invalid` for a model that is none.
    pub fn monitor(&self) -> forebay_core::Result<Option<forebay_energy::Config>> {
        let model = self.model.as_deref().map(forebay_energy::Model::parse);
        let model = model.transpose().map_err(forebay_core::Error::invalid)?;
        Ok(self.sample.then(|| forebay_energy::Config {
            sysfs: self.sysfs.clone(),
            nvml: match self.nvml.as_str() {
                "off" => PathBuf::new(),
                nvml => nvml.into(),
            },
            model,
            tell: |note| tracing::info!("energy: {note}"),
            ..forebay_energy::Config::default()
        }))
    }
}

impl Config {
    /// The engine's part of the configuration.
    pub fn engine(&self) -> EngineConfig {
        EngineConfig {
            rules: self.rules(),
            member_index_memory_bytes: self.cache.member_index_memory.0,
            fill_run_bytes: self.cache.fill_run.0,
        }
    }

    fn rules(&self) -> BucketRules {
        let default = BucketRule {
            freshness: self.cache.freshness.0,
            cache: !self.cache.dirs.is_empty(),
            stale_if_error: self.cache.stale_if_error.0,
            repeated_members: self.cache.repeated_members.0,
            copies: self.cache.mirror,
        };
        let rule = |b: &Bucket| BucketRule {
            freshness: b.freshness.map_or(default.freshness, |f| f.0),
            cache: default.cache && b.cache,
            stale_if_error: b.stale_if_error.map_or(default.stale_if_error, |s| s.0),
            repeated_members: b.repeated_members.map_or(default.repeated_members, |r| r.0),
            copies: b.mirror.unwrap_or(default.copies),
        };
        BucketRules {
            default,
            buckets: self
                .buckets
                .iter()
                .map(|(name, b)| (name.clone(), rule(b)))
                .collect(),
        }
    }

    /// The batcher's part of the configuration.
    pub fn batcher(&self) -> BatchConfig {
        let b = &self.batch;
        BatchConfig {
            max_entries: b.max_entries,
            max_body_bytes: usize::try_from(b.max_body.0).unwrap_or(usize::MAX),
            soft_errors_max: b.soft_errors_max,
            read_ahead_entries: b.read_ahead_entries,
            frame_bytes: usize::try_from(b.frame.0).unwrap_or(usize::MAX),
            entry_timeout: b.entry_timeout.0,
            cut_pause: b.cut_pause.0,
            attempts: b.attempts,
            throttle_ready_per_core: b.throttle_ready_per_core,
            throttle_disk_percent: b.throttle_disk_percent,
            throttle_percent: b.throttle_percent,
        }
    }

    /// Where indexes of keys are kept: beside those of datasets.
    pub fn keys_dir(&self) -> Option<PathBuf> {
        self.datasets().dir.map(|dir| dir.join("keys"))
    }

    /// Where the rows that filters left are kept: beside the indexes of datasets.
    pub fn filters_dir(&self) -> Option<PathBuf> {
        self.datasets().dir.map(|dir| dir.join("filters"))
    }

    /// The part for the registry of datasets.
    pub fn datasets(&self) -> DatasetsConfig {
        let beside = || self.cache.dirs.first().map(|d| d.path.join("datasets"));
        DatasetsConfig {
            memory_bytes: self.datasets.memory.0,
            dir: self.datasets.dir.clone().or_else(beside),
            disk_bytes: self.datasets.disk.0,
        }
    }

    /// The part for reading rows.
    pub fn rows(&self) -> RowsConfig {
        RowsConfig {
            keep_decoded: self.datasets.keep_decoded,
            ..RowsConfig::default()
        }
    }

    /// The part for checkpoints.
    pub fn stages(&self) -> StageConfig {
        let c = &self.checkpoints;
        StageConfig {
            room_bytes: c.room.map(|b| b.0),
            warm_bytes: c.warm.map(|b| b.0),
            part_bytes: c.part.0,
            parts_in_flight: c.parts_in_flight,
            send_early: c.send_early,
            abandon_after: c.abandon_after.0,
            deadline: c.deadline.0,
        }
    }

    /// The memory budget in bytes: as configured, or what the machine's memory allows.
    pub fn memory_budget_bytes(&self) -> u64 {
        self.memory.budget.map_or_else(
            || memory_budget_of(crate::process::memory_total_bytes()),
            |b| b.0,
        )
    }

    /// Where the Unix socket goes, if anywhere. The path is absolute, because clients with other
    /// working directories use it.
    pub fn unix_path(&self) -> Option<PathBuf> {
        let path = self.unix_path_as_given()?;
        Some(std::path::absolute(&path).unwrap_or(path))
    }

    fn unix_path_as_given(&self) -> Option<PathBuf> {
        match self.listen.unix.as_str() {
            "off" | "" => None,
            "auto" => match (
                self.cache.dirs.first(),
                std::env::var_os("XDG_RUNTIME_DIR").filter(|d| !d.is_empty()),
            ) {
                (Some(dir), _) => Some(dir.path.join(crate::SOCKET_NAME)),
                (None, Some(dir)) => Some(PathBuf::from(dir).join(crate::SOCKET_NAME)),
                (None, None) => None,
            },
            path => Some(PathBuf::from(path)),
        }
    }

    /// The buckets that are named in the configuration. Those that only a wildcard finds are not
    /// included unless they have a section of their own.
    pub fn bucket_names(&self) -> Vec<String> {
        let configured = self
            .origins
            .iter()
            .filter_map(|o| o.bucket().ok().flatten());
        configured.chain(self.buckets.keys().cloned()).collect()
    }

    /// Open client connections: as configured, or fewer if the process may not open that many
    /// files.
    pub fn connections_most(&self) -> usize {
        // Other nodes ask this one, and it asks them.
        let of_clients = self.connections_that_fit() - 2 * self.peer_connections_most();
        self.limits.connections.min(of_clients.max(1))
    }

    /// Open connections of other nodes to this one; as many may go from it to them.
    pub fn peer_connections_most(&self) -> usize {
        match self.cluster.map {
            None => 0,
            Some(_) => (self.connections_that_fit() / 4).min(PEER_CONNECTIONS_MAX),
        }
    }

    fn connections_that_fit(&self) -> usize {
        let dirs = self.cache.dirs.iter();
        let segments = dirs.map(|d| d.size.0 / SEGMENT_BYTES + 8).sum();
        let origins = self.origins.iter();
        let requests = origins.map(|o| o.config.requests_in_flight as u64).sum();
        let most = connections_for(crate::process::open_files_limit(), segments, requests);
        usize::try_from(most).unwrap_or(usize::MAX)
    }

    /// Whether requests over TCP must bring a key or a token.
    pub fn needs_credentials(&self) -> bool {
        self.auth.needs_credentials()
    }
}

/// The default memory budget of a machine with so much memory.
fn memory_budget_of(machine_bytes: u64) -> u64 {
    let least = limits::MEMORY_BUDGET_DEFAULT_MIN_BYTES.min(machine_bytes / 4);
    if machine_bytes == u64::MAX {
        // Nobody says.
        return least;
    }
    (machine_bytes / 16).clamp(least, limits::MEMORY_BUDGET_DEFAULT_MAX_BYTES)
}

#[cfg(test)]
mod tests {
    use super::{Config, connections_for, memory_budget_of};

    #[test]
    fn other_nodes_have_a_share_of_the_connections() {
        let mut config = Config::default();
        config.limits.connections = usize::MAX;
        let (alone, none) = (config.connections_most(), config.peer_connections_most());
        config.cluster.map = Some(crate::config::Source::File("map.json".into()));
        let (clients, peers) = (config.connections_most(), config.peer_connections_most());
        assert_eq!((none, alone), (0, clients + 2 * peers));
        assert!(peers > 0 && clients >= alone / 2, "{clients} of {alone}");
    }

    #[test]
    fn connections_leave_files_for_the_cache_and_the_origins() {
        assert_eq!(connections_for(256, 8, 256), 92);
        assert_eq!(connections_for(1024, 4000, 256), 720 - 256);
        assert_eq!(connections_for(65_536, 2000, 256), 65_536 - 64 - 2000 - 256);
        assert_eq!(
            (connections_for(10, 8, 256), connections_for(0, 0, 0)),
            (1, 1)
        );
        assert!(connections_for(u64::MAX, 8, 256) > 1 << 60);
    }

    #[test]
    fn the_memory_budget_grows_with_the_machine() {
        let gib = |n: u64| n << 30;
        let found = [1, 4, 8, 24, 512, 2048].map(|n| memory_budget_of(gib(n)));
        assert_eq!(found[0], gib(1) / 4);
        assert_eq!(found[1..3], [gib(1), gib(1)]);
        assert_eq!(found[3..], [gib(24) / 16, gib(16), gib(16)]);
        assert_eq!(memory_budget_of(0), 0);
        assert_eq!(memory_budget_of(u64::MAX), gib(1));
    }
}
