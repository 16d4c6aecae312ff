//! Many requests at once for rows of blocks that all together do not fit into memory.

use crate::support::*;
use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, FixedSizeBinaryArray, Int64Array, RecordBatch, cast::AsArray};
use forebay_core::{ErrorKind, ObjectName};
use forebay_dataset::{Rows, RowsConfig};
use forebay_format::tabular::Projection;
use forebay_origin::PutRequest;
use futures::StreamExt;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const BLOCK_ROWS: usize = 128;
const BLOCKS: usize = 16;
const VALUE_BYTES: i32 = 9 << 10;
const REQUESTS: u64 = 12;
const ROUNDS: u64 = 20;
/// Less than what memory is waited for at most.
const PATIENCE: Duration = Duration::from_secs(50);

/// `packed`: what is decoded is much more than what is read.
fn pictures(packed: bool) -> Vec<u8> {
    let compression = match packed {
        true => parquet::basic::Compression::SNAPPY,
        false => parquet::basic::Compression::UNCOMPRESSED,
    };
    let properties = parquet::file::properties::WriterProperties::builder()
        .set_max_row_group_row_count(Some(BLOCK_ROWS))
        .set_dictionary_enabled(false)
        .set_compression(compression)
        .build();
    let count = BLOCKS * BLOCK_ROWS;
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..count as i64));
    let values = (0..count).map(|n| vec![n as u8; VALUE_BYTES as usize]);
    let values: ArrayRef = Arc::new(FixedSizeBinaryArray::try_from_iter(values).unwrap());
    let batch = RecordBatch::try_from_iter([("id", ids), ("picture", values)]).unwrap();
    let mut writer =
        parquet::arrow::ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn requests_that_do_not_fit_together_do_not_wait_for_each_other() {
    crowd(64 << 20, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nor_those_of_which_nobody_knew_how_much_they_take() {
    crowd(64 << 20, true).await;
}

/// One block more in memory, and what others hold does not leave room for the next.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn who_waits_too_long_gives_back_what_it_holds_and_goes_alone() {
    crowd(8 << 20, true).await;
}

/// With so little memory, a write of this size needs three quarters of what may be held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decoded_blocks_that_are_kept_give_way_to_writes() {
    let b = Bench::new();
    b.put("pictures.parquet", pictures(true));
    let engine = engine_without_cache(&b, 64 << 20);
    let rows = Rows::new(engine.clone(), RowsConfig::default());
    let dataset = b.open("bk/pictures.parquet").await.unwrap().dataset;
    let block: Vec<u64> = (0..BLOCK_ROWS as u64).collect();
    drop(
        rows.read_of_blocks(&dataset, &block, &Projection::All)
            .await
            .unwrap(),
    );
    assert!(rows.stats().cached_bytes > 1 << 20 && engine.budget().used_bytes() > 1 << 20);
    let others = engine.budget().try_hold(15 << 19).unwrap();
    let piece = bytes::Bytes::from(vec![7; 1 << 20]);
    let body = futures::stream::iter((0..40).map(move |_| Ok(piece.clone())));
    let name = ObjectName::new(BUCKET, "large").unwrap();
    let put = engine.put(&name, PutRequest::default(), None, body.boxed());
    let put = tokio::time::timeout(PATIENCE, put).await;
    put.expect("it does not wait for memory that nobody uses")
        .unwrap();
    assert_eq!(rows.stats().cached_bytes, 0);
    // Whoever decoded them may still be about to end.
    let began = Instant::now();
    while engine.budget().used_bytes() > others.bytes() {
        assert!(
            began.elapsed() < PATIENCE,
            "what was held is not given back"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn crowd(budget_bytes: u64, packed: bool) {
    let b = Bench::new();
    b.put("pictures.parquet", pictures(packed));
    let engine = engine_without_cache(&b, budget_bytes);
    let config = RowsConfig {
        decode_threads: 16,
        ..RowsConfig::default()
    };
    let rows = Rows::new(engine, config);
    let dataset = b.open("bk/pictures.parquet").await.unwrap().dataset;
    assert_eq!(dataset.rows(), (BLOCKS * BLOCK_ROWS) as u64);
    let tasks = (0..REQUESTS).map(|task| {
        let (rows, dataset) = (rows.clone(), dataset.clone());
        tokio::spawn(async move {
            let mut longest = Duration::ZERO;
            for round in 0..ROUNDS {
                // Sixteen rows of each of four blocks, as a shuffle of blocks asks for them.
                let wanted: Vec<u64> = (0..64)
                    .map(|n| {
                        let block = (task * 5 + round * 3 + n % 4) % BLOCKS as u64;
                        block * BLOCK_ROWS as u64 + (n * 7 + task + round) % BLOCK_ROWS as u64
                    })
                    .collect();
                let began = Instant::now();
                let read = loop {
                    match rows.read_now(&dataset, &wanted, &Projection::All).await {
                        // As clients do.
                        Err(e) if e.kind() == ErrorKind::Busy => {
                            tokio::time::sleep(Duration::from_millis(50)).await;
                        }
                        read => break read.unwrap(),
                    }
                };
                longest = longest.max(began.elapsed());
                let ids = read.batch.column(0).as_primitive::<Int64Type>();
                let found: Vec<u64> = ids.values().iter().map(|&id| id as u64).collect();
                assert_eq!(found, wanted);
            }
            longest
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        let longest = task.await.unwrap();
        assert!(longest < PATIENCE, "one waited {longest:?}");
    }
}
