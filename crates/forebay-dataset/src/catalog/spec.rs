//! Whether a caller's description of a dataset makes sense here, and its effect on openings and
//! ids. The protocol defines the description: [`DatasetSpec`].
//!
//! Invariant: two specs with the same [`key`] ask for the same thing, so one opening serves both.

use super::pattern::Wanted;
use crate::{DatasetSpec, Format, LabelSource, OnDamaged, Part};
use arrow_schema::{DataType, Schema, SchemaRef};
use forebay_core::{Error, Result, limits};
use forebay_format::{csv, jsonl, tabular::named_field};
use forebay_protocol::dataset::NamedColumns;
use std::{collections::HashSet, sync::Arc};
use xxhash_rust::xxh3::xxh3_128;

/// Parses the JSON of a request.
///
/// # Errors
/// `Invalid` for anything that is not a spec, or makes no sense.
pub fn parse_spec(json: &[u8]) -> Result<DatasetSpec> {
    let spec = DatasetSpec::read(json)?;
    check(&spec)?;
    Ok(spec)
}

/// Whether one node of a cluster may open it for all (`home.rs`).
pub(super) fn is_for_home(spec: &DatasetSpec, wanted: &[Wanted]) -> bool {
    let is_manifest = |one: &Wanted| matches!(one, Wanted::Manifest(..));
    spec.part.is_none() && !spec.begin && !wanted.iter().any(is_manifest)
}

