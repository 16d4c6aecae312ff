//! Where rows and values end.

use crate::lines::find_newline;

/// How many bytes the first row takes with its end, blank lines being rows; `None` if it does not
/// end in `bytes`. `is_last`: the file ends with them.
pub(super) fn row_len(bytes: &[u8], delimiter: u8, is_last: bool) -> Option<usize> {
    let line = match find_newline(bytes) {
        Some(n) => n + 1,
        None if is_last => bytes.len(),
        None => return None,
    };
    // Most rows are a line without quotation marks.
    if !bytes[..line].contains(&b'"') {
        return Some(line);
    }
    let mut at = 0;
    loop {
        // At the beginning of a value.
        if bytes.get(at) == Some(&b'"') {
            at += 1;
            loop {
                at += bytes[at..].iter().position(|&b| b == b'"')? + 1;
                match bytes.get(at) {
                    Some(b'"') => at += 1,
                    // The next byte may be the second of two.
                    None if !is_last => return None,
                    _ => break,
                }
            }
        }
        let ends = |&b: &u8| b == delimiter || b == b'\n';
        match bytes[at..].iter().position(ends) {
            None => return is_last.then_some(bytes.len()),
            Some(n) => at += n + 1,
        }
        if bytes[at - 1] == b'\n' {
            return Some(at);
        }
    }
}

/// A row without its end.
pub(super) fn without_end(row: &[u8]) -> &[u8] {
    let row = row.strip_suffix(b"\n").unwrap_or(row);
    row.strip_suffix(b"\r").unwrap_or(row)
}

/// A value of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Value<'a> {
    /// Without the quotation marks around it.
    pub text: &'a [u8],
    /// There are doubled quotation marks in it.
    pub is_escaped: bool,
}

impl Value<'_> {
    /// Appends the value itself. Memory for its text is all that `out` takes.
    pub fn unescape_into(&self, out: &mut Vec<u8>) {
        out.reserve(self.text.len());
        let mut rest = self.text;
        while self.is_escaped
            && let Some(n) = rest.iter().position(|&b| b == b'"')
        {
            out.extend_from_slice(&rest[..=n]);
            rest = rest.get(n + 2..).unwrap_or_default();
        }
        out.extend_from_slice(rest);
    }
}

/// The values of a row, in order; an error, which says what is wrong with it, is the last.
pub(super) struct Values<'a> {
    /// From the beginning of the next value.
    rest: Option<&'a [u8]>,
    delimiter: u8,
}

impl<'a> Values<'a> {
    /// Of a row without its end.
    pub fn of(row: &'a [u8], delimiter: u8) -> Self {
        Self {
            rest: Some(row),
            delimiter,
        }
    }

    fn quoted(&mut self, rest: &'a [u8]) -> Result<Value<'a>, &'static str> {
        let (mut at, mut is_escaped) = (1, false);
        loop {
            let Some(n) = rest[at..].iter().position(|&b| b == b'"') else {
                return Err("a quoted value does not end");
            };
            at += n + 1;
            if rest.get(at) != Some(&b'"') {
                break;
            }
            is_escaped = true;
            at += 1;
        }
        match rest.get(at) {
            None => {}
            Some(&b) if b == self.delimiter => self.rest = Some(&rest[at + 1..]),
            Some(_) => return Err("something follows a quoted value"),
        }
        Ok(Value {
            text: &rest[1..at - 1],
            is_escaped,
        })
    }
}

impl<'a> Iterator for Values<'a> {
    type Item = Result<Value<'a>, &'static str>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.rest.take()?;
        if rest.first() == Some(&b'"') {
            return Some(self.quoted(rest));
        }
        let text = match rest.iter().position(|&b| b == self.delimiter) {
            None => rest,
            Some(n) => {
                self.rest = Some(&rest[n + 1..]);
                &rest[..n]
            }
        };
        if text.contains(&b'\r') {
            self.rest = None;
            return Some(Err(
                "a carriage return outside of quotation marks is not followed by a line feed",
            ));
        }
        Some(Ok(Value {
            text,
            is_escaped: false,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(row: &[u8]) -> Result<Vec<String>, &'static str> {
        Values::of(row, b',')
            .map(|value| {
                let mut out = Vec::new();
                value?.unescape_into(&mut out);
                Ok(String::from_utf8(out).unwrap())
            })
            .collect()
    }

    #[test]
    fn values_stand_in_quotation_marks_or_not() {
        for (row, expected) in [
            ("a,b,c", &["a", "b", "c"][..]),
            ("a", &["a"]),
            ("a,", &["a", ""]),
            (",,", &["", "", ""]),
            ("\"\"", &[""]),
            ("\"a,b\",\"c\nd\r\n\"", &["a,b", "c\nd\r\n"]),
            ("\"say \"\"so\"\"\",\"\"\"\"", &["say \"so\"", "\""]),
            ("5\" disk, \"x\"", &["5\" disk", " \"x\""]),
        ] {
            assert_eq!(values(row.as_bytes()).unwrap(), expected, "{row}");
        }
        for row in ["\"a", "a,\"b\"\"", "\"a\"b", "\"a\" ,b", "a\rb", "a\r,b"] {
            assert!(values(row.as_bytes()).is_err(), "{row:?}");
        }
    }

    #[test]
    fn rows_end_outside_of_quotation_marks_however_the_bytes_are_cut() {
        let text = b"a,b\n\"x\ny\",\"\"\"\n\"\r\n\n5\",z\nq,\"w\"";
        let rows: &[&[u8]] = &[
            b"a,b\n",
            b"\"x\ny\",\"\"\"\n\"\r\n",
            b"\n",
            b"5\",z\n",
            b"q,\"w\"",
        ];
        let (mut at, mut found) = (0, Vec::new());
        while at < text.len() {
            // With fewer bytes it is not known yet, or it is the same.
            let len = row_len(&text[at..], b',', true).unwrap();
            for end in at..text.len() {
                let cut = row_len(&text[at..end], b',', false);
                assert!(cut.is_none() || cut == Some(len), "{at} {end}");
                assert!(end < at + len || cut.is_some());
            }
            found.push(&text[at..at + len]);
            at += len;
        }
        assert_eq!(found, rows);
        assert_eq!(row_len(b"a,\"b\n", b',', true), None);
        assert_eq!(row_len(b"a\t\"b\n\"\n", b'\t', true), Some(7));
    }
}
