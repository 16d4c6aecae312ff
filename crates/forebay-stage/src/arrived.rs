//! Which files of a checkpoint have arrived before its commit: a line for each in a log beside the
//! journal, so that a start of the node in between loses none of them.
//!
//! A file is on the disk, synced, before its line is written. The log itself is not synced: files whose
//! lines a loss of power takes have to be sent again. But the line of a file that takes the place of
//! another one is, for the line before it would still say that the other one counts.

use crate::{
    entry::{Entry, Phase},
    journal::FileEntry,
    stages::{Inner, disk_error, ended},
};
use forebay_core::Result;
use hashbrown::HashMap;
use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    sync::Arc,
};
use tokio::task::spawn_blocking;

const NAME: &str = "arrived.log";

fn append(folder: &Path, file: &FileEntry, synced: bool) -> Result<()> {
    let path = folder.join(NAME);
    let failed = |e| disk_error("the log of a checkpoint's files", &path, e);
    let mut line = serde_json::to_vec(file).unwrap_or_default();
    // The line before may be torn.
    line.insert(0, b'\n');
    line.push(b'\n');
    let mut log = File::options()
        .create(true)
        .append(true)
        .open(&path)
        .map_err(failed)?;
    log.write_all(&line).map_err(failed)?;
    match synced {
        true => log.sync_data().map_err(failed),
        false => Ok(()),
    }
}

/// Adds the files that the log in `folder` names to `files`. If it names a file twice, the last line
/// counts; a torn line is ignored. Returns the highest number that the log or `files` has ever given to a
/// file: a new file must not get such a number, or a later start would take it for the old one.
pub(crate) fn read(folder: &Path, files: &mut Vec<FileEntry>) -> u32 {
    let text = fs::read(folder.join(NAME)).unwrap_or_default();
    let mut places: HashMap<String, usize> = HashMap::new();
    for (at, file) in files.iter().enumerate() {
        places.insert(file.name.clone(), at);
    }
    let mut highest = files.iter().map(|file| file.number).max().unwrap_or(0);
    for line in text.split(|b| *b == b'\n') {
        let Ok(file) = serde_json::from_slice::<FileEntry>(line) else {
            continue;
        };
        highest = highest.max(file.number);
        match places.get(&file.name) {
            Some(at) => files[*at] = file,
            None => {
                places.insert(file.name.clone(), files.len());
                files.push(file);
            }
        }
    }
    highest
}

/// Removes the log in `folder`: the journal says it all.
pub(crate) fn forget(folder: &Path) {
    let _ = fs::remove_file(folder.join(NAME));
}

impl Inner {
    /// Notes that a file has arrived. If that fails, the file is here all the same, until the next start.
    ///
    /// # Errors
    /// If that fails of a file that `replaces` another one: the next start could take that one for it.
    pub(crate) async fn note_arrived(
        &self,
        entry: &Arc<Entry>,
        file: FileEntry,
        replaces: bool,
    ) -> Result<()> {
        let (of, folder) = (entry.clone(), self.folder(entry.home, &entry.folder));
        let noted = spawn_blocking(move || {
            // One after the other, and not one that another has replaced by now: the last line counts.
            let _one = of.saving.lock();
            let is_current = {
                let state = of.state.lock();
                let is_open = matches!(state.phase, Phase::Staging | Phase::Committing);
                is_open && state.dirs.contains_key(&file.number)
            };
            match is_current {
                true => append(&folder, &file, replaces),
                false => Ok(()),
            }
        });
        match noted.await.map_err(ended).flatten() {
            Err(e) if replaces => {
                Err(e.context("that a file took the place of another one could not be noted"))
            }
            Err(e) => {
                tracing::debug!(checkpoint = %entry.place, id = entry.folder, error = %e.describe(),
                    "that a file has arrived could not be noted");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, size: u64, number: u32) -> FileEntry {
        FileEntry {
            name: name.into(),
            size,
            number,
            last: false,
            uploaded: false,
            etag: None,
        }
    }

    #[test]
    fn the_last_line_of_a_name_counts_and_a_torn_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = vec![file("noted", 1, 1)];
        assert_eq!(read(dir.path(), &mut files), 1);
        assert_eq!(files, [file("noted", 1, 1)]);
        for arrived in [file("a", 2, 7), file("b", 3, 3), file("a", 4, 4)] {
            append(dir.path(), &arrived, false).unwrap();
        }
        let path = dir.path().join(NAME);
        let mut text = fs::read(&path).unwrap();
        text.extend_from_slice(br#"{"name":"torn","si"#);
        fs::write(&path, &text).unwrap();
        append(dir.path(), &file("noted", 5, 6), true).unwrap();
        assert_eq!(read(dir.path(), &mut files), 7);
        let wanted = [file("noted", 5, 6), file("a", 4, 4), file("b", 3, 3)];
        assert_eq!(files, wanted);
        forget(dir.path());
        let mut none = Vec::new();
        assert_eq!(read(dir.path(), &mut none), 0);
        assert!(none.is_empty());
    }
}
