//! The archives of batches: as a node writes them, cut anywhere, and as no node writes them.

use forebay_client::archive::{
    ARCHIVE_END_BYTES, BLOCK_BYTES, Cutter, Entry, Extended, Header, Visit, Walker, read_extended,
    read_header,
};
use forebay_core::{Error, Result};
use forebay_format::{tar_header_into, tar_header_with_pax, tar_padding_into, tar_trailer_into};
use forebay_protocol::batch::ERROR_KEYWORD;

/// Name, size or why it is missing, bytes.
type Arrived = (String, Result<u64, String>, Vec<u8>);

#[derive(Default, PartialEq, Debug)]
struct Seen(Vec<Arrived>, usize);

impl Visit for Seen {
    type Error = Error;

    fn entry(&mut self, entry: Entry<'_>) -> Result<()> {
        let size = match entry.absent {
            None => Ok(entry.size as u64),
            Some(why) => Err(why.to_owned()),
        };
        self.0.push((entry.name.to_owned(), size, Vec::new()));
        Ok(())
    }
    fn data(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.last_mut().unwrap().2.extend_from_slice(bytes);
        Ok(())
    }
    fn done(&mut self) -> Result<()> {
        self.1 += 1;
        Ok(())
    }
}

fn archive() -> (Vec<Arrived>, Vec<u8>) {
    let mut tar = Vec::new();
    let mut entries = Vec::new();
    let long = format!("b/{}/x.jpg", "deep/".repeat(40));
    let endless = format!("b/{}", "x".repeat(300));
    // Its header has it in two parts, of which the second begins as the name of a placeholder.
    let kept = format!("b/{}/__404__/{}", "y".repeat(40), "z".repeat(80));
    for (name, size) in [
        ("b/a", 0usize),
        ("b/one", 1),
        (&long, 512),
        ("b/two.bin", 1000),
        (&endless, 5),
        (&kept, 0),
        ("__404__/b/whole", 3),
        ("b/last", 513),
    ] {
        let data: Vec<u8> = (0..size).map(|i| i as u8).collect();
        tar_header_into(&mut tar, name, size as u64, 0).unwrap();
        tar.extend_from_slice(&data);
        tar_padding_into(&mut tar, size as u64);
        entries.push((name.to_owned(), Ok(size as u64), data));
    }
    for (name, why) in [
        ("__404__/b/a", Some("no such object")),
        ("__404__/b/c", None),
    ] {
        let records: Vec<_> = why.map(|why| (ERROR_KEYWORD, why)).into_iter().collect();
        tar_header_with_pax(&mut tar, name, 0, 0, &records).unwrap();
        let why = why.unwrap_or("not found").to_owned();
        entries.push((name.to_owned(), Err(why), Vec::new()));
    }
    tar_trailer_into(&mut tar);
    (entries, tar)
}

#[test]
fn entries_come_as_they_were_written_however_the_bytes_are_cut_up() {
    let (entries, tar) = archive();
    for step in [1, 7, 511, 512, 513, 100_000] {
        let (mut walker, mut seen) = (Walker::default(), Seen::default());
        for piece in tar.chunks(step) {
            walker.feed(piece, &mut seen).unwrap();
        }
        assert!(walker.is_whole());
        assert_eq!(seen.1, entries.len());
        assert_eq!(seen.0, entries, "pieces of {step}");
    }
}

#[test]
fn an_archive_is_cut_between_its_entries_however_it_arrives() {
    let (entries, tar) = archive();
    // Where each entry ends, by the walk that calls back.
    let ends: Vec<usize> = (0..tar.len())
        .step_by(BLOCK_BYTES)
        .scan(
            (Walker::default(), Seen::default()),
            |(walker, seen), at| {
                let before = seen.1;
                walker.feed(&tar[at..at + BLOCK_BYTES], seen).unwrap();
                Some((seen.1 > before).then_some(at + BLOCK_BYTES))
            },
        )
        .flatten()
        .collect();
    assert_eq!(ends.len(), entries.len());
    for step in [1, 7, 511, 512, 513, 100_000] {
        let (mut cutter, mut at, mut cuts) = (Cutter::default(), 0, Vec::new());
        for piece in tar[..tar.len() - ARCHIVE_END_BYTES].chunks(step) {
            let mut rest = piece;
            while !rest.is_empty() {
                let (taken, is_whole) = cutter.take(rest).unwrap();
                assert!(taken > 0 && (is_whole || taken == rest.len()));
                at += taken;
                rest = &rest[taken..];
                cuts.extend(is_whole.then_some(at));
            }
        }
        assert_eq!(cuts, ends, "pieces of {step}");
        let zeros = cutter.take(&[0; BLOCK_BYTES]).unwrap_err().to_string();
        assert!(zeros.contains("it ends early"), "{zeros}");
    }
}

#[test]
fn an_archive_that_is_cut_anywhere_is_an_error() {
    let (_, tar) = archive();
    for end in 0..tar.len() {
        let mut walker = Walker::default();
        walker.feed(&tar[..end], &mut Seen::default()).unwrap();
        assert!(!walker.is_whole(), "cut after {end} bytes");
    }
}

#[test]
fn a_damaged_header_is_an_error() {
    let (_, tar) = archive();
    for at in [0, 100, 130, 150, 156, 300] {
        let mut damaged = tar.clone();
        damaged[at] ^= 0x41;
        assert!(
            Walker::default()
                .feed(&damaged, &mut Seen::default())
                .is_err(),
            "byte {at}"
        );
    }
    // Some programs write more zeros than two blocks; anything else is another archive.
    let (mut walker, mut seen) = (Walker::default(), Seen::default());
    let more = [&tar[..], &[0; BLOCK_BYTES]].concat();
    walker.feed(&more, &mut seen).unwrap();
    assert!(walker.is_whole());
    assert!(walker.feed(&tar, &mut seen).is_err());
}

#[test]
fn headers_that_no_node_writes_are_errors() {
    let header = |change: &dyn Fn(&mut [u8])| {
        let mut block = Vec::new();
        tar_header_into(&mut block, "b/a", 7, 0).unwrap();
        change(&mut block);
        let spaced = [&block[..148], b"        ", &block[156..]].concat();
        let sum: u32 = spaced.iter().map(|b| u32::from(*b)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        read_header(&block, 0, &mut Extended::default(), false)
    };
    assert!(matches!(
        header(&|_| {}).unwrap(),
        Header::Entry { size: 7, .. }
    ));
    let size = |field: &'static [u8]| {
        header(&move |b: &mut [u8]| b[124..124 + field.len()].copy_from_slice(field))
    };
    assert!(size(b"0000000000x").is_err());
    assert!(size(&[0xff; 12]).is_err(), "more than there is");
    assert!(
        size(&[
            0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff
        ])
        .is_err(),
        "padding past the end of numbers"
    );
    for kind in [b'1', b'2', b'5', b'S', 0xff] {
        assert!(
            header(&move |b: &mut [u8]| b[156] = kind).is_err(),
            "{kind}"
        );
    }
    assert!(
        header(&|b: &mut [u8]| {
            b[156] = b'x';
            b[124..135].copy_from_slice(b"77777777777");
        })
        .is_err()
    );
    for records in [
        &b"x"[..],
        b"5 a\n",
        b"99 a=b\n",
        b"0 \n",
        b"11 size=4x\n",
        b"1 a=b\n",
    ] {
        let read = read_extended(b'x', records, 0, &mut Extended::default());
        assert!(read.is_err(), "{records:?}");
    }
}
