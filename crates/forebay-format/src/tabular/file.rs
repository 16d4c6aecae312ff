//! The index of one file of any format, and the parser that builds it.

use super::{BlockIndex, Format, Need, Schemas, format, headed};
use crate::{
    csv,
    example::ExampleSpec,
    index::codec::{Reader, put},
    ipc, jsonl, lines, litdata, mds, megatron, parquet, samples, tfrecord,
};
use arrow_schema::SchemaRef;
use bytes::Bytes;
use forebay_core::{Error, Result, limits};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// How files are indexed.
#[derive(Clone, Debug)]
pub struct IndexOptions {
    /// The schemas seen so far: one instance for all files of a dataset.
    pub schemas: Arc<Schemas>,
    /// TFRecord: the features of `tf.train.Example` as columns, not the bytes of the record.
    pub example: Option<ExampleSpec>,
    /// JSONL and CSV: the columns that the caller has named; `None` to infer them from the rows.
    pub columns: Option<SchemaRef>,
    /// Where blocks of TFRecord, JSONL, CSV and tar end.
    pub block_bytes: u64,
    /// The most rows of such a block: it ends at whichever comes first.
    pub block_rows: u32,
    /// How finely such blocks are indexed.
    pub piece_bytes: u64,
    /// litData: what describes the chunk, and how many items it has by that.
    pub described: Option<(Arc<litdata::Described>, u64)>,
    /// litData: the tokens of a row, if not those of an item.
    pub block_tokens: Option<u32>,
}

impl Default for IndexOptions {
    fn default() -> Self {
        Self {
            schemas: Arc::default(),
            example: None,
            columns: None,
            block_bytes: limits::BLOCK_TARGET_BYTES,
            block_rows: limits::BLOCK_TARGET_ROWS,
            piece_bytes: limits::PIECE_TARGET_BYTES,
            described: None,
            block_tokens: None,
        }
    }
}

/// What is known about a file: its blocks, its schema, and where the parts are that readers need.
#[derive(Clone, Debug, PartialEq)]
pub struct FileIndex {
    pub(crate) format: Format,
    pub(crate) size: u64,
    pub(crate) blocks: BlockIndex,
    pub(crate) schema: SchemaRef,
    pub(crate) detail: Detail,
}

/// What each format keeps in addition.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Detail {
    None,
    Parquet {
        footer_bytes: u32,
    },
    Ipc(ipc::Places),
    Members(samples::Places),
    /// The file is compressed as a whole. This is what it unpacks to, in bytes, which is where the
    /// blocks are.
    Unpacked(u64),
    /// Sizes of values.
    Mds(mds::Layout),
    /// Lengths and documents.
    Sequences(megatron::Sequences),
    /// Whether records are decoded as `tf.train.Example`.
    TfRecord {
        example: bool,
    },
}

const MAGIC: &[u8; 4] = b"FBFI";
const VERSION: u8 = 1;

impl FileIndex {
    /// What the file is.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Bytes of the file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// For a file that is compressed as a whole, the bytes that it unpacks to: its blocks are in
    /// these, not in those of the file. (Of archives, [`MemberIndex`](crate::MemberIndex) says it.)
    pub fn unpacked_bytes(&self) -> Option<u64> {
        match self.detail {
            Detail::Unpacked(bytes) => Some(bytes),
            Detail::Mds(ref layout) => layout.unpacked(),
            Detail::Sequences(ref sequences) => sequences.unpacked(),
            _ => None,
        }
    }

    /// Its rows by block, and where their bytes are.
    pub fn blocks(&self) -> &BlockIndex {
        &self.blocks
    }

    /// All rows of the file.
    pub fn rows(&self) -> u64 {
        self.blocks.rows()
    }

    /// The columns of the file, except those that are read only when asked for by name.
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// What tells versions of the file beside this one apart that it was indexed by
    /// ([`FileIndexer::beside`]); 0 if there is none.
    pub fn beside(&self) -> u64 {
        match &self.detail {
            Detail::Sequences(sequences) => sequences.beside(),
            Detail::Mds(layout) => layout.beside(),
            _ => 0,
        }
    }

