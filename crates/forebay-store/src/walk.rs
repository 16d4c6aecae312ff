//! A pass over what is cached, for those who want much of it: what another node is to have.
//!
//! The records are found by their headers, segment by segment: the newest first, because what was
//! read lately was written or moved lately. Nothing is changed by it, and nothing counts as used.
//!
//! A pass takes many steps, each of bounded work; where the next one begins is in [`Walk`], which
//! may be kept anywhere. What was appended or moved since a pass began is behind it: so another,
//! short one follows, up to [`PASSES_MAX`]. A record that is being written when its turn comes is
//! behind the pass too. What the evictor moves during the last one, and what is written then, is for
//! a later walk ([`Step::again`]).
//!
//! Invariant: an entry is given only if the index says that its record is the current one.

use crate::{
    advice::{Cached, cached_of},
    codec,
    key::{Part, part_key},
    read::Miss,
    record::{Kind, padded, split_name},
    segment::Segment,
    store::Store,
    sync::atomic::Ordering::Relaxed,
};
use bytes::Bytes;
use forebay_core::{ObjectMeta, ObjectName, VersionId};
use serde::{Deserialize, Serialize};
use std::{cmp::Reverse, ops::ControlFlow, sync::Arc};

/// After so many passes, what is still new is left out.
const PASSES_MAX: u8 = 3;
/// Records whose headers one step looks at.
const STEP_RECORDS: u64 = 16 << 10;
/// Bytes that one step reads to find them.
const STEP_READ_BYTES: u64 = 16 << 20;
/// Of a large record only the beginning is read.
const LARGE_BYTES: u64 = 128 << 10;
const LARGE_READ_BYTES: u64 = 2 << 10;

/// The end of the log at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    /// Segments from this number on are newer.
    next: u64,
    /// Segments that were not full: their numbers, and their lengths.
    open: Vec<(u64, u64)>,
}

impl Mark {
    /// How much of a segment lies before it.
    fn end_of(&self, ordinal: u64) -> u64 {
        let open = self.open.iter().find(|(open, _)| *open == ordinal);
        match open {
            _ if ordinal >= self.next => 0,
            Some((_, end)) => *end,
            None => u64::MAX,
        }
    }
}

/// Where the next step of a pass begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Walk {
    pass: u8,
    /// What lies before this was passed by the passes before.
    since: Mark,
    /// What lies behind this is for the next one.
    until: Mark,
    /// In this segment from this byte on, and then in older ones.
    at: (u64, u64),
}

impl Walk {
    fn first(until: Mark) -> Self {
        Walk {
            pass: 1,
            since: Mark::default(),
            until,
            at: (u64::MAX, 0),
        }
    }

    /// A walk over what comes behind this one, which has ended.
    fn again(self) -> Self {
        Walk {
            pass: 0,
            since: self.until.clone(),
            until: self.until,
            at: (0, 0),
        }
    }

    /// Whether it is further than `other`. Who follows another one's walk sees by that whether it
    /// comes to an end.
    pub fn is_after(&self, other: &Walk) -> bool {
        let place = |walk: &Walk| (walk.pass, Reverse(walk.at.0), walk.at.1);
        self.pass <= PASSES_MAX && place(self) > place(other)
    }

    /// What is left of a segment.
    fn left_of(&self, segment: &Segment) -> std::ops::Range<u64> {
        let (ordinal, end) = (segment.ordinal, segment.end.load(Relaxed));
        let from = match ordinal.cmp(&self.at.0) {
            std::cmp::Ordering::Greater => u64::MAX,
            std::cmp::Ordering::Equal => self.at.1.max(self.since.end_of(ordinal)),
            std::cmp::Ordering::Less => self.since.end_of(ordinal),
        };
        let end = end.min(self.until.end_of(ordinal));
        from.min(end)..end
    }
}

/// An entry that is cached.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    /// Of the object.
    pub name: ObjectName,
    /// The version that it belongs to.
    pub version: VersionId,
    /// What it is.
    pub what: HeldAs,
}

/// What an entry is.
#[derive(Clone, Debug, PartialEq)]
pub enum HeldAs {
    /// What is known of the object, and its bytes if it is small.
    Head {
        /// What the origin said.
        meta: Arc<ObjectMeta>,
        /// When it said so; 0: it must be asked again.
        validated_at_secs: u32,
        /// The whole object.
        data: Option<Bytes>,
    },
    /// A chunk of a large one.
    Chunk {
        /// Which one.
        index: u32,
        /// All of it.
        data: Bytes,
    },
}

