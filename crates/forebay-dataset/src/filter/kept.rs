//! Rows that filters have left, on the node's disk: small self-checking files within a limit.
//!
//! A file is named `<dataset>-<expression>.fbfs`, by the dataset's id and a hash of the expression's
//! document. It has the document itself, so that expressions with one hash are told apart, and the
//! set of rows. It is written under another name and then renamed. What is damaged is removed, and
//! computed again. The modification time is that of the last use; the least recently used file goes
//! first.
//!
//! Invariant: what is read back equals what was written, for the same dataset and expression.

use crate::catalog::{
    disk::{Decoder, put, put_bytes},
    folder::{Folder, touch},
};
use forebay_core::{Result, limits};
use forebay_plan::RowSet;
use std::{fs, path::PathBuf, time::SystemTime};
use xxhash_rust::xxh3::xxh3_128;

const MAGIC: &[u8; 4] = b"FBFS";
const VERSION: u32 = 1;
const EXTENSION: &str = "fbfs";
const SUM_BYTES: usize = 16;
/// A set that would take more than this share of the limit is kept only in memory.
const LARGEST_SHARE: u64 = 2;

/// Which rows, and of what.
#[derive(Debug, PartialEq)]
pub(super) struct Left {
    /// The expression's document.
    pub json: String,
    pub rows: RowSet,
    /// Rows whose values were read to find them.
    pub looked_at: u64,
}

/// A directory of sets of rows.
#[derive(Debug)]
pub(super) struct Disk {
    folder: Folder,
    most_bytes: u64,
}

impl Disk {
    /// Creates the directory if necessary, and removes what an earlier process left half written.
    pub fn open(dir: PathBuf, most_bytes: u64) -> Result<Self> {
        let disk = Self {
            folder: Folder::open(dir, "filters")?,
            most_bytes,
        };
        disk.prune(0);
        Ok(disk)
    }

    fn path(&self, dataset: &str, key: u128) -> PathBuf {
        self.folder.dir().join(name(dataset, key))
    }

    /// What a filter left of a dataset of `rows` rows, if it is here.
    pub fn load(&self, dataset: &str, key: u128, rows: u64) -> Option<Left> {
        let path = self.path(dataset, key);
        let bytes = fs::read(&path).ok()?;
        match decode(&bytes).filter(|left| left.rows.universe() == rows) {
            Some(left) => {
                touch(&path);
                Some(left)
            }
            None => {
                tracing::warn!(file = %path.display(), "the kept rows of a filter are damaged, or of another version of this program; it will be computed again");
                let _ = fs::remove_file(&path);
                None
            }
        }
    }

    /// How many bytes it would take to load this; `None` if it is not here.
    pub fn bytes(&self, dataset: &str, key: u128) -> Option<u64> {
        Some(fs::metadata(self.path(dataset, key)).ok()?.len())
    }

    /// Keeps what a filter left. Whether there was room for it.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn keep(&self, dataset: &str, key: u128, left: &Left) -> Result<bool> {
        let bytes = encode(left);
        if bytes.len() as u64 > self.most_bytes / LARGEST_SHARE {
            return Ok(false);
        }
        self.prune(bytes.len() as u64);
        let name = PathBuf::from(name(dataset, key));
        let written = self.folder.write(&name, &bytes, "the rows of a filter");
        written.map(|()| true)
    }

    /// Makes room for this many more bytes.
    fn prune(&self, more: u64) {
        let entries = self.folder.entries();
        let mut kept: Vec<(SystemTime, u64, PathBuf)> = entries
            .filter_map(|entry| {
                let path = entry.path();
                (path.extension()? == EXTENSION).then_some(())?;
                let meta = entry.metadata().ok()?;
                let used = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                Some((used, meta.len(), path))
            })
            .collect();
        kept.sort();
        let mut bytes: u64 = kept.iter().map(|(_, len, _)| len).sum::<u64>() + more;
        let mut count = kept.len() + usize::from(more > 0);
        for (_, len, path) in kept {
            if bytes <= self.most_bytes && count <= limits::FILTERS_KEPT_MAX {
                break;
            }
            if fs::remove_file(&path).is_ok() {
                bytes -= len;
                count -= 1;
            }
        }
    }
}

