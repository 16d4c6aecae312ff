//! Which of the files that were listed belong to the dataset, and what format they have.
//!
//! Files that a pattern found and that are not data by their names are passed over: names that
//! begin with `_` or `.` where files are tables or archives (`_SUCCESS`, `_metadata`, `.part.crc`),
//! and indexes beside TFRecords. Where the format is not given, the names must agree on one.

use crate::{
    Format,
    list::Listed,
    table::{FileRef, FileTable, FileTableBuilder},
};
use forebay_core::{Error, Result};
use forebay_format::tfrecord::side_file;
use std::collections::HashMap;

/// The files of the dataset, their format as far as names tell, and whether first bytes must
/// confirm it.
pub(crate) struct Selected {
    pub files: FileTable,
    pub format: Format,
    /// Names do not tell apart all formats: look at the first file.
    pub unsure: bool,
    /// Files beside the data that tell where its records are: `x.tfrecord` and `x.tfrecord.idx`.
    pub companions: Companions,
}

/// Chooses.
///
/// # Errors
/// `Invalid` if the names do not agree on a format; `NotFound` if nothing is left.
pub(crate) fn select(
    listed: Listed,
    named: Option<Format>,
    sources: &[String],
) -> Result<Selected> {
    let Listed {
        files,
        by_pattern,
        unreadable,
        format: in_manifest,
    } = listed;
    if files.is_empty() {
        let what = sources
            .iter()
            .take(3)
            .cloned()
            .collect::<Vec<_>>()
            .join(", ");
        let also = unreadable.first.map(|n| {
            format!(
                "; {} names cannot be read through this node, as {n:?}",
                unreadable.count
            )
        });
        return Err(
            Error::not_found(format!("no files match {what}{}", also.unwrap_or_default())).hint(
                "`forebay ls BUCKET/PREFIX` shows what is there; * stops at a slash, ** does not",
            ),
        );
    }
    let mut found = vec![false; files.len()];
    by_pattern
        .into_iter()
        .flatten()
        .for_each(|i| found[i] = true);
    let named = named.or(in_manifest);
    let format = match named {
        Some(format) => format,
        None => by_names(&files, &found)?,
    };
    let keeps_all = format == Format::Objects;
    let (mut kept, mut beside) = (FileTableBuilder::default(), HashMap::new());
    for (i, file) in files.iter().enumerate() {
        let key = file.name.key();
        if format == Format::TfRecord && is_companion(key) {
            beside.insert(key.to_owned(), file);
        } else if keeps_all || !found[i] || !is_hidden(key) {
            kept.push(&file)?;
        }
    }
    let kept = kept.finish();
    if kept.is_empty() {
        return Err(Error::not_found(format!(
            "all {} files that match are named as files that are no data, as {}",
            files.len(),
            files.key(0)
        ))
        .hint("name them one by one, or give the format objects"));
    }
    let unsure = match named {
        Some(Format::ArrowFile) => kept.key(0).ends_with(".arrow"),
        Some(_) => false,
        None if format == Format::ArrowFile => true,
        None => format == Format::Objects && !base(kept.key(0)).contains('.'),
    };
    Ok(Selected {
        files: kept,
        format,
        unsure,
        companions: Companions(beside),
    })
}

fn base(key: &str) -> &str {
    key.rsplit('/').next().unwrap_or(key)
}

fn is_hidden(key: &str) -> bool {
    base(key).starts_with(['_', '.'])
}

/// An index of a TFRecord file.
fn is_companion(key: &str) -> bool {
    key.ends_with(".idx") || key.ends_with(".index")
}

