//! One record of the central directory.

use super::*;
use crate::index::Storage;
use forebay_core::{Error, Result};
use std::borrow::Cow;

pub(super) struct Entry<'a> {
    pub name: Cow<'a, str>,
    pub raw_name_len: u64,
    pub storage: Storage,
    pub mtime_secs: i64,
    pub crc32: u32,
    pub stored_size: u64,
    pub size: u64,
    /// Of the local header, before adding the bytes in front of the archive.
    pub offset: u64,
}

/// The length of the record that begins with these bytes, if they are enough to tell.
pub(super) fn record_len(bytes: &[u8]) -> Option<usize> {
    let fixed = bytes.get(..ENTRY_BYTES)?;
    Some(
        ENTRY_BYTES
            + usize::from(u16_at(fixed, 28))
            + usize::from(u16_at(fixed, 30))
            + usize::from(u16_at(fixed, 32)),
    )
}

/// Parses one whole record, whose offset in the archive is `at`.
pub(super) fn parse(record: &[u8], at: u64) -> Result<Entry<'_>> {
    let corrupt =
        |what: &str| Error::corrupt(format!("the zip's directory entry at offset {at}: {what}"));
    let (fixed, rest) = record
        .split_at_checked(ENTRY_BYTES)
        .ok_or_else(|| corrupt("it is cut off"))?;
    let (raw_name, rest) = rest
        .split_at_checked(usize::from(u16_at(fixed, 28)))
        .ok_or_else(|| corrupt("it is cut off"))?;
    let extra = rest
        .get(..usize::from(u16_at(fixed, 30)))
        .ok_or_else(|| corrupt("it is cut off"))?;
    let (made_by, flags, method) = (u16_at(fixed, 4) >> 8, u16_at(fixed, 8), u16_at(fixed, 10));
    let dos_mtime = dos_time(u16_at(fixed, 14), u16_at(fixed, 12));
    let mut entry = Entry {
        name: decode_name(raw_name, flags),
        raw_name_len: raw_name.len() as u64,
        storage: Storage::Stored,
        mtime_secs: dos_mtime,
        crc32: u32_at(fixed, 16),
        stored_size: u64::from(u32_at(fixed, 20)),
        size: u64::from(u32_at(fixed, 24)),
        offset: u64::from(u32_at(fixed, 42)),
    };
    let mut disk = u32::from(u16_at(fixed, 34));
    let mut missing64 = [entry.size, entry.stored_size, entry.offset]
        .contains(&u64::from(u32::MAX))
        || disk == 0xffff;
    for (id, data) in extra_fields(extra) {
        match id {
            EXTRA_ZIP64 if missing64 => {
                read_zip64(data, &mut entry, &mut disk)
                    .ok_or_else(|| corrupt("its zip64 field is too short"))?;
                missing64 = false;
            }
            EXTRA_TIMESTAMP if data.len() >= 5 && data[0] & 1 != 0 => {
                entry.mtime_secs = unix_time(u32_at(data, 1), dos_mtime)
            }
            EXTRA_UNICODE_PATH
                if data.len() >= 5
                    && data[0] == 1
                    && u32_at(data, 1) == crc32fast::hash(raw_name) =>
            {
                if let Ok(name) = std::str::from_utf8(&data[5..]) {
                    entry.name = Cow::Borrowed(name);
                }
            }
            _ => {}
        }
    }
    if disk != 0 {
        return Err(Error::unsupported("the zip is split into several parts")
            .hint("join the parts into one archive"));
    }
    let unix_type = if made_by == 3 {
        u32_at(fixed, 38) >> 28
    } else {
        0
    };
    entry.storage = match (unix_type, method) {
        _ if entry.name.ends_with('/') => Storage::Directory,
        (0o12, _) => Storage::SymbolicLink,
        (0o4, _) => Storage::Directory,
        (0o1 | 0o2 | 0o6, _) => Storage::Device,
        _ if flags & (FLAG_ENCRYPTED | FLAG_STRONG_ENCRYPTION | FLAG_MASKED) != 0 => {
            Storage::Encrypted
        }
        _ if flags & FLAG_PATCH != 0 => Storage::OtherMethod,
        (_, METHOD_STORED) => Storage::Stored,
        (_, METHOD_DEFLATE) => Storage::Deflated,
        _ => Storage::OtherMethod,
    };
    let sizes_lie = match entry.storage {
        Storage::Stored => entry.size != entry.stored_size,
        // Deflate cannot do better than 258 bytes in two bits.
        Storage::Deflated => {
            entry.size / 1032 > entry.stored_size || entry.size > 0 && entry.stored_size == 0
        }
        _ => false,
    };
    if sizes_lie {
        let (size, stored) = (entry.size, entry.stored_size);
        return Err(corrupt(&format!(
            "{stored} stored bytes cannot decompress to a member of {size} bytes"
        )));
    }
    Ok(entry)
}

