//! From configuration to origins: which bucket name leads where.
//!
//! A name is looked up among the named mappings first, then in the wildcards (all buckets of an S3
//! endpoint, or the sub-directories of a directory) in the order they were added. Buckets of a
//! wildcard are opened when first asked for; the number kept open is bounded, and all of them share
//! the limits and counters of their origin.

use crate::{
    Circuit, Counted, Counters, Hedged, Hedging, Limited, Limiter, ListRequest, ListedBucket,
    LocalOrigin, Origin, OriginConfig, OriginStats, OriginUrl, Prefixed, Resilient, RetryPolicy,
    Timed,
    aws::{AwsSettings, Environment},
    azure::AzureOrigin,
    hub::{self, HubOrigin},
    local,
    resilient::PASSING_BODY_BYTES,
    s3::{Address, GOOGLE_PIECE_BYTES, S3Endpoint, S3Origin},
    web::WebOrigin,
};
use forebay_core::{Error, ErrorKind, Result, name, sync::Mutex, threads};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{sync::Semaphore, time::timeout};

/// The name under which an operator configures a wildcard.
pub const WILDCARD: &str = "*";
/// Buckets of one wildcard that stay open.
const OPEN_BUCKETS_MAX: usize = 1024;
/// How long the answer whether a bucket of a wildcard exists is remembered.
const EXISTS_TTL: Duration = Duration::from_secs(10);
/// How long a directory that was seen as a bucket is taken to exist. What removes it through this
/// node is noticed at once.
const SEEN_FOR: Duration = Duration::from_secs(1);
/// Directories of one wildcard that are looked at at the same time. The threads that do it are not
/// given back by a mount that hangs.
const LOOKS_AT_ONCE: usize = 16;
/// How long such a look may take. After that an open bucket is used as it is, so that what is
/// cached of it is served.
const LOOK_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 2 });
/// Names in a message that lists the existing buckets.
const HINT_NAMES_MAX: usize = 10;

/// What all buckets of one configured origin share.
#[derive(Clone)]
struct Shared {
    counters: Arc<Counters>,
    limiter: Arc<Limiter>,
    hedging: Option<Arc<Hedging>>,
    policy: RetryPolicy,
    idle_timeout: Duration,
    circuit: Arc<Circuit>,
}

/// The circuits of the addresses, which several mappings may share: whether a service answers does
/// not depend on the bucket.
#[derive(Default)]
struct Circuits(HashMap<String, Arc<Circuit>>);

impl Circuits {
    fn of(&mut self, config: &OriginConfig, url: &OriginUrl) -> Arc<Circuit> {
        let address = match url {
            OriginUrl::Web { base } => Some(base.clone()),
            OriginUrl::Hub { .. } => hub::endpoint(config).ok(),
            _ => config
                .endpoint
                .as_deref()
                .and_then(|a| url::Url::parse(a).ok()),
        };
        let address = address.map(|a| a.origin().ascii_serialization());
        let new = || Arc::new(Circuit::new(config.idle_timeout));
        match address {
            Some(address) => self.0.entry(address).or_insert_with(new).clone(),
            None => new(),
        }
    }
}

impl Shared {
    fn new(config: &OriginConfig, circuit: Arc<Circuit>) -> Self {
        let counters = Arc::new(Counters::default());
        let limiter = Arc::new(Limiter::new(
            config.requests_in_flight,
            config.bytes_per_second,
            counters.clone(),
        ));
        let policy = RetryPolicy {
            attempts: config.attempts,
            deadline: config.retry_deadline,
            ..RetryPolicy::default()
        };
        let hedging = (config.hedge_percent > 0).then(|| {
            Arc::new(Hedging::new(
                config.hedge_percent,
                limiter.clone(),
                counters.clone(),
            ))
        });
        Self {
            counters,
            limiter,
            hedging,
            policy,
            idle_timeout: config.idle_timeout,
            circuit,
        }
    }

    /// The same with its own circuit.
    fn with_own_circuit(&self) -> Self {
        Self {
            circuit: Arc::new(Circuit::new(self.idle_timeout)),
            ..self.clone()
        }
    }

    fn retry(&self) -> (RetryPolicy, Arc<Counters>) {
        (self.policy.clone(), self.counters.clone())
    }

    fn stats(&self) -> OriginStats {
        OriginStats {
            circuits_open: self.circuit.is_open().into(),
            ..self.counters.stats()
        }
    }

    /// The stack of wrappers around a service or a directory. `passing_bytes` is for those that
    /// take bodies of any length in one request: what they hold of them at a time.
    fn stack(&self, raw: Arc<dyn Origin>, passing_bytes: Option<u64>) -> Arc<dyn Origin> {
        let circuit = &self.circuit;
        let timed = Arc::new(Timed::new(raw, self.idle_timeout, circuit.clone()));
        let mut origin: Arc<dyn Origin> = Arc::new(Counted::new(timed, self.counters.clone()));
        if let Some(hedging) = &self.hedging {
            origin = Arc::new(Hedged::new(origin, hedging.clone()));
        }
        let limited = Arc::new(Limited::new(origin, self.limiter.clone()));
        let (policy, counters) = (self.policy.clone(), self.counters.clone());
        match passing_bytes {
            None => Arc::new(Resilient::new(limited, policy, counters, circuit.clone())),
            Some(passing_bytes) => Arc::new(Resilient::without_parts(
                limited,
                policy,
                counters,
                circuit.clone(),
                passing_bytes,
            )),
        }
    }
}

