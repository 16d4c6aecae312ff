//! Archives that are cut, changed, or made to deceive: always an error or fewer members, never a
//! panic, a hang, or invented bytes.

use crate::common::*;
use forebay_core::ErrorKind;
use forebay_format::{
    ArchiveKind, ArchiveWriter, Indexer, MemberDecoder, MemberIndex, ScanStep, Storage, TarScanner,
};
use std::process::Command;

fn small(kind: ArchiveKind) -> Vec<u8> {
    let (mut out, mut w) = (Vec::new(), ArchiveWriter::new(kind));
    let long = "long/".repeat(60) + "name";
    for (name, bytes) in [
        ("a", &b"alpha"[..]),
        ("./b.jpg", &[7; 600]),
        (&long, b"x"),
        ("empty", b""),
    ] {
        w.entry(name, bytes, 1_700_000_000, &mut out).unwrap();
    }
    w.finish(&mut out).unwrap();
    out
}

/// A deflated zip, and a tar with everything in it, from other programs.
fn foreign() -> Vec<(ArchiveKind, Vec<u8>)> {
    let dir = tempfile::tempdir().unwrap();
    let code = "
import io, tarfile, zipfile
with zipfile.ZipFile('a.zip', 'w', zipfile.ZIP_DEFLATED) as z:
    z.writestr('text', b'forebay ' * 50); z.writestr('dir/', b'')
    with z.open('big', 'w', force_zip64=True) as f: f.write(bytes(300))
for fmt, name in ((tarfile.GNU_FORMAT, 'gnu.tar'), (tarfile.PAX_FORMAT, 'pax.tar')):
    with tarfile.open(name, 'w', format=fmt, pax_headers={'comment': 'x'}) as t:
        for i, n in enumerate(['a', 'n' * 300, 'ü']):
            m = tarfile.TarInfo(n); m.size = 100 * i; m.mtime = 1.5 if fmt == tarfile.PAX_FORMAT else 10**11
            t.addfile(m, io.BytesIO(bytes(1000)))
        m = tarfile.TarInfo('l'); m.type = tarfile.SYMTYPE; m.linkname = 'k' * 300; t.addfile(m)
";
    python(dir.path(), code, &[]);
    std::fs::write(dir.path().join("holes"), []).unwrap();
    let holes = std::fs::File::options()
        .write(true)
        .open(dir.path().join("holes"))
        .unwrap();
    for i in 0..30 {
        std::os::unix::fs::FileExt::write_all_at(&holes, b"x", i << 16).unwrap();
    }
    for (format, version) in [("oldgnu", "--sparse"), ("pax", "--sparse-version=1.0")] {
        let name = format!("{format}.tar");
        run(Command::new("tar")
            .args(["-cSf", &name, "--format", format, version, "holes"])
            .current_dir(dir.path()));
    }
    let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    let mut all = vec![(ArchiveKind::Zip, read("a.zip"))];
    all.extend(
        ["gnu.tar", "pax.tar", "oldgnu.tar", "pax.tar"].map(|n| (ArchiveKind::Tar, read(n))),
    );
    all
}

/// Reads everything that the archive allows; returns the number of members.
fn try_all(kind: ArchiveKind, archive: &[u8], rng: &mut Rng) -> Option<usize> {
    let by_range = index_by_range(kind, archive);
    if kind != ArchiveKind::Zip {
        let by_stream = index_by_stream(kind, archive, rng);
        assert_eq!(
            by_range.is_ok(),
            by_stream.is_ok(),
            "{by_range:?} {by_stream:?}"
        );
    }
    match by_range {
        Ok(index) => {
            assert_eq!(MemberIndex::decode(&index.encode()).unwrap(), index);
            let _ = members(kind, archive, &index);
            Some(index.len())
        }
        Err(e) => {
            assert!(
                matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported),
                "{e:?}"
            );
            None
        }
    }
}

fn end_of_trailer(tar: &[u8]) -> usize {
    let mut scanner = TarScanner::new(Some(tar.len() as u64));
    let mut end = 0;
    while let ScanStep::Need(range) = scanner.step().unwrap() {
        end = range.end as usize;
        scanner
            .feed(range.start, &tar[range.start as usize..end])
            .unwrap();
    }
    end
}

