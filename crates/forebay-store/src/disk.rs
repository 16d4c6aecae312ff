//! The seam between the store and the file system: every open, read, write, rename and delete goes through [`Disk`].
//!
//! [`RealDisk`] is the machine's file system. [`FaultyDisk`](crate::faults::FaultyDisk) wraps any other and fails on demand: that is how
//! tests meet full, failing and read-only disks, flipped bits and torn writes.

use std::{
    fs, io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::Path,
};

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    Read,
    ReadWrite,
    /// A new, empty file; an older one of that name is cut to nothing.
    Create,
}

/// A file system, as far as the store needs one.
pub trait Disk: Send + Sync + 'static {
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Box<dyn DiskFile>>;
    /// Plain files of a directory with their sizes.
    fn list(&self, dir: &Path) -> io::Result<Vec<(String, u64)>>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn delete(&self, path: &Path) -> io::Result<()>;
    /// Makes creations, renames and deletions in `dir` durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
}

/// An open file. All positions are explicit, so threads share it without a lock.
pub trait DiskFile: Send + Sync + 'static {
    /// Appends exactly `len` bytes from `offset` to `out`.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file is shorter. `out` may hold a part of the bytes then: the caller cuts it back.
    fn read_append(&self, out: &mut Vec<u8>, len: usize, offset: u64) -> io::Result<()>;
    /// Writes all of `parts`, one after the other, from `offset` on.
    fn write_all_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()>;
    fn size(&self) -> io::Result<u64>;
    fn sync(&self) -> io::Result<()>;
}

/// The machine's file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealDisk;

struct RealFile(fs::File);

impl Disk for RealDisk {
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
        Ok(Box::new(RealFile(options.open(path)?)))
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
        out.reserve(len);
        let start = out.len();
        let mut done = 0;
        while done < len {
            let spare = &mut out.spare_capacity_mut()[..len - done];
            // SAFETY: the pointer and length name spare capacity that `out` owns; pread writes at most `spare.len()` bytes there.
            let n =
                unsafe { libc::pread(self.0.as_raw_fd(), spare.as_mut_ptr().cast(), spare.len(), (offset + done as u64) as libc::off_t) };
            match n {
                -1 => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => {
                    done += n as usize;
                    // SAFETY: pread has just initialised the `n` bytes after the old length.
                    unsafe { out.set_len(start + done) };
                }
            }
        }
        Ok(())
    }

    fn write_all_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()> {
        let total: usize = parts.iter().map(|p| p.len()).sum();
        let iov: Vec<libc::iovec> =
            parts.iter().map(|p| libc::iovec { iov_base: p.as_ptr().cast_mut().cast(), iov_len: p.len() }).collect();
        // SAFETY: each iovec names a live slice, which the kernel only reads.
        let n = unsafe { libc::pwritev(self.0.as_raw_fd(), iov.as_ptr(), iov.len() as libc::c_int, offset as libc::off_t) };
        let written = match n {
            -1 => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
                0
            }
            n => n as usize,
        };
        if written == total {
            return Ok(());
        }
        // A short write (a nearly full disk, a signal): the rest part by part, so that the reason comes out as an error.
        let mut skip = written;
        let mut at = offset + written as u64;
        for part in parts {
            let begin = skip.min(part.len());
            skip -= begin;
            self.0.write_all_at(&part[begin..], at)?;
            at += (part.len() - begin) as u64;
        }
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}
