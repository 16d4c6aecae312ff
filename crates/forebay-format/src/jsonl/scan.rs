//! JSON, value by value, without building any objects.
//!
//! Reads JSON as programs write it: `NaN` and `Infinity` are numbers, as in Python's output, and
//! texts may contain control characters. Everything else follows RFC 8259.

use std::{borrow::Cow, ops::Range};

/// Arrays and objects nested in each other.
const DEPTH_MAX: usize = 128;

/// What is wrong, and at which byte of the line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Bad {
    pub at: usize,
    pub what: &'static str,
}

/// How a value begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Object,
    Array,
    Text,
    Number,
    Bool,
    Null,
}

impl Token {
    pub fn name(self) -> &'static str {
        match self {
            Token::Object => "an object",
            Token::Array => "an array",
            Token::Text => "a string",
            Token::Number => "a number",
            Token::Bool => "true or false",
            Token::Null => "null",
        }
    }
}

/// A position in a line.
#[derive(Clone, Debug)]
pub(super) struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
    depth: usize,
}

impl<'a> Scanner<'a> {
    pub fn new(line: &'a [u8]) -> Self {
        Self {
            bytes: line,
            at: 0,
            depth: 0,
        }
    }

    pub fn at(&self) -> usize {
        self.at
    }

    /// The same line from another position on.
    pub fn from(&self, at: usize) -> Self {
        Self { at, ..self.clone() }
    }

