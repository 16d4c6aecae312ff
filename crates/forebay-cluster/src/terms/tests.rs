//! The protocol without I/O: nodes, an etcd and a bucket as state machines, messages that take their
//! time, pauses, restarts, links that are cut, in an order that a seed decides; and a checker: a
//! read that begins after a write was acknowledged gets it or a later one.

use super::*;
use std::collections::{BTreeSet, BinaryHeap};

const LEASE: u64 = 10_000;
const TELL: u64 = 1_500;
const NODES: usize = 4;
const NAMES: usize = 2;

fn ms(time: u64) -> Duration {
    Duration::from_millis(time)
}

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n
    }
}

/// A rule that is left out.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Without {
    Nothing,
    Announcing,
    Floor,
    WaitingAfterRevoke,
    Doubt,
    Marks,
    /// A write is over when all others were told, and not only when its node has forgotten the name.
    OwnForgetting,
}

#[derive(Clone, Debug)]
enum Ask {
    Read { mark: u64 },
    Grant,
    Register { term: Term },
    Renew { lease: i64 },
    End { term: Term },
}

#[derive(Clone, Debug)]
enum Say {
    Announce(Term),
    Acknowledge { number: u64, by: Run },
    Told { write: u64, below: u64, name: usize },
    Over { below: u64 },
    Acked { write: u64, by: Run },
    Current { name: usize, read: Reading },
    Answer { value: u64, read: Reading },
}

#[derive(Clone, Debug)]
struct Reading {
    name: usize,
    least: u64,
    begun: u32,
    generation: u64,
}

#[derive(Clone, Debug)]
enum Event {
    Tick,
    Renews,
    Looks,
    Reads,
    Writes,
    ToEtcd {
        ask: Ask,
        asked: u64,
    },
    Looked {
        mark: u64,
        nodes: Vec<Term>,
        ended: Vec<Term>,
    },
    Granted {
        lease: i64,
        asked: u64,
    },
    Renewed {
        lease: i64,
        asked: u64,
        is_alive: bool,
    },
    EndedTerm {
        term: Term,
    },
    Said {
        from: Run,
        say: Say,
    },
    ReadAtBucket {
        read: Reading,
    },
    FromBucket {
        value: u64,
        read: Reading,
    },
    WriteAtBucket {
        name: usize,
    },
    /// This node has forgotten the name of a write.
    Forgot {
        run: Run,
        number: u64,
        name: usize,
        acknowledges: Option<u64>,
    },
    Written {
        name: usize,
        value: u64,
    },
    Restarts,
}

struct Write {
    name: usize,
    value: u64,
    term: u64,
    silent: Vec<Term>,
    until: u64,
    asked_end: BTreeSet<Run>,
    /// All were told, so this node forgets the name next.
    forgets: bool,
}

struct Node {
    run: Run,
    terms: Terms,
    doubts: Doubts,
    /// A value and in which trust it was learned.
    heads: [Option<(u64, u32)>; NAMES],
    generation: u64,
    writes: BTreeMap<u64, Write>,
    next_write: u64,
    paused_until: u64,
    cut_until: u64,
}

impl Node {
    fn new(node: usize, boot: u64, heads: [Option<(u64, u32)>; NAMES]) -> Self {
        let run = Run {
            node: node as u64,
            boot,
        };
        Node {
            run,
            terms: Terms::new(run, ms(LEASE)),
            doubts: Doubts::default(),
            heads,
            generation: 0,
            writes: BTreeMap::new(),
            next_write: 1,
            paused_until: 0,
            cut_until: 0,
        }
    }

    fn term(&self) -> Option<Term> {
        Some(Term {
            run: self.run,
            number: self.terms.number(),
            lease: self.terms.lease()?,
            address: String::new(),
        })
    }

    fn over_below(&self) -> u64 {
        self.writes
            .keys()
            .next()
            .copied()
            .unwrap_or(self.next_write)
    }
}

