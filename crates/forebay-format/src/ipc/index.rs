//! Finds the batches of Arrow files and streams.

use super::{
    Dictionary, Places,
    message::{PREFIX_BYTES, Prefix, decode_schema, header, prefix, schema},
};
use crate::{
    parquet::guarded,
    tabular::{BlockIndexBuilder, Detail, FileIndex, Format, Held, IndexOptions, Need, Schemas},
};
use arrow_ipc::{Block, MessageHeader, root_as_footer};
use arrow_schema::{Schema, SchemaRef};
use bytes::Bytes;
use forebay_core::{Error, Result, limits};
use std::{collections::VecDeque, ops::Range, sync::Arc};

/// The magic bytes at a file's end, and the length of the footer before them.
const TAIL_BYTES: u64 = 10;
/// Headers requested at a time.
const HEADS_AT_A_TIME: usize = 64;

/// Finds the batches of a file: from its footer, then from their headers.
#[derive(Debug)]
pub(crate) struct FileIndexer {
    size: u64,
    schemas: Arc<Schemas>,
    held: Held,
    footer: Option<Footer>,
    blocks: BlockIndexBuilder,
}

#[derive(Debug)]
struct Footer {
    places: Places,
    schema: SchemaRef,
    /// Batches whose headers have not been read yet: offset, head, whole length.
    left: VecDeque<(u64, u32, u64)>,
}

impl FileIndexer {
    pub fn new(size: u64, options: &IndexOptions) -> Self {
        Self {
            size,
            schemas: options.schemas.clone(),
            held: Held::default(),
            footer: None,
            blocks: BlockIndexBuilder::new(size),
        }
    }

    pub fn step(&mut self) -> Result<Need> {
        if self.size < TAIL_BYTES + 8 {
            return Err(Error::corrupt(format!(
                "a file of {} bytes is too short for an Arrow file",
                self.size
            )));
        }
        if self.footer.is_none() {
            let Some(tail) = self.held.get(&(self.size - TAIL_BYTES..self.size)) else {
                return Ok(Need::one(
                    self.size.saturating_sub(limits::FOOTER_FIRST_READ_BYTES)..self.size,
                ));
            };
            let range = footer_range(&tail, self.size)?;
            let Some(bytes) = self.held.get(&range) else {
                return Ok(Need::one(range));
            };
            self.footer = Some(self.read_footer(&bytes, range)?);
        }
        let Some(footer) = &mut self.footer else {
            return Err(Error::internal("an Arrow footer that was read is gone"));
        };
        let mut wanted: Vec<Range<u64>> = Vec::new();
        while let Some(&(at, head, len)) = footer.left.get(wanted.len()) {
            let place = at..at + u64::from(head);
            match self.held.get(&place) {
                Some(bytes) if wanted.is_empty() => {
                    let rows = batch_rows(&bytes, at, len - u64::from(head))?;
                    self.blocks.block(rows, at..at + len)?;
                    footer.places.heads.push(head);
                    footer.left.pop_front();
                }
                _ => wanted.push(place),
            }
            if wanted.len() == HEADS_AT_A_TIME {
                break;
            }
        }
        self.held.clear();
        Ok(if wanted.is_empty() {
            Need::Done
        } else {
            Need::Ranges(wanted)
        })
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.held.put(offset, bytes);
        Ok(())
    }

