//! Recognises the formats of datasets by name and by first bytes. (Their names are in [`Format`].)

use crate::{ArchiveKind, Codec, litdata};
pub use forebay_core::Format;
use forebay_core::{Error, Result};

/// A format that is known but not supported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotRead {
    /// What it is, for people.
    pub name: String,
    /// What to do about it.
    pub advice: &'static str,
}

const TO_PARQUET: &str = "write it as Parquet (one line of pandas, polars or pyarrow)";

/// Extensions of files of rows that are not supported: what they are, and what to do.
const NOT_READ: [(&str, &str, &str); 19] = [
    (
        "json",
        "JSON in one piece",
        "write one object per line, as .jsonl, or Parquet; if it has one per line already, \
         format=\"jsonl\" says so",
    ),
    ("psv", "a table of text", TO_PARQUET),
    ("orc", "ORC", TO_PARQUET),
    ("avro", "Avro", TO_PARQUET),
    ("xlsx", "an Excel sheet", TO_PARQUET),
    ("lance", "Lance", TO_PARQUET),
    ("vortex", "Vortex", TO_PARQUET),
    ("sqlite", "an SQLite database", TO_PARQUET),
    ("sqlite3", "an SQLite database", TO_PARQUET),
    ("duckdb", "a DuckDB database", TO_PARQUET),
    ("lmdb", "an LMDB database", TO_PARQUET),
    ("mdb", "an LMDB database", TO_PARQUET),
    ("h5", "HDF5", TO_PARQUET),
    ("hdf5", "HDF5", TO_PARQUET),
    ("npy", "a NumPy array", "write its rows as Parquet or Arrow"),
    (
        "npz",
        "NumPy arrays",
        "write their rows as Parquet or Arrow",
    ),
    (
        "beton",
        "FFCV",
        "write the samples as tar (WebDataset) or Parquet",
    ),
    ("7z", "a 7z archive", "pack it as tar or zip"),
    ("rar", "a RAR archive", "pack it as tar or zip"),
];

/// Files beside those with the rows, which are all that a writer leaves that was given no rows.
const INDEXES: [(&str, &str); 4] = [
    ("index.json", "an index of MDS or litData"),
    (
        "dataset_info.json",
        "what Hugging Face's datasets notes of a dataset",
    ),
    (
        "state.json",
        "what Hugging Face's datasets notes of a dataset",
    ),
    (
        "dataset_dict.json",
        "what Hugging Face's datasets notes of several datasets",
    ),
];

/// Extensions of files that are compressed as a whole.
const PACKED: [(&str, &str); 9] = [
    ("gz", "gzip"),
    ("zst", "zstd"),
    ("zstd", "zstd"),
    ("bz2", "bzip2"),
    ("xz", "xz"),
    ("lz4", "lz4"),
    ("br", "brotli"),
    ("sz", "snappy"),
    ("snappy", "snappy"),
];

/// How many of a file's first bytes [`by_magic`] needs.
pub const MAGIC_BYTES: usize = ArchiveKind::MAGIC_BYTES;

/// The format that a file's extension indicates, in any case. `None` for anything ambiguous,
/// including `Objects`.
pub fn by_name(name: &str) -> Option<Format> {
    if let Some(kind) = ArchiveKind::from_name(name) {
        return Some(if kind == ArchiveKind::Zip {
            Format::Zip
        } else {
            Format::Tar
        });
    }
    let base = name.rsplit('/').next().unwrap_or(name).to_ascii_lowercase();
    let (stem, extension) = base.rsplit_once('.')?;
    if Codec::from_name(&base).is_some() {
        return match stem.rsplit_once('.')? {
            ("", _) => None,
            // What is called .json and compressed is mostly one object per line.
            (_, "json") => Some(Format::Jsonl),
            (_, inner) => unpackable(inner),
        };
    }
    match extension {
        _ if stem.is_empty() => None,
        "parquet" | "parq" | "pq" => Some(Format::Parquet),
        "tfrecord" | "tfrecords" | "tfrec" | "tfr" => Some(Format::TfRecord),
        "arrow" | "feather" | "ipc" => Some(Format::ArrowFile),
        "arrows" => Some(Format::ArrowStream),
        // As in TensorFlow Datasets: train.tfrecord-00000-of-00128.
        _ if extension.starts_with("tfrecord-") => Some(Format::TfRecord),
        extension => unpackable(extension),
    }
}

