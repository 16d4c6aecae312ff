//! The record: what one entry of the cache looks like on disk.
//!
//! ```text
//! 0   magic "FBR3"      u32     32  meta length       u32
//! 4   kind              u8      36  data length       u32
//! 5   flags             u8      40  validated at      u32   seconds since the epoch
//! 6   name length       u16     44  body CRC32C       u32   of name, meta and block table
//! 8   sequence number   u64     48  version           u64   of the object
//! 16  key               u128    56  header check      u64   keyed, over bytes 0..56 and the place
//! 64  name (bucket NUL key), meta, CRC32C of each 4 KiB block of data, data, padding to 64
//! ```
//!
//! All numbers are little-endian. The header check is keyed with the directory's secret and covers
//! the segment and the offset: a record is valid only where the store wrote it. So an object whose
//! *content* looks like a record (a cached segment file, or a hostile upload) is never taken for
//! one when a scan resynchronises in the middle of data.
//!
//! Each block of data has its own checksum, so a short range of a large record reads and verifies
//! only the blocks that it touches.
//!
//! Records of earlier versions are read, and moved, as they are: version 2 ("FBR2") has blocks of
//! 16 KiB and version 1 ("FBR1") has blocks of 64 KiB. They differ in nothing else.

use bytes::{Buf, BufMut};
use forebay_core::crc32c;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Records begin on this grid; a scan that has lost its place tries each point of it.
pub const ALIGN_BYTES: u64 = 64;
pub const HEADER_BYTES: usize = 64;
/// Data are checksummed in blocks of this size, in newly written records.
pub const BLOCK_BYTES: usize = 1 << BLOCK_SHIFT;
const BLOCK_SHIFT: u8 = 12;
/// Largest encoded meta. S3 allows 2 KiB of user metadata; other origins a few more.
pub const META_MAX_BYTES: usize = 64 << 10;
/// Largest size of a record besides its data: header, name, meta, block table of a chunk.
pub const OVERHEAD_MAX_BYTES: u64 = (HEADER_BYTES + 64 + 1024 + META_MAX_BYTES + 1024) as u64;

/// The magic of each version, and the binary logarithm of its blocks' size.
const VERSIONS: [(u32, u8); 3] = [
    (u32::from_le_bytes(*b"FBR3"), BLOCK_SHIFT),
    (u32::from_le_bytes(*b"FBR2"), 14),
    (u32::from_le_bytes(*b"FBR1"), 16),
];
/// The object's bytes are the data of this head.
pub const FLAG_INLINE: u8 = 1;
/// A part that is not bytes of the object.
pub const FLAG_DERIVED: u8 = 2;
/// A part that goes like any other, whatever is pinned.
pub const FLAG_UNHELD: u8 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An object's meta, and its bytes if they are inline.
    Head = 1,
    /// A chunk, or derived data, of one version.
    Part = 2,
    /// Ends all records of its key with a lower sequence number.
    Tombstone = 3,
    /// A name that is pinned.
    Pin = 4,
}

/// Where a record lies, which its header check covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub secret: u64,
    pub ordinal: u64,
    pub offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    /// The binary logarithm of the size of its blocks, which identifies its version.
    pub block_shift: u8,
    pub flags: u8,
    pub name_len: u16,
    pub seq: u64,
    pub key: u128,
    pub meta_len: u32,
    pub data_len: u32,
    pub validated_at: u32,
    pub body_crc: u32,
    pub version: u64,
}

pub fn padded(len: u64) -> u64 {
    len.next_multiple_of(ALIGN_BYTES)
}

/// The exact length of a newly written record, without padding.
pub fn record_len(name_len: usize, meta_len: usize, data_len: usize) -> u64 {
    len_with(name_len, meta_len, data_len, BLOCK_SHIFT)
}

fn len_with(name_len: usize, meta_len: usize, data_len: usize, block_shift: u8) -> u64 {
    let blocks = data_len.div_ceil(1 << block_shift);
    (HEADER_BYTES + name_len + meta_len + 4 * blocks + data_len) as u64
}

impl Header {
    /// Bytes of the record, without padding.
    pub fn len(&self) -> u64 {
        len_with(
            self.name_len as usize,
            self.meta_len as usize,
            self.data_len as usize,
            self.block_shift,
        )
    }

    /// How many blocks its data have.
    pub fn blocks(&self) -> usize {
        (self.data_len as usize).div_ceil(self.block_bytes())
    }

