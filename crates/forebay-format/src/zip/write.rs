//! Zip archives written as a stream: every entry stored, sizes known in advance.
//!
//! The checksum of an entry belongs before its data, where it is not known yet. The rule depends on
//! size alone, so the bytes do not depend on how the data was split: an entry of up to
//! [`ZIP_HELD_ENTRY_MAX_BYTES`] is held back until its end and has everything in its local header
//! (streaming readers can read it); a larger one is sent at once, with its checksum in a data
//! descriptor after it. The directory at the end has it in either case. Zip64 fields appear if a
//! size, an offset or the number of entries needs them.
//!
//! Memory: one held entry, and the directory (46 bytes and the name per entry) until
//! [`ZipWriter::finish`].

use super::*;
use bytes::BufMut;
use forebay_core::{Error, Result, limits, name::shorten};

/// Entries up to this size are held back until their checksum is known.
pub const ZIP_HELD_ENTRY_MAX_BYTES: u64 = 1 << 20;

const VERSION_ZIP64: u16 = 45;
const VERSION_PLAIN: u16 = 20;
const MADE_BY_UNIX: u16 = 3 << 8;
/// A regular file, mode 0644.
const UNIX_MODE: u32 = 0o100_644 << 16;
const MAX32: u64 = u32::MAX as u64;

/// Writes a zip of stored entries; small ones are held back until their checksum is known.
#[derive(Debug, Default)]
pub struct ZipWriter {
    directory: Vec<u8>,
    entries: u64,
    /// Bytes output so far.
    written: u64,
    open: Option<Open>,
    held: Vec<u8>,
}

#[derive(Debug)]
struct Open {
    name: String,
    comment: String,
    size: u64,
    seen: u64,
    dos: (u16, u16),
    crc: crc32fast::Hasher,
    offset: u64,
}

impl Open {
    fn is_held(&self) -> bool {
        self.size <= ZIP_HELD_ENTRY_MAX_BYTES
    }
}

impl ZipWriter {
    /// A writer of an archive without entries.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins an entry of exactly `size` bytes. Programs that list the archive show `comment`.
    ///
    /// # Errors
    /// `Invalid` for a name that is empty, holds a NUL, or is longer than 65,535 bytes;
    /// `Unsupported` past the limit on the directory.
    pub fn begin_entry(
        &mut self,
        name: &str,
        size: u64,
        mtime_secs: i64,
        comment: &str,
        out: &mut impl BufMut,
    ) -> Result<()> {
        if self.open.is_some() {
            return Err(Error::internal("a zip entry begins inside another"));
        }
        if name.is_empty() || name.contains('\0') || name.len() > 0xffff {
            return Err(Error::invalid(format!(
                "{:?} cannot be the name of an archive member",
                shorten(name)
            )));
        }
        if self.directory.len() as u64 > limits::ZIP_DIRECTORY_MAX_BYTES {
            return Err(
                Error::unsupported("the directory of the zip would be too large")
                    .hint("ask for fewer entries in one request, or for a tar"),
            );
        }
        let comment = comment[..comment.floor_char_boundary(0xffff)].to_owned();
        let dos = dos_time(mtime_secs);
        let open = Open {
            name: name.to_owned(),
            comment,
            size,
            seen: 0,
            dos,
            crc: Default::default(),
            offset: self.written,
        };
        if !open.is_held() {
            self.local_header(&open, None, out);
        }
        self.open = Some(open);
        Ok(())
    }

    /// The next bytes of the entry.
    ///
    /// # Errors
    /// `Internal` if they are more than were announced.
    pub fn data(&mut self, bytes: &[u8], out: &mut impl BufMut) -> Result<()> {
        let open = self
            .open
            .as_mut()
            .ok_or_else(|| Error::internal("zip data outside an entry"))?;
        open.seen += bytes.len() as u64;
        if open.seen > open.size {
            return Err(Error::internal(format!(
                "more than the announced {} bytes came for {:?}",
                open.size,
                shorten(&open.name)
            )));
        }
        open.crc.update(bytes);
        if open.is_held() {
            self.held.extend_from_slice(bytes);
        } else {
            self.written += bytes.len() as u64;
            out.put_slice(bytes);
        }
        Ok(())
    }

    /// # Errors
    /// `Internal` if bytes of the entry are missing.
    pub fn end_entry(&mut self, out: &mut impl BufMut) -> Result<()> {
        let open = self
            .open
            .take()
            .ok_or_else(|| Error::internal("a zip entry ends that was not begun"))?;
        if open.seen != open.size {
            let (seen, size) = (open.seen, open.size);
            return Err(Error::internal(format!(
                "{seen} of the announced {size} bytes came for {:?}",
                shorten(&open.name)
            )));
        }
        let crc = open.crc.clone().finalize();
        if open.is_held() {
            self.local_header(&open, Some(crc), out);
            self.written += open.size;
            out.put_slice(&self.held);
            self.held.clear();
        } else {
            let mut descriptor = Vec::with_capacity(24);
            put32(&mut descriptor, DESCRIPTOR_SIGNATURE);
            put32(&mut descriptor, crc);
            for _ in 0..2 {
                if open.size >= MAX32 {
                    put64(&mut descriptor, open.size);
                } else {
                    put32(&mut descriptor, open.size as u32);
                }
            }
            self.put(&descriptor, out);
        }
        self.directory_entry(&open, crc);
        self.entries += 1;
        Ok(())
    }

