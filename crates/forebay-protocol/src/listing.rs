//! Listings: what is asked for under [`BUCKETS_PATH`](crate::BUCKETS_PATH), and pages of the answer.
//! The format is AIStore's: numbers may stand as text, and what says nothing is left out.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::Value;

/// The action of a [`Request`] that lists.
pub const LIST: &str = "list";

/// Of the flags of a request: only what is in the cache.
pub const CACHED: u64 = 1 << 0;
/// Of the flags of a request: archives with their members.
pub const MEMBERS: u64 = 1 << 3;
/// Of the flags of a request: names, and nothing else of objects.
pub const NAME_ONLY: u64 = 1 << 4;
/// Of the flags of a request: only what is not in the cache.
pub const NOT_CACHED: u64 = 1 << 9;
/// Of the flags of a request: what lies deeper is folded into names that end in `/`.
pub const ONE_LEVEL: u64 = 1 << 11;
/// Of the flags of a request: without the names that end in `/`.
pub const NO_DIRS: u64 = 1 << 13;

/// Of the flags of an entry: a member of an archive.
pub const IS_MEMBER: u64 = 1 << 5;
/// Of the flags of an entry: something of it is in the cache.
pub const IS_CACHED: u64 = 1 << 6;
/// Of the flags of an entry: a name that stands for what lies deeper.
pub const IS_DIR: u64 = 1 << 10;

/// The body of a request for buckets, or for a page of one bucket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Request {
    action: &'static str,
    name: &'static str,
    value: Option<ListMessage>,
}

impl Request {
    /// For the buckets: an array of [`Bucket`].
    pub fn buckets() -> Self {
        Request {
            action: LIST,
            name: "",
            value: None,
        }
    }

    /// For a [`Page`].
    pub fn page(page: ListMessage) -> Self {
        Request {
            value: Some(page),
            ..Self::buckets()
        }
    }

    /// The JSON of the body.
    pub fn json(&self) -> String {
        // A struct of strings and numbers cannot fail to be JSON.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Which page is asked for, and what is to be in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListMessage {
    /// Where the page begins, in the words of the page before; empty for the first.
    pub continuation_token: String,
    /// [`CACHED`] and so on.
    pub flags: Flags,
    /// Entries at most; 0 for what the node thinks right.
    pub pagesize: i64,
    /// What names begin with.
    pub prefix: String,
    /// What is wanted of each object, by names with commas between: `name,size,version,checksum`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub props: String,
    /// Names up to this one are left out.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub start_after: String,
    /// Names the listing, if the caller wants to.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uuid: String,
}

/// Flags of a request: a number, or a number in text, which is how they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags(Option<u64>);

impl Flags {
    /// `None` for a value that was read and is not a number of flags.
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

/// One page.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Page {
    /// Where the next page begins; empty on the last.
    pub continuation_token: String,
    /// In the order of their names.
    #[serde(deserialize_with = "entries")]
    pub entries: Vec<Entry>,
    /// Of the page; none are in use.
    pub flags: u64,
    /// Names the listing.
    pub uuid: String,
}

/// An object, a member of an archive, or a name that stands for what lies deeper.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// As the object's version has it; where it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<String>,
    /// [`IS_CACHED`] and so on.
    #[serde(default)]
    pub flags: u64,
    /// The key; of a member `ARCHIVE/MEMBER`.
    pub name: String,
    /// In bytes. On the wire it is text; `None` where only names were asked for.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "as_text",
        deserialize_with = "size"
    )]
    pub size: Option<u64>,
    /// Where it was asked for.
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
    /// By which everything else names it.
    pub name: String,
    /// Empty: there are none here.
    #[serde(default)]
    pub namespace: Namespace,
    /// Where it lives, as AIStore's clients call it.
    #[serde(default)]
    pub provider: String,
}

/// AIStore's groups of buckets, of which a node has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Namespace {
    /// Empty.
    pub name: String,
    /// Empty.
    pub uuid: String,
}

/// No entries may be `null`, as Go writes them.
fn entries<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Entry>, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

// The signature is serde's.
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
