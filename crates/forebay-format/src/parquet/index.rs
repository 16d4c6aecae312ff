//! From a file's last bytes to its row groups.

use super::{MAGIC, TAIL_BYTES, footer, guarded, parquet_error};
use crate::tabular::{
    BlockIndexBuilder, Detail, FileIndex, Format, Held, IndexOptions, Need, Schemas,
};
use ::parquet::{
    arrow::parquet_to_arrow_schema,
    errors::Result as ParquetResult,
    file::metadata::{
        ColumnChunkMetaData, ParquetMetaData, ParquetMetaDataOptions, ParquetMetaDataReader,
        ParquetStatisticsPolicy,
    },
};
use arrow_schema::{DataType, Field, FieldRef, Fields, Schema, SchemaRef};
use bytes::Bytes;
use forebay_core::{Error, Result, limits};
use std::{ops::Range, sync::Arc};
use xxhash_rust::xxh3::Xxh3;

#[derive(Debug)]
pub(crate) struct Indexer {
    size: u64,
    schemas: Arc<Schemas>,
    held: Held,
    done: Option<FileIndex>,
}

impl Indexer {
    pub fn new(size: u64, options: &IndexOptions) -> Self {
        Self {
            size,
            schemas: options.schemas.clone(),
            held: Held::default(),
            done: None,
        }
    }

    pub fn step(&mut self) -> Result<Need> {
        if self.done.is_some() {
            return Ok(Need::Done);
        }
        if self.size < TAIL_BYTES + 4 {
            return Err(Error::corrupt(format!(
                "a file of {} bytes is too short for a Parquet file",
                self.size
            )));
        }
        let tail = self.size - TAIL_BYTES..self.size;
        let Some(tail) = self.held.get(&tail) else {
            return Ok(Need::one(
                self.size.saturating_sub(limits::FOOTER_FIRST_READ_BYTES)..self.size,
            ));
        };
        let range = footer_range(&tail, self.size)?;
        let Some(bytes) = self.held.get(&range) else {
            return Ok(Need::one(range));
        };
        let mut blocks = BlockIndexBuilder::new(self.size);
        let schema = footer::scan(&bytes, self.size, |group| {
            blocks.block(group.rows, group.bytes)
        })?;
        let schema = self
            .schemas
            .by_key(key(&bytes, &schema), || arrow_schema(&bytes))?;
        self.held.clear();
        self.done = Some(FileIndex {
            format: Format::Parquet,
            size: self.size,
            blocks: blocks.finish(),
            schema,
            detail: Detail::Parquet {
                footer_bytes: bytes.len() as u32,
            },
        });
        Ok(Need::Done)
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.held.put(offset, bytes);
        Ok(())
    }

    pub fn finish(self) -> Result<FileIndex> {
        self.done
            .ok_or_else(|| Error::internal("the Parquet footer was not read"))
    }
}

/// Where the footer is, from the file's last eight bytes.
pub(super) fn footer_range(tail: &[u8], size: u64) -> Result<Range<u64>> {
    let Some((len, magic)) = tail.split_first_chunk::<4>() else {
        return Err(Error::internal("a tail of other than 8 bytes"));
    };
    if magic == b"PARE" {
        return Err(
            Error::unsupported("the footer of the Parquet file is encrypted")
                .hint("store it without encryption"),
        );
    }
    if magic != MAGIC {
        return Err(Error::corrupt(format!(
            "this is not a Parquet file: bytes {}..{size} are not PAR1",
            size - 4
        )));
    }
    let len = u64::from(u32::from_le_bytes(*len));
    // An impossible length is damage, whatever the limit.
    let start = (size - TAIL_BYTES).checked_sub(len);
    let Some(start) = start.filter(|&start| start >= MAGIC.len() as u64 && len > 0) else {
        return Err(Error::corrupt(format!(
            "the Parquet footer says that it is {len} bytes long, in a file of {size} bytes"
        )));
    };
    if len > limits::FOOTER_MAX_BYTES {
        return Err(Error::unsupported(format!(
            "the Parquet footer is {len} bytes long; the limit is {}",
            limits::FOOTER_MAX_BYTES
        ))
        .hint("write the file with larger row groups or fewer columns"));
    }
    Ok(start..size - TAIL_BYTES)
}

