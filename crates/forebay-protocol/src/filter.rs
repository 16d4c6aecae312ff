//! Filters: expressions over columns, and what a node answers when it has computed one.
//!
//! The document of an [`Expr`] has one object for each part:
//!
//! ```json
//! {"op": "and",
//!  "left": {"op": "compare", "column": "tokens", "how": ">=", "value": {"int": 512}},
//!  "right": {"op": "isin", "column": "lang", "values": {"string": ["de", "en"]}}}
//! ```
//!
//! Values carry their type, because JSON does not tell 2 from 2.0 apart, and has neither bytes nor
//! dates: `bool`, `int` (64 bits, with or without sign), `float` (as text, such as `"0.1"` or
//! `"inf"`, because readers of JSON round), `string`, `bytes` (base64), `date` (days since 1970),
//! `timestamp` and `timestamp_utc` (microseconds since 1970, without a zone and in UTC), `decimal`
//! (text). `isin` has a list for each type.
//!
//! It is read strictly: a document of a later release could mean other rows.
//!
//! Invariant: [`Expr::json`] is canonical: expressions that are written alike, whatever the order
//! and number of the members of `isin`, have the same text, which reads as an equal expression.

use crate::ErrorDocument;
use arrow_buffer::i256;
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use forebay_core::{Error, Result, limits};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fmt;

/// What is true, false or neither for each row.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// A column beside a value.
    Compare {
        /// Its name.
        column: String,
        /// Which comparison.
        how: How,
        /// The other side.
        value: Literal,
    },
    /// Whether a column has one of some values.
    IsIn {
        /// Its name.
        column: String,
        /// Each once, in a fixed order.
        values: Vec<Literal>,
    },
    /// Whether a value is missing.
    IsNull {
        /// The column's name.
        column: String,
    },
    /// Whether a text, or bytes, begin with this.
    StartsWith {
        /// The column's name.
        column: String,
        /// The beginning.
        prefix: Literal,
    },
    /// Both.
    And(Box<Expr>, Box<Expr>),
    /// One or both.
    Or(Box<Expr>, Box<Expr>),
    /// The other way round; what is neither stays so.
    Not(Box<Expr>),
}

/// A comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// `==`
    Equal,
    /// `!=`
    Differ,
    /// `<`
    Less,
    /// `<=`
    LessEqual,
    /// `>`
    Greater,
    /// `>=`
    GreaterEqual,
}

impl How {
    const ALL: [(How, &'static str); 6] = [
        (How::Equal, "=="),
        (How::Differ, "!="),
        (How::Less, "<"),
        (How::LessEqual, "<="),
        (How::Greater, ">"),
        (How::GreaterEqual, ">="),
    ];

    /// As it is written.
    pub fn sign(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    fn parse(sign: &str) -> Option<Self> {
        let found = Self::ALL.into_iter().find(|(_, written)| *written == sign);
        found.map(|(how, _)| how)
    }
}

/// A value that columns are compared with.
#[derive(Clone, Debug, PartialEq)]
pub enum Literal {
    /// A truth value.
    Bool(bool),
    /// From the least `i64` to the greatest `u64`.
    Int(i128),
    /// Not NaN.
    Float(f64),
    /// A text.
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// Days since 1970-01-01.
    Date(i32),
    /// Microseconds since 1970.
    Timestamp {
        /// How many.
        us: i64,
        /// Whether they are counted in UTC: the column has a zone.
        utc: bool,
    },
    /// A decimal number.
    Decimal(Decimal),
}

/// `digits` times ten to the power of `exponent`; `digits` does not end in a zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decimal {
    /// Up to [`limits::FILTER_DECIMAL_DIGITS_MAX`] of them, with the sign.
    pub digits: i256,
    /// Of ten.
    pub exponent: i32,
}

/// Greatest exponent of a decimal that is read: no column holds such a number.
const EXPONENT_MAX: u64 = 1 << 20;

impl Decimal {
    /// Reads `12.50`, `-3`, `1E+3`.
    pub fn parse(text: &str) -> Option<Self> {
        let (number, exponent) = match text.split_once(['e', 'E']) {
            Some((number, exponent)) => (number, exponent.parse::<i64>().ok()?),
            None => (text, 0),
        };
        let (negative, number) = match number.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, number.strip_prefix('+').unwrap_or(number)),
        };
        let (whole, part) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && part.is_empty() {
            return None;
        }
        let all = || whole.bytes().chain(part.bytes());
        if !all().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let significant: Vec<u8> = all().skip_while(|&b| b == b'0').collect();
        let kept = significant.iter().rposition(|&b| b != b'0');
        let Some(kept) = kept.map(|last| last + 1) else {
            return Some(Decimal {
                digits: i256::ZERO,
                exponent: 0,
            });
        };
        if kept > limits::FILTER_DECIMAL_DIGITS_MAX {
            return None;
        }
        let exponent = exponent
            .checked_sub(i64::try_from(part.len()).ok()?)?
            .checked_add(i64::try_from(significant.len() - kept).ok()?)?;
        if exponent.unsigned_abs() > EXPONENT_MAX {
            return None;
        }
        let digits = std::str::from_utf8(&significant[..kept]).ok()?;
        let digits = i256::from_string(digits)?;
        Some(Decimal {
            digits: if negative {
                digits.checked_neg()?
            } else {
                digits
            },
            exponent: exponent as i32,
        })
    }
}

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}E{}", self.digits, self.exponent)
    }
}

