//! Listings: requests under [`BUCKETS_PATH`](crate::BUCKETS_PATH), and the pages of their answers.
//! The format is AIStore's: numbers may be strings, and empty values are left out.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::Value;

/// The action of a [`Request`] for a listing.
pub const LIST: &str = "list";

/// Request flag: only objects that are in the cache.
pub const CACHED: u64 = 1 << 0;
/// Request flag: list archives with their members.
pub const MEMBERS: u64 = 1 << 3;
/// Request flag: only the names of objects.
pub const NAME_ONLY: u64 = 1 << 4;
/// Request flag: only objects that are not in the cache.
pub const NOT_CACHED: u64 = 1 << 9;
/// Request flag: deeper levels are folded into names that end in `/`.
pub const ONE_LEVEL: u64 = 1 << 11;
/// Request flag: without the names that end in `/`.
pub const NO_DIRS: u64 = 1 << 13;

/// Entry flag: a member of an archive.
pub const IS_MEMBER: u64 = 1 << 5;
/// Entry flag: some of it is in the cache.
pub const IS_CACHED: u64 = 1 << 6;
/// Entry flag: a name that stands for deeper levels.
pub const IS_DIR: u64 = 1 << 10;

/// The body of a request for the buckets, or for a page of one bucket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Request {
    action: &'static str,
    name: &'static str,
    value: Option<ListMessage>,
}

impl Request {
    /// A request for the buckets: the answer is an array of [`Bucket`].
    pub fn buckets() -> Self {
        Request {
            action: LIST,
            name: "",
            value: None,
        }
    }

    /// A request for a [`Page`].
    pub fn page(page: ListMessage) -> Self {
        Request {
            value: Some(page),
            ..Self::buckets()
        }
    }

    /// The JSON of the body.
    pub fn json(&self) -> String {
        // A struct of strings and numbers can always be written as JSON.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Which page is requested, and what it should contain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListMessage {
    /// Where the page begins: the token of the page before; empty for the first.
    pub continuation_token: String,
    /// [`CACHED`] and so on.
    pub flags: Flags,
    /// The maximum number of entries; 0: the node decides.
    pub pagesize: i64,
    /// The prefix of names.
    pub prefix: String,
    /// The wanted properties of each object, separated by commas: `name,size,version,checksum`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub props: String,
    /// Names up to and including this one are left out.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub start_after: String,
    /// A name for the listing, if the caller wants one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uuid: String,
}

/// Flags of a request: a number, or a number in a string, which is how they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags(Option<u64>);

impl Flags {
    /// `None` for a value that was read and is not a number.
    pub fn bits(self) -> Option<u64> {
        self.0
    }
}

impl Default for Flags {
    fn default() -> Self {
        Flags(Some(0))
    }
}

impl From<u64> for Flags {
    fn from(bits: u64) -> Self {
        Flags(Some(bits))
    }
}

impl Serialize for Flags {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&self.0.unwrap_or(0))
    }
}

impl<'de> Deserialize<'de> for Flags {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(Flags(match Value::deserialize(from)? {
            Value::Null => Some(0),
            Value::Number(n) => n.as_u64(),
            Value::String(text) if text.is_empty() => Some(0),
            Value::String(text) => text.parse().ok(),
            _ => None,
        }))
    }
}

/// One page of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Page {
    /// Where the next page begins; empty on the last.
    pub continuation_token: String,
    /// Sorted by name.
    #[serde(deserialize_with = "entries")]
    pub entries: Vec<Entry>,
    /// Flags of the page; none are in use.
    pub flags: u64,
    /// The name of the listing.
    pub uuid: String,
}

/// An object, a member of an archive, or a name that stands for deeper levels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The checksum of the object's version, if it was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<String>,
    /// [`IS_CACHED`] and so on.
    #[serde(default)]
    pub flags: u64,
    /// The key; for a member, `ARCHIVE/MEMBER`.
    pub name: String,
    /// In bytes. On the wire it is a string; `None` if only names were requested.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "as_text",
        deserialize_with = "size"
    )]
    pub size: Option<u64>,
    /// The version, if it was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

impl Entry {
    /// Whether this flag is set.
    pub fn is(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }
}

