//! Rows as bytes: the values of a row lie together, column after column, so that a row costs one
//! read and no unpacking.
//!
//! A column's part of a row is the encoding of a run of `n` values of its type; `n` is 1 for the
//! column itself, and the length of the list for what is in lists. A run of none takes nothing.
//! Otherwise:
//!
//! 1. a byte: 0 if no value is null; 1 if some are, and then a bit for each value, 1 if it is there;
//! 2. by type: bits; fixed widths as Arrow has them (little-endian), also where a value is null;
//!    for text and bytes `n` lengths (u32), and the bytes of all; for lists and maps `n` lengths, and
//!    the run of all their items; for lists of a fixed length and structs the runs of what they are
//!    made of. (The type that is always null takes nothing, not even the first byte.)
//!
//! What this does not know ([`supports`] says so) is not laid out: dictionaries, views, unions and
//! runs, whose values a row does not have by itself.
//!
//! A run is never shorter than the memory of its values, except that offsets may have eight bytes
//! each: [`most_decoded`] is a bound for what rows decode to.

use arrow_array::{ArrayRef, RecordBatch, RecordBatchOptions, make_array};
use arrow_buffer::{
    BooleanBufferBuilder, Buffer, MutableBuffer, NullBufferBuilder, bit_util::get_bit,
};
use arrow_data::{ArrayData, ByteView, MAX_INLINE_VIEW_LEN};
use arrow_schema::{DataType, FieldRef, SchemaRef};
use forebay_core::{Error, Result};
use std::ops::Range;

/// Changes with the form of the bytes.
pub(super) const FORM: u32 = 2;

/// Whether rows of these columns can be laid out.
pub(super) fn supports(schema: &SchemaRef) -> bool {
    cfg!(target_endian = "little")
        && !schema.fields().is_empty()
        && schema
            .fields()
            .iter()
            .all(|field| is_known(field.data_type(), false))
}

/// Whether values of a type can be laid out. What is in lists takes bytes for each value, so that a
/// list cannot claim more items than it has.
fn is_known(of: &DataType, in_list: bool) -> bool {
    match of {
        DataType::Null => !in_list,
        DataType::Boolean
        | DataType::Utf8
        | DataType::Binary
        | DataType::LargeUtf8
        | DataType::LargeBinary => true,
        DataType::List(item) | DataType::LargeList(item) | DataType::Map(item, _) => {
            is_known(item.data_type(), true)
        }
        DataType::FixedSizeList(item, items) => *items > 0 && is_known(item.data_type(), true),
        DataType::Struct(fields) => {
            !fields.is_empty() && fields.iter().all(|f| is_known(f.data_type(), in_list))
        }
        other => fixed_width(other).is_some_and(|width| width > 0),
    }
}

/// At most what `rows` rows of `bytes` encoded bytes take when they are decoded.
pub(super) fn most_decoded(schema: &SchemaRef, rows: u64, bytes: u64) -> u64 {
    // An offset, and a bit: of which an offset in lists may have four bytes more than its length.
    const EACH_BYTES: u64 = 9;
    let factor = if schema.fields().iter().any(|f| f.data_type().is_nested()) {
        2
    } else {
        1
    };
    bytes
        .saturating_mul(factor)
        .saturating_add(rows.saturating_mul(EACH_BYTES * schema.fields().len() as u64))
}

/// The bytes of one row, appended. The columns are of a type that is supported, and no list or text
/// in them has 4 GiB.
pub(super) fn encode_row(columns: &[ArrayData], row: usize, out: &mut Vec<u8>) {
    for column in columns {
        put(column, row..row + 1, out);
    }
}

