//! What a file says of the values of its columns, without their being read: statistics of row
//! groups, column indexes (the same for pages), and bloom filters.
//!
//! Rows are left out by it, so whatever is doubtful is taken for not said:
//! - bounds are those of the file's own type of a column; of a column that the dataset has in
//!   another type, nothing is known;
//! - of texts, bytes, unsigned numbers and decimals that are stored as bytes, only bounds whose
//!   order the footer names are used: the older ones were compared with the wrong sign;
//! - bounds that are NaN, or have not the length of their type, are none;
//! - nothing is said of columns within other columns, nor of types that have no order here.
//!
//! Bounds may be cut short by who wrote them: no value is below the lower or above the upper one,
//! and perhaps none is equal to either.

use super::{
    TAIL_BYTES, fields,
    open::parse as parse_offset_index,
    thrift::{Bad, Compact, Type},
};
use crate::tabular::FileIndex;
use ::parquet::{
    arrow::arrow_reader::ArrowReaderMetadata,
    basic::{ConvertedType, LogicalType, SortOrder, TimeUnit as ParquetUnit, Type as Physical},
    bloom_filter::Sbbf,
    schema::types::ColumnDescriptor,
};
use arrow_buffer::i256;
use arrow_schema::{DataType, Schema, TimeUnit};
use forebay_core::{Error, Result};
use std::ops::Range;

/// The head of a bloom filter, if nothing says how long it is: with all its fields it has some
/// twenty bytes.
const BLOOM_HEAD_BYTES: u64 = 64;
/// The smallest part of a bloom filter.
const BLOOM_BLOCK_BYTES: usize = 32;

/// A value that others are not below, or not above.
#[derive(Clone, Debug, PartialEq)]
pub enum Bound {
    /// Of truth values.
    Bool(bool),
    /// Of whole numbers, dates and times, in the unit of the column; of decimals, without the point.
    Int(i256),
    /// Of floating-point numbers.
    Float(f64),
    /// Of texts and bytes.
    Bytes(Vec<u8>),
}

/// Whether values are missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Nulls {
    /// Some may be.
    #[default]
    Unknown,
    /// None is.
    Never,
    /// All are.
    Always,
}

/// What is known of a column in some rows. By default, nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ColumnFacts {
    /// No value is below.
    pub low: Option<Bound>,
    /// No value is above. (NaN is in no bounds.)
    pub high: Option<Bound>,
    /// Whether values are missing.
    pub nulls: Nulls,
}

impl ColumnFacts {
    fn missing() -> Self {
        Self {
            nulls: Nulls::Always,
            ..Self::default()
        }
    }

    fn memory_bytes(&self) -> usize {
        let of = |bound: &Option<Bound>| match bound {
            Some(Bound::Bytes(bytes)) => bytes.capacity(),
            _ => 0,
        };
        size_of::<Self>() + of(&self.low) + of(&self.high)
    }
}

/// How the values of a column are stored, if they have an order here.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Bool,
    Signed32,
    Unsigned32,
    Signed64,
    Unsigned64,
    Float,
    Double,
    Bytes,
    /// Of a decimal, the highest byte first.
    Decimal,
}

impl Form {
    /// Whether older writers knew its order too.
    fn is_ordered_by_sign(self) -> bool {
        matches!(
            self,
            Form::Bool | Form::Signed32 | Form::Signed64 | Form::Float | Form::Double
        )
    }