struct World {
    rng: Rng,
    now: u64,
    without: Without,
    /// When, which one, whose, and of which boot.
    queue: BinaryHeap<std::cmp::Reverse<(u64, u64)>>,
    events: HashMap<u64, (usize, u64, Event)>,
    number: u64,
    nodes: Vec<Node>,
    // etcd
    leases: BTreeMap<i64, u64>,
    registered: BTreeMap<u64, Term>,
    marks: Vec<Term>,
    next_lease: i64,
    // the bucket
    values: [u64; NAMES],
    acknowledged: [u64; NAMES],
    last: u64,
    stale: usize,
    hits: usize,
    done: usize,
}

impl World {
    fn new(seed: u64, without: Without) -> Self {
        let mut world = World {
            rng: Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            now: 0,
            without,
            queue: BinaryHeap::new(),
            events: HashMap::new(),
            number: 0,
            nodes: (0..NODES).map(|n| Node::new(n, 1, [None; NAMES])).collect(),
            leases: BTreeMap::new(),
            registered: BTreeMap::new(),
            marks: Vec::new(),
            next_lease: 1,
            values: [0; NAMES],
            acknowledged: [0; NAMES],
            last: 0,
            stale: 0,
            hits: 0,
            done: 0,
        };
        for n in 0..NODES {
            world.begin(n);
        }
        world
    }

    fn begin(&mut self, n: usize) {
        let late = self.rng.below(3_000);
        for event in [
            Event::Tick,
            Event::Looks,
            Event::Renews,
            Event::Reads,
            Event::Writes,
        ] {
            self.at(n, late, event);
        }
    }

    fn at(&mut self, n: usize, after: u64, event: Event) {
        self.number += 1;
        self.queue
            .push(std::cmp::Reverse((self.now + after, self.number)));
        let boot = self.nodes[n].run.boot;
        self.events.insert(self.number, (n, boot, event));
    }

    /// Mostly short, sometimes long.
    fn delay(&mut self) -> u64 {
        match self.rng.below(60) {
            0 => self.rng.below(2_500),
            _ => 1 + self.rng.below(30),
        }
    }

    fn ask_etcd(&mut self, n: usize, ask: Ask) {
        let (after, asked) = (self.delay(), self.now);
        self.at(n, after, Event::ToEtcd { ask, asked });
    }

    fn say(&mut self, n: usize, to: Run, say: Say) {
        let other = to.node as usize;
        let is_cut = |node: &Node| node.cut_until > self.now;
        if is_cut(&self.nodes[n]) || is_cut(&self.nodes[other]) || self.nodes[other].run != to {
            return;
        }
        let (after, from) = (self.delay(), self.nodes[n].run);
        self.at(other, after, Event::Said { from, say });
    }

    fn run(&mut self, until: u64) {
        while let Some(std::cmp::Reverse((at, number))) = self.queue.pop() {
            if at > until {
                return;
            }
            self.now = at;
            let (n, boot, event) = self.events.remove(&number).unwrap();
            if self.nodes[n].run.boot != boot {
                continue;
            }
            // etcd, the bucket and messages on their way do not stop with a node.
            let is_elsewhere = matches!(
                event,
                Event::ToEtcd { .. }
                    | Event::ReadAtBucket { .. }
                    | Event::WriteAtBucket { .. }
                    | Event::Restarts
            );
            let paused = self.nodes[n].paused_until;
            if !is_elsewhere && paused > at {
                self.at(n, paused - at, event);
                continue;
            }
            self.step(n, event);
        }
    }

    fn expire(&mut self) {
        let now = self.now;
        self.leases.retain(|_, expires| *expires > now);
        let leases = &self.leases;
        self.registered.retain(|_, t| leases.contains_key(&t.lease));
    }

