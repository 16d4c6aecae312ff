//! Byte ranges: as clients ask for them, and resolved against a size. RFC 9110, section 14.

use crate::{Error, Result, units::count};
use std::ops::Range;

/// A range as a client asks for it, before the size is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ByteRange {
    /// `bytes=first-`: from `first` to the end.
    From(u64),
    /// `bytes=first-last`: `last` is inclusive and may lie past the end.
    Inclusive(u64, u64),
    /// `bytes=-n`: the last `n` bytes.
    Suffix(u64),
}

impl ByteRange {
    /// Parses one `Range` header with the unit `bytes`. `Ok(None)` means: ignore the header and
    /// answer with the whole object, as RFC 9110 asks for other units and for syntax that is not
    /// understood.
    ///
    /// # Errors
    /// `Unsupported` for several ranges in one request.
    pub fn parse_header(value: &str) -> Result<Option<ByteRange>> {
        let Some((unit, spec)) = value.trim().split_once('=') else {
            return Ok(None);
        };
        if !unit.eq_ignore_ascii_case("bytes") {
            return Ok(None);
        }
        if spec.contains(',') {
            return Err(Error::unsupported("several ranges in one request")
                .hint("send one request for each range"));
        }
        let Some((first, last)) = spec.trim().split_once('-') else {
            return Ok(None);
        };
        let number = |s: &str| {
            (!s.is_empty() && s.bytes().all(|b| b.is_ascii_digit()))
                .then(|| s.parse::<u64>().unwrap_or(u64::MAX))
        };
        Ok(match (first.trim(), last.trim()) {
            ("", n) => number(n).map(ByteRange::Suffix),
            (a, "") => number(a).map(ByteRange::From),
            (a, b) => match (number(a), number(b)) {
                (Some(a), Some(b)) if a <= b => Some(ByteRange::Inclusive(a, b)),
                _ => None,
            },
        })
    }

    /// `start` and `length` as GetBatch entries give them; a length of -1 reads to the end.
    pub fn from_start_length(start: u64, length: i64) -> Result<ByteRange> {
        match length {
            -1 => Ok(ByteRange::From(start)),
            1.. => {
                let last = start
                    .checked_add(length as u64 - 1)
                    .ok_or_else(|| Error::invalid("start + length is past 2^64"))?;
                Ok(ByteRange::Inclusive(start, last))
            }
            _ => Err(
                Error::invalid(format!("length {length} is not a number of bytes"))
                    .hint("1 or more, or -1 for the rest"),
            ),
        }
    }

    /// The bytes of an object of `size` that this range names.
    ///
    /// # Errors
    /// [`ErrorKind::RangeNotSatisfiable`](crate::ErrorKind::RangeNotSatisfiable) if it names none.
    pub fn resolve(self, size: u64) -> Result<Range<u64>> {
        let resolved = match self {
            ByteRange::From(first) => first..size,
            ByteRange::Inclusive(first, last) => first..last.saturating_add(1).min(size),
            ByteRange::Suffix(n) => size.saturating_sub(n)..size,
        };
        if resolved.start >= resolved.end {
            let all = count(size, "byte");
            return Err(Error::range_not_satisfiable(match self {
                ByteRange::From(_) | ByteRange::Inclusive(..) => {
                    format!("bytes {self} begin past the end: it has {all}")
                }
                ByteRange::Suffix(_) => format!("bytes {self} of {all} are none"),
            }));
        }
        Ok(resolved)
    }
}

impl std::fmt::Display for ByteRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ByteRange::From(a) => write!(f, "{a}-"),
            ByteRange::Inclusive(a, b) => write!(f, "{a}-{b}"),
            ByteRange::Suffix(n) => write!(f, "-{n}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_resolve_as_rfc_9110_says() {
        let get = |h: &str, size| {
            ByteRange::parse_header(h)
                .unwrap()
                .map(|r| r.resolve(size).ok())
        };
        assert_eq!(get("bytes=0-0", 10), Some(Some(0..1)));
        assert_eq!(get("bytes=5-", 10), Some(Some(5..10)));
        assert_eq!(get("bytes=-3", 10), Some(Some(7..10)));
        assert_eq!(get("bytes=-30", 10), Some(Some(0..10)));
        assert_eq!(
            get("bytes=8-99999999999999999999999", 10),
            Some(Some(8..10))
        );
        assert_eq!(get("bytes=10-", 10), Some(None));
        assert_eq!(get("bytes=-0", 10), Some(None));
        assert_eq!(get("bytes=0-", 0), Some(None));
        assert_eq!(get("bytes=5-2", 10), None);
        assert_eq!(get("items=0-1", 10), None);
        assert_eq!(get("Bytes=0-1", 10), Some(Some(0..2)));
        for past in [ByteRange::From(10), ByteRange::Inclusive(10, 12)] {
            let e = past.resolve(10).unwrap_err();
            assert_eq!(e.kind(), crate::ErrorKind::RangeNotSatisfiable);
            assert!(e.message().contains("past the end"), "{e:?}");
        }
        for (range, size, says) in [
            (ByteRange::From(5), 1, "it has 1 byte"),
            (ByteRange::From(5), 0, "it has 0 bytes"),
            (ByteRange::Suffix(0), 1, "of 1 byte are none"),
        ] {
            let e = range.resolve(size).unwrap_err();
            assert!(e.message().ends_with(says), "{e:?}");
        }
        assert!(ByteRange::parse_header("bytes=0-1,3-4").is_err());
        assert!(ByteRange::from_start_length(u64::MAX, 2).is_err());
        assert!(ByteRange::from_start_length(0, 0).is_err());
    }
}
