//! This node's view of the others, and its links to them.

use crate::{
    handover::Moved,
    hedge::{self, Heard, Hedges},
    hot::{Heat, Hot},
    link::{self, Answer, Dial, Failure, LinkStatus, Peer, Timing},
    message::{Hello, PROTOCOL, Question, What},
    mirror::Copied,
    telling::{Coherence, Leases, Telling, Writes},
};
use bytes::{Bytes, BytesMut};
use forebay_cluster::{
    Ask, Change, EXTENT_BYTES, Map, Member, MemberState, Placed, Route, Source, Standing, Term,
    Unit, View,
};
use forebay_core::{
    Error, ObjectMeta, ObjectName, Result, request,
    sync::{Mutex, RwLock},
};
use forebay_engine::{Engine, Wanted, WantedBytes};
use forebay_store::Store;
use futures::TryStreamExt;
use hashbrown::HashMap;
use std::{
    collections::VecDeque,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// So many names whose homes could not be told of a write are remembered.
const UNTOLD_MAX: usize = 65_536;
/// If there is less room than this once old names are forgotten, none are told apart any more.
const UNTOLD_ROOM: usize = UNTOLD_MAX / 8;
/// The longest answer to an order.
pub const OPERATED_MAX_BYTES: u64 = 4 << 20;
/// Maps of nodes differ for less than this, where all of them can be told.
const RECENT: Duration = Duration::from_secs(60);

/// Who this node is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cluster's name.
    pub cluster: String,
    /// As it is in the cluster's map.
    pub node: u64,
    /// New at each start.
    pub boot: u64,
    /// How this node wants to be in the map, where nodes find each other by themselves.
    pub member: Option<Member>,
}

impl Identity {
    pub(crate) fn hello(&self) -> Hello {
        Hello {
            protocol: PROTOCOL,
            cluster: self.cluster.clone(),
            node: self.node,
            boot: self.boot,
            member: self.member.clone(),
            gathers: true,
            copies: true,
            tags: true,
            fetches: true,
        }
    }
}

/// What a node says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Its id.
    pub node: u64,
    /// New at each of its starts.
    pub boot: u64,
    /// How it wants to be in the map, if it says so.
    pub member: Option<Member>,
}

/// This node's part in a cluster.
pub struct Cluster {
    me: Identity,
    began: Instant,
    view: RwLock<View>,
    /// Held by whoever changes the view.
    changing: Mutex<()>,
    peers: RwLock<HashMap<u64, Arc<Peer>>>,
    dial: Arc<dyn Dial>,
    timing: Timing,
    /// Names that were written through this node, and whose homes do not know it yet.
    untold: Mutex<HashMap<ObjectName, Untold>>,
    /// Names that were written through this node within [`RECENT`], and when.
    recent: Mutex<VecDeque<(Duration, ObjectName)>>,
    /// Whether there is any, so that reads need no lock.
    has_untold: AtomicBool,
    writes: AtomicU64,
    /// Names that were written since other nodes owned them: what those know of them is old.
    overtaken: Mutex<Overtaken>,
    /// How often the view of who owns what has changed.
    changes: AtomicU64,
    has_others: AtomicBool,
    /// Where nodes hold leases.
    telling: OnceLock<Arc<Telling>>,
    /// What was moved between owners (`handover.rs`).
    moved: Moved,
    /// What is kept of others (`mirror.rs`).
    copied: Copied,
    /// What is sent to others, and what those who send say (`hot.rs`).
    heat: Heat,
    hot: Hot,
    /// How many questions may be asked twice.
    hedges: Hedges,
    /// Whose pins say how many nodes are to keep an object.
    pins: OnceLock<Arc<Store>>,
}

/// A write that some nodes do not know of.
struct Untold {
    write: u64,
    /// They are to be told.
    homes: Vec<u64>,
}

/// Names that were written, by their hashes, and when.
#[derive(Default)]
struct Overtaken {
    names: HashMap<u128, Duration>,
    /// Too many were written up to then to know each: all of them count.
    all: Option<Duration>,
}

