//! Files that a node on this machine lends ([`forebay_protocol::lent`]): they are read here, from the
//! disk into the caller's memory, and each block is verified.

use crate::node::RequestBody;
use forebay_protocol::lent::{BLOCK_BYTES, Lent, MESSAGE_MAX_BYTES, SUM_BYTES, Sum, disk_bytes};
use http::StatusCode;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustix::{
    fs::{Advice, fadvise},
    io::{Errno, ReadWriteFlags, preadv, preadv2},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
};
use std::{
    collections::VecDeque,
    fs::File,
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    net::Shutdown,
    os::{fd::OwnedFd, unix::fs::FileExt},
    path::Path,
};
use tokio::{
    io::{AsyncWriteExt, Interest},
    net::UnixStream,
};

/// What the kernel has of a block is read in pieces of this size: each is in the processor's cache
/// when it is hashed.
const PIECE_BYTES: usize = 128 << 10;
/// How many places one call reads into; the kernel takes no more than 1,024 (`IOV_MAX`).
const VIEWS_MAX: usize = 256;

/// A file that was lent. Any number of threads may read it at once.
pub struct Borrowed {
    file: File,
    size: u64,
    /// While it is open, the node knows that somebody reads the file. (It belongs to no runtime: a
    /// forked child may drop it.)
    lease: std::os::unix::net::UnixStream,
    pid: u32,
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        // A child that was forked meanwhile has it too, and would keep it open.
        if self.pid == std::process::id() {
            let _ = self.lease.shutdown(Shutdown::Both);
        }
    }
}

impl Borrowed {
    /// Fills each part's memory with the bytes of the file from its start on, and waits for the disk.
    /// Parts come in the order of the file. A block that several parts share is read once.
    ///
    /// # Errors
    /// `InvalidInput` for bytes that it does not have, and for parts that overlap or are in another
    /// order; `InvalidData` if they are not what the node wrote; what the disk says.
    pub fn read_into(&self, mut parts: Vec<(u64, &mut [u8])>) -> io::Result<()> {
        parts.retain(|(_, target)| !target.is_empty());
        let Some(&(first, _)) = parts.first() else {
            return Ok(());
        };
        let mut end = first;
        for (start, target) in &parts {
            let after = start.checked_add(target.len() as u64);
            let after = after.filter(|after| *start >= end && *after <= self.size);
            end = after.ok_or_else(|| {
                let text = "the file is not that long, or its parts are not in order";
                io::Error::new(io::ErrorKind::InvalidInput, text)
            })?;
        }
        let first = first / BLOCK_BYTES;
        let mut sums = vec![0; ((end.div_ceil(BLOCK_BYTES) - first) * SUM_BYTES) as usize];
        let sums_at = self.size + first * SUM_BYTES;
        self.file.read_exact_at(&mut sums, sums_at)?;
        let mut parts = VecDeque::from(parts);
        let mut unwanted = Vec::new();
        for (block, expected) in (first..).zip(sums.chunks_exact(SUM_BYTES as usize)) {
            let begin = block * BLOCK_BYTES;
            let end = self.size.min(begin + BLOCK_BYTES);
            let wanted = parts_before(&mut parts, end);
            if wanted.is_empty() {
                continue;
            }
            let targets = whole_block(begin, end, wanted, &mut unwanted);
            if self.block_into(begin, targets)? != *expected {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "a checksum does not match",
                ));
            }
        }
        Ok(())
    }

    /// Fills `targets`, one after the other, with the block that begins at `begin`, and returns its
    /// checksum.
    fn block_into(
        &self,
        begin: u64,
        mut targets: VecDeque<&mut [u8]>,
    ) -> io::Result<[u8; SUM_BYTES as usize]> {
        let mut sum = Sum::default();
        let mut at = begin;
        while !targets.is_empty() {
            let (mut piece, length) = next_piece(&mut targets);
            if !self.has_cached(at, &mut piece, length) {
                // The disk is to be asked: for all of it at once. What comes next, the kernel reads
                // ahead.
                piece.extend(targets.drain(..));
                self.read_exact(at, &mut piece)?;
            }
            for target in piece {
                sum.update(target);
            }
            at += length as u64;
        }
        Ok(sum.value())
    }

    /// Fills `piece`, of `length` bytes, if the disk need not be asked for it.
    fn has_cached(&self, start: u64, piece: &mut [&mut [u8]], length: usize) -> bool {
        // What goes wrong here goes wrong when it is read for good, too.
        preadv2(&self.file, &mut views(piece), start, ReadWriteFlags::NOWAIT)
            .is_ok_and(|n| n == length)
    }

    /// Fills `piece`, and waits for the disk.
    fn read_exact(&self, mut start: u64, piece: &mut [&mut [u8]]) -> io::Result<()> {
        let mut views = views(piece);
        let mut left = &mut views[..];
        while !left.is_empty() {
            let most = left.len().min(VIEWS_MAX);
            match preadv(&self.file, &mut left[..most], start) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                Ok(n) => {
                    IoSliceMut::advance_slices(&mut left, n);
                    start += n as u64;
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
}

/// Takes from `parts`, which are in order, what lies before `end`.
fn parts_before<'a>(
    parts: &mut VecDeque<(u64, &'a mut [u8])>,
    end: u64,
) -> Vec<(u64, &'a mut [u8])> {
    let mut before = Vec::new();
    while let Some((start, target)) = parts.pop_front_if(|(start, _)| *start < end) {
        let here = target.len().min((end - start) as usize);
        let (here, later) = target.split_at_mut(here);
        before.push((start, here));
        if !later.is_empty() {
            parts.push_front((end, later));
        }
    }
    before
}

/// Memory for all of a block: that of its `parts`, and `unwanted` for what lies between them.
fn whole_block<'a>(
    begin: u64,
    end: u64,
    parts: Vec<(u64, &'a mut [u8])>,
    unwanted: &'a mut Vec<u8>,
) -> VecDeque<&'a mut [u8]> {
    let wanted: u64 = parts.iter().map(|(_, target)| target.len() as u64).sum();
    let left = (end - begin - wanted) as usize;
    if unwanted.len() < left {
        unwanted.resize(left, 0);
    }
    let mut unwanted = &mut unwanted[..left];
    let mut targets = VecDeque::with_capacity(2 * parts.len() + 1);
    let mut at = begin;
    for (start, target) in parts {
        if let Some(between) = unwanted.split_off_mut(..(start - at) as usize)
            && !between.is_empty()
        {
            targets.push_back(between);
        }
        at = start + target.len() as u64;
        targets.push_back(target);
    }
    if !unwanted.is_empty() {
        targets.push_back(unwanted);
    }
    targets
}

/// Takes the first [`PIECE_BYTES`] of `targets`, as far as one call can fill them, and how many bytes
/// these are.
fn next_piece<'a>(targets: &mut VecDeque<&'a mut [u8]>) -> (Vec<&'a mut [u8]>, usize) {
    let (mut piece, mut length) = (Vec::new(), 0);
    while length < PIECE_BYTES
        && piece.len() < VIEWS_MAX
        && let Some(target) = targets.pop_front()
    {
        let here = target.len().min(PIECE_BYTES - length);
        let (here, later) = target.split_at_mut(here);
        length += here.len();
        piece.push(here);
        if !later.is_empty() {
            targets.push_front(later);
        }
    }
    (piece, length)
}

