//! Files of rows that are cut, changed, or made to deceive: a clear error or correct rows, never a
//! panic, a hang, or unbounded memory.

use crate::common::{Rng, cases};
use crate::rows_common::*;
use arrow_array::{
    Array, ArrayRef, Int32Array, Int64Array, RecordBatch,
    builder::{Int32Builder, ListBuilder},
};
use arrow_schema::{DataType, Field, Schema};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_format::{
    ArchiveKind,
    example::ExampleSpec,
    tabular::{
        FileIndex, FileIndexer, FileOpener, FileReader, Format, IndexOptions, Need, Projection,
        Rows,
    },
    tfrecord,
};
use parquet::{
    arrow::ArrowWriter,
    file::properties::{WriterProperties, WriterVersion},
};
use std::sync::Arc;

/// A small file of each format.
fn files(rng: &mut Rng) -> Vec<(Format, Vec<u8>)> {
    let (schema, batches) = batches(&[40, 0, 30], rng);
    let mut all = vec![
        (Format::Parquet, write_parquet(&schema, &batches, 25, rng)),
        (Format::Parquet, write_parquet(&schema, &batches, 1000, rng)),
        (
            Format::ArrowStream,
            write_arrow(Format::ArrowStream, &schema, &batches, rng),
        ),
        (
            Format::ArrowFile,
            write_arrow(Format::ArrowFile, &schema, &batches[..1], rng),
        ),
    ];
    let records: Vec<Vec<u8>> = (0..30i64)
        .map(|i| {
            example::example(&[
                ("n", example::Value::Ints(&[i], true)),
                ("b", example::Value::Bytes(&[b"bytes"])),
            ])
        })
        .collect();
    all.push((Format::TfRecord, tfrecords(&records)));
    all.push((
        Format::Jsonl,
        (0..30)
            .flat_map(|i| format!("{{\"i\": {i}}}\n").into_bytes())
            .collect(),
    ));
    all.push((
        Format::Csv,
        (0..30).fold(b"i,\"a,b\"\n".to_vec(), |mut text, i| {
            text.extend_from_slice(format!("{i},\"x\"\"\n{i}\"\n").as_bytes());
            text
        }),
    ));
    let (columns, values) = mds_samples(30, rng);
    all.push((Format::Mds, mds(&columns, &values)));
    all.push((Format::Tar, archive(ArchiveKind::Tar, &samples(8, rng))));
    all.push((Format::Zip, archive(ArchiveKind::Zip, &samples(8, rng))));
    all
}

/// Reads everything that can be read; returns the number of rows.
fn try_all(format: Format, bytes: &[u8], rng: &mut Rng) -> Result<u64> {
    let mut options = small_blocks(rng);
    if format == Format::TfRecord && rng.below(2) == 0 {
        options.example = Some(ExampleSpec::default());
    }
    let (mut source, reader) = open(format, bytes, &options, rng)?;
    let index = reader.index().clone();
    let mut failed = None;
    for block in 0..index.blocks().blocks() {
        let rows = index.blocks().block_rows(block);
        if let Err(e) = checked(source.read(&reader, block, Rows::All, &Projection::All, rng)) {
            failed = Some(e);
        }
        let some = Rows::sorted([rows / 2]).unwrap();
        if rows > 0
            && let Err(e) = checked(source.read(&reader, block, some, &Projection::All, rng))
        {
            failed = Some(e);
        }
    }
    failed.map_or(Ok(index.rows()), Err)
}

#[test]
fn cut_at_every_offset() {
    let mut rng = Rng::new();
    for (format, bytes) in files(&mut rng) {
        let whole = try_all(format, &bytes, &mut rng).unwrap();
        let step = (bytes.len() / 1500).max(1);
        for at in (0..bytes.len()).step_by(step) {
            match checked(try_all(format, &bytes[..at], &mut rng)) {
                // A file that ends between two rows, two messages or two members is a shorter file.
                Ok(rows) => assert!(
                    matches!(
                        format,
                        Format::TfRecord
                            | Format::Jsonl
                            | Format::Csv
                            | Format::ArrowStream
                            | Format::Tar
                    ) && rows <= whole,
                    "{format} cut at {at}"
                ),
                Err(e) => assert!(!e.message().is_empty()),
            }
        }
    }
}

#[test]
fn flipped_bytes_anywhere() {
    let mut rng = Rng::new();
    for (format, bytes) in files(&mut rng) {
        for _ in 0..cases(600) {
            let mut bad = bytes.clone();
            for _ in 0..1 + rng.below(3) {
                // Half of the time near the end, where footers are.
                let at = if rng.below(2) == 0 {
                    rng.below(bad.len())
                } else {
                    bad.len() - 1 - rng.below(bad.len().min(2000))
                };
                bad[at] = [rng.next() as u8, 0, 0xff, 0x7f, bad[at] ^ 1][rng.below(5)];
            }
            let _ = checked(try_all(format, &bad, &mut rng));
        }
    }
}

