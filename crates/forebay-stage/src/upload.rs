//! One large file on its way to the origin: an upload, its parts, and the log of what the origin has.

use crate::{
    entry::Entry,
    file::Reader,
    flush::{PAUSE_FIRST, path_of, reader_of, to_its_end},
    journal::{FileEntry, Parts},
    stages::{Inner, ended},
};
use forebay_core::{Error, ErrorKind, ObjectName, Result, limits, sync::Mutex};
use forebay_engine::{PutCondition, PutRequest, ReadOptions, UploadedPart};
use futures::{StreamExt, TryStreamExt, stream};
use std::{
    fs,
    ops::Range,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tokio::{
    sync::{Mutex as AsyncMutex, OwnedMutexGuard},
    task::spawn_blocking,
    time::sleep,
};

/// Attempts for one part before the upload counts as failed.
const PART_ATTEMPTS: u32 = 4;
/// Each time so many completions of an upload in a row were refused, it is begun anew.
const REFUSALS: u32 = 2;
/// So often a file is sent from its beginning for that.
const ANEW_MAX: u32 = 3;
const LOG_EXTENSION: &str = "parts";

/// Parts of one file of a checkpoint go before those of the next: while an origin puts together the
/// parts of one, which takes it a while, parts of the next are on their way.
pub(crate) type Turn = Arc<AsyncMutex<()>>;

/// These parts, when it is their turn. It ends when each of them has begun, or is given up.
async fn in_turn(turn: &Turn, parts: Vec<u32>) -> Vec<(u32, Arc<OwnedMutexGuard<()>>)> {
    let mine = Arc::new(turn.clone().lock_owned().await);
    parts.into_iter().map(|n| (n, mine.clone())).collect()
}

/// A file that goes out in parts. One at a time sends it.
pub(crate) struct Upload<'a> {
    inner: &'a Arc<Inner>,
    entry: &'a Arc<Entry>,
    file: &'a FileEntry,
    name: ObjectName,
    reader: Arc<Reader>,
    log: Arc<Mutex<Parts>>,
}

