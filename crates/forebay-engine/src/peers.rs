//! In a cluster: who fetches, and what this node answers to other nodes.
//!
//! A node asks others through its [`Buckets`](crate::Buckets): the engine sees an origin, as if
//! there were no cluster. What it has to know is one thing: whether that origin asks another node to
//! fetch. Such a fetch waits for that node, so nobody who was asked by a node may wait for it in
//! turn: they would wait for each other, if their maps differ.
//!
//! What another node fetched has its place there. Here it is kept only where there is room to spare,
//! so that nothing goes for it, or if it is to be on this disk: because somebody wants it here (a
//! pin, a plan, a warm-up: [`Engine::for_disk`]), or because this node keeps a copy. Otherwise it
//! passes (`passing.rs`).
//!
//! Invariant: an engine [`for_peers`](Engine::for_peers) waits only for buckets, and for nodes that
//! are asked for what they have.

use crate::{Engine, Origin, fill::chunk_range, resolve::Currency, sequential::Sequential};
use bytes::Bytes;
use forebay_core::{Error, ObjectMeta, ObjectName, Result, VersionId, limits::CHUNK_BYTES};
use forebay_origin::ByteStream;
use forebay_store::Part;
use futures::{StreamExt, stream};
use std::{ops::Range, sync::Arc};
use tokio::sync::SemaphorePermit;

/// What another node gets of an object of which it knows nothing.
pub struct PeerRead {
    /// The version that is current, as far as the bucket's freshness rule asks.
    pub meta: Arc<ObjectMeta>,
    /// How long ago it was known to be.
    pub age_secs: u32,
    /// The bytes of `body`: those that were asked for, as far as the object has them.
    pub range: Range<u64>,
    /// The bytes of this version.
    pub body: ByteStream,
}

impl Engine {
    /// The same engine for questions of other nodes.
    pub fn for_peers(&self) -> Engine {
        Engine {
            for_peers: true,
            ..self.clone()
        }
    }

    /// The same engine for what is wanted on this disk, by a plan or a warm-up: what other nodes
    /// fetch for it is kept like everything else.
    pub fn for_disk(&self) -> Engine {
        Engine {
            for_disk: true,
            ..self.clone()
        }
    }

    /// Whether what is fetched from this byte on is kept only where there is room to spare.
    pub(crate) fn only_offers(&self, name: &ObjectName, at: u64) -> bool {
        !self.for_disk && self.asks_elsewhere(name, at) && !self.inner.buckets.keeps_copy(name, at)
    }

    /// The same for what was fetched; `elsewhere`: another node was asked to. If that has fallen
    /// silent, and it is for this node to stand in for it, it is kept.
    pub(crate) fn was_only_offered(&self, name: &ObjectName, at: u64, elsewhere: bool) -> bool {
        elsewhere && self.only_offers(name, at)
    }

    /// Whether so many bytes are kept if they belong to another node; `part`: a chunk, or (`None`)
    /// a head.
    pub(crate) fn keeps_of_others(
        &self,
        name: &ObjectName,
        at: u64,
        part: Option<(VersionId, Part)>,
        bytes: u64,
    ) -> bool {
        !self.only_offers(name, at)
            || self
                .store_for(name)
                .is_some_and(|store| store.takes_offer(name, part, bytes))
    }

    /// Whether a fetch of this byte asks another node to fetch it.
    pub(crate) fn asks_elsewhere(&self, name: &ObjectName, at: u64) -> bool {
        !self.for_peers
            && self.inner.buckets.is_elsewhere(name, at)
            && self.rule(name.bucket()).cache
    }

    /// The bucket has another version than was known: in a cluster, tells those whom others ask.
    pub(crate) async fn tell_changed(&self, name: &ObjectName) {
        if !self.for_peers {
            self.inner.buckets.found_changed(name).await;
        }
    }

