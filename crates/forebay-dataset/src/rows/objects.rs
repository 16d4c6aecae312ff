//! Rows that are whole objects: `key`, `data`, and a `label` if the dataset has labels.
//!
//! One cursor goes over the rows in order. On a worker thread it lets the engine append what is on
//! the local disk to the buffer that becomes the column's, one object after the other without a
//! hand-over; at an object that is not there it returns to the async side, where objects are
//! fetched ahead of it, many at a time. Fetched objects wait on the disk, or, if the disk does not
//! keep them, in memory that can be spared.
//!
//! Invariant: after each step, `ends` has one offset for each row that is in `data`, whole and of
//! the dataset's version.

use super::{INLINE_ROWS, RowBatch, RowMemory, Rows, joined, of_file, wants};
use crate::Dataset;
use arrow_array::{
    ArrayRef, BinaryArray, Int64Array, RecordBatch, RecordBatchOptions, StringArray,
};
use arrow_buffer::{Buffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, FieldRef, SchemaRef};
use forebay_core::{CacheStatus, Error, ObjectMeta, ObjectName, Reservation, Result, request};
use forebay_engine::{Engine, Wait};
use std::{collections::VecDeque, sync::Arc};
use tokio::task::JoinHandle;

/// An object that was fetched for the cursor: how, and its bytes if the disk does not keep them.
type Fetched = (CacheStatus, Option<(Vec<u8>, Reservation)>);

struct Cursor {
    engine: Engine,
    dataset: Arc<Dataset>,
    rows: Arc<[u64]>,
    data: Vec<u8>,
    ends: Vec<i32>,
    /// What the object at the cursor counts as, if it was fetched.
    fetched: Option<CacheStatus>,
}

impl Cursor {
    fn at(&self) -> usize {
        self.ends.len() - 1
    }

    fn object(&self, at: usize) -> (ObjectName, ObjectMeta) {
        let file = self.dataset.file(self.rows[at] as u32);
        let meta = file.meta();
        (file.name, meta)
    }

    /// Appends objects from the local disk up to the first that is not there.
    fn append_warm(&mut self) {
        while self.at() < self.rows.len() {
            let (name, meta) = self.object(self.at());
            let whole = 0..meta.size;
            let here = self
                .engine
                .append_version(&name, &meta, whole, Wait::May, &mut self.data);
            if here != Ok(true) {
                return;
            }
            self.appended();
        }
    }

    fn appended(&mut self) {
        self.engine
            .stats()
            .count_read(self.fetched.take().unwrap_or(CacheStatus::Hit));
        // Checked before any byte was read: all rows together fit.
        self.ends.push(self.data.len() as i32);
    }
}

impl Rows {
    pub(super) async fn read_objects(
        &self,
        dataset: &Arc<Dataset>,
        rows: &[u64],
        schema: SchemaRef,
        memory: RowMemory,
    ) -> Result<RowBatch> {
        let data = if wants(&schema, "data") {
            Some(self.object_data(dataset, rows).await?)
        } else {
            None
        };
        let columns = match rows.len() > INLINE_ROWS {
            false => columns(dataset, rows, &schema, data)?,
            true => {
                let (dataset, rows, schema) = (dataset.clone(), rows.to_vec(), schema.clone());
                let made =
                    tokio::task::spawn_blocking(move || columns(&dataset, &rows, &schema, data));
                joined(made.await)??
            }
        };
        let options = RecordBatchOptions::new().with_row_count(Some(rows.len()));
        let batch = RecordBatch::try_new_with_options(schema, columns, &options)
            .map_err(|e| Error::internal("rows of objects do not fit their schema").caused_by(e))?;
        Ok(RowBatch { batch, memory })
    }

    async fn object_data(&self, dataset: &Arc<Dataset>, rows: &[u64]) -> Result<ArrayRef> {
        let bytes = rows.iter().fold(0u64, |sum, &row| {
            sum.saturating_add(dataset.files().size(row as usize))
        });
        let mut ends = Vec::with_capacity(rows.len() + 1);
        ends.push(0);
        let mut cursor = Cursor {
            engine: self.inner.engine.clone(),
            dataset: dataset.clone(),
            rows: rows.into(),
            data: Vec::with_capacity(bytes as usize),
            ends,
            fetched: None,
        };
        let mut ahead = Ahead {
            config: &self.inner.config,
            next: 0,
            deceived: false,
            pending: VecDeque::new(),
        };
        loop {
            cursor = joined(
                tokio::task::spawn_blocking(request::carried(move || {
                    cursor.append_warm();
                    cursor
                }))
                .await,
            )?;
            if cursor.at() == cursor.rows.len() {
                break;
            }
            ahead.cold(&mut cursor).await.map_err(|e| {
                let row = cursor.rows[cursor.at()];
                of_file(e, row, &dataset.file(row as u32))
            })?;
        }
        let offsets = OffsetBuffer::new(ScalarBuffer::from(cursor.ends));
        let column = BinaryArray::try_new(offsets, Buffer::from_vec(cursor.data), None);
        Ok(Arc::new(column.map_err(|e| {
            Error::internal("objects do not make a column").caused_by(e)
        })?))
    }
}