    fn at_etcd(&mut self, n: usize, ask: Ask, asked: u64) {
        self.expire();
        let after = self.delay();
        match ask {
            Ask::Read { mark } => {
                let nodes = self.registered.values().cloned().collect();
                let ended = self.marks.clone();
                self.at(n, after, Event::Looked { mark, nodes, ended });
            }
            Ask::Grant => {
                let lease = self.next_lease;
                self.next_lease += 1;
                self.leases.insert(lease, self.now + LEASE);
                self.at(n, after, Event::Granted { lease, asked });
            }
            Ask::Register { term } => {
                if self.leases.contains_key(&term.lease) {
                    self.registered.insert(n as u64, term);
                }
            }
            Ask::Renew { lease } => {
                let is_alive = self.leases.contains_key(&lease);
                if is_alive {
                    self.leases.insert(lease, self.now + LEASE);
                }
                let renewed = Event::Renewed {
                    lease,
                    asked,
                    is_alive,
                };
                self.at(n, after, renewed);
            }
            Ask::End { term } => {
                let registered = self.registered.get(&term.run.node);
                if registered.is_some_and(|r| r.lease == term.lease) {
                    if self.without != Without::Marks {
                        self.marks.push(term.clone());
                    }
                    self.leases.remove(&term.lease);
                    self.expire();
                }
                self.at(n, after, Event::EndedTerm { term });
            }
        }
    }

    fn step(&mut self, n: usize, event: Event) {
        let now = ms(self.now);
        match event {
            Event::ToEtcd { ask, asked } => self.at_etcd(n, ask, asked),
            Event::Renews => {
                if let Some(lease) = self.nodes[n].terms.lease() {
                    self.ask_etcd(n, Ask::Renew { lease });
                }
                self.at(n, 2_500, Event::Renews);
            }
            Event::Renewed {
                lease,
                asked,
                is_alive,
            } => {
                let terms = &mut self.nodes[n].terms;
                match is_alive {
                    true => terms.renewed(lease, ms(asked)),
                    false if terms.lease() == Some(lease) => {
                        terms.end();
                    }
                    false => {}
                }
            }
            Event::Looks => {
                let mark = self.nodes[n].terms.mark();
                self.ask_etcd(n, Ask::Read { mark });
                let after = 500 + self.rng.below(1_500);
                self.at(n, after, Event::Looks);
            }
            Event::Looked { mark, nodes, ended } => {
                let node = &mut self.nodes[n];
                for gone in node.terms.looked(mark, &nodes, &ended, now) {
                    node.doubts.gone(gone);
                }
                let mine = nodes.iter().find(|t| t.run.node == n as u64);
                if let Some(before) = mine.filter(|t| t.run != self.nodes[n].run) {
                    // An earlier start, which may only be stopped.
                    let term = before.clone();
                    self.ask_etcd(n, Ask::End { term });
                } else if mine.is_none_or(|t| Some(t) != self.nodes[n].term().as_ref())
                    && self.nodes[n].terms.lease().is_none()
                {
                    self.ask_etcd(n, Ask::Grant);
                }
            }
            Event::Granted { lease, asked } => {
                if self.nodes[n].terms.lease().is_none() {
                    self.nodes[n].terms.granted(lease, ms(asked));
                    let term = self.nodes[n].term().unwrap();
                    self.ask_etcd(n, Ask::Register { term });
                }
            }
            Event::EndedTerm { term } => {
                let terms = &mut self.nodes[n].terms;
                terms.revoked(&term, now);
                if self.without == Without::WaitingAfterRevoke {
                    terms.left(term.run);
                }
            }
            Event::Tick => {
                self.tick(n);
                self.at(n, 100, Event::Tick);
            }
            Event::Said { from, say } => self.hear(n, from, say),
            Event::Reads => {
                self.read(n);
                let after = 5 + self.rng.below(60);
                self.at(n, after, Event::Reads);
            }
            Event::ReadAtBucket { read } => {
                let (value, after) = (self.values[read.name], self.delay());
                self.at(n, after, Event::FromBucket { value, read });
            }
            Event::FromBucket { value, read } => self.got(n, value, &read),
            Event::Writes => {
                let name = self.rng.below(NAMES as u64) as usize;
                let after = self.delay();
                self.at(n, after, Event::WriteAtBucket { name });
                let after = 100 + self.rng.below(2_000);
                self.at(n, after, Event::Writes);
            }
            Event::WriteAtBucket { name } => {
                self.last += 1;
                self.values[name] = self.last;
                let (value, after) = (self.last, self.delay());
                self.at(n, after, Event::Written { name, value });
            }
            Event::Written { name, value } => self.tell(n, name, value),
            Event::Forgot {
                run,
                number,
                name,
                acknowledges,
            } => {
                let node = &mut self.nodes[n];
                // It may have started again meanwhile.
                if node.run == run {
                    node.writes.remove(&number);
                    node.heads[name] = None;
                    node.generation += 1;
                    if let Some(value) = acknowledges {
                        self.done += 1;
                        self.acknowledged[name] = self.acknowledged[name].max(value);
                    }
                }
            }
            Event::Restarts => {
                let node = &self.nodes[n];
                let heads = node.heads.map(|head| head.map(|(value, _)| (value, 0)));
                self.nodes[n] = Node::new(n, node.run.boot + 1, heads);
                self.begin(n);
            }
        }
    }

