//! From the disk to the origin: data files, those that come last, and the manifest.
//!
//! A flush that fails is made again, with pauses that grow, until it succeeds or the checkpoint is
//! given up: nothing of it is lost by waiting. What the origin has already is not sent again: whole
//! files are noted in the journal, parts in a log. Names hold the checkpoint's id, so whatever is
//! found under one is of this very checkpoint, and sending it again changes nothing.
//!
//! A write that the origin was asked for may take effect although nobody waits for it any more. So
//! writes go on to their end when a flush is cancelled, and a removal begins after they have ended.
//! What readers look for (the manifest, and the files beside it) has the same keys for all
//! checkpoints of a name: whoever writes or removes it holds the name (`Inner::hold_tops`) and looks
//! first whose it is.

use crate::{
    early,
    entry::{Entry, Phase},
    file::Reader,
    journal::{Elsewhere, FileEntry, Journal, Stage},
    manifest::{MANIFEST, Manifest},
    stages::{Inner, ended, unknown},
    types::Place,
    upload::{Turn, Upload, name_of},
};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, ObjectName, Result, request, threads};
use forebay_engine::{PutCondition, PutRequest, ReadOptions};
use futures::{StreamExt, TryStreamExt, future::join_all, stream};
use std::{
    fs,
    future::Future,
    mem,
    path::PathBuf,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::{
    sync::Mutex as AsyncMutex,
    task::spawn_blocking,
    time::{Instant, sleep},
};

pub(crate) const PAUSE_FIRST: Duration = Duration::from_millis(500);
pub(crate) const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Files of one checkpoint that are sent at the same time; their parts share a limit of the node.
pub(crate) const FILES_IN_FLIGHT: usize = 16;
/// Removals of one checkpoint that are under way at the same time.
const REMOVALS_IN_FLIGHT: usize = 16;
/// The journal is written at most so often while files are sent.
const SAVE_EVERY: Duration = Duration::from_secs(1);
/// How often the origin is asked again for a file of another node that it did not have.
const ELSEWHERE_EVERY: Duration = Duration::from_secs(1);

/// How a flush that did not fail ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Durable,
    /// The origin has a later checkpoint of this name, which another node wrote.
    Outdated,
}

/// Flushes a checkpoint, however often it takes.
pub(crate) async fn run(inner: Arc<Inner>, entry: Arc<Entry>) {
    let cancel = entry.cancel.clone();
    tokio::select! {
        () = cancel.cancelled() => {}
        outcome = until_ended(&inner, &entry) => match outcome {
            Outcome::Durable => {
                early::end_leftovers(&inner, &entry);
                inner.bound_warm().await;
            }
            Outcome::Outdated => {
                if let Err(e) = inner.give_up(entry).await {
                    tracing::warn!(error = %e.describe(), "a checkpoint that came too late");
                }
            }
        }
    }
}

