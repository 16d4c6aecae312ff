//! Sequences as columns.

use super::{DOCUMENT, MODE, Sequence, TOKENS};
use crate::{
    records::{Room, Stop},
    tabular::arrow_error,
};
use arrow_array::{
    ArrayRef, Int8Array, Int64Array, ListArray, RecordBatch, RecordBatchOptions, make_array,
};
use arrow_buffer::{Buffer, OffsetBuffer, ScalarBuffer};
use arrow_data::ArrayData;
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use forebay_core::{Error, ErrorKind, Result};
use std::sync::Arc;

/// Makes a batch of sequences.
#[derive(Debug)]
pub(crate) struct Builder {
    schema: SchemaRef,
    columns: Vec<Column>,
}

#[derive(Debug)]
enum Column {
    /// The tokens of all sequences, where those of each end, and the bytes of one.
    Tokens {
        data: Vec<u8>,
        ends: Vec<i32>,
        width: usize,
    },
    Documents(Vec<i64>),
    Modes(Vec<i8>),
}

impl Builder {
    /// `schema` has columns of the file, in any order.
    pub fn new(schema: SchemaRef, rows: usize, room: &mut Room) -> Result<Self, Stop> {
        let columns = schema.fields().iter().map(|field| {
            room.take(Room::VALUE_BYTES * rows as u64)?;
            Ok(match field.name().as_str() {
                TOKENS => {
                    let mut ends = Vec::with_capacity(rows + 1);
                    ends.push(0);
                    Column::Tokens {
                        data: Vec::new(),
                        ends,
                        width: width_of(field)?,
                    }
                }
                DOCUMENT => Column::Documents(Vec::with_capacity(rows)),
                MODE => Column::Modes(Vec::with_capacity(rows)),
                other => {
                    let what = format!("a sequence does not have the column {other:?}");
                    return Err(Error::internal(what).into());
                }
            })
        });
        let columns = columns.collect::<Result<Vec<_>, Stop>>()?;
        Ok(Self { schema, columns })
    }

    /// Whether the bytes of the `.bin` are needed for these columns.
    pub fn needs_bytes(schema: &Schema) -> bool {
        schema.column_with_name(TOKENS).is_some()
    }

    /// Adds a sequence.
    pub fn push(&mut self, sequence: Sequence, tokens: &[u8], room: &mut Room) -> Result<(), Stop> {
        for column in &mut self.columns {
            match column {
                Column::Tokens { data, ends, width } => {
                    room.take_appended(data, tokens.len())?;
                    data.extend_from_slice(tokens);
                    let end = i32::try_from(data.len() / *width).map_err(|_| {
                        let n = ends.len();
                        let what = format!("{n} sequences have more than 2^31 tokens");
                        Error::new(ErrorKind::TooLarge, what).hint("ask for fewer rows at a time")
                    })?;
                    ends.push(end);
                }
                Column::Documents(documents) => documents.push(sequence.document),
                Column::Modes(modes) => modes.push(sequence.mode),
            }
        }
        Ok(())
    }

    pub fn finish(self, rows: usize) -> Result<RecordBatch> {
        let fields = self.schema.fields().clone();
        let columns = fields.iter().zip(self.columns);
        let columns = columns.map(|(field, column)| column.finish(field));
        let columns = columns.collect::<Result<Vec<_>>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        RecordBatch::try_new_with_options(self.schema, columns, &options).map_err(arrow_error)
    }
}

/// The bytes of one item of a list.
fn width_of(field: &Field) -> Result<usize> {
    let DataType::List(item) = field.data_type() else {
        return Err(Error::internal("tokens that are not a list"));
    };
    let width = item.data_type().primitive_width();
    width.ok_or_else(|| Error::internal("tokens that are not numbers"))
}

impl Column {
    fn finish(self, field: &Field) -> Result<ArrayRef> {
        Ok(match self {
            Column::Tokens { data, ends, width } => {
                let DataType::List(item) = field.data_type() else {
                    return Err(Error::internal("tokens that are not a list"));
                };
                let count = data.len() / width;
                let values = ArrayData::builder(item.data_type().clone())
                    .len(count)
                    .add_buffer(Buffer::from_vec(data))
                    .align_buffers(true)
                    .build()
                    .map_err(arrow_error)?;
                let ends = OffsetBuffer::new(ScalarBuffer::from(ends));
                let list = ListArray::try_new(item.clone(), ends, make_array(values), None);
                Arc::new(list.map_err(arrow_error)?)
            }
            Column::Documents(documents) => Arc::new(Int64Array::from(documents)),
            Column::Modes(modes) => Arc::new(Int8Array::from(modes)),
        })
    }
}
