//! Reading on through a large object: chunk after chunk, with the next run fetched while this one
//! is read.
//!
//! A reader waits for one chunk at a time and holds one at a time. What a run fetches ahead goes to
//! the store, not to memory, so readers that are slow, or wait for memory themselves, never hold
//! what others need. If the store does not keep what was fetched (the disk is full, or fails),
//! reading on chunk by chunk would fetch runs in vain: the rest is then passed through in one
//! request.
//!
//! What other nodes have, and is not kept here, passes (`passing.rs`).
//!
//! To a reader, the runs are one read: once bytes of it have come from the origin, requests for the
//! next ones are not refused at once because others have found that the origin does not answer
//! ([`GetRequest::continues`]).
//!
//! [`GetRequest::continues`]: forebay_origin::GetRequest::continues
//!
//! Invariant: the pieces follow each other without a gap, all of one version.

use crate::{
    Engine,
    fill::{Source, chunk_range},
    passing::Passing,
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
    /// The same of the runs that this reader itself leads: other readers may have begun to fetch
    /// some of a run meanwhile, and then it is shorter.
    led_until: u32,
    /// The first chunk that a run of this reader brings to the store ahead of it.
    ahead_from: Option<u32>,
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
            if let Some(end) = engine.begin_run(name, meta, next, until) {
                self.led_until = self.led_until.max(end);
                self.ahead_from = self.ahead_from.or(Some(next));
            }
        }
    }

    /// Whether chunk `index`, which was read from the store, came there from the origin for this
    /// reader, or follows one that did.
    fn brought(&self, index: u32) -> bool {
        let brought = self.ahead_from.map(|from| from..self.led_until);
        brought.is_some_and(|chunks| chunks.contains(&index))
    }
}

/// Reads `left` of one version, front to back.
pub(crate) struct Sequential {
    pub engine: Engine,
    pub name: ObjectName,
    pub meta: Arc<ObjectMeta>,
    /// What remains to be read.
    pub left: Range<u64>,
    /// Whether only what is kept is wanted: the rest is left out.
    pub brings: bool,
    /// A chunk that is here already.
    pub first: Option<(u32, Bytes)>,
    runs: Runs,
    passing: Option<Passing>,
    passing_next: Option<Passing>,
    /// And the byte after its last.
    past_cache: Option<(ByteStream, u64)>,
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
            brings: false,
            first: None,
            runs: Runs::default(),
            passing: None,
            passing_next: None,
            past_cache: None,
        }
    }

    /// The next piece, or `None` at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<(Bytes, Source)>> {
        let next = self.next_piece().await?;
        if let Some((_, Source::Origin)) = &next {
            self.engine.continues = true;
        }
        Ok(next)
    }

    async fn next_piece(&mut self) -> Result<Option<(Bytes, Source)>> {
        while self.brings && !self.left.is_empty() {
            let index = (self.left.start / CHUNK_BYTES) as u32;
            let engine = &self.engine;
            if engine.has_or_fetches(&self.name, &self.meta, index)
                || !engine.passes(&self.name, &self.meta, index)
            {
                break;
            }
            let end = chunk_range(index, self.meta.size).end;
            self.left.start = self.left.end.min(end);
        }
        if self.left.is_empty() {
            return Ok(None);
        }
        if self
            .past_cache
            .as_ref()
            .is_some_and(|(_, end)| self.left.start >= *end)
        {
            self.past_cache = None;
        }
        if let Some((body, _)) = &mut self.past_cache {
            let bytes = match body.next().await {
                Some(piece) => piece?,
                None => {
                    return Err(forebay_core::Error::origin_unavailable(format!(
                        "{}: the body ended early",
                        self.name
                    )));
                }
            };
            self.engine.stats().from_origin(bytes.len() as u64);
            self.left.start += bytes.len() as u64;
            return Ok(Some((bytes, Source::Origin)));
        }
        if let Some(piece) = self.next_passing().await? {
            self.left.start += piece.len() as u64;
            return Ok(Some((piece, Source::Origin)));
        }
        let index = (self.left.start / CHUNK_BYTES) as u32;
        let until = self.left.end.div_ceil(CHUNK_BYTES) as u32;
        let chunk = chunk_range(index, self.meta.size);
        let within = self.left.start - chunk.start..self.left.end.min(chunk.end) - chunk.start;
        if let Some((_, bytes)) = self.first.take().filter(|(first, _)| *first == index) {
            let piece = bytes.slice(within.start as usize..within.end as usize);
            self.left.start += piece.len() as u64;
            return Ok(Some((piece, Source::Origin)));
        }
        let here = self.engine.has_or_fetches(&self.name, &self.meta, index);
        let passes = !here && self.engine.passes(&self.name, &self.meta, index);
        if passes {
            let (engine, left) = (&self.engine, self.left.clone());
            self.passing = engine.pass(&self.name, &self.meta, left);
            if self.passing.is_some() {
                return Box::pin(self.next_piece()).await;
            }
        }
        // What this reader's own run has brought is not here any more, or was not kept.
        if !here && !passes && (index < self.runs.led_until || !self.engine.keeps_own(&self.name)) {
            let end = match self.engine.buckets().has_others() {
                // What follows may be another node's, or here.
                true => {
                    let run = u64::from(self.engine.run_chunks()) * CHUNK_BYTES;
                    self.left.end.min((self.left.start / run + 1) * run)
                }
                false => self.left.end,
            };
            let range = self.left.start..end;
            let body = self.engine.open_run(&self.name, &self.meta, range).await?;
            self.past_cache = Some((body, end));
            return Box::pin(self.next_piece()).await;
        }
        let half = self.engine.run_chunks() / 2;
        self.runs
            .read_ahead(&self.engine, &self.name, &self.meta, index, until, half);
        let led_until = &mut self.runs.led_until;
        let (bytes, source) = self
            .engine
            .chunk_of_run(&self.name, &self.meta, index, within, until, led_until)
            .await?;
        if source == Source::Cache {
            self.engine.stats().from_cache(bytes.len() as u64);
            self.engine.continues |= self.runs.brought(index);
        }
        self.left.start += bytes.len() as u64;
        Ok(Some((bytes, source)))
    }

    /// The next piece of what passes; asks for more of that in time.
    async fn next_passing(&mut self) -> Result<Option<Bytes>> {
        let half = u64::from(self.engine.run_chunks()) * CHUNK_BYTES / 2;
        if self.passing.as_ref().is_some_and(|p| p.range.is_empty()) {
            self.passing = self.passing_next.take();
        }
        let Some(passing) = &mut self.passing else {
            return Ok(None);
        };
        let end = passing.range.end;
        if self.passing_next.is_none() && end - passing.range.start <= half {
            let (engine, left) = (&self.engine, end..self.left.end);
            self.passing_next = engine.pass(&self.name, &self.meta, left);
        }
        passing.next().await.map(Some)
    }

    /// The rest as a stream.
    pub(crate) fn into_stream(self) -> ByteStream {
        stream::try_unfold(self, |mut s| async move {
            Ok(s.next().await?.map(|(bytes, _)| (bytes, s)))
        })
        .boxed()
    }
}
