//! What an operator wants of a whole cluster, asked at one node.
//!
//! The node that is asked ([`Everywhere`]) lists the objects and gives each node its orders, small
//! enough that an answer takes seconds; the others ([`Orders`]) do their own part. Nothing is
//! remembered between two orders, except of pins: who asks again has done what is still missing, and if
//! the asking client leaves, no more orders are given.
//!
//! Pins stay in force as nodes come and go. What was pinned and unpinned is noted by all nodes
//! (`pins.rs`): the node that is asked notes it first, and tells the others; who was not told asks for
//! it. [`tend_pins`] has each node pin what it owns by the map of that moment, and end the pins of what
//! it owns no more once the owners have what it has.
//!
//! Invariant: an object counts as done if every node has done its part of it, by one version. A node
//! that does not answer, or goes by another map, leaves it undone, and the report says so.

use crate::{
    app::App,
    config::Action,
    figures::{self, Told},
    listener::Stop,
    openings::{Opening, PATIENCE, PIECE_BYTES},
    pins::{Page, Register, Said},
    v1::Call,
};
use async_trait::async_trait;
use bytes::Bytes;
use forebay_cluster::{COPIES_MAX, EXTENT_BYTES, MemberState, Placed};
use forebay_core::{
    Error, ErrorKind, ObjectName, Result, VersionId, limits::CHUNK_BYTES, sync::Mutex,
};
use forebay_dataset::{DatasetSpec, Watched};
use forebay_engine::{CacheChange, Holding, ReadOptions, WarmOutcome, WarmPart};
use forebay_peer::{Cluster, Operator};
use forebay_protocol::cache::{CacheAction, NodeWork};
use futures::{StreamExt, stream};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::time::timeout;

/// So much is brought by one order: an answer must come within a minute.
const WARM_MOST_BYTES: u64 = 64 << 20;
const WARM_MOST_TIME: Duration = Duration::from_secs(10);
/// The names in one order, as JSON. A question is at most 64 KiB.
const NAMES_MAX_BYTES: usize = 40 << 10;
/// Nodes that are given an order at the same time.
const NODES_AT_ONCE: usize = 16;
/// Pinned objects that are brought to those who are to keep them, or looked up, at the same time.
const OBJECTS_AT_ONCE: usize = 8;
/// What was said of a name takes so much of an order besides the name.
const SAID_JSON_BYTES: usize = 80;
/// Names of what was said, and of pins, in one answer.
const PAGE_BYTES: usize = 1 << 20;
/// Pins that are looked at together.
const PINS_AT_ONCE: usize = 500;
/// After the map has changed, before pins follow it: changes come together.
const SETTLE: Duration = Duration::from_secs(3);
/// Before it is looked again whether owners have what this node has pinned for them; each time twice
/// as long, up to [`PINS_AGAIN_LAST`].
const LET_GO_AGAIN: Duration = Duration::from_secs(5);
/// After a failure, before pins are tried again; each time twice as long.
const PINS_AGAIN: Duration = Duration::from_secs(30);
const PINS_AGAIN_LAST: Duration = Duration::from_secs(960);

/// Instead of a reason that the caller may not know.
const UNTOLD: &str = "the log of the node that was asked says why, by the id of the request";

/// What one node is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    /// Say how it is doing.
    Figures,
    /// Bring what it owns of an object, from a byte on.
    Warm {
        bucket: String,
        key: String,
        from: u64,
        dry_run: bool,
        /// For so many nodes, of which it may be one. Earlier releases know only owners.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        copies: u8,
    },
    /// Open a dataset for the node that asks.
    OpenDataset { spec: Box<DatasetSpec> },
    /// Send the index of a dataset from this byte on.
    DatasetPiece { id: String, from: u64 },
    /// Change what is kept of these objects (bucket, key).
    Change {
        action: CacheAction,
        names: Vec<(String, String)>,
        dry_run: bool,
        /// For a pin: so many nodes keep each.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        copies: u8,
        /// Of each name, what is to be noted. Earlier releases do not know it.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        said: Vec<Said>,
    },
    /// Note what was said (bucket, key).
    NotePins { said: Vec<(String, String, Said)> },
    /// Say what was said since.
    PinsSaid { since: u64 },
    /// Say what is pinned there, after this name.
    Pinned { after: Option<(String, String)> },
    /// Say of each whether it is kept there, pinned.
    Keeps { held: Vec<Held> },
}

/// What a node has of an object that others are to keep.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Held {
    bucket: String,
    key: String,
    version: u64,
    validated_at_secs: u32,
    size: u64,
    /// From this chunk to before that one.
    chunks: Vec<(u32, u32)>,
}

impl Held {
    /// Of an object of which no bytes are held: all that its keepers have to keep is the pin.
    fn nothing(name: &ObjectName) -> Self {
        Self {
            bucket: name.bucket().to_owned(),
            key: name.key().to_owned(),
            version: 0,
            validated_at_secs: 0,
            size: 0,
            chunks: Vec::new(),
        }
    }
}

/// The answer to [`Order::Pinned`].
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct PinnedPage {
    /// Each with the number of nodes that are to keep it.
    pinned: Vec<(String, String, u8)>,
    more: bool,
}

fn one() -> u8 {
    1
}

fn is_one(n: &u8) -> bool {
    *n == 1
}

/// The answer to [`Order::Warm`].
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Warmed {
    size: u64,
    version: u64,
    brought: u64,
    there: u64,
    next: Option<u64>,
}

/// The answer to [`Order::Change`], for each name.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Changed {
    Done(u64),
    Failed(String),
}

/// What the engine calls an action; `copies`: so many nodes are to keep what is pinned.
pub fn change_of(action: CacheAction, copies: u8) -> CacheChange {
    match action {
        CacheAction::Pin if copies > 1 => CacheChange::PinOn(copies),
        CacheAction::Pin => CacheChange::Pin,
        CacheAction::Unpin => CacheChange::Unpin,
        CacheAction::Evict => CacheChange::Evict,
    }
}

/// Does what other nodes order.
pub struct Orders {
    app: Arc<App>,
}

impl Orders {
    pub fn new(app: Arc<App>) -> Self {
        Orders { app }
    }

    async fn warm(
        &self,
        name: &ObjectName,
        from: u64,
        dry_run: bool,
        copies: u8,
    ) -> Result<Warmed> {
        let cluster = cluster(&self.app)?;
        let me = cluster.me().node;
        let owns = |at| cluster.keepers_on(name, at, copies).contains(&me);
        let engine = &self.app.engine;
        let part = engine.warm_own(name, owns, from, WARM_MOST_BYTES, WARM_MOST_TIME, dry_run);
        let WarmPart {
            size,
            version,
            brought,
            there,
            next,
        } = part.await?;
        Ok(Warmed {
            size,
            version: version.0,
            brought,
            there,
            next,
        })
    }

