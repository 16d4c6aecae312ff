//! Rows of formats whose records just follow each other: TFRecord, JSONL, CSV, MDS and
//! Megatron-LM's sequences.
//!
//! Reads the pieces that hold wanted rows, and makes a batch of those rows. A few bytes of JSON make
//! many of a batch (a line of `{}` is a null in each column), so memory is counted while decoding.

use crate::{
    csv, example, jsonl, mds, megatron,
    tabular::{BinaryRows, Detail, FileIndex, Format, Held, Need, Rows, text_rows},
    tfrecord,
};
use arrow_array::RecordBatch;
use arrow_schema::{Schema, SchemaRef};
use bytes::Bytes;
use forebay_core::{Error, Result, sync::Mutex};
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    ops::Range,
    sync::Arc,
};

/// Up to this, each attempt to decode has twice the room of the one before.
const AMPLE_BYTES: u64 = 16 << 20;

#[derive(Debug)]
pub(crate) struct Read {
    index: Arc<FileIndex>,
    block: usize,
    rows: Rows,
    schema: SchemaRef,
    ranges: Vec<Range<u64>>,
    held: Held,
    /// Memory that decoding is thought to take, because of other rows or of an attempt that had too
    /// little.
    expected: u64,
    /// Whether it is only because of other rows.
    guessed: bool,
    memory: Arc<RowMemory>,
    /// [`hash_of`] the schema.
    columns: u64,
    decoded: Option<RecordBatch>,
}

/// The memory that a row of a file took when the last ones were decoded, and a hash of their
/// columns.
#[derive(Debug, Default)]
pub(crate) struct RowMemory(Mutex<(u64, u64)>);

impl RowMemory {
    /// A guess of what rows will take that have this many bytes in the file. Without one, decoding
    /// finds out by running out of room, and begins again.
    fn guess(&self, columns: u64, rows: u64, bytes: u64) -> u64 {
        let (of, row) = *self.0.lock();
        if of != columns {
            return 0;
        }
        // Rows that took more say nothing of others, and what is guessed has to be granted. Small
        // numbers take many times what they take in the file.
        let most = bytes.saturating_mul(16).min(4 * AMPLE_BYTES);
        row.saturating_mul(rows)
            .min(most.max(bytes.saturating_mul(4)))
    }

    fn learn(&self, columns: u64, rows: u64, bytes: u64) {
        if let Some(row) = bytes.checked_div(rows) {
            // Others may be somewhat larger.
            *self.0.lock() = (columns, row.saturating_mul(9) / 8 + 1);
        }
    }
}

fn hash_of(schema: &Schema) -> u64 {
    let mut hasher = DefaultHasher::new();
    schema.hash(&mut hasher);
    hasher.finish()
}

/// Memory for decoded rows. What is taken is counted before it is allocated, and generously,
/// because vectors grow by doubling.
#[derive(Debug)]
pub(crate) struct Room {
    taken: u64,
    allowed: u64,
}

impl Room {
    /// What a value takes besides its bytes: an offset, and whether it is there.
    pub const VALUE_BYTES: u64 = 16;

    /// For a vector with this capacity that is to hold this many bytes: if they do not fit, it
    /// doubles at the least. Returns the capacity that it then has.
    pub fn take_grown(&mut self, capacity: u64, bytes: u64) -> Result<u64, Stop> {
        if bytes <= capacity {
            return Ok(capacity);
        }
        let grown = capacity.saturating_mul(2).max(bytes);
        self.take(grown - capacity)?;
        Ok(grown)
    }

    /// The same before `bytes` are appended.
    pub fn take_appended(&mut self, to: &Vec<u8>, bytes: usize) -> Result<(), Stop> {
        self.take_grown(to.capacity() as u64, to.len() as u64 + bytes as u64)
            .map(|_| ())
    }

