//! Valid archives of every shape to start from, and repairs that make mutated ones consistent
//! again.

use crate::harness::Rng;
use flate2::{
    Compress, Compression, Crc, Decompress, FlushDecompress, GzBuilder, write::GzEncoder,
};
use forebay_format::{ArchiveKind, ArchiveWriter};
use lz4_flex::frame::{BlockMode, BlockSize, FrameEncoder, FrameInfo};
use std::{hash::Hasher, io::Write};
use twox_hash::XxHash32;

fn written(kind: ArchiveKind) -> Vec<u8> {
    let (mut out, mut writer) = (Vec::new(), ArchiveWriter::new(kind));
    let long = "long/".repeat(60) + "name";
    for (name, bytes) in [
        ("a", &b"alpha"[..]),
        ("./b.jpg", &[7; 600]),
        (&long, b"x"),
        ("p/ü", b""),
        ("a", b"again"),
    ] {
        writer.entry(name, bytes, 1_700_000_000, &mut out).unwrap();
    }
    writer.finish(&mut out).unwrap();
    out
}

/// A header and its data. `magic`: ustar's, GNU's, or none.
fn tar_entry(
    name: &str,
    type_flag: u8,
    magic: &[u8],
    data: &[u8],
    edit: impl FnOnce(&mut [u8]),
) -> Vec<u8> {
    let mut h = vec![0; 512];
    h[..name.len()].copy_from_slice(name.as_bytes());
    h[100..108].copy_from_slice(b"0000644\0");
    h[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
    h[136..148].copy_from_slice(b"14524770400\0");
    h[156] = type_flag;
    h[257..257 + magic.len()].copy_from_slice(magic);
    edit(&mut h);
    fix_checksum(&mut h);
    h.extend_from_slice(data);
    h.resize(h.len().next_multiple_of(512), 0);
    h
}

fn fix_checksum(header: &mut [u8]) {
    header[148..156].fill(b' ');
    let sum: u32 = header[..512].iter().map(|&b| u32::from(b)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

fn pax(records: &[(&str, &str)]) -> Vec<u8> {
    records
        .iter()
        .flat_map(|(key, value)| record(format!("{key}={value}").as_bytes()))
        .collect()
}

/// A record preceded by its own length.
fn record(body: &[u8]) -> Vec<u8> {
    let len = (0..)
        .find(|n: &usize| format!("{n} ").len() + body.len() + 1 == *n)
        .unwrap();
    [format!("{len} ").as_bytes(), body, b"\n"].concat()
}

pub fn tars() -> Vec<Vec<u8>> {
    let (ustar, gnu) = (b"ustar\x0000", b"ustar  \0");
    let file = |name: &str, data: &[u8]| tar_entry(name, b'0', ustar, data, |_| {});
    let end = vec![0; 1024];
    let prefix = |h: &mut [u8]| h[345..350].copy_from_slice(b"a/b/c");
    let star = |h: &mut [u8]| h[508..512].copy_from_slice(b"tar\0");
    let base256 =
        |h: &mut [u8]| h[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5]);
    let extended = [
        ("path", "of/pax"),
        ("mtime", "-1.5"),
        ("size", "5"),
        ("comment", "x=y"),
    ];
    let sparse = [("GNU.sparse.major", "1"), ("GNU.sparse.name", "holes")];
    vec![
        written(ArchiveKind::Tar),
        [
            tar_entry("d/", 0, b"", b"", |_| {}),
            tar_entry("old", 0, b"", b"v7", |_| {}),
            end.clone(),
        ]
        .concat(),
        [
            tar_entry("f", b'0', ustar, &[9; 700], prefix),
            tar_entry("f", b'0', ustar, b"", star),
            file("last", b""),
        ]
        .concat(),
        [
            tar_entry("././@LongLink", b'L', gnu, b"a long name\0", |_| {}),
            tar_entry("a lon", b'0', gnu, b"data", |_| {}),
            end.clone(),
        ]
        .concat(),
        [
            tar_entry("././@LongLink", b'K', gnu, b"target\0", |_| {}),
            tar_entry("link", b'2', gnu, b"", |_| {}),
            end.clone(),
        ]
        .concat(),
        [
            tar_entry("x", b'x', ustar, &pax(&extended), |_| {}),
            file("own", b"12345"),
            file("next", b"6"),
            end.clone(),
        ]
        .concat(),
        [
            tar_entry(
                "g",
                b'g',
                ustar,
                &pax(&[("mtime", "7"), ("path", "all")]),
                |_| {},
            ),
            file("own", b"1"),
            vec![0; 512],
        ]
        .concat(),
        [
            tar_entry("x", b'X', ustar, &pax(&sparse), |_| {}),
            file("packed", &[1; 513]),
            end.clone(),
        ]
        .concat(),
        [
            tar_entry("holes", b'S', gnu, &[0; 1024], |h| h[482] = 1),
            vec![0; 512],
            tar_entry("big", b'0', gnu, b"12345", base256),
            tar_entry("label", b'V', gnu, b"", |_| {}),
            tar_entry("dump", b'D', gnu, b"Yfile\0\0", |_| {}),
            end.clone(),
        ]
        .concat(),
        [
            tar_entry("h", b'1', ustar, b"", |h| {
                h[124..135].copy_from_slice(b"00000000777")
            }),
            tar_entry("p", b'6', ustar, b"", |_| {}),
            end,
        ]
        .concat(),
        vec![0; 1024],
        Vec::new(),
    ]
}

/// Fields of headers, PAX lengths and checksums.
pub fn shape_tar(rng: &mut Rng, tar: &mut [u8]) {
    let headers: Vec<usize> = (0..tar.len() / 512)
        .map(|b| b * 512)
        .filter(|&b| {
            &tar[b + 257..b + 262] == b"ustar" || tar[b + 154] == 0 && tar[b + 155] == b' '
        })
        .collect();
    if let Some(&at) = (!headers.is_empty()).then(|| &headers[rng.below(headers.len())]) {
        if rng.below(2) == 0 {
            let (field, len) = [
                (0, 100),
                (124, 12),
                (124, 12),
                (136, 12),
                (156, 1),
                (156, 1),
                (257, 8),
                (345, 131),
                (482, 1),
                (508, 4),
            ][rng.below(10)];
            let value: &[u8] = [
                &b"0"[..],
                b"5",
                b"7",
                b"L",
                b"K",
                b"x",
                b"X",
                b"g",
                b"S",
                b"D",
                b"\0",
                b"d/",
                b"00000001000\0",
                b"00000000005\0",
            ][rng.below(14)];
            let from = at + field + if rng.below(3) == 0 { rng.below(len) } else { 0 };
            let n = value.len().min(at + field + len - from);
            tar[from..from + n].copy_from_slice(&value[..n]);
        }
        if matches!(tar[at + 156], b'x' | b'X' | b'g')
            && at + 1024 <= tar.len()
            && rng.below(2) == 0
        {
            // Lengths of records that fit, both single and total.
            let used = tar[at + 512..at + 1024]
                .iter()
                .position(|&b| b == 0)
                .unwrap_or(512);
            let lines: Vec<&[u8]> = tar[at + 512..at + 512 + used]
                .split(|&b| b == b'\n')
                .filter(|l| !l.is_empty())
                .collect();
            let mut again: Vec<u8> = lines
                .iter()
                .flat_map(|l| record(&l[l.iter().position(|&b| b == b' ').map_or(0, |s| s + 1)..]))
                .collect();
            again.truncate(512);
            tar[at + 124..at + 136].copy_from_slice(format!("{:011o}\0", again.len()).as_bytes());
            again.resize(512, 0);
            tar[at + 512..at + 1024].copy_from_slice(&again);
        }
    }
    if rng.below(10) > 0 {
        headers
            .iter()
            .for_each(|&at| fix_checksum(&mut tar[at..at + 512]));
    }
}

#[derive(Default)]
struct Zip {
    out: Vec<u8>,
    directory: Vec<u8>,
    entries: u16,
}

impl Zip {
    fn entry(&mut self, name: &[u8], deflate: bool, flags: u16, extra: &[u8], data: &[u8]) {
        let mut stored = data.to_vec();
        if deflate {
            stored = Vec::with_capacity(data.len() + 100);
            Compress::new(Compression::new(6), false)
                .compress_vec(data, &mut stored, flate2::FlushCompress::Finish)
                .unwrap();
        }
        let wide = extra.first() == Some(&1);
        let crc = crc32fast::hash(data);
        let local = if flags & 8 != 0 {
            [0; 3]
        } else {
            [crc, stored.len() as u32, data.len() as u32]
        };
        let offset = self.out.len() as u32;
        let method = if deflate { 8u16 } else { 0 };
        let fixed = |out: &mut Vec<u8>, [crc, stored, size]: [u32; 3], extra: u16| {
            [20, flags, method, 0x6000, 0x5821]
                .iter()
                .for_each(|n: &u16| out.extend(n.to_le_bytes()));
            [crc, stored, size]
                .iter()
                .for_each(|n| out.extend(n.to_le_bytes()));
            [name.len() as u16, extra]
                .iter()
                .for_each(|n| out.extend(n.to_le_bytes()));
        };
        self.out.extend(b"PK\x03\x04");
        fixed(&mut self.out, local, 0);
        self.out.extend(name);
        self.out.extend(&stored);
        if flags & 8 != 0 {
            self.out.extend(b"PK\x07\x08");
            [crc, stored.len() as u32, data.len() as u32]
                .iter()
                .for_each(|n| self.out.extend(n.to_le_bytes()));
        }
        let mut own = extra.to_vec();
        if wide {
            own = [
                &[1, 0, 16, 0][..],
                &(data.len() as u64).to_le_bytes(),
                &(stored.len() as u64).to_le_bytes(),
            ]
            .concat();
        }
        let sizes = if wide {
            [crc, u32::MAX, u32::MAX]
        } else {
            [crc, stored.len() as u32, data.len() as u32]
        };
        self.directory.extend(b"PK\x01\x02\x14\x03");
        fixed(&mut self.directory, sizes, own.len() as u16);
        self.directory.extend([0; 8]);
        self.directory.extend((0o100_644u32 << 16).to_le_bytes());
        self.directory.extend(offset.to_le_bytes());
        self.directory.extend(name);
        self.directory.extend(own);
        self.entries += 1;
    }

    fn finish(mut self, zip64: bool, comment: &[u8]) -> Vec<u8> {
        let (start, len) = (self.out.len() as u64, self.directory.len() as u64);
        self.out.extend(&self.directory);
        if zip64 {
            let entries = u64::from(self.entries);
            self.out.extend(b"PK\x06\x06");
            self.out.extend(44u64.to_le_bytes());
            self.out.extend([45, 3, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            [entries, entries, len, start]
                .iter()
                .for_each(|n| self.out.extend(n.to_le_bytes()));
            self.out.extend(b"PK\x06\x07\0\0\0\0");
            self.out.extend((start + len).to_le_bytes());
            self.out.extend(1u32.to_le_bytes());
        }
        self.out.extend(b"PK\x05\x06\0\0\0\0");
        [self.entries; 2]
            .iter()
            .for_each(|n| self.out.extend(n.to_le_bytes()));
        let (len, start) = if zip64 {
            (u32::MAX, u32::MAX)
        } else {
            (len as u32, start as u32)
        };
        [len, start]
            .iter()
            .for_each(|n| self.out.extend(n.to_le_bytes()));
        self.out.extend((comment.len() as u16).to_le_bytes());
        self.out.extend(comment);
        self.out
    }
}

pub fn zips() -> Vec<Vec<u8>> {
    let mut all = vec![written(ArchiveKind::Zip)];
    for (zip64, comment) in [(false, &b""[..]), (true, b"a comment")] {
        let mut zip = Zip::default();
        zip.entry(b"text", true, 0, b"", &b"forebay ".repeat(300));
        zip.entry(b"streamed", true, 8, b"", &[3; 5000]);
        zip.entry(b"caf\x82", false, 0, b"UT\x05\0\x01\0\0\0\x60", b"stored");
        zip.entry("ü".as_bytes(), false, 1 << 11, &[1], b"wide");
        zip.entry(b"dir/", false, 0, b"\xfe\xca\x02\0ab", b"");
        zip.entry(b"none", true, 0, b"", b"");
        zip.entry(b"secret", false, 1, b"", b"encrypted");
        let zip = zip.finish(zip64, comment);
        // Offsets are relative to the end of what precedes an archive.
        all.push([b"#!/bin/sh\n", &zip[..]].concat());
        all.push(zip);
    }
    all.push(Zip::default().finish(false, b""));
    all
}

/// Fields of entries, and an end record that fits the rest.
pub fn shape_zip(rng: &mut Rng, zip: &mut [u8]) {
    let places = |zip: &[u8], signature: &[u8]| -> Vec<usize> {
        (0..zip.len())
            .filter(|&i| zip[i..].starts_with(signature))
            .collect()
    };
    let entries = places(zip, b"PK\x01\x02");
    if rng.below(2) == 0 && !entries.is_empty() {
        let at = entries[rng.below(entries.len())];
        let at = at + [5, 8, 10, 16, 20, 24, 28, 30, 34, 38, 41, 42][rng.below(12)];
        let value = [
            0u32,
            1,
            8,
            0xffff,
            u32::MAX,
            1 << 11,
            100,
            rng.next() as u32,
        ][rng.below(8)]
        .to_le_bytes();
        let width = [1, 2, 4][rng.below(3)];
        if let Some(field) = zip.get_mut(at..at + width) {
            field.copy_from_slice(&value[..width]);
        }
    }
    if let (Some(&end), Some(&start), true) = (
        places(zip, b"PK\x05\x06").last(),
        entries.first(),
        rng.below(4) > 0,
    ) && end + 22 <= zip.len()
        && end > start
        && &zip[end.saturating_sub(20)..][..4] != b"PK\x06\x07"
    {
        let count = (entries.iter().filter(|&&e| e < end).count() as u16).to_le_bytes();
        zip[end + 8..end + 10].copy_from_slice(&count);
        zip[end + 10..end + 12].copy_from_slice(&count);
        zip[end + 12..end + 16].copy_from_slice(&((end - start) as u32).to_le_bytes());
        let before = if zip.starts_with(b"#!") { 10 } else { 0 };
        zip[end + 16..end + 20]
            .copy_from_slice(&(start.saturating_sub(before) as u32).to_le_bytes());
    }
}

pub fn gzips() -> Vec<Vec<u8>> {
    let text = b"forebay ".repeat(500);
    let gz = |level: u32, data: &[u8]| {
        let mut e = GzEncoder::new(Vec::new(), Compression::new(level));
        e.write_all(data).unwrap();
        e.finish().unwrap()
    };
    let mut full = GzBuilder::new()
        .filename("name")
        .comment("comment")
        .extra(vec![1, 2, 3])
        .write(Vec::new(), Compression::fast());
    full.write_all(b"hello").unwrap();
    let full = full.finish().unwrap();
    vec![
        written(ArchiveKind::TarGz),
        gz(0, &text),
        gz(9, &text),
        gz(6, &vec![0; 1 << 20]),
        gz(1, &written(ArchiveKind::Tar)),
        [gz(6, b"one"), gz(6, b""), full, vec![0; 20]].concat(),
    ]
}

/// The checksum and the length of the first member, if it inflates.
pub fn shape_gzip(rng: &mut Rng, gz: &mut [u8]) {
    if gz.len() < 18 || gz[3] != 0 || rng.below(4) == 0 {
        return;
    }
    let (mut inflate, mut out, mut crc) = (Decompress::new(false), vec![0; 1 << 18], Crc::new());
    if inflate
        .decompress(&gz[10..], &mut out, FlushDecompress::Finish)
        .is_ok_and(|s| s == flate2::Status::StreamEnd)
    {
        let at = 10 + inflate.total_in() as usize;
        crc.update(&out[..inflate.total_out() as usize]);
        if at + 8 <= gz.len() {
            gz[at..at + 4].copy_from_slice(&crc.sum().to_le_bytes());
            gz[at + 4..at + 8].copy_from_slice(&crc.amount().to_le_bytes());
        }
    }
}

pub fn lz4s() -> Vec<Vec<u8>> {
    let text = b"forebay ".repeat(12_000);
    let mut all = vec![written(ArchiveKind::TarLz4)];
    for (mode, size, checks) in [
        (BlockMode::Independent, BlockSize::Max64KB, true),
        (BlockMode::Linked, BlockSize::Max64KB, false),
        (BlockMode::Linked, BlockSize::Max4MB, true),
        (BlockMode::Independent, BlockSize::Max1MB, false),
    ] {
        for data in [&text[..], b"short", &written(ArchiveKind::Tar)] {
            let info = FrameInfo::new()
                .block_mode(mode)
                .block_size(size)
                .block_checksums(checks)
                .content_checksum(checks);
            let mut e = FrameEncoder::with_frame_info(
                info.content_size(checks.then_some(data.len() as u64)),
                Vec::new(),
            );
            e.write_all(data).unwrap();
            all.push(e.finish().unwrap());
        }
    }
    all.push(
        [
            &[0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 9, 9][..],
            &all[1],
            &all[2],
        ]
        .concat(),
    );
    all
}

/// Flags of the first frame, now and then without the checksums that would otherwise stop the
/// reader; and the checksum of the descriptor.
pub fn shape_lz4(rng: &mut Rng, lz4: &mut [u8]) {
    let Some(at) = (0..lz4.len())
        .find(|&i| lz4[i..].starts_with(b"\x04\x22\x4d\x18"))
        .filter(|&at| at + 20 <= lz4.len())
    else {
        return;
    };
    if rng.below(3) == 0 {
        lz4[at + 4] = [0x40, 0x60, 0x44, 0x50, 0x48, 0x41][rng.below(6)];
    }
    let has = |flag: u8, len: usize| if lz4[at + 4] & flag != 0 { len } else { 0 };
    let len = 2 + has(8, 8) + has(1, 4);
    let mut hash = XxHash32::with_seed(0);
    hash.write(&lz4[at + 4..at + 4 + len]);
    lz4[at + 4 + len] = (hash.finish() >> 8) as u8;
}
