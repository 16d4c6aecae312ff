//! Blocks that are held ahead of their use.

use super::{Rows, blocks::Keys, cache::Block};
use crate::Dataset;
use forebay_core::{CacheStatus, Result};
use forebay_format::tabular::{Format, Projection};
use futures::{StreamExt, stream::FuturesUnordered};
use std::sync::Arc;

/// A block that is ready: decoded in memory, or, for whole objects, on the local disk. While a hold
/// on a decoded block exists, reads of its rows decode nothing.
#[derive(Debug)]
pub struct Hold {
    block: Option<Arc<Block>>,
    bytes: u64,
    fetched: bool,
}

impl Hold {
    /// Memory that is held; 0 for what is on the disk.
    pub fn memory_bytes(&self) -> u64 {
        self.block.as_ref().map_or(0, |b| b.bytes)
    }

    /// Bytes of the rows, decoded or on the disk.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether any of it had to be fetched or decoded for this.
    pub fn was_cold(&self) -> bool {
        self.fetched
    }
}

impl Rows {
    /// Makes a block of the dataset ready (`block` counts over the whole dataset, as in plans).
    ///
    /// # Errors
    /// `Busy` if there is no memory to hold it: its rows can still be read. Otherwise as
    /// [`Rows::read`].
    pub async fn hold(
        &self,
        dataset: &Arc<Dataset>,
        block: u64,
        columns: &Projection,
    ) -> Result<Hold> {
        let rows = dataset.shape().block_range(block);
        if rows.is_empty() {
            return Ok(Hold {
                block: None,
                bytes: 0,
                fetched: false,
            });
        }
        if dataset.format() == Format::Objects {
            let (inner, files) = (&self.inner, dataset.files());
            let sizes = rows.clone().map(|row| files.size(row as usize));
            let bytes = sizes.fold(0u64, u64::saturating_add);
            if columns
                .schema(dataset.schema())?
                .column_with_name("data")
                .is_none()
            {
                return Ok(Hold {
                    block: None,
                    bytes: 0,
                    fetched: false,
                });
            }
            let (mut rows, mut pending, mut fetched) = (rows, FuturesUnordered::new(), false);
            loop {
                while pending.len() < inner.config.objects_ahead.max(1)
                    && let Some(row) = rows.next()
                {
                    pending.push(self.bring_object(dataset, row));
                }
                match pending.next().await {
                    Some(status) => fetched |= status? == CacheStatus::Miss,
                    None => break,
                }
            }
            return Ok(Hold {
                block: None,
                bytes,
                fetched,
            });
        }
        let place = dataset.locate(rows.start)?;
        let keys = Keys::new(dataset, columns)?;
        let (held, fetched) = self
            .block(dataset, place.file, place.block, &keys)
            .await
            .map_err(|e| super::of_block(e, rows.start, &dataset.file(place.file)))?;
        Ok(Hold {
            bytes: held.bytes,
            block: Some(held),
            fetched,
        })
    }

    async fn bring_object(&self, dataset: &Arc<Dataset>, row: u64) -> Result<CacheStatus> {
        let engine = &self.inner.engine;
        let file = dataset.file(row as u32);
        let (meta, whole) = (Arc::new(file.meta()), 0..file.size);
        if !engine.keeps(&file.name, 0) || engine.may_have_version(&file.name, &meta, &whole) {
            return Ok(CacheStatus::Hit);
        }
        let brought = engine.bring_version(&file.name, &meta, whole).await;
        brought.map_err(|e| super::of_file(e, row, &file))
    }
}
