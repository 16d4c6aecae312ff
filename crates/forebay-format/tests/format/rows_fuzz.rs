//! Mutated files of rows for every parser of them; see `harness.rs` for what holds for each input.
//! In addition: the result does not depend on how the bytes arrive, some rows equal those of all,
//! and an index is the same when it comes back from a store.

use crate::common;
use crate::harness::{Rng, Target, outcome};
use crate::rows_common::*;
use arrow_array::UInt32Array;
use forebay_core::{Error, Result};
use forebay_format::{
    ArchiveKind,
    example::ExampleSpec,
    labels::{LabelColumns, Labels},
    tabular::{FileIndex, Format, IndexOptions, Projection, Rows, UnpackedIndexer},
    tfrecord,
};
use xxhash_rust::xxh3::xxh3_64;

fn common_rng(rng: &mut Rng) -> common::Rng {
    common::Rng::with_seed(rng.next())
}

/// Opens and reads everything, and some of it.
fn check(format: Format, bytes: &[u8], options: &IndexOptions, rng: &mut Rng) -> u64 {
    let rng = &mut common_rng(rng);
    let opened = checked(open(format, bytes, options, rng));
    let (mut source, reader) = match opened {
        Ok(opened) => opened,
        Err(e) => return outcome::<(), _>(Err(e)),
    };
    let blocks = reader.index().blocks().clone();
    let read = |source: &mut Source, rng: &mut common::Rng| -> Result<usize> {
        let mut found = 0;
        for block in 0..blocks.blocks().min(50) {
            // Files with millions of rows are accepted, but rows are compared only if they are few.
            if blocks.block_rows(block) > 100_000 {
                continue;
            }
            let batch = match checked(source.read(&reader, block, Rows::All, &Projection::All, rng))
            {
                Ok(batch) => batch,
                Err(e) => {
                    // A single row is read in a different way.
                    let row = Rows::sorted([blocks.block_rows(block) / 2]).unwrap();
                    let _ = checked(source.read(&reader, block, row, &Projection::All, rng));
                    return Err(e);
                }
            };
            assert_eq!(batch.num_rows(), blocks.block_rows(block) as usize);
            let rows = some_rows(blocks.block_rows(block), rng);
            let some = checked(source.read(
                &reader,
                block,
                Rows::sorted(rows.clone()).unwrap(),
                &Projection::All,
                rng,
            ));
            let some = match some {
                Ok(some) => some,
                // Claims about a column's pages matter only if rows are looked up by page.
                Err(e) if format == Format::Parquet => return Err(e),
                Err(e) => panic!("all rows can be read, some cannot: {e:?}"),
            };
            let expected =
                arrow_select::take::take_record_batch(&batch, &UInt32Array::from(rows)).unwrap();
            if format != Format::Parquet {
                assert_eq!(some, expected);
            }
            found += batch.num_rows();
        }
        Ok(found)
    };
    outcome(read(&mut source, rng).map(|n| n.min(200)))
}

/// The index is the same when the bytes come in pieces, as what a compressed file unpacks to.
fn check_unpacked(format: Format, bytes: &[u8], options: &IndexOptions, rng: &mut Rng) {
    let mut pieces = || {
        let mut indexer = UnpackedIndexer::new(format, bytes.len() as u64, options)?;
        let piece = 1 + rng.below(bytes.len().max(1));
        bytes
            .chunks(piece)
            .try_for_each(|piece| indexer.push(piece))?;
        indexer.finish()
    };
    let in_pieces = checked(pieces());
    let mut rng = common::Rng::with_seed(1);
    let whole = Source::new(bytes.to_vec()).index(format, options, &mut rng);
    match (in_pieces, whole) {
        (Ok(in_pieces), Ok(whole)) => {
            assert_eq!(in_pieces.blocks(), whole.blocks());
            assert_eq!(in_pieces.schema().fields(), whole.schema().fields());
        }
        (Err(in_pieces), Err(whole)) => assert_eq!(in_pieces.message(), whole.message()),
        (in_pieces, whole) => panic!("{in_pieces:?} {whole:?}"),
    }
}

fn corpus(make: impl Fn(&mut common::Rng) -> Vec<u8>) -> Vec<Vec<u8>> {
    (0..6)
        .map(|seed| make(&mut common::Rng::with_seed(seed)))
        .collect()
}

