//! Labels of whole objects: from their paths, at no cost, or from an object of names and labels.

use crate::{
    LabelSource,
    disk::{Decoder, put, put_bytes},
    manifest::read_whole,
    table::FileTable,
};
use forebay_core::{Error, ObjectName, Result, limits, name::shorten};
use forebay_engine::Engine;
use std::collections::HashMap;
use xxhash_rust::xxh3::Xxh3;

/// No label.
const NONE: u32 = u32::MAX;

/// Labels of the files of one dataset.
pub(crate) enum Labels {
    /// A part of the key, counted from its end.
    Path(u32),
    /// For each file the number of its label, and the labels.
    Table { of: Vec<u32>, names: Vec<Box<str>> },
}

impl Labels {
    /// What a spec asks for.
    pub(crate) async fn of_spec(engine: &Engine, source: Option<&LabelSource>, files: &FileTable) -> Result<Option<Self>> {
        match source {
            None => Ok(None),
            Some(source) => Self::read(engine, source, files).await.map(Some),
        }
    }

    async fn read(engine: &Engine, source: &LabelSource, files: &FileTable) -> Result<Self> {
        let (name, key, label) = match source {
            LabelSource::Path { level } => return Ok(Labels::Path(*level)),
            LabelSource::File { name, key, label } => (object(name)?, key, label),
        };
        let bytes = read_whole(engine, &name, limits::DATASET_MANIFEST_MAX_BYTES).await?;
        let rows = table(&bytes, key, label).map_err(|e| e.context(format_args!("labels {name}")))?;
        let mut numbers: HashMap<&str, u32> = HashMap::new();
        let mut names: Vec<Box<str>> = Vec::new();
        let mut by_key: HashMap<&str, u32> = HashMap::with_capacity(rows.len());
        for (key, label) in &rows {
            let number = *numbers.entry(label).or_insert_with(|| {
                names.push(label.as_str().into());
                names.len() as u32 - 1
            });
            by_key.insert(key.trim_start_matches("./"), number);
        }
        let of: Vec<u32> = (0..files.len()).map(|i| find(&by_key, files.bucket(i), files.key(i)).unwrap_or(NONE)).collect();
        if !of.is_empty() && of.iter().all(|&n| n == NONE) {
            let (theirs, ours) = (rows.first().map_or("", |r| r.0.as_str()), files.key(0));
            return Err(Error::invalid(format!("labels {name}: none of its {} names is that of a file here", rows.len())).hint(format!(
                "it has names like {:?}, and the files are named like {:?}",
                shorten(theirs),
                shorten(ours)
            )));
        }
        Ok(Labels::Table { of, names })
    }

    pub(crate) fn of<'a>(&'a self, files: &'a FileTable, file: usize) -> Option<&'a str> {
        match self {
            Labels::Path(level) => files.key(file).rsplit('/').nth(*level as usize),
            Labels::Table { of, names } => match of[file] {
                NONE => None,
                n => Some(&names[n as usize]),
            },
        }
    }

    pub(crate) fn hash_into(&self, hash: &mut Xxh3) {
        if let Labels::Table { of, names } = self {
            for n in of {
                hash.update(&n.to_le_bytes());
            }
            for name in names {
                hash.update(name.as_bytes());
                hash.update(b"\0");
            }
        }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Labels::Path(level) => {
                put(out, 0);
                put(out, u64::from(*level));
            }
            Labels::Table { of, names } => {
                put(out, 1);
                put(out, names.len() as u64);
                names.iter().for_each(|n| put_bytes(out, n.as_bytes()));
                of.iter().for_each(|&n| put(out, u64::from(n.wrapping_add(1))));
            }
        }
    }

    pub(crate) fn decode(from: &mut Decoder<'_>, files: usize) -> Option<Self> {
        if from.number()? == 0 {
            return Some(Labels::Path(u32::try_from(from.number()?).ok()?));
        }
        let count = from.number()?;
        let mut names: Vec<Box<str>> = Vec::new();
        for _ in 0..count {
            names.push(from.text()?.into());
        }
        let mut of = Vec::with_capacity(files);
        for _ in 0..files {
            let number = from.number()?;
            if number > count {
                return None;
            }
            of.push((number as u32).wrapping_sub(1));
        }
        Some(Labels::Table { of, names })
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        match self {
            Labels::Path(_) => 0,
            Labels::Table { of, names } => (of.capacity() * 4 + names.iter().map(|n| n.len() + 16).sum::<usize>()) as u64,
        }
    }
}

/// A file's label by the longest end of its name that the table has: with its bucket, its whole key, or from a slash on.
fn find(by_key: &HashMap<&str, u32>, bucket: &str, key: &str) -> Option<u32> {
    let full = format!("{bucket}/{key}");
    if let Some(n) = by_key.get(full.as_str()).or_else(|| by_key.get(key)) {
        return Some(*n);
    }
    key.match_indices('/').find_map(|(at, _)| by_key.get(&key[at + 1..]).copied())
}

fn object(name: &str) -> Result<ObjectName> {
    let text = name.strip_prefix("s3://").unwrap_or(name);
    let (bucket, key) = text
        .split_once('/')
        .ok_or_else(|| Error::invalid(format!("labels.name {:?} names no object", shorten(name))).hint("bucket/key"))?;
    ObjectName::new(bucket, key)
}

