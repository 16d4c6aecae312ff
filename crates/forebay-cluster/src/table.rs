//! Slots, and who owns them.
//!
//! Rendezvous hashing: each node has a score in each slot, and the best owns it. So a node that
//! joins takes slots from all others, in proportion to its weight, and nothing moves between those.
//! Scoring all nodes at each read would cost a fifth of reading 10 KiB; the two best of each slot are
//! kept in a table of one MiB instead, which a read looks into once.

use crate::{
    Map, Member, MemberState,
    logarithm::{FRACTION_BITS, bits_below},
};
use std::collections::HashMap;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Slots are numbered by so many bits.
pub const SLOT_BITS: u32 = 18;
/// The slots of a cluster.
pub const SLOTS: usize = 1 << SLOT_BITS;
/// No node.
const NOBODY: u16 = u16::MAX;

/// The most nodes that keep one unit.
pub const COPIES_MAX: u8 = 3;

/// The length of an extent.
pub const EXTENT_BYTES: u64 = 8 << 20;

/// What is placed: an extent of an object. An object of up to [`EXTENT_BYTES`] is one unit,
/// together with its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Unit {
    /// [`forebay_core::ObjectName::hash128`].
    pub name: u128,
    /// Which of its extents.
    pub extent: u32,
}

impl Unit {
    /// The unit that this byte of an object lies in.
    pub fn at(name: u128, byte: u64) -> Self {
        Unit {
            name,
            extent: u32::try_from(byte / EXTENT_BYTES).unwrap_or(u32::MAX),
        }
    }

    /// The byte after its last, if the object is that long.
    pub fn end(&self) -> u64 {
        (u64::from(self.extent) + 1) * EXTENT_BYTES
    }

    /// The slot that it lies in. The bits are those of a hash of its own: the store's index takes
    /// its shards and stripes from the name's.
    pub fn slot(&self, seed: u64) -> u32 {
        let mut bytes = [0; 20];
        bytes[..16].copy_from_slice(&self.name.to_le_bytes());
        bytes[16..].copy_from_slice(&self.extent.to_le_bytes());
        (xxh3_64_with_seed(&bytes, seed) >> (64 - SLOT_BITS)) as u32
    }
}

/// The owners of a slot: places in [`Map::members`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owners {
    /// The best.
    pub first: u16,
    /// The best of another zone, if there is one; else the second best. `None` in a cluster of one.
    pub second: Option<u16>,
}

/// A node that may own slots.
#[derive(Clone)]
struct Candidate {
    /// Its place in the map.
    place: u16,
    key: u64,
    /// The inverse of its weight.
    per_weight: f64,
    /// What it costs at least for each two units of a hash below the greatest ([`at_least`]).
    at_least: f64,
    /// Equal for nodes of one zone.
    zone: u16,
}

/// Who owns each slot under one map.
#[derive(Clone)]
pub struct Table {
    seed: u64,
    candidates: Vec<Candidate>,
    owners: Box<[[u16; 2]]>,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Table of {} nodes", self.candidates.len())
    }
}

impl Table {
    /// Computes the owners of all slots. Draining members own none.
    pub fn new(map: &Map) -> Self {
        let candidates = candidates(map);
        let owners = (0..SLOTS as u32)
            .map(|slot| best_two(&candidates, slot_hash(slot, map.seed)))
            .collect();
        Table {
            seed: map.seed,
            candidates,
            owners,
        }
    }

