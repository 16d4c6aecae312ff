//! Finds the members of a tar from its headers alone.
//!
//! The scanner needs one thing at a time: a header block, the data of an extended header, or a
//! further block of a sparse map. It can be fed in two ways, which may be mixed:
//!
//! - **by range**: [`TarScanner::step`] names the bytes it needs; the caller reads at least some of
//!   them (more is welcome) and passes them to [`TarScanner::feed`]. Data in between is never
//!   requested, so a shard of large members costs a few small reads.
//! - **as a stream**: [`TarScanner::push`] takes all bytes of the archive in order, split anywhere,
//!   and skips data by itself.
//!
//! Invariant: `pos` is where the needed thing begins and `held` are its first bytes; so the next
//! useful byte is at `pos + held.len()`, and memory besides the index is one header, or one
//! extended header of bounded size.
//!
//! **The end** is two blocks of zeros, or the end of the archive where a header would begin (one
//! block of zeros may precede it). A size is trusted only if the archive is that long.

use super::{BLOCK_BYTES, header, pax::Pax, round_up};
use crate::{
    ArchiveKind,
    index::{Extent, MemberIndex, MemberIndexBuilder, Storage},
};
use forebay_core::{Error, Result, limits};
use std::{borrow::Cow, ops::Range};

/// What a parser needs next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScanStep {
    /// These bytes. Any prefix of them helps, and so do bytes around them.
    Need(Range<u64>),
    /// Nothing: the index is complete.
    Done,
}

/// Finds the members of a tar: fed by range or pushed as a stream.
#[derive(Debug)]
pub struct TarScanner {
    builder: MemberIndexBuilder,
    /// `None` if unknown, as in a compressed tar.
    size: Option<u64>,
    want: Want,
    pos: u64,
    held: Vec<u8>,
    /// How far [`TarScanner::push`] has got.
    pushed: u64,
    /// From `L` and `x` headers, for the next member.
    long_name: Option<Vec<u8>>,
    pax: Option<Pax>,
    /// From `g` headers, for all members that follow.
    global: Pax,
}

#[derive(Debug)]
enum Want {
    Header,
    /// A header, after a block of zeros.
    HeaderOrEnd,
    /// The data of an extended header of this type and length, and where its header was.
    Extended {
        type_flag: u8,
        len: u64,
        header_at: u64,
    },
    /// A block of an old GNU sparse map, before this many bytes of data.
    SparseMap {
        data_len: u64,
        name: String,
        mtime_secs: i64,
    },
    Nothing,
    Failed(Error),
}

impl TarScanner {
    /// For the bytes of a tar; `size` of them if known.
    pub fn new(size: Option<u64>) -> Self {
        Self::of_kind(ArchiveKind::Tar, size)
    }

    /// For the decompressed form of an archive of this kind.
    pub fn of_kind(kind: ArchiveKind, size: Option<u64>) -> Self {
        let mut this = Self {
            builder: MemberIndexBuilder::new(kind, size.unwrap_or(u64::MAX)),
            size,
            want: Want::Header,
            pos: 0,
            held: Vec::new(),
            pushed: 0,
            long_name: None,
            pax: None,
            global: Pax::default(),
        };
        match size {
            Some(0) => this.want = Want::Nothing,
            Some(short @ ..BLOCK_BYTES) => {
                this.want = Want::Failed(Error::corrupt(format!(
                    "the {short} bytes at offset 0 are too short for a tar"
                )))
            }
            _ => {}
        }
        this
    }

    /// What is needed next.
    ///
    /// # Errors
    /// The error that the scan failed with, again.
    pub fn step(&self) -> Result<ScanStep> {
        match &self.want {
            Want::Nothing => Ok(ScanStep::Done),
            Want::Failed(e) => Err(e.clone()),
            _ => Ok(ScanStep::Need(
                self.pos + self.held.len() as u64..self.pos + self.wanted_len() as u64,
            )),
        }
    }

    /// Whether the scan has reached the end of the archive; not after a failure.
    pub fn is_done(&self) -> bool {
        matches!(self.want, Want::Nothing)
    }

