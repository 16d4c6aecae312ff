//! A directory as a bucket: each object is a file, `/` in a key is a sub-directory.
//!
//! - A write goes to a file in `.forebay/` (never listed, not a key), is synced, and takes its
//!   place by one rename or link: a reader sees the old object or the new one, and a crash leaves
//!   the old one. Before a write is acknowledged, its directory is synced, and so are those above
//!   it that are not known to be on disk. Before a delete is acknowledged, the directory from which
//!   the last name went is synced. A delete that finds no file syncs too, if another delete of it is
//!   still under way, or unless the directories above it are known to have been synced since this
//!   process began: an earlier delete may have failed to, or may have ended with its process.
//! - Between checking a condition and the rename that relies on it, no other write or delete of
//!   this process takes effect.
//! - The ETag is made of inode, modification time, size, and a random number that each of our own
//!   writes leaves in an extended attribute; so two writes within one tick of the clock differ too.
//!   Files that others write have the first three. What is written in one piece has the CRC32C of
//!   its bytes at the end, for as long as size and modification time are those of the write.
//! - Attributes and user metadata live in the same extended attribute. Where the file system has
//!   none, an object with user metadata is refused, and content types are not kept.
//! - A file that changes while it is read ends its body with `VersionChanged`.
//!
//! What a directory cannot hold is refused: `a` next to `a/b`, keys that end in `/`, segments of
//! more than 255 bytes. An empty object whose key ends in `/`, which clients write for a directory,
//! is taken, and nothing is kept of it.

mod attributes;
mod buckets;
mod list;
mod threads;
mod upload;

use crate::{
    ByteStream, GetRequest, GetResponse, ListPage, ListRequest, Origin, PartsPage, PutCondition,
    PutRequest, PutResponse, UploadedPart,
    body::exact,
    failure::{self, Site},
};
use async_trait::async_trait;
use attributes::Stored;
pub(crate) use buckets::{buckets, create_bucket, created_ms, remove_bucket};
use bytes::{Bytes, BytesMut};
use forebay_core::{
    Error, ErrorKind, ObjectMeta, Result, crc32c_append, made_etag, name, sync::Mutex,
};
use futures::{StreamExt, TryStreamExt, stream};
pub(crate) use list::Listings;
use serde::{Deserialize, Serialize};
use std::{
    collections::{HashSet, hash_map::RandomState},
    fmt::Write as _,
    fs::{self, File, Metadata, OpenOptions},
    hash::BuildHasher,
    io::{self, Read, Write},
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};
pub(crate) use threads::Threads;
use xxhash_rust::xxh3::Xxh3;

/// The directory inside each bucket that holds unfinished writes. No key begins with it.
pub(crate) const RESERVED: &str = ".forebay";
/// How much is read from a file at once.
const READ_BYTES: u64 = 256 << 10;
/// Files of unfinished writes older than this are removed when a bucket is opened.
const STALE_AFTER: std::time::Duration = std::time::Duration::from_secs(24 * 3600);

/// One directory.
#[derive(Clone)]
pub struct LocalOrigin(Arc<Root>);

struct Root {
    path: PathBuf,
    description: String,
    /// Held (shared) by each write and delete while it takes effect, and exclusively from the check
    /// of a condition to the rename that relies on it. Only by threads that may wait.
    changes: forebay_core::sync::RwLock<()>,
    /// Directories whose names, like those of all directories above them, are known to be on disk.
    synced: forebay_core::sync::Mutex<Paths>,
    /// The file of each delete that has not synced yet. Two deletes of one file are in it twice.
    removing: forebay_core::sync::Mutex<Vec<PathBuf>>,
    settled: forebay_core::sync::Mutex<Settled>,
    listings: Listings,
    threads: Threads,
    /// The directories that were synced after a removal.
    #[cfg(test)]
    removals: forebay_core::sync::Mutex<Vec<PathBuf>>,
}

/// Directories that are remembered as synced; beyond that, all are forgotten and synced again.
const SYNCED_MAX: usize = 65_536;

/// Paths, by hashes that nobody can foresee: those of `SYNCED_MAX` take some 2 MiB, however long the paths
/// are. Each bucket has two such sets.
#[derive(Default)]
struct Paths {
    hashes: HashSet<u128>,
    keyed: RandomState,
}

impl Paths {
    fn hash(&self, path: &Path) -> u128 {
        let half = |which: u8| u128::from(self.keyed.hash_one((which, path)));
        (half(0) << 64) | half(1)
    }

    fn contains(&self, path: &Path) -> bool {
        self.hashes.contains(&self.hash(path))
    }

    fn insert(&mut self, path: &Path) {
        self.hashes.insert(self.hash(path));
    }

    fn remove(&mut self, path: &Path) {
        self.hashes.remove(&self.hash(path));
    }

    /// Forgets all, if there would be too many with so many more.
    fn make_room(&mut self, more: usize) {
        if self.hashes.len() + more > SYNCED_MAX {
            self.hashes.clear();
        }
    }
}

/// Directories from which every name that was ever removed is known to be gone from the disk too. In
/// others, who asks for a delete again finds no file, and has to sync them all the same.
#[derive(Default)]
struct Settled {
    dirs: Paths,
    /// How many syncs have failed.
    failures: u64,
}

impl Settled {
    /// `dir` was synced, which began after so many failures.
    fn synced(&mut self, dir: &Path, failures: u64) {
        // Another removal may have failed to sync it meanwhile.
        if self.failures != failures {
            return;
        }
        self.dirs.make_room(1);
        self.dirs.insert(dir);
    }