    /// The size of its blocks.
    pub fn block_bytes(&self) -> usize {
        1 << self.block_shift
    }

    /// Bytes before the data.
    pub fn prefix_len(&self) -> usize {
        (self.len() - self.data_len as u64) as usize
    }

    pub fn name_range(&self) -> Range<usize> {
        HEADER_BYTES..HEADER_BYTES + self.name_len as usize
    }

    pub fn meta_range(&self) -> Range<usize> {
        let start = self.name_range().end;
        start..start + self.meta_len as usize
    }

    fn table_start(&self) -> usize {
        self.meta_range().end
    }

    pub fn encode(&self, place: Place) -> [u8; HEADER_BYTES] {
        let mut out = [0u8; HEADER_BYTES];
        let mut b = &mut out[..];
        let version = VERSIONS
            .iter()
            .find(|(_, shift)| *shift == self.block_shift);
        b.put_u32_le(version.expect("a version that is written").0);
        b.put_u8(self.kind as u8);
        b.put_u8(self.flags);
        b.put_u16_le(self.name_len);
        b.put_u64_le(self.seq);
        b.put_u128_le(self.key);
        b.put_u32_le(self.meta_len);
        b.put_u32_le(self.data_len);
        b.put_u32_le(self.validated_at);
        b.put_u32_le(self.body_crc);
        b.put_u64_le(self.version);
        let check = check(&out[..56], place);
        out[56..].copy_from_slice(&check.to_le_bytes());
        out
    }

    /// The header at the beginning of `bytes`, if the store wrote one at exactly this place.
    pub fn decode(bytes: &[u8], place: Place) -> Option<Header> {
        let bytes = bytes.get(..HEADER_BYTES)?;
        let mut b = bytes;
        let magic = b.get_u32_le();
        let (_, block_shift) = *VERSIONS.iter().find(|(of, _)| *of == magic)?;
        let kind = match b.get_u8() {
            1 => Kind::Head,
            2 => Kind::Part,
            3 => Kind::Tombstone,
            4 => Kind::Pin,
            _ => return None,
        };
        let header = Header {
            kind,
            block_shift,
            flags: b.get_u8(),
            name_len: b.get_u16_le(),
            seq: b.get_u64_le(),
            key: b.get_u128_le(),
            meta_len: b.get_u32_le(),
            data_len: b.get_u32_le(),
            validated_at: b.get_u32_le(),
            body_crc: b.get_u32_le(),
            version: b.get_u64_le(),
        };
        (b.get_u64_le() == check(&bytes[..56], place)).then_some(header)
    }

    /// Whether the bytes between header and data are those that were written.
    pub fn body_is_whole(&self, prefix: &[u8]) -> bool {
        prefix
            .get(HEADER_BYTES..self.prefix_len())
            .is_some_and(|body| crc32c(body) == self.body_crc)
    }

    /// The blocks that hold `range` (not empty) of the data.
    pub fn blocks_of(&self, range: &Range<u64>) -> Range<usize> {
        let bytes = self.block_bytes();
        range.start as usize / bytes..(range.end as usize).div_ceil(bytes)
    }

    /// The bytes of the data that `blocks` cover.
    pub fn bytes_of(&self, blocks: &Range<usize>) -> Range<usize> {
        let bytes = self.block_bytes();
        blocks.start * bytes..(blocks.end * bytes).min(self.data_len as usize)
    }

    /// Whether `data`, which are exactly the given blocks, match the table in `prefix`.
    pub fn blocks_are_whole(&self, prefix: &[u8], blocks: &Range<usize>, data: &[u8]) -> bool {
        let table = self.table_start();
        data.chunks(self.block_bytes())
            .zip(blocks.clone())
            .all(|(block, i)| {
                let at = table + 4 * i;
                prefix
                    .get(at..at + 4)
                    .is_some_and(|want| want == crc32c(block).to_le_bytes())
            })
    }
}

fn check(header: &[u8], place: Place) -> u64 {
    let mut keyed = [0u8; 56 + 16];
    keyed[..56].copy_from_slice(header);
    keyed[56..64].copy_from_slice(&place.ordinal.to_le_bytes());
    keyed[64..].copy_from_slice(&place.offset.to_le_bytes());
    xxh3_64_with_seed(&keyed, place.secret)
}

