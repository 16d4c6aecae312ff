//! Lives of clusters that no machine can hold: nodes with random weights in random zones join,
//! drain, die, come back and are forgotten, and after each change it is checked what the code that
//! places and routes promises.
//!
//! A [`Life`] is a function of its seed: one that is [`Broken`] can be lived again.
//!
//! # What is checked
//!
//! - *Moves*: nothing moves between members that stay as they are, and no more than 1.05 times what
//!   has to (and what chance does where that is little).
//! - *Spread*: each member has its share within what chance does; members of one weight together
//!   within 3 %.
//! - *Zones*: the two owners of a slot are of different zones where there are two, three copies in
//!   three; the owner is the best of all.
//! - *Routes*: each read ends, over at most two hops. A route ends at the origin, asks nobody twice,
//!   neither the node itself nor who asked it, and only members that answer.
//! - *Nothing is read again* that an owner has, while half of the nodes still go by the map before;
//!   and nothing at all when all go by the same one, and the owners have read it once.
//! - *Hand-overs end*, by being done and by time, and afterwards nothing is read again either.
//!
//! Not all nodes of a cluster are followed, but all those that have to do with some units of which
//! it is followed who has them.

use crate::{
    Ask, COPIES_MAX, HAND_OVER_MAX, Map, Member, MemberState, Placed, Route, SLOTS, Source,
    Standing, Unit, View, forecast,
};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    sync::Arc,
    time::Duration,
};

/// Units of which it is followed who has them.
const UNITS: usize = 40;
/// Nodes at which they are read, each time others.
const READERS: usize = 8;
/// Slots whose order is computed after each change.
const SLOTS_LOOKED_AT: usize = 128;
/// Maps that a node reads when it starts: more than it remembers.
const MAPS: usize = 5;
const HOUR: Duration = Duration::from_secs(3600);
/// What may move, of what has to.
const MOVES_MAX: f64 = 1.05;
/// How far members of one weight together may be from their share.
const WEIGHTS_OFF_MAX: f64 = 0.03;
/// Where so many slots are due to them, chance does not do that.
const SLOTS_OF_WEIGHT_MIN: f64 = 40_000.0;

/// One cluster's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// All that is random follows from it.
    pub seed: u64,
    /// The most nodes that it ever has; the least are half of that.
    pub nodes: u16,
    /// How often something happens.
    pub changes: u32,
}

/// What was seen in a life in which everything held.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Lived {
    /// The least members of a map.
    pub nodes_least: usize,
    /// The most.
    pub nodes_most: usize,
    /// Changes of the map.
    pub maps: u32,
    /// Things that were checked.
    pub checks: u64,
    /// What was moved by all changes, in shares of everything.
    pub moved: f64,
    /// What had to be.
    pub least: f64,
    /// How far members of one weight together were from their share at most, of it.
    pub weights_off: f64,
}

/// Something did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// The life.
    pub life: Life,
    /// After how many changes.
    pub after: u32,
    /// The last of them.
    pub happened: String,
    /// What did not hold.
    pub what: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Life { seed, nodes, .. }, after) = (self.life, self.after);
        let (happened, what) = (&self.happened, &self.what);
        write!(
            f,
            "seed {seed}, at most {nodes} nodes, change {after} ({happened}): {what}"
        )
    }
}

impl std::error::Error for Broken {}

impl Life {
    /// Lives it.
    ///
    /// # Errors
    /// The first thing that does not hold.
    pub fn live(self) -> Result<Lived, Broken> {
        let mut cluster = Cluster::new(self);
        let mut outcome = cluster.begin();
        for number in 1..=self.changes {
            if outcome.is_err() {
                break;
            }
            cluster.after = number;
            outcome = cluster.something_happens();
        }
        match outcome {
            Ok(()) => Ok(cluster.lived),
            Err(what) => Err(Broken {
                life: self,
                after: cluster.after,
                happened: cluster.happened,
                what,
            }),
        }
    }
}

/// What did not hold, in words.
type Held<T = ()> = Result<T, String>;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Less than `n`, which is not 0.
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// So many of `all`, or all of them.
    fn some(&mut self, all: &[u64], count: usize) -> Vec<u64> {
        let mut left = all.to_vec();
        let count = count.min(left.len());
        (0..count)
            .map(|_| left.swap_remove(self.below(left.len())))
            .collect()
    }
}

