//! Eviction that knows what is coming: an [`Advisor`] says when each entry is wanted next, and the
//! entries wanted last go first.
//!
//! The log frees space by whole segments, so the question is which segment to empty. The store
//! remembers a few entries of each segment as *samples* (at most [`SAMPLES`], drawn evenly from all
//! that were appended). When room is needed, the advisor is asked about the samples of some
//! segments (the youngest, which hold what was read once, and a few others in turn), and its
//! answers are kept for the next time.
//!
//! - A segment goes first if no plan mentions at least half of it, or has any more use for it; of
//!   these, the oldest. Within it the rule is that of a store without advice.
//! - Otherwise the segment goes that holds the least of what is wanted *in this round*, that is,
//!   before each plan's present epoch ends. Entries wanted only in a later round are let go freely:
//!   each entry is used once in a round, so the amount held when a round begins decides how much of
//!   it is found, whichever entries these are. Exchanging one for another would only cost writes.
//! - Entries that are kept for others than plans ([`NextUse::Owned`]) count as wanted when a segment
//!   is looked for that goes first, and move to the end of the log when it goes. If there is none,
//!   and no plan wants anything, the oldest segment goes as without advice, but for entries that
//!   are [`NextUse::Never`] wanted: those are dropped even if they were read.
//! - If (nearly) everything is wanted in this round, the fifth that is wanted last counts as not
//!   wanted.
//! - When a segment goes, its wanted entries move to the end of the log, up to half of the segment:
//!   so each pass makes progress, and at most one byte is moved for each byte that is written.
//!
//! Advice is soft: none of it is on disk, and wrong advice about an entry costs a miss at worst.
//! Without an advisor, or while it knows no plan, nothing here is used. Only the evictor asks it,
//! never a read.

use crate::{
    dir::Directory,
    index::{Entry, VISITED},
    key::{Part, part_key},
    record::{Kind, split_name},
    segment::Segment,
    sources::Salts,
    sync::{Mutex, atomic::Ordering::Relaxed},
};
use forebay_core::VersionId;
use std::{ops::ControlFlow, sync::Arc};

/// What an advisor is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cached {
    /// The hash of the bucket's name ([`forebay_core::name::hash_bucket`]).
    pub bucket: u64,
    /// The hash of the object's name ([`forebay_core::ObjectName::hash128`]).
    pub name: u128,
    /// The version that the entry's bytes belong to.
    pub version: VersionId,
    /// `None`: the head, which holds the bytes of a small object.
    pub part: Option<Part>,
}

/// When an entry is wanted next. Distances are in bytes that will be read before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextUse {
    /// No plan mentions it.
    Unknown,
    /// No plan mentions it, but it is to be kept before what is [`NextUse::Never`] wanted.
    Owned,
    /// It goes first: plans do not want it any more, or others have it.
    Never,
    /// Before the present epoch of some plan ends.
    ThisRound(u64),
    /// In a later epoch of the plan that wants it first.
    LaterRound(u64),
}

/// Says when entries are wanted. Called by whoever evicts, with no lock held that a read or a write
/// waits for.
pub trait Advisor: Send + Sync {
    /// Whether any plan is followed. While it is `false`, eviction is as without an advisor.
    fn is_active(&self) -> bool;
    /// Changes whenever plans come or go: what was said before then no longer counts.
    fn generation(&self) -> u64;
    /// When an entry is wanted next, by the plan that wants it first.
    fn next_use(&self, entry: &Cached) -> NextUse;
    /// The same for an entry that others ask this node for: by all that read a plan, also elsewhere.
    fn next_use_by_all(&self, entry: &Cached) -> NextUse {
        self.next_use(entry)
    }
}

const SAMPLES: usize = 32;
/// Segments whose samples are asked about anew for one victim: this many of the youngest, and
/// others in turn.
const ASKED_YOUNGEST: usize = 4;
const ASKED_IN_TURN: usize = 8;
/// Segments about which nothing is known yet and that are asked about for one victim.
const ASKED_UNKNOWN: usize = 16;
/// One in this many parts counts as not wanted, even if all is wanted in this round.
const FAR_SHARE: u64 = 5;
/// Tombstones may take this share of a directory before the evictor tidies away the old records
/// that need them.
const TOMBSTONE_SHARE: u64 = 64;

/// Some of a segment's entries, and what the advisor last said about them.
#[derive(Default)]
pub struct Samples {
    seen: u64,
    entries: Vec<(Cached, u32)>,
    said: Option<Said>,
}

struct Said {
    generation: u64,
    of: Vec<(NextUse, u64)>,
}

