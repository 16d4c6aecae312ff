//! Archives made by other programs: we find the members that they report, with equal bytes.

use crate::common::*;
use forebay_core::ErrorKind;
use forebay_format::{ArchiveKind, Storage, lookup_key};
use std::{
    path::Path,
    process::{Command, Stdio},
};

/// Reads each archive of a directory in all ways and compares the result with the `.told` file next
/// to it.
fn check_dir(dir: &Path, rng: &mut Rng) -> usize {
    let mut checked = 0;
    for file in std::fs::read_dir(dir).unwrap() {
        let path = file.unwrap().path();
        let Some(kind) = ArchiveKind::from_name(path.to_str().unwrap()) else {
            continue;
        };
        let archive = std::fs::read(&path).unwrap();
        let told = parse_told(&std::fs::read(format!("{}.told", path.display())).unwrap());
        let index = index_by_all_ways(kind, &archive, rng);
        let mut found = members(kind, &archive, &index).unwrap();
        if kind != ArchiveKind::Zip {
            // tarfile removes the slash from directories' names.
            for m in found
                .iter_mut()
                .filter(|m| m.bytes.is_none() && m.name.ends_with('/'))
            {
                m.name = m.name.trim_end_matches('/').to_owned();
            }
        }
        assert_eq!(found.len(), told.len(), "{path:?}");
        for (f, t) in found.iter().zip(&told) {
            assert_eq!(f, t, "{path:?}");
        }
        for t in &told {
            // By name: the last member of that name.
            let last = told
                .iter()
                .rposition(|o| lookup_key(&o.name) == lookup_key(&t.name))
                .unwrap();
            assert_eq!(index.find(&t.name), Some(last), "{path:?} {}", t.name);
        }
        checked += 1;
    }
    checked
}

#[test]
fn tars_of_python() {
    let mut rng = Rng::new();
    let dir = tempfile::tempdir().unwrap();
    python(
        dir.path(),
        include_str!("../data/make_tars.py"),
        &[".", &rng.below(1 << 30).to_string()],
    );
    assert_eq!(check_dir(dir.path(), &mut rng), 18);
}

#[test]
fn zips_of_python() {
    let mut rng = Rng::new();
    let dir = tempfile::tempdir().unwrap();
    python(
        dir.path(),
        include_str!("../data/make_zips.py"),
        &[".", &rng.below(1 << 30).to_string()],
    );
    assert_eq!(check_dir(dir.path(), &mut rng), 12);
}

