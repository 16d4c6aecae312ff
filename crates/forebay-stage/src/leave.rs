//! Checkpoints that leave: those that are given up, removed, or make room.

use crate::{
    early,
    entry::{Entry, Phase, State},
    flush,
    journal::{FORMAT, FileEntry, Journal, Stage, sync_folder},
    manifest::Manifest,
    rooms::Room,
    stages::{FOLDER, Inner, JOURNAL_BYTES, ended},
    types::Place,
    upload,
};
use forebay_core::{Error, Result};
use hashbrown::HashSet;
use std::{
    fs,
    path::Path,
    sync::{Arc, Weak, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

const SWEEP_EVERY: Duration = Duration::from_secs(2);
/// How long the room of files that are removed waits for those who read them.
const READERS_MAX: Duration = Duration::from_secs(10);

impl Inner {
    /// Gives up what is not durable.
    pub(crate) async fn give_up(self: Arc<Self>, entry: Arc<Entry>) -> Result<()> {
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
        let (inner, is_noted) = (self.clone(), saved.is_ok());
        self.tasks.spawn(async move {
            // If that is not noted, the next start may have to send the files.
            if is_noted {
                tokio::select! {
                    () = inner.stop.cancelled() => return,
                    () = inner.empty(&entry) => {}
                }
            }
            flush::remove(inner, entry).await;
        });
        saved.map_err(|e| {
            e.context(format!(
                "{place}: it is given up, but that could not be noted: if the node is started again \
                 before it is gone, it is sent all the same"
            ))
        })
    }

    pub(crate) async fn remove_now(
        self: Arc<Self>,
        place: Place,
        manifest: Manifest,
    ) -> Result<()> {
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
        // Otherwise each attempt would leave one more here, as long as the origin refuses.
        if let Some(entry) = self.removal_of(&place, &manifest.id) {
            let done = flush::remove_once(&self, &entry).await;
            if done.is_ok() {
                self.drop_local(&entry).await;
            }
            return done;
        }
        let room = self.take_room(JOURNAL_BYTES, None, None).await?;
        let home = room.dir;
        let folder = format!("{:016x}", rand::random::<u64>());
        let order = self.order_from(0);
        let journal = removal(&place, manifest, order, self.now_ms());
        let entry = self.entry(place, folder.clone(), home, journal, Phase::Removing, order);
        entry.state.lock().rooms.push(room);
        self.entries.lock().insert(folder.clone(), entry.clone());
        self.note_first(&entry).await?;
        // From here on it goes as a whole, whatever happens to the node: without the name of the
        // folder, a loss of power would leave half of it at the origin.
        let staged = self.dirs[home].join(FOLDER);
        let synced = spawn_blocking(move || sync_folder(&staged)).await;
        if let Err(e) = synced.map_err(ended).flatten() {
            self.drop_local(&entry).await;
            return Err(e);
        }
        let done = flush::remove_once(&self, &entry).await;
        match done {
            Ok(()) => self.drop_local(&entry).await,
            Err(_) => {
                entry.state.lock().failures += 1;
                drop(self.tasks.spawn(flush::remove(self.clone(), entry)));
            }
        }
        done
    }

    /// The removal of this durable checkpoint that has failed before, and is tried again and again.
    fn removal_of(&self, place: &Place, id: &str) -> Option<Arc<Entry>> {
        let entries = self.entries.lock();
        let found = entries.values().find(|entry| {
            let state = entry.state.lock();
            let goes_on = state.phase == Phase::Removing && state.failures > 0;
            goes_on && state.journal.whole && state.journal.id == id && entry.place == *place
        });
        found.cloned()
    }

    /// Removes a checkpoint that was not committed. Its files are gone and their room is given back
    /// when this returns; uploads that were begun for it are ended in the background.
    pub(crate) async fn discard(self: &Arc<Self>, entry: &Arc<Entry>) {
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
            if let Err(e) = journal.save(&home, sync_folder) {
                tracing::warn!(id = of.folder, error = %e.describe(), "that a checkpoint was given up \
                    could not be noted");
            }
            folders.iter().for_each(|folder| remove_files(folder));
        });
        if let Err(e) = emptied.await {
            tracing::error!(error = %e, "removing a checkpoint's files was broken off");
        }
        self.give_back_files(entry);
        self.tasks.spawn(flush::remove(self.clone(), entry.clone()));
    }

    /// Removes the files of a checkpoint that was committed and is given up: their room does not wait
    /// until the origin has nothing of it any more.
    async fn empty(self: &Arc<Self>, entry: &Arc<Entry>) {
        // Uploads that are under way read the files.
        entry.writes.wait().await;
        let folders = self.folders(entry);
        let emptied = spawn_blocking(move || {
            folders.iter().for_each(|folder| remove_files(folder));
        });
        if let Err(e) = emptied.await {
            tracing::error!(error = %e, "removing a checkpoint's files was broken off");
        }
        entry.readers.close();
        tokio::select! {
            () = entry.readers.wait() => {}
            () = tokio::time::sleep(READERS_MAX) => {}
        }
        self.give_back_files(entry);
    }

    /// Gives back the room of a checkpoint's files, which were removed; its journal stays, until the
    /// origin has nothing of it any more.
    fn give_back_files(&self, entry: &Entry) {
        {
            let mut state = entry.state.lock();
            // In one step with its room: whoever looks for room waits for checkpoints that go.
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
                if of.state.lock().journal.stage == Stage::Durable {
                    early::warn_of_logs(&of, upload::logs(&folders).len());
                }
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
    /// longest time; or else one that was being staged before this start, of whose writer nothing was
    /// heard since. `false`: there is none.
    pub(crate) async fn evict_one(self: &Arc<Self>, dirs: &[usize]) -> bool {
        let may = |state: &State| {
            let goes = state.phase == Phase::Durable || state.is_left();
            goes && state.rooms.iter().any(|r| dirs.contains(&r.dir))
        };
        let oldest = {
            let entries = self.entries.lock();
            let going = entries.values().filter_map(|e| {
                let state = e.state.lock();
                let key = (
                    state.is_left(),
                    !e.readers.is_empty(),
                    state.read_ms,
                    e.order,
                );
                may(&state).then(|| (key, e.clone()))
            });
            // The room of those that are read now comes late.
            going.min_by_key(|(key, _)| *key)
        };
        let Some(((is_left, ..), entry)) = oldest else {
            return false;
        };
        if !entry.leave(|state| may(state) && state.is_left() == is_left) {
            return true;
        }
        if is_left {
            tracing::warn!(checkpoint = %entry.place, id = entry.folder, "a checkpoint that was begun \
                before this start, and that nobody has gone on with, makes room");
            self.stats.abandoned.fetch_add(1, Relaxed);
            self.discard(&entry).await;
        } else {
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
}

/// The journal of the removal of a durable checkpoint.
fn removal(place: &Place, manifest: Manifest, order: u64, now_ms: i64) -> Journal {
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
        over: None,
        stage: Stage::Removing,
        order,
        begun_ms: now_ms,
        staged_ms: 0,
        durable_ms: 0,
        deadline_ms: 0,
        files: files.collect(),
        elsewhere: Vec::new(),
        meta: serde_json::Value::Null,
        remove: Vec::new(),
        publishing: false,
        taken: false,
        whole: true,
        id: manifest.id,
    }
}

/// Removes the files of a checkpoint; its journal and the logs of its uploads stay.
pub(crate) fn remove_files(folder: &Path) {
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

/// Looks now and then for what nobody writes any more, and for what is late.
pub(crate) async fn sweep(inner: Weak<Inner>, stop: CancellationToken) {
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
    /// Notes, counts and tells, once, that a checkpoint was not durable by its deadline.
    pub(crate) fn note_late(&self, entry: &Entry, state: &mut State, now: i64) {
        let deadline = state.journal.deadline_ms;
        if state.late || !state.phase.is_pending() || deadline == 0 || now <= deadline {
            return;
        }
        state.late = true;
        self.stats.late.fetch_add(1, Relaxed);
        tracing::error!(
            checkpoint = %entry.place,
            id = entry.folder,
            seconds = (now - state.journal.staged_ms) as f64 / 1e3,
            at_origin = entry.at_origin.load(Relaxed),
            bytes = state.journal.bytes(),
            error = state.error,
            "a checkpoint was not durable by its deadline"
        );
    }

    async fn look(self: &Arc<Self>) {
        let (now, steady) = (self.now_ms(), self.steady_ms());
        let mut old = Vec::new();
        for entry in self.entries.lock().values() {
            let mut state = entry.state.lock();
            if state.is_idle(steady, self.config.abandon_after) {
                // At once: from here on, it cannot be committed.
                state.phase = Phase::Gone;
                old.push(entry.clone());
            }
            self.note_late(entry, &mut state, now);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Begin, Commit, NamedFile, StageConfig, Stages, Until, flush::to_its_end,
        stages::CHECKPOINTS_MAX,
    };
    use forebay_core::{ErrorKind, ManualClock};
    use forebay_engine::Freshness;
    use forebay_store::{DirConfig, Store, StoreConfig, disk::RealDisk};
    use forebay_testing::engine::{Bench, NOW};
    use futures::{StreamExt, stream};

    /// A node with its cache in `dir`.
    fn node(dir: &Path) -> (Bench, Stages) {
        let clock = ManualClock::at(NOW);
        let config = StoreConfig {
            dirs: vec![DirConfig {
                path: dir.to_owned(),
                capacity_bytes: 256 << 20,
            }],
            ..StoreConfig::default()
        };
        let store = Store::open_on(Arc::new(RealDisk), config, Arc::new(clock.clone()));
        let store = Arc::new(store.unwrap());
        let bench = Bench::over(
            Arc::default(),
            Freshness::Always,
            Some(store.clone()),
            None,
            clock,
            64 << 20,
        );
        let stages = Stages::open(StageConfig::default(), bench.engine.clone(), store).unwrap();
        (bench, stages)
    }

    #[tokio::test]
    async fn what_was_given_up_changes_nothing_at_the_origin_any_more() {
        let dir = tempfile::tempdir().unwrap();
        let (_bench, stages) = node(dir.path());
        let place = Place::new("data", "ck").unwrap();
        let begun = stages.begin(&place, Begin::default()).await.unwrap();
        let entry = stages.0.find(&place, &begun.id).unwrap();
        let write = || to_its_end(&stages.0, &entry, async { Ok(()) });
        write().await.unwrap();
        for phase in [Phase::Removing, Phase::Gone] {
            entry.state.lock().phase = phase;
            assert_eq!(write().await.unwrap_err().kind(), ErrorKind::Conflict);
            assert!(entry.writes.is_empty());
        }
    }

    #[tokio::test]
    async fn a_removal_that_somebody_else_has_done_is_not_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let (bench, stages) = node(dir.path());
        let place = Place::new("data", "ck").unwrap();
        let begun = stages.begin(&place, Begin::default()).await.unwrap();
        let entry = stages.0.find(&place, &begun.id).unwrap();
        {
            let mut state = entry.state.lock();
            state.journal.files.push(FileEntry {
                name: "f".into(),
                size: 1,
                number: 1,
                last: false,
                uploaded: true,
                etag: None,
            });
            state.journal.whole = true;
            state.phase = Phase::Gone;
        }
        *bench.origin.deletes_left.lock() = Some(0);
        let removing = flush::remove(stages.0.clone(), entry);
        let ended = tokio::time::timeout(Duration::from_secs(30), removing);
        assert!(ended.await.is_ok());
    }

    #[tokio::test]
    async fn durable_ones_make_way_where_there_are_too_many() {
        let dir = tempfile::tempdir().unwrap();
        let (_bench, stages) = node(dir.path());
        let place = Place::new("data", "ck").unwrap();
        let id = stages.begin(&place, Begin::default()).await.unwrap().id;
        let body = stream::iter([Ok(bytes::Bytes::from_static(b"data"))]).boxed();
        let put = stages.put(&place, &id, None, "f", Some(4), body);
        assert_eq!(put.await.unwrap(), 4);
        let commit = Commit {
            files: vec![NamedFile {
                name: "f".into(),
                size: 4,
            }],
            ..Commit::default()
        };
        stages.commit(&place, &id, None, commit).await.unwrap();
        let patience = Duration::from_secs(20);
        let waited = stages.wait(&place, Some(&id), None, Until::Durable, patience);
        assert!(waited.await.unwrap().durable);
        {
            // As if there were so many.
            let mut entries = stages.0.entries.lock();
            let entry = entries[&id].clone();
            for n in entries.len()..CHECKPOINTS_MAX {
                entries.insert(format!("like {n}"), entry.clone());
            }
        }
        let next = Place::new("data", "next").unwrap();
        stages.begin(&next, Begin::default()).await.unwrap();
        let entries = stages.0.entries.lock();
        assert_eq!(entries.len(), CHECKPOINTS_MAX);
        assert!(!entries.contains_key(&id));
    }
}