/// The wanted columns. The memory for all of them is reserved.
fn columns(
    dataset: &Dataset,
    rows: &[u64],
    schema: &SchemaRef,
    data: Option<ArrayRef>,
) -> Result<Vec<ArrayRef>> {
    let files = dataset.files();
    let column = |field: &FieldRef| -> Result<ArrayRef> {
        Ok(match field.name().as_str() {
            "data" => data
                .clone()
                .ok_or_else(|| Error::internal("the column of objects was not read"))?,
            "key" => Arc::new(StringArray::from_iter_values(
                rows.iter().map(|&row| files.key(row as usize)),
            )),
            // According to the dataset, labels are all numbers, or text.
            _ if field.data_type() == &DataType::Int64 => {
                Arc::new(Int64Array::from_iter(rows.iter().map(|&row| {
                    dataset
                        .label(row as usize)
                        .and_then(|label| label.parse::<i64>().ok())
                })))
            }
            _ => Arc::new(StringArray::from_iter(
                rows.iter().map(|&row| dataset.label(row as usize)),
            )),
        })
    };
    schema.fields().iter().map(column).collect()
}

/// Objects that are fetched ahead of the cursor; dropping it stops that (fills that were started
/// continue for others).
struct Ahead<'a> {
    config: &'a super::RowsConfig,
    /// The first row that was not looked at.
    next: usize,
    /// An object was thought to be here but was not: another version of it is. From then on, no
    /// object is assumed present without a look at its record.
    deceived: bool,
    pending: VecDeque<(usize, JoinHandle<Result<Fetched>>)>,
}

impl Drop for Ahead<'_> {
    fn drop(&mut self) {
        for (_, task) in &self.pending {
            task.abort();
        }
    }
}

impl Ahead<'_> {
    /// Brings the object at the cursor and appends it; starts fetching those after it.
    async fn cold(&mut self, cursor: &mut Cursor) -> Result<()> {
        let at = cursor.at();
        self.deceived |= self.next > at && !self.pending.iter().any(|(i, _)| *i == at);
        if self.deceived && self.pending.is_empty() {
            self.next = at;
        }
        self.begin(cursor);
        while let Some((i, _)) = self.pending.front()
            && *i < at
        {
            self.pending.pop_front();
        }
        let (name, meta) = cursor.object(at);
        let meta = Arc::new(meta);
        let mut status = CacheStatus::Miss;
        if self.pending.front().is_some_and(|(i, _)| *i == at) {
            // Left in the queue while waiting for it: dropping the queue aborts it.
            if let Some((_, task)) = self.pending.front_mut() {
                let (how, held) = joined(task.await)??;
                status = how;
                self.pending.pop_front();
                if let Some((bytes, _memory)) = held {
                    cursor.data.extend_from_slice(&bytes);
                    cursor.fetched = Some(status);
                    cursor.appended();
                    return Ok(());
                }
            }
            // What was just written is in the page cache; if it is not, the read below waits for it
            // on another thread.
            let whole = 0..meta.size;
            let here =
                cursor
                    .engine
                    .append_version(&name, &meta, whole, Wait::MustNot, &mut cursor.data);
            if here == Ok(true) {
                cursor.fetched = Some(status);
                cursor.appended();
                return Ok(());
            }
        }
        let read = cursor
            .engine
            .read_version(&name, &meta, 0..meta.size, &mut cursor.data)
            .await?;
        cursor.fetched = Some(match read {
            CacheStatus::Hit => status,
            other => other,
        });
        cursor.appended();
        Ok(())
    }

    fn begin(&mut self, cursor: &Cursor) {
        self.next = self.next.max(cursor.at());
        let horizon = (cursor.at() + self.config.objects_ahead.max(1)).min(cursor.rows.len());
        while self.next < horizon {
            let at = self.next;
            self.next += 1;
            let (name, meta) = cursor.object(at);
            if at > cursor.at()
                && !self.deceived
                && cursor
                    .engine
                    .may_have_version(&name, &meta, &(0..meta.size))
            {
                continue;
            }
            let (engine, meta) = (cursor.engine.clone(), Arc::new(meta));
            self.pending.push_back((
                at,
                request::spawn(async move { fetch(&engine, &name, &meta).await }),
            ));
        }
    }
}

async fn fetch(engine: &Engine, name: &ObjectName, meta: &Arc<ObjectMeta>) -> Result<Fetched> {
    let whole = 0..meta.size;
    if engine.keeps(name, 0) {
        let status = engine.bring_version(name, meta, whole.clone()).await?;
        if engine.keeps(name, 0) {
            return Ok((status, None));
        }
    }
    // Held in memory, if any can be spared; otherwise the cursor reads it when it gets there.
    let Ok(memory) = engine.budget().try_hold(meta.size) else {
        return Ok((CacheStatus::Miss, None));
    };
    let mut bytes = Vec::with_capacity(meta.size as usize);
    let status = engine.read_version(name, meta, whole, &mut bytes).await?;
    Ok((status, Some((bytes, memory))))
}
