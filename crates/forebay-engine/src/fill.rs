//! Chunks of large objects: from the store, from a fill under way, or by a new fill.
//!
//! A fill fetches a *run*: the missing chunk and those after it that are missing too and wanted by
//! the same reader, in one ranged GET under `If-Match`. Each chunk of the run is its own flight, so
//! readers of any of them wait only for what they need, and a chunk is fetched once, however many
//! readers it has. Each chunk is reserved from the memory budget just before its bytes are read
//! from the wire.
//!
//! Invariant: a chunk that is published is in the store, or the store refused it and counted that.

use crate::{
    Engine, Joined, Leader,
    bytesio::{Cutter, blocking, reserved},
    stats::add,
};
use bytes::Bytes;
use forebay_core::{
    Error, ErrorKind, ObjectMeta, ObjectName, Result, VersionId, limits::CHUNK_BYTES, request,
};
use forebay_origin::{ByteStream, GetRequest, GetResponse};
use forebay_store::{Part, Store, Wait, WouldWait};
use std::{ops::Range, sync::Arc};

/// A chunk being fetched. A fetch that asks another node to fetch is not shared with readers that
/// need one which does not ([`Engine::asks_elsewhere`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ChunkKey {
    pub name: u128,
    pub version: VersionId,
    pub index: u32,
    pub elsewhere: bool,
    /// Whether it is kept in any case ([`Engine::for_disk`]).
    pub for_disk: bool,
}

/// Where bytes came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Cache,
    Origin,
}

/// Chunks whose bytes are on their way.
pub(crate) struct ChunkRun {
    name: ObjectName,
    meta: Arc<ObjectMeta>,
    first: u32,
    /// Whether another node was asked to fetch them.
    elsewhere: bool,
    /// One for each chunk of the body, in order; `None` if another fill already has it.
    leaders: Vec<Option<Leader<ChunkKey, Bytes>>>,
    body: ByteStream,
}

/// The bytes of chunk `index` within an object of `size`.
pub(crate) fn chunk_range(index: u32, size: u64) -> Range<u64> {
    let start = u64::from(index) * CHUNK_BYTES;
    start..(start + CHUNK_BYTES).min(size)
}

/// The chunks that hold the bytes of `range` (not empty).
pub(crate) fn chunks_of(range: &Range<u64>) -> std::ops::RangeInclusive<u32> {
    (range.start / CHUNK_BYTES) as u32..=((range.end - 1) / CHUNK_BYTES) as u32
}

impl Engine {
    /// The bytes `within` chunk `index` of one version. `wanted_until` is the chunk after the last
    /// one that the caller will read: a fill that starts here may run up to it.
    ///
    /// # Errors
    /// `VersionChanged` if the origin has another version now.
    pub(crate) async fn chunk(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        index: u32,
        within: Range<u64>,
        wanted_until: u32,
    ) -> Result<(Bytes, Source)> {
        self.chunk_of_run(name, meta, index, within, wanted_until, &mut 0)
            .await
    }

