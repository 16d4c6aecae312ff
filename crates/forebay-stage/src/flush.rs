//! From the disk to the origin: data files, those that come last, and the manifest.
//!
//! A flush that fails is made again, with pauses that grow, until it succeeds or the checkpoint is
//! given up: nothing of it is lost by waiting. What the origin has already is not sent again: whole
//! files are noted in the journal, parts in a log. Names hold the checkpoint's id, so whatever is
//! found under one is of this very checkpoint, and sending it again changes nothing.

use crate::{
    file::Reader,
    journal::{FileEntry, Parts, Stage},
    manifest::{MANIFEST, Manifest},
    stages::{Entry, Inner, Phase, Place},
};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, ObjectName, Result, limits};
use forebay_engine::{PutCondition, PutRequest, ReadOptions, UploadedPart};
use futures::{StreamExt, TryStreamExt, stream};
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::{
    sync::Mutex as AsyncMutex,
    task::spawn_blocking,
    time::{Instant, sleep},
};

const PAUSE_FIRST: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Attempts for one part before the flush counts as failed.
const PART_ATTEMPTS: u32 = 4;
/// Files of one checkpoint that are sent at the same time; their parts share a limit of the node.
const FILES_IN_FLIGHT: usize = 16;
/// The journal is written at most so often while files are sent.
const SAVE_EVERY: Duration = Duration::from_secs(1);
/// How often it is looked whether the origin has the files of other nodes.
const ELSEWHERE_EVERY: Duration = Duration::from_secs(1);

/// Flushes a checkpoint, however often it takes.
pub(crate) async fn run(inner: Arc<Inner>, entry: Arc<Entry>) {
    let cancel = entry.cancel.clone();
    tokio::select! {
        () = cancel.cancelled() => {}
        () = until_durable(&inner, &entry) => {
            inner.bound_warm().await;
        }
    }
}

