//! The datasets of a node: opened once for all who ask, kept, updated by reading only what changed.
//!
//! [`Datasets::open`], in order: parse the patterns (`pattern.rs`), check what the caller may do
//! (`access.rs`), read the named manifests and check each of their lines likewise (`manifest.rs`),
//! join an opening of the same spec and lines that is under way or start one in its own task. That
//! task lists (`list.rs`), chooses files and format (`select.rs`), reads the indexes of new or
//! changed files (`open.rs`), and builds the dataset (`dataset.rs`). The result is kept in RAM
//! within a limit. In a cluster, that task asks the node which opens this spec for all of them
//! (`home.rs`), and does all this itself if that fails.
//!
//! Invariants: one opening of a spec at a time; a dataset that was handed out never changes; a
//! caller never gets a dataset with a file it may not read. An opening looks up only names that
//! each caller who waits for it may read, so its errors, and its reports on files that it left out,
//! are safe for all of them.

use super::{
    access::check_wanted,
    dataset::Parts,
    disk::Disk,
    home::Homes,
    labels::Labels,
    list::list,
    manifest::{self, Manifest},
    open::{Indexed, Order, index},
    pattern::{self, Wanted},
    progress::{Progress, Watched},
    schema::common_schema,
    select::{Companions, Selected, select, with_indexes},
    spec,
    table::FileTableBuilder,
    told::Told,
};
use crate::{
    Access, Dataset, DatasetSpec, FileTable, Format, Part, blocking::blocking, stats::DatasetStats,
};
use arrow_schema::SchemaRef;
use forebay_core::{
    Error, ErrorKind, ObjectName, Reservation, Result, limits, request, sync::Mutex,
};
use forebay_engine::{Engine, Flights, Follower, Freshness, Joined};
use forebay_format::{
    ArchiveKind,
    tabular::{IndexOptions, format},
};
use futures::future::BoxFuture;
use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};
use xxhash_rust::xxh3::Xxh3;

/// Dataset settings for operators.
#[derive(Clone, Debug)]
pub struct DatasetsConfig {
    /// Memory for datasets, including those in use; beyond it, the least recently used ones are
    /// forgotten.
    pub memory_bytes: u64,
    /// Where indexes are kept; `None`: only in RAM.
    pub dir: Option<PathBuf>,
    /// How much that directory may take.
    pub disk_bytes: u64,
}

impl Default for DatasetsConfig {
    fn default() -> Self {
        Self {
            memory_bytes: limits::DATASETS_MEMORY_DEFAULT_BYTES,
            dir: None,
            disk_bytes: limits::DATASETS_DISK_DEFAULT_BYTES,
        }
    }
}

/// The result of an opening.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The version that the spec leads to now.
    pub dataset: Arc<Dataset>,
    /// Files whose footer, headers or directory was read for it.
    pub indexed_files: u64,
    /// Files that were known already.
    pub reused_files: u64,
    /// Bytes that were read for it.
    pub indexed_bytes: u64,
    /// The version that the same spec had at its last opening, if it was another one.
    pub previous: Option<String>,
    /// Files that were left out, and why.
    pub skipped: Vec<(String, Error)>,
    /// How many matching keys are not valid names here (`a//b`), and the first of them.
    pub unreadable: (u64, Option<String>),
    /// How long the opening took; callers who joined it get the same value.
    pub took: Duration,
}

/// The registry; cheap to clone, all clones are one.
#[derive(Clone)]
pub struct Datasets {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Engine,
    config: DatasetsConfig,
    disk: Option<Arc<Disk>>,
    /// By the spec, and the contents of its manifests.
    /// (Those that ask another node are apart.)
    opening: Flights<(u128, bool), Opened>,
    /// By the manifest's name.
    manifests: Flights<u128, Arc<Manifest>>,
    /// The progress of each opening.
    progress: Mutex<HashMap<(u128, bool), Arc<Progress>>>,
    kept: Mutex<Kept>,
    told: Told,
    stats: DatasetStats,
    homes: OnceLock<Arc<dyn Homes>>,
}

/// Datasets in RAM.
#[derive(Default)]
struct Kept {
    by_id: HashMap<String, (Arc<Dataset>, u64)>,
    latest: HashMap<u128, String>,
    uses: u64,
}

impl Kept {
    fn get(&mut self, id: &str) -> Option<Arc<Dataset>> {
        self.uses += 1;
        let (dataset, used) = self.by_id.get_mut(id)?;
        *used = self.uses;
        Some(dataset.clone())
    }

