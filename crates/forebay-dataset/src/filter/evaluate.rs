//! Evaluates an expression over a record batch.
//!
//! Each part is two sets of rows: those for which it is true, and those for which it is false. It is
//! neither for the others, because a value is missing. So Kleene's logic is: true on both sides, or
//! false on one; and a negation swaps the sets.

use super::ready::{Node, Ready, Test, holds};
use arrow_array::{
    Array, ArrowPrimitiveType, PrimitiveArray, RecordBatch,
    cast::AsArray,
    types::{
        Date32Type, Date64Type, Decimal32Type, Decimal64Type, Decimal128Type, Decimal256Type,
        Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
        TimestampMicrosecondType, TimestampMillisecondType, TimestampNanosecondType,
        TimestampSecondType, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
    },
};
use arrow_buffer::{BooleanBuffer, NullBuffer, i256};
use arrow_schema::{DataType, TimeUnit};
use forebay_core::{Error, Result};

/// The rows for which a part is true, and those for which it is false.
struct Outcome {
    yes: BooleanBuffer,
    no: BooleanBuffer,
}

impl Outcome {
    fn new(yes: BooleanBuffer, valid: Option<&NullBuffer>) -> Self {
        match valid.filter(|nulls| nulls.null_count() > 0) {
            None => Outcome { no: !&yes, yes },
            Some(valid) => Outcome {
                no: &!&yes & valid.inner(),
                yes: &yes & valid.inner(),
            },
        }
    }
}

/// The rows of a batch for which the expression is true. The batch has its columns.
///
/// # Errors
/// `Internal` for a batch of other columns.
pub(crate) fn evaluate(ready: &Ready, batch: &RecordBatch) -> Result<BooleanBuffer> {
    if batch.num_columns() != ready.columns.fields().len() {
        return Err(Error::internal("a filter was given other columns"));
    }
    Ok(of_node(&ready.node, batch)?.yes)
}

fn of_node(node: &Node, batch: &RecordBatch) -> Result<Outcome> {
    Ok(match node {
        Node::Test { column, test } => of_test(batch.column(*column).as_ref(), test)?,
        Node::IsNull { column } => {
            let array = batch.column(*column);
            let valid = match array.logical_nulls() {
                Some(nulls) => nulls.into_inner(),
                None => BooleanBuffer::new_set(array.len()),
            };
            Outcome {
                yes: !&valid,
                no: valid,
            }
        }
        Node::Not(of) => {
            let of = of_node(of, batch)?;
            Outcome {
                yes: of.no,
                no: of.yes,
            }
        }
        Node::And(left, right) => {
            let (a, b) = (of_node(left, batch)?, of_node(right, batch)?);
            Outcome {
                yes: &a.yes & &b.yes,
                no: &a.no | &b.no,
            }
        }
        Node::Or(left, right) => {
            let (a, b) = (of_node(left, batch)?, of_node(right, batch)?);
            Outcome {
                yes: &a.yes | &b.yes,
                no: &a.no & &b.no,
            }
        }
    })
}

