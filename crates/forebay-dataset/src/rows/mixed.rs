//! Rows of several answers in one, for streams that mix datasets.
//!
//! Invariant: the copy is reserved before it is made, and the answers give back what they hold when
//! it is done.

use super::{
    RowBatch, RowMemory, Rows, batch_bytes,
    gather::{Pick, any_has, is_view},
    joined,
};
use arrow_array::RecordBatch;
use arrow_select::interleave::interleave_record_batch;
use forebay_core::{Error, Result};

/// Up to this much is copied on the runtime's threads, and without memory of its own for the moment
/// that it takes.
const COPIED_HERE_BYTES: u64 = 64 << 10;

impl Rows {
    /// One answer whose rows are these: of which part, and which of its rows.
    ///
    /// # Errors
    /// `Invalid` if the parts' columns differ; `Busy` if no memory becomes free for the copy.
    pub(crate) async fn interleave(
        &self,
        mut parts: Vec<RowBatch>,
        picks: Vec<Pick>,
    ) -> Result<RowBatch> {
        let bytes: u64 = parts.iter().map(|part| batch_bytes(&part.batch)).sum();
        if bytes < COPIED_HERE_BYTES {
            let batch = copied(&parts, &picks)?;
            return Ok(RowBatch {
                batch,
                memory: merged(parts),
            });
        }
        // Everything is reserved again, for the parts and their copy together: steps that wait for
        // more while they hold some would wait for each other.
        let most = self.inner.answers.holdable_bytes();
        let both = bytes.saturating_mul(2).min(most);
        parts.iter_mut().for_each(|part| part.memory.held.clear());
        let held = vec![
            self.inner.answers.hold(both).await?,
            self.inner.engine.budget().hold(both).await?,
        ];
        joined(
            tokio::task::spawn_blocking(move || {
                let batch = copied(&parts, &picks)?;
                let mut memory = RowMemory::from(held);
                // Views point to the parts' bytes.
                if any_has(batch.schema_ref(), &is_view) {
                    let parts = merged(parts);
                    (memory.blocks, memory.decoded) = (parts.blocks, parts.decoded);
                } else {
                    drop(parts);
                    let bytes = batch_bytes(&batch).min(both);
                    memory.held.iter_mut().for_each(|held| held.shrink(bytes));
                }
                Ok(RowBatch { batch, memory })
            })
            .await,
        )?
    }
}

fn copied(parts: &[RowBatch], picks: &[Pick]) -> Result<RecordBatch> {
    let batches: Vec<&RecordBatch> = parts.iter().map(|part| &part.batch).collect();
    interleave_record_batch(&batches, picks).map_err(|e| {
        Error::invalid("rows of these datasets do not fit into one batch")
            .caused_by(e)
            .hint("read only the columns that they share")
    })
}

/// What all parts hold.
fn merged(parts: Vec<RowBatch>) -> RowMemory {
    let mut all = RowMemory::default();
    for RowBatch { memory, .. } in parts {
        all.held.extend(memory.held);
        all.blocks.extend(memory.blocks);
        all.decoded.extend(memory.decoded);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RowsConfig;
    use arrow_array::{Array, ArrayRef, BinaryArray, cast::AsArray};
    use forebay_engine::Freshness;
    use forebay_testing::engine::Bench;
    use futures::poll;
    use std::{pin::pin, sync::Arc};

    /// A part of 100 rows of a kilobyte each, of this byte.
    fn part(rows: &Rows, byte: u8) -> RowBatch {
        let values: ArrayRef = Arc::new(BinaryArray::from(vec![&[byte; 1000][..]; 100]));
        let batch = RecordBatch::try_from_iter([("bytes", values)]).unwrap();
        let held = rows.inner.answers.try_hold(batch_bytes(&batch)).unwrap();
        RowBatch {
            batch,
            memory: RowMemory::from(vec![held]),
        }
    }

    #[tokio::test]
    async fn the_copy_of_a_mix_is_reserved_before_it_is_made() {
        let b = Bench::new(Freshness::Immutable);
        let rows = Rows::new(b.engine.clone(), RowsConfig::default());
        let answers = &rows.inner.answers;
        let parts = vec![part(&rows, 1), part(&rows, 2)];
        let bytes: u64 = parts.iter().map(|p| batch_bytes(&p.batch)).sum();
        let picks = (0..200).map(|i| (i % 2, i / 2)).collect();
        // As much is free as the parts take, and no more.
        let free = answers.holdable_bytes() - answers.used_bytes();
        let others = answers.try_hold(free).unwrap();
        let mut mixed = pin!(rows.interleave(parts, picks));
        assert!(poll!(&mut mixed).is_pending(), "the copy has no memory yet");
        drop(others);
        let read = mixed.await.unwrap();
        let values = read.batch.column(0).as_binary::<i32>();
        assert_eq!(values.len(), 200);
        assert!((0..200).all(|i| values.value(i)[0] == 1 + (i % 2) as u8));
        let held = answers.used_bytes();
        assert!((bytes / 2..2 * bytes).contains(&held), "{held} for {bytes}");
        drop(read);
        assert_eq!(answers.used_bytes(), 0);
    }
}
