//! Keeps a node a member of its cluster, and its map the newest that there is.
//!
//! Invariant: nothing here is needed to read. If etcd or DNS is away, the node goes on with the map
//! that it has, and nobody is forgotten meanwhile.

use crate::{
    Source,
    etcd::{Before, Etcd, EtcdAccess, Found, Registration, now_secs},
};
use forebay_cluster::{Map, Member, Membership, Order, Placed, Run, Term};
use forebay_core::{Error, ErrorKind, Result, sync::Mutex, threads};
use forebay_peer::{Cluster, Leases, Writes, addresses_of, boot_time};
use futures::StreamExt;
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};

/// A node that etcd hears nothing of for so long is not there.
const LEASE: Duration = Duration::from_secs(10);
const RENEW_EVERY: Duration = Duration::from_millis(2500);
/// What lies in etcd is read again after so long, though no change was told.
const READ_EVERY: Duration = Duration::from_secs(15);
/// Between two looks at etcd.
const PAUSE: Duration = Duration::from_millis(100);
/// Within this time nodes that were too late propose again.
const SPREAD: Duration = Duration::from_millis(300);
/// How long after a failure etcd is asked again.
const RETRY: Duration = Duration::from_secs(1);
/// How often a name is resolved.
const RESOLVE_EVERY: Duration = Duration::from_secs(2);
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(3);
/// Nodes at the addresses of a name are greeted again after so long: one that nobody asked may be
/// gone, or have started again with other settings.
const GREET_EVERY: Duration = Duration::from_secs(15);
/// The most addresses of one name.
const ADDRESSES_MAX: usize = 4096;
/// So many new addresses are tried at a time.
const GREETINGS: usize = 32;
/// How long a node that starts tries to become a member.
const JOIN_TIMEOUT: Duration = Duration::from_secs(15);
/// So often a proposal is made again if others were faster.
const PROPOSALS: usize = 20;

/// What a node joins with.
#[derive(Clone, Debug)]
pub struct Joining {
    /// Where the map is.
    pub source: Source,
    /// How etcd is spoken to.
    pub access: EtcdAccess,
    /// Members that are away for so long are taken out of the map.
    pub forget_after: Duration,
    /// Whether to start without the others if etcd does not answer.
    pub alone: bool,
    /// What this node says of itself.
    pub registration: Registration,
}

impl Joining {
    /// Makes a cluster hold leases, if its source has any: before anybody reads through it.
    pub fn hold_leases(&self, cluster: &Cluster, writes: Writes) {
        if let Source::Etcd { .. } = self.source {
            cluster.hold_leases(LEASE, writes);
        }
    }
}

/// Where the map lives.
enum Home {
    Etcd(Arc<Etcd>),
    Dns { host: String, port: u16 },
}

/// A node's membership.
pub struct Driver {
    cluster: Arc<Cluster>,
    home: Home,
    source: Source,
    mine: Registration,
    membership: Mutex<Membership>,
    /// When the marks of ended terms were first seen without their nodes.
    ended: Mutex<Marks>,
    seen: Mutex<Seen>,
    began: Instant,
    /// Somebody changed the map here.
    again: Notify,
    /// This node is going: it does not register again.
    left: AtomicBool,
}

#[derive(Default)]
struct Seen {
    /// The registrations in etcd, or who answered at the addresses of the name.
    nodes: Vec<Registration>,
    looked: Option<Instant>,
    error: Option<String>,
    etcd: u64,
    /// Addresses at which this node answers itself.
    own: HashSet<String>,
    /// When all addresses of the name were last greeted.
    greeted: Option<Instant>,
}

/// How a node's membership stands.
#[derive(Clone, Debug)]
pub struct Report {
    /// Where the map comes from.
    pub source: String,
    /// When that was last looked at with success.
    pub looked: Option<Duration>,
    /// Why it cannot be looked at now, or what is wrong there.
    pub error: Option<String>,
    /// How long this node's lease lasts without being renewed; `None` where there are none, or it
    /// has none now.
    pub lease: Option<Duration>,
    /// Who is there.
    pub nodes: Vec<Registration>,
    /// For how long members have been away.
    pub away: HashMap<u64, Duration>,
}

/// The map of a node that knows of no others yet.
///
/// # Errors
/// As [`Membership::new`]; `Invalid` for a source that has no maps to join.
pub fn alone(joining: &Joining) -> Result<Map> {
    membership(joining)?.alone()
}

