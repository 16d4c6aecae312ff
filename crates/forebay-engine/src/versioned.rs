//! Reading a version that the caller names: what was indexed under a version is read under it, or
//! not at all.
//!
//! A dataset is built from versions of files. Freshness does not matter here: bytes on the disk
//! under this version are the right ones, however old, and a request under `If-Match` brings them
//! or says that the object has changed. Fills are the same as for all other readers (`fill.rs`):
//! shared, kept, within the memory budget.
//!
//! Invariant: every appended byte belongs to the named version; a call that fails, or says that it
//! has nothing, leaves the caller's buffer as it was.

use crate::{
    Engine, Joined,
    bytesio::{Cutter, reserved},
    fill::{Source, chunk_range, chunks_of},
    sequential::Sequential,
    stats::add,
};
use bytes::Bytes;
use forebay_core::{
    CacheStatus, Error, ObjectMeta, ObjectName, Result, limits::CHUNK_BYTES, request,
};
use forebay_format::MemberIndex;
use forebay_store::{Part, Wait, WouldWait};
use futures::TryStreamExt;
use std::{ops::Range, sync::Arc};

impl Engine {
    /// Appends a range of one version, if it is on the local disk. `false`: some or all of it is
    /// not.
    ///
    /// # Errors
    /// Only under [`Wait::MustNot`]: it would have to wait for the disk.
    pub fn append_version(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        range: Range<u64>,
        wait: Wait,
        out: &mut Vec<u8>,
    ) -> Result<bool, WouldWait> {
        let begin = out.len();
        let appended = self.append_here(name, meta, &range, wait, out);
        if appended == Ok(true) {
            self.stats().from_cache(range.end - range.start);
        } else {
            out.truncate(begin);
        }
        appended
    }

