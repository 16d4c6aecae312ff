//! What one node makes of the maps that it has seen: whom it asks for a unit, and in which order.
//!
//! A node that owns a slot asks the slot's former owners, while they may have what it lacks, then
//! those who keep copies, if there are to be any, and then the origin. A node that does not own it
//! asks the owner; if that does not answer, the next in the order of the slot; then the origin.
//!
//! # Invariants
//!
//! *One hop*: whoever is asked by a peer asks others only for what they have
//! ([`Ask::LocalOnly`]), never to fetch it. So no two nodes wait for each other, even if their maps
//! differ. A node never asks itself, nor who asked it, and none that is not in its map.

use crate::{Map, Member, MemberState, Owners, SLOTS, Table, Unit};
use forebay_core::{Error, Result};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, OnceLock},
    time::Duration,
};

/// How long a new owner asks former owners if it is never told that it has everything they had.
pub const HAND_OVER_MAX: Duration = Duration::from_secs(24 * 3600);
/// So many maps before the newest are kept; each has a table of 1 MiB.
const EARLIER_MAX: usize = 3;
/// So many nodes are asked to fetch a unit before the origin is asked directly.
const FILLERS_MAX: usize = 2;

/// What a peer is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ask {
    /// Bytes that it has, or a miss.
    LocalOnly,
    /// Bytes, which it fetches if it does not have them: it owns the unit, or stands in for its
    /// owner.
    OwnerFill,
}

/// Where a unit may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// At the node with this id.
    Peer(u64, Ask),
    /// At the origin, which has everything.
    Origin,
}

/// How a unit is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// In the order in which to try. The origin is the last.
    pub sources: Vec<Source>,
    /// If so many of the first sources do not answer, this node is to keep the unit.
    keeps_after: usize,
}

impl Route {
    const NEVER: usize = usize::MAX;

    /// Whether this node is to keep the unit as its owner keeps it, because it is the owner, or
    /// because it stands in for the owner if the first `unanswered` sources do not answer at all.
    /// (A miss is an answer.) Otherwise it is kept only where there is room to spare.
    pub fn keeps(&self, unanswered: usize) -> bool {
        unanswered >= self.keeps_after
    }
}

/// What a new map changed for this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Slots that it owns now, and did not.
    pub gained: Vec<u32>,
    /// Slots that it owned, and does not.
    pub lost: Vec<u32>,
}

/// What a unit is to a node that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It owns the unit.
    Owner,
    /// It is to keep a copy: it is kept as if it were owned.
    Keeper,
    /// It did, and the node that does now may still ask for it: it is kept as if it were owned.
    Former,
    /// Others have it: it goes first.
    Other,
}

/// A map with its table.
#[derive(Debug)]
pub struct Placed {
    map: Map,
    table: Table,
    checksum: OnceLock<u64>,
}

impl Placed {
    /// Computes the table.
    pub fn new(map: Map) -> Self {
        Self::of(Table::new(&map), map)
    }

    /// The same for a map that follows this one, of which only what changed is computed.
    pub fn then(&self, map: Map) -> Self {
        Self::of(Table::after(&map, (&self.map, &self.table)), map)
    }

    fn of(table: Table, map: Map) -> Self {
        Self {
            map,
            table,
            checksum: OnceLock::new(),
        }
    }

    /// Reads a map.
    ///
    /// # Errors
    /// As [`Map::parse`].
    pub fn parse(json: &[u8]) -> Result<Self> {
        let (map, table) = Map::parse(json)?;
        Ok(Self::of(table, map))
    }

    /// Reads a map that follows this one, of which only what changed is computed.
    ///
    /// # Errors
    /// As [`Map::parse`].
    pub fn then_parsed(&self, json: &[u8]) -> Result<Self> {
        let (map, table) = Map::parse_after(json, Some((&self.map, &self.table)))?;
        Ok(Self::of(table, map))
    }

    /// The next map, with these members.
    ///
    /// # Errors
    /// As [`Map::new`].
    pub fn with(&self, members: Vec<Member>) -> Result<Self> {
        let (map, table) = self.map.with_table(members, Some(&self.table))?;
        Ok(Self::of(table, map))
    }

    /// The map.
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// The map's table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// [`Table::checksum`], computed once: tells which table two nodes speak of.
    pub fn checksum(&self) -> u64 {
        *self.checksum.get_or_init(|| self.table.checksum())
    }

    /// The first owner of a unit; `None` if all members drain.
    pub fn owner(&self, unit: &Unit) -> Option<u64> {
        self.first(unit.slot(self.map.seed))
    }

    /// The first owner of a slot; `None` if all members drain.
    fn first(&self, slot: u32) -> Option<u64> {
        self.table.owners(slot).map(|owners| self.id(owners.first))
    }

    /// The node that clearly owns most of these units, as `me` sees it: more than half of them, and
    /// at least twice as many as `me`. With a few nodes, chance alone gives one of them most.
    pub fn dominant(&self, units: impl Iterator<Item = Unit>, me: u64) -> Option<u64> {
        let mut owned = vec![0u32; self.map.members.len()];
        let mut all = 0;
        for unit in units {
            all += 1;
            if let Some(owners) = self.table.owners(unit.slot(self.map.seed)) {
                owned[usize::from(owners.first)] += 1;
            }
        }
        let (place, most) = (0u16..).zip(&owned).max_by_key(|(_, n)| **n)?;
        let mine = (0u16..)
            .zip(&owned)
            .find(|(place, _)| self.id(*place) == me);
        let mine = mine.map_or(0, |(_, n)| *n);
        (*most > all / 2 && *most / 2 >= mine && self.id(place) != me).then(|| self.id(place))
    }

    /// The share of all slots that each member owns, from 0 to 1, in the map's order.
    pub fn shares(&self) -> Vec<f64> {
        let mut slots = vec![0u32; self.map.members.len()];
        for slot in 0..SLOTS as u32 {
            if let Some(owners) = self.table.owners(slot) {
                slots[usize::from(owners.first)] += 1;
            }
        }
        let share = |n: &u32| f64::from(*n) / SLOTS as f64;
        slots.iter().map(share).collect()
    }

    fn id(&self, place: u16) -> u64 {
        self.map.members[usize::from(place)].id
    }

    fn has(&self, id: u64) -> bool {
        self.map
            .members
            .binary_search_by_key(&id, |member| member.id)
            .is_ok()
    }
}

/// A bit for each slot.
#[derive(Clone, Debug)]
struct Slots(Box<[u64]>);

