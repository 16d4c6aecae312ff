//! Opening a store: from the files to the index.
//!
//! For each directory: take the lock, read its identity, load the checkpoint, and scan the headers
//! of what was appended after it (or, without one, of everything). Scans run on several threads and
//! in any order, because the highest sequence number of a key wins; tombstones stay in the index
//! until everything is read.
//!
//! Invariant: an entry is trusted (keeps the time of its validation) only if no tombstone or newer
//! record of its key can have been lost: the directory was closed cleanly or is opened in the same
//! boot of the machine, was there in the store's last run, and missed no tombstone. Otherwise the
//! time becomes 0, and stays 0 however often the store is opened (the distrust mark is saved before
//! use).

use crate::{
    checkpoint,
    config::StoreConfig,
    dir::{Directory, Opening, State},
    disk::{Disk, OpenMode},
    identity::{self, Identity, Known},
    index::{Entry, HEAD, INLINE, Index, PIN, PINNED, TOMBSTONE},
    inner::Inner,
    pins::Pins,
    record::{FLAG_INLINE, HEADER_BYTES, Header, Kind, padded},
    segment::{Segment, Segments},
    sources::{Salts, Sources},
    stats::DirState,
    sync::{
        Mutex, RwLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    timed::{Latency, Timed},
};
use forebay_core::{Clock, Error, Result, units::format_bytes};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::Arc,
};

const SCAN_THREADS_MAX: usize = 16;
/// After a kill, records near the end of the last segments are checked: those being written at that
/// time are there.
const CHECKED_SEGMENTS: usize = 2;
const CHECKED_BYTES: u64 = 64 << 20;

/// A directory as it was found.
pub struct Found {
    pub index: usize,
    pub path: PathBuf,
    pub disk: Arc<dyn Disk>,
    latency: Arc<Latency>,
    pub capacity: u64,
    pub keep_free: Option<u64>,
    pub segment_bytes: u64,
    pub identity: Identity,
    pub segments: BTreeMap<u64, Arc<Segment>>,
    checkpoint_bytes: u64,
    /// Some file could not be used: the cause, and the resulting state of the directory.
    trouble: Option<(DirState, io::Error)>,
    lock: identity::Lock,
}

/// A piece of the log that is to be read.
struct Scan<'a> {
    dir: &'a Found,
    segment: &'a Arc<Segment>,
    from: u64,
    distrust_all: bool,
    /// Records from here on may have been cut off by a kill: their data are read and checked.
    check_from: u64,
}

fn unusable(path: &std::path::Path, e: io::Error) -> Error {
    Error::internal(format!(
        "cache directory {} cannot be used: {e}",
        path.display()
    ))
    .hint("check that it exists, is a directory, and that this user may write there")
    .caused_by(e)
}

