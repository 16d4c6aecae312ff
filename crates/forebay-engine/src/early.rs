//! What is known of a tar before all of it is: the samples that begin within a range of its bytes
//! (a *part*), and the first member of a name. The pass that builds the index tells both as soon as
//! it has seen them, while the rest of the tar is still on its way.
//!
//! Whoever asks also asks for the whole index, which starts that pass if nobody has, and takes
//! whichever comes first. After each parsed piece, and when somebody asks while it waits for the
//! next, the pass checks which questions it can answer. The answers are kept for those who then read
//! the bytes.
//!
//! Samples of a part are found by their place, never by name, so a name that comes again later in
//! the tar changes nothing about them. The first member of a name stays the first. Where the last
//! one counts ([`Repeated::Last`]), members by name need the whole index (`members.rs`).
//!
//! Invariant: an answer is the same whether a pass under way gives it or the whole index.

use crate::{Engine, bytesio::blocking, cache::BoundedCache, members::extent_of};
use bytes::Bytes;
use forebay_core::{ObjectMeta, ObjectName, Result, VersionId, sync::Mutex};
use forebay_format::{
    Extent, Member, MemberIndex, MemberIndexBuilder, Repeated, lookup_key, samples,
};
use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use std::{hash::BuildHasher, ops::Range, pin::pin, sync::Arc};
use tokio::sync::{Notify, oneshot};

type ArchiveKey = (u128, VersionId);
type PartKey = (ArchiveKey, u64, u64);
type NameKey = (ArchiveKey, Box<str>);
type Answer<T> = oneshot::Sender<Result<T>>;

/// The memory of an extent that is kept, besides its name. The cache has each key twice.
const EXTENT_COST: u64 = (2 * size_of::<NameKey>() + size_of::<Extent>() + 150) as u64;

/// Questions that wait for an answer, and the last answers.
pub(crate) struct Early {
    asked: Mutex<HashMap<ArchiveKey, Asked>>,
    /// Tells passes that there is another question.
    asked_more: Notify,
    parts: BoundedCache<PartKey, Arc<MemberIndex>>,
    firsts: BoundedCache<NameKey, Extent>,
}

/// The questions about one archive.
#[derive(Default)]
struct Asked {
    parts: Vec<(Range<u64>, Answer<Arc<MemberIndex>>)>,
    /// By the key that names are compared by.
    names: HashMap<Box<str>, Vec<Answer<Extent>>>,
}

/// What a pass has found of a tar whose names mean their first member.
#[derive(Default)]
pub(crate) struct Firsts {
    numbers: HashTable<u32>,
    /// How many members have been looked at.
    seen: usize,
    hasher: DefaultHashBuilder,
}

impl Firsts {
    fn catch_up(&mut self, found: &MemberIndexBuilder) {
        let key = |number: u32| {
            let member = found.member(number as usize);
            lookup_key(member.expect("its number was noted").name)
        };
        let hash = |number: &u32| self.hasher.hash_one(key(*number));
        for number in self.seen as u32..found.len() as u32 {
            self.numbers
                .entry(hash(&number), |other| key(*other) == key(number), hash)
                .or_insert(number);
        }
        self.seen = found.len();
    }

    fn get<'a>(&self, found: &'a MemberIndexBuilder, key: &str) -> Option<Member<'a>> {
        let member = |number: &u32| found.member(*number as usize);
        let is = |number: &u32| member(number).is_some_and(|m| lookup_key(m.name) == key);
        member(self.numbers.find(self.hasher.hash_one(key), is)?)
    }
}

enum Question {
    Part(Range<u64>),
    /// The key that names are compared by.
    Name(Box<str>),
}

/// A caller that waits; if it leaves, its question goes with it.
struct Waiting<'a, T> {
    early: &'a Early,
    archive: ArchiveKey,
    question: Question,
    answer: oneshot::Receiver<Result<T>>,
    answered: bool,
}

impl<T> Drop for Waiting<'_, T> {
    fn drop(&mut self) {
        if !self.answered {
            self.answer.close();
            self.early.forget_gone(self.archive, &self.question);
        }
    }
}

