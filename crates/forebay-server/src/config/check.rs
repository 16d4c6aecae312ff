//! Whether the settings make sense together.

use super::{Bytes, Config, Span};
use crate::{buckets::OriginBuckets, object::http_date, socket};
use forebay_cluster::COPIES_MAX;
use forebay_core::{
    Error,
    limits::{BATCH_ENTRIES_MAX, CHUNK_BYTES},
    name::validate_bucket,
    units::format_bytes,
};
use forebay_membership::Source;
use forebay_origin::{LocalOrigin, OriginUrl};
use forebay_store::{DirConfig, disk::Space};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    slice,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Far more connections, requests or buffers than any node has, and far from overflowing a count.
const COUNT_MAX: u64 = 1 << 30;
/// A year. A longer time is a mistake, and a time that overflows the clock would end the process.
const TIME_MAX: Duration = Duration::from_secs(366 * 86_400);

/// The bit of a file's mode that lets everybody read it.
const OTHERS_READ: u32 = 0o004;

/// A node that restarts is away for seconds.
const FORGET_AFTER_MIN: Duration = Duration::from_secs(10);
/// The longest path of a Unix socket on Linux, without the final NUL.
const SOCKET_PATH_MAX_BYTES: usize = 107;

/// Whether the node starts anyway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The node does not start with it.
    Error,
    /// It starts, but probably not as meant.
    Warning,
}

/// Something about a setting that an operator should know.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Whether it keeps the node from starting.
    pub severity: Severity,
    /// The dotted key.
    pub key: String,
    /// What is wrong or doubtful.
    pub message: String,
    /// What to do.
    pub hint: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = if self.severity == Severity::Error {
            "error"
        } else {
            "warning"
        };
        write!(f, "{severity}: {}: {}", self.key, self.message)?;
        if self.hint.is_empty() {
            Ok(())
        } else {
            write!(f, " ({})", self.hint)
        }
    }
}

/// The room that a file system has for caches which hold `held` bytes of it already: `kept` are to
/// stay free.
fn room(space: Space, kept: u64, held: u64) -> u64 {
    let available = space.available_bytes.saturating_add(held);
    available.saturating_sub(kept)
}

/// The bytes of the files in a directory and below it, as far as they can be read.
fn bytes_in(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => bytes_in(&entry.path()),
            Ok(meta) if meta.is_file() => meta.len(),
            _ => 0,
        })
        .sum()
}

impl Config {
    /// Everything that is wrong or doubtful, errors first. Opens and connects to nothing.
    pub fn check(&self) -> Vec<Problem> {
        let mut problems = Problems(Vec::new());
        self.check_listen(&mut problems);
        self.check_origins(&mut problems);
        self.check_cache(&mut problems);
        self.check_auth(&mut problems);
        self.check_tls(&mut problems);
        self.check_cluster(&mut problems);
        self.check_paths(&mut problems);
        self.check_numbers(&mut problems);
        problems.0.sort_by_key(|p| p.severity == Severity::Warning);
        problems.0
    }

    /// What is wrong with the files that the settings name (keys, certificate and its key), read as
    /// the node itself would read them, so that a file can be tried before it is put in place. Also
    /// checks that the certificate has not expired, that the file systems have room for the caches,
    /// and the machine has memory for the budget.
    pub fn check_files(&self) -> Vec<Problem> {
        let mut problems = Problems(Vec::new());
        let mut tried = |key: &str, error: Option<Error>| {
            if let Some(e) = error {
                problems.refused(key, &e);
            }
        };
        // `check` tells of empty paths.
        let is_empty =
            |path: &Option<PathBuf>| path.as_ref().is_some_and(|p| p.as_os_str().is_empty());
        if self.auth.keys_file.is_some() && !is_empty(&self.auth.keys_file) {
            tried("auth.keys_file", crate::auth::Access::new(&self.auth).err());
        }
        let mut not_after_secs = None;
        if !is_empty(&self.tls.cert) && !is_empty(&self.tls.key) {
            match crate::tls::Tls::open(&self.tls) {
                Ok(tls) => not_after_secs = tls.and_then(|t| t.not_after_secs()),
                Err(e) => tried("tls", Some(e)),
            }
        }
        tried("cluster", crate::peers::Settings::read(self).err());
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now_secs = now.map_or(0, |d| d.as_secs()) as i64;
        if let (Some(file), Some(end)) = (&self.tls.cert, not_after_secs.filter(|s| *s <= now_secs))
        {
            problems.warning(
                "tls.cert",
                format!(
                    "the certificate in {} has expired on {}: clients refuse it",
                    file.display(),
                    http_date(end.saturating_mul(1000))
                ),
                "put a new one there: a running node takes it over",
            );
        }
        for (key, path) in self.secret_files() {
            // A file that cannot be examined is reported above, where it matters.
            let Ok(meta) = std::fs::metadata(path) else {
                continue;
            };
            let mode = meta.permissions().mode() & 0o777;
            if mode & OTHERS_READ != 0 {
                problems.warning(
                    key,
                    format!(
                        "{} holds secrets, but everybody may read it (mode {mode:04o})",
                        path.display()
                    ),
                    "chmod 0600, or 0640 with the node's own group",
                );
            }
        }
        for dir in &self.cache.dirs {
            if dir.path.metadata().is_ok_and(|m| !m.is_dir()) {
                problems.error(
                    "cache.dirs",
                    format!("{} is not a directory", dir.path.display()),
                    "name a directory; it is made if it is not there",
                );
            }
        }
        self.check_room(&mut problems);
        self.check_nesting(&mut problems);
        self.check_sensors(&mut problems);
        self.check_memory(&mut problems);
        problems.0
    }

