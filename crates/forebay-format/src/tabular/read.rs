//! Reads rows of a block of any format.

use super::{Detail, FileIndex, Format, Need, Projection, Rows, arrow_error};
use crate::{MemberIndex, ipc, jsonl, parquet, parquet::facts::Facts, records, samples};
use arrow_array::RecordBatch;
use arrow_schema::{Schema, SchemaRef};
use bytes::Bytes;
use forebay_core::{Error, Result};
use std::{ops::Range, sync::Arc};

/// Reads what decoding needs of a file besides its blocks.
#[derive(Debug)]
pub struct FileOpener {
    index: Arc<FileIndex>,
    inner: Opening,
}

#[derive(Debug)]
enum Opening {
    Parquet(parquet::Opener),
    Ipc(ipc::Opener),
    Nothing,
}

impl FileOpener {
    /// # Errors
    /// `Invalid` for archives ([`FileReader::of_members`]).
    pub fn new(index: Arc<FileIndex>) -> Result<Self> {
        let inner = match &index.detail {
            Detail::Parquet { footer_bytes } => {
                Opening::Parquet(parquet::Opener::new(index.size, *footer_bytes))
            }
            Detail::Ipc(places) => Opening::Ipc(ipc::Opener::new(places)),
            Detail::None
            | Detail::Unpacked(_)
            | Detail::Mds(_)
            | Detail::Sequences(_)
            | Detail::TfRecord { .. } => Opening::Nothing,
            Detail::Members(_) => {
                return Err(Error::invalid("an archive is opened by its members"));
            }
        };
        Ok(Self { index, inner })
    }

    /// # Errors
    /// `Corrupt` or `Unsupported`, with the offset; `VersionChanged` if the file is not the one
    /// that was indexed.
    pub fn step(&mut self) -> Result<Need> {
        match &mut self.inner {
            Opening::Parquet(p) => p.step(),
            Opening::Ipc(i) => i.step(),
            Opening::Nothing => Ok(Need::Done),
        }
    }

    /// # Errors
    /// As [`FileOpener::step`].
    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        match &mut self.inner {
            Opening::Parquet(p) => p.feed(offset, bytes),
            Opening::Ipc(i) => i.feed(offset, bytes),
            Opening::Nothing => Ok(()),
        }
    }

    /// The memory that finishing takes besides the bytes that were fed, once `step` says `Done`: for
    /// what an Arrow file's compressed dictionaries decompress to.
    ///
    /// # Errors
    /// As [`FileOpener::step`].
    pub fn decoded_bytes(&self) -> Result<u64> {
        match &self.inner {
            Opening::Ipc(i) => i.decoded_bytes(),
            Opening::Parquet(_) | Opening::Nothing => Ok(0),
        }
    }

    /// # Errors
    /// As [`FileOpener::step`]; `Internal` before it says `Done`.
    pub fn finish(mut self) -> Result<FileReader> {
        if self.step()? != Need::Done {
            return Err(Error::internal(
                "a file was opened before the bytes that this needs were read",
            ));
        }
        let inner = match self.inner {
            Opening::Parquet(p) => Opened::Parquet(p.finish(&self.index)?),
            Opening::Ipc(i) => Opened::Ipc(i.finish(&self.index)?),
            Opening::Nothing => Opened::Records(Arc::default()),
        };
        Ok(FileReader {
            index: self.index,
            inner,
        })
    }
}

/// A file whose blocks can be read. Shared by all its readers.
#[derive(Debug)]
pub struct FileReader {
    index: Arc<FileIndex>,
    inner: Opened,
}

#[derive(Debug)]
enum Opened {
    Parquet(parquet::Opened),
    Ipc(ipc::Opened),
    Members(Arc<MemberIndex>),
    Records(Arc<records::RowMemory>),
}

impl FileReader {
    /// For an archive whose members are known. The bytes of a compressed tar are the decompressed
    /// ones.
    ///
    /// # Errors
    /// `Invalid` if the index is not that of an archive with as many members.
    pub fn of_members(index: Arc<FileIndex>, members: Arc<MemberIndex>) -> Result<Self> {
        match &index.detail {
            Detail::Members(places) if places.members() == members.len() => {}
            Detail::Members(_) => {
                return Err(Error::version_changed(
                    "the members of the archive changed after it was indexed",
                ));
            }
            _ => {
                return Err(Error::invalid(format!(
                    "a file of the format {} does not have members",
                    index.format
                )));
            }
        }
        Ok(Self {
            index,
            inner: Opened::Members(members),
        })
    }

