//! Plans that the cache follows: what a job will read decides what is kept, what is fetched ahead,
//! and what is evicted.
//!
//! A job registers its plan and gets a *lease*. The job renews it by saying where it is
//! ([`Plans::progress`]), or the node renews it when it sees requests for rows of the plan
//! ([`Plans::asked`]). Leases on equal plans are one plan here. Each lease says which ranks of its
//! job read at this node, and which columns; leases that read alike are one *reader* of the plan, at
//! the place of the one that is furthest behind (`readers.rs`).
//!
//! - The store asks [`Table`] when it makes room: for the nearest use of an entry by any plan
//!   (`table.rs`), found through the layout of the datasets (`layout.rs`).
//! - A task for each plan fetches what its readers read next and is missing, within a budget of
//!   bytes ahead of each (`ahead.rs`).
//!
//! When the last lease of a plan is released or expires, the plan goes: the table forgets it, the
//! task ends, and what the plan held is evicted like anything else from then on.
//!
//! Invariant: correct answers need none of this. Wrong positions, or plans that nobody reads by,
//! cost misses and fetches.

mod ahead;
mod layout;
mod readers;
mod table;

pub use layout::Layout;
pub use table::Table;

use crate::blocking::blocking;
use crate::{Access, Caller, Dataset, Datasets, Rows, Views, rows::Orders};
use forebay_core::{Error, ErrorKind, Result, limits, request, sync::Mutex};
use forebay_engine::Engine;
use forebay_plan::{Batching, Plan, Share};
use forebay_protocol::plan::{Lease, Readers as RanksHere, Registration};
use forebay_store::Advisor;
use futures::future::BoxFuture;
use readers::{Columns, Reader};
use std::{
    collections::{HashMap, hash_map::RandomState},
    hash::BuildHasher,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use table::Followed;
use tokio::{sync::Notify, task::AbortHandle};

/// Counters. They only grow.
#[derive(Debug, Default)]
pub struct FollowStats {
    /// Leases that were created, including those of work on this node.
    pub registered: AtomicU64,
    /// Leases that their own job registered again.
    pub renewed: AtomicU64,
    /// Leases that their holders released.
    pub released: AtomicU64,
    /// Leases that expired.
    pub expired: AtomicU64,
    /// Bytes that were missing and requested ahead of jobs.
    pub ahead_bytes: AtomicU64,
    /// Pieces that could not be fetched ahead.
    pub ahead_failed: AtomicU64,
}

/// The plans of a node; cheap to clone, all clones are one.
#[derive(Clone)]
pub struct Plans {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    engine: Engine,
    datasets: Datasets,
    /// Says where rows lie in files.
    rows: Rows,
    table: Arc<Table>,
    state: Mutex<State>,
    stats: FollowStats,
    next: AtomicU64,
    /// Turns counters into lease numbers that cannot be guessed.
    secret: RandomState,
}

#[derive(Default)]
struct State {
    /// By lease.
    held: HashMap<u64, Held>,
    /// By the plan's identity.
    groups: HashMap<String, Group>,
    sweeping: bool,
}

struct Held {
    plan: String,
    owner: Owner,
    /// What it reads, and where it is.
    reader: Reader,
    /// Which one it is of the readers of its plan.
    number: usize,
    /// `None`: until it is released.
    lasts: Option<Duration>,
    expires: Option<Instant>,
}

/// Who owns a lease.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// The caller who registered it.
    Job(Caller),
    /// Work on this node, on behalf of a caller; it ends with the work.
    Work(Caller),
}

impl Owner {
    fn caller(self) -> Caller {
        match self {
            Owner::Job(caller) | Owner::Work(caller) => caller,
        }
    }
}

impl Held {
    /// Whether a caller may know about it.
    fn is_of(&self, caller: Caller) -> bool {
        caller == Caller::Operator || self.owner.caller() == caller
    }

    /// Whether a caller may move and end it.
    fn obeys(&self, caller: Caller) -> bool {
        self.is_of(caller) && matches!(self.owner, Owner::Job(_))
    }

