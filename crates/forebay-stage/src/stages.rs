//! The checkpoints of a node: from their beginning to their end.

use crate::{
    StageConfig, StageGauges, StageStats,
    commit::prepared,
    early::{self, Early},
    file::{READ_MEMORY_BYTES, Reader, Writer, disk_bytes},
    flush, home,
    journal::{FORMAT, FileEntry, Journal, Stage, sync_folder},
    manifest::{MANIFEST, Manifest},
    rooms::{Room, Unfinished},
    upload,
};
use bytes::Bytes;
use forebay_core::{
    Error, ErrorKind, ObjectName, Result, name::shorten, request, sync::Mutex, units::format_bytes,
};
use forebay_engine::{ByteStream, Engine};
use forebay_store::Store;
use futures::{StreamExt, TryStreamExt, stream};
use hashbrown::{HashMap, HashSet};
use serde::{Deserialize, Serialize};
use std::{
    borrow::Cow,
    fs::{self, File},
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::{OwnedMutexGuard, Semaphore, watch},
    task::spawn_blocking,
    time::Instant,
};
use tokio_util::{
    sync::CancellationToken,
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};

/// The folder in a cache directory.
const FOLDER: &str = "staged";
/// What a checkpoint's journal and logs may take, which is taken when it begins.
const JOURNAL_BYTES: u64 = 1 << 20;
/// Checkpoints on disk.
const CHECKPOINTS_MAX: usize = 10_000;
/// Files of one checkpoint.
pub(crate) const FILES_MAX: usize = 100_000;
/// The largest file: no origin takes a larger object, and the sum of all sizes is a number.
const FILE_MAX_BYTES: u64 = 50 << 40;
const FILE_NAME_MAX_BYTES: usize = 512;
const PART_NAME_MAX_BYTES: usize = 32;
/// Bytes of a body that are written at once.
const PIECE_BYTES: usize = 1 << 20;
/// What one file that arrives holds in memory: the piece that is written and the one that is read,
/// each with the buffer that it ends in.
const UPLOAD_MEMORY_BYTES: u64 = 4 << 20;
/// A file of unknown length takes its room in steps: of this size, or of a part of what came.
const ROOM_STEP_BYTES: u64 = 4 << 20;
/// A checkpoint that was not committed holds its name against others for so long after the last
/// sign of life of its writer.
const HOLDS_NAME: Duration = Duration::from_secs(30);
const SWEEP_EVERY: Duration = Duration::from_secs(2);
/// How long the beginning of one that may replace another waits to learn what the origin has.
const LOOK_MAX: Duration = Duration::from_secs(2);
/// How long the room of files that are removed waits for those who read them.
const READERS_MAX: Duration = Duration::from_secs(10);

/// Which checkpoint is meant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The bucket.
    pub bucket: String,
    /// What the keys of its objects begin with, without a slash at its end.
    pub prefix: String,
}

impl Place {
    /// # Errors
    /// `Invalid` for what does not name a checkpoint.
    pub fn new(bucket: &str, prefix: &str) -> Result<Place> {
        let prefix = prefix.trim_end_matches('/');
        if prefix.is_empty() {
            return Err(
                Error::invalid("a checkpoint needs a name within its bucket")
                    .hint("as in s3://bucket/run/step-100"),
            );
        }
        ObjectName::new(bucket, format!("{prefix}/{MANIFEST}"))
            .map_err(|e| e.with_kind(ErrorKind::Invalid))?;
        Ok(Place {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
        })
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.bucket, self.prefix)
    }
}

/// What a writer says when it begins. Unknown fields are refused.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Begin {
    /// The id of a checkpoint that another node began: this is a part of it.
    pub id: Option<String>,
    /// Which part.
    pub part: Option<String>,
    /// Whether it may replace a checkpoint of its name.
    pub replace: bool,
    /// About how many bytes will come: their room is taken now, so that no file is refused for lack
    /// of it in the middle.
    pub bytes: Option<u64>,
}

/// A file and its size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedFile {
    /// As its writer called it.
    pub name: String,
    /// Bytes.
    pub size: u64,
}

/// What a writer says at the end. Unknown fields are refused.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Commit {
    /// All files that this node got.
    pub files: Vec<NamedFile>,
    /// Files that other nodes send to the same bucket, as parts of the same id.
    pub elsewhere: Vec<NamedFile>,
    /// Of `files`, those that readers of another program look for: they are written to
    /// `<prefix>/<name>` too, after all others.
    pub last: Vec<String>,
    /// What readers are to be told again: a JSON value of at most 64 KiB.
    pub meta: serde_json::Value,
    /// Seconds within which it is to be durable; by default the node's setting.
    pub deadline_s: Option<f64>,
}

/// What to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// It is on disk.
    Staged,
    /// It is at the origin.
    Durable,
}

/// How a checkpoint stands.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The bucket.
    pub bucket: String,
    /// Its name.
    pub prefix: String,
    /// Among all of its name.
    pub id: String,
    /// Of several at several nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// `staging`, `staged`, `flushing`, `failed` (and tried again), `durable` or `removing`.
    pub state: Cow<'static, str>,
    /// Whether it is on disk whole, or durable.
    pub staged: bool,
    /// Whether it is at the origin whole.
    pub durable: bool,
    /// Files that are known.
    pub files: usize,
    /// Bytes of these.
    pub bytes: u64,
    /// Of these, what the origin has.
    pub bytes_at_origin: u64,
    /// Whether it is on this node's disk.
    pub local: bool,
    /// When it was begun, in milliseconds since the Unix epoch.
    pub begun_ms: i64,
    /// When it was staged; 0: it is not.
    pub staged_ms: i64,
    /// When it became durable; 0: it did not, or it is not known here.
    pub durable_ms: i64,
    /// From its commit until it was durable, or until now.
    pub seconds: f64,
    /// By when it is to be durable, in milliseconds since the Unix epoch; 0: whenever.
    pub deadline_ms: i64,
    /// Whether it was not durable by then.
    pub late: bool,
    /// Attempts to flush it that failed.
    pub failures: u32,
    /// Why the last one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// When the next one begins, in milliseconds since the Unix epoch; 0: one is going on, or none
    /// is needed.
    pub retry_ms: i64,
    /// The id of the one of its name that it waits for: an earlier one becomes durable first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// If it was not committed: when it is given up unless something is heard of it, in
    /// milliseconds since the Unix epoch; else 0.
    pub expires_ms: i64,
    /// What its writer wants to be told again.
    pub meta: serde_json::Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Staging,
    /// The journal is being written.
    Committing,
    Staged,
    Flushing,
    Failed,
    Durable,
    Removing,
    Gone,
}

impl Phase {
    fn as_str(self) -> &'static str {
        match self {
            Phase::Staging | Phase::Committing => "staging",
            Phase::Staged => "staged",
            Phase::Flushing => "flushing",
            Phase::Failed => "failed",
            Phase::Durable => "durable",
            Phase::Removing | Phase::Gone => "removing",
        }
    }

    /// Whether it is on its way to the origin.
    pub fn is_pending(self) -> bool {
        matches!(self, Phase::Staged | Phase::Flushing | Phase::Failed)
    }

    /// Whether its room is given back without the origin.
    pub fn is_over(self) -> bool {
        matches!(self, Phase::Durable | Phase::Removing | Phase::Gone)
    }
}

pub(crate) struct Entry {
    pub place: Place,
    /// `<id>` or `<id>.<part>`: the name of its folder.
    pub folder: String,
    /// The directory with its journal.
    pub home: usize,
    /// Later ones of a name wait for earlier ones.
    pub order: u64,
    /// What the origin has of it.
    pub at_origin: AtomicU64,
    /// Its flush is to end.
    pub cancel: CancellationToken,
    /// What changes the origin and goes on when the flush is cancelled.
    pub writes: TaskTracker,
    /// Who reads its files.
    pub readers: TaskTracker,
    /// What goes out of it before its commit.
    pub early: Early,
    /// One at a time writes its journal, or removes its folders.
    pub saving: Mutex<()>,
    pub state: Mutex<State>,
}

pub(crate) struct State {
    pub journal: Journal,
    pub phase: Phase,
    pub rooms: Vec<Room>,
    /// Room that was taken for files that are to come.
    pub ahead: Option<Room>,
    /// The directory of each file, by its number.
    pub dirs: HashMap<u32, usize>,
    pub uploads: usize,
    pub used_ms: i64,
    pub next_number: u32,
    pub error: Option<String>,
    pub failures: u32,
    pub late: bool,
    pub retry_ms: i64,
    pub read_ms: i64,
}

