//! The files of a dataset: names, versions, sizes, as columns, because there may be millions.
//!
//! A file costs its key, 21 bytes for its ETag and 12 more bytes. Files are numbered in the order
//! of the dataset's rows.
//!
//! Invariant: every name in the table is valid (the builder takes [`ObjectName`]s), and keys take
//! less than 4 GiB.

use forebay_core::{
    Attributes, Error, ObjectMeta, ObjectName, Result, VersionId, limits, name::hash_name,
};
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// One file as a dataset knows it.
#[derive(Clone, Debug, PartialEq)]
pub struct FileRef {
    /// Bucket and key.
    pub name: ObjectName,
    /// Bytes.
    pub size: u64,
    /// As the origin gave it; `None` if it has none.
    pub etag: Option<String>,
    /// Milliseconds since the Unix epoch. Kept if there is no ETag, 0 otherwise.
    pub last_modified_ms: i64,
}

impl FileRef {
    /// What the engine needs to read this version and no other.
    pub fn meta(&self) -> ObjectMeta {
        ObjectMeta {
            size: self.size,
            etag: self.etag.clone(),
            last_modified_ms: self.last_modified_ms,
            attributes: Attributes::default(),
        }
    }

    /// Tells versions of this file and other files apart; never 0.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        hash.update(self.name.to_string().as_bytes());
        hash.update(&[0]);
        hash.update(&self.size.to_le_bytes());
        hash.update(&tag_of(self.etag.as_deref(), self.last_modified_ms));
        hash.digest().max(1)
    }

    /// Identifies this version in the engine and the cache.
    pub fn version(&self) -> VersionId {
        self.meta().version()
    }
}

/// The tag's first byte says how to read the rest.
mod tag {
    /// No ETag: 8 bytes of modification time.
    pub const TIME: u8 = 0;
    /// A quoted MD5: its 16 bytes.
    pub const MD5: u8 = 1;
    /// Anything else: the text itself.
    pub const TEXT: u8 = 2;
}

/// The files of a dataset; see the [module](self).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FileTable {
    /// The file at which each bucket begins, and the bucket.
    buckets: Vec<(u32, Arc<str>)>,
    keys: String,
    key_ends: Vec<u32>,
    sizes: Vec<u64>,
    tags: Vec<u8>,
    tag_ends: Vec<u32>,
}

impl FileTable {
    /// The number of files.
    pub fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Whether it has no files.
    pub fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// Everything known about one file.
    ///
    /// # Panics
    /// If the file does not exist, as with an index.
    pub fn file(&self, i: usize) -> FileRef {
        let (etag, last_modified_ms) = self.tag(i);
        FileRef {
            name: self.name(i),
            size: self.sizes[i],
            etag,
            last_modified_ms,
        }
    }

    /// What stands for a file's name and its version, as of its [`FileRef`].
    ///
    /// # Panics
    /// If the file does not exist.
    pub(crate) fn identity(&self, i: usize) -> (u128, VersionId) {
        let (etag, last_modified_ms) = self.tag(i);
        let meta = ObjectMeta {
            size: self.sizes[i],
            etag,
            last_modified_ms,
            attributes: Attributes::default(),
        };
        (hash_name(self.bucket(i), self.key(i)), meta.version())
    }

    /// The bucket and key of a file.
    ///
    /// # Panics
    /// If the file does not exist.
    pub fn name(&self, i: usize) -> ObjectName {
        ObjectName::new(self.bucket_arc(i).clone(), self.key(i))
            .expect("the builder takes valid names only")
    }

    /// The key of a file, without its bucket.
    ///
    /// # Panics
    /// If the file does not exist.
    pub fn key(&self, i: usize) -> &str {
        let start = if i == 0 {
            0
        } else {
            self.key_ends[i - 1] as usize
        };
        &self.keys[start..self.key_ends[i] as usize]
    }

    /// The bucket of a file.
    ///
    /// # Panics
    /// If the file does not exist.
    pub fn bucket(&self, i: usize) -> &str {
        self.bucket_arc(i)
    }

