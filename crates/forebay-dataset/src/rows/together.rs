//! Rows of one block that several requests want at the same time are decoded together.
//!
//! Reading one row of Parquet means unpacking a page, and if pages are large that is far more work
//! than the row is worth. Row-wise orders want one row here and one there; but many steps and
//! requests are under way at a time, and while one waits for its turn to decode, others arrive that
//! want rows of the same block. The first request for a block starts a [`Group`]; requests that
//! come before the group has its turn join it, and each takes its own rows from what was decoded.
//!
//! Invariant: a group that can be joined has a task that will close it. The task ends without doing
//! so only when nobody waits for the group any more, and then the group can no longer be joined.

use super::{cache::BlockKey, grown::Grown, pieces::Pieces};
use arrow_array::RecordBatch;
use forebay_core::{Error, Result, sync::Mutex};
use std::{collections::HashMap, sync::Arc};
use tokio::sync::watch;

/// Rows of a block, decoded.
#[derive(Debug)]
pub(super) struct Decoded {
    pub pieces: Pieces,
    /// Which rows these are: each once, ascending.
    pub rows: Vec<u32>,
    /// For the memory that they take.
    pub memory: Grown,
}

impl Decoded {
    /// Some of the rows, each once, ascending; `None`: they are all of them.
    pub fn take(&self, rows: &[u32]) -> Result<Option<RecordBatch>> {
        if rows == self.rows {
            return Ok(None);
        }
        let places = rows
            .iter()
            .map(|row| self.rows.binary_search(row).map(|at| at as u32));
        let places = places
            .collect::<Result<Vec<u32>, _>>()
            .map_err(|_| Error::internal("a row was not decoded with its group"))?;
        self.pieces.take(&places).map(Some)
    }
}

/// How a group ended.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    pub result: Result<Arc<Decoded>>,
    /// There was only one request.
    pub alone: bool,
    /// It failed because it waited too long for memory while it held some.
    pub crowded: bool,
}

type Told = watch::Receiver<Option<Outcome>>;

/// Groups, until they have ended.
#[derive(Default)]
pub(super) struct Together {
    all: Arc<Mutex<Groups>>,
}

#[derive(Default)]
struct Groups {
    /// Those that wait for their turn.
    waiting: HashMap<BlockKey, Waiting>,
    /// Those of which more rows are decoded than were asked for, ascending: who wants just such rows
    /// need not wait for another turn.
    running: HashMap<BlockKey, Running>,
}

struct Running {
    rows: Vec<u32>,
    /// Those that who joined meanwhile waits for.
    joined: Vec<u32>,
    tell: Tell,
}

type Tell = Arc<watch::Sender<Option<Outcome>>>;

struct Waiting {
    rows: Vec<u32>,
    requests: usize,
    tell: Tell,
}

/// The rows of a group whose turn it is, each once and ascending.
pub(super) struct Closed {
    /// Those that were asked for.
    pub asked: Vec<u32>,
    /// All that are to be decoded.
    pub rows: Vec<u32>,
    /// They belong to one request.
    pub alone: bool,
}

/// Held by the task of a group. When it is dropped, the group can no longer be joined, whatever
/// happened to the task.
pub(super) struct Group {
    key: BlockKey,
    tell: Tell,
    all: Arc<Mutex<Groups>>,
}

impl Group {
    fn take(&self, all: &mut Groups) -> Option<Waiting> {
        let waiting = all.waiting.get(&self.key);
        waiting.filter(|w| Arc::ptr_eq(&w.tell, &self.tell))?;
        all.waiting.remove(&self.key)
    }

    fn running<'a>(&self, all: &'a mut Groups) -> Option<&'a mut Running> {
        let running = all.running.get_mut(&self.key);
        running.filter(|running| Arc::ptr_eq(&running.tell, &self.tell))
    }

    /// From now on, nobody joins it.
    fn end(&self, all: &mut Groups) {
        self.take(all);
        if self.running(all).is_some() {
            all.running.remove(&self.key);
        }
    }

    /// Whether nobody waits for the group, which then can no longer be joined. Joining takes the
    /// same lock.
    fn give_up(&self) -> bool {
        let mut all = self.all.lock();
        let left = self.tell.receiver_count() == 0;
        if left {
            self.end(&mut all);
        }
        left
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.end(&mut self.all.lock());
    }
}

impl Closed {
    /// What one request wants.
    pub fn of(rows: Vec<u32>) -> Self {
        Self {
            asked: rows.clone(),
            rows,
            alone: true,
        }
    }
}

impl Together {
    /// A way to wait for rows of a block; and, for the first caller, the group that now has to be
    /// decoded.
    pub fn join(&self, key: BlockKey, rows: &[u32]) -> (Told, Option<Group>) {
        let mut all = self.all.lock();
        if let Some(running) = all.running.get_mut(&key)
            && rows
                .iter()
                .all(|row| running.rows.binary_search(row).is_ok())
        {
            running.joined.extend_from_slice(rows);
            return (running.tell.subscribe(), None);
        }
        if let Some(group) = all.waiting.get_mut(&key) {
            group.rows.extend_from_slice(rows);
            group.requests += 1;
            return (group.tell.subscribe(), None);
        }
        let (tell, told) = watch::channel(None);
        let tell = Arc::new(tell);
        all.waiting.insert(
            key,
            Waiting {
                rows: rows.to_vec(),
                requests: 1,
                tell: tell.clone(),
            },
        );
        (
            told,
            Some(Group {
                key,
                tell,
                all: self.all.clone(),
            }),
        )
    }