    pub fn bytes(&self, range: Range<usize>) -> &'a [u8] {
        &self.bytes[range]
    }

    fn bad<T>(&self, what: &'static str) -> Result<T, Bad> {
        Err(Bad { at: self.at, what })
    }

    fn space(&mut self) {
        while matches!(self.bytes.get(self.at), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
    }

    /// What comes next, after whitespace.
    pub fn token(&mut self) -> Result<Token, Bad> {
        self.space();
        Ok(match self.bytes.get(self.at) {
            Some(b'{') => Token::Object,
            Some(b'[') => Token::Array,
            Some(b'"') => Token::Text,
            Some(b'0'..=b'9' | b'-' | b'N' | b'I') => Token::Number,
            Some(b't' | b'f') => Token::Bool,
            Some(b'n') => Token::Null,
            Some(_) => return self.bad("a value was expected"),
            None => return self.bad("it ends too early"),
        })
    }

    /// Only whitespace is left.
    pub fn end(&mut self) -> Result<(), Bad> {
        self.space();
        if self.at == self.bytes.len() {
            Ok(())
        } else {
            self.bad("something follows the object")
        }
    }

    fn word(&mut self, word: &[u8]) -> Result<(), Bad> {
        if self.bytes[self.at..].starts_with(word) {
            self.at += word.len();
            Ok(())
        } else {
            self.bad("a value was expected")
        }
    }

    pub fn null(&mut self) -> Result<(), Bad> {
        self.word(b"null")
    }

    pub fn bool(&mut self) -> Result<bool, Bad> {
        let is_true = self.bytes[self.at] == b't';
        self.word(if is_true { b"true" } else { b"false" })?;
        Ok(is_true)
    }

    fn digits(&mut self) -> Result<(), Bad> {
        let start = self.at;
        while self.bytes.get(self.at).is_some_and(u8::is_ascii_digit) {
            self.at += 1;
        }
        if self.at > start {
            Ok(())
        } else {
            self.bad("a digit was expected")
        }
    }

    /// A number's text, and whether it is written as an integer.
    pub fn number(&mut self) -> Result<(&'a str, bool), Bad> {
        let start = self.at;
        let mut integer = true;
        if self.bytes[self.at] == b'-' {
            self.at += 1;
        }
        match self.bytes.get(self.at) {
            Some(b'N') if self.at == start => {
                self.word(b"NaN")?;
                integer = false;
            }
            Some(b'I') => {
                self.word(b"Infinity")?;
                integer = false;
            }
            Some(b'0') => self.at += 1,
            _ => self.digits()?,
        }
        if integer {
            if self.bytes.get(self.at) == Some(&b'.') {
                integer = false;
                self.at += 1;
                self.digits()?;
            }
            if let Some(b'e' | b'E') = self.bytes.get(self.at) {
                integer = false;
                self.at += 1;
                if let Some(b'+' | b'-') = self.bytes.get(self.at) {
                    self.at += 1;
                }
                self.digits()?;
            }
        }
        let text = std::str::from_utf8(&self.bytes[start..self.at]).unwrap_or_default();
        Ok((text, integer))
    }

    /// The text between the quotation marks, and whether any of it is escaped.
    pub fn text(&mut self) -> Result<(&'a [u8], bool), Bad> {
        self.at += 1;
        let start = self.at;
        let mut escaped = false;
        loop {
            let Some(n) = find_quote_or_backslash(&self.bytes[self.at..]) else {
                self.at = self.bytes.len();
                return self.bad("a string does not end");
            };
            self.at += n;
            if self.bytes[self.at] == b'"' {
                let text = &self.bytes[start..self.at];
                self.at += 1;
                return Ok((text, escaped));
            }
            escaped = true;
            let len = match self.bytes.get(self.at + 1) {
                Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => 2,
                Some(b'u') if hex4(&self.bytes[self.at + 2..]).is_some() => 6,
                _ => return self.bad("this cannot follow a backslash"),
            };
            self.at += len;
        }
    }

    /// Skips a value.
    pub fn skip(&mut self) -> Result<(), Bad> {
        match self.token()? {
            Token::Object => self.object(|this, _| this.skip()),
            Token::Array => self.array(Self::skip),
            Token::Text => self.text().map(drop),
            Token::Number => self.number().map(drop),
            Token::Bool => self.bool().map(drop),
            Token::Null => self.null(),
        }
    }

    fn deeper(&mut self) -> Result<(), Bad> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return self.bad("arrays and objects are nested too deeply");
        }
        self.at += 1;
        self.space();
        Ok(())
    }

    /// Visits each value of an object, with its name; `value` must consume it.
    pub fn object(
        &mut self,
        mut value: impl FnMut(&mut Self, &str) -> Result<(), Bad>,
    ) -> Result<(), Bad> {
        self.deeper()?;
        if self.bytes.get(self.at) == Some(&b'}') {
            self.at += 1;
            self.depth -= 1;
            return Ok(());
        }
        loop {
            if self.bytes.get(self.at) != Some(&b'"') {
                return self.bad("a name in quotation marks was expected");
            }
            let (name, escaped) = self.text()?;
            let name = if escaped {
                Cow::Owned(unescaped(name))
            } else {
                match std::str::from_utf8(name) {
                    Ok(name) => Cow::Borrowed(name),
                    Err(_) => return self.bad("a name is not UTF-8"),
                }
            };
            self.space();
            if self.bytes.get(self.at) != Some(&b':') {
                return self.bad("a colon was expected");
            }
            self.at += 1;
            self.space();
            value(self, &name)?;
            if self.ends(b'}')? {
                return Ok(());
            }
        }
    }

    /// Visits each value of an array; `value` must consume it.
    pub fn array(
        &mut self,
        mut value: impl FnMut(&mut Self) -> Result<(), Bad>,
    ) -> Result<(), Bad> {
        self.deeper()?;
        if self.bytes.get(self.at) == Some(&b']') {
            self.at += 1;
            self.depth -= 1;
            return Ok(());
        }
        loop {
            value(self)?;
            if self.ends(b']')? {
                return Ok(());
            }
        }
    }

    /// After a value: a comma, or the end.
    fn ends(&mut self, end: u8) -> Result<bool, Bad> {
        self.space();
        match self.bytes.get(self.at) {
            Some(b',') => {
                self.at += 1;
                self.space();
                Ok(false)
            }
            Some(&b) if b == end => {
                self.at += 1;
                self.depth -= 1;
                Ok(true)
            }
            None => self.bad("it ends too early"),
            _ => self.bad("a comma, or the end of an array or object, was expected"),
        }
    }
}

fn find_quote_or_backslash(bytes: &[u8]) -> Option<usize> {
    // Eight at a time: a byte of `x` is zero where the wanted byte was.
    const ONES: u64 = 0x0101_0101_0101_0101;
    let zeros = |x: u64| x.wrapping_sub(ONES) & !x & (ONES << 7);
    let (words, rest) = bytes.as_chunks::<8>();
    for (n, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        let found =
            zeros(word ^ (ONES * u64::from(b'"'))) | zeros(word ^ (ONES * u64::from(b'\\')));
        if found != 0 {
            return Some(n * 8 + found.trailing_zeros() as usize / 8);
        }
    }
    let at = rest.iter().position(|&b| matches!(b, b'"' | b'\\'))?;
    Some(bytes.len() - rest.len() + at)
}

