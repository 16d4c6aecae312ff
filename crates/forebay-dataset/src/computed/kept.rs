//! Outcomes on the node's disk: small self-checking files within a limit.
//!
//! A file is named by the dataset's id and a hash of the document that says what the outcome is. It
//! has the document itself, so that documents with one hash are told apart, and the outcome. It is
//! written under another name and then renamed. What is damaged is removed, and computed again. The
//! modification time is that of the last use; the least recently used file goes first.
//!
//! Invariant: what is read back equals what was written, for the same dataset and document.

use super::{Limits, Outcome};
use crate::catalog::{
    disk::{Decoder, put_bytes},
    folder::{Folder, touch},
};
use forebay_core::Result;
use std::{fs, marker::PhantomData, path::PathBuf, time::SystemTime};
use xxhash_rust::xxh3::xxh3_128;

const SUM_BYTES: usize = 16;
/// An outcome that would take more than this share of the limit is kept only in memory.
const LARGEST_SHARE: u64 = 2;

/// A directory of outcomes.
#[derive(Debug)]
pub(super) struct Disk<T> {
    folder: Folder,
    limits: Limits,
    of: PhantomData<fn() -> T>,
}

impl<T: Outcome> Disk<T> {
    /// Creates the directory if necessary, and removes what an earlier process left half written.
    pub fn open(dir: PathBuf, limits: Limits) -> Result<Self> {
        let disk = Self {
            folder: Folder::open(dir, T::MANY)?,
            limits,
            of: PhantomData,
        };
        disk.prune(0);
        Ok(disk)
    }

    fn path(&self, dataset: &str, key: u128) -> PathBuf {
        self.folder.dir().join(name::<T>(dataset, key))
    }

    /// A document, and what it is of, for a dataset of `rows` rows; if it is here.
    pub fn load(&self, dataset: &str, key: u128, rows: u64) -> Option<(String, T)> {
        let path = self.path(dataset, key);
        let bytes = fs::read(&path).ok()?;
        let found = decode(&bytes, rows);
        match &found {
            Some(_) => touch(&path),
            None => {
                let what = T::KEPT;
                tracing::warn!(file = %path.display(), "{what} on disk are damaged, or of another version of this program; they will be computed again");
                let _ = fs::remove_file(&path);
            }
        }
        found
    }

    /// How many bytes it would take to load this; `None` if it is not here.
    pub fn bytes(&self, dataset: &str, key: u128) -> Option<u64> {
        Some(fs::metadata(self.path(dataset, key)).ok()?.len())
    }

    /// Keeps an outcome. Whether there was room for it.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn keep(&self, dataset: &str, key: u128, text: &str, of: &T) -> Result<bool> {
        if of.bytes() > self.limits.disk_bytes / LARGEST_SHARE {
            return Ok(false);
        }
        let bytes = encode(text, of);
        self.prune(bytes.len() as u64);
        let name = PathBuf::from(name::<T>(dataset, key));
        let written = self.folder.write(&name, &bytes, T::KEPT);
        written.map(|()| true)
    }

    /// Makes room for this many more bytes.
    fn prune(&self, more: u64) {
        let entries = self.folder.entries();
        let mut kept: Vec<(SystemTime, u64, PathBuf)> = entries
            .filter_map(|entry| {
                let path = entry.path();
                (path.extension()? == T::EXTENSION).then_some(())?;
                let meta = entry.metadata().ok()?;
                let used = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                Some((used, meta.len(), path))
            })
            .collect();
        kept.sort();
        let mut bytes: u64 = kept.iter().map(|(_, len, _)| len).sum::<u64>() + more;
        let mut count = kept.len() + usize::from(more > 0);
        for (_, len, path) in kept {
            if bytes <= self.limits.disk_bytes && count <= self.limits.on_disk {
                break;
            }
            if fs::remove_file(&path).is_ok() {
                bytes -= len;
                count -= 1;
            }
        }
    }
}

