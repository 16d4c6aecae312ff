//! An expression made ready for columns of known types: each comparison with a value becomes a test
//! of the column's own values.
//!
//! Numbers are compared as such, whatever their types. Whole numbers of any width, dates, times of
//! any unit and decimals of any scale are whole numbers of their column's unit, and the value is a
//! point among these or between two of them; so all six comparisons are ranges with exact ends.
//! Floating-point columns compare in 64 bits, which hold each of their values exactly. A whole number
//! that 64 bits do not hold lies between two that they do.

use crate::{Dataset, computed::Document};
use arrow_buffer::i256;
use arrow_schema::{DataType, Field, Schema, SchemaRef, TimeUnit};
use forebay_core::{Error, Result};
use forebay_format::{
    jsonl,
    tabular::{is_json, type_name},
};
use forebay_protocol::filter::{Decimal, Expr, How, Literal};
use std::{collections::HashSet, sync::Arc};

/// An expression over columns of a dataset.
#[derive(Debug)]
pub(crate) struct Ready {
    /// The columns that it needs, each once, with their types in the dataset.
    pub columns: SchemaRef,
    pub node: Node,
    /// In the form that equal expressions share.
    pub document: Document,
    /// Its comparisons, and what connects them.
    pub parts: usize,
}

/// A part of an expression. Columns are numbers of those that it needs.
#[derive(Debug)]
pub(crate) enum Node {
    Test { column: usize, test: Test },
    IsNull { column: usize },
    And(Box<Node>, Box<Node>),
    Or(Box<Node>, Box<Node>),
    Not(Box<Node>),
}

/// What is true or false for a value that is not missing.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Test {
    /// The same for each.
    Always(bool),
    /// Of `false`, and of `true`.
    Bools([bool; 2]),
    /// Whether it is in this range, both ends included; or else outside of it.
    Range {
        low: i256,
        high: i256,
        outside: bool,
    },
    /// Ascending.
    IntMembers(Vec<i256>),
    Float(How, f64),
    /// Ascending; without -0.0.
    FloatMembers(Vec<f64>),
    Bytes(How, Vec<u8>),
    /// Ascending.
    BytesMembers(Vec<Vec<u8>>),
    Prefix(Vec<u8>),
}

impl Ready {
    /// # Errors
    /// `Invalid` for a column that is not there, or that does not compare with a value.
    pub fn new(expr: &Expr, dataset: &Dataset) -> Result<Self> {
        let mut names = Vec::new();
        named(expr, &mut names);
        let parts = 2 * names.len();
        let mut fields: Vec<Field> = Vec::new();
        let mut seen = HashSet::new();
        for name in names {
            if !seen.insert(name) {
                continue;
            }
            let besides = dataset.besides().filter(|f| f.name() == name);
            let own = dataset.schema().field_with_name(name).ok().cloned();
            fields.push(own.or(besides).ok_or_else(|| {
                let all = dataset.schema().fields();
                let all: Vec<&str> = all.iter().map(|f| f.name().as_str()).collect();
                Error::invalid(format!(
                    "the filter needs a column {name:?}, which is not there"
                ))
                .hint(format!("the columns: {}", all.join(", ")))
            })?);
        }
        let columns = Arc::new(Schema::new(fields));
        let node = Node::new(expr, &columns)?;
        Ok(Self {
            columns,
            node,
            document: Document::new(expr.json()),
            parts,
        })
    }

    /// The names of the columns that it needs.
    pub fn names(&self) -> Vec<String> {
        let fields = self.columns.fields().iter();
        fields.map(|f| f.name().clone()).collect()
    }
}

fn named<'e>(expr: &'e Expr, names: &mut Vec<&'e str>) {
    match expr {
        Expr::Compare { column, .. }
        | Expr::IsIn { column, .. }
        | Expr::IsNull { column }
        | Expr::StartsWith { column, .. } => names.push(column),
        Expr::And(left, right) | Expr::Or(left, right) => {
            named(left, names);
            named(right, names);
        }
        Expr::Not(of) => named(of, names),
    }
}

