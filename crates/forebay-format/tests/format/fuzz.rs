//! Mutated archives, streams and indexes for every parser of this crate; see `harness.rs` for what
//! holds for each input. The results are compared with the slow and simple readers of
//! `fuzz/model.rs`, and between all the ways in which a parser can be fed.

mod make;
mod model;

use crate::common::{self, index_by_range, index_by_sloppy_range, index_by_stream};
use crate::harness::{Rng, Target, outcome};
use flate2::read::MultiGzDecoder;
use forebay_core::{Error, ErrorKind, Result};
use forebay_format::{
    ArchiveKind, Codec, Decompressor, Indexer, MemberDecoder, MemberIndex, Place, ScanStep, Storage,
};
use std::io::Read;
use xxhash_rust::xxh3::xxh3_64;

/// Numbers for the helpers that cut archives, which use their own generator.
fn common_rng(rng: &mut Rng) -> common::Rng {
    common::Rng::with_seed(rng.next())
}

/// Every error must be one that a parser of hostile bytes may return.
fn checked<T>(result: Result<T>) -> Result<T> {
    result.inspect_err(|e| {
        assert!(
            matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported),
            "{e:?}"
        )
    })
}

fn kinds(index: &MemberIndex) -> Vec<Storage> {
    let mut kinds: Vec<_> = index.iter().map(|m| m.extent.storage).take(8).collect();
    kinds.dedup();
    kinds
}

#[test]
fn fuzz_tar_scan() {
    let words: &[&[u8]] = &[
        b"ustar\x0000",
        b"ustar  \0",
        b"17 path=./a/b.jpg\n",
        b"11 size=42\n",
        b"9 size=\n",
        b"22 GNU.sparse.major=1\n",
        b"15 mtime=-1.50\n",
    ];
    let target = Target {
        name: "tar_scan",
        corpus: make::tars(),
        words,
        max_len: 1 << 16,
        memory: (1 << 20, 64),
    };
    target.run(
        |rng, bytes| make::shape_tar(rng, bytes),
        |bytes, rng| {
            let index = checked(index_by_range(ArchiveKind::Tar, bytes));
            let mut cuts = common_rng(rng);
            for other in [
                index_by_stream(ArchiveKind::Tar, bytes, &mut cuts),
                index_by_sloppy_range(ArchiveKind::Tar, bytes, &mut cuts),
            ] {
                match (&index, other) {
                    (Ok(a), Ok(b)) => assert_eq!(a, &b),
                    (a, b) => assert!(a.is_err() && b.is_err(), "{a:?} {b:?}"),
                }
            }
            let model = model::tar(bytes);
            match (&index, &model) {
                (Ok(index), Some(model)) => {
                    assert!(
                        index
                            .iter()
                            .map(|m| model::Member::of(&m))
                            .eq(model.iter().cloned()),
                        "{index:?} {model:?}"
                    )
                }
                (a, b) => assert!(a.is_err() && b.is_none(), "{a:?}, the model says {b:?}"),
            }
            let Ok(index) = index else {
                return outcome(index.map(|_| 0));
            };
            let mut end = 0;
            for m in index.iter() {
                assert!(m.extent.offset >= end && m.extent.offset <= bytes.len() as u64);
                if let Ok(Place::Archive(range)) = m.extent.place() {
                    assert!(range.end <= bytes.len() as u64, "{m:?}");
                    end = range.end;
                }
            }
            assert_eq!(index, MemberIndex::decode(&index.encode()).unwrap());
            outcome::<_, Error>(Ok((index.len().min(20), kinds(&index))))
        },
    );
}

#[test]
fn fuzz_zip_scan() {
    let words: &[&[u8]] = &[
        b"PK\x01\x02",
        b"PK\x03\x04",
        b"PK\x05\x06",
        b"PK\x06\x06",
        b"PK\x06\x07",
        b"PK\x07\x08",
        b"\x01\0\x10\0",
        b"UT\x05\0\x01",
        b"up\x09\0\x01",
    ];
    let target = Target {
        name: "zip_scan",
        corpus: make::zips(),
        words,
        max_len: 1 << 16,
        memory: (4 << 20, 64),
    };
    target.run(
        |rng, bytes| make::shape_zip(rng, bytes),
        |bytes, rng| {
            let index = checked(index_by_range(ArchiveKind::Zip, bytes));
            let sloppy = index_by_sloppy_range(ArchiveKind::Zip, bytes, &mut common_rng(rng));
            assert!(
                matches!((&index, &sloppy), (Ok(a), Ok(b)) if a == b)
                    || (index.is_err() && sloppy.is_err()),
                "{index:?} {sloppy:?}"
            );
            let Ok(index) = index else {
                return outcome(index.map(|_| 0));
            };
            assert_eq!(
                model::zip(bytes).as_deref(),
                Some(
                    index
                        .iter()
                        .map(|m| model::ZipMember::of(&m))
                        .collect::<Vec<_>>()
                        .as_slice()
                )
            );
            assert_eq!(index, MemberIndex::decode(&index.encode()).unwrap());
            let (mut read, mut refused) = (0, 0);
            for m in index.iter().filter(|m| m.is_readable()) {
                match read_zip_member(bytes, &m.extent, rng) {
                    Ok(()) => read += 1,
                    Err(e) => {
                        assert_eq!(e.kind(), ErrorKind::Corrupt, "{e:?}");
                        refused += 1;
                    }
                }
            }
            outcome::<_, Error>(Ok((
                index.len().min(20),
                kinds(&index),
                read.min(5),
                refused.min(5),
            )))
        },
    );
}

