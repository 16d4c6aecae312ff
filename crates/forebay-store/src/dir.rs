//! One cache directory: its segments, the space that they take, and whether it can be written.
//!
//! Invariant: `used`, which is charged before a byte is written and credited after a file is gone,
//! is never less than the sum of the sizes of all files of the store in the directory, except for
//! the prepared part of the active segment, and never more than the capacity less the room that is
//! kept free for that part.
//!
//! The *effective* capacity, which may be used at this moment, is less than the configured one if
//! the file system has less room ([`Directory::measure`]), or says that it has none
//! ([`Directory::squeeze`]).

use crate::{
    config::{IDENTITY_RESERVE_BYTES, SEGMENTS_MIN, keep_free_of},
    disk::{Disk, OpenMode, PREPARED_BYTES},
    identity::{self, Identity},
    segment::{Segment, Segments},
    sources::Salts,
    stats::DirState,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    timed::Latency,
};
use forebay_core::{Error, Result, units::format_bytes};
use std::{collections::BTreeMap, io, path::PathBuf, sync::Arc};

const PAGE_BYTES: u64 = 4 << 10;
/// When a write finds no room, this part of what is used is given up.
const SQUEEZE_SHARE: u64 = 16;
/// How long a directory does not grow after that.
const SQUEEZED_SECS: u32 = 30;
/// So many segments below the limit, room counts as room to spare. The evictor makes room up to one
/// segment below the limit ahead of need.
const SPARE_FROM_SEGMENTS: u64 = 3;

/// What the space is for; later classes may go further into the reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Goes only where there is room to spare: for it, the evictor never has to make any.
    Spare,
    Normal,
    /// Small, and must not fail for lack of space.
    Tombstone,
    /// Copies by the evictor, which frees more than it takes.
    Relocation,
}

#[derive(Default)]
pub struct Counters {
    pub evicted_records: AtomicU64,
    pub evicted_bytes: AtomicU64,
    pub relocated_bytes: AtomicU64,
    pub checksum_failures: AtomicU64,
    pub read_failures: AtomicU64,
    pub write_failures: AtomicU64,
    pub written_bytes: AtomicU64,
}

pub struct Directory {
    pub index: usize,
    pub path: PathBuf,
    pub disk: Arc<dyn Disk>,
    pub latency: Arc<Latency>,
    /// As configured.
    pub capacity: u64,
    /// What others keep in this directory: it counts in the capacity ([`Directory::set_aside`]).
    aside: Mutex<Aside>,
    /// Held by the thread that sets room aside.
    pub setting_aside: Mutex<()>,
    /// The part of it that there is room for at this moment.
    effective: AtomicU64,
    /// Held by the thread that changes that.
    sizing: Mutex<()>,
    /// What must stay free on the file system; `None`: the default.
    keep_free: Option<u64>,
    /// What others may still write to the file system, as last measured.
    available: AtomicU64,
    /// The same when a write found no room.
    available_when_full: AtomicU64,
    /// The effective capacity does not grow before this time.
    squeezed_until: AtomicU32,
    /// Times that room was made because a write found none.
    pub squeezes: AtomicU64,
    pub segment_bytes: u64,
    /// Kept free for the evictor's copies: a segment's worth.
    pub reserve: u64,
    /// The active segment is prepared in steps of this many bytes, for which room is kept free; 0:
    /// not prepared, because segments are too small.
    ahead: u64,
    pub id: u64,
    pub secret: u64,
    pub identity: Mutex<Identity>,
    pub salts: Arc<Salts>,
    pub state: Mutex<State>,
    /// Held by the thread that evicts.
    pub evict: Mutex<()>,
    roll: Mutex<()>,
    pub counters: Counters,
    /// Counts reasons why a file may hold records without an entry: a removal then writes its
    /// tombstone here even if the name is not known.
    pub ghosts: AtomicU64,
    /// The identity in RAM is not on disk yet: nothing may be written before it is.
    pub identity_unsaved: AtomicBool,
    /// Pinned bytes that the evictor has moved, in segments that exist.
    pub held_bytes: AtomicU64,
    /// Where the evictor goes on asking its advisor about segments in turn.
    pub asked_in_turn: AtomicU64,
    health: AtomicU8,
    retry_at: AtomicU32,
    _lock: identity::Lock,
}