/// Opens one origin that is a single bucket, without asking the network.
///
/// # Errors
/// A configuration that makes no sense, or a directory that does not exist.
pub fn open(config: &OriginConfig) -> Result<Arc<dyn Origin>> {
    open_in(config, &Environment::of_process())
}

/// [`open`] with other environment variables than those of the process.
///
/// # Errors
/// As [`open`].
pub fn open_in(config: &OriginConfig, env: &Environment) -> Result<Arc<dyn Origin>> {
    Ok(open_shared(config, env, &mut Circuits::default())?.0)
}

/// What tells one origin from another: its kind, address, bucket and prefix, as far as they are
/// known without asking the network. Not credentials, limits or the region: if those change, it is
/// still the same origin.
///
/// # Errors
/// A configuration that makes no sense.
fn identity_of(config: &OriginConfig, env: &Environment) -> Result<String> {
    let address = |text: &str| {
        let url = url::Url::parse(text).map_or_else(|_| text.to_owned(), |u| u.to_string());
        url.trim_end_matches('/').to_owned()
    };
    let set = |endpoint: Option<&str>, default: &str| endpoint.map_or(default.to_owned(), address);
    Ok(match config.check()? {
        OriginUrl::S3 { bucket, prefix } => {
            let settings = AwsSettings::find(config, env)?;
            let endpoint = set(settings.endpoint.as_deref(), "aws");
            format!("s3 {endpoint} {} {prefix}", bucket.unwrap_or_default())
        }
        OriginUrl::Gcs { bucket, prefix } => {
            let endpoint = set(config.endpoint.as_deref(), "google");
            format!("gs {endpoint} {bucket} {prefix}")
        }
        OriginUrl::Azure { container, prefix } => {
            let account = config.account.clone();
            let account = account.or_else(|| std::env::var("AZURE_STORAGE_ACCOUNT_NAME").ok());
            let endpoint = set(config.endpoint.as_deref(), &account.unwrap_or_default());
            format!("az {endpoint} {container} {prefix}")
        }
        OriginUrl::Hub { repository, prefix } => {
            format!("hf {} {repository} {prefix}", hub::endpoint(config)?)
        }
        OriginUrl::Web { base } => format!("web {base}"),
        OriginUrl::Directory { path, each } => {
            let path = path.canonicalize().unwrap_or(path);
            format!("file {}{}", path.display(), if each { "/*" } else { "" })
        }
    })
}

/// What tells the origin of `bucket` from others, as [`Origins::identities`] does: where `config`
/// leads; or, if `config` stands for many buckets, where this one is among them.
///
/// # Errors
/// A configuration that makes no sense.
pub fn identity_of_bucket(config: &OriginConfig, bucket: &str) -> Result<String> {
    let mut config = config.clone();
    match config.check()? {
        OriginUrl::S3 { bucket: None, .. } => config.url = format!("s3://{bucket}"),
        OriginUrl::Directory { path, each: true } => {
            config.url = path.join(bucket).display().to_string();
        }
        _ => {}
    }
    identity_of(&config, &Environment::of_process())
}

fn open_shared(
    config: &OriginConfig,
    env: &Environment,
    circuits: &mut Circuits,
) -> Result<(Arc<dyn Origin>, Shared)> {
    let url = config.check()?;
    let shared = Shared::new(config, circuits.of(config, &url));
    let (raw, prefix, passing_bytes): (Arc<dyn Origin>, String, Option<u64>) = match url {
        OriginUrl::S3 {
            bucket: Some(bucket),
            prefix,
        } => {
            let client = S3Endpoint::new(config, env)?.client(Address::Bucket(bucket))?;
            (
                Arc::new(S3Origin::new(client, shared.retry())),
                prefix,
                None,
            )
        }
        OriginUrl::Gcs { bucket, prefix } => {
            let client = S3Endpoint::google(config, &bucket)?.client(Address::Bucket(bucket))?;
            // It accepts bodies of any length by itself.
            (
                Arc::new(S3Origin::new(client, shared.retry())),
                prefix,
                Some(GOOGLE_PIECE_BYTES),
            )
        }
        OriginUrl::Azure { container, prefix } => (
            Arc::new(AzureOrigin::new(config, &container)?),
            prefix,
            None,
        ),
        OriginUrl::Hub { repository, prefix } => (
            Arc::new(HubOrigin::new(config, repository)?),
            prefix,
            Some(PASSING_BODY_BYTES),
        ),
        OriginUrl::Web { base } => (
            Arc::new(WebOrigin::new(config, base)?),
            String::new(),
            Some(PASSING_BODY_BYTES),
        ),
        OriginUrl::Directory { path, each: false } => (
            Arc::new(LocalOrigin::open(&path)?),
            String::new(),
            Some(PASSING_BODY_BYTES),
        ),
        OriginUrl::S3 { bucket: None, .. } | OriginUrl::Directory { each: true, .. } => {
            return Err(
                Error::invalid(format!("{:?} stands for many buckets", config.url))
                    .hint("map it under the name \"*\""),
            );
        }
    };
    let origin = shared.stack(Prefixed::wrap(raw, &prefix), passing_bytes);
    Ok((origin, shared))
}

