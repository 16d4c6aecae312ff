//! Names in the paths and queries of requests.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// All but the unreserved characters of RFC 3986, section 2.3.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');
const KEY: &AsciiSet = &SEGMENT.remove(b'/');

/// One segment of a path, or one value of a query, percent-encoded.
pub fn encode(text: &str) -> String {
    utf8_percent_encode(text, SEGMENT).to_string()
}

/// A key, percent-encoded, with its slashes kept.
pub fn encode_key(key: &str) -> String {
    utf8_percent_encode(key, KEY).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_encoded() {
        assert_eq!(encode_key("a b/ü+%.jpg"), "a%20b/%C3%BC%2B%25.jpg");
        assert_eq!(encode("a/b"), "a%2Fb");
    }
}
