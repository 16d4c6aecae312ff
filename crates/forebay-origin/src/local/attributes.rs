//! What a file cannot say by itself: attributes, user metadata and the number of the write, as JSON
//! in the extended attribute `user.forebay`.

use forebay_core::{Attributes, Error, Result};
use rustix::{fs::XattrFlags, io::Errno};
use serde::{Deserialize, Serialize};
use std::{ffi::CStr, fs::File};

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

/// Stores a new number and the attributes with a file that is being written.
///
/// # Errors
/// If there is user metadata (which a client relies on) and it cannot be kept.
pub(super) fn write(file: &File, attributes: &Attributes) -> Result<()> {
    let stored = Stored {
        write_id: Some(rand::random()),
        attributes: attributes.clone(),
    };
    let json =
        serde_json::to_vec(&stored).map_err(|e| Error::internal(format!("attributes: {e}")))?;
    match rustix::fs::fsetxattr(file, NAME, &json, XattrFlags::empty()) {
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
        Err(Errno::NOSPC | Errno::TOOBIG | Errno::RANGE) => Err(Error::unsupported(
            "the attributes and user metadata are larger than the file \
                system can store with a file",
        )
        .hint("ext4 stores less than 4 KiB")),
        Err(e) => Err(Error::internal(format!("attributes cannot be stored: {e}")).caused_by(e)),
    }
}
