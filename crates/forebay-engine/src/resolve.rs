//! Which version of an object is current, and what is known about it.
//!
//! A fresh head in the store answers at once. Otherwise one request goes to the origin for all
//! readers of the name: a ranged GET that asks and at the same time brings the first bytes wanted,
//! so that a cold small object costs one round trip; `If-None-Match` makes it a revalidation if an
//! older version is cached.
//!
//! Invariant: what is returned was current at the origin no earlier than the bucket's freshness
//! rule allows, or, if the origin failed and the status says `STALE`, no earlier than the rule's
//! limit for that case. An answer holds for the moment of the question, and that time is kept with
//! it.

use crate::{
    Engine, Freshness, Heads, Joined,
    bytesio::blocking,
    bytesio::reserved,
    cache::BoundedCache,
    fill::{ChunkRun, chunk_range, keep_head_in},
    stats::add,
};
use bytes::Bytes;
use forebay_core::{
    CacheStatus, Error, ErrorKind, ObjectMeta, ObjectName, Result, limits::CHUNK_BYTES, request,
};
use forebay_origin::{GetRequest, GetResponse};
use forebay_store::{Wait, WouldWait};
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// How long the engine does not rely on a disk after it refused a write.
const REFUSAL_LASTS_MS: u64 = 5_000;

/// A version of an object, and its bytes if they came along.
#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    pub meta: Arc<ObjectMeta>,
    /// When this version was known to be current; 0 where nobody asked.
    pub at_secs: u32,
    pub status: CacheStatus,
    /// The whole object, if it has at most one chunk.
    pub data: Option<Bytes>,
    /// A chunk of a larger one that came along and is not kept.
    pub passing: Option<(u32, Bytes)>,
}

impl Resolved {
    fn new(meta: Arc<ObjectMeta>, at_secs: u32, status: CacheStatus, data: Option<Bytes>) -> Self {
        Resolved {
            meta,
            at_secs,
            status,
            data,
            passing: None,
        }
    }
}

/// What the store or the head cache holds of a name, fresh or not.
#[derive(Clone)]
pub(crate) struct Cached {
    pub meta: Arc<ObjectMeta>,
    pub validated_at_secs: u32,
    pub data: Option<Bytes>,
}

/// Heads of large objects, so that each range read of a shard does not read the head from disk
/// again.
pub(crate) struct HeadCache(BoundedCache<u128, (ObjectName, Arc<ObjectMeta>, u32)>);

impl Default for HeadCache {
    fn default() -> Self {
        Self(BoundedCache::new(65_536))
    }
}

impl HeadCache {
    pub(crate) fn get(&self, name: &ObjectName) -> Option<(Arc<ObjectMeta>, u32)> {
        let (held, meta, validated) = self.0.get(&name.hash128())?;
        (held == *name).then_some((meta, validated))
    }

    pub(crate) fn insert(&self, name: &ObjectName, meta: Arc<ObjectMeta>, validated_at_secs: u32) {
        self.0
            .insert(name.hash128(), (name.clone(), meta, validated_at_secs), 1);
    }

    pub(crate) fn remove(&self, hash: u128) {
        self.0.remove(&hash);
    }
}

/// A question that is being asked: the name, which of its readers share it, and whether another
/// node was asked ([`Engine::asks_elsewhere`]), in any case for this disk ([`Engine::for_disk`]).
pub(crate) type ResolveKey = (u128, u64, bool, bool);

/// When a question was sent to the origin: what it learns is as old as that, however long the
/// answer takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub generation: u64,
    pub at_secs: u32,
}

impl Asked {
    /// For an answer that was known so long before the question; `None`: since nobody knows when.
    pub fn before(self, age_secs: Option<u32>) -> Self {
        let at_secs = age_secs.map_or(0, |age| self.at_secs.saturating_sub(age));
        Self { at_secs, ..self }
    }
}

/// How current the reader's version must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Currency {
    /// As the bucket's freshness rule says.
    ByRule,
    /// Current at some moment after the reader asked; a failing origin is an error.
    Latest,
}

/// Distinguishes flights that nobody may join.
static UNSHARED: AtomicU64 = AtomicU64::new(1 << 63);

impl Engine {
    /// Call this before asking the origin about `name`.
    pub(crate) fn asks(&self, name: &ObjectName) -> Asked {
        let at_secs = self.now_secs();
        self.inner.trust.asked(at_secs);
        Asked {
            generation: self.inner.generations.current(name.hash128()),
            at_secs,
        }
    }

