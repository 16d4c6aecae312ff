//! Files that are compressed as a whole: unpacked into the store, so that the members of tars, and
//! the rows of files of lines, can be read at random.
//!
//! Streams of gzip, lz4 and zstd cannot be entered in the middle. The first reader of a version
//! pays for one pass over it, which builds the index and leaves the unpacked bytes in the store, as
//! derived chunks of that version. If the store has lost a chunk since, that costs one more pass,
//! shared by all who wait; if the store keeps nothing at all, each reader takes its bytes from its
//! own pass.
//!
//! Memory: a pass holds a chunk, and the window of its codec. Zstd's may be large, and is held from
//! the budget. A pass waits for nobody to give memory back, because whoever waits for the pass may
//! hold some: when the budget is used up, one pass at a time goes on without.
//!
//! Invariant: a derived chunk is whole and belongs to the version in its key, whichever pass made
//! it.

use crate::{
    Engine, Joined, Read,
    bytesio::blocking,
    fill::chunks_of,
    members::{AUX_UNPACKED, Building},
    resolve::Resolved,
    stats::add,
};
use bytes::{Buf, Bytes};
use forebay_core::{
    CacheStatus, Error, ErrorKind, ObjectMeta, ObjectName, Reservation, Result, limits,
    limits::CHUNK_BYTES, request,
};
use forebay_format::{ArchiveKind, Codec, Decompressor, MemberIndex, TarScanner};
use forebay_origin::ByteStream;
use forebay_store::{Part, Store};
use futures::{StreamExt, stream};
use std::{collections::VecDeque, ops::Range, sync::Arc};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

/// One pass over a file: what somebody waits for of its unpacked bytes, from front to back. All of
/// them are left in the store on the way.
pub struct Unpacking {
    name: ObjectName,
    body: ByteStream,
    /// What was read of the file, and not unpacked yet.
    input: Bytes,
    pass: Option<Pass>,
    captured: VecDeque<Bytes>,
    index: Option<MemberIndex>,
    _place: Option<OwnedSemaphorePermit>,
}

/// What a pass does with the bytes.
#[derive(Default)]
struct Purpose {
    /// Finds the members of a tar.
    scanner: Option<TarScanner>,
    /// Yields this range of them.
    capture: Range<u64>,
}

/// Memory for the window of a pass.
enum Room {
    /// It needs none that is worth counting.
    Little,
    Held {
        _reservation: Reservation,
    },
    /// There was none; other passes like this one wait.
    Alone {
        _permit: OwnedSemaphorePermit,
    },
}

/// A part of a pass, moved between the task that reads and the threads that decompress.
struct Pass {
    engine: Engine,
    store: Option<Arc<Store>>,
    name: ObjectName,
    meta: Arc<ObjectMeta>,
    decompressor: Option<Decompressor>,
    scanner: Option<TarScanner>,
    /// Of what the scanner found.
    building: Building,
    /// The chunk that is being filled.
    chunk: Vec<u8>,
    index: u32,
    /// Bytes unpacked so far.
    at: u64,
    captured: Vec<Bytes>,
    capture: Range<u64>,
    _room: Room,
}

impl Engine {
    /// One pass over a tar: keeps the unpacked bytes and returns the index.
    pub(crate) async fn unpack(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        data: Option<Bytes>,
    ) -> Result<MemberIndex> {
        let kind = self.archive_kind(name, meta, data.as_ref()).await?;
        let codec = kind
            .codec()
            .ok_or_else(|| Error::internal(format!("{name} is not compressed")).naming())?;
        let purpose = Purpose {
            scanner: Some(TarScanner::of_kind(kind, None)),
            ..Purpose::default()
        };
        let mut pass = self.unpacking(name, meta, data, codec, purpose).await?;
        while pass.next().await?.is_some() {}
        pass.index.ok_or_else(|| {
            Error::internal(format!("{name} was unpacked without an index")).naming()
        })
    }

    /// All unpacked bytes of one version of a file that is compressed as a whole, from front to
    /// back. They are left in the store on the way.
    ///
    /// # Errors
    /// As [`Engine::read_version`]; `TooLarge` if the memory budget has no room for the window of
    /// its codec.
    pub async fn unpack_version(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        codec: Codec,
    ) -> Result<Unpacking> {
        let data = self.small_data(name, meta).await?;
        // Small files come whole, and are done at once.
        let place = match data {
            Some(_) => None,
            None => self.inner.passes.clone().acquire_owned().await.ok(),
        };
        let purpose = Purpose {
            scanner: None,
            capture: 0..u64::MAX,
        };
        let pass = self.unpacking(name, meta, data, codec, purpose).await?;
        Ok(Unpacking {
            _place: place,
            ..pass
        })
    }