    pub fn take(&mut self, bytes: u64) -> Result<(), Stop> {
        self.taken = self.taken.saturating_add(bytes);
        match self.taken > self.allowed {
            true => Err(Stop::Full),
            false => Ok(()),
        }
    }
}

/// Why decoding stopped.
#[derive(Debug)]
pub(crate) enum Stop {
    Error(Error),
    /// What was decoded does not fit into the [`Room`].
    Full,
}

impl Stop {
    pub fn map(self, f: impl FnOnce(Error) -> Error) -> Self {
        match self {
            Stop::Error(e) => Stop::Error(f(e)),
            Stop::Full => Stop::Full,
        }
    }
}

impl From<Error> for Stop {
    fn from(e: Error) -> Self {
        Stop::Error(e)
    }
}

impl Read {
    pub fn new(
        index: Arc<FileIndex>,
        memory: Arc<RowMemory>,
        block: usize,
        rows: Rows,
        schema: SchemaRef,
    ) -> Result<Self> {
        let ranges = match &index.detail {
            _ if schema.fields().is_empty() => Vec::new(),
            Detail::Sequences(_) if !megatron::Builder::needs_bytes(&schema) => Vec::new(),
            Detail::Sequences(sequences) => ranges_of(sequences, &index, block, &rows),
            _ => index.blocks().bytes_of_rows(block, rows.slice()),
        };
        let bytes = ranges.iter().map(|r| r.end - r.start).sum();
        let count = rows.count(index.blocks().block_rows(block)) as u64;
        let columns = hash_of(&schema);
        Ok(Self {
            expected: memory.guess(columns, count, bytes),
            guessed: true,
            memory,
            columns,
            index,
            block,
            rows,
            schema,
            ranges,
            held: Held::default(),
            decoded: None,
        })
    }

    /// Decodes as soon as all bytes are here, into at most about `allowed` bytes.
    pub fn step(&mut self, allowed: u64) -> Result<Need> {
        if self.decoded.is_some() {
            return Ok(Need::Done);
        }
        let missing = self.held.missing(&self.ranges);
        if !missing.is_empty() {
            return Ok(Need::Ranges(missing));
        }
        if self.expected > allowed {
            return Ok(Need::Memory(self.expected));
        }
        let mut room = Room { taken: 0, allowed };
        let mut rows = 0;
        match self.decode(&mut room, &mut rows) {
            Ok(batch) => {
                self.memory.learn(self.columns, rows, room.taken);
                self.decoded = Some(batch);
            }
            Err(Stop::Error(e)) => return Err(e),
            // It begins again with more room; not with much more than is known to be needed, for
            // that may be refused.
            Err(Stop::Full) => {
                let more = match allowed < AMPLE_BYTES {
                    true => allowed,
                    false => allowed / 4,
                };
                let least = allowed.saturating_add(more.max(1));
                (self.expected, self.guessed) = (room.taken.max(least), false);
                return Ok(Need::Memory(self.expected));
            }
        }
        Ok(Need::Done)
    }

    /// Decodes with what is allowed, if it asked for more because of other rows. Whether it did.
    pub fn forget_guess(&mut self) -> bool {
        let guessed = std::mem::take(&mut self.guessed);
        if guessed {
            self.expected = 0;
        }
        guessed
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.held.put(offset, bytes);
        Ok(())
    }

    pub fn finish(self) -> Result<RecordBatch> {
        self.decoded
            .ok_or_else(|| Error::internal("rows were asked for before they were decoded"))
    }

