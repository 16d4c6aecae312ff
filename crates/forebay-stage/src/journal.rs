//! What is known of a checkpoint on disk: `journal.json` in its folder, replaced as a whole.
//!
//! The journal says what a checkpoint *is*; which bytes of it are at the origin is in the journal
//! too, for whole files, and in a log beside each file of several parts (`Parts`), of which a line
//! that was lost costs one part that is sent again.

use crate::stages::disk_error;
use forebay_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

/// The format of journals. A program never touches the folder of a higher one.
pub const FORMAT: u32 = 1;
const NAME: &str = "journal.json";

/// How far a checkpoint has come, as its journal says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// Its files are arriving.
    Staging,
    /// All of it is on the disk, and nothing less than all of it will become visible.
    Staged,
    /// All of it is at the origin.
    Durable,
    /// It was given up: what the origin has of it is to be removed.
    Removing,
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// As its writer called it.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// What its file in the folder is called.
    pub number: u32,
    /// Whether it goes to the checkpoint's own folder at the origin, after all others.
    #[serde(default)]
    pub last: bool,
    /// Whether the origin has it.
    #[serde(default)]
    pub uploaded: bool,
    /// As the origin said then, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
}

/// A file of the checkpoint that another node sends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Elsewhere {
    /// As its writer called it.
    pub name: String,
    /// Bytes.
    pub size: u64,
}

/// What is kept of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Journal {
    pub format: u32,
    pub bucket: String,
    pub prefix: String,
    pub id: String,
    /// One of several parts of the checkpoint; the others are at other nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Whether it may replace a checkpoint of its name.
    pub replace: bool,
    /// The checkpoint of its name that is older than this one, whatever the clocks say: the one that
    /// the origin had when this one began, or that this node has made durable since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<String>,
    pub stage: Stage,
    /// Its place among all that this node began: the later, the larger. The clock does not tell it, for
    /// it may be set back. 0: it was begun by a version that noted none, before all that have one.
    #[serde(default)]
    pub order: u64,
    pub begun_ms: i64,
    #[serde(default)]
    pub staged_ms: i64,
    #[serde(default)]
    pub durable_ms: i64,
    /// By when it is to be durable, in milliseconds since the epoch; 0: whenever.
    #[serde(default)]
    pub deadline_ms: i64,
    #[serde(default)]
    pub files: Vec<FileEntry>,
    #[serde(default)]
    pub elsewhere: Vec<Elsewhere>,
    /// What its writer wants to be told again.
    #[serde(default)]
    pub meta: serde_json::Value,
    /// Keys at the origin that are to be removed when this one is visible: of the checkpoint that it
    /// replaced.
    #[serde(default)]
    pub remove: Vec<String>,
    /// Files that come last may be at `<prefix>/<name>` already, with those of this checkpoint.
    #[serde(default)]
    pub publishing: bool,
    /// Another checkpoint had its name at the origin, and it may not replace that one: later ones of its
    /// name do not wait for it.
    #[serde(default)]
    pub taken: bool,
    /// It was durable, and is removed with its manifest.
    #[serde(default)]
    pub whole: bool,
}

impl Journal {
    /// Whether its writer was told that it is staged, or may have been.
    pub fn was_committed(&self) -> bool {
        self.whole || self.staged_ms > 0
    }

    /// Bytes of all its files here.
    pub fn bytes(&self) -> u64 {
        self.files
            .iter()
            .fold(0, |sum, f| sum.saturating_add(f.size))
    }

    /// The keys of its files, here and at other nodes, which no other checkpoint has.
    pub fn keys(&self) -> Vec<String> {
        let own = self.files.iter().map(|f| &f.name);
        let names = own.chain(self.elsewhere.iter().map(|f| &f.name));
        names
            .map(|name| format!("{}/{}/{name}", self.prefix, self.id))
            .collect()
    }

    /// Replaces the journal in `folder`, whose names `sync` makes durable: after a loss of power, the
    /// old one is there or the new one. If `sync` fails, the new one is there until then.
    pub fn save(&self, folder: &Path, sync: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let path = folder.join(NAME);
        let failed = |e| disk_error("the journal of a checkpoint", &path, e);
        let text = serde_json::to_vec(self)
            .map_err(|e| Error::internal("a journal cannot be written").caused_by(e))?;
        let new = folder.join("journal.new");
        let mut file = File::create(&new).map_err(failed)?;
        file.write_all(&text).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        fs::rename(&new, &path).map_err(failed)?;
        sync(folder)
    }

