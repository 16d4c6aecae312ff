//! Puts rows of several batches into the requested order.

use arrow_array::{
    Array, ArrayRef, GenericByteArray, GenericByteViewArray, OffsetSizeTrait, RecordBatch,
    RecordBatchOptions,
    builder::GenericByteBuilder,
    cast::AsArray,
    types::{
        BinaryType, BinaryViewType, ByteArrayType, ByteViewType, LargeBinaryType, LargeUtf8Type,
        StringViewType, Utf8Type,
    },
};
use arrow_buffer::ArrowNativeType;
use arrow_schema::{DataType, Fields, Schema, SchemaRef};
use arrow_select::interleave::interleave;
use forebay_core::{Error, ErrorKind, Result};
use forebay_format::tabular::{cast, nulls};
use std::{ops::Range, sync::Arc};

/// One wanted row: its batch, and its row there.
pub(super) type Pick = (usize, usize);

/// Whether a block may hold values of the type `wanted` as views of what they were unpacked to.
fn is_viewed(held: &DataType, wanted: &DataType) -> bool {
    use DataType::{Binary, BinaryView, LargeBinary, LargeUtf8, Utf8, Utf8View};
    matches!(
        (held, wanted),
        (Utf8View, Utf8 | LargeUtf8) | (BinaryView, Binary | LargeBinary)
    )
}

/// The rows of `picks` as a slice of a batch, not a copy, if they follow each other in it; and
/// whether they need its memory. What it holds as views is copied.
pub(super) fn slice(
    schema: &SchemaRef,
    parts: &[&RecordBatch],
    picks: &[Pick],
) -> Result<Option<(RecordBatch, bool)>> {
    let Some(&(part, first)) = picks.first() else {
        return Ok(None);
    };
    let expected = (first..).map(|row| (part, row));
    if picks.iter().copied().zip(expected).any(|(a, b)| a != b) {
        return Ok(None);
    }
    let held = parts[part].slice(first, picks.len());
    let columns = held.columns().iter().zip(schema.fields());
    if columns
        .clone()
        .all(|(c, field)| !is_viewed(c.data_type(), field.data_type()))
    {
        return Ok(Some((held, true)));
    }
    let all: Vec<Pick> = (0..picks.len()).map(|row| (0, row)).collect();
    let mut keeps = false;
    let columns = columns.map(|(column, field)| {
        let copied = gathered(field.data_type(), &[column], &all);
        keeps |= copied.is_none();
        copied.unwrap_or_else(|| column.clone())
    });
    let columns = columns.collect();
    Ok(Some((batch_of(schema, columns, picks.len())?, keeps)))
}

/// A copy of the values of `picks`, of arrays some of which have views of values of the type
/// `wanted`; `None`: none does.
fn gathered(wanted: &DataType, arrays: &[&dyn Array], picks: &[Pick]) -> Option<ArrayRef> {
    if !arrays.iter().any(|a| is_viewed(a.data_type(), wanted)) {
        return None;
    }
    Some(match wanted {
        DataType::Utf8 => gather::<Utf8Type, StringViewType>(arrays, picks),
        DataType::LargeUtf8 => gather::<LargeUtf8Type, StringViewType>(arrays, picks),
        DataType::Binary => gather::<BinaryType, BinaryViewType>(arrays, picks),
        _ => gather::<LargeBinaryType, BinaryViewType>(arrays, picks),
    })
}