    fn renew(&mut self) {
        self.expires = self.lasts.map(|lasts| Instant::now() + lasts);
    }
}

/// What a job or work on this node reads of a plan.
#[derive(Clone, Debug, Default)]
pub struct Reads {
    /// The ranks that read here; `None`: the whole order.
    pub ranks: Option<RanksHere>,
    /// An epoch and a position in it where a step of theirs begins.
    pub begin: (u64, u64),
    /// `None`: all of them.
    pub columns: Option<Vec<String>>,
    /// So many rows are read at a time that nearly every block has some among them, which are read
    /// from it together.
    pub together: bool,
}

/// A plan of work on this node; dropping it ends the lease.
pub struct Following {
    plans: Plans,
    lease: u64,
}

impl Following {
    /// Reports where the work is.
    ///
    /// # Errors
    /// `Invalid` for an impossible place.
    pub fn progress(&self, epoch: u64, position: u64) -> Result<()> {
        self.plans.moved(self.lease, epoch, position, |_| true)
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        // It exists: nobody else may end it, and it does not expire.
        let _ = self.plans.ended(self.lease, |_| true);
    }
}

struct Group {
    followed: Arc<Followed>,
    wake: Arc<Notify>,
    task: Option<AbortHandle>,
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

impl Plans {
    /// Plans over datasets of this registry, whose rows are read by `rows`. From now on, the store of
    /// its engine asks them.
    pub fn new(datasets: &Datasets, rows: &Rows) -> Self {
        let engine = datasets.engine().clone();
        let table = Arc::new(Table::default());
        engine.set_advisor(Some(table.clone()));
        let orders: Arc<dyn Orders> = table.clone();
        rows.ask_orders(Arc::downgrade(&orders));
        let inner = Inner {
            engine,
            datasets: datasets.clone(),
            rows: rows.clone(),
            table,
            state: Mutex::default(),
            stats: FollowStats::default(),
            next: AtomicU64::new(0),
            secret: RandomState::new(),
        };
        Self {
            inner: Arc::new(inner),
        }
    }

    /// What the plans know of the use of cached entries. The store asks it already, unless another
    /// advisor has been set since, which asks it in turn.
    pub fn advisor(&self) -> Arc<dyn Advisor> {
        self.inner.table.clone()
    }

    /// Counters of leases and of what was fetched ahead.
    pub fn stats(&self) -> &FollowStats {
        &self.inner.stats
    }

    /// The number of leases, and of plans that they are on.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.inner.state.lock();
        (state.held.len(), state.groups.len())
    }