#[test]
fn cut_at_every_offset() {
    let mut rng = Rng::new();
    let mut archives: Vec<_> = ArchiveKind::ALL
        .into_iter()
        .map(|k| (k, small(k)))
        .collect();
    archives.extend(foreign());
    for (kind, mut archive) in archives {
        if kind == ArchiveKind::Tar {
            // Without the padding to whole records, which nobody would miss.
            archive.truncate(end_of_trailer(&archive));
        }
        let whole = try_all(kind, &archive, &mut rng).unwrap();
        let mut accepted = 0;
        for at in 0..archive.len() {
            if let Some(found) = try_all(kind, &archive[..at], &mut rng) {
                // A tar that is cut where a header begins looks like a shorter tar: every reader
                // accepts it as one.
                assert!(
                    kind == ArchiveKind::Tar && at % 512 == 0 && found <= whole,
                    "{kind} cut at {at}"
                );
                accepted += 1;
            }
        }
        // Before each member, after a global header, before the trailer, and inside it.
        assert!(accepted <= whole + 3, "{kind}: {accepted}");
    }
}

#[test]
fn flipped_bytes_anywhere() {
    let mut rng = Rng::new();
    let mut archives: Vec<_> = ArchiveKind::ALL
        .into_iter()
        .map(|k| (k, small(k)))
        .collect();
    archives.extend(foreign());
    for (kind, archive) in &archives {
        for _ in 0..3000 {
            let mut bad = archive.clone();
            for _ in 0..1 + rng.below(3) {
                // The part of an archive of zeros that has anything to change.
                let busy = rng.below(bad.len().min(4096));
                bad[busy] = [rng.next() as u8, 0, 0xff, b'9'][rng.below(4)];
            }
            try_all(*kind, &bad, &mut rng);
        }
    }
    // Headers with a correct checksum get further in.
    for (_, archive) in archives.iter().filter(|(k, _)| *k == ArchiveKind::Tar) {
        for _ in 0..3000 {
            let mut bad = archive.clone();
            let headers: Vec<usize> = (0..bad.len() / 512)
                .map(|b| b * 512)
                .filter(|&b| &bad[b + 257..b + 262] == b"ustar")
                .collect();
            let h = headers[rng.below(headers.len())];
            for _ in 0..1 + rng.below(4) {
                let field = [0, 124, 124, 136, 156, 156, 345, 482][rng.below(8)];
                bad[h + field + rng.below(12)] = [
                    rng.next() as u8,
                    0xff,
                    0x80,
                    b'7',
                    b'L',
                    b'x',
                    b'g',
                    b'S',
                    b'0',
                    0,
                ][rng.below(10)];
            }
            fix_checksum(&mut bad[h..h + 512]);
            try_all(ArchiveKind::Tar, &bad, &mut rng);
        }
    }
}

#[test]
fn noise_is_no_archive() {
    let mut rng = Rng::new();
    for kind in ArchiveKind::ALL {
        for _ in 0..300 {
            let len = rng.below(3000);
            let noise = rng.bytes(len);
            if let Some(found) = try_all(kind, &noise, &mut rng) {
                assert!(kind == ArchiveKind::Tar && found == 0, "{kind}");
            }
        }
    }
}