    /// Both bounds, as far as they are given. Where one is not what it should be (NaN, say), or they
    /// are the wrong way round, neither is: whoever wrote them compared values in another way.
    fn bounds(self, low: Option<&[u8]>, high: Option<&[u8]>) -> (Option<Bound>, Option<Bound>) {
        // `None`: it is given and cannot be.
        let read = |bytes: Option<&[u8]>| match bytes {
            None => Some(None),
            Some(bytes) => self.bound(bytes).map(Some),
        };
        let (Some(low), Some(high)) = (read(low), read(high)) else {
            return (None, None);
        };
        let crossed = match (&low, &high) {
            (Some(Bound::Int(low)), Some(Bound::Int(high))) => low > high,
            (Some(Bound::Float(low)), Some(Bound::Float(high))) => low > high,
            (Some(Bound::Bytes(low)), Some(Bound::Bytes(high))) => low > high,
            (Some(Bound::Bool(low)), Some(Bound::Bool(high))) => low & !high,
            _ => false,
        };
        if crossed { (None, None) } else { (low, high) }
    }

    fn bound(self, bytes: &[u8]) -> Option<Bound> {
        let int = |n: i128| Some(Bound::Int(i256::from_i128(n)));
        let float = |n: f64| (!n.is_nan()).then_some(Bound::Float(n));
        match self {
            Form::Bool => match bytes {
                [b @ (0 | 1)] => Some(Bound::Bool(*b == 1)),
                _ => None,
            },
            Form::Signed32 => int(i32::from_le_bytes(bytes.try_into().ok()?).into()),
            Form::Unsigned32 => int(u32::from_le_bytes(bytes.try_into().ok()?).into()),
            Form::Signed64 => int(i64::from_le_bytes(bytes.try_into().ok()?).into()),
            Form::Unsigned64 => int(u64::from_le_bytes(bytes.try_into().ok()?).into()),
            Form::Float => float(f32::from_le_bytes(bytes.try_into().ok()?).into()),
            Form::Double => float(f64::from_le_bytes(bytes.try_into().ok()?)),
            Form::Bytes => Some(Bound::Bytes(bytes.to_vec())),
            Form::Decimal => {
                let first = *bytes.first()?;
                let mut wide = if first & 0x80 == 0 {
                    [0; 32]
                } else {
                    [0xff; 32]
                };
                let from = wide.len().checked_sub(bytes.len())?;
                wide[from..].copy_from_slice(bytes);
                Some(Bound::Int(i256::from_be_bytes(wide)))
            }
        }
    }
}

/// A column that is a leaf of the schema's root.
#[derive(Clone, Copy, Debug)]
struct Leaf {
    number: usize,
    form: Option<Form>,
    /// It has no missing values.
    required: bool,
}

impl Leaf {
    fn of(number: usize, descr: &ColumnDescriptor, kind: &DataType) -> Self {
        Leaf {
            number,
            form: form_of(descr, kind),
            required: descr.max_def_level() == 0,
        }
    }
}

fn form_of(descr: &ColumnDescriptor, kind: &DataType) -> Option<Form> {
    let kind = match kind {
        DataType::Dictionary(_, values) => values.as_ref(),
        kind => kind,
    };
    let order = descr.sort_order();
    let scale = |scale: i8| descr.type_scale() == i32::from(scale);
    match (kind, descr.physical_type()) {
        (DataType::Boolean, Physical::BOOLEAN) => Some(Form::Bool),
        (
            DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Date32,
            Physical::INT32,
        ) => (order == SortOrder::SIGNED).then_some(Form::Signed32),
        (DataType::UInt8 | DataType::UInt16 | DataType::UInt32, Physical::INT32) => {
            (order == SortOrder::UNSIGNED).then_some(Form::Unsigned32)
        }
        (DataType::Int64, Physical::INT64) => {
            (order == SortOrder::SIGNED).then_some(Form::Signed64)
        }
        (DataType::UInt64, Physical::INT64) => {
            (order == SortOrder::UNSIGNED).then_some(Form::Unsigned64)
        }
        (DataType::Timestamp(unit, _), Physical::INT64) => {
            (unit_of(descr) == Some(*unit)).then_some(Form::Signed64)
        }
        (DataType::Float32, Physical::FLOAT) => Some(Form::Float),
        (DataType::Float64, Physical::DOUBLE) => Some(Form::Double),
        (
            DataType::Decimal32(_, s)
            | DataType::Decimal64(_, s)
            | DataType::Decimal128(_, s)
            | DataType::Decimal256(_, s),
            physical,
        ) if scale(*s) && order == SortOrder::SIGNED => match physical {
            Physical::INT32 => Some(Form::Signed32),
            Physical::INT64 => Some(Form::Signed64),
            Physical::BYTE_ARRAY | Physical::FIXED_LEN_BYTE_ARRAY => Some(Form::Decimal),
            _ => None,
        },
        (
            DataType::Utf8
            | DataType::LargeUtf8
            | DataType::Utf8View
            | DataType::Binary
            | DataType::LargeBinary
            | DataType::BinaryView,
            Physical::BYTE_ARRAY,
        )
        | (DataType::FixedSizeBinary(_), Physical::FIXED_LEN_BYTE_ARRAY) => {
            (order == SortOrder::UNSIGNED).then_some(Form::Bytes)
        }
        _ => None,
    }
}

