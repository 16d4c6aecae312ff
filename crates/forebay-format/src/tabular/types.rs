//! Types of columns: the common type of two files' columns, and converting values of one type to
//! another.
//!
//! [`common_type`] follows what pyarrow calls permissive promotion, for numbers, text, bytes and
//! lists of them: the wider of two, a float that holds the integers next to it, and any type next
//! to columns of only nulls. [`cast`] then changes no value: an integer that the float cannot hold,
//! or a number that is too large, is an error that says which row it is in.

use arrow_array::{
    Array, ArrayRef, ArrowPrimitiveType, FixedSizeListArray, GenericByteArray, GenericListArray,
    MapArray, OffsetSizeTrait, PrimitiveArray, StructArray,
    cast::AsArray,
    new_null_array,
    types::{
        BinaryType, ByteArrayType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type,
        Int32Type, Int64Type, LargeBinaryType, LargeUtf8Type, UInt8Type, UInt16Type, UInt32Type,
        UInt64Type, Utf8Type,
    },
};
use arrow_buffer::{OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field, FieldRef, Fields, TimeUnit};
use forebay_core::{Error, limits, name::shorten};
use std::sync::Arc;

use DataType::*;

/// The type that has room for the values of both; `None` if there is none.
pub fn common_type(a: &DataType, b: &DataType) -> Option<DataType> {
    if a == b {
        return Some(a.clone());
    }
    Some(match (a, b) {
        (Null, other) | (other, Null) => other.clone(),
        _ if a.is_integer() && b.is_integer() => common_integer(a, b),
        _ if a.is_floating() && b.is_floating() => float_of(bits(a).max(bits(b))),
        _ if a.is_integer() && b.is_floating() => float_of(float_bits(a).max(bits(b))),
        _ if a.is_floating() && b.is_integer() => float_of(float_bits(b).max(bits(a))),
        (Utf8, LargeUtf8) | (LargeUtf8, Utf8) => LargeUtf8,
        (Binary, LargeBinary) | (LargeBinary, Binary) => LargeBinary,
        (List(a), List(b)) => List(common_item(a, b)?),
        (List(a) | LargeList(a), List(b) | LargeList(b)) => LargeList(common_item(a, b)?),
        (FixedSizeList(a, n), FixedSizeList(b, m)) if n == m => {
            FixedSizeList(common_item(a, b)?, *n)
        }
        (Struct(a), Struct(b)) if a.len() == b.len() => {
            let fields = a
                .iter()
                .zip(b)
                .map(|(a, b)| common_field(a, b).map(Arc::new));
            Struct(fields.collect::<Option<Fields>>()?)
        }
        (Map(a, sorted), Map(b, also_sorted)) => {
            let (Struct(ours), Struct(theirs)) = (a.data_type(), b.data_type()) else {
                return None;
            };
            // Keys and values are identified by their position, not by their names.
            let fields = ours.iter().zip(theirs).map(|(a, b)| common_item(a, b));
            let fields = Struct(fields.collect::<Option<Fields>>()?);
            let entries = a.as_ref().clone().with_data_type(fields);
            Map(Arc::new(entries), *sorted && *also_sorted)
        }
        (Dictionary(key, a), Dictionary(other, b)) if key == other => {
            Dictionary(key.clone(), Box::new(common_type(a, b)?))
        }
        _ => return None,
    })
}

/// The common field of both: of the same name, nullable if either is, with the first one's
/// metadata. What that calls the type (JSON, a tensor of some shape) stays only if both are called
/// so, or the other one has nothing but nulls.
pub fn common_field(a: &Field, b: &Field) -> Option<Field> {
    if a.name() != b.name() {
        return None;
    }
    let ty = common_type(a.data_type(), b.data_type())?;
    let nullable = a.is_nullable() || b.is_nullable();
    let mut both = a.clone().with_data_type(ty).with_nullable(nullable);
    for key in [EXTENSION_NAME, EXTENSION_METADATA] {
        let said = match (a.data_type(), b.data_type()) {
            (Null, _) => b.metadata().get(key),
            (_, Null) => a.metadata().get(key),
            _ if extension(a) == extension(b) => a.metadata().get(key),
            _ => None,
        };
        match said.cloned() {
            Some(said) => both.metadata_mut().insert(key, said),
            None => both.metadata_mut().remove(key),
        };
    }
    Some(both)
}

/// What a field's metadata call its type, and what more they say of it.
fn extension(field: &Field) -> (Option<&String>, &str) {
    let more = field.metadata().get(EXTENSION_METADATA);
    (
        field.metadata().get(EXTENSION_NAME),
        more.map_or("", String::as_str),
    )
}

/// Items of lists may be called `item`, `element` or otherwise: the name means nothing.
fn common_item(a: &FieldRef, b: &FieldRef) -> Option<FieldRef> {
    let b = b.as_ref().clone().with_name(a.name());
    common_field(a, &b).map(Arc::new)
}

/// Bits of a number.
fn bits(ty: &DataType) -> usize {
    ty.primitive_width().unwrap_or(0) * 8
}

fn common_integer(a: &DataType, b: &DataType) -> DataType {
    let (signed, unsigned) = match (a.is_signed_integer(), b.is_signed_integer()) {
        (true, true) | (false, false) => {
            return if bits(a) >= bits(b) {
                a.clone()
            } else {
                b.clone()
            };
        }
        (true, false) => (a, b),
        (false, true) => (b, a),
    };
    match bits(signed).max(2 * bits(unsigned)) {
        16 => Int16,
        32 => Int32,
        _ => Int64,
    }
}

/// Bits of the float that holds integers of this type; for 64 bits, those up to 2^53.
fn float_bits(integer: &DataType) -> usize {
    match bits(integer) {
        8 => 16,
        16 => 32,
        _ => 64,
    }
}

