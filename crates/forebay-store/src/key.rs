//! Keys of the index: 128-bit hashes of what a record is about.

use bytes::{Buf, BufMut};
use forebay_core::VersionId;
use xxhash_rust::xxh3::xxh3_128;

/// A piece of one version of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Bytes `i * CHUNK_BYTES ..` of the object.
    Chunk(u32),
    /// Data derived from the object: the first number says what kind, the second is the piece (the
    /// member index of an archive, chunks of its uncompressed form).
    Aux(u8, u32),
}

pub const PART_META_BYTES: usize = 6;

impl Part {
    pub(crate) fn encode(self) -> [u8; PART_META_BYTES] {
        let (tag, kind, number) = match self {
            Part::Chunk(i) => (0, 0, i),
            Part::Aux(kind, i) => (1, kind, i),
        };
        let mut out = [0; PART_META_BYTES];
        let mut b = &mut out[..];
        b.put_u8(tag);
        b.put_u8(kind);
        b.put_u32_le(number);
        out
    }

    pub(crate) fn decode(mut b: &[u8]) -> Option<Part> {
        if b.len() != PART_META_BYTES {
            return None;
        }
        match (b.get_u8(), b.get_u8(), b.get_u32_le()) {
            (0, 0, i) => Some(Part::Chunk(i)),
            (1, kind, i) => Some(Part::Aux(kind, i)),
            _ => None,
        }
    }
}

/// The key of a part; `name` is the hash of the name, which is the key of its head.
pub fn part_key(name: u128, version: VersionId, part: Part) -> u128 {
    let mut bytes = [0u8; 16 + 8 + PART_META_BYTES];
    bytes[..16].copy_from_slice(&name.to_le_bytes());
    bytes[16..24].copy_from_slice(&version.0.to_le_bytes());
    bytes[24..].copy_from_slice(&part.encode());
    xxh3_128(&bytes)
}

/// The key of the record in directory `dir` that pins a name.
pub fn pin_key(name: u128, dir: u64) -> u128 {
    let mut bytes = [0u8; 16 + 8 + 3];
    bytes[..16].copy_from_slice(&name.to_le_bytes());
    bytes[16..24].copy_from_slice(&dir.to_le_bytes());
    bytes[24..].copy_from_slice(b"pin");
    xxh3_128(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_read_as_they_were_written() {
        for part in [Part::Chunk(0), Part::Chunk(u32::MAX), Part::Aux(7, 9)] {
            assert_eq!(Part::decode(&part.encode()), Some(part));
        }
        assert_eq!(Part::decode(&[2; PART_META_BYTES]), None);
        assert_eq!(Part::decode(&[0; 3]), None);
    }

    #[test]
    fn keys_tell_parts_apart() {
        let v = VersionId(1);
        let keys = [
            part_key(1, v, Part::Chunk(0)),
            part_key(1, v, Part::Chunk(1)),
            part_key(1, v, Part::Aux(0, 0)),
            part_key(1, v, Part::Aux(1, 0)),
            part_key(2, v, Part::Chunk(0)),
            part_key(1, VersionId(2), Part::Chunk(0)),
            pin_key(1, 1),
        ];
        assert_eq!(
            keys.iter().collect::<std::collections::HashSet<_>>().len(),
            keys.len()
        );
    }
}