    /// The directory and the end records. The writer is empty afterwards.
    ///
    /// # Errors
    /// `Internal` inside an entry.
    pub fn finish(&mut self, out: &mut impl BufMut) -> Result<()> {
        if self.open.is_some() {
            return Err(Error::internal("a zip ends inside an entry"));
        }
        let (start, len, entries) = (self.written, self.directory.len() as u64, self.entries);
        out.put_slice(&std::mem::take(&mut self.directory));
        let mut end = Vec::with_capacity(END64_BYTES + LOCATOR64_BYTES + END_BYTES);
        if entries >= 0xffff || start >= MAX32 || len >= MAX32 {
            put32(&mut end, END64_SIGNATURE);
            put64(&mut end, END64_BYTES as u64 - 12);
            put16(&mut end, MADE_BY_UNIX | VERSION_ZIP64);
            put16(&mut end, VERSION_ZIP64);
            put64(&mut end, 0);
            put64(&mut end, entries);
            put64(&mut end, entries);
            put64(&mut end, len);
            put64(&mut end, start);
            put32(&mut end, LOCATOR64_SIGNATURE);
            put32(&mut end, 0);
            put64(&mut end, start + len);
            put32(&mut end, 1);
        }
        put32(&mut end, END_SIGNATURE);
        put32(&mut end, 0);
        put16(&mut end, entries.min(0xffff) as u16);
        put16(&mut end, entries.min(0xffff) as u16);
        put32(&mut end, len.min(MAX32) as u32);
        put32(&mut end, start.min(MAX32) as u32);
        put16(&mut end, 0);
        out.put_slice(&end);
        *self = Self::default();
        Ok(())
    }

    fn put(&mut self, bytes: &[u8], out: &mut impl BufMut) {
        self.written += bytes.len() as u64;
        out.put_slice(bytes);
    }

    /// Without a checksum: a data descriptor follows the data.
    fn local_header(&mut self, open: &Open, crc: Option<u32>, out: &mut impl BufMut) {
        let zip64 = open.size >= MAX32;
        let mut h = Vec::with_capacity(open.name.len() + 64);
        put32(&mut h, LOCAL_SIGNATURE);
        common_fields(&mut h, open, zip64, crc.unwrap_or(0));
        put16(&mut h, open.name.len() as u16);
        put16(&mut h, if zip64 { 20 } else { 0 });
        h.extend_from_slice(open.name.as_bytes());
        if zip64 {
            put16(&mut h, EXTRA_ZIP64);
            put16(&mut h, 16);
            put64(&mut h, open.size);
            put64(&mut h, open.size);
        }
        self.put(&h, out);
    }

    fn directory_entry(&mut self, open: &Open, crc: u32) {
        let far = open.offset >= MAX32;
        let large = open.size >= MAX32;
        let mut extra = Vec::new();
        if large {
            put64(&mut extra, open.size);
            put64(&mut extra, open.size);
        }
        if far {
            put64(&mut extra, open.offset);
        }
        let d = &mut self.directory;
        put32(d, ENTRY_SIGNATURE);
        put16(
            d,
            MADE_BY_UNIX
                | if large || far {
                    VERSION_ZIP64
                } else {
                    VERSION_PLAIN
                },
        );
        common_fields(d, open, large || far, crc);
        put16(d, open.name.len() as u16);
        put16(
            d,
            if extra.is_empty() {
                0
            } else {
                extra.len() as u16 + 4
            },
        );
        put16(d, open.comment.len() as u16);
        put16(d, 0);
        put16(d, 0);
        put32(d, UNIX_MODE);
        put32(d, open.offset.min(MAX32) as u32);
        d.extend_from_slice(open.name.as_bytes());
        if !extra.is_empty() {
            put16(d, EXTRA_ZIP64);
            put16(d, extra.len() as u16);
            d.extend_from_slice(&extra);
        }
        d.extend_from_slice(open.comment.as_bytes());
    }
}

/// From the version to the sizes: the same in local header and directory.
fn common_fields(out: &mut Vec<u8>, open: &Open, zip64: bool, crc: u32) {
    put16(out, if zip64 { VERSION_ZIP64 } else { VERSION_PLAIN });
    put16(
        out,
        FLAG_UTF8 | if open.is_held() { 0 } else { FLAG_DESCRIPTOR },
    );
    put16(out, METHOD_STORED);
    put16(out, open.dos.1);
    put16(out, open.dos.0);
    put32(out, crc);
    put32(out, open.size.min(MAX32) as u32);
    put32(out, open.size.min(MAX32) as u32);
}

/// Date and time in UTC; what MS-DOS cannot represent becomes its first or last moment (1980 to
/// 2107).
fn dos_time(mtime_secs: i64) -> (u16, u16) {
    const FIRST: i64 = 315_532_800;
    const LAST: i64 = 4_354_819_198;
    let secs = mtime_secs.clamp(FIRST, LAST);
    let (days, time) = (secs / 86_400, secs % 86_400);
    let (year, month, day) = civil_from_days(days);
    let date = ((year - 1980) << 9) | (month << 5) | day;
    let time = ((time / 3600) << 11) | ((time / 60 % 60) << 5) | (time % 60 / 2);
    (date as u16, time as u16)
}

/// Year, month and day of a day counted from 1970-01-01, not before it.
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let m = (5 * day_of_year + 2) / 153;
    let month = if m < 10 { m + 3 } else { m - 9 };
    (
        era * 400 + year_of_era + i64::from(month <= 2),
        month,
        day_of_year - (153 * m + 2) / 5 + 1,
    )
}

fn put16(out: &mut Vec<u8>, v: u16) {
    out.extend_from_slice(&v.to_le_bytes());
}

fn put32(out: &mut Vec<u8>, v: u32) {
    out.extend_from_slice(&v.to_le_bytes());
}

fn put64(out: &mut Vec<u8>, v: u64) {
    out.extend_from_slice(&v.to_le_bytes());
}
