//! Values as what they say, in the forms that Arrow's own reader takes.

use arrow_schema::TimeUnit;

/// Texts that stand for no value, in columns that are not text.
pub(super) fn is_null(text: &[u8]) -> bool {
    matches!(
        text,
        b"" | b"#N/A"
            | b"#N/A N/A"
            | b"#NA"
            | b"-1.#IND"
            | b"-1.#QNAN"
            | b"-NaN"
            | b"-nan"
            | b"1.#IND"
            | b"1.#QNAN"
            | b"N/A"
            | b"NA"
            | b"NULL"
            | b"NaN"
            | b"n/a"
            | b"nan"
            | b"null"
    )
}

/// Without blanks around it.
fn trimmed(text: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(text).ok()?;
    Some(text.trim_matches([' ', '\t']))
}

/// Whether it is written as a whole number, of any size.
pub(super) fn is_whole(text: &[u8]) -> bool {
    let digits = trimmed(text).map(|text| text.strip_prefix('-').unwrap_or(text));
    digits.is_some_and(|d| !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit()))
}

/// A number of 64 bits, by its bits.
pub(super) trait Bits: std::str::FromStr {
    fn of(bits: u64) -> Self;
}

impl Bits for i64 {
    fn of(bits: u64) -> i64 {
        bits as i64
    }
}

impl Bits for u64 {
    fn of(bits: u64) -> u64 {
        bits
    }
}

/// A decimal number, or the bits of one as `0x` and up to 16 hexadecimal digits.
pub(super) fn integer<T: Bits>(text: &[u8]) -> Option<T> {
    let text = trimmed(text)?;
    let hex = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    match hex {
        Some(digits) => {
            let is_hex =
                (1..=16).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
            let bits = is_hex.then(|| u64::from_str_radix(digits, 16))?;
            bits.ok().map(T::of)
        }
        None if text.starts_with('+') => None,
        None => text.parse().ok(),
    }
}

/// A number with or without decimals; what is above all floats is infinite.
pub(super) fn real(text: &[u8]) -> Option<f64> {
    trimmed(text)?.parse().ok()
}

pub(super) fn boolean(text: &[u8]) -> Option<bool> {
    match text {
        b"1" | b"true" | b"True" | b"TRUE" => Some(true),
        b"0" | b"false" | b"False" | b"FALSE" => Some(false),
        _ => None,
    }
}

/// Days since 1970, of `YYYY-MM-DD`.
pub(super) fn date(text: &[u8]) -> Option<i32> {
    day(trimmed(text)?.as_bytes())
}

/// Seconds since midnight, of `hh:mm` or `hh:mm:ss`.
pub(super) fn time(text: &[u8]) -> Option<i32> {
    let text = trimmed(text)?.as_bytes();
    match text.len() {
        5 | 8 => clock(text),
        _ => None,
    }
}

/// Units since 1970, of `YYYY-MM-DD` and perhaps `hh`, `hh:mm` or `hh:mm:ss` after a blank or a
/// `T`, the seconds with as many decimals as the unit has.
pub(super) fn timestamp(text: &[u8], unit: TimeUnit) -> Option<i64> {
    let decimals = match unit {
        TimeUnit::Second => 0,
        TimeUnit::Millisecond => 3,
        TimeUnit::Microsecond => 6,
        TimeUnit::Nanosecond => 9,
    };
    let (days, rest) = text.split_at_checked(10)?;
    let mut seconds = i64::from(day(days)?) * 86_400;
    let mut fraction = 0;
    if let Some((between, rest)) = rest.split_first() {
        if !matches!(between, b' ' | b'T') {
            return None;
        }
        let (whole, after) = match rest.iter().position(|&b| b == b'.') {
            Some(n) => (&rest[..n], Some(&rest[n + 1..])),
            None => (rest, None),
        };
        seconds += i64::from(clock(whole)?);
        if let Some(digits) = after {
            let is_fraction = whole.len() == 8 && (1..=decimals).contains(&digits.len());
            fraction = number(digits).filter(|_| is_fraction)?
                * 10i64.pow((decimals - digits.len()) as u32);
        }
    }
    seconds
        .checked_mul(10i64.pow(decimals as u32))?
        .checked_add(fraction)
}