impl Overtaken {
    /// A name is written. `keeps`: what was written long ago matters too.
    fn note(&mut self, name: u128, now: Duration, keeps: bool) {
        if self.names.len() >= UNTOLD_MAX {
            if !keeps {
                self.forget(now);
            }
            // All are looked at only once in many writes.
            if self.names.len() > UNTOLD_MAX - UNTOLD_ROOM {
                (self.names, self.all) = (HashMap::new(), Some(now));
            }
        }
        self.names.insert(name, now);
    }

    /// Only what was written just now matters.
    fn forget(&mut self, now: Duration) {
        self.all = self.all.filter(|at| is_recent(*at, now));
        self.names.retain(|_, at| is_recent(*at, now));
    }
}

fn is_recent(at: Duration, now: Duration) -> bool {
    now.saturating_sub(at) <= RECENT
}

impl Cluster {
    /// The node `me` in the cluster of this map.
    ///
    /// # Errors
    /// `Invalid` if the map is of another cluster, or does not have this node.
    pub fn new(
        me: Identity,
        placed: Arc<Placed>,
        dial: Arc<dyn Dial>,
        timing: Timing,
    ) -> Result<Arc<Cluster>> {
        let map = placed.map();
        if map.cluster != me.cluster {
            return Err(Error::invalid(format!(
                "the map is of cluster {:?}, and this node belongs to {:?}",
                map.cluster, me.cluster
            )));
        }
        if !map.members.iter().any(|m| m.id == me.node) {
            return Err(Error::invalid(format!(
                "the map of cluster {:?} does not have this node, {:016x}",
                map.cluster, me.node
            ))
            .hint("add it to the map, with its address and the size of its cache"));
        }
        let hot = Hot::new(me.node);
        let cluster = Cluster {
            view: RwLock::new(View::new(me.node, placed.clone())),
            changing: Mutex::default(),
            peers: RwLock::default(),
            me,
            began: Instant::now(),
            dial,
            timing,
            untold: Mutex::default(),
            recent: Mutex::default(),
            has_untold: AtomicBool::new(false),
            writes: AtomicU64::new(0),
            overtaken: Mutex::default(),
            changes: AtomicU64::new(0),
            has_others: AtomicBool::new(false),
            telling: OnceLock::new(),
            moved: Moved::default(),
            copied: Copied::default(),
            heat: Heat::default(),
            hot,
            hedges: Hedges::default(),
            pins: OnceLock::new(),
        };
        cluster.set_has_others(placed.map());
        *cluster.peers.write() = cluster.linked(placed.map());
        Ok(Arc::new(cluster))
    }

    /// Who this node is.
    pub fn me(&self) -> &Identity {
        &self.me
    }

    /// The newest map that it has seen.
    pub fn map(&self) -> Map {
        self.view.read().map().clone()
    }

    /// The newest map with its table.
    pub fn placed(&self) -> Arc<Placed> {
        self.view.read().placed().clone()
    }

    /// The newest map with its table, and how many slots of this node have former owners that are
    /// still asked. It looks at all slots.
    pub fn placement(&self) -> (Arc<Placed>, usize) {
        let view = self.view.read();
        (view.placed().clone(), view.handing_over().count())
    }

    /// The node that owns a byte of an object; `None` if all members drain.
    pub fn owner(&self, name: &ObjectName, at: u64) -> Option<u64> {
        self.view.read().owner(&Unit::at(name.hash128(), at))
    }

    /// The node that owns what has this hash; `None` if all members drain.
    pub fn owner_of_hash(&self, hash: u128) -> Option<u64> {
        self.view.read().owner(&Unit::at(hash, 0))
    }

    /// Another node that owns most of these bytes of objects ([`Placed::dominant`]), and where
    /// clients reach it; `None` as well if it does not answer, or clients do not know it.
    pub fn dominant<'a>(
        &self,
        read: impl Iterator<Item = (&'a ObjectName, u64)>,
    ) -> Option<String> {
        // No lock is held while they are counted: there may be a million.
        let placed = self.view.read().placed().clone();
        let units = read.map(|(name, at)| Unit::at(name.hash128(), at));
        let node = placed.dominant(units, self.me.node)?;
        let mut members = placed.map().members.iter();
        let url = &members.find(|m| m.id == node)?.url;
        (!url.is_empty() && self.answers(node)).then(|| url.clone())
    }