/// A node that is followed.
struct Node {
    view: View,
    /// The units that it has.
    has: BTreeSet<usize>,
}

struct Cluster {
    life: Life,
    lived: Lived,
    random: Random,
    after: u32,
    happened: String,
    zones: usize,
    copies: u8,
    /// The last maps, and since when each has been the newest. The newest is the last.
    maps: VecDeque<(Arc<Placed>, Duration)>,
    now: Duration,
    /// While the maps change, half of the nodes go by the one before.
    changing: bool,
    nodes: BTreeMap<u64, Node>,
    down: BTreeSet<u64>,
    /// Those who were forgotten: some come back, without what they had.
    gone: Vec<u64>,
    units: Vec<Unit>,
    /// The units that were read from the origin, since it was last looked, and by whom.
    from_origin: Vec<(usize, u64)>,
}

impl Cluster {
    fn new(life: Life) -> Self {
        let mut random = Random(life.seed);
        let zones = 1 + random.below(6);
        let copies = [1, 1, 2, COPIES_MAX][random.below(4)];
        let units = (0..UNITS).map(|_| Unit {
            name: u128::from(random.next()) << 64 | u128::from(random.next()),
            extent: random.below(4) as u32,
        });
        Cluster {
            units: units.collect(),
            life,
            lived: Lived::default(),
            random,
            after: 0,
            happened: "it begins".to_owned(),
            zones,
            copies,
            maps: VecDeque::new(),
            now: HOUR,
            changing: false,
            nodes: BTreeMap::new(),
            down: BTreeSet::new(),
            gone: Vec::new(),
            from_origin: Vec::new(),
        }
    }

    fn newest(&self) -> &Arc<Placed> {
        &self.maps.back().expect("there is a map").0
    }

    /// The map before the newest.
    fn before(&self) -> &Arc<Placed> {
        let at = self.maps.len().saturating_sub(2);
        &self.maps[at].0
    }

    fn member(&mut self) -> Member {
        let back = match self.gone.len() {
            n if n > 0 && self.random.below(3) == 0 => {
                let at = self.random.below(n);
                Some(self.gone.swap_remove(at))
            }
            _ => None,
        };
        Member {
            id: back.unwrap_or_else(|| self.random.next()),
            name: String::new(),
            address: String::new(),
            url: String::new(),
            zone: format!("z{}", self.random.below(self.zones)),
            weight: 1 << (40 + self.random.below(4)),
            state: MemberState::Active,
        }
    }

    fn ids(&self, is_meant: impl Fn(&Member) -> bool) -> Vec<u64> {
        let members = self.newest().map().members.iter();
        members.filter(|m| is_meant(m)).map(|m| m.id).collect()
    }

    fn checks(&mut self, so_many: usize) {
        self.lived.checks += so_many as u64;
    }

    fn begin(&mut self) -> Held {
        let least = usize::from(self.life.nodes / 2).max(1);
        let count = least + self.random.below(usize::from(self.life.nodes) - least + 1);
        let members: Vec<_> = (0..count).map(|_| self.member()).collect();
        let map = Map::new("simulated", self.random.next(), members).map_err(|e| e.to_string())?;
        self.maps
            .push_back((Arc::new(Placed::new(map)), Duration::ZERO));
        (self.lived.nodes_least, self.lived.nodes_most) = (count, count);
        self.check_table()?;
        // Each unit leaves the origin once, whoever reads it.
        let read = self.read_all()?;
        holds(read.len() == UNITS, || {
            format!("{} units were fetched, of {UNITS}", read.len())
        })?;
        self.mirror();
        self.reads_nothing("when it was read once")
    }

