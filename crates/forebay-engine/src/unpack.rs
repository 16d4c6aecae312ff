//! Compressed tars: unpacked into the store, so that their members can be read at random.
//!
//! Neither gzip nor lz4 streams can be entered in the middle. The first reader of a version pays
//! for one pass over it, which builds the index and leaves the unpacked bytes in the store, as
//! derived chunks of that version. If the store has lost a chunk since, that costs one more pass,
//! shared by all who wait; if the store keeps nothing at all, each reader takes its bytes from its
//! own pass.
//!
//! Invariant: a derived chunk is whole and belongs to the version in its key, whichever pass made
//! it.

use crate::{
    Engine, Joined, Read, bytesio::blocking, fill::chunks_of, members::AUX_UNPACKED,
    resolve::Resolved, stats::add,
};
use bytes::{Buf, Bytes};
use forebay_core::{CacheStatus, Error, ObjectMeta, ObjectName, Result, limits};
use forebay_core::{limits::CHUNK_BYTES, request};
use forebay_format::{ArchiveKind, Decompressor, MemberIndex, TarScanner};
use forebay_store::{Part, Store};
use futures::{StreamExt, stream};
use std::{ops::Range, sync::Arc};
use tokio::sync::mpsc;

/// A range of the unpacked bytes that somebody waits for.
pub(crate) struct Capture {
    range: Range<u64>,
    sender: mpsc::Sender<Result<Bytes>>,
}

/// One pass over an archive, moved between the task that reads and the threads that decompress.
struct Pass {
    engine: Engine,
    store: Option<Arc<Store>>,
    name: ObjectName,
    meta: Arc<ObjectMeta>,
    decompressor: Option<Decompressor>,
    scanner: TarScanner,
    /// The chunk that is being filled.
    chunk: Vec<u8>,
    index: u32,
    /// Bytes unpacked so far.
    at: u64,
    captured: Vec<Bytes>,
    capture: Option<Range<u64>>,
}

impl Engine {
    /// One pass: keeps the unpacked bytes and returns the index.
    pub(crate) async fn unpack(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        data: Option<Bytes>,
        capture: Option<Capture>,
    ) -> Result<MemberIndex> {
        add(&self.stats().archives_unpacked, 1);
        let kind = self.archive_kind(name, meta, data.as_ref()).await?;
        let resolved = Resolved {
            meta: meta.clone(),
            at_secs: 0,
            status: CacheStatus::Miss,
            data,
            passing: None,
        };
        let mut body = self.open(name, resolved, 0..meta.size).await?.body;
        let wanted = capture.as_ref().map(|c| c.range.clone());
        let mut pass = Pass::new(self, name, meta, kind, wanted)?;
        while let Some(piece) = body.next().await {
            let mut input = piece?;
            while !input.is_empty() {
                let slice = input.slice(..input.len().min(SLICE_BYTES));
                let (done, used) = blocking(move || {
                    let used = pass.push(&slice);
                    (pass, used)
                })
                .await?;
                pass = done;
                input.advance(used.map_err(|e| e.context(name))?);
                for bytes in pass.captured.drain(..) {
                    if let Some(c) = &capture
                        && c.sender.send(Ok(bytes)).await.is_err()
                    {
                        return Err(Error::internal("the reader left"));
                    }
                }
            }
        }
        let index = blocking(move || pass.finish())
            .await?
            .map_err(|e| e.context(name))?;
        Ok(index)
    }