impl Held {
    /// The byte of the object where it begins.
    pub fn at(&self) -> u64 {
        match &self.what {
            HeldAs::Head { .. } => 0,
            HeldAs::Chunk { index, .. } => begin_of(*index),
        }
    }

    /// Bytes of the object that are in it.
    pub fn bytes(&self) -> u64 {
        match &self.what {
            HeldAs::Head { data, .. } => data.as_ref().map_or(0, Bytes::len) as u64,
            HeldAs::Chunk { data, .. } => data.len() as u64,
        }
    }
}

fn begin_of(chunk: u32) -> u64 {
    u64::from(chunk) * forebay_core::limits::CHUNK_BYTES
}

/// What one step found.
#[derive(Debug, Default)]
pub struct Step {
    /// Entries that are wanted, in the order of the walk.
    pub found: Vec<Held>,
    /// Where the next step begins; `None`: this was the last one.
    pub next: Option<Walk>,
    /// After the last step: where a later walk begins, to find what was written since. It is of this
    /// store as long as that is open.
    pub again: Option<Walk>,
    /// Records that were looked at.
    pub records: u64,
    /// Bytes that were read for it, besides those of `found`.
    pub read_bytes: u64,
    /// Bytes of the log that are left.
    pub left_bytes: u64,
}

impl Store {
    /// The next step of a walk, which begins with `None`. `wanted` is asked about the hash of a name
    /// and a byte of the object. Heads and chunks are given, of which the records have `bytes`
    /// together, or one record more than that; not what is derived from objects. May wait for a disk.
    pub fn walk(&self, from: Option<Walk>, bytes: u64, wanted: &dyn Fn(u128, u64) -> bool) -> Step {
        let wanted = |entry: &Cached, at: u64| wanted(entry.name, at);
        let (mut step, chosen) = self.pass(from, bytes, u64::MAX, &wanted);
        let found = chosen.into_iter();
        step.found = found
            .filter_map(|(name, entry, _)| self.held(name, &entry))
            .collect();
        step
    }

    /// The same, but says only which entries there are, each with the bytes of its record, until
    /// there are so many. `wanted` is asked about an entry and where it begins.
    pub fn walk_over(
        &self,
        from: Option<Walk>,
        entries: u64,
        wanted: &dyn Fn(&Cached, u64) -> bool,
    ) -> (Step, Vec<(ObjectName, Cached, u64)>) {
        self.pass(from, u64::MAX, entries, wanted)
    }

    fn pass(
        &self,
        from: Option<Walk>,
        bytes: u64,
        entries: u64,
        wanted: &dyn Fn(&Cached, u64) -> bool,
    ) -> (Step, Vec<(ObjectName, Cached, u64)>) {
        let mut walk = from.unwrap_or_else(|| Walk::first(self.mark()));
        let (mut step, mut chosen) = (Step::default(), Vec::new());
        let mut found_bytes = 0;
        let is_over = loop {
            let is_full = |step: &Step, found: u64, chosen: usize| {
                found >= bytes
                    || chosen as u64 >= entries
                    || step.records >= STEP_RECORDS
                    || step.read_bytes >= STEP_READ_BYTES
            };
            if is_full(&step, found_bytes, chosen.len()) {
                break false;
            }
            let segments = self.segments();
            let next = segments
                .iter()
                .filter(|s| !walk.left_of(s).is_empty())
                .max_by_key(|s| s.ordinal);
            let Some(segment) = next else {
                let now = self.mark();
                if walk.pass == PASSES_MAX || now == walk.until {
                    break true;
                }
                walk = Walk {
                    pass: walk.pass + 1,
                    since: std::mem::replace(&mut walk.until, now.clone()),
                    until: now,
                    at: (u64::MAX, 0),
                };
                continue;
            };
            let left = walk.left_of(segment);
            let mut passed = None;
            let dir = &self.inner.dirs[segment.dir];
            let visited = segment.scan_to(left.clone(), &mut |offset, header, name, meta| {
                let length = padded(header.len());
                step.records += 1;
                step.read_bytes += match length > LARGE_BYTES {
                    true => LARGE_READ_BYTES,
                    false => length,
                };
                let is_current = || {
                    let entry = self.inner.index.peek(header.key);
                    entry.is_some_and(|e| e.is_at(segment.slot, offset))
                };
                let entry = match header.kind {
                    Kind::Head | Kind::Part if is_current() => cached_of(
                        &dir.salts,
                        header.kind,
                        header.key,
                        header.version,
                        name,
                        meta,
                    ),
                    _ => None,
                };
                if let Some(entry) = entry.filter(|entry| is_wanted(entry, wanted))
                    && let Some((bucket, key)) = split_name(name)
                    && let Ok(name) = ObjectName::new(bucket, key)
                {
                    found_bytes += length;
                    chosen.push((name, entry, length));
                }
                if is_full(&step, found_bytes, chosen.len()) {
                    passed = Some(offset + length);
                    return ControlFlow::Break(());
                }
                ControlFlow::Continue(())
            });
            if let Err(e) = visited {
                tracing::warn!(file = %segment.path.display(), error = %e, "a segment cannot be \
                    read to its end: what is there is not handed over");
            }
            walk.at = (segment.ordinal, passed.unwrap_or(u64::MAX));
        };
        if !is_over {
            let left = self.segments().into_iter().map(|s| {
                let left = walk.left_of(&s);
                left.end - left.start
            });
            step.left_bytes = left.sum();
            step.next = Some(walk);
        } else {
            step.again = Some(walk.again());
        }
        (step, chosen)
    }

