//! Which type a column has, from all of its values.
//!
//! The first of these that takes every value: integers, truth values, dates, times of day, times in
//! seconds and in nanoseconds, floats, times with a zone in seconds and in nanoseconds, text. As in Arrow's own reader, but for one difference: whole
//! numbers of which some do not fit 64 bits stay text, so that no digit is lost. Texts that stand
//! for no value (`NA`, nothing, ...) fit every type; in a column of text they are text.

use super::{
    parse::{boolean, date, integer, is_null, is_whole, real, time, timestamp, zoned},
    scan::Value,
};
use arrow_schema::{DataType, Field, TimeUnit};

const INTEGER: u16 = 1;
const WHOLE: u16 = 2;
const BOOLEAN: u16 = 4;
const DATE: u16 = 8;
const TIME: u16 = 16;
const SECONDS: u16 = 32;
const NANOSECONDS: u16 = 64;
const REAL: u16 = 128;
const ZONED_SECONDS: u16 = 256;
const ZONED_NANOSECONDS: u16 = 512;

/// What the values of a column may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    /// Types that take all values so far.
    possible: u16,
    /// There was a value that stands for one.
    any: bool,
}

impl Default for Kind {
    fn default() -> Self {
        Self {
            possible: u16::MAX,
            any: false,
        }
    }
}

impl Kind {
    pub fn learn(&mut self, value: &Value<'_>) {
        if self.possible == 0 {
            return;
        }
        // With quotation marks in it, it is text.
        if value.is_escaped {
            (self.possible, self.any) = (0, true);
            return;
        }
        let text = value.text;
        if is_null(text) {
            return;
        }
        self.any = true;
        let takes = |kind: u16| match kind {
            INTEGER => integer::<i64>(text).is_some(),
            WHOLE => is_whole(text),
            BOOLEAN => boolean(text).is_some(),
            DATE => date(text).is_some(),
            TIME => time(text).is_some(),
            SECONDS => timestamp(text, TimeUnit::Second).is_some(),
            NANOSECONDS => timestamp(text, TimeUnit::Nanosecond).is_some(),
            REAL => real(text).is_some(),
            ZONED_SECONDS => zoned(text, TimeUnit::Second).is_some(),
            ZONED_NANOSECONDS => zoned(text, TimeUnit::Nanosecond).is_some(),
            _ => false,
        };
        for kind in (0..u16::BITS).map(|bit| 1 << bit) {
            if self.possible & kind != 0 && !takes(kind) {
                self.possible &= !kind;
            }
        }
    }

    pub fn data_type(&self) -> DataType {
        if !self.any {
            return DataType::Null;
        }
        match 1u16.checked_shl(self.possible.trailing_zeros()) {
            Some(INTEGER) => DataType::Int64,
            Some(BOOLEAN) => DataType::Boolean,
            Some(DATE) => DataType::Date32,
            Some(TIME) => DataType::Time32(TimeUnit::Second),
            Some(SECONDS) => DataType::Timestamp(TimeUnit::Second, None),
            Some(NANOSECONDS) => DataType::Timestamp(TimeUnit::Nanosecond, None),
            Some(REAL) => DataType::Float64,
            Some(ZONED_SECONDS) => utc(TimeUnit::Second),
            Some(ZONED_NANOSECONDS) => utc(TimeUnit::Nanosecond),
            _ => DataType::Utf8,
        }
    }

    /// As a column. It notes which wider types do not take all values: other files may call for them.
    pub fn field(&self, name: &str) -> Field {
        let ty = self.data_type();
        let unfit = wider(&ty) & !self.possible;
        noted(Field::new(name, ty, true), unfit)
    }
}

/// In the metadata of a file's column: types that [`common_type`] may call for, and that do not take
/// all values (a number: the bits of these types).
const UNFIT: &str = "forebay:unfit";

fn noted(mut field: Field, unfit: u16) -> Field {
    if unfit != 0 {
        let mut metadata = field.metadata().clone();
        metadata.insert(UNFIT.to_owned(), unfit.to_string());
        field = field.with_metadata(metadata);
    }
    field
}

fn unfit(field: &Field) -> u16 {
    let noted = field.metadata().get(UNFIT);
    noted.and_then(|bits| bits.parse().ok()).unwrap_or(0)
}

/// Types that values of this one may have to be read as because of other files.
fn wider(ty: &DataType) -> u16 {
    match ty {
        DataType::Int64 => REAL,
        DataType::Date32 => SECONDS | NANOSECONDS,
        DataType::Timestamp(TimeUnit::Second, None) => NANOSECONDS,
        DataType::Timestamp(TimeUnit::Second, Some(_)) => ZONED_NANOSECONDS,
        _ => 0,
    }
}

/// The bit of such a type.
fn bit(ty: &DataType) -> u16 {
    match ty {
        DataType::Float64 => REAL,
        DataType::Timestamp(TimeUnit::Second, None) => SECONDS,
        DataType::Timestamp(TimeUnit::Nanosecond, None) => NANOSECONDS,
        DataType::Timestamp(TimeUnit::Nanosecond, Some(_)) => ZONED_NANOSECONDS,
        _ => 0,
    }
}

/// The column that takes the values of both, which have the same name.
pub(super) fn common_field(a: &Field, b: &Field) -> Field {
    let unfit = unfit(a) | unfit(b);
    let ty = match common_type(a.data_type(), b.data_type()) {
        // As in one file with the values of both.
        ty if unfit & bit(&ty) != 0 => DataType::Utf8,
        ty => ty,
    };
    let unfit = unfit & wider(&ty);
    noted(Field::new(a.name(), ty, true), unfit)
}

