//! Datasets: what a caller asks for ([`DatasetSpec`]), and answers about them.
//! (`forebay_dataset::parse_spec` checks whether a request makes sense.)

use crate::ErrorDocument;
use forebay_core::{Error, Format, Result, format::ExampleSpec};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ops::Range;

/// A dataset, as it is requested.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DatasetSpec {
    /// `bucket/key`, with or without `s3://`: an exact name, a pattern (`{000..127}`, `{a,b}`, `*`,
    /// `?`, `[a-z]`, `**`), everything under a prefix (ending in `/`), or `manifest:bucket/key`.
    /// Rows are numbered in the order of sources; within a pattern, by name.
    #[serde(alias = "source", deserialize_with = "one_or_many")]
    pub sources: Vec<String>,
    /// The format; without it, the names decide.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "format")]
    pub format: Option<Format>,
    /// Whole objects only: a `label` column.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<LabelSource>,
    /// What to do about a file whose footer, headers or directory cannot be read.
    #[serde(skip_serializing_if = "is_default")]
    pub on_damaged: OnDamaged,
    /// TFRecord only: decode each record as a `tf.train.Example`; the columns are its features.
    #[serde(skip_serializing_if = "is_default")]
    pub example: Example,
    /// The columns, each with its type, and no others; a column that a file lacks is null. Without
    /// this, the files decide.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema: Option<NamedColumns>,
    /// Rows in a block, for formats without blocks of their own, which Parquet and Arrow have.
    /// Without it, a number that makes blocks of a few MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_rows: Option<u32>,
    /// litData's tokens only: each row is so many tokens of a chunk, whatever item they are of, as
    /// with its `TokensLoader(block_size)`. Without it, each item is a row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,
    /// The caller reads archives from front to back next: of a few that are named one by one, the
    /// node may fetch the first bytes in the request that brings size and version. Changes nothing
    /// about the answer.
    #[serde(skip_serializing_if = "is_default")]
    pub begin: bool,
    /// Instead of sources: a part of some tars of a dataset that is open here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
}

/// A part of some tars: the samples whose first member's bytes begin within a range of them. The
/// samples are known while the rest of the tars is still arriving, and nothing is looked up at the
/// origin: names and versions are those of the dataset.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Part {
    /// The id of a dataset, for example of tars as whole objects.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub of: String,
    /// The numbers of its files to use, in this order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<u32>,
    /// The first place of each file that a sample of the part may begin at.
    pub from: u64,
    /// The place after the last one. `None`: to the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<u64>,
    /// Places count pieces: each file is cut into this many, all of the same length. `None`: places
    /// count bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pieces: Option<u64>,
}

impl Part {
    /// Whether it names no place at all, or one that no file has.
    pub fn is_empty(&self) -> bool {
        let until = self.until.unwrap_or(self.pieces.unwrap_or(u64::MAX));
        self.from >= until || self.pieces.is_some_and(|pieces| until > pieces)
    }

    /// The bytes that a sample of the part may begin at, in a file of `size` bytes. The last piece
    /// has no end: a compressed tar unpacks to more than its size.
    pub fn bytes_of(&self, size: u64) -> Range<u64> {
        let place = |at: u64| match self.pieces {
            None => at,
            Some(pieces) if at >= pieces => u64::MAX,
            Some(pieces) => (u128::from(size) * u128::from(at) / u128::from(pieces)) as u64,
        };
        place(self.from)..self.until.map_or(u64::MAX, place)
    }
}

/// Where labels come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "from", deny_unknown_fields)]
pub enum LabelSource {
    /// A part of the key, counted from its end: 1 is the directory of the object.
    Path {
        /// At least 1.
        #[serde(default = "one")]
        level: u32,
    },
    /// A JSONL or CSV object that has a name and a label for each object.
    File {
        /// `bucket/key`.
        name: String,
        /// The column or field with the object's name: its whole key, or the end of it starting at
        /// a `/`. Without this, the usual names.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<String>,
        /// The column or field with the label. Without this, the usual names.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        label: Option<String>,
    },
}

