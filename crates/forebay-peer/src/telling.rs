//! Telling all nodes of a write before it is acknowledged, and being told
//! (`forebay_cluster::Terms` says why nobody is missed).
//!
//! What several writes have to say to one node goes in one message: while a message is on its way,
//! the names of the next one gather. As many wait as there are writes under way, which the engine
//! limits.
//!
//! A node that does not acknowledge within [`TELL`] loses its lease, by order of the writer, which
//! then waits until that node has surely ceased to trust its heads. So a node that is gone delays
//! the writes of that time once.

use crate::{
    cluster::Identity,
    link::{Dial, Peer, Timing},
    message::{Question, What},
};
use async_trait::async_trait;
use forebay_cluster::{Doubts, Member, Run, Term, Terms};
use forebay_core::{Error, ErrorKind, ObjectName, Result, request, sync::Mutex};
use futures::future::join_all;
use hashbrown::HashMap;
use std::{
    collections::BTreeSet,
    sync::{
        Arc, OnceLock,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::Duration,
};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};

/// A node that was told of a write acknowledges within this time, or loses its lease.
const TELL: Duration = Duration::from_millis(1500);
/// Between two attempts to reach a node.
const AGAIN: Duration = Duration::from_millis(100);
/// Between two looks at what is missing for trust.
const SETTLE: Duration = Duration::from_millis(250);
/// How long a node that goes waits for others to hear it.
const FAREWELL: Duration = Duration::from_millis(500);
/// Names in one message take at most so many bytes, escaped.
const NAMES_MAX_BYTES: usize = 48 << 10;
/// The log tells of writes that others see late once in this time.
const LOG_EVERY: Duration = Duration::from_secs(10);
/// Messages between nodes that run, and have nothing to wait for but a lock.
const TIMING: Timing = Timing {
    connect: Duration::from_millis(1000),
    silence: Duration::from_millis(1000),
    answer: Duration::from_millis(3000),
    probe: Duration::from_millis(500),
    // Nobody else can answer for it.
    late: Duration::MAX,
};

/// Time since this machine was started, with the time that it was suspended: leases end meanwhile.
pub fn boot_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Where leases are.
#[async_trait]
pub trait Leases: Send + Sync {
    /// Ends the lease of this term, if its node still has it: it is not renewed after this returns.
    ///
    /// # Errors
    /// If that is not known.
    async fn end(&self, term: &Term) -> Result<()>;
}

/// What becomes of writes through a node that cannot make sure that all others see them at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Writes {
    /// They go through, and others see them by the bucket's freshness rule.
    #[default]
    Bounded,
    /// They are refused.
    Coherent,
}

/// How reads after writes stand at a node.
#[derive(Clone, Debug, Default)]
pub struct Coherence {
    /// Whether it answers from its heads.
    pub trusted: bool,
    /// Why it does not.
    pub why: Option<String>,
    /// For how long it believes in its lease without renewing it.
    pub lease: Option<Duration>,
    /// Names that others were told of.
    pub told: u64,
    /// Writes that waited for the end of a lease.
    pub waited: u64,
    /// Writes that others see by the freshness rule only.
    pub degraded: u64,
}

/// A node that is told.
struct Teller {
    peer: Arc<Peer>,
    queue: Mutex<Queue>,
    /// The writes before this one are known there to be over.
    over_below: AtomicU64,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<(u64, ObjectName, oneshot::Sender<()>)>,
    runs: bool,
}

/// This node's part in telling and being told.
pub(crate) struct Telling {
    me: Identity,
    dial: Arc<dyn Dial>,
    writes: Writes,
    terms: Mutex<Terms>,
    /// Until when heads are trusted, in milliseconds of [`boot_time`], and how often trust began:
    /// what reads look at. 0: they are not.
    trust: AtomicU64,
    tellers: Mutex<HashMap<Run, Arc<Teller>>>,
    doubts: Mutex<Doubts>,
    has_doubts: AtomicBool,
    leases: OnceLock<Arc<dyn Leases>>,
    under_way: Mutex<UnderWay>,
    told: AtomicU64,
    waited: AtomicU64,
    degraded: AtomicU64,
    logged: Mutex<Option<Instant>>,
}

