//! The synchronous path for what is on the local disk: the batch's fast lane.
//!
//! [`Engine::append_warm`] appends an object, a range, or an archive member to the caller's buffer
//! if everything it needs is here and fresh, with no task switch, no request and no intermediate
//! copy. Otherwise the entry is `Cold`, and the caller takes the asynchronous path, which knows
//! about origins and errors.
//!
//! Invariant: on `Cold` the caller's buffer may have grown and must be cut back; on `Done` it holds
//! exactly the entry, of one version.

use crate::{
    Engine,
    fill::{chunk_range, chunks_of},
    members::{AUX_UNPACKED, bytes_around, extent_of},
    read::resolve_range,
    resolve::Currency,
};
use forebay_core::{
    ByteRange, CacheStatus, Error, ObjectMeta, ObjectName, Result, limits::CHUNK_BYTES,
};
use forebay_format::{ArchiveKind, Place, Storage};
use forebay_store::{Part, Store, Wait, WouldWait};
use std::{ops::Range, sync::Arc};

/// How much of one entry is brought to the disk ahead of its turn. A longer entry is streamed when
/// it is its turn.
const BRING_MAX_BYTES: u64 = 32 << 20;

/// An object, an archive member, or a range of either.
#[derive(Clone, Copy, Debug)]
pub struct WarmEntry<'a> {
    /// The object, or the archive that holds `member`.
    pub name: &'a ObjectName,
    /// The path of a member inside the archive `name`; `None` for the object itself.
    pub member: Option<&'a str>,
    /// A part of the object or member; `None` for all of it.
    pub range: Option<ByteRange>,
    /// What [`Engine::bring`] returned, if it was called for this read: the read then counts as
    /// that, not as a hit.
    pub brought: CacheStatus,
}

/// What an archive's header says about an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryHeader {
    /// Bytes of the entry: of its range, if it has one.
    pub size: u64,
    /// Seconds since the epoch: the object's time for whole objects, 0 for ranges and members.
    pub mtime_secs: i64,
}

impl EntryHeader {
    /// The header of `bytes` of an object; `is_range` if the request named a range, even one that
    /// covers the whole object.
    pub fn of_object(meta: &ObjectMeta, bytes: &Range<u64>, is_range: bool) -> Self {
        Self {
            size: bytes.end - bytes.start,
            mtime_secs: if is_range {
                0
            } else {
                meta.last_modified_ms.div_euclid(1000)
            },
        }
    }
}

/// The result of [`Engine::append_warm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Appended {
    /// The whole entry is in the buffer.
    Done(EntryHeader),
    /// Not here, not fresh, too large, damaged, or wrong: ask the asynchronous path.
    Cold,
    /// It would have to wait for the disk, and the caller must not.
    Waits,
}

/// Why an entry cannot be appended.
enum Not {
    Here,
    WithoutWaiting,
}

/// The asynchronous path reports what is wrong with the entry.
impl From<Error> for Not {
    fn from(_: Error) -> Self {
        Not::Here
    }
}

impl From<WouldWait> for Not {
    fn from(_: WouldWait) -> Self {
        Not::WithoutWaiting
    }
}

/// Where the bytes of an entry are.
struct Located {
    meta: Arc<ObjectMeta>,
    header: EntryHeader,
    bytes: Range<u64>,
    of: Parts,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Parts {
    /// The object itself, in its head's record.
    Inline,
    /// Chunks of the object.
    Chunks,
    /// Chunks of the archive's unpacked bytes.
    Unpacked,
}

impl Parts {
    fn part(self, index: u32) -> Part {
        match self {
            Parts::Unpacked => Part::Aux(AUX_UNPACKED, index),
            _ => Part::Chunk(index),
        }
    }
}

impl Engine {
    /// Appends the entry, after `before` has appended what goes in front of it. `Wait::May` is for
    /// threads that may block.
    pub fn append_warm(
        &self,
        entry: &WarmEntry<'_>,
        max_bytes: u64,
        wait: Wait,
        out: &mut Vec<u8>,
        before: &mut dyn FnMut(&EntryHeader, &mut Vec<u8>),
    ) -> Appended {
        let done = match entry.member {
            None => self.append_object(entry, max_bytes, wait, out, before),
            Some(_) => self
                .locate(entry, wait)
                .and_then(|l| self.append_located(entry.name, &l, max_bytes, wait, out, before)),
        };
        match done {
            Ok(header) => {
                self.stats().count_read(entry.brought);
                if entry.brought != CacheStatus::Miss {
                    self.stats().from_cache(header.size);
                }
                Appended::Done(header)
            }
            Err(Not::Here) => Appended::Cold,
            Err(Not::WithoutWaiting) => Appended::Waits,
        }
    }