    /// Follows a plan from now on, as long as its lease is renewed.
    ///
    /// # Errors
    /// `Invalid` for an impossible plan or place, `NotFound` for a dataset that is not known here,
    /// `PermissionDenied`, `Busy` for one lease too many.
    pub fn register<'a>(
        &'a self,
        registration: &'a Registration,
        access: &'a dyn Access,
    ) -> BoxFuture<'a, Result<Lease>> {
        Box::pin(async move {
            check(registration)?;
            let sources = registration.plan.sources.iter();
            let ids = sources.map(|source| source.dataset.as_str());
            let views = self.inner.datasets.views(ids, access).await?;
            // With millions of files, many columns or a long schedule, this takes time.
            let (plans, of, asked) = (self.clone(), views.clone(), registration.clone());
            let (plan, layouts, mut reader) = blocking(move || {
                let layouts = plans.layouts(of.bases());
                let spec = asked.plan.resolve(|id| of.shape_of(id))?;
                let plan = Plan::new(spec)?.counted(plans.inner.engine.budget())?;
                let at = place(&plan, asked.epoch, asked.position)?;
                plan.prepare(asked.epoch);
                let reads = Reads {
                    ranks: asked.partition,
                    begin: (asked.epoch, asked.position),
                    columns: asked.columns,
                    together: false,
                };
                let plan = Arc::new(plan);
                let reader = plans.reader(&plan, &layouts, at, &reads)?;
                Ok::<_, Error>((plan, layouts, reader))
            })
            .await??;
            let lasts = Duration::from_secs(registration.lease_seconds);
            let lease = match &registration.job {
                // The same job name under another key has its own lease.
                Some(job) => self
                    .inner
                    .secret
                    .hash_one((access.caller(), job, plan.identity())),
                None => self.new_lease(),
            };
            reader.until_epoch = registration.until_epoch.unwrap_or(u64::MAX);
            // Without the lengths of rows, nobody knows which of them these ranks will read.
            let unknown = (registration.partition.as_ref()).is_some_and(|ranks| {
                matches!(ranks.batch, Batching::Bounded { .. }) && ranks.world != 1
            });
            if !unknown {
                reader.ahead_bytes = registration.ahead_bytes.min(self.inner.ahead_most());
            }
            let held = Held {
                plan: plan.identity().to_owned(),
                owner: Owner::Job(access.caller()),
                reader,
                number: 0,
                lasts: Some(lasts),
                expires: None,
            };
            self.hold(lease, held, plan, views, layouts)?;
            self.of(lease)
        })
    }

    /// Follows the plan of work on this node, such as a stream, as long as the returned value is
    /// kept. Nothing is fetched ahead for it. With datasets of millions of files this takes time.
    ///
    /// # Errors
    /// As [`Plans::register`].
    pub fn follow(
        &self,
        plan: Arc<Plan>,
        views: &Views,
        (epoch, position): (u64, u64),
        reads: &Reads,
        caller: Caller,
    ) -> Result<Following> {
        let layouts = self.layouts(views.bases());
        let at = place(&plan, epoch, position)?;
        let reader = self.reader(&plan, &layouts, at, reads)?;
        let held = Held {
            plan: plan.identity().to_owned(),
            owner: Owner::Work(caller),
            reader,
            number: 0,
            lasts: None,
            expires: None,
        };
        let lease = self.new_lease();
        self.hold(lease, held, plan, views.clone(), layouts)?;
        Ok(Following {
            plans: self.clone(),
            lease,
        })
    }

    /// Who reads a plan, without an end, and with nothing fetched ahead.
    fn reader(
        &self,
        plan: &Arc<Plan>,
        layouts: &[Arc<Layout>],
        at: u64,
        reads: &Reads,
    ) -> Result<Reader> {
        let ranks = reads.ranks.as_ref();
        let share = ranks
            .map(|r| Share::new(plan, r.partition(), &r.ranks, reads.begin))
            .transpose()?
            .flatten();
        let columns = match &reads.columns {
            None => None,
            Some(names) => {
                // Leases on the same columns share what is known of them.
                let state = self.inner.state.lock();
                let known = state
                    .held
                    .values()
                    .filter(|h| h.plan == plan.identity())
                    .find_map(|h| h.reader.columns.as_ref().filter(|c| c.names() == names))
                    .cloned();
                drop(state);
                Some(known.map_or_else(|| Columns::new(names, layouts).map(Arc::new), Ok)?)
            }
        };
        Ok(Reader {
            share,
            columns,
            at,
            until_epoch: u64::MAX,
            ahead_bytes: 0,
            together: reads.together,
        })
    }

    fn new_lease(&self) -> u64 {
        self.inner
            .secret
            .hash_one(self.inner.next.fetch_add(1, Relaxed))
    }

    /// One layout for each dataset, shared with the plans that are already followed.
    fn layouts(&self, datasets: &[Arc<Dataset>]) -> Vec<Arc<Layout>> {
        let mut layouts: Vec<Arc<Layout>> = Vec::with_capacity(datasets.len());
        for dataset in datasets {
            let known = layouts
                .iter()
                .find(|l| l.dataset().id() == dataset.id())
                .cloned()
                .or_else(|| self.inner.table.layout(dataset.id()));
            layouts.push(known.unwrap_or_else(|| Arc::new(Layout::new(dataset.clone()))));
        }
        layouts
    }

    /// Creates a lease, or renews it. Without a time it lasts until it is released.
    fn hold(
        &self,
        lease: u64,
        mut held: Held,
        plan: Arc<Plan>,
        views: Views,
        layouts: Vec<Arc<Layout>>,
    ) -> Result<()> {
        let identity = plan.identity().to_owned();
        let ahead = held.reader.ahead_bytes > 0;
        {
            let mut state = self.inner.state.lock();
            if state.held.len() >= limits::PLAN_LEASES_MAX && !state.held.contains_key(&lease) {
                return Err(Error::busy(format!(
                    "this node already follows {} plans, which is the limit",
                    limits::PLAN_LEASES_MAX
                ))
                .hint("release the leases of jobs that have ended, or let them expire"));
            }
            if !state.groups.contains_key(&identity) {
                let store = self.inner.engine.store();
                let store = store.map(Arc::downgrade).unwrap_or_default();
                let followed = Arc::new(Followed::new(plan, views, layouts, store));
                let group = Group {
                    followed: followed.clone(),
                    wake: Arc::new(Notify::new()),
                    task: None,
                };
                state.groups.insert(identity.clone(), group);
                self.inner.table.add(followed);
            }
            held.renew();
            if state.held.insert(lease, held).is_some() {
                self.inner.stats.renewed.fetch_add(1, Relaxed);
            } else {
                self.inner.stats.registered.fetch_add(1, Relaxed);
                tracing::info!(plan = %identity, "the cache follows a plan");
            }
            state.settle(&identity);
            if ahead
                && let Some(group) = state.groups.get_mut(&identity)
                && group.task.is_none()
            {
                let task = ahead::run(
                    self.inner.engine.clone(),
                    self.inner.rows.clone(),
                    Arc::downgrade(&self.inner),
                    group.followed.clone(),
                    group.wake.clone(),
                );
                // What it fetches is on the account of the job that asked for it first.
                group.task = Some(request::spawn(task).abort_handle());
            }
            if !std::mem::replace(&mut state.sweeping, true) {
                tokio::spawn(sweep(Arc::downgrade(&self.inner)));
            }
        }
        Ok(())
    }

    /// Reports where the job of a lease is now: positions of the order, of all ranks together.
    /// Renews the lease.
    ///
    /// # Errors
    /// `NotFound` for a lease that expired or was released, and for one of another key or of a
    /// stream; `Invalid` for an impossible place.
    pub fn progress(
        &self,
        lease: &str,
        epoch: u64,
        position: u64,
        access: &dyn Access,
    ) -> Result<Lease> {
        let (id, caller) = (parse(lease)?, access.caller());
        self.moved(id, epoch, position, |held| held.obeys(caller))?;
        self.of(id)
    }

    fn moved(
        &self,
        id: u64,
        epoch: u64,
        position: u64,
        may: impl FnOnce(&Held) -> bool,
    ) -> Result<()> {
        let mut state = self.inner.state.lock();
        let state = &mut *state;
        let held = state.held.get_mut(&id).filter(|held| may(held));
        let held = held.ok_or_else(|| unknown(&text(id)))?;
        let group = state.groups.get(&held.plan);
        let group = group.ok_or_else(|| unknown(&text(id)))?;
        held.reader.at = place(&group.followed.plan, epoch, position)?;
        held.renew();
        let identity = held.plan.clone();
        state.places(&identity);
        Ok(())
    }

    /// Ends a lease.
    ///
    /// # Errors
    /// `NotFound` if it does not exist, or belongs to another key or to a stream.
    pub fn release(&self, lease: &str, access: &dyn Access) -> Result<()> {
        let caller = access.caller();
        self.ended(parse(lease)?, |held| held.obeys(caller))
    }

    fn ended(&self, id: u64, may: impl FnOnce(&Held) -> bool) -> Result<()> {
        let mut state = self.inner.state.lock();
        if !state.held.get(&id).is_some_and(may) || !state.end(id, &self.inner.table) {
            return Err(unknown(&text(id)));
        }
        drop(state);
        self.inner.stats.released.fetch_add(1, Relaxed);
        self.inner.plan_may_have_ended();
        Ok(())
    }

    /// The caller's leases, in the order of their numbers, including those of its streams.
    pub fn list(&self, access: &dyn Access) -> Vec<Lease> {
        let caller = access.caller();
        let mut ids: Vec<u64> = self
            .inner
            .state
            .lock()
            .held
            .iter()
            .filter(|(_, held)| held.is_of(caller))
            .map(|(id, _)| *id)
            .collect();
        ids.sort_unstable();
        ids.into_iter().filter_map(|id| self.of(id).ok()).collect()
    }

    /// Rows of a dataset are being read. If they are what a plan over it would read about now, its
    /// jobs are assumed to be there, and their leases are renewed.
    pub fn asked(&self, dataset: &str, rows: &[u64]) {
        if !self.inner.table.any() || rows.is_empty() {
            return;
        }
        for followed in self.inner.table.all().iter() {
            let bases = followed.bases_of(dataset);
            if bases.is_empty() {
                continue;
            }
            let per_epoch = followed.plan.rows_per_epoch();
            let places: Vec<(Option<Share>, u64)> = followed
                .readers()
                .list
                .iter()
                .filter_map(|reader| {
                    let places = bases.iter();
                    let places = places.filter_map(|b| followed.place_of(reader, *b, rows));
                    Some((reader.share.clone(), places.min()?))
                })
                .collect();
            if places.is_empty() {
                continue;
            }
            let mut state = self.inner.state.lock();
            let identity = followed.plan.identity();
            for held in state.held.values_mut().filter(|h| h.plan == identity) {
                // Of the ranks that are one reader, the one whose rows these are.
                let own = held.reader.share.as_ref();
                let place = places.iter().find(|(share, at)| match (own, share) {
                    (None, None) => true,
                    (Some(own), Some(share)) => {
                        own.is_of_job(share) && own.has(at / per_epoch, at % per_epoch)
                    }
                    _ => false,
                });
                if let Some((_, at)) = place {
                    held.reader.at = held.reader.at.max(*at);
                    held.renew();
                }
            }
            state.places(identity);
        }
    }

    fn of(&self, lease: u64) -> Result<Lease> {
        let state = self.inner.state.lock();
        let text = text(lease);
        let held = state.held.get(&lease).ok_or_else(|| unknown(&text))?;
        let group = state.groups.get(&held.plan).ok_or_else(|| unknown(&text))?;
        let rows = group.followed.plan.rows_per_epoch();
        Ok(Lease {
            plan: held.plan.clone(),
            rows_per_epoch: rows,
            epoch: held.reader.at / rows,
            position: held.reader.at % rows,
            ranks: held.reader.share.as_ref().map(Share::of),
            expires_in_seconds: held
                .expires
                .map(|e| e.saturating_duration_since(Instant::now()).as_secs()),
            leases: state.held.values().filter(|h| h.plan == held.plan).count(),
            lease: text,
        })
    }
}

