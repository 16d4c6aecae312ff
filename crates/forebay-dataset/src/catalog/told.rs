//! What clients told this node of datasets, by its id: compositions, and the lengths of rows.
//!
//! It is kept in RAM only, in the memory budget. Beyond a share of the memory for datasets, what was
//! used least recently goes, unless that was just now; and a node that does not know it says so:
//! whoever reads by it has it and tells it again.

use super::{
    registry::Datasets,
    view::{Made, View, Views},
};
use crate::{Access, blocking::blocking};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, MemoryBudget, Reservation, Result, sync::Mutex};
use forebay_protocol::composition::{self, Parts};
use futures::future::BoxFuture;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Semaphore;

/// Reading a body takes up to so many times its bytes: small chunks of sets grow most.
const READING_FACTOR: u64 = 10;
/// What was told or used within this time stays: a stream tells of several things, and then asks for
/// all of them.
const STAYS: Duration = Duration::from_secs(60);
/// Memory of an entry besides what it holds.
const ENTRY_BYTES: u64 = 512;

/// What is in RAM.
pub(super) struct Told {
    kept: Mutex<Kept>,
    /// Who reads what was told: one at a time, to the end, also if the caller leaves.
    reading: Arc<Semaphore>,
}

impl Default for Told {
    fn default() -> Self {
        Self {
            kept: Mutex::default(),
            reading: Arc::new(Semaphore::new(1)),
        }
    }
}

#[derive(Default)]
struct Kept {
    by_id: HashMap<String, (Known, Instant)>,
    bytes: u64,
}

#[derive(Clone)]
enum Known {
    Made(Arc<Made>),
    Lengths(Arc<RowLengths>),
}

/// The lengths of all rows of a dataset or composition.
pub(crate) struct RowLengths {
    lengths: Box<[u32]>,
    /// Counts them for as long as anybody holds them.
    _held: Reservation,
}

impl RowLengths {
    pub fn get(&self, row: u64) -> Option<u32> {
        self.lengths.get(usize::try_from(row).ok()?).copied()
    }

    pub fn rows(&self) -> u64 {
        self.lengths.len() as u64
    }
}

impl Known {
    fn memory_bytes(&self) -> u64 {
        ENTRY_BYTES
            + match self {
                Known::Made(made) => made.memory_bytes,
                Known::Lengths(of) => size_of_val(&*of.lengths) as u64,
            }
    }
}

impl Kept {
    fn get(&mut self, id: &str) -> Option<Known> {
        let (known, used) = self.by_id.get_mut(id)?;
        *used = Instant::now();
        Some(known.clone())
    }

    /// Keeps it. What it is in place of says the same.
    fn keep(&mut self, id: &str, known: Known, most: u64) {
        self.bytes += known.memory_bytes();
        if let Some((before, _)) = self.by_id.insert(id.to_owned(), (known, Instant::now())) {
            self.bytes -= before.memory_bytes();
        }
        self.shrink(most);
    }

    /// Lets go of what was used least recently, until the rest takes no more than this.
    fn shrink(&mut self, most: u64) {
        if self.bytes <= most {
            return;
        }
        let old = self
            .by_id
            .iter()
            .filter(|(_, (_, used))| used.elapsed() > STAYS);
        let mut old: Vec<_> = old.map(|(id, (_, used))| (*used, id.clone())).collect();
        old.sort_unstable();
        for (_, id) in old {
            if self.bytes <= most {
                break;
            }
            if let Some((gone, _)) = self.by_id.remove(&id) {
                self.bytes -= gone.memory_bytes();
            }
        }
    }
}

impl Datasets {
    /// Memory for reading a body, without waiting for it: whoever waited would hold the body
    /// meanwhile, which others wait for.
    fn reading(&self, body: &Bytes) -> Result<Reservation> {
        let budget = self.engine().budget();
        let bytes = (body.len() as u64).saturating_mul(READING_FACTOR);
        let bytes = bytes.min(budget.holdable_bytes() / 2);
        budget.try_hold(bytes).or_else(|_| {
            self.told().kept.lock().shrink(0);
            budget.try_hold(bytes)
        })
    }