impl Literal {
    /// The name of its type in documents.
    pub fn kind(&self) -> &'static str {
        match self {
            Literal::Bool(_) => "bool",
            Literal::Int(_) => "int",
            Literal::Float(_) => "float",
            Literal::Text(_) => "string",
            Literal::Bytes(_) => "bytes",
            Literal::Date(_) => "date",
            Literal::Timestamp { utc: false, .. } => "timestamp",
            Literal::Timestamp { utc: true, .. } => "timestamp_utc",
            Literal::Decimal(_) => "decimal",
        }
    }

    /// What it is, as a text of its type in which equal values are equal.
    fn json(&self) -> Value {
        match self {
            Literal::Bool(b) => json!(b),
            // It was read from one of the two.
            Literal::Int(n) => match i64::try_from(*n) {
                Ok(n) => json!(n),
                Err(_) => json!(*n as u64),
            },
            Literal::Float(n) => json!(format!("{n:?}")),
            Literal::Text(text) => json!(text),
            Literal::Bytes(bytes) => json!(BASE64.encode(bytes)),
            Literal::Date(days) => json!(days),
            Literal::Timestamp { us, .. } => json!(us),
            Literal::Decimal(d) => json!(d.to_string()),
        }
    }

    fn read(kind: &str, value: &Value, at: &str) -> Result<Self> {
        let wrong = |what: &str| {
            let shown = forebay_core::name::shorten(&value.to_string()).to_string();
            Err(invalid(at, format!("{shown} is not {what}")))
        };
        let text = value.as_str();
        Ok(match kind {
            "bool" => match value.as_bool() {
                Some(b) => Literal::Bool(b),
                None => return wrong("true or false"),
            },
            "int" => match (value.as_i64(), value.as_u64()) {
                (Some(n), _) => Literal::Int(n.into()),
                (None, Some(n)) => Literal::Int(n.into()),
                _ => return wrong("a whole number of 64 bits"),
            },
            "float" => match text.and_then(|t| t.parse::<f64>().ok()) {
                Some(n) if n.is_nan() => return wrong("equal to anything"),
                Some(n) => Literal::Float(n),
                None => return wrong("a number as text, such as \"0.5\" or \"-inf\""),
            },
            "string" => match text {
                Some(t) => Literal::Text(t.to_owned()),
                None => return wrong("a text"),
            },
            "bytes" => match text.and_then(|t| BASE64.decode(t).ok()) {
                Some(bytes) => Literal::Bytes(bytes),
                None => return wrong("base64"),
            },
            "date" => match value.as_i64().map(i32::try_from) {
                Some(Ok(days)) => Literal::Date(days),
                _ => return wrong("a number of days"),
            },
            "timestamp" | "timestamp_utc" => match value.as_i64() {
                Some(us) => Literal::Timestamp {
                    us,
                    utc: kind == "timestamp_utc",
                },
                None => return wrong("a number of microseconds"),
            },
            "decimal" => match text.and_then(Decimal::parse) {
                Some(d) => Literal::Decimal(d),
                None => return wrong("a decimal number of at most 76 digits, as text"),
            },
            other => {
                return Err(invalid(at, format!("{other:?} is no type of values")).hint(
                    "bool, int, float, string, bytes, date, timestamp, timestamp_utc or decimal",
                ));
            }
        })
    }
}

