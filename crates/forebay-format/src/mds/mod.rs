//! MDS: the shards of MosaicML's Streaming.
//!
//! `samples u32 | where each sample begins, and where the last one ends, u32 each | JSON of the
//! columns | samples`, little endian. A sample: the sizes (u32) of those of its values whose column
//! has no fixed size, then its values, in the order of the columns.
//!
//! A shard says all of it at its beginning, so `index.json` beside it is not needed. What is kept is
//! where every run of samples of at least a piece begins, and the sizes of the columns. Numbers and
//! texts become columns of their types; what has to be decoded further (arrays, pictures) stays the
//! bytes that it is in the shard.

mod columns;

pub(crate) use columns::Builder;

use crate::{
    index::codec::{Reader, put},
    tabular::{
        BlockIndex, BlockIndexBuilder, Detail, FileIndex, Format, Held, IndexOptions, Need,
        json_field,
    },
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use forebay_core::{Error, Result, limits, name::shorten};
use serde::Deserialize;
use std::{collections::HashSet, ops::Range, sync::Arc};

/// How much of the beginning is read first.
const FIRST_READ_BYTES: u64 = 64 << 10;
/// The number of samples, and where the first one begins.
const BEGIN_BYTES: usize = 8;
/// The key under which a column has its encoding, where that is not the type of the column.
const ENCODING: &str = "mds:encoding";

/// The sizes of a sample's values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Layout {
    /// Of each column; `None` if each value has its own.
    sizes: Vec<Option<u32>>,
    /// What a shard that is compressed as a whole unpacks to.
    unpacked: Option<u64>,
    /// Which version of the file that describes this one it is from; 0 if there is none.
    beside: u64,
}

impl Layout {
    /// Each value of as many columns has its own size.
    pub fn of_variable(columns: usize, unpacked: Option<u64>, beside: u64) -> Self {
        Self {
            sizes: vec![None; columns],
            unpacked,
            beside,
        }
    }

    pub fn beside(&self) -> u64 {
        self.beside
    }

    pub fn unpacked(&self) -> Option<u64> {
        self.unpacked
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        put(out, self.sizes.len() as u64);
        let or_none = |size: Option<u64>| size.map_or(0, |size| size + 1);
        for &size in &self.sizes {
            put(out, or_none(size.map(u64::from)));
        }
        put(out, or_none(self.unpacked));
        put(out, self.beside);
    }

    pub fn decode(r: &mut Reader<'_>) -> Option<Self> {
        let count = usize::try_from(r.number()?).ok()?;
        (1..=limits::CSV_COLUMNS_MAX)
            .contains(&count)
            .then_some(())?;
        let sizes = (0..count).map(|_| match r.number()? {
            0 => Some(None),
            size => Some(Some(u32::try_from(size - 1).ok()?)),
        });
        Some(Self {
            sizes: sizes.collect::<Option<_>>()?,
            unpacked: r.number()?.checked_sub(1),
            beside: r.number()?,
        })
    }

    /// The bytes of each value of the sample that begins here, and how many it takes; `None` if it
    /// does not end in `bytes`.
    fn values<'a>(&self, bytes: &'a [u8], mut each: impl FnMut(usize, &'a [u8])) -> Option<usize> {
        let variable = self.sizes.iter().filter(|size| size.is_none()).count();
        let (given, mut rest) = bytes.split_at_checked(variable * 4)?;
        let mut given = given.as_chunks::<4>().0.iter();
        for (at, size) in self.sizes.iter().enumerate() {
            let size = match size {
                Some(size) => *size,
                None => u32::from_le_bytes(*given.next()?),
            };
            let (value, after) = rest.split_at_checked(size as usize)?;
            each(at, value);
            rest = after;
        }
        Some(bytes.len() - rest.len())
    }

    /// How many bytes the sample takes that begins here; 0 if it does not end in `bytes`.
    pub fn len(&self, bytes: &[u8]) -> usize {
        self.values(bytes, |_, _| ()).unwrap_or(0)
    }

    /// Whether these bytes are this many samples.
    pub fn check(&self, bytes: &[u8], samples: u32, offset: u64) -> Result<()> {
        let mut at = 0;
        for _ in 0..samples {
            match self.len(&bytes[at..]) {
                0 => break,
                len => at += len,
            }
        }
        if at == bytes.len() {
            return Ok(());
        }
        Err(Error::corrupt(format!(
            "the sizes of the values in the {samples} samples at offset {offset} of the file do \
             not add up to their {} bytes",
            bytes.len()
        ))
        .hint("download or write the file again"))
    }
}

/// The part of a shard's JSON that is needed to read it.
#[derive(Deserialize)]
struct Config {
    column_names: Vec<String>,
    column_encodings: Vec<String>,
    column_sizes: Vec<Option<u64>>,
}

