//! Reads a file's dictionaries, and one of its batches.

use super::{Places, check::check, message};
use crate::{
    parquet::guarded,
    tabular::{
        Detail, FileIndex, Format, Held, Need, Projection, Rows, arrow_error, nulls, take_rows,
    },
};
use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions};
use arrow_buffer::Buffer;
use arrow_ipc::reader::RecordBatchDecoder;
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use arrow_select::concat::concat;
use bytes::Bytes;
use forebay_core::{Error, Result, limits};
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::Arc,
};

type Dictionaries = HashMap<i64, ArrayRef>;

/// Reads the schema, as it is in the file, and all dictionaries.
#[derive(Debug)]
pub(crate) struct Opener {
    /// Of the schema, then of each dictionary.
    ranges: Vec<Range<u64>>,
    /// The lengths of the dictionaries' headers.
    heads: Vec<u32>,
    held: Held,
}

impl Opener {
    pub fn new(places: &Places) -> Self {
        let ranges = std::iter::once(&places.schema)
            .chain(places.dictionaries.iter().map(|d| &d.bytes))
            .cloned();
        Self {
            ranges: ranges.collect(),
            heads: places.dictionaries.iter().map(|d| d.head).collect(),
            held: Held::default(),
        }
    }

    pub fn step(&mut self) -> Result<Need> {
        let bytes: u64 = self.ranges.iter().map(|r| r.end - r.start).sum();
        if bytes > limits::BLOCK_DECODED_MAX_BYTES {
            let max = limits::BLOCK_DECODED_MAX_BYTES;
            return Err(Error::unsupported(format!(
                "the dictionaries of the Arrow file take {bytes} bytes; the limit is {max}"
            )));
        }
        let missing = self.held.missing(&self.ranges);
        Ok(if missing.is_empty() {
            Need::Done
        } else {
            Need::Ranges(missing)
        })
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.held.put(offset, bytes);
        Ok(())
    }

    /// How many bytes the dictionaries decompress to, once their bytes are here; 0 if they are not
    /// compressed.
    pub fn decoded_bytes(&self) -> Result<u64> {
        let mut decoded = 0u64;
        for (range, &head) in self.ranges[1..].iter().zip(&self.heads) {
            let bytes = self
                .held
                .get(range)
                .ok_or_else(|| Error::internal("bytes of an Arrow file were not fed"))?;
            let found = dictionary_message(&bytes, range.start, head)?;
            let no_fields = std::iter::empty::<&Field>();
            let here = check(&found.values, no_fields, |_| true, found.body, range.start)?;
            decoded = decoded.saturating_add(here.decompressed_bytes());
        }
        Ok(decoded)
    }

    pub fn finish(self, index: &FileIndex) -> Result<Opened> {
        let Detail::Ipc(places) = &index.detail else {
            return Err(Error::internal("an Arrow file without its places"));
        };
        let get = |range: &Range<u64>| {
            self.held
                .get(range)
                .ok_or_else(|| Error::internal("bytes of an Arrow file were not fed"))
        };
        let at = places.schema.start;
        let bytes = get(&places.schema)?;
        let schema = if index.format == Format::ArrowFile {
            let footer = guarded("an Arrow footer", || {
                arrow_ipc::root_as_footer(&bytes).map_err(|e| {
                    Error::corrupt(format!("the Arrow footer at offset {at} is damaged: {e}"))
                })
            })?;
            let schema = footer.schema().ok_or_else(|| {
                Error::corrupt(format!("the Arrow footer at offset {at} has no schema"))
            })?;
            message::decode_schema(schema, at)?
        } else {
            message::schema(&message::header(&bytes, at)?, at)?
        };
        if schema.fields() != index.schema.fields() {
            return Err(Error::version_changed(
                "the schema of the Arrow file changed after the file was indexed",
            )
            .hint("open the dataset again"));
        }
        let mut growing = Growing::new(&schema);
        for d in &places.dictionaries {
            growing.message(&get(&d.bytes)?, d)?;
        }
        let dictionaries = growing.finish()?;
        let mut opened = Opened {
            schema: Arc::new(schema),
            dictionaries,
            memory_bytes: 0,
        };
        opened.memory_bytes = opened.held_bytes();
        Ok(opened)
    }
}

/// A message that brings values of a dictionary.
struct DictionaryMessage<'a> {
    message: arrow_ipc::Message<'a>,
    batch: arrow_ipc::DictionaryBatch<'a>,
    values: arrow_ipc::RecordBatch<'a>,
    /// What the values refer to.
    body: &'a [u8],
}