    fn is_trusted(&self, n: usize) -> bool {
        self.nodes[n].terms.is_trusted(ms(self.now))
    }

    fn fresh(&self, n: usize, name: usize) -> Option<u64> {
        let node = &self.nodes[n];
        let (value, begun) = node.heads[name].filter(|_| self.is_trusted(n))?;
        let is_since = begun == node.terms.begun() || self.without == Without::Floor;
        is_since.then_some(value)
    }

    fn read(&mut self, n: usize) {
        let name = self.rng.below(NAMES as u64) as usize;
        let node = &self.nodes[n];
        let read = Reading {
            name,
            least: self.acknowledged[name],
            begun: if self.is_trusted(n) {
                node.terms.begun()
            } else {
                0
            },
            generation: node.generation,
        };
        if let Some(value) = self.fresh(n, name) {
            self.hits += 1;
            return self.check(value, &read);
        }
        let home = self.nodes[name].run;
        let is_doubtful = node.doubts.has(name as u128) && self.without != Without::Doubt;
        let asks_home = self.is_trusted(n) && !is_doubtful && name != n;
        let has_head = node.heads[name].is_some();
        match asks_home && !has_head {
            true => self.say(n, home, Say::Current { name, read }),
            false => {
                let after = self.delay();
                self.at(n, after, Event::ReadAtBucket { read });
            }
        }
    }

    fn got(&mut self, n: usize, value: u64, read: &Reading) {
        self.check(value, read);
        let node = &mut self.nodes[n];
        if node.generation == read.generation {
            node.heads[read.name] = Some((value, read.begun));
        }
    }

    fn check(&mut self, value: u64, read: &Reading) {
        self.stale += usize::from(value < read.least);
    }

    fn tell(&mut self, n: usize, name: usize, value: u64) {
        let now = ms(self.now);
        let node = &mut self.nodes[n];
        let number = node.next_write;
        node.next_write += 1;
        let silent = node.terms.to_tell(now);
        let term = match node.terms.may_acknowledge(now) {
            true => node.terms.number(),
            false => 0,
        };
        let to: Vec<Run> = silent.iter().map(|t| t.run).collect();
        let write = Write {
            name,
            value,
            term,
            silent,
            until: self.now + TELL,
            asked_end: BTreeSet::new(),
            forgets: false,
        };
        node.writes.insert(number, write);
        let below = node.over_below();
        for run in to {
            let told = Say::Told {
                write: number,
                below,
                name,
            };
            self.say(n, run, told);
        }
        self.tick(n);
    }

    fn tick(&mut self, n: usize) {
        let (at, now) = (self.now, ms(self.now));
        let numbers: Vec<u64> = self.nodes[n].writes.keys().copied().collect();
        for number in numbers {
            let node = &mut self.nodes[n];
            let terms = &node.terms;
            let write = node.writes.get_mut(&number).unwrap();
            write.silent.retain(|t| !terms.is_over(t, now));
            let is_still = write.term == terms.number() && terms.may_acknowledge(now);
            if write.forgets {
                continue;
            }
            if write.silent.is_empty() || !is_still {
                write.forgets = true;
                // This node forgets after the others.
                let forgot = Event::Forgot {
                    run: node.run,
                    number,
                    name: write.name,
                    acknowledges: is_still.then_some(write.value),
                };
                if self.without == Without::OwnForgetting {
                    node.writes.remove(&number);
                }
                let after = self.delay();
                self.at(n, after, forgot);
                continue;
            }
            if write.until <= at {
                let silent = write.silent.clone();
                for term in silent {
                    let node = &mut self.nodes[n];
                    let write = node.writes.get_mut(&number).unwrap();
                    if node.terms.ends_at(&term).is_none() && write.asked_end.insert(term.run) {
                        self.ask_etcd(n, Ask::End { term });
                    }
                }
            }
        }
        let node = &self.nodes[n];
        let (owing, below) = (node.terms.to_announce(), node.over_below());
        if let Some(term) = node.term() {
            for to in owing {
                if self.without == Without::Announcing {
                    let number = term.number;
                    self.nodes[n].terms.acknowledged(number, to.run);
                    continue;
                }
                self.say(n, to.run, Say::Announce(term.clone()));
            }
            self.nodes[n].terms.settle(now);
        }
        let all: Vec<Run> = self.nodes[n]
            .terms
            .to_tell(now)
            .iter()
            .map(|t| t.run)
            .collect();
        for run in all {
            self.say(n, run, Say::Over { below });
        }
    }

