//! The checkpoints of a node: from their beginning to their end.

use crate::{
    StageConfig, StageGauges, StageStats,
    early::Early,
    entry::{Entry, Phase, State},
    file::disk_bytes,
    journal::{FORMAT, Journal, Stage},
    leave::sweep,
    look::Look,
    manifest::Manifest,
    questions::Questions,
    types::{Begin, Commit, Place, Status, Until},
};
use forebay_core::{
    Error, ErrorKind, Result, name::shorten, request, sync::Mutex, units::format_bytes,
};
use forebay_engine::Engine;
use forebay_store::Store;
use hashbrown::HashMap;
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::{OwnedMutexGuard, Semaphore, watch},
    task::spawn_blocking,
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The folder in a cache directory.
pub(crate) const FOLDER: &str = "staged";
/// What a checkpoint's journal and logs may take, which is taken when it begins.
pub(crate) const JOURNAL_BYTES: u64 = 1 << 20;
/// Checkpoints on disk. Durable ones make way for others.
pub(crate) const CHECKPOINTS_MAX: usize = 10_000;
/// Files of one checkpoint.
pub(crate) const FILES_MAX: usize = 100_000;
/// The largest file: no origin takes a larger object, and the sum of all sizes is a number.
const FILE_MAX_BYTES: u64 = 50 << 40;
const FILE_NAME_MAX_BYTES: usize = 512;
const PART_NAME_MAX_BYTES: usize = 32;
/// A checkpoint that was not committed holds its name against others for so long after the last
/// sign of life of its writer.
const HOLDS_NAME: Duration = Duration::from_secs(30);

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
    /// Of readers, to origins.
    pub questions: Questions,
    pub stats: StageStats,
    /// Something changed.
    pub changed: watch::Sender<u64>,
    pub stop: CancellationToken,
    /// The node is about to stop: nobody is to wait here any longer.
    leaving: CancellationToken,
    pub tasks: TaskTracker,
    /// The place of the next one, above all that were given.
    order: AtomicU64,
}

pub(crate) fn unknown(place: &Place, id: &str) -> Error {
    Error::not_found(format!(
        "{place}: no checkpoint with the id {:?} is being written here",
        shorten(id)
    ))
    .hint("it was given up, or begun at another node: begin anew, at the node that the files go to")
}

pub(crate) fn ended(e: tokio::task::JoinError) -> Error {
    Error::internal("work on a checkpoint was broken off").caused_by(e)
}

