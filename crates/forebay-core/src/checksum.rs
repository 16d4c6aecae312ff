//! CRC-32C (Castagnoli; RFC 3720, section 12.1), the checksum of records on the disk, of frames on
//! the wire and of TFRecords.

use crc_fast::{CrcAlgorithm, Digest};

/// The checksum of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// Extends the checksum `crc` of some bytes by the `bytes` that follow them.
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    // The register holds the complement.
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(bytes);
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A bit at a time, with the polynomial as the RFC gives it, reflected.
    fn by_the_book(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                if crc & 1 == 1 {
                    crc >> 1 ^ 0x82f6_3b78
                } else {
                    crc >> 1
                }
            })
        })
    }

    #[test]
    fn examples_of_rfc_3720() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        for (bytes, sum) in [
            (&[0; 32][..], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&ascending, 0x46dd_794e),
            (&descending, 0x113f_db5c),
        ] {
            assert_eq!(crc32c(bytes), sum);
        }
        assert_eq!(crc32c(b""), 0);
    }

    proptest! {
        #[test]
        fn whole_or_in_pieces_it_is_the_same(bytes in prop::collection::vec(any::<u8>(), 0..20_000), cut in any::<prop::sample::Index>()) {
            let (a, b) = bytes.split_at(cut.index(bytes.len() + 1));
            let whole = by_the_book(&bytes);
            prop_assert_eq!(crc32c(&bytes), whole);
            prop_assert_eq!(crc32c_append(crc32c(a), b), whole);
        }
    }
}
