//! Open files: what decoding their blocks needs besides the blocks (a Parquet footer, Arrow
//! dictionaries, the members of an archive), kept while there is room.
//!
//! Invariant: what is kept for a file belongs to the version in its key.

use super::{Rows, blocks::fetch_all, joined, lru::Lru, stats::add};
use crate::Dataset;
use bytes::Bytes;
use forebay_core::{
    Error, ObjectMeta, ObjectName, Reservation, Result, VersionId, request, sync::Mutex,
};
use forebay_engine::{Flights, Joined};
use forebay_format::{
    ArchiveKind,
    tabular::{FileOpener, FileReader, Format, Need},
};
use std::{ops::Range, sync::Arc, time::Instant};

/// Smaller files take no reservation: only the limit on what is kept bounds them.
const COUNTED_FROM_BYTES: u64 = 4 << 20;

/// Name, version, and a hash of the dataset's options, which affect how the file is read.
type FileKey = (u128, VersionId, u64);

/// One file of a dataset, ready to be read.
pub(super) struct OpenFile {
    pub name: ObjectName,
    pub meta: Arc<ObjectMeta>,
    pub reader: Arc<FileReader>,
    /// Its bytes are the unpacked ones.
    pub unpacked: bool,
    /// For the reader's memory, if that is large.
    _memory: Option<Reservation>,
}

pub(super) struct Files {
    open: Mutex<Lru<FileKey, Arc<OpenFile>>>,
    opening: Flights<FileKey, Arc<OpenFile>>,
    max_bytes: u64,
}

impl Files {
    pub(super) fn new(max_bytes: u64) -> Self {
        Self {
            open: Mutex::default(),
            opening: Flights::default(),
            max_bytes,
        }
    }
}

impl Rows {
    pub(super) async fn open_file(
        &self,
        dataset: &Arc<Dataset>,
        file: u32,
        options: u64,
    ) -> Result<Arc<OpenFile>> {
        let files = &self.inner.files;
        let of = dataset.file(file);
        let meta = Arc::new(of.meta());
        let key = (of.name.hash128(), meta.version(), options);
        if let Some(open) = files.open.lock().get(&key) {
            return Ok(open.clone());
        }
        match files.opening.join(key) {
            Joined::Follower(follower) => follower.wait().await,
            Joined::Leader(leader) => {
                let follower = leader.follower();
                let (rows, dataset) = (self.clone(), dataset.clone());
                request::spawn(async move {
                    let opened = rows
                        .open_file_now(&dataset, file, of.name, meta)
                        .await
                        .map(Arc::new);
                    if let Ok(open) = &opened {
                        let files = &rows.inner.files;
                        let mut kept = files.open.lock();
                        kept.insert(key, open.clone(), open.reader.memory_bytes() as u64 + 512);
                        // A file larger than the whole cache must still not be read again for each
                        // request; its memory comes from the budget.
                        kept.shrink_to_most(files.max_bytes);
                    }
                    leader.publish(opened);
                });
                follower.wait().await
            }
        }
    }

    async fn open_file_now(
        &self,
        dataset: &Dataset,
        file: u32,
        name: ObjectName,
        meta: Arc<ObjectMeta>,
    ) -> Result<OpenFile> {
        let engine = &self.inner.engine;
        let index = dataset
            .index(file as usize)
            .ok_or_else(|| Error::internal(format!("{name} has no index")))?
            .clone();
        if matches!(dataset.format(), Format::Tar | Format::Zip) {
            let began = Instant::now();
            let members = match dataset.part() {
                Some(part) => {
                    let bytes = part.bytes_of(meta.size);
                    engine.members_of_part(&name, &meta, bytes).await?
                }
                None => engine.members_of_version(&name, &meta).await?,
            };
            add(
                &self.inner.stats.fetch_ns,
                began.elapsed().as_nanos() as u64,
            );
            let unpacked = matches!(members.kind(), ArchiveKind::TarGz | ArchiveKind::TarLz4);
            return Ok(OpenFile {
                name,
                meta,
                reader: Arc::new(FileReader::of_members(index, members)?),
                unpacked,
                _memory: None,
            });
        }
        let unpacked = index.unpacked_bytes().is_some();
        let mut opener = FileOpener::new(index)?;
        let (mut held, mut fed) = (Vec::new(), 0);
        let decoded = loop {
            let (stepped, need) = joined(
                tokio::task::spawn_blocking(move || {
                    let need = opener.step().and_then(|need| match need {
                        Need::Ranges(ranges) => Ok(Err(ranges)),
                        Need::Memory(_) | Need::Done => opener.decoded_bytes().map(Ok),
                    });
                    (opener, need)
                })
                .await,
            )?;
            opener = stepped;
            let ranges = match need? {
                Ok(decoded) => break decoded,
                Err(ranges) => ranges,
            };
            let bytes: u64 = ranges.iter().map(|r| r.end - r.start).sum();
            held.push(engine.budget().hold(bytes.max(1)).await?);
            fed += bytes;
            // Of a file that is not on the disk, this is the wait for the origin: of a small one
            // all of it comes with its footer.
            let began = Instant::now();
            let came = fetch_all(&self.inner, &name, &meta, false, ranges).await?;
            add(
                &self.inner.stats.fetch_ns,
                began.elapsed().as_nanos() as u64,
            );
            for (range, bytes) in came {
                opener.feed(range.start, bytes)?;
            }
        };
        if decoded > 0 {
            let memory = match engine.budget().try_hold(decoded) {
                Ok(more) => more,
                // At once: openings that wait for more while they hold some would wait for each
                // other.
                Err(_) => {
                    held.clear();
                    engine.budget().hold(fed.saturating_add(decoded)).await?
                }
            };
            held.push(memory);
        }
        let reader = joined(tokio::task::spawn_blocking(move || opener.finish()).await)??;
        // Values of dictionaries may share the fetched bytes.
        drop(held);
        let takes = (reader.memory_bytes() as u64).max(fed);
        let memory = match takes >= COUNTED_FROM_BYTES {
            true => Some(engine.budget().hold(takes).await?),
            false => None,
        };
        Ok(OpenFile {
            name,
            meta,
            reader: Arc::new(reader),
            unpacked,
            _memory: memory,
        })
    }
}

/// Bytes of a file and where they are.
pub(super) type Fed = (Range<u64>, Bytes);