fn utc(unit: TimeUnit) -> DataType {
    DataType::Timestamp(unit, Some("UTC".into()))
}

/// The type that takes the values of both, of those that [`Kind::data_type`] returns.
fn common_type(a: &DataType, b: &DataType) -> DataType {
    use DataType::*;
    match (a, b) {
        _ if a == b => a.clone(),
        (Null, other) | (other, Null) => other.clone(),
        (Int64, Float64) | (Float64, Int64) => Float64,
        (Date32, Timestamp(unit, None)) | (Timestamp(unit, None), Date32) => Timestamp(*unit, None),
        (Timestamp(_, zone), Timestamp(_, other)) if zone == other => {
            Timestamp(TimeUnit::Nanosecond, zone.clone())
        }
        _ => Utf8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_for_several_files_takes_the_values_of_all() {
        use DataType::*;
        let seconds = || Timestamp(TimeUnit::Second, None);
        let nanoseconds = || Timestamp(TimeUnit::Nanosecond, None);
        for (files, ty) in [
            // Nanoseconds end in the year 2262.
            (&["3000-01-01 10:00", "2020-01-01 10:00:00.5"][..], Utf8),
            (&["3000-01-01", "2020-01-01 10:00:00.5"], Utf8),
            (&["3000-01-01", "2020-01-01 10:00"], seconds()),
            (&["2020-01-01", "2020-01-01 10:00:00.5"], nanoseconds()),
            // What one file cannot be, all of them cannot be, whichever comes first.
            (
                &["3000-01-01", "2020-01-01 10:00", "2020-01-01 10:00:00.5"],
                Utf8,
            ),
            (
                &[
                    "NA",
                    "2020-01-01 10:00",
                    "3000-01-01 10:00",
                    "2020-01-01 10:00:00.5",
                ],
                Utf8,
            ),
            (&["3000-01-01 10:00Z", "2020-01-01 10:00:00.5Z"], Utf8),
            (
                &["2020-01-01 10:00Z", "2020-01-01 10:00:00.5Z"],
                utc(TimeUnit::Nanosecond),
            ),
            // Only dates may have blanks around them.
            (&[" 2020-01-01", "2020-01-02 10:00"], Utf8),
            (&[" 2020-01-01", "2020-01-02"], Date32),
            (&["0x10", "2.5"], Utf8),
            (&["0x10", "7"], Int64),
            (&["16", "2.5"], Float64),
        ] {
            let field = |text: &&str| {
                let mut kind = Kind::default();
                kind.learn(&Value {
                    text: text.as_bytes(),
                    is_escaped: false,
                });
                kind.field("x")
            };
            let both = |a: Field, b: Field| common_field(&a, &b);
            let onwards = files.iter().map(field).reduce(both).unwrap();
            assert_eq!(onwards.data_type(), &ty, "{files:?}");
            let backwards = files.iter().rev().map(field).reduce(both).unwrap();
            assert_eq!(backwards.data_type(), &ty, "{files:?}, the last one first");
        }
    }

    #[test]
    fn the_type_of_a_column_takes_all_its_values() {
        use DataType::*;
        let seconds = || Timestamp(TimeUnit::Second, None);
        let nanoseconds = || Timestamp(TimeUnit::Nanosecond, None);
        for (values, ty) in [
            (&["1", "-2", "NA", ""][..], Int64),
            (&["1", "2.5"], Float64),
            (&["0", "1", "true"], Boolean),
            (&["0", "2", "true"], Utf8),
            (&["", "null", "NaN"], Null),
            (&[], Null),
            (&["2020-01-01", "2020-01-02"], Date32),
            (&["10:30", "10:30:01"], Time32(TimeUnit::Second)),
            (&["2020-01-01", "2020-01-02 10:00"], seconds()),
            (&["2020-01-01", "2020-01-02T10:00:00.5"], nanoseconds()),
            (&["2020-01-01", "1"], Utf8),
            (&["1", "99999999999999999999"], Utf8),
            (&["1.5", "99999999999999999999"], Float64),
            (&["a", "1"], Utf8),
            (
                &["2020-01-01 10:00:00Z", "2020-01-01 10:00+01:00"],
                utc(TimeUnit::Second),
            ),
            (
                &["2020-01-01 10:00:00Z", "2020-01-01 10:00:00.5Z"],
                utc(TimeUnit::Nanosecond),
            ),
            (&["2020-01-01 10:00:00Z", "2020-01-01 10:00"], Utf8),
        ] {
            let mut kind = Kind::default();
            for text in values {
                kind.learn(&Value {
                    text: text.as_bytes(),
                    is_escaped: false,
                });
            }
            assert_eq!(kind.data_type(), ty, "{values:?}");
        }
        assert_eq!(common_type(&Null, &Date32), Date32);
        assert_eq!(common_type(&Int64, &Float64), Float64);
        assert_eq!(common_type(&Date32, &seconds()), seconds());
        assert_eq!(common_type(&nanoseconds(), &seconds()), nanoseconds());
        assert_eq!(common_type(&Boolean, &Int64), Utf8);
        let zoned = [utc(TimeUnit::Second), utc(TimeUnit::Nanosecond)];
        assert_eq!(common_type(&zoned[0], &zoned[1]), zoned[1]);
        assert_eq!(common_type(&zoned[0], &seconds()), Utf8);
    }
}