    /// Memory that it holds, without the schema, which files share.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.blocks.memory_bytes()
            + match &self.detail {
                Detail::Ipc(places) => places.memory_bytes(),
                Detail::Members(places) => places.memory_bytes(),
                Detail::Sequences(sequences) => sequences.memory_bytes(),
                _ => 0,
            }
    }

    /// The encoding for a store: versioned and checksummed; without the schema
    /// ([`encode_schema`](super::encode_schema)), which files share.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 + self.blocks.piece_count() * 8);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&[VERSION, format::code(self.format)]);
        put(&mut out, self.size);
        self.blocks.encode(&mut out);
        match &self.detail {
            Detail::None => out.push(0),
            Detail::Parquet { footer_bytes } => {
                out.push(1);
                put(&mut out, u64::from(*footer_bytes));
            }
            Detail::Ipc(places) => {
                out.push(2);
                places.encode(&mut out);
            }
            Detail::Members(places) => {
                out.push(3);
                places.encode(&mut out);
            }
            Detail::TfRecord { example } => out.extend_from_slice(&[4, u8::from(*example)]),
            Detail::Unpacked(bytes) => {
                out.push(5);
                put(&mut out, *bytes);
            }
            Detail::Mds(layout) => {
                out.push(6);
                layout.encode(&mut out);
            }
            Detail::Sequences(sequences) => {
                out.push(7);
                sequences.encode(&mut out);
            }
        }
        let sum = xxh3_64(&out);
        out.extend_from_slice(&sum.to_le_bytes());
        out
    }

    /// # Errors
    /// `Corrupt` for anything but the complete output of [`FileIndex::encode`] of this version.
    pub fn decode(bytes: &[u8], schema: SchemaRef) -> Result<Self> {
        let corrupt = |what: &str| {
            Error::corrupt(format!("a stored file index is damaged: {what}"))
                .hint("index the file again")
        };
        let Some((body, sum)) = bytes.split_last_chunk::<8>() else {
            return Err(corrupt("it is too short"));
        };
        if xxh3_64(body) != u64::from_le_bytes(*sum) {
            return Err(corrupt("its checksum does not match"));
        }
        let mut r = Reader { bytes: body };
        if r.take(4) != Some(MAGIC.as_slice()) {
            return Err(corrupt("it is not an index"));
        }
        if r.byte() != Some(VERSION) {
            return Err(corrupt("it has another version"));
        }
        Self::parse(&mut r, schema).ok_or_else(|| corrupt("it contradicts itself"))
    }

    fn parse(r: &mut Reader<'_>, schema: SchemaRef) -> Option<Self> {
        let format = format::from_code(r.byte()?)?;
        let size = r.number()?;
        // What is compressed as a whole has its rows in what it unpacks to.
        let is_text = matches!(format, Format::Jsonl | Format::Csv | Format::Tsv);
        let is_packed = matches!(
            format,
            Format::Mds | Format::LitData | Format::Tar | Format::Zip
        );
        let end = if is_text || is_packed {
            samples::OFFSETS_END
        } else {
            size
        };
        let blocks = BlockIndex::decode(r, end)?;
        let ends_by = |end: u64| (0..blocks.blocks()).all(|b| blocks.bytes(b).end <= end);
        let detail = match (r.byte()?, format) {
            (0, _) if is_text => {
                ends_by(size).then_some(())?;
                Detail::None
            }
            (6, Format::Mds | Format::LitData) => {
                let layout = mds::Layout::decode(r)?;
                ends_by(layout.unpacked().unwrap_or(size)).then_some(())?;
                Detail::Mds(layout)
            }
            (7, Format::Megatron | Format::LitData) => {
                let sequences = megatron::Sequences::decode(r, &blocks)?;
                ends_by(sequences.unpacked().unwrap_or(size)).then_some(())?;
                Detail::Sequences(sequences)
            }
            (5, _) if is_text => {
                let bytes = r.number()?;
                ends_by(bytes).then_some(())?;
                Detail::Unpacked(bytes)
            }
            (1, Format::Parquet) => {
                let footer_bytes = u32::try_from(r.number()?).ok()?;
                (u64::from(footer_bytes) + 12 <= size).then_some(())?;
                Detail::Parquet { footer_bytes }
            }
            (2, Format::ArrowFile | Format::ArrowStream) => {
                Detail::Ipc(ipc::Places::decode(r, blocks.blocks(), size)?)
            }
            (3, Format::Tar | Format::Zip) => {
                Detail::Members(samples::Places::decode(r, blocks.piece_count())?)
            }
            (4, Format::TfRecord) => Detail::TfRecord {
                example: r.byte()? == 1,
            },
            _ => return None,
        };
        r.bytes.is_empty().then_some(Self {
            format,
            size,
            blocks,
            schema,
            detail,
        })
    }
}