/// What others keep in a directory.
#[derive(Clone, Copy, Default)]
struct Aside {
    bytes: u64,
    /// Of that, what is not on the disk yet: the file system takes it for free.
    to_come: u64,
}

#[derive(Default)]
pub struct State {
    pub used: u64,
    /// By ordinal: the first is the oldest.
    pub segments: BTreeMap<u64, Arc<Segment>>,
    pub active: Option<Arc<Segment>>,
    /// Places that were given out and are not finished.
    pub in_flight: Vec<(u64, u64)>,
    pub checkpoint_bytes: u64,
    pub appended_since_checkpoint: u64,
    pub bytes_since_checkpoint: u64,
}

impl State {
    fn is_active(&self, segment: &Segment) -> bool {
        self.active
            .as_ref()
            .is_some_and(|a| a.ordinal == segment.ordinal)
    }

    /// All but the active one, the oldest first.
    pub fn sealed(&self) -> impl Iterator<Item = &Arc<Segment>> {
        self.segments.values().filter(|s| !self.is_active(s))
    }
}

/// What had happened to a directory when a write began.
#[derive(Clone, Copy)]
pub struct Seen {
    pub write_failures: u64,
    pub squeezes: u64,
}

/// A place for a record in the log.
pub struct Placed {
    pub segment: Arc<Segment>,
    pub offset: u64,
    pub seq: u64,
}

pub struct Opening {
    pub index: usize,
    pub path: PathBuf,
    pub disk: Arc<dyn Disk>,
    pub latency: Arc<Latency>,
    pub capacity: u64,
    pub keep_free: Option<u64>,
    pub segment_bytes: u64,
    pub identity: Identity,
    pub salts: Arc<Salts>,
    pub lock: identity::Lock,
}

impl Directory {
    pub fn new(o: Opening, state: State) -> Self {
        let largest = state
            .segments
            .values()
            .map(|s| s.end.load(Relaxed))
            .max()
            .unwrap_or(0);
        let segment = o.segment_bytes.max(largest).min(o.capacity / 4);
        Self {
            index: o.index,
            path: o.path,
            disk: o.disk,
            latency: o.latency,
            capacity: o.capacity,
            aside: Mutex::default(),
            setting_aside: Mutex::new(()),
            effective: AtomicU64::new(o.capacity),
            sizing: Mutex::new(()),
            keep_free: o.keep_free,
            available: AtomicU64::new(0),
            available_when_full: AtomicU64::new(0),
            squeezed_until: AtomicU32::new(0),
            squeezes: AtomicU64::new(0),
            segment_bytes: o.segment_bytes,
            reserve: segment,
            ahead: ahead_of(o.segment_bytes),
            id: o.identity.id,
            secret: o.identity.secret,
            identity: Mutex::new(o.identity),
            salts: o.salts,
            state: Mutex::new(state),
            evict: Mutex::new(()),
            roll: Mutex::new(()),
            counters: Counters::default(),
            ghosts: AtomicU64::new(0),
            identity_unsaved: AtomicBool::new(false),
            held_bytes: AtomicU64::new(0),
            asked_in_turn: AtomicU64::new(0),
            health: AtomicU8::new(DirState::Ok as u8),
            retry_at: AtomicU32::new(0),
            _lock: o.lock,
        }
    }

    /// How far `used` may grow.
    pub fn limit(&self, class: Class) -> u64 {
        let kept = match class {
            Class::Relocation => 0,
            Class::Tombstone => self.reserve,
            Class::Normal => self.reserve + self.reserve / 16,
            Class::Spare => {
                let kept = self.reserve + self.reserve / 16;
                kept + SPARE_FROM_SEGMENTS * self.segment_bytes
            }
        };
        self.effective()
            .saturating_sub(IDENTITY_RESERVE_BYTES + self.ahead + kept + self.aside())
    }

    /// What others keep in this directory.
    pub fn aside(&self) -> u64 {
        self.aside.lock().bytes
    }

