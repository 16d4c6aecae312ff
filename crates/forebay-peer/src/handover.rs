//! Taking over what former owners have of the slots that this node owns, in the background.
//!
//! For each former owner one pass at a time, answer by answer ([`crate::give`]), on a connection of
//! its own: reads have theirs. What was asked of it, and where it stands, is kept for the next
//! attempt; after a restart it begins anew, and the former owner says at once if there is nothing
//! left. When a pass ends, this node has everything that the former owner had of its slots by the
//! map with which the pass began. Then the former owner is told, and again now and then, in case it
//! has forgotten: so no word is lost for good.
//!
//! # Invariants
//!
//! At most [`PULLS_MAX`] former owners are asked at a time, together no faster than the configured
//! rate; one answer of each is in memory, which is reserved. Nothing that this node keeps goes for
//! what an *active* member has: that is asked for when it is read. What a draining one has would be
//! lost, so it is put like everything else: the evictor takes what goes first.

use crate::{
    cluster::Cluster,
    give::ANSWER_MAX_BYTES,
    link::{Io, greet},
    message::{Hello, Kind, Message, Moving, Pulled, Question, What, hear, say},
    packed,
};
use bytes::{Bytes, BytesMut};
use forebay_cluster::{Placed, Unit, View};
use forebay_core::{Error, ErrorKind, Reservation, Result, sync::Mutex, threads};
use forebay_engine::{Engine, TakenOver};
use forebay_store::Walk;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    io::AsyncWriteExt,
    time::{Instant, sleep, sleep_until, timeout},
};

/// Former owners that are asked at a time.
const PULLS_MAX: usize = 2;
/// How often it looks whether there is something to do.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often it looks though the map is the same.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// A former owner that was told that this node has everything is told again after so long.
const TELL_AGAIN: Duration = Duration::from_secs(30);
/// After a failure, a former owner is asked again after so long, and then twice as long each time.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_LAST: Duration = Duration::from_secs(60);
/// After a pull that stopped because this node has no room.
const RETRY_FULL: Duration = Duration::from_secs(600);
/// The slots of so many askers are remembered: at most 1 MiB each.
const OWED_MAX: usize = 8;
/// For a connection. (A pull may wait: nobody waits for it.)
const CONNECT: Duration = Duration::from_secs(2);
/// For a sign of life.
const SILENCE: Duration = Duration::from_secs(5);
/// For an answer, though there are signs of life.
const ANSWER: Duration = Duration::from_secs(180);

/// What was moved between owners.
#[derive(Default)]
pub(crate) struct Moved {
    pulled_entries: AtomicU64,
    pulled_bytes: AtomicU64,
    given_entries: AtomicU64,
    given_bytes: AtomicU64,
    /// Of the pulls that were begun.
    pulls: Mutex<BTreeMap<u64, Pull>>,
    /// [`Cluster::changes`], and the slots that were gained and lost then.
    counted: Mutex<Option<(u64, u64, u64)>>,
    /// What is owed to those who asked last.
    owed: Mutex<BTreeMap<u64, Owed>>,
}

/// The slots that one asker is owed, while nothing changes.
struct Owed {
    table: u64,
    /// [`Cluster::changes`] then.
    changes: u64,
    slots: Arc<Vec<u32>>,
}

impl Moved {
    pub(crate) fn given(&self, entries: u64, bytes: u64) {
        self.given_entries.fetch_add(entries, Relaxed);
        self.given_bytes.fetch_add(bytes, Relaxed);
    }
}

/// What is known of a former owner.
#[derive(Default)]
struct Pull {
    /// The pass that is not at its end: by which table, and where it goes on.
    unfinished: Option<(Arc<Placed>, Option<Walk>)>,
    /// Since the pass began: when, and how much was left of the log then and now.
    began: Option<(Instant, u64, u64)>,
    /// When something came.
    progress: Option<Instant>,
    /// The map with which the last whole pass began.
    done: Option<Arc<Placed>>,
    /// When the former owner was last told of that.
    told: Option<Instant>,
    /// It is not asked before.
    not_before: Option<Instant>,
    failures: u32,
    is_full: bool,
}

impl Pull {
    fn fails(&mut self, e: &Error, former: u64) {
        let pause = (RETRY_FIRST * (1 << self.failures.min(8))).min(RETRY_LAST);
        self.not_before = Some(Instant::now() + pause);
        self.failures = self.failures.saturating_add(1);
        // The first ones are usual: maps come to nodes one after the other.
        match self.failures {
            ..3 => tracing::debug!(node = format_args!("{former:016x}"), error = %e.describe(),
                "a former owner did not hand over: it is asked again"),
            _ => tracing::warn!(node = format_args!("{former:016x}"), error = %e.describe(),
                "a former owner does not hand over what it has: it is asked again later"),
        }
    }
}

