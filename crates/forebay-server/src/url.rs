//! Percent-encoding in the paths and queries that every API of the node takes.

use forebay_core::{Error, Result};
use percent_encoding::percent_decode_str;

/// The parameters of a query, in their order, decoded.
///
/// # Errors
/// `Invalid` if the result is not UTF-8.
pub fn parse_query(query: &str) -> Result<Vec<(String, String)>> {
    query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let name = decode(&name.replace('+', " "))?;
            // Values may be secrets, such as signatures: an error names the parameter alone.
            let value = percent_decode_str(&value.replace('+', " "))
                .decode_utf8()
                .map(|v| v.into_owned())
                .map_err(|_| {
                    Error::invalid(format!(
                        "the value of the query parameter {:?} is not percent-encoded UTF-8",
                        forebay_core::name::shorten(&name)
                    ))
                    .hint("encode the value as UTF-8 first, then as %XX")
                })?;
            Ok((name, value))
        })
        .collect()
}

/// A percent-encoded path, or a part of one.
///
/// # Errors
/// `Invalid` if the result is not UTF-8.
pub fn decode(text: &str) -> Result<String> {
    percent_decode_str(text)
        .decode_utf8()
        .map(|t| t.into_owned())
        .map_err(|_| {
            Error::invalid(format!(
                "{:?} is not percent-encoded UTF-8",
                forebay_core::name::shorten(text)
            ))
            .hint("encode the name as UTF-8 first, then as %XX")
        })
}