    /// What keeps the node from making the clients of its origins: a directory that is not there, a
    /// file that cannot be read, an account that nobody names. Connects to none.
    pub fn check_origins_open(&self) -> Vec<Problem> {
        let mut problems = Problems(Vec::new());
        for (i, origin) in self.origins.iter().enumerate() {
            let found = match origin.config.check() {
                // Opening a directory takes away what earlier writes left there.
                Ok(OriginUrl::Directory { path, .. }) => LocalOrigin::find(&path).map(drop),
                // What is wrong with the settings themselves is told by `check`.
                _ if origin.bucket().is_err() => continue,
                _ => OriginBuckets::open(slice::from_ref(origin)).map(drop),
            };
            if let Err(e) = found {
                problems.refused(&format!("origins[{i}]"), &e);
            }
        }
        problems.0
    }

    /// Warns of directories whose sizes exceed the room that their file system has for them at this
    /// moment.
    fn check_room(&self, problems: &mut Problems) {
        use std::os::unix::fs::MetadataExt;
        let mut file_systems: BTreeMap<u64, Vec<&super::CacheDir>> = BTreeMap::new();
        for dir in &self.cache.dirs {
            let absolute = std::path::absolute(&dir.path).unwrap_or_else(|_| dir.path.clone());
            let found = absolute.ancestors().find_map(|p| p.metadata().ok());
            if let Some(found) = found {
                file_systems.entry(found.dev()).or_default().push(dir);
            }
        }
        for dirs in file_systems.values() {
            let Ok(space) = forebay_store::disk::space_of(&dirs[0].path) else {
                continue;
            };
            let configured = self.cache.keep_free.map(|b| b.0);
            let kept = forebay_store::keep_free_of(configured, space.total_bytes);
            let promised = dirs
                .iter()
                .fold(0u64, |sum, d| sum.saturating_add(d.size.0));
            if promised <= room(space, kept, 0) {
                continue;
            }
            let held: u64 = dirs.iter().map(|d| bytes_in(&d.path)).sum();
            let room = room(space, kept, held);
            if promised > room {
                let names: Vec<_> = dirs.iter().map(|d| d.path.display().to_string()).collect();
                problems.warning(
                    "cache.dirs",
                    format!(
                        "{} may take {}, but the file system has room for only {}",
                        names.join(", "),
                        format_bytes(promised),
                        format_bytes(room)
                    ),
                    "give it a smaller size, or free space: it uses only the room that there is",
                );
            }
        }
    }

    /// Warns of caches inside a directory that is served: what they keep would be its objects. And
    /// of caches inside another one, which share a disk, and go with it if it is removed.
    fn check_nesting(&self, problems: &mut Problems) {
        for origin in &self.origins {
            let Ok(OriginUrl::Directory { path, .. }) = origin.config.check() else {
                continue;
            };
            let served = resolved(&path);
            for dir in &self.cache.dirs {
                if resolved(&dir.path).starts_with(&served) {
                    problems.warning(
                        "cache.dirs",
                        format!(
                            "{} is inside {}, which is served: the files of the cache are listed \
                             and cached as its objects",
                            dir.path.display(),
                            path.display()
                        ),
                        "keep the cache elsewhere",
                    );
                }
            }
        }
        for inner in &self.cache.dirs {
            let path = resolved(&inner.path);
            let outer = self.cache.dirs.iter().find(|outer| {
                let outer = resolved(&outer.path);
                // `check` tells of the same one twice.
                path != outer && path.starts_with(&outer)
            });
            if let Some(outer) = outer {
                problems.warning(
                    "cache.dirs",
                    format!(
                        "{} is inside {}, which is a cache too",
                        inner.path.display(),
                        outer.path.display()
                    ),
                    "one entry for each disk, none inside another",
                );
            }
        }
    }

    /// Warns of a place that was set and that no sensor will be found in.
    fn check_sensors(&self, problems: &mut Problems) {
        let sysfs = &self.energy.sysfs;
        let is_set = *sysfs != super::Energy::default().sysfs && !sysfs.as_os_str().is_empty();
        if self.energy.sample && is_set && !sysfs.is_dir() {
            problems.warning(
                "energy.sysfs",
                format!(
                    "{} is not a directory: no sensor is found there",
                    sysfs.display()
                ),
                "name the directory that the host's /sys is mounted at",
            );
        }
    }

    /// Warns of a budget that is never reached, because the memory ends before it.
    fn check_memory(&self, problems: &mut Problems) {
        let total_bytes = crate::process::memory_total_bytes();
        if let Some(budget) = self.memory.budget
            && budget.0 > total_bytes
        {
            problems.warning(
                "memory.budget",
                format!(
                    "{budget} is more than this machine or its container has, {}",
                    format_bytes(total_bytes)
                ),
                "give it less: beyond it work is refused, and without memory the node is killed",
            );
        }
    }

    /// The files that secrets are read from, with the settings that name them.
    fn secret_files(&self) -> Vec<(&'static str, &Path)> {
        let auth = &self.auth;
        let secrets = auth.keys.iter().filter_map(|k| k.secret_key_file.as_ref());
        let named = [
            auth.keys_file
                .iter()
                .map(|f| ("auth.keys_file", f))
                .collect(),
            secrets.map(|f| ("auth.keys", f)).collect(),
            self.tls
                .key
                .iter()
                .map(|f| ("tls.key", f))
                .collect::<Vec<_>>(),
            self.cluster
                .key
                .iter()
                .map(|f| ("cluster.key", f))
                .collect(),
            self.cluster
                .etcd_password_file
                .iter()
                .map(|f| ("cluster.etcd_password_file", f))
                .collect(),
        ];
        let named = named.into_iter().flatten();
        named.map(|(key, file)| (key, file.as_path())).collect()
    }

    /// The first error of [`Config::check`], as an error.
    pub fn checked(&self) -> forebay_core::Result<()> {
        match self
            .check()
            .into_iter()
            .find(|p| p.severity == Severity::Error)
        {
            None => Ok(()),
            Some(p) if p.hint.is_empty() => {
                Err(Error::invalid(format!("{}: {}", p.key, p.message)))
            }
            Some(p) => Err(Error::invalid(format!("{}: {}", p.key, p.message)).hint(p.hint)),
        }
    }

