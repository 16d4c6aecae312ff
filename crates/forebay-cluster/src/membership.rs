//! Which map comes next: who joins, who is forgotten, and what operators order.
//!
//! Each node decides this for itself, from what it sees. Where the map has one home (etcd), the
//! decision is a proposal: of several nodes that propose the map of an epoch, one succeeds, and the
//! others look again. Where it has none (DNS), each node goes by a map of its own, and those of all
//! nodes become equal when they see the same.
//!
//! # Invariants
//!
//! A node changes itself and nobody else, unless the map has no home, and adds those who are there,
//! so that many nodes that start together need few maps. It takes a member out only if that was away
//! for as long as the operator allows, in one piece, while this node could see who is there; while
//! it cannot see, it counts nobody as absent. One map takes out one member at most.

use crate::{
    Map, Member, MemberState, PLACEMENT,
    map::{TEXT_MAX_BYTES, seed_of},
};
use forebay_core::{Error, ErrorKind, Result};
use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

/// What an operator orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The member gives its share to others, and serves what it has until they have it.
    Drain(u64),
    /// It takes a share again.
    Resume(u64),
    /// The map loses the member.
    Forget(u64),
}

/// What one node knows of who is there. Times are those of any clock that never goes back.
#[derive(Clone, Debug)]
pub struct Membership {
    cluster: String,
    me: Member,
    forget_after: Duration,
    /// Since when members are not there.
    away: HashMap<u64, Duration>,
}

impl Membership {
    /// The node `me` of this cluster; members that are away for `forget_after` are forgotten.
    ///
    /// # Errors
    /// `Invalid` for a name that is empty or too long.
    pub fn new(cluster: &str, me: Member, forget_after: Duration) -> Result<Self> {
        if cluster.is_empty() || cluster.len() > TEXT_MAX_BYTES {
            return Err(Error::invalid(format!(
                "the name of a cluster has 1 to {TEXT_MAX_BYTES} bytes, not {}",
                cluster.len()
            )));
        }
        Ok(Membership {
            cluster: cluster.to_owned(),
            me,
            forget_after,
            away: HashMap::new(),
        })
    }

    /// This node, as it wants to be in the map.
    pub fn me(&self) -> &Member {
        &self.me
    }

    /// The map of a node that knows of no others yet. Every other map is newer.
    ///
    /// # Errors
    /// As [`Map::new`].
    pub fn alone(&self) -> Result<Map> {
        let map = Map::new(&self.cluster, seed_of(&self.cluster), vec![self.me.clone()])?;
        Ok(Map { epoch: 0, ..map })
    }

    /// It cannot be seen who is there: absences are counted from the beginning when it can.
    pub fn cannot_see(&mut self) {
        self.away.clear();
    }

    /// The map that this node proposes where maps have one home: `found` is what lies there, `mine`
    /// the newest that this node has seen, `present` are those who are there, and as what they want
    /// to be in the map, where that is known. `None` if what lies there is right.
    ///
    /// # Errors
    /// `Invalid` if what lies there is the map of another cluster, or if the new map would be none.
    pub fn propose(
        &mut self,
        found: Option<&Map>,
        mine: &Map,
        present: &HashMap<u64, Option<Member>>,
        now: Duration,
    ) -> Result<Option<Map>> {
        if let Some(found) = found {
            self.is_ours(found)?;
        }
        // Its home lost the newest map, and perhaps all of them: it is put back.
        let is_lost = mine.epoch > 0 && found.is_none_or(|f| f.epoch < mine.epoch);
        // Two maps of one epoch, because its home lost one of them: neither stays.
        let is_twice = found.is_some_and(|f| f.epoch == mine.epoch && f != mine) && mine.epoch > 0;
        let base = match found {
            Some(found) if !is_lost => found.clone(),
            _ if mine.epoch > 0 => mine.clone(),
            _ => Map {
                members: Vec::new(),
                ..self.alone()?
            },
        };
        let mut members = base.members.clone();
        put(&mut members, &self.me);
        for member in present.values().flatten() {
            if members.iter().all(|m| m.id != member.id) {
                put(&mut members, member);
            }
        }
        self.forget(&mut members, |id| present.contains_key(&id), now);
        match members == base.members && !is_lost && !is_twice {
            true => Ok(None),
            false => base.with(members).map(Some),
        }
    }