fn float_of(bits: usize) -> DataType {
    match bits {
        16 => Float16,
        32 => Float32,
        _ => Float64,
    }
}

/// A value that cannot be converted to the wanted type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// The row that it is in, counted within the array.
    pub row: usize,
    /// What it is, and why not.
    pub why: String,
}

impl Misfit {
    /// The whole column is of another kind.
    fn of_type(from: &DataType, to: &DataType) -> Self {
        Misfit {
            row: 0,
            why: format!("{} cannot be read as {}", from, to),
        }
    }
}

/// So many rows without a value.
///
/// # Errors
/// If they take more than any answer may: values of fixed sizes take their room also where they are
/// missing.
pub fn nulls(of: &DataType, rows: usize) -> Result<ArrayRef, Misfit> {
    let bytes = fixed_bytes(of).saturating_mul(rows as u64);
    if bytes > limits::ROWS_ANSWER_MAX_BYTES {
        return Err(Misfit {
            row: 0,
            why: format!("{rows} missing values of {of} take {bytes} bytes"),
        });
    }
    Ok(new_null_array(of, rows))
}

/// What a missing value of a type takes.
fn fixed_bytes(of: &DataType) -> u64 {
    match of {
        Null => 0,
        FixedSizeBinary(bytes) => u64::try_from(*bytes).unwrap_or(0),
        FixedSizeList(item, items) => {
            let items = u64::try_from(*items).unwrap_or(0);
            fixed_bytes(item.data_type()).saturating_mul(items)
        }
        Struct(fields) => fields
            .iter()
            .map(|field| fixed_bytes(field.data_type()))
            .fold(0, u64::saturating_add),
        Dictionary(keys, _) => fixed_bytes(keys),
        // One that is dense has a value of its first type only.
        Union(fields, _) => fields
            .iter()
            .map(|(_, field)| fixed_bytes(field.data_type()))
            .fold(8, u64::saturating_add),
        RunEndEncoded(ends, values) => {
            fixed_bytes(ends.data_type()).saturating_add(fixed_bytes(values.data_type()))
        }
        // The others have at most two offsets or a view.
        _ => of.primitive_width().map_or(16, |bytes| bytes as u64),
    }
}

/// Converts an array to this type; every value stays the same.
///
/// # Errors
/// The first value that the type does not hold; for values of nested arrays, the row that they are
/// in.
///
/// Whether one type can be read as another at all can be tested with an empty array.
pub fn cast(array: &ArrayRef, to: &DataType) -> Result<ArrayRef, Misfit> {
    let from = array.data_type();
    if from == to {
        return Ok(array.clone());
    }
    if matches!(from, Null) {
        return nulls(to, array.len());
    }
    let refused = || Misfit::of_type(from, to);
    match (from, to) {
        _ if is_number(from) && is_number(to) => cast_numbers(array.as_ref(), to),
        (Utf8, LargeUtf8) => cast_bytes::<Utf8Type, LargeUtf8Type>(array),
        (Binary, LargeBinary) => cast_bytes::<BinaryType, LargeBinaryType>(array),
        (LargeUtf8, Utf8) => cast_bytes::<LargeUtf8Type, Utf8Type>(array),
        (LargeBinary, Binary) => cast_bytes::<LargeBinaryType, BinaryType>(array),
        (List(_), FixedSizeList(item, n)) => {
            let list = array.as_list::<i32>();
            let width = *n as usize;
            let wrong =
                |row: &usize| !list.is_null(*row) && list.value_length(*row) as usize != width;
            if let Some(row) = (0..list.len()).find(wrong) {
                return Err(Misfit {
                    row,
                    why: format!(
                        "a list has {} values, and should have {n}",
                        list.value_length(row)
                    ),
                });
            }
            if list.null_count() > 0 || list.values().len() != list.len() * width {
                return Err(Misfit {
                    row: (0..list.len()).find(|&row| list.is_null(row)).unwrap_or(0),
                    why: format!("a list is missing, and should have {n} values"),
                });
            }
            let items = cast(list.values(), item.data_type()).map_err(|m| Misfit {
                row: m.row / width.max(1),
                ..m
            })?;
            FixedSizeListArray::try_new_with_length(item.clone(), *n, items, None, list.len())
                .map(|l| Arc::new(l) as _)
                .map_err(|e| unmade(e, to))
        }
        (List(_), List(item)) => cast_list::<i32, i32>(array, item).map(|l| Arc::new(l) as _),
        (List(_), LargeList(item)) => cast_list::<i32, i64>(array, item).map(|l| Arc::new(l) as _),
        (LargeList(_), LargeList(item)) => {
            cast_list::<i64, i64>(array, item).map(|l| Arc::new(l) as _)
        }
        (LargeList(_), List(item)) => cast_list::<i64, i32>(array, item).map(|l| Arc::new(l) as _),
        (FixedSizeList(_, n), FixedSizeList(item, m)) if n == m => {
            let list = array.as_fixed_size_list();
            let width = (*n).max(1) as usize;
            let items = cast(list.values(), item.data_type()).map_err(|m| Misfit {
                row: m.row / width,
                ..m
            })?;
            // Of lists without items, the items do not say how many lists there are.
            let nulls = list.nulls().cloned();
            FixedSizeListArray::try_new_with_length(item.clone(), *n, items, nulls, list.len())
                .map(|l| Arc::new(l) as _)
                .map_err(|e| unmade(e, to))
        }
        (Struct(_), Struct(fields)) => {
            let parts = array.as_struct();
            let columns = fields
                .iter()
                .map(|field| match parts.column_by_name(field.name()) {
                    Some(column) => cast(column, field.data_type()).map_err(|m| Misfit {
                        why: format!("{:?}: {}", field.name(), m.why),
                        ..m
                    }),
                    None if field.is_nullable() => nulls(field.data_type(), array.len()),
                    None => Err(Misfit {
                        row: 0,
                        why: format!("the field {:?} does not exist", field.name()),
                    }),
                });
            StructArray::try_new_with_length(
                fields.clone(),
                columns.collect::<Result<_, _>>()?,
                parts.nulls().cloned(),
                array.len(),
            )
            .map(|s| Arc::new(s) as _)
            .map_err(|e| unmade(e, to))
        }
        (Map(_, _), Map(entries, sorted)) => {
            let map = array.as_map();
            let Struct(fields) = entries.data_type() else {
                return Err(refused());
            };
            let columns = fields.iter().zip([map.keys(), map.values()]);
            let columns = columns.map(|(field, column)| {
                cast(column, field.data_type()).map_err(|m| Misfit {
                    row: row_of(map.offsets(), m.row),
                    ..m
                })
            });
            let items =
                StructArray::try_new(fields.clone(), columns.collect::<Result<_, _>>()?, None)
                    .map_err(|e| unmade(e, to))?;
            MapArray::try_new(
                entries.clone(),
                map.offsets().clone(),
                items,
                map.nulls().cloned(),
                *sorted,
            )
            .map(|m| Arc::new(m) as _)
            .map_err(|e| unmade(e, to))
        }
        (Dictionary(key, _), Dictionary(other, values)) if key == other => {
            let dictionary = array.as_any_dictionary();
            if let Ok(values) = cast(dictionary.values(), values) {
                return Ok(dictionary.with_values(values));
            }
            // A value that no row has is no misfit.
            let used = arrow_select::dictionary::garbage_collect_any_dictionary(dictionary)
                .map_err(|e| unmade(e, to))?;
            let dictionary = used.as_any_dictionary();
            let values = cast(dictionary.values(), values).map_err(|m| {
                let keys = dictionary.normalized_keys();
                let has = |row: &usize| used.is_valid(*row) && keys[*row] == m.row;
                Misfit {
                    row: (0..used.len()).find(has).unwrap_or(0),
                    ..m
                }
            })?;
            Ok(dictionary.with_values(values))
        }
        _ => Err(refused()),
    }
}

