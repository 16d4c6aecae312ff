//! What is read: objects of one size, the same contents as members of tar shards, or the contents
//! of an existing bucket.
//!
//! Contents are pseudo-random (so that no cache, compressor or checksum has it easy) and a function
//! of the seed and the object's number. The CRC32C of what was written is remembered, so that what
//! is received can be compared with it.

use forebay_core::{Error, Result};
use forebay_format::{tar_header_into, tar_padding_into, tar_trailer_into};
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
};

/// The bucket of a node that the benchmark has started.
pub const BUCKET: &str = "bench";
/// Shards are about this large …
const SHARD_BYTES: u64 = 32 << 20;
/// … and hold at most this many members.
const SHARD_MEMBERS_MAX: u64 = 1024;
/// Objects in one directory.
const DIR_OBJECTS: u64 = 1000;

/// One thing that can be requested.
#[derive(Clone, Debug)]
pub struct Entry {
    pub object: String,
    pub member: Option<String>,
    pub size: u64,
    /// CRC32C of its bytes, if known.
    pub crc: Option<u32>,
    /// Its name in the answer to a batch.
    pub in_answer: String,
}

#[derive(Clone, Debug)]
pub struct Dataset {
    pub bucket: String,
    pub entries: Vec<Entry>,
}

impl Dataset {
    pub fn new(
        bucket: &str,
        things: impl IntoIterator<Item = (String, Option<String>, u64, Option<u32>)>,
    ) -> Self {
        let entries = things.into_iter().map(|(object, member, size, crc)| {
            let in_answer = match &member {
                None => format!("{bucket}/{object}"),
                Some(member) => format!("{bucket}/{object}/{member}"),
            };
            Entry {
                object,
                member,
                size,
                crc,
                in_answer,
            }
        });
        Self {
            bucket: bucket.to_owned(),
            entries: entries.collect(),
        }
    }

    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|e| e.size).sum()
    }
}

/// A small, fast generator (SplitMix64): the order of requests and the contents of objects come
/// from it.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut r = Self(seed ^ stream.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        r.next();
        r
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number from 0 to `n - 1`, close to uniform.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

pub fn content(seed: u64, number: u64, size: u64) -> Vec<u8> {
    let mut random = Random::new(seed, number);
    let mut bytes = Vec::with_capacity(size as usize + 8);
    while (bytes.len() as u64) < size {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(size as usize);
    bytes
}

/// Writes `count` objects of `size` bytes below `dir`, in directories of a thousand.
pub fn write_objects(dir: &Path, count: u64, size: u64, seed: u64) -> Result<Dataset> {
    let mut things = Vec::with_capacity(count as usize);
    for i in 0..count {
        let object = format!("o/{:03}/{i:08}.bin", i / DIR_OBJECTS);
        let path = dir.join(&object);
        if i % DIR_OBJECTS == 0 {
            make_dir(path.parent().unwrap_or(dir))?;
        }
        let bytes = content(seed, i, size);
        std::fs::write(&path, &bytes).map_err(|e| Error::file("cannot write", &path, e))?;
        things.push((object, None, size, Some(forebay_core::crc32c(&bytes))));
    }
    Ok(Dataset::new(BUCKET, things))
}

/// How many members of this size go into one shard by default.
pub fn members_per_shard(size: u64) -> u64 {
    (SHARD_BYTES / size.max(1)).clamp(8, SHARD_MEMBERS_MAX)
}

/// Writes the same contents as members of tar shards.
pub fn write_shards(
    dir: &Path,
    count: u64,
    size: u64,
    per_shard: u64,
    seed: u64,
) -> Result<Dataset> {
    make_dir(&dir.join("t"))?;
    let mut things = Vec::with_capacity(count as usize);
    for first in (0..count).step_by(per_shard.max(1) as usize) {
        let object = format!("t/{:06}.tar", first / per_shard.max(1));
        let path = dir.join(&object);
        let fail = |e| Error::file("cannot write", &path, e);
        let mut file = BufWriter::with_capacity(1 << 20, File::create(&path).map_err(fail)?);
        let mut around = Vec::new();
        for i in first..count.min(first + per_shard.max(1)) {
            let member = format!("{i:08}.bin");
            let bytes = content(seed, i, size);
            tar_header_into(&mut around, &member, size, 0)?;
            file.write_all(&around)
                .and_then(|()| file.write_all(&bytes))
                .map_err(fail)?;
            around.clear();
            tar_padding_into(&mut around, size);
            things.push((
                object.clone(),
                Some(member),
                size,
                Some(forebay_core::crc32c(&bytes)),
            ));
        }
        tar_trailer_into(&mut around);
        file.write_all(&around)
            .and_then(|()| file.flush())
            .map_err(fail)?;
    }
    Ok(Dataset::new(BUCKET, things))
}

fn make_dir(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(|e| Error::file("cannot make", dir, e))
}

/// A directory that is removed at the end of the run.
pub fn scratch(within: Option<&Path>) -> Result<tempfile::TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("forebay-bench-");
    let made = match within {
        Some(dir) => builder.tempdir_in(dir),
        None => builder.tempdir(),
    };
    made.map_err(|e| {
        Error::internal(format!("cannot make a directory for the benchmark: {e}"))
            .caused_by(e)
            .hint("--dir names another place")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_hold_the_bytes_of_the_objects() {
        let dir = tempfile::tempdir().unwrap();
        let objects = write_objects(dir.path(), 10, 1000, 7).unwrap();
        let members = write_shards(dir.path(), 10, 1000, 4, 7).unwrap();
        assert_eq!(objects.bytes(), 10_000);
        assert_eq!(std::fs::read_dir(dir.path().join("t")).unwrap().count(), 3);
        for (object, member) in objects.entries.iter().zip(&members.entries) {
            assert_eq!(object.crc, member.crc);
            let bytes = std::fs::read(dir.path().join(&object.object)).unwrap();
            assert_eq!(Some(forebay_core::crc32c(&bytes)), object.crc);
            let shard = std::fs::read(dir.path().join(&member.object)).unwrap();
            assert!(shard.windows(1000).any(|w| w == bytes));
        }
        assert_ne!(objects.entries[0].crc, objects.entries[1].crc);
        assert_eq!(
            members.entries[9].in_answer,
            "bench/t/000002.tar/00000009.bin"
        );
    }
}