    fn read_footer(&self, bytes: &[u8], range: Range<u64>) -> Result<Footer> {
        let at = range.start;
        let damaged = |what: &str| {
            Error::corrupt(format!(
                "the Arrow footer at offset {at} is damaged: {what}"
            ))
        };
        let footer = guarded("an Arrow footer", || {
            root_as_footer(bytes).map_err(|e| damaged(&e.to_string()))
        })?;
        let schema = decode_schema(
            footer
                .schema()
                .ok_or_else(|| damaged("it does not have a schema"))?,
            at,
        )?;
        let place = |b: &Block| {
            let place = || {
                let (offset, head) = (
                    u64::try_from(b.offset()).ok()?,
                    u32::try_from(b.metaDataLength()).ok()?,
                );
                let len = u64::from(head).checked_add(u64::try_from(b.bodyLength()).ok()?)?;
                (offset.checked_add(len)? <= at
                    && head as usize > PREFIX_BYTES
                    && u64::from(head) <= limits::FOOTER_MAX_BYTES)
                    .then_some((offset, head, len))
            };
            place().ok_or_else(|| damaged(&format!("it says that a batch is at {}", b.offset())))
        };
        let mut places = Places {
            schema: range.clone(),
            ..Places::default()
        };
        for block in footer.dictionaries().into_iter().flatten() {
            let (offset, head, len) = place(block)?;
            places.dictionaries.push(Dictionary {
                bytes: offset..offset + len,
                head,
                block: 0,
            });
        }
        let left = footer
            .recordBatches()
            .into_iter()
            .flatten()
            .map(place)
            .collect::<Result<VecDeque<_>>>()?;
        if left.len() > limits::FILE_PIECES_MAX {
            return Err(Error::unsupported(format!(
                "the Arrow file has {} batches; the limit is {}",
                left.len(),
                limits::FILE_PIECES_MAX
            )));
        }
        Ok(Footer {
            places,
            schema: self
                .schemas
                .share(Arc::new(Schema::new(schema.fields().clone()))),
            left,
        })
    }

    pub fn finish(self) -> Result<FileIndex> {
        let footer = self
            .footer
            .ok_or_else(|| Error::internal("the Arrow footer was not read"))?;
        Ok(FileIndex {
            format: Format::ArrowFile,
            size: self.size,
            blocks: self.blocks.finish(),
            schema: footer.schema,
            detail: Detail::Ipc(footer.places),
        })
    }
}

fn footer_range(tail: &[u8], size: u64) -> Result<Range<u64>> {
    let Some((len, magic)) = tail.split_first_chunk::<4>() else {
        return Err(Error::internal("a tail of other than 10 bytes"));
    };
    if magic != b"ARROW1" {
        return Err(Error::corrupt(format!(
            "this is not an Arrow file: bytes {}..{size} are not ARROW1",
            size - 6
        ))
        .hint("if it is a stream, its format is arrow-stream"));
    }
    let len = i32::from_le_bytes(*len);
    match u64::try_from(len)
        .ok()
        .and_then(|len| (size - TAIL_BYTES - 8).checked_sub(len))
    {
        Some(_) if len as u64 > limits::FOOTER_MAX_BYTES => {
            let max = limits::FOOTER_MAX_BYTES;
            Err(Error::unsupported(format!(
                "the Arrow footer is {len} bytes long; the limit is {max}"
            ))
            .hint("write larger batches"))
        }
        Some(start) if len > 0 => Ok(start + 8..size - TAIL_BYTES),
        _ => Err(Error::corrupt(format!(
            "the Arrow footer says that it is {len} bytes long, in a file of {size} bytes"
        ))),
    }
}

/// The number of rows of the batch with this header.
fn batch_rows(bytes: &[u8], at: u64, body: u64) -> Result<u64> {
    let message = header(bytes, at)?;
    let Some(batch) = message.header_as_record_batch() else {
        return Err(Error::corrupt(format!(
            "the Arrow message at offset {at} is not a batch"
        )));
    };
    if message.bodyLength() as u64 > body {
        return Err(Error::corrupt(format!(
            "the Arrow batch at offset {at} claims a body of {} bytes of {body}",
            message.bodyLength()
        )));
    }
    u64::try_from(batch.length()).map_err(|_| {
        Error::corrupt(format!(
            "the Arrow batch at offset {at} has {} rows",
            batch.length()
        ))
    })
}

/// Finds the batches of a stream, hopping from header to header.
#[derive(Debug)]
pub(crate) struct StreamIndexer {
    size: u64,
    at: u64,
    schemas: Arc<Schemas>,
    schema: Option<SchemaRef>,
    places: Places,
    blocks: BlockIndexBuilder,
    held: Held,
    ended: bool,
}