fn unmade(e: arrow_schema::ArrowError, to: &DataType) -> Misfit {
    Misfit {
        row: 0,
        why: format!("as {}: {e}", to),
    }
}

fn is_number(ty: &DataType) -> bool {
    ty.is_integer() || ty.is_floating()
}

/// The row of a list's item.
fn row_of<O: OffsetSizeTrait>(offsets: &OffsetBuffer<O>, item: usize) -> usize {
    offsets
        .partition_point(|end| end.as_usize() <= item)
        .saturating_sub(1)
}

fn cast_list<F: OffsetSizeTrait, T: OffsetSizeTrait>(
    array: &ArrayRef,
    item: &FieldRef,
) -> Result<GenericListArray<T>, Misfit> {
    let list = array.as_list::<F>();
    let items = cast(list.values(), item.data_type()).map_err(|m| Misfit {
        row: row_of(list.offsets(), m.row),
        ..m
    })?;
    let offsets = offsets::<F, T>(list.offsets())?;
    GenericListArray::try_new(item.clone(), offsets, items, list.nulls().cloned())
        .map_err(|e| unmade(e, item.data_type()))
}

fn offsets<F: OffsetSizeTrait, T: OffsetSizeTrait>(
    from: &OffsetBuffer<F>,
) -> Result<OffsetBuffer<T>, Misfit> {
    let offsets = from.iter().enumerate().map(|(at, offset)| {
        T::from_usize(offset.as_usize()).ok_or_else(|| Misfit {
            row: at.saturating_sub(1),
            why: "the values take more than 2 GiB".to_owned(),
        })
    });
    let offsets: Vec<T> = offsets.collect::<Result<_, _>>()?;
    Ok(OffsetBuffer::new(ScalarBuffer::from(offsets)))
}

fn cast_bytes<F: ByteArrayType, T: ByteArrayType>(array: &ArrayRef) -> Result<ArrayRef, Misfit> {
    let from = array.as_bytes::<F>();
    let offsets = offsets::<F::Offset, T::Offset>(from.offsets())?;
    GenericByteArray::<T>::try_new(offsets, from.values().clone(), from.nulls().cloned())
        .map(|a| Arc::new(a) as _)
        .map_err(|e| unmade(e, &T::DATA_TYPE))
}

/// A number of any type.
#[derive(Clone, Copy)]
enum Number {
    Integer(i128),
    Float(f64),
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Number::Integer(n) => n.fmt(f),
            Number::Float(x) => x.fmt(f),
        }
    }
}

impl Number {
    /// The same number as an integer.
    fn integer(self) -> Option<i128> {
        match self {
            Number::Integer(n) => Some(n),
            Number::Float(x) => (x.trunc() == x && x.abs() < 1e30).then_some(x as i128),
        }
    }

    /// The same number as a float of 64 bits.
    fn float(self) -> Option<f64> {
        match self {
            Number::Integer(n) => Some(n as f64).filter(|&x| x as i128 == n),
            Number::Float(x) => Some(x),
        }
    }

    /// Whether a float represents it: exactly, if it is an integer; as the nearest one, and not as
    /// infinity, if it is itself a float.
    fn is_told_by(self, float: f64) -> bool {
        match self {
            Number::Integer(_) => self.float() == Some(float),
            Number::Float(x) => float.is_finite() || !x.is_finite(),
        }
    }
}

