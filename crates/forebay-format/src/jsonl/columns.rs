//! Lines as columns of given types.
//!
//! One pass over each line finds where the wanted fields are (if a name comes twice the last
//! counts, as in Python); each of these is then read as its column's type. Values are read as the
//! widest type of their kind, and [`cast`] converts them to the wanted type at the end.

use super::{
    is_line,
    scan::{Bad, Scanner, Token, unescape_into},
};
use crate::{
    records::{Room, Stop},
    tabular::{BinaryRows, Misfit, arrow_error, cast, is_json},
};
use arrow_array::{
    ArrayRef, BooleanArray, Float64Array, Int64Array, ListArray, NullArray, RecordBatch,
    RecordBatchOptions, StructArray, UInt64Array,
};
use arrow_buffer::{NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field, Fields, SchemaRef};
use forebay_core::{Error, ErrorKind, Result};
use std::{collections::HashMap, sync::Arc};

/// Makes a batch of lines.
#[derive(Debug)]
pub(crate) struct Builder {
    schema: SchemaRef,
    /// The column that holds the lines themselves.
    lines: Option<usize>,
    object: Object,
}

/// What is wrong with a value of a line.
enum Wrong {
    Json(Bad),
    Value(String),
    Other(Error),
    /// The row does not fit into the memory that the reader allows.
    Full,
}

impl From<Stop> for Wrong {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Full => Wrong::Full,
            Stop::Error(e) => Wrong::Other(e),
        }
    }
}

impl From<Bad> for Wrong {
    fn from(bad: Bad) -> Self {
        Wrong::Json(bad)
    }
}

impl Builder {
    /// # Errors
    /// `Invalid` for a type that JSON cannot be read as.
    pub fn new(schema: SchemaRef) -> Result<Self> {
        let lines = schema.fields().iter().position(|f| is_line(f));
        Ok(Self {
            object: Object::new(schema.fields())?,
            schema,
            lines,
        })
    }

