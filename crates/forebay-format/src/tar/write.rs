//! Tar headers, padding and trailer, each appended to the caller's buffer: file bytes go in between
//! without passing through here.
//!
//! Plain ustar headers, mode 0644, owner 0, no user names. A name that fits neither 100 bytes nor
//! prefix and name, a size past 8 GiB, or a time outside 33 bits goes into a PAX header before it,
//! as POSIX specifies and Python, GNU tar and Go read it. The bytes are a function of the arguments
//! alone.

use super::{BLOCK_BYTES, header, round_up};
use bytes::BufMut;
use forebay_core::{Error, Result, name::shorten};

/// Two blocks of zeros.
pub const TAR_TRAILER_BYTES: u64 = 2 * BLOCK_BYTES;

const ZEROS: [u8; BLOCK_BYTES as usize] = [0; BLOCK_BYTES as usize];
/// The most that 11 octal digits can hold.
const OCTAL_11_MAX: u64 = 0o77_777_777_777;
/// The name of the PAX header itself, shown by programs that do not know PAX. Python uses the same.
const PAX_NAME: &[u8] = b"././@PaxHeader";

/// Appends the header of a file; `size` bytes of data and [`tar_padding`] zeros belong after it.
///
/// # Errors
/// `Invalid` if the name is empty or holds a NUL.
pub fn tar_header_into(
    out: &mut impl BufMut,
    name: &str,
    size: u64,
    mtime_secs: i64,
) -> Result<()> {
    tar_header_with_pax(out, name, size, mtime_secs, &[])
}

/// [`tar_header_into`] with further PAX records, such as `("FOREBAY.error", "…")` on a placeholder.
/// Readers that do not know a keyword skip it; Python shows them in `TarInfo.pax_headers`.
///
/// # Errors
/// `Invalid` if the name is empty or holds a NUL, or a keyword is empty or holds `=`.
pub fn tar_header_with_pax(
    out: &mut impl BufMut,
    name: &str,
    size: u64,
    mtime_secs: i64,
    pax: &[(&str, &str)],
) -> Result<()> {
    let plan = Plan::new(name, size, mtime_secs, pax)?;
    if plan.records_len > 0 {
        out.put_slice(&block(PAX_NAME, b"", plan.records_len, 0, b'x'));
        let mut records = Vec::with_capacity(plan.records_len as usize);
        plan.each_record(|keyword, value| {
            let len = record_len(keyword, value);
            records.extend_from_slice(format!("{len} {keyword}={value}\n").as_bytes());
        });
        assert_eq!(records.len() as u64, plan.records_len);
        out.put_slice(&records);
        tar_padding_into(out, plan.records_len);
    }
    let (prefix, name) = plan
        .split
        .unwrap_or((b"", &name.as_bytes()[..floor(name, 100)]));
    let mtime = if plan.mtime_record.is_some() {
        0
    } else {
        mtime_secs as u64
    };
    let size = if plan.size_record.is_some() { 0 } else { size };
    out.put_slice(&block(name, prefix, size, mtime, b'0'));
    Ok(())
}

/// How many zeros follow `size` bytes of data.
pub fn tar_padding(size: u64) -> usize {
    (size.wrapping_neg() % BLOCK_BYTES) as usize
}

/// Appends the zeros that follow `size` bytes of data.
pub fn tar_padding_into(out: &mut impl BufMut, size: u64) {
    out.put_slice(&ZEROS[..tar_padding(size)]);
}

/// Appends the end of the archive.
pub fn tar_trailer_into(out: &mut impl BufMut) {
    out.put_slice(&ZEROS);
    out.put_slice(&ZEROS);
}

/// How many bytes [`tar_header_with_pax`] appends.
///
/// # Errors
/// As [`tar_header_with_pax`].
pub fn tar_header_bytes(
    name: &str,
    size: u64,
    mtime_secs: i64,
    pax: &[(&str, &str)],
) -> Result<u64> {
    let records = Plan::new(name, size, mtime_secs, pax)?.records_len;
    Ok(BLOCK_BYTES
        + if records > 0 {
            BLOCK_BYTES + records.next_multiple_of(BLOCK_BYTES)
        } else {
            0
        })
}

/// Bytes of a whole entry: header, data, padding.
///
/// # Errors
/// As [`tar_header_into`], and `Invalid` past 2^64 bytes.
pub fn tar_entry_bytes(name: &str, size: u64, mtime_secs: i64) -> Result<u64> {
    let header = tar_header_bytes(name, size, mtime_secs, &[])?;
    round_up(size)
        .and_then(|data| data.checked_add(header))
        .ok_or_else(|| Error::invalid("the tar would have more than 2^64 bytes"))
}

/// Size of the tar with these entries (name, size, mtime), including the trailer: its
/// Content-Length.
///
/// # Errors
/// As [`tar_entry_bytes`].
pub fn tar_exact_size<'a>(entries: impl IntoIterator<Item = (&'a str, u64, i64)>) -> Result<u64> {
    let mut total = TAR_TRAILER_BYTES;
    for (name, size, mtime_secs) in entries {
        let entry = tar_entry_bytes(name, size, mtime_secs)?;
        total = total
            .checked_add(entry)
            .ok_or_else(|| Error::invalid("the tar would have more than 2^64 bytes"))?;
    }
    Ok(total)
}

