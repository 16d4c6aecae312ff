//! Rows of formats whose records just follow each other: TFRecord and JSONL.
//!
//! Reads the pieces that hold wanted rows, and makes a batch of those rows.

use crate::{
    example, jsonl,
    tabular::{BinaryRows, Detail, FileIndex, Format, Held, Need, Rows, text_rows},
    tfrecord,
};
use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use bytes::Bytes;
use forebay_core::{Error, Result};
use std::{ops::Range, sync::Arc};

#[derive(Debug)]
pub(crate) struct Read {
    index: Arc<FileIndex>,
    block: usize,
    rows: Rows,
    schema: SchemaRef,
    ranges: Vec<Range<u64>>,
    held: Held,
}

impl Read {
    pub fn new(index: Arc<FileIndex>, block: usize, rows: Rows, schema: SchemaRef) -> Result<Self> {
        let ranges = if schema.fields().is_empty() {
            Vec::new()
        } else {
            index.blocks().bytes_of_rows(block, rows.slice())
        };
        Ok(Self {
            index,
            block,
            rows,
            schema,
            ranges,
            held: Held::default(),
        })
    }

    pub fn step(&mut self) -> Result<Need> {
        let missing = self.held.missing(&self.ranges);
        Ok(if missing.is_empty() {
            Need::Done
        } else {
            Need::Ranges(missing)
        })
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.held.put(offset, bytes);
        Ok(())
    }

    pub fn finish(self) -> Result<RecordBatch> {
        let count = self.rows.count(self.index.blocks().block_rows(self.block));
        if self.schema.fields().is_empty() {
            let options = arrow_array::RecordBatchOptions::new().with_row_count(Some(count));
            return RecordBatch::try_new_with_options(self.schema, Vec::new(), &options)
                .map_err(crate::tabular::arrow_error);
        }
        if matches!(self.index.detail, Detail::TfRecord { example: true }) {
            let mut builder = example::Builder::new(self.schema.clone())?;
            self.each(|record, at| {
                builder
                    .push(record)
                    .map_err(|e| e.context(format!("the record at offset {at}")))
            })?;
            return builder.finish();
        }
        if self.index.format == Format::Jsonl {
            let mut builder = jsonl::Builder::new(self.schema.clone())?;
            let (blocks, mut n) = (self.index.blocks().row_range(self.block), 0);
            let row_of = |n| format!("row {} of the file", blocks.start + self.rows.nth(n));
            self.each(|line, _| {
                let pushed = builder.push(line).map_err(|e| e.context(row_of(n)));
                n += 1;
                pushed
            })?;
            return builder.finish(count).map_err(|(misfit, kind)| {
                Error::new(kind, misfit.why).context(row_of(misfit.row))
            });
        }
        let bytes = self.ranges.iter().map(|r| (r.end - r.start) as usize).sum();
        let mut column =
            BinaryRows::with_capacity(count, if self.rows == Rows::All { bytes } else { 0 });
        self.each(|record, _| column.push(record))?;
        text_rows(self.schema, column.finish())
    }

    /// Each wanted record, and where it is.
    fn each(&self, mut take: impl FnMut(&[u8], u64) -> Result<()>) -> Result<()> {
        let blocks = self.index.blocks();
        let wanted = self.rows.slice();
        for piece in blocks.pieces_of_rows(self.block, wanted) {
            let bytes = self
                .held
                .get(&piece.bytes)
                .ok_or_else(|| Error::internal("bytes of a piece were not fed"))?;
            let (mut row, mut at) = (piece.rows.start, 0usize);
            let mut next = wanted.map(|w| {
                w[w.partition_point(|&r| r < piece.rows.start)..]
                    .iter()
                    .copied()
            });
            let mut target = next.as_mut().map_or(Some(row), Iterator::next);
            while let Some(wanted_row) = target.filter(|&r| r < piece.rows.end) {
                let here = piece.bytes.start + at as u64;
                let is_wanted = wanted_row == row;
                let (record, len) = match self.index.format {
                    Format::Jsonl => jsonl::next(&bytes[at..]),
                    _ => tfrecord::next(&bytes[at..], here, is_wanted)?,
                };
                if len == 0 {
                    return Err(Error::version_changed(format!(
                        "the file no longer has the row at offset {here} that it had when it was \
                         indexed"
                    ))
                    .hint("open the dataset again"));
                }
                at += len;
                // Lines of whitespace are not rows.
                let Some(record) = record else { continue };
                if is_wanted {
                    take(record, here)?;
                    target = next.as_mut().map_or(Some(row + 1), Iterator::next);
                }
                row += 1;
            }
        }
        Ok(())
    }
}