    /// One change, and what must hold while it spreads, and then.
    fn something_happens(&mut self) -> Held {
        self.now += HOUR;
        let all = self.ids(|_| true);
        let active = self.ids(|m| m.state == MemberState::Active);
        let draining = self.ids(|m| m.state == MemberState::Draining);
        let down: Vec<u64> = self.down.iter().copied().collect();
        let least = usize::from(self.life.nodes / 2).max(1);
        let few = 1 + self.random.below(all.len().div_ceil(20));
        let mut members = self.newest().map().members.clone();
        let mut is_new_map = true;
        let mut forgotten = Vec::new();
        let kind = self.random.below(9);
        self.happened = match kind {
            0 | 1 if all.len() + few <= usize::from(self.life.nodes) => {
                members.extend((0..few).map(|_| self.member()));
                format!("{few} join")
            }
            2 if active.len() >= least + few => {
                let chosen = self.random.some(&active, few);
                change(&mut members, &chosen, |m| m.state = MemberState::Draining);
                format!("{few} drain")
            }
            3 if !draining.is_empty() => {
                let chosen = self.random.some(&draining, few);
                change(&mut members, &chosen, |m| m.state = MemberState::Active);
                format!("{} take a share again", chosen.len())
            }
            4 if !draining.is_empty() && all.len() > draining.len() + least => {
                members.retain(|m| m.state == MemberState::Active);
                forgotten = draining;
                format!("{} that were drained are forgotten", forgotten.len())
            }
            5 | 6 if down.len() + few <= all.len() / 10 => {
                let chosen = self.random.some(&all, few);
                self.down.extend(chosen);
                is_new_map = false;
                format!("{few} die")
            }
            7 if !down.is_empty() && self.random.below(2) == 0 => {
                self.down.clear();
                is_new_map = false;
                format!("{} come back", down.len())
            }
            7 if !down.is_empty() && all.len() > least => {
                forgotten = self.random.some(&down, 1);
                members.retain(|m| !forgotten.contains(&m.id));
                "one that died is forgotten".to_owned()
            }
            _ => {
                let chosen = self.random.some(&active, few);
                let is_more = self.random.below(2) == 0;
                change(&mut members, &chosen, |m| match is_more {
                    true => m.weight = m.weight.saturating_mul(2).min(1 << 46),
                    false => m.weight = (m.weight / 2).max(1 << 38),
                });
                format!(
                    "{few} have {} disks",
                    if is_more { "more" } else { "fewer" }
                )
            }
        };
        if is_new_map {
            self.announce(members)?;
        }
        for id in &forgotten {
            self.nodes.remove(id);
            self.down.remove(id);
        }
        self.gone.extend(forgotten);
        // Half of the nodes go by the map before.
        self.changing = is_new_map;
        let safe = self.safe(is_new_map);
        self.check_routes()?;
        let again = self.read_all()?;
        let of_safe = again.iter().filter(|(unit, _)| safe.contains(unit));
        let of_safe: Vec<_> = of_safe.copied().collect();
        self.checks(safe.len());
        holds(of_safe.is_empty(), || {
            let (count, all) = (of_safe.len(), safe.len());
            let first = self.described(of_safe[0]);
            format!("{count} of {all} units that an owner has are read again: {first}")
        })?;
        // All go by the newest.
        self.changing = false;
        self.read_all()?;
        self.read_at_owners()?;
        self.reads_nothing("when all go by the same map")?;
        if self.random.below(2) == 0 {
            self.pull()?;
        }
        self.mirror();
        self.reads_nothing("when copies are where they belong")?;
        self.check_windows_end()
    }

    fn announce(&mut self, members: Vec<Member>) -> Held {
        let before = self.newest().clone();
        let next = Arc::new(before.with(members).map_err(|e| e.to_string())?);
        let moves = forecast::moves((before.map(), before.table()), (next.map(), next.table()));
        let count = next.map().members.len();
        self.lived.nodes_least = self.lived.nodes_least.min(count);
        self.lived.nodes_most = self.lived.nodes_most.max(count);
        self.lived.maps += 1;
        self.lived.moved += moves.moved;
        self.lived.least += moves.least;
        self.maps.push_back((next, self.now));
        if self.maps.len() > MAPS {
            self.maps.pop_front();
        }
        self.checks(2);
        holds(moves.between_others == 0.0, || {
            format!("{:.3} % move between others", moves.between_others * 100.0)
        })?;
        let slots = SLOTS as f64;
        // Five standard deviations of what chance does with so many slots.
        let most = MOVES_MAX * moves.least + 5.0 * (moves.least * slots).sqrt() / slots;
        holds(moves.moved <= most, || {
            format!(
                "{:.3} % move, {:.3} % must",
                moves.moved * 100.0,
                moves.least * 100.0
            )
        })?;
        self.check_table()
    }