impl<'a> Upload<'a> {
    /// Opens the file and the log of what the origin has of it.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub async fn open(
        inner: &'a Arc<Inner>,
        entry: &'a Arc<Entry>,
        file: &'a FileEntry,
    ) -> Result<Upload<'a>> {
        let reader = reader_of(inner, entry, file).await?;
        let path = path_of(inner, entry, file)?.with_extension(LOG_EXTENSION);
        let loaded = spawn_blocking(move || Parts::load(path)).await;
        Ok(Upload {
            inner,
            entry,
            file,
            name: name_of(entry, &file.name)?,
            reader,
            log: Arc::new(Mutex::new(loaded.map_err(ended)?)),
        })
    }

    /// Sends what the origin does not have, and makes an object of it. Returns its ETag.
    pub async fn send(&self, turn: &Turn) -> Result<Option<String>> {
        let is_begun = self.log.lock().upload.is_some();
        // The run before may have ended when the object was made and that was not noted yet.
        if self.entry.recovered
            && !is_begun
            && let Some(etag) = self.object_there().await
        {
            let _ = self.entry.at_origin.fetch_add(self.file.size, Relaxed);
            return Ok(etag);
        }
        let etag = match self.send_once(turn).await {
            // The origin does not know the upload: it has ended, or was removed there.
            Err(e) if e.kind() == ErrorKind::NotFound && self.log.lock().upload.is_some() => {
                match self.object_there().await {
                    Some(etag) => etag,
                    None => {
                        let lost = self.bytes_there();
                        let less = |n: u64| Some(n.saturating_sub(lost));
                        let _ = self.entry.at_origin.fetch_update(Relaxed, Relaxed, less);
                        self.forget().await?;
                        self.send_once(turn).await?
                    }
                }
            }
            sent => sent?,
        };
        self.forget().await?;
        Ok(etag)
    }

    async fn send_once(&self, turn: &Turn) -> Result<Option<String>> {
        let counted = &self.entry.at_origin;
        counted.fetch_add(self.bytes_there(), Relaxed);
        let sent = self.send_parts(turn, counted, || true).await?;
        let upload = sent.ok_or_else(|| Error::internal("parts of a file were left out"))?;
        let all = {
            let log = self.log.lock();
            let parts = log.parts.iter();
            let parts = parts.map(|(number, (etag, size))| UploadedPart {
                number: *number,
                etag: etag.clone(),
                size: Some(*size),
            });
            parts.collect::<Vec<_>>()
        };
        let (engine, name) = (self.inner.engine.clone(), self.name.clone());
        let complete = async move {
            engine
                .complete_upload(&name, &upload, all, PutCondition::Always)
                .await
        };
        let done = to_its_end(self.inner, self.entry, complete).await;
        // The origin does not have the parts that are noted here, or does not take them.
        if let Err(e) = &done
            && matches!(e.kind(), ErrorKind::Invalid | ErrorKind::TooSmall)
        {
            self.note_refusal(e).await?;
        }
        Ok(done?.etag)
    }

    /// The same completion would be refused again and again: after [`REFUSALS`] of them, the next
    /// attempt begins the upload anew. That sends all of the file, so it happens [`ANEW_MAX`] times;
    /// then what is there is only completed again, now and then, until the origin takes it or the
    /// checkpoint is given up.
    async fn note_refusal(&self, why: &Error) -> Result<()> {
        let refusals = {
            let mut refusals = self.entry.refusals.lock();
            let count = refusals.entry(self.file.number).or_insert(0);
            *count = count.saturating_add(1);
            *count
        };
        if !refusals.is_multiple_of(REFUSALS) || refusals > REFUSALS * ANEW_MAX {
            return Ok(());
        }
        tracing::warn!(object = %self.name, error = %why.describe(), "the origin makes no object of \
            the parts that it has: they are sent anew");
        let upload = self.log.lock().upload.clone();
        if let Some((upload, _)) = upload {
            match self.inner.engine.abort_upload(&self.name, &upload).await {
                Err(e) if is_final(&e) => {
                    tracing::warn!(object = %self.name, error = %e.describe(), "an upload could not \
                        be aborted: parts of it may be left at the origin");
                }
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        self.forget().await
    }

    /// Sends the parts that the origin does not have, and counts their bytes. Returns the id of the
    /// upload, which is begun if there is none; `None`: not all were sent, because `may_begin` said of
    /// some that they may not.
    pub async fn send_parts(
        &self,
        turn: &Turn,
        counted: &AtomicU64,
        may_begin: impl Fn() -> bool,
    ) -> Result<Option<String>> {
        let size = self.reader.size();
        let known = self.log.lock().upload.clone();
        let (upload, part_bytes) = match known {
            Some(known) => known,
            None => self.begin().await?,
        };
        let count = size.div_ceil(part_bytes) as u32;
        let missing: Vec<u32> = {
            let log = self.log.lock();
            let missing = (1..=count).filter(|n| !log.parts.contains_key(n));
            missing.collect()
        };
        let missing = in_turn(turn, missing).await;
        let sent = stream::iter(missing).map(|(number, my_turn)| {
            let begin = u64::from(number - 1) * part_bytes;
            let range = begin..(begin + part_bytes).min(size);
            let (upload, may_begin) = (&upload, &may_begin);
            async move {
                let bytes = range.end - range.start;
                let sent = self.send_part(upload, number, range, my_turn, may_begin);
                let Some(etag) = sent.await? else {
                    return Ok(false);
                };
                self.inner.stats.flushed_bytes.fetch_add(bytes, Relaxed);
                counted.fetch_add(bytes, Relaxed);
                let noted = self.noted(move |log| log.add(number, &etag, bytes));
                // It is known here, and sent again after a restart.
                if let Err(e) = noted.await {
                    tracing::debug!(object = %self.name, number, error = %e.describe(), "that the \
                        origin has a part could not be noted");
                }
                Ok::<_, Error>(true)
            }
        });
        let all = sent
            .buffer_unordered(self.inner.config.parts_in_flight.max(1))
            .try_fold(true, |all, one| async move { Ok(all && one) })
            .await?;
        Ok(all.then_some(upload))
    }

    async fn send_part(
        &self,
        upload: &str,
        number: u32,
        range: Range<u64>,
        my_turn: Arc<OwnedMutexGuard<()>>,
        may_begin: impl Fn() -> bool,
    ) -> Result<Option<String>> {
        let mut pause = PAUSE_FIRST;
        let mut attempt = 1;
        let mut my_turn = Some(my_turn);
        loop {
            let place = self.inner.parts.clone().acquire_owned().await;
            drop(my_turn.take());
            if !may_begin() {
                return Ok(None);
            }
            let (bytes, body) = (range.end - range.start, self.reader.stream(range.clone()));
            let sent = self
                .inner
                .engine
                .upload_part(&self.name, upload, number, bytes, body)
                .await;
            drop(place);
            match sent {
                Err(e) if attempt < PART_ATTEMPTS && e.kind() != ErrorKind::NotFound => {
                    tracing::debug!(object = %self.name, number, error = %e.describe(), "a part is \
                        sent again");
                    attempt += 1;
                    sleep(pause).await;
                    pause *= 2;
                }
                sent => return sent.map(|part| Some(part.etag)),
            }
        }
    }

    /// Begins an upload and notes it, whether or not somebody waits for that: otherwise nobody would
    /// know of it.
    async fn begin(&self) -> Result<(String, u64)> {
        // A part must be a whole number of blocks; 10,000 parts are the most.
        let least = self
            .reader
            .size()
            .div_ceil(limits::UPLOAD_PARTS_MAX as u64 - 1);
        let part_bytes = self.inner.config.part_bytes.max(least);
        let part_bytes = part_bytes.next_multiple_of(forebay_protocol::lent::BLOCK_BYTES);
        let (engine, name) = (self.inner.engine.clone(), self.name.clone());
        let (log, file) = (self.log.clone(), self.file.name.clone());
        let begun = async move {
            let id = engine.create_upload(&name, PutRequest::default()).await?;
            let of = id.clone();
            let noted = spawn_blocking(move || log.lock().begin(&of, &file, part_bytes)).await;
            let Err(e) = noted.map_err(ended).flatten() else {
                return Ok((id, part_bytes));
            };
            if let Err(e) = engine.abort_upload(&name, &id).await {
                tracing::warn!(object = %name, error = %e.describe(), "an upload could not be aborted");
            }
            Err(e)
        };
        let begun = self.entry.begins.track_future(begun);
        to_its_end(self.inner, self.entry, begun).await
    }

    /// The upload has ended.
    async fn forget(&self) -> Result<()> {
        self.noted(|log| {
            log.forget();
            Ok(())
        })
        .await
    }

    /// Changes the log, away from the runtime's threads.
    async fn noted(
        &self,
        change: impl FnOnce(&mut Parts) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let log = self.log.clone();
        let noted = spawn_blocking(move || change(&mut log.lock())).await;
        noted.map_err(ended)?
    }

    /// Bytes of the parts that the origin has.
    pub fn bytes_there(&self) -> u64 {
        self.log.lock().parts.values().map(|(_, size)| *size).sum()
    }

    /// The ETag of the object, if one of this size is there now.
    async fn object_there(&self) -> Option<Option<String>> {
        let now = ReadOptions {
            bypass: true,
            ..ReadOptions::default()
        };
        let head = self.inner.engine.head(&self.name, &now).await.ok()?;
        (head.meta.size == self.reader.size()).then(|| head.meta.etag.clone())
    }
}

/// A file at the origin, under the id of its checkpoint.
pub(crate) fn name_of(entry: &Entry, file: &str) -> Result<ObjectName> {
    let id = entry.state.lock().journal.id.clone();
    let key = format!("{}/{id}/{file}", entry.place.prefix);
    ObjectName::new(entry.place.bucket.as_str(), key)
}

/// The logs of uploads in the folders of a checkpoint, with the numbers of their files.
pub(crate) fn logs(folders: &[PathBuf]) -> Vec<(u32, PathBuf)> {
    let entries = folders
        .iter()
        .filter_map(|folder| fs::read_dir(folder).ok());
    let paths = entries.flatten().flatten().map(|entry| entry.path());
    let numbered = paths.filter_map(|path| {
        let stem = path.file_stem()?.to_str()?;
        let number = stem.strip_prefix('f')?.parse().ok()?;
        let is_log = path.extension().is_some_and(|e| e == LOG_EXTENSION);
        is_log.then_some((number, path))
    });
    numbered.collect()
}

/// Ends all uploads of a checkpoint that are under way. Nobody may send them at the same time.
///
/// # Errors
/// What keeps the origin from ending one of them, after all were tried; rather what may pass than what
/// is final.
pub(crate) async fn abort(inner: &Inner, entry: &Entry) -> Result<()> {
    let folders = inner.folders(entry);
    let found = spawn_blocking(move || logs(&folders))
        .await
        .map_err(ended)?;
    let mut done = Ok(());
    for (number, path) in found {
        if let Err(e) = abort_one(inner, entry, number, path).await
            && done.as_ref().err().is_none_or(is_final)
        {
            done = Err(e);
        }
    }
    done
}

/// Whether the origin will refuse it again.
pub(crate) fn is_final(e: &Error) -> bool {
    matches!(
        e.kind(),
        ErrorKind::PermissionDenied | ErrorKind::Unsupported | ErrorKind::BucketNotFound
    )
}

async fn abort_one(inner: &Inner, entry: &Entry, number: u32, path: PathBuf) -> Result<()> {
    let loaded = spawn_blocking(move || Parts::load(path)).await;
    let mut log = loaded.map_err(ended)?;
    // Logs of earlier versions do not say whose they are.
    let named = || {
        let state = entry.state.lock();
        let mut files = state.journal.files.iter();
        let file = files.find(|file| file.number == number);
        file.map(|file| file.name.clone())
    };
    if let Some((upload, _)) = log.upload.clone()
        && let Some(file) = log.name.clone().or_else(named)
    {
        let name = name_of(entry, &file)?;
        match inner.engine.abort_upload(&name, &upload).await {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    let forgotten = spawn_blocking(move || log.forget()).await;
    forgotten.map_err(ended)
}