    fn latest(&mut self, spec: u128) -> Option<Arc<Dataset>> {
        let id = self.latest.get(&spec)?.clone();
        self.get(&id)
    }

    fn keep(&mut self, spec: Option<u128>, dataset: &Arc<Dataset>, most: u64) {
        self.uses += 1;
        self.by_id
            .insert(dataset.id().to_owned(), (dataset.clone(), self.uses));
        if let Some(spec) = spec {
            self.latest.insert(spec, dataset.id().to_owned());
        }
        let mut total = self.memory_bytes();
        while total > most && self.by_id.len() > 1 {
            let oldest = self
                .by_id
                .iter()
                .filter(|(id, _)| *id != dataset.id())
                .min_by_key(|(_, (_, used))| *used)
                .map(|(id, _)| id.clone());
            let Some((gone, _)) = oldest.and_then(|id| self.by_id.remove(&id)) else {
                break;
            };
            total -= gone.memory_bytes().min(total);
        }
        let by_id = &self.by_id;
        self.latest.retain(|_, id| by_id.contains_key(id));
    }

    fn memory_bytes(&self) -> u64 {
        self.by_id.values().map(|(d, _)| d.memory_bytes()).sum()
    }
}

impl Datasets {
    /// If the directory cannot be used, that is logged, and datasets are kept only in RAM.
    pub fn new(engine: Engine, config: DatasetsConfig) -> Self {
        let disk = config
            .dir
            .clone()
            .and_then(|dir| match Disk::open(dir, config.disk_bytes) {
                Ok(disk) => Some(Arc::new(disk)),
                Err(e) => {
                    tracing::warn!(error = %e.describe(), "indexes of datasets are kept in memory \
                    only");
                    None
                }
            });
        let inner = Inner {
            engine,
            config,
            disk,
            opening: Flights::default(),
            manifests: Flights::default(),
            progress: Mutex::default(),
            kept: Mutex::default(),
            told: Told::default(),
            stats: DatasetStats::default(),
            homes: OnceLock::new(),
        };
        Self {
            inner: Arc::new(inner),
        }
    }

    /// In a cluster: how other nodes are asked to open datasets for this one.
    pub fn set_homes(&self, homes: Arc<dyn Homes>) {
        let _ = self.inner.homes.set(homes);
    }

    pub(super) fn disk(&self) -> Option<Arc<Disk>> {
        self.inner.disk.clone()
    }

    pub(super) fn kept_by_id(&self, id: &str) -> Option<Arc<Dataset>> {
        self.inner.kept.lock().get(id)
    }

    pub(super) fn told(&self) -> &Told {
        &self.inner.told
    }

    /// The memory for what clients tell of datasets.
    pub(super) fn told_most(&self) -> u64 {
        self.inner.config.memory_bytes / limits::COMPOSITIONS_MEMORY_SHARE
    }

    /// The engine that files are listed and read through.
    pub fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// Counters of all openings since the start.
    pub fn stats(&self) -> &DatasetStats {
        &self.inner.stats
    }

    /// Datasets in RAM, and the memory they take.
    pub fn kept(&self) -> (usize, u64) {
        let kept = self.inner.kept.lock();
        (kept.by_id.len(), kept.memory_bytes())
    }

    /// Opens a dataset with its present files. A caller that comes while the same spec is being
    /// opened waits for that opening.
    ///
    /// # Errors
    /// `Invalid` for a spec that makes no sense or files that do not go together,
    /// `PermissionDenied`, `NotFound` if nothing matches, `Corrupt` for a file that cannot be read,
    /// and whatever prevents the origin from answering.
    pub async fn open(&self, spec: &DatasetSpec, access: &dyn Access) -> Result<Opened> {
        self.open_watched(spec, access, &Watched::default()).await
    }