fn unit_of(descr: &ColumnDescriptor) -> Option<TimeUnit> {
    match descr.logical_type_ref() {
        Some(LogicalType::Timestamp(time)) => Some(match time.unit {
            ParquetUnit::MILLIS => TimeUnit::Millisecond,
            ParquetUnit::MICROS => TimeUnit::Microsecond,
            ParquetUnit::NANOS => TimeUnit::Nanosecond,
        }),
        Some(_) => None,
        None => match descr.converted_type() {
            ConvertedType::TIMESTAMP_MILLIS => Some(TimeUnit::Millisecond),
            ConvertedType::TIMESTAMP_MICROS => Some(TimeUnit::Microsecond),
            _ => None,
        },
    }
}

/// What the footer says of a column chunk.
#[derive(Debug, Default)]
struct Chunk {
    facts: ColumnFacts,
    column_index: Option<Range<u64>>,
    offset_index: Option<Range<u64>>,
    /// Where it begins, and how long it is, if that is said.
    bloom: Option<(u64, Option<u64>)>,
}

/// What a file says of some columns, in the order in which they were asked for.
#[derive(Debug)]
pub struct Facts {
    arrow: ArrowReaderMetadata,
    /// `None`: the file does not have the column; or it is not known what it has.
    leaves: Vec<Option<Leaf>>,
    /// Which of those that the file has each column is.
    slots: Vec<Option<usize>>,
    /// Columns that the file does not have: all their values are missing.
    absent: Vec<bool>,
    /// Whether the footer names the order of bounds.
    ordered: Vec<bool>,
    /// By row group, and by column.
    chunks: Vec<Vec<Chunk>>,
    /// Rows of each row group.
    rows: Vec<u32>,
}