impl Node {
    fn new(expr: &Expr, columns: &Schema) -> Result<Self> {
        let of = |name: &str| {
            let found = columns.column_with_name(name);
            found.ok_or_else(|| Error::internal("a column of a filter is gone"))
        };
        let both = |left: &Expr, right: &Expr| -> Result<_> {
            Ok((
                Box::new(Self::new(left, columns)?),
                Box::new(Self::new(right, columns)?),
            ))
        };
        Ok(match expr {
            Expr::And(left, right) => {
                let (left, right) = both(left, right)?;
                Node::And(left, right)
            }
            Expr::Or(left, right) => {
                let (left, right) = both(left, right)?;
                Node::Or(left, right)
            }
            Expr::Not(inner) => Node::Not(Box::new(Self::new(inner, columns)?)),
            Expr::IsNull { column } => Node::IsNull {
                column: of(column)?.0,
            },
            Expr::Compare { column, how, value } => {
                let (column, field) = of(column)?;
                let asked = match how {
                    How::Equal | How::Differ => Asked::Whole,
                    _ => Asked::Order,
                };
                check(field, value, asked)?;
                Node::Test {
                    column,
                    test: compare(plain(field.data_type()), *how, value)?,
                }
            }
            Expr::IsIn { column, values } => {
                let (column, field) = of(column)?;
                let mut values_of = values.iter();
                values_of.try_for_each(|v| check(field, v, Asked::Whole))?;
                Node::Test {
                    column,
                    test: members(plain(field.data_type()), values)?,
                }
            }
            Expr::StartsWith { column, prefix } => {
                let (column, field) = of(column)?;
                check(field, prefix, Asked::Prefix)?;
                Node::Test {
                    column,
                    test: Test::Prefix(bytes_of(prefix)?),
                }
            }
        })
    }
}

/// The type of the values of a column.
fn plain(kind: &DataType) -> &DataType {
    match kind {
        DataType::Dictionary(_, values) => values,
        kind => kind,
    }
}

/// What a value is compared with.
#[derive(Clone, Copy, PartialEq)]
enum Asked {
    /// Whole values, for being equal.
    Whole,
    Order,
    /// How values begin.
    Prefix,
}

/// Refuses a value that does not fit the type of a column.
fn check(field: &Field, value: &Literal, asked: Asked) -> Result<()> {
    let kind = plain(field.data_type());
    let is_prefix = asked == Asked::Prefix;
    let texts = matches!(
        kind,
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View
    );
    let some_bytes = matches!(
        kind,
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView
    );
    let fixed = matches!(kind, DataType::FixedSizeBinary(_));
    let fits = match value {
        Literal::Text(_) => texts,
        Literal::Bytes(_) => some_bytes || (fixed && !is_prefix),
        _ if is_prefix => false,
        Literal::Bool(_) => *kind == DataType::Boolean,
        Literal::Int(_) => kind.is_integer() || kind.is_floating() || is_decimal(kind),
        Literal::Float(_) => kind.is_integer() || kind.is_floating(),
        Literal::Decimal(_) => is_decimal(kind),
        Literal::Date(_) => matches!(kind, DataType::Date32 | DataType::Date64),
        Literal::Timestamp { utc, .. } => {
            matches!(kind, DataType::Timestamp(_, zone) if zone.is_some() == *utc)
        }
    };
    if let Literal::Text(text) = value
        && fits
        && is_json(field)
    {
        let is_one = match asked {
            Asked::Whole => jsonl::is_value(text),
            Asked::Order | Asked::Prefix => jsonl::may_begin_value(text),
        };
        if !is_one {
            return Err(Error::invalid(format!(
                "column {:?} is of Json, and no value of it is written as {value}",
                field.name()
            ))
            .hint(
                "write the value as JSON does, a text in quotation marks, or filter by a function",
            ));
        }
    }
    if fits {
        return Ok(());
    }
    let zone = match kind {
        DataType::Timestamp(..) => " (with a zone if the column has one)",
        _ => "",
    };
    Err(Error::invalid(format!(
        "column {:?} is of {}, which does not compare with {value}{zone}",
        field.name(),
        type_name(field)
    ))
    .hint("give a value of the column's type, cast the column, or filter by a function"))
}

