//! Copies of what other nodes keep, in buckets of which more than one node is to keep everything.
//!
//! Who keeps what is computed ([`View::keepers`](forebay_cluster::View::keepers)), and whoever keeps
//! something takes it from the others who do. For that each node follows the log of each other one:
//! it asks which entries there are that both are to keep, takes those that it lacks, and asks a
//! moment later what has been added since. So what an owner fills is copied soon, and a node that
//! has just become a keeper, or lost a disk, heals in the same way; nobody remembers for another
//! node what that lacks. After a change of the map, of the numbers of copies, or a start of either
//! node, the log is followed from its beginning: names pass again then, and only those bytes that
//! are missing.
//!
//! # Invariants
//!
//! No read waits for a copy. What is taken over is of the version that its name says, never looks
//! fresher than it was, and is left out if the name was written since it was asked for: the engine
//! notes what it knows of writes, then names in doubt are left for later, and only then the other
//! node is asked. At most [`AT_ONCE`] nodes are followed at a time, one step of each is in memory,
//! which is reserved, and all bytes together come no faster than `cluster.hand_over_rate`, which
//! hand-overs share.

use crate::{
    answer::Answers,
    cluster::Cluster,
    give::{READ_BYTES_PER_SECOND, RECORDS_PER_SECOND, STEP_BYTES},
    handover::{HandOver, ask, blocking, unknown_table},
    link::Io,
    message::{Entry, Pulled, What},
    packed,
};
use forebay_cluster::{COPIES_MAX, Unit};
use forebay_core::{
    Error, ObjectName, Reservation, Result, VersionId,
    name::hash_bucket,
    sync::{Mutex, RwLock},
};
use forebay_engine::{BucketRules, EntryName, Lacking};
use forebay_store::{Cached, Walk};
use futures::{StreamExt, stream};
use hashbrown::HashMap;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep, sleep_until};

/// Nodes that are followed at a time.
const AT_ONCE: usize = 2;
/// How often each node is asked what has been added, in small clusters.
const FOLLOW_EVERY: Duration = Duration::from_secs(1);
/// The same for each member of large ones.
const FOLLOW_EVERY_MEMBER: Duration = Duration::from_millis(20);
/// After so long, it is another node's turn.
const TURN: Duration = Duration::from_secs(2);
/// Names of entries in one answer. Each has less than 8 KiB.
const STEP_ENTRIES: u64 = 1024;
/// Entries, and bytes of their names, in one question. (A question is at most 64 KiB.)
const QUESTION_ENTRIES: usize = 256;
const QUESTION_BYTES: usize = 40 << 10;
/// Names in doubt are waited for so many turns.
const DOUBT_TURNS: u32 = 20;
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_LAST: Duration = Duration::from_secs(60);

/// How many nodes keep what is cached of each bucket.
#[derive(Debug)]
pub(crate) struct Rules {
    default: u8,
    /// By the hash of the bucket's name: those that differ.
    buckets: HashMap<u64, u8>,
    checksum: u64,
    most: u8,
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            default: 1,
            buckets: HashMap::new(),
            checksum: 0,
            most: 1,
        }
    }
}

impl Rules {
    fn new(rules: &BucketRules) -> Self {
        let copies = |rule: &forebay_engine::BucketRule| match rule.cache {
            true => rule.copies.clamp(1, COPIES_MAX),
            false => 1,
        };
        let default = copies(&rules.default);
        let each = rules
            .buckets
            .iter()
            .map(|(name, rule)| (hash_bucket(name), copies(rule)));
        let buckets: HashMap<u64, u8> = each.filter(|(_, n)| *n != default).collect();
        let sorted: BTreeSet<_> = buckets.iter().collect();
        let most = buckets.values().copied().chain([default]).max();
        Rules {
            checksum: hash_bucket(&format!("{default} {sorted:?}")),
            most: most.unwrap_or(default),
            default,
            buckets,
        }
    }

    pub(crate) fn of(&self, bucket: u64) -> u8 {
        match self.buckets.is_empty() {
            true => self.default,
            false => self.buckets.get(&bucket).copied().unwrap_or(self.default),
        }
    }
}