impl Slots {
    fn none() -> Self {
        Self(vec![0; SLOTS / 64].into())
    }

    fn set(&mut self, slot: u32, is: bool) {
        let bit = 1 << (slot % 64);
        let word = &mut self.0[slot as usize / 64];
        *word = if is { *word | bit } else { *word & !bit };
    }

    fn has(&self, slot: u32) -> bool {
        self.0[slot as usize / 64] >> (slot % 64) & 1 == 1
    }
}

#[derive(Clone, Debug)]
struct Earlier {
    placed: Arc<Placed>,
    /// Until then its owners are asked for what they had.
    until: Duration,
}

/// One node's view of its cluster. Times are those of any clock that never goes back.
#[derive(Clone, Debug)]
pub struct View {
    me: u64,
    now: Arc<Placed>,
    /// The maps before, the latest first.
    earlier: VecDeque<Earlier>,
    /// Slots of which everything that former owners had is here, since they changed.
    handed_over: Slots,
    /// Slots that this node had, and of which the new owner has everything.
    released: Slots,
    /// Slots that this node had by maps before those that it remembers, and of which the new owner
    /// is not known to have everything; and until when that counts.
    had_before: Option<(Slots, Duration)>,
}

impl View {
    /// The view of the node `me`, which has just started. If there were other maps within
    /// [`HAND_OVER_MAX`], this takes the earliest of them, and [`View::advance`] the others.
    pub fn new(me: u64, placed: Arc<Placed>) -> Self {
        Self {
            me,
            now: placed,
            earlier: VecDeque::new(),
            handed_over: Slots::none(),
            released: Slots::none(),
            had_before: None,
        }
    }

    /// The node whose view it is.
    pub fn me(&self) -> u64 {
        self.me
    }

    /// The newest map that it has seen.
    pub fn map(&self) -> &Map {
        &self.now.map
    }

    /// The newest map that it has seen, with its table.
    pub fn placed(&self) -> &Arc<Placed> {
        &self.now
    }

    /// Takes over a map, if it is newer; `age` is how long it has been the newest. A map of epoch 0
    /// is that of a node which knew of no others: nothing is handed over from it.
    ///
    /// # Errors
    /// `Invalid` if it is a map of another cluster, places in another way, or is another map of the
    /// same epoch: nothing changes then.
    pub fn advance(&mut self, placed: Arc<Placed>, now: Duration, age: Duration) -> Result<Change> {
        let (map, mine) = (&placed.map, &self.now.map);
        // A node that knew of no others owned nothing that they would ask it for.
        let is_first = mine.epoch == 0 && map.epoch > 0;
        let same = |m: &Map| {
            (
                m.cluster.clone(),
                m.placement,
                (!is_first).then_some(m.seed),
            )
        };
        if same(map) != same(mine) {
            return Err(Error::invalid(format!(
                "a map of cluster {:?} (seed {:016x}, placement {}) cannot follow one of cluster \
                 {:?} (seed {:016x}, placement {})",
                map.cluster, map.seed, map.placement, mine.cluster, mine.seed, mine.placement
            ))
            .hint("a node belongs to one cluster: check where it reads the map from"));
        }
        if map.epoch == mine.epoch && map != mine {
            return Err(Error::invalid(format!(
                "two different maps of cluster {:?} have the epoch {}",
                map.cluster, map.epoch
            ))
            .hint(
                "each change of a map raises its epoch: raise it in the map that is to be used",
            ));
        }
        if map.epoch <= mine.epoch {
            return Ok(Change::default());
        }
        if map.epoch > mine.epoch + 1 {
            // What happened in between is unknown: a slot may have gone and come back.
            (self.handed_over, self.released) = (Slots::none(), Slots::none());
        }
        let mut change = Change::default();
        for slot in 0..SLOTS as u32 {
            let (was, is) = (self.now.first(slot), placed.first(slot));
            if was == is {
                continue;
            }
            self.handed_over.set(slot, false);
            self.released.set(slot, false);
            if is == Some(self.me) {
                change.gained.push(slot);
            } else if was == Some(self.me) {
                change.lost.push(slot);
            }
        }
        let before = std::mem::replace(&mut self.now, placed);
        // One that places alike has no other owners.
        if !is_first && before.map.table != self.now.map.table {
            self.earlier.push_front(Earlier {
                placed: before,
                until: now + HAND_OVER_MAX.saturating_sub(age),
            });
        }
        self.expire(now);
        if self.earlier.len() > EARLIER_MAX
            && let Some(oldest) = self.earlier.pop_back()
        {
            self.keep_had(&oldest);
        }
        Ok(change)
    }

    /// A map is forgotten before its time is over: what it says of slots that this node has to hand
    /// over is kept.
    fn keep_had(&mut self, oldest: &Earlier) {
        let had = |slot: &u32| oldest.placed.first(*slot) == Some(self.me);
        let owes = |slot: &u32| self.now.first(*slot) != Some(self.me) && !self.released.has(*slot);
        let slots = (0..SLOTS as u32).filter(|slot| had(slot) && owes(slot));
        let slots: Vec<u32> = slots.collect();
        if slots.is_empty() {
            return;
        }
        let none = || (Slots::none(), Duration::ZERO);
        let (before, until) = self.had_before.get_or_insert_with(none);
        slots.iter().for_each(|slot| before.set(*slot, true));
        *until = oldest.until.max(*until);
    }

    /// Everything that former owners had of this slot, which this node owned in this epoch, is
    /// here. Nothing happens if the slot changed its owner since.
    pub fn handed_over(&mut self, slot: u32, epoch: u64) {
        if self.now.first(slot) == Some(self.me) && self.unchanged_since(slot, epoch) {
            self.handed_over.set(slot, true);
        }
    }

    /// The owner of this slot in this epoch says that it has everything that this node had. Nothing
    /// happens if the slot changed its owner since.
    pub fn released(&mut self, slot: u32, epoch: u64) {
        if self.now.first(slot) != Some(self.me) && self.unchanged_since(slot, epoch) {
            self.released.set(slot, true);
            if let Some((before, _)) = &mut self.had_before {
                before.set(slot, false);
            }
        }
    }

    /// Whether the slot has had one owner since this epoch, which was one of this node. (A map that
    /// places as the one before it is not kept: its epoch is taken for that one's.)
    fn unchanged_since(&self, slot: u32, epoch: u64) -> bool {
        let is = self.now.first(slot);
        epoch <= self.now.map.epoch
            && self
                .known()
                .take_while(|placed| placed.first(slot) == is)
                .any(|placed| placed.map.epoch <= epoch)
    }

