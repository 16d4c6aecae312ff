//! An open Parquet file: its footer, built whole, and the page indexes read so far.

use super::{
    facts::Facts,
    footer, guarded,
    index::{decodable, decode_footer},
    pages::Longest,
    parquet_error,
    read::Read,
    thrift::{Bad, Compact, Type},
};
use crate::tabular::{FileIndex, Held, Need, Projection, Rows};
use ::parquet::{
    arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions},
    basic::{Compression, ConvertedType},
    file::{
        metadata::{
            ColumnChunkMetaData, OffsetIndexBuilder, ParquetMetaData, page_index::PageIndexProvider,
        },
        page_index::{column_index::ColumnIndexMetaData, offset_index::OffsetIndexMetaData},
    },
};
use arrow_schema::{DataType, FieldRef, Schema};
use bytes::Bytes;
use forebay_core::{Error, Result, limits};
use std::{
    ops::Range,
    sync::{Arc, OnceLock},
};

/// Where the footer of a file is.
pub(crate) fn footer_of(size: u64, footer_bytes: u32) -> Range<u64> {
    let end = size.saturating_sub(super::TAIL_BYTES);
    end.saturating_sub(u64::from(footer_bytes))..end
}

/// Reads a footer again, for decoding.
#[derive(Debug)]
pub(crate) struct Opener {
    footer: Range<u64>,
    size: u64,
    held: Held,
}

impl Opener {
    pub fn new(size: u64, footer_bytes: u32) -> Self {
        Self {
            footer: footer_of(size, footer_bytes),
            size,
            held: Held::default(),
        }
    }

    pub fn step(&mut self) -> Result<Need> {
        Ok(if self.held.get(&self.footer).is_some() {
            Need::Done
        } else {
            Need::one(self.footer.clone())
        })
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.held.put(offset, bytes);
        Ok(())
    }

    pub fn finish(self, index: &FileIndex) -> Result<Opened> {
        let bytes = self
            .held
            .get(&self.footer)
            .ok_or_else(|| Error::internal("the Parquet footer was not read"))?;
        let (mut groups, blocks) = (0, index.blocks());
        let mut same = true;
        let schema = footer::scan(&bytes, self.size, |group| {
            same &= groups < blocks.blocks()
                && u64::from(blocks.block_rows(groups)) == group.rows
                && blocks.bytes(groups) == group.bytes;
            groups += 1;
            Ok(())
        })?;
        let changed = || {
            Error::version_changed("the rows of the Parquet file changed after it was indexed")
                .hint("open the dataset again")
        };
        if !same || groups != blocks.blocks() {
            return Err(changed());
        }
        let chunks = groups as u64 * schema.columns;
        if chunks > limits::PARQUET_CHUNKS_MAX {
            return Err(Error::unsupported(format!(
                "the Parquet file has {chunks} column chunks; the limit for reading is {}",
                limits::PARQUET_CHUNKS_MAX
            ))
            .hint("write it with larger row groups, or as several files"));
        }
        let metadata = decode_footer(&bytes)?;
        if !as_scanned(&metadata, index, schema.columns) {
            return Err(Error::corrupt(
                "the Parquet footer contradicts itself: its row groups decode differently",
            ));
        }
        let pages = Arc::new(Pages::new(&metadata));
        let metadata = metadata
            .into_builder()
            .set_page_index(Some(pages.clone()))
            .build();
        let metadata = Arc::new(metadata);
        let read = |options| {
            guarded("the Parquet schema", || {
                ArrowReaderMetadata::try_new(metadata.clone(), options).map_err(parquet_error)
            })
        };
        let mut arrow = read(ArrowReaderOptions::new())?;
        // Indexes of earlier releases have the types that the file says.
        if arrow.schema().fields() != index.schema().fields()
            && decodable(arrow.schema().fields()) == *index.schema().fields()
        {
            arrow = read(ArrowReaderOptions::new().with_schema(index.schema().clone()))?;
        }
        if arrow.schema().fields() != index.schema().fields() {
            return Err(changed());
        }
        Ok(Opened {
            arrow,
            pages,
            viewed: OnceLock::new(),
        })
    }
}

/// Values at least so long on average are worth a view each.
const VIEWED_FROM_BYTES: i64 = 256;

