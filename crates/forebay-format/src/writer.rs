//! Archives of any kind, written as streams into the caller's buffer.
//!
//! The bytes are a function of the entries alone: no clock, fixed compression settings, and no
//! trace of how the data was split into calls. Invariant: an entry has exactly its announced size,
//! or the writer fails and stays failed, so no archive with a wrong size in it is ever completed.

use crate::{
    ArchiveKind,
    compress::Compressor,
    tar::{tar_header_with_pax, tar_padding_into, tar_trailer_into},
    zip::ZipWriter,
};
use bytes::BufMut;
use forebay_core::{Error, Result, name::shorten};

/// Writes entry after entry: [`begin_entry`](Self::begin_entry), [`data`](Self::data) in any
/// pieces, [`end_entry`](Self::end_entry); at last [`finish`](Self::finish). Each call appends what
/// is ready to `out`, which must grow as it is appended to (`Vec<u8>`, `BytesMut`).
///
/// What may be held back: for `tar.gz` and `tar.lz4` up to 256 KiB of input, for zip an entry of up
/// to 1 MiB and the directory.
#[derive(Debug)]
pub struct ArchiveWriter {
    kind: ArchiveKind,
    format: Format,
    /// Size of the open entry, and how much of it has arrived.
    open: Option<(u64, u64)>,
    state: State,
}

#[derive(Debug)]
enum Format {
    Tar,
    Compressed(Box<Compressor>),
    Zip(Box<ZipWriter>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Good,
    Failed,
    Finished,
}

impl ArchiveWriter {
    /// A writer of an archive without entries.
    pub fn new(kind: ArchiveKind) -> Self {
        let format = match kind {
            ArchiveKind::Tar => Format::Tar,
            ArchiveKind::TarGz => Format::Compressed(Box::new(Compressor::gzip())),
            ArchiveKind::TarLz4 => Format::Compressed(Box::new(Compressor::lz4())),
            ArchiveKind::Zip => Format::Zip(Box::default()),
        };
        Self {
            kind,
            format,
            open: None,
            state: State::Good,
        }
    }

    /// The format that is written.
    pub fn kind(&self) -> ArchiveKind {
        self.kind
    }

    /// Begins a file of exactly `size` bytes. `mtime_secs`: seconds since the Unix epoch, 0 for
    /// none.
    ///
    /// # Errors
    /// `Invalid` for a name that the format does not allow (nothing was written, other entries may
    /// follow); `Internal` inside another entry.
    pub fn begin_entry(
        &mut self,
        name: &str,
        size: u64,
        mtime_secs: i64,
        out: &mut impl BufMut,
    ) -> Result<()> {
        self.begin_entry_with_pax(name, size, mtime_secs, &[], out)
    }

    /// [`begin_entry`](Self::begin_entry) with further PAX records; in a zip they become the
    /// entry's comment, one line `key=value` each.
    ///
    /// # Errors
    /// As [`begin_entry`](Self::begin_entry), and `Invalid` for a keyword that PAX does not allow.
    pub fn begin_entry_with_pax(
        &mut self,
        name: &str,
        size: u64,
        mtime_secs: i64,
        pax: &[(&str, &str)],
        out: &mut impl BufMut,
    ) -> Result<()> {
        self.check(self.open.is_none(), "an entry begins inside another")?;
        match &mut self.format {
            Format::Tar => tar_header_with_pax(out, name, size, mtime_secs, pax)?,
            Format::Compressed(compressor) => {
                let mut header = Vec::with_capacity(2048);
                tar_header_with_pax(&mut header, name, size, mtime_secs, pax)?;
                let pushed = compressor.push(&header, out);
                self.or_fail(pushed)?;
            }
            Format::Zip(zip) => {
                let comment: Vec<String> = pax.iter().map(|(k, v)| format!("{k}={v}")).collect();
                zip.begin_entry(name, size, mtime_secs, &comment.join("\n"), out)?;
            }
        }
        self.open = Some((size, 0));
        Ok(())
    }