impl State {
    /// Whether nobody writes it, and nothing was heard of its writer for so long.
    pub fn is_idle(&self, now_ms: i64, at_least: Duration) -> bool {
        let idle_ms = now_ms.saturating_sub(self.used_ms);
        let writes = self.phase != Phase::Staging || self.uploads > 0;
        !writes && idle_ms >= at_least.as_millis() as i64
    }
}

impl Entry {
    /// Whether it was given up before its commit: what is left of it are uploads that end.
    fn is_given_up(&self) -> bool {
        let state = self.state.lock();
        let leaves = matches!(state.phase, Phase::Removing | Phase::Gone);
        leaves && !state.journal.was_committed()
    }

    /// Marks it as gone, if `may` says so of its state at this moment. Whoever did that drops it.
    pub fn leave(&self, may: impl FnOnce(&State) -> bool) -> bool {
        let mut state = self.state.lock();
        let leaves = state.phase != Phase::Gone && may(&state);
        if leaves {
            state.phase = Phase::Gone;
        }
        leaves
    }
}

/// A staged file of a committed checkpoint, to be read. While it exists, the file's room on the disk
/// is not given back, or not for a while ([`READERS_MAX`]).
pub struct StagedFile {
    entry: Arc<Entry>,
    reader: Arc<Reader>,
    /// Whoever drops the entry waits for it.
    read: TaskTrackerToken,
}

