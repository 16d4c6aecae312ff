//! When a certificate expires: one field of X.509, so that operators can be warned before clients
//! notice.
//!
//! `Certificate ::= SEQUENCE { TBSCertificate, … }`, and in it `version [0]` (optional), serial
//! number, signature algorithm, issuer, and then `Validity ::= SEQUENCE { notBefore, notAfter }`,
//! each a UTCTime or a GeneralizedTime (RFC 5280, section 4.1). Nothing here decides about trust.

const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// The end of validity in seconds since the Unix epoch; `None` if it cannot be read.
pub fn not_after(der: &[u8]) -> Option<i64> {
    let (tag, certificate, _) = element(der)?;
    let (inner, tbs, _) = element(certificate)?;
    if (tag, inner) != (SEQUENCE, SEQUENCE) {
        return None;
    }
    let mut rest = tbs;
    if rest.first() == Some(&VERSION) {
        rest = element(rest)?.2;
    }
    for _serial_algorithm_issuer in 0..3 {
        rest = element(rest)?.2;
    }
    let (tag, validity, _) = element(rest)?;
    let (_, _, after) = element(validity)?;
    let (kind, text, _) = element(after)?;
    if tag == SEQUENCE {
        time(kind, text)
    } else {
        None
    }
}

/// One element: its tag, its content, and what follows it.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = der.split_first()?;
    let (&first, mut rest) = rest.split_first()?;
    let length = if first < 0x80 {
        usize::from(first)
    } else {
        let (bytes, after) = rest.split_at_checked(usize::from(first & 0x7f))?;
        rest = after;
        if bytes.is_empty() || bytes.len() > 4 {
            return None;
        }
        bytes.iter().fold(0usize, |n, b| n << 8 | usize::from(*b))
    };
    let (content, after) = rest.split_at_checked(length)?;
    Some((tag, content, after))
}

/// `YYMMDDHHMMSSZ`, or with four digits of the year.
fn time(kind: u8, text: &[u8]) -> Option<i64> {
    let number = |digits: &[u8]| {
        digits.iter().try_fold(0i64, |n, d| {
            d.is_ascii_digit().then(|| n * 10 + i64::from(d - b'0'))
        })
    };
    let (year, rest) = match kind {
        UTC_TIME => {
            let (digits, rest) = text.split_at_checked(2)?;
            let year = number(digits)?;
            (if year < 50 { 2000 + year } else { 1900 + year }, rest)
        }
        GENERALIZED_TIME => {
            let (digits, rest) = text.split_at_checked(4)?;
            (number(digits)?, rest)
        }
        _ => return None,
    };
    if rest.len() != 11 || rest[10] != b'Z' {
        return None;
    }
    let part = |i: usize| number(&rest[2 * i..2 * i + 2]);
    let (month, day) = (part(0)?, part(1)?);
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    Some(days(year, month, day) * 86_400 + part(2)? * 3_600 + part(3)? * 60 + part(4)?)
}

/// Days from 1970-01-01 to a date of the Gregorian calendar; years are counted from March, so that
/// the leap day is the last.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        assert_eq!(time(UTC_TIME, b"700101000000Z"), Some(0));
        assert_eq!(time(UTC_TIME, b"260102030405Z"), Some(1_767_323_045));
        assert_eq!(time(UTC_TIME, b"000229000000Z"), Some(951_782_400));
        assert_eq!(
            time(GENERALIZED_TIME, b"20500101000000Z"),
            Some(2_524_608_000)
        );
        assert_eq!(
            time(GENERALIZED_TIME, b"99991231235959Z"),
            Some(253_402_300_799)
        );
        for bad in [
            "",
            "26",
            "2601020304Z",
            "261302030405Z",
            "26010203040xZ",
            "260102030405+0100",
        ] {
            assert_eq!(time(UTC_TIME, bad.as_bytes()), None, "{bad}");
        }
    }

    /// The shape of a certificate that contains only what is looked for.
    fn certificate(version: bool) -> Vec<u8> {
        let wrap = |tag: u8, content: &[u8]| {
            [
                &[tag, 0x82, (content.len() >> 8) as u8, content.len() as u8],
                content,
            ]
            .concat()
        };
        let validity = wrap(
            SEQUENCE,
            &[
                wrap(UTC_TIME, b"250102030405Z"),
                wrap(UTC_TIME, b"260102030405Z"),
            ]
            .concat(),
        );
        let mut tbs = if version {
            wrap(VERSION, &[2, 1, 2])
        } else {
            Vec::new()
        };
        for part in [
            wrap(2, &[7; 200]),
            wrap(SEQUENCE, &[6, 0]),
            wrap(SEQUENCE, &[0x31; 300]),
            validity,
            wrap(SEQUENCE, &[]),
        ] {
            tbs.extend(part);
        }
        wrap(
            SEQUENCE,
            &[wrap(SEQUENCE, &tbs), wrap(SEQUENCE, &[])].concat(),
        )
    }

    #[test]
    fn the_end_of_validity_is_found_and_damage_is_no_panic() {
        for version in [true, false] {
            let whole = certificate(version);
            assert_eq!(not_after(&whole), Some(1_767_323_045));
            for cut in 0..whole.len() {
                assert_eq!(not_after(&whole[..cut]), None, "{cut}");
                let mut damaged = whole.clone();
                damaged[cut] ^= 0xff;
                let _ = not_after(&damaged);
            }
        }
        assert_eq!(not_after(&[SEQUENCE, 0x85, 1, 1, 1, 1, 1]), None);
    }
}