    /// The next map of this node where maps have no home: `mine` is the one that it goes by, and
    /// `present` are those who are there. `None` if nothing changed; otherwise there may be another
    /// one after it.
    ///
    /// # Errors
    /// As [`Map::new`].
    pub fn follow(&mut self, mine: &Map, present: &[Member], now: Duration) -> Result<Option<Map>> {
        let others = present.iter().filter(|m| m.id != self.me.id);
        if mine.epoch == 0 && others.clone().next().is_some() {
            // Of two maps the first is the one from before this node came: it says who had its
            // share until now.
            let mut before = Vec::new();
            others.for_each(|member| put(&mut before, member));
            return mine.with(before).map(Some);
        }
        let mut members = mine.members.clone();
        put(&mut members, &self.me);
        others.for_each(|member| put(&mut members, member));
        let ids: HashSet<u64> = present.iter().map(|m| m.id).collect();
        self.forget(&mut members, |id| ids.contains(&id), now);
        match members == mine.members {
            true => Ok(None),
            false => mine.with(members).map(Some),
        }
    }

    /// The map after an order; `None` if it is done already. `present` are those who are there.
    ///
    /// # Errors
    /// `NotFound` for a member that there is not; `Conflict` if a member that is there is to be
    /// forgotten, or the last one that owns anything is to drain.
    pub fn ordered(map: &Map, order: Order, present: &HashSet<u64>) -> Result<Option<Map>> {
        let mut members = map.members.clone();
        let id = order.member();
        let Some(at) = members.iter().position(|m| m.id == id) else {
            return Err(Error::not_found(format!(
                "cluster {:?} has no member {id:016x}",
                map.cluster
            ))
            .hint("`forebay cluster status` lists them"));
        };
        match order {
            Order::Drain(_) => {
                members[at].state = MemberState::Draining;
                if members.iter().all(|m| m.state == MemberState::Draining) {
                    return Err(conflict(format!(
                        "{} is the last member of cluster {:?} that keeps anything",
                        members[at].label(),
                        map.cluster
                    ))
                    .hint("let another node join first"));
                }
            }
            Order::Resume(_) => members[at].state = MemberState::Active,
            Order::Forget(_) if present.contains(&id) => {
                return Err(conflict(format!(
                    "{} is there, or was seconds ago, and would join again at once",
                    members[at].label()
                ))
                .hint("stop that node first; to empty it before, `forebay cluster drain`"));
            }
            Order::Forget(_) => {
                members.remove(at);
            }
        }
        match members == map.members {
            true => Ok(None),
            false => map.with(members).map(Some),
        }
    }

    /// Since when each member that is not there has been away.
    pub fn away(&self) -> &HashMap<u64, Duration> {
        &self.away
    }

    fn is_ours(&self, found: &Map) -> Result<()> {
        if found.cluster == self.cluster && found.placement == PLACEMENT {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the map is of cluster {:?} (placement {}), and this node belongs to {:?} (placement \
             {PLACEMENT})",
            found.cluster, found.placement, self.cluster
        ))
        .hint("a node belongs to one cluster: check where it looks for the map (cluster.map)"))
    }

    /// Takes out the member that is away longest, if that is too long.
    fn forget(
        &mut self,
        members: &mut Vec<Member>,
        is_present: impl Fn(u64) -> bool,
        now: Duration,
    ) {
        let me = self.me.id;
        let is_away = |id: u64| id != me && !is_present(id);
        self.away
            .retain(|id, _| is_away(*id) && members.iter().any(|m| m.id == *id));
        for member in members.iter().filter(|m| is_away(m.id)) {
            self.away.entry(member.id).or_insert(now);
        }
        let longest = self.away.iter().min_by_key(|(id, since)| (**since, **id));
        if let Some((&id, &since)) = longest
            && now.saturating_sub(since) >= self.forget_after
        {
            members.retain(|m| m.id != id);
        }
    }
}

impl Order {
    /// Whom it is about.
    pub fn member(&self) -> u64 {
        match *self {
            Order::Drain(id) | Order::Resume(id) | Order::Forget(id) => id,
        }
    }
}

fn conflict(what: String) -> Error {
    Error::new(ErrorKind::Conflict, what)
}

