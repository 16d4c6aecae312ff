//! Files of labels: CSV or JSONL, a name and a label per line.
//!
//! **CSV**, as in RFC 4180: comma (or tab, or semicolon: whichever comes first in the first line),
//! fields in double quotes if they contain one of these, quotes doubled inside. With a header line
//! the columns are found by their names; without one they are the first and the second. **JSONL**:
//! an object per line, whose fields are the columns.
//!
//! Labels are kept as text, or as numbers if all of them are whole numbers. Memory grows with the
//! file, whose size has a limit.

use crate::jsonl;
use arrow_array::{ArrayRef, Int64Array, StringArray};
use forebay_core::{Error, Result, limits, name::shorten};
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, collections::HashMap, sync::Arc};

/// Default names of a column of names, if none is given; then of a column of labels.
const NAME_COLUMNS: [&str; 10] = [
    "file_name",
    "filename",
    "file",
    "path",
    "key",
    "name",
    "object",
    "objname",
    "image",
    "id",
];
const LABEL_COLUMNS: [&str; 5] = ["label", "labels", "class", "target", "category"];

/// Which columns hold the names and the labels; the usual ones unless given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LabelColumns {
    /// The column of names; `None`: the usual ones, such as `file_name`.
    pub name: Option<String>,
    /// The column of labels; `None`: the usual ones, such as `label`.
    pub label: Option<String>,
}

/// Labels by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Labels {
    by_name: HashMap<Box<str>, u32>,
    labels: Vec<Box<str>>,
    numbers: bool,
}

impl Labels {
    /// Parses the bytes of a file; `name` distinguishes CSV (`.csv`, `.tsv`, `.txt`) from JSONL.
    ///
    /// # Errors
    /// `Invalid` for a file with another extension, or missing columns. `Corrupt` with the line.
    /// `Unsupported` past the limit.
    pub fn parse(name: &str, bytes: &[u8], columns: &LabelColumns) -> Result<Self> {
        if bytes.len() as u64 > limits::SIDE_FILE_MAX_BYTES {
            let max = limits::SIDE_FILE_MAX_BYTES;
            return Err(Error::unsupported(format!(
                "the file of labels {name:?} is {} bytes long; the limit is {max}",
                bytes.len()
            )));
        }
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        let extension = name
            .rsplit('.')
            .next()
            .unwrap_or_default()
            .to_ascii_lowercase();
        let mut labels = Builder::default();
        match extension.as_str() {
            "csv" | "tsv" | "txt" => csv(bytes, columns, &mut labels),
            "jsonl" | "ndjson" | "jsonlines" => json_lines(bytes, columns, &mut labels),
            _ => Err(
                Error::invalid("its name does not end in .csv, .tsv, .jsonl or .ndjson")
                    .hint("name it .csv, .tsv, .jsonl or .ndjson"),
            ),
        }
        .map_err(|e| e.context(format!("the file of labels {name:?}")))?;
        Ok(labels.finish())
    }

    /// How many names have a label.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Whether no name has a label.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// The label of a name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.by_name.get(name).map(|&n| &*self.labels[n as usize])
    }

    /// The label of an object: by its key, or by any suffix of the key that begins after a slash,
    /// the longest first.
    pub fn of_key(&self, key: &str) -> Option<&str> {
        std::iter::once(0)
            .chain(key.match_indices('/').map(|(i, _)| i + 1))
            .find_map(|at| self.get(&key[at..]))
    }

    /// Whether all labels are whole numbers.
    pub fn are_numbers(&self) -> bool {
        self.numbers
    }

    /// The labels of some keys as a column: `int64` if all labels are whole numbers, text
    /// otherwise; null for keys without a label.
    pub fn column<'k>(&self, keys: impl IntoIterator<Item = &'k str>) -> ArrayRef {
        let labels = keys.into_iter().map(|k| self.of_key(k));
        if self.numbers {
            return Arc::new(
                labels
                    .map(|l| l.and_then(|l| l.parse::<i64>().ok()))
                    .collect::<Int64Array>(),
            );
        }
        Arc::new(labels.collect::<StringArray>())
    }

    /// Approximate memory that the labels hold.
    pub fn memory_bytes(&self) -> usize {
        let names: usize = self.by_name.keys().map(|n| n.len() + 40).sum();
        names + self.labels.iter().map(|l| l.len() + 16).sum::<usize>()
    }
}