    async fn unpacking(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        data: Option<Bytes>,
        codec: Codec,
        purpose: Purpose,
    ) -> Result<Unpacking> {
        add(&self.stats().archives_unpacked, 1);
        let (window_max, room) = self.room(name, meta, data.as_ref(), codec).await?;
        let resolved = Resolved {
            meta: meta.clone(),
            at_secs: 0,
            status: CacheStatus::Miss,
            data,
            passing: None,
        };
        let body = self.open(name, resolved, 0..meta.size).await?.body;
        let max = limits::ARCHIVE_UNPACKED_MAX_BYTES;
        let decompressor = Decompressor::with_window(codec, max, window_max);
        let pass = Pass::new(self, name, meta, decompressor, purpose, room);
        Ok(Unpacking {
            name: name.clone(),
            body,
            input: Bytes::new(),
            pass: Some(pass),
            captured: VecDeque::new(),
            index: None,
            _place: None,
        })
    }

    /// The largest window that a pass may have, and memory for it.
    async fn room(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        data: Option<&Bytes>,
        codec: Codec,
    ) -> Result<(u64, Room)> {
        if codec != Codec::Zstd {
            return Ok((0, Room::Little));
        }
        let head = 0..meta.size.min(HEAD_BYTES);
        let first = match head.is_empty() {
            true => 0,
            false => codec.window_bytes(&self.bytes_of(name, meta, data, head).await?),
        };
        let budget = &self.inner.budget;
        // Frames after the first may have larger windows, up to those of the usual levels.
        let usual = USUAL_WINDOW_BYTES.min(budget.holdable_bytes() / 4);
        let window = first.max(usual).max(1 << 10);
        let too_large = |most: u64| {
            let text = format!(
                "{name} is compressed by zstd with a window of {first} bytes; at most {most} are \
                 possible here"
            );
            Error::new(ErrorKind::TooLarge, text)
                .naming()
                .hint("compress it without --long and --ultra, or raise memory.budget")
        };
        if window > Codec::ZSTD_WINDOW_MAX_BYTES {
            return Err(too_large(Codec::ZSTD_WINDOW_MAX_BYTES));
        }
        let bytes = window.next_power_of_two() + BESIDE_WINDOW_BYTES;
        let room = match budget.try_hold(bytes) {
            Ok(reservation) => Room::Held {
                _reservation: reservation,
            },
            Err(e) if e.kind() == ErrorKind::TooLarge => {
                let most = budget.holdable_bytes().saturating_sub(BESIDE_WINDOW_BYTES);
                return Err(too_large(most));
            }
            Err(_) => {
                let permit = self.inner.unpacks_alone.clone().acquire_owned().await;
                Room::Alone {
                    _permit: permit
                        .map_err(|e| Error::internal("unpacking has ended").caused_by(e))?,
                }
            }
        };
        Ok((window, room))
    }

