//! Making room: whole segments go, the oldest first.
//!
//! - A segment without live records is deleted at once, wherever it is in the log.
//! - A segment that is at least half dead (overwritten, removed) is *compacted*: all its live
//!   records, and tombstones, move to the end of the log.
//! - Otherwise the oldest goes, CLOCK style: pinned records, and those read since they were
//!   written, move to the end of the log; the rest is dropped. At most half of a segment moves for
//!   having been read, so each pass makes progress.
//! - If nothing can be moved, because the file system is full or a failing disk broke off moves
//!   that used up the room for them, the evictor deletes the oldest segment without pinned records,
//!   with all its records. If each has some, it takes the oldest whose pinned records it can move.
//! - While an advisor knows what is coming, any segment may go instead of the oldest, and its
//!   advice counts more than whether a record was read ([`advice`](crate::advice)).
//!
//! Records of pins that were moved are synced before the segment that they were in is deleted: a pin
//! outlives a loss of power.
//!
//! Invariant: when the newest record of a name is *dropped*, no older record of that name is left
//! that a restart could take for current: the dropped record goes with the oldest segment, or no
//! older segment holds an outdated record of any name, or a tombstone takes its place. For the same
//! reason a tombstone is needed until its segment is the oldest, or the older ones hold nothing
//! outdated. (Parts are found through their head and belong to one version, so they may go from
//! anywhere.)

use crate::{
    advice::{self, Advisor, Choice, NextUse},
    dir::{Class, Directory, Seen},
    index::{PIN, PINNED, SUPERSEDED, VISITED},
    inner::Inner,
    record::{FLAG_DERIVED, FLAG_UNHELD, Header, Kind, padded, record_len, split_name},
    segment::Segment,
    stats::DirState,
    sync::{atomic::Ordering::Relaxed, sleep},
};
use forebay_core::{Error, ErrorKind, Result};
use std::{collections::BTreeMap, ops::ControlFlow, sync::Arc, time::Duration};

/// How long the evictor waits for a slow writer whose record is in the segment that must go.
const PENDING_WAIT: Duration = Duration::from_secs(5);

/// Smaller directories cannot spare a segment.
const SEGMENTS_FOR_RECLAIM_AHEAD: u64 = 16;
const RECLAIM_AHEAD_PASSES: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Compact,
    Clock,
    Advised(Choice),
    /// Only what is pinned is moved.
    Drop,
}

impl Mode {
    /// The segment is the oldest one: no older record of what it drops is left.
    fn is_of_oldest(self) -> bool {
        self == Mode::Clock
    }
}

/// A segment that is being emptied.
struct Victim<'a> {
    segment: &'a Arc<Segment>,
    mode: Mode,
    advisor: Option<Arc<dyn Advisor>>,
    /// No older segment holds a record of a name that is not current.
    nothing_older: bool,
    /// Bytes that may still move without being held.
    second_round: u64,
    /// Where records of pins were moved to, by ordinal.
    pins_moved_to: BTreeMap<u64, Arc<Segment>>,
}

impl Inner {
    /// Charges `bytes` to `dir`, evicting until they fit.
    pub fn claim(&self, dir: &Directory, bytes: u64, class: Class) -> Result<()> {
        if dir.try_claim(bytes, class) {
            return Ok(());
        }
        if class == Class::Relocation {
            // The evictor itself.
            return Err(dir.full_error(bytes));
        }
        let _guard = dir.evict.lock();
        dir.measure(self.now());
        // Pinned data are only moved: if a full round of the log does not make enough room, there
        // is none.
        let passes = 2 * dir.state.lock().segments.len() + 4;
        for _ in 0..passes {
            if dir.try_claim(bytes, class) {
                return Ok(());
            }
            if !self.reclaim(dir)? {
                break;
            }
        }
        if dir.try_claim(bytes, class) {
            Ok(())
        } else {
            Err(dir.full_error(bytes))
        }
    }