/// A record to be written, before it has a place.
pub struct NewRecord<'a> {
    pub kind: Kind,
    pub flags: u8,
    pub key: u128,
    pub bucket: &'a str,
    pub object_key: &'a str,
    pub meta: &'a [u8],
    pub data: &'a [u8],
    pub validated_at: u32,
    pub version: u64,
}

impl NewRecord<'_> {
    fn name_len(&self) -> usize {
        self.bucket.len() + 1 + self.object_key.len()
    }

    pub fn len(&self) -> u64 {
        record_len(self.name_len(), self.meta.len(), self.data.len())
    }

    /// Everything before the data, with room for the header, which [`Prefix::seal`] writes when the
    /// place is known.
    pub fn prefix(&self) -> Prefix {
        let mut bytes = Vec::with_capacity((self.len() - self.data.len() as u64) as usize);
        bytes.resize(HEADER_BYTES, 0);
        bytes.put_slice(self.bucket.as_bytes());
        bytes.put_u8(0);
        bytes.put_slice(self.object_key.as_bytes());
        bytes.put_slice(self.meta);
        for block in self.data.chunks(BLOCK_BYTES) {
            bytes.put_u32_le(crc32c(block));
        }
        let header = Header {
            kind: self.kind,
            block_shift: BLOCK_SHIFT,
            flags: self.flags,
            name_len: self.name_len() as u16,
            seq: 0,
            key: self.key,
            meta_len: self.meta.len() as u32,
            data_len: self.data.len() as u32,
            validated_at: self.validated_at,
            body_crc: crc32c(&bytes[HEADER_BYTES..]),
            version: self.version,
        };
        Prefix { header, bytes }
    }
}

pub struct Prefix {
    pub header: Header,
    bytes: Vec<u8>,
}

impl Prefix {
    pub fn seal(&mut self, seq: u64, place: Place) -> &[u8] {
        self.header.seq = seq;
        self.bytes[..HEADER_BYTES].copy_from_slice(&self.header.encode(place));
        &self.bytes
    }
}

/// Whether `stored`, a record's name, is `bucket NUL key`.
pub fn name_is(stored: &[u8], bucket: &str, key: &str) -> bool {
    stored.len() == bucket.len() + 1 + key.len()
        && stored.starts_with(bucket.as_bytes())
        && stored[bucket.len()] == 0
        && stored.ends_with(key.as_bytes())
}

/// Splits a record's name.
pub fn split_name(stored: &[u8]) -> Option<(&str, &str)> {
    let at = stored.iter().position(|b| *b == 0)?;
    Some((
        std::str::from_utf8(&stored[..at]).ok()?,
        std::str::from_utf8(&stored[at + 1..]).ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(offset: u64) -> Place {
        Place {
            secret: 7,
            ordinal: 3,
            offset,
        }
    }

    #[test]
    fn a_header_is_valid_only_where_it_was_written() {
        let rec = NewRecord {
            kind: Kind::Part,
            flags: 0,
            key: 0x1234,
            bucket: "bb",
            object_key: "k/1",
            meta: b"meta",
            data: &[7; 100_000],
            validated_at: 9,
            version: 5,
        };
        let mut prefix = rec.prefix();
        let bytes = prefix.seal(42, place(64)).to_vec();
        let h = Header::decode(&bytes, place(64)).unwrap();
        assert_eq!(
            (h.seq, h.key, h.version, h.len()),
            (42, 0x1234, 5, rec.len())
        );
        assert!(h.body_is_whole(&bytes));
        assert!(name_is(&bytes[h.name_range()], "bb", "k/1"));
        assert_eq!(&bytes[h.meta_range()], b"meta");
        assert!(Header::decode(&bytes, place(128)).is_none());
        assert!(
            Header::decode(
                &bytes,
                Place {
                    secret: 8,
                    ..place(64)
                }
            )
            .is_none()
        );
        let blocks = h.blocks_of(&(70_000..70_001));
        assert_eq!(blocks, 70_000 / BLOCK_BYTES..70_000 / BLOCK_BYTES + 1);
        assert!(h.blocks_are_whole(&bytes, &blocks, &rec.data[h.bytes_of(&blocks)]));
        let mut bad = rec.data[h.bytes_of(&blocks)].to_vec();
        bad[3] ^= 1;
        assert!(!h.blocks_are_whole(&bytes, &blocks, &bad));
        for at in 0..HEADER_BYTES {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x10;
            assert!(Header::decode(&flipped, place(64)).is_none(), "byte {at}");
        }
    }
}
