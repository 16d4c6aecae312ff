//! Manifests: the files of a dataset as lines of an object, written once and read instead of
//! listing.
//!
//! A line is `bucket/key`, or JSON: `{"name": "bucket/key", "size": …, "etag": …}`. With size and
//! version, the origin is not asked. The first line of a manifest written here says what it is;
//! lines that are empty or begin with `#` are skipped.

use super::{
    access::{in_common, may_read},
    table::{FileRef, FileTable, FileTableBuilder},
};
use crate::{Access, Dataset, Format, blocking::blocking};
use forebay_core::{Error, ErrorKind, ObjectName, Reservation, Result, limits, name::shorten};
use forebay_engine::{Engine, ReadOptions};
use futures::StreamExt;
use serde::{Deserialize, Serialize};
use std::{ops::Range, sync::Arc};
use xxhash_rust::xxh3::xxh3_128;

/// The contents of a manifest.
pub(crate) struct Manifest {
    /// Its files in the order of its lines. If a line gave no version, size and tag are
    /// meaningless.
    pub files: FileTable,
    /// For each file, whether its line gave size and version.
    pub known: Vec<bool>,
    pub format: Option<Format>,
    /// A digest of its bytes.
    pub digest: u128,
    in_common: Vec<(Range<usize>, usize)>,
    /// Memory for the table.
    _memory: Option<Reservation>,
}

impl Manifest {
    /// Whether the caller may read everything that it names.
    ///
    /// # Errors
    /// `PermissionDenied`, for the first name that may not be read.
    pub(crate) fn check_access(&self, access: &dyn Access) -> Result<()> {
        may_read(access, &self.files, &self.in_common)
    }
}

#[derive(Serialize, Deserialize)]
struct Head {
    /// The version of what follows.
    forebay_manifest: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    format: Option<Format>,
    #[serde(default)]
    dataset: String,
    #[serde(default)]
    files: u64,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    size: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    etag: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last_modified_ms: Option<i64>,
    /// For people and other programs; not read back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rows: Option<u64>,
}

const VERSION: u32 = 1;

/// Reads a manifest through the cache.
pub(crate) async fn read(engine: &Engine, name: &ObjectName) -> Result<Manifest> {
    // A table is about as large as the lines that it is built from.
    let (bytes, mut memory) = read_whole(
        engine,
        "manifest",
        name,
        limits::DATASET_MANIFEST_MAX_BYTES,
        2,
    )
    .await?;
    let parsed = blocking(move || parse(&bytes)).await?;
    let mut manifest = parsed.map_err(|e| e.context(format_args!("manifest {name}")))?;
    memory.shrink(manifest.files.memory_bytes());
    manifest._memory = Some(memory);
    Ok(manifest)
}

/// A whole object of at most `most` bytes, and `times` as much memory: it is about to be parsed
/// into something of its own size. Errors begin with `what` the object is for.
pub(crate) async fn read_whole(
    engine: &Engine,
    what: &str,
    name: &ObjectName,
    most: u64,
    times: u64,
) -> Result<(Vec<u8>, Reservation)> {
    let read = bytes_of(engine, name, most, times).await;
    read.map_err(|e| {
        let says_more = e.kind() != ErrorKind::NotFound || e.hint_text().is_some();
        let e = e.context(format_args!("{what} {}", shorten(&name.to_string())));
        if says_more {
            return e;
        }
        let folder = &name.key()[..name.key().rfind('/').map_or(0, |slash| slash + 1)];
        let hint = format!(
            "`forebay ls {}/{folder}` shows what is there",
            name.bucket()
        );
        e.hint(hint)
    })
}

async fn bytes_of(
    engine: &Engine,
    name: &ObjectName,
    most: u64,
    times: u64,
) -> Result<(Vec<u8>, Reservation)> {
    let mut read = engine.read(name, None, &ReadOptions::default()).await?;
    let size = read.meta.size;
    if size > most {
        return Err(Error::new(
            ErrorKind::TooLarge,
            format!("{size} bytes; the limit is {most}"),
        ));
    }
    let held = engine.budget().hold((size * times).max(1)).await?;
    let mut out = Vec::with_capacity(size as usize);
    while let Some(piece) = read.body.next().await {
        out.extend_from_slice(&piece?);
    }
    Ok((out, held))
}