#[test]
fn fuzz_parquet() {
    let corpus = corpus(|rng| {
        let (schema, batches) = batches(&[20, 15], rng);
        write_parquet(&schema, &batches, 18, rng)
    });
    let words: &[&[u8]] = &[
        b"PAR1",
        b"PARE",
        b"ARROW:schema",
        b"\x15\x02",
        b"\x15\x00\x15",
        b"\x16\x02",
        b"\x19\x1c",
        b"\x19\xfc\xff\x01",
        b"\x2c\x15",
    ];
    let target = Target {
        name: "parquet",
        corpus,
        words,
        max_len: 1 << 16,
        memory: (64 << 20, 4096),
    };
    target.run(
        |rng, bytes| {
            // A footer that again ends where it says.
            let len = bytes.len();
            if len > 12 && rng.below(2) == 0 {
                let footer = [rng.below(len - 8), (len - 12).min(3000)][rng.below(2)] as u32;
                bytes[len - 8..len - 4].copy_from_slice(&footer.to_le_bytes());
                bytes[len - 4..].copy_from_slice(b"PAR1");
            }
        },
        |bytes, rng| check(Format::Parquet, bytes, &IndexOptions::default(), rng),
    );
}

#[test]
fn fuzz_arrow_file() {
    let corpus = corpus(|rng| {
        let (schema, batches) = batches(&[20], rng);
        write_arrow(Format::ArrowFile, &schema, &batches, rng)
    });
    let words: &[&[u8]] = &[
        b"ARROW1",
        b"ARROW1\0\0",
        b"\xff\xff\xff\xff",
        b"\0\0\0\0\0\0\0\0",
        b"\x01\0\0\0\0\0\0\0",
    ];
    let target = Target {
        name: "arrow_file",
        corpus,
        words,
        max_len: 1 << 16,
        memory: (64 << 20, 70_000),
    };
    target.run(
        |_, _| (),
        |bytes, rng| check(Format::ArrowFile, bytes, &IndexOptions::default(), rng),
    );
}

#[test]
fn fuzz_arrow_stream() {
    let corpus = corpus(|rng| {
        let (schema, batches) = batches(&[20, 10], rng);
        write_arrow(Format::ArrowStream, &schema, &batches, rng)
    });
    let words: &[&[u8]] = &[
        b"\xff\xff\xff\xff",
        b"\xff\xff\xff\xff\0\0\0\0",
        b"\0\0\0\0\0\0\0\0",
        b"\x01\0\0\0\0\0\0\0",
    ];
    let target = Target {
        name: "arrow_stream",
        corpus,
        words,
        max_len: 1 << 16,
        memory: (64 << 20, 70_000),
    };
    target.run(
        |_, _| (),
        |bytes, rng| check(Format::ArrowStream, bytes, &IndexOptions::default(), rng),
    );
}

#[test]
fn fuzz_tfrecord() {
    let corpus = corpus(|rng| {
        let record = |i: i64, rng: &mut common::Rng| {
            let bytes = rng.bytes(20);
            example::example(&[
                ("n", example::Value::Ints(&[i, -i], i % 2 == 0)),
                ("f", example::Value::Floats(&[0.5, 1.5], i % 3 == 0)),
                ("b", example::Value::Bytes(&[&bytes, b""])),
            ])
        };
        tfrecords(&(0..20).map(|i| record(i, rng)).collect::<Vec<_>>())
    });
    let target = Target {
        name: "tfrecord",
        corpus,
        words: &[b"\x0a\x02", b"\x12\x04", b"\x1a\x02"],
        max_len: 1 << 15,
        memory: (24 << 20, 256),
    };
    target.run(
        |rng, bytes| {
            // Checksums that fit again, for as many records as there are.
            if rng.below(4) > 0 {
                let mut at = 0;
                while let Some(head) = bytes.get(at..at + 8) {
                    let len = u64::from_le_bytes(head.try_into().unwrap());
                    let sum = tfrecord::masked_crc32c(head);
                    let Some(end) = usize::try_from(len)
                        .ok()
                        .and_then(|n| n.checked_add(at + 12))
                        .filter(|&e| e.saturating_add(4) <= bytes.len())
                    else {
                        break;
                    };
                    bytes[at + 8..at + 12].copy_from_slice(&sum.to_le_bytes());
                    let sum = tfrecord::masked_crc32c(&bytes[at + 12..end]);
                    bytes[end..end + 4].copy_from_slice(&sum.to_le_bytes());
                    at = end + 4;
                }
            }
        },
        |bytes, rng| {
            let mut options = small_blocks(&mut common_rng(rng));
            if bytes.len() % 2 == 0 {
                options.example = Some(ExampleSpec::default());
            }
            check(Format::TfRecord, bytes, &options, rng)
        },
    );
}