/// The writes of this node that not everybody was told of.
#[derive(Default)]
struct UnderWay {
    next: u64,
    numbers: BTreeSet<u64>,
}

/// Bits of [`Telling::trust`] that count.
const COUNT_BITS: u32 = 20;

/// One write until everybody was told and this node has forgotten what was there before, however that
/// ends.
pub(crate) struct Write {
    telling: Arc<Telling>,
    number: u64,
}

impl Drop for Write {
    fn drop(&mut self) {
        self.telling.under_way.lock().numbers.remove(&self.number);
    }
}

impl Telling {
    pub fn new(me: Identity, dial: Arc<dyn Dial>, lease: Duration, writes: Writes) -> Self {
        let run = Run {
            node: me.node,
            boot: me.boot,
        };
        Telling {
            me,
            dial,
            writes,
            terms: Mutex::new(Terms::new(run, lease)),
            trust: AtomicU64::new(0),
            tellers: Mutex::default(),
            doubts: Mutex::default(),
            has_doubts: AtomicBool::new(false),
            leases: OnceLock::new(),
            under_way: Mutex::new(UnderWay {
                next: 1,
                ..UnderWay::default()
            }),
            told: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            degraded: AtomicU64::new(0),
            logged: Mutex::default(),
        }
    }

    pub fn set_leases(&self, leases: Arc<dyn Leases>) {
        let _ = self.leases.set(leases);
    }

    /// Changes what is known of terms, and what reads look at with it. What is in doubt changes with
    /// it, under the same lock.
    fn change<T>(&self, change: impl FnOnce(&mut Terms) -> T) -> T {
        let mut terms = self.terms.lock();
        let done = change(&mut terms);
        let until = terms.believed_until().as_millis() as u64;
        let trust = match terms.is_trusted(boot_time()) {
            true => (until << COUNT_BITS) | (u64::from(terms.begun()) % (1 << COUNT_BITS)),
            false => 0,
        };
        self.trust.store(trust, SeqCst);
        done
    }

    /// Which trust in this node's heads holds; `None`: none does.
    pub fn trust(&self) -> Option<u32> {
        let trust = self.trust.load(SeqCst);
        let until = trust >> COUNT_BITS;
        let holds = (boot_time().as_millis() as u64) < until;
        holds.then_some((trust % (1 << COUNT_BITS)) as u32)
    }

    pub fn granted(&self, lease: i64, asked: Duration) -> u64 {
        self.change(|terms| terms.granted(lease, asked))
    }

    pub fn renewed(&self, lease: i64, asked: Duration) {
        self.change(|terms| terms.renewed(lease, asked));
    }

    pub fn ended(&self) -> Option<i64> {
        self.change(Terms::end)
    }

    /// The lease has ended, if it is this one; whether it is.
    pub fn ended_if(&self, lease: i64) -> bool {
        self.change(|terms| terms.lease() == Some(lease) && terms.end().is_some())
    }

    pub fn term(&self) -> (u64, Option<i64>) {
        let terms = self.terms.lock();
        (terms.number(), terms.lease())
    }

    pub fn mark(&self) -> u64 {
        self.terms.lock().mark()
    }

    pub fn looked(&self, mark: u64, nodes: &[Term], ended: &[Term]) {
        let now = boot_time();
        self.change(|terms| {
            // What one of them tells of meanwhile is in doubt afterwards.
            for run in terms.looked(mark, nodes, ended, now) {
                self.forget(run);
            }
        });
    }

    fn forget(&self, run: Run) {
        self.tellers.lock().remove(&run);
        self.doubt(|doubts| doubts.gone(run));
    }

    fn doubt(&self, change: impl FnOnce(&mut Doubts)) {
        let mut doubts = self.doubts.lock();
        change(&mut doubts);
        self.has_doubts.store(!doubts.is_empty(), SeqCst);
    }

