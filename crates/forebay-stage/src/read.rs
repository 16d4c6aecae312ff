//! Checkpoints that are read from this node's disk.

use crate::{
    entry::{Entry, Phase},
    file::{READ_MEMORY_BYTES, Reader},
    manifest::Manifest,
    stages::{Inner, Stages, ended, missing},
    types::Place,
};
use forebay_core::{Error, ErrorKind, Reservation, Result};
use forebay_engine::ByteStream;
use futures::{StreamExt, TryStreamExt, stream};
use std::{
    fs::File,
    ops::Range,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::{task::spawn_blocking, time::timeout};
use tokio_util::task::task_tracker::TaskTrackerToken;

/// How long a reader of what is durable here waits to learn whether the origin has a newer one.
const LOOK_MAX: Duration = Duration::from_secs(10);

/// A staged file of a committed checkpoint, to be read. While it exists, the file's room on the disk
/// is not given back, or not for a while (`READERS_MAX`).
pub struct StagedFile {
    entry: Arc<Entry>,
    reader: Arc<Reader>,
    /// Whoever drops the entry waits for it.
    read: TaskTrackerToken,
}

/// Somebody reads a staged file. See [`StagedFile`].
pub struct Reading(#[allow(dead_code, reason = "it counts while it exists")] TaskTrackerToken);

impl StagedFile {
    /// Its bytes.
    pub fn size(&self) -> u64 {
        self.reader.size()
    }

    /// For whoever goes on reading it by a descriptor of its own.
    pub fn reading(&self) -> Reading {
        Reading(self.read.clone())
    }

    /// The open file, for a reader of its own: `size` bytes, with the checksums of
    /// [`forebay_protocol::lent`] behind them.
    pub fn lend(&self, stages: &Stages) -> &File {
        stages.0.stats.lent.fetch_add(1, Relaxed);
        self.reader.file()
    }
}

impl Stages {
    /// What a reader of a checkpoint reads: of this id, or the newest of the name that was committed,
    /// here or at the origin. With `durable`, only what the origin has.
    ///
    /// # Errors
    /// `NotFound`, or what kept the origin from answering.
    pub async fn manifest(
        &self,
        place: &Place,
        id: Option<&str>,
        durable: bool,
    ) -> Result<Manifest> {
        match self.0.known(place, id, durable)? {
            Some(known) if id.is_some() || known.is_newest() => Ok(known.manifest),
            known => self.0.asked(place, id, known).await,
        }
    }

    /// What [`Stages::manifest`] would give, as far as it is known without the origin, which is being
    /// asked meanwhile, and the name of that question, for [`Stages::answer`]. `None`: nothing can be
    /// said without the origin, or it need not be asked, or the checkpoint here took the place of another
    /// one, or waits until its name is free.
    ///
    /// # Errors
    /// Those of names.
    pub fn manifest_ahead(
        &self,
        place: &Place,
        durable: bool,
    ) -> Result<Option<(Manifest, String)>> {
        let known = match self.0.known(place, None, durable)? {
            Some(known) if !known.is_pending => known,
            _ => return Ok(None),
        };
        // A name that is given again and again may be by now, and to begin with the wrong one costs
        // more than to wait.
        let is_old = known.entry.replaced.load(Relaxed);
        if is_old || known.entry.state.lock().journal.over.is_some() {
            return Ok(None);
        }
        let (inner, place, manifest) = (self.0.clone(), place.clone(), known.manifest.clone());
        let questions = &self.0.questions;
        let question = questions.ask(&place.clone(), &self.0.stop, async move {
            let (entry, id) = (known.entry.clone(), known.manifest.id.clone());
            let there = match inner.asked(&place, None, Some(known)).await {
                Ok(manifest) => Some(manifest.id),
                Err(e) if e.kind() == ErrorKind::NotFound => None,
                Err(e) => return Err(e),
            };
            if there.as_ref() != Some(&id) {
                entry.replaced.store(true, Relaxed);
            }
            Ok(there)
        });
        Ok(question.map(|question| (manifest, question)))
    }

    /// The id of the checkpoint that had a name when a question of [`Stages::manifest_ahead`] was asked;
    /// `None`: none.
    ///
    /// # Errors
    /// `NotFound` if the question is not known here (any more), and those of [`Stages::manifest`].
    pub async fn answer(&self, place: &Place, question: &str) -> Result<Option<String>> {
        self.0.questions.answer(place, question).await
    }

    /// The staged file of a committed checkpoint, if it is here.
    ///
    /// # Errors
    /// What keeps it from being read, if the origin does not have it either.
    pub async fn open_file(
        &self,
        place: &Place,
        id: &str,
        name: &str,
    ) -> Result<Option<StagedFile>> {
        let inner = &self.0;
        let Some(entry) = inner.newest(place, Some(id), None)? else {
            return Ok(None);
        };
        let (path, size, read) = {
            let mut state = entry.state.lock();
            if !(state.phase.is_pending() || state.phase == Phase::Durable) {
                return Ok(None);
            }
            state.read_ms = inner.steady_ms();
            let file = state.journal.files.iter().find(|f| f.name == name);
            let Some(file) = file else { return Ok(None) };
            let path = inner.path_of(&entry, &state, file.number);
            (path, file.size, entry.readers.token())
        };
        let Some(path) = path else { return Ok(None) };
        let opened = spawn_blocking(move || Reader::open(&path, size)).await;
        match opened.map_err(ended)? {
            Ok(reader) => Ok(Some(StagedFile {
                entry,
                reader: Arc::new(reader),
                read,
            })),
            Err(e) if inner.distrust(&entry, &e) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The bytes of a staged file, or of a range of it. The first of them were read when this
    /// returns. `None`: they are damaged, and the origin has them.
    ///
    /// # Errors
    /// `Busy` for lack of memory; `Corrupt` and such, if the origin does not have them either.
    pub async fn read(&self, file: &StagedFile, range: Range<u64>) -> Result<Option<ByteStream>> {
        let budget = self.0.engine.budget();
        let held = budget
            .hold(READ_MEMORY_BYTES.min(budget.holdable_bytes()))
            .await?;
        self.read_with(held, file, range).await
    }

    /// The same, in memory that is held until the stream is dropped.
    async fn read_with(
        &self,
        held: Reservation,
        file: &StagedFile,
        range: Range<u64>,
    ) -> Result<Option<ByteStream>> {
        let (inner, entry) = (self.0.clone(), file.entry.clone());
        let mut rest = file.reader.stream(range);
        let first = match rest.next().await {
            Some(Err(e)) if inner.distrust(&entry, &e) => return Ok(None),
            Some(Err(e)) => return Err(e),
            first => first,
        };
        let read = file.read.clone();
        let counted = stream::iter(first).chain(rest).inspect(move |piece| {
            let _held = (&held, &read);
            match piece {
                Ok(piece) => {
                    let bytes = piece.len() as u64;
                    inner.stats.read_bytes.fetch_add(bytes, Relaxed);
                }
                // This answer breaks off; the next one comes from the origin.
                Err(e) => drop(inner.distrust(&entry, e)),
            }
        });
        Ok(Some(counted.boxed()))
    }

    /// All bytes of a staged file, verified, if it has no more than `most_bytes`. `None`: it has more, or
    /// is not here, or is damaged here, and the origin has it. It does not wait for memory.
    ///
    /// # Errors
    /// Those of [`Stages::open_file`] and [`Stages::read`]; `Busy` if the budget has no memory for the
    /// file at this moment.
    pub async fn small_file(
        &self,
        place: &Place,
        id: &str,
        name: &str,
        most_bytes: u64,
    ) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.open_file(place, id, name).await? else {
            return Ok(None);
        };
        let size = file.size();
        if size > most_bytes {
            return Ok(None);
        }
        let budget = self.0.engine.budget();
        // Its pieces, and what they are put together to.
        let bytes = size.saturating_mul(2).min(budget.holdable_bytes());
        let held = budget.try_hold(bytes)?;
        let Some(mut body) = self.read_with(held, &file, 0..size).await? else {
            return Ok(None);
        };
        let mut found = Vec::with_capacity(size as usize);
        while let Some(piece) = body.try_next().await? {
            found.extend_from_slice(&piece);
        }
        Ok(Some(found))
    }
}

/// A committed checkpoint on this node's disk.
struct Known {
    entry: Arc<Entry>,
    manifest: Manifest,
    /// The origin does not have it yet.
    is_pending: bool,
    /// Another one has its name at the origin.
    is_taken: bool,
}

impl Known {
    /// Whether the origin cannot have a newer one.
    fn is_newest(&self) -> bool {
        self.is_pending && !self.is_taken
    }
}

impl Inner {
    /// The checkpoint of this id, or the newest of the name, if it is here and was committed.
    fn known(&self, place: &Place, id: Option<&str>, durable: bool) -> Result<Option<Known>> {
        let newest = self.newest(place, id, None)?;
        Ok(newest.and_then(|entry| {
            let state = entry.state.lock();
            let is_pending = state.phase.is_pending();
            let counts = state.phase == Phase::Durable || (is_pending && !durable);
            let manifest = counts.then(|| Manifest::of(&state.journal))?;
            let is_taken = state.journal.taken;
            drop(state);
            Some(Known {
                entry,
                manifest,
                is_pending,
                is_taken,
            })
        }))
    }

    /// What the origin says, of a name of which this is known here: another node may have replaced what is
    /// durable here, or have taken the name.
    async fn asked(
        &self,
        place: &Place,
        id: Option<&str>,
        here: Option<Known>,
    ) -> Result<Manifest> {
        let look = Manifest::at_origin(&self.engine, &place.bucket, &place.prefix);
        let there = match here {
            Some(_) => timeout(LOOK_MAX, look).await.unwrap_or_else(|_| {
                Err(Error::origin_unavailable(format!(
                    "{place}: the origin did not answer within {} s",
                    LOOK_MAX.as_secs()
                )))
            }),
            None => look.await,
        };
        match (there, here) {
            (Ok(Some(manifest)), _) if id.is_none_or(|id| manifest.id == id) => Ok(manifest),
            // The name is free again.
            (Ok(None), Some(here)) if here.is_pending => Ok(here.manifest),
            (Ok(_), _) => Err(missing(place, id)),
            // The origin does not answer, and this is what it had.
            (Err(e), Some(here)) if !here.is_pending && e.kind().is_transient() => {
                Ok(here.manifest)
            }
            (Err(e), _) => Err(e),
        }
    }

    /// Whether the origin is to be asked for a checkpoint that cannot be read here. If so, its files here
    /// are dropped, or were a moment ago.
    fn distrust(self: &Arc<Self>, entry: &Arc<Entry>, e: &Error) -> bool {
        if entry.leave(|state| state.phase == Phase::Durable) {
            tracing::warn!(checkpoint = %entry.place, id = entry.folder, error = %e.describe(),
                "a staged file cannot be read; it is read from the origin, which has it");
            let (inner, entry) = (self.clone(), entry.clone());
            self.tasks
                .spawn(async move { inner.drop_local(&entry).await });
            return true;
        }
        // The files of one that is given up go before its entry does.
        matches!(entry.state.lock().phase, Phase::Removing | Phase::Gone)
    }
}