    /// Zones, order and spread of the newest map's table.
    fn check_table(&mut self) -> Held {
        let placed = self.newest().clone();
        let (map, table) = (placed.map(), placed.table());
        let zone = |place: u16| map.members[usize::from(place)].zone.as_str();
        let active = || {
            let members = map.members.iter();
            members.filter(|m| m.state == MemberState::Active)
        };
        let zones: BTreeSet<&str> = active().map(|m| m.zone.as_str()).collect();
        let count = active().count();
        let mut slots = vec![0u32; map.members.len()];
        for slot in 0..SLOTS as u32 {
            let Some(owners) = table.owners(slot) else {
                return Err(format!("slot {slot} has no owner"));
            };
            slots[usize::from(owners.first)] += 1;
            let is_right = match owners.second {
                None => count == 1,
                Some(second) if zones.len() > 1 => zone(second) != zone(owners.first),
                Some(second) => second != owners.first,
            };
            holds(is_right, || {
                format!("the second owner of slot {slot} is wrong: {owners:?}")
            })?;
        }
        for _ in 0..SLOTS_LOOKED_AT {
            let slot = self.random.below(SLOTS) as u32;
            let owners = table.owners(slot).expect("it has owners");
            let ranked = table.ranked(slot);
            let mut others = ranked[1..].iter();
            let second = others.find(|p| zones.len() == 1 || zone(**p) != zone(ranked[0]));
            let is_best = ranked.len() == count && owners.first == ranked[0];
            holds(is_best && owners.second == second.copied(), || {
                format!("the owners of slot {slot} are not the best: {owners:?}")
            })?;
            let keepers: Vec<_> = table.keepers(slot, COPIES_MAX).collect();
            let different: BTreeSet<_> = keepers.iter().collect();
            let in_zones: BTreeSet<_> = keepers.iter().map(|p| zone(*p)).collect();
            let expected = usize::from(COPIES_MAX).min(count);
            let is_right = keepers.len() == expected
                && different.len() == expected
                && in_zones.len() == expected.min(zones.len());
            holds(is_right, || {
                format!("three copies of slot {slot} are at {keepers:?}")
            })?;
        }
        let weight: f64 = active().map(|m| m.weight as f64).sum();
        let mut by_weight: BTreeMap<u64, (f64, f64)> = BTreeMap::new();
        for (member, has) in map.members.iter().zip(&slots) {
            let has = f64::from(*has);
            if member.state == MemberState::Draining {
                holds(has == 0.0, || "a draining member owns slots".to_owned())?;
                continue;
            }
            let due = SLOTS as f64 * member.weight as f64 / weight;
            holds((has - due).abs() <= 6.0 * due.sqrt() + 6.0, || {
                format!(
                    "member {:016x} has {has} slots, {due:.0} are due",
                    member.id
                )
            })?;
            let of_weight = by_weight.entry(member.weight).or_default();
            *of_weight = (of_weight.0 + has, of_weight.1 + due);
        }
        for (weight, (has, due)) in by_weight {
            let off = (has / due - 1.0).abs();
            if due < SLOTS_OF_WEIGHT_MIN {
                continue;
            }
            self.lived.weights_off = self.lived.weights_off.max(off);
            holds(off <= WEIGHTS_OFF_MAX, || {
                format!("members of weight {weight} have {has} slots, {due:.0} are due")
            })?;
        }
        self.checks(SLOTS + 2 * SLOTS_LOOKED_AT + count);
        Ok(())
    }

    /// Whether a node still goes by the map before the newest.
    fn is_late(&self, id: u64) -> bool {
        let epoch = self.newest().map().epoch;
        let was_there = |placed: &Placed| {
            let members = &placed.map().members;
            members.binary_search_by_key(&id, |m| m.id).is_ok()
        };
        self.changing
            && Random(self.life.seed ^ id ^ epoch.rotate_left(32)).next() & 1 == 1
            && was_there(self.before())
    }

    /// The node with the map that it goes by.
    fn node(&mut self, id: u64) -> Held<&mut Node> {
        let late = usize::from(self.is_late(id));
        let maps = self.maps.len() - late;
        let node = self.nodes.entry(id).or_insert_with(|| Node {
            view: View::new(id, self.maps[0].0.clone()),
            has: BTreeSet::new(),
        });
        let epoch = node.view.map().epoch;
        for (placed, since) in self.maps.iter().take(maps) {
            if placed.map().epoch > epoch {
                let age = self.now - *since;
                let taken = node.view.advance(placed.clone(), self.now, age);
                taken.map_err(|e| e.to_string())?;
            }
        }
        Ok(node)
    }