/// What is kept of others.
#[derive(Default)]
pub(crate) struct Copied {
    rules: RwLock<Arc<Rules>>,
    entries: AtomicU64,
    bytes: AtomicU64,
    given_bytes: AtomicU64,
    left_out: AtomicU64,
    /// How far other nodes were followed; one for each member.
    following: Mutex<BTreeMap<u64, Following>>,
}

impl Copied {
    pub(crate) fn given(&self, bytes: u64) {
        self.given_bytes.fetch_add(bytes, Relaxed);
    }
}

/// What makes that another node is followed from the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct By {
    table: u64,
    rules: u64,
    /// Of the other node.
    boot: u64,
}

/// How far another node was followed.
#[derive(Default)]
struct Following {
    by: Option<By>,
    after: Option<Walk>,
    /// All that it had was seen once.
    is_whole: bool,
    /// Of its log.
    left_bytes: u64,
    /// Turns in which names were in doubt.
    doubtful: u32,
    failures: u32,
    not_before: Option<Instant>,
}

/// How far the copies are that a node keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopiesStatus {
    /// The most nodes that keep something.
    pub most: u8,
    /// Entries that were copied to this node.
    pub entries: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that this node gave to others who keep copies.
    pub given_bytes: u64,
    /// Entries that were left out, because it was unknown for too long whether they were current.
    pub left_out: u64,
    /// Other members that may have more that this node is to keep.
    pub behind: u64,
    /// Bytes of their logs that are to be looked through, as far as is known.
    pub left_bytes: u64,
}

impl Cluster {
    /// How many nodes keep what is cached of each bucket, from now on.
    pub fn set_copies(&self, rules: &BucketRules) {
        *self.copied().rules.write() = Arc::new(Rules::new(rules));
        self.has_changed_standing();
    }

    fn rules(&self) -> Arc<Rules> {
        self.copied().rules.read().clone()
    }

    /// How many nodes keep what is cached of a bucket.
    pub(crate) fn copies(&self, bucket: &str) -> u8 {
        let rules = self.copied().rules.read();
        match rules.most {
            1 => 1,
            _ => rules.of(hash_bucket(bucket)),
        }
    }

    /// The same by the hash of its name.
    pub(crate) fn copies_in(&self, bucket: u64) -> u8 {
        self.copied().rules.read().of(bucket)
    }

    /// How far the copies are that this node keeps.
    pub fn copies_status(&self) -> CopiesStatus {
        let (copied, rules) = (self.copied(), self.rules());
        let count = |counter: &AtomicU64| counter.load(Relaxed);
        let mut status = CopiesStatus {
            most: rules.most,
            entries: count(&copied.entries),
            bytes: count(&copied.bytes),
            given_bytes: count(&copied.given_bytes),
            left_out: count(&copied.left_out),
            ..CopiesStatus::default()
        };
        if rules.most > 1 {
            let view = self.view();
            let table = view.placed().checksum();
            let following = copied.following.lock();
            for member in view.map().members.iter().filter(|m| m.id != self.me().node) {
                let of = following.get(&member.id);
                let is_now = |by: By| (by.table, by.rules) == (table, rules.checksum);
                let is_whole = of.is_some_and(|of| of.is_whole && of.by.is_some_and(is_now));
                status.behind += u64::from(!is_whole);
                status.left_bytes += of.map_or(0, |of| of.left_bytes);
            }
        }
        status
    }
}

/// A connection to a node that is followed.
struct Link {
    io: Box<dyn Io>,
    boot: u64,
}

/// What is to be done of a step.
enum Took {
    All,
    /// Some names are in doubt.
    NotAll,
}