    async fn change(
        &self,
        action: CacheAction,
        names: Vec<(String, String)>,
        dry_run: bool,
        copies: u8,
        said: Vec<Said>,
    ) -> Result<Vec<Changed>> {
        let names: Result<Vec<_>> = names
            .iter()
            .map(|(bucket, key)| ObjectName::new(bucket.as_str(), key.as_str()))
            .collect();
        let names = names?;
        let engine = &self.app.engine;
        let change = change_of(action, copies);
        let done = match &self.app.pins {
            Some(register) if !dry_run && !said.is_empty() => {
                if said.len() != names.len() {
                    return Err(Error::corrupt(
                        "an order says something else of other names",
                    ));
                }
                let is_known = |name: &ObjectName| {
                    register.said(name).is_some() || engine.pin_of(name).is_some()
                };
                let noted = names.iter().zip(said);
                let noted = noted.filter(|(name, said)| said.is_pinned() || is_known(name));
                let noted = noted.map(|(name, said)| (name.clone(), said));
                note(&self.app, noted.collect()).await?;
                let register = register.clone();
                engine
                    .change_cache_each(names, false, move |name, apply| {
                        // Nobody else changes it between what is known and what is done.
                        let _turn = register.turn(name);
                        // Something else may have been said since.
                        let is_pinned = register.said(name).is_some_and(|said| said.is_pinned());
                        match (action == CacheAction::Pin) == is_pinned {
                            true => apply(change),
                            false => Ok(0),
                        }
                    })
                    .await?
            }
            _ => engine.change_cache(change, names, dry_run).await?,
        };
        let each = done.into_iter().map(|(_, done)| match done {
            Ok(n) => Changed::Done(n),
            Err(e) => Changed::Failed(e.describe()),
        });
        Ok(each.collect())
    }

    /// A page of what is pinned here.
    async fn pinned(&self, after: Option<(String, String)>) -> Result<PinnedPage> {
        let after = after.map(|(bucket, key)| ObjectName::new(bucket, key));
        let after = after.transpose()?;
        let mut page = PinnedPage::default();
        let mut bytes = 0;
        let all = pinned_here(&self.app).await?;
        let from = all.partition_point(|(name, _)| after.as_ref().is_some_and(|a| name <= a));
        for (name, copies) in &all[from..] {
            bytes += encoded(name) + 8;
            if bytes > PAGE_BYTES && !page.pinned.is_empty() {
                page.more = true;
                break;
            }
            let (bucket, key) = (name.bucket().to_owned(), name.key().to_owned());
            page.pinned.push((bucket, key, *copies));
        }
        Ok(page)
    }

    async fn keeps(&self, held: Vec<Held>) -> Result<Vec<bool>> {
        let held = held.into_iter().map(|held| {
            let name = ObjectName::new(held.bucket, held.key)?;
            let holding = Holding {
                version: VersionId(held.version),
                validated_at_secs: held.validated_at_secs,
                size: held.size,
                chunks: held.chunks.iter().map(|(from, to)| *from..*to).collect(),
            };
            Ok((name, holding))
        });
        let held: Result<Vec<_>> = held.collect();
        self.app.engine.keeps_what_is_held(held?).await
    }
}

/// All that is pinned here. There may be millions: they are put in order on a thread for that.
///
/// # Errors
/// As [`forebay_engine::Engine::pinned`].
pub async fn pinned_here(app: &App) -> Result<Vec<(ObjectName, u8)>> {
    let engine = app.engine.clone();
    let looking = tokio::task::spawn_blocking(move || engine.pinned()).await;
    looking.map_err(|e| Error::internal("looking at pins was broken off").caused_by(e))?
}

/// What a name takes in JSON.
fn encoded(name: &ObjectName) -> usize {
    let encoded = |text: &str| serde_json::to_string(text).map_or(0, |t| t.len());
    encoded(name.bucket()) + encoded(name.key()) + 4
}

/// Notes what was said.
///
/// # Errors
/// `Unsupported` outside a cluster, and as [`Register::say`].
async fn note(app: &App, said: Vec<(ObjectName, Said)>) -> Result<()> {
    let register = register(app)?.clone();
    let noted = tokio::task::spawn_blocking(move || register.say(&said)).await;
    noted.map_err(|e| Error::internal("noting what is pinned was broken off").caused_by(e))?
}

fn register(app: &App) -> Result<&Arc<Register>> {
    let register = app.pins.as_ref();
    register.ok_or_else(|| Error::unsupported("this node is part of no cluster"))
}

/// Notes what was said of this node alone, and does it.
///
/// # Errors
/// As [`forebay_engine::Engine::change_cache`].
pub async fn change_here(
    app: &Arc<App>,
    action: CacheAction,
    names: Vec<ObjectName>,
    dry_run: bool,
) -> Result<Vec<(ObjectName, Result<u64>)>> {
    // In a task of its own: what is noted is done, though whoever asked has left.
    let done = forebay_core::request::spawn(do_here(app.clone(), action, names, dry_run)).await;
    done.map_err(|e| Error::internal("changing what is kept was broken off").caused_by(e))?
}

async fn do_here(
    app: Arc<App>,
    action: CacheAction,
    names: Vec<ObjectName>,
    dry_run: bool,
) -> Result<Vec<(ObjectName, Result<u64>)>> {
    if let (Some(register), false, false) = (&app.pins, dry_run, action == CacheAction::Evict) {
        let (register, names) = (register.clone(), names.clone());
        let pinned = Some(action == CacheAction::Pin);
        let noted = tokio::task::spawn_blocking(move || register.say_here(&names, pinned)).await;
        noted
            .map_err(|e| Error::internal("noting what is pinned was broken off").caused_by(e))??;
    }
    let change = change_of(action, 1);
    let Some(register) = app.pins.clone() else {
        return app.engine.change_cache(change, names, dry_run).await;
    };
    let each = move |name: &ObjectName, apply: &dyn Fn(CacheChange) -> Result<u64>| {
        let _turn = register.turn(name);
        apply(change)
    };
    app.engine.change_cache_each(names, dry_run, each).await
}

#[async_trait]
impl Operator for Orders {
    async fn operate(&self, order: serde_json::Value) -> Result<Bytes> {
        let order: Order = serde_json::from_value(order).map_err(|e| {
            Error::unsupported(format!("an order that this node does not know: {e}"))
                .hint("upgrade the nodes of a cluster one release at a time")
        })?;
        match order {
            Order::Warm {
                bucket,
                key,
                from,
                dry_run,
                copies,
            } => {
                let name = ObjectName::new(bucket, key)?;
                words(&self.warm(&name, from, dry_run, copies).await?)
            }
            Order::OpenDataset { spec } => {
                let watched = Watched::default();
                let opening = self.app.datasets.open_for_others(&spec, &watched);
                match timeout(PATIENCE, opening).await {
                    Ok(opened) => words(&Opening::Opened(opened?)),
                    Err(_) => words(&Opening::UnderWay(watched.now())),
                }
            }
            Order::DatasetPiece { id, from } => {
                let datasets = &self.app.datasets;
                datasets.piece_for_others(&id, from, PIECE_BYTES).await
            }
            Order::Figures => words(&Told::of(&self.app)?),
            Order::Change {
                action,
                names,
                dry_run,
                copies,
                said,
            } => words(&self.change(action, names, dry_run, copies, said).await?),
            Order::NotePins { said } => {
                let said = named(said)?;
                let names = said.iter().map(|(name, _)| name.clone()).collect();
                note(&self.app, said).await?;
                words(&settle(&self.app, names).await)
            }
            Order::PinsSaid { since } => words(&register(&self.app)?.since(since, PAGE_BYTES)),
            Order::Pinned { after } => words(&self.pinned(after).await?),
            Order::Keeps { held } => words(&self.keeps(held).await?),
        }
    }
}