    /// The index used to read the file.
    pub fn index(&self) -> &Arc<FileIndex> {
        &self.index
    }

    /// Memory that it holds besides the index (and the members, which others share).
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + match &self.inner {
                Opened::Parquet(p) => p.memory_bytes(),
                Opened::Ipc(i) => i.memory_bytes(),
                Opened::Members(_) | Opened::Records(_) => 0,
            }
    }

    /// The bytes that [`FileReader::facts`] takes; `None` for formats whose files say nothing of
    /// their columns.
    pub fn facts_at(&self) -> Option<Range<u64>> {
        match self.index.detail {
            Detail::Parquet { footer_bytes } => {
                Some(parquet::footer_of(self.index.size, footer_bytes))
            }
            _ => None,
        }
    }

    /// What the file says of these columns, by their names and types in a dataset.
    ///
    /// # Errors
    /// `Corrupt` where it cannot be understood: then the rows themselves have to be looked at.
    pub fn facts(&self, bytes: &[u8], columns: &Schema) -> Result<Facts> {
        match &self.inner {
            Opened::Parquet(p) => p.facts(&self.index, bytes, columns),
            _ => Err(Error::internal("a file that says nothing of its columns")),
        }
    }

    /// Starts reading rows of a block.
    ///
    /// # Errors
    /// `RangeNotSatisfiable` for a missing block or row; `Invalid` for missing columns (in tars
    /// these are null).
    pub fn read(&self, block: usize, rows: Rows, projection: &Projection) -> Result<BlockRead> {
        let index = &self.index;
        if block >= index.blocks.blocks() {
            let n = index.blocks.blocks();
            return Err(Error::range_not_satisfiable(format!(
                "block {block} was requested, but the file has {n} blocks"
            )));
        }
        rows.check(index.blocks.block_rows(block))?;
        let inner = match &self.inner {
            Opened::Parquet(p) => {
                Reading::Parquet(Box::new(p.read(index, block, rows, projection)?))
            }
            Opened::Ipc(i) => Reading::Ipc(i.read(index, block, rows, projection)?),
            Opened::Members(members) => Reading::Members(samples::Read::new(
                index,
                members.clone(),
                block,
                rows,
                projection,
            )?),
            Opened::Records(memory) => Reading::Records(records::Read::new(
                index.clone(),
                memory.clone(),
                block,
                rows,
                self.schema(projection)?,
            )?),
        };
        Ok(inner.into())
    }

    /// Starts reading rows of a block for a dataset of several files, whose columns are `wanted`.
    /// The batch has those of them that this file has, in the wanted types as far as it can
    /// ([`cast`](super::cast) does the rest).
    ///
    /// # Errors
    /// As [`FileReader::read`].
    pub fn read_for(&self, block: usize, rows: Rows, wanted: &SchemaRef) -> Result<BlockRead> {
        let index = &self.index;
        let names = || wanted.fields().iter().map(|f| f.name());
        match (index.format, &self.inner) {
            (Format::Jsonl | Format::Csv | Format::Tsv, Opened::Records(memory))
                if block < index.blocks.blocks() =>
            {
                rows.check(index.blocks.block_rows(block))?;
                let (index, memory) = (index.clone(), memory.clone());
                let read = records::Read::new(index, memory, block, rows, wanted.clone())?;
                return Ok(Reading::Records(read).into());
            }
            // Everything that the file lacks is null.
            (Format::Tar, _) => {
                let columns = names().cloned().collect();
                return self.read(block, rows, &Projection::Columns(columns));
            }
            _ => {}
        }
        let own = index.schema.fields();
        if own.iter().map(|f| f.name()).eq(names()) {
            return self.read(block, rows, &Projection::All);
        }
        let there = names().filter(|name| index.schema.column_with_name(name).is_some());
        let columns = there.cloned().collect();
        self.read(block, rows, &Projection::Columns(columns))
    }

    /// The schema of what [`FileReader::read`] returns.
    ///
    /// # Errors
    /// As [`FileReader::read`].
    pub fn schema(&self, projection: &Projection) -> Result<SchemaRef> {
        match self.index.format {
            Format::Tar | Format::Zip => Ok(samples::schema(&self.index, projection)),
            Format::Jsonl => projection.schema_with(&self.index.schema, &jsonl::line_field()),
            _ => projection.schema(&self.index.schema),
        }
    }
}