impl LabelSource {
    /// Parses what command lines contain: `path`, `path:2`, or the name of an object.
    pub fn parse(text: &str) -> Self {
        let level = match text.split_once(':') {
            None if text == "path" => Some(1),
            Some(("path", level)) => level.parse().ok(),
            _ => None,
        };
        match level {
            Some(level) => LabelSource::Path { level },
            None => LabelSource::File {
                name: text.to_owned(),
                key: None,
                label: None,
            },
        }
    }
}

fn one() -> u32 {
    1
}

/// What to do about a file that cannot be indexed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnDamaged {
    /// Opening fails and names the file.
    #[default]
    Error,
    /// The file is left out; the answer names it.
    Skip,
}

/// Whether records are decoded as `tf.train.Example`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Example {
    /// `true`: with the features of the first records.
    Flag(bool),
    /// With these, by name: `int64`, `bytes`, `text`, `float`, or a list of one of them.
    Features(ExampleSpec),
}

impl Default for Example {
    fn default() -> Self {
        Example::Flag(false)
    }
}

impl Example {
    /// `None`: records stay bytes. A spec without features: those of the first records.
    pub fn spec(&self) -> Option<ExampleSpec> {
        match self {
            Example::Flag(wanted) => wanted.then(ExampleSpec::default),
            Example::Features(spec) => Some(spec.clone()),
        }
    }
}

/// Columns by name, each with the name of its type, in the given order.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedColumns(pub Vec<(String, String)>);

impl Serialize for NamedColumns {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(name, ty)| (name, ty)))
    }
}

impl<'de> Deserialize<'de> for NamedColumns {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Columns;
        impl<'de> serde::de::Visitor<'de> for Columns {
            type Value = NamedColumns;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("columns with their types, as in {\"text\": \"string\"}")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<NamedColumns, A::Error> {
                let mut columns: Vec<(String, String)> = Vec::new();
                while let Some(column) = map.next_entry()? {
                    columns.push(column);
                }
                Ok(NamedColumns(columns))
            }
        }
        from.deserialize_map(Columns)
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A format as people write it: `TFRecord`, `tf_record`, `arrow`.
fn format<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Format>, D::Error> {
    let Some(text) = Option::<String>::deserialize(from)? else {
        return Ok(None);
    };
    // The library's own message names the place; ours lists what exists.
    Format::parse_loosely(&text)
        .map(Some)
        .map_err(|e| serde::de::Error::custom(e.describe()))
}

/// The error of a format that does not exist: which ones do says more than where it stands in JSON
/// that a library wrote.
fn unknown_format(json: &[u8]) -> Option<Error> {
    #[derive(Deserialize)]
    struct Named {
        format: String,
    }
    let Named { format } = serde_json::from_slice(json).ok()?;
    Format::parse_loosely(&format).err()
}

fn one_or_many<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMany {
        One(String),
        Many(Vec<String>),
    }
    Ok(match OneOrMany::deserialize(from)? {
        OneOrMany::One(one) => vec![one],
        OneOrMany::Many(many) => many,
    })
}

impl DatasetSpec {
    /// A single source, with defaults for everything else.
    pub fn of(source: impl Into<String>) -> Self {
        Self {
            sources: vec![source.into()],
            ..Self::default()
        }
    }

    /// Parses JSON. The node, which knows its limits, decides whether it makes sense.
    ///
    /// # Errors
    /// `Invalid` for anything that is not a spec.
    pub fn read(json: &[u8]) -> Result<Self> {
        serde_json::from_slice(json).map_err(|e| {
            unknown_format(json).unwrap_or_else(|| {
                Error::invalid(format!("this does not describe a dataset: {e}"))
                    .hint(r#"{"sources": ["bucket/prefix/**.parquet"]}"#)
            })
        })
    }

    /// The JSON of a request. Equal specs have the same text on every platform, and ids of datasets
    /// are made from it: a new field must not be written while it has its default.
    pub fn json(&self) -> String {
        // A struct of strings and numbers can always be written as JSON.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// What is known about an open dataset.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Description {
    /// The identity of this version of the dataset, by which requests name it.
    pub id: String,
    /// The format of its files, such as `parquet` or `jsonl`.
    pub format: String,
    /// Rows of all files.
    pub rows: u64,
    /// Blocks of all files: what is fetched and decoded at a time.
    pub blocks: u64,
    /// How many files it has.
    pub files: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// The columns that are read if none are named.
    pub schema: Vec<Column>,
    /// Columns that are read only if they are named: the lines of JSONL.
    pub besides: Vec<Column>,
    /// How much memory its index takes at the node.
    pub memory_bytes: u64,
}

/// A column of a dataset.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Column {
    /// The name by which rows are requested.
    pub name: String,
    /// Arrow's name of the type; `Json`: text that is the JSON of values without a common type.
    #[serde(rename = "type")]
    pub data_type: String,
    /// Whether rows may lack a value.
    pub nullable: bool,
}

/// `GET /v1/datasets`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Datasets {
    /// The open datasets that the caller may read.
    pub datasets: Vec<Description>,
}