/// # Errors
/// `Invalid` if it makes no sense.
pub(crate) fn check(spec: &DatasetSpec) -> Result<()> {
    if let Some(part) = &spec.part {
        check_part(spec, part)?;
    } else if spec.sources.is_empty() {
        return Err(Error::invalid("the description has no sources")
            .hint(r#"give "sources": ["bucket/prefix/**.parquet"]"#));
    }
    if spec.sources.len() > limits::DATASET_SOURCES_MAX {
        return Err(Error::invalid(format!(
            "the description has {} sources; the limit is {}",
            spec.sources.len(),
            limits::DATASET_SOURCES_MAX
        ))
        .hint("list the files in a manifest object, and give manifest:bucket/key"));
    }
    let only = |what: &str, format: Format| match spec.format {
        Some(f) if f != format => Err(Error::invalid(format!(
            "{what} applies to {format}, but the format is {f}"
        ))),
        _ => Ok(()),
    };
    if spec.labels.is_some() {
        only("labels", Format::Objects)?;
    }
    if let Some(LabelSource::Path { level: 0 }) = spec.labels {
        return Err(Error::invalid("labels.level must not be 0")
            .hint("1 is the directory that holds the object, 2 the one above"));
    }
    if spec.example.spec().is_some() {
        only("example", Format::TfRecord)?;
    }
    if let Some(columns) = &spec.schema {
        check_schema(spec, &columns.0)?;
    }
    if spec.part.is_some() {
        only("part", Format::Tar)?;
    }
    if let Some(size) = spec.block_size {
        only("block_size", Format::LitData)?;
        if size == 0 {
            let e = Error::invalid("block_size must not be 0");
            return Err(e.hint("give the tokens of a row, or leave it out"));
        }
    }
    if spec.block_rows == Some(0) {
        return Err(
            Error::invalid("block_rows must not be 0").hint("give 1 or more, or leave it out")
        );
    }
    if spec.block_rows.is_some()
        && let Some(format) = spec.format.filter(|f| has_blocks(*f))
    {
        return Err(Error::invalid(format!(
            "block_rows applies to formats without blocks of their own, but the format is {format}"
        )));
    }
    Ok(())
}

/// Whether files of a format consist of blocks, whatever a description says.
pub(crate) fn has_blocks(format: Format) -> bool {
    matches!(
        format,
        Format::Parquet | Format::ArrowFile | Format::ArrowStream
    )
}

fn check_part(spec: &DatasetSpec, part: &Part) -> Result<()> {
    let hint = r#"{"part": {"of": "<id of a dataset>", "files": [0, 1], "from": 0, "until": 1048576}}; without "until", all from there on; with "pieces": 10, from and until count tenths of each file"#;
    let wrong = |what: &str| Err(Error::invalid(what.to_owned()).hint(hint));
    if !spec.sources.is_empty() {
        return wrong("a part takes its files from its dataset, so it has no sources");
    }
    if part.of.is_empty() || part.files.is_empty() || part.is_empty() {
        return wrong("the part names no dataset, no files, or places that no file has");
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

fn check_schema(spec: &DatasetSpec, columns: &[(String, String)]) -> Result<()> {
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
    match spec.format {
        Some(Format::Objects) => Err(Error::invalid(
            "\"schema\" is for files with columns, but the format is objects",
        )),
        _ => Ok(()),
    }
}

/// Identifies this spec: equal for equal ones, on every platform.
pub(crate) fn key(spec: &DatasetSpec) -> u128 {
    let mut spec = spec.clone();
    for source in &mut spec.sources {
        let rest = forebay_core::name::without_scheme(source);
        if rest.len() < source.len() {
            *source = rest.to_owned();
        }
    }
    xxh3_128(spec.json().as_bytes())
}

/// What a dataset's id depends on besides its files.
pub(crate) fn options(spec: &DatasetSpec) -> String {
    let options = DatasetSpec {
        sources: Vec::new(),
        format: None,
        on_damaged: OnDamaged::Error,
        begin: false,
        part: spec.part.as_ref().map(|part| Part {
            of: String::new(),
            files: Vec::new(),
            ..*part
        }),
        ..spec.clone()
    };
    options.json()
}

/// Named columns as a schema for files of this format.
///
/// # Errors
/// `Invalid` for a name that is not a type, or a type that the format cannot be read as.
pub(crate) fn schema(columns: &NamedColumns, format: Format) -> Result<SchemaRef> {
    let fields = columns.0.iter().map(|(name, ty)| {
        let field = named_field(name, ty)?;
        let line =
            format == Format::Jsonl && name == jsonl::LINE && *field.data_type() == DataType::Utf8;
        Ok(if line { jsonl::line_field() } else { field })
    });
    let schema = Arc::new(Schema::new(fields.collect::<Result<Vec<_>>>()?));
    match format {
        Format::Jsonl => jsonl::check_columns(&schema)?,
        Format::Csv | Format::Tsv => csv::check_columns(&schema)?,
        _ => {}
    }
    Ok(schema)
}

/// A spec with the options of a dataset ([`options`]), and without what it was made from.
///
/// # Errors
/// `Corrupt` for text that does not describe options.
pub(crate) fn of_options(options: &str) -> Result<DatasetSpec> {
    serde_json::from_str(options)
        .map_err(|e| Error::corrupt(format!("the options of a dataset: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_are_read_and_checked() {
        let spec = parse_spec(
            br#"{"source": "s3://b1/x/**", "format": "objects", "labels": {"from": "path"}}"#,
        )
        .unwrap();
        assert_eq!(spec.sources, ["s3://b1/x/**"]);
        assert_eq!(spec.labels, Some(LabelSource::Path { level: 1 }));
        assert_eq!(
            key(&spec),
            key(&DatasetSpec {
                sources: vec!["b1/x/**".into()],
                ..spec.clone()
            })
        );
        assert_ne!(
            key(&spec),
            key(&DatasetSpec {
                labels: None,
                ..spec.clone()
            })
        );
        for (text, format) in [
            ("TF_Record", Format::TfRecord),
            ("arrow", Format::ArrowFile),
            ("arrow_stream", Format::ArrowStream),
        ] {
            let json = format!(r#"{{"source": "bk/x", "format": "{text}"}}"#);
            assert_eq!(parse_spec(json.as_bytes()).unwrap().format, Some(format));
        }
        let spec = parse_spec(
            br#"{"source": "b/x", "schema": {"z": "list<item: float>", "a": "json", "json": "str"}}"#,
        )
        .unwrap();
        let columns = spec.schema.as_ref().unwrap();
        assert_eq!(
            columns.0[0],
            ("z".to_owned(), "list<item: float>".to_owned())
        );
        assert!(options(&spec).contains(r#"{"z":"list<item: float>","a":"json","json":"str"}"#));
        let names = |format| {
            let schema = schema(columns, format).unwrap();
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
            r#"{"sources": ["a"], "block_rows": 5, "format": "parquet"}"#,
            r#"{"sources": ["a"], "block_rows": 5, "format": "arrow-stream"}"#,
            r#"{"sources": ["a"], "part": {"of": "x", "files": [0], "from": 0}}"#,
            r#"{"part": {"of": "x", "files": [0], "from": 5, "until": 5}}"#,
            r#"{"part": {"of": "x", "files": [0], "from": 5, "pieces": 5}}"#,
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
                parse_spec(bad.as_bytes()).unwrap_err().kind(),
                forebay_core::ErrorKind::Invalid,
                "{bad}"
            );
        }
    }
}