    /// The journal of a folder; `None` if there is none.
    pub fn load(folder: &Path) -> Result<Option<Journal>> {
        let path = folder.join(NAME);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::file("the journal of a checkpoint", &path, e)),
        };
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let bad = |e: serde_json::Error| {
            Error::internal(format!("{} cannot be read", path.display())).caused_by(e)
        };
        let Format { format } = serde_json::from_slice(&text).map_err(bad)?;
        if format > FORMAT {
            return Err(Error::internal(format!(
                "{} has the format {format}, which this version does not know",
                path.display()
            ))
            .hint("start the newer version again: it finishes the checkpoint"));
        }
        serde_json::from_slice(&text).map(Some).map_err(bad)
    }
}

/// Makes the names in a folder durable.
pub fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder)
        .and_then(|dir| dir.sync_all())
        .map_err(|e| disk_error("the folder", folder, e))
}

/// The parts of one file that the origin has: a line for each event, appended and never synced.
pub struct Parts {
    path: PathBuf,
    file: Option<File>,
    /// The upload and the size of its parts.
    pub upload: Option<(String, u64)>,
    /// Of which file it is, as its writer called it.
    pub name: Option<String>,
    /// By number.
    pub parts: BTreeMap<u32, (String, u64)>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    Upload {
        id: String,
        part_bytes: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
    Part {
        number: u32,
        etag: String,
        size: u64,
    },
}

impl Parts {
    /// Reads what there is. A line that is not whole is no line.
    pub fn load(path: PathBuf) -> Parts {
        let mut parts = Parts {
            path,
            file: None,
            upload: None,
            name: None,
            parts: BTreeMap::new(),
        };
        let text = fs::read_to_string(&parts.path).unwrap_or_default();
        for line in text
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
        {
            match serde_json::from_str(line) {
                Ok(Line::Upload {
                    id,
                    part_bytes,
                    name,
                }) => {
                    parts.upload = Some((id, part_bytes));
                    parts.name = name;
                    parts.parts.clear();
                }
                Ok(Line::Part { number, etag, size }) => {
                    parts.parts.insert(number, (etag, size));
                }
                Err(_) => {}
            }
        }
        parts
    }

    fn append(&mut self, line: &Line) -> Result<()> {
        let failed = |e| disk_error("the log of an upload", &self.path, e);
        if self.file.is_none() {
            let mut file = File::options()
                .create(true)
                .append(true)
                .open(&self.path)
                .map_err(failed)?;
            // Should the last line be torn.
            file.write_all(b"\n").map_err(failed)?;
            self.file = Some(file);
        }
        let mut text = serde_json::to_vec(line).unwrap_or_default();
        text.push(b'\n');
        let written = match &mut self.file {
            Some(file) => file.write_all(&text),
            None => Ok(()),
        };
        if written.is_err() {
            // It may be torn: the next one begins a line of its own.
            self.file = None;
        }
        written.map_err(failed)
    }

    /// A new upload of the file `name` has begun.
    pub fn begin(&mut self, id: &str, name: &str, part_bytes: u64) -> Result<()> {
        self.append(&Line::Upload {
            id: id.to_owned(),
            part_bytes,
            name: Some(name.to_owned()),
        })?;
        self.upload = Some((id.to_owned(), part_bytes));
        self.name = Some(name.to_owned());
        self.parts.clear();
        Ok(())
    }

    /// The origin has a part.
    pub fn add(&mut self, number: u32, etag: &str, size: u64) -> Result<()> {
        self.parts.insert(number, (etag.to_owned(), size));
        self.append(&Line::Part {
            number,
            etag: etag.to_owned(),
            size,
        })
    }

    /// The upload has ended, or the origin does not know it.
    pub fn forget(&mut self) {
        self.upload = None;
        self.parts.clear();
        self.file = None;
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_line_costs_one_part() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f1.parts");
        let mut parts = Parts::load(path.clone());
        parts.begin("u-1", "data", 16).unwrap();
        parts.add(1, "a", 16).unwrap();
        parts.add(3, "c", 16).unwrap();
        let text = fs::read(&path).unwrap();
        fs::write(&path, &text[..text.len() - 4]).unwrap();
        let mut again = Parts::load(path.clone());
        assert_eq!(again.upload, Some(("u-1".into(), 16)));
        assert_eq!(again.name.as_deref(), Some("data"));
        assert_eq!(again.parts.keys().copied().collect::<Vec<_>>(), [1]);
        again.add(2, "b", 16).unwrap();
        assert_eq!(Parts::load(path.clone()).parts.len(), 2);
        // One that could not be written whole, as on a full disk, takes none with it either.
        let mut text = fs::read(&path).unwrap();
        text.extend_from_slice(br#"{"part":{"numb"#);
        fs::write(&path, &text).unwrap();
        again.file = Some(File::open(&path).unwrap());
        assert!(again.add(3, "c", 16).is_err());
        again.add(4, "d", 16).unwrap();
        let known: Vec<u32> = Parts::load(path).parts.into_keys().collect();
        assert_eq!(known, [1, 2, 4]);
    }
}