fn of_test(array: &dyn Array, test: &Test) -> Result<Outcome> {
    let rows = array.len();
    if let DataType::Dictionary(..) = array.data_type() {
        return of_dictionary(array, test);
    }
    if let Test::Always(b) = test {
        let all = match b {
            true => BooleanBuffer::new_set(rows),
            false => BooleanBuffer::new_unset(rows),
        };
        return Ok(Outcome::new(all, array.logical_nulls().as_ref()));
    }
    let nulls = array.nulls();
    macro_rules! ints {
        ($($kind:pat => $ty:ty),+ $(,)?) => {
            match array.data_type() {
                $($kind => Some(of_ints::<$ty>(array.as_primitive(), test)?),)+
                _ => None,
            }
        };
    }
    let found = ints! {
        DataType::Int8 => Int8Type,
        DataType::Int16 => Int16Type,
        DataType::Int32 => Int32Type,
        DataType::Int64 => Int64Type,
        DataType::UInt8 => UInt8Type,
        DataType::UInt16 => UInt16Type,
        DataType::UInt32 => UInt32Type,
        DataType::UInt64 => UInt64Type,
        DataType::Date32 => Date32Type,
        DataType::Date64 => Date64Type,
        DataType::Timestamp(TimeUnit::Second, _) => TimestampSecondType,
        DataType::Timestamp(TimeUnit::Millisecond, _) => TimestampMillisecondType,
        DataType::Timestamp(TimeUnit::Microsecond, _) => TimestampMicrosecondType,
        DataType::Timestamp(TimeUnit::Nanosecond, _) => TimestampNanosecondType,
        DataType::Decimal32(..) => Decimal32Type,
        DataType::Decimal64(..) => Decimal64Type,
        DataType::Decimal128(..) => Decimal128Type,
        DataType::Decimal256(..) => Decimal256Type,
    };
    if let Some(yes) = found {
        return Ok(Outcome::new(yes, nulls));
    }
    let yes = match array.data_type() {
        DataType::Float16 => of_floats(array.as_primitive::<Float16Type>(), |n| n.to_f64(), test)?,
        DataType::Float32 => of_floats(array.as_primitive::<Float32Type>(), f64::from, test)?,
        DataType::Float64 => of_floats(array.as_primitive::<Float64Type>(), |n| n, test)?,
        DataType::Boolean => {
            let values = array.as_boolean().values();
            let Test::Bools(outcomes) = test else {
                return Err(odd(array, test));
            };
            match outcomes {
                [false, false] => BooleanBuffer::new_unset(rows),
                [true, true] => BooleanBuffer::new_set(rows),
                [false, true] => values.clone(),
                [true, false] => !values,
            }
        }
        DataType::Utf8 => {
            let a = array.as_string::<i32>();
            of_bytes(array, test, |i| a.value(i).as_bytes())?
        }
        DataType::LargeUtf8 => {
            let a = array.as_string::<i64>();
            of_bytes(array, test, |i| a.value(i).as_bytes())?
        }
        DataType::Utf8View => {
            let a = array.as_string_view();
            of_bytes(array, test, |i| a.value(i).as_bytes())?
        }
        DataType::Binary => {
            let a = array.as_binary::<i32>();
            of_bytes(array, test, |i| a.value(i))?
        }
        DataType::LargeBinary => {
            let a = array.as_binary::<i64>();
            of_bytes(array, test, |i| a.value(i))?
        }
        DataType::BinaryView => {
            let a = array.as_binary_view();
            of_bytes(array, test, |i| a.value(i))?
        }
        DataType::FixedSizeBinary(_) => {
            let a = array.as_fixed_size_binary();
            of_bytes(array, test, |i| a.value(i))?
        }
        _ => return Err(odd(array, test)),
    };
    Ok(Outcome::new(yes, nulls))
}

fn odd(array: &dyn Array, test: &Test) -> Error {
    Error::internal(format!(
        "a filter tests values of {} by {test:?}",
        array.data_type()
    ))
}

/// Each different value is tested once.
fn of_dictionary(array: &dyn Array, test: &Test) -> Result<Outcome> {
    let dictionary = array
        .as_any_dictionary_opt()
        .ok_or_else(|| odd(array, test))?;
    let rows = array.len();
    if dictionary.values().is_empty() {
        return Ok(Outcome {
            yes: BooleanBuffer::new_unset(rows),
            no: BooleanBuffer::new_unset(rows),
        });
    }
    let of = of_test(dictionary.values().as_ref(), test)?;
    let keys = dictionary.normalized_keys();
    let valid = dictionary.keys().nulls();
    let at = |set: &BooleanBuffer| {
        BooleanBuffer::collect_bool(rows, |i| {
            valid.is_none_or(|v| v.is_valid(i)) && set.value(keys[i])
        })
    };
    Ok(Outcome {
        yes: at(&of.yes),
        no: at(&of.no),
    })
}

/// A whole number of any width.
trait Whole: Copy + Ord {
    fn wide(self) -> i256;
    /// The one that is equal, or the nearest; and whether it had to be moved up or down.
    fn nearest(n: i256) -> (Self, std::cmp::Ordering);
}

