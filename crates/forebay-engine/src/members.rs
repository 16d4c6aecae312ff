//! Members of archives: found by an index that is built once per version of the archive, and read
//! as ranges of it.
//!
//! Where the first member of a name counts, it is read before the index is complete (`early.rs`).
//!
//! An index comes from RAM, from the store, from the archive flowing by for another reason, or from
//! reading the archive for it. That reading follows the indexer: tars are read chunk by chunk, or,
//! if the next header is far away, with a small request for the header alone; zips are read from
//! their directory at the end. Compressed tars are unpacked into the store while they are indexed
//! (`unpack.rs`), so that their members can be read at random afterwards.
//!
//! Invariant: an index is kept under the version that it was built from, and used only with that
//! version.

use crate::{
    Engine, Joined, Read, ReadOptions,
    bytesio::{blocking, reserved},
    cache::BoundedCache,
    early::Firsts,
    fill::{Source, chunk_range, chunks_of},
    passing::PassingScan,
    read::resolve_range,
    resolve::{Currency, Resolved},
    sequential::Runs,
    stats::add,
};
use bytes::Bytes;
use forebay_core::{
    ByteRange, CacheStatus, Error, ErrorKind, MemoryBudget, ObjectMeta, ObjectName, Reservation,
    Result, VersionId, limits::CHUNK_BYTES, name::shorten, request,
};
use forebay_format::{
    ArchiveKind, Extent, Indexer, MemberDecoder, MemberIndex, Place, Repeated, ScanStep, Storage,
};
use forebay_origin::ByteStream;
use forebay_store::{Part, Wait};
use futures::{StreamExt, stream};
use std::{ops::Range, sync::Arc};

/// Kinds of derived parts in the store.
pub const AUX_INDEX: u8 = 1;
pub(crate) const AUX_UNPACKED: u8 = 2;

/// A next header at least this far away is fetched alone; if it is nearer, the bytes between are
/// read too. At a round trip of 30 ms and 100 MiB/s both cost the same here, and the bytes read are
/// then in the cache.
const SKIP_FROM_BYTES: u64 = 4 * CHUNK_BYTES;
/// How much is fetched for a header alone: the header, and a long name or PAX records after it.
const LONE_HEADER_BYTES: u64 = 4096;
/// How much of a run is left when a pass over a tar requests the next one, if other fills use the
/// whole line. While both runs are on their way, it takes the share of two.
const FULL_LINE_CHUNKS: u32 = 1;
/// How many archives with repeated names are remembered, so that each is logged once.
const TOLD_MAX: u64 = 4096;
/// The least memory that an index which is being built takes at a time.
const BUILDING_STEP_BYTES: u64 = 16 << 10;
/// The output of one inflating step.
const INFLATE_PIECE_BYTES: usize = 256 << 10;
/// The same without memory of its own, when none is left: a reader holds bytes that others may wait
/// for, so it must not wait itself.
const INFLATE_SPARE_BYTES: usize = 16 << 10;

/// Indexes in RAM, by name and version.
pub(crate) struct IndexCache {
    kept: BoundedCache<(u128, VersionId), Arc<MemberIndex>>,
    /// The last archives with repeated names that were logged.
    told: BoundedCache<(u128, VersionId), ()>,
}

impl IndexCache {
    pub(crate) fn new(max_bytes: u64) -> Self {
        Self {
            kept: BoundedCache::new(max_bytes),
            told: BoundedCache::new(TOLD_MAX),
        }
    }

    pub(crate) fn get(&self, name: &ObjectName, version: VersionId) -> Option<Arc<MemberIndex>> {
        self.kept.get(&(name.hash128(), version))
    }

    fn insert(&self, name: &ObjectName, version: VersionId, index: Arc<MemberIndex>) {
        let cost = index.memory_bytes() as u64;
        self.kept.insert((name.hash128(), version), index, cost);
    }
}

/// A member, or a range of it, being read.
pub struct MemberRead {
    /// The archive's metadata.
    pub archive: Arc<ObjectMeta>,
    /// Bytes of the whole member.
    pub size: u64,
    /// The range within the member that `body` yields.
    pub range: Range<u64>,
    /// How the answer came to be: the value of `X-Cache`.
    pub cache: CacheStatus,
    /// The bytes of `range`, in order.
    pub body: ByteStream,
}