    fn check_listen(&self, problems: &mut Problems) {
        for (key, address) in [
            ("listen.s3", &self.listen.s3),
            ("listen.admin", &self.listen.admin),
            ("listen.peer", &self.listen.peer),
        ] {
            if address != "off" && !is_address(address) {
                problems.error(
                    key,
                    format!("{address:?} is not an address"),
                    "HOST:PORT, as in 127.0.0.1:8080 or [::]:8080, or \"off\"",
                );
            }
        }
        let listeners = [
            ("listen.s3", &self.listen.s3),
            ("listen.admin", &self.listen.admin),
            ("listen.peer", &self.listen.peer),
        ];
        for (i, (key, address)) in listeners.iter().enumerate() {
            let before = listeners[..i].iter();
            if let Some((other, taken)) = before.clone().find(|(_, a)| is_taken_by(address, a)) {
                problems.error(
                    key,
                    format!("{address} is taken by {other}, {taken}"),
                    "give each a port of its own",
                );
            }
        }
        if self.listen.s3 == "off" && self.unix_path().is_none() {
            problems.error(
                "listen.s3",
                "neither a TCP address nor a Unix socket to listen on is set".into(),
                "set one of listen.s3 and listen.unix",
            );
        }
        if let Some(path) = self.unix_path()
            && path.as_os_str().len() > SOCKET_PATH_MAX_BYTES
        {
            problems.error(
                "listen.unix",
                format!(
                    "{} is longer than the {SOCKET_PATH_MAX_BYTES} bytes that the path of a \
                    socket may have",
                    path.display()
                ),
                "set listen.unix to a shorter path",
            );
        }
        if let Some(path) = self.unix_path()
            && let Err(e) = socket::check_place(&path)
        {
            problems.refused("listen.unix", &e);
        }
        for name in &self.listen.hostnames {
            if name.is_empty() || name.contains([':', '/']) {
                problems.error(
                    "listen.hostnames",
                    format!("{name:?} is not a host name"),
                    "without scheme and port, as in s3.example.com",
                );
            }
        }
    }

    fn check_origins(&self, problems: &mut Problems) {
        if self.origins.is_empty() {
            problems.error(
                "origins",
                "no bucket is served".into(),
                "--origin s3://BUCKET, or [[origins]] with url = \"…\" in the configuration file",
            );
        }
        let mut seen = BTreeSet::new();
        for (i, origin) in self.origins.iter().enumerate() {
            let key = format!("origins[{i}]");
            match origin.bucket() {
                Err(e) => problems.refused(&key, &e),
                Ok(name) => {
                    let name = name.unwrap_or_else(|| "*".into());
                    if !seen.insert(name.clone()) {
                        problems.error(
                            &key,
                            format!("the bucket {name:?} is configured twice"),
                            "give one of them another name",
                        );
                    }
                }
            }
        }
        for name in self.buckets.keys() {
            if let Err(e) = validate_bucket(name) {
                problems.refused(&format!("buckets.{name}"), &e);
            } else if !seen.contains(name) && !seen.contains("*") {
                problems.warning(
                    &format!("buckets.{name}"),
                    "no origin has this bucket".into(),
                    "check the name",
                );
            }
        }
    }

    fn check_cache(&self, problems: &mut Problems) {
        if self.cache.dirs.is_empty() {
            problems.warning(
                "cache.dirs",
                "nothing is cached: every read goes to the origin".into(),
                "--cache DIR:SIZE",
            );
        }
        let mut paths = BTreeSet::new();
        for dir in &self.cache.dirs {
            if !paths.insert(resolved(&dir.path)) {
                problems.error(
                    "cache.dirs",
                    format!("{} is configured twice", dir.path.display()),
                    "one entry for each disk",
                );
            }
            let of_store = DirConfig {
                path: dir.path.clone(),
                capacity_bytes: dir.size.0,
            };
            if let Err(e) = of_store.check() {
                problems.refused("cache.dirs", &e);
            }
        }
    }

    fn check_auth(&self, problems: &mut Problems) {
        let mut names = BTreeSet::new();
        for (i, pair) in self.auth.keys.iter().enumerate() {
            if let Err(e) = pair
                .check()
                .and_then(|()| crate::auth::Policy::of(pair.allow.as_deref()))
            {
                problems.refused(&format!("auth.keys[{i}]"), &e);
            } else if !pair.access_key.is_empty() && !names.insert(&pair.access_key) {
                problems.error(
                    "auth.keys",
                    format!("the access key {:?} is configured twice", pair.access_key),
                    "give each entry an access key of its own, or remove one of them",
                );
            }
        }
        if self.auth.tokens.iter().any(|t| t.reveal().is_empty()) {
            problems.error("auth.tokens", "a token is empty".into(), "");
        }
        for token in &self.auth.tokens {
            if let Err(e) = token.check() {
                problems.refused("auth.tokens", &e);
            }
        }
        if self.needs_credentials() {
            if self.auth.anonymous {
                problems.error(
                    "auth.anonymous",
                    "it is set together with keys or tokens".into(),
                    "remove one of them",
                );
            }
            let elsewhere = self.auth.keys_file.is_some();
            if self.auth.tokens.is_empty()
                && !elsewhere
                && self.auth.keys.iter().all(|k| k.token.is_none())
            {
                problems.warning(
                    "auth.keys",
                    "keys without tokens: requests under /v1/ are refused over TCP".into(),
                    "give a key a token, or set auth.tokens",
                );
            }
            if self.auth.keys.iter().all(|k| k.access_key.is_empty()) && !elsewhere {
                problems.warning(
                    "auth.keys",
                    "tokens without keys: S3 requests are refused over TCP".into(),
                    "set auth.keys too",
                );
            }
        } else if !self.auth.anonymous
            && is_address(&self.listen.s3)
            && !is_loopback(&self.listen.s3)
        {
            problems.error(
                "listen.s3",
                format!(
                    "{} is reached by other machines, but no keys are \
                    configured",
                    self.listen.s3
                ),
                "set auth.keys and auth.tokens, or listen on 127.0.0.1, or set auth.anonymous = \
                 true if the network is trusted",
            );
        }
    }