    /// Takes `bytes` of the capacity away from the cache, if others then have at most `most` of it
    /// and the cache keeps what it can work with. The caller makes the room.
    pub fn set_aside(&self, bytes: u64, most: u64) -> bool {
        let most = most.min(self.capacity.saturating_sub(self.works_with()));
        let mut aside = self.aside.lock();
        match aside.bytes.checked_add(bytes) {
            Some(sum) if sum <= most => {
                aside.bytes = sum;
                aside.to_come += bytes;
                true
            }
            _ => false,
        }
    }

    /// What was set aside and is not on the disk yet.
    pub fn aside_to_come(&self) -> u64 {
        self.aside.lock().to_come
    }

    /// Of what was set aside, `bytes` are on the disk by now.
    pub fn aside_came(&self, bytes: u64) {
        let mut aside = self.aside.lock();
        aside.to_come = aside.to_come.saturating_sub(bytes);
    }

    /// The same as [`Directory::set_aside`] for what is on the disk already.
    pub fn found_aside(&self, bytes: u64) {
        let mut aside = self.aside.lock();
        aside.bytes = aside.bytes.saturating_add(bytes);
    }

    /// Gives `bytes` that were set aside back to the cache, of which `to_come` never came.
    pub fn give_back(&self, bytes: u64, to_come: u64) {
        let mut aside = self.aside.lock();
        aside.bytes = aside.bytes.saturating_sub(bytes);
        aside.to_come = aside.to_come.saturating_sub(to_come);
    }

    /// Whether the file system could have room for `bytes` more that are set aside, if the whole cache
    /// and `gone` bytes of what is set aside were not there. If it does not say, it could.
    pub fn could_hold_aside(&self, bytes: u64, gone: u64) -> bool {
        let Ok(space) = self.disk.space(&self.path) else {
            return true;
        };
        let cache = self.state.lock().used + self.ahead;
        let room = space.available_bytes.saturating_add(cache);
        room.saturating_add(gone) >= self.aside_to_come().saturating_add(bytes)
    }

    /// How much can be moved to the end of the log at this moment.
    pub fn room_for_moving(&self) -> u64 {
        let limit = self.limit(Class::Relocation);
        limit.saturating_sub(self.state.lock().used)
    }

    /// Whether moves that were broken off have used up some of the room for others.
    pub fn lacks_room_for_moving(&self) -> bool {
        self.room_for_moving() < self.reserve
    }

    /// The part of the capacity that there is room for at this moment.
    pub fn effective(&self) -> u64 {
        self.effective.load(Relaxed)
    }

    /// What others may still write to the file system, as last measured.
    pub fn available(&self) -> u64 {
        self.available.load(Relaxed)
    }

    /// What the cache can work with: no less is left to it.
    fn works_with(&self) -> u64 {
        self.segment_bytes * SEGMENTS_MIN + IDENTITY_RESERVE_BYTES
    }

    /// The least that a directory can work with, even if there is less room: the evictor's room, and
    /// besides it two segments, one of which may go for the other.
    fn least(&self) -> u64 {
        let besides = IDENTITY_RESERVE_BYTES + self.ahead + self.reserve + self.reserve / 16;
        (besides + 2 * self.segment_bytes + self.aside()).min(self.capacity)
    }

    /// Asks the file system how much room there is, and makes that the effective capacity, but at
    /// most what was configured and at least what is needed. A file system that does not say has
    /// enough.
    pub fn measure(&self, now: u32) {
        let _one = self.sizing.lock();
        self.measure_alone(now);
    }

    /// [`Directory::measure`] for a caller that holds `sizing`.
    fn measure_alone(&self, now: u32) {
        let Ok(space) = self.disk.space(&self.path) else {
            return;
        };
        self.available.store(space.available_bytes, Relaxed);
        let kept = keep_free_of(self.keep_free, space.total_bytes);
        // Of one moment: what is granted or given back meanwhile is not taken for what is on the disk.
        let aside = *self.aside.lock();
        let used = self.state.lock().used + aside.bytes.saturating_sub(aside.to_come);
        let room = (used + space.available_bytes).saturating_sub(kept);
        let mut effective = room.clamp(self.least(), self.capacity);
        let before = self.effective();
        let until = self.squeezed_until.load(Relaxed);
        // (If the clock is set back, the wait does not get longer.)
        if now < until && until - now <= SQUEEZED_SECS {
            effective = effective.min(before);
        }
        self.effective.store(effective, Relaxed);
        if effective < self.capacity && before == self.capacity {
            tracing::warn!(
                dir = %self.path.display(),
                size = %format_bytes(self.capacity),
                room = %format_bytes(effective),
                kept_free = %format_bytes(kept),
                "the file system has no room for the cache's whole size: it keeps to what there is"
            );
        } else if effective == self.capacity && before < self.capacity {
            tracing::info!(dir = %self.path.display(), "there is room for the cache's whole size \
                again");
        }
        let full = self.available_when_full.load(Relaxed);
        if self.health() == DirState::Full
            && space.available_bytes >= full.saturating_add(2 * self.segment_bytes)
        {
            self.has_room_again();
        }
    }

