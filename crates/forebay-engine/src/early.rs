//! What is known of a tar before all of it is: the samples that begin within a range of its bytes
//! (a *part*), and the first member of a name. The pass that builds the index tells both as soon as
//! it has seen them, while the rest of the tar is still on its way.
//!
//! Whoever asks also asks for the whole index, which starts that pass if nobody has, and takes
//! whichever comes first. After each parsed piece, and when somebody asks while it waits for the
//! next, the pass checks which questions it can answer: all of them after a piece, only the new
//! ones while it waits. The answers are kept for those who then read the bytes.
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
use hashbrown::{DefaultHashBuilder, HashMap, HashSet, HashTable};
use std::{hash::BuildHasher, ops::Range, pin::pin, sync::Arc};
use tokio::sync::{Notify, oneshot};

type ArchiveKey = (u128, VersionId);
type PartKey = (ArchiveKey, u64, u64);
type NameKey = (ArchiveKey, Box<str>);
type Answer<T> = oneshot::Sender<Result<T>>;

/// The memory of an extent that is kept, besides its name. The cache has each key twice.
const EXTENT_COST: u64 = (2 * size_of::<NameKey>() + size_of::<Extent>() + 150) as u64;

/// More than passes at a time, so that a question rarely wakes the pass of another archive.
const BELLS: usize = 256;

/// Questions that wait for an answer, and the last answers.
pub(crate) struct Early {
    asked: Mutex<HashMap<ArchiveKey, Asked>>,
    /// Tell passes that there is another question, by a hash of the archive.
    bells: Box<[Notify]>,
    parts: BoundedCache<PartKey, Arc<MemberIndex>>,
    firsts: BoundedCache<NameKey, Extent>,
}

/// The questions about one archive.
#[derive(Default)]
struct Asked {
    parts: Vec<PartAsked>,
    /// Those that no pass has looked at.
    new_parts: Vec<PartAsked>,
    /// By the key that names are compared by.
    names: HashMap<Box<str>, Vec<Answer<Extent>>>,
    /// Those of `names` that no pass has looked at since they were asked for.
    new_names: HashSet<Box<str>>,
}

type PartAsked = (Range<u64>, Answer<Arc<MemberIndex>>);

impl Asked {
    fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.new_parts.is_empty() && self.names.is_empty()
    }
}