    /// What is cached of `name`, of any age. At most one disk read. The bytes of a small object
    /// hold their share of the memory budget: whoever has them needs no more memory.
    pub(crate) async fn cached(&self, name: &ObjectName) -> Result<Option<Cached>> {
        // Small objects are in the head cache only as archives whose members are read; their bytes
        // are on disk.
        if let Some((meta, validated_at_secs)) = self.inner.heads.get(name)
            && meta.size > CHUNK_BYTES
        {
            return Ok(Some(Cached {
                meta,
                validated_at_secs,
                data: None,
            }));
        }
        let Some(store) = self.store_for(name) else {
            return Ok(None);
        };
        let Some(peek) = store.peek(name) else {
            return Ok(None);
        };
        // Reserve before reading: what is in the store is as large as what an origin sends.
        let reservation = match peek.inline {
            true => {
                let bytes = peek.record_bytes.min(CHUNK_BYTES);
                Some(self.inner.budget.reserve(bytes).await?)
            }
            false => None,
        };
        let generation = self.inner.generations.current(name.hash128());
        // It is mostly in the page cache: handing that to another thread would take longer than
        // reading it.
        let head = match store.head(name, Wait::MustNot) {
            Ok(head) => head,
            Err(WouldWait) => {
                let (store, owned) = (store.clone(), name.clone());
                let read = blocking(move || store.head(&owned, Wait::May));
                read.await?.unwrap_or_default()
            }
        };
        let Some(mut head) = head else {
            return Ok(None);
        };
        if let Some(reservation) = reservation {
            head.data = head.data.map(|data| reserved(data, reservation));
        }
        if head.meta.size > CHUNK_BYTES {
            self.remember_head(name, generation, &head.meta, head.validated_at_secs);
        } else if head.data.is_none() {
            return Ok(None);
        }
        Ok(Some(Cached {
            meta: head.meta,
            validated_at_secs: head.validated_at_secs,
            data: head.data,
        }))
    }

    /// Keeps a head that was read from the store in RAM, unless the name was written since
    /// `generation` was noted, or a publication is going on. Never waits.
    pub(crate) fn remember_head(
        &self,
        name: &ObjectName,
        generation: u64,
        meta: &Arc<ObjectMeta>,
        validated_at_secs: u32,
    ) {
        let insert = || {
            self.inner
                .heads
                .insert(name, meta.clone(), validated_at_secs)
        };
        self.inner
            .generations
            .publish_now(name.hash128(), generation, insert);
    }

    pub(crate) fn is_fresh(&self, name: &ObjectName, validated_at_secs: u32) -> bool {
        let (freshness, now) = (self.rule(name.bucket()).freshness, self.now_secs());
        freshness.is_fresh(validated_at_secs, now)
            && (freshness == Freshness::Immutable
                || match self.inner.buckets.heads() {
                    Heads::ByRule => true,
                    Heads::Since(count) => validated_at_secs > self.inner.trust.floor(count, now),
                    Heads::Hints => false,
                })
    }

    /// When a head was validated that this node trusts; 0, for one that it would ask the bucket
    /// about.
    pub fn trusted_since(&self, name: &ObjectName, validated_at_secs: u32) -> u32 {
        let floor = match self.inner.buckets.heads() {
            Heads::ByRule => 0,
            Heads::Since(count) => self.inner.trust.floor(count, self.now_secs()),
            Heads::Hints => u32::MAX,
        };
        let immutable = self.rule(name.bucket()).freshness == Freshness::Immutable;
        match immutable || validated_at_secs > floor {
            true => validated_at_secs,
            false => 0,
        }
    }

    /// The time, for a question whose answer tells how long ago heads were validated: they are
    /// never younger than it.
    pub fn asking_at(&self) -> u32 {
        let at_secs = self.now_secs();
        self.inner.trust.asked(at_secs);
        at_secs
    }

    /// Whether readers of a bucket may share a request that began before they asked, and which
    /// requests they share (`trust.rs`).
    pub(crate) fn shares(&self, name: &ObjectName) -> Option<u64> {
        match (
            self.rule(name.bucket()).freshness,
            self.inner.buckets.heads(),
        ) {
            (Freshness::Always, _) => None,
            (Freshness::Immutable, _) | (_, Heads::ByRule) => Some(0),
            (_, Heads::Hints) => None,
            // Not those of before this trust began.
            (_, Heads::Since(count)) => Some(u64::from(count) << 40),
        }
    }