impl Samples {
    /// Remembers an entry, or one in so many, so that all have the same chance. `chance` is any
    /// number that differs for each.
    pub fn note(&mut self, entry: Cached, bytes: u64, chance: u64) {
        self.seen += 1;
        let bytes = bytes.min(u32::MAX as u64) as u32;
        if self.entries.len() < SAMPLES {
            self.entries.push((entry, bytes));
        } else {
            let at = chance
                .wrapping_mul(0x9E37_79B9_7F4A_7C15)
                .rotate_left(31)
                .wrapping_mul(0xD6E8_FEB8_6659_FD93)
                % self.seen;
            if let Some(place) = self.entries.get_mut(at as usize) {
                *place = (entry, bytes);
            }
        }
        self.said = None;
    }
}

/// How a segment is to be emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// What this round wants within this many bytes moves on.
    pub near: u64,
    /// So does what is wanted later, or owned: enough of the segment is wanted by nobody.
    pub keep_later: bool,
}

impl Choice {
    pub fn keeps(&self, next: NextUse, entry: &Entry) -> bool {
        match next {
            NextUse::Unknown => entry.has(VISITED),
            NextUse::Owned => self.keep_later || entry.has(VISITED),
            NextUse::Never => false,
            NextUse::ThisRound(d) => d <= self.near,
            NextUse::LaterRound(_) => self.keep_later,
        }
    }
}

/// How an advisor knows a record. `None`: it cannot know the record, such as one of an origin that
/// its bucket had before.
pub fn cached_of(
    salts: &Salts,
    kind: Kind,
    key: u128,
    version: u64,
    name: &[u8],
    meta: &[u8],
) -> Option<Cached> {
    let version = VersionId(version);
    let part = match kind {
        Kind::Head => None,
        Kind::Part => Some(Part::decode(meta)?),
        Kind::Tombstone | Kind::Pin => return None,
    };
    let (bucket, object_key) = split_name(name)?;
    let name = forebay_core::name::hash_name(bucket, object_key);
    let head = salts.head_key(bucket, name);
    let current = part.map_or(head, |part| part_key(head, version, part));
    (current == key).then_some(Cached {
        bucket: forebay_core::name::hash_bucket(bucket),
        name,
        version,
        part,
    })
}

/// The segment that should go, one of `sealed` (oldest first; none of them has a write under way),
/// and how. `cursor` goes round.
pub fn choose(
    advisor: &dyn Advisor,
    dir: &Directory,
    sealed: &[Arc<Segment>],
) -> Option<(Arc<Segment>, Choice)> {
    if sealed.is_empty() {
        return None;
    }
    let generation = advisor.generation();
    ask(advisor, generation, dir, sealed);
    let mut estimates = Vec::with_capacity(sealed.len());
    let mut near = Quantile::default();
    for segment in sealed {
        let samples = segment.samples.lock();
        let Some(said) = samples.said.as_ref().filter(|s| s.generation == generation) else {
            continue;
        };
        said.of
            .iter()
            .for_each(|(next, bytes)| near.add(*next, *bytes));
        estimates.push((segment, said.of.clone()));
    }
    let near = near.near();
    let unwanted = estimates.iter().find(|(segment, said)| {
        let of = |f: fn(&NextUse) -> bool| {
            said.iter()
                .filter(|(n, _)| f(n))
                .map(|(_, b)| *b)
                .sum::<u64>()
        };
        let (all, wanted) = (
            of(|_| true),
            of(|n| !matches!(n, NextUse::Unknown | NextUse::Never)),
        );
        all == 0
            || (segment.live_bytes.load(Relaxed) as f64) * (wanted as f64 / all as f64) * 2.0
                <= segment.end.load(Relaxed) as f64
    });
    if let Some((segment, _)) = unwanted {
        return Some((
            (*segment).clone(),
            Choice {
                near: u64::MAX,
                keep_later: true,
            },
        ));
    }
    let planned = |n: &NextUse| matches!(n, NextUse::ThisRound(_) | NextUse::LaterRound(_));
    if !estimates
        .iter()
        .any(|(_, said)| said.iter().any(|(n, _)| planned(n)))
    {
        return None;
    }
    let choice = Choice {
        near,
        keep_later: false,
    };
    let best = estimates
        .iter()
        .map(|(segment, said)| (segment, burden(said, segment, near)))
        .min_by_key(|(_, b)| *b);
    best.map(|(segment, _)| ((*segment).clone(), choice))
}

