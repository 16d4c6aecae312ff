//! Reads some rows and columns of one row group.
//!
//! If few rows are wanted, first come the page indexes of the wanted columns that are not known
//! yet; then what the decoder asks for: pages, or whole column chunks. If at least half of the rows
//! are wanted, all are decoded and the wanted ones taken, batch by batch. Rows are decoded in
//! batches of bounded size, which are kept as they are. Neither a row group's footer nor its pages
//! say what it unpacks to (a dictionary turns kilobytes into gigabytes), so memory is requested by
//! what the pages' headers suggest, and then by the actual results.
//!
//! Invariant: a decoder that is told to select rows sees page indexes that do not change during its
//! life. All those that it looks at were read before it was created; whether a row group's page
//! indexes are used at all depends only on the row group, never on one read.

use super::{guarded, open::Pages, pages::Checker, parquet_error};
use crate::tabular::{FileIndex, Held, Need, Projection, Rows, arrow_error, take_rows};
use ::parquet::{
    DecodeResult,
    arrow::{
        ProjectionMask,
        arrow_reader::{ArrowReaderMetadata, RowSelection},
        push_decoder::{ParquetPushDecoder, ParquetPushDecoderBuilder},
    },
};
use arrow_array::{
    Array, ArrayRef, OffsetSizeTrait, RecordBatch, RecordBatchOptions, cast::AsArray,
};
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_schema::{DataType, Fields, Schema, SchemaRef};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result, limits};
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::Arc,
};

/// Smaller row groups are read by column chunk: finding the pages would take longer.
const PAGES_FROM_BYTES: u64 = 128 << 10;
/// Rows decoded at a time: at most, and at least.
const BATCH_ROWS: usize = 64 << 10;
const BATCH_ROWS_LEAST: usize = 64;
/// So much of what views keep of a column need not be counted.
const UNCOUNTED_BYTES: u64 = 64 << 10;
/// Target size of a batch.
const BATCH_BYTES: u64 = 16 << 20;

#[derive(Debug)]
pub(crate) struct Read {
    arrow: ArrowReaderMetadata,
    /// The same with views, if that is worth it and nothing was read yet.
    viewed: Option<ArrowReaderMetadata>,
    /// Where the bytes are in memory that were fed, if there may be views.
    fed: Option<Vec<Range<usize>>>,
    pages: Arc<Pages>,
    row_group: usize,
    group_rows: u32,
    rows: Rows,
    /// Whether the decoder selects the rows; otherwise they are taken from all rows.
    select: bool,
    mask: ProjectionMask,
    /// Wanted columns of the schema, in the order of the projection.
    columns: Vec<usize>,
    schema: SchemaRef,
    /// Where the wanted chunks are, and of which columns.
    chunks: Vec<(Range<u64>, usize)>,
    /// Page indexes that are needed: column, place.
    indexes: Vec<(usize, Range<u64>)>,
    held: Held,
    checker: Checker,
    decoder: Option<ParquetPushDecoder>,
    batch_rows: usize,
    /// Wanted rows of each batch, in the order of the file's columns.
    decoded: Vec<RecordBatch>,
    /// Their memory, and the buffers that were counted for it.
    decoded_bytes: u64,
    counted: HashSet<usize>,
    /// Rows that were decoded, and how many of the wanted `rows` were among them.
    seen_rows: usize,
    seen_wanted: usize,
    /// Memory available for decoded rows.
    allowed: u64,
    done: bool,
}