impl fmt::Display for Literal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Literal::Float(n) => write!(f, "{n:?}"),
            Literal::Text(text) => write!(f, "{}", forebay_core::name::shorten(text)),
            Literal::Bytes(bytes) => write!(f, "{} bytes", bytes.len()),
            Literal::Date(days) => write!(f, "the date {days} days after 1970-01-01"),
            Literal::Timestamp { us, utc } => {
                let zone = if *utc { " in UTC" } else { "" };
                write!(f, "the time {us} µs after 1970{zone}")
            }
            other => write!(f, "{}", other.json().to_string().trim_matches('"')),
        }
    }
}

fn invalid(at: &str, what: impl fmt::Display) -> Error {
    Error::invalid(format!("the filter, at {at}: {what}"))
}

impl Expr {
    /// Reads a document.
    ///
    /// # Errors
    /// `Invalid`, with the place and what is wrong there; `TooLarge` beyond a limit.
    pub fn read(json: &[u8]) -> Result<Self> {
        if json.len() > limits::FILTER_BODY_MAX_BYTES {
            return Err(too_large(format!(
                "an expression of {} bytes; at most {}",
                json.len(),
                limits::FILTER_BODY_MAX_BYTES
            )));
        }
        let value: Value = serde_json::from_slice(json).map_err(|e| {
            Error::invalid(format!("this is not the expression of a filter: {e}")).hint(
                r#"{"op": "compare", "column": "lang", "how": "==", "value": {"string": "en"}}"#,
            )
        })?;
        let mut parts = 0;
        Self::of_value(&value, 0, &mut parts, "the top")
    }

    fn of_value(value: &Value, depth: usize, parts: &mut usize, at: &str) -> Result<Self> {
        if depth > limits::FILTER_DEPTH_MAX + 1 {
            let most = limits::FILTER_DEPTH_MAX;
            return Err(too_large(format!(
                "an expression of more than {most} parts within each other"
            )));
        }
        *parts += 1;
        if *parts > limits::FILTER_PARTS_MAX {
            let most = limits::FILTER_PARTS_MAX;
            return Err(too_large(format!(
                "an expression of more than {most} parts"
            )));
        }
        let map = (value.as_object()).ok_or_else(|| invalid(at, "a part is a JSON object"))?;
        let op = Fields::text_of(map, "op", at)?;
        let at = op;
        let fields = |known: &[&str]| Fields::new(map, known, at);
        let mut below = |fields: &Fields<'_>, name: &str| {
            let value = fields.get(name)?;
            Self::of_value(value, depth + 1, parts, &format!("{at}.{name}")).map(Box::new)
        };
        Ok(match op {
            "and" | "or" => {
                let fields = fields(&["left", "right"])?;
                let (left, right) = (below(&fields, "left")?, below(&fields, "right")?);
                match op {
                    "and" => Expr::And(left, right),
                    _ => Expr::Or(left, right),
                }
            }
            "not" => Expr::Not(below(&fields(&["of"])?, "of")?),
            "is_null" => Expr::IsNull {
                column: fields(&["column"])?.text("column")?,
            },
            "compare" => {
                let fields = fields(&["column", "how", "value"])?;
                let sign = fields.text("how")?;
                let how = How::parse(&sign).ok_or_else(|| {
                    invalid(at, format!("{sign:?} is no comparison")).hint("==, !=, <, <=, >, >=")
                })?;
                Expr::Compare {
                    column: fields.text("column")?,
                    how,
                    value: fields.literal("value")?,
                }
            }
            "startswith" => {
                let fields = fields(&["column", "prefix"])?;
                Expr::StartsWith {
                    column: fields.text("column")?,
                    prefix: fields.literal("prefix")?,
                }
            }
            "isin" => {
                let fields = fields(&["column", "values"])?;
                Expr::IsIn {
                    column: fields.text("column")?,
                    values: fields.literals("values")?,
                }
            }
            other => {
                return Err(invalid(at, format!("{other:?} is not offered"))
                    .hint("and, or, not, compare, isin, is_null or startswith"));
            }
        })
    }

    /// The document, in the form that equal expressions share.
    pub fn json(&self) -> String {
        self.value().to_string()
    }

    fn value(&self) -> Value {
        let of = |literal: &Literal| json!({literal.kind(): literal.json()});
        match self {
            Expr::Compare { column, how, value } => {
                json!({"op": "compare", "column": column, "how": how.sign(), "value": of(value)})
            }
            Expr::IsIn { column, values } => {
                let mut by_kind = Map::new();
                for value in values {
                    let list = by_kind.entry(value.kind()).or_insert_with(|| json!([]));
                    if let Value::Array(list) = list {
                        list.push(value.json());
                    }
                }
                json!({"op": "isin", "column": column, "values": by_kind})
            }
            Expr::IsNull { column } => json!({"op": "is_null", "column": column}),
            Expr::StartsWith { column, prefix } => {
                json!({"op": "startswith", "column": column, "prefix": of(prefix)})
            }
            Expr::And(left, right) => {
                json!({"op": "and", "left": left.value(), "right": right.value()})
            }
            Expr::Or(left, right) => {
                json!({"op": "or", "left": left.value(), "right": right.value()})
            }
            Expr::Not(of) => json!({"op": "not", "of": of.value()}),
        }
    }
}

