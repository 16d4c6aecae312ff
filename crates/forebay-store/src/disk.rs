//! The seam between the store and the file system: every open, read, write, rename and delete goes
//! through [`Disk`].
//!
//! [`RealDisk`] is the machine's file system. [`FaultyDisk`](crate::faults::FaultyDisk) wraps any
//! other and fails on demand: tests use it for full, failing and read-only disks, flipped bits and
//! torn writes.

use std::{
    fs, io,
    ops::Range,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::Path,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Read only; the file must exist.
    Read,
    /// Read and written as it is; the file must exist.
    ReadWrite,
    /// A new, empty file; an existing file of that name is truncated.
    Create,
}

/// The size of a file system, and how much more an unprivileged process may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// The size of the file system.
    pub total_bytes: u64,
    /// What an unprivileged process may still write; the part reserved for root does not count.
    pub available_bytes: u64,
}

/// The space of the file system that `path` is on, or would be on: that of its nearest existing
/// ancestor.
///
/// # Errors
/// If the system does not say it.
pub fn space_of(path: &Path) -> io::Result<Space> {
    let absolute = std::path::absolute(path)?;
    let existing = absolute
        .ancestors()
        .find(|p| p.exists())
        .unwrap_or(Path::new("/"));
    let said = rustix::fs::statvfs(existing)?;
    let unit = said.f_frsize;
    Ok(Space {
        total_bytes: said.f_blocks.saturating_mul(unit),
        available_bytes: said.f_bavail.saturating_mul(unit),
    })
}

/// A file system, as far as the store needs one.
pub trait Disk: Send + Sync + 'static {
    /// As [`space_of`].
    ///
    /// # Errors
    /// If the system does not say it.
    fn space(&self, dir: &Path) -> io::Result<Space>;
    /// Makes a directory and any missing parents.
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;
    /// Opens a file; with [`OpenMode::Create`], makes it.
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Box<dyn DiskFile>>;
    /// Plain files of a directory with their sizes.
    fn list(&self, dir: &Path) -> io::Result<Vec<(String, u64)>>;
    /// Gives a file another name, replacing a file that has it.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn delete(&self, path: &Path) -> io::Result<()>;
    /// Makes creations, renames and deletions in `dir` durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
}

/// An open file. All positions are explicit, so threads share it without a lock.
pub trait DiskFile: Send + Sync + 'static {
    /// Appends exactly `len` bytes from `offset` to `out`.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file is shorter. `out` may then hold some of the bytes: the caller
    /// cuts it back.
    fn read_append(&self, out: &mut Vec<u8>, len: usize, offset: u64) -> io::Result<()>;
    /// The same, if it need not wait for a disk. `false`, with `out` as it was: not all bytes are
    /// in the page cache, or the system cannot tell.
    fn read_append_now(&self, out: &mut Vec<u8>, len: usize, offset: u64) -> io::Result<bool>;
    /// Writes all of `parts`, one after the other, from `offset` on.
    fn write_all_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()>;
    /// Puts zeros where nothing was written yet, so that what is soon written there lies in few
    /// large pages of the page cache and not in many small ones; at most [`PREPARED_BYTES`]. For
    /// speed alone: a failure changes nothing.
    fn prepare(&self, range: Range<u64>);
    /// Cuts the file, or extends it with zeros.
    fn set_size(&self, size: u64) -> io::Result<()>;
    /// Bytes of the file at this moment.
    fn size(&self) -> io::Result<u64>;
    /// Makes written data durable, as `fdatasync` does.
    fn sync(&self) -> io::Result<()>;
}

/// How much of a file is [prepared](DiskFile::prepare) at a time. Larger pages are hardly faster to
/// read, and these zeros stay in the core's cache until the record is written over them ([ADR
/// 15](../../../docs/adr/0015-records-lie-in-large-pages.md)).
pub const PREPARED_BYTES: u64 = 256 << 10;

/// The machine's file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealDisk;

struct RealFile {
    file: fs::File,
    /// The kernel cannot tell whether a read would wait.
    always_waits: AtomicBool,
}

impl RealFile {
    /// One call, into the spare capacity of `out`, until it is `end` bytes long. (rustix's
    /// `preadv2` takes initialised memory, which would have to be zeroed for each read.)
    fn pread(
        &self,
        out: &mut Vec<u8>,
        end: usize,
        offset: u64,
        flags: libc::c_int,
    ) -> io::Result<usize> {
        let have = out.len();
        let spare = &mut out.spare_capacity_mut()[..end - have];
        let iov = libc::iovec {
            iov_base: spare.as_mut_ptr().cast(),
            iov_len: spare.len(),
        };
        // SAFETY: the iovec names spare capacity that `out` owns; the kernel writes at most
        // `spare.len()` bytes there.
        let n =
            unsafe { libc::preadv2(self.file.as_raw_fd(), &iov, 1, offset as libc::off_t, flags) };
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just initialised the `n` bytes after the old length.
        unsafe { out.set_len(have + n as usize) };
        Ok(n as usize)
    }
}