fn parse(bytes: &[u8]) -> Result<Manifest> {
    let text = std::str::from_utf8(bytes)
        .map_err(|e| Error::invalid(format!("it is not UTF-8 text: {e}")))?;
    let (mut files, mut known, mut format) = (FileTableBuilder::default(), Vec::new(), None);
    let unknown = |name| FileRef {
        name,
        size: 0,
        etag: None,
        last_modified_ms: 0,
    };
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let at = |e: Error| e.context(format_args!("line {}", number + 1));
        if files.len() >= limits::DATASET_FILES_MAX {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("it names more than {} files", limits::DATASET_FILES_MAX),
            ));
        }
        if !line.starts_with('{') {
            files.push(&unknown(object(line).map_err(at)?))?;
            known.push(false);
            continue;
        }
        if files.is_empty() && line.contains("\"forebay_manifest\"") {
            let head: Head =
                serde_json::from_str(line).map_err(|e| at(Error::invalid(e.to_string())))?;
            if head.forebay_manifest != VERSION {
                return Err(at(Error::unsupported(format!(
                    "the manifest has version {}",
                    head.forebay_manifest
                ))
                .hint("this release reads version 1")));
            }
            format = head.format;
            continue;
        }
        let entry: Entry = serde_json::from_str(line).map_err(|e| {
            at(Error::invalid(e.to_string())
                .hint(r#"{"name": "bucket/key"}, with "size" and "etag" where they are known"#))
        })?;
        let name = object(&entry.name).map_err(at)?;
        let (size, etag, last_modified_ms) = match (entry.size, entry.etag, entry.last_modified_ms)
        {
            (Some(size), Some(etag), _) => (size, Some(etag), 0),
            (Some(size), None, Some(time)) => (size, None, time),
            _ => {
                files.push(&unknown(name))?;
                known.push(false);
                continue;
            }
        };
        files.push(&FileRef {
            name,
            size,
            etag,
            last_modified_ms,
        })?;
        known.push(true);
    }
    if files.is_empty() {
        return Err(Error::invalid("it does not name any files")
            .hint("write one file on each line, as bucket/key"));
    }
    let files = files.finish();
    Ok(Manifest {
        in_common: in_common(&files),
        files,
        known,
        format,
        digest: xxh3_128(bytes),
        _memory: None,
    })
}

fn object(text: &str) -> Result<ObjectName> {
    let text = forebay_core::name::without_scheme(text);
    let (bucket, key) = text.split_once('/').ok_or_else(|| {
        Error::invalid(format!("{:?} does not name an object", shorten(text))).hint("bucket/key")
    })?;
    ObjectName::new(bucket, key)
}

/// The lines of a dataset's manifest.
pub struct ManifestLines(Arc<Dataset>);

impl Dataset {
    /// Its files as a manifest that a later opening reads instead of listing.
    pub fn manifest_lines(self: &Arc<Self>) -> ManifestLines {
        ManifestLines(self.clone())
    }
}

impl ManifestLines {
    /// One more than the number of files.
    pub fn len(&self) -> usize {
        self.0.files().len() + 1
    }

    /// Never: the first line says what it is.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Line `i`, with its end.
    pub fn line(&self, i: usize) -> String {
        let dataset = &self.0;
        let json = match i.checked_sub(1) {
            None => serde_json::to_string(&Head {
                forebay_manifest: VERSION,
                format: Some(dataset.format()),
                dataset: dataset.id().to_owned(),
                files: dataset.files().len() as u64,
            }),
            Some(i) => {
                let FileRef {
                    name,
                    size,
                    etag,
                    last_modified_ms,
                } = dataset.files().file(i);
                let last_modified_ms = etag.is_none().then_some(last_modified_ms);
                let rows = dataset.file_rows(i);
                serde_json::to_string(&Entry {
                    name: name.to_string(),
                    size: Some(size),
                    etag,
                    last_modified_ms,
                    rows: Some(rows.end - rows.start),
                })
            }
        };
        // Strings and numbers can always be written as JSON.
        json.unwrap_or_default() + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_any_kind_are_read() {
        let text = "# a comment\n\n{\"forebay_manifest\": 1, \"format\": \"parquet\"}\nbk/a b.parquet\r\ns3://bk/c\n\
                    {\"name\": \"bk/d\", \"size\": 5, \"etag\": \"\\\"x\\\"\", \"rows\": 7}\n{\"name\": \"bk/e\", \"size\": 5}\n\
                    {\"name\": \"bk/f\", \"size\": 6, \"last_modified_ms\": 9}\n";
        let Manifest {
            files,
            known,
            format,
            ..
        } = parse(text.as_bytes()).unwrap();
        assert_eq!(format, Some(Format::Parquet));
        let told: Vec<String> = files
            .iter()
            .zip(known)
            .map(|(f, known)| match known {
                true => format!("{} {} {:?} {}", f.name, f.size, f.etag, f.last_modified_ms),
                false => f.name.to_string(),
            })
            .collect();
        assert_eq!(
            told,
            [
                "bk/a b.parquet",
                "bk/c",
                "bk/d 5 Some(\"\\\"x\\\"\") 0",
                "bk/e",
                "bk/f 6 None 9"
            ]
        );
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        for (text, part) in [
            ("bk/a\nnothing", "line 2"),
            ("{\"nam\": 1}", "line 1"),
            ("{\"forebay_manifest\": 2}", "version 2"),
            ("", "not name any files"),
            ("# only this", "not name any files"),
            ("bk/../x", "line 1"),
        ] {
            let e = parse(text.as_bytes()).map(|_| ()).unwrap_err();
            assert!(e.to_string().contains(part), "{text:?}: {e}");
        }
        assert!(parse(&[0xff, 0xfe]).is_err());
    }
}