fn cast_numbers(array: &dyn Array, to: &DataType) -> Result<ArrayRef, Misfit> {
    macro_rules! integers {
        ($ty:ty) => {
            numbers_as(array.as_primitive::<$ty>(), to, |n| {
                Number::Integer(i128::from(n))
            })
        };
    }
    match array.data_type() {
        Int8 => integers!(Int8Type),
        Int16 => integers!(Int16Type),
        Int32 => integers!(Int32Type),
        Int64 => integers!(Int64Type),
        UInt8 => integers!(UInt8Type),
        UInt16 => integers!(UInt16Type),
        UInt32 => integers!(UInt32Type),
        UInt64 => integers!(UInt64Type),
        Float16 => numbers_as(array.as_primitive::<Float16Type>(), to, |x| {
            Number::Float(x.to_f64())
        }),
        Float32 => numbers_as(array.as_primitive::<Float32Type>(), to, |x| {
            Number::Float(f64::from(x))
        }),
        _ => numbers_as(array.as_primitive::<Float64Type>(), to, Number::Float),
    }
}

fn numbers_as<S: ArrowPrimitiveType>(
    array: &PrimitiveArray<S>,
    to: &DataType,
    number: fn(S::Native) -> Number,
) -> Result<ArrayRef, Misfit> {
    macro_rules! integers {
        ($ty:ty, $native:ty) => {
            made::<S, $ty>(array, to, number, |n| {
                <$native>::try_from(n.integer()?).ok()
            })
        };
    }
    match to {
        Int8 => integers!(Int8Type, i8),
        Int16 => integers!(Int16Type, i16),
        Int32 => integers!(Int32Type, i32),
        Int64 => integers!(Int64Type, i64),
        UInt8 => integers!(UInt8Type, u8),
        UInt16 => integers!(UInt16Type, u16),
        UInt32 => integers!(UInt32Type, u32),
        UInt64 => integers!(UInt64Type, u64),
        Float16 => made::<S, Float16Type>(array, to, number, |n| {
            let half = <Float16Type as ArrowPrimitiveType>::Native::from_f64(n.float()?);
            n.is_told_by(half.to_f64()).then_some(half)
        }),
        Float32 => made::<S, Float32Type>(array, to, number, |n| {
            let single = n.float()? as f32;
            n.is_told_by(f64::from(single)).then_some(single)
        }),
        _ => made::<S, Float64Type>(array, to, number, Number::float),
    }
}

fn made<S: ArrowPrimitiveType, T: ArrowPrimitiveType>(
    array: &PrimitiveArray<S>,
    to: &DataType,
    number: fn(S::Native) -> Number,
    convert: fn(Number) -> Option<T::Native>,
) -> Result<ArrayRef, Misfit> {
    let mut values = Vec::with_capacity(array.len());
    for (row, &value) in array.values().iter().enumerate() {
        values.push(match convert(number(value)) {
            Some(value) => value,
            // The value under a null does not matter.
            None if array.is_null(row) => T::Native::default(),
            None => {
                return Err(Misfit {
                    row,
                    why: format!("{} does not fit {}", number(value), to),
                });
            }
        });
    }
    let nulls = array.nulls().cloned();
    Ok(Arc::new(PrimitiveArray::<T>::new(
        ScalarBuffer::from(values),
        nulls,
    )))
}

/// The type for a name, as pyarrow writes it (`int64`, `list<item: float>`, `timestamp[us,
/// tz=UTC]`) or as this program does (`Int64`). `json` is text that holds the JSON of a value.
///
/// # Errors
/// `Invalid` for anything else.
pub fn named_field(name: &str, ty: &str) -> forebay_core::Result<Field> {
    let wrong = || {
        Error::invalid(format!(
            "{:?} is not the type of a column ({name:?})",
            shorten(ty)
        ))
        .hint(format!(
            "name a type as Arrow does ({}, ...; not every format has all of them), or json",
            COMMON_TYPES.join(", ")
        ))
    };
    if ty.len() > TYPE_NAME_MAX_BYTES {
        return Err(wrong());
    }
    let mut text = TypeText { rest: ty, depth: 0 };
    if let Some(field) = text.field(name)
        && text.rest.trim().is_empty()
    {
        return Ok(field);
    }
    // The other parser calls itself for each level.
    if nesting(ty) > limits::SCHEMA_DEPTH_MAX {
        return Err(wrong());
    }
    let ty: DataType = ty.trim().parse().map_err(|_| wrong())?;
    Ok(Field::new(name, ty, true))
}

/// How deeply its brackets are nested, at most: those in names of fields count, too.
fn nesting(ty: &str) -> usize {
    let (mut open, mut most) = (0usize, 0);
    for byte in ty.bytes() {
        match byte {
            b'(' | b'<' | b'[' | b'{' => {
                open += 1;
                most = most.max(open);
            }
            b')' | b'>' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
    }
    most
}

/// Types that files of every format can be read as whose columns are named.
const COMMON_TYPES: [&str; 4] = ["int64", "float", "string", "bool"];

/// The longest name of a type.
const TYPE_NAME_MAX_BYTES: usize = 64 << 10;

/// The rest of the name of a type.
struct TypeText<'a> {
    rest: &'a str,
    depth: usize,
}

