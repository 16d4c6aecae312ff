//! One staged file on disk: its bytes, followed by a checksum for each block of them.
//!
//! A file is written front to back by one writer, which asks the kernel to write behind it as it
//! goes, so that the `fsync` at the end has little left to wait for. It is complete if it is as long
//! as its bytes and their checksums; each block is verified when it leaves the disk.

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_engine::ByteStream;
use forebay_protocol::lent::{BLOCK_BYTES, SUM_BYTES, Sum, sum};
use futures::{StreamExt, stream};
use std::{
    fs::{File, OpenOptions},
    io::{self, IoSlice, Write},
    mem,
    ops::Range,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
};
use tokio::task::spawn_blocking;

pub use forebay_protocol::lent::disk_bytes;

/// The kernel is asked to write this much at a time to the disk.
const WRITE_BEHIND_BYTES: u64 = 8 << 20;
/// The pieces in which a file is read.
const READ_BYTES: u64 = 2 << 20;
/// Pieces that are read ahead of whoever takes them.
const READ_AHEAD: usize = 2;

/// What reading a file in pieces holds in memory.
pub const READ_MEMORY_BYTES: u64 = READ_BYTES * (READ_AHEAD as u64 + 1);

/// A file that is being written.
pub struct Writer {
    file: File,
    block: Sum,
    in_block: u64,
    sums: Vec<u8>,
    written: u64,
    behind: u64,
    takes_room: bool,
}