    fn failed(&mut self, dir: &Path) {
        self.failures += 1;
        self.dirs.remove(dir);
    }
}

impl LocalOrigin {
    /// The directory that a path leads to; changes nothing there.
    ///
    /// # Errors
    /// `BucketNotFound` if there is none, `Invalid` if it is something else.
    pub fn find(path: &Path) -> Result<PathBuf> {
        let path = path.canonicalize().map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => {
                Error::bucket_not_found(format!("the directory {} does not exist", path.display()))
                    .hint("create it, or correct the origin's url")
            }
            _ => failure::from_io(
                Site {
                    origin: &path.display().to_string(),
                    operation: "open",
                    key: "",
                },
                e,
            ),
        })?;
        if !path.is_dir() {
            return Err(Error::invalid(format!(
                "{} is not a directory",
                path.display()
            )));
        }
        Ok(path)
    }

    /// # Errors
    /// As [`LocalOrigin::find`].
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_with(path, Threads::default(), Listings::default())
    }

    /// The same for one of several that share threads, and the memory for names.
    pub(crate) fn open_with(path: &Path, threads: Threads, listings: Listings) -> Result<Self> {
        let path = Self::find(path)?;
        let description = format!("file://{}", path.display());
        let origin = Self(Arc::new(Root {
            path,
            description,
            changes: Default::default(),
            synced: Default::default(),
            removing: Default::default(),
            settled: Default::default(),
            listings,
            threads,
            #[cfg(test)]
            removals: Default::default(),
        }));
        origin.remove_stale();
        Ok(origin)
    }

    /// Removes the unfinished writes of a process that died.
    fn remove_stale(&self) {
        for sub in ["tmp", "uploads"] {
            let Ok(entries) = fs::read_dir(self.0.path.join(RESERVED).join(sub)) else {
                continue;
            };
            for entry in entries.flatten() {
                let old = entry
                    .metadata()
                    .and_then(|m| m.modified())
                    .is_ok_and(|t| t.elapsed().is_ok_and(|age| age > STALE_AFTER));
                if old {
                    let path = entry.path();
                    let removed = if path.is_dir() {
                        fs::remove_dir_all(&path)
                    } else {
                        fs::remove_file(&path)
                    };
                    tracing::info!(path = %path.display(), ok = removed.is_ok(), "removing an \
                        unfinished write");
                }
            }
        }
    }

    async fn blocking<T: Send + 'static>(
        &self,
        f: impl FnOnce(&Root) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let root = self.0.clone();
        self.0.threads.run(move || f(&root)).await?
    }
}

/// An object's open file, with what was seen of it.
struct Opened {
    file: File,
    seen: Seen,
    meta: ObjectMeta,
    crc32c: Option<u32>,
}

/// What shows that a file is still the one that was opened.
#[derive(PartialEq, Eq, Clone, Copy, Debug, Serialize, Deserialize)]
struct Seen {
    size: u64,
    mtime: (i64, i64),
}

impl Seen {
    fn of(m: &Metadata) -> Self {
        Self {
            size: m.size(),
            mtime: (m.mtime(), m.mtime_nsec()),
        }
    }
}

/// What stands in front of the CRC32C in an ETag.
const CRC32C_IN_ETAG: &str = "-crc32c.";

/// The CRC32C of an object's bytes in hexadecimal, where its ETag holds it: those of objects that
/// were written to a directory in one piece do.
pub fn crc32c_in_etag(etag: &str) -> Option<&str> {
    let (_, sum) = etag.trim_matches('"').rsplit_once(CRC32C_IN_ETAG)?;
    let is_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    (sum.len() == 8 && sum.bytes().all(is_hex)).then_some(sum)
}

fn meta_of(m: &Metadata, stored: Stored) -> ObjectMeta {
    let nanos = m.mtime() as i128 * 1_000_000_000 + m.mtime_nsec() as i128;
    let mut etag = format!("\"{:x}-{nanos:x}-{:x}", m.ino(), m.size());
    if let Some(id) = stored.write_id {
        // Infallible.
        let _ = write!(etag, "-{id:x}");
    }
    if let Some(crc32c) = stored.crc32c(m) {
        let _ = write!(etag, "{CRC32C_IN_ETAG}{crc32c:08x}");
    }
    etag.push('"');
    ObjectMeta {
        size: m.size(),
        etag: Some(etag),
        last_modified_ms: (nanos / 1_000_000) as i64,
        attributes: stored.attributes,
    }
}