impl<'a> TypeText<'a> {
    /// Takes a mark that must come next.
    fn mark(&mut self, mark: &str) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(mark)?;
        Some(())
    }

    /// Takes what comes before any of these marks.
    fn until(&mut self, marks: &[char]) -> &'a str {
        let text = self.rest.trim_start();
        let (taken, rest) = text.split_at(text.find(marks).unwrap_or(text.len()));
        self.rest = rest;
        taken.trim()
    }

    /// A type, and `not null` after it.
    fn field(&mut self, name: &str) -> Option<Field> {
        if self.depth > limits::SCHEMA_DEPTH_MAX {
            return None;
        }
        self.depth += 1;
        let word = self.until(&['<', '[', '(', ',', '>', ' ']);
        let word = word.to_ascii_lowercase();
        let mut json = word == "json";
        let ty = match word.as_str() {
            "null" => Null,
            "bool" | "boolean" => Boolean,
            "int8" => Int8,
            "int16" => Int16,
            "int32" => Int32,
            "int64" | "int" => Int64,
            "uint8" => UInt8,
            "uint16" => UInt16,
            "uint32" => UInt32,
            "uint64" => UInt64,
            "halffloat" | "half" | "float16" => Float16,
            "float" | "float32" => Float32,
            "double" | "float64" => Float64,
            "string" | "utf8" | "str" | "json" => Utf8,
            "large_string" | "large_utf8" => LargeUtf8,
            "string_view" => Utf8View,
            "binary" | "bytes" => Binary,
            "large_binary" => LargeBinary,
            "binary_view" => BinaryView,
            "extension" => {
                self.mark("<arrow.json>")?;
                json = true;
                Utf8
            }
            "date32" => {
                let _ = self.mark("[day]");
                Date32
            }
            "date64" => {
                let _ = self.mark("[ms]");
                Date64
            }
            "time32" | "time64" | "duration" | "timestamp" => {
                self.mark("[")?;
                let unit = match self.until(&[',', ']']) {
                    "s" => TimeUnit::Second,
                    "ms" => TimeUnit::Millisecond,
                    "us" => TimeUnit::Microsecond,
                    "ns" => TimeUnit::Nanosecond,
                    _ => return None,
                };
                let mut zone = None;
                if word == "timestamp" && self.mark(",").is_some() {
                    self.mark("tz=")?;
                    zone = Some(self.until(&[']']).into());
                }
                self.mark("]")?;
                match (word.as_str(), unit) {
                    ("time32", TimeUnit::Second | TimeUnit::Millisecond) => Time32(unit),
                    ("time64", TimeUnit::Microsecond | TimeUnit::Nanosecond) => Time64(unit),
                    ("duration", _) => Duration(unit),
                    ("timestamp", _) => Timestamp(unit, zone),
                    _ => return None,
                }
            }
            "decimal32" | "decimal64" | "decimal128" | "decimal256" => {
                self.mark("(")?;
                let digits = self.until(&[')']);
                self.mark(")")?;
                // The other parser knows how many digits there may be.
                format!("D{}({digits})", &word[1..])
                    .parse::<DataType>()
                    .ok()?
            }
            "dictionary" => {
                self.mark("<values=")?;
                let values = self.field("")?.data_type().clone();
                self.mark(",")?;
                self.mark("indices=")?;
                let keys = self.field("")?.data_type().clone();
                self.mark(",")?;
                self.mark("ordered=")?;
                self.until(&['>']);
                self.mark(">")?;
                if !keys.is_dictionary_key_type() {
                    return None;
                }
                Dictionary(Box::new(keys), Box::new(values))
            }
            "fixed_size_binary" => FixedSizeBinary(self.size()?),
            "list" => List(Arc::new(self.item()?)),
            "large_list" => LargeList(Arc::new(self.item()?)),
            "fixed_size_list" => {
                let item = Arc::new(self.item()?);
                FixedSizeList(item, self.size()?)
            }
            "struct" => {
                self.mark("<")?;
                let mut fields = Vec::new();
                while self.mark(">").is_none() {
                    if !fields.is_empty() {
                        self.mark(",")?;
                    }
                    let name = self.until(&[':']).to_owned();
                    self.mark(":")?;
                    fields.push(self.field(&name)?);
                }
                Struct(fields.into())
            }
            "map" => self.map()?,
            _ => return None,
        };
        self.depth -= 1;
        let nullable = self.mark("not null").is_none();
        let field = Field::new(name, ty, nullable);
        Some(if json { json_field(field) } else { field })
    }

    /// `<item: int64>` or `<int64>`.
    fn item(&mut self) -> Option<Field> {
        self.mark("<")?;
        let name = match self.rest.find([':', '<', '>']) {
            Some(at) if self.rest.as_bytes()[at] == b':' => {
                let name = self.until(&[':']).to_owned();
                self.mark(":")?;
                name
            }
            _ => "item".to_owned(),
        };
        let field = self.field(&name)?;
        self.mark(">")?;
        Some(field)
    }

    /// `<string, int64>`, with what its parts are called where that is not what they mostly are:
    /// `<string ('k'), int64 ('v'), keys_sorted ('key_value')>`.
    fn map(&mut self) -> Option<DataType> {
        // What is in the entries is two levels below.
        self.depth += 1;
        self.mark("<")?;
        let key = self.field("key")?;
        let key_name = self.called();
        self.mark(",")?;
        let value = self.field("value")?;
        let mut value_name = self.called();
        let sorted = self.mark(",").is_some();
        if sorted {
            self.mark("keys_sorted")?;
        }
        let mut entries_name = self.called();
        if !sorted && entries_name.is_none() {
            // A single name may be that of either. PyArrow calls the entries of Parquet something.
            entries_name = value_name.take();
        }
        self.mark(">")?;
        self.depth -= 1;
        let key = key.with_nullable(false);
        let key = key.with_name(key_name.unwrap_or_else(|| "key".to_owned()));
        let value = value.with_name(value_name.unwrap_or_else(|| "value".to_owned()));
        let entries = Struct(vec![key, value].into());
        let name = entries_name.unwrap_or_else(|| "entries".to_owned());
        Some(Map(Arc::new(Field::new(name, entries, false)), sorted))
    }

    /// `('name')`, if that comes next.
    fn called(&mut self) -> Option<String> {
        self.mark("('")?;
        let (name, rest) = self.rest.split_once("')")?;
        self.rest = rest;
        Some(name.to_owned())
    }

    /// `[3]`.
    fn size(&mut self) -> Option<i32> {
        self.mark("[")?;
        let size = self.until(&[']']).parse().ok().filter(|&n| n >= 0)?;
        self.mark("]")?;
        Some(size)
    }
}

