//! Where the rows of a stream come from.

use crate::{
    Dataset, Format, Moment, RowBatch, Rows, Shares, Views, blocking::blocking, follow::Following,
};
use arrow_array::{RecordBatch, RecordBatchOptions};
use arrow_schema::{DataType, Field, FieldRef, Schema, SchemaRef};
use forebay_core::{Error, Result};
use forebay_format::tabular::{Projection, cast};
use forebay_plan::RowRef;
use futures::{StreamExt, TryStreamExt, future::BoxFuture, stream};
use std::{borrow::Cow, sync::Arc};

/// Rows of a step whose places are looked up on the runtime's threads.
const INLINE_ROWS: usize = 256;
/// Datasets of a mix that one step reads at the same time.
const SOURCES_AT_ONCE: usize = 16;

/// Rows, and what must be kept as long as their memory is used.
pub(super) struct Given {
    pub batch: RecordBatch,
    pub memory: Box<dyn Send + Sync>,
}

/// A block that is ready as long as this exists.
pub(super) struct Held {
    /// Memory that it takes.
    pub bytes: u64,
    /// Whether it had to be fetched or decoded.
    pub cold: bool,
    pub _keep: Box<dyn Send + Sync>,
}

/// What a node has done for rows.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    /// Blocks that were decoded, wholly or in part, each time that they were, unless rather for rows to
    /// come.
    pub blocks: u64,
    /// Rows of answers.
    pub rows: u64,
}

pub(super) trait Source: Send + Sync + 'static {
    /// The rows of a step, in this order.
    fn read<'a>(&'a self, rows: &'a [RowRef]) -> BoxFuture<'a, Result<Given>>;

    /// Makes a block ready.
    fn hold(&self, source: u32, block: u64) -> BoxFuture<'_, Result<Held>>;

    /// Whether to make blocks ready ahead of time.
    fn looks_ahead(&self) -> bool;

    /// Bytes of an average row.
    fn expected_row_bytes(&self) -> u64;

    fn shares(&self) -> Shares;

    /// What the node has decoded, and answered, so far.
    fn work(&self) -> Work;

    /// Reports that everything before this epoch and position has been handed over.
    fn passed(&self, epoch: u64, position: u64);
}

/// Bytes of an average row of these datasets, in their files.
pub(super) fn expected_row_bytes(views: &Views) -> u64 {
    let datasets = views.bases().iter();
    let (bytes, rows) = datasets.fold((0u64, 0), |(bytes, rows), d| {
        (d.bytes().saturating_add(bytes), rows + d.rows())
    });
    bytes / rows.max(1)
}

/// Rows of datasets.
pub(super) struct DatasetSource {
    rows: Rows,
    /// The cache follows the plan, at the place of this connection.
    following: Option<Following>,
    views: Views,
    columns: Projection,
    /// The columns of all rows, if the datasets' differ in whether values, or what is within them,
    /// may be missing, or in what else they say.
    common: Option<SchemaRef>,
    /// Whether consecutive rows of the order come from few blocks: true for all orders except the
    /// row-wise one.
    by_blocks: bool,
    /// The reading counters when this began.
    since: Moment,
}

impl DatasetSource {
    /// # Errors
    /// `Invalid` for a column that does not exist, and for datasets whose rows have different
    /// columns.
    pub fn new(
        rows: Rows,
        following: Option<Following>,
        views: Views,
        columns: Projection,
        by_blocks: bool,
    ) -> Result<Self> {
        let datasets = views.bases();
        let schemas = datasets
            .iter()
            .map(|d| d.projected(&columns))
            .collect::<Result<Vec<_>>>()?;
        let mut common = None;
        if let Some((first, others)) = schemas.split_first() {
            let mut fields = first.fields().to_vec();
            for (i, other) in others.iter().enumerate() {
                fields = common_fields(&fields, other.fields()).ok_or_else(|| {
                    Error::invalid(format!(
                        "datasets {} and {} of the plan have different columns",
                        datasets[i].id(),
                        datasets[i + 1].id()
                    ))
                    .hint("read only the columns that they share: columns=[...]")
                })?;
            }
            if schemas.iter().any(|s| s.fields()[..] != fields[..]) {
                common = Some(Arc::new(Schema::new(fields)));
            }
        }
        let since = rows.moment();
        Ok(DatasetSource {
            rows,
            following,
            views,
            columns,
            common,
            by_blocks,
            since,
        })
    }

    fn dataset(&self, base: u32) -> Result<&Arc<Dataset>> {
        let dataset = self.views.bases().get(base as usize);
        dataset.ok_or_else(|| Error::internal(format!("the plan has no dataset {base}")))
    }