/// The member read in pieces, compared with inflating it in one go.
fn read_zip_member(bytes: &[u8], extent: &forebay_format::Extent, rng: &mut Rng) -> Result<()> {
    let Place::ZipLocalHeader(header) = extent.place()? else {
        panic!("a zip member that is elsewhere")
    };
    let header = &bytes[header.start as usize..(header.end as usize).min(bytes.len())];
    let data = extent.zip_data_range(header)?;
    let stored = &bytes[data.start as usize..data.end as usize];
    let mut decoder = MemberDecoder::new(extent)?;
    let (mut crc, mut len, mut out) = (crc32fast::Hasher::new(), 0, Vec::with_capacity(1 << 16));
    let mut steps = 0;
    for mut piece in rng.cut(stored) {
        loop {
            out.clear();
            let done = decoder.push(piece, &mut out, 1 << 16)?;
            assert!(
                done.produced == out.len() && out.len() <= 1 << 16 && done.consumed <= piece.len()
            );
            crc.update(&out);
            len += out.len() as u64;
            assert!(len <= extent.size, "more than the member has");
            piece = &piece[done.consumed..];
            steps += 1;
            assert!(steps <= 10_000 + extent.size / 100, "it does not end");
            if piece.is_empty() {
                break;
            }
        }
    }
    decoder.finish()?;
    assert_eq!((len, Some(crc.finalize())), (extent.size, extent.crc32));
    Ok(())
}

/// Everything that a stream decompresses to, in random pieces and steps.
fn decompress(codec: Codec, bytes: &[u8], max: u64, rng: &mut Rng) -> Result<Vec<u8>> {
    let mut stream = Decompressor::new(codec, max);
    let (mut out, mut steps) = (Vec::new(), 0);
    for mut piece in rng.cut(bytes) {
        loop {
            let room = [1 << 20, 1000, 1 << 16, 7 + bytes.len()][rng.below(4)];
            let before = out.len();
            let done = stream.push(piece, &mut out, room)?;
            assert!(
                done.produced <= room
                    && out.len() == before + done.produced
                    && out.len() as u64 <= max + 1
            );
            piece = &piece[done.consumed..];
            steps += 1;
            assert!(
                steps <= 3 * bytes.len() + (max / 7) as usize + 1000,
                "it does not end"
            );
            if piece.is_empty() {
                break;
            }
        }
    }
    stream.finish()?;
    assert_eq!(
        (stream.total_in(), stream.total_out()),
        (bytes.len() as u64, out.len() as u64)
    );
    Ok(out)
}

const UNPACKED_MAX: u64 = 1 << 20;

/// Twice, split at different places, with the same bytes.
fn decompress_twice(codec: Codec, bytes: &[u8], rng: &mut Rng) -> Result<Vec<u8>> {
    let once = checked(decompress(codec, bytes, UNPACKED_MAX, rng));
    let again = decompress(codec, bytes, UNPACKED_MAX, rng);
    match (&once, &again) {
        (Ok(once), Ok(again)) => assert!(once == again),
        // The library decodes a frame in another way if all of it is there at once, and only one of the
        // two minds a compressed block without bytes.
        _ if codec == Codec::Zstd => {}
        _ => assert!(once.is_err() && again.is_err()),
    }
    // And then the tar scanner, which must cope with any output.
    let kind = match codec {
        Codec::Gzip => ArchiveKind::TarGz,
        Codec::Lz4 => ArchiveKind::TarLz4,
        Codec::Zstd => return once,
    };
    let mut indexer = Indexer::new(kind, bytes.len() as u64);
    while let Ok(ScanStep::Need(range)) = indexer.step() {
        if indexer
            .feed(
                range.start,
                &bytes[range.start as usize..range.end as usize],
            )
            .is_err()
        {
            break;
        }
    }
    // The whole output is larger than what is unpacked here.
    let too_much = once
        .as_ref()
        .is_err_and(|e| e.message().contains("decompresses to more than"));
    assert!(indexer.finish().is_err() || once.is_ok() || too_much);
    once
}