    /// The current version of `name`. `want` says which bytes the caller will read, so that they
    /// arrive with the answer.
    pub(crate) async fn resolve(
        &self,
        name: &ObjectName,
        want: Range<u64>,
        currency: Currency,
    ) -> Result<Resolved> {
        let by_rule = currency == Currency::ByRule;
        let cached = self.cached(name).await?;
        if let Some(c) = &cached
            && by_rule
            && self.is_fresh(name, c.validated_at_secs)
        {
            return Ok(Resolved::new(
                c.meta.clone(),
                c.validated_at_secs,
                CacheStatus::Hit,
                c.data.clone(),
            ));
        }
        // Its memory may be what the answer needs.
        drop(cached);
        let hash = name.hash128();
        // Under `Always` an answer must be asked for after the read began, so nobody joins a
        // request that is already under way; nor does a reader that wants the latest.
        let asked = self.asks(name);
        let shares = self.shares(name).filter(|_| by_rule);
        let shared = shares.is_some();
        // Only the bucket knows the latest.
        let elsewhere = shared && self.asks_elsewhere(name, 0);
        let key = match shares {
            None => (hash, UNSHARED.fetch_add(1, Relaxed), elsewhere, false),
            Some(trust) => (
                hash,
                trust.wrapping_add(asked.generation),
                elsewhere,
                elsewhere && self.for_disk,
            ),
        };
        let resolved = match self.inner.resolving.join(key) {
            Joined::Follower(follower) => {
                add(&self.stats().fills_joined, 1);
                follower.wait().await
            }
            Joined::Leader(leader) => {
                let follower = leader.follower();
                let (engine, name) = (self.clone(), name.clone());
                // From here on nothing is awaited in the reader's own task: it may leave, and those
                // who follow must not notice.
                request::spawn(async move {
                    // Another request may have finished between the look into the store and the
                    // join.
                    let cached = match engine.cached(&name).await {
                        Ok(cached) => cached,
                        Err(e) => return leader.publish(Err(e)),
                    };
                    if let Some(c) = &cached
                        && by_rule
                        && engine.is_fresh(&name, c.validated_at_secs)
                    {
                        return leader.publish(Ok(Resolved::new(
                            c.meta.clone(),
                            c.validated_at_secs,
                            CacheStatus::Hit,
                            c.data.clone(),
                        )));
                    }
                    let answer = engine
                        .ask_origin(&name, asked, cached, want, shared, elsewhere)
                        .await;
                    match answer {
                        Ok((resolved, run)) => {
                            leader.publish(Ok(resolved));
                            if let Some(run) = run {
                                engine.fill_from(run).await;
                            }
                        }
                        Err(e) => leader.publish(Err(e)),
                    }
                });
                follower.wait().await
            }
        };
        match resolved {
            Err(e) if by_rule => self.or_stale(name, e).await,
            resolved => resolved,
        }
    }

    /// What is cached, if the origin failed and the bucket's rule allows it; otherwise the failure.
    /// The cache is looked up again, because the name may have been written meanwhile, and because
    /// nothing is held while the origin is asked.
    pub(crate) async fn or_stale(&self, name: &ObjectName, e: Error) -> Result<Resolved> {
        let rule = self.rule(name.bucket());
        // An answer is not a failure of the origin, whatever it says.
        let failed = matches!(e.kind(), ErrorKind::Timeout | ErrorKind::OriginUnavailable);
        // Other nodes decide for themselves what may be stale.
        if !failed || self.for_peers || rule.stale_if_error.is_zero() {
            return Err(e);
        }
        let cached = self.cached(name).await.ok().flatten();
        let now = self.now_secs();
        match cached {
            Some(c) if rule.may_be_stale(c.validated_at_secs, now) => {
                tracing::debug!(object = %name, error = %e, "served stale: the origin failed");
                Ok(Resolved::new(
                    c.meta,
                    c.validated_at_secs,
                    CacheStatus::Stale,
                    c.data,
                ))
            }
            _ => Err(e),
        }
    }