enum Source {
    Endpoint(S3Endpoint),
    Directories(PathBuf),
}

/// Many buckets behind one configured origin.
struct Wildcard {
    config: OriginConfig,
    source: Source,
    shared: Shared,
    /// Whether each bucket has its own address, and so its own circuit: Amazon's addresses are by
    /// region.
    own_circuits: bool,
    open: Mutex<OpenBuckets>,
    exists: Mutex<HashMap<String, (Instant, bool)>>,
    looks: Arc<Semaphore>,
    /// Of all directories: they are mostly on one file system.
    threads: local::Threads,
    /// The names that listings of directories keep.
    listings: local::Listings,
}

#[derive(Default)]
struct OpenBuckets {
    by_name: HashMap<String, (Arc<dyn Origin>, Arc<Circuit>)>,
    /// Oldest first.
    order: VecDeque<String>,
}

impl Wildcard {
    fn new(config: &OriginConfig, circuits: &mut Circuits) -> Result<Self> {
        let url = config.check()?;
        let circuit = circuits.of(config, &url);
        let source = match url {
            OriginUrl::S3 { bucket: None, .. } => {
                Source::Endpoint(S3Endpoint::new(config, &Environment::of_process())?)
            }
            OriginUrl::Directory { path, each: true } => {
                let path = path.canonicalize().map_err(|e| {
                    Error::invalid(format!("the directory of buckets {}: {e}", path.display()))
                        .hint("create it, or correct the origin's url")
                })?;
                Source::Directories(path)
            }
            _ => {
                return Err(
                    Error::invalid(format!("{:?} is one bucket", config.url)).hint(
                        "give it a name, or write s3:// alone for an endpoint and \
                        file:///dir/* for a directory of buckets",
                    ),
                );
            }
        };
        let own_circuits = matches!(&source, Source::Endpoint(s3) if s3.is_by_region());
        Ok(Self {
            config: config.clone(),
            source,
            own_circuits,
            shared: Shared::new(config, circuit),
            open: Mutex::default(),
            exists: Mutex::default(),
            looks: Arc::new(Semaphore::new(LOOKS_AT_ONCE)),
            threads: local::Threads::default(),
            listings: local::Listings::default(),
        })
    }

    fn describe(&self) -> String {
        match &self.source {
            Source::Endpoint(endpoint) => endpoint.describe(),
            Source::Directories(path) => format!("file://{}/*", path.display()),
        }
    }

    /// The same as [`Wildcard::get`] for the runtime's threads: a directory is looked at on
    /// another.
    async fn find(self: &Arc<Self>, bucket: &str) -> Result<Arc<dyn Origin>> {
        if matches!(self.source, Source::Endpoint(_)) {
            return self.get(bucket);
        }
        if let Some(origin) = self.seen_lately(bucket) {
            return Ok(origin);
        }
        let look = async {
            let place = self.looks.clone().acquire_owned().await;
            let place = place.map_err(|_| Error::internal("no directory is looked at any more"))?;
            if let Some(origin) = self.seen_lately(bucket) {
                return Ok(origin);
            }
            let (this, bucket) = (self.clone(), bucket.to_owned());
            let looked = threads::blocking(move || {
                let _place = place;
                let origin = this.get(&bucket)?;
                this.keep_exists(&bucket, true);
                Ok(origin)
            });
            looked.await.map_err(|e| e.context("work on files"))?
        };
        if let Ok(found) = timeout(LOOK_TIMEOUT, look).await {
            return found;
        }
        let open = self.open.lock().by_name.get(bucket).map(|o| o.0.clone());
        open.ok_or_else(|| {
            Error::new(
                ErrorKind::OriginUnavailable,
                format!("{} does not say whether it has {bucket:?}", self.describe()),
            )
            .hint("does its mount hang?")
        })
    }

    /// An open bucket whose directory was there a moment ago.
    fn seen_lately(&self, bucket: &str) -> Option<Arc<dyn Origin>> {
        let lately = |(at, exists): &(Instant, bool)| *exists && at.elapsed() < SEEN_FOR;
        if !self.exists.lock().get(bucket).is_some_and(lately) {
            return None;
        }
        self.open.lock().by_name.get(bucket).map(|o| o.0.clone())
    }

