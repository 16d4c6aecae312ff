//! What writers and readers of checkpoints say, and what they are told.

use crate::manifest::MANIFEST;
use forebay_core::{Error, ErrorKind, ObjectName, Result};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Which checkpoint is meant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The bucket.
    pub bucket: String,
    /// What the keys of its objects begin with, without a slash at its end.
    pub prefix: String,
}

impl Place {
    /// # Errors
    /// `Invalid` for what does not name a checkpoint.
    pub fn new(bucket: &str, prefix: &str) -> Result<Place> {
        let prefix = prefix.trim_end_matches('/');
        if prefix.is_empty() {
            return Err(
                Error::invalid("a checkpoint needs a name within its bucket")
                    .hint("as in s3://bucket/run/step-100"),
            );
        }
        ObjectName::new(bucket, format!("{prefix}/{MANIFEST}"))
            .map_err(|e| e.with_kind(ErrorKind::Invalid))?;
        Ok(Place {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
        })
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.bucket, self.prefix)
    }
}

/// What a writer says when it begins. Unknown fields are refused.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Begin {
    /// The id of a checkpoint that another node began: this is a part of it.
    pub id: Option<String>,
    /// Which part.
    pub part: Option<String>,
    /// Whether it may replace a checkpoint of its name.
    pub replace: bool,
    /// About how many bytes will come: their room is taken now, so that no file is refused for lack
    /// of it in the middle.
    pub bytes: Option<u64>,
}

/// A file and its size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedFile {
    /// As its writer called it.
    pub name: String,
    /// Bytes.
    pub size: u64,
}

/// What a writer says at the end. Unknown fields are refused.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Commit {
    /// All files that this node got.
    pub files: Vec<NamedFile>,
    /// Files that other nodes send to the same bucket, as parts of the same id.
    pub elsewhere: Vec<NamedFile>,
    /// Of `files`, those that readers of another program look for: they are written to
    /// `<prefix>/<name>` too, after all others.
    pub last: Vec<String>,
    /// What readers are to be told again: a JSON value of at most 64 KiB.
    pub meta: serde_json::Value,
    /// Seconds within which it is to be durable; by default the node's setting.
    pub deadline_s: Option<f64>,
}

/// What to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// It is on disk.
    Staged,
    /// It is at the origin.
    Durable,
}

/// How a checkpoint stands.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The bucket.
    pub bucket: String,
    /// Its name.
    pub prefix: String,
    /// Among all of its name.
    pub id: String,
    /// Of several at several nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// `staging`, `staged`, `flushing`, `failed` (and tried again), `durable` or `removing`.
    pub state: Cow<'static, str>,
    /// Whether it is on disk whole, or durable.
    pub staged: bool,
    /// Whether it is at the origin whole.
    pub durable: bool,
    /// Files that are known.
    pub files: usize,
    /// Bytes of these.
    pub bytes: u64,
    /// Of these, what the origin has.
    pub bytes_at_origin: u64,
    /// Whether it is on this node's disk.
    pub local: bool,
    /// When it was begun, in milliseconds since the Unix epoch.
    pub begun_ms: i64,
    /// When it was staged; 0: it is not.
    pub staged_ms: i64,
    /// When it became durable; 0: it did not, or it is not known here.
    pub durable_ms: i64,
    /// From its commit until it was durable, or until now.
    pub seconds: f64,
    /// By when it is to be durable, in milliseconds since the Unix epoch; 0: whenever.
    pub deadline_ms: i64,
    /// Whether it was not durable by then.
    pub late: bool,
    /// Attempts to flush it that failed.
    pub failures: u32,
    /// Why the last one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// When the next one begins, in milliseconds since the Unix epoch; 0: one is going on, or none
    /// is needed.
    pub retry_ms: i64,
    /// The id of the one of its name that it waits for: an earlier one becomes durable first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// If it was not committed: when it is given up unless something is heard of it, in
    /// milliseconds since the Unix epoch; else 0.
    pub expires_ms: i64,
    /// What its writer wants to be told again.
    pub meta: serde_json::Value,
}
