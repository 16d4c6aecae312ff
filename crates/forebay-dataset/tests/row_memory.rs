//! What rows take is in the memory budget before it is allocated. This test has its own file
//! because it observes the peak memory of the process.

#[path = "dataset/support.rs"]
mod support;

use arrow_array::{
    ArrayRef, DictionaryArray, Int32Array, Int64Array, LargeBinaryArray, RecordBatch, StringArray,
    cast::AsArray, types::Int32Type,
};
use arrow_ipc::{
    CompressionType,
    writer::{FileWriter, IpcWriteOptions},
};
use forebay_core::ErrorKind;
use forebay_dataset::{Rows, RowsConfig};
use forebay_format::tabular::Projection;
use forebay_testing::memory::{forget_peak, peak_bytes};
use std::sync::Arc;
use support::*;

const BUDGET_BYTES: u64 = 64 << 20;
const ROWS: usize = 300_000;
const VALUE_BYTES: usize = 1000;
const BOMB_BYTES: usize = 256 << 20;

fn one_row_group(batches: impl Iterator<Item = RecordBatch>) -> Vec<u8> {
    let properties = parquet::file::properties::WriterProperties::builder()
        .set_max_row_group_row_count(None)
        .build();
    let mut batches = batches.peekable();
    let schema = batches.peek().unwrap().schema();
    let mut writer =
        parquet::arrow::ArrowWriter::try_new(Vec::new(), schema, Some(properties)).unwrap();
    batches.for_each(|batch| writer.write(&batch).unwrap());
    writer.into_inner().unwrap()
}

