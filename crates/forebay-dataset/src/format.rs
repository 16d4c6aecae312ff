//! The formats that a dataset's files can have, and how one is told from a name.

use forebay_core::{Error, Result};
use forebay_format::ArchiveKind;
use serde::{Deserialize, Serialize};

/// What a dataset's files are, and with it what a row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Each object is a row.
    Objects,
    /// Members of one key are a row, as WebDataset has it. Compressed tars included.
    Tar,
    /// Each member is a row.
    Zip,
    /// Each record is a row.
    #[serde(rename = "tfrecord")]
    TfRecord,
    Parquet,
    /// Arrow IPC with a footer, also called Feather.
    ArrowFile,
    /// Arrow IPC without one.
    ArrowStream,
    /// Each line is a row.
    Jsonl,
}

impl Format {
    pub const ALL: [Format; 8] = [
        Format::Objects,
        Format::Tar,
        Format::Zip,
        Format::TfRecord,
        Format::Parquet,
        Format::ArrowFile,
        Format::ArrowStream,
        Format::Jsonl,
    ];

    /// As requests and answers name it.
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
        }
    }

    /// # Errors
    /// `Invalid`, with the names that there are.
    pub fn parse(name: &str) -> Result<Format> {
        Self::ALL.into_iter().find(|f| f.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|f| f.name()).collect();
            Error::invalid(format!("{:?} is not a format of datasets", forebay_core::name::shorten(name)))
                .hint(format!("one of {}", names.join(", ")))
        })
    }

    /// By the extension of a key. `None`: nothing is known by it, and an object is an object.
    ///
    /// `.arrow` may be either form of Arrow IPC; it is taken for a file until its first bytes say otherwise.
    pub fn from_name(key: &str) -> Option<Format> {
        const EXTENSIONS: [(&str, Format); 13] = [
            (".parquet", Format::Parquet),
            (".parq", Format::Parquet),
            (".pq", Format::Parquet),
            (".arrow", Format::ArrowFile),
            (".feather", Format::ArrowFile),
            (".ipc", Format::ArrowFile),
            (".arrows", Format::ArrowStream),
            (".tfrecord", Format::TfRecord),
            (".tfrecords", Format::TfRecord),
            (".tfrec", Format::TfRecord),
            (".jsonl", Format::Jsonl),
            (".ndjson", Format::Jsonl),
            (".jsonlines", Format::Jsonl),
        ];
        match ArchiveKind::from_name(key) {
            Some(ArchiveKind::Zip) => return Some(Format::Zip),
            Some(_) => return Some(Format::Tar),
            None => {}
        }
        let base = key.rsplit('/').next().unwrap_or(key).to_ascii_lowercase();
        let by_end = EXTENSIONS.iter().find(|(ext, _)| base.ends_with(ext)).map(|&(_, f)| f);
        // `train.tfrecord-00000-of-01024`, as TensorFlow's writers name shards.
        by_end.or_else(|| (base.contains(".tfrecord-") || base.contains(".tfrecords-")).then_some(Format::TfRecord))
    }

    /// By the first bytes of a file.
    pub fn from_magic(head: &[u8]) -> Option<Format> {
        if head.starts_with(b"PAR1") || head.starts_with(b"PARE") {
            return Some(Format::Parquet);
        }
        if head.starts_with(b"ARROW1\0\0") {
            return Some(Format::ArrowFile);
        }
        if head.starts_with(&[0xff, 0xff, 0xff, 0xff]) {
            return Some(Format::ArrowStream);
        }
        match ArchiveKind::from_magic(head)? {
            ArchiveKind::Zip => Some(Format::Zip),
            _ => Some(Format::Tar),
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_by_name() {
        for (key, format) in [
            ("a/b.parquet", Some(Format::Parquet)),
            ("a/b.snappy.PARQUET", Some(Format::Parquet)),
            ("a.tar", Some(Format::Tar)),
            ("a.tgz", Some(Format::Tar)),
            ("a.zip", Some(Format::Zip)),
            ("a.arrow", Some(Format::ArrowFile)),
            ("a.arrows", Some(Format::ArrowStream)),
            ("x/train.tfrecord-00000-of-01024", Some(Format::TfRecord)),
            ("x.jsonl", Some(Format::Jsonl)),
            ("x.parquet/y.jpg", None),
            ("x", None),
        ] {
            assert_eq!(Format::from_name(key), format, "{key}");
        }
    }

    #[test]
    fn formats_by_the_names_that_requests_use() {
        for f in Format::ALL {
            assert_eq!(Format::parse(f.name()).unwrap(), f);
            assert_eq!(serde_json::to_value(f).unwrap(), f.name());
        }
        let e = Format::parse("xml").unwrap_err();
        assert!(e.to_string().contains("parquet"), "{e}");
    }
}