    /// The maps that it remembers, the newest first.
    fn known(&self) -> impl Iterator<Item = &Arc<Placed>> {
        std::iter::once(&self.now).chain(self.earlier.iter().map(|e| &e.placed))
    }

    /// The newest of the maps that it remembers which places like this.
    pub fn placed_by(&self, checksum: u64) -> Option<&Arc<Placed>> {
        self.known().find(|placed| placed.checksum() == checksum)
    }

    /// Whether the newest map that places like this one, of this epoch, has followed it without
    /// others in between that placed otherwise.
    pub fn is_still(&self, checksum: u64, epoch: u64) -> bool {
        let newest = self.placed_by(checksum).map_or(epoch, |p| p.map().epoch);
        let between = |p: &&Arc<Placed>| (epoch + 1..newest).contains(&p.map().epoch);
        self.known()
            .filter(between)
            .all(|p| p.checksum() == checksum)
    }

    /// Former owners that are still asked, and for how many slots each. `pulled` says of former
    /// owners by which epoch this node has everything that they had: slots that did not change
    /// since do not count. It looks at all slots, as all of the following.
    pub fn formers(&self, pulled: &BTreeMap<u64, u64>) -> BTreeMap<u64, u64> {
        let mut formers = BTreeMap::new();
        for slot in self.handing_over() {
            for id in self.former(slot) {
                if !self.is_pulled(slot, id, pulled) {
                    *formers.entry(id).or_default() += 1;
                }
            }
        }
        formers
    }

    fn is_pulled(&self, slot: u32, former: u64, pulled: &BTreeMap<u64, u64>) -> bool {
        let epoch = pulled.get(&former);
        epoch.is_some_and(|epoch| self.unchanged_since(slot, *epoch))
    }

    /// The slots of which this node has everything that all their former owners had.
    pub fn all_pulled(&self, pulled: &BTreeMap<u64, u64>) -> Vec<u32> {
        let all = |slot: &u32| {
            self.former(*slot)
                .all(|id| self.is_pulled(*slot, id, pulled))
        };
        self.handing_over().filter(all).collect()
    }

    /// The slots that this node had, that `owner` has by this map and still has now, and of which it
    /// is not known that `owner` has everything. After a restart it may be unknown what this node
    /// had: then those are all slots of `owner`.
    pub fn owed(&self, owner: u64, by: &Placed) -> Vec<u32> {
        let is_owed = |slot: &u32| {
            by.first(*slot) == Some(owner)
                && self.now.first(*slot) == Some(owner)
                && (self.earlier.is_empty() || self.had(*slot) || self.had_long_ago(*slot))
                && !self.released.has(*slot)
        };
        (0..SLOTS as u32).filter(is_owed).collect()
    }

    /// Whether there are slots that `owner` has by the map `by` and does not have by the newest map that
    /// this node knows, and that this node has or had. Then one of the two nodes goes by an older map. It
    /// may be this one: a later map may give slots to the owners of an earlier one.
    pub fn disputes(&self, owner: u64, by: &Placed) -> bool {
        let is_disputed = |slot: u32| {
            let now = self.now.first(slot);
            by.first(slot) == Some(owner)
                && now != Some(owner)
                && (now == Some(self.me) || self.had(slot))
        };
        (0..SLOTS as u32).any(is_disputed)
    }

    /// How many slots that this node had are not known to be with their owners, by owner. Nodes that
    /// own nothing yet, because all members drain, are not counted. If this node drains, slots
    /// count also after more maps than it remembers.
    pub fn losing(&self) -> BTreeMap<u64, u64> {
        let mut losing = BTreeMap::new();
        let mut members = self.now.map.members.iter();
        let drains = members.any(|m| m.id == self.me && m.state == MemberState::Draining);
        for slot in 0..SLOTS as u32 {
            if let Some(owner) = self.now.first(slot).filter(|owner| *owner != self.me)
                && (self.had(slot) || (drains && self.had_long_ago(slot)))
                && !self.released.has(slot)
            {
                *losing.entry(owner).or_default() += 1;
            }
        }
        losing
    }

    /// When the last window closes by itself, if any is open.
    pub fn closes(&self) -> Option<Duration> {
        self.earlier.iter().map(|earlier| earlier.until).max()
    }

    /// Whether this node owned a slot by a map before the newest.
    fn had(&self, slot: u32) -> bool {
        let mut earlier = self.earlier.iter();
        earlier.any(|earlier| earlier.placed.first(slot) == Some(self.me))
    }

    /// The same by a map before those that it remembers.
    fn had_long_ago(&self, slot: u32) -> bool {
        let before = self.had_before.as_ref();
        before.is_some_and(|(slots, _)| slots.has(slot))
    }

    /// Whether there are former owners whose time is over.
    pub fn is_due(&self, now: Duration) -> bool {
        let before = self.had_before.as_ref();
        self.earlier.iter().any(|earlier| earlier.until <= now)
            || before.is_some_and(|(_, until)| *until <= now)
    }

    /// Forgets former owners whose time is over.
    pub fn expire(&mut self, now: Duration) {
        self.earlier.retain(|earlier| earlier.until > now);
        self.had_before = self.had_before.take().filter(|(_, until)| *until > now);
    }

    /// The slots of this node whose former owners are still asked.
    pub fn handing_over(&self) -> impl Iterator<Item = u32> {
        (0..SLOTS as u32).filter(|&slot| {
            self.now.first(slot) == Some(self.me) && self.former(slot).next().is_some()
        })
    }

    /// Whether this node is the first owner of a unit.
    pub fn owns(&self, unit: &Unit) -> bool {
        self.now.first(unit.slot(self.now.map.seed)) == Some(self.me)
    }

    /// The first owner of a unit; `None` if all members drain.
    pub fn owner(&self, unit: &Unit) -> Option<u64> {
        self.now.owner(unit)
    }

    /// Whether there are maps before the newest whose owners are still asked.
    pub fn has_changed(&self) -> bool {
        !self.earlier.is_empty()
    }

    /// The two best owners of a unit, the first one first.
    pub fn owners(&self, unit: &Unit) -> impl Iterator<Item = u64> + use<> {
        let owners = self.now.table.owners(unit.slot(self.now.map.seed));
        let id = |place: u16| self.now.id(place);
        let first = owners.map(|o| id(o.first));
        let second = owners.and_then(|o| o.second).map(id);
        first.into_iter().chain(second)
    }