    /// The units of which the owner by the map before is there and has them; where the map is the
    /// same, those of which any that is to keep a copy has one.
    fn safe(&self, is_new_map: bool) -> BTreeSet<usize> {
        match is_new_map {
            true => self.kept(self.before(), 1),
            false => self.kept(self.newest(), self.copies),
        }
    }

    /// The units that one of those has, and is there, who are to keep so many copies of them.
    fn kept(&self, placed: &Placed, copies: u8) -> BTreeSet<usize> {
        let has = |id: u64, unit: &usize| {
            let node = self.nodes.get(&id).filter(|_| !self.down.contains(&id));
            node.is_some_and(|node| node.has.contains(unit))
        };
        let id = |place: u16| placed.map().members[usize::from(place)].id;
        let is_safe = |unit: &usize| {
            let slot = self.units[*unit].slot(placed.map().seed);
            let mut keepers = placed.table().keepers(slot, copies).map(id);
            keepers.any(|id| has(id, unit))
        };
        (0..UNITS).filter(is_safe).collect()
    }

    /// Reads all units, each at one of a few nodes that are there; returns those that came from the
    /// origin, and who read them there.
    fn read_all(&mut self) -> Held<Vec<(usize, u64)>> {
        let there = self.ids(|m| !self.down.contains(&m.id));
        let readers = self.random.some(&there, READERS);
        self.from_origin.clear();
        for unit in 0..UNITS {
            let at = readers[self.random.below(readers.len())];
            self.read(at, unit, 0, None)?;
        }
        self.checks(UNITS);
        Ok(std::mem::take(&mut self.from_origin))
    }

    fn reads_nothing(&mut self, when: &str) -> Held {
        let read = self.read_all()?;
        holds(read.is_empty(), || {
            let first = self.described(read[0]);
            format!(
                "{when}, {} of {UNITS} units are read again: {first}",
                read.len()
            )
        })
    }

    /// Those who own units, or stand in for their owners, read what they lack. (Until then, what
    /// only a stand-in of a dead owner has may be read once more by who comes before it now.)
    fn read_at_owners(&mut self) -> Held {
        let placed = self.newest().clone();
        let id = |place: u16| placed.map().members[usize::from(place)].id;
        for unit in 0..UNITS {
            let slot = self.units[unit].slot(placed.map().seed);
            let ranked = placed.table().ranked(slot);
            let mut order = placed.table().keepers(slot, 2).chain(ranked).map(id);
            if let Some(first) = order.find(|id| !self.down.contains(id)) {
                self.read(first, unit, 0, None)?;
            }
        }
        self.from_origin.clear();
        Ok(())
    }

    /// All that has to do with a unit that a node has read at the origin.
    fn described(&self, (unit, at): (usize, u64)) -> String {
        let placed = self.newest();
        let slot = self.units[unit].slot(placed.map().seed);
        let id = |place: u16| placed.map().members[usize::from(place)].id;
        let best = placed.table().ranked(slot).into_iter().take(5).map(id);
        let keepers = placed.table().keepers(slot, COPIES_MAX).map(id);
        let owners = self
            .maps
            .iter()
            .filter_map(|(placed, _)| placed.owner(&self.units[unit]));
        let having = self
            .nodes
            .iter()
            .filter(|(_, node)| node.has.contains(&unit));
        let [best, keepers, owners, having, down] = [
            best.collect::<Vec<_>>(),
            keepers.collect(),
            owners.collect(),
            having.map(|(id, _)| *id).collect(),
            self.down.iter().copied().collect(),
        ]
        .map(|ids| {
            ids.iter()
                .map(|id| format!("{:04x}", id >> 48))
                .collect::<Vec<_>>()
                .join(" ")
        });
        format!(
            "unit {unit} at {:04x}, {} copies; best {best}; keepers {keepers}; owners, the last \
             now: {owners}; have it: {having}; down: {down}",
            at >> 48,
            self.copies
        )
    }

