//! Units that many nodes want at once ([ADR
//! 31](../../../docs/adr/0031-hot-units-say-so-themselves.md)).
//!
//! A node counts what it sends of each unit ([`Heat`]). If that is much within a few seconds, its
//! answers say so. Whoever is told ([`Hot`]) keeps what it gets of the unit as if it were to keep a
//! copy, for a while, and asks the unit's two owners in turn for what it still lacks.
//!
//! Invariants: what is counted takes the same memory whatever is asked for; counting too much, where
//! units share a cell, costs a copy and nothing else. A node holds copies of hot units for at most
//! an eighth of its cache, and never longer than [`HOLD`] after it was told last.

use forebay_cluster::{EXTENT_BYTES, Unit};
use forebay_core::sync::RwLock;
use hashbrown::HashMap;
use std::{
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

/// What was sent is counted for so long, then from nothing again.
const WINDOW: Duration = Duration::from_secs(4);
/// A unit is hot if all of it, as far as there is an object, was sent so often in a window, ...
const TIMES: u64 = 8;
/// ... and if that was so much, with [`ANSWER_KIB`] for each answer.
const HOT_KIB: u64 = 4096;
/// An answer costs about as much as so many bytes in it.
const ANSWER_KIB: u64 = 16;
/// Copies are held for so long after an answer that said it.
pub(crate) const HOLD: Duration = Duration::from_secs(30);
/// At most so many units are held as hot.
const UNITS_MAX: u64 = 256;
/// Cells in each row.
const CELLS: usize = 1 << 13;

/// What was sent of units within the last seconds, by two hashes: the lesser count is believed.
pub(crate) struct Heat {
    /// A number of the window u16, answers u16, KiB u32.
    rows: [Box<[AtomicU64]>; 2],
    /// Answers with bytes of hot units.
    answers: AtomicU64,
}

impl Default for Heat {
    fn default() -> Self {
        let row = || (0..CELLS).map(|_| AtomicU64::new(0)).collect();
        Heat {
            rows: [row(), row()],
            answers: AtomicU64::new(0),
        }
    }
}

impl Heat {
    /// `bytes` of a unit are sent, which has `all` bytes; whether it is hot.
    pub fn sends(&self, unit: &Unit, all: u64, bytes: u64, now: Duration) -> bool {
        let window = (now.as_secs() / WINDOW.as_secs()) as u16;
        let hash = |shift: u32| {
            let name = (unit.name >> shift) as u64;
            let mixed = (name ^ u64::from(unit.extent)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed >> 40) as usize % CELLS
        };
        let first = count(&self.rows[0][hash(0)], window, bytes);
        let second = count(&self.rows[1][hash(64)], window, bytes);
        let (answers, kib) = (first.0.min(second.0), first.1.min(second.1));
        let is_hot = kib * 1024 >= TIMES * all.max(1024) && kib + ANSWER_KIB * answers >= HOT_KIB;
        if is_hot {
            self.answers.fetch_add(1, Relaxed);
        }
        is_hot
    }

    pub fn answers(&self) -> u64 {
        self.answers.load(Relaxed)
    }
}

/// Counts one more answer of this window; how many there were, and how many KiB.
fn count(cell: &AtomicU64, window: u16, bytes: u64) -> (u64, u64) {
    let more = |now: u64| {
        let (answers, kib) = match (now >> 48) as u16 == window {
            true => ((now >> 32) & 0xffff, now & 0xffff_ffff),
            false => (0, 0),
        };
        let answers = (answers + 1).min(0xffff);
        let kib = kib
            .saturating_add(bytes.div_ceil(1024).max(1))
            .min(0xffff_ffff);
        (answers, kib)
    };
    let packed = |(answers, kib): (u64, u64)| u64::from(window) << 48 | answers << 32 | kib;
    let before = cell
        .fetch_update(Relaxed, Relaxed, |now| Some(packed(more(now))))
        .unwrap_or_default();
    more(before)
}

/// Units of others that are hot, as their owners say.
pub(crate) struct Hot {
    /// Until when.
    units: RwLock<HashMap<Unit, Duration>>,
    /// Whether there is any, so that reads need no lock.
    any: AtomicBool,
    turn: AtomicUsize,
}

impl Hot {
    /// For the node with this id: half of all nodes begin with the second owner.
    pub fn new(me: u64) -> Hot {
        Hot {
            units: RwLock::default(),
            any: AtomicBool::new(false),
            turn: AtomicUsize::new(me as usize),
        }
    }

    /// A unit is hot; this node's cache has so many bytes. Returns whether it was unknown.
    pub fn learn(&self, unit: Unit, cache_bytes: u64, now: Duration) -> bool {
        let most = (cache_bytes / 8 / EXTENT_BYTES).clamp(1, UNITS_MAX) as usize;
        let mut units = self.units.write();
        if let Some(until) = units.get_mut(&unit) {
            *until = now + HOLD;
            return false;
        }
        if units.len() >= most {
            return false;
        }
        units.insert(unit, now + HOLD);
        self.any.store(true, Relaxed);
        true
    }

    pub fn has(&self, unit: &Unit) -> bool {
        self.any.load(Relaxed) && self.units.read().contains_key(unit)
    }

    /// Forgets those whose time is over; whether there were any.
    pub fn cool(&self, now: Duration) -> bool {
        if !self.any.load(Relaxed) {
            return false;
        }
        let mut units = self.units.write();
        let before = units.len();
        units.retain(|_, until| *until > now);
        self.any.store(!units.is_empty(), Relaxed);
        units.len() < before
    }

    pub fn len(&self) -> usize {
        match self.any.load(Relaxed) {
            true => self.units.read().len(),
            false => 0,
        }
    }

    /// Whether it is the second owner's turn.
    pub fn is_seconds_turn(&self) -> bool {
        self.turn.fetch_add(1, Relaxed) % 2 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn unit(n: u32) -> Unit {
        let name = u128::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        Unit { name, extent: 0 }
    }

    /// How many answers of so many bytes, of a unit of `all`, come before one that says it is hot.
    fn answers_before(all: u64, bytes: u64) -> usize {
        let heat = Heat::default();
        let now = Duration::from_secs(100);
        (0..)
            .take_while(|_| !heat.sends(&unit(7), all, bytes, now))
            .count()
    }

    #[test]
    fn a_unit_is_hot_when_all_of_it_was_sent_eight_times_and_that_is_much() {
        assert_eq!(answers_before(8 * MIB, 8 * MIB), 7);
        assert_eq!(answers_before(8 * MIB, MIB), 63);
        // Parts of a large unit: each may be wanted once.
        assert_eq!(answers_before(8 * MIB, 100 << 10), 655);
        // Of small objects it takes many answers.
        assert_eq!(answers_before(100 << 10, 100 << 10), 35);
        assert_eq!(answers_before(10 << 10, 10 << 10), 157);
        assert_eq!(answers_before(0, 0), 240);
    }

    #[test]
    fn what_is_read_once_is_not_hot_and_what_was_sent_long_ago_is_not_counted() {
        let heat = Heat::default();
        for n in 0..2000 {
            let now = Duration::from_millis(n * 20);
            for part in 0..8 {
                assert!(
                    !heat.sends(&unit(n as u32), 8 * MIB, MIB, now),
                    "{n} {part}"
                );
            }
        }
        for second in 0..400 {
            let now = Duration::from_secs(1000 + second);
            assert!(!heat.sends(&unit(1), 8 * MIB, 8 * MIB, now));
        }
        assert_eq!(heat.answers(), 0);
        // The windows' numbers go round.
        for round in 0..3 {
            let now = WINDOW * 0xffff + WINDOW * round;
            let hot = (0..9).filter(|_| heat.sends(&unit(1), MIB, MIB, now));
            assert_eq!(hot.count(), 2);
        }
    }

    #[test]
    fn counts_end_at_their_limits() {
        let heat = Heat::default();
        for _ in 0..70_000 {
            heat.sends(&unit(1), u64::MAX / 16, 1 << 40, Duration::ZERO);
        }
        assert!(!heat.sends(&unit(1), u64::MAX / 16, u64::MAX, Duration::ZERO));
        assert!(heat.sends(&unit(1), MIB, 0, Duration::ZERO));
    }

    #[test]
    fn few_units_are_held_for_as_long_as_they_are_hot() {
        let hot = Hot::new(1);
        let at = Duration::from_secs;
        let cache = 8 * 3 * EXTENT_BYTES;
        for n in 0..3 {
            assert!(hot.learn(unit(n), cache, at(u64::from(n))));
        }
        assert!(!hot.learn(unit(3), cache, at(3)), "an eighth of the cache");
        assert!(!hot.has(&unit(3)));
        assert!(!hot.learn(unit(0), cache, at(20)), "it is known");
        assert!(!hot.cool(at(30)));
        assert!(hot.cool(at(31)));
        assert_eq!(
            (hot.has(&unit(0)), hot.has(&unit(1)), hot.has(&unit(2))),
            (true, false, true)
        );
        assert!(hot.learn(unit(3), cache, at(31)));
        assert!(hot.cool(at(61)));
        assert_eq!(hot.len(), 0);
        assert!(!hot.has(&unit(3)));
        assert!(hot.learn(unit(3), 0, at(70)), "at least one");
        assert!(!hot.learn(unit(4), 0, at(70)));
    }
}