    /// A write found no room, whatever the file system says (quotas, reserves): gives up a part of
    /// what is used, and does not grow again for a while. Returns the effective capacity before, and
    /// from now on.
    pub fn squeeze(&self, now: u32) -> (u64, u64) {
        let _one = self.sizing.lock();
        let before = self.effective();
        self.measure_alone(now);
        self.available_when_full.store(self.available(), Relaxed);
        let used = self.state.lock().used;
        let step = (used / SQUEEZE_SHARE).max(self.segment_bytes);
        // `limit` leaves a part of it out, which stays usable.
        let besides = self.effective().saturating_sub(self.limit(Class::Normal));
        let most = used.saturating_sub(step) + besides;
        let squeezed = self.effective().min(most.max(self.least()));
        self.effective.store(squeezed, Relaxed);
        self.squeezed_until
            .store(now.saturating_add(SQUEEZED_SECS), Relaxed);
        (before, squeezed)
    }

    /// Whether this many bytes could be charged now.
    pub fn fits(&self, bytes: u64, class: Class) -> bool {
        self.state.lock().used + bytes <= self.limit(class)
    }

    /// Charges `bytes`, if they fit.
    pub fn try_claim(&self, bytes: u64, class: Class) -> bool {
        let mut state = self.state.lock();
        let fits = state.used + bytes <= self.limit(class);
        if fits {
            state.used += bytes;
        }
        fits
    }

    pub fn unclaim(&self, bytes: u64) {
        self.state.lock().used -= bytes;
    }

    /// Takes the next `bytes` of the active segment, which the caller has claimed. `None`: it is
    /// full, or not prepared that far: call [`roll`](Self::roll) first. `seq` is called under the
    /// lock, so that numbers and places of new records have the same order.
    pub fn place(&self, bytes: u64, seq: impl FnOnce() -> u64) -> Option<Placed> {
        let mut state = self.state.lock();
        let segment = state.active.clone()?;
        let offset = segment.end.load(Relaxed);
        if offset + bytes > self.segment_bytes || offset + bytes > segment.prepared.load(Relaxed) {
            return None;
        }
        segment.end.store(offset + bytes, Relaxed);
        segment.pending.fetch_add(1, Relaxed);
        state.in_flight.push((segment.ordinal, offset));
        state.appended_since_checkpoint += 1;
        state.bytes_since_checkpoint += bytes;
        Some(Placed {
            segment,
            offset,
            seq: seq(),
        })
    }

    /// The record at this place was written and published, or given up.
    pub fn finish(&self, placed: &Placed) {
        let mut state = self.state.lock();
        if let Some(at) = state
            .in_flight
            .iter()
            .position(|p| *p == (placed.segment.ordinal, placed.offset))
        {
            state.in_flight.swap_remove(at);
        }
        placed.segment.pending.fetch_sub(1, Relaxed);
    }

