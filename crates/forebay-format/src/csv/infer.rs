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
use arrow_schema::{DataType, TimeUnit};

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
}

fn utc(unit: TimeUnit) -> DataType {
    DataType::Timestamp(unit, Some("UTC".into()))
}

/// The type that takes the values of both, of those that [`Kind::data_type`] returns.
pub(super) fn common_type(a: &DataType, b: &DataType) -> DataType {
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