/// `POST /v1/datasets`: the dataset, and how it was opened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpenedDataset {
    /// What was opened.
    #[serde(flatten)]
    pub dataset: Description,
    /// Milliseconds.
    pub opened_ms: f64,
    /// Files whose index was read now.
    pub indexed_files: u64,
    /// Bytes that were read for that.
    pub indexed_bytes: u64,
    /// Files whose index was already known.
    pub reused_files: u64,
    /// The dataset that the same description meant at the last opening, if its files were
    /// different.
    pub previous: Option<String>,
    /// Damaged files that were left out.
    pub skipped_files: u64,
    /// The first of these files, with what is wrong with each.
    pub skipped: Vec<SkippedFile>,
    /// Names that cannot be read through this node.
    pub unreadable_names: u64,
    /// One of them; `None` if there are none.
    pub unreadable_name: Option<String>,
}

/// A damaged file that was left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SkippedFile {
    /// The object, `bucket/key`.
    pub name: String,
    /// What is wrong with it.
    pub message: String,
}

/// How far an opening has progressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpenProgress {
    /// Files found so far.
    pub listed: u64,
    /// Pages of listings that arrived.
    pub pages: u64,
    /// Files whose index must be read; 0 while listing.
    pub to_index: u64,
    /// Files whose index was read so far.
    pub indexed: u64,
    /// Bytes that were read for that.
    pub bytes: u64,
}

