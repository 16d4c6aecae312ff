//! Files of one checkpoint may lie in several cache directories; its journal is in one of them, its
//! home. Each other folder with files of it says which one that is, so that a start without the home
//! does not take them for what was never committed.
//!
//! A home is known by a number in a file of its own, not by its path: where a disk is not mounted,
//! the path is there all the same. The number is made when the first folder needs it.

use crate::journal::sync_folder;
use forebay_core::{Error, Result, sync::Mutex};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// In the folder of all staged checkpoints: its number.
const NUMBER: &str = ".directory";
const NEW: &str = ".directory.new";
/// In the folder of a checkpoint: where its journal is.
const MARK: &str = "home.json";

/// One number is made for a directory.
static MAKING: Mutex<()> = Mutex::new(());

/// What a folder without a journal says about it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The number of the directory with the journal.
    pub number: String,
    /// Its path when the file was written, for people.
    pub path: PathBuf,
}

/// Whether a file in the folder of all staged checkpoints is one of these.
pub fn is_ours(name: &str) -> bool {
    name == NUMBER || name == NEW
}

/// The number of `staged`, a folder of all staged checkpoints; `None`: it has none.
pub fn number(staged: &Path) -> Result<Option<String>> {
    let path = staged.join(NUMBER);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::file("the number of the directory", &path, e)),
    }
}

fn number_made(staged: &Path) -> Result<String> {
    let _one = MAKING.lock();
    if let Some(number) = number(staged)? {
        return Ok(number);
    }
    let made = format!("{:016x}", rand::random::<u64>());
    let (new, path) = (staged.join(NEW), staged.join(NUMBER));
    write_synced(&new, made.as_bytes())?;
    fs::rename(&new, &path).map_err(|e| Error::file("the number of the directory", &path, e))?;
    sync_folder(staged)?;
    Ok(made)
}

/// Says in `folder` that the journal is in a folder of `home`. It is on disk when this returns; the
/// name is synced with those of the files.
pub fn mark(folder: &Path, home: &Path) -> Result<()> {
    if read(folder)?.is_some() {
        return Ok(());
    }
    let mark = Mark {
        number: number_made(home)?,
        path: home.to_owned(),
    };
    let text = serde_json::to_vec(&mark)
        .map_err(|e| Error::internal("a mark cannot be written").caused_by(e))?;
    write_synced(&folder.join(MARK), &text)
}

/// What `folder` says, if it says anything: what was torn was not committed.
pub fn read(folder: &Path) -> Result<Option<Mark>> {
    let path = folder.join(MARK);
    match fs::read(&path) {
        Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => Ok(None),
        Err(e) => Err(Error::file("the mark of a checkpoint", &path, e)),
    }
}

fn write_synced(path: &Path, text: &[u8]) -> Result<()> {
    let written = File::create(path).and_then(|mut file| {
        file.write_all(text)?;
        file.sync_all()
    });
    written.map_err(|e| Error::file("the file", path, e))
}
