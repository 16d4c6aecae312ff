//! One 512-byte tar header, its numbers and its checksum.

use forebay_core::{Error, Result};

/// What a block is at a place where a header is expected.
pub(super) enum Block<'a> {
    Zero,
    Header(Header<'a>),
}

pub(super) struct Header<'a> {
    pub type_flag: u8,
    pub prefix: &'a [u8],
    pub name: &'a [u8],
    /// As in the header; a PAX header may override it.
    pub size: u64,
    pub mtime_secs: i64,
    /// An old GNU sparse header whose map continues in the next block.
    pub sparse_map_continues: bool,
}

/// Where the last block of a GNU sparse map says whether another follows.
const SPARSE_CONTINUES_IN_HEADER: usize = 482;
const SPARSE_CONTINUES_IN_BLOCK: usize = 504;

/// Parses the block at offset `at` of the archive.
pub(super) fn parse(block: &[u8; 512], at: u64) -> Result<Block<'_>> {
    if block.iter().all(|&b| b == 0) {
        return Ok(Block::Zero);
    }
    let field = |from: usize, to: usize| &block[from..to];
    let stored = number(field(148, 156)).and_then(|n| u32::try_from(n).ok());
    let unsigned = checksum(block);
    if stored.is_none_or(|s| s != unsigned && i64::from(s) != signed_checksum(block)) {
        return Err(Error::corrupt(format!(
            "the block at offset {at} is not a tar header: its checksum does not match"
        )));
    }
    let type_flag = block[156];
    let ustar = field(257, 263) == b"ustar\0";
    let prefix = match ustar {
        true if field(508, 512) == b"tar\0" => text(field(345, 476)),
        true => text(field(345, 500)),
        false => b"",
    };
    let size = match number(field(124, 136)) {
        Some(n) if (0..=i128::from(i64::MAX)).contains(&n) => n as u64,
        Some(n) => {
            return Err(Error::corrupt(format!(
                "the tar header at offset {at} announces {n} bytes"
            )));
        }
        None => {
            return Err(Error::corrupt(format!(
                "the size in the tar header at offset {at} is not a number"
            )));
        }
    };
    // An unreadable time must not cost anybody the data.
    let mtime_secs = number(field(136, 148))
        .and_then(|n| i64::try_from(n).ok())
        .unwrap_or(0);
    Ok(Block::Header(Header {
        type_flag,
        prefix,
        name: text(field(0, 100)),
        size,
        mtime_secs,
        sparse_map_continues: type_flag == b'S' && block[SPARSE_CONTINUES_IN_HEADER] != 0,
    }))
}

/// Whether a block of a GNU sparse map is followed by another.
pub(super) fn sparse_map_goes_on(block: &[u8; 512]) -> bool {
    block[SPARSE_CONTINUES_IN_BLOCK] != 0
}

/// The checksum of a header as POSIX defines it. Its own field counts as spaces. Computed for each
/// entry of a batch: a sum over one slice that cannot overflow is vectorized, others are not.
pub(super) fn checksum(block: &[u8; 512]) -> u32 {
    let sum = |bytes: &[u8]| bytes.iter().fold(0u32, |s, &b| s.wrapping_add(b.into()));
    sum(block) - sum(&block[148..156]) + 8 * 32
}

/// The same with signed bytes, as some old programs computed it.
fn signed_checksum(block: &[u8; 512]) -> i64 {
    let sum = |bytes: &[u8]| bytes.iter().map(|&b| i64::from(b as i8)).sum::<i64>();
    sum(block) - sum(&block[148..156]) + 8 * 32
}

/// Up to the first NUL.
fn text(field: &[u8]) -> &[u8] {
    field.split(|&b| b == 0).next().unwrap_or_default()
}

/// Octal with spaces or NULs around it (an empty field is 0), or GNU's base-256, which may be
/// negative.
fn number(field: &[u8]) -> Option<i128> {
    if field[0] & 0x80 != 0 {
        // Two's complement in all bits but the top one, which marks the form; the bit below it is
        // the sign. At most 12 bytes, so it fits.
        let first = i128::from((field[0] << 1) as i8 >> 1);
        return Some(
            field[1..]
                .iter()
                .fold(first, |n, &b| (n << 8) | i128::from(b)),
        );
    }
    let padding = |b: &u8| matches!(b, b' ' | 0);
    let start = field
        .iter()
        .position(|b| !padding(b))
        .unwrap_or(field.len());
    let digits = &field[start..];
    let end = digits.iter().position(padding).unwrap_or(digits.len());
    digits[..end].iter().try_fold(0i128, |n, &b| {
        matches!(b, b'0'..=b'7').then(|| n * 8 + i128::from(b - b'0'))
    })
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn numbers_in_all_their_forms() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"   644 \0"), Some(0o644));
        assert_eq!(number(b"77777777777\0"), Some(0o77777777777));
        assert_eq!(number(b"777777777777"), Some(0o777777777777));
        assert_eq!(number(&[0; 12]), Some(0));
        assert_eq!(number(b"12x\0"), None);
        assert_eq!(number(b"-1\0"), None);
        assert_eq!(
            number(&[0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0]),
            Some(8 << 30)
        );
        assert_eq!(number(&[0xff; 12]), Some(-1));
        assert_eq!(
            number(&[
                0x80, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff
            ]),
            Some((1 << 88) - 1)
        );
    }
}