/// The one format that the names agree on.
fn by_names(files: &FileTable, found: &[bool]) -> Result<Format> {
    let mut first_of: Vec<(Option<Format>, usize, usize)> = Vec::new();
    let mut indexes = 0;
    for (i, by_pattern) in found.iter().enumerate() {
        let key = files.key(i);
        let format = Format::from_name(key);
        if *by_pattern && is_hidden(key) && format.is_none() {
            continue;
        }
        if *by_pattern && is_companion(key) {
            indexes += 1;
            continue;
        }
        match first_of.iter_mut().find(|(f, ..)| *f == format) {
            Some((_, _, count)) => *count += 1,
            None => first_of.push((format, i, 1)),
        }
    }
    match first_of.as_slice() {
        [] => Ok(Format::Objects),
        [(Some(format), ..)] => {
            // Without TFRecords these would be files like others.
            if indexes > 0 && *format != Format::TfRecord {
                return Err(Error::invalid(format!(
                    "{indexes} files end in .idx or .index among files of the format {format}"
                ))
                .hint("name the format, or narrow the pattern by an extension"));
            }
            Ok(*format)
        }
        [(None, ..)] => Ok(Format::Objects),
        several => {
            let told: Vec<String> = several
                .iter()
                .map(|(f, first, n)| {
                    let f = f.map_or("of no format that their names tell".to_owned(), |f| {
                        f.to_string()
                    });
                    format!(
                        "{n} {f} (as {}/{})",
                        files.bucket(*first),
                        files.key(*first)
                    )
                })
                .collect();
            Err(Error::invalid(format!(
                "the files are of more than one kind: {}",
                told.join(", ")
            ))
            .hint(
                "name the format (objects takes each file as a row), or narrow the \
                    pattern, as in **.parquet",
            ))
        }
    }
}

/// Files of offsets beside TFRecord files, by their keys.
#[derive(Default)]
pub(crate) struct Companions(HashMap<String, FileRef>);

impl Companions {
    /// The one of a TFRecord file.
    pub(crate) fn get(&self, key: &str) -> Option<&FileRef> {
        if self.0.is_empty() {
            return None;
        }
        side_file::names(key)
            .iter()
            .find_map(|name| self.0.get(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::ObjectName;

    fn listed(keys: &[&str]) -> Listed {
        let mut files = FileTableBuilder::default();
        for key in keys {
            files
                .push(&FileRef {
                    name: ObjectName::new("bk", *key).unwrap(),
                    size: 1,
                    etag: None,
                    last_modified_ms: 1,
                })
                .unwrap();
        }
        #[allow(
            clippy::single_range_in_vec_init,
            reason = "one pattern found them all"
        )]
        let by_pattern = vec![0..keys.len()];
        Listed {
            files: files.finish(),
            by_pattern,
            unreadable: Default::default(),
            format: None,
        }
    }

    fn keys(s: &Selected) -> Vec<&str> {
        (0..s.files.len()).map(|i| s.files.key(i)).collect()
    }

    #[test]
    fn names_agree_on_a_format() {
        let s = select(
            listed(&[
                "a/_SUCCESS",
                "a/.x.parquet.crc",
                "a/p.parquet",
                "a/q.parquet",
            ]),
            None,
            &[],
        )
        .unwrap();
        assert_eq!(
            (s.format, keys(&s)),
            (Format::Parquet, vec!["a/p.parquet", "a/q.parquet"])
        );
        let s = select(listed(&["a/_1.jpg", "a/2.jpg"]), None, &[]).unwrap();
        assert_eq!(
            (s.format, keys(&s), s.unsure),
            (Format::Objects, vec!["a/_1.jpg", "a/2.jpg"], false)
        );
        let s = select(
            listed(&["t.tfrecord", "t.tfrecord.idx", "u.idx", "u.tfrecord"]),
            None,
            &[],
        )
        .unwrap();
        assert_eq!(
            (s.format, keys(&s)),
            (Format::TfRecord, vec!["t.tfrecord", "u.tfrecord"])
        );
        assert_eq!(
            s.companions.get("t.tfrecord").unwrap().name.key(),
            "t.tfrecord.idx"
        );
        assert_eq!(s.companions.get("u.tfrecord").unwrap().name.key(), "u.idx");
        assert!(select(listed(&["a/part-0"]), None, &[]).unwrap().unsure);
    }

    #[test]
    fn names_that_do_not_agree_are_told() {
        let e = select(listed(&["a.tar", "b.jpg", "c.jpg"]), None, &[])
            .map(drop)
            .unwrap_err();
        assert!(
            e.to_string().contains("1 tar (as bk/a.tar)")
                && e.to_string().contains("2 of no format"),
            "{e}"
        );
        assert_eq!(
            select(listed(&["a.tar", "b.jpg"]), Some(Format::Objects), &[])
                .unwrap()
                .files
                .len(),
            2
        );
        let e = select(listed(&[]), None, &["bk/x*".into()])
            .map(drop)
            .unwrap_err();
        assert_eq!(e.kind(), forebay_core::ErrorKind::NotFound);
        assert!(select(listed(&["_a"]), Some(Format::Parquet), &[]).is_err());
    }
}
