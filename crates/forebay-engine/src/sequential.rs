//! Reading on through a large object: chunk after chunk, with the next run fetched while this one
//! is read.
//!
//! A reader waits for one chunk at a time and holds one at a time. What a run fetches ahead goes to
//! the store, not to memory, so readers that are slow, or wait for memory themselves, never hold
//! what others need. If the store does not keep what was fetched (the disk is full, or fails),
//! reading on chunk by chunk would fetch runs in vain: the rest is then passed through in one
//! request.
//!
//! Invariant: the pieces follow each other without a gap, all of one version.

use crate::{
    Engine,
    fill::{Source, chunk_range},
    stats::add,
};
use bytes::Bytes;
use forebay_core::{ObjectMeta, ObjectName, Result, limits::CHUNK_BYTES};
use forebay_origin::ByteStream;
use futures::{StreamExt, stream};
use std::{ops::Range, sync::Arc};

/// The runs started by one reader that reads an object from front to back.
#[derive(Default)]
pub(crate) struct Runs {
    /// The chunk after the last one for which a run was started.
    begun_until: u32,
}

impl Runs {
    /// Chunk `index` is being read (by [`Engine::chunk`], up to `until`): starts the next run when
    /// no more than `left` chunks of this one are left, if it is missing.
    pub(crate) fn read_ahead(
        &mut self,
        engine: &Engine,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        index: u32,
        until: u32,
        left: u32,
    ) {
        if !engine.has_or_fetches(name, meta, index) {
            self.begun_until = engine.run_end(name, meta, index, until);
        } else if index >= self.begun_until {
            self.begun_until = index + 1;
        }
        let next = self.begun_until.max(index + 1);
        if next < until && next <= index + left.max(1) && !engine.has_or_fetches(name, meta, next) {
            self.begun_until = engine.run_end(name, meta, next, until);
            engine.begin_run(name, meta, next, until);
        }
    }
}

/// Reads `left` of one version, front to back.
pub(crate) struct Sequential {
    pub engine: Engine,
    pub name: ObjectName,
    pub meta: Arc<ObjectMeta>,
    /// What remains to be read.
    pub left: Range<u64>,
    runs: Runs,
    past_cache: Option<ByteStream>,
}

impl Sequential {
    pub(crate) fn new(
        engine: Engine,
        name: ObjectName,
        meta: Arc<ObjectMeta>,
        left: Range<u64>,
    ) -> Self {
        Self {
            engine,
            name,
            meta,
            left,
            runs: Runs::default(),
            past_cache: None,
        }
    }

    /// The next piece, or `None` at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<(Bytes, Source)>> {
        if self.left.is_empty() {
            return Ok(None);
        }
        if let Some(body) = &mut self.past_cache {
            let bytes = match body.next().await {
                Some(piece) => piece?,
                None => {
                    return Err(forebay_core::Error::origin_unavailable(format!(
                        "{}: the body ended early",
                        self.name
                    )));
                }
            };
            add(&self.engine.stats().bytes_from_origin, bytes.len() as u64);
            self.left.start += bytes.len() as u64;
            return Ok(Some((bytes, Source::Origin)));
        }
        let index = (self.left.start / CHUNK_BYTES) as u32;
        let until = self.left.end.div_ceil(CHUNK_BYTES) as u32;
        let here = self.engine.has_or_fetches(&self.name, &self.meta, index);
        if !here && (index < self.runs.begun_until || !self.engine.keeps(&self.name)) {
            self.past_cache = Some(
                self.engine
                    .open_run(&self.name, &self.meta, self.left.clone())
                    .await?,
            );
            return Box::pin(self.next()).await;
        }
        let half = self.engine.run_chunks() / 2;
        self.runs
            .read_ahead(&self.engine, &self.name, &self.meta, index, until, half);
        let chunk = chunk_range(index, self.meta.size);
        let within = self.left.start - chunk.start..self.left.end.min(chunk.end) - chunk.start;
        let (bytes, source) = self
            .engine
            .chunk(&self.name, &self.meta, index, within, until)
            .await?;
        if source == Source::Cache {
            add(&self.engine.stats().bytes_from_cache, bytes.len() as u64);
        }
        self.left.start += bytes.len() as u64;
        Ok(Some((bytes, source)))
    }

    /// The rest as a stream.
    pub(crate) fn into_stream(self) -> ByteStream {
        stream::try_unfold(self, |mut s| async move {
            Ok(s.next().await?.map(|(bytes, _)| (bytes, s)))
        })
        .boxed()
    }
}
