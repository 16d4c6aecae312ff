//! What a file cannot say by itself: attributes, user metadata, the write's number and the sum of its
//! bytes, as JSON in the extended attribute `user.forebay`.

use super::Seen;
use forebay_core::{Attributes, Error, Result};
use rustix::{fs::XattrFlags, io::Errno};
use serde::{Deserialize, Serialize};
use std::{
    ffi::CStr,
    fs::{File, Metadata},
};

const NAME: &CStr = c"user.forebay";
/// Extended attributes of ext4 share one block of 4 KiB; others allow 64 KiB.
const VALUE_MAX_BYTES: usize = 64 << 10;

/// The content of the extended attribute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Stored {
    /// Random for each write; part of the ETag.
    pub write_id: Option<u64>,
    pub attributes: Attributes,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sum: Option<Sum>,
    /// Of a part of an upload.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<PartHash>,
}

/// A sum of a file's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Sum {
    crc32c: u32,
    /// As the file was when they were summed up: others may have changed it since.
    of: Seen,
}

/// A hash of the bytes of a part of an upload, in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartHash {
    xxh3: String,
    of: Seen,
}

impl Stored {
    /// The CRC32C of the file's bytes, if it is known of those that the file has now.
    pub(super) fn crc32c(&self, now: &Metadata) -> Option<u32> {
        let sum = self.sum.filter(|sum| sum.of == Seen::of(now));
        sum.map(|sum| sum.crc32c)
    }

    /// The hash of the part's bytes, if it is known of those that the file has now.
    pub(super) fn part_hash(&self, now: &Metadata) -> Option<&str> {
        let part = self.part.as_ref().filter(|part| part.of == Seen::of(now));
        part.map(|part| part.xxh3.as_str())
    }
}

/// What is stored with a file; nothing for files that others wrote, or on file systems without
/// extended attributes.
pub(super) fn read(file: &File) -> Stored {
    let mut buffer = vec![0u8; 512];
    loop {
        match rustix::fs::fgetxattr(file, NAME, &mut buffer[..]) {
            Ok(n) => return serde_json::from_slice(&buffer[..n]).unwrap_or_default(),
            Err(Errno::RANGE) if buffer.len() < VALUE_MAX_BYTES => {
                buffer = vec![0u8; VALUE_MAX_BYTES];
            }
            Err(_) => return Stored::default(),
        }
    }
}

/// Stores a new number, the attributes, and the CRC32C of its bytes where it is known, with a file
/// that is written.
///
/// # Errors
/// If there is user metadata (which a client relies on) and it cannot be kept.
pub(super) fn write(file: &File, attributes: &Attributes, crc32c: Option<u32>) -> Result<()> {
    let seen = file.metadata().map(|m| Seen::of(&m)).ok();
    let mut stored = Stored {
        write_id: Some(rand::random()),
        attributes: attributes.clone(),
        sum: crc32c
            .zip(seen)
            .map(|(crc32c, seen)| Sum { crc32c, of: seen }),
        part: None,
    };
    let mut written = set(file, &stored)?;
    if is_too_large(written) && stored.sum.take().is_some() {
        // What clients gave is more than what they might ask for.
        written = set(file, &stored)?;
    }
    match written {
        Ok(()) => Ok(()),
        Err(Errno::NOTSUP) if attributes.user.is_empty() => Ok(()),
        Err(Errno::NOTSUP) => Err(Error::unsupported(
            "the file system does not support extended \
            attributes, so user metadata cannot be stored",
        )
        .hint(
            "use a file system with user_xattr, such as ext4 or xfs, or write without \
                user metadata",
        )),
        Err(_) if is_too_large(written) => Err(Error::unsupported(
            "the attributes and user metadata are larger than the file \
                system can store with a file",
        )
        .hint("ext4 stores less than 4 KiB")),
        Err(e) => Err(Error::internal(format!("attributes cannot be stored: {e}")).caused_by(e)),
    }
}

/// Stores the hash of its bytes with the file of a part of an upload, where the file system can.
pub(super) fn write_part(file: &File, hash: u128) {
    let Ok(meta) = file.metadata() else {
        return;
    };
    let stored = Stored {
        part: Some(PartHash {
            xxh3: format!("{hash:032x}"),
            of: Seen::of(&meta),
        }),
        ..Stored::default()
    };
    // Without it, the part is known by its file.
    let _ = set(file, &stored);
}

fn set(file: &File, stored: &Stored) -> Result<Result<(), Errno>> {
    let json =
        serde_json::to_vec(stored).map_err(|e| Error::internal(format!("attributes: {e}")))?;
    Ok(rustix::fs::fsetxattr(
        file,
        NAME,
        &json,
        XattrFlags::empty(),
    ))
}

fn is_too_large(written: Result<(), Errno>) -> bool {
    matches!(written, Err(Errno::NOSPC | Errno::TOOBIG | Errno::RANGE))
}