#[derive(Default)]
struct Builder {
    by_name: HashMap<Box<str>, u32>,
    labels: Vec<Box<str>>,
    known: HashMap<Box<str>, u32>,
}

impl Builder {
    fn push(&mut self, name: &str, label: &str, line: usize) -> Result<()> {
        let n = match self.known.get(label) {
            Some(&n) => n,
            None => {
                let n = self.labels.len() as u32;
                self.labels.push(label.into());
                self.known.insert(label.into(), n);
                n
            }
        };
        match self.by_name.insert(name.into(), n) {
            Some(before) if before != n => Err(Error::corrupt(format!(
                "line {line} labels {:?} as {:?}, and an earlier line labels it as {:?}",
                shorten(name),
                shorten(label),
                shorten(&self.labels[before as usize])
            ))),
            _ => Ok(()),
        }
    }

    fn finish(self) -> Labels {
        // Only what is written back unchanged is a number: 007 is text.
        let number = |l: &str| l.parse::<i64>().is_ok_and(|n| n.to_string() == l);
        let numbers = !self.labels.is_empty() && self.labels.iter().all(|l| number(l));
        Labels {
            by_name: self.by_name,
            labels: self.labels,
            numbers,
        }
    }
}

fn csv(bytes: &[u8], columns: &LabelColumns, out: &mut Builder) -> Result<()> {
    let text = std::str::from_utf8(bytes)
        .map_err(|e| Error::corrupt(format!("it is not UTF-8 at offset {}", e.valid_up_to())))?;
    let first = text.lines().next().unwrap_or_default();
    let separator = first
        .bytes()
        .find(|b| matches!(b, b',' | b'\t' | b';'))
        .unwrap_or(b',');
    let (mut rest, mut line, mut places) = (text, 1, None);
    let mut fields = Vec::new();
    while !rest.is_empty() {
        fields.clear();
        let lines = record(&mut rest, separator, &mut fields).ok_or_else(|| {
            Error::corrupt(format!(
                "line {line} has a quote that does not end, or something after its end"
            ))
        })?;
        let here = line;
        line += lines;
        if fields.iter().all(|f| f.is_empty()) {
            continue;
        }
        let (name, label) = match places {
            Some(places) => places,
            None => {
                let header = header(&fields, columns)?;
                let found = header.unwrap_or((0, 1));
                places = Some(found);
                if header.is_some() {
                    continue;
                }
                found
            }
        };
        let (Some(name), Some(label)) = (fields.get(name), fields.get(label)) else {
            return Err(Error::corrupt(format!(
                "line {here} has {} fields, too few for a name and a label",
                fields.len()
            )));
        };
        out.push(name, label, here)?;
    }
    Ok(())
}