/// The same file, with text and bytes as views of the pages that they lie in, where these are unpacked
/// and the values long; `None`: it has no such columns.
fn viewed(arrow: &ArrowReaderMetadata) -> Option<ArrowReaderMetadata> {
    let (metadata, schema) = (arrow.metadata(), arrow.schema());
    let columns = metadata.file_metadata().schema_descr();
    let mut fields: Vec<FieldRef> = schema.fields().iter().cloned().collect();
    for (leaf, column) in columns.columns().iter().enumerate() {
        let field = fields.get_mut(columns.get_column_root_idx(leaf))?;
        let is_text = column.converted_type() == ConvertedType::UTF8;
        let views = match field.data_type() {
            DataType::Utf8 | DataType::LargeUtf8 if is_text => DataType::Utf8View,
            DataType::Binary | DataType::LargeBinary => DataType::BinaryView,
            _ => continue,
        };
        let chunks = || metadata.row_groups().iter().map(|group| group.column(leaf));
        let (bytes, values) = chunks().fold((0i64, 0i64), |(bytes, values), chunk| {
            let bytes = bytes.saturating_add(chunk.uncompressed_size());
            (bytes, values.saturating_add(chunk.num_values()))
        });
        let is_unpacked = chunks().all(|chunk| chunk.compression() != Compression::UNCOMPRESSED);
        if is_unpacked && values > 0 && bytes / values >= VIEWED_FROM_BYTES {
            *field = Arc::new(field.as_ref().clone().with_data_type(views));
        }
    }
    if fields.iter().eq(schema.fields()) {
        return None;
    }
    let viewed = Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()));
    guarded("the Parquet schema", || {
        let options = ArrowReaderOptions::new().with_schema(viewed);
        ArrowReaderMetadata::try_new(metadata.clone(), options).map_err(parquet_error)
    })
    .ok()
}

/// Whether the decoder understood a footer as [`footer::scan`] did. Reads rely on that, and a
/// footer that has a field twice can be read in two ways.
fn as_scanned(metadata: &ParquetMetaData, index: &FileIndex, columns: u64) -> bool {
    let blocks = index.blocks();
    metadata.num_row_groups() == blocks.blocks()
        && metadata.row_groups().iter().enumerate().all(|(i, group)| {
            let (mut first, mut end, mut decoded) = (u64::MAX, 0, 0u64);
            let fits = group.columns().iter().all(|chunk| {
                let start = chunk
                    .dictionary_page_offset()
                    .unwrap_or(chunk.data_page_offset());
                let numbers =
                    [start, chunk.compressed_size(), chunk.uncompressed_size()].map(u64::try_from);
                let [Ok(start), Ok(stored), Ok(unpacked)] = numbers else {
                    return false;
                };
                first = first.min(start);
                end = end.max(start.saturating_add(stored));
                decoded = decoded.saturating_add(unpacked);
                chunk.data_page_offset() >= 0 && chunk.num_values() >= 0
            });
            fits && group.num_columns() as u64 == columns
                && group.num_rows() == i64::from(blocks.block_rows(i))
                && blocks.bytes(i) == (first..end)
                && decoded <= limits::BLOCK_DECODED_MAX_BYTES
        })
}

/// What all reads of a file share.
#[derive(Debug)]
pub(crate) struct Opened {
    arrow: ArrowReaderMetadata,
    pages: Arc<Pages>,
    viewed: OnceLock<Option<ArrowReaderMetadata>>,
}

impl Opened {
    pub fn memory_bytes(&self) -> usize {
        self.arrow.metadata().memory_size() + self.pages.memory_bytes
    }

    /// What the footer says of columns; see [`Facts`](super::facts::Facts).
    pub fn facts(&self, index: &FileIndex, footer: &[u8], columns: &Schema) -> Result<Facts> {
        Facts::read(&self.arrow, index, footer, columns)
    }

    pub fn read(
        &self,
        index: &FileIndex,
        block: usize,
        rows: Rows,
        projection: &Projection,
    ) -> Result<Read> {
        let viewed = match rows {
            Rows::All => self.viewed.get_or_init(|| viewed(&self.arrow)).as_ref(),
            Rows::Sorted(_) => None,
        };
        let read = Read::new(&self.arrow, &self.pages, index, block, rows, projection)?;
        Ok(read.or_viewed(viewed))
    }
}

/// What was found out about pages, for the columns and row groups that were asked about: where they
/// are, and the longest values of dictionaries.
///
/// A cell is set once, by the first read that needs it; until then the column appears to have no
/// page index, which is all that is known.
#[derive(Debug)]
pub(super) struct Pages {
    columns: usize,
    longest: Box<[Longest]>,
    cells: Box<[OnceLock<OffsetIndexMetaData>]>,
    any: bool,
    /// Approximate memory with all cells set.
    memory_bytes: usize,
}

impl Pages {
    fn new(metadata: &ParquetMetaData) -> Self {
        let columns = metadata.file_metadata().schema_descr().num_columns();
        let chunks = columns * metadata.num_row_groups();
        let lens = || {
            metadata
                .row_groups()
                .iter()
                .flat_map(|g| g.columns())
                .filter_map(|c| c.offset_index_length())
        };
        let any = lens().any(|len| len > 0);
        let cells: Box<[_]> = if any {
            (0..chunks).map(|_| OnceLock::new()).collect()
        } else {
            Box::default()
        };
        let longest: Box<[_]> = (0..chunks).map(|_| Longest::default()).collect();
        let memory_bytes = size_of_val(&*cells)
            + size_of_val(&*longest)
            // A location takes 24 bytes in memory, and at least 7 in the file.
            + lens()
                .map(|len| usize::try_from(len).unwrap_or(0).saturating_mul(4))
                .sum::<usize>();
        Self {
            columns,
            longest,
            cells,
            any,
            memory_bytes,
        }
    }

