//! In a cluster: many entries at once, for the node that owns them now, or from those who did.
//!
//! Invariants: what is taken over never looks fresher than it was, and never comes in place of
//! another version, or of one that was written meanwhile. Memory is reserved before a disk is read.

use crate::{Engine, bytesio::blocking};
use forebay_core::{ObjectName, Reservation, Result, limits::CHUNK_BYTES};
use forebay_store::{Held, HeldAs, Part, Step, Store, Wait, Walk};
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

impl Engine {
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