fn membership(joining: &Joining) -> Result<Membership> {
    let name = joining.source.cluster().ok_or_else(|| {
        Error::internal(format!("{} is a file, which nobody joins", joining.source))
    })?;
    let member = joining.registration.member.clone();
    Membership::new(name, member, joining.forget_after)
}

impl Driver {
    /// Makes this node a member: it is in the map when this returns, and the cluster goes by that
    /// map.
    ///
    /// # Errors
    /// `Invalid` for settings that cannot work; `Conflict` if another node has its identity; what
    /// etcd said, if it does not answer and the node may not start alone.
    pub async fn join(joining: Joining, cluster: Arc<Cluster>) -> Result<Arc<Driver>> {
        let home = match &joining.source {
            Source::Etcd {
                endpoints,
                tls,
                name,
            } => {
                let etcd = Etcd::new(endpoints, *tls, name, &joining.access)?;
                let etcd = Arc::new(etcd);
                cluster.set_leases(etcd.clone());
                Home::Etcd(etcd)
            }
            Source::Dns { host, port } => Home::Dns {
                host: host.clone(),
                port: *port,
            },
            Source::File(_) => return Err(membership(&joining).err().unwrap_or_else(no_member)),
        };
        let driver = Arc::new(Driver {
            membership: Mutex::new(membership(&joining)?),
            cluster,
            home,
            source: joining.source,
            mine: joining.registration,
            ended: Mutex::default(),
            seen: Mutex::default(),
            began: Instant::now(),
            again: Notify::new(),
            left: AtomicBool::new(false),
        });
        let began = Instant::now();
        loop {
            let e = match driver.round().await {
                Ok(_) => return Ok(driver),
                Err(e) => e,
            };
            driver.failed(&e);
            let is_final = !e.kind().is_transient();
            match driver.home {
                // The first node of a service may start before its name has any address.
                Home::Dns { .. } if !is_final => return Ok(driver),
                Home::Etcd(_) if !is_final && began.elapsed() < JOIN_TIMEOUT => {
                    if joining.alone && e.kind() != ErrorKind::Busy {
                        tracing::warn!(source = %driver.source, error = %e.describe(),
                            "this node starts alone, and joins its cluster when it can");
                        return Ok(driver);
                    }
                    sleep(RETRY).await;
                }
                _ => {
                    driver.leave().await;
                    let e = e.context(format!("joining the cluster at {}", driver.source));
                    return Err(match is_final {
                        true => e,
                        false => e.hint("start etcd, or let the node start alone (cluster.alone)"),
                    });
                }
            }
        }
    }

    /// Renews the lease, and follows the map, for as long as it is polled.
    pub async fn run(self: &Arc<Self>) {
        // In a task of its own: following a map takes long at times.
        let driver = self.clone();
        let renewing = AbortOnDrop(tokio::spawn(async move { driver.renew().await }));
        self.follow().await;
        drop(renewing);
    }

    /// Says that this node is going. From now on it only follows the map.
    pub async fn leave(&self) {
        self.left.store(true, SeqCst);
        self.end_lease().await;
    }

    async fn end_lease(&self) {
        let lease = self.cluster.leave().await;
        if let (Home::Etcd(etcd), Some(lease)) = (&self.home, lease)
            && let Err(e) = etcd.revoke(lease).await
        {
            tracing::debug!(error = %e, "the lease in etcd was not ended, and ends by itself");
        }
    }

    /// Changes the map as an operator orders; returns the map afterwards.
    ///
    /// # Errors
    /// As [`Membership::ordered`]; `Unsupported` where the map has no home that could be changed;
    /// if etcd does not answer.
    pub async fn order(self: &Arc<Self>, order: Order) -> Result<Map> {
        let Home::Etcd(etcd) = &self.home else {
            return Err(Error::unsupported(format!(
                "a cluster that finds its nodes by {} cannot be ordered: its map is nowhere",
                self.source
            ))
            .hint("scale the service instead, or keep the map in etcd"));
        };
        for _ in 0..PROPOSALS {
            let found = etcd.read().await?;
            let Some((json, _)) = &found.map else {
                return Err(Error::not_found(format!(
                    "no node has put a map at {} yet",
                    self.source
                )));
            };
            let present = found.present.clone();
            let json = json.clone();
            let next = blocking(move || {
                let (map, _) = Map::parse(&json)?;
                Ok((Membership::ordered(&map, order, &present)?, map))
            });
            let (next, is) = next.await?;
            let Some(next) = next else {
                return Ok(is);
            };
            if etcd.put_map(&next, &found, Some(&is)).await? {
                tracing::info!(
                    ?order,
                    epoch = next.epoch,
                    "the map was changed by an operator"
                );
                self.again.notify_one();
                return Ok(next);
            }
        }
        Err(Error::busy("others change the map all the time").hint("try again"))
    }