/// Which questions a pass looks at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    /// It has found more since it last looked.
    All,
    /// Only the questions are more.
    New,
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
            bells: (0..BELLS).map(|_| Notify::new()).collect(),
            parts: BoundedCache::new(max_bytes - firsts),
            firsts: BoundedCache::new(firsts),
        }
    }

    /// The number of questions that wait for an answer.
    pub(crate) fn waiting(&self) -> usize {
        let of = |a: &Asked| {
            let names: usize = a.names.values().map(Vec::len).sum();
            a.parts.len() + a.new_parts.len() + names
        };
        self.asked.lock().values().map(of).sum()
    }

    fn bell(&self, (name, version): ArchiveKey) -> &Notify {
        &self.bells[(name as u64 ^ version.0) as usize % BELLS]
    }

    fn ask<T>(
        &self,
        archive: ArchiveKey,
        question: Question,
        note: impl FnOnce(&mut Asked, Answer<T>),
    ) -> Waiting<'_, T> {
        let (sender, answer) = oneshot::channel();
        note(self.asked.lock().entry(archive).or_default(), sender);
        self.bell(archive).notify_waiters();
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
            Question::Part(range) => {
                let waits = |(r, a): &PartAsked| r != range || !a.is_closed();
                of.parts.retain(waits);
                of.new_parts.retain(waits);
            }
            Question::Name(key) => {
                if let Some(answers) = of.names.get_mut(key) {
                    answers.retain(|answer| !answer.is_closed());
                    if answers.is_empty() {
                        of.names.remove(key);
                        of.new_names.remove(key);
                    }
                }
            }
        }
        if of.is_empty() {
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
        let bell = self.bell((name.hash128(), version));
        let (mut next, mut which) = (pin!(next), Look::All);
        loop {
            // Before looking: no question slips through.
            let rung = bell.notified();
            self.look(name, version, found, firsts, which);
            which = Look::New;
            tokio::select! {
                biased;
                next = &mut next => return next,
                () = rung => {}
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
        self.look(name, version, found, firsts, Look::All);
    }

    /// Answers those of these questions that can be, and says how many it looked at.
    fn look(
        &self,
        name: &ObjectName,
        version: VersionId,
        found: &MemberIndexBuilder,
        firsts: &mut Option<Firsts>,
        which: Look,
    ) -> usize {
        let archive = (name.hash128(), version);
        loop {
            let mut asked = self.asked.lock();
            let Some(of) = asked.get_mut(&archive) else {
                return 0;
            };
            if let Some(firsts) = firsts
                && !of.names.is_empty()
                && firsts.seen < found.len()
            {
                // Not under the lock: there may be many members.
                drop(asked);
                firsts.catch_up(found);
                continue;
            }
            let mut looked = self.tell_parts(archive, of, found, which);
            if let Some(firsts) = firsts {
                looked += self.tell_firsts(name, archive, of, found, firsts, which);
            }
            if of.is_empty() {
                asked.remove(&archive);
            }
            return looked;
        }
    }

    /// Answers those whose part has ended.
    fn tell_parts(
        &self,
        archive: ArchiveKey,
        of: &mut Asked,
        found: &MemberIndexBuilder,
        which: Look,
    ) -> usize {
        let mut asked = std::mem::take(&mut of.new_parts);
        if which == Look::All {
            asked.append(&mut of.parts);
        }
        let looked = asked.len();
        for (range, answer) in asked {
            let part = match samples::part_of_found(found, &range) {
                Ok(None) => {
                    of.parts.push((range, answer));
                    continue;
                }
                Ok(Some(part)) => Ok(Arc::new(part)),
                Err(e) => Err(e),
            };
            if let Ok(part) = &part {
                self.keep_part(archive, &range, part);
            }
            // The caller may be gone.
            let _ = answer.send(part);
        }
        looked
    }

    /// Answers those whose member has been found.
    fn tell_firsts(
        &self,
        name: &ObjectName,
        archive: ArchiveKey,
        of: &mut Asked,
        found: &MemberIndexBuilder,
        firsts: &Firsts,
        which: Look,
    ) -> usize {
        let is_told = |key: &str, answers: &mut Vec<Answer<Extent>>| {
            let Some(member) = firsts.get(found, key) else {
                return false;
            };
            let extent = match member.readable() {
                Ok(member) => Ok(member.extent),
                Err(e) => Err(e.context(name)),
            };
            if let Ok(extent) = extent {
                let cost = EXTENT_COST + 2 * key.len() as u64;
                self.firsts.insert((archive, key.into()), extent, cost);
            }
            for answer in answers.drain(..) {
                // The caller may be gone.
                let _ = answer.send(extent.clone());
            }
            true
        };
        let new = std::mem::take(&mut of.new_names);
        if which == Look::All {
            let looked = of.names.len();
            of.names.retain(|key, answers| !is_told(key, answers));
            return looked;
        }
        for key in &new {
            if of
                .names
                .get_mut(key)
                .is_some_and(|answers| is_told(key, answers))
            {
                of.names.remove(key);
            }
        }
        new.len()
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
            asked.new_parts.push((range.clone(), answer));
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
            asked.new_names.insert(key.clone());
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

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_format::{ArchiveKind, Storage};
    use futures::{
        FutureExt,
        task::{ArcWake, Context, waker},
    };
    use std::{
        future::pending,
        sync::atomic::{AtomicUsize, Ordering::SeqCst},
    };

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl ArcWake for Woken {
        fn wake_by_ref(this: &Arc<Self>) {
            this.0.fetch_add(1, SeqCst);
        }
    }

    const VERSION: VersionId = VersionId(1);

    /// A tar of which one member, `x`, was found.
    fn found() -> MemberIndexBuilder {
        let mut found = MemberIndexBuilder::new(ArchiveKind::Tar, 1 << 20);
        let extent = Extent {
            kind: ArchiveKind::Tar,
            storage: Storage::Stored,
            offset: 512,
            size: 3,
            stored_size: 3,
            crc32: None,
            bound: 1 << 20,
        };
        found.push("x", 0, &extent).unwrap();
        found
    }

    fn ask<'a>(early: &'a Early, name: &ObjectName, member: &str) -> Waiting<'a, Extent> {
        let key: Box<str> = member.into();
        let question = Question::Name(key.clone());
        early.ask((name.hash128(), VERSION), question, |asked, answer| {
            asked.new_names.insert(key.clone());
            asked.names.entry(key).or_default().push(answer);
        })
    }

    #[test]
    fn a_question_wakes_the_pass_over_its_archive_and_not_the_others() {
        let (early, found) = (Early::new(1 << 20), found());
        let bell = |name: &ObjectName| std::ptr::from_ref(early.bell((name.hash128(), VERSION)));
        let one = ObjectName::new("bk", "one.tar").unwrap();
        let other = (0..)
            .map(|i| ObjectName::new("bk", format!("{i}.tar")).unwrap())
            .find(|name| bell(name) != bell(&one))
            .unwrap();
        let (woken, other_woken) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
        let (mut firsts, mut other_firsts) = (Some(Firsts::default()), Some(Firsts::default()));
        let pass = early.tell_while(&one, VERSION, &found, &mut firsts, pending::<()>());
        let mut pass = pass.boxed();
        let other = early.tell_while(&other, VERSION, &found, &mut other_firsts, pending::<()>());
        let mut other = other.boxed();
        for (pass, woken) in [(&mut pass, &woken), (&mut other, &other_woken)] {
            let waker = waker(woken.clone());
            assert!(
                pass.poll_unpin(&mut Context::from_waker(&waker))
                    .is_pending()
            );
        }
        let mut asked = ask(&early, &one, "x");
        assert_eq!((woken.0.load(SeqCst), other_woken.0.load(SeqCst)), (1, 0));
        assert!(asked.answer.try_recv().is_err());
        assert!(pass.now_or_never().is_none());
        assert_eq!(asked.answer.try_recv().unwrap().unwrap().offset, 512);
    }

    #[test]
    fn a_pass_looks_at_a_question_again_only_after_it_found_more() {
        let (early, found) = (Early::new(1 << 20), found());
        let name = ObjectName::new("bk", "one.tar").unwrap();
        let mut firsts = Some(Firsts::default());
        let mut look = |which| early.look(&name, VERSION, &found, &mut firsts, which);
        let first = ask(&early, &name, "not yet");
        assert_eq!((look(Look::New), look(Look::New)), (1, 0));
        let second = ask(&early, &name, "nor this");
        assert_eq!((look(Look::New), look(Look::All)), (1, 2));
        drop(first);
        let answered = ask(&early, &name, "x");
        assert_eq!((look(Look::All), look(Look::All)), (2, 1));
        assert_eq!(early.waiting(), 1);
        drop((second, answered));
        assert_eq!((early.waiting(), early.asked.lock().len()), (0, 0));
    }
}
