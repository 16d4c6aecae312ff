//! Which columns lines have: names and types, determined from every line of a file.
//!
//! The lines are objects; their fields are the columns, in the order in which they first appear.
//! What a line lacks is null. Integers of `i64` mixed with other numbers are floats. Integers of which
//! some are beyond `i64` are unsigned, if `u64` holds all of them. Values without a common type,
//! objects with too many names, and other integers stay JSON: a column of text ([`Kind::Json`]), which
//! holds any of them as written in the line.

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

/// In the metadata of a file's column: which of its integers, among those of lists and objects in it, are
/// never below 0 (`1`) and which are (`0`), in the order of their fields. The column of another file may
/// make the former unsigned. (Not in the metadata of inner fields, which are part of a type.)
const NATURAL: &str = "forebay:natural";

/// What the values of a column are.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum Kind {
    /// Nothing but nulls so far.
    #[default]
    Null,
    Bool,
    /// Integers of `i64`, none below 0.
    Natural,
    Integer,
    /// Integers of `u64`, some beyond those of `i64`.
    Unsigned,
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

    /// The same, with what [`Columns::common`] has to know of a file's columns besides.
    pub fn noted(&self) -> Fields {
        self.fields
            .iter()
            .map(|(name, kind)| {
                let mut naturals = String::new();
                kind.note(&mut naturals);
                match naturals.contains('1') {
                    true => kind.field(name).with_metadata([(NATURAL, naturals)]),
                    false => kind.field(name),
                }
            })
            .collect()
    }

    /// The columns that [`Columns::fields`] or [`Columns::noted`] returned.
    pub fn of(fields: &Fields) -> Self {
        let mut columns = Self::default();
        for field in fields {
            let at = columns.field(field.name(), usize::MAX);
            let mut kind = Kind::of(field);
            if let Some(naturals) = field.metadata().get(NATURAL) {
                // Indexes of earlier releases have it empty, and of columns that are integers alone.
                let naturals = match naturals.is_empty() {
                    true => "1",
                    false => naturals.as_str(),
                };
                kind.take_note(&mut naturals.bytes());
            }
            columns.fields[at].1 = kind;
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
                (digits, true) => Kind::of_integer(digits),
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

    fn of_integer(digits: &str) -> Self {
        match digits.parse::<i64>() {
            Ok(0..) => Kind::Natural,
            Ok(_) => Kind::Integer,
            Err(_) if digits.parse::<u64>().is_ok() => Kind::Unsigned,
            Err(_) => Kind::Json,
        }
    }

    /// In whichever order kinds are merged, the result is the same.
    fn merge(&mut self, other: Kind) {
        match (&mut *self, other) {
            (_, Kind::Null) => {}
            (Kind::Null, other) => *self = other,
            (Kind::Natural, other @ (Kind::Integer | Kind::Unsigned)) => *self = other,
            (Kind::Integer | Kind::Unsigned, Kind::Natural) => {}
            (Kind::Natural | Kind::Integer, Kind::Float) => *self = Kind::Float,
            (Kind::Float, Kind::Natural | Kind::Integer) => {}
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

    /// Says of each integer in it whether it may be below 0 ([`NATURAL`]).
    fn note(&self, out: &mut String) {
        match self {
            Kind::Natural => out.push('1'),
            Kind::Integer => out.push('0'),
            Kind::List(items) => items.note(out),
            Kind::Object(columns) => columns.fields.iter().for_each(|(_, kind)| kind.note(out)),
            _ => {}
        }
    }

    /// Takes over what [`Kind::note`] said of it.
    fn take_note(&mut self, naturals: &mut std::str::Bytes<'_>) {
        match self {
            Kind::Integer if naturals.next() == Some(b'1') => *self = Kind::Natural,
            Kind::List(items) => items.take_note(naturals),
            Kind::Object(columns) => columns
                .fields
                .iter_mut()
                .for_each(|(_, kind)| kind.take_note(naturals)),
            _ => {}
        }
    }

    /// As a column.
    fn field(&self, name: &str) -> Field {
        let of = |ty| Field::new(name, ty, true);
        match self {
            Kind::Null => of(DataType::Null),
            Kind::Bool => of(DataType::Boolean),
            Kind::Natural | Kind::Integer => of(DataType::Int64),
            Kind::Unsigned => of(DataType::UInt64),
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
            DataType::UInt64 => Kind::Unsigned,
            DataType::Float64 => Kind::Float,
            DataType::Utf8 if !is_json(field) => Kind::Text,
            DataType::List(item) => Kind::List(Box::new(Kind::of(item))),
            DataType::Struct(fields) => Kind::Object(Columns::of(fields)),
            _ => Kind::Json,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The type of the column `a` of files of these numbers.
    fn common(files: &[&[&str]]) -> Field {
        let schemas = files.iter().map(|numbers| {
            let mut columns = Columns::default();
            for number in *numbers {
                let line = format!("{{\"a\": {number}}}");
                columns.learn(line.as_bytes()).unwrap();
            }
            Schema::new(columns.noted())
        });
        let schemas: Vec<_> = schemas.collect();
        Columns::common(schemas.iter()).fields()[0].as_ref().clone()
    }

    #[test]
    fn integers_in_lists_and_objects_have_a_type_that_holds_those_of_all_files() {
        let large = "9223372036854775808";
        let field = |name: &str, ty| Field::new(name, ty, true);
        let list = |item| DataType::List(Arc::new(item));
        let json = |name: &str| json_field(field(name, DataType::Utf8));
        let objects = |fields: Vec<Field>| field("a", DataType::Struct(fields.into()));
        let lists = |item: Field| field("a", list(item));
        let (unsigned, signed) = (DataType::UInt64, DataType::Int64);
        for (one, other, expected) in [
            (
                "[1, 2]",
                "[9223372036854775808]",
                lists(field("item", unsigned.clone())),
            ),
            ("[1, -2]", "[9223372036854775808]", lists(json("item"))),
            ("[1, -2]", "[3]", lists(field("item", signed.clone()))),
            (
                r#"{"x": -1, "y": [{"z": 1, "w": "t"}]}"#,
                r#"{"y": [{"w": "u", "z": 9223372036854775808}], "x": 2}"#,
                objects(vec![
                    field("x", signed.clone()),
                    field(
                        "y",
                        list(field(
                            "item",
                            DataType::Struct(
                                vec![field("z", unsigned), field("w", DataType::Utf8)].into(),
                            ),
                        )),
                    ),
                ]),
            ),
            (
                r#"{"x": 1, "y": -1}"#,
                r#"{"x": 9223372036854775808, "y": 9223372036854775808}"#,
                objects(vec![field("x", DataType::UInt64), json("y")]),
            ),
        ] {
            assert_eq!(common(&[&[one], &[other]]), expected, "{one}, {other}");
        }
        // As an earlier release noted it.
        let noted = field("a", signed).with_metadata([(NATURAL, "")]);
        let mut columns = Columns::default();
        columns
            .learn(format!("{{\"a\": {large}}}").as_bytes())
            .unwrap();
        let schemas = [Schema::new(vec![noted]), Schema::new(columns.noted())];
        let common = Columns::common(schemas.iter()).fields();
        assert_eq!(*common[0].data_type(), DataType::UInt64);
    }

    #[test]
    fn integers_have_a_type_that_holds_all_of_them() {
        let (large, larger) = ("9223372036854775808", "18446744073709551615");
        let plain = |ty| Field::new("a", ty, true);
        let json = || json_field(plain(DataType::Utf8));
        for (numbers, expected) in [
            (
                &["0", "-0", "9223372036854775807"][..],
                plain(DataType::Int64),
            ),
            (&["1", "-1"], plain(DataType::Int64)),
            (&["1", large, "null", larger], plain(DataType::UInt64)),
            (&["1", "-1", large], json()),
            (&["1", "1.5"], plain(DataType::Float64)),
            (&["-1", "1.5"], plain(DataType::Float64)),
            (&["1.5", "1", large], json()),
            (&["1", "18446744073709551616"], json()),
            (&["1", "-9223372036854775809"], json()),
        ] {
            let reversed: Vec<_> = numbers.iter().rev().copied().collect();
            assert_eq!(common(&[numbers]), expected, "{numbers:?}");
            assert_eq!(common(&[&reversed[..]]), expected, "{reversed:?}");
            // Each of them in a file of its own.
            let alone: Vec<&[&str]> = numbers.chunks(1).collect();
            assert_eq!(common(&alone), expected, "{alone:?}");
            let alone: Vec<&[&str]> = reversed.chunks(1).collect();
            assert_eq!(common(&alone), expected, "{alone:?}");
        }
    }
}