fn words<T: Serialize>(answer: &T) -> Result<Bytes> {
    let text = serde_json::to_vec(answer);
    text.map(Bytes::from)
        .map_err(|e| Error::internal("an answer that cannot be written").caused_by(e))
}

pub(crate) fn cluster(app: &App) -> Result<&Arc<Cluster>> {
    let joined = app.joined.as_ref();
    joined
        .map(|joined| &joined.cluster)
        .ok_or_else(|| Error::unsupported("this node is part of no cluster"))
}

/// A request that concerns all nodes of the cluster.
pub struct Everywhere {
    app: Arc<App>,
    cluster: Arc<Cluster>,
    me: Orders,
    work: Mutex<BTreeMap<u64, NodeWork>>,
    /// So many nodes are to keep what is pinned.
    copies: u8,
    /// Whether the caller may know of all objects: what a node says of why something failed may name
    /// others than those that it is about.
    tells_reasons: bool,
}

impl Everywhere {
    /// `None` if the request concerns only this node: there are no others, or it says so
    /// (`this_node`).
    pub fn of(call: &Call) -> Option<Arc<Self>> {
        Self::of_change(call).filter(|everywhere| everywhere.has_others())
    }

    /// The same for what others are to know when there are some.
    pub fn of_change(call: &Call) -> Option<Arc<Self>> {
        let says = |v: &str| matches!(v, "" | "1" | "true");
        match call.query("this_node").is_some_and(says) {
            true => None,
            false => Self::over_for(call, 1),
        }
    }

    fn over_for(call: &Call, copies: u8) -> Option<Arc<Self>> {
        let tells = call.policy.allows_everywhere(Action::Admin);
        Self::made(&call.app, copies, tells).map(Arc::new)
    }

    /// Whether the cluster has more than one node.
    pub fn has_others(&self) -> bool {
        self.work.lock().len() > 1
    }

    /// The same for a pin on so many nodes.
    ///
    /// # Errors
    /// `Invalid` if there can be no such number, or if only this node is asked.
    pub fn on(call: &Call, copies: u8) -> Result<Arc<Self>> {
        if !(1..=COPIES_MAX).contains(&copies) {
            return Err(Error::invalid(format!("mirror is {copies}"))
                .hint(format!("it may be 1 to {COPIES_MAX}")));
        }
        let is_meant = Self::of(call).is_some();
        let everywhere = is_meant.then(|| Self::over_for(call, copies)).flatten();
        everywhere.ok_or_else(|| {
            Error::invalid("one node alone cannot keep an object on several")
                .hint("leave mirror out, or ask a node of a cluster, and not with this_node")
        })
    }

    fn over(app: &Arc<App>, copies: u8) -> Option<Arc<Self>> {
        Self::made(app, copies, true).map(Arc::new)
    }

    fn made(app: &Arc<App>, copies: u8, tells_reasons: bool) -> Option<Self> {
        let cluster = cluster(app).ok()?.clone();
        let members = cluster.map().members;
        let work = members.into_iter().map(|member| {
            let work = NodeWork {
                id: format!("{:016x}", member.id),
                name: member.name,
                ..NodeWork::default()
            };
            (member.id, work)
        });
        Some(Everywhere {
            app: app.clone(),
            cluster,
            me: Orders::new(app.clone()),
            work: Mutex::new(work.collect()),
            copies,
            tells_reasons,
        })
    }

    /// Why something failed with an object, as far as the caller may know it; the log has the rest.
    pub fn reason(&self, name: &ObjectName, e: &Error) -> String {
        if self.tells_reasons {
            return e.describe();
        }
        tracing::info!(
            id = forebay_core::request::current().as_deref(),
            object = %name,
            error = %e.describe(),
            "why an order failed is told only to keys that have admin on every bucket"
        );
        format!("{}: {UNTOLD}", e.kind().code())
    }

    /// How many nodes keep what is pinned: as many as are wanted, or as there are.
    pub fn copies(&self) -> u8 {
        let members = self.cluster.map().members;
        let active = members.iter().filter(|m| m.state == MemberState::Active);
        self.copies
            .min(active.count().try_into().unwrap_or(u8::MAX))
    }

    /// What each node has done so far.
    pub fn work(&self) -> Vec<NodeWork> {
        let mut work: Vec<NodeWork> = self.work.lock().values().cloned().collect();
        if !self.tells_reasons {
            let errors = work.iter_mut().filter_map(|work| work.error.as_mut());
            errors.for_each(|e| *e = UNTOLD.to_owned());
        }
        work
    }

    /// Brings an object to the nodes that own it.
    pub async fn warm(&self, name: &ObjectName, dry_run: bool) -> WarmOutcome {
        match self.warm_parts(name, dry_run).await {
            Ok(outcome) => outcome,
            Err(e) => match e.kind() {
                ErrorKind::NotFound => WarmOutcome::Missing,
                ErrorKind::PermissionDenied | ErrorKind::Unauthenticated => WarmOutcome::Denied,
                _ => WarmOutcome::Failed(e),
            },
        }
    }

    /// Brings each part to all who are to keep it.
    async fn warm_parts(&self, name: &ObjectName, dry_run: bool) -> Result<WarmOutcome> {
        let home = self.cluster.owner(name, 0).ok_or_else(nobody)?;
        let first = self.warm_at(home, name, dry_run).await?;
        let size = first.size;
        let (mut others, mut all) = (BTreeSet::new(), 0);
        for at in (0..size).step_by(EXTENT_BYTES as usize) {
            let keepers = self.cluster.keepers_on(name, at, self.copies);
            all += keepers.len() as u64 * EXTENT_BYTES.min(size - at);
            others.extend(keepers.into_iter().filter(|&node| node != home));
        }
        // All of them do their part, whoever fails.
        let parts: Vec<Result<Warmed>> = stream::iter(others)
            .map(|node| self.warm_at(node, name, dry_run))
            .buffer_unordered(NODES_AT_ONCE)
            .collect()
            .await;
        let (mut brought, mut there) = (first.brought, first.there);
        for part in parts {
            let part = part?;
            if (part.size, part.version) != (size, first.version) {
                return Err(
                    Error::version_changed(format!("{name} changed while it was warmed"))
                        .hint("run it again"),
                );
            }
            brought += part.brought;
            there += part.there;
        }
        match brought + there {
            done if done < all => Err(Error::busy(format!(
                "{} of {all} bytes of {name} belong to no node that was asked: the map of the \
                 cluster changed",
                all - done
            ))
            .hint("run it again: what came is not fetched again")),
            _ if there == all && brought == 0 => Ok(WarmOutcome::AlreadyThere { bytes: size }),
            _ => Ok(WarmOutcome::Warmed { bytes: brought }),
        }
    }

