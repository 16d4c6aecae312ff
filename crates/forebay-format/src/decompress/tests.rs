use super::*;
use flate2::{Compression, write::GzEncoder};
use forebay_core::ErrorKind;
use lz4_flex::frame::{FrameEncoder, FrameInfo};
use std::io::Write;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut e = GzEncoder::new(Vec::new(), Compression::new(6));
    e.write_all(bytes).unwrap();
    e.finish().unwrap()
}

fn lz4(bytes: &[u8]) -> Vec<u8> {
    let info = FrameInfo::new()
        .content_checksum(true)
        .block_checksums(true)
        .content_size(Some(bytes.len() as u64));
    let mut e = FrameEncoder::with_frame_info(info, Vec::new());
    e.write_all(bytes).unwrap();
    e.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    let mut e = ::zstd::Encoder::new(Vec::new(), 3).unwrap();
    e.include_checksum(true).unwrap();
    e.write_all(bytes).unwrap();
    e.finish().unwrap()
}

fn all(bytes: &[u8]) -> [(Codec, Vec<u8>); 3] {
    [
        (Codec::Gzip, gzip(bytes)),
        (Codec::Lz4, lz4(bytes)),
        (Codec::Zstd, zstd(bytes)),
    ]
}

/// All of the output, from pushes of `step` bytes that may output `max_out` bytes each.
fn pull(
    codec: Codec,
    stream: &[u8],
    step: usize,
    max_out: usize,
    total_max: u64,
) -> Result<Vec<u8>> {
    let mut d = Decompressor::new(codec, total_max);
    let mut out = Vec::new();
    for mut piece in stream.chunks(step) {
        loop {
            let before = out.len();
            let done = d.push(piece, &mut out, max_out)?;
            assert_eq!(out.len() - before, done.produced);
            assert!(done.produced <= max_out);
            piece = &piece[done.consumed..];
            if piece.is_empty() {
                break;
            }
        }
    }
    d.finish()?;
    assert_eq!(
        (d.total_in(), d.total_out()),
        (stream.len() as u64, out.len() as u64)
    );
    Ok(out)
}

#[test]
fn any_steps_and_any_bounds_give_the_same_bytes() {
    let bytes: Vec<u8> = (0..300_000u32)
        .map(|i| ((i / 7).wrapping_mul(i) >> 5) as u8)
        .collect();
    for (codec, stream) in all(&bytes) {
        for (step, max_out) in [
            (1, 1 << 20),
            (7, 3),
            (1000, 1),
            (1 << 20, 1 << 20),
            (1 << 20, 65_536),
            (65_536, 65_537),
        ] {
            assert!(
                pull(codec, &stream, step, max_out, bytes.len() as u64).unwrap() == bytes,
                "{codec:?} {step} {max_out}"
            );
        }
    }
}

#[test]
fn streams_cut_anywhere_or_changed_anywhere_are_errors() {
    let bytes: Vec<u8> = (0..700u32).map(|i| ((i * i) >> 3) as u8).collect();
    for (codec, stream) in all(&bytes) {
        for at in 0..stream.len() {
            let e = pull(codec, &stream[..at], 64, 1000, 1 << 20).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Corrupt, "{codec:?} cut at {at}");
            // Gzip's time, extra flags and system are not covered by any checksum.
            if codec == Codec::Gzip && (3..10).contains(&at) {
                continue;
            }
            for bit in 0..8 {
                let mut bad = stream.clone();
                bad[at] ^= 1 << bit;
                let got = pull(codec, &bad, 64, 1000, 1 << 20);
                // A skippable frame may begin with almost the same magic.
                assert!(
                    got.is_err() || got.as_ref().is_ok_and(|g| *g == bytes),
                    "{codec:?} {at} {bit}: {:?}",
                    got.map(|g| g.len())
                );
            }
        }
        for garbage in [&b"x"[..], &stream[..5], b"\0x"] {
            let long = [&stream[..], garbage].concat();
            assert_eq!(
                pull(codec, &long, 64, 1000, 1 << 20).unwrap_err().kind(),
                ErrorKind::Corrupt,
                "{codec:?} {garbage:?}"
            );
        }
    }
}

#[test]
fn bombs_are_refused_where_they_pass_the_limit() {
    for (codec, stream) in all(&vec![0; 20 << 20]) {
        let mut d = Decompressor::new(codec, 20 << 10);
        let mut out = Vec::new();
        let e = d.push(&stream, &mut out, usize::MAX).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{codec:?}");
        assert_eq!(out.len(), (20 << 10) + 1);
        assert!(d.push(&[], &mut out, 1).is_err() && d.finish().is_err());
        assert_eq!(
            pull(codec, &stream, 1 << 20, 1 << 20, 20 << 20)
                .unwrap()
                .len(),
            20 << 20
        );
        assert!(pull(codec, &stream, 1 << 20, 1 << 20, (20 << 20) - 1).is_err());
    }
}