    fn hear(&mut self, n: usize, from: Run, say: Say) {
        let node = &mut self.nodes[n];
        match say {
            Say::Announce(term) => {
                let (number, by) = (term.number, node.run);
                node.terms.announced(term);
                self.say(n, from, Say::Acknowledge { number, by });
            }
            Say::Acknowledge { number, by } => node.terms.acknowledged(number, by),
            Say::Told { write, below, name } => {
                node.terms.told_by(from);
                node.doubts.over(from, below);
                node.doubts.told(from, write, name as u128);
                node.heads[name] = None;
                node.generation += 1;
                let by = node.run;
                self.say(n, from, Say::Acked { write, by });
            }
            Say::Over { below } => {
                node.terms.told_by(from);
                node.doubts.over(from, below);
            }
            Say::Acked { write, by } => {
                if let Some(write) = node.writes.get_mut(&write) {
                    write.silent.retain(|t| t.run != by);
                }
            }
            Say::Current { name, read } => match self.fresh(n, name) {
                Some(value) => self.say(n, from, Say::Answer { value, read }),
                // It asks the bucket, at this moment.
                None => {
                    let value = self.values[name];
                    self.say(n, from, Say::Answer { value, read });
                }
            },
            Say::Answer { value, read } => self.got(n, value, &read),
        }
    }

    /// A minute in which nodes pause, are cut off and start again.
    fn live(&mut self) {
        for _ in 0..12 {
            let until = self.now + 1_000 + self.rng.below(9_000);
            self.run(until);
            self.now = until;
            let n = self.rng.below(NODES as u64) as usize;
            let span = self.rng.below(15_000);
            match self.rng.below(4) {
                0 => self.nodes[n].paused_until = self.now + span,
                1 => self.nodes[n].cut_until = self.now + span,
                2 => self.at(n, 0, Event::Restarts),
                _ => {}
            }
        }
    }
}

fn cases() -> u64 {
    let factor = std::env::var("FOREBAY_TEST_CASES").ok();
    60 * factor.and_then(|n| n.parse::<u64>().ok()).unwrap_or(1)
}

fn seeds() -> std::ops::Range<u64> {
    match std::env::var("FOREBAY_TEST_SEED").map(|n| n.parse::<u64>()) {
        Ok(Ok(seed)) => seed..seed + 1,
        _ => 1..cases() + 1,
    }
}

#[test]
fn no_read_is_older_than_an_acknowledged_write() {
    let (mut hits, mut done) = (0, 0);
    for seed in seeds() {
        let mut world = World::new(seed, Without::Nothing);
        world.live();
        assert_eq!(world.stale, 0, "FOREBAY_TEST_SEED={seed}");
        (hits, done) = (hits + world.hits, done + world.done);
    }
    // It is not because nobody trusts what it knows, or nothing is acknowledged.
    let count = seeds().count();
    assert!(hits > 500 * count && done > 30 * count, "{hits} {done}");
}

#[test]
fn each_rule_is_needed() {
    for without in [
        Without::Announcing,
        Without::Floor,
        Without::WaitingAfterRevoke,
        Without::Doubt,
        Without::Marks,
        Without::OwnForgetting,
    ] {
        let is_stale = |seed| {
            let mut world = World::new(seed, without);
            world.live();
            world.stale > 0
        };
        assert!(
            (1..3_000).any(is_stale),
            "nothing is wrong without {without:?}"
        );
    }
}

