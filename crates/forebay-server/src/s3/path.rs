//! What a request names: bucket and key, from the path or from the host, and the query.

use forebay_core::{Error, Result};
use http::{HeaderMap, Uri, header::HOST};
use percent_encoding::percent_decode_str;

/// Bucket, key and query of an S3 request. Empty bucket: the service itself; empty key: the bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    pub bucket: String,
    pub key: String,
    pub query: Vec<(String, String)>,
}

impl Target {
    /// # Errors
    /// `Invalid` if path or query are not percent-encoded UTF-8.
    pub fn of(uri: &Uri, headers: &HeaderMap, hostnames: &[String]) -> Result<Self> {
        let path = decode(uri.path())?;
        let rest = path
            .strip_prefix('/')
            .ok_or_else(|| Error::invalid("the path does not begin with '/'"))?;
        let host = headers
            .get(HOST)
            .and_then(|h| h.to_str().ok())
            .or_else(|| uri.host())
            .unwrap_or_default();
        let (bucket, key) = match virtual_host_bucket(host, hostnames) {
            Some(bucket) => (bucket.to_owned(), rest.to_owned()),
            None => {
                let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
                (bucket.to_owned(), key.to_owned())
            }
        };
        let query = uri.query().map_or(Ok(Vec::new()), parse_query)?;
        Ok(Target { bucket, key, query })
    }

    pub fn query(&self, name: &str) -> Option<&str> {
        self.query
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.as_str())
    }
}

/// The bucket in `bucket.host` for one of the configured host names.
pub fn virtual_host_bucket<'a>(host: &'a str, hostnames: &[String]) -> Option<&'a str> {
    let name = host
        .rsplit_once(':')
        .filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()))
        .map_or(host, |(name, _)| name);
    hostnames.iter().find_map(|h| {
        let at = name.len().checked_sub(h.len() + 1)?;
        (name.is_char_boundary(at)
            && at > 0
            && name.as_bytes()[at] == b'.'
            && name[at + 1..].eq_ignore_ascii_case(h))
        .then(|| &name[..at])
    })
}

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

#[cfg(test)]
mod tests {
    use super::*;

    fn target(uri: &str, host: &str) -> Result<Target> {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, host.parse().unwrap());
        Target::of(&uri.parse().unwrap(), &headers, &["s3.test".to_owned()])
    }

    #[test]
    fn names_come_from_the_path_or_the_host() {
        let t = target("/b/a%2Fb%20%25.txt?list-type=2&prefix=a%26b", "127.0.0.1:1").unwrap();
        assert_eq!(
            (t.bucket.as_str(), t.key.as_str(), t.query("prefix")),
            ("b", "a/b %.txt", Some("a&b"))
        );
        let t = target("/k/x", "bucket.s3.test:8080").unwrap();
        assert_eq!((t.bucket.as_str(), t.key.as_str()), ("bucket", "k/x"));
        let t = target("/bucket/k", "s3.test").unwrap();
        assert_eq!((t.bucket.as_str(), t.key.as_str()), ("bucket", "k"));
        let t = target("/bucket/", "other.test").unwrap();
        assert_eq!((t.bucket.as_str(), t.key.as_str()), ("bucket", ""));
        assert!(target("/b/%ff", "h").is_err());
    }
}