    /// One request to the origin; `by_rule`: what another node knew a while ago will do, as far as
    /// the bucket's rule allows. Returns what is current and, for a large object, the run of
    /// chunks whose bytes are on their way.
    async fn ask_origin(
        &self,
        name: &ObjectName,
        asked: Asked,
        cached: Option<Cached>,
        want: Range<u64>,
        by_rule: bool,
        elsewhere: bool,
    ) -> Result<(Resolved, Option<ChunkRun>)> {
        // What is known already may still be current: only the bucket knows.
        let elsewhere = elsewhere && cached.is_none();
        let origin = match by_rule && cached.is_none() {
            true => self.origin(name, elsewhere).await?,
            false => self.inner.buckets.origin_itself(name.bucket()).await?,
        };
        let first_chunk = want.start / CHUNK_BYTES;
        let start = first_chunk * CHUNK_BYTES;
        // Whose it is to fetch what is wanted is decided by its own extent, not by the head's. What
        // another node fetches is not asked for here: it would leave the bucket twice.
        let there = self.asks_elsewhere(name, start);
        let of_others = there != elsewhere && start > 0;
        if let Some(c) = &cached
            && (c.meta.etag.is_none() || of_others)
        {
            // Without ETags there is no If-None-Match: ask for the head and compare.
            add(&self.stats().revalidations, 1);
            let meta = match origin.head(name.key()).await {
                Ok(meta) => meta,
                Err(e) => {
                    self.forget_missing(name, asked.generation, &e).await;
                    return Err(e);
                }
            };
            if meta.names_version() && meta.version() == c.meta.version() {
                self.revalidated(name, asked, &c.meta).await;
                return Ok((
                    Resolved::new(
                        c.meta.clone(),
                        asked.at_secs,
                        CacheStatus::Revalidated,
                        c.data.clone(),
                    ),
                    None,
                ));
            }
            add(&self.stats().revalidations_changed, 1);
            self.tell_changed(name).await;
            if of_others {
                return self.take_version(name, asked, meta, elsewhere).await;
            }
        }
        let others = self.inner.buckets.has_others();
        if others && cached.is_none() && (of_others || (self.for_peers && want.is_empty())) {
            add(&self.stats().fills, 1);
            let (meta, age_secs) = match origin.current(name.key()).await {
                Ok(current) => current,
                Err(e) => {
                    self.forget_missing(name, asked.generation, &e).await;
                    add(&self.stats().fills_failed, 1);
                    return Err(e);
                }
            };
            let asked = asked.before(Some(age_secs));
            return self.take_version(name, asked, meta, elsewhere).await;
        }
        let length = want
            .end
            .saturating_sub(start)
            .div_ceil(CHUNK_BYTES)
            .saturating_mul(CHUNK_BYTES);
        let run = u64::from(self.run_chunks());
        let most = match there != elsewhere || (elsewhere && !self.keeps(name, start)) {
            true => CHUNK_BYTES,
            // Runs end where extents do: the next one may be for another node to fetch.
            false if others => (run - first_chunk % run) * CHUNK_BYTES,
            false => self.inner.config.fill_run_bytes.max(CHUNK_BYTES),
        };
        let length = length.clamp(CHUNK_BYTES, most);
        let if_none_match = cached.as_ref().and_then(|c| c.meta.etag.clone());
        let asked_for_change = if_none_match.is_some();
        if asked_for_change {
            add(&self.stats().revalidations, 1);
        } else {
            add(&self.stats().fills, 1);
        }
        let range = Some(start..start.saturating_add(length));
        match origin
            .get(
                name.key(),
                GetRequest {
                    range,
                    if_match: None,
                    if_none_match,
                    version: None,
                    continues: false,
                },
            )
            .await
        {
            Ok(response) => {
                // The new version's bytes may need the memory of the old ones.
                drop(cached);
                if asked_for_change {
                    add(&self.stats().revalidations_changed, 1);
                    self.tell_changed(name).await;
                }
                self.take_response(name, asked, response, elsewhere).await
            }
            Err(e) if e.kind() == ErrorKind::NotModified && cached.is_some() => {
                let Some(c) = cached else { return Err(e) };
                self.revalidated(name, asked, &c.meta).await;
                Ok((
                    Resolved::new(c.meta, asked.at_secs, CacheStatus::Revalidated, c.data),
                    None,
                ))
            }
            Err(e) if e.kind() == ErrorKind::RangeNotSatisfiable && start > 0 => {
                // The object is shorter than the wanted range: return its size, and the caller will
                // report that.
                let meta = Arc::new(origin.head(name.key()).await?);
                Ok((
                    Resolved::new(meta, asked.at_secs, CacheStatus::Miss, None),
                    None,
                ))
            }
            Err(e) => {
                if !e.kind().is_transient() {
                    self.forget_missing(name, asked.generation, &e).await;
                }
                if asked_for_change && e.kind() != ErrorKind::NotFound {
                    return Err(e.context(format!(
                        "{name}: the cached version could not be revalidated"
                    )));
                }
                add(&self.stats().fills_failed, 1);
                Err(e)
            }
        }
    }

