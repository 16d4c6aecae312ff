//! One interface for indexing any kind of archive.

use crate::{
    ArchiveKind,
    decompress::Decompressor,
    index::{MemberIndex, MemberIndexBuilder},
    tar::{ScanStep, TarScanner},
    zip::ZipScanner,
};
use forebay_core::{Error, Result, limits};

/// How much of a compressed archive is requested at a time.
const STREAM_PIECE_BYTES: u64 = limits::CHUNK_BYTES;

/// Builds the [`MemberIndex`] of an archive of known kind and size.
///
/// - **By range**: read what [`Indexer::step`] needs and pass it to [`Indexer::feed`], until
///   `Done`; then call [`Indexer::finish`]. A tar needs its headers, a zip its end and its
///   directory, a compressed tar all of it, in pieces.
/// - **As a stream**, if [`Indexer::streams`]: [`Indexer::push`] every byte in order, then call
///   [`Indexer::finish`].
#[derive(Debug)]
pub struct Indexer {
    kind: ArchiveKind,
    size: u64,
    inner: Inner,
}

#[derive(Debug)]
enum Inner {
    Tar(TarScanner),
    Compressed(Box<Compressed>),
    Zip(ZipScanner),
}

#[derive(Debug)]
struct Compressed {
    stream: Decompressor,
    tar: TarScanner,
    failed: Option<Error>,
}

impl Indexer {
    /// For an archive of `size` bytes.
    pub fn new(kind: ArchiveKind, size: u64) -> Self {
        let inner = match (kind, kind.codec()) {
            (ArchiveKind::Zip, _) => Inner::Zip(ZipScanner::new(size)),
            (_, None) => Inner::Tar(TarScanner::new(Some(size))),
            (_, Some(codec)) => Inner::Compressed(Box::new(Compressed {
                stream: Decompressor::new(codec, limits::ARCHIVE_UNPACKED_MAX_BYTES),
                tar: TarScanner::of_kind(kind, None),
                failed: None,
            })),
        };
        Self { kind, size, inner }
    }

    /// The format that the archive is read as.
    pub fn kind(&self) -> ArchiveKind {
        self.kind
    }

    /// Whether [`Indexer::push`] makes progress: not with a zip, whose directory is at its end.
    pub fn streams(&self) -> bool {
        self.kind != ArchiveKind::Zip
    }

    /// What is needed next.
    ///
    /// # Errors
    /// The error that it failed with, again.
    pub fn step(&self) -> Result<ScanStep> {
        match &self.inner {
            Inner::Tar(tar) => tar.step(),
            Inner::Zip(zip) => zip.step(),
            Inner::Compressed(c) => match (&c.failed, c.stream.total_in()) {
                (Some(e), _) => Err(e.clone()),
                (None, at) if at >= self.size => Ok(ScanStep::Done),
                (None, at) => Ok(ScanStep::Need(
                    at..at.saturating_add(STREAM_PIECE_BYTES).min(self.size),
                )),
            },
        }
    }

    /// Takes bytes that begin at `offset` of the archive, uses what it needs of them, and says what
    /// it needs next. Bytes before the needed ones are skipped; bytes beyond a gap are not used.
    ///
    /// # Errors
    /// `Corrupt` with the offset; `Unsupported` past a limit or for an unsupported feature.
    pub fn feed(&mut self, offset: u64, bytes: &[u8]) -> Result<ScanStep> {
        match &mut self.inner {
            Inner::Tar(tar) => tar.feed(offset, bytes),
            Inner::Zip(zip) => zip.feed(offset, bytes),
            Inner::Compressed(c) => {
                let Compressed {
                    stream,
                    tar,
                    failed,
                } = &mut **c;
                let wanted = stream.total_in();
                let skip = wanted
                    .checked_sub(offset)
                    .and_then(|s| usize::try_from(s).ok())
                    .filter(|&s| s <= bytes.len());
                if let (None, Some(skip)) = (&failed, skip) {
                    *failed = stream
                        .push_each(&bytes[skip..], |piece| tar.push(piece))
                        .err();
                }
                self.step()
            }
        }
    }

    /// Takes the next bytes of the archive, in order and without gaps.
    ///
    /// # Errors
    /// As [`Indexer::feed`]; `Unsupported` for a zip.
    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.inner {
            Inner::Tar(tar) => tar.push(bytes),
            Inner::Zip(_) => Err(Error::unsupported(
                "a zip cannot be indexed as a stream: its directory is at its end",
            )),
            Inner::Compressed(c) => {
                let offset = c.stream.total_in();
                self.feed(offset, bytes).map(drop)
            }
        }
    }

    /// The index, after [`Indexer::step`] has said `Done` or everything was pushed.
    ///
    /// # Errors
    /// `Corrupt` with the offset if the archive is cut off, or its end was not seen.
    pub fn finish(self) -> Result<MemberIndex> {
        match self.inner {
            Inner::Tar(tar) => tar.finish(),
            Inner::Zip(zip) => zip.finish(),
            Inner::Compressed(c) => {
                let Compressed {
                    stream,
                    tar,
                    failed,
                } = *c;
                failed.map_or(Ok(()), Err)?;
                stream.finish()?;
                tar.finish()
            }
        }
    }

    /// The members found so far; they stay there after an error.
    pub fn found(&self) -> &MemberIndexBuilder {
        match &self.inner {
            Inner::Tar(tar) => tar.found(),
            Inner::Compressed(c) => c.tar.found(),
            Inner::Zip(zip) => zip.found(),
        }
    }

    /// Memory that the index holds so far; watch it while feeding archives of unknown size.
    pub fn memory_bytes(&self) -> usize {
        match &self.inner {
            Inner::Tar(tar) => tar.memory_bytes(),
            Inner::Compressed(c) => c.tar.memory_bytes(),
            Inner::Zip(zip) => zip.memory_bytes(),
        }
    }
}
