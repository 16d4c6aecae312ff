//! AIStore's words for kinds of stores.
//!
//! A bucket's name alone leads to its origin here, so a request may name any provider, or none. A
//! listing of buckets shows the real one, and lists only the provider that it is asked for.

use forebay_core::{Error, Result, name::shorten};
use forebay_engine::Buckets;

/// Where a bucket's objects are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// A directory.
    Ais,
    Aws,
    Gcp,
    Azure,
    Oci,
    /// A web server.
    Ht,
}

impl Provider {
    const ALL: [Provider; 6] = [
        Provider::Ais,
        Provider::Aws,
        Provider::Gcp,
        Provider::Azure,
        Provider::Oci,
        Provider::Ht,
    ];

    /// As AIStore's clients spell it.
    pub fn word(self) -> &'static str {
        match self {
            Provider::Ais => "ais",
            Provider::Aws => "aws",
            Provider::Gcp => "gcp",
            Provider::Azure => "azure",
            Provider::Oci => "oci",
            Provider::Ht => "ht",
        }
    }

    /// The kind of a bucket's origin.
    pub fn of(buckets: &dyn Buckets, bucket: &str) -> Provider {
        parse(buckets.provider(bucket)).unwrap_or(Provider::Ais)
    }
}

/// The provider with this name, or with its name in URLs (`s3`, `gs`, `az`, `oc`).
pub fn parse(word: &str) -> Option<Provider> {
    let word = match word {
        "s3" => "aws",
        "gs" => "gcp",
        "az" => "azure",
        "oc" => "oci",
        other => other,
    };
    Provider::ALL.into_iter().find(|p| p.word() == word)
}

/// The provider that a request names; `None` if it names none.
///
/// # Errors
/// `Invalid` for a word that does not name a provider.
pub fn named(word: Option<&str>) -> Result<Option<Provider>> {
    match word.filter(|w| !w.is_empty()) {
        None => Ok(None),
        Some(word) => parse(word).map(Some).ok_or_else(|| {
            Error::invalid(format!("the provider {:?} is not known", shorten(word)))
                .hint("use ais, aws (s3), gcp (gs), azure (az), oci (oc) or ht, or leave it out")
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn providers_have_two_names() {
        for provider in Provider::ALL {
            assert_eq!(parse(provider.word()), Some(provider));
        }
        assert_eq!(parse("s3"), Some(Provider::Aws));
        assert_eq!(named(Some("")).unwrap(), None);
        assert!(named(Some("ftp")).is_err());
    }
}
