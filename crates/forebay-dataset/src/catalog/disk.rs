//! Indexes of datasets on the node's disk: small self-checking files, within a size limit.
//!
//! A file is one dataset as one spec opened it, named `<spec>-<id>-<opened>.fbds`: names alone say
//! what a spec was last opened as, and where an id is. A file is written under another name and
//! then renamed; if it is torn or damaged, it fails its checksum and is removed, and the dataset is
//! indexed again. The modification time is that of the last use; the least recently used file goes
//! first.
//!
//! Invariant: the files stay within their limits in bytes and in number; what is read back equals
//! what was written.

use super::{
    dataset::Parts,
    folder::{Folder, touch},
    labels::Labels,
    table::{FileRef, FileTable, FileTableBuilder},
};
use crate::{Dataset, Format};
use forebay_core::{Error, ObjectName, Result, limits};
use forebay_format::tabular::{FileIndex, decode_schema, encode_schema};
use std::{
    collections::{HashMap, hash_map::Entry},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};
use xxhash_rust::xxh3::xxh3_128;

/// The beginning of each file, and the version of what follows.
const MAGIC: &[u8; 4] = b"FBDS";
/// 2: each file has its own schema.
const VERSION: u32 = 3;
const EXTENSION: &str = "fbds";
const SUM_BYTES: usize = 16;
/// A dataset that would take more than this share of the directory is kept only in RAM.
const LARGEST_SHARE: u64 = 2;

/// A directory of indexes.
#[derive(Debug)]
pub(crate) struct Disk {
    folder: Folder,
    most_bytes: u64,
}

struct Kept {
    path: PathBuf,
    spec: String,
    id: String,
    /// When the spec was last opened as this, nanoseconds since the Unix epoch.
    opened: u64,
    bytes: u64,
    used: SystemTime,
}

impl Disk {
    /// Creates the directory if necessary, and removes what an earlier process left half written.
    pub(crate) fn open(dir: PathBuf, most_bytes: u64) -> Result<Self> {
        let disk = Self {
            folder: Folder::open(dir, "datasets")?,
            most_bytes,
        };
        disk.prune(0);
        Ok(disk)
    }

    /// The dataset that a spec was last opened as.
    pub(crate) fn by_spec(&self, spec: u128) -> Option<Dataset> {
        let spec = spec_name(spec);
        let latest = self
            .kept()
            .into_iter()
            .filter(|k| k.spec == spec)
            .max_by_key(|k| k.opened)?;
        self.load(&latest)
    }

    pub(crate) fn by_id(&self, id: &str) -> Option<Dataset> {
        self.kept()
            .into_iter()
            .filter(|k| k.id == id)
            .find_map(|k| self.load(&k))
    }