impl Root {
    fn site<'a>(&'a self, operation: &'a str, key: &'a str) -> Site<'a> {
        Site {
            origin: &self.description,
            operation,
            key,
        }
    }

    fn path_of(&self, key: &str) -> Result<PathBuf> {
        name::validate_key(key)?;
        if key.ends_with('/') {
            return Err(Error::unsupported(format!(
                "{key:?} ends in '/': a local directory cannot hold objects with such names"
            ))
            .hint("folders come and go with the objects in them"));
        }
        if key == RESERVED || key.starts_with(".forebay/") {
            return Err(Error::permission_denied(format!(
                "{key:?} is reserved: {RESERVED} holds what is being written"
            )));
        }
        Ok(self.path.join(key))
    }

    /// For reads: a key that cannot exist here is not found.
    fn path_to_read(&self, key: &str) -> Result<PathBuf> {
        match self.path_of(key) {
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::Unsupported | ErrorKind::PermissionDenied
                ) =>
            {
                Err(Error::not_found(format!(
                    "{key:?} is not in {}",
                    self.description
                )))
            }
            other => other,
        }
    }

    fn is_gone(&self) -> Error {
        Error::bucket_not_found(format!("{} is gone", self.description))
            .hint("is the disk mounted?")
    }

    fn open(&self, operation: &'static str, key: &str) -> Result<Opened> {
        let site = self.site(operation, key);
        let path = self.path_to_read(key)?;
        let absent = || match self.path.is_dir() {
            true => Error::not_found(format!("{key:?} is not in {}", self.description)),
            false => self.is_gone(),
        };
        // Non-blocking: a FIFO must not hang the thread.
        let file = match OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
        {
            Ok(file) => file,
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound
                        | io::ErrorKind::NotADirectory
                        | io::ErrorKind::InvalidFilename
                ) =>
            {
                return Err(absent());
            }
            Err(e) => return Err(failure::from_io(site, e)),
        };
        let m = file.metadata().map_err(|e| failure::from_io(site, e))?;
        if !m.is_file() {
            return Err(absent());
        }
        let stored = attributes::read(&file);
        Ok(Opened {
            seen: Seen::of(&m),
            crc32c: stored.crc32c(&m),
            meta: meta_of(&m, stored),
            file,
        })
    }

    /// A new file among the unfinished writes.
    fn temporary(&self, site: Site<'_>) -> Result<(File, Unfinished)> {
        let dir = self.path.join(RESERVED).join("tmp");
        let path = dir.join(format!("{:032x}", rand::random::<u128>()));
        let open = || {
            OpenOptions::new()
                .write(true)
                .read(true)
                .create_new(true)
                .open(&path)
        };
        let file = match open() {
            Err(e) if e.kind() == io::ErrorKind::NotFound && self.path.is_dir() => {
                fs::create_dir_all(&dir).and_then(|()| open())
            }
            other => other,
        };
        match file {
            Ok(file) => Ok((file, Unfinished { path, moved: false })),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(self.is_gone()),
            Err(e) => Err(failure::from_io(site, e)),
        }
    }

    /// Gives a written file its attributes and its place. `crc32c` is that of its bytes, if known.
    fn publish(
        &self,
        key: &str,
        (file, crc32c): (&File, Option<u32>),
        mut unfinished: Unfinished,
        request: &PutRequest,
    ) -> Result<PutResponse> {
        let site = self.site("put", key);
        let io = |e| failure::from_io(site, e);
        let path = self.path_of(key)?;
        attributes::write(file, &request.attributes, crc32c)
            .map_err(|e| e.context(format_args!("put {key:?} at {}", self.description)))?;
        file.sync_all().map_err(io)?;
        let unmet = || {
            Error::new(
                ErrorKind::PreconditionFailed,
                format!(
                    "put {key:?} at {}: the condition {:?} does not hold",
                    self.description, request.condition
                ),
            )
        };
        let from = unfinished.path.clone();
        // A link fails by itself if something is there; only If-Match checks first.
        let matches = matches!(request.condition, PutCondition::IfMatch(_));
        let alone = matches.then(|| self.changes.write());
        let shared = (!matches).then(|| self.changes.read());
        if let PutCondition::IfMatch(etag) = &request.condition {
            match self.open("put", key) {
                Ok(there) if there.meta.etag.as_ref() == Some(etag) => {}
                Ok(_) => return Err(unmet()),
                Err(e) if e.kind() == ErrorKind::NotFound => return Err(unmet()),
                Err(e) => return Err(e),
            }
        }
        let parent = path.parent().unwrap_or(&self.path);
        let place = || match request.condition {
            PutCondition::IfAbsent => fs::hard_link(&from, &path),
            _ => fs::rename(&from, &path),
        };
        let mut placed = place();
        // A parent may be missing, or a delete may remove it between its creation and the rename.
        for _ in 0..16 {
            match &placed {
                Err(e) if e.kind() == io::ErrorKind::NotFound && self.path.is_dir() => {
                    self.forget_synced(parent);
                    match fs::create_dir_all(parent) {
                        // One above it may be removed while it is made, too.
                        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                        // A file is where a directory should be.
                        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                            let e = io::Error::from(io::ErrorKind::NotADirectory);
                            return Err(io(e));
                        }
                        made => made.map_err(io)?,
                    }
                    placed = place();
                }
                _ => break,
            }
        }
        match placed {
            Ok(()) => {}
            Err(e)
                if e.kind() == io::ErrorKind::AlreadyExists
                    && request.condition == PutCondition::IfAbsent =>
            {
                // A folder has this name, so no object can have it.
                return Err(match path.is_dir() {
                    true => io(io::ErrorKind::IsADirectory.into()),
                    false => unmet(),
                });
            }
            Err(e) => return Err(io(e)),
        }
        drop((alone, shared));
        if request.condition != PutCondition::IfAbsent {
            unfinished.moved = true;
        }
        // An acknowledged write survives a crash.
        match self.sync_to(parent) {
            // It was deleted since, and its directory with it.
            Err(e) if e.kind() == io::ErrorKind::NotFound && self.path.is_dir() => {}
            synced => synced.map_err(io)?,
        }
        let m = file.metadata().map_err(io)?;
        Ok(PutResponse {
            etag: meta_of(&m, attributes::read(file)).etag,
        })
    }

    /// Syncs a directory, and those above it up to one whose name is known to be on disk: another
    /// write may have created them without having synced them yet.
    fn sync_to(&self, dir: &Path) -> io::Result<()> {
        File::open(dir)?.sync_all()?;
        let mut new = Vec::new();
        let mut at = dir;
        while at != self.path && !self.synced.lock().contains(at) {
            let Some(above) = at.parent().filter(|a| a.starts_with(&self.path)) else {
                break;
            };
            File::open(above)?.sync_all()?;
            new.push(at);
            at = above;
        }
        if !new.is_empty() {
            let mut synced = self.synced.lock();
            synced.make_room(new.len());
            new.into_iter().for_each(|dir| synced.insert(dir));
        }
        Ok(())
    }

    /// `dir`, or one above it, is about to be created or removed.
    fn forget_synced(&self, dir: &Path) {
        let mut synced = self.synced.lock();
        for above in dir.ancestors().take_while(|a| *a != self.path) {
            synced.remove(above);
        }
    }

    /// Removes the directories that a delete left empty, up to the root. Returns the one that stays.
    fn prune<'a>(&self, from: &'a Path) -> &'a Path {
        let mut dir = from;
        while dir != self.path && dir.starts_with(&self.path) {
            let Some(above) = dir.parent() else { break };
            self.synced.lock().remove(dir);
            if fs::remove_dir(dir).is_err() {
                break;
            }
            self.settled.lock().dirs.remove(dir);
            dir = above;
        }
        dir
    }

    /// Syncs a directory from which a delete removed a name; if another delete removed it meanwhile,
    /// what is above it.
    fn sync_removal(&self, dir: &Path) -> io::Result<()> {
        for dir in self.up_from(dir) {
            if self.settle(dir)? {
                break;
            }
        }
        Ok(())
    }

    /// Syncs what an earlier delete of a file in `parent` may have left unsynced.
    fn sync_again(&self, parent: &Path) -> io::Result<()> {
        let mut gone = None;
        for dir in self.up_from(parent) {
            // Another delete may have removed the directory below and not have synced that yet. Asked
            // before what is settled: a delete that has ended has synced this one, or unsettled it.
            let is_changing = gone.is_some_and(|below| self.is_removing_below(below));
            let is_settled = !is_changing && self.settled.lock().dirs.contains(dir);
            gone = match is_settled || self.settle(dir)? {
                true => None,
                false => Some(dir),
            };
        }
        Ok(())
    }

    /// Whether a delete of a file in this directory, or below it, is under way.
    fn is_removing_below(&self, dir: &Path) -> bool {
        let removing = self.removing.lock();
        removing.iter().any(|path| path.starts_with(dir))
    }

    /// Syncs a directory, and notes how that went. Whether it is there.
    fn settle(&self, dir: &Path) -> io::Result<bool> {
        let failures = self.settled.lock().failures;
        let synced = self.sync_if_there(dir);
        let mut settled = self.settled.lock();
        match &synced {
            Ok(true) => settled.synced(dir, failures),
            Ok(false) => {}
            Err(_) => settled.failed(dir),
        }
        synced
    }

    /// Syncs a directory from which a name was removed; if it was removed meanwhile, what is above it.
    fn sync_what_stays(&self, dir: &Path) -> io::Result<()> {
        for dir in self.up_from(dir) {
            if self.sync_if_there(dir)? {
                break;
            }
        }
        Ok(())
    }

    fn up_from<'a>(&self, dir: &'a Path) -> impl Iterator<Item = &'a Path> {
        dir.ancestors()
            .take_while(move |d| d.starts_with(&self.path))
    }

    fn sync_if_there(&self, dir: &Path) -> io::Result<bool> {
        let mut directory = OpenOptions::new();
        directory.read(true).custom_flags(libc::O_DIRECTORY);
        match directory.open(dir).and_then(|dir| dir.sync_all()) {
            // (Or a write has put an object in the place of one above it.)
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound
                        | io::ErrorKind::NotADirectory
                        | io::ErrorKind::InvalidFilename
                ) =>
            {
                Ok(false)
            }
            synced => {
                #[cfg(test)]
                self.removals.lock().push(dir.to_owned());
                synced.map(|()| true)
            }
        }
    }
}

