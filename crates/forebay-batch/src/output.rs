//! The answer's archive: for a tar, bytes go straight into the outgoing buffer after their header;
//! other formats go through a writer.

use forebay_core::Result;
use forebay_engine::EntryHeader;
use forebay_format::{
    ArchiveKind, ArchiveWriter, tar_header_into, tar_header_with_pax, tar_padding_into,
    tar_trailer_into,
};
use forebay_protocol::batch::{CUT_NAME, ERROR_KEYWORD, PLACEHOLDER_PREFIX};

pub(crate) enum Output {
    Tar,
    Other(Box<ArchiveWriter>),
}

impl Output {
    pub(crate) fn new(kind: ArchiveKind) -> Self {
        match kind {
            ArchiveKind::Tar => Output::Tar,
            other => Output::Other(Box::new(ArchiveWriter::new(other))),
        }
    }

    pub(crate) fn begin(
        &mut self,
        name: &str,
        header: &EntryHeader,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        match self {
            Output::Tar => tar_header_into(out, name, header.size, header.mtime_secs),
            Output::Other(w) => w.begin_entry(name, header.size, header.mtime_secs, out),
        }
    }

    pub(crate) fn data(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<()> {
        match self {
            Output::Tar => {
                out.extend_from_slice(bytes);
                Ok(())
            }
            Output::Other(w) => w.data(bytes, out),
        }
    }

    pub(crate) fn end(&mut self, size: u64, out: &mut Vec<u8>) -> Result<()> {
        match self {
            Output::Tar => {
                tar_padding_into(out, size);
                Ok(())
            }
            Output::Other(w) => w.end_entry(out),
        }
    }

    /// An empty entry in place of one that cannot be read.
    pub(crate) fn placeholder(
        &mut self,
        name: &str,
        error: Option<&str>,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let name = format!("{PLACEHOLDER_PREFIX}{name}");
        match (self, error) {
            (Output::Tar, Some(error)) => {
                tar_header_with_pax(out, &name, 0, 0, &[(ERROR_KEYWORD, error)])
            }
            (this, _) => {
                this.begin(
                    &name,
                    &EntryHeader {
                        size: 0,
                        mtime_secs: 0,
                    },
                    out,
                )?;
                this.end(0, out)
            }
        }
    }

    /// The beginning of an entry that never comes, and why. Only a tar needs it.
    pub(crate) fn cut(&mut self, error: Option<&str>, out: &mut Vec<u8>) -> Result<()> {
        match self {
            Output::Tar => {
                let pax: Vec<_> = error.map(|e| (ERROR_KEYWORD, e)).into_iter().collect();
                tar_header_with_pax(out, CUT_NAME, 512, 0, &pax)
            }
            Output::Other(_) => Ok(()),
        }
    }

    pub(crate) fn finish(&mut self, out: &mut Vec<u8>) -> Result<()> {
        match self {
            Output::Tar => {
                tar_trailer_into(out);
                Ok(())
            }
            Output::Other(w) => w.finish(out),
        }
    }
}