impl Read {
    pub(super) fn new(
        arrow: &ArrowReaderMetadata,
        pages: &Arc<Pages>,
        index: &FileIndex,
        row_group: usize,
        rows: Rows,
        projection: &Projection,
    ) -> Result<Self> {
        let columns = projection.indices(index.schema())?;
        let group_rows = index.blocks().block_rows(row_group);
        let schema = projection.schema(index.schema())?;
        let descr = arrow.metadata().file_metadata().schema_descr();
        let mask = match projection {
            Projection::All => ProjectionMask::all(),
            Projection::Columns(_) => ProjectionMask::roots(descr, columns.iter().copied()),
        };
        let wanted = rows.count(group_rows);
        let done = wanted == 0 || columns.is_empty();
        let group = arrow.metadata().row_group(row_group);
        let leaves = || (0..group.num_columns()).filter(|&i| mask.leaf_included(i));
        let place = |i: usize| {
            // The footer was checked: no offset is negative.
            let (start, len) = group.column(i).byte_range();
            start..start + len
        };
        let chunks: Vec<_> = leaves().map(|i| (place(i), i)).collect();
        let mut indexes = Vec::new();
        let select = wanted < group_rows.div_ceil(2) as usize;
        let bytes = index.blocks().bytes(row_group);
        if !done && select && bytes.end - bytes.start >= PAGES_FROM_BYTES {
            for i in leaves() {
                if let Some(range) = pages.wanted(row_group, i, group.column(i))? {
                    if range.end > index.size() {
                        return Err(Error::corrupt(format!(
                            "the Parquet page index at offset {} is past the end of the file",
                            range.start
                        )));
                    }
                    indexes.push((i, range));
                }
            }
        }
        Ok(Self {
            arrow: arrow.clone(),
            viewed: None,
            fed: None,
            pages: pages.clone(),
            row_group,
            group_rows,
            rows,
            select,
            mask,
            columns,
            schema,
            chunks,
            indexes,
            held: Held::default(),
            checker: Checker::new(select),
            decoder: None,
            batch_rows: if select { wanted } else { group_rows as usize }.clamp(1, BATCH_ROWS),
            decoded: Vec::new(),
            decoded_bytes: 0,
            counted: HashSet::new(),
            seen_rows: 0,
            seen_wanted: 0,
            allowed: u64::MAX,
            done,
        })
    }

    /// `viewed` is the file with text and bytes as views.
    pub(super) fn or_viewed(self, viewed: Option<&ArrowReaderMetadata>) -> Self {
        Self {
            viewed: viewed.cloned(),
            ..self
        }
    }

    /// Has long text and bytes come as views of the pages that they lie in. Before the first step.
    pub fn let_views(&mut self) {
        if let Some(viewed) = self.viewed.take() {
            self.arrow = viewed;
            self.fed = Some(Vec::new());
        }
    }

    pub fn allow(&mut self, bytes: u64) {
        self.allowed = bytes;
    }

    pub fn step(&mut self) -> Result<Need> {
        if self.done {
            return Ok(Need::Done);
        }
        if !self.indexes.is_empty() {
            let ranges: Vec<_> = self.indexes.iter().map(|(_, r)| r.clone()).collect();
            let missing = self.held.missing(&ranges);
            if !missing.is_empty() {
                return Ok(Need::Ranges(join(missing)));
            }
            for (column, range) in std::mem::take(&mut self.indexes) {
                if let Some(bytes) = self.held.get(&range) {
                    let chunk = self
                        .arrow
                        .metadata()
                        .row_group(self.row_group)
                        .column(column);
                    self.pages.set(
                        self.row_group,
                        column,
                        chunk,
                        self.group_rows,
                        range.start,
                        &bytes,
                    )?;
                }
            }
            self.held.clear();
        }
        let mut decoder = match self.decoder.take() {
            Some(decoder) => decoder,
            None => self.decoder()?,
        };
        loop {
            let expected = self.expected();
            if expected > self.allowed {
                self.decoder = Some(decoder);
                return Ok(Need::Memory(expected));
            }
            match guarded(&self.what(), || decoder.try_decode().map_err(parquet_error))
                .map_err(|e| e.context(self.what()))?
            {
                DecodeResult::NeedsData(ranges) => {
                    let missing = self.held.missing(&ranges);
                    if !missing.is_empty() {
                        self.decoder = Some(decoder);
                        return Ok(Need::Ranges(join(missing)));
                    }
                    let mut buffers = Vec::with_capacity(ranges.len());
                    for range in &ranges {
                        let bytes = self
                            .held
                            .get(range)
                            .ok_or_else(|| Error::internal("bytes that were there are gone"))?;
                        let group = self.arrow.metadata().row_group(self.row_group);
                        let column = self
                            .chunks
                            .iter()
                            .find(|(chunk, _)| chunk.contains(&range.start));
                        let column = column
                            .ok_or_else(|| {
                                Error::internal("bytes outside all columns are requested")
                            })?
                            .1;
                        self.checker.pages(
                            range.start,
                            &bytes,
                            group.column(column),
                            self.pages.longest(self.row_group, column),
                        )?;
                        buffers.push(bytes);
                    }
                    let batch_rows = self.rows_at_a_time();
                    if batch_rows < self.batch_rows && self.seen_rows == 0 {
                        // Nothing was decoded yet: start again, with shorter batches.
                        self.batch_rows = batch_rows;
                        decoder = self.decoder()?;
                        let again =
                            guarded(&self.what(), || decoder.try_decode().map_err(parquet_error))?;
                        if !matches!(&again, DecodeResult::NeedsData(same) if *same == ranges) {
                            return Err(Error::internal(
                                "a decoder that began anew asks for other bytes",
                            ));
                        }
                    }
                    self.held.clear();
                    decoder
                        .push_ranges(ranges, buffers)
                        .map_err(parquet_error)?;
                }
                DecodeResult::Data(batch) => self.take(batch)?,
                DecodeResult::Finished => {
                    self.done = true;
                    return Ok(Need::Done);
                }
            }
        }
    }

