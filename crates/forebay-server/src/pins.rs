//! What a cluster was told to pin and to unpin: a register that every node has whole.
//!
//! Each name has the moment at which it was last pinned and last unpinned ([`Said`]), given by the node
//! that was asked. What two nodes know of a name is merged, in any order and any number of times, to
//! the same: so who was away asks the others for what was said since, a new owner learns what it is to
//! keep, and a node that comes back cannot pin again what was unpinned meanwhile. Which names a node
//! really pins, in its store, follows from this and from the map (`operate.rs`).
//!
//! On disk, the register is a log of lines in each cache directory. It is read whole at a start; a
//! directory that was away, or whose last line is torn, is written anew.
//!
//! # Invariants
//!
//! What is told to others is on disk (of a node that has one that works). The register has at most
//! [`NAMES_MAX`] names. That a name was unpinned is remembered for [`REMEMBERED`], and of the last
//! [`UNPINNED_MAX`] names.

use forebay_core::{Clock, Error, ErrorKind, ObjectName, Result, sync::Mutex};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead, BufReader, BufWriter, IntoInnerError, Write},
    ops::Bound,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use xxhash_rust::xxh3::xxh3_64;

const FILE: &str = "pins.log";
const TEMPORARY: &str = "pins.log.tmp";
/// Pinned names of a cluster, and those that were unpinned: some 200 bytes of memory each.
pub(crate) const NAMES_MAX: usize = 4_000_000;
/// How long a node may be away without pinning again what was unpinned meanwhile.
pub(crate) const REMEMBERED: Duration = Duration::from_secs(7 * 24 * 3600);
/// And how many names may be unpinned meanwhile.
pub(crate) const UNPINNED_MAX: usize = 100_000;
/// Moments beyond this (the year 2223) are no moments.
const MOMENT_MAX: u64 = 8_000_000_000_000_000;
/// Lines that may be outdated before a log is written anew.
const OUTDATED_LINES: usize = 10_000;
/// A directory that could not be written is tried again after this.
const AGAIN: Duration = Duration::from_secs(60);
/// So many names at a time may be changed at once.
const TURNS: usize = 64;
/// Of a log that is written anew, so many lines are made at a time: meanwhile, nobody learns what is
/// known.
const LINES_AT_ONCE: usize = 1000;
/// What an entry takes in JSON besides its name.
const ENTRY_JSON_BYTES: usize = 80;

/// What was said of a name. Moments are microseconds since the Unix epoch, and later than all that the
/// node which gives them has seen; 0: never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Said {
    #[serde(rename = "u", default)]
    pub unpinned: u64,
    #[serde(rename = "p", default)]
    pub pinned: u64,
    /// On so many nodes, as far as it is pinned.
    #[serde(rename = "c", default)]
    pub copies: u8,
    /// How large the object was when it was pinned: that says which nodes own parts of it.
    #[serde(rename = "s", default)]
    pub size: u64,
}

impl Said {
    pub fn is_pinned(&self) -> bool {
        self.pinned > self.unpinned
    }

    /// What is known if both are: the latest moments, and of the pins since the last unpin the
    /// greatest number of nodes.
    fn and(self, other: Said) -> Said {
        let unpinned = self.unpinned.max(other.unpinned);
        let valid = |said: &Said| said.pinned > unpinned;
        let (later, earlier) = match (self.pinned, self.size) >= (other.pinned, other.size) {
            true => (self, other),
            false => (other, self),
        };
        if !valid(&later) {
            return Said {
                unpinned,
                ..Said::default()
            };
        }
        Said {
            unpinned,
            copies: match valid(&earlier) {
                true => later.copies.max(earlier.copies),
                false => later.copies,
            },
            ..later
        }
    }

    fn is_sound(&self) -> bool {
        self.unpinned.max(self.pinned) <= MOMENT_MAX
    }
}

/// What was said of this node alone (`--this-node`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Here {
    at: u64,
    /// `None`: nothing any more.
    pinned: Option<bool>,
}

