//! Files that a node on this machine lends ([`forebay_protocol::lent`]): they are read here, from the
//! disk into the caller's memory, and each block is verified.

use crate::node::RequestBody;
use forebay_protocol::lent::{BLOCK_BYTES, Lent, MESSAGE_MAX_BYTES, SUM_BYTES, Sum, disk_bytes};
use http::StatusCode;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustix::{
    fs::{Advice, fadvise},
    io::{ReadWriteFlags, preadv2},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
};
use std::{
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
    /// Fills `target` with the bytes from `start` on. It waits for the disk.
    ///
    /// # Errors
    /// `InvalidInput` for bytes that it does not have; `InvalidData` if they are not what the node
    /// wrote; what the disk says.
    pub fn read_into(&self, start: u64, target: &mut [u8]) -> io::Result<()> {
        let end = start.checked_add(target.len() as u64);
        let end = end.filter(|end| *end <= self.size).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, "the file is not that long")
        })?;
        if start == end {
            return Ok(());
        }
        let first = start / BLOCK_BYTES;
        let mut sums = vec![0; ((end.div_ceil(BLOCK_BYTES) - first) * SUM_BYTES) as usize];
        let sums_at = self.size + first * SUM_BYTES;
        self.file.read_exact_at(&mut sums, sums_at)?;
        let (mut at, mut rest) = (start, target);
        // A block of which a part is wanted is read elsewhere.
        let mut whole = Vec::new();
        for expected in sums.chunks_exact(SUM_BYTES as usize) {
            let begin = at / BLOCK_BYTES * BLOCK_BYTES;
            let length = BLOCK_BYTES.min(self.size - begin) as usize;
            let wanted = (begin + length as u64).min(end) - at;
            let (mine, later) = rest.split_at_mut(wanted as usize);
            let found = if mine.len() == length {
                self.block_into(begin, mine)?
            } else {
                whole.resize(length, 0);
                let found = self.block_into(begin, &mut whole)?;
                let skipped = (at - begin) as usize;
                mine.copy_from_slice(&whole[skipped..skipped + mine.len()]);
                found
            };
            if found != *expected {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "a checksum does not match",
                ));
            }
            at += wanted;
            rest = later;
        }
        Ok(())
    }

    /// Fills `target` with the block that begins at `begin`; its checksum.
    fn block_into(&self, begin: u64, target: &mut [u8]) -> io::Result<[u8; SUM_BYTES as usize]> {
        let mut sum = Sum::default();
        let mut there = 0;
        while there < target.len() {
            let end = target.len().min(there + PIECE_BYTES);
            if !self.has_cached(begin + there as u64, &mut target[there..end]) {
                break;
            }
            sum.update(&target[there..end]);
            there = end;
        }
        let rest = &mut target[there..];
        if !rest.is_empty() {
            // The disk is to be asked: for all of it at once. What comes next, the kernel reads
            // ahead.
            self.file.read_exact_at(rest, begin + there as u64)?;
            sum.update(rest);
        }
        Ok(sum.value())
    }

    /// Fills `piece`, if the disk need not be asked for it.
    fn has_cached(&self, start: u64, piece: &mut [u8]) -> bool {
        let length = piece.len();
        let into = &mut [IoSliceMut::new(piece)];
        // What goes wrong here goes wrong when it is read for good, too.
        preadv2(&self.file, into, start, ReadWriteFlags::NOWAIT).is_ok_and(|n| n == length)
    }
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
            borrowed.read_into(start, &mut target).map(|()| target)
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