    /// The total number of rows that the decoder outputs.
    fn rows_to_decode(&self) -> usize {
        match self.select {
            true => self.rows.count(self.group_rows),
            false => self.group_rows as usize,
        }
    }

    fn rows_at_a_time(&self) -> usize {
        let group = self.arrow.metadata().row_group(self.row_group);
        let mean = BATCH_BYTES / self.checker.expected_row_bytes(group).0.max(1);
        let longest = 4 * BATCH_BYTES / self.checker.longest_value().max(1);
        let most = usize::try_from(mean.min(longest)).unwrap_or(usize::MAX);
        self.batch_rows.min(most.max(BATCH_ROWS_LEAST))
    }

    /// The expected total after the next batch, as far as is known; if that is certain, after the
    /// last.
    fn expected(&self) -> u64 {
        let group = self.arrow.metadata().row_group(self.row_group);
        let (mut row, sure) = self.checker.expected_row_bytes(group);
        if sure && self.fed.is_some() {
            // Views keep whole pages, which were counted with the first of their rows.
            let all = self.rows.count(self.group_rows) as u64;
            return self.decoded_bytes.max(all.saturating_mul(row));
        }
        let left = self.rows_to_decode().saturating_sub(self.seen_rows);
        let mut rows = left.min(self.batch_rows);
        if sure {
            let wanted = self.rows.count(self.group_rows);
            rows = rows.max(wanted.saturating_sub(self.seen_wanted));
        } else if self.seen_wanted > 0 {
            row = self.decoded_bytes.div_ceil(self.seen_wanted as u64);
        }
        let mut more = (rows as u64).saturating_mul(row);
        if sure && self.select {
            // The rows are some of those in the pages.
            more = more.min(self.checker.expected_bytes());
        }
        self.decoded_bytes.saturating_add(more)
    }

