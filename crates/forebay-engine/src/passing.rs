//! Bytes of other nodes that are not kept here, on their way to one reader.
//!
//! The store does not take them, so they wait in memory. A reader asks for a run at a time, as
//! far as it reads and as far as other nodes have it, with one question to each, and for the next
//! one when half of it is read. The memory for a run is held before it is asked for. If there is
//! none to spare, the reader goes on chunk by chunk. So a slow reader keeps no other node waiting,
//! and takes nothing that others need.
//!
//! Invariant: what waits for other nodes has its share of the memory (`peers.rs`), here until it is
//! read; passing runs leave half of the shares to others.

use crate::{
    Engine,
    bytesio::{Cutter, reserved},
    chunks_of_half,
    fill::chunk_range,
    sequential::Sequential,
    stats::add,
};
use bytes::Bytes;
use forebay_core::{Error, ObjectMeta, ObjectName, Result, limits::CHUNK_BYTES, request};
use futures::StreamExt;
use std::{ops::Range, sync::Arc};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

/// A run on its way.
pub(crate) struct Passing {
    pub range: Range<u64>,
    pieces: mpsc::UnboundedReceiver<Result<Bytes>>,
    _share: Arc<OwnedSemaphorePermit>,
}

impl Passing {
    /// The next bytes.
    ///
    /// # Errors
    /// What broke it off.
    pub(crate) async fn next(&mut self) -> Result<Bytes> {
        let piece = self.pieces.recv().await.unwrap_or_else(|| {
            Err(Error::origin_unavailable(
                "the bytes of another node ended early",
            ))
        })?;
        self.range.start += piece.len() as u64;
        Ok(piece)
    }
}

/// What a pass over an archive reads where it passes.
#[derive(Default)]
pub(crate) struct PassingScan {
    reader: Option<Sequential>,
    /// What was read and not asked for yet.
    rest: Bytes,
}

impl PassingScan {
    /// The bytes of `range`, if they pass, or come soon after the last ones that did.
    ///
    /// # Errors
    /// As a read of them.
    pub(crate) async fn next(
        &mut self,
        engine: &Engine,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
    ) -> Result<Option<Bytes>> {
        let at = |reader: &Sequential| reader.left.start - self.rest.len() as u64;
        let follows = |r: &Sequential| at(r) <= range.start && range.start - at(r) <= CHUNK_BYTES;
        let reader = match self.reader.take().filter(follows) {
            Some(reader) => reader,
            None => {
                self.rest = Bytes::new();
                let index = (range.start / CHUNK_BYTES) as u32;
                if engine.has_or_fetches(name, meta, index) || !engine.passes(name, meta, index) {
                    return Ok(None);
                }
                let left = range.start..meta.size;
                Sequential::new(engine.clone(), name.clone(), meta.clone(), left)
            }
        };
        let reader = self.reader.insert(reader);
        let mut out = Vec::with_capacity((range.end - range.start) as usize);
        loop {
            let at = reader.left.start - self.rest.len() as u64;
            if at == range.end {
                break;
            }
            if self.rest.is_empty() {
                let next = reader.next().await?;
                let (piece, _) = next.ok_or_else(|| {
                    Error::corrupt(format!("{name} ends before byte {}", range.end)).naming()
                })?;
                self.rest = piece;
                continue;
            }
            // What lies between is skipped.
            let until = if at < range.start {
                range.start
            } else {
                range.end
            };
            let n = self.rest.len().min((until - at) as usize);
            let piece = self.rest.split_to(n);
            if at >= range.start {
                out.extend_from_slice(&piece);
            }
        }
        Ok(Some(out.into()))
    }
}

impl Engine {
    /// Asks for the first bytes of `left` if they pass, and not for more than one run. `None` if the
    /// store takes them, or if all memory is in use.
    pub(crate) fn pass(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        left: Range<u64>,
    ) -> Option<Passing> {
        let passes =
            |index| !self.has_or_fetches(name, meta, index) && self.passes(name, meta, index);
        let mut index = (left.start / CHUNK_BYTES) as u32;
        if left.is_empty() || !passes(index) {
            return None;
        }
        // Runs end where extents do.
        let run_end = (index / self.run_chunks() + 1) * self.run_chunks();
        let mut end = chunk_range(index, meta.size).end;
        while end < left.end && index + 1 < run_end && passes(index + 1) {
            index += 1;
            end = chunk_range(index, meta.size).end;
        }
        let range = left.start..end.min(left.end);
        let length = range.end - range.start;
        let chunks = length.div_ceil(CHUNK_BYTES) as u32;
        let share = self.inner.from_peers.clone();
        if share.available_permits() < chunks as usize + chunks_of_half(&self.inner.budget) / 2 {
            return None;
        }
        let share = Arc::new(share.try_acquire_many_owned(chunks).ok()?);
        let mut memory = self.inner.budget.try_hold(length).ok()?;
        let (sender, pieces) = mpsc::unbounded_channel();
        let (engine, name, meta, wanted) =
            (self.clone(), name.clone(), meta.clone(), range.clone());
        let shared = share.clone();
        add(&self.stats().fills, 1);
        request::spawn(async move {
            let _share = shared;
            let fetched: Result<()> = async {
                let response = engine.open_version(&name, &meta, wanted, true).await?;
                let mut body = response.body;
                while let Some(piece) = body.next().await {
                    let piece = piece?;
                    let bytes = piece.len() as u64;
                    engine.stats().from_origin(bytes);
                    if sender
                        .send(Ok(reserved(piece, memory.split(bytes))))
                        .is_err()
                    {
                        // The reader has left.
                        break;
                    }
                }
                Ok(())
            }
            .await;
            if let Err(e) = fetched {
                add(&engine.stats().fills_failed, 1);
                let _ = sender.send(Err(e));
            }
        });
        Some(Passing {
            range,
            pieces,
            _share: share,
        })
    }

    /// A few bytes that pass: at most a chunk's worth.
    pub(crate) async fn pass_whole(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
    ) -> Result<Bytes> {
        add(&self.stats().fills, 1);
        let length = range.end - range.start;
        let fetched = async {
            let response = self.open_version(name, meta, range, true).await?;
            let mut body = Cutter::new(response.body);
            self.take_chunk(&mut body, length, true).await
        };
        let bytes = fetched
            .await
            .inspect_err(|_| add(&self.stats().fills_failed, 1))?;
        self.stats().from_origin(length);
        Ok(bytes)
    }
}