    /// How the membership stands.
    pub fn report(&self) -> Report {
        let now = self.began.elapsed();
        let away = self.membership.lock().away().clone();
        let away = away.iter();
        let seen = self.seen.lock();
        Report {
            source: self.source.to_string(),
            looked: seen.looked.map(|at| at.elapsed()),
            error: seen.error.clone(),
            lease: self.cluster.coherence().and_then(|c| c.lease),
            nodes: seen.nodes.clone(),
            away: away
                .map(|(id, since)| (*id, now.saturating_sub(*since)))
                .collect(),
        }
    }

    fn failed(&self, e: &Error) {
        self.membership.lock().cannot_see();
        let said = e.describe();
        let before = self.seen.lock().error.replace(said.clone());
        if before.as_ref() != Some(&said) {
            tracing::warn!(source = %self.source, error = %said,
                "the map of the cluster cannot be looked at; the newest one stays in force");
        }
    }

    fn succeeded(&self, nodes: Vec<Registration>) {
        let mut seen = self.seen.lock();
        if seen.error.take().is_some() {
            tracing::info!(source = %self.source, "the map of the cluster can be looked at again");
        }
        seen.looked = Some(Instant::now());
        seen.nodes = nodes;
    }

    async fn follow(self: &Arc<Self>) {
        loop {
            let pause = match self.round().await {
                Ok(revision) => match &self.home {
                    Home::Etcd(etcd) => {
                        let change = timeout(READ_EVERY, etcd.changed(revision));
                        tokio::select! {
                            change = change => match change {
                                Ok(Err(_)) => RETRY,
                                _ => Duration::ZERO,
                            },
                            () = self.again.notified() => Duration::ZERO,
                        }
                    }
                    Home::Dns { .. } => RESOLVE_EVERY,
                },
                Err(e) => {
                    self.failed(&e);
                    RETRY
                }
            };
            // Many nodes are woken by one change.
            sleep(pause.max(PAUSE + jitter(PAUSE))).await;
        }
    }

    async fn renew(&self) {
        let Home::Etcd(etcd) = &self.home else {
            return std::future::pending().await;
        };
        loop {
            sleep(RENEW_EVERY).await;
            let Some(lease) = self.cluster.lease() else {
                continue;
            };
            let asked = boot_time();
            match etcd.renew(lease).await {
                Ok(true) => self.cluster.lease_renewed(lease, asked),
                Ok(false) => {
                    if self.cluster.lease_ended(lease) {
                        tracing::warn!("the lease in etcd has ended: this node registers again");
                        self.again.notify_one();
                    }
                }
                Err(e) => {
                    tracing::debug!(error = %e, "the lease in etcd was not renewed");
                }
            }
        }
    }

    /// Looks at what there is, takes the map over and corrects it; returns the revision that it
    /// looked at.
    async fn round(self: &Arc<Self>) -> Result<i64> {
        match &self.home {
            Home::Etcd(etcd) => self.etcd_round(etcd).await,
            Home::Dns { host, port } => self.dns_round(host, *port).await.map(|()| 0),
        }
    }

    async fn etcd_round(self: &Arc<Self>, etcd: &Etcd) -> Result<i64> {
        for _ in 0..PROPOSALS {
            let mark = self.cluster.mark();
            let found = etcd.read().await?;
            self.is_same_etcd(found.etcd);
            self.cluster.looked(mark, &terms(&found), &found.ended);
            if self.left.load(SeqCst) {
                if let Some((json, _)) = &found.map {
                    self.take_over(json.clone(), found.before.clone()).await?;
                }
                self.succeeded(found.nodes);
                return Ok(found.revision);
            }
            self.forget_ended(etcd, &found).await;
            let is_there = self.be_there(etcd, &found).await?;
            let map = match &found.map {
                None => None,
                Some((json, _)) => Some(self.take_over(json.clone(), found.before.clone()).await?),
            };
            if !is_there {
                // Who is there is looked at again, with this node among them.
                continue;
            }
            let mut present: HashMap<u64, Option<Member>> =
                found.present.iter().map(|id| (*id, None)).collect();
            for node in &found.nodes {
                present.insert(node.member.id, Some(node.member.clone()));
            }
            let (driver, mine) = (self.clone(), self.cluster.map());
            let before = map.clone();
            let proposal = blocking(move || {
                let now = driver.began.elapsed();
                let mut membership = driver.membership.lock();
                membership.propose(map.as_ref(), &mine, &present, now)
            });
            let is_right = match proposal.await? {
                None => true,
                Some(next) => {
                    if etcd.put_map(&next, &found, before.as_ref()).await? {
                        tracing::info!(
                            epoch = next.epoch,
                            members = next.members.len(),
                            "this node changed the map of the cluster"
                        );
                    } else {
                        // Others were faster: not all of them at once again.
                        sleep(jitter(SPREAD)).await;
                    }
                    false
                }
            };
            if is_right {
                self.succeeded(found.nodes);
                return Ok(found.revision);
            }
        }
        Err(Error::busy(format!(
            "others change the map at {} all the time",
            self.source
        )))
    }