fn is_decimal(kind: &DataType) -> bool {
    matches!(
        kind,
        DataType::Decimal32(..)
            | DataType::Decimal64(..)
            | DataType::Decimal128(..)
            | DataType::Decimal256(..)
    )
}

/// A place among whole numbers: at `floor`, or between that and the next.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    floor: i256,
    exact: bool,
}

/// Beyond all numbers of all columns, and far from the ends of what is computed with.
fn beyond(negative: bool) -> Point {
    let far = i256::from_parts(
        0,
        if negative {
            i128::MIN / 4
        } else {
            i128::MAX / 4
        },
    );
    Point {
        floor: far,
        exact: false,
    }
}

impl Point {
    fn at(n: i128) -> Self {
        Point {
            floor: i256::from_i128(n),
            exact: true,
        }
    }

    /// Where `n` is in units of `unit`, which is above 0.
    fn divided(n: i128, unit: i128) -> Self {
        Point {
            floor: i256::from_i128(n.div_euclid(unit)),
            exact: n.rem_euclid(unit) == 0,
        }
    }

    fn float(n: f64) -> Self {
        // Columns end far below this, and 128 bits far above.
        if n.abs() >= 1e30 {
            return beyond(n < 0.0);
        }
        Point {
            floor: i256::from_i128(n.floor() as i128),
            exact: n.floor() == n,
        }
    }

    fn decimal(d: &Decimal, scale: i8) -> Self {
        let shift = d.exponent + i32::from(scale);
        let negative = d.digits.is_negative();
        if d.digits == i256::ZERO {
            return Point::at(0);
        }
        let ten = i256::from_i128(10);
        if shift >= 0 {
            let by = u32::try_from(shift).ok().and_then(|by| ten.checked_pow(by));
            let shifted = by.and_then(|by| d.digits.checked_mul(by));
            return match shifted
                .filter(|n| n.checked_abs().is_some_and(|n| n < beyond(false).floor))
            {
                Some(floor) => Point { floor, exact: true },
                None => beyond(negative),
            };
        }
        let Some(by) = ten.checked_pow(shift.unsigned_abs()) else {
            // Less than one unit.
            return Point {
                floor: if negative {
                    i256::MINUS_ONE
                } else {
                    i256::ZERO
                },
                exact: false,
            };
        };
        let (whole, rest) = (d.digits.wrapping_div(by), d.digits.wrapping_rem(by));
        let exact = rest == i256::ZERO;
        Point {
            floor: match negative && !exact {
                true => whole.wrapping_sub(i256::ONE),
                false => whole,
            },
            exact,
        }
    }

    /// The whole numbers for which a comparison with this point is true.
    fn range(self, how: How) -> Test {
        let (least, most) = (i256::MIN, i256::MAX);
        let next = self.floor.wrapping_add(i256::ONE);
        let before = match self.exact {
            true => self.floor.wrapping_sub(i256::ONE),
            false => self.floor,
        };
        let range = |low, high, outside| Test::Range { low, high, outside };
        match (how, self.exact) {
            (How::Equal, true) => range(self.floor, self.floor, false),
            (How::Differ, true) => range(self.floor, self.floor, true),
            (How::Equal, false) => Test::Always(false),
            (How::Differ, false) => Test::Always(true),
            (How::Less, _) => range(least, before, false),
            (How::LessEqual, _) => range(least, self.floor, false),
            (How::Greater, _) => range(next, most, false),
            (How::GreaterEqual, true) => range(self.floor, most, false),
            (How::GreaterEqual, false) => range(next, most, false),
        }
    }
}

