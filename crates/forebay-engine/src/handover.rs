//! In a cluster: many entries at once, for the node that owns them now, or from those who did; and
//! copies of what other nodes have.
//!
//! Invariants: what is taken over never looks fresher than it was, and never comes in place of
//! another version, or of one that was written meanwhile. Memory is reserved before a disk is read.

use crate::{Engine, bytesio::blocking};
use forebay_core::{ObjectName, Reservation, Result, VersionId, limits::CHUNK_BYTES};
use forebay_store::{Cached, Head, Held, HeldAs, Part, Step, Store, Wait, Walk};
use std::sync::Arc;

/// What a step may hold besides what it is asked for: one more record.
const STEP_MORE_BYTES: u64 = CHUNK_BYTES + (128 << 10);

/// What was done with entries of another node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakenOver {
    /// Those that are kept now.
    pub entries: u64,
    /// Their bytes.
    pub bytes: u64,
    /// There was no room for one: it and those behind it were left out.
    pub is_full: bool,
}

/// Which entry of a cache it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EntryName {
    /// Of the object.
    pub name: ObjectName,
    /// The version that it belongs to.
    pub version: VersionId,
    /// A chunk of a large object; `None`: its head.
    pub chunk: Option<u32>,
}

impl EntryName {
    /// The byte of the object where it begins.
    pub fn at(&self) -> u64 {
        self.chunk.map_or(0, |index| u64::from(index) * CHUNK_BYTES)
    }

    /// Of an entry.
    pub fn of(held: &Held) -> Self {
        EntryName {
            name: held.name.clone(),
            version: held.version,
            chunk: match held.what {
                HeldAs::Head { .. } => None,
                HeldAs::Chunk { index, .. } => Some(index),
            },
        }
    }

    fn cached(&self) -> Cached {
        Cached {
            bucket: forebay_core::name::hash_bucket(self.name.bucket()),
            name: self.name.hash128(),
            version: self.version,
            part: self.chunk.map(Part::Chunk),
        }
    }
}

/// An entry that is to be taken from another node, and what the engine knew of writes of its name
/// before that node was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lacking {
    /// Which one.
    pub entry: EntryName,
    generation: u64,
}

impl Engine {
    /// Which entries this node has: the next so many of a walk, with the bytes of their records
    /// ([`Store::walk_over`]); `None` without a cache.
    ///
    /// # Errors
    /// If the work is broken off.
    pub async fn entries_here(
        &self,
        from: Option<Walk>,
        entries: u64,
        wanted: impl Fn(&Cached, u64) -> bool + Send + 'static,
    ) -> Result<Option<(Step, Vec<(EntryName, u64)>)>> {
        let Some(store) = self.inner.store.clone() else {
            return Ok(None);
        };
        let walked = blocking(move || store.walk_over(from, entries, &wanted));
        let (step, found) = walked.await?;
        let named = found.into_iter().map(|(name, entry, bytes)| {
            let chunk = match entry.part {
                Some(Part::Chunk(index)) => Some(index),
                _ => None,
            };
            let version = entry.version;
            let entry = EntryName {
                name,
                version,
                chunk,
            };
            (entry, bytes)
        });
        Ok(Some((step, named.collect())))
    }

    /// The first of these entries, as far as they are here, until they have so many bytes; how many
    /// were looked for, and the memory that they take.
    ///
    /// # Errors
    /// `Busy` if other work holds the memory that it needs.
    pub async fn held_here(
        &self,
        entries: Vec<EntryName>,
        bytes: u64,
    ) -> Result<(Vec<Held>, usize, Reservation)> {
        let memory = self.inner.budget.reserve(bytes + STEP_MORE_BYTES).await?;
        let Some(store) = self.inner.store.clone() else {
            return Ok((Vec::new(), entries.len(), memory));
        };
        let held = blocking(move || {
            let (mut held, mut looked, mut found_bytes) = (Vec::new(), 0, 0);
            for entry in entries {
                if found_bytes >= bytes {
                    break;
                }
                looked += 1;
                let cached = entry.cached();
                let found = store.held(entry.name, &cached);
                // A head that was put since then is another entry.
                if let Some(found) = found.filter(|found| found.version == cached.version) {
                    found_bytes += found.bytes();
                    held.push(found);
                }
            }
            (held, looked)
        });
        let (held, looked) = held.await?;
        Ok((held, looked, memory))
    }