    /// Makes the next `bytes` of the active segment ready, or opens a new one.
    pub fn roll(
        &self,
        bytes: u64,
        segments: &Segments,
        ordinals: &AtomicU64,
        now: u32,
    ) -> Result<()> {
        if bytes > self.segment_bytes {
            return Err(too_large(bytes, self.segment_bytes));
        }
        let _guard = self.roll.lock();
        let active = self.state.lock().active.clone();
        if let Some(segment) = active.filter(|s| s.end.load(Relaxed) + bytes <= self.segment_bytes)
        {
            self.prepare(&segment, bytes);
            // Whoever closed it meanwhile may have cut its file before it was prepared.
            let closed = !self.state.lock().is_active(&segment);
            if closed {
                self.seal(&segment);
            }
            return Ok(());
        }
        if self.identity_unsaved.load(Relaxed) {
            self.save_identity()
                .map_err(|e| self.write_failed(e, now))?;
        }
        let slot = segments.take_slot().ok_or_else(|| {
            Error::internal("the cache has too many segment files").hint("raise the segment size")
        })?;
        let ordinal = ordinals.fetch_add(1, Relaxed);
        let path = self.path.join(Segment::file_name(ordinal));
        let file = match self.disk.open(&path, OpenMode::Create) {
            Ok(file) => file,
            Err(e) => {
                segments.free(slot);
                return Err(self.write_failed(e, now));
            }
        };
        let segment = Arc::new(Segment::new(
            self.index,
            slot,
            ordinal,
            self.secret,
            path,
            file,
            0,
        ));
        self.prepare(&segment, bytes);
        segments.publish(&segment);
        let full = {
            let mut state = self.state.lock();
            state.segments.insert(ordinal, segment.clone());
            state.active.replace(segment)
        };
        if let Some(full) = full {
            self.seal(&full);
        }
        Ok(())
    }

    /// Makes room for the next `bytes` of a segment. The caller holds `roll`, or nobody else knows
    /// the segment.
    fn prepare(&self, segment: &Segment, bytes: u64) {
        let end = segment.end.load(Relaxed) + bytes;
        if self.ahead == 0 {
            segment.prepared.store(self.segment_bytes, Relaxed);
        } else if segment.prepared.load(Relaxed) < end {
            let until = end.next_multiple_of(self.ahead).min(self.segment_bytes);
            // Blocks that the record fills completely need no zeros. No record lies beyond what was
            // prepared, so nothing is overwritten.
            segment.file.prepare(
                segment
                    .prepared
                    .load(Relaxed)
                    .max(end / self.ahead * self.ahead)..until,
            );
            segment.prepared.store(until, Relaxed);
        }
    }

    /// Cuts off what was prepared of a segment that is no longer the active one.
    fn seal(&self, segment: &Segment) {
        if self.ahead == 0 {
            return;
        }
        if let Err(e) = segment.file.set_size(segment.end.load(Relaxed)) {
            tracing::debug!(file = %segment.path.display(), error = %e, "the unused end of a segment could not be cut off");
            let mut state = self.state.lock();
            if state.segments.contains_key(&segment.ordinal) {
                // The room kept free for this now belongs to the next segment: from here on these
                // bytes count as used.
                let end = segment.end.load(Relaxed);
                let until = segment.prepared.load(Relaxed).max(end);
                segment.end.store(until, Relaxed);
                state.used += until - end;
            }
        }
    }

    /// Closes the active segment: the next record opens a new one.
    pub fn close_active(&self) {
        let closed = self.state.lock().active.take();
        if let Some(closed) = closed {
            self.seal(&closed);
        }
    }

    /// Where the log must be read again from if the index is written out now, and the segments that
    /// the index then refers to.
    pub fn replay_from(&self) -> ((u64, u64), Vec<Arc<Segment>>) {
        let mut state = self.state.lock();
        state.appended_since_checkpoint = 0;
        state.bytes_since_checkpoint = 0;
        let next = match (&state.active, state.segments.last_key_value()) {
            (Some(active), _) => (active.ordinal, active.end.load(Relaxed)),
            (None, Some((last, _))) => (last + 1, 0),
            (None, None) => (0, 0),
        };
        let from = state
            .in_flight
            .iter()
            .copied()
            .min()
            .map_or(next, |first| first.min(next));
        (from, state.segments.values().cloned().collect())
    }