    fn append_here(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        range: &Range<u64>,
        wait: Wait,
        out: &mut Vec<u8>,
    ) -> Result<bool, WouldWait> {
        if range.is_empty() {
            return Ok(true);
        }
        let Some(store) = self.store_for(name).filter(|_| range.end <= meta.size) else {
            return Ok(false);
        };
        let version = meta.version();
        if meta.size <= CHUNK_BYTES {
            let found = store.append_inline(name, wait, out, |now, _| {
                (now.version() == version).then(|| range.clone())
            })?;
            return Ok(found.is_some());
        }
        for index in chunks_of(range) {
            let chunk = chunk_range(index, meta.size);
            let within =
                range.start.max(chunk.start) - chunk.start..range.end.min(chunk.end) - chunk.start;
            if !store.append_part(name, version, Part::Chunk(index), within, wait, out)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether [`Engine::append_version`] is worth a try. RAM only; for small objects it does not
    /// know the version.
    pub fn may_have_version(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        range: &Range<u64>,
    ) -> bool {
        match range.is_empty() {
            true => true,
            false if meta.size <= CHUNK_BYTES => self
                .store_for(name)
                .is_some_and(|s| s.peek(name).is_some_and(|p| p.inline)),
            false => self.has_chunks(name, meta, range),
        }
    }

    /// Brings a range of one version to the local disk, if that keeps it.
    ///
    /// # Errors
    /// As [`Engine::read_version`].
    pub async fn bring_version(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
    ) -> Result<CacheStatus> {
        self.each_piece(name, meta, range, true, |_| ()).await
    }

    /// Appends a range of one version, from wherever it is.
    ///
    /// # Errors
    /// `VersionChanged` if the origin has another version now, or none (then its source is a
    /// `NotFound`); `Corrupt` for a range past the end.
    pub async fn read_version(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<CacheStatus> {
        let begin = out.len();
        self.each_piece(name, meta, range, false, |p| out.extend_from_slice(p))
            .await
            .inspect_err(|_| out.truncate(begin))
    }

    /// Appends a range of a compressed archive's unpacked bytes.
    ///
    /// # Errors
    /// As [`Engine::read_version`]; `Corrupt` if the archive is damaged.
    pub async fn read_unpacked_version(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<CacheStatus> {
        let (begin, length) = (out.len(), range.end - range.start);
        let data = self.small_data(name, meta).await?;
        let mut read = self
            .open_unpacked(name, meta, CacheStatus::Hit, data, range)
            .await?;
        let filled: Result<()> = async {
            while let Some(piece) = read.body.try_next().await? {
                out.extend_from_slice(&piece);
            }
            match (out.len() - begin) as u64 {
                n if n == length => Ok(()),
                n => Err(Error::corrupt(format!(
                    "{name}: {n} bytes came, but its index says {length}"
                ))),
            }
        }
        .await;
        filled
            .map(|()| read.cache)
            .inspect_err(|_| out.truncate(begin))
    }

    /// The members of one version of an archive.
    ///
    /// # Errors
    /// As [`Engine::read_version`]; `Corrupt` if it cannot be parsed.
    pub async fn members_of_version(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
    ) -> Result<Arc<MemberIndex>> {
        let (engine, owned, of) = (self.clone(), name.clone(), meta.clone());
        let here = crate::bytesio::blocking(move || engine.index_here(&owned, &of));
        if let Some(index) = here.await? {
            return Ok(index);
        }
        let data = self.small_data(name, meta).await?;
        self.index(name, meta, data.as_ref()).await
    }

    pub(crate) async fn small_data(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
    ) -> Result<Option<Bytes>> {
        match meta.size {
            1..=CHUNK_BYTES => Ok(Some(self.small_version(name, meta).await?.0)),
            _ => Ok(None),
        }
    }

    pub(crate) fn check_range(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        range: &Range<u64>,
    ) -> Result<()> {
        if range.end > meta.size || range.start > range.end {
            return Err(Error::corrupt(format!(
                "{name}: bytes {range:?} were requested, but this version has {} bytes",
                meta.size
            )));
        }
        Ok(())
    }

    async fn each_piece(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
        brings: bool,
        mut take: impl FnMut(&[u8]),
    ) -> Result<CacheStatus> {
        self.check_range(name, meta, &range)?;
        if range.is_empty() {
            return Ok(CacheStatus::Hit);
        }
        if meta.size <= CHUNK_BYTES {
            if brings && self.passes(name, meta, 0) {
                return Ok(CacheStatus::Hit);
            }
            let (data, status) = self.small_version(name, meta).await?;
            take(&data[range.start as usize..range.end as usize]);
            return Ok(status);
        }
        let mut status = CacheStatus::Hit;
        let mut pieces = Sequential::new(self.clone(), name.clone(), meta.clone(), range);
        pieces.brings = brings;
        while let Some((piece, source)) = pieces.next().await? {
            if source == Source::Origin {
                status = CacheStatus::Miss;
            }
            take(&piece);
        }
        Ok(status)
    }

    /// This version of a small object, whole.
    async fn small_version(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
    ) -> Result<(Bytes, CacheStatus)> {
        if let Some(data) = self.small_here(name, meta).await? {
            self.stats().from_cache(data.len() as u64);
            return Ok((data, CacheStatus::Hit));
        }
        // The same key as a fill of its only chunk: the two never run at the same time.
        let key = self.chunk_key(name, meta.version(), 0);
        let follower = match self.inner.filling.join(key) {
            Joined::Follower(follower) => {
                add(&self.stats().fills_joined, 1);
                follower
            }
            Joined::Leader(leader) => {
                let follower = leader.follower();
                let (engine, name, meta) = (self.clone(), name.clone(), meta.clone());
                request::spawn(async move {
                    // Another fetch may have finished between the look and the join.
                    let fetched = match engine.small_here(&name, &meta).await {
                        Ok(Some(data)) => Ok(data),
                        Ok(None) => engine.fetch_small(&name, &meta, key.elsewhere).await,
                        Err(e) => Err(e),
                    };
                    leader.publish(fetched);
                });
                follower
            }
        };
        Ok((follower.wait().await?, CacheStatus::Miss))
    }

    pub(crate) async fn small_here(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
    ) -> Result<Option<Bytes>> {
        let cached = self
            .cached(name)
            .await?
            .filter(|c| c.meta.version() == meta.version());
        Ok(cached.and_then(|c| c.data))
    }

    async fn fetch_small(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        elsewhere: bool,
    ) -> Result<Bytes> {
        let asked = self.asks(name);
        add(&self.stats().fills, 1);
        let fetched = async {
            let response = self
                .open_version(name, meta, 0..meta.size, elsewhere)
                .await?;
            let _share = self.share_of_peers(elsewhere).await?;
            let reservation = self.inner.budget.reserve(meta.size).await?;
            let data = Cutter::new(response.body).take(meta.size as usize).await?;
            let data = reserved(data, reservation);
            Ok((data, Arc::new(response.meta), response.age_secs))
        };
        let (data, current, age) = fetched
            .await
            .inspect_err(|_| add(&self.stats().fills_failed, 1))?;
        self.stats().from_origin(meta.size);
        match age {
            // Now the version is known to be current, as after any other answer.
            Some(_) => {
                self.keep_whole(name, asked.before(age), &current, &data, elsewhere)
                    .await?;
            }
            None => {
                self.keep_chunk(name, &current, current.version(), 0, &data, elsewhere)
                    .await;
            }
        }
        Ok(data)
    }

    /// A few bytes of one version straight from the origin, or from the disk if they are there;
    /// fetched bytes are not kept. For footers and headers, which are read once.
    ///
    /// # Errors
    /// As [`Engine::read_version`].
    pub async fn peek_version(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
    ) -> Result<Vec<u8>> {
        self.check_range(name, meta, &range)?;
        if self.may_have_version(name, meta, &range) {
            let (engine, owned, of, within) =
                (self.clone(), name.clone(), meta.clone(), range.clone());
            let found = crate::bytesio::blocking(move || {
                let mut out = Vec::new();
                let here = engine.append_version(&owned, &of, within, Wait::May, &mut out);
                (here == Ok(true)).then_some(out)
            });
            if let Some(found) = found.await? {
                return Ok(found);
            }
        }
        let length = range.end - range.start;
        // Other nodes would fetch and keep a whole chunk for it.
        let response = self.open_version(name, meta, range, false).await?;
        let out = Cutter::new(response.body).take(length as usize).await?;
        self.stats().from_origin(length);
        Ok(out)
    }
}
