//! One version of a dataset: its files, its blocks, and the way from a row's number to its place.
//!
//! Rows are numbered file after file and block after block. [`Dataset::locate`] is a binary search
//! over files and one over blocks. Memory grows with files and blocks, never with rows, except for
//! datasets of whole objects, where a file is a row.
//!
//! Invariant: a dataset never changes, and its id identifies all of it: files, versions, blocks,
//! options. Equal ids mean equal rows.

use super::{
    access::{Answers, in_common},
    labels::{self, Labels},
    spec::of_options,
    table::{FileRef, FileTable},
};
use crate::{Format, Part};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use forebay_core::{Error, ObjectName, Result, VersionId};
use forebay_format::{
    jsonl,
    tabular::{FileIndex, Projection, encode_schema},
};
use forebay_plan::Shape;
use std::{collections::HashSet, ops::Range, sync::Arc};
use xxhash_rust::xxh3::Xxh3;

/// Where a row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Located {
    /// Its file's number.
    pub file: u32,
    /// The block that holds it, counted within its file. For whole objects, 0.
    pub block: u32,
    /// The row, counted within that block. For whole objects, 0.
    pub row_in_block: u32,
    /// The block, counted within the dataset, as plans count them. For whole objects, a run of
    /// objects.
    pub global_block: u64,
}

/// Approximate memory of a field of a schema.
const FIELD_BYTES: usize = 160;

/// One version of a dataset; see the [module](self).
pub struct Dataset {
    id: String,
    format: Format,
    files: FileTable,
    /// For each file; empty for whole objects.
    indexes: Vec<Arc<FileIndex>>,
    places: Places,
    shape: Arc<Shape>,
    schema: SchemaRef,
    labels: Option<Labels>,
    /// The object that lists the labels; not those of paths.
    labels_listed_in: Option<ObjectName>,
    options: String,
    /// Of the versions of files that describe others; 0 if there are none.
    beside: u64,
    /// Of the names of its files, whatever their versions are.
    names: u64,
    part: Option<Part>,
    /// Of a part, what its dataset is accounted as.
    whole: Option<Account>,
    bytes: u64,
    in_common: Vec<(Range<usize>, usize)>,
    answers: Answers,
    memory_bytes: u64,
}

/// What the cost of reads, and of what lies at the origin, is accounted to.
#[derive(Clone, Debug)]
pub struct Account {
    /// The id of the dataset.
    pub id: String,
    /// [`Dataset::place`].
    pub place: String,
    /// Bytes of all its files.
    pub bytes: u64,
    /// One number for the names of its files, whatever their versions are.
    pub names: u64,
}

/// The parts that a dataset is built from.
pub(crate) struct Parts {
    pub format: Format,
    pub files: FileTable,
    /// For each file; empty for whole objects.
    pub indexes: Vec<Arc<FileIndex>>,
    /// If absent, it is derived from the indexes.
    pub shape: Option<Shape>,
    pub schema: SchemaRef,
    pub labels: Option<Labels>,
    /// Options of the spec, as JSON.
    pub options: String,
}

/// One number for the versions of all files that describe others.
fn beside_of(indexes: &[Arc<FileIndex>]) -> u64 {
    let mut hash = Xxh3::new();
    let mut any = false;
    for beside in indexes.iter().map(|index| index.beside()) {
        hash.update(&beside.to_le_bytes());
        any |= beside != 0;
    }
    match any {
        true => hash.digest().max(1),
        false => 0,
    }
}

/// Where each file begins, in rows and in blocks.
enum Places {
    /// A file is a row.
    OnePerFile,
    Starts {
        rows: Vec<u64>,
        blocks: Vec<u64>,
    },
}