    /// Keeps a dataset. What the spec was opened as before can still be found by its id, until it
    /// is the oldest.
    ///
    /// # Errors
    /// Those of the disk.
    pub(crate) fn keep(&self, spec: u128, dataset: &Dataset) -> Result<()> {
        let spec = spec_name(spec);
        let kept: Vec<Kept> = self.kept().into_iter().filter(|k| k.spec == spec).collect();
        let latest = kept.iter().map(|k| k.opened).max().unwrap_or(0);
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |d| d.as_nanos() as u64);
        let name = format!(
            "{spec}-{}-{}.{EXTENSION}",
            dataset.id(),
            now.max(latest + 1)
        );
        if let Some(same) = kept.iter().find(|k| k.id == dataset.id()) {
            touch(&same.path);
            if same.opened == latest
                || fs::rename(&same.path, self.folder.dir().join(&name)).is_ok()
            {
                return Ok(());
            }
        }
        let bytes = encode(dataset)?;
        if bytes.len() as u64 > self.most_bytes / LARGEST_SHARE {
            return Ok(());
        }
        self.prune(bytes.len() as u64);
        self.folder
            .write(Path::new(&name), &bytes, "the index of a dataset")
    }

    pub(super) fn file_of(&self, id: &str) -> Option<fs::File> {
        let kept = self.kept().into_iter().find(|k| k.id == id)?;
        fs::File::open(kept.path).ok()
    }

    /// How many bytes and files are here.
    pub(crate) fn usage(&self) -> (u64, usize) {
        let kept = self.kept();
        (kept.iter().map(|k| k.bytes).sum(), kept.len())
    }

    fn load(&self, kept: &Kept) -> Option<Dataset> {
        let bytes = fs::read(&kept.path).unwrap_or_default();
        if let Some(dataset) = decode(&bytes).ok().filter(|d| d.id() == kept.id) {
            touch(&kept.path);
            return Some(dataset);
        }
        if is_of_another_version(&bytes) {
            tracing::info!(file = %kept.path.display(), "the stored index of a dataset is from another version of this program; it will be built again");
        } else {
            tracing::warn!(file = %kept.path.display(), "the stored index of a dataset is damaged; it will be built again");
        }
        let _ = fs::remove_file(&kept.path);
        None
    }

    fn kept(&self) -> Vec<Kept> {
        let entries = self.folder.entries();
        entries
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                let (spec, rest) = name
                    .strip_suffix(EXTENSION)?
                    .strip_suffix('.')?
                    .split_once('-')?;
                let (id, opened) = rest.split_once('-')?;
                let meta = entry.metadata().ok()?;
                Some(Kept {
                    path: entry.path(),
                    spec: spec.to_owned(),
                    id: id.to_owned(),
                    opened: opened.parse().ok()?,
                    bytes: meta.len(),
                    used: meta.modified().unwrap_or(SystemTime::UNIX_EPOCH),
                })
            })
            .collect()
    }

    /// Makes room for this many more bytes.
    fn prune(&self, more: u64) {
        let mut kept = self.kept();
        kept.sort_by_key(|k| k.used);
        let mut bytes: u64 = kept.iter().map(|k| k.bytes).sum::<u64>() + more;
        let mut count = kept.len() + usize::from(more > 0);
        for old in kept {
            if bytes <= self.most_bytes && count <= limits::DATASETS_KEPT_MAX {
                break;
            }
            if fs::remove_file(&old.path).is_ok() {
                bytes -= old.bytes;
                count -= 1;
            }
        }
    }
}

fn spec_name(spec: u128) -> String {
    format!("{spec:032x}")
}

/// The encoded dataset.
fn encode(dataset: &Dataset) -> Result<Vec<u8>> {
    let files = dataset.files();
    let mut out = Vec::with_capacity(64 * files.len() + 4096);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_be_bytes());
    put_bytes(&mut out, dataset.format().name().as_bytes());
    put_bytes(&mut out, dataset.options().as_bytes());
    put_bytes(&mut out, &encode_schema(dataset.schema())?);
    put_bytes(&mut out, &dataset.shape().encode());
    put(&mut out, files.len() as u64);
    for (bucket, range) in files.by_bucket() {
        put_bytes(&mut out, bucket.as_bytes());
        put(&mut out, range.len() as u64);
        for i in range {
            put_bytes(&mut out, files.key(i).as_bytes());
            put(&mut out, files.size(i));
            put_bytes(&mut out, files.tag_bytes(i));
        }
    }
    let indexes: Vec<&Arc<FileIndex>> = (0..files.len()).filter_map(|i| dataset.index(i)).collect();
    let (schemas, numbers) = distinct_schemas(&indexes)?;
    put(&mut out, schemas.len() as u64);
    for schema in &schemas {
        put_bytes(&mut out, schema);
    }
    for (index, schema) in indexes.into_iter().zip(numbers) {
        put(&mut out, schema);
        put_bytes(&mut out, &index.encode());
    }
    match dataset.labels() {
        None => out.push(0),
        Some(labels) => {
            out.push(1);
            labels.encode(&mut out);
        }
    }
    let sum = xxh3_128(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    Ok(out)
}