/// Marks text as the JSON of a value: Arrow's canonical extension type.
const EXTENSION_NAME: &str = "ARROW:extension:name";
const EXTENSION_METADATA: &str = "ARROW:extension:metadata";
const EXTENSION_JSON: &str = "arrow.json";

/// A field whose values are the JSON of the file's values.
pub(crate) fn json_field(field: Field) -> Field {
    let mut metadata = field.metadata().clone();
    metadata.insert(EXTENSION_NAME.to_owned(), EXTENSION_JSON.to_owned());
    field.with_metadata(metadata)
}

/// The type of a column, for people: `Json` if it is the JSON of values without a common type, and
/// without what the metadata of nested fields say. [`named_field`] reads it: as Arrow writes it, or in
/// its own grammar (`struct<c: json, n: int64>`) where that is not read again as it was.
pub fn type_name(field: &Field) -> String {
    if is_json(field) {
        return "Json".to_owned();
    }
    let ty = bare(field.data_type(), true);
    let is_read = |text: &str| named_field("", text).is_ok_and(|read| *read.data_type() == ty);
    let arrow = bare(field.data_type(), false).to_string();
    if is_read(&arrow) {
        return arrow;
    }
    let mut text = String::new();
    let written = write_type(&Field::new("", ty.clone(), true), &mut text);
    match written.is_some() && is_read(&text) {
        true => text,
        false => arrow,
    }
}

/// A type without the metadata of the fields within it; with `json`, those that are JSON still are.
fn bare(ty: &DataType, json: bool) -> DataType {
    let field = |of: &FieldRef| {
        let made = Field::new(of.name(), bare(of.data_type(), json), of.is_nullable());
        Arc::new(match json && is_json(of) {
            true => json_field(made),
            false => made,
        })
    };
    match ty {
        List(item) => List(field(item)),
        LargeList(item) => LargeList(field(item)),
        ListView(item) => ListView(field(item)),
        LargeListView(item) => LargeListView(field(item)),
        FixedSizeList(item, items) => FixedSizeList(field(item), *items),
        Struct(fields) => Struct(fields.iter().map(field).collect()),
        Map(entries, sorted) => Map(field(entries), *sorted),
        Dictionary(keys, values) => Dictionary(keys.clone(), Box::new(bare(values, json))),
        other => other.clone(),
    }
}

/// Writes a type as [`TypeText`] reads it, without `not null`; `None` if that does not read it.
fn write_type(field: &Field, out: &mut String) -> Option<()> {
    fn unit(of: &TimeUnit) -> &'static str {
        match of {
            TimeUnit::Second => "s",
            TimeUnit::Millisecond => "ms",
            TimeUnit::Microsecond => "us",
            TimeUnit::Nanosecond => "ns",
        }
    }
    fn named(field: &Field, out: &mut String) -> Option<()> {
        out.push_str(field.name());
        out.push_str(": ");
        write_type(field, out)?;
        if !field.is_nullable() {
            out.push_str(" not null");
        }
        Some(())
    }
    fn list(name: &str, item: &Field, out: &mut String) -> Option<()> {
        out.push_str(name);
        out.push('<');
        named(item, out)?;
        out.push('>');
        Some(())
    }
    match field.data_type() {
        _ if is_json(field) => out.push_str("json"),
        Null => out.push_str("null"),
        Boolean => out.push_str("bool"),
        Int8 => out.push_str("int8"),
        Int16 => out.push_str("int16"),
        Int32 => out.push_str("int32"),
        Int64 => out.push_str("int64"),
        UInt8 => out.push_str("uint8"),
        UInt16 => out.push_str("uint16"),
        UInt32 => out.push_str("uint32"),
        UInt64 => out.push_str("uint64"),
        Float16 => out.push_str("halffloat"),
        Float32 => out.push_str("float"),
        Float64 => out.push_str("double"),
        Utf8 => out.push_str("string"),
        LargeUtf8 => out.push_str("large_string"),
        Utf8View => out.push_str("string_view"),
        Binary => out.push_str("binary"),
        LargeBinary => out.push_str("large_binary"),
        BinaryView => out.push_str("binary_view"),
        Date32 => out.push_str("date32[day]"),
        Date64 => out.push_str("date64[ms]"),
        Time32(of) => out.push_str(&format!("time32[{}]", unit(of))),
        Time64(of) => out.push_str(&format!("time64[{}]", unit(of))),
        Duration(of) => out.push_str(&format!("duration[{}]", unit(of))),
        Timestamp(of, None) => out.push_str(&format!("timestamp[{}]", unit(of))),
        Timestamp(of, Some(zone)) => out.push_str(&format!("timestamp[{}, tz={zone}]", unit(of))),
        FixedSizeBinary(bytes) => out.push_str(&format!("fixed_size_binary[{bytes}]")),
        List(item) => return list("list", item, out),
        LargeList(item) => return list("large_list", item, out),
        FixedSizeList(item, items) => {
            list("fixed_size_list", item, out)?;
            out.push_str(&format!("[{items}]"));
        }
        Struct(fields) => {
            out.push_str("struct<");
            for (i, field) in fields.iter().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                named(field, out)?;
            }
            out.push('>');
        }
        _ => return None,
    }
    Some(())
}

