//! JSON lines: each line that is not blank is a row, and its fields are columns.
//!
//! The file is read once ([`lines`](crate::lines)). What is learnt from its lines is the columns
//! (`infer.rs`). If the caller has named the columns, lines are only counted. A last line without a newline counts. Lines end at `\n`; a `\r` before
//! it is not part of the row. A byte order mark at the beginning of the file is skipped.
//!
//! Besides the fields there is a column [`LINE`], which holds the line itself, for callers that ask
//! for it by name. If the lines have a field of that name, the name means the field.

mod columns;
mod infer;
mod scan;

pub(crate) use columns::Builder;

use crate::{
    lines::{Grammar, find_newline},
    tabular::{Format, IndexOptions},
};
use arrow_schema::{DataType, Field, Fields, Schema, SchemaRef};
use columns::not_json;
use forebay_core::{Error, Result, limits};
use infer::Columns;
use scan::Scanner;
use std::sync::Arc;

/// The column of the lines themselves.
pub const LINE: &str = "json";
/// What distinguishes it from a field of that name.
const LINE_MARK: (&str, &str) = ("forebay:column", "line");

/// The column of the lines themselves, as a schema field.
pub fn line_field() -> Field {
    let (key, value) = LINE_MARK;
    Field::new(LINE, DataType::Utf8, false).with_metadata([(key, value)])
}

/// Whether a field is [`line_field`].
pub(crate) fn is_line(field: &Field) -> bool {
    let (key, value) = LINE_MARK;
    field.metadata().get(key).is_some_and(|v| v == value)
}

/// The columns of several files combined: each has the type that holds the values of all files, or is
/// JSON. Files without a field have only their lines.
pub fn common_schema<'a>(schemas: impl Iterator<Item = &'a SchemaRef>) -> SchemaRef {
    let with_fields = schemas.filter(|schema| !schema.fields().iter().any(|f| is_line(f)));
    let common = Columns::common(with_fields.map(Arc::as_ref));
    schema_of(&common, Columns::fields)
}

/// Whether JSON can be read as these columns.
///
/// # Errors
/// `Invalid` with the column and its type.
pub fn check_columns(schema: &SchemaRef) -> Result<()> {
    Builder::new(schema.clone()).map(drop)
}

/// Whether a text is a value of JSON, as lines may have it.
pub fn is_value(text: &str) -> bool {
    let mut scanner = Scanner::new(text.as_bytes());
    scanner.skip().is_ok() && scanner.end().is_ok()
}

/// Whether some value of JSON may begin so.
pub fn may_begin_value(text: &str) -> bool {
    let words = ["true", "false", "null", "NaN", "Infinity"];
    match text.bytes().next() {
        Some(b'"' | b'{' | b'[' | b'-' | b'0'..=b'9') => true,
        _ => words.iter().any(|word| word.starts_with(text)),
    }
}

fn schema_of(columns: &Columns, fields: fn(&Columns) -> Fields) -> SchemaRef {
    Arc::new(if columns.is_empty() {
        Schema::new(vec![line_field()])
    } else {
        Schema::new(fields(columns))
    })
}

/// The next line, without its end, and how many bytes it takes with it; `None` for a blank one.
pub(crate) fn next(bytes: &[u8]) -> (Option<&[u8]>, usize) {
    let (line, len) = match find_newline(bytes) {
        Some(n) => (&bytes[..n], n + 1),
        None => (bytes, bytes.len()),
    };
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    (
        line.iter()
            .any(|b| !b.is_ascii_whitespace())
            .then_some(line),
        len,
    )
}

/// Lines as rows, and what is known of them so far.
#[derive(Debug)]
pub(crate) struct Lines {
    /// `None`: the caller has named them.
    columns: Option<Columns>,
    /// Lines of the file, including blank ones: for people, who count from 1.
    lines: u64,
}

impl Lines {
    pub fn new(options: &IndexOptions) -> Self {
        Self {
            columns: options.columns.is_none().then(Columns::default),
            lines: 0,
        }
    }
}

impl Grammar for Lines {
    const ROW_MAX_BYTES: u64 = limits::RECORD_MAX_BYTES;

    fn format(&self) -> Format {
        Format::Jsonl
    }

    fn row_len(&self, bytes: &[u8], is_last: bool) -> Option<usize> {
        match find_newline(bytes) {
            Some(n) => Some(n + 1),
            None => is_last.then_some(bytes.len()),
        }
    }

    fn learn(&mut self, line: &[u8]) -> Result<bool> {
        self.lines += 1;
        if line.iter().all(u8::is_ascii_whitespace) {
            return Ok(false);
        }
        let Some(columns) = &mut self.columns else {
            return Ok(true);
        };
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let here = |e: Error| {
            e.context(format!("line {} of the JSONL file", self.lines))
                .hint(
                    "write one JSON object on each line; \"schema\": {\"json\": \"string\"} takes \
                 lines as they are",
                )
        };
        if std::str::from_utf8(line).is_err() {
            return Err(here(Error::corrupt("it is not UTF-8")));
        }
        columns.learn(line).map_err(|bad| here(not_json(&bad)))?;
        if columns.len() > limits::JSONL_COLUMNS_MAX {
            return Err(here(Error::unsupported(format!(
                "its fields and those of the lines before it make more than {} columns",
                limits::JSONL_COLUMNS_MAX
            ))));
        }
        Ok(true)
    }

    fn endless(&self, at: u64, _is_cut: bool) -> Error {
        Error::unsupported(format!(
            "the line at offset {at} of the JSONL file is longer than {} bytes",
            limits::RECORD_MAX_BYTES
        ))
        .hint("check that it is JSONL, with one object on each line")
    }

    fn schema(self, options: &IndexOptions) -> Result<SchemaRef> {
        Ok(match (self.columns, &options.columns) {
            (None, Some(named)) => named.clone(),
            (columns, _) => options
                .schemas
                .share(schema_of(&columns.unwrap_or_default(), Columns::noted)),
        })
    }
}
