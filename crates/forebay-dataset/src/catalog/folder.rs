//! A directory of small files that are written under another name and then renamed: a file that is
//! there is whole. The modification time of a file is that of its last use.

use forebay_core::{Error, Result};
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::SystemTime,
};

/// The beginning of the names of files that are being written.
const TEMPORARY: &str = ".tmp-";

#[derive(Debug)]
pub(crate) struct Folder {
    dir: PathBuf,
    names: AtomicU64,
}

impl Folder {
    /// Creates the directory if necessary, and removes what an earlier process left half written.
    /// `of` says what it holds: `datasets`.
    pub fn open(dir: PathBuf, of: &str) -> Result<Self> {
        let failed = |e: std::io::Error| {
            let dir = dir.display();
            Error::internal(format!("the directory of {of} {dir} cannot be used: {e}")).caused_by(e)
        };
        fs::create_dir_all(&dir).map_err(failed)?;
        for entry in fs::read_dir(&dir).map_err(failed)?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(Self {
            dir,
            names: AtomicU64::new(0),
        })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its files, as far as they can be listed.
    pub fn entries(&self) -> impl Iterator<Item = fs::DirEntry> {
        fs::read_dir(&self.dir).into_iter().flatten().flatten()
    }

    /// Writes a file of this name; `what` it is, for the error.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn write(&self, name: &Path, bytes: &[u8], what: &str) -> Result<()> {
        let number = self.names.fetch_add(1, Relaxed);
        let temporary = format!("{TEMPORARY}{}-{number}", std::process::id());
        let temporary = self.dir.join(temporary);
        let written = (|| {
            let mut file = fs::File::create(&temporary)?;
            file.write_all(bytes)?;
            drop(file);
            fs::rename(&temporary, self.dir.join(name))
        })();
        written.map_err(|e| {
            let _ = fs::remove_file(&temporary);
            let dir = self.dir.display();
            Error::internal(format!("{what} cannot be written to {dir}: {e}")).caused_by(e)
        })
    }
}

/// The time of a file says when it was used; a disk that refuses only spoils the order of removal.
pub(crate) fn touch(path: &Path) {
    let _ = fs::File::options()
        .append(true)
        .open(path)
        .and_then(|f| f.set_modified(SystemTime::now()));
}