fn corrupt(what: &str) -> Error {
    Error::corrupt(format!("the head of the MDS shard is damaged: {what}"))
        .hint("check that the file is a shard of MosaicML's Streaming, and whole")
}

/// Where the first sample begins, from the first bytes. `None`: there are not enough of them.
fn head_len(begin: &[u8]) -> Result<Option<u64>> {
    let Some((begin, _)) = begin.split_first_chunk::<BEGIN_BYTES>() else {
        return Ok(None);
    };
    let [a, b, c, d, e, f, g, h] = *begin;
    let samples = u64::from(u32::from_le_bytes([a, b, c, d]));
    let first = u64::from(u32::from_le_bytes([e, f, g, h]));
    if first < 4 + 4 * (samples + 1) {
        return Err(corrupt(&format!(
            "its first sample begins at offset {first}, before the end of the list of {samples} \
             samples"
        )));
    }
    if first > limits::FOOTER_MAX_BYTES {
        return Err(Error::unsupported(format!(
            "the head of the MDS shard is {first} bytes long; the limit is {}",
            limits::FOOTER_MAX_BYTES
        ))
        .hint("write smaller shards"));
    }
    Ok(Some(first))
}

/// What the head of a shard says.
#[derive(Debug)]
struct Head {
    blocks: BlockIndex,
    schema: SchemaRef,
    sizes: Vec<Option<u32>>,
    /// Where the last sample ends.
    end: u64,
}

impl Head {
    /// `head` ends where the first sample begins.
    fn parse(head: &[u8], options: &IndexOptions) -> Result<Self> {
        let (samples, rest) = head
            .split_first_chunk::<4>()
            .ok_or_else(|| corrupt("it is cut off"))?;
        let samples = u32::from_le_bytes(*samples) as usize;
        let (places, json) = rest
            .split_at_checked(4 * (samples + 1))
            .ok_or_else(|| corrupt("it is cut off"))?;
        let (schema, sizes) = columns_of(json)?;
        let places = places.as_chunks::<4>().0;
        let place = |n: usize| u64::from(u32::from_le_bytes(places[n]));
        let end = place(samples);
        let mut blocks = BlockIndexBuilder::new(end);
        let mut first = 0;
        for n in 1..=samples {
            if place(n) <= place(n - 1) {
                return Err(corrupt(&format!(
                    "sample {} begins at offset {} and ends at {}",
                    n - 1,
                    place(n - 1),
                    place(n)
                )));
            }
            let is_enough = place(n) - place(first) >= options.piece_bytes
                || n - first >= options.block_rows as usize;
            if is_enough || n == samples {
                let bytes = place(first)..place(n);
                let rows = (n - first) as u64;
                blocks.run(rows, bytes, options.block_bytes, options.block_rows)?;
                first = n;
            }
        }
        Ok(Self {
            blocks: blocks.finish(),
            schema: options.schemas.share(schema),
            sizes,
            end,
        })
    }

    /// `size` is that of the file, `unpacked` what it unpacks to if it is compressed.
    fn index(self, size: u64, unpacked: Option<u64>) -> Result<FileIndex> {
        let there = unpacked.unwrap_or(size);
        if self.end != there {
            return Err(Error::corrupt(format!(
                "the samples of the MDS shard end at offset {}, but it is {there} bytes long",
                self.end
            ))
            .hint("download or write the shard again"));
        }
        Ok(FileIndex {
            format: Format::Mds,
            size,
            blocks: self.blocks,
            schema: self.schema,
            detail: Detail::Mds(Layout {
                sizes: self.sizes,
                unpacked,
                beside: 0,
            }),
        })
    }
}

/// The columns, and the sizes of their values.
fn columns_of(json: &[u8]) -> Result<(SchemaRef, Vec<Option<u32>>)> {
    let config: Config = serde_json::from_slice(json)
        .map_err(|e| corrupt(&format!("its columns cannot be parsed: {e}")))?;
    let Config {
        column_names: names,
        column_encodings: encodings,
        column_sizes: sizes,
    } = config;
    if names.is_empty() || names.len() != encodings.len() || names.len() != sizes.len() {
        return Err(corrupt(&format!(
            "it has {} names, {} encodings and {} sizes of columns",
            names.len(),
            encodings.len(),
            sizes.len()
        )));
    }
    if names.len() > limits::CSV_COLUMNS_MAX {
        return Err(Error::unsupported(format!(
            "the MDS shard has {} columns; the limit is {}",
            names.len(),
            limits::CSV_COLUMNS_MAX
        )));
    }
    let (mut fields, mut seen) = (Vec::with_capacity(names.len()), HashSet::new());
    for ((name, encoding), size) in names.iter().zip(&encodings).zip(&sizes) {
        let field = field_of(name, encoding);
        if !seen.insert(name.as_str()) {
            return Err(corrupt(&format!("it has {:?} twice", shorten(name))));
        }
        let width = field.data_type().primitive_width();
        if let Some(width) = width.filter(|&width| *size != Some(width as u64)) {
            return Err(corrupt(&format!(
                "the column {:?} is {}, of {width} bytes, but its size is said to be {size:?}",
                shorten(name),
                shorten(encoding)
            )));
        }
        fields.push(field);
    }
    let narrow = |size: &Option<u64>| size.map(u32::try_from).transpose();
    let sizes = sizes.iter().map(narrow).collect::<Result<Vec<_>, _>>();
    let sizes = sizes.map_err(|_| corrupt("the size of a column is larger than any shard"))?;
    if sizes.iter().all(|&size| size == Some(0)) {
        return Err(corrupt("its samples have no bytes"));
    }
    Ok((Arc::new(Schema::new(fields)), sizes))
}