    /// How many groups wait.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.all.lock().waiting.len()
    }

    /// Ends the time in which a group can be joined: from now on, only by who wants some of `more`,
    /// which are decoded as well.
    pub fn close(&self, group: &Group, more: &[u32]) -> Closed {
        let mut all = self.all.lock();
        let Some(Waiting {
            rows: mut asked,
            requests,
            ..
        }) = group.take(&mut all)
        else {
            return Closed::of(Vec::new());
        };
        asked.sort_unstable();
        asked.dedup();
        // Another group of the block may not have ended yet: those who joined that one are known there.
        if more.is_empty() || all.running.contains_key(&group.key) {
            return Closed {
                alone: requests == 1,
                ..Closed::of(asked)
            };
        }
        let mut rows: Vec<u32> = asked.iter().chain(more).copied().collect();
        rows.sort_unstable();
        rows.dedup();
        let running = Running {
            rows: rows.clone(),
            joined: Vec::new(),
            tell: group.tell.clone(),
        };
        all.running.insert(group.key, running);
        Closed {
            asked,
            rows,
            alone: false,
        }
    }

    /// The rows that others wait for, who have come since the group was closed.
    pub fn joined(&self, group: &Group) -> Vec<u32> {
        let mut all = self.all.lock();
        let running = group.running(&mut all);
        running.map_or_else(Vec::new, |running| running.joined.clone())
    }

    /// Does the work of a group for as long as anybody waits for it.
    pub async fn run(&self, group: &Group, work: impl Future<Output = Outcome>) {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                outcome = &mut work => {
                    group.tell.send_replace(Some(outcome));
                    return;
                }
                () = group.tell.closed() => if group.give_up() {
                    return;
                }
            }
        }
    }
}

/// Waits for a group.
pub(super) async fn outcome(mut told: Told) -> Result<Outcome> {
    let told = told
        .wait_for(Option::is_some)
        .await
        .map_err(|_| Error::internal("a group of rows was lost"))?;
    told.clone()
        .ok_or_else(|| Error::internal("a group of rows ended with nothing"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{ArrayRef, cast::AsArray, types::Int64Type};
    use forebay_core::VersionId;

    fn key(block: u32) -> BlockKey {
        BlockKey {
            file: 1,
            version: VersionId(2),
            columns: 3,
            block,
        }
    }

    fn decoded(rows: &[u32]) -> Arc<Decoded> {
        let numbers: ArrayRef = Arc::new(arrow_array::Int64Array::from_iter_values(
            rows.iter().map(|&r| i64::from(r) * 10),
        ));
        Arc::new(Decoded {
            pieces: RecordBatch::try_from_iter([("n", numbers)]).unwrap().into(),
            rows: rows.to_vec(),
            memory: Grown::default(),
        })
    }

    #[tokio::test]
    async fn requests_that_join_in_time_share_the_work_and_take_their_own_rows() {
        let together = Together::default();
        let (first, group) = together.join(key(1), &[2, 7]);
        let (second, none) = together.join(key(1), &[0, 7, 9]);
        let (_other, other) = together.join(key(2), &[5]);
        let group = group.unwrap();
        assert!(none.is_none() && other.is_some());
        let work = async {
            let Closed { rows, alone, .. } = together.close(&group, &[]);
            assert_eq!((&rows[..], alone), (&[0, 2, 7, 9][..], false));
            Outcome {
                result: Ok(decoded(&rows)),
                alone,
                crowded: false,
            }
        };
        together.run(&group, work).await;
        let (late, next) = together.join(key(1), &[1]);
        assert!(next.is_some(), "a group that was closed is not joined");
        drop(late);
        for (told, rows) in [(first, &[2, 7][..]), (second, &[0, 7, 9])] {
            let decoded = outcome(told).await.unwrap().result.unwrap();
            let batch = decoded.take(rows).unwrap().unwrap();
            let got: Vec<i64> = batch
                .column(0)
                .as_primitive::<Int64Type>()
                .values()
                .to_vec();
            assert_eq!(
                got,
                rows.iter().map(|&r| i64::from(r) * 10).collect::<Vec<_>>()
            );
        }
        assert!(decoded(&[1, 2]).take(&[3]).is_err());
        assert!(decoded(&[1, 2]).take(&[1, 2]).unwrap().is_none());
    }

    #[tokio::test]
    async fn a_group_that_nobody_waits_for_ends_and_one_that_was_joined_again_does_not() {
        let together = Together::default();
        let (told, group) = together.join(key(1), &[1]);
        drop(told);
        together.run(&group.unwrap(), std::future::pending()).await;
        assert_eq!(together.waiting(), 0);

        let (told, group) = together.join(key(1), &[1]);
        drop(told);
        let (again, none) = together.join(key(1), &[4]);
        assert!(none.is_none(), "the task has not seen yet that it was left");
        let group = group.unwrap();
        together
            .run(&group, async {
                Outcome {
                    result: Ok(decoded(&together.close(&group, &[]).rows)),
                    alone: false,
                    crowded: false,
                }
            })
            .await;
        assert_eq!(outcome(again).await.unwrap().result.unwrap().rows, [1, 4]);
    }

    #[tokio::test]
    async fn a_task_that_is_lost_leaves_nobody_waiting() {
        let together = Together::default();
        let (told, group) = together.join(key(1), &[1]);
        drop(group.unwrap());
        assert!(outcome(told).await.is_err());
        assert!(
            together.join(key(1), &[1]).1.is_some(),
            "the next one has a task of its own"
        );
    }
}