#[test]
fn noise_and_empty_files() {
    let mut rng = Rng::new();
    for format in [Format::Parquet, Format::ArrowFile, Format::ArrowStream] {
        assert!(checked(try_all(format, b"", &mut rng)).is_err(), "{format}");
        for _ in 0..200 {
            let len = rng.below(3000);
            let noise = rng.bytes(len);
            assert!(
                checked(try_all(format, &noise, &mut rng)).is_err(),
                "{format}"
            );
        }
    }
    for format in [Format::TfRecord, Format::Jsonl] {
        assert_eq!(try_all(format, b"", &mut rng).unwrap(), 0, "{format}");
    }
    assert_eq!(try_all(Format::Jsonl, b"\n \n\r\n", &mut rng).unwrap(), 0);
    for format in [Format::Objects, Format::Tar, Format::Zip] {
        assert_eq!(
            FileIndexer::new(format, 10, &IndexOptions::default())
                .unwrap_err()
                .kind(),
            ErrorKind::Invalid
        );
    }
}

/// Every error about a damaged file is `Corrupt`, whatever its format and wherever the damage is.
#[test]
fn damage_is_of_one_kind_in_every_format() {
    let mut rng = Rng::new();
    for (format, bytes) in files(&mut rng) {
        let n = bytes.len();
        let mut told = 0;
        for (what, range, with) in [
            ("cut in half", n / 2..n, None),
            ("cut by a byte", n - 1..n, None),
            ("zeros at the end", n - 64..n, Some(0)),
            ("ones at the end", n - 64..n, Some(0xff)),
            ("zeros at the beginning", 0..64, Some(0)),
            ("ones at the beginning", 0..64, Some(0xff)),
            ("text all over", 0..n, Some(b'x')),
        ] {
            let mut bad = bytes.clone();
            match with {
                None => bad.truncate(range.start),
                Some(byte) => bad[range].fill(byte),
            }
            // If nothing needs the damaged bytes, or one row less is still a whole file, there is
            // no error.
            if let Err(e) = checked(try_all(format, &bad, &mut rng)) {
                assert_eq!(e.kind(), ErrorKind::Corrupt, "{format}, {what}: {e}");
                told += 1;
            }
        }
        assert!(told >= 3, "{format}: {told} of 7 were told");
    }
}

fn parquet_error(bytes: Vec<u8>, rng: &mut Rng) -> Error {
    try_all(Format::Parquet, &bytes, rng).unwrap_err()
}

#[test]
fn parquet_footers_that_lie() {
    let mut rng = Rng::new();
    let (schema, batches) = batches(&[50], &mut rng);
    let good = write_parquet(&schema, &batches, 1000, &mut rng);
    let with_footer_len = |len: u32| {
        let mut bad = good.clone();
        let at = bad.len() - 8;
        bad[at..at + 4].copy_from_slice(&len.to_le_bytes());
        bad
    };
    for (bytes, kind, says) in [
        (with_footer_len(0), ErrorKind::Corrupt, "0 bytes long"),
        (
            with_footer_len(good.len() as u32),
            ErrorKind::Corrupt,
            "says that it is",
        ),
        (
            with_footer_len(u32::MAX),
            ErrorKind::Corrupt,
            "4294967295 bytes long, in a file of",
        ),
        (
            with_footer_len(20),
            ErrorKind::Corrupt,
            "the Parquet footer",
        ),
        (
            [&good[..good.len() - 4], b"PARE"].concat(),
            ErrorKind::Unsupported,
            "encrypted",
        ),
        (
            [&good[..good.len() - 4], b"xxxx"].concat(),
            ErrorKind::Corrupt,
            "PAR1",
        ),
        (b"PAR1".to_vec(), ErrorKind::Corrupt, "too short"),
    ] {
        let e = parquet_error(bytes, &mut rng);
        assert!(
            e.kind() == kind && e.message().contains(says),
            "{says}: {e:?}"
        );
    }
}

/// Just enough of Thrift's compact protocol to write footers that no real writer would.
mod thrift {
    pub fn varint(mut v: u64) -> Vec<u8> {
        let mut out = Vec::new();
        while v >= 0x80 {
            out.push(v as u8 | 0x80);
            v >>= 7;
        }
        out.push(v as u8);
        out
    }
    pub fn int(v: i64) -> Vec<u8> {
        varint(((v << 1) ^ (v >> 63)) as u64)
    }
    pub fn text(v: &str) -> Vec<u8> {
        [varint(v.len() as u64), v.as_bytes().to_vec()].concat()
    }
    pub fn list(ty: u8, items: &[Vec<u8>]) -> Vec<u8> {
        [vec![0xf0 | ty], varint(items.len() as u64), items.concat()].concat()
    }
    /// Fields by number, type and value.
    pub fn fields(fields: &[(i64, u8, Vec<u8>)]) -> Vec<u8> {
        let mut out: Vec<u8> = fields
            .iter()
            .flat_map(|(id, ty, v)| [vec![*ty], int(*id), v.clone()].concat())
            .collect();
        out.push(0);
        out
    }
}

const I16: u8 = 4;
const I32: u8 = 5;
const I64: u8 = 6;
const TEXT: u8 = 8;
const LIST: u8 = 9;
const STRUCT: u8 = 12;

fn element(name: &str, children: Option<i64>) -> Vec<u8> {
    use thrift::*;
    match children {
        Some(n) => fields(&[(3, I32, int(0)), (4, TEXT, text(name)), (5, I32, int(n))]),
        None => fields(&[(1, I32, int(1)), (3, I32, int(0)), (4, TEXT, text(name))]),
    }
}

