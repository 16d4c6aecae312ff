//! What one node makes of the maps that it has seen: whom it asks for a unit, and in which order.
//!
//! A node that owns a slot asks the slot's former owners, while they may have what it lacks, and then
//! the origin. A node that does not own it asks the owner; if that does not answer, the next in the
//! order of the slot; then the origin.
//!
//! # Invariants
//!
//! *One hop*: whoever is asked by a peer asks others only for what they have
//! ([`Ask::LocalOnly`]), never to fetch it. So no two nodes wait for each other, even if their maps
//! differ. A node never asks itself, and none that is not in its map.

use crate::{Map, Owners, Table, Unit};
use forebay_core::{Error, Result};
use std::{collections::HashMap, sync::Arc, time::Duration};

/// How long a new owner asks former owners if it is never told that it has everything they had.
pub const HAND_OVER_MAX: Duration = Duration::from_secs(24 * 3600);
/// A slot that changes its owner more often than this within that time forgets the earliest.
const FORMER_MAX: usize = 3;
/// So many nodes are asked to fetch a unit before the origin is asked directly.
const FILLERS_MAX: usize = 2;

/// What a peer is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Bytes that it has, or a miss.
    LocalOnly,
    /// Bytes, which it fetches if it does not have them: it owns the unit, or stands in for its
    /// owner.
    OwnerFill,
}

/// Where a unit may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// At the node with this id.
    Peer(u64, Ask),
    /// At the origin, which has everything.
    Origin,
}

/// How a unit is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// In the order in which to try.
    pub sources: Vec<Source>,
    /// Whether this node is the one to keep it: as its owner, or as the first that stands in for
    /// it. Others keep it only where they have room to spare.
    pub fills: bool,
}

impl Route {
    fn past_all() -> Self {
        Self {
            sources: vec![Source::Origin],
            fills: false,
        }
    }
}

/// What a new map changed for this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Slots that it owns now, and did not.
    pub gained: Vec<u32>,
    /// Slots that it owned, and does not: what it has of them goes first.
    pub lost: Vec<u32>,
}

/// Those who owned a slot before, by id, the latest first.
#[derive(Clone, Copy, Debug)]
struct Former {
    owners: [Option<u64>; FORMER_MAX],
    until: Duration,
}

impl Former {
    fn note(&mut self, latest: Option<u64>) {
        let others = self.owners.into_iter().flatten();
        let mut all = latest
            .into_iter()
            .chain(others.filter(|&id| Some(id) != latest));
        self.owners = std::array::from_fn(|_| all.next());
    }
}

/// One node's view of its cluster. Times are those of any clock that never goes back.
#[derive(Clone, Debug)]
pub struct View {
    me: u64,
    map: Arc<Map>,
    table: Arc<Table>,
    /// By slot. Of all slots: the next owner asks those who were owners before this one, too.
    former: HashMap<u32, Former>,
}

impl View {
    /// The view of the node `me`, which has just started. If there were other maps within
    /// [`HAND_OVER_MAX`], this takes the earliest, and [`View::advance`] the others.
    pub fn new(me: u64, map: Arc<Map>, table: Arc<Table>) -> Self {
        Self {
            me,
            map,
            table,
            former: HashMap::new(),
        }
    }

    /// The newest map that it has seen.
    pub fn map(&self) -> &Arc<Map> {
        &self.map
    }