/// An archive as a whole.
#[derive(Clone, Debug)]
pub struct Archive {
    /// The metadata of the version that `members` belong to.
    pub meta: Arc<ObjectMeta>,
    /// All members, in the archive's order.
    pub members: Arc<MemberIndex>,
    /// Whether the version was known here.
    pub cache: CacheStatus,
}

/// An index as the store keeps it.
struct StoredIndex {
    /// With the length in front of it.
    framed_bytes: u64,
    /// To read it and to decode it.
    memory_bytes: u64,
}

/// A member that was looked up, and the archive's bytes where they came along.
pub(crate) struct Found {
    pub meta: Arc<ObjectMeta>,
    pub status: CacheStatus,
    pub data: Option<Bytes>,
    pub extent: Extent,
}

impl Engine {
    /// All members of an archive, in its order.
    ///
    /// # Errors
    /// `Unsupported` if neither the name nor the first bytes are those of an archive, `Corrupt` if
    /// it cannot be parsed, and as [`Engine::read`].
    pub async fn members(
        &self,
        archive: &ObjectName,
        options: &ReadOptions,
    ) -> Result<Arc<MemberIndex>> {
        Ok(self.archive(archive, options).await?.members)
    }

    /// An archive's members, and the version that they belong to.
    ///
    /// # Errors
    /// As [`Engine::members`].
    pub async fn archive(&self, archive: &ObjectName, options: &ReadOptions) -> Result<Archive> {
        let currency = currency_of(options);
        let Resolved {
            meta, status, data, ..
        } = self.resolve_archive(archive, currency).await?;
        options.conditions.check_read(&meta, status)?;
        let members = self.index(archive, &meta, data.as_ref()).await?;
        Ok(Archive {
            meta,
            members,
            cache: status,
        })
    }

    /// Reads one member, or a range of it. Conditions apply to the archive.
    ///
    /// # Errors
    /// `NotFound` if the archive or the member does not exist, `Unsupported` if it is not an
    /// archive or the member is not a file, and as [`Engine::read`].
    pub async fn read_member(
        &self,
        archive: &ObjectName,
        member: &str,
        range: Option<ByteRange>,
        options: &ReadOptions,
    ) -> Result<MemberRead> {
        let mut starts = 0;
        let read = loop {
            match self.read_member_once(archive, member, range, options).await {
                Err(e) if e.kind() == ErrorKind::VersionChanged && starts < 3 => starts += 1,
                done => break done,
            }
        };
        match &read {
            _ if options.uncounted => {}
            Ok(read) => self.stats().count_read(options.counts_as(read.cache)),
            Err(e) if e.kind() == ErrorKind::NotModified => {}
            Err(_) => add(&self.stats().reads_failed, 1),
        }
        read
    }

    async fn read_member_once(
        &self,
        archive: &ObjectName,
        member: &str,
        range: Option<ByteRange>,
        options: &ReadOptions,
    ) -> Result<MemberRead> {
        let currency = currency_of(options);
        let found = self.find_member(archive, member, currency).await?;
        options.conditions.check_read(&found.meta, found.status)?;
        self.open_member(archive, member, found, range).await
    }

    /// Reads a member, or a range of it, that an index of this version of the archive has told of:
    /// of that version or not at all. `member` is its name, for errors.
    ///
    /// # Errors
    /// `VersionChanged` if bytes are missing here and the origin has another version now, and as
    /// [`Engine::read_member`].
    pub async fn read_member_of_version(
        &self,
        archive: &ObjectName,
        meta: &Arc<ObjectMeta>,
        member: (&str, &Extent),
        range: Option<ByteRange>,
        options: &ReadOptions,
    ) -> Result<MemberRead> {
        let (name, extent) = member;
        let read = async {
            let found = Found {
                meta: meta.clone(),
                status: CacheStatus::Hit,
                data: self.small_data(archive, meta).await?,
                extent: *extent,
            };
            self.open_member(archive, name, found, range).await
        };
        let read = read.await;
        match &read {
            _ if options.uncounted => {}
            Ok(read) => self.stats().count_read(options.counts_as(read.cache)),
            Err(_) => add(&self.stats().reads_failed, 1),
        }
        read
    }

