//! PAX extended headers: records of `"<length> <keyword>=<value>\n"`.

use forebay_core::{Error, Result};

/// The keywords that matter for finding members. `None`: absent.
#[derive(Clone, Debug, Default)]
pub(super) struct Pax {
    pub path: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub mtime_secs: Option<i64>,
    /// Any of GNU's sparse keywords was present.
    pub sparse: bool,
    /// The name of a sparse file, which the actual headers lack.
    pub sparse_name: Option<Vec<u8>>,
}

impl Pax {
    /// Adds the records of one extended header, which begins at offset `at`; an empty value removes
    /// a keyword.
    pub fn read(&mut self, mut records: &[u8], at: u64) -> Result<()> {
        while records.first().is_some_and(|&b| b != 0) {
            let (keyword, value, rest) = record(records).ok_or_else(|| {
                Error::corrupt(format!(
                    "the PAX header at offset {at} has a malformed record"
                ))
            })?;
            records = rest;
            let given = (!value.is_empty()).then_some(value);
            match keyword {
                b"path" => self.path = given.map(<[u8]>::to_vec),
                b"size" => self.size = given.map(|v| size(v, at)).transpose()?,
                // An unreadable time must not cost anybody the data.
                b"mtime" => self.mtime_secs = given.and_then(whole_seconds),
                b"GNU.sparse.name" => {
                    self.sparse = true;
                    self.sparse_name = given.map(<[u8]>::to_vec);
                }
                _ => self.sparse |= keyword.starts_with(b"GNU.sparse."),
            }
        }
        Ok(())
    }
}

/// Keyword, value, and the bytes after the first record.
fn record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = bytes.iter().take(20).position(|&b| b == b' ')?;
    let len: usize = decimal(&bytes[..space]).and_then(|n| n.try_into().ok())?;
    let (record, rest) = bytes.split_at_checked(len)?;
    let body = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = body.iter().position(|&b| b == b'=')?;
    (equals > 0).then(|| (&body[..equals], &body[equals + 1..], rest))
}

fn size(value: &[u8], at: u64) -> Result<u64> {
    decimal(value)
        .filter(|&n| i64::try_from(n).is_ok())
        .ok_or_else(|| {
            let shown = String::from_utf8_lossy(&value[..value.len().min(40)]).into_owned();
            Error::corrupt(format!(
                "the PAX size in the header at offset {at} is not a number of bytes: {shown:?}"
            ))
        })
}

fn decimal(digits: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(digits)
        .ok()
        .filter(|t| !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit()))?;
    text.parse().ok()
}

/// `-12.5` is -13: rounded down.
fn whole_seconds(value: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(value).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let secs: i64 = whole.parse().ok()?;
    let below = whole.starts_with('-') && fraction.bytes().any(|b| b != b'0');
    secs.checked_sub(i64::from(below))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(records: &[u8]) -> Result<Pax> {
        let mut pax = Pax::default();
        pax.read(records, 0).map(|()| pax)
    }

    #[test]
    fn records_are_read_and_junk_is_refused() {
        let pax =
            read(b"12 path=a=b\n20 mtime=-12.500000\n11 size=42\n22 GNU.sparse.major=1\n\0\0")
                .unwrap();
        assert_eq!(pax.path.as_deref(), Some(b"a=b".as_slice()));
        assert_eq!(
            (pax.size, pax.mtime_secs, pax.sparse),
            (Some(42), Some(-13), true)
        );
        assert_eq!(read(b"11 size=42\n8 size=\n").unwrap().size, None);
        assert_eq!(read(b"11 mtime=x\n").unwrap().mtime_secs, None);
        for junk in [
            "12 size=42\n",
            "11 size=4x\n",
            "11 size=-1\n",
            "11 size=+1\n",
            "13 size=0x10\n",
            "28 size=9223372036854775808\n",
            "x",
            "5 a\n",
            "5 =a\n",
            "0 \n",
            "99999999999999999999 a=b\n",
            "1 a=b\n",
            "7 a=bcd",
            " 6 a=b\n",
        ] {
            assert!(read(junk.as_bytes()).is_err(), "{junk:?}");
        }
    }
}