fn field_of(name: &str, encoding: &str) -> Field {
    let of = |ty| Field::new(name, ty, false);
    match encoding {
        "bytes" => of(DataType::Binary),
        "str" | "str_int" | "str_float" | "str_decimal" => of(DataType::Utf8),
        "json" => json_field(of(DataType::Utf8)),
        "int" | "int64" => of(DataType::Int64),
        "int8" => of(DataType::Int8),
        "int16" => of(DataType::Int16),
        "int32" => of(DataType::Int32),
        "uint8" => of(DataType::UInt8),
        "uint16" => of(DataType::UInt16),
        "uint32" => of(DataType::UInt32),
        "uint64" => of(DataType::UInt64),
        "float16" => of(DataType::Float16),
        "float32" => of(DataType::Float32),
        "float64" => of(DataType::Float64),
        other => of(DataType::Binary).with_metadata([(ENCODING, other)]),
    }
}

#[derive(Debug)]
pub(crate) struct Indexer {
    size: u64,
    options: IndexOptions,
    held: Held,
    head: Option<Head>,
}

impl Indexer {
    pub fn new(size: u64, options: &IndexOptions) -> Self {
        Self {
            size,
            options: options.clone(),
            held: Held::default(),
            head: None,
        }
    }

    pub fn step(&mut self) -> Result<Need> {
        if self.head.is_some() {
            return Ok(Need::Done);
        }
        let first = 0..self.size.min(FIRST_READ_BYTES);
        let Some(begin) = self.held.get(&first) else {
            return Ok(Need::one(first));
        };
        let Some(end) = head_len(&begin)? else {
            return Err(corrupt("it is cut off"));
        };
        if end > self.size {
            return Err(corrupt("it is longer than the file"));
        }
        let all: Range<u64> = 0..end;
        let Some(head) = self.held.get(&all) else {
            return Ok(Need::one(all));
        };
        self.head = Some(Head::parse(&head, &self.options)?);
        self.held.clear();
        Ok(Need::Done)
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.held.put(offset, bytes);
        Ok(())
    }

    pub fn finish(self) -> Result<FileIndex> {
        self.head
            .ok_or_else(|| Error::internal("an MDS shard was indexed before its head was read"))?
            .index(self.size, None)
    }
}

/// Indexes what a compressed shard unpacks to.
#[derive(Debug)]
pub(crate) struct Unpacked {
    packed: u64,
    options: IndexOptions,
    /// The beginning, until it was parsed.
    held: Vec<u8>,
    head: Option<Head>,
    at: u64,
}

impl Unpacked {
    pub fn new(packed: u64, options: &IndexOptions) -> Self {
        Self {
            packed,
            options: options.clone(),
            held: Vec::new(),
            head: None,
            at: 0,
        }
    }

    pub fn memory_after(&self, bytes: usize) -> usize {
        let (needed, capacity) = (self.held.len() + bytes, self.held.capacity());
        match self.head.is_some() || needed <= capacity {
            true => capacity,
            false => needed.max(2 * capacity),
        }
    }

    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        self.at += bytes.len() as u64;
        if self.head.is_some() {
            return Ok(());
        }
        let capacity = self.memory_after(bytes.len());
        self.held.reserve_exact(capacity - self.held.len());
        self.held.extend_from_slice(bytes);
        if let Some(end) = head_len(&self.held)?
            && let Some(head) = self.held.get(..end as usize)
        {
            self.head = Some(Head::parse(head, &self.options)?);
            self.held = Vec::new();
        }
        Ok(())
    }

    pub fn finish(self) -> Result<FileIndex> {
        self.head
            .ok_or_else(|| corrupt("it is cut off"))?
            .index(self.packed, Some(self.at))
    }
}
