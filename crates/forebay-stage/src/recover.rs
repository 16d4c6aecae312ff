//! What earlier runs left on the disk.

use crate::{
    arrived, early,
    entry::{Phase, State},
    file::disk_bytes,
    flush, home,
    journal::{FileEntry, Journal, Stage, sync_folder},
    leave::remove_files,
    look::Look,
    rooms::Room,
    stages::{FOLDER, Inner, JOURNAL_BYTES},
    types::Place,
};
use forebay_core::{Error, Result};
use hashbrown::{HashMap, HashSet};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

impl Inner {
    /// Finds what earlier runs left, and goes on with it.
    pub(crate) fn recover(self: &Arc<Self>) -> Result<()> {
        let mut folders: HashMap<String, Vec<usize>> = HashMap::new();
        for (index, dir) in self.dirs.iter().enumerate() {
            let path = make_folder(dir)?;
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
        // In the order in which they were begun. Those of a version that did not note it come first.
        found.sort_by_key(|(staged_ms, begun_ms, journal, _, _)| {
            (journal.order, *staged_ms, *begun_ms)
        });
        for (_, _, journal, home, (dirs, phase, error, folder, noted)) in found {
            let place = Place {
                bucket: journal.bucket.clone(),
                prefix: journal.prefix.clone(),
            };
            let order = self.order_from(journal.order);
            let is_staging = phase == Phase::Staging;
            let replaces = journal.part.is_none() && journal.replace;
            let look =
                (is_staging && replaces).then(|| Look::begin(self.engine.clone(), place.clone()));
            let highest = match is_staging {
                true => self.clear_unfinished(&folder, &dirs).max(noted),
                false => 0,
            };
            let entry = self.entry(place, folder, home, journal, phase, order);
            if let Some(look) = look {
                let _ = entry.look.set(look);
            }
            {
                let mut state = entry.state.lock();
                if is_staging {
                    state.next_number = state.next_number.max(highest.saturating_add(1));
                    (state.resumed, state.heard) = (true, false);
                }
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
                Phase::Staging => {
                    tracing::info!(checkpoint = %entry.place, id = entry.folder, "a checkpoint that \
                        was begun before this start waits for its writer");
                    early::go_on(self, &entry);
                }
                _ => {
                    tracing::info!(checkpoint = %entry.place, id = entry.folder, "a checkpoint \
                        that was staged before this start is flushed");
                    self.tasks.spawn(flush::run(self.clone(), entry));
                }
            }
        }
        Ok(())
    }

    /// Removes the files of a checkpoint that had not arrived as a whole, which are those that are none of
    /// `whole`. Returns the highest number that a file, or the log of its upload, has.
    fn clear_unfinished(&self, folder: &str, whole: &HashMap<u32, usize>) -> u32 {
        let mut highest = 0;
        for dir in 0..self.dirs.len() {
            let entries = fs::read_dir(self.folder(dir, folder));
            for entry in entries.into_iter().flatten().flatten() {
                let path = entry.path();
                let stem = path.file_stem().and_then(|stem| stem.to_str());
                let number = stem.and_then(|stem| stem.strip_prefix('f')?.parse::<u32>().ok());
                let Some(number) = number else { continue };
                highest = highest.max(number);
                let is_log = path.extension().is_some();
                if !is_log
                    && whole.get(&number) != Some(&dir)
                    && let Err(e) = fs::remove_file(&path)
                {
                    tracing::warn!(file = %path.display(), error = %e, "a file of a checkpoint that \
                        had not arrived as a whole cannot be removed");
                }
            }
        }
        highest
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
            (HashMap<u32, usize>, Phase, Option<String>, String, u32),
        )>,
    > {
        let mut home = None;
        for dir in dirs {
            if let Some(journal) = Journal::load(&self.folder(*dir, folder))? {
                home = Some((*dir, journal));
            }
        }
        let Some((home, mut journal)) = home else {
            self.check_homeless(folder, dirs, numbers)?;
            return Ok(None);
        };
        let noted = match journal.stage {
            Stage::Staging => arrived::read(&self.folder(home, folder), &mut journal.files),
            _ => 0,
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
                // The others have to be sent again.
                journal.files.retain(|file| at.contains_key(&file.number));
                Phase::Staging
            }
            Stage::Durable if lacking.is_some() => return Ok(None),
            Stage::Durable => Phase::Durable,
            // Its files may have been removed already: what the origin has is removed without them.
            Stage::Removing => {
                dirs.iter()
                    .for_each(|d| remove_files(&self.folder(*d, folder)));
                at.clear();
                Phase::Removing
            }
            Stage::Staged => Phase::Staged,
        };
        let error = lacking.filter(|_| phase == Phase::Staged).map(|name| {
            let e = format!("its file {name:?} is not on this node's disks any more");
            tracing::error!(checkpoint = %format_args!("{}/{}", journal.bucket, journal.prefix),
                id = folder, error = e, "a staged checkpoint cannot be flushed");
            e
        });
        let (staged, begun) = (journal.staged_ms, journal.begun_ms);
        let rest = (at, phase, error, folder.to_owned(), noted);
        Ok(Some((staged, begun, journal, home, rest)))
    }
}

/// Makes the folder of all checkpoints in a cache directory. Its name is on the disk when this returns,
/// and so are those of the directories above it: what is synced in it would be lost with one of them.
fn make_folder(dir: &Path) -> Result<PathBuf> {
    let path = dir.join(FOLDER);
    let failed = |e| Error::file("the folder", &path, e);
    let is_new = !path.is_dir();
    fs::create_dir_all(&path).map_err(failed)?;
    if is_new {
        sync_folder(dir)?;
        // The store may have made these a moment ago. Those that are not this user's were there before.
        let whole = fs::canonicalize(dir).map_err(failed)?;
        for above in whole.ancestors().skip(1) {
            if sync_folder(above).is_err() {
                break;
            }
        }
    }
    Ok(path)
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

fn used(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|e| e.metadata().ok())
        .map(|m| m.len())
        .sum()
}