    /// Looks at a directory of buckets on this thread.
    fn get(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        name::validate_bucket(bucket)?;
        if let Source::Directories(root) = &self.source
            && !root.join(bucket).is_dir()
        {
            self.forget(bucket);
            return Err(Error::bucket_not_found(format!(
                "the directory {bucket:?} does not exist in {}",
                root.display()
            )));
        }
        if let Some((origin, _)) = self.open.lock().by_name.get(bucket) {
            return Ok(origin.clone());
        }
        let (raw, passing_bytes): (Arc<dyn Origin>, Option<u64>) = match &self.source {
            Source::Endpoint(endpoint) => (
                Arc::new(S3Origin::new(
                    endpoint.client(Address::Bucket(bucket.to_owned()))?,
                    self.shared.retry(),
                )),
                None,
            ),
            Source::Directories(root) => (
                Arc::new(LocalOrigin::open_with(
                    &root.join(bucket),
                    self.threads.clone(),
                    self.listings.clone(),
                )?),
                Some(PASSING_BODY_BYTES),
            ),
        };
        let shared = if self.own_circuits {
            self.shared.with_own_circuit()
        } else {
            self.shared.clone()
        };
        let origin = shared.stack(raw, passing_bytes);
        let mut open = self.open.lock();
        // Another may have been first: all must use one, whose lock orders conditional writes.
        if let Some((origin, _)) = open.by_name.get(bucket) {
            return Ok(origin.clone());
        }
        if open.by_name.len() >= OPEN_BUCKETS_MAX
            && let Some(oldest) = open.order.pop_front()
        {
            open.by_name.remove(&oldest);
        }
        open.by_name
            .insert(bucket.to_owned(), (origin.clone(), shared.circuit));
        open.order.push_back(bucket.to_owned());
        Ok(origin)
    }

    fn forget(&self, bucket: &str) {
        let mut open = self.open.lock();
        if open.by_name.remove(bucket).is_some() {
            open.order.retain(|name| name != bucket);
        }
        self.exists.lock().remove(bucket);
    }

    async fn exists(self: &Arc<Self>, bucket: &str) -> Result<bool> {
        let origin = match self.find(bucket).await {
            Ok(origin) => origin,
            Err(e) if matches!(e.kind(), ErrorKind::BucketNotFound | ErrorKind::Invalid) => {
                return Ok(false);
            }
            Err(e) => return Err(e),
        };
        if matches!(self.source, Source::Directories(_)) {
            return Ok(true);
        }
        if let Some((at, known)) = self.exists.lock().get(bucket)
            && at.elapsed() < EXISTS_TTL
        {
            return Ok(*known);
        }
        let found = match origin
            .list(ListRequest {
                max_keys: 1,
                ..Default::default()
            })
            .await
        {
            Ok(_) => true,
            Err(e) if matches!(e.kind(), ErrorKind::BucketNotFound | ErrorKind::NotFound) => false,
            Err(e) => return Err(e),
        };
        self.keep_exists(bucket, found);
        Ok(found)
    }

    fn keep_exists(&self, bucket: &str, found: bool) {
        let mut exists = self.exists.lock();
        if exists.len() >= OPEN_BUCKETS_MAX {
            exists.retain(|_, (at, _)| at.elapsed() < EXISTS_TTL);
            if exists.len() >= OPEN_BUCKETS_MAX {
                exists.clear();
            }
        }
        exists.insert(bucket.to_owned(), (Instant::now(), found));
    }

    fn stats(&self) -> OriginStats {
        let mut stats = self.shared.stats();
        if self.own_circuits {
            let open = self.open.lock();
            let circuits = open.by_name.values().filter(|(_, c)| c.is_open());
            stats.circuits_open = circuits.count() as u64;
        }
        stats
    }

    async fn list(&self) -> Result<Vec<ListedBucket>> {
        match &self.source {
            Source::Endpoint(endpoint) => endpoint.list_buckets().await,
            Source::Directories(root) => {
                let root = root.clone();
                self.threads.run(move || local::buckets(&root)).await?
            }
        }
    }
}

/// An origin under a name.
#[derive(Clone)]
struct Named {
    origin: Arc<dyn Origin>,
    /// `None` for an origin that was passed in ready-made.
    configured: Option<(OriginConfig, Shared)>,
    /// For a directory, when it was made; otherwise 0.
    created_ms: i64,
}

/// Bucket names, as clients see them, and the origins behind them.
#[derive(Default)]
pub struct Origins {
    named: BTreeMap<String, Named>,
    wildcards: Vec<Arc<Wildcard>>,
    /// What identifies the configured ones ([`identity_of`]).
    identities: BTreeMap<String, String>,
    wildcard_identities: Vec<String>,
    circuits: Circuits,
}

impl Origins {
    /// Without any mapping: no name leads to an origin yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// From a configuration: bucket name → origin. A wildcard's name is `*` or begins with it.
    ///
    /// # Errors
    /// The first mapping that makes no sense, with its name.
    pub fn from_configs(configs: &BTreeMap<String, OriginConfig>) -> Result<Self> {
        let mut origins = Self::new();
        for (name, config) in configs {
            origins
                .add_config(name, config)
                .map_err(|e| e.context(format_args!("origin {name:?}")))?;
        }
        Ok(origins)
    }

    /// Maps `bucket` to the configured origin; a name that begins with `*` adds a wildcard.
    pub fn add_config(&mut self, bucket: &str, config: &OriginConfig) -> Result<()> {
        let env = Environment::of_process();
        let identity = identity_of(config, &env)?;
        if bucket.starts_with(WILDCARD) {
            let wildcard = Wildcard::new(config, &mut self.circuits)?;
            self.wildcards.push(Arc::new(wildcard));
            self.wildcard_identities.push(identity);
            return Ok(());
        }
        let (origin, shared) = open_shared(config, &env, &mut self.circuits)?;
        let created_ms = match config.check()? {
            OriginUrl::Directory { path, .. } => local::created_ms(&path),
            _ => 0,
        };
        let named = Named {
            origin,
            configured: Some((config.clone(), shared)),
            created_ms,
        };
        self.insert(bucket, named)?;
        self.identities.insert(bucket.to_owned(), identity);
        Ok(())
    }