    /// Brings what [`Engine::read_member_of_version`] needs to the local disk, of a long member its
    /// beginning.
    ///
    /// # Errors
    /// As that.
    pub async fn bring_member_of_version(
        &self,
        archive: &ObjectName,
        meta: &Arc<ObjectMeta>,
        extent: &Extent,
    ) -> Result<CacheStatus> {
        let bytes = match extent.place()? {
            // What is unpacked is so as a whole, by the first who reads of it.
            Place::Decompressed(_) => return Ok(CacheStatus::Hit),
            place => bytes_around(extent, place),
        };
        let fetched = match meta.size {
            0..=CHUNK_BYTES => return self.bring_version(archive, meta, bytes).await,
            _ => self.bring_chunks(archive, meta, bytes).await?,
        };
        Ok(match fetched {
            true => CacheStatus::Miss,
            false => CacheStatus::Hit,
        })
    }

    /// Whether [`Engine::read_member_of_version`] needs no request, as far as can be said without
    /// waiting for the disk.
    pub fn has_member_of_version(
        &self,
        archive: &ObjectName,
        meta: &ObjectMeta,
        extent: &Extent,
    ) -> bool {
        match extent.place() {
            Err(_) => false,
            Ok(Place::Decompressed(at)) => self.has_unpacked(archive, meta, &at),
            Ok(place) => {
                let bytes = bytes_around(extent, place);
                self.store_for(archive).is_some() && self.may_have_version(archive, meta, &bytes)
            }
        }
    }

    async fn open_member(
        &self,
        archive: &ObjectName,
        member: &str,
        found: Found,
        range: Option<ByteRange>,
    ) -> Result<MemberRead> {
        let Found {
            meta,
            status,
            data,
            extent,
        } = found;
        let within = resolve_range(range, extent.size)
            .map_err(|e| e.context(format_args!("{archive}/{member}")))?;
        let of = |at: &Range<u64>| at.start + within.start..at.start + within.end;
        let open = |bytes: Range<u64>| {
            let resolved = Resolved {
                meta: meta.clone(),
                at_secs: 0,
                status,
                data: data.clone(),
                passing: None,
            };
            async move { self.open(archive, resolved, bytes).await }
        };
        let Read { cache, body, .. } = match extent
            .place()
            .map_err(|e| e.context(format_args!("{archive}/{member}")))?
        {
            Place::Archive(at) => open(of(&at)).await?,
            Place::Decompressed(at) => {
                self.open_unpacked(archive, &meta, status, data.clone(), of(&at))
                    .await?
            }
            Place::ZipLocalHeader(at) => {
                let header = self.bytes_of(archive, &meta, data.as_ref(), at).await?;
                let at = extent
                    .zip_data_range(&header)
                    .map_err(|e| e.context(archive))?;
                // It holds a chunk whose memory the data may need.
                drop(header);
                match extent.storage {
                    Storage::Stored => open(of(&at)).await?,
                    _ => {
                        let mut read = open(at).await?;
                        let budget = self.inner.budget.clone();
                        read.body = decoded(read.body, extent, within.clone(), budget)?;
                        read
                    }
                }
            }
        };
        Ok(MemberRead {
            archive: meta,
            size: extent.size,
            range: within,
            cache,
            body,
        })
    }

    /// Looks a member up, building the index if necessary.
    pub(crate) async fn find_member(
        &self,
        archive: &ObjectName,
        member: &str,
        currency: Currency,
    ) -> Result<Found> {
        let Resolved {
            meta, status, data, ..
        } = self.resolve_archive(archive, currency).await?;
        let extent = match self.repeated_members(archive) {
            Repeated::First => {
                self.first_of_name(archive, &meta, data.as_ref(), member)
                    .await
            }
            Repeated::Last => {
                let index = self.index(archive, &meta, data.as_ref()).await?;
                extent_of(&index, archive, member, Repeated::Last)
            }
        };
        Ok(Found {
            meta,
            status,
            data,
            extent: extent?,
        })
    }

    /// Which member of `archive` counts if several have the same name.
    pub fn repeated_members(&self, archive: &ObjectName) -> Repeated {
        self.rule(archive.bucket()).repeated_members
    }

    async fn resolve_archive(&self, archive: &ObjectName, currency: Currency) -> Result<Resolved> {
        match ArchiveKind::from_name(archive.key()) {
            // The directory is at the end: do not fetch a first chunk that nobody wants.
            Some(ArchiveKind::Zip) => {
                let end = Some(ByteRange::Suffix(1));
                self.resolve_for(archive, end, currency).await
            }
            // Without an extension, the first bytes tell what it is.
            Some(ArchiveKind::Tar) | None => self.resolve(archive, 0..CHUNK_BYTES, currency).await,
            Some(ArchiveKind::TarGz | ArchiveKind::TarLz4) => {
                self.resolve(archive, 0..u64::MAX, currency).await
            }
        }
    }

