//! Rows of a block, in the batches that they were decoded in: joining those would take their memory
//! twice, and text of more than 2 GiB does not fit into one batch.

use super::gather::{Pick, bytes_of_rows, copy};
use arrow_array::{Array, RecordBatch, UInt32Array};
use arrow_data::ArrayData;
use arrow_schema::SchemaRef;
use arrow_select::take::take_record_batch;
use forebay_core::{Error, Result};
use std::{collections::HashMap, sync::Arc};

/// At least one batch, all with one schema. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Pieces {
    batches: Arc<[RecordBatch]>,
    /// What rows of them are given out as: the batches may hold text and bytes as views.
    schema: SchemaRef,
    /// The row after each batch.
    ends: Arc<[usize]>,
}

impl From<RecordBatch> for Pieces {
    fn from(batch: RecordBatch) -> Self {
        Self {
            schema: batch.schema(),
            ends: [batch.num_rows()].into(),
            batches: [batch].into(),
        }
    }
}

impl Pieces {
    /// # Errors
    /// `Internal` without a batch.
    pub fn new(batches: Vec<RecordBatch>, schema: SchemaRef) -> Result<Self> {
        if batches.is_empty() {
            return Err(Error::internal("rows of a block in no batch at all"));
        }
        let mut end = 0;
        let ends = batches.iter().map(|batch| {
            end += batch.num_rows();
            end
        });
        Ok(Self {
            ends: ends.collect(),
            batches: batches.into(),
            schema,
        })
    }

    pub fn batches(&self) -> &[RecordBatch] {
        &self.batches
    }

    /// Fields of a row, nested ones included.
    pub fn fields(&self) -> usize {
        self.schema.flattened_fields().len()
    }

    pub fn rows(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Where a row is: its batch, and its row there. A row past the end is placed past the end of
    /// the last batch.
    pub fn place(&self, row: usize) -> Pick {
        let piece = self.ends.partition_point(|&end| end <= row);
        let piece = piece.min(self.batches.len() - 1);
        let first = piece.checked_sub(1).map_or(0, |before| self.ends[before]);
        (piece, row - first)
    }

    /// A copy of some rows.
    pub fn take(&self, rows: &[u32]) -> Result<RecordBatch> {
        if let [only] = &*self.batches
            && only.schema_ref() == &self.schema
        {
            return take_record_batch(only, &UInt32Array::from(rows.to_vec()))
                .map_err(|e| Error::internal("rows cannot be taken from a block").caused_by(e));
        }
        let picks: Vec<Pick> = rows.iter().map(|&row| self.place(row as usize)).collect();
        let batches: Vec<&RecordBatch> = self.batches.iter().collect();
        copy(&self.schema, &batches, &picks)
    }

    /// Bytes of rows, ascending, each this many times.
    pub fn bytes_of(&self, rows: impl Iterator<Item = (u32, u32)>) -> u64 {
        let of_batch = |batch: &RecordBatch, rows: &[(u32, u32)]| {
            let columns = batch.columns().iter().map(|c| bytes_of_rows(c, rows));
            columns.fold(0, u64::saturating_add)
        };
        if let [only] = &*self.batches {
            return of_batch(only, &rows.collect::<Vec<_>>());
        }
        let mut by_piece: Vec<Vec<(u32, u32)>> = vec![Vec::new(); self.batches.len()];
        for (row, times) in rows {
            let (piece, row) = self.place(row as usize);
            by_piece[piece].push((row as u32, times));
        }
        let pieces = self.batches.iter().zip(&by_piece);
        pieces
            .map(|(batch, rows)| of_batch(batch, rows))
            .fold(0, u64::saturating_add)
    }

    /// Memory that they hold; memory shared by batches counts once.
    pub fn memory_bytes(&self) -> u64 {
        fn add(data: &ArrayData, buffers: &mut HashMap<*const u8, usize>) {
            let nulls = data.nulls().map(|nulls| nulls.buffer());
            for buffer in data.buffers().iter().chain(nulls) {
                let bytes = buffers.entry(buffer.data_ptr().as_ptr().cast_const());
                let bytes = bytes.or_default();
                *bytes = (*bytes).max(buffer.capacity());
            }
            data.child_data()
                .iter()
                .for_each(|child| add(child, buffers));
        }
        let mut buffers = HashMap::new();
        let mut arrays = 0;
        for column in self.batches.iter().flat_map(RecordBatch::columns) {
            arrays += size_of::<ArrayData>();
            add(&column.to_data(), &mut buffers);
        }
        (buffers.values().sum::<usize>() + arrays) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{ArrayRef, Int64Array, cast::AsArray, types::Int64Type};

    fn batch(rows: std::ops::Range<i64>) -> RecordBatch {
        let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(rows));
        RecordBatch::try_from_iter([("n", numbers)]).unwrap()
    }

    #[test]
    fn rows_are_found_in_their_pieces() {
        let pieces = Pieces::new(
            vec![batch(0..3), batch(3..3), batch(3..4), batch(4..9)],
            batch(0..0).schema(),
        )
        .unwrap();
        let places: Vec<Pick> = [0, 2, 3, 4, 8].map(|row| pieces.place(row)).to_vec();
        assert_eq!(places, [(0, 0), (0, 2), (2, 0), (3, 0), (3, 4)]);
        let taken = pieces.take(&[1, 3, 7]).unwrap();
        let taken = taken
            .column(0)
            .as_primitive::<Int64Type>()
            .values()
            .to_vec();
        assert_eq!(taken, [1, 3, 7]);
        assert_eq!(pieces.bytes_of([(1, 1), (7, 3)].into_iter()), 4 * 8);
        assert!(Pieces::new(Vec::new(), batch(0..0).schema()).is_err());
    }

    #[test]
    fn what_batches_share_counts_once() {
        let whole = batch(0..1000);
        let shared = Pieces::new(
            vec![whole.slice(0, 500), whole.slice(0, 300)],
            whole.schema(),
        )
        .unwrap();
        let bytes = shared.memory_bytes();
        assert!((8000..10_000).contains(&bytes), "{bytes}");
    }
}