fn views<'a>(piece: &'a mut [&mut [u8]]) -> Vec<IoSliceMut<'a>> {
    piece
        .iter_mut()
        .map(|target| IoSliceMut::new(target))
        .collect()
}

/// Asks at a node's socket; `request` is for the file, with the upgrade.
pub(crate) async fn ask(
    socket: &Path,
    request: http::Request<RequestBody>,
) -> io::Result<Borrowed> {
    let stream = UnixStream::connect(socket).await?;
    let handshake = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(io::Error::other)?;
    let task = tokio::spawn(connection.with_upgrades());
    let answer = sender.send_request(request).await;
    let upgraded = match answer {
        Ok(answer) if answer.status() == StatusCode::SWITCHING_PROTOCOLS => {
            hyper::upgrade::on(answer).await
        }
        Ok(_) | Err(_) => {
            task.abort();
            return Err(io::Error::from(io::ErrorKind::Unsupported));
        }
    };
    let parts = upgraded
        .map_err(io::Error::other)?
        .downcast::<TokioIo<UnixStream>>()
        .map_err(|_| io::Error::other("the connection is of another kind"))?;
    let mut stream = parts.io.into_inner();
    stream.write_u8(1).await?;
    let (message, file) = stream
        .async_io(Interest::READABLE, || receive(&stream))
        .await?;
    let lent: Lent = serde_json::from_slice(&message)?;
    let length = file.metadata()?.len();
    if lent.block_bytes != BLOCK_BYTES || length != disk_bytes(lent.size) {
        return Err(io::Error::from(io::ErrorKind::InvalidData));
    }
    // Threads read files from their beginnings on. It is advice alone.
    let _ = fadvise(&file, 0, None, Advice::Sequential);
    Ok(Borrowed {
        file,
        size: lent.size,
        lease: stream.into_std()?,
        pid: std::process::id(),
    })
}