    /// One node's part of an object, order after order.
    async fn warm_at(&self, node: u64, name: &ObjectName, dry_run: bool) -> Result<Warmed> {
        let mut sum: Option<Warmed> = None;
        let done = loop {
            let from = sum.as_ref().and_then(|s| s.next).unwrap_or(0);
            let order = Order::Warm {
                bucket: name.bucket().to_owned(),
                key: name.key().to_owned(),
                from,
                dry_run,
                copies: self.copies,
            };
            let part: Warmed = match self.order(node, order).await {
                Ok(part) => part,
                Err(e) => break Err(e),
            };
            self.note(node, |work| {
                work.bytes += part.brought;
                work.already_there_bytes += part.there;
            });
            let all = match sum.take() {
                Some(before) if before.version != part.version => break Err(changed(name)),
                Some(before) => Warmed {
                    brought: before.brought + part.brought,
                    there: before.there + part.there,
                    ..part
                },
                None => part,
            };
            match all.next {
                None => break Ok(all),
                Some(next) if next <= from => {
                    let e = Error::internal(format!("it goes no further than byte {from}"));
                    break Err(self.at(node, e));
                }
                Some(_) => sum = Some(all),
            }
        };
        self.note(node, |work| match &done {
            Ok(_) => work.objects += 1,
            Err(e) => failed(work, e),
        });
        done
    }

    /// Changes what is kept of these objects: pins them where they are owned; unpins and evicts them
    /// wherever they are. Each comes with what [`forebay_engine::Engine::change_cache`] says, added
    /// up over the nodes. Sizes that the caller does not know are looked up.
    ///
    /// `is_new`: it is said now; otherwise it was said before, and counts only as long as nothing else
    /// was said since.
    pub async fn change(
        &self,
        action: CacheAction,
        names: Vec<(ObjectName, Option<u64>)>,
        dry_run: bool,
        is_new: bool,
    ) -> Vec<(ObjectName, Result<u64>)> {
        let mut all = Vec::with_capacity(names.len());
        let mut names = names.into_iter().peekable();
        while names.peek().is_some() {
            let (mut group, mut bytes) = (Vec::new(), 0);
            while let Some((name, _)) = names.peek() {
                bytes += encoded(name) + SAID_JSON_BYTES;
                if !group.is_empty() && bytes > NAMES_MAX_BYTES {
                    break;
                }
                group.extend(names.next());
            }
            let changed = self.change_group(action, group, dry_run, is_new).await;
            match action == CacheAction::Pin && self.copies > 1 && !dry_run {
                true => all.extend(self.bring_copies(changed).await),
                false => all.extend(changed),
            }
        }
        all
    }

    /// What was just pinned is brought to all who are to keep it. What does not exist stays pinned.
    async fn bring_copies(
        &self,
        pinned: Vec<(ObjectName, Result<u64>)>,
    ) -> Vec<(ObjectName, Result<u64>)> {
        let brought = stream::iter(pinned).map(|(name, pinned)| async move {
            let Ok(n) = pinned else {
                return (name, pinned);
            };
            let brought = match self.warm_parts(&name, false).await {
                Err(e) if e.kind() != ErrorKind::NotFound => {
                    Err(e.context("it is pinned, but not everywhere"))
                }
                Ok(WarmOutcome::Warmed { .. }) => Ok(n.max(1)),
                _ => Ok(n),
            };
            (name, brought)
        });
        brought.buffered(OBJECTS_AT_ONCE).collect().await
    }

    async fn change_group(
        &self,
        action: CacheAction,
        names: Vec<(ObjectName, Option<u64>)>,
        dry_run: bool,
        is_new: bool,
    ) -> Vec<(ObjectName, Result<u64>)> {
        let mut done: Vec<Result<u64>> = names.iter().map(|_| Ok(0)).collect();
        let mut by_node: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        let sizes: Vec<_> = names
            .iter()
            .map(|(name, size)| self.size_of(action, name, *size))
            .collect();
        let sizes: Vec<Result<u64>> = stream::iter(sizes)
            .buffered(OBJECTS_AT_ONCE)
            .collect()
            .await;
        for (at, ((name, _), size)) in names.iter().zip(&sizes).enumerate() {
            let nodes = size
                .clone()
                .and_then(|size| self.nodes_of(action, name, size));
            match nodes {
                Ok(nodes) => nodes
                    .into_iter()
                    .for_each(|node| by_node.entry(node).or_default().push(at)),
                Err(e) => done[at] = Err(e),
            }
        }
        let said = match self.say(action, &names, &sizes, dry_run, is_new).await {
            Ok(said) => said,
            // What this node cannot note, nobody is told.
            Err(e) => {
                return names
                    .into_iter()
                    .map(|(n, _)| (n, Err(e.clone())))
                    .collect();
            }
        };
        // Nobody who has something to do waits for those who have not.
        let told = self.tell(action, &names, (&said, &sizes), &by_node);
        let (names, said, orders) = (&names, &said, by_node.clone());
        let mut answers = stream::iter(orders)
            .map(|(node, which)| async move {
                let of = |&at: &usize| {
                    let name: &ObjectName = &names[at].0;
                    (name.bucket().to_owned(), name.key().to_owned())
                };
                let order = Order::Change {
                    action,
                    names: which.iter().map(of).collect(),
                    dry_run,
                    copies: self.copies,
                    said: match said.is_empty() {
                        true => Vec::new(),
                        false => which.iter().map(|&at| said[at]).collect(),
                    },
                };
                let answer: Result<Vec<Changed>> = self.order(node, order).await;
                (node, which, answer)
            })
            .buffer_unordered(NODES_AT_ONCE);
        let asked = async {
            while let Some((node, which, answer)) = answers.next().await {
                let each = self.each_of(node, answer, which.len());
                self.note(node, |work| {
                    for one in &each {
                        match one {
                            Ok(n) if action == CacheAction::Evict => {
                                work.objects += 1;
                                work.bytes += n;
                            }
                            Ok(_) => work.objects += 1,
                            Err(e) => failed(work, e),
                        }
                    }
                });
                for (at, one) in which.into_iter().zip(each) {
                    match (&mut done[at], one) {
                        (Ok(sum), Ok(n)) => *sum += n,
                        (sum @ Ok(_), Err(e)) => *sum = Err(e),
                        (Err(_), _) => {}
                    }
                }
            }
        };
        tokio::join!(told, asked);
        names
            .iter()
            .map(|(name, _)| name.clone())
            .zip(done)
            .collect()
    }