    /// The next bytes of the entry.
    ///
    /// # Errors
    /// `Internal` if they exceed the announced size: the archive can no longer be completed.
    pub fn data(&mut self, bytes: &[u8], out: &mut impl BufMut) -> Result<()> {
        self.advance(bytes.len() as u64)?;
        let done = match &mut self.format {
            Format::Tar => {
                out.put_slice(bytes);
                Ok(())
            }
            Format::Compressed(compressor) => compressor.push(bytes, out),
            Format::Zip(zip) => zip.data(bytes, out),
        };
        self.or_fail(done)
    }

    /// For a plain tar: tells the writer that the caller has itself appended the next `len` bytes
    /// of the entry to `out`.
    ///
    /// # Errors
    /// As [`data`](Self::data); `Internal` for any other kind.
    pub fn data_appended(&mut self, len: u64) -> Result<()> {
        self.check(
            matches!(self.format, Format::Tar),
            "data was appended beside the writer",
        )?;
        self.advance(len)
    }

    /// # Errors
    /// `Internal` if bytes of the entry are missing: the archive can no longer be completed.
    pub fn end_entry(&mut self, out: &mut impl BufMut) -> Result<()> {
        self.check(
            self.open.is_some_and(|(size, seen)| size == seen),
            "an entry ends before its last byte",
        )?;
        let size = self.open.take().map_or(0, |(size, _)| size);
        let done = match &mut self.format {
            Format::Tar => {
                tar_padding_into(out, size);
                Ok(())
            }
            Format::Compressed(compressor) => {
                let mut padding = Vec::with_capacity(512);
                tar_padding_into(&mut padding, size);
                compressor.push(&padding, out)
            }
            Format::Zip(zip) => zip.end_entry(out),
        };
        self.or_fail(done)
    }

    /// A whole entry.
    ///
    /// # Errors
    /// As [`begin_entry`](Self::begin_entry).
    pub fn entry(
        &mut self,
        name: &str,
        bytes: &[u8],
        mtime_secs: i64,
        out: &mut impl BufMut,
    ) -> Result<()> {
        self.begin_entry(name, bytes.len() as u64, mtime_secs, out)?;
        self.data(bytes, out)?;
        self.end_entry(out)
    }

    /// The end of the archive.
    ///
    /// # Errors
    /// `Internal` inside an entry, after a failure, and the second time.
    pub fn finish(&mut self, out: &mut impl BufMut) -> Result<()> {
        self.check(self.open.is_none(), "the archive ends inside an entry")?;
        let done = match &mut self.format {
            Format::Tar => {
                tar_trailer_into(out);
                Ok(())
            }
            Format::Compressed(compressor) => {
                let mut trailer = Vec::with_capacity(1024);
                tar_trailer_into(&mut trailer);
                compressor
                    .push(&trailer, out)
                    .and_then(|()| compressor.finish(out))
            }
            Format::Zip(zip) => zip.finish(out),
        };
        self.or_fail(done)?;
        self.state = State::Finished;
        Ok(())
    }

    fn advance(&mut self, len: u64) -> Result<()> {
        let fits = self
            .open
            .is_some_and(|(size, seen)| seen.checked_add(len).is_some_and(|seen| seen <= size));
        self.check(fits, "the entry has more bytes than were announced")?;
        if let Some((_, seen)) = &mut self.open {
            *seen += len;
        }
        Ok(())
    }

    /// Passes a result on; after an error bytes are missing, and the archive must not be completed.
    fn or_fail(&mut self, done: Result<()>) -> Result<()> {
        if done.is_err() {
            self.state = State::Failed;
        }
        done
    }

    /// Fails for good unless `holds`.
    fn check(&mut self, holds: bool, what: &str) -> Result<()> {
        match self.state {
            State::Good if holds => return Ok(()),
            State::Good => self.state = State::Failed,
            State::Failed => {}
            State::Finished => {
                return Err(Error::internal(format!(
                    "an archive ({}) is written to after its end",
                    shorten(what)
                )));
            }
        }
        Err(Error::internal(format!(
            "a {} archive cannot be written: {what}",
            self.kind
        )))
    }
}