    /// How a file is compressed that was unpacked before.
    async fn codec_of(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        data: Option<&Bytes>,
    ) -> Result<Codec> {
        let by_name = match ArchiveKind::from_name(name.key()) {
            Some(kind) => kind.codec(),
            None => Codec::from_name(name.key()),
        };
        let codec = match by_name {
            Some(codec) => Some(codec),
            None => self.archive_kind(name, meta, data).await?.codec(),
        };
        codec.ok_or_else(|| Error::internal(format!("{name} is not compressed")).naming())
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
                    let unpacked = async {
                        let purpose = Purpose::default();
                        let codec = engine.codec_of(&name, &meta, data.as_ref()).await?;
                        let mut pass = engine.unpacking(&name, &meta, data, codec, purpose).await?;
                        while pass.next().await?.is_some() {}
                        Ok(())
                    };
                    leader.publish(unpacked.await);
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
            let sent: Result<()> = async {
                let purpose = Purpose {
                    scanner: None,
                    capture: range,
                };
                let codec = engine.codec_of(&name, &meta, data.as_ref()).await?;
                let mut pass = engine.unpacking(&name, &meta, data, codec, purpose).await?;
                while let Some(bytes) = pass.next().await? {
                    if sender.send(Ok(bytes)).await.is_err() {
                        // The reader left.
                        break;
                    }
                }
                Ok(())
            }
            .await;
            if let Err(e) = sent {
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
/// In these first bytes is the header of the first frame.
const HEAD_BYTES: u64 = 4 << 10;
/// The largest window of zstd's levels up to 19.
const USUAL_WINDOW_BYTES: u64 = 8 << 20;
/// What a pass of zstd holds besides its window.
const BESIDE_WINDOW_BYTES: u64 = 1 << 20;

impl Unpacking {
    /// The next bytes, some 100 KiB at most; `None` at the end, when the whole file was unpacked
    /// without an error.
    ///
    /// # Errors
    /// As [`Engine::read_version`]; `Corrupt` or `Unsupported` if it cannot be unpacked. It is of no
    /// use after that.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            if let Some(bytes) = self.captured.pop_front() {
                return Ok(Some(bytes));
            }
            if self.input.is_empty() {
                match self.body.next().await {
                    Some(piece) => self.input = piece?,
                    None => break,
                }
                continue;
            }
            let slice = self.input.slice(..self.input.len().min(SLICE_BYTES));
            let mut pass = self.take_pass()?;
            let (done, used) = blocking(move || {
                let used = pass.push(&slice);
                (pass, used)
            })
            .await?;
            let used = used.map_err(|e| e.context(&self.name))?;
            self.input.advance(used);
            let pass = self.pass.insert(done);
            self.captured.extend(pass.captured.drain(..));
        }
        if let Some(pass) = self.pass.take() {
            self.index = blocking(move || pass.finish())
                .await?
                .map_err(|e| e.context(&self.name))?;
        }
        Ok(None)
    }

    fn take_pass(&mut self) -> Result<Pass> {
        self.pass
            .take()
            .ok_or_else(|| Error::internal("a pass went on after it failed"))
    }
}

impl Pass {
    fn new(
        engine: &Engine,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        decompressor: Decompressor,
        purpose: Purpose,
        room: Room,
    ) -> Self {
        Self {
            engine: engine.clone(),
            store: engine.store_for(name).cloned(),
            name: name.clone(),
            meta: meta.clone(),
            decompressor: Some(decompressor),
            scanner: purpose.scanner,
            building: Building::default(),
            chunk: Vec::new(),
            index: 0,
            at: 0,
            captured: Vec::new(),
            capture: purpose.capture,
            _room: room,
        }
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
        if let Some(scanner) = &mut self.scanner {
            scanner.push(piece)?;
            let bytes = scanner.memory_bytes() as u64;
            self.building.takes(bytes, &self.engine.inner.budget);
        }
        let wanted = &self.capture;
        let (start, end) = (self.at, self.at + piece.len() as u64);
        let (from, to) = (wanted.start.clamp(start, end), wanted.end.clamp(start, end));
        if from < to {
            self.captured.push(Bytes::copy_from_slice(
                &piece[(from - start) as usize..(to - start) as usize],
            ));
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

    /// The end of the file; returns the index of a tar.
    fn finish(mut self) -> Result<Option<MemberIndex>> {
        self.decompressor
            .as_ref()
            .ok_or_else(|| Error::internal("a pass went on after it failed"))?
            .finish()?;
        if !self.chunk.is_empty() {
            self.keep();
        }
        self.scanner.take().map(TarScanner::finish).transpose()
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
        let purpose = Purpose {
            scanner: Some(TarScanner::of_kind(kind, None)),
            capture: 512..512 + ZEROS as u64,
        };
        let decompressor = Decompressor::new(Codec::Gzip, u64::MAX);
        let mut pass = Pass::new(&engine, &name, &meta, decompressor, purpose, Room::Little);
        let (mut left, mut captured) = (&archive[..], 0);
        while !left.is_empty() {
            left = &left[pass.push(left).unwrap()..];
            let step = pass.captured_bytes();
            assert!(step <= CAPTURED_BYTES + PIECE_BYTES, "{step}");
            captured += step;
            pass.captured.clear();
        }
        assert_eq!(captured, ZEROS);
        assert_eq!(pass.finish().unwrap().unwrap().len(), 1);
    }
}
