//! What we write: the same bytes however the data was split, and readable by other programs.

use crate::common::*;
use forebay_format::{ArchiveKind, ArchiveWriter, tar_exact_size};
use std::{io::Read, path::Path, process::Command};

struct Entry {
    name: String,
    bytes: Vec<u8>,
    mtime_secs: i64,
}

/// Names that end in a slash are left out: every reader takes them for directories.
fn entries(rng: &mut Rng) -> Vec<Entry> {
    let mut names: Vec<String> = [1, 99, 100, 101, 155, 200, 255, 256, 257, 400, 3000]
        .iter()
        .map(|&n| "n".repeat(n))
        .collect();
    names.extend(
        [1, 50, 99, 100, 127, 128, 129, 200, 600]
            .iter()
            .map(|&n| "d/".repeat(n) + "f.jpg"),
    );
    names.extend([
        format!("{}/{}", "p".repeat(155), "n".repeat(100)),
        format!("{}/{}", "p".repeat(156), "n".repeat(100)),
    ]);
    names.extend([
        format!("{}/{}", "p".repeat(155), "n".repeat(101)),
        format!("/{}", "r".repeat(100)),
    ]);
    names.extend(
        [
            "bucket/a b.jpg",
            "ü/日本/😀",
            "__404__/bucket/x",
            "./dot",
            "/abs",
            "../up",
            "new\nline",
        ]
        .map(String::from),
    );
    names.push("ü".repeat(90));
    names.push("bucket/a b.jpg".into());
    let mut out = Vec::new();
    for name in names {
        let size = [0, 1, 511, 512, 513, 4000, 70_000, 300_000][rng.below(8)];
        let mtime_secs = [0, 1_700_000_000, 1_700_000_002, 4_000_000_000][rng.below(4)];
        out.push(Entry {
            name,
            bytes: rng.bytes(size),
            mtime_secs,
        });
    }
    // Compressors store what does not compress.
    out.push(Entry {
        name: "noise".into(),
        bytes: (0..600_000).map(|_| rng.next() as u8).collect(),
        mtime_secs: 0,
    });
    // Larger than what a zip holds back, and than several blocks of the compressors.
    out.push(Entry {
        name: "large".into(),
        bytes: rng.bytes((1 << 20) + 12_345),
        mtime_secs: 2,
    });
    out
}

fn write(kind: ArchiveKind, entries: &[Entry], rng: Option<&mut Rng>) -> Vec<u8> {
    let mut out = Vec::new();
    let mut w = ArchiveWriter::new(kind);
    let mut rng = rng;
    for e in entries {
        w.begin_entry(&e.name, e.bytes.len() as u64, e.mtime_secs, &mut out)
            .unwrap();
        match rng.as_deref_mut() {
            None => w.data(&e.bytes, &mut out).unwrap(),
            Some(rng) => rng
                .cut(&e.bytes)
                .into_iter()
                .for_each(|piece| w.data(piece, &mut out).unwrap()),
        }
        w.end_entry(&mut out).unwrap();
    }
    w.finish(&mut out).unwrap();
    out
}

fn check_told(told: &[Told], entries: &[Entry], mtime_step: i64) {
    assert_eq!(told.len(), entries.len());
    for (t, e) in told.iter().zip(entries) {
        assert_eq!(t.name, e.name);
        assert!(
            t.bytes.as_ref() == Some(&e.bytes),
            "the bytes of {} differ",
            e.name
        );
        assert!(
            mtime_step == 0 || t.mtime_secs == e.mtime_secs / mtime_step * mtime_step,
            "{}: {} {}",
            e.name,
            t.mtime_secs,
            e.mtime_secs
        );
    }
}