    /// What identifies the origin of each mapped bucket, and of all other names together, so that a
    /// cache keeps data of different origins apart.
    pub fn identities(&self) -> (&BTreeMap<String, String>, String) {
        (&self.identities, self.wildcard_identities.join("\n"))
    }

    /// [`Origins::add_config`], but an origin that `before` has under this name with exactly this
    /// configuration is reused, with its connections, limits and counters.
    ///
    /// # Errors
    /// As [`Origins::add_config`].
    pub fn add_config_as_in(
        &mut self,
        before: &Origins,
        bucket: &str,
        config: &OriginConfig,
    ) -> Result<()> {
        if bucket.starts_with(WILDCARD) {
            if let Some(same) = before.wildcards.iter().find(|w| w.config == *config) {
                self.wildcards.push(same.clone());
                let identity = identity_of(config, &Environment::of_process())?;
                self.wildcard_identities.push(identity);
                return Ok(());
            }
        } else if let Some(named) = before.named.get(bucket)
            && let Some((was, _)) = &named.configured
            && was == config
        {
            self.insert(bucket, named.clone())?;
            if let Some(identity) = before.identities.get(bucket) {
                self.identities.insert(bucket.to_owned(), identity.clone());
            }
            return Ok(());
        }
        self.add_config(bucket, config)
    }

    /// The name that a URL has by default, for `--origin URL` without a name: the bucket's, the
    /// directory's, the host's; `*` for wildcards.
    pub fn default_name(url: &OriginUrl) -> Option<String> {
        let name = match url {
            _ if url.is_wildcard() => return Some(WILDCARD.to_owned()),
            OriginUrl::S3 { bucket, .. } => bucket.clone()?,
            OriginUrl::Gcs { bucket, .. } => bucket.clone(),
            OriginUrl::Azure { container, .. } => container.clone(),
            OriginUrl::Hub { repository, .. } => repository.name.rsplit('/').next()?.to_owned(),
            OriginUrl::Web { base } => base.host_str()?.to_owned(),
            OriginUrl::Directory { path, .. } => {
                path.canonicalize().ok()?.file_name()?.to_str()?.to_owned()
            }
        };
        name::validate_bucket(&name).ok().map(|()| name)
    }

    /// Maps `bucket` to an existing origin, without further wrappers.
    pub fn add(&mut self, bucket: &str, origin: Arc<dyn Origin>) -> Result<()> {
        let named = Named {
            origin,
            configured: None,
            created_ms: 0,
        };
        self.insert(bucket, named)
    }

    fn insert(&mut self, bucket: &str, named: Named) -> Result<()> {
        name::validate_bucket(bucket)?;
        if self.named.insert(bucket.to_owned(), named).is_some() {
            return Err(
                Error::invalid(format!("the bucket {bucket:?} is mapped twice"))
                    .hint("each name leads to one origin"),
            );
        }
        Ok(())
    }

    /// The origin behind a bucket name, as [`Origins::get`], for the runtime's threads: directories
    /// are looked at on another, and one that was there a moment ago is not looked at again.
    ///
    /// # Errors
    /// `OriginUnavailable` if a directory does not answer and was not used before.
    pub async fn find(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        if let Some(named) = self.named.get(bucket) {
            return Ok(named.origin.clone());
        }
        for wildcard in &self.wildcards {
            match wildcard.find(bucket).await {
                Err(e) if e.kind() == ErrorKind::BucketNotFound => {}
                other => return other,
            }
        }
        Err(self.unknown(bucket))
    }

    /// The origin behind a bucket name. Does not use the network: if a bucket of an S3 wildcard
    /// does not exist, the first request shows that. A directory of buckets is looked at, on this
    /// thread.
    pub fn get(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        if let Some(named) = self.named.get(bucket) {
            return Ok(named.origin.clone());
        }
        for wildcard in &self.wildcards {
            match wildcard.get(bucket) {
                Err(e) if e.kind() == ErrorKind::BucketNotFound => {}
                other => return other,
            }
        }
        Err(self.unknown(bucket))
    }

    /// The same for a bucket that may have to be created. If a directory of buckets is mapped, this
    /// program creates new ones there.
    ///
    /// # Errors
    /// `BucketNotFound` if no origin can be asked to create it.
    pub fn get_to_be(&self, bucket: &str) -> Result<Arc<dyn Origin>> {
        let made_here = |w: &Arc<Wildcard>| matches!(w.source, Source::Directories(_));
        if !self.named.contains_key(bucket) && self.wildcards.iter().any(made_here) {
            return Err(self.unknown(bucket));
        }
        self.get(bucket)
    }

    fn unknown(&self, bucket: &str) -> Error {
        let mut known: Vec<String> = self.named.keys().take(HINT_NAMES_MAX).cloned().collect();
        if self.named.len() > HINT_NAMES_MAX {
            known.push(format!("{} more", self.named.len() - HINT_NAMES_MAX));
        }
        known.extend(
            self.wildcards
                .iter()
                .map(|w| format!("those of {}", w.describe())),
        );
        let e = Error::bucket_not_found(format!(
            "the bucket {:?} is not served here",
            name::shorten(bucket)
        ));
        if known.is_empty() {
            e.hint("no origin is configured")
        } else {
            e.hint(format!("buckets here: {}", known.join(", ")))
        }
    }