    /// The same; meanwhile `watched` shows how far it is.
    ///
    /// # Errors
    /// As [`Datasets::open`].
    pub fn open_watched<'a>(
        &'a self,
        spec: &'a DatasetSpec,
        access: &'a dyn Access,
        watched: &'a Watched,
    ) -> BoxFuture<'a, Result<Opened>> {
        Box::pin(async move {
            let (spec, wanted, spec_key) = Self::parsed(spec.clone(), access.shared()).await?;
            let part_of = match &spec.part {
                // This checks the caller's right to each of its files.
                Some(part) => Some(self.get(&part.of, access).await?),
                None => None,
            };
            let manifests = self.manifests(&wanted, access).await?;
            let key = match manifests.as_slice() {
                [] => spec_key,
                manifests => {
                    let mut hash = Xxh3::new();
                    hash.update(&spec_key.to_le_bytes());
                    manifests
                        .iter()
                        .for_each(|m| hash.update(&m.digest.to_le_bytes()));
                    hash.digest128()
                }
            };
            let homes = self.inner.homes.get();
            let home = match spec::is_for_home(&spec, &wanted) {
                true => homes.and_then(|homes| homes.home(spec_key)),
                false => None,
            };
            let sources = Sources {
                manifests,
                part_of,
                home,
                ..Sources::of(spec, spec_key, wanted)
            };
            let follower = self.join(key, sources, watched)?;
            let opened = follower.wait().await?;
            opened.dataset.allow(access).await?;
            Ok(opened)
        })
    }

    /// What a spec leads to, if it makes sense and the caller may open it; and its key.
    pub(super) async fn parsed(
        spec: DatasetSpec,
        may: Arc<dyn Access>,
    ) -> Result<(Arc<DatasetSpec>, Vec<Wanted>, u128)> {
        // With a million names, this takes time.
        blocking(move || {
            spec::check(&spec)?;
            let mut wanted = pattern::parse(&spec.sources)?;
            if let Some(format) = spec.format {
                wanted = with_indexes(format, wanted);
            }
            check_wanted(&*may, &spec, &wanted)?;
            let key = spec::key(&spec);
            Ok((Arc::new(spec), wanted, key))
        })
        .await?
    }

    /// Joins an opening that is under way, or starts one, which goes on without its caller.
    ///
    /// # Errors
    /// `Busy` for one too many, or if the memory budget has no room for its names.
    pub(super) fn join(
        &self,
        key: u128,
        sources: Sources,
        watched: &Watched,
    ) -> Result<Follower<Opened>> {
        let key = (key, sources.home.is_some());
        let mut under_way = self.inner.progress.lock();
        match self.inner.opening.join(key) {
            Joined::Follower(follower) => {
                self.inner.stats.joined.add(1);
                if let Some(progress) = under_way.get(&key) {
                    watched.is(progress.clone());
                }
                Ok(follower)
            }
            Joined::Leader(leader) => {
                let room = match under_way.len() {
                    count if count >= limits::DATASETS_OPENING_MAX => {
                        let e = Error::busy(format!("{count} datasets are being opened"));
                        Err(e.retry_after(Duration::from_secs(1)))
                    }
                    _ => self.inner.engine.budget().try_hold(sources.memory_bytes()),
                };
                let held = match room {
                    Ok(held) => held,
                    Err(e) => {
                        leader.publish(Err(e.clone()));
                        return Err(e);
                    }
                };
                let follower = leader.follower();
                let progress = Arc::new(Progress::default());
                watched.is(progress.clone());
                under_way.insert(key, progress.clone());
                let under_way = UnderWay {
                    of: self.inner.clone(),
                    key,
                    progress,
                    _held: held,
                };
                let this = self.clone();
                // `under_way` ends before the flight does, however the flight ends.
                request::spawn(async move {
                    let leader = leader;
                    let opened = this.open_counted(sources, under_way).await;
                    leader.publish(opened);
                });
                Ok(follower)
            }
        }
    }

    /// The manifests of `wanted`, in their order; the caller may read each of their lines. A
    /// manifest that several openings want at the same time is read once.
    async fn manifests(
        &self,
        wanted: &[Wanted],
        access: &dyn Access,
    ) -> Result<Vec<Arc<Manifest>>> {
        let mut manifests = Vec::new();
        for one in wanted {
            let Wanted::Manifest(bucket, key) = one else {
                continue;
            };
            let name = ObjectName::new(bucket.as_str(), key.as_str())?;
            let follower = match self.inner.manifests.join(name.hash128()) {
                Joined::Follower(follower) => follower,
                Joined::Leader(leader) => {
                    let follower = leader.follower();
                    let engine = self.inner.engine.clone();
                    request::spawn(async move {
                        leader.publish(manifest::read(&engine, &name).await.map(Arc::new));
                    });
                    follower
                }
            };
            let (read, may) = (follower.wait().await?, access.shared());
            manifests.push(
                blocking(move || read.check_access(&*may).map(|()| read))
                    .await?
                    .map_err(|e| e.context(format_args!("manifest {bucket}/{key}")))?,
            );
        }
        Ok(manifests)
    }

    async fn open_counted(&self, sources: Sources, under_way: UnderWay) -> Result<Opened> {
        let (began, stats) = (Instant::now(), &self.inner.stats);
        let opened = self.open_now(sources, &under_way.progress, began).await;
        match &opened {
            Ok(opened) => {
                stats.opened.add(1);
                stats.open_us.add(began.elapsed().as_micros() as u64);
                tracing::info!(
                    dataset = ?opened.dataset,
                    indexed = opened.indexed_files,
                    ms = began.elapsed().as_millis() as u64,
                    "opened"
                );
            }
            Err(_) => stats.failed.add(1),
        }
        opened
    }

    /// A dataset that was opened before, by its id.
    ///
    /// # Errors
    /// `NotFound` if it is not known here (any more); `PermissionDenied`.
    pub async fn get(&self, id: &str, access: &dyn Access) -> Result<Arc<Dataset>> {
        let found = self.inner.kept.lock().get(id);
        let found = match found {
            Some(found) => Some(found),
            None => self.kept_on_disk(id).await?,
        };
        let dataset = found.ok_or_else(|| unknown(id))?;
        dataset.allow(access).await?;
        Ok(dataset)
    }

    async fn kept_on_disk(&self, id: &str) -> Result<Option<Arc<Dataset>>> {
        let (disk, id) = (self.inner.disk.clone(), id.to_owned());
        let loaded = blocking(move || disk.and_then(|d| d.by_id(&id))).await?;
        Ok(loaded.map(|dataset| {
            self.inner.stats.loaded.add(1);
            let mut kept = self.inner.kept.lock();
            // Another caller may have loaded it meanwhile.
            let dataset = kept.get(dataset.id()).unwrap_or_else(|| Arc::new(dataset));
            kept.keep(None, &dataset, self.inner.config.memory_bytes);
            dataset
        }))
    }

    /// What the directory of indexes holds: bytes and files.
    pub async fn on_disk(&self) -> (u64, usize) {
        let disk = self.inner.disk.clone();
        blocking(move || disk.map_or((0, 0), |d| d.usage()))
            .await
            .unwrap_or_default()
    }

    /// Datasets in RAM that the caller may read, the most recently used first.
    pub async fn list(&self, access: &dyn Access) -> Vec<Arc<Dataset>> {
        let mut all: Vec<(Arc<Dataset>, u64)> =
            self.inner.kept.lock().by_id.values().cloned().collect();
        all.sort_by_key(|(_, used)| std::cmp::Reverse(*used));
        let mut allowed = Vec::new();
        for (dataset, _) in all {
            if dataset.allow(access).await.is_ok() {
                allowed.push(dataset);
            }
        }
        allowed
    }

    async fn open_now(
        &self,
        sources: Sources,
        progress: &Arc<Progress>,
        began: Instant,
    ) -> Result<Opened> {
        let engine = &self.inner.engine;
        let Sources {
            spec,
            key,
            wanted,
            manifests,
            part_of,
            home,
        } = sources;
        if let (Some(part), Some(of)) = (&spec.part, part_of) {
            return self.open_part(&spec, part, &of, key, progress, began).await;
        }
        if let (Some(home), Some(homes)) = (home, self.inner.homes.get()) {
            let at = (&**homes, home);
            match self.open_at(at, (&spec, key), progress, began).await {
                Ok(opened) => return Ok(opened),
                Err(e) => tracing::debug!(
                    id = request::current().as_deref(),
                    node = format_args!("{home:016x}"),
                    error = %e.describe(),
                    "another node did not open a dataset: this one does"
                ),
            }
        }
        let known = self.known(key).await?;
        let listed = list(
            engine,
            wanted,
            manifests,
            known.clone(),
            spec.begin,
            progress,
        )
        .await?;
        progress.listed(listed.files.len());
        let unreadable = listed.unreadable.clone();
        let of = spec.clone();
        let mut selected = blocking(move || select(listed, of.format, &of.sources)).await??;
        if selected.unsure {
            selected.format = by_first_bytes(engine, &selected.files, selected.format).await?;
        }
        let (of, asked) = (selected.files, engine.clone());
        selected.files = blocking(move || versions_are_known(&asked, &of).map(|()| of)).await??;
        let (dataset, counts) = if selected.format == Format::Objects {
            if spec.schema.is_some() {
                return Err(Error::invalid(
                    "\"schema\" is for files with columns, but these are whole objects",
                )
                .hint("if the files have columns, name their format"));
            }
            let files = Arc::new(selected.files);
            let labels = Labels::of_spec(engine, spec.labels.as_ref(), &files).await?;
            let files = Arc::into_inner(files)
                .ok_or_else(|| Error::internal("the files of an opening are still in use"))?;
            let of = spec.clone();
            let dataset = blocking(move || {
                Dataset::of_objects(files, of.block_rows, labels, spec::options(&of))
            });
            (dataset.await??, Counts::default())
        } else {
            self.of_files(&spec, selected, known.clone(), progress)
                .await?
        };
        let stats = &self.inner.stats;
        stats.files_indexed.add(counts.indexed);
        stats.files_reused.add(counts.reused);
        stats.indexed_bytes.add(counts.bytes);
        stats.files_skipped.add(counts.skipped.len() as u64);
        // One Arc for one dataset, whoever holds it.
        let found = self.inner.kept.lock().get(dataset.id());
        let dataset = found.unwrap_or_else(|| Arc::new(dataset));
        self.keep(key, &dataset).await;
        let previous = known
            .map(|k| k.id().to_owned())
            .filter(|id| id != dataset.id());
        Ok(Opened {
            dataset,
            indexed_files: counts.indexed,
            reused_files: counts.reused,
            indexed_bytes: counts.bytes,
            previous,
            skipped: counts.skipped,
            unreadable: (unreadable.count, unreadable.first),
            took: began.elapsed(),
        })
    }

    /// A part of some files of a dataset. It is kept only in RAM: it is wanted for a short time,
    /// and can be made again without asking the origin.
    async fn open_part(
        &self,
        spec: &DatasetSpec,
        part: &Part,
        of: &Dataset,
        key: u128,
        progress: &Arc<Progress>,
        began: Instant,
    ) -> Result<Opened> {
        let mut files = FileTableBuilder::default();
        for &number in &part.files {
            if number as usize >= of.files().len() {
                return Err(Error::invalid(format!(
                    "the part names file {number}, but the dataset has {} files",
                    of.files().len()
                )));
            }
            let file = of.file(number);
            match ArchiveKind::from_name(file.name.key()) {
                Some(ArchiveKind::Tar | ArchiveKind::TarGz | ArchiveKind::TarLz4) => {}
                _ => {
                    return Err(Error::invalid(format!(
                        "the name of {} is not that of a tar",
                        file.name
                    ))
                    .hint("only .tar, .tgz, .tar.gz and .tar.lz4 files have parts"));
                }
            }
            files.push(&file)?;
        }
        let files = files.finish();
        progress.listed(files.len());
        let selected = Selected {
            files,
            format: Format::Tar,
            companions: Companions::default(),
            unsure: false,
        };
        let opened = self.of_files(spec, selected, None, progress).await;
        // Asking again would be in vain: a part belongs to the versions in its dataset.
        let (dataset, counts) = opened.map_err(|e| match e.kind() {
            ErrorKind::VersionChanged => e.with_kind(ErrorKind::PreconditionFailed),
            _ => e,
        })?;
        self.inner.stats.files_indexed.add(counts.indexed);
        let found = self.inner.kept.lock().get(dataset.id());
        let dataset = found.unwrap_or_else(|| Arc::new(dataset.accounted_to(of)));
        self.inner
            .kept
            .lock()
            .keep(Some(key), &dataset, self.inner.config.memory_bytes);
        Ok(Opened {
            dataset,
            indexed_files: counts.indexed,
            reused_files: counts.reused,
            indexed_bytes: counts.bytes,
            previous: None,
            skipped: counts.skipped,
            unreadable: (0, None),
            took: began.elapsed(),
        })
    }

    /// A dataset of files with indexes.
    async fn of_files(
        &self,
        spec: &DatasetSpec,
        selected: Selected,
        known: Option<Arc<Dataset>>,
        progress: &Arc<Progress>,
    ) -> Result<(Dataset, Counts)> {
        let format = selected.format;
        let wrong = |what: &str| {
            Err(Error::invalid(format!(
                "{what}, but the format of these files is {format}"
            )))
        };
        if spec.labels.is_some() {
            return wrong("labels are for whole objects");
        }
        let named = spec
            .schema
            .as_ref()
            .map(|columns| spec::schema(columns, format))
            .transpose()?;
        if spec.block_size.is_some() && format != Format::LitData {
            return wrong("\"block_size\" is for litData's tokens");
        }
        if spec.example.spec().is_some() && format != Format::TfRecord {
            return wrong("\"example\" is for TFRecord");
        }
        if spec.block_rows.is_some() && spec::has_blocks(format) {
            return wrong("\"block_rows\" is for formats without blocks of their own");
        }
        let mut options = IndexOptions {
            example: spec.example.spec(),
            columns: named.clone(),
            block_tokens: spec.block_size,
            ..IndexOptions::default()
        };
        if let Some(rows) = spec.block_rows {
            (options.block_rows, options.block_bytes) = (rows, u64::MAX);
        }
        if let Some(known) = &known {
            let indexes = (0..known.files().len()).filter_map(|i| known.index(i));
            let mut last: Option<&SchemaRef> = None;
            for schema in indexes.map(|index| index.schema()) {
                if !last.is_some_and(|last| Arc::ptr_eq(last, schema)) {
                    options.schemas.share(schema.clone());
                }
                last = Some(schema);
            }
        }
        let order = Order {
            engine: self.inner.engine.clone(),
            files: selected.files,
            companions: selected.companions,
            format,
            options,
            part: spec.part.clone(),
            on_damaged: spec.on_damaged,
            described: Default::default(),
        };
        let Indexed {
            files,
            indexes,
            indexed_files,
            reused_files,
            bytes,
            skipped,
        } = index(order, known, progress).await?;
        let (options, is_part) = (spec::options(spec), spec.part.is_some());
        let dataset = blocking(move || {
            let schema = common_schema(format, &files, &indexes, named.as_ref(), is_part)?;
            Dataset::of_parts(Parts {
                format,
                files,
                indexes,
                shape: None,
                schema,
                labels: None,
                options,
            })
        });
        Ok((
            dataset.await??,
            Counts {
                indexed: indexed_files,
                reused: reused_files,
                bytes,
                skipped,
            },
        ))
    }

    /// What this spec was last opened as.
    pub(super) async fn known(&self, key: u128) -> Result<Option<Arc<Dataset>>> {
        if let Some(known) = self.inner.kept.lock().latest(key) {
            return Ok(Some(known));
        }
        let disk = self.inner.disk.clone();
        let loaded = blocking(move || disk.and_then(|d| d.by_spec(key))).await?;
        Ok(loaded.map(|dataset| {
            self.inner.stats.loaded.add(1);
            let dataset = Arc::new(dataset);
            self.inner
                .kept
                .lock()
                .keep(Some(key), &dataset, self.inner.config.memory_bytes);
            dataset
        }))
    }

    /// Keeps what this spec was opened as.
    pub(super) async fn keep(&self, key: u128, dataset: &Arc<Dataset>) {
        self.inner
            .kept
            .lock()
            .keep(Some(key), dataset, self.inner.config.memory_bytes);
        self.keep_on_disk(key, dataset).await;
    }

    /// If the disk refuses, the next process has to do the work again; nothing else is lost.
    async fn keep_on_disk(&self, key: u128, dataset: &Arc<Dataset>) {
        let Some(disk) = self.inner.disk.clone() else {
            return;
        };
        let dataset = dataset.clone();
        let kept = blocking(move || disk.keep(key, &dataset))
            .await
            .and_then(|kept| kept);
        if let Err(e) = kept {
            self.inner.stats.keep_failed.add(1);
            tracing::warn!(error = %e.describe(), "the index of a dataset was not kept on disk");
        }
    }
}

