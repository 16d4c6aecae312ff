//! Labels of whole objects: from their paths, at no cost, or from an object that lists names and
//! labels.

use super::{
    disk::{Decoder, put, put_bytes},
    manifest::read_whole,
    table::FileTable,
};
use crate::{DatasetSpec, LabelSource, blocking::blocking};
use arrow_schema::DataType;
use forebay_core::{Error, ObjectName, Result, limits, name::shorten};
use forebay_engine::Engine;
use forebay_format::labels::{LabelColumns, Labels as File, label_of_path};
use std::{collections::HashMap, sync::Arc};
use xxhash_rust::xxh3::Xxh3;

/// No label.
const NONE: u32 = u32::MAX;

/// Labels of the files of one dataset.
pub(crate) enum Labels {
    /// A segment of the key, counted from its end.
    Path(u32),
    /// For each file the number of its label, and the labels.
    Table {
        of: Vec<u32>,
        names: Vec<Box<str>>,
        numbers: bool,
    },
}

impl Labels {
    /// The labels that a spec asks for.
    pub(crate) async fn of_spec(
        engine: &Engine,
        source: Option<&LabelSource>,
        files: &Arc<FileTable>,
    ) -> Result<Option<Self>> {
        let (name, columns) = match source {
            None => return Ok(None),
            Some(LabelSource::Path { level }) => return Ok(Some(Labels::Path(*level))),
            Some(LabelSource::File { name, key, label }) => (
                object(name)?,
                LabelColumns {
                    name: key.clone(),
                    label: label.clone(),
                },
            ),
        };
        // The names and labels as a table take about as much again.
        let (bytes, _memory) =
            read_whole(engine, "labels", &name, limits::SIDE_FILE_MAX_BYTES, 2).await?;
        let files = files.clone();
        let labels = blocking(move || Self::of_file(&name, &bytes, &columns, &files));
        labels.await?.map(Some)
    }

    /// From an object that lists names and labels.
    fn of_file(
        name: &ObjectName,
        bytes: &[u8],
        columns: &LabelColumns,
        files: &FileTable,
    ) -> Result<Self> {
        let table = File::parse(name.key(), bytes, columns)?;
        let (mut numbers, mut names): (HashMap<&str, u32>, Vec<Box<str>>) = Default::default();
        let mut of = Vec::with_capacity(files.len());
        for i in 0..files.len() {
            of.push(table.of_key(files.key(i)).map_or(NONE, |label| {
                *numbers.entry(label).or_insert_with(|| {
                    names.push(label.into());
                    names.len() as u32 - 1
                })
            }));
        }
        if !of.is_empty() && of.iter().all(|&n| n == NONE) {
            return Err(Error::invalid(format!(
                "labels {name}: none of its {} names belongs to a file of the dataset",
                table.len()
            ))
            .hint(format!(
                "the files have names like {:?}; give the whole key, or its end after a slash",
                shorten(files.key(0))
            )));
        }
        Ok(Labels::Table {
            of,
            names,
            numbers: table.are_numbers(),
        })
    }

    pub(crate) fn of<'a>(&'a self, files: &'a FileTable, file: usize) -> Option<&'a str> {
        match self {
            Labels::Path(level) => label_of_path(files.key(file), *level as usize),
            Labels::Table { of, names, .. } => match of[file] {
                NONE => None,
                n => Some(&names[n as usize]),
            },
        }
    }

    /// Whole numbers if all labels are, text otherwise.
    pub(crate) fn data_type(&self) -> DataType {
        match self {
            Labels::Table { numbers: true, .. } => DataType::Int64,
            _ => DataType::Utf8,
        }
    }

    pub(crate) fn hash_into(&self, hash: &mut Xxh3) {
        if let Labels::Table { of, names, .. } = self {
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
            Labels::Table { of, names, numbers } => {
                put(out, 1 + u64::from(*numbers));
                put(out, names.len() as u64);
                names.iter().for_each(|n| put_bytes(out, n.as_bytes()));
                of.iter()
                    .for_each(|&n| put(out, u64::from(n.wrapping_add(1))));
            }
        }
    }

    pub(crate) fn decode(from: &mut Decoder<'_>, files: usize) -> Option<Self> {
        let numbers = match from.number()? {
            0 => return Some(Labels::Path(u32::try_from(from.number()?).ok()?)),
            kind => kind == 2,
        };
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
        Some(Labels::Table { of, names, numbers })
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        match self {
            Labels::Path(_) => 0,
            Labels::Table { of, names, .. } => {
                (of.capacity() * 4 + names.iter().map(|n| n.len() + 16).sum::<usize>()) as u64
            }
        }
    }
}

/// The object that lists the labels of a dataset, if there is one: whoever gets the labels must be
/// allowed to read it.
///
/// # Errors
/// `Invalid` if its name is none.
pub(crate) fn listed_in(spec: &DatasetSpec) -> Result<Option<ObjectName>> {
    match &spec.labels {
        Some(LabelSource::File { name, .. }) => object(name).map(Some),
        Some(LabelSource::Path { .. }) | None => Ok(None),
    }
}

fn object(name: &str) -> Result<ObjectName> {
    let text = forebay_core::name::without_scheme(name);
    let (bucket, key) = text.split_once('/').ok_or_else(|| {
        Error::invalid(format!(
            "labels.name {:?} does not name an object",
            shorten(name)
        ))
        .hint("bucket/key")
    })?;
    ObjectName::new(bucket, key)
}