#[test]
fn fuzz_tfrecord_offsets() {
    let corpus = vec![
        b"0 20\n20 30\n".to_vec(),
        b"0 17\r\n17\t33\n50 100".to_vec(),
    ];
    let target = Target {
        name: "tfrecord_offsets",
        corpus,
        words: &[b"18446744073709551615", b" ", b"\n"],
        max_len: 4096,
        memory: (1 << 20, 64),
    };
    target.run(
        |_, _| (),
        |bytes, rng| {
            let size = [50, 150, 0, u64::MAX][rng.below(4)];
            outcome(
                checked(tfrecord::side_file::index(
                    bytes,
                    size,
                    &IndexOptions::default(),
                ))
                .map(|i| i.rows().min(20)),
            )
        },
    );
}

#[test]
fn fuzz_json_lines() {
    let corpus = vec![
        b"{\"a\": 1}\n{}\r\n\n{\"b\": \"\xc3\xbc\"}".to_vec(),
        b"\xef\xbb\xbf{}\n \n".to_vec(),
    ];
    let target = Target {
        name: "json_lines",
        corpus,
        words: &[b"\n", b"\r\n", b"\xef\xbb\xbf", b"\n\n"],
        max_len: 1 << 14,
        memory: (1 << 20, 1000),
    };
    target.run(
        |_, _| (),
        |bytes, rng| {
            let options = small_blocks(&mut common_rng(rng));
            check_unpacked(Format::Jsonl, bytes, &options, rng);
            check(Format::Jsonl, bytes, &options, rng)
        },
    );
}

#[test]
fn fuzz_csv() {
    let corpus = vec![
        b"a,b,c\n1,\"x\n\"\"y\",2020-01-01\r\n\n2.5,,\n".to_vec(),
        b"\xef\xbb\xbfa\tb\ntrue\t10:30\nNA\t\"\xc3\xbc\"".to_vec(),
        b"\"t\"\n2020-01-01 10:00:00.5\n1\n-7\n".to_vec(),
    ];
    let target = Target {
        name: "csv",
        corpus,
        words: &[
            b"\"",
            b"\"\"",
            b",",
            b"\t",
            b"\n",
            b"\r\n",
            b"\r",
            b"2020-02-29",
            b"T23:59:59.123456789",
            b"true",
            b"NA",
            b"-1e400",
            b"inf",
            b"99999999999999999999",
        ],
        max_len: 1 << 14,
        memory: (1 << 20, 1000),
    };
    target.run(
        |_, _| (),
        |bytes, rng| {
            let options = small_blocks(&mut common_rng(rng));
            let format = [Format::Csv, Format::Tsv][rng.below(2)];
            check_unpacked(format, bytes, &options, rng);
            check(format, bytes, &options, rng)
        },
    );
}

#[test]
fn fuzz_mds() {
    let corpus = corpus(|rng| {
        let (columns, samples) = mds_samples(12, rng);
        mds(&columns, &samples)
    });
    let target = Target {
        name: "mds",
        corpus,
        words: &[
            b"null",
            b"\"int8\"",
            b"\"str\"",
            b"\"bytes\"",
            b"\0\0\0\0",
            b"\x04\0\0\0",
        ],
        max_len: 1 << 14,
        memory: (8 << 20, 2000),
    };
    target.run(
        |rng, bytes| {
            // A list of samples that again ends where the file does.
            if let Some((begin, _)) = bytes.split_first_chunk::<4>()
                && rng.below(2) == 0
            {
                let last = (u32::from_le_bytes(*begin) as usize)
                    .saturating_mul(4)
                    .saturating_add(4);
                let len = (bytes.len() as u32).to_le_bytes();
                if let Some(place) = bytes.get_mut(last..last.saturating_add(4)) {
                    place.copy_from_slice(&len);
                }
            }
        },
        |bytes, rng| {
            let options = small_blocks(&mut common_rng(rng));
            check(Format::Mds, bytes, &options, rng)
        },
    );
}