/// Whether a field's text is the JSON of a file's value, and not a text itself.
pub fn is_json(field: &Field) -> bool {
    field
        .metadata()
        .get(EXTENSION_NAME)
        .is_some_and(|name| name == EXTENSION_JSON)
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{DictionaryArray, Int8Array, Int64Array};

    #[test]
    fn a_type_is_nested_as_deeply_as_a_schema_may_be() {
        let depth = |name: &str, open: &str, close: &str, levels: usize| {
            let ty = format!("{}{name}{}", open.repeat(levels), close.repeat(levels));
            named_field("x", &ty)
        };
        for (name, open, close) in [
            ("Int64", "List(", ")"),
            ("int64", "list<item: ", ">"),
            ("Int64", "FixedSizeList(3 x ", ")"),
            ("Int64", "((", "))"),
            ("Int64", "Struct(\"a\": ", ")"),
        ] {
            let _ = depth(name, open, close, 3);
            for levels in [65, 70, 1000, 8000] {
                assert!(
                    depth(name, open, close, levels).is_err(),
                    "{levels} of {open}"
                );
            }
        }
        assert!(depth("int64", "list<item: ", ">", 60).is_ok());
    }

    #[test]
    fn the_types_that_the_hint_names_are_those_of_every_format() {
        for ty in COMMON_TYPES {
            let schema = Arc::new(arrow_schema::Schema::new(vec![
                named_field("x", ty).unwrap(),
            ]));
            crate::jsonl::check_columns(&schema).unwrap();
            crate::csv::check_columns(&schema).unwrap();
        }
        let e = named_field("x", "integer").unwrap_err();
        assert!(e.hint_text().unwrap().contains("int64"), "{e:?}");
    }

    #[test]
    fn the_name_of_a_nested_type_can_be_given_back() {
        let deep = "list<item: struct<a b: json not null, : large_string, s: struct<>, t: \
                    timestamp[us, tz=UTC], b: fixed_size_binary[3], d: date32[day], m: \
                    time64[ns] not null, f: fixed_size_list<element: json>[2] not null>>";
        for ty in [
            "list<item: json>",
            "large_list<item: json not null>",
            "struct<c: json, n: int64>",
            "struct<c: json, x: double, y: float, z: bool, u: uint8, v: null>",
            deep,
        ] {
            assert_eq!(type_name(&named_field("x", ty).unwrap()), ty);
        }
        assert_eq!(type_name(&named_field("x", "json").unwrap()), "Json");
        // As Arrow writes it, where there is no JSON within, and without what metadata say.
        let noted = |name: &str, ty| Field::new(name, ty, false).with_metadata([("unit", "m")]);
        let item = || Arc::new(noted("c", Int64));
        let entries = Struct(vec![noted("key", Utf8), noted("value", Int64)].into());
        for ty in [
            List(item()),
            LargeList(item()),
            FixedSizeList(item(), 3),
            Struct(vec![noted("a: b", Decimal128(9, 2)), noted("c", List(item()))].into()),
            Map(Arc::new(noted("entries", entries)), false),
            Dictionary(Box::new(Int8), Box::new(Utf8)),
        ] {
            let name = type_name(&Field::new("x", ty.clone(), true));
            let read = named_field("x", &name).unwrap();
            assert_eq!(read.data_type(), &bare(&ty, true), "{name}");
        }
        let quoted = Struct(vec![Field::new("a\"b", Int64, true)].into());
        let name = type_name(&Field::new("x", quoted, true));
        assert_eq!(name, "struct<a\"b: int64>");
        // Names that neither grammar has.
        let texts = Struct(vec![json_field(Field::new("a:b", Utf8, true))].into());
        let name = type_name(&Field::new("x", texts, true));
        assert_eq!(name, "Struct(\"a:b\": Utf8)");
    }

    #[test]
    fn decimals_and_dictionaries_are_read_as_pyarrow_writes_them() {
        let of_texts = Dictionary(Box::new(Int32), Box::new(Utf8));
        let item = Field::new("item", Decimal128(38, 0), true);
        let fields = vec![
            Field::new("a", of_texts.clone(), false),
            Field::new("b", Decimal64(9, 3), true),
        ];
        for (ty, read) in [
            ("decimal32(5, 2)", Decimal32(5, 2)),
            ("decimal128(10, 3)", Decimal128(10, 3)),
            ("decimal256(70, -2)", Decimal256(70, -2)),
            (
                "dictionary<values=string, indices=int32, ordered=0>",
                of_texts,
            ),
            (
                "dictionary<values=timestamp[us, tz=UTC], indices=uint8, ordered=1>",
                Dictionary(
                    Box::new(UInt8),
                    Box::new(Timestamp(TimeUnit::Microsecond, Some("UTC".into()))),
                ),
            ),
            ("list<item: decimal128(38, 0)>", List(Arc::new(item))),
            (
                "struct<a: dictionary<values=string, indices=int32, ordered=0> not null, b: \
                 decimal64(9, 3)>",
                Struct(fields.into()),
            ),
        ] {
            assert_eq!(*named_field("x", ty).unwrap().data_type(), read, "{ty}");
        }
        for wrong in [
            "decimal128",
            "decimal128(10)",
            "decimal128(39, 2)",
            "dictionary<values=string, indices=float, ordered=0>",
            "dictionary<values=string>",
        ] {
            assert!(named_field("x", wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn maps_are_read_as_pyarrow_writes_them() {
        let map = |names: [&str; 3], key: DataType, value: DataType, sorted| {
            let fields = vec![
                Field::new(names[0], key, false),
                Field::new(names[1], value, true),
            ];
            let entries = Field::new(names[2], Struct(fields.into()), false);
            Map(Arc::new(entries), sorted)
        };
        let usual = ["key", "value", "entries"];
        let inner = map(usual, Int8, Decimal128(9, 2), true);
        let item = Field::new("item", inner.clone(), true);
        for (ty, read) in [
            ("map<string, int32>", map(usual, Utf8, Int32, false)),
            ("map<int8, decimal128(9, 2), keys_sorted>", inner.clone()),
            (
                "map<string, map<int8, decimal128(9, 2), keys_sorted>>",
                map(usual, Utf8, inner, false),
            ),
            (
                "list<item: map<int8, decimal128(9, 2), keys_sorted>>",
                List(Arc::new(item)),
            ),
            // As PyArrow reads maps of Parquet files.
            (
                "map<string, int32 ('m')>",
                map(["key", "value", "m"], Utf8, Int32, false),
            ),
            (
                "map<string ('k'), int32 ('v') ('e f')>",
                map(["k", "v", "e f"], Utf8, Int32, false),
            ),
            (
                "map<string, int32 ('v'), keys_sorted>",
                map(["key", "v", "entries"], Utf8, Int32, true),
            ),
        ] {
            assert_eq!(*named_field("x", ty).unwrap().data_type(), read, "{ty}");
        }
        for wrong in [
            "map",
            "map<string>",
            "map<string, int32",
            "map<string, int32, int8>",
            "map<string, int32 ('x>",
        ] {
            assert!(named_field("x", wrong).is_err(), "{wrong}");
        }
        let deep = |levels: usize| {
            let ty = format!("{}int8{}", "map<int8, ".repeat(levels), ">".repeat(levels));
            named_field("x", &ty)
        };
        assert!(deep(30).is_ok());
        assert!(deep(33).is_err());
    }

    #[test]
    fn missing_values_of_fixed_size_take_no_more_than_an_answer() {
        let list = |items| named_field("x", &format!("fixed_size_list<item: int64>[{items}]"));
        let of = |items| list(items).unwrap().data_type().clone();
        assert_eq!(nulls(&of(1000), 1000).unwrap().len(), 1000);
        let nested = named_field(
            "x",
            "struct<a: fixed_size_list<item: fixed_size_list<item: int64>[2000000000]>[2000000000]>",
        );
        let nested = nested.unwrap().data_type().clone();
        for (of, rows) in [
            (of(100_000_000), 1000),
            (nested, 1),
            (FixedSizeBinary(i32::MAX), 3),
        ] {
            let misfit = nulls(&of, rows).unwrap_err();
            assert!(misfit.why.contains("missing values"), "{}", misfit.why);
        }
        let missing: ArrayRef = Arc::new(arrow_array::NullArray::new(1000));
        assert!(cast(&missing, &of(100_000_000)).is_err());
    }

    #[test]
    fn what_one_file_calls_its_values_is_not_said_of_those_of_another() {
        let lists = || named_field("x", "fixed_size_list<item: float>[6]").unwrap();
        let tensor = |shape: &str| {
            let mut field = lists();
            let of = field.metadata_mut();
            of.insert("unit", "m");
            of.insert(EXTENSION_NAME, "arrow.fixed_shape_tensor");
            of.insert(EXTENSION_METADATA, shape);
            field
        };
        let name = |field: &Field| field.metadata().get(EXTENSION_NAME).cloned();
        let (wide, tall) = (tensor("{\"shape\":[2,3]}"), tensor("{\"shape\":[3,2]}"));
        assert_eq!(common_field(&wide, &wide).as_ref(), Some(&wide));
        for other in [&tall, &lists()] {
            for (a, b) in [(&wide, other), (other, &wide)] {
                let both = common_field(a, b).unwrap();
                assert_eq!(both.data_type(), lists().data_type());
                assert_eq!(extension(&both), (None, ""));
                assert_eq!(both.metadata().get("unit"), a.metadata().get("unit"));
            }
        }
        // Within lists too.
        let list = |item: Field| Field::new("x", List(Arc::new(item)), true);
        let json = || json_field(Field::new("item", Utf8, true));
        let text = || Field::new("item", Utf8, true);
        let both = common_field(&list(json()), &list(text()));
        assert_eq!(both, Some(list(text())));
        let both = common_field(&list(json()), &list(json().with_data_type(LargeUtf8)));
        assert_eq!(both, Some(list(json().with_data_type(LargeUtf8))));
        // Nulls are called nothing.
        let nothing = Field::new("item", Null, true);
        for (a, b) in [(&nothing, &json()), (&json(), &nothing)] {
            assert_eq!(name(&common_field(a, b).unwrap()), name(&json()));
        }
    }

    #[test]
    fn lists_of_no_items_are_as_many_as_before() {
        let of = |item| named_field("x", &format!("fixed_size_list<item: {item}>[0]")).unwrap();
        let (from, to) = (of("int32"), of("int64"));
        let FixedSizeList(item, 0) = from.data_type() else {
            panic!("{from}");
        };
        let items = new_null_array(item.data_type(), 0);
        let lists = FixedSizeListArray::try_new_with_length(item.clone(), 0, items, None, 3);
        let lists: ArrayRef = Arc::new(lists.unwrap());
        let wide = cast(&lists, to.data_type()).unwrap();
        assert_eq!((wide.data_type(), wide.len()), (to.data_type(), 3));
        assert_eq!(wide.null_count(), 0);
    }

    #[test]
    fn a_misfit_in_a_dictionary_is_the_row_that_has_it() {
        let values = || Arc::new(Int64Array::from(vec![1 << 60, 5, (1 << 53) + 1]));
        let to = Dictionary(Box::new(Int8), Box::new(Float64));
        let of = |keys: Vec<Option<i8>>| -> ArrayRef {
            Arc::new(DictionaryArray::new(Int8Array::from(keys), values()))
        };
        let misfit = cast(&of(vec![Some(0), Some(1), None, Some(1), Some(2)]), &to).unwrap_err();
        assert_eq!(misfit.row, 4);
        // The value that no float can hold is in no row.
        let fits = cast(&of(vec![Some(1), None, Some(0)]), &to).unwrap();
        let rows = fits
            .as_dictionary::<Int8Type>()
            .downcast_dict::<arrow_array::Float64Array>();
        let rows: Vec<_> = rows.unwrap().into_iter().collect();
        assert_eq!(rows, [Some(5.0), None, Some((1u64 << 60) as f64)]);
    }
}
