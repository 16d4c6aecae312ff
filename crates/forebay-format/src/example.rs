//! `tf.train.Example` as columns.
//!
//! A small reader of the three kinds of Protocol Buffers messages that make up an example. Unknown
//! fields are skipped, lists may be packed or not, and if a feature's name is repeated the last one
//! counts, as in every reader of the format.
//!
//! Unless told otherwise, features become columns of lists with the type that they have in the
//! first records, because a few records do not determine a list's length. If told
//! ([`ExampleSpec`]), a feature is a single value, a list, or text. A feature that a record lacks,
//! or has without values, is null; one of another type, or with several values where one is
//! expected, is an error that names it.

use crate::{
    records::{Room, Stop},
    tabular::arrow_error,
};
use arrow_array::{
    ArrayRef, RecordBatch,
    builder::{
        ArrayBuilder, BinaryBuilder, Float32Builder, Int64Builder, ListBuilder, StringBuilder,
    },
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
pub use forebay_core::format::{ExampleSpec, FeatureType};
use forebay_core::{Error, ErrorKind, Result, limits, name::shorten};
use std::{collections::BTreeMap, sync::Arc};

fn data_type(feature: FeatureType) -> DataType {
    let list = |item| DataType::List(Arc::new(Field::new("item", item, true)));
    match feature {
        FeatureType::Bytes => DataType::Binary,
        FeatureType::Text => DataType::Utf8,
        FeatureType::Float => DataType::Float32,
        FeatureType::Int64 => DataType::Int64,
        FeatureType::BytesList => list(DataType::Binary),
        FeatureType::TextList => list(DataType::Utf8),
        FeatureType::FloatList => list(DataType::Float32),
        FeatureType::Int64List => list(DataType::Int64),
    }
}

/// The columns, in the order of names; each may be null, because a record may lack the feature.
pub fn schema(spec: &ExampleSpec) -> SchemaRef {
    Arc::new(Schema::new(
        spec.features
            .iter()
            .map(|(name, ty)| Field::new(name, data_type(*ty), true))
            .collect::<Vec<_>>(),
    ))
}

/// The features that these columns belong to.
///
/// # Errors
/// `Corrupt` for a column that cannot be a feature.
pub fn of_schema(schema: &Schema) -> Result<ExampleSpec> {
    let features = schema
        .fields()
        .iter()
        .map(|f| Ok((f.name().clone(), feature_type(f.data_type())?)));
    Ok(ExampleSpec {
        features: features.collect::<Result<_>>()?,
    })
}

fn feature_type(ty: &DataType) -> Result<FeatureType> {
    FeatureType::ALL
        .into_iter()
        .find(|f| data_type(*f) == *ty)
        .ok_or_else(|| {
            Error::corrupt(format!(
                "a column of type {ty} cannot be a feature of tf.train.Example"
            ))
        })
}

/// The three kinds of lists, by their field numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Bytes = 1,
    Float = 2,
    Int64 = 3,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Bytes => "bytes",
            Kind::Float => "float",
            Kind::Int64 => "int64",
        }
    }
}

/// A value of a field as encoded in the message.
enum Wire<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    Fixed32([u8; 4]),
    Other,
}

/// The fields of a message.
struct Message<'a> {
    rest: &'a [u8],
}

impl<'a> Message<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut v = 0u64;
        for shift in (0..64).step_by(7) {
            let (&b, rest) = self.rest.split_first()?;
            self.rest = rest;
            v |= u64::from(b & 0x7f) << shift;
            if b < 0x80 {
                return Some(v);
            }
        }
        None
    }

    fn take(&mut self, n: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(usize::try_from(n).ok()?)?;
        self.rest = rest;
        Some(taken)
    }

    /// The next field, `None` at the end.
    fn next(&mut self) -> Result<Option<(u64, Wire<'a>)>> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        self.field()
            .map(Some)
            .ok_or_else(|| Error::corrupt("it is not a tf.train.Example, or it is damaged"))
    }

    fn field(&mut self) -> Option<(u64, Wire<'a>)> {
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Wire::Varint(self.varint()?),
            1 => self.take(8).map(|_| Wire::Other)?,
            2 => {
                let len = self.varint()?;
                Wire::Bytes(self.take(len)?)
            }
            5 => Wire::Fixed32(self.take(4)?.try_into().ok()?),
            _ => return None,
        };
        (tag >> 3 != 0).then_some((tag >> 3, value))
    }
}

