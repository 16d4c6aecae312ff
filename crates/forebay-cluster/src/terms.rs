//! Reads after writes: who is told of a write before it is acknowledged, and when a node may answer
//! from the heads (which version of a name is current) that it keeps.
//!
//! Each node holds a lease in etcd; a new lease begins a new *term*. By its own clock, which counts
//! from before the lease was asked for, a node believes in its lease for four fifths of the time
//! that etcd keeps it. Whoever writes tells all nodes of its *tell-set*, and acknowledges the write
//! when each of them has forgotten the name, or certainly does not believe in its lease any more.
//! A node *trusts* its heads while it believes in its lease, and all writers know of it.
//!
//! # Why no write misses a node that trusts its heads
//!
//! A writer W writes the promise only in a term in which it has listed the nodes, after it
//! registered; a reader R trusts its heads only after it registered, then listed, then was
//! acknowledged by each node that was listed. Both keys are in etcd, which orders the two
//! registrations. If R's came first, W's list has R, unless R's lease had ended. If W's came first,
//! R's list has W, and R waits for W to know it, unless W's lease had ended.
//!
//! A lease ends by itself later than its holder's belief. One that another node ended leaves a mark
//! beside the nodes, written before the lease is revoked and kept for at least the time of a lease:
//! whoever lists it counts that node as one that may believe for so long.
//!
//! A node leaves a tell-set only when a look at etcd that began after it was learned of does not
//! show its term any more, and the time of a lease has passed since; or when it says itself that it
//! believes no more.
//!
//! A write that was acknowledged before a writer knew of R is at the bucket before R trusts its
//! heads: what R fetches from then on has it, and what it had before is revalidated
//! ([`Terms::begun`] counts these moments).
//!
//! # Doubt
//!
//! A node that was told may ask another one, which was not told yet, for the current version. So
//! names of which a node was told are *in doubt* ([`Doubts`]) until the writer says that everybody
//! was told, and that it has forgotten the name itself, which it does last: meanwhile only the bucket
//! is asked which version is current.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

/// The most names that are in doubt one by one; if there are more, all names are.
pub const DOUBTS_MAX: usize = 65_536;

/// One start of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// The node's id.
    pub node: u64,
    /// New at each start.
    pub boot: u64,
}

/// A term of a run: its number counts the leases that the run has had, from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    /// Whose.
    pub run: Run,
    /// 0: of a release that knows no terms, and is told nothing.
    pub number: u64,
    /// The lease in etcd.
    pub lease: i64,
    /// Where the node is reached.
    pub address: String,
}

#[derive(Clone, Debug)]
struct Other {
    term: Term,
    /// Counts what this node learns.
    learned: u64,
    /// From then on, it does not believe in that term; `None`: it may.
    ended: Option<Duration>,
    /// This node announced itself in its own term, or has to, and was not acknowledged yet.
    owes: bool,
    /// As `learned`, when it last told of writes.
    told: u64,
}

/// What one node knows of terms. Times are those of a clock that never goes back and does not stand
/// still while the machine is suspended.
#[derive(Clone, Debug)]
pub struct Terms {
    me: Run,
    /// How long etcd keeps a lease that is not renewed.
    time: Duration,
    /// The number of this node's newest term.
    number: u64,
    lease: Option<i64>,
    believed_until: Duration,
    listed: bool,
    trusts: bool,
    begun: u32,
    learned: u64,
    others: HashMap<Run, Other>,
}

impl Terms {
    /// A run that has no lease yet.
    pub fn new(me: Run, time: Duration) -> Self {
        Terms {
            me,
            time,
            number: 0,
            lease: None,
            believed_until: Duration::ZERO,
            listed: false,
            trusts: false,
            begun: 0,
            learned: 0,
            others: HashMap::new(),
        }
    }

    /// A new lease was asked for at `asked`, and granted: a term begins. Its number.
    pub fn granted(&mut self, lease: i64, asked: Duration) -> u64 {
        self.end();
        self.number += 1;
        self.lease = Some(lease);
        self.believed_until = asked + self.time.mul_f64(0.8);
        self.number
    }

    /// The lease was renewed, as asked for at `asked`.
    pub fn renewed(&mut self, lease: i64, asked: Duration) {
        if self.lease == Some(lease) {
            let until = asked + self.time.mul_f64(0.8);
            self.believed_until = self.believed_until.max(until);
        }
    }

    /// This node has no lease any more. Which one it was.
    pub fn end(&mut self) -> Option<i64> {
        (self.listed, self.trusts) = (false, false);
        self.believed_until = Duration::ZERO;
        for other in self.others.values_mut() {
            other.owes = false;
        }
        self.lease.take()
    }