/// The same with a zone, `Z`, `+hh`, `+hhmm` or `+hh:mm`, in UTC.
pub(super) fn zoned(text: &[u8], unit: TimeUnit) -> Option<i64> {
    let (local, offset) = match text.split_last()? {
        (b'Z', local) => (local, 0),
        _ => {
            let at = text.iter().rposition(|b| matches!(b, b'+' | b'-'))?;
            let (local, zone) = text.split_at(at);
            let seconds = match zone {
                [_, a, b] => clock(&[*a, *b])?,
                [_, a, b, c, d] | [_, a, b, b':', c, d] => clock(&[*a, *b, b':', *c, *d])?,
                _ => return None,
            };
            (local, if zone[0] == b'-' { -seconds } else { seconds })
        }
    };
    // A date has no zone.
    if local.len() <= 10 {
        return None;
    }
    let second = timestamp(b"1970-01-01 00:00:01", unit)?;
    timestamp(local, unit)?.checked_sub(i64::from(offset) * second)
}

/// The number of up to nine digits.
fn number(digits: &[u8]) -> Option<i64> {
    if digits.is_empty() || digits.len() > 9 {
        return None;
    }
    digits.iter().try_fold(0, |n, b| {
        b.is_ascii_digit().then(|| n * 10 + i64::from(b - b'0'))
    })
}

fn clock(text: &[u8]) -> Option<i32> {
    let part = |at: usize, most: i64| {
        let follows = at == 0 || text.get(at - 1) == Some(&b':');
        let n = number(text.get(at..at + 2)?)?;
        (follows && n <= most).then_some(n as i32)
    };
    Some(match text.len() {
        2 => part(0, 23)? * 3600,
        5 => part(0, 23)? * 3600 + part(3, 59)? * 60,
        8 => part(0, 23)? * 3600 + part(3, 59)? * 60 + part(6, 59)?,
        _ => return None,
    })
}