    fn check_tls(&self, problems: &mut Problems) {
        match (&self.tls.cert, &self.tls.key) {
            (Some(_), None) => problems.error(
                "tls.key",
                "a certificate is set without its key".into(),
                "set tls.key to the file with it",
            ),
            (None, Some(_)) => problems.error(
                "tls.cert",
                "a key is set without its certificate".into(),
                "set tls.cert to the file with it",
            ),
            (None, None) if self.tls.admin => problems.error(
                "tls.admin",
                "no certificate is set".into(),
                "set tls.cert and tls.key",
            ),
            (Some(_), Some(_)) if self.listen.s3 == "off" && !self.tls.admin => {
                problems.warning(
                    "tls.cert",
                    "no listener speaks TLS: the Unix socket never does".into(),
                    "set listen.s3",
                );
            }
            _ => {}
        }
        let tokens_in_the_clear = self.needs_credentials()
            && self.tls.cert.is_none()
            && self.listen.s3 != "off"
            && !is_loopback(&self.listen.s3);
        if tokens_in_the_clear {
            problems.warning(
                "tls.cert",
                "tokens and data cross the network unencrypted".into(),
                "set tls.cert and tls.key, or trust the network",
            );
        }
    }

    fn check_cluster(&self, problems: &mut Problems) {
        let cluster = &self.cluster;
        let has_address = self.listen.peer != "off";
        if cluster.map.is_none() {
            if has_address || *cluster != super::Cluster::default() {
                problems.error(
                    "cluster.map",
                    "settings of a cluster are set, but not its map".into(),
                    "say where the map is (--cluster), or remove [cluster] and listen.peer",
                );
            }
            return;
        }
        if !has_address {
            problems.error(
                "listen.peer",
                "other nodes of the cluster have no address to ask this one at".into(),
                "where other nodes reach this one, as in 10.0.0.1:8300 or 0.0.0.0:8300",
            );
        }
        if self.cache.dirs.is_empty() {
            problems.error(
                "cache.dirs",
                "a node of a cluster keeps its share, and who it is, in a cache directory".into(),
                "set --cache DIR:SIZE",
            );
        }
        let is_etcd = matches!(cluster.map, Some(Source::Etcd { .. }));
        let of_etcd = [
            ("cluster.etcd_user", cluster.etcd_user.is_some()),
            (
                "cluster.etcd_password_file",
                cluster.etcd_password_file.is_some(),
            ),
            ("cluster.etcd_ca", cluster.etcd_ca.is_some()),
        ];
        for (key, _) in of_etcd.iter().filter(|(_, is_set)| *is_set && !is_etcd) {
            problems.error(
                key,
                "the map of the cluster is not in etcd".into(),
                "remove it, or set cluster.map = \"etcd://HOST:PORT/NAME\"",
            );
        }
        if cluster.etcd_user.is_some() != cluster.etcd_password_file.is_some() {
            problems.error(
                "cluster.etcd_user",
                "a user of etcd needs a password, and a password a user".into(),
                "set cluster.etcd_user and cluster.etcd_password_file, or neither",
            );
        }
        if cluster.weight.is_some_and(|weight| weight.0 == 0) {
            problems.error(
                "cluster.weight",
                "a node of weight 0 would keep nothing".into(),
                "leave it out, or give the size of what it shall keep",
            );
        }
        if cluster.forget_after.0 < FORGET_AFTER_MIN {
            problems.error(
                "cluster.forget_after",
                format!(
                    "{} is shorter than a restart may take",
                    cluster.forget_after
                ),
                "10s or more; 10m is usual",
            );
        }
        let files = [&cluster.ca, &cluster.cert, &cluster.key];
        match (cluster.plain, files.iter().filter(|f| f.is_some()).count()) {
            (true, 0) if !is_loopback(&self.listen.peer) => problems.warning(
                "cluster.plain",
                "whoever reaches listen.peer may read everything".into(),
                "set cluster.ca, cluster.cert and cluster.key, or trust the network",
            ),
            (true, 0) | (false, 3) => {}
            (true, _) => problems.error(
                "cluster.plain",
                "it is set beside certificates".into(),
                "set one or the other",
            ),
            (false, _) => problems.error(
                "cluster.cert",
                "nodes need the cluster's CA, and a certificate and its key".into(),
                "set cluster.ca, cluster.cert and cluster.key, or cluster.plain = true if nobody \
                 else reaches that network",
            ),
        }
    }

    fn check_paths(&self, problems: &mut Problems) {
        let (auth, tls, cluster) = (&self.auth, &self.tls, &self.cluster);
        for (key, path) in [
            ("auth.keys_file", &auth.keys_file),
            ("tls.cert", &tls.cert),
            ("tls.key", &tls.key),
            ("cluster.ca", &cluster.ca),
            ("cluster.cert", &cluster.cert),
            ("cluster.key", &cluster.key),
            ("cluster.etcd_ca", &cluster.etcd_ca),
            ("cluster.etcd_password_file", &cluster.etcd_password_file),
            ("datasets.dir", &self.datasets.dir),
        ] {
            if path.as_ref().is_some_and(|p| p.as_os_str().is_empty()) {
                problems.error(
                    key,
                    "the path is empty".into(),
                    "give a path, or leave the setting out",
                );
            }
        }
    }

