//! Files that arrive: their room, their bytes on the disk, and their entry in the journal.

use crate::{
    early,
    entry::{Entry, Phase},
    file::{Writer, disk_bytes},
    home,
    journal::FileEntry,
    rooms::Unfinished,
    stages::{
        FILES_MAX, FOLDER, Inner, Stages, check_file_name, check_size, disk_error, ended,
        folder_of, unknown,
    },
    types::Place,
};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, ObjectName, Result};
use forebay_engine::ByteStream;
use futures::TryStreamExt;
use std::{
    fs,
    path::Path,
    sync::{Arc, atomic::Ordering::Relaxed},
};
use tokio::task::spawn_blocking;

/// What errors call a file that arrives.
const STAGED: &str = "the staged file";
/// Bytes of a body that are written at once.
const PIECE_BYTES: usize = 1 << 20;
/// Of small pieces, so many: each keeps the buffer that it came in.
const PIECES_MAX: usize = 256;
/// What one file that arrives holds in memory: the piece that is written and the one that is read,
/// each with the buffer that it ends in.
const UPLOAD_MEMORY_BYTES: u64 = 4 << 20;
/// A file of unknown length takes its room in steps: of this size, or of a part of what came.
const ROOM_STEP_BYTES: u64 = 4 << 20;

impl Stages {
    /// Stages one file: `size` is the length of `body`, if it is known. Returns its size when it is
    /// on disk and synced.
    ///
    /// # Errors
    /// `NotFound` for an id that is not being staged, `NoRoom`, `Busy`, or what broke the body off.
    pub async fn put(
        &self,
        place: &Place,
        id: &str,
        part: Option<&str>,
        name: &str,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<u64> {
        check_file_name(name)?;
        check_size(size.unwrap_or(0))?;
        let inner = &self.0;
        let entry = inner.find(place, &folder_of(id, part)?)?;
        if let Some(look) = entry.look.get() {
            look.check()?;
        }
        ObjectName::new(
            place.bucket.as_str(),
            format!("{}/{id}/{name}", place.prefix),
        )
        .map_err(|e| e.with_kind(ErrorKind::Invalid))?;
        let arrival = Arrival::begin(inner, &entry)?;
        let _memory = inner
            .engine
            .budget()
            .hold(UPLOAD_MEMORY_BYTES.min(inner.engine.budget().holdable_bytes()))
            .await
            .map_err(|e| e.context("the file was refused before it was read"))?;
        let (least, first) = match size.map(disk_bytes) {
            Some(all) => (all, all),
            None => (PIECE_BYTES as u64, ROOM_STEP_BYTES),
        };
        let room = inner.room_for(&entry, least, first, None).await?;
        let (dir, first_bytes) = (room.dir, room.bytes);
        let path = inner
            .folder(dir, &entry.folder)
            .join(format!("f{}", arrival.number));
        let unfinished = Unfinished::new(path.clone(), room);
        let (make, of) = (inner.clone(), entry.clone());
        // If nobody waits for it, it is removed after it was made.
        let made = spawn_blocking(move || {
            let writer = make.make_file(&of, dir, unfinished.path(), size);
            (unfinished, writer)
        });
        let (mut file, writer) = made.await.map_err(ended)?;
        let writer = writer?;
        if let Some(room) = file.room().filter(|_| writer.takes_room()) {
            room.came(first_bytes);
        }
        let mut writer: std::io::Result<Writer> = Ok(writer);
        let mut body = body;
        let mut writing: Option<tokio::task::JoinHandle<std::io::Result<Writer>>> = None;
        let (mut came, mut room_for) = (0u64, first_bytes);
        loop {
            let (pieces, is_end) = gather(&mut body).await?;
            came += pieces.iter().map(|p| p.len() as u64).sum::<u64>();
            if size.is_some_and(|size| came > size) {
                return Err(Error::invalid(format!(
                    "the file {name:?} is longer than was announced"
                )));
            }
            while disk_bytes(came) > room_for && size.is_none() {
                let wanted = ROOM_STEP_BYTES.max(came / 4);
                let more = match inner.room_for(&entry, 1, wanted, Some(dir)).await {
                    Err(_) if wanted > ROOM_STEP_BYTES => {
                        inner
                            .room_for(&entry, 1, ROOM_STEP_BYTES, Some(dir))
                            .await?
                    }
                    more => more?,
                };
                room_for += more.bytes;
                if let Some(room) = file.room() {
                    room.join(more);
                }
            }
            if let Some(task) = writing.take() {
                writer = task.await.map_err(ended)?;
            }
            let mut now = writer.map_err(|e| disk_error(STAGED, &path, e))?;
            if let Some(room) = file.room() {
                room.came(now.written());
            }
            if entry.cancel.is_cancelled() {
                return Err(unknown(place, id));
            }
            writing = Some(spawn_blocking(move || {
                now.write(&pieces)?;
                Ok(now)
            }));
            // Replaced before it is looked at.
            writer = Err(std::io::ErrorKind::Other.into());
            if is_end {
                break;
            }
        }
        if let Some(task) = writing.take() {
            writer = task.await.map_err(ended)?;
        }
        let writer = writer.map_err(|e| disk_error(STAGED, &path, e))?;
        if size.is_some_and(|size| writer.written() != size) {
            return Err(Error::invalid(format!(
                "the file {name:?} ended after {} of {} bytes",
                writer.written(),
                size.unwrap_or(0)
            )));
        }
        let finished = spawn_blocking(move || writer.finish())
            .await
            .map_err(ended)?;
        let size = finished.map_err(|e| disk_error(STAGED, &path, e))?;
        let (file, replaces) = arrival.end(name, size, dir, file)?;
        early::start(inner, &entry, file.clone());
        inner.stats.staged_bytes.fetch_add(size, Relaxed);
        inner.note_arrived(&entry, file, replaces).await?;
        Ok(size)
    }
}

impl Inner {
    /// Makes a file of a checkpoint, and what it needs around it.
    fn make_file(
        &self,
        entry: &Entry,
        dir: usize,
        path: &Path,
        size: Option<u64>,
    ) -> Result<Writer> {
        if entry.home != dir {
            let folder = self.folder(dir, &entry.folder);
            fs::create_dir_all(&folder).map_err(|e| disk_error("the folder", &folder, e))?;
            home::mark(&folder, &self.dirs[entry.home].join(FOLDER))?;
        }
        Writer::create(path, size).map_err(|e| disk_error(STAGED, path, e))
    }
}

/// The next pieces of a body, about [`PIECE_BYTES`] or [`PIECES_MAX`], and whether it has ended.
async fn gather(body: &mut ByteStream) -> Result<(Vec<Bytes>, bool)> {
    let (mut pieces, mut bytes) = (Vec::new(), 0);
    while bytes < PIECE_BYTES && pieces.len() < PIECES_MAX {
        match body.try_next().await? {
            Some(piece) => {
                bytes += piece.len();
                pieces.push(piece);
            }
            None => return Ok((pieces, true)),
        }
    }
    Ok((pieces, false))
}

/// A file that is arriving.
struct Arrival {
    inner: Arc<Inner>,
    entry: Arc<Entry>,
    number: u32,
}

impl Arrival {
    fn begin(inner: &Arc<Inner>, entry: &Arc<Entry>) -> Result<Arrival> {
        let mut state = entry.state.lock();
        if matches!(state.phase, Phase::Removing | Phase::Gone) {
            return Err(unknown(&entry.place, &entry.folder));
        }
        if state.phase != Phase::Staging {
            return Err(Error::conflict(format!(
                "{}: the checkpoint {} was committed: it takes no more files",
                entry.place, entry.folder
            )));
        }
        if state.journal.files.len() + state.uploads >= FILES_MAX {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("a checkpoint has at most {FILES_MAX} files"),
            ));
        }
        state.uploads += 1;
        state.heard = true;
        let number = state.next_number;
        state.next_number += 1;
        Ok(Arrival {
            inner: inner.clone(),
            entry: entry.clone(),
            number,
        })
    }

    /// The file is there. The second result: it takes the place of another one of its name.
    fn end(self, name: &str, size: u64, dir: usize, file: Unfinished) -> Result<(FileEntry, bool)> {
        let mut state = self.entry.state.lock();
        if state.phase != Phase::Staging {
            return Err(unknown(&self.entry.place, &self.entry.folder));
        }
        if let Some(mut room) = file.keep() {
            room.came(disk_bytes(size));
            let surplus = room.split(room.bytes.saturating_sub(disk_bytes(size)));
            // It is for the files that are to come.
            match (state.ahead.as_mut(), surplus) {
                (Some(ahead), Some(more)) if ahead.dir == dir => ahead.join(more),
                (_, surplus) => drop(surplus),
            }
            match state.rooms.iter_mut().find(|r| r.dir == dir) {
                Some(all) => all.join(room),
                None => state.rooms.push(room),
            }
        }
        state.dirs.insert(self.number, dir);
        let before = state.journal.files.iter().position(|f| f.name == name);
        let before = before.map(|at| state.journal.files.swap_remove(at));
        let made = FileEntry {
            name: name.to_owned(),
            size,
            number: self.number,
            last: false,
            uploaded: false,
            etag: None,
        };
        state.journal.files.push(made.clone());
        let replaces = before.is_some();
        // A file that was sent again replaces the first one.
        if let Some(old) = before
            && let Some(path) = self.inner.path_of(&self.entry, &state, old.number)
        {
            self.entry.early.cancel(old.number);
            let dir = state.dirs.remove(&old.number);
            let room = state.rooms.iter_mut().find(|r| Some(r.dir) == dir);
            let bytes = disk_bytes(old.size);
            if let Some(room) = room {
                let left = room.bytes.saturating_sub(bytes);
                room.shrink_to(left);
            }
            tokio::task::spawn_blocking(move || {
                let _ = fs::remove_file(path);
            });
        }
        Ok((made, replaces))
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let mut state = self.entry.state.lock();
        state.uploads -= 1;
        state.used_ms = self.inner.steady_ms();
    }
}
