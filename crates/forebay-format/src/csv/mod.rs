//! CSV and TSV: the first row names the columns, each other one that is not blank is a row.
//!
//! As RFC 4180 has it: a value may stand in quotation marks, and then holds delimiters, line breaks
//! and doubled quotation marks. Rows end at `\n` or `\r\n`; the last one may lack its end. A byte
//! order mark at the beginning is skipped. TSV differs in its delimiter only.
//!
//! The types of columns are those that Arrow's own reader infers (`infer.rs`), but from all rows of
//! a file, not from its beginning. If the caller has named columns, rows are only counted.

mod columns;
mod infer;
mod parse;
mod scan;

pub(crate) use columns::Builder;

use crate::{
    lines::Grammar,
    tabular::{Format, IndexOptions},
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use forebay_core::{Error, Result, limits, name::shorten};
use infer::Kind;
use scan::{Values, row_len, without_end};
use std::{borrow::Cow, collections::HashSet, sync::Arc};

/// What separates values; `None` for formats that are not of this kind.
pub(crate) fn delimiter(format: Format) -> Option<u8> {
    match format {
        Format::Csv => Some(b','),
        Format::Tsv => Some(b'\t'),
        _ => None,
    }
}

/// The next row, without its end, and how many bytes it takes with it; `None` for a blank line.
/// Nothing, of no length, if the bytes end within a value.
pub(crate) fn next(bytes: &[u8], delimiter: u8) -> (Option<&[u8]>, usize) {
    let Some(len) = row_len(bytes, delimiter, true) else {
        return (None, 0);
    };
    let row = without_end(&bytes[..len]);
    ((!row.is_empty()).then_some(row), len)
}

/// The common field of two files' columns of the same name: numbers of different types are floats,
/// dates and times of day and date the latter, values without a common type text.
pub fn common_field(a: &Field, b: &Field) -> Option<Field> {
    (a.name() == b.name()).then(|| infer::common_field(a, b))
}

/// The columns of a dataset, without what is noted of those of files for [`common_field`].
pub fn without_notes(schema: &SchemaRef) -> SchemaRef {
    let fields = schema.fields().iter();
    if fields.clone().all(|f| f.metadata().is_empty()) {
        return schema.clone();
    }
    let plain = fields.map(|f| Field::new(f.name(), f.data_type().clone(), true));
    Arc::new(Schema::new(plain.collect::<Vec<_>>()))
}

/// Whether values of CSV can be read as these columns.
///
/// # Errors
/// `Invalid` with the column and its type.
pub fn check_columns(schema: &SchemaRef) -> Result<()> {
    Builder::new(schema.clone(), schema, b',').map(drop)
}

/// What a value that does not fit its column calls for.
const QUOTES: &str = "values with a delimiter, a quotation mark or a line break in them have to \
    stand in quotation marks, and quotation marks in them have to be doubled";

/// The rows of a file, and what is known of their columns so far.
#[derive(Debug)]
pub(crate) struct Table {
    format: Format,
    delimiter: u8,
    /// The columns, once the first row was read.
    names: Option<Vec<String>>,
    /// What the values of each column may be; none if the caller has named columns.
    kinds: Vec<Kind>,
    infers: bool,
    /// Rows, and lines of the file, so far: for people, who count lines from 1.
    rows: u64,
    lines: u64,
}

impl Table {
    /// `format` is `Csv` or `Tsv`.
    pub fn new(format: Format, options: &IndexOptions) -> Self {
        Self {
            format,
            delimiter: delimiter(format).unwrap_or(b','),
            names: None,
            kinds: Vec::new(),
            infers: options.columns.is_none(),
            rows: 0,
            lines: 0,
        }
    }

    fn header(&mut self, row: &[u8]) -> Result<()> {
        let format = self.format;
        let here = |e: Error| {
            e.context(format!("the first row of the {format} file"))
                .hint("the first row has to name the columns")
        };
        let (mut names, mut seen) = (Vec::new(), HashSet::new());
        for value in Values::of(row, self.delimiter) {
            let value = value.map_err(|what| here(Error::corrupt(what)))?;
            let name =
                String::from_utf8(value.unescaped().into_owned()).map_err(|_| here(not_utf8()))?;
            if !seen.insert(name.clone()) {
                let name = shorten(&name);
                return Err(here(Error::corrupt(format!("it has {name:?} twice"))));
            }
            names.push(name);
            if names.len() > limits::CSV_COLUMNS_MAX {
                return Err(here(Error::unsupported(format!(
                    "it has more than {} columns",
                    limits::CSV_COLUMNS_MAX
                ))));
            }
        }
        if self.infers {
            self.kinds = vec![Kind::default(); names.len()];
        }
        self.names = Some(names);
        Ok(())
    }

    fn row(&mut self, row: &[u8], line: u64) -> Result<()> {
        let (format, number) = (self.format, self.rows);
        let here = |e: Error| e.context(format!("row {number} (line {line}) of the {format} file"));
        if std::str::from_utf8(row).is_err() {
            return Err(here(not_utf8()));
        }
        let mut count = 0;
        for value in Values::of(row, self.delimiter) {
            let value = value.map_err(|what| here(Error::corrupt(what).hint(QUOTES)))?;
            if let Some(kind) = self.kinds.get_mut(count) {
                kind.learn(&value);
            }
            count += 1;
        }
        if count != self.kinds.len() {
            return Err(here(wrong_count(count, self.kinds.len())));
        }
        Ok(())
    }
}

fn not_utf8() -> Error {
    Error::corrupt("it is not UTF-8").hint(
        "convert the file to UTF-8, or read the column as bytes: \"schema\": {\"name\": \"binary\"}",
    )
}

/// The error for a row that has more or fewer values than there are columns.
fn wrong_count(values: usize, columns: usize) -> Error {
    let s = |n| if n == 1 { "" } else { "s" };
    Error::corrupt(format!(
        "it has {values} value{}, but the first row names {columns} column{}",
        s(values),
        s(columns)
    ))
    .hint(QUOTES)
}

impl Grammar for Table {
    const ROW_MAX_BYTES: u64 = limits::CSV_ROW_MAX_BYTES;

    fn format(&self) -> Format {
        self.format
    }

    fn row_len(&self, bytes: &[u8], is_last: bool) -> Option<usize> {
        row_len(bytes, self.delimiter, is_last)
    }

    fn learn(&mut self, row: &[u8]) -> Result<bool> {
        let line = self.lines + 1;
        // Without quotation marks, a row is a line.
        self.lines += match row.contains(&b'"') {
            false => 1,
            true => row[..row.len() - 1].iter().filter(|&&b| b == b'\n').count() as u64 + 1,
        };
        let row = without_end(row);
        if row.is_empty() {
            return Ok(false);
        }
        if self.names.is_none() {
            self.header(row)?;
            return Ok(false);
        }
        if self.infers {
            self.row(row, line)?;
        }
        self.rows += 1;
        Ok(true)
    }

    fn endless(&self, at: u64, is_cut: bool) -> Error {
        let place = format!(
            "the row at offset {at} (line {}) of the {} file",
            self.lines + 1,
            self.format
        );
        let e = match is_cut {
            true => Error::corrupt(format!("{place} has a quoted value that does not end")),
            false => Error::unsupported(format!(
                "{place} is longer than {} bytes, or a quotation mark in it has no second one",
                limits::CSV_ROW_MAX_BYTES
            )),
        };
        e.hint(QUOTES)
    }

    fn schema(self, options: &IndexOptions) -> Result<SchemaRef> {
        let Some(names) = self.names else {
            return Err(Error::corrupt(format!(
                "the {} file is empty: it has no row that names the columns",
                self.format
            )));
        };
        let field = |(at, name): (usize, &String)| match &options.columns {
            // Of the other columns nobody reads any values.
            Some(named) => match named.field_with_name(name) {
                Ok(field) => field.clone(),
                Err(_) => Field::new(name, DataType::Utf8, true),
            },
            None => self.kinds[at].field(name),
        };
        let fields: Vec<Field> = names.iter().enumerate().map(field).collect();
        Ok(options.schemas.share(Arc::new(Schema::new(fields))))
    }
}

impl scan::Value<'_> {
    /// The value itself.
    fn unescaped(&self) -> Cow<'_, [u8]> {
        if !self.is_escaped {
            return Cow::Borrowed(self.text);
        }
        let mut out = Vec::with_capacity(self.text.len());
        self.unescape_into(&mut out);
        Cow::Owned(out)
    }
}