    /// The lease.
    pub fn lease(&self) -> Option<i64> {
        self.lease
    }

    /// The number of the newest term.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Until when this node believes in its lease.
    pub fn believed_until(&self) -> Duration {
        self.believed_until
    }

    fn believes(&self, now: Duration) -> bool {
        self.lease.is_some() && now < self.believed_until
    }

    /// Whether a write that tells [`Terms::to_tell`] from now on misses nobody.
    pub fn may_acknowledge(&self, now: Duration) -> bool {
        self.listed && self.believes(now)
    }

    /// Whether heads that were learned since trust began are answered.
    pub fn is_trusted(&self, now: Duration) -> bool {
        self.trusts && self.believes(now)
    }

    /// How often trust began.
    pub fn begun(&self) -> u32 {
        self.begun
    }

    /// To be noted before etcd is read, for [`Terms::looked`].
    pub fn mark(&self) -> u64 {
        self.learned
    }

    /// What etcd had at one moment after `mark` was noted: the terms of all nodes, this one too, and
    /// the terms that were ended by others. Returns the runs that are told nothing from now on.
    pub fn looked(&mut self, mark: u64, nodes: &[Term], ended: &[Term], now: Duration) -> Vec<Run> {
        let (me, number) = (self.me, self.number);
        let is_own = |t: &Term| t.run == me && t.number == number;
        let is_first = !self.listed && self.lease.is_some() && nodes.iter().any(is_own);
        if is_first {
            for term in nodes.iter().filter(|t| t.run != me) {
                self.list(term, None, mark);
            }
            let is_there = |run| nodes.iter().any(|t| t.run == run);
            for term in ended {
                if term.run != me && !is_there(term.run) {
                    self.list(term, Some(now + self.time), mark);
                }
            }
            self.listed = true;
        }
        for (run, other) in &mut self.others {
            // One that only told of writes may be in any term.
            let number = other.term.number;
            let is_there = |t: &Term| t.run == *run && (number == 0 || t.number == number);
            if other.learned <= mark && other.ended.is_none() && !nodes.iter().any(is_there) {
                other.ended = Some(now + self.time);
            }
        }
        // What it told of is in doubt as long as it may be writing, in whichever term.
        let is_past = |other: &Other| {
            let is_there = |t: &Term| t.run == other.term.run;
            other.ended.is_some_and(|at| at <= now)
                && other.told <= mark
                && !nodes.iter().any(is_there)
        };
        let past = self.others.iter().filter(|(_, other)| is_past(other));
        let past: Vec<Run> = past.map(|(run, _)| *run).collect();
        for run in &past {
            self.others.remove(run);
        }
        past
    }

    /// A node that is in this term's list, or was ended by others.
    fn list(&mut self, term: &Term, ended: Option<Duration>, mark: u64) {
        self.learned += 1;
        let learned = self.learned;
        match self.others.get_mut(&term.run) {
            Some(other) => {
                other.owes = true;
                let is_later = other.term.number < term.number;
                // What it said itself meanwhile of this term is newer; of an earlier one, it came
                // late.
                if is_later || (other.learned <= mark && other.term.number == term.number) {
                    if is_later || other.ended.is_none() {
                        other.ended = ended;
                    }
                    (other.term, other.learned) = (term.clone(), learned);
                }
            }
            None => {
                let (term, owes) = (term.clone(), true);
                let run = term.run;
                let other = Other {
                    term,
                    learned,
                    ended,
                    owes,
                    told: 0,
                };
                self.others.insert(run, other);
            }
        }
    }

    /// Another node tells of its writes. Until it is known to be gone, what it told of is in doubt; it
    /// may have left already, or not have announced itself yet. [`Terms::looked`] says when it is gone.
    pub fn told_by(&mut self, run: Run) {
        self.learned += 1;
        let told = self.learned;
        let unknown = || Other {
            // In which term it is, it did not say.
            term: Term {
                run,
                number: 0,
                lease: 0,
                address: String::new(),
            },
            learned: told,
            ended: None,
            owes: false,
            told,
        };
        self.others.entry(run).or_insert_with(unknown).told = told;
    }

    /// Another node says that it is in this term, and wants to be told of writes.
    pub fn announced(&mut self, term: Term) {
        self.learned += 1;
        let learned = self.learned;
        let before = self.others.get(&term.run);
        // A message may be late.
        if before.is_some_and(|before| before.term.number > term.number) {
            return;
        }
        let owes = before.is_some_and(|before| before.owes);
        // The same term again: what is known of its end stays.
        let same = before.filter(|before| before.term.number == term.number);
        let ended = same.and_then(|before| before.ended);
        let told = before.map_or(0, |before| before.told);
        let run = term.run;
        let other = Other {
            term,
            learned,
            ended,
            owes,
            told,
        };
        self.others.insert(run, other);
    }