impl Facts {
    pub(super) fn read(
        arrow: &ArrowReaderMetadata,
        index: &FileIndex,
        footer: &[u8],
        columns: &Schema,
    ) -> Result<Self> {
        let descr = arrow.metadata().file_metadata().schema_descr();
        let mut absent = vec![false; columns.fields().len()];
        let leaves: Vec<Option<Leaf>> = columns
            .fields()
            .iter()
            .zip(&mut absent)
            .map(|(field, absent)| {
                let Ok(own) = index.schema().field_with_name(field.name()) else {
                    *absent = true;
                    return None;
                };
                if own.data_type() != field.data_type() {
                    return None;
                }
                let mut found = (0..descr.num_columns()).filter(|&i| {
                    let parts = descr.column(i);
                    matches!(parts.path().parts(), [only] if only == field.name())
                });
                let (i, None) = (found.next()?, found.next()) else {
                    return None;
                };
                let column = descr.column(i);
                let flat = column.max_rep_level() == 0 && column.max_def_level() <= 1;
                flat.then(|| Leaf::of(i, &column, field.data_type()))
            })
            .collect();
        // Only of these, each group has something: there may be many groups, and columns that are
        // not there.
        let present: Vec<Leaf> = leaves.iter().flatten().copied().collect();
        let mut walk = Walk {
            data_end: index
                .size()
                .saturating_sub(TAIL_BYTES + footer.len() as u64),
            leaves: &present,
            chunks: Vec::new(),
            ordered: Vec::new(),
        };
        walk.file(&mut Compact::new(footer)).map_err(damaged)?;
        let blocks = index.blocks();
        if walk.chunks.len() != blocks.blocks() {
            return Err(Error::corrupt("the Parquet footer contradicts itself"));
        }
        let (mut chunks, orders) = (walk.chunks, walk.ordered);
        let ordered = leaves
            .iter()
            .map(|leaf| leaf.is_some_and(|l| orders.get(l.number) == Some(&true)))
            .collect();
        let mut next = 0;
        let slots = leaves.iter().map(|leaf| {
            let slot = leaf.is_some().then_some(next);
            next += usize::from(leaf.is_some());
            slot
        });
        let mut this = Self {
            slots: slots.collect(),
            absent,
            arrow: arrow.clone(),
            ordered,
            rows: (0..blocks.blocks()).map(|b| blocks.block_rows(b)).collect(),
            chunks: Vec::new(),
            leaves,
        };
        for group in &mut chunks {
            for (column, slot) in this.slots.iter().enumerate() {
                if let Some(chunk) = slot.and_then(|slot| group.get_mut(slot)) {
                    this.trust(column, &mut chunk.facts);
                }
            }
        }
        this.chunks = chunks;
        Ok(this)
    }

    /// Keeps only what can be relied on.
    fn trust(&self, column: usize, facts: &mut ColumnFacts) {
        let Some(leaf) = &self.leaves[column] else {
            return;
        };
        if leaf.required {
            facts.nulls = Nulls::Never;
        }
        let known = leaf.form.is_some_and(Form::is_ordered_by_sign) || self.ordered[column];
        if !known {
            (facts.low, facts.high) = (None, None);
        }
    }

    /// What is known of a column in a row group.
    ///
    /// # Panics
    /// If one of the two does not exist.
    pub fn group(&self, group: usize, column: usize) -> &ColumnFacts {
        static NOTHING: ColumnFacts = ColumnFacts {
            low: None,
            high: None,
            nulls: Nulls::Unknown,
        };
        static MISSING: ColumnFacts = ColumnFacts {
            low: None,
            high: None,
            nulls: Nulls::Always,
        };
        match self.chunk(group, column) {
            Some(chunk) => &chunk.facts,
            None if self.absent[column] => &MISSING,
            None => &NOTHING,
        }
    }

    /// What there is of a column that the file has.
    fn chunk(&self, group: usize, column: usize) -> Option<&Chunk> {
        Some(&self.chunks[group][self.slots[column]?])
    }

    /// Where the column index and the offset index of a column chunk are, if it has both.
    pub fn pages_at(&self, group: usize, column: usize) -> Option<[Range<u64>; 2]> {
        let chunk = self.chunk(group, column)?;
        Some([chunk.column_index.clone()?, chunk.offset_index.clone()?])
    }

    /// What is known of each page of a column chunk, with its first row in the row group; from the
    /// bytes of both indexes.
    ///
    /// # Errors
    /// `Corrupt` where they contradict themselves or each other.
    pub fn pages(
        &self,
        group: usize,
        column: usize,
        [columns, offsets]: [&[u8]; 2],
    ) -> Result<Vec<(u32, ColumnFacts)>> {
        let wrong = || Error::corrupt("the Parquet page index of a column contradicts itself");
        let leaf = self.leaves[column].ok_or_else(wrong)?;
        let chunk = self.arrow.metadata().row_group(group).column(leaf.number);
        let offsets = parse_offset_index(offsets, chunk, self.rows[group]).map_err(damaged)?;
        let mut pages = column_index(columns, leaf).map_err(damaged)?;
        let places = offsets.page_locations();
        if places.len() != pages.len() {
            return Err(wrong());
        }
        pages.iter_mut().for_each(|facts| self.trust(column, facts));
        let firsts = places.iter().map(|place| place.first_row_index as u32);
        Ok(firsts.zip(pages).collect())
    }