/// Where a value is in the unit of a column; `None` for types without units.
fn point(kind: &DataType, value: &Literal) -> Option<Point> {
    Some(match (kind, value) {
        (
            DataType::Decimal32(_, scale)
            | DataType::Decimal64(_, scale)
            | DataType::Decimal128(_, scale)
            | DataType::Decimal256(_, scale),
            value,
        ) => {
            let decimal = match value {
                Literal::Int(n) => Decimal {
                    digits: i256::from_i128(*n),
                    exponent: 0,
                },
                Literal::Decimal(decimal) => *decimal,
                _ => return None,
            };
            Point::decimal(&decimal, *scale)
        }
        (kind, Literal::Int(n)) if kind.is_integer() => Point::at(*n),
        (kind, Literal::Float(n)) if kind.is_integer() => Point::float(*n),
        (DataType::Timestamp(unit, _), Literal::Timestamp { us, .. }) => {
            let ns = match unit {
                TimeUnit::Second => 1_000_000_000,
                TimeUnit::Millisecond => 1_000_000,
                TimeUnit::Microsecond => 1_000,
                TimeUnit::Nanosecond => 1,
            };
            Point::divided(i128::from(*us) * 1000, ns)
        }
        (DataType::Date32, Literal::Date(days)) => Point::at((*days).into()),
        (DataType::Date64, Literal::Date(days)) => Point::at(i128::from(*days) * 86_400_000),
        _ => return None,
    })
}

fn compare(kind: &DataType, how: How, value: &Literal) -> Result<Test> {
    if let Some(point) = point(kind, value) {
        return Ok(point.range(how));
    }
    Ok(match value {
        Literal::Bool(b) => Test::Bools([false, true].map(|a| holds(how, &a, b))),
        Literal::Float(n) => Test::Float(how, *n),
        Literal::Int(n) => beside_float(how, *n),
        value => Test::Bytes(how, bytes_of(value)?),
    })
}

/// A comparison of floating-point numbers with a whole one.
fn beside_float(how: How, n: i128) -> Test {
    let near = n as f64;
    // It has at most 64 bits.
    let above = (near as i128).cmp(&n);
    if above.is_eq() {
        return Test::Float(how, near);
    }
    // No number of the column is between the two.
    match how {
        How::Equal => Test::Always(false),
        // NaN differs too.
        How::Differ => Test::Always(true),
        How::Less | How::LessEqual if above.is_gt() => Test::Float(How::Less, near),
        How::Less | How::LessEqual => Test::Float(How::LessEqual, near),
        _ if above.is_gt() => Test::Float(How::GreaterEqual, near),
        _ => Test::Float(How::Greater, near),
    }
}

fn members(kind: &DataType, values: &[Literal]) -> Result<Test> {
    let Some(first) = values.first() else {
        return Ok(Test::Always(false));
    };
    if kind.is_floating() {
        let exact = values.iter().filter_map(|value| match value {
            // 0.0 is equal to -0.0.
            Literal::Float(n) => Some(n + 0.0),
            Literal::Int(n) => Some(*n as f64).filter(|near| *near as i128 == *n),
            _ => None,
        });
        let mut found: Vec<f64> = exact.collect();
        found.sort_by(f64::total_cmp);
        found.dedup();
        return Ok(Test::FloatMembers(found));
    }
    if point(kind, first).is_some() {
        // What lies between two values of the column is not one.
        let points = values.iter().filter_map(|value| point(kind, value));
        let mut found: Vec<i256> = points.filter(|p| p.exact).map(|p| p.floor).collect();
        found.sort_unstable();
        found.dedup();
        return Ok(Test::IntMembers(found));
    }
    if *kind == DataType::Boolean {
        let has = |b: bool| values.contains(&Literal::Bool(b));
        return Ok(Test::Bools([has(false), has(true)]));
    }
    let mut found = values.iter().map(bytes_of).collect::<Result<Vec<_>>>()?;
    found.sort_unstable();
    found.dedup();
    Ok(Test::BytesMembers(found))
}

fn bytes_of(value: &Literal) -> Result<Vec<u8>> {
    match value {
        Literal::Text(text) => Ok(text.as_bytes().to_vec()),
        Literal::Bytes(bytes) => Ok(bytes.clone()),
        other => Err(Error::internal(format!(
            "{other} is neither text nor bytes"
        ))),
    }
}