/// How far the hand-over of slots is, at one node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HandOverStatus {
    /// Of the map by which it goes.
    pub epoch: u64,
    /// Slots of this node whose former owners are still asked for what it lacks.
    pub gaining_slots: u64,
    /// Slots that this node had, and whose owners are not known to have everything.
    pub losing_slots: u64,
    /// Entries that it took over.
    pub pulled_entries: u64,
    /// Their bytes.
    pub pulled_bytes: u64,
    /// Entries that it gave to new owners.
    pub given_entries: u64,
    /// Their bytes, with what is said of them.
    pub given_bytes: u64,
    /// When it is probably over; where it is not known how fast it goes, when it is at the latest.
    pub left: Option<Duration>,
    /// Since something came; `None` where nothing is being taken over.
    pub idle: Option<Duration>,
    /// There was no room for more, without giving up what this node owns.
    pub is_full: bool,
}

impl Cluster {
    /// How far the hand-over of slots is. After a change it looks at all slots.
    pub fn hand_over_status(&self) -> HandOverStatus {
        let moved = self.moved();
        let changes = self.changes();
        let view = self.view();
        let (gaining_slots, losing_slots) = self.slots_moving(changes, &view);
        let count = |counter: &AtomicU64| counter.load(Relaxed);
        let pulls = moved.pulls.lock();
        let under_way = || pulls.values().filter(|pull| pull.unfinished.is_some());
        let speed = |pull: &Pull| {
            let (began, first, left) = pull.began?;
            let gone = first.checked_sub(left).filter(|gone| *gone > 0)?;
            Some(began.elapsed().mul_f64(left as f64 / gone as f64))
        };
        let known = under_way().filter_map(speed).max();
        let is_moving = gaining_slots + losing_slots > 0;
        let closes = view.closes().map(|at| at.saturating_sub(self.now()));
        HandOverStatus {
            epoch: view.map().epoch,
            gaining_slots,
            losing_slots,
            pulled_entries: count(&moved.pulled_entries),
            pulled_bytes: count(&moved.pulled_bytes),
            given_entries: count(&moved.given_entries),
            given_bytes: count(&moved.given_bytes),
            left: known.or(closes).filter(|_| is_moving),
            idle: under_way()
                .filter_map(|pull| pull.progress.or(pull.began.map(|(began, ..)| began)))
                .map(|at| at.elapsed())
                .min(),
            is_full: gaining_slots > 0 && pulls.values().any(|pull| pull.is_full),
        }
    }

    /// How many slots this node gains and loses by this view, which was looked at after `changes`.
    fn slots_moving(&self, changes: u64, view: &View) -> (u64, u64) {
        let counted = *self.moved().counted.lock();
        match counted {
            _ if !view.has_changed() => (0, 0),
            // If it has changed since, the view may be newer than what was counted.
            Some((at, gaining, losing)) if at == changes && self.changes() == changes => {
                (gaining, losing)
            }
            _ => {
                let gaining = view.handing_over().count() as u64;
                let losing = view.losing().values().sum();
                *self.moved().counted.lock() = Some((changes, gaining, losing));
                (gaining, losing)
            }
        }
    }

    /// The slots that this node had and that `asker` owns by this table, which is that of a map of
    /// this epoch; and the cluster's seed.
    ///
    /// # Errors
    /// `Busy` if this node does not go by that table yet, or any more; or if it cannot be told whether
    /// it does.
    pub(crate) async fn owed(
        &self,
        asker: u64,
        table: u64,
        by_epoch: u64,
    ) -> Result<(Arc<Vec<u32>>, u64)> {
        // Before the view is looked at: what is remembered is never newer than it says.
        let changes = self.changes();
        let view = self.view();
        let (epoch, seed) = (view.map().epoch, view.map().seed);
        // A table may come back, as when a node that was forgotten joins again: a node that knows only
        // the earlier map with that table owes nothing by it.
        let counts_alike = self.counts_alike();
        if counts_alike && epoch < by_epoch {
            return Err(unknown_table(epoch));
        }
        if let Some(owed) = self.moved().owed.lock().get(&asker)
            && (owed.table, owed.changes) == (table, changes)
            && self.changes() == changes
        {
            return Ok((owed.slots.clone(), seed));
        }
        let slots = blocking(move || {
            let Some(placed) = view.placed_by(table) else {
                return Err(unknown_table(epoch));
            };
            // Epochs do not say whose map is newer. Whichever node goes by the older one gets the newer
            // one soon.
            if !counts_alike && view.disputes(asker, placed) {
                return Err(unknown_table(epoch));
            }
            Ok(Arc::new(view.owed(asker, placed)))
        })
        .await?;
        let mut known = self.moved().owed.lock();
        if known.len() >= OWED_MAX {
            known.clear();
        }
        let owed = Owed {
            table,
            changes,
            slots: slots.clone(),
        };
        known.insert(asker, owed);
        Ok((slots, seed))
    }

    /// Whether a map has the same epoch at all nodes: where nodes hold no leases, each may have epochs of
    /// its own.
    fn counts_alike(&self) -> bool {
        self.telling().is_some()
    }

