//! The four kinds of archive: recognised by name, by first bytes, and by the names that GetBatch
//! requests use for them.

use crate::decompress::Codec;
use forebay_core::{Error, ErrorKind, Result, name::shorten};
use serde::{Deserialize, Serialize};

/// An archive format that members are read from and batches are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ArchiveKind {
    /// Tar: POSIX (ustar and pax) or GNU.
    #[serde(rename = "tar")]
    Tar,
    /// Tar in gzip.
    #[serde(rename = "tar.gz")]
    TarGz,
    /// Tar in LZ4 frames.
    #[serde(rename = "tar.lz4")]
    TarLz4,
    /// Zip, with Zip64 where it is needed.
    #[serde(rename = "zip")]
    Zip,
}

impl ArchiveKind {
    /// Each kind once.
    pub const ALL: [ArchiveKind; 4] = [
        ArchiveKind::Tar,
        ArchiveKind::TarGz,
        ArchiveKind::TarLz4,
        ArchiveKind::Zip,
    ];

    /// How many of an archive's first bytes [`ArchiveKind::from_magic`] needs.
    pub const MAGIC_BYTES: usize = 512;

    /// By the extension of an object's name, in any case: `.tar`, `.tgz`, `.tar.gz`, `.tar.lz4`,
    /// `.zip`.
    pub fn from_name(name: &str) -> Option<Self> {
        const EXTENSIONS: [(&[u8], ArchiveKind); 5] = [
            (b".tar", ArchiveKind::Tar),
            (b".tgz", ArchiveKind::TarGz),
            (b".tar.gz", ArchiveKind::TarGz),
            (b".tar.lz4", ArchiveKind::TarLz4),
            (b".zip", ArchiveKind::Zip),
        ];
        let name = name.as_bytes();
        let ends = |ext: &[u8]| {
            name.len() > ext.len() && name[name.len() - ext.len()..].eq_ignore_ascii_case(ext)
        };
        EXTENSIONS
            .iter()
            .find(|(ext, _)| ends(ext))
            .map(|&(_, kind)| kind)
    }

    /// By the first bytes ([`Self::MAGIC_BYTES`] of them, or all of a shorter archive). `None` if
    /// nothing is recognised; the content of a gzip or lz4 stream is assumed to be a tar.
    pub fn from_magic(head: &[u8]) -> Option<Self> {
        if head.starts_with(&[0x1f, 0x8b]) {
            return Some(ArchiveKind::TarGz);
        }
        if head.starts_with(&[0x04, 0x22, 0x4d, 0x18]) {
            return Some(ArchiveKind::TarLz4);
        }
        if head.starts_with(b"PK\x03\x04") || head.starts_with(b"PK\x05\x06") {
            return Some(ArchiveKind::Zip);
        }
        let block: &[u8; 512] = head.get(..512)?.try_into().ok()?;
        crate::tar::looks_like_header(block).then_some(ArchiveKind::Tar)
    }

    /// By the `mime` of a GetBatch request; absent and empty mean tar.
    ///
    /// # Errors
    /// `UnknownFormat` for any other text.
    pub fn from_mime(mime: &str) -> Result<Self> {
        match mime {
            "" | "tar" | ".tar" | "application/x-tar" => Ok(ArchiveKind::Tar),
            "tgz" | ".tgz" | ".tar.gz" | "application/gzip" => Ok(ArchiveKind::TarGz),
            "zip" | ".zip" | "application/zip" => Ok(ArchiveKind::Zip),
            ".tar.lz4" => Ok(ArchiveKind::TarLz4),
            other => Err(Error::new(
                ErrorKind::UnknownFormat,
                format!("{:?} is not an archive format", shorten(other)),
            )
            .hint("name one of .tar, .tgz, .tar.lz4, .zip")),
        }
    }

    /// The `Content-Type` of an answer of this kind.
    pub fn content_type(self) -> &'static str {
        match self {
            ArchiveKind::Tar => "application/x-tar",
            ArchiveKind::TarGz => "application/gzip",
            ArchiveKind::TarLz4 => "application/x-lz4",
            ArchiveKind::Zip => "application/zip",
        }
    }

    /// The usual extension, with its dot.
    pub fn extension(self) -> &'static str {
        match self {
            ArchiveKind::Tar => ".tar",
            ArchiveKind::TarGz => ".tar.gz",
            ArchiveKind::TarLz4 => ".tar.lz4",
            ArchiveKind::Zip => ".zip",
        }
    }

    /// How the archive as a whole is compressed: members of such an archive are at offsets of the
    /// decompressed stream.
    pub fn codec(self) -> Option<Codec> {
        match self {
            ArchiveKind::Tar | ArchiveKind::Zip => None,
            ArchiveKind::TarGz => Some(Codec::Gzip),
            ArchiveKind::TarLz4 => Some(Codec::Lz4),
        }
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            ArchiveKind::Tar => 0,
            ArchiveKind::TarGz => 1,
            ArchiveKind::TarLz4 => 2,
            ArchiveKind::Zip => 3,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|k| k.code() == code)
    }
}

impl std::fmt::Display for ArchiveKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.extension()[1..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_by_name_and_mime() {
        assert_eq!(ArchiveKind::from_name("a/b.tar"), Some(ArchiveKind::Tar));
        assert_eq!(
            ArchiveKind::from_name("a/b.TAR.GZ"),
            Some(ArchiveKind::TarGz)
        );
        assert_eq!(ArchiveKind::from_name("b.tgz"), Some(ArchiveKind::TarGz));
        assert_eq!(
            ArchiveKind::from_name("b.tar.lz4"),
            Some(ArchiveKind::TarLz4)
        );
        assert_eq!(ArchiveKind::from_name("ü.zip"), Some(ArchiveKind::Zip));
        for no in ["tar", ".tar", "a.gz", "a.tar.bz2", "", "é"] {
            assert_eq!(ArchiveKind::from_name(no), None, "{no}");
        }
        for (mime, kind) in [
            ("", ArchiveKind::Tar),
            ("tar", ArchiveKind::Tar),
            (".tar", ArchiveKind::Tar),
            ("application/x-tar", ArchiveKind::Tar),
            ("tgz", ArchiveKind::TarGz),
            (".tgz", ArchiveKind::TarGz),
            (".tar.gz", ArchiveKind::TarGz),
            ("application/gzip", ArchiveKind::TarGz),
            ("zip", ArchiveKind::Zip),
            (".zip", ArchiveKind::Zip),
            ("application/zip", ArchiveKind::Zip),
            (".tar.lz4", ArchiveKind::TarLz4),
        ] {
            assert_eq!(ArchiveKind::from_mime(mime).unwrap(), kind, "{mime}");
        }
        assert!(ArchiveKind::from_mime("rar").is_err());
    }

    #[test]
    fn kinds_by_first_bytes() {
        let mut tar = Vec::new();
        crate::tar::tar_header_into(&mut tar, "a", 0, 0).unwrap();
        assert_eq!(ArchiveKind::from_magic(&tar), Some(ArchiveKind::Tar));
        assert_eq!(ArchiveKind::from_magic(&[0; 512]), None);
        assert_eq!(
            ArchiveKind::from_magic(&[0x1f, 0x8b, 8]),
            Some(ArchiveKind::TarGz)
        );
        assert_eq!(
            ArchiveKind::from_magic(b"\x04\x22\x4d\x18"),
            Some(ArchiveKind::TarLz4)
        );
        assert_eq!(
            ArchiveKind::from_magic(b"PK\x05\x06"),
            Some(ArchiveKind::Zip)
        );
        assert_eq!(ArchiveKind::from_magic(b""), None);
    }
}