/// Somebody reads a staged file. See [`StagedFile`].
pub struct Reading(#[allow(dead_code, reason = "it counts while it exists")] TaskTrackerToken);

impl StagedFile {
    /// Its bytes.
    pub fn size(&self) -> u64 {
        self.reader.size()
    }

    /// For whoever goes on reading it by a descriptor of its own.
    pub fn reading(&self) -> Reading {
        Reading(self.read.clone())
    }

    /// The open file, for a reader of its own: `size` bytes, with the checksums of
    /// [`forebay_protocol::lent`] behind them.
    pub fn lend(&self, stages: &Stages) -> &File {
        stages.0.stats.lent.fetch_add(1, Relaxed);
        self.reader.file()
    }
}

/// The checkpoints of a node. Cheap to clone.
#[derive(Clone)]
pub struct Stages(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub engine: Engine,
    pub store: Arc<Store>,
    pub config: StageConfig,
    /// The cache directories.
    pub dirs: Vec<PathBuf>,
    pub entries: Mutex<HashMap<String, Arc<Entry>>>,
    /// Of each name that is being changed, the lock.
    tops: Mutex<HashMap<Place, Weak<tokio::sync::Mutex<()>>>>,
    pub parts: Arc<Semaphore>,
    pub stats: StageStats,
    /// Something changed.
    pub changed: watch::Sender<u64>,
    pub stop: CancellationToken,
    pub tasks: TaskTracker,
    order: AtomicU64,
}

pub(crate) fn unknown(place: &Place, id: &str) -> Error {
    Error::not_found(format!(
        "{place}: no checkpoint with the id {:?} is being written here",
        shorten(id)
    ))
    .hint("the node was started again, or gave it up: begin anew, at the node that the files go to")
}

pub(crate) fn ended(e: tokio::task::JoinError) -> Error {
    Error::internal("work on a checkpoint was broken off").caused_by(e)
}

/// Whether a file system has no room.
fn disk_error(path: &Path, e: std::io::Error) -> Error {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    match e.kind() {
        StorageFull | QuotaExceeded => Error::new(
            ErrorKind::NoRoom,
            format!("{}: the disk is full", path.display()),
        )
        .hint("free space on that file system, or give the cache a smaller size")
        .caused_by(e),
        _ => Error::file("the staged file", path, e),
    }
}

/// Refuses sizes with which nothing is to be computed.
pub(crate) fn check_size(size: u64) -> Result<()> {
    match size <= FILE_MAX_BYTES {
        true => Ok(()),
        false => Err(Error::new(
            ErrorKind::TooLarge,
            format!(
                "{size} bytes are more than {}",
                format_bytes(FILE_MAX_BYTES)
            ),
        )
        .hint("no origin takes so large an object")),
    }
}

pub(crate) fn check_file_name(name: &str) -> Result<()> {
    if name.len() > FILE_NAME_MAX_BYTES {
        return Err(Error::invalid(format!(
            "the file name {:?} is longer than {FILE_NAME_MAX_BYTES} bytes",
            shorten(name)
        )));
    }
    forebay_core::name::validate_key(name).map_err(|e| {
        e.context("the name of a file")
            .with_kind(ErrorKind::Invalid)
    })?;
    match name.ends_with('/') {
        true => Err(Error::invalid("the name of a file ends in a slash")),
        false => Ok(()),
    }
}

fn folder_of(id: &str, part: Option<&str>) -> Result<String> {
    let is_id = id.len() == 16 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let is_part = part.is_none_or(|part| {
        (1..=PART_NAME_MAX_BYTES).contains(&part.len())
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    });
    if !is_id || !is_part {
        return Err(
            Error::invalid(format!("{:?} is not the id of a checkpoint", shorten(id)))
                .hint("16 digits of 0-9 and a-f, as the answer to the beginning had it"),
        );
    }
    Ok(match part {
        Some(part) => format!("{id}.{part}"),
        None => id.to_owned(),
    })
}

impl Stages {
    /// Opens what earlier runs left, and goes on with it. It reads the disk. To be called within a
    /// runtime.
    ///
    /// # Errors
    /// If the folders cannot be read or made.
    pub fn open(config: StageConfig, engine: Engine, store: Arc<Store>) -> Result<Stages> {
        let dirs = store.directories();
        let inner = Arc::new(Inner {
            parts: Arc::new(Semaphore::new(config.parts_in_flight.max(1))),
            engine,
            store,
            config,
            dirs,
            entries: Mutex::default(),
            tops: Mutex::default(),
            stats: StageStats::default(),
            changed: watch::Sender::new(0),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
            order: AtomicU64::new(0),
        });
        inner.recover()?;
        let tasks = &inner.tasks;
        tasks.spawn(sweep(Arc::downgrade(&inner), inner.stop.clone()));
        Ok(Stages(inner))
    }

    /// What happened so far.
    pub fn stats(&self) -> &StageStats {
        &self.0.stats
    }

    /// How checkpoints stand.
    pub fn gauges(&self) -> StageGauges {
        let mut g = StageGauges::default();
        let now = self.0.now_ms();
        for entry in self.0.entries.lock().values() {
            let state = entry.state.lock();
            let bytes: u64 = state.rooms.iter().map(|room| room.bytes).sum();
            match state.phase {
                Phase::Staging | Phase::Committing => g.staging += 1,
                Phase::Staged => g.waiting += 1,
                Phase::Flushing => g.flushing += 1,
                Phase::Failed => g.failed += 1,
                Phase::Durable => g.warm += 1,
                Phase::Removing | Phase::Gone => {}
            }
            match state.phase {
                Phase::Durable => g.warm_bytes += bytes,
                _ => g.pending_bytes += bytes,
            }
            if state.phase.is_pending() {
                g.overdue += usize::from(state.late);
                let age = (now - state.journal.staged_ms).max(0) as f64 / 1e3;
                g.oldest_seconds = g.oldest_seconds.max(age);
            }
        }
        g
    }

    /// Begins a checkpoint: its status has its id.
    ///
    /// # Errors
    /// `AlreadyExists` if there is one of its name and it may not replace it, `Conflict` if another
    /// writer is at it, `NoRoom` or `Busy`.
    pub async fn begin(&self, place: &Place, begin: Begin) -> Result<Status> {
        let inner = self.0.clone();
        // Buckets that do not exist are found out now.
        inner.engine.buckets().origin(&place.bucket).await?;
        if begin.id.is_some() != begin.part.is_some() {
            return Err(
                Error::invalid("a part of a checkpoint has an id and a part")
                    .hint("give both, or neither"),
            );
        }
        let id = match &begin.id {
            Some(id) => id.clone(),
            None => format!("{:016x}", rand::random::<u64>()),
        };
        let folder = folder_of(&id, begin.part.as_deref())?;
        check_size(begin.bytes.unwrap_or(0))?;
        let known = inner.entries.lock().get(&folder).cloned();
        if let Some(entry) = known {
            return match entry.place == *place {
                true if entry.is_given_up() => Err(Error::conflict(format!(
                    "{place}: the checkpoint {id} was given up"
                ))
                .hint("begin a new one")),
                true => Ok(inner.status_of(&entry)),
                false => Err(Error::conflict(format!(
                    "the id {id} belongs to {}, not to {place}",
                    entry.place
                ))),
            };
        }
        if begin.part.is_none() {
            inner.check_free(place, begin.replace).await?;
        }
        let place = place.clone();
        // It runs to its end, so that what it leaves on disk is known.
        let task = request::spawn(async move { inner.begin_now(place, id, folder, begin).await });
        task.await.map_err(ended)?
    }

    /// Stages one file: `size` is the length of `body`, if it is known. Returns its size when it is
    /// on disk and synced.
    ///
    /// # Errors
    /// `NotFound` for an id that is not being staged, `NoRoom`, `Busy`, or what broke the body off.
    pub async fn put(
        &self,
        place: &Place,
        id: &str,
        part: Option<&str>,
        name: &str,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<u64> {
        check_file_name(name)?;
        check_size(size.unwrap_or(0))?;
        let inner = &self.0;
        let entry = inner.find(place, &folder_of(id, part)?)?;
        ObjectName::new(
            place.bucket.as_str(),
            format!("{}/{id}/{name}", place.prefix),
        )
        .map_err(|e| e.with_kind(ErrorKind::Invalid))?;
        let arrival = Arrival::begin(inner, &entry)?;
        let _memory = inner
            .engine
            .budget()
            .hold(UPLOAD_MEMORY_BYTES.min(inner.engine.budget().holdable_bytes()))
            .await
            .map_err(|e| e.context("the file was refused before it was read"))?;
        let first = size.map_or(ROOM_STEP_BYTES, disk_bytes);
        let room = inner.room_for(&entry, first, None).await?;
        let dir = room.dir;
        let path = inner
            .folder(dir, &entry.folder)
            .join(format!("f{}", arrival.number));
        let unfinished = Unfinished::new(path.clone(), room);
        let (make, of) = (inner.clone(), entry.clone());
        // If nobody waits for it, it is removed after it was made.
        let made = spawn_blocking(move || {
            let writer = make.make_file(&of, dir, unfinished.path(), size);
            (unfinished, writer)
        });
        let (mut file, writer) = made.await.map_err(ended)?;
        let mut writer: std::io::Result<Writer> = Ok(writer?);
        let mut body = body;
        let mut writing: Option<tokio::task::JoinHandle<std::io::Result<Writer>>> = None;
        let (mut came, mut room_for) = (0u64, size.unwrap_or(first));
        loop {
            let (pieces, is_end) = gather(&mut body).await?;
            came += pieces.iter().map(|p| p.len() as u64).sum::<u64>();
            if size.is_some_and(|size| came > size) {
                return Err(Error::invalid(format!(
                    "the file {name:?} is longer than was announced"
                )));
            }
            while disk_bytes(came) > room_for && size.is_none() {
                let wanted = ROOM_STEP_BYTES.max(came / 4);
                let more = match inner.room_for(&entry, wanted, Some(dir)).await {
                    Err(_) if wanted > ROOM_STEP_BYTES => {
                        inner.room_for(&entry, ROOM_STEP_BYTES, Some(dir)).await?
                    }
                    more => more?,
                };
                room_for += more.bytes;
                if let Some(room) = file.room() {
                    room.join(more);
                }
            }
            if let Some(task) = writing.take() {
                writer = task.await.map_err(ended)?;
            }
            let mut now = writer.map_err(|e| disk_error(&path, e))?;
            if entry.cancel.is_cancelled() {
                return Err(unknown(place, id));
            }
            writing = Some(spawn_blocking(move || {
                now.write(&pieces)?;
                Ok(now)
            }));
            // Replaced before it is looked at.
            writer = Err(std::io::ErrorKind::Other.into());
            if is_end {
                break;
            }
        }
        if let Some(task) = writing.take() {
            writer = task.await.map_err(ended)?;
        }
        let writer = writer.map_err(|e| disk_error(&path, e))?;
        if size.is_some_and(|size| writer.written() != size) {
            return Err(Error::invalid(format!(
                "the file {name:?} ended after {} of {} bytes",
                writer.written(),
                size.unwrap_or(0)
            )));
        }
        let finished = spawn_blocking(move || writer.finish())
            .await
            .map_err(ended)?;
        let size = finished.map_err(|e| disk_error(&path, e))?;
        let file = arrival.end(name, size, dir, file)?;
        early::start(inner, &entry, file);
        inner.stats.staged_bytes.fetch_add(size, Relaxed);
        Ok(size)
    }

    /// Ends the staging: from now on, the checkpoint will be durable.
    ///
    /// # Errors
    /// `Invalid` if the files are not those that were staged; `Conflict` while some still arrive.
    pub async fn commit(
        &self,
        place: &Place,
        id: &str,
        part: Option<&str>,
        commit: Commit,
    ) -> Result<Status> {
        let inner = self.0.clone();
        let entry = inner.find(place, &folder_of(id, part)?)?;
        let task = request::spawn(async move { inner.commit_now(entry, commit).await });
        task.await.map_err(ended)?
    }

    /// How a checkpoint stands: that of this id, or the newest of the name. One that is not known
    /// here may be at the origin.
    ///
    /// # Errors
    /// `NotFound`.
    pub async fn status(
        &self,
        place: &Place,
        id: Option<&str>,
        part: Option<&str>,
    ) -> Result<Status> {
        let inner = &self.0;
        if let Some(entry) = inner.newest(place, id, part)? {
            return Ok(inner.status_of(&entry));
        }
        let manifest = Manifest::at_origin(&inner.engine, &place.bucket, &place.prefix).await?;
        match manifest.filter(|m| id.is_none_or(|id| m.id == id)) {
            Some(manifest) => Ok(at_origin(place, &manifest)),
            None => Err(missing(place, id)),
        }
    }

    /// [`Stages::status`], once the checkpoint is so far, or after `patience`.
    ///
    /// # Errors
    /// `NotFound`, also if it is given up meanwhile.
    pub async fn wait(
        &self,
        place: &Place,
        id: Option<&str>,
        part: Option<&str>,
        until: Until,
        patience: Duration,
    ) -> Result<Status> {
        let mut changed = self.0.changed.subscribe();
        let deadline = Instant::now() + patience;
        loop {
            changed.borrow_and_update();
            let status = self.status(place, id, part).await?;
            let there = match until {
                Until::Staged => status.staged,
                Until::Durable => status.durable,
            };
            if there || self.0.stop.is_cancelled() {
                return Ok(status);
            }
            match tokio::time::timeout_at(deadline, changed.changed()).await {
                Ok(Ok(())) => {}
                _ => return Ok(status),
            }
        }
    }

    /// All checkpoints on this node's disk.
    pub fn list(&self) -> Vec<Status> {
        let entries: Vec<Arc<Entry>> = self.0.entries.lock().values().cloned().collect();
        let mut found: Vec<Status> = entries.iter().map(|e| self.0.status_of(e)).collect();
        found.sort_by(|a, b| {
            let key = |s: &Status| (s.bucket.clone(), s.prefix.clone(), s.begun_ms);
            key(a).cmp(&key(b))
        });
        found
    }

    /// What a reader of a checkpoint reads: of this id, or the newest of the name that was committed,
    /// here or at the origin. With `durable`, only what the origin has.
    ///
    /// # Errors
    /// `NotFound`, or what kept the origin from answering.
    pub async fn manifest(
        &self,
        place: &Place,
        id: Option<&str>,
        durable: bool,
    ) -> Result<Manifest> {
        let inner = &self.0;
        let newest = inner.newest(place, id, None)?;
        let here = newest.and_then(|entry| {
            let state = entry.state.lock();
            let pending = state.phase.is_pending();
            let counts = state.phase == Phase::Durable || (pending && !durable);
            counts.then(|| (Manifest::of(&state.journal), pending))
        });
        let here = match here {
            Some((manifest, pending)) if pending || id.is_some() => return Ok(manifest),
            // Another node may have replaced what is durable here.
            other => other.map(|(manifest, _)| manifest),
        };
        match Manifest::at_origin(&inner.engine, &place.bucket, &place.prefix).await {
            Ok(Some(manifest)) if id.is_none_or(|id| manifest.id == id) => Ok(manifest),
            Ok(_) => Err(missing(place, id)),
            Err(e) => match here {
                // The origin does not answer, and this is what it had.
                Some(manifest) if e.kind().is_transient() => Ok(manifest),
                _ => Err(e),
            },
        }
    }

    /// The staged file of a committed checkpoint, if it is here.
    ///
    /// # Errors
    /// What keeps it from being read, if the origin does not have it either.
    pub async fn open_file(
        &self,
        place: &Place,
        id: &str,
        name: &str,
    ) -> Result<Option<StagedFile>> {
        let inner = &self.0;
        let Some(entry) = inner.newest(place, Some(id), None)? else {
            return Ok(None);
        };
        let (path, size, read) = {
            let mut state = entry.state.lock();
            if !(state.phase.is_pending() || state.phase == Phase::Durable) {
                return Ok(None);
            }
            state.read_ms = inner.now_ms();
            let file = state.journal.files.iter().find(|f| f.name == name);
            let Some(file) = file else { return Ok(None) };
            let path = inner.path_of(&entry, &state, file.number);
            (path, file.size, entry.readers.token())
        };
        let Some(path) = path else { return Ok(None) };
        let opened = spawn_blocking(move || Reader::open(&path, size)).await;
        match opened.map_err(ended)? {
            Ok(reader) => Ok(Some(StagedFile {
                entry,
                reader: Arc::new(reader),
                read,
            })),
            Err(e) if inner.distrust(&entry, &e) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The bytes of a staged file, or of a range of it. The first of them were read when this
    /// returns. `None`: they are damaged, and the origin has them.
    ///
    /// # Errors
    /// `Busy` for lack of memory; `Corrupt` and such, if the origin does not have them either.
    pub async fn read(&self, file: &StagedFile, range: Range<u64>) -> Result<Option<ByteStream>> {
        let (inner, entry) = (self.0.clone(), file.entry.clone());
        let budget = inner.engine.budget();
        let held = budget
            .hold(READ_MEMORY_BYTES.min(budget.holdable_bytes()))
            .await?;
        let mut rest = file.reader.stream(range);
        let first = match rest.next().await {
            Some(Err(e)) if inner.distrust(&entry, &e) => return Ok(None),
            Some(Err(e)) => return Err(e),
            first => first,
        };
        let read = file.read.clone();
        let counted = stream::iter(first).chain(rest).inspect(move |piece| {
            let _held = (&held, &read);
            match piece {
                Ok(piece) => {
                    let bytes = piece.len() as u64;
                    inner.stats.read_bytes.fetch_add(bytes, Relaxed);
                }
                // This answer breaks off; the next one comes from the origin.
                Err(e) => drop(inner.distrust(&entry, e)),
            }
        });
        Ok(Some(counted.boxed()))
    }

    /// Gives up a checkpoint that is not durable; of one that is, drops what is on this disk.
    ///
    /// # Errors
    /// `NotFound`.
    pub async fn abandon(&self, place: &Place, id: &str, part: Option<&str>) -> Result<()> {
        let inner = self.0.clone();
        let entry = inner.find(place, &folder_of(id, part)?)?;
        let task = request::spawn(async move { inner.give_up(entry).await });
        task.await.map_err(ended)?
    }

    /// Removes a durable checkpoint from the origin: what readers look for first goes first, so
    /// that nobody sees half of it. Returns when the origin has nothing of it any more.
    ///
    /// # Errors
    /// `NotFound`; `Conflict` if one of its name is on its way.
    pub async fn remove(&self, place: &Place, id: Option<&str>) -> Result<()> {
        let inner = self.0.clone();
        if inner.pending_of(place) {
            return Err(Error::conflict(format!(
                "{place}: a checkpoint of this name is on its way to the origin"
            ))
            .hint("wait until it is durable, or give it up by its id"));
        }
        let manifest = Manifest::at_origin(&inner.engine, &place.bucket, &place.prefix).await?;
        let manifest = manifest
            .filter(|m| id.is_none_or(|id| m.id == id))
            .ok_or_else(|| missing(place, id))?;
        let place = place.clone();
        let task = request::spawn(async move { inner.remove_now(place, manifest).await });
        task.await.map_err(ended)?
    }

    /// Returns when [`Stages::close`] begins.
    pub async fn closing(&self) {
        self.0.stop.cancelled().await;
    }

    /// Ends all flushes where they are: the next start goes on with them.
    pub async fn close(&self) {
        self.0.stop.cancel();
        self.0.changed.send_modify(|n| *n += 1);
        self.0.tasks.close();
        self.0.tasks.wait().await;
        let pending = self.gauges();
        let left = pending.waiting + pending.flushing + pending.failed;
        if left > 0 {
            tracing::warn!(
                checkpoints = left,
                bytes = pending.pending_bytes,
                "checkpoints are staged and not durable yet: the next start of the node with this \
                 cache goes on with them"
            );
        }
    }
}

fn missing(place: &Place, id: Option<&str>) -> Error {
    match id {
        Some(id) => Error::not_found(format!(
            "{place}: there is no checkpoint with the id {:?}",
            shorten(id)
        ))
        .hint("it was given up, replaced, or is at another node"),
        None => Error::not_found(format!("{place}: there is no checkpoint of this name"))
            .hint("`forebay checkpoint list BUCKET/PREFIX` shows which there are"),
    }
}

fn at_origin(place: &Place, manifest: &Manifest) -> Status {
    Status {
        bucket: place.bucket.clone(),
        prefix: place.prefix.clone(),
        id: manifest.id.clone(),
        state: Phase::Durable.as_str().into(),
        staged: true,
        durable: true,
        files: manifest.files.len(),
        bytes: manifest.bytes,
        bytes_at_origin: manifest.bytes,
        staged_ms: manifest.saved_ms,
        meta: manifest.meta.clone(),
        ..Status::default()
    }
}

/// The next pieces of a body, about [`PIECE_BYTES`], and whether it has ended.
async fn gather(body: &mut ByteStream) -> Result<(Vec<Bytes>, bool)> {
    let (mut pieces, mut bytes) = (Vec::new(), 0);
    while bytes < PIECE_BYTES {
        match body.try_next().await? {
            Some(piece) => {
                bytes += piece.len();
                pieces.push(piece);
            }
            None => return Ok((pieces, true)),
        }
    }
    Ok((pieces, false))
}

/// A file that is arriving.
struct Arrival {
    inner: Arc<Inner>,
    entry: Arc<Entry>,
    number: u32,
}

impl Arrival {
    fn begin(inner: &Arc<Inner>, entry: &Arc<Entry>) -> Result<Arrival> {
        let mut state = entry.state.lock();
        if matches!(state.phase, Phase::Removing | Phase::Gone) {
            return Err(unknown(&entry.place, &entry.folder));
        }
        if state.phase != Phase::Staging {
            return Err(Error::conflict(format!(
                "{}: the checkpoint {} was committed: it takes no more files",
                entry.place, entry.folder
            )));
        }
        if state.journal.files.len() + state.uploads >= FILES_MAX {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("a checkpoint has at most {FILES_MAX} files"),
            ));
        }
        state.uploads += 1;
        let number = state.next_number;
        state.next_number += 1;
        Ok(Arrival {
            inner: inner.clone(),
            entry: entry.clone(),
            number,
        })
    }

    fn end(self, name: &str, size: u64, dir: usize, file: Unfinished) -> Result<FileEntry> {
        let mut state = self.entry.state.lock();
        if state.phase != Phase::Staging {
            return Err(unknown(&self.entry.place, &self.entry.folder));
        }
        if let Some(mut room) = file.keep() {
            room.shrink_to(disk_bytes(size));
            match state.rooms.iter_mut().find(|r| r.dir == dir) {
                Some(all) => all.join(room),
                None => state.rooms.push(room),
            }
        }
        state.dirs.insert(self.number, dir);
        let before = state.journal.files.iter().position(|f| f.name == name);
        let before = before.map(|at| state.journal.files.swap_remove(at));
        let made = FileEntry {
            name: name.to_owned(),
            size,
            number: self.number,
            last: false,
            uploaded: false,
            etag: None,
        };
        state.journal.files.push(made.clone());
        // A file that was sent again replaces the first one.
        if let Some(old) = before
            && let Some(path) = self.inner.path_of(&self.entry, &state, old.number)
        {
            self.entry.early.cancel(old.number);
            let dir = state.dirs.remove(&old.number);
            let room = state.rooms.iter_mut().find(|r| Some(r.dir) == dir);
            let bytes = disk_bytes(old.size);
            if let Some(room) = room {
                let left = room.bytes.saturating_sub(bytes);
                room.shrink_to(left);
            }
            tokio::task::spawn_blocking(move || {
                let _ = fs::remove_file(path);
            });
        }
        Ok(made)
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let mut state = self.entry.state.lock();
        state.uploads -= 1;
        state.used_ms = self.inner.now_ms();
    }
}

impl Inner {
    pub(crate) fn now_ms(&self) -> i64 {
        self.engine.clock().now_ms()
    }

    pub(crate) fn folder(&self, dir: usize, folder: &str) -> PathBuf {
        self.dirs[dir].join(FOLDER).join(folder)
    }

    /// The folders that a checkpoint may have, that with its journal last: without it, the rest means
    /// nothing.
    pub(crate) fn folders(&self, entry: &Entry) -> Vec<PathBuf> {
        let mut dirs: Vec<usize> = (0..self.dirs.len()).collect();
        dirs.sort_by_key(|dir| *dir == entry.home);
        dirs.iter()
            .map(|dir| self.folder(*dir, &entry.folder))
            .collect()
    }

    /// Whether anything that was committed is on its way to the origin.
    pub(crate) fn is_any_pending(&self) -> bool {
        let entries = self.entries.lock();
        entries.values().any(|e| e.state.lock().phase.is_pending())
    }

    /// Where a file of a checkpoint is.
    pub(crate) fn path_of(&self, entry: &Entry, state: &State, number: u32) -> Option<PathBuf> {
        let dir = state.dirs.get(&number)?;
        Some(self.folder(*dir, &entry.folder).join(format!("f{number}")))
    }

    /// Makes a file of a checkpoint, and what it needs around it.
    fn make_file(
        &self,
        entry: &Entry,
        dir: usize,
        path: &Path,
        size: Option<u64>,
    ) -> Result<Writer> {
        if entry.home != dir {
            let folder = self.folder(dir, &entry.folder);
            fs::create_dir_all(&folder).map_err(|e| disk_error(&folder, e))?;
            home::mark(&folder, &self.dirs[entry.home].join(FOLDER))?;
        }
        Writer::create(path, size).map_err(|e| disk_error(path, e))
    }

    /// Whoever changes what readers of this name look for (its manifest, and the files beside that)
    /// looks first what is there, and holds this until it is done.
    pub(crate) async fn hold_tops(&self, place: &Place) -> OwnedMutexGuard<()> {
        let lock = {
            let mut tops = self.tops.lock();
            tops.retain(|_, lock| lock.strong_count() > 0);
            let known = tops.get(place).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let lock = Arc::default();
                tops.insert(place.clone(), Arc::downgrade(&lock));
                lock
            })
        };
        lock.lock_owned().await
    }

    /// Whether the origin has what cannot be read here. Then what is here goes.
    fn distrust(self: &Arc<Self>, entry: &Arc<Entry>, e: &Error) -> bool {
        if entry.leave(|state| state.phase == Phase::Durable) {
            tracing::warn!(checkpoint = %entry.place, id = entry.folder, error = %e.describe(),
                "a staged file cannot be read; it is read from the origin, which has it");
            let (inner, entry) = (self.clone(), entry.clone());
            self.tasks
                .spawn(async move { inner.drop_local(&entry).await });
            return true;
        }
        entry.state.lock().phase == Phase::Gone
    }

    pub(crate) fn tell(&self) {
        self.changed.send_modify(|n| *n += 1);
    }

    fn find(&self, place: &Place, folder: &str) -> Result<Arc<Entry>> {
        let found = self.entries.lock().get(folder).cloned();
        found
            .filter(|entry| entry.place == *place && entry.state.lock().phase != Phase::Gone)
            .ok_or_else(|| unknown(place, folder))
    }

    /// The checkpoint of this id; or the newest of the name that was committed, or else the newest.
    fn newest(
        &self,
        place: &Place,
        id: Option<&str>,
        part: Option<&str>,
    ) -> Result<Option<Arc<Entry>>> {
        if let Some(id) = id {
            let folder = folder_of(id, part)?;
            let found = self.find(place, &folder).ok();
            return Ok(found.filter(|entry| !entry.is_given_up()));
        }
        let entries = self.entries.lock();
        let of_name = entries.values().filter(|e| e.place == *place);
        let rated = of_name.filter_map(|entry| {
            let state = entry.state.lock();
            let rank = match state.phase {
                Phase::Removing | Phase::Gone => return None,
                Phase::Staging | Phase::Committing => 0,
                _ => 1,
            };
            state
                .journal
                .part
                .is_none()
                .then_some((rank, entry.order, entry))
        });
        let best = rated.max_by_key(|(rank, order, _)| (*rank, *order));
        Ok(best.map(|(_, _, entry)| entry.clone()))
    }

    /// Whether one of the name was committed and is not durable.
    fn pending_of(&self, place: &Place) -> bool {
        let entries = self.entries.lock();
        entries.values().any(|e| {
            let state = e.state.lock();
            let pending = state.phase.is_pending() || state.phase == Phase::Committing;
            e.place == *place && pending && state.journal.part.is_none()
        })
    }

    /// The one of its name that has to be durable before this one is sent.
    pub(crate) fn waits_for(&self, entry: &Entry) -> Option<String> {
        let entries = self.entries.lock();
        entries.values().find_map(|other| {
            let state = other.state.lock();
            let waits = other.place == entry.place
                && other.order < entry.order
                && state.journal.part.is_none()
                && state.phase.is_pending();
            waits.then(|| state.journal.id.clone())
        })
    }

    /// Not to be called with any lock held.
    pub(crate) fn status_of(&self, entry: &Entry) -> Status {
        let waiting = {
            let state = entry.state.lock();
            state.phase == Phase::Staged && state.journal.part.is_none()
        };
        let waits_for = match waiting {
            true => self.waits_for(entry),
            false => None,
        };
        let state = entry.state.lock();
        let j = &state.journal;
        let end = match state.phase {
            Phase::Durable => j.durable_ms,
            _ => self.now_ms(),
        };
        let began = if j.staged_ms > 0 {
            j.staged_ms
        } else {
            j.begun_ms
        };
        let durable = state.phase == Phase::Durable;
        let bytes = j.bytes();
        Status {
            bucket: entry.place.bucket.clone(),
            prefix: entry.place.prefix.clone(),
            id: j.id.clone(),
            part: j.part.clone(),
            state: state.phase.as_str().into(),
            staged: durable || state.phase.is_pending(),
            durable,
            files: j.files.len(),
            bytes,
            bytes_at_origin: match durable {
                true => bytes,
                false => {
                    let sent = entry.at_origin.load(Relaxed);
                    sent.saturating_add(entry.early.sent_bytes()).min(bytes)
                }
            },
            local: true,
            begun_ms: j.begun_ms,
            staged_ms: j.staged_ms,
            durable_ms: j.durable_ms,
            seconds: (end - began).max(0) as f64 / 1e3,
            deadline_ms: j.deadline_ms,
            late: state.late,
            failures: state.failures,
            error: state.error.clone(),
            retry_ms: state.retry_ms,
            waits_for,
            expires_ms: match state.phase {
                Phase::Staging => state
                    .used_ms
                    .saturating_add(self.config.abandon_after.as_millis() as i64),
                _ => 0,
            },
            meta: j.meta.clone(),
        }
    }

    /// Whether a checkpoint of this name may begin.
    async fn check_free(self: &Arc<Self>, place: &Place, replace: bool) -> Result<()> {
        let exists = || {
            Error::new(
                ErrorKind::AlreadyExists,
                format!("{place}: there is a checkpoint of this name"),
            )
            .hint("choose another name, or let it be replaced")
        };
        if !replace && self.pending_of(place) {
            return Err(exists());
        }
        let look = Manifest::at_origin(&self.engine, &place.bucket, &place.prefix);
        if !replace {
            return match look.await? {
                Some(_) => Err(exists()),
                None => Ok(()),
            };
        }
        match tokio::time::timeout(LOOK_MAX, look).await {
            // It would never be replaced.
            Ok(Err(e)) if matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) => Err(e),
            // To stage it, the origin need not answer.
            _ => Ok(()),
        }
    }

    /// One of this name that was not committed is in the way if somebody still writes it; another one
    /// is given up: it is to be dropped.
    fn hold_name(
        &self,
        entries: &HashMap<String, Arc<Entry>>,
        place: &Place,
    ) -> Result<Option<Arc<Entry>>> {
        let is_staging = |entry: &Entry| {
            let state = entry.state.lock();
            let staging = matches!(state.phase, Phase::Staging | Phase::Committing);
            staging && state.journal.part.is_none()
        };
        let mut of_name = entries.values().filter(|e| e.place == *place);
        let Some(entry) = of_name.find(|entry| is_staging(entry)) else {
            return Ok(None);
        };
        let now = self.now_ms();
        if entry.leave(|state| state.is_idle(now, HOLDS_NAME)) {
            return Ok(Some(entry.clone()));
        }
        Err(Error::conflict(format!(
            "{place}: another writer is staging a checkpoint of this name (id {})",
            entry.folder
        ))
        .hint(format!(
            "one name has one writer at a time: wait for it, or give it up; one that sends nothing \
             for {} s no longer counts",
            HOLDS_NAME.as_secs()
        )))
    }

    async fn begin_now(
        self: Arc<Self>,
        place: Place,
        id: String,
        folder: String,
        begin: Begin,
    ) -> Result<Status> {
        let now = self.now_ms();
        let room = self.take_room(JOURNAL_BYTES, None, None).await?;
        let home = room.dir;
        let ahead = match begin.bytes.map(disk_bytes) {
            // What no directory holds alone is spread over several, file by file.
            Some(bytes) if bytes > 0 && (self.dirs.len() == 1 || bytes <= self.largest()) => {
                Some(self.take_room(bytes, None, None).await?)
            }
            _ => None,
        };
        let journal = Journal {
            format: FORMAT,
            bucket: place.bucket.clone(),
            prefix: place.prefix.clone(),
            id,
            part: begin.part.clone(),
            replace: begin.replace,
            stage: Stage::Staging,
            begun_ms: now,
            staged_ms: 0,
            durable_ms: 0,
            deadline_ms: 0,
            files: Vec::new(),
            elsewhere: Vec::new(),
            meta: serde_json::Value::Null,
            remove: Vec::new(),
            publishing: false,
            whole: false,
        };
        let entry = self.entry(place.clone(), folder.clone(), home, journal, Phase::Staging);
        {
            let mut state = entry.state.lock();
            state.rooms.push(room);
            state.ahead = ahead;
        }
        let left = {
            let mut entries = self.entries.lock();
            if let Some(entry) = entries.get(&folder).cloned() {
                drop(entries);
                return Ok(self.status_of(&entry));
            }
            if entries.len() >= CHECKPOINTS_MAX {
                return Err(Error::busy(format!(
                    "{CHECKPOINTS_MAX} checkpoints are on this node's disk already"
                )));
            }
            let left = match begin.part {
                None => self.hold_name(&entries, &place)?,
                Some(_) => None,
            };
            entries.insert(folder.clone(), entry.clone());
            left
        };
        if let Some(old) = left {
            tracing::warn!(checkpoint = %place, id = old.folder, "a checkpoint that was not \
                committed gives way to another of its name");
            self.stats.abandoned.fetch_add(1, Relaxed);
            self.discard(&old).await;
        }
        let path = self.folder(home, &folder);
        let made =
            spawn_blocking(move || fs::create_dir_all(&path).map_err(|e| disk_error(&path, e)));
        let made = match made.await.map_err(ended)? {
            Ok(()) => self.save(&entry).await,
            Err(e) => Err(e),
        };
        if let Err(e) = made {
            self.drop_local(&entry).await;
            return Err(e);
        }
        self.stats.begun.fetch_add(1, Relaxed);
        Ok(self.status_of(&entry))
    }

    fn entry(
        &self,
        place: Place,
        folder: String,
        home: usize,
        journal: Journal,
        phase: Phase,
    ) -> Arc<Entry> {
        let now = self.now_ms();
        let next_number = journal
            .files
            .iter()
            .map(|f| f.number + 1)
            .max()
            .unwrap_or(1);
        let writes = TaskTracker::new();
        // It can be waited for at any time.
        writes.close();
        Arc::new(Entry {
            place,
            folder,
            home,
            order: self.order.fetch_add(1, Relaxed),
            at_origin: AtomicU64::new(0),
            cancel: self.stop.child_token(),
            writes,
            readers: TaskTracker::new(),
            early: Early::default(),
            saving: Mutex::default(),
            state: Mutex::new(State {
                journal,
                phase,
                rooms: Vec::new(),
                ahead: None,
                dirs: HashMap::new(),
                uploads: 0,
                used_ms: now,
                next_number,
                error: None,
                failures: 0,
                late: false,
                retry_ms: 0,
                read_ms: now,
            }),
        })
    }

    /// Writes the journal as it is now.
    pub(crate) async fn save(&self, entry: &Arc<Entry>) -> Result<()> {
        let (entry, folder) = (entry.clone(), self.folder(entry.home, &entry.folder));
        let saved = spawn_blocking(move || {
            // In here, where nobody breaks it off: the last one to write writes what holds by then.
            let _one = entry.saving.lock();
            let journal = {
                let state = entry.state.lock();
                if state.phase == Phase::Gone {
                    return Err(unknown(&entry.place, &entry.folder));
                }
                state.journal.clone()
            };
            journal.save(&folder)
        });
        saved.await.map_err(ended)?
    }

    async fn commit_now(self: Arc<Self>, entry: Arc<Entry>, commit: Commit) -> Result<Status> {
        let place = &entry.place;
        let within = self.deadline_of(&commit)?;
        if !begin_commit(&entry)? {
            // Its answer was lost.
            return Ok(self.status_of(&entry));
        }
        let done = self.commit_files(&entry, commit, within).await;
        {
            let mut state = entry.state.lock();
            let is_mine = state.phase == Phase::Committing;
            if let Err(e) = done {
                if is_mine {
                    state.phase = Phase::Staging;
                    state.journal.stage = Stage::Staging;
                    state.journal.staged_ms = 0;
                    state.used_ms = self.now_ms();
                }
                return Err(e);
            }
            if !is_mine {
                return Err(unknown(place, &entry.folder));
            }
            state.phase = Phase::Staged;
            state.ahead = None;
        }
        self.stats.staged.fetch_add(1, Relaxed);
        tracing::info!(
            checkpoint = %place,
            id = entry.folder,
            size = %format_bytes(entry.state.lock().journal.bytes()),
            "a checkpoint is staged"
        );
        self.tell();
        self.tasks.spawn(flush::run(self.clone(), entry.clone()));
        Ok(self.status_of(&entry))
    }

    fn deadline_of(&self, commit: &Commit) -> Result<Duration> {
        match commit.deadline_s {
            Some(s) if !(s.is_finite() && (0.0..=1e9).contains(&s)) => {
                Err(Error::invalid(format!("deadline_s is {s}"))
                    .hint("seconds after the commit; 0 for none"))
            }
            Some(s) => Ok(Duration::from_secs_f64(s)),
            None => Ok(self.config.deadline),
        }
    }

    /// Syncs the names of the files, and then the word that they are all.
    async fn commit_files(
        &self,
        entry: &Arc<Entry>,
        commit: Commit,
        within: Duration,
    ) -> Result<()> {
        let now = self.now_ms();
        let (of, dirs) = (entry.clone(), self.folders_with_files(entry));
        let synced = spawn_blocking(move || {
            let journal = of.state.lock().journal.clone();
            let journal = prepared(&of.place, journal, &commit)?;
            of.state.lock().journal = Journal {
                stage: Stage::Staged,
                staged_ms: now,
                deadline_ms: match within.is_zero() {
                    true => 0,
                    false => now.saturating_add(within.as_millis() as i64),
                },
                ..journal
            };
            dirs.iter().try_for_each(|dir| {
                sync_folder(dir)?;
                dir.parent().map_or(Ok(()), sync_folder)
            })
        });
        synced.await.map_err(ended)??;
        let saved = self.save(entry).await;
        saved.map_err(|e| {
            e.context(format!(
                "{}: the checkpoint could not be committed",
                entry.place
            ))
        })
    }

    fn folders_with_files(&self, entry: &Entry) -> Vec<PathBuf> {
        let state = entry.state.lock();
        let mut dirs: Vec<usize> = state.dirs.values().copied().chain([entry.home]).collect();
        dirs.sort_unstable();
        dirs.dedup();
        dirs.iter()
            .map(|d| self.folder(*d, &entry.folder))
            .collect()
    }

    /// Gives up what is not durable.
    async fn give_up(self: Arc<Self>, entry: Arc<Entry>) -> Result<()> {
        let had = {
            let mut state = entry.state.lock();
            let had = state.phase;
            match had {
                Phase::Removing | Phase::Gone => return Ok(()),
                Phase::Committing => {
                    return Err(Error::conflict(format!(
                        "{}: it is being committed",
                        entry.place
                    )));
                }
                Phase::Staging | Phase::Durable => state.phase = Phase::Gone,
                _ => {
                    state.journal.stage = Stage::Removing;
                    state.phase = Phase::Removing;
                }
            }
            had
        };
        entry.cancel.cancel();
        if had != Phase::Durable {
            self.stats.abandoned.fetch_add(1, Relaxed);
            tracing::info!(checkpoint = %entry.place, id = entry.folder, "a checkpoint is given up");
        }
        match had {
            Phase::Staging => {
                self.discard(&entry).await;
                return Ok(());
            }
            Phase::Durable => {
                self.drop_local(&entry).await;
                return Ok(());
            }
            _ => {}
        }
        let saved = self.save(&entry).await;
        self.tell();
        let place = entry.place.clone();
        // Whether or not that could be noted.
        self.tasks.spawn(flush::remove(self.clone(), entry));
        saved.map_err(|e| {
            e.context(format!(
                "{place}: it is given up, but that could not be noted: if the node is started again \
                 before it is gone, it is sent all the same"
            ))
        })
    }

    async fn remove_now(self: Arc<Self>, place: Place, manifest: Manifest) -> Result<()> {
        // What is here of it.
        if let Some(entry) = self.newest(&place, Some(&manifest.id), None)? {
            if entry.leave(|state| state.phase == Phase::Durable) {
                self.drop_local(&entry).await;
            } else if entry.state.lock().phase.is_pending() {
                return Err(
                    Error::conflict(format!("{place}: it is on its way to the origin"))
                        .hint("wait until it is durable"),
                );
            }
        }
        let room = self.take_room(JOURNAL_BYTES, None, None).await?;
        let home = room.dir;
        let folder = format!("{:016x}", rand::random::<u64>());
        let journal = removal(&place, manifest, self.now_ms());
        let entry = self.entry(place, folder.clone(), home, journal, Phase::Removing);
        entry.state.lock().rooms.push(room);
        self.entries.lock().insert(folder.clone(), entry.clone());
        let path = self.folder(home, &folder);
        let made =
            spawn_blocking(move || fs::create_dir_all(&path).map_err(|e| disk_error(&path, e)));
        let noted = match made.await.map_err(ended)? {
            Ok(()) => self.save(&entry).await,
            Err(e) => Err(e),
        };
        if let Err(e) = noted {
            self.drop_local(&entry).await;
            return Err(e);
        }
        let done = flush::remove_once(&self, &entry).await;
        match done {
            Ok(()) => self.drop_local(&entry).await,
            Err(_) => drop(self.tasks.spawn(flush::remove(self.clone(), entry))),
        }
        done
    }

    /// Removes a checkpoint that was not committed. Its files are gone and their room is given back
    /// when this returns; uploads that were begun for it are ended in the background.
    async fn discard(self: &Arc<Self>, entry: &Arc<Entry>) {
        entry.cancel.cancel();
        if !entry.early.is_begun() {
            return self.drop_local(entry).await;
        }
        let (folders, of) = (self.folders(entry), entry.clone());
        let journal = {
            let journal = &mut entry.state.lock().journal;
            (journal.stage, journal.staged_ms) = (Stage::Removing, 0);
            journal.clone()
        };
        let home = self.folder(entry.home, &entry.folder);
        let emptied = spawn_blocking(move || {
            let _one = of.saving.lock();
            // A commit that failed late may have left another word there.
            if let Err(e) = journal.save(&home) {
                tracing::warn!(id = of.folder, error = %e.describe(), "that a checkpoint was given up \
                    could not be noted");
            }
            folders.iter().for_each(|folder| remove_files(folder));
        });
        if let Err(e) = emptied.await {
            tracing::error!(error = %e, "removing a checkpoint's files was broken off");
        }
        {
            let mut state = entry.state.lock();
            state.phase = Phase::Removing;
            state.ahead = None;
            for room in &mut state.rooms {
                room.shrink_to(if room.dir == entry.home {
                    JOURNAL_BYTES
                } else {
                    0
                });
            }
        }
        self.tell();
        self.tasks.spawn(flush::remove(self.clone(), entry.clone()));
    }

    /// Removes what is on this disk of a checkpoint, and forgets it: to its end, whether or not
    /// somebody waits for it.
    pub(crate) async fn drop_local(self: &Arc<Self>, entry: &Arc<Entry>) {
        let rooms = {
            let mut state = entry.state.lock();
            state.phase = Phase::Gone;
            state.ahead = None;
            std::mem::take(&mut state.rooms)
        };
        entry.cancel.cancel();
        let folders = self.folders(entry);
        let (inner, entry) = (self.clone(), entry.clone());
        let dropping = self.tasks.spawn(async move {
            let of = entry.clone();
            let removed = spawn_blocking(move || {
                let _one = of.saving.lock();
                folders.iter().for_each(|folder| remove_folder(folder));
            });
            if let Err(e) = removed.await {
                tracing::error!(error = %e, "removing a checkpoint's files was broken off");
            }
            entry.readers.close();
            let given_back = inner.clone().give_back(entry.clone(), rooms);
            match entry.readers.is_empty() {
                true => given_back.await,
                // Nobody waits for readers who has not asked for room.
                false => drop(inner.tasks.spawn(given_back)),
            }
        });
        if let Err(e) = dropping.await {
            tracing::error!(error = %e, "removing a checkpoint was broken off");
        }
    }

    /// Gives back the room of files that were removed, when nobody reads them any more: until then they
    /// take room on the disk without a name.
    async fn give_back(self: Arc<Self>, entry: Arc<Entry>, rooms: Vec<Room>) {
        tokio::select! {
            () = entry.readers.wait() => {}
            () = self.stop.cancelled() => {}
            () = tokio::time::sleep(READERS_MAX) => {
                tracing::warn!(checkpoint = %entry.place, id = entry.folder, "files of a checkpoint \
                    that was removed are still being read: until that ends, they take room on the \
                    disk that is not counted");
            }
        }
        drop(rooms);
        self.entries.lock().remove(&entry.folder);
        self.tell();
    }

    /// Drops, of the durable checkpoints with files in one of `dirs`, that which nobody read for the
    /// longest time. `false`: there is none.
    pub(crate) async fn evict_one(self: &Arc<Self>, dirs: &[usize]) -> bool {
        let may = |state: &State| {
            state.phase == Phase::Durable && state.rooms.iter().any(|r| dirs.contains(&r.dir))
        };
        let oldest = {
            let entries = self.entries.lock();
            let durable = entries.values().filter_map(|e| {
                let state = e.state.lock();
                may(&state).then(|| (!e.readers.is_empty(), state.read_ms, e.clone()))
            });
            // The room of those that are read now comes late.
            durable.min_by_key(|(is_read, read_ms, e)| (*is_read, *read_ms, e.order))
        };
        let Some((_, _, entry)) = oldest else {
            return false;
        };
        if entry.leave(may) {
            tracing::debug!(checkpoint = %entry.place, "a durable checkpoint makes room");
            self.drop_local(&entry).await;
        }
        true
    }

    /// What durable ones may take together.
    fn warm_most(&self) -> u64 {
        let all = (0..self.dirs.len()).map(|dir| self.most(dir)).sum::<u64>();
        self.config.warm_bytes.unwrap_or(all / 2).min(all)
    }

    /// Keeps the durable ones within their bound.
    pub(crate) async fn bound_warm(self: &Arc<Self>) {
        let dirs: Vec<usize> = (0..self.dirs.len()).collect();
        loop {
            let warm: u64 = {
                let entries = self.entries.lock();
                let durable = entries.values().filter_map(|e| {
                    let state = e.state.lock();
                    let bytes = state.rooms.iter().map(|r| r.bytes).sum::<u64>();
                    (state.phase == Phase::Durable).then_some(bytes)
                });
                durable.sum()
            };
            if warm <= self.warm_most() || !self.evict_one(&dirs).await {
                return;
            }
        }
    }

    /// Finds what earlier runs left, and goes on with it.
    fn recover(self: &Arc<Self>) -> Result<()> {
        let mut folders: HashMap<String, Vec<usize>> = HashMap::new();
        for (index, dir) in self.dirs.iter().enumerate() {
            let path = dir.join(FOLDER);
            fs::create_dir_all(&path).map_err(|e| Error::file("the folder", &path, e))?;
            let entries = fs::read_dir(&path).map_err(|e| Error::file("the folder", &path, e))?;
            for entry in entries.flatten() {
                if let Ok(name) = entry.file_name().into_string()
                    && !home::is_ours(&name)
                {
                    folders.entry(name).or_default().push(index);
                }
            }
        }
        let numbers = self.numbers()?;
        let mut found = Vec::new();
        for (folder, dirs) in folders {
            match self.recovered(&folder, &dirs, &numbers) {
                Ok(Some(entry)) => found.push(entry),
                Ok(None) => {
                    for dir in dirs {
                        let path = self.folder(dir, &folder);
                        let removed = match path.is_dir() {
                            true => fs::remove_dir_all(&path),
                            false => fs::remove_file(&path),
                        };
                        if let Err(e) = removed {
                            tracing::warn!(path = %path.display(), error = %e, "what is left of a \
                                checkpoint cannot be removed");
                        }
                    }
                }
                Err(e) => {
                    for dir in dirs {
                        self.store
                            .found_aside(dir, used(&self.folder(dir, &folder)));
                    }
                    tracing::error!(folder, error = %e.describe(), "a staged checkpoint is left alone");
                }
            }
        }
        // In the order in which they were committed.
        found.sort_by_key(|(staged_ms, begun_ms, _, _, _)| (*staged_ms, *begun_ms));
        for (_, _, journal, home, (dirs, phase, error, folder)) in found {
            let place = Place {
                bucket: journal.bucket.clone(),
                prefix: journal.prefix.clone(),
            };
            let entry = self.entry(place, folder, home, journal, phase);
            {
                let mut state = entry.state.lock();
                state.error = error;
                for file in &entry_files(&state) {
                    if let Some(dir) = dirs.get(&file.number) {
                        add_room(self, &mut state.rooms, *dir, disk_bytes(file.size));
                    }
                }
                add_room(self, &mut state.rooms, home, JOURNAL_BYTES);
                state.dirs = dirs;
            }
            self.entries
                .lock()
                .insert(entry.folder.clone(), entry.clone());
            match phase {
                Phase::Removing => drop(self.tasks.spawn(flush::remove(self.clone(), entry))),
                Phase::Durable => early::end_leftovers(self, &entry),
                _ => {
                    tracing::info!(checkpoint = %entry.place, id = entry.folder, "a checkpoint \
                        that was staged before this start is flushed");
                    self.tasks.spawn(flush::run(self.clone(), entry));
                }
            }
        }
        Ok(())
    }

    /// The numbers of the cache directories that have one.
    fn numbers(&self) -> Result<HashSet<String>> {
        let numbers = self.dirs.iter().map(|dir| home::number(&dir.join(FOLDER)));
        numbers.filter_map(Result::transpose).collect()
    }

    /// Whether a folder without a journal may be removed.
    fn check_homeless(
        &self,
        folder: &str,
        dirs: &[usize],
        numbers: &HashSet<String>,
    ) -> Result<()> {
        for dir in dirs {
            let mark = home::read(&self.folder(*dir, folder))?;
            if let Some(mark) = mark.filter(|mark| !numbers.contains(&mark.number)) {
                return Err(Error::internal(format!(
                    "{}: the journal of this checkpoint is in {}, which is not there",
                    self.folder(*dir, folder).display(),
                    mark.path.display()
                ))
                .hint("start the node with that cache directory too; or remove this folder"));
            }
        }
        Ok(())
    }

    /// What a folder holds; `None` if that is to be removed.
    #[expect(clippy::type_complexity, reason = "used in one place")]
    fn recovered(
        &self,
        folder: &str,
        dirs: &[usize],
        numbers: &HashSet<String>,
    ) -> Result<
        Option<(
            i64,
            i64,
            Journal,
            usize,
            (HashMap<u32, usize>, Phase, Option<String>, String),
        )>,
    > {
        let mut home = None;
        for dir in dirs {
            if let Some(journal) = Journal::load(&self.folder(*dir, folder))? {
                home = Some((*dir, journal));
            }
        }
        let Some((home, journal)) = home else {
            self.check_homeless(folder, dirs, numbers)?;
            return Ok(None);
        };
        let mut at = HashMap::new();
        let mut lacking = None;
        for file in &journal.files {
            let whole = |dir: &&usize| {
                let path = self.folder(**dir, folder).join(format!("f{}", file.number));
                fs::metadata(path).is_ok_and(|m| m.len() == disk_bytes(file.size))
            };
            match dirs.iter().find(whole) {
                Some(dir) => drop(at.insert(file.number, *dir)),
                None if file.uploaded => {}
                None => lacking = Some(file.name.clone()),
            }
        }
        let phase = match journal.stage {
            Stage::Staging => {
                tracing::warn!(checkpoint = %format_args!("{}/{}", journal.bucket, journal.prefix),
                    id = folder, "a checkpoint that was begun and never committed is removed");
                self.stats.abandoned.fetch_add(1, Relaxed);
                let folders: Vec<PathBuf> = dirs.iter().map(|d| self.folder(*d, folder)).collect();
                if upload::logs(&folders).is_empty() {
                    return Ok(None);
                }
                // Uploads were begun for it, and are ended.
                folders.iter().for_each(|folder| remove_files(folder));
                at.clear();
                Phase::Removing
            }
            Stage::Durable if lacking.is_some() => return Ok(None),
            Stage::Durable => Phase::Durable,
            Stage::Removing => Phase::Removing,
            Stage::Staged => Phase::Staged,
        };
        let error = lacking.filter(|_| phase == Phase::Staged).map(|name| {
            let e = format!("its file {name:?} is not on this node's disks any more");
            tracing::error!(checkpoint = %format_args!("{}/{}", journal.bucket, journal.prefix),
                id = folder, error = e, "a staged checkpoint cannot be flushed");
            e
        });
        let (staged, begun) = (journal.staged_ms, journal.begun_ms);
        let rest = (at, phase, error, folder.to_owned());
        Ok(Some((staged, begun, journal, home, rest)))
    }
}