    /// `owner` has everything that this node had of what it owns by this table, which was that of a map
    /// of this epoch.
    ///
    /// # Errors
    /// As [`Cluster::owed`].
    pub(crate) async fn release(&self, owner: u64, table: u64, by_epoch: u64) -> Result<()> {
        let view = self.view();
        let mine = view.map().epoch;
        let counts_alike = self.counts_alike();
        if counts_alike && mine < by_epoch {
            return Err(unknown_table(mine));
        }
        let (slots, epoch) = blocking(move || {
            let Some(placed) = view.placed_by(table) else {
                return Err(unknown_table(mine));
            };
            let epoch = match !counts_alike || view.is_still(table, by_epoch) {
                true => placed.map().epoch,
                // The slots had other owners in between. The owner did not speak of what those had.
                false => by_epoch,
            };
            Ok((view.owed(owner, placed), epoch))
        })
        .await?;
        self.change_view(|view| slots.iter().for_each(|slot| view.released(*slot, epoch)));
        if !slots.is_empty() {
            tracing::info!(
                node = format_args!("{owner:016x}"),
                slots = slots.len(),
                "the owner of slots that this node had has everything that was here"
            );
        }
        Ok(())
    }

    /// Whether a pass over what a former owner has is under way: it brings everything.
    pub(crate) fn is_pulled_from(&self, node: u64) -> bool {
        let pulls = self.moved().pulls.lock();
        let pull = pulls.get(&node);
        pull.is_some_and(|pull| pull.unfinished.is_some() && !pull.is_full)
    }

    /// What this node says of itself to others.
    pub(crate) async fn moving(self: &Arc<Self>) -> Result<Moving> {
        let cluster = self.clone();
        let status = blocking(move || Ok(cluster.hand_over_status())).await?;
        Ok(Moving {
            epoch: status.epoch,
            gaining_slots: status.gaining_slots,
            losing_slots: status.losing_slots,
            pulled_bytes: status.pulled_bytes,
            left_secs: status.left.map(|left| left.as_secs()),
            is_full: status.is_full,
        })
    }

    /// How far each of these members is, by what they say; those that do not answer within `patience`
    /// are left out.
    pub async fn others_moving(
        &self,
        members: &[u64],
        patience: Duration,
    ) -> BTreeMap<u64, HandOverStatus> {
        let ask = async |id: u64| {
            let told = timeout(patience, self.ask_words::<Moving>(id, What::Moving)).await;
            let told = told.ok()?.ok()?;
            let status = HandOverStatus {
                epoch: told.epoch,
                gaining_slots: told.gaining_slots,
                losing_slots: told.losing_slots,
                pulled_bytes: told.pulled_bytes,
                left: told.left_secs.map(Duration::from_secs),
                is_full: told.is_full,
                ..HandOverStatus::default()
            };
            Some((id, status))
        };
        let told = futures::future::join_all(members.iter().map(|id| ask(*id))).await;
        told.into_iter().flatten().collect()
    }

    /// Asks a member something that is answered by words alone, on a connection of its own.
    async fn ask_words<T: serde::de::DeserializeOwned>(&self, id: u64, what: What) -> Result<T> {
        let mut io = self.call(id).await?;
        let answer = ask(&mut io, self.question(what)).await?;
        answer.words()
    }

    pub(crate) fn question(&self, what: What) -> Question {
        Question {
            tags: false,
            request: None,
            epoch: self.epoch(),
            bucket: String::new(),
            key: String::new(),
            what,
        }
    }

    /// A connection to a member, for other questions than those of reads.
    async fn call(&self, id: u64) -> Result<Box<dyn Io>> {
        Ok(self.meet(id).await?.0)
    }

    /// The same, with what the member says of itself.
    pub(crate) async fn meet(&self, id: u64) -> Result<(Box<dyn Io>, Hello)> {
        let Some(address) = self.address_of(id) else {
            return Err(Error::origin_unavailable(format!(
                "node {id:016x} has left the cluster"
            )));
        };
        let mine = self.me().hello();
        let greeted = greet(self.dial(), id, &address, &mine, CONNECT).await;
        let unreachable =
            |what| Error::origin_unavailable(format!("node {id:016x} at {address}: {what}"));
        let (io, theirs) = greeted.map_err(unreachable)?;
        match theirs.node == id {
            true => Ok((io, theirs)),
            false => Err(unreachable(format!("node {:016x} is there", theirs.node))),
        }
    }
}

pub(crate) fn unknown_table(epoch: u64) -> Error {
    Error::busy(format!(
        "this node, which goes by map {epoch}, does not know that table of owners"
    ))
    .hint("maps come to nodes one after the other: ask again later")
}

pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = threads::blocking(work).await;
    done.map_err(|e| e.context("looking at slots"))?
}

/// Asks, and returns the first message of the answer.
pub(crate) async fn ask(io: &mut Box<dyn Io>, question: Question) -> Result<Message> {
    let said = async {
        say(io, Kind::Question, &question).await?;
        io.flush().await
    };
    timeout(SILENCE, said)
        .await
        .map_err(|_| no_answer())?
        .map_err(broken)?;
    let message = next(io).await?;
    match message.kind {
        Kind::Found => Ok(message),
        Kind::Failed => Err(message.error()),
        kind => Err(Error::corrupt(format!("a node answered with a {kind:?}"))),
    }
}

/// The next message that says more than that the other node is working.
async fn next(io: &mut Box<dyn Io>) -> Result<Message> {
    let next = async {
        loop {
            match hear(io, SILENCE).await.map_err(broken)? {
                None => return Err(broken(io::ErrorKind::UnexpectedEof.into())),
                Some(message) if message.kind == Kind::Working => {}
                Some(message) => return Ok(message),
            }
        }
    };
    timeout(ANSWER, next).await.map_err(|_| no_answer())?
}