    /// Takes bytes that begin at `offset` of the archive, uses everything useful in them, and says
    /// what is needed next. Bytes before the needed ones are skipped; bytes beyond a gap are not
    /// used.
    ///
    /// # Errors
    /// `Corrupt` with the offset, `Unsupported` past a limit. The members found so far remain
    /// available ([`TarScanner::into_partial`]).
    pub fn feed(&mut self, offset: u64, bytes: &[u8]) -> Result<ScanStep> {
        loop {
            let wanted = match self.step()? {
                ScanStep::Need(range) => range,
                done => return Ok(done),
            };
            let Some(skip) = wanted
                .start
                .checked_sub(offset)
                .and_then(|s| usize::try_from(s).ok())
                .filter(|&s| s < bytes.len())
            else {
                return Ok(ScanStep::Need(wanted));
            };
            let fresh = &bytes[skip..];
            let whole = self.wanted_len();
            let taken = if self.held.is_empty() && fresh.len() >= whole {
                self.take(&fresh[..whole])
            } else {
                let missing = (whole - self.held.len()).min(fresh.len());
                self.held.extend_from_slice(&fresh[..missing]);
                if self.held.len() < whole {
                    continue;
                }
                let held = std::mem::take(&mut self.held);
                let taken = self.take(&held);
                self.held = held;
                self.held.clear();
                taken
            };
            if let Err(e) = taken {
                self.want = Want::Failed(e.clone());
                return Err(e);
            }
        }
    }