/// A bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// The name that everything else uses.
    pub name: String,
    /// Empty: a node has no namespaces.
    #[serde(default)]
    pub namespace: Namespace,
    /// Where it lives, as AIStore's clients call it.
    #[serde(default)]
    pub provider: String,
}

/// AIStore's groups of buckets. A node has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Namespace {
    /// Empty.
    pub name: String,
    /// Empty.
    pub uuid: String,
}

/// An absence of entries may be `null`, as Go writes it.
fn entries<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Entry>, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

// The signature is required by serde.
#[allow(clippy::ref_option)]
fn as_text<S: Serializer>(size: &Option<u64>, to: S) -> Result<S::Ok, S::Error> {
    match size {
        Some(size) => to.collect_str(size),
        None => to.serialize_none(),
    }
}

fn size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    let value = Value::deserialize(from)?;
    let size = match &value {
        Value::Null => return Ok(None),
        Value::String(digits) => digits.parse().ok(),
        other => other.as_u64(),
    };
    match size {
        Some(size) => Ok(Some(size)),
        None => Err(D::Error::custom(format!("{value} is not a size"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_read_as_it_is_written() {
        assert_eq!(
            Request::buckets().json(),
            r#"{"action":"list","name":"","value":null}"#
        );
        let page = ListMessage {
            prefix: "a/".into(),
            pagesize: 5,
            flags: (MEMBERS | ONE_LEVEL).into(),
            ..ListMessage::default()
        };
        let json = Request::page(page.clone()).json();
        assert_eq!(
            json,
            r#"{"action":"list","name":"","value":{"continuation_token":"","flags":"2056","pagesize":5,"prefix":"a/"}}"#
        );
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(ListMessage::deserialize(&json["value"]).unwrap(), page);
    }

    #[test]
    fn flags_come_as_numbers_and_as_text() {
        for (flags, bits) in [
            ("8", Some(8)),
            ("\"8\"", Some(8)),
            ("\"\"", Some(0)),
            ("null", Some(0)),
            ("-1", None),
            ("\"x\"", None),
            ("[8]", None),
        ] {
            let json = format!(r#"{{"flags": {flags}, "target": ""}}"#);
            let page: ListMessage = serde_json::from_str(&json).unwrap();
            assert_eq!(page.flags.bits(), bits, "{flags}");
        }
        assert_eq!(ListMessage::default().flags.bits(), Some(0));
    }

    #[test]
    fn a_page_has_one_json() {
        let page = Page {
            continuation_token: "t".into(),
            entries: vec![
                Entry {
                    name: "a/b".into(),
                    size: Some(300),
                    flags: IS_CACHED,
                    version: Some("v".into()),
                    checksum: Some("c".into()),
                },
                Entry {
                    name: "n".into(),
                    ..Entry::default()
                },
            ],
            flags: 0,
            uuid: "u".into(),
        };
        let json = r#"{"continuation_token":"t","entries":[{"checksum":"c","flags":64,"name":"a/b","size":"300","version":"v"},{"flags":0,"name":"n"}],"flags":0,"uuid":"u"}"#;
        assert_eq!(serde_json::to_string(&page).unwrap(), json);
        assert_eq!(serde_json::from_str::<Page>(json).unwrap(), page);
        let bucket = Bucket {
            name: "b".into(),
            provider: "ais".into(),
            ..Bucket::default()
        };
        let json = r#"{"name":"b","namespace":{"name":"","uuid":""},"provider":"ais"}"#;
        assert_eq!(serde_json::to_string(&bucket).unwrap(), json);
        assert_eq!(serde_json::from_str::<Bucket>(json).unwrap(), bucket);
        for (json, entries) in [(r#"{"entries":null}"#, 0), ("{}", 0)] {
            let page: Page = serde_json::from_str(json).unwrap();
            assert_eq!(page.entries.len(), entries);
        }
        let number: Entry = serde_json::from_str(r#"{"name":"a","size":7}"#).unwrap();
        assert_eq!(number.size, Some(7));
        for size in ["\"x\"", "-1", "{}"] {
            let json = format!(r#"{{"name":"a","size":{size}}}"#);
            let e = serde_json::from_str::<Entry>(&json).unwrap_err();
            assert!(e.to_string().contains("is not a size"), "{e}");
        }
    }
}