    /// Which of these entries this node should take from another one: it keeps such, and does not
    /// have it, or knows another version and would have to ask about that.
    ///
    /// # Errors
    /// If the work is broken off.
    pub async fn lacking(&self, entries: Vec<EntryName>) -> Result<Vec<Lacking>> {
        let engine = self.clone();
        let lacking = blocking(move || {
            let lacks = |entry: &EntryName| {
                let Some(store) = engine.store_for(&entry.name) else {
                    return false;
                };
                match entry.chunk {
                    Some(index) => !store.has_part(&entry.name, entry.version, Part::Chunk(index)),
                    None => {
                        let is_here = store.peek(&entry.name).is_some();
                        let known = is_here
                            .then(|| store.head(&entry.name, Wait::May).unwrap_or_default())
                            .flatten();
                        known.is_none_or(|head| head.meta.version() != entry.version)
                    }
                }
            };
            let lacking = entries.into_iter().filter_map(|entry| {
                let generation = engine.inner.generations.current(entry.name.hash128());
                lacks(&entry).then_some(Lacking { entry, generation })
            });
            lacking.collect()
        });
        lacking.await
    }

    /// Keeps copies of what another node has, in place of what goes first. What was written since
    /// the engine was asked whether it lacks them is left out, and so is a version that was known to
    /// be current before the one that is known here.
    ///
    /// # Errors
    /// If the store cannot write.
    pub async fn take_copies(&self, entries: Vec<(Held, Lacking)>) -> Result<TakenOver> {
        let engine = self.clone();
        let taken = blocking(move || {
            let mut taken = TakenOver::default();
            for (entry, lacking) in entries {
                let Some(store) = engine.store_for(&entry.name).cloned() else {
                    continue;
                };
                if engine.take_copy(&store, &entry, lacking.generation)? {
                    taken.entries += 1;
                    taken.bytes += entry.bytes();
                }
            }
            Ok(taken)
        });
        taken.await?
    }

    /// May wait for a disk.
    fn take_copy(&self, store: &Arc<Store>, entry: &Held, generation: u64) -> Result<bool> {
        let (name, hash) = (&entry.name, entry.name.hash128());
        let known = || store.head(name, Wait::May).unwrap_or_default();
        // A head that the store could not keep is in memory alone.
        let newest = |stored: Option<&Head>| {
            let stored = stored.map(|head| (head.meta.version(), head.validated_at_secs));
            let in_memory = self.inner.heads.get(name);
            let in_memory = in_memory.map(|(meta, at_secs)| (meta.version(), at_secs));
            let all = stored.into_iter().chain(in_memory);
            all.max_by_key(|(_, at_secs)| *at_secs)
        };
        match &entry.what {
            HeldAs::Chunk { index, data } => {
                // Of another version than the one that is read here, it would be of no use.
                let is_other = newest(known().as_ref()).is_some_and(|(version, at_secs)| {
                    version != entry.version && self.is_fresh(name, at_secs)
                });
                if is_other {
                    return Ok(false);
                }
                store.put_part(name, entry.version, Part::Chunk(*index), data)?;
                Ok(true)
            }
            HeldAs::Head {
                meta,
                validated_at_secs,
                data,
            } => {
                let publish = || {
                    let stored = known();
                    let mut at_secs = *validated_at_secs;
                    match newest(stored.as_ref()) {
                        Some((version, known_secs)) if version == entry.version => {
                            at_secs = at_secs.max(known_secs);
                        }
                        Some((_, known_secs)) if known_secs >= at_secs => return Ok(false),
                        _ => {}
                    }
                    let is_here = stored.is_some_and(|head| {
                        let has_all = head.data.is_some() || data.is_none();
                        head.meta.version() == entry.version && has_all
                    });
                    if is_here {
                        return Ok(false);
                    }
                    self.inner.heads.remove(hash);
                    store.put_head(name, meta, at_secs, data.as_deref())?;
                    Ok(true)
                };
                let kept = self.inner.generations.publish(hash, generation, publish);
                kept.unwrap_or(Ok(false))
            }
        }
    }