    /// The same, from the table of an earlier map. A node that was not there before can only displace
    /// one of a slot's two owners; all nodes are scored again only in slots whose owners left or
    /// changed.
    pub fn after(map: &Map, (before, table): (&Map, &Table)) -> Self {
        let now = candidates(map);
        // Where the places of those are that stay as they were, by their places before.
        let mut places = vec![NOBODY; before.members.len()];
        let mut stay = 0;
        let new: Vec<_> = now
            .iter()
            .filter(|c| {
                let Ok(at) = table.candidates.binary_search_by_key(&c.key, |old| old.key) else {
                    return true;
                };
                let was = &before.members[usize::from(table.candidates[at].place)];
                let is = &map.members[usize::from(c.place)];
                if (was.weight, &was.zone) != (is.weight, &is.zone) {
                    return true;
                }
                places[usize::from(table.candidates[at].place)] = c.place;
                stay += 1;
                false
            })
            .collect();
        // Where all are in one zone, the second owner is another one than where they are not.
        let is_like = map.seed == before.seed && is_in_one_zone(map) == is_in_one_zone(before);
        if !is_like || new.len() >= stay {
            return Self::new(map);
        }
        let mut by_place = vec![None; map.members.len()];
        for c in &now {
            by_place[usize::from(c.place)] = Some(c);
        }
        let mut few = Vec::with_capacity(new.len() + 2);
        let owners = (0u32..).zip(&table.owners);
        let owners = owners.map(|(slot, two)| {
            let hash = slot_hash(slot, map.seed);
            few.clear();
            for place in two.iter().filter(|place| **place != NOBODY) {
                match places[usize::from(*place)] {
                    NOBODY => return best_two(&now, hash),
                    place => few.extend(by_place[usize::from(place)]),
                }
            }
            if new.is_empty() {
                return match few[..] {
                    [] => [NOBODY; 2],
                    [one] => [one.place, NOBODY],
                    [first, second, ..] => [first.place, second.place],
                };
            }
            few.extend(&new);
            // Of those with equal scores, the one with the lower id is the better one.
            few.sort_unstable_by_key(|c| c.place);
            best_two(few.iter().copied(), hash)
        });
        let owners = owners.collect();
        Table {
            seed: map.seed,
            candidates: now,
            owners,
        }
    }

    /// Who owns a slot; `None` if nobody is active.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn owners(&self, slot: u32) -> Option<Owners> {
        let [first, second] = self.owners[slot as usize];
        (first != NOBODY).then_some(Owners {
            first,
            second: (second != NOBODY).then_some(second),
        })
    }

    /// Who owns a unit.
    pub fn owners_of(&self, unit: &Unit) -> Option<Owners> {
        self.owners(unit.slot(self.seed))
    }

    /// The nodes that keep a slot of which there are to be so many copies, at most [`COPIES_MAX`]: its
    /// two owners, and then the best of a third zone, or else of all others. Fewer, if there are
    /// fewer nodes.
    pub fn keepers(&self, slot: u32, copies: u8) -> impl Iterator<Item = u16> + use<> {
        let owners = self.owners(slot);
        let first = owners.map(|o| o.first);
        let second = owners.and_then(|o| o.second).filter(|_| copies > 1);
        let third = match (first, second) {
            (Some(first), Some(second)) if copies > 2 => self.third(slot, [first, second]),
            _ => None,
        };
        [first, second, third].into_iter().flatten()
    }

    fn third(&self, slot: u32, two: [u16; 2]) -> Option<u16> {
        let hash = slot_hash(slot, self.seed);
        let zone_of = |place: u16| self.candidates.iter().find(|c| c.place == place);
        let zones = two.map(|place| zone_of(place).map(|c| c.zone));
        let others = self.candidates.iter().filter(|c| !two.contains(&c.place));
        let ranked = others.map(|c| (zones.contains(&Some(c.zone)), cost_in(c, hash), c));
        let best = ranked.min_by(|a, b| {
            (a.0.cmp(&b.0))
                .then(a.1.total_cmp(&b.1))
                .then(a.2.key.cmp(&b.2.key))
        });
        best.map(|(_, _, c)| c.place)
    }

    /// All active nodes, the best for this slot first: the owner's stand-ins follow it.
    pub fn ranked(&self, slot: u32) -> Vec<u16> {
        let hash = slot_hash(slot, self.seed);
        let mut scored: Vec<_> = self
            .candidates
            .iter()
            .map(|c| (cost_in(c, hash), c.key, c.place))
            .collect();
        scored.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        scored.into_iter().map(|(_, _, place)| place).collect()
    }

    /// Stands for the owners of all slots, by the ids of the nodes.
    pub fn checksum(&self) -> u64 {
        let most = self.candidates.iter().map(|c| usize::from(c.place) + 1);
        let mut keys = vec![0; most.max().unwrap_or_default()];
        for c in &self.candidates {
            keys[usize::from(c.place)] = c.key;
        }
        let mut hash = Xxh3::new();
        for owners in &self.owners {
            // Nobody has the key 0.
            let [first, second] =
                owners.map(|place| keys.get(usize::from(place)).copied().unwrap_or_default());
            hash.update(&(u128::from(second) << 64 | u128::from(first)).to_le_bytes());
        }
        hash.digest()
    }
}

