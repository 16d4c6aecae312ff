//! Blocks that are kept decoded on the disk: rows from there are those that decoding gives, whatever
//! is evicted, damaged or asked for in between.

use crate::support::*;
use arrow_array::{
    Array, ArrayRef, BinaryArray, BooleanArray, Decimal128Array, DictionaryArray,
    FixedSizeBinaryArray, FixedSizeListArray, Float32Array, Float64Array, Int8Array, Int32Array,
    Int64Array, LargeBinaryArray, LargeListArray, LargeStringArray, ListArray, MapArray, NullArray,
    RecordBatch, StringArray, StringViewArray, StructArray, TimestampMillisecondArray,
    cast::AsArray, types::Int64Type,
};
use arrow_buffer::{NullBuffer, OffsetBuffer};
use arrow_schema::{DataType, Field, Fields};
use forebay_core::VersionId;
use forebay_dataset::{Dataset, Everything, Rows, RowsConfig, follow::Plans};
use forebay_format::tabular::Projection;
use forebay_plan::{Plan, PlanSpec, Shuffle};
use forebay_store::{Cached, NextUse, Part};
use forebay_testing::seeded::{factor, random_seed};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};
use std::{path::Path, sync::Arc, time::Duration};

fn nulls(rng: &mut StdRng, rows: usize) -> Option<NullBuffer> {
    let share = [0.0, 0.1, 0.9, 1.0][rng.random_range(0..4)];
    let some = share > 0.0 && rng.random_bool(0.8);
    some.then(|| NullBuffer::from_iter((0..rows).map(|_| !rng.random_bool(share))))
}

fn text(rng: &mut StdRng, most: usize) -> String {
    let letters = ["a", "ß", "水", "z", "🦀"];
    let length = rng.random_range(0..=most);
    (0..length)
        .map(|_| letters[rng.random_range(0..letters.len())])
        .collect()
}

fn blob(rng: &mut StdRng, most: usize) -> Vec<u8> {
    (0..rng.random_range(0..=most))
        .map(|_| rng.random())
        .collect()
}

/// Lengths of lists, and their sum.
fn lengths(rng: &mut StdRng, rows: usize) -> (Vec<usize>, usize) {
    let lengths: Vec<usize> = (0..rows).map(|_| rng.random_range(0..5)).collect();
    let all = lengths.iter().sum();
    (lengths, all)
}

pub(crate) const KINDS: usize = 21;

