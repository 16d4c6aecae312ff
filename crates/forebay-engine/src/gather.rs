//! In a cluster: small entries of a batch that one other node has are asked of it together.
//!
//! A question of its own for each of them costs both nodes many times what a local read costs. Here
//! one question names hundreds, and their answers come in its order, many in a message. An entry
//! that needs more than that (it is larger, or missing, or the node does not answer) is read by
//! itself, on the way that knows about origins and errors.
//!
//! Invariant: memory for the bytes that may come is held before the question is sent, and there is
//! no waiting for memory: nodes do not wait for each other's.

use crate::{
    Engine, Freshness,
    bytesio::{blocking, reserved},
    fill::{chunk_range, chunks_of},
    resolve::{Asked, Currency},
    stats::add,
    warm::{Appended, EntryHeader, WarmEntry},
};
use bytes::Bytes;
use forebay_core::{ObjectMeta, ObjectName, Reservation, Result, limits::CHUNK_BYTES};
use forebay_store::{Part, Store, Wait};
use futures::{
    Stream, StreamExt,
    stream::{self, BoxStream},
};
use std::{collections::VecDeque, ops::Range, sync::Arc, time::Duration};

/// The largest entry that is asked for together with others.
pub const GATHERED_ENTRY_MAX_BYTES: u64 = 512 << 10;

/// What another node is asked for, among others.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// The object.
    pub name: ObjectName,
    /// Which of its bytes.
    pub bytes: WantedBytes,
}

/// Which bytes of an object are wanted.
#[derive(Clone, Debug, PartialEq)]
pub enum WantedBytes {
    /// All of them, in the version that is current by the bucket's freshness rule.
    Current,
    /// A range of one version.
    Version(Arc<ObjectMeta>, Range<u64>),
}

/// What another node answered.
#[derive(Clone, Debug)]
pub enum Gathered {
    /// The bytes.
    Bytes {
        /// For [`WantedBytes::Current`]: the version, and how many seconds ago it was known to be
        /// current.
        current: Option<(Arc<ObjectMeta>, u32)>,
        /// All that was asked for.
        data: Bytes,
    },
    /// It is to be read by itself.
    Alone,
}

/// Answers in the order of what was asked for, as they come.
pub type Answers = BoxStream<'static, Result<Vec<Gathered>>>;

/// An entry that another node is to be asked for.
#[derive(Clone, Debug)]
pub struct Gather {
    /// The node.
    pub node: u64,
    wanted: Wanted,
    /// From before it was looked whether that node may be asked: what is written since overtakes
    /// the answer, however long the entry waits for its question.
    asked: Asked,
    /// Known already, for a range of a known version.
    header: Option<EntryHeader>,
}

impl Engine {
    /// The way to this entry together with others, if another node has it and it is small enough, as
    /// far as is known. Waits for nothing.
    pub fn gathers(&self, entry: &WarmEntry<'_>) -> Option<Gather> {
        if !self.inner.buckets.has_others() {
            return None;
        }
        let asked = self.asks(entry.name);
        let is_whole = entry.member.is_none() && entry.range.is_none();
        if is_whole && !self.is_large_here(entry.name) {
            // Otherwise only the bucket is asked which version is current.
            if !self.keeps_current(entry.name) {
                return None;
            }
            let node = self.gathers_at(entry.name, 0)?;
            return Some(Gather {
                node,
                wanted: Wanted {
                    name: entry.name.clone(),
                    bytes: WantedBytes::Current,
                },
                asked,
                header: None,
            });
        }
        let (header, meta, bytes) = self.chunks_of_entry(entry)?;
        if bytes.is_empty() || header.size > GATHERED_ENTRY_MAX_BYTES {
            return None;
        }
        // A chunk that would be kept is fetched whole: what lies beside it is wanted next.
        if !chunks_of(&bytes).all(|index| self.passes(entry.name, &meta, index)) {
            return None;
        }
        let node = self.gathers_at(entry.name, bytes.start)?;
        if self.gathers_at(entry.name, bytes.end - 1) != Some(node) {
            return None;
        }
        Some(Gather {
            node,
            wanted: Wanted {
                name: entry.name.clone(),
                bytes: WantedBytes::Version(meta, bytes),
            },
            asked,
            header: Some(header),
        })
    }

