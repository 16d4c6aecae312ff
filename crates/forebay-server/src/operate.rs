//! What an operator wants of a whole cluster, asked at one node.
//!
//! The node that is asked ([`Everywhere`]) lists the objects and gives each node its orders, small
//! enough that an answer takes seconds; the others ([`Orders`]) do their own part. Nothing is
//! remembered between two orders: who asks again has done what is still missing, and if the asking
//! client leaves, no more orders are given.
//!
//! Invariant: an object counts as done if every node has done its part of it, by one version. A node
//! that does not answer, or goes by another map, leaves it undone, and the report says so.

use crate::{
    app::App,
    figures::Told,
    listener::Stop,
    openings::{Opening, PATIENCE, PIECE_BYTES},
    v1::Call,
};
use async_trait::async_trait;
use bytes::Bytes;
use forebay_cluster::{COPIES_MAX, EXTENT_BYTES, MemberState};
use forebay_core::{Error, ErrorKind, ObjectName, Result, sync::Mutex};
use forebay_dataset::{DatasetSpec, Watched};
use forebay_engine::{CacheChange, ReadOptions, WarmOutcome, WarmPart};
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
/// Pinned objects that are brought to those who are to keep them at the same time.
const OBJECTS_AT_ONCE: usize = 8;
/// After the map has changed, before pins on several nodes follow it: changes come together.
const SETTLE: Duration = Duration::from_secs(3);
/// After a failure, before pins are tried again; each time twice as long.
const PINS_AGAIN: Duration = Duration::from_secs(30);
const PINS_AGAIN_LAST: Duration = Duration::from_secs(960);

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
    },
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
    ) -> Result<Vec<Changed>> {
        let names: Result<Vec<_>> = names
            .iter()
            .map(|(bucket, key)| ObjectName::new(bucket.as_str(), key.as_str()))
            .collect();
        let engine = &self.app.engine;
        let done = engine.change_cache(change_of(action, copies), names?, dry_run);
        let each = done.await?.into_iter().map(|(_, done)| match done {
            Ok(n) => Changed::Done(n),
            Err(e) => Changed::Failed(e.describe()),
        });
        Ok(each.collect())
    }
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
            } => words(&self.change(action, names, dry_run, copies).await?),
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
}

impl Everywhere {
    /// `None` if the request concerns only this node: there are no others, or it says so
    /// (`this_node`).
    pub fn of(call: &Call) -> Option<Arc<Self>> {
        let says = |v: &str| matches!(v, "" | "1" | "true");
        match call.query("this_node").is_some_and(says) {
            true => None,
            false => Self::over(&call.app, 1),
        }
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
        let everywhere = Self::of(call).and_then(|_| Self::over(&call.app, copies));
        everywhere.ok_or_else(|| {
            Error::invalid("one node alone cannot keep an object on several")
                .hint("leave mirror out, or ask a node of a cluster, and not with this_node")
        })
    }

    fn over(app: &Arc<App>, copies: u8) -> Option<Arc<Self>> {
        let cluster = cluster(app).ok()?.clone();
        let members = cluster.map().members;
        if members.len() < 2 {
            return None;
        }
        let work = members.into_iter().map(|member| {
            let work = NodeWork {
                id: format!("{:016x}", member.id),
                name: member.name,
                ..NodeWork::default()
            };
            (member.id, work)
        });
        Some(Arc::new(Everywhere {
            app: app.clone(),
            cluster,
            me: Orders::new(app.clone()),
            work: Mutex::new(work.collect()),
            copies,
        }))
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
        self.work.lock().values().cloned().collect()
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
    pub async fn change(
        &self,
        action: CacheAction,
        names: Vec<(ObjectName, Option<u64>)>,
        dry_run: bool,
    ) -> Vec<(ObjectName, Result<u64>)> {
        let mut all = Vec::with_capacity(names.len());
        let mut names = names.into_iter().peekable();
        while names.peek().is_some() {
            let (mut group, mut bytes) = (Vec::new(), 0);
            while let Some((name, _)) = names.peek() {
                let encoded = |text: &str| serde_json::to_string(text).map_or(0, |t| t.len());
                bytes += encoded(name.bucket()) + encoded(name.key()) + 4;
                if !group.is_empty() && bytes > NAMES_MAX_BYTES {
                    break;
                }
                group.extend(names.next());
            }
            let changed = self.change_group(action, group, dry_run).await;
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
    ) -> Vec<(ObjectName, Result<u64>)> {
        let mut done: Vec<Result<u64>> = names.iter().map(|_| Ok(0)).collect();
        let mut by_node: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (at, (name, size)) in names.iter().enumerate() {
            match self.nodes_of(action, name, *size).await {
                Ok(nodes) => nodes
                    .into_iter()
                    .for_each(|node| by_node.entry(node).or_default().push(at)),
                Err(e) => done[at] = Err(e),
            }
        }
        let names = &names;
        let mut answers = stream::iter(by_node)
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
                };
                let answer: Result<Vec<Changed>> = self.order(node, order).await;
                (node, which, answer)
            })
            .buffer_unordered(NODES_AT_ONCE);
        while let Some((node, which, answer)) = answers.next().await {
            let each: Vec<Result<u64>> = match answer {
                Ok(each) if each.len() == which.len() => each
                    .into_iter()
                    .map(|changed| match changed {
                        Changed::Done(n) => Ok(n),
                        Changed::Failed(message) => {
                            Err(self.at(node, Error::new(ErrorKind::Internal, message)))
                        }
                    })
                    .collect(),
                Ok(each) => {
                    let e = Error::corrupt(format!(
                        "it answered for {} names of {}",
                        each.len(),
                        which.len()
                    ));
                    let e = self.at(node, e);
                    which.iter().map(|_| Err(e.clone())).collect()
                }
                Err(e) => which.iter().map(|_| Err(e.clone())).collect(),
            };
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
        drop(answers);
        names
            .iter()
            .map(|(name, _)| name.clone())
            .zip(done)
            .collect()
    }

