//! Samples as columns.

use super::Layout;
use crate::{
    records::{Room, Stop},
    tabular::{BinaryRows, arrow_error},
};
use arrow_array::{ArrayRef, RecordBatch, RecordBatchOptions, make_array};
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_schema::{DataType, Schema, SchemaRef};
use forebay_core::{Error, Result};

/// Makes a batch of samples.
#[derive(Debug)]
pub(crate) struct Builder {
    schema: SchemaRef,
    /// For each column of the shard, its column here, if it is wanted.
    places: Vec<Option<usize>>,
    columns: Vec<Column>,
    /// The memory that one more sample takes at least.
    row_bytes: u64,
}

/// Values of one column.
#[derive(Debug)]
enum Column {
    /// Of a fixed size, one after another.
    Numbers(Vec<u8>),
    Text(BinaryRows),
    Bytes(BinaryRows),
}

impl Builder {
    /// `schema` has columns of `own`, in any order; those are the columns of the shard.
    pub fn new(schema: SchemaRef, own: &Schema) -> Result<Self> {
        let place = |name: &String| schema.index_of(name).ok();
        let places = own.fields().iter().map(|f| place(f.name())).collect();
        let mut row_bytes = 0;
        let columns = schema.fields().iter().map(|field| {
            let ty = field.data_type();
            row_bytes += match ty.primitive_width() {
                Some(width) => 2 * width as u64,
                None => Room::VALUE_BYTES,
            };
            match ty {
                DataType::Utf8 => Column::Text(BinaryRows::with_capacity(0, 0)),
                DataType::Binary => Column::Bytes(BinaryRows::with_capacity(0, 0)),
                _ => Column::Numbers(Vec::new()),
            }
        });
        let columns = columns.collect();
        Ok(Self {
            schema,
            places,
            columns,
            row_bytes,
        })
    }

    /// Adds a sample.
    pub fn push(&mut self, sample: &[u8], layout: &Layout, room: &mut Room) -> Result<(), Stop> {
        room.take(self.row_bytes)?;
        let mut pushed = Ok(());
        let (places, columns, schema) = (&self.places, &mut self.columns, &self.schema);
        let whole = layout.values(sample, |at, value| {
            if let Some(&Some(place)) = places.get(at)
                && pushed.is_ok()
            {
                pushed = columns[place].push(value, room).map_err(|stop| {
                    stop.map(|e| e.context(format!("column {:?}", schema.field(place).name())))
                });
            }
        });
        pushed?;
        match whole {
            Some(len) if len == sample.len() => Ok(()),
            _ => Err(Error::internal("a sample is not where it was found").into()),
        }
    }

    pub fn finish(self, rows: usize) -> Result<RecordBatch> {
        let fields = self.schema.fields().clone();
        let columns = fields.iter().zip(self.columns);
        let columns = columns.map(|(field, column)| column.finish(field.data_type(), rows));
        let columns = columns.collect::<Result<Vec<_>>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        RecordBatch::try_new_with_options(self.schema, columns, &options).map_err(arrow_error)
    }
}

impl Column {
    fn push(&mut self, value: &[u8], room: &mut Room) -> Result<(), Stop> {
        match self {
            Column::Numbers(bytes) => bytes.extend_from_slice(value),
            Column::Text(_) if std::str::from_utf8(value).is_err() => {
                return Err(Error::corrupt("a text is not UTF-8").into());
            }
            Column::Text(rows) | Column::Bytes(rows) => {
                room.take_appended(rows.data(), value.len())?;
                rows.push(value)?;
            }
        }
        Ok(())
    }

    fn finish(self, ty: &DataType, rows: usize) -> Result<ArrayRef> {
        match self {
            Column::Numbers(bytes) => {
                let data = ArrayData::builder(ty.clone())
                    .len(rows)
                    .add_buffer(Buffer::from_vec(bytes))
                    .align_buffers(true)
                    .build();
                Ok(make_array(data.map_err(arrow_error)?))
            }
            Column::Text(rows) => rows.finish_text(),
            Column::Bytes(rows) => Ok(rows.finish()),
        }
    }
}
