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
    /// Rows of a file of rows, decoded: some columns of one block, in pieces. They are made again
    /// when they are gone, so a pin does not hold them.
    Rows {
        /// A hash of the columns, and of the form in which they lie.
        columns: u64,
        /// The block, as its file counts them.
        block: u32,
        /// The piece.
        piece: u32,
    },
}

/// The encoded length of a chunk's part.
pub const PART_META_BYTES: usize = 6;
const ROWS_META_BYTES: usize = 17;

/// An encoded part.
pub(crate) struct PartMeta {
    bytes: [u8; ROWS_META_BYTES],
    len: usize,
}

impl std::ops::Deref for PartMeta {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Part {
    pub(crate) fn encode(self) -> PartMeta {
        let mut bytes = [0; ROWS_META_BYTES];
        let mut b = &mut bytes[..];
        let mut short = |tag, kind, number| {
            b.put_u8(tag);
            b.put_u8(kind);
            b.put_u32_le(number);
            PART_META_BYTES
        };
        let len = match self {
            Part::Chunk(i) => short(0, 0, i),
            Part::Aux(kind, i) => short(1, kind, i),
            Part::Rows {
                columns,
                block,
                piece,
            } => {
                b.put_u8(2);
                b.put_u64_le(columns);
                b.put_u32_le(block);
                b.put_u32_le(piece);
                ROWS_META_BYTES
            }
        };
        PartMeta { bytes, len }
    }

    pub(crate) fn decode(mut b: &[u8]) -> Option<Part> {
        match (b.len(), b.try_get_u8().ok()?) {
            (PART_META_BYTES, 0) if b.get_u8() == 0 => Some(Part::Chunk(b.get_u32_le())),
            (PART_META_BYTES, 1) => Some(Part::Aux(b.get_u8(), b.get_u32_le())),
            (ROWS_META_BYTES, 2) => Some(Part::Rows {
                columns: b.get_u64_le(),
                block: b.get_u32_le(),
                piece: b.get_u32_le(),
            }),
            _ => None,
        }
    }

    /// Whether a pin on the object's name holds it.
    pub(crate) fn is_held_by_pins(self) -> bool {
        !matches!(self, Part::Rows { .. })
    }

    /// Whether it is not bytes of the object.
    pub(crate) fn is_derived(self) -> bool {
        !matches!(self, Part::Chunk(_))
    }
}

/// The key of a part; `name` is the hash of the name, which is the key of its head.
pub fn part_key(name: u128, version: VersionId, part: Part) -> u128 {
    let mut bytes = [0u8; 16 + 8 + ROWS_META_BYTES];
    bytes[..16].copy_from_slice(&name.to_le_bytes());
    bytes[16..24].copy_from_slice(&version.0.to_le_bytes());
    let part = part.encode();
    let end = 24 + part.len();
    bytes[24..end].copy_from_slice(&part);
    xxh3_128(&bytes[..end])
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
        let rows = |columns, block, piece| Part::Rows {
            columns,
            block,
            piece,
        };
        for part in [
            Part::Chunk(0),
            Part::Chunk(u32::MAX),
            Part::Aux(7, 9),
            rows(1, 2, 3),
            rows(u64::MAX, u32::MAX, u32::MAX),
        ] {
            assert_eq!(Part::decode(&part.encode()), Some(part));
        }
        assert_eq!(Part::decode(&[2; PART_META_BYTES]), None);
        assert_eq!(Part::decode(&[0; 3]), None);
        assert_eq!(Part::decode(&[2; ROWS_META_BYTES - 1]), None);
        assert_eq!(Part::decode(&[]), None);
    }

    #[test]
    fn keys_tell_parts_apart() {
        let v = VersionId(1);
        let rows = |columns, block, piece| Part::Rows {
            columns,
            block,
            piece,
        };
        let keys = [
            part_key(1, v, Part::Chunk(0)),
            part_key(1, v, Part::Chunk(1)),
            part_key(1, v, Part::Aux(0, 0)),
            part_key(1, v, Part::Aux(1, 0)),
            part_key(2, v, Part::Chunk(0)),
            part_key(1, VersionId(2), Part::Chunk(0)),
            part_key(1, v, rows(0, 0, 0)),
            part_key(1, v, rows(1, 0, 0)),
            part_key(1, v, rows(0, 1, 0)),
            part_key(1, v, rows(0, 0, 1)),
            pin_key(1, 1),
        ];
        assert_eq!(
            keys.iter().collect::<std::collections::HashSet<_>>().len(),
            keys.len()
        );
    }
}
