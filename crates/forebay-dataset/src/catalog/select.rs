//! Which of the listed files belong to the dataset, and what format they have.
//!
//! Files that a pattern found and whose names show that they are not data are skipped. Among tables
//! and archives, these are files with a part of their path that begins with `_` or `.` and that the
//! caller has not written out (`_SUCCESS`, `_temporary/0/…`, `.part.crc`), as in Spark and pyarrow;
//! also indexes for TFRecords and MDS, and what `datasets` writes beside its Arrow files
//! (`save_to_disk`). Of Megatron-LM's `x.bin` and `x.idx`, the first has the rows; beside litData's
//! chunks, `index.json` describes them. If the format is not given, the names must agree on one.
//! Files of known but unsupported formats (Avro, HDF5) are then refused, and not taken for objects.

use super::{
    list::Listed,
    pattern::Wanted,
    table::{FileRef, FileTable, FileTableBuilder},
};
use crate::Format;
use forebay_core::{Error, ObjectName, Result};
use forebay_format::{
    litdata, megatron,
    tabular::{NotRead, format},
    tfrecord::side_file,
};
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
};

/// The files of the dataset, their format as far as names show it, and whether first bytes must
/// confirm it.
pub(crate) struct Selected {
    pub files: FileTable,
    pub format: Format,
    /// Names do not distinguish all formats: look at the first file.
    pub unsure: bool,
    /// Files next to the data that say where its records are: `x.tfrecord` and `x.tfrecord.idx`,
    /// `x.bin` and `x.idx`, `chunk-0-0.bin` and `index.json`.
    pub companions: Companions,
}

