//! Warm-up: bringing whole objects to the local disk before anybody asks for them.

use crate::{Engine, ReadOptions, bytesio::blocking, fill::chunk_range, resolve::Currency};
use forebay_core::{Error, ErrorKind, ObjectName, Result, VersionId, limits::CHUNK_BYTES};
use futures::StreamExt;
use serde::Serialize;
use std::time::{Duration, Instant};

/// The result for one object.
#[derive(Clone, Debug)]
pub enum WarmOutcome {
    /// Brought now (in a dry run: would be brought).
    Warmed {
        /// Bytes that were missing here.
        bytes: u64,
    },
    /// The whole object was here and current.
    AlreadyThere {
        /// The object's size.
        bytes: u64,
    },
    /// The object does not exist.
    Missing,
    /// The origin does not let this node read it.
    Denied,
    /// Any other reason why it was not brought and kept.
    Failed(Error),
}

/// What a node of a cluster has brought of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmPart {
    /// The object's size.
    pub size: u64,
    /// The version that was brought.
    pub version: VersionId,
    /// Bytes that came now (in a dry run: would come).
    pub brought: u64,
    /// Bytes that were here.
    pub there: u64,
    /// Where to go on, if there is more to do.
    pub next: Option<u64>,
}

/// Sums over a warm-up. Objects are counted once each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WarmReport {
    /// Objects brought (in a dry run: objects that would be brought).
    pub warmed: u64,
    /// Bytes of those objects that were missing here.
    pub warmed_bytes: u64,
    /// Objects that were here and current.
    pub already_there: u64,
    /// Their sizes, bytes.
    pub already_there_bytes: u64,
    /// Objects that the origin does not have.
    pub missing: u64,
    /// Objects that the origin does not let this node read.
    pub denied: u64,
    /// Objects that failed for any other reason.
    pub failed: u64,
}

impl WarmReport {
    /// Adds one object's outcome.
    pub fn count(&mut self, outcome: &WarmOutcome) {
        match outcome {
            WarmOutcome::Warmed { bytes } => {
                self.warmed += 1;
                self.warmed_bytes += bytes;
            }
            WarmOutcome::AlreadyThere { bytes } => {
                self.already_there += 1;
                self.already_there_bytes += bytes;
            }
            WarmOutcome::Missing => self.missing += 1,
            WarmOutcome::Denied => self.denied += 1,
            WarmOutcome::Failed(_) => self.failed += 1,
        }
    }

    /// The number of all objects, whatever their outcome.
    pub fn objects(&self) -> u64 {
        self.warmed + self.already_there + self.missing + self.denied + self.failed
    }
}

impl Engine {
    /// Brings one whole object to the local disk, and makes sure that it is there: if the disk
    /// refused it, that is a failure. A dry run asks the origin only for the head and says what
    /// would be done.
    pub async fn warm(&self, name: &ObjectName, dry_run: bool) -> WarmOutcome {
        match self.for_disk().warm_inner(name, dry_run).await {
            Ok(outcome) => outcome,
            Err(e) => match e.kind() {
                ErrorKind::NotFound => WarmOutcome::Missing,
                ErrorKind::PermissionDenied | ErrorKind::Unauthenticated => WarmOutcome::Denied,
                _ => WarmOutcome::Failed(e),
            },
        }
    }

    /// Brings those bytes of an object to the local disk of which `owns` says that they are this
    /// node's (asked for the first byte of each chunk), from the byte `from` on, until `most` bytes
    /// came, or `time` has passed.
    ///
    /// # Errors
    /// What keeps them from being brought and kept.
    pub async fn warm_own(
        &self,
        name: &ObjectName,
        owns: impl Fn(u64) -> bool + Send + Sync,
        from: u64,
        most: u64,
        time: Duration,
        dry_run: bool,
    ) -> Result<WarmPart> {
        let engine = self.for_disk();
        // An unknown object is fetched at once, and what comes with its head counts as brought.
        let is_new = from == 0 && !dry_run && owns(0) && engine.cached(name).await?.is_none();
        if is_new {
            engine.resolve_for(name, None, Currency::ByRule).await?;
        }
        let meta = engine.head(name, &ReadOptions::default()).await?.meta;
        let mut part = WarmPart {
            size: meta.size,
            version: meta.version(),
            brought: 0,
            there: 0,
            next: None,
        };
        if meta.size <= CHUNK_BYTES {
            if owns(0) {
                match engine.warm_inner(name, dry_run).await? {
                    WarmOutcome::AlreadyThere { bytes } if !is_new => part.there = bytes,
                    WarmOutcome::AlreadyThere { .. } => part.brought = meta.size,
                    WarmOutcome::Warmed { bytes } => part.brought = bytes,
                    WarmOutcome::Failed(e) => return Err(e),
                    WarmOutcome::Missing | WarmOutcome::Denied => {}
                }
            }
            return Ok(part);
        }
        let length = |i: u32| {
            let range = chunk_range(i, meta.size);
            range.end - range.start
        };
        let here = |i: u32| engine.has_chunks(name, &meta, &chunk_range(i, meta.size));
        let until = meta.size.div_ceil(CHUNK_BYTES) as u32;
        let (mut own, mut wanted, mut wanted_bytes) = (Vec::new(), Vec::new(), 0);
        for i in (from / CHUNK_BYTES).min(u64::from(until)) as u32..until {
            let at = u64::from(i) * CHUNK_BYTES;
            if !owns(at) {
                continue;
            }
            let is_here = here(i);
            if !is_here && !dry_run {
                if wanted_bytes >= most {
                    part.next = Some(at);
                    break;
                }
                wanted_bytes += length(i);
                wanted.push(i);
            }
            own.push((i, is_here && !is_new));
        }
        let began = Instant::now();
        let in_time = wanted.iter().copied();
        let in_time = in_time.take_while(|_| began.elapsed() < time);
        // What belongs to a later call is left to it.
        let until = wanted.last().map_or(until, |last| last + 1);
        let mut work = futures::stream::iter(in_time)
            .map(|i| {
                let (engine, name, meta) = (engine.clone(), name.clone(), meta.clone());
                let bytes = 0..length(i);
                async move { engine.chunk(&name, &meta, i, bytes, until).await.map(drop) }
            })
            .buffered(8);
        let mut done = 0;
        while let Some(chunk) = work.next().await {
            chunk?;
            done += 1;
        }
        drop(work);
        if let Some(&i) = wanted.get(done) {
            part.next = Some(u64::from(i) * CHUNK_BYTES);
        }
        if !wanted[..done].iter().all(|&i| here(i)) {
            return Err(not_kept(name));
        }
        let end = part.next.unwrap_or(meta.size);
        for (i, was_here) in own {
            match was_here {
                _ if u64::from(i) * CHUNK_BYTES >= end => break,
                true => part.there += length(i),
                false => part.brought += length(i),
            }
        }
        Ok(part)
    }