impl Disk for RealDisk {
    fn space(&self, dir: &Path) -> io::Result<Space> {
        space_of(dir)
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Box<dyn DiskFile>> {
        let mut options = fs::OpenOptions::new();
        options.read(true);
        match mode {
            OpenMode::Read => {}
            OpenMode::ReadWrite => {
                options.write(true);
            }
            OpenMode::Create => {
                options.write(true).create(true).truncate(true);
            }
        }
        Ok(Box::new(RealFile {
            file: options.open(path)?,
            always_waits: AtomicBool::new(false),
        }))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<(String, u64)>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let meta = entry.metadata()?;
            if let (true, Some(name)) = (meta.is_file(), entry.file_name().to_str()) {
                files.push((name.to_owned(), meta.len()));
            }
        }
        Ok(files)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn delete(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        fs::File::open(dir)?.sync_all()
    }
}

impl DiskFile for RealFile {
    fn read_append(&self, out: &mut Vec<u8>, len: usize, offset: u64) -> io::Result<()> {
        let start = out.len();
        out.reserve(len);
        while out.len() < start + len {
            match self.pread(out, start + len, offset + (out.len() - start) as u64, 0) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn read_append_now(&self, out: &mut Vec<u8>, len: usize, offset: u64) -> io::Result<bool> {
        if self.always_waits.load(Relaxed) {
            return Ok(false);
        }
        let start = out.len();
        out.reserve(len);
        while out.len() < start + len {
            let waits = match self.pread(
                out,
                start + len,
                offset + (out.len() - start) as u64,
                libc::RWF_NOWAIT,
            ) {
                Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => continue,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
                // A file system, or a kernel, that does not know the flag.
                Err(e)
                    if matches!(
                        e.raw_os_error(),
                        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)
                    ) =>
                {
                    self.always_waits.store(true, Relaxed);
                    Ok(false)
                }
                Err(e) => Err(e),
            };
            out.truncate(start);
            return waits;
        }
        Ok(true)
    }

    fn write_all_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()> {
        let total: usize = parts.iter().map(|p| p.len()).sum();
        let slices: Vec<io::IoSlice<'_>> = parts.iter().map(|p| io::IoSlice::new(p)).collect();
        let written = match rustix::io::pwritev(&self.file, &slices, offset) {
            Ok(written) => written,
            Err(rustix::io::Errno::INTR) => 0,
            Err(e) => return Err(e.into()),
        };
        if written == total {
            return Ok(());
        }
        // A short write (a nearly full disk, a signal): write the rest part by part, so that the
        // reason surfaces as an error.
        let mut skip = written;
        let mut at = offset + written as u64;
        for part in parts {
            let begin = skip.min(part.len());
            skip -= begin;
            self.file.write_all_at(&part[begin..], at)?;
            at += (part.len() - begin) as u64;
        }
        Ok(())
    }

    fn prepare(&self, range: Range<u64>) {
        static ZEROS: [u8; PREPARED_BYTES as usize] = [0; PREPARED_BYTES as usize];
        let len = range.end.saturating_sub(range.start).min(PREPARED_BYTES);
        let _ = self.file.write_all_at(&ZEROS[..len as usize], range.start);
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.file.set_len(size)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_that_does_not_wait_gives_the_same_bytes_or_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = RealDisk
            .open(&dir.path().join("f"), OpenMode::Create)
            .unwrap();
        let data: Vec<u8> = (0..300_000u32).map(|i| (i * 7) as u8).collect();
        file.write_all_at(&[&data[..100_000], &data[100_000..]], 0)
            .unwrap();
        let mut here = 0;
        for (offset, len) in [
            (0, 300_000),
            (0, 0),
            (4_095, 2),
            (299_999, 1),
            (123_456, 100_000),
        ] {
            let mut out = b"before".to_vec();
            if file.read_append_now(&mut out, len, offset as u64).unwrap() {
                here += 1;
                assert_eq!(out[6..], data[offset..offset + len]);
            } else {
                assert_eq!(out, b"before");
            }
            let mut waited = b"before".to_vec();
            file.read_append(&mut waited, len, offset as u64).unwrap();
            assert_eq!(waited[6..], data[offset..offset + len]);
        }
        // File systems that cannot tell (always 0 here), or that have just written (always 5).
        assert!(here == 0 || here == 5, "{here}");
        let mut out = b"before".to_vec();
        assert!(
            file.read_append_now(&mut out, 10, 299_995).is_err() || here == 0,
            "beyond the end"
        );
        assert_eq!(out, b"before");
    }
}