    /// Adds a line.
    ///
    /// # Errors
    /// `Corrupt` if it is not a JSON object or a value does not have its column's type.
    pub fn push(&mut self, line: &[u8], room: &mut Room) -> Result<(), Stop> {
        room.take(self.object.null_bytes)?;
        let only_lines = self.lines.is_some() && self.schema.fields().len() == 1;
        let read = if only_lines {
            Ok(())
        } else {
            let mut scanner = Scanner::new(line);
            match scanner.token() {
                Ok(Token::Object) => self
                    .object
                    .push(&mut scanner, room)
                    .and_then(|()| Ok(scanner.end()?)),
                Ok(_) => Err(Wrong::Json(Bad {
                    at: scanner.at(),
                    what: "it is not an object",
                })),
                Err(bad) => Err(bad.into()),
            }
        };
        read.map_err(|wrong| match wrong {
            Wrong::Json(bad) => Stop::Error(not_json(&bad)),
            Wrong::Value(why) => {
                Stop::Error(Error::corrupt(why).hint(
                    "give the column another type in \"schema\"; the type json takes any value",
                ))
            }
            Wrong::Other(e) => Stop::Error(e),
            Wrong::Full => Stop::Full,
        })?;
        if let Some(at) = self.lines
            && let Column::Text(rows) | Column::Json(rows) = &mut self.object.columns[at].1
        {
            // The object had no field to put there, or was not looked at.
            room.take(Room::VALUE_BYTES)?;
            room.take_appended(rows.data(), line.len())?;
            rows.push(line)?;
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
        let columns = fields
            .iter()
            .zip(self.object.columns)
            .map(|(field, (_, column))| {
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

/// The error for a line that is not JSON.
pub(super) fn not_json(bad: &Bad) -> Error {
    Error::corrupt(format!("it is not JSON at byte {}: {}", bad.at, bad.what))
}

/// Fields of objects, each with its column.
#[derive(Debug)]
struct Object {
    columns: Vec<(String, Column)>,
    by_name: HashMap<String, usize>,
    /// Where the values of the current line are.
    places: Vec<usize>,
    rows: usize,
    /// The memory that one more row takes at least.
    null_bytes: u64,
}

const NOWHERE: usize = usize::MAX;

impl Object {
    fn new(fields: &Fields) -> Result<Self> {
        let columns = fields
            .iter()
            .map(|f| Ok((f.name().clone(), Column::new(f)?)));
        let columns = columns.collect::<Result<Vec<_>>>()?;
        // The column of whole lines is not one of their fields.
        let named = fields.iter().enumerate().filter(|(_, f)| !is_line(f));
        Ok(Self {
            by_name: named.map(|(n, f)| (f.name().clone(), n)).collect(),
            places: Vec::with_capacity(columns.len()),
            null_bytes: columns
                .iter()
                .map(|(_, column)| column.null_bytes())
                .fold(0, u64::saturating_add),
            columns,
            rows: 0,
        })
    }

    fn push(&mut self, scanner: &mut Scanner<'_>, room: &mut Room) -> Result<(), Wrong> {
        let mut places = std::mem::take(&mut self.places);
        places.clear();
        places.resize(self.columns.len(), NOWHERE);
        let mut near = 0;
        scanner.object(|scanner, name| {
            let here = scanner.at();
            let at = match self.columns.get(near) {
                Some((n, _)) if n == name && self.by_name.contains_key(name) => Some(near),
                _ => self.by_name.get(name).copied(),
            };
            if let Some(at) = at {
                places[at] = here;
                near = at + 1;
            }
            scanner.skip()
        })?;
        for ((name, column), &place) in self.columns.iter_mut().zip(&places) {
            if !self.by_name.contains_key(name) {
                continue;
            }
            if place == NOWHERE {
                column.push_null();
                continue;
            }
            column
                .push(&mut scanner.from(place), room)
                .map_err(|wrong| match wrong {
                    Wrong::Value(why) => Wrong::Value(format!("{name:?}: {why}")),
                    wrong => wrong,
                })?;
        }
        self.places = places;
        self.rows += 1;
        Ok(())
    }

    fn push_null(&mut self) {
        self.columns
            .iter_mut()
            .for_each(|(_, column)| column.push_null());
        self.rows += 1;
    }
}

/// Values of one column.
#[derive(Debug)]
enum Column {
    Null(usize),
    Bool(Vec<Option<bool>>),
    Integer(Vec<Option<i64>>),
    Unsigned(Vec<Option<u64>>),
    Float(Vec<Option<f64>>),
    Text(BinaryRows),
    Json(BinaryRows),
    List {
        item: Arc<Field>,
        ends: Vec<i32>,
        present: Vec<bool>,
        items: Box<Column>,
        /// What a null takes. In lists of a fixed length it has all its items.
        null_bytes: u64,
        /// How many items a list has; 0 where lists differ.
        fixed: u64,
        /// The number of values inside.
        count: usize,
    },
    Object {
        fields: Fields,
        present: Vec<bool>,
        object: Box<Object>,
    },
}

impl Column {
    fn new(field: &Field) -> Result<Self> {
        use DataType::*;
        Ok(match field.data_type() {
            Utf8 | LargeUtf8 if is_json(field) => Column::Json(BinaryRows::with_capacity(0, 0)),
            Utf8 | LargeUtf8 => Column::Text(BinaryRows::with_capacity(0, 0)),
            Null => Column::Null(0),
            Boolean => Column::Bool(Vec::new()),
            UInt64 => Column::Unsigned(Vec::new()),
            ty if ty.is_integer() => Column::Integer(Vec::new()),
            ty if ty.is_floating() => Column::Float(Vec::new()),
            List(item) | LargeList(item) | FixedSizeList(item, _) => {
                let items = Column::new(item)?;
                let fixed = match field.data_type() {
                    FixedSizeList(_, len) => u64::try_from(*len).unwrap_or(0),
                    _ => 0,
                };
                Column::List {
                    null_bytes: fixed
                        .saturating_mul(items.null_bytes())
                        .saturating_add(Room::VALUE_BYTES),
                    fixed,
                    item: Arc::new(Field::new("item", items.data_type(), true)),
                    ends: vec![0],
                    present: Vec::new(),
                    items: Box::new(items),
                    count: 0,
                }
            }
            Struct(fields) => {
                let object = Object::new(fields)?;
                let fields = object.columns.iter();
                Column::Object {
                    fields: fields
                        .map(|(n, c)| Field::new(n, c.data_type(), true))
                        .collect(),
                    present: Vec::new(),
                    object: Box::new(object),
                }
            }
            other => {
                return Err(Error::invalid(format!(
                    "JSON cannot be read as {other}, which is the type of {:?}",
                    field.name()
                ))
                .hint("numbers, string, bool, lists and structs of these; or json"));
            }
        })
    }

    /// The type that [`Column::finish`] returns.
    fn data_type(&self) -> DataType {
        match self {
            Column::Null(_) => DataType::Null,
            Column::Bool(_) => DataType::Boolean,
            Column::Integer(_) => DataType::Int64,
            Column::Unsigned(_) => DataType::UInt64,
            Column::Float(_) => DataType::Float64,
            Column::Text(_) | Column::Json(_) => DataType::Utf8,
            Column::List { item, .. } => DataType::List(item.clone()),
            Column::Object { fields, .. } => DataType::Struct(fields.clone()),
        }
    }

    /// The memory that one more value takes at least, which a null takes.
    fn null_bytes(&self) -> u64 {
        match self {
            Column::Null(_) => 0,
            Column::Object { object, .. } => object.null_bytes.saturating_add(2),
            Column::Bool(_) => 4,
            // The numbers here, and those of the wanted type that they are converted to.
            Column::Integer(_) | Column::Unsigned(_) | Column::Float(_) => 32,
            Column::List { null_bytes, .. } => *null_bytes,
            Column::Text(_) | Column::Json(_) => Room::VALUE_BYTES,
        }
    }

    fn push_null(&mut self) {
        match self {
            Column::Null(rows) => *rows += 1,
            Column::Bool(values) => values.push(None),
            Column::Integer(values) => values.push(None),
            Column::Unsigned(values) => values.push(None),
            Column::Float(values) => values.push(None),
            Column::Text(rows) | Column::Json(rows) => rows.push_null(),
            Column::List { ends, present, .. } => {
                ends.push(ends[ends.len() - 1]);
                present.push(false);
            }
            Column::Object {
                present, object, ..
            } => {
                object.push_null();
                present.push(false);
            }
        }
    }

    fn push(&mut self, scanner: &mut Scanner<'_>, room: &mut Room) -> Result<(), Wrong> {
        let token = scanner.token()?;
        if token == Token::Null {
            scanner.null()?;
            self.push_null();
            return Ok(());
        }
        let start = scanner.at();
        match (self, token) {
            (Column::Json(rows), _) => {
                scanner.skip()?;
                let json = scanner.bytes(start..scanner.at());
                room.take_appended(rows.data(), json.len())?;
                rows.push(json).map_err(Wrong::Other)?;
            }
            (Column::Bool(values), Token::Bool) => values.push(Some(scanner.bool()?)),
            (Column::Integer(values), Token::Number) => {
                values.push(Some(integer(scanner)?));
            }
            (Column::Unsigned(values), Token::Number) => {
                values.push(Some(integer(scanner)?));
            }
            (Column::Float(values), Token::Number) => {
                let (text, _) = scanner.number()?;
                let value = text.parse().map_err(|_| Wrong::Value(no_number(text)))?;
                values.push(Some(value));
            }
            (Column::Text(rows), Token::Text) => {
                let (text, escaped) = scanner.text()?;
                room.take_appended(rows.data(), text.len())?;
                if escaped {
                    unescape_into(text, rows.data());
                    rows.end_value().map_err(Wrong::Other)?;
                } else {
                    rows.push(text).map_err(Wrong::Other)?;
                }
            }
            (
                Column::List {
                    ends,
                    present,
                    items,
                    fixed,
                    count,
                    ..
                },
                Token::Array,
            ) => {
                let (mut wrong, before) = (None, *count as u64);
                let read = scanner.array(|scanner| {
                    *count += 1;
                    let is_counted = *count as u64 - before <= *fixed;
                    let taken = match is_counted {
                        true => Ok(()),
                        false => room.take(items.null_bytes()),
                    };
                    let pushed = match taken {
                        Ok(()) => items.push(scanner, room),
                        Err(full) => Err(full.into()),
                    };
                    pushed.map_err(|e| match e {
                        Wrong::Json(bad) => bad,
                        other => {
                            wrong = Some(other);
                            Bad { at: 0, what: "" }
                        }
                    })
                });
                if let Some(wrong) = wrong {
                    return Err(wrong);
                }
                read?;
                ends.push(i32::try_from(*count).map_err(|_| {
                    Wrong::Other(Error::new(
                        ErrorKind::TooLarge,
                        "the lists of these rows hold more than 2^31 values",
                    ))
                })?);
                present.push(true);
            }
            (
                Column::Object {
                    present, object, ..
                },
                Token::Object,
            ) => {
                object.push(scanner, room)?;
                present.push(true);
            }
            (column, token) => {
                return Err(Wrong::Value(format!(
                    "{} cannot be read as {}",
                    token.name(),
                    column.data_type()
                )));
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<ArrayRef> {
        let nulls =
            |present: Vec<bool>| Some(NullBuffer::from(present)).filter(|n| n.null_count() > 0);
        Ok(match self {
            Column::Null(rows) => Arc::new(NullArray::new(rows)),
            Column::Bool(values) => Arc::new(BooleanArray::from(values)),
            Column::Integer(values) => Arc::new(Int64Array::from(values)),
            Column::Unsigned(values) => Arc::new(UInt64Array::from(values)),
            Column::Float(values) => Arc::new(Float64Array::from(values)),
            Column::Text(rows) | Column::Json(rows) => rows.finish_text()?,
            Column::List {
                item,
                ends,
                present,
                items,
                ..
            } => {
                let offsets = OffsetBuffer::new(ScalarBuffer::from(ends));
                let list = ListArray::try_new(item, offsets, items.finish()?, nulls(present));
                Arc::new(list.map_err(arrow_error)?)
            }
            Column::Object {
                fields,
                present,
                object,
            } => {
                let rows = object.rows;
                let columns = object
                    .columns
                    .into_iter()
                    .map(|(_, column)| column.finish());
                let columns = columns.collect::<Result<Vec<_>>>()?;
                let made = StructArray::try_new_with_length(fields, columns, nulls(present), rows);
                Arc::new(made.map_err(arrow_error)?)
            }
        })
    }
}

fn integer<T: std::str::FromStr>(scanner: &mut Scanner<'_>) -> Result<T, Wrong> {
    let (text, _) = scanner.number()?;
    // JSON has a zero with a sign, and unsigned types none.
    let digits = if text == "-0" { "0" } else { text };
    digits.parse().map_err(|_| Wrong::Value(no_number(text)))
}

fn no_number(text: &str) -> String {
    let text = forebay_core::name::shorten(text);
    format!("{text} does not fit the column's type")
}