/// Values of several arrays in this order, all of a type or views of it.
fn gather<T, V>(arrays: &[&dyn Array], picks: &[Pick]) -> ArrayRef
where
    T: ByteArrayType,
    V: ByteViewType<Native = T::Native>,
{
    enum Held<'a, T: ByteArrayType, V: ByteViewType> {
        Whole(&'a GenericByteArray<T>),
        Views(&'a GenericByteViewArray<V>),
    }
    let held: Vec<Held<'_, T, V>> = arrays
        .iter()
        .map(|array| match array.as_byte_view_opt::<V>() {
            Some(views) => Held::Views(views),
            None => Held::Whole(array.as_bytes::<T>()),
        })
        .collect();
    let bytes = picks.iter().map(|&(array, row)| match held[array] {
        Held::Whole(values) => values.value_length(row).as_usize(),
        Held::Views(views) if views.is_valid(row) => views.views()[row] as u32 as usize,
        Held::Views(_) => 0,
    });
    let mut out = GenericByteBuilder::<T>::with_capacity(picks.len(), bytes.sum());
    for &(array, row) in picks {
        match held[array] {
            Held::Whole(values) if values.is_valid(row) => out.append_value(values.value(row)),
            Held::Views(views) if views.is_valid(row) => out.append_value(views.value(row)),
            _ => out.append_null(),
        }
    }
    Arc::new(out.finish())
}

/// A copy of the rows of `picks`, in that order.
///
/// They are known to fit into an answer ([`bytes_of_rows`]), so no column exceeds what offsets can
/// address.
pub(super) fn copy(
    schema: &SchemaRef,
    parts: &[&RecordBatch],
    picks: &[Pick],
) -> Result<RecordBatch> {
    let columns = (0..schema.fields().len()).map(|c| {
        let arrays: Vec<&dyn Array> = parts.iter().map(|p| p.column(c).as_ref()).collect();
        if let Some(copied) = gathered(schema.field(c).data_type(), &arrays, picks) {
            return Ok(copied);
        }
        interleave(&arrays, picks).map_err(|e| {
            let column = schema.field(c).name();
            Error::internal(format!(
                "rows of the column {column:?} cannot be put together"
            ))
            .caused_by(e)
        })
    });
    batch_of(schema, columns.collect::<Result<_>>()?, picks.len())
}

fn batch_of(schema: &SchemaRef, columns: Vec<ArrayRef>, rows: usize) -> Result<RecordBatch> {
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options)
        .map_err(|e| Error::internal("rows of several blocks do not make a batch").caused_by(e))
}

/// The size of rows of an array when copied, each this many times: values, offsets and views,
/// including nested ones. (For a dictionary its keys: rows may share the values.)
pub(super) fn bytes_of_rows(array: &dyn Array, rows: &[(u32, u32)]) -> u64 {
    let count = || rows.iter().map(|&(_, times)| u64::from(times)).sum::<u64>();
    if let Some(width) = width(array.data_type()) {
        return count().saturating_mul(width);
    }
    rows.iter()
        .map(|&(row, times)| u64::from(times) * range_bytes(array, row as usize..row as usize + 1))
        .fold(0, u64::saturating_add)
}

/// Bytes of a value, if all of a type have the same size.
pub(super) fn width(of: &DataType) -> Option<u64> {
    match of {
        DataType::Null => Some(0),
        DataType::Boolean => Some(1),
        DataType::FixedSizeBinary(bytes) => u64::try_from(*bytes).ok(),
        DataType::FixedSizeList(item, items) => {
            Some(width(item.data_type())?.saturating_mul(u64::try_from(*items).ok()?))
        }
        DataType::Struct(fields) => fields.iter().try_fold(0u64, |sum, f| {
            Some(sum.saturating_add(width(f.data_type())?))
        }),
        DataType::Dictionary(keys, _) => width(keys),
        _ => of.primitive_width().map(|bytes| bytes as u64),
    }
}