    /// `rows` is how many of them were decoded.
    fn decode(&self, room: &mut Room, rows: &mut u64) -> Result<RecordBatch, Stop> {
        let count = self.rows.count(self.index.blocks().block_rows(self.block));
        let schema = self.schema.clone();
        if schema.fields().is_empty() {
            let options = arrow_array::RecordBatchOptions::new().with_row_count(Some(count));
            return RecordBatch::try_new_with_options(schema, Vec::new(), &options)
                .map_err(|e| crate::tabular::arrow_error(e).into());
        }
        if matches!(self.index.detail, Detail::TfRecord { example: true }) {
            let mut builder = example::Builder::new(schema)?;
            self.each(|record, at| {
                *rows += 1;
                builder
                    .push(record, room)
                    .map_err(|stop| stop.map(|e| e.context(format!("the record at offset {at}"))))
            })?;
            return Ok(builder.finish()?);
        }
        if self.index.format == Format::Jsonl {
            let mut builder = jsonl::Builder::new(schema)?;
            let first = self.index.blocks().row_range(self.block).start;
            let row_of = |n| format!("row {} of the file", first + self.rows.nth(n));
            self.each(|line, _| {
                let n = *rows as usize;
                *rows += 1;
                builder
                    .push(line, room)
                    .map_err(|stop| stop.map(|e| e.context(row_of(n))))
            })?;
            return builder.finish(count).map_err(|(misfit, kind)| {
                Stop::Error(Error::new(kind, misfit.why).context(row_of(misfit.row)))
            });
        }
        if let Some(delimiter) = csv::delimiter(self.index.format) {
            let mut builder = csv::Builder::new(schema, &self.index.schema, delimiter)?;
            let first = self.index.blocks().row_range(self.block).start;
            let row_of = |n| format!("row {} of the file", first + self.rows.nth(n));
            self.each(|row, _| {
                let n = *rows as usize;
                *rows += 1;
                builder
                    .push(row, room)
                    .map_err(|stop| stop.map(|e| e.context(row_of(n))))
            })?;
            return builder.finish(count).map_err(|(misfit, kind)| {
                Stop::Error(Error::new(kind, misfit.why).context(row_of(misfit.row)))
            });
        }
        if let Detail::Mds(layout) = &self.index.detail {
            let mut builder = mds::Builder::new(schema, &self.index.schema)?;
            self.each(|sample, at| {
                *rows += 1;
                builder
                    .push(sample, layout, room)
                    .map_err(|stop| stop.map(|e| e.context(format!("the sample at offset {at}"))))
            })?;
            return Ok(builder.finish(count)?);
        }
        if let Detail::Sequences(sequences) = &self.index.detail {
            return self.decode_sequences(sequences, room, rows);
        }
        let all = match self.rows {
            Rows::All => self.ranges.iter().map(|r| r.end - r.start).sum(),
            Rows::Sorted(_) => 0,
        };
        // Of all rows it is known how much they take.
        room.take(all + Room::VALUE_BYTES * count as u64)?;
        let mut column = BinaryRows::with_capacity(count, all as usize);
        self.each(|record, _| {
            *rows += 1;
            if all == 0 {
                room.take_appended(column.data(), record.len())?;
            }
            Ok(column.push(record)?)
        })?;
        Ok(text_rows(schema, column.finish())?)
    }

    fn decode_sequences(
        &self,
        sequences: &megatron::Sequences,
        room: &mut Room,
        rows: &mut u64,
    ) -> Result<RecordBatch, Stop> {
        let blocks = self.index.blocks();
        let count = self.rows.count(blocks.block_rows(self.block));
        let mut builder = megatron::Builder::new(self.schema.clone(), count, room)?;
        let needs_bytes = megatron::Builder::needs_bytes(&self.schema);
        each_sequence(
            sequences,
            &self.index,
            self.block,
            &self.rows,
            |sequence, place| {
                let bytes = match needs_bytes {
                    true => self.held.get(&place),
                    false => Some(Bytes::new()),
                };
                let bytes =
                    bytes.ok_or_else(|| Error::internal("bytes of a sequence were not fed"))?;
                *rows += 1;
                builder.push(sequence, &bytes, room)
            },
        )?;
        Ok(builder.finish(count)?)
    }

