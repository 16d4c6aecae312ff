//! Which columns lines have: names and types, determined from every line of a file.
//!
//! The lines are objects; their fields are the columns, in the order in which they first appear.
//! What a line lacks is null. Integers mixed with other numbers are floats. Values without a common
//! type, objects with too many names, and integers beyond those of `i64` stay JSON: a column of text
//! ([`Kind::Json`]), which holds any of them as written in the line.

use super::scan::{Bad, Scanner, Token};
use crate::tabular::{is_json, json_field};
use arrow_schema::{DataType, Field, Fields, Schema};
use forebay_core::limits;
use std::{collections::HashMap, sync::Arc};

/// Objects and arrays nested up to this depth have types; anything deeper stays JSON.
const TYPED_DEPTH_MAX: usize = 16;
/// Names that objects of one column may have; with more, they are taken for lookup tables and stay
/// JSON.
const OBJECT_FIELDS_MAX: usize = 256;

/// What the values of a column are.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum Kind {
    /// Nothing but nulls so far.
    #[default]
    Null,
    Bool,
    Integer,
    Float,
    Text,
    Json,
    List(Box<Kind>),
    Object(Columns),
}

/// The fields of objects.
#[derive(Clone, Debug, Default)]
pub(super) struct Columns {
    fields: Vec<(Box<str>, Kind)>,
    by_name: HashMap<Box<str>, usize>,
}

impl PartialEq for Columns {
    fn eq(&self, other: &Self) -> bool {
        self.fields == other.fields
    }
}

impl Columns {
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    pub fn len(&self) -> usize {
        self.fields.len()
    }

    /// The field of this name, created if missing. `near` is where it is likely to be.
    fn field(&mut self, name: &str, near: usize) -> usize {
        if self.fields.get(near).is_some_and(|(n, _)| **n == *name) {
            return near;
        }
        if let Some(&at) = self.by_name.get(name) {
            return at;
        }
        self.fields.push((name.into(), Kind::Null));
        self.by_name.insert(name.into(), self.fields.len() - 1);
        self.fields.len() - 1
    }

    /// Makes room for the values of a line, which must be an object.
    pub fn learn(&mut self, line: &[u8]) -> Result<(), Bad> {
        let mut scanner = Scanner::new(line);
        if scanner.token()? != Token::Object {
            return Err(Bad {
                at: scanner.at(),
                what: "it is not an object",
            });
        }
        self.learn_object(&mut scanner, 0)?;
        scanner.end()
    }

    fn learn_object(&mut self, scanner: &mut Scanner<'_>, depth: usize) -> Result<(), Bad> {
        let mut near = 0;
        let most = if depth == 0 {
            limits::JSONL_COLUMNS_MAX
        } else {
            OBJECT_FIELDS_MAX
        };
        scanner.object(|scanner, name| {
            // One more than allowed is enough to tell.
            if self.len() > most {
                return scanner.skip();
            }
            let at = self.field(name, near);
            near = at + 1;
            self.fields[at].1.learn(scanner, depth + 1)
        })
    }

    fn merge(&mut self, other: Columns) {
        for (name, kind) in other.fields {
            let at = self.field(&name, usize::MAX);
            self.fields[at].1.merge(kind);
        }
    }

    pub fn fields(&self) -> Fields {
        self.fields
            .iter()
            .map(|(name, kind)| kind.field(name))
            .collect()
    }

    /// The columns that [`Columns::fields`] returned.
    pub fn of(fields: &Fields) -> Self {
        let mut columns = Self::default();
        for field in fields {
            let at = columns.field(field.name(), usize::MAX);
            columns.fields[at].1 = Kind::of(field);
        }
        columns
    }

    /// The columns of several files combined.
    pub fn common<'a>(schemas: impl Iterator<Item = &'a Schema>) -> Self {
        let mut all = Self::default();
        schemas.for_each(|schema| all.merge(Self::of(schema.fields())));
        all.fields.iter_mut().for_each(|(_, kind)| kind.settle());
        all
    }
}

