//! Rows of several batches, put into the order that was asked for.

use arrow_array::{
    Array, ArrayRef, RecordBatch, RecordBatchOptions, UInt32Array, cast::AsArray, new_null_array,
};
use arrow_schema::{ArrowError, DataType, SchemaRef};
use arrow_select::{interleave::interleave, take::take_record_batch};
use forebay_core::{Error, ErrorKind, Result};
use forebay_format::tabular::cast;

/// One wanted row: which batch it is in, and where.
pub(super) type Pick = (usize, usize);

/// The rows of `picks`, in that order. Rows that follow each other in one batch are a slice of it,
/// without a copy.
///
/// # Errors
/// `TooLarge` if a column of text or bytes does not fit an Arrow array.
pub(super) fn gather(
    schema: &SchemaRef,
    parts: &[RecordBatch],
    picks: &[Pick],
) -> Result<RecordBatch> {
    if let Some(&(part, first)) = picks.first()
        && picks
            .iter()
            .zip(first..)
            .all(|(pick, row)| *pick == (part, row))
    {
        return Ok(parts[part].slice(first, picks.len()));
    }
    let columns = (0..schema.fields().len()).map(|c| {
        let arrays: Vec<&dyn Array> = parts.iter().map(|p| p.column(c).as_ref()).collect();
        check_length(&arrays, picks)
            .and_then(|()| interleave(&arrays, picks))
            .map_err(|e| match e {
                ArrowError::OffsetOverflowError(_) => Error::new(
                    ErrorKind::TooLarge,
                    format!(
                        "the rows have more than 2 GiB in column {:?}",
                        schema.field(c).name()
                    ),
                )
                .hint("ask for fewer rows at a time"),
                e => Error::internal("rows of several blocks cannot be put together").source(e),
            })
    });
    let columns = columns.collect::<Result<Vec<ArrayRef>>>()?;
    let options = RecordBatchOptions::new().with_row_count(Some(picks.len()));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options)
        .map_err(|e| Error::internal("rows of several blocks do not make a batch").source(e))
}

/// A copy of some rows of a batch.
pub(super) fn take_rows(batch: &RecordBatch, rows: &[u32]) -> Result<RecordBatch> {
    take_record_batch(batch, &UInt32Array::from(rows.to_vec()))
        .map_err(|e| Error::internal("rows cannot be taken from a block").source(e))
}

/// Whether the bytes of the picked values can be told by offsets of 31 bits.
fn check_length(arrays: &[&dyn Array], picks: &[Pick]) -> Result<(), ArrowError> {
    let offsets: Vec<&[i32]> = match arrays.first().map(|a| a.data_type()) {
        Some(DataType::Utf8) => arrays
            .iter()
            .map(|a| a.as_string::<i32>().value_offsets())
            .collect(),
        Some(DataType::Binary) => arrays
            .iter()
            .map(|a| a.as_binary::<i32>().value_offsets())
            .collect(),
        _ => return Ok(()),
    };
    let total: i64 = picks
        .iter()
        .map(|&(part, row)| i64::from(offsets[part][row + 1] - offsets[part][row]))
        .sum();
    match usize::try_from(total) {
        Ok(total) if total <= i32::MAX as usize => Ok(()),
        _ => Err(ArrowError::OffsetOverflowError(total as usize)),
    }
}