    /// Gives another node an order ([`Operator`](crate::Operator)), and returns its answer.
    ///
    /// # Errors
    /// What the node answers, or that it does not.
    pub async fn operate(&self, node: u64, order: serde_json::Value) -> Result<Bytes> {
        let peer = self.peers.read().get(&node).cloned();
        let peer = peer.ok_or_else(|| {
            Error::origin_unavailable(format!("node {node:016x} does not belong to the cluster"))
        })?;
        if !peer.answers() {
            return Err(Error::origin_unavailable("it does not answer"));
        }
        let question = Question {
            epoch: self.view.read().map().epoch,
            bucket: String::new(),
            key: String::new(),
            what: What::Operate { order },
            request: request::current(),
            tags: false,
        };
        let answer = peer.ask(&question).await.map_err(|failure| match failure {
            Failure::Refused(e) | Failure::Silent(e) => e,
        })?;
        let Some((found, mut body)) = answer else {
            return Err(Error::unsupported("it does not know such orders"));
        };
        if found.range.end > OPERATED_MAX_BYTES {
            return Err(Error::corrupt(format!(
                "it answers an order with {} bytes",
                found.range.end
            )));
        }
        let mut all = BytesMut::new();
        while let Some(piece) = body.try_next().await? {
            all.extend_from_slice(&piece);
        }
        Ok(all.freeze())
    }

    /// Whether a peer is thought to answer.
    pub fn answers(&self, node: u64) -> bool {
        self.peers.read().get(&node).is_some_and(|p| p.answers())
    }

    /// Asks who is at an address.
    ///
    /// # Errors
    /// If nobody answers there, or none of this cluster.
    pub async fn greet(&self, address: &str) -> Result<Greeting> {
        let mine = self.me.hello();
        let greeted = link::greet(&*self.dial, 0, address, &mine, self.timing.connect).await;
        let (_, theirs) = greeted.map_err(|what| {
            Error::origin_unavailable(format!("no node of the cluster at {address}: {what}"))
        })?;
        Ok(Greeting {
            node: theirs.node,
            boot: theirs.boot,
            member: theirs.member,
        })
    }

    /// What the links to the other members have done, in the order of their ids.
    pub fn links(&self) -> Vec<LinkStatus> {
        let mut links: Vec<_> = self.peers.read().values().map(|p| p.status()).collect();
        links.sort_by_key(|link| link.node);
        links
    }

    /// Takes over a map, if it is newer; `age` is how long it has been the newest.
    ///
    /// # Errors
    /// As [`View::advance`].
    pub fn advance(&self, placed: Arc<Placed>, age: Duration) -> Result<Change> {
        self.forget_overtaken();
        let changing = self.changing.lock();
        // What a new map comes to is computed on a copy, which takes milliseconds: no read waits
        // for it.
        let mut view = self.view();
        let change = view.advance(placed.clone(), self.began.elapsed(), age)?;
        if view.map() != placed.map() {
            return Ok(change);
        }
        let peers = self.linked(placed.map());
        let former = {
            let (mut view_now, mut peers_now) = (self.view.write(), self.peers.write());
            self.set_has_others(placed.map());
            self.changes.fetch_add(1, Relaxed);
            let former = std::mem::replace(&mut *view_now, view);
            (former, std::mem::replace(&mut *peers_now, peers))
        };
        drop((changing, former));
        self.tell_new_homes();
        Ok(change)
    }

    fn set_has_others(&self, map: &Map) {
        self.has_others.store(map.members.len() > 1, Relaxed);
    }

    /// A peer for each other member; those whose address is the same stay.
    fn linked(&self, map: &Map) -> HashMap<u64, Arc<Peer>> {
        let peers = self.peers.read();
        let others = map.members.iter().filter(|m| m.id != self.me.node);
        others
            .map(|member| {
                let known = peers.get(&member.id).cloned();
                let same = known.filter(|peer| peer.address == member.address);
                let peer = same.unwrap_or_else(|| {
                    let (hello, dial) = (self.me.hello(), self.dial.clone());
                    let peer = Peer::new(member.id, &member.address, hello, dial, self.timing);
                    Arc::new(peer)
                });
                (member.id, peer)
            })
            .collect()
    }

