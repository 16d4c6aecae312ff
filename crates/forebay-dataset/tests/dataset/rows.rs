//! Rows by their numbers, in all formats, compared with a plain list of the rows that were written.

use crate::support::*;
use arrow_array::{
    Array, ArrayRef, BinaryArray, Int64Array, RecordBatch, StringArray, cast::AsArray,
    types::Int64Type,
};
use arrow_schema::DataType;
use forebay_core::{ErrorKind, limits};
use forebay_dataset::{Dataset, RowBatch, Rows, RowsConfig};
use forebay_engine::Engine;
use forebay_format::{ArchiveKind, ArchiveWriter, tabular::Projection, tfrecord::record_into};
use forebay_origin::Operation;
use forebay_testing::{
    Fault,
    seeded::{factor, random_seed},
};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};
use std::{io::Write, sync::Arc};

/// A row as text, by column.
type Row = Vec<(String, String)>;

fn hex(bytes: &[u8]) -> String {
    format!("{} {:016x}", bytes.len(), xxhash_rust::xxh3::xxh3_64(bytes))
}

fn shown(array: &ArrayRef, row: usize) -> String {
    if array.is_null(row) {
        return "null".into();
    }
    match array.data_type() {
        DataType::Int64 => array.as_primitive::<Int64Type>().value(row).to_string(),
        DataType::Utf8 => array.as_string::<i32>().value(row).to_owned(),
        DataType::Binary => hex(array.as_binary::<i32>().value(row)),
        other => panic!("{other}"),
    }
}

fn row_of(batch: &RecordBatch, row: usize) -> Row {
    let schema = batch.schema();
    schema
        .fields()
        .iter()
        .zip(batch.columns())
        .map(|(f, c)| (f.name().clone(), shown(c, row)))
        .collect()
}

fn bytes(rng: &mut StdRng, most: usize) -> Vec<u8> {
    let len = if rng.random_bool(0.1) {
        0
    } else {
        rng.random_range(0..=most)
    };
    (0..len).map(|_| rng.random()).collect()
}

/// The bytes of a file with this extension, in two parts of the codec's.
fn packed(extension: &str, text: &str) -> Vec<u8> {
    let parts = text.as_bytes().split_at(text.len() / 3);
    let each = |pack: &dyn Fn(&[u8]) -> Vec<u8>| [pack(parts.0), pack(parts.1)].concat();
    match extension.rsplit_once('.').map(|(_, codec)| codec) {
        None => text.into(),
        Some("gz") => each(&|part| {
            let mut out = flate2::write::GzEncoder::new(Vec::new(), Default::default());
            out.write_all(part).unwrap();
            out.finish().unwrap()
        }),
        Some("zst") => each(&|part| zstd::encode_all(part, 3).unwrap()),
        Some("lz4") => each(&|part| {
            let mut out = lz4_flex::frame::FrameEncoder::new(Vec::new());
            out.write_all(part).unwrap();
            out.finish().unwrap()
        }),
        Some(other) => panic!("{other}"),
    }
}