fn name(dataset: &str, key: u128) -> String {
    format!("{dataset}-{key:032x}.{EXTENSION}")
}

fn encode(left: &Left) -> Vec<u8> {
    let rows = left.rows.encode();
    let mut out = Vec::with_capacity(rows.len() + left.json.len() + 64);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_be_bytes());
    put_bytes(&mut out, left.json.as_bytes());
    put(&mut out, left.looked_at);
    put_bytes(&mut out, &rows);
    let sum = xxh3_128(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    out
}

fn decode(bytes: &[u8]) -> Option<Left> {
    let (body, sum) = bytes.split_last_chunk::<SUM_BYTES>()?;
    if xxh3_128(body) != u128::from_le_bytes(*sum) {
        return None;
    }
    let body = body
        .strip_prefix(MAGIC)?
        .strip_prefix(&VERSION.to_be_bytes())?;
    let mut decoder = Decoder::new(body);
    let json = decoder.text()?.to_owned();
    let looked_at = decoder.number()?;
    let rows = RowSet::decode(decoder.take()?).ok()?;
    decoder.is_at_end().then_some(Left {
        json,
        rows,
        looked_at,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(rows: u64, each: u64) -> Left {
        Left {
            json: "{}".to_owned(),
            rows: RowSet::of(rows, (0..rows).filter(|r| r % each == 0)).unwrap(),
            looked_at: rows / 2,
        }
    }

    #[test]
    fn what_is_kept_is_read_back_or_computed_again() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::open(dir.path().join("filters"), 1 << 20).unwrap();
        let one = left(100_000, 3);
        assert!(disk.load("d", 7, 100_000).is_none());
        assert!(disk.keep("d", 7, &one).unwrap());
        assert_eq!(disk.load("d", 7, 100_000).as_ref(), Some(&one));
        assert!(disk.load("e", 7, 100_000).is_none() && disk.load("d", 8, 100_000).is_none());
        let path = disk.path("d", 7);
        let good = fs::read(&path).unwrap();
        for at in (0..good.len()).step_by(701) {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert!(disk.load("d", 7, 100_000).is_none(), "byte {at}");
            assert!(!path.exists(), "what is damaged is removed");
            fs::write(&path, &good[..at]).unwrap();
            assert!(disk.load("d", 7, 100_000).is_none(), "cut at {at}");
        }
        fs::write(&path, &good).unwrap();
        assert!(disk.load("d", 7, 5).is_none(), "of another dataset");
    }

    #[test]
    fn the_least_recently_used_ones_go() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::open(dir.path().to_owned(), 70_000).unwrap();
        // Some 25,000 bytes each.
        for key in 0..2 {
            assert!(disk.keep("d", key, &left(200_000, 16)).unwrap());
        }
        let old = SystemTime::now() - std::time::Duration::from_secs(60);
        for key in 0..2 {
            let file = fs::File::options().append(true).open(disk.path("d", key));
            file.unwrap().set_modified(old).unwrap();
        }
        assert!(disk.load("d", 0, 200_000).is_some(), "it is used now");
        assert!(disk.keep("d", 2, &left(200_000, 16)).unwrap());
        assert!(disk.bytes("d", 0).is_some() && disk.bytes("d", 2).is_some());
        assert!(disk.bytes("d", 1).is_none());
        assert!(
            !disk.keep("d", 3, &left(4_000_000, 16)).unwrap(),
            "too large to be kept"
        );
        fs::write(dir.path().join(".tmp-1-1"), "half").unwrap();
        Disk::open(dir.path().to_owned(), 70_000).unwrap();
        assert!(!dir.path().join(".tmp-1-1").exists());
    }
}