    /// Whether a version that is current is known to be a moment later.
    fn keeps_current(&self, name: &ObjectName) -> bool {
        let a_second = Duration::from_secs(1);
        let freshness = self.rule(name.bucket()).freshness;
        !matches!(freshness, Freshness::RevalidateAfter(ttl) if ttl < a_second)
            && self.shares(name).is_some()
            && self.keeps_own(name)
    }

    fn gathers_at(&self, name: &ObjectName, at: u64) -> Option<u64> {
        match self.asks_elsewhere(name, at) {
            true => self.inner.buckets.gathers_at(name, at),
            false => None,
        }
    }

    /// Whether the object is known here as one that has chunks.
    fn is_large_here(&self, name: &ObjectName) -> bool {
        let is_large = |meta: &ObjectMeta| meta.size > CHUNK_BYTES;
        self.inner
            .heads
            .get(name)
            .is_some_and(|(m, _)| is_large(&m))
            || self
                .store_for(name)
                .and_then(|store| store.peek(name))
                .is_some_and(|peek| !peek.inline)
    }

    /// Asks a node for entries whose bytes are at most as many as `memory` holds. What comes is in
    /// order, some of it at a time; `None` stands for an entry that is to be read by itself. What
    /// is missing at the end was not answered: the rest is to be asked for again.
    pub fn gather(
        &self,
        node: u64,
        entries: Vec<Gather>,
        memory: Reservation,
    ) -> impl Stream<Item = Result<Vec<Option<(EntryHeader, Bytes)>>>> + Send + use<> {
        let wanted = entries.iter().map(|e| e.wanted.clone()).collect();
        let answers = self.inner.buckets.gather(node, wanted, memory.bytes());
        let gathering = Gathering {
            engine: self.clone(),
            entries: entries.into(),
            memory,
            keeping: None,
        };
        add(&self.stats().fills, 1);
        stream::try_unfold((gathering, answers), |(mut gathering, mut answers)| async {
            let next = answers.next().await;
            gathering.kept().await;
            let Some(some) = next.transpose().inspect_err(|e| {
                add(&gathering.engine.stats().fills_failed, 1);
                tracing::debug!(error = %e.describe(), "entries did not come together: they are \
                    read one by one");
            })?
            else {
                return Ok(None);
            };
            let taken = some.into_iter().map(|one| gathering.take(one)).collect();
            gathering.keep();
            Ok(Some((taken, (gathering, answers))))
        })
    }

    /// Whether what another node asks for is here.
    pub fn is_here_for_peer(&self, wanted: &Wanted) -> bool {
        match &wanted.bytes {
            WantedBytes::Current => self
                .store_for(&wanted.name)
                .and_then(|store| store.peek(&wanted.name))
                .is_some_and(|p| p.inline && self.is_fresh(&wanted.name, p.validated_at_secs)),
            WantedBytes::Version(meta, range) if meta.size > CHUNK_BYTES => {
                range.end <= meta.size && self.has_chunks(&wanted.name, meta, range)
            }
            WantedBytes::Version(..) => self
                .store_for(&wanted.name)
                .and_then(|store| store.peek(&wanted.name))
                .is_some_and(|peek| peek.inline),
        }
    }