impl Inner {
    /// What is kept in memory for an order goes with it.
    fn plan_may_have_ended(&self) {
        if self.table.has_lost() {
            self.rows.forget_soon();
        }
    }

    /// The most that may be fetched ahead of one plan.
    fn ahead_most(&self) -> u64 {
        let capacity: u64 = self
            .engine
            .cache_stats()
            .map_or(0, |s| s.dirs.iter().map(|d| d.effective_bytes).sum());
        capacity / limits::PLAN_AHEAD_SHARE
    }
}

impl State {
    /// Updates where those are that read a plan.
    fn places(&mut self, identity: &str) {
        if let Some(group) = self.groups.get(identity) {
            let held = self.held.values().filter(|h| h.plan == identity);
            let places = held.map(|h| (h.number, h.reader.at));
            group.followed.are_read_at(places);
            group.wake.notify_one();
        }
    }

    /// Updates who reads a plan, and where.
    fn settle(&mut self, identity: &str) {
        let Some(group) = self.groups.get(identity) else {
            return;
        };
        let mut held: Vec<_> = self
            .held
            .iter_mut()
            .filter(|(_, h)| h.plan == identity)
            .collect();
        held.sort_unstable_by_key(|(lease, _)| **lease);
        let leases = held.iter().map(|(_, h)| h.reader.clone());
        let numbers = group.followed.are_read_by(leases);
        for ((_, held), number) in held.iter_mut().zip(numbers) {
            held.number = number;
        }
        group.wake.notify_one();
    }