fn receive(stream: &UnixStream) -> io::Result<(Vec<u8>, File)> {
    let mut message = vec![0; MESSAGE_MAX_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut with = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut message)],
        &mut with,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    message.truncate(received.bytes);
    let mut files = with.drain().flat_map(|each| match each {
        RecvAncillaryMessage::ScmRights(files) => files.collect::<Vec<OwnedFd>>(),
        _ => Vec::new(),
    });
    let file = files
        .next()
        .ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    Ok((message, File::from(file)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_protocol::lent::sum;

    #[test]
    fn any_range_is_what_was_written_and_damage_is_found() {
        let size = 3 * BLOCK_BYTES + 2 * PIECE_BYTES as u64 + 4321;
        let data: Vec<u8> = (0..size).map(|i| (i * 31 + i / 251) as u8).collect();
        let mut stored = data.clone();
        for block in data.chunks(BLOCK_BYTES as usize) {
            stored.extend(sum(block));
        }
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&stored, 0).unwrap();
        let (lease, _) = std::os::unix::net::UnixStream::pair().unwrap();
        let pid = std::process::id();
        let borrowed = Borrowed {
            file,
            size,
            lease,
            pid,
        };
        let read = |start: u64, end: u64| {
            let mut target = vec![0; (end - start) as usize];
            let parts = vec![(start, &mut target[..])];
            borrowed.read_into(parts).map(|()| target)
        };
        let edges = [
            0,
            1,
            BLOCK_BYTES - 1,
            BLOCK_BYTES,
            2 * BLOCK_BYTES + 9,
            size,
        ];
        for start in edges {
            for end in edges.into_iter().filter(|end| *end >= start) {
                let expected = &data[start as usize..end as usize];
                assert!(read(start, end).unwrap() == expected, "{start}..{end}");
            }
        }
        // Parts that lie in one block or in several, with and without something between them.
        for step in [
            1,
            7,
            64,
            4096,
            PIECE_BYTES as u64 + 3,
            BLOCK_BYTES - 64,
            BLOCK_BYTES + 9,
        ] {
            for (from, count) in [(0, 2000), (BLOCK_BYTES - 5, 600), (2 * BLOCK_BYTES + 77, 3)] {
                let starts = (from..size).step_by(step as usize).take(count);
                let lengths = [step, step.div_ceil(2), 0].into_iter().cycle();
                let wanted: Vec<(u64, u64)> = starts
                    .zip(lengths)
                    .map(|(start, length)| (start, length.min(size - start)))
                    .collect();
                let mut targets: Vec<Vec<u8>> = wanted
                    .iter()
                    .map(|(_, length)| vec![0; *length as usize])
                    .collect();
                let parts = wanted.iter().zip(&mut targets);
                let parts = parts
                    .map(|((start, _), target)| (*start, &mut target[..]))
                    .collect();
                borrowed.read_into(parts).unwrap();
                for ((start, length), target) in wanted.iter().zip(&targets) {
                    let expected = &data[*start as usize..(start + length) as usize];
                    assert!(
                        target == expected,
                        "{step} from {from}: {length} at {start}"
                    );
                }
            }
        }
        let (mut one, mut other) = ([0; 9], [0; 9]);
        for starts in [(0, 8), (9, 0), (size - 18, size - 8), (5, u64::MAX)] {
            let parts = vec![(starts.0, &mut one[..]), (starts.1, &mut other[..])];
            let refused = borrowed.read_into(parts).unwrap_err().kind();
            assert_eq!(refused, io::ErrorKind::InvalidInput, "{starts:?}");
        }
        let refused = |start, end| read(start, end).unwrap_err().kind();
        assert_eq!(refused(1, size + 1), io::ErrorKind::InvalidInput);
        borrowed.file.write_all_at(&[!data[5]], 5).unwrap();
        assert_eq!(refused(9, 10), io::ErrorKind::InvalidData);
        assert!(read(BLOCK_BYTES, size).is_ok());
        // In the last piece of a block.
        let later = 2 * BLOCK_BYTES - 3;
        let damaged = [!data[later as usize]];
        borrowed.file.write_all_at(&damaged, later).unwrap();
        assert_eq!(
            refused(BLOCK_BYTES, 2 * BLOCK_BYTES),
            io::ErrorKind::InvalidData
        );
        assert!(read(2 * BLOCK_BYTES, size).is_ok());
    }
}
