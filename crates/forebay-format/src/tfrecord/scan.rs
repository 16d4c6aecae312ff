//! Finds the records of a TFRecord file.

use super::{FOOT_BYTES, HEAD_BYTES, next, parse_head};
use crate::{
    example,
    tabular::{BlockIndexBuilder, Detail, FileIndex, Format, IndexOptions, Need},
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use forebay_core::{Error, Result, limits};
use std::sync::Arc;

/// With `example` and without named features, the features are taken from this many first records.
const SEEN_RECORDS: usize = 32;

#[derive(Debug)]
pub(crate) struct Indexer {
    size: u64,
    /// Where the current record begins.
    at: u64,
    /// A head that was split by the end of a buffer.
    head: Vec<u8>,
    records: u64,
    blocks: BlockIndexBuilder,
    options: IndexOptions,
    piece_start: u64,
    piece_rows: u64,
    seen: Option<Seen>,
}

/// The first records, for their features.
#[derive(Debug)]
struct Seen {
    features: example::Seen,
    records: usize,
    /// The current record, whose bytes have not all arrived.
    held: Vec<u8>,
}

impl Indexer {
    pub fn new(size: u64, options: &IndexOptions) -> Self {
        let look = options.example.as_ref().is_some_and(|e| e.is_empty());
        Self {
            size,
            at: 0,
            head: Vec::new(),
            records: 0,
            blocks: BlockIndexBuilder::new(size),
            options: options.clone(),
            piece_start: 0,
            piece_rows: 0,
            seen: look.then(|| Seen {
                features: example::Seen::default(),
                records: 0,
                held: Vec::new(),
            }),
        }
    }

    pub fn step(&mut self) -> Result<Need> {
        if self.at >= self.size {
            if self.piece_rows > 0 {
                self.end_piece()?;
            }
            return Ok(Need::Done);
        }
        if let Some(seen) = &self.seen
            && seen.records < SEEN_RECORDS
        {
            let have = self.at + seen.held.len() as u64;
            return Ok(Need::one(have..self.size.min(have + limits::CHUNK_BYTES)));
        }
        let have = self.at + self.head.len() as u64;
        let average = self.at / self.records.max(1);
        // Requests to an origin are rounded to chunks: if records are smaller, hopping over them
        // saves nothing.
        let window = if self.records < 4 {
            64 << 10
        } else if average < limits::CHUNK_BYTES {
            limits::FILL_RUN_MAX_BYTES
        } else {
            4 << 10
        };
        Ok(Need::one(have..self.size.min(have.saturating_add(window))))
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        loop {
            let have = self.at
                + self.head.len() as u64
                + self.seen.as_ref().map_or(0, |s| s.held.len() as u64);
            let fresh = have
                .checked_sub(offset)
                .and_then(|skip| bytes.get(usize::try_from(skip).ok()?..));
            let Some(fresh) = fresh.filter(|f| !f.is_empty() && have < self.size) else {
                return Ok(());
            };
            if let Some(seen) = &mut self.seen {
                // Whole records, to be inspected.
                seen.held
                    .extend_from_slice(&fresh[..fresh.len().min((self.size - have) as usize)]);
                self.look()?;
                continue;
            }
            let missing = (HEAD_BYTES - self.head.len()).min(fresh.len());
            self.head.extend_from_slice(&fresh[..missing]);
            let Some(head) = self.head.first_chunk::<HEAD_BYTES>().copied() else {
                if offset + bytes.len() as u64 >= self.size {
                    return Err(Error::corrupt(format!(
                        "the TFRecord at offset {} is cut off by the end of the file",
                        self.at
                    )));
                }
                return Ok(());
            };
            self.head.clear();
            let len = parse_head(&head, self.at)?;
            self.record(len)?;
        }
    }

    fn look(&mut self) -> Result<()> {
        let Some(mut seen) = self.seen.take() else {
            return Ok(());
        };
        let mut used = 0;
        while seen.records < SEEN_RECORDS {
            let rest = &seen.held[used..];
            let Some((head, _)) = rest.split_first_chunk::<HEAD_BYTES>() else {
                break;
            };
            let len = parse_head(head, self.at)?;
            let whole = HEAD_BYTES as u64 + len + FOOT_BYTES as u64;
            if self.at + whole > self.size {
                return Err(self.cut(len));
            }
            if (rest.len() as u64) < whole {
                break;
            }
            let (record, taken) = next(rest, self.at, true)?;
            let at = self.at;
            seen.features
                .see(record.unwrap_or_default())
                .map_err(|e| e.context(format!("the TFRecord at offset {at}")))?;
            seen.records += 1;
            used += taken;
            self.record(len)?;
        }
        seen.held.drain(..used);
        if self.at + seen.held.len() as u64 == self.size
            && !seen.held.is_empty()
            && seen.records < SEEN_RECORDS
        {
            return Err(Error::corrupt(format!(
                "the TFRecord at offset {} is cut off by the end of the file",
                self.at
            )));
        }
        // The rest of the buffer is read again, by hopping.
        if seen.records >= SEEN_RECORDS {
            seen.held = Vec::new();
            let fields = seen.features.schema();
            self.options.example = Some(example::of_schema(&fields)?);
        } else {
            self.seen = Some(seen);
        }
        Ok(())
    }

    fn cut(&self, len: u64) -> Error {
        Error::corrupt(format!(
            "the TFRecord at offset {} announces {len} bytes, past the end of the file at {}",
            self.at, self.size
        ))
    }

    /// A record with this many bytes of data was found.
    fn record(&mut self, len: u64) -> Result<()> {
        let end = self
            .at
            .checked_add(len)
            .and_then(|end| end.checked_add((HEAD_BYTES + FOOT_BYTES) as u64));
        let Some(end) = end.filter(|&end| end <= self.size) else {
            return Err(self.cut(len));
        };
        self.at = end;
        self.records += 1;
        self.piece_rows += 1;
        if end - self.piece_start >= self.options.piece_bytes
            || self.piece_rows >= u64::from(self.options.block_rows)
        {
            self.end_piece()?;
        }
        Ok(())
    }

    fn end_piece(&mut self) -> Result<()> {
        self.blocks.run(
            self.piece_rows,
            self.piece_start..self.at,
            self.options.block_bytes,
            self.options.block_rows,
        )?;
        (self.piece_start, self.piece_rows) = (self.at, 0);
        Ok(())
    }

    /// Takes the records from a file of offsets: only the records that show the features are left
    /// to read.
    pub(super) fn records_from(
        &mut self,
        records: impl IntoIterator<Item = Result<(u64, u64)>>,
    ) -> Result<()> {
        for record in records {
            let (offset, bytes) = record?;
            let data = bytes
                .checked_sub((HEAD_BYTES + FOOT_BYTES) as u64)
                .filter(|_| offset == self.at && bytes > 0)
                .ok_or_else(|| {
                    Error::corrupt(format!(
                        "the file of offsets has a record of {bytes} bytes at offset {offset}, and \
                     the next record is at {}",
                        self.at
                    ))
                    .hint("write it again, or remove it")
                })?;
            self.record(data)?;
        }
        if self.at != self.size {
            return Err(Error::corrupt(format!(
                "the file of offsets ends at {}, and the TFRecord file at {}",
                self.at, self.size
            ))
            .hint("write it again, or remove it"));
        }
        if self.piece_rows > 0 {
            self.end_piece()?;
        }
        Ok(())
    }

    pub fn finish(self) -> Result<FileIndex> {
        let schema: SchemaRef = match (&self.options.example, &self.seen) {
            (None, _) => Arc::new(Schema::new(vec![Field::new(
                "data",
                DataType::Binary,
                false,
            )])),
            (Some(_), Some(seen)) => seen.features.schema(),
            (Some(spec), None) => example::schema(spec),
        };
        Ok(FileIndex {
            format: Format::TfRecord,
            size: self.size,
            blocks: self.blocks.finish(),
            schema: self.options.schemas.share(schema),
            detail: Detail::TfRecord {
                example: self.options.example.is_some(),
            },
        })
    }
}
