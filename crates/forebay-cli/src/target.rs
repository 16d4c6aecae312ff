//! What a command is about: `bucket/key`, or `bucket[/prefix]`.

use crate::fail::{Failure, Outcome};
use forebay_core::{Error, ObjectName, name};

/// People copy addresses from elsewhere: the scheme has no meaning here.
fn strip_scheme(text: &str) -> &str {
    ["s3://", "forebay://"]
        .iter()
        .find_map(|s| text.strip_prefix(s))
        .unwrap_or(text)
}

/// `bucket/key`.
pub fn object(text: &str) -> Outcome<ObjectName> {
    let usage = |e: Error| Failure::Usage(e.hint("an object is named bucket/key"));
    match strip_scheme(text).split_once('/') {
        Some((bucket, key)) => ObjectName::new(bucket, key).map_err(usage),
        None => Err(usage(Error::invalid(format!("no key: {text:?}")))),
    }
}

/// A bucket, and a prefix that may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefix {
    pub bucket: String,
    pub prefix: String,
}

impl Prefix {
    pub fn parse(text: &str) -> Outcome<Self> {
        let (bucket, prefix) = strip_scheme(text)
            .split_once('/')
            .unwrap_or((strip_scheme(text), ""));
        name::validate_bucket(bucket)
            .map_err(|e| Failure::Usage(e.hint("as in bucket or bucket/prefix")))?;
        Ok(Self {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
        })
    }
}

impl std::fmt::Display for Prefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.prefix.is_empty() {
            f.write_str(&self.bucket)
        } else {
            write!(f, "{}/{}", self.bucket, self.prefix)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_and_prefixes() {
        assert_eq!(object("s3://bk/a/b.jpg").unwrap().to_string(), "bk/a/b.jpg");
        for bad in ["bk", "bk/", "", "/k", "bk/../x"] {
            assert_eq!(object(bad).unwrap_err().exit_code(), 2, "{bad}");
        }
        assert_eq!(
            Prefix::parse("bk").unwrap(),
            Prefix {
                bucket: "bk".into(),
                prefix: String::new()
            }
        );
        assert_eq!(Prefix::parse("bk/a/").unwrap().to_string(), "bk/a/");
        assert!(Prefix::parse("").is_err());
    }
}