/// Reads rows of one block; see the [module](super) for how it is fed.
#[derive(Debug)]
pub struct BlockRead {
    inner: Reading,
    /// Memory that is available for what is decoded.
    allowed: u64,
}

impl From<Reading> for BlockRead {
    fn from(inner: Reading) -> Self {
        Self {
            inner,
            allowed: u64::MAX,
        }
    }
}

#[derive(Debug)]
enum Reading {
    Parquet(Box<parquet::Read>),
    Ipc(ipc::Read),
    Members(samples::Read),
    Records(records::Read),
}

macro_rules! each {
    ($inner:expr, $x:ident => $do:expr) => {
        match $inner {
            Reading::Parquet($x) => $do,
            Reading::Ipc($x) => $do,
            Reading::Members($x) => $do,
            Reading::Records($x) => $do,
        }
    };
}

impl BlockRead {
    /// What is needed next. This may decode, which takes time.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`.
    pub fn step(&mut self) -> Result<Need> {
        let expected = match &mut self.inner {
            // These decode step by step.
            Reading::Parquet(read) => return read.step(),
            Reading::Records(read) => return read.step(self.allowed),
            // These decode when they finish.
            Reading::Ipc(read) => match read.step()? {
                Need::Done => read.decoded_bytes()?,
                need => return Ok(need),
            },
            Reading::Members(read) => match read.step()? {
                Need::Done => read.decoded_bytes(),
                need => return Ok(need),
            },
        };
        Ok(match expected > self.allowed {
            true => Need::Memory(expected),
            false => Need::Done,
        })
    }

    /// # Errors
    /// As [`BlockRead::step`].
    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        each!(&mut self.inner, x => x.feed(offset, bytes))
    }

    /// Bounds the decoded bytes; the reader asks for more ([`Need::Memory`]) before decoding much
    /// beyond the bound. Without this call the only bound is the limit for a block.
    pub fn allow(&mut self, bytes: u64) {
        self.allowed = bytes;
        if let Reading::Parquet(read) = &mut self.inner {
            read.allow(bytes);
        }
    }

    /// Has text and bytes come as views ([`DataType::Utf8View`](arrow_schema::DataType::Utf8View),
    /// `BinaryView`) of what they were unpacked to, where all rows are read and that saves a copy.
    /// Before the first step.
    pub fn let_views(&mut self) {
        if let Reading::Parquet(read) = &mut self.inner {
            read.let_views();
        }
    }

    /// After [`Need::Memory`]: goes on with less, if that was a guess. Whether it was.
    pub fn forget_guess(&mut self) -> bool {
        match &mut self.inner {
            Reading::Records(read) => read.forget_guess(),
            _ => false,
        }
    }

    /// Whether it holds nothing decoded when it asks for memory ([`Need::Memory`]).
    pub fn begins_anew(&self) -> bool {
        !matches!(self.inner, Reading::Parquet(_))
    }

    /// The rows, in order.
    ///
    /// # Errors
    /// As [`BlockRead::step`]; `TooLarge` if they do not fit in one batch; `Internal` before
    /// `Done`.
    pub fn finish(self) -> Result<RecordBatch> {
        let mut pieces = self.finish_pieces()?;
        match (pieces.pop(), pieces.is_empty()) {
            (Some(only), true) => Ok(only),
            (Some(last), false) => {
                let schema = last.schema();
                pieces.push(last);
                arrow_select::concat::concat_batches(&schema, &pieces).map_err(arrow_error)
            }
            (None, _) => Err(Error::internal("a block was read as no batch at all")),
        }
    }

    /// The rows, in order, in the decoded batches: at least one.
    ///
    /// # Errors
    /// As [`BlockRead::step`]; `TooLarge` if those of one batch do not fit; `Internal` before
    /// `Done`.
    pub fn finish_pieces(mut self) -> Result<Vec<RecordBatch>> {
        if self.step()? != Need::Done {
            return Err(Error::internal(
                "rows were asked for before their bytes were read",
            ));
        }
        match self.inner {
            Reading::Parquet(read) => read.finish(),
            Reading::Ipc(read) => read.finish().map(|batch| vec![batch]),
            Reading::Members(read) => read.finish().map(|batch| vec![batch]),
            Reading::Records(read) => read.finish().map(|batch| vec![batch]),
        }
    }
}