    /// Whether a bucket can be used. Mapped names can; for others the wildcard's origin is asked,
    /// and its answer kept for a moment.
    pub async fn exists(&self, bucket: &str) -> Result<bool> {
        if self.named.contains_key(bucket) {
            return Ok(true);
        }
        for wildcard in &self.wildcards {
            if wildcard.exists(bucket).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether an origin is configured under exactly this name.
    pub fn is_mapped(&self, bucket: &str) -> bool {
        self.named.contains_key(bucket)
    }

    /// The kind of the origin behind a bucket ([`OriginUrl::provider`]); that of a directory if
    /// nothing is configured for the name. Does not ask the origin.
    pub fn provider(&self, bucket: &str) -> &'static str {
        let of = |config: &OriginConfig| config.check().map_or("ais", |url| url.provider());
        if let Some(named) = self.named.get(bucket) {
            return named.configured.as_ref().map_or("ais", |(c, _)| of(c));
        }
        // Without an endpoint it is a directory, or nothing: neither has to be looked at.
        let Some(endpoint) =
            (self.wildcards.iter()).position(|w| matches!(w.source, Source::Endpoint(_)))
        else {
            return "ais";
        };
        let has = |w: &&Arc<Wildcard>| match &w.source {
            Source::Directories(root) => {
                w.open.lock().by_name.contains_key(bucket) || root.join(bucket).is_dir()
            }
            Source::Endpoint(_) => true,
        };
        let wildcard = self.wildcards[..=endpoint].iter().find(has);
        wildcard.map_or("ais", |w| of(&w.config))
    }

    /// All buckets, by name. A wildcard whose origin cannot be listed is left out, with a warning in
    /// the log.
    pub async fn list_buckets(&self) -> Result<Vec<ListedBucket>> {
        let named = self.named.iter();
        let mut buckets: Vec<ListedBucket> = named
            .map(|(name, named)| ListedBucket {
                name: name.clone(),
                created_ms: named.created_ms,
            })
            .collect();
        for wildcard in &self.wildcards {
            match wildcard.list().await {
                Ok(more) => buckets.extend(more),
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::PermissionDenied | ErrorKind::Unsupported
                    ) =>
                {
                    tracing::warn!(origin = wildcard.describe(), error = %e, "the buckets of \
                        this origin cannot be listed");
                }
                Err(e) => return Err(e),
            }
        }
        buckets.retain(|b| name::validate_bucket(&b.name).is_ok());
        // Of several with one name, the first is the one that the name leads to.
        buckets.sort_by(|a, b| a.name.cmp(&b.name));
        buckets.dedup_by(|later, first| later.name == first.name);
        Ok(buckets)
    }

    /// Forgets what is known about a bucket of a wildcard: it was created or removed.
    pub fn forget_bucket(&self, bucket: &str) {
        for wildcard in &self.wildcards {
            wildcard.forget(bucket);
        }
    }

    fn directories(&self, what: &str) -> Result<(&Arc<Wildcard>, PathBuf)> {
        let found = self.wildcards.iter().find_map(|w| match &w.source {
            Source::Directories(root) => Some((w, root.clone())),
            Source::Endpoint(_) => None,
        });
        found.ok_or_else(|| {
            Error::unsupported(format!(
                "{what}: the buckets of this node are its configured origins"
            ))
            .hint(
                "create it at the origin and map it, or map a directory of buckets: file:///dir/*",
            )
        })
    }