fn put(data: &ArrayData, rows: Range<usize>, out: &mut Vec<u8>) {
    if rows.is_empty() || data.data_type() == &DataType::Null {
        return;
    }
    put_nulls(data, &rows, out);
    let at = data.offset() + rows.start..data.offset() + rows.end;
    let buffer = |i: usize| data.buffers()[i].as_slice();
    match data.data_type() {
        DataType::Boolean => put_bits(at.map(|i| get_bit(buffer(0), i)), out),
        DataType::Utf8 | DataType::Binary => {
            let bytes = put_lengths::<i32>(data, at, out);
            out.extend_from_slice(&buffer(1)[bytes]);
        }
        DataType::LargeUtf8 | DataType::LargeBinary => {
            let bytes = put_lengths::<i64>(data, at, out);
            out.extend_from_slice(&buffer(1)[bytes]);
        }
        // A block may hold text and bytes as views.
        DataType::Utf8View | DataType::BinaryView => put_views(data, rows, out),
        DataType::List(_) | DataType::Map(..) => {
            let items = put_lengths::<i32>(data, at, out);
            put(&data.child_data()[0], items, out);
        }
        DataType::LargeList(_) => {
            let items = put_lengths::<i64>(data, at, out);
            put(&data.child_data()[0], items, out);
        }
        DataType::FixedSizeList(_, items) => {
            let items = usize::try_from(*items).unwrap_or(0);
            let items = at.start * items..at.end * items;
            put(&data.child_data()[0], items, out);
        }
        DataType::Struct(_) => {
            for child in data.child_data() {
                put(child, at.clone(), out);
            }
        }
        other => {
            let width = fixed_width(other).unwrap_or(0);
            out.extend_from_slice(&buffer(0)[at.start * width..at.end * width]);
        }
    }
}

fn put_nulls(data: &ArrayData, rows: &Range<usize>, out: &mut Vec<u8>) {
    let some = data
        .nulls()
        .filter(|nulls| nulls.slice(rows.start, rows.len()).null_count() > 0);
    match some {
        None => out.push(0),
        Some(nulls) => {
            out.push(1);
            put_bits(rows.clone().map(|i| nulls.is_valid(i)), out);
        }
    }
}

fn put_bits(bits: impl Iterator<Item = bool>, out: &mut Vec<u8>) {
    let (mut byte, mut n) = (0u8, 0);
    for bit in bits {
        byte |= u8::from(bit) << n;
        n += 1;
        if n == 8 {
            out.push(byte);
            (byte, n) = (0, 0);
        }
    }
    if n > 0 {
        out.push(byte);
    }
}

/// Writes the lengths of values, and returns where the values are.
fn put_lengths<O: arrow_array::OffsetSizeTrait>(
    data: &ArrayData,
    at: Range<usize>,
    out: &mut Vec<u8>,
) -> Range<usize> {
    let offsets = data.buffers()[0].typed_data::<O>();
    for pair in offsets[at.start..=at.end].windows(2) {
        let length = pair[1].as_usize() - pair[0].as_usize();
        out.extend_from_slice(&(length as u32).to_le_bytes());
    }
    offsets[at.start].as_usize()..offsets[at.end].as_usize()
}

fn put_views(data: &ArrayData, rows: Range<usize>, out: &mut Vec<u8>) {
    let views = data.buffers()[0].typed_data::<u128>();
    // The view of a null may be another value's.
    let views = rows.map(|row| match data.is_valid(row) {
        true => views[data.offset() + row],
        false => 0,
    });
    for view in views.clone() {
        out.extend_from_slice(&(view as u32).to_le_bytes());
    }
    for view in views {
        let ByteView {
            length,
            buffer_index,
            offset,
            ..
        } = ByteView::from(view);
        if length <= MAX_INLINE_VIEW_LEN {
            out.extend_from_slice(&view.to_le_bytes()[4..4 + length as usize]);
        } else {
            let bytes = data.buffers()[1 + buffer_index as usize].as_slice();
            out.extend_from_slice(&bytes[offset as usize..(offset + length) as usize]);
        }
    }
}

/// Bytes of a value that is neither bits nor made of others, if all of the type have the same.
fn fixed_width(of: &DataType) -> Option<usize> {
    match of {
        DataType::FixedSizeBinary(bytes) => usize::try_from(*bytes).ok(),
        _ => of.primitive_width(),
    }
}

/// Rows that are decoded one after the other, in any order, into one batch.
pub(super) struct Decoder {
    schema: SchemaRef,
    columns: Vec<Column>,
    rows: usize,
}

impl Decoder {
    /// For about this many encoded bytes. `None`: the columns are not supported.
    pub(super) fn new(schema: &SchemaRef, bytes: usize) -> Option<Self> {
        if !supports(schema) {
            return None;
        }
        let columns = schema.fields().iter();
        let columns = columns.map(|field| Column::of(field.data_type()));
        let mut columns = columns.collect::<Option<Vec<_>>>()?;
        // Nearly all is in one column: nothing grows, and nothing is copied for that.
        let mut long = columns
            .iter_mut()
            .filter_map(|column| match &mut column.values {
                Values::Bytes(_, values) => Some(values),
                _ => None,
            });
        if let (Some(only), None) = (long.next(), long.next()) {
            only.reserve(bytes);
        }
        Some(Self {
            schema: schema.clone(),
            columns,
            rows: 0,
        })
    }