    /// Another node says that it believes no more, and will not again.
    pub fn left(&mut self, run: Run) {
        self.others.remove(&run);
    }

    /// Whom this node still has to announce itself to in its term.
    pub fn to_announce(&self) -> Vec<Term> {
        let owing = self.others.values();
        let owing = owing.filter(|o| o.owes && o.ended.is_none());
        owing.map(|o| o.term.clone()).collect()
    }

    /// Another node knows of this one in this term of it.
    pub fn acknowledged(&mut self, number: u64, by: Run) {
        if number == self.number
            && let Some(other) = self.others.get_mut(&by)
        {
            other.owes = false;
        }
    }

    /// Begins to trust what is learned from now on, if nothing is missing; whether it did.
    pub fn settle(&mut self, now: Duration) -> bool {
        let is_met = |o: &Other| !o.owes || o.ended.is_some_and(|at| at <= now);
        if self.trusts || !self.may_acknowledge(now) || !self.others.values().all(is_met) {
            return false;
        }
        self.trusts = true;
        self.begun += 1;
        true
    }

    /// Who is told of a write: those who may believe in their leases.
    pub fn to_tell(&self, now: Duration) -> Vec<Term> {
        let others = self.others.values();
        let others = others.filter(|o| o.term.number > 0 && o.ended.is_none_or(|at| at > now));
        others.map(|o| o.term.clone()).collect()
    }

    /// Whether a node certainly does not believe in this term any more, or has begun a later one.
    pub fn is_over(&self, term: &Term, now: Duration) -> bool {
        self.others.get(&term.run).is_none_or(|o| {
            // It left, and told of a write since.
            let has_left = o.term.number == 0;
            has_left || o.term.number > term.number || o.ended.is_some_and(|at| at <= now)
        })
    }

    /// When a term is surely over, where that is known.
    pub fn ends_at(&self, term: &Term) -> Option<Duration> {
        self.others.get(&term.run).and_then(|o| o.ended)
    }

    /// The lease of this term was just ended in etcd.
    pub fn revoked(&mut self, term: &Term, now: Duration) {
        if let Some(other) = self.others.get_mut(&term.run)
            && other.term.number == term.number
            && other.ended.is_none()
        {
            other.ended = Some(now + self.time);
        }
    }
}

/// The names of which this node was told, and maybe others not yet.
#[derive(Clone, Debug, Default)]
pub struct Doubts {
    writers: HashMap<Run, Writer>,
    names: HashMap<u128, usize>,
}

#[derive(Clone, Debug, Default)]
struct Writer {
    writes: BTreeMap<u64, u128>,
    /// All names are in doubt until the writes before this one are over.
    all_below: u64,
    /// All writes before this one are over.
    over_below: u64,
}

impl Doubts {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty() && !self.writers.values().any(|w| w.all_below > 0)
    }

    /// A writer tells of the write of a name.
    pub fn told(&mut self, writer: Run, write: u64, name: u128) {
        let is_full = self.names.len() >= DOUBTS_MAX;
        let known = self.writers.entry(writer).or_default();
        // A message may be late.
        if write < known.over_below || known.writes.contains_key(&write) {
            return;
        }
        if is_full {
            known.all_below = known.all_below.max(write + 1);
            return;
        }
        known.writes.insert(write, name);
        *self.names.entry(name).or_default() += 1;
    }

    /// A writer says that everybody was told of its writes before this one.
    pub fn over(&mut self, writer: Run, below: u64) {
        // Also of one that has told nothing so far: what it told before may come later.
        let known = self.writers.entry(writer).or_default();
        known.over_below = known.over_below.max(below);
        let left = known.writes.split_off(&below);
        let over = std::mem::replace(&mut known.writes, left);
        if known.all_below <= below {
            known.all_below = 0;
        }
        self.release(over);
    }

    /// A writer is gone: what it did not acknowledge is promised to nobody.
    pub fn gone(&mut self, writer: Run) {
        if let Some(known) = self.writers.remove(&writer) {
            self.release(known.writes);
        }
    }

    fn release(&mut self, over: BTreeMap<u64, u128>) {
        for name in over.into_values() {
            if let Some(count) = self.names.get_mut(&name) {
                *count -= 1;
                if *count == 0 {
                    self.names.remove(&name);
                }
            }
        }
    }

    /// Whether only the bucket may be asked which version of a name is current.
    pub fn has(&self, name: u128) -> bool {
        self.names.contains_key(&name) || self.writers.values().any(|w| w.all_below > 0)
    }
}

#[cfg(test)]
mod tests;