    /// Whether [`Engine::append_warm`] or a read without any request will succeed, as far as is
    /// known without waiting for the disk.
    pub fn is_warm(&self, entry: &WarmEntry<'_>) -> bool {
        let Some(store) = self.store_for(entry.name) else {
            return false;
        };
        if entry.member.is_none()
            && let Some(peek) = store.peek(entry.name)
            && peek.inline
        {
            return self.is_fresh(entry.name, peek.validated_at_secs);
        }
        self.locate(entry, Wait::MustNot)
            .is_ok_and(|l| self.has_parts(entry.name, &l))
    }

    /// Whether what the entry needs will be found in the store once it is brought: as far as is
    /// known without waiting for the disk, and by its first byte.
    pub fn keeps_entry(&self, entry: &WarmEntry<'_>) -> bool {
        if !self.keeps_own(entry.name) || !self.inner.buckets.has_others() {
            return self.keeps_own(entry.name);
        }
        let first = match (entry.member, entry.range) {
            (None, Some(ByteRange::From(at) | ByteRange::Inclusive(at, _))) => at,
            (None, _) => 0,
            (Some(_), _) => self
                .locate(entry, Wait::MustNot)
                .map_or(0, |located| located.bytes.start),
        };
        self.keeps(entry.name, first)
    }

    /// Brings what the entry needs to the local disk (only the beginning of a long one), and
    /// returns its errors. The status is that of a read that would have done the same.
    pub async fn bring(&self, entry: WarmEntry<'_>) -> Result<CacheStatus> {
        let Some(member) = entry.member else {
            let resolved = self
                .resolve_for(entry.name, entry.range, Currency::ByRule)
                .await?;
            let bytes = resolve_range(entry.range, resolved.meta.size)
                .map_err(|e| e.context(entry.name))?;
            if resolved.data.is_none()
                && self.bring_chunks(entry.name, &resolved.meta, bytes).await?
            {
                return Ok(CacheStatus::Miss);
            }
            return Ok(resolved.status);
        };
        let found = self
            .find_member(entry.name, member, Currency::ByRule)
            .await?;
        let within = resolve_range(entry.range, found.extent.size)
            .map_err(|e| e.context(format_args!("{}/{member}", entry.name)))?;
        let fetched = match found.extent.place()? {
            Place::Archive(at) if found.data.is_none() => {
                self.bring_chunks(
                    entry.name,
                    &found.meta,
                    at.start + within.start..at.start + within.end,
                )
                .await?
            }
            place @ Place::ZipLocalHeader(_) if found.data.is_none() => {
                let bytes = bytes_around(&found.extent, place);
                self.bring_chunks(entry.name, &found.meta, bytes).await?
            }
            _ => false,
        };
        Ok(if fetched {
            CacheStatus::Miss
        } else {
            found.status
        })
    }

    /// Whether any of them was missing.
    pub(crate) async fn bring_chunks(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        bytes: Range<u64>,
    ) -> Result<bool> {
        if !self.keeps_own(name) || bytes.is_empty() {
            return Ok(false);
        }
        let bytes = bytes.start..bytes.end.min(bytes.start + BRING_MAX_BYTES);
        let chunks = chunks_of(&bytes);
        let until = *chunks.end() + 1;
        let mut fetched = false;
        for index in chunks {
            let one = chunk_range(index, meta.size);
            if !self.has_chunks(name, meta, &one) {
                if !self.keeps_own(name) {
                    return Ok(fetched);
                }
                if self.passes(name, meta, index) {
                    continue;
                }
                fetched = true;
                self.chunk(name, meta, index, 0..one.end - one.start, until)
                    .await?;
            }
        }
        Ok(fetched)
    }