    /// Where the bloom filter of a column chunk is, if it has one. If it is not said how long it is,
    /// only its head is there, and [`Facts::bloom_length`] says it.
    pub fn bloom_at(&self, group: usize, column: usize) -> Option<(Range<u64>, bool)> {
        self.leaves[column]?.form?;
        let (at, length) = self.chunk(group, column)?.bloom?;
        let end = at.checked_add(length.unwrap_or(BLOOM_HEAD_BYTES))?;
        Some((at..end, length.is_some()))
    }

    /// The length of a bloom filter that begins like this.
    ///
    /// # Errors
    /// `Corrupt` if it does not begin like one.
    pub fn bloom_length(head: &[u8]) -> Result<u64> {
        let (head, bits) = bloom_head(head).map_err(damaged)?;
        Ok((head + bits) as u64)
    }

    /// The bloom filter of a column.
    ///
    /// # Errors
    /// `Corrupt` if it is none.
    pub fn bloom(&self, column: usize, bytes: &[u8]) -> Result<Bloom> {
        let (head, bits) = bloom_head(bytes).map_err(damaged)?;
        let bits = bytes.get(head..head + bits);
        let form = self.leaves[column].and_then(|leaf| leaf.form);
        match (bits, form) {
            (Some(bits), Some(form)) => Ok(Bloom {
                filter: Sbbf::new(bits),
                form,
            }),
            _ => Err(Error::corrupt("a bloom filter is cut off")),
        }
    }

    /// Approximate memory that it holds besides the opened file.
    pub fn memory_bytes(&self) -> usize {
        let chunks = self.chunks.iter().flatten();
        size_of::<Self>()
            + chunks
                .map(|c| size_of::<Chunk>() + c.facts.memory_bytes())
                .sum::<usize>()
    }
}

/// Says of a value that it is in no row of a column chunk, or nothing.
#[derive(Debug)]
pub struct Bloom {
    filter: Sbbf,
    form: Form,
}

impl Bloom {
    /// Whether a row may have this value.
    pub fn may_hold_bytes(&self, value: &[u8]) -> bool {
        self.form != Form::Bytes || self.filter.check(value)
    }

    /// The same for any value.
    pub fn may_hold(&self, value: &Bound) -> bool {
        let has = |bytes: &[u8]| self.filter.check(bytes);
        match (self.form, value) {
            (_, Bound::Bytes(bytes)) => self.may_hold_bytes(bytes),
            (Form::Float, Bound::Float(n)) => {
                let near = *n as f32;
                let both = [near, -near];
                // 0.0 and -0.0 are equal, and look different.
                let signs = if *n == 0.0 { &both[..] } else { &both[..1] };
                f64::from(near) != *n || signs.iter().any(|n| has(&n.to_le_bytes()))
            }
            (Form::Double, Bound::Float(n)) => {
                let both = [*n, -*n];
                let signs = if *n == 0.0 { &both[..] } else { &both[..1] };
                signs.iter().any(|n| has(&n.to_le_bytes()))
            }
            (form, Bound::Int(n)) => {
                let Some(n) = n.to_i128() else { return true };
                match form {
                    Form::Signed32 => i32::try_from(n).map_or(true, |n| has(&n.to_le_bytes())),
                    Form::Unsigned32 => u32::try_from(n).map_or(true, |n| has(&n.to_le_bytes())),
                    Form::Signed64 => i64::try_from(n).map_or(true, |n| has(&n.to_le_bytes())),
                    Form::Unsigned64 => u64::try_from(n).map_or(true, |n| has(&n.to_le_bytes())),
                    _ => true,
                }
            }
            _ => true,
        }
    }
}