/// The fields of the next record, and how many lines it took.
fn record<'t>(rest: &mut &'t str, separator: u8, fields: &mut Vec<Cow<'t, str>>) -> Option<usize> {
    let mut lines = 0;
    loop {
        let text = *rest;
        let (field, after) = match text.strip_prefix('"') {
            None => {
                let end = text
                    .bytes()
                    .position(|b| b == separator || b == b'\n')
                    .unwrap_or(text.len());
                let (field, after) = text.split_at(end);
                let field = if after.starts_with('\n') || after.is_empty() {
                    field.strip_suffix('\r').unwrap_or(field)
                } else {
                    field
                };
                (Cow::Borrowed(field.trim()), after)
            }
            Some(quoted) => {
                let mut from = 0;
                let end = loop {
                    let quote = from + quoted[from..].find('"')?;
                    match quoted.as_bytes().get(quote + 1) {
                        Some(b'"') => from = quote + 2,
                        _ => break quote,
                    }
                };
                lines += quoted[..end].matches('\n').count();
                let after = &quoted[end + 1..];
                let after = after
                    .strip_prefix('\r')
                    .filter(|a| a.starts_with('\n') || a.is_empty())
                    .unwrap_or(after);
                let field = &quoted[..end];
                (
                    if field.contains('"') {
                        Cow::Owned(field.replace("\"\"", "\""))
                    } else {
                        Cow::Borrowed(field)
                    },
                    after,
                )
            }
        };
        fields.push(field);
        match after.bytes().next() {
            None => {
                *rest = "";
                return Some(lines + 1);
            }
            Some(b'\n') => {
                *rest = &after[1..];
                return Some(lines + 1);
            }
            Some(b) if b == separator => *rest = &after[1..],
            Some(_) => return None,
        }
    }
}