    /// Notes a failed write, after which the directory is left alone for a while, and describes the
    /// failure.
    pub fn write_failed(&self, e: io::Error, now: u32) -> Error {
        use io::ErrorKind::*;
        let (state, hint) = match e.kind() {
            StorageFull | QuotaExceeded => (
                DirState::Full,
                "free space on that file system, or give the cache a smaller size",
            ),
            ReadOnlyFilesystem | PermissionDenied => (
                DirState::ReadOnly,
                "make the directory writable; until then it only serves reads",
            ),
            _ => (
                DirState::Failing,
                "check the disk; the cache goes on without it",
            ),
        };
        self.counters.write_failures.fetch_add(1, Relaxed);
        if state == DirState::Full
            && let Ok(space) = self.disk.space(&self.path)
        {
            // Before it counts as full: that ends when there is more.
            self.available_when_full
                .store(space.available_bytes, Relaxed);
        }
        if self.health.swap(state as u8, Relaxed) != state as u8 {
            tracing::warn!(dir = %self.path.display(), error = %e, state = state.as_str(), "cache directory refused a write");
        }
        self.retry_at.store(now, Relaxed);
        // Later records go to a new file: this one may end in a torn record.
        self.close_active();
        Error::internal(format!(
            "cache directory {}: a write failed: {e}",
            self.path.display()
        ))
        .hint(hint)
        .caused_by(e)
    }

    /// There was nothing to give up: restores the effective capacity, unless that was measured anew.
    pub fn unsqueeze(&self, (before, squeezed): (u64, u64)) {
        let _one = self.sizing.lock();
        self.squeezed_until.store(0, Relaxed);
        if self.effective() == squeezed {
            self.effective.store(before, Relaxed);
        }
    }

    pub fn write_succeeded(&self) {
        if self.health.load(Relaxed) != DirState::Ok as u8 {
            self.health.store(DirState::Ok as u8, Relaxed);
            tracing::info!(dir = %self.path.display(), "cache directory takes writes again");
        }
    }

    /// Somebody made room on the file system. If a write finds none all the same, it says so again.
    fn has_room_again(&self) {
        let (full, ok) = (DirState::Full as u8, DirState::Ok as u8);
        let changed = self.health.compare_exchange(full, ok, Relaxed, Relaxed);
        if changed.is_ok() {
            tracing::info!(dir = %self.path.display(), "the file system of the cache directory has \
                room again");
        }
    }

    /// Whether a write may be tried: the directory is well, or was left alone for `retry_after`
    /// seconds. (Setting the clock back counts as waiting.)
    pub fn may_write(&self, now: u32, retry_after: u32) -> bool {
        self.health() == DirState::Ok || {
            let failed_at = self.retry_at.load(Relaxed);
            now < failed_at || now - failed_at >= retry_after
        }
    }

    pub fn seen(&self) -> Seen {
        Seen {
            write_failures: self.counters.write_failures.load(Relaxed),
            squeezes: self.squeezes.load(Relaxed),
        }
    }

    /// The next write is tried, whatever happened to the last one.
    pub fn retry_now(&self) {
        self.retry_at.store(0, Relaxed);
    }

    pub fn health(&self) -> DirState {
        DirState::from_u8(self.health.load(Relaxed))
    }

    pub fn set_health(&self, state: DirState, now: u32) {
        self.health.store(state as u8, Relaxed);
        self.retry_at.store(now, Relaxed);
    }

    pub fn save_identity(&self) -> io::Result<()> {
        let saved = self.identity.lock().save(&*self.disk, &self.path);
        self.identity_unsaved.store(saved.is_err(), Relaxed);
        saved
    }

    /// Pinned *derived* data are held up to this limit: when an object is pinned, their amount is
    /// not known.
    pub fn holds_derived(&self) -> bool {
        self.held_bytes.load(Relaxed) < self.limit(Class::Normal) / 2
    }

    pub fn full_error(&self, bytes: u64) -> Error {
        Error::busy(format!(
            "cache directory {}: {} do not fit into its {}",
            self.path.display(),
            format_bytes(bytes),
            format_bytes(self.effective())
        ))
        .hint("unpin objects, or give the cache more space")
    }
}

/// The steps in which segments of this size are prepared: a small part of one, in whole pages.
fn ahead_of(segment_bytes: u64) -> u64 {
    (segment_bytes / 16).min(PREPARED_BYTES) / PAGE_BYTES * PAGE_BYTES
}

pub fn too_large(bytes: u64, segment_bytes: u64) -> Error {
    Error::new(
        forebay_core::ErrorKind::TooLarge,
        format!(
            "a record of {} does not fit into a segment of {}",
            format_bytes(bytes),
            format_bytes(segment_bytes)
        ),
    )
    .hint("give the cache more space, or larger segments")
}
