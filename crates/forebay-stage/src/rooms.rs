//! Room on disk for staged files: taken from the cache's size, and given back when they are gone.

use crate::{
    entry::{Entry, Phase, State},
    stages::Inner,
};
use forebay_core::{Error, ErrorKind, Result, units::format_bytes};
use forebay_store::Store;
use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::task::spawn_blocking;

/// How long a removal is waited for at a time.
const GOING_MAX: Duration = Duration::from_millis(500);

/// Room in one cache directory. Dropping it gives it back.
pub(crate) struct Room {
    store: Arc<Store>,
    pub dir: usize,
    pub bytes: u64,
    /// Of these, what is not on the disk yet.
    to_come: u64,
}

impl Room {
    /// What is on disk already.
    pub fn found(inner: &Arc<Inner>, dir: usize, bytes: u64) -> Room {
        inner.store.found_aside(dir, bytes);
        Room {
            store: inner.store.clone(),
            dir,
            bytes,
            to_come: 0,
        }
    }

    /// Puts the room of another into this one.
    pub fn join(&mut self, mut other: Room) {
        debug_assert_eq!(self.dir, other.dir);
        self.bytes += std::mem::take(&mut other.bytes);
        self.to_come += std::mem::take(&mut other.to_come);
    }

    /// A part of it, if it has as much: rather what is not on the disk yet.
    pub fn split(&mut self, bytes: u64) -> Option<Room> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        let to_come = bytes.min(self.to_come);
        self.to_come -= to_come;
        Some(Room {
            store: self.store.clone(),
            dir: self.dir,
            bytes,
            to_come,
        })
    }

    /// So many bytes of it are on the disk by now.
    pub fn came(&mut self, bytes: u64) {
        let to_come = self.bytes.saturating_sub(bytes).min(self.to_come);
        self.store.aside_came(self.dir, self.to_come - to_come);
        self.to_come = to_come;
    }

    /// Gives back all but `bytes`.
    pub fn shrink_to(&mut self, bytes: u64) {
        let less = self.bytes.saturating_sub(bytes);
        let never_came = self.to_come.saturating_sub(bytes);
        self.store.give_back(self.dir, less, never_came);
        self.bytes -= less;
        self.to_come -= never_came;
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.store.give_back(self.dir, self.bytes, self.to_come);
    }
}

/// A file that is not part of a checkpoint yet. Unless it is kept, it goes, and then its room.
pub(crate) struct Unfinished(Option<(PathBuf, Room)>);

impl Unfinished {
    pub fn new(path: PathBuf, room: Room) -> Self {
        Unfinished(Some((path, room)))
    }

    pub fn path(&self) -> &Path {
        self.0.as_ref().map_or(Path::new(""), |(path, _)| path)
    }

    pub fn keep(mut self) -> Option<Room> {
        self.0.take().map(|(_, room)| room)
    }

    pub fn room(&mut self) -> Option<&mut Room> {
        self.0.as_mut().map(|(_, room)| room)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some((path, room)) = self.0.take() {
            let remove = move || {
                if let Err(e) = std::fs::remove_file(&path)
                    && e.kind() != std::io::ErrorKind::NotFound
                {
                    tracing::warn!(file = %path.display(), error = %e, "a file that was not \
                        staged cannot be removed");
                }
                drop(room);
            };
            match tokio::runtime::Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn_blocking(remove)),
                Err(_) => remove(),
            }
        }
    }
}

impl Inner {
    /// What staged files may take of a directory.
    pub(crate) fn most(&self, dir: usize) -> u64 {
        let capacity = self.store.capacity_bytes(dir);
        match self.config.room_bytes {
            None => capacity / 2,
            Some(room) => {
                let all: u64 = (0..self.dirs.len())
                    .map(|dir| self.store.capacity_bytes(dir))
                    .sum();
                let share = u128::from(room) * u128::from(capacity) / u128::from(all.max(1));
                u64::try_from(share).unwrap_or(u64::MAX)
            }
        }
    }