/// A line of the log.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
enum Line {
    /// Whose register it is; the first line.
    Cluster(String),
    Said(String, String, Said),
    Here(String, String, Here),
}

/// How far a register is, for others to compare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Extent {
    /// Equal for equal registers.
    pub digest: u64,
    /// How many changes it has seen since the node started.
    pub changes: u64,
}

/// Entries of a register, in the order of their last changes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Page {
    pub said: Vec<(String, String, Said)>,
    /// Where the next page begins.
    pub next: u64,
    pub more: bool,
}

struct Entry {
    said: Said,
    change: u64,
}

#[derive(Default)]
struct State {
    names: BTreeMap<ObjectName, Entry>,
    /// By the number of their last change.
    changes: BTreeMap<u64, ObjectName>,
    /// Those that are not pinned, the oldest first.
    unpinned: BTreeSet<(u64, ObjectName)>,
    here: BTreeMap<ObjectName, Here>,
    change: u64,
    /// The latest moment that was seen.
    latest: u64,
    digest: u64,
}

fn digest(name: &ObjectName, said: &Said) -> u64 {
    let mut bytes = [0; 41];
    bytes[..16].copy_from_slice(&name.hash128().to_le_bytes());
    bytes[16..24].copy_from_slice(&said.unpinned.to_le_bytes());
    bytes[24..32].copy_from_slice(&said.pinned.to_le_bytes());
    bytes[32..40].copy_from_slice(&said.size.to_le_bytes());
    bytes[40] = said.copies;
    xxh3_64(&bytes)
}

impl State {
    fn said(&self, name: &ObjectName) -> Option<Said> {
        self.names.get(name).map(|entry| entry.said)
    }

    fn remove(&mut self, name: &ObjectName) {
        if let Some(entry) = self.names.remove(name) {
            self.digest = self.digest.wrapping_sub(digest(name, &entry.said));
            self.changes.remove(&entry.change);
            if !entry.said.is_pinned() {
                self.unpinned.remove(&(entry.said.unpinned, name.clone()));
            }
        }
    }

    fn set(&mut self, name: &ObjectName, said: Said) {
        self.remove(name);
        self.change += 1;
        let change = self.change;
        self.latest = self.latest.max(said.unpinned).max(said.pinned);
        self.digest = self.digest.wrapping_add(digest(name, &said));
        self.changes.insert(change, name.clone());
        if !said.is_pinned() {
            self.unpinned.insert((said.unpinned, name.clone()));
        }
        self.names.insert(name.clone(), Entry { said, change });
    }

    fn set_here(&mut self, name: &ObjectName, here: Here) {
        self.latest = self.latest.max(here.at);
        match here.pinned {
            Some(_) => self.here.insert(name.clone(), here),
            None => self.here.remove(name),
        };
    }

    /// A log with more lines is written anew.
    fn lines_most(&self) -> usize {
        2 * (self.names.len() + self.here.len()) + OUTDATED_LINES
    }

    /// Forgets what was unpinned long ago.
    fn prune(&mut self, now: u64) {
        let oldest = now.saturating_sub(REMEMBERED.as_micros() as u64);
        while let Some((at, name)) = self.unpinned.first().cloned() {
            if at >= oldest && self.unpinned.len() <= UNPINNED_MAX {
                return;
            }
            self.remove(&name);
        }
    }
}

/// The log in one directory.
struct Log {
    dir: PathBuf,
    /// `None` after a failure.
    file: Option<fs::File>,
    lines: usize,
    failed: Option<Instant>,
}

impl Log {
    /// Appends lines; they are on the disk afterwards.
    fn append(&mut self, text: &[u8], lines: usize) -> std::io::Result<()> {
        let Some(file) = &mut self.file else {
            return Err(std::io::Error::other("it could not be written before"));
        };
        let written = file.write_all(text).and_then(|()| file.sync_data());
        if written.is_err() {
            // The last line may be torn: nothing is put behind it.
            (self.file, self.failed) = (None, Some(Instant::now()));
        } else {
            self.lines += lines;
        }
        written
    }

