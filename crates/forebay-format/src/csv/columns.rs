//! Rows as columns of given types.
//!
//! Only the values of wanted columns are read. Numbers are read as the widest type of their kind,
//! and [`cast`] converts them to the wanted type at the end.

use super::{
    QUOTES, not_utf8, parse,
    scan::{Value, Values},
    wrong_count,
};
use crate::{
    records::{Room, Stop},
    tabular::{BinaryRows, Misfit, arrow_error, cast},
};
use arrow_array::{
    ArrayRef, BooleanArray, Date32Array, Float64Array, Int64Array, NullArray, RecordBatch,
    RecordBatchOptions, Time32SecondArray, TimestampMicrosecondArray, TimestampMillisecondArray,
    TimestampNanosecondArray, TimestampSecondArray, UInt64Array,
};
use arrow_schema::{DataType, Schema, SchemaRef, TimeUnit};
use forebay_core::{Error, ErrorKind, Result, name::shorten};
use std::{collections::HashMap, sync::Arc};

/// Makes a batch of rows.
#[derive(Debug)]
pub(crate) struct Builder {
    schema: SchemaRef,
    delimiter: u8,
    /// For each value of a row, its column, if that is wanted.
    places: Vec<Option<usize>>,
    /// Columns that the file lacks.
    lacking: Vec<usize>,
    columns: Vec<Column>,
    /// The memory that one more row takes at least.
    null_bytes: u64,
}

impl Builder {
    /// `own` are the columns of the file, in the order of its values.
    ///
    /// # Errors
    /// `Invalid` for a type that CSV cannot be read as.
    pub fn new(schema: SchemaRef, own: &Schema, delimiter: u8) -> Result<Self> {
        let fields = schema.fields();
        let columns = fields.iter().map(|field| {
            Column::new(field.data_type()).ok_or_else(|| {
                Error::invalid(format!(
                    "CSV cannot be read as {}, which is the type of {:?}",
                    field.data_type(),
                    field.name()
                ))
                .hint("numbers, bool, string, binary, date32, time32[s], timestamps")
            })
        });
        let columns = columns.collect::<Result<Vec<_>>>()?;
        let by_name: HashMap<&str, usize> = fields
            .iter()
            .enumerate()
            .map(|(n, field)| (field.name().as_str(), n))
            .collect();
        let of = |name: &str| by_name.get(name).copied();
        let places: Vec<_> = own.fields().iter().map(|f| of(f.name())).collect();
        let mut lacks = vec![true; columns.len()];
        places.iter().flatten().for_each(|&n| lacks[n] = false);
        Ok(Self {
            delimiter,
            lacking: (0..columns.len()).filter(|&n| lacks[n]).collect(),
            places,
            null_bytes: columns
                .iter()
                .map(Column::null_bytes)
                .fold(0, u64::saturating_add),
            columns,
            schema,
        })
    }

    /// Adds a row, without its end.
    ///
    /// # Errors
    /// `Corrupt` if it does not have a value for each column, or one of them does not have its
    /// column's type.
    pub fn push(&mut self, row: &[u8], room: &mut Room) -> Result<(), Stop> {
        room.take(self.null_bytes)?;
        let mut count = 0;
        for value in Values::of(row, self.delimiter) {
            let value = value.map_err(|what| Error::corrupt(what).hint(QUOTES))?;
            if let Some(&Some(at)) = self.places.get(count) {
                self.columns[at].push(&value, room).map_err(|stop| {
                    stop.map(|e| e.context(format!("column {:?}", self.schema.field(at).name())))
                })?;
            }
            count += 1;
        }
        if count != self.places.len() {
            return Err(wrong_count(count, self.places.len()).into());
        }
        for &at in &self.lacking {
            self.columns[at].push_null();
        }
        Ok(())
    }

    /// The rows, or which of them does not fit.
    pub fn finish(self, rows: usize) -> Result<RecordBatch, (Misfit, ErrorKind)> {
        let failed = |e: Error| {
            let (row, why) = (0, e.message().to_owned());
            (Misfit { row, why }, e.kind())
        };
        let fields = self.schema.fields().clone();
        let columns = fields.iter().zip(self.columns).map(|(field, column)| {
            let array = column.finish().map_err(failed)?;
            cast(&array, field.data_type()).map_err(|misfit| {
                let why = format!("column {:?}: {}", field.name(), misfit.why);
                (Misfit { why, ..misfit }, ErrorKind::Corrupt)
            })
        });
        let columns = columns.collect::<Result<Vec<_>, _>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        RecordBatch::try_new_with_options(self.schema, columns, &options)
            .map_err(|e| failed(arrow_error(e)))
    }
}

/// Values of one column.
#[derive(Debug)]
enum Column {
    Null(usize),
    Boolean(Vec<Option<bool>>),
    Integer(Vec<Option<i64>>),
    Unsigned(Vec<Option<u64>>),
    Real(Vec<Option<f64>>),
    Date(Vec<Option<i32>>),
    Time(Vec<Option<i32>>),
    /// With its zone.
    Timestamp(TimeUnit, Option<Arc<str>>, Vec<Option<i64>>),
    Text(BinaryRows),
    Bytes(BinaryRows),
}