    /// Takes a row. `None`: these are not the bytes of a row with these columns.
    pub(super) fn row(&mut self, mut bytes: &[u8]) -> Option<()> {
        for column in &mut self.columns {
            column.take(1, &mut bytes)?;
        }
        self.rows += 1;
        bytes.is_empty().then_some(())
    }

    /// # Errors
    /// `Internal` if the values are not such as the columns have.
    pub(super) fn finish(self) -> Result<RecordBatch> {
        let bad = |e| Error::internal("rows that were kept do not make a batch").caused_by(e);
        let options = RecordBatchOptions::new().with_row_count(Some(self.rows));
        let columns = self.columns.into_iter().map(|c| c.finish().map(make_array));
        let columns = columns
            .collect::<std::result::Result<Vec<ArrayRef>, _>>()
            .map_err(bad)?;
        RecordBatch::try_new_with_options(self.schema, columns, &options).map_err(bad)
    }
}

struct Column {
    of: DataType,
    len: usize,
    nulls: NullBufferBuilder,
    values: Values,
}

enum Values {
    Nothing,
    Bits(BooleanBufferBuilder),
    Fixed(usize, MutableBuffer),
    Bytes(Offsets, MutableBuffer),
    List(Offsets, Box<Column>),
    FixedList(usize, Box<Column>),
    Struct(Vec<Column>),
}

impl Column {
    /// `None`: not known.
    fn of(of: &DataType) -> Option<Self> {
        let item = |field: &FieldRef| Column::of(field.data_type()).map(Box::new);
        let values = match of {
            DataType::Null => Values::Nothing,
            DataType::Boolean => Values::Bits(BooleanBufferBuilder::new(0)),
            DataType::Utf8 | DataType::Binary => {
                Values::Bytes(Offsets::new(false), MutableBuffer::new(0))
            }
            DataType::LargeUtf8 | DataType::LargeBinary => {
                Values::Bytes(Offsets::new(true), MutableBuffer::new(0))
            }
            DataType::List(field) | DataType::Map(field, _) => {
                Values::List(Offsets::new(false), item(field)?)
            }
            DataType::LargeList(field) => Values::List(Offsets::new(true), item(field)?),
            DataType::FixedSizeList(field, items) => {
                Values::FixedList(usize::try_from(*items).ok()?, item(field)?)
            }
            DataType::Struct(fields) => {
                let children = fields.iter().map(|f| Column::of(f.data_type()));
                Values::Struct(children.collect::<Option<_>>()?)
            }
            other => Values::Fixed(fixed_width(other)?, MutableBuffer::new(0)),
        };
        Some(Self {
            of: of.clone(),
            len: 0,
            nulls: NullBufferBuilder::new(0),
            values,
        })
    }

    /// Takes a run of `n` values off the front of `from`.
    fn take(&mut self, n: usize, from: &mut &[u8]) -> Option<()> {
        if n == 0 {
            return Some(());
        }
        self.len += n;
        if matches!(self.values, Values::Nothing) {
            return Some(());
        }
        match front(from, 1)? {
            [0] => self.nulls.append_n_non_nulls(n),
            [1] => {
                let bits = front(from, n.div_ceil(8))?;
                (0..n).for_each(|i| self.nulls.append(get_bit(bits, i)));
            }
            _ => return None,
        }
        match &mut self.values {
            Values::Nothing => {}
            Values::Bits(values) => {
                let bits = front(from, n.div_ceil(8))?;
                (0..n).for_each(|i| values.append(get_bit(bits, i)));
            }
            Values::Fixed(width, values) => {
                values.extend_from_slice(front(from, n.checked_mul(*width)?)?);
            }
            Values::Bytes(offsets, values) => {
                let bytes = offsets.take(n, from)?;
                values.extend_from_slice(front(from, bytes)?);
            }
            Values::List(offsets, item) => {
                let items = offsets.take(n, from)?;
                item.take(items, from)?;
            }
            Values::FixedList(items, item) => item.take(n.checked_mul(*items)?, from)?,
            Values::Struct(children) => {
                for child in children {
                    child.take(n, from)?;
                }
            }
        }
        Some(())
    }