/// One line of `POST /v1/datasets?progress=true`. The last one is `Opened` or `Error`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum OpenEvent {
    /// The progress; sent now and then.
    Progress(OpenProgress),
    /// The dataset is open.
    Opened(Box<OpenedDataset>),
    /// It failed. The head of the answer was already sent, so the status is in the line.
    Error(Box<ErrorDocument>),
    /// An event of a later release.
    #[serde(other)]
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::{ErrorKind, format::FeatureType};

    #[test]
    fn events_say_which_they_are() {
        let events = [
            OpenEvent::Progress(OpenProgress {
                listed: 3,
                ..OpenProgress::default()
            }),
            OpenEvent::Opened(Box::default()),
            OpenEvent::Error(Box::new(ErrorDocument::of(
                &Error::corrupt("bk/a: no footer").hint("look at it"),
            ))),
        ];
        for (event, name) in events.into_iter().zip(["progress", "opened", "error"]) {
            let json = serde_json::to_value(&event).unwrap();
            assert_eq!(json["event"], name);
            assert_eq!(serde_json::from_value::<OpenEvent>(json).unwrap(), event);
        }
        let later = serde_json::from_str(r#"{"event": "dream"}"#).unwrap();
        assert_eq!(OpenEvent::Other, later);
        let line = r#"{"event": "error", "status": 502, "code": "corrupt", "message": "m"}"#;
        let OpenEvent::Error(e) = serde_json::from_str(line).unwrap() else {
            panic!("no error")
        };
        assert_eq!(e.kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn a_spec_has_one_json() {
        // Ids of datasets, and what nodes keep on disk, depend on every byte of these.
        for (spec, json) in [
            (DatasetSpec::of("b/x/**"), r#"{"sources":["b/x/**"]}"#),
            (
                DatasetSpec {
                    sources: vec!["b/x".into(), "manifest:b/m".into()],
                    format: Some(Format::Objects),
                    labels: Some(LabelSource::parse("path:2")),
                    on_damaged: OnDamaged::Skip,
                    block_rows: Some(5),
                    ..DatasetSpec::default()
                },
                r#"{"sources":["b/x","manifest:b/m"],"format":"objects","labels":{"from":"path","level":2},"on_damaged":"skip","block_rows":5}"#,
            ),
            (
                DatasetSpec {
                    labels: Some(LabelSource::parse("b/labels.csv")),
                    ..DatasetSpec::of("b/x/")
                },
                r#"{"sources":["b/x/"],"labels":{"from":"file","name":"b/labels.csv"}}"#,
            ),
            (
                DatasetSpec {
                    format: Some(Format::TfRecord),
                    example: Example::Flag(true),
                    ..DatasetSpec::of("b/x")
                },
                r#"{"sources":["b/x"],"format":"tfrecord","example":true}"#,
            ),
            (
                DatasetSpec {
                    example: Example::Features(ExampleSpec {
                        features: [("n".to_owned(), FeatureType::Int64List)].into(),
                    }),
                    schema: Some(NamedColumns(vec![
                        ("z".into(), "string".into()),
                        ("a".into(), "list<item: float>".into()),
                    ])),
                    ..DatasetSpec::of("b/x")
                },
                r#"{"sources":["b/x"],"example":{"n":"list<int64>"},"schema":{"z":"string","a":"list<item: float>"}}"#,
            ),
            (
                DatasetSpec {
                    format: Some(Format::Tar),
                    part: Some(Part {
                        of: "d".into(),
                        files: vec![2, 0],
                        from: 0,
                        until: Some(9),
                        pieces: None,
                    }),
                    ..DatasetSpec::default()
                },
                r#"{"sources":[],"format":"tar","part":{"of":"d","files":[2,0],"from":0,"until":9}}"#,
            ),
        ] {
            assert_eq!(spec.json(), json);
            assert_eq!(DatasetSpec::read(json.as_bytes()).unwrap(), spec);
        }
    }

    #[test]
    fn the_pieces_of_a_file_follow_each_other_and_have_no_end() {
        for (size, pieces) in [(0, 1), (1, 3), (10, 3), (1 << 40, 7), (u64::MAX, u64::MAX)] {
            let ends = pieces.min(20);
            let mut at = 0;
            for from in 0..ends {
                let part = Part {
                    from,
                    until: Some(from + 1),
                    pieces: Some(pieces),
                    ..Part::default()
                };
                assert!(!part.is_empty());
                let bytes = part.bytes_of(size);
                assert_eq!(bytes.start, at, "{from} of {pieces} of {size}");
                at = bytes.end;
            }
            assert!(pieces > 20 || at == u64::MAX);
        }
        for (from, until, pieces) in [(3, None, 3), (2, Some(2), 3), (0, Some(4), 3), (0, None, 0)]
        {
            let part = Part {
                from,
                until,
                pieces: Some(pieces),
                ..Part::default()
            };
            assert!(part.is_empty(), "{part:?}");
        }
    }

    #[test]
    fn a_spec_is_read_as_people_write_it() {
        let json = br#"{"source": "b/x", "format": "TF_Record", "labels": {"from": "path"}}"#;
        let spec = DatasetSpec::read(json).unwrap();
        assert_eq!(
            spec,
            DatasetSpec {
                format: Some(Format::TfRecord),
                labels: Some(LabelSource::Path { level: 1 }),
                ..DatasetSpec::of("b/x")
            }
        );
        let e = DatasetSpec::read(br#"{"source": "b/x", "format": "rar"}"#).unwrap_err();
        assert_eq!(e.message(), "\"rar\" is not the format of a dataset");
        assert!(
            e.hint_text().unwrap().contains("parquet, arrow-file"),
            "{e}"
        );
        let e = DatasetSpec::read(br#"{"source": "b/x", "frmat": "tar"}"#).unwrap_err();
        assert!(e.message().contains("frmat"), "{e}");
        for (text, level) in [("path", 1), ("path:3", 3)] {
            assert_eq!(LabelSource::parse(text), LabelSource::Path { level });
        }
        for text in ["path:x", "paths", "path/l.csv", "b/path:2"] {
            let named = LabelSource::parse(text);
            assert!(
                matches!(&named, LabelSource::File { name, .. } if name == text),
                "{named:?}"
            );
        }
    }
}
