//! Which rows and columns are wanted, and batches made of plain bytes.

use arrow_array::{ArrayRef, BinaryArray, RecordBatch, StringArray, UInt32Array};
use arrow_buffer::{Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::{ArrowError, Field, Fields, Schema, SchemaRef};
use forebay_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Rows of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Each row of the block.
    All,
    /// Strictly ascending, counted within the block.
    Sorted(Arc<[u32]>),
}

impl Rows {
    /// # Errors
    /// `Invalid` unless each row is greater than the one before it.
    pub fn sorted(rows: impl Into<Arc<[u32]>>) -> Result<Self> {
        let rows = rows.into();
        match rows.windows(2).find(|w| w[0] >= w[1]) {
            None => Ok(Rows::Sorted(rows)),
            Some(w) => Err(
                Error::invalid(format!("row {} is requested after row {}", w[1], w[0]))
                    .hint("sort the rows, and name each once"),
            ),
        }
    }

    /// Their share of a block's `bytes`, of which it has `rows` rows.
    pub fn share_of(&self, bytes: u64, rows: u32) -> u64 {
        match self {
            Rows::All => bytes,
            Rows::Sorted(some) => {
                let share = u128::from(bytes) * some.len() as u128 / u128::from(rows.max(1));
                u64::try_from(share).unwrap_or(u64::MAX)
            }
        }
    }

    pub(crate) fn slice(&self) -> Option<&[u32]> {
        match self {
            Rows::All => None,
            Rows::Sorted(rows) => Some(rows),
        }
    }

    /// How many rows these are in a block of `block_rows`.
    pub fn count(&self, block_rows: u32) -> usize {
        self.slice().map_or(block_rows as usize, <[u32]>::len)
    }

    /// The row of the block that is the n-th of these.
    pub fn nth(&self, n: usize) -> u64 {
        match self {
            Rows::All => n as u64,
            Rows::Sorted(rows) => rows.get(n).map_or(n as u64, |&row| u64::from(row)),
        }
    }

    pub(crate) fn check(&self, block_rows: u32) -> Result<()> {
        match self.slice().and_then(|rows| rows.last()) {
            Some(&last) if last >= block_rows => Err(Error::range_not_satisfiable(format!(
                "row {last} was requested, but the block has {block_rows} rows"
            ))),
            _ => Ok(()),
        }
    }
}

/// The wanted columns, by their top-level names in the schema, in the order of the batch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Projection {
    /// All columns of the schema.
    #[default]
    All,
    /// Columns by their names, each once.
    Columns(Vec<String>),
}

impl Projection {
    /// Where the columns are in a schema.
    ///
    /// # Errors
    /// `Invalid` for a column that does not exist, or is requested twice.
    pub fn indices(&self, schema: &Schema) -> Result<Vec<usize>> {
        let Projection::Columns(names) = self else {
            return Ok((0..schema.fields().len()).collect());
        };
        let mut found = Vec::with_capacity(names.len());
        for name in names {
            let at = schema.index_of(name).map_err(|_| {
                let have: Vec<_> = schema
                    .fields()
                    .iter()
                    .map(|f| f.name().as_str())
                    .take(20)
                    .collect();
                Error::invalid(format!("the column {name:?} does not exist"))
                    .hint(format!("the columns are: {}", have.join(", ")))
            })?;
            if found.contains(&at) {
                return Err(Error::invalid(format!(
                    "the column {name:?} is requested twice"
                )));
            }
            found.push(at);
        }
        Ok(found)
    }

    /// The schema of the wanted columns, when one extra column can be requested by name.
    ///
    /// # Errors
    /// As [`Projection::indices`].
    pub fn schema_with(&self, schema: &SchemaRef, besides: &Field) -> Result<SchemaRef> {
        match self {
            Projection::Columns(names)
                if names.contains(besides.name())
                    && schema.column_with_name(besides.name()).is_none() =>
            {
                let fields = schema.fields().iter().cloned();
                let besides = Arc::new(besides.clone());
                let fields: Fields = fields.chain([besides]).collect();
                self.schema(&Arc::new(Schema::new(fields)))
            }
            _ => self.schema(schema),
        }
    }