    /// Whether the node got the unit.
    fn read(&mut self, at: u64, unit: usize, depth: usize, by: Option<(u64, Ask)>) -> Held<bool> {
        holds(depth <= 2, || {
            format!("unit {unit} is asked for over {depth} hops")
        })?;
        let (copies, what, down) = (self.copies, self.units[unit], self.down.clone());
        let node = self.node(at)?;
        if node.has.contains(&unit) {
            return Ok(true);
        }
        let answers = |id| !down.contains(&id);
        let view = &node.view;
        let route = match by {
            Some((_, Ask::LocalOnly)) => return Ok(false),
            Some((asker, Ask::OwnerFill)) => view.route_of_filler(&what, copies, asker, answers),
            None => view.route(&what, copies, answers),
        };
        check_route(&route, view, by.map(|(asker, _)| asker), answers)?;
        let mut found = false;
        for source in &route.sources {
            found = match *source {
                Source::Origin => {
                    self.from_origin.push((unit, at));
                    true
                }
                Source::Peer(id, ask) => self.read(id, unit, depth + 1, Some((at, ask)))?,
            };
            if found {
                break;
            }
        }
        holds(found, || format!("unit {unit} is not found anywhere"))?;
        if route.keeps(0) {
            self.node(at)?.has.insert(unit);
        }
        Ok(true)
    }

    /// Routes of units that nobody reads, whoever answers.
    fn check_routes(&mut self) -> Held {
        let there = self.ids(|m| !self.down.contains(&m.id));
        let members = self.ids(|_| true);
        let readers = self.random.some(&there, READERS);
        for number in 0..SLOTS_LOOKED_AT {
            let unit = Unit {
                name: u128::from(self.random.next()),
                extent: 0,
            };
            let (at, salt) = (readers[number % readers.len()], self.random.next());
            let asker = members[self.random.below(members.len())];
            let (copies, share) = (self.copies, number as u64 % 5);
            let view = &self.node(at)?.view;
            // From nobody to all.
            let answers = |id: u64| Random(id ^ salt).next() % 4 < share;
            check_route(&view.route(&unit, copies, answers), view, None, answers)?;
            if asker != at {
                let route = view.route_of_filler(&unit, copies, asker, answers);
                check_route(&route, view, Some(asker), answers)?;
            }
        }
        self.checks(2 * SLOTS_LOOKED_AT);
        Ok(())
    }

    /// What new owners do in the background: they take over what former owners have, and those drop
    /// it. All nodes go by the newest map.
    fn pull(&mut self) -> Held {
        let followed: Vec<u64> = self.nodes.keys().copied().collect();
        for id in &followed {
            if self.down.contains(id) {
                continue;
            }
            let view = &self.node(*id)?.view;
            let (epoch, seed) = (view.map().epoch, view.map().seed);
            let slots: Vec<_> = (view.handing_over())
                .map(|slot| (slot, view.former(slot).collect::<Vec<_>>()))
                .collect();
            let slots_of: BTreeSet<u32> = slots.iter().map(|(slot, _)| *slot).collect();
            for unit in 0..UNITS {
                if slots_of.contains(&self.units[unit].slot(seed)) {
                    self.read(*id, unit, 0, None)?;
                }
            }
            for (slot, formers) in &slots {
                self.node(*id)?.view.handed_over(*slot, epoch);
                for former in formers {
                    if let Some(former) = self.nodes.get_mut(former) {
                        former.view.released(*slot, epoch);
                    }
                }
            }
            let left = self.node(*id)?.view.handing_over().count();
            holds(left == 0, || {
                format!("{left} slots of a new owner that has everything are still handed over")
            })?;
        }
        // What its owner has goes at others. (What a dead owner has stays at who stands in for it.)
        let (units, copies) = (self.units.clone(), self.copies);
        let owned = self.kept(self.newest(), 1);
        for id in &followed {
            let node = self.node(*id)?;
            let view = &node.view;
            node.has.retain(|unit| {
                !owned.contains(unit) || view.standing(&units[*unit], copies) != Standing::Other
            });
        }
        self.checks(followed.len());
        self.reads_nothing("when everything is handed over")
    }

    /// What those who keep copies do in the background.
    fn mirror(&mut self) {
        if self.copies == 1 {
            return;
        }
        let placed = self.newest().clone();
        for unit in 0..UNITS {
            let slot = self.units[unit].slot(placed.map().seed);
            let keepers: Vec<u64> = (placed.table().keepers(slot, self.copies))
                .map(|place| placed.map().members[usize::from(place)].id)
                .filter(|id| !self.down.contains(id))
                .collect();
            let has = |id: &u64| {
                let node = self.nodes.get(id);
                node.is_some_and(|node| node.has.contains(&unit))
            };
            if keepers.iter().any(has) {
                for id in keepers {
                    if let Ok(node) = self.node(id) {
                        node.has.insert(unit);
                    }
                }
            }
        }
    }