fn damaged(bad: Bad) -> Error {
    Error::corrupt(format!(
        "what the Parquet file says of a column is damaged at byte {}: {}",
        bad.at, bad.what
    ))
}

/// The lengths of a bloom filter's head and of its bits.
fn bloom_head(bytes: &[u8]) -> Result<(usize, usize), Bad> {
    let mut c = Compact::new(bytes);
    let (mut bits, mut known) = (-1, 0);
    c.fields(&[], |c, id, ty| {
        match (id, ty) {
            (1, Type::I32) => bits = c.i32()?,
            (2..=4, Type::Struct) => c.fields(&[], |_, id, _| {
                // Blocks, xxHash, uncompressed: the first of each, and there are no others.
                known += u32::from(id == 1);
                Ok(false)
            })?,
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    match usize::try_from(bits) {
        Ok(bits) if known == 3 && bits > 0 && bits.is_multiple_of(BLOOM_BLOCK_BYTES) => {
            Ok((c.at(), bits))
        }
        _ => Err(c.bad("it is not a bloom filter of a known kind")),
    }
}

/// The most pages of a column chunk that are looked at.
const PAGES_MAX: usize = 1 << 16;

/// What a column index says of each page.
fn column_index(bytes: &[u8], leaf: Leaf) -> Result<Vec<ColumnFacts>, Bad> {
    let mut c = Compact::new(bytes);
    let (mut empty, mut lows, mut highs, mut counts) =
        (Vec::new(), Vec::new(), Vec::new(), None::<Vec<i64>>);
    c.fields(&[], |c, id, ty| {
        if ty != Type::List || !matches!(id, 1..=3 | 5) {
            return Ok(false);
        }
        let (of, n) = c.list()?;
        match (id, of) {
            (1, Type::Bool(_)) => {
                for _ in 0..n {
                    empty.push(c.bool_element()?);
                }
            }
            (2, Type::Binary) => {
                for _ in 0..n {
                    lows.push(c.binary()?);
                }
            }
            (3, Type::Binary) => {
                for _ in 0..n {
                    highs.push(c.binary()?);
                }
            }
            (5, Type::I64) => {
                let mut found = Vec::with_capacity(n);
                for _ in 0..n {
                    found.push(c.int()?);
                }
                counts = Some(found);
            }
            _ => return Err(c.bad("a list does not have the type that it should have")),
        }
        Ok(true)
    })?;
    let n = empty.len();
    if n > PAGES_MAX {
        return Err(c.bad("it is about too many pages"));
    }
    let counted = counts.as_ref().is_none_or(|counts| counts.len() == n);
    if lows.len() != n || highs.len() != n || !counted {
        return Err(c.bad("its lists have different lengths"));
    }
    let pages = empty.into_iter().zip(lows.into_iter().zip(highs));
    Ok(pages
        .enumerate()
        .map(|(i, (empty, (low, high)))| {
            let nulls = counts.as_ref().map(|counts| counts[i]);
            match (empty, nulls) {
                // It contradicts itself.
                (true, Some(0)) => ColumnFacts::default(),
                (true, _) => ColumnFacts::missing(),
                (false, nulls) => {
                    // Two texts without a letter are what those write who do not know.
                    let leaf = match low.is_empty() && high.is_empty() {
                        true => Leaf { form: None, ..leaf },
                        false => leaf,
                    };
                    let bounds = leaf.form.map(|form| form.bounds(Some(low), Some(high)));
                    let (low, high) = bounds.unwrap_or_default();
                    let nulls = match nulls {
                        Some(0) => Nulls::Never,
                        _ => Nulls::Unknown,
                    };
                    ColumnFacts { low, high, nulls }
                }
            }
        })
        .collect())
}

/// Walks a footer for some columns.
struct Walk<'l> {
    data_end: u64,
    leaves: &'l [Leaf],
    chunks: Vec<Vec<Chunk>>,
    /// By the number of a leaf.
    ordered: Vec<bool>,
}

impl Walk<'_> {
    fn file(&mut self, c: &mut Compact<'_>) -> Result<(), Bad> {
        c.fields(fields::FILE_META_DATA, |c, id, ty| {
            match (id, ty) {
                (4, Type::List) => {
                    let (_, n) = c.list()?;
                    for _ in 0..n {
                        self.group(c)?;
                    }
                }
                (7, Type::List) => {
                    let (_, n) = c.list()?;
                    for _ in 0..n {
                        let mut by_type = false;
                        c.fields(&[], |_, id, _| {
                            by_type |= id == 1;
                            Ok(false)
                        })?;
                        self.ordered.push(by_type);
                    }
                }
                _ => return Ok(false),
            }
            Ok(true)
        })
    }

    fn group(&mut self, c: &mut Compact<'_>) -> Result<(), Bad> {
        let mut found: Vec<Chunk> = self.leaves.iter().map(|_| Chunk::default()).collect();
        c.fields(fields::ROW_GROUP, |c, id, ty| {
            if (id, ty) != (1, Type::List) {
                return Ok(false);
            }
            let (_, n) = c.list()?;
            for number in 0..n {
                match self.leaves.iter().position(|leaf| leaf.number == number) {
                    Some(column) => found[column] = self.chunk(c, self.leaves[column])?,
                    None => c.skip(Type::Struct, 0)?,
                }
            }
            Ok(true)
        })?;
        self.chunks.push(found);
        Ok(())
    }

    fn chunk(&self, c: &mut Compact<'_>, leaf: Leaf) -> Result<Chunk, Bad> {
        let mut chunk = Chunk::default();
        let (mut column, mut offset) = ((-1, -1), (-1, -1));
        c.fields(fields::COLUMN_CHUNK, |c, id, ty| {
            match (id, ty) {
                (3, Type::Struct) => self.metadata(c, leaf, &mut chunk)?,
                (4, Type::I64) => offset.0 = c.int()?,
                (5, Type::I32) => offset.1 = c.i32()?,
                (6, Type::I64) => column.0 = c.int()?,
                (7, Type::I32) => column.1 = c.i32()?,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        chunk.column_index = self.place(column.0, column.1);
        chunk.offset_index = self.place(offset.0, offset.1);
        Ok(chunk)
    }

    /// Bytes before the footer; what cannot be there is not.
    fn place(&self, at: i64, length: i32) -> Option<Range<u64>> {
        let (at, length) = (u64::try_from(at).ok()?, u64::try_from(length).ok()?);
        let end = at.checked_add(length)?;
        (at > 0 && length > 0 && end <= self.data_end).then_some(at..end)
    }

    fn metadata(&self, c: &mut Compact<'_>, leaf: Leaf, chunk: &mut Chunk) -> Result<(), Bad> {
        let (mut values, mut nulls) = (None, None);
        let (mut at, mut length) = (-1, None);
        c.fields(fields::COLUMN_META_DATA, |c, id, ty| {
            match (id, ty) {
                (5, Type::I64) => values = Some(c.int()?),
                (12, Type::Struct) => nulls = statistics(c, leaf, &mut chunk.facts)?,
                (14, Type::I64) => at = c.int()?,
                (15, Type::I32) => length = Some(c.i32()?),
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        chunk.facts.nulls = match nulls {
            Some(0) => Nulls::Never,
            Some(n) if Some(n) == values => Nulls::Always,
            _ => Nulls::Unknown,
        };
        chunk.bloom = match length {
            Some(length) => (self.place(at, length)).map(|r| (r.start, Some(r.end - r.start))),
            None => (self.place(at, BLOOM_BLOCK_BYTES as i32)).map(|r| (r.start, None)),
        };
        Ok(())
    }
}

/// Reads statistics; returns how many values are missing, if that is said.
fn statistics(
    c: &mut Compact<'_>,
    leaf: Leaf,
    facts: &mut ColumnFacts,
) -> Result<Option<i64>, Bad> {
    let (mut nulls, mut old, mut new) = (None, (None, None), (None, None));
    c.fields(&[], |c, id, ty| {
        match (id, ty) {
            (1, Type::Binary) => old.1 = Some(c.binary()?),
            (2, Type::Binary) => old.0 = Some(c.binary()?),
            (3, Type::I64) => nulls = Some(c.int()?),
            (5, Type::Binary) => new.1 = Some(c.binary()?),
            (6, Type::Binary) => new.0 = Some(c.binary()?),
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    let Some(form) = leaf.form else {
        return Ok(nulls);
    };
    let old = if form.is_ordered_by_sign() {
        old
    } else {
        (None, None)
    };
    (facts.low, facts.high) = form.bounds(new.0.or(old.0), new.1.or(old.1));
    Ok(nulls)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_read_by_the_type_that_is_stored() {
        let int = |n: i128| Some(Bound::Int(i256::from_i128(n)));
        assert_eq!(Form::Signed32.bound(&[0xff; 4]), int(-1));
        assert_eq!(Form::Unsigned32.bound(&[0xff; 4]), int(u32::MAX.into()));
        assert_eq!(Form::Signed64.bound(&[0xff; 8]), int(-1));
        assert_eq!(Form::Unsigned64.bound(&[0xff; 8]), int(u64::MAX.into()));
        assert_eq!(Form::Decimal.bound(&[0xff, 0x38]), int(-200));
        assert_eq!(Form::Decimal.bound(&[0x01, 0x00]), int(256));
        assert_eq!(Form::Decimal.bound(&[]), None);
        assert_eq!(Form::Decimal.bound(&[1; 33]), None);
        assert_eq!(Form::Signed32.bound(&[1, 2, 3]), None);
        assert_eq!(Form::Double.bound(&f64::NAN.to_le_bytes()), None);
        assert_eq!(
            Form::Float.bound(&1.5f32.to_le_bytes()),
            Some(Bound::Float(1.5))
        );
        assert_eq!(Form::Bool.bound(&[2]), None);
        assert_eq!(Form::Bytes.bound(b"a"), Some(Bound::Bytes(b"a".to_vec())));
        let (one, nan) = (1f64.to_le_bytes(), f64::NAN.to_le_bytes());
        let of = |low, high| Form::Double.bounds(low, high);
        assert_eq!(of(Some(&one), None), (Some(Bound::Float(1.0)), None));
        assert_eq!(of(Some(&one), Some(&nan)), (None, None));
        assert_eq!(of(Some(&one), Some(&0f64.to_le_bytes())), (None, None));
    }

    #[test]
    fn only_bloom_filters_of_the_known_kind_are_read() {
        let filter = Sbbf::new_with_num_of_bytes(64);
        let mut bytes = Vec::new();
        filter.write(&mut bytes).unwrap();
        let (head, bits) = bloom_head(&bytes).unwrap();
        assert_eq!(head + bits, bytes.len());
        assert_eq!(
            Facts::bloom_length(&bytes[..head]).unwrap(),
            bytes.len() as u64
        );
        for at in 0..head {
            // Whatever changes in it, it is refused or says another length, and nothing panics.
            for bit in 0..8 {
                let mut other = bytes.clone();
                other[at] ^= 1 << bit;
                if let Ok((_, bits)) = bloom_head(&other) {
                    assert!(bits.is_multiple_of(BLOOM_BLOCK_BYTES) && bits > 0);
                }
            }
            assert!(bloom_head(&bytes[..at]).is_err());
        }
    }
}