impl Dataset {
    /// A dataset of whole objects.
    pub(crate) fn of_objects(
        files: FileTable,
        block_rows: Option<u32>,
        labels: Option<Labels>,
        options: String,
    ) -> Result<Self> {
        let mut fields = vec![
            Field::new("key", DataType::Utf8, false),
            Field::new("data", DataType::Binary, false),
        ];
        if let Some(labels) = &labels {
            fields.push(Field::new("label", labels.data_type(), true));
        }
        let rows = files.len() as u64;
        let block_rows = block_rows.unwrap_or_else(|| block_rows_for(files.total_bytes(), rows));
        let shape = Some(Shape::uniform(rows, u64::from(block_rows))?);
        let schema = Arc::new(Schema::new(fields));
        Self::of_parts(Parts {
            format: Format::Objects,
            files,
            indexes: Vec::new(),
            shape,
            schema,
            labels,
            options,
        })
    }

    /// A dataset of anything.
    pub(crate) fn of_parts(parts: Parts) -> Result<Self> {
        let Parts {
            format,
            files,
            indexes,
            shape,
            schema,
            labels,
            options,
        } = parts;
        let shape = match shape {
            Some(shape) => shape,
            None => Shape::from_blocks(indexes.iter().flat_map(|i| i.blocks().each_block_rows()))?,
        };
        let places = if format == Format::Objects {
            Places::OnePerFile
        } else {
            let (mut rows, mut blocks) = (
                Vec::with_capacity(files.len() + 1),
                Vec::with_capacity(files.len() + 1),
            );
            let (mut row, mut block) = (0, 0);
            for index in &indexes {
                rows.push(row);
                blocks.push(block);
                row += index.rows();
                block += index.blocks().blocks() as u64;
            }
            rows.push(row);
            blocks.push(block);
            Places::Starts { rows, blocks }
        };
        let (file_rows, file_blocks) = match &places {
            Places::OnePerFile => (files.len() as u64, shape.blocks()),
            Places::Starts { rows, blocks } => (rows[files.len()], blocks[files.len()]),
        };
        if file_rows != shape.rows() || file_blocks != shape.blocks() {
            return Err(Error::internal(format!(
                "{file_rows} rows in {file_blocks} blocks of files, and {} in {}",
                shape.rows(),
                shape.blocks()
            )));
        }
        let mut hash = Xxh3::new();
        hash.update(b"forebay dataset 1\0");
        hash.update(format.name().as_bytes());
        hash.update(b"\0");
        hash.update(options.as_bytes());
        hash.update(b"\0");
        let mut names = Xxh3::new();
        for (bucket, range) in files.by_bucket() {
            hash.update(bucket.as_bytes());
            hash.update(b"\0");
            names.update(bucket.as_bytes());
            names.update(b"\0");
            for i in range {
                let key = files.key(i);
                names.update(key.as_bytes());
                names.update(b"\0");
                hash.update(key.as_bytes());
                hash.update(b"\0");
                hash.update(&files.size(i).to_le_bytes());
                let tag = files.tag_bytes(i);
                hash.update(&(tag.len() as u32).to_le_bytes());
                hash.update(tag);
            }
        }
        let beside = beside_of(&indexes);
        if beside != 0 {
            hash.update(&beside.to_le_bytes());
        }
        hash.update(&shape.encode());
        hash.update(&encode_schema(&schema)?);
        if let Some(labels) = &labels {
            labels.hash_into(&mut hash);
        }
        let id = format!("{:032x}", hash.digest128());
        let starts = match &places {
            Places::OnePerFile => 0,
            Places::Starts { rows, blocks } => (rows.capacity() + blocks.capacity()) as u64 * 8,
        };
        let of_indexes: usize = indexes.iter().map(|i| i.memory_bytes() + 24).sum();
        let schemas: HashSet<_> = indexes.iter().map(|i| Arc::as_ptr(i.schema())).collect();
        let of_schemas: usize =
            (schemas.len() * FIELD_BYTES).saturating_mul(schema.fields().len().max(1));
        let of_labels = labels.as_ref().map_or(0, Labels::memory_bytes);
        let memory_bytes = files.memory_bytes()
            + starts
            + shape.runs().count() as u64 * 24
            + of_indexes as u64
            + of_schemas as u64
            + of_labels
            + 4096;
        let in_common = in_common(&files);
        let shape = Arc::new(shape);
        let spec = of_options(&options)?;
        let labels_listed_in = labels::listed_in(&spec)
            .map_err(|e| Error::corrupt(format!("the options of a dataset: {e}")))?;
        let part = spec.part;
        let bytes = match &part {
            None => files.total_bytes(),
            // Of what is compressed, a part has unpacked bytes.
            Some(_) => indexes
                .iter()
                .flat_map(|i| (0..i.blocks().blocks()).map(|b| i.blocks().bytes(b)))
                .fold(0u64, |sum, block| {
                    sum.saturating_add(block.end - block.start)
                }),
        };
        Ok(Self {
            id,
            format,
            files,
            indexes,
            places,
            shape,
            schema,
            labels,
            labels_listed_in,
            options,
            beside,
            names: names.digest(),
            part,
            whole: None,
            bytes,
            in_common,
            answers: Answers::default(),
            memory_bytes,
        })
    }