/// Formats that may be compressed as a whole, by their extensions.
fn unpackable(extension: &str) -> Option<Format> {
    match extension {
        "jsonl" | "ndjson" | "jsonlines" => Some(Format::Jsonl),
        "csv" => Some(Format::Csv),
        "tsv" | "tab" => Some(Format::Tsv),
        "mds" => Some(Format::Mds),
        _ => None,
    }
}

/// How a file of this format is compressed as a whole, by its name; its rows are then in what it
/// unpacks to. Only files of lines, MDS and litData are read when they are.
pub fn packed(format: Format, name: &str) -> Option<Codec> {
    match format {
        Format::Jsonl | Format::Csv | Format::Tsv | Format::Mds => Codec::from_name(name),
        Format::LitData => litdata::packed(name),
        _ => None,
    }
}

/// The unsupported format of rows that a file's name indicates.
pub fn not_read(name: &str) -> Option<NotRead> {
    if by_name(name).is_some() {
        return None;
    }
    let base = name.rsplit('/').next().unwrap_or(name).to_ascii_lowercase();
    let (stem, extension) = base.rsplit_once('.').filter(|(stem, _)| !stem.is_empty())?;
    if let Some((_, name)) = INDEXES.iter().find(|(known, _)| *known == base) {
        return Some(NotRead {
            name: (*name).to_owned(),
            advice: "the files with the rows are not there: the dataset may have none",
        });
    }
    let known = |extension: &str| {
        let (_, name, advice) = NOT_READ.iter().find(|(known, ..)| *known == extension)?;
        Some(NotRead {
            name: (*name).to_owned(),
            advice,
        })
    };
    let Some((_, packed)) = PACKED.iter().find(|(known, _)| *known == extension) else {
        return known(extension);
    };
    let inner = stem.rsplit_once('.').map_or("", |(_, inner)| inner);
    if let Some(of) = known(inner) {
        return Some(of);
    }
    let of = by_name(stem)?;
    Some(NotRead {
        name: format!("{of}, compressed with {packed} as a whole"),
        advice: "store the file uncompressed, or as Parquet, which is compressed in parts; JSONL, \
             CSV and MDS are read as .gz, .zst and .lz4, tars as .gz and .lz4",
    })
}

/// The format that the first bytes indicate ([`MAGIC_BYTES`] of them, or all of a shorter file).
/// `None` if nothing is recognised.
pub fn by_magic(head: &[u8]) -> Option<Format> {
    if head.starts_with(b"PAR1") || head.starts_with(b"PARE") {
        return Some(Format::Parquet);
    }
    if head.starts_with(b"ARROW1\0\0") {
        return Some(Format::ArrowFile);
    }
    if crate::tfrecord::looks_like_record(head) {
        return Some(Format::TfRecord);
    }
    match ArchiveKind::from_magic(head) {
        Some(ArchiveKind::Zip) => return Some(Format::Zip),
        Some(_) => return Some(Format::Tar),
        None => {}
    }
    if crate::ipc::looks_like_stream(head) {
        return Some(Format::ArrowStream);
    }
    (head.iter().find(|b| !b.is_ascii_whitespace()) == Some(&b'{')).then_some(Format::Jsonl)
}