#[derive(Clone)]
struct Lie {
    rows: i64,
    group_rows: i64,
    values: i64,
    codec: i64,
    decoded: i64,
    stored: i64,
    offset: i64,
    dictionary: Option<i64>,
    file: Option<&'static str>,
    schema: Vec<Vec<u8>>,
    columns: usize,
    /// A field at the end of the column's metadata: number, type, value.
    last: Option<(i64, u8, i64)>,
    /// The column is described twice, the first time with this dictionary.
    twice: Option<i64>,
}

const TRUTH: Lie = Lie {
    rows: 5,
    group_rows: 5,
    values: 5,
    codec: 0,
    decoded: 50,
    stored: 50,
    offset: 4,
    dictionary: None,
    file: None,
    schema: Vec::new(),
    columns: 1,
    last: None,
    twice: None,
};

impl Lie {
    fn file(&self) -> Vec<u8> {
        use thrift::*;
        let schema = match self.schema.is_empty() {
            true => vec![element("root", Some(1)), element("x", None)],
            false => self.schema.clone(),
        };
        let mut meta = vec![
            (1, I32, int(1)),
            (2, LIST, list(I32, &[int(0)])),
            (3, LIST, list(TEXT, &[text("x")])),
            (4, I32, int(self.codec)),
            (5, I64, int(self.values)),
            (6, I64, int(self.decoded)),
            (7, I64, int(self.stored)),
            (9, I64, int(self.offset)),
        ];
        meta.extend(self.dictionary.map(|d| (11, I64, int(d))));
        meta.extend(self.last.map(|(id, ty, v)| (id, ty, int(v))));
        let mut chunk = vec![(2, I64, int(0))];
        chunk.extend(self.twice.map(|d| {
            (
                3,
                STRUCT,
                fields(&[meta.as_slice(), &[(11, I64, int(d))]].concat()),
            )
        }));
        chunk.push((3, STRUCT, fields(&meta)));
        chunk.extend(self.file.map(|f| (1, TEXT, text(f))));
        let chunk = fields(&chunk);
        let group = fields(&[
            (1, LIST, list(STRUCT, &vec![chunk; self.columns])),
            (2, I64, int(self.decoded)),
            (3, I64, int(self.group_rows)),
        ]);
        let footer = fields(&[
            (1, I32, int(1)),
            (2, LIST, list(STRUCT, &schema)),
            (3, I64, int(self.rows)),
            (4, LIST, list(STRUCT, &[group])),
        ]);
        [
            b"PAR1".as_slice(),
            &[0; 60],
            &footer,
            &(footer.len() as u32).to_le_bytes(),
            b"PAR1",
        ]
        .concat()
    }
}

