//! Samples as columns.

use super::Layout;
use crate::{
    records::{Room, Stop},
    tabular::{BinaryRows, arrow_error},
};
use arrow_array::{
    ArrayRef, ListArray, RecordBatch, RecordBatchOptions, builder::BooleanBuilder, make_array,
};
use arrow_buffer::{Buffer, OffsetBuffer, ScalarBuffer};
use arrow_data::ArrayData;
use arrow_schema::{DataType, Schema, SchemaRef};
use forebay_core::{Error, ErrorKind, Result};
use std::sync::Arc;

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
    /// Of this size, one after another.
    Numbers(Vec<u8>, usize),
    /// One byte each.
    Truths(BooleanBuilder),
    /// Numbers of this size, and where those of each sample end.
    Lists {
        data: Vec<u8>,
        ends: Vec<i32>,
        width: usize,
    },
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
            Ok(match ty {
                DataType::Utf8 => Column::Text(BinaryRows::with_capacity(0, 0)),
                DataType::Binary => Column::Bytes(BinaryRows::with_capacity(0, 0)),
                DataType::Boolean => Column::Truths(BooleanBuilder::new()),
                DataType::List(item) => Column::Lists {
                    data: Vec::new(),
                    ends: vec![0],
                    width: width_of(item.data_type())?,
                },
                ty => Column::Numbers(Vec::new(), width_of(ty)?),
            })
        });
        let columns = columns.collect::<Result<_>>()?;
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

fn width_of(ty: &DataType) -> Result<usize> {
    let width = ty.primitive_width();
    width.ok_or_else(|| Error::internal(format!("{ty} has no fixed size")))
}

fn of_size(value: &[u8], width: usize) -> Error {
    Error::corrupt(format!(
        "a value has {} bytes, but numbers of {width} bytes each are expected",
        value.len()
    ))
    .hint("download or write the file again")
}

impl Column {
    fn push(&mut self, value: &[u8], room: &mut Room) -> Result<(), Stop> {
        match self {
            // The bytes of a sample were counted before.
            Column::Numbers(bytes, width) if value.len() == *width => {
                bytes.extend_from_slice(value);
            }
            Column::Numbers(_, width) => return Err(of_size(value, *width).into()),
            Column::Truths(truths) => match value {
                [truth] => truths.append_value(*truth != 0),
                _ => return Err(of_size(value, 1).into()),
            },
            Column::Lists { data, ends, width } => {
                if !value.len().is_multiple_of(*width) {
                    return Err(of_size(value, *width).into());
                }
                room.take_appended(data, value.len())?;
                data.extend_from_slice(value);
                let end = i32::try_from(data.len() / *width).map_err(|_| {
                    let what = format!("{} samples have more than 2^31 numbers", ends.len());
                    Error::new(ErrorKind::TooLarge, what).hint("ask for fewer rows at a time")
                })?;
                ends.push(end);
            }
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
            Column::Truths(mut truths) => Ok(Arc::new(truths.finish())),
            Column::Lists { data, ends, width } => {
                let DataType::List(item) = ty else {
                    return Err(Error::internal("numbers that are not a list"));
                };
                let values = ArrayData::builder(item.data_type().clone())
                    .len(data.len() / width)
                    .add_buffer(Buffer::from_vec(data))
                    .align_buffers(true)
                    .build()
                    .map_err(arrow_error)?;
                let ends = OffsetBuffer::new(ScalarBuffer::from(ends));
                let list = ListArray::try_new(item.clone(), ends, make_array(values), None);
                Ok(Arc::new(list.map_err(arrow_error)?))
            }
            Column::Numbers(bytes, _) => {
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