    /// Whether only the bucket may be asked which version of a name is current.
    pub fn is_doubtful(&self, name: &ObjectName) -> bool {
        self.has_doubts.load(SeqCst) && self.doubts.lock().has(name.hash128())
    }

    /// Another node announces a term.
    pub fn announced(&self, by: Run, member: Option<&Member>, number: u64, lease: i64) {
        let term = Term {
            run: by,
            number,
            lease,
            address: member.map(|m| m.address.clone()).unwrap_or_default(),
        };
        self.change(|terms| terms.announced(term));
    }

    /// Another node stops.
    pub fn left(&self, run: Run) {
        self.change(|terms| {
            terms.left(run);
            self.forget(run);
        });
    }

    /// Another node tells of writes: the names are in doubt from now on.
    pub fn told_by(&self, writer: Run, over_below: u64, names: &[(u64, ObjectName)]) {
        let mut terms = self.terms.lock();
        terms.told_by(writer);
        self.doubt(|doubts| {
            doubts.over(writer, over_below);
            for (write, name) in names {
                doubts.told(writer, *write, name.hash128());
            }
        });
    }

    fn teller(&self, term: &Term) -> Arc<Teller> {
        let mut tellers = self.tellers.lock();
        if let Some(known) = tellers.get(&term.run)
            && known.peer.address == term.address
        {
            return known.clone();
        }
        let (hello, dial) = (self.me.hello(), self.dial.clone());
        let peer = Peer::new(term.run.node, &term.address, hello, dial, TIMING);
        let teller = Arc::new(Teller {
            peer: Arc::new(peer.of_boot(term.run.boot)),
            queue: Mutex::default(),
            over_below: AtomicU64::new(0),
        });
        tellers.insert(term.run, teller.clone());
        teller
    }

    /// All writes before this one are over.
    fn over_below(&self) -> u64 {
        let under_way = self.under_way.lock();
        under_way.numbers.first().copied().unwrap_or(under_way.next)
    }

    /// Whether a write may begin.
    ///
    /// # Errors
    /// `Busy` if it would be refused in the end.
    pub fn may_write(&self) -> Result<()> {
        if self.writes == Writes::Bounded || self.terms.lock().may_acknowledge(boot_time()) {
            return Ok(());
        }
        Err(Error::busy(
            "this node has no lease in etcd now, so other nodes might not see the write at once",
        )
        .hint(
            "try again, or at another node; cluster.writes = \"bounded\" lets such writes through",
        ))
    }

    /// A write of this node begins to be told: until it is dropped, names of it are in doubt at those
    /// who were told.
    pub fn begin(self: &Arc<Self>) -> Write {
        let mut under_way = self.under_way.lock();
        let number = under_way.next;
        under_way.next += 1;
        under_way.numbers.insert(number);
        Write {
            telling: self.clone(),
            number,
        }
    }

    /// Tells all nodes that a name was written; with `acknowledges`, returns when no node answers
    /// an older version any more. `false`: some node may.
    ///
    /// # Errors
    /// `Busy` if that cannot be made sure, and such writes are not to be acknowledged.
    pub async fn written(
        self: &Arc<Self>,
        write: &Write,
        name: &ObjectName,
        acknowledges: bool,
    ) -> Result<bool> {
        let (term, may, all) = {
            let terms = self.terms.lock();
            let (now, number) = (boot_time(), terms.number());
            (number, terms.may_acknowledge(now), terms.to_tell(now))
        };
        let tell = async |term: Term| {
            let teller = self.teller(&term);
            let told = teller.tell(self, write.number, name);
            let is_told = timeout(TELL, told).await.unwrap_or(false);
            (!is_told).then_some(term)
        };
        let silent = join_all(all.into_iter().map(tell)).await;
        let silent: Vec<Term> = silent.into_iter().flatten().collect();
        self.told.fetch_add(1, Relaxed);
        if !acknowledges {
            return Ok(silent.is_empty());
        }
        let is_still = || {
            let terms = self.terms.lock();
            may && terms.number() == term && terms.may_acknowledge(boot_time())
        };
        if is_still() && !silent.is_empty() {
            self.waited.fetch_add(1, Relaxed);
            join_all(silent.iter().map(|term| self.outwait(term, &is_still))).await;
        }
        // Once more: who was told forgets the doubt when this node's own term is over.
        let missed = |term: &Term| !self.terms.lock().is_over(term, boot_time());
        if is_still() && !silent.iter().any(missed) {
            return Ok(true);
        }
        self.degraded(name)?;
        Ok(false)
    }