    fn check_numbers(&self, problems: &mut Problems) {
        let (limits, batch, checkpoints) = (&self.limits, &self.batch, &self.checkpoints);
        for (key, count, least, most) in [
            (
                "limits.requests_in_flight",
                limits.requests_in_flight as u64,
                1,
                COUNT_MAX,
            ),
            (
                "limits.connections",
                limits.connections as u64,
                1,
                COUNT_MAX,
            ),
            ("limits.headers", limits.headers as u64, 32, 10_000),
            (
                "limits.warm_concurrency",
                limits.warm_concurrency as u64,
                1,
                COUNT_MAX,
            ),
            ("limits.uploads", limits.uploads as u64, 1, u64::MAX),
            (
                "batch.max_entries",
                batch.max_entries as u64,
                1,
                BATCH_ENTRIES_MAX as u64,
            ),
            (
                "batch.read_ahead_entries",
                batch.read_ahead_entries as u64,
                1,
                COUNT_MAX,
            ),
            ("batch.attempts", batch.attempts.into(), 1, u64::MAX),
            (
                "batch.throttle_percent",
                batch.throttle_percent.into(),
                0,
                90,
            ),
            (
                "batch.throttle_disk_percent",
                batch.throttle_disk_percent.into(),
                0,
                100,
            ),
            (
                "checkpoints.parts_in_flight",
                checkpoints.parts_in_flight as u64,
                1,
                COUNT_MAX,
            ),
        ] {
            problems.out_of_range(key, count, least, most);
        }
        let budget = Bytes(self.memory_budget_bytes());
        for (key, size, least, most) in [
            ("limits.head", limits.head, 8192, 16 << 20),
            ("batch.max_body", batch.max_body, 1, u64::MAX),
            ("batch.frame", batch.frame, 4096, u64::MAX),
            ("cache.fill_run", self.cache.fill_run, CHUNK_BYTES, u64::MAX),
            ("memory.budget", budget, 32 << 20, u64::MAX),
            // S3 takes no smaller ones, and no larger ones.
            ("checkpoints.part", checkpoints.part, 5 << 20, 5 << 30),
        ] {
            problems.out_of_range(key, size, Bytes(least), Bytes(most));
        }
        for (key, time, least_ms) in [
            ("limits.idle_timeout", limits.idle_timeout, 1),
            ("limits.body_timeout", limits.body_timeout, 1),
            ("limits.write_timeout", limits.write_timeout, 1),
            ("limits.drain_timeout", limits.drain_timeout, 0),
            ("batch.entry_timeout", batch.entry_timeout, 1),
            ("batch.cut_pause", batch.cut_pause, 0),
            (
                "checkpoints.abandon_after",
                checkpoints.abandon_after,
                60_000,
            ),
        ] {
            let least = Span(Duration::from_millis(least_ms));
            problems.out_of_range(key, time, least, Span(TIME_MAX));
        }
        if let Err(e) = self.energy.monitor() {
            problems.error(
                "energy.model",
                e.to_string(),
                "without energy.model, nothing is estimated",
            );
        }
        let of_buckets = self.buckets.iter();
        let of_buckets =
            of_buckets.filter_map(|(name, b)| Some((format!("buckets.{name}.mirror"), b.mirror?)));
        for (key, copies) in
            std::iter::once(("cache.mirror".to_owned(), self.cache.mirror)).chain(of_buckets)
        {
            if !(1..=COPIES_MAX).contains(&copies) {
                problems.error(
                    &key,
                    format!("{copies} nodes cannot keep each piece"),
                    &format!("give 1 to {COPIES_MAX}"),
                );
            }
        }
        let window = self.batcher().window_bytes();
        if window > budget.0 / 2 {
            problems.error(
                "batch.frame",
                format!(
                    "the {} of one batch's buffers are more than half of memory.budget, {}",
                    Bytes(window),
                    budget
                ),
                "no batch could be answered: lower batch.frame, or raise memory.budget",
            );
        }
        if let Err(e) = crate::logging::filter(&self.log) {
            problems.refused("log.level", &e);
        }
    }
}

struct Problems(Vec<Problem>);

impl Problems {
    fn error(&mut self, key: &str, message: String, hint: &str) {
        self.0.push(Problem {
            severity: Severity::Error,
            key: key.into(),
            message,
            hint: hint.into(),
        });
    }

    /// What another part of the program refuses. If its message begins with a key that is more
    /// exact, that is the key.
    fn refused(&mut self, key: &str, e: &Error) {
        let (key, message) = match e.message().split_once(": ") {
            Some((exact, message)) if exact.starts_with(key) => (exact, message),
            _ => (key, e.message()),
        };
        self.error(key, message.to_owned(), e.hint_text().unwrap_or_default());
    }

    /// An error if a value is less than `least` or more than `most`.
    fn out_of_range<T: PartialOrd + fmt::Display>(
        &mut self,
        key: &str,
        value: T,
        least: T,
        most: T,
    ) {
        if value < least {
            let hint = format!("give at least {least}");
            self.error(key, format!("{value} is too small"), &hint);
        } else if value > most {
            let hint = format!("give at most {most}");
            self.error(key, format!("{value} is too large"), &hint);
        }
    }

    fn warning(&mut self, key: &str, message: String, hint: &str) {
        self.0.push(Problem {
            severity: Severity::Warning,
            key: key.into(),
            message,
            hint: hint.into(),
        });
    }
}

