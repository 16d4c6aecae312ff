//! What files say of their columns, for who leaves out rows by it; and blocks as a whole, for who
//! looks at all of their rows.

use super::{
    Rows,
    blocks::{Keys, fetch_all},
    cache::Block,
    files::OpenFile,
    of_block,
};
use crate::Dataset;
use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use bytes::Bytes;
use forebay_core::{Error, Reservation, Result, limits};
use forebay_format::tabular::{Facts, Projection};
use std::{ops::Range, sync::Arc};

/// What one file says of some columns.
pub(crate) struct FileFacts {
    pub facts: Facts,
    file: Arc<OpenFile>,
    _memory: Reservation,
}

/// A decoded block, which stays in memory as long as this.
pub(crate) struct WholeBlock(Arc<Block>);

impl WholeBlock {
    /// Its rows, in the batches that they were decoded in.
    pub fn batches(&self) -> &[RecordBatch] {
        self.0.pieces.batches()
    }
}

/// What a footer says of a column chunk takes at least 40 bytes in it, and five times that here.
const FACTS_FACTOR: u64 = 6;
/// A page takes four bytes of a column index, or more, and forty times that here; there are at most
/// so many pages.
const PAGE_FACTOR: u64 = 40;
const PAGES_BYTES: u64 = 10 << 20;

impl Rows {
    /// What a file says of these columns; `None` for formats that say nothing.
    ///
    /// # Errors
    /// Those of reading it, and `Corrupt`: the rows can still be looked at.
    pub(crate) async fn facts(
        &self,
        dataset: &Arc<Dataset>,
        file: u32,
        columns: &SchemaRef,
    ) -> Result<Option<FileFacts>> {
        let names = columns.fields().iter().map(|f| f.name().clone()).collect();
        let keys = Keys::new(dataset, &Projection::Columns(names))?;
        let file = self.open_file(dataset, file, keys.options).await?;
        let Some(range) = file.reader.facts_at() else {
            return Ok(None);
        };
        let length = range.end - range.start;
        // The bytes, and what is made of them.
        let most = FACTS_FACTOR * length.max(1);
        let mut memory = self.inner.engine.budget().hold(most).await?;
        let bytes = self.bytes_of(&file, range).await?;
        let (of, columns) = (file.clone(), columns.clone());
        let read = tokio::task::spawn_blocking(move || of.reader.facts(&bytes, &columns));
        let facts = super::joined(read.await)??;
        memory.shrink((facts.memory_bytes() as u64).clamp(1, most));
        Ok(Some(FileFacts {
            facts,
            file,
            _memory: memory,
        }))
    }

    /// Bytes of the file that say more of a column chunk, and memory for them; `None` if they are
    /// too many, or the memory budget has no room for them at the moment.
    pub(crate) async fn more_facts(
        &self,
        of: &FileFacts,
        range: Range<u64>,
    ) -> Result<Option<(Bytes, Reservation)>> {
        let length = range.end.saturating_sub(range.start);
        if length == 0 || length > limits::FILTER_INDEX_MAX_BYTES {
            return Ok(None);
        }
        // What is read of them takes more than they have in the file.
        let bytes = 4 * length + (PAGE_FACTOR * length).min(PAGES_BYTES);
        let Ok(memory) = self.inner.engine.budget().try_hold(bytes) else {
            return Ok(None);
        };
        let end = range.end.min(of.file.meta.size);
        if range.start >= end {
            return Ok(None);
        }
        let bytes = self.bytes_of(&of.file, range.start..end).await?;
        Ok(Some((bytes, memory)))
    }

    async fn bytes_of(&self, file: &OpenFile, range: Range<u64>) -> Result<Bytes> {
        let fetched = fetch_all(&self.inner, &file.name, &file.meta, false, vec![range]);
        let only = fetched.await?.pop();
        only.map(|(_, bytes)| bytes)
            .ok_or_else(|| Error::internal("nothing was fetched"))
    }

    /// A block with these columns, decoded once for all who want it.
    ///
    /// # Errors
    /// `Busy` if the memory budget has no room for it at the moment, `TooLarge` if it never has: then
    /// its rows can be read a few at a time. And as [`Rows::read`].
    pub(crate) async fn whole_block(
        &self,
        dataset: &Arc<Dataset>,
        place: (u32, u32),
        columns: &Projection,
        row: u64,
    ) -> Result<WholeBlock> {
        let block = self.decoded_block(dataset, place, columns, row);
        self.on_account(dataset, block).await
    }

    async fn decoded_block(
        &self,
        dataset: &Arc<Dataset>,
        (file, block): (u32, u32),
        columns: &Projection,
        row: u64,
    ) -> Result<WholeBlock> {
        let keys = Keys {
            whole: true,
            ..Keys::new(dataset, columns)?
        };
        match self.block(dataset, file, block, &keys).await {
            Ok((block, _)) => Ok(WholeBlock(block)),
            Err(e) => Err(of_block(e, row, &dataset.file(file))),
        }
    }
}