/// Writes the files of one format and returns their pattern and rows.
fn write(bench: &Bench, rng: &mut StdRng, what: &str) -> (String, Vec<Row>) {
    let mut rows: Vec<Row> = Vec::new();
    let files = rng.random_range(1..=4);
    let pair = |name: &str, value: String| (name.to_owned(), value);
    for file in 0..files {
        let count = if file == 1 && rng.random_bool(0.2) {
            0
        } else {
            rng.random_range(1..=120usize)
        };
        match what {
            "objects" => {
                for i in 0..count.min(40) {
                    let most = if rng.random_bool(0.05) {
                        1_500_000
                    } else {
                        20_000
                    };
                    let (key, data) = (format!("objects/{file}/{i:03}.bin"), bytes(rng, most));
                    bench.put(&key, &data);
                    rows.push(vec![
                        pair("key", key),
                        pair("data", hex(&data)),
                        pair("label", file.to_string()),
                    ]);
                }
            }
            "parquet" | "parquet-pages" | "arrow" | "arrows" => {
                // Texts of a KiB, so that row groups are large enough for a page index.
                let texts: Vec<Option<String>> = (0..count * 4)
                    .map(|i| {
                        rng.random_bool(0.9).then(|| {
                            format!("{file}/{i} {}", "x".repeat(rng.random_range(0..2000)))
                        })
                    })
                    .collect();
                let blobs: Vec<Vec<u8>> = (0..count * 4).map(|_| bytes(rng, 300)).collect();
                let columns: [(&str, ArrayRef); 3] = [
                    (
                        "id",
                        Arc::new(Int64Array::from_iter_values(
                            (0..count * 4).map(|i| (file * 10_000 + i) as i64),
                        )),
                    ),
                    ("text", Arc::new(StringArray::from_iter(texts.iter()))),
                    ("blob", Arc::new(BinaryArray::from_iter_values(&blobs))),
                ];
                let batch = RecordBatch::try_from_iter_with_nullable(
                    columns.map(|(n, c)| (n, c, n == "text")),
                )
                .unwrap();
                rows.extend((0..count * 4).map(|i| row_of(&batch, i)));
                let pieces = {
                    let mut pieces = Vec::new();
                    let mut at = 0;
                    while at < batch.num_rows() {
                        let n = rng.random_range(1..=250).min(batch.num_rows() - at);
                        pieces.push(batch.slice(at, n));
                        at += n;
                    }
                    pieces
                };
                let file_bytes = match what {
                    "arrow" => {
                        let mut w =
                            arrow_ipc::writer::FileWriter::try_new(Vec::new(), &batch.schema())
                                .unwrap();
                        pieces.iter().for_each(|p| w.write(p).unwrap());
                        w.finish().unwrap();
                        w.into_inner().unwrap()
                    }
                    "arrows" => {
                        let mut w =
                            arrow_ipc::writer::StreamWriter::try_new(Vec::new(), &batch.schema())
                                .unwrap();
                        pieces.iter().for_each(|p| w.write(p).unwrap());
                        w.finish().unwrap();
                        w.into_inner().unwrap()
                    }
                    _ => {
                        use parquet::file::properties::{EnabledStatistics, WriterProperties};
                        let properties = WriterProperties::builder()
                            .set_data_page_row_count_limit(16)
                            .set_write_batch_size(16);
                        let properties = match what {
                            "parquet" => properties
                                .set_offset_index_disabled(true)
                                .set_statistics_enabled(EnabledStatistics::None),
                            _ => properties,
                        };
                        let mut w = parquet::arrow::ArrowWriter::try_new(
                            Vec::new(),
                            batch.schema(),
                            Some(properties.build()),
                        )
                        .unwrap();
                        for piece in &pieces {
                            w.write(piece).unwrap();
                            w.flush().unwrap();
                        }
                        w.into_inner().unwrap()
                    }
                };
                let extension = what.split('-').next().unwrap_or(what);
                bench.put(&format!("{what}/{file}.{extension}"), file_bytes);
            }
            "jsonl" | "jsonl.gz" | "jsonl.zst" | "jsonl.lz4" => {
                let texts: Vec<String> = (0..count)
                    .map(|_| "y".repeat(rng.random_range(0..900)))
                    .collect();
                let lines: Vec<String> = texts
                    .iter()
                    .enumerate()
                    .map(|(i, text)| format!("{{\"f\": {file}, \"i\": {i}, \"t\": {text:?}}}"))
                    .collect();
                let text = lines.join("\n") + if rng.random() { "\n" } else { "" };
                bench.put(&format!("{what}/{file}.{what}"), packed(what, &text));
                rows.extend(texts.into_iter().enumerate().map(|(i, text)| {
                    vec![
                        pair("f", file.to_string()),
                        pair("i", i.to_string()),
                        pair("t", text),
                    ]
                }));
            }
            "csv" | "csv.gz" | "tsv.zst" => {
                let d = if what.starts_with("csv") { ',' } else { '\t' };
                let mut text = format!("f{d}\"t\"{d}i\n");
                for i in 0..count {
                    let end = ["\n", "\r\n", "\n\n"][rng.random_range(0..3)];
                    let value = match rng.random_range(0..3) {
                        0 => format!("a, \"b\"\n\t{}", "z".repeat(rng.random_range(0..900))),
                        1 => "NA".to_owned(),
                        _ => format!("t{i}"),
                    };
                    let quoted = format!("\"{}\"", value.replace('"', "\"\""));
                    let plain = value.starts_with('a') || rng.random();
                    let written = if plain { &quoted } else { &value };
                    text += &format!("{file}{d}{written}{d}{i}{end}");
                    let named = [("f", file.to_string()), ("t", value), ("i", i.to_string())];
                    rows.push(named.map(|(name, value)| pair(name, value)).to_vec());
                }
                bench.put(&format!("{what}/{file}.{what}"), packed(what, &text));
            }
            "tfrecord" => {
                let mut out = Vec::new();
                for _ in 0..count {
                    let data = bytes(rng, 3000);
                    record_into(&mut out, &data);
                    rows.push(vec![pair("data", hex(&data))]);
                }
                bench.put(&format!("tfrecord/{file}.tfrecord"), out);
            }
            "tar" | "tgz" | "zip" => {
                let kind = [
                    ("tar", ArchiveKind::Tar),
                    ("tgz", ArchiveKind::TarGz),
                    ("zip", ArchiveKind::Zip),
                ]
                .into_iter()
                .find(|k| k.0 == what)
                .unwrap()
                .1;
                let (mut out, mut w) = (Vec::new(), ArchiveWriter::new(kind));
                for i in 0..count {
                    let (image, class) = (bytes(rng, 30_000), format!("{}", i % 7));
                    let key = format!("s/{file}{i:04}");
                    w.entry(&format!("{key}.jpg"), &image, 0, &mut out).unwrap();
                    if what == "zip" {
                        rows.push(vec![
                            pair("key", format!("{key}.jpg")),
                            pair("data", hex(&image)),
                        ]);
                        continue;
                    }
                    // Not every sample has a class; the first has one, so that all files have the
                    // column.
                    let has = i == 0 || rng.random_bool(0.8);
                    if has {
                        w.entry(&format!("{key}.cls"), class.as_bytes(), 0, &mut out)
                            .unwrap();
                    }
                    let class = if has {
                        hex(class.as_bytes())
                    } else {
                        "null".into()
                    };
                    rows.push(vec![
                        pair("__key__", key),
                        pair("jpg", hex(&image)),
                        pair("cls", class),
                    ]);
                }
                w.finish(&mut out).unwrap();
                bench.put(&format!("{what}/{file}.{what}"), out);
            }
            other => panic!("{other}"),
        }
    }
    let source = match what {
        "objects" => {
            format!(
                r#"{{"sources": ["{BUCKET}/objects/**"], "format": "objects", "labels": {{"from": "path"}}, "block_rows": 7}}"#
            )
        }
        _ => format!(r#"{{"sources": ["{BUCKET}/{what}/**"]}}"#),
    };
    (source, rows)
}

const FORMATS: [&str; 17] = [
    "objects",
    "parquet",
    "parquet-pages",
    "arrow",
    "arrows",
    "jsonl",
    "jsonl.gz",
    "jsonl.zst",
    "jsonl.lz4",
    "csv",
    "csv.gz",
    "tsv.zst",
    "tfrecord",
    "tar",
    "tgz",
    "zip",
    "objects",
];

fn projected(row: &Row, columns: &Projection, all: &[String]) -> Row {
    let value = |name: &String| {
        row.iter()
            .find(|(n, _)| n == name)
            .map_or_else(|| (name.clone(), "null".into()), Clone::clone)
    };
    match columns {
        Projection::All => all.iter().map(value).collect(),
        Projection::Columns(names) => names.iter().map(value).collect(),
    }
}

fn check(read: &RowBatch, wanted: &[u64], rows: &[Row], columns: &Projection, all: &[String]) {
    assert_eq!(read.batch.num_rows(), wanted.len());
    for (at, &row) in wanted.iter().enumerate() {
        assert_eq!(
            row_of(&read.batch, at),
            projected(&rows[row as usize], columns, all),
            "row {row}, at {at}"
        );
    }
}

fn random_columns(rng: &mut StdRng, all: &[String]) -> Projection {
    if rng.random_bool(0.4) {
        return Projection::All;
    }
    let mut names = all.to_vec();
    names.shuffle(rng);
    names.truncate(rng.random_range(1..=all.len()));
    Projection::Columns(names)
}

fn random_rows(rng: &mut StdRng, rows: usize) -> Vec<u64> {
    let all = rows as u64;
    match rng.random_range(0..5) {
        0 => Vec::new(),
        1 => {
            let from = rng.random_range(0..all);
            (from..all.min(from + rng.random_range(1..200))).collect()
        }
        2 => vec![rng.random_range(0..all); rng.random_range(1..5)],
        _ => (0..rng.random_range(1..150))
            .map(|_| rng.random_range(0..all))
            .collect(),
    }
}

/// Background tasks may still hold something for a moment.
async fn given_back(engine: &Engine, what: &str) {
    for _ in 0..3000 {
        if engine.budget().used_bytes() == 0 {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    panic!(
        "{what}: {} bytes of memory that nobody gave back",
        engine.budget().used_bytes()
    );
}

fn names(dataset: &Dataset) -> Vec<String> {
    dataset
        .schema()
        .fields()
        .iter()
        .map(|f| f.name().clone())
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_rows_in_any_order_are_those_that_were_written() {
    let mut rng = StdRng::seed_from_u64(random_seed());
    for case in 0..factor() {
        for what in FORMATS {
            let bench = Bench::new();
            let (spec, rows) = write(&bench, &mut rng, what);
            let dataset = bench.open_spec(&spec).await.unwrap().dataset;
            assert_eq!(dataset.rows(), rows.len() as u64, "{what}");
            let all = names(&dataset);
            let small = RowsConfig {
                block_cache_bytes: 64 << 10,
                open_files_memory_bytes: 1,
                blocks_in_flight: 2,
                ..RowsConfig::default()
            };
            let readers = [
                Rows::new(bench.engine.clone(), RowsConfig::default()),
                Rows::new(bench.engine.clone(), small.clone()),
                Rows::new(engine_without_cache(&bench, 512 << 20), small),
            ];
            for _ in 0..12 {
                let reader = &readers[rng.random_range(0..readers.len())];
                let (wanted, columns) = (
                    random_rows(&mut rng, rows.len()),
                    random_columns(&mut rng, &all),
                );
                let held = match rng.random_bool(0.3) {
                    true => Some(
                        reader
                            .hold(
                                &dataset,
                                rng.random_range(0..dataset.shape().blocks()),
                                &columns,
                            )
                            .await
                            .unwrap(),
                    ),
                    false => None,
                };
                let read = reader
                    .read(&dataset, &wanted, &columns)
                    .await
                    .unwrap_or_else(|e| panic!("{what}, case {case}: {e:?}"));
                check(&read, &wanted, &rows, &columns, &all);
                drop(held);
            }
            for reader in readers {
                assert!(
                    reader.engine().budget().used_bytes() >= reader.stats().cached_bytes,
                    "{what}"
                );
            }
            given_back(&bench.engine, what).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_change_or_vanish_are_named_and_never_mixed() {
    let mut rng = StdRng::seed_from_u64(random_seed());
    for what in [
        "objects",
        "parquet-pages",
        "arrow",
        "jsonl",
        "tfrecord",
        "tar",
        "zip",
    ] {
        let bench = Bench::new();
        let (spec, rows) = write(&bench, &mut rng, what);
        let dataset = bench.open_spec(&spec).await.unwrap().dataset;
        let all = names(&dataset);
        let readers = [
            Rows::new(bench.engine.clone(), RowsConfig::default()),
            Rows::new(
                engine_without_cache(&bench, 256 << 20),
                RowsConfig::default(),
            ),
        ];
        for _ in 0..3 {
            let wanted = random_rows(&mut rng, rows.len());
            readers[0]
                .read(&dataset, &wanted, &Projection::All)
                .await
                .unwrap();
        }
        // One file is rewritten with other bytes of the same length, one is removed.
        let files = dataset.files();
        let changed = rng.random_range(0..files.len());
        let path = bench.path(files.key(changed));
        let mut other = std::fs::read(&path).unwrap();
        other.iter_mut().for_each(|b| *b = b.wrapping_add(1));
        other.push(0);
        bench.put(files.key(changed), other);
        let removed = (0..files.len()).find(|i| *i != changed && rng.random());
        if let Some(removed) = removed {
            bench.remove(files.key(removed));
        }
        for _ in 0..20 {
            let reader = &readers[rng.random_range(0..2)];
            let (wanted, columns) = (
                random_rows(&mut rng, rows.len()),
                random_columns(&mut rng, &all),
            );
            let touches = |file: usize| {
                wanted
                    .iter()
                    .any(|&row| dataset.locate(row).unwrap().file as usize == file)
            };
            match reader.read(&dataset, &wanted, &columns).await {
                // What was on the disk or in memory is the old version, whole.
                Ok(read) => check(&read, &wanted, &rows, &columns, &all),
                Err(e) => {
                    let file = match e.kind() {
                        ErrorKind::VersionChanged => changed,
                        ErrorKind::NotFound => removed.expect("a file was removed"),
                        other => panic!("{what}: {other:?}: {e:?}"),
                    };
                    assert!(touches(file), "{what}: {e}");
                    assert!(
                        e.message().contains(files.key(file)) && e.hint_text().is_some(),
                        "{what}: {e}"
                    );
                }
            }
        }
        let whole: Vec<u64> = dataset.file_rows(changed).collect();
        if !whole.is_empty() && dataset.files().size(changed) > 0 {
            let e = readers[1]
                .read(&dataset, &whole, &Projection::All)
                .await
                .unwrap_err();
            assert_eq!(
                e.kind(),
                ErrorKind::VersionChanged,
                "{what}: without a cache nothing old is left: {e:?}"
            );
        }
    }
}

#[tokio::test]
async fn requests_that_make_no_sense_are_refused() {
    let bench = Bench::new();
    bench.put("p/a.parquet", parquet(&[10, 10]));
    let dataset = bench.open(&format!("{BUCKET}/p/**")).await.unwrap().dataset;
    let rows = Rows::new(bench.engine.clone(), RowsConfig::default());
    let kind = async |wanted: &[u64], columns: Projection| {
        rows.read_now(&dataset, wanted, &columns)
            .await
            .map(|_| ())
            .unwrap_err()
            .kind()
    };
    assert_eq!(
        kind(&[0, 20], Projection::All).await,
        ErrorKind::RangeNotSatisfiable
    );
    assert_eq!(
        kind(&[u64::MAX], Projection::All).await,
        ErrorKind::RangeNotSatisfiable
    );
    assert_eq!(
        kind(&[0], Projection::Columns(vec!["nothing".into()])).await,
        ErrorKind::Invalid
    );
    assert_eq!(
        kind(&[0], Projection::Columns(vec!["id".into(), "id".into()])).await,
        ErrorKind::Invalid
    );
    assert_eq!(
        kind(&vec![0; limits::ROWS_PER_REQUEST_MAX + 1], Projection::All).await,
        ErrorKind::TooLarge
    );
    assert_eq!(rows.stats().failed, 5);
    // The most that one request may have, all the same row.
    let read = rows
        .read_now(
            &dataset,
            &vec![3; limits::ROWS_PER_REQUEST_MAX],
            &Projection::Columns(vec!["id".into()]),
        )
        .await
        .unwrap();
    assert!(
        read.batch
            .column(0)
            .as_primitive::<Int64Type>()
            .values()
            .iter()
            .all(|v| *v == 3)
    );
    drop(read);
    let empty = rows
        .read_now(&dataset, &[], &Projection::All)
        .await
        .unwrap();
    assert_eq!((empty.batch.num_rows(), empty.batch.num_columns()), (0, 2));
    let none = rows
        .read_now(&dataset, &[1, 2], &Projection::Columns(Vec::new()))
        .await
        .unwrap();
    assert_eq!((none.batch.num_rows(), none.batch.num_columns()), (2, 0));
}

#[tokio::test]
async fn answers_larger_than_the_memory_are_refused_and_others_go_on() {
    let bench = Bench::new();
    for i in 0..8 {
        bench.put(&format!("o/{i}"), vec![i as u8; 900_000]);
    }
    let spec = format!(r#"{{"sources": ["{BUCKET}/o/**"], "format": "objects"}}"#);
    let dataset = bench.open_spec(&spec).await.unwrap().dataset;
    // Half of 8 MiB may be held, and answers may hold three eighths of that.
    let rows = Rows::new(engine_without_cache(&bench, 8 << 20), RowsConfig::default());
    let all: Vec<u64> = (0..8).collect();
    let e = rows
        .read_now(&dataset, &all, &Projection::All)
        .await
        .unwrap_err();
    assert!(
        e.kind() == ErrorKind::TooLarge && e.to_string().contains("1572864"),
        "{e:?}"
    );
    let one = rows
        .read_now(&dataset, &[5], &Projection::All)
        .await
        .unwrap();
    let e = rows
        .read_now(&dataset, &[7], &Projection::All)
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Busy, "{e:?}");
    assert!(e.retry_after_hint().is_some());
    drop(one);
    let read = rows
        .read_now(&dataset, &[7], &Projection::All)
        .await
        .unwrap();
    assert_eq!(
        read.batch
            .column_by_name("data")
            .unwrap()
            .as_binary::<i32>()
            .value(0),
        [7; 900_000]
    );
    drop(read);
    assert_eq!(rows.engine().budget().used_bytes(), 0);
}

#[tokio::test]
async fn rows_of_a_small_part_of_large_tars_take_the_memory_of_that_part() {
    let bench = Bench::new();
    let samples = (0..80).map(|i| (format!("{i:04}.bin"), vec![i as u8; 100 << 10]));
    bench.put("t/0.tar", tar_of(samples));
    let part_of = async |tar: &str, part: &str| {
        let spec = format!(r#"{{"sources": ["{BUCKET}/{tar}"], "format": "objects"}}"#);
        let whole = bench.open_spec(&spec).await.unwrap().dataset;
        let of = whole.id();
        let spec = format!(r#"{{"part": {{"of": "{of}", "files": [0], {part}}}}}"#);
        bench.open_spec(&spec).await.unwrap().dataset
    };
    let dataset = part_of("t/0.tar", r#""from": 0, "until": 1, "pieces": 20"#).await;
    assert_eq!(dataset.rows(), 4);
    assert!(
        (400 << 10..402 << 10).contains(&dataset.bytes()),
        "{}",
        dataset.bytes()
    );
    // The last part of a compressed tar has all that it unpacks to.
    let mut writer = ArchiveWriter::new(ArchiveKind::TarGz);
    let mut packed = Vec::new();
    for i in 0..80u8 {
        let data = vec![i; 100 << 10];
        writer
            .entry(&format!("{i:04}.bin"), &data, 0, &mut packed)
            .unwrap();
    }
    writer.finish(&mut packed).unwrap();
    assert!(packed.len() < 1 << 20);
    bench.put("t/0.tar.gz", packed);
    let last = part_of("t/0.tar.gz", r#""from": 1, "pieces": 2"#).await;
    assert!(
        last.row_bytes() >= 100 << 10,
        "{} rows of {}",
        last.rows(),
        last.row_bytes()
    );
    // The answer has 400 KiB; the whole tar has 8 MiB.
    let rows = Rows::new(
        engine_without_cache(&bench, 32 << 20),
        RowsConfig::default(),
    );
    let budget = rows.engine().budget().clone();
    let others = budget.try_hold(budget.holdable_bytes() - (3 << 20));
    let read = rows.read_now(&dataset, &[0, 3], &Projection::All).await;
    assert_eq!(read.unwrap().batch.num_rows(), 2);
    drop(others.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_are_read_though_others_took_more_than_there_is_for_them() {
    let bench = Bench::new();
    let mut lines = format!("{{\"n\": [{}1], \"text\": \"\"}}\n", "1,".repeat(100_000));
    let short = format!("{{\"n\": [1], \"text\": \"{}\"}}\n", "x".repeat(50_000));
    lines.push_str(&short.repeat(10));
    bench.put("l/0.jsonl", &lines);
    let dataset = bench.open(&format!("{BUCKET}/l/**")).await.unwrap().dataset;
    let rows = Rows::new(
        engine_without_cache(&bench, 16 << 20),
        RowsConfig::default(),
    );
    let long = rows.read(&dataset, &[0], &Projection::All).await.unwrap();
    assert_eq!(long.batch.num_rows(), 1);
    drop(long);
    // By what the long one took, these take nearly all that may be held.
    let short: Vec<u64> = (1..11).collect();
    let read = rows.read(&dataset, &short, &Projection::All);
    let read = tokio::time::timeout(std::time::Duration::from_secs(30), read);
    assert_eq!(read.await.unwrap().unwrap().batch.num_rows(), 10);
}

/// Otherwise answers would hold whole blocks until their last row is there.
#[tokio::test]
async fn what_rows_take_decoded_is_reserved_once_it_is_known() {
    let bench = Bench::new();
    let of_group = |first: i64, rows: usize| {
        let text: ArrayRef = Arc::new(StringArray::from_iter_values(
            (0..rows).map(|i| format!("{:08}", first + i as i64).repeat(512)),
        ));
        RecordBatch::try_from_iter([("text", text)]).unwrap()
    };
    let properties = parquet::file::properties::WriterProperties::builder()
        .set_compression(parquet::basic::Compression::SNAPPY)
        .build();
    let schema = of_group(0, 0).schema();
    let mut writer =
        parquet::arrow::ArrowWriter::try_new(Vec::new(), schema, Some(properties)).unwrap();
    for first in [0, 500] {
        writer.write(&of_group(first, 500)).unwrap();
        writer.flush().unwrap();
    }
    bench.put("p/a.parquet", writer.into_inner().unwrap());
    let dataset = bench.open(&format!("{BUCKET}/p/**")).await.unwrap().dataset;
    assert!(dataset.row_bytes() < 1024, "{}", dataset.row_bytes());
    let engine = engine_without_cache(&bench, 64 << 20);
    let rows = Rows::new(engine.clone(), RowsConfig::default());
    let held = rows.hold(&dataset, 0, &Projection::All).await.unwrap();
    // 200 rows are 800 KiB, twice while they are put in order.
    let budget = engine.budget();
    let others = budget.holdable_bytes() - budget.used_bytes() - (1 << 20);
    let others = budget.try_hold(others).unwrap();
    let wanted: Vec<u64> = (0..400).step_by(2).collect();
    let e = rows.read_now(&dataset, &wanted, &Projection::All).await;
    assert_eq!(e.unwrap_err().kind(), ErrorKind::Busy);
    drop(others);
    let read = rows.read_now(&dataset, &wanted, &Projection::All).await;
    let read = read.unwrap().batch;
    let text = read.column(0).as_string::<i32>().value(199);
    assert_eq!(text, "00000398".repeat(512));
    drop(held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_that_waits_for_room_holds_nothing_that_others_need() {
    const ITEMS: usize = 60 << 10;
    let bench = Bench::new();
    // Eight bytes of the line are eight of the list, and four times as much while it grows.
    let line = format!("{{\"n\": [{}1234567]}}\n", "1234567,".repeat(ITEMS - 1));
    bench.put("l/0.jsonl", &line);
    let dataset = bench.open(&format!("{BUCKET}/l/**")).await.unwrap().dataset;
    let rows = Rows::new(
        engine_without_cache(&bench, 16 << 20),
        RowsConfig::default(),
    );
    let budget = rows.engine().budget().clone();
    // There is room for the answer, for the line, and for half of what it takes to decode it.
    let answer = 2 * line.len() as u64 + 8192;
    let others = budget.holdable_bytes() - answer - line.len() as u64 - (5 << 18);
    let others = budget.try_hold(others).unwrap();
    let reader = {
        let (rows, dataset) = (rows.clone(), dataset.clone());
        tokio::spawn(async move { rows.read(&dataset, &[0], &Projection::All).await })
    };
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    assert!(!reader.is_finished());
    let held = budget.used_bytes() - others.bytes();
    assert!(
        held <= answer,
        "{held} bytes are held, {answer} of them for the answer"
    );
    drop(others);
    let read = reader.await.unwrap().unwrap();
    let list = read.batch.column(0).as_list::<i32>();
    assert_eq!(list.value_length(0), ITEMS as i32);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_that_is_wanted_again_is_decoded_once_and_a_held_one_not_at_all() {
    let bench = Bench::new();
    bench.put("p/a.parquet", parquet(&[1000, 1000, 1000]));
    let dataset = bench.open(&format!("{BUCKET}/p/**")).await.unwrap().dataset;
    let rows = Rows::new(bench.engine.clone(), RowsConfig::default());
    // How many partial reads come first depends on their cost.
    let mut read = 0;
    while rows.stats().blocks_decoded == 0 {
        assert!(read < 1000, "{:?}", rows.stats());
        rows.read(&dataset, &[read * 7 % 1000], &Projection::All)
            .await
            .unwrap();
        read += 1;
    }
    for row in 0..20 {
        rows.read(&dataset, &[row * 7], &Projection::All)
            .await
            .unwrap();
    }
    let s = rows.stats();
    assert_eq!(
        (s.blocks_decoded, s.blocks_read_in_part, s.blocks_reused),
        (1, read - 1, 20),
        "{s:?}"
    );
    // 64 requests at once want two blocks that nobody has.
    let many: Vec<_> = (0..64)
        .map(|i| {
            let (rows, dataset) = (rows.clone(), dataset.clone());
            tokio::spawn(async move {
                rows.hold(&dataset, 1 + i % 2, &Projection::All)
                    .await
                    .unwrap()
            })
        })
        .collect();
    let mut holds = Vec::new();
    for hold in many {
        holds.push(hold.await.unwrap());
    }
    assert_eq!(rows.stats().blocks_decoded, 3, "each block once");
    let before = rows.stats();
    let wanted: Vec<u64> = (1000..3000).rev().collect();
    rows.read(&dataset, &wanted, &Projection::All)
        .await
        .unwrap();
    let after = rows.stats();
    assert_eq!(
        after.blocks_decoded + after.blocks_read_in_part,
        before.blocks_decoded + before.blocks_read_in_part
    );
    // Consecutive rows of a block are not copied.
    let block = holds[0].memory_bytes();
    assert!(block > 0);
    drop(holds);
    drop(rows);
    given_back(&bench.engine, "blocks").await;
}

#[tokio::test]
async fn an_answer_that_is_a_slice_keeps_its_block() {
    let bench = Bench::new();
    // Decoded in three batches.
    bench.put("p/a.parquet", parquet(&[150_000]));
    let dataset = bench.open(&format!("{BUCKET}/p/**")).await.unwrap().dataset;
    let config = RowsConfig {
        block_cache_bytes: 0,
        ..RowsConfig::default()
    };
    let rows = Rows::new(bench.engine.clone(), config);
    let wanted: Vec<u64> = (70_000..70_010).collect();
    let read = rows
        .read_of_blocks(&dataset, &wanted, &Projection::All)
        .await
        .unwrap();
    let ids = read.batch.column(0).as_primitive::<Int64Type>().values();
    assert!(ids.iter().copied().eq(70_000..70_010));
    let block = rows.hold(&dataset, 0, &Projection::All).await.unwrap();
    assert_eq!(rows.stats().blocks_decoded, 1, "it was there still");
    let bytes = block.memory_bytes();
    drop(block);
    let used = bench.engine.budget().used_bytes();
    assert!(
        used >= bytes,
        "{used} bytes are held, {bytes} of them are the block's"
    );
    drop((read, rows));
    given_back(&bench.engine, "a slice").await;
}

#[tokio::test]
async fn requests_that_want_rows_of_one_block_at_the_same_time_decode_it_once() {
    let bench = Bench::new();
    bench.put("p/a.parquet", parquet(&[1000, 1000]));
    let dataset = bench.open(&format!("{BUCKET}/p/**")).await.unwrap().dataset;
    let rows = Rows::new(
        bench.engine.clone(),
        RowsConfig {
            block_cache_bytes: 0,
            ..RowsConfig::default()
        },
    );
    let wanted: Vec<[u64; 3]> = (0..20).map(|i| [1999 - i, i, 1000 + 3 * i]).collect();
    let reads = futures::future::join_all(
        wanted
            .iter()
            .map(|wanted| rows.read(&dataset, wanted, &Projection::All)),
    )
    .await;
    for (wanted, read) in wanted.iter().zip(&reads) {
        let ids = read
            .as_ref()
            .unwrap()
            .batch
            .column(0)
            .as_primitive::<Int64Type>()
            .values()
            .to_vec();
        assert_eq!(ids, wanted.map(|row| row as i64));
    }
    let s = rows.stats();
    assert_eq!(
        (s.blocks_read_in_part, s.parts_joined, s.blocks_decoded),
        (2, 38, 0),
        "{s:?}"
    );
    drop((reads, rows));
    given_back(&bench.engine, "joined reads").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decoded_blocks_leave_memory_for_reading_others() {
    let bench = Bench::new();
    let of_group = |first: i64, rows: usize| {
        let text: ArrayRef = Arc::new(StringArray::from_iter_values(
            (0..rows).map(|i| format!("{:08}", first + i as i64).repeat(32)),
        ));
        RecordBatch::try_from_iter([("text", text)]).unwrap()
    };
    // Decoded blocks take from 16 to 130 KB, together 2.8 MB, and 1 MiB may be held.
    let groups: Vec<usize> = (0..48).map(|i| [500, 120, 60][i / 16]).collect();
    let starts: Vec<u64> = groups
        .iter()
        .scan(0, |at, &rows| {
            Some(std::mem::replace(at, *at + rows as u64))
        })
        .collect();
    bench.put("p/a.parquet", parquet_of(&groups, of_group));
    let dataset = bench.open(&format!("{BUCKET}/p/**")).await.unwrap().dataset;
    let rows = Rows::new(engine_without_cache(&bench, 2 << 20), RowsConfig::default());
    let mut holds = Vec::new();
    for block in 0..48 {
        match rows.hold(&dataset, block, &Projection::All).await {
            Ok(hold) => holds.push(hold),
            Err(e) => assert_eq!(e.kind(), ErrorKind::Busy, "{e:?}"),
        }
    }
    assert!(!holds.is_empty() && holds.len() < 48);
    let reads = (0..24u64).map(|i| {
        let (rows, dataset, groups, starts) = (
            rows.clone(),
            dataset.clone(),
            groups.clone(),
            starts.clone(),
        );
        tokio::spawn(async move {
            let of_block = |(block, start): (usize, &u64)| {
                start + (i * 37 + block as u64 * 11) % groups[block] as u64
            };
            let wanted: Vec<u64> = starts.iter().enumerate().map(of_block).collect();
            let read = match i % 4 {
                0 => rows
                    .read_of_blocks(&dataset, &wanted, &Projection::All)
                    .await
                    .unwrap(),
                _ => rows
                    .read(&dataset, &wanted, &Projection::All)
                    .await
                    .unwrap(),
            };
            let texts = read.batch.column(0).as_string::<i32>();
            for (row, text) in wanted.iter().zip(texts) {
                assert_eq!(text, Some(&*format!("{row:08}").repeat(32)));
            }
        })
    });
    let reads: Vec<_> = reads.collect();
    for read in reads {
        tokio::time::timeout(std::time::Duration::from_secs(30), read)
            .await
            .expect("all go on")
            .unwrap();
    }
    let engine = rows.engine().clone();
    drop((holds, rows));
    given_back(&engine, "many blocks").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_for_many_cold_objects_fetches_them_together() {
    let bench = Bench::new();
    for i in 0..100 {
        bench.put(&format!("o/{i:03}"), format!("object {i}"));
    }
    let spec = format!(r#"{{"sources": ["{BUCKET}/o/**"], "format": "objects"}}"#);
    let dataset = bench.open_spec(&spec).await.unwrap().dataset;
    bench.faults.always(
        Operation::Get,
        Fault::Delay(std::time::Duration::from_millis(200)),
    );
    let rows = Rows::new(bench.engine.clone(), RowsConfig::default());
    let wanted: Vec<u64> = (0..100).rev().collect();
    let began = std::time::Instant::now();
    let read = rows
        .read(&dataset, &wanted, &Projection::All)
        .await
        .unwrap();
    // One after the other they would take 20 s.
    assert!(
        began.elapsed() < std::time::Duration::from_secs(10),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(
        read.batch
            .column_by_name("data")
            .unwrap()
            .as_binary::<i32>()
            .value(99),
        b"object 0"
    );
    let gets = bench.gets();
    rows.read(&dataset, &wanted, &Projection::All)
        .await
        .unwrap();
    assert_eq!(bench.gets(), gets, "what was read is on the disk");
}

/// The layer in front of an origin retries, and counts retries; retrying here too would multiply
/// them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_do_not_come_are_asked_for_once() {
    let bench = Bench::new();
    bench.put("o/1", "object");
    bench.put("t.parquet", parquet(&[10]));
    let spec = format!(r#"{{"sources": ["{BUCKET}/o/**"], "format": "objects"}}"#);
    let objects = bench.open_spec(&spec).await.unwrap().dataset;
    let table = bench.open("bk/t.parquet").await.unwrap().dataset;
    let rows = Rows::new(bench.engine.clone(), RowsConfig::default());
    for kind in [ErrorKind::Timeout, ErrorKind::OriginUnavailable] {
        bench.faults.always(Operation::Get, Fault::Error(kind));
        for dataset in [&objects, &table] {
            let gets = bench.gets();
            let read = rows.read(dataset, &[0], &Projection::All).await;
            assert_eq!(read.unwrap_err().kind(), kind);
            assert_eq!(bench.gets() - gets, 1, "{kind:?}");
        }
    }
}

/// A manifest may claim any size.
#[tokio::test]
async fn sizes_that_are_lies_are_errors() {
    let b = Bench::new();
    let lie = format!(
        r#"{{"name": "bk/x", "size": {}, "etag": "\"e\""}}"#,
        u64::MAX
    );
    b.put("m.txt", format!("{lie}\n{}\n", lie.replace("bk/x", "bk/y")));
    let spec = r#"{"sources": ["manifest:bk/m.txt"], "format": "objects"}"#;
    let dataset = b.open_spec(spec).await.unwrap().dataset;
    let rows = Rows::new(b.engine.clone(), RowsConfig::default());
    for wanted in [&[0][..], &[1, 0]] {
        let e = rows.read(&dataset, wanted, &Projection::All).await;
        assert_eq!(e.unwrap_err().kind(), ErrorKind::TooLarge);
    }
    assert!(rows.hold(&dataset, 0, &Projection::All).await.is_err());
}
