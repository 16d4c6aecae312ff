//! The encoding in which an index is kept: a header, then each member as variable-length numbers
//! relative to the previous one, then the names, then a checksum over everything. About 9 bytes per
//! tar member besides its name.
//!
//! `"FBMI"`, version, archive kind, varint member count, varint bound, varint length of names; per
//! member: name length, storage, zigzag of offset minus previous offset, size, zigzag of mtime
//! minus previous mtime, and for zips stored size and CRC32; the names; xxh3-64 of everything
//! before it, little endian.

use super::{Columns, Extent, MemberIndexBuilder, Storage};
use crate::ArchiveKind;
use forebay_core::{Error, Result, limits};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 4] = b"FBMI";
const VERSION: u8 = 1;
const CHECKSUM_BYTES: usize = 8;
/// No member takes fewer bytes than this, so an impossible count is refused before memory is
/// allocated for it.
const MEMBER_MIN_BYTES: usize = 5;

pub(super) fn encode(columns: &Columns) -> Vec<u8> {
    let mut out = Vec::with_capacity(columns.len() * 12 + columns.names.len() + 64);
    out.extend_from_slice(MAGIC);
    out.push(VERSION);
    out.push(columns.kind.code());
    put(&mut out, columns.len() as u64);
    put(&mut out, columns.bound);
    put(&mut out, columns.names.len() as u64);
    let (mut offset, mut mtime) = (0i64, 0i64);
    for n in 0..columns.len() {
        put(&mut out, columns.name(n).len() as u64);
        out.push(columns.storages[n].code());
        let this = columns.offsets.get(n) as i64;
        put(&mut out, zigzag(this.wrapping_sub(offset)));
        offset = this;
        put(&mut out, columns.sizes.get(n));
        let this = columns.mtimes.get(n) as i64;
        put(&mut out, zigzag(this.wrapping_sub(mtime)));
        mtime = this;
        if columns.is_zip() {
            put(&mut out, columns.stored_sizes.get(n));
            out.extend_from_slice(&columns.crc32s[n].to_le_bytes());
        }
    }
    out.extend_from_slice(columns.names.as_bytes());
    let sum = xxh3_64(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    out
}

/// What begins an encoded index, at most.
pub(super) const HEADER_MAX_BYTES: usize = 4 + 1 + 1 + 3 * 10;

/// The most memory that it takes to decode the index that begins so, beside its own bytes: columns
/// that grow are at times twice as large as what is in them.
pub(super) fn memory_to_decode(beginning: &[u8]) -> Option<u64> {
    let mut r = Reader { bytes: beginning };
    if r.take(4)? != MAGIC.as_slice() || r.byte()? != VERSION {
        return None;
    }
    let kind = ArchiveKind::from_code(r.byte()?)?;
    let (count, _bound, names) = (r.number()?, r.number()?, r.number()?);
    // Name ends, storage, offset, size, time, table, table of firsts; of zips stored size and CRC
    // too. Numbers of more than 32 bits are rare, but for the times of a few archives.
    let one = if kind == ArchiveKind::Zip { 37 } else { 29 };
    let columns = count.checked_mul(one)?.checked_add(names)?;
    columns.checked_mul(2)
}

pub(super) fn decode(bytes: &[u8]) -> Result<MemberIndexBuilder> {
    let corrupt = |what: &str| Error::corrupt(format!("a stored member index is damaged: {what}"));
    let Some((body, sum)) = bytes.split_last_chunk::<CHECKSUM_BYTES>() else {
        return Err(corrupt("it is too short"));
    };
    if xxh3_64(body) != u64::from_le_bytes(*sum) {
        return Err(corrupt("its checksum does not match"));
    }
    let mut r = Reader { bytes: body };
    if r.take(4) != Some(MAGIC.as_slice()) {
        return Err(corrupt("it is not an index"));
    }
    if r.byte() != Some(VERSION) {
        return Err(corrupt("it has another version"));
    }
    parse(&mut r).ok_or_else(|| corrupt("it contradicts itself"))
}

fn parse(r: &mut Reader<'_>) -> Option<MemberIndexBuilder> {
    let kind = ArchiveKind::from_code(r.byte()?)?;
    let count = usize::try_from(r.number()?).ok()?;
    let bound = r.number()?;
    let names_len = usize::try_from(r.number()?).ok()?;
    if count > limits::ARCHIVE_MEMBERS_MAX
        || r.bytes.len() / MEMBER_MIN_BYTES < count
        || r.bytes.len() < names_len
    {
        return None;
    }
    let (members, names) = r.bytes.split_at(r.bytes.len() - names_len);
    let mut names = std::str::from_utf8(names).ok()?;
    r.bytes = members;
    let mut builder = MemberIndexBuilder::new(kind, bound);
    let unit = builder.columns.offset_unit();
    let (mut offset, mut mtime) = (0i64, 0i64);
    for _ in 0..count {
        let (name, rest) = names.split_at_checked(usize::try_from(r.number()?).ok()?)?;
        names = rest;
        let storage = Storage::from_code(r.byte()?)?;
        offset = offset.wrapping_add(unzigzag(r.number()?));
        let size = r.number()?;
        mtime = mtime.wrapping_add(unzigzag(r.number()?));
        let zip = kind == ArchiveKind::Zip;
        let stored_size = if zip { r.number()? } else { size };
        let crc32 = if zip {
            Some(u32::from_le_bytes(r.take(4)?.try_into().ok()?))
        } else {
            None
        };
        let offset = (offset as u64).checked_mul(unit)?;
        // Code that later adds offset and size must not overflow.
        offset.checked_add(size)?.checked_add(1 << 20)?;
        offset.checked_add(stored_size)?.checked_add(1 << 20)?;
        let extent = Extent {
            kind,
            storage,
            offset,
            size,
            stored_size,
            crc32,
            bound,
        };
        builder.push(name, mtime, &extent).ok()?;
    }
    (names.is_empty() && r.bytes.is_empty()).then_some(builder)
}

pub(crate) fn zigzag(v: i64) -> u64 {
    ((v << 1) ^ (v >> 63)) as u64
}

pub(crate) fn unzigzag(v: u64) -> i64 {
    (v >> 1) as i64 ^ -((v & 1) as i64)
}

/// LEB128.
pub(crate) fn put(out: &mut Vec<u8>, mut v: u64) {
    while v >= 0x80 {
        out.push(v as u8 | 0x80);
        v >>= 7;
    }
    out.push(v as u8);
}

pub(crate) struct Reader<'a> {
    pub(crate) bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.bytes.split_at_checked(n)?;
        self.bytes = rest;
        Some(head)
    }

    pub(crate) fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|b| b[0])
    }

    pub(crate) fn number(&mut self) -> Option<u64> {
        let mut v = 0u64;
        for shift in (0..64).step_by(7) {
            let b = self.byte()?;
            let part = u64::from(b & 0x7f);
            if shift == 63 && part > 1 {
                return None;
            }
            v |= part << shift;
            if b < 0x80 {
                return Some(v);
            }
        }
        None
    }
}