pub(super) fn unknown(id: &str) -> Error {
    Error::new(
        ErrorKind::NotFound,
        format!(
            "this node does not know the dataset {:?}",
            forebay_core::name::shorten(id)
        ),
    )
    .hint("open it again: it may have been opened at another node, or at this one long ago")
}

/// What an opening starts with: the caller's right to all of it was checked.
pub(super) struct Sources {
    spec: Arc<DatasetSpec>,
    /// The key of the spec.
    key: u128,
    wanted: Vec<Wanted>,
    /// The manifests of `wanted`, in its order.
    manifests: Vec<Arc<Manifest>>,
    /// The dataset that a part belongs to.
    part_of: Option<Arc<Dataset>>,
    /// The node that is asked to open it.
    home: Option<u64>,
}

impl Sources {
    /// Without manifests, to be opened here.
    pub(super) fn of(spec: Arc<DatasetSpec>, key: u128, wanted: Vec<Wanted>) -> Self {
        Sources {
            spec,
            key,
            wanted,
            manifests: Vec::new(),
            part_of: None,
            home: None,
        }
    }

    /// Approximate memory of the names that it is opened by, in the spec and parsed.
    fn memory_bytes(&self) -> u64 {
        let each = 2 * size_of::<String>() + size_of::<Wanted>();
        let names = self.spec.sources.iter();
        names.map(|name| (2 * name.len() + each) as u64).sum()
    }
}

