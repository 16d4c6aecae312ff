//! Reads rows for a computation over all of them.

use super::apart;
use crate::{Dataset, Format, Rows, blocking::blocking};
use arrow_array::RecordBatch;
use forebay_core::{ErrorKind, Result, limits};
use forebay_format::tabular::Projection;
use futures::{FutureExt, StreamExt, stream::BoxStream};
use std::{ops::Range, sync::Arc};

/// Rows that are requested at a time take this part of the holdable memory, at most, in their files.
const REQUEST_SHARE: u64 = 16;
/// Blocks of more rows are looked at in parts.
const WHOLE_ROWS_MAX: u64 = 16 << 20;
/// Rows of such a part.
const PART_ROWS: u64 = 1 << 20;

/// Rows that follow each other, and the file and the block in it that they are all rows of.
pub(crate) type Stretch = (Range<u64>, Option<(u32, u32)>);

/// A block, in stretches that are looked at one by one.
pub(crate) fn stretches(
    rows: Range<u64>,
    whole: Option<(u32, u32)>,
) -> impl Iterator<Item = Stretch> {
    let as_one = whole.is_some() && rows.end - rows.start <= WHOLE_ROWS_MAX;
    let each = match as_one {
        true => (rows.end - rows.start).max(1),
        false => PART_ROWS,
    };
    let whole = whole.filter(|_| as_one);
    (rows.start..rows.end)
        .step_by(each as usize)
        .map(move |from| (from..rows.end.min(from + each), whole))
}

/// All rows of a dataset, in order.
pub(crate) fn all_stretches(
    dataset: &Arc<Dataset>,
) -> impl Iterator<Item = Stretch> + Send + 'static {
    let of = dataset.clone();
    let objects = dataset.format() == Format::Objects;
    let mut file = 0;
    (0..dataset.shape().blocks()).flat_map(move |block| {
        let rows = of.shape().block_range(block);
        if objects {
            return stretches(rows, None);
        }
        while block >= of.file_blocks(file).end {
            file += 1;
        }
        let in_file = block - of.file_blocks(file).start;
        stretches(rows, Some((file as u32, in_file as u32)))
    })
}

/// What is made of a batch of rows that follow each other: the first of them, and the batch.
pub(crate) type Make<T> = Arc<dyn Fn(u64, &RecordBatch) -> Result<T> + Send + Sync>;

/// Reads some rows and makes something of each batch of them, each once, one after the other.
pub(crate) async fn look<T: Send + 'static>(
    reader: &Rows,
    dataset: &Arc<Dataset>,
    columns: &Projection,
    (rows, whole): Stretch,
    make: Make<T>,
) -> Result<Vec<T>> {
    if let Some(place) = whole {
        match reader
            .whole_block(dataset, place, columns, rows.start)
            .await
        {
            Ok(block) => {
                let mut at = rows.start;
                let each = move |batch: &RecordBatch| {
                    let first = at;
                    at += batch.num_rows() as u64;
                    make(first, batch)
                };
                return blocking(move || block.batches().iter().map(each).collect()).await?;
            }
            // It can still be read a few rows at a time; and damage is told of the row that has it.
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::Busy | ErrorKind::TooLarge | ErrorKind::Corrupt
                ) => {}
            Err(e) => return Err(e),
        }
    }
    let (mut found, mut at) = (Vec::new(), rows.start);
    // An answer is held beside what it is decoded from.
    let share = reader.engine().budget().holdable_bytes() / REQUEST_SHARE;
    let fit = share / dataset.row_bytes().max(1);
    let mut most = fit.clamp(1, limits::FILTER_REQUEST_ROWS as u64);
    while at < rows.end {
        let until = rows.end.min(at + most);
        let numbers: Vec<u64> = (at..until).collect();
        let read = match reader.read(dataset, &numbers, columns).await {
            Ok(read) => read,
            // They are larger than the others.
            Err(e) if e.kind() == ErrorKind::TooLarge && until - at > 1 => {
                most = (until - at) / 2;
                continue;
            }
            Err(e) => return Err(e),
        };
        let make = make.clone();
        let made = blocking(move || {
            // The memory goes with the batch.
            let (batch, _memory): (RecordBatch, _) = (read.batch, read.memory);
            make(at, &batch)
        });
        found.push(made.await??);
        at = until;
    }
    Ok(found)
}

/// What is made of all rows, in their order; several stretches are looked at at a time.
pub(crate) fn look_at_all<T: Send + 'static>(
    reader: &Rows,
    dataset: &Arc<Dataset>,
    columns: Projection,
    make: Make<T>,
) -> BoxStream<'static, Result<Vec<T>>> {
    let (reader, columns) = (reader.clone(), Arc::new(columns));
    let (of, stretches) = (dataset.clone(), all_stretches(dataset));
    futures::stream::iter(stretches)
        .map(move |stretch| {
            let (reader, dataset) = (reader.clone(), of.clone());
            let (columns, make) = (columns.clone(), make.clone());
            async move {
                let looking = async move { look(&reader, &dataset, &columns, stretch, make).await };
                apart(looking).await?
            }
            .boxed()
        })
        .buffered(limits::FILTER_BLOCKS_AT_ONCE)
        .boxed()
}