    /// Whether the first that [`View::route`] has is a node that is asked to fetch the unit.
    pub fn asks_to_fetch(&self, unit: &Unit, answers: impl Fn(u64) -> bool) -> bool {
        match self.owner(unit) {
            Some(owner) if owner == self.me => false,
            Some(owner) if answers(owner) => true,
            _ => matches!(
                self.route(unit, 1, answers).sources.first(),
                Some(Source::Peer(_, Ask::OwnerFill))
            ),
        }
    }

    /// The nodes that keep a unit of which there are to be so many copies, the owner first.
    pub fn keepers(&self, unit: &Unit, copies: u8) -> impl Iterator<Item = u64> {
        self.keepers_of(unit.slot(self.now.map.seed), copies)
    }

    fn keepers_of(&self, slot: u32, copies: u8) -> impl Iterator<Item = u64> {
        let places = self.now.table.keepers(slot, copies);
        places.map(|place| self.now.id(place))
    }

    /// Whether this node is to keep a unit of which there are to be so many copies.
    pub fn is_keeper(&self, unit: &Unit, copies: u8) -> bool {
        self.keepers(unit, copies).any(|id| id == self.me)
    }

    /// What a unit, of which there are to be so many copies, is to this node, which has it.
    pub fn standing(&self, unit: &Unit, copies: u8) -> Standing {
        let slot = unit.slot(self.now.map.seed);
        match self.owns(unit) {
            true => Standing::Owner,
            false if copies > 1 && self.is_keeper(unit, copies) => Standing::Keeper,
            false if !self.released.has(slot) && self.had(slot) => Standing::Former,
            false => Standing::Other,
        }
    }

    /// How a unit is read that is not in the local cache, and of which there are to be so many copies.
    /// `answers` says which peers are worth asking at this moment.
    pub fn route(&self, unit: &Unit, copies: u8, answers: impl Fn(u64) -> bool) -> Route {
        let slot = unit.slot(self.now.map.seed);
        let mut sources = Vec::with_capacity(FILLERS_MAX + EARLIER_MAX + 1);
        let owners = self.now.table.owners(slot);
        let mut mine = None;
        if let Some(Owners { first, second }) = owners {
            let two = std::iter::once(first).chain(second);
            mine = self.ask_fillers(two, &answers, &mut sources);
            if mine.is_none() && sources.is_empty() {
                // This is rare; only now is the order of all others computed.
                let all = self.now.table.ranked(slot).into_iter();
                mine = self.ask_fillers(all, &answers, &mut sources);
            }
        }
        if mine.is_some() || sources.is_empty() {
            self.ask_former(slot, None, &answers, &mut sources);
        }
        self.ask_keepers(slot, copies, None, &answers, &mut sources);
        sources.push(Source::Origin);
        Route {
            sources,
            keeps_after: mine.unwrap_or(Route::NEVER),
        }
    }

    /// Adds those of `order` that are asked to fetch a unit. If this node's turn comes, the rest is
    /// what it does as the owner or as a stand-in: returns how many sources come before that.
    fn ask_fillers(
        &self,
        order: impl Iterator<Item = u16>,
        answers: impl Fn(u64) -> bool,
        sources: &mut Vec<Source>,
    ) -> Option<usize> {
        for place in order {
            let id = self.now.id(place);
            if id == self.me {
                return Some(sources.len());
            }
            if answers(id) {
                sources.push(Source::Peer(id, Ask::OwnerFill));
            }
            if sources.len() == FILLERS_MAX {
                break;
            }
        }
        None
    }

    /// How this node reads a unit because `asker` has asked it to fetch it: from nodes that have it,
    /// or from the origin. The asker may have seen a newer map or an older one, or may not reach the
    /// owner.
    pub fn route_of_filler(
        &self,
        unit: &Unit,
        copies: u8,
        asker: u64,
        answers: impl Fn(u64) -> bool,
    ) -> Route {
        let slot = unit.slot(self.now.map.seed);
        let mut sources = Vec::with_capacity(EARLIER_MAX + 2);
        let owner = self.now.first(slot).filter(|&owner| owner != self.me);
        // By this node's map it is for another to keep the unit, who may have it.
        let there = owner.filter(|&owner| owner != asker && answers(owner));
        sources.extend(there.map(|owner| Source::Peer(owner, Ask::LocalOnly)));
        self.ask_former(slot, Some(asker), &answers, &mut sources);
        self.ask_keepers(slot, copies, Some(asker), &answers, &mut sources);
        sources.push(Source::Origin);
        Route {
            sources,
            // Even if it is for another: or else what that lacks would be fetched again and again.
            // ([`View::standing`] says that it goes first.)
            keeps_after: 0,
        }
    }

    fn ask_former(
        &self,
        slot: u32,
        asker: Option<u64>,
        answers: impl Fn(u64) -> bool,
        sources: &mut Vec<Source>,
    ) {
        for id in self.former(slot) {
            let is_asked = |s: &Source| matches!(s, Source::Peer(other, _) if *other == id);
            if Some(id) != asker && !sources.iter().any(is_asked) && answers(id) {
                sources.push(Source::Peer(id, Ask::LocalOnly));
            }
        }
    }

    /// Adds those who keep copies and are not asked yet.
    fn ask_keepers(
        &self,
        slot: u32,
        copies: u8,
        asker: Option<u64>,
        answers: impl Fn(u64) -> bool,
        sources: &mut Vec<Source>,
    ) {
        if copies < 2 {
            return;
        }
        for id in self.keepers_of(slot, copies) {
            let is_asked = |s: &Source| matches!(s, Source::Peer(other, _) if *other == id);
            let is_other = id != self.me && Some(id) != asker;
            if is_other && !sources.iter().any(is_asked) && answers(id) {
                sources.push(Source::Peer(id, Ask::LocalOnly));
            }
        }
    }

