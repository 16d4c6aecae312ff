//! What a caller says of a dataset: which files, of which format, read how.
//!
//! Invariant: two specs with the same [`DatasetSpec::key`] ask for the same thing, so one opening
//! serves both.

use crate::Format;
use arrow_schema::{DataType, Schema, SchemaRef};
use forebay_core::{Error, Result, limits};
use forebay_format::{example::ExampleSpec, jsonl, tabular::named_field};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{collections::HashSet, ops::Range, sync::Arc};
use xxhash_rust::xxh3::xxh3_128;

/// A dataset, as it is asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DatasetSpec {
    /// `bucket/key`, with or without `s3://`: an exact name, a pattern (`{000..127}`, `{a,b}`, `*`,
    /// `?`, `[a-z]`, `**`), everything under a prefix (it ends in `/`), or `manifest:bucket/key`.
    /// Rows are numbered in the order of sources; within a pattern by name.
    #[serde(alias = "source", deserialize_with = "one_or_many")]
    pub sources: Vec<String>,
    /// Where it is not given, the names tell.
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
    /// The columns, each with its type, and no others; what a file lacks of them is null. Where it is
    /// not given, the files tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema: Option<NamedColumns>,
    /// Rows in a block, for formats that have no blocks of their own: objects, archives, TFRecord,
    /// JSONL. Where it is not given, a number that makes blocks of a few MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_rows: Option<u32>,
    /// In the place of sources: a part of some tars of a dataset that is open here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
}

/// A part of some tars: the samples whose first member's bytes begin within a range of them. They
/// are known while the rest of the tars is still on its way, and nothing is looked up at the origin:
/// names and versions are those of the dataset.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Part {
    /// The id of a dataset, of tars as whole objects for example.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub of: String,
    /// Numbers of its files, in this order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<u32>,
    /// The first byte of each file that a sample of the part may begin at.
    pub from: u64,
    /// `None`: to the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<u64>,
}

impl Part {
    pub(crate) fn bytes(&self) -> Range<u64> {
        self.from..self.until.unwrap_or(u64::MAX)
    }
}

/// Where labels come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "from", deny_unknown_fields)]
pub enum LabelSource {
    /// A part of the key, counted from its end: 1 is the directory that the object is in.
    Path {
        /// At least 1.
        #[serde(default = "one")]
        level: u32,
    },
    /// A JSONL or CSV object that has a name and a label for each object.
    File {
        /// `bucket/key`.
        name: String,
        /// The column or field with the object's name: its whole key, or the end of it from a `/`
        /// on. The usual names where it is not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<String>,
        /// The column or field with the label. The usual names where it is not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        label: Option<String>,
    },
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
    /// `true`: with the features that the first records have.
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
    pub(crate) fn spec(&self) -> Option<ExampleSpec> {
        match self {
            Example::Flag(wanted) => wanted.then(ExampleSpec::default),
            Example::Features(spec) => Some(spec.clone()),
        }
    }
}

/// Columns by name, each with the name of its type, in the order in which they are given.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedColumns(pub Vec<(String, String)>);

impl NamedColumns {
    /// As a schema of files of this format.
    ///
    /// # Errors
    /// `Invalid` for a name that is not a type, or a type that the format cannot be read as.
    pub fn schema(&self, format: Format) -> Result<SchemaRef> {
        let fields = self.0.iter().map(|(name, ty)| {
            let field = named_field(name, ty)?;
            let line = format == Format::Jsonl
                && name == jsonl::LINE
                && *field.data_type() == DataType::Utf8;
            Ok(if line { jsonl::line_field() } else { field })
        });
        let schema = Arc::new(Schema::new(fields.collect::<Result<Vec<_>>>()?));
        if format == Format::Jsonl {
            jsonl::check_columns(&schema)?;
        }
        Ok(schema)
    }
}

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