    /// The same. `led_until` is raised to the chunk after the last one of the run that this call
    /// leads, if it leads one.
    pub(crate) async fn chunk_of_run(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        index: u32,
        within: Range<u64>,
        wanted_until: u32,
        led_until: &mut u32,
    ) -> Result<(Bytes, Source)> {
        let version = meta.version();
        let cut = |bytes: Bytes| bytes.slice(within.start as usize..within.end as usize);
        let mut followed = false;
        loop {
            if let Some(bytes) = self
                .chunk_from_store(name, version, index, within.clone())
                .await?
            {
                return Ok((bytes, Source::Cache));
            }
            let key = self.chunk_key(name, version, index);
            let whole = chunk_range(index, meta.size);
            if key.elsewhere
                && within.end - within.start < whole.end - whole.start
                && !self.inner.filling.contains(&key)
                && self.passes(name, meta, index)
            {
                let range = whole.start + within.start..whole.start + within.end;
                let bytes = self.pass_whole(name, meta, range).await?;
                return Ok((bytes, Source::Origin));
            }
            let leader = match self.inner.filling.join(key) {
                Joined::Leader(leader) => leader,
                Joined::Follower(follower) => {
                    add(&self.stats().fills_joined, 1);
                    match follower.wait().await {
                        // The failed fetch began before this reader came: it may try for itself,
                        // once.
                        Err(e) if e.kind().is_transient() && !followed => {
                            followed = true;
                            continue;
                        }
                        done => return done.map(|b| (cut(b), Source::Origin)),
                    }
                }
            };
            let follower = leader.follower();
            let (engine, name, meta) = (self.clone(), name.clone(), meta.clone());
            // Another fetch may have finished between the look into the store and the join. Its
            // chunk is read in the task that leads: a reader that leaves meanwhile must not take it
            // from those who follow.
            let here = self
                .store_for(&name)
                .is_some_and(|s| s.has_part(&name, version, Part::Chunk(index)));
            if here {
                request::spawn(async move {
                    let whole = chunk_range(index, meta.size);
                    let whole = 0..whole.end - whole.start;
                    match engine.chunk_from_store(&name, version, index, whole).await {
                        Ok(Some(bytes)) => leader.publish(Ok(bytes)),
                        Ok(None) => {
                            let run = vec![Some(leader)];
                            engine.fetch_run(name, meta, key, run).await;
                        }
                        Err(e) => leader.publish(Err(e)),
                    }
                });
            } else {
                let run = self.extend_run(&name, &meta, key, leader, wanted_until);
                *led_until = (*led_until).max(index + run.len() as u32);
                request::spawn(async move { engine.fetch_run(name, meta, key, run).await });
            }
            return follower.wait().await.map(|b| (cut(b), Source::Origin));
        }
    }

    /// Starts fetching a run of chunks into the store, without waiting for it. Returns the chunk
    /// after its last one, if there is a run.
    pub(crate) fn begin_run(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        index: u32,
        wanted_until: u32,
    ) -> Option<u32> {
        let key = self.chunk_key(name, meta.version(), index);
        if self.passes(name, meta, index) {
            return None;
        }
        let leader = self.inner.filling.try_lead(key)?;
        let run = self.extend_run(name, meta, key, leader, wanted_until);
        let end = index + run.len() as u32;
        let (engine, name, meta) = (self.clone(), name.clone(), meta.clone());
        request::spawn(async move { engine.fetch_run(name, meta, key, run).await });
        Some(end)
    }

    /// The fetch of a chunk that this engine may join, or lead.
    pub(crate) fn chunk_key(&self, name: &ObjectName, version: VersionId, index: u32) -> ChunkKey {
        let elsewhere = self.asks_elsewhere(name, u64::from(index) * CHUNK_BYTES);
        ChunkKey {
            name: name.hash128(),
            version,
            index,
            elsewhere,
            for_disk: elsewhere && self.for_disk,
        }
    }

    /// Whether a chunk that is fetched comes from another node, and is not kept here.
    pub(crate) fn passes(&self, name: &ObjectName, meta: &ObjectMeta, index: u32) -> bool {
        self.passes_after(name, meta, index, 0)
    }

    /// The same after so many bytes of others that are on their way here.
    fn passes_after(&self, name: &ObjectName, meta: &ObjectMeta, index: u32, bytes: u64) -> bool {
        let at = u64::from(index) * CHUNK_BYTES;
        if !self.only_offers(name, at) {
            return false;
        }
        // A small object is kept with its head.
        let part = (meta.size > CHUNK_BYTES).then(|| (meta.version(), Part::Chunk(index)));
        !self.keeps_own(name) || !self.keeps_of_others(name, at, part, bytes + CHUNK_BYTES)
    }

    /// Whether a chunk is in the store or on its way there. RAM only.
    pub(crate) fn has_or_fetches(&self, name: &ObjectName, meta: &ObjectMeta, index: u32) -> bool {
        let version = meta.version();
        self.inner
            .filling
            .contains(&self.chunk_key(name, version, index))
            || self
                .store_for(name)
                .is_some_and(|s| s.has_part(name, version, Part::Chunk(index)))
    }

    /// Chunks in the longest run.
    pub(crate) fn run_chunks(&self) -> u32 {
        (self.inner.config.fill_run_bytes / CHUNK_BYTES).max(1) as u32
    }

