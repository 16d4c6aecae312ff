//! What a file cannot say by itself: attributes, user metadata and the write's number, as JSON in
//! the extended attribute `user.forebay`.

use forebay_core::{Attributes, Error, Result};
use serde::{Deserialize, Serialize};
use std::{ffi::CStr, fs::File, io, os::fd::AsRawFd};

const NAME: &CStr = c"user.forebay";
/// Extended attributes of ext4 share one block of 4 KiB; others allow 64 KiB.
const VALUE_MAX_BYTES: usize = 64 << 10;

/// The content of the extended attribute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Stored {
    /// Random for each write: part of the ETag.
    pub write_id: Option<u64>,
    pub attributes: Attributes,
}

/// What is stored with a file; nothing for files that others wrote, or on file systems without
/// extended attributes.
pub(super) fn read(file: &File) -> Stored {
    let mut buffer = vec![0u8; 512];
    loop {
        // SAFETY: the name ends in NUL, the buffer is writable for the length that is passed, and
        // the descriptor is open.
        let n = unsafe {
            libc::fgetxattr(
                file.as_raw_fd(),
                NAME.as_ptr(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
            )
        };
        if n >= 0 {
            return serde_json::from_slice(&buffer[..n as usize]).unwrap_or_default();
        }
        if io::Error::last_os_error().raw_os_error() != Some(libc::ERANGE)
            || buffer.len() >= VALUE_MAX_BYTES
        {
            return Stored::default();
        }
        buffer = vec![0u8; VALUE_MAX_BYTES];
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
    // SAFETY: the name ends in NUL, the value is readable for the length that is passed, and the
    // descriptor is open.
    let done = unsafe {
        libc::fsetxattr(
            file.as_raw_fd(),
            NAME.as_ptr(),
            json.as_ptr().cast(),
            json.len(),
            0,
        )
    };
    if done == 0 {
        return Ok(());
    }
    let e = io::Error::last_os_error();
    match e.raw_os_error() {
        Some(libc::ENOTSUP) if attributes.user.is_empty() => Ok(()),
        Some(libc::ENOTSUP) => Err(Error::unsupported(
            "the file system keeps no extended \
            attributes, so user metadata cannot be stored",
        )
        .hint(
            "use a file system with user_xattr, as ext4 and xfs have, or write without \
                user metadata",
        )),
        Some(libc::ENOSPC | libc::E2BIG | libc::ERANGE) => Err(Error::unsupported(
            "the attributes and user metadata are more than the file \
                system keeps with a file",
        )
        .hint("ext4 keeps less than 4 KiB")),
        _ => Err(Error::internal(format!("attributes cannot be stored: {e}")).source(e)),
    }
}
