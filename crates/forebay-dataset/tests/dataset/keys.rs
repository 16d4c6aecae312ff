//! Rows by their keys: which row a key finds is what looking at every row says.

use crate::support::*;
use arrow_array::{
    ArrayRef, BinaryArray, DictionaryArray, FixedSizeBinaryArray, Float64Array, Int32Array,
    Int64Array, LargeStringArray, RecordBatch, StringArray, StringViewArray, UInt8Array,
    UInt64Array, types::Int32Type,
};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use forebay_core::{ErrorKind, MemoryBudget};
use forebay_dataset::{
    Dataset, Rows, RowsConfig,
    keys::{Keys, NO_ROW, WatchedKeys},
};
use forebay_testing::seeded::{factor, random_seed};
use parquet::{arrow::ArrowWriter, file::properties::WriterProperties};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use std::{collections::HashMap, sync::Arc, time::Duration};

fn keys_of(bench: &Bench) -> Keys {
    Keys::new(Rows::new(bench.engine.clone(), RowsConfig::default()), None)
}

fn parquet(batch: &RecordBatch, group: usize) -> Vec<u8> {
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(group))
        .build();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.into_inner().unwrap()
}

/// The first row of each key, where the column is indexed before.
async fn first(keys: &Keys, of: &Arc<Dataset>, column: &str, wanted: &[Key]) -> Vec<Option<u64>> {
    let watched = WatchedKeys::default();
    keys.index(of, column, &watched).await.unwrap();
    let found = keys.first(of, column, list(wanted)).await.unwrap().numbers;
    let row = |row: &u64| (*row != NO_ROW).then_some(*row);
    found.iter().map(row).collect()
}

/// A key as it is asked for.
type Key = Value;

fn text(key: &str) -> Key {
    json!(key)
}

fn int(key: i64) -> Key {
    json!(key)
}

fn bytes(key: &[u8]) -> Key {
    json!({"bytes": BASE64.encode(key)})
}

fn list(keys: &[Key]) -> Bytes {
    serde_json::to_vec(keys).unwrap().into()
}

/// A column of keys, some of them missing and some there several times, and the key of each.
fn column(rng: &mut StdRng, kind: usize, rows: usize) -> (ArrayRef, Vec<Option<Key>>) {
    let numbers: Vec<Option<i64>> = (0..rows)
        .map(|_| rng.random_bool(0.9).then(|| rng.random_range(0..200)))
        .collect();
    let texts: Vec<Option<String>> = (numbers.iter())
        .map(|n| n.map(|n| format!("{n:03}")))
        .collect();
    let of_text = || (texts.iter()).map(|t| t.as_deref().map(text)).collect();
    let of_bytes = || {
        (texts.iter())
            .map(|t| t.as_ref().map(|t| bytes(t.as_bytes())))
            .collect()
    };
    let of_int = || (numbers.iter()).map(|n| n.map(int)).collect();
    match kind {
        0 => (Arc::new(StringArray::from_iter(&texts)), of_text()),
        1 => (Arc::new(LargeStringArray::from_iter(&texts)), of_text()),
        2 => (Arc::new(StringViewArray::from_iter(&texts)), of_text()),
        3 => {
            let values = texts.iter().map(|t| t.as_ref().map(|t| t.as_bytes()));
            (Arc::new(BinaryArray::from_iter(values)), of_bytes())
        }
        4 => {
            let values = texts.iter().map(|t| t.as_ref().map(|t| t.as_bytes()));
            let values = FixedSizeBinaryArray::try_from_sparse_iter_with_size(values, 3);
            (Arc::new(values.unwrap()), of_bytes())
        }
        5 => (Arc::new(Int64Array::from_iter(&numbers)), of_int()),
        6 => {
            let values = numbers.iter().map(|n| n.map(|n| n as i32));
            (Arc::new(Int32Array::from_iter(values)), of_int())
        }
        7 => {
            let values = numbers.iter().map(|n| n.map(|n| n as u8));
            (Arc::new(UInt8Array::from_iter(values)), of_int())
        }
        8 => {
            let values = numbers.iter().map(|n| n.map(|n| n as u64));
            (Arc::new(UInt64Array::from_iter(values)), of_int())
        }
        _ => {
            let values = texts.iter().map(Option::as_deref);
            let values: DictionaryArray<Int32Type> = values.collect();
            (Arc::new(values), of_text())
        }
    }
}
const KINDS: usize = 10;