/// A random column. What those of others are made of, `of` says: the same in all files.
fn column(rng: &mut StdRng, kind: usize, rows: usize, of: usize) -> ArrayRef {
    let n = nulls(rng, rows);
    let valid = |i: usize| n.as_ref().is_none_or(|n| n.is_valid(i));
    let inner = |rng: &mut StdRng, rows: usize| column(rng, of % 11, rows, 0);
    let item = |of: &ArrayRef| Arc::new(Field::new("item", of.data_type().clone(), true));
    match kind {
        0 => Arc::new(Int64Array::from_iter(
            (0..rows).map(|i| valid(i).then(|| rng.random())),
        )),
        1 => Arc::new(StringArray::from_iter(
            (0..rows).map(|i| valid(i).then(|| text(rng, 40))),
        )),
        2 => Arc::new(BooleanArray::from_iter(
            (0..rows).map(|i| valid(i).then(|| rng.random_bool(0.5))),
        )),
        3 => Arc::new(Float32Array::from_iter(
            (0..rows).map(|i| valid(i).then(|| rng.random())),
        )),
        4 => Arc::new(BinaryArray::from_iter(
            (0..rows).map(|i| valid(i).then(|| blob(rng, 60))),
        )),
        5 => Arc::new(Int8Array::from_iter(
            (0..rows).map(|i| valid(i).then(|| rng.random())),
        )),
        6 => Arc::new(LargeStringArray::from_iter(
            (0..rows).map(|i| valid(i).then(|| text(rng, 3))),
        )),
        7 => Arc::new(TimestampMillisecondArray::from_iter(
            (0..rows).map(|i| valid(i).then(|| rng.random::<i32>().into())),
        )),
        8 => Arc::new(Decimal128Array::from_iter(
            (0..rows).map(|i| valid(i).then(|| rng.random::<i64>().into())),
        )),
        9 => Arc::new(
            FixedSizeBinaryArray::try_from_sparse_iter_with_size(
                (0..rows).map(|i| valid(i).then(|| [rng.random::<u8>(); 3])),
                3,
            )
            .unwrap(),
        ),
        10 => Arc::new(Float64Array::from_iter(
            (0..rows).map(|i| valid(i).then(|| rng.random())),
        )),
        11 => Arc::new(LargeBinaryArray::from_iter(
            (0..rows).map(|i| valid(i).then(|| blob(rng, 5000))),
        )),
        12 => {
            let (lengths, all) = lengths(rng, rows);
            let items = inner(rng, all);
            let offsets = OffsetBuffer::from_lengths(lengths);
            Arc::new(ListArray::new(item(&items), offsets, items, n))
        }
        13 => {
            let (lengths, all) = lengths(rng, rows);
            let items = inner(rng, all);
            let offsets = OffsetBuffer::from_lengths(lengths);
            Arc::new(LargeListArray::new(item(&items), offsets, items, n))
        }
        14 => {
            let items = inner(rng, rows * 3);
            Arc::new(FixedSizeListArray::new(item(&items), 3, items, n))
        }
        15 => {
            let children = [inner(rng, rows), column(rng, of / 11 % 11, rows, 0)];
            let fields = ["x", "y"].into_iter().zip(&children);
            let fields: Fields = fields
                .map(|(name, c)| Field::new(name, c.data_type().clone(), true))
                .collect();
            Arc::new(StructArray::new(fields, children.to_vec(), n))
        }
        16 => {
            // Lists of structs of lists.
            let (lengths, all) = lengths(rng, rows);
            let (inner_lengths, inner_all) = self::lengths(rng, all);
            let numbers = column(rng, of % 11, inner_all, 0);
            let offsets = OffsetBuffer::from_lengths(inner_lengths);
            let lists = ListArray::new(item(&numbers), offsets, numbers, nulls(rng, all));
            let lists: ArrayRef = Arc::new(lists);
            let field = Field::new("list", lists.data_type().clone(), true);
            let structs = StructArray::new(vec![field].into(), vec![lists], nulls(rng, all));
            let structs: ArrayRef = Arc::new(structs);
            let offsets = OffsetBuffer::from_lengths(lengths);
            Arc::new(ListArray::new(item(&structs), offsets, structs, n))
        }
        17 => {
            let (lengths, all) = lengths(rng, rows);
            let keys: ArrayRef = Arc::new(StringArray::from_iter_values(
                (0..all).map(|i| format!("key {i}")),
            ));
            let values = column(rng, 0, all, 0);
            let fields: Fields = vec![
                Field::new("key", DataType::Utf8, false),
                Field::new("value", DataType::Int64, true),
            ]
            .into();
            let entries = StructArray::new(fields.clone(), vec![keys, values], None);
            let field = Arc::new(Field::new("entries", DataType::Struct(fields), false));
            let offsets = OffsetBuffer::from_lengths(lengths);
            Arc::new(MapArray::new(field, offsets, entries, n, false))
        }
        18 => {
            // Arrow files have one dictionary for all batches.
            let words = StringArray::from_iter_values((0..5).map(|i| format!("word {i}")));
            let keys = (0..rows).map(|i| valid(i).then(|| rng.random_range(0..5)));
            let keys = Int32Array::from_iter(keys);
            Arc::new(DictionaryArray::try_new(keys, Arc::new(words)).unwrap())
        }
        19 => Arc::new(StringViewArray::from_iter(
            (0..rows).map(|i| valid(i).then(|| text(rng, 20))),
        )),
        _ => Arc::new(NullArray::new(rows)),
    }
}