    /// Judges by the name; if that has no archive's extension, by the first bytes.
    ///
    /// # Errors
    /// `Unsupported` if neither is that of an archive, and as [`Engine::read`].
    pub(crate) async fn archive_kind(
        &self,
        archive: &ObjectName,
        meta: &Arc<ObjectMeta>,
        data: Option<&Bytes>,
    ) -> Result<ArchiveKind> {
        if let Some(kind) = ArchiveKind::from_name(archive.key()) {
            return Ok(kind);
        }
        let magic = 0..meta.size.min(ArchiveKind::MAGIC_BYTES as u64);
        let kind = match magic.is_empty() {
            true => None,
            false => ArchiveKind::from_magic(&self.bytes_of(archive, meta, data, magic).await?),
        };
        kind.ok_or_else(|| {
            Error::unsupported(format!(
                "{archive} is not an archive: neither its name nor its first bytes are those of one"
            ))
            .hint("archives are tar, tar.gz, tar.lz4 and zip")
        })
    }

    /// The index of one version, from the fastest source.
    pub(crate) async fn index(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        data: Option<&Bytes>,
    ) -> Result<Arc<MemberIndex>> {
        let version = meta.version();
        if let Some(index) = self.inner.indexes.get(name, version) {
            return Ok(index);
        }
        match self.inner.indexing.join((name.hash128(), version)) {
            Joined::Follower(follower) => follower.wait().await,
            Joined::Leader(leader) => {
                let follower = leader.follower();
                let (engine, name, meta, data) =
                    (self.clone(), name.clone(), meta.clone(), data.cloned());
                request::spawn(async move {
                    let index = engine.load_or_build(&name, &meta, data).await;
                    if let Ok(index) = &index {
                        engine.remember_index(&name, meta.version(), index);
                    }
                    leader.publish(index);
                });
                follower.wait().await
            }
        }
    }

    async fn load_or_build(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        data: Option<Bytes>,
    ) -> Result<Arc<MemberIndex>> {
        if let Some(index) = self.load_index(name, meta).await? {
            return Ok(index);
        }
        let kind = self.archive_kind(name, meta, data.as_ref()).await?;
        // Only the directory of a zip is read, and small archives came with their head.
        let _place = match (kind, &data) {
            (ArchiveKind::Zip, _) | (_, Some(_)) => None,
            _ => self.inner.passes.acquire().await.ok(),
        };
        let index = Arc::new(match kind {
            ArchiveKind::TarGz | ArchiveKind::TarLz4 => self.unpack(name, meta, data).await?,
            kind => self.build_index(name, meta, data, kind).await?,
        });
        add(&self.stats().indexes_built, 1);
        self.keep_index(name, meta, index.clone()).await?;
        Ok(index)
    }

