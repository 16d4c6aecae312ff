//! How long a directory's disk takes to read and to write: a [`Disk`] that measures another.
//!
//! Reads that do not wait (`read_append_now`) are not measured: they take what is in the page cache
//! and say nothing about the disk.

use crate::disk::{Disk, DiskFile, OpenMode, Space};
use forebay_core::Histogram;
use std::{io, ops::Range, path::Path, sync::Arc, time::Instant};

/// The latencies of one directory.
#[derive(Debug, Default)]
pub struct Latency {
    pub read: Histogram,
    pub write: Histogram,
}

pub struct Timed {
    inner: Arc<dyn Disk>,
    latency: Arc<Latency>,
}

impl Timed {
    pub fn new(inner: Arc<dyn Disk>, latency: Arc<Latency>) -> Self {
        Timed { inner, latency }
    }
}

impl Disk for Timed {
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.inner.create_dir_all(path)
    }

    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(TimedFile {
            inner: self.inner.open(path, mode)?,
            latency: self.latency.clone(),
        }))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<(String, u64)>> {
        self.inner.list(dir)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.inner.rename(from, to)
    }

    fn delete(&self, path: &Path) -> io::Result<()> {
        self.inner.delete(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.inner.sync_dir(dir)
    }

    fn space(&self, dir: &Path) -> io::Result<Space> {
        self.inner.space(dir)
    }
}

struct TimedFile {
    inner: Box<dyn DiskFile>,
    latency: Arc<Latency>,
}

impl DiskFile for TimedFile {
    fn read_append(&self, out: &mut Vec<u8>, len: usize, offset: u64) -> io::Result<()> {
        let began = Instant::now();
        let result = self.inner.read_append(out, len, offset);
        self.latency.read.observe(began.elapsed());
        result
    }

    fn read_append_now(&self, out: &mut Vec<u8>, len: usize, offset: u64) -> io::Result<bool> {
        self.inner.read_append_now(out, len, offset)
    }

    fn write_all_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()> {
        let began = Instant::now();
        let result = self.inner.write_all_at(parts, offset);
        self.latency.write.observe(began.elapsed());
        result
    }

    fn prepare(&self, range: Range<u64>) {
        self.inner.prepare(range);
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.inner.set_size(size)
    }

    fn size(&self) -> io::Result<u64> {
        self.inner.size()
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RealDisk;

    #[test]
    fn what_waits_for_the_disk_is_measured() {
        let dir = tempfile::tempdir().unwrap();
        let latency = Arc::new(Latency::default());
        let disk = Timed::new(Arc::new(RealDisk), latency.clone());
        let file = disk.open(&dir.path().join("x"), OpenMode::Create).unwrap();
        file.write_all_at(&[b"ab", b"c"], 0).unwrap();
        let mut out = Vec::new();
        file.read_append(&mut out, 3, 0).unwrap();
        assert!(file.read_append(&mut out, 9, 0).is_err());
        assert_eq!(&out[..3], b"abc");
        let counts = (
            latency.write.snapshot().count(),
            latency.read.snapshot().count(),
        );
        assert_eq!(counts, (1, 2));
    }
}
