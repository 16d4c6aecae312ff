//! Object names as Python callers write them and as they appear in URLs.

use crate::{
    failure::{Failure, Result},
    request::split_name,
};
use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyString, PyTuple},
};

/// A bucket and a key.
#[derive(Clone, Debug)]
pub struct Name {
    pub bucket: String,
    pub key: String,
}

impl Name {
    /// `"bucket/key"`, `"s3://bucket/key"`, `(bucket, key)`, or a key with `bucket`.
    pub fn from_py(name: &Bound<'_, PyAny>, bucket: Option<&str>) -> PyResult<Name> {
        if let Ok(pair) = name.cast::<PyTuple>() {
            let (bucket, key): (String, String) = pair.extract().map_err(|e: PyErr| {
                if pair.len() == 2 && pair.iter().all(|part| part.is_instance_of::<PyString>()) {
                    // It is not Unicode, as names of files may be: the error says which character.
                    return e;
                }
                PyTypeError::new_err("a tuple that names an object is (bucket, key), both str")
            })?;
            return Ok(Name { bucket, key }.checked()?);
        }
        let text: std::borrow::Cow<'_, str> = name.extract().map_err(|e: PyErr| {
            if name.is_instance_of::<PyString>() {
                return e;
            }
            PyTypeError::new_err(format!(
                "a name is a str or (bucket, key), not {}",
                type_name(name)
            ))
        })?;
        let name = match bucket {
            Some(bucket) => Name {
                bucket: bucket.to_owned(),
                key: text.into_owned(),
            },
            None => {
                let (bucket, key) = split_name(&text)?;
                if is_cut_url(bucket) {
                    return Err(cut_url(&text).into());
                }
                Name {
                    bucket: bucket.to_owned(),
                    key: key.to_owned(),
                }
            }
        };
        Ok(name.checked()?)
    }

    fn checked(self) -> Result<Name> {
        forebay_core::name::validate_bucket(&self.bucket)
            .and_then(|()| forebay_core::name::validate_key(&self.key))
            .map_err(Failure::from)?;
        Ok(self)
    }

    /// The path of the object API.
    pub fn path(&self) -> String {
        forebay_client::object_path(&self.bucket, &self.key)
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.bucket, self.key)
    }
}

/// Whether this is a URL without its bucket (`gs:`, `s3:/bucket`): the part before its first slash
/// looks like a bucket but is not one.
fn is_cut_url(bucket: &str) -> bool {
    bucket.split_once(':').is_some_and(|(scheme, _)| {
        !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric())
    })
}

/// The error for such a name.
fn cut_url(text: &str) -> Failure {
    let scheme = text.split(':').next().unwrap_or_default();
    Failure::invalid(format!(
        "{:?} does not name a bucket",
        forebay_core::name::shorten(text)
    ))
    .hint(format!(
        "write {scheme}://bucket/key, with two slashes, or bucket/key"
    ))
}

/// `bucket`, `bucket/prefix` or `s3://bucket/prefix`, for listings.
pub fn split_prefix(text: &str) -> Result<(&str, &str)> {
    let rest = match text.split_once("://") {
        Some((scheme, rest)) if !scheme.contains('/') => rest,
        _ => text,
    };
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if is_cut_url(bucket) {
        return Err(cut_url(text));
    }
    forebay_core::name::validate_bucket(bucket).map_err(Failure::from)?;
    Ok((bucket, prefix))
}

pub fn type_name(object: &Bound<'_, PyAny>) -> String {
    object
        .get_type()
        .name()
        .map(|n| n.to_string())
        .unwrap_or_else(|_| "an object".into())
}