impl HandOver {
    pub(crate) async fn copy_all(&self) {
        let mut links: BTreeMap<u64, Link> = BTreeMap::new();
        loop {
            let others = match self.cluster.rules().most {
                1 => Vec::new(),
                _ => self.others(),
            };
            let due: Vec<u64> = {
                let mut following = self.cluster.copied().following.lock();
                following.retain(|id, _| others.contains(id));
                let now = Instant::now();
                let is_due = |id: &u64| {
                    let of = following.get(id).and_then(|of| of.not_before);
                    of.is_none_or(|at| at <= now)
                };
                others.iter().copied().filter(is_due).collect()
            };
            links.retain(|id, _| others.contains(id));
            let may = |id: &u64| self.cluster.answers(*id) && !self.cluster.is_pulled_from(*id);
            let turns: Vec<_> = due
                .into_iter()
                .filter(may)
                .map(|id| (id, links.remove(&id)))
                .collect();
            let mut turns = stream::iter(turns)
                .map(|(id, link)| async move { (id, self.turn(id, link).await) })
                .buffer_unordered(AT_ONCE);
            let mut has_more = false;
            while let Some((id, turn)) = turns.next().await {
                if let Some((link, more)) = turn {
                    links.insert(id, link);
                    has_more |= more;
                }
            }
            let members = others.len() as u32;
            if !has_more {
                sleep(FOLLOW_EVERY.max(FOLLOW_EVERY_MEMBER * members)).await;
            }
        }
    }

    fn others(&self) -> Vec<u64> {
        let me = self.cluster.me().node;
        let members = self.cluster.map().members.into_iter().map(|m| m.id);
        members.filter(|id| *id != me).collect()
    }

    /// Follows one node for a while. Whether there is more.
    async fn turn(&self, id: u64, link: Option<Link>) -> Option<(Link, bool)> {
        let followed = self.follow(id, link).await;
        let mut following = self.cluster.copied().following.lock();
        let of = following.entry(id).or_default();
        match followed {
            Ok(done) => {
                of.failures = 0;
                Some(done)
            }
            Err(e) => {
                let pause = (RETRY_FIRST * (1 << of.failures.min(8))).min(RETRY_LAST);
                of.not_before = Some(Instant::now() + pause);
                of.failures = of.failures.saturating_add(1);
                let node = format_args!("{id:016x}");
                // The first ones are usual: maps come to nodes one after the other.
                match of.failures {
                    ..4 => {
                        tracing::debug!(node, error = %e.describe(), "what another node has was \
                        not copied: it is asked again")
                    }
                    _ => {
                        tracing::warn!(node, error = %e.describe(), "what another node has cannot \
                        be copied: it is asked again later")
                    }
                }
                None
            }
        }
    }

    async fn follow(&self, id: u64, link: Option<Link>) -> Result<(Link, bool)> {
        let until = Instant::now() + TURN;
        let cluster = &self.cluster;
        let mut link = match link {
            Some(link) => link,
            None => {
                let (io, theirs) = cluster.meet(id).await?;
                if !theirs.copies {
                    return Err(Error::unsupported("a node of an earlier release")
                        .hint("it makes no copies: upgrade it"));
                }
                let boot = theirs.boot;
                Link { io, boot }
            }
        };
        let (view, rules) = (cluster.view(), cluster.rules());
        let placed = view.placed().clone();
        let by = By {
            // The first time it is computed.
            table: blocking(move || Ok(placed.checksum())).await?,
            rules: rules.checksum,
            boot: link.boot,
        };
        let mut after = {
            let mut following = cluster.copied().following.lock();
            let of = following.entry(id).or_default();
            if of.by != Some(by) {
                (of.by, of.after, of.is_whole) = (Some(by), None, false);
            }
            of.after.clone()
        };
        loop {
            let what = What::Copies {
                table: by.table,
                rules: by.rules,
                after: after.clone(),
            };
            let pulled = ask(&mut link.io, cluster.question(what)).await?;
            let pulled = pulled.words::<Pulled>()?;
            let lies = |what: &str| Error::corrupt(format!("node {id:016x} {what}"));
            let wrong = |next: &Walk| after.as_ref().is_some_and(|after| !next.is_after(after));
            if pulled.next.as_ref().is_some_and(wrong) {
                return Err(lies("does not get on with what it has"));
            }
            let (named, memory) = self.receive(&mut link.io, &pulled, id).await?;
            let entries: Vec<Entry> = serde_json::from_slice(&named)
                .map_err(|e| lies(&format!("names entries that are none: {e}")))?;
            drop((named, memory));
            let mut names = Vec::with_capacity(entries.len());
            for entry in entries {
                let entry = named_by(entry)?;
                let unit = Unit::at(entry.name.hash128(), entry.at());
                if view.is_keeper(&unit, rules.of(hash_bucket(entry.name.bucket()))) {
                    names.push(entry);
                }
            }
            let took = self.copy_step(&mut link, id, names).await?;
            {
                let mut following = cluster.copied().following.lock();
                let of = following.entry(id).or_default();
                if matches!(took, Took::NotAll) && of.doubtful < DOUBT_TURNS {
                    of.doubtful += 1;
                    return Ok((link, false));
                }
                of.doubtful = 0;
                of.left_bytes = pulled.left;
                let is_end = pulled.next.is_none();
                of.is_whole |= is_end;
                of.after = pulled.next.or(pulled.again);
                after = of.after.clone();
                if is_end {
                    return Ok((link, false));
                }
            }
            if Instant::now() >= until {
                return Ok((link, true));
            }
        }
    }