    /// Opens a range of the archive's unpacked bytes.
    pub(crate) async fn open_unpacked(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        status: CacheStatus,
        data: Option<Bytes>,
        range: Range<u64>,
    ) -> Result<Read> {
        if range.is_empty() {
            return Ok(Read {
                meta: meta.clone(),
                range,
                cache: status,
                body: stream::empty().boxed(),
            });
        }
        let here = self.has_unpacked(name, meta, &range);
        if !here {
            self.unpack_again(name, meta, data.clone()).await?;
        }
        let cache = if here { status } else { CacheStatus::Miss };
        // With a store, the unpacked bytes come from there, a piece at a time, and each piece needs
        // memory: hold none meanwhile.
        let data = data.filter(|_| self.store_for(name).is_none());
        let state = (
            self.clone(),
            name.clone(),
            meta.clone(),
            data,
            range.clone(),
            None::<mpsc::Receiver<Result<Bytes>>>,
        );
        let body = stream::try_unfold(
            state,
            |(engine, name, meta, data, left, mut captured)| async move {
                if left.is_empty() {
                    return Ok(None);
                }
                if captured.is_none() {
                    let index = (left.start / CHUNK_BYTES) as u32;
                    let start = u64::from(index) * CHUNK_BYTES;
                    let within = left.start - start..(left.end - start).min(CHUNK_BYTES);
                    if let Some(bytes) = engine.unpacked_part(&name, &meta, index, within).await? {
                        engine.stats().from_cache(bytes.len() as u64);
                        let next = left.start + bytes.len() as u64..left.end;
                        return Ok(Some((bytes, (engine, name, meta, data, next, None))));
                    }
                    captured = Some(engine.capture(&name, &meta, data.clone(), left.clone()));
                }
                let piece = match &mut captured {
                    Some(receiver) => receiver.recv().await,
                    None => None,
                };
                let bytes = piece
                    .ok_or_else(|| Error::corrupt(format!("{name}: the archive ended early")))??;
                let next = left.start + bytes.len() as u64..left.end;
                Ok(Some((bytes, (engine, name, meta, data, next, captured))))
            },
        );
        Ok(Read {
            meta: meta.clone(),
            range,
            cache,
            body: body.boxed(),
        })
    }

    pub(crate) fn has_unpacked(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        range: &Range<u64>,
    ) -> bool {
        let version = meta.version();
        self.store_for(name).is_some_and(|s| {
            chunks_of(range).all(|i| s.has_part(name, version, Part::Aux(AUX_UNPACKED, i)))
        })
    }

    async fn unpacked_part(
        &self,
        name: &ObjectName,
        meta: &ObjectMeta,
        index: u32,
        within: Range<u64>,
    ) -> Result<Option<Bytes>> {
        let (version, part) = (meta.version(), Part::Aux(AUX_UNPACKED, index));
        match self.store_for(name) {
            Some(store) if store.has_part(name, version, part) => {
                self.part_in_budget(store, name, version, part, within)
                    .await
            }
            _ => Ok(None),
        }
    }

    /// One more pass for all readers that miss derived chunks of this version at the same time.
    /// Without a store it gains nothing.
    async fn unpack_again(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        data: Option<Bytes>,
    ) -> Result<()> {
        if self.store_for(name).is_none() {
            return Ok(());
        }
        match self.inner.unpacking.join((name.hash128(), meta.version())) {
            Joined::Follower(follower) => follower.wait().await,
            Joined::Leader(leader) => {
                let follower = leader.follower();
                let (engine, name, meta) = (self.clone(), name.clone(), meta.clone());
                request::spawn(async move {
                    let unpacked = engine.unpack(&name, &meta, data, None).await;
                    leader.publish(unpacked.map(drop));
                });
                follower.wait().await
            }
        }
    }

    /// The bytes of a range, from a pass made for them.
    fn capture(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        data: Option<Bytes>,
        range: Range<u64>,
    ) -> mpsc::Receiver<Result<Bytes>> {
        let (sender, receiver) = mpsc::channel(2);
        let (engine, name, meta) = (self.clone(), name.clone(), meta.clone());
        request::spawn(async move {
            let capture = Capture {
                range,
                sender: sender.clone(),
            };
            if let Err(e) = engine.unpack(&name, &meta, data, Some(capture)).await {
                let _ = sender.send(Err(e)).await;
            }
        });
        receiver
    }
}

/// Compressed bytes that are handed to a thread at a time.
const SLICE_BYTES: usize = 64 << 10;
/// A step of a pass ends when so much has been unpacked that somebody waits for: a slice can unpack
/// to a thousand times its size.
const CAPTURED_BYTES: usize = 256 << 10;
/// Bytes that are unpacked at a time.
const PIECE_BYTES: usize = 64 << 10;

impl Pass {
    fn new(
        engine: &Engine,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        kind: ArchiveKind,
        capture: Option<Range<u64>>,
    ) -> Result<Self> {
        let codec = kind
            .codec()
            .ok_or_else(|| Error::internal(format!("{name} is not compressed")))?;
        Ok(Self {
            engine: engine.clone(),
            store: engine.store_for(name).cloned(),
            name: name.clone(),
            meta: meta.clone(),
            decompressor: Some(Decompressor::new(codec, limits::ARCHIVE_UNPACKED_MAX_BYTES)),
            scanner: TarScanner::of_kind(kind, None),
            chunk: Vec::new(),
            index: 0,
            at: 0,
            captured: Vec::new(),
            capture,
        })
    }