fn name<T: Outcome>(dataset: &str, key: u128) -> String {
    format!("{dataset}-{key:032x}.{}", T::EXTENSION)
}

fn encode<T: Outcome>(text: &str, of: &T) -> Vec<u8> {
    let mut out = Vec::with_capacity(of.bytes() as usize + text.len() + 64);
    out.extend_from_slice(T::MAGIC);
    out.extend_from_slice(&T::VERSION.to_be_bytes());
    put_bytes(&mut out, text.as_bytes());
    of.encode(&mut out);
    let sum = xxh3_128(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    out
}

fn decode<T: Outcome>(bytes: &[u8], rows: u64) -> Option<(String, T)> {
    let (body, sum) = bytes.split_last_chunk::<SUM_BYTES>()?;
    if xxh3_128(body) != u128::from_le_bytes(*sum) {
        return None;
    }
    let body = body
        .strip_prefix(T::MAGIC)?
        .strip_prefix(&T::VERSION.to_be_bytes())?;
    let mut decoder = Decoder::new(body);
    let text = decoder.text()?.to_owned();
    let of = T::decode(&mut decoder, rows)?;
    decoder.is_at_end().then_some((text, of))
}

#[cfg(test)]
mod tests {
    use super::{super::tests::Numbers, *};

    fn disk(dir: &std::path::Path, disk_bytes: u64) -> Disk<Numbers> {
        let limits = Limits {
            at_once: 1,
            waiting: 1,
            memory_bytes: 0,
            disk_bytes,
            on_disk: 100,
        };
        Disk::open(dir.to_owned(), limits).unwrap()
    }

    fn numbers(rows: u64) -> Numbers {
        Numbers((0..rows).map(|r| r as u8).collect())
    }

    #[test]
    fn what_is_kept_is_read_back_or_computed_again() {
        let dir = tempfile::tempdir().unwrap();
        let disk = disk(&dir.path().join("numbers"), 1 << 20);
        let one = numbers(5_000);
        assert!(disk.load("d", 7, 5_000).is_none());
        assert!(disk.keep("d", 7, "one", &one).unwrap());
        assert_eq!(disk.load("d", 7, 5_000), Some(("one".to_owned(), one)));
        assert!(disk.load("e", 7, 5_000).is_none() && disk.load("d", 8, 5_000).is_none());
        let path = disk.path("d", 7);
        let good = fs::read(&path).unwrap();
        for at in (0..good.len()).step_by(71) {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert!(disk.load("d", 7, 5_000).is_none(), "byte {at}");
            assert!(!path.exists(), "what is damaged is removed");
            fs::write(&path, &good[..at]).unwrap();
            assert!(disk.load("d", 7, 5_000).is_none(), "cut at {at}");
        }
        fs::write(&path, &good).unwrap();
        assert!(disk.load("d", 7, 5).is_none(), "of another dataset");
    }

    #[test]
    fn the_least_recently_used_ones_go() {
        let dir = tempfile::tempdir().unwrap();
        let of = disk(dir.path(), 70_000);
        for key in 0..2 {
            assert!(of.keep("d", key, "one", &numbers(25_000)).unwrap());
        }
        let old = SystemTime::now() - std::time::Duration::from_secs(60);
        for key in 0..2 {
            let file = fs::File::options().append(true).open(of.path("d", key));
            file.unwrap().set_modified(old).unwrap();
        }
        assert!(of.load("d", 0, 25_000).is_some(), "it is used now");
        assert!(of.keep("d", 2, "one", &numbers(25_000)).unwrap());
        assert!(of.bytes("d", 0).is_some() && of.bytes("d", 2).is_some());
        assert!(of.bytes("d", 1).is_none());
        assert!(
            !of.keep("d", 3, "one", &numbers(40_000)).unwrap(),
            "too large to be kept"
        );
        fs::write(dir.path().join(".tmp-1-1"), "half").unwrap();
        disk(dir.path(), 70_000);
        assert!(!dir.path().join(".tmp-1-1").exists());
    }
}
