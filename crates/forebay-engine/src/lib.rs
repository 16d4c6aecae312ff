//! The read and write path: hit, miss, single-flight ranged fill, freshness. The only place where
//! the store meets the origin.
//!
//! How a read goes ([`Engine::read`]):
//! 1. **Resolve** (`resolve.rs`): which version of the object is current? A fresh head in the store
//!    says so without any request; otherwise one origin request, shared by all readers of the name,
//!    asks and brings the first bytes along with the answer.
//! 2. **Fetch** (`fill.rs`): objects up to one chunk came with the head; larger ones are read in
//!    chunks, each from the store, from a fill under way, or by a new fill of a run of missing
//!    chunks, under `If-Match` of the resolved version.
//! 3. **Deliver** (`read.rs`, `sequential.rs`): a stream of buffers, the next run of chunks ahead
//!    of its reader, all of one version.
//!
//! Members of archives (`members.rs`) are ranges of their archive, found through an index kept in
//! the store; samples of a part of a tar, and the first member of a name (`early.rs`), are known
//! while its index is being built.
//! Writes (`write.rs`) go through to the origin, and the name is forgotten here before they return.
//! `warm.rs` is the synchronous path that a batch uses for what is already on disk. In a cluster,
//! other nodes are asked through the seam of origins (`buckets.rs`); `peers.rs` answers them;
//! what they send and is not kept passes (`passing.rs`); `handover.rs` moves many entries at once.
//!
//! Invariants:
//! - bytes of two versions never meet in one answer: parts are keyed by version, fills are
//!   conditional on it;
//! - what a fill learned that began before a write is never published after it (`generation.rs`);
//! - buffers of fills and reads are reserved from the memory budget and give it back when their
//!   last slice is dropped;
//! - a store that cannot write or read makes the engine slower, never wrong.

#![warn(missing_docs)]

mod buckets;
mod bytesio;
mod cache;
mod early;
mod fill;
mod flight;
mod forward;
mod gather;
mod generation;
mod handover;
mod laid;
mod members;
mod operate;
mod passing;
mod peers;
mod read;
mod resolve;
mod rules;
mod sequential;
mod stats;
mod sync;
mod trust;
mod unpack;
mod versioned;
mod warm;
mod warmup;
mod write;

pub use buckets::{Announced, Buckets, FixedBuckets, Heads};
pub use flight::{Flights, Follower, Joined, Leader};
pub use forebay_format::Repeated;
pub use forebay_origin::{
    ByteStream, ForwardBody, ForwardRequest, ForwardResponse, ListEntry, ListPage, ListRequest,
    ListedBucket, ListedPart, Origin, PartsPage, PutCondition, PutRequest, PutResponse, S3Place,
    Trailer, UploadedPart,
};
pub use forebay_store::Wait;
pub use forward::Changes;
pub use gather::{Answers, GATHERED_ENTRY_MAX_BYTES, Gather, Gathered, Wanted, WantedBytes};
pub use handover::{EntryName, Lacking, TakenOver};
pub use members::{AUX_INDEX, Archive, MemberRead};
pub use operate::{CacheChange, CachedState, Holding};
pub use peers::PeerRead;
pub use read::{Conditions, Head, Read, ReadOptions, Unmodified};
pub use rules::{BucketRule, BucketRules, Freshness};
pub use stats::{EngineSnapshot, EngineStats};
pub use unpack::Unpacking;
pub use warm::{Appended, EntryHeader, WarmEntry};
pub use warmup::{WarmOutcome, WarmPart, WarmReport};
pub use write::GiveWay;

use arc_swap::ArcSwap;
use forebay_core::{
    Clock, MemoryBudget, ObjectName, Onward, Result, VersionId,
    limits::{self, CHUNK_BYTES},
};
use forebay_store::Store;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};
use tokio::sync::Semaphore;

/// What the engine needs to know besides its components.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// How fresh each bucket's answers must be, at first: [`Engine::set_rules`] replaces them.
    pub rules: BucketRules,
    /// Bytes of parsed member indexes kept in RAM.
    pub member_index_memory_bytes: u64,
    /// Largest run of missing chunks that one origin request fetches, bytes.
    pub fill_run_bytes: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            rules: BucketRules::default(),
            member_index_memory_bytes: limits::MEMBER_INDEX_MEMORY_DEFAULT_BYTES,
            fill_run_bytes: limits::FILL_RUN_MAX_BYTES,
        }
    }
}

/// How many chunks fit in half of the memory.
fn chunks_of_half(budget: &MemoryBudget) -> usize {
    let chunks = budget.total_bytes() / 2 / limits::CHUNK_BYTES;
    (chunks as usize).clamp(1, Semaphore::MAX_PERMITS)
}

/// The engine of one node. Cheap to clone: all clones are one.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
    /// Whether it answers other nodes of the cluster (`peers.rs`).
    for_peers: bool,
    /// Whether what other nodes fetch for it is kept in any case (`peers.rs`).
    for_disk: bool,
    /// Whether it continues a read of which bytes have come from an origin (`sequential.rs`).
    continues: bool,
}