/// Whether a comparison holds. NaN differs from everything.
pub(super) fn holds<T: PartialOrd>(how: How, a: &T, b: &T) -> bool {
    match how {
        How::Equal => a == b,
        How::Differ => a != b,
        How::Less => a < b,
        How::LessEqual => a <= b,
        How::Greater => a > b,
        How::GreaterEqual => a >= b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOWS: [How; 6] = [
        How::Equal,
        How::Differ,
        How::Less,
        How::LessEqual,
        How::Greater,
        How::GreaterEqual,
    ];

    fn is_in(test: &Test, n: i256) -> bool {
        match test {
            Test::Always(b) => *b,
            Test::Range { low, high, outside } => (*low <= n && n <= *high) != *outside,
            other => panic!("expected a range, got {other:?}"),
        }
    }

    #[test]
    fn ranges_of_numbers_are_exact() {
        for (value, place) in [
            (Literal::Int(2), 4),
            (Literal::Float(2.5), 5),
            (Literal::Float(-0.5), -1),
            (Literal::Float(-0.0), 0),
            (Literal::Float(f64::INFINITY), 1 << 40),
            (Literal::Float(-1e300), -(1 << 40)),
        ] {
            for how in HOWS {
                let test = compare(&DataType::Int32, how, &value).unwrap();
                for n in -4i128..5 {
                    // In halves, all of it is whole.
                    let expected = holds(how, &(2 * n), &place);
                    assert_eq!(
                        is_in(&test, i256::from_i128(n)),
                        expected,
                        "{n} {how:?} {value}"
                    );
                }
            }
        }
    }

    #[test]
    fn times_of_all_units_meet_microseconds() {
        for (unit, ns) in [
            (TimeUnit::Second, 1_000_000_000i128),
            (TimeUnit::Millisecond, 1_000_000),
            (TimeUnit::Microsecond, 1_000),
            (TimeUnit::Nanosecond, 1),
        ] {
            let kind = DataType::Timestamp(unit, None);
            for us in [0, 1, -1, 999, 1_000_000, -1_000_001, 1_500_000] {
                let value = Literal::Timestamp { us, utc: false };
                for how in HOWS {
                    let test = compare(&kind, how, &value).unwrap();
                    let near = i128::from(us) * 1000 / ns;
                    for n in near - 2..=near + 2 {
                        let expected = holds(how, &(n * ns), &(i128::from(us) * 1000));
                        assert_eq!(
                            is_in(&test, i256::from_i128(n)),
                            expected,
                            "{n} {how:?} {us}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn decimals_meet_columns_of_other_scales() {
        for (text, scale, floor, exact) in [
            ("1.5", 1, 15, true),
            ("1.5", 0, 1, false),
            ("-1.5", 0, -2, false),
            ("-1.5", 3, -1500, true),
            ("0.001", 1, 0, false),
            ("-0.001", 1, -1, false),
            ("1E+3", -2, 10, true),
            ("-0.0", 5, 0, true),
            ("1E-999", 3, 0, false),
            ("-1E-999", 3, -1, false),
        ] {
            let d = Decimal::parse(text).unwrap();
            let point = Point::decimal(&d, scale);
            assert_eq!(
                (point.floor, point.exact),
                (i256::from_i128(floor), exact),
                "{text} at scale {scale}"
            );
        }
        let far = |text: &str| Point::decimal(&Decimal::parse(text).unwrap(), 10);
        assert_eq!(far("1E+90"), beyond(false));
        assert_eq!(far("-1E+9000"), beyond(true));
        assert!(beyond(true).floor < i256::from_i128(i128::MIN));
    }

    #[test]
    fn whole_numbers_that_floats_lack_lie_between_two() {
        let big = 1i128 << 53;
        let at = |n: i128, how, x: f64| match beside_float(how, n) {
            Test::Always(b) => b,
            Test::Float(how, y) => holds(how, &x, &y),
            other => panic!("{other:?}"),
        };
        for n in [
            big,
            big + 1,
            big + 3,
            -big - 1,
            -big - 3,
            u64::MAX.into(),
            5,
        ] {
            for x in [big, big + 2, big + 4, -big, -big - 2, -big - 4, 1 << 64, 5] {
                for how in HOWS {
                    assert_eq!(at(n, how, x as f64), holds(how, &x, &n), "{x} {how:?} {n}");
                }
            }
            for how in HOWS {
                assert_eq!(at(n, how, f64::NAN), how == How::Differ, "NaN {how:?} {n}");
            }
        }
    }
}