/// A delete under way: from before it removes its file until that is on the disk.
struct Removing<'a> {
    root: &'a Root,
    path: &'a Path,
}

impl<'a> Removing<'a> {
    fn begin(root: &'a Root, path: &'a Path) -> Self {
        root.removing.lock().push(path.to_owned());
        Self { root, path }
    }

    /// Whether another delete of this file is under way.
    fn is_by_another(&self) -> bool {
        let removing = self.root.removing.lock();
        removing.iter().filter(|p| *p == self.path).count() > 1
    }
}

impl Drop for Removing<'_> {
    fn drop(&mut self) {
        let mut removing = self.root.removing.lock();
        if let Some(at) = removing.iter().position(|p| p == self.path) {
            removing.swap_remove(at);
        }
    }
}

/// A file that is removed when dropped, unless it was moved to its place.
struct Unfinished {
    path: PathBuf,
    moved: bool,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.moved {
            // It may already be linked into its place; this name goes in any case.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// What has been written of a body, and the CRC32C of that. Dropped because its sender failed or went
/// away, the file is removed by a thread that may wait.
struct Received {
    written: Option<(File, Unfinished, u32)>,
    threads: Threads,
}

impl Received {
    fn take(mut self) -> Result<(File, Unfinished, u32)> {
        let taken = self.written.take();
        taken.ok_or_else(|| Error::internal("what was written of a body was taken already"))
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        if let Some(written) = self.written.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let threads = self.threads.clone();
            runtime.spawn(async move { threads.run(move || drop(written)).await });
        }
    }
}

/// The bytes of an open file. After each read, checks that they still belong to the announced
/// version.
fn read_file(opened: Opened, range: Range<u64>, what: String, threads: Threads) -> ByteStream {
    let Opened { file, seen, .. } = opened;
    stream::try_unfold(
        (Arc::new(file), range, what, threads),
        move |(file, range, what, threads)| async move {
            if range.is_empty() {
                return Ok(None);
            }
            let len = (range.end - range.start).min(READ_BYTES);
            let (f, at) = (file.clone(), range.start);
            let read = threads.run(move || {
                let mut buffer = BytesMut::zeroed(len as usize);
                let read = f.read_exact_at(&mut buffer, at);
                let now = f.metadata();
                (read.map(|()| buffer.freeze()), now)
            });
            let (read, now) = read.await.map_err(|e| e.context(&what))?;
            match now {
                Ok(m) if Seen::of(&m) == seen => {}
                Ok(_) => {
                    return Err(Error::version_changed(format!(
                        "{what}: the file was changed while it was read"
                    )));
                }
                Err(e) => return Err(Error::internal(format!("{what}: {e}"))),
            }
            let bytes: Bytes =
                read.map_err(|e| Error::origin_unavailable(format!("{what}: {e}")))?;
            let rest = range.start + len..range.end;
            Ok(Some((bytes, (file, rest, what, threads))))
        },
    )
    .boxed()
}

fn source_changed(key: &str) -> Error {
    Error::new(
        ErrorKind::PreconditionFailed,
        format!("{key:?} is not at the version that was to be copied"),
    )
}

#[async_trait]
impl Origin for LocalOrigin {
    fn describe(&self) -> String {
        self.0.description.clone()
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        let key = key.to_owned();
        self.blocking(move |root| Ok(root.open("head", &key)?.meta))
            .await
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        let owned = key.to_owned();
        let opened = self.blocking(move |root| root.open("get", &owned)).await?;
        let meta = opened.meta.clone();
        crate::s3::get_checks(&meta, &request, key)?;
        let range = match &request.range {
            None => 0..meta.size,
            Some(r) if r.start >= meta.size && r.start > 0 => {
                return Err(crate::s3::past_the_end(key, meta.size, r.start));
            }
            Some(r) => r.start..r.end.min(meta.size).max(r.start),
        };
        let what = format!("get {key:?} at {}", self.0.description);
        Ok(GetResponse {
            meta,
            age_secs: Some(0),
            range: range.clone(),
            body: read_file(opened, range, what, self.0.threads.clone()),
        })
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        self.blocking(move |root| list::page(root, &request)).await
    }