    /// Writes the log anew, with what is known: nobody may change that meanwhile.
    fn write_anew(&mut self, cluster: &str, state: &Mutex<State>) -> std::io::Result<()> {
        let (temporary, path) = (self.dir.join(TEMPORARY), self.dir.join(FILE));
        let written = (|| {
            let mut out = BufWriter::new(fs::File::create(&temporary)?);
            let lines = write_log(&mut out, cluster, state)?;
            let file = out.into_inner().map_err(IntoInnerError::into_error)?;
            file.sync_data()?;
            fs::rename(&temporary, &path)?;
            fs::File::open(&self.dir)?.sync_all()?;
            Ok((file, lines))
        })();
        match written {
            Ok((file, lines)) => {
                (self.file, self.lines, self.failed) = (Some(file), lines, None);
                Ok(())
            }
            Err(e) => {
                (self.file, self.failed) = (None, Some(Instant::now()));
                Err(e)
            }
        }
    }
}

/// The next lines of a log: of what was said of all nodes, or `of_here`.
fn page_of(state: &State, of_here: bool, after: Option<&ObjectName>) -> Vec<(ObjectName, Line)> {
    let from = after.map_or(Bound::Unbounded, Bound::Excluded);
    let parts = |name: &ObjectName| (name.bucket().to_owned(), name.key().to_owned());
    if of_here {
        let here = state.here.range((from, Bound::Unbounded));
        let lines = here.take(LINES_AT_ONCE).map(|(name, here)| {
            let (bucket, key) = parts(name);
            (name.clone(), Line::Here(bucket, key, *here))
        });
        return lines.collect();
    }
    let said = state.names.range((from, Bound::Unbounded));
    let lines = said.take(LINES_AT_ONCE).map(|(name, entry)| {
        let (bucket, key) = parts(name);
        (name.clone(), Line::Said(bucket, key, entry.said))
    });
    lines.collect()
}

/// Writes a whole log, a few lines at a time: who asks what is known waits for no disk, and not until
/// millions of names are written. Returns how many lines it has.
fn write_log(out: &mut impl Write, cluster: &str, state: &Mutex<State>) -> std::io::Result<usize> {
    out.write_all(&text_of(&Line::Cluster(cluster.to_owned()))?)?;
    let mut lines = 1;
    for of_here in [false, true] {
        let mut last: Option<ObjectName> = None;
        loop {
            let page = page_of(&state.lock(), of_here, last.as_ref());
            let Some((name, _)) = page.last() else { break };
            last = Some(name.clone());
            for (_, line) in &page {
                out.write_all(&text_of(line)?)?;
            }
            lines += page.len();
        }
    }
    Ok(lines)
}

fn text_of(line: &Line) -> std::io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    Ok(text)
}

/// What a log says, its lines, and whether each of them could be read.
fn read(path: &Path, cluster: &str) -> std::io::Result<(State, usize, bool)> {
    let mut state = State::default();
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok((state, 0, false)),
        Err(e) => return Err(e),
    };
    let (mut reader, mut text) = (BufReader::new(file), Vec::new());
    let (mut lines, mut whole) = (0, true);
    loop {
        text.clear();
        if reader.read_until(b'\n', &mut text)? == 0 {
            return Ok((state, lines, whole));
        }
        lines += 1;
        whole &= text.ends_with(b"\n");
        let named = |bucket: String, key: String| ObjectName::new(bucket, key).ok();
        match serde_json::from_slice(&text) {
            Ok(Line::Cluster(of)) if lines == 1 && of == cluster => {}
            // A directory that was part of another cluster.
            Ok(Line::Cluster(_)) => return Ok((State::default(), 0, false)),
            Ok(Line::Said(bucket, key, said)) if lines > 1 && said.is_sound() => {
                if let Some(name) = named(bucket, key) {
                    // The last line of a name counts: it was merged before it was written.
                    state.set(&name, said);
                }
            }
            Ok(Line::Here(bucket, key, here)) if lines > 1 && here.at <= MOMENT_MAX => {
                if let Some(name) = named(bucket, key) {
                    state.set_here(&name, here);
                }
            }
            _ => whole = false,
        }
    }
}

