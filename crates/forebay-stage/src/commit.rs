//! The commit: what it says is compared with what was staged, and then noted on the disk. Whatever
//! could keep the checkpoint from becoming durable is refused here, before its writer goes on.

use crate::{
    arrived,
    entry::{Entry, Phase},
    flush,
    journal::{Elsewhere, Journal, Stage, sync_folder},
    manifest::{ETAG_MAX_BYTES, MANIFEST, MANIFEST_MAX_BYTES, Manifest},
    stages::{FILES_MAX, Inner, check_file_name, check_size, ended, unknown},
    types::{Commit, NamedFile, Place, Status},
};
use forebay_core::{
    Error, ErrorKind, ObjectName, Result, limits, name::shorten, units::format_bytes,
};
use hashbrown::{HashMap, HashSet};
use std::{
    io,
    path::PathBuf,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::task::spawn_blocking;

const META_MAX_BYTES: usize = 64 << 10;
/// Files that readers of other programs look for.
const LAST_MAX: usize = 16;

impl Inner {
    pub(crate) async fn commit_now(
        self: Arc<Self>,
        entry: Arc<Entry>,
        commit: Commit,
    ) -> Result<Status> {
        let place = &entry.place;
        let within = self.deadline_of(&commit)?;
        // Until this is known, the checkpoint may still be given up.
        let replaced = match entry.look.get() {
            Some(look) => look.end().await,
            None => Ok(None),
        };
        if !begin_commit(&entry)? {
            // Its answer was lost.
            return Ok(self.status_of(&entry));
        }
        let done = match replaced {
            Ok(replaced) => self.commit_files(&entry, commit, within, replaced).await,
            Err(e) => Err(e),
        };
        {
            let mut state = entry.state.lock();
            let is_mine = state.phase == Phase::Committing;
            if let Err(e) = done {
                if is_mine {
                    state.phase = Phase::Staging;
                    state.journal.stage = Stage::Staging;
                    state.journal.staged_ms = 0;
                    state.used_ms = self.steady_ms();
                }
                return Err(e);
            }
            if !is_mine {
                return Err(unknown(place, &entry.folder));
            }
            state.phase = Phase::Staged;
            state.ahead = None;
        }
        let folder = self.folder(entry.home, &entry.folder);
        spawn_blocking(move || arrived::forget(&folder));
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
        replaced: Option<String>,
    ) -> Result<()> {
        let now = self.now_ms();
        let (of, dirs) = (entry.clone(), self.folders_with_files(entry));
        let synced = spawn_blocking(move || {
            let (journal, resumed) = {
                let state = of.state.lock();
                (state.journal.clone(), state.resumed)
            };
            if resumed {
                check_kept(&of.place, &journal, &commit)?;
            }
            let journal = prepared(&of.place, journal, &commit)?;
            dirs.iter().try_for_each(|dir| {
                sync_folder(dir)?;
                dir.parent().map_or(Ok(()), sync_folder)
            })?;
            // Not before: one of its name that becomes durable now has this journal written.
            let mut state = of.state.lock();
            // An earlier one of this node that became durable meanwhile comes after what was seen.
            let over = state.journal.over.take().or(replaced);
            state.journal = Journal {
                stage: Stage::Staged,
                staged_ms: now,
                deadline_ms: match within.is_zero() {
                    true => 0,
                    false => now.saturating_add(within.as_millis() as i64),
                },
                over,
                ..journal
            };
            Ok::<_, Error>(())
        });
        synced.await.map_err(ended)??;
        let saved = self.save(entry).await;
        if saved.is_err() {
            self.unsay(entry).await;
        }
        saved.map_err(|e| {
            e.context(format!(
                "{}: the checkpoint could not be committed",
                entry.place
            ))
        })
    }

    /// Notes that a checkpoint is not committed: the journal that could not be saved may be in its place
    /// all the same, not durably, and the next start would take its word.
    async fn unsay(&self, entry: &Arc<Entry>) {
        {
            let mut state = entry.state.lock();
            if state.phase != Phase::Committing {
                return;
            }
            (state.journal.stage, state.journal.staged_ms) = (Stage::Staging, 0);
        }
        if let Err(e) = self.save(entry).await {
            tracing::warn!(checkpoint = %entry.place, id = entry.folder, error = %e.describe(),
                "that a checkpoint could not be committed could not be noted");
        }
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
    state.heard = true;
    Ok(true)
}

/// Whether a start of the node has left all files of a checkpoint here.
fn check_kept(place: &Place, journal: &Journal, commit: &Commit) -> Result<()> {
    let kept: HashSet<&str> = journal.files.iter().map(|f| f.name.as_str()).collect();
    let lost = |f: &&NamedFile| !kept.contains(f.name.as_str());
    match commit.files.iter().find(lost) {
        Some(file) => Err(Error::not_found(format!(
            "{place}: {:?} is not here any more: the node was started again meanwhile",
            shorten(&file.name)
        ))
        .hint("begin anew; nothing of the checkpoint is visible")),
        None => Ok(()),
    }
}

/// The journal with what the commit says, if that is what was staged.
fn prepared(place: &Place, mut journal: Journal, commit: &Commit) -> Result<Journal> {
    check_bounds(place, commit)?;
    let sizes = named(place, commit)?;
    check_staged(place, &journal, commit)?;
    let last = last_of(place, commit, &sizes)?;
    if journal.part.is_some() && !(last.is_empty() && commit.elsewhere.is_empty()) {
        return Err(Error::invalid(format!(
            "{place}: a part has no files elsewhere and none that are last"
        )));
    }
    for file in &mut journal.files {
        file.last = last.contains(file.name.as_str());
    }
    let elsewhere = commit.elsewhere.iter().map(|f| Elsewhere {
        name: f.name.clone(),
        size: f.size,
    });
    journal.elsewhere = elsewhere.collect();
    journal.meta = commit.meta.clone();
    check_manifest(place, &journal)?;
    Ok(journal)
}

fn too_large(message: String) -> Error {
    Error::new(ErrorKind::TooLarge, message)
}

fn check_bounds(place: &Place, commit: &Commit) -> Result<()> {
    if commit.files.is_empty() && commit.elsewhere.is_empty() {
        return Err(Error::invalid(format!(
            "{place}: the commit names no files"
        )));
    }
    if commit.elsewhere.len() > FILES_MAX {
        return Err(too_large(format!(
            "a checkpoint has at most {FILES_MAX} files"
        )));
    }
    if commit.last.len() > LAST_MAX {
        return Err(Error::invalid(format!(
            "{place}: the commit names {} files that are last: at most {LAST_MAX} are",
            commit.last.len()
        )));
    }
    if commit.meta.to_string().len() > META_MAX_BYTES {
        return Err(
            too_large(format!("meta is longer than {META_MAX_BYTES} bytes"))
                .hint("put it into a file of the checkpoint"),
        );
    }
    Ok(())
}

/// The files of a commit, each of which it names once.
fn named<'a>(place: &Place, commit: &'a Commit) -> Result<HashMap<&'a str, u64>> {
    let mut named = HashMap::new();
    for file in commit.files.iter().chain(&commit.elsewhere) {
        check_file_name(&file.name)?;
        check_size(file.size)?;
        if named.insert(file.name.as_str(), file.size).is_some() {
            return Err(Error::invalid(format!(
                "{place}: the commit names {:?} twice",
                shorten(&file.name)
            )));
        }
    }
    Ok(named)
}