fn broken(e: io::Error) -> Error {
    Error::origin_unavailable(format!("a hand-over broke off: {e}"))
}

fn no_answer() -> Error {
    Error::timeout(format!("a node was still working after {ANSWER:?}"))
}

/// Pulls what this node gained, as long as it is polled.
pub struct HandOver {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) engine: Engine,
    bytes_per_second: u64,
    /// When the next answer may be taken.
    next: Mutex<Instant>,
}

/// How a pull ended.
enum Ended {
    All,
    Full,
}

impl HandOver {
    /// For a node of this cluster; 0: nothing is pulled.
    pub fn new(cluster: Arc<Cluster>, engine: Engine, bytes_per_second: u64) -> Self {
        HandOver {
            cluster,
            engine,
            bytes_per_second,
            next: Mutex::new(Instant::now()),
        }
    }

    /// Pulls after each change of the map, and copies what there is to be more than once, until it
    /// is dropped.
    pub async fn run(&self) {
        match self.bytes_per_second {
            0 => std::future::pending().await,
            _ => futures::join!(self.pull_all(), self.tell_all(), self.copy_all()),
        };
    }

    async fn pull_all(&self) {
        let mut pulls: FuturesUnordered<BoxFuture<'_, u64>> = FuturesUnordered::new();
        let mut running: Vec<u64> = Vec::new();
        let mut looked: Option<(u64, Instant)> = None;
        let mut lacking: BTreeMap<u64, u64> = BTreeMap::new();
        loop {
            let view = self.cluster.view();
            let changes = self.cluster.changes();
            if !view.has_changed() {
                // Nothing is asked of anybody, as long as the map stays.
                self.cluster.moved().pulls.lock().clear();
                (lacking, looked) = (BTreeMap::new(), None);
            } else if looked.is_none_or(|(at, when)| at != changes || when.elapsed() > LOOK_AGAIN) {
                looked = Some((changes, Instant::now()));
                let pulled = self.pulled();
                let formers = blocking(move || Ok(view.formers(&pulled))).await;
                lacking = formers.unwrap_or_default();
            }
            let now = Instant::now();
            for &former in lacking.keys() {
                let is_due = {
                    let mut pulls = self.cluster.moved().pulls.lock();
                    let pull = pulls.entry(former).or_default();
                    pull.not_before.is_none_or(|at| at <= now)
                };
                let may = is_due && self.cluster.answers(former) && !running.contains(&former);
                if may && pulls.len() < PULLS_MAX {
                    running.push(former);
                    pulls.push(self.attempt(former).boxed());
                }
            }
            tokio::select! {
                Some(former) = pulls.next(), if !pulls.is_empty() => {
                    running.retain(|id| *id != former);
                    looked = None;
                }
                () = sleep(LOOK_EVERY) => {}
            }
        }
    }

    /// By which epoch this node has everything that each former owner had.
    fn pulled(&self) -> BTreeMap<u64, u64> {
        let pulls = self.cluster.moved().pulls.lock();
        let done = |(id, pull): (&u64, &Pull)| Some((*id, pull.done.as_ref()?.map().epoch));
        pulls.iter().filter_map(done).collect()
    }

    async fn attempt(&self, former: u64) -> u64 {
        let ended = self.pull(former).await;
        {
            let mut pulls = self.cluster.moved().pulls.lock();
            let pull = pulls.entry(former).or_default();
            match &ended {
                Ok(Ended::All) => (pull.failures, pull.is_full) = (0, false),
                Ok(Ended::Full) => {
                    pull.is_full = true;
                    pull.not_before = Some(Instant::now() + RETRY_FULL);
                }
                Err(e) => pull.fails(e, former),
            }
        }
        if matches!(ended, Ok(Ended::All)) {
            self.close_windows().await;
            self.tell(former).await;
        }
        former
    }

    /// Closes the windows of slots of which this node has everything now.
    async fn close_windows(&self) {
        let (view, pulled) = (self.cluster.view(), self.pulled());
        let epoch = view.map().epoch;
        let slots = blocking(move || Ok(view.all_pulled(&pulled))).await;
        let slots = slots.unwrap_or_default();
        self.cluster
            .change_view(|view| slots.iter().for_each(|slot| view.handed_over(*slot, epoch)));
    }

    /// Tells a former owner by which table this node has everything.
    async fn tell(&self, former: u64) {
        let done = {
            let mut pulls = self.cluster.moved().pulls.lock();
            let pull = pulls.entry(former).or_default();
            pull.told = Some(Instant::now());
            pull.done.clone()
        };
        let Some(done) = done else {
            return;
        };
        let (table, epoch) = (done.checksum(), done.map().epoch);
        if !self.cluster.view().is_still(table, epoch) {
            // It had slots in between: what it fetched then was not taken over.
            return;
        }
        let question = Question {
            epoch,
            ..self.cluster.question(What::Released { table })
        };
        let told = async {
            let mut io = self.cluster.call(former).await?;
            ask(&mut io, question).await?.words::<Pulled>()
        };
        if let Err(e) = told.await {
            tracing::debug!(node = format_args!("{former:016x}"), error = %e, "a former owner was \
                not told that everything was taken over: it is told again");
        }
    }