    /// Takes some of `input`, and returns how much: all of it, or as much as fills `captured`.
    fn push(&mut self, input: &[u8]) -> Result<usize> {
        // Taken out of its place while it calls back into the rest of the pass.
        let mut decompressor = self
            .decompressor
            .take()
            .ok_or_else(|| Error::internal("a pass went on after it failed"))?;
        let (mut used, mut piece) = (0, Vec::with_capacity(PIECE_BYTES));
        while used < input.len() && self.captured_bytes() < CAPTURED_BYTES {
            piece.clear();
            used += decompressor
                .push(&input[used..], &mut piece, PIECE_BYTES)?
                .consumed;
            if !piece.is_empty() {
                self.take(&piece)?;
            }
        }
        self.decompressor = Some(decompressor);
        Ok(used)
    }

    fn captured_bytes(&self) -> usize {
        self.captured.iter().map(Bytes::len).sum()
    }

    fn take(&mut self, mut piece: &[u8]) -> Result<()> {
        self.scanner.push(piece)?;
        if let Some(wanted) = &self.capture {
            let (start, end) = (self.at, self.at + piece.len() as u64);
            let (from, to) = (wanted.start.clamp(start, end), wanted.end.clamp(start, end));
            if from < to {
                self.captured.push(Bytes::copy_from_slice(
                    &piece[(from - start) as usize..(to - start) as usize],
                ));
            }
        }
        self.at += piece.len() as u64;
        if self.store.is_none() {
            return Ok(());
        }
        while !piece.is_empty() {
            let room = CHUNK_BYTES as usize - self.chunk.len();
            let (now, later) = piece.split_at(room.min(piece.len()));
            self.chunk.extend_from_slice(now);
            piece = later;
            if self.chunk.len() == CHUNK_BYTES as usize {
                self.keep();
            }
        }
        Ok(())
    }

    fn keep(&mut self) {
        if let Some(store) = &self.store {
            let version = self.meta.version();
            if !store.has_part(&self.name, version, Part::Aux(AUX_UNPACKED, self.index)) {
                let kept = store.put_part(
                    &self.name,
                    version,
                    Part::Aux(AUX_UNPACKED, self.index),
                    &self.chunk,
                );
                self.engine.note_write(&self.name, Some(kept));
            }
        }
        self.chunk.clear();
        self.index += 1;
    }

    fn finish(mut self) -> Result<MemberIndex> {
        self.decompressor
            .as_ref()
            .ok_or_else(|| Error::internal("a pass went on after it failed"))?
            .finish()?;
        if !self.chunk.is_empty() {
            self.keep();
        }
        self.scanner.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EngineConfig, FixedBuckets};
    use forebay_core::{Attributes, MemoryBudget, SystemClock};
    use forebay_format::ArchiveWriter;

    #[test]
    fn little_is_unpacked_for_a_reader_at_a_time() {
        const ZEROS: usize = 16 << 20;
        let kind = ArchiveKind::TarGz;
        let (mut writer, mut archive) = (ArchiveWriter::new(kind), Vec::new());
        let begun = writer.begin_entry("zeros", ZEROS as u64, 0, &mut archive);
        begun.unwrap();
        writer.data(&vec![0; ZEROS], &mut archive).unwrap();
        writer.end_entry(&mut archive).unwrap();
        writer.finish(&mut archive).unwrap();
        assert!(archive.len() < SLICE_BYTES, "{}", archive.len());

        let engine = Engine::new(
            EngineConfig::default(),
            Arc::new(FixedBuckets::default()),
            None,
            Arc::new(SystemClock),
            MemoryBudget::new(64 << 20),
        );
        let name = ObjectName::new("data", "a.tar.gz").unwrap();
        let meta = Arc::new(ObjectMeta {
            size: archive.len() as u64,
            etag: None,
            last_modified_ms: 1,
            attributes: Attributes::default(),
        });
        let wanted = Some(512..512 + ZEROS as u64);
        let mut pass = Pass::new(&engine, &name, &meta, kind, wanted).unwrap();
        let (mut left, mut captured) = (&archive[..], 0);
        while !left.is_empty() {
            left = &left[pass.push(left).unwrap()..];
            let step = pass.captured_bytes();
            assert!(step <= CAPTURED_BYTES + PIECE_BYTES, "{step}");
            captured += step;
            pass.captured.clear();
        }
        assert_eq!(captured, ZEROS);
        assert_eq!(pass.finish().unwrap().len(), 1);
    }
}