    fn degraded(&self, name: &ObjectName) -> Result<()> {
        if self.writes == Writes::Coherent {
            return Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "{name} was written, but this node lost its lease in etcd meanwhile: other \
                     nodes may answer the old version for a while"
                ),
            )
            .hint("write it again: the write may be visible already"));
        }
        self.degraded.fetch_add(1, Relaxed);
        let mut logged = self.logged.lock();
        if logged.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
            *logged = Some(Instant::now());
            tracing::warn!(object = %name, "this node has no lease in etcd: writes go through, and \
                other nodes see them by the freshness rule of the bucket \
                (forebay_cluster_writes_degraded_total counts them)");
        }
        Ok(())
    }

    /// Ends the lease of a node that does not answer, and waits until it has ceased to trust its
    /// heads, or this node has lost its own lease.
    async fn outwait(&self, term: &Term, is_still: &impl Fn() -> bool) {
        while is_still() {
            let (is_over, ends_at) = {
                let terms = self.terms.lock();
                (terms.is_over(term, boot_time()), terms.ends_at(term))
            };
            if is_over {
                return;
            }
            if let Some(at) = ends_at {
                let left = at.saturating_sub(boot_time());
                // It may begin another term before, which ends this one.
                sleep(left.clamp(Duration::from_millis(1), AGAIN)).await;
                continue;
            }
            let Some(leases) = self.leases.get() else {
                sleep(AGAIN).await;
                continue;
            };
            tracing::warn!(
                node = format_args!("{:016x}", term.run.node),
                address = term.address,
                "a node was not told of a write: its lease is ended, and the write waits until it \
                asks the bucket"
            );
            match leases.end(term).await {
                Ok(()) => self.change(|terms| terms.revoked(term, boot_time())),
                Err(e) => {
                    tracing::warn!(error = %e.describe(), "a lease in etcd could not be ended");
                    sleep(SETTLE).await;
                }
            }
        }
    }

    /// Announces this node where its term needs it, and says which writes are over, for as long as
    /// it is polled.
    pub async fn tend(self: &Arc<Self>) {
        loop {
            sleep(SETTLE).await;
            self.settle().await;
            self.say_over().await;
        }
    }

    /// One attempt to begin to trust this node's heads.
    pub async fn settle(self: &Arc<Self>) {
        let (number, lease, all) = {
            let terms = self.terms.lock();
            (terms.number(), terms.lease(), terms.to_announce())
        };
        let Some(lease) = lease else {
            return;
        };
        let announce = async |term: Term| {
            let what = What::Announce {
                term: number,
                lease,
            };
            let teller = self.teller(&term);
            let said = teller.say(what);
            if timeout(TELL, said).await.unwrap_or(false) {
                self.change(|terms| terms.acknowledged(number, term.run));
            }
        };
        // Each is only one question.
        let speaks = all.into_iter().filter(|term| term.number > 0);
        join_all(speaks.map(announce)).await;
        if self.change(|terms| terms.settle(boot_time())) {
            tracing::info!(
                term = number,
                "all nodes tell this one of writes: it answers from what \
                it knows"
            );
        }
    }

    async fn say_over(self: &Arc<Self>) {
        let below = self.over_below();
        let behind: Vec<_> = {
            let tellers = self.tellers.lock();
            let all = tellers.values();
            all.filter(|t| t.over_below.load(Relaxed) < below)
                .cloned()
                .collect()
        };
        let say = async |teller: Arc<Teller>| {
            let what = What::Told {
                over_below: below,
                names: Vec::new(),
            };
            if timeout(TELL, teller.say(what)).await.unwrap_or(false) {
                teller.over_below.fetch_max(below, Relaxed);
            }
        };
        join_all(behind.into_iter().map(say)).await;
    }

    /// Says that this node believes no more, and gives its lease back to be revoked.
    pub async fn leave(self: &Arc<Self>) -> Option<i64> {
        let lease = self.ended();
        let all = self.terms.lock().to_tell(boot_time());
        let say = async |term: Term| self.teller(&term).say(What::Left).await;
        let _ = timeout(FAREWELL, join_all(all.into_iter().map(say))).await;
        lease
    }

    pub fn coherence(&self) -> Coherence {
        let now = boot_time();
        let terms = self.terms.lock();
        let trusted = terms.is_trusted(now);
        let missing = terms.to_announce();
        let why = match (trusted, terms.may_acknowledge(now)) {
            (true, _) => None,
            (_, false) => Some("this node has no lease in etcd".to_owned()),
            _ => Some(match missing.first() {
                Some(term) if term.number == 0 => format!(
                    "{} at {} runs a release that does not tell of writes",
                    node(term),
                    term.address
                ),
                Some(term) => format!("{} at {} does not answer", node(term), term.address),
                None => "a node was gone when this one joined, and its lease may not have ended"
                    .to_owned(),
            }),
        };
        let lease = terms.lease().map(|_| terms.believed_until());
        let count = |counter: &AtomicU64| counter.load(Relaxed);
        Coherence {
            trusted,
            why,
            lease: lease.and_then(|until| until.checked_sub(now)),
            told: count(&self.told),
            waited: count(&self.waited),
            degraded: count(&self.degraded),
        }
    }
}