/// Adds a member, or changes it; what operators have ordered stays.
fn put(members: &mut Vec<Member>, member: &Member) {
    match members.binary_search_by_key(&member.id, |m| m.id) {
        Ok(at) => {
            let state = members[at].state;
            members[at] = Member {
                state,
                ..member.clone()
            };
        }
        Err(at) => members.insert(at, member.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MINUTE: Duration = Duration::from_secs(60);
    const FORGET: Duration = Duration::from_secs(600);

    fn member(id: u64) -> Member {
        Member {
            id,
            name: format!("n{id}"),
            address: format!("10.0.0.{id}:8300"),
            url: String::new(),
            zone: String::new(),
            weight: 1 << 40,
            state: MemberState::Active,
        }
    }

    fn node(id: u64) -> Membership {
        Membership::new("c", member(id), FORGET).unwrap()
    }

    /// Nodes that are there, of which nothing else is known.
    fn there<const N: usize>(ids: [u64; N]) -> HashMap<u64, Option<Member>> {
        ids.into_iter().map(|id| (id, None)).collect()
    }

    fn ids(map: &Map) -> Vec<u64> {
        map.members.iter().map(|m| m.id).collect()
    }

    #[test]
    fn the_first_node_makes_the_map_and_others_join_it() {
        let mut one = node(1);
        let alone = one.alone().unwrap();
        assert_eq!((alone.epoch, ids(&alone)), (0, vec![1]));
        let first = one.propose(None, &alone, &there([1]), MINUTE).unwrap();
        let first = first.unwrap();
        assert_eq!((first.epoch, ids(&first)), (1, vec![1]));
        let present = there([1, 2]);
        assert_eq!(
            one.propose(Some(&first), &first, &present, MINUTE).unwrap(),
            None
        );
        let mut two = node(2);
        let alone = two.alone().unwrap();
        assert_eq!(alone.seed, first.seed, "they agree before they have met");
        let second = two.propose(Some(&first), &alone, &present, MINUTE).unwrap();
        let second = second.unwrap();
        assert_eq!((second.epoch, ids(&second)), (2, vec![1, 2]));
        // It comes back with another address, and with what was ordered of it.
        let ordered = Membership::ordered(&second, Order::Drain(2), &[1, 2].into()).unwrap();
        let ordered = ordered.unwrap();
        two.me.address = "10.0.0.99:8300".into();
        let third = two
            .propose(Some(&ordered), &alone, &present, MINUTE)
            .unwrap();
        let third = third.unwrap();
        assert_eq!(third.members[1].address, "10.0.0.99:8300");
        assert_eq!(third.members[1].state, MemberState::Draining);
    }

    #[test]
    fn who_is_away_for_long_is_forgotten_but_not_while_nobody_can_see() {
        let mut one = node(1);
        let map = Map::new("c", seed_of("c"), [1, 2, 3].map(member).to_vec()).unwrap();
        let at = |one: &mut Membership, now| {
            let next = one.propose(Some(&map), &map, &there([1]), now).unwrap();
            next.map(|map| ids(&map))
        };
        assert_eq!(at(&mut one, MINUTE), None);
        assert_eq!(at(&mut one, FORGET), None);
        one.cannot_see();
        assert_eq!(at(&mut one, FORGET + MINUTE), None);
        assert_eq!(at(&mut one, 2 * FORGET), None);
        // One at a time.
        assert_eq!(at(&mut one, 2 * FORGET + MINUTE), Some(vec![1, 3]));
        // It was there in between.
        let there = one.propose(Some(&map), &map, &there([1, 2, 3]), 2 * FORGET);
        assert_eq!(there.unwrap(), None);
        assert_eq!(at(&mut one, 3 * FORGET), None);
    }

    #[test]
    fn a_map_that_its_home_lost_is_put_back() {
        let mut one = node(1);
        let old = Map::new("c", seed_of("c"), vec![member(1)]).unwrap();
        let mine = old.with([1, 2].map(member).to_vec()).unwrap();
        let present = there([1]);
        for found in [None, Some(&old)] {
            let next = one
                .propose(found, &mine, &present, MINUTE)
                .unwrap()
                .unwrap();
            assert_eq!((next.epoch, ids(&next)), (3, vec![1, 2]), "nothing moves");
        }
        let other = Map::new("d", 1, vec![member(1)]).unwrap();
        let e = one
            .propose(Some(&other), &mine, &present, MINUTE)
            .unwrap_err();
        assert!(e.to_string().contains("belongs to"), "{e}");
    }

    #[test]
    fn orders_are_taken_once_and_nonsense_is_refused() {
        let map = Map::new("c", 1, [1, 2].map(member).to_vec()).unwrap();
        let none = HashSet::new();
        let order = |map: &Map, order| Membership::ordered(map, order, &none);
        let drained = order(&map, Order::Drain(1)).unwrap().unwrap();
        assert_eq!(order(&drained, Order::Drain(1)).unwrap(), None);
        let e = order(&drained, Order::Drain(2)).unwrap_err();
        assert!(e.to_string().contains("the last member"), "{e}");
        assert!(order(&map, Order::Forget(9)).is_err());
        let left = order(&drained, Order::Forget(1)).unwrap().unwrap();
        assert_eq!(ids(&left), [2]);
        let e = Membership::ordered(&map, Order::Forget(1), &[1].into()).unwrap_err();
        assert!(e.to_string().contains("n1 is there"), "{e}");
        let back = order(&drained, Order::Resume(1)).unwrap().unwrap();
        assert_eq!(back.members, map.members);
    }

    #[test]
    fn without_a_home_each_node_follows_who_it_sees() {
        let mut one = node(1);
        let mut mine = one.alone().unwrap();
        let mut see = |one: &mut Membership, who: &[u64], now| {
            let present: Vec<_> = who.iter().map(|id| member(*id)).collect();
            if let Some(next) = one.follow(&mine, &present, now).unwrap() {
                mine = next;
            }
            (mine.epoch, ids(&mine))
        };
        // Those who had its share are asked for it: there is a map of them.
        assert_eq!(see(&mut one, &[1, 2, 3], MINUTE), (1, vec![2, 3]));
        assert_eq!(see(&mut one, &[1, 2, 3], MINUTE), (2, vec![1, 2, 3]));
        assert_eq!(see(&mut one, &[2, 3], MINUTE), (2, vec![1, 2, 3]));
        assert_eq!(
            see(&mut one, &[], MINUTE),
            (2, vec![1, 2, 3]),
            "nothing empties it"
        );
        assert_eq!(see(&mut one, &[3], 2 * FORGET), (3, vec![1, 3]));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        /// Nodes that come, go and lose sight of each other, over one home that may lose what it
        /// has: the epoch of what any node has taken over never falls, and when all is calm, the
        /// map has those who are there and nobody else.
        #[test]
        fn the_map_becomes_those_who_are_there(
            steps in prop::collection::vec((1u64..6, 0u8..8, 0u64..400), 1..60)
        ) {
            let mut home: Option<Map> = None;
            let mut older: Option<Map> = None;
            let mut nodes: HashMap<u64, (Membership, Map)> = HashMap::new();
            let mut now = MINUTE;
            let act = |home: &mut Option<Map>, nodes: &mut HashMap<u64, (Membership, Map)>, id, now| {
                let present = nodes.keys().map(|id| (*id, None)).collect();
                let (membership, mine) = nodes.get_mut(&id).unwrap();
                if let Some(map) = home.as_ref().filter(|map| map.epoch > mine.epoch) {
                    *mine = map.clone();
                }
                let before = mine.epoch;
                if let Some(next) = membership.propose(home.as_ref(), mine, &present, now).unwrap() {
                    (*home, *mine) = (Some(next.clone()), next);
                }
                assert!(mine.epoch >= before);
            };
            for (id, what, seconds) in steps {
                now += Duration::from_secs(seconds);
                match what {
                    0 => { nodes.remove(&id); }
                    1 => home = older.clone(),
                    2 => older = home.clone(),
                    3 => if let Some((membership, _)) = nodes.get_mut(&id) {
                        membership.cannot_see();
                    },
                    _ => {
                        nodes.entry(id).or_insert_with(|| {
                            let node = node(id);
                            let alone = node.alone().unwrap();
                            (node, alone)
                        });
                        act(&mut home, &mut nodes, id, now);
                    }
                }
            }
            if nodes.is_empty() {
                return Ok(());
            }
            for _ in 0..20 {
                now += FORGET;
                let there: Vec<u64> = nodes.keys().copied().collect();
                there.iter().for_each(|id| act(&mut home, &mut nodes, *id, now));
            }
            let mut there: Vec<u64> = nodes.keys().copied().collect();
            there.sort_unstable();
            prop_assert_eq!(ids(home.as_ref().unwrap()), there);
            prop_assert!(nodes.values().all(|(_, mine)| Some(mine) == home.as_ref()));
        }
    }
}