    /// Each wanted record, and where it is.
    fn each(&self, mut take: impl FnMut(&[u8], u64) -> Result<(), Stop>) -> Result<(), Stop> {
        let blocks = self.index.blocks();
        let wanted = self.rows.slice();
        for piece in blocks.pieces_of_rows(self.block, wanted) {
            let bytes = self
                .held
                .get(&piece.bytes)
                .ok_or_else(|| Error::internal("bytes of a piece were not fed"))?;
            let layout = match &self.index.detail {
                Detail::Mds(layout) => {
                    let samples = piece.rows.end - piece.rows.start;
                    layout.check(&bytes, samples, piece.bytes.start)?;
                    Some(layout)
                }
                _ => None,
            };
            let (mut row, mut at) = (piece.rows.start, 0usize);
            let mut next = wanted.map(|w| {
                w[w.partition_point(|&r| r < piece.rows.start)..]
                    .iter()
                    .copied()
            });
            let mut target = next.as_mut().map_or(Some(row), Iterator::next);
            while let Some(wanted_row) = target.filter(|&r| r < piece.rows.end) {
                let here = piece.bytes.start + at as u64;
                let is_wanted = wanted_row == row;
                let (record, len) = match (self.index.format, layout) {
                    (_, Some(layout)) => {
                        let len = layout.len(&bytes[at..]);
                        (Some(&bytes[at..at + len]), len)
                    }
                    (Format::Jsonl, _) => jsonl::next(&bytes[at..]),
                    (Format::Csv, _) => csv::next(&bytes[at..], b','),
                    (Format::Tsv, _) => csv::next(&bytes[at..], b'\t'),
                    _ => tfrecord::next(&bytes[at..], here, is_wanted)?,
                };
                if len == 0 {
                    return Err(Error::version_changed(format!(
                        "the file no longer has the row at offset {here} that it had when it was \
                         indexed"
                    ))
                    .hint("open the dataset again")
                    .into());
                }
                at += len;
                // Lines of whitespace are not rows.
                let Some(record) = record else { continue };
                if is_wanted {
                    take(record, here)?;
                    target = next.as_mut().map_or(Some(row + 1), Iterator::next);
                }
                row += 1;
            }
        }
        Ok(())
    }
}

/// Sequences nearer to each other than this are read together.
const NEAR_BYTES: u64 = 8 << 10;

/// Where the wanted sequences are: how long each is is known, so no others are read, but those
/// between near ones.
fn ranges_of(
    sequences: &megatron::Sequences,
    index: &FileIndex,
    block: usize,
    rows: &Rows,
) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let pushed = each_sequence(sequences, index, block, rows, |_, place| {
        match ranges.last_mut() {
            _ if place.is_empty() => {}
            Some(last) if place.start < last.end.saturating_add(NEAR_BYTES) => {
                last.end = place.end;
            }
            _ => ranges.push(place),
        }
        Ok::<_, std::convert::Infallible>(())
    });
    pushed.map_or_else(|never| match never {}, |()| ranges)
}

/// Each wanted sequence of a block, and where its tokens are.
fn each_sequence<E>(
    sequences: &megatron::Sequences,
    index: &FileIndex,
    block: usize,
    rows: &Rows,
    mut take: impl FnMut(megatron::Sequence, Range<u64>) -> Result<(), E>,
) -> Result<(), E> {
    let wanted = rows.slice();
    for piece in index.blocks().pieces_of_rows(block, wanted) {
        let mut next = wanted.map(|w| &w[w.partition_point(|&r| r < piece.rows.start)..]);
        let mut at = piece.bytes.start;
        for (row, sequence) in piece.rows.clone().zip(sequences.of_piece(piece.number)) {
            let place = at..at + sequence.bytes;
            at = place.end;
            match &mut next {
                None => {}
                Some([first, rest @ ..]) if *first == row => next = Some(rest),
                Some([]) => break,
                Some(_) => continue,
            }
            take(sequence, place)?;
        }
    }
    Ok(())
}