fn dictionary_message(bytes: &[u8], at: u64, head: u32) -> Result<DictionaryMessage<'_>> {
    let message = message::header(bytes, at)?;
    let (Some(batch), Some(body)) = (
        message.header_as_dictionary_batch(),
        bytes.get(head as usize..),
    ) else {
        return Err(Error::corrupt(format!(
            "the Arrow message at offset {at} is not a dictionary"
        )));
    };
    let values = batch.data().ok_or_else(|| {
        Error::corrupt(format!(
            "the Arrow dictionary at offset {at} does not have values"
        ))
    })?;
    Ok(DictionaryMessage {
        message,
        batch,
        values,
        body,
    })
}

/// The dictionaries while their messages are read. A stream may add to one with each batch: what it adds
/// is put together once, at the end.
struct Growing<'s> {
    schema: &'s Schema,
    /// Of each message that replaced a dictionary, the values that it brought and those added since.
    values: Vec<Values>,
    /// The values in force from each block on, by the dictionary's id.
    in_force: Vec<(u32, HashMap<i64, usize>)>,
}

struct Values {
    parts: Vec<ArrayRef>,
    /// Where the last part is.
    at: u64,
}

impl Values {
    fn whole(&mut self) -> Result<ArrayRef> {
        if let [all] = &self.parts[..] {
            return Ok(all.clone());
        }
        let parts: Vec<&dyn Array> = self.parts.iter().map(|part| part.as_ref()).collect();
        let all = guarded("an Arrow dictionary", || {
            concat(&parts).map_err(arrow_error)
        })
        .map_err(|e| e.context(format!("the Arrow dictionary at offset {}", self.at)))?;
        self.parts = vec![all.clone()];
        Ok(all)
    }
}

impl<'s> Growing<'s> {
    fn new(schema: &'s Schema) -> Self {
        Self {
            schema,
            values: Vec::new(),
            in_force: vec![(0, HashMap::new())],
        }
    }