/// What writing a file failed with: `NoRoom` if the file system has none.
pub(crate) fn disk_error(what: &str, path: &Path, e: std::io::Error) -> Error {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    match e.kind() {
        StorageFull | QuotaExceeded => Error::new(
            ErrorKind::NoRoom,
            format!("{what}: {}: the disk is full", path.display()),
        )
        .hint("free space on that file system, or give the cache a smaller size")
        .caused_by(e),
        _ => Error::file(what, path, e),
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

pub(crate) fn folder_of(id: &str, part: Option<&str>) -> Result<String> {
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
            questions: Questions::default(),
            stats: StageStats::default(),
            changed: watch::Sender::new(0),
            stop: CancellationToken::new(),
            leaving: CancellationToken::new(),
            tasks: TaskTracker::new(),
            order: AtomicU64::new(1),
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
                g.lost += usize::from(state.lost);
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
    /// writer is at it, `Unsupported` if the bucket is only read, `NoRoom` or `Busy`.
    pub async fn begin(&self, place: &Place, begin: Begin) -> Result<Status> {
        let inner = self.0.clone();
        // Buckets that do not exist, or take nothing, are found out now.
        let origin = inner.engine.buckets().origin(&place.bucket).await?;
        origin
            .check_writable()
            .map_err(|e| e.context(format!("{place}: a checkpoint here could never be durable")))?;
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
            return inner.status_of_known(&entry, place);
        }
        let look = match (&begin.part, begin.replace) {
            (Some(_), _) => None,
            (None, true) => Some(Look::begin(inner.engine.clone(), place.clone())),
            (None, false) => {
                inner.check_free(place).await?;
                None
            }
        };
        let place = place.clone();
        // It runs to its end, so that what it leaves on disk is known.
        let begun = async move { inner.begin_now(place, id, folder, begin, look).await };
        let task = request::spawn(begun);
        task.await.map_err(ended)?
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
            if there || self.0.leaving.is_cancelled() {
                return Ok(status);
            }
            tokio::select! {
                changed = changed.changed() => match changed {
                    Ok(()) => {}
                    Err(_) => return Ok(status),
                },
                () = tokio::time::sleep_until(deadline) => return Ok(status),
                () = self.0.leaving.cancelled() => return Ok(status),
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
    /// `NotFound`; `Conflict` if one of its name is on its way, and not only until the name is free.
    pub async fn remove(&self, place: &Place, id: Option<&str>) -> Result<()> {
        let inner = self.0.clone();
        if inner.may_take(place) {
            return Err(Error::conflict(format!(
                "{place}: a checkpoint of this name is on its way to the origin"
            ))
            .hint(
                "wait until it is durable, or give it up by its id (`forebay checkpoint remove NAME \
                 --id ID --give-up`)",
            ));
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

    /// Answers those who wait for a checkpoint with how it stands, now and from now on: the node is
    /// about to stop.
    pub fn answer_waiting(&self) {
        self.0.leaving.cancel();
    }

    /// Ends all flushes where they are: the next start goes on with them.
    pub async fn close(&self) {
        self.answer_waiting();
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

pub(crate) fn missing(place: &Place, id: Option<&str>) -> Error {
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

/// Whether one of the name was committed and is not durable.
fn is_pending(entries: &HashMap<String, Arc<Entry>>, place: &Place) -> bool {
    let mut of_name = entries.values().filter(|e| e.place == *place);
    of_name.any(|e| e.state.lock().is_on_its_way())
}

fn there_is_one(place: &Place) -> Error {
    Error::new(
        ErrorKind::AlreadyExists,
        format!("{place}: there is a checkpoint of this name"),
    )
    .hint("choose another name, or let it be replaced")
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

impl Inner {
    pub(crate) fn now_ms(&self) -> i64 {
        self.engine.clock().now_ms()
    }

    /// For how long ago something was, by a clock that nobody sets.
    pub(crate) fn steady_ms(&self) -> i64 {
        self.engine.clock().steady_ms()
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

    pub(crate) fn tell(&self) {
        self.changed.send_modify(|n| *n += 1);
    }

    pub(crate) fn find(&self, place: &Place, folder: &str) -> Result<Arc<Entry>> {
        let found = self.entries.lock().get(folder).cloned();
        found
            .filter(|entry| entry.place == *place && entry.state.lock().phase != Phase::Gone)
            .ok_or_else(|| unknown(place, folder))
    }

    /// The checkpoint of this id; or the newest of the name that was committed, or else the newest.
    pub(crate) fn newest(
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
        is_pending(&self.entries.lock(), place)
    }

    /// Whether one of the name is on its way to the origin, and does not only wait until the name is free
    /// there.
    fn may_take(&self, place: &Place) -> bool {
        let entries = self.entries.lock();
        let mut of_name = entries.values().filter(|e| e.place == *place);
        of_name.any(|e| {
            let state = e.state.lock();
            state.is_on_its_way() && !state.journal.taken
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
                && state.phase.is_pending()
                && !state.journal.taken;
            waits.then(|| state.journal.id.clone())
        })
    }

    /// Whether the checkpoint of this id is here, and was begun before this one of its name.
    pub(crate) fn is_earlier(&self, id: &str, than: &Entry) -> bool {
        let entries = self.entries.lock();
        let found = entries.get(id);
        found.is_some_and(|other| other.place == than.place && other.order < than.order)
    }

    /// Those of its name that were begun after this one, here.
    pub(crate) fn later_than(&self, entry: &Entry) -> Vec<Arc<Entry>> {
        let entries = self.entries.lock();
        let later = entries.values().filter(|other| {
            let state = other.state.lock();
            other.place == entry.place
                && other.order > entry.order
                && state.journal.part.is_none()
                && !state.phase.is_over()
        });
        later.cloned().collect()
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
                Phase::Staging => {
                    let idle_ms = self.steady_ms().saturating_sub(state.used_ms);
                    let left_ms = self.config.abandon_after.as_millis() as i64 - idle_ms;
                    self.now_ms().saturating_add(left_ms)
                }
                _ => 0,
            },
            meta: j.meta.clone(),
        }
    }

    /// That of a checkpoint which is begun again under its id.
    fn status_of_known(&self, entry: &Entry, place: &Place) -> Result<Status> {
        if entry.place != *place {
            return Err(Error::conflict(format!(
                "the id {} belongs to {}, not to {place}",
                entry.folder, entry.place
            )));
        }
        match entry.is_given_up() {
            true => Err(Error::conflict(format!(
                "{place}: the checkpoint {} was given up",
                entry.folder
            ))
            .hint("begin a new one")),
            false => Ok(self.status_of(entry)),
        }
    }

    /// Fails if this node or the origin has a checkpoint of this name.
    async fn check_free(&self, place: &Place) -> Result<()> {
        if !self.pending_of(place)
            && Manifest::at_origin(&self.engine, &place.bucket, &place.prefix)
                .await?
                .is_none()
        {
            return Ok(());
        }
        Err(there_is_one(place))
    }

    /// One of this name that was not committed is in the way if somebody still writes it, which the
    /// second result says; others are given up: they are to be dropped.
    fn hold_name(
        &self,
        entries: &HashMap<String, Arc<Entry>>,
        place: &Place,
    ) -> (Vec<Arc<Entry>>, Result<()>) {
        let is_staging = |entry: &Entry| {
            let state = entry.state.lock();
            let staging = matches!(state.phase, Phase::Staging | Phase::Committing);
            staging && state.journal.part.is_none()
        };
        let steady = self.steady_ms();
        let (mut left, mut held) = (Vec::new(), Ok(()));
        let of_name = entries.values().filter(|e| e.place == *place);
        for entry in of_name.filter(|entry| is_staging(entry)) {
            if entry.leave(|state| state.is_left() || state.is_idle(steady, HOLDS_NAME)) {
                left.push(entry.clone());
                continue;
            }
            held = Err(Error::conflict(format!(
                "{place}: another writer is staging a checkpoint of this name (id {})",
                entry.folder
            ))
            .hint(format!(
                "one name has one writer at a time: wait for it, or give it up; one that sends nothing \
                 for {} s no longer counts",
                HOLDS_NAME.as_secs()
            )));
        }
        (left, held)
    }

    async fn begin_now(
        self: Arc<Self>,
        place: Place,
        id: String,
        folder: String,
        begin: Begin,
        look: Option<Look>,
    ) -> Result<Status> {
        let now = self.now_ms();
        let all: Vec<usize> = (0..self.dirs.len()).collect();
        let too_many = (self.entries.lock().len() + 1).saturating_sub(CHECKPOINTS_MAX);
        for _ in 0..too_many {
            if !self.evict_one(&all).await {
                break;
            }
        }
        let room = self.take_room(JOURNAL_BYTES, None, None).await?;
        let home = room.dir;
        let ahead = match begin.bytes.map(disk_bytes) {
            // What no directory holds alone is spread over several, file by file.
            Some(bytes) if bytes > 0 && (self.dirs.len() == 1 || bytes <= self.largest()) => {
                Some(self.take_room(bytes, None, None).await?)
            }
            _ => None,
        };
        let order = self.order_from(0);
        let journal = Journal {
            format: FORMAT,
            bucket: place.bucket.clone(),
            prefix: place.prefix.clone(),
            id,
            part: begin.part.clone(),
            replace: begin.replace,
            over: None,
            stage: Stage::Staging,
            order,
            begun_ms: now,
            staged_ms: 0,
            durable_ms: 0,
            deadline_ms: 0,
            files: Vec::new(),
            elsewhere: Vec::new(),
            meta: serde_json::Value::Null,
            remove: Vec::new(),
            publishing: false,
            taken: false,
            whole: false,
        };
        let phase = Phase::Staging;
        let entry = self.entry(place.clone(), folder.clone(), home, journal, phase, order);
        if let Some(look) = look {
            let _ = entry.look.set(look);
        }
        {
            let mut state = entry.state.lock();
            state.rooms.push(room);
            state.ahead = ahead;
        }
        let (left, held) = {
            let mut entries = self.entries.lock();
            if let Some(entry) = entries.get(&folder).cloned() {
                drop(entries);
                return self.status_of_known(&entry, &place);
            }
            if entries.len() >= CHECKPOINTS_MAX {
                return Err(Error::busy(format!(
                    "{CHECKPOINTS_MAX} checkpoints are on this node's disk already"
                ))
                .hint("there is place for more when some of them are durable, or removed"));
            }
            let (left, held) = match begin.part {
                // Another one may have been committed since the origin was asked.
                None if !begin.replace && is_pending(&entries, &place) => {
                    return Err(there_is_one(&place));
                }
                None => self.hold_name(&entries, &place),
                Some(_) => (Vec::new(), Ok(())),
            };
            if held.is_ok() {
                entries.insert(folder.clone(), entry.clone());
            }
            (left, held)
        };
        for old in left {
            tracing::warn!(checkpoint = %place, id = old.folder, "a checkpoint that was not \
                committed gives way to another of its name");
            self.stats.abandoned.fetch_add(1, Relaxed);
            self.discard(&old).await;
        }
        held?;
        self.note_first(&entry).await?;
        self.stats.begun.fetch_add(1, Relaxed);
        Ok(self.status_of(&entry))
    }

    /// The next place in the order of all: behind those that were given, from `least` on.
    pub(crate) fn order_from(&self, least: u64) -> u64 {
        self.order.fetch_max(least, Relaxed);
        self.order.fetch_add(1, Relaxed)
    }

    pub(crate) fn entry(
        &self,
        place: Place,
        folder: String,
        home: usize,
        journal: Journal,
        phase: Phase,
        order: u64,
    ) -> Arc<Entry> {
        let steady = self.steady_ms();
        let next_number = journal
            .files
            .iter()
            .map(|f| f.number + 1)
            .max()
            .unwrap_or(1);
        let (writes, begins) = (TaskTracker::new(), TaskTracker::new());
        // They can be waited for at any time.
        writes.close();
        begins.close();
        Arc::new(Entry {
            place,
            folder,
            home,
            order,
            recovered: phase.is_pending(),
            look: OnceLock::new(),
            at_origin: AtomicU64::new(0),
            cancel: self.stop.child_token(),
            writes,
            begins,
            replaced: AtomicBool::new(false),
            readers: TaskTracker::new(),
            early: Early::default(),
            refusals: Mutex::default(),
            saving: Mutex::default(),
            state: Mutex::new(State {
                journal,
                phase,
                rooms: Vec::new(),
                ahead: None,
                dirs: HashMap::new(),
                uploads: 0,
                used_ms: steady,
                resumed: false,
                heard: true,
                next_number,
                error: None,
                full: None,
                failures: 0,
                lost: false,
                late: false,
                retry_ms: 0,
                read_ms: steady,
            }),
        })
    }

    /// Makes the folder of a checkpoint with its journal; if that fails, nothing is left of it.
    pub(crate) async fn note_first(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<()> {
        let path = self.folder(entry.home, &entry.folder);
        let made = spawn_blocking(move || {
            fs::create_dir_all(&path).map_err(|e| disk_error("the folder", &path, e))
        });
        let noted = match made.await.map_err(ended).flatten() {
            Ok(()) => self.save(entry).await,
            Err(e) => Err(e),
        };
        if noted.is_err() {
            self.drop_local(entry).await;
        }
        noted
    }

    /// Writes the journal as it is now.
    pub(crate) async fn save(&self, entry: &Arc<Entry>) -> Result<()> {
        let (of, folder) = (entry.clone(), self.folder(entry.home, &entry.folder));
        let store = self.store.clone();
        let saved = spawn_blocking(move || {
            // In here, where nobody breaks it off: the last one to write writes what holds by then.
            let _one = of.saving.lock();
            let journal = {
                let state = of.state.lock();
                if state.phase == Phase::Gone {
                    return Err(unknown(&of.place, &of.folder));
                }
                state.journal.clone()
            };
            journal.save(&folder, |folder| {
                let synced = store.sync_folder(of.home, folder);
                synced.map_err(|e| disk_error("the folder", folder, e))
            })
        });
        let saved = saved.await.map_err(ended)?;
        entry.note_room(entry.home, &saved);
        saved
    }
}
