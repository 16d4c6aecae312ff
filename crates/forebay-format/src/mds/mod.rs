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
        BlockIndex, Detail, FileIndex, Format, IndexOptions,
        headed::{self, Headed},
        json_field,
    },
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use forebay_core::{Error, Result, limits, name::shorten};
use serde::Deserialize;
use std::{collections::HashSet, sync::Arc};

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

/// What the head of a shard says.
#[derive(Debug)]
pub(crate) struct Head {
    blocks: BlockIndex,
    schema: SchemaRef,
    sizes: Vec<Option<u32>>,
    /// Where the last sample ends.
    end: u64,
}

/// How a head is read.
#[derive(Debug)]
pub(crate) struct Rules(IndexOptions);

impl Rules {
    pub fn new(options: &IndexOptions) -> Self {
        Self(options.clone())
    }
}

impl Headed for Rules {
    type Head = Head;

    const FILE: &'static str = "an MDS shard";
    const HEAD: &'static str = "it";

    fn corrupt(what: &str) -> Error {
        corrupt(what)
    }

    fn head_len(&self, begin: &[u8]) -> Result<Option<u64>> {
        let Some((begin, _)) = begin.split_first_chunk::<BEGIN_BYTES>() else {
            return Ok(None);
        };
        let [a, b, c, d, e, f, g, h] = *begin;
        let samples = u64::from(u32::from_le_bytes([a, b, c, d]));
        let first = u64::from(u32::from_le_bytes([e, f, g, h]));
        if first < 4 + 4 * (samples + 1) {
            return Err(corrupt(&format!(
                "its first sample begins at offset {first}, before the end of the list of \
                 {samples} samples"
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

    /// Blocks take no more memory than the list that they are made of, so they are made at once.
    /// Whether the list ends where the file does, [`Headed::index`] sees.
    fn parse(&self, head: &[u8], _size: Option<u64>) -> Result<Option<Head>> {
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
        if let Some(n) = (1..=samples).find(|&n| place(n) <= place(n - 1)) {
            return Err(corrupt(&format!(
                "sample {} begins at offset {} and ends at {}",
                n - 1,
                place(n - 1),
                place(n)
            )));
        }
        Ok(Some(Head {
            blocks: headed::runs(samples, place, &self.0)?,
            schema: self.0.schemas.share(schema),
            sizes,
            end: place(samples),
        }))
    }

    fn index(&self, head: Head, size: u64, unpacked: Option<u64>) -> Result<FileIndex> {
        let there = unpacked.unwrap_or(size);
        if head.end != there {
            return Err(Error::corrupt(format!(
                "the samples of the MDS shard end at offset {}, but it is {there} bytes long",
                head.end
            ))
            .hint("download or write the shard again"));
        }
        Ok(FileIndex {
            format: Format::Mds,
            size,
            blocks: head.blocks,
            schema: head.schema,
            detail: Detail::Mds(Layout {
                sizes: head.sizes,
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