    fn is_same_etcd(&self, etcd: u64) {
        let before = std::mem::replace(&mut self.seen.lock().etcd, etcd);
        if before != 0 && before != etcd {
            tracing::warn!(source = %self.source, before = format_args!("{before:016x}"),
                now = format_args!("{etcd:016x}"), "this is another etcd than before: the map and \
                this node are put there if they are missing");
        }
    }

    /// Registers this node, if it is not; whether it was there already.
    async fn be_there(&self, etcd: &Etcd, found: &Found) -> Result<bool> {
        let me = self.mine.member.id;
        let there = found.nodes.iter().find(|n| n.member.id == me);
        match there {
            Some(there)
                if there.boot == self.mine.boot
                    && self.cluster.lease().is_some()
                    && there.term == self.cluster.term() =>
            {
                return Ok(true);
            }
            Some(there) if there.boot != self.mine.boot => {
                self.is_gone(there).await?;
                // It may be stopped: it believes in its lease for a while.
                let lease = found.leases.get(&me).copied().unwrap_or_default();
                etcd.end(&term_of(there, lease)).await?;
            }
            _ => {}
        }
        let asked = boot_time();
        let lease = etcd.grant(LEASE).await?;
        // Kept first: if this is left now, the next round finds that it is not registered.
        let mine = Registration {
            term: self.cluster.lease_granted(lease, asked),
            ..self.mine.clone()
        };
        let registered = etcd.register(&mine, lease).await;
        if self.left.load(SeqCst) {
            // It left before it had this lease.
            self.end_lease().await;
        }
        registered.map(|()| false)
    }

    /// Removes marks of terms whose nodes are gone for longer than anybody believes in a lease.
    async fn forget_ended(&self, etcd: &Etcd, found: &Found) {
        let past = {
            let mut seen = self.ended.lock();
            past(&mut seen, &found.ended, &terms(found), Instant::now())
        };
        for run in past {
            let Some(revision) = found.marks.get(&run) else {
                continue;
            };
            if let Err(e) = etcd.forget_ended(run, *revision).await {
                tracing::debug!(error = %e, "the mark of an ended lease was not removed");
            }
        }
    }