/// The schemas of files, each once, and for each file the number of its schema.
fn distinct_schemas(indexes: &[&Arc<FileIndex>]) -> Result<(Vec<Vec<u8>>, Vec<u64>)> {
    // Files share schemas, but not all equal ones are shared.
    let (mut by_place, mut by_bytes) = (HashMap::new(), HashMap::new());
    let (mut schemas, mut numbers) = (Vec::new(), Vec::with_capacity(indexes.len()));
    for index in indexes {
        let number = match by_place.entry(Arc::as_ptr(index.schema())) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                let bytes = encode_schema(index.schema())?;
                let number = *by_bytes.entry(bytes.clone()).or_insert_with(|| {
                    schemas.push(bytes);
                    schemas.len() as u64 - 1
                });
                *new.insert(number)
            }
        };
        numbers.push(number);
    }
    Ok((schemas, numbers))
}

/// Whether this is a whole index that another version of this program wrote.
fn is_of_another_version(bytes: &[u8]) -> bool {
    bytes
        .split_last_chunk::<SUM_BYTES>()
        .is_some_and(|(body, sum)| {
            xxh3_128(body) == u128::from_le_bytes(*sum)
                && (body.strip_prefix(MAGIC))
                    .is_some_and(|rest| !rest.starts_with(&VERSION.to_be_bytes()))
        })
}

pub(super) fn decode(bytes: &[u8]) -> Result<Dataset> {
    let damaged = || Error::corrupt("the stored index of a dataset is damaged");
    let (body, sum) = bytes.split_last_chunk::<SUM_BYTES>().ok_or_else(damaged)?;
    if xxh3_128(body) != u128::from_le_bytes(*sum) {
        return Err(damaged());
    }
    let body = body.strip_prefix(MAGIC).ok_or_else(damaged)?;
    let body = body
        .strip_prefix(&VERSION.to_be_bytes())
        .ok_or_else(damaged)?;
    Decoder { bytes: body }
        .dataset()
        .unwrap_or_else(|| Err(damaged()))
}

/// Variable-length numbers: seven bits in each byte, the lowest first.
pub(crate) fn put(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

pub(crate) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Reads what [`encode`] wrote. `None` if it contradicts itself.
pub(crate) struct Decoder<'a> {
    bytes: &'a [u8],
}