/// Names and labels: JSONL if its first byte is a brace, CSV with a line of column names otherwise.
fn table(bytes: &[u8], key: &str, label: &str) -> Result<Vec<(String, String)>> {
    let text = std::str::from_utf8(bytes).map_err(|e| Error::invalid(format!("it is no text: {e}")))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim_start().starts_with('{') { json_lines(text, key, label) } else { csv(text, key, label) }
}

fn json_lines(text: &str, key: &str, label: &str) -> Result<Vec<(String, String)>> {
    let mut out = Vec::new();
    for (n, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let value: serde_json::Value =
            serde_json::from_str(line).map_err(|e| Error::invalid(format!("line {}: {e}", n + 1)).hint("one JSON object on each line"))?;
        let field = |name: &str| match &value[name] {
            serde_json::Value::String(s) => Ok(s.clone()),
            serde_json::Value::Null => {
                Err(Error::invalid(format!("line {}: it has no {name:?}", n + 1)).hint("labels.key and labels.label name the fields"))
            }
            other => Ok(other.to_string()),
        };
        out.push((field(key)?, field(label)?));
    }
    Ok(out)
}

fn csv(text: &str, key: &str, label: &str) -> Result<Vec<(String, String)>> {
    let mut records = Records { rest: text };
    let head = records.next().unwrap_or_default();
    let column = |name: &str| {
        head.iter().position(|c| c.trim() == name).ok_or_else(|| {
            Error::invalid(format!("it has no column {name:?}"))
                .hint(format!("its columns are {}; labels.key and labels.label name two of them", shorten(&head.join(", "))))
        })
    };
    let (key, label) = (column(key)?, column(label)?);
    let mut out = Vec::new();
    for (n, record) in records.enumerate() {
        if record.len() == 1 && record[0].is_empty() {
            continue;
        }
        let field = |at: usize| {
            record
                .get(at)
                .cloned()
                .ok_or_else(|| Error::invalid(format!("record {}: it has {} columns, not {}", n + 1, record.len(), head.len())))
        };
        out.push((field(key)?, field(label)?));
    }
    Ok(out)
}

/// Records of a CSV, RFC 4180: fields may be in quotes, quotes in them doubled.
struct Records<'a> {
    rest: &'a str,
}

impl Iterator for Records<'_> {
    type Item = Vec<String>;

    fn next(&mut self) -> Option<Vec<String>> {
        if self.rest.is_empty() {
            return None;
        }
        let (mut fields, mut field, mut quoted) = (Vec::new(), String::new(), false);
        let mut chars = self.rest.char_indices().peekable();
        let mut end = self.rest.len();
        while let Some((at, c)) = chars.next() {
            match c {
                '"' if quoted && chars.peek().is_some_and(|(_, c)| *c == '"') => {
                    chars.next();
                    field.push('"');
                }
                '"' if quoted => quoted = false,
                '"' if field.is_empty() => quoted = true,
                ',' if !quoted => fields.push(std::mem::take(&mut field)),
                '\n' if !quoted => {
                    end = at + 1;
                    break;
                }
                '\r' if !quoted && chars.peek().is_none_or(|(_, c)| *c == '\n') => {}
                c => field.push(c),
            }
        }
        fields.push(field);
        self.rest = &self.rest[end..];
        Some(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_both_kinds() {
        let expected = vec![("a.jpg".to_owned(), "cat".to_owned()), ("x/b, c.jpg".to_owned(), "7".to_owned())];
        let json = "{\"file\": \"a.jpg\", \"label\": \"cat\"}\n\n{\"file\": \"x/b, c.jpg\", \"label\": 7}\n";
        assert_eq!(table(json.as_bytes(), "file", "label").unwrap(), expected);
        let csv = "\u{feff}id,file,label\r\n1,a.jpg,cat\r\n2,\"x/b, c.jpg\",7\r\n\r\n";
        assert_eq!(table(csv.as_bytes(), "file", "label").unwrap(), expected);
        assert_eq!(table(b"file,label\n\"a \"\"b\"\"\",\"1\n2\"", "file", "label").unwrap(), [("a \"b\"".to_owned(), "1\n2".to_owned())]);
        for bad in ["{\"file\": 1}", "{", "a,b\n1,2", "file,label\nx", ""] {
            assert!(table(bad.as_bytes(), "file", "label").is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_are_found_by_their_ends() {
        let by_key = HashMap::from([("b.jpg", 0), ("d/b.jpg", 1), ("bk/e/f", 2), ("x/y", 3)]);
        assert_eq!(find(&by_key, "bk", "c/d/b.jpg"), Some(1));
        assert_eq!(find(&by_key, "bk", "c/b.jpg"), Some(0));
        assert_eq!(find(&by_key, "bk", "e/f"), Some(2));
        assert_eq!(find(&by_key, "other", "e/f"), None);
        assert_eq!(find(&by_key, "bk", "x/y"), Some(3));
        assert_eq!(find(&by_key, "bk", "xb.jpg"), None);
    }
}