    async fn put(
        &self,
        key: &str,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        let mut body = match size {
            Some(n) => exact(body, n, format!("the body of put {key:?}")),
            None => body,
        };
        // Clients write it for a directory, and some say that a removal failed if they cannot.
        // Directories come and go with the objects in them here.
        let is_directory = size == Some(0) && key.ends_with('/');
        if is_directory && !matches!(request.condition, PutCondition::IfMatch(_)) {
            name::validate_key(key)?;
            while body.try_next().await?.is_some() {}
            return Ok(PutResponse {
                etag: Some(made_etag(0, 0)),
            });
        }
        let received = self.receive("put", key, body).await?;
        let key = key.to_owned();
        self.blocking(move |root| {
            let (file, unfinished, crc32c) = received.take()?;
            root.publish(&key, (&file, Some(crc32c)), unfinished, &request)
        })
        .await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        let key = key.to_owned();
        self.blocking(move |root| {
            let path = match root.path_to_read(&key) {
                Ok(path) => path,
                Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
                Err(e) => return Err(e),
            };
            let parent = path.parent().unwrap_or(&root.path);
            // What was acknowledged as deleted does not come back after a crash.
            let sync = |dir: &Path| {
                root.sync_removal(dir)
                    .map_err(|e| failure::from_io(root.site("delete", &key), e))
            };
            let removing = Removing::begin(root, &path);
            let shared = root.changes.read();
            match fs::remove_file(&path) {
                Ok(()) => {
                    let left = root.prune(parent);
                    drop(shared);
                    sync(left)
                }
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::NotFound
                            | io::ErrorKind::NotADirectory
                            | io::ErrorKind::InvalidFilename
                    ) =>
                {
                    drop(shared);
                    if !root.path.is_dir() {
                        // What is in it is not deleted by that.
                        return Err(root.is_gone());
                    }
                    // The other delete may have removed the file and not have synced that yet.
                    if removing.is_by_another() {
                        return sync(parent);
                    }
                    drop(removing);
                    root.sync_again(parent)
                        .map_err(|e| failure::from_io(root.site("delete", &key), e))
                }
                // A directory is not an object: nothing has this name.
                Err(_) if path.is_dir() => Ok(()),
                Err(e) => Err(failure::from_io(root.site("delete", &key), e)),
            }
        })
        .await
    }