    pub fn longest(&self, row_group: usize, column: usize) -> &Longest {
        &self.longest[row_group * self.columns + column]
    }

    /// Where the page index of a column is, if it has one that has not been read yet.
    pub fn wanted(
        &self,
        row_group: usize,
        column: usize,
        chunk: &ColumnChunkMetaData,
    ) -> Result<Option<Range<u64>>> {
        if !self.any
            || self.cells[row_group * self.columns + column]
                .get()
                .is_some()
        {
            return Ok(None);
        }
        let (Some(offset), Some(len)) = (chunk.offset_index_offset(), chunk.offset_index_length())
        else {
            return Ok(None);
        };
        match (u64::try_from(offset), u64::try_from(len)) {
            (Ok(_), Ok(0)) => Ok(None),
            (Ok(offset), Ok(len)) => Ok(Some(offset..offset + len)),
            _ => Err(Error::corrupt(format!(
                "the Parquet page index of column {column}, row group {row_group} cannot be at \
                 {offset}"
            ))),
        }
    }

    pub fn set(
        &self,
        row_group: usize,
        column: usize,
        chunk: &ColumnChunkMetaData,
        rows: u32,
        at: u64,
        bytes: &[u8],
    ) -> Result<()> {
        let locations = parse(bytes, chunk, rows).map_err(|bad| {
            Error::corrupt(format!(
                "the Parquet page index at offset {} is damaged: {}",
                at + bad.at as u64,
                bad.what
            ))
        })?;
        // Another read may have been first, with the same result.
        let _ = self.cells[row_group * self.columns + column].set(locations);
        Ok(())
    }
}

/// Pages must follow each other within their chunk, and begin at ascending rows from 0.
pub(super) fn parse(
    bytes: &[u8],
    chunk: &ColumnChunkMetaData,
    rows: u32,
) -> Result<OffsetIndexMetaData, Bad> {
    let (start, len) = chunk.byte_range();
    let (mut end, chunk_end) = (start, start + len);
    let mut pages: Vec<(u64, i32, u32)> = Vec::new();
    let mut c = Compact::new(bytes);
    c.fields(&[], |c, id, ty| {
        if (id, ty) != (1, Type::List) {
            return Ok(false);
        }
        let (ty, n) = c.list()?;
        if ty != Type::Struct {
            return Err(c.bad("it is not a list of pages"));
        }
        for _ in 0..n {
            let (mut offset, mut size, mut first_row) = (-1, -1, -1);
            c.fields(&[], |c, id, ty| {
                match (id, ty) {
                    (1, Type::I64) => offset = c.int()?,
                    (2, Type::I32) => size = c.i32()?,
                    (3, Type::I64) => first_row = c.int()?,
                    _ => return Ok(false),
                }
                Ok(true)
            })?;
            let (Ok(offset), Ok(stored), Ok(first_row)) = (
                u64::try_from(offset),
                u64::try_from(size),
                u32::try_from(first_row),
            ) else {
                return Err(c.bad("a page has an impossible place"));
            };
            let row_fits = pages
                .last()
                .map_or(first_row == 0, |&(_, _, before)| first_row > before)
                && first_row < rows.max(1);
            if offset < end || offset.checked_add(stored).is_none_or(|e| e > chunk_end) || !row_fits
            {
                return Err(c.bad("pages overlap, or lie outside of their column"));
            }
            end = offset + stored;
            pages.push((offset, size, first_row));
        }
        Ok(true)
    })?;
    if pages.is_empty() && rows > 0 {
        return Err(c.bad("it does not have pages"));
    }
    let mut builder = OffsetIndexBuilder::new();
    for (i, &(offset, size, first_row)) in pages.iter().enumerate() {
        let next = pages.get(i + 1).map_or(rows, |p| p.2);
        builder.append_row_count(i64::from(next - first_row));
        builder.append_offset_and_size(offset as i64, size);
    }
    Ok(builder.build())
}

impl PageIndexProvider for Pages {
    fn has_offset_indexes(&self) -> bool {
        self.any
    }

    fn has_column_indexes(&self) -> bool {
        false
    }

    fn column_index(&self, _row_group: usize, _column: usize) -> Option<&ColumnIndexMetaData> {
        None
    }

    fn offset_index(&self, row_group: usize, column: usize) -> Option<&OffsetIndexMetaData> {
        self.cells.get(row_group * self.columns + column)?.get()
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