#[test]
fn bytes_do_not_depend_on_how_data_was_cut_and_we_read_them_back() {
    let mut rng = Rng::new();
    let entries = entries(&mut rng);
    for kind in ArchiveKind::ALL {
        let archive = write(kind, &entries, None);
        for _ in 0..3 {
            assert!(archive == write(kind, &entries, Some(&mut rng)), "{kind}");
        }
        assert_eq!(ArchiveKind::from_magic(&archive), Some(kind));
        let index = index_by_all_ways(kind, &archive, &mut rng);
        check_told(
            &members(kind, &archive, &index).unwrap(),
            &entries,
            if kind == ArchiveKind::Zip { 0 } else { 1 },
        );
        let empty = write(kind, &[], None);
        assert!(index_by_all_ways(kind, &empty, &mut rng).is_empty());
    }
}

const TELL_TAR: &str = "
import sys, tarfile
for mode in ('r|*', 'r:*'):
    lines = []
    with tarfile.open(sys.argv[1], mode) as t:
        for m in t:
            assert m.isreg() and m.mode == 0o644 and m.uid == m.gid == 0 and m.uname == m.gname == '', m
            lines.append(f'{m.name.encode().hex()} {int(m.mtime)} {t.extractfile(m).read().hex()}')
print(chr(10).join(lines))
";