fn hex4(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk::<4>()?.iter().try_fold(0, |n, &b| {
        char::from(b).to_digit(16).map(|digit| n * 16 + digit)
    })
}

/// Appends a text with its escapes resolved. Half of a surrogate pair, which no text can hold,
/// becomes U+FFFD.
pub(super) fn unescape_into(text: &[u8], out: &mut Vec<u8>) {
    out.reserve(text.len());
    let mut rest = text;
    while let Some(at) = rest.iter().position(|&b| b == b'\\') {
        out.extend_from_slice(&rest[..at]);
        rest = &rest[at + 1..];
        let Some((&kind, after)) = rest.split_first() else {
            return;
        };
        rest = after;
        out.push(match kind {
            b'b' => 8,
            b'f' => 12,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'u' => {
                let mut code = hex4(rest).unwrap_or(0xfffd);
                rest = rest.get(4..).unwrap_or_default();
                if (0xd800..0xdc00).contains(&code)
                    && let Some(low) = rest.strip_prefix(b"\\u").and_then(hex4)
                    && (0xdc00..0xe000).contains(&low)
                {
                    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                    rest = &rest[6..];
                }
                let c = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
                out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
                continue;
            }
            other => other,
        });
    }
    out.extend_from_slice(rest);
}

fn unescaped(text: &[u8]) -> String {
    let mut out = Vec::with_capacity(text.len());
    unescape_into(text, &mut out);
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid(line: &str) -> bool {
        let mut scanner = Scanner::new(line.as_bytes());
        scanner.skip().and_then(|()| scanner.end()).is_ok()
    }

    #[test]
    fn what_is_json_is_what_another_parser_takes() {
        let whole =
            r#" {"a": [1, -2.5e+3, "x\n\u00e9\"", true, false, null, {}, []], "b":{"c" : 0}} "#;
        let mut rng = 0x2545_f491_4f6c_dd1du64;
        let mut random = |n: usize| {
            rng ^= rng << 13;
            rng ^= rng >> 7;
            rng ^= rng << 17;
            (rng % n as u64) as usize
        };
        let mut taken = 0;
        for case in 0..20_000 {
            let mut line = whole.as_bytes().to_vec();
            for _ in 0..random(3) + usize::from(case > 0) {
                if line.is_empty() {
                    break;
                }
                let at = random(line.len());
                match random(3) {
                    0 => drop(line.remove(at)),
                    1 => line.insert(at, b"{}[]\",:\\01-.eEtnu \t"[random(19)]),
                    _ => line.truncate(at.max(1)),
                }
            }
            let Ok(text) = std::str::from_utf8(&line) else {
                continue;
            };
            let theirs = serde_json::from_str::<serde_json::Value>(text);
            // What the other parser refuses beyond the grammar: half surrogate pairs, control
            // characters, and numbers that no float can hold.
            let refuses = theirs.as_ref().err().is_some_and(|e| {
                let e = e.to_string();
                e.contains("surrogate") || e.contains("control") || e.contains("out of range")
            });
            if !refuses {
                assert_eq!(valid(text), theirs.is_ok(), "{text:?}: {theirs:?}");
                taken += usize::from(theirs.is_ok());
            }
        }
        assert!(taken > 1000, "{taken} lines were JSON");
        for line in ["NaN", "-Infinity", "[Infinity, NaN]", "\"a\tb\""] {
            assert!(valid(line), "{line}");
        }
        for line in [
            "-NaN",
            "Inf",
            "+1",
            "01",
            "1.",
            ".5",
            "\"\\x\"",
            "[1,]",
            "{\"a\":1,}",
        ] {
            assert!(!valid(line), "{line}");
        }
        let deep = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
        assert!(valid(&deep(128)) && !valid(&deep(129)) && !valid(&"[".repeat(1 << 20)));
    }

    #[test]
    fn texts_lose_their_escapes() {
        for (text, expected) in [
            (r"a\n\t\\\/\u0041", "a\n\t\\/A"),
            (r"\ud83d\ude00", "😀"),
            (r"x\ud83dy", "x\u{fffd}y"),
            (r"\ude00\ud83d", "\u{fffd}\u{fffd}"),
            (r"\ud83d\u0041", "\u{fffd}A"),
        ] {
            assert_eq!(unescaped(text.as_bytes()), expected, "{text}");
        }
    }
}