    /// Ends a lease, and its plan if it was the last one. `false`: there is no such lease.
    fn end(&mut self, lease: u64, table: &Table) -> bool {
        let Some(held) = self.held.remove(&lease) else {
            return false;
        };
        if self.held.values().any(|h| h.plan == held.plan) {
            self.settle(&held.plan);
        } else {
            self.groups.remove(&held.plan);
            table.remove(&held.plan);
            tracing::info!(plan = %held.plan, "the cache no longer follows this plan");
        }
        true
    }
}

/// Ends expired leases, until there are no leases.
async fn sweep(plans: Weak<Inner>) {
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let Some(inner) = plans.upgrade() else { return };
        let mut state = inner.state.lock();
        let now = Instant::now();
        let over: Vec<u64> = state
            .held
            .iter()
            .filter(|(_, h)| h.expires.is_some_and(|e| e <= now))
            .map(|(id, _)| *id)
            .collect();
        for lease in over {
            state.end(lease, &inner.table);
            inner.stats.expired.fetch_add(1, Relaxed);
            tracing::info!("the lease on a plan expired");
        }
        let is_last = state.held.is_empty();
        if is_last {
            state.sweeping = false;
        }
        drop(state);
        inner.plan_may_have_ended();
        if is_last {
            return;
        }
    }
}