struct Inner {
    config: EngineConfig,
    rules: ArcSwap<BucketRules>,
    buckets: Arc<dyn Buckets>,
    store: Option<Arc<Store>>,
    clock: Arc<dyn Clock>,
    /// What heads are stamped with, and their age is told by.
    onward: Onward,
    budget: MemoryBudget,
    stats: EngineStats,
    generations: generation::Generations,
    trust: trust::Trust,
    resolving: Flights<resolve::ResolveKey, resolve::Resolved>,
    filling: Flights<fill::ChunkKey, bytes::Bytes>,
    writes: write::Writes,
    heads: resolve::HeadCache,
    indexes: members::IndexCache,
    indexing: Flights<(u128, VersionId), Arc<forebay_format::MemberIndex>>,
    early: early::Early,
    /// Permits for passes over archives that are read from the origin.
    passes: Arc<Semaphore>,
    /// A permit for one pass for whose window the memory budget has no room now.
    unpacks_alone: Arc<Semaphore>,
    unpacking: Flights<(u128, VersionId), ()>,
    /// One for each chunk that waits for another node.
    from_peers: Arc<Semaphore>,
    /// Milliseconds since `began` until which the store counts as one that does not keep what it is
    /// given.
    refuses_until_ms: AtomicU64,
    began: Instant,
}

impl Engine {
    /// An engine over `buckets`, keeping what it reads in `store` if there is one.
    pub fn new(
        config: EngineConfig,
        buckets: Arc<dyn Buckets>,
        store: Option<Arc<Store>>,
        clock: Arc<dyn Clock>,
        budget: MemoryBudget,
    ) -> Engine {
        let onward = Onward::default();
        let now = onward.now_secs(&*clock);
        if let Some(store) = &store {
            match buckets.heads() {
                Heads::ByRule => store.outdate_after(now),
                _ => store.distrust_after(now),
            }
        }
        Engine {
            inner: Arc::new(Inner {
                trust: trust::Trust::new(now),
                writes: write::Writes::new(&budget),
                from_peers: Arc::new(Semaphore::new(chunks_of_half(&budget))),
                rules: ArcSwap::from_pointee(config.rules.clone()),
                indexes: members::IndexCache::new(config.member_index_memory_bytes),
                early: early::Early::new(config.member_index_memory_bytes / 4),
                config,
                buckets,
                store,
                clock,
                onward,
                budget,
                stats: EngineStats::default(),
                generations: generation::Generations::default(),
                resolving: Flights::default(),
                filling: Flights::default(),
                heads: resolve::HeadCache::default(),
                indexing: Flights::default(),
                passes: Arc::new(Semaphore::new(limits::ARCHIVE_PASSES_MAX)),
                unpacks_alone: Arc::new(Semaphore::new(1)),
                unpacking: Flights::default(),
                refuses_until_ms: AtomicU64::new(0),
                began: Instant::now(),
            }),
            for_peers: false,
            for_disk: false,
            continues: false,
        }
    }

    /// Where the engine finds the origin of a bucket.
    pub fn buckets(&self) -> &Arc<dyn Buckets> {
        &self.inner.buckets
    }

    /// For tests, which inspect what the engine does to it. Everything else goes through the
    /// engine.
    #[doc(hidden)]
    pub fn store(&self) -> Option<&Arc<Store>> {
        self.inner.store.as_ref()
    }

    /// The memory that buffers of fills, reads and writes are reserved from.
    pub fn budget(&self) -> &MemoryBudget {
        &self.inner.budget
    }

    /// The clock of the node.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.inner.clock
    }

    /// The time by which the engine judges freshness: it never goes back.
    pub fn now_secs(&self) -> u32 {
        self.inner.onward.now_secs(&*self.inner.clock)
    }

    /// The engine's counters, to read and to add to.
    pub fn stats(&self) -> &EngineStats {
        &self.inner.stats
    }

    /// Questions about tars being read that still wait for an answer.
    pub fn questions_waiting(&self) -> usize {
        self.inner.early.waiting()
    }

    /// Fills of chunks in progress.
    pub fn fills_in_flight(&self) -> usize {
        self.inner.filling.len() + self.inner.resolving.len()
    }

    /// The rule of one bucket.
    pub fn rule(&self, bucket: &str) -> BucketRule {
        self.inner.rules.load().of(bucket)
    }

    /// Puts new rules in force for every read that begins from now on.
    pub fn set_rules(&self, rules: BucketRules) {
        self.inner.rules.store(Arc::new(rules));
    }

    /// One page of the origin's listing. Never cached: a listing is as fresh as the origin.
    pub async fn list(&self, bucket: &str, request: ListRequest) -> Result<ListPage> {
        self.inner.buckets.origin(bucket).await?.list(request).await
    }

    /// Whether what is fetched of this name, from byte `at` on, will be found in the store: its
    /// disk did not just refuse a write, and if the byte belongs to another node, there is room to
    /// spare.
    pub fn keeps(&self, name: &ObjectName, at: u64) -> bool {
        self.keeps_own(name) && self.keeps_of_others(name, at, None, CHUNK_BYTES)
    }

    /// Whether what this node makes of this name (unpacks, indexes) will be found in the store:
    /// there is a store, and its disk did not just refuse a write.
    pub fn keeps_own(&self, name: &ObjectName) -> bool {
        self.store_for(name).is_some()
            && self.inner.began.elapsed().as_millis() as u64
                >= self.inner.refuses_until_ms.load(Relaxed)
    }

    /// The store, for names whose bucket is cached.
    pub(crate) fn store_for(&self, name: &ObjectName) -> Option<&Arc<Store>> {
        if self.rule(name.bucket()).cache {
            self.inner.store.as_ref()
        } else {
            None
        }
    }
}