    async fn build_index(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        data: Option<Bytes>,
        kind: ArchiveKind,
    ) -> Result<MemberIndex> {
        let mut indexer = Indexer::new(kind, meta.size);
        let (mut read_until, mut runs) = (0, Runs::default());
        let mut passing = PassingScan::default();
        // What other formats say of a member holds only when the whole directory was checked.
        let tells = kind == ArchiveKind::Tar;
        let by_name = tells && self.repeated_members(name) == Repeated::First;
        let (early, mut firsts) = (&self.inner.early, by_name.then(Firsts::default));
        let mut building = Building::default();
        while let ScanStep::Need(range) = indexer.step().map_err(|e| e.context(name))? {
            let far = range.start > read_until + SKIP_FROM_BYTES;
            let here =
                || data.is_some() || self.has_chunks(name, meta, &(range.start..range.start + 1));
            // Only the directory of a zip is read now; the chunks around it are not worth keeping.
            let alone = match kind {
                ArchiveKind::Zip => {
                    meta.size > CHUNK_BYTES && range.end - range.start <= CHUNK_BYTES && !here()
                }
                _ => far && kind == ArchiveKind::Tar && !here(),
            };
            let end = match kind {
                ArchiveKind::Zip if alone => range.end,
                _ if alone => range.end.max(range.start + LONE_HEADER_BYTES),
                // The rest of the chunk, which was read for it anyway and holds a tar's next
                // headers.
                ArchiveKind::Tar => (range.start / CHUNK_BYTES + 1) * CHUNK_BYTES,
                _ => range.end.min(range.start + CHUNK_BYTES),
            };
            let wanted = range.start..end.min(meta.size);
            if kind == ArchiveKind::Tar && !alone {
                // Members are small: the pass reads on, so the next run is fetched while this one
                // is parsed. Only the store keeps it. If other fills already use the whole line, an
                // early request would take bandwidth from what is needed first. It is made shortly
                // before this run ends: a pass that waited for the end would fall behind the others
                // by a round trip, and what needs all of them would wait for it.
                let full = self.inner.filling.len() >= 2 * self.run_chunks() as usize;
                let half = self.run_chunks() / 2;
                let left = if full {
                    half.min(FULL_LINE_CHUNKS)
                } else {
                    half
                };
                if !far && data.is_none() && self.keeps_own(name) {
                    let until = meta.size.div_ceil(CHUNK_BYTES) as u32;
                    let chunk = (range.start / CHUNK_BYTES) as u32;
                    runs.read_ahead(self, name, meta, chunk, until, left);
                }
            }
            let bytes = async {
                if alone {
                    return self.bytes_past_cache(name, meta, wanted).await;
                }
                if kind == ArchiveKind::Tar
                    && data.is_none()
                    && let Some(bytes) = passing.next(self, name, meta, wanted.clone()).await?
                {
                    return Ok(bytes);
                }
                self.bytes_of(name, meta, data.as_ref(), wanted).await
            };
            let bytes = match tells {
                true => {
                    let found = indexer.found();
                    early
                        .tell_while(name, meta.version(), found, &mut firsts, bytes)
                        .await?
                }
                false => bytes.await?,
            };
            read_until = range.start + bytes.len() as u64;
            if let Err(e) = indexer.feed(range.start, &bytes) {
                // What lies before the damage is there.
                if tells {
                    early.tell(name, meta.version(), indexer.found(), &mut firsts);
                }
                return Err(e.context(name));
            }
            building.takes(indexer.memory_bytes() as u64, &self.inner.budget);
        }
        // Of a large archive it takes its time.
        let finished = blocking(move || indexer.finish()).await?;
        finished.map_err(|e| e.context(name))
    }

    /// Some bytes of one version: at most two chunks' worth.
    pub(crate) async fn bytes_of(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        data: Option<&Bytes>,
        range: Range<u64>,
    ) -> Result<Bytes> {
        if range.is_empty() || range.end > meta.size {
            return Err(Error::corrupt(format!(
                "{name}: bytes {range:?} were requested, but it has {} bytes",
                meta.size
            )));
        }
        if let Some(data) = data {
            return Ok(data.slice(range.start as usize..range.end as usize));
        }
        let mut out: Vec<u8> = Vec::new();
        // A scan goes on after these bytes: a fill that starts here may run as far as one request
        // may.
        let wanted_until = meta.size.div_ceil(CHUNK_BYTES) as u32;
        for index in chunks_of(&range) {
            let chunk = chunk_range(index, meta.size);
            let within =
                range.start.max(chunk.start) - chunk.start..range.end.min(chunk.end) - chunk.start;
            let (bytes, source) = self.chunk(name, meta, index, within, wanted_until).await?;
            if source == Source::Cache {
                self.stats().from_cache(bytes.len() as u64);
            }
            if out.is_empty() && bytes.len() as u64 == range.end - range.start {
                return Ok(bytes);
            }
            out.extend_from_slice(&bytes);
        }
        Ok(out.into())
    }

    /// A few bytes straight from the origin, not kept.
    async fn bytes_past_cache(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
    ) -> Result<Bytes> {
        // Other nodes would fetch and keep a whole chunk for it.
        let response = self.open_version(name, meta, range.clone(), false).await?;
        let bytes = crate::bytesio::Cutter::new(response.body)
            .take((range.end - range.start) as usize)
            .await?;
        self.stats().from_origin(bytes.len() as u64);
        Ok(bytes.into())
    }

