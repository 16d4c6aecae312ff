//! Parts of a tar: the samples that begin within a range of its bytes. They are known as soon as
//! the pass that builds the index has seen where they end, while the rest of the tar is still on
//! its way.
//!
//! A caller that wants a part also asks for the whole index, which starts that pass if nobody has,
//! and takes whichever comes first. After each parsed piece, the pass checks which parts are asked
//! for. It keeps the parts it has put together for those who read their rows.
//!
//! Here samples are found by their place, never by name, so a name that comes again later in the
//! tar changes nothing about them; members by name need the whole index (`members.rs`).
//!
//! Invariant: a part is the same whether it is cut from a pass under way or from the whole index.

use crate::{Engine, bytesio::blocking, cache::BoundedCache};
use forebay_core::{ObjectMeta, ObjectName, Result, VersionId, sync::Mutex};
use forebay_format::{MemberIndex, MemberIndexBuilder, samples};
use hashbrown::HashMap;
use std::{ops::Range, sync::Arc};
use tokio::sync::oneshot;

type ArchiveKey = (u128, VersionId);
type PartKey = (ArchiveKey, u64, u64);

/// Parts that callers wait for, and those that were put together last.
pub(crate) struct Parts {
    asked: Mutex<HashMap<ArchiveKey, Vec<Asked>>>,
    kept: BoundedCache<PartKey, Arc<MemberIndex>>,
}

struct Asked {
    range: Range<u64>,
    answer: oneshot::Sender<Result<Arc<MemberIndex>>>,
}

/// A caller that waits for a part; if it leaves, its question goes with it.
struct Waiting<'a> {
    parts: &'a Parts,
    archive: ArchiveKey,
    answer: oneshot::Receiver<Result<Arc<MemberIndex>>>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.answer.close();
        self.parts.forget_gone(self.archive);
    }
}

impl Parts {
    pub(crate) fn new(max_bytes: u64) -> Self {
        Self {
            asked: Mutex::default(),
            kept: BoundedCache::new(max_bytes),
        }
    }

    /// The number of questions that wait for an answer.
    pub(crate) fn waiting(&self) -> usize {
        self.asked.lock().values().map(Vec::len).sum()
    }

    fn ask(&self, archive: ArchiveKey, range: Range<u64>) -> Waiting<'_> {
        let (sender, answer) = oneshot::channel();
        let asked = Asked {
            range,
            answer: sender,
        };
        self.asked.lock().entry(archive).or_default().push(asked);
        Waiting {
            parts: self,
            archive,
            answer,
        }
    }

    fn forget_gone(&self, archive: ArchiveKey) {
        let mut asked = self.asked.lock();
        if let Some(of) = asked.get_mut(&archive) {
            of.retain(|a| !a.answer.is_closed());
            if of.is_empty() {
                asked.remove(&archive);
            }
        }
    }

    fn keep(&self, archive: ArchiveKey, range: &Range<u64>, part: &Arc<MemberIndex>) {
        let cost = part.memory_bytes() as u64;
        self.kept
            .insert((archive, range.start, range.end), part.clone(), cost);
    }

    /// A pass over the archive has advanced: answers those whose part has ended.
    pub(crate) fn found(&self, name: &ObjectName, version: VersionId, found: &MemberIndexBuilder) {
        let archive = (name.hash128(), version);
        let mut asked = self.asked.lock();
        let Some(of) = asked.get_mut(&archive) else {
            return;
        };
        let mut at = 0;
        while at < of.len() {
            let part = match samples::part_of_found(found, &of[at].range) {
                Ok(None) => {
                    at += 1;
                    continue;
                }
                Ok(Some(part)) => Ok(Arc::new(part)),
                Err(e) => Err(e),
            };
            let Asked { range, answer } = of.swap_remove(at);
            if let Ok(part) = &part {
                self.keep(archive, &range, part);
            }
            // The caller may be gone.
            let _ = answer.send(part);
        }
        if of.is_empty() {
            asked.remove(&archive);
        }
    }
}

impl Engine {
    /// The members of the samples of one version of a tar whose first member's bytes begin within
    /// `range`; for a compressed tar, a range of its unpacked bytes. Waits until the tar has been
    /// read as far as necessary, and no further; a compressed tar is read to its end first.
    ///
    /// # Errors
    /// As [`Engine::members_of_version`], for damage before the end of the part.
    pub async fn members_of_part(
        &self,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        range: Range<u64>,
    ) -> Result<Arc<MemberIndex>> {
        let (parts, archive) = (&self.inner.parts, (name.hash128(), meta.version()));
        if let Some(part) = parts.kept.get(&(archive, range.start, range.end)) {
            return Ok(part);
        }
        let mut waiting = parts.ask(archive, range.clone());
        let whole = tokio::select! {
            biased;
            Ok(part) = &mut waiting.answer => return part,
            whole = self.members_of_version(name, meta) => whole,
        };
        let whole = match whole {
            Ok(whole) => whole,
            // The pass may have failed after the part, at the moment it answered.
            Err(e) => match waiting.answer.try_recv() {
                Ok(part) => return part,
                Err(_) => return Err(e),
            },
        };
        let of = range.clone();
        let part = Arc::new(blocking(move || samples::part_of(&whole, &of)).await??);
        parts.keep(archive, &range, &part);
        Ok(part)
    }
}
