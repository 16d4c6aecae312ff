//! Requests about a node's cache and their answers: warm-ups, pins, evictions, and `stat`.

use forebay_core::Attributes;
use serde::{Deserialize, Serialize};

/// Which objects a request refers to: a prefix of a bucket, or names. The body of a warm-up, a pin,
/// an unpin and an eviction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Selection {
    /// May be empty if a manifest names the buckets.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub bucket: String,
    /// Every object whose name begins with this; the empty prefix is the whole bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// Whole keys, in `bucket`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys: Option<Vec<String>>,
    /// `BUCKET/KEY`, or `KEY` if `bucket` is given; one on each line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// Say what would be done, and do nothing.
    pub dry_run: bool,
    /// Objects processed at the same time, up to the node's own limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<usize>,
    /// For a pin, in a cluster: so many nodes keep each object, 1 to 3.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mirror: Option<u8>,
}

/// One line of the answer to a warm-up. The last one is `Report`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum WarmEvent {
    /// The progress so far.
    Progress(WarmReport),
    /// An object that was not warmed.
    Object(NotWarmed),
    /// The result.
    Report(WarmReport),
    /// An event of a later release.
    #[serde(other)]
    Other,
}

/// Sums over a warm-up, so far or at its end. Each object is counted once.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WarmReport {
    /// Whether this was a dry run, and the sums say what would have been done.
    pub dry_run: bool,
    /// Objects that are finished.
    pub objects: u64,
    /// Objects found so far.
    pub listed: u64,
    /// Whether `listed` is all of them.
    pub listing_done: bool,
    /// Objects fetched now; in a dry run: objects that would be fetched.
    pub warmed: u64,
    /// Bytes of those.
    pub warmed_bytes: u64,
    /// Objects that were already cached completely and are current.
    pub already_there: u64,
    /// Bytes of those.
    pub already_there_bytes: u64,
    /// Objects that the origin does not have.
    pub missing: u64,
    /// Objects that the origin does not let the node read.
    pub denied: u64,
    /// Objects that failed for any other reason.
    pub failed: u64,
    /// Bytes of what was fetched and what was already there.
    pub bytes: u64,
    /// Time since the warm-up began.
    pub seconds: f64,
    /// Why the listing broke off, if it did: the report covers the objects that were listed before.
    pub error: Option<String>,
    /// In a cluster, what each node did; empty if only one was asked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeWork>,
}

/// What one node of a cluster did for a request that concerns all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeWork {
    /// The member's id: 16 hexadecimal digits.
    pub id: String,
    /// What operators call it.
    pub name: String,
    /// Objects of which it has done its part; large ones have parts on several nodes.
    pub objects: u64,
    /// Bytes that a warm-up brought to it, or an eviction freed there.
    pub bytes: u64,
    /// Bytes that a warm-up found there.
    pub already_there_bytes: u64,
    /// Objects of which it has not done its part.
    pub failed: u64,
    /// Why it has not done the first of those.
    pub error: Option<String>,
}

/// An object that a warm-up did not fetch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotWarmed {
    /// The bucket's name, as clients of the node use it.
    pub bucket: String,
    /// The object's key in that bucket.
    pub key: String,
    /// Which of the counts of a [`WarmReport`] includes it.
    pub outcome: NotWarmedWhy,
    /// The same in words.
    pub message: String,
}

/// Why an object was not warmed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NotWarmedWhy {
    /// The object does not exist.
    Missing,
    /// The origin does not let the node read it.
    Denied,
    /// Any other reason, those of later releases included.
    #[default]
    #[serde(other)]
    Failed,
}

impl NotWarmedWhy {
    /// As it is written in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            NotWarmedWhy::Missing => "missing",
            NotWarmedWhy::Denied => "denied",
            NotWarmedWhy::Failed => "failed",
        }
    }
}

/// What can be done to objects in the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheAction {
    /// Keep them from eviction; objects that are not cached yet are kept once they are.
    #[default]
    Pin,
    /// Let them be evicted again.
    Unpin,
    /// Remove them from the cache now.
    Evict,
}

impl CacheAction {
    /// As it is written in paths and reports.
    pub fn as_str(self) -> &'static str {
        match self {
            CacheAction::Pin => "pin",
            CacheAction::Unpin => "unpin",
            CacheAction::Evict => "evict",
        }
    }

    /// Parses the last part of the request's path.
    pub fn parse(text: &str) -> Option<Self> {
        [CacheAction::Pin, CacheAction::Unpin, CacheAction::Evict]
            .into_iter()
            .find(|action| action.as_str() == text)
    }

    /// The path of the request.
    pub fn path(self) -> String {
        format!("/v1/forebay/{}", self.as_str())
    }
}