fn is_in_one_zone(map: &Map) -> bool {
    let active = |m: &&Member| m.state == MemberState::Active;
    let mut zones = map.members.iter().filter(active).map(|m| &m.zone);
    let first = zones.next();
    zones.all(|zone| Some(zone) == first)
}

/// The members that own slots, by their ids.
fn candidates(map: &Map) -> Vec<Candidate> {
    let active = (0u16..)
        .zip(&map.members)
        .filter(|(_, m)| m.state == MemberState::Active);
    let mut zones: HashMap<&str, u16> = HashMap::new();
    let mut candidates: Vec<_> = active
        .map(|(place, m)| {
            let number = zones.len() as u16;
            let per_weight = 1.0 / m.weight as f64;
            Candidate {
                place,
                key: m.id,
                per_weight,
                at_least: at_least(per_weight),
                zone: *zones.entry(m.zone.as_str()).or_insert(number),
            }
        })
        .collect();
    if zones.len() == 1 {
        // All nodes are in one zone, so the second owner may be any of them.
        for (number, candidate) in (0..).zip(&mut candidates) {
            candidate.zone = number;
        }
    }
    candidates
}

fn slot_hash(slot: u32, seed: u64) -> u64 {
    xxh3_64_with_seed(&slot.to_le_bytes(), seed)
}

/// How far a node is from owning a slot: bits below the greatest number, per weight. The least wins,
/// with a chance in proportion to its weight.
fn cost(candidate: &Candidate, hash: u64) -> f64 {
    // Exact: the logarithm has less than 53 bits. One multiplication is the same everywhere.
    bits_below(hash) as f64 * candidate.per_weight
}

/// [`cost`] in the slot with this hash.
fn cost_in(candidate: &Candidate, slot_hash: u64) -> f64 {
    cost(candidate, mixed(slot_hash ^ candidate.key))
}

/// What [`cost`] is at least for each two units by which a hash is below the greatest: `-log2(1 - x)`
/// is no less than `x / ln 2`, and [`bits_below`] rounds up. So most nodes need no logarithm.
fn at_least(per_weight: f64) -> f64 {
    // A little less, for what floats round.
    const BITS: f64 = std::f64::consts::LOG2_E * (1.0 - 1e-9);
    BITS * (1u64 << FRACTION_BITS) as f64 / 2f64.powi(63) * per_weight
}