/// A tree with long names, links, a sparse file and a directory, packed by GNU tar in each of its
/// formats.
#[test]
fn tars_of_gnu_tar() {
    let mut rng = Rng::new();
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    let deep = "deep/".repeat(15) + "x.bin";
    let long = format!("{}/{}.bin", "n".repeat(120), "m".repeat(150));
    let mut files = vec![
        ("a.jpg", rng.bytes(700)),
        ("empty", Vec::new()),
        (deep.as_str(), rng.bytes(512)),
    ];
    for (name, bytes) in &files {
        let path = tree.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    std::os::unix::fs::symlink("a.jpg", tree.join("link")).unwrap();
    std::fs::hard_link(tree.join("a.jpg"), tree.join("zz-hard")).unwrap();
    // Forty islands in a sea of zeros: more than a sparse header alone can list.
    use std::os::unix::fs::FileExt;
    let sparse = std::fs::File::create(tree.join("sparse")).unwrap();
    for i in 0..40 {
        sparse.write_all_at(b"island", i << 17).unwrap();
    }
    drop(sparse);
    for format in ["v7", "ustar", "gnu", "oldgnu", "pax"] {
        if format == "gnu" {
            let path = tree.join(&long);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let bytes = rng.bytes(1000);
            std::fs::write(path, &bytes).unwrap();
            files.push((&long, bytes));
        }
        for sparse in [
            &[][..],
            &["--sparse"][..],
            &["--sparse", "--sparse-version=0.0"][..],
            &["--sparse", "--sparse-version=0.1"][..],
        ] {
            if !sparse.is_empty() && matches!(format, "v7" | "ustar") {
                continue;
            }
            let archive = run(Command::new("tar")
                .args(["--sort=name", "-c", "--format", format])
                .args(sparse)
                .args(["-f", "-", "."])
                .current_dir(&tree)
                .stderr(Stdio::piped()));
            let index = index_by_all_ways(ArchiveKind::Tar, &archive, &mut rng);
            let found = members(ArchiveKind::Tar, &archive, &index).unwrap();
            for (name, bytes) in &files {
                for asked in [name.to_string(), format!("./{name}")] {
                    let m = index
                        .readable(&asked)
                        .unwrap_or_else(|e| panic!("{format} {asked}: {e}"));
                    assert_eq!(
                        found[m.number].bytes.as_ref(),
                        Some(bytes),
                        "{format} {asked}"
                    );
                }
            }
            let storage = |name: &str| index.get(name).unwrap().extent.storage;
            assert_eq!(storage("link"), Storage::SymbolicLink);
            assert_eq!(storage("zz-hard"), Storage::HardLink);
            assert_eq!(storage("deep"), Storage::Directory);
            assert_eq!(
                storage("sparse"),
                if sparse.is_empty() {
                    Storage::Stored
                } else {
                    Storage::Sparse
                },
                "{format} {sparse:?}"
            );
            for name in ["link", "zz-hard", "deep", "deep/"] {
                assert_eq!(
                    index.readable(name).unwrap_err().kind(),
                    ErrorKind::Unsupported
                );
            }
            assert_eq!(
                index.readable("b.jpg").unwrap_err().kind(),
                ErrorKind::NotFound
            );
            let listed = run(Command::new("tar")
                .args(["-tf", "-"])
                .stdin(tar_stdin(dir.path(), &archive)));
            let ours: String = index.iter().map(|m| format!("{}\n", m.name)).collect();
            assert_eq!(ours.as_bytes(), listed, "{format} {sparse:?}");
        }
    }
}

fn tar_stdin(dir: &Path, archive: &[u8]) -> Stdio {
    let path = dir.join("in.tar");
    std::fs::write(&path, archive).unwrap();
    Stdio::from(std::fs::File::open(path).unwrap())
}

/// Sizes past 8 GiB, in base-256 and in PAX, without actually having 8 GiB: the headers are fed by
/// range, the data is never requested.
#[test]
fn members_larger_than_octal_can_say() {
    let dir = tempfile::tempdir().unwrap();
    let code = "
import sys, tarfile
for fmt in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
    i = tarfile.TarInfo('huge'); i.size = (9 << 30) + 1
    sys.stdout.buffer.write(i.tobuf(fmt).ljust(1536, b'\\0')[:1536])
";
    let headers = python(dir.path(), code, &[]);
    for (header, len) in [(&headers[..512], 512u64), (&headers[1536..], 1536)] {
        let data = (9u64 << 30) + 1;
        let end = len + data.next_multiple_of(512);
        let mut scanner = forebay_format::TarScanner::new(Some(end + 1024));
        let mut reads = 0;
        while let forebay_format::ScanStep::Need(range) = scanner.step().unwrap() {
            let block = if range.start < len {
                header[range.start as usize..range.end as usize].to_vec()
            } else {
                vec![0; 512]
            };
            scanner.feed(range.start, &block).unwrap();
            reads += 1;
        }
        let index = scanner.finish().unwrap();
        assert_eq!(index.get("huge").unwrap().size(), data);
        assert!(reads <= 5);
        // The same header in an archive that is not that long.
        let mut scanner = forebay_format::TarScanner::new(Some(end - 512));
        assert_eq!(
            scanner.feed(0, header).unwrap_err().kind(),
            ErrorKind::Corrupt
        );
    }
}

#[test]
fn zip_with_more_entries_than_16_bits_count() {
    let mut rng = Rng::new();
    let dir = tempfile::tempdir().unwrap();
    let code = "
import zipfile
with zipfile.ZipFile('many.zip', 'w') as z:
    for i in range(65600): z.writestr(zipfile.ZipInfo(f'd/{i}'), str(i).encode())
";
    python(dir.path(), code, &[]);
    let archive = std::fs::read(dir.path().join("many.zip")).unwrap();
    let index = index_by_all_ways(ArchiveKind::Zip, &archive, &mut rng);
    assert_eq!(index.len(), 65_600);
    let found = members(ArchiveKind::Zip, &archive, &index).unwrap();
    assert_eq!(
        found[index.find("d/65599").unwrap()].bytes.as_deref(),
        Some(b"65599".as_slice())
    );
}

/// Here Python itself takes the comment for the end record.
#[test]
fn zip_comment_that_looks_like_an_end_record() {
    let dir = tempfile::tempdir().unwrap();
    let code = "
import zipfile
with zipfile.ZipFile('c.zip', 'w') as z:
    z.writestr('a', b'x')
    z.comment = b'PK' + bytes([5, 6]) + bytes(30)
";
    python(dir.path(), code, &[]);
    let archive = std::fs::read(dir.path().join("c.zip")).unwrap();
    assert!(
        index_by_range(ArchiveKind::Zip, &archive)
            .unwrap()
            .readable("a")
            .is_ok()
    );
}

/// Encrypted, linked and unmarked: what zipfile cannot write is made by changing bytes of what it
/// can.
#[test]
fn zip_members_that_cannot_be_read_say_why() {
    let dir = tempfile::tempdir().unwrap();
    let code = "
import zipfile
with zipfile.ZipFile('a.zip', 'w') as z:
    z.writestr('plain', b'x')
    i = zipfile.ZipInfo('link'); i.create_system = 3; i.external_attr = 0o120777 << 16
    z.writestr(i, b'plain')
    z.writestr('secret', b'y')
b = bytearray(open('a.zip', 'rb').read())
at = b.rindex(b'secret') - 46
b[at + 8] |= 1
open('a.zip', 'wb').write(b)
";
    python(dir.path(), code, &[]);
    let archive = std::fs::read(dir.path().join("a.zip")).unwrap();
    let index = index_by_range(ArchiveKind::Zip, &archive).unwrap();
    assert!(index.readable("plain").is_ok());
    for (name, why) in [("link", "symbolic link"), ("secret", "encrypted")] {
        let e = index.readable(name).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        assert!(e.message().contains(why), "{e}");
    }
}

/// Streams of several gzip members, and lz4 frames of every shape that a foreign encoder writes.
#[test]
fn compressed_streams_of_other_programs() {
    use lz4_flex::frame::{BlockMode, BlockSize, FrameEncoder, FrameInfo};
    use std::io::Write;
    let mut rng = Rng::new();
    let parts: Vec<Vec<u8>> = [0, 1, 100_000, 700_000]
        .iter()
        .map(|&n| rng.bytes(n))
        .collect();
    let whole = parts.concat();
    let dir = tempfile::tempdir().unwrap();
    let mut gz = Vec::new();
    for part in &parts {
        let path = dir.path().join("with a name");
        std::fs::write(&path, part).unwrap();
        gz.extend(run(Command::new("gzip").arg("-c").arg(&path)));
    }
    gz.extend(python(
        dir.path(),
        "import gzip, sys; f = gzip.GzipFile('named', 'wb', fileobj=sys.stdout.buffer); \
         f.write(b'tail'); f.close()",
        &[],
    ));
    gz.extend([0; 100]);
    assert_eq!(
        decompressed(ArchiveKind::TarGz, &gz).unwrap(),
        [&whole[..], b"tail"].concat()
    );

    let mut lz4 = vec![0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
    let mut expected = Vec::new();
    for mode in [BlockMode::Independent, BlockMode::Linked] {
        for size in [
            BlockSize::Max64KB,
            BlockSize::Max256KB,
            BlockSize::Max1MB,
            BlockSize::Max4MB,
        ] {
            for checks in [false, true] {
                let info = FrameInfo::new()
                    .block_mode(mode)
                    .block_size(size)
                    .block_checksums(checks)
                    .content_checksum(checks);
                let info = info.content_size(checks.then_some(whole.len() as u64));
                let mut encoder = FrameEncoder::with_frame_info(info, &mut lz4);
                encoder.write_all(&whole).unwrap();
                encoder.finish().unwrap();
                lz4.extend([0x5f, 0x2a, 0x4d, 0x18, 0, 0, 0, 0]);
                expected.extend_from_slice(&whole);
            }
        }
    }
    assert_eq!(decompressed(ArchiveKind::TarLz4, &lz4).unwrap(), expected);
}