    /// How this node reads a unit; `as_owner`: because it was asked to fetch it, or owns it.
    pub(crate) fn route(&self, name: &ObjectName, at: u64, as_owner: bool) -> Route {
        let (unit, copies) = (Unit::at(name.hash128(), at), self.copies_of(name));
        let (view, peers) = (self.view.read(), self.peers.read());
        let is_up = |id| peers.get(&id).is_some_and(|peer| peer.is_quick());
        match as_owner {
            true => view.route_of_filler(&unit, copies, self.me.node, is_up),
            false => view.route(&unit, copies, is_up),
        }
    }

    /// The same for bytes of a version that is known, wherever they are: of a hot unit, the two
    /// owners are asked in turn.
    pub(crate) fn route_of_bytes(&self, name: &ObjectName, at: u64, as_owner: bool) -> Route {
        let mut route = self.route(name, at, as_owner);
        let fills =
            |source: Option<&Source>| matches!(source, Some(Source::Peer(_, Ask::OwnerFill)));
        let (first, second) = (route.sources.first(), route.sources.get(1));
        if fills(first)
            && fills(second)
            && self.hot.has(&Unit::at(name.hash128(), at))
            && self.hot.is_seconds_turn()
        {
            route.sources.swap(0, 1);
        }
        route
    }

    /// So many bytes of an object, from this one on, are sent to another node. Whether their unit is
    /// hot, and all of it is here: whoever is told asks others for it, who ask this node for what it
    /// has.
    pub(crate) fn sends(
        &self,
        engine: &Engine,
        name: &ObjectName,
        meta: &Arc<ObjectMeta>,
        at: u64,
        bytes: u64,
    ) -> bool {
        let unit = Unit::at(name.hash128(), at);
        let all = (unit.end() - EXTENT_BYTES).min(meta.size)..unit.end().min(meta.size);
        let length = all.end - all.start;
        self.heat.sends(&unit, length, bytes, self.now())
            && engine.is_here_for_peer(&Wanted {
                name: name.clone(),
                bytes: WantedBytes::Version(meta.clone(), all),
            })
    }

    /// A small object is sent to another node, which is here; whether it is hot.
    pub(crate) fn sends_object(&self, name: &ObjectName, bytes: u64) -> bool {
        let unit = Unit::at(name.hash128(), 0);
        self.heat.sends(&unit, bytes, bytes, self.now())
    }

    /// Another node says that a unit is hot.
    pub(crate) fn learns_hot(&self, unit: Unit) {
        let cache_bytes = {
            let view = self.view.read();
            if view.owns(&unit) {
                return;
            }
            let me = view.map().members.iter().find(|m| m.id == self.me.node);
            me.map_or(0, |m| m.weight)
        };
        if self.hot.learn(unit, cache_bytes, self.now()) {
            self.has_changed_standing();
        }
    }

    /// How many units of others are hot, by what their owners said, and how many answers this node
    /// gave with bytes of hot units.
    pub fn hot_units(&self) -> (usize, u64) {
        (self.hot.len(), self.heat.answers())
    }

    /// Whether the map has other nodes.
    pub(crate) fn has_others(&self) -> bool {
        self.has_others.load(Relaxed)
    }