/// Selects the files and the format.
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
                "; this node cannot read {} of the names, such as {n:?}",
                unreadable.count
            )
        });
        return Err(
            Error::not_found(format!("no files match {what}{}", also.unwrap_or_default())).hint(
                "`forebay ls BUCKET/PREFIX` shows what is there; * stops at a slash, ** does not",
            ),
        );
    }
    // Which files found by a pattern are hidden by their names, and which were found by a pattern
    // at all.
    let (mut found, mut hidden) = (vec![false; files.len()], vec![false; files.len()]);
    let ranges: Vec<_> = by_pattern.iter().map(|found| found.files.clone()).collect();
    let all = by_pattern.iter().filter(|found| found.is_all);
    let all: Vec<_> = all.map(|found| found.files.clone()).collect();
    for pattern in by_pattern {
        for i in pattern.files {
            (found[i], hidden[i]) = (true, is_hidden(files.key(i), pattern.written));
        }
    }
    let named = named.or(in_manifest);
    let format = match named {
        Some(format) => format,
        None => by_names(&files, &found, &hidden)?,
    };
    let keeps_all = format == Format::Objects;
    let (mut kept, mut beside) = (FileTableBuilder::default(), HashMap::new());
    for i in in_order(&files, &ranges, format) {
        let file = files.file(i);
        let key = file.name.key();
        let is_beside = match format {
            Format::TfRecord => is_companion(key),
            Format::Megatron => key.ends_with(".idx"),
            Format::LitData => base(key) == litdata::INDEX,
            _ => false,
        };
        if is_beside {
            let is_all = all.iter().any(|found| found.contains(&i));
            let of = (file.name.bucket().to_owned(), key.to_owned());
            beside.insert(of, Companion { file, is_all });
        } else if format == Format::Mds && found[i] && is_mds_index(key) {
            // The shards say what is in them.
        } else if found[i] && is_beside_pairs(format, key) {
            // Only the names of both kinds say what is data.
        } else if is_arrow(format) && found[i] && is_saved_state(key) {
            if base(key) == SPLITS {
                return Err(several_splits(&file.name));
            }
        } else if keeps_all || !hidden[i] {
            kept.push(&file)?;
        }
    }
    let kept = kept.finish();
    if kept.is_empty() {
        let first = files.key(0);
        let text = match files.len() {
            1 => format!("the only file that matches has the name of a file without data: {first}"),
            n => format!(
                "all {n} files that match have names of files without data, such as {first}"
            ),
        };
        return Err(
            Error::not_found(text).hint("name the files one by one, or give the format objects")
        );
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

/// The order of the files: as they were listed, but litData's chunks that a pattern found by the
/// numbers in their names, which is the order of `index.json`.
fn in_order(files: &FileTable, by_pattern: &[Range<usize>], format: Format) -> Vec<usize> {
    let mut order: Vec<usize> = (0..files.len()).collect();
    if format == Format::LitData {
        for found in by_pattern {
            order[found.clone()].sort_by_cached_key(|&i| {
                let key = files.key(i);
                let directory = key.len() - base(key).len();
                (key[..directory].to_owned(), litdata::order_of(key))
            });
        }
    }
    order
}

/// What `save_to_disk` of Hugging Face's `datasets` writes beside its Arrow files; the last one for
/// several splits, each in a directory.
const SAVED_STATE: [&str; 3] = ["state.json", "dataset_info.json", SPLITS];
const SPLITS: &str = "dataset_dict.json";

/// Whether a file with this name is none of these formats, which have their own names.
fn is_beside_pairs(format: Format, key: &str) -> bool {
    match format {
        Format::LitData => litdata::index_name(key).is_none(),
        Format::Megatron => stem(key, ".bin").is_none(),
        _ => false,
    }
}

/// What litData writes beside its chunks, besides their `index.json`: those of single machines, and
/// files of keys.
fn is_side_of_litdata(key: &str) -> bool {
    let base = base(key);
    let of_machine = |end: &str| {
        let number = base.strip_suffix(end);
        number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let of_keys = base.starts_with("shard-") && key.rsplit('/').nth(1) == Some("keys");
    of_machine("-index.json") || of_machine("-keys.parquet") || of_keys
}

/// Of MDS, for all shards of a directory.
fn is_mds_index(key: &str) -> bool {
    base(key) == "index.json"
}

fn is_saved_state(key: &str) -> bool {
    SAVED_STATE.contains(&base(key))
}

fn is_arrow(format: Format) -> bool {
    matches!(format, Format::ArrowFile | Format::ArrowStream)
}

fn several_splits(of: &ObjectName) -> Error {
    let (bucket, key) = (of.bucket(), of.key());
    let directory = &key[..key.len() - SPLITS.len()];
    Error::invalid(format!(
        "{bucket}/{directory} holds several splits, each a dataset of its own, as {key} says"
    ))
    .hint(format!(
        "name one of its directories, such as {bucket}/{directory}train/; {bucket}/{directory}**.arrow \
         takes the rows of all"
    ))
}

fn base(key: &str) -> &str {
    key.rsplit('/').next().unwrap_or(key)
}

/// Whether a part of the path begins with `_` or `.`, among those parts that begin after what was
/// written out.
fn is_hidden(key: &str, written: usize) -> bool {
    let mut start = 0;
    key.split('/').any(|part| {
        let hidden = start >= written && part.starts_with(['_', '.']);
        start += part.len() + 1;
        hidden
    })
}

/// An index of a TFRecord file.
fn is_companion(key: &str) -> bool {
    key.ends_with(".idx") || key.ends_with(".index")
}

/// The one format that the names agree on.
fn by_names(files: &FileTable, found: &[bool], hidden: &[bool]) -> Result<Format> {
    let mut unread = Unread::default();
    let pairs = Pairs::of(files, hidden);
    let by_name = |i: usize| {
        pairs
            .format(files, i)
            .or_else(|| format::by_name(files.key(i)))
    };
    // Hidden tables next to visible ones are no reason to doubt the format.
    let told = (0..files.len()).any(|i| !hidden[i] && by_name(i).is_some());
    let mut first_of: Vec<(Option<Format>, usize, usize)> = Vec::new();
    let mut indexes = 0;
    let has = |is: &dyn Fn(Format) -> bool| {
        (0..files.len()).any(|i| format::by_name(files.key(i)).is_some_and(is))
    };
    let (arrow, mds) = (has(&is_arrow), has(&|format| format == Format::Mds));
    for (i, by_pattern) in found.iter().enumerate() {
        let key = files.key(i);
        let format = by_name(i);
        if hidden[i] && (told || format.is_none()) {
            continue;
        }
        if pairs.is_index(files, i) || pairs.is_side(key) {
            continue;
        }
        if *by_pattern && is_companion(key) {
            indexes += 1;
            continue;
        }
        if *by_pattern && (arrow && is_saved_state(key) || mds && is_mds_index(key)) {
            continue;
        }
        if format.is_none() {
            unread.count(key, i);
        }
        match first_of.iter_mut().find(|(f, ..)| *f == format) {
            Some((_, _, count)) => *count += 1,
            None => first_of.push((format, i, 1)),
        }
    }
    // Tables of text that accompany more other files: pictures, and what they show.
    let is_text = |format| matches!(format, Some(Format::Csv | Format::Tsv));
    let tables: usize = first_of
        .iter()
        .filter(|(f, ..)| is_text(*f))
        .map(|(.., n)| n)
        .sum();
    if let Some((_, _, others)) = first_of.iter_mut().find(|(f, ..)| f.is_none())
        && (1..*others).contains(&tables)
    {
        *others += tables;
        first_of.retain(|(f, ..)| !is_text(*f));
    }
    match first_of.as_slice() {
        [] => Ok(Format::Objects),
        [(Some(format), ..)] => {
            // Without TFRecords, these would be ordinary files.
            if indexes > 0 && *format != Format::TfRecord {
                return Err(Error::invalid(format!(
                    "some files of the format {format} end in .idx or .index ({indexes} of them)"
                ))
                .hint("name the format, or narrow the pattern by an extension"));
            }
            Ok(*format)
        }
        [(None, _, count)] => unread.check(files, *count).map(|()| Format::Objects),
        several => {
            let told: Vec<String> = several
                .iter()
                .map(|(f, first, n)| {
                    let f = f.map_or("of unknown formats".to_owned(), |f| f.to_string());
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

/// The files of Megatron-LM and litData among others: `.bin` says nothing, but two files `x.bin` and
/// `x.idx` do, and so do `chunk-…bin` and `index.json`.
#[derive(Default)]
struct Pairs<'a> {
    /// What the names of two files have in common.
    stems: HashSet<(&'a str, &'a str)>,
    /// Each `index.json` with chunks beside it.
    indexes: HashSet<(&'a str, String)>,
}

impl<'a> Pairs<'a> {
    /// None if there are other files too: nothing says that those which go in pairs are the data then.
    fn of(files: &'a FileTable, hidden: &[bool]) -> Self {
        let pairs = Self::all(files);
        let is_other = |i: usize| {
            let key = files.key(i);
            // One that lacks the other is told below.
            let is_half = key.ends_with(".bin") || key.ends_with(".idx");
            let is_known = is_half || pairs.is_index(files, i) || pairs.is_side(key);
            !hidden[i] && !is_known
        };
        match (0..files.len()).any(is_other) {
            true => Self::default(),
            false => pairs,
        }
    }

    fn all(files: &'a FileTable) -> Self {
        let stems = |extension: &'static str| {
            (0..files.len())
                .filter_map(move |i| Some((files.bucket(i), stem(files.key(i), extension)?)))
        };
        let mut pairs = Self::default();
        let with_idx: HashSet<_> = stems(".idx").collect();
        if !with_idx.is_empty() {
            let both = stems(".bin").filter(|stem| with_idx.contains(stem));
            pairs.stems = both.collect();
        }
        let json = (0..files.len()).filter(|&i| base(files.key(i)) == litdata::INDEX);
        let json: HashSet<_> = json.map(|i| (files.bucket(i), files.key(i))).collect();
        if !json.is_empty() {
            for i in 0..files.len() {
                if let Some(index) = litdata::index_name(files.key(i))
                    && json.contains(&(files.bucket(i), index.as_str()))
                {
                    pairs.indexes.insert((files.bucket(i), index));
                }
            }
        }
        pairs
    }

    fn has(&self, files: &FileTable, i: usize, extension: &str) -> bool {
        !self.stems.is_empty()
            && stem(files.key(i), extension)
                .is_some_and(|stem| self.stems.contains(&(files.bucket(i), stem)))
    }

    /// The format of a file whose name says it together with another one.
    fn format(&self, files: &FileTable, i: usize) -> Option<Format> {
        if self.has(files, i, ".bin") {
            return Some(Format::Megatron);
        }
        if self.indexes.is_empty() {
            return None;
        }
        let index = litdata::index_name(files.key(i))?;
        let is_there = self.indexes.contains(&(files.bucket(i), index));
        is_there.then_some(Format::LitData)
    }

    /// Whether it is what litData writes beside its chunks.
    fn is_side(&self, key: &str) -> bool {
        !self.indexes.is_empty() && is_side_of_litdata(key)
    }

    /// Whether a file describes others.
    fn is_index(&self, files: &FileTable, i: usize) -> bool {
        let of = || (files.bucket(i), files.key(i).to_owned());
        self.has(files, i, ".idx") || !self.indexes.is_empty() && self.indexes.contains(&of())
    }
}

fn stem<'a>(key: &'a str, extension: &str) -> Option<&'a str> {
    let stem = key.strip_suffix(extension)?;
    (!stem.is_empty() && !stem.ends_with('/')).then_some(stem)
}

/// With the files that describe those that are named exactly. A data set of Megatron-LM may be named
/// by either of its files, or by what their names have in common, as Megatron-LM names it.
pub(super) fn with_indexes(format: Format, wanted: Vec<Wanted>) -> Vec<Wanted> {
    let both = |one| match one {
        Wanted::Exact(bucket, key) if format == Format::LitData => {
            let index = litdata::index_name(&key);
            let index = index.map(|index| Wanted::Exact(bucket.clone(), index));
            let mut both = vec![Wanted::Exact(bucket, key)];
            both.extend(index);
            both
        }
        Wanted::Exact(bucket, key) if format == Format::Megatron => {
            let common = stem(&key, ".bin").or_else(|| stem(&key, ".idx"));
            let common = common.unwrap_or(&key).to_owned();
            let of = |extension| Wanted::Exact(bucket.clone(), format!("{common}{extension}"));
            vec![of(".bin"), of(".idx")]
        }
        other => vec![other],
    };
    wanted.into_iter().flat_map(both).collect()
}

/// Files of known but unsupported formats.
#[derive(Default)]
struct Unread {
    count: usize,
    /// The first of them.
    first: Option<(usize, NotRead)>,
}

impl Unread {
    fn count(&mut self, key: &str, i: usize) {
        if let Some(format) = format::not_read(key) {
            self.count += 1;
            self.first.get_or_insert((i, format));
        }
    }

    /// Refuses them if they are the majority of the files. Otherwise they accompany the data:
    /// pictures with a JSON file each, and a table of labels.
    fn check(&self, files: &FileTable, all: usize) -> Result<()> {
        match &self.first {
            Some((i, format)) if self.count * 2 > all => Err(Error::invalid(format!(
                "{} is {}, which Forebay does not read as rows",
                files.name(*i),
                format.name
            ))
            .hint(format!(
                "{}; format \"objects\" takes each file as one row of bytes",
                format.advice
            ))),
            _ => Ok(()),
        }
    }
}

/// Files that say where the records of others are, by their buckets and keys.
#[derive(Default)]
pub(crate) struct Companions(HashMap<(String, String), Companion>);

struct Companion {
    file: FileRef,
    /// Everything beside it was asked for.
    is_all: bool,
}

impl Companions {
    /// The one for a file of this format.
    pub(crate) fn get(&self, format: Format, bucket: &str, key: &str) -> Option<&FileRef> {
        self.of(format, bucket, key).map(|beside| &beside.file)
    }

    /// The same, if everything beside it was asked for: then what it lists must be there.
    pub(crate) fn of_all(&self, format: Format, bucket: &str, key: &str) -> Option<&FileRef> {
        let beside = self.of(format, bucket, key);
        beside.filter(|b| b.is_all).map(|beside| &beside.file)
    }

    fn of(&self, format: Format, bucket: &str, key: &str) -> Option<&Companion> {
        if self.0.is_empty() {
            return None;
        }
        let names = match format {
            Format::TfRecord => side_file::names(key),
            Format::Megatron => megatron::index_name(key).into_iter().collect(),
            Format::LitData => litdata::index_name(key).into_iter().collect(),
            _ => return None,
        };
        let mut names = names.into_iter();
        names.find_map(|name| self.0.get(&(bucket.to_owned(), name)))
    }

    /// Those beside which everything was asked for, in no order.
    pub(crate) fn all(&self) -> impl Iterator<Item = &FileRef> {
        let all = self.0.values().filter(|beside| beside.is_all);
        all.map(|beside| &beside.file)
    }

    /// A number that tells versions of the one for a file apart, if the rows of that file depend on
    /// it; else 0.
    pub(crate) fn version(&self, format: Format, bucket: &str, key: &str) -> u64 {
        match format {
            Format::Megatron | Format::LitData => self
                .get(format, bucket, key)
                .map_or(0, FileRef::fingerprint),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::list::Found;

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
        let by_pattern = vec![Found {
            files: 0..keys.len(),
            written: 0,
            is_all: true,
        }];
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
        let beside = |key| s.companions.get(s.format, "bk", key).unwrap().name.key();
        assert_eq!(beside("t.tfrecord"), "t.tfrecord.idx");
        assert_eq!(beside("u.tfrecord"), "u.idx");
        assert!(s.companions.get(s.format, "other", "u.tfrecord").is_none());
        assert!(select(listed(&["a/part-0"]), None, &[]).unwrap().unsure);
    }

    #[test]
    fn what_describes_arrow_files_and_shards_is_no_data() {
        let saved = &[
            "s/data-00000-of-00002.arrow",
            "s/data-00001-of-00002.arrow",
            "s/dataset_info.json",
            "s/state.json",
        ];
        for named in [None, Some(Format::ArrowStream)] {
            let s = select(listed(saved), named, &[]).unwrap();
            assert_eq!(keys(&s), saved[..2]);
            assert!(s.unsure || named.is_some());
        }
        let s = select(
            listed(&["m/index.json", "m/shard.00000.mds.zstd"]),
            None,
            &[],
        )
        .unwrap();
        assert_eq!(
            (s.format, keys(&s)),
            (Format::Mds, vec!["m/shard.00000.mds.zstd"])
        );
        // Without Arrow files they are files like others.
        let s = select(listed(&["s/state.json", "s/a.jpg", "s/b.jpg"]), None, &[]).unwrap();
        assert_eq!((s.format, s.files.len()), (Format::Objects, 3));
        let splits = &["d/dataset_dict.json", "d/test/a.arrow", "d/train/a.arrow"];
        let e = select(listed(splits), None, &[]).map(drop).unwrap_err();
        assert!(e.message().contains("bk/d/ holds several splits"), "{e}");
        assert!(e.hint_text().unwrap().contains("bk/d/train/"), "{e}");
    }

    #[test]
    fn files_of_megatron_are_known_by_two_of_them() {
        let s = select(
            listed(&["m/a.bin", "m/a.idx", "m/b.bin", "m/b.idx"]),
            None,
            &[],
        )
        .unwrap();
        assert_eq!(
            (s.format, keys(&s)),
            (Format::Megatron, vec!["m/a.bin", "m/b.bin"])
        );
        let a = s.companions.get(s.format, "bk", "m/a.bin").unwrap();
        assert_eq!(a.name.key(), "m/a.idx");
        let version = |key| s.companions.version(s.format, "bk", key);
        assert!(version("m/a.bin") != version("m/b.bin") && version("m/a.bin") != 0);
        assert_eq!(version("m/c.bin"), 0);
        // Alone, each is a file like others.
        for alone in [
            ["m/a.bin", "m/b.idx"],
            ["m/a.bin", "m/b.bin"],
            ["m/.bin", "m/.idx"],
        ] {
            let s = select(listed(&alone), None, &[]).unwrap();
            assert_eq!((s.format, s.files.len()), (Format::Objects, 2), "{alone:?}");
        }
        let e = select(listed(&["m/a.bin", "m/a.idx", "m/b.bin"]), None, &[]);
        let e = e.map(drop).unwrap_err();
        assert!(e.message().contains("1 megatron (as bk/m/a.bin)"), "{e}");
        let mixed = ["m/a.bin", "m/a.idx", "m/tokenizer.json"];
        let s = select(listed(&mixed), None, &[]).unwrap();
        assert_eq!((s.format, s.files.len()), (Format::Objects, 3));
        let s = select(listed(&mixed), Some(Format::Megatron), &[]).unwrap();
        assert_eq!(keys(&s), ["m/a.bin"]);
        let exact = |key: &str| Wanted::Exact("bk".into(), key.into());
        for key in ["m/a.bin", "m/a.idx", "m/a"] {
            let both = with_indexes(Format::Megatron, vec![exact(key)]);
            let both = both.iter().map(|one| match one {
                Wanted::Exact(_, key) => key.as_str(),
                _ => unreachable!(),
            });
            assert_eq!(both.collect::<Vec<_>>(), ["m/a.bin", "m/a.idx"], "{key}");
        }
    }

    #[test]
    fn chunks_of_litdata_are_known_by_their_index_and_come_in_its_order() {
        let s = select(
            listed(&[
                "l/chunk-0-0.bin",
                "l/chunk-0-1.bin",
                "l/chunk-0-10.bin",
                "l/chunk-0-2.zstd.bin",
                "l/chunk-1-0.bin",
                "l/index.json",
            ]),
            None,
            &[],
        )
        .unwrap();
        assert_eq!(s.format, Format::LitData);
        let order = [
            "l/chunk-0-0.bin",
            "l/chunk-0-1.bin",
            "l/chunk-0-2.zstd.bin",
            "l/chunk-0-10.bin",
            "l/chunk-1-0.bin",
        ];
        assert_eq!(keys(&s), order);
        let index = s.companions.get(s.format, "bk", "l/chunk-0-10.bin");
        assert_eq!(index.unwrap().name.key(), "l/index.json");
        // Without it, or in another directory, they are files like others.
        let alone = ["l/chunk-0-0.bin", "l/m/index.json"];
        let s = select(listed(&alone), None, &[]).unwrap();
        assert_eq!((s.format, s.files.len()), (Format::Objects, 2));
        // What litData writes besides is none of it, nor is what is hidden; where there is something
        // else, each file is one row as ever.
        let mut with = vec!["l/chunk-0-0.bin", "l/index.json", "l/_temporary/x.parquet"];
        with.extend([
            "l/0-index.json",
            "l/keys/shard-0.parquet",
            "l/3-keys.parquet",
        ]);
        let s = select(listed(&with), None, &[]).unwrap();
        assert_eq!(
            (s.format, keys(&s)),
            (Format::LitData, vec!["l/chunk-0-0.bin"])
        );
        let mixed = ["l/a.txt", "l/chunk-0-0.bin", "l/index.json"];
        let s = select(listed(&mixed), None, &[]).unwrap();
        assert_eq!((s.format, s.files.len()), (Format::Objects, 3));
        let s = select(listed(&mixed), Some(Format::LitData), &[]).unwrap();
        assert_eq!(keys(&s), ["l/chunk-0-0.bin"]);
        let exact = vec![Wanted::Exact("bk".into(), "l/chunk-0-0.bin".into())];
        let both = with_indexes(Format::LitData, exact);
        assert!(matches!(&both[1], Wanted::Exact(_, key) if key == "l/index.json"));
    }

    #[test]
    fn hidden_parts_of_a_path_are_skipped_unless_they_are_written_out() {
        for (key, written, hidden) in [
            ("a/_temporary/0/p.parquet", 2, true),
            ("a/_temporary/0/p.parquet", "a/_temporary/".len(), false),
            ("a/_temporary/_0/p.parquet", "a/_temporary/".len(), true),
            ("_delta_log/0.checkpoint.parquet", 0, true),
            ("a/.x/p.parquet", 0, true),
            ("a/_part-0.parquet", "a/_part".len(), false),
            ("a/_part-0.parquet", "a/".len(), true),
            ("a_b/c_.parquet", 0, false),
            ("a/_x/p.parquet", usize::MAX, false),
        ] {
            assert_eq!(is_hidden(key, written), hidden, "{key} {written}");
        }
        let s = select(
            listed(&[
                "t/_temporary/0/p.parquet",
                "t/p.parquet",
                "t/_delta_log/1.json",
                "t/.cache/x.tar",
            ]),
            None,
            &[],
        )
        .unwrap();
        assert_eq!((s.format, keys(&s)), (Format::Parquet, vec!["t/p.parquet"]));
    }

    #[test]
    fn formats_that_are_not_read_are_refused_by_name_and_pictures_beside_them_are_not() {
        for (key, told) in [
            ("a.json", "JSON"),
            ("a.jsonl.bz2", "compressed with bzip2"),
            ("a.jsonl.xz", "compressed with xz"),
            ("d/a.psv", "table of text"),
            ("d.lance/data/x.lance", "Lance"),
            ("x.npy", "NumPy"),
            ("shard.00000.mds.bz2", "mds"),
            ("a.parquet.gz", "parquet"),
            ("a.tar.zst", "tar"),
            ("a.orc", "ORC"),
            ("a.avro", "Avro"),
            ("a.h5", "HDF5"),
            ("d/index.json", "an index of MDS"),
            ("d/state.json", "Hugging Face"),
        ] {
            let e = select(listed(&[key, "README"]), None, &[]).map(drop);
            assert!(e.is_ok(), "{key} beside one other file is not most of them");
            let e = select(listed(&[key]), None, &[]).map(drop).unwrap_err();
            assert_eq!(e.kind(), forebay_core::ErrorKind::Invalid);
            assert!(
                e.message().contains(told) && e.message().contains(key),
                "{key}: {e}"
            );
            assert!(e.to_string().contains("\"objects\""), "{key}: {e}");
            let s = select(listed(&[key]), Some(Format::Objects), &[]).unwrap();
            assert_eq!(s.format, Format::Objects);
        }
        for keys in [
            &["1.jpg", "1.json", "2.jpg", "2.json"][..],
            &["1.jpg", "labels.csv", "2.jpg"],
            &["1.jpg", "2.png", "a"],
            &["x.pt", "y.pkl", "z.bin", "w.txt"],
        ] {
            assert_eq!(
                select(listed(keys), None, &[]).unwrap().format,
                Format::Objects
            );
        }
        // Tables and archives still do not mix with other files, nor do more tables than pictures.
        for keys in [
            &["a.parquet", "b.json"][..],
            &["a.parquet", "b.csv"],
            &["1.jpg", "a.csv"],
            &["1.jpg", "a.csv", "b.csv"],
            &["a.csv", "b.tsv"],
        ] {
            assert!(select(listed(keys), None, &[]).is_err(), "{keys:?}");
        }
        let s = select(listed(&["a.csv", "b.csv.gz"]), None, &[]).unwrap();
        assert_eq!((s.format, s.files.len()), (Format::Csv, 2));
    }

    #[test]
    fn names_that_do_not_agree_are_told() {
        let e = select(listed(&["a.tar", "b.jpg", "c.jpg"]), None, &[])
            .map(drop)
            .unwrap_err();
        assert!(
            e.to_string().contains("1 tar (as bk/a.tar)")
                && e.to_string().contains("2 of unknown formats"),
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