fn too_large(what: String) -> Error {
    Error::new(forebay_core::ErrorKind::TooLarge, what)
        .hint("use isin for many values of one column, or filter by a function")
}

/// The fields of one part.
struct Fields<'a> {
    map: &'a Map<String, Value>,
    at: &'a str,
}

impl<'a> Fields<'a> {
    /// Only these and `op` may be there.
    fn new(map: &'a Map<String, Value>, known: &[&str], at: &'a str) -> Result<Self> {
        match map
            .keys()
            .find(|k| *k != "op" && !known.contains(&k.as_str()))
        {
            None => Ok(Self { map, at }),
            Some(other) => Err(invalid(at, format!("the field {other:?} is not known"))
                .hint(format!("its fields: {}", known.join(", ")))),
        }
    }

    fn get(&self, name: &str) -> Result<&'a Value> {
        let found = self.map.get(name);
        found.ok_or_else(|| invalid(self.at, format!("the field {name:?} is missing")))
    }

    fn text_of(map: &'a Map<String, Value>, name: &str, at: &str) -> Result<&'a str> {
        let text = map.get(name).and_then(Value::as_str);
        text.ok_or_else(|| invalid(at, format!("the field {name:?} is not a text")))
    }

    fn text(&self, name: &str) -> Result<String> {
        Self::text_of(self.map, name, self.at).map(str::to_owned)
    }

    fn literal(&self, name: &str) -> Result<Literal> {
        let typed = self.get(name)?.as_object().filter(|map| map.len() == 1);
        let typed = typed.and_then(|map| map.iter().next());
        let (kind, value) = typed.ok_or_else(|| {
            invalid(
                self.at,
                format!("the field {name:?} is not a value with its type"),
            )
            .hint(r#"{"int": 512}"#)
        })?;
        Literal::read(kind, value, self.at)
    }

    fn literals(&self, name: &str) -> Result<Vec<Literal>> {
        let lists = self.get(name)?.as_object().ok_or_else(|| {
            invalid(
                self.at,
                format!("the field {name:?} is not lists of values by type"),
            )
            .hint(r#"{"string": ["de", "en"]}"#)
        })?;
        let mut found = Vec::new();
        for (kind, list) in lists {
            let list = (list.as_array())
                .ok_or_else(|| invalid(self.at, format!("the values of {kind:?} are no list")))?;
            if found.len() + list.len() > limits::FILTER_MEMBERS_MAX {
                return Err(too_large(format!(
                    "isin with more than {} values",
                    limits::FILTER_MEMBERS_MAX
                )));
            }
            for value in list {
                found.push(Literal::read(kind, value, self.at)?);
            }
        }
        let mut keyed: Vec<(String, Literal)> = found
            .into_iter()
            .map(|l| (format!("{} {}", l.kind(), l.json()), l))
            .collect();
        keyed.sort_by(|a, b| a.0.cmp(&b.0));
        keyed.dedup_by(|a, b| a.0 == b.0);
        Ok(keyed.into_iter().map(|(_, literal)| literal).collect())
    }
}

/// The rows that a filter leaves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Filtered {
    /// What they are fetched by: `GET /v1/datasets/<id>/filters/<filter>`.
    pub filter: String,
    /// How many there are.
    pub rows: u64,
    /// Of how many.
    pub of: u64,
    /// Rows whose values were read to find that out, when it was computed.
    pub looked_at: u64,
    /// Whether it had been computed before.
    pub kept: bool,
}

/// How far a filter is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FilterProgress {
    /// Rows that are decided.
    pub done: u64,
    /// Of how many.
    pub of: u64,
    /// Those of them whose values were read.
    pub looked_at: u64,
    /// Those of them that are left.
    pub rows: u64,
}