    async fn tell_all(&self) {
        loop {
            sleep(LOOK_EVERY).await;
            self.tell_again().await;
        }
    }

    /// Tells those again that may have forgotten, or did not hear it.
    async fn tell_again(&self) {
        let due = || {
            let pulls = self.cluster.moved().pulls.lock();
            let is_due = |pull: &Pull| {
                let told = pull.told.map(|at| at.elapsed());
                pull.done.is_some() && told.is_none_or(|ago| ago >= TELL_AGAIN)
            };
            let due = pulls.iter().filter(|(_, pull)| is_due(pull));
            let due = due.map(|(id, _)| *id);
            due.filter(|id| self.cluster.answers(*id))
                .collect::<Vec<_>>()
        };
        let due = due().into_iter().map(|former| self.tell(former));
        futures::future::join_all(due).await;
    }

    /// One pass over what a former owner has, or the rest of one.
    async fn pull(&self, former: u64) -> Result<Ended> {
        let cluster = &self.cluster;
        let placed = cluster.view().placed().clone();
        let (placed, mut after) = {
            let mut pulls = cluster.moved().pulls.lock();
            let pull = pulls.entry(former).or_default();
            if pull.unfinished.is_none() {
                pull.began = None;
            }
            pull.unfinished.get_or_insert((placed, None)).clone()
        };
        // The first time it is computed.
        let counted = placed.clone();
        let table = blocking(move || Ok(counted.checksum())).await?;
        let mut io = cluster.call(former).await?;
        loop {
            let what = What::Pull {
                table,
                after: after.clone(),
            };
            let asked_secs = self.engine.asking_at();
            let question = Question {
                epoch: placed.map().epoch,
                ..cluster.question(what)
            };
            let pulled = match ask(&mut io, question).await {
                Err(e)
                    if e.kind() == ErrorKind::Busy
                        && cluster.view().placed().map().epoch != placed.map().epoch =>
                {
                    // The other node may never know that table again: by the newest one, anew.
                    let mut pulls = cluster.moved().pulls.lock();
                    pulls.entry(former).or_default().unfinished = None;
                    return Err(e);
                }
                answer => answer?.words::<Pulled>()?,
            };
            let taken = self
                .take(&mut io, &pulled, &placed, former, asked_secs)
                .await?;
            let wrong = |next: &Walk| after.as_ref().is_some_and(|after| !next.is_after(after));
            if pulled.next.as_ref().is_some_and(wrong) {
                return Err(Error::corrupt(format!(
                    "node {former:016x} does not get on with what it hands over"
                )));
            }
            {
                let mut pulls = cluster.moved().pulls.lock();
                let pull = pulls.entry(former).or_default();
                let (now, left) = (Instant::now(), pulled.left);
                let (began, first, _) = pull.began.unwrap_or((now, left, left));
                // A pass over what is new has more left than the end of the one before it.
                (pull.began, pull.progress) = (Some((began, first.max(left), left)), Some(now));
                if taken.is_full {
                    drop(pulls);
                    tracing::info!(
                        node = format_args!("{former:016x}"),
                        "the cache has no room \
                        for more of what a former owner has: it is asked for that when it is read"
                    );
                    return Ok(Ended::Full);
                }
                match &pulled.next {
                    None => {
                        (pull.unfinished, pull.began) = (None, None);
                        pull.done = Some(placed.clone());
                    }
                    Some(next) => pull.unfinished = Some((placed.clone(), Some(next.clone()))),
                }
            }
            if pulled.next.is_none() {
                tracing::info!(
                    node = format_args!("{former:016x}"),
                    epoch = placed.map().epoch,
                    "everything that a former owner had was taken over"
                );
                return Ok(Ended::All);
            }
            after = pulled.next;
            self.pace(pulled.bytes).await;
        }
    }

    /// Takes the bytes of one answer, and keeps what is in them.
    async fn take(
        &self,
        io: &mut Box<dyn Io>,
        pulled: &Pulled,
        placed: &Arc<Placed>,
        former: u64,
        asked_secs: u32,
    ) -> Result<TakenOver> {
        let lies = |what: String| Error::corrupt(format!("node {former:016x} {what}"));
        let (packed, _memory) = self.receive(io, pulled, former).await?;
        let mut entries = packed::unpack(packed, asked_secs)?;
        let me = self.cluster.me().node;
        for entry in &entries {
            if placed.owner(&Unit::at(entry.name.hash128(), entry.at())) != Some(me) {
                let what = format!("handed over {}, which is not this node's", entry.name);
                return Err(lies(what));
            }
        }
        if entries.len() as u64 != pulled.entries {
            return Err(lies(format!(
                "announced {} entries, and sent {}",
                pulled.entries,
                entries.len()
            )));
        }
        let view = self.cluster.view();
        // By a newer map it may be another's.
        entries.retain(|entry| view.owns(&Unit::at(entry.name.hash128(), entry.at())));
        let cluster = self.cluster.clone();
        let is_old = move |name: &_| cluster.is_overtaken(name);
        let evicts = self.cluster.drains(former);
        let taken = self.engine.take_over(entries, evicts, is_old).await?;
        let moved = self.cluster.moved();
        moved.pulled_entries.fetch_add(taken.entries, Relaxed);
        moved.pulled_bytes.fetch_add(taken.bytes, Relaxed);
        Ok(taken)
    }