/// The register of one node.
pub struct Register {
    cluster: String,
    state: Mutex<State>,
    /// Held by whoever changes the register. May wait for a disk.
    logs: Mutex<Vec<Log>>,
    turns: Vec<Mutex<()>>,
    clock: Arc<dyn Clock>,
}

impl Register {
    /// The register in these directories. Reads and may write files.
    pub fn open(cluster: &str, dirs: Vec<PathBuf>, clock: Arc<dyn Clock>) -> Self {
        let mut all = State::default();
        let mut found = Vec::new();
        for dir in dirs {
            let read = read(&dir.join(FILE), cluster);
            if let Err(e) = &read {
                tracing::warn!(dir = %dir.display(), error = %e, "what this cluster was told to \
                    pin cannot be read here; other directories and other nodes know it");
            }
            let (state, lines, whole) = read.unwrap_or((State::default(), 0, false));
            for (name, entry) in &state.names {
                let known = all.said(name).unwrap_or_default();
                all.set(name, known.and(entry.said));
            }
            for (name, here) in &state.here {
                if all.here.get(name).is_none_or(|known| known.at < here.at) {
                    all.set_here(name, *here);
                }
            }
            found.push((dir, (state.digest, state.here), lines, whole));
        }
        all.prune(clock.now().as_micros() as u64);
        let state = Mutex::new(all);
        let mut logs = Vec::new();
        for (dir, (digest, here), lines, whole) in found {
            let path = dir.join(FILE);
            let mut log = Log {
                dir,
                file: None,
                lines,
                failed: None,
            };
            let is_current = {
                let all = state.lock();
                let is_same = whole && digest == all.digest && here == all.here;
                is_same && lines <= all.lines_most()
            };
            let opened = match is_current {
                true => fs::OpenOptions::new()
                    .append(true)
                    .open(&path)
                    .map(|file| log.file = Some(file)),
                false => log.write_anew(cluster, &state),
            };
            if let Err(e) = opened {
                log.failed = Some(Instant::now());
                tracing::warn!(dir = %log.dir.display(), error = %e, "what this cluster is told to \
                    pin cannot be written here");
            }
            logs.push(log);
        }
        Register {
            cluster: cluster.to_owned(),
            state,
            logs: Mutex::new(logs),
            turns: (0..TURNS).map(|_| Mutex::new(())).collect(),
            clock,
        }
    }

    /// A moment that is later than all that this node knows of.
    pub fn moment(&self) -> u64 {
        let mut state = self.state.lock();
        let now = self.clock.now().as_micros() as u64;
        state.latest = now.max(state.latest + 1);
        state.latest
    }

    /// What was said of a name.
    pub fn said(&self, name: &ObjectName) -> Option<Said> {
        self.state.lock().said(name)
    }

    /// Whether the name was pinned, or unpinned, on this node alone, and nothing was said of it later.
    pub fn here(&self, name: &ObjectName) -> Option<bool> {
        let state = self.state.lock();
        let here = state.here.get(name)?;
        let said = state.said(name).unwrap_or_default();
        let is_later = here.at > said.unpinned.max(said.pinned);
        // A pin of all nodes leaves that of this node alone in force.
        let is_kept = here.pinned == Some(true) && here.at > said.unpinned;
        (is_later || is_kept).then_some(here.pinned).flatten()
    }

