//! Some rows and columns of one row group.
//!
//! First, where few rows are wanted, the page indexes of the wanted columns that are not known yet;
//! then what the decoder asks for: pages, or whole column chunks. Where half of the rows are wanted
//! or more, all are decoded and the wanted ones taken. Rows are decoded in batches of bounded size
//! and put together at the end, so that a row group that unpacks to more than it said is given up
//! on in time.
//!
//! Invariant: a decoder that is told to select rows sees page indexes that do not change while it
//! lives. All that it looks at were read before it was made; whether a row group's are used at all
//! is decided by the row group alone, never by one read.

use super::{guarded, open::Pages, pages::Checker, parquet_error};
use crate::tabular::{FileIndex, Held, Need, Projection, Rows, arrow_error, take_rows};
use ::parquet::{
    DecodeResult,
    arrow::{
        ProjectionMask,
        arrow_reader::{ArrowReaderMetadata, RowSelection},
        push_decoder::{ParquetPushDecoder, ParquetPushDecoderBuilder},
    },
};
use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions};
use arrow_schema::SchemaRef;
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result, limits};
use std::{ops::Range, sync::Arc};

/// Row groups that are smaller are read by column chunk: finding the pages would take longer.
const PAGES_FROM_BYTES: u64 = 128 << 10;
/// Rows that are decoded at a time.
const BATCH_ROWS: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Read {
    arrow: ArrowReaderMetadata,
    pages: Arc<Pages>,
    row_group: usize,
    group_rows: u32,
    rows: Rows,
    /// Whether the decoder selects them; otherwise they are taken from all.
    select: bool,
    mask: ProjectionMask,
    /// Wanted columns of the schema, in the order of the projection.
    columns: Vec<usize>,
    schema: SchemaRef,
    /// Where the wanted chunks are, and of which columns.
    chunks: Vec<(Range<u64>, usize)>,
    /// Page indexes that are needed: column, place.
    indexes: Vec<(usize, Range<u64>)>,
    held: Held,
    checker: Checker,
    decoder: Option<ParquetPushDecoder>,
    decoded: Vec<RecordBatch>,
    decoded_bytes: u64,
    done: bool,
}

impl Read {
    pub(super) fn new(
        arrow: &ArrowReaderMetadata,
        pages: &Arc<Pages>,
        index: &FileIndex,
        row_group: usize,
        rows: Rows,
        projection: &Projection,
    ) -> Result<Self> {
        let columns = projection.indices(index.schema())?;
        let group_rows = index.blocks().block_rows(row_group);
        let schema = projection.schema(index.schema())?;
        let descr = arrow.metadata().file_metadata().schema_descr();
        let mask = match projection {
            Projection::All => ProjectionMask::all(),
            Projection::Columns(_) => ProjectionMask::roots(descr, columns.iter().copied()),
        };
        let wanted = rows.count(group_rows);
        let done = wanted == 0 || columns.is_empty();
        let group = arrow.metadata().row_group(row_group);
        let leaves = || (0..group.num_columns()).filter(|&i| mask.leaf_included(i));
        let place = |i: usize| {
            // The footer was checked: no offset is below zero.
            let (start, len) = group.column(i).byte_range();
            start..start + len
        };
        let chunks: Vec<_> = leaves().map(|i| (place(i), i)).collect();
        let mut indexes = Vec::new();
        let select = wanted < group_rows.div_ceil(2) as usize;
        let bytes = index.blocks().bytes(row_group);
        if !done && select && bytes.end - bytes.start >= PAGES_FROM_BYTES {
            for i in leaves() {
                if let Some(range) = pages.wanted(row_group, i, group.column(i))? {
                    if range.end > index.size() {
                        return Err(Error::corrupt(format!(
                            "the Parquet page index at offset {} is past the end of the file",
                            range.start
                        )));
                    }
                    indexes.push((i, range));
                }
            }
        }
        Ok(Self {
            arrow: arrow.clone(),
            pages: pages.clone(),
            row_group,
            group_rows,
            rows,
            select,
            mask,
            columns,
            schema,
            chunks,
            indexes,
            held: Held::default(),
            checker: Checker::new(select),
            decoder: None,
            decoded: Vec::new(),
            decoded_bytes: 0,
            done,
        })
    }