    /// The schema of the wanted columns.
    ///
    /// # Errors
    /// As [`Projection::indices`].
    pub fn schema(&self, schema: &SchemaRef) -> Result<SchemaRef> {
        match self {
            Projection::All => Ok(schema.clone()),
            Projection::Columns(_) => Ok(Arc::new(
                schema
                    .project(&self.indices(schema)?)
                    .map_err(arrow_error)?,
            )),
        }
    }
}

/// The error for an Arrow library's error about a file's bytes.
pub(crate) fn arrow_error(e: ArrowError) -> Error {
    let kind = match &e {
        ArrowError::NotYetImplemented(_) => ErrorKind::Unsupported,
        ArrowError::MemoryError(_) | ArrowError::OffsetOverflowError(_) => ErrorKind::TooLarge,
        _ => ErrorKind::Corrupt,
    };
    Error::new(kind, e.to_string())
}

/// Some rows of a batch.
pub(crate) fn take_rows(batch: &RecordBatch, rows: &Rows) -> Result<RecordBatch> {
    let Some(rows) = rows.slice() else {
        return Ok(batch.clone());
    };
    if rows.len() == batch.num_rows() {
        return Ok(batch.clone());
    }
    let rows = UInt32Array::from(rows.to_vec());
    arrow_select::take::take_record_batch(batch, &rows).map_err(arrow_error)
}

/// A column of bytes under construction.
#[derive(Debug)]
pub(crate) struct BinaryRows {
    data: Vec<u8>,
    ends: Vec<i32>,
    present: Vec<bool>,
}

impl BinaryRows {
    pub fn with_capacity(rows: usize, bytes: usize) -> Self {
        let mut ends = Vec::with_capacity(rows + 1);
        ends.push(0);
        Self {
            data: Vec::with_capacity(bytes),
            ends,
            present: Vec::new(),
        }
    }

    pub fn rows(&self) -> usize {
        self.ends.len() - 1
    }

    pub fn push(&mut self, value: &[u8]) -> Result<()> {
        self.data.extend_from_slice(value);
        self.end_value()
    }

    /// Ends a value whose bytes were appended to [`BinaryRows::data`].
    pub fn end_value(&mut self) -> Result<()> {
        let end = i32::try_from(self.data.len()).map_err(|_| {
            Error::new(
                ErrorKind::TooLarge,
                format!(
                    "{} rows hold more than 2 GiB in one column",
                    self.ends.len()
                ),
            )
            .hint("ask for fewer rows at a time")
        })?;
        self.ends.push(end);
        if !self.present.is_empty() {
            self.present.push(true);
        }
        Ok(())
    }

    pub fn data(&mut self) -> &mut Vec<u8> {
        &mut self.data
    }

    pub fn push_null(&mut self) {
        if self.present.is_empty() {
            self.present = vec![true; self.rows()];
        }
        self.ends.push(self.ends[self.ends.len() - 1]);
        self.present.push(false);
    }

    fn parts(self) -> (OffsetBuffer<i32>, Buffer, Option<NullBuffer>) {
        let offsets = OffsetBuffer::new(ScalarBuffer::from(self.ends));
        (
            offsets,
            Buffer::from_vec(self.data),
            (!self.present.is_empty()).then(|| NullBuffer::from(self.present)),
        )
    }

    pub fn finish(self) -> ArrayRef {
        let (offsets, data, nulls) = self.parts();
        Arc::new(BinaryArray::new(offsets, data, nulls))
    }

    /// # Errors
    /// `Corrupt` if any value is not UTF-8.
    pub fn finish_text(self) -> Result<ArrayRef> {
        let (offsets, data, nulls) = self.parts();
        Ok(Arc::new(
            StringArray::try_new(offsets, data, nulls).map_err(arrow_error)?,
        ))
    }
}

/// A batch of one column of bytes.
pub(crate) fn text_rows(schema: SchemaRef, column: ArrayRef) -> Result<RecordBatch> {
    RecordBatch::try_new(schema, vec![column]).map_err(arrow_error)
}