/// Makes the [`FileIndex`] of a file; see the [module](super) for how it is fed.
#[derive(Debug)]
pub struct FileIndexer {
    inner: Inner,
    failed: Option<Error>,
}

#[derive(Debug)]
enum Inner {
    Parquet(parquet::Indexer),
    ArrowFile(ipc::FileIndexer),
    ArrowStream(ipc::StreamIndexer),
    TfRecord(Box<tfrecord::Indexer>),
    Jsonl(Box<lines::Indexer<jsonl::Lines>>),
    Csv(Box<lines::Indexer<csv::Table>>),
    Mds(Box<headed::Indexer<mds::Rules>>),
    Megatron(Box<megatron::Indexer>),
    LitData(Box<headed::Indexer<litdata::Rules>>),
}

macro_rules! each {
    ($inner:expr, $x:ident => $do:expr) => {
        match $inner {
            Inner::Parquet($x) => $do,
            Inner::ArrowFile($x) => $do,
            Inner::ArrowStream($x) => $do,
            Inner::TfRecord($x) => $do,
            Inner::Jsonl($x) => $do,
            Inner::Csv($x) => $do,
            Inner::Mds($x) => $do,
            Inner::Megatron($x) => $do,
            Inner::LitData($x) => $do,
        }
    };
}

impl FileIndexer {
    /// For a file of `size` bytes.
    ///
    /// # Errors
    /// `Invalid` for archives, whose rows come from [`FileIndex::of_members`], and for whole
    /// objects, which need no index.
    pub fn new(format: Format, size: u64, options: &IndexOptions) -> Result<Self> {
        let inner = match format {
            Format::Parquet => Inner::Parquet(parquet::Indexer::new(size, options)),
            Format::ArrowFile => Inner::ArrowFile(ipc::FileIndexer::new(size, options)),
            Format::ArrowStream => Inner::ArrowStream(ipc::StreamIndexer::new(size, options)),
            Format::TfRecord => Inner::TfRecord(Box::new(tfrecord::Indexer::new(size, options))),
            Format::Jsonl => {
                let lines = jsonl::Lines::new(options);
                Inner::Jsonl(Box::new(lines::Indexer::new(lines, size, options)))
            }
            Format::Csv | Format::Tsv => {
                let table = csv::Table::new(format, options);
                Inner::Csv(Box::new(lines::Indexer::new(table, size, options)))
            }
            Format::Mds => Inner::Mds(Box::new(headed::Indexer::new(
                mds::Rules::new(options),
                size,
            ))),
            Format::LitData => Inner::LitData(Box::new(headed::Indexer::new(
                litdata::Rules::new(options)?,
                size,
            ))),
            Format::Megatron => {
                return Err(Error::invalid(format!(
                    "a file of the format {format} is indexed by the file beside it"
                )));
            }
            Format::Objects | Format::Tar | Format::Zip => {
                return Err(
                    Error::invalid(format!("{format} is not indexed as a file of rows")).hint(
                        "archives are indexed by their members, and an object of its own is \
                        one row",
                    ),
                );
            }
        };
        Ok(Self {
            inner,
            failed: None,
        })
    }

    /// For a file of `size` bytes that another one describes, which has `beside_size` bytes and
    /// which this is fed with. `beside` is a hash of its version ([`FileIndex::beside`]).
    ///
    /// # Errors
    /// `Invalid` for formats whose files describe themselves.
    pub fn beside(
        format: Format,
        size: u64,
        (beside_size, beside): (u64, u64),
        options: &IndexOptions,
    ) -> Result<Self> {
        let inner = match format {
            Format::Megatron => {
                let indexer = megatron::Indexer::new(size, beside_size, beside, options);
                Inner::Megatron(Box::new(indexer))
            }
            _ => {
                return Err(Error::invalid(format!(
                    "a file of the format {format} is not indexed by a file beside it"
                )));
            }
        };
        Ok(Self {
            inner,
            failed: None,
        })
    }