/// A file's batch as the dataset has it: columns by name, in the dataset's order and types; those
/// that the file lacks are null. `row_of` tells the row of the file that a row of the batch is.
///
/// # Errors
/// `Corrupt` for a value that does not fit the dataset's type, or a column that may not be null and
/// is not there.
pub(super) fn conform(
    batch: RecordBatch,
    schema: &SchemaRef,
    row_of: impl Fn(usize) -> u64,
) -> Result<RecordBatch> {
    let same = batch
        .schema_ref()
        .fields()
        .iter()
        .map(|f| (f.name(), f.data_type()));
    let columns = if same.eq(schema.fields().iter().map(|f| (f.name(), f.data_type()))) {
        batch.columns().to_vec()
    } else {
        let columns =
            schema
                .fields()
                .iter()
                .map(|field| match batch.column_by_name(field.name()) {
                    Some(column) => cast(column, field.data_type()).map_err(|misfit| {
                        Error::corrupt(format!(
                            "row {} of the file: column {:?}: {}",
                            row_of(misfit.row),
                            field.name(),
                            misfit.why
                        ))
                        .hint("give the column a type in \"schema\" that has room for it")
                    }),
                    None if field.is_nullable() => {
                        Ok(new_null_array(field.data_type(), batch.num_rows()))
                    }
                    None => Err(Error::corrupt(format!(
                        "this file has no column {:?}",
                        field.name()
                    ))
                    .hint("open files of different columns as different datasets")),
                });
        columns.collect::<Result<Vec<_>>>()?
    };
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options)
        .map_err(|e| Error::corrupt("a file's rows do not fit the dataset's schema").source(e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{Int32Array, StringArray};
    use arrow_schema::{Field, Schema};
    use std::sync::Arc;

    fn batch(from: i32, rows: i32) -> RecordBatch {
        let numbers: ArrayRef = Arc::new(Int32Array::from_iter_values(from..from + rows));
        let text: ArrayRef = Arc::new(StringArray::from_iter(
            (from..from + rows).map(|i| (i % 3 != 0).then(|| i.to_string())),
        ));
        RecordBatch::try_from_iter_with_nullable([("n", numbers, true), ("t", text, true)]).unwrap()
    }

    #[test]
    fn rows_come_in_the_order_of_the_picks() {
        let parts = [batch(0, 10), batch(100, 5)];
        let picks = [(1, 4), (0, 0), (0, 0), (1, 0), (0, 9)];
        let got = gather(&parts[0].schema(), &parts, &picks).unwrap();
        assert_eq!(
            got.column(0)
                .as_primitive::<arrow_array::types::Int32Type>()
                .values(),
            &[104, 0, 0, 100, 9]
        );
        assert!(got.column(1).is_null(1) && got.column(1).as_string::<i32>().value(3) == "100");
    }

    #[test]
    fn rows_that_follow_each_other_are_not_copied() {
        let parts = [batch(0, 10), batch(100, 5)];
        let got = gather(&parts[0].schema(), &parts, &[(0, 3), (0, 4), (0, 5)]).unwrap();
        assert_eq!(got, parts[0].slice(3, 3));
        assert_eq!(
            got.column(0).to_data().buffers()[0].data_ptr(),
            parts[0].column(0).to_data().buffers()[0].data_ptr()
        );
    }

    #[test]
    fn what_a_file_lacks_is_null_and_other_types_are_refused() {
        let schema = Arc::new(Schema::new(vec![
            Field::new("x", DataType::Binary, true),
            Field::new("t", DataType::Utf8, true),
        ]));
        let got = conform(batch(0, 4), &schema, |n| n as u64).unwrap();
        assert_eq!((got.num_rows(), got.column(0).null_count()), (4, 4));
        assert_eq!(got.column(1), batch(0, 4).column(1));
        let wider = Arc::new(Schema::new(vec![Field::new("n", DataType::Int64, true)]));
        let got = conform(batch(2, 2), &wider, |n| n as u64).unwrap();
        assert_eq!(
            got.column(0)
                .as_primitive::<arrow_array::types::Int64Type>()
                .values(),
            &[2, 3]
        );
        for other in [DataType::Int8, DataType::Utf8] {
            let other = Arc::new(Schema::new(vec![Field::new("n", other, true)]));
            let e = conform(batch(126, 4), &other, |n| 70 + n as u64).unwrap_err();
            let row = if other.field(0).data_type() == &DataType::Int8 {
                72
            } else {
                70
            };
            assert!(
                e.kind() == ErrorKind::Corrupt
                    && e.to_string()
                        .contains(&format!("row {row} of the file: column \"n\"")),
                "{e}"
            );
        }
        let missing = Arc::new(Schema::new(vec![Field::new("y", DataType::Int64, false)]));
        assert!(conform(batch(0, 4), &missing, |n| n as u64).is_err());
    }
}