    /// The rows of datasets that these rows of the plan's sources are.
    async fn resolved<'a>(&self, rows: &'a [RowRef]) -> Result<Cow<'a, [RowRef]>> {
        if rows.len() <= INLINE_ROWS || self.views.are_whole() {
            return self.views.resolve(rows);
        }
        let (views, rows) = (self.views.clone(), rows.to_vec());
        let resolved = move || {
            views
                .resolve(&rows)
                .map(|rows| Cow::Owned(rows.into_owned()))
        };
        blocking(resolved).await?
    }

    async fn read_rows(&self, dataset: &Arc<Dataset>, rows: &[u64]) -> Result<RowBatch> {
        let mut read = if self.by_blocks {
            self.rows.read_of_blocks(dataset, rows, &self.columns).await
        } else {
            self.rows.read(dataset, rows, &self.columns).await
        }?;
        if let Some(schema) = &self.common {
            let (schema, batch) = (schema.clone(), read.batch);
            let is_as_stored = |(a, b): (&FieldRef, &FieldRef)| a.data_type() == b.data_type();
            let mut both = batch.schema_ref().fields().iter().zip(schema.fields());
            read.batch = match both.all(is_as_stored) {
                true => with_fields(batch, schema)?,
                // Offsets are copied.
                false => blocking(move || with_fields(batch, schema)).await??,
            };
        }
        Ok(read)
    }

    async fn read_step(&self, rows: &[RowRef]) -> Result<Given> {
        let rows = &self.resolved(rows).await?[..];
        let mut sources: Vec<u32> = rows.iter().map(|r| r.source).collect();
        sources.sort_unstable();
        sources.dedup();
        let [source] = sources[..] else {
            return self.read_mixed(rows, &sources).await;
        };
        let numbers: Vec<u64> = rows.iter().map(|r| r.row).collect();
        let read = self.read_rows(self.dataset(source)?, &numbers).await?;
        Ok(Given {
            batch: read.batch,
            memory: Box::new(read.memory),
        })
    }

    /// Rows of several datasets, each read separately, put into the step's order.
    async fn read_mixed(&self, rows: &[RowRef], sources: &[u32]) -> Result<Given> {
        let mut numbers = vec![Vec::new(); sources.len()];
        let mut picks = Vec::with_capacity(rows.len());
        for row in rows {
            let part = sources
                .binary_search(&row.source)
                .map_err(|_| Error::internal("a row belongs to no source"))?;
            picks.push((part, numbers[part].len()));
            numbers[part].push(row.row);
        }
        let mut reads = Vec::with_capacity(sources.len());
        for (&source, numbers) in sources.iter().zip(numbers) {
            reads.push(async move {
                let dataset = self.dataset(source)?;
                self.read_rows(dataset, &numbers)
                    .await
                    .map_err(|e| e.context(format!("dataset {}", dataset.id())))
            });
        }
        let parts: Vec<_> = stream::iter(reads)
            .buffered(SOURCES_AT_ONCE)
            .try_collect()
            .await?;
        let read = self.rows.interleave(parts, picks).await?;
        Ok(Given {
            batch: read.batch,
            memory: Box::new(read.memory),
        })
    }
}

/// The columns of rows of both; `None` if a column has another name, or values of another type.
fn common_fields(a: &[FieldRef], b: &[FieldRef]) -> Option<Vec<FieldRef>> {
    if a.len() != b.len() {
        return None;
    }
    a.iter().zip(b).map(|(a, b)| common_field(a, b)).collect()
}

/// A value may be missing if it may be in either. Of what else they say, it says what both do.
fn common_field(a: &FieldRef, b: &FieldRef) -> Option<FieldRef> {
    if a == b {
        return Some(a.clone());
    }
    if a.name() != b.name() || extension(a) != extension(b) {
        return None;
    }
    let ty = common_type(a.data_type(), b.data_type())?;
    let mut said = a.metadata().clone();
    said.retain(|key, value| b.metadata().get(key) == Some(value));
    let nullable = a.is_nullable() || b.is_nullable();
    let field = a
        .as_ref()
        .clone()
        .with_data_type(ty)
        .with_nullable(nullable);
    Some(Arc::new(field.with_metadata(said)))
}

/// The same for what is within values, which are stored alike.
fn common_type(a: &DataType, b: &DataType) -> Option<DataType> {
    use DataType::*;
    Some(match (a, b) {
        _ if a == b => a.clone(),
        (List(a), List(b)) => List(common_item(a, b)?),
        (LargeList(a), LargeList(b)) => LargeList(common_item(a, b)?),
        (FixedSizeList(a, n), FixedSizeList(b, m)) if n == m => {
            FixedSizeList(common_item(a, b)?, *n)
        }
        (Struct(a), Struct(b)) => Struct(common_fields(a, b)?.into()),
        (Map(a, sorted), Map(b, other)) if sorted == other => Map(common_field(a, b)?, *sorted),
        _ => return None,
    })
}

/// What items of lists are called means nothing.
fn common_item(a: &FieldRef, b: &FieldRef) -> Option<FieldRef> {
    common_field(a, &Arc::new(b.as_ref().clone().with_name(a.name())))
}

