//! Rows of an archive: the bytes of their members, each read by itself or together with its
//! neighbours.

use super::{Grouping, SAMPLE_KEY, ZIP_KEY};
use crate::{
    ArchiveKind, Extent, MemberDecoder, MemberIndex, Place, Storage,
    tabular::{BinaryRows, Detail, FileIndex, Held, Need, Projection, Rows, arrow_error},
};
use arrow_array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use forebay_core::{Error, Result, name::shorten};
use std::{ops::Range, sync::Arc};

/// Members no further apart than this are read as one: between them are headers and padding.
const GAP_BYTES: u64 = 4 << 10;
/// A zip member's header is requested together with its data, with room for a name of this length
/// and an extra field.
const ZIP_HEADER_ROOM_BYTES: u64 = 512;

/// The schema of rows of an archive under a projection. Columns that the archive lacks are null:
/// other archives of the dataset may have them.
pub(crate) fn schema(index: &FileIndex, projection: &Projection) -> SchemaRef {
    let Projection::Columns(names) = projection else {
        return index.schema().clone();
    };
    let field = |name: &String| match index.schema().field_with_name(name) {
        Ok(field) => field.clone(),
        Err(_) => Field::new(name, DataType::Binary, true),
    };
    Arc::new(Schema::new(names.iter().map(field).collect::<Vec<_>>()))
}

#[derive(Debug)]
pub(crate) struct Read {
    schema: SchemaRef,
    keys: Vec<String>,
    /// For each row and each column except the key: the member.
    cells: Vec<Option<u32>>,
    members: Arc<MemberIndex>,
    held: Held,
    /// Wanted bytes that have not arrived yet.
    wanted: Vec<Range<u64>>,
    /// The unpacked bytes of each column except the key.
    sizes: Vec<u64>,
    /// Whether the code has looked for zip members whose headers are longer than expected.
    checked: bool,
}

impl Read {
    pub fn new(
        index: &FileIndex,
        members: Arc<MemberIndex>,
        block: usize,
        rows: Rows,
        projection: &Projection,
    ) -> Result<Self> {
        let Detail::Members(places) = &index.detail else {
            return Err(Error::internal("an archive without its members' places"));
        };
        let zip = members.kind() == ArchiveKind::Zip;
        let schema = schema(index, projection);
        if let (true, Projection::Columns(_)) = (zip, projection) {
            projection.indices(index.schema())?;
        }
        let columns: Vec<&str> = schema
            .fields()
            .iter()
            .map(|f| f.name().as_str())
            .filter(|&n| !is_key(n, zip))
            .collect();
        let (mut keys, mut cells) = (Vec::new(), Vec::new());
        let wanted = rows.slice();
        for piece in index.blocks().pieces_of_rows(block, wanted) {
            let mut row = piece.rows.start;
            Grouping::of(members.kind()).each(
                &members,
                places.first[piece.number] as usize,
                |_, sample| {
                    if wanted.is_none_or(|w| w.binary_search(&row).is_ok()) {
                        keys.push(sample.key.clone());
                        for column in &columns {
                            cells.push(
                                sample
                                    .fields
                                    .iter()
                                    .find(|(f, _)| f == column)
                                    .map(|&(_, member)| member as u32),
                            );
                        }
                    }
                    row += 1;
                    Ok(row < piece.rows.end)
                },
            )?;
        }
        if keys.len() != rows.count(index.blocks().block_rows(block)) {
            return Err(Error::version_changed(
                "the samples of the archive changed after it was indexed",
            )
            .hint("open the dataset again"));
        }
        let mut places = Vec::with_capacity(cells.len());
        let mut sizes = vec![0u64; columns.len()];
        for (cell, &number) in cells.iter().enumerate() {
            let Some(number) = number else { continue };
            let extent = extent(&members, number)?;
            let size = &mut sizes[cell % columns.len()];
            *size = size.saturating_add(extent.size);
            match extent.place()? {
                Place::Archive(range) | Place::Decompressed(range) => places.push(range),
                Place::ZipLocalHeader(header) => {
                    let end = header
                        .end
                        .saturating_add(extent.stored_size + ZIP_HEADER_ROOM_BYTES)
                        .min(extent.bound);
                    places.push(header.start..end.max(header.end));
                }
            }
        }
        Ok(Self {
            schema,
            keys,
            cells,
            members,
            held: Held::default(),
            wanted: join(places),
            sizes,
            checked: !zip,
        })
    }