    /// What a node's answer says of each of so many names.
    fn each_of(&self, node: u64, answer: Result<Vec<Changed>>, names: usize) -> Vec<Result<u64>> {
        let answer = answer.and_then(|each| match each.len() == names {
            true => Ok(each),
            false => {
                let e = format!("it answered for {} names of {names}", each.len());
                Err(self.at(node, Error::corrupt(e)))
            }
        });
        let of_one = |changed| match changed {
            Changed::Done(n) => Ok(n),
            Changed::Failed(message) => {
                Err(self.at(node, Error::new(ErrorKind::Internal, message)))
            }
        };
        match answer {
            Ok(each) => each.into_iter().map(of_one).collect(),
            Err(e) => vec![Err(e); names],
        }
    }

    /// Notes here what is said of each of these names, before anybody else is told; nothing in a dry
    /// run. (What no node has pinned need not be unpinned, and that is not noted.)
    async fn say(
        &self,
        action: CacheAction,
        names: &[(ObjectName, Option<u64>)],
        sizes: &[Result<u64>],
        dry_run: bool,
        is_new: bool,
    ) -> Result<Vec<Said>> {
        if dry_run || action == CacheAction::Evict {
            return Ok(Vec::new());
        }
        let register = register(&self.app)?.clone();
        // Pins of earlier releases were said before everything that is known.
        let at = match is_new {
            true => register.moment(),
            false => 1,
        };
        let said_of = |((name, _), size): (&(ObjectName, Option<u64>), &Result<u64>)| {
            let known = register.said(name);
            match (known, action) {
                (Some(known), CacheAction::Pin) if !is_new => known,
                (known, CacheAction::Pin) => Said {
                    unpinned: known.unwrap_or_default().unpinned,
                    pinned: at,
                    copies: known.map_or(self.copies, |known| self.copies.max(known.copies)),
                    size: *size.as_ref().unwrap_or(&0),
                },
                _ => Said {
                    unpinned: at,
                    ..Said::default()
                },
            }
        };
        let said: Vec<Said> = names.iter().zip(sizes).map(said_of).collect();
        let engine = &self.app.engine;
        let is_noted = |((name, _), size): (&(ObjectName, Option<u64>), &Result<u64>)| match action
        {
            CacheAction::Pin => size.is_ok(),
            _ => register.said(name).is_some() || engine.pin_of(name).is_some(),
        };
        let noted = names.iter().zip(sizes).zip(&said);
        let noted = noted.filter(|(name, _)| is_noted(*name));
        let noted = noted.map(|(((name, _), _), said)| (name.clone(), *said));
        note(&self.app, noted.collect()).await?;
        Ok(said)
    }

    /// Tells what was said of pins to the nodes that have nothing to do for it. Who does not hear it
    /// asks for it later.
    async fn tell(
        &self,
        action: CacheAction,
        names: &[(ObjectName, Option<u64>)],
        (said, sizes): (&[Said], &[Result<u64>]),
        by_node: &BTreeMap<u64, Vec<usize>>,
    ) {
        // To unpin concerns all nodes.
        if said.is_empty() || action != CacheAction::Pin {
            return;
        }
        let me = self.cluster.me().node;
        let nodes: Vec<u64> = self.work.lock().keys().copied().collect();
        let told =
            stream::iter(nodes.into_iter().filter(|&node| node != me)).map(|node| async move {
                let does: BTreeSet<usize> =
                    by_node.get(&node).into_iter().flatten().copied().collect();
                let others = names.iter().zip(said).enumerate();
                // What could not be looked up is not pinned here either.
                let others = others.filter(|(at, _)| !does.contains(at) && sizes[*at].is_ok());
                let said: Vec<_> = others
                    .map(|(_, ((name, _), said))| {
                        (name.bucket().to_owned(), name.key().to_owned(), *said)
                    })
                    .collect();
                if said.is_empty() {
                    return;
                }
                let told: Result<usize> = self.order(node, Order::NotePins { said }).await;
                if let Err(e) = told {
                    tracing::debug!(error = %e.describe(), "a node was not told what is pinned");
                }
            });
        told.buffer_unordered(NODES_AT_ONCE).collect::<()>().await;
    }

    /// How large an object is that is to be pinned; 0 if that does not matter.
    async fn size_of(
        &self,
        action: CacheAction,
        name: &ObjectName,
        size: Option<u64>,
    ) -> Result<u64> {
        match (action, size) {
            (CacheAction::Pin, None) => {
                match self.app.engine.head(name, &ReadOptions::default()).await {
                    Ok(head) => Ok(head.meta.size),
                    // Names that do not exist can be pinned: they are small until they do.
                    Err(e) if e.kind() == ErrorKind::NotFound => Ok(0),
                    Err(e) => Err(e.context("its size, which says where it belongs")),
                }
            }
            (CacheAction::Pin, Some(size)) => Ok(size),
            _ => Ok(0),
        }
    }

    /// The nodes whose cache is to be changed.
    fn nodes_of(&self, action: CacheAction, name: &ObjectName, size: u64) -> Result<BTreeSet<u64>> {
        if action != CacheAction::Pin {
            return Ok(self.work.lock().keys().copied().collect());
        }
        let owners = keepers(&self.cluster, name, size, self.copies);
        match owners.is_empty() {
            true => Err(nobody()),
            false => Ok(owners),
        }
    }

    /// What is pinned on any node: on how many nodes it is to be kept, and what those that have pinned
    /// it are called.
    ///
    /// # Errors
    /// What a node answers, or that it does not; it is named.
    pub async fn pinned(&self) -> Result<BTreeMap<ObjectName, (u8, Vec<String>)>> {
        let nodes: Vec<(u64, String)> = self
            .work
            .lock()
            .iter()
            .map(|(node, work)| (*node, work.name.clone()))
            .collect();
        let mut asked = stream::iter(nodes)
            .map(|(node, called)| async move {
                let pinned = self.pinned_at(node).await.map_err(|e| {
                    e.hint(
                        "`forebay pin --list --this-node` lists the pins of the node that is asked",
                    )
                });
                (called, pinned)
            })
            .buffered(NODES_AT_ONCE);
        let mut all: BTreeMap<ObjectName, (u8, Vec<String>)> = BTreeMap::new();
        while let Some((called, pinned)) = asked.next().await {
            for (name, copies) in pinned? {
                let (most, nodes) = all.entry(name).or_default();
                *most = copies.max(*most);
                nodes.push(called.clone());
            }
        }
        all.values_mut().for_each(|(_, nodes)| nodes.sort());
        Ok(all)
    }

    async fn pinned_at(&self, node: u64) -> Result<Vec<(ObjectName, u8)>> {
        let mut all: Vec<(ObjectName, u8)> = Vec::new();
        loop {
            let after = all.last().map(|(name, _)| name);
            let after = after.map(|name| (name.bucket().to_owned(), name.key().to_owned()));
            let page: PinnedPage = self.order(node, Order::Pinned { after }).await?;
            let before = all.len();
            for (bucket, key, copies) in page.pinned {
                let name = ObjectName::new(bucket, key)?;
                if all.last().is_some_and(|(last, _)| *last >= name) {
                    let e = Error::corrupt("it lists its pins in another order");
                    return Err(self.at(node, e));
                }
                all.push((name, copies));
            }
            if !page.more || all.len() == before {
                return Ok(all);
            }
        }
    }

