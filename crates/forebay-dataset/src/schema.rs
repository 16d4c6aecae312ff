//! One schema for all files of a dataset.
//!
//! Files of tables must have the same columns in the same order; what only describes them
//! (metadata, whether nulls may be) may differ. Of tars the columns of all are taken together: a
//! sample without a member has a null there.

use crate::{Format, table::FileTable};
use arrow_schema::{Field, Schema, SchemaRef};
use forebay_core::{Error, Result};
use forebay_format::tabular::FileIndex;
use std::{collections::HashSet, sync::Arc};

/// The columns of a dataset's rows.
///
/// # Errors
/// `Invalid` with the first file that differs from the first one, and how.
pub(crate) fn common_schema(
    format: Format,
    files: &FileTable,
    indexes: &[Arc<FileIndex>],
) -> Result<SchemaRef> {
    let first = indexes
        .first()
        .ok_or_else(|| Error::internal("a dataset without files"))?
        .schema();
    if format == Format::Tar {
        return Ok(union(indexes));
    }
    let mut nullable: Option<Vec<bool>> = None;
    let mut last = first;
    for (i, index) in indexes.iter().enumerate() {
        let schema = index.schema();
        if Arc::ptr_eq(schema, last) || Arc::ptr_eq(schema, first) {
            continue;
        }
        if let Some(difference) = difference(first, schema) {
            return Err(Error::invalid(format!(
                "{} has other columns than {}: {difference}",
                files.name(i),
                files.name(0)
            ))
            .hint("open files of one schema together; datasets of several can be mixed"));
        }
        let nullable = nullable
            .get_or_insert_with(|| first.fields().iter().map(|f| f.is_nullable()).collect());
        for (n, field) in nullable.iter_mut().zip(schema.fields()) {
            *n |= field.is_nullable();
        }
        last = schema;
    }
    Ok(match nullable {
        None => first.clone(),
        Some(nullable) => {
            let fields = first
                .fields()
                .iter()
                .zip(nullable)
                .map(|(f, n)| f.as_ref().clone().with_nullable(n));
            Arc::new(Schema::new(fields.collect::<Vec<Field>>()))
        }
    })
}

/// What is first different between two schemas.
fn difference(ours: &Schema, theirs: &Schema) -> Option<String> {
    for (a, b) in ours.fields().iter().zip(theirs.fields()) {
        if a.name() != b.name() {
            return Some(format!("column {:?} in place of {:?}", b.name(), a.name()));
        }
        if !a.data_type().equals_datatype(b.data_type()) {
            return Some(format!(
                "column {:?} is {} and not {}",
                a.name(),
                b.data_type(),
                a.data_type()
            ));
        }
    }
    match (ours.fields().len(), theirs.fields().len()) {
        (a, b) if a < b => Some(format!("one more, {:?}", theirs.field(a).name())),
        (a, b) if a > b => Some(format!("{:?} is missing", ours.field(b).name())),
        _ => None,
    }
}

/// All columns of all files, in the order in which they first come.
fn union(indexes: &[Arc<FileIndex>]) -> SchemaRef {
    let mut fields: Vec<Arc<Field>> = Vec::new();
    let mut seen: HashSet<&str> = HashSet::new();
    let mut last: Option<&SchemaRef> = None;
    for schema in indexes.iter().map(|i| i.schema()) {
        if last.is_some_and(|l| Arc::ptr_eq(l, schema)) {
            continue;
        }
        last = Some(schema);
        for field in schema.fields() {
            if seen.insert(field.name()) {
                fields.push(field.clone());
            }
        }
    }
    Arc::new(Schema::new(fields))
}
