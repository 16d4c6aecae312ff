//! From a member's local header to its data.

use super::{FLAG_DESCRIPTOR, LOCAL_SIGNATURE, METHOD_DEFLATE, METHOD_STORED, u16_at, u32_at};
use crate::index::{Extent, Storage};
use forebay_core::{Error, Result};
use std::ops::Range;

/// The fixed part of a local header, which says how long the rest of it is.
pub const LOCAL_HEADER_BYTES: u64 = 30;

/// See [`Extent::zip_data_range`].
pub(crate) fn data_range(extent: &Extent, header: &[u8]) -> Result<Range<u64>> {
    let corrupt = |what: &str| {
        Error::corrupt(format!(
            "the zip's local header at offset {}: {what}",
            extent.offset
        ))
    };
    if header.len() < LOCAL_HEADER_BYTES as usize {
        return Err(corrupt("it is cut off"));
    }
    if u32_at(header, 0) != LOCAL_SIGNATURE {
        return Err(corrupt("its signature does not match"));
    }
    let (flags, method) = (u16_at(header, 6), u16_at(header, 8));
    let expected = match extent.storage {
        Storage::Stored => METHOD_STORED,
        Storage::Deflated => METHOD_DEFLATE,
        _ => return extent.place().map(|_| 0..0),
    };
    if method != expected {
        return Err(corrupt(
            "its compression method differs from the directory's",
        ));
    }
    if flags & FLAG_DESCRIPTOR == 0 {
        let (crc32, stored_size, size) =
            (u32_at(header, 14), u32_at(header, 18), u32_at(header, 22));
        let agrees =
            |local: u32, directory: u64| local == u32::MAX || u64::from(local) == directory;
        if extent.crc32.is_some_and(|c| c != crc32)
            || !agrees(stored_size, extent.stored_size)
            || !agrees(size, extent.size)
        {
            return Err(corrupt(
                "its checksum and sizes differ from the directory's",
            ));
        }
    }
    let variable = u64::from(u16_at(header, 26)) + u64::from(u16_at(header, 28));
    let start = extent.offset.checked_add(LOCAL_HEADER_BYTES + variable);
    match start.and_then(|s| Some(s..s.checked_add(extent.stored_size)?)) {
        Some(range) if range.end <= extent.bound => Ok(range),
        _ => Err(corrupt(
            "its data runs past the end of the archive's members",
        )),
    }
}