/// Whether the commit names all files that were staged, and no others.
fn check_staged(place: &Place, journal: &Journal, commit: &Commit) -> Result<()> {
    let staged = journal.files.iter().map(|f| (f.name.as_str(), f.size));
    let mut staged: HashMap<&str, u64> = staged.collect();
    for file in &commit.files {
        match staged.remove(file.name.as_str()) {
            None => {
                return Err(Error::invalid(format!(
                    "{place}: the commit names {:?}, which was not uploaded",
                    shorten(&file.name)
                ))
                .hint("upload all files first; nothing of the checkpoint is visible"));
            }
            Some(size) if size != file.size => {
                return Err(Error::invalid(format!(
                    "{place}: {:?} has {size} bytes here, and the commit says {}",
                    shorten(&file.name),
                    file.size
                )));
            }
            Some(_) => {}
        }
    }
    match staged.keys().next() {
        Some(name) => Err(Error::invalid(format!(
            "{place}: {:?} was uploaded, and the commit does not name it",
            shorten(name)
        ))),
        None => Ok(()),
    }
}

/// The files that come last: each is one of those that are here, and goes out in one request.
fn last_of<'a>(
    place: &Place,
    commit: &'a Commit,
    sizes: &HashMap<&str, u64>,
) -> Result<HashSet<&'a str>> {
    let elsewhere: HashSet<&str> = commit.elsewhere.iter().map(|f| f.name.as_str()).collect();
    let mut last = HashSet::new();
    for name in &commit.last {
        let size = sizes
            .get(name.as_str())
            .filter(|_| !elsewhere.contains(name.as_str()) && name != MANIFEST);
        let size = *size.ok_or_else(|| {
            Error::invalid(format!(
                "{place}: {:?} cannot be the last: it is none of the files",
                shorten(name)
            ))
        })?;
        if size > limits::PUT_OBJECT_MAX_BYTES {
            return Err(too_large(format!(
                "{place}: {:?} has {}, and a file that is last at most {}",
                shorten(name),
                format_bytes(size),
                format_bytes(limits::PUT_OBJECT_MAX_BYTES)
            ))
            .hint("it goes out in one request; put the data into other files"));
        }
        if !last.insert(name.as_str()) {
            return Err(Error::invalid(format!(
                "{place}: the commit names {:?} twice among those that are last",
                shorten(name)
            )));
        }
        ObjectName::new(place.bucket.as_str(), format!("{}/{name}", place.prefix))
            .map_err(|e| e.with_kind(ErrorKind::Invalid))?;
    }
    Ok(last)
}