    /// A share of the memory for bytes that another node fetches, to be held until they are here. At
    /// most half of the budget waits for other nodes, or nodes could wait for each other's memory.
    pub(crate) async fn share_of_peers(
        &self,
        elsewhere: bool,
    ) -> Result<Option<SemaphorePermit<'_>>> {
        if !elsewhere {
            return Ok(None);
        }
        let share = self.inner.from_peers.acquire().await;
        share
            .map(Some)
            .map_err(|e| Error::internal("the reading of other nodes has ended").caused_by(e))
    }

    /// Where to fetch from; `elsewhere`: another node may be asked to fetch.
    pub(crate) async fn origin(
        &self,
        name: &ObjectName,
        elsewhere: bool,
    ) -> Result<Arc<dyn Origin>> {
        match elsewhere {
            true => self.inner.buckets.origin(name.bucket()).await,
            false => self.inner.buckets.origin_as_owner(name.bucket()).await,
        }
    }

    /// The current version of an object for another node, and the bytes of `want` that it has.
    ///
    /// # Errors
    /// `NotFound`, or what kept the bucket from answering. Nothing stale is told: the node that asks
    /// may have something fresher.
    pub async fn read_for_peer(&self, name: &ObjectName, want: Range<u64>) -> Result<PeerRead> {
        let engine = self.for_peers();
        let resolved = engine.resolve(name, want.clone(), Currency::ByRule).await?;
        let now = engine.now_secs();
        let (meta, age_secs) = (resolved.meta, now.saturating_sub(resolved.at_secs));
        let range = want.start.min(meta.size)..want.end.min(meta.size);
        let body = match resolved.data {
            Some(data) => whole(data.slice(range.start as usize..range.end as usize)),
            None => engine.pieces_of(name, &meta, range.clone()),
        };
        Ok(PeerRead {
            meta,
            age_secs,
            range,
            body,
        })
    }

    /// The version of an object that this node knows to be current by the bucket's freshness rule,
    /// and those bytes of `want` that are here, for another node; `None` if it knows none. Nothing is
    /// asked of anybody.
    ///
    /// # Errors
    /// If what is here cannot be read.
    pub async fn current_here(
        &self,
        name: &ObjectName,
        want: Range<u64>,
    ) -> Result<Option<PeerRead>> {
        let engine = self.for_peers();
        let Some(cached) = engine.cached(name).await? else {
            return Ok(None);
        };
        if !engine.is_fresh(name, cached.validated_at_secs) {
            return Ok(None);
        }
        let now = engine.now_secs();
        let (meta, age_secs) = (cached.meta, now.saturating_sub(cached.validated_at_secs));
        let range = want.start.min(meta.size)..want.end.min(meta.size);
        let (range, body) = match cached.data {
            Some(data) => {
                let within = range.start as usize..range.end as usize;
                (range, whole(data.slice(within)))
            }
            None => match engine.version_here(name, &meta, range.clone()).await? {
                Some(body) => (range, body),
                None => (range.start..range.start, whole(Bytes::new())),
            },
        };
        Ok(Some(PeerRead {
            meta,
            age_secs,
            range,
            body,
        }))
    }

    /// Whether this node tells another one at once which version is current, and has those bytes of it
    /// that are wanted. RAM only: it may have what this does not know of.
    pub fn has_current(&self, name: &ObjectName, want: &Range<u64>) -> bool {
        if let Some((meta, at_secs)) = self.inner.heads.get(name)
            && meta.size > CHUNK_BYTES
        {
            let range = want.start.min(meta.size)..want.end.min(meta.size);
            return self.is_fresh(name, at_secs) && self.has_chunks(name, &meta, &range);
        }
        let peek = self.store_for(name).and_then(|store| store.peek(name));
        peek.is_some_and(|p| p.inline && self.is_fresh(name, p.validated_at_secs))
    }

    /// A range of one version for another node, fetched if it is not here.
    ///
    /// # Errors
    /// As [`Engine::read_version`].
    pub async fn version_for_peer(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
    ) -> Result<ByteStream> {
        let engine = self.for_peers();
        engine.check_range(name, meta, &range)?;
        match engine.small_data(name, meta).await? {
            Some(data) => Ok(whole(data.slice(range.start as usize..range.end as usize))),
            None => Ok(engine.pieces_of(name, meta, range)),
        }
    }

    /// A range of one version for another node, if all of it is on this node. The stream ends in an
    /// error if it is evicted before it is read.
    ///
    /// # Errors
    /// `Corrupt` for a range past the end.
    pub async fn version_here(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
    ) -> Result<Option<ByteStream>> {
        self.check_range(name, meta, &range)?;
        if meta.size <= CHUNK_BYTES {
            let data = self.small_here(name, meta).await?;
            let within = range.start as usize..range.end as usize;
            return Ok(data.map(|data| whole(data.slice(within))));
        }
        if !self.has_chunks(name, meta, &range) {
            return Ok(None);
        }
        let state = (self.clone(), name.clone(), meta.clone(), range);
        let body = stream::try_unfold(state, |(engine, name, meta, mut left)| async move {
            if left.is_empty() {
                return Ok(None);
            }
            let index = (left.start / CHUNK_BYTES) as u32;
            let chunk = chunk_range(index, meta.size);
            let within = left.start - chunk.start..left.end.min(chunk.end) - chunk.start;
            let found = engine
                .chunk_from_store(&name, meta.version(), index, within)
                .await?;
            let Some(bytes) = found else {
                return Err(Error::origin_unavailable(format!(
                    "{name}: chunk {index} was evicted while it was being read"
                )));
            };
            left.start += bytes.len() as u64;
            Ok(Some((bytes, (engine, name, meta, left))))
        });
        Ok(Some(body.boxed()))
    }

    /// Forgets an object because another node says that it was written there.
    pub async fn written_by_peer(&self, name: &ObjectName) {
        self.inner.buckets.was_written(name);
        self.forget(name, None).await;
    }

    fn pieces_of(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
    ) -> ByteStream {
        Sequential::new(self.clone(), name.clone(), meta.clone(), range).into_stream()
    }
}

fn whole(bytes: Bytes) -> ByteStream {
    stream::iter((!bytes.is_empty()).then_some(Ok(bytes))).boxed()
}