    /// Brings what another node asks for to this disk, as [`Engine::bring`]; of a large object only
    /// its beginning.
    ///
    /// # Errors
    /// As a read of it.
    pub async fn bring_for_peer(&self, wanted: &Wanted) -> Result<()> {
        let engine = self.for_peers();
        match &wanted.bytes {
            // It would be asked for, and not be known to be current here all the same.
            WantedBytes::Current if !engine.keeps_current(&wanted.name) => {}
            WantedBytes::Current => {
                let beginning = 0..CHUNK_BYTES;
                engine
                    .resolve(&wanted.name, beginning, Currency::ByRule)
                    .await?;
            }
            WantedBytes::Version(meta, range) => {
                engine.check_range(&wanted.name, meta, range)?;
                match meta.size > CHUNK_BYTES {
                    true => {
                        engine
                            .bring_chunks(&wanted.name, meta, range.clone())
                            .await?;
                    }
                    false => drop(engine.small_data(&wanted.name, meta).await?),
                }
            }
        }
        Ok(())
    }

    /// Appends what another node asks for, if it is here and has at most `most` bytes, after
    /// `before` has appended what goes in front of it: for [`WantedBytes::Current`] it is told the
    /// version, and how many seconds ago it was known to be current; then the number of bytes.
    /// `out` is as before unless the answer is `Done`.
    pub fn append_for_peer(
        &self,
        wanted: &Wanted,
        most: u64,
        wait: Wait,
        out: &mut Vec<u8>,
        before: &mut dyn FnMut(Option<(&ObjectMeta, u32)>, u64, &mut Vec<u8>),
    ) -> Appended {
        let at = out.len();
        let appended = self.append_wanted(wanted, most, wait, out, before);
        if !matches!(appended, Appended::Done(_)) {
            out.truncate(at);
        }
        appended
    }

    fn append_wanted(
        &self,
        Wanted { name, bytes }: &Wanted,
        most: u64,
        wait: Wait,
        out: &mut Vec<u8>,
        before: &mut dyn FnMut(Option<(&ObjectMeta, u32)>, u64, &mut Vec<u8>),
    ) -> Appended {
        let Some(store) = self.store_for(name) else {
            return Appended::Cold;
        };
        let done = |size| {
            self.stats().from_cache(size);
            Appended::Done(EntryHeader {
                size,
                mtime_secs: 0,
            })
        };
        match bytes {
            WantedBytes::Current => {
                let Some(peek) = store.peek(name).filter(|p| p.inline) else {
                    return Appended::Cold;
                };
                if !self.is_fresh(name, peek.validated_at_secs) {
                    return Appended::Cold;
                }
                let now = self.now_secs();
                let age = now.saturating_sub(peek.validated_at_secs);
                let found = store.append_inline(name, wait, out, |meta, out| {
                    (meta.size <= most).then(|| before(Some((meta, age)), meta.size, out))?;
                    Some(0..meta.size)
                });
                match found {
                    Err(_) => Appended::Waits,
                    Ok(None) => Appended::Cold,
                    Ok(Some(found)) => done(found.range.end),
                }
            }
            WantedBytes::Version(meta, range) => {
                let size = range.end.saturating_sub(range.start);
                if range.end > meta.size || size > most {
                    return Appended::Cold;
                }
                before(None, size, out);
                match self.append_range(store, name, meta, range, wait, out) {
                    Some(true) => done(size),
                    Some(false) => Appended::Cold,
                    None => Appended::Waits,
                }
            }
        }
    }

    /// `None` if it would have to wait for the disk.
    fn append_range(
        &self,
        store: &Store,
        name: &ObjectName,
        meta: &ObjectMeta,
        range: &Range<u64>,
        wait: Wait,
        out: &mut Vec<u8>,
    ) -> Option<bool> {
        let version = meta.version();
        if meta.size <= CHUNK_BYTES {
            let found = store.append_inline(name, wait, out, |now, _| {
                (now.version() == version).then(|| range.clone())
            });
            return found.ok().map(|found| found.is_some());
        }
        for index in chunks_of(range) {
            let chunk = chunk_range(index, meta.size);
            let within =
                range.start.max(chunk.start) - chunk.start..range.end.min(chunk.end) - chunk.start;
            let part = Part::Chunk(index);
            match store.append_part(name, version, part, within, wait, out) {
                Ok(true) => {}
                Ok(false) => return Some(false),
                Err(_) => return None,
            }
        }
        Some(true)
    }
}