    async fn order<T: DeserializeOwned>(&self, node: u64, order: Order) -> Result<T> {
        let value = serde_json::to_value(&order)
            .map_err(|e| Error::internal("an order that cannot be written").caused_by(e))?;
        let answer = match node == self.cluster.me().node {
            true => self.me.operate(value).await,
            false => self.cluster.operate(node, value).await,
        };
        let answer = answer.and_then(|answer| {
            serde_json::from_slice(&answer)
                .map_err(|e| Error::corrupt(format!("an answer that cannot be read: {e}")))
        });
        answer.map_err(|e| self.at(node, e))
    }

    fn at(&self, node: u64, e: Error) -> Error {
        let called = self.work.lock().get(&node).map(|work| work.name.clone());
        let called = called.filter(|name| !name.is_empty());
        e.context(format!(
            "node {}",
            called.unwrap_or_else(|| format!("{node:016x}"))
        ))
    }

    fn note(&self, node: u64, change: impl FnOnce(&mut NodeWork)) {
        let mut work = self.work.lock();
        change(work.entry(node).or_insert_with(|| NodeWork {
            id: format!("{node:016x}"),
            ..NodeWork::default()
        }));
    }
}

fn failed(work: &mut NodeWork, e: &Error) {
    work.failed += 1;
    work.error.get_or_insert_with(|| e.describe());
}

fn changed(name: &ObjectName) -> Error {
    Error::version_changed(format!("{name} changed while it was warmed")).hint("run it again")
}

fn nobody() -> Error {
    Error::busy("no member of the cluster takes a share: all of them drain")
}

/// What was said, by names.
fn named(said: Vec<(String, String, Said)>) -> Result<Vec<(ObjectName, Said)>> {
    let named = said.into_iter();
    named
        .map(|(bucket, key, said)| Ok((ObjectName::new(bucket, key)?, said)))
        .collect()
}

/// The nodes that own a part of an object, or are to keep one of so many copies.
fn keepers(cluster: &Cluster, name: &ObjectName, size: u64, copies: u8) -> BTreeSet<u64> {
    (0..size.max(1))
        .step_by(EXTENT_BYTES as usize)
        .flat_map(|at| cluster.keepers_on(name, at, copies.clamp(1, COPIES_MAX)))
        .collect()
}

/// Keeps what is pinned where it belongs, as nodes come and go.
///
/// It asks other nodes for what was said while this one did not hear it. After each change of who owns
/// what, this node pins what it owns now, and ends the pins of what it does not, once those who do have
/// what it has. After that, and after each start of a node (with another disk, perhaps), who has pins
/// on several nodes sets them, and brings the objects, wherever they belong now. Where everything is in
/// its place, that moves nothing.
pub async fn tend_pins(app: Arc<App>, stop: Stop) {
    let mut tended = Tended::default();
    loop {
        tokio::select! {
            () = stop.stop.cancelled() => return,
            () = tokio::time::sleep(SETTLE) => {}
        }
        tokio::select! {
            () = stop.stop.cancelled() => return,
            () = tended.turn(&app) => {}
        }
    }
}

/// When something is tried again.
struct Again {
    at: Option<Instant>,
    pause: Duration,
}

impl Again {
    fn is_due(&self) -> bool {
        self.at.is_some_and(|at| Instant::now() >= at)
    }

    /// After so long, or twice as long as the last time.
    fn later(&mut self, first: Duration) {
        self.pause = (self.pause * 2).clamp(first, PINS_AGAIN_LAST);
        self.at = Some(Instant::now() + self.pause);
    }

    fn never(&mut self) {
        *self = Self::default();
    }
}

impl Default for Again {
    fn default() -> Self {
        Again {
            at: None,
            pause: Duration::ZERO,
        }
    }
}

/// What was done for pins, and what is to be done again.
#[derive(Default)]
struct Tended {
    /// By this map, and after these starts of other nodes.
    by: Option<(Arc<Placed>, BTreeMap<u64, u64>)>,
    /// Up to where each node was asked what was said, since which start of it.
    heard: BTreeMap<u64, (u64, u64)>,
    /// Up to which change of the register this node has done what was noted, and how far the register
    /// was when it last looked.
    done: u64,
    noted: u64,
    settle: Again,
    copies: Again,
    let_go: Again,
}

impl Tended {
    async fn turn(&mut self, app: &Arc<App>) {
        let (Ok(cluster), Ok(register)) = (cluster(app), register(app)) else {
            return;
        };
        if self.by.is_none() {
            // What was said while this node was away comes before what it does.
            if let Err(e) = figures::compare(app).await {
                tracing::warn!(error = %e.describe(), "other nodes cannot be asked");
            }
        }
        let now = (cluster.placed(), app.differences.boots());
        let (is_moved, is_new) = match &self.by {
            Some((placed, boots)) => {
                let is_moved = !Arc::ptr_eq(placed, &now.0);
                (is_moved, is_moved || *boots != now.1)
            }
            None => (true, true),
        };
        // What it pins only now is not here yet: those who have it bring it.
        let mirrored = match is_new || self.copies.is_due() {
            true => Some(mirrored(app).await),
            false => None,
        };
        let before = register.extent().changes;
        let heard = self.hear(app, register).await;
        let mut failed = settle(app, heard).await;
        let is_all = is_moved || self.settle.is_due();
        if is_all {
            failed += settle_all(app, register).await;
            (self.done, self.noted) = (before, before);
        }
        failed += self.settle_noted(app, register).await;
        match failed {
            0 if is_all => self.settle.never(),
            0 => {}
            // All are tried again soon, these too.
            _ if !is_all && self.settle.at.is_some() => {}
            _ => {
                self.settle.later(PINS_AGAIN);
                tracing::warn!(
                    failed,
                    "objects that belong to this node could not be pinned: \
                    they are tried again"
                );
            }
        }
        if is_moved || self.let_go.is_due() {
            if is_moved {
                self.let_go.never();
            }
            match let_go(app, cluster, register).await {
                Ok(0) => self.let_go.never(),
                Ok(left) => {
                    tracing::debug!(
                        left,
                        "pinned objects that belong to other nodes are not all there yet"
                    );
                    self.let_go.later(LET_GO_AGAIN);
                }
                Err(e) => {
                    tracing::warn!(error = %e.describe(), "pins of what belongs to other nodes stay for now");
                    self.let_go.later(LET_GO_AGAIN);
                }
            }
        }
        if let Some(mirrored) = mirrored {
            if is_new {
                self.copies.never();
            }
            match place_pins(app, mirrored).await {
                0 => self.copies.never(),
                failed => {
                    self.copies.later(PINS_AGAIN);
                    tracing::warn!(
                        failed,
                        "objects that are pinned on several nodes are not on all of \
                        them: they are tried again"
                    );
                }
            }
        }
        self.by = Some(now);
    }