    fn message(&mut self, bytes: &Bytes, place: &super::Dictionary) -> Result<()> {
        let at = place.bytes.start;
        let DictionaryMessage {
            message,
            batch,
            values: data,
            body,
        } = dictionary_message(bytes, at, place.head)?;
        let id = batch.id();
        #[expect(deprecated, reason = "the only way to a field by its dictionary")]
        let fields = self.schema.fields_with_dict_id(id);
        let field = fields.first().and_then(|f| match f.data_type() {
            DataType::Dictionary(_, values) => Some(Field::new("", (**values).clone(), true)),
            _ => None,
        });
        check(&data, field.as_ref(), |_| true, body, at)?;
        let field = field.ok_or_else(|| {
            Error::corrupt(format!(
                "the Arrow dictionary at offset {at} has the id {id}, which no column has"
            ))
        })?;
        let Some((_, now)) = self.in_force.last() else {
            return Err(Error::internal("an Arrow file without dictionaries"));
        };
        let grown = now.get(&id).copied().filter(|_| batch.isDelta());
        if batch.isDelta() && grown.is_none() {
            return Err(Error::corrupt(format!(
                "the Arrow dictionary at offset {at} adds to one that is not there"
            )));
        }
        let mut known = Dictionaries::new();
        if has_dictionaries(field.data_type()) {
            for (&id, &values) in now {
                known.insert(id, with_a_value(self.values[values].whole()?));
            }
        }
        let buffer = Buffer::from(bytes.slice(place.head as usize..));
        let version = message.version();
        let schema = Arc::new(Schema::new(vec![field]));
        let read = guarded("an Arrow dictionary", || {
            RecordBatchDecoder::try_new(&buffer, data, schema, &known, &version)
                .and_then(RecordBatchDecoder::read_record_batch)
                .map_err(arrow_error)
        })
        .map_err(|e| e.context(format!("the Arrow dictionary at offset {at}")))?;
        let part = read.column(0).clone();
        // Added values come after those that earlier blocks refer to, so these blocks share the grown
        // dictionary. Otherwise each block would hold a copy of all values.
        if let Some(grown) = grown {
            let values = &mut self.values[grown];
            values.parts.push(part);
            values.at = at;
            return Ok(());
        }
        self.values.push(Values {
            parts: vec![part],
            at,
        });
        if let Some((_, last)) = self
            .in_force
            .last()
            .filter(|(block, _)| *block != place.block)
        {
            let next = last.clone();
            self.in_force.push((place.block, next));
        }
        if let Some((_, now)) = self.in_force.last_mut() {
            now.insert(id, self.values.len() - 1);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<(u32, Dictionaries)>> {
        let whole: Vec<ArrayRef> = self
            .values
            .iter_mut()
            .map(|values| values.whole().map(with_a_value))
            .collect::<Result<_>>()?;
        let of = |ids: HashMap<i64, usize>| -> Dictionaries {
            let all = ids.into_iter();
            all.map(|(id, values)| (id, whole[values].clone()))
                .collect()
        };
        let in_force = self.in_force.into_iter();
        Ok(in_force.map(|(block, ids)| (block, of(ids))).collect())
    }
}

/// A dictionary without values as one with a missing value. Within structs that are missing, PyArrow
/// writes codes, also where no value is there, and the decoder looks up every code. If a value would
/// take more than any answer may, there is none, and the decoder refuses the codes.
fn with_a_value(values: ArrayRef) -> ArrayRef {
    if !values.is_empty() {
        return values;
    }
    let missing = guarded("an Arrow dictionary", || {
        nulls(values.data_type(), 1).map_err(|misfit| Error::corrupt(misfit.why))
    });
    missing.unwrap_or(values)
}

/// Whether values of this type refer to dictionaries of their own.
fn has_dictionaries(kind: &DataType) -> bool {
    match kind {
        DataType::Dictionary(..) => true,
        DataType::List(of)
        | DataType::LargeList(of)
        | DataType::ListView(of)
        | DataType::LargeListView(of)
        | DataType::FixedSizeList(of, _)
        | DataType::Map(of, _)
        | DataType::RunEndEncoded(_, of) => has_dictionaries(of.data_type()),
        DataType::Struct(fields) => fields.iter().any(|f| has_dictionaries(f.data_type())),
        DataType::Union(fields, _) => {
            let mut fields = fields.iter();
            fields.any(|(_, f)| has_dictionaries(f.data_type()))
        }
        _ => false,
    }
}

/// What all reads of a file share.
#[derive(Debug)]
pub(crate) struct Opened {
    /// With the dictionaries' ids, which the schema of the index may lack.
    schema: Arc<Schema>,
    /// The dictionaries in force from each block on. Those that did not change share their values.
    dictionaries: Vec<(u32, Dictionaries)>,
    memory_bytes: usize,
}

impl Opened {
    /// What the dictionaries hold. Those that did not change are shared.
    fn held_bytes(&self) -> usize {
        let mut seen = HashSet::new();
        let all = self.dictionaries.iter().flat_map(|(_, of)| of.values());
        all.filter(|values| seen.insert(Arc::as_ptr(values).cast::<u8>()))
            .map(|values| values.get_array_memory_size())
            .sum()
    }

    pub fn memory_bytes(&self) -> usize {
        self.memory_bytes
            + self
                .dictionaries
                .iter()
                .map(|(_, d)| d.len() * 64)
                .sum::<usize>()
    }

    pub fn read(
        &self,
        index: &FileIndex,
        block: usize,
        rows: Rows,
        projection: &Projection,
    ) -> Result<Read> {
        let Detail::Ipc(places) = &index.detail else {
            return Err(Error::internal("an Arrow file without its places"));
        };
        let in_force = self
            .dictionaries
            .partition_point(|&(first, _)| first as usize <= block)
            .max(1)
            - 1;
        let columns = projection.indices(index.schema())?;
        let block_rows = index.blocks().block_rows(block);
        Ok(Read {
            place: index.blocks().bytes(block),
            head: places.heads[block] as usize,
            block_rows,
            nothing: columns.is_empty() || rows.count(block_rows) == 0,
            rows,
            columns,
            schema: projection.schema(index.schema())?,
            file_schema: self.schema.clone(),
            dictionaries: self.dictionaries[in_force].1.clone(),
            bytes: None,
            decoded_bytes: None,
        })
    }
}

/// Reads one batch.
#[derive(Debug)]
pub(crate) struct Read {
    place: Range<u64>,
    head: usize,
    block_rows: u32,
    rows: Rows,
    nothing: bool,
    columns: Vec<usize>,
    schema: SchemaRef,
    file_schema: SchemaRef,
    dictionaries: Dictionaries,
    bytes: Option<Bytes>,
    /// How much the wanted columns decompress to; known when the batch has been checked.
    decoded_bytes: Option<u64>,
}

impl Read {
    fn changed(&self) -> Error {
        Error::version_changed(format!(
            "the Arrow file no longer has a batch of {} rows at offset {}",
            self.block_rows, self.place.start
        ))
    }

    /// The memory that decoding takes besides the batch's own bytes, which must be here: what its
    /// buffers decompress to, and the wanted rows that are copied out of it.
    ///
    /// # Errors
    /// `Corrupt`, `Unsupported`, `TooLarge`, `VersionChanged`.
    pub fn decoded_bytes(&mut self) -> Result<u64> {
        if self.nothing {
            return Ok(0);
        }
        if let Some(known) = self.decoded_bytes {
            return Ok(known);
        }
        let bytes = self
            .bytes
            .as_ref()
            .ok_or_else(|| Error::internal("bytes of an Arrow batch were not fed"))?;
        let at = self.place.start;
        let message = message::header(bytes, at)?;
        let batch = message
            .header_as_record_batch()
            .ok_or_else(|| self.changed())?;
        let body = bytes.get(self.head..).ok_or_else(|| self.changed())?;
        let fields = self.file_schema.fields();
        let mut wanted = vec![false; fields.len()];
        self.columns
            .iter()
            .for_each(|&column| wanted[column] = true);
        let sizes = check(
            &batch,
            fields.iter().map(|f| &**f),
            |column| wanted[column],
            body,
            at,
        )?;
        if batch.length() != i64::from(self.block_rows) {
            return Err(self.changed());
        }
        let copied = match &self.rows {
            Rows::All => 0,
            // On average. The reader of blocks counts what it was, and reserves the rest.
            Rows::Sorted(rows) => {
                let of = u128::from(sizes.wanted_bytes);
                (of * rows.len() as u128 / u128::from(self.block_rows.max(1))) as u64
            }
        };
        let decoded = sizes.decompressed_bytes().saturating_add(copied);
        self.decoded_bytes = Some(decoded);
        Ok(decoded)
    }

    pub fn step(&mut self) -> Result<Need> {
        Ok(if self.nothing || self.bytes.is_some() {
            Need::Done
        } else {
            Need::one(self.place.clone())
        })
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        let mut held = Held::default();
        held.put(offset, bytes);
        if let Some(bytes) = held.get(&self.place) {
            self.bytes = Some(bytes);
        }
        Ok(())
    }

    pub fn finish(mut self) -> Result<RecordBatch> {
        let count = self.rows.count(self.block_rows);
        if count == 0 {
            return Ok(RecordBatch::new_empty(self.schema));
        }
        if self.nothing {
            let options = RecordBatchOptions::new().with_row_count(Some(count));
            return RecordBatch::try_new_with_options(self.schema, Vec::new(), &options)
                .map_err(arrow_error);
        }
        // This checks the batch.
        self.decoded_bytes()?;
        let bytes = self
            .bytes
            .take()
            .ok_or_else(|| Error::internal("bytes of an Arrow batch were not fed"))?;
        let at = self.place.start;
        let message = message::header(&bytes, at)?;
        let batch = message
            .header_as_record_batch()
            .ok_or_else(|| self.changed())?;
        let buffer = Buffer::from(bytes.slice(self.head..));
        let batch = guarded("an Arrow batch", || {
            RecordBatchDecoder::try_new(
                &buffer,
                batch,
                self.file_schema.clone(),
                &self.dictionaries,
                &message.version(),
            )
            .and_then(|d| d.with_projection(Some(&self.columns)).read_record_batch())
            .map_err(arrow_error)
        })
        .map_err(|e| e.context(format!("the Arrow batch at offset {at}")))?;
        let batch =
            RecordBatch::try_new(self.schema, batch.columns().to_vec()).map_err(arrow_error)?;
        guarded("an Arrow batch", || take_rows(&batch, &self.rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::new_empty_array;

    #[test]
    fn a_dictionary_without_values_gets_none_that_takes_more_than_an_answer() {
        let list = |of| {
            let item = Arc::new(Field::new("item", of, true));
            DataType::FixedSizeList(item, i32::MAX)
        };
        let one = with_a_value(new_empty_array(&DataType::Utf8));
        assert!(one.len() == 1 && one.is_null(0));
        let huge = new_empty_array(&list(list(DataType::Int64)));
        assert!(with_a_value(huge).is_empty());
    }
}