/// Counts what is written.
#[derive(Default)]
struct Length(u64);

impl io::Write for Length {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.0 += data.len() as u64;
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether its readers will take its manifest.
fn check_manifest(place: &Place, journal: &Journal) -> Result<()> {
    let mut length = Length::default();
    serde_json::to_writer(&mut length, &Manifest::of(journal))
        .map_err(|e| Error::internal("a manifest cannot be written").caused_by(e))?;
    // With its quotes escaped, and what is around it.
    let etags = journal.files.len() * (2 * ETAG_MAX_BYTES + 16);
    if length.0 + etags as u64 > MANIFEST_MAX_BYTES {
        return Err(too_large(format!(
            "{place}: its manifest would be larger than {}",
            format_bytes(MANIFEST_MAX_BYTES)
        ))
        .hint("give its files shorter names, or put more into each"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{FORMAT, FileEntry, Stage};

    fn journal(files: &[(String, u64)]) -> Journal {
        let file = |(number, (name, size)): (usize, &(String, u64))| FileEntry {
            name: name.clone(),
            size: *size,
            number: number as u32,
            last: false,
            uploaded: false,
            etag: None,
        };
        Journal {
            format: FORMAT,
            bucket: "data".into(),
            prefix: "run".into(),
            id: "0123456789abcdef".into(),
            part: None,
            replace: true,
            over: None,
            stage: Stage::Staging,
            order: 1,
            begun_ms: 0,
            staged_ms: 0,
            durable_ms: 0,
            deadline_ms: 0,
            files: files.iter().enumerate().map(file).collect(),
            elsewhere: Vec::new(),
            meta: serde_json::Value::Null,
            remove: Vec::new(),
            publishing: false,
            taken: false,
            whole: false,
        }
    }

    fn commit(files: &[(String, u64)], last: &[&str]) -> Commit {
        let file = |(name, size): &(String, u64)| NamedFile {
            name: name.clone(),
            size: *size,
        };
        Commit {
            files: files.iter().map(file).collect(),
            last: last.iter().map(|name| (*name).to_owned()).collect(),
            ..Commit::default()
        }
    }

    fn kind(files: &[(String, u64)], commit: &Commit) -> Option<ErrorKind> {
        let place = Place::new("data", "run").unwrap();
        let done = prepared(&place, journal(files), commit);
        done.err().map(|e| e.kind())
    }

    #[test]
    fn what_could_never_be_published_is_refused() {
        let name = |n: usize| format!("f{n}");
        let files: Vec<(String, u64)> = (0..20).map(|n| (name(n), 1)).collect();
        let few: Vec<String> = (0..16).map(name).collect();
        let few: Vec<&str> = few.iter().map(String::as_str).collect();
        assert_eq!(kind(&files, &commit(&files, &few)), None);
        let many: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            kind(&files, &commit(&files, &many)),
            Some(ErrorKind::Invalid)
        );
        let twice = commit(&files, &["f1", "f1"]);
        assert_eq!(kind(&files, &twice), Some(ErrorKind::Invalid));
        let large = [(name(0), limits::PUT_OBJECT_MAX_BYTES + 1)];
        assert_eq!(
            kind(&large, &commit(&large, &["f0"])),
            Some(ErrorKind::TooLarge)
        );
        assert_eq!(kind(&large, &commit(&large, &[])), None);
        let mut huge = commit(&files, &[]);
        huge.elsewhere = vec![NamedFile {
            name: "there".into(),
            size: u64::MAX,
        }];
        assert_eq!(kind(&files, &huge), Some(ErrorKind::TooLarge));
    }

    #[test]
    fn a_manifest_that_nobody_would_read_is_refused() {
        let name = |n: usize| format!("{n:0>500}");
        let files: Vec<(String, u64)> = (0..90_000).map(|n| (name(n), 1)).collect();
        assert_eq!(
            kind(&files, &commit(&files, &[])),
            Some(ErrorKind::TooLarge)
        );
        assert_eq!(kind(&files[..9000], &commit(&files[..9000], &[])), None);
    }
}