/// The finalizer of SplitMix64: each bit of the input changes half of the output's.
fn mixed(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// `candidates` come by their ids.
fn best_two<'a>(candidates: impl IntoIterator<Item = &'a Candidate>, slot_hash: u64) -> [u16; 2] {
    let mut best: Option<(f64, &Candidate)> = None;
    let mut other: Option<(f64, &Candidate)> = None;
    // What costs as much is neither of the two: of equals it is the one with the lower id, which
    // comes first.
    let mut limit = f64::INFINITY;
    for candidate in candidates {
        let hash = mixed(slot_hash ^ candidate.key);
        // A signed number becomes a float in one step. What is lost makes it smaller.
        if (!hash >> 1) as i64 as f64 * candidate.at_least >= limit {
            continue;
        }
        let cost = cost(candidate, hash);
        match best {
            Some((least, of)) if cost >= least => {
                if candidate.zone != of.zone && other.is_none_or(|(least, _)| cost < least) {
                    other = Some((cost, candidate));
                }
            }
            _ => {
                // What was the best is the best of another zone now, unless it is of the same one.
                if best.is_some_and(|(_, of)| of.zone != candidate.zone) {
                    other = best;
                }
                best = Some((cost, candidate));
            }
        }
        limit = other.map_or(f64::INFINITY, |(cost, _)| cost);
    }
    [best, other].map(|found| found.map_or(NOBODY, |(_, c)| c.place))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Member;
    use proptest::prelude::*;

    fn member(id: u64, weight: u64, zone: u64) -> Member {
        Member {
            id,
            name: String::new(),
            address: String::new(),
            url: String::new(),
            zone: format!("z{zone}"),
            weight,
            state: MemberState::Active,
        }
    }

    fn members(zones: u64) -> impl Strategy<Value = Vec<Member>> {
        let one = (any::<u64>(), 1u64..9, 0..zones);
        proptest::collection::vec(one, 1..12).prop_map(|all| {
            let mut all: Vec<_> = all
                .into_iter()
                .map(|(id, weight, zone)| member(id, weight << 40, zone))
                .collect();
            all.sort_by_key(|m| m.id);
            all.dedup_by_key(|m| m.id);
            all
        })
    }

    fn map(members: Vec<Member>) -> Map {
        Map::new("c", 42, members).unwrap()
    }

    /// The ids of the owners of each slot.
    fn ids(map: &Map, table: &Table) -> Vec<(u64, Option<u64>)> {
        (0..SLOTS as u32)
            .map(|slot| {
                let owners = table.owners(slot).unwrap();
                let id = |place: u16| map.members[place as usize].id;
                (id(owners.first), owners.second.map(id))
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn who_joins_takes_and_who_leaves_gives(all in members(1), at in any::<prop::sample::Index>()) {
            prop_assume!(all.len() > 1);
            let gone = all[at.index(all.len())].clone();
            let with = map(all.clone());
            let without = map(all.iter().filter(|m| m.id != gone.id).cloned().collect());
            let (a, b) = (Table::new(&with), Table::new(&without));
            for (with, without) in ids(&with, &a).iter().zip(ids(&without, &b)) {
                if with.0 != without.0 {
                    prop_assert_eq!(with.0, gone.id);
                    // The second owner is the one that takes its place.
                    prop_assert_eq!(with.1, Some(without.0));
                }
            }
        }

        #[test]
        fn owners_are_the_best_of_all(all in members(3), from in 0..SLOTS as u32 - 256) {
            let map = map(all);
            let table = Table::new(&map);
            let zone = |place: u16| &map.members[place as usize].zone;
            let zones: std::collections::HashSet<_> = map.members.iter().map(|m| &m.zone).collect();
            for slot in from..from + 256 {
                let owners = table.owners(slot).unwrap();
                let ranked = table.ranked(slot);
                prop_assert_eq!(ranked.len(), map.members.len());
                prop_assert_eq!(owners.first, ranked[0]);
                let expected = ranked[1..]
                    .iter()
                    .find(|&&p| zones.len() == 1 || zone(p) != zone(owners.first));
                prop_assert_eq!(owners.second, expected.copied());
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Members join, leave, drain, and get another weight or zone, some at a time.
        #[test]
        fn a_table_after_another_is_the_one_of_its_map(
            all in members(3),
            steps in proptest::collection::vec(
                proptest::collection::vec((any::<u64>(), 0u8..5, 1u64..9, 0u64..3), 0..4),
                1..4,
            ),
        ) {
            let mut before = map(all);
            let mut table = Table::new(&before);
            for step in steps {
                let mut all = before.members.clone();
                for (which, what, weight, zone) in step {
                    let at = which as usize % all.len().max(1);
                    match what {
                        0 => all.push(member(which, weight << 40, zone)),
                        1 if all.len() > 1 => drop(all.remove(at)),
                        2 => all[at].state = MemberState::Draining,
                        3 => all[at].weight = weight << 40,
                        _ => all[at].zone = format!("z{zone}"),
                    }
                }
                all.sort_by_key(|m| m.id);
                all.dedup_by_key(|m| m.id);
                let map = map(all);
                let after = Table::after(&map, (&before, &table));
                let new = Table::new(&map);
                prop_assert_eq!(&after.owners, &new.owners);
                prop_assert_eq!(after.checksum(), new.checksum());
                prop_assert_eq!(after.ranked(7), new.ranked(7));
                (before, table) = (map, after);
            }
        }
    }

    #[test]
    fn copies_are_in_as_many_zones_as_there_are() {
        for (zones, nodes) in [(1, 6), (2, 6), (3, 6), (6, 6), (2, 2), (1, 1)] {
            let map = map((1..=nodes)
                .map(|n| member(n * 977, 1 << 40, n % zones))
                .collect());
            let table = Table::new(&map);
            for slot in 0..500 {
                for copies in 1..=COPIES_MAX {
                    let keepers: Vec<_> = table.keepers(slot, copies).collect();
                    let owners = table.owners(slot).unwrap();
                    assert_eq!(keepers[0], owners.first);
                    assert!(keepers.get(1).is_none_or(|k| Some(*k) == owners.second));
                    let different: std::collections::HashSet<_> = keepers.iter().collect();
                    let expected = usize::from(copies).min(nodes as usize);
                    assert_eq!((different.len(), keepers.len()), (expected, expected));
                    let zone = |place: &u16| &map.members[usize::from(*place)].zone;
                    let in_zones: std::collections::HashSet<_> = keepers.iter().map(zone).collect();
                    assert_eq!(in_zones.len(), expected.min(zones as usize));
                }
            }
        }
    }

    /// When the owner goes, those who have copies move up: nobody else needs the bytes.
    #[test]
    fn who_keeps_a_copy_takes_the_place_of_who_goes() {
        let all: Vec<_> = (1..=5).map(|n| member(n * 977, n << 40, 0)).collect();
        let before = Table::new(&map(all.clone()));
        let id = |map: &Map, place: u16| map.members[usize::from(place)].id;
        let with = map(all.clone());
        for gone in &all {
            let without = map(all.iter().filter(|m| m.id != gone.id).cloned().collect());
            let after = Table::new(&without);
            for slot in 0..2000 {
                let mut left: Vec<_> = before.keepers(slot, 3).map(|p| id(&with, p)).collect();
                left.retain(|keeper| *keeper != gone.id);
                let now: Vec<_> = after.keepers(slot, 3).map(|p| id(&without, p)).collect();
                assert_eq!(left[..2], now[..2]);
            }
        }
    }

    #[test]
    fn shares_are_in_proportion_to_weights() {
        let all: Vec<_> = (1..=64)
            .map(|n| member(n * 977, (1 + n % 4) << 40, n % 3))
            .collect();
        let weight: u64 = all.iter().map(|m| m.weight).sum();
        let map = map(all);
        let table = Table::new(&map);
        let mut slots = vec![0u64; map.members.len()];
        for slot in 0..SLOTS as u32 {
            slots[table.owners(slot).unwrap().first as usize] += 1;
        }
        for (member, slots) in map.members.iter().zip(slots) {
            let fair = SLOTS as f64 * member.weight as f64 / weight as f64;
            let off = (slots as f64 / fair - 1.0).abs();
            // Four standard deviations of what chance does with so many slots.
            assert!(off < 4.0 / fair.sqrt(), "{off} with {fair} slots");
        }
    }

    #[test]
    fn draining_members_own_nothing() {
        let mut all = vec![member(1, 1, 0), member(2, 1, 0)];
        all[0].state = MemberState::Draining;
        let drained = Table::new(&map(all.clone()));
        let alone = drained.owners(5).unwrap();
        assert_eq!((alone.first, alone.second), (1, None));
        all[1].state = MemberState::Draining;
        assert_eq!(Table::new(&map(all)).owners(5), None);
    }

    #[test]
    fn placement_is_the_same_everywhere() {
        let map = map((1..=5).map(|n| member(n, n << 40, n % 2)).collect());
        let unit = Unit {
            name: 0x0123_4567_89ab_cdef_0011_2233_4455_6677,
            extent: 3,
        };
        assert_eq!(unit.slot(map.seed), GOLDEN_SLOT);
        assert_eq!(Table::new(&map).checksum(), GOLDEN_TABLE);
    }

    const GOLDEN_SLOT: u32 = 211_630;
    const GOLDEN_TABLE: u64 = 6_638_822_937_680_846_670;
}