fn is_address(text: &str) -> bool {
    text.parse::<SocketAddr>().is_ok()
        || text
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

/// Whether a listener at `taken` leaves no room for one at `address`, as far as that is certain
/// before anything is resolved: names may stand for the same address, and whether `[::]` takes IPv4
/// too is up to the system.
fn is_taken_by(address: &str, taken: &str) -> bool {
    match (address.parse::<SocketAddr>(), taken.parse::<SocketAddr>()) {
        (Ok(a), Ok(b)) => {
            let is_wildcard = a.ip().is_unspecified() || b.ip().is_unspecified();
            let same_host = a.ip() == b.ip() || (is_wildcard && a.is_ipv4() == b.is_ipv4());
            same_host && a.port() == b.port() && a.port() != 0
        }
        _ => address == taken && is_address(address) && !address.ends_with(":0"),
    }
}

/// The directory that a path leads to, with the part of it that does not exist yet as written.
fn resolved(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let found = absolute.ancestors().find_map(|ancestor| {
        let rest = absolute.strip_prefix(ancestor).ok()?;
        Some(ancestor.canonicalize().ok()?.join(rest))
    });
    found.unwrap_or(absolute)
}

/// Whether only this machine can reach the address. A name is loopback only if it is `localhost`.
pub(crate) fn is_loopback(address: &str) -> bool {
    let host = address
        .rsplit_once(':')
        .map_or(address, |(host, _)| host)
        .trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{NamedOrigin, Secret};

    fn errors(config: &Config) -> Vec<String> {
        config
            .check()
            .into_iter()
            .filter(|p| p.severity == Severity::Error)
            .map(|p| p.to_string())
            .collect()
    }

    fn sound() -> Config {
        let mut config = Config {
            origins: vec![NamedOrigin::parse("s3://photos").unwrap()],
            ..Config::default()
        };
        // Tests may run on a full disk.
        config.cache.keep_free = Some(Bytes(0));
        config
    }

    #[test]
    fn the_defaults_need_an_origin_and_nothing_else() {
        assert!(errors(&sound()).is_empty(), "{:?}", errors(&sound()));
        assert!(errors(&Config::default())[0].contains("--origin"));
    }

    #[test]
    fn a_cache_that_the_store_refuses_is_refused_before() {
        for (size, fits) in [
            ("10", false),
            ("4MiB", false),
            ("4.3MiB", true),
            ("1GiB", true),
        ] {
            let dir: crate::config::CacheDir = format!("/cache:{size}").parse().unwrap();
            let mut config = sound();
            config.cache.dirs = vec![dir];
            let found = errors(&config);
            assert_eq!(found.is_empty(), fits, "{size}: {found:?}");
            assert!(
                fits || found[0].contains("/cache: a size of") && found[0].contains("4.3 MiB"),
                "{found:?}"
            );
        }
    }

    #[test]
    fn one_cache_directory_under_two_names_is_refused() {
        let at = tempfile::tempdir().unwrap();
        std::fs::create_dir(at.path().join("real")).unwrap();
        std::os::unix::fs::symlink(at.path().join("real"), at.path().join("link")).unwrap();
        for (one, other, same) in [
            ("real", "link", true),
            ("real", "real/../real/", true),
            ("real/new", "link/new", true),
            ("real", "real/new", false),
            ("real/a", "real/b", false),
        ] {
            let mut config = sound();
            config.cache.dirs = [one, other]
                .map(|name| {
                    format!("{}/{name}:1GiB", at.path().display())
                        .parse()
                        .unwrap()
                })
                .into();
            let found = errors(&config).join("\n");
            assert_eq!(
                found.contains("configured twice"),
                same,
                "{one} {other}: {found}"
            );
        }
    }

    #[test]
    fn a_file_where_the_socket_belongs_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node.sock");
        std::fs::write(&path, "x").unwrap();
        let mut config = sound();
        config.listen.unix = path.display().to_string();
        let found = errors(&config);
        assert!(
            found.len() == 1
                && found[0].contains("listen.unix: ")
                && found[0].contains("not a socket"),
            "{found:?}"
        );
        std::fs::remove_file(&path).unwrap();
        let _listening = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(errors(&config), Vec::<String>::new());
    }

    #[test]
    fn two_listeners_at_one_address_are_refused() {
        for (s3, admin, taken) in [
            ("127.0.0.1:80", "127.0.0.1:80", true),
            ("0.0.0.0:80", "127.0.0.1:80", true),
            ("127.0.0.1:80", "0.0.0.0:80", true),
            ("[::]:80", "[::1]:80", true),
            ("localhost:80", "localhost:80", true),
            ("127.0.0.1:80", "127.0.0.1:81", false),
            ("127.0.0.1:80", "127.0.0.2:80", false),
            ("127.0.0.1:80", "[::1]:80", false),
            ("127.0.0.1:0", "127.0.0.1:0", false),
            ("localhost:0", "localhost:0", false),
            ("off", "off", false),
        ] {
            let mut config = sound();
            config.auth.anonymous = true;
            config.listen.unix = "/run/forebay.sock".into();
            (config.listen.s3, config.listen.admin) = (s3.into(), admin.into());
            let found = errors(&config);
            assert_eq!(found.len(), usize::from(taken), "{s3} {admin}: {found:?}");
            assert!(
                !taken
                    || found[0].starts_with("error: listen.admin")
                        && found[0].contains("listen.s3"),
                "{found:?}"
            );
        }
        // An address that cannot be parsed gets one error, and not also the one about other machines
        // that reach it.
        let mut config = sound();
        config.listen.s3 = "8080".into();
        assert_eq!(errors(&config).len(), 1, "{:?}", errors(&config));
    }

    #[tokio::test]
    async fn an_origin_that_the_node_could_not_open_is_refused_before() {
        let mut config = sound();
        config
            .origins
            .push(NamedOrigin::parse("bk=/no/such/dir").unwrap());
        config
            .origins
            .push(NamedOrigin::parse("s3://other").unwrap());
        config.origins[2].config.ca_file = Some("/no/such.pem".into());
        config
            .origins
            .push(NamedOrigin::parse("s3://photos").unwrap());
        config.origins[3].config.attempts = 0;
        let found: Vec<String> = config
            .check_origins_open()
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].contains("origins[1]") && found[0].contains("/no/such/dir"),
            "{found:?}"
        );
        assert!(
            found[1].contains("origins[2]") && found[1].contains("/no/such.pem"),
            "{found:?}"
        );
    }

    #[test]
    fn a_check_leaves_alone_what_lies_in_the_directory_of_an_origin() {
        let dir = tempfile::tempdir().unwrap();
        let uploads = dir.path().join(".forebay/uploads");
        std::fs::create_dir_all(&uploads).unwrap();
        let unfinished = std::fs::File::create(uploads.join("part")).unwrap();
        // Opening the origin would remove it.
        unfinished.set_modified(std::time::UNIX_EPOCH).unwrap();
        let mut config = sound();
        let origin = NamedOrigin::parse(&format!("bk={}", dir.path().display()));
        config.origins.push(origin.unwrap());
        assert!(config.check_origins_open().is_empty());
        assert!(uploads.join("part").exists());
        OriginBuckets::open(&config.origins[1..]).unwrap();
        assert!(!uploads.join("part").exists());
    }

    #[test]
    fn limits_are_told_in_the_units_that_they_are_written_in() {
        let mut config = sound();
        config.memory.budget = Some("1MiB".parse().unwrap());
        config.limits.idle_timeout = "0".parse().unwrap();
        config.limits.write_timeout = "9999d".parse().unwrap();
        config.batch.attempts = 0;
        config.batch.entry_timeout = "0".parse().unwrap();
        let found = errors(&config).join("\n");
        for part in [
            "memory.budget: 1MiB is too small (give at least 32MiB)",
            "limits.idle_timeout: 0s is too small (give at least 1ms)",
            "limits.write_timeout: 863913600s is too large (give at most 31622400s)",
            "batch.attempts: 0 is too small (give at least 1)",
            "batch.entry_timeout: 0s is too small (give at least 1ms)",
            "the 3MiB of one batch's buffers",
        ] {
            assert!(found.contains(part), "{part} in {found}");
        }
    }

    #[test]
    fn an_empty_value_is_refused_and_each_key_told_once() {
        let mut config = sound();
        config.datasets.dir = Some("".into());
        config.tls.cert = Some("".into());
        config.tls.key = Some("k.pem".into());
        config.log.level = String::new();
        let found = errors(&config);
        let keys = [
            "tls.cert: the path",
            "datasets.dir: the path",
            "log.level: it is empty",
        ];
        assert_eq!(found.len(), keys.len(), "{found:?}");
        for key in keys {
            assert!(
                found
                    .iter()
                    .any(|f| f.starts_with(&format!("error: {key}"))),
                "{found:?}"
            );
        }
        config.log.level = "loud".into();
        assert!(
            errors(&config)
                .join("\n")
                .contains("log.level: \"loud\" is not a level")
        );
        config.auth.keys_file = Some("/no/such".into());
        let read = config.check_files()[0].to_string();
        let again = config.check_files();
        assert!(!again.iter().any(|p| p.key.starts_with("tls")), "{again:?}");
        assert!(
            read.starts_with("error: auth.keys_file: /no/such cannot be read"),
            "{read}"
        );
    }

    #[test]
    fn a_file_of_secrets_that_everybody_may_read_is_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.toml");
        std::fs::write(&path, "tokens = [\"hush\"]\n").unwrap();
        let mut config = sound();
        config.auth.keys_file = Some(path.clone());
        for (mode, warned) in [(0o644, true), (0o640, false), (0o600, false)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let found = config.check_files();
            assert_eq!(found.len(), usize::from(warned), "{mode:o}: {found:?}");
            assert!(found.iter().all(|p| p.severity == Severity::Warning
                && p.key == "auth.keys_file"
                && p.message.contains("0644")));
        }
    }

    #[test]
    fn a_node_of_a_cluster_needs_an_address_a_cache_and_certificates() {
        let mut config = sound();
        config.listen.peer = "10.0.0.1:8300".into();
        assert!(errors(&config)[0].starts_with("error: cluster.map"));
        config.listen.peer = "off".into();
        config.cluster.map = Some(Source::File("map.json".into()));
        let found = errors(&config).join("\n");
        for key in ["listen.peer", "cache.dirs", "cluster.cert"] {
            assert!(found.contains(&format!("error: {key}")), "{found}");
        }
        config.listen.peer = "10.0.0.1:8300".into();
        config.cache.dirs = vec!["/cache:1GiB".parse().unwrap()];
        config.cluster.plain = true;
        assert!(errors(&config).is_empty(), "{:?}", errors(&config));
        let warned = |config: &Config| config.check().iter().any(|p| p.key == "cluster.plain");
        assert!(warned(&config));
        config.listen.peer = "127.0.0.1:8300".into();
        assert!(!warned(&config));
        config.cluster.ca = Some("ca.pem".into());
        assert!(errors(&config)[0].contains("one or the other"));
        config.cluster.plain = false;
        assert!(errors(&config)[0].starts_with("error: cluster.cert"));
        config.cluster.cert = Some("node.pem".into());
        config.cluster.key = Some("node.key".into());
        assert!(errors(&config).is_empty(), "{:?}", errors(&config));
    }

    #[test]
    fn an_open_port_needs_keys_or_the_operators_consent() {
        let mut config = sound();
        config.listen.s3 = "0.0.0.0:8080".into();
        assert!(
            errors(&config)[0].contains("auth.keys"),
            "{:?}",
            errors(&config)
        );
        config.auth.tokens.push(Secret::new("t"));
        assert!(errors(&config).is_empty());
        config.auth.tokens.clear();
        config.auth.anonymous = true;
        assert!(errors(&config).is_empty());
        assert!(
            is_loopback("127.0.0.1:80")
                && is_loopback("[::1]:80")
                && is_loopback("localhost:1")
                && !is_loopback("example.com:80")
        );
    }

    #[test]
    fn the_room_is_what_is_free_and_what_the_cache_has_already() {
        const GIB: u64 = 1 << 30;
        let space = Space {
            total_bytes: 100 * GIB,
            available_bytes: 10 * GIB,
        };
        assert_eq!(room(space, 4 * GIB, 0), 6 * GIB);
        assert_eq!(room(space, 4 * GIB, 20 * GIB), 26 * GIB);
        assert_eq!(room(space, 11 * GIB, 0), 0);
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("staged/0123");
        std::fs::create_dir_all(&below).unwrap();
        std::fs::write(dir.path().join("seg-1"), [1; 3000]).unwrap();
        std::fs::write(below.join("f1"), [1; 500]).unwrap();
        assert_eq!(bytes_in(dir.path()), 3500);
        assert_eq!(bytes_in(&dir.path().join("none")), 0);
    }

    #[test]
    fn a_cache_larger_than_its_file_system_is_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        let room = |dirs: &[String]| {
            let mut config = sound();
            config.cache.dirs = dirs.iter().map(|d| d.parse().unwrap()).collect();
            let problems = config.check_files();
            assert!(problems.iter().all(|p| p.severity == Severity::Warning));
            problems.iter().map(|p| p.to_string()).collect::<String>()
        };
        let at = |name: &str, size: &str| format!("{}/{name}:{size}", dir.path().display());
        assert_eq!(room(&[at("a", "16MiB"), at("b", "16MiB")]), "");
        let said = room(&[at("not/there/yet", "900TiB")]);
        assert!(said.contains("not/there/yet may take 900.0 TiB"), "{said}");
        // Together they exceed it.
        let available = forebay_store::disk::space_of(dir.path())
            .unwrap()
            .available_bytes;
        let half = (available / 5 * 3).to_string();
        assert_eq!(room(&[at("a", &half)]), "");
        assert!(room(&[at("a", &half), at("b", &half)]).contains("/a, "));
    }

    #[test]
    fn a_cache_inside_a_directory_that_is_served_is_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        let served = dir.path().join("data");
        std::fs::create_dir(&served).unwrap();
        let mut config = sound();
        let origin = NamedOrigin::parse(&format!("bk={}", served.display()));
        config.origins.push(origin.unwrap());
        for (cache, warned) in [
            ("data/cache", true),
            ("data/../cache", false),
            ("data-2", false),
        ] {
            let cache = format!("{}:16MiB", dir.path().join(cache).display());
            config.cache.dirs = vec![cache.parse().unwrap()];
            let found = config.check_files();
            assert_eq!(found.len(), usize::from(warned), "{cache}: {found:?}");
            assert!(found.iter().all(|p| p.severity == Severity::Warning));
        }
    }

    #[test]
    fn a_cache_inside_another_is_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        for (one, other, warned) in [
            ("a", "a/b", true),
            ("a/b", "a", true),
            ("a", "a-2", false),
            ("a", "a", false),
        ] {
            let mut config = sound();
            config.cache.dirs = [one, other]
                .map(|name| {
                    format!("{}:16MiB", dir.path().join(name).display())
                        .parse()
                        .unwrap()
                })
                .into();
            let found = config.check_files();
            assert_eq!(found.len(), usize::from(warned), "{one} {other}: {found:?}");
            assert!(found.iter().all(|p| p.severity == Severity::Warning));
        }
    }

    #[test]
    fn a_place_of_sensors_that_is_not_there_is_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        for (sysfs, sample, warned) in [
            (dir.path().to_owned(), true, false),
            (dir.path().join("none"), true, true),
            (dir.path().join("none"), false, false),
        ] {
            let mut config = sound();
            config.energy.sysfs = sysfs;
            config.energy.sample = sample;
            let found = config.check_files();
            assert_eq!(found.len(), usize::from(warned), "{found:?}");
            assert!(found.iter().all(|p| p.key == "energy.sysfs"));
        }
    }

    #[test]
    fn an_access_key_that_is_configured_twice_is_told_with_a_hint() {
        let pair = || crate::config::KeyPair {
            access_key: "AK".into(),
            secret_key: Secret::new("s"),
            ..Default::default()
        };
        let mut config = sound();
        config.auth.keys = vec![pair(), pair()];
        let found = config.check();
        let twice: Vec<_> = found.iter().filter(|p| p.key == "auth.keys").collect();
        assert!(
            twice
                .iter()
                .any(|p| p.severity == Severity::Error && !p.hint.is_empty()),
            "{found:?}"
        );
    }

    #[test]
    fn a_budget_beyond_the_memory_is_a_warning() {
        let mut config = sound();
        for (budget, warned) in [("64MiB", false), ("900TiB", true)] {
            config.memory.budget = Some(budget.parse().unwrap());
            let found = config.check_files();
            assert_eq!(found.len(), usize::from(warned), "{budget}: {found:?}");
            assert!(found.iter().all(|p| p.key == "memory.budget"));
        }
    }

    #[test]
    fn what_cannot_work_is_refused() {
        let mut config = sound();
        config.listen.s3 = "nonsense".into();
        config
            .origins
            .push(NamedOrigin::parse("s3://photos/other").unwrap());
        config.cache.dirs = vec!["/c:1GiB".parse().unwrap(), "/c:2GiB".parse().unwrap()];
        config.batch.attempts = 0;
        config.limits.connections = usize::MAX;
        config.limits.idle_timeout.0 = std::time::Duration::MAX;
        config.batch.throttle_percent = 91;
        config.log.level = "[[[".into();
        let found = errors(&config).join("\n");
        let parts = [
            "listen.s3",
            "origins[1]",
            "cache.dirs",
            "batch.attempts",
            "limits.connections",
            "limits.idle_timeout",
            "throttle_percent",
        ];
        for part in parts.into_iter().chain(["log.level"]) {
            assert!(found.contains(part), "{part} in {found}");
        }
        assert!(config.checked().is_err());
        for frame in [1 << 40, 1 << 62, u64::MAX] {
            let mut config = sound();
            config.batch.frame.0 = frame;
            assert!(
                errors(&config).join("\n").contains("memory.budget"),
                "{frame}"
            );
        }
    }
}