    /// Takes over a map and its table, if the map is newer.
    ///
    /// # Errors
    /// `Invalid` if it is a map of another cluster, or places in another way: nothing changes then.
    pub fn advance(&mut self, map: Arc<Map>, table: Arc<Table>, now: Duration) -> Result<Change> {
        let same = |m: &Map| (m.cluster.clone(), m.seed, m.placement);
        if same(&map) != same(&self.map) {
            return Err(Error::invalid(format!(
                "a map of cluster {:?} (seed {:016x}, placement {}) cannot follow one of cluster \
                 {:?} (seed {:016x}, placement {})",
                map.cluster,
                map.seed,
                map.placement,
                self.map.cluster,
                self.map.seed,
                self.map.placement
            ))
            .hint("a node belongs to one cluster: check where it reads the map from"));
        }
        if map.epoch <= self.map.epoch {
            return Ok(Change::default());
        }
        let mut change = Change::default();
        for slot in 0..crate::SLOTS as u32 {
            let was = first(&self.map, &self.table, slot);
            let is = first(&map, &table, slot);
            if was == is {
                continue;
            }
            let until = now + HAND_OVER_MAX;
            let owners = [None; FORMER_MAX];
            let former = self.former.entry(slot).or_insert(Former { owners, until });
            former.until = until;
            former.note(was);
            if is == Some(self.me) {
                change.gained.push(slot);
            } else if was == Some(self.me) {
                change.lost.push(slot);
            }
        }
        (self.map, self.table) = (map, table);
        Ok(change)
    }

    /// Everything that former owners had of this slot, which this node owns, is here.
    pub fn handed_over(&mut self, slot: u32) {
        self.former.remove(&slot);
    }

    /// Forgets former owners whose time is over.
    pub fn expire(&mut self, now: Duration) {
        self.former.retain(|_, former| former.until > now);
    }

    /// The slots of this node whose former owners are still asked.
    pub fn handing_over(&self) -> impl Iterator<Item = u32> {
        let own = |slot: &u32| first(&self.map, &self.table, *slot) == Some(self.me);
        self.former.keys().copied().filter(own)
    }

    /// Whether this node is the first owner of a unit.
    pub fn owns(&self, unit: &Unit) -> bool {
        first(&self.map, &self.table, unit.slot(self.map.seed)) == Some(self.me)
    }

    /// How a unit is read that is not in the local cache. `answers` says which peers are worth asking
    /// at this moment.
    pub fn route(&self, unit: &Unit, answers: impl Fn(u64) -> bool) -> Route {
        let slot = unit.slot(self.map.seed);
        let Some(Owners { first, .. }) = self.table.owners(slot) else {
            return Route::past_all();
        };
        let owner = self.id(first);
        if owner == self.me {
            return self.route_of_filler(unit, answers);
        }
        let ask = |id| Source::Peer(id, Ask::OwnerFill);
        if answers(owner) {
            return Route {
                sources: vec![ask(owner), Source::Origin],
                fills: false,
            };
        }
        // This is rare; only now is the order of all others computed.
        let mut sources = Vec::with_capacity(FILLERS_MAX + 1);
        for place in self.table.ranked(slot) {
            let id = self.id(place);
            if id == self.me {
                // What is left is what this node does as a stand-in.
                let own = self.route_of_filler(unit, answers);
                let fills = sources.is_empty();
                sources.extend(own.sources);
                return Route { sources, fills };
            }
            if answers(id) {
                sources.push(ask(id));
            }
            if sources.len() == FILLERS_MAX {
                break;
            }
        }
        sources.push(Source::Origin);
        Route {
            sources,
            fills: false,
        }
    }

    /// How this node reads a unit that it fetches as the owner, or because a peer has asked it to:
    /// from former owners that have it, or from the origin.
    pub fn route_of_filler(&self, unit: &Unit, answers: impl Fn(u64) -> bool) -> Route {
        let former = self.former.get(&unit.slot(self.map.seed));
        let owners = former.map_or([None; FORMER_MAX], |f| f.owners);
        let asked = owners.into_iter().flatten().filter(|&id| {
            // Who was dropped from the map is gone for good.
            id != self.me && self.map.members.iter().any(|m| m.id == id) && answers(id)
        });
        let asked = asked.map(|id| Source::Peer(id, Ask::LocalOnly));
        Route {
            sources: asked.chain([Source::Origin]).collect(),
            fills: true,
        }
    }

    fn id(&self, place: u16) -> u64 {
        self.map.members[usize::from(place)].id
    }
}

