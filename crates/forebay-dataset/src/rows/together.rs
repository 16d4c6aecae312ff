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

/// Groups that wait for their turn.
#[derive(Default)]
pub(super) struct Together {
    waiting: Arc<Mutex<HashMap<BlockKey, Waiting>>>,
}

struct Waiting {
    rows: Vec<u32>,
    requests: usize,
    tell: Arc<watch::Sender<Option<Outcome>>>,
}

/// Held by the task of a group. When it is dropped, the group can no longer be joined, whatever
/// happened to the task.
pub(super) struct Group {
    key: BlockKey,
    tell: Arc<watch::Sender<Option<Outcome>>>,
    of: Arc<Mutex<HashMap<BlockKey, Waiting>>>,
}

impl Group {
    fn take(&self) -> Option<Waiting> {
        let mut waiting = self.of.lock();
        let found = waiting
            .get(&self.key)
            .is_some_and(|w| Arc::ptr_eq(&w.tell, &self.tell));
        if found {
            waiting.remove(&self.key)
        } else {
            None
        }
    }

    /// Whether nobody waits for the group, which then can no longer be joined. Joining takes the
    /// same lock.
    fn give_up(&self) -> bool {
        let mut waiting = self.of.lock();
        let left = self.tell.receiver_count() == 0;
        if left
            && waiting
                .get(&self.key)
                .is_some_and(|w| Arc::ptr_eq(&w.tell, &self.tell))
        {
            waiting.remove(&self.key);
        }
        left
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.take();
    }
}

impl Together {
    /// A way to wait for rows of a block; and, for the first caller, the group that now has to be
    /// decoded.
    pub fn join(&self, key: BlockKey, rows: &[u32]) -> (Told, Option<Group>) {
        let mut waiting = self.waiting.lock();
        if let Some(group) = waiting.get_mut(&key) {
            group.rows.extend_from_slice(rows);
            group.requests += 1;
            return (group.tell.subscribe(), None);
        }
        let (tell, told) = watch::channel(None);
        let tell = Arc::new(tell);
        waiting.insert(
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
                of: self.waiting.clone(),
            }),
        )
    }

    /// How many groups wait.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.waiting.lock().len()
    }

    /// Ends the time in which a group can be joined. Returns its rows, each once and ascending, and
    /// whether they belong to one request.
    pub fn close(&self, group: &Group) -> (Vec<u32>, bool) {
        let closed = group.take();
        let Some(Waiting {
            mut rows, requests, ..
        }) = closed
        else {
            return (Vec::new(), true);
        };
        rows.sort_unstable();
        rows.dedup();
        (rows, requests == 1)
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
            let (rows, alone) = together.close(&group);
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
        assert!(together.waiting.lock().is_empty());

        let (told, group) = together.join(key(1), &[1]);
        drop(told);
        let (again, none) = together.join(key(1), &[4]);
        assert!(none.is_none(), "the task has not seen yet that it was left");
        let group = group.unwrap();
        together
            .run(&group, async {
                Outcome {
                    result: Ok(decoded(&together.close(&group).0)),
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