fn range_bytes(array: &dyn Array, rows: Range<usize>) -> u64 {
    let len = (rows.end - rows.start) as u64;
    if let Some(width) = width(array.data_type()) {
        return len.saturating_mul(width);
    }
    // Offsets never decrease, and the last one is within the values.
    fn spanned<O: OffsetSizeTrait>(offsets: &[O], rows: &Range<usize>) -> Range<usize> {
        offsets[rows.start].as_usize()..offsets[rows.end].as_usize()
    }
    fn text<O: OffsetSizeTrait>(offsets: &[O], rows: &Range<usize>) -> u64 {
        let bytes = spanned(offsets, rows);
        ((bytes.end - bytes.start) + (rows.end - rows.start) * size_of::<O>()) as u64
    }
    fn list<O: OffsetSizeTrait>(array: &dyn Array, rows: &Range<usize>) -> u64 {
        let list = array.as_list::<O>();
        let items = range_bytes(list.values(), spanned(list.value_offsets(), rows));
        items + ((rows.end - rows.start) * size_of::<O>()) as u64
    }
    fn views<O: OffsetSizeTrait>(array: &dyn Array, rows: &Range<usize>) -> u64 {
        let list = array.as_list_view::<O>();
        let items = rows.clone().map(|row| {
            let first = list.value_offset(row).as_usize();
            range_bytes(
                list.values(),
                first..first + list.value_size(row).as_usize(),
            )
        });
        items.sum::<u64>() + ((rows.end - rows.start) * 2 * size_of::<O>()) as u64
    }
    // A view holds up to twelve bytes itself. That of a null may be another value's.
    let viewed = |views: &[u128]| {
        let long = rows
            .clone()
            .filter(|&row| array.is_valid(row))
            .map(|row| u64::from(views[row] as u32))
            .filter(|&len| len > 12);
        long.sum::<u64>() + len * size_of::<u128>() as u64
    };
    match array.data_type() {
        DataType::Utf8 => text(array.as_string::<i32>().value_offsets(), &rows),
        DataType::LargeUtf8 => text(array.as_string::<i64>().value_offsets(), &rows),
        DataType::Binary => text(array.as_binary::<i32>().value_offsets(), &rows),
        DataType::LargeBinary => text(array.as_binary::<i64>().value_offsets(), &rows),
        DataType::Utf8View => viewed(&array.as_string_view().views()[..]),
        DataType::BinaryView => viewed(&array.as_binary_view().views()[..]),
        DataType::List(_) => list::<i32>(array, &rows),
        DataType::LargeList(_) => list::<i64>(array, &rows),
        DataType::ListView(_) => views::<i32>(array, &rows),
        DataType::LargeListView(_) => views::<i64>(array, &rows),
        DataType::Map(..) => {
            let map = array.as_map();
            let entries = range_bytes(map.entries(), spanned(map.value_offsets(), &rows));
            entries + len * size_of::<i32>() as u64
        }
        DataType::FixedSizeList(_, items) => {
            let items = usize::try_from(*items).unwrap_or(0);
            let list = array.as_fixed_size_list();
            range_bytes(list.values(), rows.start * items..rows.end * items)
        }
        DataType::Struct(_) => {
            let columns = array.as_struct().columns().iter();
            columns.map(|c| range_bytes(c, rows.clone())).sum()
        }
        // Unions and runs: by the average.
        _ => {
            let all = array.get_array_memory_size() as u64;
            all.div_ceil(array.len().max(1) as u64).saturating_mul(len)
        }
    }
}

/// Of these, rows are copied only in part: views point to bytes that stay where they are.
pub(super) fn is_view(of: &DataType) -> bool {
    matches!(of, DataType::Utf8View | DataType::BinaryView)
}

/// Of these, more may be copied than the rows' own bytes, or in more arrays than there are columns.
pub(super) fn is_compound(of: &DataType) -> bool {
    matches!(
        of,
        DataType::Dictionary(..)
            | DataType::RunEndEncoded(..)
            | DataType::Union(..)
            | DataType::Struct(_)
            | DataType::Map(..)
    )
}

/// Whether a column is of a type like this, or has one in it that is.
pub(super) fn any_has(schema: &Schema, like: &dyn Fn(&DataType) -> bool) -> bool {
    schema.fields().iter().any(|f| has(f.data_type(), like))
}

fn has(of: &DataType, like: &dyn Fn(&DataType) -> bool) -> bool {
    like(of)
        || match of {
            DataType::List(item)
            | DataType::LargeList(item)
            | DataType::ListView(item)
            | DataType::LargeListView(item)
            | DataType::FixedSizeList(item, _)
            | DataType::Map(item, _) => has(item.data_type(), like),
            DataType::Struct(fields) => fields.iter().any(|f| has(f.data_type(), like)),
            DataType::Dictionary(_, values) => has(values, like),
            DataType::RunEndEncoded(_, values) => has(values.data_type(), like),
            DataType::Union(fields, _) => fields.iter().any(|(_, f)| has(f.data_type(), like)),
            _ => false,
        }
}