/// The key of a schema: a hash of its bytes.
fn key(footer: &[u8], schema: &footer::Schema) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(&(schema.elements.len() as u64).to_le_bytes());
    hash.update(&footer[schema.elements.clone()]);
    hash.update(&footer[schema.arrow.clone()]);
    hash.digest128()
}

fn arrow_schema(footer: &[u8]) -> Result<SchemaRef> {
    let metadata = decode_footer(footer)?;
    guarded("the Parquet schema", || {
        let file = metadata.file_metadata();
        let schema = parquet_to_arrow_schema(file.schema_descr(), file.key_value_metadata())
            .map_err(parquet_error)?;
        // The file's own metadata does not affect rows, and differs between files.
        Ok(Arc::new(Schema::new(decodable(schema.fields()))))
    })
}

/// Columns as the decoder can make them: of some types it makes no dictionaries, although the Arrow
/// schema in the file says that the writer had them. They are read as their values, as PyArrow does.
pub(super) fn decodable(fields: &Fields) -> Fields {
    fields.iter().map(decodable_field).collect()
}

fn decodable_field(field: &FieldRef) -> FieldRef {
    let kind = decodable_type(field.data_type());
    match kind == *field.data_type() {
        true => field.clone(),
        false => Arc::new(Field::clone(field).with_data_type(kind)),
    }
}

fn decodable_type(kind: &DataType) -> DataType {
    match kind {
        DataType::Dictionary(_, values)
            if matches!(
                **values,
                DataType::Boolean
                    | DataType::Float16
                    | DataType::Decimal32(..)
                    | DataType::Decimal64(..)
                    | DataType::Decimal128(..)
                    | DataType::Decimal256(..)
            ) =>
        {
            DataType::clone(values)
        }
        DataType::List(of) => DataType::List(decodable_field(of)),
        DataType::LargeList(of) => DataType::LargeList(decodable_field(of)),
        DataType::FixedSizeList(of, size) => DataType::FixedSizeList(decodable_field(of), *size),
        DataType::Map(of, sorted) => DataType::Map(decodable_field(of), *sorted),
        DataType::Struct(fields) => DataType::Struct(decodable(fields)),
        kind => kind.clone(),
    }
}

/// Builds a whole footer that [`footer::scan`] found well-formed; statistics are left out.
pub(super) fn decode_footer(footer: &[u8]) -> Result<ParquetMetaData> {
    let options = ParquetMetaDataOptions::new()
        .with_column_stats_policy(ParquetStatisticsPolicy::SkipAll)
        .with_size_stats_policy(ParquetStatisticsPolicy::SkipAll)
        .with_encoding_stats_policy(ParquetStatisticsPolicy::SkipAll);
    guarded("the Parquet footer", || {
        ParquetMetaDataReader::decode_metadata_with_options(footer, Some(&options))
            .and_then(without_dictionaries_at_0)
            .map_err(parquet_error)
    })
}

/// A dictionary at offset 0 means none, as in [`footer::scan`]; the decoder would read it there.
fn without_dictionaries_at_0(metadata: ParquetMetaData) -> ParquetResult<ParquetMetaData> {
    let at_0 = |chunk: &ColumnChunkMetaData| chunk.dictionary_page_offset() == Some(0);
    if !metadata
        .row_groups()
        .iter()
        .any(|g| g.columns().iter().any(at_0))
    {
        return Ok(metadata);
    }
    let groups = metadata.row_groups().iter().map(|group| {
        let columns = group.columns().iter().map(|chunk| {
            if at_0(chunk) {
                let chunk = chunk.clone().into_builder();
                chunk.set_dictionary_page_offset(None).build()
            } else {
                Ok(chunk.clone())
            }
        });
        let columns = columns.collect::<ParquetResult<_>>()?;
        group
            .clone()
            .into_builder()
            .set_column_metadata(columns)
            .build()
    });
    let groups = groups.collect::<ParquetResult<_>>()?;
    Ok(metadata.into_builder().set_row_groups(groups).build())
}