    /// Keeps the wanted rows of a batch.
    fn take(&mut self, batch: RecordBatch) -> Result<()> {
        let rows = batch.num_rows();
        if self.checker.joins_values() {
            check_text(&batch).map_err(|e| e.context(self.what()))?;
        }
        let batch = match (&self.rows, self.select) {
            (Rows::Sorted(wanted), false) => {
                let (first, end) = (self.seen_rows, self.seen_rows + rows);
                let from = wanted.partition_point(|&row| (row as usize) < first);
                let to = wanted.partition_point(|&row| (row as usize) < end);
                let here = wanted[from..to].iter().map(|&row| row - first as u32);
                let here = Rows::Sorted(here.collect());
                guarded(&self.what(), || take_rows(&batch, &here))?
            }
            _ => batch,
        };
        self.seen_rows += rows;
        self.seen_wanted += batch.num_rows();
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let batch = match &self.fed {
            Some(fed) => without_views_of(batch, fed)?,
            None => batch,
        };
        for column in batch.columns() {
            self.count(&column.to_data());
        }
        if self.decoded_bytes > limits::BLOCK_DECODED_MAX_BYTES {
            let max = limits::BLOCK_DECODED_MAX_BYTES;
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("{} holds more than {max} bytes", self.what()),
            )
            .hint("ask for fewer rows or columns"));
        }
        self.decoded.push(batch);
        Ok(())
    }

    /// Adds up the buffers of an array that is kept. Views of several batches may point to one
    /// buffer.
    fn count(&mut self, array: &ArrayData) {
        let nulls = array.nulls().map(|nulls| nulls.buffer());
        for buffer in array.buffers().iter().chain(nulls) {
            if self.counted.insert(buffer.data_ptr().as_ptr() as usize) {
                self.decoded_bytes += buffer.capacity() as u64;
            }
        }
        for child in array.child_data() {
            self.count(child);
        }
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        if let Some(fed) = &mut self.fed {
            let start = bytes.as_ptr() as usize;
            fed.push(start..start + bytes.len());
        }
        self.held.put(offset, bytes);
        Ok(())
    }

    /// The wanted rows, in the decoded batches.
    pub fn finish(self) -> Result<Vec<RecordBatch>> {
        let what = self.what();
        let wanted = self.rows.count(self.group_rows);
        if wanted == 0 {
            return Ok(vec![RecordBatch::new_empty(self.schema)]);
        }
        if self.columns.is_empty() {
            let options = RecordBatchOptions::new().with_row_count(Some(wanted));
            return RecordBatch::try_new_with_options(self.schema, Vec::new(), &options)
                .map(|batch| vec![batch])
                .map_err(arrow_error);
        }
        let (found, all) = (self.seen_rows, self.rows_to_decode());
        if found != all || self.seen_wanted != wanted {
            return Err(Error::corrupt(format!(
                "{what} decoded to {found} of {all} rows"
            )));
        }
        if self.fed.is_some() {
            self.check_kept()?;
        }
        // The decoder returns columns in the order of the file.
        let mut sorted = self.columns.clone();
        sorted.sort_unstable();
        let order = self.columns.iter().map(|c| {
            sorted
                .binary_search(c)
                .map_err(|_| Error::internal("a column that was asked for is gone"))
        });
        let order = order.collect::<Result<Vec<usize>>>()?;
        let pieces = self.decoded.into_iter().map(|batch| {
            let columns: Vec<ArrayRef> = order.iter().map(|&at| batch.column(at).clone()).collect();
            let schema = as_held(&self.schema, &columns);
            RecordBatch::try_new(schema, columns).map_err(|e| arrow_error(e).context(&what))
        });
        pieces.collect()
    }

    /// That views keep little beside what was counted for them: a page is kept with its levels.
    ///
    /// # Errors
    /// `TooLarge` for pages whose values are less than half of them, as no writer makes them. Without
    /// views, they can be read.
    fn check_kept(&self) -> Result<()> {
        let (group, fields) = (
            self.arrow.metadata().row_group(self.row_group),
            self.arrow.schema().fields(),
        );
        let descr = self.arrow.metadata().file_metadata().schema_descr();
        let mut roots: Vec<usize> = self.columns.clone();
        roots.sort_unstable();
        for &(_, leaf) in &self.chunks {
            let root = descr.get_column_root_idx(leaf);
            let (Ok(at), true) = (
                roots.binary_search(&root),
                matches!(
                    fields[root].data_type(),
                    DataType::Utf8View | DataType::BinaryView
                ),
            ) else {
                continue;
            };
            let mut kept: HashMap<usize, usize> = HashMap::new();
            for batch in &self.decoded {
                for buffer in batch.column(at).to_data().buffers() {
                    kept.insert(buffer.as_ptr() as usize, buffer.len());
                }
            }
            let kept = kept.values().sum::<usize>() as u64;
            if self.checker.unpacked_bytes(group.column(leaf)) > 2 * kept + UNCOUNTED_BYTES {
                return Err(Error::new(
                    ErrorKind::TooLarge,
                    format!(
                        "{}: the pages of the column {:?} hold more beside its values than these take",
                        self.what(),
                        fields[root].name()
                    ),
                ));
            }
        }
        Ok(())
    }

    fn what(&self) -> String {
        format!("row group {} of the Parquet file", self.row_group)
    }

    fn decoder(&self) -> Result<ParquetPushDecoder> {
        let mut builder = ParquetPushDecoderBuilder::new_with_metadata(self.arrow.clone())
            .with_row_groups(vec![self.row_group])
            .with_projection(self.mask.clone())
            .with_batch_size(self.batch_rows);
        if let (true, Rows::Sorted(rows)) = (self.select, &self.rows) {
            builder = builder.with_row_selection(RowSelection::from_consecutive_ranges(
                runs(rows).into_iter(),
                self.group_rows as usize,
            ));
        }
        guarded(&self.what(), || builder.build().map_err(parquet_error))
    }
}