fn compressed_arrow(batch: &RecordBatch) -> Vec<u8> {
    let options = IpcWriteOptions::default()
        .try_with_compression(Some(CompressionType::ZSTD))
        .unwrap();
    let mut writer =
        FileWriter::try_new_with_options(Vec::new(), &batch.schema(), options).unwrap();
    writer.write(batch).unwrap();
    writer.finish().unwrap();
    let bytes = writer.into_inner().unwrap();
    assert!(bytes.len() < 1 << 20, "{}", bytes.len());
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_rows_take_is_reserved_before_it_is_allocated() {
    let b = Bench::new();
    // One text, 300,000 times: 300 MB that a dictionary makes from some hundred kilobytes.
    let text: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(VALUE_BYTES); 1000]));
    let texts = RecordBatch::try_from_iter([("text", text)]).unwrap();
    let bomb = one_row_group((0..ROWS / 1000).map(|_| texts.clone()));
    assert!(bomb.len() < 1 << 20, "{}", bomb.len());
    b.put("bomb.parquet", bomb);
    let blob: ArrayRef = Arc::new(LargeBinaryArray::from(vec![&vec![7u8; 1 << 20][..]; 4]));
    let blobs = RecordBatch::try_from_iter([("blob", blob)]).unwrap();
    b.put("blobs.parquet", one_row_group(std::iter::once(blobs)));
    // One column of one batch, and one value of a dictionary.
    let zeros: ArrayRef = Arc::new(Int64Array::from(vec![0; BOMB_BYTES / 8]));
    let zeros = RecordBatch::try_from_iter([("n", zeros)]).unwrap();
    b.put("zeros.arrow", compressed_arrow(&zeros));
    drop(zeros);
    let value: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(BOMB_BYTES)]));
    let words: DictionaryArray<Int32Type> =
        DictionaryArray::try_new(Int32Array::from(vec![0, 0]), value).unwrap();
    let words = RecordBatch::try_from_iter([("word", Arc::new(words) as ArrayRef)]).unwrap();
    b.put("words.arrow", compressed_arrow(&words));
    drop(words);
    // Each line is a null in each of a thousand columns.
    let named: Vec<String> = (0..1000).map(|n| format!("\"c{n}\":0")).collect();
    let lines = format!("{{{}}}\n{}", named.join(","), "{}\n".repeat(10_000));
    b.put("nulls.jsonl", lines);
    let long = format!("objects/{}/{}", "k".repeat(200), "l".repeat(200));
    b.put(&long, "x");
    // Of what made the files.
    forget_peak();

    let engine = engine_without_cache(&b, BUDGET_BYTES);
    let rows = Rows::new(engine, RowsConfig::default());
    let before = peak_bytes();

    // A row may be asked for many times.
    let blobs = b.open("bk/blobs.parquet").await.unwrap().dataset;
    let e = rows.read(&blobs, &[0; 2000], &Projection::All).await;
    assert_eq!(e.unwrap_err().kind(), ErrorKind::TooLarge);
    assert_eq!(rows.stats().gather_ns, 0, "nothing was copied");
    let few = rows
        .read(&blobs, &[3, 3, 0], &Projection::All)
        .await
        .unwrap();
    assert_eq!(
        few.batch.column(0).as_binary::<i64>().value(1).len(),
        1 << 20
    );
    drop(few);

    // So may a key.
    let objects = b.open("bk/objects/**").await.unwrap().dataset;
    let key = Projection::Columns(vec!["key".to_owned()]);
    let e = rows.read(&objects, &vec![0; 1 << 20], &key).await;
    assert_eq!(e.unwrap_err().kind(), ErrorKind::TooLarge);
    let some = rows.read(&objects, &vec![0; 10_000], &key).await.unwrap();
    let keys = some.batch.column(0).as_string::<i32>();
    assert!(keys.iter().all(|key| key == Some(long.as_str())));
    drop(some);

    // For one row of these all has to be decompressed.
    for file in ["zeros", "words"] {
        let bomb = b.open(&format!("bk/{file}.arrow")).await.unwrap().dataset;
        let e = rows.read(&bomb, &[0], &Projection::All).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::TooLarge, "{file}: {e}");
    }
    let nulls = b.open("bk/nulls.jsonl").await.unwrap().dataset;
    let all: Vec<u64> = (0..nulls.rows()).collect();
    let e = rows.read(&nulls, &all, &Projection::All).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::TooLarge, "{e}");
    let few = rows.read(&nulls, &[10_000, 0, 3], &Projection::All).await;
    assert_eq!(few.unwrap().batch.num_rows(), 3);

    // Neither half of a block nor all of it is decoded if there is no memory for it.
    let bomb = b.open("bk/bomb.parquet").await.unwrap().dataset;
    let decoded = rows.stats().blocks_decoded;
    let every_second: Vec<u64> = (0..ROWS as u64).step_by(2).collect();
    for wanted in [every_second, (0..ROWS as u64).collect()] {
        for whole in [false, true] {
            let read = match whole {
                false => rows.read(&bomb, &wanted, &Projection::All).await,
                true => rows.read_of_blocks(&bomb, &wanted, &Projection::All).await,
            };
            assert_eq!(read.unwrap_err().kind(), ErrorKind::TooLarge);
        }
    }
    assert_eq!(rows.stats().blocks_decoded, decoded);
    let e = rows.hold(&bomb, 0, &Projection::All).await.unwrap_err();
    let kinds = [ErrorKind::TooLarge, ErrorKind::Busy];
    assert!(kinds.contains(&e.kind()), "{e}");

    // Some of its rows are read any number of times, even if the total work exceeds that of
    // decoding all of it.
    for round in 0..40u64 {
        let wanted: Vec<u64> = (0..64)
            .map(|i| (i * 4_001 + round * 97) % ROWS as u64)
            .collect();
        let read = rows.read(&bomb, &wanted, &Projection::All).await.unwrap();
        assert_eq!(read.batch.num_rows(), 64);
        let text = read.batch.column(0).as_string::<i32>();
        assert!((0..64).all(|i| text.value(i).len() == VALUE_BYTES));
    }
    assert_eq!(rows.stats().blocks_decoded, decoded);
    let took = peak_bytes() - before;
    assert!(
        took < 2 * BUDGET_BYTES,
        "{} MiB more than before",
        took >> 20
    );
    tokio::time::timeout(std::time::Duration::from_secs(60), async {
        while rows.engine().budget().used_bytes() > 5 << 20 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    })
    .await
    .expect("what was reserved comes back");
}