    /// Those who owned a slot and may have what its owner lacks, the latest first.
    pub(crate) fn former(&self, slot: u32) -> impl Iterator<Item = u64> {
        let owner = self.now.first(slot);
        let is_over = owner == Some(self.me) && self.handed_over.has(slot);
        let mut seen = [None; EARLIER_MAX];
        let earlier = self
            .earlier
            .iter()
            .take(if is_over { 0 } else { EARLIER_MAX });
        earlier.enumerate().filter_map(move |(n, earlier)| {
            // Who was dropped from the map is gone for good.
            let id = earlier.placed.first(slot)?;
            let is_new = Some(id) != owner && id != self.me && !seen.contains(&Some(id));
            seen[n] = Some(id);
            (is_new && self.now.has(id)).then_some(id)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemberState;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, HashSet};

    const HOUR: Duration = Duration::from_secs(3600);

    fn map_of(epoch: u64, ids: impl Iterator<Item = u64>) -> Map {
        let map = Map::new("test", 7, ids.map(member).collect()).unwrap();
        Map { epoch, ..map }
    }

    fn member(id: u64) -> Member {
        Member {
            id,
            name: String::new(),
            address: String::new(),
            url: String::new(),
            zone: String::new(),
            weight: 1 << 40,
            state: MemberState::Active,
        }
    }

    fn unit(number: u64) -> Unit {
        let name = u128::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        Unit { name, extent: 0 }
    }

    fn placed(map: Map) -> Arc<Placed> {
        Arc::new(Placed::new(map))
    }

    /// Some nodes with caches, one origin, and the maps, which nodes take over at their own pace.
    struct Cluster {
        placed: Arc<Placed>,
        /// All maps, and since when each has been the newest.
        history: Vec<(Arc<Placed>, Duration)>,
        nodes: BTreeMap<u64, (View, HashSet<Unit>)>,
        stopped: HashSet<u64>,
        /// Pairs that do not reach each other.
        cut: HashSet<(u64, u64)>,
        /// Fails while it is asked: nobody knows before.
        dies: Option<u64>,
        now: Duration,
        from_origin: usize,
        deepest: usize,
        copies: u8,
    }

    impl Cluster {
        fn new(ids: impl IntoIterator<Item = u64>) -> Self {
            let map = Map::new("c", 9, ids.into_iter().map(member).collect()).unwrap();
            let first = placed(map);
            let mut cluster = Self {
                history: vec![(first.clone(), Duration::ZERO)],
                placed: first,
                nodes: BTreeMap::new(),
                stopped: HashSet::new(),
                cut: HashSet::new(),
                dies: None,
                now: Duration::ZERO,
                from_origin: 0,
                deepest: 0,
                copies: 1,
            };
            cluster.start();
            cluster
        }

        fn map(&self) -> &Map {
            self.placed.map()
        }

        /// Those of the map that are not there yet: they read all maps.
        fn start(&mut self) {
            for m in &self.placed.map().members {
                self.nodes.entry(m.id).or_insert_with(|| {
                    let mut view = View::new(m.id, self.history[0].0.clone());
                    for (placed, since) in &self.history[1..] {
                        view.advance(placed.clone(), self.now, self.now - *since)
                            .unwrap();
                    }
                    (view, HashSet::new())
                });
            }
        }

        /// A new map, of which only those who join know yet.
        fn announce(&mut self, members: Vec<Member>) {
            self.placed = placed(self.map().with(members).unwrap());
            self.history.push((self.placed.clone(), self.now));
            self.start();
        }

        fn advance(&mut self, id: u64) {
            if let Some((view, _)) = self.nodes.get_mut(&id) {
                for (placed, since) in &self.history {
                    view.advance(placed.clone(), self.now, self.now - *since)
                        .unwrap();
                }
            }
        }

        fn change(&mut self, members: Vec<Member>) {
            self.announce(members);
            let all: Vec<u64> = self.nodes.keys().copied().collect();
            all.into_iter().for_each(|id| self.advance(id));
        }

        fn view(&mut self, id: u64) -> &mut View {
            &mut self.nodes.get_mut(&id).unwrap().0
        }

        fn reaches(&self, from: u64, to: u64) -> bool {
            let pair = (from.min(to), from.max(to));
            !self.stopped.contains(&to) && !self.cut.contains(&pair)
        }

        /// What each new owner does in the background; former owners drop what it has.
        fn pull(&mut self) {
            let all: HashSet<Unit> = self.nodes.values().flat_map(|n| n.1.clone()).collect();
            for m in self.map().members.clone() {
                if self.stopped.contains(&m.id) {
                    continue;
                }
                let view = &self.nodes[&m.id].0;
                let epoch = view.map().epoch;
                let slots: HashSet<u32> = view.handing_over().collect();
                for unit in all.iter().filter(|unit| slots.contains(&unit.slot(9))) {
                    self.read(m.id, *unit, 0, None);
                }
                for slot in slots {
                    self.nodes
                        .iter_mut()
                        .for_each(|(id, (view, _))| match *id == m.id {
                            true => view.handed_over(slot, epoch),
                            false => view.released(slot, epoch),
                        });
                }
            }
            for (view, cache) in self.nodes.values_mut() {
                cache.retain(|unit| view.standing(unit, self.copies) != Standing::Other);
            }
        }

        /// What those who keep copies do in the background, from other keepers they reach.
        fn mirror(&mut self) {
            let all: HashSet<Unit> = self.nodes.values().flat_map(|n| n.1.clone()).collect();
            for m in self.map().members.clone() {
                let is_here = |id: u64| !self.stopped.contains(&id);
                let mut gets = Vec::new();
                for unit in all.iter().filter(|_| is_here(m.id)) {
                    let (view, cache) = &self.nodes[&m.id];
                    if !cache.contains(unit) && view.is_keeper(unit, self.copies) {
                        let mut others = view.keepers(unit, self.copies);
                        if others.any(|id| is_here(id) && self.nodes[&id].1.contains(unit)) {
                            gets.push(*unit);
                        }
                    }
                }
                self.nodes.get_mut(&m.id).unwrap().1.extend(gets);
            }
        }

        fn read(&mut self, at: u64, unit: Unit, depth: usize, by: Option<(u64, Ask)>) -> bool {
            self.deepest = self.deepest.max(depth);
            assert!(!self.stopped.contains(&at), "a stopped node is not asked");
            let (view, cache) = &self.nodes[&at];
            if cache.contains(&unit) {
                return true;
            }
            let answers = |id| self.reaches(at, id);
            let route = match by {
                Some((_, Ask::LocalOnly)) => return false,
                Some((asker, Ask::OwnerFill)) => {
                    view.route_of_filler(&unit, self.copies, asker, answers)
                }
                None => view.route(&unit, self.copies, answers),
            };
            assert_eq!(route.sources.last(), Some(&Source::Origin));
            let asked: HashSet<_> = route.sources.iter().collect();
            assert_eq!(asked.len(), route.sources.len(), "nobody is asked twice");
            let dies =
                |source: &&Source| matches!(source, Source::Peer(id, _) if self.dies == Some(*id));
            let unanswered = route.sources.iter().take_while(dies).count();
            let found = route.sources.iter().any(|source| match *source {
                Source::Origin => {
                    self.from_origin += 1;
                    true
                }
                Source::Peer(id, _) if self.dies == Some(id) => false,
                Source::Peer(id, ask) => {
                    assert!(id != at && by.is_none_or(|(asker, _)| asker != id));
                    self.read(id, unit, depth + 1, Some((at, ask)))
                }
            });
            assert!(found, "the origin has everything");
            if route.keeps(unanswered) {
                self.nodes.get_mut(&at).unwrap().1.insert(unit);
            }
            true
        }

        fn there(&self) -> Vec<u64> {
            let ids = self.map().members.iter().map(|m| m.id);
            ids.filter(|id| !self.stopped.contains(id) && self.dies != Some(*id))
                .collect()
        }

        /// Reads all units, each at some node that is there; returns how many came from the origin.
        fn read_all(&mut self, units: u64) -> usize {
            let before = self.from_origin;
            let there = self.there();
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
    fn a_node_dominates_that_owns_more_than_half_and_twice_of_what_the_asked_one_does() {
        let placed = Placed::new(map_of(1, 1..=3));
        let of = |owner: u64, count: usize| {
            let units = (0u32..).map(|i| Unit::at(u128::from(i) << 64, 0));
            let owned = units.filter(|unit| placed.owner(unit) == Some(owner));
            owned.take(count).collect::<Vec<_>>()
        };
        let dominant = |counts: [usize; 3], me| {
            let units = (1..)
                .zip(counts)
                .flat_map(|(owner, count)| of(owner, count));
            placed.dominant(units, me)
        };
        assert_eq!(dominant([0, 0, 0], 1), None);
        assert_eq!(dominant([0, 1, 0], 1), Some(2));
        assert_eq!(dominant([0, 1, 0], 2), None, "it was asked itself");
        assert_eq!(dominant([1, 2, 0], 1), Some(2));
        assert_eq!(dominant([2, 3, 0], 1), None, "too little is won");
        assert_eq!(dominant([0, 2, 2], 1), None, "a half is not most");
        assert_eq!(dominant([30, 9, 61], 1), Some(3));
        assert_eq!(dominant([31, 8, 61], 1), None);
        assert_eq!(
            dominant([0, 3, 7], 9),
            Some(3),
            "asked of a node that is in no map"
        );
    }

    #[test]
    fn a_table_that_came_back_is_not_the_one_from_before() {
        let first = Placed::new(map_of(5, 1..=3));
        let table = first.checksum();
        let mut view = View::new(1, Arc::new(first));
        let zero = Duration::ZERO;
        let advance = |view: &mut View, epoch, ids| {
            let placed = Arc::new(Placed::new(map_of(epoch, ids)));
            view.advance(placed, zero, zero).unwrap();
        };
        assert!(view.is_still(table, 5));
        advance(&mut view, 6, 1..=4);
        assert!(view.is_still(table, 5), "of the older one");
        advance(&mut view, 7, 1..=3);
        assert!(!view.is_still(table, 5));
        assert!(view.is_still(table, 7));
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
    fn with_copies_nothing_is_read_again_whoever_goes_one_after_the_other() {
        for copies in [2, 3] {
            let mut cluster = Cluster::new(1..=6);
            cluster.copies = copies;
            assert_eq!(cluster.read_all(2000), 2000);
            cluster.mirror();
            let all: usize = cluster.nodes.values().map(|n| n.1.len()).sum();
            assert!(all >= 2000 * usize::from(copies));
            for gone in 1..=4 {
                // With three, two at a time.
                let also = (copies == 3).then_some(gone + 1);
                cluster
                    .stopped
                    .extend([Some(gone), also].into_iter().flatten());
                assert_eq!(cluster.read_all(2000), 0, "{copies} copies, {gone} is gone");
                let left = cluster.there().into_iter().map(member).collect();
                cluster.change(left);
                cluster.mirror();
                for (view, cache) in cluster.nodes.values_mut() {
                    cache.retain(|unit| view.standing(unit, copies) != Standing::Other);
                }
                assert_eq!(cluster.read_all(2000), 0);
                if copies == 3 && gone == 3 {
                    break;
                }
            }
            assert!(cluster.deepest <= 2);
        }
    }

    #[test]
    fn an_owner_that_lost_its_cache_gets_it_from_those_who_keep_copies() {
        let mut cluster = Cluster::new(1..=4);
        cluster.copies = 2;
        cluster.read_all(2000);
        cluster.mirror();
        cluster.nodes.get_mut(&2).unwrap().1.clear();
        assert_eq!(cluster.read_all(2000), 0, "while it is read");
        cluster.nodes.get_mut(&2).unwrap().1.clear();
        cluster.mirror();
        let (view, cache) = &cluster.nodes[&2];
        let lost = (0..2000)
            .map(unit)
            .filter(|u| view.owns(u) && !cache.contains(u));
        assert_eq!(lost.count(), 0, "and if it is not");
    }

    #[test]
    fn an_owner_that_fails_while_it_is_asked_is_stood_in_for() {
        let mut cluster = Cluster::new(1..=5);
        cluster.read_all(2000);
        let lost = cluster.nodes[&3].1.len();
        cluster.dies = Some(3);
        assert_eq!(cluster.read_all(2000), lost);
        assert_eq!(cluster.read_all(2000), 0, "stand-ins have it all");
    }

    #[test]
    fn a_node_cut_off_from_an_owner_reads_what_that_has() {
        let mut cluster = Cluster::new(1..=5);
        cluster.read_all(2000);
        cluster.cut = HashSet::from([(1, 2), (1, 3)]);
        // What it stands in for itself it reads once. The rest comes by nodes that reach the owner.
        let stands_in = |n: &u64| {
            let slot = unit(*n).slot(9);
            let ranked = cluster.placed.table.ranked(slot);
            let ids: Vec<u64> = ranked.iter().map(|p| cluster.placed.id(*p)).collect();
            let before = ids.iter().position(|id| *id == 1).unwrap();
            before > 0 && ids[..before].iter().all(|id| [2, 3].contains(id))
        };
        let most = (0..2000).filter(stands_in).count();
        let read = cluster.read_all(2000);
        assert!(read > 0 && read <= most, "{read} of {most}");
        assert_eq!(cluster.read_all(2000), 0);
        assert!(cluster.deepest <= 2);
    }

    #[test]
    fn what_nobody_has_is_fetched_once_over_cut_links_and_by_maps_of_different_age() {
        let mut cut = Cluster::new(1..=5);
        cut.cut = HashSet::from([(1, 2)]);
        let mut late = Cluster::new(1..=4);
        late.announce((1..=5).map(member).collect());
        [1, 2, 5].into_iter().for_each(|id| late.advance(id));
        for mut cluster in [cut, late] {
            for _ in 0..2 {
                cluster.read_all(2000);
            }
            assert_eq!(cluster.read_all(2000), 0);
        }
    }

    #[test]
    fn nodes_with_maps_of_different_age_read_nothing_again() {
        let mut cluster = Cluster::new(1..=4);
        cluster.read_all(2000);
        cluster.announce((1..=5).map(member).collect());
        for late in [None, Some(2), Some(1), Some(4)] {
            if let Some(id) = late {
                cluster.advance(id);
            }
            assert_eq!(cluster.read_all(2000), 0, "{late:?}");
        }
        cluster.advance(3);
        assert_eq!(cluster.read_all(2000), 0);
        assert!(cluster.deepest <= 2);
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
        let standing = |cluster: &Cluster| {
            let (view, cache) = &cluster.nodes[&1];
            cache
                .iter()
                .map(|u| view.standing(u, 1))
                .collect::<Vec<_>>()
        };
        let before = standing(&cluster);
        assert!(before.len() > 200 && before.iter().all(|s| *s == Standing::Former));
        assert_eq!(cluster.read_all(1000), 0);
        cluster.pull();
        assert_eq!(cluster.nodes[&2].0.handing_over().count(), 0);
        assert!(standing(&cluster).is_empty(), "nobody asks for it any more");
        assert_eq!(cluster.read_all(1000), 0);
        cluster.change(members[1..].to_vec());
        assert_eq!(cluster.read_all(1000), 0);
    }

    #[test]
    fn if_all_drain_what_they_have_is_still_read() {
        let mut cluster = Cluster::new(1..=3);
        cluster.read_all(1000);
        let mut members = cluster.map().members.clone();
        members
            .iter_mut()
            .for_each(|m| m.state = MemberState::Draining);
        cluster.change(members);
        assert_eq!(cluster.read_all(1000), 0);
    }

    #[test]
    fn hand_overs_end() {
        let mut cluster = Cluster::new(1..=3);
        cluster.now = HOUR;
        cluster.change((1..=4).map(member).collect());
        let view = cluster.view(4);
        let all = view.handing_over().count();
        assert!((SLOTS / 5..SLOTS / 3).contains(&all), "{all}");
        let one = (0..).map(unit).find(|u| view.owns(u)).unwrap();
        let asked = |view: &View| view.route(&one, 1, |_| true).sources.len() - 1;
        assert_eq!(asked(view), 1);
        assert_eq!(view.route(&one, 1, |_| false).sources, [Source::Origin]);
        view.handed_over(one.slot(9), 1);
        assert_eq!(asked(view), 1, "in that epoch it was not the owner");
        view.handed_over(one.slot(9), 2);
        assert_eq!((asked(view), view.handing_over().count()), (0, all - 1));
        view.expire(HOUR + HAND_OVER_MAX - Duration::from_nanos(1));
        assert_eq!(view.handing_over().count(), all - 1);
        view.expire(HOUR + HAND_OVER_MAX);
        assert_eq!(view.handing_over().count(), 0);
    }

    #[test]
    fn a_hand_over_is_of_each_former_owner_and_ends_when_the_last_one_is_done() {
        let mut cluster = Cluster::new(1..=3);
        cluster.change((1..=4).map(member).collect());
        let view = cluster.view(4);
        let (checksum, none) = (view.placed().checksum(), BTreeMap::new());
        let of_each = view.formers(&none);
        assert_eq!(of_each.keys().copied().collect::<Vec<_>>(), [1, 2, 3]);
        let all = view.handing_over().count() as u64;
        assert_eq!(of_each.values().sum::<u64>(), all);
        // Those of before the node joined say nothing.
        assert_eq!(view.formers(&BTreeMap::from([(1, 1)])), of_each);
        let pulled = BTreeMap::from([(1, 2), (3, 2)]);
        assert_eq!(view.formers(&pulled), BTreeMap::from([(2, of_each[&2])]));
        let done = view.all_pulled(&pulled);
        assert_eq!(done.len() as u64, all - of_each[&2]);
        let mut view = view.clone();
        done.iter().for_each(|slot| view.handed_over(*slot, 2));
        assert_eq!(view.handing_over().count() as u64, of_each[&2]);

        // The other side.
        let mut first = cluster.view(1).clone();
        assert_eq!(first.losing(), BTreeMap::from([(4, of_each[&1])]));
        let by = first.placed_by(checksum).unwrap().clone();
        let owed = first.owed(4, &by);
        assert_eq!(owed.len() as u64, of_each[&1]);
        assert!(first.owed(2, &by).is_empty() && first.placed_by(!checksum).is_none());
        owed.iter().for_each(|slot| first.released(*slot, 2));
        assert!(first.losing().is_empty() && first.owed(4, &by).is_empty());
        // What goes elsewhere since is owed to those who have it now, by any table.
        let mut back = cluster.map().members.clone();
        back[3].state = MemberState::Draining;
        cluster.change(back);
        let second = cluster.view(2);
        assert!(second.owed(4, &by).is_empty() && second.losing().is_empty());
        let fourth = cluster.view(4);
        assert_eq!(fourth.losing().values().sum::<u64>(), all);
        assert!(
            fourth
                .closes()
                .is_some_and(|at| !fourth.is_due(at - HOUR) && fourth.is_due(at))
        );
    }

    #[test]
    fn a_node_that_drains_knows_what_it_owes_after_more_maps_than_it_remembers() {
        let mut cluster = Cluster::new(1..=3);
        let mut members: Vec<_> = (1..=3).map(member).collect();
        members[0].state = MemberState::Draining;
        cluster.change(members.clone());
        let lost: u64 = cluster.view(1).losing().values().sum();
        assert!(lost > 0);
        let by = cluster.view(1).placed().clone();
        for id in 4..=8 {
            members.push(member(id));
            cluster.change(members.clone());
        }
        // Whose owner has not changed since is owed by the map of the drain too.
        let view = cluster.view(1);
        assert_eq!(view.losing().values().sum::<u64>(), lost);
        assert!(!view.owed(2, &by).is_empty());
        let mut late = view.clone();
        assert!(!late.is_due(HAND_OVER_MAX - HOUR) && late.is_due(HAND_OVER_MAX));
        late.expire(HAND_OVER_MAX);
        assert!(late.losing().is_empty());
        let (now, epoch) = (view.placed().clone(), view.map().epoch);
        for owner in 2..=8 {
            for slot in view.owed(owner, &now) {
                view.released(slot, epoch);
            }
        }
        assert!(view.losing().is_empty());
        // Those that stay count what they remember.
        let second = cluster.view(2);
        let remembered = |slot: &u32| second.now.first(*slot) != Some(2) && second.had(*slot);
        let remembered = (0..SLOTS as u32).filter(remembered).count() as u64;
        assert!(second.had_before.is_some());
        assert_eq!(second.losing().values().sum::<u64>(), remembered);
        // One that starts again reads the map before its drain, and the newest ones.
        let (now, history) = (cluster.now, &cluster.history);
        let mut again = View::new(1, history[0].0.clone());
        for (placed, since) in &history[history.len() - 4..] {
            again.advance(placed.clone(), now, now - *since).unwrap();
        }
        assert_eq!(again.losing().values().sum::<u64>(), lost);
    }

    /// A pull that ends late is of a time before others owned the slot.
    #[test]
    fn a_hand_over_is_of_its_epoch() {
        let mut cluster = Cluster::new(1..=3);
        cluster.change((1..=4).map(member).collect());
        let view = cluster.view(4);
        let one = (0..).map(unit).find(|u| view.owns(u)).unwrap();
        let slot = one.slot(9);
        view.handed_over(slot, 2);
        assert!(!view.handing_over().any(|s| s == slot));
        cluster.change((1..=3).map(member).collect());
        cluster.change((1..=4).map(member).collect());
        let view = cluster.view(4);
        assert!(view.handing_over().any(|s| s == slot));
        view.handed_over(slot, 2);
        assert!(view.handing_over().any(|s| s == slot));
        view.handed_over(slot, 4);
        assert!(!view.handing_over().any(|s| s == slot));
    }

    #[test]
    fn maps_of_others_and_from_before_change_nothing() {
        let cluster = Cluster::new(1..=3);
        let mut view = cluster.nodes[&1].0.clone();
        let members = || [1, 2].map(member).to_vec();
        let mut take = |map: &Map| view.advance(placed(map.clone()), HOUR, Duration::ZERO);
        for (name, seed) in [("d", 9), ("c", 8)] {
            let e = take(&Map::new(name, seed, members()).unwrap()).unwrap_err();
            assert!(e.to_string().contains("cannot follow"), "{e}");
        }
        let e = take(&Map::new("c", 9, members()).unwrap()).unwrap_err();
        assert!(e.to_string().contains("have the epoch 1"), "{e}");
        let next = cluster.map().with(members()).unwrap();
        let change = take(&next).unwrap();
        assert!(!change.gained.is_empty() && change.lost.is_empty());
        for map in [&next, cluster.map()] {
            assert_eq!(take(map).unwrap(), Change::default());
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
        Cut(prop::sample::Index, prop::sample::Index),
        Mend,
        Advance(prop::sample::Index),
        Pull,
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let any = any::<prop::sample::Index>;
        prop_oneof![
            (1u64..40).prop_map(Step::Join),
            any().prop_map(Step::Leave),
            any().prop_map(Step::Drain),
            any().prop_map(Step::Stop),
            Just(Step::Start),
            (any(), any()).prop_map(|(a, b)| Step::Cut(a, b)),
            Just(Step::Mend),
            any().prop_map(Step::Advance),
            any().prop_map(Step::Advance),
            Just(Step::Pull),
            (1u64..30).prop_map(Step::Wait),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        /// Each read is answered, by nodes that are there and in the map of who asks, over at most
        /// two hops, whatever happened; and where nothing changes any more, nothing is read again.
        #[test]
        fn whatever_happens_every_read_is_answered(steps in prop::collection::vec(step(), 1..14)) {
            let mut cluster = Cluster::new([1, 2, 3]);
            for step in steps {
                let mut members = cluster.map().members.clone();
                let id_at = |at: prop::sample::Index| members[at.index(members.len())].id;
                match step {
                    Step::Join(id) if members.iter().all(|m| m.id != id) => {
                        // One that was forgotten comes back without its cache.
                        cluster.nodes.remove(&id);
                        cluster.stopped.remove(&id);
                        members.push(member(id));
                        cluster.announce(members);
                    }
                    Step::Leave(at) if members.len() > 1 => {
                        members.remove(at.index(members.len()));
                        cluster.announce(members);
                    }
                    Step::Drain(at) => {
                        let at = at.index(members.len());
                        members[at].state = MemberState::Draining;
                        cluster.announce(members);
                    }
                    Step::Stop(at) if cluster.stopped.len() + 1 < members.len() => {
                        cluster.stopped.insert(id_at(at));
                    }
                    Step::Start => cluster.stopped.clear(),
                    Step::Cut(a, b) => {
                        let (a, b) = (id_at(a), id_at(b));
                        cluster.cut.insert((a.min(b), a.max(b)));
                    }
                    Step::Mend => cluster.cut.clear(),
                    Step::Advance(at) => {
                        let id = id_at(at);
                        cluster.advance(id);
                    }
                    Step::Pull => cluster.pull(),
                    Step::Wait(hours) => {
                        cluster.now += HOUR * hours as u32;
                        let now = cluster.now;
                        for (view, _) in cluster.nodes.values_mut() {
                            view.expire(now);
                        }
                    }
                    _ => {}
                }
                if !cluster.there().is_empty() {
                    cluster.read_all(60);
                    prop_assert!(cluster.deepest <= 2);
                }
            }
            // All take the last map, and reach each other.
            cluster.cut.clear();
            for id in cluster.nodes.keys().copied().collect::<Vec<_>>() {
                cluster.advance(id);
            }
            let there = cluster.there();
            let active = |m: &Member| m.state == MemberState::Active && there.contains(&m.id);
            if cluster.map().members.iter().any(active) {
                cluster.read_all(60);
                prop_assert_eq!(cluster.read_all(60), 0);
            }
        }
    }
}