impl Inner {
    pub fn open(disk: Arc<dyn Disk>, config: StoreConfig, clock: Arc<dyn Clock>) -> Result<Inner> {
        if config.dirs.is_empty() || config.dirs.len() > 255 {
            return Err(Error::invalid("a cache needs 1 to 255 directories"));
        }
        let (segments, index) = (Segments::new(), Index::new());
        let mut found = Vec::new();
        for (i, dir) in config.dirs.iter().enumerate() {
            let segment_bytes = dir.segment_bytes(config.segment_bytes)?;
            let mut dir = find(
                &disk,
                i,
                dir.path.clone(),
                dir.capacity_bytes,
                segment_bytes,
                &segments,
                config.discard_incompatible,
            )?;
            dir.keep_free = config.keep_free_bytes;
            found.push(dir);
        }
        let mut ids = BTreeSet::new();
        if let Some(twice) = found.iter().find(|f| !ids.insert(f.identity.id)) {
            return Err(Error::invalid(format!(
                "cache directory {} is a copy of another one",
                twice.path.display()
            ))
            .hint("empty one of them: a cache directory and its copy cannot be used together"));
        }
        let mut node = node_of(&mut found, config.node)?;
        if node.is_none() && config.makes_node {
            node = node_of(&mut found, Some(identity::random()?))?;
        }
        let boot = identity::boot_id();
        let (last_run, last_session) = found
            .iter()
            .map(|f| (f.identity.run, f.identity.session))
            .max()
            .unwrap_or((0, 0));
        let session = identity::random()?;
        let accused: BTreeSet<u64> = found
            .iter()
            .flat_map(|f| f.identity.distrusted_peers.iter().copied())
            .collect();
        let distrust: Vec<bool> = found
            .iter()
            .map(|f| {
                let i = &f.identity;
                let other_boot = i.boot_id.is_empty() || i.boot_id != boot;
                (!i.clean && other_boot)
                    || i.session != last_session
                    || accused.contains(&i.id)
                    || i.missed_tombstone
                    || f.trouble.is_some()
            })
            .collect();
        let next_seq = AtomicU64::new(1);
        let unread = read_all(&found, &distrust, &index, &segments, &next_seq)?;
        for f in &found {
            next_seq.fetch_max(f.identity.distrust_below, Relaxed);
        }
        finish_index(&index, &segments);
        for segment in found.iter().flat_map(|f| f.segments.values()) {
            // How much of it is outdated, and whether that has a name, is unknown.
            let unclear = segment.live_bytes.load(Relaxed) != segment.end.load(Relaxed);
            segment.outdated.store(u64::from(unclear), Relaxed);
        }

        let next_ordinal = found
            .iter()
            .filter_map(|f| f.segments.last_key_value())
            .map(|(o, _)| o + 1)
            .max()
            .unwrap_or(0)
            // One that a loss of power took has a place in the index that was written out: the next
            // start would take the first records of another of its number for read.
            .max(unread);
        let capacity = found.iter().map(|f| f.capacity).sum();
        let away: Vec<bool> = found
            .iter()
            .map(|f| f.identity.session != last_session)
            .collect();
        let now = clock.now_secs();
        let plain = plain_origins(&mut found, &config.sources);
        let salts = Arc::new(Salts::new(&config.sources, &plain));
        let dirs = found
            .into_iter()
            .zip(&distrust)
            .map(|(f, distrust)| {
                adopt(
                    f,
                    *distrust,
                    (last_run + 1, session),
                    &boot,
                    next_seq.load(Relaxed),
                    now,
                    salts.clone(),
                )
            })
            .collect();
        let inner = Inner {
            node,
            config,
            clock,
            dirs,
            index,
            segments,
            pins: Pins::new(capacity),
            seq: next_seq,
            ordinals: AtomicU64::new(next_ordinal),
            closed: RwLock::new(false),
            checkpointing: Mutex::new(()),
            advisor: RwLock::new(None),
            salts,
        };
        for dir in &inner.dirs {
            dir.measure(now);
        }
        inner.load_pins(&away);
        for dir in &inner.dirs {
            if let Err(e) = inner.shrink(dir) {
                tracing::warn!(dir = %dir.path.display(), error = %e, "cache directory is over its size");
            }
        }
        Ok(inner)
    }

    /// See [`Store::close`](crate::Store::close).
    pub fn close(&self) -> Result<()> {
        let mut closed = self.closed.write();
        if std::mem::replace(&mut *closed, true) {
            return Ok(());
        }
        let refuses = |d: &Directory| matches!(d.health(), DirState::Full | DirState::ReadOnly);
        let mut result = match self.checkpoint() {
            Err(e) if self.dirs.iter().any(refuses) => {
                tracing::warn!(error = %e.describe(), "the index could not be written out on a full or read-only file system; the next start reads the records");
                Ok(())
            }
            written => written,
        };
        for dir in &self.dirs {
            let unsaved = dir.identity_unsaved.load(Relaxed);
            dir.close_active();
            let segments: Vec<_> = dir.state.lock().segments.values().cloned().collect();
            let synced = segments
                .iter()
                .try_for_each(|s| match s.sync_failed.load(Relaxed) {
                    // What the kernel could not write then, it does not tell of again.
                    true => Err(io::Error::other("an earlier sync of a file failed")),
                    false => s.file.sync(),
                });
            let is_lost = synced.is_err();
            let synced = synced.and_then(|()| dir.disk.sync_dir(&dir.path));
            let saved = synced.and_then(|()| {
                dir.identity.lock().clean = true;
                dir.save_identity()
            });
            if let Err(e) = saved {
                let error = dir.write_failed(e, self.now());
                if is_lost {
                    self.distrust(dir, &error);
                } else if dir.health() == DirState::ReadOnly
                    && !(unsaved && self.forgets_removals(dir))
                {
                    // The mark of a clean close is all that is missing.
                    tracing::warn!(dir = %dir.path.display(), error = %error.describe(), "a cache directory that cannot be written holds what it held");
                    continue;
                }
                result = Err(error.context("close"));
            }
        }
        result
    }

    /// Whether `dir`, whose identity is not on its disk, missed a removal, and no other directory has
    /// that on its own.
    fn forgets_removals(&self, dir: &Directory) -> bool {
        let notes = |peer: &Directory| {
            let is_noted = peer.identity.lock().distrusted_peers.contains(&dir.id);
            is_noted && !peer.identity_unsaved.load(Relaxed)
        };
        let missed = dir.identity.lock().missed_tombstone;
        missed && !self.dirs.iter().any(notes)
    }
}