    /// Takes those of these entries that this node lacks.
    async fn copy_step(&self, link: &mut Link, id: u64, names: Vec<EntryName>) -> Result<Took> {
        if names.is_empty() {
            return Ok(Took::All);
        }
        let copied = self.cluster.copied();
        let lacking = self.engine.lacking(names).await?;
        // Who is not in doubt now was told to everybody, or not at all yet: then the engine knows
        // when it takes the copy.
        let (doubtful, mut lacking): (Vec<_>, Vec<_>) = lacking
            .into_iter()
            .partition(|one| self.cluster.is_in_doubt(&one.entry.name));
        while !lacking.is_empty() {
            let mut length = 0;
            let fitting = lacking.iter().take(QUESTION_ENTRIES).take_while(|one| {
                length += longest(&one.entry.name);
                length <= QUESTION_BYTES
            });
            let asked = fitting.count().max(1);
            let looked = self.copy_some(link, id, &lacking[..asked]).await?;
            lacking.drain(..looked);
        }
        if doubtful.is_empty() {
            return Ok(Took::All);
        }
        let turns = copied.following.lock().get(&id).map_or(0, |of| of.doubtful);
        if turns >= DOUBT_TURNS {
            copied.left_out.fetch_add(doubtful.len() as u64, Relaxed);
        }
        Ok(Took::NotAll)
    }

    /// Asks for some entries, and keeps what comes. How many were looked for.
    async fn copy_some(&self, link: &mut Link, id: u64, asked: &[Lacking]) -> Result<usize> {
        let lies = |what: &str| Error::corrupt(format!("node {id:016x} {what}"));
        let asked_secs = self.engine.asking_at();
        let what = What::Copy {
            entries: asked.iter().map(|one| entry_of(&one.entry)).collect(),
        };
        let pulled = ask(&mut link.io, self.cluster.question(what)).await?;
        let pulled = pulled.words::<Pulled>()?;
        let looked = pulled.looked as usize;
        if !(1..=asked.len()).contains(&looked) {
            return Err(lies("did not look for what it was asked for"));
        }
        let (packed, _memory) = self.receive(&mut link.io, &pulled, id).await?;
        let held = packed::unpack(packed, asked_secs)?;
        let mut expected: HashMap<&EntryName, &Lacking> = asked[..looked]
            .iter()
            .map(|one| (&one.entry, one))
            .collect();
        let mut entries = Vec::with_capacity(held.len());
        for held in held {
            let Some(lacking) = expected.remove(&EntryName::of(&held)) else {
                return Err(lies(&format!(
                    "sent {}, which it was not asked for",
                    held.name
                )));
            };
            entries.push((held, lacking.clone()));
        }
        let taken = self.engine.take_copies(entries).await?;
        let copied = self.cluster.copied();
        copied.entries.fetch_add(taken.entries, Relaxed);
        copied.bytes.fetch_add(taken.bytes, Relaxed);
        self.pace(pulled.bytes).await;
        Ok(looked)
    }
}