fn first(map: &Map, table: &Table, slot: u32) -> Option<u64> {
    let owners = table.owners(slot)?;
    Some(map.members[usize::from(owners.first)].id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Member, MemberState};
    use proptest::prelude::*;
    use std::collections::{BTreeMap, HashSet};

    const HOUR: Duration = Duration::from_secs(3600);

    fn member(id: u64) -> Member {
        Member {
            id,
            address: String::new(),
            zone: String::new(),
            weight: 1 << 40,
            state: MemberState::Active,
        }
    }

    fn unit(number: u64) -> Unit {
        let name = u128::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        Unit { name, extent: 0 }
    }

    /// Some nodes with caches, one origin, and the map that all of them get.
    struct Cluster {
        map: Arc<Map>,
        table: Arc<Table>,
        /// The maps before, and when each was followed by the next.
        history: Vec<(Arc<Map>, Arc<Table>, Duration)>,
        nodes: BTreeMap<u64, (View, HashSet<Unit>)>,
        stopped: HashSet<u64>,
        now: Duration,
        from_origin: usize,
        deepest: usize,
    }

    impl Cluster {
        fn new(ids: impl IntoIterator<Item = u64>) -> Self {
            let map = Map::new("c", 9, ids.into_iter().map(member).collect()).unwrap();
            let mut cluster = Self {
                table: Arc::new(Table::new(&map)),
                map: Arc::new(map),
                history: Vec::new(),
                nodes: BTreeMap::new(),
                stopped: HashSet::new(),
                now: Duration::ZERO,
                from_origin: 0,
                deepest: 0,
            };
            cluster.start();
            cluster
        }

        /// Those of the map that are not there yet: they read all maps.
        fn start(&mut self) {
            let now = (self.map.clone(), self.table.clone(), self.now);
            let maps: Vec<_> = self.history.iter().cloned().chain([now]).collect();
            for m in &self.map.members {
                self.nodes.entry(m.id).or_insert_with(|| {
                    let mut view = View::new(m.id, maps[0].0.clone(), maps[0].1.clone());
                    for (before, next) in maps.iter().zip(&maps[1..]) {
                        view.advance(next.0.clone(), next.1.clone(), before.2)
                            .unwrap();
                    }
                    view.expire(self.now);
                    (view, HashSet::new())
                });
            }
        }

        fn change(&mut self, members: Vec<Member>) {
            self.history
                .push((self.map.clone(), self.table.clone(), self.now));
            self.map = Arc::new(self.map.with(members).unwrap());
            self.table = Arc::new(Table::new(&self.map));
            self.start();
            for (view, _) in self.nodes.values_mut() {
                view.advance(self.map.clone(), self.table.clone(), self.now)
                    .unwrap();
            }
        }

        /// What each new owner does in the background.
        fn pull(&mut self) {
            let all: HashSet<Unit> = self.nodes.values().flat_map(|n| n.1.clone()).collect();
            for m in self.map.members.clone() {
                let handed: HashSet<u32> = self.nodes[&m.id].0.handing_over().collect();
                for unit in &all {
                    let missing = !self.nodes[&m.id].1.contains(unit);
                    if missing && handed.contains(&unit.slot(9)) {
                        self.read(m.id, *unit, 0, None);
                    }
                }
                for slot in handed {
                    self.nodes.get_mut(&m.id).unwrap().0.handed_over(slot);
                }
            }
        }

        fn read(&mut self, at: u64, unit: Unit, depth: usize, ask: Option<Ask>) -> bool {
            self.deepest = self.deepest.max(depth);
            assert!(!self.stopped.contains(&at), "a stopped node is not asked");
            let (view, cache) = &self.nodes[&at];
            if cache.contains(&unit) {
                return true;
            }
            let answers = |id| !self.stopped.contains(&id);
            let route = match ask {
                Some(Ask::LocalOnly) => return false,
                Some(Ask::OwnerFill) => view.route_of_filler(&unit, answers),
                None => view.route(&unit, answers),
            };
            let found = route.sources.iter().any(|source| match *source {
                Source::Origin => {
                    self.from_origin += 1;
                    true
                }
                Source::Peer(id, ask) => {
                    assert_ne!(id, at, "nobody asks itself");
                    self.read(id, unit, depth + 1, Some(ask))
                }
            });
            assert!(found, "the origin has everything");
            if route.fills {
                self.nodes.get_mut(&at).unwrap().1.insert(unit);
            }
            true
        }

        /// Reads all units, each at some node that is there; returns how many came from the origin.
        fn read_all(&mut self, units: u64) -> usize {
            let before = self.from_origin;
            let there = |id: &&u64| {
                !self.stopped.contains(*id) && self.map.members.iter().any(|m| m.id == **id)
            };
            let there: Vec<u64> = self.nodes.keys().filter(there).copied().collect();
            for number in 0..units {
                let at = there[(number * 7) as usize % there.len()];
                self.read(at, unit(number), 0, None);
            }
            self.from_origin - before
        }
    }

    #[test]
    fn each_unit_leaves_the_origin_once_and_a_join_reads_nothing_again() {
        let mut cluster = Cluster::new(1..=4);
        assert_eq!(cluster.read_all(2000), 2000);
        assert_eq!(cluster.read_all(2000), 0);
        cluster.change((1..=5).map(member).collect());
        assert_eq!(cluster.read_all(2000), 0);
        // About a fifth, but for what was read at the nodes that had it.
        let gained = cluster.nodes[&5].1.len();
        assert!((200..450).contains(&gained), "{gained}");
        // Two changes before anything was read: those who own now ask both who did before.
        cluster.change((1..=7).map(member).collect());
        cluster.change((1..=6).map(member).collect());
        assert_eq!(cluster.read_all(2000), 0);
        assert!(cluster.deepest <= 2, "a reader, a filler, a former owner");
    }

    #[test]
    fn what_a_stopped_node_has_is_read_by_its_stand_ins_and_no_more() {
        let mut cluster = Cluster::new(1..=5);
        cluster.read_all(2000);
        let lost = cluster.nodes[&3].1.len();
        cluster.stopped.insert(3);
        assert_eq!(cluster.read_all(2000), lost);
        assert_eq!(
            cluster.read_all(2000),
            0,
            "stand-ins keep what they fetched"
        );
        cluster.stopped.clear();
        assert_eq!(cluster.read_all(2000), 0, "it comes back with its cache");
        // Forgotten: the stand-ins own what they fetched already.
        cluster.stopped.insert(3);
        cluster.change([1, 2, 4, 5].map(member).to_vec());
        assert_eq!(cluster.read_all(2000), 0);
    }

    #[test]
    fn a_draining_node_is_asked_until_its_owners_have_everything() {
        let mut cluster = Cluster::new(1..=3);
        cluster.read_all(1000);
        let mut members: Vec<_> = (1..=3).map(member).collect();
        members[0].state = MemberState::Draining;
        cluster.change(members.clone());
        assert!(cluster.nodes[&2].0.handing_over().count() > 0);
        assert_eq!(cluster.nodes[&1].0.handing_over().count(), 0);
        assert_eq!(cluster.read_all(1000), 0);
        cluster.pull();
        assert_eq!(cluster.nodes[&2].0.handing_over().count(), 0);
        cluster.change(members[1..].to_vec());
        assert_eq!(cluster.read_all(1000), 0);
    }

    #[test]
    fn hand_overs_end() {
        let mut cluster = Cluster::new(1..=3);
        cluster.now = HOUR;
        cluster.change((1..=4).map(member).collect());
        let (view, _) = cluster.nodes.get_mut(&4).unwrap();
        let all = view.handing_over().count();
        let slots = crate::SLOTS;
        assert!((slots / 5..slots / 3).contains(&all), "{all}");
        let one = (0..).map(unit).find(|u| view.owns(u)).unwrap();
        let asked = |view: &View| view.route(&one, |_| true).sources.len() - 1;
        assert_eq!(asked(view), 1);
        assert_eq!(view.route(&one, |_| false).sources, [Source::Origin]);
        view.handed_over(one.slot(9));
        assert_eq!((asked(view), view.handing_over().count()), (0, all - 1));
        view.expire(HOUR + HAND_OVER_MAX - Duration::from_nanos(1));
        assert_eq!(view.handing_over().count(), all - 1);
        view.expire(HOUR + HAND_OVER_MAX);
        assert_eq!(view.handing_over().count(), 0);
    }

    #[test]
    fn maps_of_others_and_from_before_change_nothing() {
        let cluster = Cluster::new(1..=3);
        let mut view = cluster.nodes[&1].0.clone();
        let placed = |map: Map| {
            let table = Table::new(&map);
            (Arc::new(map), Arc::new(table))
        };
        let members = || [1, 2].map(member).to_vec();
        for (name, seed) in [("d", 9), ("c", 8)] {
            let (map, table) = placed(Map::new(name, seed, members()).unwrap());
            let e = view.advance(map, table, HOUR).unwrap_err();
            assert!(e.to_string().contains("cannot follow"), "{e}");
        }
        let (next, table) = placed(cluster.map.with(members()).unwrap());
        let change = view.advance(next.clone(), table.clone(), HOUR).unwrap();
        assert!(!change.gained.is_empty() && change.lost.is_empty());
        for (map, table) in [(next, table), (cluster.map.clone(), cluster.table.clone())] {
            assert_eq!(view.advance(map, table, HOUR).unwrap(), Change::default());
        }
        assert_eq!((view.map().epoch, view.map().members.len()), (2, 2));
    }

    /// A step of a cluster's life.
    #[derive(Clone, Debug)]
    enum Step {
        Join(u64),
        Leave(prop::sample::Index),
        Drain(prop::sample::Index),
        Stop(prop::sample::Index),
        Start,
        Read,
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1u64..40).prop_map(Step::Join),
            any::<prop::sample::Index>().prop_map(Step::Leave),
            any::<prop::sample::Index>().prop_map(Step::Drain),
            any::<prop::sample::Index>().prop_map(Step::Stop),
            Just(Step::Start),
            Just(Step::Read),
            (1u64..30).prop_map(Step::Wait),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        /// Each read is answered, by nodes that are there and in the map, over at most two hops,
        /// whatever happened; and where nothing changes any more, nothing is read again.
        #[test]
        fn whatever_happens_every_read_is_answered(steps in prop::collection::vec(step(), 1..14)) {
            let mut cluster = Cluster::new([1, 2, 3]);
            for step in steps {
                let mut members = cluster.map.members.clone();
                match step {
                    Step::Join(id) if members.iter().all(|m| m.id != id) => {
                        // One that was forgotten comes back without its cache.
                        cluster.nodes.remove(&id);
                        cluster.stopped.remove(&id);
                        members.push(member(id));
                        cluster.change(members);
                    }
                    Step::Leave(at) if members.len() > 1 => {
                        members.remove(at.index(members.len()));
                        cluster.change(members);
                    }
                    Step::Drain(at) => {
                        let at = at.index(members.len());
                        members[at].state = MemberState::Draining;
                        cluster.change(members);
                    }
                    Step::Stop(at) if cluster.stopped.len() + 1 < members.len() => {
                        cluster.stopped.insert(members[at.index(members.len())].id);
                    }
                    Step::Start => cluster.stopped.clear(),
                    Step::Wait(hours) => {
                        cluster.now += HOUR * hours as u32;
                        let now = cluster.now;
                        for (view, _) in cluster.nodes.values_mut() {
                            view.expire(now);
                        }
                    }
                    _ => {}
                }
                let there: Vec<_> = cluster.map.members.iter()
                    .filter(|m| !cluster.stopped.contains(&m.id))
                    .map(|m| m.state)
                    .collect();
                if !there.is_empty() {
                    cluster.read_all(60);
                    prop_assert!(cluster.deepest <= 2);
                }
                if there.contains(&MemberState::Active) {
                    prop_assert_eq!(cluster.read_all(60), 0);
                }
            }
        }
    }
}