    /// Does what was noted here up to the last look, and was not done: who asks for it may leave in
    /// between. How many names failed.
    async fn settle_noted(&mut self, app: &Arc<App>, register: &Arc<Register>) -> usize {
        let until = std::mem::replace(&mut self.noted, register.extent().changes);
        let mut failed = 0;
        loop {
            let (names, last) = register.noted(self.done, until, PINS_AT_ONCE);
            if names.is_empty() {
                self.done = until;
                return failed;
            }
            let said = names.iter().filter_map(|name| register.said(name));
            if said.filter(Said::is_pinned).any(|said| said.copies > 1) && self.copies.at.is_none()
            {
                self.copies.later(PINS_AGAIN);
            }
            failed += settle(app, names).await;
            self.done = last;
        }
    }

    /// Notes what other nodes were told and this one was not; the names.
    async fn hear(&mut self, app: &Arc<App>, register: &Arc<Register>) -> Vec<ObjectName> {
        let mut names = Vec::new();
        let told = app.differences.pins();
        self.heard.retain(|node, _| told.contains_key(node));
        for (node, (boot, extent)) in told {
            let since = match self.heard.get(&node) {
                Some((of, since)) if *of == boot => *since,
                _ => 0,
            };
            if extent.digest == register.extent().digest {
                self.heard.insert(node, (boot, extent.changes));
                continue;
            }
            if extent.changes <= since {
                continue;
            }
            match hear_from(app, node, since, &mut names).await {
                Ok(until) => {
                    self.heard.insert(node, (boot, until));
                }
                // A node of an earlier release, or one that has just gone.
                Err(e) => tracing::debug!(node = format_args!("{node:016x}"),
                    error = %e.describe(), "a node does not say what it was told to pin"),
            }
        }
        names
    }
}

/// Notes what a node was told since; the names are added. Returns up to where that was.
async fn hear_from(
    app: &Arc<App>,
    node: u64,
    mut since: u64,
    names: &mut Vec<ObjectName>,
) -> Result<u64> {
    let cluster = cluster(app)?;
    loop {
        let order = serde_json::to_value(Order::PinsSaid { since })
            .map_err(|e| Error::internal("an order that cannot be written").caused_by(e))?;
        let page: Page = serde_json::from_slice(&cluster.operate(node, order).await?)
            .map_err(|e| Error::corrupt(format!("an answer that cannot be read: {e}")))?;
        let said = named(page.said)?;
        names.extend(said.iter().map(|(name, _)| name.clone()));
        note(app, said).await?;
        if !page.more || page.next <= since {
            return Ok(page.next);
        }
        since = page.next;
    }
}

/// Pins all that this node owns, and unpins what was unpinned. How many names failed.
async fn settle_all(app: &Arc<App>, register: &Arc<Register>) -> usize {
    let (mut failed, mut last) = (0, None);
    loop {
        let names = register.after(last.as_ref(), PINS_AT_ONCE);
        if names.is_empty() {
            return failed;
        }
        last = names.last().cloned();
        failed += settle(app, names).await;
    }
}

/// Does what was said of these names, as far as it concerns this node by the map of this moment. How
/// many failed.
async fn settle(app: &Arc<App>, names: Vec<ObjectName>) -> usize {
    if names.is_empty() {
        return 0;
    }
    let (Ok(cluster), Ok(register)) = (cluster(app), register(app)) else {
        return 0;
    };
    let (cluster, register) = (cluster.clone(), register.clone());
    let (engine, all) = (app.engine.clone(), names.len());
    let done = app
        .engine
        .change_cache_each(names, false, move |name, apply| {
            let _turn = register.turn(name);
            let Some(said) = register.said(name) else {
                return Ok(0);
            };
            let (pin, here) = (engine.pin_of(name), register.here(name));
            if !said.is_pinned() {
                return match pin.is_some() && here != Some(true) {
                    true => apply(CacheChange::Unpin),
                    false => Ok(0),
                };
            }
            let is_there = pin.is_some_and(|copies| copies >= said.copies);
            let is_mine =
                || keepers(&cluster, name, said.size, said.copies).contains(&cluster.me().node);
            match here == Some(false) || (!is_there && !is_mine()) {
                true => Ok(0),
                // Also if it is there: somebody else may just be making it, and fail.
                false => apply(change_of(CacheAction::Pin, said.copies)),
            }
        });
    match done.await {
        Ok(done) => {
            let failed: Vec<_> = done.into_iter().filter(|(_, done)| done.is_err()).collect();
            if let Some((name, Err(e))) = failed.first() {
                tracing::debug!(object = %name, error = %e.describe(), "not pinned");
            }
            failed.len()
        }
        Err(e) => {
            tracing::debug!(error = %e.describe(), "not pinned");
            all
        }
    }
}

/// Ends the pins of what this node does not own any more, where those who do have what it has, pinned.
/// How many are left.
async fn let_go(app: &Arc<App>, cluster: &Arc<Cluster>, register: &Arc<Register>) -> Result<usize> {
    let (engine, me) = (app.engine.clone(), cluster.me().node);
    let (map, all) = (cluster.placed(), register.clone());
    let (of, pinned) = (cluster.clone(), app.engine.clone());
    // The map may have changed: then it is looked at again, by that one.
    let others = tokio::task::spawn_blocking(move || -> Result<Vec<(ObjectName, Said)>> {
        let mut others = Vec::new();
        for (name, copies) in pinned.pinned()? {
            let said = all.said(&name).filter(Said::is_pinned);
            let Some(said) = said.filter(|_| all.here(&name) != Some(true)) else {
                continue;
            };
            let said = Said {
                copies: said.copies.max(copies),
                ..said
            };
            if !keepers(&of, &name, said.size, said.copies).contains(&me) {
                others.push((name, said));
            }
        }
        Ok(others)
    });
    let others = others
        .await
        .map_err(|e| Error::internal("looking at pins was broken off").caused_by(e))??;
    let mut left = others.len();
    for group in others.chunks(PINS_AT_ONCE) {
        let names: Vec<_> = group.iter().map(|(name, _)| name.clone()).collect();
        let held = engine.holdings(names.clone()).await?;
        let mut stays = kept_elsewhere(app, cluster, group, &held).await;
        bring_what_stays(app, cluster, group, &held, &stays).await;
        let gone = names.into_iter().filter(|name| !stays.remove(name));
        let (register, of, map) = (register.clone(), cluster.clone(), map.clone());
        let ended = engine.change_cache_each(gone.collect(), false, move |name, apply| {
            let _turn = register.turn(name);
            let is_pinned = register.said(name).is_some_and(|said| said.is_pinned());
            let is_same = Arc::ptr_eq(&of.placed(), &map) && register.here(name) != Some(true);
            match is_pinned && is_same {
                true => apply(CacheChange::Unpin),
                false => Ok(0),
            }
        });
        left -= ended
            .await?
            .iter()
            .filter(|(_, done)| matches!(done, Ok(1)))
            .count();
    }
    Ok(left)
}