    async fn copy(
        &self,
        from: &str,
        if_match: Option<&str>,
        to: &str,
        request: PutRequest,
    ) -> Result<PutResponse> {
        let (from, to) = (from.to_owned(), to.to_owned());
        let if_match = if_match.map(str::to_owned);
        self.blocking(move |root| {
            let mut source = root.open("copy", &from)?;
            if if_match.is_some() && if_match != source.meta.etag {
                return Err(source_changed(&from));
            }
            root.path_of(&to)?;
            let (mut file, unfinished) = root.temporary(root.site("copy", &to))?;
            let copied = io::copy(&mut source.file, &mut file)
                .map_err(|e| failure::from_io(root.site("copy", &to), e))?;
            let now = source
                .file
                .metadata()
                .map_err(|e| failure::from_io(root.site("copy", &from), e))?;
            if Seen::of(&now) != source.seen || copied != source.seen.size {
                return Err(Error::version_changed(format!(
                    "{from:?} was changed while it was copied"
                )));
            }
            let mut request = request;
            if request.attributes == Default::default() {
                request.attributes = source.meta.attributes;
            }
            // It is the sum of what was copied: the source is as it was.
            root.publish(&to, (&file, source.crc32c), unfinished, &request)
        })
        .await
    }

    async fn create_upload(&self, key: &str, request: PutRequest) -> Result<String> {
        let key = key.to_owned();
        self.blocking(move |root| upload::create(root, &key, request))
            .await
    }

    async fn upload_part(
        &self,
        key: &str,
        upload: &str,
        number: u32,
        size: u64,
        body: ByteStream,
    ) -> Result<UploadedPart> {
        let (k, id) = (key.to_owned(), upload.to_owned());
        self.blocking(move |root| upload::check(root, &k, &id).map(drop))
            .await?;
        let hash = Arc::new(Mutex::new(Xxh3::new()));
        let hashed = hash.clone();
        let body = exact(body, size, format!("part {number} of {key:?}"))
            .inspect_ok(move |piece| hashed.lock().update(piece))
            .boxed();
        let received = self.receive("upload a part of", key, body).await?;
        let (k, id) = (key.to_owned(), upload.to_owned());
        self.blocking(move |root| {
            let (file, unfinished, _) = received.take()?;
            attributes::write_part(&file, hash.lock().digest128());
            upload::add_part(root, &k, &id, number, size, &file, unfinished)
        })
        .await
    }

    async fn list_parts(
        &self,
        key: &str,
        upload: &str,
        after: u32,
        max: usize,
    ) -> Result<PartsPage> {
        let (key, upload) = (key.to_owned(), upload.to_owned());
        self.blocking(move |root| upload::parts(root, &key, &upload, after, max))
            .await
    }

    async fn complete_upload(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<UploadedPart>,
        condition: PutCondition,
    ) -> Result<PutResponse> {
        let (key, upload) = (key.to_owned(), upload.to_owned());
        self.blocking(move |root| upload::complete(root, &key, &upload, &parts, condition))
            .await
    }

    async fn abort_upload(&self, key: &str, upload: &str) -> Result<()> {
        let (key, upload) = (key.to_owned(), upload.to_owned());
        self.blocking(move |root| upload::abort(root, &key, &upload))
            .await
    }
}

impl LocalOrigin {
    /// Writes a body into a new file among the unfinished writes; nothing remains of a body that
    /// fails.
    async fn receive(
        &self,
        operation: &'static str,
        key: &str,
        mut body: ByteStream,
    ) -> Result<Received> {
        let owned = key.to_owned();
        let mut received = self
            .blocking(move |root| {
                root.path_of(&owned)?;
                let (file, unfinished) = root.temporary(root.site(operation, &owned))?;
                Ok(Received {
                    written: Some((file, unfinished, 0)),
                    threads: root.threads.clone(),
                })
            })
            .await?;
        let mut buffered: Vec<Bytes> = Vec::new();
        let mut bytes = 0usize;
        loop {
            let next = body.try_next().await?;
            let last = next.is_none();
            if let Some(chunk) = next {
                bytes += chunk.len();
                buffered.push(chunk);
            }
            // Written in large pieces: each hand-over to the file thread costs more than a small
            // write.
            if bytes >= 1 << 20 || (last && bytes > 0) {
                let pieces = std::mem::take(&mut buffered);
                bytes = 0;
                let owned = key.to_owned();
                received = self
                    .blocking(move |root| {
                        let (mut file, unfinished, mut crc32c) = received.take()?;
                        for piece in &pieces {
                            crc32c = crc32c_append(crc32c, piece);
                            file.write_all(piece)
                                .map_err(|e| failure::from_io(root.site(operation, &owned), e))?;
                        }
                        Ok(Received {
                            written: Some((file, unfinished, crc32c)),
                            threads: root.threads.clone(),
                        })
                    })
                    .await?;
            }
            if last {
                return Ok(received);
            }
        }
    }
}

