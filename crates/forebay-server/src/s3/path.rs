//! What a request names: bucket and key, from the path or from the host, and the query.

use crate::url::{decode, parse_query};
use forebay_core::{Error, Result};
use http::{HeaderMap, Uri, header::HOST};

/// AIStore serves S3 under this path, so its clients' endpoints end in it.
const ALIAS: &str = "/s3";

/// Bucket, key and query of an S3 request. Empty bucket: the service itself; empty key: the bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    pub bucket: String,
    pub key: String,
    pub query: Vec<(String, String)>,
    /// Whether the path began with [`ALIAS`].
    pub aliased: bool,
}

impl Target {
    /// `aliases` says whether `/s3` stands for the root and is not a bucket.
    ///
    /// # Errors
    /// `Invalid` if path or query are not percent-encoded UTF-8.
    pub fn of(uri: &Uri, headers: &HeaderMap, hostnames: &[String], aliases: bool) -> Result<Self> {
        let mut path = decode(uri.path())?;
        let host = headers
            .get(HOST)
            .and_then(|h| h.to_str().ok())
            .or_else(|| uri.host())
            .unwrap_or_default();
        let in_host = virtual_host_bucket(host, hostnames);
        let aliased = aliases && in_host.is_none() && unaliased(uri.path()).is_some();
        if aliased {
            path = decode(unaliased(uri.path()).unwrap_or_default())?;
        }
        let rest = path
            .strip_prefix('/')
            .ok_or_else(|| Error::invalid("the path does not begin with '/'"))?;
        let (bucket, key) = match in_host {
            Some(bucket) => (bucket.to_owned(), rest.to_owned()),
            None => {
                let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
                (bucket.to_owned(), key.to_owned())
            }
        };
        let query = uri.query().map_or(Ok(Vec::new()), parse_query)?;
        Ok(Target {
            bucket,
            key,
            query,
            aliased,
        })
    }

    pub fn query(&self, name: &str) -> Option<&str> {
        self.query
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.as_str())
    }
}

/// A path below [`ALIAS`], rewritten to be below the root.
fn unaliased(path: &str) -> Option<&str> {
    match path.strip_prefix(ALIAS)? {
        "" => Some("/"),
        rest => rest.starts_with('/').then_some(rest),
    }
}

/// The same for a URI below [`ALIAS`]; others stay as they are.
pub fn without_alias(uri: &Uri) -> Uri {
    let Some(path) = unaliased(uri.path()) else {
        return uri.clone();
    };
    let text = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    // It was part of a valid URI.
    text.parse().unwrap_or_else(|_| uri.clone())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn target(uri: &str, host: &str) -> Result<Target> {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, host.parse().unwrap());
        Target::of(
            &uri.parse().unwrap(),
            &headers,
            &["s3.test".to_owned()],
            true,
        )
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

    #[test]
    fn the_root_has_an_alias() {
        for (uri, bucket, key, root) in [
            ("/s3/b/a%2Fb?acl", "b", "a/b", "/b/a%2Fb?acl"),
            ("/s3/b", "b", "", "/b"),
            ("/s3/", "", "", "/"),
            ("/s3?x-id=1", "", "", "/?x-id=1"),
            ("/s3/s3/k", "s3", "k", "/s3/k"),
        ] {
            let t = target(uri, "h").unwrap();
            assert_eq!((t.bucket.as_str(), t.key.as_str()), (bucket, key), "{uri}");
            assert!(t.aliased);
            assert_eq!(without_alias(&uri.parse().unwrap()).to_string(), root);
        }
        // A bucket of another name, a key in a bucket's own host, a bucket with that name.
        let t = target("/s3x/k", "h").unwrap();
        assert!(!t.aliased && t.bucket == "s3x");
        let t = target("/s3/k", "bucket.s3.test").unwrap();
        assert!(!t.aliased && t.bucket == "bucket" && t.key == "s3/k");
        let named = Target::of(&"/s3/k".parse().unwrap(), &HeaderMap::new(), &[], false).unwrap();
        assert!(!named.aliased && named.bucket == "s3" && named.key == "k");
    }
}