/// The longest text that a name takes in a question.
fn longest(name: &ObjectName) -> usize {
    100 + 6 * (name.bucket().len() + name.key().len())
}

fn entry_of(entry: &EntryName) -> Entry {
    Entry {
        bucket: entry.name.bucket().to_owned(),
        key: entry.name.key().to_owned(),
        version: entry.version.0,
        chunk: entry.chunk,
    }
}

fn named_by(entry: Entry) -> Result<EntryName> {
    Ok(EntryName {
        name: ObjectName::new(entry.bucket, entry.key)?,
        version: VersionId(entry.version),
        chunk: entry.chunk,
    })
}

impl Answers {
    /// Answers [`What::Copies`] with one step.
    pub(crate) async fn copies(
        &self,
        cluster: &Arc<Cluster>,
        asker: u64,
        (table, checksum): (u64, u64),
        after: Option<Walk>,
    ) -> Result<(Pulled, Vec<u8>, ())> {
        let step = self.gives.acquire().await;
        let _step = step.map_err(|_| Error::internal("nothing is copied any more"))?;
        let began = Instant::now();
        let (view, rules) = (cluster.view(), cluster.rules());
        if rules.checksum != checksum {
            return Err(
                Error::busy("this node has other numbers of copies in its configuration")
                    .hint("give all nodes the same buckets and cache.mirror"),
            );
        }
        let (placed, epoch) = (view.placed().clone(), view.map().epoch);
        if blocking(move || Ok(placed.checksum())).await? != table {
            return Err(unknown_table(epoch));
        }
        let me = cluster.me().node;
        let wanted = move |entry: &Cached, at: u64| {
            let copies = rules.of(entry.bucket);
            copies > 1 && {
                let unit = Unit::at(entry.name, at);
                let both = view.keepers(&unit, copies);
                both.filter(|id| *id == me || *id == asker).count() == 2
            }
        };
        let engine = self.engine();
        let Some((step, found)) = engine.entries_here(after, STEP_ENTRIES, wanted).await? else {
            return Ok((Pulled::default(), b"[]".to_vec(), ()));
        };
        let named: Vec<Entry> = found.iter().map(|(entry, _)| entry_of(entry)).collect();
        let named = serde_json::to_vec(&named)
            .map_err(|e| Error::internal("names that cannot be written").caused_by(e))?;
        pause(began, step.records, step.read_bytes).await;
        let pulled = Pulled {
            bytes: named.len() as u64,
            entries: found.len() as u64,
            next: step.next,
            left: step.left_bytes,
            again: step.again,
            ..Pulled::default()
        };
        Ok((pulled, named, ()))
    }

    /// Answers [`What::Copy`].
    pub(crate) async fn copy(
        &self,
        entries: Vec<Entry>,
    ) -> Result<(Pulled, Vec<u8>, (Reservation, Reservation))> {
        let step = self.gives.acquire().await;
        let _step = step.map_err(|_| Error::internal("nothing is copied any more"))?;
        let began = Instant::now();
        let names = entries
            .into_iter()
            .map(named_by)
            .collect::<Result<Vec<_>>>()?;
        let engine = self.engine();
        let (mut held, looked, memory) = engine.held_here(names, STEP_BYTES).await?;
        let bytes = held.iter().map(|held| held.bytes()).sum::<u64>();
        // What is sent is a copy.
        let copy = engine.budget().reserve(bytes).await?;
        let now = engine.now_secs();
        self.distrust(&mut held);
        let packed = packed::pack(&held, now)?;
        pause(began, looked as u64, bytes).await;
        let pulled = Pulled {
            bytes: packed.len() as u64,
            entries: held.len() as u64,
            looked: looked as u64,
            ..Pulled::default()
        };
        Ok((pulled, packed, (memory, copy)))
    }
}

/// Leaves the disks to reads.
async fn pause(began: Instant, records: u64, bytes: u64) {
    let seconds = (records as f64 / RECORDS_PER_SECOND).max(bytes as f64 / READ_BYTES_PER_SECOND);
    sleep_until(began + Duration::from_secs_f64(seconds)).await;
}