/// Determines which directory this is, and whether it starts empty: the cache's contents are not
/// thrown away unless that was asked for.
fn recognize(
    known: Known,
    path: &Path,
    files: &[(String, u64)],
    discard: bool,
) -> Result<(Identity, bool)> {
    let held = || {
        let segments = files
            .iter()
            .filter(|(name, _)| Segment::parse_file_name(name).is_some());
        segments.fold((0u64, 0u64), |(n, bytes), (_, size)| (n + 1, bytes + size))
    };
    let what = match known {
        Known::Identity(identity) => return Ok((*identity, false)),
        Known::Recovered(identity) => {
            tracing::warn!(dir = %path.display(), "the identity file of this cache directory is missing or damaged; its copy was used, and objects are revalidated before they are served");
            return Ok((*identity, false));
        }
        Known::Nothing | Known::Damaged if held().0 == 0 => return Ok((Identity::new()?, true)),
        Known::Nothing => format!("{} is not there", identity::FILE),
        Known::Damaged => format!("{} is damaged", identity::FILE),
        Known::Foreign(format) => format!(
            "it has format {format}, from another version of this program (this one reads format \
             {})",
            identity::FORMAT
        ),
    };
    let (segments, bytes) = held();
    let holds = format!("{} in {segments} segments", format_bytes(bytes));
    if discard {
        tracing::warn!(dir = %path.display(), why = %what, holds = %holds, "the contents of this cache directory are discarded, as configured");
        return Ok((Identity::new()?, true));
    }
    Err(Error::invalid(format!(
        "cache directory {} cannot be read: {what}; it holds {holds}",
        path.display()
    ))
    .hint(
        "start the version that wrote it, or put the file back; or set \
         cache.discard_incompatible = true (--set cache.discard_incompatible=true) to begin with \
         an empty cache",
    ))
}

/// Locks a directory and opens its files.
fn find(
    disk: &Arc<dyn Disk>,
    index: usize,
    path: PathBuf,
    capacity: u64,
    segment_bytes: u64,
    segments: &Segments,
    discard: bool,
) -> Result<Found> {
    if let Err(e) = disk.create_dir_all(&path) {
        // It may already exist on a read-only file system; locking will show.
        if !path.is_dir() {
            return Err(unusable(&path, e));
        }
    }
    let lock = identity::lock(&path)?;
    let latency = Arc::new(Latency::default());
    let disk: Arc<dyn Disk> = Arc::new(Timed::new(disk.clone(), latency.clone()));
    let known = Identity::load(&*disk, &path).map_err(|e| unusable(&path, e))?;
    let files = disk.list(&path).map_err(|e| unusable(&path, e))?;
    let (identity, fresh) = recognize(known, &path, &files, discard)?;
    let mut found = Found {
        index,
        path,
        disk: disk.clone(),
        latency,
        capacity,
        keep_free: None,
        segment_bytes,
        identity,
        segments: BTreeMap::new(),
        checkpoint_bytes: 0,
        trouble: None,
        lock,
    };
    for (name, size) in files {
        let path = found.path.join(&name);
        let ordinal = Segment::parse_file_name(&name);
        let ours = ordinal.is_some() || name == checkpoint::FILE;
        // Without an identity nothing can be checked: these files are useless, and the user asked
        // for them to be discarded.
        let of_no_use = fresh && (ours || name == identity::COPY);
        if name == checkpoint::TMP || name == identity::TMP || of_no_use {
            match disk.delete(&path) {
                Err(e) if fresh => return Err(unusable(&path, e)),
                Err(e) => found.trouble = Some((DirState::ReadOnly, e)),
                Ok(()) => {}
            }
        } else if let Some(ordinal) = ordinal {
            let file = disk.open(&path, OpenMode::ReadWrite).or_else(|e| {
                let file = disk.open(&path, OpenMode::Read)?;
                found.trouble = Some((DirState::ReadOnly, e));
                Ok::<_, io::Error>(file)
            });
            let file = file.map_err(|e| unusable(&path, e))?;
            let slot = segments
                .take_slot()
                .ok_or_else(|| Error::internal("the cache has too many segment files"))?;
            let segment = Arc::new(Segment::new(
                index,
                slot,
                ordinal,
                found.identity.secret,
                path,
                file,
                padded(size),
            ));
            segments.publish(&segment);
            found.segments.insert(ordinal, segment);
        } else if name == checkpoint::FILE {
            found.checkpoint_bytes = size;
        }
    }
    Ok(found)
}