    /// Makes room ahead of need, so that writers seldom wait for it.
    pub fn reclaim_ahead(&self, dir: &Directory) -> Result<()> {
        if dir.capacity / dir.segment_bytes < SEGMENTS_FOR_RECLAIM_AHEAD {
            return Ok(());
        }
        let low_water = dir.limit(Class::Normal).saturating_sub(dir.segment_bytes);
        if dir.effective() < dir.capacity && dir.state.lock().used > dir.limit(Class::Normal) {
            // The room has shrunk.
            return self.shrink(dir);
        }
        for _ in 0..RECLAIM_AHEAD_PASSES {
            if dir.state.lock().used <= low_water {
                break;
            }
            let _guard = dir.evict.lock();
            self.reclaim(dir)?;
        }
        Ok(())
    }

    /// After a write of `dir` failed because the file system had no room: gives up the oldest
    /// records. Returns whether there may be room now. `seen` is from before the write: others may
    /// have made room already.
    pub fn relieve(&self, dir: &Directory, seen: Seen) -> bool {
        let failures = dir.counters.write_failures.load(Relaxed);
        if failures == seen.write_failures {
            return false;
        }
        match dir.health() {
            DirState::Full => {}
            // Another write has found room since.
            DirState::Ok => return true,
            DirState::ReadOnly | DirState::Failing => return false,
        }
        let _guard = dir.evict.lock();
        if dir.squeezes.load(Relaxed) != seen.squeezes {
            return true;
        }
        let squeezed = dir.squeeze(self.now());
        let passes = dir.state.lock().segments.len();
        // Not how much less is used: others take what was freed, and give back what they took.
        let mut dropped = false;
        for _ in 0..passes {
            let used = dir.state.lock().used;
            // Even the least that it works with may be more than there is room for: then one segment
            // goes all the same.
            if dropped && used <= dir.limit(Class::Normal) {
                break;
            }
            match self.drop_oldest(dir, 0) {
                Ok(true) => dropped = true,
                Ok(false) => break,
                Err(e) => {
                    tracing::warn!(dir = %dir.path.display(), error = %e.describe(), "no room \
                        could be made on a full file system");
                    break;
                }
            }
        }
        if dropped {
            dir.squeezes.fetch_add(1, Relaxed);
        } else {
            dir.unsqueeze(squeezed);
        }
        dropped
    }

    /// Drops the oldest segment for whose pinned records `room` suffices, and moves only those.
    /// `false`: there is none. The youngest always stays. The caller holds `dir.evict`.
    fn drop_oldest(&self, dir: &Directory, room: u64) -> Result<bool> {
        let mut segments: Vec<_> = dir.state.lock().sealed().cloned().collect();
        if dir.state.lock().active.is_none() {
            segments.pop();
        }
        for (i, segment) in segments.iter().enumerate() {
            let mode = if i == 0 { Mode::Clock } else { Mode::Drop };
            // Tombstones are moved, or written for names that are dropped (with a separator for a
            // name), before what is pinned.
            let tombstones = match mode {
                Mode::Drop if room > 0 => {
                    segment.tombstone_bytes.load(Relaxed)
                        + segment.live_records.load(Relaxed) * padded(record_len(1, 0, 0))
                }
                _ => 0,
            };
            if segment.pending.load(Relaxed) > 0
                || tombstones > room
                || self.pins_more_than(room - tombstones, dir, segment)
            {
                continue;
            }
            return self.free(dir, segment, mode, None, false).map(|()| true);
        }
        Ok(false)
    }