fn entry_files(state: &State) -> Vec<FileEntry> {
    state.journal.files.clone()
}

fn add_room(inner: &Arc<Inner>, rooms: &mut Vec<Room>, dir: usize, bytes: u64) {
    let room = Room::found(inner, dir, bytes);
    match rooms.iter_mut().find(|r| r.dir == dir) {
        Some(all) => all.join(room),
        None => rooms.push(room),
    }
}

/// Whether a checkpoint begins to be committed; `false`: it was before.
fn begin_commit(entry: &Entry) -> Result<bool> {
    let place = &entry.place;
    let mut state = entry.state.lock();
    match state.phase {
        Phase::Staging => {}
        Phase::Committing => {
            return Err(Error::conflict(format!("{place}: it is being committed")));
        }
        Phase::Removing | Phase::Gone => return Err(unknown(place, &entry.folder)),
        _ => return Ok(false),
    }
    if state.uploads > 0 {
        return Err(Error::conflict(format!(
            "{place}: {} files are still arriving",
            state.uploads
        ))
        .hint("commit when all of them have been answered"));
    }
    state.phase = Phase::Committing;
    Ok(true)
}

/// The journal of the removal of a durable checkpoint.
fn removal(place: &Place, manifest: Manifest, now_ms: i64) -> Journal {
    let last: HashSet<&str> = manifest.last.iter().map(String::as_str).collect();
    let files = manifest
        .files
        .iter()
        .zip(0..)
        .map(|(file, number)| FileEntry {
            name: file.name.clone(),
            size: file.size,
            number,
            last: last.contains(file.name.as_str()),
            uploaded: true,
            etag: None,
        });
    Journal {
        format: FORMAT,
        bucket: place.bucket.clone(),
        prefix: place.prefix.clone(),
        part: None,
        replace: false,
        stage: Stage::Removing,
        begun_ms: now_ms,
        staged_ms: 0,
        durable_ms: 0,
        deadline_ms: 0,
        files: files.collect(),
        elsewhere: Vec::new(),
        meta: serde_json::Value::Null,
        remove: Vec::new(),
        publishing: false,
        whole: true,
        id: manifest.id,
    }
}