    /// Checks everything that Arrow relies on, text being UTF-8 included.
    fn finish(mut self) -> std::result::Result<ArrayData, arrow_schema::ArrowError> {
        let data = ArrayData::builder(self.of)
            .len(self.len)
            .nulls(self.nulls.finish());
        match self.values {
            Values::Nothing => data,
            Values::Bits(mut values) => data.add_buffer(values.finish().into_inner()),
            Values::Fixed(_, values) => data.add_buffer(values.into()),
            Values::Bytes(offsets, values) => {
                data.add_buffer(offsets.finish()).add_buffer(values.into())
            }
            Values::List(offsets, item) => data
                .add_buffer(offsets.finish())
                .add_child_data(item.finish()?),
            Values::FixedList(_, item) => data.add_child_data(item.finish()?),
            Values::Struct(children) => {
                let children = children.into_iter().map(Column::finish);
                data.child_data(children.collect::<std::result::Result<_, _>>()?)
            }
        }
        .build()
    }
}

/// Offsets of four or eight bytes.
struct Offsets {
    large: bool,
    last: u64,
    bytes: MutableBuffer,
}

impl Offsets {
    fn new(large: bool) -> Self {
        let mut offsets = Self {
            large,
            last: 0,
            bytes: MutableBuffer::new(0),
        };
        offsets.push(0);
        offsets
    }

    fn push(&mut self, offset: u64) -> Option<()> {
        match self.large {
            true => self.bytes.push(i64::try_from(offset).ok()?),
            false => self.bytes.push(i32::try_from(offset).ok()?),
        }
        self.last = offset;
        Some(())
    }

    /// Takes `n` lengths, and returns their sum. `None` also for more than offsets can say.
    fn take(&mut self, n: usize, from: &mut &[u8]) -> Option<usize> {
        let before = self.last;
        for length in front(from, n.checked_mul(4)?)?.chunks_exact(4) {
            let length = u32::from_le_bytes(length.try_into().ok()?);
            self.push(self.last.checked_add(u64::from(length))?)?;
        }
        usize::try_from(self.last - before).ok()
    }

    fn finish(self) -> Buffer {
        self.bytes.into()
    }
}