#[test]
fn gzip_headers_with_everything_in_them() {
    let plain = gzip(b"hello");
    let mut h = vec![0x1f, 0x8b, 8, 2 | 4 | 8 | 16 | 1, 1, 2, 3, 4, 0, 3];
    h.extend([3, 0, b'a', b'b', b'c']);
    h.extend(b"name\0comment\0");
    let crc = crc32fast::hash(&h) as u16;
    h.extend(crc.to_le_bytes());
    h.extend(&plain[10..]);
    for step in [1, 2, 100] {
        assert_eq!(pull(Codec::Gzip, &h, step, 100, 100).unwrap(), b"hello");
    }
    h[12] ^= 1;
    assert!(pull(Codec::Gzip, &h, 1, 100, 100).is_err());
    let endless = [&[0x1f, 0x8b, 8, 8, 0, 0, 0, 0, 0, 3][..], &[b'x'; 100_000]].concat();
    assert!(pull(Codec::Gzip, &endless, 1000, 100, 100).is_err());
}

#[test]
fn lz4_oddities() {
    let empty = lz4(b"");
    assert_eq!(pull(Codec::Lz4, &empty, 3, 10, 10).unwrap(), b"");
    let skippable = [0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 9, 9];
    assert_eq!(
        pull(
            Codec::Lz4,
            &[&skippable, &lz4(b"a")[..], &skippable].concat(),
            1,
            10,
            10
        )
        .unwrap(),
        b"a"
    );
    let e = pull(Codec::Lz4, &[0x02, 0x21, 0x4c, 0x18, 0, 0, 0, 0], 8, 10, 10).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    let e = pull(Codec::Lz4, b"no lz4 at all", 8, 10, 10).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Corrupt);
    // A stored block without bytes in the middle.
    let mut odd = vec![0x04, 0x22, 0x4d, 0x18, 0x60, 0x40];
    odd.push((xxh32(&odd[4..6]) >> 8) as u8);
    odd.extend([0, 0, 0, 0x80, 1, 0, 0, 0x80, b'z', 0, 0, 0, 0]);
    assert_eq!(pull(Codec::Lz4, &odd, 100, 10, 10).unwrap(), b"z");
}

#[test]
fn zstd_frames_follow_each_other_and_have_windows_of_a_limited_size() {
    let skippable = [0x5f, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 9, 9, 9];
    let several = [
        &skippable,
        &zstd(b"a")[..],
        &skippable,
        &zstd(b""),
        &zstd(b"bc"),
    ]
    .concat();
    for step in [1, 5, 1000] {
        assert_eq!(pull(Codec::Zstd, &several, step, 2, 10).unwrap(), b"abc");
    }
    let e = pull(Codec::Zstd, b"no zstd at all", 8, 10, 10).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Corrupt);
    assert_eq!(
        pull(Codec::Zstd, b"", 8, 10, 10).unwrap_err().kind(),
        ErrorKind::Corrupt
    );

    // As a level has it that is made for large files.
    let bytes = vec![7; 3 << 20];
    let mut e = ::zstd::Encoder::new(Vec::new(), 1).unwrap();
    e.window_log(23).unwrap();
    e.write_all(&bytes).unwrap();
    let wide = e.finish().unwrap();
    assert_eq!(Codec::Zstd.window_bytes(&wide), 8 << 20);
    assert_eq!(
        Codec::Zstd.window_bytes(&[&skippable, &wide[..]].concat()),
        8 << 20
    );
    assert_eq!(Codec::Zstd.window_bytes(&wide[..4]), 0);
    for (allowed, fits) in [(8 << 20, true), ((4 << 20) + 1, true), (4 << 20, false)] {
        let mut d = Decompressor::with_window(Codec::Zstd, u64::MAX, allowed);
        let mut out = Vec::new();
        let done = d.push(&wide, &mut out, usize::MAX);
        assert_eq!(done.is_ok(), fits, "{allowed}: {done:?}");
        assert!(!fits || out == bytes);
        if let Err(e) = done {
            assert_eq!(e.kind(), ErrorKind::Unsupported);
            assert!(
                e.message().contains("window") && e.hint_text().is_some(),
                "{e}"
            );
        }
    }
    // A frame that says that it has 127 bytes, and has none, however its bytes come.
    let lies = b"\x28\xb5\x2f\xfd\x20\x7f\x01\0\0";
    for step in [1, 4, 100] {
        for max_out in [1, 200] {
            let e = pull(Codec::Zstd, lies, step, max_out, 1000).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Corrupt);
        }
    }
    // What a single segment says of itself.
    let whole = ::zstd::bulk::compress(&bytes[..1000], 3).unwrap();
    assert_eq!(Codec::Zstd.window_bytes(&whole), 1000);
}

#[test]
fn codecs_by_name() {
    for (name, codec) in [
        ("a/b.jsonl.gz", Some(Codec::Gzip)),
        ("b.GZ", Some(Codec::Gzip)),
        ("b.csv.zst", Some(Codec::Zstd)),
        ("b.zstd", Some(Codec::Zstd)),
        ("b.jsonl.lz4", Some(Codec::Lz4)),
        ("gz", None),
        (".gz", None),
        ("a.gz/b", None),
        ("b.bz2", None),
    ] {
        assert_eq!(Codec::from_name(name), codec, "{name}");
    }
}