/// A file's batch in the dataset's form: columns by name, in the dataset's order and types; those
/// that the file lacks are null. `row_of` gives the file's row number of a row of the batch.
///
/// # Errors
/// `Corrupt` for a value that does not fit the dataset's type, or a missing column that may not be
/// null.
pub(super) fn conform(
    batch: RecordBatch,
    schema: &SchemaRef,
    row_of: impl Fn(usize) -> u64,
) -> Result<RecordBatch> {
    let held = batch.schema_ref().fields();
    let is_same = held.len() == schema.fields().len()
        && held.iter().zip(schema.fields()).all(|(held, wanted)| {
            let (of, wanted_of) = (held.data_type(), wanted.data_type());
            held.name() == wanted.name() && (of == wanted_of || is_viewed(of, wanted_of))
        });
    let mut schema = schema.clone();
    let columns = if is_same {
        let held = batch.columns().iter().zip(schema.fields());
        if held
            .clone()
            .any(|(c, field)| c.data_type() != field.data_type())
        {
            let fields = held.map(|(column, field)| {
                let of = column.data_type().clone();
                field.as_ref().clone().with_data_type(of)
            });
            let (fields, metadata) = (fields.collect::<Fields>(), schema.metadata().clone());
            schema = Arc::new(Schema::new_with_metadata(fields, metadata));
        }
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
                        .hint("in \"schema\", give the column a type that can hold the value")
                    }),
                    None if field.is_nullable() => nulls(field.data_type(), batch.num_rows())
                        .map_err(|misfit| {
                            let e = Error::new(ErrorKind::TooLarge, misfit.why);
                            e.context(format_args!("the column {:?}", field.name()))
                        }),
                    None => Err(Error::corrupt(format!(
                        "this file does not have the column {:?}",
                        field.name()
                    ))
                    .hint("open files with different columns as separate datasets")),
                });
        columns.collect::<Result<Vec<_>>>()?
    };
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(schema, columns, &options)
        .map_err(|e| Error::corrupt("a file's rows do not fit the dataset's schema").caused_by(e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{
        BinaryArray, BinaryViewArray, FixedSizeBinaryArray, Int32Array, LargeBinaryArray,
        LargeStringArray, ListArray, StringArray, StringViewArray, types::Int32Type,
    };
    use arrow_buffer::NullBuffer;
    use arrow_schema::Field;
    use forebay_core::ErrorKind;

    fn batch(from: i32, rows: i32) -> RecordBatch {
        let numbers: ArrayRef = Arc::new(Int32Array::from_iter_values(from..from + rows));
        let text: ArrayRef = Arc::new(StringArray::from_iter(
            (from..from + rows).map(|i| (i % 3 != 0).then(|| i.to_string())),
        ));
        RecordBatch::try_from_iter_with_nullable([("n", numbers, true), ("t", text, true)]).unwrap()
    }

    #[test]
    fn rows_come_in_the_order_of_the_picks() {
        let parts = [&batch(0, 10), &batch(100, 5)];
        let picks = [(1, 4), (0, 0), (0, 0), (1, 0), (0, 9)];
        let schema = parts[0].schema();
        let sliced = |picks: &[Pick]| slice(&schema, &parts, picks).unwrap();
        assert!(sliced(&picks).is_none() && sliced(&[]).is_none());
        let got = copy(parts[0].schema_ref(), &parts, &picks).unwrap();
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
        let parts = [&batch(0, 10), &batch(100, 5)];
        let (got, keeps) = slice(parts[0].schema_ref(), &parts, &[(0, 3), (0, 4), (0, 5)])
            .unwrap()
            .unwrap();
        assert!(keeps);
        assert_eq!(got, parts[0].slice(3, 3));
        assert_eq!(
            got.column(0).to_data().buffers()[0].data_ptr(),
            parts[0].column(0).to_data().buffers()[0].data_ptr()
        );
    }

    #[test]
    fn what_blocks_hold_as_views_is_given_out_as_it_is_wanted() {
        let long = "x".repeat(300);
        let texts = [Some("short"), None, Some(&long), Some("")];
        let numbers: ArrayRef = Arc::new(Int32Array::from(vec![1, 2, 3, 4]));
        let part = |texts: ArrayRef| {
            let columns = [("n", numbers.clone(), true), ("t", texts, true)];
            RecordBatch::try_from_iter_with_nullable(columns).unwrap()
        };
        let strings = |large: bool| -> [ArrayRef; 2] {
            let plain: ArrayRef = match large {
                false => Arc::new(StringArray::from_iter(texts)),
                true => Arc::new(LargeStringArray::from_iter(texts)),
            };
            [plain, Arc::new(StringViewArray::from_iter(texts))]
        };
        let bytes = |large: bool| -> [ArrayRef; 2] {
            let bytes = texts.map(|text| text.map(str::as_bytes));
            let plain: ArrayRef = match large {
                false => Arc::new(BinaryArray::from_iter(bytes)),
                true => Arc::new(LargeBinaryArray::from_iter(bytes)),
            };
            [plain, Arc::new(BinaryViewArray::from_iter(bytes))]
        };
        for [plain, views] in [strings(false), strings(true), bytes(false), bytes(true)] {
            let (plain, views) = (part(plain), part(views));
            let schema = plain.schema();
            let held = conform(views.clone(), &schema, |n| n as u64).unwrap();
            assert_eq!(held.column(1).data_type(), views.column(1).data_type());
            let picks = [(1, 2), (0, 2), (1, 1), (0, 0), (1, 3), (1, 0)];
            let expected = copy(&schema, &[&plain, &plain], &picks).unwrap();
            assert_eq!(copy(&schema, &[&plain, &held], &picks).unwrap(), expected);
            let run = [(1, 1), (1, 2), (1, 3)];
            let sliced = |schema: &SchemaRef, held: &RecordBatch| {
                slice(schema, &[&plain, held], &run).unwrap().unwrap()
            };
            assert_eq!(sliced(&schema, &held), (plain.slice(1, 3), true));
            let texts = |batch: &RecordBatch| batch.project(&[1]).unwrap();
            let (plain, held) = (texts(&plain), texts(&held));
            let (of_views, keeps) = slice(&plain.schema(), &[&plain, &held], &run)
                .unwrap()
                .unwrap();
            assert_eq!((of_views, keeps), (plain.slice(1, 3), false));
        }
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

    #[test]
    fn what_rows_take_is_known_before_they_are_copied() {
        let long = "x".repeat(1000);
        let of = |array: ArrayRef, rows: &[(u32, u32)]| bytes_of_rows(&array, rows);
        let twice = [(0, 1), (1, 2)];
        assert_eq!(of(Arc::new(Int32Array::from(vec![1, 2])), &twice), 3 * 4);
        let text = StringArray::from(vec!["a", &long]);
        assert_eq!(of(Arc::new(text), &twice), 1 + 2000 + 3 * 4);
        let large = LargeBinaryArray::from(vec![&b"a"[..], long.as_bytes()]);
        assert_eq!(of(Arc::new(large.clone()), &twice), 1 + 2000 + 3 * 8);
        let views = BinaryViewArray::from(vec![&b"a"[..], long.as_bytes()]);
        assert_eq!(of(Arc::new(views.clone()), &twice), 2000 + 3 * 16);
        // The decoder leaves other values' views where nulls are.
        let (views, bytes, _) = views.into_parts();
        let nulls = NullBuffer::from(vec![true, false]);
        let views = BinaryViewArray::try_new(views, bytes, Some(nulls)).unwrap();
        assert_eq!(of(Arc::new(views.clone()), &twice), 3 * 16);
        let copied = gathered(&DataType::Binary, &[&views], &[(0, 1), (0, 0), (0, 1)]).unwrap();
        let expected = BinaryArray::from(vec![None, Some(&b"a"[..]), None]);
        assert_eq!(copied.as_binary::<i32>(), &expected);
        assert!(copied.get_buffer_memory_size() < 1000);
        let fixed = FixedSizeBinaryArray::try_from_iter([[0u8; 7], [1; 7]].iter()).unwrap();
        assert_eq!(of(Arc::new(fixed), &twice), 3 * 7);
        let list = ListArray::from_iter_primitive::<Int32Type, _, _>([
            Some(vec![Some(1)]),
            Some(vec![Some(2); 100]),
        ]);
        assert_eq!(of(Arc::new(list), &twice), 4 + 800 + 3 * 4);
        let nested = RecordBatch::try_from_iter([("b", Arc::new(large) as ArrayRef)]).unwrap();
        let nested = arrow_array::StructArray::from(nested);
        assert_eq!(of(Arc::new(nested.slice(1, 1)), &[(0, 2)]), 2000 + 2 * 8);
    }
}