    /// Changes whenever [`Cluster::standing`] may.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Relaxed)
    }

    /// What a unit, of which there are to be so many copies, is to this node, which has it.
    pub(crate) fn standing(&self, unit: &Unit, copies: u8) -> Standing {
        match self.view.read().standing(unit, copies) {
            Standing::Other if self.hot.has(unit) => Standing::Keeper,
            standing => standing,
        }
    }

    /// The pins of this store say how many nodes are to keep an object, too.
    pub fn set_pins(&self, store: Arc<Store>) {
        let _ = self.pins.set(store);
    }

    /// How many nodes are to keep an object: as the bucket's rule says, or a pin that wants more.
    pub(crate) fn copies_of(&self, name: &ObjectName) -> u8 {
        let pins = self.pins.get();
        let pinned = pins.map_or(1, |pins| pins.copies_of_pin(name));
        self.copies(name.bucket()).max(pinned)
    }

    /// The nodes that are to keep a byte of an object on so many disks, the owner first.
    pub fn keepers_on(&self, name: &ObjectName, at: u64, copies: u8) -> Vec<u64> {
        let unit = Unit::at(name.hash128(), at);
        let view = self.view.read();
        match copies {
            1 => view.owner(&unit).into_iter().collect(),
            _ => view.keepers(&unit, copies).collect(),
        }
    }

    /// Whether this node is to keep a copy of a byte of an object.
    pub(crate) fn keeps_copy(&self, name: &ObjectName, at: u64) -> bool {
        let copies = self.copies_of(name);
        let unit = Unit::at(name.hash128(), at);
        self.hot.has(&unit) || (copies > 1 && self.view.read().is_keeper(&unit, copies))
    }

    /// Those who keep this byte of an object, where there are to be several.
    pub(crate) fn keepers(&self, name: &ObjectName, at: u64) -> Vec<u64> {
        match self.copies_of(name) {
            1 => Vec::new(),
            copies => {
                let unit = Unit::at(name.hash128(), at);
                self.view.read().keepers(&unit, copies).collect()
            }
        }
    }

    /// Whether those who keep copies of a name may not know that it was written. Where nodes hold
    /// leases, they were told as all nodes are.
    pub(crate) fn may_be_old_at_keepers(&self, name: &ObjectName) -> bool {
        match self.telling().is_some() {
            true => self.is_in_doubt(name),
            false => self.is_overtaken(name),
        }
    }

    /// Whether some node may not know yet that this name was written.
    pub(crate) fn is_in_doubt(&self, name: &ObjectName) -> bool {
        let is_untold = self.has_untold.load(Relaxed) && self.untold.lock().contains_key(name);
        is_untold || self.is_doubtful(name)
    }

    /// Whether another node is asked to fetch a unit.
    pub(crate) fn is_elsewhere(&self, name: &ObjectName, at: u64) -> bool {
        let unit = Unit::at(name.hash128(), at);
        // Only the bucket is known to have what was written.
        let is_doubtful = unit.extent == 0 && self.is_in_doubt(name);
        let (view, peers) = (self.view.read(), self.peers.read());
        let is_up = |id| peers.get(&id).is_some_and(|peer| peer.is_quick());
        !is_doubtful && view.asks_to_fetch(&unit, is_up)
    }

    /// The node that is asked to fetch a byte of an object, if it takes many questions at once.
    pub(crate) fn gathers_at(&self, name: &ObjectName, at: u64) -> Option<u64> {
        if !self.is_elsewhere(name, at) {
            return None;
        }
        let route = self.route(name, at, false);
        match route.sources.first() {
            Some(Source::Peer(node, Ask::OwnerFill)) => {
                let peers = self.peers.read();
                peers.get(node).filter(|p| p.gathers()).map(|p| p.id)
            }
            _ => None,
        }
    }

    /// A member, and the epoch of the map that has it.
    pub(crate) fn peer(&self, node: u64) -> Option<(Arc<Peer>, u64)> {
        let peer = self.peers.read().get(&node).cloned()?;
        Some((peer, self.view.read().map().epoch))
    }

    pub(crate) fn hedges(&self) -> &Hedges {
        &self.hedges
    }

    pub(crate) async fn ask(
        &self,
        node: u64,
        name: &ObjectName,
        what: What,
    ) -> Result<Answer, Failure> {
        self.ask_and_hear(node, name, what, Heard::default()).await
    }

    pub(crate) async fn ask_and_hear(
        &self,
        node: u64,
        name: &ObjectName,
        what: What,
        heard: Heard,
    ) -> Result<Answer, Failure> {
        let peer = self.peers.read().get(&node).cloned();
        let Some(peer) = peer else {
            return Err(Failure::Silent(Error::origin_unavailable(format!(
                "node {node:016x} has left the cluster"
            ))));
        };
        let question = Question {
            epoch: self.view.read().map().epoch,
            bucket: name.bucket().to_owned(),
            key: name.key().to_owned(),
            what,
            request: request::current(),
            tags: true,
        };
        peer.ask_and_hear(&question, heard).await
    }

    /// A name is written: those who owned it before this node are not asked for its version. (Also
    /// if nobody did so far: the map by which somebody did may be on its way.)
    pub(crate) fn overtakes(&self, name: &ObjectName) {
        let changed = self.view.read().has_changed();
        let mut overtaken = self.overtaken.lock();
        overtaken.note(name.hash128(), self.began.elapsed(), changed);
    }

    /// While nobody is asked who owned something before, only what was written just now matters: a
    /// map by which somebody did may be on its way.
    fn forget_overtaken(&self) {
        if self.view.read().has_changed() {
            return;
        }
        let mut overtaken = self.overtaken.lock();
        overtaken.forget(self.began.elapsed());
    }

    /// Whether a name was written since others owned it, or one that owns it may not know it.
    pub(crate) fn is_overtaken(&self, name: &ObjectName) -> bool {
        let is_in_doubt = self.is_in_doubt(name);
        let (all, is_known) = {
            let overtaken = self.overtaken.lock();
            let is_known = overtaken.names.contains_key(&name.hash128());
            (overtaken.all, is_known)
        };
        let may_be = all.is_some_and(|at| {
            is_recent(at, self.began.elapsed()) || self.view.read().has_changed()
        });
        is_in_doubt || is_known || may_be
    }

    /// Tells the home of a name that it was written. If it does not answer, this node asks the
    /// bucket which version is current until the home knows.
    pub(crate) async fn written(&self, name: &ObjectName) {
        self.overtakes(name);
        self.note_recent(name);
        let homes = self.homes(name);
        if homes.is_empty() {
            return;
        }
        // Before they are told: they may fetch the old version until then.
        let write = self.writes.fetch_add(1, Relaxed);
        self.remember(name, write, homes.clone());
        let left = self.tell(name, homes).await;
        self.told(name, write, left);
    }

    /// A map that comes soon may have other homes, which must be told too.
    fn note_recent(&self, name: &ObjectName) {
        let mut recent = self.recent.lock();
        let now = self.began.elapsed();
        while recent.len() >= UNTOLD_MAX || recent.front().is_some_and(|(at, _)| now - *at > RECENT)
        {
            recent.pop_front();
        }
        recent.push_back((now, name.clone()));
    }

    /// The homes of what was written just now are told of it, where they are others by a new map.
    fn tell_new_homes(&self) {
        let now = self.began.elapsed();
        let recent: Vec<_> = {
            let recent = self.recent.lock();
            let recent = recent
                .iter()
                .filter(|(at, _)| now.saturating_sub(*at) <= RECENT);
            recent.map(|(_, name)| name.clone()).collect()
        };
        for name in recent {
            let homes = self.homes(&name);
            if !homes.is_empty() {
                self.remember(&name, self.writes.fetch_add(1, Relaxed), homes);
            }
        }
    }

    /// The nodes that tell which version of a name is current, without this one: the owner of its
    /// first unit, and who stands in for it.
    fn homes(&self, name: &ObjectName) -> Vec<u64> {
        let homes = self.view.read().owners(&Unit::at(name.hash128(), 0));
        homes.filter(|&home| home != self.me.node).collect()
    }

    fn remember(&self, name: &ObjectName, write: u64, homes: Vec<u64>) {
        let mut untold = self.untold.lock();
        if untold.len() >= UNTOLD_MAX && !untold.contains_key(name) {
            tracing::error!(object = %name, "too many writes could not be told to the nodes that \
                own their names: the old version of this one may be read for as long as the \
                bucket's freshness rule allows");
            return;
        }
        untold.insert(name.clone(), Untold { write, homes });
        self.has_untold.store(true, Relaxed);
    }

    /// Only these homes do not know of this write now; of a later one, none does.
    fn told(&self, name: &ObjectName, write: u64, left: Vec<u64>) {
        let mut untold = self.untold.lock();
        match untold.get_mut(name) {
            Some(known) if known.write == write && left.is_empty() => {
                untold.remove(name);
            }
            Some(known) if known.write == write => known.homes = left,
            _ => {}
        }
        self.has_untold.store(!untold.is_empty(), Relaxed);
    }

    /// Tells homes of a write; returns those that do not know of it now. Who is no member any more
    /// is told nothing.
    async fn tell(&self, name: &ObjectName, homes: Vec<u64>) -> Vec<u64> {
        let tell = async |home| {
            let is_told = !self.peers.read().contains_key(&home)
                || (self.answers(home) && self.ask(home, name, What::Written).await.is_ok());
            (!is_told).then_some(home)
        };
        let told = futures::future::join_all(homes.into_iter().map(tell)).await;
        told.into_iter().flatten().collect()
    }

    /// Nodes of this cluster hold leases that last so long: all of them are told of each write before
    /// it is acknowledged.
    pub fn hold_leases(&self, time: Duration, writes: Writes) {
        let telling = Telling::new(self.me.clone(), self.dial.clone(), time, writes);
        let _ = self.telling.set(Arc::new(telling));
    }

    pub(crate) fn telling(&self) -> Option<&Arc<Telling>> {
        self.telling.get()
    }

    fn is_doubtful(&self, name: &ObjectName) -> bool {
        self.telling().is_some_and(|t| t.is_doubtful(name))
    }

    /// Where the leases are.
    pub fn set_leases(&self, leases: Arc<dyn Leases>) {
        if let Some(telling) = self.telling() {
            telling.set_leases(leases);
        }
    }

    /// This node has a new lease, asked for at this [`boot_time`](crate::boot_time). The number of
    /// its term.
    pub fn lease_granted(&self, lease: i64, asked: Duration) -> u64 {
        self.telling().map_or(0, |t| t.granted(lease, asked))
    }

    /// The lease was renewed, as asked for at this [`boot_time`](crate::boot_time).
    pub fn lease_renewed(&self, lease: i64, asked: Duration) {
        if let Some(telling) = self.telling() {
            telling.renewed(lease, asked);
        }
    }

    /// The lease, if it is this one, has ended; whether it was.
    pub fn lease_ended(&self, lease: i64) -> bool {
        self.telling().is_some_and(|t| t.ended_if(lease))
    }

    /// This node's lease.
    pub fn lease(&self) -> Option<i64> {
        self.telling().and_then(|t| t.term().1)
    }

    /// The number of this node's term.
    pub fn term(&self) -> u64 {
        self.telling().map_or(0, |t| t.term().0)
    }

    /// To be noted before etcd is read.
    pub fn mark(&self) -> u64 {
        self.telling().map_or(0, |t| t.mark())
    }

    /// Who etcd has, as of a moment after the mark was noted.
    pub fn looked(&self, mark: u64, nodes: &[Term], ended: &[Term]) {
        if let Some(telling) = self.telling() {
            telling.looked(mark, nodes, ended);
        }
    }

    /// Ceases to rely on the lease, and tells others so. The lease, to be revoked.
    pub async fn leave(&self) -> Option<i64> {
        self.telling()?.leave().await
    }

    /// How reads after writes stand; `None` where nodes hold no leases.
    pub fn coherence(&self) -> Option<Coherence> {
        self.telling().map(|t| t.coherence())
    }

    async fn tend_terms(&self) {
        match self.telling() {
            Some(telling) => telling.tend().await,
            None => std::future::pending().await,
        }
    }

    /// Tries peers that do not answer, tells homes of the writes that they were not told of, and
    /// forgets former owners and hot units whose time is over, for as long as it is polled.
    pub async fn tend(&self) {
        futures::join!(self.probe_silent(), self.tell_again(), self.tend_terms());
    }

    pub(crate) fn copied(&self) -> &Copied {
        &self.copied
    }

    /// What is kept has another standing than before.
    pub(crate) fn has_changed_standing(&self) {
        self.changes.fetch_add(1, Relaxed);
    }

    pub(crate) fn moved(&self) -> &Moved {
        &self.moved
    }

    /// The view at this moment, to be looked at for long.
    pub(crate) fn view(&self) -> View {
        self.view.read().clone()
    }

    /// Changes what the view knows of hand-overs.
    pub(crate) fn change_view(&self, change: impl FnOnce(&mut View)) {
        let _changing = self.changing.lock();
        change(&mut self.view.write());
        self.changes.fetch_add(1, Relaxed);
    }

    /// On the clock of the view.
    pub(crate) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.view.read().map().epoch
    }

    pub(crate) fn dial(&self) -> &dyn Dial {
        &*self.dial
    }

    pub(crate) fn address_of(&self, node: u64) -> Option<String> {
        let peers = self.peers.read();
        peers.get(&node).map(|peer| peer.address.clone())
    }

    /// Whether a member gives its share to others.
    pub(crate) fn drains(&self, node: u64) -> bool {
        let view = self.view.read();
        let member = view.map().members.iter().find(|m| m.id == node);
        member.is_some_and(|m| m.state == MemberState::Draining)
    }

    async fn probe_silent(&self) {
        loop {
            tokio::time::sleep(self.timing.probe).await;
            let now = self.now();
            if self.view.read().is_due(now) {
                self.change_view(|view| view.expire(now));
            }
            if self.hot.cool(now) {
                self.has_changed_standing();
            }
            let all: Vec<_> = self.peers.read().values().cloned().collect();
            hedge::compare(&all, self.timing.late, &self.hedges.1);
            let silent = all.iter().filter(|peer| !peer.answers());
            futures::future::join_all(silent.map(|peer| peer.probe())).await;
        }
    }

    async fn tell_again(&self) {
        loop {
            tokio::time::sleep(self.timing.probe).await;
            if !self.has_untold.load(Relaxed) {
                continue;
            }
            let untold: Vec<_> = {
                let untold = self.untold.lock();
                let all = untold.iter();
                all.map(|(n, u)| (n.clone(), u.write, u.homes.clone()))
                    .collect()
            };
            for (name, write, homes) in untold {
                let left = self.tell(&name, homes).await;
                self.told(&name, write, left);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_just_now_is_not_forgotten_to_make_room() {
        let (at, many) = (Duration::from_secs, UNTOLD_MAX as u128);
        let mut overtaken = Overtaken::default();
        for name in 1..many {
            overtaken.note(name, at(1), false);
        }
        // The last one that there is room for, and one more.
        for name in [many, many + 1] {
            overtaken.note(name, at(100), false);
        }
        let known = |o: &Overtaken, name: u128| o.names.contains_key(&name);
        assert!(known(&overtaken, many) && known(&overtaken, many + 1));
        assert!(!known(&overtaken, 1) && overtaken.all.is_none());
        // Too many of just now: all count, as long as one of them would.
        for name in 1..many {
            overtaken.note(name, at(110), false);
        }
        assert_eq!(overtaken.all, Some(at(110)));
        assert!(overtaken.names.len() <= UNTOLD_MAX);
        overtaken.note(many + 2, at(150), false);
        overtaken.forget(at(170));
        assert!(overtaken.all.is_some());
        overtaken.forget(at(171));
        assert!(overtaken.all.is_none() && known(&overtaken, many + 2));
        // If nearly all are of just now, each write would look at all of them.
        let mut overtaken = Overtaken::default();
        for name in 0..many {
            let is_old = name < 100;
            overtaken.note(name, at(if is_old { 1 } else { 100 }), false);
        }
        overtaken.note(many, at(101), false);
        assert_eq!((overtaken.names.len(), overtaken.all), (1, Some(at(101))));
        // While others are asked about what they owned before, nothing is old enough.
        let mut overtaken = Overtaken::default();
        for name in 0..many {
            overtaken.note(name, at(1), true);
        }
        overtaken.note(many, at(100), true);
        assert_eq!(overtaken.all, Some(at(100)));
        assert!(known(&overtaken, many));
    }
}