fn fix_checksum(header: &mut [u8]) {
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|&b| u32::from(b)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// A header of a file `a`, changed.
fn header(edit: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut h = Vec::new();
    forebay_format::tar_header_into(&mut h, "a", 0, 0).unwrap();
    edit(&mut h);
    fix_checksum(&mut h);
    h
}

#[test]
fn sizes_that_lie() {
    let huge_pax = |value: &str| {
        let record = format!("{} size={value}\n", value.len() + 9);
        let mut x = header(|h| {
            h[124..135].copy_from_slice(format!("{:011o}", record.len()).as_bytes());
            h[156] = b'x';
        });
        x.extend(record.as_bytes());
        x.resize(1024, 0);
        x.extend(header(|_| {}));
        x
    };
    let base256 = |bytes: [u8; 12]| header(|h| h[124..136].copy_from_slice(&bytes));
    for (what, mut archive) in [
        ("negative", base256([0xff; 12])),
        (
            "past 2^63",
            base256([0x80, 0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0]),
        ),
        (
            "past 2^64",
            base256([0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ),
        (
            "2^63 - 1",
            base256([
                0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
            ]),
        ),
        (
            "past the end",
            header(|h| h[124..135].copy_from_slice(b"00000010000")),
        ),
        (
            "not octal",
            header(|h| h[124..135].copy_from_slice(b"00000000009")),
        ),
        ("pax past the end", huge_pax("99999")),
        ("pax past 2^63", huge_pax("9223372036854775808")),
        ("pax past 2^64", huge_pax("99999999999999999999999999")),
        ("pax junk", huge_pax("12abc")),
        ("pax negative", huge_pax("-5")),
    ] {
        archive.resize(archive.len() + 1024, 0);
        let e = index_by_range(ArchiveKind::Tar, &archive).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Corrupt, "{what}");
        assert!(e.message().contains("offset"), "{what}: {e}");
        // In a stream of unknown length, the end shows it.
        let mut scanner = TarScanner::new(None);
        let pushed = scanner.push(&archive);
        assert!(pushed.is_err() || scanner.finish().is_err(), "{what}");
    }
}

#[test]
fn extended_headers_that_are_too_long_or_lead_nowhere() {
    let long = header(|h| {
        h[124..135].copy_from_slice(b"00010000001");
        h[156] = b'x';
    });
    let mut scanner = TarScanner::new(None);
    assert_eq!(
        scanner.push(&long).unwrap_err().kind(),
        ErrorKind::Unsupported
    );
    for type_flag in [b'x', b'L'] {
        let mut nowhere = header(|h| {
            h[124..135].copy_from_slice(b"00000000012");
            h[156] = type_flag;
        });
        nowhere.extend(b"10 path=a\n");
        nowhere.resize(1024, 0);
        assert!(index_by_range(ArchiveKind::Tar, &nowhere).is_err());
        assert!(index_by_range(ArchiveKind::Tar, &[&nowhere[..], &[0; 1024]].concat()).is_err());
        let mut scanner = TarScanner::new(None);
        scanner.push(&nowhere).unwrap();
        assert!(scanner.finish().is_err());
    }
}

#[test]
fn what_was_found_before_an_error_stays() {
    let mut archive = small(ArchiveKind::Tar);
    let third = 512 + 512 + 512 + 1024;
    archive[third] ^= 1;
    let mut scanner = TarScanner::new(Some(archive.len() as u64));
    let e = scanner.push(&archive).unwrap_err();
    assert!(e.message().contains(&format!("offset {third}")), "{e}");
    assert_eq!(scanner.step().unwrap_err().message(), e.message());
    let index = scanner.into_partial();
    assert_eq!(index.len(), 2);
    assert!(index.readable("b.jpg").is_ok());
}

#[test]
fn tars_of_old_and_odd_writers() {
    // Signed checksums, as some old programs summed: a name with bytes past 127.
    let mut signed = header(|h| h[..2].copy_from_slice(b"\xc3\xbc"));
    signed[148..156].fill(b' ');
    let sum: i32 = signed.iter().map(|&b| i32::from(b as i8)).sum();
    signed[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    assert!(
        index_by_range(ArchiveKind::Tar, &signed)
            .unwrap()
            .readable("ü")
            .is_ok()
    );
    // V7: no magic, type NUL, a directory by its slash.
    let v7 = header(|h| {
        h[..2].copy_from_slice(b"d/");
        h[156] = 0;
        h[257..345].fill(0);
    });
    assert_eq!(
        index_by_range(ArchiveKind::Tar, &v7)
            .unwrap()
            .get("d")
            .unwrap()
            .extent
            .storage,
        Storage::Directory
    );
    // A name that is not UTF-8.
    let latin = header(|h| h[..3].copy_from_slice(b"\xfc.x"));
    assert!(
        index_by_range(ArchiveKind::Tar, &latin)
            .unwrap()
            .readable("\u{fffd}.x")
            .is_ok()
    );
    // One block of zeros ends an archive at its end, and nowhere else.
    let one = header(|_| {});
    assert_eq!(
        index_by_range(ArchiveKind::Tar, &[&one[..], &[0; 512]].concat())
            .unwrap()
            .len(),
        1
    );
    assert!(index_by_range(ArchiveKind::Tar, &[&one[..], &[0; 512], &one].concat()).is_err());
    // What follows two blocks of zeros does not count.
    assert_eq!(
        index_by_range(ArchiveKind::Tar, &[&one[..], &[0; 1024], b"junk"].concat())
            .unwrap()
            .len(),
        1
    );
    // A hard link with its target's size, but no data after it.
    let link = header(|h| {
        h[124..135].copy_from_slice(b"00000007777");
        h[156] = b'1';
    });
    assert_eq!(
        index_by_range(ArchiveKind::Tar, &[&link[..], &one].concat())
            .unwrap()
            .len(),
        2
    );
}

/// The offsets of the directory entries of a zip of ours.
fn entries_of(zip: &[u8]) -> Vec<usize> {
    (0..zip.len() - 4)
        .filter(|&i| &zip[i..i + 4] == b"PK\x01\x02")
        .collect()
}

#[test]
fn zips_that_deceive() {
    let good = small(ArchiveKind::Zip);
    let at = entries_of(&good);
    let edited = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bad = good.clone();
        edit(&mut bad);
        index_by_range(ArchiveKind::Zip, &bad)
    };
    let put32 =
        |bad: &mut [u8], at: usize, v: u32| bad[at..at + 4].copy_from_slice(&v.to_le_bytes());
    type Edit<'a> = &'a dyn Fn(&mut Vec<u8>);
    let refused: [(&str, Edit); 9] = [
        ("two entries at one place", &|b| put32(b, at[1] + 42, 0)),
        ("an entry that reaches into the next", &|b| {
            put32(b, at[0] + 20, 100);
            put32(b, at[0] + 24, 100);
        }),
        ("an entry past the directory", &|b| {
            put32(b, at[3] + 42, good.len() as u32)
        }),
        ("stored, but of two sizes", &|b| put32(b, at[1] + 24, 601)),
        ("deflated beyond what deflate can", &|b| {
            b[at[1] + 10] = 8;
            put32(b, at[1] + 24, 700_000);
        }),
        ("fewer entries than told", &|b| {
            let end = b.len() - 22;
            b[end + 10] += 1;
        }),
        ("more entries than told", &|b| {
            let end = b.len() - 22;
            b[end + 10] -= 1;
        }),
        ("a directory of another length", &|b| {
            let end = b.len() - 22;
            b[end + 12] -= 1;
        }),
        ("zip64 sizes without the field", &|b| {
            put32(b, at[1] + 20, u32::MAX)
        }),
    ];
    for (what, edit) in refused {
        assert_eq!(
            edited(edit).unwrap_err().kind(),
            ErrorKind::Corrupt,
            "{what}"
        );
    }
    let parts = edited(&|b| {
        let end = b.len() - 22;
        b[end + 4] = 1;
    });
    assert_eq!(parts.unwrap_err().kind(), ErrorKind::Unsupported);
    // The local header is checked against the directory.
    let index = index_by_range(ArchiveKind::Zip, &good).unwrap();
    let m = index.readable("b.jpg").unwrap();
    let header = good[m.extent.offset as usize..][..30].to_vec();
    assert!(m.extent.zip_data_range(&header).is_ok());
    for (i, v) in [(0, 0), (8, 8), (14, 1), (18, 1), (22, 1), (27, 0xff)] {
        let mut bad = header.clone();
        bad[i] = v;
        assert_eq!(
            m.extent.zip_data_range(&bad).unwrap_err().kind(),
            ErrorKind::Corrupt,
            "byte {i}"
        );
    }
    assert!(m.extent.zip_data_range(&header[..29]).is_err());
}

#[test]
fn members_are_checked_as_they_are_read() {
    let mut rng = Rng::new();
    let dir = tempfile::tempdir().unwrap();
    let code = "
import zipfile
with zipfile.ZipFile('a.zip', 'w') as z:
    z.writestr('stored', bytes(range(256)) * 20)
    z.writestr('deflated', b'forebay ' * 5000, zipfile.ZIP_DEFLATED)
    z.writestr('bomb', bytes(50_000_000), zipfile.ZIP_DEFLATED)
";
    python(dir.path(), code, &[]);
    let archive = std::fs::read(dir.path().join("a.zip")).unwrap();
    let index = index_by_range(ArchiveKind::Zip, &archive).unwrap();
    let stored_bytes = |name: &str| {
        let m = index.readable(name).unwrap();
        let r = m
            .extent
            .zip_data_range(&archive[m.extent.offset as usize..])
            .unwrap();
        (m.extent, archive[r.start as usize..r.end as usize].to_vec())
    };
    for name in ["stored", "deflated"] {
        let (extent, stored) = stored_bytes(name);
        let mut whole = Vec::new();
        MemberDecoder::new(&extent)
            .unwrap()
            .decode_all(&stored, &mut whole)
            .unwrap();
        // In any pieces, with any limit.
        for _ in 0..20 {
            let max_out = [1, 100, 1 << 20][rng.below(3)];
            let mut d = MemberDecoder::new(&extent).unwrap();
            let mut out = Vec::new();
            for mut piece in rng.cut(&stored) {
                loop {
                    let done = d.push(piece, &mut out, max_out).unwrap();
                    assert!(done.produced <= max_out);
                    piece = &piece[done.consumed..];
                    if piece.is_empty() {
                        break;
                    }
                }
            }
            d.finish().unwrap();
            assert!(out == whole);
        }
        for _ in 0..500 {
            let mut bad = stored.clone();
            let i = rng.below(bad.len());
            bad[i] ^= 1 << rng.below(8);
            let mut out = Vec::new();
            let got = MemberDecoder::new(&extent)
                .unwrap()
                .decode_all(&bad, &mut out);
            assert!(got.is_err() || out == whole, "{name} byte {i}");
            assert!(out.len() as u64 <= extent.size + 1);
        }
        let cut = MemberDecoder::new(&extent)
            .unwrap()
            .decode_all(&stored[..stored.len() - 1], &mut Vec::new());
        assert_eq!(cut.unwrap_err().kind(), ErrorKind::Corrupt);
        let more = MemberDecoder::new(&extent)
            .unwrap()
            .decode_all(&[&stored[..], b"x"].concat(), &mut Vec::new());
        assert_eq!(more.unwrap_err().kind(), ErrorKind::Corrupt);
    }
    // A caller that continues until its input is used up has everything, although the input ends
    // long before the output.
    let (mut extent, stored) = stored_bytes("bomb");
    let mut d = MemberDecoder::new(&extent).unwrap();
    let (mut input, mut len, mut out) = (&stored[..], 0, Vec::new());
    while !input.is_empty() {
        out.clear();
        let done = d.push(input, &mut out, 100).unwrap();
        input = &input[done.consumed..];
        len += out.len();
    }
    d.finish().unwrap();
    assert_eq!(len, 50_000_000);
    // A deflated member that inflates to more than it claims.
    extent.size = 1000;
    let mut out = Vec::new();
    let e = MemberDecoder::new(&extent)
        .unwrap()
        .decode_all(&stored, &mut out)
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Corrupt);
    assert!(out.len() <= 1001);
}

/// Finding headers that are far apart takes as many small reads as there are headers.
#[test]
fn a_scan_by_range_reads_headers_only() {
    let (mut out, mut w) = (Vec::new(), ArchiveWriter::new(ArchiveKind::Tar));
    for i in 0..20 {
        w.entry(&format!("{i}"), &vec![1; 100_000], 0, &mut out)
            .unwrap();
    }
    w.finish(&mut out).unwrap();
    let mut indexer = Indexer::new(ArchiveKind::Tar, out.len() as u64);
    let mut read = 0;
    while let ScanStep::Need(r) = indexer.step().unwrap() {
        indexer
            .feed(r.start, &out[r.start as usize..r.end as usize])
            .unwrap();
        read += r.end - r.start;
    }
    assert_eq!(read, 22 * 512);
    assert_eq!(indexer.finish().unwrap().len(), 20);
}
