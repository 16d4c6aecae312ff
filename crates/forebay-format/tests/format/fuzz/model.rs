//! Slow and simple readers, written independently of the crate's: the whole archive is in memory,
//! nothing is fed, and memory is not limited.

use forebay_format::Storage;
use lz4_flex::frame::FrameDecoder;
use std::io::Read;

/// A member of a tar.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    name: String,
    storage: Storage,
    offset: u64,
    size: u64,
    mtime: i64,
}

impl Member {
    pub fn of(m: &forebay_format::Member<'_>) -> Self {
        Self {
            name: m.name.to_owned(),
            storage: m.extent.storage,
            offset: m.extent.offset,
            size: m.extent.size,
            mtime: m.mtime_secs,
        }
    }
}

#[derive(Clone, Default)]
struct Pax {
    path: Option<Vec<u8>>,
    size: Option<u64>,
    mtime: Option<i64>,
    sparse_name: Option<Vec<u8>>,
    sparse: bool,
}

/// The members of a tar; `None` if anything is wrong with it.
pub fn tar(bytes: &[u8]) -> Option<Vec<Member>> {
    let (mut at, mut members) = (0usize, Vec::new());
    let (mut long_name, mut pax, mut global): (Option<Vec<u8>>, Option<Pax>, Pax) =
        Default::default();
    loop {
        let ended = at == bytes.len() || {
            let block = bytes.get(at..at + 512)?;
            // A block of zeros at the end, or two anywhere.
            let zeros = |b: &[u8]| b.iter().all(|&b| b == 0);
            zeros(block)
                && (at + 512 == bytes.len()
                    || if zeros(bytes.get(at + 512..at + 1024)?) {
                        true
                    } else {
                        return None;
                    })
        };
        if ended {
            return (long_name.is_none() && pax.is_none()).then_some(members);
        }
        let h = &bytes[at..at + 512];
        let sum: i64 = h
            .iter()
            .enumerate()
            .map(|(i, &b)| {
                if (148..156).contains(&i) {
                    32
                } else {
                    i64::from(b)
                }
            })
            .sum();
        let signed: i64 = h
            .iter()
            .enumerate()
            .map(|(i, &b)| {
                if (148..156).contains(&i) {
                    32
                } else {
                    i64::from(b as i8)
                }
            })
            .sum();
        let stored = number(&h[148..156])?;
        if stored != i128::from(sum) && stored != i128::from(signed)
            || !(0..1 << 32).contains(&stored)
        {
            return None;
        }
        let size = number(&h[124..136]).filter(|n| (0..1 << 63).contains(n))? as usize;
        let data = at + 512;
        let whole = |data: usize, len: usize| {
            (len <= bytes.len().checked_sub(data)?).then(|| data + len.div_ceil(512) * 512)
        };
        if b"LKxXg".contains(&h[156]) {
            if h[156] != b'K' && size > 1 << 20 {
                return None;
            }
            at = whole(data, size)?;
            let value = &bytes[data..data + size];
            match h[156] {
                _ if size == 0 => {}
                b'K' => {}
                b'L' => long_name = Some(until_nul(value)),
                b'g' => records(value, &mut global)?,
                _ => records(value, pax.get_or_insert_default())?,
            }
            continue;
        }
        let (p, long) = (pax.take().unwrap_or_default(), long_name.take());
        let prefix_end = if &h[508..512] == b"tar\0" { 476 } else { 500 };
        let prefix = if &h[257..263] == b"ustar\0" {
            until_nul(&h[345..prefix_end])
        } else {
            Vec::new()
        };
        let own = if prefix.is_empty() {
            until_nul(&h[..100])
        } else {
            [prefix, b"/".to_vec(), until_nul(&h[..100])].concat()
        };
        let name = [
            p.sparse_name,
            global.sparse_name.clone(),
            p.path,
            long,
            global.path.clone(),
        ]
        .into_iter()
        .flatten()
        .next()
        .unwrap_or(own);
        let name = String::from_utf8_lossy(&name).into_owned();
        let size = p.size.or(global.size).unwrap_or(size as u64);
        let storage = match h[156] {
            0 if until_nul(&h[..100]).ends_with(b"/") => Storage::Directory,
            _ if p.sparse || global.sparse => Storage::Sparse,
            0 | b'0' | b'7' => Storage::Stored,
            b'1' => Storage::HardLink,
            b'2' => Storage::SymbolicLink,
            b'3' | b'4' | b'6' => Storage::Device,
            b'5' => Storage::Directory,
            b'S' => Storage::Sparse,
            _ => Storage::Special,
        };
        let size = if matches!(
            storage,
            Storage::Stored | Storage::Sparse | Storage::Special
        ) {
            size
        } else {
            0
        };
        let mut offset = data;
        if h[156] == b'S' && h[482] != 0 {
            while bytes.get(offset..offset + 512)?[504] != 0 {
                offset += 512;
            }
            offset += 512;
        }
        let mtime = number(&h[136..148])
            .and_then(|n| i64::try_from(n).ok())
            .unwrap_or(0);
        let mtime = p.mtime.or(global.mtime).unwrap_or(mtime);
        if name.len() > 4096 {
            return None;
        }
        at = whole(offset, usize::try_from(size).ok()?)?;
        members.push(Member {
            name,
            storage,
            offset: offset as u64,
            size,
            mtime,
        });
    }
}