/// The answer to a pin, an unpin or an eviction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeReport {
    /// The requested action.
    pub action: CacheAction,
    /// Whether this was a dry run, and the counts say what would have been done.
    pub dry_run: bool,
    /// All objects that the request names.
    pub objects: u64,
    /// Objects that are now as requested, and were not before.
    pub changed: u64,
    /// Objects that already were as requested, and those that cannot be evicted because they are
    /// pinned.
    pub unchanged: u64,
    /// Objects for which it failed.
    pub failed: u64,
    /// Bytes that an eviction freed.
    pub bytes: u64,
    /// The first of the failed objects.
    pub errors: Vec<FailedObject>,
    /// For a pin on several nodes: on how many; fewer than requested if the cluster has fewer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<u8>,
    /// In a cluster, what each node did; empty if only one was asked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeWork>,
}

/// An object for which an action failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedObject {
    /// The bucket's name, as clients of the node use it.
    pub bucket: String,
    /// The object's key in that bucket.
    pub key: String,
    /// Why it failed.
    pub message: String,
}

/// `GET /v1/forebay/pinned`: of all nodes of a cluster; with `?this_node` of the one that is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pinned {
    /// The pinned objects that the caller may administer, sorted by name.
    pub pinned: Vec<PinnedObject>,
}

/// A pinned object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinnedObject {
    /// The bucket's name, as clients of the node use it.
    pub bucket: String,
    /// The object's key in that bucket.
    pub key: String,
    /// How many nodes of a cluster are to keep it, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<u8>,
    /// In a cluster, the names of the nodes that have pinned it; empty if only one was asked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
}

/// `GET /v1/forebay/stat/<bucket>/<key>`: an object's metadata, and how much of it is in the cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stat {
    /// The bucket's name, as clients of the node use it.
    pub bucket: String,
    /// The object's key in that bucket.
    pub key: String,
    /// Bytes.
    pub size: u64,
    /// With its quotes; `None` if the origin has none.
    pub etag: Option<String>,
    /// As a date in HTTP's format.
    pub last_modified: Option<String>,
    /// Milliseconds since the Unix epoch.
    pub last_modified_ms: i64,
    /// The version by which the cache keys its content.
    pub version: String,
    /// Headers and user metadata that are stored with it.
    pub attributes: Attributes,
    /// `HIT`, `MISS` and so on: how the node learned this.
    pub cache: String,
    /// How many bytes of this version are in the cache.
    pub cached_bytes: u64,
    /// Whether its name is pinned, cached or not.
    pub pinned: bool,
    /// When the origin last said that the cached version is current, in seconds since the Unix
    /// epoch, as known before this call asked the origin.
    pub validated_at: Option<u64>,
    /// `None`: the next read asks the origin.
    pub fresh_until: Option<FreshUntil>,
}

/// How long what is known about an object counts as current.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum FreshUntil {
    /// Seconds since the Unix epoch.
    At(u64),
    /// `"forever"`, in a bucket whose objects do not change.
    Word(String),
}

impl FreshUntil {
    /// For objects that do not change.
    pub fn forever() -> Self {
        FreshUntil::Word("forever".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn events_of_warm_ups_say_which_they_are() {
        let missing = NotWarmed {
            bucket: "b".into(),
            key: "k".into(),
            outcome: NotWarmedWhy::Missing,
            message: "there is no such object".into(),
        };
        for (event, name) in [
            (WarmEvent::Progress(WarmReport::default()), "progress"),
            (WarmEvent::Object(missing), "object"),
            (WarmEvent::Report(WarmReport::default()), "report"),
        ] {
            let json = serde_json::to_value(&event).unwrap();
            assert_eq!(json["event"], name);
            assert_eq!(serde_json::from_value::<WarmEvent>(json).unwrap(), event);
        }
        let read = |json| serde_json::from_value::<WarmEvent>(json).unwrap();
        assert_eq!(read(json!({"event": "dream"})), WarmEvent::Other);
        let later = json!({"event": "object", "bucket": "b", "key": "k", "outcome": "asleep", "message": "m"});
        let WarmEvent::Object(later) = read(later) else {
            panic!("not an object")
        };
        assert_eq!(later.outcome.as_str(), "failed");
    }

    #[test]
    fn a_stat_says_how_long_it_is_fresh() {
        let until = |value| {
            let stat: Stat = serde_json::from_value(json!({"fresh_until": value})).unwrap();
            assert_eq!(serde_json::to_value(&stat).unwrap()["fresh_until"], value);
            stat.fresh_until
        };
        assert_eq!(until(json!(null)), None);
        assert_eq!(until(json!(60)), Some(FreshUntil::At(60)));
        assert_eq!(until(json!("forever")), Some(FreshUntil::forever()));
    }

    #[test]
    fn actions_are_parsed_as_they_are_written() {
        for action in [CacheAction::Pin, CacheAction::Unpin, CacheAction::Evict] {
            assert_eq!(CacheAction::parse(action.as_str()), Some(action));
            assert_eq!(serde_json::to_value(action).unwrap(), action.as_str());
        }
        assert_eq!(CacheAction::parse("warm"), None);
    }
}