async fn until_durable(inner: &Arc<Inner>, entry: &Arc<Entry>) {
    wait_for_earlier(inner, entry).await;
    let mut pause = PAUSE_FIRST;
    loop {
        entry.state.lock().retry_ms = 0;
        set_phase(inner, entry, Phase::Flushing, None);
        match once(inner, entry).await {
            Ok(()) => {
                inner.stats.durable.fetch_add(1, Relaxed);
                let status = inner.status_of(entry);
                tracing::info!(
                    checkpoint = %entry.place,
                    id = entry.folder,
                    bytes = status.bytes,
                    seconds = status.seconds,
                    "a checkpoint is durable"
                );
                return;
            }
            Err(e) => {
                inner.stats.failures.fetch_add(1, Relaxed);
                {
                    let mut state = entry.state.lock();
                    state.failures += 1;
                    state.retry_ms = inner.now_ms() + pause.as_millis() as i64;
                }
                set_phase(inner, entry, Phase::Failed, Some(e.describe()));
                tracing::warn!(
                    checkpoint = %entry.place,
                    id = entry.folder,
                    error = %e.describe(),
                    pause_s = pause.as_secs_f64(),
                    "a checkpoint could not be flushed; it is tried again"
                );
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Those of the same name become durable in the order of their commits.
async fn wait_for_earlier(inner: &Inner, entry: &Entry) {
    let mut changed = inner.changed.subscribe();
    loop {
        changed.borrow_and_update();
        let mine = entry.state.lock().journal.part.is_none();
        let waits = mine && inner.waits_for(entry).is_some();
        if !waits || changed.changed().await.is_err() {
            return;
        }
    }
}

fn set_phase(inner: &Inner, entry: &Entry, phase: Phase, error: Option<String>) {
    {
        let mut state = entry.state.lock();
        if !state.phase.is_pending() {
            return;
        }
        state.phase = phase;
        if error.is_some() {
            state.error = error;
        }
    }
    inner.tell();
}

/// One attempt.
async fn once(inner: &Arc<Inner>, entry: &Arc<Entry>) -> Result<()> {
    let (files, part, id) = {
        let state = entry.state.lock();
        let j = &state.journal;
        let have = j.files.iter().filter(|f| f.uploaded).map(|f| f.size).sum();
        entry.at_origin.store(have, Relaxed);
        (j.files.clone(), j.part.is_some(), j.id.clone())
    };
    let prefix = &entry.place.prefix;
    let saved = AsyncMutex::new(Instant::now());
    let missing: Vec<FileEntry> = files.iter().filter(|f| !f.uploaded).cloned().collect();
    let sent = stream::iter(missing).map(|file| {
        let key = format!("{prefix}/{id}/{}", file.name);
        let saved = &saved;
        async move {
            let etag = send(inner, entry, &file, key).await?;
            {
                let mut state = entry.state.lock();
                let mut files = state.journal.files.iter_mut();
                if let Some(f) = files.find(|f| f.number == file.number) {
                    (f.uploaded, f.etag) = (true, etag);
                }
            }
            let mut last = saved.lock().await;
            if last.elapsed() >= SAVE_EVERY {
                inner.save(entry, false).await?;
                *last = Instant::now();
            }
            Ok::<_, Error>(())
        }
    });
    sent.buffer_unordered(FILES_IN_FLIGHT)
        .try_collect::<Vec<()>>()
        .await?;
    inner.save(entry, false).await?;
    if !part {
        wait_for_others(inner, entry).await?;
        publish(inner, entry, &files).await?;
    }
    {
        let mut state = entry.state.lock();
        state.journal.stage = Stage::Durable;
        state.journal.durable_ms = inner.now_ms();
    }
    inner.save(entry, true).await?;
    {
        let mut state = entry.state.lock();
        state.phase = Phase::Durable;
        state.error = None;
        state.read_ms = inner.now_ms();
    }
    inner.tell();
    Ok(())
}

/// Until the origin has what other nodes send.
async fn wait_for_others(inner: &Inner, entry: &Entry) -> Result<()> {
    let (others, id) = {
        let state = entry.state.lock();
        (state.journal.elsewhere.clone(), state.journal.id.clone())
    };
    let now = ReadOptions {
        bypass: true,
        ..ReadOptions::default()
    };
    for file in others {
        let key = format!("{}/{id}/{}", entry.place.prefix, file.name);
        let name = ObjectName::new(entry.place.bucket.as_str(), key)?;
        loop {
            match inner.engine.head(&name, &now).await {
                Ok(head) if head.meta.size == file.size => break,
                Ok(head) => {
                    return Err(Error::conflict(format!(
                        "{name} has {} bytes, and the commit says {}",
                        head.meta.size, file.size
                    )));
                }
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    entry.state.lock().error =
                        Some(format!("{name}: another node has not sent it yet"));
                    sleep(ELSEWHERE_EVERY).await;
                }
                Err(e) => return Err(e),
            }
        }
    }
    Ok(())
}

/// Makes the checkpoint visible.
async fn publish(inner: &Arc<Inner>, entry: &Arc<Entry>, files: &[FileEntry]) -> Result<()> {
    let place = &entry.place;
    let (replace, id) = {
        let state = entry.state.lock();
        (state.journal.replace, state.journal.id.clone())
    };
    let before = Manifest::at_origin(&inner.engine, &place.bucket, &place.prefix).await?;
    match &before {
        // The answer was lost.
        Some(manifest) if manifest.id == id => return clean(inner, entry).await,
        Some(_) if !replace => {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("{place}: another checkpoint has this name by now"),
            )
            .hint("give this one up, or remove the other one"));
        }
        Some(manifest) => {
            let keys = manifest.files_keys(&place.prefix).collect();
            let tops = manifest.last.iter();
            let mine: Vec<&str> = files
                .iter()
                .filter(|f| f.last)
                .map(|f| f.name.as_str())
                .collect();
            let gone = tops.filter(|name| !mine.contains(&name.as_str()));
            let gone: Vec<String> = gone
                .map(|name| format!("{}/{name}", place.prefix))
                .collect();
            let mut keys: Vec<String> = keys;
            keys.extend(gone);
            entry.state.lock().journal.remove = keys;
            inner.save(entry, true).await?;
        }
        None => {}
    }
    let one = inner.visible_of(place).lock_owned().await;
    for file in files.iter().filter(|f| f.last) {
        let key = format!("{}/{}", place.prefix, file.name);
        send_whole(inner, entry, file, key).await?;
    }
    let manifest = Manifest::of(&entry.state.lock().journal);
    let text = serde_json::to_vec_pretty(&manifest)
        .map_err(|e| Error::internal("a manifest cannot be written").caused_by(e))?;
    let name = ObjectName::new(
        place.bucket.as_str(),
        format!("{}/{MANIFEST}", place.prefix),
    )?;
    let mut request = PutRequest::default();
    request.attributes.content_type = Some("application/json".into());
    if !replace {
        request.condition = PutCondition::IfAbsent;
    }
    // From here on it runs to its end, also if the checkpoint is given up meanwhile: whoever
    // removes it must know whether it became visible.
    if entry.cancel.is_cancelled() {
        return Err(Error::internal("the flush was ended"));
    }
    let (engine, stop) = (inner.engine.clone(), inner.stop.clone());
    let put = async move {
        let size = Some(text.len() as u64);
        let text = Bytes::from(text);
        let body = || stream::iter([Ok(text.clone())]).boxed();
        match engine.put(&name, request.clone(), size, body()).await {
            Err(e) if e.kind() == ErrorKind::Unsupported && !replace => {
                // An origin without conditions: it was looked a moment ago.
                request.condition = PutCondition::Always;
                engine.put(&name, request, size, body()).await
            }
            put => put,
        }
    };
    let put = tokio::spawn(async move {
        let _one = one;
        tokio::select! {
            () = stop.cancelled() => Err(Error::internal("the node is stopping")),
            put = put => put,
        }
    });
    put.await
        .map_err(|e| Error::internal("writing a manifest was broken off").caused_by(e))??;
    clean(inner, entry).await
}

/// Removes what was replaced. It is not seen any more; a failure leaves bytes behind, not a wrong
/// checkpoint, and the next attempt goes on.
async fn clean(inner: &Inner, entry: &Entry) -> Result<()> {
    let keys = entry.state.lock().journal.remove.clone();
    delete_all(inner, entry, keys).await?;
    entry.state.lock().journal.remove.clear();
    Ok(())
}

async fn delete_all(inner: &Inner, entry: &Entry, keys: Vec<String>) -> Result<()> {
    // In order, as far as it matters: the first ones are what readers look for.
    for key in keys {
        let name = ObjectName::new(entry.place.bucket.as_str(), key)?;
        inner.engine.delete(&name).await?;
    }
    Ok(())
}

async fn reader_of(inner: &Inner, entry: &Entry, file: &FileEntry) -> Result<Arc<Reader>> {
    let path = {
        let state = entry.state.lock();
        inner.path_of(entry, &state, file.number)
    };
    let path = path.ok_or_else(|| {
        Error::internal(format!(
            "{}: its file {:?} is not on this node's disks any more",
            entry.place, file.name
        ))
        .hint("bring the disk back and start the node again, or give the checkpoint up")
    })?;
    let size = file.size;
    let opened = spawn_blocking(move || Reader::open(&path, size)).await;
    let opened = opened.map_err(|e| Error::internal("opening a file ended").caused_by(e))?;
    opened.map(Arc::new)
}

/// Sends a file under `key`, in parts if it is large.
async fn send(
    inner: &Arc<Inner>,
    entry: &Arc<Entry>,
    file: &FileEntry,
    key: String,
) -> Result<Option<String>> {
    if file.size <= inner.config.part_bytes {
        let etag = send_whole(inner, entry, file, key).await?;
        entry.at_origin.fetch_add(file.size, Relaxed);
        return Ok(etag);
    }
    let path = {
        let state = entry.state.lock();
        inner.path_of(entry, &state, file.number)
    };
    let path = path.unwrap_or_default().with_extension("parts");
    let loaded = spawn_blocking(move || Parts::load(path)).await;
    let mut parts = loaded.map_err(|e| Error::internal("reading a log ended").caused_by(e))?;
    let name = ObjectName::new(entry.place.bucket.as_str(), key)?;
    for fresh in [false, true] {
        if fresh {
            parts.forget();
        }
        match send_parts(inner, entry, file, &name, &mut parts).await {
            Err(e) if e.kind() == ErrorKind::NotFound && !fresh => {
                // The origin does not know the upload: it has ended, or was removed there.
                let now = ReadOptions {
                    bypass: true,
                    ..ReadOptions::default()
                };
                match inner.engine.head(&name, &now).await {
                    Ok(head) if head.meta.size == file.size => {
                        parts.forget();
                        return Ok(head.meta.etag.clone());
                    }
                    _ => {
                        let lost: u64 = parts.parts.values().map(|(_, size)| size).sum();
                        let less = |n: u64| Some(n.saturating_sub(lost));
                        let _ = entry.at_origin.fetch_update(Relaxed, Relaxed, less);
                    }
                }
            }
            Ok(etag) => {
                parts.forget();
                return Ok(etag);
            }
            Err(e) => return Err(e),
        }
    }
    Err(Error::internal(
        "an upload was begun twice and is not known",
    ))
}

async fn send_parts(
    inner: &Arc<Inner>,
    entry: &Arc<Entry>,
    file: &FileEntry,
    name: &ObjectName,
    parts: &mut Parts,
) -> Result<Option<String>> {
    // A part must be a whole number of blocks; 10,000 parts are the most.
    let least = file.size.div_ceil(limits::UPLOAD_PARTS_MAX as u64 - 1);
    let wanted = inner.config.part_bytes.max(least);
    let wanted = wanted.next_multiple_of(crate::file::BLOCK_BYTES);
    let (upload, part_bytes) = match &parts.upload {
        Some(known) => known.clone(),
        None => {
            let id = inner
                .engine
                .create_upload(name, PutRequest::default())
                .await?;
            parts.begin(&id, wanted)?;
            (id, wanted)
        }
    };
    let count = file.size.div_ceil(part_bytes) as u32;
    let had: u64 = parts.parts.values().map(|(_, size)| *size).sum();
    entry.at_origin.fetch_add(had, Relaxed);
    let missing: Vec<u32> = (1..=count)
        .filter(|n| !parts.parts.contains_key(n))
        .collect();
    let reader = reader_of(inner, entry, file).await?;
    let log = AsyncMutex::new(&mut *parts);
    let sent = stream::iter(missing).map(|number| {
        let begin = u64::from(number - 1) * part_bytes;
        let range = begin..(begin + part_bytes).min(file.size);
        let (reader, upload, log) = (&reader, &upload, &log);
        async move {
            let size = range.end - range.start;
            let mut pause = PAUSE_FIRST;
            let mut attempt = 1;
            let part = loop {
                let place = inner.parts.clone().acquire_owned().await;
                let body = reader.stream(range.clone());
                let sent = inner
                    .engine
                    .upload_part(name, upload, number, size, body)
                    .await;
                drop(place);
                match sent {
                    Err(e) if attempt < PART_ATTEMPTS && e.kind() != ErrorKind::NotFound => {
                        tracing::debug!(object = %name, number, error = %e.describe(), "a part is \
                            sent again");
                        attempt += 1;
                        sleep(pause).await;
                        pause *= 2;
                    }
                    sent => break sent?,
                }
            };
            inner.stats.flushed_bytes.fetch_add(size, Relaxed);
            entry.at_origin.fetch_add(size, Relaxed);
            // A line of text without a sync: it does not wait for the disk.
            log.lock().await.add(number, &part.etag, size)
        }
    });
    sent.buffer_unordered(inner.config.parts_in_flight.max(1))
        .try_collect::<Vec<()>>()
        .await?;
    let all = parts
        .parts
        .iter()
        .map(|(number, (etag, size))| UploadedPart {
            number: *number,
            etag: etag.clone(),
            size: *size,
        });
    let all: Vec<UploadedPart> = all.collect();
    let done = inner.engine.complete_upload(name, &upload, all).await?;
    Ok(done.etag)
}

/// Sends a file under `key` in one request.
async fn send_whole(
    inner: &Arc<Inner>,
    entry: &Arc<Entry>,
    file: &FileEntry,
    key: String,
) -> Result<Option<String>> {
    let name = ObjectName::new(entry.place.bucket.as_str(), key)?;
    let reader = reader_of(inner, entry, file).await?;
    let _place = inner.parts.clone().acquire_owned().await;
    let body = reader.stream(0..file.size);
    let put = inner
        .engine
        .put(&name, PutRequest::default(), Some(file.size), body)
        .await?;
    inner.stats.flushed_bytes.fetch_add(file.size, Relaxed);
    Ok(put.etag)
}

/// Removes what the origin has of a checkpoint, however often it takes, and then what is here.
pub(crate) async fn remove(inner: Arc<Inner>, entry: Arc<Entry>) {
    let mut pause = PAUSE_FIRST;
    loop {
        let done = tokio::select! {
            () = inner.stop.cancelled() => return,
            done = remove_once(&inner, &entry) => done,
        };
        match done {
            Ok(()) => return inner.drop_local(&entry).await,
            Err(e) => {
                tracing::warn!(checkpoint = %entry.place, error = %e.describe(), "what the origin \
                    has of a checkpoint could not be removed; it is tried again");
                let mut state = entry.state.lock();
                state.failures += 1;
                state.error = Some(e.describe());
            }
        }
        tokio::select! {
            () = inner.stop.cancelled() => return,
            () = sleep(pause) => {}
        }
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

pub(crate) async fn remove_once(inner: &Arc<Inner>, entry: &Arc<Entry>) -> Result<()> {
    // A manifest that is on its way arrives, or does not.
    let one = inner.visible_of(&entry.place).lock_owned().await;
    let (mut keys, uploads, id, visible) = {
        let state = entry.state.lock();
        let paths = state.journal.files.iter().filter_map(|file| {
            let path = inner.path_of(entry, &state, file.number)?;
            Some((file.name.clone(), path.with_extension("parts")))
        });
        let paths: Vec<_> = paths.collect();
        (
            state.journal.remove.clone(),
            paths,
            state.journal.id.clone(),
            state.journal.visible.clone(),
        )
    };
    let Place { bucket, prefix } = &entry.place;
    let there = match Manifest::at_origin(&inner.engine, bucket, prefix).await {
        Ok(manifest) => manifest.map(|manifest| manifest.id),
        // Something else has this name.
        Err(e) if matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) => None,
        Err(e) => return Err(e),
    };
    match visible {
        // It was durable. What readers look for first goes first, unless it is another's by now.
        Some(visible) if there.as_ref() == Some(&visible.id) => {
            delete_all(inner, entry, visible.keys).await?;
        }
        Some(_) => {}
        // It was given up on its way. If it became visible before that, it stays, and what it
        // replaced goes; if it did not, what it would have replaced stays.
        None => {
            let own = format!("{prefix}/{id}/");
            let is_visible = there.as_ref() == Some(&id);
            keys.retain(|key| key.starts_with(&own) != is_visible);
        }
    }
    drop(one);
    for (file, path) in uploads {
        let loaded = spawn_blocking(move || Parts::load(path)).await;
        let mut parts = loaded.map_err(|e| Error::internal("reading a log ended").caused_by(e))?;
        if let Some((upload, _)) = parts.upload.clone() {
            let key = format!("{}/{id}/{file}", entry.place.prefix);
            let name = ObjectName::new(entry.place.bucket.as_str(), key)?;
            match inner.engine.abort_upload(&name, &upload).await {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
                _ => parts.forget(),
            }
        }
    }
    delete_all(inner, entry, keys).await
}