fn until_nul(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().copied().take_while(|&b| b != 0).collect()
}

fn number(field: &[u8]) -> Option<i128> {
    if field[0] >= 128 {
        // Base 256, in two's complement of seven bits and the bytes that follow.
        let bits = 8 * field.len() as u32 - 1;
        let raw = field.iter().enumerate().fold(0i128, |n, (i, &b)| {
            n * 256 + i128::from(if i == 0 { b & 127 } else { b })
        });
        return Some(if raw >= 1 << (bits - 1) {
            raw - (1 << bits)
        } else {
            raw
        });
    }
    let text: Vec<u8> = field
        .iter()
        .copied()
        .skip_while(|&b| b == b' ' || b == 0)
        .take_while(|&b| b != b' ' && b != 0)
        .collect();
    if text.is_empty() {
        Some(0)
    } else {
        text.iter()
            .all(|b| (b'0'..=b'7').contains(b))
            .then(|| i128::from_str_radix(std::str::from_utf8(&text).ok()?, 8).ok())?
    }
}

fn records(mut bytes: &[u8], pax: &mut Pax) -> Option<()> {
    while !bytes.is_empty() && bytes[0] != 0 {
        let digits = bytes
            .iter()
            .position(|&b| b == b' ')
            .filter(|&n| (1..20).contains(&n))?;
        let unsigned = |text: &[u8]| -> Option<u64> {
            let text = std::str::from_utf8(text).ok()?;
            (!text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()))
                .then(|| text.parse().ok())?
        };
        let len = usize::try_from(unsigned(&bytes[..digits])?)
            .ok()
            .filter(|&n| n > digits + 1 && n <= bytes.len())?;
        let (record, rest) = bytes.split_at(len);
        bytes = rest;
        if record[len - 1] != b'\n' {
            return None;
        }
        let body = &record[digits + 1..len - 1];
        let equals = body.iter().position(|&b| b == b'=').filter(|&n| n > 0)?;
        let (key, value) = (&body[..equals], &body[equals + 1..]);
        let given = (!value.is_empty()).then(|| value.to_vec());
        pax.sparse |= key.starts_with(b"GNU.sparse.");
        match key {
            b"path" => pax.path = given,
            b"GNU.sparse.name" => pax.sparse_name = given,
            b"size" if value.is_empty() => pax.size = None,
            b"size" => pax.size = Some(unsigned(value).filter(|&n| n < 1 << 63)?),
            b"mtime" => pax.mtime = given.and_then(|v| floor(std::str::from_utf8(&v).ok()?)),
            _ => {}
        }
    }
    Some(())
}

fn floor(text: &str) -> Option<i64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let n: i64 = whole.parse().ok()?;
    if text.starts_with('-') && fraction.chars().any(|c| c != '0') {
        n.checked_sub(1)
    } else {
        Some(n)
    }
}

/// A member of a zip, without its name.
#[derive(Clone, Debug, PartialEq)]
pub struct ZipMember {
    size: u64,
    stored_size: u64,
    offset: u64,
    crc32: Option<u32>,
}