fn check(registration: &Registration) -> Result<()> {
    let sources = registration.plan.sources.len();
    if sources > limits::PLAN_SOURCES_MAX {
        return Err(Error::invalid(format!("the plan has {sources} datasets"))
            .hint(format!("use at most {}", limits::PLAN_SOURCES_MAX)));
    }
    if let Some(job) = &registration.job
        && !(1..=limits::PLAN_JOB_NAME_MAX_BYTES).contains(&job.len())
    {
        return Err(
            Error::invalid(format!("the name of the job has {} bytes", job.len())).hint(format!(
                "give each job its own name of 1 to {} bytes",
                limits::PLAN_JOB_NAME_MAX_BYTES
            )),
        );
    }
    if !(1..=limits::PLAN_LEASE_MAX_SECS).contains(&registration.lease_seconds) {
        return Err(Error::invalid(format!(
            "the lease is {} seconds long",
            registration.lease_seconds
        ))
        .hint(format!(
            "give 1 to {}; each report of the job's position renews the lease",
            limits::PLAN_LEASE_MAX_SECS
        )));
    }
    if registration
        .until_epoch
        .is_some_and(|until| until <= registration.epoch)
    {
        return Err(Error::invalid(format!(
            "the job begins in epoch {} and ends before epoch {}",
            registration.epoch,
            registration.until_epoch.unwrap_or_default()
        ))
        .hint("until_epoch is the epoch after the last one of the job"));
    }
    Ok(())
}

/// A place as one number.
fn place(plan: &Plan, epoch: u64, position: u64) -> Result<u64> {
    let rows = plan.rows_per_epoch();
    // The end of an epoch is the beginning of the next one, which must exist.
    let epochs = epoch.saturating_add(u64::from(position == rows));
    if epochs >= limits::PLAN_EPOCHS_MAX || position > rows {
        return Err(Error::invalid(format!(
            "position {position} of epoch {epoch} does not exist: an epoch of the plan has {rows} \
             rows"
        ))
        .hint("positions count the rows of all ranks together; they begin at 0 in each epoch"));
    }
    Ok(epoch * rows + position)
}

fn parse(lease: &str) -> Result<u64> {
    u64::from_str_radix(lease, 16)
        .ok()
        .filter(|_| lease.len() == 16)
        .ok_or_else(|| unknown(lease))
}

fn text(lease: u64) -> String {
    format!("{lease:016x}")
}

fn unknown(lease: &str) -> Error {
    Error::new(
        ErrorKind::NotFound,
        format!(
            "the lease {:?} does not exist",
            forebay_core::name::shorten(lease)
        ),
    )
    .hint("it expired, or the node restarted: register the plan again")
}