    /// While the answer is held, nobody else who takes turns changes what the store keeps of the name.
    pub fn turn(&self, name: &ObjectName) -> forebay_core::sync::MutexGuard<'_, ()> {
        self.turns[name.hash128() as usize % TURNS].lock()
    }

    /// Notes what was said, and what that comes to with what is known. May wait for a disk.
    ///
    /// # Errors
    /// `TooLarge` if there would be too many names; `Internal` if no directory can be written.
    pub fn say(&self, said: &[(ObjectName, Said)]) -> Result<()> {
        let mut logs = self.logs.lock();
        let (changed, is_full) = {
            let state = self.state.lock();
            let mut room = NAMES_MAX.saturating_sub(state.names.len());
            let oldest = self.clock.now().saturating_sub(REMEMBERED).as_micros() as u64;
            let (mut changed, mut is_full) = (BTreeMap::<&ObjectName, Said>::new(), false);
            for (name, said) in said.iter().filter(|(_, said)| said.is_sound()) {
                let known = changed.get(name).copied().or_else(|| state.said(name));
                let merged = known.unwrap_or_default().and(*said);
                let is_old = !merged.is_pinned() && merged.unpinned < oldest;
                if known == Some(merged) || (known.is_none() && is_old) {
                    continue;
                }
                if known.is_none() {
                    if room == 0 {
                        is_full = true;
                        continue;
                    }
                    room -= 1;
                }
                changed.insert(name, merged);
            }
            (changed, is_full)
        };
        let lines = changed
            .iter()
            .map(|(name, said)| Line::Said(name.bucket().to_owned(), name.key().to_owned(), *said));
        self.write(&mut logs, lines)?;
        let mut state = self.state.lock();
        for (name, said) in changed {
            state.set(name, said);
        }
        state.prune(self.clock.now().as_micros() as u64);
        match is_full {
            true => Err(Error::new(
                ErrorKind::TooLarge,
                format!("a cluster can have {NAMES_MAX} pinned objects, and it has"),
            )
            .hint("unpin some, or pin with --this-node")),
            false => Ok(()),
        }
    }

    /// Notes what was said of this node alone; `None`: nothing any more. May wait for a disk.
    ///
    /// # Errors
    /// As [`Register::say`].
    pub fn say_here(&self, names: &[ObjectName], pinned: Option<bool>) -> Result<()> {
        let at = self.moment();
        let mut logs = self.logs.lock();
        let names: Vec<&ObjectName> = {
            let state = self.state.lock();
            let room = NAMES_MAX.saturating_sub(state.here.len());
            let is_new = |name: &&ObjectName| pinned.is_some() || state.here.contains_key(*name);
            let names: Vec<_> = names.iter().filter(is_new).collect();
            if pinned.is_some() && names.len() > room {
                return Err(Error::new(
                    ErrorKind::TooLarge,
                    format!("{NAMES_MAX} objects are pinned on this node alone"),
                )
                .hint("unpin some"));
            }
            names
        };
        let here = Here { at, pinned };
        let lines = names
            .iter()
            .map(|name| Line::Here(name.bucket().to_owned(), name.key().to_owned(), here));
        self.write(&mut logs, lines)?;
        let mut state = self.state.lock();
        for name in names {
            state.set_here(name, here);
        }
        Ok(())
    }

    fn write(&self, logs: &mut [Log], lines: impl Iterator<Item = Line>) -> Result<()> {
        let failed = |e: std::io::Error| {
            Error::internal(format!(
                "what is pinned could not be written to a disk: {e}"
            ))
            .hint("see the log for the cache directories, and try again")
        };
        let (mut text, mut count) = (Vec::new(), 0);
        for line in lines {
            text.extend(text_of(&line).map_err(failed)?);
            count += 1;
        }
        if count == 0 || logs.is_empty() {
            return Ok(());
        }
        let mut done = Err(std::io::Error::other("it could not be written before"));
        for log in logs {
            let due = log.failed.is_some_and(|at| at.elapsed() >= AGAIN);
            let is_long = log.lines > self.state.lock().lines_most();
            if (due || (is_long && log.file.is_some()))
                && let Err(e) = log.write_anew(&self.cluster, &self.state)
            {
                tracing::warn!(dir = %log.dir.display(), error = %e, "what is pinned could not be \
                    written anew");
            }
            let was_there = log.file.is_some();
            let written = log.append(&text, count);
            if let Err(e) = &written
                && was_there
            {
                tracing::warn!(dir = %log.dir.display(), error = %e, "what is pinned could not \
                    be written");
            }
            if done.is_err() {
                done = written;
            }
        }
        done.map_err(failed)
    }

    /// How far it is.
    pub fn extent(&self) -> Extent {
        let state = self.state.lock();
        Extent {
            digest: state.digest,
            changes: state.change,
        }
    }

    /// What has changed since, as much as takes so many bytes in JSON.
    pub fn since(&self, change: u64, bytes: usize) -> Page {
        let state = self.state.lock();
        let mut page = Page {
            next: change,
            ..Page::default()
        };
        let mut taken = 0;
        let later = (Bound::Excluded(change), Bound::Unbounded);
        for (change, name) in state.changes.range(later) {
            let Some(said) = state.said(name) else {
                continue;
            };
            let escaped = |text: &str| serde_json::to_string(text).map_or(0, |t| t.len());
            taken += escaped(name.bucket()) + escaped(name.key()) + ENTRY_JSON_BYTES;
            if taken > bytes && !page.said.is_empty() {
                page.more = true;
                return page;
            }
            page.next = *change;
            let (bucket, key) = (name.bucket().to_owned(), name.key().to_owned());
            page.said.push((bucket, key, said));
        }
        page.next = page.next.max(state.change);
        page
    }

    /// The first so many names of which something was noted after one change and up to another, and
    /// the last of their changes.
    pub fn noted(&self, after: u64, until: u64, names: usize) -> (Vec<ObjectName>, u64) {
        let state = self.state.lock();
        if after >= until {
            return (Vec::new(), after);
        }
        let noted = (Bound::Excluded(after), Bound::Included(until));
        let noted = state.changes.range(noted).take(names);
        noted.fold((Vec::new(), after), |(mut names, _), (change, name)| {
            names.push(name.clone());
            (names, *change)
        })
    }

    /// The next so many names, in their order.
    pub fn after(&self, name: Option<&ObjectName>, names: usize) -> Vec<ObjectName> {
        let state = self.state.lock();
        let from = name.map_or(Bound::Unbounded, Bound::Excluded);
        let next = state.names.range((from, Bound::Unbounded));
        next.take(names).map(|(name, _)| name.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::ManualClock;

    const NOW: u64 = 1_800_000_000_000_000;

    fn clock() -> Arc<ManualClock> {
        Arc::new(ManualClock::at(Duration::from_micros(NOW)))
    }

    fn name(i: usize) -> ObjectName {
        ObjectName::new("bk", format!("o{i}")).unwrap()
    }

    fn pinned(at: u64, copies: u8) -> Said {
        Said {
            pinned: at,
            copies,
            size: at % 7,
            ..Said::default()
        }
    }

    fn unpinned(at: u64) -> Said {
        Said {
            unpinned: at,
            ..Said::default()
        }
    }

    #[test]
    fn what_was_said_last_counts_in_whatever_order_it_is_heard() {
        let all = [
            pinned(1, 3),
            pinned(4, 1),
            unpinned(2),
            unpinned(6),
            pinned(7, 2),
            pinned(8, 1),
            unpinned(8),
            pinned(9, 2),
        ];
        let (three, one) = (pinned(1, 3), pinned(2, 1));
        assert_eq!(three.and(one).copies, 3, "the number is only raised");
        assert_eq!(
            three.and(unpinned(2)).and(pinned(3, 1)).copies,
            1,
            "until it is unpinned"
        );
        assert!(!pinned(5, 1).and(unpinned(5)).is_pinned());
        for a in all {
            assert_eq!(a.and(a), a, "again");
            for b in all {
                assert_eq!(a.and(b), b.and(a));
                for c in all {
                    let (one, other) = (a.and(b).and(c), a.and(b.and(c)));
                    assert_eq!(one.is_pinned(), other.is_pinned(), "{a:?} {b:?} {c:?}");
                    // Nodes that hear of each other's sums agree.
                    assert_eq!(one.and(other), other.and(one));
                    assert_eq!(one.and(other).and(other), one.and(other));
                }
            }
        }
    }

    fn open(dirs: &[&Path]) -> Register {
        let dirs = dirs.iter().map(|dir| dir.to_path_buf()).collect();
        Register::open("c", dirs, clock())
    }

    #[test]
    fn it_survives_restarts_and_directories_that_were_away() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let both = [a.path(), b.path()];
        let register = open(&both);
        register
            .say(&[(name(1), pinned(NOW, 3)), (name(2), pinned(NOW, 1))])
            .unwrap();
        register.say_here(&[name(3)], Some(true)).unwrap();
        drop(register);
        // One directory is missing, and something is unpinned; another is pinned on fewer.
        let register = open(&both[..1]);
        assert!(register.said(&name(1)).unwrap().is_pinned());
        assert_eq!(register.here(&name(3)), Some(true));
        let at = register.moment();
        assert!(at > NOW);
        let again = [(name(1), unpinned(at)), (name(2), unpinned(at))];
        register.say(&again).unwrap();
        let later = register.moment();
        register.say(&[(name(2), pinned(later, 1))]).unwrap();
        register.say_here(&[name(3)], None).unwrap();
        register.say_here(&[name(4)], Some(false)).unwrap();
        let told = register.extent().digest;
        drop(register);
        for _ in 0..2 {
            let register = open(&both);
            assert!(!register.said(&name(1)).unwrap().is_pinned());
            assert_eq!(register.said(&name(2)).unwrap().copies, 1);
            assert_eq!(register.extent().digest, told);
            assert_eq!(register.here(&name(4)), Some(false));
            assert!(register.moment() > later, "moments go on");
        }
        // The other one alone says the same by now.
        assert_eq!(open(&both[1..]).extent().digest, told);
        // A line that was cut off is left out, and what comes then is read again.
        let log = a.path().join(FILE);
        let mut text = fs::read(&log).unwrap();
        text.extend(br#"{"Said":["bk","o5",{"u":0,"p":1"#);
        fs::write(&log, text).unwrap();
        let register = open(&both[..1]);
        assert_eq!(register.extent().digest, told);
        register.say(&[(name(6), pinned(later, 1))]).unwrap();
        drop(register);
        assert!(open(&both[..1]).said(&name(6)).is_some());
        // Of another cluster, nothing is taken.
        let other = Register::open("d", vec![a.path().to_owned()], clock());
        assert_eq!(other.extent(), Extent::default());
    }

    #[test]
    fn a_log_that_is_written_anew_has_all_names() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let count = 2 * LINES_AT_ONCE + 1;
        let said: Vec<_> = (0..count).map(|i| (name(i), pinned(NOW, 1))).collect();
        let here: Vec<_> = (0..LINES_AT_ONCE).map(name).collect();
        let register = open(&[a.path()]);
        register.say(&said).unwrap();
        register.say_here(&here, Some(true)).unwrap();
        let told = register.extent().digest;
        drop(register);
        // A directory that has nothing of it gets all.
        drop(open(&[a.path(), b.path()]));
        let text = fs::read_to_string(b.path().join(FILE)).unwrap();
        assert_eq!(text.lines().count(), 1 + count + LINES_AT_ONCE);
        let register = open(&[b.path()]);
        assert_eq!(register.extent().digest, told);
        assert_eq!(register.here(&name(LINES_AT_ONCE - 1)), Some(true));
        assert_eq!(register.here(&name(LINES_AT_ONCE)), None);
        assert_eq!(register.logs.lock()[0].lines, 1 + count + LINES_AT_ONCE);
    }

    #[test]
    fn a_log_of_many_names_of_this_node_alone_is_not_written_anew_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let register = open(&[dir.path()]);
        let here: Vec<_> = (0..OUTDATED_LINES + 10).map(name).collect();
        register.say_here(&here, Some(true)).unwrap();
        for more in 1..4 {
            register.say_here(&here[..1], Some(true)).unwrap();
            assert_eq!(register.logs.lock()[0].lines, 1 + here.len() + more);
        }
    }

    #[test]
    fn what_was_unpinned_long_ago_is_forgotten_and_does_not_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let clock = clock();
        let register = Register::open("c", vec![dir.path().to_owned()], clock.clone());
        register
            .say(&[(name(1), pinned(NOW, 1)), (name(2), pinned(NOW, 1))])
            .unwrap();
        register.say(&[(name(1), unpinned(NOW + 1))]).unwrap();
        clock.advance(REMEMBERED + Duration::from_secs(1));
        register
            .say(&[(name(3), pinned(register.moment(), 1))])
            .unwrap();
        assert_eq!(register.said(&name(1)), None);
        assert!(register.said(&name(2)).unwrap().is_pinned());
        // Somebody else still remembers.
        register.say(&[(name(1), unpinned(NOW + 1))]).unwrap();
        assert_eq!(register.said(&name(1)), None);
        // Many at once: the last ones are remembered.
        let many: Vec<_> = (0..UNPINNED_MAX + 10)
            .map(|i| (name(100 + i), unpinned(register.moment())))
            .collect();
        register.say(&many).unwrap();
        assert_eq!(register.said(&name(100 + 9)), None);
        assert!(register.said(&name(100 + 10)).is_some());
        assert!(register.said(&name(2)).unwrap().is_pinned());
    }

    #[test]
    fn what_has_changed_is_told_in_pages() {
        let register = Register::open("c", Vec::new(), clock());
        let other = Register::open("c", Vec::new(), clock());
        let said: Vec<_> = (0..100)
            .map(|i| (name(i), pinned(NOW + i as u64, 1)))
            .collect();
        register.say(&said).unwrap();
        register.say(&[(name(7), unpinned(NOW + 1000))]).unwrap();
        let (mut from, mut pages) = (0, 0);
        loop {
            let page = register.since(from, 1000);
            assert!(!page.said.is_empty() && page.said.len() < 20);
            let said: Vec<_> = page
                .said
                .into_iter()
                .map(|(bucket, key, said)| (ObjectName::new(bucket, key).unwrap(), said))
                .collect();
            other.say(&said).unwrap();
            (from, pages) = (page.next, pages + 1);
            if !page.more {
                break;
            }
        }
        assert!(pages > 5);
        assert_eq!(other.extent().digest, register.extent().digest);
        assert_eq!(from, register.extent().changes);
        assert!(register.since(from, 1000).said.is_empty());
        assert!(!other.said(&name(7)).unwrap().is_pinned());
        let all = register.after(None, 1000);
        assert_eq!(
            (all.len(), register.after(Some(&all[98]), 9)),
            (100, vec![all[99].clone()])
        );
    }

    #[test]
    fn what_was_noted_is_found_in_the_order_of_its_last_change() {
        let register = Register::open("c", Vec::new(), clock());
        let say = |i, said| register.say(&[(name(i), said)]).unwrap();
        for i in 0..4 {
            say(i, pinned(NOW, 1));
        }
        let all = register.extent().changes;
        assert_eq!(register.noted(0, all, 3), ((0..3).map(name).collect(), 3));
        assert_eq!(register.noted(3, all, 3), (vec![name(3)], 4));
        assert_eq!(register.noted(4, all, 3), (Vec::new(), 4));
        // What is noted again is later, and what comes after the end is for the next time.
        say(1, unpinned(NOW + 1));
        let found: Vec<_> = [0, 2, 3].map(name).into();
        assert_eq!(register.noted(0, all, 9), (found, 4));
        assert_eq!(register.noted(all, 5, 9), (vec![name(1)], 5));
        assert_eq!(register.noted(5, 4, 9), (Vec::new(), 5));
    }

    #[test]
    fn a_disk_that_takes_nothing_is_an_error_and_nothing_was_said() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("none");
        let register = Register::open("c", vec![gone.clone()], clock());
        let said = [(name(1), pinned(NOW, 1))];
        assert_eq!(register.say(&said).unwrap_err().kind(), ErrorKind::Internal);
        assert_eq!(register.said(&name(1)), None);
        // With another one that works, it is noted.
        let register = Register::open("c", vec![gone, dir.path().to_owned()], clock());
        register.say(&said).unwrap();
        assert!(open(&[dir.path()]).said(&name(1)).is_some());
    }
}
