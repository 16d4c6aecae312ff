//! What the tests of the store share.

use bytes::Bytes;
use forebay_core::{Attributes, ManualClock, ObjectMeta, ObjectName, VersionId};
use forebay_store::{
    DirConfig, Head, Part, Store, StoreConfig, Wait,
    disk::RealDisk,
    faults::{Fault, FaultyDisk, Op, Rule},
};
use std::{ops::Range, path::Path, sync::Arc, time::Duration};

pub fn name(key: &str) -> ObjectName {
    ObjectName::new("bucket", key).unwrap()
}

pub fn meta(size: u64, etag: &str) -> ObjectMeta {
    ObjectMeta {
        size,
        etag: Some(format!("\"{etag}\"")),
        last_modified_ms: 1_700_000_000_000,
        attributes: Attributes {
            content_type: Some("image/jpeg".into()),
            ..Default::default()
        },
    }
}

/// Bytes that differ for each seed and position.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 24) as u8
        })
        .collect()
}

/// Where the records of a segment end: in the active one, zeros follow.
pub fn records_end(segment: &[u8]) -> usize {
    segment
        .iter()
        .rposition(|b| *b != 0)
        .map_or(0, |last| last + 1)
}

pub fn config(dirs: &[(&Path, u64)]) -> StoreConfig {
    StoreConfig {
        dirs: dirs
            .iter()
            .map(|(path, capacity_bytes)| DirConfig {
                path: path.to_path_buf(),
                capacity_bytes: *capacity_bytes,
            })
            .collect(),
        background: false,
        keep_free_bytes: Some(0),
        ..StoreConfig::default()
    }
}

pub fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::at(Duration::from_secs(1_800_000_000)))
}

pub fn open(config: &StoreConfig) -> Store {
    Store::open(config.clone(), clock()).unwrap()
}

/// Without syncing to disk: what must survive the process is in the page cache.
pub fn open_unsynced(config: &StoreConfig) -> Store {
    let (disk, faults) = FaultyDisk::new(RealDisk);
    faults.add(Rule::new(Op::Sync, Fault::Skip));
    Store::open_on(Arc::new(disk), config.clone(), clock()).unwrap()
}

/// The sum of the sizes of all files in a directory.
pub fn disk_bytes(dir: &Path) -> u64 {
    // A file may disappear between listing it and asking for its size.
    std::fs::read_dir(dir)
        .unwrap()
        .filter_map(|e| e.unwrap().metadata().ok())
        .map(|m| m.len())
        .sum()
}

/// The head, for a caller that may wait.
pub fn read_head(store: &Store, name: &ObjectName) -> Option<Head> {
    store.head(name, Wait::May).unwrap()
}

/// A range of a part, for a caller that may wait.
pub fn read_part(
    store: &Store,
    name: &ObjectName,
    version: VersionId,
    part: Part,
    range: Range<u64>,
) -> Option<Bytes> {
    store.part(name, version, part, range, Wait::May).unwrap()
}

/// The same of a part of so many bytes, as it lies on the disk.
pub fn read_unverified(
    store: &Store,
    name: &ObjectName,
    version: VersionId,
    part: (Part, u64),
    range: Range<u64>,
) -> Option<Vec<u8>> {
    let mut out = b"in front".to_vec();
    let found = store.append_part_unverified(name, version, part, range, Wait::May, &mut out);
    assert_eq!(&out[..8], b"in front");
    if found == Ok(true) {
        return Some(out.split_off(8));
    }
    assert_eq!((found, out.len()), (Ok(false), 8));
    None
}

pub fn read_inline(store: &Store, name: &ObjectName) -> Option<Vec<u8>> {
    let mut out = b"in front".to_vec();
    let appended = store.append_inline(name, Wait::May, &mut out, |meta, out| {
        out.extend_from_slice(b"HEADER");
        Some(0..meta.size)
    });
    match appended.unwrap() {
        Some(a) => {
            assert_eq!(&out[..14], b"in frontHEADER");
            assert_eq!(a.range, 0..a.meta.size);
            Some(out.split_off(14))
        }
        None => {
            assert_eq!(out, b"in front");
            None
        }
    }
}