    /// Takes the next bytes of the archive, in order and without gaps.
    ///
    /// # Errors
    /// As [`TarScanner::feed`].
    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        let offset = self.pushed;
        self.pushed += bytes.len() as u64;
        self.feed(offset, bytes).map(drop)
    }

    /// The end of the archive: its index.
    ///
    /// # Errors
    /// `Corrupt` with the offset if the archive is cut off: it ended, or (fed by range) its caller
    /// stopped, before its end was seen.
    pub fn finish(mut self) -> Result<MemberIndex> {
        if let (None, false) = (self.size, self.is_done()) {
            self.size = Some(self.pushed);
            self.builder.set_bound(self.pushed);
            if self.pos == self.pushed && matches!(self.want, Want::Header | Want::HeaderOrEnd) {
                self.end()?;
            }
        }
        match self.step()? {
            ScanStep::Done => Ok(self.builder.finish()),
            ScanStep::Need(range) => Err(Error::corrupt(format!(
                "the tar is cut off: bytes {}-{} are missing{}",
                range.start,
                range.end - 1,
                self.after()
            ))),
        }
    }

    /// The index of the members found so far, whatever came after them.
    pub fn into_partial(self) -> MemberIndex {
        self.builder.finish()
    }

    /// The members found so far.
    pub fn found(&self) -> &MemberIndexBuilder {
        &self.builder
    }

    /// Memory that the scan holds.
    pub fn memory_bytes(&self) -> usize {
        self.builder.memory_bytes() + self.held.capacity()
    }

    fn wanted_len(&self) -> usize {
        match self.want {
            // Bounded by TAR_EXTENDED_HEADER_MAX_BYTES.
            Want::Extended { len, .. } => len as usize,
            _ => BLOCK_BYTES as usize,
        }
    }

    /// Takes the needed thing, whole.
    fn take(&mut self, bytes: &[u8]) -> Result<()> {
        if let Want::Extended {
            type_flag,
            len,
            header_at,
        } = self.want
        {
            match type_flag {
                b'L' => {
                    self.long_name =
                        Some(bytes.split(|&b| b == 0).next().unwrap_or_default().to_vec())
                }
                b'g' => self.global.read(bytes, header_at)?,
                _ => self.pax.get_or_insert_default().read(bytes, header_at)?,
            }
            return self.expect_header_at(self.after_data(self.pos, len, header_at)?);
        }
        let block: &[u8; 512] = bytes
            .try_into()
            .map_err(|_| Error::internal("a tar block of other than 512 bytes"))?;
        if let Want::SparseMap { data_len, .. } = self.want {
            let at = self.pos;
            if header::sparse_map_goes_on(block) {
                self.pos += BLOCK_BYTES;
                return self.check_room(BLOCK_BYTES, at);
            }
            let Want::SparseMap {
                name, mtime_secs, ..
            } = std::mem::replace(&mut self.want, Want::Header)
            else {
                return Ok(());
            };
            return self.member(
                &name,
                mtime_secs,
                Storage::Sparse,
                at + BLOCK_BYTES,
                data_len,
                at,
            );
        }
        let at = self.pos;
        match header::parse(block, at)? {
            header::Block::Zero if matches!(self.want, Want::HeaderOrEnd) => self.end(),
            header::Block::Zero => {
                self.want = Want::HeaderOrEnd;
                self.pos += BLOCK_BYTES;
                match self.size {
                    Some(size) if size == self.pos => self.end(),
                    _ => self.check_room(BLOCK_BYTES, at),
                }
            }
            header::Block::Header(_) if matches!(self.want, Want::HeaderOrEnd) => {
                Err(Error::corrupt(format!(
                    "a single block of zeros precedes the tar header at offset {at}"
                )))
            }
            header::Block::Header(h) => self.header(&h, at),
        }
    }

    fn header(&mut self, h: &header::Header<'_>, at: u64) -> Result<()> {
        let data = at + BLOCK_BYTES;
        if matches!(h.type_flag, b'L' | b'x' | b'X' | b'g') {
            if h.size > limits::TAR_EXTENDED_HEADER_MAX_BYTES {
                let (len, max) = (h.size, limits::TAR_EXTENDED_HEADER_MAX_BYTES);
                return Err(Error::unsupported(format!(
                    "the extended tar header at offset {at} is {len} bytes long; the limit is {max}"
                )));
            }
            if h.size == 0 {
                return self.expect_header_at(data);
            }
            self.pos = data;
            self.want = Want::Extended {
                type_flag: h.type_flag,
                len: h.size,
                header_at: at,
            };
            return self.check_room(h.size, at);
        }
        if h.type_flag == b'K' {
            return self.expect_header_at(self.after_data(data, h.size, at)?);
        }
        let pax = self.pax.take().unwrap_or_default();
        let long_name = self.long_name.take();
        let own_name = || match h.prefix {
            b"" => Cow::Borrowed(h.name),
            prefix => Cow::Owned([prefix, b"/", h.name].concat()),
        };
        let name = (pax.sparse_name.or(self.global.sparse_name.clone()))
            .or(pax.path)
            .or(long_name)
            .or(self.global.path.clone())
            .map_or_else(own_name, Cow::Owned);
        let name = String::from_utf8_lossy(&name);
        let mtime_secs = pax
            .mtime_secs
            .or(self.global.mtime_secs)
            .unwrap_or(h.mtime_secs);
        let size = pax.size.or(self.global.size).unwrap_or(h.size);
        // As in every reader, links, devices and directories are not followed by data, whatever
        // their size says.
        let (storage, data_len) = match h.type_flag {
            0 if h.name.ends_with(b"/") => (Storage::Directory, 0),
            _ if pax.sparse || self.global.sparse => (Storage::Sparse, size),
            0 | b'0' | b'7' => (Storage::Stored, size),
            b'1' => (Storage::HardLink, 0),
            b'2' => (Storage::SymbolicLink, 0),
            b'3' | b'4' | b'6' => (Storage::Device, 0),
            b'5' => (Storage::Directory, 0),
            b'S' => (Storage::Sparse, size),
            _ => (Storage::Special, size),
        };
        if h.sparse_map_continues {
            self.want = Want::SparseMap {
                data_len,
                name: name.into_owned(),
                mtime_secs,
            };
            self.pos = data;
            return self.check_room(BLOCK_BYTES, at);
        }
        self.member(&name, mtime_secs, storage, data, data_len, at)
    }

    fn member(
        &mut self,
        name: &str,
        mtime_secs: i64,
        storage: Storage,
        data: u64,
        size: u64,
        header_at: u64,
    ) -> Result<()> {
        let next = self.after_data(data, size, header_at)?;
        let kind = self.builder.kind();
        let extent = Extent {
            kind,
            storage,
            offset: data,
            size,
            stored_size: size,
            crc32: None,
            bound: 0,
        };
        self.builder.push(name, mtime_secs, &extent)?;
        self.expect_header_at(next)
    }

    /// Where the header after `len` bytes of data is.
    fn after_data(&self, data: u64, len: u64, header_at: u64) -> Result<u64> {
        // If the size is unknown, no offset may come near the largest number.
        let end = data
            .checked_add(len)
            .filter(|&end| end <= self.size.unwrap_or(i64::MAX as u64));
        end.and_then(round_up).ok_or_else(|| {
            Error::corrupt(format!(
                "the tar header at offset {header_at} announces {len} bytes of data, past the end \
                 of the archive{}",
                self.ends()
            ))
        })
    }

    fn expect_header_at(&mut self, pos: u64) -> Result<()> {
        let after = self.pos;
        self.pos = pos;
        if self.size == Some(pos) {
            return self.end();
        }
        self.want = Want::Header;
        self.check_room(BLOCK_BYTES, after)
    }

    /// Refuses to ask for anything past the end of the archive.
    fn check_room(&self, len: u64, header_at: u64) -> Result<()> {
        match self.size {
            Some(size) if self.pos.checked_add(len).is_none_or(|end| end > size) => {
                Err(Error::corrupt(format!(
                    "the tar is cut off: it ends at offset {size}, in the middle of what follows \
                     the header at offset {header_at}{}",
                    self.after()
                )))
            }
            _ => Ok(()),
        }
    }

    fn end(&mut self) -> Result<()> {
        if self.pax.is_some() || self.long_name.is_some() {
            return Err(Error::corrupt(format!(
                "the tar ends at offset {}, after an extended header and before its member",
                self.pos
            )));
        }
        self.want = Want::Nothing;
        Ok(())
    }

    fn ends(&self) -> String {
        self.size.map(|s| format!(" at {s}")).unwrap_or_default()
    }

    /// `", after N members"`, for messages.
    fn after(&self) -> String {
        format!(", after {} members", self.builder.len())
    }
}
