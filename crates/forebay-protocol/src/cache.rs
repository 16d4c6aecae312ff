//! What is asked about the cache of a node, and what it says: warm-ups, pins, evictions, and
//! `stat`.

use forebay_core::Attributes;
use serde::{Deserialize, Serialize};

/// Which objects a request means: a prefix of a bucket, or names. The body of a warm-up, a pin, an
/// unpin and an eviction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Selection {
    /// May be empty where a manifest names the buckets.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub bucket: String,
    /// Every object whose name begins so; the empty prefix is the whole bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// Whole keys, in `bucket`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys: Option<Vec<String>>,
    /// `BUCKET/KEY`, or `KEY` where `bucket` is given; one on each line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// Say what would be done, and do nothing.
    pub dry_run: bool,
    /// Objects at the same time; the node's own limit is the most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<usize>,
}

/// One line of the answer to a warm-up. The last one is `Report`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum WarmEvent {
    /// How it goes so far.
    Progress(WarmReport),
    /// An object that did not come.
    Object(NotWarmed),
    /// How it went.
    Report(WarmReport),
    /// Of a later release.
    #[serde(other)]
    Other,
}

/// Sums over a warm-up, so far or at its end. Each object is counted once.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WarmReport {
    /// Whether nothing was done, and the sums say what would be.
    pub dry_run: bool,
    /// Objects that are done with.
    pub objects: u64,
    /// Objects found so far.
    pub listed: u64,
    /// Whether `listed` is all of them.
    pub listing_done: bool,
    /// Brought now; in a dry run: would be brought.
    pub warmed: u64,
    /// Bytes of those.
    pub warmed_bytes: u64,
    /// Objects that were cached whole, and current.
    pub already_there: u64,
    /// Bytes of those.
    pub already_there_bytes: u64,
    /// Objects that the origin does not have.
    pub missing: u64,
    /// Objects that the origin does not let the node read.
    pub denied: u64,
    /// Objects that did not come for any other reason.
    pub failed: u64,
    /// Of what was brought and what was there.
    pub bytes: u64,
    /// Since the warm-up began.
    pub seconds: f64,
    /// The listing broke off: the report is of the objects that were listed before.
    pub error: Option<String>,
}

/// An object that a warm-up did not bring.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotWarmed {
    /// As clients of the node name it.
    pub bucket: String,
    /// The object's key in that bucket.
    pub key: String,
    /// Which of the counts of a [`WarmReport`] it is in.
    pub outcome: NotWarmedWhy,
    /// The same in words.
    pub message: String,
}

/// Why it did not come.
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
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            NotWarmedWhy::Missing => "missing",
            NotWarmedWhy::Denied => "denied",
            NotWarmedWhy::Failed => "failed",
        }
    }
}

/// What can be done to the cache about objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheAction {
    /// Keep them from eviction; what is not cached yet counts as soon as it is.
    #[default]
    Pin,
    /// Let them be evicted again.
    Unpin,
    /// Take them out of the cache now.
    Evict,
}

impl CacheAction {
    /// As it is written, in paths and in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            CacheAction::Pin => "pin",
            CacheAction::Unpin => "unpin",
            CacheAction::Evict => "evict",
        }
    }

    /// The last part of the request's path, read.
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
    /// What was asked for.
    pub action: CacheAction,
    /// Whether nothing was done, and the counts say what would be.
    pub dry_run: bool,
    /// All that were meant.
    pub objects: u64,
    /// Objects that are as asked for now, and were not before.
    pub changed: u64,
    /// Objects that were so already, and those that cannot be evicted because they are pinned.
    pub unchanged: u64,
    /// Objects that it could not be done to.
    pub failed: u64,
    /// That an eviction freed.
    pub bytes: u64,
    /// The first of those that failed.
    pub errors: Vec<FailedObject>,
}

/// An object that something could not be done to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedObject {
    /// As clients of the node name it.
    pub bucket: String,
    /// The object's key in that bucket.
    pub key: String,
    /// Why not.
    pub message: String,
}

/// `GET /v1/forebay/pinned`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pinned {
    /// Those that the caller may administer, in the order of names.
    pub pinned: Vec<PinnedObject>,
}

/// An object that is pinned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinnedObject {
    /// As clients of the node name it.
    pub bucket: String,
    /// The object's key in that bucket.
    pub key: String,
}

/// `GET /v1/forebay/stat/<bucket>/<key>`: an object's metadata, and how much of it is in the cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stat {
    /// As clients of the node name it.
    pub bucket: String,
    /// The object's key in that bucket.
    pub key: String,
    /// Bytes.
    pub size: u64,
    /// With its quotes; `None` where the origin has none.
    pub etag: Option<String>,
    /// As HTTP writes dates.
    pub last_modified: Option<String>,
    /// Milliseconds since the Unix epoch.
    pub last_modified_ms: i64,
    /// What the cache keys its content by.
    pub version: String,
    /// Headers and user metadata that are kept with it.
    pub attributes: Attributes,
    /// `HIT`, `MISS` and so on: how the node came to know this.
    pub cache: String,
    /// How many of its bytes, of this version, are in the cache.
    pub cached_bytes: u64,
    /// Whether its name is pinned, cached or not.
    pub pinned: bool,
    /// When the origin last said that the cached version is current, in seconds since the Unix
    /// epoch, as it was known before this call asked the origin.
    pub validated_at: Option<u64>,
    /// `None`: the origin is asked at the next read.
    pub fresh_until: Option<FreshUntil>,
}

/// How long what is known of an object is taken to be current.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum FreshUntil {
    /// Seconds since the Unix epoch.
    At(u64),
    /// `"forever"`, in a bucket whose objects do not change.
    Word(String),
}

impl FreshUntil {
    /// Objects that do not change.
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