    /// Rows that are made of those of datasets which are open here, as a client describes them: the
    /// body of the request.
    ///
    /// # Errors
    /// `Invalid` for a description that makes no sense, `NotFound` for a dataset that is not known
    /// here, `PermissionDenied`, `Busy` if the memory budget has no room to read it.
    pub fn compose<'a>(
        &'a self,
        body: Bytes,
        access: &'a dyn Access,
    ) -> BoxFuture<'a, Result<View>> {
        Box::pin(async move {
            let permit = self.told().reading.clone().acquire_owned().await;
            let held = self.reading(&body)?;
            let (parts, turn) = blocking(move || (Parts::read(&body), (permit, held))).await?;
            let parts = parts?;
            let mut bases = Vec::with_capacity(parts.header.bases.len());
            for id in &parts.header.bases {
                bases.push(self.get(id, access).await?);
            }
            let (of, budget) = (bases.clone(), self.engine().budget().clone());
            let made = blocking(move || {
                let made = Made::new(&parts, &of, &budget).map(Arc::new);
                drop(turn);
                made
            });
            let made = made.await??;
            let known = Known::Made(made.clone());
            let mut kept = self.told().kept.lock();
            kept.keep(made.id(), known, self.told_most());
            Ok(View::composed(made, bases))
        })
    }

    /// Takes the lengths of all rows of a dataset or composition, the body of the request. Returns
    /// their id, and how many they are.
    ///
    /// # Errors
    /// `Invalid` for anything else, as [`Datasets::view`] about the dataset, `Busy` if the
    /// memory budget has no room to read it.
    pub fn measure<'a>(
        &'a self,
        of: &'a str,
        body: Bytes,
        access: &'a dyn Access,
    ) -> BoxFuture<'a, Result<(String, u64)>> {
        Box::pin(async move {
            let rows = self.view(of, access).await?.shape().rows();
            let permit = self.told().reading.clone().acquire_owned().await;
            let budget: MemoryBudget = self.engine().budget().clone();
            let read = blocking(move || {
                let _turn = permit;
                let lengths = composition::read_lengths(&body)?.into_boxed_slice();
                if lengths.len() as u64 != rows {
                    return Err(Error::invalid(format!(
                        "{} lengths for {rows} rows",
                        lengths.len()
                    ))
                    .hint("give one length for each row"));
                }
                let lengths = RowLengths {
                    _held: budget.try_hold(size_of_val(&*lengths) as u64)?,
                    lengths,
                };
                Ok((composition::lengths_identity(&body), Arc::new(lengths)))
            });
            let (id, lengths) = read.await??;
            let most = self.told_most();
            let known = Known::Lengths(lengths);
            self.told().kept.lock().keep(&id, known, most);
            Ok((id, rows))
        })
    }

    /// Lengths that were told before.
    ///
    /// # Errors
    /// `NotFound` if they are not known here (any more).
    pub(crate) fn lengths(&self, id: &str) -> Result<Arc<RowLengths>> {
        match self.told().kept.lock().get(id) {
            Some(Known::Lengths(lengths)) => Ok(lengths),
            _ => {
                let id = forebay_core::name::shorten(id);
                let e = Error::not_found(format!("this node does not know the lengths {id:?}"));
                Err(e.hint("tell it of them: POST /v1/datasets/<id>/lengths"))
            }
        }
    }

    /// What a plan calls a dataset: one that was opened, or a composition.
    ///
    /// # Errors
    /// `NotFound` if it, or a dataset that it is made of, is not known here (any more);
    /// `PermissionDenied`.
    pub async fn view(&self, id: &str, access: &dyn Access) -> Result<View> {
        let known = self.told().kept.lock().get(id);
        let Some(Known::Made(made)) = known else {
            return Ok(View::whole(self.get(id, access).await?));
        };
        let mut bases = Vec::with_capacity(made.bases.len());
        for base in &made.bases {
            bases.push(self.get(base, access).await?);
        }
        Ok(View::composed(made, bases))
    }

    /// All sources of a plan.
    ///
    /// # Errors
    /// As [`Datasets::view`]; `Invalid` for too many.
    pub async fn views<'a>(
        &self,
        ids: impl Iterator<Item = &'a str> + Send,
        access: &dyn Access,
    ) -> Result<Views> {
        let mut views = Vec::new();
        for id in ids {
            let found = self.view(id, access).await;
            let found = found.map_err(|e| match e.kind() {
                ErrorKind::NotFound => e.hint(
                    "open the dataset at each node that reads it: POST /v1/datasets; what is made \
                     of datasets: POST /v1/datasets/compositions",
                ),
                _ => e,
            })?;
            views.push(Arc::new(found));
        }
        Views::new(views)
    }

    /// What clients told of datasets and is in RAM, and the memory it takes.
    pub fn told_kept(&self) -> (usize, u64) {
        let kept = self.told().kept.lock();
        (kept.by_id.len(), kept.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::MemoryBudget;

    fn lengths(budget: &MemoryBudget, rows: usize) -> Known {
        let lengths = vec![1; rows].into_boxed_slice();
        Known::Lengths(Arc::new(RowLengths {
            _held: budget.try_hold(rows as u64 * 4).unwrap(),
            lengths,
        }))
    }

    #[test]
    fn what_was_used_least_recently_goes_unless_that_was_just_now() {
        let budget = MemoryBudget::new(64 << 20);
        let mut kept = Kept::default();
        for n in 0..4 {
            kept.keep(&n.to_string(), lengths(&budget, 1000), 100);
        }
        assert_eq!(
            (kept.by_id.len(), kept.bytes),
            (4, 4 * (4000 + ENTRY_BYTES))
        );
        // The same again takes no more.
        kept.keep("3", lengths(&budget, 1000), 100);
        assert_eq!(kept.bytes, 4 * (4000 + ENTRY_BYTES));
        let long_ago = Instant::now().checked_sub(2 * STAYS).unwrap();
        for (id, ago) in [("0", 10), ("1", 20), ("2", 0)] {
            let at = long_ago.checked_sub(Duration::from_secs(ago)).unwrap();
            kept.by_id.get_mut(id).unwrap().1 = at;
        }
        kept.get("1");
        kept.keep("4", lengths(&budget, 1), 2 * (4000 + ENTRY_BYTES) + 2000);
        let mut left: Vec<&str> = kept.by_id.keys().map(String::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["1", "3", "4"], "0 and 2 were not used for long");
        kept.shrink(0);
        assert_eq!(kept.by_id.len(), 3);
        drop(kept);
        assert_eq!(budget.used_bytes(), 0, "what goes is given back");
    }
}