/// One line of `POST /v1/datasets/<id>/filters?progress=true`. The last one is `Filtered` or
/// `Error`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum FilterEvent {
    /// The progress; sent now and then.
    Progress(FilterProgress),
    /// It is computed.
    Filtered(Filtered),
    /// It failed. The head of the answer was already sent, so the status is in the line.
    Error(Box<ErrorDocument>),
    /// An event of a later release.
    #[serde(other)]
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::ErrorKind;

    fn read(text: &str) -> Result<Expr> {
        Expr::read(text.as_bytes())
    }

    #[test]
    fn documents_are_read_as_they_are_written() {
        let values = [
            json!({"bool": true}),
            json!({"int": i64::MIN}),
            json!({"int": u64::MAX}),
            json!({"float": "0.1"}),
            json!({"float": "-inf"}),
            json!({"float": "1e300"}),
            json!({"string": "ä\"\u{0}"}),
            json!({"bytes": "AAH/"}),
            json!({"date": -3}),
            json!({"timestamp": -1}),
            json!({"timestamp_utc": 1_700_000_000_000_000i64}),
            json!({"decimal": "125E-1"}),
        ];
        for value in values {
            let document = json!({
                "op": "or",
                "left": {"op": "not", "of": {"op": "is_null", "column": "a"}},
                "right": {"op": "and",
                    "left": {"op": "compare", "column": "b", "how": "<=", "value": value},
                    "right": {"op": "startswith", "column": "c", "prefix": {"string": "x"}}},
            });
            let expr = read(&document.to_string()).unwrap();
            let again = read(&expr.json()).unwrap();
            assert_eq!((&again, again.json()), (&expr, expr.json()), "{value}");
        }
    }

    #[test]
    fn equal_sets_have_equal_documents() {
        let of = |values: &str| {
            let text = format!(r#"{{"op": "isin", "column": "a", "values": {values}}}"#);
            read(&text).unwrap()
        };
        let one = of(r#"{"string": ["b", "a", "b"], "int": [3, -1]}"#);
        assert_eq!(
            one.json(),
            of(r#"{"int": [-1, 3], "string": ["a", "b"]}"#).json()
        );
        assert_eq!(of("{}").json(), of(r#"{"int": []}"#).json());
        assert_ne!(
            one.json(),
            of(r#"{"int": [3], "string": ["a", "b"]}"#).json()
        );
        let decimals = of(r#"{"decimal": ["1.50", "1.5", "15E-1"]}"#);
        assert!(matches!(decimals, Expr::IsIn { values, .. } if values.len() == 1));
    }

    #[test]
    fn decimals_are_read_exactly() {
        let of = |text: &str| Decimal::parse(text).map(|d| (d.digits.as_i128(), d.exponent));
        for (text, digits, exponent) in [
            ("1.50", 15, -1),
            ("-0.001", -1, -3),
            ("1E+3", 1, 3),
            ("1200", 12, 2),
            ("+7.", 7, 0),
            (".5", 5, -1),
            ("-0.00", 0, 0),
            ("0E+99999", 0, 0),
        ] {
            assert_eq!(of(text), Some((digits, exponent)), "{text}");
        }
        let longest = "9".repeat(76);
        assert!(
            Decimal::parse(&longest).is_some() && Decimal::parse(&format!("{longest}9")).is_none()
        );
        for text in [
            "",
            ".",
            "-",
            "1e-9223372036854775808",
            "1e9223372036854775807",
            "NaN",
            "Infinity",
            "1.2.3",
            "1E",
            "1E9999999999",
            "0x1",
            "1 ",
        ] {
            assert_eq!(of(text), None, "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let compare = |value: &str| {
            format!(r#"{{"op": "compare", "column": "a", "how": "==", "value": {value}}}"#)
        };
        for (text, says) in [
            ("nothing".to_owned(), "not the expression"),
            ("[]".to_owned(), "a JSON object"),
            (r#"{"op": 3}"#.to_owned(), "\"op\" is not a text"),
            (r#"{"op": "like"}"#.to_owned(), "\"like\" is not offered"),
            (
                r#"{"op": "is_null"}"#.to_owned(),
                "\"column\" is not a text",
            ),
            (
                r#"{"op": "is_null", "column": "a", "x": 1}"#.to_owned(),
                "\"x\" is not known",
            ),
            (r#"{"op": "not"}"#.to_owned(), "\"of\" is missing"),
            (
                r#"{"op": "and", "left": {"op": "is_null", "column": "a"}, "right": 3}"#.to_owned(),
                "and.right: a part",
            ),
            (
                r#"{"op": "compare", "column": "a", "how": "~", "value": {"int": 1}}"#.to_owned(),
                "\"~\" is no comparison",
            ),
            (compare("3"), "a value with its type"),
            (
                compare(r#"{"int": 1, "bool": true}"#),
                "a value with its type",
            ),
            (compare(r#"{"int": 1.5}"#), "1.5 is not a whole number"),
            (
                compare(r#"{"int": 99999999999999999999}"#),
                "whole number of 64 bits",
            ),
            (compare(r#"{"float": "nan"}"#), "equal to anything"),
            (compare(r#"{"float": 0.5}"#), "a number as text"),
            (compare(r#"{"bytes": "?"}"#), "base64"),
            (compare(r#"{"date": 99999999999}"#), "a number of days"),
            (compare(r#"{"decimal": "NaN"}"#), "decimal number"),
            (compare(r#"{"text": "a"}"#), "\"text\" is no type"),
            (
                r#"{"op": "isin", "column": "a", "values": [1]}"#.to_owned(),
                "lists of values by type",
            ),
        ] {
            let e = read(&text).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Invalid, "{text}");
            assert!(e.describe().contains(says), "{text}: {}", e.describe());
        }
    }

    #[test]
    fn there_are_limits() {
        let leaf = r#"{"op": "is_null", "column": "a"}"#;
        let deep = |n: usize| {
            (0..n).fold(leaf.to_owned(), |inner, _| {
                format!(r#"{{"op": "not", "of": {inner}}}"#)
            })
        };
        assert!(read(&deep(limits::FILTER_DEPTH_MAX)).is_ok());
        assert!(read(&deep(limits::FILTER_DEPTH_MAX + 2)).is_err());
        // A tree whose leaves are all at the same depth.
        let mut wide = leaf.to_owned();
        for _ in 0..14 {
            wide = format!(r#"{{"op": "and", "left": {wide}, "right": {wide}}}"#);
        }
        let e = read(&wide).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::TooLarge, "{}", e.describe());
        let list = vec!["1"; limits::FILTER_MEMBERS_MAX + 1].join(",");
        let many = format!(r#"{{"op": "isin", "column": "a", "values": {{"int": [{list}]}}}}"#);
        assert_eq!(read(&many).unwrap_err().kind(), ErrorKind::TooLarge);
        let large = format!(
            r#"{{"op": "is_null", "column": "{}"}}"#,
            "a".repeat(limits::FILTER_BODY_MAX_BYTES)
        );
        assert_eq!(read(&large).unwrap_err().kind(), ErrorKind::TooLarge);
    }

    #[test]
    fn events_say_which_they_are() {
        let events = [
            (FilterEvent::Progress(FilterProgress::default()), "progress"),
            (FilterEvent::Filtered(Filtered::default()), "filtered"),
            (
                FilterEvent::Error(Box::new(ErrorDocument::of(&Error::busy("later")))),
                "error",
            ),
        ];
        for (event, name) in events {
            let text = serde_json::to_value(&event).unwrap();
            assert_eq!(text["event"], name);
            assert_eq!(serde_json::from_value::<FilterEvent>(text).unwrap(), event);
        }
        let later: FilterEvent = serde_json::from_str(r#"{"event": "later", "x": 1}"#).unwrap();
        assert_eq!(later, FilterEvent::Other);
    }
}