#[tokio::test]
async fn keys_find_what_looking_at_every_row_finds() {
    let seed = random_seed();
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..10 * factor() {
        let bench = Bench::new();
        let (rows, kind) = (rng.random_range(1..900), rng.random_range(0..KINDS));
        let (array, there) = column(&mut rng, kind, rows);
        let numbers = Int64Array::from_iter_values(0..rows as i64);
        let batch = RecordBatch::try_from_iter_with_nullable([
            ("n", Arc::new(numbers) as ArrayRef, false),
            ("key", array, true),
        ])
        .unwrap();
        let (mut at, mut file) = (0, 0);
        while at < rows {
            let count = rng.random_range(1..=rows - at);
            let group = rng.random_range(1..=count);
            let part = parquet(&batch.slice(at, count), group);
            bench.put(&format!("{file:03}.parquet"), part);
            (at, file) = (at + count, file + 1);
        }
        let dataset = bench.open("bk/*.parquet").await.unwrap().dataset;
        let keys = keys_of(&bench);
        let mut of: HashMap<String, Vec<u64>> = HashMap::new();
        for (row, key) in there.iter().enumerate() {
            if let Some(key) = key {
                of.entry(key.to_string()).or_default().push(row as u64);
            }
        }
        let mut wanted: Vec<Key> = there.iter().flatten().cloned().collect();
        wanted.dedup();
        wanted.extend([text("7"), int(777), bytes(b"007x")]);
        wanted.extend_from_within(..wanted.len() / 2);
        let found = first(&keys, &dataset, "key", &wanted).await;
        for (key, row) in wanted.iter().zip(found) {
            let expected = of.get(&key.to_string()).map(|rows| rows[0]);
            assert_eq!(row, expected, "seed {seed}, kind {kind}");
        }
        let some = &wanted[..wanted.len().min(3)];
        let expected: Vec<u64> = (0u64..)
            .zip(some)
            .flat_map(|(number, key)| {
                let rows = of.get(&key.to_string()).cloned().unwrap_or_default();
                rows.into_iter().flat_map(move |row| [number, row])
            })
            .collect();
        let all = keys.all(&dataset, "key", list(some)).await.unwrap();
        assert_eq!(all.numbers, expected, "seed {seed}, kind {kind}");
        let watched = WatchedKeys::default();
        let indexed = keys.index(&dataset, "key", &watched).await.unwrap();
        let rows_with_keys = there.iter().flatten().count() as u64;
        assert_eq!((indexed.rows, indexed.of), (rows_with_keys, rows as u64));
        assert!(indexed.kept && keys.asked().computed.get() == 1, "once");
    }
}

#[tokio::test]
async fn members_and_objects_are_found_by_their_names() {
    let bench = Bench::new();
    let members = (0..50).map(|i| (format!("{i:04}.txt"), format!("text {i}").into_bytes()));
    bench.put("a.tar", tar_of(members));
    for i in 0..30 {
        bench.put(&format!("objects/{i:03}.bin"), vec![0; i]);
    }
    let keys = keys_of(&bench);
    let members = bench.open("bk/a.tar").await.unwrap().dataset;
    let wanted = [text("0049"), text("0000"), text("0050")];
    let found = first(&keys, &members, "__key__", &wanted).await;
    assert_eq!(found, [Some(49), Some(0), None]);
    let objects = bench.open("bk/objects/*").await.unwrap().dataset;
    let wanted = [text("objects/007.bin"), text("objects/7.bin")];
    let found = first(&keys, &objects, "key", &wanted).await;
    assert_eq!(found, [Some(7), None]);
}

#[tokio::test]
async fn files_may_have_keys_of_several_widths() {
    let bench = Bench::new();
    let of = |name: &str, key: ArrayRef| {
        let batch = RecordBatch::try_from_iter([("key", key)]).unwrap();
        bench.put(name, parquet(&batch, 10));
    };
    of("a.parquet", Arc::new(Int32Array::from(vec![3, 1])));
    of(
        "b.parquet",
        Arc::new(Int64Array::from(vec![1 << 40, 3, -2])),
    );
    let dataset = bench.open("bk/*.parquet").await.unwrap().dataset;
    let wanted = [-2, 1 << 40, 3, 1].map(int);
    let found = first(&keys_of(&bench), &dataset, "key", &wanted).await;
    assert_eq!(found, [Some(4), Some(2), Some(0), Some(1)]);
}