/// Removes the files of a checkpoint; its journal and the logs of its uploads stay.
fn remove_files(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix('f'));
        if number.is_some_and(|number| number.parse::<u32>().is_ok())
            && let Err(e) = fs::remove_file(entry.path())
        {
            tracing::warn!(file = %entry.path().display(), error = %e, "a file of a checkpoint cannot \
                be removed");
        }
    }
}

fn remove_folder(folder: &Path) {
    match fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(folder = %folder.display(), error = %e, "a checkpoint's files cannot be \
                removed");
        }
        _ => {}
    }
}

fn used(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|e| e.metadata().ok())
        .map(|m| m.len())
        .sum()
}

/// Looks now and then for what nobody writes any more, and for what is late.
async fn sweep(inner: Weak<Inner>, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(SWEEP_EVERY);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let Some(inner) = inner.upgrade() else { return };
        inner.look().await;
    }
}

impl Inner {
    pub(crate) async fn look(self: &Arc<Self>) {
        let now = self.now_ms();
        let mut old = Vec::new();
        for entry in self.entries.lock().values() {
            let mut state = entry.state.lock();
            if state.is_idle(now, self.config.abandon_after) {
                // At once: from here on, it cannot be committed.
                state.phase = Phase::Gone;
                old.push(entry.clone());
            }
            let deadline = state.journal.deadline_ms;
            if state.phase.is_pending() && deadline > 0 && now > deadline && !state.late {
                state.late = true;
                self.stats.late.fetch_add(1, Relaxed);
                tracing::error!(
                    checkpoint = %entry.place,
                    id = entry.folder,
                    seconds = (now - state.journal.staged_ms) as f64 / 1e3,
                    at_origin = entry.at_origin.load(Relaxed),
                    bytes = state.journal.bytes(),
                    error = state.error,
                    "a checkpoint is not durable by its deadline"
                );
            }
        }
        for entry in old {
            tracing::warn!(checkpoint = %entry.place, id = entry.folder, "a checkpoint that was \
                begun and never committed is removed");
            self.stats.abandoned.fetch_add(1, Relaxed);
            self.discard(&entry).await;
        }
        self.bound_warm().await;
    }
}