#[test]
fn fuzz_megatron() {
    let corpus = corpus(|rng| Megatron::new(40, 4, 4, rng.below(2) == 0, rng).idx());
    let target = Target {
        name: "megatron",
        corpus,
        words: &[
            b"MMIDIDX\0\0",
            b"\0\0\0\0",
            b"\x01\0\0\0",
            b"\xff\xff\xff\xff",
            b"\xff\xff\xff\x7f",
        ],
        max_len: 1 << 14,
        memory: (8 << 20, 2000),
    };
    target.run(
        |rng, bytes| {
            // As many sequences as there is room for.
            let documents = rng.below(60);
            let rest = bytes.len().saturating_sub(34 + 8 * documents);
            let sequences = rest / if rng.below(2) == 0 { 12 } else { 13 };
            if rng.below(4) > 0
                && let Some(place) = bytes.get_mut(18..34)
            {
                place[..8].copy_from_slice(&(sequences as u64).to_le_bytes());
                place[8..].copy_from_slice(&(documents as u64).to_le_bytes());
            }
        },
        |bytes, rng| {
            let rng = &mut common_rng(rng);
            let options = small_blocks(rng);
            let bin = rng.bytes(1 << 13);
            let (mut source, reader) = match checked(open_megatron(&bin, bytes, &options, rng)) {
                Ok(opened) => opened,
                Err(e) => return outcome::<(), _>(Err(e)),
            };
            let blocks = reader.index().blocks().clone();
            for block in 0..blocks.blocks() {
                let batch = source.read(&reader, block, Rows::All, &Projection::All, rng);
                let batch = batch.unwrap();
                let rows = some_rows(blocks.block_rows(block), rng);
                let some = Rows::sorted(rows.clone()).unwrap();
                let some = source.read(&reader, block, some, &Projection::All, rng);
                let rows = UInt32Array::from(rows);
                let expected = arrow_select::take::take_record_batch(&batch, &rows).unwrap();
                assert_eq!(some.unwrap().columns(), expected.columns());
            }
            outcome::<_, Error>(Ok(()))
        },
    );
}

#[test]
fn fuzz_litdata() {
    const FORMATS: [&str; 4] = ["int", "str", "no_header_tensor:13", "bool"];
    let values = |rng: &mut common::Rng| {
        let (text, list) = ("ü".repeat(rng.below(9)), 2 * rng.below(30));
        litdata_item(&[
            rng.bytes(8),
            text.into_bytes(),
            rng.bytes(list),
            rng.bytes(1),
        ])
    };
    let corpus = corpus(|rng| {
        let items: Vec<Vec<u8>> = (0..12).map(|_| values(rng)).collect();
        litdata(&items)
    });
    let target = Target {
        name: "litdata",
        corpus,
        words: &[b"\0\0\0\0", b"\x04\0\0\0", b"\x08\0\0\0"],
        max_len: 1 << 14,
        memory: (8 << 20, 2000),
    };
    target.run(
        |rng, bytes| {
            // A list of items that again ends where the chunk does.
            if rng.below(2) == 0 {
                let len = (bytes.len() as u32).to_le_bytes();
                if let Some(place) = bytes.get_mut(52..56) {
                    place.copy_from_slice(&len);
                }
            }
        },
        |bytes, rng| {
            let tokens = rng.below(3) == 0;
            let (formats, config): (&[&str], _) = match tokens {
                true => (
                    &["no_header_tensor:13"],
                    serde_json::json!({"item_loader": "TokensLoader"}),
                ),
                false => (&FORMATS, serde_json::json!({})),
            };
            let items = bytes
                .first_chunk::<4>()
                .map_or(0, |n| u32::from_le_bytes(*n));
            let items = match rng.below(8) {
                0 => 12,
                _ => items as usize,
            };
            let index = litdata_index(items, formats, config);
            let mut options = described(&index, small_blocks(&mut common_rng(rng))).unwrap();
            if tokens && rng.below(2) == 0 {
                options.block_tokens = Some(1 + rng.below(50) as u32);
            }
            check(Format::LitData, bytes, &options, rng)
        },
    );
}