    async fn warm_inner(&self, name: &ObjectName, dry_run: bool) -> Result<WarmOutcome> {
        let Some(store) = self.store_for(name).cloned() else {
            return Err(Error::unsupported(format!(
                "bucket {} is not cached on this node",
                name.bucket()
            ))
            .hint("give the node a cache directory, or set cache = true for the bucket"));
        };
        // An unknown object is fetched at once: a small one then costs one request, not two.
        let unknown = !dry_run && self.cached(name).await?.is_none();
        if unknown {
            let resolved = self.resolve_for(name, None, Currency::ByRule).await?;
            if resolved.data.is_some() && store.peek(name).is_some_and(|p| p.inline) {
                return Ok(WarmOutcome::Warmed {
                    bytes: resolved.meta.size,
                });
            }
        }
        let head = self.head(name, &ReadOptions::default()).await?;
        let size = head.meta.size;
        // Reads the disk for a small object.
        let here_bytes = || {
            let (store, name, meta) = (store.clone(), name.clone(), head.meta.clone());
            blocking(move || store.coverage(&name, &meta))
        };
        let is_here = match size <= CHUNK_BYTES {
            true => store.peek(name).is_some_and(|p| p.inline) && here_bytes().await? == size,
            false => self.has_chunks(name, &head.meta, &(0..size)),
        };
        if is_here {
            return Ok(if unknown {
                WarmOutcome::Warmed { bytes: size }
            } else {
                WarmOutcome::AlreadyThere { bytes: size }
            });
        }
        if dry_run {
            return Ok(WarmOutcome::Warmed {
                bytes: size - here_bytes().await?.min(size),
            });
        }
        // Counted before anything is fetched: a run may bring chunks before they are checked.
        let missing = |i: &u32| !self.has_chunks(name, &head.meta, &chunk_range(*i, size));
        let (brought, meta) = if size <= CHUNK_BYTES {
            let resolved = self.resolve_for(name, None, Currency::ByRule).await?;
            (resolved.meta.size, resolved.meta)
        } else {
            let chunks = 0..size.div_ceil(CHUNK_BYTES) as u32;
            let until = chunks.end;
            let bytes = chunks
                .clone()
                .filter(missing)
                .map(|i| chunk_range(i, size))
                .map(|r| r.end - r.start)
                .sum();
            let mut work = futures::stream::iter(chunks.filter(missing))
                .map(|i| {
                    let range = chunk_range(i, size);
                    let (engine, name, meta) = (self.clone(), name.clone(), head.meta.clone());
                    async move {
                        // Without its bytes: they hold memory that an earlier chunk may need.
                        engine
                            .chunk(&name, &meta, i, 0..range.end - range.start, until)
                            .await
                            .map(drop)
                    }
                })
                .buffered(8);
            while let Some(chunk) = work.next().await {
                chunk?;
            }
            drop(work);
            (bytes, head.meta.clone())
        };
        let here = match meta.size <= CHUNK_BYTES {
            true => store.peek(name).is_some_and(|p| p.inline),
            false => self.has_chunks(name, &meta, &(0..meta.size)),
        };
        if !here {
            return Err(not_kept(name));
        }
        // If the object was unknown, all of it came now: some of it with the answer to the first
        // question.
        Ok(WarmOutcome::Warmed {
            bytes: if unknown { meta.size } else { brought },
        })
    }
}

fn not_kept(name: &ObjectName) -> Error {
    Error::internal(format!("{name} was fetched, but the cache did not keep it"))
        .hint("check that the cache is large enough and its disk writable: see `forebay status`")
}