    /// What staged files may take of the directory that has the most.
    pub(crate) fn largest(&self) -> u64 {
        let most = (0..self.dirs.len()).map(|dir| self.most(dir));
        most.max().unwrap_or(0)
    }

    /// Room for a file of a checkpoint: of what was taken for it when it began, if at least `least`
    /// is left of that, or else as much as `wanted` beside it.
    pub(crate) async fn room_for(
        self: &Arc<Self>,
        entry: &Entry,
        least: u64,
        wanted: u64,
        dir: Option<usize>,
    ) -> Result<Room> {
        let ahead = {
            let mut state = entry.state.lock();
            let ahead = state.ahead.as_mut();
            ahead
                .filter(|room| dir.is_none_or(|dir| dir == room.dir) && room.bytes >= least)
                .and_then(|room| room.split(wanted.min(room.bytes)))
        };
        match ahead {
            Some(room) => Ok(room),
            None => self.take_room(wanted, dir, Some(&entry.folder)).await,
        }
    }

    /// Takes room for `bytes`, in this directory or in the one that has the most. Checkpoints that
    /// are durable make room, the least recently read first, unless that would not be enough.
    ///
    /// # Errors
    /// `Busy` if there will be room when others are durable; `NoRoom` if that would not help.
    pub(crate) async fn take_room(
        self: &Arc<Self>,
        bytes: u64,
        dir: Option<usize>,
        of: Option<&str>,
    ) -> Result<Room> {
        let allowed: Vec<usize> = match dir {
            Some(dir) => vec![dir],
            None => (0..self.dirs.len()).collect(),
        };
        loop {
            // From before the attempt on: what is given back meanwhile is tried too.
            let mut changed = self.changed.subscribe();
            if let Some(room) = self.try_room(bytes, allowed.clone()).await? {
                return Ok(room);
            }
            if self.is_any_going(|entry| !entry.readers.is_closed() || entry.readers.is_empty()) {
                // One is being removed: its room is about to be given back.
                let _ = tokio::time::timeout(GOING_MAX, changed.changed()).await;
                continue;
            }
            let dirs = self.would_have_room(bytes, &allowed).await?;
            if changed.has_changed().unwrap_or(false) {
                continue;
            }
            if dirs.is_empty() || !self.evict_one(&dirs).await {
                if self.is_any_going(|_| true) {
                    // Files of one that was removed are being read: there is room soon.
                    let _ = tokio::time::timeout(GOING_MAX, changed.changed()).await;
                    continue;
                }
                self.stats.refused.fetch_add(1, Relaxed);
                return Err(self.no_room(bytes, &allowed, of).await);
            }
        }
    }

    async fn try_room(self: &Arc<Self>, bytes: u64, mut dirs: Vec<usize>) -> Result<Option<Room>> {
        let left = |dir: &usize| self.most(*dir).saturating_sub(self.store.aside_bytes(*dir));
        dirs.sort_by_key(|dir| std::cmp::Reverse(left(dir)));
        let inner = self.clone();
        let tried = spawn_blocking(move || {
            dirs.into_iter().find_map(|dir| {
                let taken = inner.store.set_aside(dir, bytes, inner.most(dir));
                taken.ok().map(|()| Room {
                    store: inner.store.clone(),
                    dir,
                    bytes,
                    to_come: bytes,
                })
            })
        });
        tried
            .await
            .map_err(|e| Error::internal("taking room ended").caused_by(e))
    }

    /// Whether the room of one of these is still to be given back.
    fn is_any_going(&self, of: impl Fn(&Entry) -> bool) -> bool {
        let entries = self.entries.lock();
        entries
            .values()
            .any(|entry| entry.state.lock().phase == Phase::Gone && of(entry))
    }

