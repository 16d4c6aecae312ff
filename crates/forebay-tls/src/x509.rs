//! Two fields of X.509: when a certificate expires, so that operators can be warned before clients
//! notice, and the name of its subject, which certificates of a CA repeat.
//!
//! `Certificate ::= SEQUENCE { TBSCertificate, … }`, and in it `version [0]` (optional), serial
//! number, signature algorithm, issuer, then `Validity ::= SEQUENCE { notBefore, notAfter }`, each
//! a UTCTime or a GeneralizedTime, then the subject (RFC 5280, section 4.1). Nothing here decides
//! about trust.

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const VERSION: u8 = 0xa0;
const OBJECT_IDENTIFIER: u8 = 0x06;
const COMMON_NAME: &[u8] = &[0x55, 4, 3];
const UTF8_STRING: u8 = 0x0c;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// The end of validity in seconds since the Unix epoch; `None` if it cannot be read.
pub fn not_after(der: &[u8]) -> Option<i64> {
    let (tag, validity, _) = element(from_validity(der)?)?;
    let (_, _, after) = element(validity)?;
    let (kind, text, _) = element(after)?;
    if tag == SEQUENCE {
        time(kind, text)
    } else {
        None
    }
}

/// The subject's name, if it is a common name in UTF-8 and nothing else.
pub fn common_name(der: &[u8]) -> Option<&str> {
    let (_, _, subject) = element(from_validity(der)?)?;
    // SEQUENCE OF SET OF SEQUENCE { type, value }
    let (names, name, _public_key) = element(subject)?;
    let (attributes, attribute, other_names) = element(name)?;
    let (pair, of, other_attributes) = element(attribute)?;
    let (identifier, kind, value) = element(of)?;
    let (string, text, nothing) = element(value)?;
    let tags = [names, attributes, pair, identifier, string];
    let alone = [other_names, other_attributes, nothing].concat().is_empty();
    if tags == [SEQUENCE, SET, SEQUENCE, OBJECT_IDENTIFIER, UTF8_STRING]
        && kind == COMMON_NAME
        && alone
    {
        std::str::from_utf8(text).ok()
    } else {
        None
    }
}

/// The rest of a certificate, from its validity on.
fn from_validity(der: &[u8]) -> Option<&[u8]> {
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
    Some(rest)
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

    fn wrap(tag: u8, content: &[u8]) -> Vec<u8> {
        let length = [tag, 0x82, (content.len() >> 8) as u8, content.len() as u8];
        [&length, content].concat()
    }

    fn attribute(kind: &[u8], string: u8, text: &[u8]) -> Vec<u8> {
        let pair = [wrap(OBJECT_IDENTIFIER, kind), wrap(string, text)].concat();
        wrap(SET, &wrap(SEQUENCE, &pair))
    }

    /// The shape of a certificate that contains only what is looked for.
    fn certificate(version: bool, subject: &[u8]) -> Vec<u8> {
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
            wrap(SEQUENCE, subject),
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
    fn fields_are_found_and_damage_is_no_panic() {
        let subject = attribute(COMMON_NAME, UTF8_STRING, b"a name");
        for version in [true, false] {
            let whole = certificate(version, &subject);
            assert_eq!(not_after(&whole), Some(1_767_323_045));
            assert_eq!(common_name(&whole), Some("a name"));
            for cut in 0..whole.len() {
                assert_eq!(not_after(&whole[..cut]), None, "{cut}");
                assert_eq!(common_name(&whole[..cut]), None, "{cut}");
                let mut damaged = whole.clone();
                damaged[cut] ^= 0xff;
                let _ = (not_after(&damaged), common_name(&damaged));
            }
        }
        assert_eq!(not_after(&[SEQUENCE, 0x85, 1, 1, 1, 1, 1]), None);
    }

    #[test]
    fn a_subject_with_more_than_a_common_name_has_none() {
        let name = || attribute(COMMON_NAME, UTF8_STRING, b"a");
        let organization = attribute(&[0x55, 4, 10], UTF8_STRING, b"b");
        for subject in [
            Vec::new(),
            organization.clone(),
            [name(), organization].concat(),
            [name(), name()].concat(),
            attribute(COMMON_NAME, 0x13, b"printable"),
            attribute(COMMON_NAME, UTF8_STRING, &[0xff]),
        ] {
            assert_eq!(common_name(&certificate(true, &subject)), None);
        }
    }
}