fn read_zip64(mut data: &[u8], entry: &mut Entry<'_>, disk: &mut u32) -> Option<()> {
    for field in [&mut entry.size, &mut entry.stored_size, &mut entry.offset] {
        if *field == u64::from(u32::MAX) {
            let (value, rest) = data.split_first_chunk::<8>()?;
            (*field, data) = (u64::from_le_bytes(*value), rest);
        }
    }
    if *disk == 0xffff {
        *disk = u32::from_le_bytes(*data.first_chunk::<4>()?);
    }
    Some(())
}

/// Tags and contents; stops at a truncated field.
fn extra_fields(mut extra: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (head, rest) = extra.split_at_checked(4)?;
        let (data, rest) = rest.split_at_checked(usize::from(u16_at(head, 2)))?;
        extra = rest;
        Some((u16_at(head, 0), data))
    })
}

/// UTF-8 if the bytes are UTF-8, marked as such or not (programs on Unix often do not mark it),
/// otherwise code page 437.
fn decode_name(raw: &[u8], flags: u16) -> Cow<'_, str> {
    match std::str::from_utf8(raw) {
        Ok(name) => Cow::Borrowed(name),
        Err(_) if flags & FLAG_UTF8 != 0 => String::from_utf8_lossy(raw),
        Err(_) => {
            let upper: Vec<char> = CP437_UPPER.chars().collect();
            Cow::Owned(
                raw.iter()
                    .map(|&b| {
                        if b < 128 {
                            char::from(b)
                        } else {
                            upper[usize::from(b) - 128]
                        }
                    })
                    .collect(),
            )
        }
    }
}

const CP437_UPPER: &str = "ÇüéâäàåçêëèïîìÄÅÉæÆôöòûùÿÖÜ¢£¥₧ƒáíóúñÑªº¿⌐¬½¼¡«»░▒▓│┤╡╢╖╕╣║╗╝╜╛┐└┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪┘┌█▄▌▐▀αßΓπΣσµτΦΘΩδ∞φε∩≡±≥≤⌠⌡÷≈°∙·√ⁿ²■\u{a0}";

/// MS-DOS date and time as seconds since the Unix epoch, taken as UTC; the date 0 means none.
fn dos_time(date: u16, time: u16) -> i64 {
    if date == 0 {
        return 0;
    }
    let (year, month, day) = (
        i64::from(date >> 9) + 1980,
        i64::from(date >> 5 & 15),
        i64::from(date & 31),
    );
    let seconds =
        i64::from(time >> 11) * 3600 + i64::from(time >> 5 & 63) * 60 + i64::from(time & 31) * 2;
    days_from_civil(year, month.clamp(1, 12), day.max(1)) * 86_400 + seconds
}

/// A 32-bit time: signed, as in Info-ZIP, or unsigned, as in Go. Past 2038 the MS-DOS time, which
/// is always present, decides.
fn unix_time(secs: u32, dos_mtime: i64) -> i64 {
    if dos_mtime > i64::from(i32::MAX) {
        i64::from(secs)
    } else {
        i64::from(secs as i32)
    }
}

/// Days since 1970-01-01 in the Gregorian calendar; years count from March so that the leap day is
/// the last.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let y = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (y.div_euclid(400), y.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_names() {
        assert_eq!(CP437_UPPER.chars().count(), 128);
        assert_eq!(decode_name(b"a\x81", 0), "aü");
        assert_eq!(decode_name("ü".as_bytes(), 0), "ü");
        assert_eq!(dos_time(0x21, 0), 315_532_800);
        assert_eq!(unix_time(4_000_000_000, 4_000_000_000), 4_000_000_000);
        assert_eq!(unix_time(-5i32 as u32, 315_532_800), -5);
        assert_eq!(unix_time(1_700_000_000, 1_700_003_600), 1_700_000_000);
        // 2024-02-29 12:34:56
        assert_eq!(
            dos_time((44 << 9) | (2 << 5) | 29, (12 << 11) | (34 << 5) | 28),
            1_709_210_096
        );
    }
}
