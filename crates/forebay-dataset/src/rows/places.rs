//! Where the bytes lie that reading rows will need, for whoever fetches them ahead.

use super::{
    Rows,
    blocks::{Keys, merged},
    joined,
};
use crate::Dataset;
use forebay_core::Result;
use forebay_format::tabular::{Format, Need, Projection, Rows as BlockRows};
use std::{ops::Range, sync::Arc};

impl Rows {
    /// The bytes of a file, not of whole objects, that hold these columns of rows of one block: the
    /// sorted `rows`, or, in formats that keep columns apart, all. Opens the file, which may read
    /// its footer. Nothing for what is compressed as a whole: its bytes are other ones than those of
    /// the file.
    ///
    /// # Errors
    /// As [`Rows::read`].
    pub(crate) async fn places(
        &self,
        dataset: &Arc<Dataset>,
        file: u32,
        block: u32,
        rows: Arc<[u32]>,
        columns: &Projection,
    ) -> Result<Vec<Range<u64>>> {
        let keys = Keys::new(dataset, columns)?;
        let open = self.open_file(dataset, file, keys.options).await?;
        if open.unpacked {
            return Ok(Vec::new());
        }
        let rows = match dataset.format() {
            Format::Parquet => BlockRows::All,
            _ => BlockRows::sorted(rows)?,
        };
        // Only what is asked for first: reading small parts of it may turn out to need more.
        let first = tokio::task::spawn_blocking(move || {
            let read = open.reader.read_for(block as usize, rows, &keys.schema);
            read.and_then(|mut read| read.step())
        });
        Ok(match joined(first.await)?? {
            Need::Ranges(ranges) => merged(ranges),
            Need::Memory(_) | Need::Done => Vec::new(),
        })
    }
}