impl ZipMember {
    pub fn of(m: &forebay_format::Member<'_>) -> Self {
        let e = m.extent;
        Self {
            size: e.size,
            stored_size: e.stored_size,
            offset: e.offset,
            crc32: e.crc32,
        }
    }
}

fn le(bytes: &[u8], at: usize, width: usize) -> Option<u64> {
    bytes
        .get(at..at + width)
        .map(|b| b.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
}

/// The members of a zip that is assumed to be valid.
pub fn zip(bytes: &[u8]) -> Option<Vec<ZipMember>> {
    let from = bytes.len().saturating_sub(22 + 65_535 + 76);
    let ends: Vec<usize> = (from..bytes.len().checked_sub(21)?)
        .rev()
        .filter(|&i| bytes[i..].starts_with(b"PK\x05\x06"))
        .collect();
    let comment_end = |i: usize| i + 22 + le(bytes, i + 20, 2).unwrap_or(0) as usize;
    let end = *ends
        .iter()
        .find(|&&i| comment_end(i) == bytes.len())
        .or_else(|| ends.iter().find(|&&i| comment_end(i) <= bytes.len()))?;
    let locator = end
        .checked_sub(20)
        .filter(|&l| l >= from && bytes[l..].starts_with(b"PK\x06\x07"));
    let (len, offset, directory_end) = match locator {
        Some(locator) => {
            let usual = locator
                .checked_sub(56)
                .filter(|&r| r >= from && bytes[r..].starts_with(b"PK\x06\x06"));
            let record = usual.or_else(|| le(bytes, locator + 8, 8)?.try_into().ok())?;
            (
                le(bytes, record + 40, 8)?,
                le(bytes, record + 48, 8)?,
                record as u64,
            )
        }
        None => (le(bytes, end + 12, 4)?, le(bytes, end + 16, 4)?, end as u64),
    };
    let start = directory_end.checked_sub(len)?;
    let before = start.checked_sub(offset)?;
    let (mut at, mut members) = (start as usize, Vec::new());
    while (at as u64) < directory_end && bytes[at..].starts_with(b"PK\x01\x02") {
        let [name, extra, comment] =
            [28, 30, 32].map(|field| le(bytes, at + field, 2).unwrap_or(0) as usize);
        let mut fields = [24, 20, 42].map(|field| le(bytes, at + field, 4).unwrap_or(0));
        // Without such a field, the number is literal.
        if let Some(mut wide) = zip64(&bytes[at + 46 + name..at + 46 + name + extra]) {
            for field in fields.iter_mut().filter(|f| **f == u64::from(u32::MAX)) {
                *field = le(wide, 0, 8)?;
                wide = &wide[8..];
            }
        }
        let [size, stored_size, offset] = fields;
        members.push(ZipMember {
            size,
            stored_size,
            offset: offset + before,
            crc32: le(bytes, at + 16, 4).map(|n| n as u32),
        });
        at += 46 + name + extra + comment;
    }
    Some(members)
}

fn zip64(mut extra: &[u8]) -> Option<&[u8]> {
    loop {
        let (tag, len) = (le(extra, 0, 2)?, le(extra, 2, 2)? as usize);
        let data = extra.get(4..4 + len)?;
        if tag == 1 {
            return Some(data);
        }
        extra = &extra[4 + len..];
    }
}

/// What another implementation makes of a stream of one frame, if it reads it.
pub fn lz4(bytes: &[u8], max: u64) -> Option<Vec<u8>> {
    let frames = bytes
        .windows(4)
        .filter(|w| *w == b"\x04\x22\x4d\x18")
        .count();
    let skipped = bytes
        .windows(4)
        .any(|w| w[0] & 0xf0 == 0x50 && w[1..] == *b"\x2a\x4d\x18");
    if frames != 1 || skipped {
        return None;
    }
    let (mut out, mut decoder) = (Vec::new(), FrameDecoder::new(bytes));
    // A block without bytes looks like the end: it is the end only if no more input is consumed.
    loop {
        let left = decoder.get_ref().len();
        let read = decoder
            .by_ref()
            .take((max + 1).saturating_sub(out.len() as u64))
            .read_to_end(&mut out)
            .ok()?;
        if read == 0 && decoder.get_ref().len() == left {
            return Some(out);
        }
    }
}