    /// The entry's size and time, without its bytes. What it needs is brought along and reported as
    /// by [`Engine::bring`].
    pub async fn stat_entry(&self, entry: WarmEntry<'_>) -> Result<(EntryHeader, CacheStatus)> {
        if let Ok(located) = self.locate(&entry, Wait::MustNot) {
            return Ok((located.header, CacheStatus::Hit));
        }
        match entry.member {
            None => {
                let resolved = self
                    .resolve_for(entry.name, entry.range, Currency::ByRule)
                    .await?;
                let bytes = resolve_range(entry.range, resolved.meta.size)
                    .map_err(|e| e.context(entry.name))?;
                let fetched = resolved.data.is_none()
                    && self
                        .bring_chunks(entry.name, &resolved.meta, bytes.clone())
                        .await?;
                let status = if fetched {
                    CacheStatus::Miss
                } else {
                    resolved.status
                };
                Ok((
                    EntryHeader::of_object(&resolved.meta, &bytes, entry.range.is_some()),
                    status,
                ))
            }
            Some(member) => {
                let found = self
                    .find_member(entry.name, member, Currency::ByRule)
                    .await?;
                found.extent.place()?;
                let within = resolve_range(entry.range, found.extent.size)
                    .map_err(|e| e.context(format_args!("{}/{member}", entry.name)))?;
                let brought = self.bring(entry).await?;
                let status = if found.status == CacheStatus::Hit {
                    brought
                } else {
                    found.status
                };
                Ok((
                    EntryHeader {
                        size: within.end - within.start,
                        mtime_secs: 0,
                    },
                    status,
                ))
            }
        }
    }

    fn append_object(
        &self,
        entry: &WarmEntry<'_>,
        max_bytes: u64,
        wait: Wait,
        out: &mut Vec<u8>,
        before: &mut dyn FnMut(&EntryHeader, &mut Vec<u8>),
    ) -> Result<EntryHeader, Not> {
        let store = self.store_here(entry.name)?;
        if let Some(peek) = store.peek(entry.name)
            && peek.inline
        {
            if !self.is_fresh(entry.name, peek.validated_at_secs) {
                return Err(Not::Here);
            }
            let mut header = None;
            let found = store.append_inline(entry.name, wait, out, |meta, out| {
                let bytes = resolve_range(entry.range, meta.size).ok()?;
                let h = EntryHeader::of_object(meta, &bytes, entry.range.is_some());
                before(&h, out);
                header = Some(h);
                Some(bytes)
            })?;
            return found.and(header).ok_or(Not::Here);
        }
        self.append_located(
            entry.name,
            &self.locate(entry, wait)?,
            max_bytes,
            wait,
            out,
            before,
        )
    }

    fn append_located(
        &self,
        name: &ObjectName,
        located: &Located,
        max_bytes: u64,
        wait: Wait,
        out: &mut Vec<u8>,
        before: &mut dyn FnMut(&EntryHeader, &mut Vec<u8>),
    ) -> Result<EntryHeader, Not> {
        let Located {
            meta,
            header,
            bytes,
            of,
        } = located;
        if header.size > max_bytes || !self.has_parts(name, located) {
            return Err(Not::Here);
        }
        let store = self.store_here(name)?;
        if *of == Parts::Inline {
            let found = store.append_inline(name, wait, out, |now, out| {
                if now.version() != meta.version() {
                    return None;
                }
                before(header, out);
                Some(bytes.clone())
            })?;
            return found.map(|_| *header).ok_or(Not::Here);
        }
        before(header, out);
        self.append_parts(name, meta, *of, bytes, wait, out)?;
        Ok(*header)
    }

    /// Appends a range of an object's chunks, or of its unpacked bytes.
    fn append_parts(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        of: Parts,
        bytes: &Range<u64>,
        wait: Wait,
        out: &mut Vec<u8>,
    ) -> Result<(), Not> {
        if bytes.is_empty() {
            return Ok(());
        }
        let (store, version) = (self.store_here(name)?, meta.version());
        for index in chunks_of(bytes) {
            let start = u64::from(index) * CHUNK_BYTES;
            let within = bytes.start.max(start) - start..bytes.end.min(start + CHUNK_BYTES) - start;
            if !store.append_part(name, version, of.part(index), within, wait, out)? {
                return Err(Not::Here);
            }
        }
        Ok(())
    }