/// Loads the checkpoints and scans the rest of the logs. Returns the first ordinal of which no
/// checkpoint has read anything.
fn read_all(
    found: &[Found],
    distrust: &[bool],
    index: &Index,
    segments: &Segments,
    next_seq: &AtomicU64,
) -> Result<u64> {
    let (mut scans, mut unread) = (Vec::new(), 0);
    for (dir, distrust_all) in found.iter().zip(distrust.iter().copied()) {
        let mark = dir.identity.distrust_below;
        let loaded = checkpoint::load(
            dir,
            |mut entry, settled| {
                if distrust_all || (!settled && entry.seq < mark) {
                    entry.validated_at = 0;
                }
                add(index, segments, entry);
            },
            |n| index.reserve(n),
        );
        let loaded = loaded.unwrap_or_else(|e| {
            tracing::warn!(dir = %dir.path.display(), error = %e, "the checkpoint cannot be read; the records are read instead");
            None
        });
        if let Some(loaded) = &loaded {
            next_seq.fetch_max(loaded.next_seq, Relaxed);
        }
        let from = loaded.map_or((0, 0), |l| l.replay);
        unread = from.0.saturating_add(u64::from(from.1 > 0)).max(unread);
        let unchecked = if dir.identity.clean {
            dir.segments.len()
        } else {
            dir.segments.len().saturating_sub(CHECKED_SEGMENTS)
        };
        let first_checked = dir
            .segments
            .keys()
            .nth(unchecked)
            .copied()
            .unwrap_or(u64::MAX);
        for (ordinal, segment) in dir.segments.range(from.0..) {
            let end = segment.end.load(Relaxed);
            let check_from = if *ordinal >= first_checked {
                end.saturating_sub(CHECKED_BYTES)
            } else {
                u64::MAX
            };
            let from = if *ordinal == from.0 { from.1 } else { 0 };
            if from < end {
                scans.push(Scan {
                    dir,
                    segment,
                    from,
                    distrust_all,
                    check_from,
                });
            }
        }
    }
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism()
        .map_or(2, |n| 2 * n.get())
        .min(SCAN_THREADS_MAX)
        .min(scans.len());
    crate::sync::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(scan) = scans.get(next.fetch_add(1, Relaxed)) {
                    read_one(scan, index, segments, next_seq);
                }
            });
        }
    });
    Ok(unread)
}

fn read_one(scan: &Scan<'_>, index: &Index, segments: &Segments, next_seq: &AtomicU64) {
    let Scan {
        dir,
        segment,
        from,
        distrust_all,
        check_from,
    } = scan;
    let mark = dir.identity.distrust_below;
    let result = segment.scan(*from, false, &mut |offset, header, _, _| {
        next_seq.fetch_max(header.seq + 1, Relaxed);
        if offset >= *check_from && !is_whole(segment, offset, header) {
            tracing::info!(file = %segment.path.display(), offset, "dropped a record that was not written completely");
            // Permanently: the next start may not check here again, and would prefer it to an
            // older, whole record of the key.
            if let Err(e) = segment.file.write_all_at(&[&[0; HEADER_BYTES]], offset) {
                tracing::warn!(file = %segment.path.display(), error = %e, "a record that was cut off could not be made unreadable");
            }
            return ControlFlow::Continue(());
        }
        let flags = match header.kind {
            Kind::Head if header.flags & FLAG_INLINE != 0 => HEAD | INLINE,
            Kind::Head => HEAD,
            Kind::Part => 0,
            Kind::Pin => PIN,
            Kind::Tombstone => {
                segment
                    .tombstone_bytes
                    .fetch_add(padded(header.len()), Relaxed);
                TOMBSTONE
            }
        };
        let validated_at = if *distrust_all || header.seq < mark {
            0
        } else {
            header.validated_at
        };
        add(
            index,
            segments,
            Entry::new(
                header.key,
                header.seq,
                segment.slot,
                offset,
                header.len() as u32,
                validated_at,
                flags,
            ),
        );
        ControlFlow::Continue(())
    });
    match result {
        Ok(0) => {}
        Ok(skipped) => {
            tracing::info!(file = %segment.path.display(), bytes = skipped * 64, "skipped bytes that are not a record")
        }
        Err(e) => {
            tracing::warn!(file = %segment.path.display(), error = %e, "a segment cannot be read to its end")
        }
    }
}