fn term(node: u64, number: u64) -> Term {
    Term {
        run: Run { node, boot: 1 },
        number,
        lease: (100 * node + number) as i64,
        address: String::new(),
    }
}

/// A node that has registered, and not listed the others yet.
fn registered() -> (Terms, Term) {
    let mine = term(1, 1);
    let mut terms = Terms::new(mine.run, ms(LEASE));
    terms.granted(mine.lease, ms(0));
    (terms, mine)
}

#[test]
fn what_a_node_says_late_hides_no_newer_term() {
    let (mut terms, mine) = registered();
    let mark = terms.mark();
    // While etcd is read, what the other node said in its first term arrives. It is in its second.
    terms.announced(term(2, 1));
    terms.looked(mark, &[mine.clone(), term(2, 2)], &[], ms(10));
    assert_eq!(terms.to_tell(ms(10)), [term(2, 2)]);
    // It is told of writes for as long as it is in that term.
    for at in [1_000, 12_000, 30_000] {
        let mark = terms.mark();
        terms.looked(mark, &[mine.clone(), term(2, 2)], &[], ms(at));
        terms.announced(term(2, 1));
        assert_eq!(terms.to_tell(ms(at)), [term(2, 2)], "at {at}");
    }
    // What it says itself of that term is newer than the list.
    let (mut terms, mine) = registered();
    let mark = terms.mark();
    terms.announced(term(2, 3));
    terms.looked(mark, &[mine, term(2, 2)], &[], ms(10));
    assert_eq!(terms.to_tell(ms(10)), [term(2, 3)]);
}

#[test]
fn names_of_a_node_that_has_left_do_not_stay_in_doubt() {
    let (mut terms, mine) = registered();
    let (mut doubts, writer) = (Doubts::default(), term(2, 1));
    let all = [mine.clone(), writer.clone()];
    terms.looked(terms.mark(), &all, &[], ms(10));
    terms.left(writer.run);
    doubts.gone(writer.run);
    // It was writing, and says so. That the write is over it never says.
    terms.told_by(writer.run);
    doubts.told(writer.run, 5, 77);
    assert!(terms.to_tell(ms(20)).is_empty(), "it is not told of writes");
    assert!(terms.is_over(&writer, ms(20)), "nor waited for");
    // As long as it is there, it may be that it writes.
    let mut looks = |nodes: &[Term], at| {
        let gone = terms.looked(terms.mark(), nodes, &[], ms(at));
        gone.into_iter().for_each(|run| doubts.gone(run));
        doubts.has(77)
    };
    assert!(looks(&all, 1_000) && looks(&all, 20_000));
    let alone = &all[..1];
    assert!(
        looks(alone, 21_000) && looks(alone, 25_000),
        "a lease may last"
    );
    assert!(!looks(alone, 32_000));
}

#[test]
fn a_writer_that_begins_another_term_keeps_its_names_in_doubt() {
    let (mut terms, mine) = registered();
    let (mut doubts, first) = (Doubts::default(), term(2, 1));
    terms.looked(terms.mark(), &[mine.clone(), first.clone()], &[], ms(10));
    // It is in its second term, which it did not announce here yet, and writes.
    let all = [mine, term(2, 2)];
    terms.looked(terms.mark(), &all, &[], ms(1_000));
    terms.told_by(first.run);
    doubts.told(first.run, 5, 77);
    for at in [2_000, 12_000, 30_000] {
        for run in terms.looked(terms.mark(), &all, &[], ms(at)) {
            doubts.gone(run);
        }
        assert!(doubts.has(77), "at {at}");
    }
}

#[test]
fn a_write_that_is_told_of_after_it_is_over_is_not_in_doubt() {
    let (mut doubts, writer) = (Doubts::default(), term(2, 1).run);
    doubts.over(writer, 6);
    doubts.told(writer, 5, 77);
    assert!(!doubts.has(77) && doubts.is_empty());
    doubts.told(writer, 6, 78);
    assert!(doubts.has(78));
}
