//! What it costs to index a Parquet file by its footer, compared with building the whole footer.
//! `cargo run --release -p forebay-format --example footers`.

use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use bytes::Bytes;
use forebay_format::tabular::{FileIndexer, Format, IndexOptions, Need};
use parquet::{
    arrow::{ArrowWriter, parquet_to_arrow_schema},
    file::{metadata::ParquetMetaDataReader, properties::WriterProperties},
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

fn main() {
    for (groups, columns) in [(1, 4), (40, 2), (40, 20), (400, 4)] {
        let strings = Arc::new(StringArray::from_iter_values(
            (0..groups).map(|i| format!("row {i}")),
        )) as ArrayRef;
        let numbers = Arc::new(Int64Array::from_iter_values(0..groups as i64)) as ArrayRef;
        let fields = (0..columns).map(|c| {
            (
                format!("column_{c}"),
                if c % 2 == 0 {
                    strings.clone()
                } else {
                    numbers.clone()
                },
            )
        });
        let batch = RecordBatch::try_from_iter(fields).expect("columns are of one length");
        let properties = WriterProperties::builder()
            .set_max_row_group_row_count(Some(1))
            .build();
        let mut w =
            ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).expect("a writer");
        w.write(&batch).expect("a batch is written");
        let file = Bytes::from(w.into_inner().expect("a file"));
        let options = IndexOptions::default();
        let (mut asked, mut held) = (0, 0);
        let ours = quickest(|| {
            asked = 0;
            let mut indexer = FileIndexer::new(Format::Parquet, file.len() as u64, &options)
                .expect("Parquet is indexed");
            while let Need::Ranges(ranges) = indexer.step().expect("a good file") {
                for r in ranges {
                    asked += r.end - r.start;
                    indexer
                        .feed(r.start, file.slice(r.start as usize..r.end as usize))
                        .expect("a good file");
                }
            }
            held = indexer.finish().expect("a good file").memory_bytes();
        });
        let footer = u32::from_le_bytes(
            file[file.len() - 8..file.len() - 4]
                .try_into()
                .expect("four bytes"),
        ) as usize;
        let footer = file.slice(file.len() - 8 - footer..file.len() - 8);
        let whole = quickest(|| {
            let metadata = ParquetMetaDataReader::decode_metadata(&footer).expect("a good footer");
            let file = metadata.file_metadata();
            parquet_to_arrow_schema(file.schema_descr(), file.key_value_metadata())
                .expect("a good schema");
        });
        println!(
            "{groups:4} row groups of {columns:2} columns, a footer of {:6} bytes: {ours:?} to \
             index ({asked} bytes read, {held} kept); built whole: {whole:?}",
            footer.len(),
        );
    }
}

/// The fastest of many runs, because anything else the machine does only makes it slower.
fn quickest(mut run: impl FnMut()) -> Duration {
    let mut best = Duration::MAX;
    for _ in 0..500 {
        let began = Instant::now();
        run();
        best = best.min(began.elapsed());
    }
    best
}