#[test]
fn fuzz_litdata_index() {
    let index = |rng: &mut common::Rng| {
        let config = match rng.below(3) {
            0 => serde_json::json!({"item_loader": "TokensLoader"}),
            _ => serde_json::json!({}),
        };
        match rng.below(2) {
            0 => litdata_index(12, &["no_header_numpy:2"], config),
            _ => litdata_index(12, &["int", "str", "jpeg"], config),
        }
    };
    let target = Target {
        name: "litdata_index",
        corpus: corpus(index),
        words: &[b"null", b"\"int\"", b"[]", b"{}", b"\\\"", b"builtins.dict"],
        max_len: 1 << 14,
        memory: (8 << 20, 4000),
    };
    target.run(
        |_, _| (),
        |bytes, _| {
            let described = checked(described(bytes, IndexOptions::default()));
            outcome(described.map(|options| options.described.map(|(_, items)| items)))
        },
    );
}

#[test]
fn fuzz_samples() {
    let corpus = corpus(|rng| archive(ArchiveKind::Tar, &samples(5, rng)));
    let target = Target {
        name: "samples",
        corpus,
        words: &[b".jpg", b"/", b"__", b"ustar\x0000"],
        max_len: 1 << 16,
        memory: (8 << 20, 2000),
    };
    target.run(
        |rng, bytes| {
            // Headers whose checksums fit again.
            if rng.below(8) > 0 {
                for header in bytes
                    .as_chunks_mut::<512>()
                    .0
                    .iter_mut()
                    .filter(|h| h[257..262] == *b"ustar")
                {
                    header[148..156].fill(b' ');
                    let sum: u32 = header.iter().map(|&b| u32::from(b)).sum();
                    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
                }
            }
        },
        |bytes, rng| {
            let options = small_blocks(&mut common_rng(rng));
            check(Format::Tar, bytes, &options, rng)
        },
    );
}

#[test]
fn fuzz_labels() {
    let corpus = vec![
        b"name,label\na.jpg,1\n\"b,\"\"c\",2\n".to_vec(),
        b"{\"file\": \"a\", \"label\": 3}\n{\"file\": \"b\", \"label\": \"x\"}\n".to_vec(),
    ];
    let target = Target {
        name: "labels",
        corpus,
        words: &[b"\"\"", b"\"", b",", b"\n", b"label", b"\t"],
        max_len: 1 << 14,
        memory: (1 << 20, 200),
    };
    target.run(
        |_, _| (),
        |bytes, rng| {
            let name = ["l.csv", "l.jsonl"][rng.below(2)];
            outcome(
                checked(Labels::parse(name, bytes, &LabelColumns::default()))
                    .map(|l| (l.len().min(20), l.are_numbers())),
            )
        },
    );
}

#[test]
fn fuzz_stored_indexes() {
    let rng = &mut common::Rng::with_seed(1);
    let (schema, all) = batches(&[20, 15], rng);
    let files = [
        (Format::Parquet, write_parquet(&schema, &all, 18, rng)),
        (
            Format::ArrowStream,
            write_arrow(Format::ArrowStream, &schema, &all, rng),
        ),
        (Format::Tar, archive(ArchiveKind::Tar, &samples(9, rng))),
        (Format::TfRecord, tfrecords(&[vec![1; 50], vec![2; 500]])),
    ];
    let corpus = files
        .iter()
        .map(|(format, bytes)| {
            open(*format, bytes, &small_blocks(rng), rng)
                .unwrap()
                .1
                .index()
                .encode()
        })
        .collect();
    let target = Target {
        name: "stored_indexes",
        corpus,
        words: &[b"FBFI\x01", b"\xff\xff\xff\xff\x0f"],
        max_len: 1 << 14,
        memory: (1 << 20, 200),
    };
    target.run(
        |rng, bytes| {
            if bytes.len() >= 8 && rng.below(8) > 0 {
                let body = bytes.len() - 8;
                let sum = xxh3_64(&bytes[..body]);
                bytes[body..].copy_from_slice(&sum.to_le_bytes());
            }
        },
        |bytes, _| {
            let found = checked(FileIndex::decode(bytes, schema.clone()));
            if let Ok(index) = &found {
                assert_eq!(
                    FileIndex::decode(&index.encode(), schema.clone()).unwrap(),
                    *index
                );
                for b in 0..index.blocks().blocks().min(1000) {
                    let rows = index.blocks().block_rows(b);
                    assert!(
                        rows == 0
                            || index.blocks().locate(index.blocks().row_range(b).start)
                                == Some((b, 0))
                    );
                    index.blocks().bytes_of_rows(b, Some(&[rows / 2]));
                }
            }
            outcome::<_, Error>(found.map(|i| (i.format(), i.blocks().blocks().min(20))))
        },
    );
}
