//! What is known of an object besides its bytes, and what tells one version of it from another.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use xxhash_rust::xxh3::Xxh3;

/// The standard and user-defined attributes that are kept with an object and sent back on reads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Attributes {
    /// `Content-Type`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// `Content-Encoding`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_encoding: Option<String>,
    /// `Content-Language`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_language: Option<String>,
    /// `Content-Disposition`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_disposition: Option<String>,
    /// `Cache-Control`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_control: Option<String>,
    /// `x-amz-storage-class`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_class: Option<String>,
    /// User metadata: lower-case names without the `x-amz-meta-` prefix, sorted by name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub user: Vec<(String, String)>,
}

/// An object's size, version and attributes, as the origin gave them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectMeta {
    /// Bytes.
    pub size: u64,
    /// As the origin gave it, with its quotes; `None` where the origin has no ETags.
    pub etag: Option<String>,
    /// Milliseconds since the Unix epoch.
    pub last_modified_ms: i64,
    /// What else is kept with it.
    #[serde(default)]
    pub attributes: Attributes,
}

/// 64 bits that stand for one version of one object's bytes: a hash of ETag and size, or of size
/// and modification time where there is no ETag. Cache keys hold it, so bytes of two versions never
/// meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VersionId(pub u64);

/// The substitute for an ETag where the origin has none, made of the size and the whole second of
/// the last change, which both listings and answers have.
pub fn made_etag(size: u64, last_modified_ms: i64) -> String {
    format!("\"fb-{size:x}-{:x}\"", last_modified_ms.div_euclid(1000))
}

/// Whether [`made_etag`] made an ETag of the size alone, because the origin gave no time of
/// modification: two versions of one size share it.
pub fn is_etag_of_size_alone(etag: &str) -> bool {
    etag.starts_with("\"fb-") && etag.ends_with("-0\"")
}

impl ObjectMeta {
    /// The ETag that clients see.
    pub fn shown_etag(&self) -> Cow<'_, str> {
        match &self.etag {
            Some(etag) => Cow::Borrowed(etag),
            None => Cow::Owned(made_etag(self.size, self.last_modified_ms)),
        }
    }

    /// Whether `tag`, without its quotes, was made from this object's size and date. A listing may
    /// know neither ETag nor date where the object has both.
    pub fn matches_made_etag(&self, tag: &str) -> bool {
        tag.starts_with("fb-")
            && [self.last_modified_ms, 0]
                .iter()
                .any(|ms| made_etag(self.size, *ms).trim_matches('"') == tag)
    }

    /// Whether the origin tells versions apart: with neither an ETag nor a time of modification,
    /// two versions of one size look the same.
    pub fn names_version(&self) -> bool {
        self.etag.is_some() || self.last_modified_ms != 0
    }

    /// Which version this is.
    pub fn version(&self) -> VersionId {
        let mut h = Xxh3::new();
        match &self.etag {
            Some(etag) => {
                h.update(b"e");
                h.update(etag.as_bytes());
            }
            None => {
                h.update(b"m");
                h.update(&self.last_modified_ms.to_le_bytes());
            }
        }
        h.update(&self.size.to_le_bytes());
        VersionId(h.digest())
    }
}

/// How an answer came to be; the value of the `X-Cache` header and the label of the cache's
/// counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum CacheStatus {
    /// Every byte came from the local disk, within the bucket's freshness rule.
    Hit,
    /// At least one byte came from the origin.
    Miss,
    /// The origin said that the cached version is still current; every byte came from the local
    /// disk.
    Revalidated,
    /// The origin failed, and the bucket's rule lets an older version than usual be served
    /// meanwhile; every byte came from the local disk.
    Stale,
    /// The cache was not asked: caching is off, or the request said so.
    Bypass,
}

impl CacheStatus {
    /// As `X-Cache` says it.
    pub fn as_str(self) -> &'static str {
        match self {
            CacheStatus::Hit => "HIT",
            CacheStatus::Miss => "MISS",
            CacheStatus::Revalidated => "REVALIDATED",
            CacheStatus::Stale => "STALE",
            CacheStatus::Bypass => "BYPASS",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_etag_and_size() {
        let m = |etag: Option<&str>, size, t| ObjectMeta {
            size,
            etag: etag.map(str::to_owned),
            last_modified_ms: t,
            attributes: Attributes::default(),
        };
        assert_eq!(
            m(Some("\"a\""), 1, 0).version(),
            m(Some("\"a\""), 1, 9).version()
        );
        assert_ne!(
            m(Some("\"a\""), 1, 0).version(),
            m(Some("\"a\""), 2, 0).version()
        );
        assert_ne!(
            m(Some("\"a\""), 1, 0).version(),
            m(Some("\"b\""), 1, 0).version()
        );
        assert_ne!(m(None, 1, 0).version(), m(None, 1, 1).version());
    }

    #[test]
    fn an_etag_that_is_made_without_a_date_is_known() {
        assert!(is_etag_of_size_alone(&made_etag(36, 0)));
        for tells in [
            made_etag(36, 1_000),
            made_etag(36, 16_000),
            "\"a-0\"".to_owned(),
        ] {
            assert!(!is_etag_of_size_alone(&tells), "{tells}");
        }
    }
}