impl Column {
    fn new(ty: &DataType) -> Option<Self> {
        use DataType::*;
        Some(match ty {
            Null => Column::Null(0),
            Boolean => Column::Boolean(Vec::new()),
            UInt64 => Column::Unsigned(Vec::new()),
            ty if ty.is_integer() => Column::Integer(Vec::new()),
            ty if ty.is_floating() => Column::Real(Vec::new()),
            Date32 => Column::Date(Vec::new()),
            Time32(TimeUnit::Second) => Column::Time(Vec::new()),
            DataType::Timestamp(unit, zone) => Column::Timestamp(*unit, zone.clone(), Vec::new()),
            Utf8 | LargeUtf8 => Column::Text(BinaryRows::with_capacity(0, 0)),
            Binary | LargeBinary => Column::Bytes(BinaryRows::with_capacity(0, 0)),
            _ => return None,
        })
    }

    /// The memory that one more value takes at least, which a null takes.
    fn null_bytes(&self) -> u64 {
        match self {
            Column::Null(_) => 0,
            Column::Boolean(_) => 4,
            Column::Date(_) | Column::Time(_) => 16,
            // The numbers here, and those of the wanted type that they are converted to.
            Column::Integer(_) | Column::Unsigned(_) | Column::Real(_) | Column::Timestamp(..) => {
                32
            }
            Column::Text(_) | Column::Bytes(_) => Room::VALUE_BYTES,
        }
    }

    fn push_null(&mut self) {
        match self {
            Column::Null(rows) => *rows += 1,
            Column::Boolean(values) => values.push(None),
            Column::Integer(values) => values.push(None),
            Column::Unsigned(values) => values.push(None),
            Column::Real(values) => values.push(None),
            Column::Date(values) | Column::Time(values) => values.push(None),
            Column::Timestamp(_, _, values) => values.push(None),
            Column::Text(rows) | Column::Bytes(rows) => rows.push_null(),
        }
    }

    fn push(&mut self, value: &Value<'_>, room: &mut Room) -> Result<(), Stop> {
        if let Column::Text(rows) | Column::Bytes(rows) = self {
            room.take_appended(rows.data(), value.text.len())?;
            value.unescape_into(rows.data());
            rows.end_value()?;
            return match self {
                Column::Text(_) if std::str::from_utf8(value.text).is_err() => {
                    Err(not_utf8().into())
                }
                _ => Ok(()),
            };
        }
        let text = value.text;
        if parse::is_null(text) {
            self.push_null();
            return Ok(());
        }
        let (is_read, what) = match self {
            Column::Boolean(values) => (pushed(values, parse::boolean(text)), "a truth value"),
            Column::Integer(values) => (pushed(values, parse::integer(text)), "an integer"),
            Column::Unsigned(values) => (pushed(values, parse::integer(text)), "an integer"),
            Column::Real(values) => (pushed(values, parse::real(text)), "a number"),
            Column::Date(values) => (pushed(values, parse::date(text)), "a date"),
            Column::Time(values) => (pushed(values, parse::time(text)), "a time of day"),
            Column::Timestamp(unit, None, values) => {
                let value = parse::timestamp(text, *unit);
                (pushed(values, value), "a time without a zone")
            }
            Column::Timestamp(unit, Some(_), values) => (
                pushed(values, parse::zoned(text, *unit)),
                "a time with a zone",
            ),
            Column::Null(_) | Column::Text(_) | Column::Bytes(_) => (false, "nothing"),
        };
        if is_read {
            return Ok(());
        }
        let shown = String::from_utf8_lossy(text);
        Err(
            Error::corrupt(format!("{:?} is not {what}", shorten(&shown)))
                .hint("give the column another type in \"schema\"; string takes any value")
                .into(),
        )
    }

    fn finish(self) -> Result<ArrayRef> {
        Ok(match self {
            Column::Null(rows) => Arc::new(NullArray::new(rows)),
            Column::Boolean(values) => Arc::new(BooleanArray::from(values)),
            Column::Integer(values) => Arc::new(Int64Array::from(values)),
            Column::Unsigned(values) => Arc::new(UInt64Array::from(values)),
            Column::Real(values) => Arc::new(Float64Array::from(values)),
            Column::Date(values) => Arc::new(Date32Array::from(values)),
            Column::Time(values) => Arc::new(Time32SecondArray::from(values)),
            Column::Timestamp(unit, zone, values) => {
                macro_rules! array {
                    ($array:ty) => {
                        Arc::new(<$array>::from(values).with_timezone_opt(zone))
                    };
                }
                match unit {
                    TimeUnit::Second => array!(TimestampSecondArray),
                    TimeUnit::Millisecond => array!(TimestampMillisecondArray),
                    TimeUnit::Microsecond => array!(TimestampMicrosecondArray),
                    TimeUnit::Nanosecond => array!(TimestampNanosecondArray),
                }
            }
            Column::Text(rows) => rows.finish_text()?,
            Column::Bytes(rows) => rows.finish(),
        })
    }
}

/// Adds a value, if it was read as one.
fn pushed<T>(values: &mut Vec<Option<T>>, value: Option<T>) -> bool {
    let is_read = value.is_some();
    if is_read {
        values.push(value);
    }
    is_read
}