async fn until_ended(inner: &Arc<Inner>, entry: &Arc<Entry>) -> Outcome {
    wait_for_earlier(inner, entry).await;
    let mut pause = PAUSE_FIRST;
    loop {
        entry.state.lock().retry_ms = 0;
        set_phase(inner, entry, Phase::Flushing, None);
        if entry.state.lock().lost {
            // Its disk may be back: what is sent now, however long that takes, is not lost.
            note_lost(inner, entry).await;
        }
        match once(inner, entry).await {
            Ok(Outcome::Outdated) => return Outcome::Outdated,
            Ok(Outcome::Durable) => {
                inner.stats.durable.fetch_add(1, Relaxed);
                let status = inner.status_of(entry);
                tracing::info!(
                    checkpoint = %entry.place,
                    id = entry.folder,
                    bytes = status.bytes,
                    seconds = status.seconds,
                    "a checkpoint is durable"
                );
                return Outcome::Durable;
            }
            Err(e) => {
                inner.stats.failures.fetch_add(1, Relaxed);
                let e = note_lost(inner, entry).await.unwrap_or(e);
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
                let full = entry.state.lock().full;
                if let Some(dir) = full.filter(|_| e.kind() == ErrorKind::NoRoom) {
                    // Others filled the disk: one that is durable makes room there.
                    inner.evict_one(&[dir]).await;
                }
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
        // The next attempt looks in the logs for uploads: those that this one was still beginning are to
        // be there.
        entry.begins.wait().await;
    }
}

/// Notes whether files that the origin lacks are on none of this node's disks any more: then it cannot
/// become durable before they are back, and this error says so.
async fn note_lost(inner: &Inner, entry: &Entry) -> Option<Error> {
    let files: Vec<_> = {
        let state = entry.state.lock();
        let files = state.journal.files.iter().filter(|f| !f.uploaded);
        let files = files.map(|f| (inner.path_of(entry, &state, f.number), f.clone()));
        files.collect()
    };
    let looked = threads::blocking(move || {
        let is_here = |path: &PathBuf| fs::metadata(path).is_ok();
        let mut files = files.into_iter();
        files.find(|(path, _)| !path.as_ref().is_some_and(is_here))
    });
    let Ok(lost) = looked.await else {
        // Without a look, it is as it was.
        return None;
    };
    let was_lost = {
        let mut state = entry.state.lock();
        if !state.phase.is_pending() {
            // It was given up meanwhile, and its files go for that.
            return None;
        }
        mem::replace(&mut state.lost, lost.is_some())
    };
    let (_, file) = lost?;
    let error = gone(entry, &file);
    if !was_lost {
        tracing::error!(
            checkpoint = %entry.place,
            id = entry.folder,
            error = %error.describe(),
            "a staged checkpoint cannot become durable; it is tried again and again, in case the disk \
             comes back"
        );
    }
    Some(error)
}

/// The error for a file that is on no disk of this node.
fn gone(entry: &Entry, file: &FileEntry) -> Error {
    Error::internal(format!(
        "{}: its file {:?} is not on this node's disks any more",
        entry.place, file.name
    ))
    .hint("bring the disk back and start the node again, or give the checkpoint up")
}

/// Those of the same name become durable in the order of their commits. One that another node was
/// faster than, and that may not replace anything, is not waited for: it would never come before.
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

/// Whether it is still to be flushed.
fn check_pending(entry: &Entry) -> Result<()> {
    match entry.state.lock().phase.is_pending() {
        true => Ok(()),
        false => Err(unknown(&entry.place, &entry.folder)),
    }
}

/// Work that changes the origin: it goes on if nobody waits for it any more, and removals and the
/// end of the node wait for it.
///
/// # Errors
/// `Conflict` if the checkpoint was given up by now: a removal may have begun, and would not wait.
pub(crate) async fn to_its_end<T: Send + 'static>(
    inner: &Inner,
    entry: &Entry,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let tracked = inner.tasks.track_future(entry.writes.track_future(work));
    // In this order: a removal that begins now waits for this.
    if matches!(entry.state.lock().phase, Phase::Removing | Phase::Gone) {
        return Err(Error::conflict(format!(
            "{}: the checkpoint {} was given up",
            entry.place, entry.folder
        )));
    }
    request::spawn(tracked).await.map_err(ended)?
}

/// One attempt.
async fn once(inner: &Arc<Inner>, entry: &Arc<Entry>) -> Result<Outcome> {
    // Before it is sent, which may take long, and until then it is what this node's readers get.
    let is_whole = entry.state.lock().journal.part.is_none();
    if entry.recovered && is_whole {
        let there = at_origin(inner, entry).await?;
        if is_outdated(inner, entry, there.as_ref()) {
            return Ok(Outcome::Outdated);
        }
        let mut state = entry.state.lock();
        if there.is_some_and(|manifest| manifest.id == state.journal.id) {
            // It was published, which its disk could not note. The manifest comes after all files.
            state
                .journal
                .files
                .iter_mut()
                .for_each(|f| f.uploaded = true);
        }
    }
    let (files, part) = {
        let state = entry.state.lock();
        let j = &state.journal;
        let have = j.files.iter().filter(|f| f.uploaded).map(|f| f.size).sum();
        entry.at_origin.store(have, Relaxed);
        (j.files.clone(), j.part.is_some())
    };
    let saved = AsyncMutex::new(Instant::now());
    let turn = Turn::default();
    let missing: Vec<FileEntry> = files.iter().filter(|f| !f.uploaded).cloned().collect();
    let sent = stream::iter(missing).map(|file| {
        let (saved, turn) = (&saved, &turn);
        async move {
            let etag = send(inner, entry, &file, turn).await?;
            {
                let mut state = entry.state.lock();
                let mut files = state.journal.files.iter_mut();
                if let Some(f) = files.find(|f| f.number == file.number) {
                    (f.uploaded, f.etag) = (true, etag);
                }
            }
            let mut last = saved.lock().await;
            if last.elapsed() >= SAVE_EVERY {
                note_sent(inner, entry).await?;
                *last = Instant::now();
            }
            Ok::<_, Error>(())
        }
    });
    sent.buffer_unordered(FILES_IN_FLIGHT)
        .try_collect::<Vec<()>>()
        .await?;
    note_sent(inner, entry).await?;
    // Whoever sent files early has ended: what is left are uploads of files that were replaced.
    if let Err(e) = early::abort(inner, entry).await {
        tracing::debug!(checkpoint = %entry.place, error = %e.describe(), "uploads of files that were \
            replaced are aborted later");
    }
    if !part {
        wait_for_others(inner, entry).await?;
        let published = to_its_end(inner, entry, publish(inner.clone(), entry.clone())).await?;
        if published == Outcome::Outdated {
            return Ok(published);
        }
    }
    let given_up = || unknown(&entry.place, &entry.folder);
    {
        let mut state = entry.state.lock();
        if !state.phase.is_pending() {
            return Err(given_up());
        }
        let now = inner.now_ms();
        state.journal.stage = Stage::Durable;
        state.journal.durable_ms = now;
        inner.note_late(entry, &mut state, now);
    }
    if let Err(e) = inner.save(entry).await {
        if e.kind() == ErrorKind::NoRoom {
            return Err(e);
        }
        // It is durable all the same, and the next start asks the origin.
        tracing::warn!(checkpoint = %entry.place, id = entry.folder, error = %e.describe(),
            "that a checkpoint is durable could not be noted on the disk");
    }
    {
        let mut state = entry.state.lock();
        if !state.phase.is_pending() {
            return Err(given_up());
        }
        state.phase = Phase::Durable;
        state.error = None;
        state.read_ms = inner.steady_ms();
    }
    inner.tell();
    Ok(Outcome::Durable)
}

/// Notes what the origin has by now. What cannot be noted, because others filled the disk, is sent
/// again after a restart: that is no reason to send the rest later.
async fn note_sent(inner: &Inner, entry: &Arc<Entry>) -> Result<()> {
    if let Err(e) = inner.save(entry).await {
        check_pending(entry)?;
        tracing::debug!(checkpoint = %entry.place, id = entry.folder, error = %e.describe(),
            "what the origin has of a checkpoint could not be noted");
    }
    Ok(())
}

/// Until the origin has what other nodes send.
async fn wait_for_others(inner: &Inner, entry: &Entry) -> Result<()> {
    let others = entry.state.lock().journal.elsewhere.clone();
    let turn = AsyncMutex::new(());
    let waited = stream::iter(others).map(|file| wait_for_other(inner, entry, file, &turn));
    waited
        .buffer_unordered(FILES_IN_FLIGHT)
        .try_collect::<Vec<()>>()
        .await?;
    Ok(())
}

/// Of those that are not there yet, one at a time is asked for again.
async fn wait_for_other(
    inner: &Inner,
    entry: &Entry,
    file: Elsewhere,
    turn: &AsyncMutex<()>,
) -> Result<()> {
    let name = name_of(entry, &file.name)?;
    if is_there(inner, &name, file.size).await? {
        return Ok(());
    }
    let _mine = turn.lock().await;
    while !is_there(inner, &name, file.size).await? {
        entry.state.lock().error = Some(format!("{name}: another node has not sent it yet"));
        sleep(ELSEWHERE_EVERY).await;
    }
    Ok(())
}

/// Whether the origin has an object of this name and size now.
async fn is_there(inner: &Inner, name: &ObjectName, size: u64) -> Result<bool> {
    let now = ReadOptions {
        bypass: true,
        ..ReadOptions::default()
    };
    match inner.engine.head(name, &now).await {
        Ok(head) if head.meta.size == size => Ok(true),
        Ok(head) => Err(Error::conflict(format!(
            "{name} has {} bytes, and the commit says {size}",
            head.meta.size
        ))),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// The manifest that the origin has of this name, whichever checkpoint it is of.
async fn at_origin(inner: &Inner, entry: &Entry) -> Result<Option<Manifest>> {
    let place = &entry.place;
    Manifest::at_origin(&inner.engine, &place.bucket, &place.prefix).await
}

/// Whether it takes the place of what has its name, whatever that is.
fn may_replace(entry: &Entry) -> bool {
    let state = entry.state.lock();
    state.journal.part.is_none() && state.journal.replace
}

/// Whether what the origin has was saved after this checkpoint, elsewhere: by the clocks, unless it is
/// known to be older. Then this one comes too late, for it would take its place.
fn is_outdated(inner: &Inner, entry: &Entry, there: Option<&Manifest>) -> bool {
    let Some(there) = there.filter(|m| may_replace(entry) && !inner.is_earlier(&m.id, entry))
    else {
        return false;
    };
    let state = entry.state.lock();
    let journal = &state.journal;
    let is_known = there.id == journal.id || journal.over.as_ref() == Some(&there.id);
    let outdated = !is_known && there.saved_ms > journal.staged_ms;
    if outdated {
        tracing::warn!(
            checkpoint = %entry.place,
            id = entry.folder,
            later = there.id,
            seconds = (there.saved_ms - journal.staged_ms) as f64 / 1e3,
            "the origin has a checkpoint of this name that was saved later, through another node: \
             this one is given up"
        );
    }
    outdated
}

/// Lets the later ones of its name, here, know that this one, which is visible, is older than they
/// are: what they know outlives this one's place on the disk.
async fn tell_later(inner: &Inner, entry: &Entry) {
    let id = entry.state.lock().journal.id.clone();
    for later in inner.later_than(entry) {
        later.state.lock().journal.over = Some(id.clone());
        // Whatever is noted of it next has this too, so that this one need not wait for its disk.
        if let Err(e) = inner.save(&later).await {
            tracing::debug!(checkpoint = %later.place, id = later.folder, error = %e.describe(),
                "that an earlier one is durable is noted later");
        }
    }
}

/// Makes the checkpoint visible.
async fn publish(inner: Arc<Inner>, entry: Arc<Entry>) -> Result<Outcome> {
    let place = &entry.place;
    let _held = inner.hold_tops(place).await;
    let before = at_origin(&inner, &entry).await?;
    if is_outdated(&inner, &entry, before.as_ref()) {
        return Ok(Outcome::Outdated);
    }
    let (replace, id) = {
        let state = entry.state.lock();
        (state.journal.replace, state.journal.id.clone())
    };
    match &before {
        // The answer was lost.
        Some(manifest) if manifest.id == id => return published(&inner, &entry).await,
        Some(_) if !replace => {
            let was_taken = mem::replace(&mut entry.state.lock().journal.taken, true);
            if !was_taken {
                // So that the next start knows it before it has asked the origin.
                note_sent(&inner, &entry).await?;
            }
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("{place}: another checkpoint has this name by now"),
            )
            .hint("give this one up, or remove the other one"));
        }
        _ => {}
    }
    let (last, changes_more) = {
        let mut state = entry.state.lock();
        let files = state.journal.files.iter().filter(|f| f.last);
        let last: Vec<FileEntry> = files.cloned().collect();
        state.journal.publishing = !last.is_empty();
        state.journal.remove = before.map_or(Vec::new(), |m| replaced(&m, place, &last));
        let changes_more = state.journal.publishing || !state.journal.remove.is_empty();
        (last, changes_more)
    };
    match changes_more {
        // Otherwise nobody would know after a restart what to put back or to remove.
        true => inner.save(&entry).await?,
        false => note_sent(&inner, &entry).await?,
    }
    for file in &last {
        check_pending(&entry)?;
        let key = format!("{}/{}", place.prefix, file.name);
        let name = ObjectName::new(place.bucket.as_str(), key)?;
        send_whole(&inner, &entry, file, name).await?;
    }
    check_pending(&entry)?;
    put_manifest(&inner, &entry, replace).await?;
    published(&inner, &entry).await
}

/// What is left to do when the checkpoint is visible.
async fn published(inner: &Inner, entry: &Entry) -> Result<Outcome> {
    tell_later(inner, entry).await;
    clean(inner, entry).await?;
    Ok(Outcome::Durable)
}

/// The keys of a checkpoint that is replaced by one with these files that come last.
fn replaced(manifest: &Manifest, place: &Place, last: &[FileEntry]) -> Vec<String> {
    let gone = manifest.last.iter().filter(|name| {
        let is_written = last.iter().any(|f| f.name == **name);
        !is_written
    });
    let gone = gone.map(|name| format!("{}/{name}", place.prefix));
    manifest.files_keys(&place.prefix).chain(gone).collect()
}

async fn put_manifest(inner: &Inner, entry: &Arc<Entry>, replace: bool) -> Result<()> {
    let of = entry.clone();
    // It may have a hundred thousand files.
    let written = spawn_blocking(move || {
        let manifest = Manifest::of(&of.state.lock().journal);
        serde_json::to_vec(&manifest)
    });
    let text = written
        .await
        .map_err(ended)?
        .map_err(|e| Error::internal("a manifest cannot be written").caused_by(e))?;
    let name = manifest_name(&entry.place)?;
    let mut request = PutRequest::default();
    request.attributes.content_type = Some("application/json".into());
    if !replace {
        request.condition = PutCondition::IfAbsent;
    }
    let (size, text) = (Some(text.len() as u64), Bytes::from(text));
    let body = || stream::iter([Ok(text.clone())]).boxed();
    let put = inner.engine.put(&name, request.clone(), size, body()).await;
    match put {
        Err(e) if e.kind() == ErrorKind::Unsupported && !replace => {
            // An origin without conditions: it was looked a moment ago.
            request.condition = PutCondition::Always;
            inner.engine.put(&name, request, size, body()).await?;
        }
        put => drop(put?),
    }
    Ok(())
}

fn manifest_name(place: &Place) -> Result<ObjectName> {
    ObjectName::new(
        place.bucket.as_str(),
        format!("{}/{MANIFEST}", place.prefix),
    )
}

/// Removes what was replaced. It is not seen any more: what the origin does not remove now is tried
/// again, and what it will never remove stays there as bytes that nobody reads.
async fn clean(inner: &Inner, entry: &Entry) -> Result<()> {
    let keys = entry.state.lock().journal.remove.clone();
    let (mut left, mut why) = (0_usize, None);
    for keys in keys.chunks(REMOVALS_IN_FLIGHT) {
        for removed in delete_together(inner, entry, keys).await {
            match removed {
                Err(e) if e.kind().is_transient() => return Err(e),
                Err(e) => {
                    left += 1;
                    why.get_or_insert(e);
                }
                Ok(()) => {}
            }
        }
    }
    if let Some(e) = why {
        tracing::warn!(checkpoint = %entry.place, id = entry.folder, files = left,
            error = %e.describe(), "files of the checkpoint that this one replaced stay at the origin");
    }
    entry.state.lock().journal.remove.clear();
    Ok(())
}

async fn delete(inner: &Inner, entry: &Entry, key: &str) -> Result<()> {
    let name = ObjectName::new(entry.place.bucket.as_str(), key)?;
    inner.engine.delete(&name).await
}

/// Deletes a few objects at the same time. All of that has ended when this returns: none is deleted
/// later, when its key may be another one's.
async fn delete_together(inner: &Inner, entry: &Entry, keys: &[String]) -> Vec<Result<()>> {
    join_all(keys.iter().map(|key| delete(inner, entry, key))).await
}

/// Deletes objects in any order.
async fn delete_all(inner: &Inner, entry: &Entry, keys: Vec<String>) -> Result<()> {
    for keys in keys.chunks(REMOVALS_IN_FLIGHT) {
        let removed = delete_together(inner, entry, keys).await;
        removed.into_iter().collect::<Result<()>>()?;
    }
    Ok(())
}

pub(crate) fn path_of(inner: &Inner, entry: &Entry, file: &FileEntry) -> Result<PathBuf> {
    let path = {
        let state = entry.state.lock();
        inner.path_of(entry, &state, file.number)
    };
    path.ok_or_else(|| gone(entry, file))
}

pub(crate) async fn reader_of(
    inner: &Inner,
    entry: &Entry,
    file: &FileEntry,
) -> Result<Arc<Reader>> {
    let (path, size) = (path_of(inner, entry, file)?, file.size);
    let opened = spawn_blocking(move || Reader::open(&path, size)).await;
    opened.map_err(ended)?.map(Arc::new)
}

/// Sends a file under the checkpoint's id, in parts if it is large.
async fn send(
    inner: &Arc<Inner>,
    entry: &Arc<Entry>,
    file: &FileEntry,
    turn: &Turn,
) -> Result<Option<String>> {
    if file.size <= inner.config.part_bytes {
        let name = name_of(entry, &file.name)?;
        let etag = send_whole(inner, entry, file, name).await?;
        entry.at_origin.fetch_add(file.size, Relaxed);
        return Ok(etag);
    }
    early::wait(entry, file.number).await;
    let upload = Upload::open(inner, entry, file).await?;
    let sent = upload.send(turn).await;
    // The log of its parts is beside the file.
    let dir = entry.state.lock().dirs.get(&file.number).copied();
    if let Some(dir) = dir {
        entry.note_room(dir, &sent);
    }
    sent
}

/// Sends a file as `name`, in one request.
async fn send_whole(
    inner: &Arc<Inner>,
    entry: &Arc<Entry>,
    file: &FileEntry,
    name: ObjectName,
) -> Result<Option<String>> {
    let reader = reader_of(inner, entry, file).await?;
    let place = inner.parts.clone().acquire_owned().await;
    let (sender, size) = (inner.clone(), file.size);
    let sent = async move {
        let _place = place;
        let body = reader.stream(0..size);
        let put = sender
            .engine
            .put(&name, PutRequest::default(), Some(size), body)
            .await?;
        sender.stats.flushed_bytes.fetch_add(size, Relaxed);
        Ok(put.etag)
    };
    to_its_end(inner, entry, sent).await
}

/// Removes what the origin has of a checkpoint, however often it takes, and then what is here.
pub(crate) async fn remove(inner: Arc<Inner>, entry: Arc<Entry>) {
    let mut pause = PAUSE_FIRST;
    loop {
        // Whoever asked for it again has done it.
        if entry.state.lock().phase == Phase::Gone {
            return;
        }
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

/// Removes what the origin has of a checkpoint that was given up, or of a durable one. One that was
/// given up and turns out to be durable is left there.
pub(crate) async fn remove_once(inner: &Arc<Inner>, entry: &Arc<Entry>) -> Result<()> {
    early::abort(inner, entry).await?;
    let journal = entry.state.lock().journal.clone();
    if !journal.was_committed() {
        return Ok(());
    }
    if !remove_tops(inner, entry, &journal).await? {
        return Ok(());
    }
    delete_all(inner, entry, journal.keys()).await
}

/// Removes what readers look for, as far as it is this checkpoint's. `false`: that stays, and with
/// it all of the checkpoint.
async fn remove_tops(inner: &Inner, entry: &Entry, journal: &Journal) -> Result<bool> {
    let place = &entry.place;
    let _held = inner.hold_tops(place).await;
    let there = match Manifest::at_origin(&inner.engine, &place.bucket, &place.prefix).await {
        // Somebody else's.
        Err(e) if matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) => None,
        there => there?,
    };
    let is_mine = there.as_ref().is_some_and(|m| m.id == journal.id);
    if is_mine && !journal.whole {
        tracing::info!(checkpoint = %place, id = entry.folder, "a checkpoint was durable before it \
            was given up: it stays at the origin");
        clean(inner, entry).await?;
        return Ok(false);
    }
    let last = journal.files.iter().filter(|f| f.last);
    let last = last.map(|file| file.name.as_str());
    if is_mine {
        // The manifest as the last of these: as long as it is there, they are this checkpoint's.
        for name in last.chain([MANIFEST]) {
            delete(inner, entry, &format!("{}/{name}", place.prefix)).await?;
        }
    } else if journal.publishing && !journal.whole {
        for name in last {
            put_back(inner, place, name, there.as_ref()).await?;
        }
    }
    Ok(true)
}

/// Makes a file beside the manifest that of the checkpoint which is there, or removes it.
async fn put_back(
    inner: &Inner,
    place: &Place,
    name: &str,
    there: Option<&Manifest>,
) -> Result<()> {
    let object = |key: String| ObjectName::new(place.bucket.as_str(), key);
    let top = object(format!("{}/{name}", place.prefix))?;
    let Some(manifest) = there.filter(|m| m.last.iter().any(|last| last == name)) else {
        return inner.engine.delete(&top).await;
    };
    let from = object(format!("{}/{}/{name}", place.prefix, manifest.id))?;
    let copied = inner
        .engine
        .copy(&from, None, &top, PutRequest::default())
        .await;
    match copied {
        // It is on its way out itself.
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        copied => copied.map(drop),
    }
}