    /// The chunk after the last one of a run that began at `index` now.
    pub(crate) fn run_end(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        index: u32,
        wanted_until: u32,
    ) -> u32 {
        let longest = wanted_until.min(index.saturating_add(self.run_chunks()));
        let others = self.inner.buckets.has_others();
        let kind = |index: u32| {
            let at = u64::from(index) * CHUNK_BYTES;
            others && self.asks_elsewhere(name, at) && !self.passes(name, meta, index)
        };
        let first = kind(index);
        (index + 1..longest)
            .find(|&next| self.has_or_fetches(name, meta, next) || kind(next) != first)
            .unwrap_or(longest.max(index + 1))
    }

    /// Whether all chunks of `range` are in the store. RAM only.
    pub(crate) fn has_chunks(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        range: &Range<u64>,
    ) -> bool {
        let Some(store) = self.store_for(name) else {
            return false;
        };
        let version = meta.version();
        range.is_empty() || chunks_of(range).all(|i| store.has_part(name, version, Part::Chunk(i)))
    }

    pub(crate) async fn chunk_from_store(
        &self,
        name: &ObjectName,
        version: VersionId,
        index: u32,
        within: Range<u64>,
    ) -> Result<Option<Bytes>> {
        let Some(store) = self.store_for(name) else {
            return Ok(None);
        };
        if !store.has_part(name, version, Part::Chunk(index)) {
            return Ok(None);
        }
        self.part_in_budget(store, name, version, Part::Chunk(index), within)
            .await
    }

    /// A range of a part that is in the store; its memory is reserved before it is read. The bytes
    /// hold the reservation: whoever has them needs no more memory.
    pub(crate) async fn part_in_budget(
        &self,
        store: &Arc<Store>,
        name: &ObjectName,
        version: VersionId,
        part: Part,
        within: Range<u64>,
    ) -> Result<Option<Bytes>> {
        let length = within.end.saturating_sub(within.start);
        let reservation = self.inner.budget.reserve(length).await?;
        let found = match store.part(name, version, part, within.clone(), Wait::MustNot) {
            Ok(found) => found,
            Err(WouldWait) => {
                let (store, name) = (store.clone(), name.clone());
                let read = blocking(move || store.part(&name, version, part, within, Wait::May));
                read.await?.unwrap_or_default()
            }
        };
        Ok(found.map(|bytes| reserved(bytes, reservation)))
    }

    /// Also leads the chunks after `index`, as long as nobody has or fetches them and the run is
    /// not too long.
    fn extend_run(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        first: ChunkKey,
        leader: Leader<ChunkKey, Bytes>,
        wanted_until: u32,
    ) -> Vec<Option<Leader<ChunkKey, Bytes>>> {
        let (version, index) = (meta.version(), first.index);
        let mut run = vec![Some(leader)];
        // Chunks that nobody waits for are useful only if they are kept.
        let end = if self.keeps_own(name) {
            wanted_until.min(index.saturating_add(self.run_chunks()))
        } else {
            index + 1
        };
        for next in index + 1..end {
            let before = u64::from(next - index) * CHUNK_BYTES;
            if first.elsewhere && self.passes_after(name, meta, next, before) {
                break;
            }
            let is_here = || {
                let store = self.store_for(name);
                store.is_some_and(|s| s.has_part(name, version, Part::Chunk(next)))
            };
            let key = self.chunk_key(name, version, next);
            if key.elsewhere != first.elsewhere || is_here() {
                break;
            }
            match self.inner.filling.try_lead(key) {
                // Another fetch may have finished between the look into the store and this. (Who
                // joins it just now tries again.)
                Some(leader) if !is_here() => run.push(Some(leader)),
                _ => break,
            }
        }
        run
    }