impl Early {
    pub(crate) fn new(max_bytes: u64) -> Self {
        let firsts = max_bytes / 8;
        Self {
            asked: Mutex::default(),
            asked_more: Notify::new(),
            parts: BoundedCache::new(max_bytes - firsts),
            firsts: BoundedCache::new(firsts),
        }
    }

    /// The number of questions that wait for an answer.
    pub(crate) fn waiting(&self) -> usize {
        let of = |a: &Asked| a.parts.len() + a.names.values().map(Vec::len).sum::<usize>();
        self.asked.lock().values().map(of).sum()
    }

    fn ask<T>(
        &self,
        archive: ArchiveKey,
        question: Question,
        note: impl FnOnce(&mut Asked, Answer<T>),
    ) -> Waiting<'_, T> {
        let (sender, answer) = oneshot::channel();
        note(self.asked.lock().entry(archive).or_default(), sender);
        self.asked_more.notify_waiters();
        Waiting {
            early: self,
            archive,
            question,
            answer,
            answered: false,
        }
    }

    fn forget_gone(&self, archive: ArchiveKey, question: &Question) {
        let mut asked = self.asked.lock();
        let Some(of) = asked.get_mut(&archive) else {
            return;
        };
        match question {
            Question::Part(range) => of.parts.retain(|(r, a)| r != range || !a.is_closed()),
            Question::Name(key) => {
                if let Some(answers) = of.names.get_mut(key) {
                    answers.retain(|answer| !answer.is_closed());
                    if answers.is_empty() {
                        of.names.remove(key);
                    }
                }
            }
        }
        if of.parts.is_empty() && of.names.is_empty() {
            asked.remove(&archive);
        }
    }

    fn keep_part(&self, archive: ArchiveKey, range: &Range<u64>, part: &Arc<MemberIndex>) {
        let cost = part.memory_bytes() as u64;
        self.parts
            .insert((archive, range.start, range.end), part.clone(), cost);
    }

    /// Answers what can be answered by what a pass has found, now and for as long as it waits for
    /// its next bytes.
    pub(crate) async fn tell_while<T>(
        &self,
        name: &ObjectName,
        version: VersionId,
        found: &MemberIndexBuilder,
        firsts: &mut Option<Firsts>,
        next: impl Future<Output = T>,
    ) -> T {
        let mut next = pin!(next);
        loop {
            // Before looking: no question slips through.
            let asked_more = self.asked_more.notified();
            self.tell(name, version, found, firsts);
            tokio::select! {
                biased;
                next = &mut next => return next,
                () = asked_more => {}
            }
        }
    }

    /// Answers what can be answered by what a pass has found.
    pub(crate) fn tell(
        &self,
        name: &ObjectName,
        version: VersionId,
        found: &MemberIndexBuilder,
        firsts: &mut Option<Firsts>,
    ) {
        if let Some(firsts) = firsts {
            firsts.catch_up(found);
        }
        let archive = (name.hash128(), version);
        let mut asked = self.asked.lock();
        let Some(of) = asked.get_mut(&archive) else {
            return;
        };
        self.tell_parts(archive, of, found);
        if let Some(firsts) = firsts {
            self.tell_firsts(name, archive, of, found, firsts);
        }
        if of.parts.is_empty() && of.names.is_empty() {
            asked.remove(&archive);
        }
    }

    /// Answers those whose part has ended.
    fn tell_parts(&self, archive: ArchiveKey, of: &mut Asked, found: &MemberIndexBuilder) {
        let mut at = 0;
        while at < of.parts.len() {
            let part = match samples::part_of_found(found, &of.parts[at].0) {
                Ok(None) => {
                    at += 1;
                    continue;
                }
                Ok(Some(part)) => Ok(Arc::new(part)),
                Err(e) => Err(e),
            };
            let (range, answer) = of.parts.swap_remove(at);
            if let Ok(part) = &part {
                self.keep_part(archive, &range, part);
            }
            // The caller may be gone.
            let _ = answer.send(part);
        }
    }

    /// Answers those whose member has been found.
    fn tell_firsts(
        &self,
        name: &ObjectName,
        archive: ArchiveKey,
        of: &mut Asked,
        found: &MemberIndexBuilder,
        firsts: &Firsts,
    ) {
        of.names.retain(|key, answers| {
            let Some(member) = firsts.get(found, key) else {
                return true;
            };
            let extent = match member.readable() {
                Ok(member) => Ok(member.extent),
                Err(e) => Err(e.context(name)),
            };
            if let Ok(extent) = extent {
                let cost = EXTENT_COST + 2 * key.len() as u64;
                self.firsts.insert((archive, key.clone()), extent, cost);
            }
            for answer in answers.drain(..) {
                // The caller may be gone.
                let _ = answer.send(extent.clone());
            }
            false
        });
    }
}