    /// Creates a bucket, if a directory of buckets is mapped.
    pub async fn create_bucket(&self, bucket: &str) -> Result<()> {
        name::validate_bucket(bucket)?;
        if self.named.contains_key(bucket) {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("the bucket {bucket:?} already exists"),
            ));
        }
        let (wildcard, root) = self.directories(&format!("create the bucket {bucket:?}"))?;
        let name = bucket.to_owned();
        let making = wildcard
            .threads
            .run(move || local::create_bucket(&root, &name));
        let made = making.await;
        wildcard.forget(bucket);
        made?
    }

    /// Removes an empty bucket, if a directory of buckets is mapped.
    pub async fn remove_bucket(&self, bucket: &str) -> Result<()> {
        let what = format!("remove the bucket {bucket:?}");
        if self.named.contains_key(bucket) {
            return Err(
                Error::unsupported(format!("{what}: it is a configured origin"))
                    .hint("remove it from the configuration"),
            );
        }
        let (wildcard, root) = match self.directories(&what) {
            Ok(found) => found,
            Err(e) => {
                return Err(if self.exists(bucket).await? {
                    e
                } else {
                    self.unknown(bucket)
                });
            }
        };
        let name = bucket.to_owned();
        let removing = wildcard
            .threads
            .run(move || local::remove_bucket(&root, &name));
        let removed = removing.await;
        wildcard.forget(bucket);
        removed?
    }

    /// Counters and gauges by the name of the mapping: a bucket, or `*` for a wildcard; further
    /// wildcards are `*2`, `*3` and so on.
    pub fn stats(&self) -> Vec<(String, OriginStats)> {
        let named = self.named.iter().filter_map(|(name, named)| {
            let (_, shared) = named.configured.as_ref()?;
            Some((name.clone(), shared.stats()))
        });
        let wild = self.wildcards.iter().enumerate().map(|(i, w)| {
            let name = match i {
                0 => WILDCARD.to_owned(),
                more => format!("{WILDCARD}{}", more + 1),
            };
            (name, w.stats())
        });
        named.chain(wild).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    fn config(url: String) -> OriginConfig {
        OriginConfig {
            url,
            anonymous: true,
            ..Default::default()
        }
    }

    #[tokio::test]
    async fn names_lead_to_origins() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        std::fs::create_dir(root.join("one")).unwrap();
        std::fs::create_dir_all(root.join("many/aa")).unwrap();
        let mut origins = Origins::new();
        origins
            .add_config("first", &config(format!("file://{}/one", root.display())))
            .unwrap();
        assert!(
            origins
                .add_config("first", &config(format!("file://{}/one", root.display())))
                .is_err()
        );
        let e = origins.get("other").err().unwrap();
        assert_eq!(e.kind(), ErrorKind::BucketNotFound);
        assert!(e.to_string().contains("first"), "{e}");
        assert_eq!(
            origins.create_bucket("bb").await.unwrap_err().kind(),
            ErrorKind::Unsupported
        );

        origins
            .add_config("*", &config(format!("file://{}/many/*", root.display())))
            .unwrap();
        let listed = origins.list_buckets().await.unwrap();
        assert!(listed.iter().all(|b| b.created_ms > 0), "{listed:?}");
        let names: Vec<&str> = listed.iter().map(|b| &*b.name).collect();
        assert_eq!(names, ["aa", "first"]);
        origins.create_bucket("bb").await.unwrap();
        assert_eq!(
            origins.create_bucket("bb").await.unwrap_err().kind(),
            ErrorKind::AlreadyExists
        );
        assert_eq!(
            origins.create_bucket("first").await.unwrap_err().kind(),
            ErrorKind::AlreadyExists
        );
        assert!(origins.create_bucket("../x").await.is_err());
        let bucket = origins.get("bb").unwrap();
        bucket
            .put("a/b/c", Default::default(), Some(0), crate::body::empty())
            .await
            .unwrap();
        assert_eq!(
            origins.remove_bucket("bb").await.unwrap_err().kind(),
            ErrorKind::Conflict
        );
        bucket.delete("a/b/c").await.unwrap();
        std::fs::create_dir_all(root.join("many/bb/left/over")).unwrap();
        origins.remove_bucket("bb").await.unwrap();
        assert!(
            !origins.exists("bb").await.unwrap()
                && origins.exists("aa").await.unwrap()
                && origins.exists("first").await.unwrap()
        );
        assert_eq!(
            origins.get("bb").err().unwrap().kind(),
            ErrorKind::BucketNotFound
        );
        assert_eq!(
            origins.remove_bucket("bb").await.unwrap_err().kind(),
            ErrorKind::BucketNotFound
        );
        assert_eq!(
            origins.remove_bucket("first").await.unwrap_err().kind(),
            ErrorKind::Unsupported
        );
        let stats = origins.stats();
        assert_eq!(stats.len(), 2);
        assert_eq!(stats[1].1.requests(crate::Operation::Put), 1);
    }

    #[test]
    fn a_directory_holds_little_of_a_body() {
        let dir = tempfile::tempdir().unwrap();
        let directory = open(&config(format!("file://{}", dir.path().display()))).unwrap();
        let service = open(&OriginConfig {
            endpoint: Some("http://127.0.0.1:1".into()),
            ..config("s3://bucket".into())
        })
        .unwrap();
        let mib = |n: u64| n << 20;
        for (size, of_directory, of_service) in [
            (None, mib(1), mib(32)),
            (Some(mib(1024)), mib(1), mib(32)),
            (Some(100), 100, 100),
        ] {
            assert_eq!(directory.put_memory_bytes(size), of_directory);
            assert_eq!(service.put_memory_bytes(size), of_service);
        }
        for (size, most) in [(mib(64), mib(1)), (mib(5), mib(5))] {
            assert_eq!(directory.part_memory_bytes(size), most);
            assert_eq!(service.part_memory_bytes(size), most);
        }
    }

    #[test]
    fn an_origin_that_is_only_read_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let directory = open(&config(format!("file://{}", dir.path().display()))).unwrap();
        directory.check_writable().unwrap();
        let web = open(&config("http://127.0.0.1:1/files".into())).unwrap();
        let e = web.check_writable().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
    }

    #[test]
    fn what_is_configured_as_before_stays_open() {
        let dir = tempfile::tempdir().unwrap();
        let same = config(format!("file://{}", dir.path().display()));
        let wild = config(format!("file://{}/*", dir.path().display()));
        let mut before = Origins::new();
        before.add_config("aa", &same).unwrap();
        before.add_config("bb", &same).unwrap();
        before.add_config("*", &wild).unwrap();
        let mut after = Origins::new();
        let changed = OriginConfig {
            attempts: 9,
            ..same.clone()
        };
        after.add_config_as_in(&before, "aa", &same).unwrap();
        after.add_config_as_in(&before, "bb", &changed).unwrap();
        after.add_config_as_in(&before, "cc", &same).unwrap();
        after.add_config_as_in(&before, "*", &wild).unwrap();
        let is_same =
            |name: &str| Arc::ptr_eq(&before.get(name).unwrap(), &after.get(name).unwrap());
        assert!(is_same("aa") && !is_same("bb") && after.get("cc").is_ok());
        assert!(Arc::ptr_eq(&before.wildcards[0], &after.wildcards[0]));
        let names: Vec<_> = after.stats().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["aa", "bb", "cc", "*"]);
    }

    #[tokio::test]
    async fn a_directory_of_buckets_that_hangs_holds_up_nobody_for_long() {
        let dir = tempfile::tempdir().unwrap();
        for bucket in ["used", "unused"] {
            std::fs::create_dir(dir.path().join(bucket)).unwrap();
        }
        let wild = config(format!("file://{}/*", dir.path().display()));
        let mut origins = Origins::new();
        origins.add_config("*", &wild).unwrap();
        let kind = async |bucket| origins.find(bucket).await.err().map(|e| e.kind());
        assert_eq!(kind("none").await, Some(ErrorKind::BucketNotFound));
        let used = origins.find("used").await.unwrap();

        // As if that many threads waited for the mount.
        let w = &origins.wildcards[0];
        let all = (w
            .looks
            .clone()
            .acquire_many_owned(LOOKS_AT_ONCE as u32)
            .await)
            .unwrap();
        assert!(w.exists.lock().contains_key("used"));
        w.keep_exists("used", true);
        let again = origins.find("used").now_or_never();
        let again = again.expect("it was there a moment ago").unwrap();
        assert!(Arc::ptr_eq(&used, &again));
        w.exists.lock().clear();
        let (again, unused) = tokio::join!(origins.find("used"), kind("unused"));
        assert!(Arc::ptr_eq(&used, &again.unwrap()), "it is used as it is");
        assert_eq!(unused, Some(ErrorKind::OriginUnavailable));

        drop(all);
        assert_eq!(kind("unused").await, None);
        std::fs::remove_dir(dir.path().join("used")).unwrap();
        w.exists.lock().clear();
        assert_eq!(kind("used").await, Some(ErrorKind::BucketNotFound));
    }

    #[test]
    fn open_buckets_are_bounded() {
        let config = OriginConfig {
            endpoint: Some("http://127.0.0.1:1".into()),
            ..config("s3://".into())
        };
        let w = Wildcard::new(&config, &mut Circuits::default()).unwrap();
        for i in 0..OPEN_BUCKETS_MAX + 10 {
            w.get(&format!("bucket-{i}")).unwrap();
        }
        let open = w.open.lock();
        assert_eq!(
            (open.by_name.len(), open.order.len()),
            (OPEN_BUCKETS_MAX, OPEN_BUCKETS_MAX)
        );
        assert!(!open.by_name.contains_key("bucket-0") && open.by_name.contains_key("bucket-1033"));
    }

    #[test]
    fn an_origin_is_known_by_where_it_is() {
        let of = |config: &OriginConfig| identity_of(config, &Environment::of_process()).unwrap();
        let base = OriginConfig {
            endpoint: Some("http://127.0.0.1:9000".into()),
            ..config("s3://bucket/prefix".into())
        };
        let same = [
            OriginConfig {
                access_key_id: Some("id".into()),
                secret_access_key: Some(crate::Secret::new("secret")),
                anonymous: false,
                requests_in_flight: 3,
                bytes_per_second: Some(9),
                ..base.clone()
            },
            OriginConfig {
                endpoint: Some("http://127.0.0.1:9000/".into()),
                ..base.clone()
            },
            OriginConfig {
                url: "s3://bucket/prefix/".into(),
                ..base.clone()
            },
        ];
        for config in same {
            assert_eq!(of(&config), of(&base));
        }
        let endpoint = OriginConfig {
            endpoint: Some("http://127.0.0.1:9001".into()),
            ..base.clone()
        };
        let mut all = vec![of(&base), of(&endpoint)];
        for url in [
            "s3://bucket/other",
            "s3://bucket",
            "s3://other/prefix",
            "s3://",
            "gs://bucket/prefix",
        ] {
            all.push(of(&OriginConfig {
                url: url.into(),
                ..base.clone()
            }));
        }
        for url in ["file:///tmp", "file:///tmp/*", "file:///usr"] {
            all.push(of(&config(url.into())));
        }
        all.push(of(&config("https://example.com/a/".into())));
        all.push(of(&config("https://example.com/b/".into())));
        let n = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), n, "{all:?}");
    }

    #[test]
    fn urls_have_names() {
        let name = |u: &str| Origins::default_name(&OriginUrl::parse(u).unwrap());
        assert_eq!(name("s3://buc/p").as_deref(), Some("buc"));
        assert_eq!(name("s3://").as_deref(), Some("*"));
        assert_eq!(
            name("https://example.com/x").as_deref(),
            Some("example.com")
        );
        assert_eq!(name("/tmp").as_deref(), Some("tmp"));
        assert_eq!(name("/"), None);
    }
}