    /// Of `dirs`, those in which there would be room if all that may go went ([`Inner::evict_one`]): of
    /// the cache's size, and on the file system, which others may have filled.
    async fn would_have_room(self: &Arc<Self>, bytes: u64, dirs: &[usize]) -> Result<Vec<usize>> {
        let warm = self.room_of(|_, state| state.phase == Phase::Durable || state.is_left());
        let dirs = self.within_size(bytes, dirs, &warm);
        self.on_disk(bytes, dirs, warm).await
    }

    /// The room that some checkpoints have, by directory.
    fn room_of(&self, of: impl Fn(&Entry, &State) -> bool) -> Vec<u64> {
        let mut bytes = vec![0u64; self.dirs.len()];
        for entry in self.entries.lock().values() {
            let state = entry.state.lock();
            if of(entry, &state) {
                let rooms = state.rooms.iter().chain(&state.ahead);
                rooms.for_each(|room| bytes[room.dir] += room.bytes);
            }
        }
        bytes
    }

    /// Of `dirs`, those of whose size staged files would have enough if `gone` were given back.
    fn within_size(&self, bytes: u64, dirs: &[usize], gone: &[u64]) -> Vec<usize> {
        let stays = |dir: usize| self.store.aside_bytes(dir).saturating_sub(gone[dir]);
        let fits = |dir: &usize| stays(*dir).saturating_add(bytes) <= self.most(*dir);
        dirs.iter().copied().filter(fits).collect()
    }

    /// Of `dirs`, those whose file systems would have room if `gone` were given back, and all that is
    /// cached too.
    async fn on_disk(
        self: &Arc<Self>,
        bytes: u64,
        mut dirs: Vec<usize>,
        gone: Vec<u64>,
    ) -> Result<Vec<usize>> {
        let inner = self.clone();
        let asked = spawn_blocking(move || {
            dirs.retain(|dir| inner.store.could_set_aside(*dir, bytes, gone[*dir]));
            dirs
        });
        asked
            .await
            .map_err(|e| Error::internal("looking for room ended").caused_by(e))
    }

    /// The error that says why there is no room: `Busy` if other checkpoints will give theirs back
    /// once they are durable, `NoRoom` if somebody has to make room.
    async fn no_room(self: &Arc<Self>, bytes: u64, dirs: &[usize], of: Option<&str>) -> Error {
        let is_other = |entry: &Entry| Some(entry.folder.as_str()) != of;
        let comes = self.entries.lock().values().any(|entry| {
            let state = entry.state.lock();
            is_other(entry) && !state.phase.is_over() && !state.lost
        });
        // One whose disk is gone may never be durable.
        let gone = self.room_of(|entry, state| is_other(entry) && !state.lost);
        let within = self.within_size(bytes, dirs, &gone);
        let fits = match self.on_disk(bytes, within.clone(), gone).await {
            Ok(dirs) => !dirs.is_empty(),
            Err(e) => return e,
        };
        let lacks = format!("there is no room to stage {}", format_bytes(bytes));
        if !within.is_empty() && !fits {
            let full = within.iter().map(|dir| self.dirs[*dir].display());
            let full: Vec<String> = full.map(|dir| dir.to_string()).collect();
            let message = format!("{lacks}: the file system of {} is full", full.join(", "));
            return Error::new(ErrorKind::NoRoom, message).hint(
                "others have filled it: free space there, or move the cache to another disk",
            );
        }
        let all: u64 = (0..self.dirs.len()).map(|dir| self.most(dir)).sum();
        let message = format!(
            "{lacks}: checkpoints may take {} of the cache",
            format_bytes(all)
        );
        if fits && comes {
            return Error::busy(message)
                .hint("others are on their way to the origin; there is room when they are durable")
                .retry_after(Duration::from_secs(2));
        }
        Error::new(ErrorKind::NoRoom, message)
            .hint("give the cache more space, raise checkpoints.room, or free the disk")
    }
}
