//! The request that work is done for. Its id goes with the work: through awaits, and into the tasks
//! that are spawned with [`spawn`] for it.
//!
//! Work that several requests wait for has the id of the one that began it.
//!
//! A [`Tally`] goes the same way, and onto threads that may block with [`carried`]: it adds up what
//! the work took, for whoever asks what one request or one job cost.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tokio::task::JoinHandle;

/// The longest id that is taken over.
pub const ID_MAX_BYTES: usize = 128;

tokio::task_local! {
    static ID: Option<Arc<str>>;
    static TALLY: Option<Arc<Tally>>;
}

/// What a [`Tally`] counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// Requests that were answered.
    Requests,
    /// Rows in answers.
    Rows,
    /// Bytes of those.
    RowBytes,
    /// Bytes of rows that were there already, decoded.
    MemoryBytes,
    /// Bytes read from the local disk.
    DiskBytes,
    /// Bytes that other nodes sent.
    PeerBytes,
    /// Bytes that came from elsewhere: from origins, and from other nodes.
    FetchedBytes,
    /// Requests to origins, each attempt counted.
    OriginRequests,
}

const COSTS: usize = 8;

/// What some work took. Its sums only grow, and are added to those of what it is a part of.
#[derive(Debug, Default)]
pub struct Tally {
    sums: [AtomicU64; COSTS],
    of: Vec<Arc<Tally>>,
}

impl Tally {
    /// A tally that is a part of another one.
    pub fn part_of(of: Arc<Tally>) -> Self {
        Self::part_of_all([of])
    }

    /// A tally that is a part of several others.
    pub fn part_of_all(of: impl IntoIterator<Item = Arc<Tally>>) -> Self {
        Self {
            of: of.into_iter().collect(),
            ..Self::default()
        }
    }

    /// Adds to this and to what it is a part of.
    pub fn add(&self, cost: Cost, n: u64) {
        self.sums[cost as usize].fetch_add(n, Relaxed);
        for of in &self.of {
            of.add(cost, n);
        }
    }

    /// The sum so far.
    pub fn get(&self, cost: Cost) -> u64 {
        self.sums[cost as usize].load(Relaxed)
    }

    /// Bytes that came from origins.
    pub fn origin_bytes(&self) -> u64 {
        self.get(Cost::FetchedBytes)
            .saturating_sub(self.get(Cost::PeerBytes))
    }
}

/// The tally of the work that this is a part of, if there is one.
pub fn tally() -> Option<Arc<Tally>> {
    TALLY.try_with(Clone::clone).ok().flatten()
}

/// Adds to the tally of the work that this is a part of, if there is one.
pub fn count(cost: Cost, n: u64) {
    let _ = TALLY.try_with(|tally| {
        if let Some(tally) = tally {
            tally.add(cost, n);
        }
    });
}

/// The work, which adds to this tally.
pub async fn tallied<F: Future>(tally: Arc<Tally>, work: F) -> F::Output {
    TALLY.scope(Some(tally), work).await
}

/// The work, to be done on another thread: it adds to the tally of where this is called.
pub fn carried<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let tally = tally();
    move || TALLY.sync_scope(tally, work)
}

/// Whether an id may go into a log line and a header as it is.
pub fn is_sane_id(id: &str) -> bool {
    !id.is_empty()
        && id.len() <= ID_MAX_BYTES
        && id.bytes().all(|b| {
            b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':' | b'/' | b'+' | b'=')
        })
}

/// The id of the request that this work is done for, if it is known.
pub fn current() -> Option<Arc<str>> {
    ID.try_with(Clone::clone).ok().flatten()
}

/// The work, done for the request with this id.
pub async fn scope<F: Future>(id: Option<Arc<str>>, work: F) -> F::Output {
    ID.scope(id, work).await
}

/// The work, done for the request, and counted by the tally, of where this is called.
pub fn here<F: Future>(work: F) -> impl Future<Output = F::Output> {
    TALLY.scope(tally(), ID.scope(current(), work))
}

/// The same as [`scope`] for work that is done in one go, such as a poll.
pub fn sync_scope<T>(id: &Arc<str>, work: impl FnOnce() -> T) -> T {
    ID.sync_scope(Some(id.clone()), work)
}

/// Spawns a task that works for the same request.
pub fn spawn<F>(work: F) -> JoinHandle<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    match (current(), tally()) {
        (None, None) => tokio::spawn(work),
        (id, None) => tokio::spawn(scope(id, work)),
        (id, Some(tally)) => tokio::spawn(tallied(tally, scope(id, work))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_id_goes_with_the_work_and_no_further() {
        let id: Arc<str> = "r-1".into();
        let work = async {
            tokio::task::yield_now().await;
            let spawned = spawn(async { spawn(async { current() }).await.unwrap() });
            (current(), spawned.await.unwrap())
        };
        let ids = scope(Some(id.clone()), work).await;
        assert_eq!(ids, (Some(id.clone()), Some(id.clone())));
        assert_eq!(current(), None);
        assert_eq!(spawn(async { current() }).await.unwrap(), None);
        assert_eq!(sync_scope(&id, current), Some(id));
    }

    #[tokio::test]
    async fn a_tally_goes_with_the_work_and_onto_threads() {
        let job = Arc::new(Tally::default());
        let request = Arc::new(Tally::part_of(job.clone()));
        let work = async {
            count(Cost::DiskBytes, 1);
            spawn(async {
                count(Cost::FetchedBytes, 10);
                count(Cost::PeerBytes, 4);
                tokio::task::spawn_blocking(carried(|| count(Cost::DiskBytes, 2)))
                    .await
                    .unwrap();
            })
            .await
            .unwrap();
        };
        tallied(request.clone(), work).await;
        // Outside of it, nothing is counted.
        count(Cost::DiskBytes, 100);
        for tally in [&request, &job] {
            assert_eq!((tally.get(Cost::DiskBytes), tally.origin_bytes()), (3, 6));
        }
        tallied(Arc::new(Tally::part_of(job.clone())), async {
            count(Cost::DiskBytes, 5)
        })
        .await;
        assert_eq!(
            (request.get(Cost::DiskBytes), job.get(Cost::DiskBytes)),
            (3, 8)
        );
    }

    #[test]
    fn ids_that_could_begin_a_line_are_not_sane() {
        assert!(is_sane_id("a-b_c.d:e/f+g="));
        for id in ["", "a\nb", "a b", "ü", &"x".repeat(ID_MAX_BYTES + 1)] {
            assert!(!is_sane_id(id), "{id:?}");
        }
    }
}