/// The layout of a header.
struct Plan<'a> {
    /// Prefix and name, if the header has room for them.
    split: Option<(&'a [u8], &'a [u8])>,
    path_record: Option<&'a str>,
    size_record: Option<String>,
    mtime_record: Option<String>,
    pax: &'a [(&'a str, &'a str)],
    /// Length of the PAX records; 0 if there are none.
    records_len: u64,
}

impl<'a> Plan<'a> {
    fn new(
        name: &'a str,
        size: u64,
        mtime_secs: i64,
        pax: &'a [(&'a str, &'a str)],
    ) -> Result<Self> {
        if name.is_empty() || name.contains('\0') {
            return Err(Error::invalid(format!(
                "{:?} cannot be the name of an archive member",
                shorten(name)
            )));
        }
        if let Some((keyword, _)) = pax
            .iter()
            .find(|(k, _)| k.is_empty() || k.contains(['=', '\n']))
        {
            return Err(Error::invalid(format!(
                "{:?} cannot be a PAX keyword",
                shorten(keyword)
            )));
        }
        let split = split(name);
        let mut plan = Plan {
            split,
            path_record: split.is_none().then_some(name),
            size_record: (size > OCTAL_11_MAX).then(|| size.to_string()),
            mtime_record: (mtime_secs < 0 || mtime_secs as u64 > OCTAL_11_MAX)
                .then(|| mtime_secs.to_string()),
            pax,
            records_len: 0,
        };
        let mut len = 0;
        plan.each_record(|keyword, value| len += record_len(keyword, value) as u64);
        plan.records_len = len;
        Ok(plan)
    }

    fn each_record(&self, mut each: impl FnMut(&str, &str)) {
        if let Some(path) = self.path_record {
            each("path", path);
        }
        if let Some(size) = &self.size_record {
            each("size", size);
        }
        if let Some(mtime) = &self.mtime_record {
            each("mtime", mtime);
        }
        for (keyword, value) in self.pax {
            each(keyword, value);
        }
    }
}

/// A ustar name: at most 100 bytes, or at most 155 and 100 around a slash.
fn split(name: &str) -> Option<(&[u8], &[u8])> {
    let name = name.as_bytes();
    if name.len() <= 100 {
        return Some((b"", name));
    }
    // The first slash that leaves at most 100 bytes; neither the name after it nor the prefix may
    // be empty.
    let from = name.len() - 101;
    let slash = from + name[from..name.len() - 1].iter().position(|&b| b == b'/')?;
    (1..=155)
        .contains(&slash)
        .then(|| (&name[..slash], &name[slash + 1..]))
}

/// At most `max` bytes of a text, not split inside a character.
fn floor(text: &str, max: usize) -> usize {
    (0..=max.min(text.len()))
        .rev()
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(0)
}

/// The length of `"<length> <keyword>=<value>\n"`, which counts its own digits.
fn record_len(keyword: &str, value: &str) -> usize {
    let rest = keyword.len() + value.len() + 3;
    let digits = |n: usize| n.checked_ilog10().unwrap_or(0) as usize + 1;
    let guess = rest + digits(rest);
    rest + digits(guess)
}

fn block(name: &[u8], prefix: &[u8], size: u64, mtime: u64, type_flag: u8) -> [u8; 512] {
    let mut b = [0u8; 512];
    b[..name.len()].copy_from_slice(name);
    b[100..108].copy_from_slice(b"0000644\0");
    b[108..116].copy_from_slice(b"0000000\0");
    b[116..124].copy_from_slice(b"0000000\0");
    octal_11(&mut b[124..135], size);
    octal_11(&mut b[136..147], mtime);
    b[156] = type_flag;
    b[257..265].copy_from_slice(b"ustar\x0000");
    b[329..337].copy_from_slice(b"0000000\0");
    b[337..345].copy_from_slice(b"0000000\0");
    b[345..345 + prefix.len()].copy_from_slice(prefix);
    let sum = header::checksum(&b);
    octal(&mut b[148..154], u64::from(sum));
    b[155] = b' ';
    b
}

fn octal_11(field: &mut [u8], value: u64) {
    assert!(value <= OCTAL_11_MAX, "{value} has a PAX record");
    octal(field, value);
}

fn octal(field: &mut [u8], mut value: u64) {
    for digit in field.iter_mut().rev() {
        *digit = b'0' + (value & 7) as u8;
        value >>= 3;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_lengths_count_themselves() {
        for n in [
            0usize, 1, 5, 90, 91, 92, 93, 94, 95, 96, 985, 990, 991, 992, 993, 5000,
        ] {
            let value = "v".repeat(n);
            let len = record_len("k", &value);
            assert_eq!(format!("{len} k={value}\n").len(), len, "{n}");
        }
    }

    #[test]
    fn sizes_are_exact() {
        let long = "d/".repeat(200) + "f";
        let wide = "ü".repeat(101);
        for (name, size, mtime) in [
            ("a", 0, 0),
            ("a/b", 1, 7),
            (&long, 511, -1),
            (&wide, 512, 1 << 40),
            ("x", 9 << 30, 3),
        ] {
            let mut out = Vec::new();
            tar_header_into(&mut out, name, size, mtime).unwrap();
            let whole = out.len() as u64 + size + tar_padding(size) as u64;
            assert_eq!(tar_entry_bytes(name, size, mtime).unwrap(), whole, "{name}");
            assert_eq!(whole % 512, 0);
        }
        assert_eq!(
            tar_exact_size([("a", 3, 0), ("b", 0, 0)]).unwrap(),
            512 + 512 + 512 + 1024
        );
    }
}