impl Writer {
    /// Makes the file. The disk's room for `size` bytes is taken at once, where the file system can.
    pub fn create(path: &Path, size: Option<u64>) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        let mut takes_room = false;
        if let Some(size) = size.filter(|size| *size > 0) {
            use rustix::{fs::FallocateFlags, io::Errno};
            let taken =
                rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, disk_bytes(size));
            // A file system that cannot do it says so when it is written.
            if let Err(Errno::NOSPC | Errno::DQUOT) = taken {
                return Err(io::Error::from(io::ErrorKind::StorageFull));
            }
            takes_room = taken.is_ok();
        }
        Ok(Writer {
            file,
            block: Sum::default(),
            in_block: 0,
            sums: Vec::new(),
            written: 0,
            behind: 0,
            takes_room,
        })
    }

    /// Whether the disk's room for all of it was taken when it was made.
    pub fn takes_room(&self) -> bool {
        self.takes_room
    }

    pub fn written(&self) -> u64 {
        self.written
    }

    /// Appends all of `pieces`.
    pub fn write(&mut self, pieces: &[Bytes]) -> io::Result<()> {
        for piece in pieces {
            let mut rest = &piece[..];
            while !rest.is_empty() {
                let room = (BLOCK_BYTES - self.in_block) as usize;
                let (now, later) = rest.split_at(rest.len().min(room));
                self.block.update(now);
                self.in_block += now.len() as u64;
                if self.in_block == BLOCK_BYTES {
                    self.end_block();
                }
                rest = later;
            }
        }
        let mut slices: Vec<IoSlice<'_>> = pieces.iter().map(|p| IoSlice::new(p)).collect();
        let mut left = &mut slices[..];
        while !left.is_empty() {
            match self.file.write_vectored(left) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => IoSlice::advance_slices(&mut left, n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        self.written += pieces.iter().map(|p| p.len() as u64).sum::<u64>();
        if self.written - self.behind >= WRITE_BEHIND_BYTES {
            // SAFETY: a call on a descriptor that is open, without memory. It is for speed alone:
            // the sync at the end is what counts.
            unsafe {
                libc::sync_file_range(
                    self.file.as_raw_fd(),
                    self.behind as libc::off64_t,
                    (self.written - self.behind) as libc::off64_t,
                    libc::SYNC_FILE_RANGE_WRITE,
                )
            };
            self.behind = self.written;
        }
        Ok(())
    }

    fn end_block(&mut self) {
        self.sums.extend(mem::take(&mut self.block).value());
        self.in_block = 0;
    }

    /// Writes the checksums and makes everything durable. Returns the number of bytes.
    pub fn finish(mut self) -> io::Result<u64> {
        if self.in_block > 0 {
            self.end_block();
        }
        self.file.write_all(&self.sums)?;
        // Room that was taken and not used.
        self.file.set_len(disk_bytes(self.written))?;
        self.file.sync_all()?;
        Ok(self.written)
    }
}

/// A complete file.
pub struct Reader {
    file: File,
    path: PathBuf,
    size: u64,
}

impl Reader {
    /// Opens a file of `size` bytes.
    ///
    /// # Errors
    /// `Corrupt` if it is not as long as it was; what the system says.
    pub fn open(path: &Path, size: u64) -> Result<Reader> {
        let failed = |e| Error::file("the staged file", path, e);
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        if length != disk_bytes(size) {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "the staged file {} has {length} bytes, not {}",
                    path.display(),
                    disk_bytes(size)
                ),
            ));
        }
        Ok(Reader {
            file,
            path: path.to_owned(),
            size,
        })
    }

    /// Its bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The open file, for somebody else who verifies what is read.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The bytes of a range, verified. It waits for the disk.
    ///
    /// # Errors
    /// `Corrupt` if they are not what was written.
    pub fn read(&self, range: Range<u64>) -> Result<Bytes> {
        let first = range.start / BLOCK_BYTES;
        let begin = first * BLOCK_BYTES;
        let end = range.end.next_multiple_of(BLOCK_BYTES).min(self.size);
        let blocks = (end - begin).div_ceil(BLOCK_BYTES);
        let mut data = vec![0; (end - begin) as usize];
        let mut sums = vec![0; (blocks * SUM_BYTES) as usize];
        let failed = |e| Error::file("the staged file", &self.path, e);
        self.file.read_exact_at(&mut data, begin).map_err(failed)?;
        self.file
            .read_exact_at(&mut sums, self.size + first * SUM_BYTES)
            .map_err(failed)?;
        let sums = sums.chunks_exact(SUM_BYTES as usize);
        for (block, expected) in data.chunks(BLOCK_BYTES as usize).zip(sums) {
            if sum(block) != *expected {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format!(
                        "the staged file {} is damaged: a checksum does not match",
                        self.path.display()
                    ),
                )
                .hint("check the disk"));
            }
        }
        let data = Bytes::from(data);
        Ok(data.slice((range.start - begin) as usize..(range.end - begin) as usize))
    }

    /// The bytes of a range in pieces, a few of them ahead.
    pub fn stream(self: &Arc<Self>, range: Range<u64>) -> ByteStream {
        let reader = self.clone();
        let mut at = range.start;
        let pieces = std::iter::from_fn(move || {
            let begin = at;
            at = (begin / READ_BYTES + 1)
                .saturating_mul(READ_BYTES)
                .min(range.end);
            (begin < range.end).then_some(begin..at)
        });
        stream::iter(pieces)
            .map(move |piece| {
                let reader = reader.clone();
                async move {
                    spawn_blocking(move || reader.read(piece))
                        .await
                        .unwrap_or_else(|e| Err(Error::internal("a read ended").caused_by(e)))
                }
            })
            .buffered(READ_AHEAD)
            .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::TryStreamExt;

    #[tokio::test]
    async fn what_is_written_comes_back_and_damage_is_found() {
        let dir = tempfile::tempdir().unwrap();
        for size in [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 5 * BLOCK_BYTES + 17] {
            let data = forebay_testing::engine::noise(size as usize, 7 + size);
            let path = dir.path().join(format!("f{size}"));
            let mut writer = Writer::create(&path, Some(size)).unwrap();
            for piece in data.chunks(300_001) {
                let (a, b) = piece.split_at(piece.len() / 3);
                writer
                    .write(&[Bytes::copy_from_slice(a), Bytes::copy_from_slice(b)])
                    .unwrap();
            }
            assert_eq!(writer.finish().unwrap(), size);
            assert_eq!(std::fs::metadata(&path).unwrap().len(), disk_bytes(size));
            let reader = Arc::new(Reader::open(&path, size).unwrap());
            for range in [
                0..size,
                size / 3..size,
                size / 2..size / 2 + (size > 2) as u64,
            ] {
                let pieces: Vec<Bytes> = reader.stream(range.clone()).try_collect().await.unwrap();
                assert!(pieces.concat() == data[range.start as usize..range.end as usize]);
            }
            assert!(Reader::open(&path, size + 1).is_err());
            if size > 0 {
                let file = OpenOptions::new().write(true).open(&path).unwrap();
                file.write_all_at(&[data[size as usize / 2] ^ 1], size / 2)
                    .unwrap();
                let e = reader.read(size / 2..size / 2 + 1).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
            }
        }
    }
}