fn day(text: &[u8]) -> Option<i32> {
    let (&[_, _, _, _, b'-', _, _, b'-', _, _], 10) = (text.first_chunk::<10>()?, text.len())
    else {
        return None;
    };
    let (year, month, day) = (
        number(&text[..4])?,
        number(&text[5..7])?,
        number(&text[8..])?,
    );
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        4 | 6 | 9 | 11 => 30,
        2 => 28 + i64::from(is_leap),
        1..=12 => 31,
        _ => return None,
    };
    if !(1..=days).contains(&day) {
        return None;
    }
    // Years that begin in March, so that the leap day is the last of one.
    let (year, month) = match month {
        1 | 2 => (year - 1, month + 9),
        _ => (year, month - 3),
    };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * month + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    i32::try_from(days).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        for (text, days) in [
            ("1970-01-01", Some(0)),
            ("1969-12-31", Some(-1)),
            ("2000-02-29", Some(11_016)),
            ("2026-11-25", Some(20_782)),
            ("0000-03-01", Some(-719_468)),
            ("9999-12-31", Some(2_932_896)),
            ("1900-02-29", None),
            ("2001-00-10", None),
            ("2001-13-10", None),
            ("2001-04-31", None),
            ("2001-4-3", None),
            ("2001/04/03", None),
            ("2001-04-031", None),
            ("+001-04-03", None),
        ] {
            assert_eq!(date(text.as_bytes()), days, "{text}");
        }
        // Each day follows the one before.
        let mut expected = date(b"1999-12-31").unwrap();
        for year in 2000..2005 {
            for month in 1..=12 {
                for day in 1..=31 {
                    let text = format!("{year}-{month:02}-{day:02}");
                    if let Some(days) = date(text.as_bytes()) {
                        expected += 1;
                        assert_eq!(days, expected, "{text}");
                    }
                }
            }
        }
        assert_eq!(expected, date(b"2004-12-31").unwrap());
    }

    #[test]
    fn times_have_the_decimals_of_their_unit() {
        use TimeUnit::*;
        for (text, unit, value) in [
            ("1970-01-02", Second, Some(86_400)),
            ("1970-01-01 01", Second, Some(3600)),
            ("1970-01-01T00:01", Second, Some(60)),
            ("1970-01-01 00:00:07", Second, Some(7)),
            ("1970-01-01 00:00:07.5", Second, None),
            ("1970-01-01 00:00:07.5", Millisecond, Some(7500)),
            ("1970-01-01 00:00:07.123456", Microsecond, Some(7_123_456)),
            ("1970-01-01 00:00:07.1234567", Microsecond, None),
            (
                "1969-12-31 23:59:59.000000001",
                Nanosecond,
                Some(-999_999_999),
            ),
            ("1970-01-01 00:00:07.", Nanosecond, None),
            ("1970-01-01 00:00.5", Nanosecond, None),
            ("1970-01-01 24:00", Second, None),
            ("1970-01-01 00:60", Second, None),
            ("1970-01-01 00:00:60", Second, None),
            ("1970-01-01 00-00", Second, None),
            ("1970-01-01x00:00", Second, None),
            ("1970-01-01 00:00:00Z", Second, None),
            ("3000-01-01", Nanosecond, None),
            (" 1970-01-01", Second, None),
        ] {
            assert_eq!(timestamp(text.as_bytes(), unit), value, "{text} {unit:?}");
        }
        assert_eq!(
            (time(b"01:02"), time(b" 01:02:03 ")),
            (Some(3720), Some(3723))
        );
        assert_eq!(
            (time(b"01"), time(b"25:00"), time(b"01:02:03.5")),
            (None, None, None)
        );
    }

    #[test]
    fn times_with_a_zone_are_in_utc() {
        use TimeUnit::*;
        for (text, unit, value) in [
            ("1970-01-01 01:00Z", Second, Some(3600)),
            ("1970-01-01 01:00:07+01:00", Second, Some(7)),
            ("1970-01-01T01:00:07-0130", Second, Some(3600 + 5407)),
            ("1970-01-01 01:00:00.25+01", Millisecond, Some(250)),
            ("1970-01-01 01:00:00.25Z", Second, None),
            ("1970-01-01 01:00", Second, None),
            ("1970-01-01Z", Second, None),
            ("1970-01-01+01:00", Second, None),
            ("1970-01-01 01:00+1", Second, None),
            ("1970-01-01 01:00+01:60", Second, None),
            ("", Second, None),
        ] {
            assert_eq!(zoned(text.as_bytes(), unit), value, "{text} {unit:?}");
        }
    }

    #[test]
    fn numbers_are_written_as_arrow_reads_them() {
        for (text, whole, float) in [
            ("7", Some(7), Some(7.0)),
            (" -7\t", Some(-7), Some(-7.0)),
            ("007", Some(7), Some(7.0)),
            ("+7", None, Some(7.0)),
            (" +1.5", None, Some(1.5)),
            ("+-7", None, None),
            ("7.", None, Some(7.0)),
            ("-.5e1", None, Some(-5.0)),
            ("inf", None, Some(f64::INFINITY)),
            ("-Infinity", None, Some(f64::NEG_INFINITY)),
            ("1e400", None, Some(f64::INFINITY)),
            ("-1e400", None, Some(f64::NEG_INFINITY)),
            ("1e-400", None, Some(0.0)),
            ("1_000", None, None),
            ("0x10", Some(16), None),
            (" 0X1f\t", Some(31), None),
            ("0xffffffffffffffff", Some(-1), None),
            ("0x10000000000000000", None, None),
            ("0x", None, None),
            ("-0x10", None, None),
            ("0x+1", None, None),
            ("", None, None),
            ("-", None, None),
            ("9223372036854775808", None, Some(9223372036854775808.0)),
        ] {
            assert_eq!(integer::<i64>(text.as_bytes()), whole, "{text}");
            assert_eq!(real(text.as_bytes()), float, "{text}");
        }
        assert!(is_whole(b"-99999999999999999999") && !is_whole(b"1e3") && !is_whole(b" "));
    }
}
