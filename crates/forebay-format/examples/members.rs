//! Archives as this crate sees them, for tests that compare it with other programs
//! (`tests/python/test_archives.py`).
//!
//! - `members list FILE…` prints, for each archive, a line `archive <path> <members>` or
//!   `archive <path> error <message>`, and under it a line for each member, in order:
//!   `<name> <storage> <offset> <size> <mtime> <number> <bytes>`. `number` is that of the member
//!   that a look-up of the name finds; `bytes` is `-` if the member cannot be read, or `!` and the
//!   message if reading failed.
//! - `members write KIND` reads lines `<name> <mtime> <bytes>` and writes that archive to standard
//!   output.
//!
//! Names, paths, messages and bytes are in hexadecimal. Every archive is indexed by range and, if
//! its kind streams, as a stream too; the two must agree.

use forebay_core::{Error, Result};
use forebay_format::{
    ArchiveKind, ArchiveWriter, Decompressor, Extent, Indexer, MemberDecoder, MemberIndex, Place,
    ScanStep,
};
use std::{
    io::{BufRead, Write},
    ops::Range,
};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["list", files @ ..] => files.iter().for_each(|f| list(f)),
        ["write", kind] => write(ArchiveKind::from_mime(kind).expect("a kind of archive")),
        _ => panic!("members list FILE… | members write KIND"),
    }
}

fn list(path: &str) {
    let archive = std::fs::read(path).expect("the archive can be read");
    let kind = ArchiveKind::from_name(path).expect("the file's extension is an archive's");
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let lines = index(kind, &archive).and_then(|index| Ok((index, plain(kind, &archive)?)));
    let told = match lines {
        Ok((index, plain)) => {
            let mut text = format!("archive {} {}\n", hex(path.as_bytes()), index.len());
            for m in index.iter() {
                let bytes = match m.is_readable().then(|| read(&m.extent, &archive, &plain)) {
                    None => "-".to_owned(),
                    Some(Ok(bytes)) => hex(&bytes),
                    Some(Err(e)) => format!("!{}", hex(e.to_string().as_bytes())),
                };
                let (name, e) = (hex(m.name.as_bytes()), &m.extent);
                let found = index
                    .find(m.name)
                    .expect("a member is found by its own name");
                text += &format!(
                    "{name} {:?} {} {} {} {found} {bytes}\n",
                    e.storage, e.offset, e.size, m.mtime_secs
                );
            }
            text
        }
        Err(e) => format!(
            "archive {} error {}\n",
            hex(path.as_bytes()),
            hex(e.to_string().as_bytes())
        ),
    };
    out.write_all(told.as_bytes()).expect("standard output");
}

/// By range and as a stream: the same index, or an error both ways.
fn index(kind: ArchiveKind, archive: &[u8]) -> Result<MemberIndex> {
    let mut indexer = Indexer::new(kind, archive.len() as u64);
    let by_range = loop {
        match indexer.step() {
            Ok(ScanStep::Need(range)) => drop(indexer.feed(range.start, slice(archive, range))),
            Ok(ScanStep::Done) => break indexer.finish(),
            Err(e) => break Err(e),
        }
    };
    if kind != ArchiveKind::Zip {
        let mut indexer = Indexer::new(kind, archive.len() as u64);
        let by_stream = archive
            .chunks(1000)
            .try_for_each(|piece| indexer.push(piece))
            .and_then(|()| indexer.finish());
        let same = match (&by_range, &by_stream) {
            (Ok(a), Ok(b)) => a == b,
            (a, b) => a.is_err() && b.is_err(),
        };
        assert!(same, "by range {by_range:?}, by stream {by_stream:?}");
    }
    let index = by_range?;
    assert!(
        MemberIndex::decode(&index.encode())? == index,
        "the index is another one after encoding"
    );
    Ok(index)
}

/// The decompressed archive, if it is compressed as a whole.
fn plain(kind: ArchiveKind, archive: &[u8]) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    if let Some(codec) = kind.codec() {
        let mut stream = Decompressor::new(codec, 1 << 30);
        stream.push_each(archive, |piece| {
            out.extend_from_slice(piece);
            Ok(())
        })?;
        stream.finish()?;
    }
    Ok(out)
}

fn read(extent: &Extent, archive: &[u8], plain: &[u8]) -> Result<Vec<u8>> {
    Ok(match extent.place()? {
        Place::Archive(range) => slice(archive, range).to_vec(),
        Place::Decompressed(range) => slice(plain, range).to_vec(),
        Place::ZipLocalHeader(range) => {
            let data = extent.zip_data_range(slice(archive, range))?;
            let mut out = Vec::new();
            MemberDecoder::new(extent)?.decode_all(slice(archive, data), &mut out)?;
            out
        }
    })
}

fn write(kind: ArchiveKind) {
    let (mut out, mut writer) = (Vec::new(), ArchiveWriter::new(kind));
    let written = std::io::stdin().lock().lines().try_for_each(|line| {
        let line = line.map_err(|e| Error::internal(e.to_string()))?;
        let [name, mtime, bytes] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line:?} is no entry")
        };
        let name = String::from_utf8(unhex(name)).expect("a name in UTF-8");
        writer.entry(
            &name,
            &unhex(bytes),
            mtime.parse().expect("a number of seconds"),
            &mut out,
        )
    });
    written
        .and_then(|()| writer.finish(&mut out))
        .expect("the archive can be written");
    std::io::stdout().write_all(&out).expect("standard output");
}

fn slice(bytes: &[u8], range: Range<u64>) -> &[u8] {
    &bytes[range.start as usize..range.end as usize]
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut text = String::with_capacity(2 * bytes.len());
    bytes
        .iter()
        .for_each(|b| write!(text, "{b:02x}").expect("writing to a String cannot fail"));
    text
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).expect("hexadecimal digits"))
        .collect()
}