    /// The next entries on this node that another one is to have, with the memory that they take
    /// ([`Store::walk`]); `None` without a cache.
    ///
    /// # Errors
    /// `Busy` if other work holds the memory that it needs.
    pub async fn held_for_other(
        &self,
        from: Option<Walk>,
        bytes: u64,
        wanted: impl Fn(u128, u64) -> bool + Send + 'static,
    ) -> Result<Option<(Step, Reservation)>> {
        let Some(store) = self.inner.store.clone() else {
            return Ok(None);
        };
        let memory = self.inner.budget.reserve(bytes + STEP_MORE_BYTES).await?;
        let step = blocking(move || store.walk(from, bytes, &wanted)).await?;
        Ok(Some((step, memory)))
    }

    /// Keeps entries that another node had, where they are not here yet: in free space, or, if
    /// `evicts`, in place of what goes first. A head that `is_old` is left out.
    ///
    /// # Errors
    /// If the store cannot write.
    pub async fn take_over(
        &self,
        entries: Vec<Held>,
        evicts: bool,
        is_old: impl Fn(&ObjectName) -> bool + Send + 'static,
    ) -> Result<TakenOver> {
        let engine = self.clone();
        let taken = blocking(move || {
            let mut taken = TakenOver::default();
            for entry in entries {
                let Some(store) = engine.store_for(&entry.name).cloned() else {
                    continue;
                };
                match engine.take_one(&store, &entry, evicts, &is_old)? {
                    Kept::Now => {
                        taken.entries += 1;
                        taken.bytes += entry.bytes();
                    }
                    Kept::LeftOut => {}
                    Kept::NoRoom => {
                        taken.is_full = true;
                        break;
                    }
                }
            }
            Ok(taken)
        });
        taken.await?
    }

    /// May wait for a disk.
    fn take_one(
        &self,
        store: &Arc<Store>,
        entry: &Held,
        evicts: bool,
        is_old: &dyn Fn(&ObjectName) -> bool,
    ) -> Result<Kept> {
        let (name, hash) = (&entry.name, entry.name.hash128());
        let known = || store.head(name, Wait::May).unwrap_or_default();
        match &entry.what {
            HeldAs::Chunk { index, data } => {
                let part = Part::Chunk(*index);
                let is_other = |head: forebay_store::Head| head.meta.version() != entry.version;
                if store.has_part(name, entry.version, part) || known().is_some_and(is_other) {
                    return Ok(Kept::LeftOut);
                }
                if evicts {
                    store.put_part(name, entry.version, part, data)?;
                    return Ok(Kept::Now);
                }
                Ok(match store.offer_part(name, entry.version, part, data)? {
                    true => Kept::Now,
                    false => Kept::NoRoom,
                })
            }
            HeldAs::Head {
                meta,
                validated_at_secs,
                data,
            } => {
                let generation = self.inner.generations.current(hash);
                let publish = || {
                    let is_other = |other| other != entry.version;
                    let in_memory = self.inner.heads.get(name);
                    if is_old(name) || in_memory.is_some_and(|(m, _)| is_other(m.version())) {
                        return Ok(Kept::LeftOut);
                    }
                    let at_secs = match known() {
                        None => *validated_at_secs,
                        // What is known here is newer, but the bytes are not here.
                        Some(head)
                            if !is_other(head.meta.version())
                                && head.data.is_none()
                                && data.is_some() =>
                        {
                            head.validated_at_secs
                        }
                        Some(_) => return Ok(Kept::LeftOut),
                    };
                    if !evicts && !store.takes_offer(name, None, entry.bytes() + CHUNK_BYTES / 16) {
                        return Ok(Kept::NoRoom);
                    }
                    store.put_head(name, meta, at_secs, data.as_deref())?;
                    Ok(Kept::Now)
                };
                // What was written meanwhile is left out.
                let kept = self.inner.generations.publish(hash, generation, publish);
                kept.unwrap_or(Ok(Kept::LeftOut))
            }
        }
    }
}

enum Kept {
    Now,
    LeftOut,
    NoRoom,
}