/// Whether a record is as it was written. (If it cannot be read, that stays open.)
fn is_whole(segment: &Segment, offset: u64, header: &Header) -> bool {
    let mut bytes = Vec::new();
    segment
        .file
        .read_append(&mut bytes, header.len() as usize, offset)
        .is_err()
        || (header.body_is_whole(&bytes)
            && header.blocks_are_whole(
                &bytes,
                &(0..header.blocks()),
                &bytes[header.prefix_len()..],
            ))
}

/// The highest number wins. Between equal numbers, a record beats a tombstone (which ends only
/// *lower* numbers), and the earlier copy beats the later: it was whole when the evictor began to
/// copy it, and the copy may be torn.
fn add(index: &Index, segments: &Segments, entry: Entry) {
    let mut shard = index.shard(entry.key());
    if let Some(old) = shard.get(entry.key()) {
        let position = |e: &Entry| (segments.get(e.slot()).map(|s| s.ordinal), e.offset());
        let newer = (entry.seq, !entry.has(TOMBSTONE)).cmp(&(old.seq, !old.has(TOMBSTONE)));
        if newer
            .then_with(|| position(old).cmp(&position(&entry)))
            .is_lt()
        {
            return;
        }
    }
    shard.insert(entry);
}

/// Drops what only recovery needed, and counts the live records of each segment.
fn finish_index(index: &Index, segments: &Segments) {
    for mut shard in index.shards() {
        shard.retain(|e| {
            e.clear(PINNED);
            if !e.has(TOMBSTONE)
                && let Some(segment) = segments.get(e.slot())
            {
                segment.add_live(e.padded());
                return true;
            }
            false
        });
    }
}

/// Makes a found directory part of the running store: says so in its identity file before the first
/// use.
fn adopt(
    found: Found,
    distrust: bool,
    (run, session): (u64, u64),
    boot: &str,
    next_seq: u64,
    now: u32,
    salts: Arc<Salts>,
) -> Directory {
    let Found {
        index,
        path,
        disk,
        latency,
        capacity,
        keep_free,
        segment_bytes,
        mut identity,
        segments,
        checkpoint_bytes,
        trouble,
        lock,
    } = found;
    identity.run = run;
    identity.session = session;
    identity.boot_id = boot.to_owned();
    identity.clean = false;
    identity.missed_tombstone = false;
    identity.distrusted_peers.clear();
    if distrust {
        identity.distrust_below = next_seq;
    }
    let used = checkpoint_bytes + segments.values().map(|s| s.end.load(Relaxed)).sum::<u64>();
    let state = State {
        used,
        segments,
        checkpoint_bytes,
        ..State::default()
    };
    let dir = Directory::new(
        Opening {
            index,
            path,
            disk,
            latency,
            capacity,
            keep_free,
            segment_bytes,
            identity,
            salts,
            lock,
        },
        state,
    );
    if let Some((state, e)) = trouble {
        tracing::warn!(dir = %dir.path.display(), error = %e, "cache directory serves reads only");
        dir.set_health(state, now);
        dir.identity_unsaved.store(true, Relaxed);
    } else if let Err(e) = dir.save_identity() {
        dir.write_failed(e, now);
    } else {
        let saved = dir.identity.lock().save_copy(&*dir.disk, &dir.path);
        if let Err(e) = saved {
            tracing::info!(dir = %dir.path.display(), error = %e, "the copy of the identity file could not be written");
        }
    }
    dir
}

/// The node that has these directories: the configured one, or what they say. They remember it.
fn node_of(found: &mut [Found], configured: Option<u64>) -> Result<Option<u64>> {
    let known = configured.or_else(|| found.iter().find_map(|f| f.identity.node));
    let Some(node) = known else {
        return Ok(None);
    };
    for f in found.iter() {
        if let Some(other) = f.identity.node.filter(|other| *other != node) {
            return Err(Error::invalid(format!(
                "cache directory {} belongs to node {other:016x}, and this one is {node:016x}",
                f.path.display()
            ))
            .hint(
                "give each node its own directories; a directory that another node shall have must \
                 be emptied first",
            ));
        }
    }
    for f in found {
        f.identity.node = known;
    }
    Ok(known)
}

/// The origins whose objects have plain keys, in all directories together. For a directory that an
/// earlier version wrote, these are the origins configured now.
fn plain_origins(found: &mut [Found], sources: &Sources) -> BTreeSet<u32> {
    let mut plain = BTreeSet::new();
    for f in found.iter() {
        match &f.identity.plain_origins {
            Some(known) => plain.extend(known),
            None => plain.extend(sources.adopted()),
        }
    }
    if !sources.is_empty() {
        for f in found {
            f.identity.plain_origins = Some(plain.iter().copied().collect());
        }
    }
    plain
}