    /// Leads the chunks that a response brings, for [`Engine::fill_from`]; `elsewhere`: another
    /// node was asked to fetch them. They count as fetches of the kind that other readers of the
    /// same bytes make: which node fetches what is decided extent by extent, and not as for the
    /// head.
    pub(crate) fn lead_run(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
        body: ByteStream,
        elsewhere: bool,
    ) -> Option<ChunkRun> {
        if range.is_empty() || !range.start.is_multiple_of(CHUNK_BYTES) {
            return None;
        }
        let version = meta.version();
        let kind = self.asks_elsewhere(name, range.start);
        if elsewhere && !kind {
            // Whoever must not wait for another node would join it.
            return None;
        }
        let leaders: Vec<_> = chunks_of(&range)
            // A last chunk that the response cuts short is left out.
            .filter(|&i| chunk_range(i, meta.size).end <= range.end)
            .map(|i| self.chunk_key(name, version, i))
            .take_while(|key| key.elsewhere == kind)
            .take(if self.keeps(name, range.start) {
                usize::MAX
            } else {
                1
            })
            .map(|key| {
                let here = self
                    .store_for(name)
                    .is_some_and(|s| s.has_part(name, version, Part::Chunk(key.index)));
                if here {
                    None
                } else {
                    self.inner.filling.try_lead(key)
                }
            })
            .collect();
        let first = (range.start / CHUNK_BYTES) as u32;
        leaders.iter().any(Option::is_some).then(|| ChunkRun {
            name: name.clone(),
            meta: meta.clone(),
            first,
            elsewhere,
            leaders,
            body,
        })
    }

    async fn fetch_run(
        &self,
        name: ObjectName,
        meta: Arc<ObjectMeta>,
        first: ChunkKey,
        leaders: Vec<Option<Leader<ChunkKey, Bytes>>>,
    ) {
        add(&self.stats().fills, 1);
        let (first, elsewhere) = (first.index, first.elsewhere);
        let last = first + leaders.len() as u32 - 1;
        let range = chunk_range(first, meta.size).start..chunk_range(last, meta.size).end;
        match self.open_version(&name, &meta, range, elsewhere).await {
            Ok(response) => {
                let body = response.body;
                self.fill_from(ChunkRun {
                    name,
                    meta,
                    first,
                    elsewhere,
                    leaders,
                    body,
                })
                .await
            }
            Err(e) => {
                add(&self.stats().fills_failed, 1);
                for leader in leaders.into_iter().flatten() {
                    leader.publish(Err(e.clone()));
                }
            }
        }
    }

    /// Asks for bytes of one version. If the origin has another one, forgets what is known about
    /// the name: it is outdated.
    pub(crate) async fn open_run(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
    ) -> Result<ByteStream> {
        let elsewhere = self.asks_elsewhere(name, range.start);
        self.open_version(name, meta, range, elsewhere)
            .await
            .map(|response| response.body)
    }

    /// The same, with the object's metadata from the origin; `elsewhere`: another node may be asked
    /// to fetch the bytes.
    pub(crate) async fn open_version(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
        elsewhere: bool,
    ) -> Result<GetResponse> {
        let generation = self.inner.generations.current(name.hash128());
        let opened = self.open_version_of(name, meta, range, elsewhere).await;
        if opened
            .as_ref()
            .is_err_and(|e| e.kind() == ErrorKind::VersionChanged)
        {
            add(&self.stats().version_changes, 1);
            // A reader of an old version (`versioned.rs`) says nothing about the version known
            // here.
            let known = self.cached(name).await.ok().flatten();
            if known.is_none_or(|c| c.meta.version() == meta.version()) {
                self.outdated(name, generation).await;
            }
        }
        opened
    }

    /// What is known of a name is outdated: forgets it here, and in a cluster where others ask.
    pub(crate) async fn outdated(&self, name: &ObjectName, generation: u64) {
        self.tell_changed(name).await;
        self.forget(name, Some(generation)).await;
    }

    async fn open_version_of(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
        elsewhere: bool,
    ) -> Result<GetResponse> {
        let origin = self.origin(name, elsewhere).await?;
        let request = GetRequest {
            range: Some(range.clone()),
            if_match: meta.etag.clone(),
            if_none_match: None,
            version: Some(meta.clone()),
            continues: self.continues,
        };
        let changed = || {
            Error::version_changed(format!(
                "{name} changed at the origin while it was being read"
            ))
            .naming()
            .hint("read it again to get the new version")
        };
        let response = origin
            .get(name.key(), request)
            .await
            .map_err(|e| match e.kind() {
                ErrorKind::PreconditionFailed
                | ErrorKind::NotFound
                | ErrorKind::RangeNotSatisfiable => changed().caused_by(e),
                _ => e,
            })?;
        if response.meta.version() != meta.version() {
            return Err(changed());
        }
        if response.range != range {
            return Err(Error::origin_unavailable(format!(
                "{name}: the origin sent bytes {:?}, but {range:?} were requested",
                response.range
            )));
        }
        Ok(response)
    }