/// Where names and labels are, if this is a header line.
fn header(fields: &[Cow<'_, str>], columns: &LabelColumns) -> Result<Option<(usize, usize)>> {
    let find = |told: &Option<String>, usual: &[&str]| match told {
        Some(told) => fields.iter().position(|f| f == told),
        None => usual
            .iter()
            .find_map(|u| fields.iter().position(|f| f.eq_ignore_ascii_case(u))),
    };
    let (name, label) = (
        find(&columns.name, &NAME_COLUMNS),
        find(&columns.label, &LABEL_COLUMNS),
    );
    let told = columns.name.is_some() || columns.label.is_some();
    match (name, label) {
        (Some(name), Some(label)) => Ok(Some((name, label))),
        // One of them is given or known, and there are only two.
        (Some(name), None) if fields.len() == 2 && columns.label.is_none() => {
            Ok(Some((name, 1 - name)))
        }
        (None, Some(label)) if fields.len() == 2 && columns.name.is_none() => {
            Ok(Some((1 - label, label)))
        }
        (None, None) if !told && fields.len() >= 2 => Ok(None),
        _ => {
            let have: Vec<_> = fields.iter().take(20).map(AsRef::as_ref).collect();
            Err(Error::invalid(format!(
                "it does not have columns of names and of labels: its columns are {}",
                have.join(", ")
            ))
            .hint("say which columns have the names and the labels"))
        }
    }
}

fn json_lines(bytes: &[u8], columns: &LabelColumns, out: &mut Builder) -> Result<()> {
    let (mut at, mut line) = (0, 0);
    while at < bytes.len() {
        let (text, len) = jsonl::next(&bytes[at..]);
        at += len;
        line += 1;
        let Some(text) = text else { continue };
        let object: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(text)
            .map_err(|e| Error::corrupt(format!("line {line} is not a JSON object: {e}")))?;
        let find = |told: &Option<String>, usual: &[&str], what: &str| {
            let value = match told {
                Some(told) => object.get(told),
                None => usual.iter().find_map(|u| object.get(*u)),
            };
            match value {
                Some(serde_json::Value::String(s)) => Ok(s.clone()),
                Some(v @ (serde_json::Value::Number(_) | serde_json::Value::Bool(_))) => {
                    Ok(v.to_string())
                }
                _ => Err(Error::corrupt(format!(
                    "the {what} in line {line} is missing, or it is neither text nor a number"
                ))
                .hint("say which fields have the names and the labels")),
            }
        };
        let name = find(&columns.name, &NAME_COLUMNS, "name")?;
        let label = find(&columns.label, &LABEL_COLUMNS, "label")?;
        out.push(&name, &label, line)?;
    }
    Ok(())
}

/// A label from a path: the name of the directory `depth` levels above the object; 1 is the
/// directory that contains it.
pub fn label_of_path(key: &str, depth: usize) -> Option<&str> {
    key.rsplit('/').nth(depth.max(1)).filter(|d| !d.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{Array, cast::AsArray};

    fn parse(name: &str, text: &str) -> Result<Labels> {
        Labels::parse(name, text.as_bytes(), &LabelColumns::default())
    }

    #[test]
    fn csv_with_and_without_a_header() {
        for text in [
            "file_name,label\na.jpg,cat\nd/b.jpg,dog\n",
            "label;other;Path\ncat;1;a.jpg\ndog;2;d/b.jpg",
            "a.jpg,cat\r\n\"d/b.jpg\",\"dog\"\r\n",
            "\u{feff}a.jpg\tcat\n\n  d/b.jpg \t dog \n",
        ] {
            let labels = parse("x.csv", text).unwrap();
            assert_eq!(labels.len(), 2, "{text}");
            assert_eq!(
                (labels.get("a.jpg"), labels.get("d/b.jpg")),
                (Some("cat"), Some("dog")),
                "{text}"
            );
            assert_eq!(labels.of_key("train/d/b.jpg"), Some("dog"));
            assert_eq!(labels.of_key("b.jpg"), None);
        }
        let quoted = parse("x.csv", "name,label\n\"a,\"\"b\"\"\nc\",\"x\ny\"\nd,e").unwrap();
        assert_eq!(
            (quoted.get("a,\"b\"\nc"), quoted.get("d")),
            (Some("x\ny"), Some("e"))
        );
        let told = LabelColumns {
            name: Some("x".into()),
            label: Some("y".into()),
        };
        let labels = Labels::parse("l.csv", b"y,z,x\n1,2,a\n3,4,b\n", &told).unwrap();
        assert_eq!(
            labels
                .column(["b", "c", "a"])
                .as_primitive::<arrow_array::types::Int64Type>()
                .values()[0],
            3
        );
        assert!(labels.are_numbers() && labels.column(["c"]).is_null(0));
    }

    #[test]
    fn json_lines_and_their_fields() {
        let labels = parse(
            "l.jsonl",
            "{\"file\": \"a\", \"label\": 3}\n\n{\"file\": \"b\", \"label\": \"x\"}",
        )
        .unwrap();
        assert_eq!(
            (labels.get("a"), labels.get("b"), labels.are_numbers()),
            (Some("3"), Some("x"), false)
        );
    }

    #[test]
    fn bad_files_name_the_line() {
        for (name, text, says) in [
            ("x.csv", "name,label\na,\"b", "line 2"),
            ("x.csv", "name,label\na,\"b\"c\n", "line 2"),
            ("x.csv", "name,label\na\n", "line 2"),
            ("x.csv", "name,label\na,1\na,2\n", "line 3"),
            ("x.csv", "only\n", "not have columns"),
            ("x.jsonl", "{}\n", "line 1"),
            (
                "x.jsonl",
                "{\"name\": \"a\", \"label\": 1}\n[1]\n",
                "line 2",
            ),
            ("x.bin", "", "does not end in"),
        ] {
            let e = parse(name, text).unwrap_err();
            assert!(e.message().contains(says), "{text:?}: {e}");
        }
        assert!(Labels::parse("x.csv", b"a,\xff", &LabelColumns::default()).is_err());
        let told = LabelColumns {
            name: Some("nope".into()),
            label: None,
        };
        assert!(Labels::parse("x.csv", b"name,label\na,1\n", &told).is_err());
    }

    #[test]
    fn labels_of_paths() {
        assert_eq!(label_of_path("train/cat/1.jpg", 1), Some("cat"));
        assert_eq!(label_of_path("train/cat/1.jpg", 2), Some("train"));
        assert_eq!(label_of_path("train/cat/1.jpg", 3), None);
        assert_eq!(label_of_path("1.jpg", 1), None);
    }
}
