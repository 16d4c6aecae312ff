//! What a filter over many rows takes: time, memory of the process, memory of the set.
//!
//! `cargo run --release -p forebay-dataset --example filter_memory -- 400000000`: a column of random
//! numbers below 100, in files of 10 million rows with row groups of a million, and the filter that
//! leaves one of a hundred. All files are one on disk, under many names.

use arrow_array::{ArrayRef, Int32Array, RecordBatch};
use forebay_core::{MemoryBudget, SystemClock};
use forebay_dataset::{
    DatasetSpec, Datasets, DatasetsConfig, Everything, Rows, RowsConfig,
    filter::{Filters, WatchedFilter},
};
use forebay_engine::{Engine, EngineConfig, FixedBuckets};
use forebay_origin::{LocalOrigin, Origin};
use forebay_protocol::filter::{Expr, How, Literal};
use parquet::{arrow::ArrowWriter, file::properties::WriterProperties};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

const FILE_ROWS: u64 = 10_000_000;
const GROUP_ROWS: usize = 1_000_000;
/// How often it is looked how much of the budget is in use.
const SAMPLED_EVERY: Duration = Duration::from_millis(5);
/// The default of a node.
const BUDGET_BYTES: u64 = 1 << 30;

fn write(path: &Path, rows: u64) {
    let mut rng = StdRng::seed_from_u64(1);
    let mut batch = |rows: usize| {
        let numbers = Int32Array::from_iter_values((0..rows).map(|_| rng.random_range(0..100)));
        RecordBatch::try_from_iter([("n", Arc::new(numbers) as ArrayRef)]).expect("one column")
    };
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(GROUP_ROWS))
        .build();
    let file = fs::File::create(path).expect("a file");
    let mut writer =
        ArrowWriter::try_new(file, batch(0).schema(), Some(properties)).expect("a writer");
    let mut left = rows;
    while left > 0 {
        let rows = left.min(GROUP_ROWS as u64);
        writer.write(&batch(rows as usize)).expect("rows");
        left -= rows;
    }
    writer.close().expect("a footer");
}

/// The most memory that the process has had, and what it has at this moment.
fn memory_mib() -> (u64, u64) {
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let of = |name: &str| -> u64 {
        let line = status.lines().find(|l| l.starts_with(name));
        let kib = line.and_then(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok());
        kib.unwrap_or(0) / 1024
    };
    (of("VmHWM:"), of("VmRSS:"))
}

#[tokio::main]
async fn main() {
    let rows = std::env::args()
        .nth(1)
        .map_or(400_000_000, |n| n.parse::<u64>().expect("a number of rows"));
    let dir = tempfile::tempdir().expect("a directory");
    let first = dir.path().join("0000.parquet");
    write(&first, rows.min(FILE_ROWS));
    for i in 1..rows.div_ceil(FILE_ROWS) {
        fs::hard_link(&first, dir.path().join(format!("{i:04}.parquet"))).expect("a link");
    }
    let local: Arc<dyn Origin> = Arc::new(LocalOrigin::open(dir.path()).expect("a directory"));
    let mut buckets = FixedBuckets::default();
    buckets.0.insert("bk".to_owned(), local);
    let budget = MemoryBudget::new(BUDGET_BYTES);
    let clock = Arc::new(SystemClock);
    let config = EngineConfig::default();
    let engine = Engine::new(config, Arc::new(buckets), None, clock, budget.clone());
    let datasets = Datasets::new(engine.clone(), DatasetsConfig::default());
    let spec = DatasetSpec::of("bk/*.parquet");
    let opened = datasets.open(&spec, &Everything).await.expect("a dataset");
    // What a node keeps decoded for later is beside this.
    let config = RowsConfig {
        block_cache_bytes: 16 << 20,
        ..RowsConfig::default()
    };
    let filters = Filters::new(Rows::new(engine, config), None);
    let expr = Expr::Compare {
        column: "n".to_owned(),
        how: How::Equal,
        value: Literal::Int(7),
    };
    // The writer's memory is not the filter's.
    let _ = fs::write("/proc/self/clear_refs", "5");
    let (_, before) = memory_mib();
    let most_counted = Arc::new(AtomicU64::new(0));
    let (of, seen) = (budget.clone(), most_counted.clone());
    let sampling = tokio::spawn(async move {
        loop {
            seen.fetch_max(of.used_bytes(), Relaxed);
            tokio::time::sleep(SAMPLED_EVERY).await;
        }
    });
    let began = Instant::now();
    let watched = WatchedFilter::default();
    let answer = filters.filter(&opened.dataset, &expr, &watched).await;
    let answer = answer.expect("rows");
    let seconds = began.elapsed().as_secs_f64();
    let (most, now) = memory_mib();
    sampling.abort();
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!(
        "{} of {} rows in {seconds:.1} s; the set: {:.1} MiB; counted: at most {:.1} MiB, {:.1} MiB \
         after; the process: {before} MiB before, at most {most} MiB, {now} MiB after",
        answer.rows,
        answer.of,
        mib(filters.kept().1),
        mib(most_counted.load(Relaxed)),
        mib(budget.used_bytes()),
    );
}