    /// The index as far as it is on this node: from RAM, or with some disk reads. For threads that
    /// may stand still: a large index takes its time to be decoded, too. Where no memory is free for
    /// that, it is not here: whoever can wait for memory does so in [`Engine::index`].
    pub(crate) fn index_here(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
    ) -> Option<Arc<MemberIndex>> {
        if let Some(index) = self.inner.indexes.get(name, meta.version()) {
            return Some(index);
        }
        let stored = self.stored_index(name, meta)?;
        let _memory = self.inner.budget.try_hold(stored.memory_bytes).ok()?;
        self.index_from_store(name, meta, &stored)
    }

    /// The index that the store keeps of this version, once there is memory for it.
    async fn load_index(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
    ) -> Result<Option<Arc<MemberIndex>>> {
        let (engine, owned, of) = (self.clone(), name.clone(), meta.clone());
        let Some(stored) = blocking(move || engine.stored_index(&owned, &of)).await? else {
            return Ok(None);
        };
        let budget = &self.inner.budget;
        // One that is larger than that cannot be had any smaller.
        let bytes = stored.memory_bytes.min(budget.total_bytes() / 2);
        let memory = budget
            .reserve(bytes)
            .await
            .map_err(|e| e.context(format_args!("the index of {name}")).naming())?;
        let (engine, owned, of) = (self.clone(), name.clone(), meta.clone());
        blocking(move || {
            let _memory = memory;
            engine.index_from_store(&owned, &of, &stored)
        })
        .await
    }

    /// How large the index is that the store keeps of this version. Reads the disk.
    fn stored_index(&self, name: &ObjectName, meta: &ObjectMeta) -> Option<StoredIndex> {
        let (store, version) = (self.store_for(name)?, meta.version());
        let first = Part::Aux(AUX_INDEX, 0);
        if !store.has_part(name, version, first) {
            return None;
        }
        let begin = |len: u64| {
            let read = store.part(name, version, first, 0..len, Wait::May);
            read.unwrap_or_default()
        };
        // The first piece begins with the length of all.
        let length = u64::from_le_bytes(begin(8)?.as_ref().try_into().ok()?);
        let framed_bytes = length.checked_add(8)?;
        let header = MemberIndex::ENCODED_HEADER_MAX_BYTES as u64 + 8;
        let beginning = begin(header.min(framed_bytes))?;
        let decoded = MemberIndex::memory_to_decode(beginning.get(8..)?)?;
        Some(StoredIndex {
            framed_bytes,
            memory_bytes: framed_bytes
                .checked_add(CHUNK_BYTES.min(framed_bytes))?
                .checked_add(decoded)?,
        })
    }

    fn index_from_store(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        stored: &StoredIndex,
    ) -> Option<Arc<MemberIndex>> {
        let (store, version) = (self.store_for(name)?, meta.version());
        let total = stored.framed_bytes;
        let mut encoded = Vec::with_capacity(usize::try_from(total).ok()?);
        for i in 0..total.div_ceil(CHUNK_BYTES) {
            let part = Part::Aux(AUX_INDEX, u32::try_from(i).ok()?);
            let len = CHUNK_BYTES.min(total - i * CHUNK_BYTES);
            let read = store.part(name, version, part, 0..len, Wait::May);
            encoded.extend_from_slice(&read.unwrap_or_default()?);
        }
        let index = Arc::new(MemberIndex::decode(&encoded[8..]).ok()?);
        add(&self.stats().indexes_loaded, 1);
        self.remember_index(name, version, &index);
        Some(index)
    }

    /// Keeps an index in RAM. An archive in which several members have the same name is logged and
    /// counted, once: all but one of them cannot be read by it.
    fn remember_index(&self, name: &ObjectName, version: VersionId, index: &Arc<MemberIndex>) {
        let (indexes, archive) = (&self.inner.indexes, (name.hash128(), version));
        indexes.insert(name, version, index.clone());
        if indexes.told.get(&archive).is_some() {
            return;
        }
        let Some((count, one)) = index.repeated() else {
            return;
        };
        indexes.told.insert(archive, (), 1);
        add(&self.stats().indexes_with_repeated_names, 1);
        let counts = match self.repeated_members(name) {
            Repeated::First => "first",
            Repeated::Last => "last",
        };
        tracing::warn!(
            archive = %name,
            names = count,
            example = %shorten(one),
            counts,
            "several members have the same name: repeated_members says which counts"
        );
    }