    /// Takes note of which version is current; its bytes were not asked for.
    async fn take_version(
        &self,
        name: &ObjectName,
        asked: Asked,
        meta: ObjectMeta,
        elsewhere: bool,
    ) -> Result<(Resolved, Option<ChunkRun>)> {
        let meta = Arc::new(meta);
        match meta.size > CHUNK_BYTES {
            true => {
                self.check_version_of_large(name, &meta)?;
                self.keep_head(name, asked, &meta, elsewhere).await?;
            }
            // The bytes of a small object are kept with its head, or neither.
            false => self.forget(name, Some(asked.generation)).await,
        }
        let resolved = Resolved::new(meta, asked.at_secs, CacheStatus::Miss, None);
        Ok((resolved, None))
    }

    /// A large object is fetched in several requests: something must show whether they see the same
    /// version.
    fn check_version_of_large(&self, name: &ObjectName, meta: &ObjectMeta) -> Result<()> {
        if meta.names_version() || self.rule(name.bucket()).freshness == Freshness::Immutable {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "{name} has {} bytes, but its version is not known: the origin sent neither an ETag nor \
             a Last-Modified",
            meta.size
        ))
        .naming()
        .hint(
            "make the server send one of them, or set freshness = \"immutable\" or cache = false \
             for this bucket",
        ))
    }

    async fn take_response(
        &self,
        name: &ObjectName,
        asked: Asked,
        response: GetResponse,
        elsewhere: bool,
    ) -> Result<(Resolved, Option<ChunkRun>)> {
        let asked = asked.before(response.age_secs);
        let meta = Arc::new(response.meta);
        if meta.size <= CHUNK_BYTES {
            let _share = self.share_of_peers(elsewhere).await?;
            let reservation = self.inner.budget.reserve(meta.size).await?;
            let data = crate::bytesio::Cutter::new(response.body)
                .take(meta.size as usize)
                .await
                .inspect_err(|_| {
                    add(&self.stats().fills_failed, 1);
                })?;
            self.stats().from_origin(meta.size);
            let data = reserved(data, reservation);
            self.keep_whole(name, asked, &meta, &data, elsewhere)
                .await?;
            return Ok((
                Resolved::new(meta, asked.at_secs, CacheStatus::Miss, Some(data)),
                None,
            ));
        }
        self.check_version_of_large(name, &meta)?;
        let index = (response.range.start / CHUNK_BYTES) as u32;
        let first = chunk_range(index, meta.size);
        if elsewhere
            && first.start == response.range.start
            && first.end <= response.range.end
            && self.passes(name, &meta, index)
        {
            self.keep_head(name, asked, &meta, elsewhere).await?;
            let length = first.end - first.start;
            let mut body = crate::bytesio::Cutter::new(response.body);
            let chunk = self.take_chunk(&mut body, length, elsewhere).await?;
            self.stats().from_origin(length);
            let passing = Some((index, chunk));
            let status = CacheStatus::Miss;
            let resolved = Resolved {
                passing,
                ..Resolved::new(meta, asked.at_secs, status, None)
            };
            return Ok((resolved, None));
        }
        // Before readers find the head: they would fetch these bytes too.
        let run = self.lead_run(name, &meta, response.range, response.body, elsewhere);
        self.keep_head(name, asked, &meta, elsewhere).await?;
        Ok((
            Resolved::new(meta, asked.at_secs, CacheStatus::Miss, None),
            run,
        ))
    }

    /// Keeps a small object, unless it was written meanwhile. If the disk refuses, that is counted,
    /// and is not an error. `elsewhere`: another node was asked to fetch it.
    pub(crate) async fn keep_whole(
        &self,
        name: &ObjectName,
        asked: Asked,
        meta: &Arc<ObjectMeta>,
        data: &Bytes,
        elsewhere: bool,
    ) -> Result<()> {
        let Some(store) = self.store_for(name).cloned() else {
            return Ok(());
        };
        let offered = self.was_only_offered(name, 0, elsewhere);
        if offered
            && !store.takes_offer(name, None, meta.size)
            && store.peek(name).is_none()
            && self.inner.heads.get(name).is_none()
        {
            // There is nothing older to forget either.
            return Ok(());
        }
        let (engine, name, meta, data) = (self.clone(), name.clone(), meta.clone(), data.clone());
        blocking(move || {
            let kept = engine
                .inner
                .generations
                .publish(name.hash128(), asked.generation, || {
                    engine.inner.heads.remove(name.hash128());
                    keep_head_in(&store, &name, &meta, asked.at_secs, Some(&data), offered)
                });
            engine.note_write(&name, kept);
        })
        .await
    }

    /// Keeps the head of a large object, unless it was written meanwhile. `elsewhere`: another node
    /// was asked for it.
    pub(crate) async fn keep_head(
        &self,
        name: &ObjectName,
        asked: Asked,
        meta: &Arc<ObjectMeta>,
        elsewhere: bool,
    ) -> Result<()> {
        if !self.rule(name.bucket()).cache {
            return Ok(());
        }
        let offered = self.was_only_offered(name, 0, elsewhere);
        let (engine, name, meta, store) = (
            self.clone(),
            name.clone(),
            meta.clone(),
            self.store_for(name).cloned(),
        );
        blocking(move || {
            let kept = engine
                .inner
                .generations
                .publish(name.hash128(), asked.generation, || {
                    engine
                        .inner
                        .heads
                        .insert(&name, meta.clone(), asked.at_secs);
                    store.map_or(Ok(()), |s| {
                        keep_head_in(&s, &name, &meta, asked.at_secs, None, offered)
                    })
                });
            engine.note_write(&name, kept);
        })
        .await
    }

    pub(crate) fn note_write(&self, name: &ObjectName, kept: Option<Result<()>>) {
        if let Some(Err(e)) = kept {
            let until = self.inner.began.elapsed().as_millis() as u64 + REFUSAL_LASTS_MS;
            self.inner.refuses_until_ms.store(until, Relaxed);
            add(&self.stats().store_writes_failed, 1);
            tracing::debug!(object = %name, error = %e.describe(), "passed through without being \
                kept");
        }
    }

    /// The origin said that this version is current.
    pub(crate) async fn revalidated(
        &self,
        name: &ObjectName,
        asked: Asked,
        meta: &Arc<ObjectMeta>,
    ) {
        let (engine, name, meta) = (self.clone(), name.clone(), meta.clone());
        let done = blocking(move || {
            let publish = || {
                let inner = &engine.inner;
                if meta.size > CHUNK_BYTES || inner.heads.get(&name).is_some() {
                    inner.heads.insert(&name, meta.clone(), asked.at_secs);
                }
                if let Some(store) = engine.store_for(&name) {
                    store.touch(&name, meta.version(), asked.at_secs);
                }
            };
            engine
                .inner
                .generations
                .publish(name.hash128(), asked.generation, publish);
        });
        if let Err(e) = done.await {
            tracing::warn!(error = %e.describe(), "a revalidation was not kept");
        }
    }

    async fn forget_missing(
        &self,
        name: &ObjectName,
        generation: u64,
        error: &forebay_core::Error,
    ) {
        if error.kind() == ErrorKind::NotFound {
            self.forget(name, Some(generation)).await;
        }
    }

    /// Forgets a name here. With a generation: only if nothing was written since. Once begun, it
    /// completes whether or not the caller stays.
    pub(crate) async fn forget(&self, name: &ObjectName, generation: Option<u64>) {
        let (engine, owned) = (self.clone(), name.clone());
        let done = blocking(move || engine.forget_waiting(&owned, generation));
        match done.await {
            Ok(()) => {}
            // The system gives no thread for it. This thread waits for the disk then: otherwise readers
            // would go on getting the old version.
            Err(e) if e.kind() == ErrorKind::Busy => self.forget_waiting(name, generation),
            Err(e) => tracing::error!(object = %name, error = %e.describe(), "an object could not \
                be forgotten"),
        }
    }

    /// The same, blocking on the disk.
    pub(crate) fn forget_waiting(&self, name: &ObjectName, generation: Option<u64>) {
        let hash = name.hash128();
        let forget = || {
            self.inner.heads.remove(hash);
            if let Some(store) = &self.inner.store {
                store.remove(name);
            }
        };
        match generation {
            Some(generation) => {
                self.inner.generations.publish(hash, generation, forget);
            }
            None => self.inner.generations.step(hash, forget),
        }
    }
}