/// A question that is being answered.
struct Gathering {
    engine: Engine,
    /// Those that are still to come.
    entries: VecDeque<Gather>,
    memory: Reservation,
    /// Whole objects that came and are to be kept, and those that are being kept.
    keeping: Option<Keeping>,
}

enum Keeping {
    Next(Vec<Kept>),
    Now(tokio::task::JoinHandle<()>),
}

struct Kept {
    name: ObjectName,
    asked: Asked,
    meta: Arc<ObjectMeta>,
    data: Bytes,
}

impl Gathering {
    /// One answer; `None` if it does not say what was asked.
    fn take(&mut self, answer: Gathered) -> Option<(EntryHeader, Bytes)> {
        let entry = self.entries.pop_front()?;
        let Gathered::Bytes { current, data } = answer else {
            return None;
        };
        let n = data.len() as u64;
        if n > self.memory.bytes() {
            return None;
        }
        let data = match n {
            0 => data,
            _ => reserved(data, self.memory.split(n)),
        };
        let stats = self.engine.stats();
        stats.from_origin(n);
        match (current, entry.header) {
            (Some((meta, age)), None) if meta.size == n => {
                let header = EntryHeader::of_object(&meta, &(0..n), false);
                let asked = entry.asked.before(Some(age));
                self.keeps_next(entry.wanted.name, asked, meta, &data);
                Some((header, data))
            }
            (None, Some(header)) if header.size == n => Some((header, data)),
            _ => None,
        }
    }

    fn keeps_next(&mut self, name: ObjectName, asked: Asked, meta: Arc<ObjectMeta>, data: &Bytes) {
        let engine = &self.engine;
        let Some(store) = engine.store_for(&name) else {
            return;
        };
        let takes = !engine.only_offers(&name, 0) || store.takes_offer(&name, None, meta.size);
        let knows = || store.peek(&name).is_some() || engine.inner.heads.get(&name).is_some();
        if !takes && !knows() {
            return;
        }
        let kept = Kept {
            name,
            asked,
            meta,
            data: data.clone(),
        };
        match &mut self.keeping {
            Some(Keeping::Next(all)) => all.push(kept),
            other => *other = Some(Keeping::Next(vec![kept])),
        }
    }

    /// Begins to keep what came, all on one thread.
    fn keep(&mut self) {
        match self.keeping.take() {
            Some(Keeping::Next(all)) => {
                let engine = self.engine.clone();
                let kept = blocking(move || {
                    for one in all {
                        engine.keep_offered(one);
                    }
                });
                let task = tokio::spawn(async move {
                    if let Err(e) = kept.await {
                        tracing::warn!(error = %e.describe(), "entries of others were not kept");
                    }
                });
                self.keeping = Some(Keeping::Now(task));
            }
            other => self.keeping = other,
        }
    }

    /// Waits until what came before is kept, so that what waits for the disk is one message's.
    async fn kept(&mut self) {
        if let Some(Keeping::Now(task)) = self.keeping.take() {
            let _ = task.await;
        }
    }
}

impl Engine {
    /// May wait for the disk.
    fn keep_offered(&self, one: Kept) {
        let Kept {
            name,
            asked,
            meta,
            data,
        } = one;
        let Some(store) = self.store_for(&name) else {
            return;
        };
        let hash = name.hash128();
        let kept = self.inner.generations.publish(hash, asked.generation, || {
            self.inner.heads.remove(hash);
            // It was asked of a node that owns it, or stands in.
            match self.only_offers(&name, 0) {
                true => store
                    .offer_head(&name, &meta, asked.at_secs, Some(&data))
                    .map(drop),
                false => store.put_head(&name, &meta, asked.at_secs, Some(&data)),
            }
        });
        self.note_write(&name, kept);
    }
}