fn to_file(dir: &Path, name: &str, bytes: &[u8]) -> String {
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn python_reads_all_kinds() {
    let mut rng = Rng::new();
    let dir = tempfile::tempdir().unwrap();
    let entries = entries(&mut rng);
    for kind in [ArchiveKind::Tar, ArchiveKind::TarGz] {
        let path = to_file(dir.path(), "a", &write(kind, &entries, None));
        check_told(
            &parse_told(&python(dir.path(), TELL_TAR, &[&path])),
            &entries,
            1,
        );
    }
    // Python has no lz4: another implementation decompresses it.
    let mut tar = Vec::new();
    let lz4 = write(ArchiveKind::TarLz4, &entries, None);
    lz4_flex::frame::FrameDecoder::new(&lz4[..])
        .read_to_end(&mut tar)
        .unwrap();
    assert!(tar == write(ArchiveKind::Tar, &entries, None));

    let path = to_file(
        dir.path(),
        "a.zip",
        &write(ArchiveKind::Zip, &entries, None),
    );
    let tell_zip = "
import calendar, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as z:
    assert z.testzip() is None
    for m in z.infolist():
        assert m.compress_type == zipfile.ZIP_STORED and m.external_attr >> 16 == 0o100644, m
        print(m.filename.encode().hex(), calendar.timegm(m.date_time + (0, 0, 0)), z.read(m).hex())
";
    let told = parse_told(&python(dir.path(), tell_zip, &[&path]));
    check_told(&told, &entries, 0);
    for (t, e) in told.iter().zip(&entries) {
        assert_eq!(
            t.mtime_secs,
            e.mtime_secs.clamp(315_532_800, 4_354_819_198) / 2 * 2
        );
    }
}

#[test]
fn gnu_tar_and_gzip_read_tars() {
    let mut rng = Rng::new();
    let dir = tempfile::tempdir().unwrap();
    // One name per line.
    let entries: Vec<Entry> = entries(&mut rng)
        .into_iter()
        .filter(|e| !e.name.contains('\n'))
        .collect();
    for (kind, flag) in [(ArchiveKind::Tar, "-P"), (ArchiveKind::TarGz, "-z")] {
        let path = to_file(dir.path(), "a", &write(kind, &entries, None));
        let listed =
            run(Command::new("tar").args([flag, "-P", "--quoting-style=literal", "-tf", &path]));
        let names: String = entries.iter().map(|e| format!("{}\n", e.name)).collect();
        assert_eq!(String::from_utf8(listed).unwrap(), names);
        let bytes = run(Command::new("tar").args([flag, "-P", "-xOf", &path]));
        assert!(
            bytes
                == entries
                    .iter()
                    .flat_map(|e| e.bytes.clone())
                    .collect::<Vec<u8>>()
        );
    }
    run(Command::new("gzip")
        .args(["-t"])
        .stdin(std::fs::File::open(dir.path().join("a")).unwrap()));
}

/// Go's archive/tar and archive/zip, from the toolchain's own library: no module is downloaded.
#[test]
fn go_reads_tar_and_zip() {
    let mut rng = Rng::new();
    let dir = tempfile::tempdir().unwrap();
    let entries = entries(&mut rng);
    to_file(dir.path(), "tell.go", include_bytes!("../data/tell.go"));
    let tar = to_file(
        dir.path(),
        "a.tar",
        &write(ArchiveKind::Tar, &entries, None),
    );
    let zip = to_file(
        dir.path(),
        "a.zip",
        &write(ArchiveKind::Zip, &entries, None),
    );
    for path in [tar, zip] {
        let told = run(Command::new("go")
            .args(["run", "tell.go", &path])
            .current_dir(dir.path())
            .env("GOFLAGS", "-mod=mod"));
        check_told(
            &parse_told(&told),
            &entries,
            if path.ends_with("tar") { 1 } else { 0 },
        );
    }
}

#[test]
fn sizes_of_tars_are_known_beforehand() {
    let mut rng = Rng::new();
    let entries = entries(&mut rng);
    let told = tar_exact_size(
        entries
            .iter()
            .map(|e| (e.name.as_str(), e.bytes.len() as u64, e.mtime_secs)),
    )
    .unwrap();
    assert_eq!(told, write(ArchiveKind::Tar, &entries, None).len() as u64);
}

#[test]
fn numbers_too_large_for_ustar_and_records_of_ones_own() {
    let dir = tempfile::tempdir().unwrap();
    let mut out = Vec::new();
    forebay_format::tar_header_with_pax(
        &mut out,
        "huge",
        (9 << 30) + 1,
        -3,
        &[("FOREBAY.error", "not found: ü\nsecond line")],
    )
    .unwrap();
    let path = to_file(dir.path(), "h", &out);
    let code = "
import sys, tarfile
m = tarfile.TarInfo.fromtarfile(tarfile.open(sys.argv[1], 'r:', errorlevel=0)) if False else None
f = open(sys.argv[1], 'rb')
t = tarfile.TarFile.__new__(tarfile.TarFile)
t.fileobj, t.encoding, t.errors, t.pax_headers, t.offset = f, 'utf-8', 'surrogateescape', {}, 0
m = tarfile.TarInfo.fromtarfile(t)
print(m.name, m.size, m.mtime, m.pax_headers['FOREBAY.error'].replace(chr(10), '|'))
";
    assert_eq!(
        String::from_utf8(python(dir.path(), code, &[&path])).unwrap(),
        "huge 9663676417 -3.0 not found: ü|second line\n"
    );
    // In a zip it is the entry's comment.
    let (mut out, mut w) = (Vec::new(), ArchiveWriter::new(ArchiveKind::Zip));
    w.begin_entry_with_pax("gone", 0, 0, &[("FOREBAY.error", "not found")], &mut out)
        .unwrap();
    w.end_entry(&mut out).unwrap();
    w.finish(&mut out).unwrap();
    let path = to_file(dir.path(), "c.zip", &out);
    let comment = python(
        dir.path(),
        "import sys, zipfile; print(zipfile.ZipFile(sys.argv[1]).infolist()[0].comment)",
        &[&path],
    );
    assert_eq!(comment, b"b'FOREBAY.error=not found'\n");
}

#[test]
fn zip64_where_it_is_needed() {
    let mut rng = Rng::new();
    let dir = tempfile::tempdir().unwrap();
    let (mut out, mut w) = (Vec::new(), ArchiveWriter::new(ArchiveKind::Zip));
    for i in 0..65_536 {
        w.entry(&format!("e/{i}"), i.to_string().as_bytes(), 0, &mut out)
            .unwrap();
    }
    w.finish(&mut out).unwrap();
    let index = index_by_all_ways(ArchiveKind::Zip, &out, &mut rng);
    assert_eq!(index.len(), 65_536);
    let path = to_file(dir.path(), "many.zip", &out);
    let code = "import sys, zipfile; z = zipfile.ZipFile(sys.argv[1]); print(len(z.infolist()), \
        z.read('e/65535'))";
    assert_eq!(python(dir.path(), code, &[&path]), b"65536 b'65535'\n");
}

/// An entry past 4 GiB and one after it, written to a sparse file so that it costs no disk space.
#[test]
fn zip_entries_past_4_gib() {
    use std::os::unix::fs::FileExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("big.zip");
    let file = std::fs::File::create(&path).unwrap();
    let size = (4u64 << 30) + 5;
    let zeros = vec![0u8; 8 << 20];
    let (mut out, mut w, mut at) = (Vec::new(), ArchiveWriter::new(ArchiveKind::Zip), 0u64);
    let mut flush = |out: &mut Vec<u8>, holes: bool| {
        if !holes {
            file.write_all_at(out, at).unwrap();
        }
        at += out.len() as u64;
        out.clear();
    };
    w.begin_entry("zeros", size, 0, &mut out).unwrap();
    flush(&mut out, false);
    let mut left = size;
    while left > 0 {
        let n = left.min(zeros.len() as u64);
        w.data(&zeros[..n as usize], &mut out).unwrap();
        flush(&mut out, true);
        left -= n;
    }
    w.end_entry(&mut out).unwrap();
    w.entry("after", b"the end", 0, &mut out).unwrap();
    w.finish(&mut out).unwrap();
    flush(&mut out, false);
    let code = "
import sys, zipfile
z = zipfile.ZipFile(sys.argv[1])
print([(m.filename, m.file_size) for m in z.infolist()], z.read('after'))
with z.open('zeros') as f: print(f.read(100) == bytes(100))
";
    let told = python(dir.path(), code, &[path.to_str().unwrap()]);
    assert_eq!(
        String::from_utf8(told).unwrap(),
        format!("[('zeros', {size}), ('after', 7)] b'the end'\nTrue\n")
    );
    let total = path.metadata().unwrap().len();
    let mut indexer = forebay_format::Indexer::new(ArchiveKind::Zip, total);
    let file = std::fs::File::open(&path).unwrap();
    while let forebay_format::ScanStep::Need(r) = indexer.step().unwrap() {
        let mut buf = vec![0; (r.end - r.start) as usize];
        file.read_exact_at(&mut buf, r.start).unwrap();
        indexer.feed(r.start, &buf).unwrap();
    }
    let index = indexer.finish().unwrap();
    assert_eq!(index.get("zeros").unwrap().size(), size);
    let after = index.readable("after").unwrap();
    let mut header = [0; 30];
    file.read_exact_at(&mut header, after.extent.offset)
        .unwrap();
    let range = after.extent.zip_data_range(&header).unwrap();
    let mut data = [0; 7];
    file.read_exact_at(&mut data, range.start).unwrap();
    assert_eq!(&data, b"the end");
}

#[test]
fn a_writer_that_was_misused_never_completes_an_archive() {
    for kind in ArchiveKind::ALL {
        let mut out = Vec::new();
        let mut w = ArchiveWriter::new(kind);
        w.begin_entry("a", 3, 0, &mut out).unwrap();
        w.data(b"ab", &mut out).unwrap();
        assert!(w.end_entry(&mut out).is_err());
        assert!(w.finish(&mut out).is_err());
        let mut w = ArchiveWriter::new(kind);
        w.begin_entry("a", 3, 0, &mut out).unwrap();
        assert!(w.data(b"abcd", &mut out).is_err());
        assert!(w.data(b"abc", &mut out).is_err());
        let mut w = ArchiveWriter::new(kind);
        assert!(w.begin_entry("", 3, 0, &mut out).is_err());
        assert!(w.begin_entry("a\0b", 3, 0, &mut out).is_err());
        w.entry("a", b"abc", 0, &mut out).unwrap();
        w.finish(&mut out).unwrap();
        assert!(w.finish(&mut out).is_err());
    }
}