#[test]
fn parquet_footers_that_no_writer_would_write() {
    let mut rng = Rng::new();
    let flat = |n: usize| {
        std::iter::once(element("root", Some(n as i64)))
            .chain((0..n).map(|i| element(&format!("c{i}"), None)))
            .collect::<Vec<_>>()
    };
    let deep = |n: usize| {
        (0..n)
            .map(|i| element(&format!("g{i}"), Some(1)))
            .chain([element("x", None)])
            .collect::<Vec<_>>()
    };
    let cases: Vec<(&str, Lie, ErrorKind, &str)> = vec![
        (
            "rows that contradict",
            Lie { rows: 6, ..TRUTH },
            ErrorKind::Corrupt,
            "contradicts itself",
        ),
        (
            "rows below zero",
            Lie {
                rows: -5,
                group_rows: -5,
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "damaged",
        ),
        (
            "more rows than there can be",
            Lie {
                rows: i64::MAX,
                group_rows: i64::MAX,
                ..TRUTH
            },
            ErrorKind::Unsupported,
            "limit",
        ),
        (
            "an offset below zero",
            Lie {
                offset: -4,
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "below zero",
        ),
        (
            "an offset past the end",
            Lie {
                offset: 1 << 40,
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "outside",
        ),
        (
            "a dictionary below zero",
            Lie {
                dictionary: Some(i64::MIN),
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "below zero",
        ),
        // A decoder interprets a field by its number.
        (
            "a dictionary that is a short number",
            Lie {
                last: Some((11, I16, -4)),
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "not have the type",
        ),
        (
            "an index page that is a text",
            Lie {
                last: Some((10, TEXT, 0)),
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "not have the type",
        ),
        (
            "a column that is described twice",
            Lie {
                twice: Some(-4),
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "decode differently",
        ),
        (
            "a second offset, below zero",
            Lie {
                last: Some((9, I64, -4)),
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "below zero",
        ),
        (
            "a size below zero",
            Lie {
                stored: -1,
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "below zero",
        ),
        (
            "a size past the end",
            Lie {
                stored: i64::MAX,
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "outside",
        ),
        (
            "values below zero",
            Lie {
                values: -1,
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "outside",
        ),
        (
            "too much inside",
            Lie {
                decoded: 1 << 40,
                ..TRUTH
            },
            ErrorKind::Unsupported,
            "limit",
        ),
        (
            "brotli",
            Lie { codec: 4, ..TRUTH },
            ErrorKind::Unsupported,
            "brotli",
        ),
        (
            "LZO",
            Lie { codec: 3, ..TRUTH },
            ErrorKind::Unsupported,
            "LZO",
        ),
        (
            "a codec from the future",
            Lie { codec: 99, ..TRUTH },
            ErrorKind::Unsupported,
            "not known",
        ),
        (
            "another file",
            Lie {
                file: Some("elsewhere"),
                ..TRUTH
            },
            ErrorKind::Unsupported,
            "another file",
        ),
        (
            "overlapping columns",
            Lie {
                schema: flat(3),
                columns: 3,
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "more bytes than the file has",
        ),
        (
            "fewer columns than the schema",
            Lie {
                schema: flat(3),
                columns: 2,
                stored: 0,
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "as many columns",
        ),
        (
            "no columns",
            Lie {
                schema: vec![element("root", Some(0))],
                columns: 0,
                ..TRUTH
            },
            ErrorKind::Unsupported,
            "has no columns",
        ),
        (
            "children that are not there",
            Lie {
                schema: vec![element("root", Some(9)), element("x", None)],
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "fewer elements",
        ),
        (
            "children below zero",
            Lie {
                schema: vec![element("root", Some(-1)), element("x", None)],
                ..TRUTH
            },
            ErrorKind::Corrupt,
            "negative number",
        ),
        (
            "ten thousand levels",
            Lie {
                schema: deep(10_000),
                ..TRUTH
            },
            ErrorKind::Unsupported,
            "nested",
        ),
        (
            "forty thousand columns thirty deep",
            {
                let schema = deep(29)
                    .into_iter()
                    .take(29)
                    .chain([element("g", Some(40_000))])
                    .chain((0..40_000).map(|_| element("x", None)));
                Lie {
                    schema: schema.collect(),
                    columns: 1,
                    ..TRUTH
                }
            },
            ErrorKind::Unsupported,
            "names on the paths",
        ),
    ];
    for (what, lie, kind, says) in cases {
        let e = parquet_error(lie.file(), &mut rng);
        assert!(
            e.kind() == kind && e.message().contains(says),
            "{what}: {e:?}"
        );
    }
    // According to the footers, there is a block of rows; the pages are zeros.
    let e = parquet_error(TRUTH.file(), &mut rng);
    assert_eq!(e.kind(), ErrorKind::Corrupt, "{e:?}");
    // Zero rows, and ten thousand adjacent columns, are not a lie.
    assert_eq!(
        try_all(
            Format::Parquet,
            &Lie {
                rows: 0,
                group_rows: 0,
                values: 0,
                stored: 0,
                decoded: 0,
                ..TRUTH
            }
            .file(),
            &mut rng
        )
        .unwrap(),
        0
    );
    let wide = Lie {
        schema: flat(10_000),
        columns: 10_000,
        stored: 0,
        decoded: 0,
        ..TRUTH
    }
    .file();
    let index = Source::new(wide)
        .index(Format::Parquet, &IndexOptions::default(), &mut rng)
        .unwrap();
    assert_eq!((index.rows(), index.schema().fields().len()), (5, 10_000));
}

/// Lists of one number each, in an uncompressed page; `at` finds the runs of its repetition levels.
fn parquet_of_lists(version: WriterVersion) -> (Vec<u8>, usize) {
    let mut list = ListBuilder::new(Int32Builder::new());
    (0..50).for_each(|i| list.append_value([Some(i)]));
    let batch =
        RecordBatch::try_from_iter([("list", Arc::new(list.finish()) as ArrayRef)]).unwrap();
    let properties = WriterProperties::builder()
        .set_writer_version(version)
        .set_dictionary_enabled(false)
        .build();
    let mut w = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
    w.write(&batch).unwrap();
    let file = w.into_inner().unwrap();
    // A run of fifty zeros, after its length in version 1; then fifty definition levels, all at the
    // maximum.
    let runs: &[u8] = if version == WriterVersion::PARQUET_1_0 {
        &[2, 0, 0, 0, 100, 0, 2, 0, 0, 0, 100, 2]
    } else {
        &[100, 0, 100, 2]
    };
    let found: Vec<usize> = (0..file.len())
        .filter(|&at| file[at..].starts_with(runs))
        .collect();
    assert_eq!(found.len(), 1, "{version:?}");
    (
        file,
        found[0] + runs.iter().position(|&b| b == 100).unwrap(),
    )
}

/// The decoder would look for levels forever.
#[test]
fn parquet_pages_with_fewer_repetition_levels_than_values() {
    let mut rng = Rng::new();
    for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
        let (good, runs) = parquet_of_lists(version);
        // No run at all, a shorter one, and one of packed bits that do not exist.
        for head in [0, 98, 2, 3] {
            let mut bad = good.clone();
            bad[runs] = head;
            let (mut source, reader) =
                open(Format::Parquet, &bad, &IndexOptions::default(), &mut rng).unwrap();
            for row in [0, 1, 49] {
                let rows = Rows::sorted([row]).unwrap();
                let e = source
                    .read(&reader, 0, rows, &Projection::All, &mut rng)
                    .unwrap_err();
                assert!(
                    e.kind() == ErrorKind::Corrupt
                        && e.message().contains("fewer repetition levels"),
                    "{version:?}, {head}: {e:?}"
                );
            }
            assert_eq!(
                source
                    .read(&reader, 0, Rows::All, &Projection::All, &mut rng)
                    .unwrap_err()
                    .kind(),
                ErrorKind::Corrupt
            );
        }
        let (mut source, reader) =
            open(Format::Parquet, &good, &IndexOptions::default(), &mut rng).unwrap();
        assert_eq!(
            source
                .read(
                    &reader,
                    0,
                    Rows::sorted([49]).unwrap(),
                    &Projection::All,
                    &mut rng
                )
                .unwrap()
                .num_rows(),
            1
        );
    }
}

#[test]
fn a_parquet_file_that_changes_between_indexing_and_opening() {
    let mut rng = Rng::new();
    let (schema, batches) = batches(&[50], &mut rng);
    let a = write_parquet(&schema, &batches, 1000, &mut rng);
    let index = Source::new(a.clone())
        .index(Format::Parquet, &IndexOptions::default(), &mut rng)
        .unwrap();
    // The same size, with other rows in its footer.
    let fewer = write_parquet(&schema, &[batches[0].slice(0, 20)], 1000, &mut rng);
    let mut b = vec![0; a.len().saturating_sub(fewer.len())];
    b.extend_from_slice(&fewer);
    b.truncate(a.len());
    let mut opener = FileOpener::new(Arc::new(index)).unwrap();
    while let Need::Ranges(ranges) = opener.step().unwrap() {
        for r in ranges {
            opener
                .feed(r.start, b[r.start as usize..r.end as usize].to_vec().into())
                .unwrap();
        }
    }
    // Where the footer was, there is now another footer, or bytes that may look like anything.
    let e = checked(opener.finish()).unwrap_err();
    assert!(
        matches!(
            e.kind(),
            ErrorKind::VersionChanged | ErrorKind::Corrupt | ErrorKind::Unsupported
        ),
        "{e:?}"
    );
}

#[test]
fn arrow_files_that_lie() {
    let mut rng = Rng::new();
    let batch = RecordBatch::try_from_iter([(
        "n",
        Arc::new(Int32Array::from_iter_values(0..100)) as ArrayRef,
    )])
    .unwrap();
    let mut w = arrow_ipc::writer::FileWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    w.write(&batch).unwrap();
    w.finish().unwrap();
    let good = w.into_inner().unwrap();
    let with_footer_len = |len: i32| {
        let mut bad = good.clone();
        let at = bad.len() - 10;
        bad[at..at + 4].copy_from_slice(&len.to_le_bytes());
        bad
    };
    for (bytes, says) in [
        (with_footer_len(-1), "says that it is -1"),
        (with_footer_len(0), "says that it is 0"),
        (with_footer_len(i32::MAX), "says that it is"),
        (with_footer_len(16), "damaged"),
        ([&good[..good.len() - 6], b"ARROW2"].concat(), "ARROW1"),
        (b"ARROW1".to_vec(), "too short"),
    ] {
        let e = try_all(Format::ArrowFile, &bytes, &mut rng).unwrap_err();
        assert!(
            e.kind() == ErrorKind::Corrupt && e.message().contains(says),
            "{says}: {e:?}"
        );
    }
    // A stream that claims a body past its end, and a header past it.
    let mut w = arrow_ipc::writer::StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    w.write(&batch).unwrap();
    let stream = w.into_inner().unwrap();
    assert_eq!(
        try_all(Format::ArrowStream, &stream, &mut rng).unwrap(),
        100
    );
    // Its end takes eight bytes.
    for (cut, says) in [(1, "cut off"), (9, "past the end")] {
        let e = try_all(Format::ArrowStream, &stream[..stream.len() - cut], &mut rng).unwrap_err();
        assert!(e.message().contains(says), "{e:?}");
    }
    let head = [&[0xff; 4], i32::MAX.to_le_bytes().as_slice(), &[0; 64]].concat();
    assert_eq!(
        try_all(Format::ArrowStream, &head, &mut rng)
            .unwrap_err()
            .kind(),
        ErrorKind::Corrupt
    );
    // A schema nested too deeply.
    let deep = (0..80).fold(DataType::Int32, |ty, i| {
        DataType::Struct(vec![Field::new(format!("f{i}"), ty, true)].into())
    });
    let schema = Schema::new(vec![Field::new("deep", deep, true)]);
    let mut w = arrow_ipc::writer::StreamWriter::try_new(Vec::new(), &schema).unwrap();
    w.finish().unwrap();
    let e = try_all(Format::ArrowStream, &w.into_inner().unwrap(), &mut rng).unwrap_err();
    assert!(
        matches!(e.kind(), ErrorKind::Unsupported | ErrorKind::Corrupt),
        "{e:?}"
    );
}

#[test]
fn tfrecords_that_lie() {
    let mut rng = Rng::new();
    let good = tfrecords(&[b"hello".to_vec(), vec![7; 100]]);
    let len = |len: u64| {
        let mut bad = good.clone();
        bad[..8].copy_from_slice(&len.to_le_bytes());
        bad[8..12].copy_from_slice(&tfrecord::masked_crc32c(&len.to_le_bytes()).to_le_bytes());
        bad
    };
    let flip = |at: usize| {
        let mut bad = good.clone();
        bad[at] ^= 1;
        bad
    };
    for (bytes, kind, says) in [
        (len(1 << 20), ErrorKind::Corrupt, "past the end of the file"),
        (len(u64::MAX), ErrorKind::Unsupported, "limit"),
        (len(6), ErrorKind::Corrupt, "checksum"),
        (
            flip(0),
            ErrorKind::Corrupt,
            "length of the TFRecord at offset 0",
        ),
        (
            flip(9),
            ErrorKind::Corrupt,
            "length of the TFRecord at offset 0",
        ),
        (
            flip(13),
            ErrorKind::Corrupt,
            "data of the TFRecord at offset 0",
        ),
        (
            flip(18),
            ErrorKind::Corrupt,
            "data of the TFRecord at offset 0",
        ),
        (
            flip(50),
            ErrorKind::Corrupt,
            "data of the TFRecord at offset 21",
        ),
        (good[..30].to_vec(), ErrorKind::Corrupt, "cut off"),
        (
            good[..good.len() - 1].to_vec(),
            ErrorKind::Corrupt,
            "past the end",
        ),
    ] {
        let (mut source, failed) = (Source::new(bytes), IndexOptions::default());
        let read = |source: &mut Source, rng: &mut Rng| -> Result<()> {
            let index = source.index(Format::TfRecord, &failed, rng)?;
            let reader = source.open(Arc::new(index), rng)?;
            read_all(source, &reader, rng).map(drop)
        };
        let e = read(&mut source, &mut rng).unwrap_err();
        assert!(
            e.kind() == kind && e.message().contains(says),
            "{says}: {e:?}"
        );
    }
    // A wrong offset in the separate file shows when the record is read.
    let index = tfrecord::side_file::index(
        b"0 30\n30 107\n",
        good.len() as u64,
        &IndexOptions::default(),
    )
    .unwrap();
    let mut source = Source::new(good.clone());
    let reader = source.open(Arc::new(index), &mut rng).unwrap();
    let got = read_all(&mut source, &reader, &mut rng);
    // Both records are in one piece, and are found there whatever the offsets say.
    assert!(got.is_ok_and(|b| b[0].num_rows() == 2));
    // Records that are not examples.
    let options = IndexOptions {
        example: Some(ExampleSpec::default()),
        ..IndexOptions::default()
    };
    let e = open(
        Format::TfRecord,
        &tfrecords(&[b"\xff\xff\xff".to_vec()]),
        &options,
        &mut rng,
    )
    .err()
    .unwrap();
    assert!(
        e.message().contains("offset 0") && e.message().contains("tf.train.Example"),
        "{e:?}"
    );
}

#[test]
fn samples_that_lie() {
    let twice = vec![(
        "a".to_owned(),
        vec![("jpg".to_owned(), vec![1]), ("jpg".to_owned(), vec![2])],
    )];
    let e = open(
        Format::Tar,
        &archive(ArchiveKind::Tar, &twice),
        &IndexOptions::default(),
        &mut Rng::new(),
    )
    .err()
    .unwrap();
    assert!(
        e.kind() == ErrorKind::Corrupt && e.message().contains("\"jpg\" twice"),
        "{e:?}"
    );
    let key = vec![("a".to_owned(), vec![("__KEY__".to_owned(), vec![1])])];
    let archived = archive(ArchiveKind::Tar, &key);
    let e = open(
        Format::Tar,
        &archived,
        &IndexOptions::default(),
        &mut Rng::new(),
    );
    let e = e.err().unwrap();
    assert!(
        e.kind() == ErrorKind::Corrupt && e.message().contains("a.__KEY__"),
        "{e:?}"
    );
    let many = vec![(
        "a".to_owned(),
        (0..1001)
            .map(|i| (format!("f{i}"), Vec::new()))
            .collect::<Vec<_>>(),
    )];
    let e = open(
        Format::Tar,
        &archive(ArchiveKind::Tar, &many),
        &IndexOptions::default(),
        &mut Rng::new(),
    )
    .err()
    .unwrap();
    assert!(e.kind() == ErrorKind::Unsupported, "{e:?}");
}

#[test]
fn stored_indexes_that_are_damaged() {
    let mut rng = Rng::new();
    for (format, bytes) in files(&mut rng) {
        let (_, reader) = open(format, &bytes, &small_blocks(&mut rng), &mut rng).unwrap();
        let (index, schema) = (reader.index().encode(), reader.index().schema().clone());
        for at in 0..index.len() {
            assert_eq!(
                FileIndex::decode(&index[..at], schema.clone())
                    .unwrap_err()
                    .kind(),
                ErrorKind::Corrupt
            );
            let mut bad = index.clone();
            bad[at] ^= 1 << rng.below(8);
            assert_eq!(
                FileIndex::decode(&bad, schema.clone()).unwrap_err().kind(),
                ErrorKind::Corrupt
            );
        }
    }
}

/// A dictionary turns kilobytes into gigabytes. A reader with a bound asks for memory before that
/// happens, and can still read a few rows.
#[test]
fn a_bounded_reader_asks_for_memory_before_it_decodes() {
    use arrow_array::LargeBinaryArray;
    let value = vec![7u8; 256 << 10];
    let many: ArrayRef = Arc::new(LargeBinaryArray::from(vec![&value[..]; 100]));
    let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(0..100));
    let batch = RecordBatch::try_from_iter([("n", numbers), ("blob", many)]).unwrap();
    for stated in [true, false] {
        let mut properties = WriterProperties::builder()
            .set_max_row_group_row_count(None)
            .set_dictionary_page_size_limit(1 << 20);
        if !stated {
            properties = properties
                .set_statistics_enabled(parquet::file::properties::EnabledStatistics::None);
        }
        let mut w =
            ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties.build())).unwrap();
        (0..40).for_each(|_| w.write(&batch).unwrap());
        let bytes = w.into_inner().unwrap();
        assert!(bytes.len() < 2 << 20, "{}", bytes.len());
        let mut rng = Rng::new();
        let mut file = Source::new(bytes.clone());
        let index = file
            .index(Format::Parquet, &IndexOptions::default(), &mut rng)
            .unwrap();
        let reader = file.open(Arc::new(index), &mut rng).unwrap();
        let drive = |rows: Rows, allowed: u64| {
            let mut read = reader.read(0, rows, &Projection::All).unwrap();
            read.allow(allowed);
            loop {
                match read.step().unwrap() {
                    Need::Done => return Ok(read.finish_pieces().unwrap()),
                    Need::Memory(bytes) => return Err(bytes),
                    Need::Ranges(ranges) => {
                        for r in ranges {
                            let part = &bytes[r.start as usize..r.end as usize];
                            read.feed(r.start, Bytes::copy_from_slice(part)).unwrap();
                        }
                    }
                }
            }
        };
        // 4000 values of 256 KiB are a gigabyte.
        let asked = drive(Rows::All, 64 << 20).unwrap_err();
        assert!((64 << 20..1200 << 20).contains(&asked), "{asked}");
        let some: Vec<u32> = (0..4000).step_by(2).collect();
        let asked = drive(Rows::sorted(some).unwrap(), 64 << 20).unwrap_err();
        assert!((64 << 20..700 << 20).contains(&asked), "{asked}");
        let few = Rows::sorted((0..4000).step_by(40).collect::<Vec<u32>>()).unwrap();
        let pieces = drive(few, 64 << 20).unwrap();
        assert!(pieces.len() > 1, "batches of long values are short");
        let rows: usize = pieces.iter().map(RecordBatch::num_rows).sum();
        assert_eq!(rows, 100);
        let n = pieces[0].column(0);
        let n = n.as_any().downcast_ref::<Int64Array>().unwrap();
        assert_eq!((n.value(0), n.value(1)), (0, 40));
    }
}

/// So does a reader of any other format whose few bytes make many.
#[test]
fn readers_of_all_formats_ask_for_memory_before_they_decode() {
    use arrow_ipc::{
        CompressionType,
        writer::{FileWriter, IpcWriteOptions},
    };
    const MUCH_BYTES: u64 = 64 << 20;
    let mut rng = Rng::new();
    let asked = |bytes: Vec<u8>, format: Format, rows: Rows, rng: &mut Rng| {
        assert!(bytes.len() < 1 << 20, "{format}: {}", bytes.len());
        let mut file = Source::new(bytes.clone());
        let index = file.index(format, &IndexOptions::default(), rng).unwrap();
        let reader = file.open(Arc::new(index), rng).unwrap();
        let mut read = reader.read(0, rows, &Projection::All).unwrap();
        read.allow(1 << 20);
        loop {
            match read.step().unwrap() {
                Need::Done => return 0,
                Need::Memory(bytes) => return bytes,
                Need::Ranges(ranges) => {
                    for r in ranges {
                        let part = &bytes[r.start as usize..r.end as usize];
                        read.feed(r.start, Bytes::copy_from_slice(part)).unwrap();
                    }
                }
            }
        }
    };
    let one_row = || Rows::sorted(vec![0]).unwrap();

    let zeros: ArrayRef = Arc::new(Int64Array::from(vec![0; MUCH_BYTES as usize / 8]));
    let batch = RecordBatch::try_from_iter([("n", zeros)]).unwrap();
    let options = IpcWriteOptions::default()
        .try_with_compression(Some(CompressionType::ZSTD))
        .unwrap();
    let mut w = FileWriter::try_new_with_options(Vec::new(), &batch.schema(), options).unwrap();
    w.write(&batch).unwrap();
    w.finish().unwrap();
    let bytes = w.into_inner().unwrap();
    // The whole column has to be decompressed for one row of it.
    let memory = asked(bytes, Format::ArrowFile, one_row(), &mut rng);
    assert!((MUCH_BYTES..2 * MUCH_BYTES).contains(&memory), "{memory}");

    // Each line is a null in a thousand columns.
    let named: Vec<String> = (0..1000).map(|n| format!("\"c{n}\":0")).collect();
    let mut lines = format!("{{{}}}\n", named.join(","));
    lines.push_str(&"{}\n".repeat(10_000));
    let memory = asked(lines.clone().into(), Format::Jsonl, Rows::All, &mut rng);
    assert!(memory > 1 << 20, "{memory}");
    assert_eq!(asked(lines.into(), Format::Jsonl, one_row(), &mut rng), 0);
    // Each item of a list is one too.
    let mut line = format!("{{\"list\":[{{{}}}", named[..100].join(","));
    line.push_str(&",{}".repeat(10_000));
    line.push_str("]}\n");
    let memory = asked(line.into(), Format::Jsonl, Rows::All, &mut rng);
    assert!(memory > 1 << 20, "{memory}");
}

/// What they ask for is not much more than they take, or it would be refused where it fits.
#[test]
fn readers_of_records_ask_for_little_more_than_they_take() {
    let mut rng = Rng::new();
    // And how often they ask when they have read the same once.
    let mut read_twice = |bytes: Vec<u8>, format: Format| {
        let mut file = Source::new(bytes.clone());
        let index = file
            .index(format, &IndexOptions::default(), &mut rng)
            .unwrap();
        let reader = file.open(Arc::new(index), &mut rng).unwrap();
        let read_once = || read_and_ask(&reader, &bytes);
        let (taken, asked, _) = read_once();
        let (_, again, times) = read_once();
        assert!(
            again <= asked + asked / 7 + 64,
            "{format}: {asked}, then {again}"
        );
        (taken, asked, times)
    };
    let mut taken_and_asked = |bytes, format| {
        let (taken, asked, _) = read_twice(bytes, format);
        (taken, asked)
    };
    fn read_and_ask(reader: &FileReader, bytes: &[u8]) -> (u64, u64, u32) {
        let mut read = reader.read(0, Rows::All, &Projection::All).unwrap();
        let (mut allowed, mut times) = (64 << 10, 0);
        read.allow(allowed);
        for _ in 0..100 {
            match read.step().unwrap() {
                Need::Done => {
                    let batch = read.finish().unwrap();
                    let of = |c: &ArrayRef| c.to_data().get_slice_memory_size().unwrap() as u64;
                    let taken = batch.columns().iter().map(of).sum();
                    let kept = |c: &ArrayRef| c.to_data().get_buffer_memory_size() as u64;
                    let kept: u64 = batch.columns().iter().map(kept).sum();
                    assert!(
                        kept <= allowed + (64 << 10),
                        "{kept} kept, {allowed} asked for"
                    );
                    return (taken, allowed, times);
                }
                Need::Memory(bytes) => {
                    assert!(bytes > allowed);
                    (allowed, times) = (bytes, times + 1);
                    read.allow(allowed);
                }
                Need::Ranges(ranges) => {
                    for r in ranges {
                        let part = &bytes[r.start as usize..r.end as usize];
                        read.feed(r.start, Bytes::copy_from_slice(part)).unwrap();
                    }
                }
            }
        }
        panic!("it goes on asking");
    }
    let records: Vec<Vec<u8>> = (0..1000).map(|i| vec![i as u8; 1000]).collect();
    let (taken, asked) = taken_and_asked(tfrecords(&records), Format::TfRecord);
    assert!(asked < taken + taken / 8, "{taken} {asked}");
    let long = vec![7u8; 8 << 20];
    let image = example::example(&[("image", example::Value::Bytes(&[&long]))]);
    let (taken, asked) = taken_and_asked(tfrecords(&[image]), Format::TfRecord);
    assert!(asked < taken + (1 << 20), "{taken} {asked}");
    // The first line is much longer than the others.
    let mut lines = format!("{{\"text\": \"{}\"}}\n", "x".repeat(1 << 20));
    lines.push_str(&"{\"text\": \"short\"}\n".repeat(300));
    let (taken, asked) = taken_and_asked(lines.into(), Format::Jsonl);
    assert!(asked < 5 * taken, "{taken} {asked}");
    // A number takes one to ten bytes in the file, and eight here.
    for number in [1, -1] {
        let numbers = vec![number; (1 << 20) + 1];
        let audio = example::example(&[("audio", example::Value::Ints(&numbers, true))]);
        let (taken, asked) = taken_and_asked(tfrecords(&[audio]), Format::TfRecord);
        assert!(asked < 2 * taken + taken / 8, "{taken} {asked}");
    }
    // A short line after a long one, as it is and with an escape.
    for long in ["x".repeat(1 << 20), format!("\\n{}", "x".repeat(1 << 20))] {
        let lines = format!("{{\"text\": \"{long}\"}}\n{{\"text\": \"s\"}}\n");
        let (taken, asked) = taken_and_asked(lines.into(), Format::Jsonl);
        assert!(asked < 3 * taken, "{taken} {asked}");
    }
    let line = format!("{{\"tokens\": [{}1]}}\n", "1,".repeat(2000));
    let tokens = line.repeat(500);
    let (taken, asked, times) = read_twice(tokens.into(), Format::Jsonl);
    assert!(asked < 6 * taken && times == 1, "{taken} {asked} {times}");
}

#[test]
fn what_other_rows_took_is_a_guess_that_a_reader_can_do_without() {
    let mut rng = Rng::new();
    let mut lines = format!("{{\"n\": [{}1]}}\n", "1,".repeat(100_000));
    lines.push_str(&"{\"n\": [1]}\n".repeat(1000));
    let bytes = lines.into_bytes();
    let mut file = Source::new(bytes.clone());
    let index = file
        .index(Format::Jsonl, &IndexOptions::default(), &mut rng)
        .unwrap();
    let reader = file.open(Arc::new(index), &mut rng).unwrap();
    let open = |rows: Vec<u32>| {
        let mut read = reader
            .read(0, Rows::Sorted(rows.into()), &Projection::All)
            .unwrap();
        while let Need::Ranges(ranges) = read.step().unwrap() {
            for r in ranges {
                let part = &bytes[r.start as usize..r.end as usize];
                read.feed(r.start, Bytes::copy_from_slice(part)).unwrap();
            }
            read.allow(64 << 10);
        }
        read
    };
    // The long one is read first, with all the memory that it takes.
    let mut long = open(vec![0]);
    long.allow(u64::MAX);
    assert_eq!(long.step().unwrap(), Need::Done);
    let mut short = open((1..1001).collect());
    let Need::Memory(guess) = short.step().unwrap() else {
        panic!("it does not expect what the other took");
    };
    assert!(guess > 128 << 10 && short.forget_guess() && !short.forget_guess());
    for _ in 0..2 {
        if let Need::Memory(bytes) = short.step().unwrap() {
            assert!(bytes < guess);
            short.allow(bytes);
        }
    }
    assert_eq!(short.finish().unwrap().num_rows(), 1000);
}