fn node(term: &Term) -> String {
    format!("node {:016x}", term.run.node)
}

impl Teller {
    /// Says something that needs no answer but that it was heard. Whether it was.
    async fn say(&self, what: What) -> bool {
        let question = Question {
            epoch: 0,
            tags: false,
            request: request::current(),
            bucket: String::new(),
            key: String::new(),
            what,
        };
        self.peer.ask(&question).await.is_ok()
    }

    /// Tells of the write of a name, with those of other writes; tries until it succeeds.
    async fn tell(
        self: &Arc<Self>,
        telling: &Arc<Telling>,
        number: u64,
        name: &ObjectName,
    ) -> bool {
        let (sender, told) = oneshot::channel();
        let begins = {
            let mut queue = self.queue.lock();
            queue.waiting.push((number, name.clone(), sender));
            !std::mem::replace(&mut queue.runs, true)
        };
        if begins {
            tokio::spawn(self.clone().run(telling.clone()));
        }
        told.await.is_ok()
    }

    /// Sends what waits until nothing does.
    async fn run(self: Arc<Self>, telling: Arc<Telling>) {
        loop {
            let batch = {
                let mut queue = self.queue.lock();
                // Nobody waits for what was given up.
                queue.waiting.retain(|(.., sender)| !sender.is_closed());
                let mut bytes = 0;
                let fits = queue.waiting.iter().take_while(|(_, name, _)| {
                    bytes += 6 * (name.bucket().len() + name.key().len()) + 32;
                    bytes <= NAMES_MAX_BYTES
                });
                let count = fits.count();
                if count == 0 {
                    queue.runs = false;
                    return;
                }
                queue.waiting.drain(..count).collect::<Vec<_>>()
            };
            let names = batch.iter().map(|(number, name, _)| {
                let (bucket, key) = (name.bucket().to_owned(), name.key().to_owned());
                (*number, bucket, key)
            });
            let over_below = telling.over_below();
            let what = What::Told {
                over_below,
                names: names.collect(),
            };
            if self.say(what).await {
                self.over_below.fetch_max(over_below, Relaxed);
                for (.., sender) in batch {
                    let _ = sender.send(());
                }
            } else {
                self.queue.lock().waiting.splice(0..0, batch);
                sleep(AGAIN).await;
            }
        }
    }
}