    /// Whatever is not handed over: a day later, nobody is asked for it any more.
    fn check_windows_end(&mut self) -> Held {
        let now = self.now;
        let followed: Vec<u64> = self.nodes.keys().copied().collect();
        for id in self.random.some(&followed, READERS) {
            let mut view = self.node(id)?.view.clone();
            let closes = view.closes();
            holds(closes.is_none_or(|at| at <= now + HAND_OVER_MAX), || {
                format!("a hand-over ends at {closes:?}, and it is {now:?}")
            })?;
            view.expire(now + HAND_OVER_MAX);
            let left = view.handing_over().count();
            holds(left == 0 && view.losing().is_empty(), || {
                format!("after a day, {left} slots are still handed over")
            })?;
        }
        self.checks(2 * READERS);
        Ok(())
    }
}

fn holds(is_so: bool, otherwise: impl FnOnce() -> String) -> Held {
    if is_so { Ok(()) } else { Err(otherwise()) }
}

fn change(members: &mut [Member], chosen: &[u64], to: impl Fn(&mut Member)) {
    let chosen: BTreeSet<_> = chosen.iter().collect();
    members
        .iter_mut()
        .filter(|m| chosen.contains(&m.id))
        .for_each(to);
}

fn check_route(
    route: &Route,
    view: &View,
    asker: Option<u64>,
    answers: impl Fn(u64) -> bool,
) -> Held {
    let is_member = |id: u64| {
        let members = &view.map().members;
        members.binary_search_by_key(&id, |m| m.id).is_ok()
    };
    let (last, others) = route.sources.split_last().unzip();
    let mut seen = BTreeSet::new();
    let is_right = |source: &Source| match *source {
        Source::Origin => false,
        Source::Peer(id, _) => {
            seen.insert(id) && id != view.me() && Some(id) != asker && is_member(id) && answers(id)
        }
    };
    let is_whole = last == Some(&Source::Origin) && others.unwrap_or(&[]).iter().all(is_right);
    holds(is_whole, || {
        format!(
            "a route of {:016x}, asked by {asker:x?}, is wrong: {:x?}",
            view.me(),
            route.sources
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small clusters, in which every node is followed; the command line lives larger ones.
    #[test]
    fn lives_of_small_clusters_hold() {
        let mut moved = (0.0, 0.0);
        for seed in 0..6 {
            let life = Life {
                seed,
                nodes: 4 + seed as u16 * 3,
                changes: 6,
            };
            let lived = life.live().unwrap_or_else(|broken| panic!("{broken}"));
            assert!(lived.checks > 250_000 && lived.nodes_most <= usize::from(life.nodes));
            moved = (moved.0 + lived.moved, moved.1 + lived.least);
        }
        assert!(moved.0 > 0.5 && moved.0 <= MOVES_MAX * moved.1, "{moved:?}");
    }

    #[test]
    fn a_life_is_its_seed() {
        let life = |seed| Life {
            seed,
            nodes: 12,
            changes: 2,
        };
        let (one, again, other) = (life(5).live(), life(5).live(), life(6).live());
        assert_eq!(one, again);
        assert_ne!(one, other);
    }

    /// What is checked can fail: a node that keeps nothing, and one that all others believe dead.
    #[test]
    fn what_does_not_hold_is_told_with_its_seed() {
        let life = Life {
            seed: 1,
            nodes: 9,
            changes: 0,
        };
        let mut cluster = Cluster::new(life);
        cluster.begin().unwrap();
        for node in cluster.nodes.values_mut() {
            node.has.clear();
        }
        let what = cluster.reads_nothing("afterwards").unwrap_err();
        assert!(what.contains("are read again"), "{what}");
        let at = cluster.ids(|_| true)[0];
        let view = &cluster.node(at).unwrap().view;
        let other = (0..).map(|n| Unit::at(n << 64, 0)).find(|u| !view.owns(u));
        let route = view.route(&other.unwrap(), 1, |_| true);
        let what = check_route(&route, view, None, |_| false).unwrap_err();
        assert!(what.contains("is wrong"), "{what}");
        let broken = Broken {
            life,
            after: 3,
            happened: "2 join".to_owned(),
            what,
        };
        assert!(
            broken
                .to_string()
                .starts_with("seed 1, at most 9 nodes, change 3 (2 join): a")
        );
    }
}