    fn segments(&self) -> Vec<Arc<Segment>> {
        let dirs = self.inner.dirs.iter();
        dirs.flat_map(|dir| {
            dir.state
                .lock()
                .segments
                .values()
                .cloned()
                .collect::<Vec<_>>()
        })
        .collect()
    }

    fn mark(&self) -> Mark {
        let mut mark = Mark::default();
        for dir in &self.inner.dirs {
            let state = dir.state.lock();
            let newest = state.segments.last_key_value();
            mark.next = mark.next.max(newest.map_or(0, |(ordinal, _)| ordinal + 1));
            let open = state.active.as_ref();
            let open = open.map(|s| (s.ordinal, s.end.load(Relaxed)));
            // What is being written is behind the mark, and with it what was placed later.
            let ends = open.into_iter().chain(state.in_flight.iter().copied());
            for (ordinal, end) in ends {
                match mark.open.iter_mut().find(|(open, _)| *open == ordinal) {
                    Some((_, least)) => *least = end.min(*least),
                    None => mark.open.push((ordinal, end)),
                }
            }
        }
        mark
    }

    /// Reads an entry; `None` if it is gone, or damaged. May wait for a disk.
    pub fn held(&self, name: ObjectName, entry: &Cached) -> Option<Held> {
        let head = self.inner.head_key(&name);
        let key = match entry.part {
            None => head,
            Some(part) => part_key(head, entry.version, part),
        };
        let what = self.inner.look_at_record(key, &name, |at, record| {
            let mut data = Vec::new();
            if record.is_inline() || record.header.kind == Kind::Part {
                record.append(0..u64::from(record.header.data_len), &mut data)?;
            }
            let data = Bytes::from(data);
            match entry.part {
                None => {
                    let meta = codec::decode(record.meta()).ok_or(Miss::NotHere)?;
                    let is_small = record.is_inline();
                    Ok(HeldAs::Head {
                        meta: Arc::new(meta),
                        validated_at_secs: at.validated_at,
                        data: is_small.then_some(data),
                    })
                }
                Some(Part::Chunk(index)) if record.header.version == entry.version.0 => {
                    Ok(HeldAs::Chunk { index, data })
                }
                Some(_) => Err(Miss::NotHere),
            }
        })?;
        let version = match &what {
            // Another one may have been put since it was passed.
            HeldAs::Head { meta, .. } => meta.version(),
            HeldAs::Chunk { .. } => entry.version,
        };
        Some(Held {
            name,
            version,
            what,
        })
    }
}

fn is_wanted(entry: &Cached, wanted: &dyn Fn(&Cached, u64) -> bool) -> bool {
    match entry.part {
        None => wanted(entry, 0),
        Some(Part::Chunk(index)) => wanted(entry, begin_of(index)),
        Some(Part::Aux(..) | Part::Rows { .. }) => false,
    }
}