    /// What is needed next.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the offset; after that, the same again.
    pub fn step(&mut self) -> Result<Need> {
        if let Some(e) = &self.failed {
            return Err(e.clone());
        }
        each!(&mut self.inner, x => x.step()).inspect_err(|e| self.failed = Some(e.clone()))
    }

    /// Bytes that begin at `offset`.
    ///
    /// # Errors
    /// As [`FileIndexer::step`].
    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        if let Some(e) = &self.failed {
            return Err(e.clone());
        }
        each!(&mut self.inner, x => x.feed(offset, bytes))
            .inspect_err(|e| self.failed = Some(e.clone()))
    }

    /// The index, after [`FileIndexer::step`] has said `Done`.
    ///
    /// # Errors
    /// As [`FileIndexer::step`]; `Internal` before it.
    pub fn finish(mut self) -> Result<FileIndex> {
        match self.step()? {
            Need::Done => each!(self.inner, x => x.finish()),
            Need::Memory(_) | Need::Ranges(_) => Err(Error::internal(
                "an index was asked for before its file was read",
            )),
        }
    }
}

/// Makes the [`FileIndex`] of a file that is compressed as a whole
/// ([`format::packed`](super::format::packed)): fed with what it unpacks to, from front to back.
///
/// Invariant: it holds the bytes of one unfinished row (of MDS and litData, the head) and some 100 KiB, at most
/// twice.
#[derive(Debug)]
pub struct UnpackedIndexer {
    inner: Unpacked,
}

#[derive(Debug)]
enum Unpacked {
    Jsonl(Box<lines::Unpacked<jsonl::Lines>>),
    Csv(Box<lines::Unpacked<csv::Table>>),
    Mds(Box<headed::Unpacked<mds::Rules>>),
    LitData(Box<headed::Unpacked<litdata::Rules>>),
}

macro_rules! each_unpacked {
    ($inner:expr, $x:ident => $do:expr) => {
        match $inner {
            Unpacked::Jsonl($x) => $do,
            Unpacked::Csv($x) => $do,
            Unpacked::Mds($x) => $do,
            Unpacked::LitData($x) => $do,
        }
    };
}

impl UnpackedIndexer {
    /// For a file of `size` bytes, as it is stored.
    ///
    /// # Errors
    /// `Invalid` for a format of which compressed files are not read.
    pub fn new(format: Format, size: u64, options: &IndexOptions) -> Result<Self> {
        let inner = match format {
            Format::Jsonl => {
                let lines = jsonl::Lines::new(options);
                Unpacked::Jsonl(Box::new(lines::Unpacked::new(lines, size, options)))
            }
            Format::Csv | Format::Tsv => {
                let table = csv::Table::new(format, options);
                Unpacked::Csv(Box::new(lines::Unpacked::new(table, size, options)))
            }
            Format::Mds => Unpacked::Mds(Box::new(headed::Unpacked::new(
                mds::Rules::new(options),
                size,
            ))),
            Format::LitData => Unpacked::LitData(Box::new(headed::Unpacked::new(
                litdata::Rules::new(options)?,
                size,
            ))),
            _ => {
                return Err(Error::invalid(format!(
                    "files of the format {format} are not read when they are compressed as a whole"
                ))
                .hint("store them uncompressed"));
            }
        };
        Ok(Self { inner })
    }

    /// The memory that it holds after [`UnpackedIndexer::push`] of this many bytes.
    pub fn memory_after(&self, bytes: usize) -> usize {
        each_unpacked!(&self.inner, x => x.memory_after(bytes))
    }

    /// The next bytes.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the place; after that, it is of no use any more.
    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        each_unpacked!(&mut self.inner, x => x.push(bytes))
    }

    /// The index, when all bytes were pushed.
    ///
    /// # Errors
    /// As [`UnpackedIndexer::push`].
    pub fn finish(self) -> Result<FileIndex> {
        each_unpacked!(self.inner, x => x.finish())
    }
}
