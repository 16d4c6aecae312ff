//! Ranges of one version that the caller knows already, from a listing or an index: nothing is asked of the origin but the bytes.
//!
//! What an index is made of (a footer, a directory) is read *alone*: from the cache where it is there, otherwise straight from the origin, and kept
//! nowhere, so that opening ten thousand files does not bring ten thousand chunks of a MiB. What has to be gone through from front to back is read
//! *on*, through the cache and ahead.
//!
//! Invariant: every byte is of the version that was given, or the answer is `VersionChanged`. A listing knows no attributes, so its head is never kept.

use crate::{
    Engine, ReadOptions,
    fill::{Source, chunk_range, chunks_of},
    members::{LONE_HEADER_BYTES, SKIP_FROM_BYTES},
    read::Conditions,
    sequential::Runs,
    stats::add,
};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, ObjectMeta, ObjectName, Result, limits::CHUNK_BYTES};
use forebay_format::MemberIndex;
use futures::StreamExt;
use std::{ops::Range, sync::Arc};

/// Reads ranges of one version of an object.
pub struct VersionReader {
    engine: Engine,
    name: ObjectName,
    meta: Arc<ObjectMeta>,
    pass: Pass,
}

/// Where a pass from front to back is.
#[derive(Default)]
struct Pass {
    runs: Runs,
    /// Where the bytes end that were read.
    read_until: u64,
    /// The chunk that was read last; of a small object, all of it.
    last: Option<(u32, Bytes)>,
}

impl Engine {
    /// A reader of the version that `meta` (size and ETag, or size and time) tells.
    pub fn version_reader(&self, name: &ObjectName, meta: Arc<ObjectMeta>) -> VersionReader {
        VersionReader { engine: self.clone(), name: name.clone(), meta, pass: Pass::default() }
    }

    /// All members of one version of an archive.
    ///
    /// # Errors
    /// As [`Engine::members`]; `VersionChanged` if it is another version now.
    pub async fn members_of_version(&self, archive: &ObjectName, meta: &Arc<ObjectMeta>) -> Result<Arc<MemberIndex>> {
        if meta.size > CHUNK_BYTES {
            crate::members::kind_of(archive)?;
            return self.index(archive, meta, None).await;
        }
        let resolved = self.resolve_archive(archive).await?;
        if resolved.meta.version() != meta.version() {
            return Err(changed(archive));
        }
        self.index(archive, &resolved.meta, resolved.data.as_ref()).await
    }
}

impl VersionReader {
    /// A range by itself.
    ///
    /// # Errors
    /// `VersionChanged`, and whatever keeps the origin from answering.
    pub async fn alone(&self, range: Range<u64>) -> Result<Bytes> {
        self.check(&range)?;
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        if self.meta.size > CHUNK_BYTES && self.engine.has_chunks(&self.name, &self.meta, &range) {
            return self.chunks(range, None).await;
        }
        let _passing = self.engine.budget().reserve(range.end - range.start).await?;
        self.engine.bytes_past_cache(&self.name, &self.meta, range).await
    }

    /// A range on a way from front to back: what lies near the one before is read through the cache, ahead of the caller; what lies far is read alone.
    ///
    /// # Errors
    /// As [`VersionReader::alone`].
    pub async fn on(&mut self, range: Range<u64>) -> Result<Bytes> {
        self.check(&range)?;
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        if self.meta.size <= CHUNK_BYTES {
            return self.of_small(range).await;
        }
        let far = range.start > self.pass.read_until + SKIP_FROM_BYTES;
        self.pass.read_until = range.end;
        if far && range.end - range.start <= LONE_HEADER_BYTES && !self.engine.has_chunks(&self.name, &self.meta, &range) {
            return self.alone(range).await;
        }
        let mut pass = std::mem::take(&mut self.pass);
        let bytes = self.chunks(range, Some(&mut pass)).await;
        self.pass = pass;
        bytes
    }

    fn check(&self, range: &Range<u64>) -> Result<()> {
        if range.start > range.end || range.end > self.meta.size {
            return Err(Error::corrupt(format!("{}: bytes {range:?} are wanted, but it has {}", self.name, self.meta.size)));
        }
        Ok(())
    }

    /// A small object comes whole, by a read that asks for its head too, and is kept like any other.
    async fn of_small(&mut self, range: Range<u64>) -> Result<Bytes> {
        if self.pass.last.is_none() {
            let conditions = Conditions { if_match: self.meta.etag.clone(), ..Conditions::default() };
            let options = ReadOptions { conditions, uncounted: true, ..ReadOptions::default() };
            let mut read = self.engine.read(&self.name, None, &options).await.map_err(|e| match e.kind() {
                ErrorKind::PreconditionFailed => changed(&self.name),
                _ => e,
            })?;
            if read.meta.version() != self.meta.version() {
                return Err(changed(&self.name));
            }
            let mut whole = Vec::with_capacity(self.meta.size as usize);
            while let Some(piece) = read.body.next().await {
                whole.extend_from_slice(&piece?);
            }
            self.pass.last = Some((0, whole.into()));
        }
        let (_, whole) = self.pass.last.as_ref().ok_or_else(|| Error::internal("a small object was lost"))?;
        if (whole.len() as u64) < range.end {
            return Err(Error::origin_unavailable(format!("{}: the body ended {} bytes early", self.name, range.end - whole.len() as u64)));
        }
        Ok(whole.slice(range.start as usize..range.end as usize))
    }

    /// By chunks: from the cache, or into it. A pass from front to back holds the chunk that it is in, and has the next ones fetched.
    async fn chunks(&self, range: Range<u64>, pass: Option<&mut Pass>) -> Result<Bytes> {
        let Self { engine, name, meta, .. } = self;
        let until = meta.size.div_ceil(CHUNK_BYTES) as u32;
        let (mut out, mut pass) = (Vec::new(), pass);
        for index in chunks_of(&range) {
            let chunk = chunk_range(index, meta.size);
            let within = range.start.max(chunk.start) - chunk.start..range.end.min(chunk.end) - chunk.start;
            let bytes = match &mut pass {
                Some(Pass { last: Some((held, bytes)), .. }) if *held == index => bytes.slice(within.start as usize..within.end as usize),
                Some(pass) => {
                    if engine.keeps(name) {
                        pass.runs.read_ahead(engine, name, meta, index, until);
                    }
                    let whole = self.chunk(index, 0..chunk.end - chunk.start, until).await?;
                    pass.last = Some((index, whole.clone()));
                    whole.slice(within.start as usize..within.end as usize)
                }
                None => self.chunk(index, within, index + 1).await?,
            };
            if out.is_empty() && bytes.len() as u64 == range.end - range.start {
                return Ok(bytes);
            }
            out.extend_from_slice(&bytes);
        }
        Ok(out.into())
    }

    async fn chunk(&self, index: u32, within: Range<u64>, until: u32) -> Result<Bytes> {
        let (bytes, source) = self.engine.chunk(&self.name, &self.meta, index, within, until).await?;
        if source == Source::Cache {
            add(&self.engine.stats().bytes_from_cache, bytes.len() as u64);
        }
        Ok(bytes)
    }
}

fn changed(name: &ObjectName) -> Error {
    Error::version_changed(format!("{name} is another version than the one that was asked for")).hint("open the dataset again")
}