fn front<'a>(from: &mut &'a [u8], bytes: usize) -> Option<&'a [u8]> {
    let (front, rest) = from.split_at_checked(bytes)?;
    *from = rest;
    Some(front)
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{
        Array, BinaryArray, BinaryViewArray, Int64Array, ListArray, StringArray, StringViewArray,
        StructArray, builder::FixedSizeBinaryBuilder, types::Int32Type,
    };
    use arrow_buffer::NullBuffer;
    use arrow_schema::{Field, Schema};
    use std::sync::Arc;

    fn batch() -> RecordBatch {
        let numbers = Int64Array::from(vec![Some(1), None, Some(3), Some(-4)]);
        let texts = StringArray::from(vec![Some("first"), Some(""), None, Some("vierte Zeile")]);
        let lists = ListArray::from_iter_primitive::<Int32Type, _, _>([
            Some(vec![Some(1), None, Some(3)]),
            None,
            Some(vec![]),
            Some(vec![Some(7); 20]),
        ]);
        let mut fixed = FixedSizeBinaryBuilder::new(5);
        for row in 0..4u8 {
            match row {
                2 => fixed.append_null(),
                _ => fixed.append_value([row; 5]).unwrap(),
            }
        }
        let flags =
            arrow_array::BooleanArray::from(vec![Some(true), Some(false), None, Some(true)]);
        let of = |a: ArrayRef| a;
        let inner = RecordBatch::try_from_iter_with_nullable([
            ("f", of(Arc::new(flags)), true),
            ("t", of(Arc::new(texts.clone())), true),
        ]);
        RecordBatch::try_from_iter_with_nullable([
            ("n", of(Arc::new(numbers)), true),
            ("t", of(Arc::new(texts)), true),
            ("l", of(Arc::new(lists)), true),
            ("b", of(Arc::new(fixed.finish())), true),
            ("s", of(Arc::new(StructArray::from(inner.unwrap()))), false),
        ])
        .unwrap()
    }

    fn encoded(batch: &RecordBatch) -> Vec<Vec<u8>> {
        let columns: Vec<ArrayData> = batch.columns().iter().map(|c| c.to_data()).collect();
        let rows = 0..batch.num_rows();
        rows.map(|row| {
            let mut out = Vec::new();
            encode_row(&columns, row, &mut out);
            out
        })
        .collect()
    }

    #[test]
    fn rows_come_back_in_any_order_also_those_of_slices() {
        let whole = batch();
        for (from, rows) in [(0, 4), (1, 3), (2, 1)] {
            let batch = whole.slice(from, rows);
            let schema = batch.schema();
            assert!(supports(&schema));
            let encoded = encoded(&batch);
            let order: Vec<usize> = (0..rows).rev().chain([0, 0]).collect();
            let mut decoder = Decoder::new(&schema, 0).unwrap();
            let mut bytes = 0;
            for &row in &order {
                decoder.row(&encoded[row]).unwrap();
                bytes += encoded[row].len() as u64;
            }
            let decoded = decoder.finish().unwrap();
            for (at, &row) in order.iter().enumerate() {
                assert_eq!(decoded.slice(at, 1), batch.slice(row, 1), "row {row}");
            }
            let takes: usize = (decoded.columns().iter())
                .map(|c| c.to_data().get_slice_memory_size().unwrap())
                .sum();
            assert!(takes as u64 <= most_decoded(&schema, order.len() as u64, bytes));
        }
    }

    #[test]
    fn what_a_block_holds_as_views_is_laid_out_as_any_text() {
        let long = "x".repeat(300);
        let texts = [
            Some("short"),
            None,
            Some(&long),
            Some(""),
            Some("just past 12!"),
        ];
        let plain: [ArrayRef; 2] = [
            Arc::new(StringArray::from_iter(texts)),
            Arc::new(BinaryArray::from_iter(texts.map(|t| t.map(str::as_bytes)))),
        ];
        let views: [ArrayRef; 2] = [
            Arc::new(StringViewArray::from_iter(texts)),
            Arc::new(BinaryViewArray::from_iter(
                texts.map(|t| t.map(str::as_bytes)),
            )),
        ];
        for (plain, views) in plain.iter().zip(&views) {
            for (from, rows) in [(0, 5), (1, 4)] {
                let of = |array: &ArrayRef| {
                    let array = array.slice(from, rows);
                    encoded(&RecordBatch::try_from_iter([("t", array)]).unwrap())
                };
                assert_eq!(of(views), of(plain));
            }
        }
        // The decoder leaves other values' views where nulls are.
        let (views, bytes, _) = StringViewArray::from(vec![&long[..]; 2]).into_parts();
        let nulls = NullBuffer::from(vec![true, false]);
        let views = StringViewArray::try_new(views, bytes, Some(nulls)).unwrap();
        let plain = StringArray::from(vec![Some(&long[..]), None]);
        let of = |array: ArrayRef| encoded(&RecordBatch::try_from_iter([("t", array)]).unwrap());
        assert_eq!(of(Arc::new(views)), of(Arc::new(plain)));
    }

    #[test]
    fn bytes_that_are_no_row_are_refused() {
        let batch = batch();
        let schema = batch.schema();
        for row in encoded(&batch) {
            let decode = |bytes: &[u8]| {
                let mut decoder = Decoder::new(&schema, 0).unwrap();
                decoder.row(bytes).map(|()| decoder.finish())
            };
            assert!(decode(&row).is_some());
            for end in 0..row.len() {
                assert!(decode(&row[..end]).is_none(), "cut at {end}");
            }
            assert!(decode(&[&row[..], &[0]].concat()).is_none());
            // Other bytes may be another row, or none: whatever it is, it is a batch or an error.
            for at in 0..row.len() {
                let mut other = row.clone();
                other[at] ^= 0xC1;
                if let Some(Ok(batch)) = decode(&other) {
                    assert_eq!(batch.num_rows(), 1);
                }
            }
        }
    }

    #[test]
    fn what_a_row_does_not_have_by_itself_is_not_laid_out() {
        let of = |of: DataType| supports(&Arc::new(Schema::new(vec![Field::new("x", of, true)])));
        let list = |of: DataType| DataType::List(Arc::new(Field::new("item", of, true)));
        let words = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8));
        assert!(of(DataType::Null) && of(DataType::Float16) && of(list(list(DataType::Utf8))));
        for other in [
            words.clone(),
            DataType::Utf8View,
            list(words),
            list(DataType::Null),
            DataType::Struct(Vec::<Field>::new().into()),
            DataType::FixedSizeBinary(0),
        ] {
            assert!(!of(other.clone()), "{other}");
        }
        assert!(!supports(&Arc::new(Schema::empty())));
    }
}