/// What emptying a segment costs: how many sixteenths of it must move. Among equals, the segment
/// that is wanted last comes first.
fn burden(said: &[(NextUse, u64)], segment: &Segment, near: u64) -> (u64, std::cmp::Reverse<u64>) {
    let (mut all, mut moved, mut distance) = (0u64, 0u64, 0u128);
    for (next, bytes) in said {
        all += bytes;
        let d = match next {
            NextUse::ThisRound(d) => {
                if *d <= near {
                    moved += bytes;
                }
                *d
            }
            NextUse::LaterRound(d) => *d,
            NextUse::Unknown | NextUse::Owned | NextUse::Never => u64::MAX >> 8,
        };
        distance += u128::from(d) * u128::from(*bytes);
    }
    let live = segment.live_bytes.load(Relaxed) as f64 / segment.end.load(Relaxed).max(1) as f64;
    let share = moved as f64 / all.max(1) as f64 * live;
    (
        (share * 16.0) as u64,
        std::cmp::Reverse((distance / u128::from(all.max(1))) as u64),
    )
}

/// Asks about the samples of some segments.
fn ask(advisor: &dyn Advisor, generation: u64, dir: &Directory, sealed: &[Arc<Segment>]) {
    let known = |s: &Segment| {
        s.samples
            .lock()
            .said
            .as_ref()
            .is_some_and(|said| said.generation == generation)
    };
    let unknown = sealed.iter().filter(|s| !known(s)).take(ASKED_UNKNOWN);
    let from = dir.asked_in_turn.fetch_add(ASKED_IN_TURN as u64, Relaxed) as usize;
    let in_turn = (0..ASKED_IN_TURN.min(sealed.len())).map(|i| &sealed[(from + i) % sealed.len()]);
    let mut asked: Vec<&Arc<Segment>> = unknown
        .chain(in_turn)
        .chain(sealed.iter().rev().take(ASKED_YOUNGEST))
        .collect();
    asked.sort_by_key(|s| s.ordinal);
    asked.dedup_by_key(|s| s.ordinal);
    for segment in asked {
        let mut entries = segment.samples.lock().entries.clone();
        if entries.is_empty() {
            // From before the restart, or before there was an advisor: its first entries represent
            // all.
            entries = first_entries(&dir.salts, segment);
        }
        let of: Vec<_> = entries
            .iter()
            .map(|(entry, bytes)| (advisor.next_use(entry), u64::from(*bytes)))
            .collect();
        let mut samples = segment.samples.lock();
        if samples.entries.is_empty() {
            samples.seen = entries.len() as u64;
            samples.entries = entries;
        }
        samples.said = Some(Said { generation, of });
    }
}

fn first_entries(salts: &Salts, segment: &Segment) -> Vec<(Cached, u32)> {
    let mut entries = Vec::new();
    let walk = segment.scan(0, true, &mut |_, header, name, meta| {
        entries.extend(
            cached_of(salts, header.kind, header.key, header.version, name, meta)
                .map(|c| (c, header.len() as u32)),
        );
        if entries.len() < SAMPLES {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    });
    if let Err(e) = walk {
        tracing::debug!(file = %segment.path.display(), error = %e, "what lies in a segment \
            could not be seen");
    }
    entries
}

/// The distance at which the farthest part of what this round wants begins.
#[derive(Default)]
struct Quantile {
    bytes: u64,
    free: u64,
    distances: Vec<(u64, u64)>,
}

impl Quantile {
    fn add(&mut self, next: NextUse, bytes: u64) {
        self.bytes += bytes;
        match next {
            NextUse::ThisRound(d) => self.distances.push((d, bytes)),
            _ => self.free += bytes,
        }
    }

    fn near(mut self) -> u64 {
        let mut missing = (self.bytes / FAR_SHARE).saturating_sub(self.free);
        self.distances.sort_unstable();
        let mut near = u64::MAX;
        while missing > 0
            && let Some((d, bytes)) = self.distances.pop()
        {
            near = d.saturating_sub(1);
            missing = missing.saturating_sub(bytes);
        }
        near
    }
}

/// If tombstones take too much: a segment with old records of names that live on elsewhere, or with
/// tombstones.
pub fn untidy(dir: &Directory, sealed: &[Arc<Segment>]) -> Option<Arc<Segment>> {
    let tombstones = |s: &Segment| s.tombstone_bytes.load(Relaxed);
    if sealed.iter().map(|s| tombstones(s)).sum::<u64>() <= dir.capacity / TOMBSTONE_SHARE {
        return None;
    }
    let outdated = sealed.iter().find(|s| s.outdated.load(Relaxed) > 0);
    outdated
        .or_else(|| sealed.iter().max_by_key(|s| tombstones(s)))
        .cloned()
}

/// Where a segment keeps its samples.
pub type Sampled = Mutex<Samples>;