    /// The nodes whose cache is to be changed.
    async fn nodes_of(
        &self,
        action: CacheAction,
        name: &ObjectName,
        size: Option<u64>,
    ) -> Result<BTreeSet<u64>> {
        if action != CacheAction::Pin {
            return Ok(self.work.lock().keys().copied().collect());
        }
        let size = match size {
            Some(size) => size,
            None => match self.app.engine.head(name, &ReadOptions::default()).await {
                Ok(head) => head.meta.size,
                // Names that do not exist can be pinned: they are small until they do.
                Err(e) if e.kind() == ErrorKind::NotFound => 0,
                Err(e) => return Err(e.context("its size, which says where it belongs")),
            },
        };
        let owners: BTreeSet<u64> = (0..size.max(1))
            .step_by(EXTENT_BYTES as usize)
            .flat_map(|at| self.cluster.keepers_on(name, at, self.copies))
            .collect();
        match owners.is_empty() {
            true => Err(nobody()),
            false => Ok(owners),
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

/// Keeps what is pinned on several nodes there, as nodes come and go: after each change of who owns
/// what, and each start of a node (with another disk, perhaps), who has such pins sets them, and
/// brings the objects, wherever they belong now. Where everything is in its place, that moves nothing.
pub async fn tend_pins(app: Arc<App>, stop: Stop) {
    let mut tried = None;
    let (mut again, mut pause) = (None, PINS_AGAIN);
    loop {
        tokio::select! {
            () = stop.stop.cancelled() => return,
            () = tokio::time::sleep(SETTLE) => {}
        }
        let Ok(cluster) = cluster(&app) else {
            return;
        };
        let now = (cluster.placed(), app.differences.boots());
        let is_tried = tried
            .as_ref()
            .is_some_and(|before: &(_, _)| Arc::ptr_eq(&before.0, &now.0) && before.1 == now.1);
        if is_tried && again.is_none_or(|at| Instant::now() < at) {
            continue;
        }
        let failed = tokio::select! {
            () = stop.stop.cancelled() => return,
            failed = place_pins(&app) => failed,
        };
        pause = match is_tried {
            true => (pause * 2).min(PINS_AGAIN_LAST),
            false => PINS_AGAIN,
        };
        (tried, again) = (Some(now), None);
        if failed > 0 {
            again = Some(Instant::now() + pause);
            tracing::warn!(
                failed,
                "objects that are pinned on several nodes are not on all of \
                them: they are tried again"
            );
        }
    }
}

/// How many are not where they belong.
async fn place_pins(app: &Arc<App>) -> usize {
    let pinned = app.engine.pinned().unwrap_or_default();
    let mut by_copies: BTreeMap<u8, Vec<_>> = BTreeMap::new();
    for (name, copies) in pinned.into_iter().filter(|(_, copies)| *copies > 1) {
        by_copies.entry(copies).or_default().push((name, None));
    }
    let mut failed = 0;
    for (copies, names) in by_copies {
        // Alone, it has all that there is.
        if let Some(everywhere) = Everywhere::over(app, copies.min(COPIES_MAX)) {
            let done = everywhere.change(CacheAction::Pin, names, false).await;
            failed += done.iter().filter(|(_, done)| done.is_err()).count();
        }
    }
    failed
}