    /// The bytes of one answer, with the memory that they take.
    pub(crate) async fn receive(
        &self,
        io: &mut Box<dyn Io>,
        pulled: &Pulled,
        from: u64,
    ) -> Result<(Bytes, Reservation)> {
        let lies = |what: String| Error::corrupt(format!("node {from:016x} {what}"));
        if pulled.bytes > ANSWER_MAX_BYTES {
            return Err(lies(format!("announces {} bytes at once", pulled.bytes)));
        }
        let memory = self.engine.budget().reserve(pulled.bytes).await?;
        let mut packed = BytesMut::with_capacity(pulled.bytes as usize);
        loop {
            let left = pulled.bytes - packed.len() as u64;
            let message = next(io).await?;
            match message.kind {
                Kind::Data if (1..=left).contains(&(message.payload.len() as u64)) => {
                    packed.extend_from_slice(&message.payload);
                }
                Kind::End if left == 0 => return Ok((packed.freeze(), memory)),
                Kind::Failed => return Err(message.error()),
                kind => {
                    return Err(lies(format!(
                        "sent a {kind:?} of {} bytes where {left} were to come",
                        message.payload.len()
                    )));
                }
            }
        }
    }

    /// Waits until so many bytes more may come.
    pub(crate) async fn pace(&self, bytes: u64) {
        let until = {
            let mut next = self.next.lock();
            let now = Instant::now();
            let took = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
            *next = (*next).max(now) + took;
            *next
        };
        sleep_until(until).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Identity, TcpDial, Timing,
        message::{buffered, say_data, say_nothing},
    };
    use forebay_cluster::{Map, Member};
    use forebay_core::{Attributes, ManualClock, MemoryBudget, ObjectMeta, ObjectName};
    use forebay_engine::{EngineConfig, FixedBuckets};
    use forebay_store::{DirConfig, Held, HeldAs, Store, StoreConfig};
    use tokio::net::TcpListener;

    /// What a former owner answers to a question for what follows `after`.
    type Answer = (Pulled, Vec<u8>);

    struct Pulling {
        hand_over: HandOver,
        store: Arc<Store>,
        /// Names that it gained, and one that it did not.
        names: Vec<ObjectName>,
        of_other: ObjectName,
        /// From where on the former owner was asked.
        asked: Arc<Mutex<Vec<Option<Walk>>>>,
        _dir: tempfile::TempDir,
    }

    fn me(node: u64) -> Identity {
        Identity {
            cluster: "test".into(),
            node,
            boot: 1,
            member: None,
        }
    }

    fn name(i: u64) -> ObjectName {
        ObjectName::new("data", format!("key-{i}")).unwrap()
    }

    fn entry(name: &ObjectName) -> Held {
        let data = Bytes::from(name.key().to_owned());
        let meta = ObjectMeta {
            size: data.len() as u64,
            etag: Some("e".into()),
            last_modified_ms: 1,
            attributes: Attributes::default(),
        };
        Held {
            name: name.clone(),
            version: meta.version(),
            what: HeldAs::Head {
                meta: Arc::new(meta),
                validated_at_secs: 900,
                data: Some(data),
            },
        }
    }

    fn walk(pass: u8, segment: u64, at: u64) -> Walk {
        let json = format!(
            r#"{{"pass":{pass},"since":{{"next":0,"open":[]}},"until":{{"next":9,"open":[]}},"at":[{segment},{at}]}}"#
        );
        serde_json::from_str(&json).unwrap()
    }

    fn answer(names: &[ObjectName], next: Option<Walk>) -> Answer {
        let entries: Vec<_> = names.iter().map(entry).collect();
        let packed = packed::pack(&entries, 1000).unwrap();
        let pulled = Pulled {
            bytes: packed.len() as u64,
            entries: entries.len() as u64,
            next,
            left: 7,
            ..Pulled::default()
        };
        (pulled, packed)
    }