impl Kind {
    /// Makes room for one more value.
    fn learn(&mut self, scanner: &mut Scanner<'_>, depth: usize) -> Result<(), Bad> {
        let token = scanner.token()?;
        if *self == Kind::Json {
            return scanner.skip();
        }
        let found = match token {
            Token::Null => return scanner.null(),
            Token::Bool => {
                scanner.bool()?;
                Kind::Bool
            }
            Token::Text => {
                scanner.text()?;
                Kind::Text
            }
            Token::Number => match scanner.number()? {
                (_, false) => Kind::Float,
                (digits, true) if digits.parse::<i64>().is_ok() => Kind::Integer,
                _ => Kind::Json,
            },
            Token::Array | Token::Object if depth > TYPED_DEPTH_MAX => {
                scanner.skip()?;
                Kind::Json
            }
            Token::Array => {
                if *self == Kind::Null {
                    *self = Kind::List(Box::default());
                }
                if let Kind::List(items) = self {
                    return scanner.array(|scanner| items.learn(scanner, depth + 1));
                }
                scanner.skip()?;
                Kind::Json
            }
            Token::Object => {
                if *self == Kind::Null {
                    *self = Kind::Object(Columns::default());
                }
                if let Kind::Object(columns) = self {
                    columns.learn_object(scanner, depth)?;
                    if columns.len() > OBJECT_FIELDS_MAX {
                        *self = Kind::Json;
                    }
                    return Ok(());
                }
                scanner.skip()?;
                Kind::Json
            }
        };
        self.merge(found);
        Ok(())
    }

    fn merge(&mut self, other: Kind) {
        match (&mut *self, other) {
            (_, Kind::Null) => {}
            (Kind::Null, other) => *self = other,
            (Kind::Integer, Kind::Float) => *self = Kind::Float,
            (Kind::Float, Kind::Integer) => {}
            (Kind::List(a), Kind::List(b)) => a.merge(*b),
            (Kind::Object(a), Kind::Object(b)) => {
                a.merge(b);
                if a.len() > OBJECT_FIELDS_MAX {
                    *self = Kind::Json;
                }
            }
            (a, b) if *a == b => {}
            _ => *self = Kind::Json,
        }
    }

    /// A struct without fields is hardly useful, and other programs refuse it: objects that are all
    /// empty stay JSON.
    fn settle(&mut self) {
        match self {
            Kind::List(items) => items.settle(),
            Kind::Object(columns) if columns.is_empty() => *self = Kind::Json,
            Kind::Object(columns) => columns
                .fields
                .iter_mut()
                .for_each(|(_, kind)| kind.settle()),
            _ => {}
        }
    }

    /// As a column.
    fn field(&self, name: &str) -> Field {
        let of = |ty| Field::new(name, ty, true);
        match self {
            Kind::Null => of(DataType::Null),
            Kind::Bool => of(DataType::Boolean),
            Kind::Integer => of(DataType::Int64),
            Kind::Float => of(DataType::Float64),
            Kind::Text => of(DataType::Utf8),
            Kind::List(items) => of(DataType::List(Arc::new(items.field("item")))),
            Kind::Object(columns) => of(DataType::Struct(columns.fields())),
            Kind::Json => json_field(of(DataType::Utf8)),
        }
    }

    fn of(field: &Field) -> Self {
        match field.data_type() {
            DataType::Null => Kind::Null,
            DataType::Boolean => Kind::Bool,
            DataType::Int64 => Kind::Integer,
            DataType::Float64 => Kind::Float,
            DataType::Utf8 if !is_json(field) => Kind::Text,
            DataType::List(item) => Kind::List(Box::new(Kind::of(item))),
            DataType::Struct(fields) => Kind::Object(Columns::of(fields)),
            _ => Kind::Json,
        }
    }
}