    fn bucket_arc(&self, i: usize) -> &Arc<str> {
        let at = self
            .buckets
            .partition_point(|&(first, _)| first as usize <= i);
        &self.buckets[at - 1].1
    }

    /// The size of a file, bytes.
    ///
    /// # Panics
    /// If the file does not exist.
    pub fn size(&self, i: usize) -> u64 {
        self.sizes[i]
    }

    /// Total size of all files.
    pub fn total_bytes(&self) -> u64 {
        self.sizes.iter().fold(0, |sum, s| sum.saturating_add(*s))
    }

    /// All files, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = FileRef> + '_ {
        (0..self.len()).map(|i| self.file(i))
    }

    /// Consecutive files in one bucket, with that bucket.
    pub fn by_bucket(&self) -> impl Iterator<Item = (&str, std::ops::Range<usize>)> {
        (0..self.buckets.len()).map(|b| {
            let end = self.buckets.get(b + 1).map_or(self.len(), |n| n.0 as usize);
            (&*self.buckets[b].1, self.buckets[b].0 as usize..end)
        })
    }

    /// What distinguishes this version from others, in bytes: equal for equal versions.
    pub(crate) fn tag_bytes(&self, i: usize) -> &[u8] {
        let start = if i == 0 {
            0
        } else {
            self.tag_ends[i - 1] as usize
        };
        &self.tags[start..self.tag_ends[i] as usize]
    }

    fn tag(&self, i: usize) -> (Option<String>, i64) {
        parse_tag(self.tag_bytes(i))
    }

    /// As [`ObjectMeta::names_version`].
    pub(crate) fn names_version(&self, i: usize) -> bool {
        let (etag, last_modified_ms) = self.tag(i);
        etag.is_some() || last_modified_ms != 0
    }

    /// Whether a file has this size and version.
    pub(crate) fn is_version(&self, i: usize, file: &FileRef) -> bool {
        self.sizes[i] == file.size
            && self.tag_bytes(i) == tag_of(file.etag.as_deref(), file.last_modified_ms).as_slice()
    }

    /// Approximate memory that the table holds.
    pub fn memory_bytes(&self) -> u64 {
        let fixed =
            self.key_ends.capacity() * 4 + self.sizes.capacity() * 8 + self.tag_ends.capacity() * 4;
        (fixed + self.keys.capacity() + self.tags.capacity() + self.buckets.capacity() * 24) as u64
    }
}

const HEX: &[u8; 16] = b"0123456789abcdef";

/// The ETag and modification time in a tag.
pub(crate) fn parse_tag(bytes: &[u8]) -> (Option<String>, i64) {
    match bytes.split_first() {
        Some((&tag::TIME, time)) => (None, time.try_into().map_or(0, i64::from_le_bytes)),
        Some((&tag::MD5, md5)) => {
            let mut text = String::with_capacity(34);
            text.push('"');
            for byte in md5 {
                text.push(char::from(HEX[usize::from(byte >> 4)]));
                text.push(char::from(HEX[usize::from(byte & 15)]));
            }
            text.push('"');
            (Some(text), 0)
        }
        Some((_, text)) => (Some(String::from_utf8_lossy(text).into_owned()), 0),
        None => (None, 0),
    }
}

fn tag_of(etag: Option<&str>, last_modified_ms: i64) -> Vec<u8> {
    let Some(etag) = etag else {
        return std::iter::once(tag::TIME)
            .chain(last_modified_ms.to_le_bytes())
            .collect();
    };
    md5_of(etag).map_or_else(
        || std::iter::once(tag::TEXT).chain(etag.bytes()).collect(),
        |md5| std::iter::once(tag::MD5).chain(md5).collect(),
    )
}

/// The bytes of an ETag that is a quoted MD5 in lower case, as S3 has it for objects with one part.
fn md5_of(etag: &str) -> Option<[u8; 16]> {
    let hex = etag.strip_prefix('"')?.strip_suffix('"')?;
    if hex.len() != 32 {
        return None;
    }
    let digit = |b: u8| HEX.iter().position(|&h| h == b).map(|at| at as u8);
    let mut out = [0; 16];
    for (byte, pair) in out.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(out)
}