/// The same rows, with columns that [`common_fields`] made of theirs.
fn with_fields(batch: RecordBatch, schema: SchemaRef) -> Result<RecordBatch> {
    let wrong = || Error::internal("rows are not of their columns");
    let columns = batch.columns().iter().zip(schema.fields());
    let columns = columns.map(|(column, field)| {
        cast(column, field.data_type()).map_err(|misfit| wrong().context(misfit.why))
    });
    let columns = columns.collect::<Result<Vec<_>>>()?;
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(schema, columns, &options).map_err(|e| wrong().caused_by(e))
}

/// What Arrow calls a type that is said in a field's metadata.
fn extension(field: &Field) -> [Option<&String>; 2] {
    ["ARROW:extension:name", "ARROW:extension:metadata"].map(|key| field.metadata().get(key))
}

impl Source for DatasetSource {
    fn read<'a>(&'a self, rows: &'a [RowRef]) -> BoxFuture<'a, Result<Given>> {
        Box::pin(self.read_step(rows))
    }

    fn hold(&self, source: u32, block: u64) -> BoxFuture<'_, Result<Held>> {
        Box::pin(async move {
            let Some((base, block)) = self.views.block(source, block) else {
                // Its rows are in many blocks: each step fetches its own.
                return Ok(Held {
                    bytes: 0,
                    cold: false,
                    _keep: Box::new(()),
                });
            };
            let dataset = self.dataset(base)?;
            let hold = self.rows.hold(dataset, block, &self.columns);
            let hold = self.rows.on_account(dataset, hold).await?;
            Ok(Held {
                bytes: hold.memory_bytes(),
                cold: hold.was_cold(),
                _keep: Box::new(hold),
            })
        })
    }

    fn looks_ahead(&self) -> bool {
        // With whole objects, a step fetches its own, many at a time; a block of them contains what
        // other ranks read.
        let mut datasets = self.views.bases().iter();
        datasets.any(|d| d.format() != Format::Objects)
    }

    fn expected_row_bytes(&self) -> u64 {
        expected_row_bytes(&self.views)
    }

    fn passed(&self, epoch: u64, position: u64) {
        // Only places outside the plan are refused.
        let _ = self
            .following
            .as_ref()
            .map(|following| following.progress(epoch, position));
    }

    fn shares(&self) -> Shares {
        self.rows.shares_since(&self.since)
    }

    fn work(&self) -> Work {
        let stats = self.rows.stats();
        Work {
            blocks: stats.blocks_decoded + stats.asked_blocks,
            rows: stats.rows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{Array, ArrayRef, Int64Array, ListArray, StructArray, cast::AsArray};
    use arrow_buffer::OffsetBuffer;
    use arrow_schema::Fields;

    /// A list of numbers, and a struct of one.
    fn rows(numbers: [i64; 3], item: &str, nullable: bool) -> RecordBatch {
        let numbers: ArrayRef = Arc::new(Int64Array::from(numbers.to_vec()));
        let number = |name: &str| Arc::new(Field::new(name, DataType::Int64, nullable));
        let offsets = OffsetBuffer::from_lengths([2, 0, 1]);
        let list = ListArray::new(number(item), offsets, numbers.clone(), None);
        let fields = Fields::from(vec![number("n")]);
        let of = StructArray::new(fields, vec![numbers], None);
        let columns: [(&str, ArrayRef); 2] = [("list", Arc::new(list)), ("of", Arc::new(of))];
        RecordBatch::try_from_iter(columns).unwrap()
    }

    #[test]
    fn what_is_within_values_may_be_missing_if_it_may_be_in_one_dataset() {
        let (some, all) = (
            rows([1, 2, 3], "item", true),
            rows([4, 5, 6], "element", false),
        );
        let fields = |batch: &RecordBatch| batch.schema().fields().clone();
        for (a, b) in [(&some, &all), (&all, &some)] {
            let both = common_fields(&fields(a), &fields(b)).unwrap();
            let schema = Arc::new(Schema::new(both));
            for batch in [&some, &all] {
                let made = with_fields(batch.clone(), schema.clone()).unwrap();
                assert_eq!(made.schema(), schema);
                let (list, of) = (made.column(0).as_list::<i32>(), made.column(1).as_struct());
                assert!(matches!(list.data_type(), DataType::List(item) if item.is_nullable()));
                assert!(of.fields()[0].is_nullable());
                assert_eq!(list.values(), batch.column(0).as_list::<i32>().values());
                assert_eq!(of.column(0), batch.column(1).as_struct().column(0));
                assert_eq!(list.value_length(1), 0);
            }
        }
        let other = Arc::new(Field::new(
            "list",
            DataType::new_list(DataType::Int32, true),
            false,
        ));
        assert_eq!(common_fields(&fields(&some)[..1], &[other]), None);
    }
}