/// An opening in the list of those in progress; dropping it removes it.
struct UnderWay {
    of: Arc<Inner>,
    key: (u128, bool),
    progress: Arc<Progress>,
    _held: Reservation,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.of.progress.lock().remove(&self.key);
    }
}

/// What an opening did.
#[derive(Default)]
struct Counts {
    indexed: u64,
    reused: u64,
    bytes: u64,
    skipped: Vec<(String, Error)>,
}

/// The format according to the first bytes of the first file that has any.
async fn by_first_bytes(engine: &Engine, files: &FileTable, by_name: Format) -> Result<Format> {
    let Some(first) = files.iter().find(|f| f.size > 0) else {
        return Ok(by_name);
    };
    let head = engine
        .peek_version(
            &first.name,
            &Arc::new(first.meta()),
            0..first.size.min(format::MAGIC_BYTES as u64),
        )
        .await?;
    let told = format::by_magic(&head);
    Ok(match (by_name, told) {
        (Format::ArrowFile, Some(arrow @ (Format::ArrowFile | Format::ArrowStream))) => arrow,
        (Format::Objects, Some(other)) => other,
        _ => by_name,
    })
}

/// Refuses files that are read in several requests, or from the disk at any later time, while
/// nothing shows which version each answer is of.
fn versions_are_known(engine: &Engine, files: &FileTable) -> Result<()> {
    for (bucket, mut of) in files.by_bucket() {
        if engine.rule(bucket).freshness == Freshness::Immutable {
            continue;
        }
        let is_unknown =
            |&i: &usize| files.size(i) > limits::CHUNK_BYTES && !files.names_version(i);
        if let Some(i) = of.find(is_unknown) {
            return Err(Error::unsupported(format!(
                "{} has {} bytes, but its version is not known: the origin sent neither an ETag \
                 nor a Last-Modified",
                files.name(i),
                files.size(i)
            ))
            .hint(
                "make the server send one of them, or set freshness = \"immutable\" for this \
                 bucket",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Everything;
    use forebay_core::{MemoryBudget, SystemClock};
    use forebay_engine::{EngineConfig, FixedBuckets};
    use forebay_origin::{LocalOrigin, Operation, Origin};
    use forebay_testing::{Fault, Faults, Faulty};

    #[tokio::test]
    async fn an_opening_that_panics_is_under_way_no_more() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.jsonl"), "{\"x\": 1}\n").unwrap();
        let faults = Faults::new();
        let local: Arc<dyn Origin> = Arc::new(LocalOrigin::open(dir.path()).unwrap());
        let origin: Arc<dyn Origin> = Arc::new(Faulty::new(local, faults.clone()));
        let mut buckets = FixedBuckets::default();
        buckets.0.insert("bk".to_owned(), origin);
        let engine = Engine::new(
            EngineConfig::default(),
            Arc::new(buckets),
            None,
            Arc::new(SystemClock),
            MemoryBudget::new(64 << 20),
        );
        let datasets = Datasets::new(engine, DatasetsConfig::default());
        let under_way = || datasets.inner.progress.lock().len();
        let seen = Arc::new(Mutex::new(0));
        let (of, seen_then) = (datasets.clone(), seen.clone());
        let panics = Fault::Hook(Arc::new(move |_| {
            *seen_then.lock() = of.inner.progress.lock().len();
            panic!("the origin of a test panics");
        }));
        faults.next(Operation::List, panics);
        let spec = DatasetSpec::of("bk/*.jsonl");
        let failed = datasets.open(&spec, &Everything).await;
        assert!(failed.is_err(), "whoever waits is told");
        assert_eq!((*seen.lock(), under_way()), (1, 0));

        let opened = datasets.open(&spec, &Everything).await.unwrap();
        assert_eq!((opened.dataset.rows(), under_way()), (1, 0));
    }
}