    async fn keep_index(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        index: Arc<MemberIndex>,
    ) -> Result<()> {
        let Some(store) = self.store_for(name).cloned() else {
            return Ok(());
        };
        let (engine, name, version) = (self.clone(), name.clone(), meta.version());
        // What is written is smaller than the index. This does not wait for memory either: whoever
        // asked for the index waits for it.
        let memory = self.inner.budget.try_hold(index.memory_bytes() as u64);
        blocking(move || {
            let _memory = memory;
            let encoded = index.encode();
            let length = (encoded.len() as u64).to_le_bytes();
            let begin = encoded.len().min(CHUNK_BYTES as usize - length.len());
            let (begin, rest) = encoded.split_at(begin);
            let put = |i: u32, piece: &[u8]| {
                store.put_part(&name, version, Part::Aux(AUX_INDEX, i), piece)
            };
            // Readers look for piece 0: it is written last.
            let kept = (1..)
                .zip(rest.chunks(CHUNK_BYTES as usize))
                .try_for_each(|(i, piece)| put(i, piece))
                .and_then(|()| put(0, &[&length[..], begin].concat()));
            engine.note_write(&name, Some(kept));
        })
        .await
    }

    /// Builds the index of a tar from a body that flows by, from its first byte to its last.
    pub(crate) fn index_in_passing(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        body: ByteStream,
    ) -> ByteStream {
        let version = meta.version();
        let unknown = ArchiveKind::from_name(name.key()) == Some(ArchiveKind::Tar)
            && self.inner.indexes.get(name, version).is_none()
            && self
                .store_for(name)
                .is_some_and(|s| !s.has_part(name, version, Part::Aux(AUX_INDEX, 0)));
        if !unknown {
            return body;
        }
        let scan = InPassing {
            indexer: Indexer::new(ArchiveKind::Tar, meta.size),
            memory: Building::default(),
        };
        let state = (body, Some(scan), self.clone(), name.clone(), meta.clone());
        stream::unfold(state, |(mut body, mut scan, engine, name, meta)| async move {
            match body.next().await {
                Some(Ok(piece)) => {
                    let budget = &engine.inner.budget;
                    if scan.as_mut().is_some_and(|s| !s.push(&piece, budget)) {
                        scan = None;
                    }
                    Some((Ok(piece), (body, scan, engine, name, meta)))
                }
                Some(Err(e)) => Some((Err(e), (body, None, engine, name, meta))),
                None => {
                    if let Some(scan) = scan
                        && let Err(e) = engine.keep_in_passing(&name, &meta, scan).await
                    {
                        tracing::debug!(object = %name, error = %e.describe(), "an index was not kept");
                    }
                    None
                }
            }
        })
        .boxed()
    }

    /// Keeps what was found in a tar that has flowed by as a whole, if that is all of it.
    async fn keep_in_passing(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        scan: InPassing,
    ) -> Result<()> {
        let InPassing { indexer, memory } = scan;
        let (engine, owned, version) = (self.clone(), name.clone(), meta.version());
        let finished = blocking(move || {
            let index = Arc::new(indexer.finish().ok()?);
            engine.remember_index(&owned, version, &index);
            Some((index, memory))
        });
        if let Some((index, _memory)) = finished.await? {
            add(&self.stats().indexes_built_in_passing, 1);
            self.keep_index(name, meta, index).await?;
        }
        Ok(())
    }
}

/// An index that is built from a body which flows by, and the memory that it takes.
struct InPassing {
    indexer: Indexer,
    memory: Building,
}

impl InPassing {
    /// Indexes the next bytes. Returns `false` if the indexing should stop: the tar cannot be parsed,
    /// or the budget has no memory left. The index is then built once a member is asked for. This does
    /// not wait for memory, since the reader of the body holds bytes that others may wait for.
    fn push(&mut self, piece: &[u8], budget: &MemoryBudget) -> bool {
        let is_pushed = self.indexer.push(piece).is_ok();
        is_pushed
            && self
                .memory
                .takes(self.indexer.memory_bytes() as u64, budget)
    }
}

/// The memory of an index that is being built. The build does not wait for memory, because others wait
/// for the index and may hold some; what the budget lacks is not counted.
#[derive(Debug, Default)]
pub(crate) struct Building(Vec<Reservation>);

