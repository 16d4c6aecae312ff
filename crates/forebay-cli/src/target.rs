//! What a command is about: `bucket/key`, or `bucket[/prefix]`.

use crate::fail::{Failure, Outcome};
use forebay_core::{Error, ObjectName, name};

/// `bucket/key`.
pub fn object(text: &str) -> Outcome<ObjectName> {
    let usage = |e: Error| wrong(e, "an object is named bucket/key");
    match name::without_scheme(text).split_once('/') {
        Some((bucket, key)) => ObjectName::new(bucket, key).map_err(usage),
        None => Err(usage(Error::invalid(format!("no key: {text:?}")))),
    }
}

/// A name that cannot be one; `form` is what is named so.
fn wrong(e: Error, form: &str) -> Failure {
    let hint = match e.hint_text() {
        Some(rule) => format!("{form}; {rule}"),
        None => form.to_owned(),
    };
    Failure::Usage(e.hint(hint))
}

/// A bucket, and a prefix that may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefix {
    pub bucket: String,
    pub prefix: String,
}

impl Prefix {
    pub fn parse(text: &str) -> Outcome<Self> {
        let (bucket, prefix) = name::without_scheme(text)
            .split_once('/')
            .unwrap_or((name::without_scheme(text), ""));
        name::validate_bucket(bucket).map_err(|e| wrong(e, "as in bucket or bucket/prefix"))?;
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
        for scheme in ["", "s3://", "gs://", "az://", "ais://", "forebay://"] {
            let text = format!("{scheme}bk/a/b.jpg");
            assert_eq!(object(&text).unwrap().to_string(), "bk/a/b.jpg");
        }
        assert!(object("http://bk/a/b.jpg").is_err());
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