/// What a file is, by its name and its first bytes. If they disagree, the bytes win in one case
/// only: the two kinds of Arrow files, which share their extensions.
///
/// # Errors
/// `Invalid` if neither identifies it.
pub fn detect(name: &str, head: &[u8]) -> Result<Format> {
    let (named, magic) = (by_name(name), by_magic(head));
    let arrow = |f| matches!(f, Some(Format::ArrowFile | Format::ArrowStream));
    match (named, magic) {
        (Some(_), Some(told)) if arrow(named) && arrow(magic) => Ok(told),
        (Some(named), _) => Ok(named),
        (None, Some(magic)) => Ok(magic),
        (None, None) => Err(Error::invalid(format!(
            "neither the name of {name:?} nor its first bytes say what format it has"
        ))
        .hint(
            "name the format: objects, tar, zip, tfrecord, parquet, arrow-file, arrow-stream, \
             jsonl, csv, tsv, mds, megatron or litdata",
        )),
    }
}

pub(crate) fn code(format: Format) -> u8 {
    format as u8
}

pub(crate) fn from_code(code: u8) -> Option<Format> {
    Format::ALL.into_iter().find(|f| self::code(*f) == code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_by_name() {
        for (name, format) in [
            ("a/b.parquet", Some(Format::Parquet)),
            ("a/b.PQ", Some(Format::Parquet)),
            ("train.tfrecord-00000-of-00128", Some(Format::TfRecord)),
            ("x.tar.gz", Some(Format::Tar)),
            ("x.zip", Some(Format::Zip)),
            ("x.feather", Some(Format::ArrowFile)),
            ("x.arrows", Some(Format::ArrowStream)),
            ("x.ndjson", Some(Format::Jsonl)),
            ("x.jsonl.gz", Some(Format::Jsonl)),
            ("x.NDJSON.zst", Some(Format::Jsonl)),
            ("c4-train.00000-of-01024.json.gz", Some(Format::Jsonl)),
            ("x.jsonl.lz4", Some(Format::Jsonl)),
            ("x.jsonl.bz2", None),
            ("x.parquet.gz", None),
            ("x.json", None),
            ("x.csv", Some(Format::Csv)),
            ("x.CSV.GZ", Some(Format::Csv)),
            ("x.tsv", Some(Format::Tsv)),
            ("x.tab.zst", Some(Format::Tsv)),
            ("x.csv.xz", None),
            ("x.psv", None),
            ("shard.00000.mds", Some(Format::Mds)),
            ("shard.00000.mds.zstd", Some(Format::Mds)),
            ("x.gz", None),
            (".jsonl.gz", None),
            ("x.jpg", None),
            ("parquet", None),
            (".parquet", None),
            ("a.parquet/x", None),
            ("", None),
        ] {
            assert_eq!(by_name(name), format, "{name}");
        }
        for format in Format::ALL {
            assert_eq!(Format::parse(format.name()).unwrap(), format);
            assert_eq!(from_code(code(format)), Some(format));
            assert_eq!(
                serde_json::to_string(&format).unwrap(),
                format!("\"{format}\"")
            );
        }
        assert!(Format::parse("hdf5").is_err());
    }

    #[test]
    fn formats_by_first_bytes() {
        assert_eq!(by_magic(b"PAR1\x15\x04"), Some(Format::Parquet));
        assert_eq!(
            by_magic(b"ARROW1\0\0\xff\xff\xff\xff"),
            Some(Format::ArrowFile)
        );
        assert_eq!(by_magic(b" {\"a\": 1}\n"), Some(Format::Jsonl));
        assert_eq!(by_magic(b"PK\x03\x04"), Some(Format::Zip));
        assert_eq!(by_magic(b"\xff\xd8\xff\xe0 some image"), None);
        assert_eq!(by_magic(b""), None);
        assert_eq!(detect("a.arrow", b"ARROW1\0\0").unwrap(), Format::ArrowFile);
        assert_eq!(detect("data", b"PAR1").unwrap(), Format::Parquet);
        assert!(detect("data", b"hello").is_err());
    }
}