fn many(rows: i64) -> Vec<u8> {
    let texts = StringArray::from_iter_values((0..rows).map(|i| format!("{:08}", i * 7919 % rows)));
    let floats = Float64Array::from_iter_values((0..rows).map(|i| i as f64));
    let batch = RecordBatch::try_from_iter([
        ("key", Arc::new(texts) as ArrayRef),
        ("score", Arc::new(floats)),
    ]);
    parquet(&batch.unwrap(), 100_000)
}

#[tokio::test]
async fn an_index_is_made_once_and_kept() {
    let bench = Bench::new();
    bench.put("a.parquet", many(5000));
    let dataset = bench.open("bk/a.parquet").await.unwrap().dataset;
    let dir = bench.dir.path().join("keys");
    let start = || {
        let rows = Rows::new(bench.engine.clone(), RowsConfig::default());
        Keys::new(rows, Some(dir.clone()))
    };
    let keys = start();
    let wanted = [text("00000000"), text("00007919")];
    let e = keys
        .first(&dataset, "key", list(&wanted))
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound, "{}", e.describe());
    let asked = (0..8).map(|_| first(&keys, &dataset, "key", &wanted));
    let answers = futures::future::join_all(asked).await;
    assert!(answers.iter().all(|found| *found == [Some(0), None]));
    assert_eq!(keys.asked().computed.get(), 1);
    let after = start();
    assert_eq!(first(&after, &dataset, "key", &wanted).await, answers[0]);
    let asked = after.asked();
    assert_eq!((asked.hits_disk.get(), asked.computed.get()), (1, 0));
    // Another column, and other files, have an index of their own.
    bench.put("a.parquet", many(4000));
    let other = bench.open("bk/a.parquet").await.unwrap().dataset;
    let watched = WatchedKeys::default();
    let indexed = after.index(&other, "key", &watched).await.unwrap();
    assert!(!indexed.kept && indexed.rows == 4000);
    for (column, says) in [("score", "of Float64"), ("none", "no column")] {
        let e = after.index(&other, column, &watched).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Invalid);
        assert!(e.describe().contains(says), "{}", e.describe());
    }
}

/// Keys of a node without a cache, with this much memory, over files in a directory.
async fn keys_at(dir: &std::path::Path, budget: MemoryBudget) -> (Arc<Dataset>, Keys) {
    let (dataset, engine) = bare(dir, budget).await;
    // Blocks that were read for it are not kept.
    let config = RowsConfig {
        block_cache_bytes: 0,
        ..RowsConfig::default()
    };
    (dataset, Keys::new(Rows::new(engine, config), None))
}

#[tokio::test]
async fn a_million_keys_take_less_than_64_mib() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.parquet"), many(1_000_000)).unwrap();
    let budget = MemoryBudget::new(512 << 20);
    let (dataset, keys) = keys_at(dir.path(), budget.clone()).await;
    let watched = WatchedKeys::default();
    let indexed = keys.index(&dataset, "key", &watched).await.unwrap();
    assert_eq!(indexed.rows, 1_000_000);
    assert!(
        indexed.bytes <= 24_000_000 && keys.kept().1 <= 24_001_000,
        "{indexed:?}"
    );
    assert_eq!(watched.now().done, 1_000_000);
    let wanted = [text("00999999"), text("01000000")];
    let found = first(&keys, &dataset, "key", &wanted).await;
    assert_eq!(found.iter().filter(|row| row.is_some()).count(), 1);
    // Blocks that were decoded for it are given back.
    for _ in 0..3000 {
        if budget.used_bytes() <= 24_100_000 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{} bytes are held", budget.used_bytes());
}

#[tokio::test]
async fn an_index_that_is_too_large_is_refused_before_anything_is_read() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.parquet"), many(500_000)).unwrap();
    let (dataset, keys) = keys_at(dir.path(), MemoryBudget::new(32 << 20)).await;
    let watched = WatchedKeys::default();
    let e = keys.index(&dataset, "key", &watched).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::TooLarge, "{}", e.describe());
    assert!(e.describe().contains("500000 keys") && e.describe().contains("memory.budget"));
}

#[tokio::test]
async fn a_file_that_has_changed_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    std::fs::write(&path, many(5000)).unwrap();
    let (dataset, keys) = keys_at(dir.path(), MemoryBudget::new(256 << 20)).await;
    std::fs::write(&path, many(4000)).unwrap();
    let watched = WatchedKeys::default();
    let e = keys.index(&dataset, "key", &watched).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::PreconditionFailed, "{}", e.describe());
    assert!(e.describe().contains("a.parquet"), "{}", e.describe());
}
