//! The names of dataset formats, and the types that features of a `tf.train.Example` may become:
//! the words that requests use. (`forebay-format` tells files apart and reads them.)

use crate::{Error, Result, name::shorten};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt};

/// What the files of a dataset are. The order is that of the codes in indexes on disk: add new
/// formats at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Each object is one row.
    Objects,
    /// Members with the same key are one row, as in WebDataset; plain or compressed.
    Tar,
    /// Each member is one row.
    Zip,
    /// Each record is one row: its bytes, or the features of a `tf.train.Example`.
    #[serde(rename = "tfrecord")]
    TfRecord,
    /// Apache Parquet; a row group is a block.
    Parquet,
    /// Arrow IPC with a footer, also called Feather.
    ArrowFile,
    /// Arrow IPC without one.
    ArrowStream,
    /// Each line is one row.
    Jsonl,
    /// Values with commas between them; the first row names the columns.
    Csv,
    /// The same with tabs.
    Tsv,
    /// Shards of MosaicML's Streaming; each sample is one row.
    Mds,
    /// Megatron-LM's indexed datasets: a `.bin` with an `.idx` beside it; each sequence is one row.
    Megatron,
    /// litData's optimized chunks with their `index.json`; each item is one row, or each run of so
    /// many tokens.
    #[serde(rename = "litdata")]
    LitData,
}

impl Format {
    /// All of them, in the order of their codes.
    pub const ALL: [Format; 13] = [
        Format::Objects,
        Format::Tar,
        Format::Zip,
        Format::TfRecord,
        Format::Parquet,
        Format::ArrowFile,
        Format::ArrowStream,
        Format::Jsonl,
        Format::Csv,
        Format::Tsv,
        Format::Mds,
        Format::Megatron,
        Format::LitData,
    ];

    /// The name that requests use.
    pub fn name(self) -> &'static str {
        match self {
            Format::Objects => "objects",
            Format::Tar => "tar",
            Format::Zip => "zip",
            Format::TfRecord => "tfrecord",
            Format::Parquet => "parquet",
            Format::ArrowFile => "arrow-file",
            Format::ArrowStream => "arrow-stream",
            Format::Jsonl => "jsonl",
            Format::Csv => "csv",
            Format::Tsv => "tsv",
            Format::Mds => "mds",
            Format::Megatron => "megatron",
            Format::LitData => "litdata",
        }
    }

    /// # Errors
    /// `Invalid` if the text is not a [`Format::name`].
    pub fn parse(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|f| f.name() == text)
            .ok_or_else(|| {
                Error::invalid(format!(
                    "{:?} is not the format of a dataset",
                    shorten(text)
                ))
                .hint(
                    "name one of objects, tar, zip, tfrecord, parquet, arrow-file, arrow-stream, \
                     jsonl, csv, tsv, mds, megatron, litdata",
                )
            })
    }

    /// Parses a name as people write it: `TFRecord`, `tf_record`, `arrow`.
    ///
    /// # Errors
    /// `Invalid` if no format has this name.
    pub fn parse_loosely(text: &str) -> Result<Self> {
        let name = text.to_ascii_lowercase().replace('_', "-");
        Self::parse(match name.as_str() {
            "tf-record" | "tfrecords" => "tfrecord",
            "arrow" | "feather" | "ipc" => "arrow-file",
            "ndjson" | "jsonlines" => "jsonl",
            "object" => "objects",
            other => other,
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a feature becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FeatureType {
    /// One `bytes_list` value, as `Binary`.
    #[serde(rename = "bytes")]
    Bytes,
    /// One `bytes_list` value, as `Utf8`.
    #[serde(rename = "string")]
    Text,
    /// One `float_list` value, as `Float32`.
    #[serde(rename = "float")]
    Float,
    /// One `int64_list` value, as `Int64`.
    #[serde(rename = "int64")]
    Int64,
    /// All values of a `bytes_list`, as a list of `Binary`.
    #[serde(rename = "list<bytes>")]
    BytesList,
    /// All values of a `bytes_list`, as a list of `Utf8`.
    #[serde(rename = "list<string>")]
    TextList,
    /// All values of a `float_list`, as a list of `Float32`.
    #[serde(rename = "list<float>")]
    FloatList,
    /// All values of an `int64_list`, as a list of `Int64`.
    #[serde(rename = "list<int64>")]
    Int64List,
}

impl FeatureType {
    /// All of them.
    pub const ALL: [FeatureType; 8] = [
        FeatureType::Bytes,
        FeatureType::Text,
        FeatureType::Float,
        FeatureType::Int64,
        FeatureType::BytesList,
        FeatureType::TextList,
        FeatureType::FloatList,
        FeatureType::Int64List,
    ];
}

/// Which features become columns, by name; if none are named, those of the first records.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExampleSpec {
    /// What each feature becomes, by its name; columns come in the order of names.
    pub features: BTreeMap<String, FeatureType>,
}

impl ExampleSpec {
    /// Whether the features are those of the first records.
    pub fn is_empty(&self) -> bool {
        self.features.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_have_one_name_and_some_that_people_write() {
        for format in Format::ALL {
            assert_eq!(Format::parse(format.name()).unwrap(), format);
            assert_eq!(Format::parse_loosely(format.name()).unwrap(), format);
        }
        for (text, format) in [
            ("TFRecord", Format::TfRecord),
            ("TF_Record", Format::TfRecord),
            ("Arrow", Format::ArrowFile),
            ("arrow_stream", Format::ArrowStream),
            ("ndjson", Format::Jsonl),
            ("object", Format::Objects),
        ] {
            assert_eq!(Format::parse_loosely(text).unwrap(), format);
            assert!(Format::parse(text).is_err());
        }
        let e = Format::parse_loosely("RAR").unwrap_err();
        assert_eq!(e.message(), "\"rar\" is not the format of a dataset");
    }
}