#[test]
fn fuzz_gzip() {
    let words: &[&[u8]] = &[
        b"\x1f\x8b\x08\0\0\0\0\0\0\x03",
        b"\x1f\x8b\x08\x1f\0\0\0\0\0\x03",
        b"\x03\0\0\0\0\0\0\0\0\0",
        b"\0\0\xff\xff",
        &[0; 64],
    ];
    let target = Target {
        name: "gzip",
        corpus: make::gzips(),
        words,
        max_len: 1 << 15,
        memory: (8 << 20, 8),
    };
    target.run(
        |rng, bytes| make::shape_gzip(rng, bytes),
        |bytes, rng| {
            let ours = decompress_twice(Codec::Gzip, bytes, rng);
            let mut theirs = Vec::new();
            let read = MultiGzDecoder::new(bytes)
                .take(UNPACKED_MAX + 1)
                .read_to_end(&mut theirs);
            match &ours {
                // flate2 does not know zeros after the last member, and fails when it already has
                // everything.
                Ok(out) => assert!(theirs == *out, "{} {} {read:?}", out.len(), theirs.len()),
                // It ignores the reserved bits.
                Err(e) => {
                    assert!(
                        bytes.is_empty()
                            || read.is_err()
                            || theirs.len() as u64 > UNPACKED_MAX
                            || e.message().contains("header"),
                        "{e}"
                    )
                }
            }
            outcome(ours.map(|out| out.len().min(3)))
        },
    );
}

#[test]
fn fuzz_lz4() {
    let words: &[&[u8]] = &[
        b"\x04\x22\x4d\x18",
        b"\x50\x2a\x4d\x18\x01\0\0\0",
        b"\0\0\0\0",
        b"\x01\0\0\x80z",
        b"\x02\x21\x4c\x18",
    ];
    let target = Target {
        name: "lz4",
        corpus: make::lz4s(),
        words,
        max_len: 1 << 15,
        memory: (24 << 20, 8),
    };
    target.run(
        |rng, bytes| make::shape_lz4(rng, bytes),
        |bytes, rng| {
            let ours = decompress_twice(Codec::Lz4, bytes, rng);
            // The model also knows legacy streams, and uses a lot of memory for them.
            if let Ok(out) = &ours
                && let Some(theirs) = model::lz4(bytes, UNPACKED_MAX)
            {
                assert!(*out == theirs, "{} {}", out.len(), theirs.len());
            }
            outcome(ours.map(|out| out.len().min(3)))
        },
    );
}

#[test]
fn fuzz_zstd() {
    let compressed = |bytes: &[u8], level| zstd::encode_all(bytes, level).unwrap();
    let text = b"some text that comes again and again, ".repeat(50);
    let several = [
        &compressed(&text, 3)[..],
        b"\x50\x2a\x4d\x18\x03\0\0\0abc",
        &compressed(b"", 1),
    ];
    let target = Target {
        name: "zstd",
        corpus: vec![
            compressed(&text, 19),
            several.concat(),
            zstd::bulk::compress(&text, 1).unwrap(),
        ],
        words: &[
            b"\x28\xb5\x2f\xfd",
            b"\x50\x2a\x4d\x18\x04\0\0\0",
            b"\x01\0\0",
        ],
        max_len: 1 << 13,
        memory: (8 << 20, 8),
    };
    target.run(
        |_, _| (),
        |bytes, rng| {
            Codec::Zstd.window_bytes(bytes);
            let ours = decompress_twice(Codec::Zstd, bytes, rng);
            let mut theirs = Vec::new();
            let read = zstd::Decoder::new(bytes)
                .and_then(|d| d.take(UNPACKED_MAX + 1).read_to_end(&mut theirs));
            if let Ok(out) = &ours {
                assert!(theirs == *out, "{} {} {read:?}", out.len(), theirs.len());
            }
            outcome(ours.map(|out| out.len().min(3)))
        },
    );
}

#[test]
fn fuzz_index_decode() {
    let archives = make::tars()
        .into_iter()
        .map(|t| (ArchiveKind::Tar, t))
        .chain(make::zips().into_iter().map(|z| (ArchiveKind::Zip, z)));
    let corpus = archives
        .filter_map(|(kind, bytes)| index_by_range(kind, &bytes).ok())
        .map(|i| i.encode())
        .collect();
    let words: &[&[u8]] = &[
        b"FBMI\x01",
        &[0xff; 9],
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
        &[0x80, 0x80, 0x80, 0x80, 0x10],
    ];
    let target = Target {
        name: "index_decode",
        corpus,
        words,
        max_len: 1 << 15,
        memory: (64 << 10, 64),
    };
    let sum_again = |rng: &mut Rng, bytes: &mut Vec<u8>| {
        if bytes.len() >= 8 && rng.below(20) > 0 {
            let at = bytes.len() - 8;
            let sum = xxh3_64(&bytes[..at]);
            bytes[at..].copy_from_slice(&sum.to_le_bytes());
        }
    };
    target.run(sum_again, |bytes, _| {
        let index = MemberIndex::decode(bytes);
        if let Ok(index) = &index {
            assert_eq!(index, &MemberIndex::decode(&index.encode()).unwrap());
            for m in index.iter() {
                drop(m.extent.place());
                drop(m.extent.zip_data_range(bytes));
                assert!(index.find(m.name).is_some_and(|n| n >= m.number));
            }
        }
        outcome(index.map(|i| (i.kind(), i.len().min(20), kinds(&i))))
    });
}