impl<'a> Decoder<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn number(&mut self) -> Option<u64> {
        let mut n = 0u64;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.bytes.split_first()?;
            self.bytes = rest;
            n |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(n);
            }
        }
        None
    }

    pub(crate) fn take(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.number()?).ok()?;
        let (taken, rest) = self.bytes.split_at_checked(length)?;
        self.bytes = rest;
        Some(taken)
    }

    /// All that is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.bytes)
    }

    pub(crate) fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.take()?).ok()
    }

    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        Some(*byte)
    }

    fn dataset(&mut self) -> Option<Result<Dataset>> {
        let format = Format::parse(self.text()?).ok()?;
        let options = self.text()?.to_owned();
        let schema = decode_schema(self.take()?).ok()?;
        let shape = forebay_plan::Shape::decode(self.take()?).ok()?;
        let files = self.files()?;
        let mut indexes = Vec::new();
        if format != Format::Objects {
            let mut schemas = vec![schema.clone()];
            for _ in 0..self.number()? {
                let of_files = decode_schema(self.take()?).ok()?;
                // The dataset's own schema is usually that of all files, and is then kept once.
                schemas.push(if of_files == schema {
                    schema.clone()
                } else {
                    of_files
                });
            }
            indexes.reserve(files.len());
            for _ in 0..files.len() {
                let own = usize::try_from(self.number()?).ok()?.checked_add(1)?;
                let own = schemas.get(own)?.clone();
                indexes.push(Arc::new(FileIndex::decode(self.take()?, own).ok()?));
            }
        } else if self.number()? != 0 {
            return None;
        }
        let labels = match self.byte()? {
            0 => None,
            _ => Some(Labels::decode(self, files.len())?),
        };
        self.bytes.is_empty().then(|| {
            Dataset::of_parts(Parts {
                format,
                files,
                indexes,
                shape: Some(shape),
                schema,
                labels,
                options,
            })
        })
    }

    fn files(&mut self) -> Option<FileTable> {
        let count = usize::try_from(self.number()?).ok()?;
        let mut builder = FileTableBuilder::default();
        while builder.len() < count {
            let bucket: Arc<str> = self.text()?.into();
            let in_bucket = self.number()?;
            if in_bucket == 0 {
                return None;
            }
            for _ in 0..in_bucket {
                let name = ObjectName::new(bucket.clone(), self.text()?).ok()?;
                let size = self.number()?;
                let (etag, last_modified_ms) = crate::catalog::table::parse_tag(self.take()?);
                builder
                    .push(&FileRef {
                        name,
                        size,
                        etag,
                        last_modified_ms,
                    })
                    .ok()?;
            }
        }
        (builder.len() == count).then(|| builder.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dataset(n: u64) -> Dataset {
        let mut files = FileTableBuilder::default();
        for i in 0..100 {
            let name = ObjectName::new("bk", format!("{n}/{i}")).unwrap();
            files
                .push(&FileRef {
                    name,
                    size: n,
                    etag: Some(format!("\"{i}\"")),
                    last_modified_ms: 0,
                })
                .unwrap();
        }
        Dataset::of_objects(files.finish(), Some(7), Some(Labels::Path(1)), "{}".into()).unwrap()
    }

    #[test]
    fn the_directory_keeps_to_its_bound_and_what_was_used_stays() {
        let dir = tempfile::tempdir().unwrap();
        let each = encode(&dataset(0)).unwrap().len() as u64;
        let disk = Disk::open(dir.path().join("d"), each * 4 + each / 2).unwrap();
        let ids: Vec<String> = (0..10).map(|n| dataset(n).id().to_owned()).collect();
        for n in 0..10u64 {
            disk.keep(u128::from(n), &dataset(n)).unwrap();
            assert!(disk.usage().0 <= each * 4 + each / 2 && disk.usage().1 <= 4);
            std::thread::sleep(std::time::Duration::from_millis(2));
            // The first one is in use all the time.
            assert!(disk.by_id(&ids[0]).is_some(), "{n}");
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        assert!(disk.by_id(&ids[9]).is_some() && disk.by_id(&ids[5]).is_none());
        // A dataset that is too large for the directory is not kept, and displaces nothing.
        let small = Disk::open(dir.path().join("s"), each).unwrap();
        small.keep(1, &dataset(1)).unwrap();
        assert_eq!(small.usage(), (0, 0));
    }

    #[test]
    fn what_a_spec_was_last_opened_as_is_not_what_was_last_used() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::open(dir.path().to_owned(), 1 << 20).unwrap();
        let (a, b) = (dataset(1), dataset(2));
        for (n, d) in [&a, &b, &a, &a, &b].into_iter().enumerate() {
            disk.keep(7, d).unwrap();
            assert!(disk.by_id(a.id()).is_some());
            assert_eq!(disk.by_spec(7).unwrap().id(), d.id(), "{n}");
        }
        assert_eq!(disk.usage().1, 2);
        assert!(disk.by_spec(8).is_none());
        std::fs::write(dir.path().join(".tmp-1-1"), "x").unwrap();
        std::fs::write(dir.path().join("notes.txt"), "of somebody").unwrap();
        let again = Disk::open(dir.path().to_owned(), 1 << 20).unwrap();
        assert!(!dir.path().join(".tmp-1-1").exists() && dir.path().join("notes.txt").exists());
        assert_eq!(again.by_id(a.id()).unwrap().label(0), Some("1"));
    }
    #[test]
    fn what_another_version_wrote_is_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::open(dir.path().to_owned(), 1 << 20).unwrap();
        let a = dataset(1);
        disk.keep(7, &a).unwrap();
        let path = disk.kept().remove(0).path;
        let mut bytes = fs::read(&path).unwrap();
        assert!(!is_of_another_version(&bytes));
        bytes[7] = 1;
        assert!(
            !is_of_another_version(&bytes),
            "it is damaged: the checksum does not match"
        );
        let end = bytes.len() - SUM_BYTES;
        let sum = xxh3_128(&bytes[..end]).to_le_bytes();
        bytes[end..].copy_from_slice(&sum);
        assert!(is_of_another_version(&bytes));
        fs::write(&path, &bytes).unwrap();
        assert!(disk.by_id(a.id()).is_none() && disk.by_spec(7).is_none());
        disk.keep(7, &a).unwrap();
        assert!(disk.by_id(a.id()).is_some());
    }
}