    pub fn step(&mut self) -> Result<Need> {
        let missing = self.held.missing(&self.wanted);
        if !missing.is_empty() {
            return Ok(Need::Ranges(missing));
        }
        if !self.checked {
            self.checked = true;
            let mut longer = Vec::new();
            for &number in self.cells.iter().flatten() {
                let extent = extent(&self.members, number)?;
                let data = self.zip_data(&extent)?;
                if self.held.get(&data).is_none() {
                    longer.push(data);
                }
            }
            self.wanted = join(longer);
            return self.step();
        }
        Ok(Need::Done)
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.held.put(offset, bytes);
        Ok(())
    }

    /// Where a zip member's data is, according to its header, which is held.
    fn zip_data(&self, extent: &Extent) -> Result<Range<u64>> {
        match extent.place()? {
            Place::ZipLocalHeader(header) => extent.zip_data_range(&self.bytes(&header)?),
            Place::Archive(range) | Place::Decompressed(range) => Ok(range),
        }
    }

    fn bytes(&self, range: &Range<u64>) -> Result<Bytes> {
        self.held
            .get(range)
            .ok_or_else(|| Error::internal("bytes of a member were not fed"))
    }

    /// The memory that the columns take.
    pub fn decoded_bytes(&self) -> u64 {
        const EACH_BYTES: u64 = 8;
        let keys = self.keys.iter().map(|key| key.len() as u64);
        let each = EACH_BYTES * (self.keys.len() + self.cells.len()) as u64;
        keys.chain(self.sizes.iter().copied())
            .fold(each, u64::saturating_add)
    }

    pub fn finish(self) -> Result<RecordBatch> {
        let zip = self.members.kind() == ArchiveKind::Zip;
        let width = self.sizes.len();
        let options = RecordBatchOptions::new().with_row_count(Some(self.keys.len()));
        let mut columns: Vec<ArrayRef> = Vec::with_capacity(self.schema.fields().len());
        let mut at = 0;
        for field in self.schema.fields() {
            if is_key(field.name(), zip) {
                let mut keys = BinaryRows::with_capacity(
                    self.keys.len(),
                    self.keys.iter().map(String::len).sum(),
                );
                self.keys.iter().try_for_each(|k| keys.push(k.as_bytes()))?;
                columns.push(keys.finish_text()?);
                continue;
            }
            let mut column = BinaryRows::with_capacity(
                self.keys.len(),
                self.sizes[at].min(i32::MAX as u64) as usize,
            );
            for row in 0..self.keys.len() {
                match self.cells[row * width + at] {
                    None => column.push_null(),
                    Some(number) => self.member(number, &mut column).map_err(|e| {
                        let name = self.members.member(number as usize).map_or("", |m| m.name);
                        e.context(format!("the member {:?}", shorten(name)))
                    })?,
                }
            }
            columns.push(column.finish());
            at += 1;
        }
        RecordBatch::try_new_with_options(self.schema, columns, &options).map_err(arrow_error)
    }

    fn member(&self, number: u32, column: &mut BinaryRows) -> Result<()> {
        let extent = extent(&self.members, number)?;
        let data = self.bytes(&self.zip_data(&extent)?)?;
        if extent.kind == ArchiveKind::Zip {
            MemberDecoder::new(&extent)?.decode_all(&data, column.data())?;
            column.end_value()
        } else {
            if extent.storage != Storage::Stored {
                return Err(Error::internal("a compressed member of a tar"));
            }
            column.push(&data)
        }
    }
}

fn is_key(column: &str, zip: bool) -> bool {
    column == if zip { ZIP_KEY } else { SAMPLE_KEY }
}

fn extent(members: &MemberIndex, number: u32) -> Result<Extent> {
    members
        .member(number as usize)
        .map(|m| m.extent)
        .ok_or_else(|| Error::internal("a member of a row is not in the index"))
}

/// Turns places into ranges to read: sorted, neighbours merged.
fn join(mut places: Vec<Range<u64>>) -> Vec<Range<u64>> {
    places.retain(|p| p.start < p.end);
    places.sort_unstable_by_key(|p| p.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for place in places {
        match joined.last_mut() {
            Some(last) if place.start <= last.end.saturating_add(GAP_BYTES) => {
                last.end = last.end.max(place.end)
            }
            _ => joined.push(place),
        }
    }
    joined
}