    /// The node 2, which has just joined node 1, and whose questions are answered by this; where
    /// that is `None`, the connection breaks.
    async fn pulling(
        answers: impl Fn(usize, &Pulling) -> Option<Answer> + Send + Sync + 'static,
    ) -> Arc<Pulling> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let member = |id: u64, address: String| Member {
            id,
            name: String::new(),
            address,
            url: String::new(),
            zone: String::new(),
            weight: 1 << 40,
            state: forebay_cluster::MemberState::Active,
        };
        let first = member(1, listener.local_addr().unwrap().to_string());
        let map = Map::new("test", 7, vec![first.clone()]).unwrap();
        let both = map.with(vec![first, member(2, String::new())]).unwrap();
        let alone = Map::new("test", 7, vec![member(2, String::new())]).unwrap();
        let alone = Arc::new(Placed::new(Map { epoch: 0, ..alone }));
        let cluster = Cluster::new(me(2), alone, Arc::new(TcpDial), Timing::default()).unwrap();
        let placed = Arc::new(Placed::new(both));
        for placed in [Arc::new(Placed::new(map)), placed.clone()] {
            cluster.advance(placed, Duration::ZERO).unwrap();
        }
        let clock = Arc::new(ManualClock::at(Duration::from_secs(1000)));
        let dir = tempfile::tempdir().unwrap();
        let config = StoreConfig {
            dirs: vec![DirConfig {
                path: dir.path().to_owned(),
                capacity_bytes: 64 << 20,
            }],
            ..StoreConfig::default()
        };
        let store = Arc::new(Store::open(config, clock.clone()).unwrap());
        let engine = Engine::new(
            EngineConfig::default(),
            Arc::new(FixedBuckets::default()),
            Some(store.clone()),
            clock,
            MemoryBudget::new(64 << 20),
        );
        let owner = |n: &ObjectName| placed.owner(&Unit::at(n.hash128(), 0)).unwrap();
        let pulling = Arc::new(Pulling {
            hand_over: HandOver::new(cluster, engine, 1 << 40),
            store,
            names: (0..).map(name).filter(|n| owner(n) == 2).take(4).collect(),
            of_other: (0..).map(name).find(|n| owner(n) == 1).unwrap(),
            asked: Arc::default(),
            _dir: dir,
        });
        let of = pulling.clone();
        tokio::spawn(async move {
            loop {
                let mut io: Box<dyn Io> = Box::new(buffered(listener.accept().await.unwrap().0));
                hear(&mut io, SILENCE)
                    .await
                    .unwrap()
                    .unwrap()
                    .words::<Hello>()
                    .unwrap();
                say(&mut io, Kind::Hello, &me(1).hello()).await.unwrap();
                io.flush().await.unwrap();
                while let Ok(Some(question)) = hear(&mut io, SILENCE).await {
                    let what = question.words::<Question>().unwrap().what;
                    let What::Pull { after, .. } = what else {
                        break;
                    };
                    let number = {
                        let mut asked = of.asked.lock();
                        asked.push(after);
                        asked.len() - 1
                    };
                    let Some((pulled, packed)) = answers(number, &of) else {
                        break;
                    };
                    say(&mut io, Kind::Found, &pulled).await.unwrap();
                    if !packed.is_empty() {
                        say_data(&mut io, None, &packed).await.unwrap();
                    }
                    say_nothing(&mut io, Kind::End).await.unwrap();
                    io.flush().await.unwrap();
                }
            }
        });
        pulling
    }

    impl Pulling {
        fn has(&self, name: &ObjectName) -> bool {
            self.store.peek(name).is_some()
        }

        fn gaining(&self) -> u64 {
            self.hand_over.cluster.hand_over_status().gaining_slots
        }
    }

    #[tokio::test]
    async fn a_pull_that_breaks_off_goes_on_where_it_stood_and_then_closes_its_windows() {
        let p = pulling(|number, p| match number {
            0 => Some(answer(&p.names[..1], Some(walk(1, 5, 64)))),
            1 | 2 => None,
            3 => Some(answer(&p.names[1..3], Some(walk(1, 4, 0)))),
            _ => Some(answer(&p.names[3..], None)),
        })
        .await;
        let before = p.gaining();
        assert!(before > 100_000, "{before}");
        for _ in 0..2 {
            assert!(p.hand_over.pull(1).await.is_err());
            assert!(p.has(&p.names[0]) && !p.has(&p.names[1]));
            assert_eq!(p.gaining(), before);
        }
        p.hand_over.attempt(1).await;
        assert!(p.names.iter().all(|name| p.has(name)));
        let walks = [
            None,
            Some(walk(1, 5, 64)),
            Some(walk(1, 5, 64)),
            Some(walk(1, 5, 64)),
            Some(walk(1, 4, 0)),
        ];
        assert_eq!(*p.asked.lock(), walks);
        assert_eq!(p.gaining(), 0);
        let status = p.hand_over.cluster.hand_over_status();
        assert_eq!((status.pulled_entries, status.idle), (4, None));
    }

    /// The node 1 of the cluster of these maps, of which it has the first.
    fn of_maps<const N: usize>(maps: [&[Member]; N]) -> (Arc<Cluster>, Vec<Arc<Placed>>) {
        let mut map = Map::new("test", 7, maps[0].to_vec()).unwrap();
        let mut all = vec![Arc::new(Placed::new(map.clone()))];
        for members in &maps[1..] {
            map = map.with(members.to_vec()).unwrap();
            all.push(Arc::new(Placed::new(map.clone())));
        }
        let (dial, timing) = (Arc::new(TcpDial), Timing::default());
        let cluster = Cluster::new(me(1), all[0].clone(), dial, timing).unwrap();
        (cluster, all)
    }

    fn member(id: u64) -> Member {
        Member {
            id,
            name: String::new(),
            address: format!("10.0.0.{id}:8300"),
            url: String::new(),
            zone: String::new(),
            weight: 1 << 40,
            state: forebay_cluster::MemberState::Active,
        }
    }

    /// By DNS, nodes count maps by themselves.
    #[tokio::test]
    async fn where_epochs_say_nothing_too_nobody_goes_by_an_older_map_with_the_same_table() {
        let (one, both) = ([member(1)], [member(1), member(2)]);
        let (cluster, maps) = of_maps([&both, &one, &both]);
        cluster.advance(maps[1].clone(), Duration::ZERO).unwrap();
        let table = maps[2].checksum();
        for epoch in [0, 1, 9] {
            let e = cluster.owed(2, table, epoch).await.unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Busy);
        }
        cluster.advance(maps[2].clone(), Duration::ZERO).unwrap();
        let (owed, _) = cluster.owed(2, table, 0).await.unwrap();
        assert!(!owed.is_empty());
    }

    /// A node that was forgotten is there again: its table is the one from before.
    #[tokio::test]
    async fn who_goes_by_an_older_map_with_the_same_table_hands_over_when_it_has_the_newer_one() {
        let (one, both) = ([member(1)], [member(1), member(2)]);
        let (cluster, maps) = of_maps([&both, &one, &both]);
        cluster.hold_leases(Duration::from_secs(10), crate::Writes::Bounded);
        cluster.advance(maps[1].clone(), Duration::ZERO).unwrap();
        let (table, epoch) = (maps[2].checksum(), maps[2].map().epoch);
        assert_eq!(table, maps[0].checksum());
        let e = cluster.owed(2, table, epoch).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Busy);
        cluster.advance(maps[2].clone(), Duration::ZERO).unwrap();
        let (owed, _) = cluster.owed(2, table, epoch).await.unwrap();
        assert!(!owed.is_empty());
        // By its own map it asked before.
        let (again, _) = cluster.owed(2, table, maps[0].map().epoch).await.unwrap();
        assert_eq!(owed, again);
        // It said by the earlier map that it has everything, and is heard late.
        let before = maps[0].map().epoch;
        cluster.release(2, table, before).await.unwrap();
        let (still, _) = cluster.owed(2, table, epoch).await.unwrap();
        assert_eq!(owed, still);
        cluster.release(2, table, epoch).await.unwrap();
        let (left, _) = cluster.owed(2, table, epoch).await.unwrap();
        assert!(left.is_empty());
        let e = cluster.release(2, table, epoch + 1).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Busy);
    }

    #[test]
    fn slots_are_counted_by_the_view_that_is_told_of() {
        let (one, two) = ([member(1), member(2)], [member(1), member(2), member(3)]);
        let mut drained = two.clone();
        drained[0].state = forebay_cluster::MemberState::Draining;
        let (cluster, maps) = of_maps([&one, &two, &drained]);
        cluster.advance(maps[1].clone(), Duration::ZERO).unwrap();
        let before = cluster.hand_over_status();
        assert!(before.losing_slots > 0);
        // A new map comes after the changes were looked at, and before the view is.
        let changes = cluster.changes();
        cluster.advance(maps[2].clone(), Duration::ZERO).unwrap();
        let (_, losing) = cluster.slots_moving(changes, &cluster.view());
        assert!(losing > before.losing_slots);
        assert_eq!(cluster.hand_over_status().losing_slots, losing);
    }

    #[tokio::test]
    async fn a_former_owner_that_lies_is_refused() {
        type Lie = fn(&Pulling) -> Answer;
        let lies: [(&str, Lie); 7] = [
            ("announces 9000000 bytes", |_| {
                let pulled = Pulled {
                    bytes: 9_000_000,
                    ..Pulled::default()
                };
                (pulled, Vec::new())
            }),
            ("where 3 were to come", |p| {
                let (pulled, packed) = answer(&p.names, None);
                (Pulled { bytes: 3, ..pulled }, packed)
            }),
            ("sent a End", |p| {
                let (pulled, packed) = answer(&p.names, None);
                let bytes = pulled.bytes + 1;
                (Pulled { bytes, ..pulled }, packed)
            }),
            ("which is not this node's", |p| {
                answer(std::slice::from_ref(&p.of_other), None)
            }),
            ("announced 3 entries, and sent 4", |p| {
                let (pulled, packed) = answer(&p.names, None);
                (
                    Pulled {
                        entries: 3,
                        ..pulled
                    },
                    packed,
                )
            }),
            ("entry 0 of those", |_| {
                let pulled = Pulled {
                    bytes: 50,
                    entries: 1,
                    ..Pulled::default()
                };
                (pulled, vec![9; 50])
            }),
            ("does not get on", |_| answer(&[], Some(walk(1, 5, 64)))),
        ];
        for (why, lie) in lies {
            let p = pulling(move |_, p| Some(lie(p))).await;
            let pull = timeout(Duration::from_secs(20), p.hand_over.pull(1)).await;
            let e = pull.expect(why).err().expect(why);
            assert!(e.to_string().contains(why), "{e}");
            assert!(
                !p.names.iter().any(|n| p.has(n)) && !p.has(&p.of_other),
                "{why}"
            );
            assert!(p.gaining() > 0, "{why}");
        }
    }

    #[tokio::test]
    async fn what_was_written_since_is_not_taken_over() {
        let p = pulling(|_, p| Some(answer(&p.names, None))).await;
        p.hand_over.cluster.overtakes(&p.names[2]);
        p.hand_over.attempt(1).await;
        let has: Vec<_> = p.names.iter().map(|name| p.has(name)).collect();
        assert_eq!(has, [true, true, false, true]);
    }
}