/// A whole small file, for what is kept alongside objects.
fn read_small(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(limit).read_to_end(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::crc32c;
    use std::time::Duration;

    #[tokio::test]
    async fn what_is_written_in_one_piece_tells_its_checksum_until_others_change_it() {
        let dir = tempfile::tempdir().unwrap();
        let origin = LocalOrigin::open(dir.path()).unwrap();
        let data: Vec<u8> = (0..3_000_000u32)
            .map(|i| (i.wrapping_mul(i) >> 3) as u8)
            .collect();
        let pieces: Vec<_> = data.chunks(70_000).map(Bytes::copy_from_slice).collect();
        let body = stream::iter(pieces.into_iter().map(Ok));
        let put = origin
            .put("a", PutRequest::default(), None, body.boxed())
            .await
            .unwrap();
        let sum = format!("{:08x}", crc32c(&data));
        let etag = put.etag.unwrap();
        assert_eq!(crc32c_in_etag(&etag), Some(&*sum), "{etag}");
        let told = async |key| {
            let etag = origin.head(key).await.unwrap().etag.unwrap();
            crc32c_in_etag(&etag).map(str::to_owned)
        };
        assert_eq!(origin.head("a").await.unwrap().etag, Some(etag));
        let copied = origin.copy("a", None, "b", PutRequest::default()).await;
        copied.unwrap();
        assert_eq!(told("b").await, Some(sum.clone()));
        let page = origin
            .list(ListRequest {
                max_keys: 10,
                ..Default::default()
            })
            .await
            .unwrap();
        let listed = page.entries.iter().map(|e| e.etag.as_deref().unwrap());
        assert!(listed.map(crc32c_in_etag).all(|s| s == Some(&*sum)));
        // As long as before.
        let file = OpenOptions::new()
            .write(true)
            .open(dir.path().join("a"))
            .unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        file.write_all_at(b"other", 7).unwrap();
        assert_eq!(told("a").await, None);
        assert_eq!(told("b").await, Some(sum));
        fs::write(dir.path().join("c"), "by others").unwrap();
        assert_eq!(told("c").await, None);
        let nothing = crate::body::from_bytes(Bytes::new());
        let put = origin.put("empty", PutRequest::default(), Some(0), nothing);
        put.await.unwrap();
        assert_eq!(told("empty").await.as_deref(), Some("00000000"));
        for other in ["\"a-crc32c.\"", "\"a-crc32c.0123456G\"", "\"0123\"", ""] {
            assert_eq!(crc32c_in_etag(other), None);
        }
    }

    fn put(origin: &LocalOrigin, key: &'static str) -> tokio::task::JoinHandle<Result<()>> {
        let origin = origin.clone();
        tokio::spawn(async move {
            let body = crate::body::from_bytes("x".into());
            let done = origin.put(key, PutRequest::default(), Some(1), body);
            done.await.map(drop)
        })
    }

    #[tokio::test]
    async fn an_empty_object_for_a_directory_is_taken_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let origin = LocalOrigin::open(dir.path()).unwrap();
        for (content, is_taken) in [("", true), ("x", false)] {
            let body = crate::body::from_bytes(content.into());
            let size = Some(content.len() as u64);
            let put = origin.put("a/b/", PutRequest::default(), size, body);
            assert_eq!(put.await.is_ok(), is_taken);
        }
        assert!(!dir.path().join("a").exists());
    }

    #[tokio::test]
    async fn a_name_that_a_folder_has_is_a_conflict_under_any_condition() {
        let dir = tempfile::tempdir().unwrap();
        let origin = LocalOrigin::open(dir.path()).unwrap();
        put(&origin, "a/b").await.unwrap().unwrap();
        for condition in [PutCondition::Always, PutCondition::IfAbsent] {
            let request = PutRequest {
                condition,
                ..PutRequest::default()
            };
            let body = crate::body::from_bytes("x".into());
            let refused = origin.put("a", request, Some(1), body).await.err();
            assert_eq!(refused.map(|e| e.kind()), Some(ErrorKind::Conflict));
        }
    }

    // The lock is what is tested, and nothing else runs on this thread.
    #[allow(clippy::await_holding_lock)]
    #[tokio::test]
    async fn no_write_takes_place_between_a_condition_and_its_rename() {
        let dir = tempfile::tempdir().unwrap();
        let origin = LocalOrigin::open(dir.path()).unwrap();
        put(&origin, "a").await.unwrap().unwrap();
        let checking = origin.0.changes.write();
        let other = origin.clone();
        let deleting = tokio::spawn(async move { other.delete("a").await });
        let writing = put(&origin, "a");
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!deleting.is_finished() && !writing.is_finished());
        assert!(dir.path().join("a").exists());
        drop(checking);
        deleting.await.unwrap().unwrap();
        writing.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_delete_is_on_the_disk_when_it_is_acknowledged() {
        let dir = tempfile::tempdir().unwrap();
        let origin = LocalOrigin::open(dir.path()).unwrap();
        let root = origin.0.path.clone();
        for key in ["a/b/c", "a/d", "a/e"] {
            put(&origin, key).await.unwrap().unwrap();
        }
        for key in ["a/b/c", "a/d", "a/d", "none", "a/e"] {
            origin.delete(key).await.unwrap();
        }
        // Those that stay, once for each object that was there; and the root for the first one that was
        // not, because nobody knows what was removed from it before.
        let synced = origin.0.removals.lock().clone();
        let a = root.join("a");
        assert_eq!(synced, [a.clone(), a, root.clone(), root.clone()]);
        // Another delete was faster with the directory.
        origin.0.sync_removal(&root.join("a/b")).unwrap();
        // And a write after it.
        put(&origin, "a").await.unwrap().unwrap();
        origin.0.sync_removal(&root.join("a/b")).unwrap();
    }

    #[tokio::test]
    async fn a_delete_of_what_another_one_removes_is_on_the_disk_too() {
        let dir = tempfile::tempdir().unwrap();
        let origin = LocalOrigin::open(dir.path()).unwrap();
        let root = origin.0.path.clone();
        for key in ["a/b", "a/c"] {
            put(&origin, key).await.unwrap().unwrap();
        }
        let synced = || origin.0.removals.lock().len();
        // Another delete has removed the file and has not synced its directory.
        let path = root.join("a/b");
        let other = Removing::begin(&origin.0, &path);
        fs::remove_file(&path).unwrap();
        origin.delete("a/b").await.unwrap();
        assert_eq!(*origin.0.removals.lock(), [root.join("a")]);
        // The other delete is of another file. (The root has not been synced before.)
        for _ in 0..2 {
            origin.delete("a/none").await.unwrap();
            assert_eq!(synced(), 2);
        }
        drop(other);
        origin.delete("a/b").await.unwrap();
        assert_eq!(synced(), 2);
        assert!(origin.0.removing.lock().is_empty());
    }

    #[tokio::test]
    async fn a_delete_that_failed_to_sync_syncs_when_it_is_asked_for_again() {
        let dir = tempfile::tempdir().unwrap();
        let origin = LocalOrigin::open(dir.path()).unwrap();
        let root = origin.0.path.clone();
        for key in ["a/b", "a/c"] {
            put(&origin, key).await.unwrap().unwrap();
        }
        // An earlier delete has removed the file, and its process has ended before it had synced that.
        fs::remove_file(root.join("a/b")).unwrap();
        let a = root.join("a");
        for _ in 0..2 {
            origin.delete("a/b").await.unwrap();
            assert_eq!(*origin.0.removals.lock(), [a.as_path(), &root]);
        }
        // Another one fails to.
        origin.0.settled.lock().failed(&a);
        for _ in 0..2 {
            origin.delete("a/b").await.unwrap();
            assert_eq!(*origin.0.removals.lock(), [a.as_path(), &root, &a]);
        }
        // The same while a sync is under way that does well.
        {
            let mut settled = origin.0.settled.lock();
            let before = settled.failures;
            settled.failed(&a);
            settled.synced(&a, before);
            assert!(!settled.dirs.contains(&a) && settled.dirs.contains(&root));
        }
        // Another delete has removed the directory, and has not synced that yet.
        put(&origin, "d/e").await.unwrap().unwrap();
        let path = root.join("d/e");
        let other = Removing::begin(&origin.0, &path);
        fs::remove_dir_all(root.join("d")).unwrap();
        origin.delete("d/f").await.unwrap();
        assert_eq!(origin.0.removals.lock()[3..], [root.as_path()]);
        drop(other);
        origin.delete("d/f").await.unwrap();
        // What cannot be there has left nothing.
        let long = format!("{}/k", "x".repeat(300));
        origin.delete(&long).await.unwrap();
        assert_eq!(origin.0.removals.lock().len(), 4);
    }

    #[tokio::test]
    async fn nothing_is_deleted_from_a_directory_that_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let (here, away) = (dir.path().join("here"), dir.path().join("away"));
        fs::create_dir(&here).unwrap();
        let origin = LocalOrigin::open(&here).unwrap();
        put(&origin, "a").await.unwrap().unwrap();
        fs::rename(&here, &away).unwrap();
        let deleted = origin.delete("a").await;
        let kind = deleted.err().map(|e| e.kind());
        assert_eq!(kind, Some(ErrorKind::BucketNotFound));
        // Nor by two at the same time.
        let path = origin.0.path.join("a");
        let other = Removing::begin(&origin.0, &path);
        let deleted = origin.delete("a").await;
        let kind = deleted.err().map(|e| e.kind());
        assert_eq!(kind, Some(ErrorKind::BucketNotFound));
        drop(other);
        fs::rename(&away, &here).unwrap();
        origin.delete("a").await.unwrap();
        assert!(!here.join("a").exists());
    }

    #[tokio::test]
    async fn directories_are_synced_once_and_again_after_they_were_removed() {
        let dir = tempfile::tempdir().unwrap();
        let origin = LocalOrigin::open(dir.path()).unwrap();
        let root = origin.0.path.clone();
        // Of these directories, those that are remembered; and how many there are.
        let synced = || {
            let synced = origin.0.synced.lock();
            let is_synced = |dir: &&str| synced.contains(&root.join(*dir));
            let found: Vec<_> = ["a", "a/b"].into_iter().filter(is_synced).collect();
            (found, synced.hashes.len())
        };
        put(&origin, "a/b/c").await.unwrap().unwrap();
        put(&origin, "a/d").await.unwrap().unwrap();
        assert_eq!(synced(), (vec!["a", "a/b"], 2));
        origin.delete("a/b/c").await.unwrap();
        assert!(!synced().0.contains(&"a/b"));
        put(&origin, "a/b/c").await.unwrap().unwrap();
        assert_eq!(synced(), (vec!["a", "a/b"], 2));
        // Removed by somebody else.
        fs::remove_dir_all(root.join("a")).unwrap();
        origin.0.forget_synced(&root.join("a/b"));
        assert_eq!(synced(), (vec![], 0));
    }

    #[test]
    fn paths_are_told_apart_and_all_are_forgotten_when_there_are_too_many() {
        let mut paths = Paths::default();
        let path = |i: usize| PathBuf::from(format!("/{}/{i}", "long".repeat(50)));
        for i in 0..SYNCED_MAX {
            paths.make_room(1);
            assert!(!paths.contains(&path(i)));
            paths.insert(&path(i));
        }
        assert_eq!(paths.hashes.len(), SYNCED_MAX);
        paths.remove(&path(7));
        assert!(!paths.contains(&path(7)) && paths.contains(&path(8)));
        paths.make_room(1);
        assert!(paths.contains(&path(8)));
        paths.make_room(2);
        assert!(!paths.contains(&path(8)));
    }
}