    /// Whether the node that is registered with this one's identity is an earlier start of it.
    async fn is_gone(&self, there: &Registration) -> Result<()> {
        let address = &there.member.address;
        match self.cluster.greet(address).await {
            Ok(theirs) if theirs.node == self.mine.member.id && theirs.boot != self.mine.boot => {
                Err(Error::new(
                    ErrorKind::Conflict,
                    format!(
                        "another node with this identity ({}) runs at {address}",
                        self.mine.member.label()
                    ),
                )
                .hint(
                    "a cache directory was copied, or two nodes have the same cluster.node: stop \
                     one of them, and empty its cache directories or rename it",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Takes over the map, and those between the one in force and it.
    async fn take_over(&self, json: Vec<u8>, before: Vec<Before>) -> Result<Map> {
        let mine = self.cluster.map();
        let text = json.clone();
        let is_known = serde_json::from_slice::<Map>(&text).is_ok_and(|map| map == mine);
        if is_known {
            return Ok(mine);
        }
        let (epoch, now, known) = (mine.epoch, now_secs(), self.cluster.placed());
        let (placed, before) = blocking(move || {
            let placed = known.then_parsed(&json)?;
            let newest = placed.map();
            let is_before = |b: &Before| {
                (epoch + 1..newest.epoch).contains(&b.map.epoch)
                    && b.map.cluster == newest.cluster
                    && b.map.seed == newest.seed
            };
            let before = before.into_iter().filter(is_before);
            // A map that cannot be read here tells nothing of who owned what.
            let before = before.filter_map(|b| {
                let placed = known.then_parsed(&b.map.json()).ok()?;
                Some((
                    placed,
                    Duration::from_secs(now.saturating_sub(b.until_secs)),
                ))
            });
            let before: Vec<_> = before.collect();
            Ok((placed, before))
        })
        .await?;
        let map = placed.map().clone();
        // Of two maps of one epoch neither stays (`Membership::propose`).
        if map.epoch > mine.epoch {
            // How long ago a map was replaced is how long the next one has been the newest. Of the
            // one before the first nothing is known.
            let mut age = Duration::ZERO;
            for (placed, replaced) in before {
                self.advance(placed, age)?;
                age = replaced;
            }
            self.advance(placed, age)?;
        }
        Ok(map)
    }

    fn advance(&self, placed: Placed, age: Duration) -> Result<()> {
        let placed = Arc::new(placed);
        let change = self.cluster.advance(placed.clone(), age)?;
        let map = placed.map();
        tracing::info!(
            cluster = map.cluster,
            epoch = map.epoch,
            members = map.members.len(),
            gained = change.gained.len(),
            lost = change.lost.len(),
            "the cluster has a new map"
        );
        Ok(())
    }

    async fn dns_round(self: &Arc<Self>, host: &str, port: u16) -> Result<()> {
        let unresolved = |what: String| {
            Error::origin_unavailable(format!("{host} cannot be resolved: {what}"))
                .hint("is it the name of a service without a cluster IP (headless)?")
        };
        let name = format!("{host}:{port}");
        let found = match timeout(RESOLVE_TIMEOUT, addresses_of(&name)).await {
            Err(_) => return Err(unresolved(format!("no answer within {RESOLVE_TIMEOUT:?}"))),
            Ok(found) => found.map_err(|e| unresolved(e.to_string()))?,
        };
        let addresses: BTreeSet<String> = found
            .iter()
            .take(ADDRESSES_MAX + 1)
            .map(|a| a.to_string())
            .collect();
        if addresses.is_empty() || addresses.len() > ADDRESSES_MAX {
            return Err(unresolved(format!(
                "it has {} addresses (1 to {ADDRESSES_MAX} make a cluster)",
                addresses.len()
            )));
        }
        let present = self.who_is_at(&addresses).await?;
        let is_here = |address: &String| self.seen.lock().own.contains(address);
        if present.is_empty() && !addresses.iter().any(is_here) {
            // What leads to nobody says nothing of who is away.
            return Err(Error::origin_unavailable(format!(
                "{host} leads to no node of this cluster (at {} addresses, as {})",
                addresses.len(),
                addresses.first().map_or("none", String::as_str)
            ))
            .hint(
                "it must have the addresses at which nodes reach each other, with the port of \
                 listen.peer",
            ));
        }
        loop {
            let (driver, known) = (self.clone(), self.cluster.placed());
            let members: Vec<Member> = present.iter().map(|n| n.member.clone()).collect();
            let next = blocking(move || {
                let now = driver.began.elapsed();
                let next = driver
                    .membership
                    .lock()
                    .follow(known.map(), &members, now)?;
                Ok(next.map(|map| known.then(map)))
            });
            match next.await? {
                Some(placed) => self.advance(placed, Duration::ZERO)?,
                None => break,
            }
        }
        self.succeeded(present);
        Ok(())
    }

    /// The nodes at these addresses. Those that are known and answer are not greeted each time.
    async fn who_is_at(&self, addresses: &BTreeSet<String>) -> Result<Vec<Registration>> {
        let mut present = Vec::new();
        let mut unknown = Vec::new();
        {
            let mut seen = self.seen.lock();
            let is_due = seen.greeted.is_none_or(|at| at.elapsed() >= GREET_EVERY);
            if is_due {
                seen.greeted = Some(Instant::now());
            }
            let known: HashMap<&str, &Registration> = seen
                .nodes
                .iter()
                .filter(|_| !is_due)
                .map(|n| (n.member.address.as_str(), n))
                .collect();
            for address in addresses {
                match known.get(address.as_str()) {
                    Some(node) if self.cluster.answers(node.member.id) => {
                        present.push((*node).clone());
                    }
                    _ if seen.own.contains(address) => {}
                    _ => unknown.push(address.clone()),
                }
            }
        }
        let greeted = futures::stream::iter(unknown)
            .map(async |address| (self.cluster.greet(&address).await, address))
            .buffer_unordered(GREETINGS);
        let mut greeted = std::pin::pin!(greeted);
        while let Some((greeting, address)) = greeted.next().await {
            let theirs = match greeting {
                Ok(theirs) => theirs,
                Err(e) => {
                    tracing::debug!(error = %e, "an address of the cluster's name is no node");
                    continue;
                }
            };
            if theirs.node == self.mine.member.id {
                if theirs.boot != self.mine.boot {
                    tracing::error!(%address, "another node has this one's identity: a cache \
                        directory was copied, or two nodes have the same cluster.node");
                    continue;
                }
                self.seen.lock().own.insert(address);
                continue;
            }
            let Some(member) = theirs.member else {
                tracing::debug!(%address, "a node does not say what its weight is");
                continue;
            };
            present.push(Registration {
                boot: theirs.boot,
                version: String::new(),
                started_secs: 0,
                term: 0,
                member: Member {
                    id: theirs.node,
                    address,
                    ..member
                },
            });
        }
        Ok(present)
    }
}

/// A task that ends with what began it.
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// When marks were first seen without their nodes: by the run and the number of the term.
type Marks = HashMap<(Run, u64), Instant>;

/// The runs whose marks are not needed any more: those of terms that nobody can believe in by now.
/// A run has one mark, which that of its next term replaces.
fn past(seen: &mut Marks, ended: &[Term], nodes: &[Term], now: Instant) -> Vec<Run> {
    let of = |term: &Term| (term.run, term.number);
    seen.retain(|mark, _| ended.iter().any(|e| of(e) == *mark));
    let is_there = |ended: &Term| {
        let same = |t: &Term| t.run == ended.run && t.number <= ended.number;
        nodes.iter().any(same)
    };
    let gone = ended.iter().filter(|ended| !is_there(ended));
    let past = gone.filter(|ended| {
        let since = *seen.entry(of(ended)).or_insert(now);
        now.saturating_duration_since(since) > 2 * LEASE
    });
    past.map(|ended| ended.run).collect()
}

/// The terms of the nodes that are there.
fn terms(found: &Found) -> Vec<Term> {
    let lease = |id| found.leases.get(&id).copied().unwrap_or_default();
    let known = found.nodes.iter();
    let known = known.map(|node| term_of(node, lease(node.member.id)));
    // What is there, and cannot be read, is told nothing.
    let is_known = |id| found.nodes.iter().any(|node| node.member.id == id);
    let unknown = found.present.iter().filter(|id| !is_known(**id));
    let unknown = unknown.map(|id| Term {
        run: Run { node: *id, boot: 0 },
        number: 0,
        lease: lease(*id),
        address: String::new(),
    });
    known.chain(unknown).collect()
}

fn term_of(node: &Registration, lease: i64) -> Term {
    Term {
        run: Run {
            node: node.member.id,
            boot: node.boot,
        },
        number: node.term,
        lease,
        address: node.member.address.clone(),
    }
}

/// A part of a time, another one each time.
fn jitter(of: Duration) -> Duration {
    let any = RandomState::new().hash_one(0);
    of.mul_f64(any as f64 / u64::MAX as f64)
}

fn no_member() -> Error {
    Error::internal("a file is no place to join a cluster")
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = threads::blocking(work).await;
    done.map_err(|e| e.context("computing a map"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_of_a_term_is_kept_as_long_as_somebody_may_believe_in_it() {
        let run = Run { node: 1, boot: 2 };
        let term = |number: u64| Term {
            run,
            number,
            lease: number as i64,
            address: String::new(),
        };
        let (mut seen, began) = (Marks::new(), Instant::now());
        let mut look = |ended: &[Term], nodes: &[Term], secs| {
            past(&mut seen, ended, nodes, began + Duration::from_secs(secs))
        };
        let none = Vec::<Run>::new();
        // It was marked, and its key is still there.
        assert_eq!(look(&[term(1)], &[term(1)], 0), none);
        assert_eq!(look(&[term(1)], &[], 5), none);
        // It is there again in its next term, which is ended too: that is another mark.
        assert_eq!(look(&[term(1)], &[term(2)], 20), none);
        assert_eq!(look(&[term(2)], &[], 26), none);
        assert_eq!(look(&[term(2)], &[], 45), none);
        assert_eq!(look(&[term(2)], &[], 47), [run]);
        assert_eq!(look(&[], &[], 50), none);
        assert!(seen.is_empty());
    }
}