/// Each feature of an example: its name, and its message.
fn each_feature<'a>(
    example: &'a [u8],
    mut f: impl FnMut(&'a [u8], &'a [u8]) -> Result<()>,
) -> Result<()> {
    let mut example = Message { rest: example };
    while let Some((number, value)) = example.next()? {
        let (1, Wire::Bytes(features)) = (number, value) else {
            continue;
        };
        let mut features = Message { rest: features };
        while let Some((number, value)) = features.next()? {
            let (1, Wire::Bytes(entry)) = (number, value) else {
                continue;
            };
            let (mut name, mut feature): (&[u8], &[u8]) = (b"", b"");
            let mut entry = Message { rest: entry };
            while let Some((number, value)) = entry.next()? {
                match (number, value) {
                    (1, Wire::Bytes(n)) => name = n,
                    (2, Wire::Bytes(v)) => feature = v,
                    _ => {}
                }
            }
            f(name, feature)?;
        }
    }
    Ok(())
}

/// The kind of a feature's list, and its message; the last one counts.
fn list_of(feature: &[u8]) -> Result<Option<(Kind, &[u8])>> {
    let mut found = None;
    let mut feature = Message { rest: feature };
    while let Some((number, value)) = feature.next()? {
        if let Wire::Bytes(list) = value {
            let kind = match number {
                1 => Kind::Bytes,
                2 => Kind::Float,
                3 => Kind::Int64,
                _ => continue,
            };
            found = Some((kind, list));
        }
    }
    Ok(found)
}

fn each_bytes<'a>(list: &'a [u8], mut f: impl FnMut(&'a [u8])) -> Result<()> {
    let mut list = Message { rest: list };
    while let Some((number, value)) = list.next()? {
        if let (1, Wire::Bytes(v)) = (number, value) {
            f(v);
        }
    }
    Ok(())
}

fn each_float(list: &[u8], mut f: impl FnMut(f32)) -> Result<()> {
    let mut list = Message { rest: list };
    while let Some((number, value)) = list.next()? {
        match (number, value) {
            (1, Wire::Fixed32(v)) => f(f32::from_le_bytes(v)),
            (1, Wire::Bytes(packed)) => {
                let (values, rest) = packed.as_chunks::<4>();
                if !rest.is_empty() {
                    return Err(Error::corrupt("a list of floats is cut off"));
                }
                values.iter().for_each(|v| f(f32::from_le_bytes(*v)));
            }
            _ => {}
        }
    }
    Ok(())
}

