//! One schema for all files of a dataset.
//!
//! Files of tables must have the same columns in the same order; descriptive details (metadata,
//! nullability, the names of list items) may differ. Numbers of different types get the type that
//! holds both, and a column with only nulls gets that of the others
//! ([`common_type`](forebay_format::tabular::common_type)); columns of CSV without a common type are
//! text, as in the files. For tars and JSON lines, the columns of all files are combined: what a row
//! lacks is null. If the caller names the columns, the dataset has exactly those.

use super::table::FileTable;
use crate::Format;
use arrow_array::{ArrayRef, new_empty_array};
use arrow_schema::{Field, Schema, SchemaRef};
use forebay_core::{Error, Result};
use forebay_format::{
    csv, jsonl,
    tabular::{FileIndex, cast, common_field},
};
use std::{collections::HashSet, sync::Arc};

/// The columns of a dataset's rows. `named` are those that the caller wants; in a part of files
/// (`is_part`) there may be no row that has one of them.
///
/// # Errors
/// `Invalid` with the first file that does not match those before it, or does not match what is
/// wanted, and how.
pub(crate) fn common_schema(
    format: Format,
    files: &FileTable,
    indexes: &[Arc<FileIndex>],
    named: Option<&SchemaRef>,
    is_part: bool,
) -> Result<SchemaRef> {
    if let Some(named) = named {
        check_named(named, files, indexes, is_part)?;
        return Ok(named.clone());
    }
    let mut different = distinct(indexes);
    let (_, first) = different
        .next()
        .ok_or_else(|| Error::internal("a dataset without files"))?;
    match format {
        Format::Tar => return Ok(union(first, different.map(|(_, schema)| schema))),
        Format::Jsonl => {
            return Ok(jsonl::common_schema(
                std::iter::once(first).chain(different.map(|(_, schema)| schema)),
            ));
        }
        _ => {}
    }
    let common_field = match format {
        Format::Csv | Format::Tsv => csv::common_field,
        _ => common_field,
    };
    let mut common: Option<Vec<Arc<Field>>> = None;
    for (i, schema) in different {
        let fields = common.get_or_insert_with(|| first.fields().iter().cloned().collect());
        merge(fields, schema, common_field).map_err(|difference| {
            Error::invalid(format!(
                "the columns of {} differ from those of {}: {difference}",
                files.name(i),
                files.name(0)
            ))
            .hint(
                "name the columns and their types in \"schema\"; or open the files of each schema \
                 as a dataset, and mix the datasets",
            )
        })?;
    }
    let schema = match common {
        None => first.clone(),
        Some(fields) => Arc::new(Schema::new(fields)),
    };
    Ok(match format {
        Format::Csv | Format::Tsv => csv::without_notes(&schema),
        _ => schema,
    })
}

/// Distinct schemas, each with the first file that has it.
fn distinct(indexes: &[Arc<FileIndex>]) -> impl Iterator<Item = (usize, &SchemaRef)> {
    let mut seen = HashSet::new();
    let all = indexes.iter().map(|index| index.schema()).enumerate();
    all.filter(move |(_, schema)| seen.insert(Arc::as_ptr(schema)))
}

/// Makes room in each field for what another file has in it.
///
/// # Errors
/// The first difference.
fn merge(
    ours: &mut [Arc<Field>],
    theirs: &Schema,
    common_field: fn(&Field, &Field) -> Option<Field>,
) -> std::result::Result<(), String> {
    for (a, b) in ours.iter_mut().zip(theirs.fields()) {
        if a.name() != b.name() {
            return Err(format!(
                "it has column {:?} where {:?} should be",
                b.name(),
                a.name()
            ));
        }
        let both = common_field(a, b).ok_or_else(|| {
            format!(
                "column {:?} is {}, not {}",
                a.name(),
                b.data_type(),
                a.data_type()
            )
        })?;
        if both != **a {
            *a = Arc::new(both);
        }
    }
    match (ours.len(), theirs.fields().len()) {
        (a, b) if a < b => Err(format!(
            "it has another column, {:?}",
            theirs.field(a).name()
        )),
        (a, b) if a > b => Err(format!("it lacks column {:?}", ours[b].name())),
        _ => Ok(()),
    }
}

/// Whether the files have what is wanted: at least one file has each column, and every file that
/// has it can be read in the wanted type.
fn check_named(
    named: &Schema,
    files: &FileTable,
    indexes: &[Arc<FileIndex>],
    is_part: bool,
) -> Result<()> {
    let mut missing: HashSet<&str> = named.fields().iter().map(|f| f.name().as_str()).collect();
    let mut some_have_rows = false;
    for (i, schema) in distinct(indexes) {
        some_have_rows |= indexes[i].rows() > 0;
        for field in named.fields() {
            let Ok(own) = schema.field_with_name(field.name()) else {
                continue;
            };
            missing.remove(field.name().as_str());
            let nothing: ArrayRef = new_empty_array(own.data_type());
            if let Err(misfit) = cast(&nothing, field.data_type()) {
                return Err(Error::invalid(format!(
                    "the column {:?} of {}: {}",
                    field.name(),
                    files.name(i),
                    misfit.why
                ))
                .hint("give it another type in \"schema\""));
            }
        }
    }
    match named
        .fields()
        .iter()
        .find(|f| missing.contains(f.name().as_str()))
    {
        Some(field) if some_have_rows && !is_part => Err(Error::invalid(format!(
            "\"schema\" names the column {:?}, which is in none of the files",
            field.name()
        ))
        .hint("check its name; a column that only some files have is null in the others")),
        _ => Ok(()),
    }
}

/// All columns of all files, in the order in which they first appear.
fn union<'a>(first: &SchemaRef, others: impl Iterator<Item = &'a SchemaRef>) -> SchemaRef {
    let mut fields: Vec<Arc<Field>> = first.fields().iter().cloned().collect();
    let mut seen: HashSet<String> = fields.iter().map(|f| f.name().clone()).collect();
    for field in others.flat_map(|schema| schema.fields()) {
        if !seen.contains(field.name()) {
            seen.insert(field.name().clone());
            fields.push(field.clone());
        }
    }
    if fields.len() == first.fields().len() {
        return first.clone();
    }
    Arc::new(Schema::new(fields))
}