    /// Reads the bytes of a run from the wire; keeps and publishes each chunk.
    pub(crate) async fn fill_from(&self, run: ChunkRun) {
        let ChunkRun {
            name,
            meta,
            first,
            elsewhere,
            leaders,
            body,
        } = run;
        let version = meta.version();
        let mut body = Cutter::new(body);
        let mut leaders = leaders.into_iter().zip(first..);
        while let Some((leader, index)) = leaders.next() {
            let range = chunk_range(index, meta.size);
            let length = range.end - range.start;
            let Some(leader) = leader else {
                match body.skip(length).await {
                    Ok(()) => continue,
                    Err(e) => return self.run_failed(&e, leaders.filter_map(|(l, _)| l)),
                }
            };
            match self.take_chunk(&mut body, length, elsewhere).await {
                Ok(bytes) => {
                    self.stats().from_origin(length);
                    self.keep_chunk(&name, &meta, version, index, &bytes, elsewhere)
                        .await;
                    leader.publish(Ok(bytes));
                }
                Err(e) => {
                    return self.run_failed(
                        &e,
                        std::iter::once(leader).chain(leaders.filter_map(|(l, _)| l)),
                    );
                }
            }
        }
    }

    fn run_failed(&self, error: &Error, leaders: impl Iterator<Item = Leader<ChunkKey, Bytes>>) {
        add(&self.stats().fills_failed, 1);
        for leader in leaders {
            leader.publish(Err(error.clone()));
        }
    }

    pub(crate) async fn take_chunk(
        &self,
        body: &mut Cutter,
        length: u64,
        elsewhere: bool,
    ) -> Result<Bytes> {
        let _share = self.share_of_peers(elsewhere).await?;
        let reservation = self.inner.budget.reserve(length).await?;
        Ok(reserved(body.take(length as usize).await?, reservation))
    }

    /// Keeps a chunk; `elsewhere`: another node was asked to fetch it.
    pub(crate) async fn keep_chunk(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        version: VersionId,
        index: u32,
        bytes: &Bytes,
        elsewhere: bool,
    ) {
        let Some(store) = self.store_for(name).cloned() else {
            return;
        };
        let at = u64::from(index) * CHUNK_BYTES;
        let offered = self.was_only_offered(name, at, elsewhere);
        if offered && self.passes(name, meta, index) {
            return;
        }
        let (engine, name, meta, bytes) = (self.clone(), name.clone(), meta.clone(), bytes.clone());
        let kept = blocking(move || {
            // A small object whose bytes were lost is kept with its head, as small objects are, but
            // never in place of another version.
            if meta.size <= CHUNK_BYTES {
                let hash = name.hash128();
                let generation = engine.inner.generations.current(hash);
                let kept = engine.inner.generations.publish(hash, generation, || {
                    match store.head(&name, Wait::May).unwrap_or_default() {
                        Some(head) if head.meta.version() != version => Ok(()),
                        head => {
                            let at_secs = head.map_or(0, |h| h.validated_at_secs);
                            keep_head_in(&store, &name, &meta, at_secs, Some(&bytes), offered)
                        }
                    }
                });
                engine.note_write(&name, kept);
            } else {
                let part = Part::Chunk(index);
                let kept = match offered {
                    true => store.offer_part(&name, version, part, &bytes).map(drop),
                    false => store.put_part(&name, version, part, &bytes),
                };
                engine.note_write(&name, Some(kept));
            }
        })
        .await;
        if let Err(e) = kept {
            tracing::warn!(error = %e.describe(), "a chunk was not kept");
        }
    }
}

/// Puts a head, or, if it is `offered`, keeps it only where there is room to spare.
pub(crate) fn keep_head_in(
    store: &Store,
    name: &ObjectName,
    meta: &ObjectMeta,
    at_secs: u32,
    data: Option<&[u8]>,
    offered: bool,
) -> Result<()> {
    match offered {
        true => store.offer_head(name, meta, at_secs, data).map(drop),
        false => store.put_head(name, meta, at_secs, data),
    }
}