    pub fn step(&mut self) -> Result<Need> {
        if self.done {
            return Ok(Need::Done);
        }
        if !self.indexes.is_empty() {
            let ranges: Vec<_> = self.indexes.iter().map(|(_, r)| r.clone()).collect();
            let missing = self.held.missing(&ranges);
            if !missing.is_empty() {
                return Ok(Need::Ranges(join(missing)));
            }
            for (column, range) in std::mem::take(&mut self.indexes) {
                if let Some(bytes) = self.held.get(&range) {
                    let chunk = self
                        .arrow
                        .metadata()
                        .row_group(self.row_group)
                        .column(column);
                    self.pages.set(
                        self.row_group,
                        column,
                        chunk,
                        self.group_rows,
                        range.start,
                        &bytes,
                    )?;
                }
            }
            self.held.clear();
        }
        let mut decoder = match self.decoder.take() {
            Some(decoder) => decoder,
            None => self.decoder()?,
        };
        loop {
            match guarded(&self.what(), || decoder.try_decode().map_err(parquet_error))
                .map_err(|e| e.context(self.what()))?
            {
                DecodeResult::NeedsData(ranges) => {
                    let missing = self.held.missing(&ranges);
                    if !missing.is_empty() {
                        self.decoder = Some(decoder);
                        return Ok(Need::Ranges(join(missing)));
                    }
                    let mut buffers = Vec::with_capacity(ranges.len());
                    for range in &ranges {
                        let bytes = self
                            .held
                            .get(range)
                            .ok_or_else(|| Error::internal("bytes that were there are gone"))?;
                        let group = self.arrow.metadata().row_group(self.row_group);
                        let column = self
                            .chunks
                            .iter()
                            .find(|(chunk, _)| chunk.contains(&range.start));
                        let column = column
                            .ok_or_else(|| {
                                Error::internal("bytes outside all columns are asked for")
                            })?
                            .1;
                        self.checker
                            .pages(range.start, &bytes, group.column(column))?;
                        buffers.push(bytes);
                    }
                    self.held.clear();
                    decoder
                        .push_ranges(ranges, buffers)
                        .map_err(parquet_error)?;
                }
                DecodeResult::Data(batch) => {
                    self.decoded_bytes += batch
                        .columns()
                        .iter()
                        .map(|c| c.get_buffer_memory_size() as u64)
                        .sum::<u64>();
                    if self.decoded_bytes > limits::BLOCK_DECODED_MAX_BYTES {
                        let max = limits::BLOCK_DECODED_MAX_BYTES;
                        return Err(Error::new(
                            ErrorKind::TooLarge,
                            format!("{} holds more than {max} bytes", self.what()),
                        )
                        .hint("ask for fewer rows or columns"));
                    }
                    self.decoded.push(batch);
                }
                DecodeResult::Finished => {
                    self.done = true;
                    return Ok(Need::Done);
                }
            }
        }
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.held.put(offset, bytes);
        Ok(())
    }

    pub fn finish(self) -> Result<RecordBatch> {
        let what = self.what();
        let wanted = self.rows.count(self.group_rows);
        let options = RecordBatchOptions::new().with_row_count(Some(wanted));
        if wanted == 0 {
            return Ok(RecordBatch::new_empty(self.schema));
        }
        let found: usize = self.decoded.iter().map(RecordBatch::num_rows).sum();
        let decoded = if self.select {
            wanted
        } else {
            self.group_rows as usize
        };
        if !self.columns.is_empty() && found != decoded {
            return Err(Error::corrupt(format!(
                "{what} gave {found} rows of {decoded}"
            )));
        }
        // The decoder gives columns in the order of the file.
        let mut sorted = self.columns.clone();
        sorted.sort_unstable();
        let columns = self.columns.iter().map(|c| {
            let at = sorted
                .binary_search(c)
                .map_err(|_| Error::internal("a column that was asked for is gone"))?;
            let parts: Vec<&dyn Array> =
                self.decoded.iter().map(|b| b.column(at).as_ref()).collect();
            match parts.as_slice() {
                [_] => Ok(self.decoded[0].column(at).clone()),
                parts => arrow_select::concat::concat(parts).map_err(arrow_error),
            }
        });
        let columns: Vec<ArrayRef> = columns.collect::<Result<_>>()?;
        if columns.is_empty() {
            return RecordBatch::try_new_with_options(self.schema, columns, &options)
                .map_err(arrow_error);
        }
        let batch =
            RecordBatch::try_new(self.schema, columns).map_err(|e| arrow_error(e).context(what))?;
        if self.select {
            Ok(batch)
        } else {
            take_rows(&batch, &self.rows)
        }
    }

    fn what(&self) -> String {
        format!("row group {} of the Parquet file", self.row_group)
    }

    fn decoder(&self) -> Result<ParquetPushDecoder> {
        let wanted = if self.select {
            self.rows.count(self.group_rows)
        } else {
            self.group_rows as usize
        };
        let mut builder = ParquetPushDecoderBuilder::new_with_metadata(self.arrow.clone())
            .with_row_groups(vec![self.row_group])
            .with_projection(self.mask.clone())
            .with_batch_size(wanted.min(BATCH_ROWS));
        if let (true, Rows::Sorted(rows)) = (self.select, &self.rows) {
            builder = builder.with_row_selection(RowSelection::from_consecutive_ranges(
                runs(rows).into_iter(),
                self.group_rows as usize,
            ));
        }
        guarded(&self.what(), || builder.build().map_err(parquet_error))
    }
}

/// Ascending rows as ranges.
fn runs(rows: &[u32]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for &row in rows {
        let row = row as usize;
        match runs.last_mut() {
            Some(run) if run.end == row => run.end += 1,
            _ => runs.push(row..row + 1),
        }
    }
    runs
}

/// Ranges that touch, as one: a buffer may have more than one of them.
fn join(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|r| r.start);
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for r in ranges {
        match joined.last_mut() {
            Some(last) if r.start <= last.end => last.end = last.end.max(r.end),
            _ => joined.push(r),
        }
    }
    joined
}