/// Files with the same random columns: their pattern, and all rows.
pub(crate) fn write(bench: &Bench, rng: &mut StdRng, what: &str, kinds: &[usize]) -> RecordBatch {
    let of: usize = rng.random_range(0..121);
    let mut all = Vec::new();
    for file in 0..rng.random_range(1..=3) {
        let groups: Vec<usize> = (0..rng.random_range(1..=3))
            .map(|_| rng.random_range(8..=150))
            .collect();
        let mut batches = Vec::new();
        for &rows in &groups {
            let first: usize = all.iter().map(RecordBatch::num_rows).sum();
            let ids = Int64Array::from_iter_values((first..first + rows).map(|i| i as i64));
            let mut columns: Vec<(String, ArrayRef)> = vec![("id".into(), Arc::new(ids))];
            for (i, &kind) in kinds.iter().enumerate() {
                columns.push((format!("c{i}"), column(rng, kind, rows, of + i)));
            }
            let fields: Fields = columns
                .iter()
                .map(|(name, c)| Field::new(name, c.data_type().clone(), name != "id"))
                .collect();
            let schema = Arc::new(arrow_schema::Schema::new(fields));
            let columns = columns.into_iter().map(|(_, c)| c).collect();
            let batch = RecordBatch::try_new(schema, columns).unwrap();
            batches.push(batch.clone());
            all.push(batch);
        }
        let schema = batches[0].schema();
        let bytes = if what == "arrow" {
            let options = arrow_ipc::writer::IpcWriteOptions::default()
                .try_with_compression(Some(arrow_ipc::CompressionType::ZSTD))
                .unwrap();
            let mut w =
                arrow_ipc::writer::FileWriter::try_new_with_options(Vec::new(), &schema, options)
                    .unwrap();
            batches.iter().for_each(|b| w.write(b).unwrap());
            w.finish().unwrap();
            w.into_inner().unwrap()
        } else {
            let properties = parquet::file::properties::WriterProperties::builder()
                .set_data_page_row_count_limit(rng.random_range(8..200))
                .set_compression(parquet::basic::Compression::SNAPPY)
                .set_write_batch_size(8)
                .build();
            let mut w =
                parquet::arrow::ArrowWriter::try_new(Vec::new(), schema, Some(properties)).unwrap();
            for batch in &batches {
                w.write(batch).unwrap();
                w.flush().unwrap();
            }
            w.into_inner().unwrap()
        };
        bench.put(&format!("{what}/{file}.{what}"), bytes);
    }
    let schema = all[0].schema();
    arrow_select::concat::concat_batches(&schema, &all).unwrap()
}

/// Blocks are laid out as soon as it pays: no memory keeps them.
fn config() -> RowsConfig {
    RowsConfig {
        block_cache_bytes: 0,
        ..RowsConfig::default()
    }
}

/// Decodes everything each time.
pub(crate) fn reference(bench: &Bench) -> Rows {
    let engine = engine_without_cache(bench, 256 << 20);
    Rows::new(engine, config())
}

/// Reads rows one by one until all blocks are laid out.
async fn lay_out(rows: &Rows, dataset: &Arc<Dataset>, columns: &Projection) {
    for _ in 0..400 {
        for block in 0..dataset.shape().blocks() {
            let first = dataset.shape().block_range(block).start;
            rows.read(dataset, &[first], columns).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        let before = rows.stats();
        for block in 0..dataset.shape().blocks() {
            let first = dataset.shape().block_range(block).start;
            rows.read(dataset, &[first], columns).await.unwrap();
        }
        let after = rows.stats();
        if after.rows_laid - before.rows_laid == dataset.shape().blocks() {
            return;
        }
    }
    panic!("not all blocks are laid out: {:?}", rows.stats());
}

fn shuffled(rng: &mut StdRng, dataset: &Dataset) -> Vec<u64> {
    let mut all: Vec<u64> = (0..dataset.rows()).collect();
    all.shuffle(rng);
    all
}

/// Flips a bit in each 1,500 bytes of all segments of the cache.
fn damage(cache: &Path) {
    for entry in std::fs::read_dir(cache).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            damage(&path);
        } else if path
            .file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("seg-")
        {
            // It may have been evicted meanwhile.
            let Ok(mut bytes) = std::fs::read(&path) else {
                continue;
            };
            bytes.iter_mut().step_by(1500).for_each(|b| *b ^= 4);
            use std::os::unix::fs::FileExt;
            if let Ok(file) = std::fs::File::options().write(true).open(&path) {
                file.write_all_at(&bytes, 0).unwrap();
            }
        }
    }
}