impl Building {
    /// Takes what is lacking of so much. Whether the budget had it.
    pub(crate) fn takes(&mut self, bytes: u64, budget: &MemoryBudget) -> bool {
        let held: u64 = self.0.iter().map(Reservation::bytes).sum();
        let lacking = bytes.saturating_sub(held);
        if lacking == 0 {
            return true;
        }
        // In steps that grow with it, or there would be a great many.
        let more = lacking.max(held / 4).max(BUILDING_STEP_BYTES);
        let granted = budget.try_hold(more);
        let is_granted = granted.is_ok();
        self.0.extend(granted);
        is_granted
    }
}

/// Where the member of this name is that counts.
pub(crate) fn extent_of(
    index: &MemberIndex,
    archive: &ObjectName,
    member: &str,
    counts: Repeated,
) -> Result<Extent> {
    let member = index.readable_by(member, counts);
    Ok(member.map_err(|e| e.context(archive))?.extent)
}

/// A read that bypasses the cache still needs an index, which is kept: it belongs to the version
/// that the origin has now.
fn currency_of(options: &ReadOptions) -> Currency {
    match options.bypass {
        true => Currency::Latest,
        false => options.currency(),
    }
}

/// The bytes of the archive that a member which is not decompressed as a whole takes: of a zip's, from
/// its local header on. (That header's own length is in the header; the data follow it closely.)
pub(crate) fn bytes_around(extent: &Extent, place: Place) -> Range<u64> {
    match place {
        Place::Archive(at) | Place::Decompressed(at) => at,
        Place::ZipLocalHeader(header) => {
            header.start..(header.end + extent.stored_size + 1024).min(extent.bound)
        }
    }
}

/// A member that is inflated on its way.
struct Inflating {
    body: ByteStream,
    decoder: MemberDecoder,
    input: Bytes,
    within: Range<u64>,
    budget: MemoryBudget,
}

/// Inflates a member while it is read, checks it, and cuts it to the wanted range. What comes after
/// the range is neither read nor checked.
fn decoded(
    body: ByteStream,
    extent: Extent,
    within: Range<u64>,
    budget: MemoryBudget,
) -> Result<ByteStream> {
    let whole = within == (0..extent.size);
    let state = Inflating {
        body,
        decoder: MemberDecoder::new(&extent)?,
        input: Bytes::new(),
        within,
        budget,
    };
    Ok(stream::try_unfold(Some(state), move |state| async move {
        let Some(mut s) = state else { return Ok(None) };
        loop {
            if !whole && s.decoder.total_out() >= s.within.end {
                return Ok(None);
            }
            if s.input.is_empty() {
                match s.body.next().await {
                    Some(piece) => s.input = piece?,
                    None => {
                        s.decoder.finish()?;
                        return Ok(None);
                    }
                }
            }
            let (start, mut out) = (s.decoder.total_out(), Vec::new());
            let held = s.budget.try_hold(INFLATE_PIECE_BYTES as u64).ok();
            let most = match held {
                Some(_) => INFLATE_PIECE_BYTES,
                None => INFLATE_SPARE_BYTES,
            };
            let done = s.decoder.push(&s.input, &mut out, most)?;
            s.input = s.input.slice(done.consumed..);
            if done.consumed == 0 && done.produced == 0 && !s.input.is_empty() {
                return Err(Error::corrupt("bytes follow the end of the member"));
            }
            let end = start + out.len() as u64;
            let (from, to) = (
                s.within.start.clamp(start, end),
                s.within.end.clamp(start, end),
            );
            if from < to {
                let piece = match held {
                    Some(mut held) => {
                        held.shrink(out.capacity() as u64);
                        reserved(out, held)
                    }
                    None => Bytes::from(out),
                };
                let piece = piece.slice((from - start) as usize..(to - start) as usize);
                return Ok(Some((piece, Some(s))));
            }
        }
    })
    .boxed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_that_is_built_takes_the_memory_that_there_is() {
        let budget = MemoryBudget::new(1 << 20);
        let mut building = Building::default();
        for bytes in (0..=200_000).step_by(1000) {
            assert!(building.takes(bytes, &budget));
            assert!(budget.used_bytes() >= bytes);
        }
        assert!(building.0.len() < 20, "in steps that grow");
        let used = budget.used_bytes();
        assert!(used < 300_000, "{used}");
        // Half of the budget may be held: what is missing is not waited for.
        assert!(!building.takes(1 << 20, &budget));
        assert_eq!(budget.used_bytes(), used);
        drop(building);
        assert_eq!(budget.used_bytes(), 0);
    }
}