impl StreamIndexer {
    pub fn new(size: u64, options: &IndexOptions) -> Self {
        Self {
            size,
            at: 0,
            schemas: options.schemas.clone(),
            schema: None,
            places: Places::default(),
            blocks: BlockIndexBuilder::new(size),
            held: Held::default(),
            ended: false,
        }
    }

    pub fn step(&mut self) -> Result<Need> {
        loop {
            // A stream may simply end between two messages.
            if self.ended || (self.at == self.size && self.schema.is_some()) {
                return Ok(Need::Done);
            }
            let at = self.at;
            let left = self.size - at;
            if left < PREFIX_BYTES as u64 && !(left >= 4 && self.schema.is_some()) {
                return Err(Error::corrupt(format!(
                    "the Arrow stream is cut off at offset {at}"
                )));
            }
            let Some(start) = self.held.get(&(at..at + left.min(PREFIX_BYTES as u64))) else {
                return Ok(self.want(left.min(PREFIX_BYTES as u64)));
            };
            let Prefix::Head { len, .. } = prefix(&start, at)? else {
                if self.schema.is_none() {
                    return Err(Error::corrupt(format!(
                        "the Arrow stream ends at offset {at}, before its schema"
                    )));
                }
                self.ended = true;
                continue;
            };
            if len as u64 > left {
                return Err(Error::corrupt(format!(
                    "the Arrow message at offset {at} goes on past the end of the stream at {}",
                    self.size
                )));
            }
            let Some(head) = self.held.get(&(at..at + len as u64)) else {
                return Ok(self.want(len as u64));
            };
            self.message(&head)?;
        }
    }

    fn message(&mut self, head: &[u8]) -> Result<()> {
        let at = self.at;
        let message = header(head, at)?;
        let len = head.len() as u64 + message.bodyLength() as u64;
        if len > self.size - at {
            return Err(Error::corrupt(format!(
                "the Arrow message at offset {at} is {len} bytes long and goes on past the end \
                 of the stream at {}",
                self.size
            )));
        }
        let place = at..at + len;
        match (message.header_type(), &self.schema) {
            (MessageHeader::Schema, None) => {
                let schema = schema(&message, at)?;
                self.schema = Some(
                    self.schemas
                        .share(Arc::new(Schema::new(schema.fields().clone()))),
                );
                self.places.schema = at..at + head.len() as u64;
            }
            (MessageHeader::DictionaryBatch, Some(_)) => {
                self.places.dictionaries.push(Dictionary {
                    bytes: place,
                    head: head.len() as u32,
                    block: self.blocks.index().blocks() as u32,
                })
            }
            (MessageHeader::RecordBatch, Some(_)) => {
                self.blocks
                    .block(batch_rows(head, at, message.bodyLength() as u64)?, place)?;
                self.places.heads.push(head.len() as u32);
            }
            (other, _) => {
                let what = other.variant_name().unwrap_or("unknown");
                return Err(Error::corrupt(format!(
                    "the Arrow stream has a message of kind {what} at offset {at}, where none \
                     belongs"
                )));
            }
        }
        self.at += len;
        Ok(())
    }

    fn want(&mut self, at_least: u64) -> Need {
        let batches = self.blocks.index().blocks() as u64;
        // Requests to an origin are rounded to chunks: if batches are smaller, hopping over them
        // saves nothing.
        let window = match self.at / batches.max(1) {
            _ if batches < 2 => 64 << 10,
            average if average < limits::CHUNK_BYTES => limits::FILL_RUN_MAX_BYTES,
            _ => 16 << 10,
        };
        self.held.clear();
        Need::one(self.at..self.size.min(self.at + window.max(at_least)))
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.held.put(offset, bytes);
        Ok(())
    }

    pub fn finish(self) -> Result<FileIndex> {
        let schema = self
            .schema
            .ok_or_else(|| Error::internal("the Arrow stream was not read"))?;
        let blocks = self.blocks.finish();
        Ok(FileIndex {
            format: Format::ArrowStream,
            size: self.size,
            blocks,
            schema,
            detail: Detail::Ipc(self.places),
        })
    }
}