/// The schema with the types that the columns have: views of what it names.
fn as_held(schema: &SchemaRef, columns: &[ArrayRef]) -> SchemaRef {
    let types = columns.iter().map(|column| column.data_type());
    if types
        .clone()
        .eq(schema.fields().iter().map(|f| f.data_type()))
    {
        return schema.clone();
    }
    let fields = schema.fields().iter().zip(types);
    let fields: Fields = fields
        .map(|(field, of)| field.as_ref().clone().with_data_type(of.clone()))
        .collect();
    Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()))
}

/// That each text begins where a character does.
fn check_text(batch: &RecordBatch) -> Result<()> {
    for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        if begins_amid(&column.to_data()) {
            let column = field.name();
            return Err(Error::corrupt(format!(
                "text in the column {column:?} is not UTF-8"
            )));
        }
    }
    Ok(())
}

/// Whether a text in an array, or in what it is made of, begins within a character.
fn begins_amid(data: &ArrayData) -> bool {
    let is_amid = |byte: u8| byte & 0xc0 == 0x80;
    fn firsts<O: OffsetSizeTrait>(data: &ArrayData) -> impl Iterator<Item = u8> {
        let offsets = data.buffers()[0].typed_data::<O>();
        let offsets = &offsets[data.offset()..=data.offset() + data.len()];
        let ranges = offsets.windows(2).filter(|pair| pair[0] < pair[1]);
        ranges.map(|pair| data.buffers()[1].as_slice()[pair[0].as_usize()])
    }
    let amid = match data.data_type() {
        _ if data.is_empty() => false,
        DataType::Utf8 => firsts::<i32>(data).any(is_amid),
        DataType::LargeUtf8 => firsts::<i64>(data).any(is_amid),
        // A view has a length of four bytes, and then what the value begins with.
        DataType::Utf8View => {
            let mut views = data.buffers()[0].typed_data::<u128>().iter();
            views.any(|&view| view as u32 > 0 && is_amid((view >> 32) as u8))
        }
        _ => false,
    };
    amid || data.child_data().iter().any(begins_amid)
}

/// The batch without views of memory that was `fed`: a page that is not compressed is a part of it,
/// and would keep all of it.
fn without_views_of(batch: RecordBatch, fed: &[Range<usize>]) -> Result<RecordBatch> {
    let is_fed = |buffer: &Buffer| {
        let at = buffer.as_ptr() as usize;
        fed.iter().any(|range| range.contains(&at))
    };
    let columns = batch.columns().iter().map(|column| -> ArrayRef {
        match column.data_type() {
            DataType::Utf8View => {
                let views = column.as_string_view();
                if views.data_buffers().iter().any(is_fed) {
                    return Arc::new(views.gc());
                }
            }
            DataType::BinaryView => {
                let views = column.as_binary_view();
                if views.data_buffers().iter().any(is_fed) {
                    return Arc::new(views.gc());
                }
            }
            _ => {}
        }
        column.clone()
    });
    RecordBatch::try_new(batch.schema(), columns.collect()).map_err(arrow_error)
}

/// Ascending rows as ranges.
fn runs(rows: &[u32]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for &row in rows {
        let row = row as usize;
        match runs.last_mut() {
            Some(run) if run.end == row => run.end += 1,
            _ => runs.push(row..row + 1),
        }
    }
    runs
}

/// Merges ranges that touch, because one buffer may hold several of them.
fn join(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|r| r.start);
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for r in ranges {
        match joined.last_mut() {
            Some(last) if r.start <= last.end => last.end = last.end.max(r.end),
            _ => joined.push(r),
        }
    }
    joined
}