/// Which of these objects others are to keep, and have not pinned, or do not keep all that is held
/// here.
async fn kept_elsewhere(
    app: &Arc<App>,
    cluster: &Arc<Cluster>,
    objects: &[(ObjectName, Said)],
    held: &[Option<Holding>],
) -> BTreeSet<ObjectName> {
    const EXTENT_CHUNKS: u32 = (EXTENT_BYTES / CHUNK_BYTES) as u32;
    let mut stays = BTreeSet::new();
    let mut asks: BTreeMap<u64, Vec<(ObjectName, Held)>> = BTreeMap::new();
    for ((name, said), held) in objects.iter().zip(held) {
        let Some(held) = held.as_ref().filter(|held| !held.chunks.is_empty()) else {
            let keepers = keepers(cluster, name, said.size, said.copies);
            if keepers.is_empty() {
                stays.insert(name.clone());
            }
            for node in keepers {
                let asked = Held::nothing(name);
                asks.entry(node).or_default().push((name.clone(), asked));
            }
            continue;
        };
        let mut by_node: BTreeMap<u64, Vec<(u32, u32)>> = BTreeMap::new();
        for chunks in &held.chunks {
            let mut from = chunks.start;
            while from < chunks.end {
                let to = chunks.end.min((from / EXTENT_CHUNKS + 1) * EXTENT_CHUNKS);
                let at = u64::from(from) * CHUNK_BYTES;
                let keepers = cluster.keepers_on(name, at, said.copies);
                if keepers.is_empty() {
                    stays.insert(name.clone());
                }
                for node in keepers {
                    let ranges = by_node.entry(node).or_default();
                    match ranges.last_mut() {
                        Some(last) if last.1 == from => last.1 = to,
                        _ => ranges.push((from, to)),
                    }
                }
                from = to;
            }
        }
        for (node, chunks) in by_node {
            // 25 bytes of JSON each, at most.
            for chunks in chunks.chunks(NAMES_MAX_BYTES / 2 / 25) {
                let asked = Held {
                    bucket: name.bucket().to_owned(),
                    key: name.key().to_owned(),
                    version: held.version.0,
                    validated_at_secs: held.validated_at_secs,
                    size: held.size,
                    chunks: chunks.to_vec(),
                };
                asks.entry(node).or_default().push((name.clone(), asked));
            }
        }
    }
    let mut orders = Vec::new();
    for (node, asks) in asks {
        let (mut group, mut bytes) = (Vec::new(), 0);
        for (name, asked) in asks {
            let more = encoded(&name) + SAID_JSON_BYTES + 40 + 25 * asked.chunks.len();
            if bytes + more > NAMES_MAX_BYTES && !group.is_empty() {
                orders.push((node, std::mem::take(&mut group)));
                bytes = 0;
            }
            bytes += more;
            group.push((name, asked));
        }
        orders.push((node, group));
    }
    let Some(everywhere) = Everywhere::over(app, 1) else {
        return objects.iter().map(|(name, _)| name.clone()).collect();
    };
    let everywhere = &everywhere;
    let mut answers = stream::iter(orders)
        .map(|(node, asks)| async move {
            let held = asks.iter().map(|(_, held)| held.clone()).collect();
            let kept: Result<Vec<bool>> = everywhere.order(node, Order::Keeps { held }).await;
            (asks, kept)
        })
        .buffer_unordered(NODES_AT_ONCE);
    while let Some((asks, kept)) = answers.next().await {
        let kept = kept.unwrap_or_else(|e| {
            tracing::debug!(error = %e.describe(), "a node does not say what it keeps");
            Vec::new()
        });
        for (at, (name, _)) in asks.into_iter().enumerate() {
            if kept.get(at) != Some(&true) {
                stays.insert(name);
            }
        }
    }
    stays
}

/// What is whole here and was not handed over (there was no room, perhaps) is brought to those who own
/// it, like what is warmed up; once nothing is handed over any more.
async fn bring_what_stays(
    app: &Arc<App>,
    cluster: &Arc<Cluster>,
    objects: &[(ObjectName, Said)],
    held: &[Option<Holding>],
    stays: &BTreeSet<ObjectName>,
) {
    if stays.is_empty() {
        return;
    }
    let of = cluster.clone();
    let status = tokio::task::spawn_blocking(move || of.hand_over_status()).await;
    if status.is_ok_and(|status| status.losing_slots > 0) {
        return;
    }
    let is_whole = |held: &Holding| {
        let chunks = held.chunks.iter().map(|c| u64::from(c.end - c.start));
        chunks.sum::<u64>() == held.size.div_ceil(CHUNK_BYTES)
    };
    let all = objects.iter().zip(held);
    let whole =
        all.filter(|((name, _), held)| stays.contains(name) && held.as_ref().is_some_and(is_whole));
    let bring: Vec<_> = whole
        .map(|((name, said), _)| bring(app.clone(), name.clone(), said.copies))
        .collect();
    stream::iter(bring)
        .buffer_unordered(OBJECTS_AT_ONCE)
        .collect::<()>()
        .await;
}

async fn bring(app: Arc<App>, name: ObjectName, copies: u8) {
    let Some(everywhere) = Everywhere::over(&app, copies.clamp(1, COPIES_MAX)) else {
        return;
    };
    if let Err(e) = everywhere.warm_parts(&name, false).await {
        tracing::debug!(object = %name, error = %e.describe(), "a pinned object was not brought to \
            those who own it");
    }
}

/// What this node has pinned on several nodes, and on how many.
async fn mirrored(app: &App) -> Vec<(ObjectName, u8)> {
    let engine = app.engine.clone();
    // There may be a million.
    let looking = tokio::task::spawn_blocking(move || {
        let mut pinned = engine.pinned().unwrap_or_default();
        pinned.retain(|(_, copies)| *copies > 1);
        pinned
    });
    looking.await.unwrap_or_default()
}

/// Has those objects that are pinned on several nodes brought to where they belong. How many are not
/// there.
async fn place_pins(app: &Arc<App>, mirrored: Vec<(ObjectName, u8)>) -> usize {
    let mut by_copies: BTreeMap<u8, Vec<_>> = BTreeMap::new();
    for (name, copies) in mirrored {
        // Somebody may have unpinned it while this node was away.
        let is_unpinned = app.pins.as_ref().and_then(|pins| pins.said(&name));
        if is_unpinned.is_none_or(|said| said.is_pinned()) {
            by_copies.entry(copies).or_default().push((name, None));
        }
    }
    let mut failed = 0;
    for (copies, names) in by_copies {
        // Alone, it has all that there is.
        let everywhere = Everywhere::over(app, copies.min(COPIES_MAX));
        if let Some(everywhere) = everywhere.filter(|everywhere| everywhere.has_others()) {
            let done = everywhere
                .change(CacheAction::Pin, names, false, false)
                .await;
            failed += done.iter().filter(|(_, done)| done.is_err()).count();
        }
    }
    failed
}