    /// Header, version and bytes of an entry that lies in an object's chunks, as far as that is known
    /// without waiting.
    pub(crate) fn chunks_of_entry(
        &self,
        entry: &WarmEntry<'_>,
    ) -> Option<(EntryHeader, Arc<ObjectMeta>, Range<u64>)> {
        let located = self.locate(entry, Wait::MustNot).ok()?;
        let is_there = located.of == Parts::Chunks;
        is_there.then_some((located.header, located.meta, located.bytes))
    }

    fn store_here(&self, name: &ObjectName) -> Result<&Arc<Store>, Not> {
        self.store_for(name).ok_or(Not::Here)
    }

    fn has_parts(&self, name: &ObjectName, located: &Located) -> bool {
        let Some(store) = self.store_for(name) else {
            return false;
        };
        match located.of {
            Parts::Inline => store.peek(name).is_some_and(|p| p.inline),
            of => {
                let version = located.meta.version();
                located.bytes.is_empty()
                    || chunks_of(&located.bytes).all(|i| store.has_part(name, version, of.part(i)))
            }
        }
    }

    /// Where the entry's bytes are, if that is known here and fresh: from RAM, or with one disk
    /// read for a head or an index.
    fn locate(&self, entry: &WarmEntry<'_>, wait: Wait) -> Result<Located, Not> {
        let store = self.store_here(entry.name)?;
        let (meta, validated_at_secs) = match self.inner.heads.get(entry.name) {
            Some(held) => held,
            None => {
                let generation = self.inner.generations.current(entry.name.hash128());
                let head = store.head(entry.name, wait)?.ok_or(Not::Here)?;
                self.remember_head(entry.name, generation, &head.meta, head.validated_at_secs);
                (head.meta, head.validated_at_secs)
            }
        };
        if !self.is_fresh(entry.name, validated_at_secs) {
            return Err(Not::Here);
        }
        let whole = if meta.size > CHUNK_BYTES {
            Parts::Chunks
        } else {
            Parts::Inline
        };
        let Some(member) = entry.member else {
            let bytes = resolve_range(entry.range, meta.size)?;
            let header = EntryHeader::of_object(&meta, &bytes, entry.range.is_some());
            return Ok(Located {
                meta,
                header,
                bytes,
                of: whole,
            });
        };
        let counts = self.repeated_members(entry.name);
        let extent = match self.found_here(entry.name, &meta, member, counts) {
            Some(found) => found?,
            None if wait == Wait::MustNot => return Err(Not::WithoutWaiting),
            None => {
                let index = self.index_here(entry.name, &meta).ok_or(Not::Here)?;
                extent_of(&index, entry.name, member, counts)?
            }
        };
        let within = resolve_range(entry.range, extent.size)?;
        let (base, of) = match extent.place()? {
            Place::Archive(at) => (at.start, whole),
            Place::Decompressed(at) => (at.start, Parts::Unpacked),
            Place::ZipLocalHeader(at) => {
                if extent.storage != Storage::Stored || extent.kind != ArchiveKind::Zip {
                    return Err(Not::Here);
                }
                (
                    extent
                        .zip_data_range(&self.bytes_here(entry.name, &meta, at, wait)?)?
                        .start,
                    whole,
                )
            }
        };
        let header = EntryHeader {
            size: within.end - within.start,
            mtime_secs: 0,
        };
        Ok(Located {
            meta,
            header,
            bytes: base + within.start..base + within.end,
            of,
        })
    }

    /// A few bytes of an object, if they are on the local disk.
    fn bytes_here(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        bytes: Range<u64>,
        wait: Wait,
    ) -> Result<Vec<u8>, Not> {
        let mut out = Vec::new();
        if meta.size > CHUNK_BYTES {
            self.append_parts(name, meta, Parts::Chunks, &bytes, wait, &mut out)?;
            return Ok(out);
        }
        let head = self.store_here(name)?.head(name, wait)?;
        let head = head.ok_or(Not::Here)?;
        let data = head
            .data
            .filter(|_| head.meta.version() == meta.version())
            .ok_or(Not::Here)?;
        out.extend_from_slice(
            data.get(bytes.start as usize..bytes.end as usize)
                .ok_or(Not::Here)?,
        );
        Ok(out)
    }
}