impl<T> Waiting<'_, T> {
    /// What a pass has told, or else what the whole archive says.
    async fn or_of_whole<W>(
        &mut self,
        whole: impl Future<Output = Result<W>>,
    ) -> Result<Known<T, W>> {
        let whole = tokio::select! {
            biased;
            Ok(told) = &mut self.answer => {
                self.answered = true;
                return told.map(Known::Early);
            }
            whole = whole => whole,
        };
        match whole {
            Ok(whole) => Ok(Known::Whole(whole)),
            // The pass may have failed just after it answered.
            Err(e) => match self.answer.try_recv() {
                Ok(told) => told.map(Known::Early),
                Err(_) => Err(e),
            },
        }
    }
}

enum Known<T, W> {
    Early(T),
    Whole(W),
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
        let (early, archive) = (&self.inner.early, (name.hash128(), meta.version()));
        if let Some(part) = early.parts.get(&(archive, range.start, range.end)) {
            return Ok(part);
        }
        let mut waiting = early.ask(archive, Question::Part(range.clone()), |asked, answer| {
            asked.parts.push((range.clone(), answer));
        });
        let whole = self.members_of_version(name, meta);
        let whole = match waiting.or_of_whole(whole).await? {
            Known::Early(part) => return Ok(part),
            Known::Whole(whole) => whole,
        };
        let of = range.clone();
        let part = Arc::new(blocking(move || samples::part_of(&whole, &of)).await??);
        early.keep_part(archive, &range, &part);
        Ok(part)
    }

    /// Where the first member of this name is: known as soon as it is found. (Whether `/x` stands
    /// for `x` is known only at the end of the tar.)
    pub(crate) async fn first_of_name(
        &self,
        archive: &ObjectName,
        meta: &Arc<ObjectMeta>,
        data: Option<&Bytes>,
        member: &str,
    ) -> Result<Extent> {
        if let Some(found) = self.found_here(archive, meta, member, Repeated::First) {
            return found;
        }
        let of = (archive.hash128(), meta.version());
        let key: Box<str> = lookup_key(member).into();
        let question = Question::Name(key.clone());
        let mut waiting = self.inner.early.ask(of, question, |asked, answer| {
            asked.names.entry(key).or_default().push(answer);
        });
        let whole = self.index(archive, meta, data);
        match waiting.or_of_whole(whole).await? {
            Known::Early(extent) => Ok(extent),
            Known::Whole(index) => extent_of(&index, archive, member, Repeated::First),
        }
    }

    /// Where the member of this name is that counts, if this is in RAM.
    pub(crate) fn found_here(
        &self,
        archive: &ObjectName,
        meta: &ObjectMeta,
        member: &str,
        counts: Repeated,
    ) -> Option<Result<Extent>> {
        if let Some(index) = self.inner.indexes.get(archive, meta.version()) {
            return Some(extent_of(&index, archive, member, counts));
        }
        if counts == Repeated::Last {
            return None;
        }
        let of = (archive.hash128(), meta.version());
        let key = (of, lookup_key(member).into());
        self.inner.early.firsts.get(&key).map(Ok)
    }
}