    /// 32 hexadecimal digits that identify all of it.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The format of its files; all have the same.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Its files, in the order of its rows.
    pub fn files(&self) -> &FileTable {
        &self.files
    }

    /// Where its files are: what the names of those in its first bucket have in common.
    pub fn place(&self) -> String {
        match self.in_common.first() {
            Some((files, common)) if !files.is_empty() => {
                let (bucket, key) = (self.files.bucket(files.start), self.files.key(files.start));
                let common = key.get(..*common).unwrap_or_default();
                let rest = if common == key { "" } else { "*" };
                format!("{bucket}/{common}{rest}")
            }
            _ => String::new(),
        }
    }

    /// Rows per block.
    pub fn shape(&self) -> &Arc<Shape> {
        &self.shape
    }

    /// The number of its rows.
    pub fn rows(&self) -> u64 {
        self.shape.rows()
    }

    /// Bytes of its files; of a [part](Self::part), those that its rows have.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes for each row, on average.
    pub fn row_bytes(&self) -> u64 {
        self.bytes / self.rows().max(1)
    }

    /// The columns of its rows.
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// A column that is not among those of [`Dataset::schema`], but can be requested by name.
    pub fn besides(&self) -> Option<Field> {
        let line = jsonl::line_field();
        (self.format == Format::Jsonl && self.schema.column_with_name(line.name()).is_none())
            .then_some(line)
    }

    /// The columns of rows that are requested with a projection.
    ///
    /// # Errors
    /// `Invalid` for a column that does not exist.
    pub fn projected(&self, columns: &Projection) -> Result<SchemaRef> {
        match self.besides() {
            Some(besides) => columns.schema_with(&self.schema, &besides),
            None => columns.schema(&self.schema),
        }
    }

    /// One file, by its number.
    ///
    /// # Panics
    /// If the file does not exist.
    pub fn file(&self, i: u32) -> FileRef {
        self.files.file(i as usize)
    }

    /// What stands for the name and the version of the `i`th file.
    ///
    /// # Panics
    /// If the file does not exist.
    pub(crate) fn identity(&self, i: u32) -> (u128, VersionId) {
        self.files.identity(i as usize)
    }

    /// What it is accounted as: a part as its dataset.
    pub fn account(&self) -> Account {
        self.whole.clone().unwrap_or_else(|| Account {
            id: self.id.clone(),
            place: self.place(),
            bytes: self.files.total_bytes(),
            names: self.names,
        })
    }

    /// [`Account::id`].
    pub fn account_id(&self) -> &str {
        self.whole.as_ref().map_or(&self.id, |whole| &whole.id)
    }

    /// It is a part of this one.
    pub(crate) fn accounted_to(mut self, whole: &Self) -> Self {
        self.whole = Some(whole.account());
        self
    }

    /// Of each file only the samples that begin within this part.
    pub fn part(&self) -> Option<&Part> {
        self.part.as_ref()
    }

    /// What is known about the blocks of a file; `None` for whole objects, which need no index.
    pub fn index(&self, file: usize) -> Option<&Arc<FileIndex>> {
        self.indexes.get(file)
    }

