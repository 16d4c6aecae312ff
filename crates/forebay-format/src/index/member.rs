//! One member as an index describes it.

use crate::{ArchiveKind, zip};
use forebay_core::{Error, Result, name::shorten};
use std::ops::Range;

/// A member: its name, and where its bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member<'a> {
    /// In archive order, from 0.
    pub number: usize,
    /// As in the archive.
    pub name: &'a str,
    /// Seconds since the Unix epoch; 0 if the archive does not say. A zip's local time is taken as
    /// UTC.
    pub mtime_secs: i64,
    /// Where its bytes are.
    pub extent: Extent,
}

/// Where a member's bytes are and how they are stored. Outlives the index it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The format of the archive.
    pub kind: ArchiveKind,
    /// How the bytes are kept, or why they cannot be read.
    pub storage: Storage,
    /// Tars: where the data begins. Zip: where the local header begins.
    pub offset: u64,
    /// Bytes that the member takes in the archive: `size`, unless deflated.
    pub size: u64,
    /// The checksum of the member's bytes; zip only.
    pub stored_size: u64,
    /// Of the member's bytes; zip only.
    pub crc32: Option<u32>,
    /// The end of the bytes that members can be in.
    pub bound: u64,
}

/// Which bytes to read for a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// These bytes of the archive are the member.
    Archive(Range<u64>),
    /// These bytes of what the archive decompresses to are the member.
    Decompressed(Range<u64>),
    /// These bytes of the archive are a header that says where the member's data is: pass them to
    /// [`Extent::zip_data_range`].
    ZipLocalHeader(Range<u64>),
}

/// How a member is stored, or why it cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Storage {
    /// As it is.
    Stored = 0,
    /// Raw deflate, as in zips; see [`MemberDecoder`](crate::MemberDecoder).
    Deflated = 1,
    /// A directory; it has no bytes.
    Directory = 16,
    /// A symbolic link; it is not followed.
    SymbolicLink = 17,
    /// A hard link of a tar to another member; it is not followed.
    HardLink = 18,
    /// A character or block device, or a FIFO.
    Device = 19,
    /// A sparse file of a tar, whose holes are left out.
    Sparse = 20,
    /// A tar type that is not a file, such as a volume label.
    Special = 21,
    /// A zip member that needs a password.
    Encrypted = 22,
    /// A zip compression method other than stored and deflate.
    OtherMethod = 23,
}

impl Storage {
    const ALL: [Storage; 10] = [
        Storage::Stored,
        Storage::Deflated,
        Storage::Directory,
        Storage::SymbolicLink,
        Storage::HardLink,
        Storage::Device,
        Storage::Sparse,
        Storage::Special,
        Storage::Encrypted,
        Storage::OtherMethod,
    ];

    /// Whether a member stored like this can be read.
    pub fn is_readable(self) -> bool {
        self.why_unreadable().is_none()
    }

    /// For people; `None` if it can be read.
    pub fn why_unreadable(self) -> Option<&'static str> {
        match self {
            Storage::Stored | Storage::Deflated => None,
            Storage::Directory => Some("it is a directory"),
            Storage::SymbolicLink => Some("it is a symbolic link"),
            Storage::HardLink => Some("it is a hard link to another member"),
            Storage::Device => Some("it is a device or a FIFO"),
            Storage::Sparse => Some("it is a sparse file"),
            Storage::Special => Some("its type is not that of a file"),
            Storage::Encrypted => Some("it is encrypted"),
            Storage::OtherMethod => Some("it is compressed by a method other than deflate"),
        }
    }

    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.code() == code)
    }
}

impl Member<'_> {
    /// Bytes that a reader gets.
    pub fn size(&self) -> u64 {
        self.extent.size
    }

    /// Whether its bytes can be read.
    pub fn is_readable(&self) -> bool {
        self.extent.storage.is_readable()
    }

    /// Itself.
    ///
    /// # Errors
    /// `Unsupported` with the reason if its bytes cannot be read.
    pub fn readable(self) -> Result<Self> {
        match self.extent.storage.why_unreadable() {
            None => Ok(self),
            Some(why) => Err(Error::unsupported(format!(
                "the archive's member {:?} cannot be read: {why}",
                shorten(self.name)
            ))),
        }
    }
}

impl Extent {
    /// Which bytes to read first.
    ///
    /// # Errors
    /// `Unsupported` with the reason if the member cannot be read.
    pub fn place(&self) -> Result<Place> {
        if let Some(why) = self.storage.why_unreadable() {
            return Err(Error::unsupported(format!(
                "the member at offset {} cannot be read: {why}",
                self.offset
            )));
        }
        Ok(match self.kind {
            ArchiveKind::Tar => Place::Archive(self.offset..self.offset + self.size),
            ArchiveKind::TarGz | ArchiveKind::TarLz4 => {
                Place::Decompressed(self.offset..self.offset + self.size)
            }
            ArchiveKind::Zip => {
                Place::ZipLocalHeader(self.offset..self.offset + zip::LOCAL_HEADER_BYTES)
            }
        })
    }

    /// Where a zip member's data is, from the bytes of its local header ([`Place::ZipLocalHeader`];
    /// extra bytes do no harm). Feed that range to a [`MemberDecoder`](crate::MemberDecoder), or
    /// use it as it is if the member is [`Storage::Stored`].
    ///
    /// # Errors
    /// `Corrupt` if this is not a local header, contradicts the directory, or points outside the
    /// archive.
    pub fn zip_data_range(&self, local_header: &[u8]) -> Result<Range<u64>> {
        zip::data_range(self, local_header)
    }
}