/// Collects files in the order of rows.
#[derive(Debug, Default)]
pub struct FileTableBuilder(FileTable);

impl FileTableBuilder {
    /// Adds the file that follows those before it.
    ///
    /// # Errors
    /// `TooLarge` past the limits on files and names.
    pub fn push(&mut self, file: &FileRef) -> Result<()> {
        let t = &mut self.0;
        let tag = tag_of(file.etag.as_deref(), file.last_modified_ms);
        let key_end = u32::try_from(t.keys.len() + file.name.key().len()).ok();
        let tag_end = u32::try_from(t.tags.len() + tag.len()).ok();
        let (Some(key_end), Some(tag_end), true) =
            (key_end, tag_end, t.len() < limits::DATASET_FILES_MAX)
        else {
            return Err(Error::new(
                forebay_core::ErrorKind::TooLarge,
                format!(
                    "the dataset has more than {} files, or its names take more than 4 GiB",
                    limits::DATASET_FILES_MAX
                ),
            )
            .hint(
                "pack small objects into tars or Parquet files, or open parts of it and mix them",
            ));
        };
        if t.buckets
            .last()
            .is_none_or(|(_, b)| **b != *file.name.bucket())
        {
            t.buckets
                .push((t.len() as u32, file.name.bucket_arc().clone()));
        }
        t.keys.push_str(file.name.key());
        t.key_ends.push(key_end);
        t.sizes.push(file.size);
        t.tags.extend_from_slice(&tag);
        t.tag_ends.push(tag_end);
        Ok(())
    }

    /// The number of files so far.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether none was added yet.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The table, without spare capacity.
    pub fn finish(self) -> FileTable {
        let mut t = self.0;
        t.keys.shrink_to_fit();
        t.key_ends.shrink_to_fit();
        t.sizes.shrink_to_fit();
        t.tags.shrink_to_fit();
        t.tag_ends.shrink_to_fit();
        t
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_come_back_as_they_went_in() {
        let md5 = format!("\"{}\"", "0123456789abcdef".repeat(2));
        let etags = [
            None,
            Some(md5.clone()),
            Some(md5.to_uppercase()),
            Some("\"abc-12\"".into()),
            Some("W/\"x\"".into()),
            Some(String::new()),
        ];
        let mut builder = FileTableBuilder::default();
        let mut files = Vec::new();
        for (i, etag) in etags.into_iter().enumerate() {
            for bucket in ["b-1", "b-1", "b-2"] {
                let last_modified_ms = if etag.is_none() { -5 + i as i64 } else { 0 };
                let name = ObjectName::new(bucket, format!("ü/{i}.bin")).unwrap();
                files.push(FileRef {
                    name,
                    size: u64::MAX - i as u64,
                    etag: etag.clone(),
                    last_modified_ms,
                });
                builder.push(files.last().unwrap()).unwrap();
            }
        }
        let table = builder.finish();
        assert_eq!(table.iter().collect::<Vec<_>>(), files);
        assert_eq!(table.total_bytes(), u64::MAX);
        for (i, f) in files.iter().enumerate() {
            assert!(table.is_version(i, f));
            assert_eq!(table.identity(i), (f.name.hash128(), f.version()));
            assert!(!table.is_version(
                i,
                &FileRef {
                    size: 1,
                    ..f.clone()
                }
            ));
            assert!(!table.is_version(
                i,
                &FileRef {
                    etag: Some("\"other\"".into()),
                    ..f.clone()
                }
            ));
        }
        let runs: Vec<_> = table.by_bucket().collect();
        assert_eq!(runs.len(), 12);
        assert_eq!(
            (runs[0].0, runs[0].1.clone(), runs[11].0),
            ("b-1", 0..2, "b-2")
        );
        assert!(FileTable::default().is_empty());
    }
}