/// As people write it: `TFRecord`, `tf_record`, `arrow`.
fn format<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Format>, D::Error> {
    let Some(text) = Option::<String>::deserialize(from)? else {
        return Ok(None);
    };
    let name = match text.to_ascii_lowercase().replace('_', "-").as_str() {
        "tf-record" | "tfrecords" => "tfrecord".to_owned(),
        "arrow" | "feather" | "ipc" => "arrow-file".to_owned(),
        "ndjson" | "jsonlines" => "jsonl".to_owned(),
        "object" => "objects".to_owned(),
        other => other.to_owned(),
    };
    // The library's own message names the place; ours says what there is.
    Format::parse(&name)
        .map(Some)
        .map_err(|e| serde::de::Error::custom(e.describe()))
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
    /// One source, everything else by itself.
    pub fn of(source: impl Into<String>) -> Self {
        Self {
            sources: vec![source.into()],
            ..Self::default()
        }
    }

    /// From the JSON of a request.
    ///
    /// # Errors
    /// `Invalid` for anything that is not a spec, or makes no sense.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let spec: Self = serde_json::from_slice(json).map_err(|e| {
            Error::invalid(format!("this does not describe a dataset: {e}"))
                .hint(r#"{"sources": ["bucket/prefix/**.parquet"]}"#)
        })?;
        spec.check()?;
        Ok(spec)
    }

    /// # Errors
    /// `Invalid` for what makes no sense.
    pub fn check(&self) -> Result<()> {
        if let Some(part) = &self.part {
            self.check_part(part)?;
        } else if self.sources.is_empty() {
            return Err(Error::invalid("the description has no sources")
                .hint(r#"give "sources": ["bucket/prefix/**.parquet"]"#));
        }
        if self.sources.len() > limits::DATASET_SOURCES_MAX {
            return Err(Error::invalid(format!(
                "the description has {} sources; the limit is {}",
                self.sources.len(),
                limits::DATASET_SOURCES_MAX
            ))
            .hint("list the files in a manifest object, and give manifest:bucket/key"));
        }
        let only = |what: &str, format: Format| match self.format {
            Some(f) if f != format => Err(Error::invalid(format!(
                "{what} applies to {format}, but the format is {f}"
            ))),
            _ => Ok(()),
        };
        if self.labels.is_some() {
            only("labels", Format::Objects)?;
        }
        if let Some(LabelSource::Path { level: 0 }) = self.labels {
            return Err(Error::invalid("labels.level must not be 0")
                .hint("1 is the directory that holds the object, 2 the one above"));
        }
        if self.example.spec().is_some() {
            only("example", Format::TfRecord)?;
        }
        if let Some(columns) = &self.schema {
            self.check_schema(&columns.0)?;
        }
        if self.part.is_some() {
            only("part", Format::Tar)?;
        }
        if self.block_rows == Some(0) {
            return Err(
                Error::invalid("block_rows must not be 0").hint("give 1 or more, or leave it out")
            );
        }
        Ok(())
    }

    fn check_part(&self, part: &Part) -> Result<()> {
        let hint = r#"{"part": {"of": "<id of a dataset>", "files": [0, 1], "from": 0, "until": 1048576}}; without "until", all from there on"#;
        let wrong = |what: &str| Err(Error::invalid(what.to_owned()).hint(hint));
        if !self.sources.is_empty() {
            return wrong("a part takes its files from its dataset, so it has no sources");
        }
        if part.of.is_empty() || part.files.is_empty() || part.bytes().is_empty() {
            return wrong("the part names no dataset, no files or no bytes");
        }
        if part.files.len() > limits::DATASET_PART_FILES_MAX {
            return wrong(&format!(
                "the part has {} files; the limit is {}",
                part.files.len(),
                limits::DATASET_PART_FILES_MAX
            ));
        }
        Ok(())
    }

    fn check_schema(&self, columns: &[(String, String)]) -> Result<()> {
        if columns.is_empty() || columns.len() > limits::JSONL_COLUMNS_MAX {
            return Err(Error::invalid(format!(
                "\"schema\" names {} columns; the limits are 1 to {}",
                columns.len(),
                limits::JSONL_COLUMNS_MAX
            ))
            .hint("leave it out to read the columns as the files have them"));
        }
        let mut seen = HashSet::new();
        for (name, ty) in columns {
            named_field(name, ty)?;
            if !seen.insert(name) {
                return Err(Error::invalid(format!("\"schema\" names {name:?} twice")));
            }
        }
        match self.format {
            Some(Format::Objects) => Err(Error::invalid(
                "\"schema\" is for files with columns, but the format is objects",
            )),
            _ => Ok(()),
        }
    }

    /// Stands for this spec: equal for equal ones, on every platform.
    pub fn key(&self) -> u128 {
        let mut spec = self.clone();
        for source in &mut spec.sources {
            if let Some(rest) = source.strip_prefix("s3://") {
                *source = rest.to_owned();
            }
        }
        // A struct of strings and numbers cannot fail to be JSON.
        xxh3_128(&serde_json::to_vec(&spec).unwrap_or_default())
    }

    /// What the id of a dataset depends on besides its files.
    pub(crate) fn options(&self) -> String {
        let options = Self {
            sources: Vec::new(),
            format: None,
            on_damaged: OnDamaged::Error,
            part: self.part.as_ref().map(|part| Part {
                of: String::new(),
                files: Vec::new(),
                ..*part
            }),
            ..self.clone()
        };
        serde_json::to_string(&options).unwrap_or_default()
    }
}

/// The part of each file that the options of a dataset name ([`DatasetSpec::options`]).
///
/// # Errors
/// `Corrupt` for text that does not describe options.
pub(crate) fn part_of_options(options: &str) -> Result<Option<Range<u64>>> {
    let spec: DatasetSpec = serde_json::from_str(options)
        .map_err(|e| Error::corrupt(format!("the options of a dataset cannot be read: {e}")))?;
    Ok(spec.part.map(|part| part.bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_are_read_and_checked() {
        let spec = DatasetSpec::parse(
            br#"{"source": "s3://b1/x/**", "format": "objects", "labels": {"from": "path"}}"#,
        )
        .unwrap();
        assert_eq!(spec.sources, ["s3://b1/x/**"]);
        assert_eq!(spec.labels, Some(LabelSource::Path { level: 1 }));
        assert_eq!(
            spec.key(),
            DatasetSpec {
                sources: vec!["b1/x/**".into()],
                ..spec.clone()
            }
            .key()
        );
        assert_ne!(
            spec.key(),
            DatasetSpec {
                labels: None,
                ..spec.clone()
            }
            .key()
        );
        for (text, format) in [
            ("TF_Record", Format::TfRecord),
            ("arrow", Format::ArrowFile),
            ("arrow_stream", Format::ArrowStream),
        ] {
            let json = format!(r#"{{"source": "bk/x", "format": "{text}"}}"#);
            assert_eq!(
                DatasetSpec::parse(json.as_bytes()).unwrap().format,
                Some(format)
            );
        }
        let spec = DatasetSpec::parse(
            br#"{"source": "b/x", "schema": {"z": "list<item: float>", "a": "json", "json": "str"}}"#,
        )
        .unwrap();
        let columns = spec.schema.as_ref().unwrap();
        assert_eq!(
            columns.0[0],
            ("z".to_owned(), "list<item: float>".to_owned())
        );
        assert!(
            spec.options()
                .contains(r#"{"z":"list<item: float>","a":"json","json":"str"}"#)
        );
        let names = |format| {
            let schema = columns.schema(format).unwrap();
            schema
                .fields()
                .iter()
                .map(|f| (f.name().clone(), f.is_nullable()))
                .collect::<Vec<_>>()
        };
        let named = |line| {
            vec![
                ("z".to_owned(), true),
                ("a".to_owned(), true),
                ("json".to_owned(), line),
            ]
        };
        assert_eq!(names(Format::Parquet), named(true));
        assert_eq!(
            names(Format::Jsonl),
            named(false),
            "a line is never missing"
        );
        for bad in [
            r#"{}"#,
            r#"[]"#,
            r#"{"sources": []}"#,
            r#"{"sources": ["a"], "formt": "tar"}"#,
            r#"{"sources": ["a"], "format": "rar"}"#,
            r#"{"sources": ["a"], "format": "tar", "labels": {"from": "path"}}"#,
            r#"{"sources": ["a"], "format": "tar", "example": true}"#,
            r#"{"sources": ["a"], "example": {"x": "float128"}}"#,
            r#"{"sources": ["a"], "labels": {"from": "path", "level": 0}}"#,
            r#"{"sources": ["a"], "labels": {"from": "air"}}"#,
            r#"{"sources": ["a"], "block_rows": 0}"#,
            r#"{"sources": ["a"], "part": {"of": "x", "files": [0], "from": 0}}"#,
            r#"{"part": {"of": "x", "files": [0], "from": 5, "until": 5}}"#,
            r#"{"part": {"of": "x", "files": [], "from": 5}}"#,
            r#"{"part": {"files": [0], "from": 5}}"#,
            r#"{"part": {"of": "x", "files": [0], "from": 0}, "format": "zip"}"#,
            r#"{"sources": [1]}"#,
            r#"{"sources": ["a"], "schema": {}}"#,
            r#"{"sources": ["a"], "schema": {"x": "int63"}}"#,
            r#"{"sources": ["a"], "schema": {"x": "int64", "x": "int32"}}"#,
            r#"{"sources": ["a"], "schema": ["x"]}"#,
            r#"{"sources": ["a"], "schema": {"x": "int64"}, "format": "objects"}"#,
        ] {
            assert_eq!(
                DatasetSpec::parse(bad.as_bytes()).unwrap_err().kind(),
                forebay_core::ErrorKind::Invalid,
                "{bad}"
            );
        }
    }
}