    /// Whether pinned records take more than `room` bytes of `segment`, as far as it can be read.
    fn pins_more_than(&self, room: u64, dir: &Directory, segment: &Segment) -> bool {
        let mut bytes = 0;
        if !self.pins.is_empty() {
            // (What cannot be read cannot be moved either.)
            let _ = segment.scan(0, true, &mut |offset, header, name, _| {
                let entry = self.index.peek(header.key);
                if entry.is_some_and(|e| {
                    e.is_at(segment.slot, offset)
                        && (e.has(PIN) || e.has(PINNED) || self.is_held(dir, header, name))
                }) {
                    bytes += padded(header.len());
                }
                match bytes > room {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            });
        }
        bytes > room
    }

    /// Brings a directory below its limit after that was lowered.
    pub fn shrink(&self, dir: &Directory) -> Result<()> {
        let _guard = dir.evict.lock();
        let passes = 2 * dir.state.lock().segments.len() + 4;
        for _ in 0..passes {
            if dir.state.lock().used <= dir.limit(Class::Normal) || !self.reclaim(dir)? {
                break;
            }
        }
        Ok(())
    }

    /// Frees one segment. `false`: there is none to free. The caller holds `dir.evict`.
    fn reclaim(&self, dir: &Directory) -> Result<bool> {
        let advisor = self.advisor();
        if Self::oldest(dir).is_none() {
            // Everything is in the active segment.
            dir.close_active();
        }
        let Some((victim, mode)) = Self::choose(dir, advisor.as_deref()) else {
            return Ok(false);
        };
        let freed = match self.free(dir, &victim, mode, advisor.clone(), true) {
            // A failing disk broke off moves, and those used up the room for moving: dropping what
            // can be dropped makes room again.
            Err(e) if mode != Mode::Clock && e.kind() == ErrorKind::Busy => match Self::oldest(dir)
            {
                Some(oldest) => self.free(dir, &oldest, Mode::Clock, advisor, true),
                None => Err(e),
            },
            freed => freed,
        };
        match freed {
            // Not even what is pinned can be moved: the file system is full, or broken-off moves
            // used up the room that is kept for moving.
            Err(e) if dir.health() == DirState::Full || dir.lacks_room_for_moving() => {
                let dropped = match self.drop_oldest(dir, 0) {
                    Ok(false) => self.drop_oldest(dir, dir.room_for_moving()),
                    dropped => dropped,
                };
                match dropped {
                    Ok(true) => Ok(true),
                    _ => Err(e),
                }
            }
            freed => freed.map(|()| true),
        }
    }

    fn oldest(dir: &Directory) -> Option<Arc<Segment>> {
        dir.state.lock().sealed().next().cloned()
    }

    /// The segment that goes next, and how.
    fn choose(dir: &Directory, advisor: Option<&dyn Advisor>) -> Option<(Arc<Segment>, Mode)> {
        let (idle, found) = {
            let state = dir.state.lock();
            let idle: Vec<_> = state
                .sealed()
                .filter(|s| s.pending.load(Relaxed) == 0)
                .collect();
            let half_dead = |s: &&&Arc<Segment>| s.dead_bytes() * 2 >= s.end.load(Relaxed);
            let empty = idle.iter().find(|s| {
                s.live_records.load(Relaxed) == 0 && s.tombstone_bytes.load(Relaxed) == 0
            });
            let oldest = state.sealed().next();
            let found = match (
                empty,
                idle.iter().filter(half_dead).max_by_key(|s| s.dead_bytes()),
                oldest,
            ) {
                (Some(empty), _, _) => return Some(((*empty).clone(), Mode::Compact)),
                (None, Some(dead), Some(oldest)) if dead.ordinal != oldest.ordinal => {
                    return Some(((*dead).clone(), Mode::Compact));
                }
                (_, _, Some(oldest)) => (oldest.clone(), Mode::Clock),
                (_, _, None) => return None,
            };
            (idle.into_iter().cloned().collect::<Vec<_>>(), found)
        };
        let Some(advisor) = advisor else {
            return Some(found);
        };
        let advised = match advice::untidy(dir, &idle) {
            Some(untidy) => Some((untidy, Mode::Compact)),
            None => advice::choose(advisor, dir, &idle)
                .map(|(victim, choice)| (victim, Mode::Advised(choice))),
        };
        Some(advised.unwrap_or(found))
    }

    fn free(
        &self,
        dir: &Directory,
        victim: &Arc<Segment>,
        mode: Mode,
        advisor: Option<Arc<dyn Advisor>>,
        moves: bool,
    ) -> Result<()> {
        let mut waited = Duration::ZERO;
        while victim.pending.load(Relaxed) > 0 {
            if waited >= PENDING_WAIT {
                return Err(Error::busy(format!(
                    "cache directory {}: a write is slow",
                    dir.path.display()
                )));
            }
            sleep(Duration::from_millis(1));
            waited += Duration::from_millis(1);
        }
        // From the first dropped entry until the file is gone, its records are not in the index,
        // but a restart would find them.
        if !victim.emptying.swap(true, Relaxed) {
            dir.ghosts.fetch_add(1, Relaxed);
        }
        if victim.live_records.load(Relaxed) > 0 || victim.tombstone_bytes.load(Relaxed) > 0 {
            let second_round = if moves {
                victim.end.load(Relaxed) / 2
            } else {
                0
            };
            let nothing_older = Self::nothing_older(dir, victim);
            self.empty(
                dir,
                Victim {
                    segment: victim,
                    mode,
                    advisor,
                    nothing_older,
                    second_round,
                    pins_moved_to: BTreeMap::new(),
                },
            )?;
        }
        dir.disk
            .delete(&victim.path)
            .or_else(|e| {
                if e.kind() == std::io::ErrorKind::NotFound {
                    Ok(())
                } else {
                    Err(e)
                }
            })
            .map_err(|e| {
                dir.write_failed(e, self.now()).context(format!(
                    "segment {} could not be deleted",
                    victim.path.display()
                ))
            })?;
        {
            let mut state = dir.state.lock();
            state.segments.remove(&victim.ordinal);
            state.used -= victim.end.load(Relaxed);
        }
        dir.held_bytes
            .fetch_sub(victim.held_bytes.load(Relaxed), Relaxed);
        self.segments.free(victim.slot);
        dir.ghosts.fetch_sub(1, Relaxed);
        Ok(())
    }

    /// Whether no segment older than `victim` can hold an outdated record of a name.
    fn nothing_older(dir: &Directory, victim: &Segment) -> bool {
        // One for the victim itself.
        let ghosts = dir.ghosts.load(Relaxed) > 1;
        let state = dir.state.lock();
        // A record that is being written may turn out to be outdated; once written, it is counted.
        !ghosts
            && state
                .segments
                .range(..victim.ordinal)
                .all(|(_, s)| s.pending.load(Relaxed) == 0 && s.outdated.load(Relaxed) == 0)
    }

    /// Takes every entry out of a segment: moves or drops it.
    fn empty(&self, dir: &Directory, mut victim: Victim<'_>) -> Result<()> {
        let mut failure = None;
        let names =
            victim.mode != Mode::Compact && (!self.pins.is_empty() || victim.advisor.is_some());
        let segment = victim.segment;
        let walk = segment.scan(0, names, &mut |offset, header, name, meta| {
            let result = match header.kind {
                Kind::Tombstone => self.empty_tombstone(dir, &victim, offset, header),
                _ => self.empty_record(dir, &mut victim, offset, header, name, meta),
            };
            match result {
                Ok(()) => ControlFlow::Continue(()),
                Err(e) => {
                    failure = Some(e);
                    ControlFlow::Break(())
                }
            }
        });
        // Each of these pins was durable in the file that goes. They are synced even if emptying it
        // failed: the next attempt does not find them there any more.
        for moved_to in victim.pins_moved_to.values() {
            if let Err(e) = self.sync_segment(dir, moved_to) {
                tracing::warn!(dir = %dir.path.display(), error = %e.describe(), "pins that were moved \
                    here may not outlive a loss of power");
            }
        }
        if let Some(e) = failure {
            return Err(e);
        }
        if let Err(e) = walk {
            dir.counters.read_failures.fetch_add(1, Relaxed);
            tracing::warn!(file = %segment.path.display(), error = %e, "a segment cannot be \
                read; what it holds is dropped");
        }
        if segment.live_records.load(Relaxed) > 0 {
            self.sweep(dir, segment, victim.mode);
        }
        Ok(())
    }

    fn empty_record(
        &self,
        dir: &Directory,
        victim: &mut Victim<'_>,
        offset: u64,
        header: &Header,
        name: &[u8],
        meta: &[u8],
    ) -> Result<()> {
        let mode = victim.mode;
        let at_victim = || {
            self.index
                .peek(header.key)
                .filter(|e| e.is_at(victim.segment.slot, offset))
        };
        let Some(mut entry) = at_victim() else {
            return Ok(());
        };
        let mut waited = Duration::ZERO;
        while !mode.is_of_oldest() && entry.has(SUPERSEDED) {
            // Its successor is being written. Dropping this one before that has succeeded could
            // bring back an older one after a crash.
            if waited >= PENDING_WAIT {
                return Err(Error::busy(format!(
                    "cache directory {}: a write is slow",
                    dir.path.display()
                )));
            }
            sleep(Duration::from_millis(1));
            waited += Duration::from_millis(1);
            match at_victim() {
                Some(e) => entry = e,
                None => return Ok(()),
            }
        }
        let len = padded(header.len());
        let held = entry.has(PIN) || entry.has(PINNED) || self.is_held(dir, header, name);
        let next_use = |advisor: &Arc<dyn Advisor>| {
            let of = (header.kind, header.key, header.version);
            advice::cached_of(&dir.salts, of.0, of.1, of.2, name, meta)
                .map_or(NextUse::Unknown, |cached| advisor.next_use(&cached))
        };
        let again = victim.second_round >= len
            && match (mode, &victim.advisor) {
                (Mode::Advised(choice), Some(advisor)) => choice.keeps(next_use(advisor), &entry),
                (Mode::Clock, Some(advisor)) => {
                    entry.has(VISITED) && next_use(advisor) != NextUse::Never
                }
                _ => entry.has(VISITED),
            };
        if mode == Mode::Compact || held || again {
            match self.relocate(dir, victim.segment, offset, header, held, (name, meta)) {
                Ok(true) => {
                    if !held {
                        victim.second_round = victim.second_round.saturating_sub(len);
                    }
                    if entry.has(PIN)
                        && let Some(moved) = self.index.peek(header.key)
                        && let Some(moved_to) = self.segments.get(moved.slot())
                    {
                        victim.pins_moved_to.insert(moved_to.ordinal, moved_to);
                    }
                    return Ok(());
                }
                Ok(false) => {}
                // A record that only had a second round can go instead.
                Err(e) if held || mode == Mode::Compact => return Err(e),
                Err(_) => {}
            }
        }
        if self
            .forget(header.key, |e| e.is_at(victim.segment.slot, offset))
            .is_some()
        {
            dir.counters.evicted_records.fetch_add(1, Relaxed);
            dir.counters.evicted_bytes.fetch_add(len, Relaxed);
            if !mode.is_of_oldest()
                && Self::is_named(&entry)
                && !victim.nothing_older
                // With its own number: if the file survives this, the record is still current.
                && let Err(e) = self.write_tombstone(dir, header.key, "", "", Some(header.seq), Class::Relocation, |_| {})
            {
                self.distrust(dir, &e);
            }
        }
        Ok(())
    }

    fn is_held(&self, dir: &Directory, header: &Header, name: &[u8]) -> bool {
        header.kind == Kind::Part
            && header.flags & FLAG_UNHELD == 0
            && (header.flags & FLAG_DERIVED == 0 || dir.holds_derived())
            && split_name(name).is_some_and(|(bucket, key)| {
                self.pins
                    .holds(forebay_core::name::hash_name(bucket, key), header.version)
            })
    }

    fn empty_tombstone(
        &self,
        dir: &Directory,
        victim: &Victim<'_>,
        offset: u64,
        header: &Header,
    ) -> Result<()> {
        // A failed attempt has already moved some; these are not moved again: otherwise each
        // attempt would cost the same room, until none is left.
        let moved = offset < victim.segment.tombstones_moved_to.load(Relaxed);
        let needed = !victim.mode.is_of_oldest() && !victim.nothing_older && !moved && {
            // A newer record of the key in the same log does the tombstone's work.
            let newer = self
                .index
                .peek(header.key)
                .filter(|e| e.seq > header.seq)
                .and_then(|e| self.segments.get(e.slot()));
            newer.is_none_or(|s| s.dir != dir.index)
        };
        if needed {
            match self.relocate(dir, victim.segment, offset, header, false, (&[], &[])) {
                // It cannot be kept, and the segment must go.
                Err(e) if victim.mode == Mode::Drop => self.distrust(dir, &e),
                moved => {
                    moved?;
                }
            }
            victim
                .segment
                .tombstones_moved_to
                .store(offset + padded(header.len()), Relaxed);
        }
        Ok(())
    }

    /// Copies a record to the end of the log under its old number. `false`: it is outdated or
    /// damaged.
    fn relocate(
        &self,
        dir: &Directory,
        victim: &Arc<Segment>,
        offset: u64,
        header: &Header,
        held: bool,
        (name, meta): (&[u8], &[u8]),
    ) -> Result<bool> {
        if !dir.may_write(self.now(), self.retry_after_secs()) {
            return Err(Self::resting(dir));
        }
        let tombstone = header.kind == Kind::Tombstone;
        let mut bytes = Vec::new();
        let read = victim
            .file
            .read_append(&mut bytes, header.len() as usize, offset);
        if read.is_err() || !header.body_is_whole(&bytes) {
            let failures = match read {
                Err(_) => &dir.counters.read_failures,
                Ok(()) => &dir.counters.checksum_failures,
            };
            failures.fetch_add(1, Relaxed);
            if let Some(entry) = self.forget(header.key, |e| e.is_at(victim.slot, offset))
                && Self::is_named(&entry)
                && let Err(e) =
                    self.write_tombstone(dir, header.key, "", "", None, Class::Relocation, |_| {})
            {
                self.distrust(dir, &e);
            }
            return Ok(false);
        }
        let len = padded(header.len());
        if !dir.try_claim(len, Class::Relocation) {
            return Err(dir.full_error(len));
        }
        let mut current = true;
        let mut header = *header;
        let placed = self.place(dir, len, || {
            let mut shard = self.index.shard(header.key);
            if !tombstone {
                match shard.get(header.key) {
                    Some(e) if e.is_at(victim.slot, offset) && !e.has(SUPERSEDED) => {
                        header.validated_at = e.validated_at
                    }
                    _ => {
                        current = false;
                        return Some(None);
                    }
                }
            }
            let placed = dir.place(len, || header.seq)?;
            if tombstone {
                placed.segment.tombstone_bytes.fetch_add(len, Relaxed);
            }
            Some(Some(placed))
        })?;
        let Some(placed) = placed else {
            assert!(!current, "a record that is no longer current was not kept");
            dir.unclaim(len);
            return Ok(false);
        };
        bytes[..crate::record::HEADER_BYTES]
            .copy_from_slice(&header.encode(placed.segment.place(placed.offset)));
        let written = placed
            .segment
            .file
            .write_all_at(&[&bytes], placed.offset)
            .map_err(|e| self.write_failed(dir, &placed, e));
        if written.is_ok() {
            dir.counters.relocated_bytes.fetch_add(len, Relaxed);
            if !tombstone {
                let mut shard = self.index.shard(header.key);
                if let Some(e) = shard
                    .get(header.key)
                    .filter(|e| e.is_at(victim.slot, offset))
                {
                    e.move_to(placed.segment.slot, placed.offset);
                    e.clear(VISITED);
                    victim.sub_live(len);
                    placed.segment.add_live(len);
                    if held {
                        placed.segment.held_bytes.fetch_add(len, Relaxed);
                        dir.held_bytes.fetch_add(len, Relaxed);
                    }
                } else if header.kind != Kind::Part {
                    // It was replaced or removed while it was being copied.
                    placed.segment.outdated.fetch_add(1, Relaxed);
                }
                drop(shard);
                if let Some(cached) = advice::cached_of(
                    &dir.salts,
                    header.kind,
                    header.key,
                    header.version,
                    name,
                    meta,
                )
                .filter(|_| !name.is_empty())
                {
                    placed.segment.samples.lock().note(
                        cached,
                        len,
                        header.seq ^ placed.segment.ordinal,
                    );
                }
            }
        }
        dir.finish(&placed);
        written.map(|()| true)
    }

    /// Drops the entries of a segment that could not be read to its end.
    fn sweep(&self, dir: &Directory, victim: &Arc<Segment>, mode: Mode) {
        let mut named = Vec::new();
        for mut shard in self.index.shards() {
            shard.retain(|e| {
                let keep = e.slot() != victim.slot;
                if !keep {
                    victim.sub_live(e.padded());
                    dir.counters.evicted_records.fetch_add(1, Relaxed);
                    dir.counters.evicted_bytes.fetch_add(e.padded(), Relaxed);
                    if !mode.is_of_oldest() && Self::is_named(e) {
                        named.push(e.key());
                    }
                }
                keep
            });
        }
        // Older segments stay: their records of these keys must not be taken for current.
        for key in named {
            if let Err(e) = self.write_tombstone(dir, key, "", "", None, Class::Relocation, |_| {})
            {
                self.distrust(dir, &e);
            }
        }
    }
}