    /// The rows of a file.
    ///
    /// # Panics
    /// If the file does not exist.
    pub fn file_rows(&self, i: usize) -> Range<u64> {
        match &self.places {
            Places::OnePerFile => i as u64..i as u64 + 1,
            Places::Starts { rows, .. } => rows[i]..rows[i + 1],
        }
    }

    /// The blocks of a file; for whole objects, the one that contains it.
    ///
    /// # Panics
    /// If the file does not exist.
    pub fn file_blocks(&self, i: usize) -> Range<u64> {
        match &self.places {
            Places::OnePerFile => {
                let block = self.shape.block_of(i as u64);
                block..block + 1
            }
            Places::Starts { blocks, .. } => blocks[i]..blocks[i + 1],
        }
    }

    /// Where a row is.
    ///
    /// # Errors
    /// `RangeNotSatisfiable` if the row does not exist.
    pub fn locate(&self, row: u64) -> Result<Located> {
        if row >= self.rows() {
            return Err(Error::range_not_satisfiable(format!(
                "row {row} does not exist: the dataset has {} rows",
                self.rows()
            ))
            .hint(
                "rows are numbered from 0; another version of the dataset may have more or fewer",
            ));
        }
        let global_block = self.shape.block_of(row);
        Ok(match &self.places {
            Places::OnePerFile => Located {
                file: row as u32,
                block: 0,
                row_in_block: 0,
                global_block,
            },
            Places::Starts { rows, blocks } => {
                // Of the files that begin at the same row, all but the last are empty.
                let file = rows.partition_point(|&first| first <= row) - 1;
                Located {
                    file: file as u32,
                    block: (global_block - blocks[file]) as u32,
                    row_in_block: (row - self.shape.block_range(global_block).start) as u32,
                    global_block,
                }
            }
        })
    }

    /// The label of a file, if the dataset has labels; the type of its column says whether labels
    /// are numbers.
    pub fn label(&self, file: usize) -> Option<&str> {
        self.labels.as_ref()?.of(&self.files, file)
    }

    pub(crate) fn labels(&self) -> Option<&Labels> {
        self.labels.as_ref()
    }

    /// The object that lists its labels, if there is one.
    pub(crate) fn labels_listed_in(&self) -> Option<&ObjectName> {
        self.labels_listed_in.as_ref()
    }

    /// Tells versions of the files apart that describe those of the dataset; 0 if there are none.
    pub(crate) fn beside(&self) -> u64 {
        self.beside
    }

    /// The options that it was made with, as JSON.
    pub(crate) fn options(&self) -> &str {
        &self.options
    }

    /// Consecutive files in one bucket, with the length of their keys' common prefix.
    pub(crate) fn in_common(&self) -> &[(Range<usize>, usize)] {
        &self.in_common
    }

    pub(crate) fn answers(&self) -> &Answers {
        &self.answers
    }

    /// Approximate memory that it holds.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }
}

impl std::fmt::Debug for Dataset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Dataset({} {}: {} rows in {} blocks of {} files)",
            self.id,
            self.format,
            self.rows(),
            self.shape.blocks(),
            self.files.len()
        )
    }
}

/// Rows that take about [`BLOCK_TARGET_BYTES`](forebay_core::limits::BLOCK_TARGET_BYTES), as a
/// power of two, so that small changes of the average do not change the blocks.
pub(crate) fn block_rows_for(bytes: u64, rows: u64) -> u32 {
    use forebay_core::limits::{BLOCK_OBJECTS_MAX, BLOCK_TARGET_BYTES};
    let fit = BLOCK_TARGET_BYTES / (bytes / rows.max(1)).max(1);
    let fit = fit.clamp(1, u64::from(BLOCK_OBJECTS_MAX)) as u32;
    1 << fit.ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_small_things_are_a_few_mib() {
        assert_eq!(block_rows_for(0, 0), 4096);
        assert_eq!(block_rows_for(100 * 100_000, 100), 32);
        assert_eq!(block_rows_for(u64::MAX, 1), 1);
    }
}