fn each_int(list: &[u8], mut f: impl FnMut(i64)) -> Result<()> {
    let mut list = Message { rest: list };
    while let Some((number, value)) = list.next()? {
        match (number, value) {
            (1, Wire::Varint(v)) => f(v as i64),
            (1, Wire::Bytes(packed)) => {
                let mut packed = Message { rest: packed };
                while !packed.rest.is_empty() {
                    f(packed
                        .varint()
                        .ok_or_else(|| Error::corrupt("a list of integers is cut off"))?
                        as i64);
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// The features of the first records.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    kinds: BTreeMap<String, Kind>,
}

impl Seen {
    pub fn see(&mut self, example: &[u8]) -> Result<()> {
        each_feature(example, |name, feature| {
            let Some((kind, _)) = list_of(feature)? else {
                return Ok(());
            };
            let name = String::from_utf8_lossy(name);
            match self.kinds.get(&*name) {
                Some(&before) if before != kind => Err(Error::corrupt(format!(
                    "the feature {:?} is a list of {} here, and a list of {} in an earlier record",
                    shorten(&name),
                    kind.name(),
                    before.name()
                ))),
                Some(_) => Ok(()),
                None if self.kinds.len() >= limits::EXAMPLE_FEATURES_MAX => {
                    Err(Error::unsupported(format!(
                        "the records have more than {} features",
                        limits::EXAMPLE_FEATURES_MAX
                    ))
                    .hint("name the features to read"))
                }
                None => {
                    self.kinds.insert(name.into_owned(), kind);
                    Ok(())
                }
            }
        })
    }

    pub fn schema(&self) -> SchemaRef {
        let features = self.kinds.iter().map(|(name, kind)| {
            let ty = match kind {
                Kind::Bytes => FeatureType::BytesList,
                Kind::Float => FeatureType::FloatList,
                Kind::Int64 => FeatureType::Int64List,
            };
            (name.clone(), ty)
        });
        schema(&ExampleSpec {
            features: features.collect(),
        })
    }
}

/// Makes a batch of examples.
pub(crate) struct Builder {
    schema: SchemaRef,
    columns: Vec<Column>,
    by_name: BTreeMap<Vec<u8>, usize>,
    /// Bytes of all records. No column can have more values or bytes than this, so no offset passes
    /// 2 GiB if this does not.
    bytes: u64,
    rows: usize,
}

/// Builders of bytes and of text begin with so much room.
const BUILDER_BYTES: u64 = 1024;

struct Column {
    ty: FeatureType,
    /// Of values that are appended as a whole: how many bytes there are, and room for how many.
    bytes: u64,
    capacity: u64,
    builder: AnyBuilder,
}

enum AnyBuilder {
    Bytes(BinaryBuilder),
    Text(StringBuilder),
    Float(Float32Builder),
    Int64(Int64Builder),
    BytesList(ListBuilder<BinaryBuilder>),
    TextList(ListBuilder<StringBuilder>),
    FloatList(ListBuilder<Float32Builder>),
    Int64List(ListBuilder<Int64Builder>),
}

impl Builder {
    pub fn new(schema: SchemaRef) -> Result<Self> {
        let column = |ty| Column {
            ty,
            bytes: 0,
            capacity: BUILDER_BYTES,
            builder: match ty {
                FeatureType::Bytes => AnyBuilder::Bytes(BinaryBuilder::new()),
                FeatureType::Text => AnyBuilder::Text(StringBuilder::new()),
                FeatureType::Float => AnyBuilder::Float(Float32Builder::new()),
                FeatureType::Int64 => AnyBuilder::Int64(Int64Builder::new()),
                FeatureType::BytesList => {
                    AnyBuilder::BytesList(ListBuilder::new(BinaryBuilder::new()))
                }
                FeatureType::TextList => {
                    AnyBuilder::TextList(ListBuilder::new(StringBuilder::new()))
                }
                FeatureType::FloatList => {
                    AnyBuilder::FloatList(ListBuilder::new(Float32Builder::new()))
                }
                FeatureType::Int64List => {
                    AnyBuilder::Int64List(ListBuilder::new(Int64Builder::new()))
                }
            },
        };
        let columns = schema
            .fields()
            .iter()
            .map(|f| feature_type(f.data_type()).map(column))
            .collect::<Result<_>>()?;
        let by_name = schema
            .fields()
            .iter()
            .enumerate()
            .map(|(i, f)| (f.name().as_bytes().to_vec(), i))
            .collect();
        Ok(Self {
            schema,
            columns,
            by_name,
            bytes: 0,
            rows: 0,
        })
    }

    pub fn push(&mut self, example: &[u8], room: &mut Room) -> Result<(), Stop> {
        self.bytes += example.len() as u64;
        if self.bytes > i32::MAX as u64 {
            return Err(Error::new(
                ErrorKind::TooLarge,
                "the requested records hold more than 2 GiB",
            )
            .hint("ask for fewer rows at a time")
            .into());
        }
        room.take(Room::VALUE_BYTES * self.columns.len() as u64)?;
        let mut features: Vec<&[u8]> = vec![b""; self.columns.len()];
        each_feature(example, |name, feature| {
            if let Some(&at) = self.by_name.get(name) {
                features[at] = feature;
            }
            Ok(())
        })?;
        for (at, (column, feature)) in self.columns.iter_mut().zip(features).enumerate() {
            let name = || format!("the feature {:?}", shorten(self.schema.field(at).name()));
            let list = list_of(feature)?;
            if let Some((kind, list)) = list {
                match (column.ty, kind) {
                    (FeatureType::Bytes | FeatureType::Text, Kind::Bytes) => {
                        let mut bytes = 0;
                        each_bytes(list, |v| bytes = v.len() as u64)?;
                        column.bytes += bytes;
                        column.capacity = room.take_grown(column.capacity, column.bytes)?;
                    }
                    // One number; or what is refused below.
                    (
                        FeatureType::Float
                        | FeatureType::Int64
                        | FeatureType::Bytes
                        | FeatureType::Text,
                        _,
                    ) => {}
                    _ => room.take(memory_of(kind, list)?)?,
                }
            }
            column.push(list).map_err(|e| e.context(name()))?;
        }
        self.rows += 1;
        Ok(())
    }

    pub fn finish(self) -> Result<RecordBatch> {
        let columns = self
            .columns
            .into_iter()
            .map(|c| c.builder.finish())
            .collect();
        let options = arrow_array::RecordBatchOptions::new().with_row_count(Some(self.rows));
        RecordBatch::try_new_with_options(self.schema, columns, &options).map_err(arrow_error)
    }
}

/// The memory that a list of values takes besides [`Room::VALUE_BYTES`]. They are appended one by
/// one, so there is room for up to twice as many.
fn memory_of(kind: Kind, list: &[u8]) -> Result<u64> {
    Ok(match kind {
        Kind::Bytes => {
            let mut bytes = 0;
            each_bytes(list, |v| bytes += 2 * v.len() as u64 + Room::VALUE_BYTES)?;
            bytes
        }
        Kind::Float => 2 * list.len() as u64,
        // The last byte of a number, and no other of it, is below 0x80.
        Kind::Int64 => {
            let numbers = list.iter().filter(|&&byte| byte < 0x80).count();
            2 * size_of::<i64>() as u64 * numbers as u64
        }
    })
}

fn text(v: &[u8]) -> Result<&str> {
    std::str::from_utf8(v).map_err(|_| {
        Error::corrupt("it is declared as text, and it is not UTF-8").hint("read it as bytes")
    })
}

impl Column {
    fn push(&mut self, list: Option<(Kind, &[u8])>) -> Result<()> {
        use AnyBuilder as B;
        let other = |have: Kind, want: &str| {
            Err(
                Error::corrupt(format!("it is a list of {}, not of {want}", have.name()))
                    .hint("name the features with their types"),
            )
        };
        match (&mut self.builder, list) {
            (B::Bytes(b), None) => b.append_null(),
            (B::Text(b), None) => b.append_null(),
            (B::Float(b), None) => b.append_null(),
            (B::Int64(b), None) => b.append_null(),
            (B::BytesList(b), None) => b.append_null(),
            (B::TextList(b), None) => b.append_null(),
            (B::FloatList(b), None) => b.append_null(),
            (B::Int64List(b), None) => b.append_null(),
            (B::Bytes(b), Some((Kind::Bytes, list))) => {
                b.append_option(one(|f| each_bytes(list, f))?)
            }
            (B::Text(b), Some((Kind::Bytes, list))) => {
                b.append_option(one(|f| each_bytes(list, f))?.map(text).transpose()?)
            }
            (B::Float(b), Some((Kind::Float, list))) => {
                b.append_option(one(|f| each_float(list, f))?)
            }
            (B::Int64(b), Some((Kind::Int64, list))) => {
                b.append_option(one(|f| each_int(list, f))?)
            }
            (B::BytesList(b), Some((Kind::Bytes, list))) => {
                each_bytes(list, |v| b.values().append_value(v))?;
                b.append(true);
            }
            (B::TextList(b), Some((Kind::Bytes, list))) => {
                let mut broken = None;
                each_bytes(list, |v| match text(v) {
                    Ok(v) => b.values().append_value(v),
                    Err(e) => broken = Some(e),
                })?;
                broken.map_or(Ok(()), Err)?;
                b.append(true);
            }
            (B::FloatList(b), Some((Kind::Float, list))) => {
                each_float(list, |v| b.values().append_value(v))?;
                b.append(true);
            }
            (B::Int64List(b), Some((Kind::Int64, list))) => {
                each_int(list, |v| b.values().append_value(v))?;
                b.append(true);
            }
            (_, Some((have, _))) => {
                let want = match self.ty {
                    FeatureType::Bytes
                    | FeatureType::Text
                    | FeatureType::BytesList
                    | FeatureType::TextList => "bytes",
                    FeatureType::Float | FeatureType::FloatList => "float",
                    FeatureType::Int64 | FeatureType::Int64List => "int64",
                };
                return other(have, want);
            }
        }
        Ok(())
    }
}

/// The one value of a list, `None` if it is empty.
fn one<T>(each: impl FnOnce(&mut dyn FnMut(T)) -> Result<()>) -> Result<Option<T>> {
    let (mut found, mut count) = (None, 0u64);
    each(&mut |v| {
        found = Some(v);
        count += 1;
    })?;
    match count {
        0 | 1 => Ok(found),
        n => Err(
            Error::corrupt(format!("it has {n} values where one is expected"))
                .hint("declare it as a list"),
        ),
    }
}

impl AnyBuilder {
    fn finish(self) -> ArrayRef {
        fn done(mut b: impl ArrayBuilder) -> ArrayRef {
            b.finish()
        }
        match self {
            AnyBuilder::Bytes(b) => done(b),
            AnyBuilder::Text(b) => done(b),
            AnyBuilder::Float(b) => done(b),
            AnyBuilder::Int64(b) => done(b),
            AnyBuilder::BytesList(b) => done(b),
            AnyBuilder::TextList(b) => done(b),
            AnyBuilder::FloatList(b) => done(b),
            AnyBuilder::Int64List(b) => done(b),
        }
    }
}