macro_rules! whole {
    ($($ty:ty),+) => {$(
        impl Whole for $ty {
            fn wide(self) -> i256 {
                i256::from_i128(self as i128)
            }

            fn nearest(n: i256) -> (Self, std::cmp::Ordering) {
                use std::cmp::Ordering::{Equal, Greater, Less};
                if n < <$ty>::MIN.wide() {
                    (<$ty>::MIN, Greater)
                } else if n > <$ty>::MAX.wide() {
                    (<$ty>::MAX, Less)
                } else {
                    (n.as_i128() as $ty, Equal)
                }
            }
        }
    )+};
}

whole!(i8, i16, i32, i64, u8, u16, u32, u64, i128);

impl Whole for i256 {
    fn wide(self) -> i256 {
        self
    }

    fn nearest(n: i256) -> (Self, std::cmp::Ordering) {
        (n, std::cmp::Ordering::Equal)
    }
}

fn of_ints<T: ArrowPrimitiveType>(array: &PrimitiveArray<T>, test: &Test) -> Result<BooleanBuffer>
where
    T::Native: Whole,
{
    use std::cmp::Ordering::{Equal, Greater, Less};
    let (rows, values) = (array.len(), array.values());
    match test {
        Test::Range { low, high, outside } => {
            let ((least, up), (most, down)) = (T::Native::nearest(*low), T::Native::nearest(*high));
            // Moved down to the greatest of the type, or up to the least: nothing is in the range.
            if up == Less || down == Greater {
                return Ok(match outside {
                    true => BooleanBuffer::new_set(rows),
                    false => BooleanBuffer::new_unset(rows),
                });
            }
            Ok(BooleanBuffer::collect_bool(rows, |i| {
                (least <= values[i] && values[i] <= most) != *outside
            }))
        }
        Test::IntMembers(members) => {
            let fit = members.iter().map(|n| T::Native::nearest(*n));
            let fit: Vec<T::Native> = fit.filter(|(_, o)| *o == Equal).map(|(n, _)| n).collect();
            Ok(BooleanBuffer::collect_bool(rows, |i| {
                fit.binary_search(&values[i]).is_ok()
            }))
        }
        _ => Err(odd(array, test)),
    }
}

fn of_floats<T: ArrowPrimitiveType>(
    array: &PrimitiveArray<T>,
    wide: impl Fn(T::Native) -> f64,
    test: &Test,
) -> Result<BooleanBuffer> {
    let (rows, values) = (array.len(), array.values());
    match test {
        Test::Float(how, n) => Ok(BooleanBuffer::collect_bool(rows, |i| {
            holds(*how, &wide(values[i]), n)
        })),
        Test::FloatMembers(members) => Ok(BooleanBuffer::collect_bool(rows, |i| {
            let n = wide(values[i]) + 0.0;
            members.binary_search_by(|m| m.total_cmp(&n)).is_ok()
        })),
        _ => Err(odd(array, test)),
    }
}

/// `value` is not asked for rows whose value is missing.
fn of_bytes<'a>(
    array: &dyn Array,
    test: &Test,
    value: impl Fn(usize) -> &'a [u8],
) -> Result<BooleanBuffer> {
    let (rows, nulls) = (array.len(), array.nulls());
    let there = |i: usize| nulls.is_none_or(|nulls| nulls.is_valid(i));
    match test {
        Test::Bytes(how, with) => Ok(BooleanBuffer::collect_bool(rows, |i| {
            there(i) && holds(*how, &value(i), &with.as_slice())
        })),
        Test::BytesMembers(members) => Ok(BooleanBuffer::collect_bool(rows, |i| {
            there(i) && {
                let value = value(i);
                members
                    .binary_search_by(|member| member.as_slice().cmp(value))
                    .is_ok()
            }
        })),
        Test::Prefix(prefix) => Ok(BooleanBuffer::collect_bool(rows, |i| {
            there(i) && value(i).starts_with(prefix)
        })),
        _ => Err(odd(array, test)),
    }
}