/// Fills the cache with other things.
fn fill(bench: &Bench, number: u64, mib: u32) {
    let store = bench.engine.store().unwrap();
    for i in 0..mib {
        let junk = vec![i as u8; 1 << 20];
        store
            .put_part(&name("junk"), VersionId(number), Part::Chunk(i), &junk)
            .unwrap();
    }
}

/// Blocks that are held as a whole have long values as views; a file of short ones beside them has
/// none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_blocks_that_hold_views_are_those_that_decoding_gives() {
    let mut rng = StdRng::seed_from_u64(random_seed());
    let bench = Bench::with_cache(48 << 20);
    let mut all = Vec::new();
    for (file, most) in [900, 900, 20].into_iter().enumerate() {
        let rows = rng.random_range(100..300);
        let n = nulls(&mut rng, rows);
        let valid = |i: usize| n.as_ref().is_none_or(|n| n.is_valid(i));
        let texts: Vec<String> = (0..rows).map(|_| text(&mut rng, most)).collect();
        let blobs: Vec<Vec<u8>> = (0..rows).map(|_| blob(&mut rng, 3 * most)).collect();
        let columns: [(&str, ArrayRef, bool); 3] = [
            (
                "id",
                Arc::new(Int64Array::from_iter_values(0..rows as i64)),
                true,
            ),
            (
                "text",
                Arc::new(StringArray::from_iter(
                    texts.iter().enumerate().map(|(i, t)| valid(i).then_some(t)),
                )),
                true,
            ),
            (
                "blob",
                Arc::new(LargeBinaryArray::from_iter_values(&blobs)),
                true,
            ),
        ];
        let batch = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
        let properties = parquet::file::properties::WriterProperties::builder()
            .set_data_page_row_count_limit(rng.random_range(8..200))
            .set_compression(parquet::basic::Compression::SNAPPY)
            .set_dictionary_enabled(false)
            .set_max_row_group_row_count(Some(rng.random_range(30..200)))
            .set_write_batch_size(8)
            .build();
        let mut writer =
            parquet::arrow::ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties))
                .unwrap();
        writer.write(&batch).unwrap();
        bench.put(&format!("v/{file}.parquet"), writer.into_inner().unwrap());
        all.push(batch);
    }
    let written = arrow_select::concat::concat_batches(&all[0].schema(), &all).unwrap();
    let dataset = bench.open(&format!("{BUCKET}/v/**")).await.unwrap().dataset;
    let rows = Rows::new(bench.engine.clone(), config());
    for columns in [
        Projection::All,
        Projection::Columns(vec!["blob".into(), "text".into()]),
    ] {
        let mut held = Vec::new();
        for block in 0..dataset.shape().blocks() {
            held.push(rows.hold(&dataset, block, &columns).await.unwrap());
        }
        for round in 0..40 {
            let wanted: Vec<u64> = match round % 4 {
                0 => {
                    let from = rng.random_range(0..dataset.rows());
                    (from..dataset.rows().min(from + 40)).collect()
                }
                1 => shuffled(&mut rng, &dataset),
                _ => (0..rng.random_range(1..40))
                    .map(|_| rng.random_range(0..dataset.rows()))
                    .collect(),
            };
            let read = match round % 3 {
                0 => rows.read(&dataset, &wanted, &columns).await,
                _ => rows.read_of_blocks(&dataset, &wanted, &columns).await,
            };
            let read = read.unwrap().batch;
            let indices: Vec<u32> = wanted.iter().map(|&row| row as u32).collect();
            for (field, column) in read.schema().fields().iter().zip(read.columns()) {
                let expected = written.column_by_name(field.name()).unwrap();
                let expected = arrow_select::take::take(
                    expected,
                    &arrow_array::UInt32Array::from(indices.clone()),
                    None,
                );
                assert_eq!(column, &expected.unwrap(), "round {round}");
            }
        }
        // What is laid out comes from whole blocks.
        drop(held);
        lay_out(&rows, &dataset, &columns).await;
        let wanted = shuffled(&mut rng, &dataset);
        let read = rows.read(&dataset, &wanted, &columns).await.unwrap().batch;
        let direct = reference(&bench);
        let expected = direct.read(&dataset, &wanted, &columns).await.unwrap();
        assert_eq!(read, expected.batch);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_laid_blocks_are_those_that_decoding_gives() {
    let mut rng = StdRng::seed_from_u64(random_seed());
    let mut laid = 0;
    for case in 0..8 * factor() {
        let what = ["parquet", "arrow"][rng.random_range(0..2)];
        let kinds: Vec<usize> = (0..rng.random_range(1..6))
            .map(|_| {
                // Arrow files of the test have all; what is not laid out comes now and then.
                let kind = rng.random_range(0..KINDS);
                if kind > 17 && rng.random_bool(0.7) {
                    12
                } else {
                    kind
                }
            })
            .collect();
        let bench = Bench::with_cache(48 << 20);
        let written = write(&bench, &mut rng, what, &kinds);
        let dataset = bench.open(&format!("{BUCKET}/{what}/**")).await.unwrap();
        let dataset = dataset.dataset;
        assert_eq!(dataset.rows(), written.num_rows() as u64);
        let (rows, direct) = (Rows::new(bench.engine.clone(), config()), reference(&bench));
        let names: Vec<String> = dataset
            .schema()
            .fields()
            .iter()
            .map(|f| f.name().clone())
            .collect();
        let mut held = Vec::new();
        for round in 0..60 {
            match rng.random_range(0..30) {
                0 => fill(&bench, case * 1000 + round, 48),
                1 => damage(&bench.dir.path().join("cache")),
                2 => held.clear(),
                _ => {}
            }
            let columns = match rng.random_range(0..3) {
                0 => Projection::All,
                1 => Projection::Columns(vec!["c0".into(), "id".into()]),
                _ => {
                    let mut some = names.clone();
                    some.shuffle(&mut rng);
                    some.truncate(rng.random_range(0..=names.len()));
                    Projection::Columns(some)
                }
            };
            if rng.random_bool(0.1) {
                // Requests have rows of blocks in memory and of laid ones then.
                let block = rng.random_range(0..dataset.shape().blocks());
                held.push(rows.hold(&dataset, block, &columns).await.unwrap());
            }
            let wanted: Vec<u64> = match rng.random_range(0..10) {
                0 => vec![rng.random_range(0..dataset.rows()); 5],
                1 => {
                    let from = rng.random_range(0..dataset.rows());
                    (from..dataset.rows().min(from + 40)).collect()
                }
                _ => (0..rng.random_range(1..40))
                    .map(|_| rng.random_range(0..dataset.rows()))
                    .collect(),
            };
            let many = (0..3).map(|_| rows.read(&dataset, &wanted, &columns));
            let many = futures::future::join_all(many).await;
            let expected = direct.read(&dataset, &wanted, &columns).await.unwrap();
            for read in many {
                let read = read.unwrap_or_else(|e| panic!("{what} {kinds:?}: {e:?}"));
                assert_eq!(read.batch.num_rows(), wanted.len());
                assert!(
                    read.batch == expected.batch,
                    "{what} {kinds:?}, case {case}, round {round}: {wanted:?} of {columns:?}: {:?}",
                    rows.stats()
                );
            }
            if let Some(ids) = expected.batch.column_by_name("id") {
                let ids = ids.as_primitive::<Int64Type>().values();
                assert!(ids.iter().zip(&wanted).all(|(id, row)| *id == *row as i64));
            }
        }
        let stats = rows.stats();
        println!("{what} {kinds:?}: {stats:?}");
        laid += stats.rows_laid;
        drop((rows, direct, held));
    }
    assert!(laid > 0, "nothing was laid out at all");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_laid_block_is_decoded_no_more_and_one_that_is_damaged_is_laid_out_again() {
    let mut rng = StdRng::seed_from_u64(random_seed());
    let bench = Bench::new();
    write(&bench, &mut rng, "parquet", &[1, 11, 15, 12]);
    let dataset = bench
        .open(&format!("{BUCKET}/parquet/**"))
        .await
        .unwrap()
        .dataset;
    let rows = Rows::new(bench.engine.clone(), config());
    let all = Projection::All;
    lay_out(&rows, &dataset, &all).await;
    let before = rows.stats();
    assert_eq!(before.blocks_laid, dataset.shape().blocks(), "each once");
    assert!(before.laid_bytes > 0 && before.laid_lost == 0, "{before:?}");
    let order = shuffled(&mut rng, &dataset);
    let expected = reference(&bench)
        .read(&dataset, &order, &all)
        .await
        .unwrap();
    let read = rows.read(&dataset, &order, &all).await.unwrap().batch;
    assert!(read == expected.batch);
    let after = rows.stats();
    assert_eq!(after.rows_laid - before.rows_laid, dataset.rows());
    let decoded = |s: &forebay_dataset::RowsSnapshot| {
        (s.blocks_decoded, s.blocks_read_in_part, s.blocks_reused)
    };
    assert_eq!(decoded(&after), decoded(&before), "nothing is decoded");

    // Rows of a block in memory are put between those of laid ones.
    let blocks = dataset.shape().blocks();
    let block = rng.random_range(0..blocks);
    let in_memory = dataset.shape().block_range(block);
    let held = rows.hold(&dataset, block, &all).await.unwrap();
    let before = rows.stats();
    let read = rows.read(&dataset, &order, &all).await.unwrap().batch;
    assert!(read == expected.batch);
    let after = rows.stats();
    let laid = dataset.rows() - (in_memory.end - in_memory.start);
    assert_eq!(after.rows_laid - before.rows_laid, laid);
    assert_eq!(after.blocks_reused - before.blocks_reused, 1);
    assert_eq!(after.blocks_decoded, before.blocks_decoded);
    assert_eq!(after.blocks_read_in_part, before.blocks_read_in_part);
    drop(held);

    // Another reader over the same cache finds what is there, as after a restart.
    let again = Rows::new(bench.engine.clone(), config());
    let read = again.read(&dataset, &order, &all).await.unwrap().batch;
    assert!(read == expected.batch);
    let found = again.stats();
    assert_eq!(
        (found.rows_laid, decoded(&found)),
        (dataset.rows(), (0, 0, 0))
    );
    // Other columns are other blocks.
    let ids = Projection::Columns(vec!["id".into()]);
    again.read(&dataset, &order, &ids).await.unwrap();
    assert_eq!(again.stats().rows_laid, dataset.rows());

    // With what is lost, rows of a block in memory are still those, and count.
    let held = match blocks > 1 {
        true => Some(rows.hold(&dataset, block, &all).await.unwrap()),
        false => None,
    };
    let before = rows.stats();
    damage(&bench.dir.path().join("cache"));
    let read = rows.read(&dataset, &order, &all).await.unwrap().batch;
    assert!(read == expected.batch, "decoded again, from the origin");
    let lost = rows.stats();
    assert!(lost.laid_lost > 0, "{lost:?}");
    assert_eq!(
        lost.blocks_reused - before.blocks_reused,
        u64::from(held.is_some())
    );
    drop((read, held));
    lay_out(&rows, &dataset, &all).await;
    let read = rows.read(&dataset, &order, &all).await.unwrap().batch;
    assert!(read == expected.batch);
    assert!(rows.stats().blocks_laid > lost.blocks_laid);
    let engine = rows.engine().clone();
    drop((rows, again));
    for _ in 0..3000 {
        if engine.budget().used_bytes() == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{} bytes were not given back", engine.budget().used_bytes());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_is_larger_than_a_piece_is_read_from_several() {
    let bench = Bench::new();
    let texts = (0..40usize).map(|i| {
        let length = if i % 9 == 0 { 2_500_000 } else { 70_000 };
        String::from_utf8(vec![b'a' + i as u8 % 26; length]).unwrap()
    });
    let texts: Vec<String> = texts.collect();
    let make = |first: i64, rows: usize| {
        let from = first as usize;
        let texts = StringArray::from_iter_values(&texts[from..from + rows]);
        RecordBatch::try_from_iter([("text", Arc::new(texts) as ArrayRef)]).unwrap()
    };
    bench.put("t/0.parquet", parquet_of(&[20, 20], make));
    let dataset = bench.open(&format!("{BUCKET}/t/**")).await.unwrap().dataset;
    let rows = Rows::new(bench.engine.clone(), config());
    lay_out(&rows, &dataset, &Projection::All).await;
    let before = rows.stats();
    let wanted: Vec<u64> = (0..40).rev().chain([9, 9]).collect();
    let read = rows
        .read(&dataset, &wanted, &Projection::All)
        .await
        .unwrap();
    let read = read.batch.column(0).as_string::<i32>().clone();
    for (at, &row) in wanted.iter().enumerate() {
        assert!(read.value(at) == texts[row as usize], "row {row}");
    }
    assert_eq!(rows.stats().rows_laid - before.rows_laid, 40, "each once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_pay_or_does_not_fit_is_not_laid_out() {
    let texts = |first: i64, rows: usize| {
        let texts = (0..rows).map(|i| format!("{:06}", first + i as i64).repeat(700));
        let texts = StringArray::from_iter_values(texts);
        RecordBatch::try_from_iter([("text", Arc::new(texts) as ArrayRef)]).unwrap()
    };
    // Decoded, these are 4.2 MB.
    let file = parquet_of(&[250, 250, 250, 250], texts);
    let defaults = RowsConfig::default;
    let cases = [
        ("as it should be", 64 << 20, config(), true),
        ("in memory", 64 << 20, defaults(), false),
        ("a small cache", 5 << 20, config(), false),
        (
            "switched off",
            64 << 20,
            RowsConfig {
                keep_decoded: false,
                ..config()
            },
            false,
        ),
    ];
    let mut most_rounds = 20_000;
    for (why, cache, config, is_laid) in cases {
        let bench = Bench::with_cache(cache);
        bench.put("t/0.parquet", &file);
        let dataset = bench.open(&format!("{BUCKET}/t/**")).await.unwrap().dataset;
        let rows = Rows::new(bench.engine.clone(), config);
        // Until it pays, which depends on how fast this machine decodes; where nothing may be laid
        // out, twice as long.
        let mut rounds = 0;
        while rounds < most_rounds && rows.stats().blocks_laid < 4 {
            for group in 0..4u64 {
                let row = group * 250 + rounds % 250;
                let read = rows.read(&dataset, &[row], &Projection::All).await.unwrap();
                let text = read.batch.column(0).as_string::<i32>().value(0);
                assert_eq!(text, format!("{row:06}").repeat(700));
            }
            rounds += 1;
        }
        if is_laid {
            most_rounds = 2 * rounds;
        }
        assert_eq!(
            rows.stats().blocks_laid > 0,
            is_laid,
            "{why}: {:?}",
            rows.stats()
        );
        // Whole blocks are decoded whole, whatever is laid out.
        let before = rows.stats();
        let whole: Vec<u64> = (0..1000).collect();
        let read = rows
            .read_of_blocks(&dataset, &whole, &Projection::All)
            .await;
        assert_eq!(read.unwrap().batch.num_rows(), 1000);
        assert_eq!(rows.stats().rows_laid, before.rows_laid, "{why}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cache_keeps_laid_blocks_of_a_plan_and_lets_go_of_what_they_were_made_of() {
    let mut rng = StdRng::seed_from_u64(5);
    let bench = Bench::with_cache(48 << 20);
    let noise = |rows: usize, rng: &mut StdRng| {
        let values = (0..rows).map(|_| blob(rng, 10_000)).collect::<Vec<_>>();
        let values = BinaryArray::from_iter_values(values);
        RecordBatch::try_from_iter([("data", Arc::new(values) as ArrayRef)]).unwrap()
    };
    let batches: Vec<RecordBatch> = (0..4).map(|_| noise(200, &mut rng)).collect();
    let mut w =
        parquet::arrow::ArrowWriter::try_new(Vec::new(), batches[0].schema(), None).unwrap();
    for batch in &batches {
        w.write(batch).unwrap();
        w.flush().unwrap();
    }
    bench.put("t/0.parquet", w.into_inner().unwrap());
    let dataset = bench.open(&format!("{BUCKET}/t/**")).await.unwrap().dataset;
    let file = dataset.file(0);
    assert!(file.size > 3 << 20, "it has chunks");
    let rows = Rows::new(bench.engine.clone(), config());
    let plans = Plans::new(&bench.datasets, &rows);
    let register = async |shuffle: Shuffle| {
        let spec = PlanSpec::single(dataset.id(), dataset.shape().clone(), 1, shuffle);
        let registration = registration(&Plan::new(spec).unwrap());
        plans
            .register(&registration, &Everything)
            .await
            .unwrap()
            .lease
    };
    let chunk = Cached {
        bucket: forebay_core::name::hash_bucket(BUCKET),
        name: file.name.hash128(),
        version: file.version(),
        part: Some(Part::Chunk(1)),
    };
    let full = register(Shuffle::Full).await;
    let wanted = |next| matches!(next, NextUse::ThisRound(_) | NextUse::LaterRound(_));
    assert!(wanted(plans.advisor().next_use(&chunk)));
    lay_out(&rows, &dataset, &Projection::All).await;
    assert_eq!(plans.advisor().next_use(&chunk), NextUse::Never);
    assert!(
        wanted(plans.advisor().next_use_by_all(&chunk)),
        "other nodes may ask for it"
    );
    // A job that reads whole blocks needs them as they are.
    let blocks = register(Shuffle::Block { blocks: 2 }).await;
    assert!(wanted(plans.advisor().next_use(&chunk)));
    plans.release(&blocks, &Everything).unwrap();
    assert_eq!(plans.advisor().next_use(&chunk), NextUse::Never);

    // Twice the cache's size of other things: the laid blocks stay, at the cost of those.
    let before = rows.stats();
    fill(&bench, 1, 96);
    let store = bench.engine.store().unwrap();
    assert!(!store.has_part(&file.name, file.version(), Part::Chunk(1)));
    let order = shuffled(&mut rng, &dataset);
    let read = rows.read(&dataset, &order, &Projection::All).await.unwrap();
    for (at, &row) in order.iter().enumerate() {
        let of = batches[row as usize / 200].column(0).as_binary::<i32>();
        let value = of.value(row as usize % 200);
        assert!(read.batch.column(0).as_binary::<i32>().value(at) == value);
    }
    let after = rows.stats();
    assert_eq!(
        after.rows_laid - before.rows_laid,
        dataset.rows(),
        "{after:?}"
    );
    assert_eq!(after.blocks_laid, before.blocks_laid);
    plans.release(&full, &Everything).unwrap();
    assert_eq!(plans.advisor().next_use(&chunk), NextUse::Unknown);
}
